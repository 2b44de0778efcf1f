// Memory budgets: sizes, resizing, engines that share one.
#include "abi_test.h"

static pllm_budget_info budget_info_of(const pllm_budget *budget) {
    pllm_budget_info info = {.struct_size = sizeof info};
    OK(pllm_budget_get_info(budget, &info));
    return info;
}

static pllm_engine *open_with_budget(const pllm_budget *budget) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = NULL;
    options.budget = budget;
    options.kv_bytes = 0;
    if (!OK(pllm_engine_create(&options, &engine))) exit(1);
    return engine;
}

static void invalid_budgets_are_refused(void) {
    pllm_budget *budget = UNTOUCHED;
    pllm_budget_info info = {.struct_size = sizeof info};
    INVALID(pllm_budget_create(0, 0, &budget));
    INVALID(pllm_budget_create(0, 100, &budget));
    INVALID(pllm_budget_create(100, 99, &budget));
    INVALID(pllm_budget_create(100, 100, NULL));
    INVALID(pllm_budget_resize(NULL, 100));
    INVALID(pllm_budget_get_info(NULL, &info));
    CHECK(budget == UNTOUCHED);
    OK(pllm_budget_create(100, 0, &budget));
    INVALID(pllm_budget_get_info(budget, NULL));
    CHECK(budget_info_of(budget).bytes == 100 && budget_info_of(budget).max_bytes == 100 &&
          budget_info_of(budget).engines == 0);
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = UNTOUCHED;
    options.budget = budget;
    INVALID(pllm_engine_create(&options, &engine));  // together with kv_bytes
    options.kv_bytes = 0;
    CAPACITY(pllm_engine_create(&options, &engine));
    CHECK(engine == UNTOUCHED && budget_info_of(budget).engines == 0);
    pllm_budget_free(budget);
}

static void budget_stays_between_min_and_max_bytes(void) {
    pllm_engine_options options = options_for(golden_dir);
    const pllm_plan plan = plan_of(&options);
    const uint64_t block = plan.block_bytes,
                   min_bytes = plan.max_model_len / plan.block_size * block;
    pllm_budget *budget = NULL;
    OK(pllm_budget_create(4 * min_bytes, 8 * min_bytes, &budget));
    pllm_engine *engine = open_with_budget(budget);
    pllm_budget_info info = budget_info_of(budget);
    CHECK(info.bytes == 4 * min_bytes && info.min_bytes == min_bytes &&
          info.max_bytes == 8 * min_bytes && info.engines == 1);
    CHECK(info.held_bytes >= min_bytes && info.held_bytes <= info.bytes);
    char number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)min_bytes);
    CAPACITY_SAYS(pllm_budget_resize(budget, min_bytes - 1), number);
    CAPACITY(pllm_budget_resize(budget, 8 * min_bytes + 1));
    CAPACITY(pllm_budget_resize(budget, 0));
    CHECK(budget_info_of(budget).bytes == 4 * min_bytes);
    OK(pllm_budget_resize(budget, min_bytes));
    CHECK(budget_info_of(budget).held_bytes == min_bytes &&
          stats_of(engine).blocks_total == min_bytes / block);
    OK(pllm_budget_resize(budget, 8 * min_bytes));
    pllm_request request = token_request(NULL);
    run_request(engine, &request);
    CHECK(stats_of(engine).blocks_total == 8 * min_bytes / block);
    pllm_engine_free(engine);
    CHECK(budget_info_of(budget).engines == 0 && budget_info_of(budget).held_bytes == 0);
    pllm_budget_free(budget);
}

static void engines_on_a_shared_budget_generate_the_same_tokens(void) {
    enum { ENGINES = 2 };
    pllm_sampling sampling = long_sampling();
    pllm_request request = token_request(&sampling);
    pllm_engine *undisturbed = open_engine(golden_dir);
    const generation expected = *run_request(undisturbed, &request);
    const uint64_t min_bytes = budget_info_of(pllm_engine_budget(undisturbed)).min_bytes;
    pllm_engine_free(undisturbed);
    pllm_budget *budget = NULL;
    OK(pllm_budget_create(6 * min_bytes, 0, &budget));
    pllm_engine *const engines[ENGINES] = {open_with_budget(budget), open_with_budget(budget)};
    CHECK(budget_info_of(budget).engines == ENGINES &&
          budget_info_of(budget).min_bytes == ENGINES * min_bytes);
    static request_copies copies[ENGINES];
    for (int e = 0; e < ENGINES; e++) add_copies(engines[e], &request, &copies[e]);
    uint64_t unfinished = 1;
    for (unsigned round = 0; unfinished; round++) {
        if (round % 10 == 5) OK(pllm_budget_resize(budget, (round / 10 % 2 ? 6 : 2) * min_bytes));
        unfinished = 0;
        for (int e = 0; e < ENGINES; e++) unfinished += step_of(engines[e]).unfinished;
        CHECK(budget_info_of(budget).held_bytes <= budget_info_of(budget).bytes);
    }
    for (int e = 0; e < ENGINES; e++) check_copies(engines[e], &copies[e], &expected);
    CHECK(copies[0].preemptions + copies[1].preemptions > 0);
    // The engines keep the budget alive.
    pllm_budget_free(budget);
    CHECK(budget_info_of(pllm_engine_budget(engines[0])).engines == ENGINES);
    pllm_engine_free(engines[1]);
    CHECK(budget_info_of(pllm_engine_budget(engines[0])).engines == 1 &&
          same_generation(run_request(engines[0], &request), &expected));
    pllm_engine_free(engines[0]);
}

static void own_budget_of_an_engine_can_be_resized(const pllm_engine *engine) {
    const pllm_budget *budget = pllm_engine_budget(engine);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    const generation before = *run_request(engine, &request);
    CHECK(budget && budget == pllm_engine_budget(engine));
    const pllm_budget_info info = budget_info_of(budget);
    CHECK(info.engines == 1 && info.max_bytes == info.bytes);
    OK(pllm_budget_resize(budget, info.min_bytes));
    CHECK(budget_info_of(budget).held_bytes == info.min_bytes &&
          same_generation(run_request(engine, &request), &before));
    OK(pllm_budget_resize(budget, info.bytes));
    CHECK(same_generation(run_request(engine, &request), &before) && is_idle(engine));
}

const test budgets_tests[] = {
    ALONE(invalid_budgets_are_refused),
    ALONE(budget_stays_between_min_and_max_bytes),
    ALONE(engines_on_a_shared_budget_generate_the_same_tokens),
    WITH_BUNDLED(own_budget_of_an_engine_can_be_resized),
    {0},
};
