// Gigabytes a second that all cores together read from memory right now: the best of three passes over 1 GiB, by the same loads as
// benches/cpu/probes.rs, whose numbers stand beside ours. cc -O3 -pthread bandwidth.c -o bandwidth
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 256, PASSES = 3 };
typedef uint64_t line __attribute__((vector_size(64)));

static const size_t BYTES = (size_t)1 << 30;
static char *memory;
static long threads;
static pthread_barrier_t start;
static double seconds[MOST_THREADS];
static volatile uint64_t found[MOST_THREADS]; // so that no read is left out

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Touches every byte; two streams keep more of the memory's channels busy than one.
#ifdef __x86_64__
__attribute__((target_clones("avx512f", "default")))
#endif
static uint64_t read_lines(const line *low, const line *high, size_t lines) {
    line sums[4] = {{0}};
    for (size_t i = 0; i + 4 <= lines; i += 4) {
        for (int j = 0; j < 4; j++) sums[j] ^= low[i + j];
        for (int j = 0; j < 4; j++) sums[j] ^= high[i + j];
    }
    const line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return all[0];
}

static void *read_part(void *id) {
    const size_t lines = BYTES / sizeof(line) / threads / 2;
    const line *low = (const line *)memory + 2 * lines * (size_t)(intptr_t)id;
    pthread_barrier_wait(&start);
    const double since = now();
    found[(intptr_t)id] = read_lines(low, low + lines, lines);
    seconds[(intptr_t)id] = now() - since;
    return NULL;
}

static double slowest_of_all_threads(void) {
    pthread_t handles[MOST_THREADS];
    double most = 0;
    for (intptr_t i = 0; i < threads; i++)
        if (pthread_create(&handles[i], NULL, read_part, (void *)i)) exit(1);
    for (long i = 0; i < threads; i++) {
        pthread_join(handles[i], NULL);
        if (seconds[i] > most) most = seconds[i];
    }
    return most;
}

int main(void) {
    threads = sysconf(_SC_NPROCESSORS_ONLN);
    if (threads < 1) threads = 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || pthread_barrier_init(&start, NULL, threads)) return perror("1 GiB to read"), 1;
    madvise(memory, BYTES, MADV_HUGEPAGE);
    memset(memory, 1, BYTES);
    double least = 1e9;
    for (int pass = 0; pass < PASSES; pass++) {
        const double took = slowest_of_all_threads();
        if (took < least) least = took;
    }
    printf("%.1f\n", BYTES / least / 1e9);
}
