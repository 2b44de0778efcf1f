// Programs built with an older header, or with a newer one than the library's.
#include "boundary.h"

// ---- older: shorter structs, as a program of an earlier release passes them ------------------------

typedef struct {
    uint64_t struct_size;
    const char *model_path;
    uint64_t model_path_len;
    const char *device;
    uint64_t device_len, kv_bytes, seed;
    uint32_t block_size, kv_dtype, max_model_len, max_batch_tokens, max_seqs, prefill_chunk, threads, isa, flags, reserved;
} old_options;

typedef struct {
    uint64_t struct_size, seed;
    const uint32_t *stop_token_ids;
    uint64_t stop_token_ids_len;
    const char *const *stop;
    const uint64_t *stop_lens;
    uint64_t stop_count;
    float temperature, top_p, min_p;
    uint32_t top_k, max_tokens, min_tokens, flags, reserved;
} old_sampling;

typedef struct {
    uint64_t struct_size;
    const char *prompt;
    uint64_t prompt_len;
    const uint32_t *prompt_token_ids;
    uint64_t prompt_token_ids_len;
    const old_sampling *sampling;
    uint64_t user_data;
    uint32_t n, text_flags;
} old_request;

typedef struct {
    uint64_t struct_size, unfinished, prefill_tokens, decode_tokens, sequences;
} old_step;

typedef struct {
    uint64_t struct_size, waiting, running, blocks_total, blocks_used, blocks_cached, blocks_free;
    double slot_utilization;
    uint64_t steps, prompt_tokens, generated_tokens, preemptions, finished_stop, finished_length, finished_abort, finished_error;
} old_stats;

typedef struct {
    uint64_t struct_size, weight_bytes, kv_bytes, work_bytes, blocks, block_size, block_bytes, max_model_len, full_sequences, kv_dtype;
} old_plan;

typedef struct {
    uint64_t struct_size;
    const char *architecture;
    uint64_t architecture_len;
    const char *isa;
    uint64_t isa_len;
    const uint32_t *eos_token_ids;
    uint64_t eos_token_ids_len, vocab_size, layers, max_positions, max_model_len, threads;
} old_info;

_Static_assert(sizeof(old_options) == 96 && sizeof(old_sampling) == 88 && sizeof(old_request) == 64, "the sizes of the shorter structs");
_Static_assert(sizeof(old_step) == 40 && sizeof(old_stats) == 128 && sizeof(old_plan) == 80 && sizeof(old_info) == 96, "the sizes of the shorter structs");

// A short struct, and behind it bytes of the program that the library must not touch.
enum { CANARY = 0x5C, CANARIES = 64 };
#define OLD(type)                        \
    struct {                             \
        type it;                         \
        unsigned char behind[CANARIES];  \
    }
#define GUARD(old) (memset(&(old), CANARY, sizeof(old)), (old).it.struct_size = sizeof(old).it)
#define UNHARMED(old) CHECK(canaries_live((old).behind) && (old).it.struct_size == sizeof(old).it)

static bool canaries_live(const unsigned char *behind) {
    for (int i = 0; i < CANARIES; i++)
        if (behind[i] != CANARY) return false;
    return true;
}

static pllm_engine *old_program_opens(void) {
    OLD(old_options) options;
    OLD(old_plan) plan;
    pllm_engine *engine = NULL;
    GUARD(options);
    GUARD(plan);
    pllm_engine_options_init((pllm_engine_options *)(void *)&options, sizeof options.it);
    UNHARMED(options);
    options.it.model_path = model_dir;
    options.it.kv_bytes = 8 << 20;
    options.it.threads = 1;
    OK(pllm_engine_plan((pllm_engine_options *)(void *)&options, (pllm_plan *)(void *)&plan));
    UNHARMED(plan);
    CHECK(plan.it.kv_dtype == PLLM_DTYPE_BF16 && plan.it.blocks > 0);
    if (!OK(pllm_engine_create((pllm_engine_options *)(void *)&options, &engine))) exit(exit_code());
    return engine;
}

static void old_program_asks(const pllm_engine *engine, uint32_t tokens, answer *a) {
    OLD(old_sampling) sampling;
    OLD(old_request) request;
    GUARD(sampling);
    GUARD(request);
    pllm_sampling_init((pllm_sampling *)(void *)&sampling, sizeof sampling.it);
    pllm_request_init((pllm_request *)(void *)&request, sizeof request.it);
    UNHARMED(sampling);
    UNHARMED(request);
    sampling.it.temperature = 0;
    sampling.it.max_tokens = tokens;
    sampling.it.flags = PLLM_SAMPLING_IGNORE_EOS;
    request.it.prompt = "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n";
    request.it.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.it.sampling = &sampling.it;
    request.it.user_data = (uintptr_t)a;
    OK(pllm_engine_add_request(engine, (pllm_request *)(void *)&request, &a->id));
}

static void a_program_built_with_the_first_header_runs(void) {
    enum { TOKENS = 40 };
    undisturbed(0, TOKENS);
    pllm_engine *engine = old_program_opens();
    OLD(old_info) info;
    OLD(old_step) step;
    OLD(old_stats) stats;
    answer a = {0};
    GUARD(info);
    GUARD(step);
    GUARD(stats);
    OK(pllm_engine_get_model_info(engine, (pllm_model_info *)(void *)&info));
    UNHARMED(info);
    CHECK(info.it.vocab_size == 1024 && info.it.threads == 1);
    old_program_asks(engine, TOKENS, &a);
    do {
        OK(pllm_engine_step(engine, (pllm_step *)(void *)&step));
        UNHARMED(step);
        take(pllm_engine_queue(engine), 0);
    } while (step.it.unfinished);
    CHECK(is_whole(&a, 0, TOKENS));
    OK(pllm_engine_get_stats(engine, (pllm_stats *)(void *)&stats));
    UNHARMED(stats);
    CHECK(stats.it.finished_length == 1 && stats.it.generated_tokens == TOKENS && stats.it.blocks_used == 0);
    pllm_engine_free(engine);
}

// ---- newer: one field more ---------------------------------------------------------------------------------------------

#define NEW(type)             \
    struct {                  \
        type it;              \
        uint64_t new_field;   \
    }

// Refused with the size that came and the size that is known.
#define REFUSED(type, call)                                                                              \
    do {                                                                                                 \
        char numbers[64], known[64];                                                                     \
        snprintf(numbers, sizeof numbers, #type " has %zu bytes", sizeof(type) + sizeof(uint64_t));      \
        snprintf(known, sizeof known, "knows %zu", sizeof(type));                                        \
        FAILS(PLLM_E_UNSUPPORTED, numbers, call);                                                        \
        FAILS(PLLM_E_UNSUPPORTED, known, call);                                                          \
    } while (0)

static void what_a_newer_program_asks_for_is_refused_and_what_it_leaves_out_is_fine(void) {
    NEW(pllm_engine_options) options;
    NEW(pllm_sampling) sampling;
    NEW(pllm_request) request;
    pllm_engine *engine = NULL;
    uint64_t id = 0;
    pllm_engine_options_init(&options.it, sizeof options);
    pllm_sampling_init(&sampling.it, sizeof sampling);
    pllm_request_init(&request.it, sizeof request);
    CHECK(options.new_field == 0 && sampling.new_field == 0 && request.new_field == 0);
    options.it.model_path = model_dir;
    options.it.kv_bytes = 8 << 20;
    options.it.threads = 1;
    request.it.prompt = "Hello";
    request.it.sampling = &sampling.it;
    options.new_field = 1;
    REFUSED(pllm_engine_options, pllm_engine_create(&options.it, &engine));
    options.new_field = 0;
    if (!OK(pllm_engine_create(&options.it, &engine))) return;
    sampling.new_field = 1;
    REFUSED(pllm_sampling, pllm_engine_add_request(engine, &request.it, &id));
    sampling.new_field = 0;
    request.new_field = 1;
    REFUSED(pllm_request, pllm_engine_add_request(engine, &request.it, &id));
    request.new_field = 0;
    OK(pllm_engine_add_request(engine, &request.it, &id));
    pllm_engine_free(engine);
}

static void the_same_holds_of_the_structs_within_requests_and_of_sequences(void) {
    NEW(pllm_dry) dry;
    NEW(pllm_beam) beam;
    NEW(pllm_fork) how;
    NEW(pllm_resume) resume;
    NEW(pllm_pin) pin;
    pllm_engine *engine = open_engine(model_dir);
    pllm_sampling sampling;
    pllm_request request;
    uint64_t id = 0, child = 0, pinned = 0;
    pllm_step step = {.struct_size = sizeof step};
    pllm_dry_init(&dry.it, sizeof dry);
    pllm_beam_init(&beam.it, sizeof beam);
    pllm_fork_init(&how.it, sizeof how);
    pllm_resume_init(&resume.it, sizeof resume);
    pllm_pin_init(&pin.it, sizeof pin);
    pllm_sampling_init(&sampling, sizeof sampling);
    pllm_request_init(&request, sizeof request);
    CHECK(dry.new_field == 0 && beam.new_field == 0 && how.new_field == 0 && resume.new_field == 0 && pin.new_field == 0);
    dry.new_field = beam.new_field = how.new_field = resume.new_field = pin.new_field = 1;
    sampling.max_tokens = 2;
    pin.it.prompt = request.prompt = "Hello";
    request.sampling = &sampling;
    sampling.dry = &dry.it;
    REFUSED(pllm_dry, pllm_engine_add_request(engine, &request, &id));
    dry.new_field = 0;
    request.beam = &beam.it;
    REFUSED(pllm_beam, pllm_engine_add_request(engine, &request, &id));
    request.beam = NULL;
    request.flags = PLLM_REQUEST_KEEP;
    OK(pllm_engine_add_request(engine, &request, &id));
    for (step.unfinished = 1; step.unfinished;) OK(pllm_engine_step(engine, &step));
    REFUSED(pllm_fork, pllm_sequence_fork(engine, id, &how.it, &child));
    REFUSED(pllm_resume, pllm_sequence_resume(engine, id, &resume.it));
    REFUSED(pllm_pin, pllm_prefix_pin(engine, &pin.it, &pinned));
    how.new_field = resume.new_field = pin.new_field = 0;
    OK(pllm_sequence_fork(engine, id, &how.it, &child));
    OK(pllm_sequence_resume(engine, child, &resume.it));
    OK(pllm_prefix_pin(engine, &pin.it, &pinned));
    NEW(pllm_sequence_info) info = {.it.struct_size = sizeof info, .new_field = 77};
    OK(pllm_sequence_get_info(engine, id, &info.it));
    CHECK(info.new_field == 0 && info.it.len > 2 && info.it.idle == 1);
    pllm_engine_free(engine);
}

#define FILLED_WITH_ZERO(type, call)                                              \
    do {                                                                          \
        NEW(type) place = {.it.struct_size = sizeof place, .new_field = 77};      \
        type *out = &place.it;                                                    \
        OK(call);                                                                 \
        CHECK(place.new_field == 0 && place.it.struct_size == sizeof place);      \
    } while (0)

static void a_newer_program_finds_zero_in_what_is_not_known_yet(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = open_engine(model_dir);
    FILLED_WITH_ZERO(pllm_plan, pllm_engine_plan(&options, out));
    FILLED_WITH_ZERO(pllm_model_info, pllm_engine_get_model_info(engine, out));
    FILLED_WITH_ZERO(pllm_step, pllm_engine_step(engine, out));
    FILLED_WITH_ZERO(pllm_stats, pllm_engine_get_stats(engine, out));
    pllm_engine_free(engine);
}

const test_case version_cases[] = {
    CASE(a_program_built_with_the_first_header_runs),
    CASE(what_a_newer_program_asks_for_is_refused_and_what_it_leaves_out_is_fine),
    CASE(the_same_holds_of_the_structs_within_requests_and_of_sequences),
    CASE(a_newer_program_finds_zero_in_what_is_not_known_yet),
    {0},
};
