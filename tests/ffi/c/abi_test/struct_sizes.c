// struct_size: sizes of older and newer headers, and sizes of no version.
#include "abi_test.h"

// Larger than any struct: the bytes of a struct, and the bytes behind it.
typedef union {
    uint64_t struct_size;
    unsigned char bytes[70000];
} struct_buffer;

typedef void init_fn(void *to, uint64_t size);
static void init_options(void *to, uint64_t size) { pllm_engine_options_init(to, size); }
static void init_request(void *to, uint64_t size) { pllm_request_init(to, size); }
static void init_sampling(void *to, uint64_t size) { pllm_sampling_init(to, size); }

// Sizes of all versions are multiples of 8, and at least the size of the first version.
static int is_valid_struct_size(uint64_t size, uint64_t min_size) {
    return size >= min_size && size <= 65536 && size % 8 == 0;
}

// An invalid size is stored in the struct if it has 8 bytes, so that the next call refuses it.
static void check_init_stays_within_struct_size(init_fn *init, uint64_t min_size,
                                                uint64_t known_size) {
    static struct_buffer full, partial;
    init(&full, known_size);
    CHECK(full.struct_size == known_size);
    for (uint64_t size = 0; size <= known_size + 16; size++) {
        memset(&partial, POISON, sizeof partial);
        init(&partial, size);
        uint64_t written = is_valid_struct_size(size, min_size) ? size
                           : size < 8                           ? 0
                                                                : 8,
                 common = written < known_size ? written : known_size;
        CHECK(written == 0 || partial.struct_size == size);
        CHECK(written == 0 || !memcmp(partial.bytes + 8, full.bytes + 8, common - 8));
        CHECK(all_bytes_are(&partial, common, written, 0) &&
              all_bytes_are(&partial, written, sizeof partial, POISON));
    }
    memset(&partial, POISON, sizeof partial);
    init(&partial, 65537);
    CHECK(partial.struct_size == 65537 && all_bytes_are(&partial, 8, sizeof partial, POISON));
}

// Passes the struct in the buffer to the library and returns the error.
typedef pllm_error *input_call(const pllm_engine *engine, struct_buffer *at);

static pllm_error *use_options(const pllm_engine *engine, struct_buffer *at) {
    (void)engine;
    pllm_plan plan = {.struct_size = sizeof plan};
    return pllm_engine_plan((pllm_engine_options *)(void *)at, &plan);
}

static pllm_error *use_request(const pllm_engine *engine, struct_buffer *at) {
    return add_and_abort(engine, (pllm_request *)(void *)at);
}

static pllm_error *use_sampling(const pllm_engine *engine, struct_buffer *at) {
    pllm_request request = token_request((pllm_sampling *)(void *)at);
    return add_and_abort(engine, &request);
}

// `valid` is a struct that the library accepts.
static void check_input_struct_sizes(const pllm_engine *engine, input_call *use, const void *valid,
                                     uint64_t min_size, uint64_t known_size) {
    static struct_buffer buffer;
    const uint64_t invalid_sizes[] = {65537, 1ull << 32, UINT64_MAX};
    for (size_t i = 0; i < COUNT(invalid_sizes); i++) {
        memcpy(&buffer, valid, known_size);
        buffer.struct_size = invalid_sizes[i];
        INVALID(use(engine, &buffer));
    }
    // Bytes behind the end of a struct are not read: here they would be refused as fields of a
    // newer version.
    for (uint64_t size = 0; size <= known_size; size++) {
        memset(&buffer, 0xFF, sizeof buffer);
        memcpy(&buffer, valid, size);
        buffer.struct_size = size;
        is_valid_struct_size(size, min_size) ? OK(use(engine, &buffer))
                                             : INVALID(use(engine, &buffer));
    }
    // Programs with a newer header have more fields. They are zero unless the program sets them.
    const uint64_t newer[] = {known_size + 8, known_size + 64, 65536};
    for (size_t i = 0; i < COUNT(newer); i++) {
        memset(&buffer, 0, sizeof buffer);
        memcpy(&buffer, valid, known_size);
        buffer.struct_size = newer[i];
        OK(use(engine, &buffer));
        buffer.bytes[newer[i] - 1] = 1;
        UNSUPPORTED(use(engine, &buffer));
        buffer.bytes[newer[i] - 1] = 0;
        buffer.bytes[newer[i]] = 1;  // behind the struct
        OK(use(engine, &buffer));
    }
}

static pllm_error *write_plan(const pllm_engine *engine, struct_buffer *at) {
    (void)engine;
    pllm_engine_options options = options_for(golden_dir);
    return pllm_engine_plan(&options, (pllm_plan *)(void *)at);
}
static pllm_error *write_info(const pllm_engine *engine, struct_buffer *at) {
    return pllm_engine_get_model_info(engine, (pllm_model_info *)(void *)at);
}
static pllm_error *write_step(const pllm_engine *engine, struct_buffer *at) {
    return pllm_engine_step(engine, (pllm_step *)(void *)at);
}
static pllm_error *write_stats(const pllm_engine *engine, struct_buffer *at) {
    return pllm_engine_get_stats(engine, (pllm_stats *)(void *)at);
}

static void check_output_struct_sizes(const pllm_engine *engine, input_call *write,
                                      uint64_t min_size, uint64_t known_size) {
    static struct_buffer full, buffer;
    memset(&full, POISON, sizeof full);
    full.struct_size = known_size;
    OK(write(engine, &full));
    CHECK(full.struct_size == known_size);
    for (uint64_t size = 0; size <= known_size + 64; size++) {
        memset(&buffer, POISON, sizeof buffer);
        buffer.struct_size = size;
        uint64_t written = is_valid_struct_size(size, min_size) ? size : 8,
                 common = written < known_size ? written : known_size;
        is_valid_struct_size(size, min_size) ? OK(write(engine, &buffer))
                                             : INVALID(write(engine, &buffer));
        CHECK(buffer.struct_size == size && !memcmp(buffer.bytes + 8, full.bytes + 8, common - 8));
        CHECK(all_bytes_are(&buffer, common, written, 0) &&
              all_bytes_are(&buffer, written, sizeof buffer, POISON));
    }
    const uint64_t invalid_sizes[] = {65537, 1ull << 32, UINT64_MAX};
    for (size_t i = 0; i < COUNT(invalid_sizes); i++) {
        memset(&buffer, POISON, sizeof buffer);
        buffer.struct_size = invalid_sizes[i];
        INVALID(write(engine, &buffer));
        CHECK(buffer.struct_size == invalid_sizes[i] &&
              all_bytes_are(&buffer, 8, sizeof buffer, POISON));
    }
}

static void unknown_struct_sizes_are_refused(const pllm_engine *engine) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(NULL);
    pllm_step step = {.struct_size = sizeof step};
    check_init_stays_within_struct_size(init_options, 96, sizeof options);
    check_init_stays_within_struct_size(init_request, 64, sizeof request);
    check_init_stays_within_struct_size(init_sampling, 88, sizeof sampling);
    check_input_struct_sizes(engine, use_options, &options, 96, sizeof options);
    check_input_struct_sizes(engine, use_request, &request, 64, sizeof request);
    check_input_struct_sizes(engine, use_sampling, &sampling, 88, sizeof sampling);
    OK(pllm_engine_step(engine, &step));  // ends the requests that these calls added
    CHECK(step.unfinished == 0);
    check_output_struct_sizes(engine, write_plan, 80, sizeof(pllm_plan));
    check_output_struct_sizes(engine, write_info, 96, sizeof(pllm_model_info));
    check_output_struct_sizes(engine, write_step, 40, sizeof(pllm_step));
    check_output_struct_sizes(engine, write_stats, 128, sizeof(pllm_stats));
    CHECK(is_idle(engine));
}

static uint64_t kept_sequence;  // the sequence that these calls use

static pllm_error *use_dry(const pllm_engine *engine, struct_buffer *at) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.dry = (pllm_dry *)(void *)at;
    return add_and_abort(engine, &request);
}

static pllm_error *use_beam(const pllm_engine *engine, struct_buffer *at) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.max_tokens = 1;
    request.beam = (pllm_beam *)(void *)at;
    return add_and_abort(engine, &request);
}

static pllm_error *use_fork(const pllm_engine *engine, struct_buffer *at) {
    uint64_t child = 0;
    pllm_error *error = pllm_sequence_fork(engine, kept_sequence, (pllm_fork *)(void *)at, &child);
    if (!error) OK(pllm_sequence_free(engine, child));
    return error;
}

static pllm_error *use_resume(const pllm_engine *engine, struct_buffer *at) {
    uint64_t child = 0;
    OK(pllm_sequence_fork(engine, kept_sequence, NULL, &child));
    pllm_error *error = pllm_sequence_resume(engine, child, (pllm_resume *)(void *)at);
    OK(pllm_sequence_free(engine, child));
    return error;
}

static pllm_error *use_pin(const pllm_engine *engine, struct_buffer *at) {
    uint64_t pin = 0;
    pllm_error *error = pllm_prefix_pin(engine, (pllm_pin *)(void *)at, &pin);
    if (!error) OK(pllm_prefix_unpin(engine, pin));
    return error;
}

static pllm_error *write_sequence_info(const pllm_engine *engine, struct_buffer *at) {
    return pllm_sequence_get_info(engine, kept_sequence, (pllm_sequence_info *)(void *)at);
}

static void init_dry(void *to, uint64_t size) { pllm_dry_init(to, size); }
static void init_beam(void *to, uint64_t size) { pllm_beam_init(to, size); }
static void init_fork(void *to, uint64_t size) { pllm_fork_init(to, size); }
static void init_resume(void *to, uint64_t size) { pllm_resume_init(to, size); }
static void init_pin(void *to, uint64_t size) { pllm_pin_init(to, size); }
static void init_communicator(void *to, uint64_t size) { pllm_communicator_init(to, size); }

static void unknown_struct_sizes_of_sequence_calls_are_refused(const pllm_engine *engine) {
    pllm_dry dry;
    pllm_beam beam;
    pllm_fork options;
    pllm_resume resume;
    pllm_pin pin = token_pin();
    pllm_dry_init(&dry, sizeof dry);
    pllm_beam_init(&beam, sizeof beam);
    pllm_fork_init(&options, sizeof options);
    pllm_resume_init(&resume, sizeof resume);
    kept_sequence = keep_sequence(engine, 3);
    check_init_stays_within_struct_size(init_dry, 48, sizeof dry);
    check_init_stays_within_struct_size(init_beam, 32, sizeof beam);
    check_init_stays_within_struct_size(init_fork, 48, sizeof options);
    check_init_stays_within_struct_size(init_resume, 56, sizeof resume);
    check_init_stays_within_struct_size(init_pin, 72, sizeof pin);
    check_init_stays_within_struct_size(init_communicator, 80, sizeof(pllm_communicator));
    check_input_struct_sizes(engine, use_dry, &dry, 48, sizeof dry);
    check_input_struct_sizes(engine, use_beam, &beam, 32, sizeof beam);
    check_input_struct_sizes(engine, use_fork, &options, 48, sizeof options);
    check_input_struct_sizes(engine, use_resume, &resume, 56, sizeof resume);
    check_input_struct_sizes(engine, use_pin, &pin, 72, sizeof pin);
    check_output_struct_sizes(engine, write_sequence_info, 32, sizeof(pllm_sequence_info));
    free_sequence(engine, kept_sequence);
    step_to_the_end(engine);
    discard_outputs(engine);
    CHECK(is_idle(engine));
}

static pllm_error *write_admission(const pllm_engine *engine, struct_buffer *at) {
    pllm_request request = token_request(NULL);
    return pllm_engine_predict_admission(engine, &request, (pllm_admission *)(void *)at);
}

static pllm_error *write_budget(const pllm_engine *engine, struct_buffer *at) {
    return pllm_budget_get_info(pllm_engine_budget(engine), (pllm_budget_info *)(void *)at);
}

static void unknown_struct_sizes_of_admission_and_budget_are_refused(void) {
    pllm_engine *engine = open_engine(golden_dir);
    check_output_struct_sizes(engine, write_admission, 48, sizeof(pllm_admission));
    check_output_struct_sizes(engine, write_budget, 48, sizeof(pllm_budget_info));
    pllm_engine_free(engine);
}

const test struct_sizes_tests[] = {
    WITH_GOLDEN(unknown_struct_sizes_are_refused),
    WITH_BUNDLED(unknown_struct_sizes_of_sequence_calls_are_refused),
    ALONE(unknown_struct_sizes_of_admission_and_budget_are_refused),
    {0},
};
