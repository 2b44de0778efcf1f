// Calls on prefix pins.
#include "program.h"

void pin_prefix(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_pin q;
    pllm_request prompt;
    uint64_t declared;
    pllm_pin *at = any_input_struct(w, &pin_type, &q, &declared);
    pllm_request_init(&prompt, sizeof prompt);
    choose_prompt(w, e, &prompt, &(expected_run){0});
    q.prompt = prompt.prompt, q.prompt_len = prompt.prompt_len;
    q.prompt_token_ids = prompt.prompt_token_ids,
    q.prompt_token_ids_len = prompt.prompt_token_ids_len;
    choose_salt(w, &q.cache_salt, &q.cache_salt_len);
    q.priority = below(w, 4);
    // Results that depend on time are not repeatable.
    if (program.may_start && one_in(w, 2)) q.time_to_live_ms = below(w, 3);
    if (one_in(w, 8)) q.time_to_live_ms = UINT64_MAX - below(w, 2);
    if (one_in(w, 8)) q.text_flags = interesting_u32(w);
    copy_fields(at, &pin_type, &q, declared);
    out_parameter *out = any_out_parameter(w);
    int32_t code =
        TRY(pllm_prefix_pin, e->engine, one_in(w, 64) ? NULL : at, out ? &out->number : NULL);
    check_out_parameter(out, code, sizeof out->number);
    EXPECT(code || e->engine, "pin on a NULL engine succeeded");
    if (!code) w->hash = mix(w->hash, out->number), oracle_pinned(e->number, out->number);
}

static void unpin(worker *w, const engine_slot *e, pin_slot *pin, uint64_t id) {
    bool again = pin && pin->unpinned && !program.racing;
    int32_t code = TRY(pllm_prefix_unpin, e->engine, id);
    if (mutation == pin_is_unpinned_twice && again) code = 0;
    EXPECT(e->engine ? code == 0 || code == PLLM_E_NOT_FOUND : code == PLLM_E_INVALID_ARGUMENT,
           "unpin failed with %d", code);
    EXPECT(code || !again, "pin %llu was unpinned before, and the call succeeded", LLU(id));
    if (pin) pin->unpinned = true;
}

void unpin_any(worker *w) {
    const engine_slot *e = any_engine(w);
    pin_slot *pin = one_in(w, 8) ? NULL : oracle_any_pin(e->number, byte(w));
    unpin(w, e, pin, pin ? pin->id : interesting_u64(w) | 1 << 20);
}

void unpin_all(worker *w, const engine_slot *e) {
    for (unsigned i = 0; i < MAX_PINS; i++) {
        pin_slot *pin = oracle_any_pin(e->number, i);
        if (pin && !pin->unpinned) unpin(w, e, pin, pin->id);
    }
}
