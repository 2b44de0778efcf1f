//! A device, accessed through the driver API: launches, copies and pending errors.
//!
//! The driver runs asynchronously: a launch only reports that work was queued. So errors are
//! recorded, nothing is launched after the first one, and `check` reports it to callers that return
//! a Result: when a batch is uploaded and when results are read.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use super::backlog::Backlog;
use super::context::{Context, Event, Stream};
use super::device_context::DeviceContext;
use super::errors::{Called, failed, is_sticky, lost, no_device, no_pinned_memory, used_before_fork};
use super::function::{Function, Shape};
use super::image::MIN_DRIVER;
use super::kernels::Kernels;
use super::memory::{Address, Memory, Pinned};
use super::watchdog::Watchdog;
use crate::error::{Code, Error, Result};
use crate::sys::process::Owner;

/// Thread blocks that occupy a multiprocessor, for kernels with several blocks on one.
pub const BLOCKS_PER_MULTIPROCESSOR: u32 = 3;

/// A captured step.
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
}

// SAFETY: the driver permits the use of the handle from any thread, one at a time. Launches happen
// under the lock of `Steps`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: `end_recording` created it, and it is destroyed once.
        let _ = self.context.calling(|| unsafe { result::graph::exec_destroy(self.handle) });
    }
}

/// The first error that has not been reported.
#[derive(Default)]
struct DeviceError {
    first: Option<Error>,
    /// True if the context is unusable.
    lost: bool,
}

pub struct Device {
    context: Arc<Context>,
    pub kernels: Arc<Kernels>,
    pub multiprocessors: u32,
    /// The version of the driver, such as 12040 for CUDA 12.4.
    pub driver_version: c_int,
    failure: Mutex<DeviceError>,
    /// True if ops are skipped instead of queued.
    skips: AtomicBool,
    /// Limits waits for other workers, if there are any.
    watchdog: OnceLock<Watchdog>,
    /// Limits the queued work, so that all waits are watched.
    backlog: OnceLock<Backlog>,
}

impl Device {
    /// Opens a device. `primary`: the primary context of the device is used, for exchanges with
    /// other devices.
    pub fn open(ordinal: usize, primary: bool) -> Result<Device> {
        let driver_version = check_driver(ordinal)?;
        let count = result::device::get_count().map_err(|e| failed("count the devices", e))?;
        if ordinal >= count.max(0) as usize {
            return Err(no_device(ordinal, count));
        }
        let opening = |e| failed("open the device", e);
        let device = result::device::get(ordinal as c_int).map_err(opening)?;
        let capability = check_capability(ordinal, device)?;
        let multiprocessors = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let (shared, kernels) = DeviceContext::shared(device, capability, primary)?;
        let context = Arc::new(Context::new(shared).map_err(opening)?);
        let (failure, skips) = (Mutex::default(), AtomicBool::new(false));
        Ok(Device {
            context,
            kernels,
            multiprocessors,
            driver_version,
            failure,
            skips,
            watchdog: OnceLock::new(),
            backlog: OnceLock::new(),
        })
    }

    /// Sets the watchdog, which limits all waits from now on.
    pub fn set_watchdog(&self, watchdog: Watchdog) -> Result<()> {
        let _ = self.watchdog.set(watchdog);
        let _ = self.backlog.set(Backlog::new([self.event()?, self.event()?]));
        Ok(())
    }

    /// Counts work that was queued. With other workers, it waits if too much is queued.
    pub fn count_launches(&self, launches: usize) {
        if let Some(windows) = self.backlog.get().and_then(|backlog| backlog.count(launches)) {
            self.wait_for_pending(&windows.ends[0]);
            self.record(&windows.ends[0], Stream::Compute);
        }
    }

    /// Waits for the device, and at most as long as other workers may take.
    fn watched<T>(&self, wait: impl FnOnce() -> Called<T>) -> Called<T> {
        let Some(watchdog) = self.watchdog.get() else { return wait() };
        let result = watchdog.watch(wait);
        if let Some(error) = watchdog.failure() {
            self.lose(error);
        }
        result
    }

    pub fn memory(&self, bytes: u64) -> Result<Memory> {
        Memory::new(&self.context, bytes).map_err(|e| self.no_memory(bytes, e))
    }

    /// Grows memory to at least `bytes`. Its contents are lost.
    pub fn grow<'a>(&self, memory: &'a mut Option<Memory>, bytes: u64) -> Result<&'a Memory> {
        if memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            self.wait()?; // no queued work uses the memory that is freed
            *memory = None;
            *memory = Some(self.memory(bytes)?);
        }
        memory.as_ref().ok_or_else(Error::out_of_memory)
    }

    /// Allocates pinned memory. `remedy` is the advice of the error if the allocation fails.
    pub fn pinned(&self, bytes: usize, remedy: &str) -> Result<Pinned> {
        Pinned::new(&self.context, bytes).map_err(|e| no_pinned_memory(bytes, remedy, e))
    }

    /// Sets whether ops are skipped, because a captured graph or an earlier result replaces them.
    pub fn skip(&self, whether: bool) {
        self.skips.store(whether, Relaxed);
    }

    /// Returns true if ops are queued.
    pub fn takes_ops(&self) -> bool {
        !self.skips.load(Relaxed) && self.is_sound()
    }

    /// Starts the capture of ops, which do not run. Returns false after an error, which `check`
    /// reports.
    pub fn begin_recording(&self) -> bool {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context.
        let begin = || unsafe { result::stream::begin_capture(self.stream(), mode) };
        if self.is_sound() {
            self.remember("start the capture of a graph", self.context.calling(begin));
        }
        self.is_sound()
    }

    /// Ends the capture and returns its graph. Returns None after an error, which `check` reports.
    pub fn end_recording(&self) -> Option<Graph> {
        let make = |graph| {
            // SAFETY: the graph was just captured, and is destroyed after the instantiation.
            let made = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
            // SAFETY: the graph was just captured and is not used afterwards.
            unsafe { result::graph::destroy(graph) }.and(made)
        };
        // SAFETY: the stream lives as long as the context.
        let end = || unsafe { result::stream::end_capture(self.stream()) };
        // A stream in capture mode rejects other work. If ending the capture fails, it is ended
        // again and the result is discarded.
        let again = || {
            // SAFETY: the graph was just captured and is not used afterwards.
            let _ = end().and_then(|graph| unsafe { result::graph::destroy(graph) });
        };
        let made = self.context.calling(|| end().inspect_err(|_| again()).and_then(make));
        let graph = made.as_ref().ok().map(|&handle| Graph { context: self.context.clone(), handle });
        self.remember("capture a graph", made.map(|_| ()));
        graph.iter().for_each(|graph| self.upload(graph));
        graph.filter(|_| self.is_sound())
    }

    /// Uploads a graph, so that its device memory is allocated now and not at its first launch.
    fn upload(&self, graph: &Graph) {
        // SAFETY: graph and stream belong to this context.
        let uploaded = self.context.calling(|| unsafe { result::graph::upload(graph.handle, self.stream()) });
        self.remember("upload a graph", uploaded);
    }

    /// Launches a captured graph.
    pub fn play(&self, graph: &Graph) {
        if self.is_sound() {
            // SAFETY: the graph belongs to this context, and the buffers of its kernels have not
            // moved.
            let queued = self.context.calling(|| unsafe { result::graph::launch(graph.handle, self.stream()) });
            self.remember("launch a graph", queued);
        }
    }

    /// Queues a kernel, unless an error is pending or ops are skipped.
    pub fn launch(&self, function: Function, shape: Shape, arguments: &mut [*mut c_void]) {
        let grid = shape.grid;
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 || !self.takes_ops() {
            return;
        }
        // SAFETY: the function belongs to this context's module. The ops of `ops.rs` pass the
        // arguments of its signature, and buffers of the sizes that it states.
        let launch = || unsafe { function.launch(shape, self.stream(), arguments) };
        let queued = self.context.calling(launch);
        self.remember("launch a kernel", queued);
        self.count_launches(1);
    }

    /// Queues a copy of these bytes to the same offset on the device. The bytes must not change
    /// before the copy has been waited for.
    pub fn send(&self, stream: Stream, to: &Memory, from: &Pinned, bytes: Range<usize>) {
        self.send_to(stream, to, bytes.start as u64, from, bytes);
    }

    /// The same to another offset.
    pub fn send_to(&self, stream: Stream, to: &Memory, offset: u64, from: &Pinned, bytes: Range<usize>) {
        if bytes.is_empty() || !self.is_sound() {
            return;
        }
        let (all, space) = (from.bytes(), to.bytes());
        if offset + bytes.len() as u64 > space || bytes.end > all.len() {
            return self.refuse(Error::internal(format!("copy of bytes {bytes:?} from {} bytes to offset {offset} of {space}", all.len())));
        }
        let place = to.address().at(offset);
        // SAFETY: the check above bounds both ranges.
        let send = || unsafe { result::memcpy_htod_async(place.0, &all[bytes], self.context.stream(stream)) };
        let queued = self.context.calling(send);
        self.remember("copy to the device", queued);
    }

    /// Queues a copy of these bytes to the same offset in pinned memory. They must not be read
    /// before the copy has been waited for.
    pub fn fetch(&self, stream: Stream, from: &Memory, to: &mut Pinned, bytes: Range<usize>) {
        if bytes.is_empty() || !self.is_sound() {
            return;
        }
        let (all, space) = (from.bytes(), to.bytes().len());
        if bytes.end as u64 > all || bytes.end > space {
            return self.refuse(Error::internal(format!("copy of bytes {bytes:?} from {all} bytes to {space}")));
        }
        let place = from.address().at(bytes.start as u64);
        // SAFETY: the check above bounds both ranges.
        let fetch = || unsafe { result::memcpy_dtoh_async(&mut to.bytes_mut()[bytes], place.0, self.context.stream(stream)) };
        let queued = self.context.calling(fetch);
        self.remember("copy results from the device", queued);
    }

    /// Queues a copy within the device.
    ///
    /// # Safety
    /// Both addresses have this many bytes.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: usize) {
        if bytes > 0 && self.takes_ops() {
            // SAFETY: the caller guarantees the addresses.
            let queued = self.context.calling(|| unsafe { result::memcpy_dtod_async(to.0, from.0, bytes, self.stream()) });
            self.remember("copy on the device", queued);
        }
    }

    /// Queues zeros for the first `bytes` bytes.
    pub fn clear(&self, memory: &Memory, bytes: u64) {
        if bytes > memory.bytes() {
            return self.refuse(Error::internal(format!("zeros for {bytes} of {} bytes", memory.bytes())));
        }
        // SAFETY: the check above bounds the range.
        let queued = self.context.calling(|| unsafe { result::memset_d8_async(memory.address().0, 0, bytes as usize, self.stream()) });
        self.remember("clear memory", queued);
    }

    pub fn event(&self) -> Result<Event> {
        Event::new(&self.context).map_err(|e| failed("create an event", e))
    }

    /// Records the event after all work queued so far in this stream.
    pub fn record(&self, event: &Event, stream: Stream) {
        self.remember("record an event", event.record(stream));
    }

    /// Makes later work of this stream wait for the event.
    pub fn hold_up(&self, stream: Stream, event: &Event) {
        self.remember("make a stream wait for an event", event.hold_up(stream));
    }

    /// Waits for an event, and reports pending errors.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.report("wait for an event", self.watched(|| event.wait()))
    }

    /// Waits for an event, and leaves its error pending.
    pub fn wait_for_pending(&self, event: &Event) {
        self.remember("wait for an event", self.watched(|| event.wait()));
    }

    /// Copies bytes to an offset, and waits for the copy.
    pub fn write(&self, to: &Memory, offset: u64, from: &[u8]) -> Result<()> {
        if offset + from.len() as u64 > to.bytes() {
            return Err(Error::internal(format!("copy of {} bytes to offset {offset} of {}", from.len(), to.bytes())));
        }
        if from.is_empty() {
            return self.check();
        }
        // SAFETY: the check above bounds the range. The bytes are borrowed until the stream has
        // been waited for.
        let write =
            || unsafe { result::memcpy_htod_async(to.address().0 + offset, from, self.stream()) }.and_then(|()| self.context.synchronize());
        let written = self.watched(|| self.context.calling(write));
        self.report("copy to the device", written)
    }

    /// Copies ranges of bytes, each from an offset behind an address, and waits for all work queued
    /// so far.
    ///
    /// # Safety
    /// The device memory at the address contains all ranges at their offsets.
    pub unsafe fn read(&self, from: Address, to: &mut [u8], mut runs: impl Iterator<Item = (Range<usize>, usize)>) -> Result<()> {
        self.check()?;
        let read = || {
            let copied = runs.try_for_each(|(run, behind)| {
                let place = from.at(behind as u64).0;
                match &mut to[run] {
                    [] => Ok(()),
                    // SAFETY: the caller guarantees the ranges. The bytes are borrowed until the
                    // stream has been waited for.
                    to => unsafe { result::memcpy_dtoh_async(to, place, self.stream()) },
                }
            });
            let waited = self.context.synchronize();
            copied.and(waited)
        };
        let copied = self.watched(|| self.context.calling(read));
        self.report("read results", copied)
    }

    /// Waits for all queued work, and reports pending errors.
    pub fn wait(&self) -> Result<()> {
        let waited = self.watched(|| self.context.calling(|| self.context.synchronize()));
        self.remember("wait for the device", waited);
        self.check()
    }

    /// Reports and clears the pending error. If the device is lost, every call reports it.
    pub fn check(&self) -> Result<()> {
        let mut failure = self.failure();
        let first = if failure.lost { failure.first.clone() } else { failure.first.take() };
        first.map_or(Ok(()), Err)
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the number of thread blocks that occupy the device.
    pub fn blocks_at_once(&self) -> u32 {
        BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors
    }

    /// Returns the stream of kernels.
    pub fn stream(&self) -> sys::CUstream {
        self.context.stream(Stream::Compute)
    }

    pub fn free_bytes(&self) -> Result<u64> {
        let (free, _) = self.context.calling(result::mem_get_info).map_err(|e| failed("report its free memory", e))?;
        Ok(free as u64)
    }

    /// Records an error. Nothing is launched until it has been reported.
    pub fn refuse(&self, error: Error) {
        self.failure().first.get_or_insert(error);
    }

    /// Marks the device as lost: no exchange with other workers is possible after this error. An
    /// earlier error that has not been reported is its cause.
    pub fn lose(&self, error: Error) {
        let mut failure = self.failure();
        if !failure.lost {
            let cause = failure.first.take().unwrap_or(error);
            let message = format!("{}; other workers depend on this one, so free this engine and create another", cause.message());
            *failure = DeviceError { first: Some(Error::new(Code::Internal, message)), lost: true };
        }
    }

    fn no_memory(&self, bytes: u64, e: DriverError) -> Error {
        if e.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return failed("allocate device memory", e);
        }
        let memory = self.context.calling(result::mem_get_info);
        let free = memory.map_or(String::new(), |(free, total)| format!(", {free} of {total} are free"));
        Error::new(
            Code::OutOfMemory,
            format!("not enough device memory ({bytes} bytes{free}); lower kv_bytes or max_batch_tokens, or set device to another one"),
        )
    }

    fn failure(&self) -> MutexGuard<'_, DeviceError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the context is unusable.
    pub fn is_lost(&self) -> bool {
        self.failure().lost
    }

    /// Returns true if no error is pending.
    pub fn is_sound(&self) -> bool {
        self.failure().first.is_none()
    }

    fn remember(&self, what: &str, result: Called<()>) {
        let Err(e) = result else { return };
        let mut failure = self.failure();
        match (failure.lost, is_sticky(e.0)) {
            (false, true) => *failure = DeviceError { first: Some(lost(what, e, self.context.is_primary())), lost: true },
            _ => drop(failure.first.get_or_insert_with(|| failed(what, e))),
        }
    }

    fn report(&self, what: &str, result: Called<()>) -> Result<()> {
        self.remember(what, result);
        self.check()
    }
}

/// The process that has started the driver. Its forks cannot use the driver.
static STARTED_BY: OnceLock<Owner> = OnceLock::new();

/// Checks that a driver is installed and new enough, and returns its version. The presence check is
/// needed because cudarc panics if the library is missing.
fn check_driver(ordinal: usize) -> Result<c_int> {
    if STARTED_BY.get().is_some_and(|owner| !owner.is_this_process()) {
        return Err(used_before_fork(ordinal));
    }
    // SAFETY: loading the library runs only its initializers, for which it is designed.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::unsupported(format!(
            "device is cuda:{ordinal}, but this machine has no CUDA driver (libcuda.so); install the NVIDIA driver, or set device to \"cpu\""
        )));
    }
    result::init().map_err(|e| match e.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => no_device(ordinal, 0),
        // The application may have started the driver before the fork.
        CUresult::CUDA_ERROR_NOT_INITIALIZED => used_before_fork(ordinal),
        _ => failed("start", e),
    })?;
    STARTED_BY.get_or_init(Owner::this_process);
    let mut version = 0;
    // SAFETY: the driver writes to the pointer and does not read it.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(|e| failed("report its version", e))?;
    let name = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
    if version < MIN_DRIVER {
        let (has, needs) = (name(version), name(MIN_DRIVER));
        return Err(Error::unsupported(format!(
            "the CUDA driver is too old (CUDA {has}, at least {needs}); update the NVIDIA driver, or set device to \"cpu\""
        )));
    }
    Ok(version)
}

/// Checks and returns the compute capability: the kernels need asynchronous copies and bf16 tensor cores, which
/// exist since 8.0.
fn check_capability(ordinal: usize, device: sys::CUdevice) -> Result<(u32, u32)> {
    let major = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major < 8 {
        let name = result::device::get_name(device).unwrap_or_default();
        return Err(Error::unsupported(format!(
            "device cuda:{ordinal} ({name}) has compute capability {major}.{minor}, at least 8.0 is required; set device to \"cpu\""
        )));
    }
    Ok((major, minor))
}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<u32> {
    // SAFETY: the driver returned the device.
    let value = unsafe { result::device::get_attribute(device, which) };
    value.map(|value| value.max(0) as u32).map_err(|e| failed("report an attribute of the device", e))
}
