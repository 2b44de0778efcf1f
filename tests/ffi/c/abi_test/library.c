// Functions of the library itself, NULL handles, and models that do not exist.
#include "abi_test.h"

static void library_reports_its_version(void) {
    CHECK(pllm_abi_version() == PLLM_ABI_VERSION);
    CHECK(strchr(pllm_version(), '.') != NULL);
    CHECK(pllm_build_info()[0] == '{' && strstr(pllm_build_info(), pllm_version()) &&
          strstr(pllm_build_info(), "LlamaForCausalLM"));
    CHECK(pllm_build_info() == pllm_build_info());
}

static void null_handles_can_be_freed_and_are_empty(void) {
    pllm_engine_free(NULL);
    pllm_error_free(NULL);
    pllm_outputs_free(NULL);
    pllm_tokens_free(NULL);
    pllm_bytes_free(NULL);
    pllm_budget_free(NULL);
    pllm_engine_options_init(NULL, sizeof(pllm_engine_options));
    pllm_request_init(NULL, sizeof(pllm_request));
    pllm_sampling_init(NULL, sizeof(pllm_sampling));
    pllm_dry_init(NULL, sizeof(pllm_dry));
    pllm_beam_init(NULL, sizeof(pllm_beam));
    pllm_fork_init(NULL, sizeof(pllm_fork));
    pllm_resume_init(NULL, sizeof(pllm_resume));
    pllm_pin_init(NULL, sizeof(pllm_pin));
    CHECK(pllm_error_code(NULL) == 0);
    CHECK(pllm_error_message(NULL)[0] == 0);
    CHECK(pllm_outputs_len(NULL) == 0 && pllm_outputs_get(NULL, 0) == NULL);
    CHECK(pllm_tokens_len(NULL) == 0 && pllm_tokens_data(NULL) == NULL);
    CHECK(pllm_bytes_len(NULL) == 0 && pllm_bytes_data(NULL) == NULL);
    CHECK(pllm_engine_queue(NULL) == NULL && pllm_engine_budget(NULL) == NULL);
}

static void missing_model_is_an_io_error(void) {
    pllm_engine_options options = options_for("/nonexistent/model");
    _Alignas(8) unsigned char bytes[sizeof(pllm_plan)];
    pllm_engine *engine = UNTOUCHED;
    memset(bytes, POISON, sizeof bytes);
    *(uint64_t *)(void *)bytes = sizeof bytes;
    FAILS(PLLM_E_IO, pllm_engine_plan(&options, (pllm_plan *)(void *)bytes));
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    options.model_path = "a\0b";
    options.model_path_len = 3;
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    CHECK(engine == UNTOUCHED && all_bytes_are(bytes, 8, sizeof bytes, POISON));
}

static void model_info_and_plan_agree(const pllm_engine *engine) {
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    pllm_model_info info = {.struct_size = sizeof info};
    OK(pllm_engine_plan(&options, &plan));
    OK(pllm_engine_get_model_info(engine, &info));
    CHECK(info.architecture_len == strlen("LlamaForCausalLM") &&
          !memcmp(info.architecture, "LlamaForCausalLM", info.architecture_len));
    CHECK(info.isa_len > 0 && info.vocab_size == 1024 && info.layers == 4 &&
          info.max_positions == 1024 && info.threads == 2);
    CHECK(info.eos_token_ids_len == 2 && info.eos_token_ids[0] == 5 && info.eos_token_ids[1] == 1);
    CHECK(info.max_model_len == plan.max_model_len);
    CHECK(plan.blocks == stats_of(engine).blocks_total &&
          plan.kv_bytes == plan.blocks * plan.block_bytes && plan.kv_bytes <= options.kv_bytes);
    CHECK(plan.block_size == 16 && plan.kv_dtype == PLLM_DTYPE_BF16 &&
          plan.weight_bytes >= 2 * 2623744 && plan.work_bytes > 0);
}

const test library_tests[] = {
    ALONE(library_reports_its_version),
    ALONE(null_handles_can_be_freed_and_are_empty),
    ALONE(missing_model_is_an_io_error),
    WITH_BUNDLED(model_info_and_plan_agree),
    {0},
};
