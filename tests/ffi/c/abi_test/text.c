// Tokenizer and chat template.
#include "abi_test.h"

static void text_that_is_not_utf8_is_refused(const pllm_engine *engine) {
    static const char *const invalid[] = {"\xff",         "ab\xc3",           "\xc0\x80",
                                          "\xed\xa0\x80", "\xf5\x80\x80\x80", "a\x80z"};
    pllm_tokens *tokens = UNTOUCHED;
    pllm_bytes *bytes = UNTOUCHED;
    for (size_t i = 0; i < COUNT(invalid); i++) {
        pllm_engine_options options = options_for(invalid[i]);
        pllm_plan plan = {.struct_size = sizeof plan};
        INVALID(pllm_engine_plan(&options, &plan));
        options = options_for(golden_dir);
        options.device = invalid[i];
        options.device_len = strlen(invalid[i]);
        INVALID(pllm_engine_plan(&options, &plan));
        pllm_request request = text_request(invalid[i], NULL);
        INVALID(add_and_abort(engine, &request));
        pllm_sampling sampling = greedy();
        sampling.stop = &invalid[i];
        sampling.stop_count = 1;
        request = text_request("hello", &sampling);
        INVALID(add_and_abort(engine, &request));
        INVALID(pllm_engine_tokenize(engine, invalid[i], PLLM_NUL_TERMINATED, 0, &tokens));
        INVALID(pllm_engine_render_chat(engine, invalid[i], strlen(invalid[i]), &bytes));
    }
    CHECK(tokens == UNTOUCHED && bytes == UNTOUCHED);
}

static void malformed_chats_are_refused(const pllm_engine *engine) {
    static const char *const invalid[] = {"",
                                          "{",
                                          "[",
                                          "3",
                                          "null",
                                          "\"x\"",
                                          "{}",
                                          "{\"messages\": 3}",
                                          "[{\"role\": \"user\"}",
                                          "[] x",
                                          "{\"messages\": [], \"messages\"",
                                          "[{\"role\": \"\\ud800\", \"content\": \"\"}]"};
    static char deep[200000];
    pllm_bytes *bytes = UNTOUCHED;
    for (size_t i = 0; i < COUNT(invalid); i++)
        INVALID(pllm_engine_render_chat(engine, invalid[i], strlen(invalid[i]), &bytes));
    memset(deep, '[', sizeof deep);
    INVALID(pllm_engine_render_chat(engine, deep, sizeof deep, &bytes));
    CHECK(bytes == UNTOUCHED);
}

static void text_needs_a_tokenizer(const pllm_engine *golden) {
    pllm_tokens *tokens = UNTOUCHED;
    pllm_bytes *bytes = UNTOUCHED;
    pllm_request request = text_request("hello", NULL);
    UNSUPPORTED(add_and_abort(golden, &request));
    UNSUPPORTED(pllm_engine_tokenize(golden, "a", 1, 0, &tokens));
    UNSUPPORTED(pllm_engine_detokenize(golden, PROMPT, 1, 0, &bytes));
    UNSUPPORTED(pllm_engine_render_chat(golden, "[]", 2, &bytes));
    pllm_response_parser *parser = UNTOUCHED;
    UNSUPPORTED(pllm_response_parser_create(golden, "{}", 2, &parser));
    CHECK(parser == UNTOUCHED);
    pllm_sampling sampling = greedy();
    sampling.stop = (const char *const[]){"x"};
    sampling.stop_count = 1;
    request = token_request(&sampling);
    UNSUPPORTED(add_and_abort(golden, &request));
    CHECK(tokens == UNTOUCHED && bytes == UNTOUCHED);
}

static void text_survives_tokenize_and_detokenize(const pllm_engine *engine) {
    const char *text = "Hello, world! \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80";
    pllm_tokens *tokens = NULL;
    pllm_bytes *bytes = NULL;
    OK(pllm_engine_tokenize(engine, text, PLLM_NUL_TERMINATED, 0, &tokens));
    OK(pllm_engine_detokenize(engine, pllm_tokens_data(tokens), pllm_tokens_len(tokens),
                              PLLM_TEXT_SKIP_SPECIAL, &bytes));
    CHECK(pllm_bytes_len(bytes) == strlen(text) &&
          !memcmp(pllm_bytes_data(bytes), text, strlen(text)));
    pllm_tokens_free(tokens);
    pllm_bytes_free(bytes);
    OK(pllm_engine_tokenize(engine, NULL, 0, 0, &tokens));
    CHECK(pllm_tokens_len(tokens) == 0 && pllm_tokens_data(tokens) == NULL);
    pllm_tokens_free(tokens);
    OK(pllm_engine_detokenize(engine, NULL, 0, 0, &bytes));
    CHECK(pllm_bytes_len(bytes) == 0 && pllm_bytes_data(bytes) == NULL);
    pllm_bytes_free(bytes);
    bytes = UNTOUCHED;
    INVALID(pllm_engine_detokenize(engine, (const uint32_t[]){5, UINT32_MAX}, 2, 0, &bytes));
    INVALID(pllm_engine_detokenize(engine, (const uint32_t[]){1024}, 1, 0, &bytes));
    CHECK(bytes == UNTOUCHED);
    const char *chat = "[{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]";
    OK(pllm_engine_render_chat(engine, chat, PLLM_NUL_TERMINATED, &bytes));
    CHECK(pllm_bytes_len(bytes) == strlen(FRANCE) &&
          !memcmp(pllm_bytes_data(bytes), FRANCE, strlen(FRANCE)));
    pllm_bytes_free(bytes);
}

static void texts_beyond_max_prompt_bytes_are_refused(void) {
    static char text[(1 << 20) + 2];
    memset(text, ' ', sizeof text - 1);
    pllm_engine *engine = NULL;
    pllm_engine_options options = options_for(model_dir);
    pllm_tokens *tokens = NULL;
    pllm_bytes *prompt = NULL;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = text;
    uint64_t id = 77;
    options.max_prompt_bytes = 100;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    OK(pllm_engine_tokenize(engine, text, 100, 0, &tokens));
    pllm_tokens_free(tokens);
    INVALID(pllm_engine_tokenize(engine, text, 101, 0, &tokens));
    request.prompt_len = 101;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    INVALID(pllm_engine_render_chat(engine, text, 101, &prompt));
    CHECK(id == 77);
    pllm_engine_free(engine);
    // The default is 64 bytes per token of max_model_len, and at least 1 MiB.
    options.max_prompt_bytes = 0;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    OK(pllm_engine_tokenize(engine, text, 1 << 20, 0, &tokens));
    pllm_tokens_free(tokens);
    INVALID(pllm_engine_tokenize(engine, text, (1 << 20) + 1, 0, &tokens));
    pllm_engine_free(engine);
}

static void the_bytes_of_tokens_join_to_their_text(const pllm_engine *engine) {
    const char *text = "Grüße, 日本! <|end|>";
    pllm_tokens *tokens = NULL;
    if (!OK(pllm_engine_tokenize(engine, text, PLLM_NUL_TERMINATED, 0, &tokens))) return;
    char joined[64] = "";
    uint64_t size = 0;
    for (uint64_t i = 0; i < pllm_tokens_len(tokens); i++) {
        const uint8_t *bytes = NULL;
        uint64_t len = 0;
        OK(pllm_engine_get_token_bytes(engine, pllm_tokens_data(tokens)[i], &bytes, &len));
        CHECK(len > 0 && size + len < sizeof joined);
        memcpy(joined + size, bytes, len);
        size += len;
    }
    CHECK(size == strlen(text) && !memcmp(joined, text, size));
    pllm_tokens_free(tokens);
    const uint8_t *bytes = UNTOUCHED;
    uint64_t len = 77;
    INVALID(pllm_engine_get_token_bytes(engine, UINT32_MAX, &bytes, &len));
    CHECK(bytes == UNTOUCHED && len == 77);
    OK(pllm_engine_health(engine));
}

static void a_prompt_that_is_too_long_reports_both_numbers(const pllm_engine *engine) {
    static uint32_t tokens[10000];
    for (int i = 0; i < 10000; i++) tokens[i] = 5;
    pllm_request request;
    uint64_t id = 77;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = tokens;
    request.prompt_token_ids_len = COUNT(tokens);
    pllm_error *error = pllm_engine_add_request(engine, &request, &id);
    CHECK(pllm_error_code(error) == PLLM_E_INVALID_ARGUMENT && id == 77);
    pllm_model_info info = {.struct_size = sizeof info};
    OK(pllm_engine_get_model_info(engine, &info));
    CHECK(pllm_error_prompt_tokens(error) == COUNT(tokens) &&
          pllm_error_max_model_len(error) == info.max_model_len);
    pllm_error_free(error);
    error = pllm_engine_abort(engine, 12345);
    CHECK(error && !pllm_error_prompt_tokens(error) && !pllm_error_max_model_len(error) &&
          !pllm_error_is_temporary(error));
    pllm_error_free(error);
    CHECK(!pllm_error_prompt_tokens(NULL) && !pllm_error_max_model_len(NULL) &&
          !pllm_error_is_temporary(NULL));
}

// Ends a request by `sampling`, and returns its last output. The caller frees the batch.
static pllm_output ended_by(const pllm_engine *engine, pllm_sampling *sampling,
                            pllm_outputs **batch) {
    pllm_request request = text_request(FRANCE, sampling);
    uint64_t id = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_to_the_end(engine);
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, batch));
    pllm_output last = *pllm_outputs_get(*batch, pllm_outputs_len(*batch) - 1);
    CHECK(last.finish_reason != PLLM_FINISH_NONE);
    return last;
}

static void outputs_report_what_ended_them(const pllm_engine *engine) {
    static const char *const stops[] = {"never", "Paris"};
    pllm_outputs *batch = NULL;
    pllm_sampling sampling = greedy();
    sampling.max_tokens = 40;
    pllm_output o = ended_by(engine, &sampling, &batch);
    CHECK(o.finish_reason == PLLM_FINISH_STOP && o.stop_reason == PLLM_STOP_EOS);
    const uint32_t eos = o.stop_token;
    CHECK(eos > 0 && !o.stop_string && !o.stop_string_len);
    pllm_outputs_free(batch);
    sampling.stop_token_ids = &eos;
    sampling.stop_token_ids_len = 1;
    o = ended_by(engine, &sampling, &batch);
    CHECK(o.stop_reason == PLLM_STOP_TOKEN && o.stop_token == eos);
    pllm_outputs_free(batch);
    sampling.stop = stops;
    sampling.stop_count = COUNT(stops);
    o = ended_by(engine, &sampling, &batch);
    CHECK(o.stop_reason == PLLM_STOP_STRING && o.stop_token == 0 && o.stop_string_len == 5 &&
          !memcmp(o.stop_string, "Paris", 5));
    pllm_outputs_free(batch);
    sampling = greedy();
    sampling.max_tokens = 2;
    o = ended_by(engine, &sampling, &batch);
    CHECK(o.finish_reason == PLLM_FINISH_LENGTH && o.stop_reason == PLLM_STOP_NONE);
    CHECK(o.stop_token == 0 && !o.stop_string && !o.stop_string_len);
    pllm_outputs_free(batch);
    sampling.max_tokens = 40;
    sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;
    sampling.choices = stops;
    sampling.choice_count = COUNT(stops);
    o = ended_by(engine, &sampling, &batch);
    CHECK(o.finish_reason == PLLM_FINISH_STOP && o.stop_reason == PLLM_STOP_GRAMMAR);
    pllm_outputs_free(batch);
}

static void check_deltas(pllm_bytes *deltas, const char *expected) {
    const char *data = pllm_bytes_data(deltas);
    uint64_t len = pllm_bytes_len(deltas);
    int same = len == strlen(expected) && !memcmp(data, expected, len);
    if (!same) printf("deltas are %.*s, not %s\n", (int)len, data, expected);
    CHECK(same);
    pllm_bytes_free(deltas);
}

static void responses_are_parsed_in_pieces(const pllm_engine *engine) {
    static const char *const pieces[] = {"Hm", "</think>\n\nOn it. <tool_",
                                         "call>{\"name\": \"f\", \"argum",
                                         "ents\": {\"x\": 1}}</tool_call>"};
    static const char *const expected[] = {
        "[{\"reasoning_content\":\"Hm\"}]",
        "[{\"content\":\"On it.\"}]",
        "[]",
        "[{\"tool_calls\":[{\"index\":0,\"id\":\"a0\",\"type\":\"function\","
        "\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]},"
        "{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"x\\\": 1}\"}}]}]"};
    const char *settings = "{\"format\": \"qwen3\", \"prompt\": \"Hi <think>\\n\", "
                           "\"tool_call_id_prefix\": \"a\"}";
    pllm_response_parser *parser = NULL;
    pllm_bytes *deltas = NULL;
    OK(pllm_response_parser_create(engine, settings, strlen(settings), &parser));
    for (size_t i = 0; i < COUNT(pieces); i++) {
        OK(pllm_response_parser_feed(parser, pieces[i], strlen(pieces[i]), &deltas));
        check_deltas(deltas, expected[i]);
    }
    OK(pllm_response_parser_finish(parser, &deltas));
    check_deltas(deltas, "[]");
    deltas = UNTOUCHED;
    INVALID(pllm_response_parser_finish(parser, &deltas));
    INVALID(pllm_response_parser_feed(parser, "x", 1, &deltas));
    pllm_response_parser_free(parser);

    // Without an engine, and with the format of the engine's model.
    OK(pllm_response_parser_create(NULL, "{\"format\": \"json\"}", PLLM_NUL_TERMINATED, &parser));
    INVALID(pllm_response_parser_feed(parser, "\xff", 1, &deltas));
    INVALID(pllm_response_parser_feed(parser, NULL, 1, &deltas));
    INVALID(pllm_response_parser_feed(parser, "x", 1, NULL));
    INVALID(pllm_response_parser_feed(NULL, "x", 1, &deltas));
    INVALID(pllm_response_parser_finish(parser, NULL));
    INVALID(pllm_response_parser_finish(NULL, &deltas));
    CHECK(deltas == UNTOUCHED);
    OK(pllm_response_parser_feed(parser, "x", 1, &deltas));
    check_deltas(deltas, "[{\"content\":\"x\"}]");
    pllm_response_parser_free(parser);
    OK(pllm_response_parser_create(engine, "{}", PLLM_NUL_TERMINATED, &parser));
    OK(pllm_response_parser_feed(parser, "<tool_call>", 11, &deltas));
    check_deltas(deltas, "[{\"content\":\"<tool_call>\"}]");
    pllm_response_parser_free(parser);
    pllm_response_parser_free(NULL);
}

static void wrong_settings_of_parsers_are_refused(const pllm_engine *engine) {
    static const char *const invalid[] = {"", "[]", "{", "{\"format\": \"x\"}", "{\"format\": 1}",
                                          "{\"tools\": 1}", "{\"tools\": [{}]}", "{\"x\": 1}",
                                          "\xff"};
    pllm_response_parser *parser = UNTOUCHED;
    for (size_t i = 0; i < COUNT(invalid); i++)
        INVALID(pllm_response_parser_create(engine, invalid[i], strlen(invalid[i]), &parser));
    INVALID(pllm_response_parser_create(engine, NULL, 2, &parser));
    INVALID(pllm_response_parser_create(engine, "{}", 2, NULL));
    INVALID(pllm_response_parser_create(NULL, "{}", 2, &parser));
    CHECK(parser == UNTOUCHED);
}

const test text_tests[] = {
    WITH_BUNDLED(responses_are_parsed_in_pieces),
    WITH_BUNDLED(wrong_settings_of_parsers_are_refused),
    WITH_BUNDLED(the_bytes_of_tokens_join_to_their_text),
    WITH_BUNDLED(a_prompt_that_is_too_long_reports_both_numbers),
    WITH_BUNDLED(outputs_report_what_ended_them),
    WITH_BUNDLED(text_that_is_not_utf8_is_refused),
    WITH_BUNDLED(malformed_chats_are_refused),
    WITH_GOLDEN(text_needs_a_tokenizer),
    WITH_BUNDLED(text_survives_tokenize_and_detokenize),
    ALONE(texts_beyond_max_prompt_bytes_are_refused),
    {0},
};
