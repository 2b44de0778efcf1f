// A host with its own allocator, as if jemalloc or mimalloc replaced malloc. It fills fresh memory
// with 0xAA and freed memory with 0xDD, and counts bytes: 100 engines leave no more memory
// allocated than 10 engines.
// usage: allocator MODEL_DIR
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagedllm.h"

// ---- the allocator of the host, on top of glibc's ----

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *block, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

enum { FRESH = 0xAA, FREED = 0xDD };

static atomic_llong bytes_allocated;
static atomic_ullong blocks_allocated;

static void *count_and_fill(void *block, int fill) {
    if (!block) return NULL;
    size_t size = malloc_usable_size(block);
    if (fill) memset(block, fill, size);
    atomic_fetch_add(&bytes_allocated, (long long)size);
    atomic_fetch_add(&blocks_allocated, 1);
    return block;
}

void *malloc(size_t size) { return count_and_fill(__libc_malloc(size), FRESH); }

void *calloc(size_t count, size_t size) { return count_and_fill(__libc_calloc(count, size), 0); }

void *memalign(size_t alignment, size_t size) {
    return count_and_fill(__libc_memalign(alignment, size), FRESH);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *aligned = memalign(alignment, size);
    if (aligned) *block = aligned;
    return aligned ? 0 : ENOMEM;
}

void free(void *block) {
    if (!block) return;
    size_t size = malloc_usable_size(block);
    memset(block, FREED, size);
    atomic_fetch_sub(&bytes_allocated, (long long)size);
    __libc_free(block);
}

// Always moves the block, so that a stale pointer is detected.
void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    void *moved = malloc(size);
    if (!moved) return NULL;
    size_t old = malloc_usable_size(block);
    memcpy(moved, block, old < size ? old : size);
    free(block);
    return moved;
}

// ---- the host ----

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "allocator: error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(1);
}

static void read_to_the_end(const pllm_queue *queue, char *text, size_t size) {
    size_t length = 0;
    for (int ended = 0; !ended;) {
        pllm_outputs *outputs;
        check(pllm_queue_poll(queue, -1, &outputs));
        for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
            const pllm_output *o = pllm_outputs_get(outputs, i);
            if (o->text && length + o->text_len < size)
                memcpy(text + length, o->text, o->text_len), length += o->text_len;
            if (o->error)
                exit(fprintf(stderr, "allocator: %.*s\n", (int)o->error_len, o->error) > 0);
            ended |= o->finish_reason != PLLM_FINISH_NONE;
        }
        pllm_outputs_free(outputs);
    }
    text[length] = 0;
}

static uint64_t add_request(const pllm_engine *engine, pllm_queue *queue, uint32_t max_tokens,
                            uint32_t flags) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = max_tokens;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n";
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.sampling = &sampling;
    request.queue = queue;
    request.flags = flags;
    uint64_t id;
    check(pllm_engine_add_request(engine, &request, &id));
    return id;
}

// Exports a sequence and imports it twice. One import finishes, the other one is freed with its
// engine.
static void export_and_import(const pllm_engine *engine, pllm_queue *queue) {
    char text[256];
    uint64_t id = add_request(engine, queue, 3, PLLM_REQUEST_KEEP);
    pllm_outputs *outputs;
    pllm_resume options;
    read_to_the_end(queue, text, sizeof text);
    check(pllm_sequence_export(engine, id, NULL));
    check(pllm_queue_poll(queue, -1, &outputs));
    const pllm_output *o = pllm_outputs_get(outputs, 0);
    pllm_error_free(
        pllm_sequence_import(engine, o->sequence_state, o->sequence_state_len - 1, queue, &id));
    for (int i = 0; i < 2; i++)
        check(pllm_sequence_import(engine, o->sequence_state, o->sequence_state_len, queue, &id));
    pllm_outputs_free(outputs);
    check(pllm_sequence_rewind(engine, id, 5));
    pllm_resume_init(&options, sizeof options);
    options.flags = PLLM_RESUME_CONTINUE;
    check(pllm_sequence_resume(engine, id, &options));
    read_to_the_end(queue, text, sizeof text);
}

// Words that no earlier engine has tokenized: the tokenizer's caches must be freed with the engine.
static void tokenize_new_words(const pllm_engine *engine, unsigned first) {
    pllm_tokens *tokens;
    char words[4096];
    size_t length = 0;
    for (unsigned i = 0; i < 300; i++)
        length += (size_t)snprintf(words + length, sizeof words - length, "w%xq ",
                                   (first + i) * 2654435761u);
    check(pllm_engine_tokenize(engine, words, length, 0, &tokens));
    pllm_tokens_free(tokens);
}

static void create_use_and_free(const char *model, unsigned i, char *text, size_t size) {
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = model;
    options.kv_bytes = 8 << 20;
    options.threads = 2;
    pllm_engine *engine;
    pllm_queue *queue;
    check(pllm_engine_create(&options, &engine));
    check(pllm_queue_create(engine, 4, &queue));
    check(pllm_engine_start(engine));
    tokenize_new_words(engine, i * 300);
    add_request(engine, queue, PLLM_UNLIMITED_TOKENS, 0);
    read_to_the_end(queue, text, size);
    export_and_import(engine, queue);
    add_request(engine, queue, PLLM_UNLIMITED_TOKENS, 0);  // ends with its engine
    pllm_error_free(pllm_engine_abort(engine, 999));
    if (i % 2) pllm_queue_free(queue);
    pllm_engine_free(engine);
    if (i % 2 == 0) pllm_queue_free(queue);
}

int main(int argc, char **argv) {
    enum { WARM_UP = 10, ENGINES = 100 };
    if (argc < 2) return fprintf(stderr, "usage: allocator MODEL_DIR\n"), 2;
    char text[256] = "";
    long long after_warm_up = 0;
    for (unsigned i = 0; i < ENGINES; i++) {
        create_use_and_free(argv[1], i, text, sizeof text);
        if (i + 1 == WARM_UP) after_warm_up = bytes_allocated;
        if (strcmp(text, "The capital of France is Paris."))
            return fprintf(stderr, "allocator: \"%s\"\n", text), 1;
    }
    long long grown = bytes_allocated - after_warm_up;
    if (blocks_allocated < 10000)
        return fprintf(stderr, "allocator: the library does not use this allocator\n"), 1;
    // Bookkeeping of threads in the C library varies slightly.
    if (grown > 1024)
        return fprintf(stderr, "allocator: %d engines leaked %lld bytes\n", ENGINES - WARM_UP,
                       grown),
               1;
    printf("passed   engines_return_all_memory_to_a_custom_allocator (%lld bytes in %d engines)\n",
           grown, ENGINES - WARM_UP);
}
