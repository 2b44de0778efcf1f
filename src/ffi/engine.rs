use std::sync::Arc;

use super::convert::{self, borrow, init, not_null, out_size};
use super::{
    guard, guard_or, pllm_engine_options, pllm_error, pllm_model_info, pllm_plan, pllm_queue, pllm_request, pllm_sampling, pllm_stats,
    pllm_step,
};
use crate::engine::Engine;

/// An engine: one model, its KV pool and its requests. Any thread may use it; one at a time steps it.
pub struct pllm_engine {
    pub(super) engine: Arc<Engine>,
    queue: pllm_queue,
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_options_init(options: *mut pllm_engine_options, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(options, struct_size) });
}

/// A dry run of pllm_engine_create: reads the model's headers and says what would be allocated, without allocating it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_plan(options: *const pllm_engine_options, out_plan: *mut pllm_plan) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        out_size(out_plan)?;
        let plan = Engine::plan(&pllm_engine_options::to_options(options)?)?;
        convert::write(out_plan, &pllm_plan::from(&plan))
    })
}

/// Opens a model and makes an engine that serves it. Free it with pllm_engine_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_create(options: *const pllm_engine_options, out_engine: *mut *mut pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        not_null("out_engine", out_engine)?;
        let engine = Arc::new(Engine::create(&pllm_engine_options::to_options(options)?)?);
        let queue = pllm_queue::new(engine.clone());
        out_engine.write(Box::into_raw(Box::new(pllm_engine { engine, queue })));
        Ok(())
    })
}

/// Ends every request, joins the engine's threads and returns its memory. NULL is fine.
/// No other call on this engine or its queue may be under way (so poll with finite timeouts); batches already polled stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_free(engine: *mut pllm_engine) {
    guard_or((), || {
        if !engine.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(engine) });
        }
    });
}

/// The model and the limits it is served with.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_info(engine: *const pllm_engine, out_info: *mut pllm_model_info) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_info, &pllm_model_info::from(borrow("engine", engine)?.engine.info())) })
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_request_init(request: *mut pllm_request, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(request, struct_size) });
}

/// Fills in the defaults, within struct_size bytes and never beyond them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sampling_init(sampling: *mut pllm_sampling, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(sampling, struct_size) });
}

/// Adds a request; it takes part from the next step on. What could never run is refused here, with the numbers.
/// May be called from any thread, also while another one steps. Ids are never reused.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_add_request(
    engine: *const pllm_engine,
    request: *const pllm_request,
    out_request: *mut u64,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = borrow("engine", engine)?;
        not_null("out_request", out_request)?;
        out_request.write(engine.engine.add_request(pllm_request::to_request(request)?)?);
        Ok(())
    })
}

/// Ends a request at the next step; its last output says PLLM_FINISH_ABORT.
/// An id that is unknown or has ended is PLLM_E_NOT_FOUND. May be called from any thread.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_abort(engine: *const pllm_engine, request: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { borrow("engine", engine)? }.engine.abort(request))
}

/// Runs one iteration: up to max_batch_tokens rows of all running sequences, one new token for each that is past its
/// prompt. What came of it is in the queue. A second thread that steps meanwhile gets PLLM_E_BUSY. Where a step could not
/// be computed (PLLM_E_OUT_OF_MEMORY), nothing is lost: the next one tries again.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_step(engine: *const pllm_engine, out_step: *mut pllm_step) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = borrow("engine", engine)?;
        out_size(out_step)?;
        convert::write(out_step, &engine.engine.step()?.into())
    })
}

/// The engine's own queue, borrowed: it lives as long as the engine. NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_queue(engine: *const pllm_engine) -> *const pllm_queue {
    // SAFETY: the caller's contract.
    unsafe { engine.as_ref() }.map_or(std::ptr::null(), |engine| &raw const engine.queue)
}

/// Counts since the engine was made, and the state after its last step. May be called from any thread.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_stats(engine: *const pllm_engine, out_stats: *mut pllm_stats) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_stats, &borrow("engine", engine)?.engine.stats().into()) })
}
