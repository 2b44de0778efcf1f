// Hit rate and time to the first token of conversations, with restarts of the engine.
// usage: hits MODEL_DIR STORE_DIRECTORY SOCKET TURNS TURNS_PER_LIFE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

// Conversations that take turns, and requests at a time.
enum { CONVERSATIONS = 6, MAX_RUNNING = 4, MAX_TURNS = 4096 };
// Tokens of a conversation and of a question, as in benches/simulation/workload.rs.
enum { LIMIT = 2048, MAX_QUESTION = 1024 };
// ShareGPT: Figure 11 of the PagedAttention paper, as in benches/simulation/workload.rs, and the number of
// turns as in benches/paper/chat.rs.
static const double QUESTION = 161.31, REPLY = 337.99, DEVIATION = 1.0, TURNS = 3.5;

typedef struct {
    const char *name;
    store_kind store;
    int restarts;
} variant;

static const variant VARIANTS[] = {
    {"no store, no restarts", NO_STORE, 0},
    {"no store", NO_STORE, 1},
    {"files", FILES, 1},
    {"Valkey", VALKEY, 1},
};
enum { COUNT = sizeof VARIANTS / sizeof *VARIANTS };

typedef struct {
    uint32_t tokens[LIMIT];
    uint32_t len;
    int number, turns_left, is_new;
    uint64_t random;  // state
    uint64_t request;
    int is_running, has_token;
    double begin;
} conversation;

// The results of a variant.
typedef struct {
    uint64_t prompt, cached;
    double first[MAX_TURNS], later[MAX_TURNS];  // times to the first token, of first and of later turns
    size_t firsts, laters;
    uint64_t digest;  // of all conversations
} result;

static conversation conversations[CONVERSATIONS];
static int running, started;
static uint64_t vocabulary;

// Splitmix64, in (0, 1).
static double draw(uint64_t *state) {
    *state += 0x9E3779B97F4A7C15u;
    uint64_t z = (*state ^ (*state >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return ((double)((z ^ (z >> 31)) >> 11) + 0.5) / 9007199254740992.0;
}

// A log-normal length with this mean before it is limited.
static uint32_t draw_len(uint64_t *state, double mean, uint32_t max) {
    const double radius = sqrt(-2 * log(draw(state))), normal = radius * cos(2 * 3.14159265358979 * draw(state));
    const double value = round(mean * exp(DEVIATION * normal - DEVIATION * DEVIATION / 2));
    return value < 1 ? 1 : value > max ? max : (uint32_t)value;
}

static void begin_conversation(conversation *one) {
    started++;
    *one = (conversation){.number = started, .turns_left = 1, .is_new = 1, .random = (uint64_t)started << 32};
    while (draw(&one->random) > 1 / TURNS) one->turns_left++;
}

// Adds a question to a conversation, or to a new one if it has ended or would be too long.
static void begin_turn(pllm_engine *engine, conversation *one) {
    if (one->turns_left == 0) begin_conversation(one);
    uint32_t question = draw_len(&one->random, QUESTION, MAX_QUESTION);
    if (one->len + question >= LIMIT) {
        begin_conversation(one);
        question = draw_len(&one->random, QUESTION, MAX_QUESTION);
    }
    uint32_t reply = draw_len(&one->random, REPLY, LIMIT);
    if (reply > LIMIT - one->len - question) reply = LIMIT - one->len - question;
    make_prompt(one->random, vocabulary, one->tokens + one->len, question);
    one->len += question;
    one->turns_left--;
    one->is_running = 1, one->has_token = 0;
    running++;
    one->begin = now_ms();
    one->request = add_request(engine, one->tokens, one->len, reply);
}

static void take(conversation *one, const pllm_output *output, result *out) {
    if (output->error) fail("a request has failed");
    if (output->tokens_len > 0 && !one->has_token) {
        const double time = now_ms() - one->begin;
        if (one->is_new)
            out->first[out->firsts++] = time;
        else
            out->later[out->laters++] = time;
        one->has_token = 1;
    }
    for (uint64_t i = 0; i < output->tokens_len; i++) {
        // The sum does not depend on the order in which conversations get their tokens.
        const uint64_t at = ((uint64_t)one->number << 44 | (uint64_t)one->len << 32 | output->tokens[i]) * 0x9E3779B97F4A7C15u;
        out->digest += (at ^ (at >> 29)) * 0xBF58476D1CE4E5B9u;
        one->tokens[one->len++] = output->tokens[i];
    }
    if (output->finish_reason == PLLM_FINISH_NONE) return;
    out->prompt += output->prompt_tokens;
    out->cached += output->cached_tokens;
    one->is_running = 0, one->is_new = 0;
    running--;
}

static void step(pllm_engine *engine, result *out) {
    pllm_step done = {.struct_size = sizeof done};
    pllm_outputs *outputs;
    check(pllm_engine_step(engine, &done));
    check(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *output = pllm_outputs_get(outputs, i);
        for (int k = 0; k < CONVERSATIONS; k++)
            if (conversations[k].is_running && conversations[k].request == output->request) take(&conversations[k], output, out);
    }
    pllm_outputs_free(outputs);
}

static void run(const variant *how, int turns, int turns_per_life, result *out) {
    const settings with = {.store = how->store};
    memset(conversations, 0, sizeof conversations);
    running = started = 0;
    pllm_engine *engine = create_engine(&with);
    vocabulary = vocabulary_of(engine);
    for (int turn = 0; turn < turns; turn++) {
        if (how->restarts && turn > 0 && turn % turns_per_life == 0) {
            while (running > 0) step(engine, out);
            pllm_engine_free(engine);
            engine = create_engine(&with);
        }
        // The order of the turns does not depend on times.
        conversation *one = &conversations[turn % CONVERSATIONS];
        while (one->is_running || running >= MAX_RUNNING) step(engine, out);
        begin_turn(engine, one);
    }
    while (running > 0) step(engine, out);
    pllm_engine_free(engine);
}

int main(int argc, char **argv) {
    if (argc != 6) fail("usage: hits MODEL_DIR STORE_DIRECTORY SOCKET TURNS TURNS_PER_LIFE");
    place = (places){argv[1], argv[2], argv[3]};
    const int turns = atoi(argv[4]), turns_per_life = atoi(argv[5]);
    if (turns < 1 || turns > MAX_TURNS || turns_per_life < 1) fail("TURNS must be 1 to 4096, TURNS_PER_LIFE at least 1");
    static result results[COUNT];
    printf("| Store | prompt tokens | cached | TTFT of first turns, ms (median) | TTFT of later turns, ms (median) |\n");
    printf("| --- | --- | --- | --- | --- |\n");
    for (int k = 0; k < COUNT; k++) {
        result *got = &results[k];
        run(&VARIANTS[k], turns, turns_per_life, got);
        printf("| %s | %llu | %.1f %% | %.1f | %.1f |\n", VARIANTS[k].name, (unsigned long long)got->prompt,
               100.0 * (double)got->cached / (double)got->prompt, quantile(got->first, got->firsts, 0.5),
               quantile(got->later, got->laters, 0.5));
        fflush(stdout);
        if (got->digest != results[0].digest || got->prompt != results[0].prompt) fail("the replies depend on the store");
    }
    printf("\n%d turns of %d conversations, a restart after each %d turns.\n", turns, started, turns_per_life);
    for (int k = 2; k < COUNT; k++)
        if (results[k].cached <= results[1].cached) fail("a store has no hits after a restart");
}
