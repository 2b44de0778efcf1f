//! A CUDA context: its streams, and events in them.

use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// The result of a driver function.
pub type Called<T> = std::result::Result<T, DriverError>;

/// A context on a device.
pub struct Context {
    handle: sys::CUcontext,
    streams: [sys::CUstream; 2],
    /// For waits in a primary context, one for each stream. Null in an own context.
    waits: [sys::CUevent; 2],
    /// The kernels of the library. Null until they are loaded.
    module: sys::CUmodule,
    kind: ContextKind,
}

/// The owner of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextKind {
    /// The library's own context, separate from the host application's contexts. Destroying it
    /// frees everything that it owns.
    Own,
    /// The primary context of the device, which the host application may use too. NCCL uses no
    /// other.
    Primary(sys::CUdevice),
}

/// A queue of device work. Streams run concurrently, except for waits on events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// All kernels, and the inputs of a step.
    Compute,
    /// Sampling parameters to the device and sampled tokens to the host, concurrent with
    /// computation.
    Copies,
}

// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Send for Context {}
// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(device: sys::CUdevice, primary: bool) -> Called<Context> {
        let (handle, kind) = match primary {
            false => (create(device)?, ContextKind::Own),
            // Its flags stay as they are, because they concern the application too.
            // SAFETY: the driver is initialized, and the device is valid.
            true => (unsafe { result::primary_ctx::retain(device) }?, ContextKind::Primary(device)),
        };
        let mut context = Context { handle, streams: [null_mut(); 2], waits: [null_mut(); 2], module: null_mut(), kind };
        for which in [Stream::Compute, Stream::Copies] {
            let stream = context.calling(|| result::stream::create(result::stream::StreamKind::NonBlocking))?;
            context.streams[which as usize] = stream;
            if primary {
                context.waits[which as usize] = context.calling(create_event)?;
            }
        }
        Ok(context)
    }

    /// Loads the kernels. `image` is their fatbin.
    pub fn load_module(&mut self, image: &[u8]) -> Called<sys::CUmodule> {
        // SAFETY: the image is a fatbin that outlives the call, and the driver copies what it needs.
        self.module = self.calling(|| unsafe { result::module::load_data(image.as_ptr().cast()) })?;
        Ok(self.module)
    }

    /// Frees the streams and the kernels, which nothing uses any more.
    fn free_objects(&self) {
        for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
            // SAFETY: `new` created the stream, which is destroyed once.
            let _ = unsafe { result::stream::destroy(stream) };
        }
        for event in self.waits.into_iter().filter(|event| !event.is_null()) {
            // SAFETY: `new` created the event, which is destroyed once.
            let _ = unsafe { result::event::destroy(event) };
        }
        if !self.module.is_null() {
            // SAFETY: `load_module` loaded the module, which is unloaded once.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }

    pub fn stream(&self, which: Stream) -> sys::CUstream {
        self.streams[which as usize]
    }

    /// Waits for all queued work. Call it inside `within`.
    ///
    /// The thread sleeps. In a primary context, the flags of its owner determine whether waits for
    /// a stream do, so it waits for an event there.
    pub fn synchronize(&self) -> Called<()> {
        let wait = |(stream, event): (sys::CUstream, sys::CUevent)| match event.is_null() {
            // SAFETY: the streams live as long as the context.
            true => unsafe { result::stream::synchronize(stream) },
            // SAFETY: the same for the events.
            false => unsafe { result::event::record(event, stream).and_then(|()| result::event::synchronize(event)) },
        };
        self.streams.into_iter().zip(self.waits).map(wait).fold(Ok(()), Result::and)
    }

    /// Calls a function with this context as the thread's current one, and restores the previous
    /// context afterwards.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> Called<T> {
        // SAFETY: the context lives as long as `self`.
        unsafe { sys::cuCtxPushCurrent_v2(self.handle) }.result()?;
        let _entered = Entered;
        Ok(call())
    }

    /// Like `within`, for driver functions.
    pub fn calling<T>(&self, call: impl FnOnce() -> Called<T>) -> Called<T> {
        self.within(call)?
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        match self.kind {
            ContextKind::Own => {
                // SAFETY: every user holds a reference to the context, so none is left. Everything that
                // the context owns is freed with it.
                unsafe { sys::cuCtxDestroy_v2(self.handle) };
            }
            ContextKind::Primary(device) => {
                let _ = self.within(|| self.free_objects());
                // SAFETY: `new` retained the context, and its users have freed what they own in it.
                let _ = unsafe { result::primary_ctx::release(device) };
            }
        }
    }
}

/// Threads that wait for the device sleep instead of spinning, to leave the cores to the host
/// application.
const FLAGS: u32 = sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;

/// Creates a context. It is not current.
fn create(device: sys::CUdevice) -> Called<sys::CUcontext> {
    let mut handle = null_mut();
    let mut plain = sys::CUctxCreateParams { execAffinityParams: null_mut(), numExecAffinityParams: 0, cigParams: null_mut() };
    // SAFETY: the driver is initialized, the device is valid, and the parameters are empty.
    unsafe { sys::cuCtxCreate_v4(&mut handle, &mut plain, FLAGS, device) }.result()?;
    // Creation makes the context current.
    pop_current();
    Ok(handle)
}

/// Creates an event in the current context. Threads that wait for it sleep, and no timing is
/// recorded.
fn create_event() -> Called<sys::CUevent> {
    let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    let mut handle = null_mut();
    // SAFETY: the driver writes to the pointer and does not read it.
    unsafe { sys::cuEventCreate(&mut handle, flags) }.result()?;
    Ok(handle)
}

struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        pop_current();
    }
}

fn pop_current() {
    let mut popped = null_mut();
    // SAFETY: the driver writes to the pointer and does not read it.
    unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
}

/// An event in a stream, for which other streams and threads can wait.
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(context: &Arc<Context>) -> Called<Event> {
        Ok(Event { context: context.clone(), handle: context.calling(create_event)? })
    }

    /// Records the event in a stream, after all work queued so far.
    pub fn record(&self, stream: Stream) -> Called<()> {
        // SAFETY: event and stream belong to this context.
        self.context.calling(|| unsafe { result::event::record(self.handle, self.context.stream(stream)) })
    }

    /// Makes later work of a stream wait for the event.
    pub fn hold_up(&self, stream: Stream) -> Called<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream belong to this context.
        self.context.calling(|| unsafe { result::stream::wait_event(self.context.stream(stream), self.handle, flags) })
    }

    /// Waits until the device has reached the event. Returns immediately if it was never recorded.
    pub fn wait(&self) -> Called<()> {
        // SAFETY: the event lives as long as `self`.
        self.context.calling(|| unsafe { result::event::synchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and it is destroyed once.
        let _ = self.context.calling(|| unsafe { result::event::destroy(self.handle) });
    }
}
