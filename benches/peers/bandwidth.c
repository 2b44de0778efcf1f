// Prints the gigabytes per second that all cores together read from memory: the best of three passes over 1 GiB with one stream per thread
// and three with two. Machines differ in which is faster (36 and 23 GB/s on one). cc -O3 -pthread bandwidth.c -o bandwidth
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, PASSES = 3 };
typedef uint64_t line __attribute__((vector_size(64)));

static const size_t BYTES = (size_t)1 << 30;
static char *memory;
static long threads;
static size_t streams;
static pthread_barrier_t start;
static double seconds[MAX_THREADS];
static volatile uint64_t found[MAX_THREADS]; // prevents the compiler from removing the reads

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Reads every byte.
#ifdef __x86_64__
__attribute__((target_clones("avx512f", "default")))
#endif
static uint64_t read_lines(const line *from, size_t lines, size_t streams) {
    line sums[4] = {{0}};
    const size_t each = lines / streams;
    for (size_t i = 0; i + 4 <= each; i += 4)
        for (size_t stream = 0; stream < streams; stream++)
            for (int j = 0; j < 4; j++) sums[j] ^= from[stream * each + i + j];
    const line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return all[0];
}

static void *read_part(void *id) {
    const size_t lines = BYTES / sizeof(line) / threads;
    const line *from = (const line *)memory + lines * (size_t)(intptr_t)id;
    pthread_barrier_wait(&start);
    const double since = now();
    found[(intptr_t)id] = read_lines(from, lines, streams);
    seconds[(intptr_t)id] = now() - since;
    return NULL;
}

static double run_all_threads(void) {
    pthread_t handles[MAX_THREADS];
    double slowest = 0;
    for (intptr_t i = 0; i < threads; i++)
        if (pthread_create(&handles[i], NULL, read_part, (void *)i)) exit(1);
    for (long i = 0; i < threads; i++) {
        pthread_join(handles[i], NULL);
        if (seconds[i] > slowest) slowest = seconds[i];
    }
    return slowest;
}

int main(void) {
    threads = sysconf(_SC_NPROCESSORS_ONLN);
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || pthread_barrier_init(&start, NULL, threads)) return perror("1 GiB to read"), 1;
    madvise(memory, BYTES, MADV_HUGEPAGE);
    memset(memory, 1, BYTES);
    double shortest = 1e9;
    for (int pass = 0; pass < 2 * PASSES; pass++) {
        streams = 1 + pass % 2;
        const double took = run_all_threads();
        if (took < shortest) shortest = took;
    }
    printf("%.1f\n", BYTES / shortest / 1e9);
}
