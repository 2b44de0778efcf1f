// Calls on text, metrics, the library, and NULL handles.
#include "program.h"

void get_metrics(worker *w) {
    const engine_slot *e = any_engine(w);
    out_parameter *out = any_out_parameter(w);
    int32_t code =
        TRY(pllm_engine_get_metrics, e->engine, out ? (pllm_bytes **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && out), "get_metrics: code %d", code);
    if (code) return;
    static const char end[] = "# EOF\n";
    kept_object k = {.kind = BYTES, .as.bytes = out->pointer};
    const char *text = CALL(pllm_bytes_data, k.as.bytes);
    uint64_t len = CALL(pllm_bytes_len, k.as.bytes);
    bool is_complete = len > strlen(end) && !memcmp(text + len - strlen(end), end, strlen(end));
    EXPECT(is_complete && is_utf8(text, len), "the metrics are not UTF-8, or lack # EOF");
    keep(w, k);
}

void get_snapshot(worker *w) {
    const engine_slot *e = any_engine(w);
    out_parameter *out = any_out_parameter(w);
    uint64_t blocks = one_in(w, 2) ? interesting_u32(w) : UINT64_MAX, sequences = below(w, 5);
    int32_t code = TRY(pllm_engine_snapshot, e->engine, blocks, sequences,
                       out ? (pllm_bytes **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && out), "snapshot: code %d", code);
    if (code) return;
    kept_object k = {.kind = BYTES, .as.bytes = out->pointer};
    const char *text = CALL(pllm_bytes_data, k.as.bytes);
    uint64_t len = CALL(pllm_bytes_len, k.as.bytes);
    EXPECT(len > 2 && text[0] == '{' && text[len - 1] == '}', "the snapshot is no JSON object");
    keep(w, k);
}

void tokenize(worker *w) {
    const engine_slot *e = any_text_engine(w);
    argument text = any_text(w);
    uint32_t flags = one_in(w, 16) ? interesting_u32(w) : below(w, 2);
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_tokenize, e->engine, text.data, text.len, flags,
                       out ? (pllm_tokens **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(code || (e->has_text && !text.must_be_refused && flags <= 1),
           "invalid text was tokenized");
    if (code) return;
    kept_object k = {.kind = TOKENS, .as.tokens = out->pointer};
    w->hash = mix(w->hash, checksum(w, &k));
    const uint32_t *ids = CALL(pllm_tokens_data, k.as.tokens);
    uint64_t len = CALL(pllm_tokens_len, k.as.tokens);
    EXPECT((ids != NULL) == (len > 0), "tokens and their length contradict each other");
    for (uint64_t i = 0; i < len; i++)
        EXPECT(ids[i] < e->vocab, "a token is %u, beyond the vocabulary", ids[i]);
    keep(w, k);
}

static void keep_text(worker *w, pllm_bytes *bytes) {
    kept_object k = {.kind = BYTES, .as.bytes = bytes};
    const char *data = CALL(pllm_bytes_data, bytes);
    uint64_t len = CALL(pllm_bytes_len, bytes);
    w->hash = mix(w->hash, checksum(w, &k));
    EXPECT((data != NULL) == (len > 0) && is_utf8(data, len),
           "a text is not UTF-8, or contradicts its length");
    keep(w, k);
}

void detokenize(worker *w) {
    const engine_slot *e = any_text_engine(w);
    argument tokens = any_tokens(w, e->vocab);
    uint32_t flags = one_in(w, 16) ? interesting_u32(w) : below(w, 2) * PLLM_TEXT_SKIP_SPECIAL;
    out_parameter *out = any_out_parameter(w);
    pllm_bytes **out_text = out ? (pllm_bytes **)&out->pointer : NULL;
    int32_t code = TRY(pllm_engine_detokenize, e->engine, tokens.data, tokens.len, flags, out_text);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(code || (e->has_text && !tokens.must_be_refused && !(flags & ~2u)),
           "invalid tokens were detokenized");
    if (!code) keep_text(w, out->pointer);
}

void get_token_bytes(worker *w) {
    const engine_slot *e = any_text_engine(w);
    uint32_t token = one_in(w, 8) ? interesting_u32(w) : below(w, 2000);
    out_parameter *bytes = any_out_parameter(w), *len = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_get_token_bytes, e->engine, token,
                       bytes ? (const uint8_t **)&bytes->pointer : NULL,
                       len ? &len->number : NULL);
    check_out_parameter(bytes, code, sizeof bytes->pointer);
    check_out_parameter(len, code, sizeof len->number);
    EXPECT(!code == (e->engine && e->has_text && bytes && len && token < e->vocab),
           "get_token_bytes of %u: code %d", token, code);
    if (code) return;
    EXPECT((bytes->pointer != NULL) == (len->number > 0), "bytes contradict their length");
    w->hash = mix_bytes(w->hash, bytes->pointer, len->number);
}

void check_health(worker *w) {
    const engine_slot *e = any_engine(w);
    int32_t code = TRY(pllm_engine_health, e->engine);
    EXPECT(code == (e->engine ? 0 : PLLM_E_INVALID_ARGUMENT), "health: code %d", code);
}

void render_chat(worker *w) {
    const engine_slot *e = any_text_engine(w);
    argument chat = any_chat(w);
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_render_chat, e->engine, chat.data, chat.len,
                       out ? (pllm_bytes **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(code || (e->has_text && !chat.must_be_refused && chat.len),
           "an invalid chat was rendered");
    if (!code) keep_text(w, out->pointer);
}

// Creates a parser with valid or random settings, feeds it random texts, and ends its response.
void parse_response(worker *w) {
    static const char *const valid[] = {"{\"format\": \"hermes\"}", "{\"format\": \"harmony\"}",
                                        "{\"format\": \"pythonic\"}", "{\"format\": \"glm45\"}"};
    const engine_slot *e = any_text_engine(w);
    out_parameter *out = any_out_parameter(w);
    pllm_response_parser **out_parser = out ? (pllm_response_parser **)&out->pointer : NULL;
    argument random = any_chat(w);
    const char *settings = one_in(w, 2) ? random.data : valid[below(w, 4)];
    uint64_t len = settings == random.data ? random.len : strlen(settings);
    int32_t code = TRY(pllm_response_parser_create, e->engine, settings, len, out_parser);
    check_out_parameter(out, code, sizeof out->pointer);
    if (code) return;
    pllm_response_parser *parser = out->pointer;
    for (unsigned n = below(w, 4); n > 0; n--) {
        argument text = any_text(w);
        out_parameter *deltas = any_out_parameter(w);
        pllm_bytes **out_deltas = deltas ? (pllm_bytes **)&deltas->pointer : NULL;
        code = TRY(pllm_response_parser_feed, parser, text.data, text.len, out_deltas);
        check_out_parameter(deltas, code, sizeof deltas->pointer);
        EXPECT(code || !text.must_be_refused, "a parser took invalid text");
        if (!code) keep_text(w, deltas->pointer);
    }
    pllm_bytes *deltas = NULL;
    EXPECT(!TRY(pllm_response_parser_finish, parser, &deltas), "a response could not be ended");
    keep_text(w, deltas);
    code = TRY(pllm_response_parser_finish, parser, &deltas);
    EXPECT(code == PLLM_E_INVALID_ARGUMENT, "a response ended twice: code %d", code);
    CALL(pllm_response_parser_free, parser);
}

void check_library_info(worker *w) {
    EXPECT(CALL_VOID(pllm_abi_version) == PLLM_ABI_VERSION, "the ABI's version differs");
    const char *info = CALL_VOID(pllm_build_info), *version = CALL_VOID(pllm_version);
    bool is_json = is_utf8(info, strlen(info)) && info[0] == '{';
    EXPECT(is_json && strstr(info, version), "the build info lacks the version: %s", info);
}

void check_null_handles(worker *w) {
    EXPECT(CALL(pllm_outputs_len, NULL) == 0 &&
               CALL(pllm_outputs_get, NULL, interesting_u64(w)) == NULL,
           "NULL outputs are not empty");
    EXPECT(CALL(pllm_tokens_len, NULL) == 0 && CALL(pllm_tokens_data, NULL) == NULL,
           "NULL tokens are not empty");
    EXPECT(CALL(pllm_bytes_len, NULL) == 0 && CALL(pllm_bytes_data, NULL) == NULL,
           "NULL bytes are not empty");
    EXPECT(CALL(pllm_kv_events_len, NULL) == 0 && CALL(pllm_kv_events_get, NULL, 0) == NULL,
           "NULL events are not empty");
    EXPECT(CALL(pllm_engine_queue, NULL) == NULL, "NULL has a queue");
    EXPECT(CALL(pllm_engine_budget, NULL) == NULL, "NULL has a budget");
    uint64_t size = interesting_u64(w);
    CALL(pllm_engine_options_init, NULL, size);
    CALL(pllm_request_init, NULL, size);
    CALL(pllm_sampling_init, NULL, size);
    CALL(pllm_dry_init, NULL, size);
    CALL(pllm_beam_init, NULL, size);
    CALL(pllm_fork_init, NULL, size);
    CALL(pllm_resume_init, NULL, size);
    CALL(pllm_pin_init, NULL, size);
    CALL(pllm_kv_store_init, NULL, size);
    pllm_kv_store store;
    CALL(pllm_kv_store_init, &store, sizeof store);
    EXPECT(store.struct_size == sizeof store, "struct_size was not set");
    CALL(pllm_communicator_init, NULL, size);
    pllm_communicator communicator;
    CALL(pllm_communicator_init, &communicator, sizeof communicator);
    EXPECT(communicator.struct_size == sizeof communicator, "struct_size was not set");
}

void free_any_kept(worker *w) { free_kept(w, &w->kept_objects[below(w, COUNT(w->kept_objects))]); }

void check_engine_queue(worker *w) {
    const engine_slot *e = any_engine(w);
    EXPECT(CALL(pllm_engine_queue, e->engine) == e->own.queue, "an engine's own queue changed");
}
