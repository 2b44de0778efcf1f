//! Products of many rows by cuBLASLt, where the machine has it: it knows its devices better than we do.
//!
//! Which of its algorithms computes a product depends on the number of rows, and so do the bits.
//!
//! Weights in fp8 it multiplies by rows in fp8, each of which has a scale of its own, so that it depends on no other. On Hopper cuBLASLt applies the
//! scales of rows and of outputs to its sums; elsewhere, and for the bias, which it would add in bf16, a kernel does.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{size_of, size_of_val};
use std::ptr::from_ref;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t::{self, *};
use cudarc::cublaslt::sys::{self, cublasComputeType_t, cudaDataType};

use super::context::Context;
use super::device::{Address, Device, Memory, launch};
use super::matrix::{Matrix, Stored};
use super::{grid_shape, grow, row_shape};
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
    /// Rows as matrices are stored, on their way into a product; behind those in fp8 their scales.
    rounded: Option<Memory>,
    /// By what they compute. None: it does not know how.
    ways: HashMap<Kind, Option<Way>>,
}

// SAFETY: a handle may be used by several threads, says its documentation; what describes products is used by who holds the lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Products that are computed in one way: of up to so many rows, for which it is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    rows: usize,
    outs: usize,
    cols: usize,
    stored: Stored,
    bias: bool,
}

struct Way {
    operation: Operation,
    layouts: Layouts,
    algorithm: sys::cublasLtMatmulAlgo_t,
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
        WORKSPACE + rounded_bytes(Stored::As(Dtype::Bf16), rows, cols)
    }

    /// Makes room for products of so many rows of at most so many columns.
    pub fn reserve(&self, device: &Device, rows: usize, cols: usize) -> Result<()> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        grow(device, &mut room.workspace, WORKSPACE)?;
        grow(device, &mut room.rounded, rounded_bytes(Stored::As(Dtype::Bf16), rows, cols)).map(|_| ())
    }

    /// Queues a product. False: it does not know how, or there is no room.
    pub fn multiply(&self, device: &Device, product: Product) -> bool {
        let Product { rows, x, w, .. } = product;
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let Room { workspace: Some(workspace), rounded: Some(rounded), ways } = &mut *room else { return false };
        if !device.takes_ops() {
            return true;
        }
        if rounded.bytes() < rounded_bytes(w.stored, rows, w.cols) {
            return false;
        }
        let product = Product { x: rounded.address(), ..product };
        let known = ways.entry(product.kind()).or_insert_with(|| self.context.within(|| self.find(&product)).ok()?.ok());
        let Some(way) = known else { return false };
        product.round(device, x);
        let (queued, scaled) = (self.context.within(|| self.queue(device, &product, workspace, way)), way.operation.scales);
        if !matches!(queued, Ok(Ok(()))) {
            *known = None; // it is not asked again
            return false;
        }
        product.finish(device, scaled);
        true
    }

    /// How products like this one are computed: where they have scales with these, if it can.
    fn find(&self, product: &Product) -> Called<Way> {
        let find = |scales| {
            let (operation, layouts) = (Operation::new(product.epilogue_bias() != Address::NULL, scales)?, Layouts::new(product)?);
            operation.point(product)?;
            let algorithm = self.algorithm(&operation, &layouts)?;
            Ok(Way { operation, layouts, algorithm })
        };
        match product.w.stored {
            Stored::As(_) => find(false),
            Stored::Fp8 => find(true).or_else(|_: CublasError| find(false)),
        }
    }

    /// Its matrices lie column by column: ours, row by row, are theirs transposed. So it computes transposed(out) = transposed(w) * x, w being
    /// transposed once more.
    fn queue(&self, device: &Device, product: &Product, workspace: &Memory, way: &Way) -> Called<()> {
        let &Product { rows, x, w, out, .. } = product;
        let Way { operation, layouts, algorithm } = way;
        operation.point(product)?;
        layouts.set_rows(rows)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the layouts are those of the buffers, which the ops of `mod.rs` have made so large; alpha and beta are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                operation.handle,
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
        }
    }

    fn algorithm(&self, operation: &Operation, Layouts { w, x, out }: &Layouts) -> Called<sys::cublasLtMatmulAlgo_t> {
        let preference = Preference::new()?;
        // SAFETY: all of them are alive.
        let found = unsafe { result::get_matmul_algo_heuristic(self.handle, operation.handle, w.0, x.0, out.0, out.0, preference.0) }?;
        Ok(found.algo)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        let _ = self.context.within(|| unsafe { result::destroy_handle(self.handle) });
    }
}

fn rounded_bytes(stored: Stored, rows: usize, cols: usize) -> u64 {
    (rows * (stored.row_bytes(cols) + stored.scale_bytes())) as u64
}

impl Product<'_> {
    fn kind(&self) -> Kind {
        let (rows, bias) = (self.rows.next_power_of_two(), self.epilogue_bias() != Address::NULL);
        Kind { rows, outs: self.w.rows, cols: self.w.cols, stored: self.w.stored, bias }
    }

    /// The bias that cuBLASLt adds.
    fn epilogue_bias(&self) -> Address {
        if self.w.stored == Stored::Fp8 { Address::NULL } else { self.bias }
    }

    /// Where the scales of rounded rows are.
    fn row_scales(&self) -> Address {
        self.x.at((self.rows * self.w.stored.row_bytes(self.w.cols)) as u64)
    }

    /// Makes of rows what the weights are.
    fn round(&self, device: &Device, rows: Address) {
        let (kernels, cols, shape) = (&device.kernels, self.w.cols as u32, row_shape(self.rows, self.w.cols));
        match self.w.stored {
            Stored::Fp8 => launch!(device, kernels.to_fp8, shape, self.x, self.row_scales(), rows, cols),
            Stored::As(Dtype::F16) => launch!(device, kernels.to_f16, shape, self.x, rows, cols),
            Stored::As(_) => launch!(device, kernels.to_bf16, shape, self.x, rows, cols),
        }
    }

    /// Does what cuBLASLt has not done.
    fn finish(&self, device: &Device, scaled: bool) {
        let Product { rows, w, bias, out, .. } = *self;
        if w.stored == Stored::Fp8 && (!scaled || bias != Address::NULL) {
            let row_scales = if scaled { Address::NULL } else { self.row_scales() };
            let shape = grid_shape(rows, w.rows);
            launch!(device, device.kernels.scale_product, shape, out, row_scales, w.scales(), bias, w.rows as u32);
        }
    }
}

/// Of a product's matrices. What is behind the columns of w and x are zeros, and multiplied, too: so all dimensions are aligned.
struct Layouts {
    w: Layout,
    x: Layout,
    out: Layout,
}

impl Layouts {
    fn new(product: &Product) -> Called<Layouts> {
        let (w, rows) = (product.w, product.kind().rows);
        let (stored, pitch) = (data_type(w.stored), w.pitch());
        Ok(Layouts {
            w: Layout::new(stored, pitch, w.rows)?,
            x: Layout::new(stored, pitch, rows)?,
            out: Layout::new(cudaDataType::CUDA_R_32F, w.rows, rows)?,
        })
    }

    fn set_rows(&self, rows: usize) -> Called<()> {
        self.x.set_cols(rows)?;
        self.out.set_cols(rows)
    }
}

fn data_type(stored: Stored) -> cudaDataType {
    match stored {
        Stored::As(Dtype::F32) => cudaDataType::CUDA_R_32F,
        Stored::As(Dtype::F16) => cudaDataType::CUDA_R_16F,
        Stored::As(Dtype::Bf16) => cudaDataType::CUDA_R_16BF,
        Stored::Fp8 => cudaDataType::CUDA_R_8F_E4M3,
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Column after column.
    fn new(dtype: cudaDataType, rows: usize, cols: usize) -> Called<Layout> {
        result::create_matrix_layout(dtype, rows as u64, cols as u64, rows as i64).map(Layout)
    }

    fn set_cols(&self, cols: usize) -> Called<()> {
        let (attribute, cols) = (sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS, cols as u64);
        // SAFETY: the layout is alive, and this attribute a u64.
        unsafe { result::set_matrix_layout_attribute(self.0, attribute, from_ref(&cols).cast(), size_of::<u64>()) }
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and dropped once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Operation {
    handle: sys::cublasLtMatmulDesc_t,
    bias: bool,
    /// Whether sums are multiplied by the scales of rows and outputs.
    scales: bool,
}

impl Operation {
    /// The first matrix transposed.
    fn new(bias: bool, scales: bool) -> Called<Operation> {
        use sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        use sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as OUTER;
        let handle = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
        let operation = Operation { handle, bias, scales };
        operation.set(CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if bias {
            operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS)?;
        }
        if scales {
            operation.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, OUTER)?;
            operation.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, OUTER)?;
        }
        Ok(operation)
    }

    /// Where a product's vectors are.
    fn point(&self, product: &Product) -> Called<()> {
        if self.bias {
            self.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias.0)?;
        }
        if self.scales {
            self.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.w.scales().0)?;
            self.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.row_scales().0)?;
        }
        Ok(())
    }

    fn set<T: Copy>(&self, attribute: cublasLtMatmulDescAttributes_t, value: T) -> Called<()> {
        // SAFETY: the description is alive, and the value of the attribute's type.
        unsafe { result::set_matmul_desc_attribute(self.handle, attribute, from_ref(&value).cast(), size_of_val(&value)) }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and dropped once.
        let _ = unsafe { result::destroy_matmul_desc(self.handle) };
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
