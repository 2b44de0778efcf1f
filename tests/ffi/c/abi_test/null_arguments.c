// NULL in every place of every call: the call is refused, and outputs stay unchanged.
#include "abi_test.h"

static void null_engines_and_options_are_refused(const pllm_engine *engine) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *out = UNTOUCHED;
    _Alignas(8) unsigned char bytes[256];
    memset(bytes, POISON, sizeof bytes);
    *(uint64_t *)(void *)bytes = sizeof(pllm_plan);
    INVALID(pllm_engine_plan(NULL, (pllm_plan *)(void *)bytes));
    INVALID(pllm_engine_plan(&options, NULL));
    INVALID(pllm_engine_create(NULL, &out));
    INVALID(pllm_engine_create(&options, NULL));
    INVALID(pllm_engine_get_model_info(NULL, (pllm_model_info *)(void *)bytes));
    INVALID(pllm_engine_get_model_info(engine, NULL));
    INVALID(pllm_engine_step(NULL, (pllm_step *)(void *)bytes));
    uint64_t steps = stats_of(engine).steps;
    INVALID(pllm_engine_step(engine, NULL));
    CHECK(stats_of(engine).steps == steps);
    INVALID(pllm_engine_get_stats(NULL, (pllm_stats *)(void *)bytes));
    INVALID(pllm_engine_get_stats(engine, NULL));
    CHECK(out == UNTOUCHED && all_bytes_are(bytes, 8, sizeof bytes, POISON));
    options.model_path = NULL;
    INVALID(pllm_engine_create(&options, &out));
    options.model_path_len = 0;
    INVALID(pllm_engine_create(&options, &out));
    options.model_path_len = 5;
    INVALID(pllm_engine_create(&options, &out));
    CHECK(out == UNTOUCHED);
}

static void null_requests_are_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling), neither = request, both = request,
                 no_length = request;
    uint64_t id = 77;
    INVALID(pllm_engine_add_request(NULL, &request, &id));
    INVALID(pllm_engine_add_request(engine, NULL, &id));
    INVALID(pllm_engine_add_request(engine, &request, NULL));
    neither.prompt_token_ids = NULL;
    INVALID(pllm_engine_add_request(engine, &neither, &id));
    both.prompt = "hello";
    INVALID(pllm_engine_add_request(engine, &both, &id));
    no_length.prompt_token_ids_len = 0;
    INVALID(pllm_engine_add_request(engine, &no_length, &id));
    sampling.stop_token_ids_len = 1;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    sampling = greedy();
    sampling.stop_count = 1;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    const char *stops[] = {NULL};
    sampling.stop = stops;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    sampling.stop_lens = (const uint64_t[]){3};
    INVALID(pllm_engine_add_request(engine, &request, &id));
    INVALID(pllm_engine_abort(NULL, 1));
    CHECK(id == 77);
    // A request that one of the failed calls had added would run in this step.
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_step(engine, &step));
    CHECK(step.unfinished == 0 && step.sequences == 0);
}

static void null_text_is_refused(const pllm_engine *engine) {
    pllm_outputs *outputs = UNTOUCHED;
    pllm_tokens *tokens = UNTOUCHED;
    pllm_bytes *bytes = UNTOUCHED;
    const char *chat = "[{\"role\": \"user\", \"content\": \"x\"}]";
    INVALID(pllm_queue_poll(NULL, 0, &outputs));
    INVALID(pllm_queue_poll(pllm_engine_queue(engine), 0, NULL));
    INVALID(pllm_engine_tokenize(NULL, "a", 1, 0, &tokens));
    INVALID(pllm_engine_tokenize(engine, NULL, 1, 0, &tokens));
    INVALID(pllm_engine_tokenize(engine, NULL, PLLM_NUL_TERMINATED, 0, &tokens));
    INVALID(pllm_engine_tokenize(engine, "a", 1, 0, NULL));
    const uint8_t *borrowed = UNTOUCHED;
    uint64_t len = 77;
    INVALID(pllm_engine_get_token_bytes(NULL, 5, &borrowed, &len));
    INVALID(pllm_engine_get_token_bytes(engine, 5, NULL, &len));
    INVALID(pllm_engine_get_token_bytes(engine, 5, &borrowed, NULL));
    INVALID(pllm_engine_health(NULL));
    CHECK(borrowed == UNTOUCHED && len == 77);
    INVALID(pllm_engine_detokenize(NULL, PROMPT, 1, 0, &bytes));
    INVALID(pllm_engine_detokenize(engine, NULL, 1, 0, &bytes));
    INVALID(pllm_engine_detokenize(engine, PROMPT, 1, 0, NULL));
    INVALID(pllm_engine_render_chat(NULL, chat, strlen(chat), &bytes));
    INVALID(pllm_engine_render_chat(engine, NULL, 3, &bytes));
    INVALID(pllm_engine_render_chat(engine, NULL, PLLM_NUL_TERMINATED, &bytes));
    INVALID(pllm_engine_render_chat(engine, chat, strlen(chat), NULL));
    CHECK(outputs == UNTOUCHED && tokens == UNTOUCHED && bytes == UNTOUCHED);
}

static void null_sequence_and_pin_arguments_are_refused(const pllm_engine *engine) {
    const uint64_t id = keep_sequence(engine, 3);
    pllm_fork options;
    pllm_pin pin = token_pin(), neither = pin, both = pin, no_salt = pin;
    pllm_sequence_info info;
    uint64_t out = 77;
    pllm_fork_init(&options, sizeof options);
    memset(&info, POISON, sizeof info);
    info.struct_size = sizeof info;
    INVALID(pllm_sequence_fork(NULL, id, &options, &out));
    INVALID(pllm_sequence_fork(engine, id, &options, NULL));
    INVALID(pllm_sequence_append(NULL, id, PROMPT, 1));
    INVALID(pllm_sequence_append(engine, id, NULL, 1));
    OK(pllm_sequence_append(engine, id, NULL, 0));
    INVALID(pllm_sequence_rewind(NULL, id, 1));
    INVALID(pllm_sequence_resume(NULL, id, NULL));
    INVALID(pllm_sequence_free(NULL, id));
    INVALID(pllm_sequence_get_info(NULL, id, &info));
    INVALID(pllm_sequence_get_info(engine, id, NULL));
    INVALID(pllm_prefix_pin(NULL, &pin, &out));
    INVALID(pllm_prefix_pin(engine, NULL, &out));
    INVALID(pllm_prefix_pin(engine, &pin, NULL));
    INVALID(pllm_prefix_unpin(NULL, 1));
    neither.prompt_token_ids = NULL;
    INVALID(pllm_prefix_pin(engine, &neither, &out));
    both.prompt = "hello";
    INVALID(pllm_prefix_pin(engine, &both, &out));
    no_salt.cache_salt_len = 3;
    INVALID(pllm_prefix_pin(engine, &no_salt, &out));
    CHECK(out == 77 && all_bytes_are(&info, 8, sizeof info, POISON));
    CHECK(info_of(engine, id).idle == 1 && info_of(engine, id).len == COUNT(PROMPT) + 3);
    free_sequence(engine, id);
    CHECK(is_idle(engine));
}

// Every list of the sampling parameters: NULL with a length, and a list that contains NULL.
static void null_lists_are_refused(const pllm_engine *engine) {
    static const char *const null_text[] = {NULL};
    static const pllm_token_list null_list[] = {{NULL, 1}};
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_dry dry;
#define LIST(list, len) \
    (sampling = greedy(), sampling.len = 1, INVALID(add_and_abort(engine, &request)))
#define LIST_OF_NULL(list, len, null)                             \
    (sampling = greedy(), sampling.list = null, sampling.len = 1, \
     INVALID(add_and_abort(engine, &request)))
    LIST(logit_bias, logit_bias_len);
    LIST(bad_words, bad_word_count);
    LIST_OF_NULL(bad_words, bad_word_count, null_text);
    LIST(bad_words_ids, bad_words_ids_len);
    LIST_OF_NULL(bad_words_ids, bad_words_ids_len, null_list);
    LIST(allowed_token_ids, allowed_token_ids_len);
    for (uint32_t kind = PLLM_GRAMMAR_JSON_SCHEMA; kind <= PLLM_GRAMMAR_LARK; kind++) {
        sampling = greedy();
        sampling.grammar_kind = kind;
        sampling.choice_count = 1;
        if (kind != PLLM_GRAMMAR_JSON_OBJECT) INVALID(add_and_abort(engine, &request));
        sampling.choices = null_text;
        if (kind == PLLM_GRAMMAR_CHOICE) INVALID(add_and_abort(engine, &request));
    }
    sampling = greedy();
    pllm_dry_init(&dry, sizeof dry);
    sampling.dry = &dry;
    dry.sequence_breaker_count = 1;
    INVALID(add_and_abort(engine, &request));
    dry.sequence_breakers = null_text;
    INVALID(add_and_abort(engine, &request));
    request = token_request(NULL);
    request.cache_salt_len = 1;
    INVALID(add_and_abort(engine, &request));
    CHECK(step_of(engine).sequences == 0 && is_idle(engine));
}

static void null_states_are_refused(const pllm_engine *engine) {
    const uint64_t id = keep_sequence(engine, 3);
    exported_sequence exported = export_and_collect(engine, id, &(generation){0}),
                      again = export_and_collect(engine, id, &(generation){0});
    uint64_t out = 77;
    INVALID(pllm_sequence_export(NULL, id, NULL));
    INVALID(pllm_sequence_import(NULL, exported.bytes, exported.len, NULL, &out));
    INVALID(pllm_sequence_import(engine, NULL, exported.len, NULL, &out));
    INVALID(pllm_sequence_import(engine, NULL, 0, NULL, &out));
    INVALID(pllm_sequence_import(engine, exported.bytes, 0, NULL, &out));
    INVALID(pllm_sequence_import(engine, exported.bytes, exported.len, NULL, NULL));
    CHECK(out == 77 && stats_of(engine).idle == 1);
    CHECK(exported.len == again.len &&
          !memcmp(exported.bytes, again.bytes,
                  exported.len));  // two exports of an idle sequence are equal
    free(exported.bytes);
    free(again.bytes);
    free_sequence(engine, id);
    CHECK(is_idle(engine));
}

const test null_arguments_tests[] = {
    WITH_BUNDLED(null_engines_and_options_are_refused),
    WITH_BUNDLED(null_requests_are_refused),
    WITH_BUNDLED(null_text_is_refused),
    WITH_BUNDLED(null_sequence_and_pin_arguments_are_refused),
    WITH_BUNDLED(null_lists_are_refused),
    WITH_BUNDLED(null_states_are_refused),
    {0},
};
