//! Device memory and pinned host memory.

use std::sync::Arc;

use cudarc::driver::{result, sys};

pub use super::address::Address;
use super::context::Context;
use super::errors::Called;

/// Device memory.
pub struct Memory {
    context: Arc<Context>,
    address: Address,
    bytes: u64,
}

impl Memory {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Called<Memory> {
        let address = match bytes {
            0 => 0,
            // SAFETY: the returned `Memory` owns the allocation.
            _ => context.calling(|| unsafe { result::malloc_sync(bytes as usize) })?,
        };
        Ok(Memory { context: context.clone(), address: Address(address), bytes })
    }

    pub fn address(&self) -> Address {
        self.address
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated in this context, and freed once. Callers that free memory in use
            // wait for the device first.
            let _ = self.context.calling(|| unsafe { result::free_sync(self.address.0) });
        }
    }
}

/// Pinned host memory, which the device can access.
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: `Pinned` owns its bytes, and access follows the rules of & and &mut.
unsafe impl Send for Pinned {}
// SAFETY: `Pinned` owns its bytes, and access follows the rules of & and &mut.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeroed memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Called<Pinned> {
        let mut start: *mut u8 = std::ptr::dangling_mut::<u64>().cast();
        if bytes > 0 {
            // SAFETY: the returned `Pinned` owns the allocation, which is written before it is
            // read.
            start = context.calling(|| unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) })?.cast();
            // SAFETY: the allocation has `bytes` bytes.
            unsafe { start.write_bytes(0, bytes) };
        }
        Ok(Pinned { context: context.clone(), start, bytes })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has `bytes` bytes, which were zeroed.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has `bytes` bytes, which were zeroed. &mut self guarantees
        // exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Returns the address. With unified addressing, it is the same on the device.
    pub fn address(&self) -> Address {
        Address(self.start as u64)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated in this context, and freed once.
            let _ = self.context.calling(|| unsafe { result::free_host(self.start.cast()) });
        }
    }
}
