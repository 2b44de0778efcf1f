#define _GNU_SOURCE
#include "common.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pagedllm_files.h"
#include "pagedllm_nixl.h"
#include "pagedllm_valkey.h"

// Longer than any operation of the benchmarks.
enum { TIMEOUT_MS = 60000 };

places place;

void fail(const char *text) {
    fprintf(stderr, "%s\n", text);
    exit(1);
}

void check(pllm_error *error) {
    if (error) fail(pllm_error_message(error));
}

double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

int is_available(store_kind kind) { return kind != NIXL || getenv("NIXL_LIBRARY") != NULL; }

static void open_store(store_kind kind, uint32_t files_io, pllm_kv_store *store) {
    char error[500];
    int32_t code;
    pllm_kv_store_init(store, sizeof *store);
    if (kind == FILES) {
        pllm_files_store_options options;
        pllm_files_store_options_init(&options, sizeof options);
        options.directory = place.directory;
        options.io = files_io;
        code = pllm_files_store_open(&options, store, error, sizeof error);
    } else if (kind == VALKEY) {
        pllm_valkey_store_options options;
        pllm_valkey_store_options_init(&options, sizeof options);
        options.host = place.socket;
        options.timeout_ms = TIMEOUT_MS;
        code = pllm_valkey_store_open(&options, store, error, sizeof error);
    } else {
        pllm_nixl_store_options options;
        pllm_nixl_store_options_init(&options, sizeof options);
        options.library = getenv("NIXL_LIBRARY");
        options.host = place.socket;
        code = pllm_nixl_store_open(&options, store, error, sizeof error);
    }
    if (code != 0) fail(error);
}

pllm_engine *create_engine(const settings *with) {
    pllm_kv_store store;
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = place.model;
    options.flags |= PLLM_ENGINE_SKIP_TOKENIZER;
    options.threads = with->threads;
    options.kv_store_timeout_ms = TIMEOUT_MS;
    if (with->prefill_budget > 0) {
        options.batching = PLLM_BATCHING_DECODE_FIRST;
        options.prefill_budget = with->prefill_budget;
    }
    if (with->store != NO_STORE) {
        open_store(with->store, with->files_io, &store);
        options.kv_store = &store;
    }
    pllm_engine *engine;
    check(pllm_engine_create(&options, &engine));
    return engine;
}

uint64_t vocabulary_of(const pllm_engine *engine) {
    pllm_model_info info = {.struct_size = sizeof info};
    check(pllm_engine_get_model_info(engine, &info));
    return info.vocab_size;
}

pllm_stats stats_of(const pllm_engine *engine) {
    pllm_stats stats = {.struct_size = sizeof stats};
    check(pllm_engine_get_stats(engine, &stats));
    return stats;
}

void make_prompt(uint64_t seed, uint64_t vocabulary, uint32_t *tokens, uint32_t len) {
    for (uint32_t i = 0; i < len; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = 3 + (uint32_t)((seed >> 33) % (vocabulary - 3));
    }
}

uint64_t add_request(pllm_engine *engine, const uint32_t *tokens, uint32_t len, uint32_t max_tokens) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = max_tokens;
    sampling.flags |= PLLM_SAMPLING_IGNORE_EOS;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = tokens;
    request.prompt_token_ids_len = len;
    request.sampling = &sampling;
    uint64_t id;
    check(pllm_engine_add_request(engine, &request, &id));
    return id;
}

double run_prompt(pllm_engine *engine, uint64_t seed, uint32_t len) {
    static uint32_t tokens[MAX_LEN];
    make_prompt(seed, vocabulary_of(engine), tokens, len);
    uint64_t generated = 0;
    const double begin = now_ms();
    add_request(engine, tokens, len, 1);
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

void finish_writes(pllm_engine *engine, uint64_t blocks) {
    for (const double end = now_ms() + TIMEOUT_MS; now_ms() < end; usleep(1000)) {
        pllm_step step = {.struct_size = sizeof step};
        check(pllm_engine_step(engine, &step));
        const pllm_stats stats = stats_of(engine);
        if (stats.kv_store_stored + stats.kv_store_hits >= blocks) return;
        if (stats.kv_store_dropped + stats.kv_store_failures > 0) break;
    }
    fail("not all blocks were written");
}

static int compare(const void *a, const void *b) {
    const double first = *(const double *)a, second = *(const double *)b;
    return (first > second) - (first < second);
}

double quantile(double *values, size_t len, double at) {
    if (len == 0) return 0;
    qsort(values, len, sizeof *values, compare);
    return values[(size_t)(at * (double)(len - 1) + 0.5)];
}

void pin(int first, int last) {
    static cpu_set_t permitted;  // before the first call
    if (CPU_COUNT(&permitted) == 0 && sched_getaffinity(0, sizeof permitted, &permitted) != 0)
        fail("the system does not return the CPUs of the process");
    cpu_set_t selected;
    CPU_ZERO(&selected);
    int index = 0, any = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &permitted)) continue;
        any = cpu;
        if (index >= first && index <= last) CPU_SET(cpu, &selected);
        index++;
    }
    if (CPU_COUNT(&selected) == 0) CPU_SET(any, &selected);
    if (sched_setaffinity(0, sizeof selected, &selected) != 0) fail("the system does not pin the process");
}

static void exec_owner(store_kind kind, int threads, int cpu) {
    // owner.c is built beside the program.
    char program[4096], kind_text[20], threads_text[20];
    const ssize_t len = readlink("/proc/self/exe", program, sizeof program - 20);
    if (len < 0) _exit(127);
    program[len] = 0;
    size_t end = (size_t)len;
    while (end > 0 && program[end - 1] != '/') end--;
    snprintf(program + end, sizeof program - end, "owner");
    snprintf(kind_text, sizeof kind_text, "%d", (int)kind);
    snprintf(threads_text, sizeof threads_text, "%d", threads);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (cpu >= 0) pin(cpu, cpu);
    execl(program, program, place.model, place.directory, place.socket, kind_text, threads_text, (char *)NULL);
    _exit(127);
}

owner start_owner(store_kind kind, int threads, int cpu) {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) fail("the system has no pipe");
    fflush(NULL);
    const pid_t pid = fork();
    if (pid < 0) fail("the system starts no process");
    if (pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        close(to[1]);
        close(from[0]);
        exec_owner(kind, threads, cpu);
    }
    close(to[0]);
    close(from[1]);
    const owner started = {to[1], from[0], pid};
    receive_time(&started);
    return started;
}

void send_prompt(const owner *to, uint64_t seed, uint32_t len) {
    const uint64_t message[2] = {seed, len};
    if (write(to->to, message, sizeof message) != sizeof message) fail("the owner of the blocks has ended");
}

double receive_time(const owner *from) {
    double time;
    if (read(from->from, &time, sizeof time) != sizeof time) fail("the owner of the blocks has ended");
    return time;
}

void end_owner(owner *running) {
    int status = 1;
    close(running->to);
    waitpid(running->pid, &status, 0);
    close(running->from);
    if (status != 0) fail("the owner of the blocks has failed");
}
