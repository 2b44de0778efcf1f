// Swapping of preempted requests to memory and to a file.
#include "abi_test.h"

// Each request needs most of the pool, so preempted requests are swapped to the host tier.
static void check_swapped_requests_generate_the_same_tokens(const char *swap_path) {
    pllm_engine_options options = options_for(golden_dir);
    const pllm_plan unlimited = plan_of(&options);
    pllm_sampling sampling = long_sampling();
    pllm_request request = token_request(&sampling);
    pllm_engine *engine = open_engine(golden_dir);
    const generation expected = *run_request(engine, &request);
    pllm_engine_free(engine);
    options.kv_bytes = (unlimited.max_model_len / unlimited.block_size + 1) * unlimited.block_bytes;
    options.preemption = PLLM_PREEMPTION_SWAP;
    options.swap_bytes = 64 * unlimited.block_bytes;
    options.swap_path = swap_path;
    options.flags |= PLLM_ENGINE_NO_PREFIX_CACHE;
    CHECK(plan_of(&options).swap_blocks == 64 &&
          plan_of(&options).swap_bytes == options.swap_bytes);
    if (!OK(pllm_engine_create(&options, &engine))) return;
    static request_copies c;
    add_copies(engine, &request, &c);
    step_to_the_end(engine);
    check_copies(engine, &c, &expected);
    pllm_stats stats = stats_of(engine);
    CHECK(stats.preemptions_swapped > 0 && stats.swap_failures == 0);
    CHECK(stats.blocks_swapped_out > 0 && stats.blocks_swapped_in == stats.blocks_swapped_out);
    CHECK(stats.swap_blocks_total == 64 && stats.swap_blocks_used == 0 && stats.swapped == 0);
    pllm_engine_free(engine);
}

static void swapped_requests_in_memory_generate_the_same_tokens(void) {
    check_swapped_requests_generate_the_same_tokens(NULL);
}

static void swapped_requests_in_a_file_generate_the_same_tokens(void) {
    char dir[] = "/tmp/abi_test_XXXXXX";
    if (!CHECK(mkdtemp(dir) != NULL)) return;
    check_swapped_requests_generate_the_same_tokens(dir);
    CHECK(rmdir(dir) == 0);  // the swap file has no name
}

const test swap_tests[] = {
    ALONE(swapped_requests_in_memory_generate_the_same_tokens),
    ALONE(swapped_requests_in_a_file_generate_the_same_tokens),
    {0},
};
