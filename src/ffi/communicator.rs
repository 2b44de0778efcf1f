use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, init, not_null, slice, string};
use super::{guard, guard_or, pllm_error};
use crate::communicator::shared_memory::SharedMemory;
use crate::communicator::{Communicator, CommunicatorHandle};
use crate::error::{Code, Error, Result};

#[cfg(test)]
#[path = "../../tests/ffi/communicator.rs"]
mod tests;

/// Copies len bytes of rank root to all ranks. The root may return before the other ranks have
/// them. Returns 0, or another number for an error.
pub type pllm_communicator_broadcast =
    Option<unsafe extern "C" fn(user_data: *mut c_void, bytes: *mut c_void, len: u64, root: u32, timeout_ms: u64) -> i32>;
/// Copies len bytes of each rank to all ranks: those of rank i to out + i * len. Returns as
/// pllm_communicator_broadcast.
pub type pllm_communicator_all_gather =
    Option<unsafe extern "C" fn(user_data: *mut c_void, bytes: *const c_void, len: u64, out: *mut c_void, timeout_ms: u64) -> i32>;
/// Copies part i of the bytes to rank i. bytes and out have a part of len bytes for each rank, back
/// to back. Part i of out comes from rank i. Returns as pllm_communicator_broadcast.
pub type pllm_communicator_all_to_all =
    Option<unsafe extern "C" fn(user_data: *mut c_void, bytes: *const c_void, len: u64, out: *mut c_void, timeout_ms: u64) -> i32>;
/// Sends len bytes to another rank. May return before the other rank has them. Returns as
/// pllm_communicator_broadcast.
pub type pllm_communicator_send =
    Option<unsafe extern "C" fn(user_data: *mut c_void, bytes: *const c_void, len: u64, to: u32, timeout_ms: u64) -> i32>;
/// Receives the next len bytes that another rank sends. Both ranks give the same length. Returns as
/// pllm_communicator_broadcast.
pub type pllm_communicator_receive =
    Option<unsafe extern "C" fn(user_data: *mut c_void, bytes: *mut c_void, len: u64, from: u32, timeout_ms: u64) -> i32>;
/// Divides the group: ranks with the same color form a new group, in the order of their ranks.
/// Writes the user data, the rank and the size of a communicator of that group. It has the same
/// functions, and is closed on its own. Returns as pllm_communicator_broadcast.
pub type pllm_communicator_split = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        color: u32,
        timeout_ms: u64,
        out_user_data: *mut *mut c_void,
        out_rank: *mut u32,
        out_size: *mut u32,
    ) -> i32,
>;
/// Leaves the group. The calls of the other ranks that wait for this rank should then fail.
pub type pllm_communicator_close = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// A rank of a group whose ranks exchange bytes: the workers of one engine. A host can use that of
/// pllm_communicator_shared_memory, that of bindings/mpi, or its own.
///
/// All ranks call the same functions in the same order. A function waits until the other ranks have
/// done their part, at most timeout_ms milliseconds; 0 is no limit. After an error, all later calls
/// of the rank fail, and those of the other ranks should.
///
/// Threads: one thread at a time calls the functions, not always the same one. They must return
/// normally: no exception, no longjmp. They must not call the engine.
///
/// Ownership: pllm_engine_create and pllm_worker_run copy the struct. If they succeed, the library
/// calls close, once and last. If they fail, the host closes the communicator, which the other
/// ranks wait for. The library closes what split returns in any case, before the communicator
/// itself. user_data is valid until close returns. A communicator is for one engine or worker.
/// pllm_engine_plan ignores it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_communicator {
    /// sizeof(pllm_communicator).
    pub struct_size: u64,
    /// Passed to the functions.
    pub user_data: *mut c_void,
    /// Number of this rank, below size.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Copies bytes of one rank to all. Required.
    pub broadcast: pllm_communicator_broadcast,
    /// Copies bytes of each rank to all. Required.
    pub all_gather: pllm_communicator_all_gather,
    /// Copies different bytes to each rank. Required.
    pub all_to_all: pllm_communicator_all_to_all,
    /// Sends bytes to one rank. Required.
    pub send: pllm_communicator_send,
    /// Receives bytes from one rank. Required.
    pub receive: pllm_communicator_receive,
    /// Divides the group. NULL: not possible, so an engine cannot have tensor and pipeline
    /// parallelism together.
    pub split: pllm_communicator_split,
    /// Leaves the group. Required.
    pub close: pllm_communicator_close,
}

// SAFETY: repr(C), numbers, a pointer and nullable functions only.
unsafe impl Versioned for pllm_communicator {
    const NAME: &'static str = "pllm_communicator";
    const FIRST_SIZE: usize = 80;
    fn defaults() -> Self {
        pllm_communicator {
            struct_size: size_of::<Self>() as u64,
            user_data: std::ptr::null_mut(),
            rank: 0,
            size: 0,
            broadcast: None,
            all_gather: None,
            all_to_all: None,
            send: None,
            receive: None,
            split: None,
            close: None,
        }
    }
}

impl pllm_communicator {
    /// The addresses of the functions, 0 for NULL.
    fn functions(&self) -> [(&'static str, usize); 7] {
        [
            ("broadcast", self.broadcast.map_or(0, |function| function as usize)),
            ("all_gather", self.all_gather.map_or(0, |function| function as usize)),
            ("all_to_all", self.all_to_all.map_or(0, |function| function as usize)),
            ("send", self.send.map_or(0, |function| function as usize)),
            ("receive", self.receive.map_or(0, |function| function as usize)),
            ("close", self.close.map_or(0, |function| function as usize)),
            ("split", self.split.map_or(0, |function| function as usize)),
        ]
    }

    fn check(&self) -> Result<()> {
        let missing = self.functions().into_iter().find(|&(name, address)| address == 0 && name != "split");
        if let Some((name, _)) = missing {
            return Err(Error::invalid(format!("pllm_communicator.{name} is NULL; set all functions except split")));
        }
        match self.rank < self.size {
            true => Ok(()),
            false => Err(Error::invalid(format!("pllm_communicator.rank is {}; must be below size ({})", self.rank, self.size))),
        }
    }
}

/// Writes the defaults into a struct of struct_size bytes: no functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_communicator_init(communicator: *mut pllm_communicator, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(communicator, struct_size) });
}

/// Joins a group of processes, or threads, of this host, which communicate through shared memory.
/// Waits until all ranks have joined.
///
/// Rank 0 creates the file at the NUL-terminated path, usually below /dev/shm, where a file system
/// in memory is. It removes the file when it closes the communicator, and replaces one whose rank 0
/// has ended. The file takes 1 MiB for each rank, and 4 MiB for each pair of ranks that send to
/// each other. size is 1 to 64. timeout_ms limits the wait; 0 is no limit.
///
/// The end of a process ends the waits of the other ranks within about 0.1 seconds. A forked child
/// cannot use the communicator.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if a rank is started twice, is not below size, or other ranks
/// have another size; PLLM_E_UNSUPPORTED if another rank has another version of the library;
/// PLLM_E_CAPACITY if there is no memory for the file; PLLM_E_IO if the file cannot be created or
/// is not that of a communicator, or if a rank does not join in time or has ended. The functions of
/// the communicator return the code of the error: PLLM_E_INTERNAL if another rank has ended or
/// failed, or has not done its part in time.
///
/// Ownership: the host calls close, unless a call that takes the communicator has succeeded. Set
/// struct_size of out_communicator before the call.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_communicator_shared_memory(
    path: *const c_char,
    rank: u32,
    size: u32,
    timeout_ms: u64,
    out_communicator: *mut pllm_communicator,
) -> *mut pllm_error {
    guard(|| {
        // SAFETY: the caller's contract.
        let path = unsafe {
            convert::out_size(out_communicator)?;
            string("path", path, PLLM_NUL_TERMINATED)
        }?;
        let group = SharedMemory::join(Path::new(path), rank as usize, size as usize, timeout(timeout_ms))?;
        // SAFETY: the caller's contract.
        unsafe { convert::write(out_communicator, &own::publish(Arc::new(group))) }
    })
}

fn timeout(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

fn milliseconds(timeout: Option<Duration>) -> u64 {
    timeout.map_or(0, |timeout| u64::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1))
}

/// Returns a handle of a communicator. It belongs to the library when the handle is adopted.
/// # Safety
/// As `convert::read`, and the functions keep to their contract until `close` returns.
pub(super) unsafe fn to_communicator(communicator: *const pllm_communicator) -> Result<Option<CommunicatorHandle>> {
    if communicator.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let functions = unsafe { convert::read(communicator) }?;
    functions.check()?;
    if let Some((communicator, number)) = own::find(&functions)? {
        return Ok(Some(CommunicatorHandle::with_owner(communicator, move || own::release(number))));
    }
    let communicator = Arc::new(HostCommunicator { functions, is_owned: AtomicBool::new(false), has_failed: AtomicBool::new(false) });
    let adopted = communicator.clone();
    Ok(Some(CommunicatorHandle::with_owner(communicator, move || adopted.is_owned.store(true, Ordering::Release))))
}

/// A communicator of the host.
struct HostCommunicator {
    functions: pllm_communicator,
    /// Whether the library closes it.
    is_owned: AtomicBool,
    has_failed: AtomicBool,
}

// SAFETY: any thread may call the functions, one at a time.
unsafe impl Send for HostCommunicator {}
// SAFETY: as above.
unsafe impl Sync for HostCommunicator {}

impl HostCommunicator {
    /// Calls a function. `call` returns `None` if it is NULL.
    fn call(&self, name: &str, call: impl FnOnce(*mut c_void) -> Option<i32>) -> Result<()> {
        let rank = self.functions.rank;
        if self.has_failed.load(Ordering::Acquire) {
            return Err(Error::new(Code::Internal, format!("an earlier call of the communicator of rank {rank} has failed")));
        }
        match call(self.functions.user_data) {
            Some(0) => Ok(()),
            result => {
                self.has_failed.store(true, Ordering::Release);
                let result = result.unwrap_or_default();
                Err(Error::new(Code::Internal, format!("{name} of the communicator of rank {rank} has returned {result}")))
            }
        }
    }

    /// Returns the length of a part, if `out` has one for each rank.
    fn part(&self, out: usize, part: usize) -> Result<u64> {
        match part.checked_mul(self.size()) == Some(out) {
            true => Ok(part as u64),
            false => Err(Error::internal(format!("out has {out} bytes, which is wrong for {} ranks", self.size()))),
        }
    }
}

impl Communicator for HostCommunicator {
    fn rank(&self) -> usize {
        self.functions.rank as usize
    }

    fn size(&self) -> usize {
        self.functions.size as usize
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize, timeout: Option<Duration>) -> Result<()> {
        let (data, len) = (bytes.as_mut_ptr().cast(), bytes.len() as u64);
        // SAFETY: the contract of the host; the bytes are valid during the call.
        self.call("broadcast", |host| Some(unsafe { self.functions.broadcast?(host, data, len, root as u32, milliseconds(timeout)) }))
    }

    fn all_gather(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        let (part, data, out) = (self.part(out.len(), bytes.len())?, bytes.as_ptr().cast(), out.as_mut_ptr().cast());
        // SAFETY: as above, and `out` has a part for each rank.
        self.call("all_gather", |host| Some(unsafe { self.functions.all_gather?(host, data, part, out, milliseconds(timeout)) }))
    }

    fn all_to_all(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        let part = self.part(out.len(), bytes.len() / self.size())?;
        self.part(bytes.len(), part as usize)?;
        let (data, out) = (bytes.as_ptr().cast(), out.as_mut_ptr().cast());
        // SAFETY: as above, for `bytes` too.
        self.call("all_to_all", |host| Some(unsafe { self.functions.all_to_all?(host, data, part, out, milliseconds(timeout)) }))
    }

    fn send(&self, bytes: &[u8], to: usize, timeout: Option<Duration>) -> Result<()> {
        let (data, len) = (bytes.as_ptr().cast(), bytes.len() as u64);
        // SAFETY: as for `broadcast`.
        self.call("send", |host| Some(unsafe { self.functions.send?(host, data, len, to as u32, milliseconds(timeout)) }))
    }

    fn receive(&self, bytes: &mut [u8], from: usize, timeout: Option<Duration>) -> Result<()> {
        let (data, len) = (bytes.as_mut_ptr().cast(), bytes.len() as u64);
        // SAFETY: as for `broadcast`.
        self.call("receive", |host| Some(unsafe { self.functions.receive?(host, data, len, from as u32, milliseconds(timeout)) }))
    }

    fn check_split(&self) -> Result<()> {
        match self.functions.split {
            Some(_) => Ok(()),
            None => Err(Error::unsupported("pllm_communicator.split is NULL; set it, or use only tensor_parallel or pipeline_parallel")),
        }
    }

    fn split(&self, color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>> {
        self.check_split()?;
        let color = u32::try_from(color).map_err(|_| Error::internal(format!("color is {color}; must be below 2^32")))?;
        let (mut user_data, mut rank, mut size) = (std::ptr::null_mut(), 0, 0);
        let results = (&raw mut user_data, &raw mut rank, &raw mut size);
        self.call("split", |host| {
            // SAFETY: as above; the results are valid for writing.
            Some(unsafe { self.functions.split?(host, color, milliseconds(timeout), results.0, results.1, results.2) })
        })?;
        let part = HostCommunicator {
            functions: pllm_communicator { user_data, rank, size, ..self.functions },
            is_owned: AtomicBool::new(true),
            has_failed: AtomicBool::new(false),
        };
        part.functions.check().map_err(|error| error.within("split"))?;
        Ok(Arc::new(part))
    }
}

impl Drop for HostCommunicator {
    fn drop(&mut self) {
        if let (true, Some(close)) = (self.is_owned.load(Ordering::Acquire), self.functions.close) {
            // SAFETY: the contract of the host. This is the last call.
            unsafe { close(self.functions.user_data) };
        }
    }
}

/// The functions of the library's communicators. The user data is a number, so that a communicator
/// that was closed is found out.
mod own {
    use super::*;

    /// The communicators of the host, by their numbers.
    static COMMUNICATORS: Mutex<BTreeMap<usize, Arc<dyn Communicator>>> = Mutex::new(BTreeMap::new());
    static NEXT: AtomicUsize = AtomicUsize::new(1);

    fn communicators() -> MutexGuard<'static, BTreeMap<usize, Arc<dyn Communicator>>> {
        COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a number that no other communicator of this process or of its parents has.
    fn new_number() -> usize {
        (std::process::id() as usize) << 32 | NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns whether the communicator belongs to a parent of this process. The lock may then have
    /// been held during the fork.
    fn is_of_parent(number: usize) -> bool {
        let process = number >> 32;
        process != 0 && process != std::process::id() as usize
    }

    fn get(user_data: *mut c_void) -> Result<Arc<dyn Communicator>> {
        if is_of_parent(user_data.addr()) {
            return Err(Error::unsupported("the communicator belongs to the parent of this process; create one after the fork"));
        }
        let communicator = communicators().get(&user_data.addr()).cloned();
        communicator.ok_or_else(|| Error::invalid("the communicator is closed, or belongs to an engine or a worker; create another one"))
    }

    /// Removes the communicator from those of the host. It is closed when nothing uses it.
    pub fn release(number: usize) {
        if is_of_parent(number) {
            return; // the memory is freed when this process ends
        }
        let communicator = communicators().remove(&number);
        drop(communicator); // not under the lock
    }

    /// A static, so that each function has one address.
    static FUNCTIONS: Functions = Functions(pllm_communicator {
        struct_size: size_of::<pllm_communicator>() as u64,
        user_data: std::ptr::null_mut(),
        rank: 0,
        size: 0,
        broadcast: Some(broadcast),
        all_gather: Some(all_gather),
        all_to_all: Some(all_to_all),
        send: Some(send),
        receive: Some(receive),
        split: Some(split),
        close: Some(close),
    });

    struct Functions(pllm_communicator);
    // SAFETY: the user data is NULL.
    unsafe impl Sync for Functions {}

    /// Returns a communicator for the host.
    pub fn publish(communicator: Arc<dyn Communicator>) -> pllm_communicator {
        let (rank, size) = (communicator.rank() as u32, communicator.size() as u32);
        let number = new_number();
        communicators().insert(number, communicator);
        pllm_communicator { user_data: std::ptr::without_provenance_mut(number), rank, size, ..FUNCTIONS.0 }
    }

    /// Returns the communicator of a struct that `publish` has returned, and its number, so that
    /// the library can use it directly. `None` for another one, also if only one function
    /// differs. Errors: the communicator is closed.
    pub fn find(functions: &pllm_communicator) -> Result<Option<(Arc<dyn Communicator>, usize)>> {
        if functions.functions() != FUNCTIONS.0.functions() {
            return Ok(None);
        }
        let communicator = get(functions.user_data)?;
        let is_unchanged = communicator.rank() == functions.rank as usize && communicator.size() == functions.size as usize;
        Ok(is_unchanged.then(|| (communicator, functions.user_data.addr())))
    }

    /// Runs a call of the host. Returns 0 or the code of the error.
    /// # Safety
    /// As `borrow`.
    unsafe fn run(user_data: *mut c_void, body: impl FnOnce(&dyn Communicator) -> Result<()>) -> i32 {
        let call = || body(&*get(user_data)?);
        guard_or(Code::Internal as i32, || call().map_or_else(|error| error.code() as i32, |()| 0))
    }

    /// # Safety
    /// As `slice`, for writing.
    unsafe fn slice_mut<'a>(name: &str, data: *mut c_void, len: u64) -> Result<&'a mut [u8]> {
        // SAFETY: the caller's contract. The checks are those of a slice to be read.
        let len = unsafe { slice(name, data.cast::<u8>(), len) }?.len();
        match len {
            0 => Ok(&mut []),
            // SAFETY: as above.
            _ => Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len) }),
        }
    }

    /// Returns the length of all parts.
    fn all(len: u64, communicator: &dyn Communicator) -> u64 {
        // A product that is too large is refused as a length.
        len.saturating_mul(communicator.size() as u64)
    }

    // SAFETY of the calls below: the contract of pllm_communicator.

    unsafe extern "C" fn broadcast(user_data: *mut c_void, bytes: *mut c_void, len: u64, root: u32, timeout_ms: u64) -> i32 {
        // SAFETY: as above.
        unsafe { run(user_data, |group| group.broadcast(slice_mut("bytes", bytes, len)?, root as usize, timeout(timeout_ms))) }
    }

    unsafe extern "C" fn all_gather(user_data: *mut c_void, bytes: *const c_void, len: u64, out: *mut c_void, timeout_ms: u64) -> i32 {
        let call = |group: &dyn Communicator| {
            // SAFETY: as above.
            let (bytes, out) = unsafe { (slice("bytes", bytes.cast(), len)?, slice_mut("out", out, all(len, group))?) };
            group.all_gather(bytes, out, timeout(timeout_ms))
        };
        // SAFETY: as above.
        unsafe { run(user_data, call) }
    }

    unsafe extern "C" fn all_to_all(user_data: *mut c_void, bytes: *const c_void, len: u64, out: *mut c_void, timeout_ms: u64) -> i32 {
        let call = |group: &dyn Communicator| {
            let len = all(len, group);
            // SAFETY: as above.
            let (bytes, out) = unsafe { (slice("bytes", bytes.cast(), len)?, slice_mut("out", out, len)?) };
            group.all_to_all(bytes, out, timeout(timeout_ms))
        };
        // SAFETY: as above.
        unsafe { run(user_data, call) }
    }

    unsafe extern "C" fn send(user_data: *mut c_void, bytes: *const c_void, len: u64, to: u32, timeout_ms: u64) -> i32 {
        // SAFETY: as above.
        unsafe { run(user_data, |group| group.send(slice("bytes", bytes.cast(), len)?, to as usize, timeout(timeout_ms))) }
    }

    unsafe extern "C" fn receive(user_data: *mut c_void, bytes: *mut c_void, len: u64, from: u32, timeout_ms: u64) -> i32 {
        // SAFETY: as above.
        unsafe { run(user_data, |group| group.receive(slice_mut("bytes", bytes, len)?, from as usize, timeout(timeout_ms))) }
    }

    unsafe extern "C" fn split(
        user_data: *mut c_void,
        color: u32,
        timeout_ms: u64,
        out_user_data: *mut *mut c_void,
        out_rank: *mut u32,
        out_size: *mut u32,
    ) -> i32 {
        let call = |group: &dyn Communicator| {
            not_null("out_user_data", out_user_data)?;
            let (out_rank, out_size) = (not_null("out_rank", out_rank)?, not_null("out_size", out_size)?);
            let part = publish(group.split(color as usize, timeout(timeout_ms))?);
            // SAFETY: as above.
            unsafe {
                out_user_data.write(part.user_data);
                out_rank.write(part.rank);
                out_size.write(part.size);
            }
            Ok(())
        };
        // SAFETY: as above.
        unsafe { run(user_data, call) }
    }

    unsafe extern "C" fn close(user_data: *mut c_void) {
        guard_or((), || release(user_data.addr()));
    }
}
