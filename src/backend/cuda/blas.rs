//! Products of many rows by cuBLASLt, if it is installed, because it is tuned for each device.
//!
//! The algorithm, and so the bits of a result, depends on the number of rows.
//!
//! Weights in fp8 are multiplied by rows in fp8 with one scale per row, so that a row does not
//! depend on other rows. On Hopper, cuBLASLt applies the scales of rows and outputs. On other
//! devices, a kernel applies them. A kernel also adds the bias, because cuBLASLt would add it in
//! bf16.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t::{self, *};
use cudarc::cublaslt::sys::{self, cublasComputeType_t, cudaDataType};

use super::blas_library::{BlasError, BlasLibrary, Called, Operands};
use super::context::Context;
use super::device::Device;
use super::function::{Shape, launch};
use super::matrix::Part;
use super::memory::{Address, Memory};
use super::stored::Stored;
use crate::error::Result;
use crate::types::options::Dtype;

/// Workspace in bytes: NVIDIA's recommendation for Hopper, which suffices for other devices.
const WORKSPACE: u64 = 32 << 20;

/// The value of CUBLAS_OP_T; cudarc defines the name in another module.
const TRANSPOSED: i32 = 1;

pub struct Blas {
    context: Arc<Context>,
    library: &'static BlasLibrary,
    handle: sys::cublasLtHandle_t,
    memory: Mutex<Workspace>,
}

#[derive(Default)]
struct Workspace {
    workspace: Option<Memory>,
    /// Rows in the storage type of the matrix, as input of a product. In fp8, they are followed by
    /// their scales.
    rounded: Option<Memory>,
    /// Algorithms by kind of product. None: cuBLASLt does not support it.
    algorithms: HashMap<Kind, Option<Algorithm>>,
}

// SAFETY: the cuBLASLt documentation permits concurrent use of a handle. Descriptors are used only
// under the lock of `memory`.
unsafe impl Send for Blas {}
// SAFETY: as for Send, the handle permits concurrent use and the lock protects the descriptors.
unsafe impl Sync for Blas {}

/// A class of products that use one algorithm. `rows` is the upper bound for which it is selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    rows: usize,
    outs: usize,
    cols: usize,
    stored: Stored,
    bias: bool,
}

struct Algorithm {
    operation: Operation,
    layouts: Layouts,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// out = w * x + bias.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub rows: usize,
    pub x: Address, // [rows, cols], f32 or rounded
    /// True if `x` is in the type of the matrix.
    pub rounded: bool,
    pub w: &'a Part,
    pub bias: Address, // [outs] or null
    pub out: Address,  // [rows, outs], f32
}

impl Blas {
    /// Opens cuBLASLt. The error says why it cannot be used.
    pub fn open(device: &Device) -> std::result::Result<Blas, String> {
        let library = BlasLibrary::load(device.driver_version)?;
        match device.context().within(|| library.create()) {
            Ok(Ok(handle)) => Ok(Blas { context: device.context().clone(), library, handle, memory: Mutex::default() }),
            result => Err(format!("{library} does not work on this device ({result:?})")),
        }
    }

    pub fn library(&self) -> &'static BlasLibrary {
        self.library
    }

    pub fn bytes(rows: usize, cols: usize) -> u64 {
        WORKSPACE + rounded_bytes(Stored::As(Dtype::Bf16), rows, cols)
    }

    /// Allocates memory for products of up to `rows` rows with up to `cols` columns.
    pub fn reserve(&self, device: &Device, rows: usize, cols: usize) -> Result<()> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        device.grow(&mut memory.workspace, WORKSPACE)?;
        device.grow(&mut memory.rounded, rounded_bytes(Stored::As(Dtype::Bf16), rows, cols)).map(|_| ())
    }

    /// Queues a product. Returns false if cuBLASLt does not support it or the reserved memory is
    /// too small.
    pub fn multiply(&self, device: &Device, product: Product) -> bool {
        let Product { rows, x, w, .. } = product;
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Workspace { workspace: Some(workspace), rounded: Some(rounded), algorithms } = &mut *memory else { return false };
        if !device.takes_ops() {
            return true;
        }
        if !product.rounded && rounded.bytes() < rounded_bytes(w.stored, rows, w.cols) {
            return false;
        }
        let operand = if product.rounded { x } else { rounded.address() };
        let product = Product { x: operand, ..product };
        let known = algorithms.entry(product.kind()).or_insert_with(|| self.context.within(|| self.find(&product)).ok()?.ok());
        let Some(algorithm) = known else { return false };
        if !product.rounded {
            product.round(device, x);
        }
        let (queued, scaled) = (self.context.within(|| self.queue(device, &product, workspace, algorithm)), algorithm.operation.scales);
        if !matches!(queued, Ok(Ok(()))) {
            *known = None; // not tried again
            return false;
        }
        product.finish(device, scaled);
        true
    }

    /// Selects an algorithm for this kind of product: with scales in the epilogue if supported, for
    /// fp8.
    fn find(&self, product: &Product) -> Called<Algorithm> {
        let find = |scales| {
            let (operation, layouts) =
                (Operation::new(self.library, product.epilogue_bias() != Address::NULL, scales)?, Layouts::new(self.library, product)?);
            operation.point(product)?;
            let algorithm = self.algorithm(&operation, &layouts)?;
            Ok(Algorithm { operation, layouts, algorithm })
        };
        match product.w.stored {
            Stored::As(_) | Stored::Int8 | Stored::Records(_) => find(false),
            Stored::Fp8 => find(true).or_else(|_: BlasError| find(false)),
        }
    }

    /// Queues the product. cuBLASLt stores matrices by column, so our row-major matrices are its
    /// transposed ones: it computes transposed(out) = transposed(w) * x, with w transposed once
    /// more.
    fn queue(&self, device: &Device, product: &Product, workspace: &Memory, algorithm: &Algorithm) -> Called<()> {
        let &Product { rows, x, w, out, .. } = product;
        let Algorithm { operation, layouts, algorithm } = algorithm;
        operation.point(product)?;
        layouts.set_rows(rows)?;
        let operands = Operands {
            a: (w.address.0 as *const c_void, layouts.w.handle),
            b: (x.0 as *const c_void, layouts.x.handle),
            d: (out.0 as *mut c_void, layouts.out.handle),
            workspace: (workspace.address().0 as *mut c_void, WORKSPACE as usize),
            stream: device.stream().cast(),
        };
        // SAFETY: the layouts match the buffers, whose sizes the ops in `ops.rs` guarantee.
        unsafe { self.library.multiply(self.handle, operation.handle, operands, algorithm) }
    }

    fn algorithm(&self, operation: &Operation, Layouts { w, x, out }: &Layouts) -> Called<sys::cublasLtMatmulAlgo_t> {
        let preference = Preference::new(self.library)?;
        // SAFETY: all handles are alive.
        unsafe { self.library.select(self.handle, operation.handle, [w.handle, x.handle, out.handle], preference.handle) }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: `self` is the last user of the handle.
        let _ = self.context.within(|| unsafe { self.library.destroy(self.handle) });
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

    /// Returns the bias that cuBLASLt adds, or null.
    fn epilogue_bias(&self) -> Address {
        if self.w.stored == Stored::Fp8 { Address::NULL } else { self.bias }
    }

    /// Returns the address of the scales of converted rows.
    fn row_scales(&self) -> Address {
        self.x.at((self.rows * self.w.stored.row_bytes(self.w.cols)) as u64)
    }

    /// Converts rows to the storage type of the weights.
    fn round(&self, device: &Device, rows: Address) {
        let (kernels, cols, shape) = (&device.kernels, self.w.cols as u32, Shape::for_rows(self.rows, self.w.cols));
        match self.w.stored {
            Stored::Fp8 => launch!(device, kernels.conversions.to_fp8, shape, self.x, self.row_scales(), rows, cols),
            Stored::As(Dtype::F16) => launch!(device, kernels.conversions.to_f16, shape, self.x, rows, cols),
            Stored::As(_) | Stored::Int8 | Stored::Records(_) => launch!(device, kernels.conversions.to_bf16, shape, self.x, rows, cols),
        }
    }

    /// Applies the scales and the bias that cuBLASLt has not applied.
    fn finish(&self, device: &Device, scaled: bool) {
        let Product { rows, w, bias, out, .. } = *self;
        if w.stored == Stored::Fp8 && (!scaled || bias != Address::NULL) {
            let row_scales = if scaled { Address::NULL } else { self.row_scales() };
            let shape = Shape::for_numbers(rows, w.rows);
            launch!(device, device.kernels.conversions.scale_product, shape, out, row_scales, w.scales(), bias, w.rows as u32);
        }
    }
}

/// The layouts of a product's matrices. The zero padding of rows of w and x is multiplied too, so
/// that all dimensions are aligned.
struct Layouts {
    w: Layout,
    x: Layout,
    out: Layout,
}

impl Layouts {
    fn new(library: &'static BlasLibrary, product: &Product) -> Called<Layouts> {
        let (w, rows) = (product.w, product.kind().rows);
        let (stored, pitch) = (data_type(w.stored), w.pitch());
        Ok(Layouts {
            w: Layout::new(library, stored, pitch, w.rows)?,
            x: Layout::new(library, stored, pitch, rows)?,
            out: Layout::new(library, cudaDataType::CUDA_R_32F, w.rows, rows)?,
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
        // Integers and records are not multiplied here.
        Stored::As(Dtype::Bf16) | Stored::Int8 | Stored::Records(_) => cudaDataType::CUDA_R_16BF,
        Stored::Fp8 => cudaDataType::CUDA_R_8F_E4M3,
    }
}

struct Layout {
    library: &'static BlasLibrary,
    handle: sys::cublasLtMatrixLayout_t,
}

impl Layout {
    /// Creates a column-major layout.
    fn new(library: &'static BlasLibrary, dtype: cudaDataType, rows: usize, cols: usize) -> Called<Layout> {
        library.create_layout(dtype, rows, cols).map(|handle| Layout { library, handle })
    }

    fn set_cols(&self, cols: usize) -> Called<()> {
        let attribute = sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS;
        // SAFETY: the layout is alive, and this attribute is a u64.
        unsafe { self.library.set_layout(self.handle, attribute, &(cols as u64)) }
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and it is destroyed once.
        unsafe { self.library.destroy_layout(self.handle) };
    }
}

struct Operation {
    library: &'static BlasLibrary,
    handle: sys::cublasLtMatmulDesc_t,
    bias: bool,
    /// True if cuBLASLt applies the scales of rows and outputs.
    scales: bool,
}

impl Operation {
    /// Creates a descriptor with the first matrix transposed.
    fn new(library: &'static BlasLibrary, bias: bool, scales: bool) -> Called<Operation> {
        use sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        use sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as OUTER;
        let handle = library.create_operation(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
        let operation = Operation { library, handle, bias, scales };
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

    /// Sets the addresses of a product's bias and scales.
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
        // SAFETY: the descriptor is alive, and the value has the attribute's type.
        unsafe { self.library.set_operation(self.handle, attribute, &value) }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and it is destroyed once.
        unsafe { self.library.destroy_operation(self.handle) };
    }
}

struct Preference {
    library: &'static BlasLibrary,
    handle: sys::cublasLtMatmulPreference_t,
}

impl Preference {
    fn new(library: &'static BlasLibrary) -> Called<Preference> {
        let preference = Preference { library, handle: library.create_preference()? };
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference is alive, and this attribute is a u64.
        unsafe { library.set_preference(preference.handle, attribute, &WORKSPACE) }?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and it is destroyed once.
        unsafe { self.library.destroy_preference(self.handle) };
    }
}
