// One of two ranks, of which the test ends, stops or limits one.
// usage: faults MODEL_DIR RANK FILE TIMEOUT_MS [KIB]
// KIB is the memory that the process may map after it has joined the group.
// Rank 0 prints "ready" before its first step, generates until a step fails, and then checks that the
// process can still serve. Both ranks print how they end.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "pagedllm.h"

static void must(pllm_error *error) {
    if (!error) return;
    printf("refused %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(3);
}

static uint64_t ask(const pllm_engine *engine, uint32_t max_tokens) {
    static const uint32_t prompt[] = {5, 6, 7, 8};
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0, sampling.max_tokens = max_tokens;
    sampling.flags |= PLLM_SAMPLING_IGNORE_EOS;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = prompt, request.prompt_token_ids_len = 4;
    request.sampling = &sampling;
    uint64_t id;
    must(pllm_engine_add_request(engine, &request, &id));
    return id;
}

// Returns how the last output of the engine's queue ended.
static uint32_t last_finish(const pllm_engine *engine) {
    uint32_t finish = PLLM_FINISH_NONE;
    pllm_outputs *outputs;
    must(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) finish = pllm_outputs_get(outputs, i)->finish_reason;
    pllm_outputs_free(outputs);
    return finish;
}

static pllm_engine_options options_for(const char *model) {
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = model;
    options.threads = 1;
    options.kv_bytes = 16 << 20;
    return options;
}

// Generates until a step fails. Returns its code.
static int32_t generate(const pllm_engine *engine, pllm_step *step) {
    for (;;) {
        pllm_error *error = pllm_engine_step(engine, step);
        if (error) {
            int32_t code = pllm_error_code(error);
            printf("step failed: %s\n", pllm_error_message(error));
            pllm_error_free(error);
            return code;
        }
        if (last_finish(engine) != PLLM_FINISH_NONE || step->unfinished == 0) ask(engine, 200);
    }
}

static void serve_alone(const char *model) {
    pllm_engine_options options = options_for(model);
    pllm_engine *engine;
    must(pllm_engine_create(&options, &engine));
    ask(engine, 5);
    pllm_step step = {.struct_size = sizeof step};
    do must(pllm_engine_step(engine, &step));
    while (step.unfinished);
    printf("alive, and alone: finish %u\n", last_finish(engine));
    pllm_engine_free(engine);
}

// Limits the address space to its present size and some more memory.
static void limit_memory(uint64_t more) {
    unsigned long long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (!statm || fscanf(statm, "%llu", &pages) != 1) exit(2);
    fclose(statm);
    struct rlimit limit = {.rlim_max = RLIM_INFINITY};
    limit.rlim_cur = pages * (uint64_t)sysconf(_SC_PAGESIZE) + more;
    if (setrlimit(RLIMIT_AS, &limit)) exit(2);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint32_t rank = (uint32_t)atoi(argv[2]);
    uint64_t timeout_ms = strtoull(argv[4], NULL, 10);
    pllm_communicator world = {.struct_size = sizeof world};
    must(pllm_communicator_shared_memory(argv[3], rank, 2, timeout_ms, &world));
    if (argc > 5) limit_memory(strtoull(argv[5], NULL, 10) << 10);
    pllm_engine_options options = options_for(argv[1]);
    options.communicator = &world, options.tensor_parallel = 2, options.worker_timeout_ms = timeout_ms;
    if (rank > 0) {
        must(pllm_worker_run(&options));
        printf("the engine was freed\n");
        return 0;
    }
    pllm_engine *engine;
    must(pllm_engine_create(&options, &engine));
    ask(engine, 200);
    printf("ready\n");
    pllm_step step = {.struct_size = sizeof step};
    int32_t code = generate(engine, &step);
    printf("code %d, finish %u\n", code, last_finish(engine));
    pllm_engine_free(engine);
    serve_alone(argv[1]);
    return 0;
}
