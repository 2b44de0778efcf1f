//! Errors of the driver, with their remedies.

use std::ffi::c_int;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use crate::error::{Code, Error};

/// The result of a driver function.
pub type Called<T> = std::result::Result<T, DriverError>;

/// Returns true for errors after which the context is unusable, according to the driver's
/// documentation.
pub fn is_sticky(result: CUresult) -> bool {
    use CUresult::*;
    matches!(
        result,
        CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_UNKNOWN
    )
}

pub fn describe(e: DriverError) -> String {
    let name = e.error_name().map_or("unknown error".into(), |name| name.to_string_lossy());
    let text = e.error_string().map_or("".into(), |text| text.to_string_lossy());
    format!("{name} ({}): {text}", e.0 as u32)
}

pub fn failed(what: &str, e: DriverError) -> Error {
    use CUresult::*;
    match e.0 {
        CUDA_ERROR_OUT_OF_MEMORY => {
            Error::new(Code::OutOfMemory, format!("not enough device memory to {what}; lower kv_bytes or max_batch_tokens"))
        }
        CUDA_ERROR_STUB_LIBRARY
        | CUDA_ERROR_SYSTEM_NOT_READY
        | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => Error::unsupported(format!(
            "the CUDA driver does not fit this machine ({}); install the matching driver, or set device to \"cpu\"",
            describe(e)
        )),
        _ => Error::internal(format!("the CUDA driver failed to {what}: {}", describe(e))),
    }
}

/// Returns the error for an unusable context. The application and NCCL may use a primary context
/// too, so that the library cannot replace it.
pub fn lost(what: &str, e: DriverError, primary: bool) -> Error {
    let remedy = match primary {
        true => "the primary context of the device is lost, so restart the process",
        false => "the context is lost, so free all engines of this process on this device, and create others",
    };
    Error::internal(format!("the CUDA driver failed to {what}: {}; {remedy}", describe(e)))
}

/// Returns the error for kernels that the driver does not load.
pub fn cannot_load((major, minor): (u32, u32), e: DriverError) -> Error {
    use CUresult::*;
    match e.0 {
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION | CUDA_ERROR_NO_BINARY_FOR_GPU | CUDA_ERROR_INVALID_IMAGE => Error::unsupported(format!(
            "the CUDA driver cannot load the kernels for compute capability {major}.{minor}: {}; update the NVIDIA driver, or set device to \"cpu\"",
            describe(e)
        )),
        _ => failed("load the kernels", e),
    }
}

pub fn no_pinned_memory(bytes: usize, remedy: &str, e: DriverError) -> Error {
    match e.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::new(Code::OutOfMemory, format!("not enough pinned memory ({bytes} bytes); {remedy}")),
        _ => failed("allocate pinned memory", e),
    }
}

pub fn no_device(ordinal: usize, count: c_int) -> Error {
    Error::unsupported(format!(
        "device is cuda:{ordinal}, but this machine has {count} CUDA devices, numbered from 0; give one of them, or \"cpu\""
    ))
}

/// Returns the error for a process whose parent has used the driver.
pub fn used_before_fork(ordinal: usize) -> Error {
    let process = std::process::id();
    Error::unsupported(format!(
        "device is cuda:{ordinal}, but process {process} is a fork of one that has used CUDA, and the driver does not work in forks; \
         fork before the first use of CUDA, call exec in the fork, or set device to \"cpu\""
    ))
}
