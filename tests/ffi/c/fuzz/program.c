// One program: what it holds, the calls that its bytes stand for, and what must be true when it is over.
#include <dirent.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include "fuzz.h"

const char *model_dir, *golden_dir;

enum { ENGINES = 3, ARENAS = 2, SHARED_QUEUES = 6, QUEUES_OF_RACER = 2, QUEUES = SHARED_QUEUES + RACERS * QUEUES_OF_RACER };

typedef struct {
    const pllm_queue *queue;  // NULL: the slot is free
    unsigned number, engine;
    bool engine_gone;
    bool descriptor_read;  // by us, so that it says nothing until the next outputs
} queue_slot;

typedef struct {
    pllm_engine *engine;  // NULL: the slot is free
    unsigned number;
    bool has_text, started;
    pllm_engine_options options;  // as it was made
    uint32_t vocab;
    uint64_t max_model_len;
    queue_slot own;
} engine_slot;

static struct {
    engine_slot engines[ENGINES];
    pllm_budget *budgets[ARENAS];  // NULL: the slot is free
    queue_slot queues[QUEUES];
    atomic_uint last_number;
    bool racing;     // many threads: engines and shared queues stay, the order of outputs is not known
    bool may_start;  // else the host alone steps, and the program is repeatable
} world;

#define CALL(function, ...) (enter(w, N_##function), function(__VA_ARGS__))
#define ASK(function) (enter(w, N_##function), function())
#define TRY(function, ...) judge(w, N_##function, (enter(w, N_##function), function(__VA_ARGS__)))

// ---- errors and what is kept -------------------------------------------------------------------------------------------

static uint64_t checksum_of_output(const pllm_output *o) {
    uint64_t hash = mix(mix(mix(o->request, o->sequence), o->user_data), o->finish_reason);
    hash = mix_bytes(hash, o->tokens, o->tokens_len * sizeof *o->tokens);
    hash = mix_bytes(hash, o->logprobs, o->logprobs ? o->tokens_len * sizeof *o->logprobs : 0);
    hash = mix_bytes(mix_bytes(hash, o->text, o->text_len), o->error, o->error_len);
    hash = mix_bytes(hash, o->top_logprobs, o->top_logprobs_len * sizeof *o->top_logprobs);
    hash = mix_bytes(hash, o->prompt_logprobs, o->prompt_logprobs_len * sizeof *o->prompt_logprobs);
    hash = mix_bytes(hash, o->prompt_top_logprobs, o->prompt_top_logprobs_len * sizeof *o->prompt_top_logprobs);
    hash = mix_bytes(hash, &o->score, sizeof o->score);
    return mix(mix(mix(hash, o->prompt_tokens), o->generated_tokens), (uint64_t)o->error_code);
}

// The order of a batch is that of its requests only for each of them.
static uint64_t checksum_of_batch(worker *w, const pllm_outputs *outputs) {
    uint64_t sum = 0, len = CALL(pllm_outputs_len, outputs);
    for (uint64_t i = 0; i < len; i++) sum += checksum_of_output(CALL(pllm_outputs_get, outputs, i));
    return sum;
}

static uint64_t checksum(worker *w, const keepsake *k) {
    switch (k->kind) {
    case ERROR: {
        const char *message = CALL(pllm_error_message, k->it.error);
        return mix_bytes((uint64_t)CALL(pllm_error_code, k->it.error), message, strlen(message));
    }
    case OUTPUTS: return checksum_of_batch(w, k->it.outputs);
    case TOKENS: {
        uint64_t len = CALL(pllm_tokens_len, k->it.tokens);
        return mix_bytes(2, CALL(pllm_tokens_data, k->it.tokens), len * sizeof(uint32_t));
    }
    case BYTES: {
        uint64_t len = CALL(pllm_bytes_len, k->it.bytes);
        return mix_bytes(3, CALL(pllm_bytes_data, k->it.bytes), len);
    }
    case NOTHING: break;
    }
    return 0;
}

// Freeing NULL is fine: what is not kept frees that.
static void release(worker *w, keepsake *k) {
    if (sabotage == a_batch_changes_after_its_engine && k->kind == OUTPUTS) k->checksum++;
    EXPECT(checksum(w, k) == k->checksum, "an error, a batch, tokens or bytes changed while it was kept");
    CALL(pllm_error_free, k->kind == ERROR ? k->it.error : NULL);
    CALL(pllm_outputs_free, k->kind == OUTPUTS ? k->it.outputs : NULL);
    CALL(pllm_tokens_free, k->kind == TOKENS ? k->it.tokens : NULL);
    CALL(pllm_bytes_free, k->kind == BYTES ? k->it.bytes : NULL);
    *k = (keepsake){.kind = NOTHING};
}

static void release_all(worker *w) {
    for (size_t i = 0; i < COUNT(w->keepsakes); i++) release(w, &w->keepsakes[i]);
}

static void keep(worker *w, keepsake k) {
    keepsake *place = &w->keepsakes[below(w, COUNT(w->keepsakes))];
    release(w, place);
    *place = k;
    place->checksum = checksum(w, place);
}

static void keep_or_free_error(worker *w, pllm_error *error) {
    if (one_in(w, 8)) keep(w, (keepsake){.kind = ERROR, .it.error = error});
    else CALL(pllm_error_free, error);
}

// What an error must look like. Returns its code; 0 for success.
static int32_t judge(worker *w, int function, pllm_error *error) {
    const char *name = function_names[function], *message = CALL(pllm_error_message, error);
    int32_t code = CALL(pllm_error_code, error);
    if (!error) {
        EXPECT(code == 0 && message[0] == 0, "NULL, which is success, has a code or a message");
        run->succeeded[function]++;
        w->hash = mix(w->hash, (uint64_t)function);
        return 0;
    }
    run->failed[function]++;
    if (sabotage == a_code_is_unknown) code = PLLM_E_CANCELLED + 1;
    if (sabotage == a_message_is_empty) message = "";
    if (sabotage == a_message_is_not_utf8) message = "\xE6\x97";
    EXPECT(code >= PLLM_E_INVALID_ARGUMENT && code <= PLLM_E_CANCELLED, "%s failed with the unknown code %d", name, code);
    EXPECT(message[0] != 0, "%s failed with %d without a message", name, code);
    EXPECT(is_utf8(message, strlen(message)), "the message is not UTF-8: %s", name);
    EXPECT(code != PLLM_E_INTERNAL, "%s met a defect: %s", name, message);
    w->hash = mix(mix(w->hash, (uint64_t)function), (uint64_t)code);
    keep_or_free_error(w, error);
    return code;
}

// ---- what is written to the caller's memory ----------------------------------------------------------------------------

// An output pointer or number, POISON before the call.
typedef union {
    void *pointer;
    uint64_t number;
    int32_t fd;
    unsigned char bytes[8];
} output_place;

static output_place *any_output_place(worker *w) { return one_in(w, 32) ? NULL : guarded(w, sizeof(output_place)); }

static bool is_poison(const void *data, uint64_t len) {
    for (uint64_t i = 0; i < len; i++)
        if (((const unsigned char *)data)[i] != POISON) return false;
    return true;
}

static void judge_output(output_place *out, int32_t code, size_t size) {
    if (!out) {
        EXPECT(code != 0, "a call with NULL for its output succeeded");
        return;
    }
    if (sabotage == an_output_pointer_is_written_on_failure && code) out->pointer = NULL;
    if (sabotage == an_output_pointer_is_not_written && !code) memset(out, POISON, sizeof *out);
    EXPECT(!code || is_poison(out, sizeof *out), "the out parameter was touched by a call that failed with %d", code);
    EXPECT(code || !is_poison(out, size), "the out parameter was not written by a call that succeeded");
    EXPECT(is_poison(out->bytes + size, sizeof *out - size), "more was written than the out parameter has room for");
}

typedef struct {
    void *at;
    uint64_t declared, first, known;
} output_struct;

static output_struct any_output_struct(worker *w, uint64_t first, uint64_t known) {
    output_struct s = {NULL, any_struct_size(w, first, known), first, known};
    if (one_in(w, 32)) return s;
    s.at = struct_place(w, s.declared, known);
    memcpy(s.at, &s.declared, sizeof s.declared);
    return s;
}

static bool is_possible(const output_struct *s) {
    return s->at && s->declared >= s->first && s->declared <= 1 << 16 && s->declared % 8 == 0;
}

static bool all_words_written(const output_struct *s) {
    for (uint64_t i = 8; i < s->declared && i < s->known; i += 8)
        if (is_poison((char *)s->at + i, 8)) return false;
    for (uint64_t i = s->known; i < s->declared; i++)
        if (((char *)s->at)[i] != 0) return false;
    return true;
}

// Copies what was written to `known`; false: nothing was.
static bool judge_struct(const output_struct *s, int32_t code, void *known) {
    EXPECT(code || is_possible(s), "an impossible struct_size %llu was accepted", LLU(s->declared));
    if (!s->at) return false;
    uint64_t size = s->declared < 8 || s->declared > PLACE_BYTES ? 8 : s->declared;
    if (sabotage == an_output_struct_is_written_on_failure && code && size > 8) ((char *)s->at)[8] = 0;
    if (sabotage == an_output_struct_is_not_written && !code) memset((char *)s->at + 8, POISON, 8);
    EXPECT(!memcmp(s->at, &s->declared, sizeof s->declared), "struct_size was written");
    EXPECT(!code || is_poison((char *)s->at + 8, size - 8), "the struct was touched by a call that failed with %d", code);
    EXPECT(code || all_words_written(s), "the struct was not written, or not zero where the library knows no field");
    if (code || s->declared < s->known) return false;
    memcpy(known, s->at, s->known);
    return true;
}

typedef void initializer(void *to, uint64_t struct_size);
static void init_options(void *to, uint64_t size) { pllm_engine_options_init(to, size); }
static void init_request(void *to, uint64_t size) { pllm_request_init(to, size); }
static void init_sampling(void *to, uint64_t size) { pllm_sampling_init(to, size); }
static void init_dry(void *to, uint64_t size) { pllm_dry_init(to, size); }
static void init_beam(void *to, uint64_t size) { pllm_beam_init(to, size); }
static void init_fork(void *to, uint64_t size) { pllm_fork_init(to, size); }
static void init_resume(void *to, uint64_t size) { pllm_resume_init(to, size); }
static void init_pin(void *to, uint64_t size) { pllm_pin_init(to, size); }

typedef struct {
    int function;
    initializer *init;
    uint64_t first, known;
} struct_type;

static const struct_type options_type = {N_pllm_engine_options_init, init_options, 96, sizeof(pllm_engine_options)};
static const struct_type request_type = {N_pllm_request_init, init_request, 64, sizeof(pllm_request)};
static const struct_type sampling_type = {N_pllm_sampling_init, init_sampling, 88, sizeof(pllm_sampling)};
static const struct_type dry_type = {N_pllm_dry_init, init_dry, 48, sizeof(pllm_dry)};
static const struct_type beam_type = {N_pllm_beam_init, init_beam, 32, sizeof(pllm_beam)};
static const struct_type fork_type = {N_pllm_fork_init, init_fork, 48, sizeof(pllm_fork)};
static const struct_type resume_type = {N_pllm_resume_init, init_resume, 56, sizeof(pllm_resume)};
static const struct_type pin_type = {N_pllm_pin_init, init_pin, 72, sizeof(pllm_pin)};

// A struct to be filled in, with its defaults as they are written within its size; what the caller sets goes to `known`.
static void *any_input_struct(worker *w, const struct_type *type, void *known, uint64_t *declared) {
    *declared = any_struct_size(w, type->first, type->known);
    void *at = struct_place(w, *declared, type->known);
    uint64_t in_place = *declared < type->known ? *declared : type->known;
    enter(w, type->function);
    type->init(at, *declared), type->init(known, type->known);
    bool possible = *declared >= type->first && *declared <= 1 << 16 && *declared % 8 == 0;
    EXPECT(!possible || !memcmp((char *)at + 8, (char *)known + 8, in_place - 8), "defaults differ by struct_size");
    EXPECT(possible || *declared > PLACE_BYTES || *declared <= 8 || is_poison((char *)at + 8, *declared - 8),
           "an impossible struct was filled");
    EXPECT(*declared >= 8 || is_poison(at, 8), "a struct without room for its size was written to");
    return at;
}

// What the caller set, within the size that the struct says it has; `known` becomes what the library sees of it.
static void *filled(void *at, const struct_type *type, void *known, uint64_t declared) {
    uint64_t seen = declared < type->known ? declared : type->known;
    _Alignas(8) char set[512];
    memcpy(set, known, type->known);
    type->init(known, type->known);
    if (declared <= 8) return at;
    memcpy((char *)at + 8, set + 8, seen - 8);
    memcpy((char *)known + 8, set + 8, seen - 8);
    return at;
}

// ---- who is called -----------------------------------------------------------------------------------------------------

static engine_slot *any_engine(worker *w) {
    static engine_slot none;  // stays empty: its engine is the NULL of such a call
    unsigned i = below(w, 32);
    if (i == 31) return &none;
    for (unsigned tries = 0; tries < ENGINES; tries++)
        if (world.engines[(i + tries) % ENGINES].engine) return &world.engines[(i + tries) % ENGINES];
    return &none;
}

// Mostly one that knows its model's text.
static engine_slot *any_text_engine(worker *w) {
    for (int i = 0; i < ENGINES && !one_in(w, 8); i++)
        if (world.engines[i].engine && world.engines[i].has_text) return &world.engines[i];
    return any_engine(w);
}

static queue_slot *queues_of_racer(unsigned index) { return &world.queues[SHARED_QUEUES + (index - 1) * QUEUES_OF_RACER]; }

// One that this worker may use, and an empty slot where it meets one.
static queue_slot *any_queue(worker *w) {
    static queue_slot none;
    unsigned i = below(w, 64);
    if (i == 63) return &none;
    if (i >= 40) return &any_engine(w)->own;
    if (w->index == 0) return &world.queues[i % QUEUES];
    i %= SHARED_QUEUES + QUEUES_OF_RACER;
    return i < SHARED_QUEUES ? &world.queues[i] : &queues_of_racer(w->index)[i - SHARED_QUEUES];
}

static queue_slot *live_queue(worker *w) {
    for (int tries = 0; tries < 4; tries++) {
        queue_slot *q = any_queue(w);
        if (q->queue) return q;
    }
    return &any_engine(w)->own;
}

static engine_slot *engine_numbered(unsigned number) {
    for (int i = 0; i < ENGINES; i++)
        if (world.engines[i].engine && world.engines[i].number == number) return &world.engines[i];
    return NULL;
}

// ---- engines -----------------------------------------------------------------------------------------------------------

typedef struct {
    unsigned calls, cancel_at;
    uint64_t done;
} loading;

static int32_t watch_loading(void *progress_data, uint64_t done, uint64_t total) {
    loading *l = progress_data;
    if (!l) return 0;  // a struct_size between progress and progress_data
    EXPECT(done >= l->done && done <= total, "progress went from %llu to %llu of %llu", LLU(l->done),
           LLU(done), LLU(total));
    l->done = done;
    return ++l->calls == l->cancel_at ? (int32_t)(l->cancel_at % 2 ? 1 : INT32_MIN) : 0;
}

static void choose_model(worker *w, pllm_engine_options *o) {
    bool tiny = below(w, 2);
    o->model_path = tiny ? golden_dir : model_dir;
    o->flags = (tiny || one_in(w, 6) ? PLLM_ENGINE_SKIP_TOKENIZER : 0) | (one_in(w, 4) ? PLLM_ENGINE_NO_PREFIX_CACHE : 0);
    if (one_in(w, 16)) {
        argument path = any_text(w);
        o->model_path = path.data;
        o->model_path_len = path.len;
    }
    if (one_in(w, 16)) {
        argument device = any_text(w);
        o->device = device.data;
        o->device_len = device.len;
    }
}

static void choose_sizes(worker *w, pllm_engine_options *o) {
    o->kv_bytes = (uint64_t)(1 + below(w, 16)) << (12 + below(w, 7));
    o->block_size = 8u << below(w, 3);
    o->max_model_len = below(w, 2) ? 16 + below(w, 100) : 0;
    o->max_seqs = 1 + below(w, 6);
    o->max_batch_tokens = o->max_seqs + below(w, 32);
    o->prefill_chunk = below(w, 2) ? 1 + below(w, 24) : 0;
    o->queue_capacity = below(w, 2) ? 0 : 1 + below(w, 8);
    o->seed = byte(w);
    o->threads = 1;
}

static void choose_policies(worker *w, pllm_engine_options *o) {
    const uint32_t dtypes[] = {PLLM_DTYPE_INT8, PLLM_DTYPE_F16, PLLM_DTYPE_FP8};
    const uint32_t weights[] = {PLLM_WEIGHTS_F16, PLLM_WEIGHTS_INT8, PLLM_WEIGHTS_INT4, PLLM_WEIGHTS_INT4_ASYMMETRIC};
    o->kv_dtype = one_in(w, 3) ? dtypes[below(w, 3)] : PLLM_DTYPE_AUTO;
    // The small models' columns are not whole groups: they have no int4.
    uint32_t formats = o->model_path == golden_dir ? 2 : 4;
    o->weight_format = one_in(w, 4) ? weights[below(w, formats)] : PLLM_WEIGHTS_AS_STORED;
    bool grouped = o->weight_format == PLLM_WEIGHTS_INT4 || o->weight_format == PLLM_WEIGHTS_INT4_ASYMMETRIC;
    o->weight_group = grouped && below(w, 2) ? 32 << below(w, 2) : 0;
    o->order = below(w, 3);
    o->batching = below(w, 4);
    o->allocation = below(w, 2);
    // What depends on the time does not repeat: nobody waits for a day.
    o->ageing_ms = world.may_start ? below(w, 4) : 24 * 60 * 60 * 1000;
    if (below(w, 2)) o->prefill_budget = 1 + below(w, 32);
    if (one_in(w, 3)) o->max_waiting_requests = 1 + below(w, 3);
    if (one_in(w, 3)) o->max_waiting_tokens = 1 + byte(w);
    if (one_in(w, 8)) o->max_prompt_bytes = 1 + byte(w);
}

static void choose_memory(worker *w, pllm_engine_options *o) {
    if (below(w, 2)) {
        // What moving costs depends on the time.
        o->preemption = world.may_start && below(w, 2) ? PLLM_PREEMPTION_AUTO : PLLM_PREEMPTION_SWAP;
        o->swap_bytes = (uint64_t)(1 + below(w, 16)) << (12 + below(w, 5));
    }
    o->budget = one_in(w, 3) ? world.budgets[below(w, ARENAS)] : NULL;
    if (o->budget) o->kv_bytes = 0;
}

// Most of these are refused; those that are not stay small, unless nothing is made.
static void spoil_an_option(worker *w, pllm_engine_options *o, bool dry) {
    static const uint32_t impossible[] = {0, UINT32_MAX, (1 << 20) + 1, 1u << 31};
    uint32_t value = dry ? odd_u32(w) : impossible[below(w, COUNT(impossible))];
    switch (below(w, 24)) {
    case 0: o->kv_bytes = dry ? odd_u64(w) : below(w, 200); break;
    case 1: o->block_size = odd_u32(w); break;
    case 2: o->kv_dtype = odd_u32(w); break;
    case 3: o->max_model_len = odd_u32(w); break;
    case 4: o->max_batch_tokens = value; break;
    case 5: o->max_seqs = value; break;
    case 6: o->prefill_chunk = odd_u32(w); break;
    case 7: o->threads = value; break;
    case 8: o->isa = odd_u32(w); break;
    case 9: o->flags = odd_u32(w); break;
    case 10: o->reserved = odd_u32(w); break;
    case 11: o->order = odd_u32(w); break;
    case 12: o->batching = odd_u32(w); break;
    case 13: o->allocation = odd_u32(w); break;
    case 14: o->preemption = PLLM_PREEMPTION_AUTO + 1 + odd_u32(w) % 8; break;
    case 15: o->swap_bytes = 0, o->swap_path = "/nonexistent"; break;
    case 16: *(below(w, 2) ? &o->trace_path : &o->journal_path) = below(w, 2) ? "" : "/nonexistent/file"; break;
    case 17: o->packed_path = below(w, 2) ? "" : dry ? "/nonexistent" : "/dev/null"; break;
    case 18: o->cpus = below(w, 2) ? "0-" : "1023,1022"; break;
    case 19: o->device = below(w, 2) ? "cuda:99" : "cuda:", o->device_len = PLLM_NUL_TERMINATED; break;
    case 20: o->memory_fraction = below(w, 2) ? 0.5f : -1.0f; break;
    case 21: o->weight_format = odd_u32(w); break;
    case 22: o->weight_group = odd_u32(w); break;
    default: o->queue_capacity = odd_u64(w); break;
    }
}

// The options as the library will see them are in `known`.
static pllm_engine_options *any_options(worker *w, bool dry, loading *l, pllm_engine_options *known, uint64_t *declared) {
    pllm_engine_options *at = any_input_struct(w, &options_type, known, declared);
    choose_model(w, known);
    choose_sizes(w, known);
    choose_policies(w, known);
    choose_memory(w, known);
    while (one_in(w, dry ? 2 : 6)) spoil_an_option(w, known, dry);
    if (below(w, 2)) {
        known->progress = watch_loading;
        known->progress_data = l;
        l->cancel_at = one_in(w, 4) ? 1 + below(w, 12) : 0;
    }
    return filled(at, &options_type, known, *declared);
}

static void plan(worker *w) {
    pllm_engine_options known;
    pllm_plan plan;
    uint64_t declared;
    loading l = {0};
    const pllm_engine_options *options = any_options(w, true, &l, &known, &declared);
    if (one_in(w, 32)) options = NULL;
    output_struct out = any_output_struct(w, 80, sizeof plan);
    int32_t code = TRY(pllm_engine_plan, options, out.at);
    EXPECT(code || options, "a plan of NULL was made");
    EXPECT(l.calls == 0, "a dry run told of its loading");
    if (!judge_struct(&out, code, &plan)) return;
    w->hash = mix_bytes(w->hash, &plan, sizeof plan);
    EXPECT(plan.max_model_len <= plan.blocks * plan.block_size && plan.full_sequences >= 1 &&
               plan.kv_bytes == plan.blocks * plan.block_bytes && plan.max_blocks >= plan.blocks,
           "a plan's numbers contradict each other");
}

static void learn(worker *w, engine_slot *e) {
    pllm_model_info info = {.struct_size = sizeof info};
    EXPECT(TRY(pllm_engine_get_model_info, e->engine, &info) == 0, "a new engine says nothing of its model");
    e->vocab = (uint32_t)info.vocab_size;
    e->max_model_len = info.max_model_len;
}

static void create(worker *w) {
    engine_slot *e = &world.engines[below(w, ENGINES)];
    if (e->engine) return;
    pllm_engine_options known;
    uint64_t declared;
    loading l = {0};
    const pllm_engine_options *options = any_options(w, false, &l, &known, &declared);
    if (one_in(w, 32)) options = NULL;
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_engine_create, options, out ? (pllm_engine **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(code || options, "an engine was made of NULL");
    bool cancelled = l.cancel_at != 0 && l.calls == l.cancel_at;
    EXPECT((code == PLLM_E_CANCELLED) == cancelled, "%u calls of progress, code %d", l.calls, code);
    if (code) return;
    *e = (engine_slot){.engine = out->pointer, .number = ++world.last_number, .options = known};
    e->has_text = !(known.flags & PLLM_ENGINE_SKIP_TOKENIZER);
    e->own = (queue_slot){.queue = CALL(pllm_engine_queue, e->engine), .number = ++world.last_number, .engine = e->number};
    EXPECT(e->own.queue, "an engine has no queue");
    learn(w, e);
}

static void info(worker *w) {
    engine_slot *e = any_engine(w);
    pllm_model_info info;
    output_struct out = any_output_struct(w, 96, sizeof info);
    int32_t code = TRY(pllm_engine_get_model_info, e->engine, out.at);
    EXPECT(e->engine ? !code == is_possible(&out) : code == PLLM_E_INVALID_ARGUMENT, "info of an engine: code %d", code);
    if (!judge_struct(&out, code, &info)) return;
    EXPECT(is_utf8(info.architecture, info.architecture_len) && is_utf8(info.isa, info.isa_len), "the model's info is not UTF-8");
    EXPECT(info.vocab_size == e->vocab && info.max_model_len <= info.max_positions, "the model's info changed");
    w->hash = mix_bytes(w->hash, info.eos_token_ids, info.eos_token_ids_len * sizeof(uint32_t));
}

static uint64_t ended_of(const pllm_stats *s) {
    return s->finished_stop + s->finished_length + s->finished_abort + s->finished_error + s->finished_deadline;
}

static void check_stats(const engine_slot *e, const pllm_stats *s) {
    EXPECT(s->blocks_used + s->blocks_free + s->blocks_cached == s->blocks_total, "the stats' blocks do not add up");
    EXPECT(s->paused <= s->waiting && s->slot_utilization >= 0 && s->slot_utilization <= 1, "the stats are impossible");
    uint64_t ended = ended_of(s);
    totals sum = ledger_totals(e->number);
    bool too_many = ended > sum.turns + sum.optional || s->waiting + s->running + s->idle > sum.sequences + ledger_pins(e->number);
    EXPECT(world.racing || !too_many, "the stats count more requests than there were");
    EXPECT(s->prefix_hits <= s->prefix_queries, "more prefixes were found than were looked for");
    bool swaps_add_up = s->preemptions_swapped <= s->preemptions && s->swap_blocks_used <= s->swap_blocks_total && s->swap_failures == 0;
    EXPECT(swaps_add_up && !s->swapped == !s->swap_blocks_used,
           "the stats of the host tier contradict each other: %llu of %llu preempted, %llu sequences in %llu of %llu blocks, %llu failures",
           LLU(s->preemptions_swapped), LLU(s->preemptions), LLU(s->swapped), LLU(s->swap_blocks_used), LLU(s->swap_blocks_total),
           LLU(s->swap_failures));
}

static void stats(worker *w) {
    engine_slot *e = any_engine(w);
    pllm_stats stats;
    output_struct out = any_output_struct(w, 128, sizeof stats);
    int32_t code = TRY(pllm_engine_get_stats, e->engine, out.at);
    EXPECT(e->engine ? !code == is_possible(&out) : code == PLLM_E_INVALID_ARGUMENT, "stats of an engine: code %d", code);
    if (!judge_struct(&out, code, &stats)) return;
    w->hash = mix_bytes(w->hash, &stats, sizeof stats);
    check_stats(e, &stats);
}

static void step(worker *w) {
    engine_slot *e = any_engine(w);
    for (unsigned times = 1 + below(w, 4); times > 0; times--) {
        pllm_step step;
        w->places = 0;
        output_struct out = any_output_struct(w, 40, sizeof step);
        int32_t code = TRY(pllm_engine_step, e->engine, out.at);
        bool is_fine = e->engine && is_possible(&out) && !world.racing;
        EXPECT(!is_fine || code == (e->started ? PLLM_E_BUSY : 0), "step failed with %d", code);
        if (judge_struct(&out, code, &step)) w->hash = mix_bytes(w->hash, &step, sizeof step);
    }
}

static void start(worker *w) {
    engine_slot *e = any_engine(w);
    if (!world.may_start && e->engine) return;
    int32_t code = TRY(pllm_engine_start, e->engine);
    if (!e->engine || world.racing) return;
    EXPECT(code == (e->started ? PLLM_E_BUSY : 0), "start failed with %d", code);
    e->started = true;
}

static void stop(worker *w) {
    engine_slot *e = any_engine(w);
    int32_t code = TRY(pllm_engine_stop, e->engine);
    EXPECT(!code == !!e->engine, "stop failed with %d", code);
    if (e->engine && !world.racing) e->started = false;
}

static void stop_for_good(worker *w, engine_slot *e) {
    EXPECT(TRY(pllm_engine_stop, e->engine) == 0, "stop failed");
    e->started = false;
}

// ---- requests ----------------------------------------------------------------------------------------------------------

// Up to three texts; half of the time their lengths are given by NULs alone.
typedef struct {
    const char **texts;
    const uint64_t *lens;
    uint64_t count;
} text_list;

static text_list any_text_list(worker *w, const char *const *likely, unsigned likely_len) {
    text_list list = {.count = below(w, 4)};
    uint64_t *lens = guarded(w, list.count * sizeof *lens);
    bool all_end_with_nul = true;
    list.texts = guarded(w, list.count * sizeof *list.texts);
    for (uint64_t i = 0; i < list.count; i++) {
        argument text = one_in(w, 4) ? any_text(w) : (argument){likely[below(w, likely_len)], PLLM_NUL_TERMINATED, false};
        list.texts[i] = text.data;
        lens[i] = text.len;
        all_end_with_nul &= text.len == PLLM_NUL_TERMINATED;
    }
    list.lens = all_end_with_nul && below(w, 2) ? NULL : lens;
    if (one_in(w, 16)) list.texts = NULL;
    return list;
}

static const char *const likely_stops[] = {"e", " the", ".", "capital", "\xE6\x97\xA5"};

static void choose_stops(worker *w, const engine_slot *e, pllm_sampling *s) {
    if (one_in(w, 3)) {
        argument ids = any_tokens(w, e->vocab);
        s->stop_token_ids = ids.data;
        s->stop_token_ids_len = ids.len;
    }
    if (!one_in(w, e->has_text ? 4 : 32)) return;
    text_list stops = any_text_list(w, likely_stops, COUNT(likely_stops));
    s->stop = stops.texts;
    s->stop_lens = stops.lens;
    s->stop_count = stops.count;
}

static void choose_exclusions(worker *w, const engine_slot *e, pllm_sampling *s) {
    if (one_in(w, 8)) {
        s->logit_bias_len = below(w, 4);
        pllm_logit_bias *biases = guarded(w, s->logit_bias_len * sizeof *biases);
        for (uint64_t i = 0; i < s->logit_bias_len; i++)
            biases[i] = (pllm_logit_bias){(uint32_t)number(w, 2) % (e->vocab ? e->vocab : 8),
                                          one_in(w, 8) ? odd_float(w) : (float)byte(w) - 100};
        s->logit_bias = one_in(w, 16) ? NULL : biases;
    }
    if (one_in(w, 12)) {
        argument ids = any_tokens(w, e->vocab);
        s->allowed_token_ids = ids.data;
        s->allowed_token_ids_len = ids.len;
    }
    if (one_in(w, 12)) {
        s->bad_words_ids_len = below(w, 3);
        pllm_token_list *lists = guarded(w, s->bad_words_ids_len * sizeof *lists);
        for (uint64_t i = 0; i < s->bad_words_ids_len; i++) {
            argument ids = any_tokens(w, e->vocab);
            lists[i] = (pllm_token_list){ids.data, ids.len};
        }
        s->bad_words_ids = one_in(w, 16) ? NULL : lists;
    }
    if (!one_in(w, e->has_text ? 12 : 64)) return;
    text_list words = any_text_list(w, likely_stops, COUNT(likely_stops));
    s->bad_words = words.texts;
    s->bad_word_lens = words.lens;
    s->bad_word_count = words.count;
}

static const pllm_dry *any_dry(worker *w) {
    static const char *const likely[] = {"\n", ":", "\"", "e"};
    pllm_dry d;
    uint64_t declared;
    pllm_dry *at = any_input_struct(w, &dry_type, &d, &declared);
    d.allowed_length = below(w, 4);
    d.penalty_last_n = below(w, 2) ? 0 : byte(w);
    if (one_in(w, 8)) d.multiplier = odd_float(w);
    if (one_in(w, 8)) d.base = odd_float(w);
    if (one_in(w, 2)) {
        text_list breakers = any_text_list(w, likely, COUNT(likely));
        d.sequence_breakers = breakers.texts;
        d.sequence_breaker_lens = breakers.lens;
        d.sequence_breaker_count = breakers.count;
    }
    return filled(at, &dry_type, &d, declared);
}

static void choose_grammar(worker *w, pllm_sampling *s) {
    static const struct {
        uint32_t kind;
        const char *grammar;
    } likely[] = {
        {PLLM_GRAMMAR_JSON_SCHEMA, "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}}, \"required\": [\"a\"]}"},
        {PLLM_GRAMMAR_JSON_SCHEMA, "{\"enum\": [1, \"two\", null]}"}, {PLLM_GRAMMAR_JSON_SCHEMA, "{\"type\": 7}"},
        {PLLM_GRAMMAR_JSON_OBJECT, NULL}, {PLLM_GRAMMAR_REGEX, "[a-c]{2,5}x?"}, {PLLM_GRAMMAR_REGEX, "(("},
        {PLLM_GRAMMAR_LARK, "start: \"a\" | \"b\" start"}, {PLLM_GRAMMAR_LARK, "start: start"}, {PLLM_GRAMMAR_NONE, "a"},
    };
    unsigned i = below(w, COUNT(likely) + 3);
    if (i < COUNT(likely)) {
        s->grammar_kind = likely[i].kind;
        s->grammar = likely[i].grammar;
        return;
    }
    text_list choices = any_text_list(w, likely_stops, COUNT(likely_stops));
    s->grammar_kind = one_in(w, 8) ? odd_u32(w) : PLLM_GRAMMAR_CHOICE;
    s->choices = choices.texts;
    s->choice_lens = choices.lens;
    s->choice_count = choices.count;
    if (!one_in(w, 4)) return;
    argument text = any_text(w);
    s->grammar_kind = 1 + below(w, 5);
    s->grammar = text.data;
    s->grammar_len = text.len;
}

static void choose_penalties(worker *w, pllm_sampling *s) {
    switch (below(w, 9)) {
    case 0: s->typical_p = (float)(1 + below(w, 16)) / 16; break;
    case 1: s->top_n_sigma = (float)below(w, 64) / 16; break;
    case 2: s->xtc_probability = (float)below(w, 17) / 16; break;
    case 3: s->mirostat_tau = (float)below(w, 64) / 8, s->temperature = 1, s->top_k = 0, s->top_p = 1; break;
    case 4: s->presence_penalty = (float)below(w, 65) / 16 - 2; break;
    case 5: s->frequency_penalty = (float)below(w, 65) / 16 - 2; break;
    case 6: s->repetition_penalty = (float)(1 + below(w, 64)) / 16; break;
    case 7: s->no_repeat_ngram_size = below(w, 5); break;
    default: s->dry = any_dry(w); break;
    }
}

// What outputs hold. `afresh`: there is a prompt to report.
static void choose_reports(worker *w, pllm_sampling *s, bool afresh) {
    if (s->flags & PLLM_SAMPLING_LOGPROBS) s->top_logprobs = below(w, 2) ? below(w, 5) : 0;
    if (one_in(w, 6)) s->flags |= PLLM_SAMPLING_INCLUDE_STOP;
    if (one_in(w, afresh ? 6 : 64)) s->flags |= PLLM_SAMPLING_ECHO;
    if (one_in(w, afresh ? 6 : 64)) s->flags |= PLLM_SAMPLING_PROMPT_LOGPROBS, s->prompt_top_logprobs = below(w, 4);
    s->output_kind = one_in(w, 3) ? 1 + below(w, 2) : PLLM_OUTPUT_DELTA;
}

static void spoil_the_sampling(worker *w, pllm_sampling *s) {
    float *const numbers[] = {&s->temperature,       &s->top_p,         &s->min_p,         &s->typical_p,
                              &s->top_n_sigma,       &s->xtc_probability, &s->xtc_threshold, &s->mirostat_tau,
                              &s->mirostat_eta,      &s->presence_penalty, &s->frequency_penalty, &s->repetition_penalty};
    uint32_t *const counts[] = {&s->top_k,    &s->max_tokens,           &s->min_tokens,   &s->flags,
                                &s->reserved, &s->no_repeat_ngram_size, &s->top_logprobs, &s->prompt_top_logprobs,
                                &s->output_kind, &s->grammar_kind};
    unsigned i = below(w, COUNT(numbers) + COUNT(counts) + 1);
    if (i < COUNT(numbers)) *numbers[i] = odd_float(w);
    else if (i < COUNT(numbers) + COUNT(counts)) *counts[i - COUNT(numbers)] = odd_u32(w);
    else s->seed = odd_u64(w);
}

static void note_sampling(turn *t, const pllm_sampling *s) {
    t->max_tokens = s->max_tokens;
    t->logprobs = s->flags & PLLM_SAMPLING_LOGPROBS;
    t->prompt_logprobs = s->flags & PLLM_SAMPLING_PROMPT_LOGPROBS;
    t->echo = s->flags & PLLM_SAMPLING_ECHO;
    t->grammar = s->grammar_kind != PLLM_GRAMMAR_NONE;
    t->top = s->top_logprobs, t->prompt_top = s->prompt_top_logprobs, t->kind = s->output_kind;
}

// What the library is to make of it goes to `t`.
static const pllm_sampling *any_sampling(worker *w, const engine_slot *e, bool afresh, turn *t) {
    pllm_sampling s;
    uint64_t declared;
    pllm_sampling *at = any_input_struct(w, &sampling_type, &s, &declared);
    s.temperature = below(w, 2) ? 0 : (float)below(w, 32) / 16;
    s.top_k = below(w, 2) ? below(w, 64) : 0;
    s.top_p = below(w, 2) ? 1 : (float)(1 + below(w, 16)) / 16;
    s.max_tokens = 1 + below(w, 12);
    s.min_tokens = one_in(w, 4) ? below(w, s.max_tokens + 1) : 0;
    s.flags = byte(w) & (PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS);
    if (s.flags & PLLM_SAMPLING_SEED) s.seed = byte(w);
    choose_stops(w, e, &s);
    choose_exclusions(w, e, &s);
    choose_reports(w, &s, afresh);
    if (one_in(w, 4)) choose_penalties(w, &s);
    if (one_in(w, e->has_text ? 10 : 64)) choose_grammar(w, &s);
    while (one_in(w, 8)) spoil_the_sampling(w, &s);
    filled(at, &sampling_type, &s, declared);
    note_sampling(t, &s);
    return at;
}

// ---- hooks -------------------------------------------------------------------------------------------------------------

typedef struct {
    uint64_t vocab;
    unsigned habit;
} hook_notes;

enum { HABITS = 6 };
static hook_notes notes[ENGINES * 64][HABITS];  // by the engine's number; they live as long as any request

// The same for the same tokens, so that what comes of it is the same.
static void edit(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits, uint64_t vocab_size) {
    const hook_notes *n = data;
    if (!n) return;  // a struct_size between logits_hook and hook_data
    uint64_t vocab = n->vocab + (sabotage == a_hook_sees_another_vocabulary);
    EXPECT(vocab == vocab_size && sequence && tokens_len, "a hook was told of %llu tokens of sequence %llu and %llu logits",
           LLU(tokens_len), LLU(sequence), LLU(vocab_size));
    for (uint64_t i = 0; i < tokens_len; i++) EXPECT(tokens[i] < vocab_size, "a hook was shown token %u", tokens[i]);
    uint64_t chosen = mix(tokens_len, tokens[tokens_len - 1]) % vocab_size;
    switch (n->habit) {
    case 0: break;
    case 1: logits[chosen] += 10; break;
    case 2:
        for (uint64_t i = 0; i < vocab_size; i++) logits[i] = i == chosen ? 0 : -INFINITY;
        break;
    case 3: memset(logits, 0, vocab_size * sizeof *logits); break;
    case 4: logits[chosen] = tokens_len % 5 ? logits[chosen] : NAN; break;
    default:
        for (uint64_t i = 0; tokens_len % 7 == 0 && i < vocab_size; i++) logits[i] = -INFINITY;
    }
}

static void choose_hook(worker *w, const engine_slot *e, pllm_logits_hook *hook, void **data) {
    if (!one_in(w, 8) || e->number >= COUNT(notes)) return;
    unsigned habit = below(w, HABITS);
    hook_notes *n = &notes[e->number][habit];
    *n = (hook_notes){e->vocab, habit};
    *hook = edit;
    *data = n;
}

// ---- requests ----------------------------------------------------------------------------------------------------------

static void choose_prompt(worker *w, const engine_slot *e, pllm_request *q, turn *t) {
    bool both = one_in(w, 64), neither = !both && one_in(w, 64);
    bool as_text = e->has_text ? below(w, 2) : one_in(w, 16);
    if (neither) return;
    if (as_text || both) {
        argument text = any_text(w);
        q->prompt = text.data;
        q->prompt_len = text.len;
    }
    if (!as_text || both) {
        argument tokens = any_tokens(w, e->vocab);
        q->prompt_token_ids = tokens.data;
        q->prompt_token_ids_len = tokens.len;
        if (tokens.data) t->prompt_tokens = tokens.len;
    }
}

// One tenant or the other, or none; sometimes a salt that must be refused.
static void choose_salt(worker *w, const uint8_t **salt, uint64_t *len) {
    static const uint8_t tenants[] = {1, 2};
    if (!one_in(w, 4)) return;
    *salt = one_in(w, 16) ? NULL : tenants + below(w, 2);
    *len = 1;
}

// Where outputs will go.
static const queue_slot *choose_queue(worker *w, const engine_slot *e, const pllm_queue **queue) {
    if (below(w, 2)) return &e->own;
    const queue_slot *to = live_queue(w);
    *queue = to->queue;
    return to->queue ? to : &e->own;
}

static const pllm_beam *any_beam(worker *w, unsigned *width) {
    pllm_beam b;
    uint64_t declared;
    pllm_beam *at = any_input_struct(w, &beam_type, &b, &declared);
    b.width = 2 + below(w, 3);
    b.length_penalty = (float)below(w, 9) / 4 - 1;
    b.early_stopping = below(w, 3);
    if (one_in(w, 4)) b.groups = 2, b.diversity_penalty = 0.5f;
    if (one_in(w, 16)) b.diversity_penalty = odd_float(w);
    if (one_in(w, 16)) b.width = odd_u32(w);
    if (one_in(w, 16)) b.early_stopping = odd_u32(w);
    filled(at, &beam_type, &b, declared);
    *width = b.width;
    return at;
}

static void choose_branching(worker *w, pllm_request *q, unsigned *beams) {
    if (one_in(w, 3)) q->n = 1 + below(w, 3);
    if (one_in(w, 12)) q->best_of = q->n + below(w, 3);
    if (one_in(w, 12)) q->beam = any_beam(w, beams);
    if (one_in(w, 32)) q->n = odd_u32(w);
    if (one_in(w, 32)) q->best_of = odd_u32(w);
}

// As the library sees it; what is too wide to be written down is refused in any case.
static void note_branching(request *r, const pllm_request *q, unsigned beams) {
    unsigned samples = q->best_of ? q->best_of : q->n;
    unsigned width = q->beam ? beams : samples;
    if (width == 0 || width > MOST_SEQUENCES || q->n > width) return;
    r->width = width;
    r->results = q->n;
    r->branching = q->beam ? BEAMS : samples > q->n ? BEST : SAMPLES;
}

// Each result's first turn, before the call that begins it.
static void note_turns(request *r, turn t) {
    if (r->branching == BEST || r->branching == BEAMS) t.kind = PLLM_OUTPUT_FINAL;  // they come at the end
    for (unsigned i = 0; i < r->width; i++) {
        account *a = &r->accounts[i];
        a->now = t;
        if (r->branching != BEST && i < r->results) ledger_begin(a, &t);
    }
}

// What depends on the time does not repeat.
static int64_t any_deadline(worker *w) {
    if (!one_in(w, 6)) return 0;
    if (one_in(w, 8)) return (int64_t)odd_u64(w) | INT64_MIN;
    return !world.may_start ? INT64_MAX - below(w, 2) : one_in(w, 4) ? INT64_MAX : 1 + below(w, 8);
}

static void choose_what_to_ask(worker *w, const engine_slot *e, pllm_request *q, turn *t, unsigned *beams) {
    choose_prompt(w, e, q, t);
    choose_hook(w, e, &q->logits_hook, &q->hook_data);
    choose_branching(w, q, beams);
    q->sampling = one_in(w, 16) ? NULL : any_sampling(w, e, true, t);
    if (one_in(w, 8)) q->truncate_prompt_tokens = 1 + below(w, 8);
}

// False: none is known for this engine.
static bool choose_a_question(worker *w, const engine_slot *e, pllm_request *q, turn *t) {
    pllm_sampling s;
    uint64_t declared;
    pllm_sampling *at = any_input_struct(w, &sampling_type, &s, &declared);
    if (!e->engine || !(t->answer = question_ask(&e->options, byte(w), q, &s))) return false;
    s.max_tokens = 1 + below(w, LONGEST_ANSWER);
    s.output_kind = below(w, 3);
    filled(at, &sampling_type, &s, declared);
    note_sampling(t, &s);
    t->prompt_tokens = q->prompt_token_ids_len;
    q->sampling = at;
    return true;
}

// Nothing changes between two calls.
static bool nobody_steps(void) {
    bool steps = world.racing;
    for (int i = 0; i < ENGINES; i++) steps |= world.engines[i].started;
    return !steps;
}

// What pllm_engine_predict_admission says of a request, where nothing can come in between.
typedef struct {
    bool holds;
    int32_t code;
    pllm_admission is;
} prospect;

// Nobody steps the engine but this program, nor another one that shares its budget.
static bool nothing_comes_between(worker *w, const engine_slot *e) {
    pllm_budget_info info = {.struct_size = sizeof info};
    if (!e->engine || e->started || world.racing) return false;
    EXPECT(TRY(pllm_budget_get_info, CALL(pllm_engine_budget, e->engine), &info) == 0, "an engine's budget has no state");
    return info.engines == 1 || nobody_steps();
}

static prospect ask_admission(worker *w, const engine_slot *e, const pllm_request *request) {
    prospect p = {.holds = nothing_comes_between(w, e)};
    output_struct out = any_output_struct(w, 48, sizeof p.is);
    p.code = TRY(pllm_engine_predict_admission, e->engine, request, out.at);
    EXPECT(p.code || e->engine, "a request was admitted by NULL");
    judge_struct(&out, p.code, &p.is);
    bool possible = p.is.admits <= 1 && p.is.fits_now <= p.is.admits && !isnan(p.is.first_token_seconds);
    EXPECT(p.code || possible, "an admission is impossible");
    p.holds &= is_possible(&out);
    if (sabotage == admission_promises_too_much && p.code) p.code = 0, p.is.admits = 1;
    return p;
}

// `code`: what adding the request answered. What only adding it finds out: a grammar is not compiled before.
static void judge_admission(const prospect *p, bool has_grammar, int32_t code) {
    int32_t expected = p->code ? p->code : p->is.admits ? 0 : PLLM_E_CAPACITY;
    bool found_out = !p->code && has_grammar && (code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_UNSUPPORTED);
    EXPECT(!p->holds || code == expected || found_out, "admit said %d (admits: %llu), and the request met %d", p->code, LLU(p->is.admits), code);
}

static void add(worker *w) {
    const engine_slot *e = any_engine(w);
    request *r = ledger_open();
    if (!r) return;
    pllm_request q;
    turn t = {.user_data = ledger_user_data()};
    unsigned beams = 0;
    uint64_t declared;
    pllm_request *at = any_input_struct(w, &request_type, &q, &declared);
    r->engine = e->number, r->vocab = e->vocab, r->max_model_len = e->max_model_len, r->has_text = e->has_text;
    const queue_slot *to = choose_queue(w, e, &q.queue);
    if (!one_in(w, 3) || !choose_a_question(w, e, &q, &t)) choose_what_to_ask(w, e, &q, &t, &beams);
    choose_salt(w, &q.cache_salt, &q.cache_salt_len);
    q.user_data = t.user_data;
    q.deadline_ms = any_deadline(w);
    q.priority = one_in(w, 64) ? (int32_t)odd_u32(w) : (int32_t)below(w, 201) - 100;
    q.flags = below(w, 2) ? PLLM_REQUEST_KEEP : one_in(w, 32) ? odd_u32(w) : 0;
    if (one_in(w, 64)) *(below(w, 2) ? &q.reserved : &q.reserved2) = odd_u32(w);
    if (below(w, 2)) q.text_flags = one_in(w, 8) ? odd_u32(w) : byte(w) % 4;
    filled(at, &request_type, &q, declared);
    if (!q.queue) to = &e->own;
    t.queue = to->number;
    t.keep = q.flags & PLLM_REQUEST_KEEP;
    t.has_deadline = q.deadline_ms > 0;
    if (q.truncate_prompt_tokens && t.prompt_tokens > q.truncate_prompt_tokens) t.prompt_tokens = q.truncate_prompt_tokens;
    note_branching(r, &q, beams);
    note_turns(r, t);
    bool is_newer = declared > sizeof q && declared <= PLACE_BYTES && one_in(w, 2);
    if (is_newer) ((char *)at)[declared - 1] = 1;
    if (one_in(w, 64)) at = NULL;
    prospect p = {.holds = false};
    if (below(w, 2)) p = ask_admission(w, e, at);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_engine_add_request, e->engine, at, out ? &out->number : NULL);
    judge_output(out, code, sizeof out->number);
    if (out) judge_admission(&p, t.grammar, code);
    bool in_range = q.deadline_ms >= 0 && q.priority >= -100 && q.priority <= 100;
    EXPECT(code || in_range, "a deadline of %lld ms and a priority of %d were accepted", (long long)q.deadline_ms, q.priority);
    EXPECT(code || (e->engine && to->engine == e->number && !is_newer), "a request was accepted that had to be refused");
    EXPECT(code || (r->width <= MOST_SEQUENCES && q.n == r->results), "a request of %u results was accepted", q.n);
    if (code) ledger_refused(r);
    else w->hash = mix(w->hash, out->number), ledger_accepted(r, out->number);
}

// Asks without adding.
static void admit(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_request q;
    turn unused = {0};
    unsigned beams = 0;
    uint64_t declared;
    pllm_request *at = any_input_struct(w, &request_type, &q, &declared);
    choose_what_to_ask(w, e, &q, &unused, &beams);
    q.deadline_ms = any_deadline(w);
    filled(at, &request_type, &q, declared);
    prospect p = ask_admission(w, e, at);
    EXPECT(p.code || q.deadline_ms >= 0, "a request whose deadline has passed was admitted");
}

static void abort_one(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = one_in(w, 8) ? 0 : ledger_any(e->number, number(w, 1));
    if (!id) id = odd_u64(w);
    bool ended = ledger_has_ended(e->number, id);
    int32_t code = TRY(pllm_engine_abort, e->engine, id);
    if (sabotage == a_stale_id_is_accepted && ended) code = 0;
    EXPECT(e->engine || code == PLLM_E_INVALID_ARGUMENT, "abort on NULL: %d", code);
    EXPECT(!e->engine || code == 0 || code == PLLM_E_NOT_FOUND, "abort failed with %d", code);
    EXPECT(code || (id != 0 && id < 1 << 16), "request %llu never was, and was aborted", LLU(id));
    EXPECT(!ended || code == PLLM_E_NOT_FOUND, "a request that had ended was aborted: %d", code);
}

// ---- sequences ---------------------------------------------------------------------------------------------------------

// Mostly one that there is or was on this engine.
static uint64_t any_sequence(worker *w, const engine_slot *e) {
    uint64_t id = one_in(w, 16) ? 0 : ledger_any(e->number, number(w, 1));
    // While others add requests an invented id must not become one of theirs.
    return id ? id : world.racing ? odd_u64(w) | 1 << 20 : odd_u64(w);
}

static whereabouts where_is(const engine_slot *e, const request *r, const account *a) {
    return !e->engine || !a ? GONE : ledger_whereabouts(r, a);
}

// What a call on a sequence may answer. `right`: nothing else is wrong with it.
static void judge_use(const engine_slot *e, const request *r, const account *a, whereabouts before, int32_t code, bool right,
                      const char *what) {
    if (!e->engine) {
        EXPECT(code == PLLM_E_INVALID_ARGUMENT, "%s on NULL: %d", what, code);
        return;
    }
    if (sabotage == a_freed_sequence_is_still_there && a && a->freed) code = 0;
    if (sabotage == a_kept_sequence_does_not_stay && before == IDLE) code = PLLM_E_NOT_FOUND;
    bool expected = code == 0 || code == PLLM_E_NOT_FOUND || code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_CAPACITY ||
                    code == PLLM_E_UNSUPPORTED;
    EXPECT(expected, "%s failed with %d", what, code);
    EXPECT(before != GONE || code != 0, "a sequence is gone, and was found: %s", what);
    EXPECT(before != IDLE || code != PLLM_E_NOT_FOUND, "sequence was to stay, and did not: %s", what);
    EXPECT(before != IDLE || !right || code == 0, "%s failed with %d on an idle sequence", what, code);
    bool looks_only = !strcmp(what, "get_info");
    EXPECT(code || looks_only || !r || r->branching != BEAMS, "one of several beams was changed: %s", what);
}

static void look_at_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    request *r;
    account *a = ledger_find(e->number, id, &r);
    whereabouts before = where_is(e, r, a);
    pllm_sequence_info info;
    output_struct out = any_output_struct(w, 32, sizeof info);
    int32_t code = TRY(pllm_sequence_get_info, e->engine, id, out.at);
    judge_use(e, r, a, before, code, is_possible(&out), "get_info");
    if (!judge_struct(&out, code, &info)) return;
    EXPECT(info.len > 0 && info.len <= r->max_model_len && info.idle <= 1, "a sequence's info is impossible");
    EXPECT(before != IDLE || info.idle == 1, "a sequence that has ended and was kept is not idle");
    EXPECT(info.request == (r->branching == CHILDREN ? id : r->id), "sequence %llu is of request %llu", LLU(id), LLU(info.request));
    w->hash = mix_bytes(w->hash, &info, sizeof info);
}

static void append_to_one(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    argument tokens = any_tokens(w, e->vocab);
    request *r;
    account *a = ledger_find(e->number, id, &r);
    whereabouts before = where_is(e, r, a);
    if (a) ledger_loosen(r, a);
    int32_t code = TRY(pllm_sequence_append, e->engine, id, tokens.data, tokens.len);
    EXPECT(code || !tokens.must_be_refused, "what had to be refused was appended");
    judge_use(e, r, a, before, code, false, "append");
}

static void rewind_one(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e), len = one_in(w, 8) ? odd_u64(w) : 1 + below(w, 24);
    request *r;
    account *a = ledger_find(e->number, id, &r);
    whereabouts before = where_is(e, r, a);
    if (a) ledger_loosen(r, a);
    int32_t code = TRY(pllm_sequence_rewind, e->engine, id, len);
    EXPECT(code || (len > 0 && len <= e->max_model_len), "a sequence was rewound to %llu tokens", LLU(len));
    judge_use(e, r, a, before, code, len == 1, "rewind");
}

static void free_sequence_of(worker *w, const engine_slot *e, uint64_t id) {
    request *r;
    account *a = ledger_find(e->number, id, &r);
    whereabouts before = where_is(e, r, a);
    int32_t code = TRY(pllm_sequence_free, e->engine, id);
    judge_use(e, r, a, before, code, true, "free");
    if (!code) a->freed = true;
}

static void free_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    free_sequence_of(w, e, any_sequence(w, e));
}

// One turn more, as the library sees it.
static void resume_one(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    request *r;
    account *a;
    if (!ledger_claim(e->number, id, &r, &a)) return;
    whereabouts before = where_is(e, r, a);
    pllm_resume q;
    uint64_t declared;
    pllm_resume *at = any_input_struct(w, &resume_type, &q, &declared);
    turn t = {.user_data = a ? a->now.user_data : 0, .keep = true};
    const queue_slot *to = choose_queue(w, e, &q.queue);
    choose_hook(w, e, &q.logits_hook, &q.hook_data);
    q.sampling = one_in(w, 8) ? NULL : any_sampling(w, e, false, &t);
    if (!below(w, 4)) q.flags &= ~(uint32_t)PLLM_REQUEST_KEEP;
    // A turn that may never have been must not be taken for this one.
    const turn *last = a && a->turns_len ? &a->turns[a->turns_len - 1] : NULL;
    bool told_apart = world.racing || (last && last->optional && last->ends == 0);
    if (told_apart || below(w, 2)) q.flags |= PLLM_RESUME_USER_DATA, q.user_data = ledger_user_data();
    // Who continues does so with parameters that the ledger does not know.
    if (one_in(w, 32)) q.flags ^= odd_u32(w) & ~(uint32_t)(PLLM_RESUME_USER_DATA | PLLM_RESUME_CONTINUE);
    if (one_in(w, 16)) q.text_flags = odd_u32(w);
    q.deadline_ms = any_deadline(w);
    bool by_default = !told_apart && one_in(w, 32);
    filled(at, &resume_type, &q, declared);
    if (by_default) pllm_resume_init(&q, sizeof q), t = (turn){.user_data = t.user_data, .keep = true};
    if (q.flags & PLLM_RESUME_USER_DATA) t.user_data = q.user_data;
    t.keep = q.flags & PLLM_REQUEST_KEEP;
    t.has_deadline = q.deadline_ms > 0;
    t.queue = q.queue ? to->number : a ? a->now.queue : 0;
    bool goes_nowhere = !q.queue && a && a->now.unheard;
    if (a && !ledger_begin(a, &t)) {
        ledger_let_go(a);
        return;
    }
    int32_t code = TRY(pllm_sequence_resume, e->engine, id, by_default ? NULL : at);
    judge_use(e, r, a, before, code, false, "resume");
    EXPECT(code || q.deadline_ms >= 0, "a sequence was resumed with a deadline of %lld ms", (long long)q.deadline_ms);
    EXPECT(code || !q.queue || to->engine == e->number, "a sequence was resumed into another engine's queue");
    EXPECT(code || world.racing || !goes_nowhere, "a sequence was resumed into a queue that is gone");
    if (a) ledger_begun(a, code == 0);
    ledger_let_go(a);
}

// Whether it runs, where that is certain.
typedef enum { RUNS, WAITS, WHO_KNOWS } activity;

static activity activity_of(worker *w, const engine_slot *e, uint64_t id) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    if (!e->engine || e->started || world.racing || TRY(pllm_sequence_get_info, e->engine, id, &info)) return WHO_KNOWS;
    return info.idle ? WAITS : RUNS;
}

static void note_children(request *r, const account *parent, const pllm_fork *q, activity of_parent) {
    for (unsigned i = 0; i < r->width; i++) {
        account *a = &r->accounts[i];
        a->now = parent ? parent->now : (turn){0};
        if (q->flags & PLLM_FORK_USER_DATA) a->now.user_data = q->user_data;
        a->now.loose = true;
        a->wild = parent && parent->wild;
        a->now.optional = of_parent != RUNS;
        if (of_parent != WAITS && !(q->flags & PLLM_FORK_IDLE)) ledger_begin(a, &a->now);
    }
}

static void fork_one(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    request *of, *r = ledger_open();
    account *parent;
    if (!r) return;
    r->engine = e->number, r->vocab = e->vocab, r->max_model_len = e->max_model_len, r->has_text = e->has_text;
    if (!ledger_claim(e->number, id, &of, &parent)) {
        ledger_refused(r);
        return;
    }
    whereabouts before = where_is(e, of, parent);
    activity of_parent = activity_of(w, e, id);
    pllm_fork q;
    uint64_t declared;
    w->places = 0;
    pllm_fork *at = any_input_struct(w, &fork_type, &q, &declared);
    // While others resume the parent elsewhere, where it writes to is not known.
    const queue_slot *to = choose_queue(w, e, &q.queue);
    if (world.racing && !q.queue) q.queue = e->own.queue, to = &e->own;
    q.n = one_in(w, 16) ? (below(w, 2) ? 0 : UINT32_MAX) : 1 + below(w, 3);
    if (!below(w, 3)) q.at = one_in(w, 8) ? odd_u64(w) : 1 + below(w, 24);
    if (below(w, 2)) q.flags |= PLLM_FORK_SEED, q.seed = byte(w);
    if (one_in(w, 3)) q.flags |= PLLM_FORK_IDLE;
    if (world.racing || below(w, 2)) q.flags |= PLLM_FORK_USER_DATA, q.user_data = ledger_user_data();
    if (one_in(w, 64)) q.flags = odd_u32(w);
    bool by_default = !world.racing && one_in(w, 32);
    filled(at, &fork_type, &q, declared);
    if (by_default) pllm_fork_init(&q, sizeof q);
    bool is_possible_n = q.n > 0 && q.n <= MOST_SEQUENCES;
    r->branching = CHILDREN;
    r->width = r->results = is_possible_n ? q.n : 1;
    note_children(r, parent, &q, of_parent);
    bool goes_nowhere = !q.queue && parent && parent->now.unheard;
    for (unsigned i = 0; q.queue && i < r->width; i++) {
        r->accounts[i].now.queue = to->number, r->accounts[i].now.unheard = false;
        if (r->accounts[i].turns_len) r->accounts[i].turns[0].queue = to->number, r->accounts[i].turns[0].unheard = false;
    }
    uint64_t *out = one_in(w, 32) ? NULL : guarded(w, r->width * sizeof *out);
    int32_t code = TRY(pllm_sequence_fork, e->engine, id, by_default ? NULL : at, out);
    EXPECT(!out || !code || is_poison(out, r->width * sizeof *out), "the out parameter was touched by a call that failed with %d", code);
    judge_use(e, of, parent, before, code, false, "fork");
    EXPECT(code || (out && is_possible_n), "a fork into %u was accepted", q.n);
    EXPECT(code || !q.queue || to->engine == e->number, "a fork was made into another engine's queue");
    EXPECT(code || world.racing || !goes_nowhere, "a fork was made into a queue that is gone");
    for (unsigned i = 0; !code && i < r->width; i++) EXPECT(out[i] == out[0] + i, "children's ids do not follow each other");
    if (code) ledger_refused(r);
    else w->hash = mix(w->hash, out[0]), ledger_accepted(r, out[0]);
    ledger_let_go(parent);
}

// ---- states --------------------------------------------------------------------------------------------------------------

static void export_one(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    const pllm_queue *queue = NULL;
    const queue_slot *to = choose_queue(w, e, &queue);
    int32_t code = TRY(pllm_sequence_export, e->engine, id, queue);
    EXPECT(code || e->engine, "a sequence of NULL was exported");
    EXPECT(code || !queue || to->engine == e->number, "a sequence was exported into another engine's queue");
    if (!world.racing) w->hash = mix(w->hash, (uint64_t)code);
}

// The last one that was exported, mostly bent somewhere; what is taken is let go at once.
static void import_one(worker *w) {
    static _Thread_local unsigned char bytes[1 << 20];
    const engine_slot *e = any_engine(w);
    uint64_t len = ledger_state(bytes, sizeof bytes);
    bool bent = below(w, 4);
    if (bent && len) bytes[(uint64_t)below(w, 256) * len / 256] ^= (unsigned char)(1 + below(w, 255));
    if (one_in(w, 8)) len = len * below(w, 256) / 256, bent = true;
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_sequence_import, e->engine, one_in(w, 32) ? NULL : bytes, len, NULL, out ? &out->number : NULL);
    judge_output(out, code, sizeof out->number);
    EXPECT(code || !bent, "a state that was bent was taken");
    if (code) return;
    code = TRY(pllm_sequence_free, e->engine, out->number);
    EXPECT(!code || world.racing, "an imported sequence could not be freed: %d", code);
}

// ---- pins --------------------------------------------------------------------------------------------------------------

static void pin_one(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_pin q;
    pllm_request prompt;
    uint64_t declared;
    pllm_pin *at = any_input_struct(w, &pin_type, &q, &declared);
    pllm_request_init(&prompt, sizeof prompt);
    choose_prompt(w, e, &prompt, &(turn){0});
    q.prompt = prompt.prompt, q.prompt_len = prompt.prompt_len;
    q.prompt_token_ids = prompt.prompt_token_ids, q.prompt_token_ids_len = prompt.prompt_token_ids_len;
    choose_salt(w, &q.cache_salt, &q.cache_salt_len);
    q.priority = below(w, 4);
    // What depends on the time does not repeat.
    if (world.may_start && one_in(w, 2)) q.time_to_live_ms = below(w, 3);
    if (one_in(w, 8)) q.time_to_live_ms = UINT64_MAX - below(w, 2);
    if (one_in(w, 8)) q.text_flags = odd_u32(w);
    filled(at, &pin_type, &q, declared);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_prefix_pin, e->engine, one_in(w, 64) ? NULL : at, out ? &out->number : NULL);
    judge_output(out, code, sizeof out->number);
    EXPECT(code || e->engine, "a prompt was pinned on NULL");
    if (!code) w->hash = mix(w->hash, out->number), ledger_pinned(e->number, out->number);
}

static void unpin(worker *w, const engine_slot *e, pin_slot *pin, uint64_t id) {
    bool again = pin && pin->unpinned && !world.racing;
    int32_t code = TRY(pllm_prefix_unpin, e->engine, id);
    if (sabotage == a_pin_is_unpinned_twice && again) code = 0;
    EXPECT(e->engine ? code == 0 || code == PLLM_E_NOT_FOUND : code == PLLM_E_INVALID_ARGUMENT, "unpin failed with %d", code);
    EXPECT(code || !again, "pin %llu was unpinned before, and could be again", LLU(id));
    if (pin) pin->unpinned = true;
}

static void unpin_one(worker *w) {
    const engine_slot *e = any_engine(w);
    pin_slot *pin = one_in(w, 8) ? NULL : ledger_pin(e->number, byte(w));
    unpin(w, e, pin, pin ? pin->id : odd_u64(w) | 1 << 20);
}

// Those too that were not written down.
static void unpin_all(worker *w, const engine_slot *e) {
    for (unsigned i = 0; i < MOST_PINS; i++) {
        pin_slot *pin = ledger_pin(e->number, i);
        if (pin && !pin->unpinned) unpin(w, e, pin, pin->id);
    }
}

// ---- queues ------------------------------------------------------------------------------------------------------------

static void create_queue(worker *w) {
    queue_slot *q = w->index ? &queues_of_racer(w->index)[below(w, QUEUES_OF_RACER)] : &world.queues[below(w, QUEUES)];
    if (q->queue) return;
    const engine_slot *e = any_engine(w);
    uint64_t capacity = one_in(w, 8) ? odd_u64(w) : 1 + below(w, 8);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_queue_create, e->engine, capacity, out ? (pllm_queue **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && capacity && out), "a queue of capacity %llu: %d", LLU(capacity), code);
    if (!code) *q = (queue_slot){.queue = out->pointer, .number = ++world.last_number, .engine = e->number};
}

static void sabotaged(pllm_output *o) {
    if (sabotage == a_finish_reason_is_unknown) o->finish_reason = 6;
    if (sabotage == a_deadline_passes_unasked && o->finish_reason == PLLM_FINISH_LENGTH) o->finish_reason = PLLM_FINISH_DEADLINE;
    if (sabotage == user_data_is_changed) o->user_data ^= 1 << 20;
    if (sabotage == an_index_is_wrong) o->index = 99;
    if (sabotage == a_sequence_has_another_request) o->request++;
    if (sabotage == a_list_is_too_short && o->top_logprobs_len) o->top_logprobs_len--;
    if (sabotage == a_log_probability_is_missing) o->logprobs = NULL;
    if (sabotage == half_a_character_comes && o->text) o->text = "\xE6\x97", o->text_len = 2;
    if (sabotage == a_token_is_lost && o->tokens) {
        o->tokens = NULL, o->logprobs = NULL, o->top_logprobs = NULL;
        o->tokens_len = o->top_logprobs_len = 0;
    }
}

static void take(worker *w, queue_slot *q, const pllm_outputs *outputs) {
    uint64_t len = CALL(pllm_outputs_len, outputs);
    const pllm_output *first = CALL(pllm_outputs_get, outputs, 0);
    for (uint64_t i = 0; i < len; i++) {
        const pllm_output *o = CALL(pllm_outputs_get, outputs, i);
        EXPECT((const char *)o == (const char *)first + i * first->struct_size, "a batch's outputs do not lie in a row");
        pllm_output copy = *o;
        bool last = o->finish_reason != PLLM_FINISH_NONE;
        if (sabotage) sabotaged(&copy);
        if (sabotage == a_last_output_is_lost && last) continue;
        if (sabotage == a_sample_is_lost && o->index) continue;
        if (sabotage == an_output_comes_before_the_end && o->finish_reason == PLLM_FINISH_LENGTH && o->tokens_len > 1) {
            pllm_output early = copy;
            early.finish_reason = PLLM_FINISH_NONE;
            ledger_output(q->engine, q->number, &early);
        }
        if (sabotage == a_last_output_comes_twice && last) ledger_output(q->engine, q->number, &copy);
        ledger_output(q->engine, q->number + (sabotage == an_output_goes_to_another_queue), &copy);
    }
    uint64_t beyond = len + odd_u64(w);
    EXPECT(beyond < len || CALL(pllm_outputs_get, outputs, beyond) == NULL, "output %llu of %llu is there", LLU(beyond),
           LLU(len));
    if (len) q->descriptor_read = false;
}

enum { NOT_POLLED = -1, CLOSED = -2 };

// Returns how many outputs came, or one of these.
static int64_t poll_for(worker *w, queue_slot *q, int64_t timeout_ms) {
    w->places = 0;
    output_place *out = any_output_place(w);
    if (sabotage == a_call_hangs) enter(w, N_pllm_queue_poll), sleep(1000);
    int32_t code = TRY(pllm_queue_poll, q->queue, timeout_ms, out ? (pllm_outputs **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    bool closed = code == PLLM_E_CLOSED && q->engine_gone;
    EXPECT(!code || closed || (code == PLLM_E_INVALID_ARGUMENT && (!out || !q->queue)), "poll failed with %d", code);
    if (code) return closed ? CLOSED : NOT_POLLED;
    pllm_outputs *outputs = out->pointer;
    int64_t len = (int64_t)CALL(pllm_outputs_len, outputs);
    EXPECT(len > 0 || !q->engine_gone, "a poll without an engine gave nothing, instead of saying so");
    EXPECT(len > 0 || timeout_ms >= 0, "a poll that waits for ever gave nothing");
    w->hash = mix(w->hash, checksum_of_batch(w, outputs));
    if (!world.racing) w->hash = mix(w->hash, (uint64_t)len);
    take(w, q, outputs);
    if (one_in(w, 4)) keep(w, (keepsake){.kind = OUTPUTS, .it.outputs = outputs});
    else CALL(pllm_outputs_free, outputs);
    return len;
}

// Something must come of it, so that waiting for ever is no mistake.
static bool may_wait(const queue_slot *q) {
    if (world.racing || !q->queue) return false;
    const engine_slot *e = engine_numbered(q->engine);
    return q->engine_gone || (e && e->started && ledger_waits_for(q->number));
}

static void poll_one(worker *w) {
    static const int64_t forever[] = {-1, INT64_MIN, INT64_MAX, 1ll << 40};
    queue_slot *q = live_queue(w);
    int64_t timeout_ms = one_in(w, 16) ? 1 + below(w, 2) : 0;
    if (one_in(w, 4) && may_wait(q)) timeout_ms = forever[below(w, COUNT(forever))];
    int64_t came = poll_for(w, q, timeout_ms);
    // What was waited for with a limit that nobody lives to see did come.
    EXPECT(came != 0 || timeout_ms < 1000, "a poll came back empty before its time");
}

static bool is_readable(int fd) {
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    return poll(&entry, 1, 0) == 1 && entry.revents & POLLIN;
}

static void look_at_descriptor(worker *w, queue_slot *q, int fd) {
    uint64_t value;
    bool readable = is_readable(fd) != (sabotage == a_readable_descriptor_lies);
    if (readable && one_in(w, 4)) q->descriptor_read = read(fd, &value, sizeof value) == sizeof value;
    const engine_slot *e = engine_numbered(q->engine);
    bool read_by_us = q->descriptor_read, steps_itself = e && e->started;
    pllm_outputs *outputs = NULL;
    int32_t code = TRY(pllm_queue_poll, q->queue, 0, &outputs);
    bool news = code || CALL(pllm_outputs_len, outputs) > 0;
    EXPECT(read_by_us || !readable || news, "the event descriptor was readable and a poll gave nothing");
    EXPECT(read_by_us || readable || !news || steps_itself, "the event descriptor was not readable and a poll gave something");
    if (code) return;
    w->hash = mix(w->hash, checksum_of_batch(w, outputs));
    take(w, q, outputs);
    CALL(pllm_outputs_free, outputs);
}

static void event_descriptor(worker *w) {
    queue_slot *q = live_queue(w);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_queue_get_event_fd, q->queue, out ? &out->fd : NULL);
    judge_output(out, code, sizeof out->fd);
    EXPECT(!code == (q->queue && out), "the event descriptor: %d", code);
    if (code) return;
    EXPECT(out->fd > 2, "the event descriptor is %d", out->fd);
    if (!world.racing) look_at_descriptor(w, q, out->fd);
}

static void drain(worker *w, queue_slot *q) {
    for (unsigned polls = 0; poll_for(w, q, polls % 2 ? -1 : 0) != CLOSED; polls++)
        EXPECT(polls < 1000, "a queue whose engine is gone never ends");
    ledger_expect_ended(q->number);
}

static void free_queue_slot(worker *w, queue_slot *q) {
    if (!q->queue) return;
    if (q->engine_gone && !one_in(w, 4)) drain(w, q);
    ledger_queue_gone(q->number);
    CALL(pllm_queue_free, (pllm_queue *)(uintptr_t)q->queue);
    q->queue = NULL;
}

static void free_queue(worker *w) {
    if (one_in(w, 8)) CALL(pllm_queue_free, NULL);
    if (w->index) free_queue_slot(w, &queues_of_racer(w->index)[below(w, QUEUES_OF_RACER)]);
    else free_queue_slot(w, &world.queues[below(w, QUEUES)]);
}

// ---- the end of an engine ----------------------------------------------------------------------------------------------

typedef struct {
    worker *w;
    const engine_slot *e;
} abortion;

static void abort_id(void *context, uint64_t id) {
    abortion *a = context;
    worker *w = a->w;
    int32_t code = TRY(pllm_engine_abort, a->e->engine, id);
    EXPECT(code == 0 || code == PLLM_E_NOT_FOUND, "abort failed with %d", code);
}

static void poll_all(worker *w, engine_slot *e) {
    poll_for(w, &e->own, 0);
    for (int i = 0; i < QUEUES; i++)
        if (world.queues[i].queue && world.queues[i].engine == e->number) poll_for(w, &world.queues[i], 0);
}

static bool waits_for_any(const engine_slot *e) {
    bool waits = ledger_waits_for(e->own.number);
    for (int i = 0; i < QUEUES; i++)
        waits |= world.queues[i].queue && world.queues[i].engine == e->number && ledger_waits_for(world.queues[i].number);
    return waits;
}

static void check_idle(worker *w, engine_slot *e) {
    pllm_stats s = {.struct_size = sizeof s};
    EXPECT(TRY(pllm_engine_get_stats, e->engine, &s) == 0, "stats failed");
    if (sabotage == a_block_stays_used) s.blocks_used++, s.blocks_free--;
    if (sabotage == an_idle_sequence_is_not_given_back) s.idle++;
    EXPECT(s.swapped == 0 && s.swap_blocks_used == 0, "nothing is unfinished or kept, and the host tier is in use");
    EXPECT(s.blocks_used == 0 && s.waiting == 0 && s.running == 0 && s.idle == 0,
           "nothing is unfinished or kept, and blocks_used is %llu, waiting %llu, running %llu, idle %llu", LLU(s.blocks_used),
           LLU(s.waiting), LLU(s.running), LLU(s.idle));
    check_stats(e, &s);
    uint64_t ended = ended_of(&s);
    totals sum = ledger_totals(e->number);
    EXPECT(ended >= sum.turns && ended <= sum.turns + sum.optional, "%llu sequences were to end, and %llu might, %llu did", LLU(sum.turns),
           LLU(sum.optional), LLU(ended));
    ledger_expect_ended(e->own.number);
    for (int i = 0; i < QUEUES; i++)
        if (world.queues[i].queue && world.queues[i].engine == e->number) ledger_expect_ended(world.queues[i].number);
}

static void give_back(void *context, uint64_t id) {
    abortion *a = context;
    free_sequence_of(a->w, a->e, id);
}

// Steps until every request has ended; some are aborted on the way. Then gives back what was kept.
static void settle(worker *w, engine_slot *e) {
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    unsigned patience = below(w, 64);
    stop_for_good(w, e);
    for (unsigned round = 0; step.unfinished || waits_for_any(e); round++) {
        EXPECT(round < 2000, "a request did not end in 2000 steps");
        if (round == patience) ledger_for_unended(e->number, abort_id, &(abortion){w, e});
        EXPECT(TRY(pllm_engine_step, e->engine, &step) == 0, "step failed");
        poll_all(w, e);
        // It would be waited for until the end of patience.
        if ((sabotage == a_last_output_is_lost || sabotage == a_sample_is_lost) && step.unfinished == 0) break;
    }
    ledger_for_sequences(e->number, give_back, &(abortion){w, e});
    unpin_all(w, e);
    EXPECT(TRY(pllm_engine_step, e->engine, &step) == 0 && step.unfinished == 0, "what was given back runs");
    check_idle(w, e);
}

static void free_engine_slot(worker *w, engine_slot *e) {
    if (!e->engine) return;
    if (below(w, 4) != 3) settle(w, e);
    ledger_queue_gone(e->own.number);
    CALL(pllm_engine_free, e->engine);
    for (int i = 0; i < QUEUES; i++)
        if (world.queues[i].engine == e->number) world.queues[i].engine_gone = true;
    *e = (engine_slot){0};
}

static void free_engine(worker *w) {
    if (one_in(w, 2)) CALL(pllm_engine_free, NULL);
    else free_engine_slot(w, &world.engines[below(w, ENGINES)]);
}

// ---- budgets ------------------------------------------------------------------------------------------------------------

// One of those that may be shared, one that an engine has, or NULL.
static const pllm_budget *any_budget(worker *w) {
    unsigned i = below(w, 32);
    if (i == 31) return NULL;
    const pllm_budget *budget = world.budgets[i % ARENAS];
    return budget && i < 16 ? budget : CALL(pllm_engine_budget, any_engine(w)->engine);
}

static void create_budget(worker *w) {
    unsigned i = below(w, ARENAS);
    if (world.budgets[i]) return;
    // None is made of these: an engine would map all that it might come to have.
    bool odd = one_in(w, 4);
    uint64_t bytes = odd ? odd_u64(w) : (uint64_t)(1 + below(w, 16)) << (13 + below(w, 6));
    uint64_t most = odd ? odd_u64(w) : bytes * below(w, 4);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_budget_create, bytes, most, out ? (pllm_budget **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(!code == (out && bytes && (!most || most >= bytes)), "a budget of %llu to %llu bytes: %d", LLU(bytes), LLU(most), code);
    if (code) return;
    if (odd) CALL(pllm_budget_free, out->pointer);
    else world.budgets[i] = out->pointer;
}

// Engines that were made with it keep it alive.
static void free_budget(worker *w) {
    unsigned i = below(w, ARENAS);
    if (one_in(w, 4)) CALL(pllm_budget_free, NULL);
    CALL(pllm_budget_free, world.budgets[i]);
    world.budgets[i] = NULL;
}

static void free_budgets(worker *w) {
    for (int i = 0; i < ARENAS; i++) CALL(pllm_budget_free, world.budgets[i]), world.budgets[i] = NULL;
}

static void look_at_budget(worker *w) {
    const pllm_budget *budget = any_budget(w);
    pllm_budget_info info;
    output_struct out = any_output_struct(w, 48, sizeof info);
    int32_t code = TRY(pllm_budget_get_info, budget, out.at);
    EXPECT(!code == (budget && is_possible(&out)), "the state of a budget: code %d", code);
    if (!judge_struct(&out, code, &info)) return;
    EXPECT(info.bytes >= info.min_bytes && info.bytes <= info.max_bytes && info.engines <= ENGINES, "a budget's state is impossible");
    // One that stepped itself and was stopped goes down before its next step.
    EXPECT(world.may_start || info.held_bytes <= info.bytes, "nobody steps, and engines hold %llu of %llu bytes", LLU(info.held_bytes),
           LLU(info.bytes));
    w->hash = mix_bytes(w->hash, &info, sizeof info);
}

static uint64_t any_size(worker *w, const pllm_budget_info *now) {
    uint64_t room = now->max_bytes - now->min_bytes;
    switch (below(w, 8)) {
    case 0: return odd_u64(w);
    case 1: return now->min_bytes - below(w, 2);
    case 2: return now->max_bytes + below(w, 2);
    default: return now->min_bytes + room / 255 * byte(w);
    }
}

static void resize_budget(worker *w) {
    const pllm_budget *budget = any_budget(w);
    pllm_budget_info before = {.struct_size = sizeof before}, after = before;
    int32_t code = TRY(pllm_budget_get_info, budget, &before);
    EXPECT(!code == !!budget, "the state of a budget: code %d", code);
    uint64_t bytes = any_size(w, &before);
    code = TRY(pllm_budget_resize, budget, bytes);
    EXPECT(budget ? code == 0 || code == PLLM_E_CAPACITY : code == PLLM_E_INVALID_ARGUMENT, "a budget was to have %llu bytes: %d",
           LLU(bytes), code);
    if (!budget || !nobody_steps()) return;
    bool possible = bytes && bytes >= before.min_bytes && bytes <= before.max_bytes;
    EXPECT(!code == possible, "a budget of %llu to %llu bytes was to have %llu: %d", LLU(before.min_bytes), LLU(before.max_bytes),
           LLU(bytes), code);
    EXPECT(TRY(pllm_budget_get_info, budget, &after) == 0, "a budget has no state");
    if (sabotage == an_budget_keeps_its_bytes) after.bytes = before.bytes;
    EXPECT(after.bytes == (code ? before.bytes : bytes) && (world.may_start || after.held_bytes <= after.bytes),
           "a budget that was resized from %llu to %llu bytes (%d) has %llu, and %llu are held", LLU(before.bytes), LLU(bytes), code,
           LLU(after.bytes), LLU(after.held_bytes));
}

static void add_question(worker *w, const engine_slot *e) {
    pllm_request q;
    pllm_sampling s;
    turn t = {.user_data = ledger_user_data(), .queue = e->own.number};
    pllm_request_init(&q, sizeof q);
    pllm_sampling_init(&s, sizeof s);
    t.answer = question_ask(&e->options, byte(w), &q, &s);
    request *r = t.answer ? ledger_open() : NULL;
    if (!r) return;
    r->engine = e->number, r->vocab = e->vocab, r->max_model_len = e->max_model_len, r->has_text = e->has_text;
    q.sampling = &s;
    q.user_data = t.user_data;
    t.prompt_tokens = q.prompt_token_ids_len;
    note_sampling(&t, &s);
    note_branching(r, &q, 0);
    note_turns(r, t);
    uint64_t id;
    int32_t code = TRY(pllm_engine_add_request, e->engine, &q, &id);
    EXPECT(!code || code == PLLM_E_CAPACITY || code == PLLM_E_INVALID_ARGUMENT, "a question was refused with %d", code);
    if (code) ledger_refused(r);
    else ledger_accepted(r, id);
}

// Several run side by side, then there is less room than they have: some give way, and all say what they would have said.
static void squeeze(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_budget_info info = {.struct_size = sizeof info};
    pllm_step step = {.struct_size = sizeof step};
    if (!e->engine) return;
    const pllm_budget *budget = CALL(pllm_engine_budget, e->engine);
    for (unsigned n = 2 + below(w, 4); n > 0; n--) add_question(w, e);
    for (unsigned n = 1 + below(w, 8); n > 0; n--) {
        int32_t code = TRY(pllm_engine_step, e->engine, &step);
        EXPECT(world.racing || code == (e->started ? PLLM_E_BUSY : 0), "step failed with %d", code);
    }
    EXPECT(TRY(pllm_budget_get_info, budget, &info) == 0, "an engine's budget has no state");
    int32_t code = TRY(pllm_budget_resize, budget, info.min_bytes);
    EXPECT(!nobody_steps() || code == 0, "a budget could not have its least bytes: %d", code);
}

static void ask_for_the_budget(worker *w) {
    const engine_slot *e = any_engine(w);
    const pllm_budget *budget = CALL(pllm_engine_budget, e->engine);
    EXPECT(!budget == !e->engine && budget == CALL(pllm_engine_budget, e->engine), "an engine's budget changed");
}

// ---- text and the rest -------------------------------------------------------------------------------------------------

// Times are in it: it does not repeat.
static void metrics(worker *w) {
    const engine_slot *e = any_engine(w);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_engine_get_metrics, e->engine, out ? (pllm_bytes **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && out), "metrics of an engine: code %d", code);
    if (code) return;
    static const char end[] = "# EOF\n";
    keepsake k = {.kind = BYTES, .it.bytes = out->pointer};
    const char *text = CALL(pllm_bytes_data, k.it.bytes);
    uint64_t len = CALL(pllm_bytes_len, k.it.bytes);
    bool is_whole = len > strlen(end) && !memcmp(text + len - strlen(end), end, strlen(end));
    EXPECT(is_whole && is_utf8(text, len), "the metrics are not UTF-8, or have no end");
    keep(w, k);
}

static void tokenize(worker *w) {
    const engine_slot *e = any_text_engine(w);
    argument text = any_text(w);
    uint32_t flags = one_in(w, 16) ? odd_u32(w) : below(w, 2);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_engine_tokenize, e->engine, text.data, text.len, flags, out ? (pllm_tokens **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(code || (e->has_text && !text.must_be_refused && flags <= 1), "what had to be refused was tokenized");
    if (code) return;
    keepsake k = {.kind = TOKENS, .it.tokens = out->pointer};
    w->hash = mix(w->hash, checksum(w, &k));
    const uint32_t *ids = CALL(pllm_tokens_data, k.it.tokens);
    uint64_t len = CALL(pllm_tokens_len, k.it.tokens);
    EXPECT((ids != NULL) == (len > 0), "tokens and their length disagree");
    for (uint64_t i = 0; i < len; i++) EXPECT(ids[i] < e->vocab, "a token is %u, beyond the vocabulary", ids[i]);
    keep(w, k);
}

static void keep_text(worker *w, pllm_bytes *bytes) {
    keepsake k = {.kind = BYTES, .it.bytes = bytes};
    const char *data = CALL(pllm_bytes_data, bytes);
    uint64_t len = CALL(pllm_bytes_len, bytes);
    w->hash = mix(w->hash, checksum(w, &k));
    EXPECT((data != NULL) == (len > 0) && is_utf8(data, len), "a text is not UTF-8, or disagrees with its length");
    keep(w, k);
}

static void detokenize(worker *w) {
    const engine_slot *e = any_text_engine(w);
    argument tokens = any_tokens(w, e->vocab);
    uint32_t flags = one_in(w, 16) ? odd_u32(w) : below(w, 2) * PLLM_TEXT_SKIP_SPECIAL;
    output_place *out = any_output_place(w);
    pllm_bytes **out_text = out ? (pllm_bytes **)&out->pointer : NULL;
    int32_t code = TRY(pllm_engine_detokenize, e->engine, tokens.data, tokens.len, flags, out_text);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(code || (e->has_text && !tokens.must_be_refused && !(flags & ~2u)), "what had to be refused was made text");
    if (!code) keep_text(w, out->pointer);
}

static void render_chat(worker *w) {
    const engine_slot *e = any_text_engine(w);
    argument chat = any_chat(w);
    output_place *out = any_output_place(w);
    int32_t code = TRY(pllm_engine_render_chat, e->engine, chat.data, chat.len, out ? (pllm_bytes **)&out->pointer : NULL);
    judge_output(out, code, sizeof out->pointer);
    EXPECT(code || (e->has_text && !chat.must_be_refused && chat.len), "what had to be refused was rendered");
    if (!code) keep_text(w, out->pointer);
}

static void ask_the_library(worker *w) {
    EXPECT(ASK(pllm_abi_version) == PLLM_ABI_VERSION, "the ABI's version differs");
    const char *info = ASK(pllm_build_info), *version = ASK(pllm_version);
    bool is_json = is_utf8(info, strlen(info)) && info[0] == '{';
    EXPECT(is_json && strstr(info, version), "the build's info lacks the version: %s", info);
}

static void ask_null(worker *w) {
    EXPECT(CALL(pllm_outputs_len, NULL) == 0 && CALL(pllm_outputs_get, NULL, odd_u64(w)) == NULL, "there are outputs in NULL");
    EXPECT(CALL(pllm_tokens_len, NULL) == 0 && CALL(pllm_tokens_data, NULL) == NULL, "there are tokens in NULL");
    EXPECT(CALL(pllm_bytes_len, NULL) == 0 && CALL(pllm_bytes_data, NULL) == NULL, "there are bytes in NULL");
    EXPECT(CALL(pllm_engine_queue, NULL) == NULL, "NULL has a queue");
    EXPECT(CALL(pllm_engine_budget, NULL) == NULL, "NULL has a budget");
    uint64_t size = odd_u64(w);
    CALL(pllm_engine_options_init, NULL, size);
    CALL(pllm_request_init, NULL, size);
    CALL(pllm_sampling_init, NULL, size);
    CALL(pllm_dry_init, NULL, size);
    CALL(pllm_beam_init, NULL, size);
    CALL(pllm_fork_init, NULL, size);
    CALL(pllm_resume_init, NULL, size);
    CALL(pllm_pin_init, NULL, size);
}

static void release_one(worker *w) { release(w, &w->keepsakes[below(w, COUNT(w->keepsakes))]); }

static void ask_for_the_queue(worker *w) {
    const engine_slot *e = any_engine(w);
    EXPECT(CALL(pllm_engine_queue, e->engine) == e->own.queue, "an engine's own queue changed");
}

// ---- programs ----------------------------------------------------------------------------------------------------------

typedef struct {
    void (*call)(worker *w);
    unsigned weight;
    bool alone;  // frees or makes what others may be using
} operation;

static const operation operations[] = {
    {add, 12, false},      {poll_one, 12, false},      {step, 10, false},           {abort_one, 5, false},
    {stats, 4, false},     {info, 2, false},           {create, 1, true},           {free_engine, 1, true},
    {plan, 1, false},      {create_queue, 4, false},   {free_queue, 2, false},      {event_descriptor, 5, false},
    {start, 2, false},     {stop, 1, false},           {tokenize, 4, false},        {detokenize, 4, false},
    {ask_null, 1, false},  {render_chat, 3, false},    {release_one, 3, false},     {ask_for_the_queue, 1, false},
    {ask_the_library, 1, false}, {fork_one, 6, false}, {append_to_one, 4, false},  {rewind_one, 4, false},
    {resume_one, 7, false}, {free_sequence, 2, false}, {look_at_sequence, 3, false}, {pin_one, 2, false}, {unpin_one, 2, false},
    {export_one, 2, false}, {import_one, 2, false}, {admit, 2, false}, {metrics, 2, false}, {create_budget, 2, true},
    {free_budget, 1, true},  {resize_budget, 6, false}, {squeeze, 4, false}, {look_at_budget, 2, false}, {ask_for_the_budget, 1, false},
};

static const operation *any_operation(worker *w) {
    unsigned total = 0, i = 0;
    for (size_t o = 0; o < COUNT(operations); o++) total += operations[o].weight;
    for (unsigned at = below(w, total); at >= operations[i].weight; i++) at -= operations[i].weight;
    return &operations[i];
}

static void work(worker *w) {
    while (w->next < w->end) {
        const operation *o = any_operation(w);
        w->places = 0;
        if (w->index == 0 && !any_engine(w)->engine && !one_in(w, 4)) create(w), w->places = 0;
        if (!o->alone || w->index == 0) o->call(w);
        leave(w);
    }
}

static void *race(void *racer) {
    worker *w = racer;
    work(w);
    release_all(w);
    leave(w);
    return NULL;
}

// Splits what is left of the program among threads that use the same engines and queues.
static void race_all(worker *w) {
    worker racers[RACERS];
    pthread_t threads[RACERS];
    size_t share = (size_t)(w->end - w->next) / RACERS;
    ledger_race(world.racing = true);
    for (unsigned i = 0; i < RACERS; i++) {
        racers[i] = (worker){.index = 1 + i, .next = w->next + i * share, .end = w->next + (i + 1) * share};
        if (pthread_create(&threads[i], NULL, race, &racers[i])) perror("pthread_create"), exit(2);
    }
    for (unsigned i = 0; i < RACERS; i++) pthread_join(threads[i], NULL);
    ledger_race(world.racing = false);
    w->next = w->end;
    // Whichever of them are stepping themselves: none is known to.
    for (int i = 0; i < ENGINES; i++)
        if (world.engines[i].engine) stop_for_good(w, &world.engines[i]);
}

static void free_everything(worker *w) {
    if (below(w, 2)) free_budgets(w);  // before those that were made with them
    for (int i = 0; i < ENGINES; i++) free_engine_slot(w, &world.engines[i]);
    free_budgets(w);
    for (int i = 0; i < QUEUES; i++) free_queue_slot(w, &world.queues[i]);
    release_all(w);
    leave(w);
}

static int entries(const char *directory) {
    int count = 0;
    DIR *dir = opendir(directory);
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

// A thread that was joined may still be listed for a moment.
static int threads_left(int expected) {
    int count = entries("/proc/self/task");
    for (uint64_t end = now_ms() + 5000; count > expected && now_ms() < end; count = entries("/proc/self/task")) usleep(100);
    return count;
}

static void *sleep_long(void *unused) {
    sleep(1000);
    return unused;
}

static void leave_something_behind(void) {
    pthread_t thread;
    if (sabotage == a_descriptor_stays) (void)!dup(0);
    if (sabotage == a_thread_stays) pthread_create(&thread, NULL, sleep_long, NULL);
}

verdict run_program(const uint8_t *bytes, size_t len) {
    int descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
    worker alone = {.next = bytes, .end = bytes + len}, *w = &alone;
    enum { BY_THE_HOST, BY_THE_HOST_TOO, BY_ITSELF, BY_MANY } mode = below(w, 4);
    questions_learn();
    memset(&world, 0, sizeof world);
    ledger_clear();
    world.may_start = mode >= BY_ITSELF;
    const uint8_t *ending = w->end > w->next + 64 ? w->end - 64 : w->next, *end = w->end;
    w->end = mode == BY_MANY ? w->next + (ending - w->next) / 4 : ending;
    for (int tries = 0; tries < 4 && !world.engines[0].engine && !world.engines[1].engine; tries++) w->places = 0, create(w);
    work(w);
    if (mode == BY_MANY) w->end = ending, race_all(w);
    w->end = end;
    free_everything(w);
    leave_something_behind();
    int descriptors_now = entries("/proc/self/fd"), threads_now = threads_left(threads);
    EXPECT(descriptors_now <= descriptors, "%d descriptors are open, %d were before", descriptors_now, descriptors);
    EXPECT(threads_now <= threads, "%d threads are left, %d were before", threads_now, threads);
    return (verdict){!world.may_start, w->hash};
}
