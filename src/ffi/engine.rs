use super::convert::{self, borrow, init, not_null, out_size};
use super::{
    guard, guard_or, pllm_admission, pllm_budget, pllm_bytes, pllm_engine_options, pllm_error, pllm_model_info, pllm_plan, pllm_queue,
    pllm_request, pllm_sampling, pllm_stats, pllm_step,
};
use crate::engine::Engine;
use crate::error::Result;
use crate::sys::process::Owner;
use crate::types::RequestId;

/// An engine: one model, its KV pool and its requests. Any thread may use it; one thread at a time
/// steps it.
pub struct pllm_engine {
    engine: Engine,
    queue: pllm_queue,
    budget: pllm_budget,
    owner: Owner,
}

impl pllm_engine {
    /// Converts an engine to a pointer for C. Hosts in Rust with their own executor use it, too.
    pub fn into_raw(engine: Engine) -> *mut pllm_engine {
        let queue = pllm_queue::new(engine.queue().clone(), true);
        let budget = pllm_budget::new(engine.budget().clone());
        Box::into_raw(Box::new(pllm_engine { engine, queue, budget, owner: Owner::this_process() }))
    }

    pub(super) fn budget(&self) -> *const pllm_budget {
        &raw const self.budget
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

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_options_init(options: *mut pllm_engine_options, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(options, struct_size) });
}

/// Computes the memory that pllm_engine_create would allocate, from the headers of the model's
/// files, without allocating it.
///
/// Errors: as pllm_engine_create, except PLLM_E_CANCELLED.
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

/// Loads a model and creates an engine for it.
///
/// Errors: PLLM_E_INVALID_ARGUMENT, PLLM_E_IO, PLLM_E_MODEL, PLLM_E_UNSUPPORTED, PLLM_E_CAPACITY if
/// the options leave too little memory for one sequence, PLLM_E_OUT_OF_MEMORY, PLLM_E_CANCELLED.
/// Free the engine with pllm_engine_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_create(options: *const pllm_engine_options, out_engine: *mut *mut pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let mut progress = pllm_engine_options::to_progress(options)?;
        let options = pllm_engine_options::to_options_of_worker(options)?;
        let out = not_null("out_engine", out_engine).map_err(|error| Engine::refuse_options(&options.workers, error))?;
        out.write(pllm_engine::into_raw(Engine::load(&options, &mut progress)?));
        Ok(())
    })
}

/// Runs one of several workers that compute a model with the engine of rank 0, which is in another
/// process or thread (docs/parallel.md). The options are those of the engine: the same model and
/// formats, and a communicator with another rank. Loads this worker's part of the model, and
/// returns NULL when the engine is freed. Its progress function can cancel the loading.
///
/// An error ends the engine, too: its calls return PLLM_E_INTERNAL.
///
/// Errors: those of pllm_engine_create, on all ranks if the options of one rank are invalid,
/// if it cannot load its part, or if rank 0 cannot create the engine;
/// PLLM_E_INVALID_ARGUMENT if the communicator is NULL or has rank 0; PLLM_E_INTERNAL if another
/// rank has ended or does not respond within worker_timeout_ms.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_worker_run(options: *const pllm_engine_options) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let mut progress = pllm_engine_options::to_progress(options)?;
        Engine::run_worker(&pllm_engine_options::to_options_of_worker(options)?, &mut progress)
    })
}

/// Ends every request, joins the engine's threads and returns its memory. Ends the other workers of
/// the model; one that hangs is waited for, at most for worker_timeout_ms. NULL is allowed. No
/// other call on this engine may be in progress, including a poll of its own queue.
///
/// Queues from pllm_queue_create stay valid. They return the outputs they hold, a last output for
/// each request that was live, and then PLLM_E_CLOSED. Batches that have been polled stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_free(engine: *mut pllm_engine) {
    guard_or((), || {
        if !engine.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            let engine = unsafe { Box::from_raw(engine) };
            if engine.owner.check().is_err() {
                // A forked child does not have the engine's threads and cannot join them. The
                // memory is freed when the child exits.
                std::mem::forget(engine);
            }
        }
    });
}

/// Returns NULL if the engine works, and the error that has stopped it if it has failed: after
/// PLLM_E_INTERNAL, or if its device was lost. Then all its requests have ended, and only a new
/// engine can serve. Any thread may call it, also during a step. Does not wait for a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_health(engine: *const pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)?.check() })
}

/// Describes the model and the limits of the engine. Any thread may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_get_model_info(engine: *const pllm_engine, out_info: *mut pllm_model_info) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_info, &pllm_model_info::from(pllm_engine::get(engine)?.info())) })
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_request_init(request: *mut pllm_request, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(request, struct_size) });
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_sampling_init(sampling: *mut pllm_sampling, struct_size: u64) {
    // SAFETY: the caller's contract.
    guard_or((), || unsafe { init(sampling, struct_size) });
}

/// Adds a request to the waiting queue. It takes part from the next step on. Request ids are never
/// reused.
///
/// Errors: PLLM_E_INVALID_ARGUMENT, also if the prompt does not fit max_model_len; PLLM_E_CAPACITY,
/// with the numbers, if the request can never fit the pool, too many requests wait, or its queue is
/// full; PLLM_E_UNSUPPORTED. Any thread may call it, also during a step.
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
        out_request.write(engine.add_request_to(queue, request)?.get());
        Ok(())
    })
}

/// Predicts admission and time to first token for a request without adding it. The prediction
/// simulates the waiting requests with the engine's own policies, the measured step times and the
/// lengths of recent outputs. It assumes that the prompt is not in the prefix cache and that no
/// later request overtakes. It runs on the calling thread and takes some milliseconds with 100,000
/// waiting requests.
///
/// Errors: as pllm_engine_add_request for a request that can never run. Too many waiting requests
/// and a full queue are no errors here: see pllm_admission.admits. Grammars are not compiled. Any
/// thread may call it, also during a step.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_predict_admission(
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
        convert::write(out_admission, &engine.predict_admission(queue, request)?.into())
    })
}

/// Aborts a request at the next step. Its last output has PLLM_FINISH_ABORT. If earlier calls for
/// the request wait for a slow grammar, the abort takes effect after them.
///
/// Errors: PLLM_E_NOT_FOUND if the id is unknown or the request has ended. Any thread may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_abort(engine: *const pllm_engine, request: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.abort(RequestId::from_raw(request)))
}

/// Runs one iteration: it computes up to max_batch_tokens tokens of the scheduled sequences and
/// generates one token for each sequence whose prompt is complete. The results are in the queues.
///
/// If a step cannot be computed, it is tried again without the requests that may have caused the
/// failure. A request that fails alone ends with PLLM_FINISH_ERROR and the others continue. If no
/// request can be computed, the call returns the error and nothing is lost: the next call tries
/// again. After one second of failures, the requests of the step end with PLLM_FINISH_ERROR.
///
/// Errors: PLLM_E_BUSY if another thread is stepping this engine; PLLM_E_OUT_OF_MEMORY;
/// PLLM_E_INTERNAL.
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

/// Starts a thread of the engine that steps it, and sleeps while there is nothing to do. If steps
/// fail for one second, their requests end with PLLM_FINISH_ERROR and the others continue.
///
/// Errors: PLLM_E_BUSY if the thread is already running; PLLM_E_CAPACITY if the system starts no
/// thread; the error of an engine that has failed. While it runs, pllm_engine_step returns
/// PLLM_E_BUSY.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_start(engine: *const pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_engine::get(engine)? }.start())
}

/// Stops the engine's thread after the current step and joins it. No request is lost: they wait
/// until the engine is stepped again. Has no effect if the thread is not running.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_stop(engine: *const pllm_engine) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        pllm_engine::get(engine)?.stop();
        Ok(())
    })
}

/// Returns the engine's own queue. Borrowed; valid until the engine is freed. Returns NULL for
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_queue(engine: *const pllm_engine) -> *const pllm_queue {
    // SAFETY: the caller's contract.
    unsafe { engine.as_ref() }.map_or(std::ptr::null(), |engine| &raw const engine.queue)
}

/// Reads counters since the creation of the engine, and its state after the last step. Any thread
/// may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_get_stats(engine: *const pllm_engine, out_stats: *mut pllm_stats) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_stats, &pllm_engine::get(engine)?.stats().into()) })
}

/// Describes the engine after its current step, to be displayed: which sequences have which
/// blocks, and what the last steps computed. max_blocks is the number of blocks of each tier,
/// from the first one, and max_sequences the number of sequences; more than 1048576 and 16384 are
/// reduced to these. The text is a JSON object. Members can be added:
///
/// - time: seconds since the engine was created; block_size: tokens per block; layer_groups.
/// - counts: waiting, running, paused, idle and swapped sequences, steps, generated_tokens,
///   prompt_tokens, prompt_tokens_cached, prefix_queries, prefix_hits and preemptions, as in
///   pllm_stats. Paused sequences and prompts that are being pinned are also counted as waiting or
///   running.
/// - pool, host_tier: the number of blocks of the tier, of which free, cached and used, and runs of
///   consecutive blocks with the same use: [number, "free"], [number, "cached"] (only the prefix
///   cache has them), or [number, "used", users of each block, id of a sequence that uses them, or
///   0]. Queued copies are users, too.
/// - sequences, the running ones first: the ids sequence and request (0: none), state ("running",
///   "waiting", "paused", "idle", "pinned"), tokens, max_len (the length at which it ends),
///   computed_tokens (with stored K and V), cached_tokens (prompt tokens that the prefix cache had),
///   generated_tokens (since it was added, resumed or continued), blocks (in all layer groups,
///   including those out of their window), tier ("pool" or "host"). A paused sequence was skipped,
///   because its queue is full, or it waits for a slow grammar or a KV store. Exports and forks in
///   progress have idle sequences of their own, which counts does not include. sequences_omitted is
///   the number of sequences that are not listed.
/// - steps, the last 128 with sequences, the oldest first: start (as time), seconds,
///   prefill_tokens, decode_tokens, sequences.
///
/// Requests that the engine has not started to schedule are not included. The call waits for the
/// end of the current step; if several threads call, each step answers one of them. The stepping
/// thread only copies the numbers, and reads at most 1048576 entries of block tables to find the
/// sequences of blocks. The text is formatted by the calling thread.
///
/// Errors: PLLM_E_OUT_OF_MEMORY; PLLM_E_BUSY in a logits hook, which runs on the stepping thread;
/// the error of an engine that has failed. Any thread may call it. Free the text with
/// pllm_bytes_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_snapshot(
    engine: *const pllm_engine,
    max_blocks: u64,
    max_sequences: u64,
    out_json: *mut *mut pllm_bytes,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_json", out_json)?;
        let limit = |limit| usize::try_from(limit).unwrap_or(usize::MAX);
        let snapshot = engine.snapshot(limit(max_blocks), limit(max_sequences))?;
        out_json.write(pllm_bytes::into_raw(snapshot.into_bytes()));
        Ok(())
    })
}

/// Writes gauges, counters and histograms, as of the last step, in the OpenMetrics text format
/// ("application/openmetrics-text; version=1.0.0; charset=utf-8"). The names are those of vLLM with
/// the prefix "pagedllm_". The label model_name is the option of that name. Buckets of times have
/// the bounds 1, 2.5 and 5 times each power of ten, from 0.5 ms to 2500 s. Buckets of token counts
/// have the powers of two, from 1 to 2^20.
///
/// Any thread may call it; it does not wait for a step. Free the text with pllm_bytes_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_get_metrics(engine: *const pllm_engine, out_text: *mut *mut pllm_bytes) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_text", out_text)?;
        out_text.write(pllm_bytes::into_raw(engine.metrics()?.into_bytes()));
        Ok(())
    })
}
