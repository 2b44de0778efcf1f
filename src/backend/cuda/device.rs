//! One device by its driver: memory, launches, copies, and what went wrong there.
//!
//! The driver works behind the host's back: a launch only says that work was queued. So ops that fail are remembered, nothing is launched
//! after the first, and `check` tells of it where somebody can hear: when a batch comes, and when results are read.

use std::ffi::{CString, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use super::context::{Called, Context, Event, Stream};
use super::kernels::Kernels;
use crate::error::{Code, Error, Result};

/// The oldest driver that knows the kernels' machine code.
const LEAST_DRIVER: c_int = 13_000;

/// A kernel of the device's module.
#[derive(Debug, Clone, Copy)]
pub struct Function(sys::CUfunction);

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Blocks, threads of each, and bytes of shared memory that a launch asks for.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub grid: (u32, u32, u32),
    pub threads: u32,
    pub shared: u32,
}

impl Shape {
    pub fn new(grid: (u32, u32, u32), threads: u32) -> Shape {
        Shape { grid, threads, shared: 0 }
    }
}

/// An address on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    pub const NULL: Address = Address(0);

    pub fn at(self, bytes: u64) -> Address {
        Address(self.0 + bytes)
    }
}

/// What kernels take.
pub trait Argument: Copy {}
impl Argument for Address {}
impl Argument for u32 {}
impl Argument for u64 {}
impl Argument for f32 {}

pub fn argument<T: Argument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Launches a kernel with arguments of exactly the types that it takes.
macro_rules! launch {
    ($device:expr, $function:expr, $shape:expr, $($argument:expr),+ $(,)?) => {
        $device.launch($function, $shape, &mut [$($crate::backend::cuda::device::argument(&$argument)),+])
    };
}
pub(super) use launch;

/// Bytes on the device.
pub struct Memory {
    context: Arc<Context>,
    address: Address,
    bytes: u64,
}

impl Memory {
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
            // SAFETY: allocated in this context, and dropped once. Who gives back what may still be in use waits first.
            let _ = self.context.calling(|| unsafe { result::free_sync(self.address.0) });
        }
    }
}

/// Bytes of the host that the device reaches by itself.
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its bytes; sharing follows the rules of & and &mut.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated so large, and zeroed at first.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; &mut self makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// With unified addressing the device knows it by the same address.
    pub fn address(&self) -> Address {
        Address(self.start as u64)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated in this context, and dropped once.
            let _ = self.context.calling(|| unsafe { result::free_host(self.start.cast()) });
        }
    }
}

/// A step that was recorded.
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, used by one thread at a time: whoever plays it holds the lock of all.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `end_recording`, and dropped once.
        let _ = self.context.calling(|| unsafe { result::graph::exec_destroy(self.handle) });
    }
}

/// What went wrong, until it is told.
#[derive(Default)]
struct Trouble {
    first: Option<Error>,
    /// Nothing can be computed in this context any more.
    lost: bool,
}

pub struct Device {
    context: Arc<Context>,
    pub kernels: Kernels,
    pub multiprocessors: u32,
    trouble: Mutex<Trouble>,
    /// Ops are not queued.
    skips: AtomicBool,
}

impl Device {
    /// `image` is the kernels' code.
    pub fn open(ordinal: usize, image: &[u8]) -> Result<Device> {
        check_driver(ordinal)?;
        let count = result::device::get_count().map_err(|e| failed("it was asked for devices", e))?;
        if ordinal >= count.max(0) as usize {
            return Err(no_device(ordinal, count));
        }
        let opening = |e| failed("a device was opened", e);
        let device = result::device::get(ordinal as c_int).map_err(opening)?;
        check_capability(ordinal, device)?;
        let multiprocessors = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let context = Context::new(device).map_err(opening)?;
        let load = || {
            // SAFETY: the image is a fatbin, which outlives the call; the driver copies what it needs.
            let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(|e| failed("the kernels were loaded", e))?;
            Kernels::load(|name| function(module, name))
        };
        let kernels = context.within(load).map_err(opening)??;
        Ok(Device { context: Arc::new(context), kernels, multiprocessors, trouble: Mutex::default(), skips: AtomicBool::new(false) })
    }

    pub fn memory(&self, bytes: u64) -> Result<Memory> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: the memory is owned by what is returned.
            let given = self.context.calling(|| unsafe { result::malloc_sync(bytes as usize) });
            address = given.map_err(|e| self.no_memory(bytes, e))?;
        }
        Ok(Memory { context: self.context.clone(), address: Address(address), bytes })
    }

    /// `remedy` is what to do where the machine does not give so much.
    pub fn pinned(&self, bytes: usize, remedy: &str) -> Result<Pinned> {
        let mut start: *mut u8 = std::ptr::dangling_mut::<u64>().cast();
        if bytes > 0 {
            // SAFETY: the memory is owned by what is returned, and written before it is read.
            let given = self.context.calling(|| unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) });
            start = given.map_err(|e| no_pinned_memory(bytes, remedy, e))?.cast();
            // SAFETY: so many bytes were just allocated.
            unsafe { start.write_bytes(0, bytes) };
        }
        Ok(Pinned { context: self.context.clone(), start, bytes })
    }

    /// Whether ops are skipped, since something else stands for them.
    pub fn skip(&self, whether: bool) {
        self.skips.store(whether, Relaxed);
    }

    /// Whether an op is to be queued.
    pub fn takes_ops(&self) -> bool {
        !self.skips.load(Relaxed) && self.is_sound()
    }

    /// From now on what is queued is recorded, and does not run. False: something failed, which `check` tells.
    pub fn begin_recording(&self) -> bool {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context.
        let begin = || unsafe { result::stream::begin_capture(self.stream(), mode) };
        if self.is_sound() {
            self.remember("a step was to be recorded", self.context.calling(begin));
        }
        self.is_sound()
    }

    /// What was queued since. None: something failed, which `check` tells.
    pub fn end_recording(&self) -> Option<Graph> {
        let make = |graph| {
            // SAFETY: the graph was just recorded, and is destroyed once it has been made ready.
            let made = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
            // SAFETY: as above.
            unsafe { result::graph::destroy(graph) }.and(made)
        };
        // SAFETY: the stream lives as long as the context.
        let end = || unsafe { result::stream::end_capture(self.stream()) };
        // A stream that still records takes nothing else: where the end fails, it is made again, and what comes of it is nothing.
        let again = || {
            // SAFETY: the graph was just recorded.
            let _ = end().and_then(|graph| unsafe { result::graph::destroy(graph) });
        };
        let made = self.context.calling(|| end().inspect_err(|_| again()).and_then(make));
        let graph = made.as_ref().ok().map(|&handle| Graph { context: self.context.clone(), handle });
        self.remember("a step was recorded", made.map(|_| ()));
        graph.iter().for_each(|graph| self.upload(graph));
        graph.filter(|_| self.is_sound())
    }

    /// What it takes of the device is taken now, and not where it is first played.
    fn upload(&self, graph: &Graph) {
        // SAFETY: the graph is of this context, as the stream is.
        let uploaded = self.context.calling(|| unsafe { result::graph::upload(graph.handle, self.stream()) });
        self.remember("a recorded step was sent", uploaded);
    }

    /// Queues what was recorded.
    pub fn play(&self, graph: &Graph) {
        if self.is_sound() {
            // SAFETY: the graph is of this context, and what its kernels read and write is where it was.
            let queued = self.context.calling(|| unsafe { result::graph::launch(graph.handle, self.stream()) });
            self.remember("a recorded step was launched", queued);
        }
    }

    /// Queues a kernel, unless something failed before.
    pub fn launch(&self, Function(function): Function, Shape { grid, threads, shared }: Shape, arguments: &mut [*mut c_void]) {
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 || !self.takes_ops() {
            return;
        }
        // SAFETY: the function is of this context's module; the ops of `mod.rs` pass what its signature says, and buffers as long as it says.
        let launch = || unsafe { result::launch_kernel(function, grid, (threads, 1, 1), shared, self.stream(), arguments) };
        let queued = self.context.calling(launch);
        self.remember("a kernel was launched", queued);
    }

    /// Queues a copy of these bytes to the same place on the device. They are pinned, and stay as they are until somebody has waited for them.
    pub fn send(&self, stream: Stream, to: &Memory, from: &Pinned, bytes: Range<usize>) {
        if bytes.is_empty() || !self.is_sound() {
            return;
        }
        if bytes.end as u64 > to.bytes || bytes.end > from.bytes {
            return self.refuse(Error::internal(format!("bytes {bytes:?} were to be sent, from {} to {}", from.bytes, to.bytes)));
        }
        let place = to.address.at(bytes.start as u64);
        // SAFETY: both are so long.
        let send = || unsafe { result::memcpy_htod_async(place.0, &from.bytes()[bytes], self.context.stream(stream)) };
        let queued = self.context.calling(send);
        self.remember("a batch was sent", queued);
    }

    /// Queues a copy of the first bytes of the device's memory. They are nobody's until somebody has waited for them.
    pub fn fetch(&self, stream: Stream, from: &Memory, to: &mut Pinned, bytes: usize) {
        if bytes == 0 || !self.is_sound() {
            return;
        }
        if bytes as u64 > from.bytes || bytes > to.bytes {
            return self.refuse(Error::internal(format!("{bytes} bytes were to be fetched, from {} to {}", from.bytes, to.bytes)));
        }
        // SAFETY: both are so long.
        let fetch = || unsafe { result::memcpy_dtoh_async(&mut to.bytes_mut()[..bytes], from.address.0, self.context.stream(stream)) };
        let queued = self.context.calling(fetch);
        self.remember("results were fetched", queued);
    }

    pub fn event(&self) -> Result<Event> {
        Event::new(&self.context).map_err(|e| failed("an event was made", e))
    }

    /// The event is behind all that was queued so far in this stream.
    pub fn record(&self, event: &Event, stream: Stream) {
        self.remember("an event was recorded", event.record(stream));
    }

    /// What is queued next in this stream comes after the event.
    pub fn hold_up(&self, stream: Stream, event: &Event) {
        self.remember("a stream was held up", event.hold_up(stream));
    }

    /// Waits for an event, and tells what went wrong.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.told("an event was waited for", event.wait())
    }

    /// Copies bytes to an offset, and waits for it.
    pub fn write(&self, to: &Memory, offset: u64, from: &[u8]) -> Result<()> {
        if offset + from.len() as u64 > to.bytes {
            return Err(Error::internal(format!("{} bytes were to be written at {offset} of {}", from.len(), to.bytes)));
        }
        if from.is_empty() {
            return self.check();
        }
        // SAFETY: the range was checked; the bytes are borrowed until the stream has been waited for.
        let write =
            || unsafe { result::memcpy_htod_async(to.address.0 + offset, from, self.stream()) }.and_then(|()| self.context.synchronize());
        let written = self.context.calling(write);
        self.told("the device was written to", written)
    }

    /// Copies runs of bytes, each from so far behind an address, and waits for all that was queued before.
    ///
    /// # Safety
    /// Behind the address lie as many bytes as the runs reach.
    pub unsafe fn read(&self, from: Address, to: &mut [u8], mut runs: impl Iterator<Item = (Range<usize>, usize)>) -> Result<()> {
        self.check()?;
        let read = || {
            let copied = runs.try_for_each(|(run, behind)| {
                let place = from.at(behind as u64).0;
                match &mut to[run] {
                    [] => Ok(()),
                    // SAFETY: the caller's contract; the bytes are borrowed until the stream has been waited for.
                    to => unsafe { result::memcpy_dtoh_async(to, place, self.stream()) },
                }
            });
            let waited = self.context.synchronize();
            copied.and(waited)
        };
        let copied = self.context.calling(read);
        self.told("results were read", copied)
    }

    /// Waits for all that was queued, and tells what went wrong.
    pub fn wait(&self) -> Result<()> {
        let waited = self.context.calling(|| self.context.synchronize());
        self.remember("the device was waited for", waited);
        self.check()
    }

    /// Tells what went wrong since it was last asked. A device that is lost says so each time.
    pub fn check(&self) -> Result<()> {
        let mut trouble = self.trouble();
        let first = if trouble.lost { trouble.first.clone() } else { trouble.first.take() };
        first.map_or(Ok(()), Err)
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Where kernels are queued.
    pub fn stream(&self) -> sys::CUstream {
        self.context.stream(Stream::Compute)
    }

    pub fn free_bytes(&self) -> Result<u64> {
        let (free, _) = self.context.calling(result::mem_get_info).map_err(|e| failed("it was asked for free memory", e))?;
        Ok(free as u64)
    }

    /// Nothing is launched until this has been told.
    pub fn refuse(&self, error: Error) {
        self.trouble().first.get_or_insert(error);
    }

    fn no_memory(&self, bytes: u64, e: DriverError) -> Error {
        if e.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return failed("memory was asked for", e);
        }
        let room = self.context.calling(result::mem_get_info);
        let free = room.map_or(String::new(), |(free, total)| format!(", of which {free} of {total} are free"));
        Error::new(
            Code::OutOfMemory,
            format!("the device would not give {bytes} bytes{free}: lower kv_bytes or max_batch_tokens, or choose another device"),
        )
    }

    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing works in the context any more.
    pub fn is_lost(&self) -> bool {
        self.trouble().lost
    }

    /// Whether nothing is wrong that has not been told.
    pub fn is_sound(&self) -> bool {
        self.trouble().first.is_none()
    }

    fn remember(&self, what: &str, result: Called<()>) {
        let Err(e) = result else { return };
        let mut trouble = self.trouble();
        match (trouble.lost, is_sticky(e.0)) {
            (false, true) => *trouble = Trouble { first: Some(lost(what, e)), lost: true },
            _ => drop(trouble.first.get_or_insert_with(|| failed(what, e))),
        }
    }

    fn told(&self, what: &str, result: Called<()>) -> Result<()> {
        self.remember(what, result);
        self.check()
    }
}

fn no_device(ordinal: usize, count: c_int) -> Error {
    Error::unsupported(format!(
        "device is cuda:{ordinal} and this machine has {count} CUDA devices, counted from 0: choose one of them, or \"cpu\""
    ))
}

/// That there is one, and that it is new enough. cudarc panics where it looks for one in vain.
fn check_driver(ordinal: usize) -> Result<()> {
    // SAFETY: opens the library, which its makers mean to be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::unsupported(format!(
            "device is cuda:{ordinal} and this machine has no CUDA driver (libcuda.so): install NVIDIA's, or choose \"cpu\""
        )));
    }
    result::init().map_err(|e| match e.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => no_device(ordinal, 0),
        _ => failed("the driver was started", e),
    })?;
    let mut version = 0;
    // SAFETY: the place is written, not read.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(|e| failed("the driver was asked for its version", e))?;
    let name = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
    if version < LEAST_DRIVER {
        let (has, needs) = (name(version), name(LEAST_DRIVER));
        return Err(Error::unsupported(format!("the CUDA driver knows CUDA {has}, and {needs} is needed: update NVIDIA's driver")));
    }
    Ok(())
}

/// The kernels copy behind the processor's back, and multiply numbers in bf16: from 8.0 on devices can.
fn check_capability(ordinal: usize, device: sys::CUdevice) -> Result<()> {
    let major = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major < 8 {
        let name = result::device::get_name(device).unwrap_or_default();
        return Err(Error::unsupported(format!(
            "device cuda:{ordinal} ({name}) has compute capability {major}.{minor}: 8.0 or newer is needed"
        )));
    }
    Ok(())
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<u32> {
    // SAFETY: the device is one of the driver's.
    let value = unsafe { result::device::get_attribute(device, which) };
    value.map(|value| value.max(0) as u32).map_err(|e| failed("the device was asked for its size", e))
}

fn function(module: sys::CUmodule, name: &str) -> Result<Function> {
    let symbol = CString::new(name).map_err(|_| Error::internal("a kernel's name has a zero in it"))?;
    // SAFETY: the module was loaded in the current context, and is never unloaded before it.
    let function = unsafe { result::module::get_function(module, symbol) };
    let function = function.map_err(|e| Error::internal(format!("the kernel {name} is missing: {}", describe(e))))?;
    // Now, and not where it is first launched: its code takes memory.
    // SAFETY: as above.
    unsafe { sys::cuFuncLoad(function) }.result().map_err(|e| failed("a kernel was loaded", e))?;
    Ok(Function(function))
}

impl Function {
    /// Lets launches ask for more shared memory than the 48 KiB that all may.
    pub fn allow_shared(self, bytes: u32) -> Result<()> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of a module in the current context.
        let allowed = unsafe { result::function::set_function_attribute(self.0, which, bytes as c_int) };
        allowed.map_err(|e| failed("shared memory was asked for", e))
    }
}

/// Whether nothing works in the context from then on, as the driver's documentation says.
fn is_sticky(result: CUresult) -> bool {
    use CUresult::*;
    matches!(
        result,
        CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_UNKNOWN
    )
}

fn describe(e: DriverError) -> String {
    let name = e.error_name().map_or("unknown error".into(), |name| name.to_string_lossy());
    let text = e.error_string().map_or("".into(), |text| text.to_string_lossy());
    format!("{name} ({}): {text}", e.0 as u32)
}

fn failed(what: &str, e: DriverError) -> Error {
    use CUresult::*;
    match e.0 {
        CUDA_ERROR_OUT_OF_MEMORY => {
            Error::new(Code::OutOfMemory, format!("the device ran out of memory when {what}: lower kv_bytes or max_batch_tokens"))
        }
        CUDA_ERROR_STUB_LIBRARY
        | CUDA_ERROR_SYSTEM_NOT_READY
        | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => Error::unsupported(format!(
            "the CUDA driver does not work here: {}: install the one that fits this machine, or choose \"cpu\"",
            describe(e)
        )),
        _ => Error::internal(format!("the CUDA driver failed when {what}: {}", describe(e))),
    }
}

/// Of errors after which nothing works in a context.
fn lost(what: &str, e: DriverError) -> Error {
    Error::internal(format!(
        "the CUDA driver failed when {what}: {}; this engine computes nothing any more: free it, and create another",
        describe(e)
    ))
}

fn no_pinned_memory(bytes: usize, remedy: &str, e: DriverError) -> Error {
    match e.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            Error::new(Code::OutOfMemory, format!("the machine would not give {bytes} bytes that the device can reach: {remedy}"))
        }
        _ => failed("memory of the host was asked for", e),
    }
}
