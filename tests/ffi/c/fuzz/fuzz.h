// A fuzzer of the whole C API. A program is a string of bytes. Workers read calls and arguments
// from it, make the calls, and check the results against the header's promises.
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
#define LLU(number) ((unsigned long long)(number))  // for printf

// FALLIBLE functions return pllm_error *. run.sh compares this list with the header.
#define FUNCTIONS(FALLIBLE, INFALLIBLE)                                                         \
    INFALLIBLE(pllm_abi_version) INFALLIBLE(pllm_version) INFALLIBLE(pllm_build_info)           \
    INFALLIBLE(pllm_error_code) INFALLIBLE(pllm_error_message) INFALLIBLE(pllm_error_free)      \
    INFALLIBLE(pllm_engine_options_init) FALLIBLE(pllm_engine_plan)                             \
    FALLIBLE(pllm_engine_create) INFALLIBLE(pllm_engine_free) FALLIBLE(pllm_worker_run)         \
    FALLIBLE(pllm_engine_get_model_info) INFALLIBLE(pllm_request_init)                          \
    INFALLIBLE(pllm_sampling_init) FALLIBLE(pllm_engine_add_request)                            \
    FALLIBLE(pllm_engine_predict_admission) FALLIBLE(pllm_engine_abort)                         \
    FALLIBLE(pllm_budget_create) INFALLIBLE(pllm_budget_free) FALLIBLE(pllm_budget_resize)      \
    FALLIBLE(pllm_budget_get_info) FALLIBLE(pllm_engine_step) FALLIBLE(pllm_engine_start)       \
    FALLIBLE(pllm_engine_stop) INFALLIBLE(pllm_dry_init) INFALLIBLE(pllm_beam_init)             \
    INFALLIBLE(pllm_fork_init) INFALLIBLE(pllm_resume_init) INFALLIBLE(pllm_pin_init)           \
    INFALLIBLE(pllm_kv_store_init) INFALLIBLE(pllm_communicator_init)                           \
    FALLIBLE(pllm_communicator_shared_memory)                                                   \
    FALLIBLE(pllm_sequence_fork) FALLIBLE(pllm_sequence_append)                                 \
    FALLIBLE(pllm_sequence_rewind) FALLIBLE(pllm_sequence_resume)                               \
    FALLIBLE(pllm_sequence_free) FALLIBLE(pllm_sequence_get_info) FALLIBLE(pllm_prefix_pin)     \
    FALLIBLE(pllm_prefix_unpin) FALLIBLE(pllm_sequence_export) FALLIBLE(pllm_sequence_import)   \
    INFALLIBLE(pllm_engine_queue) FALLIBLE(pllm_engine_get_stats)                               \
    FALLIBLE(pllm_engine_get_metrics) INFALLIBLE(pllm_engine_budget)                            \
    FALLIBLE(pllm_engine_snapshot)                                                              \
    FALLIBLE(pllm_engine_health) FALLIBLE(pllm_engine_get_token_bytes)                          \
    INFALLIBLE(pllm_error_prompt_tokens) INFALLIBLE(pllm_error_max_model_len)                   \
    INFALLIBLE(pllm_error_is_temporary)                                                         \
    FALLIBLE(pllm_queue_create) INFALLIBLE(pllm_queue_free) FALLIBLE(pllm_queue_get_event_fd)   \
    FALLIBLE(pllm_queue_poll) INFALLIBLE(pllm_outputs_len) INFALLIBLE(pllm_outputs_get)         \
    INFALLIBLE(pllm_outputs_free) FALLIBLE(pllm_engine_tokenize)                                \
    FALLIBLE(pllm_engine_detokenize) FALLIBLE(pllm_engine_render_chat)                          \
    FALLIBLE(pllm_response_parser_create) FALLIBLE(pllm_response_parser_feed)                   \
    FALLIBLE(pllm_response_parser_finish) INFALLIBLE(pllm_response_parser_free)                 \
    INFALLIBLE(pllm_tokens_data) INFALLIBLE(pllm_tokens_len) INFALLIBLE(pllm_tokens_free)       \
    FALLIBLE(pllm_engine_poll_kv_events) FALLIBLE(pllm_engine_snapshot_kv_events)               \
    FALLIBLE(pllm_engine_hash_prompt) INFALLIBLE(pllm_kv_events_len)                            \
    INFALLIBLE(pllm_kv_events_get) INFALLIBLE(pllm_kv_events_free)                              \
    INFALLIBLE(pllm_bytes_data) INFALLIBLE(pllm_bytes_len) INFALLIBLE(pllm_bytes_free)
#define AS_NUMBER(function) N_##function,
enum { FUNCTIONS(AS_NUMBER, AS_NUMBER) FUNCTION_COUNT };

// ---- mutations: findings that the checks must make ----

// Each mutation falsifies what one check sees. The run must end in a finding that contains this
// text.
#define MUTATIONS(X)                                                       \
    X(message_is_empty, "without a message")                               \
    X(message_is_not_utf8, "message is not UTF-8")                         \
    X(code_is_unknown, "unknown code")                                     \
    X(out_pointer_is_written_on_failure, "out parameter was written")      \
    X(out_pointer_is_not_written, "out parameter was not written")         \
    X(out_struct_is_written_on_failure, "struct was written")              \
    X(out_struct_is_not_written, "struct was not written")                 \
    X(last_output_is_lost, "did not end")                                  \
    X(last_output_is_duplicated, "arrived after the last output")          \
    X(finish_reason_is_unknown, "finish reason")                           \
    X(user_data_is_changed, "user_data")                                   \
    X(index_is_wrong, "index")                                             \
    X(text_ends_inside_a_character, "an incomplete character")             \
    X(token_is_lost, "generated_tokens")                                   \
    X(output_goes_to_another_queue, "another request's queue")             \
    X(batch_changes_after_its_engine, "changed after the call")            \
    X(stale_id_is_accepted, "a request that had ended was aborted")        \
    X(sample_is_lost, "did not end")                                       \
    X(sequence_has_another_request, "an output's request")                 \
    X(top_logprobs_are_too_short, "top_logprobs")                          \
    X(logprobs_are_missing, "logprobs do not match the request")           \
    X(freed_sequence_still_exists, "was removed, and the call succeeded")  \
    X(kept_sequence_is_lost, "was kept, and is unknown")                   \
    X(idle_sequence_leaks, "idle")                                         \
    X(pin_is_unpinned_twice, "was unpinned before")                        \
    X(hook_sees_another_vocab_size, "a logits hook")                       \
    X(final_output_comes_early, "more than one output")                    \
    X(deadline_without_a_deadline, "had no deadline")                      \
    X(tokens_differ_from_the_reference, "other tokens than the reference") \
    X(admission_is_too_optimistic, "predict_admission returned")           \
    X(budget_ignores_a_resize, "a budget that was resized")                \
    X(descriptor_leaks, "descriptors")                                     \
    X(thread_leaks, "threads")                                             \
    X(block_leaks, "blocks_used")                                          \
    X(descriptor_is_wrongly_readable, "event descriptor")                  \
    X(call_hangs, "has not returned")                                      \
    X(string_is_read_past_its_end, "AddressSanitizer: SEGV")               \
    X(program_is_not_repeatable, "the same program has other results")     \
    X(function_never_fails, "pllm_queue_get_event_fd never failed")
#define MUTATION_NUMBER(name, report) name,
enum { no_mutation, MUTATIONS(MUTATION_NUMBER) };

extern int mutation;

// ---- status of the run (report.c) ----

enum { RACERS = 3, WORKERS = 1 + RACERS };

// Shared with the process that supervises the run.
typedef struct {
    _Atomic uint64_t iteration;
    struct {
        atomic_int function;  // -1: none
        _Atomic uint64_t since_ms;
    } current_calls[WORKERS];
    _Atomic uint64_t succeeded[FUNCTION_COUNT], failed[FUNCTION_COUNT];
} run_status;

extern run_status *shared_status;
extern const char *const function_names[FUNCTION_COUNT];
extern const bool function_fallible[FUNCTION_COUNT];

uint64_t now_ms(void);

// Prints a finding and aborts.
_Noreturn void finding(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define EXPECT(condition, ...) ((condition) ? (void)0 : finding(__VA_ARGS__))

void print_counts(uint64_t programs);

// True if every function succeeded at least once, and every fallible one also failed.
bool every_function_was_covered(void);

// ---- workers and their input (input.c) ----

// An object that a worker keeps for a while, and its checksum at the beginning.
typedef struct {
    enum { NOTHING, ERROR, OUTPUTS, TOKENS, BYTES, KV_EVENTS } kind;
    union {
        pllm_error *error;
        pllm_outputs *outputs;
        pllm_tokens *tokens;
        pllm_bytes *bytes;
        pllm_kv_events *kv_events;
    } as;
    uint64_t checksum;
} kept_object;

typedef struct {
    unsigned index;             // 0: the first worker of a program; the others run concurrently
    const uint8_t *next, *end;  // unread bytes
    unsigned buffers;           // guarded buffers that the current call uses
    uint64_t hash;              // of all results so far
    kept_object kept_objects[6];
} worker;

void enter(const worker *w, int function);
void leave(const worker *w);

// Returns 0 after the end of the program.
uint8_t byte(worker *w);
uint64_t number(worker *w, unsigned bytes);
unsigned below(worker *w, unsigned limit);  // limit <= 256
bool one_in(worker *w, unsigned n);

uint32_t interesting_u32(worker *w);
uint64_t interesting_u64(worker *w);
float interesting_float(worker *w);

enum { BUFFER_BYTES = 18 * 4096, POISON = 0xA5 };

// Memory for the current call that ends at an inaccessible page, or at most 7 bytes before it. It
// is filled with POISON.
void *guarded(worker *w, uint64_t bytes);

// A struct_size: usually that of the struct, sometimes an older, a newer or an impossible one.
uint64_t any_struct_size(worker *w, uint64_t first, uint64_t known);

// Memory for a struct with this struct_size.
void *struct_buffer(worker *w, uint64_t declared, uint64_t known);

typedef struct {
    const void *data;
    uint64_t len;  // length that the library receives
    bool must_be_refused;
} argument;

argument any_text(worker *w);
argument any_chat(worker *w);
argument any_tokens(worker *w, uint32_t vocab);

uint64_t mix(uint64_t hash, uint64_t value);
uint64_t mix_bytes(uint64_t hash, const void *data, uint64_t len);
bool is_utf8(const void *data, uint64_t len);

// ---- expected outputs of requests (oracle.c) ----

// One run of a sequence: from the call that starts it to its last output.
typedef struct {
    uint64_t user_data, max_tokens, prompt_tokens;  // prompt_tokens 0: not known
    unsigned queue;                                 // a number that is used only once in a program
    uint32_t kind, top, prompt_top;
    bool limited;  // by max_tokens
    bool logprobs, prompt_logprobs, echo, progress, grammar, keep, has_deadline;
    const uint32_t *reference;   // the tokens that it must begin with; NULL: not known
    bool changed_while_running;  // by a fork, a rewind or an append: its length is not known
    bool uncertain;              // it is not known whether this run starts
    bool queue_freed;            // its queue was freed
    unsigned outputs, ends;
    uint32_t finish_reason;
    uint64_t tokens, generated;
} expected_run;

enum { MAX_SEQUENCES = 8, MAX_RUNS = 5 };

typedef struct {
    expected_run inherited;  // inherited by a fork
    expected_run initial;  // outputs before all runs: the result of a best-of request, the error of
                           // a fork that failed
    expected_run runs[MAX_RUNS];
    unsigned runs_len;
    bool locked;           // one worker makes a call that must not run concurrently
    bool changed_by_many;  // changed by several workers at once
    atomic_bool freed, creation_failed;  // racers read them without the lock
} sequence_record;

// The sequences of one call: the samples or beams of a request, or the children of a fork, each
// with a request id of its own.
typedef struct {
    uint64_t id;  // of the first sequence; 0: not known yet
    unsigned engine, width, results;
    enum { SAMPLES, BEST, BEAMS, CHILDREN } branching;  // BEST: the results are known at the end
    uint64_t vocab, max_model_len;
    bool has_text;
    enum { ADDING, ACCEPTED, REFUSED } state;
    unsigned results_started;
    sequence_record sequence_records[MAX_SEQUENCES];
} request_record;

void oracle_clear(void);
// While concurrent workers poll, the order of outputs is not known.
void oracle_set_racing(bool racing);

uint64_t oracle_new_user_data(void);  // unique within a program

// Adds a record. NULL if the program has enough of them. The runs are filled in before the call.
request_record *oracle_open(void);
void oracle_accepted(request_record *r, uint64_t id);
void oracle_refused(request_record *r);

// Adds a run before the call that starts it, and records the result of the call. False if the
// record is full.
bool oracle_add_run(sequence_record *a, const expected_run *t);
void oracle_confirm_run(sequence_record *a, bool accepted);

// Copies the last exported state to `to` and returns its length. 0 if there is none that fits.
uint64_t oracle_copy_state(unsigned char *to, uint64_t capacity);
void oracle_check_output(unsigned engine, unsigned queue, const pllm_output *o);
void oracle_queue_freed(unsigned queue);

// The id of some sequence, chosen by a number. 0 if there is none.
uint64_t oracle_any_sequence(unsigned engine, uint64_t n);
// The record of a sequence, or NULL.
sequence_record *oracle_find(unsigned engine, uint64_t id, request_record **of);
// As oracle_find, for one worker at a time. False if another worker holds the record.
bool oracle_lock(unsigned engine, uint64_t id, request_record **of, sequence_record **found);
void oracle_unlock(sequence_record *a);
void oracle_mark_changed(request_record *r, sequence_record *a);

typedef enum { UNCERTAIN, REMOVED, IDLE } sequence_status;
sequence_status oracle_sequence_status(const request_record *r, const sequence_record *a);

bool oracle_has_ended(unsigned engine, uint64_t id);
typedef struct {
    uint64_t runs, uncertain, sequences;
} totals;
totals oracle_totals(unsigned engine);
bool oracle_expects_outputs(unsigned queue);
// Checks that every last output of this queue has arrived.
void oracle_check_ended(unsigned queue);
typedef void visitor(void *context, uint64_t id);
void oracle_for_each_unended(unsigned engine, visitor *visit, void *context);
void oracle_for_each_sequence(unsigned engine, visitor *visit, void *context);

enum { MAX_PINS = 256 };
typedef struct {
    uint64_t id;
    unsigned engine;
    bool unpinned;
} pin_slot;
void oracle_pinned(unsigned engine, uint64_t id);
// Some pin, chosen by a number, or NULL.
pin_slot *oracle_any_pin(unsigned engine, uint64_t n);
uint64_t oracle_pin_count(unsigned engine);  // including unpinned ones, which the next step removes

// ---- references (references.c) ----

enum { REFERENCE_TOKENS = 12 };

// Generates the references on engines without other requests.
void references_generate(void);

// Fills in a reference request, chosen by a number, for an engine with these options. Returns its
// REFERENCE_TOKENS tokens, or NULL if there is no reference for such an engine.
const uint32_t *reference_fill_request(const pllm_engine_options *o, unsigned n, pllm_request *q,
                                       pllm_sampling *s);

// ---- programs (program.c) ----

typedef struct {
    bool repeatable;  // one thread, stepped by the host: the hash covers all results
    uint64_t hash;
} program_result;

extern const char *model_dir, *golden_dir;

program_result run_program(const uint8_t *bytes, size_t len);

#endif
