//! NVIDIA's libraries whose functions this backend declares. They stay loaded. Errors are the
//! reasons that the system gives.

use std::error::Error as _;
use std::ffi::OsStr;

use libloading::Library;

/// Loads a library by its name or path.
pub fn open(name: impl AsRef<OsStr>) -> Result<&'static Library, String> {
    // SAFETY: loading a library of NVIDIA runs only its initializers, for which it is designed.
    let library = unsafe { Library::new(name.as_ref()) };
    library.map(|library| &*Box::leak(Box::new(library))).map_err(describe)
}

/// Returns a function of a library.
///
/// # Safety
/// `F` is the type of the function.
pub unsafe fn function<F: Copy + 'static>(library: &'static Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller guarantees the type.
    unsafe { library.get::<F>(name) }.map(|symbol| *symbol).map_err(describe)
}

fn describe(error: libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
