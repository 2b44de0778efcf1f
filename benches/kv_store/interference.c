// Time between the tokens of running requests while an engine gets long prompts: computed by itself, or
// by another process and read from a store.
// usage: interference MODEL_DIR STORE_DIRECTORY SOCKET LENGTH DECODES SECONDS SECONDS_BETWEEN REPETITIONS
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "common.h"

enum { MAX_DECODES = 16, MAX_PROMPTS = 64, MAX_REPETITIONS = 16, MAX_GAPS = 1 << 20 };
enum { CONTEXT = 128, WARM_TOKENS = 8, ANSWER = 32 };

typedef struct {
    const char *name;
    enum { NONE, SAME_ENGINE, OTHER_PROCESS } prompts;
    settings with;
} division;

// An engine with one thread has CPU 0, and the process that computes the prompts has CPU 1.
static const division DIVISIONS[] = {
    {"no prompts", NONE, {.threads = 1}},
    {"one engine, one thread", SAME_ENGINE, {.threads = 1}},
    {"one engine, one thread, decode-first, 64 prompt tokens per step", SAME_ENGINE, {.threads = 1, .prefill_budget = 64}},
    {"one engine, two threads", SAME_ENGINE, {.threads = 2}},
    {"two processes of one thread, Valkey", OTHER_PROCESS, {.store = VALKEY, .threads = 1}},
    {"two processes of one thread, NIXL", OTHER_PROCESS, {.store = NIXL, .threads = 1}},
};
enum { COUNT = sizeof DIVISIONS / sizeof *DIVISIONS };

typedef struct {
    double median[MAX_REPETITIONS], p99[MAX_REPETITIONS], longest[MAX_REPETITIONS], speed[MAX_REPETITIONS];
    double first_token[MAX_REPETITIONS * MAX_PROMPTS];
    int first_tokens;
} result;

// A run of one division.
typedef struct {
    pllm_engine *engine;
    uint64_t vocabulary;
    uint64_t decodes[MAX_DECODES];
    double last[MAX_DECODES];  // time of the last token, or 0
    uint64_t tokens[MAX_DECODES];
    // Prompts that have arrived, were added to the engine, and have a token.
    int arrived, added, answered;
    uint64_t prompts[MAX_PROMPTS];
    double arrival[MAX_PROMPTS];
} run_state;

static uint32_t len;
static int decodes, repetitions, next_seed;
static double seconds, between;
static double gaps[MAX_GAPS];
static size_t gap_count;
static int is_recording;

static void add_prompt(run_state *run, int number, uint64_t seed, uint32_t prompt_len, uint32_t max_tokens, uint64_t *ids) {
    static uint32_t tokens[MAX_LEN];
    make_prompt(seed, run->vocabulary, tokens, prompt_len);
    ids[number] = add_request(run->engine, tokens, prompt_len, max_tokens);
}

static void add_decode(run_state *run, int number) {
    add_prompt(run, number, (uint64_t)(1000000 + number), CONTEXT, MAX_LEN - CONTEXT, run->decodes);
}

static void take(run_state *run, const pllm_output *output, double now, result *out) {
    if (output->error) fail("a request has failed");
    if (output->tokens_len == 0) return;
    for (int i = 0; i < decodes; i++) {
        if (output->request != run->decodes[i]) continue;
        if (is_recording && run->last[i] > 0 && gap_count < MAX_GAPS) gaps[gap_count++] = now - run->last[i];
        run->last[i] = now;
        run->tokens[i] += output->tokens_len;
        if (output->finish_reason == PLLM_FINISH_NONE) continue;
        // A small model is at the end of its positions: another request takes the place of this one.
        add_decode(run, i);
        run->last[i] = 0;
    }
    for (int i = 0; i < run->added; i++) {
        if (output->request != run->prompts[i] || output->generated_tokens != output->tokens_len) continue;
        out->first_token[out->first_tokens++] = now - run->arrival[i];
        run->answered++;
    }
}

static void step(run_state *run, result *out) {
    pllm_step done = {.struct_size = sizeof done};
    pllm_outputs *outputs;
    check(pllm_engine_step(run->engine, &done));
    check(pllm_queue_poll(pllm_engine_queue(run->engine), 0, &outputs));
    const double now = now_ms();
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) take(run, pllm_outputs_get(outputs, i), now, out);
    pllm_outputs_free(outputs);
}

// Adds the prompts that have arrived, and those that the other process has computed.
static void add_arrivals(run_state *run, const division *how, const owner *other, double begin) {
    static uint64_t seeds[MAX_PROMPTS];
    const double next = (0.1 + run->arrived) * between;
    if (how->prompts != NONE && now_ms() >= begin + next * 1e3 && next + 0.9 * between <= seconds + 1e-6 && run->arrived < MAX_PROMPTS) {
        const int number = run->arrived++;
        run->arrival[number] = begin + next * 1e3;
        seeds[number] = (uint64_t)next_seed++;
        if (how->prompts == OTHER_PROCESS)
            send_prompt(other, seeds[number], len);
        else
            add_prompt(run, run->added++, seeds[number], len, ANSWER, run->prompts);
    }
    struct pollfd ready = {other->from, POLLIN, 0};  // -1 is ignored
    if (poll(&ready, 1, 0) > 0) {
        receive_time(other);
        add_prompt(run, run->added, seeds[run->added], len, ANSWER, run->prompts);
        run->added++;
    }
}

// Steps for the time of the measurement, while prompts arrive. Returns this time in milliseconds. Then steps
// until all prompts have a token.
static double measure(run_state *run, const division *how, const owner *other, result *out) {
    const double begin = now_ms();
    gap_count = 0;
    is_recording = 1;
    do {
        add_arrivals(run, how, other, begin);
        step(run, out);
        // On a busy machine, the first step may take the whole time.
    } while (now_ms() < begin + seconds * 1e3 || (how->prompts != NONE && run->arrived == 0));
    is_recording = 0;
    const double time = now_ms() - begin;
    while (run->answered < run->arrived) {
        add_arrivals(run, how, other, begin);
        step(run, out);
    }
    return time;
}

static void run_division(const division *how, int repetition, result *out) {
    owner other = {-1, -1, 0};
    if (how->prompts == OTHER_PROCESS) other = start_owner(how->with.store, 1, 1);
    pin(0, (int)how->with.threads - 1);
    static run_state run;
    run = (run_state){.engine = create_engine(&how->with)};
    run.vocabulary = vocabulary_of(run.engine);
    run_prompt(run.engine, FIRST_SEED, FIRST_LEN);
    for (int i = 0; i < decodes; i++) add_decode(&run, i);
    while (run.tokens[decodes - 1] < WARM_TOKENS) step(&run, out);
    const double time = measure(&run, how, &other, out);
    out->speed[repetition] = (double)gap_count / time * 1e3;
    out->median[repetition] = quantile(gaps, gap_count, 0.5);
    out->p99[repetition] = quantile(gaps, gap_count, 0.99);
    out->longest[repetition] = quantile(gaps, gap_count, 1);
    const uint64_t hits = stats_of(run.engine).kv_store_hits;
    pllm_engine_free(run.engine);
    if (how->prompts == OTHER_PROCESS) {
        if (hits < (uint64_t)run.answered * (len / BLOCK - 1)) fail("the store has lost blocks");
        end_owner(&other);
    }
    if (how->prompts != NONE && run.answered == 0) fail("no prompt has arrived; use more SECONDS");
}

static void print_row(const division *how, result *got) {
    const size_t count = (size_t)repetitions;
    const double median = quantile(got->median, count, 0.5), p99 = quantile(got->p99, count, 0.5);
    printf("| %s | %.1f | %.1f | %.1f to %.1f | %.0f | %.0f |", how->name, median, p99, got->p99[0], got->p99[count - 1],
           quantile(got->longest, count, 1), quantile(got->speed, count, 0.5));
    if (got->first_tokens > 0)
        printf(" %.0f |\n", quantile(got->first_token, (size_t)got->first_tokens, 0.5));
    else
        printf(" |\n");
}

int main(int argc, char **argv) {
    if (argc != 9) fail("usage: interference MODEL_DIR STORE_DIRECTORY SOCKET LENGTH DECODES SECONDS SECONDS_BETWEEN REPETITIONS");
    place = (places){argv[1], argv[2], argv[3]};
    len = (uint32_t)atoi(argv[4]), decodes = atoi(argv[5]), seconds = atof(argv[6]), between = atof(argv[7]), repetitions = atoi(argv[8]);
    if (len < 2 * BLOCK || len >= MAX_LEN - ANSWER) fail("LENGTH must be 32 to 4063");
    if (decodes < 1 || decodes > MAX_DECODES) fail("DECODES must be 1 to 16");
    if (repetitions < 1 || repetitions > MAX_REPETITIONS) fail("REPETITIONS must be 1 to 16");
    static result results[COUNT];
    // The divisions take turns, so that all of them see the same machine.
    for (int i = 0; i < repetitions; i++)
        for (int k = 0; k < COUNT; k++)
            if (is_available(DIVISIONS[k].with.store)) run_division(&DIVISIONS[k], i, &results[k]);
    printf("| Division | ms between tokens, median | p99 | range of p99 | longest | decode tokens/s | TTFT of the prompts, ms |\n");
    printf("| --- | --- | --- | --- | --- | --- | --- |\n");
    for (int k = 0; k < COUNT; k++) {
        if (is_available(DIVISIONS[k].with.store))
            print_row(&DIVISIONS[k], &results[k]);
        else
            printf("| %s | not measured: NIXL is missing | | | | | |\n", DIVISIONS[k].name);
    }
    printf("\n%d requests decode for %.1f s; prompts of %u tokens arrive %.1f s apart; %d repetitions.\n", decodes, seconds, len, between,
           repetitions);
}
