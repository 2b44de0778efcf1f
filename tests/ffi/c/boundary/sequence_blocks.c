// Blocks of samples and pins.
#include "boundary.h"
#include "sequences.h"

// Three samples fit the pool while they share the prompt, but not after they have diverged.
static void samples_that_outgrow_the_pool_are_preempted_and_finish(void) {
    enum { PROMPT = 64, BLOCK_BYTES = 32768, SAMPLES = 3 };
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = 10 + i;
    for (int grow = 0; grow < 2; grow++) {
        pllm_engine_options options = options_for(model_dir);
        options.kv_bytes = 7 * BLOCK_BYTES;
        options.max_model_len = 100;
        pllm_engine *engine = NULL;
        pllm_sampling sampling = greedy_sampling(2);
        pllm_request request;
        uint64_t id = 0;
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_request_init(&request, sizeof request);
        request.prompt_token_ids = prompt;
        request.prompt_token_ids_len = PROMPT;
        request.sampling = &sampling;
        request.n = SAMPLES;
        OK(pllm_engine_add_request(engine, &request, &id));
        step(engine, 1);
        for (uint64_t i = 0; i < SAMPLES; i++)
            OK(grow ? pllm_sequence_append(engine, id + i, prompt, 33 - i)
                    : pllm_sequence_rewind(engine, id + i, 1 + i));
        CHECK(steps_to_the_end(engine, 1000) < 1000);
        CHECK(stats_of(engine).finished_length == SAMPLES);
        check_nothing_is_left(engine);
        pllm_engine_free(engine);
    }
}

// Lengths include 1, block size + 1, and a cached block + 1. A pin samples no token.
static void prompts_of_any_length_can_be_pinned(void) {
    uint32_t prompt[40];
    for (uint32_t i = 0; i < COUNT(prompt); i++) prompt[i] = 10 + i;
    for (int prefilled = 0; prefilled < 2; prefilled++) {
        pllm_engine *engine = open_engine(model_dir);
        for (uint64_t len = 1; len <= COUNT(prompt); len++) {
            pllm_pin pin;
            uint64_t id = 0;
            pllm_pin_init(&pin, sizeof pin);
            pin.prompt_token_ids = prompt;
            pin.prompt_token_ids_len = len;
            pin.cache_salt = (const uint8_t *)&len;
            pin.cache_salt_len = prefilled ? 0 : sizeof len;
            OK(pllm_prefix_pin(engine, &pin, &id));
            step(engine, 2);
            CHECK(stats_of(engine).blocks_used == (len + 15) / 16 &&
                  stats_of(engine).generated_tokens == 0);
            OK(pllm_prefix_unpin(engine, id));
        }
        step(engine, 1);
        check_nothing_is_left(engine);
        pllm_engine_free(engine);
    }
}

const test sequence_blocks_tests[] = {
    TEST(samples_that_outgrow_the_pool_are_preempted_and_finish),
    TEST(prompts_of_any_length_can_be_pinned),
    {0},
};
