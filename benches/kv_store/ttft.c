// Time to the first token of a prompt: computed, and read from the stores of connectors/.
// usage: ttft MODEL_DIR STORE_DIRECTORY SOCKET LENGTH PROMPTS REPETITIONS
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common.h"
#include "pagedllm_files.h"

enum { MAX_REPETITIONS = 64 };

typedef struct {
    const char *name;
    store_kind kind;
    uint32_t io;
    int is_cold;
} source;

static const source SOURCES[] = {
    {"computed", NO_STORE, 0, 0},
    {"files, disk, io_uring", FILES, PLLM_FILES_IO_URING, 1},
    {"files, disk, threads", FILES, PLLM_FILES_IO_THREADS, 1},
    {"files, page cache, io_uring", FILES, PLLM_FILES_IO_URING, 0},
    {"files, page cache, threads", FILES, PLLM_FILES_IO_THREADS, 0},
    {"Valkey, Unix socket", VALKEY, 0, 0},
    {"NIXL, UCX over TCP, another process", NIXL, 0, 0},
};
enum { COUNT = sizeof SOURCES / sizeof *SOURCES };

static uint32_t len;
static int prompts, repetitions;
static double firsts[COUNT][MAX_REPETITIONS], times[COUNT][MAX_REPETITIONS], in_pool[MAX_REPETITIONS];
static double bytes_read;

// Removes the values from the page cache.
static void drop_page_cache(void) {
    char path[4096];
    for (const char *digit = "0123456789abcdef"; *digit; digit++) {
        snprintf(path, sizeof path, "%s/%c", place.directory, *digit);
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

// `first` has the times of the first requests, or is NULL.
static void print_row(const char *name, double *values, int count, double computed, double *first) {
    const double median = quantile(values, (size_t)count, 0.5);
    printf("| %s | %.0f | %.0f to %.0f | %.1f |", name, median, values[0], values[count - 1], computed / median);
    if (first)
        printf(" %.0f |\n", quantile(first, (size_t)count, 0.5));
    else
        printf(" |\n");
    fflush(stdout);
}

// Computes all prompts with an engine that stores their blocks. Returns the times to the first token.
static void fill(store_kind kind, double *computed) {
    const settings with = {.store = kind};
    pllm_engine *engine = create_engine(&with);
    run_prompt(engine, FIRST_SEED, FIRST_LEN);
    for (int i = 0; i < prompts; i++) {
        computed[i] = run_prompt(engine, (uint64_t)i, len);
        finish_writes(engine, FIRST_LEN / BLOCK + (uint64_t)(i + 1) * (len / BLOCK));
    }
    pllm_engine_free(engine);
}

static void fill_owner(const owner *to, double *computed) {
    for (int i = 0; i < prompts; i++) {
        send_prompt(to, (uint64_t)i, len);
        computed[i] = receive_time(to);
    }
}

// Measures a source with a new engine, whose prefix cache is empty.
static void measure(const source *from, int repetition, double *first, double *time) {
    const uint64_t prompt = (uint64_t)(repetition % prompts);
    const settings with = {.store = from->kind, .files_io = from->io};
    pllm_engine *engine = create_engine(&with);
    if (from->is_cold) drop_page_cache();
    *first = run_prompt(engine, FIRST_SEED, FIRST_LEN);
    const pllm_stats before = stats_of(engine);
    if (from->is_cold) drop_page_cache();
    *time = run_prompt(engine, prompt, len);
    const pllm_stats stats = stats_of(engine);
    if (from->kind == NO_STORE) {
        in_pool[repetition] = run_prompt(engine, prompt, len);
    } else {
        // The last block of a prompt is computed, if it is full.
        if (before.kv_store_hits == 0 || stats.kv_store_hits - before.kv_store_hits < len / BLOCK - 1) fail("the store has lost blocks");
        bytes_read = (double)(stats.kv_store_bytes_read - before.kv_store_bytes_read);
    }
    pllm_engine_free(engine);
}

static void print_table(double *files, double *valkey, double *nixl) {
    printf("| Source | TTFT, ms (median) | range | times faster | first request of an engine, ms |\n| --- | --- | --- | --- | --- |\n");
    const double computed = quantile(times[0], (size_t)repetitions, 0.5);
    print_row("computed", times[0], repetitions, computed, firsts[0]);
    print_row("computed, files are written", files, prompts, computed, NULL);
    print_row("computed, Valkey is written", valkey, prompts, computed, NULL);
    if (is_available(NIXL)) print_row("computed, memory of NIXL is written", nixl, prompts, computed, NULL);
    print_row("prefix cache of the same engine", in_pool, repetitions, computed, NULL);
    for (int k = 1; k < COUNT; k++) {
        if (is_available(SOURCES[k].kind))
            print_row(SOURCES[k].name, times[k], repetitions, computed, firsts[k]);
        else
            printf("| %s | not measured: NIXL is missing | | | |\n", SOURCES[k].name);
    }
    printf("\n%u tokens, %d prompts, %d repetitions; the stores return %.1f MB. The first request has %d tokens.\n", len, prompts, repetitions,
           bytes_read / 1e6, FIRST_LEN);
}

int main(int argc, char **argv) {
    if (argc != 7) fail("usage: ttft MODEL_DIR STORE_DIRECTORY SOCKET LENGTH PROMPTS REPETITIONS");
    place = (places){argv[1], argv[2], argv[3]};
    len = (uint32_t)atoi(argv[4]), prompts = atoi(argv[5]), repetitions = atoi(argv[6]);
    if (len < 2 * BLOCK || len >= MAX_LEN) fail("LENGTH must be 32 to 4095");
    if (repetitions < 1 || repetitions > MAX_REPETITIONS) fail("REPETITIONS must be 1 to 64");
    if (prompts < 1 || prompts > repetitions) fail("PROMPTS must be 1 to REPETITIONS");
    static double files[MAX_REPETITIONS], valkey[MAX_REPETITIONS], nixl[MAX_REPETITIONS];
    owner holder;
    fill(FILES, files);
    fill(VALKEY, valkey);
    if (is_available(NIXL)) {
        holder = start_owner(NIXL, 0, -1);
        fill_owner(&holder, nixl);
    }
    // The sources take turns, so that all of them see the same machine.
    for (int i = 0; i < repetitions; i++)
        for (int k = 0; k < COUNT; k++)
            if (is_available(SOURCES[k].kind)) measure(&SOURCES[k], i, &firsts[k][i], &times[k][i]);
    if (is_available(NIXL)) end_owner(&holder);
    print_table(files, valkey, nixl);
}
