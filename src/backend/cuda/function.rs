//! Kernels of a module, and their launch configurations.

use std::ffi::{CString, c_int, c_void};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use super::address::Address;
use super::errors::{Called, failed};
use crate::error::{Error, Result};

pub const WARP: usize = 32;
/// Threads per block of elementwise kernels.
pub const FLAT: u32 = 256;

/// The first PTX version whose kernels wait for the previous one themselves
/// (`wait_for_previous_kernel` in `kernels/common.cuh`).
const WAITING_PTX: c_int = 90;

/// A kernel of the device's module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Function {
    handle: sys::CUfunction,
    /// True if the kernel may start while the previous one is running.
    starts_early: bool,
}

// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Send for Function {}
// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Sync for Function {}

impl Function {
    /// Loads a kernel by its name. The module's context is current. None: the module has no such
    /// kernel.
    pub fn load(module: sys::CUmodule, name: &str) -> Result<Option<Function>> {
        let symbol = CString::new(name).map_err(|_| Error::internal("the name of a kernel has a NUL byte"))?;
        // SAFETY: the module was loaded in the current context, and is not unloaded before the
        // context is destroyed.
        let function = match unsafe { result::module::get_function(module, symbol) } {
            Ok(function) => function,
            Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND)) => return Ok(None),
            Err(e) => return Err(failed("find a kernel", e)),
        };
        load_now(function).map_err(|e| failed("load a kernel", e))?;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: as above.
        let version = unsafe { result::function::get_function_attribute(function, which) };
        let version = version.map_err(|e| failed("report an attribute of a kernel", e))?;
        Ok(Some(Function { handle: function, starts_early: version >= WAITING_PTX }))
    }

    /// Permits launches with more than the default 48 KiB of dynamic shared memory.
    pub fn allow_shared(self, bytes: u32) -> Result<()> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a module in the current context.
        let allowed = unsafe { result::function::set_function_attribute(self.handle, which, bytes as c_int) };
        allowed.map_err(|e| failed("raise the limit of shared memory", e))
    }

    /// Queues the kernel.
    ///
    /// # Safety
    /// The arguments are those of its signature, with buffers of the sizes that it states. Function
    /// and stream belong to the current context.
    pub unsafe fn launch(self, Shape { grid, threads, shared }: Shape, stream: sys::CUstream, arguments: &mut [*mut c_void]) -> Called<()> {
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream,
            attrs: &mut early,
            numAttrs: self.starts_early.into(),
        };
        // SAFETY: the caller guarantees the arguments, and the configuration outlives the call.
        unsafe { sys::cuLaunchKernelEx(&config, self.handle, arguments.as_mut_ptr(), std::ptr::null_mut()) }.result()
    }
}

/// Loads the code of a kernel now and not at its first launch, because it takes memory.
fn load_now(function: sys::CUfunction) -> Called<()> {
    type Load = unsafe extern "C" fn(sys::CUfunction) -> CUresult;
    // SAFETY: the driver is loaded, and this is the signature of the function.
    match unsafe { sys::culib().get::<Load>("cuFuncLoad") } {
        // SAFETY: the function was just obtained from its module.
        Ok(load) => unsafe { load(function) }.result(),
        // Drivers before CUDA 12.4 load a kernel when it is obtained from its module.
        Err(_) => Ok(()),
    }
}

/// The launch configuration: blocks, threads per block, and bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub grid: (u32, u32, u32),
    pub threads: u32,
    pub shared: u32,
}

impl Shape {
    pub fn new(grid: (u32, u32, u32), threads: u32) -> Shape {
        Shape { grid, threads, shared: 0 }
    }

    /// Returns one block of whole warps per row. The number of threads, and so the order of
    /// summation, depends on the width only.
    pub fn for_rows(rows: usize, width: usize) -> Shape {
        Shape::new((rows as u32, 1, 1), row_threads(width))
    }

    /// Returns one thread per number of rows of `width`.
    pub fn for_numbers(rows: usize, width: usize) -> Shape {
        Shape::new((rows as u32, width.div_ceil(FLAT as usize) as u32, 1), FLAT)
    }
}

/// Returns the threads of a block that processes a row of `width` numbers.
pub fn row_threads(width: usize) -> u32 {
    width.next_multiple_of(WARP).clamp(WARP, 512) as u32
}

/// A type of kernel arguments.
pub trait Argument: Copy {}
impl Argument for Address {}
impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for f32 {}

pub fn argument<T: Argument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Launches a kernel. The arguments must have exactly the types of its parameters.
macro_rules! launch {
    ($device:expr, $function:expr, $shape:expr, $($argument:expr),+ $(,)?) => {
        $device.launch($function, $shape, &mut [$($crate::backend::cuda::function::argument(&$argument)),+])
    };
}
pub(super) use launch;
