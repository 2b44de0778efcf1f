//! A context on a device: its streams, and places in them that others wait for.

use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// What the driver's functions return.
pub type Called<T> = std::result::Result<T, DriverError>;

/// The library's own context on a device, beside the host's: what it holds is given back with it.
pub struct Context {
    handle: sys::CUcontext,
    streams: [sys::CUstream; 2],
}

/// A queue of work. Each goes on by itself, but for what it is told to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// All kernels, and what they read of a step.
    Compute,
    /// What is asked of draws and what comes of them, beside whatever is computed.
    Copies,
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(device: sys::CUdevice) -> Called<Context> {
        let mut handle = null_mut();
        let mut plain = sys::CUctxCreateParams { execAffinityParams: null_mut(), numExecAffinityParams: 0, cigParams: null_mut() };
        // Who waits for the device sleeps: the cores are the host's.
        let flags = sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;
        // SAFETY: the driver is initialized, the device one of its own; the parameters ask for nothing.
        unsafe { sys::cuCtxCreate_v4(&mut handle, &mut plain, flags, device) }.result()?;
        let mut context = Context { handle, streams: [null_mut(); 2] };
        // It is current from its creation on.
        let create = || result::stream::create(result::stream::StreamKind::NonBlocking);
        let streams = create().and_then(|first| Ok([first, create()?]));
        pop_current();
        context.streams = streams?;
        Ok(context)
    }

    pub fn stream(&self, which: Stream) -> sys::CUstream {
        self.streams[which as usize]
    }

    /// Waits for all that was queued. Within the context.
    pub fn synchronize(&self) -> Called<()> {
        // SAFETY: the streams live as long as the context.
        self.streams.into_iter().map(|stream| unsafe { result::stream::synchronize(stream) }).fold(Ok(()), Result::and)
    }

    /// Calls something with this context as the thread's current one; the host's is so again afterwards.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> Called<T> {
        // SAFETY: the context lives as long as self.
        unsafe { sys::cuCtxPushCurrent_v2(self.handle) }.result()?;
        let _entered = Entered;
        Ok(call())
    }

    /// The same for functions of the driver.
    pub fn calling<T>(&self, call: impl FnOnce() -> Called<T>) -> Called<T> {
        self.within(call)?
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nobody uses the context any more: whoever does holds it. All that it owns goes with it.
        unsafe { sys::cuCtxDestroy_v2(self.handle) };
    }
}

struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        pop_current();
    }
}

fn pop_current() {
    let mut popped = null_mut();
    // SAFETY: the place is written, not read.
    unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
}

/// A place in a stream, which others wait for.
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(context: &Arc<Context>) -> Called<Event> {
        // Who waits for it sleeps, and nobody asks when it was.
        let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let mut handle = null_mut();
        // SAFETY: the place is written, not read.
        context.calling(|| unsafe { sys::cuEventCreate(&mut handle, flags) }.result())?;
        Ok(Event { context: context.clone(), handle })
    }

    /// It is here from now on: behind all that was queued so far.
    pub fn record(&self, stream: Stream) -> Called<()> {
        // SAFETY: both are of this context.
        self.context.calling(|| unsafe { result::event::record(self.handle, self.context.stream(stream)) })
    }

    /// What is queued next in a stream comes after it.
    pub fn hold_up(&self, stream: Stream) -> Called<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        self.context.calling(|| unsafe { result::stream::wait_event(self.context.stream(stream), self.handle, flags) })
    }

    /// Waits until the device has come to it. At once, where it was never recorded.
    pub fn wait(&self) -> Called<()> {
        // SAFETY: the event lives as long as self.
        self.context.calling(|| unsafe { result::event::synchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and dropped once.
        let _ = self.context.calling(|| unsafe { result::event::destroy(self.handle) });
    }
}
