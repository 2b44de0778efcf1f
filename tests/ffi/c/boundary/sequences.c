// Helpers of the tests of sequences.
#include "sequences.h"

const char *const prompts[SEQUENCE_PROMPTS] = {
    "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n",
    "<s><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n",
};

pllm_sampling greedy_sampling(uint32_t tokens) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = tokens;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    return sampling;
}

uint64_t add_kept(const pllm_engine *engine, const pllm_queue *to, unsigned prompt_index,
                  uint32_t tokens, uint32_t n, generation *a) {
    pllm_sampling sampling = greedy_sampling(tokens);
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = prompts[prompt_index];
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.sampling = &sampling;
    request.flags = PLLM_REQUEST_KEEP;
    request.user_data = (uintptr_t)a;
    request.queue = to;
    request.n = n;
    *a = (generation){0};
    OK(pllm_engine_add_request(engine, &request, &a->id));
    return a->id;
}

pllm_error *try_resume(const pllm_engine *engine, const pllm_queue *to, uint64_t sequence,
                       uint32_t tokens, generation *a) {
    pllm_sampling sampling = greedy_sampling(tokens);
    pllm_resume options;
    pllm_resume_init(&options, sizeof options);
    options.sampling = &sampling;
    options.queue = to;
    options.flags |= PLLM_RESUME_USER_DATA;
    options.user_data = (uintptr_t)a;
    *a = (generation){.id = sequence};
    return pllm_sequence_resume(engine, sequence, &options);
}

void resume(const pllm_engine *engine, const pllm_queue *to, uint64_t sequence, uint32_t tokens,
            generation *a) {
    OK(try_resume(engine, to, sequence, tokens, a));
}

uint64_t fork_sequence(const pllm_engine *engine, uint64_t sequence, uint64_t at,
                       const pllm_queue *to, generation *a) {
    pllm_fork options;
    uint64_t child = 0;
    pllm_fork_init(&options, sizeof options);
    options.at = at;
    options.queue = to;
    options.flags = PLLM_FORK_USER_DATA;
    options.user_data = (uintptr_t)a;
    *a = (generation){0};
    OK(pllm_sequence_fork(engine, sequence, &options, &child));
    return a->id = child;
}

pllm_sequence_info info_of(const pllm_engine *engine, uint64_t sequence) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    OK(pllm_sequence_get_info(engine, sequence, &info));
    return info;
}

void step(const pllm_engine *engine, unsigned times) {
    pllm_step report = {.struct_size = sizeof report};
    while (times-- > 0) OK(pllm_engine_step(engine, &report));
}

unsigned steps_to_the_end(const pllm_engine *engine, unsigned max_steps) {
    pllm_step report = {.struct_size = sizeof report, .unfinished = 1};
    unsigned steps = 0;
    while (report.unfinished && steps < max_steps && OK(pllm_engine_step(engine, &report))) steps++;
    return steps;
}

void check_is_unknown(const pllm_engine *engine, uint64_t sequence) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    uint64_t child = 0;
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_get_info(engine, sequence, &info));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_fork(engine, sequence, NULL, &child));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_append(engine, sequence, &(uint32_t){5}, 1));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_rewind(engine, sequence, 1));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_resume(engine, sequence, NULL));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_export(engine, sequence, NULL));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_free(engine, sequence));
}

bool continues_reference(const generation *a, unsigned prompt_index, size_t from) {
    const generation *expected = reference(prompt_index, ALL_TOKENS);
    return a->ends == 1 && from + a->tokens_len == ALL_TOKENS &&
           !memcmp(a->tokens, expected->tokens + from, a->tokens_len * sizeof *a->tokens);
}

void check_nothing_is_left(const pllm_engine *engine) {
    pllm_stats s = stats_of(engine);
    CHECK(s.waiting == 0 && s.running == 0 && s.idle == 0 && s.blocks_used == 0);
}

void wait_for_end(const pllm_queue *queue, const generation *a) {
    while (!a->ends) take_outputs(queue, -1);
}

uint64_t copy_sequence(const pllm_engine *engine, const pllm_queue *queue, uint64_t sequence) {
    pllm_queue *states = new_queue(engine, 1);
    pllm_outputs *outputs = NULL;
    uint64_t copy = 0;
    OK(pllm_sequence_export(engine, sequence, states));
    OK(pllm_queue_poll(states, -1, &outputs));
    const pllm_output *o = pllm_outputs_get(outputs, 0);
    CHECK(pllm_outputs_len(outputs) == 1 && o->sequence == sequence && o->sequence_state &&
          o->finish_reason == PLLM_FINISH_NONE);
    OK(pllm_sequence_import(engine, o->sequence_state, o->sequence_state_len, queue, &copy));
    pllm_outputs_free(outputs);
    pllm_queue_free(states);
    return copy;
}
