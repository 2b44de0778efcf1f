#include <math.h>
#include <pthread.h>

#include "fuzz.h"

enum { MOST_REQUESTS = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static request requests[MOST_REQUESTS];
static unsigned requests_len;
static bool racing;

void ledger_clear(void) { requests_len = 0, racing = false; }

void ledger_race(bool now) { racing = now; }

request *ledger_open(void) {
    pthread_mutex_lock(&lock);
    request *r = NULL;
    if (requests_len < MOST_REQUESTS) {
        unsigned i = requests_len++;
        r = &requests[i];
        *r = (request){.user_data = i == 0 ? 0 : i == 1 ? UINT64_MAX : mix(1, i)};
    }
    pthread_mutex_unlock(&lock);
    return r;
}

void ledger_accepted(request *r, uint64_t id) {
    pthread_mutex_lock(&lock);
    EXPECT(id != 0, "a request got the id 0");
    EXPECT(r->id == 0 || r->id == id, "a request's output said %llu, its id is %llu", LLU(r->id), LLU(id));
    for (unsigned i = 0; i < requests_len; i++) {
        const request *other = &requests[i];
        EXPECT(other == r || other->state != LIVE || other->engine != r->engine || other->id != id, "the id %llu was given twice",
               LLU(id));
    }
    r->id = id;
    r->state = LIVE;
    pthread_mutex_unlock(&lock);
}

void ledger_refused(request *r) {
    pthread_mutex_lock(&lock);
    EXPECT(r->id == 0, "an output came of a request that was refused");
    r->state = REFUSED;
    pthread_mutex_unlock(&lock);
}

// ---- one output --------------------------------------------------------------------------------------------------------

static request *owner_of(const pllm_output *o) {
    for (unsigned i = 0; i < requests_len; i++)
        if (requests[i].user_data == o->user_data) return &requests[i];
    finding("an output's user_data is no request's: %llx", LLU(o->user_data));
}

static void check_shape(const pllm_output *o) {
    EXPECT(o->struct_size == sizeof *o && o->reserved == 0, "an output's struct_size or reserved is wrong");
    EXPECT(o->index == 0, "an output's index is %u", o->index);
    EXPECT(o->finish_reason <= PLLM_FINISH_ERROR, "an output's finish reason is %u", o->finish_reason);
    EXPECT((o->tokens != NULL) == (o->tokens_len > 0), "an output's tokens and tokens_len disagree");
    EXPECT((o->text != NULL) == (o->text_len > 0), "an output's text and text_len disagree");
    bool was_closed = o->finish_reason == PLLM_FINISH_ABORT && o->error_code == PLLM_E_CLOSED;  // its engine was freed
    EXPECT((o->error != NULL) == (o->finish_reason == PLLM_FINISH_ERROR || was_closed) && (o->error != NULL) == (o->error_len > 0),
           "an output's error and finish reason %u disagree", o->finish_reason);
    EXPECT(o->error ? o->error_code >= PLLM_E_INVALID_ARGUMENT && o->error_code <= PLLM_E_CANCELLED : o->error_code == 0,
           "an output's error_code is %d", o->error_code);
    EXPECT(is_utf8(o->text, o->text_len), "an output's text is not UTF-8, or ends with half a character");
    EXPECT(is_utf8(o->error, o->error_len), "an output's error is not UTF-8");
    EXPECT(o->error_code != PLLM_E_INTERNAL, "a defect was met: %.*s", (int)o->error_len, o->error);
}

static void check_content(const request *r, const pllm_output *o) {
    EXPECT(o->text == NULL || r->has_text, "text came from an engine without a tokenizer");
    EXPECT((o->logprobs != NULL) == (r->wants_logprobs && o->tokens_len > 0), "logprobs came unasked, or did not come");
    for (uint64_t i = 0; i < o->tokens_len; i++) {
        EXPECT(o->tokens[i] < r->vocab, "an output's token is %u, beyond the vocabulary", o->tokens[i]);
        EXPECT(!o->logprobs || o->logprobs[i] <= 0, "a log probability is %f", (double)o->logprobs[i]);
    }
    bool is_right = o->prompt_tokens > 0 && (!r->prompt_tokens || o->prompt_tokens == r->prompt_tokens);
    EXPECT(is_right, "prompt_tokens is %llu, not %llu",
           LLU(o->prompt_tokens), LLU(r->prompt_tokens));
    EXPECT(!r->max_tokens || o->generated_tokens <= r->max_tokens, "%llu tokens came, max_tokens is %llu",
           LLU(o->generated_tokens), LLU(r->max_tokens));
    EXPECT(o->prompt_tokens + o->generated_tokens <= r->max_model_len, "a sequence is longer than the engine allows");
    EXPECT(o->finish_reason != PLLM_FINISH_LENGTH || o->generated_tokens == r->max_tokens ||
               o->prompt_tokens + o->generated_tokens == r->max_model_len,
           "a request ended by its length after %llu of %llu tokens", LLU(o->generated_tokens),
           LLU(r->max_tokens));
}

static void count(request *r, const pllm_output *o) {
    EXPECT(racing || r->ends == 0, "an output of request %llu came after the last output", LLU(r->id));
    r->tokens += o->tokens_len;
    EXPECT(racing || r->tokens == o->generated_tokens, "%llu tokens came, generated_tokens says %llu", LLU(r->tokens),
           LLU(o->generated_tokens));
    if (o->finish_reason != PLLM_FINISH_NONE) r->ends++, r->generated_at_end = o->generated_tokens;
    EXPECT(r->ends <= 1, "a second last output came after the last output of request %llu", LLU(r->id));
    EXPECT(r->ends == 0 || o->generated_tokens <= r->generated_at_end, "generated_tokens went beyond that of the last output");
}

void ledger_output(unsigned queue, const pllm_output *o) {
    pthread_mutex_lock(&lock);
    check_shape(o);
    request *r = owner_of(o);
    EXPECT(r->state != REFUSED, "an output came of a request that was refused");
    EXPECT(r->queue == queue, "an output came from another request's queue");
    EXPECT(!r->unheard, "an output came from a queue that is gone");
    if (r->id == 0) r->id = o->request;
    EXPECT(r->id == o->request && o->sequence != 0, "an output's request is %llu, not %llu", LLU(o->request),
           LLU(r->id));
    check_content(r, o);
    count(r, o);
    pthread_mutex_unlock(&lock);
}

// ---- what is still to come ---------------------------------------------------------------------------------------------

void ledger_queue_gone(unsigned queue) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < requests_len; i++)
        if (requests[i].queue == queue) requests[i].unheard = true;
    pthread_mutex_unlock(&lock);
}

static bool is_due(const request *r) { return r->state == LIVE && !r->unheard && r->ends == 0; }

request *ledger_any(uint64_t n) {
    pthread_mutex_lock(&lock);
    request *r = requests_len ? &requests[n % requests_len] : NULL;
    if (r && r->state != LIVE) r = NULL;
    pthread_mutex_unlock(&lock);
    return r;
}

bool ledger_has_ended(const request *r) {
    pthread_mutex_lock(&lock);
    bool ended = r->ends > 0;
    pthread_mutex_unlock(&lock);
    return ended;
}

uint64_t ledger_added(unsigned engine) {
    uint64_t added = 0;
    for (unsigned i = 0; i < requests_len; i++) added += requests[i].engine == engine && requests[i].state == LIVE;
    return added;
}

bool ledger_waits_for(unsigned queue) {
    for (unsigned i = 0; i < requests_len; i++)
        if (requests[i].queue == queue && is_due(&requests[i])) return true;
    return false;
}

void ledger_expect_ended(unsigned queue) {
    for (unsigned i = 0; i < requests_len; i++) {
        const request *r = &requests[i];
        if (r->queue != queue || r->state != LIVE || r->unheard) continue;
        EXPECT(r->ends == 1, "request %llu did not end", LLU(r->id));
        EXPECT(r->tokens == r->generated_at_end, "%llu tokens came, generated_tokens of the last output says %llu",
               LLU(r->tokens), LLU(r->generated_at_end));
    }
}

void ledger_for_unended(unsigned engine, void (*visit)(void *context, uint64_t id), void *context) {
    for (unsigned i = 0; i < requests_len; i++)
        if (requests[i].engine == engine && is_due(&requests[i])) visit(context, requests[i].id);
}
