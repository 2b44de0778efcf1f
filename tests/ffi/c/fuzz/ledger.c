#include <math.h>
#include <pthread.h>

#include "fuzz.h"

enum { MOST_REQUESTS = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t resolved = PTHREAD_COND_INITIALIZER;  // an id became known, or a call was refused
static request requests[MOST_REQUESTS];
static unsigned requests_len;
static pin_slot pins[MOST_PINS];
static unsigned pins_len;
static unsigned last_user_data;
static bool racing;

static unsigned char last_state[1 << 20];
static uint64_t last_state_len;

void ledger_clear(void) { requests_len = pins_len = last_user_data = last_state_len = 0, racing = false; }

void ledger_race(bool now) { racing = now; }

uint64_t ledger_user_data(void) {
    pthread_mutex_lock(&lock);
    unsigned i = last_user_data++;
    pthread_mutex_unlock(&lock);
    return i == 0 ? 0 : i == 1 ? UINT64_MAX : mix(1, i);
}

request *ledger_open(void) {
    pthread_mutex_lock(&lock);
    request *r = NULL;
    if (requests_len < MOST_REQUESTS) {
        r = &requests[requests_len++];
        *r = (request){.state = ADDING, .width = 1, .results = 1};
    }
    pthread_mutex_unlock(&lock);
    return r;
}

static bool overlap(const request *a, const request *b) { return a->id < b->id + b->width && b->id < a->id + a->width; }

void ledger_accepted(request *r, uint64_t id) {
    pthread_mutex_lock(&lock);
    EXPECT(id != 0, "a request got the id 0");
    r->id = id;
    for (unsigned i = 0; i < requests_len; i++) {
        const request *other = &requests[i];
        EXPECT(other == r || other->state != LIVE || other->engine != r->engine || !overlap(r, other), "the id %llu was given twice",
               LLU(id));
    }
    for (unsigned i = 0; i < pins_len; i++)
        EXPECT(pins[i].engine != r->engine || pins[i].id - id >= r->width, "the id %llu was given twice", LLU(pins[i].id));
    for (unsigned i = 0; i < r->width; i++) r->accounts[i].birth = r->accounts[i].now;
    r->state = LIVE;
    pthread_cond_broadcast(&resolved);
    pthread_mutex_unlock(&lock);
}

void ledger_refused(request *r) {
    pthread_mutex_lock(&lock);
    r->state = REFUSED;
    pthread_cond_broadcast(&resolved);
    pthread_mutex_unlock(&lock);
}

bool ledger_begin(account *a, const turn *t) {
    pthread_mutex_lock(&lock);
    bool room = a->turns_len < MOST_TURNS;
    if (room) a->turns[a->turns_len] = *t, a->turns[a->turns_len++].loose |= a->wild;
    pthread_mutex_unlock(&lock);
    return room;
}

void ledger_begun(account *a, bool accepted) {
    pthread_mutex_lock(&lock);
    turn *t = &a->turns[a->turns_len - 1];
    if (accepted) a->now = *t;
    else EXPECT(t->outputs == 0, "an output came of a resume that was refused"), a->turns_len--;
    pthread_mutex_unlock(&lock);
}

// ---- one output --------------------------------------------------------------------------------------------------------

static request *find(unsigned engine, uint64_t id) {
    for (unsigned i = 0; i < requests_len; i++) {
        request *r = &requests[i];
        if (r->state == LIVE && r->engine == engine && id - r->id < r->width) return r;
    }
    return NULL;
}

static bool some_are_being_added(unsigned engine) {
    for (unsigned i = 0; i < requests_len; i++)
        if (requests[i].state == ADDING && requests[i].engine == engine) return true;
    return false;
}

// A quick reader sees outputs before the call that asked for them has returned.
static request *owner_of(unsigned engine, const pllm_output *o) {
    request *r;
    while (!(r = find(engine, o->sequence)) && some_are_being_added(engine)) pthread_cond_wait(&resolved, &lock);
    EXPECT(r, "an output came of sequence %llu, which nobody asked for, or which was refused", LLU(o->sequence));
    uint64_t id = r->branching == CHILDREN ? o->sequence : r->id;
    EXPECT(o->request == id, "an output's request is %llu, not %llu", LLU(o->request), LLU(id));
    return r;
}

// The turn that an output belongs to: the first of the turns it could be of that has not ended.
static turn *turn_of(request *r, account *a, unsigned queue, const pllm_output *o) {
    turn *found = NULL, *birth = &a->birth;
    bool user_data_is_known = birth->user_data == o->user_data;
    bool is_birth = user_data_is_known && birth->queue == queue && !birth->ends;
    // Of several samples, those that are results say so before whatever they are asked for afterwards.
    if (r->branching == BEST && is_birth) {
        EXPECT(r->results_begun++ < r->results, "request %llu has more results than it was asked for", LLU(r->id));
        return birth;
    }
    for (unsigned i = 0; i < a->turns_len && (!found || found->ends); i++) {
        if (a->turns[i].user_data != o->user_data) continue;
        user_data_is_known = true;
        if (a->turns[i].queue == queue) found = &a->turns[i];
    }
    // A child that could not be made says so, even where it was not to run; a turn it was asked for ends besides.
    if ((!found || found->ends) && r->branching == CHILDREN && o->finish_reason == PLLM_FINISH_ERROR && is_birth) {
        a->never_made = true;
        return birth;
    }
    EXPECT(user_data_is_known, "an output's user_data is none of its sequence's: %llx", LLU(o->user_data));
    EXPECT(found, "an output came from another request's queue");
    return found;
}

// Among the best of several samples, an index is a rank; whoever is resumed has its own again.
static void check_index(const request *r, bool is_birth, const pllm_output *o) {
    uint64_t place = o->sequence - r->id;
    if (r->branching == CHILDREN) EXPECT(o->index == 0, "a child's index is %u", o->index);
    else if (r->branching == BEST && is_birth) EXPECT(o->index < r->results, "a result's index is %u", o->index);
    else EXPECT(o->index == place, "the index of sequence %llu of %llu is %u", LLU(o->sequence), LLU(r->id), o->index);
}

static bool was_not_exported(const pllm_output *o) {
    return o->error && o->finish_reason == PLLM_FINISH_NONE && !o->tokens && !o->text;
}

static void check_shape(const pllm_output *o) {
    EXPECT(o->struct_size == sizeof *o && o->reserved == 0, "an output's struct_size or reserved is wrong");
    EXPECT(o->finish_reason <= PLLM_FINISH_DEADLINE, "an output's finish reason is %u", o->finish_reason);
    EXPECT((o->tokens != NULL) == (o->tokens_len > 0), "an output's tokens and tokens_len disagree");
    EXPECT((o->text != NULL) == (o->text_len > 0), "an output's text and text_len disagree");
    bool was_closed = o->finish_reason == PLLM_FINISH_ABORT && o->error_code == PLLM_E_CLOSED;  // its engine was freed
    bool must_say = o->finish_reason == PLLM_FINISH_ERROR || was_closed, may_say = must_say || was_not_exported(o);
    EXPECT((o->error != NULL) <= may_say && (o->error != NULL) >= must_say && (o->error != NULL) == (o->error_len > 0),
           "an output's error and finish reason %u disagree", o->finish_reason);
    EXPECT(o->error ? o->error_code >= PLLM_E_INVALID_ARGUMENT && o->error_code <= PLLM_E_CANCELLED : o->error_code == 0,
           "an output's error_code is %d", o->error_code);
    EXPECT(is_utf8(o->text, o->text_len), "an output's text is not UTF-8, or ends with half a character");
    EXPECT(is_utf8(o->error, o->error_len), "an output's error is not UTF-8");
    EXPECT(o->error_code != PLLM_E_INTERNAL, "a defect was met: %.*s", (int)o->error_len, o->error);
    EXPECT((o->sequence_state != NULL) == (o->sequence_state_len > 0), "an output's state and state_len disagree");
    EXPECT(!o->sequence_state || (!o->tokens && !o->text && o->finish_reason == PLLM_FINISH_NONE), "an output with a state says more");
}

static void check_probabilities(const float *list, uint64_t len) {
    for (uint64_t i = 0; i < len; i++) EXPECT(list[i] <= 0, "a log probability is %f", (double)list[i]);
}

static void check_most_probable(const request *r, const pllm_logprob *list, uint64_t len) {
    for (uint64_t i = 0; i < len; i++)
        EXPECT(list[i].token < r->vocab && list[i].logprob <= 0, "one of the top_logprobs is %f of token %u", (double)list[i].logprob,
               list[i].token);
}

static void check_lists(const request *r, const turn *t, const pllm_output *o) {
    EXPECT((o->logprobs != NULL) == (t->logprobs && o->tokens_len > 0), "logprobs came unasked, or did not come");
    EXPECT(t->prompt_logprobs || !o->prompt_logprobs_len, "the prompt's logprobs came unasked");
    uint64_t top = t->logprobs ? o->tokens_len * t->top : 0;
    EXPECT(o->top_logprobs_len == top, "%llu top_logprobs came with %llu tokens", LLU(o->top_logprobs_len), LLU(o->tokens_len));
    EXPECT(o->prompt_top_logprobs_len == o->prompt_logprobs_len * t->prompt_top, "%llu prompt_top_logprobs came with %llu",
           LLU(o->prompt_top_logprobs_len), LLU(o->prompt_logprobs_len));
    EXPECT((o->top_logprobs != NULL) == (o->top_logprobs_len > 0) && (o->prompt_logprobs != NULL) == (o->prompt_logprobs_len > 0) &&
               (o->prompt_top_logprobs != NULL) == (o->prompt_top_logprobs_len > 0),
           "the lists of an output disagree with their lengths");
    check_probabilities(o->logprobs, o->logprobs ? o->tokens_len : 0);
    check_probabilities(o->prompt_logprobs, o->prompt_logprobs_len);
    check_most_probable(r, o->top_logprobs, o->top_logprobs_len);
    check_most_probable(r, o->prompt_top_logprobs, o->prompt_top_logprobs_len);
}

// Whatever ended it, and whatever happened around it.
static void check_answer(const turn *t, const pllm_output *o) {
    if (!t->answer || t->loose) return;
    uint64_t at = t->kind == PLLM_OUTPUT_DELTA ? o->generated_tokens - o->tokens_len : 0;
    for (uint64_t i = 0; i < o->tokens_len; i++) {
        uint32_t expected = t->answer[at + i] + (sabotage == an_answer_is_another);
        EXPECT(o->tokens[i] == expected, "another answer came: token %llu of sequence %llu is %u, not %u", LLU(at + i), LLU(o->sequence),
               o->tokens[i], expected);
    }
}

static void check_content(const request *r, const turn *t, const pllm_output *o) {
    EXPECT(o->text == NULL || r->has_text, "text came from an engine without a tokenizer");
    bool in_time = o->finish_reason != PLLM_FINISH_DEADLINE || t->has_deadline;
    EXPECT(in_time, "sequence %llu had no deadline that could pass", LLU(o->sequence));
    check_lists(r, t, o);
    for (uint64_t i = 0; i < o->tokens_len; i++)
        EXPECT(o->tokens[i] < r->vocab, "an output's token is %u, beyond the vocabulary", o->tokens[i]);
    EXPECT(isfinite(o->score), "a score is %f", o->score);
    EXPECT(o->prompt_tokens + o->generated_tokens <= r->max_model_len, "a sequence is longer than the engine allows");
    if (o->finish_reason == PLLM_FINISH_ERROR || t->loose) return;
    bool is_right = o->prompt_tokens > 0 && (!t->prompt_tokens || o->prompt_tokens == t->prompt_tokens);
    EXPECT(is_right, "prompt_tokens is %llu, not %llu", LLU(o->prompt_tokens), LLU(t->prompt_tokens));
    EXPECT(!t->max_tokens || o->generated_tokens <= t->max_tokens, "%llu tokens came, max_tokens is %llu", LLU(o->generated_tokens),
           LLU(t->max_tokens));
    EXPECT(o->finish_reason != PLLM_FINISH_LENGTH || o->generated_tokens == t->max_tokens ||
               o->prompt_tokens + o->generated_tokens == r->max_model_len,
           "a request ended by its length after %llu of %llu tokens", LLU(o->generated_tokens), LLU(t->max_tokens));
}

// As many tokens have come as were generated; with the prompt before them where it is echoed and the sequence had begun.
static bool adds_up(const turn *t, uint64_t tokens, const pllm_output *o) {
    uint64_t prompt = t->echo ? o->prompt_tokens : 0;
    return tokens == o->generated_tokens + prompt || (tokens == 0 && o->generated_tokens == 0);
}

static void count(const request *r, turn *t, const pllm_output *o) {
    bool all_at_once = t->kind != PLLM_OUTPUT_DELTA, last = o->finish_reason != PLLM_FINISH_NONE;
    EXPECT(racing || t->ends == 0, "an output of sequence %llu came after the last output", LLU(o->sequence));
    EXPECT(t->kind != PLLM_OUTPUT_FINAL || t->outputs == 0, "more than one output came of sequence %llu", LLU(o->sequence));
    EXPECT(t->kind != PLLM_OUTPUT_FINAL || last, "more than one output comes of sequence %llu", LLU(o->sequence));
    t->tokens = o->tokens_len + (all_at_once ? 0 : t->tokens);
    bool order_is_known = !racing && !t->loose;
    bool is_whole = all_at_once && !t->loose && o->finish_reason != PLLM_FINISH_ERROR;
    EXPECT(!(order_is_known || is_whole) || adds_up(t, t->tokens, o),
           "%llu tokens came of sequence %llu, generated_tokens says %llu (prompt %llu, echo %d, kind %u, branching %d, %u before it, end %u)",
           LLU(t->tokens), LLU(o->sequence), LLU(o->generated_tokens), LLU(o->prompt_tokens), t->echo, t->kind, r->branching, t->outputs,
           o->finish_reason);
    t->outputs++;
    if (last) t->ends++, t->generated = o->generated_tokens, t->finish_reason = o->finish_reason;
    EXPECT(t->ends <= 1, "a second last output came after the last output of sequence %llu", LLU(o->sequence));
    EXPECT(t->ends == 0 || t->loose || o->generated_tokens <= t->generated, "generated_tokens went beyond that of the last output");
}

static void keep_state(const pllm_output *o) {
    last_state_len = o->sequence_state_len <= sizeof last_state ? o->sequence_state_len : 0;
    memcpy(last_state, o->sequence_state, last_state_len);
}

uint64_t ledger_state(unsigned char *to, uint64_t room) {
    pthread_mutex_lock(&lock);
    uint64_t len = last_state_len <= room ? last_state_len : 0;
    memcpy(to, last_state, len);
    pthread_mutex_unlock(&lock);
    return len;
}

void ledger_output(unsigned engine, unsigned queue, const pllm_output *o) {
    pthread_mutex_lock(&lock);
    check_shape(o);
    if (o->sequence_state || was_not_exported(o)) {
        if (o->sequence_state) keep_state(o);
        pthread_mutex_unlock(&lock);
        return;
    }
    request *r = owner_of(engine, o);
    account *a = &r->accounts[o->sequence - r->id];
    turn *t = turn_of(r, a, queue, o);
    EXPECT(!t->unheard, "an output came from a queue that is gone");
    check_index(r, t == &a->birth, o);
    check_content(r, t, o);
    count(r, t, o);
    check_answer(t, o);
    pthread_mutex_unlock(&lock);
}

// ---- sequences ---------------------------------------------------------------------------------------------------------

uint64_t ledger_any(unsigned engine, uint64_t n) {
    pthread_mutex_lock(&lock);
    uint64_t id = 0;
    for (unsigned tries = 0; tries < requests_len && !id; tries++) {
        const request *r = &requests[(n + tries) % requests_len];
        if (r->state == LIVE && r->engine == engine) id = r->id + n % r->width;
    }
    pthread_mutex_unlock(&lock);
    return id;
}

account *ledger_find(unsigned engine, uint64_t id, request **of) {
    pthread_mutex_lock(&lock);
    request *r = find(engine, id);
    pthread_mutex_unlock(&lock);
    *of = r;
    return r ? &r->accounts[id - r->id] : NULL;
}

bool ledger_claim(unsigned engine, uint64_t id, request **of, account **found) {
    account *a = *found = ledger_find(engine, id, of);
    if (!a) return true;
    pthread_mutex_lock(&lock);
    bool free = !a->claimed;
    a->claimed = true;
    pthread_mutex_unlock(&lock);
    return free;
}

void ledger_let_go(account *a) {
    if (!a) return;
    pthread_mutex_lock(&lock);
    a->claimed = false;
    pthread_mutex_unlock(&lock);
}

static void loosen(account *a) {
    a->wild |= racing;
    a->now.loose = a->birth.loose = true;
    for (unsigned i = 0; i < a->turns_len; i++) a->turns[i].loose |= racing || !a->turns[i].ends;
}

// What happens to the first of several samples before its first token happens to all of them.
void ledger_loosen(request *r, account *a) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < r->width; i++)
        if (a == &r->accounts[0] || a == &r->accounts[i]) loosen(&r->accounts[i]);
    pthread_mutex_unlock(&lock);
}

whereabouts ledger_whereabouts(const request *r, const account *a) {
    if (a->freed || a->never_made) return GONE;
    if (racing || a->wild || a->turns_len == 0 || r->branching == BEST) return MAYBE;
    const turn *last = &a->turns[a->turns_len - 1];
    // One that met an error may never have been made, nor one of several whose request was aborted early.
    if (last->ends == 0 || last->finish_reason == PLLM_FINISH_ERROR || (r->width > 1 && last->tokens == 0)) return MAYBE;
    return last->keep ? IDLE : GONE;
}

bool ledger_has_ended(unsigned engine, uint64_t id) {
    pthread_mutex_lock(&lock);
    const request *r = find(engine, id);
    bool ended = r && !racing && r->branching != BEST && r->branching != CHILDREN && r->id == id;
    for (unsigned i = 0; ended && i < r->results; i++) {
        const account *a = &r->accounts[i];
        ended = a->turns_len > 0 && a->turns[a->turns_len - 1].ends > 0;
    }
    pthread_mutex_unlock(&lock);
    return ended;
}

// ---- what is still to come ---------------------------------------------------------------------------------------------

void ledger_queue_gone(unsigned queue) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < requests_len; i++)
        for (unsigned s = 0; s < requests[i].width; s++) {
            account *a = &requests[i].accounts[s];
            if (a->now.queue == queue) a->now.unheard = true;
            if (a->birth.queue == queue) a->birth.unheard = true;
            for (unsigned t = 0; t < a->turns_len; t++)
                if (a->turns[t].queue == queue) a->turns[t].unheard = true;
        }
    pthread_mutex_unlock(&lock);
}

// Turns that must end on this queue (0: on any) and have not.
static bool is_due(const request *r, unsigned queue) {
    if (r->state != LIVE) return false;
    const turn *first = &r->accounts[0].birth;
    if (r->branching == BEST && r->results_begun < r->results && !first->unheard && (!queue || first->queue == queue)) return true;
    for (unsigned s = 0; s < r->width; s++)
        for (unsigned i = 0; i < r->accounts[s].turns_len; i++) {
            const turn *t = &r->accounts[s].turns[i];
            bool must = !t->optional || t->outputs > 0;
            if (must && !t->unheard && t->ends == 0 && (!queue || t->queue == queue)) return true;
        }
    return false;
}

totals ledger_totals(unsigned engine) {
    totals sum = {0, 0, 0};
    for (unsigned i = 0; i < requests_len; i++) {
        const request *r = &requests[i];
        if (r->engine != engine || r->state != LIVE) continue;
        sum.sequences += r->width;
        if (r->branching == BEST) sum.turns += r->results;
        for (unsigned s = 0; s < r->width; s++) {
            const account *a = &r->accounts[s];
            // A child may have said that it could not be made.
            sum.optional += r->branching == CHILDREN;
            for (unsigned t = 0; t < a->turns_len; t++) *(a->turns[t].optional ? &sum.optional : &sum.turns) += 1;
        }
    }
    return sum;
}

bool ledger_waits_for(unsigned queue) {
    for (unsigned i = 0; i < requests_len; i++)
        if (is_due(&requests[i], queue)) return true;
    return false;
}

void ledger_expect_ended(unsigned queue) {
    for (unsigned i = 0; i < requests_len; i++) EXPECT(!is_due(&requests[i], queue), "request %llu did not end", LLU(requests[i].id));
}

void ledger_for_unended(unsigned engine, visitor *visit, void *context) {
    for (unsigned i = 0; i < requests_len; i++) {
        const request *r = &requests[i];
        if (r->engine != engine || !is_due(r, 0)) continue;
        for (unsigned s = 0; s < (r->branching == CHILDREN ? r->width : 1); s++) visit(context, r->id + s);
    }
}

void ledger_for_sequences(unsigned engine, visitor *visit, void *context) {
    for (unsigned i = 0; i < requests_len; i++)
        for (unsigned s = 0; requests[i].engine == engine && requests[i].state == LIVE && s < requests[i].width; s++)
            visit(context, requests[i].id + s);
}

// ---- pins --------------------------------------------------------------------------------------------------------------

void ledger_pinned(unsigned engine, uint64_t id) {
    pthread_mutex_lock(&lock);
    EXPECT(id != 0 && !find(engine, id), "a pin got the id %llu", LLU(id));
    if (pins_len < MOST_PINS) pins[pins_len++] = (pin_slot){.id = id, .engine = engine};
    pthread_mutex_unlock(&lock);
}

uint64_t ledger_pins(unsigned engine) {
    uint64_t count = 0;
    for (unsigned i = 0; i < pins_len; i++) count += pins[i].engine == engine;
    return count;
}

pin_slot *ledger_pin(unsigned engine, uint64_t n) {
    pthread_mutex_lock(&lock);
    pin_slot *pin = NULL;
    for (unsigned tries = 0; tries < pins_len && !pin; tries++)
        if (pins[(n + tries) % pins_len].engine == engine) pin = &pins[(n + tries) % pins_len];
    pthread_mutex_unlock(&lock);
    return pin;
}
