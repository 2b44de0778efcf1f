//! The CUDA backend without a GPU: a driver that runs the kernels on the host (tests/cuda). See tests/cuda/README.md. Where
//! PAGEDLLM_CUDA_DEVICE has the number of a device, that one and its own driver are used instead.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use pagedllm::backend::cuda::CudaBackend;

/// The driver that stands in, and does what it is told to. A device's own does what it likes, and tells nobody.
pub struct Shim(Option<Library>);

/// The device of this machine that tests are to run on. None: the driver that stands in.
fn device() -> Option<usize> {
    let number = std::env::var("PAGEDLLM_CUDA_DEVICE").ok()?;
    Some(number.parse().unwrap_or_else(|_| panic!("PAGEDLLM_CUDA_DEVICE is {number:?}: give the number of a device, such as 0")))
}

/// Built once, and loaded into this process before anybody looks for a driver: whoever asks for one by name gets this.
pub fn shim() -> &'static Shim {
    static SHIM: OnceLock<Shim> = OnceLock::new();
    SHIM.get_or_init(|| {
        if let Some(number) = device() {
            say(&format!("the kernels run on CUDA device {number}, by its own driver"));
            return Shim(None);
        }
        say("the kernels run on the host, by the driver that stands in");
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let out = root.join("target/cuda-shim");
        let status = Command::new(root.join("tests/cuda/build.sh")).arg(&out).status().expect("tests/cuda/build.sh runs");
        assert!(status.success(), "tests/cuda/build.sh: {status}");
        let driver = Library::load(out.join("libcuda.so"));
        Library::load(out.join("libcublasLt.so"));
        Shim(Some(driver))
    })
}

/// Also where tests keep their output to themselves.
fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

// The signatures of what is called are those in tests/cuda/libcuda.cpp.
impl Shim {
    /// The nth call of a function of the driver, from now on, fails so.
    pub fn fail(&self, function: &str, nth: i32, result: i32) {
        let name = CString::new(function).unwrap();
        // SAFETY: as above; a name that ends in zero.
        self.call(c"shim_fail", |call: unsafe extern "C" fn(*const c_char, c_int, c_int)| unsafe { call(name.as_ptr(), nth, result) });
    }

    pub fn pretend_devices(&self, count: i32) {
        // SAFETY: as above.
        self.call(c"shim_devices", |call: unsafe extern "C" fn(c_int)| unsafe { call(count) });
    }

    /// 13.0 is 13000.
    pub fn pretend_driver(&self, version: i32) {
        // SAFETY: as above.
        self.call(c"shim_driver_version", |call: unsafe extern "C" fn(c_int)| unsafe { call(version) });
    }

    /// Compute capability.
    pub fn pretend_capability(&self, major: i32, minor: i32) {
        // SAFETY: as above.
        self.call(c"shim_capability", |call: unsafe extern "C" fn(c_int, c_int)| unsafe { call(major, minor) });
    }

    /// Whether it does what it is told to.
    pub fn pretends(&self) -> bool {
        self.0.is_some()
    }

    pub fn live_bytes(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_live_bytes", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Memory of the host that devices reach.
    pub fn pinned_bytes(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_pinned_bytes", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// How often somebody asked for memory.
    pub fn asked(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_allocation_calls", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// From devices to the host, so far.
    pub fn bytes_read(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_bytes_read", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Kernels that have run.
    pub fn launches(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_launches", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Work that waits for somebody to wait for it.
    pub fn queued(&self) -> u64 {
        // SAFETY: as above.
        self.call(c"shim_queued", |call: unsafe extern "C" fn() -> u64| unsafe { call() }).unwrap_or(0)
    }

    /// Whether what is waited for comes after all that other streams can do, and not before.
    pub fn let_others_first(&self, whether: bool) {
        // SAFETY: as above.
        self.call(c"shim_others_first", |call: unsafe extern "C" fn(c_int)| unsafe { call(whether.into()) });
    }

    /// What was wrong with a kernel.
    pub fn last_error(&self) -> String {
        // SAFETY: as above; a text that ends in zero.
        let text = |call: unsafe extern "C" fn() -> *const c_char| unsafe { CStr::from_ptr(call()) }.to_string_lossy().into_owned();
        self.call(c"shim_last_error", text).unwrap_or_default()
    }

    fn call<F: Copy, T>(&self, name: &CStr, with: impl FnOnce(F) -> T) -> Option<T> {
        self.0.as_ref().map(|driver| {
            let symbol = driver.symbol(name);
            assert_eq!(size_of::<F>(), size_of_val(&symbol));
            // SAFETY: F is the function's signature, and a pointer as the symbol is one.
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
        // SAFETY: a library of our own, which runs nothing when it is loaded.
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

/// One for each thread, as an engine has one. They stay: a device takes its time to make them.
pub fn backend() -> &'static CudaBackend {
    thread_local!(static BACKEND: &'static CudaBackend = Box::leak(Box::new(open(false))));
    BACKEND.with(|backend| *backend)
}

/// One whose bits do not depend on the batch.
pub fn invariant() -> &'static CudaBackend {
    thread_local!(static BACKEND: &'static CudaBackend = Box::leak(Box::new(open(true))));
    BACKEND.with(|backend| *backend)
}

/// One of its own.
pub fn open(invariant: bool) -> CudaBackend {
    shim();
    CudaBackend::new(device().unwrap_or(0), invariant).unwrap()
}
