//! The CUDA backend without a GPU: a driver that runs the kernels on the host
//! (tests/cuda/README.md). If PAGEDLLM_CUDA_DEVICE is the number of a device, tests use that device
//! and its own driver.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use pagedllm::backend::cuda::CudaBackend;

/// The replacement driver. With a real device it is None, and all its functions do nothing.
pub struct Shim(Option<Library>);

/// Environment variable that selects other libraries, for a process that a test starts.
pub const SHIM_PARTS: &str = "PAGEDLLM_SHIM_PARTS";
/// A driver without the functions that are newer than CUDA 12.0.
pub const OLD_DRIVER: &str = "cuda-12.0";
/// No cuBLASLt.
pub const NO_CUBLASLT: &str = "without cuBLASLt";

/// The device of this machine for the tests. None selects the replacement driver.
fn device() -> Option<usize> {
    let number = std::env::var("PAGEDLLM_CUDA_DEVICE").ok()?;
    Some(number.parse().unwrap_or_else(|_| panic!("PAGEDLLM_CUDA_DEVICE is {number:?}; set it to the number of a device, such as 0")))
}

/// Builds the driver once, and loads it into this process before the backend looks for a driver by
/// its name.
pub fn shim() -> &'static Shim {
    static SHIM: OnceLock<Shim> = OnceLock::new();
    SHIM.get_or_init(|| {
        if let Some(number) = device() {
            print_line(&format!("the kernels run on CUDA device {number}"));
            return Shim(None);
        }
        print_line("the kernels run on the host, with the replacement driver");
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let out = root.join("target/cuda-shim");
        let status = Command::new(root.join("tests/cuda/build.sh")).arg(&out).status().expect("tests/cuda/build.sh runs");
        assert!(status.success(), "tests/cuda/build.sh: {status}");
        let parts = std::env::var(SHIM_PARTS).unwrap_or_default();
        let is_old = parts == OLD_DRIVER;
        let driver = Library::load(if is_old { out.join("cuda-12.0/libcuda.so") } else { out.join("libcuda.so") });
        if parts != NO_CUBLASLT {
            Library::load(out.join("libcublasLt.so.12"));
        }
        Shim(Some(driver))
    })
}

/// Loads the replacement for NCCL, on which the driver's devices exchange data. None: the tests use
/// a device of this machine, which may have only one.
pub fn nccl() -> Option<&'static Nccl> {
    static NCCL: OnceLock<Nccl> = OnceLock::new();
    if !shim().pretends() {
        print_line("skipped: several workers are tested on the replacement driver only");
        return None;
    }
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-shim");
    Some(NCCL.get_or_init(|| Nccl(Library::load(out.join("libnccl.so.2")))))
}

/// The replacement for NCCL.
pub struct Nccl(Library);

impl Nccl {
    /// Returns the number of ranks that have not been freed.
    pub fn ranks(&self) -> u64 {
        self.number(c"shim_nccl_ranks")
    }

    /// Returns the number of exchanges so far.
    pub fn exchanges(&self) -> u64 {
        self.number(c"shim_nccl_exchanges")
    }

    /// Lets calls of ncclCommAbort wait until this is called with false.
    pub fn hold_aborts(&self, hold: bool) {
        // SAFETY: a function of tests/cuda/libnccl.cpp with this signature.
        let call = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(self.0.symbol(c"shim_nccl_hold_aborts")) };
        // SAFETY: as above.
        unsafe { call(hold.into()) }
    }

    fn number(&self, name: &CStr) -> u64 {
        // SAFETY: the functions of tests/cuda/libnccl.cpp with this signature.
        let call = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(self.0.symbol(name)) };
        // SAFETY: as above.
        unsafe { call() }
    }
}

/// Prints a line, also if the test harness captures output.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

// The signatures are those of tests/cuda/libcuda.cpp.
impl Shim {
    /// Makes the nth call of a driver function from now on fail with this result.
    pub fn fail(&self, function: &str, nth: i32, result: i32) {
        let name = CString::new(function).unwrap();
        // SAFETY: as above; the name ends with zero.
        self.call(c"shim_fail", |call: unsafe extern "C" fn(*const c_char, c_int, c_int)| unsafe { call(name.as_ptr(), nth, result) });
    }

    pub fn pretend_devices(&self, count: i32) {
        // SAFETY: as above.
        self.call(c"shim_devices", |call: unsafe extern "C" fn(c_int)| unsafe { call(count) });
    }

    /// Sets the version of the driver. 13.0 is 13000.
    pub fn pretend_driver(&self, version: i32) {
        // SAFETY: as above.
        self.call(c"shim_driver_version", |call: unsafe extern "C" fn(c_int)| unsafe { call(version) });
    }

    /// Sets the memory of each device, and the part of other processes, in bytes.
    pub fn pretend_memory(&self, total: u64, used: u64) {
        // SAFETY: as above.
        self.call(c"shim_memory", |call: unsafe extern "C" fn(u64, u64)| unsafe { call(total, used) });
    }

    /// Returns whether the driver has this function.
    pub fn has(&self, function: &CStr) -> bool {
        // SAFETY: the library is loaded.
        self.0.as_ref().is_some_and(|driver| !unsafe { libc::dlsym(driver.0, function.as_ptr()) }.is_null())
    }

    /// Starts the driver, as an application may do.
    pub fn start(&self) {
        // SAFETY: as above.
        self.call(c"cuInit", |call: unsafe extern "C" fn(c_int) -> c_int| unsafe { call(0) });
    }

    /// Returns the number of contexts.
    pub fn contexts(&self) -> i32 {
        // SAFETY: as above.
        self.call(c"shim_contexts", |call: unsafe extern "C" fn() -> c_int| unsafe { call() }).unwrap_or(0)
    }

    /// Sets the compute capability.
    pub fn pretend_capability(&self, major: i32, minor: i32) {
        // SAFETY: as above.
        self.call(c"shim_capability", |call: unsafe extern "C" fn(c_int, c_int)| unsafe { call(major, minor) });
    }

    /// Sets whether the products of mma.sync and wgmma change sums to which they add zero.
    pub fn pretend_inexact(&self, mma: bool, wgmma: bool) {
        // SAFETY: as above.
        self.call(c"shim_inexact", |call: unsafe extern "C" fn(c_int, c_int)| unsafe { call(mma.into(), wgmma.into()) });
    }

    /// Returns whether this is the replacement driver.
    pub fn pretends(&self) -> bool {
        self.0.is_some()
    }

    pub fn live_bytes(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_live_bytes", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the bytes of pinned host memory.
    pub fn pinned_bytes(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_pinned_bytes", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the number of allocation calls.
    pub fn allocation_calls(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_allocation_calls", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the bytes copied from devices to the host.
    pub fn bytes_read(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_bytes_read", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the number of kernels that have run.
    pub fn launches(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_launches", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the number of boxes of tensors that kernels have copied.
    pub fn boxes(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_boxes", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the number of queued work items that have not run.
    pub fn queued(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_queued", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Returns the number of objects that were left in primary contexts.
    pub fn left_in_primary(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_left_in_primary", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Sets whether the work of all other streams runs before the work that is waited for.
    pub fn let_others_first(&self, whether: bool) {
        // SAFETY: as above.
        self.call(c"shim_others_first", |call: unsafe extern "C" fn(c_int)| unsafe { call(whether.into()) });
    }

    /// Returns the error of the last failed kernel.
    pub fn last_error(&self) -> String {
        // SAFETY: as above; the text ends with zero.
        let text = |call: unsafe extern "C" fn() -> *const c_char| unsafe { CStr::from_ptr(call()) }.to_string_lossy().into_owned();
        self.call(c"shim_last_error", text).unwrap_or_default()
    }

    fn call<F: Copy, T>(&self, name: &CStr, with: impl FnOnce(F) -> T) -> Option<T> {
        self.0.as_ref().map(|driver| {
            let symbol = driver.symbol(name);
            assert_eq!(size_of::<F>(), size_of_val(&symbol));
            // SAFETY: F is the function's signature, and has the size of the symbol's pointer.
            with(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&symbol) })
        })
    }
}

struct Library(*mut c_void);

// SAFETY: a handle, which any thread may use.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    fn load(path: PathBuf) -> Library {
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library is part of the tests and runs no code when it is loaded.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "{} could not be loaded", path.display());
        Library(handle)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is loaded.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is missing");
        symbol
    }
}

/// Returns the backend of this thread. It is kept, since its creation takes long on a device.
pub fn backend() -> &'static CudaBackend {
    thread_local!(static BACKEND: &'static CudaBackend = Box::leak(Box::new(open(false))));
    BACKEND.with(|backend| *backend)
}

/// Returns the batch-invariant backend of this thread.
pub fn invariant() -> &'static CudaBackend {
    thread_local!(static BACKEND: &'static CudaBackend = Box::leak(Box::new(open(true))));
    BACKEND.with(|backend| *backend)
}

/// Opens a separate batch-invariant backend, whose products use the largest tiles for any matrix, as on a
/// device with one multiprocessor.
pub fn open_small() -> CudaBackend {
    let mut backend = open(true);
    backend.assume_multiprocessors(1);
    backend
}

/// Opens a separate backend.
pub fn open(invariant: bool) -> CudaBackend {
    shim();
    CudaBackend::new(device().unwrap_or(0), invariant).unwrap()
}
