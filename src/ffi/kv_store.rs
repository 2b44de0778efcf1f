use std::collections::HashMap;
use std::ffi::c_void;
use std::time::Duration;

use super::convert::{self, Versioned, init};
use super::guard_or;
use crate::error::{Error, Result};
use crate::types::kv_store::{Completion, KvStore, KvStoreHandle, Operation, OperationResult, StoreSecret};
use crate::types::options::KvStoreOptions;

/// The operation has succeeded.
pub const PLLM_KV_DONE: u32 = 0;
/// The store has no value of the key.
pub const PLLM_KV_MISSING: u32 = 1;
/// The operation has failed.
pub const PLLM_KV_FAILED: u32 = 2;

/// A part of a value. An element of arrays, so it never grows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_kv_buffer {
    /// First byte.
    pub data: *mut c_void,
    /// Length in bytes.
    pub len: u64,
}

/// The end of an operation of a KV store. An element of arrays, so it never grows.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_kv_completion {
    /// Token of the operation.
    pub token: u64,
    /// For get: the size of the stored value in bytes. If it differs from the size of the buffers,
    /// the value counts as damaged. Otherwise ignored.
    pub bytes: u64,
    /// One of PLLM_KV_DONE, PLLM_KV_MISSING, PLLM_KV_FAILED. Other values count as PLLM_KV_FAILED.
    pub status: u32,
    /// Ignored.
    pub reserved: u32,
}

/// Starts to look for keys_len keys of 32 bytes each, back to back. Before the completion, sets
/// out_found[i] to 1 if the store has key i. The bytes are 0 before the call. Returns 0 if the
/// operation has started. After another value, there is no completion.
pub type pllm_kv_exists =
    Option<unsafe extern "C" fn(user_data: *mut c_void, token: u64, keys: *const u8, keys_len: u64, out_found: *mut u8) -> i32>;
/// Starts to read the value of a key of 32 bytes into buffers_len buffers, one after the other.
/// Returns as pllm_kv_exists.
pub type pllm_kv_get = Option<
    unsafe extern "C" fn(user_data: *mut c_void, token: u64, key: *const u8, buffers: *const pllm_kv_buffer, buffers_len: u64) -> i32,
>;
/// Starts to write a value, which is the concatenation of the buffers. The store does not change
/// the buffers. If it has a value of this key, it may keep that one. Returns as pllm_kv_exists.
pub type pllm_kv_put = Option<
    unsafe extern "C" fn(user_data: *mut c_void, token: u64, key: *const u8, buffers: *const pllm_kv_buffer, buffers_len: u64) -> i32,
>;
/// Starts to remove a value, which was damaged. Returns as pllm_kv_exists.
pub type pllm_kv_remove = Option<unsafe extern "C" fn(user_data: *mut c_void, token: u64, key: *const u8) -> i32>;
/// Waits until an operation ends, at most timeout_us microseconds; 0 does not wait. Writes up to
/// capacity completions and returns their number. The engine calls it only while operations are in
/// flight.
pub type pllm_kv_poll =
    Option<unsafe extern "C" fn(user_data: *mut c_void, timeout_us: u64, out_completions: *mut pllm_kv_completion, capacity: u64) -> u64>;
/// Ends all operations. After it returns, the store uses no buffer, and the engine calls no
/// function.
pub type pllm_kv_close = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// A store that keeps KV blocks outside of the pool: on a disk, on another host. The functions
/// start operations and return at once; poll reports their end. A key names a block of one model,
/// layout and instruction path, and one salt, by its tokens. Values have a checksum. A store that
/// fails, is slow or returns damaged values costs computation, never correctness. It is trusted not
/// to forge values, unless kv_store_secret of pllm_engine_options is set.
///
/// Threads: one thread of the engine calls all functions, one at a time. They must return normally:
/// no exception, no longjmp. They must not call the engine.
///
/// Ownership: the engine copies the struct. user_data is valid until close returns. If
/// pllm_engine_create fails, the engine calls no function, and the host may use or close the store.
/// Keys and arrays of buffers are valid during the call; the memory of buffers and out_found until
/// the completion, or until close returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_kv_store {
    /// sizeof(pllm_kv_store).
    pub struct_size: u64,
    /// Passed to the functions.
    pub user_data: *mut c_void,
    /// Looks for keys. Required.
    pub exists: pllm_kv_exists,
    /// Reads a value. Required.
    pub get: pllm_kv_get,
    /// Writes a value. Required.
    pub put: pllm_kv_put,
    /// Removes a value. Required.
    pub remove: pllm_kv_remove,
    /// Reports the end of operations. Required.
    pub poll: pllm_kv_poll,
    /// Ends the use of the store. Required. pllm_engine_free waits for it, and for the last writes,
    /// up to kv_store_timeout_ms and 2 seconds. If close does not return by then, its thread is
    /// left behind, and user_data and the code of the store must stay valid.
    pub close: pllm_kv_close,
}

// SAFETY: repr(C), a number, a pointer and nullable functions only.
unsafe impl Versioned for pllm_kv_store {
    const NAME: &'static str = "pllm_kv_store";
    const FIRST_SIZE: usize = 64;
    fn defaults() -> Self {
        pllm_kv_store {
            struct_size: size_of::<Self>() as u64,
            user_data: std::ptr::null_mut(),
            exists: None,
            get: None,
            put: None,
            remove: None,
            poll: None,
            close: None,
        }
    }
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_kv_store_init(store: *mut pllm_kv_store, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(store, struct_size) });
}

/// Limits of a store as in `pllm_engine_options`. 0 selects a default.
pub(super) struct StoreLimits {
    pub max_bytes: u64,
    pub max_operations: u32,
    pub timeout_ms: u32,
}

/// Returns the store of the options.
/// # Safety
/// As `convert::read`, and the functions keep to their contract until `close` returns.
pub(super) unsafe fn to_store(store: *const pllm_kv_store, secret: &[u8], limits: StoreLimits) -> Result<Option<KvStoreOptions>> {
    if store.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let store = unsafe { convert::read(store) }?;
    let functions = [
        ("exists", store.exists.is_none()),
        ("get", store.get.is_none()),
        ("put", store.put.is_none()),
        ("remove", store.remove.is_none()),
        ("poll", store.poll.is_none()),
        ("close", store.close.is_none()),
    ];
    if let Some((name, _)) = functions.into_iter().find(|(_, is_missing)| *is_missing) {
        return Err(Error::invalid(format!("pllm_kv_store.{name} is NULL; set all functions of the store")));
    }
    let mut options = KvStoreOptions::new(KvStoreHandle::new(Box::new(HostStore { store, in_flight: HashMap::new() })));
    if limits.max_bytes > 0 {
        options.max_bytes = limits.max_bytes;
    }
    if limits.max_operations > 0 {
        options.max_operations = limits.max_operations as usize;
    }
    if limits.timeout_ms > 0 {
        options.timeout = Duration::from_millis(limits.timeout_ms as u64);
    }
    options.secret = (!secret.is_empty()).then(|| StoreSecret(secret.to_vec()));
    Ok(Some(options))
}

/// Maximum number of completions of one poll.
const COMPLETIONS: usize = 64;

/// A store of the host. It owns the buffers of the operations in flight. The heap memory of a
/// vector does not move with the vector.
struct HostStore {
    store: pllm_kv_store,
    in_flight: HashMap<u64, Operation>,
}

// SAFETY: the functions may be called by any thread of the engine, one at a time.
unsafe impl Send for HostStore {}

/// Size of the header of a value, which is a buffer of its own.
const HEADER: usize = 80;

/// Returns the header and the block of a value as two buffers.
fn buffers(value: &mut [u8]) -> [pllm_kv_buffer; 2] {
    let (header, block) = value.split_at_mut(HEADER.min(value.len()));
    [header, block].map(|part| pllm_kv_buffer { data: part.as_mut_ptr().cast(), len: part.len() as u64 })
}

impl HostStore {
    /// Calls the function of an operation, whose buffers stay in place until its end.
    fn call(&mut self, token: u64) -> Option<i32> {
        let pllm_kv_store { user_data, exists, get, put, remove, .. } = self.store;
        let operation = self.in_flight.get_mut(&token)?;
        // SAFETY: the contract of the host. The buffers live in `in_flight` until the completion, and
        // `close` ends their use before they are freed.
        unsafe {
            match operation {
                Operation::Exists { keys, found } => {
                    Some(exists?(user_data, token, keys.as_ptr().cast(), keys.len() as u64, found.as_mut_ptr()))
                }
                Operation::Get { key, value } => {
                    let parts = buffers(value);
                    Some(get?(user_data, token, key.as_ptr(), parts.as_ptr(), parts.len() as u64))
                }
                Operation::Put { key, value } => {
                    let parts = buffers(value);
                    Some(put?(user_data, token, key.as_ptr(), parts.as_ptr(), parts.len() as u64))
                }
                Operation::Remove { key } => Some(remove?(user_data, token, key.as_ptr())),
            }
        }
    }
}

impl KvStore for HostStore {
    fn start(&mut self, token: u64, operation: Operation) -> std::result::Result<(), Operation> {
        self.in_flight.insert(token, operation);
        match self.call(token) {
            Some(0) => Ok(()),
            _ => Err(self.in_flight.remove(&token).expect("it was just inserted")),
        }
    }

    fn poll(&mut self, timeout: Duration, ended: &mut Vec<Completion>) {
        let Some(poll) = self.store.poll else { return };
        let mut completions = [pllm_kv_completion::default(); COMPLETIONS];
        // SAFETY: the contract of the host; the array has the given length.
        let count = unsafe { poll(self.store.user_data, timeout.as_micros() as u64, completions.as_mut_ptr(), COMPLETIONS as u64) };
        for completion in completions.iter().take(usize::try_from(count).unwrap_or(usize::MAX)) {
            // An unknown token is a defect of the store without consequences.
            let Some(operation) = self.in_flight.remove(&completion.token) else { continue };
            let result = match completion.status {
                PLLM_KV_DONE => OperationResult::Done(completion.bytes),
                PLLM_KV_MISSING => OperationResult::Missing,
                _ => OperationResult::Failed,
            };
            ended.push(Completion { token: completion.token, operation, result });
        }
    }

    fn close(&mut self) {
        if let Some(close) = self.store.close {
            // SAFETY: the contract of the host.
            unsafe { close(self.store.user_data) };
        }
        self.in_flight.clear();
    }
}
