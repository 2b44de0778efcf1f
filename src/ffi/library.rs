use std::ffi::{CStr, CString, c_char};

use once_cell::sync::OnceCell;
use serde_json::json;

use super::guard_or;
use crate::model::FAMILIES;
use crate::text::response::FORMATS;
use crate::types::options::Isa;

/// Version of the ABI, and of the soname libpagedllm.so.1. Programs that were built with another
/// version must be rebuilt.
pub const PLLM_ABI_VERSION: u32 = 1;

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => unreachable!(),
};

/// Returns the ABI version of the loaded library. Compare it with PLLM_ABI_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn pllm_abi_version() -> u32 {
    PLLM_ABI_VERSION
}

/// Returns the version of the library, such as "0.3.0".
#[unsafe(no_mangle)]
pub extern "C" fn pllm_version() -> *const c_char {
    VERSION.as_ptr()
}

/// Returns a JSON object that describes this build and machine: version, CPU backends, instruction
/// paths, model architectures, formats of responses.
#[unsafe(no_mangle)]
pub extern "C" fn pllm_build_info() -> *const c_char {
    static INFO: OnceCell<CString> = OnceCell::new();
    guard_or(c"{}".as_ptr(), || {
        INFO.get_or_init(|| {
            let paths = Isa::ALL.into_iter().filter(|isa| isa.is_present()).map(Isa::name).collect::<Vec<_>>();
            let architectures = FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>();
            let info = json!({
                "version": env!("CARGO_PKG_VERSION"),
                "abi": PLLM_ABI_VERSION,
                "target": std::env::consts::ARCH,
                "backends": ["cpu"],
                "isa": paths,
                "architectures": architectures,
                "response_formats": FORMATS.iter().map(|format| format.name).collect::<Vec<_>>(),
            });
            CString::new(info.to_string()).unwrap_or_default()
        })
        .as_ptr()
    })
}
