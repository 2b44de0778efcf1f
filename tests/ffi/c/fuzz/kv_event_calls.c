// Calls on KV events and the hashes of prompts.
#include "program.h"

static void check_event(const engine_slot *e, const pllm_kv_event *event) {
    bool is_stored = event->kind == PLLM_KV_EVENT_STORED;
    bool is_cleared = event->kind == PLLM_KV_EVENT_CLEARED;
    EXPECT(event->kind <= PLLM_KV_EVENT_CLEARED && event->medium == PLLM_KV_MEDIUM_POOL,
           "an event has kind %u and medium %u", event->kind, event->medium);
    EXPECT((event->hash != NULL) == !is_cleared && (event->parent_hash != NULL) == is_stored,
           "the hashes of an event contradict its kind %u", event->kind);
    EXPECT((event->tokens != NULL) == is_stored && (event->tokens_len > 0) == is_stored,
           "the tokens of an event contradict its kind %u", event->kind);
    EXPECT(!is_stored || event->first_token % event->tokens_len == 0,
           "a block of %llu tokens begins at token %llu", LLU(event->tokens_len),
           LLU(event->first_token));
    for (uint64_t i = 0; i < event->tokens_len; i++)
        EXPECT(event->tokens[i] < e->vocab, "an event has token %u", event->tokens[i]);
}

static void keep_events(worker *w, const engine_slot *e, pllm_kv_events *events) {
    uint64_t len = CALL(pllm_kv_events_len, events), last = 0;
    for (uint64_t i = 0; i < len; i++) {
        const pllm_kv_event *event = CALL(pllm_kv_events_get, events, i);
        check_event(e, event);
        EXPECT(event->sequence_number >= last, "the events are not in their order");
        EXPECT(event->kind != PLLM_KV_EVENT_CLEARED || i == 0, "the cache was cleared at event %llu",
               LLU(i));
        last = event->sequence_number;
    }
    EXPECT(CALL(pllm_kv_events_get, events, len) == NULL, "a batch has more events than its length");
    keep(w, (kept_object){.kind = KV_EVENTS, .as.kv_events = events});
}

void poll_kv_events(worker *w) {
    const engine_slot *e = any_engine(w);
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_poll_kv_events, e->engine, below(w, 2),
                       out ? (pllm_kv_events **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && out && e->options.kv_events_capacity), "poll_kv_events: %d", code);
    if (!code) keep_events(w, e, out->pointer);
}

void snapshot_kv_events(worker *w) {
    const engine_slot *e = any_engine(w);
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_snapshot_kv_events, e->engine,
                       out ? (pllm_kv_events **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && out && e->options.kv_events_capacity), "snapshot_kv_events: %d",
           code);
    if (code) return;
    const pllm_kv_event *first = CALL(pllm_kv_events_get, out->pointer, 0);
    EXPECT(first && first->kind == PLLM_KV_EVENT_CLEARED, "a snapshot does not begin with its start");
    keep_events(w, e, out->pointer);
}

void hash_prompt(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_request q;
    uint64_t declared;
    pllm_request *at = any_input_struct(w, &request_type, &q, &declared);
    argument tokens = any_tokens(w, e->vocab);
    q.prompt_token_ids = tokens.data;
    q.prompt_token_ids_len = tokens.len;
    choose_salt(w, &q.cache_salt, &q.cache_salt_len);
    copy_fields(at, &request_type, &q, declared);
    uint32_t group = one_in(w, 8) ? interesting_u32(w) : 0;
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_hash_prompt, e->engine, at, group,
                       out ? (pllm_bytes **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(code || (e->engine && !tokens.must_be_refused && group == 0),
           "hash_prompt accepted an invalid prompt or group %u", group);
    if (code) return;
    kept_object k = {.kind = BYTES, .as.bytes = out->pointer};
    uint64_t len = CALL(pllm_bytes_len, k.as.bytes);
    EXPECT(len % 32 == 0 && len / 32 <= tokens.len / 8, "%llu bytes of hashes of %llu tokens",
           LLU(len), LLU(tokens.len));
    w->hash = mix(w->hash, checksum(w, &k));
    keep(w, k);
}
