//! NCCL, which carries buffers between devices. It is loaded when the first engine with several
//! workers is created.
//!
//! Its functions are declared here: cudarc does not look for the name `libnccl.so.2`, which NCCL
//! has without its development files, and panics if a function is missing.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::context::{Context, Stream};
use super::errors::failed;
use super::memory::Address;
use super::shared_library;
use crate::error::{Error, Result};
use crate::sys::threads;

/// The names of the library, the one that is installed for programs first.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The result of a successful call.
const SUCCESS: c_int = 0;
/// The data type of one byte. Buffers are only copied, so it serves for all of them.
const BYTE: c_int = 0;
pub const ID_BYTES: usize = 128;

type Handle = *mut c_void;
type Transfer<Pointer> = unsafe extern "C" fn(Pointer, usize, c_int, c_int, Handle, CUstream) -> c_int;

/// The identity of a communicator, which its first rank gives to the others.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; ID_BYTES]);

/// The functions of the library.
pub struct Nccl {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    get_async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: Transfer<*const c_void>,
    receive: Transfer<*mut c_void>,
}

impl Nccl {
    /// Loads the library. It stays loaded, because it runs threads of its own.
    pub fn load() -> Result<&'static Nccl> {
        static LOADED: Mutex<Option<&'static Nccl>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nccl) = *loaded {
            return Ok(nccl);
        }
        let nccl: &'static Nccl = Box::leak(Box::new(Nccl::open()?));
        Ok(loaded.insert(nccl))
    }

    fn open() -> Result<Nccl> {
        let library = shared_library::open(NAMES[0]).or_else(|error| shared_library::open(NAMES[1]).map_err(|_| error));
        let library = library.map_err(cannot_load)?;
        Ok(Nccl {
            get_version: function(library, "ncclGetVersion")?,
            get_unique_id: function(library, "ncclGetUniqueId")?,
            get_error_string: function(library, "ncclGetErrorString")?,
            init_rank: function(library, "ncclCommInitRank")?,
            abort: function(library, "ncclCommAbort")?,
            get_async_error: function(library, "ncclCommGetAsyncError")?,
            group_start: function(library, "ncclGroupStart")?,
            group_end: function(library, "ncclGroupEnd")?,
            send: function(library, "ncclSend")?,
            receive: function(library, "ncclRecv")?,
        })
    }

    /// Returns the version, for example 22703 for 2.27.3.
    pub fn version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: NCCL writes one number.
        self.check("report its version", unsafe { (self.get_version)(&mut version) })?;
        Ok(version.max(0) as u32)
    }

    /// Returns the identity of a new communicator. NCCL starts a thread for it, which inherits the
    /// signal mask of the calling thread.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: NCCL writes one identity.
        self.check("create an identity", unsafe { (self.get_unique_id)(&mut id) })?;
        Ok(id)
    }

    fn check(&self, what: &str, result: c_int) -> Result<()> {
        if result == SUCCESS { Ok(()) } else { Err(Error::internal(format!("NCCL failed to {what}: {}", self.describe(result)))) }
    }

    /// Returns the text of a result.
    fn describe(&self, result: c_int) -> String {
        // SAFETY: NCCL returns a constant text for any number.
        let text = unsafe { (self.get_error_string)(result) };
        if text.is_null() {
            return format!("error {result}");
        }
        // SAFETY: the text is a C string.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} ({result})", text.to_string_lossy())
    }
}

/// Returns a function of the library.
fn function<F: Copy + 'static>(library: &'static Library, name: &str) -> Result<F> {
    // SAFETY: the fields of `Nccl` have the signatures of NCCL's header, which do not change within its
    // major version.
    unsafe { shared_library::function(library, name) }.map_err(cannot_load)
}

fn cannot_load(why: String) -> Error {
    Error::unsupported(format!(
        "{} cannot be loaded ({why}); install NCCL, or set tensor_parallel and pipeline_parallel to 1 and device to one device",
        NAMES[0]
    ))
}

/// One rank of a communicator of NCCL. Ranks other than this one are peers.
pub struct NcclRank {
    nccl: &'static Nccl,
    context: Arc<Context>,
    handle: Handle,
    /// Limit of its end.
    timeout: Duration,
}

// SAFETY: NCCL permits the use of a communicator from any thread, one at a time.
unsafe impl Send for NcclRank {}

/// A part of an exchange: bytes on the device that a peer gets, or that it sends.
#[derive(Clone, Copy)]
pub enum NcclTransfer {
    Send { to: usize, from: Address, bytes: usize },
    Receive { from: usize, to: Address, bytes: usize },
}

impl NcclTransfer {
    pub fn has_bytes(&self) -> bool {
        let (NcclTransfer::Send { bytes, .. } | NcclTransfer::Receive { bytes, .. }) = self;
        *bytes > 0
    }
}

impl NcclRank {
    /// Waits for all ranks, which call this at the same time, without a limit. `context` is the
    /// primary context of the device, since NCCL uses no other.
    pub fn new(nccl: &'static Nccl, context: &Arc<Context>, id: UniqueId, [rank, size]: [usize; 2], timeout: Duration) -> Result<NcclRank> {
        let mut handle = null_mut();
        // SAFETY: NCCL writes the handle.
        let create = || unsafe { (nccl.init_rank)(&mut handle, size as c_int, id, rank as c_int) };
        let created = context.within(create).map_err(|e| failed("connect the workers", e))?;
        nccl.check("connect the workers", created).map(|()| NcclRank { nccl, context: context.clone(), handle, timeout })
    }

    /// Queues the transfers as one exchange, so that their order does not matter.
    ///
    /// # Safety
    /// The addresses have their numbers of bytes on the device, until the work is complete.
    pub unsafe fn exchange(&mut self, transfers: impl Iterator<Item = NcclTransfer>) -> Result<()> {
        // SAFETY: the caller guarantees the addresses.
        let queue = || unsafe { self.queue(transfers) };
        self.context.within(queue).map_err(|e| failed("exchange data with other workers", e))?
    }

    /// # Safety
    /// As `exchange`. The context is current.
    unsafe fn queue(&self, transfers: impl Iterator<Item = NcclTransfer>) -> Result<()> {
        let Nccl { group_start, group_end, send, receive, .. } = self.nccl;
        let stream = self.context.stream(Stream::Compute);
        // SAFETY: NCCL permits groups on any thread.
        self.nccl.check("begin an exchange", unsafe { group_start() })?;
        let mut queued = SUCCESS;
        for transfer in transfers {
            let result = match transfer {
                NcclTransfer::Send { to, from, bytes } => {
                    // SAFETY: the caller guarantees the address. The stream belongs to the device.
                    unsafe { send(from.0 as *const c_void, bytes, BYTE, to as c_int, self.handle, stream) }
                }
                NcclTransfer::Receive { from, to, bytes } => {
                    // SAFETY: as above.
                    unsafe { receive(to.0 as *mut c_void, bytes, BYTE, from as c_int, self.handle, stream) }
                }
            };
            queued = if queued == SUCCESS { result } else { queued };
        }
        // SAFETY: the group was started above. It ends in any case.
        let ended = unsafe { group_end() };
        self.nccl.check("exchange data with other workers", if queued == SUCCESS { ended } else { queued })
    }

    /// Returns the error of earlier work, if there is one, for example because a worker has ended.
    pub fn async_error(&self) -> Result<()> {
        let mut error = SUCCESS;
        // SAFETY: NCCL writes one number.
        let reported = unsafe { (self.nccl.get_async_error)(self.handle, &mut error) };
        self.nccl.check("report its errors", reported)?;
        self.nccl.check("exchange data with other workers", error)
    }
}

impl Drop for NcclRank {
    /// Ends unfinished exchanges and frees the rank. An orderly destruction would wait for the
    /// peers.
    ///
    /// NCCL has no limit for this. If it does not end in time, or no thread can be started for it,
    /// the rank is left behind with its context.
    fn drop(&mut self) {
        let (nccl, context, handle) = (self.nccl, self.context.clone(), AtomicPtr::new(self.handle));
        let abort = move || {
            // SAFETY: `new` created the rank, which is freed once.
            let _ = context.within(|| unsafe { (nccl.abort)(handle.into_inner()) });
        };
        if let Ok(aborted) = threads::start("pagedllm-abort", abort) {
            let _ = aborted.recv_timeout(self.timeout);
        }
    }
}
