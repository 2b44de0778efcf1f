// Calls on communicators of shared memory. Groups of several ranks wait in vain.
#include "program.h"

#include <pthread.h>
#include <unistd.h>

enum { LEN = 3000 };

static void use_single_rank(const pllm_communicator *c) {
    static const uint64_t limit_ms = 1;
    uint8_t bytes[LEN], out[LEN];
    memset(bytes, 7, LEN);
    EXPECT(c->rank == 0 && c->size == 1, "rank %u of %u", c->rank, c->size);
    EXPECT(c->broadcast(c->user_data, bytes, LEN, 0, limit_ms) == 0, "broadcast failed");
    EXPECT(c->all_gather(c->user_data, bytes, LEN, out, 0) == 0 && !memcmp(bytes, out, LEN),
           "all_gather failed");
    memset(out, 0, LEN);
    EXPECT(c->all_to_all(c->user_data, bytes, LEN, out, 0) == 0 && !memcmp(bytes, out, LEN),
           "all_to_all failed");
    pllm_communicator part = *c;
    EXPECT(c->split(c->user_data, 5, 0, &part.user_data, &part.rank, &part.size) == 0 &&
               part.rank == 0 && part.size == 1,
           "split failed");
    part.close(part.user_data);
    EXPECT(c->send(c->user_data, bytes, LEN, 0, limit_ms) != 0, "a rank sent to itself");
    EXPECT(c->broadcast(c->user_data, bytes, LEN, 0, 0) != 0, "a call after an error succeeded");
}

void join_communicator(worker *w) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/pllm-fuzz-%d-%u", (int)getpid(), w->index);
    bool is_single = !one_in(w, 4);
    uint32_t rank = is_single ? 0 : below(w, 4), size = is_single ? 1 : interesting_u32(w);
    pllm_communicator communicator;
    out_struct out = any_out_struct(w, sizeof communicator, sizeof communicator);
    int32_t code = TRY(pllm_communicator_shared_memory, one_in(w, 16) ? NULL : path, rank, size,
                       1 + below(w, 3), out.at);
    EXPECT(!code || access(path, F_OK) != 0, "a file was left behind");
    if (!check_out_struct(&out, code, &communicator)) return;
    use_single_rank(&communicator);
    communicator.close(communicator.user_data);
    EXPECT(access(path, F_OK) != 0, "a file was left behind");
}

// Runs a worker that has no others, or that is rank 0.
void run_worker_in_vain(worker *w) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/pllm-fuzz-worker-%d-%u", (int)getpid(), w->index);
    pllm_communicator communicator = {.struct_size = sizeof communicator};
    bool has_communicator = !one_in(w, 3) && !TRY(pllm_communicator_shared_memory, path, 0, 1, 1, &communicator);
    pllm_engine_options options;
    CALL(pllm_engine_options_init, &options, sizeof options);
    options.model_path = model_dir;
    options.tensor_parallel = interesting_u32(w), options.pipeline_parallel = below(w, 3);
    options.communicator = has_communicator ? &communicator : NULL;
    options.worker_timeout_ms = 1 + below(w, 3);
    int32_t code = TRY(pllm_worker_run, one_in(w, 16) ? NULL : &options);
    EXPECT(code == PLLM_E_INVALID_ARGUMENT, "a worker without others ran, or failed with %d", code);
    if (has_communicator) communicator.close(communicator.user_data);
}

enum { WORKER_LIMIT_MS = 60000 };

static pllm_engine_options options_of_pair(const pllm_communicator *communicator) {
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = golden_dir;
    options.flags |= PLLM_ENGINE_SKIP_TOKENIZER;
    options.threads = 1;
    options.kv_bytes = 1 << 20;
    options.tensor_parallel = 2;
    options.communicator = communicator;
    options.worker_timeout_ms = WORKER_LIMIT_MS;
    return options;
}

// Creates and frees the engine of a worker. These calls are not counted, since their thread has no
// program.
static void *run_first_rank(void *path) {
    pllm_communicator communicator = {.struct_size = sizeof communicator};
    pllm_engine *engine = NULL;
    pllm_error *error =
        pllm_communicator_shared_memory(path, 0, 2, WORKER_LIMIT_MS, &communicator);
    pllm_engine_options options = options_of_pair(&communicator);
    if (!error) error = pllm_engine_create(&options, &engine);
    EXPECT(!error, "an engine of two workers: %s", pllm_error_message(error));
    pllm_engine_free(engine);
    return NULL;
}

// Runs a worker until its engine is freed.
void run_worker_of_an_engine(worker *w) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/pllm-fuzz-pair-%d-%u", (int)getpid(), w->index);
    pthread_t first;
    if (pthread_create(&first, NULL, run_first_rank, path)) perror("pthread_create"), exit(2);
    pllm_communicator communicator = {.struct_size = sizeof communicator};
    int32_t code =
        TRY(pllm_communicator_shared_memory, path, 1, 2, WORKER_LIMIT_MS, &communicator);
    EXPECT(!code, "the second of two ranks could not join: code %d", code);
    pllm_engine_options options = options_of_pair(&communicator);
    code = TRY(pllm_worker_run, &options);
    EXPECT(!code, "a worker whose engine was freed failed with %d", code);
    pthread_join(first, NULL);
}
