// Calls on memory budgets.
#include "program.h"

// A shared budget, the budget of an engine, or NULL.
static const pllm_budget *any_budget(worker *w) {
    unsigned i = below(w, 32);
    if (i == 31) return NULL;
    const pllm_budget *budget = program.budgets[i % BUDGETS];
    return budget && i < 16 ? budget : CALL(pllm_engine_budget, any_engine(w)->engine);
}

void create_budget(worker *w) {
    unsigned i = below(w, BUDGETS);
    if (program.budgets[i]) return;
    // No engine uses a budget of unusual size: it would map max_bytes.
    bool is_unused = one_in(w, 4);
    uint64_t bytes =
        is_unused ? interesting_u64(w) : (uint64_t)(1 + below(w, 16)) << (13 + below(w, 6));
    uint64_t max_bytes = is_unused ? interesting_u64(w) : bytes * below(w, 4);
    out_parameter *out = any_out_parameter(w);
    int32_t code =
        TRY(pllm_budget_create, bytes, max_bytes, out ? (pllm_budget **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(!code == (out && bytes && (!max_bytes || max_bytes >= bytes)),
           "create a budget of %llu to %llu bytes: code %d", LLU(bytes), LLU(max_bytes), code);
    if (code) return;
    if (is_unused) CALL(pllm_budget_free, out->pointer);
    else program.budgets[i] = out->pointer;
}

void free_budget(worker *w) {
    unsigned i = below(w, BUDGETS);
    if (one_in(w, 4)) CALL(pllm_budget_free, NULL);
    CALL(pllm_budget_free, program.budgets[i]);
    program.budgets[i] = NULL;
}

void free_budgets(worker *w) {
    for (int i = 0; i < BUDGETS; i++)
        CALL(pllm_budget_free, program.budgets[i]), program.budgets[i] = NULL;
}

void get_budget_info(worker *w) {
    const pllm_budget *budget = any_budget(w);
    pllm_budget_info info;
    out_struct out = any_out_struct(w, 48, sizeof info);
    int32_t code = TRY(pllm_budget_get_info, budget, out.at);
    EXPECT(!code == (budget && has_valid_size(&out)), "get_info of a budget: code %d", code);
    if (!check_out_struct(&out, code, &info)) return;
    EXPECT(info.bytes >= info.min_bytes && info.bytes <= info.max_bytes && info.engines <= ENGINES,
           "the info of a budget is inconsistent");
    // An engine that was stopped shrinks in its next step.
    EXPECT(program.may_start || info.held_bytes <= info.bytes,
           "no engine is stepping, and engines hold %llu of %llu bytes", LLU(info.held_bytes),
           LLU(info.bytes));
    w->hash = mix_bytes(w->hash, &info, sizeof info);
}

static uint64_t any_budget_size(worker *w, const pllm_budget_info *info) {
    uint64_t range = info->max_bytes - info->min_bytes;
    switch (below(w, 8)) {
    case 0: return interesting_u64(w);
    case 1: return info->min_bytes - below(w, 2);
    case 2: return info->max_bytes + below(w, 2);
    default: return info->min_bytes + range / 255 * byte(w);
    }
}

void resize_budget(worker *w) {
    const pllm_budget *budget = any_budget(w);
    pllm_budget_info before = {.struct_size = sizeof before}, after = before;
    int32_t code = TRY(pllm_budget_get_info, budget, &before);
    EXPECT(!code == !!budget, "get_info of a budget: code %d", code);
    uint64_t bytes = any_budget_size(w, &before);
    code = TRY(pllm_budget_resize, budget, bytes);
    EXPECT(budget ? code == 0 || code == PLLM_E_CAPACITY : code == PLLM_E_INVALID_ARGUMENT,
           "resize a budget to %llu bytes: code %d", LLU(bytes), code);
    if (!budget || !nothing_steps()) return;
    bool possible = bytes && bytes >= before.min_bytes && bytes <= before.max_bytes;
    EXPECT(!code == possible, "a budget of %llu to %llu bytes, resized to %llu: code %d",
           LLU(before.min_bytes), LLU(before.max_bytes), LLU(bytes), code);
    EXPECT(TRY(pllm_budget_get_info, budget, &after) == 0, "get_info of a budget failed");
    if (mutation == budget_ignores_a_resize) after.bytes = before.bytes;
    EXPECT(
        after.bytes == (code ? before.bytes : bytes) &&
            (program.may_start || after.held_bytes <= after.bytes),
        "a budget that was resized from %llu to %llu bytes (code %d) has %llu, and %llu are held",
        LLU(before.bytes), LLU(bytes), code, LLU(after.bytes), LLU(after.held_bytes));
}

static void add_reference_request(worker *w, const engine_slot *e) {
    pllm_request q;
    pllm_sampling s;
    expected_run t = {.user_data = oracle_new_user_data(), .queue = e->own.number};
    pllm_request_init(&q, sizeof q);
    pllm_sampling_init(&s, sizeof s);
    t.reference = reference_fill_request(&e->options, byte(w), &q, &s);
    request_record *r = t.reference ? oracle_open() : NULL;
    if (!r) return;
    r->engine = e->number, r->vocab = e->vocab, r->max_model_len = e->max_model_len,
    r->has_text = e->has_text;
    q.sampling = &s;
    q.user_data = t.user_data;
    t.prompt_tokens = q.prompt_token_ids_len;
    record_sampling(&t, &s);
    record_branching(r, &q, 0);
    record_runs(r, t);
    uint64_t id;
    int32_t code = TRY(pllm_engine_add_request, e->engine, &q, &id);
    EXPECT(!code || code == PLLM_E_CAPACITY || code == PLLM_E_INVALID_ARGUMENT,
           "a reference request was refused with %d", code);
    if (code) oracle_refused(r);
    else oracle_accepted(r, id);
}

void shrink_budget_during_requests(worker *w) {
    const engine_slot *e = any_engine(w);
    pllm_budget_info info = {.struct_size = sizeof info};
    pllm_step step = {.struct_size = sizeof step};
    if (!e->engine) return;
    const pllm_budget *budget = CALL(pllm_engine_budget, e->engine);
    for (unsigned n = 2 + below(w, 4); n > 0; n--) add_reference_request(w, e);
    for (unsigned n = 1 + below(w, 8); n > 0; n--) {
        int32_t code = TRY(pllm_engine_step, e->engine, &step);
        EXPECT(program.racing || code == (e->started ? PLLM_E_BUSY : 0), "step failed with %d",
               code);
    }
    EXPECT(TRY(pllm_budget_get_info, budget, &info) == 0, "get_info of an engine's budget failed");
    int32_t code = TRY(pllm_budget_resize, budget, info.min_bytes);
    EXPECT(!nothing_steps() || code == 0, "a budget refused its min_bytes: %d", code);
}

void check_engine_budget(worker *w) {
    const engine_slot *e = any_engine(w);
    const pllm_budget *budget = CALL(pllm_engine_budget, e->engine);
    EXPECT(!budget == !e->engine && budget == CALL(pllm_engine_budget, e->engine),
           "an engine's budget changed");
}
