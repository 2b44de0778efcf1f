// Shared by the files that make the calls of a program.
#ifndef PROGRAM_H
#define PROGRAM_H

#include "fuzz.h"

// ---- objects of a program ----

enum {
    ENGINES = 3,
    BUDGETS = 2,
    SHARED_QUEUES = 6,
    QUEUES_OF_RACER = 2,
    QUEUES = SHARED_QUEUES + RACERS * QUEUES_OF_RACER
};

typedef struct {
    const pllm_queue *queue;  // NULL: the slot is free
    unsigned number, engine;
    bool engine_freed;
    bool counter_was_read;  // the descriptor is silent until the next output
} queue_slot;

typedef struct {
    pllm_engine *engine;  // NULL: the slot is free
    unsigned number;
    bool has_text, started;
    pllm_engine_options options;  // the options that created it
    uint32_t vocab;
    uint64_t max_model_len;
    queue_slot own;
} engine_slot;

typedef struct {
    engine_slot engines[ENGINES];
    pllm_budget *budgets[BUDGETS];  // NULL: the slot is free
    queue_slot queues[QUEUES];
    atomic_uint last_number;
    bool racing;                // several threads: engines stay, and outputs come in any order
    bool may_start;             // otherwise only the host steps
    atomic_bool uses_grammars;  // late masks: outputs may come in later steps
} program_objects;
extern program_objects program;

// ---- calls ----

// CALL records the call, so that a hang is reported. TRY also checks the returned error.
#define CALL(function, ...) (enter(w, N_##function), function(__VA_ARGS__))
#define CALL_VOID(function) (enter(w, N_##function), function())
#define TRY(function, ...) \
    check_error(w, N_##function, (enter(w, N_##function), function(__VA_ARGS__)))

// ---- checks (checks.c) ----

// A pointer or number that the library writes. POISON before the call.
typedef union {
    void *pointer;
    uint64_t number;
    int32_t fd;
    unsigned char bytes[8];
} out_parameter;

typedef struct {
    void *at;
    uint64_t declared, first, known;
} out_struct;

// An input struct: its init function, and the size of its first and of its current version.
typedef void initializer(void *to, uint64_t struct_size);
typedef struct {
    int function;
    initializer *init;
    uint64_t first, known;
} struct_type;
extern const struct_type options_type, request_type, sampling_type, dry_type, beam_type, fork_type,
    resume_type, pin_type;

// Only outputs of the same request have an order in a batch.
uint64_t checksum_of_batch(worker *w, const pllm_outputs *outputs);

uint64_t checksum(worker *w, const kept_object *k);

// Checks that the object has not changed, and frees it.
void free_kept(worker *w, kept_object *k);

void free_all_kept(worker *w);
void keep(worker *w, kept_object k);

// Checks an error and returns its code; 0 for success.
int32_t check_error(worker *w, int function, pllm_error *error);

out_parameter *any_out_parameter(worker *w);
bool is_poison(const void *data, uint64_t len);
void check_out_parameter(out_parameter *out, int32_t code, size_t size);
out_struct any_out_struct(worker *w, uint64_t first, uint64_t known);
bool has_valid_size(const out_struct *s);

// Copies the written struct to `known`. Returns false if nothing was written.
bool check_out_struct(const out_struct *s, int32_t code, void *known);

// Memory for an input struct, with the defaults of its size. The caller sets fields in `known`.
void *any_input_struct(worker *w, const struct_type *type, void *known, uint64_t *declared);

// Copies the fields in `known` to the struct, up to its size. Then `known` holds what the library
// sees.
void *copy_fields(void *at, const struct_type *type, void *known, uint64_t declared);

// ---- targets.c ----

engine_slot *any_engine(worker *w);

// Usually an engine with a tokenizer.
engine_slot *any_text_engine(worker *w);

queue_slot *queues_of_racer(unsigned index);
queue_slot *any_live_queue(worker *w);
engine_slot *engine_numbered(unsigned number);

// ---- engine_calls.c ----

void plan_engine(worker *w);
void create_engine(worker *w);
void get_model_info(worker *w);
uint64_t ended_of(const pllm_stats *s);
void check_stats(const engine_slot *e, const pllm_stats *s);
void get_stats(worker *w);
void step_engine(worker *w);
void start_engine(worker *w);
void stop_engine(worker *w);
void stop_unconditionally(worker *w, engine_slot *e);

// ---- sampling.c ----

void record_sampling(expected_run *t, const pllm_sampling *s);

// `t` receives the parameters as the library sees them.
const pllm_sampling *any_sampling(worker *w, const engine_slot *e, bool with_prompt,
                                  expected_run *t);

// ---- request_calls.c ----

void choose_hook(worker *w, const engine_slot *e, pllm_logits_hook *hook, void **data);
void choose_prompt(worker *w, const engine_slot *e, pllm_request *q, expected_run *t);

// The salt of one of two tenants, or none; sometimes an invalid one.
void choose_salt(worker *w, const uint8_t **salt, uint64_t *len);

// The queue of the outputs.
const queue_slot *choose_queue(worker *w, const engine_slot *e, const pllm_queue **queue);

// As the library sees it. More sequences than the record holds are refused by the library as well.
void record_branching(request_record *r, const pllm_request *q, unsigned beams);

// The first run of each result, before the call that starts it.
void record_runs(request_record *r, expected_run t);

// Results that depend on time are not repeatable.
int64_t any_deadline(worker *w);

// True if nothing changes between two calls.
bool nothing_steps(void);

void add_request(worker *w);

// Predicts without adding.
void predict_only(worker *w);

void abort_request(worker *w);

// ---- sequence_calls.c ----

void get_sequence_info(worker *w);
void append_to_sequence(worker *w);
void rewind_sequence(worker *w);
void free_sequence_of(worker *w, const engine_slot *e, uint64_t id);
void free_sequence(worker *w);

// Starts another run of a sequence.
void resume_sequence(worker *w);

void fork_sequence(worker *w);
void export_sequence(worker *w);

// Imports the last exported state, usually damaged, and frees the sequence.
void import_sequence(worker *w);

// ---- pin_calls.c ----

void pin_prefix(worker *w);
void unpin_any(worker *w);

// Includes pins that the oracle did not record.
void unpin_all(worker *w, const engine_slot *e);

// ---- queue_calls.c ----

void create_queue(worker *w);

// Returns the number of outputs, or one of these values.
int64_t poll_and_check(worker *w, queue_slot *q, int64_t timeout_ms);

void poll_queue(worker *w);
void event_descriptor(worker *w);
void free_queue_slot(worker *w, queue_slot *q);
void free_queue(worker *w);

// ---- engine_end.c ----

void free_engine_slot(worker *w, engine_slot *e);
void free_engine(worker *w);

// ---- budget_calls.c ----

void create_budget(worker *w);

// Engines that use the budget keep it alive.
void free_budget(worker *w);

void free_budgets(worker *w);
void get_budget_info(worker *w);
void resize_budget(worker *w);

// Adds reference requests and shrinks the budget while they run. Preempted requests must generate
// the same tokens.
void shrink_budget_during_requests(worker *w);

void check_engine_budget(worker *w);

// ---- kv_event_calls.c ----

void poll_kv_events(worker *w);
void snapshot_kv_events(worker *w);
void hash_prompt(worker *w);

// ---- communicator_calls.c ----

void join_communicator(worker *w);
void run_worker_in_vain(worker *w);
void run_worker_of_an_engine(worker *w);

// ---- text_calls.c ----

// Metrics and snapshots contain times, so they are not part of the hash.
void get_metrics(worker *w);
void get_snapshot(worker *w);
void get_token_bytes(worker *w);
void check_health(worker *w);

void tokenize(worker *w);
void detokenize(worker *w);
void render_chat(worker *w);
void parse_response(worker *w);
void check_library_info(worker *w);
void check_null_handles(worker *w);
void free_any_kept(worker *w);
void check_engine_queue(worker *w);

#endif
