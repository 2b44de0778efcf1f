// Deadlines, priorities, waiting limits, and predicted admission.
#include "abi_test.h"

static pllm_admission admission_of(const pllm_engine *engine, const pllm_request *request) {
    pllm_admission admission = {.struct_size = sizeof admission};
    OK(pllm_engine_predict_admission(engine, request, &admission));
    return admission;
}

static void negative_deadlines_are_refused(const pllm_engine *engine) {
    const uint64_t id = keep_sequence(engine, 3);
    const int64_t passed_ms[] = {-1, -1000, INT64_MIN};
    pllm_request request = token_request(NULL);
    pllm_resume options;
    pllm_resume_init(&options, sizeof options);
    for (size_t i = 0; i < COUNT(passed_ms); i++) {
        request.deadline_ms = options.deadline_ms = passed_ms[i];
        INVALID(add_and_abort(engine, &request));
        INVALID(pllm_sequence_resume(engine, id, &options));
    }
    request.deadline_ms = INT64_MAX;
    OK(add_and_abort(engine, &request));
    step_to_the_end(engine);
    discard_outputs(engine);
    free_sequence(engine, id);
    CHECK(is_idle(engine));
}

static void deadline_ends_a_request_with_its_tokens_so_far(const pllm_engine *engine) {
    pllm_sampling sampling = long_sampling();
    pllm_request request = token_request(&sampling);
    pllm_resume options;
    uint64_t id = 0, before = stats_of(engine).finished_deadline;
    generation first = {0}, second = {0};
    request.flags = PLLM_REQUEST_KEEP;
    request.deadline_ms = 50;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_of(engine);
    sleep_ms(60);
    CHECK(step_of(engine).unfinished == 0);
    collect_outputs(engine, id, &first);
    CHECK(first.finish_reason == PLLM_FINISH_DEADLINE && first.error_code == 0 &&
          first.tokens_len < sampling.max_tokens);
    // The sequence was kept. The resume has its own deadline.
    pllm_resume_init(&options, sizeof options);
    options.sampling = &sampling;
    OK(pllm_sequence_resume(engine, id, &options));
    step_to_the_end(engine);
    collect_outputs(engine, id, &second);
    CHECK(second.finish_reason == PLLM_FINISH_LENGTH && second.tokens_len == sampling.max_tokens);
    OK(pllm_sequence_rewind(engine, id, COUNT(PROMPT)));
    options.deadline_ms = 1;
    OK(pllm_sequence_resume(engine, id, &options));
    sleep_ms(5);
    step_to_the_end(engine);
    memset(&second, 0, sizeof second);
    collect_outputs(engine, id, &second);
    CHECK(second.finish_reason == PLLM_FINISH_DEADLINE && second.tokens_len == 0);
    CHECK(stats_of(engine).finished_deadline == before + 2);
    free_sequence(engine, id);
    CHECK(is_idle(engine));
}

static void priorities_out_of_range_are_refused(const pllm_engine *engine) {
    const struct {
        int32_t priority;
        int is_valid;
    } cases[] = {{-100, 1}, {100, 1}, {-101, 0}, {101, 0}, {INT32_MIN, 0}, {INT32_MAX, 0}};
    pllm_request request = token_request(NULL);
    for (size_t i = 0; i < COUNT(cases); i++) {
        request.priority = cases[i].priority;
        cases[i].is_valid ? OK(add_and_abort(engine, &request))
                          : INVALID(add_and_abort(engine, &request));
    }
    request.priority = 0;
    request.reserved2 = 1;
    UNSUPPORTED(add_and_abort(engine, &request));
    request.reserved2 = 0, request.reserved3 = 1;
    UNSUPPORTED(add_and_abort(engine, &request));
    request.reserved3 = 0, request.kv_store_wait_ms = 1; // the engine has no kv_store
    INVALID(add_and_abort(engine, &request));
    step_to_the_end(engine);
    discard_outputs(engine);
}

static void higher_priority_runs_first(void) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = NULL;
    pllm_request request = token_request(NULL);
    uint64_t low = 0, high = 0;
    options.order = PLLM_ORDER_PRIORITY;
    options.max_seqs = 1;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    request.priority = -5;
    OK(pllm_engine_add_request(engine, &request, &low));
    request.priority = 5;
    OK(pllm_engine_add_request(engine, &request, &high));
    step_to_the_end(engine);
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    CHECK(pllm_outputs_len(outputs) >= 2 && pllm_outputs_get(outputs, 0)->request == high);
    pllm_outputs_free(outputs);
    pllm_engine_free(engine);
}

static void requests_beyond_the_waiting_limits_are_refused_with_the_numbers(void) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *few = NULL, *little = NULL;
    pllm_request request = token_request(NULL);
    uint64_t id = 77;
    options.max_waiting_requests = 2;
    if (!OK(pllm_engine_create(&options, &few))) return;
    options.max_waiting_requests = 0;
    options.max_waiting_tokens = 10;
    if (!OK(pllm_engine_create(&options, &little))) return;
    pllm_engine *const engines[] = {few, little};
    const char *const texts[] = {"(2 requests, 1 more, max_waiting_requests is 2)",
                                 "(8 tokens, "};
    for (size_t i = 0; i < COUNT(engines); i++) {
        OK(pllm_engine_add_request(engines[i], &request, &id));
        CHECK(admission_of(engines[i], &request).admits == 1);
        OK(pllm_engine_add_request(engines[i], &request, &id));
        pllm_admission admission = admission_of(engines[i], &request);
        CHECK(admission.admits == 0 && admission.fits_now == 0);
        CHECK(admission.waiting_requests == 2 && admission.waiting_tokens == 2 * COUNT(PROMPT));
        id = 77;
        CAPACITY_SAYS(pllm_engine_add_request(engines[i], &request, &id), texts[i]);
        pllm_error *error = pllm_engine_add_request(engines[i], &request, &id);
        CHECK(pllm_error_is_temporary(error) == 1);
        pllm_error_free(error);
        CHECK(id == 77 && stats_of(engines[i]).admission_rejections == 2);
        // After these requests have started, the next one may wait.
        step_of(engines[i]);
        CHECK(admission_of(engines[i], &request).admits == 1);
        OK(pllm_engine_add_request(engines[i], &request, &id));
        pllm_engine_free(engines[i]);
    }
}

static void predict_admission_adds_no_request(void) {
    pllm_engine *engine = open_engine(golden_dir);
    pllm_request request = token_request(NULL);
    pllm_admission admission = admission_of(engine, &request);
    CHECK(admission.admits == 1 && admission.fits_now == 1 && admission.waiting_requests == 0 &&
          admission.waiting_tokens == 0);
    CHECK(admission.first_token_seconds < 0);  // no step has been timed yet
    run_request(engine, &request);
    CHECK(admission_of(engine, &request).first_token_seconds > 0 &&
          admission_of(engine, &request).first_token_seconds < 60);
    CHECK(is_idle(engine) && step_of(engine).unfinished == 0);
    _Alignas(8) unsigned char bytes[sizeof(pllm_admission)];
    memset(bytes, POISON, sizeof bytes);
    *(uint64_t *)(void *)bytes = sizeof bytes;
    pllm_admission *out = (pllm_admission *)(void *)bytes;
    INVALID(pllm_engine_predict_admission(NULL, &request, out));
    INVALID(pllm_engine_predict_admission(engine, NULL, out));
    INVALID(pllm_engine_predict_admission(engine, &request, NULL));
    request.n = 0;
    INVALID(pllm_engine_predict_admission(engine, &request, out));
    CHECK(all_bytes_are(bytes, 8, sizeof bytes, POISON));
    pllm_engine_free(engine);
}

const test admission_tests[] = {
    WITH_BUNDLED(negative_deadlines_are_refused),
    WITH_BUNDLED(deadline_ends_a_request_with_its_tokens_so_far),
    WITH_BUNDLED(priorities_out_of_range_are_refused),
    ALONE(higher_priority_runs_first),
    ALONE(requests_beyond_the_waiting_limits_are_refused_with_the_numbers),
    ALONE(predict_admission_adds_no_request),
    {0},
};
