// Checks of errors, out parameters and structs, and objects that are kept for a while.
#include "program.h"

static uint64_t checksum_of_output(const pllm_output *o) {
    uint64_t hash = mix(mix(mix(o->request, o->sequence), o->user_data), o->finish_reason);
    hash = mix_bytes(hash, o->tokens, o->tokens_len * sizeof *o->tokens);
    hash = mix_bytes(hash, o->logprobs, o->logprobs ? o->tokens_len * sizeof *o->logprobs : 0);
    hash = mix_bytes(mix_bytes(hash, o->text, o->text_len), o->error, o->error_len);
    hash = mix_bytes(hash, o->top_logprobs, o->top_logprobs_len * sizeof *o->top_logprobs);
    hash = mix_bytes(hash, o->prompt_logprobs, o->prompt_logprobs_len * sizeof *o->prompt_logprobs);
    hash = mix_bytes(hash, o->prompt_top_logprobs,
                     o->prompt_top_logprobs_len * sizeof *o->prompt_top_logprobs);
    hash = mix_bytes(hash, &o->score, sizeof o->score);
    return mix(mix(mix(hash, o->prompt_tokens), o->generated_tokens), (uint64_t)o->error_code);
}

uint64_t checksum_of_batch(worker *w, const pllm_outputs *outputs) {
    uint64_t sum = 0, len = CALL(pllm_outputs_len, outputs);
    for (uint64_t i = 0; i < len; i++)
        sum += checksum_of_output(CALL(pllm_outputs_get, outputs, i));
    return sum;
}

static uint64_t checksum_of_events(worker *w, const pllm_kv_events *events) {
    uint64_t sum = 4, len = CALL(pllm_kv_events_len, events);
    for (uint64_t i = 0; i < len; i++) {
        const pllm_kv_event *event = CALL(pllm_kv_events_get, events, i);
        uint64_t hash = mix(mix(event->sequence_number, event->kind), event->first_token);
        hash = mix_bytes(hash, event->hash, event->hash ? 32 : 0);
        hash = mix_bytes(hash, event->parent_hash, event->parent_hash ? 32 : 0);
        sum += mix_bytes(hash, event->tokens, event->tokens_len * sizeof *event->tokens);
    }
    return sum;
}

uint64_t checksum(worker *w, const kept_object *k) {
    switch (k->kind) {
    case ERROR: {
        const char *message = CALL(pllm_error_message, k->as.error);
        return mix_bytes((uint64_t)CALL(pllm_error_code, k->as.error), message, strlen(message));
    }
    case OUTPUTS: return checksum_of_batch(w, k->as.outputs);
    case TOKENS: {
        uint64_t len = CALL(pllm_tokens_len, k->as.tokens);
        return mix_bytes(2, CALL(pllm_tokens_data, k->as.tokens), len * sizeof(uint32_t));
    }
    case BYTES: {
        uint64_t len = CALL(pllm_bytes_len, k->as.bytes);
        return mix_bytes(3, CALL(pllm_bytes_data, k->as.bytes), len);
    }
    case KV_EVENTS: return checksum_of_events(w, k->as.kv_events);
    case NOTHING: break;
    }
    return 0;
}

void free_kept(worker *w, kept_object *k) {
    if (mutation == batch_changes_after_its_engine && k->kind == OUTPUTS) k->checksum++;
    EXPECT(checksum(w, k) == k->checksum,
           "an error, a batch, tokens or bytes changed after the call");
    // Freeing NULL is allowed.
    CALL(pllm_error_free, k->kind == ERROR ? k->as.error : NULL);
    CALL(pllm_outputs_free, k->kind == OUTPUTS ? k->as.outputs : NULL);
    CALL(pllm_tokens_free, k->kind == TOKENS ? k->as.tokens : NULL);
    CALL(pllm_bytes_free, k->kind == BYTES ? k->as.bytes : NULL);
    CALL(pllm_kv_events_free, k->kind == KV_EVENTS ? k->as.kv_events : NULL);
    *k = (kept_object){.kind = NOTHING};
}

void free_all_kept(worker *w) {
    for (size_t i = 0; i < COUNT(w->kept_objects); i++) free_kept(w, &w->kept_objects[i]);
}

void keep(worker *w, kept_object k) {
    kept_object *slot = &w->kept_objects[below(w, COUNT(w->kept_objects))];
    free_kept(w, slot);
    *slot = k;
    slot->checksum = checksum(w, slot);
}

static void keep_or_free_error(worker *w, pllm_error *error) {
    if (one_in(w, 8)) keep(w, (kept_object){.kind = ERROR, .as.error = error});
    else CALL(pllm_error_free, error);
}

int32_t check_error(worker *w, int function, pllm_error *error) {
    const char *name = function_names[function], *message = CALL(pllm_error_message, error);
    int32_t code = CALL(pllm_error_code, error);
    if (!error) {
        EXPECT(code == 0 && message[0] == 0 && CALL(pllm_error_prompt_tokens, NULL) == 0 &&
                   CALL(pllm_error_max_model_len, NULL) == 0 && CALL(pllm_error_is_temporary, NULL) == 0,
               "NULL, which is success, has a code, a message or a prompt, or is temporary");
        shared_status->succeeded[function]++;
        w->hash = mix(w->hash, (uint64_t)function);
        return 0;
    }
    shared_status->failed[function]++;
    if (mutation == code_is_unknown) code = PLLM_E_CANCELLED + 1;
    if (mutation == message_is_empty) message = "";
    if (mutation == message_is_not_utf8) message = "\xE6\x97";
    EXPECT(code >= PLLM_E_INVALID_ARGUMENT && code <= PLLM_E_CANCELLED,
           "%s failed with the unknown code %d", name, code);
    EXPECT(message[0] != 0, "%s failed with %d without a message", name, code);
    EXPECT(is_utf8(message, strlen(message)), "the message is not UTF-8: %s", name);
    EXPECT(code != PLLM_E_INTERNAL, "%s returned an internal error: %s", name, message);
    w->hash = mix(mix(w->hash, (uint64_t)function), (uint64_t)code);
    uint64_t tokens = CALL(pllm_error_prompt_tokens, error);
    uint64_t max_len = CALL(pllm_error_max_model_len, error);
    EXPECT(tokens ? code == PLLM_E_INVALID_ARGUMENT && tokens >= max_len : max_len == 0,
           "%s: a prompt of %llu tokens is too long for %llu", name, LLU(tokens), LLU(max_len));
    int32_t is_temporary = CALL(pllm_error_is_temporary, error);
    EXPECT(code == PLLM_E_CAPACITY ? is_temporary == 0 || is_temporary == 1
                                   : is_temporary == (code == PLLM_E_BUSY || code == PLLM_E_OUT_OF_MEMORY),
           "%s: the error %d is temporary: %d", name, code, is_temporary);
    keep_or_free_error(w, error);
    return code;
}

out_parameter *any_out_parameter(worker *w) {
    return one_in(w, 32) ? NULL : guarded(w, sizeof(out_parameter));
}

bool is_poison(const void *data, uint64_t len) {
    for (uint64_t i = 0; i < len; i++)
        if (((const unsigned char *)data)[i] != POISON) return false;
    return true;
}

void check_out_parameter(out_parameter *out, int32_t code, size_t size) {
    if (!out) {
        EXPECT(code != 0, "a call with a NULL out parameter succeeded");
        return;
    }
    if (mutation == out_pointer_is_written_on_failure && code) out->pointer = NULL;
    if (mutation == out_pointer_is_not_written && !code) memset(out, POISON, sizeof *out);
    EXPECT(!code || is_poison(out, sizeof *out),
           "the out parameter was written by a call that failed with %d", code);
    EXPECT(code || !is_poison(out, size),
           "the out parameter was not written by a call that succeeded");
    EXPECT(is_poison(out->bytes + size, sizeof *out - size),
           "bytes behind the out parameter were written");
}

out_struct any_out_struct(worker *w, uint64_t first, uint64_t known) {
    out_struct s = {NULL, any_struct_size(w, first, known), first, known};
    if (one_in(w, 32)) return s;
    s.at = struct_buffer(w, s.declared, known);
    memcpy(s.at, &s.declared, sizeof s.declared);
    return s;
}

bool has_valid_size(const out_struct *s) {
    return s->at && s->declared >= s->first && s->declared <= 1 << 16 && s->declared % 8 == 0;
}

static bool all_words_written(const out_struct *s) {
    for (uint64_t i = 8; i < s->declared && i < s->known; i += 8)
        if (is_poison((char *)s->at + i, 8)) return false;
    for (uint64_t i = s->known; i < s->declared; i++)
        if (((char *)s->at)[i] != 0) return false;
    return true;
}

bool check_out_struct(const out_struct *s, int32_t code, void *known) {
    EXPECT(code || has_valid_size(s), "an invalid struct_size %llu was accepted", LLU(s->declared));
    if (!s->at) return false;
    uint64_t size = s->declared < 8 || s->declared > BUFFER_BYTES ? 8 : s->declared;
    if (mutation == out_struct_is_written_on_failure && code && size > 8) ((char *)s->at)[8] = 0;
    if (mutation == out_struct_is_not_written && !code) memset((char *)s->at + 8, POISON, 8);
    EXPECT(!memcmp(s->at, &s->declared, sizeof s->declared), "struct_size was written");
    EXPECT(!code || is_poison((char *)s->at + 8, size - 8),
           "the struct was written by a call that failed with %d", code);
    EXPECT(code || all_words_written(s),
           "the struct was not written, or an unknown field is not zero");
    if (code || s->declared < s->known) return false;
    memcpy(known, s->at, s->known);
    return true;
}

static void init_options(void *to, uint64_t size) { pllm_engine_options_init(to, size); }
static void init_request(void *to, uint64_t size) { pllm_request_init(to, size); }
static void init_sampling(void *to, uint64_t size) { pllm_sampling_init(to, size); }
static void init_dry(void *to, uint64_t size) { pllm_dry_init(to, size); }
static void init_beam(void *to, uint64_t size) { pllm_beam_init(to, size); }
static void init_fork(void *to, uint64_t size) { pllm_fork_init(to, size); }
static void init_resume(void *to, uint64_t size) { pllm_resume_init(to, size); }
static void init_pin(void *to, uint64_t size) { pllm_pin_init(to, size); }

const struct_type options_type = {N_pllm_engine_options_init, init_options, 96,
                                  sizeof(pllm_engine_options)};
const struct_type request_type = {N_pllm_request_init, init_request, 64, sizeof(pllm_request)};
const struct_type sampling_type = {N_pllm_sampling_init, init_sampling, 88, sizeof(pllm_sampling)};
const struct_type dry_type = {N_pllm_dry_init, init_dry, 48, sizeof(pllm_dry)};
const struct_type beam_type = {N_pllm_beam_init, init_beam, 32, sizeof(pllm_beam)};
const struct_type fork_type = {N_pllm_fork_init, init_fork, 48, sizeof(pllm_fork)};
const struct_type resume_type = {N_pllm_resume_init, init_resume, 56, sizeof(pllm_resume)};
const struct_type pin_type = {N_pllm_pin_init, init_pin, 72, sizeof(pllm_pin)};

void *any_input_struct(worker *w, const struct_type *type, void *known, uint64_t *declared) {
    *declared = any_struct_size(w, type->first, type->known);
    void *at = struct_buffer(w, *declared, type->known);
    uint64_t in_place = *declared < type->known ? *declared : type->known;
    enter(w, type->function);
    type->init(at, *declared), type->init(known, type->known);
    bool possible = *declared >= type->first && *declared <= 1 << 16 && *declared % 8 == 0;
    EXPECT(!possible || !memcmp((char *)at + 8, (char *)known + 8, in_place - 8),
           "defaults differ by struct_size");
    EXPECT(possible || *declared > BUFFER_BYTES || *declared <= 8 ||
               is_poison((char *)at + 8, *declared - 8),
           "a struct with an invalid struct_size was filled");
    EXPECT(*declared >= 8 || is_poison(at, 8),
           "a struct without a complete struct_size was written");
    return at;
}

void *copy_fields(void *at, const struct_type *type, void *known, uint64_t declared) {
    uint64_t seen = declared < type->known ? declared : type->known;
    _Alignas(8) char set[512];
    memcpy(set, known, type->known);
    type->init(known, type->known);
    if (declared <= 8) return at;
    memcpy((char *)at + 8, set + 8, seen - 8);
    memcpy((char *)known + 8, set + 8, seen - 8);
    return at;
}
