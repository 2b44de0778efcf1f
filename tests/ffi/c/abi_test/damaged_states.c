// Sequence states that are damaged, or belong to another model or engine layout.
#include "abi_test.h"

// Bytes 8 to 11 are the format version. Another version is unsupported, not invalid.
static void check_damaged_state_is_refused(const pllm_engine *engine, const uint8_t *bytes,
                                           uint64_t len, uint64_t flipped) {
    uint64_t out = 77;
    pllm_error *error = pllm_sequence_import(engine, bytes, len, NULL, &out);
    flipped / 4 == 2 ? UNSUPPORTED(error) : INVALID(error);
    CHECK(out == 77);
}

static void damaged_states_are_refused(const pllm_engine *engine) {
    enum { PLACES = 64, BEGINNING = 24 };
    const uint64_t id = keep_sequence(engine, 20);
    exported_sequence exported = export_and_collect(engine, id, &(generation){0});
    uint8_t *bytes = malloc(exported.len);
    for (uint64_t i = 0; i < BEGINNING + PLACES; i++) {
        uint64_t at = i < BEGINNING                 ? i
                      : i - BEGINNING == PLACES - 1 ? exported.len - 1
                                                    : (i - BEGINNING) * exported.len / PLACES;
        memcpy(bytes, exported.bytes, exported.len);
        bytes[at] ^= (uint8_t)(2u << at % 7);
        check_damaged_state_is_refused(engine, bytes, exported.len, at);
    }
    free(bytes);
    const uint64_t lengths[] = {1,
                                7,
                                8,
                                11,
                                12,
                                19,
                                20,
                                31,
                                32,
                                33,
                                51,
                                52,
                                53,
                                1000,
                                exported.len / 2,
                                exported.len - 33,
                                exported.len - 32,
                                exported.len - 1};
    for (size_t i = 0; i < COUNT(lengths); i++) {
        check_damaged_state_is_refused(engine, before_guard_page(exported.bytes, lengths[i]),
                                       lengths[i], 0);
        check_damaged_state_is_refused(engine, exported.bytes + (exported.len - lengths[i]),
                                       lengths[i], 0);
    }
    bytes = memcpy(calloc(1, exported.len + 1), exported.bytes, exported.len);
    check_damaged_state_is_refused(engine, bytes, exported.len + 1, 0);
    free(bytes);
    step_of(engine);
    CHECK(stats_of(engine).idle == 1);
    free_sequence(engine, id);
    OK(pllm_sequence_free(engine,
                          import_state(engine, &exported)));  // the undamaged state is accepted
    step_of(engine);
    free(exported.bytes);
    CHECK(is_idle(engine));
}

static void states_of_other_models_and_layouts_are_refused(const pllm_engine *engine) {
    const uint64_t id = keep_sequence(engine, 20);
    exported_sequence exported = export_and_collect(engine, id, &(generation){0});
    pllm_engine *golden = open_engine(golden_dir), *other = NULL;
    uint64_t out = 77;
    INVALID(pllm_sequence_import(golden, exported.bytes, exported.len, NULL, &out));
    INVALID(pllm_sequence_import(engine, exported.bytes, exported.len, pllm_engine_queue(golden),
                                 &out));
    INVALID(pllm_sequence_export(engine, id, pllm_engine_queue(golden)));
    pllm_engine_options options;
#define IMPORT(assignment, refusal)                                                  \
    (options = options_for(model_dir), options.assignment,                           \
     OK(pllm_engine_create(&options, &other)),                                       \
     refusal(pllm_sequence_import(other, exported.bytes, exported.len, NULL, &out)), \
     CHECK(is_idle(other)), pllm_engine_free(other))
    IMPORT(block_size = 32, INVALID);
    IMPORT(kv_dtype = PLLM_DTYPE_F32, INVALID);
    IMPORT(max_model_len = 23, INVALID);  // the sequence has 24 tokens
    CHECK(out == 77);
    IMPORT(max_model_len = 24, OK);
    CHECK(out != 77);
    free(exported.bytes);
    free_sequence(engine, id);
    pllm_engine_free(golden);
    CHECK(is_idle(engine));
}

const test damaged_states_tests[] = {
    WITH_BUNDLED(damaged_states_are_refused),
    WITH_BUNDLED(states_of_other_models_and_layouts_are_refused),
    {0},
};
