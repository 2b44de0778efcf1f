//! The context of a device, which all engines of this process on the device share, so that their
//! work can run at the same time. It has the kernels.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::errors::{Called, cannot_load, failed, is_sticky, lost};
use super::function::Function;
use super::image;
use super::kernels::Kernels;
use crate::error::{Error, Result};

/// A context, and the kernels in it.
pub struct DeviceContext {
    handle: sys::CUcontext,
    kind: ContextKind,
    /// Null until the kernels are loaded.
    module: sys::CUmodule,
    /// True after an error that makes the context unusable.
    lost: AtomicBool,
}

/// The owner of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContextKind {
    /// The library's own context, separate from the host application's contexts. Destroying it
    /// frees everything that it owns.
    Own,
    /// The primary context of the device, which the host application may use too. NCCL uses no
    /// other.
    Primary(sys::CUdevice),
}

// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Send for DeviceContext {}
// SAFETY: the driver permits the use of its handles from any thread.
unsafe impl Sync for DeviceContext {}

/// A device whose kernels are loaded.
pub type Loaded = (Arc<DeviceContext>, Arc<Kernels>);

/// The context of a device, if engines use it. The lock is held while it is created.
type Slot = Arc<Mutex<(Weak<DeviceContext>, Weak<Kernels>)>>;

/// The contexts in use, by device, and by whether they are primary ones.
static CONTEXTS: Mutex<BTreeMap<(c_int, bool), Slot>> = Mutex::new(BTreeMap::new());

impl DeviceContext {
    /// Returns the context of a device with the kernels for its compute capability. It is created
    /// if no engine uses it, or if it is lost.
    pub fn shared(device: sys::CUdevice, capability: (u32, u32), primary: bool) -> Result<Loaded> {
        let slot = lock(&CONTEXTS).entry((device, primary)).or_default().clone();
        let mut slot = lock(&slot);
        if let (Some(context), Some(kernels)) = (slot.0.upgrade(), slot.1.upgrade())
            && !context.is_lost()
        {
            return Ok((context, kernels));
        }
        let (context, kernels) = DeviceContext::load(device, capability, primary)?;
        *slot = (Arc::downgrade(&context), Arc::downgrade(&kernels));
        Ok((context, kernels))
    }

    fn load(device: sys::CUdevice, capability: (u32, u32), primary: bool) -> Result<Loaded> {
        let lost_or = |e: DriverError, error: Error| if is_sticky(e.0) { lost("open the device", e, primary) } else { error };
        let opening = |e| lost_or(e, failed("open the device", e));
        let image = image::Kernels::for_capability(capability)?;
        let (handle, kind) = match primary {
            false => (create(device), ContextKind::Own),
            // Its flags stay as they are, because they concern the application too.
            // SAFETY: the driver is initialized, and the device is valid.
            true => (unsafe { result::primary_ctx::retain(device) }, ContextKind::Primary(device)),
        };
        let mut context = DeviceContext { handle: handle.map_err(opening)?, kind, module: null_mut(), lost: AtomicBool::new(false) };
        // SAFETY: the image outlives the call, and the driver copies what it needs.
        let load = || unsafe { result::module::load_data(image.start()) };
        context.module = context.calling(load).map_err(|e| lost_or(e, cannot_load(capability, e)))?;
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        // SAFETY: the driver is initialized, and the device is valid.
        let max_shared = unsafe { result::device::get_attribute(device, which) }.map_err(opening)? as u32;
        let load = || Kernels::load(|name| Function::load(context.module, name), max_shared);
        let kernels = context.within(load).map_err(opening)??;
        Ok((Arc::new(context), Arc::new(kernels)))
    }

    /// Calls a function with this context as the thread's current one, and restores the previous
    /// context afterwards.
    pub fn within<T>(&self, call: impl FnOnce() -> T) -> Called<T> {
        // SAFETY: the context lives as long as `self`.
        unsafe { sys::cuCtxPushCurrent_v2(self.handle) }.result()?;
        let _entered = Entered;
        Ok(call())
    }

    /// Like `within`, for driver functions. An error may make the context unusable: engines that are
    /// created later then get another context.
    pub fn calling<T>(&self, call: impl FnOnce() -> Called<T>) -> Called<T> {
        let result = self.within(call).flatten();
        if result.as_ref().is_err_and(|e| is_sticky(e.0)) {
            self.lost.store(true, Relaxed);
        }
        result
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    pub fn is_primary(&self) -> bool {
        matches!(self.kind, ContextKind::Primary(_))
    }
}

impl Drop for DeviceContext {
    fn drop(&mut self) {
        match self.kind {
            ContextKind::Own => {
                // SAFETY: every user holds a reference to the context, so none is left. Everything that
                // the context owns is freed with it.
                unsafe { sys::cuCtxDestroy_v2(self.handle) };
            }
            ContextKind::Primary(device) => {
                // SAFETY: `load` loaded the module, which is unloaded once.
                let unload = || if self.module.is_null() { Ok(()) } else { unsafe { result::module::unload(self.module) } };
                let _ = self.calling(unload);
                // SAFETY: `load` retained the context, and its users have freed what they own in it.
                let _ = unsafe { result::primary_ctx::release(device) };
            }
        }
    }
}

/// Threads that wait for the device sleep instead of spinning, to leave the cores to the host
/// application.
const FLAGS: u32 = sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;

/// Creates a context. It is not current. Every driver has this version of the function, which
/// headers of CUDA 13 and cudarc do not declare any more. Later versions add parameters that the
/// library does not need.
fn create(device: sys::CUdevice) -> Called<sys::CUcontext> {
    type Create = unsafe extern "C" fn(*mut sys::CUcontext, c_uint, sys::CUdevice) -> sys::CUresult;
    // SAFETY: the driver is loaded, and this is the signature of the function.
    let create = unsafe { sys::culib().get::<Create>("cuCtxCreate_v2") };
    let create = create.map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
    let mut handle = null_mut();
    // SAFETY: the driver is initialized, and the device is valid.
    unsafe { create(&mut handle, FLAGS, device) }.result()?;
    // Creation makes the context current.
    pop_current();
    Ok(handle)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
