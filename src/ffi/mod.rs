//! The C ABI. Each function consists of documentation, a guard and one call. The comments of public
//! items become the C header, so they are written for C programmers.
#![allow(unsafe_code, non_camel_case_types)]
// Every entry point has the same contract, which the introduction of the header (cbindgen.toml)
// describes.
#![allow(clippy::missing_safety_doc)]

mod budget;
mod communicator;
mod convert;
pub use convert::PLLM_NUL_TERMINATED;
mod engine;
mod error;
// Unit tests, so that `make check` builds the library only once.
#[cfg(test)]
#[path = "../../tests/ffi/description.rs"]
mod description;
#[cfg(test)]
#[path = "../../tests/ffi/header.rs"]
mod header;
mod kv_events;
mod kv_store;
mod library;
mod options;
mod outputs;
mod reports;
mod request;
mod response_parser;
mod sampling;
mod sequences;
mod text;

pub use budget::*;
pub use communicator::*;
pub use engine::*;
pub use error::*;
pub use kv_events::*;
pub use kv_store::*;
pub use library::*;
pub use options::*;
pub use outputs::*;
pub use reports::*;
pub use request::*;
pub use response_parser::*;
pub use sampling::*;
pub use sequences::*;
pub use text::*;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};
use crate::sys::quiet;

/// Runs the body of an entry point. Catches panics and prevents their output.
fn guard(body: impl FnOnce() -> Result<()>) -> *mut pllm_error {
    quiet::install();
    let result = quiet::during(|| catch_unwind(AssertUnwindSafe(body)));
    let result = result.unwrap_or_else(|_| Err(Error::internal("the call has failed")));
    result.map_or_else(error::into_raw, |()| std::ptr::null_mut())
}

/// As `guard`, for functions without an error result. After a defect, returns `otherwise`.
fn guard_or<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    quiet::install();
    quiet::during(|| catch_unwind(AssertUnwindSafe(body))).unwrap_or(otherwise)
}
