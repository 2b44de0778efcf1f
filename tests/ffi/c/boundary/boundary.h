// What the cases share: checks, engines, and requests whose outputs gather in an answer.
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

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true  // such a build's memory is its own affair
#else
#define SANITIZED false
#endif

// ---- cases -------------------------------------------------------------------------------------------------------------

// Each runs in a process of its own. A hidden one is run only by another case, which judges how it ended.
typedef struct {
    const char *name;
    void (*run)(void);
    bool hidden;
} test_case;
#define CASE(function) {#function, function, false}
#define HIDDEN(function) {#function, function, true}

extern const test_case lifetime_cases[], thread_cases[], queue_cases[], sequence_cases[], event_cases[], host_cases[],
    version_cases[], load_cases[];
extern const char *model_dir, *golden_dir;

// Runs a case of this program in a process of its own.
typedef struct {
    int status;  // as from waitpid
    char output[4096];
} ending;
ending run_alone(const char *name);

// Leaves the case: what it needs is not on this machine.
_Noreturn void skip(const char *why);

// ---- checks ------------------------------------------------------------------------------------------------------------

bool check(bool ok, const char *what, const char *file, int line);
#define CHECK(condition) check(!!(condition), #condition, __FILE__, __LINE__)

// Success; otherwise says what the error was.
bool succeeds(pllm_error *error, const char *call, const char *file, int line);
#define OK(call) succeeds(call, #call, __FILE__, __LINE__)

// Failure with this code, and a message that holds `said`.
bool fails(int32_t code, const char *said, pllm_error *error, const char *call, const char *file, int line);
#define FAILS(code, said, call) fails(code, said, call, #call, __FILE__, __LINE__)

int exit_code(void);

// The code alone, for calls that may go either way.
int32_t code_of(pllm_error *error);

// ---- engines and requests ----------------------------------------------------------------------------------------------

pllm_engine_options options_for(const char *path);
pllm_engine *open_engine(const char *path);
pllm_stats stats_of(const pllm_engine *engine);
pllm_queue *new_queue(const pllm_engine *engine, uint64_t capacity);
int event_fd(const pllm_queue *queue);

// Everything that came of one request, which knows it by its user_data.
typedef struct {
    uint64_t id;
    uint32_t tokens[600];
    size_t tokens_len, outputs;
    char text[8192];
    size_t text_len;
    uint32_t finish_reason;
    unsigned ends;
} answer;

enum { QUESTIONS = 6 };

// Asks one of a few questions for so many tokens; `to` NULL: the engine's own queue.
pllm_error *try_ask(const pllm_engine *engine, const pllm_queue *to, unsigned question, uint32_t tokens, answer *a);
void ask(const pllm_engine *engine, const pllm_queue *to, unsigned question, uint32_t tokens, answer *a);

// Takes what is there within `timeout_ms` into the answers it belongs to. Returns how many outputs; -1: the queue is closed.
int64_t take(const pllm_queue *queue, int64_t timeout_ms);

// Steps and takes from the engine's own queue until every request has ended.
void step_to_the_end(const pllm_engine *engine);

// Waits until the engine's own thread has ended every request.
void wait_until_idle(const pllm_engine *engine);

// What a question is answered with when nobody disturbs.
const answer *undisturbed(unsigned question, uint32_t tokens);

// All of it came: the tokens and the text of an undisturbed run, and one end.
bool is_whole(const answer *a, unsigned question, uint32_t tokens);

// What came agrees with an undisturbed run as far as it goes.
bool is_beginning(const answer *a, unsigned question, uint32_t tokens);

// ---- the process -------------------------------------------------------------------------------------------------------

double now(void);
void sleep_ms(long ms);
int threads(void);
int descriptors(void);
long resident_kib(void);
double cpu_seconds(void);

#endif
