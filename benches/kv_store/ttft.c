// Time to first token of prompts of 2,000 tokens: computed, and read from the stores of connectors/.
// usage: ttft MODEL_DIR STORE_DIRECTORY SOCKET PROMPTS
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "pagedllm_files.h"
#include "pagedllm_valkey.h"

enum { TOKENS = 2000, MAX_PROMPTS = 64, VOCABULARY = 32000, BLOCK = 16 };

typedef struct {
    const char *name;
    enum { NONE, FILES, VALKEY } kind;
    uint32_t io;
    int writes, is_cold;
} source;

static const char *model, *directory, *server;
static int prompts;

static void fail(const char *text) {
    fprintf(stderr, "%s\n", text);
    exit(1);
}

static void check(pllm_error *error) {
    if (error) fail(pllm_error_message(error));
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static void open_store(const source *from, pllm_kv_store *store) {
    char error[500];
    pllm_kv_store_init(store, sizeof *store);
    if (from->kind == FILES) {
        pllm_files_store_options options;
        pllm_files_store_options_init(&options, sizeof options);
        options.directory = directory;
        options.io = from->io;
        if (pllm_files_store_open(&options, store, error, sizeof error)) fail(error);
    } else {
        pllm_valkey_store_options options;
        pllm_valkey_store_options_init(&options, sizeof options);
        options.host = server;
        options.timeout_ms = 60000;
        if (pllm_valkey_store_open(&options, store, error, sizeof error)) fail(error);
    }
}

// Removes the values from the page cache.
static void drop_page_cache(void) {
    char path[4096];
    for (const char *digit = "0123456789abcdef"; *digit; digit++) {
        snprintf(path, sizeof path, "%s/%c", directory, *digit);
        DIR *dir = opendir(path);
        if (!dir) fail("the store has no values");
        for (struct dirent *entry; (entry = readdir(dir));) {
            const int fd = openat(dirfd(dir), entry->d_name, O_RDONLY);
            if (fd < 0) continue;
            fdatasync(fd);
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            close(fd);
        }
        closedir(dir);
    }
}

static pllm_stats stats_of(pllm_engine *engine) {
    pllm_stats stats = {.struct_size = sizeof stats};
    check(pllm_engine_get_stats(engine, &stats));
    return stats;
}

// Runs a request for one token. Returns the time to this token in milliseconds.
static double run(pllm_engine *engine, uint64_t seed, uint32_t len) {
    static uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < len; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = 3 + (uint32_t)(seed >> 33) % (VOCABULARY - 3);
    }
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = 1;
    sampling.flags |= PLLM_SAMPLING_IGNORE_EOS;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = tokens;
    request.prompt_token_ids_len = len;
    request.sampling = &sampling;
    uint64_t id, generated = 0;
    const double begin = now_ms();
    check(pllm_engine_add_request(engine, &request, &id));
    pllm_step step = {.struct_size = sizeof step};
    do {
        pllm_outputs *outputs;
        check(pllm_engine_step(engine, &step));
        check(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) generated += pllm_outputs_get(outputs, i)->tokens_len;
        pllm_outputs_free(outputs);
    } while (step.unfinished);
    if (generated != 1) fail("the request has ended without a token");
    return now_ms() - begin;
}

// Waits until all blocks have been written.
static void finish_writes(pllm_engine *engine) {
    const uint64_t blocks = (uint64_t)prompts * (TOKENS / BLOCK);
    for (const double end = now_ms() + 60000; now_ms() < end; usleep(10000)) {
        pllm_step step = {.struct_size = sizeof step};
        check(pllm_engine_step(engine, &step));
        const pllm_stats stats = stats_of(engine);
        if (stats.kv_store_stored >= blocks) return;
        if (stats.kv_store_dropped + stats.kv_store_failures > 0) break;
    }
    fail("not all blocks were written");
}

static int compare(const void *a, const void *b) {
    const double first = *(const double *)a, second = *(const double *)b;
    return (first > second) - (first < second);
}

// Measures a source with a new engine, whose prefix cache is empty. Returns the median.
static double measure(const source *from, double computed) {
    pllm_kv_store store;
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = model;
    options.flags |= PLLM_ENGINE_SKIP_TOKENIZER;
    options.kv_store_timeout_ms = 60000;
    if (from->kind != NONE) {
        open_store(from, &store);
        options.kv_store = &store;
    }
    pllm_engine *engine;
    check(pllm_engine_create(&options, &engine));
    run(engine, 999, BLOCK - 1);
    double times[MAX_PROMPTS];
    for (int i = 0; i < prompts; i++) {
        if (from->is_cold) drop_page_cache();
        times[i] = run(engine, (uint64_t)i, TOKENS);
    }
    if (from->writes) finish_writes(engine);
    const pllm_stats stats = stats_of(engine);
    pllm_engine_free(engine);
    const uint64_t blocks = (uint64_t)prompts * (TOKENS / BLOCK);
    if (from->kind != NONE && !from->writes && stats.kv_store_hits < blocks - (uint64_t)prompts) fail("the store has lost blocks");
    qsort(times, (size_t)prompts, sizeof *times, compare);
    const double median = times[prompts / 2];
    printf("| %s | %.0f | %.0f to %.0f | %.1f | %llu |\n", from->name, median, times[0], times[prompts - 1],
           computed > 0 ? computed / median : 1.0, (unsigned long long)stats.kv_store_hits);
    fflush(stdout);
    return median;
}

int main(int argc, char **argv) {
    if (argc != 5) fail("usage: ttft MODEL_DIR STORE_DIRECTORY SOCKET PROMPTS");
    model = argv[1], directory = argv[2], server = argv[3], prompts = atoi(argv[4]);
    if (prompts < 1 || prompts > MAX_PROMPTS) fail("PROMPTS must be 1 to 64");
    const source sources[] = {
        {"computed, files are written", FILES, PLLM_FILES_IO_AUTO, 1, 0},
        {"computed, Valkey is written", VALKEY, 0, 1, 0},
        {"files, page cache, io_uring", FILES, PLLM_FILES_IO_URING, 0, 0},
        {"files, page cache, threads", FILES, PLLM_FILES_IO_THREADS, 0, 0},
        {"files, disk, io_uring", FILES, PLLM_FILES_IO_URING, 0, 1},
        {"files, disk, threads", FILES, PLLM_FILES_IO_THREADS, 0, 1},
        {"Valkey, Unix socket", VALKEY, 0, 0, 0},
    };
    printf("| Source | TTFT, ms (median) | range | times faster | hits |\n| --- | --- | --- | --- | --- |\n");
    const source none = {"computed, no store", NONE, 0, 0, 0};
    const double computed = measure(&none, 0);
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) measure(&sources[i], computed);
}
