//! Panics as errors: a panic in the library prints nothing on the stderr of the host.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use once_cell::sync::OnceCell;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Suppresses panic messages of this thread from now on, if the hook is installed.
pub fn this_thread() {
    QUIET.set(true);
}

/// Runs `f` without panic messages of this thread.
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

/// Returns the message of a caught panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let string = panic.downcast_ref::<String>().map(String::as_str);
    string.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// Runs third-party code and returns the message of its panic as an error. Use it only if the state
/// that a panic leaves inconsistent is a cache or is dropped.
pub fn no_panic<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| panic_message(&*panic).to_string())
}

/// Installs a panic hook that discards the messages of quiet threads and forwards all others. A
/// cdylib has a standard library of its own, so the hook of a host in Rust is not changed.
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
