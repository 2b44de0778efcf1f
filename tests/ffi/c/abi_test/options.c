// Engine options: invalid values, and number formats of weights and KV.
#include "abi_test.h"

static void unknown_flags_and_values_of_options_are_refused(const pllm_engine *engine) {
    pllm_plan plan = {.struct_size = sizeof plan};
    pllm_engine_options options;
#define OPTION(assignment, refusal)                         \
    (options = options_for(golden_dir), options.assignment, \
     refusal(pllm_engine_plan(&options, &plan)))
    OPTION(flags |= PLLM_ENGINE_NO_PREFIX_CACHE, OK);
    OPTION(flags |= PLLM_ENGINE_BATCH_INVARIANT, OK);
    OPTION(flags = 8, UNSUPPORTED);
    OPTION(reserved2 = 1, UNSUPPORTED);
    OPTION(memory_fraction = 0.5f, UNSUPPORTED);
    OPTION(device = "cuda:99", UNSUPPORTED);
    OPTION(flags |= 1u << 31, UNSUPPORTED);
    OPTION(reserved = 1, UNSUPPORTED);
    OPTION(kv_dtype = PLLM_DTYPE_INT8, OK);
    OPTION(kv_dtype = PLLM_DTYPE_F16, OK);
    OPTION(kv_dtype = PLLM_DTYPE_FP8, OK);
    OPTION(kv_dtype = 6, INVALID);
    OPTION(weight_format = PLLM_WEIGHTS_INT8, OK);
    OPTION(weight_format = PLLM_WEIGHTS_FP8, UNSUPPORTED);  // not on the CPU
    OPTION(weight_format = 8, INVALID);
    OPTION(weight_group = 32, INVALID);  // needs a weight format with groups
    OPTION(preemption = 3, INVALID);
    OPTION(order = 3, INVALID);
    OPTION(batching = 4, INVALID);
    OPTION(allocation = 2, INVALID);
    OPTION(preemption = PLLM_PREEMPTION_SWAP, INVALID);  // needs swap_bytes
    OPTION(preemption = PLLM_PREEMPTION_AUTO, INVALID);
    OPTION(swap_bytes = 1 << 20, INVALID);  // needs preemption by swapping
    OPTION(swap_path = "/tmp", INVALID);    // needs swap_bytes
    OPTION(packed_path = "", INVALID);
    OPTION(trace_path = "", INVALID);
    OPTION(journal_path = "", INVALID);
    OPTION(isa = 9, INVALID);
    OPTION(block_size = 12, INVALID);
    OPTION(threads = 10000, INVALID);
    OPTION(threads = UINT32_MAX, INVALID);  // -1 of a host
    OPTION(cpus = "", INVALID);
    OPTION(cpus = "0-", INVALID);
    OPTION(cpus = "0,0", INVALID);
    OPTION(cpus = "0", INVALID);  // one CPU for two threads
    OPTION(cpus = "1022-1023", UNSUPPORTED);
    OPTION(max_seqs = 65, INVALID);
    OPTION(max_model_len = 1, INVALID);
    OPTION(max_model_len = 129, INVALID);
    options = options_for(golden_dir);
    options.device = "cuda:0";
    options.device_len = PLLM_NUL_TERMINATED;
    UNSUPPORTED(pllm_engine_plan(&options, &plan));
    options.device = "cpu, and more";
    options.device_len = 3;
    OK(pllm_engine_plan(&options, &plan));
    OPTION(kv_bytes = 1, CAPACITY);
    pllm_tokens *tokens = UNTOUCHED;
    UNSUPPORTED(pllm_engine_tokenize(engine, "a", 1, 4, &tokens));
    UNSUPPORTED(pllm_engine_detokenize(engine, PROMPT, 1, 4, &(pllm_bytes *){NULL}));
    CHECK(tokens == UNTOUCHED);
}

static void integer_weights_take_less_memory(void) {
    pllm_engine_options options = options_for(model_dir);
    const uint64_t stored = plan_of(&options).weight_bytes;
    for (uint32_t format = PLLM_WEIGHTS_INT8; format <= PLLM_WEIGHTS_INT4_ASYMMETRIC; format++) {
        pllm_engine *engine = NULL;
        options.weight_format = format;
        options.weight_group = format == PLLM_WEIGHTS_INT8 ? 0 : 64;
        CHECK(plan_of(&options).weight_bytes < stored * 11 / 20);
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_sampling sampling = greedy();
        pllm_request request = text_request(FRANCE, &sampling);
        CHECK(text_is(run_request(engine, &request), PARIS, strlen(PARIS)));
        pllm_engine_free(engine);
    }
}

static void int8_kv_takes_less_memory(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = NULL;
    const pllm_plan wide = plan_of(&options);
    options.kv_dtype = PLLM_DTYPE_INT8;
    const pllm_plan narrow = plan_of(&options);
    CHECK(wide.kv_dtype == PLLM_DTYPE_BF16 && narrow.kv_dtype == PLLM_DTYPE_INT8 &&
          narrow.block_bytes < wide.block_bytes * 3 / 4);
    if (!OK(pllm_engine_create(&options, &engine))) return;
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    CHECK(text_is(run_request(engine, &request), PARIS, strlen(PARIS)));
    pllm_engine_free(engine);
}

const test options_tests[] = {
    WITH_BUNDLED(unknown_flags_and_values_of_options_are_refused),
    ALONE(integer_weights_take_less_memory),
    ALONE(int8_kv_takes_less_memory),
    {0},
};
