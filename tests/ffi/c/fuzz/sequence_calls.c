// Calls on sequences: info, append, rewind, free, resume, fork, export, import.
#include "program.h"

// Usually a sequence that exists or existed on this engine.
static uint64_t any_sequence(worker *w, const engine_slot *e) {
    uint64_t id = one_in(w, 16) ? 0 : oracle_any_sequence(e->number, number(w, 1));
    // While other workers add requests, an invented id must not become one of theirs.
    return id ? id : program.racing ? interesting_u64(w) | 1 << 20 : interesting_u64(w);
}

static sequence_status status_of(const engine_slot *e, const request_record *r,
                                 const sequence_record *a) {
    return !e->engine || !a ? REMOVED : oracle_sequence_status(r, a);
}

// Checks the result of a call on a sequence. `valid`: all other arguments are valid.
static void check_sequence_call(const engine_slot *e, const request_record *r,
                                const sequence_record *a, sequence_status before, int32_t code,
                                bool valid, const char *call) {
    if (!e->engine) {
        EXPECT(code == PLLM_E_INVALID_ARGUMENT, "%s on NULL: %d", call, code);
        return;
    }
    if (mutation == freed_sequence_still_exists && a && a->freed) code = 0;
    if (mutation == kept_sequence_is_lost && before == IDLE) code = PLLM_E_NOT_FOUND;
    bool expected = code == 0 || code == PLLM_E_NOT_FOUND || code == PLLM_E_INVALID_ARGUMENT ||
                    code == PLLM_E_CAPACITY || code == PLLM_E_UNSUPPORTED;
    EXPECT(expected, "%s failed with %d", call, code);
    EXPECT(before != REMOVED || code != 0, "a sequence was removed, and the call succeeded: %s",
           call);
    EXPECT(before != IDLE || code != PLLM_E_NOT_FOUND, "sequence was kept, and is unknown: %s",
           call);
    EXPECT(before != IDLE || !valid || code == 0, "%s failed with %d on an idle sequence", call,
           code);
    bool is_read_only = !strcmp(call, "get_info");
    EXPECT(code || is_read_only || !r || r->branching != BEAMS, "a single beam was changed: %s",
           call);
}

void get_sequence_info(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    request_record *r;
    sequence_record *a = oracle_find(e->number, id, &r);
    sequence_status before = status_of(e, r, a);
    pllm_sequence_info info;
    out_struct out = any_out_struct(w, 32, sizeof info);
    int32_t code = TRY(pllm_sequence_get_info, e->engine, id, out.at);
    check_sequence_call(e, r, a, before, code, has_valid_size(&out), "get_info");
    if (!check_out_struct(&out, code, &info)) return;
    EXPECT(info.len > 0 && info.len <= r->max_model_len && info.idle <= 1,
           "the info of a sequence is inconsistent");
    EXPECT(before != IDLE || info.idle == 1, "a kept sequence has ended and is not idle");
    EXPECT(info.request == (r->branching == CHILDREN ? id : r->id),
           "sequence %llu is of request %llu", LLU(id), LLU(info.request));
    w->hash = mix_bytes(w->hash, &info, sizeof info);
}

void append_to_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    argument tokens = any_tokens(w, e->vocab);
    request_record *r;
    sequence_record *a = oracle_find(e->number, id, &r);
    sequence_status before = status_of(e, r, a);
    if (a) oracle_mark_changed(r, a);
    int32_t code = TRY(pllm_sequence_append, e->engine, id, tokens.data, tokens.len);
    EXPECT(code || !tokens.must_be_refused, "invalid tokens were appended");
    check_sequence_call(e, r, a, before, code, false, "append");
}

void rewind_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e), len = one_in(w, 8) ? interesting_u64(w) : 1 + below(w, 24);
    request_record *r;
    sequence_record *a = oracle_find(e->number, id, &r);
    sequence_status before = status_of(e, r, a);
    if (a) oracle_mark_changed(r, a);
    int32_t code = TRY(pllm_sequence_rewind, e->engine, id, len);
    EXPECT(code || (len > 0 && len <= e->max_model_len), "a sequence was rewound to %llu tokens",
           LLU(len));
    check_sequence_call(e, r, a, before, code, len == 1, "rewind");
}

void free_sequence_of(worker *w, const engine_slot *e, uint64_t id) {
    request_record *r;
    sequence_record *a = oracle_find(e->number, id, &r);
    sequence_status before = status_of(e, r, a);
    int32_t code = TRY(pllm_sequence_free, e->engine, id);
    check_sequence_call(e, r, a, before, code, true, "free");
    if (!code) a->freed = true;
}

void free_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    free_sequence_of(w, e, any_sequence(w, e));
}

void resume_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    request_record *r;
    sequence_record *a;
    if (!oracle_lock(e->number, id, &r, &a)) return;
    sequence_status before = status_of(e, r, a);
    pllm_resume q;
    uint64_t declared;
    pllm_resume *at = any_input_struct(w, &resume_type, &q, &declared);
    expected_run t = {.user_data = a ? a->inherited.user_data : 0, .keep = true};
    const queue_slot *to = choose_queue(w, e, &q.queue);
    choose_hook(w, e, &q.logits_hook, &q.hook_data);
    q.sampling = one_in(w, 8) ? NULL : any_sampling(w, e, false, &t);
    if (!below(w, 4)) q.flags &= ~(uint32_t)PLLM_REQUEST_KEEP;
    // A run that may not have started must have other user_data than this one.
    const expected_run *last = a && a->runs_len ? &a->runs[a->runs_len - 1] : NULL;
    bool needs_user_data = program.racing || (last && last->uncertain && last->ends == 0);
    if (needs_user_data || below(w, 2))
        q.flags |= PLLM_RESUME_USER_DATA, q.user_data = oracle_new_user_data();
    // PLLM_RESUME_CONTINUE uses parameters that the oracle does not know.
    if (one_in(w, 32))
        q.flags ^= interesting_u32(w) & ~(uint32_t)(PLLM_RESUME_USER_DATA | PLLM_RESUME_CONTINUE);
    if (one_in(w, 16)) q.text_flags = interesting_u32(w);
    q.deadline_ms = any_deadline(w);
    bool by_default = !needs_user_data && one_in(w, 32);
    copy_fields(at, &resume_type, &q, declared);
    if (by_default)
        pllm_resume_init(&q, sizeof q), t = (expected_run){.user_data = t.user_data, .keep = true};
    if (q.flags & PLLM_RESUME_USER_DATA) t.user_data = q.user_data;
    t.keep = q.flags & PLLM_REQUEST_KEEP;
    t.has_deadline = q.deadline_ms > 0;
    t.queue = q.queue ? to->number : a ? a->inherited.queue : 0;
    bool queue_is_freed = !q.queue && a && a->inherited.queue_freed;
    if (a && !oracle_add_run(a, &t)) {
        oracle_unlock(a);
        return;
    }
    int32_t code = TRY(pllm_sequence_resume, e->engine, id, by_default ? NULL : at);
    check_sequence_call(e, r, a, before, code, false, "resume");
    EXPECT(code || q.deadline_ms >= 0, "a sequence was resumed with a deadline of %lld ms",
           (long long)q.deadline_ms);
    EXPECT(code || !q.queue || to->engine == e->number,
           "a resume to the queue of another engine succeeded");
    EXPECT(code || program.racing || !queue_is_freed, "a resume to a freed queue succeeded");
    if (a) oracle_confirm_run(a, code == 0);
    oracle_unlock(a);
}

// Whether a sequence runs, if that is certain.
typedef enum { RUNS, WAITS, UNKNOWN } activity;

static activity activity_of(worker *w, const engine_slot *e, uint64_t id) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    if (!e->engine || e->started || program.racing ||
        TRY(pllm_sequence_get_info, e->engine, id, &info))
        return UNKNOWN;
    return info.idle ? WAITS : RUNS;
}

static void record_children(request_record *r, const sequence_record *parent, const pllm_fork *q,
                            activity of_parent) {
    for (unsigned i = 0; i < r->width; i++) {
        sequence_record *a = &r->sequence_records[i];
        a->inherited = parent ? parent->inherited : (expected_run){0};
        if (q->flags & PLLM_FORK_USER_DATA) a->inherited.user_data = q->user_data;
        a->inherited.changed_while_running = true;
        a->changed_by_many = parent && parent->changed_by_many;
        a->inherited.uncertain = of_parent != RUNS;
        if (of_parent != WAITS && !(q->flags & PLLM_FORK_IDLE)) oracle_add_run(a, &a->inherited);
    }
}

void fork_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    request_record *of, *r = oracle_open();
    sequence_record *parent;
    if (!r) return;
    r->engine = e->number, r->vocab = e->vocab, r->max_model_len = e->max_model_len,
    r->has_text = e->has_text;
    if (!oracle_lock(e->number, id, &of, &parent)) {
        oracle_refused(r);
        return;
    }
    sequence_status before = status_of(e, of, parent);
    activity of_parent = activity_of(w, e, id);
    pllm_fork q;
    uint64_t declared;
    w->buffers = 0;
    pllm_fork *at = any_input_struct(w, &fork_type, &q, &declared);
    // While other workers resume the parent, its queue is not known.
    const queue_slot *to = choose_queue(w, e, &q.queue);
    if (program.racing && !q.queue) q.queue = e->own.queue, to = &e->own;
    q.n = one_in(w, 16) ? (below(w, 2) ? 0 : UINT32_MAX) : 1 + below(w, 3);
    if (!below(w, 3)) q.at = one_in(w, 8) ? interesting_u64(w) : 1 + below(w, 24);
    if (below(w, 2)) q.flags |= PLLM_FORK_SEED, q.seed = byte(w);
    if (one_in(w, 3)) q.flags |= PLLM_FORK_IDLE;
    if (program.racing || below(w, 2))
        q.flags |= PLLM_FORK_USER_DATA, q.user_data = oracle_new_user_data();
    if (one_in(w, 64)) q.flags = interesting_u32(w);
    bool by_default = !program.racing && one_in(w, 32);
    copy_fields(at, &fork_type, &q, declared);
    if (by_default) pllm_fork_init(&q, sizeof q);
    bool is_possible_n = q.n > 0 && q.n <= MAX_SEQUENCES;
    r->branching = CHILDREN;
    r->width = r->results = is_possible_n ? q.n : 1;
    record_children(r, parent, &q, of_parent);
    bool queue_is_freed = !q.queue && parent && parent->inherited.queue_freed;
    for (unsigned i = 0; q.queue && i < r->width; i++) {
        r->sequence_records[i].inherited.queue = to->number,
        r->sequence_records[i].inherited.queue_freed = false;
        if (r->sequence_records[i].runs_len)
            r->sequence_records[i].runs[0].queue = to->number,
            r->sequence_records[i].runs[0].queue_freed = false;
    }
    uint64_t *out = one_in(w, 32) ? NULL : guarded(w, r->width * sizeof *out);
    int32_t code = TRY(pllm_sequence_fork, e->engine, id, by_default ? NULL : at, out);
    EXPECT(!out || !code || is_poison(out, r->width * sizeof *out),
           "the out parameter was written by a call that failed with %d", code);
    check_sequence_call(e, of, parent, before, code, false, "fork");
    EXPECT(code || (out && is_possible_n), "a fork into %u was accepted", q.n);
    EXPECT(code || !q.queue || to->engine == e->number,
           "a fork to the queue of another engine succeeded");
    EXPECT(code || program.racing || !queue_is_freed, "a fork to a freed queue succeeded");
    for (unsigned i = 0; !code && i < r->width; i++)
        EXPECT(out[i] == out[0] + i, "children's ids do not follow each other");
    if (code) oracle_refused(r);
    else w->hash = mix(w->hash, out[0]), oracle_accepted(r, out[0]);
    oracle_unlock(parent);
}

void export_sequence(worker *w) {
    const engine_slot *e = any_engine(w);
    uint64_t id = any_sequence(w, e);
    const pllm_queue *queue = NULL;
    const queue_slot *to = choose_queue(w, e, &queue);
    int32_t code = TRY(pllm_sequence_export, e->engine, id, queue);
    EXPECT(code || e->engine, "export on a NULL engine succeeded");
    EXPECT(code || !queue || to->engine == e->number,
           "an export to the queue of another engine succeeded");
    if (!program.racing) w->hash = mix(w->hash, (uint64_t)code);
}

void import_sequence(worker *w) {
    static _Thread_local unsigned char bytes[1 << 20];
    const engine_slot *e = any_engine(w);
    uint64_t len = oracle_copy_state(bytes, sizeof bytes);
    bool damaged = below(w, 4);
    if (damaged && len)
        bytes[(uint64_t)below(w, 256) * len / 256] ^= (unsigned char)(1 + below(w, 255));
    if (one_in(w, 8)) len = len * below(w, 256) / 256, damaged = true;
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_sequence_import, e->engine, one_in(w, 32) ? NULL : bytes, len, NULL,
                       out ? &out->number : NULL);
    check_out_parameter(out, code, sizeof out->number);
    EXPECT(code || !damaged, "a damaged state was imported");
    if (code) return;
    code = TRY(pllm_sequence_free, e->engine, out->number);
    EXPECT(!code || program.racing, "an imported sequence could not be freed: %d", code);
}
