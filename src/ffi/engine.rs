use super::convert::{self, borrow, init, not_null, out_size};
use super::{
    guard, guard_or, pllm_admission, pllm_arena, pllm_bytes, pllm_engine_options, pllm_error, pllm_model_info, pllm_plan, pllm_queue,
    pllm_request, pllm_sampling, pllm_stats, pllm_step,
};
use crate::engine::Engine;
use crate::error::Result;
use crate::sys::process::Owner;

/// An engine: one model, its KV pool and its requests. Any thread may use it; one at a time steps it.
pub struct pllm_engine {
    engine: Engine,
    queue: pllm_queue,
    arena: pllm_arena,
    owner: Owner,
}

impl pllm_engine {
    /// Hands an engine to C. Also for hosts in Rust that make their own runner.
    pub fn into_raw(engine: Engine) -> *mut pllm_engine {
        let queue = pllm_queue::new(engine.queue().clone(), true);
        let arena = pllm_arena::new(engine.arena().clone());
        Box::into_raw(Box::new(pllm_engine { engine, queue, arena, owner: Owner::this_process() }))
    }

    pub(super) fn arena(&self) -> *const pllm_arena {
        &raw const self.arena
    }

    /// # Safety
    /// As `borrow`.
    pub(super) unsafe fn get<'a>(engine: *const pllm_engine) -> Result<&'a Engine> {
        // SAFETY: the caller's contract.
        let handle = unsafe { borrow("engine", engine) }?;
        handle.owner.check()?;
        Ok(&handle.engine)
    }
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
        let mut progress = pllm_engine_options::to_progress(options)?;
        let engine = Engine::load(&pllm_engine_options::to_options(options)?, &mut progress)?;
        out_engine.write(pllm_engine::into_raw(engine));
        Ok(())
    })
}

/// Ends every request, joins the engine's threads and returns its memory. NULL is fine. No other call on this engine may be
/// under way, polling its own queue included. Queues that were created stay: they give the outputs they hold, a last
/// one for each request that was live among them, and then answer PLLM_E_CLOSED. Batches already polled stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_free(engine: *mut pllm_engine) {
    guard_or((), || {
        if !engine.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            let engine = unsafe { Box::from_raw(engine) };
            if engine.owner.check().is_err() {
                // A forked child has none of its threads to join: the memory goes when the child does.
                std::mem::forget(engine);
            }
        }
    });
}

/// The model and the limits it is served with.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_info(engine: *const pllm_engine, out_info: *mut pllm_model_info) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_info, &pllm_model_info::from(pllm_engine::get(engine)?.info())) })
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
        let engine = pllm_engine::get(engine)?;
        not_null("out_request", out_request)?;
        let (request, queue) = pllm_request::to_request(request)?;
        let queue = if queue.is_null() { engine.queue() } else { pllm_queue::get(queue)? };
        out_request.write(engine.add_request_to(queue, request)?);
        Ok(())
    })
}

/// What would become of the request if it were added now, without adding it: whether it would be taken, whether it could begin at
/// once, and when its first token is expected, judged by the steps so far, by how long answers have been, by the engine's own policies,
/// and as if nothing of the prompt were in the prefix cache and nobody came later who goes before it. All that waits is played through
/// on the calling thread: some milliseconds where 100,000 wait. What could never run is refused here too; grammars are not compiled. May be called from
/// any thread, also while another one steps.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_admit(
    engine: *const pllm_engine,
    request: *const pllm_request,
    out_admission: *mut pllm_admission,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        out_size(out_admission)?;
        let (request, queue) = pllm_request::to_request(request)?;
        let queue = if queue.is_null() { engine.queue() } else { pllm_queue::get(queue)? };
        convert::write(out_admission, &engine.admit(queue, request)?.into())
    })
}

/// Ends a request at the next step; its last output says PLLM_FINISH_ABORT.
/// An id that is unknown or has ended is PLLM_E_NOT_FOUND. May be called from any thread.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_abort(engine: *const pllm_engine, request: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.abort(request))
}

/// Runs one iteration: up to max_batch_tokens rows of all running sequences, one new token for each that is past its
/// prompt. What came of it is in the queue. A second thread that steps meanwhile gets PLLM_E_BUSY. Where a step cannot be
/// computed, it is tried again without those that may be to blame: a request with which no step can be ends with
/// PLLM_FINISH_ERROR, and the others go on. Where that does not help, the call is an error (PLLM_E_OUT_OF_MEMORY) and nothing
/// is lost: the next one tries again. After a second of that the requests in it end with PLLM_FINISH_ERROR, and the engine
/// goes on with the others.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_step(engine: *const pllm_engine, out_step: *mut pllm_step) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        out_size(out_step)?;
        convert::write(out_step, &engine.step()?.into())
    })
}

/// From now on a thread of the engine's own steps, asleep while there is nothing to do; pllm_engine_step answers
/// PLLM_E_BUSY, and so does a second start. Where steps cannot be computed for a second, the requests in them end with
/// PLLM_FINISH_ERROR and the others go on.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_start(engine: *const pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.start())
}

/// Joins the engine's thread after the step under way. Nothing is lost: requests wait until somebody steps again.
/// Fine where it was not started.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_stop(engine: *const pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        pllm_engine::get(engine)?.stop();
        Ok(())
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
    guard(|| unsafe { convert::write(out_stats, &pllm_engine::get(engine)?.stats().into()) })
}

/// What dashboards ask for: gauges, counters and histograms as of the last step, with the names that vLLM gave them after the prefix
/// "pagedllm_". The text is in the OpenMetrics format, which Prometheus scrapes as
/// "application/openmetrics-text; version=1.0.0; charset=utf-8"; the label model_name is the option of that name. Histograms of
/// times have buckets up to 1, 2.5 and 5 times each power of ten, from 0.5 ms to 2500 s; those of tokens up to the powers of two, from 1 to
/// 2^20. May be called from any thread, and waits for no step. Free it with pllm_bytes_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_metrics(engine: *const pllm_engine, out_text: *mut *mut pllm_bytes) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_text", out_text)?;
        out_text.write(pllm_bytes::into_raw(engine.metrics()?.into_bytes()));
        Ok(())
    })
}
