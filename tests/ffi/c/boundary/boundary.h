// Shared by the tests: checks, engines, requests and their outputs.
#ifndef BOUNDARY_H
#define BOUNDARY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pagedllm.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

// clang reports its sanitizers in another way than gcc.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) && !defined(__SANITIZE_THREAD__)
#define __SANITIZE_THREAD__ 1
#elif __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true  // a sanitizer has its own allocator
#else
#define SANITIZED false
#endif

// ---- tests ----

// Each test runs in its own process. A hidden one is run only by another test, which judges its
// exit status.
typedef struct {
    const char *name;
    void (*run)(void);
    bool hidden;
} test;
#define TEST(function) {#function, function, false}
#define HIDDEN(function) {#function, function, true}

extern const test engines_tests[], fork_tests[], exit_tests[], threads_tests[], queues_tests[],
    sequence_threads_tests[], sequence_ids_tests[], sequence_queues_tests[],
    sequence_blocks_tests[], hooks_tests[], events_tests[], signals_tests[], small_stacks_tests[],
    process_state_tests[], versions_tests[], progress_tests[];
extern const char *model_dir, *golden_dir;

// Runs a test of this program in its own process.
typedef struct {
    int status;        // as from waitpid
    const char *hang;  // why the process was killed; NULL: it has ended
    char output[4096];
} exit_result;
exit_result run_alone(const char *name);

// Waits for a child process. Kills a child that hangs, and returns the reason. NULL: it has ended.
// The text is valid until the next call.
const char *wait_for(pid_t child, int *status);

// Ends the test: this machine lacks something that it needs.
_Noreturn void skip(const char *why);

// ---- checks ----

bool check(bool ok, const char *condition, const char *file, int line);
#define CHECK(condition) check(!!(condition), #condition, __FILE__, __LINE__)

// Checks that a call succeeds, and prints its error otherwise.
bool succeeds(pllm_error *error, const char *call, const char *file, int line);
#define OK(call) succeeds(call, #call, __FILE__, __LINE__)

// Checks that a call fails with this code and a message that contains `text`.
bool fails(int32_t code, const char *text, pllm_error *error, const char *call, const char *file,
           int line);
#define FAILS(code, text, call) fails(code, text, call, #call, __FILE__, __LINE__)

int exit_code(void);

// Frees an error and returns its code, for calls that may succeed or fail.
int32_t code_of(pllm_error *error);

// ---- engines and requests ----

pllm_engine_options options_for(const char *path);
pllm_engine *open_engine(const char *path);
pllm_stats stats_of(const pllm_engine *engine);
pllm_queue *new_queue(const pllm_engine *engine, uint64_t capacity);
int event_fd(const pllm_queue *queue);

// All outputs of one request. Its user_data points here.
typedef struct {
    uint64_t id;
    uint32_t tokens[600];
    size_t tokens_len, outputs;
    char text[8192];
    size_t text_len;
    uint32_t finish_reason;
    unsigned ends;
} generation;

enum { PROMPTS = 6 };

// Adds a request for one of the prompts and a number of tokens. `to` NULL selects the engine's own
// queue.
pllm_error *try_add_prompt(const pllm_engine *engine, const pllm_queue *to, unsigned prompt_index,
                           uint32_t tokens, generation *a);
void add_prompt(const pllm_engine *engine, const pllm_queue *to, unsigned prompt_index,
                uint32_t tokens, generation *a);

// Polls a queue and appends its outputs to the results of their requests. Returns the number of
// outputs; -1: the queue is closed.
int64_t take_outputs(const pllm_queue *queue, int64_t timeout_ms);

// Steps and polls the engine's own queue until every request has ended.
void step_to_the_end(const pllm_engine *engine);

// Waits until the engine's own thread has ended every request.
void wait_until_idle(const pllm_engine *engine);

// The result of a prompt on an engine without other requests.
const generation *reference(unsigned prompt_index, uint32_t tokens);

// True if all tokens, the text and one last output of the reference arrived.
bool is_complete(const generation *a, unsigned prompt_index, uint32_t tokens);

// True if the outputs are a prefix of the reference.
bool is_prefix(const generation *a, unsigned prompt_index, uint32_t tokens);

// ---- the process ----

double now(void);
void sleep_ms(long ms);
int thread_count(void);
bool thread_count_falls_to(int expected);
int descriptor_count(void);
long resident_kib(void);
double cpu_seconds(void);

#endif
