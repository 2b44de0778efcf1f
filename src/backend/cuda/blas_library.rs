//! The library cuBLASLt: where it is, and its functions.
//!
//! Its functions are declared here: cudarc does not search Python packages, takes any version, and
//! panics if a function is missing.

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
    cudaDataType,
};
use libloading::Library;

use super::shared_library;

/// The status of a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlasError(pub c_int);

pub type Called<T> = std::result::Result<T, BlasError>;

/// The status if an operation is not supported.
const NOT_SUPPORTED: BlasError = BlasError(15);

/// Folders of NVIDIA's Python packages, in the folder of the packages.
const PACKAGES: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cublas/lib"];
/// Folders of NVIDIA's toolkit.
const TOOLKITS: [&str; 2] = ["/usr/local/cuda/lib64", "/opt/cuda/lib64"];
/// The number of folders above this library in which packages are searched.
const LEVELS: usize = 3;

type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type Set<Handle, Attribute> = unsafe extern "C" fn(Handle, Attribute, *const c_void, usize) -> c_int;
type Multiply = unsafe extern "C" fn(
    cublasLtHandle_t,
    cublasLtMatmulDesc_t,
    *const c_void,
    *const c_void,
    cublasLtMatrixLayout_t,
    *const c_void,
    cublasLtMatrixLayout_t,
    *const c_void,
    *const c_void,
    cublasLtMatrixLayout_t,
    *mut c_void,
    cublasLtMatrixLayout_t,
    *const cublasLtMatmulAlgo_t,
    *mut c_void,
    usize,
    *mut c_void,
) -> c_int;
type Select = unsafe extern "C" fn(
    cublasLtHandle_t,
    cublasLtMatmulDesc_t,
    cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t,
    cublasLtMatmulPreference_t,
    c_int,
    *mut Selected,
    *mut c_int,
) -> c_int;

/// An algorithm that cuBLASLt has selected: `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct Selected {
    algorithm: cublasLtMatmulAlgo_t,
    workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// The functions of the library.
pub struct BlasLibrary {
    version: usize,
    path: PathBuf,
    create: unsafe extern "C" fn(*mut cublasLtHandle_t) -> c_int,
    destroy: Destroy,
    multiply: Multiply,
    select: Select,
    create_layout: unsafe extern "C" fn(*mut cublasLtMatrixLayout_t, cudaDataType, u64, u64, i64) -> c_int,
    set_layout: Set<cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t>,
    destroy_layout: Destroy,
    create_operation: unsafe extern "C" fn(*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType) -> c_int,
    set_operation: Set<cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t>,
    destroy_operation: Destroy,
    create_preference: unsafe extern "C" fn(*mut cublasLtMatmulPreference_t) -> c_int,
    set_preference: Set<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t>,
    destroy_preference: Destroy,
}

/// A product: `d = alpha * a * b + beta * d`, in matrices by column.
pub struct Operands {
    pub a: (*const c_void, cublasLtMatrixLayout_t),
    pub b: (*const c_void, cublasLtMatrixLayout_t),
    pub d: (*mut c_void, cublasLtMatrixLayout_t),
    pub workspace: (*mut c_void, usize),
    pub stream: *mut c_void,
}

/// Version 12.0.0, as the library reports it.
const MIN_VERSION: usize = 120_000;

impl BlasLibrary {
    /// Loads the library, which stays loaded. `driver` is the version of the driver. The error says
    /// where it was searched.
    pub fn load(driver: c_int) -> std::result::Result<&'static BlasLibrary, String> {
        static LOADED: OnceLock<BlasLibrary> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let found = BlasLibrary::find(driver)?;
        Ok(LOADED.get_or_init(|| found))
    }

    fn find(driver: c_int) -> std::result::Result<BlasLibrary, String> {
        let (names, folders) = (names(driver), folders(&own_path()));
        let in_folders = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
        let by_name = names.iter().map(PathBuf::from);
        let mut failure = None;
        // Names first: they find a library that the process has loaded already.
        for path in by_name.chain(in_folders.filter(|path| path.is_file())) {
            match BlasLibrary::open(&path, driver) {
                Ok(library) => return Ok(library),
                Err(error) if path.is_absolute() => failure = failure.or(Some(format!("{}: {error}", path.display()))),
                Err(_) => {}
            }
        }
        let searched = folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ");
        let remedy = "install NVIDIA's cuBLAS for CUDA 12, or add its folder to the search path of libraries";
        let failure = failure.unwrap_or_else(|| format!("{} not found by the system or in {searched}", names.join(" and ")));
        Err(format!("{failure}; {remedy}"))
    }

    fn open(path: &Path, driver: c_int) -> std::result::Result<BlasLibrary, String> {
        let library = shared_library::open(path)?;
        let get_version: unsafe extern "C" fn() -> usize = function(library, "cublasLtGetVersion")?;
        // SAFETY: the function has no arguments.
        let version = unsafe { get_version() };
        if !(MIN_VERSION..=driver.unsigned_abs() as usize / 1000 * 10_000 + 9_999).contains(&version) {
            return Err(format!("version {version} does not work with a driver for CUDA {}", driver / 1000));
        }
        Ok(BlasLibrary {
            version,
            path: path_of(get_version as *const c_void).unwrap_or_else(|| path.to_path_buf()),
            create: function(library, "cublasLtCreate")?,
            destroy: function(library, "cublasLtDestroy")?,
            multiply: function(library, "cublasLtMatmul")?,
            select: function(library, "cublasLtMatmulAlgoGetHeuristic")?,
            create_layout: function(library, "cublasLtMatrixLayoutCreate")?,
            set_layout: function(library, "cublasLtMatrixLayoutSetAttribute")?,
            destroy_layout: function(library, "cublasLtMatrixLayoutDestroy")?,
            create_operation: function(library, "cublasLtMatmulDescCreate")?,
            set_operation: function(library, "cublasLtMatmulDescSetAttribute")?,
            destroy_operation: function(library, "cublasLtMatmulDescDestroy")?,
            create_preference: function(library, "cublasLtMatmulPreferenceCreate")?,
            set_preference: function(library, "cublasLtMatmulPreferenceSetAttribute")?,
            destroy_preference: function(library, "cublasLtMatmulPreferenceDestroy")?,
        })
    }

    /// Creates a handle in the current context.
    pub fn create(&self) -> Called<cublasLtHandle_t> {
        // SAFETY: cuBLASLt writes the handle.
        created(|handle| unsafe { (self.create)(handle) })
    }

    /// # Safety
    /// `create` created the handle, which is not used any more.
    pub unsafe fn destroy(&self, handle: cublasLtHandle_t) {
        // SAFETY: the caller guarantees the handle.
        unsafe { (self.destroy)(handle.cast()) };
    }

    /// Queues a product, with alpha 1 and beta 0.
    ///
    /// # Safety
    /// The handles are alive and belong to the current context, and the layouts match the memory.
    pub unsafe fn multiply(
        &self,
        handle: cublasLtHandle_t,
        operation: cublasLtMatmulDesc_t,
        Operands { a, b, d, workspace, stream }: Operands,
        algorithm: &cublasLtMatmulAlgo_t,
    ) -> Called<()> {
        let (one, zero): (*const f32, *const f32) = (&1.0, &0.0);
        // SAFETY: the caller guarantees handles and memory. alpha and beta are constants.
        check(unsafe {
            (self.multiply)(
                handle,
                operation,
                one.cast(),
                a.0,
                a.1,
                b.0,
                b.1,
                zero.cast(),
                d.0,
                d.1,
                d.0,
                d.1,
                algorithm,
                workspace.0,
                workspace.1,
                stream,
            )
        })
    }

    /// Selects the algorithm for layouts of a, b and d.
    ///
    /// # Safety
    /// All handles are alive.
    pub unsafe fn select(
        &self,
        handle: cublasLtHandle_t,
        operation: cublasLtMatmulDesc_t,
        [a, b, d]: [cublasLtMatrixLayout_t; 3],
        preference: cublasLtMatmulPreference_t,
    ) -> Called<cublasLtMatmulAlgo_t> {
        let (mut selected, mut count) = (std::mem::MaybeUninit::<Selected>::zeroed(), 0);
        // SAFETY: the caller guarantees the handles, and there is space for one result.
        check(unsafe { (self.select)(handle, operation, a, b, d, d, preference, 1, selected.as_mut_ptr(), &mut count) })?;
        // SAFETY: the result consists of numbers, which were zero.
        let Selected { algorithm, status, .. } = unsafe { selected.assume_init() };
        if count == 0 {
            return Err(NOT_SUPPORTED);
        }
        check(status).map(|()| algorithm)
    }

    /// Creates a layout of a matrix by column, without gaps.
    pub fn create_layout(&self, dtype: cudaDataType, rows: usize, cols: usize) -> Called<cublasLtMatrixLayout_t> {
        // SAFETY: cuBLASLt writes the handle.
        created(|layout| unsafe { (self.create_layout)(layout, dtype, rows as u64, cols as u64, rows as i64) })
    }

    /// # Safety
    /// The layout is alive, and the value has the attribute's type.
    pub unsafe fn set_layout<T>(&self, layout: cublasLtMatrixLayout_t, which: cublasLtMatrixLayoutAttribute_t, value: &T) -> Called<()> {
        // SAFETY: the caller guarantees layout and value.
        check(unsafe { (self.set_layout)(layout, which, std::ptr::from_ref(value).cast(), size_of::<T>()) })
    }

    /// # Safety
    /// `create_layout` created the layout, which is not used any more.
    pub unsafe fn destroy_layout(&self, layout: cublasLtMatrixLayout_t) {
        // SAFETY: the caller guarantees the layout.
        unsafe { (self.destroy_layout)(layout.cast()) };
    }

    pub fn create_operation(&self, compute: cublasComputeType_t, scale: cudaDataType) -> Called<cublasLtMatmulDesc_t> {
        // SAFETY: cuBLASLt writes the handle.
        created(|operation| unsafe { (self.create_operation)(operation, compute, scale) })
    }

    /// # Safety
    /// The operation is alive, and the value has the attribute's type.
    pub unsafe fn set_operation<T>(&self, operation: cublasLtMatmulDesc_t, which: cublasLtMatmulDescAttributes_t, value: &T) -> Called<()> {
        // SAFETY: the caller guarantees operation and value.
        check(unsafe { (self.set_operation)(operation, which, std::ptr::from_ref(value).cast(), size_of::<T>()) })
    }

    /// # Safety
    /// `create_operation` created the operation, which is not used any more.
    pub unsafe fn destroy_operation(&self, operation: cublasLtMatmulDesc_t) {
        // SAFETY: the caller guarantees the operation.
        unsafe { (self.destroy_operation)(operation.cast()) };
    }

    pub fn create_preference(&self) -> Called<cublasLtMatmulPreference_t> {
        // SAFETY: cuBLASLt writes the handle.
        created(|preference| unsafe { (self.create_preference)(preference) })
    }

    /// # Safety
    /// The preference is alive, and the value has the attribute's type.
    pub unsafe fn set_preference<T>(
        &self,
        preference: cublasLtMatmulPreference_t,
        which: cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Called<()> {
        // SAFETY: the caller guarantees preference and value.
        check(unsafe { (self.set_preference)(preference, which, std::ptr::from_ref(value).cast(), size_of::<T>()) })
    }

    /// # Safety
    /// `create_preference` created the preference, which is not used any more.
    pub unsafe fn destroy_preference(&self, preference: cublasLtMatmulPreference_t) {
        // SAFETY: the caller guarantees the preference.
        unsafe { (self.destroy_preference)(preference.cast()) };
    }
}

impl fmt::Display for BlasLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BlasLibrary { version, path, .. } = self;
        write!(f, "cuBLASLt {}.{}.{} ({})", version / 10_000, version / 100 % 100, version % 100, path.display())
    }
}

fn created<T>(create: impl FnOnce(*mut *mut T) -> c_int) -> Called<*mut T> {
    let mut handle = null_mut();
    check(create(&mut handle)).map(|()| handle)
}

fn check(status: c_int) -> Called<()> {
    if status == 0 { Ok(()) } else { Err(BlasError(status)) }
}

/// Returns the names of the versions that work with this driver, the latest first. The last name is
/// that of development files.
fn names(driver: c_int) -> Vec<&'static str> {
    let latest = (driver >= 13_000).then_some("libcublasLt.so.13");
    latest.into_iter().chain(["libcublasLt.so.12", "libcublasLt.so"]).collect()
}

/// Returns the folders in which the library is searched: that of this library, Python packages
/// beside it, and toolkits.
fn folders(own: &Path) -> Vec<PathBuf> {
    let own_folder = own.parent().map(Path::to_path_buf);
    let packages = own.ancestors().skip(1).take(LEVELS).flat_map(|folder| PACKAGES.map(|package| folder.join(package)));
    own_folder.into_iter().chain(packages).chain(TOOLKITS.map(PathBuf::from)).collect()
}

/// Returns the path of the file that contains this library. That of a program is known by another way
/// if the program was started by its name.
fn own_path() -> PathBuf {
    let path = path_of(own_path as *const c_void).filter(|path| path.is_absolute());
    let path = path.or_else(|| std::env::current_exe().ok()).unwrap_or_default();
    path.canonicalize().unwrap_or(path)
}

/// Returns the path of the file that contains this function.
fn path_of(function: *const c_void) -> Option<PathBuf> {
    // SAFETY: the structure consists of pointers, which may be null.
    let mut info = unsafe { std::mem::zeroed::<libc::Dl_info>() };
    // SAFETY: the address is only compared, and `info` is written.
    if unsafe { libc::dladdr(function, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name is a C string that lives as long as the file is loaded, and is copied.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

fn function<F: Copy + 'static>(library: &'static Library, name: &str) -> std::result::Result<F, String> {
    // SAFETY: the fields of `BlasLibrary` have the signatures of its header, which have not changed
    // since CUDA 11.
    unsafe { shared_library::function(library, name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_gets_versions_that_work_with_it() {
        assert_eq!(names(12_000), ["libcublasLt.so.12", "libcublasLt.so"]);
        assert_eq!(names(13_010), ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]);
    }

    #[test]
    fn python_packages_beside_the_library_are_searched() {
        let folders = folders(Path::new("/venv/lib/python3.11/site-packages/pagedllm/libpagedllm.so"));
        for package in PACKAGES {
            assert!(folders.contains(&Path::new("/venv/lib/python3.11/site-packages").join(package)), "{folders:?}");
        }
        assert_eq!(folders[0], Path::new("/venv/lib/python3.11/site-packages/pagedllm"));
        assert!(!folders.contains(&PathBuf::from("/nvidia/cublas/lib")));
    }

    #[test]
    fn this_code_is_in_an_existing_file() {
        assert!(own_path().is_file(), "{}", own_path().display());
    }
}
