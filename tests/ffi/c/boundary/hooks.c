// Logits hooks.
#include "boundary.h"
#include "sequences.h"

#include <math.h>

typedef struct {
    pllm_engine *engine;
    const pllm_queue *queue;
    atomic_uint calls, forks;
    uint64_t added;
    generation extra, child;
} hook_data;

// Forces each token to be the previous one plus 1, and makes calls that any thread may make.
static void count_up_and_call(void *data, uint64_t sequence, const uint32_t *tokens,
                              uint64_t tokens_len, float *logits, uint64_t vocab_size) {
    hook_data *m = data;
    pllm_step report = {.struct_size = sizeof report};
    pllm_outputs *outputs = NULL;
    unsigned call = atomic_fetch_add(&m->calls, 1);
    FAILS(PLLM_E_BUSY, "", pllm_engine_step(m->engine, &report));
    CHECK(stats_of(m->engine).steps < 1000);
    CHECK(code_of(pllm_queue_poll(m->queue, 0, &outputs)) == 0);
    pllm_outputs_free(outputs);
    if (call == 2) add_prompt(m->engine, NULL, 0, 5, &m->extra);
    if (call == 3) fork_sequence(m->engine, sequence, PLLM_FORK_AT_END, NULL, &m->child);
    if (call == 4) CHECK(code_of(pllm_engine_abort(m->engine, 1u << 30)) == PLLM_E_NOT_FOUND);
    const uint32_t next = (tokens[tokens_len - 1] + 1) % (uint32_t)vocab_size;
    for (uint64_t i = 0; i < vocab_size; i++) logits[i] = i == next ? 0 : -INFINITY;
}

static void logits_hook_may_call_the_library(void) {
    enum { TOKENS = 12 };
    for (int started = 0; started < 2; started++) {
        static hook_data m;
        pllm_engine *engine = open_engine(model_dir);
        pllm_queue *unused = new_queue(engine, 8);
        pllm_sampling sampling = greedy_sampling(TOKENS);
        pllm_request request;
        generation a = {0};
        m = (hook_data){.engine = engine, .queue = unused};
        pllm_request_init(&request, sizeof request);
        request.prompt_token_ids = (const uint32_t[]){500};
        request.prompt_token_ids_len = 1;
        request.sampling = &sampling;
        request.user_data = (uintptr_t)&a;
        request.logits_hook = count_up_and_call;
        request.hook_data = &m;
        OK(pllm_engine_add_request(engine, &request, &a.id));
        if (started) OK(pllm_engine_start(engine));
        if (!started) step_to_the_end(engine);
        while (!a.ends || !m.extra.ends || !m.child.ends)
            take_outputs(pllm_engine_queue(engine), -1);
        CHECK(a.tokens_len == TOKENS && m.extra.tokens_len == 5 && m.child.ends == 1);
        for (uint32_t i = 0; i < TOKENS; i++) CHECK(a.tokens[i] == 501 + i);
        // The fork inherits the hook and continues the count.
        for (size_t i = 0; i < m.child.tokens_len; i++)
            CHECK(m.child.tokens[i] == 501 + TOKENS - m.child.tokens_len + i);
        CHECK(m.calls == TOKENS + m.child.tokens_len);
        pllm_queue_free(unused);
        pllm_engine_free(engine);
    }
}

static void fill_logits(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len,
                        float *logits, uint64_t vocab_size) {
    (void)sequence, (void)tokens, (void)tokens_len;
    for (uint64_t i = 0; i < vocab_size; i++) logits[i] = *(const float *)data;
}

// If a hook leaves no distribution, only its own request ends with an error.
static void logits_hook_without_a_distribution_ends_only_its_request(void) {
    static const float fill_values[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < COUNT(fill_values); i++)
        for (int greedy = 0; greedy < 2; greedy++) {
            pllm_engine *engine = open_engine(model_dir);
            pllm_sampling sampling = greedy_sampling(5);
            pllm_request request;
            generation a = {0}, other;
            sampling.temperature = greedy ? 0 : 1;
            pllm_request_init(&request, sizeof request);
            request.prompt = "Hello";
            request.sampling = &sampling;
            request.user_data = (uintptr_t)&a;
            request.logits_hook = fill_logits;
            request.hook_data = (void *)(uintptr_t)&fill_values[i];
            OK(pllm_engine_add_request(engine, &request, &a.id));
            add_prompt(engine, NULL, 0, ALL_TOKENS, &other);
            step_to_the_end(engine);
            CHECK(a.ends == 1 && a.finish_reason == PLLM_FINISH_ERROR &&
                  is_complete(&other, 0, ALL_TOKENS));
            pllm_engine_free(engine);
        }
}

const test hooks_tests[] = {
    TEST(logits_hook_may_call_the_library),
    TEST(logits_hook_without_a_distribution_ends_only_its_request),
    {0},
};
