// The oracle: every run of every sequence, and checks of each output against them.
#include <math.h>
#include <pthread.h>

#include "fuzz.h"

enum { MAX_REQUESTS = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
// Signalled when an id becomes known or a call is refused.
static pthread_cond_t resolved = PTHREAD_COND_INITIALIZER;
static request_record request_records[MAX_REQUESTS];
static unsigned request_records_len;
static pin_slot pins[MAX_PINS];
static unsigned pins_len;
static unsigned last_user_data;
static bool racing;

static unsigned char last_state[1 << 20];
static uint64_t last_state_len;

void oracle_clear(void) {
    request_records_len = pins_len = last_user_data = last_state_len = 0, racing = false;
}

void oracle_set_racing(bool is_racing) { racing = is_racing; }

uint64_t oracle_new_user_data(void) {
    pthread_mutex_lock(&lock);
    unsigned i = last_user_data++;
    pthread_mutex_unlock(&lock);
    return i == 0 ? 0 : i == 1 ? UINT64_MAX : mix(1, i);
}

request_record *oracle_open(void) {
    pthread_mutex_lock(&lock);
    request_record *r = NULL;
    if (request_records_len < MAX_REQUESTS) {
        r = &request_records[request_records_len++];
        *r = (request_record){.state = ADDING, .width = 1, .results = 1};
    }
    pthread_mutex_unlock(&lock);
    return r;
}

static bool overlap(const request_record *a, const request_record *b) {
    return a->id < b->id + b->width && b->id < a->id + a->width;
}

void oracle_accepted(request_record *r, uint64_t id) {
    pthread_mutex_lock(&lock);
    EXPECT(id != 0, "a request got the id 0");
    r->id = id;
    for (unsigned i = 0; i < request_records_len; i++) {
        const request_record *other = &request_records[i];
        EXPECT(other == r || other->state != ACCEPTED || other->engine != r->engine ||
                   !overlap(r, other),
               "the id %llu is not unique", LLU(id));
    }
    for (unsigned i = 0; i < pins_len; i++)
        EXPECT(pins[i].engine != r->engine || pins[i].id - id >= r->width,
               "the id %llu is not unique", LLU(pins[i].id));
    for (unsigned i = 0; i < r->width; i++)
        r->sequence_records[i].initial = r->sequence_records[i].inherited;
    r->state = ACCEPTED;
    pthread_cond_broadcast(&resolved);
    pthread_mutex_unlock(&lock);
}

void oracle_refused(request_record *r) {
    pthread_mutex_lock(&lock);
    r->state = REFUSED;
    pthread_cond_broadcast(&resolved);
    pthread_mutex_unlock(&lock);
}

bool oracle_add_run(sequence_record *a, const expected_run *t) {
    pthread_mutex_lock(&lock);
    bool fits = a->runs_len < MAX_RUNS;
    if (fits)
        a->runs[a->runs_len] = *t,
        a->runs[a->runs_len++].changed_while_running |= a->changed_by_many;
    pthread_mutex_unlock(&lock);
    return fits;
}

void oracle_confirm_run(sequence_record *a, bool accepted) {
    pthread_mutex_lock(&lock);
    expected_run *t = &a->runs[a->runs_len - 1];
    if (accepted) a->inherited = *t;
    else EXPECT(t->outputs == 0, "an output arrived for a refused resume"), a->runs_len--;
    pthread_mutex_unlock(&lock);
}

// ---- one output ----

static request_record *find(unsigned engine, uint64_t id) {
    for (unsigned i = 0; i < request_records_len; i++) {
        request_record *r = &request_records[i];
        if (r->state == ACCEPTED && r->engine == engine && id - r->id < r->width) return r;
    }
    return NULL;
}

static bool is_adding_requests(unsigned engine) {
    for (unsigned i = 0; i < request_records_len; i++)
        if (request_records[i].state == ADDING && request_records[i].engine == engine) return true;
    return false;
}

// Another worker may see outputs before the call that added the request has returned.
static request_record *owner_of(unsigned engine, const pllm_output *o) {
    request_record *r;
    while (!(r = find(engine, o->sequence)) && is_adding_requests(engine))
        pthread_cond_wait(&resolved, &lock);
    EXPECT(r, "an output arrived for sequence %llu, which does not exist or was refused",
           LLU(o->sequence));
    uint64_t id = r->branching == CHILDREN ? o->sequence : r->id;
    EXPECT(o->request == id, "an output's request is %llu, not %llu", LLU(o->request), LLU(id));
    return r;
}

// The run that an output belongs to: the first matching run that has not ended.
static expected_run *run_of(request_record *r, sequence_record *a, unsigned queue,
                            const pllm_output *o) {
    expected_run *found = NULL, *initial = &a->initial;
    bool user_data_is_known = initial->user_data == o->user_data;
    bool is_initial = user_data_is_known && initial->queue == queue && !initial->ends;
    // Results of a best-of request precede the outputs of later runs.
    if (r->branching == BEST && is_initial) {
        if (!o->computed_tokens) r->results_started++;
        EXPECT(r->results_started <= r->results, "request %llu has more results than n",
               LLU(r->id));
        return initial;
    }
    for (unsigned i = 0; i < a->runs_len && (!found || found->ends); i++) {
        if (a->runs[i].user_data != o->user_data) continue;
        user_data_is_known = true;
        if (a->runs[i].queue == queue) found = &a->runs[i];
    }
    // A fork that failed reports its error even if it was to stay idle. A run that was requested
    // for it ends separately.
    if ((!found || found->ends) && r->branching == CHILDREN &&
        o->finish_reason == PLLM_FINISH_ERROR && is_initial) {
        a->creation_failed = true;
        return initial;
    }
    EXPECT(user_data_is_known, "no run of the sequence has an output's user_data: %llx",
           LLU(o->user_data));
    EXPECT(found, "an output arrived from another request's queue");
    return found;
}

// The index of a best-of result is its rank. After a resume it is the index of the sample.
static void check_index(const request_record *r, bool is_initial, const pllm_output *o) {
    uint64_t position = o->sequence - r->id;
    if (r->branching == CHILDREN) EXPECT(o->index == 0, "a child's index is %u", o->index);
    else if (r->branching == BEST && is_initial)
        EXPECT(o->index < r->results, "a result's index is %u", o->index);
    else
        EXPECT(o->index == position, "the index of sequence %llu of %llu is %u", LLU(o->sequence),
               LLU(r->id), o->index);
}

static bool was_not_exported(const pllm_output *o) {
    return o->error && o->finish_reason == PLLM_FINISH_NONE && !o->tokens && !o->text;
}

static void check_shape(const pllm_output *o) {
    EXPECT(o->struct_size == sizeof *o && o->reserved == 0,
           "an output's struct_size or reserved is wrong");
    EXPECT(o->finish_reason <= PLLM_FINISH_DEADLINE, "an output's finish reason is %u",
           o->finish_reason);
    EXPECT((o->tokens != NULL) == (o->tokens_len > 0),
           "an output's tokens and tokens_len contradict each other");
    EXPECT((o->text != NULL) == (o->text_len > 0),
           "an output's text and text_len contradict each other");
    bool was_closed = o->finish_reason == PLLM_FINISH_ABORT &&
                      o->error_code == PLLM_E_CLOSED;  // its engine was freed
    bool needs_error = o->finish_reason == PLLM_FINISH_ERROR || was_closed,
         may_have_error = needs_error || was_not_exported(o);
    EXPECT((o->error != NULL) <= may_have_error && (o->error != NULL) >= needs_error &&
               (o->error != NULL) == (o->error_len > 0),
           "an output's error contradicts its finish reason %u", o->finish_reason);
    EXPECT(o->error ? o->error_code >= PLLM_E_INVALID_ARGUMENT && o->error_code <= PLLM_E_CANCELLED
                    : o->error_code == 0,
           "an output's error_code is %d", o->error_code);
    EXPECT(is_utf8(o->text, o->text_len),
           "an output's text is not UTF-8, or ends with an incomplete character");
    EXPECT(is_utf8(o->error, o->error_len), "an output's error is not UTF-8");
    EXPECT(o->error_code != PLLM_E_INTERNAL, "an internal error: %.*s", (int)o->error_len,
           o->error);
    EXPECT((o->sequence_state != NULL) == (o->sequence_state_len > 0),
           "an output's state and state_len contradict each other");
    EXPECT(!o->sequence_state || (!o->tokens && !o->text && o->finish_reason == PLLM_FINISH_NONE),
           "an output with a sequence state has other fields");
}

// NaN: the token has no log probability, because it was not sampled or is the first of a prompt.
static void check_logprobs(const float *list, uint64_t len) {
    for (uint64_t i = 0; i < len; i++)
        EXPECT(!(list[i] > 0), "a log probability is %f", (double)list[i]);
}

static void check_top_logprobs(const request_record *r, const pllm_logprob *list, uint64_t len) {
    for (uint64_t i = 0; i < len; i++)
        EXPECT(list[i].token < r->vocab && !(list[i].logprob > 0),
               "one of the top_logprobs is %f of token %u", (double)list[i].logprob, list[i].token);
}

static void check_lists(const request_record *r, const expected_run *t, const pllm_output *o) {
    EXPECT((o->logprobs != NULL) == (t->logprobs && o->tokens_len > 0),
           "logprobs do not match the request");
    EXPECT(t->prompt_logprobs || !o->prompt_logprobs_len, "prompt_logprobs without their flag");
    uint64_t top = t->logprobs ? o->tokens_len * t->top : 0;
    EXPECT(o->top_logprobs_len == top, "%llu top_logprobs for %llu tokens",
           LLU(o->top_logprobs_len), LLU(o->tokens_len));
    EXPECT(o->prompt_top_logprobs_len == o->prompt_logprobs_len * t->prompt_top,
           "%llu prompt_top_logprobs for %llu prompt_logprobs", LLU(o->prompt_top_logprobs_len),
           LLU(o->prompt_logprobs_len));
    EXPECT((o->top_logprobs != NULL) == (o->top_logprobs_len > 0) &&
               (o->prompt_logprobs != NULL) == (o->prompt_logprobs_len > 0) &&
               (o->prompt_top_logprobs != NULL) == (o->prompt_top_logprobs_len > 0),
           "a list of an output contradicts its length");
    check_logprobs(o->logprobs, o->logprobs ? o->tokens_len : 0);
    check_logprobs(o->prompt_logprobs, o->prompt_logprobs_len);
    check_top_logprobs(r, o->top_logprobs, o->top_logprobs_len);
    check_top_logprobs(r, o->prompt_top_logprobs, o->prompt_top_logprobs_len);
}

// Independent of how the run ended and of other requests.
static void check_reference(const expected_run *t, const pllm_output *o) {
    if (!t->reference || t->changed_while_running) return;
    uint64_t at = t->kind == PLLM_OUTPUT_DELTA ? o->generated_tokens - o->tokens_len : 0;
    for (uint64_t i = 0; i < o->tokens_len; i++) {
        uint32_t expected = t->reference[at + i] + (mutation == tokens_differ_from_the_reference);
        EXPECT(o->tokens[i] == expected,
               "other tokens than the reference: token %llu of sequence %llu is %u, not %u",
               LLU(at + i), LLU(o->sequence), o->tokens[i], expected);
    }
}

static void check_content(const request_record *r, const expected_run *t, const pllm_output *o) {
    EXPECT(o->text == NULL || r->has_text, "text from an engine without a tokenizer");
    bool in_time = o->finish_reason != PLLM_FINISH_DEADLINE || t->has_deadline;
    EXPECT(in_time, "sequence %llu had no deadline", LLU(o->sequence));
    check_lists(r, t, o);
    for (uint64_t i = 0; i < o->tokens_len; i++)
        EXPECT(o->tokens[i] < r->vocab, "an output's token is %u, beyond the vocabulary",
               o->tokens[i]);
    EXPECT(isfinite(o->score), "a score is %f", o->score);
    EXPECT(o->prompt_tokens + o->generated_tokens <= r->max_model_len,
           "a sequence is longer than the engine allows");
    if (o->finish_reason == PLLM_FINISH_ERROR || t->changed_while_running) return;
    bool matches =
        o->prompt_tokens > 0 && (!t->prompt_tokens || o->prompt_tokens == t->prompt_tokens);
    EXPECT(matches, "prompt_tokens is %llu, not %llu", LLU(o->prompt_tokens),
           LLU(t->prompt_tokens));
    EXPECT(!t->limited || o->generated_tokens <= t->max_tokens,
           "%llu tokens, max_tokens is %llu", LLU(o->generated_tokens), LLU(t->max_tokens));
    bool is_full = t->limited && o->generated_tokens == t->max_tokens;
    EXPECT(o->finish_reason != PLLM_FINISH_LENGTH || is_full ||
               o->prompt_tokens + o->generated_tokens == r->max_model_len,
           "a request ended with PLLM_FINISH_LENGTH after %llu of %llu tokens",
           LLU(o->generated_tokens), LLU(t->max_tokens));
}

// The number of tokens equals generated_tokens, plus the prompt if it is echoed and the sequence
// has started.
static bool tokens_match_counts(const expected_run *t, uint64_t tokens, const pllm_output *o) {
    uint64_t prompt = t->echo ? o->prompt_tokens : 0;
    return tokens == o->generated_tokens + prompt || (tokens == 0 && o->generated_tokens == 0);
}

// These outputs come in addition to those of any output kind.
static void check_progress(const request_record *r, const expected_run *t, const pllm_output *o) {
    EXPECT(t->progress, "progress of sequence %llu was not requested", LLU(o->sequence));
    EXPECT(o->computed_tokens < r->max_model_len, "%llu tokens are computed, max_model_len is %llu",
           LLU(o->computed_tokens), LLU(r->max_model_len));
    EXPECT(!o->tokens_len && !o->text_len && !o->generated_tokens && !o->finish_reason,
           "an output with the progress of sequence %llu has results", LLU(o->sequence));
}

static void check_counts(const request_record *r, expected_run *t, const pllm_output *o) {
    bool all_at_once = t->kind != PLLM_OUTPUT_DELTA, last = o->finish_reason != PLLM_FINISH_NONE;
    EXPECT(racing || t->ends == 0, "an output of sequence %llu arrived after the last output",
           LLU(o->sequence));
    if (o->computed_tokens) {
        check_progress(r, t, o);
        return;
    }
    EXPECT(t->kind != PLLM_OUTPUT_FINAL || t->outputs == 0, "more than one output: sequence %llu",
           LLU(o->sequence));
    EXPECT(t->kind != PLLM_OUTPUT_FINAL || last,
           "more than one output: not the last output of sequence %llu", LLU(o->sequence));
    t->tokens = o->tokens_len + (all_at_once ? 0 : t->tokens);
    bool order_is_known = !racing && !t->changed_while_running;
    bool is_cumulative =
        all_at_once && !t->changed_while_running && o->finish_reason != PLLM_FINISH_ERROR;
    EXPECT(!(order_is_known || is_cumulative) || tokens_match_counts(t, t->tokens, o),
           "%llu tokens of sequence %llu, generated_tokens is %llu (prompt %llu, echo %d, kind %u, "
           "branching %d, %u outputs before, finish reason %u)",
           LLU(t->tokens), LLU(o->sequence), LLU(o->generated_tokens), LLU(o->prompt_tokens),
           t->echo, t->kind, r->branching, t->outputs, o->finish_reason);
    t->outputs++;
    if (last) t->ends++, t->generated = o->generated_tokens, t->finish_reason = o->finish_reason;
    EXPECT(t->ends <= 1, "a second last output arrived after the last output of sequence %llu",
           LLU(o->sequence));
    EXPECT(t->ends == 0 || t->changed_while_running || o->generated_tokens <= t->generated,
           "generated_tokens exceeds that of the last output");
}

static void store_state(const pllm_output *o) {
    last_state_len = o->sequence_state_len <= sizeof last_state ? o->sequence_state_len : 0;
    memcpy(last_state, o->sequence_state, last_state_len);
}

uint64_t oracle_copy_state(unsigned char *to, uint64_t capacity) {
    pthread_mutex_lock(&lock);
    uint64_t len = last_state_len <= capacity ? last_state_len : 0;
    memcpy(to, last_state, len);
    pthread_mutex_unlock(&lock);
    return len;
}

void oracle_check_output(unsigned engine, unsigned queue, const pllm_output *o) {
    pthread_mutex_lock(&lock);
    check_shape(o);
    if (o->sequence_state || was_not_exported(o)) {
        if (o->sequence_state) store_state(o);
        pthread_mutex_unlock(&lock);
        return;
    }
    request_record *r = owner_of(engine, o);
    sequence_record *a = &r->sequence_records[o->sequence - r->id];
    expected_run *t = run_of(r, a, queue, o);
    EXPECT(!t->queue_freed, "an output arrived from a freed queue");
    check_index(r, t == &a->initial, o);
    check_content(r, t, o);
    check_counts(r, t, o);
    check_reference(t, o);
    pthread_mutex_unlock(&lock);
}

// ---- sequences ----

uint64_t oracle_any_sequence(unsigned engine, uint64_t n) {
    pthread_mutex_lock(&lock);
    uint64_t id = 0;
    for (unsigned tries = 0; tries < request_records_len && !id; tries++) {
        const request_record *r = &request_records[(n + tries) % request_records_len];
        if (r->state == ACCEPTED && r->engine == engine) id = r->id + n % r->width;
    }
    pthread_mutex_unlock(&lock);
    return id;
}

sequence_record *oracle_find(unsigned engine, uint64_t id, request_record **of) {
    pthread_mutex_lock(&lock);
    request_record *r = find(engine, id);
    pthread_mutex_unlock(&lock);
    *of = r;
    return r ? &r->sequence_records[id - r->id] : NULL;
}

bool oracle_lock(unsigned engine, uint64_t id, request_record **of, sequence_record **found) {
    sequence_record *a = *found = oracle_find(engine, id, of);
    if (!a) return true;
    pthread_mutex_lock(&lock);
    bool free = !a->locked;
    a->locked = true;
    pthread_mutex_unlock(&lock);
    return free;
}

void oracle_unlock(sequence_record *a) {
    if (!a) return;
    pthread_mutex_lock(&lock);
    a->locked = false;
    pthread_mutex_unlock(&lock);
}

static void mark_changed(sequence_record *a) {
    a->changed_by_many |= racing;
    a->inherited.changed_while_running = a->initial.changed_while_running = true;
    for (unsigned i = 0; i < a->runs_len; i++)
        a->runs[i].changed_while_running |= racing || !a->runs[i].ends;
}

// Before its first token, a change of the first sample changes all samples.
void oracle_mark_changed(request_record *r, sequence_record *a) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < r->width; i++)
        if (a == &r->sequence_records[0] || a == &r->sequence_records[i])
            mark_changed(&r->sequence_records[i]);
    pthread_mutex_unlock(&lock);
}

sequence_status oracle_sequence_status(const request_record *r, const sequence_record *a) {
    if (a->freed || a->creation_failed) return REMOVED;
    if (racing || a->changed_by_many || a->runs_len == 0 || r->branching == BEST) return UNCERTAIN;
    const expected_run *last = &a->runs[a->runs_len - 1];
    // After an error, or if a request for several samples was aborted early, the sequence may not
    // exist.
    if (last->ends == 0 || last->finish_reason == PLLM_FINISH_ERROR ||
        (r->width > 1 && last->tokens == 0))
        return UNCERTAIN;
    return last->keep ? IDLE : REMOVED;
}

bool oracle_has_ended(unsigned engine, uint64_t id) {
    pthread_mutex_lock(&lock);
    const request_record *r = find(engine, id);
    bool ended = r && !racing && r->branching != BEST && r->branching != CHILDREN && r->id == id;
    for (unsigned i = 0; ended && i < r->results; i++) {
        const sequence_record *a = &r->sequence_records[i];
        ended = a->runs_len > 0 && a->runs[a->runs_len - 1].ends > 0;
    }
    pthread_mutex_unlock(&lock);
    return ended;
}

// ---- expected ends ----

void oracle_queue_freed(unsigned queue) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < request_records_len; i++)
        for (unsigned s = 0; s < request_records[i].width; s++) {
            sequence_record *a = &request_records[i].sequence_records[s];
            if (a->inherited.queue == queue) a->inherited.queue_freed = true;
            if (a->initial.queue == queue) a->initial.queue_freed = true;
            for (unsigned t = 0; t < a->runs_len; t++)
                if (a->runs[t].queue == queue) a->runs[t].queue_freed = true;
        }
    pthread_mutex_unlock(&lock);
}

// True if a run must end on this queue (0: any queue) and has not.
static bool has_unended_runs(const request_record *r, unsigned queue) {
    if (r->state != ACCEPTED) return false;
    const expected_run *first = &r->sequence_records[0].initial;
    if (r->branching == BEST && r->results_started < r->results && !first->queue_freed &&
        (!queue || first->queue == queue))
        return true;
    for (unsigned s = 0; s < r->width; s++)
        for (unsigned i = 0; i < r->sequence_records[s].runs_len; i++) {
            const expected_run *t = &r->sequence_records[s].runs[i];
            bool must = !t->uncertain || t->outputs > 0;
            if (must && !t->queue_freed && t->ends == 0 && (!queue || t->queue == queue))
                return true;
        }
    return false;
}

totals oracle_totals(unsigned engine) {
    totals sum = {0, 0, 0};
    for (unsigned i = 0; i < request_records_len; i++) {
        const request_record *r = &request_records[i];
        if (r->engine != engine || r->state != ACCEPTED) continue;
        sum.sequences += r->width;
        if (r->branching == BEST) sum.runs += r->results;
        for (unsigned s = 0; s < r->width; s++) {
            const sequence_record *a = &r->sequence_records[s];
            // A failed fork may emit an error.
            sum.uncertain += r->branching == CHILDREN;
            for (unsigned t = 0; t < a->runs_len; t++)
                *(a->runs[t].uncertain ? &sum.uncertain : &sum.runs) += 1;
        }
    }
    return sum;
}

bool oracle_expects_outputs(unsigned queue) {
    for (unsigned i = 0; i < request_records_len; i++)
        if (has_unended_runs(&request_records[i], queue)) return true;
    return false;
}

void oracle_check_ended(unsigned queue) {
    for (unsigned i = 0; i < request_records_len; i++)
        EXPECT(!has_unended_runs(&request_records[i], queue), "request %llu did not end",
               LLU(request_records[i].id));
}

void oracle_for_each_unended(unsigned engine, visitor *visit, void *context) {
    for (unsigned i = 0; i < request_records_len; i++) {
        const request_record *r = &request_records[i];
        if (r->engine != engine || !has_unended_runs(r, 0)) continue;
        for (unsigned s = 0; s < (r->branching == CHILDREN ? r->width : 1); s++)
            visit(context, r->id + s);
    }
}

void oracle_for_each_sequence(unsigned engine, visitor *visit, void *context) {
    for (unsigned i = 0; i < request_records_len; i++)
        for (unsigned s = 0; request_records[i].engine == engine &&
                             request_records[i].state == ACCEPTED && s < request_records[i].width;
             s++)
            visit(context, request_records[i].id + s);
}

// ---- pins ----

void oracle_pinned(unsigned engine, uint64_t id) {
    pthread_mutex_lock(&lock);
    EXPECT(id != 0 && !find(engine, id), "a pin got the id %llu", LLU(id));
    if (pins_len < MAX_PINS) pins[pins_len++] = (pin_slot){.id = id, .engine = engine};
    pthread_mutex_unlock(&lock);
}

uint64_t oracle_pin_count(unsigned engine) {
    uint64_t count = 0;
    for (unsigned i = 0; i < pins_len; i++) count += pins[i].engine == engine;
    return count;
}

pin_slot *oracle_any_pin(unsigned engine, uint64_t n) {
    pthread_mutex_lock(&lock);
    pin_slot *pin = NULL;
    for (unsigned tries = 0; tries < pins_len && !pin; tries++)
        if (pins[(n + tries) % pins_len].engine == engine) pin = &pins[(n + tries) % pins_len];
    pthread_mutex_unlock(&lock);
    return pin;
}
