// Shared by the tests of the C API: checks, engines, requests, sequences and their outputs.
#ifndef ABI_TEST_H
#define ABI_TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pagedllm.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

// The bundled model, which has a tokenizer, and a tiny LLaMA without one.
extern const char *model_dir, *golden_dir;

// ---- tests ----

// A test uses no shared engine, the engine of the bundled model, or the engine of the golden model.
typedef struct {
    const char *name;
    void (*alone)(void);
    void (*with_bundled)(const pllm_engine *engine);
    void (*with_golden)(const pllm_engine *engine);
} test;
#define ALONE(function) {.name = #function, .alone = function}
#define WITH_BUNDLED(function) {.name = #function, .with_bundled = function}
#define WITH_GOLDEN(function) {.name = #function, .with_golden = function}

extern const test lengths_tests[], library_tests[], process_tests[], struct_sizes_tests[],
    null_arguments_tests[], options_tests[], sampling_tests[], requests_tests[], text_tests[],
    sequences_tests[], export_import_tests[], damaged_states_tests[], pins_tests[],
    admission_tests[], budgets_tests[], swap_tests[], files_tests[], threads_tests[],
    kv_store_tests[], kv_events_tests[], communicator_tests[], workers_tests[];

// ---- checks ----

// Counts a check, and prints it if it fails.
int check(int ok, const char *condition, const char *file, int line);
#define CHECK(condition) check(!!(condition), #condition, __FILE__, __LINE__)

// Checks that a call succeeds, and prints its error otherwise.
int ok(pllm_error *error, const char *call, const char *file, int line);
#define OK(call) ok(call, #call, __FILE__, __LINE__)

// Checks that a call fails with this code and a message.
int fails(int32_t code, pllm_error *error, const char *call, const char *file, int line);
#define FAILS(code, call) fails(code, call, #call, __FILE__, __LINE__)
#define INVALID(call) FAILS(PLLM_E_INVALID_ARGUMENT, call)
#define UNSUPPORTED(call) FAILS(PLLM_E_UNSUPPORTED, call)
#define CAPACITY(call) FAILS(PLLM_E_CAPACITY, call)

// Checks that a call fails with PLLM_E_CAPACITY and a message that contains `text`.
int fails_with_capacity(pllm_error *error, const char *text, const char *call, const char *file,
                        int line);
#define CAPACITY_SAYS(call, text) fails_with_capacity(call, text, #call, __FILE__, __LINE__)

// Value of output memory before a call that must not write it.
enum { POISON = 0xA5 };
static void *const UNTOUCHED = (void *)(uintptr_t)0xA5A5A5A5A5A5A5A5u;

// True if the bytes in [from, to) all have this value.
int all_bytes_are(const void *bytes, uint64_t from, uint64_t to, int value);

// A copy that ends where an unreadable page begins, so that a read past its end crashes. It is
// never unmapped.
const void *before_guard_page(const void *bytes, size_t len);

// Frees an error and returns its code.
int code_of(pllm_error *error);

// ---- time ----

void sleep_ms(long ms);

double now(void);

// ---- engines and requests ----

static const uint32_t PROMPT[] = {5, 6, 7, 8};

static const char *const FRANCE =
    "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n";
static const char *const PARIS = "The capital of France is Paris.";
static const char *const STORY = "<s><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n";

// Options of a small engine. The golden model is loaded without its tokenizer.
pllm_engine_options options_for(const char *path);

pllm_engine *open_engine(const char *path);

pllm_plan plan_of(const pllm_engine_options *options);

pllm_stats stats_of(const pllm_engine *engine);

// No sequence holds a block. Blocks of the prefix cache belong to no sequence.
int is_idle(const pllm_engine *engine);

pllm_step step_of(const pllm_engine *engine);

void step_to_the_end(const pllm_engine *engine);

pllm_sampling greedy(void);

// 100 greedy tokens.
pllm_sampling long_sampling(void);

// 30 sampled tokens with a fixed seed and log probabilities.
pllm_sampling seeded_sampling(void);

pllm_request text_request(const char *prompt, const pllm_sampling *sampling);

pllm_request token_request(const pllm_sampling *sampling);

// Adds a request and aborts it if it was accepted.
pllm_error *add_and_abort(const pllm_engine *engine, const pllm_request *request);

// ---- outputs ----

// All outputs of one request.
typedef struct {
    uint32_t tokens[2048], text_ends[2048];  // per token: text length after it
    float logprobs[2048];
    char text[16384];
    uint64_t tokens_len, text_len, logprobs_len, outputs, prompt_tokens, generated_tokens,
        user_data;
    uint32_t finish_reason;
    int32_t error_code;
} generation;

// Appends an output to the results of its request, and checks its fields.
void append_output(generation *a, const pllm_output *o);

// Collects the outputs of one request from a queue and drops the others.
void collect_outputs_from(const pllm_queue *queue, uint64_t id, generation *a);

void collect_outputs(const pllm_engine *engine, uint64_t id, generation *a);

// Polls the queue of the engine and drops its outputs.
void discard_outputs(const pllm_engine *engine);

// Adds a request and steps until it has finished.
generation *run_request(const pllm_engine *engine, const pllm_request *request);

// True if tokens, text and finish reason are equal.
int same_generation(const generation *a, const generation *b);

int text_is(const generation *a, const char *text, uint64_t len);

// The streamed text equals the text of all tokens. The token that ends the sequence has no text.
int text_matches_tokens(const pllm_engine *engine, const generation *a);

pllm_queue *new_queue(const pllm_engine *engine, uint64_t capacity);

// Polls a queue and returns the number of outputs.
uint64_t outputs_in(const pllm_queue *queue);

// Polls a queue that must contain exactly one output.
pllm_outputs *only_output(const pllm_queue *queue, const pllm_output **o);

// ---- copies of a request ----

// Copies of the same request that run at once.
enum { COPIES = 3 };
typedef struct {
    uint64_t ids[COPIES], preemptions;
    generation generations[COPIES];
} request_copies;

void add_copies(const pllm_engine *engine, const pllm_request *request, request_copies *c);

void check_copies(const pllm_engine *engine, request_copies *c, const generation *expected);

// ---- sequences and pins ----

static const uint64_t UNKNOWN_IDS[] = {0, 1ull << 40, UINT64_MAX};

// Generates this number of tokens greedily and keeps the sequence.
uint64_t keep_sequence(const pllm_engine *engine, uint32_t tokens);

// Frees a sequence and lets a step apply it.
void free_sequence(const pllm_engine *engine, uint64_t sequence);

pllm_sequence_info info_of(const pllm_engine *engine, uint64_t sequence);

// Options that continue a sequence with its own parameters, and these flags.
pllm_resume continue_options(uint32_t flags);

pllm_error *resume_continue(const pllm_engine *engine, uint64_t sequence, uint32_t flags);

pllm_pin token_pin(void);

// Every call on this sequence or pin id fails with PLLM_E_NOT_FOUND.
void check_every_call_is_not_found(const pllm_engine *engine, uint64_t id);

// ---- exported states ----

// An exported sequence, and its outputs before the export.
typedef struct {
    uint8_t *bytes;
    uint64_t len;
    generation emitted;
} exported_sequence;

int is_state_output(const pllm_output *o, uint64_t sequence);

exported_sequence export_state(const pllm_engine *engine, uint64_t sequence);

// `a` holds the outputs of the sequence so far. The export precedes the step, whose tokens are
// added to `a`.
exported_sequence export_and_collect(const pllm_engine *engine, uint64_t sequence, generation *a);

uint64_t import_state(const pllm_engine *engine, const exported_sequence *exported);

#endif
