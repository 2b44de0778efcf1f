// A fuzzer of the whole C ABI. A program is a string of bytes; workers read calls and arguments from it, make them, and hold
// what comes back against what the header promises.
#ifndef FUZZ_H
#define FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagedllm.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define LLU(number) ((unsigned long long)(number))  // as printf wants it

// FALLIBLE functions return pllm_error *. run.sh compares this list with the header.
#define FUNCTIONS(FALLIBLE, SURE)                                                                                          \
    SURE(pllm_abi_version) SURE(pllm_version) SURE(pllm_build_info)                                                        \
    SURE(pllm_error_code) SURE(pllm_error_message) SURE(pllm_error_free)                                                   \
    SURE(pllm_engine_options_init) FALLIBLE(pllm_engine_plan) FALLIBLE(pllm_engine_create) SURE(pllm_engine_free)          \
    FALLIBLE(pllm_engine_get_model_info) SURE(pllm_request_init) SURE(pllm_sampling_init)                                            \
    FALLIBLE(pllm_engine_add_request) FALLIBLE(pllm_engine_predict_admission) FALLIBLE(pllm_engine_abort)                              \
    FALLIBLE(pllm_budget_create) SURE(pllm_budget_free) FALLIBLE(pllm_budget_resize) FALLIBLE(pllm_budget_get_info)               \
    FALLIBLE(pllm_engine_step) FALLIBLE(pllm_engine_start) FALLIBLE(pllm_engine_stop)                                      \
    SURE(pllm_dry_init) SURE(pllm_beam_init) SURE(pllm_fork_init) SURE(pllm_resume_init) SURE(pllm_pin_init)               \
    FALLIBLE(pllm_sequence_fork) FALLIBLE(pllm_sequence_append) FALLIBLE(pllm_sequence_rewind)                             \
    FALLIBLE(pllm_sequence_resume) FALLIBLE(pllm_sequence_free) FALLIBLE(pllm_sequence_get_info)                           \
    FALLIBLE(pllm_prefix_pin) FALLIBLE(pllm_prefix_unpin)                                                                  \
    FALLIBLE(pllm_sequence_export) FALLIBLE(pllm_sequence_import)                                                          \
    SURE(pllm_engine_queue) FALLIBLE(pllm_engine_get_stats) FALLIBLE(pllm_engine_get_metrics) SURE(pllm_engine_budget)              \
    FALLIBLE(pllm_queue_create) SURE(pllm_queue_free) FALLIBLE(pllm_queue_get_event_fd) FALLIBLE(pllm_queue_poll)              \
    SURE(pllm_outputs_len) SURE(pllm_outputs_get) SURE(pllm_outputs_free)                                                  \
    FALLIBLE(pllm_engine_tokenize) FALLIBLE(pllm_engine_detokenize) FALLIBLE(pllm_engine_render_chat)                      \
    SURE(pllm_tokens_data) SURE(pllm_tokens_len) SURE(pllm_tokens_free)                                                    \
    SURE(pllm_bytes_data) SURE(pllm_bytes_len) SURE(pllm_bytes_free)
#define AS_NUMBER(function) N_##function,
enum { FUNCTIONS(AS_NUMBER, AS_NUMBER) FUNCTION_COUNT };

// ---- sabotage: what the checks must find -------------------------------------------------------------------------------

// Each spoils what one check sees, and must end in a failure that says this.
#define SABOTAGES(X)                                                                   \
    X(a_message_is_empty, "without a message")                                         \
    X(a_message_is_not_utf8, "message is not UTF-8")                                   \
    X(a_code_is_unknown, "unknown code")                                               \
    X(an_output_pointer_is_written_on_failure, "out parameter was touched")            \
    X(an_output_pointer_is_not_written, "out parameter was not written")               \
    X(an_output_struct_is_written_on_failure, "struct was touched")                    \
    X(an_output_struct_is_not_written, "struct was not written")                       \
    X(a_last_output_is_lost, "did not end")                                            \
    X(a_last_output_comes_twice, "came after the last output")                         \
    X(a_finish_reason_is_unknown, "finish reason")                                     \
    X(user_data_is_changed, "user_data")                                               \
    X(an_index_is_wrong, "index")                                                      \
    X(half_a_character_comes, "half a character")                                      \
    X(a_token_is_lost, "generated_tokens")                                             \
    X(an_output_goes_to_another_queue, "another request's queue")                      \
    X(a_batch_changes_after_its_engine, "changed while it was kept")                   \
    X(a_stale_id_is_accepted, "a request that had ended was aborted")                  \
    X(a_sample_is_lost, "did not end")                                                 \
    X(a_sequence_has_another_request, "an output's request")                           \
    X(a_list_is_too_short, "top_logprobs")                                             \
    X(a_log_probability_is_missing, "logprobs came unasked, or did not come")          \
    X(a_freed_sequence_is_still_there, "is gone, and was found")                       \
    X(a_kept_sequence_does_not_stay, "was to stay, and did not")                       \
    X(an_idle_sequence_is_not_given_back, "idle")                                      \
    X(a_pin_is_unpinned_twice, "was unpinned before")                                  \
    X(a_hook_sees_another_vocabulary, "a hook")                                        \
    X(an_output_comes_before_the_end, "more than one output")                          \
    X(a_deadline_passes_unasked, "had no deadline")                                    \
    X(an_answer_is_another, "another answer")                                          \
    X(admission_promises_too_much, "admit said")                                       \
    X(an_budget_keeps_its_bytes, "a budget that was resized")                           \
    X(a_descriptor_stays, "descriptors")                                               \
    X(a_thread_stays, "threads")                                                       \
    X(a_block_stays_used, "blocks_used")                                               \
    X(a_readable_descriptor_lies, "event descriptor")                                  \
    X(a_call_hangs, "has been under way")                                              \
    X(a_string_is_read_past_its_end, "AddressSanitizer: SEGV")                         \
    X(a_run_is_not_repeatable, "the same program gave other results")                  \
    X(a_function_never_fails, "pllm_queue_get_event_fd never failed")
#define SABOTAGE_NUMBER(name, report) name,
enum { no_sabotage, SABOTAGES(SABOTAGE_NUMBER) };

extern int sabotage;

// ---- what is known of the run (report.c) -------------------------------------------------------------------------------

enum { RACERS = 3, WORKERS = 1 + RACERS };

// Lies in memory that the watching process shares.
typedef struct {
    _Atomic uint64_t iteration;
    struct {
        atomic_int function;  // -1: none
        _Atomic uint64_t since_ms;
    } under_way[WORKERS];
    _Atomic uint64_t succeeded[FUNCTION_COUNT], failed[FUNCTION_COUNT];
} board;

extern board *run;
extern const char *const function_names[FUNCTION_COUNT];
extern const bool function_fallible[FUNCTION_COUNT];

uint64_t now_ms(void);

// A finding: says what, and aborts.
_Noreturn void finding(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define EXPECT(condition, ...) ((condition) ? (void)0 : finding(__VA_ARGS__))

void print_counts(uint64_t programs);

// Every function was called; those that can fail did and did not.
bool everything_was_tried(void);

// ---- workers and what they read (input.c) ------------------------------------------------------------------------------

// An object that a worker keeps for a while, and its checksum from when it came.
typedef struct {
    enum { NOTHING, ERROR, OUTPUTS, TOKENS, BYTES } kind;
    union {
        pllm_error *error;
        pllm_outputs *outputs;
        pllm_tokens *tokens;
        pllm_bytes *bytes;
    } it;
    uint64_t checksum;
} keepsake;

typedef struct {
    unsigned index;             // 0: the program's first; the others race
    const uint8_t *next, *end;  // what is left to read
    unsigned places;            // of its guarded memory, in use by the call under way
    uint64_t hash;              // of the results so far
    keepsake keepsakes[6];
} worker;

void enter(const worker *w, int function);
void leave(const worker *w);

// Zero when nothing is left.
uint8_t byte(worker *w);
uint64_t number(worker *w, unsigned bytes);
unsigned below(worker *w, unsigned limit);  // limit <= 256
bool one_in(worker *w, unsigned n);

uint32_t odd_u32(worker *w);
uint64_t odd_u64(worker *w);
float odd_float(worker *w);

enum { PLACE_BYTES = 18 * 4096, POISON = 0xA5 };

// Memory that ends where a page without access begins (or at most 7 bytes before), for the call under way; filled with POISON.
void *guarded(worker *w, uint64_t bytes);

// A struct_size: mostly that of the struct, sometimes an older, a newer or an impossible one.
uint64_t any_struct_size(worker *w, uint64_t first, uint64_t known);

// Room for a struct that says it has this size.
void *struct_place(worker *w, uint64_t declared, uint64_t known);

typedef struct {
    const void *data;
    uint64_t len;         // as it is told to the library
    bool must_be_refused;
} argument;

argument any_text(worker *w);
argument any_chat(worker *w);
argument any_tokens(worker *w, uint32_t vocab);

uint64_t mix(uint64_t hash, uint64_t value);
uint64_t mix_bytes(uint64_t hash, const void *data, uint64_t len);
bool is_utf8(const void *data, uint64_t len);

// ---- what must come of requests (ledger.c) -----------------------------------------------------------------------------

// One turn of a sequence: from when it is asked to run until its last output.
typedef struct {
    uint64_t user_data, max_tokens, prompt_tokens;  // prompt_tokens 0: not known
    unsigned queue;                                 // a number that is never used again within a program
    uint32_t kind, top, prompt_top;
    bool logprobs, prompt_logprobs, echo, grammar, keep, has_deadline;
    const uint32_t *answer;  // the tokens that it must begin with; NULL: not known
    bool loose;     // it was forked, cut or extended on the way: how many tokens come is not known beforehand
    bool optional;  // whether it was to run at all is not known
    bool unheard;   // its queue is gone
    unsigned outputs, ends;
    uint32_t finish_reason;
    uint64_t tokens, generated;
} turn;

enum { MOST_SEQUENCES = 8, MOST_TURNS = 5 };

typedef struct {
    turn now;    // what a fork would inherit
    turn birth;  // what it says before whatever it is asked for: of BEST its result, of a child that it could not be made
    turn turns[MOST_TURNS];
    unsigned turns_len;
    bool claimed;  // a worker is in the middle of what one may do at a time
    bool wild;     // many did something to it
    bool freed, never_made;
} account;

// The sequences that one call made: a request's samples or beams, or the children of a fork, each a request of its own.
typedef struct {
    uint64_t id;  // of the first; 0: not known yet
    unsigned engine, width, results;
    enum { SAMPLES, BEST, BEAMS, CHILDREN } branching;  // BEST: which of them are results is known at the end
    uint64_t vocab, max_model_len;
    bool has_text;
    enum { ADDING, LIVE, REFUSED } state;
    unsigned results_begun;
    account accounts[MOST_SEQUENCES];
} request;

void ledger_clear(void);
void ledger_race(bool racing);  // while outputs are taken by many, their order is not known

uint64_t ledger_user_data(void);  // not given before within a program

// Room for one more; NULL: enough for one program. Its turns are filled in before the call is made.
request *ledger_open(void);
void ledger_accepted(request *r, uint64_t id);
void ledger_refused(request *r);

// A turn that a call is about to begin, and what became of it. False: there is no room for one.
bool ledger_begin(account *a, const turn *t);
void ledger_begun(account *a, bool accepted);

// The last exported sequence that came as an output, copied to `to`; 0 where there is none, or none that fits.
uint64_t ledger_state(unsigned char *to, uint64_t room);
void ledger_output(unsigned engine, unsigned queue, const pllm_output *o);
void ledger_queue_gone(unsigned queue);

// The id of any of the sequences that there were, by a number; 0: there is none.
uint64_t ledger_any(unsigned engine, uint64_t n);
// What is known of a sequence; NULL: nothing.
account *ledger_find(unsigned engine, uint64_t id, request **of);
// As ledger_find, for one worker at a time. False: another has it.
bool ledger_claim(unsigned engine, uint64_t id, request **of, account **found);
void ledger_let_go(account *a);
void ledger_loosen(request *r, account *a);

typedef enum { MAYBE, GONE, IDLE } whereabouts;
whereabouts ledger_whereabouts(const request *r, const account *a);

bool ledger_has_ended(unsigned engine, uint64_t id);
typedef struct {
    uint64_t turns, optional, sequences;
} totals;
totals ledger_totals(unsigned engine);
bool ledger_waits_for(unsigned queue);
// All that this queue was to tell has come.
void ledger_expect_ended(unsigned queue);
typedef void visitor(void *context, uint64_t id);
void ledger_for_unended(unsigned engine, visitor *visit, void *context);
void ledger_for_sequences(unsigned engine, visitor *visit, void *context);

enum { MOST_PINS = 256 };
typedef struct {
    uint64_t id;
    unsigned engine;
    bool unpinned;
} pin_slot;
void ledger_pinned(unsigned engine, uint64_t id);
// One of them, by a number; NULL: there is none.
pin_slot *ledger_pin(unsigned engine, uint64_t n);
uint64_t ledger_pins(unsigned engine);  // those that were unpinned too: a step sees to them

// ---- what is known beforehand (questions.c) ----------------------------------------------------------------------------

enum { LONGEST_ANSWER = 12 };

// From engines that do nothing else.
void questions_learn(void);

// One of the questions, by a number, to an engine that was made with these options. Returns the LONGEST_ANSWER tokens that must
// come; NULL: there is none for such an engine.
const uint32_t *question_ask(const pllm_engine_options *o, unsigned n, pllm_request *q, pllm_sampling *s);

// ---- programs (program.c) ----------------------------------------------------------------------------------------------

typedef struct {
    bool repeatable;  // one thread, stepped by the host: the hash says it all
    uint64_t hash;
} verdict;

extern const char *model_dir, *golden_dir;

verdict run_program(const uint8_t *bytes, size_t len);

#endif
