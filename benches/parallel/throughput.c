// Tokens per second of an engine, alone or with other workers.
// usage: throughput MODEL_DIR THREADS TENSOR PIPELINE [RANK FILE]
// Rank 0 prints the decode tokens per second of 1, 8 and 32 sequences, and the prompt tokens per second of
// prompts of 512 tokens.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pagedllm.h"

enum { PROMPT = 16, LONG_PROMPT = 512, DECODES = 24, TIMEOUT_MS = 120000 };

static void must(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void add(const pllm_engine *engine, uint32_t len, uint32_t max_tokens, uint32_t seed) {
    uint32_t prompt[LONG_PROMPT];
    for (uint32_t i = 0; i < len; i++) prompt[i] = (i * 37 + seed * 101) % 1000;
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0, sampling.max_tokens = max_tokens;
    sampling.flags |= PLLM_SAMPLING_IGNORE_EOS;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = prompt, request.prompt_token_ids_len = len, request.sampling = &sampling;
    uint64_t id;
    must(pllm_engine_add_request(engine, &request, &id));
}

// Runs all requests. Returns the tokens that were generated, and the time since the first of them.
static double run(const pllm_engine *engine, uint64_t *tokens) {
    pllm_step step = {.struct_size = sizeof step};
    double began = 0;
    *tokens = 0;
    do {
        must(pllm_engine_step(engine, &step));
        pllm_outputs *outputs;
        must(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        uint64_t generated = pllm_outputs_len(outputs);
        if (began > 0) *tokens += generated;
        else if (generated) began = now();
        pllm_outputs_free(outputs);
    } while (step.unfinished);
    return now() - began;
}

static double decode_speed(const pllm_engine *engine, uint32_t sequences) {
    uint64_t tokens;
    for (uint32_t i = 0; i < sequences; i++) add(engine, PROMPT, DECODES, i);
    double seconds = run(engine, &tokens);
    return (double)tokens / seconds;
}

static double prompt_speed(const pllm_engine *engine) {
    uint64_t tokens;
    double began = now();
    for (uint32_t i = 0; i < 2; i++) add(engine, LONG_PROMPT, 1, 1000 + i);
    run(engine, &tokens);
    return 2 * LONG_PROMPT / (now() - began);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = argv[1];
    options.threads = (uint32_t)atoi(argv[2]);
    options.tensor_parallel = (uint32_t)atoi(argv[3]), options.pipeline_parallel = (uint32_t)atoi(argv[4]);
    options.max_model_len = 1024;
    options.flags = PLLM_ENGINE_SKIP_TOKENIZER | PLLM_ENGINE_NO_PREFIX_CACHE;
    pllm_communicator world = {.struct_size = sizeof world};
    if (argc > 6) {
        uint32_t size = options.tensor_parallel * options.pipeline_parallel;
        must(pllm_communicator_shared_memory(argv[6], (uint32_t)atoi(argv[5]), size, TIMEOUT_MS, &world));
        options.communicator = &world, options.worker_timeout_ms = TIMEOUT_MS;
    }
    if (world.rank > 0) {
        must(pllm_worker_run(&options));
        return 0;
    }
    pllm_engine *engine;
    must(pllm_engine_create(&options, &engine));
    decode_speed(engine, 8);  // the first use of memory
    printf("%.2f %.2f %.2f %.2f\n", decode_speed(engine, 1), decode_speed(engine, 8), decode_speed(engine, 32), prompt_speed(engine));
    pllm_engine_free(engine);
}
