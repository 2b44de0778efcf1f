//! Products of many rows by cuBLASLt, where the machine has it: it knows its devices better than we do.
//!
//! Which of its algorithms computes a product depends on the number of rows, and so do the bits.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{size_of, size_of_val};
use std::ptr::from_ref;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasStatus_t, cudaDataType};

use super::device::{Address, Context, Device, Memory, launch};
use super::matrix::{Matrix, pitch};
use super::{grow, row_shape};
use crate::error::Result;
use crate::options::Dtype;

/// What NVIDIA advises for Hopper, and enough for the others.
const WORKSPACE: u64 = 32 << 20;

/// As cuBLAS numbers it: cudarc has the name elsewhere.
const TRANSPOSED: i32 = 1;

type Called<T> = std::result::Result<T, CublasError>;

pub struct Blas {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    room: Mutex<Room>,
}

#[derive(Default)]
struct Room {
    workspace: Option<Memory>,
    /// Rows as matrices are stored, on their way into a product.
    rounded: Option<Memory>,
    /// By what it was chosen for. None: there is none.
    algorithms: HashMap<Kind, Option<sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: a handle may be used by several threads, says its documentation.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Products that one algorithm computes: of up to so many rows, for which it is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    rows: usize,
    outs: usize,
    cols: usize,
    dtype: Dtype,
    bias: bool,
}

/// out = w * x + bias
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub rows: usize,
    pub x: Address, // [rows, cols], f32
    pub w: &'a Matrix,
    pub bias: Address, // [outs] or nowhere
    pub out: Address,  // [rows, outs], f32
}

impl Blas {
    /// None: the machine has no cuBLASLt, or one that does not work here.
    pub fn open(device: &Device) -> Option<Blas> {
        // SAFETY: opens the library, which its makers mean to be opened. cudarc panics where it looks for one in vain.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        let handle = device.context().within(result::create_handle).ok()?.ok()?;
        Some(Blas { context: device.context().clone(), handle, room: Mutex::default() })
    }

    pub fn bytes(rows: usize, cols: usize) -> u64 {
        WORKSPACE + rounded_bytes(rows, cols)
    }

    /// Makes room for products of so many rows of at most so many columns.
    pub fn reserve(&self, device: &Device, rows: usize, cols: usize) -> Result<()> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        grow(device, &mut room.workspace, WORKSPACE)?;
        grow(device, &mut room.rounded, rounded_bytes(rows, cols)).map(|_| ())
    }

    /// Queues a product. False: it does not know how, or there is no room.
    pub fn multiply(&self, device: &Device, product: Product) -> bool {
        let Product { rows, w, .. } = product;
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let Room { workspace: Some(workspace), rounded: Some(rounded), algorithms } = &mut *room else { return false };
        if !device.takes_ops() {
            return true;
        }
        if rounded.bytes() < rounded_bytes(rows, w.cols) {
            return false;
        }
        let to_stored = if w.dtype == Dtype::F16 { device.kernels.to_f16 } else { device.kernels.to_bf16 };
        launch!(device, to_stored, row_shape(rows, w.cols), rounded.address(), product.x, w.cols as u32);
        let queued = self.context.within(|| self.queue(device, &Product { x: rounded.address(), ..product }, workspace, algorithms));
        matches!(queued, Ok(Ok(())))
    }

    /// Its matrices lie column by column: ours, row by row, are theirs transposed. So it computes transposed(out) = transposed(w) * x, w being
    /// transposed once more.
    fn queue(
        &self,
        device: &Device,
        product: &Product,
        workspace: &Memory,
        algorithms: &mut HashMap<Kind, Option<sys::cublasLtMatmulAlgo_t>>,
    ) -> Called<()> {
        let &Product { rows, x, w, bias, out } = product;
        let operation = Operation::new(bias)?;
        let kind = Kind { rows: rows.next_power_of_two(), outs: w.rows, cols: w.cols, dtype: w.dtype, bias: bias != Address::NULL };
        let known = algorithms.entry(kind).or_insert_with(|| self.algorithm(&operation, &Layouts::new(w, kind.rows).ok()?).ok());
        let Some(algorithm) = known else { return Err(CublasError(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) };
        let layouts = Layouts::new(w, rows)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the layouts are those of the buffers, which the ops of `mod.rs` have made so large; alpha and beta are read before the call returns.
        let queued = unsafe {
            result::matmul(
                self.handle,
                operation.0,
                from_ref(&one).cast(),
                from_ref(&zero).cast(),
                w.address().0 as *const c_void,
                layouts.w.0,
                x.0 as *const c_void,
                layouts.x.0,
                out.0 as *const c_void,
                layouts.out.0,
                out.0 as *mut c_void,
                layouts.out.0,
                algorithm,
                workspace.address().0 as *mut c_void,
                WORKSPACE as usize,
                device.stream().cast(),
            )
        };
        if queued.is_err() {
            *known = None; // it is not asked again
        }
        queued
    }

    fn algorithm(&self, operation: &Operation, Layouts { w, x, out }: &Layouts) -> Called<sys::cublasLtMatmulAlgo_t> {
        let preference = Preference::new()?;
        // SAFETY: all of them are alive.
        let found = unsafe { result::get_matmul_algo_heuristic(self.handle, operation.0, w.0, x.0, out.0, out.0, preference.0) }?;
        Ok(found.algo)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        let _ = self.context.within(|| unsafe { result::destroy_handle(self.handle) });
    }
}

fn rounded_bytes(rows: usize, cols: usize) -> u64 {
    (rows * pitch(cols) * size_of::<u16>()) as u64
}

/// Of a product's matrices.
struct Layouts {
    w: Layout,
    x: Layout,
    out: Layout,
}

impl Layouts {
    fn new(w: &Matrix, rows: usize) -> Called<Layouts> {
        let stored = data_type(w.dtype);
        Ok(Layouts {
            w: Layout::new(stored, w.cols, w.rows, w.pitch())?,
            x: Layout::new(stored, w.cols, rows, pitch(w.cols))?,
            out: Layout::new(cudaDataType::CUDA_R_32F, w.rows, rows, w.rows)?,
        })
    }
}

fn data_type(dtype: Dtype) -> cudaDataType {
    match dtype {
        Dtype::F32 => cudaDataType::CUDA_R_32F,
        Dtype::F16 => cudaDataType::CUDA_R_16F,
        Dtype::Bf16 => cudaDataType::CUDA_R_16BF,
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Of columns that are `apart`.
    fn new(dtype: cudaDataType, rows: usize, cols: usize, apart: usize) -> Called<Layout> {
        result::create_matrix_layout(dtype, rows as u64, cols as u64, apart as i64).map(Layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and dropped once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    /// The first matrix transposed, and a bias where there is one.
    fn new(bias: Address) -> Called<Operation> {
        use cublasLtMatmulDescAttributes_t::*;
        let operation = Operation(result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?);
        operation.set(CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if bias != Address::NULL {
            operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE, sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            operation.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.0)?;
        }
        Ok(operation)
    }

    fn set<T: Copy>(&self, attribute: cublasLtMatmulDescAttributes_t, value: T) -> Called<()> {
        // SAFETY: the description is alive, and the value of the attribute's type.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, from_ref(&value).cast(), size_of_val(&value)) }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and dropped once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Called<Preference> {
        let preference = Preference(result::create_matmul_pref()?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference is alive, and this attribute a u64.
        unsafe { result::set_matmul_pref_attribute(preference.0, attribute, from_ref(&WORKSPACE).cast(), size_of::<u64>()) }?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and dropped once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
