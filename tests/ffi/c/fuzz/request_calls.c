// Calls that add, predict and abort requests.
#include "program.h"

#include <math.h>

typedef struct {
    uint64_t vocab;
    unsigned behaviour;
} hook_record;

enum { BEHAVIOURS = 6 };
// By the number of the engine. They outlive all requests.
static hook_record hook_records[ENGINES * 64][BEHAVIOURS];

// Depends only on the tokens, so that programs are repeatable.
static void edit_logits(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len,
                        float *logits, uint64_t vocab_size) {
    const hook_record *n = data;
    if (!n) return;  // a struct_size between logits_hook and hook_data
    uint64_t vocab = n->vocab + (mutation == hook_sees_another_vocab_size);
    EXPECT(vocab == vocab_size && sequence && tokens_len,
           "a logits hook received %llu tokens of sequence %llu and %llu logits", LLU(tokens_len),
           LLU(sequence), LLU(vocab_size));
    for (uint64_t i = 0; i < tokens_len; i++)
        EXPECT(tokens[i] < vocab_size, "a logits hook received token %u", tokens[i]);
    uint64_t chosen = mix(tokens_len, tokens[tokens_len - 1]) % vocab_size;
    switch (n->behaviour) {
    case 0: break;
    case 1: logits[chosen] += 10; break;
    case 2:
        for (uint64_t i = 0; i < vocab_size; i++) logits[i] = i == chosen ? 0 : -INFINITY;
        break;
    case 3: memset(logits, 0, vocab_size * sizeof *logits); break;
    case 4: logits[chosen] = tokens_len % 5 ? logits[chosen] : NAN; break;
    default:
        for (uint64_t i = 0; tokens_len % 7 == 0 && i < vocab_size; i++) logits[i] = -INFINITY;
    }
}

void choose_hook(worker *w, const engine_slot *e, pllm_logits_hook *hook, void **data) {
    if (!one_in(w, 8) || e->number >= COUNT(hook_records)) return;
    unsigned behaviour = below(w, BEHAVIOURS);
    hook_record *n = &hook_records[e->number][behaviour];
    *n = (hook_record){e->vocab, behaviour};
    *hook = edit_logits;
    *data = n;
}

void choose_prompt(worker *w, const engine_slot *e, pllm_request *q, expected_run *t) {
    bool both = one_in(w, 64), neither = !both && one_in(w, 64);
    bool as_text = e->has_text ? below(w, 2) : one_in(w, 16);
    if (neither) return;
    if (as_text || both) {
        argument text = any_text(w);
        q->prompt = text.data;
        q->prompt_len = text.len;
    }
    if (!as_text || both) {
        argument tokens = any_tokens(w, e->vocab);
        q->prompt_token_ids = tokens.data;
        q->prompt_token_ids_len = tokens.len;
        if (tokens.data) t->prompt_tokens = tokens.len;
    }
}

void choose_salt(worker *w, const uint8_t **salt, uint64_t *len) {
    static const uint8_t tenants[] = {1, 2};
    if (!one_in(w, 4)) return;
    *salt = one_in(w, 16) ? NULL : tenants + below(w, 2);
    *len = 1;
}

const queue_slot *choose_queue(worker *w, const engine_slot *e, const pllm_queue **queue) {
    if (below(w, 2)) return &e->own;
    const queue_slot *to = any_live_queue(w);
    *queue = to->queue;
    return to->queue ? to : &e->own;
}

static const pllm_beam *any_beam(worker *w, unsigned *width) {
    pllm_beam b;
    uint64_t declared;
    pllm_beam *at = any_input_struct(w, &beam_type, &b, &declared);
    b.width = 2 + below(w, 3);
    b.length_penalty = (float)below(w, 9) / 4 - 1;
    b.early_stopping = below(w, 3);
    if (one_in(w, 4)) b.groups = 2, b.diversity_penalty = 0.5f;
    if (one_in(w, 16)) b.diversity_penalty = interesting_float(w);
    if (one_in(w, 16)) b.width = interesting_u32(w);
    if (one_in(w, 16)) b.early_stopping = interesting_u32(w);
    copy_fields(at, &beam_type, &b, declared);
    *width = b.width;
    return at;
}

static void choose_branching(worker *w, pllm_request *q, unsigned *beams) {
    if (one_in(w, 3)) q->n = 1 + below(w, 3);
    if (one_in(w, 12)) q->best_of = q->n + below(w, 3);
    if (one_in(w, 12)) q->beam = any_beam(w, beams);
    if (one_in(w, 32)) q->n = interesting_u32(w);
    if (one_in(w, 32)) q->best_of = interesting_u32(w);
}

void record_branching(request_record *r, const pllm_request *q, unsigned beams) {
    unsigned samples = q->best_of ? q->best_of : q->n;
    unsigned width = q->beam ? beams : samples;
    if (width == 0 || width > MAX_SEQUENCES || q->n > width) return;
    r->width = width;
    r->results = q->n;
    r->branching = q->beam ? BEAMS : samples > q->n ? BEST : SAMPLES;
}

void record_runs(request_record *r, expected_run t) {
    if (r->branching == BEST || r->branching == BEAMS)
        t.kind = PLLM_OUTPUT_FINAL;  // outputs come at the end
    for (unsigned i = 0; i < r->width; i++) {
        sequence_record *a = &r->sequence_records[i];
        a->inherited = t;
        if (r->branching != BEST && i < r->results) oracle_add_run(a, &t);
    }
}

int64_t any_deadline(worker *w) {
    if (!one_in(w, 6)) return 0;
    if (one_in(w, 8)) return (int64_t)interesting_u64(w) | INT64_MIN;
    return !program.may_start ? INT64_MAX - below(w, 2)
           : one_in(w, 4)     ? INT64_MAX
                              : 1 + below(w, 8);
}

static void choose_request(worker *w, const engine_slot *e, pllm_request *q, expected_run *t,
                           unsigned *beams) {
    choose_prompt(w, e, q, t);
    choose_hook(w, e, &q->logits_hook, &q->hook_data);
    choose_branching(w, q, beams);
    q->sampling = one_in(w, 16) ? NULL : any_sampling(w, e, true, t);
    if (one_in(w, 8)) q->truncate_prompt_tokens = 1 + below(w, 8);
}

// False if this engine has no reference.
static bool choose_reference(worker *w, const engine_slot *e, pllm_request *q, expected_run *t) {
    pllm_sampling s;
    uint64_t declared;
    pllm_sampling *at = any_input_struct(w, &sampling_type, &s, &declared);
    if (!e->engine || !(t->reference = reference_fill_request(&e->options, byte(w), q, &s)))
        return false;
    s.max_tokens = 1 + below(w, REFERENCE_TOKENS);
    s.output_kind = below(w, 3);
    copy_fields(at, &sampling_type, &s, declared);
    record_sampling(t, &s);
    t->prompt_tokens = q->prompt_token_ids_len;
    q->sampling = at;
    return true;
}

bool nothing_steps(void) {
    bool steps = program.racing;
    for (int i = 0; i < ENGINES; i++) steps |= program.engines[i].started;
    return !steps;
}

// The result of pllm_engine_predict_admission. It holds if nothing changes before the next call.
typedef struct {
    bool holds;
    int32_t code;
    pllm_admission admission;
} admission_prediction;

// No other thread steps this engine, or another engine on its budget.
static bool prediction_holds(worker *w, const engine_slot *e) {
    pllm_budget_info info = {.struct_size = sizeof info};
    if (!e->engine || e->started || program.racing) return false;
    EXPECT(TRY(pllm_budget_get_info, CALL(pllm_engine_budget, e->engine), &info) == 0,
           "get_info of an engine's budget failed");
    return info.engines == 1 || nothing_steps();
}

static admission_prediction predict_admission(worker *w, const engine_slot *e,
                                              const pllm_request *request) {
    admission_prediction p = {.holds = prediction_holds(w, e)};
    out_struct out = any_out_struct(w, 48, sizeof p.admission);
    p.code = TRY(pllm_engine_predict_admission, e->engine, request, out.at);
    EXPECT(p.code || e->engine, "predict_admission on a NULL engine succeeded");
    check_out_struct(&out, p.code, &p.admission);
    bool possible = p.admission.admits <= 1 && p.admission.fits_now <= p.admission.admits &&
                    !isnan(p.admission.first_token_seconds);
    EXPECT(p.code || possible, "an admission is inconsistent");
    p.holds &= has_valid_size(&out);
    return p;
}

// `code`: the result of adding the request. Grammars are compiled only when a request is added.
static void check_admission(admission_prediction p, bool has_grammar, int32_t code) {
    if (mutation == admission_is_too_optimistic && p.code) p.code = 0, p.admission.admits = 1;
    int32_t expected = p.code ? p.code : p.admission.admits ? 0 : PLLM_E_CAPACITY;
    bool refused_by_grammar =
        !p.code && has_grammar && (code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_UNSUPPORTED);
    EXPECT(!p.holds || code == expected || refused_by_grammar,
           "predict_admission returned %d (admits: %llu), and add_request returned %d", p.code,
           LLU(p.admission.admits), code);
}

void add_request(worker *w) {
    const engine_slot *e = any_engine(w);
    request_record *r = oracle_open();
    if (!r) return;
    pllm_request q;
    expected_run t = {.user_data = oracle_new_user_data()};
    unsigned beams = 0;
    uint64_t declared;
    pllm_request *at = any_input_struct(w, &request_type, &q, &declared);
    r->engine = e->number, r->vocab = e->vocab, r->max_model_len = e->max_model_len,
    r->has_text = e->has_text;
    const queue_slot *to = choose_queue(w, e, &q.queue);
    if (!one_in(w, 3) || !choose_reference(w, e, &q, &t)) choose_request(w, e, &q, &t, &beams);
    choose_salt(w, &q.cache_salt, &q.cache_salt_len);
    q.user_data = t.user_data;
    q.deadline_ms = any_deadline(w);
    q.priority = one_in(w, 64) ? (int32_t)interesting_u32(w) : (int32_t)below(w, 201) - 100;
    q.flags = below(w, 2) ? PLLM_REQUEST_KEEP : one_in(w, 32) ? interesting_u32(w) : 0;
    if (one_in(w, 64))
        *(below(w, 2) ? &q.reserved : below(w, 2) ? &q.reserved2 : &q.reserved3) =
            interesting_u32(w);
    if (one_in(w, 16)) q.kv_store_wait_ms = below(w, 20);
    if (below(w, 2)) q.text_flags = one_in(w, 8) ? interesting_u32(w) : byte(w) % 4;
    copy_fields(at, &request_type, &q, declared);
    if (!q.queue) to = &e->own;
    t.queue = to->number;
    t.keep = q.flags & PLLM_REQUEST_KEEP;
    t.has_deadline = q.deadline_ms > 0;
    if (q.truncate_prompt_tokens && t.prompt_tokens > q.truncate_prompt_tokens)
        t.prompt_tokens = q.truncate_prompt_tokens;
    record_branching(r, &q, beams);
    record_runs(r, t);
    bool is_newer = declared > sizeof q && declared <= BUFFER_BYTES && one_in(w, 2);
    if (is_newer) ((char *)at)[declared - 1] = 1;
    if (one_in(w, 64)) at = NULL;
    admission_prediction p = {.holds = false};
    if (below(w, 2)) p = predict_admission(w, e, at);
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_add_request, e->engine, at, out ? &out->number : NULL);
    check_out_parameter(out, code, sizeof out->number);
    if (out) check_admission(p, t.grammar, code);
    bool in_range = q.deadline_ms >= 0 && q.priority >= -100 && q.priority <= 100;
    EXPECT(code || in_range, "a deadline of %lld ms and a priority of %d were accepted",
           (long long)q.deadline_ms, q.priority);
    EXPECT(code || (e->engine && to->engine == e->number && !is_newer),
           "an invalid request was accepted");
    EXPECT(code || (r->width <= MAX_SEQUENCES && q.n == r->results),
           "a request of %u results was accepted", q.n);
    if (code) oracle_refused(r);
    else w->hash = mix(w->hash, out->number), oracle_accepted(r, out->number);
}

void predict_only(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_request q;
    expected_run unused = {0};
    unsigned beams = 0;
    uint64_t declared;
    pllm_request *at = any_input_struct(w, &request_type, &q, &declared);
    choose_request(w, e, &q, &unused, &beams);
    q.deadline_ms = any_deadline(w);
    copy_fields(at, &request_type, &q, declared);
    admission_prediction p = predict_admission(w, e, at);
    EXPECT(p.code || q.deadline_ms >= 0, "predict_admission accepted a negative deadline");
}

void abort_request(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = one_in(w, 8) ? 0 : oracle_any_sequence(e->number, number(w, 1));
    if (!id) id = interesting_u64(w);
    bool ended = oracle_has_ended(e->number, id);
    int32_t code = TRY(pllm_engine_abort, e->engine, id);
    if (mutation == stale_id_is_accepted && ended) code = 0;
    EXPECT(e->engine || code == PLLM_E_INVALID_ARGUMENT, "abort on NULL: %d", code);
    EXPECT(!e->engine || code == 0 || code == PLLM_E_NOT_FOUND, "abort failed with %d", code);
    EXPECT(code || (id != 0 && id < 1 << 16),
           "request %llu does not exist, and its abort succeeded", LLU(id));
    EXPECT(!ended || code == PLLM_E_NOT_FOUND, "a request that had ended was aborted: %d", code);
}
