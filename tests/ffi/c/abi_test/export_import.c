// Export and import of sequences.
#include "abi_test.h"

// The outputs before the export and after the import equal those of an undisturbed run.
static void check_import_continues(const pllm_engine *engine, const exported_sequence *exported,
                                   const generation *expected) {
    generation a = exported->emitted;
    const uint64_t id = import_state(engine, exported),
                   len = expected->prompt_tokens + a.tokens_len;
    const pllm_sequence_info info = info_of(engine, id);
    CHECK(info.request == id && info.len == len && info.index == 0 && info.idle == 1 &&
          info.inexact == 0);
    CHECK(step_of(engine).sequences == 0 &&
          stats_of(engine).idle == 1);  // idle until it is resumed
    OK(resume_continue(engine, id, 0));
    INVALID(resume_continue(engine, id, 0));  // already running
    step_to_the_end(engine);
    collect_outputs(engine, id, &a);
    CHECK(same_generation(&a, expected) &&
          !memcmp(a.logprobs, expected->logprobs, sizeof a.logprobs) && a.user_data == 0);
    check_every_call_is_not_found(engine, id);
    CHECK(is_idle(engine));
}

// Exported before the first step, after one token, in the middle, and at the last token.
static void imported_sequence_continues_with_the_same_tokens(const pllm_engine *engine) {
    static const unsigned step_counts[] = {0, 1, 10, 29};
    pllm_engine *other = open_engine(model_dir);
    pllm_sampling sampling = seeded_sampling();
    pllm_request request = text_request(STORY, &sampling);
    const generation expected = *run_request(engine, &request);
    for (size_t i = 0; i < COUNT(step_counts); i++) {
        uint64_t id = 0;
        generation a = {0};
        OK(pllm_engine_add_request(engine, &request, &id));
        for (unsigned steps = 0; steps < step_counts[i]; steps++) step_of(engine);
        collect_outputs(engine, id, &a);
        exported_sequence exported = export_and_collect(engine, id, &a);
        CHECK(exported.emitted.tokens_len == step_counts[i]);
        step_to_the_end(engine);
        collect_outputs(engine, id, &a);
        CHECK(same_generation(&a, &expected));  // the export does not affect the sequence
        check_import_continues(engine, &exported, &expected);
        check_import_continues(other, &exported, &expected);
        free(exported.bytes);
    }
    pllm_engine_free(other);
}

// The only output is the error, and its counts are those of the sequence.
static void check_only_error_output(const pllm_queue *queue, uint64_t sequence,
                                    const generation *emitted) {
    const pllm_output *o;
    pllm_outputs *outputs = only_output(queue, &o);
    CHECK(o->sequence == sequence && o->finish_reason == PLLM_FINISH_ERROR &&
          o->user_data == emitted->user_data);
    CHECK(o->error_code == PLLM_E_INVALID_ARGUMENT && o->error_len > 9 && !o->tokens && !o->text &&
          !o->sequence_state);
    CHECK(o->prompt_tokens == emitted->prompt_tokens &&
          o->generated_tokens == emitted->generated_tokens && emitted->generated_tokens > 0);
    pllm_outputs_free(outputs);
}

// Exports a sequence before its first output, and frees it. `expected` receives the undisturbed
// result.
static exported_sequence export_before_first_output(const pllm_engine *engine,
                                                    generation *expected) {
    pllm_sampling sampling = seeded_sampling();
    pllm_request request = text_request(STORY, &sampling);
    generation a = {0};
    uint64_t id = 0;
    *expected = *run_request(engine, &request);
    request.user_data = 4711;
    OK(pllm_engine_add_request(engine, &request, &id));
    exported_sequence exported = export_and_collect(engine, id, &a);
    free_sequence(engine, id);
    collect_outputs(engine, id, &a);
    CHECK(a.finish_reason == PLLM_FINISH_ABORT && a.user_data == 4711);
    return exported;
}

static void resume_continue_uses_only_queue_user_data_and_keep(const pllm_engine *engine) {
    pllm_engine *other = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 64);
    pllm_sampling invalid = {.struct_size = 8};
    generation expected, a = {0};
    exported_sequence exported = export_before_first_output(engine, &expected);
    const uint64_t id = import_state(engine, &exported);
    pllm_resume options = continue_options(PLLM_RESUME_USER_DATA | PLLM_REQUEST_KEEP);
    options.sampling = &invalid;
    options.text_flags = UINT32_MAX;
    options.user_data = 4712;
    options.queue = pllm_engine_queue(other);
    INVALID(pllm_sequence_resume(engine, id, &options));
    CHECK(info_of(engine, id).idle == 1);
    options.queue = queue;
    OK(pllm_sequence_resume(engine, id, &options));
    step_to_the_end(engine);
    collect_outputs_from(queue, id, &a);
    CHECK(same_generation(&a, &expected) && a.user_data == 4712 && info_of(engine, id).idle == 1);
    free(exported.bytes);
    free_sequence(engine, id);
    pllm_queue_free(queue);
    pllm_engine_free(other);
    CHECK(outputs_in(pllm_engine_queue(engine)) == 0 && is_idle(engine));
}

// A finished sequence that is continued ends with an error and stays kept. Queue and user_data of
// the last resume remain.
static void resume_continue_of_a_finished_sequence_is_an_error(const pllm_engine *engine) {
    pllm_queue *queue = new_queue(engine, 64);
    generation expected, a = {0};
    exported_sequence exported = export_before_first_output(engine, &expected);
    uint64_t id = import_state(engine, &exported);
    free(exported.bytes);
    pllm_resume options = continue_options(PLLM_RESUME_USER_DATA | PLLM_REQUEST_KEEP);
    options.queue = queue;
    options.user_data = 4712;
    OK(pllm_sequence_resume(engine, id, &options));
    step_to_the_end(engine);
    collect_outputs_from(queue, id, &a);
    OK(resume_continue(engine, id, PLLM_REQUEST_KEEP));
    step_to_the_end(engine);
    check_only_error_output(queue, id, &a);
    CHECK(info_of(engine, id).idle == 1);
    exported = export_state(engine, id);
    free_sequence(engine, id);
    // The same holds after an import, which resets user_data.
    id = import_state(engine, &exported);
    OK(resume_continue(engine, id, PLLM_REQUEST_KEEP));
    step_to_the_end(engine);
    a.user_data = 0;
    check_only_error_output(pllm_engine_queue(engine), id, &a);
    free(exported.bytes);
    free_sequence(engine, id);
    pllm_queue_free(queue);
    CHECK(is_idle(engine));
}

static void exported_state_goes_to_the_named_queue(const pllm_engine *engine) {
    pllm_sampling sampling = seeded_sampling();
    pllm_request request = text_request(STORY, &sampling);
    pllm_queue *queue = new_queue(engine, 1);
    pllm_outputs *outputs = NULL;
    const pllm_output *other;
    uint64_t id = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    OK(pllm_sequence_export(engine, id, NULL));
    OK(pllm_sequence_export(engine, id, queue));
    OK(pllm_sequence_export(engine, id, pllm_engine_queue(engine)));
    step_of(engine);
    pllm_outputs *other_outputs = only_output(queue, &other);
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    CHECK(is_state_output(other, id) && pllm_outputs_len(outputs) == 3 &&
          pllm_outputs_get(outputs, 2)->tokens_len == 1);
    for (uint64_t i = 0; i < 2; i++) {
        const pllm_output *own = pllm_outputs_get(outputs, i);
        CHECK(is_state_output(own, id) && own->sequence_state_len == other->sequence_state_len &&
              !memcmp(own->sequence_state, other->sequence_state, other->sequence_state_len));
    }
    pllm_outputs_free(outputs);
    pllm_outputs_free(other_outputs);
    pllm_queue_free(queue);
    free_sequence(engine, id);
    discard_outputs(engine);
    CHECK(is_idle(engine));
}

// A kept sequence still exists, so its export succeeds.
static void export_of_an_ended_sequence_reports_not_found_to_its_queue(const pllm_engine *engine) {
    for (int keep = 0; keep < 2; keep++) {
        pllm_sampling sampling = seeded_sampling();
        pllm_request request = text_request(STORY, &sampling);
        pllm_queue *queue = new_queue(engine, 1);
        const pllm_output *o;
        generation a = {0};
        uint64_t id = 0;
        request.flags = keep ? PLLM_REQUEST_KEEP : 0;
        request.user_data = 4711;
        OK(pllm_engine_add_request(engine, &request, &id));
        step_of(engine);
        OK(pllm_engine_abort(engine, id));
        OK(pllm_sequence_export(engine, id, queue));
        step_of(engine);
        pllm_outputs *outputs = only_output(queue, &o);
        CHECK(o->request == id && o->sequence == id && o->user_data == 4711 &&
              o->finish_reason == PLLM_FINISH_NONE);
        CHECK(keep ? is_state_output(o, id)
                   : !o->sequence_state && !o->sequence_state_len &&
                         o->error_code == PLLM_E_NOT_FOUND && o->error && o->error_len > 9);
        collect_outputs(engine, id, &a);  // the request's own outputs do not change
        CHECK(a.finish_reason == PLLM_FINISH_ABORT && a.tokens_len == 1);
        if (keep) free_sequence(engine, id);
        pllm_outputs_free(outputs);
        pllm_queue_free(queue);
        CHECK(is_idle(engine));
    }
}

// Log probabilities of a prompt: cumulative or deltas, by output kind.
typedef struct {
    float logprobs[64];
    pllm_logprob top[128];
    uint64_t len, top_len, ends;
} prompt_report;

static void collect_prompt_report(const pllm_engine *engine, uint32_t kind, prompt_report *h) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        if (kind != PLLM_OUTPUT_DELTA) h->len = h->top_len = 0;
        if (!CHECK(h->len + o->prompt_logprobs_len <= COUNT(h->logprobs))) break;
        for (uint64_t at = 0; at < o->prompt_logprobs_len; at++)
            h->logprobs[h->len++] = o->prompt_logprobs[at];
        for (uint64_t at = 0; at < o->prompt_top_logprobs_len; at++)
            h->top[h->top_len++] = o->prompt_top_logprobs[at];
        h->ends += o->finish_reason != PLLM_FINISH_NONE;
    }
    pllm_outputs_free(outputs);
}

static uint64_t add_prompt_logprobs_request(const pllm_engine *engine, uint32_t kind,
                                            unsigned steps, prompt_report *h) {
    pllm_sampling sampling = seeded_sampling();
    pllm_request request = text_request(STORY, &sampling);
    uint64_t id = 0;
    sampling.max_tokens = 8;
    sampling.flags |= PLLM_SAMPLING_PROMPT_LOGPROBS;
    sampling.prompt_top_logprobs = 2;
    sampling.output_kind = kind;
    *h = (prompt_report){0};
    OK(pllm_engine_add_request(engine, &request, &id));
    while (steps-- > 0) step_of(engine);
    collect_prompt_report(engine, kind, h);
    return id;
}

// Exported after each prefill chunk, and during decoding.
static void prompt_logprobs_move_with_the_sequence(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = NULL;
    options.prefill_chunk = 4;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    for (uint32_t kind = PLLM_OUTPUT_DELTA; kind <= PLLM_OUTPUT_FINAL; kind++) {
        prompt_report expected, moved;
        add_prompt_logprobs_request(engine, kind, 20, &expected);
        CHECK(expected.ends == 1 && expected.len >= 12 && expected.top_len == 2 * expected.len);
        for (unsigned steps = 0; steps < 6; steps++) {
            uint64_t id = add_prompt_logprobs_request(engine, kind, steps, &moved);
            exported_sequence exported = export_state(engine, id);
            free_sequence(engine, id);
            outputs_in(pllm_engine_queue(engine));
            OK(resume_continue(engine, import_state(engine, &exported), 0));
            step_to_the_end(engine);
            collect_prompt_report(engine, kind, &moved);
            CHECK(moved.ends == 1 && moved.len == expected.len &&
                  moved.top_len == expected.top_len);
            CHECK(!memcmp(moved.logprobs, expected.logprobs, sizeof expected.logprobs) &&
                  !memcmp(moved.top, expected.top, sizeof expected.top));
            free(exported.bytes);
        }
    }
    CHECK(is_idle(engine));
    pllm_engine_free(engine);
}

static void imported_sequence_writes_to_the_named_queue(const pllm_engine *engine) {
    enum { QUEUE_CAPACITY = 2, EXTRA_OUTPUTS = 16 };  // max_seqs outputs beyond the capacity
    pllm_sampling sampling = seeded_sampling();
    pllm_request request = text_request(STORY, &sampling);
    pllm_queue *queue = new_queue(engine, QUEUE_CAPACITY);
    generation a = {0};
    uint64_t id = 0, exports = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    exported_sequence exported = export_and_collect(engine, id, &a);
    free_sequence(engine, id);
    collect_outputs(engine, 0, &a);
    OK(pllm_sequence_import(engine, exported.bytes, exported.len, queue, &id));
    OK(resume_continue(engine, id, PLLM_REQUEST_KEEP));
    for (int i = 0; i < 5; i++) step_of(engine);
    CHECK(outputs_in(queue) == QUEUE_CAPACITY && outputs_in(pllm_engine_queue(engine)) == 0);
    OK(pllm_engine_abort(engine, id));
    step_of(engine);
    CHECK(outputs_in(queue) == 1 && info_of(engine, id).idle == 1);
    // Exports that are never read fill the queue up to a limit.
    for (; exports < QUEUE_CAPACITY + EXTRA_OUTPUTS; exports++, step_of(engine))
        if (!OK(pllm_sequence_export(engine, id, NULL))) break;
    CAPACITY(pllm_sequence_export(engine, id, NULL));
    CHECK(outputs_in(queue) == exports);
    pllm_queue_free(queue);
    INVALID(resume_continue(engine, id, 0));
    INVALID(pllm_sequence_export(engine, id, NULL));
    free(exported.bytes);
    free_sequence(engine, id);
    CHECK(is_idle(engine));
}

const test export_import_tests[] = {
    WITH_BUNDLED(imported_sequence_continues_with_the_same_tokens),
    WITH_BUNDLED(resume_continue_uses_only_queue_user_data_and_keep),
    WITH_BUNDLED(resume_continue_of_a_finished_sequence_is_an_error),
    WITH_BUNDLED(exported_state_goes_to_the_named_queue),
    WITH_BUNDLED(export_of_an_ended_sequence_reports_not_found_to_its_queue),
    ALONE(prompt_logprobs_move_with_the_sequence),
    WITH_BUNDLED(imported_sequence_writes_to_the_named_queue),
    {0},
};
