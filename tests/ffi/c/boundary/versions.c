// Programs that were built with an older header, or with a newer header than the library.
#include <stddef.h>

#include "boundary.h"

// ---- older programs: shorter structs ----

typedef struct {
    uint64_t struct_size;
    const char *model_path;
    uint64_t model_path_len;
    const char *device;
    uint64_t device_len, kv_bytes, seed;
    uint32_t block_size, kv_dtype, max_model_len, max_batch_tokens, max_seqs, prefill_chunk,
        threads, isa, flags, reserved;
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
    uint64_t steps, prompt_tokens, generated_tokens, preemptions, finished_stop, finished_length,
        finished_abort, finished_error;
} old_stats;

typedef struct {
    uint64_t struct_size, weight_bytes, kv_bytes, work_bytes, blocks, block_size, block_bytes,
        max_model_len, full_sequences, kv_dtype;
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

_Static_assert(sizeof(old_options) == 96 && sizeof(old_sampling) == 88 && sizeof(old_request) == 64,
               "the sizes of the shorter structs");
_Static_assert(sizeof(old_step) == 40 && sizeof(old_stats) == 128 && sizeof(old_plan) == 80 &&
                   sizeof(old_info) == 96,
               "the sizes of the shorter structs");

// A shorter struct, followed by bytes that the library must not write.
enum { CANARY = 0x5C, CANARIES = 64 };
#define OLD(type)                       \
    struct {                            \
        type value;                     \
        unsigned char behind[CANARIES]; \
    }
#define FILL_WITH_CANARIES(old) \
    (memset(&(old), CANARY, sizeof(old)), (old).value.struct_size = sizeof(old).value)
#define CHECK_UNHARMED(old) \
    CHECK(canaries_are_intact((old).behind) && (old).value.struct_size == sizeof(old).value)

static bool canaries_are_intact(const unsigned char *behind) {
    for (int i = 0; i < CANARIES; i++)
        if (behind[i] != CANARY) return false;
    return true;
}

static pllm_engine *open_with_old_header(void) {
    OLD(old_options) options;
    OLD(old_plan) plan;
    pllm_engine *engine = NULL;
    FILL_WITH_CANARIES(options);
    FILL_WITH_CANARIES(plan);
    pllm_engine_options_init((pllm_engine_options *)(void *)&options, sizeof options.value);
    CHECK_UNHARMED(options);
    options.value.model_path = model_dir;
    options.value.kv_bytes = 8 << 20;
    options.value.threads = 1;
    OK(pllm_engine_plan((pllm_engine_options *)(void *)&options, (pllm_plan *)(void *)&plan));
    CHECK_UNHARMED(plan);
    CHECK(plan.value.kv_dtype == PLLM_DTYPE_BF16 && plan.value.blocks > 0);
    if (!OK(pllm_engine_create((pllm_engine_options *)(void *)&options, &engine)))
        exit(exit_code());
    return engine;
}

static void add_with_old_header(const pllm_engine *engine, uint32_t tokens, generation *a) {
    OLD(old_sampling) sampling;
    OLD(old_request) request;
    FILL_WITH_CANARIES(sampling);
    FILL_WITH_CANARIES(request);
    pllm_sampling_init((pllm_sampling *)(void *)&sampling, sizeof sampling.value);
    pllm_request_init((pllm_request *)(void *)&request, sizeof request.value);
    CHECK_UNHARMED(sampling);
    CHECK_UNHARMED(request);
    sampling.value.temperature = 0;
    sampling.value.max_tokens = tokens;
    sampling.value.flags = PLLM_SAMPLING_IGNORE_EOS;
    request.value.prompt = "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n";
    request.value.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.value.sampling = &sampling.value;
    request.value.user_data = (uintptr_t)a;
    OK(pllm_engine_add_request(engine, (pllm_request *)(void *)&request, &a->id));
}

static void program_with_the_first_header_runs(void) {
    enum { TOKENS = 40 };
    reference(0, TOKENS);
    pllm_engine *engine = open_with_old_header();
    OLD(old_info) info;
    OLD(old_step) step;
    OLD(old_stats) stats;
    generation a = {0};
    FILL_WITH_CANARIES(info);
    FILL_WITH_CANARIES(step);
    FILL_WITH_CANARIES(stats);
    OK(pllm_engine_get_model_info(engine, (pllm_model_info *)(void *)&info));
    CHECK_UNHARMED(info);
    CHECK(info.value.vocab_size == 1024 && info.value.threads == 1);
    add_with_old_header(engine, TOKENS, &a);
    do {
        OK(pllm_engine_step(engine, (pllm_step *)(void *)&step));
        CHECK_UNHARMED(step);
        take_outputs(pllm_engine_queue(engine), 0);
    } while (step.value.unfinished);
    CHECK(is_complete(&a, 0, TOKENS));
    OK(pllm_engine_get_stats(engine, (pllm_stats *)(void *)&stats));
    CHECK_UNHARMED(stats);
    CHECK(stats.value.finished_length == 1 && stats.value.generated_tokens == TOKENS &&
          stats.value.blocks_used == 0);
    pllm_engine_free(engine);
}

// Adds a request for 0 tokens with sampling parameters of this size, and returns whether it
// generates tokens.
static bool generates_with_0_tokens(const pllm_engine *engine, uint64_t struct_size) {
    pllm_sampling sampling;
    pllm_request request;
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    uint64_t id = 0, generated = 0;
    pllm_sampling_init(&sampling, struct_size);
    pllm_request_init(&request, sizeof request);
    sampling.max_tokens = 0;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    request.prompt = "Hello";
    request.sampling = &sampling;
    OK(pllm_engine_add_request(engine, &request, &id));
    for (int i = 0; step.unfinished && i < 8; i++) OK(pllm_engine_step(engine, &step));
    if (step.unfinished) OK(pllm_engine_abort(engine, id));
    while (step.unfinished) OK(pllm_engine_step(engine, &step));
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++)
        generated += pllm_outputs_get(outputs, i)->tokens_len;
    pllm_outputs_free(outputs);
    return generated > 0;
}

static void a_maximum_of_0_tokens_is_unlimited_for_older_programs_only(void) {
    pllm_engine *engine = open_engine(model_dir);
    CHECK(generates_with_0_tokens(engine, sizeof(old_sampling)));
    CHECK(generates_with_0_tokens(engine, offsetof(pllm_sampling, prompt_logprobs_start)));
    CHECK(!generates_with_0_tokens(engine, sizeof(pllm_sampling)));
    pllm_engine_free(engine);
}

// ---- newer programs: one more field ----

#define NEW(type)           \
    struct {                \
        type value;         \
        uint64_t new_field; \
    }

// Refused with the size of the caller and the size of the library.
#define CHECK_REFUSED(type, call)                                 \
    do {                                                          \
        char numbers[64], known[64];                              \
        snprintf(numbers, sizeof numbers, #type " has %zu bytes", \
                 sizeof(type) + sizeof(uint64_t));                \
        snprintf(known, sizeof known, "knows %zu", sizeof(type)); \
        FAILS(PLLM_E_UNSUPPORTED, numbers, call);                 \
        FAILS(PLLM_E_UNSUPPORTED, known, call);                   \
    } while (0)

static void unknown_fields_are_refused_unless_zero(void) {
    NEW(pllm_engine_options) options;
    NEW(pllm_sampling) sampling;
    NEW(pllm_request) request;
    pllm_engine *engine = NULL;
    uint64_t id = 0;
    pllm_engine_options_init(&options.value, sizeof options);
    pllm_sampling_init(&sampling.value, sizeof sampling);
    pllm_request_init(&request.value, sizeof request);
    CHECK(options.new_field == 0 && sampling.new_field == 0 && request.new_field == 0);
    options.value.model_path = model_dir;
    options.value.kv_bytes = 8 << 20;
    options.value.threads = 1;
    request.value.prompt = "Hello";
    request.value.sampling = &sampling.value;
    options.new_field = 1;
    CHECK_REFUSED(pllm_engine_options, pllm_engine_create(&options.value, &engine));
    options.new_field = 0;
    if (!OK(pllm_engine_create(&options.value, &engine))) return;
    sampling.new_field = 1;
    CHECK_REFUSED(pllm_sampling, pllm_engine_add_request(engine, &request.value, &id));
    sampling.new_field = 0;
    request.new_field = 1;
    CHECK_REFUSED(pllm_request, pllm_engine_add_request(engine, &request.value, &id));
    request.new_field = 0;
    OK(pllm_engine_add_request(engine, &request.value, &id));
    pllm_engine_free(engine);
}

static void unknown_fields_of_nested_and_sequence_structs_are_refused_unless_zero(void) {
    NEW(pllm_dry) dry;
    NEW(pllm_beam) beam;
    NEW(pllm_fork) options;
    NEW(pllm_resume) resume;
    NEW(pllm_pin) pin;
    pllm_engine *engine = open_engine(model_dir);
    pllm_sampling sampling;
    pllm_request request;
    uint64_t id = 0, child = 0, pinned = 0;
    pllm_step step = {.struct_size = sizeof step};
    pllm_dry_init(&dry.value, sizeof dry);
    pllm_beam_init(&beam.value, sizeof beam);
    pllm_fork_init(&options.value, sizeof options);
    pllm_resume_init(&resume.value, sizeof resume);
    pllm_pin_init(&pin.value, sizeof pin);
    pllm_sampling_init(&sampling, sizeof sampling);
    pllm_request_init(&request, sizeof request);
    CHECK(dry.new_field == 0 && beam.new_field == 0 && options.new_field == 0 &&
          resume.new_field == 0 && pin.new_field == 0);
    dry.new_field = beam.new_field = options.new_field = resume.new_field = pin.new_field = 1;
    sampling.max_tokens = 2;
    pin.value.prompt = request.prompt = "Hello";
    request.sampling = &sampling;
    sampling.dry = &dry.value;
    CHECK_REFUSED(pllm_dry, pllm_engine_add_request(engine, &request, &id));
    dry.new_field = 0;
    request.beam = &beam.value;
    CHECK_REFUSED(pllm_beam, pllm_engine_add_request(engine, &request, &id));
    request.beam = NULL;
    request.flags = PLLM_REQUEST_KEEP;
    OK(pllm_engine_add_request(engine, &request, &id));
    for (step.unfinished = 1; step.unfinished;) OK(pllm_engine_step(engine, &step));
    CHECK_REFUSED(pllm_fork, pllm_sequence_fork(engine, id, &options.value, &child));
    CHECK_REFUSED(pllm_resume, pllm_sequence_resume(engine, id, &resume.value));
    CHECK_REFUSED(pllm_pin, pllm_prefix_pin(engine, &pin.value, &pinned));
    options.new_field = resume.new_field = pin.new_field = 0;
    OK(pllm_sequence_fork(engine, id, &options.value, &child));
    OK(pllm_sequence_resume(engine, child, &resume.value));
    OK(pllm_prefix_pin(engine, &pin.value, &pinned));
    NEW(pllm_sequence_info) info = {.value.struct_size = sizeof info, .new_field = 77};
    OK(pllm_sequence_get_info(engine, id, &info.value));
    CHECK(info.new_field == 0 && info.value.len > 2 && info.value.idle == 1);
    pllm_engine_free(engine);
}

#define CHECK_UNKNOWN_FIELD_IS_ZERO(type, call)                                    \
    do {                                                                           \
        NEW(type) buffer = {.value.struct_size = sizeof buffer, .new_field = 77};  \
        type *out = &buffer.value;                                                 \
        OK(call);                                                                  \
        CHECK(buffer.new_field == 0 && buffer.value.struct_size == sizeof buffer); \
    } while (0)

static void unknown_output_fields_are_zero(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = open_engine(model_dir);
    CHECK_UNKNOWN_FIELD_IS_ZERO(pllm_plan, pllm_engine_plan(&options, out));
    CHECK_UNKNOWN_FIELD_IS_ZERO(pllm_model_info, pllm_engine_get_model_info(engine, out));
    CHECK_UNKNOWN_FIELD_IS_ZERO(pllm_step, pllm_engine_step(engine, out));
    CHECK_UNKNOWN_FIELD_IS_ZERO(pllm_stats, pllm_engine_get_stats(engine, out));
    pllm_engine_free(engine);
}

const test versions_tests[] = {
    TEST(program_with_the_first_header_runs),
    TEST(a_maximum_of_0_tokens_is_unlimited_for_older_programs_only),
    TEST(unknown_fields_are_refused_unless_zero),
    TEST(unknown_fields_of_nested_and_sequence_structs_are_refused_unless_zero),
    TEST(unknown_output_fields_are_zero),
    {0},
};
