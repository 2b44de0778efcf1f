//! An engine's part of a context: its streams, and events in them.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::device_context::DeviceContext;
use super::errors::Called;

/// The streams of an engine, in the context of its device.
pub struct Context {
    shared: Arc<DeviceContext>,
    streams: [sys::CUstream; 2],
    /// For waits in a primary context, one for each stream. Null in an own context.
    waits: [sys::CUevent; 2],
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
    /// Creates streams.
    pub fn new(shared: Arc<DeviceContext>) -> Called<Context> {
        let mut context = Context { shared, streams: [null_mut(); 2], waits: [null_mut(); 2] };
        for which in [Stream::Compute, Stream::Copies] {
            let stream = context.calling(|| result::stream::create(result::stream::StreamKind::NonBlocking))?;
            context.streams[which as usize] = stream;
            if context.is_primary() {
                context.waits[which as usize] = context.calling(create_event)?;
            }
        }
        Ok(context)
    }

    /// Frees the streams, which nothing uses any more.
    fn free_objects(&self) {
        for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
            // SAFETY: `new` created the stream, which is destroyed once.
            let _ = unsafe { result::stream::destroy(stream) };
        }
        for event in self.waits.into_iter().filter(|event| !event.is_null()) {
            // SAFETY: `new` created the event, which is destroyed once.
            let _ = unsafe { result::event::destroy(event) };
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
        self.shared.within(call)
    }

    /// Like `within`, for driver functions.
    pub fn calling<T>(&self, call: impl FnOnce() -> Called<T>) -> Called<T> {
        self.shared.calling(call)
    }

    pub fn is_primary(&self) -> bool {
        self.shared.is_primary()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = self.within(|| self.free_objects());
    }
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

/// Time for which a wait for an event polls before the thread sleeps, because waking a thread takes
/// tens of microseconds. The event is often near, because the step behind it began before the host
/// processed the previous one.
const POLLING: Duration = Duration::from_micros(50);

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
        self.context.calling(|| {
            let start = Instant::now();
            while start.elapsed() < POLLING {
                // SAFETY: the event lives as long as `self`.
                match unsafe { result::event::query(self.handle) } {
                    Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => std::hint::spin_loop(),
                    result => return result,
                }
            }
            // SAFETY: as above.
            unsafe { result::event::synchronize(self.handle) }
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and it is destroyed once.
        let _ = self.context.calling(|| unsafe { result::event::destroy(self.handle) });
    }
}
