//! A panic inside the library is an error to its caller, not text on the host's stderr.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use once_cell::sync::OnceCell;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// From now on a panic on this thread prints nothing, where the hook is installed.
pub fn this_thread() {
    QUIET.set(true);
}

/// Runs `f` with this thread quiet.
pub fn during<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            QUIET.set(self.0);
        }
    }
    let _restore = Restore(QUIET.replace(true));
    f()
}

/// What a caught panic said.
pub fn said(panic: &(dyn Any + Send)) -> &str {
    let string = panic.downcast_ref::<String>().map(String::as_str);
    string.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// Runs third-party code that may panic on what its authors did not foresee: `Err` says what the panic said. What it left half
/// done is only ever a cache or is dropped.
pub fn no_panic<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| said(&*panic).to_string())
}

/// Puts a hook before the present one that swallows what quiet threads would print.
/// A cdylib has a standard library of its own, so a host's hook (were it written in Rust) is not touched.
pub fn install() {
    static INSTALLED: OnceCell<()> = OnceCell::new();
    INSTALLED.get_or_init(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.try_with(Cell::get).unwrap_or(true) {
                previous(info);
            }
        }));
    });
}
