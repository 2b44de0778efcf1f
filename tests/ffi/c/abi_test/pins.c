// The prefix cache and prefix pins.
#include "abi_test.h"

// Prompts longer than a block: the second request hits the first one's blocks unless the salts
// differ. Pins keep blocks.
static void shared_prefixes_are_computed_once(const pllm_engine *engine) {
    uint32_t prompt[50];
    for (uint32_t i = 0; i < COUNT(prompt); i++) prompt[i] = 300 + i;
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_pin pin = token_pin();
    uint64_t id = 0;
    sampling.max_tokens = 1;
    pin.prompt_token_ids = request.prompt_token_ids = prompt;
    pin.prompt_token_ids_len = request.prompt_token_ids_len = COUNT(prompt);
    pllm_stats before = stats_of(engine);
    run_request(engine, &request);
    pllm_stats once = stats_of(engine);
    run_request(engine, &request);
    pllm_stats twice = stats_of(engine);
    CHECK(once.prompt_tokens - before.prompt_tokens == 50 && once.blocks_cached >= 3);
    CHECK(twice.prompt_tokens - once.prompt_tokens == 2 &&
          twice.prefix_hits - once.prefix_hits == 48);
    request.cache_salt = (const uint8_t *)"another tenant";
    request.cache_salt_len = 14;
    run_request(engine, &request);
    CHECK(stats_of(engine).prompt_tokens - twice.prompt_tokens == 50);
    OK(pllm_prefix_pin(engine, &pin, &id));
    step_of(engine);
    CHECK(stats_of(engine).blocks_used == 4);
    OK(pllm_prefix_unpin(engine, id));
    step_of(engine);
    CHECK(is_idle(engine));
    pin.time_to_live_ms = 1;
    OK(pllm_prefix_pin(engine, &pin, &id));
    step_of(engine);
    sleep_ms(5);
    step_of(engine);
    FAILS(PLLM_E_NOT_FOUND, pllm_prefix_unpin(engine, id));
    CHECK(is_idle(engine));
}

const test pins_tests[] = {
    WITH_BUNDLED(shared_prefixes_are_computed_once),
    {0},
};
