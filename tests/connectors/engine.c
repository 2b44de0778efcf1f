// Computes one request on an engine with a store, and prints its tokens with the bits of their log
// probabilities. The last line has the statistics of the store.
// usage: engine MODEL_DIR none | files DIRECTORY | files-threads DIRECTORY | valkey SOCKET | nixl SOCKET [hold]
// STORE_TIMEOUT_MS  kv_store_timeout_ms; default: 3000
// With `hold`, the engine keeps its store until the end of the standard input.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <time.h>

#include "pagedllm_files.h"
#ifdef WITH_NIXL  // The packages do not have this store.
#include "pagedllm_nixl.h"
#endif
#include "pagedllm_valkey.h"

enum { PROMPT = 500, OUTPUT = 24, FULL_BLOCKS = 31 };

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(1);
}

static void open_store(const char *kind, const char *place, pllm_kv_store *store) {
    char error[500] = "unknown store";
    int32_t code = 1;
    pllm_kv_store_init(store, sizeof *store);
    if (!strcmp(kind, "files") || !strcmp(kind, "files-threads")) {
        pllm_files_store_options options;
        pllm_files_store_options_init(&options, sizeof options);
        options.directory = place;
        if (strcmp(kind, "files")) options.io = PLLM_FILES_IO_THREADS;
        code = pllm_files_store_open(&options, store, error, sizeof error);
    } else if (!strcmp(kind, "valkey")) {
        pllm_valkey_store_options options;
        pllm_valkey_store_options_init(&options, sizeof options);
        options.host = place;
        options.timeout_ms = 500;
        code = pllm_valkey_store_open(&options, store, error, sizeof error);
#ifdef WITH_NIXL
    } else if (!strcmp(kind, "nixl")) {
        pllm_nixl_store_options options;
        pllm_nixl_store_options_init(&options, sizeof options);
        options.library = getenv("NIXL_LIBRARY");
        options.host = place;
        options.max_bytes = 64 << 20;
        options.lease_ms = 2000;
        code = pllm_nixl_store_open(&options, store, error, sizeof error);
#endif
    }
    if (code == 0) return;
    fprintf(stderr, "error %d: %s\n", (int)code, error);
    exit(1);
}

static void print_outputs(pllm_outputs *outputs) {
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *output = pllm_outputs_get(outputs, i);
        for (uint64_t token = 0; token < output->tokens_len; token++) {
            uint32_t bits;
            memcpy(&bits, &output->logprobs[token], sizeof bits);
            printf("%u %08x\n", output->tokens[token], bits);
        }
    }
    pllm_outputs_free(outputs);
}

// Steps until the store has all full blocks of the prompt, for 20 seconds at most.
static void store_blocks(pllm_engine *engine) {
    const struct timespec pause = {0, 10 * 1000 * 1000};
    pllm_stats stats = {.struct_size = sizeof stats};
    for (int i = 0; i < 2000 && stats.kv_store_stored < FULL_BLOCKS; i++) {
        pllm_step step = {.struct_size = sizeof step};
        check(pllm_engine_step(engine, &step));
        check(pllm_engine_get_stats(engine, &stats));
        thrd_sleep(&pause, NULL);
    }
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    pllm_kv_store store;
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = argv[1];
    const char *timeout = getenv("STORE_TIMEOUT_MS");
    options.kv_store_timeout_ms = timeout ? (uint32_t)atoi(timeout) : 3000;
    if (argc > 3) {
        open_store(argv[2], argv[3], &store);
        options.kv_store = &store;
    }
    pllm_engine *engine;
    check(pllm_engine_create(&options, &engine));

    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = 3 + i * i % 250;
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = OUTPUT;
    sampling.flags |= PLLM_SAMPLING_LOGPROBS | PLLM_SAMPLING_IGNORE_EOS;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = prompt;
    request.prompt_token_ids_len = PROMPT;
    request.sampling = &sampling;
    uint64_t id;
    check(pllm_engine_add_request(engine, &request, &id));

    pllm_step step = {.struct_size = sizeof step};
    do {
        pllm_outputs *outputs;
        check(pllm_engine_step(engine, &step));
        check(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        print_outputs(outputs);
    } while (step.unfinished);
    const int holds = argc > 4;
    if (holds) store_blocks(engine);
    pllm_stats stats = {.struct_size = sizeof stats};
    check(pllm_engine_get_stats(engine, &stats));
    fprintf(stderr, "hits %llu failures %llu\n", (unsigned long long)stats.kv_store_hits, (unsigned long long)stats.kv_store_failures);
    fflush(stdout);
    while (holds && getchar() != EOF) continue;
    pllm_engine_free(engine);
}
