// Requests: invalid prompts, ids, usage counts.
#include "abi_test.h"

static void invalid_prompts_are_refused(const pllm_engine *engine) {
    static const uint32_t many[5000] = {1};
    pllm_request request = token_request(NULL);
    request.prompt_token_ids = (const uint32_t[]){1, UINT32_MAX};
    request.prompt_token_ids_len = 2;
    INVALID(add_and_abort(engine, &request));
    request.prompt_token_ids = many;
    request.prompt_token_ids_len = COUNT(many);
    INVALID(add_and_abort(engine, &request));
    request.prompt_token_ids = (const uint32_t *)(uintptr_t)((uintptr_t)many + 1);  // not aligned
    request.prompt_token_ids_len = 3;
    INVALID(add_and_abort(engine, &request));
    request = text_request("", NULL);
    INVALID(add_and_abort(engine, &request));
}

static void ids_of_ended_and_unknown_requests_are_not_found(const pllm_engine *engine) {
    const uint64_t unknown[] = {0, 1ull << 40, UINT64_MAX};
    for (size_t i = 0; i < COUNT(unknown); i++)
        FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(engine, unknown[i]));
    pllm_sampling sampling = greedy();
    sampling.max_tokens = 2;
    pllm_request request = token_request(&sampling);
    pllm_step step = {.struct_size = sizeof step};
    uint64_t finished = 0, aborted = 0, next = 0;
    generation a = {0}, b = {0};
    OK(pllm_engine_add_request(engine, &request, &finished));
    do OK(pllm_engine_step(engine, &step));
    while (step.unfinished);
    FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(engine, finished));
    OK(pllm_engine_add_request(engine, &request, &aborted));
    OK(pllm_engine_abort(engine, aborted));
    OK(pllm_engine_step(engine, &step));
    CHECK(step.unfinished == 0);
    FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(engine, aborted));
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        if (o->request == finished || o->request == aborted)
            append_output(o->request == finished ? &a : &b, o);
    }
    pllm_outputs_free(outputs);
    CHECK(a.finish_reason == PLLM_FINISH_LENGTH && a.tokens_len == 2);
    CHECK(b.finish_reason == PLLM_FINISH_ABORT && b.tokens_len == 0);
    OK(pllm_engine_add_request(engine, &request, &next));
    CHECK(next != finished && next != aborted);
    OK(pllm_engine_abort(engine, next));
    OK(pllm_engine_step(engine, &step));
    CHECK(is_idle(engine));
}

static void generation_ends_at_the_eos_token_of_the_model(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    pllm_tokens *prompt = NULL;
    request.user_data = 0xFEDCBA9876543210;
    const generation *a = run_request(engine, &request);
    CHECK(a->finish_reason == PLLM_FINISH_STOP && a->error_code == 0);
    CHECK(text_is(a, PARIS, strlen(PARIS)) && text_matches_tokens(engine, a));
    CHECK(a->logprobs_len == 0);
    CHECK(a->user_data == 0xFEDCBA9876543210);
    CHECK(a->generated_tokens == a->tokens_len && a->tokens[a->tokens_len - 1] == 5);
    OK(pllm_engine_tokenize(engine, FRANCE, PLLM_NUL_TERMINATED, 0, &prompt));
    CHECK(a->prompt_tokens == pllm_tokens_len(prompt));
    pllm_tokens_free(prompt);
    CHECK(is_idle(engine));
}

// Several requests stream at once. Outputs carry the ids of their requests, and the counts are
// consistent.
static void usage_counts_are_consistent(const pllm_engine *engine) {
    pllm_stats before = stats_of(engine);
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    sampling.max_tokens = 7;
    uint64_t ids[6], generated = 0, prompts = 0, ended = 0;
    for (size_t i = 0; i < COUNT(ids); i++) {
        request.user_data = i;
        OK(pllm_engine_add_request(engine, &request, &ids[i]));
    }
    pllm_step step = {.struct_size = sizeof step};
    uint64_t decoded = 0, prefilled = 0;
    do {
        OK(pllm_engine_step(engine, &step));
        decoded += step.decode_tokens;
        prefilled += step.prefill_tokens;
        pllm_outputs *outputs = NULL;
        OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
            const pllm_output *o = pllm_outputs_get(outputs, i);
            CHECK(o->user_data < COUNT(ids) && ids[o->user_data] == o->request);
            generated += o->tokens_len;
            if (o->finish_reason) ended++, prompts += o->prompt_tokens;
        }
        CHECK(pllm_outputs_get(outputs, pllm_outputs_len(outputs)) == NULL &&
              pllm_outputs_get(outputs, UINT64_MAX) == NULL);
        pllm_outputs_free(outputs);
    } while (step.unfinished);
    pllm_stats after = stats_of(engine);
    CHECK(ended == COUNT(ids) && generated == 7 * COUNT(ids));
    CHECK(after.generated_tokens - before.generated_tokens == generated);
    CHECK(after.prompt_tokens - before.prompt_tokens == prompts && prefilled == prompts);
    CHECK(decoded == generated - COUNT(ids));  // prefill produces the first token of each request
    CHECK(after.finished_length - before.finished_length == COUNT(ids));
    CHECK(is_idle(engine));
}

const test requests_tests[] = {
    WITH_BUNDLED(invalid_prompts_are_refused),
    WITH_BUNDLED(ids_of_ended_and_unknown_requests_are_not_found),
    WITH_BUNDLED(generation_ends_at_the_eos_token_of_the_model),
    WITH_BUNDLED(usage_counts_are_consistent),
    {0},
};
