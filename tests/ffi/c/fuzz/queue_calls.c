// Calls on queues, and checks of their outputs.
#include "program.h"

#include <poll.h>
#include <unistd.h>

void create_queue(worker *w) {
    queue_slot *q = w->index ? &queues_of_racer(w->index)[below(w, QUEUES_OF_RACER)]
                             : &program.queues[below(w, QUEUES)];
    if (q->queue) return;
    const engine_slot *e = any_engine(w);
    uint64_t capacity = one_in(w, 8) ? interesting_u64(w) : 1 + below(w, 8);
    out_parameter *out = any_out_parameter(w);
    int32_t code =
        TRY(pllm_queue_create, e->engine, capacity, out ? (pllm_queue **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(!code == (e->engine && capacity && out), "create a queue of capacity %llu: code %d",
           LLU(capacity), code);
    if (!code)
        *q = (queue_slot){
            .queue = out->pointer, .number = ++program.last_number, .engine = e->number};
}

static void apply_mutation(pllm_output *o) {
    if (mutation == finish_reason_is_unknown) o->finish_reason = 6;
    if (mutation == deadline_without_a_deadline && o->finish_reason == PLLM_FINISH_LENGTH)
        o->finish_reason = PLLM_FINISH_DEADLINE;
    if (mutation == user_data_is_changed) o->user_data ^= 1 << 20;
    if (mutation == index_is_wrong) o->index = 99;
    if (mutation == sequence_has_another_request) o->request++;
    if (mutation == top_logprobs_are_too_short && o->top_logprobs_len) o->top_logprobs_len--;
    if (mutation == logprobs_are_missing) o->logprobs = NULL;
    if (mutation == text_ends_inside_a_character && o->text) o->text = "\xE6\x97", o->text_len = 2;
    if (mutation == token_is_lost && o->tokens) {
        o->tokens = NULL, o->logprobs = NULL, o->top_logprobs = NULL;
        o->tokens_len = o->top_logprobs_len = 0;
    }
}

static void check_batch(worker *w, queue_slot *q, const pllm_outputs *outputs) {
    uint64_t len = CALL(pllm_outputs_len, outputs);
    const pllm_output *first = CALL(pllm_outputs_get, outputs, 0);
    for (uint64_t i = 0; i < len; i++) {
        const pllm_output *o = CALL(pllm_outputs_get, outputs, i);
        EXPECT((const char *)o == (const char *)first + i * first->struct_size,
               "the outputs of a batch are not contiguous");
        pllm_output copy = *o;
        bool last = o->finish_reason != PLLM_FINISH_NONE;
        if (mutation) apply_mutation(&copy);
        if (mutation == last_output_is_lost && last) continue;
        if (mutation == sample_is_lost && o->index) continue;
        if (mutation == final_output_comes_early && o->finish_reason == PLLM_FINISH_LENGTH &&
            o->tokens_len > 1) {
            pllm_output early = copy;
            early.finish_reason = PLLM_FINISH_NONE;
            oracle_check_output(q->engine, q->number, &early);
        }
        if (mutation == last_output_is_duplicated && last)
            oracle_check_output(q->engine, q->number, &copy);
        oracle_check_output(q->engine, q->number + (mutation == output_goes_to_another_queue),
                            &copy);
    }
    uint64_t beyond = len + interesting_u64(w);
    EXPECT(beyond < len || CALL(pllm_outputs_get, outputs, beyond) == NULL,
           "output %llu of %llu exists", LLU(beyond), LLU(len));
    if (len) q->counter_was_read = false;
}

enum { NOT_POLLED = -1, CLOSED = -2 };

int64_t poll_and_check(worker *w, queue_slot *q, int64_t timeout_ms) {
    w->buffers = 0;
    out_parameter *out = any_out_parameter(w);
    if (mutation == call_hangs) enter(w, N_pllm_queue_poll), sleep(1000);
    int32_t code =
        TRY(pllm_queue_poll, q->queue, timeout_ms, out ? (pllm_outputs **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    bool closed = code == PLLM_E_CLOSED && q->engine_freed;
    EXPECT(!code || closed || (code == PLLM_E_INVALID_ARGUMENT && (!out || !q->queue)),
           "poll failed with %d", code);
    if (code) return closed ? CLOSED : NOT_POLLED;
    pllm_outputs *outputs = out->pointer;
    int64_t len = (int64_t)CALL(pllm_outputs_len, outputs);
    EXPECT(len > 0 || !q->engine_freed,
           "a poll of a queue without an engine returned empty instead of an error");
    EXPECT(len > 0 || timeout_ms >= 0, "a poll without a timeout returned empty");
    w->hash = mix(w->hash, checksum_of_batch(w, outputs));
    if (!program.racing) w->hash = mix(w->hash, (uint64_t)len);
    check_batch(w, q, outputs);
    if (one_in(w, 4)) keep(w, (kept_object){.kind = OUTPUTS, .as.outputs = outputs});
    else CALL(pllm_outputs_free, outputs);
    return len;
}

// True if an output must arrive, so that an unlimited timeout is safe.
static bool must_receive_output(const queue_slot *q) {
    if (program.racing || !q->queue) return false;
    // The oracle expects the lost output, which does not come.
    if (mutation == last_output_is_lost || mutation == sample_is_lost) return false;
    const engine_slot *e = engine_numbered(q->engine);
    return q->engine_freed || (e && e->started && oracle_expects_outputs(q->number));
}

void poll_queue(worker *w) {
    static const int64_t unlimited[] = {-1, INT64_MIN, INT64_MAX, 1ll << 40};
    queue_slot *q = any_live_queue(w);
    int64_t timeout_ms = one_in(w, 16) ? 1 + below(w, 2) : 0;
    if (one_in(w, 4) && must_receive_output(q)) timeout_ms = unlimited[below(w, COUNT(unlimited))];
    int64_t len = poll_and_check(w, q, timeout_ms);
    // A poll with a very long timeout returns only with outputs.
    EXPECT(len != 0 || timeout_ms < 1000, "a poll returned empty before its timeout");
}

static bool is_readable(int fd) {
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    return poll(&entry, 1, 0) == 1 && entry.revents & POLLIN;
}

static void check_descriptor(worker *w, queue_slot *q, int fd) {
    uint64_t value;
    bool readable = is_readable(fd) != (mutation == descriptor_is_wrongly_readable);
    if (readable && one_in(w, 4))
        q->counter_was_read = read(fd, &value, sizeof value) == sizeof value;
    const engine_slot *e = engine_numbered(q->engine);
    bool counter_was_read = q->counter_was_read, is_started = e && e->started;
    pllm_outputs *outputs = NULL;
    int32_t code = TRY(pllm_queue_poll, q->queue, 0, &outputs);
    bool has_outputs = code || CALL(pllm_outputs_len, outputs) > 0;
    EXPECT(counter_was_read || !readable || has_outputs,
           "the event descriptor was readable, and a poll returned no outputs");
    EXPECT(counter_was_read || readable || !has_outputs || is_started,
           "the event descriptor was not readable, and a poll returned outputs");
    if (code) return;
    w->hash = mix(w->hash, checksum_of_batch(w, outputs));
    check_batch(w, q, outputs);
    CALL(pllm_outputs_free, outputs);
}

void event_descriptor(worker *w) {
    queue_slot *q = any_live_queue(w);
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_queue_get_event_fd, q->queue, out ? &out->fd : NULL);
    check_out_parameter(out, code, sizeof out->fd);
    EXPECT(!code == (q->queue && out), "get_event_fd: code %d", code);
    if (code) return;
    EXPECT(out->fd > 2, "the event descriptor is %d", out->fd);
    if (!program.racing) check_descriptor(w, q, out->fd);
}

static void drain(worker *w, queue_slot *q) {
    for (unsigned polls = 0; poll_and_check(w, q, polls % 2 ? -1 : 0) != CLOSED; polls++)
        EXPECT(polls < 1000, "a queue of a freed engine never returns PLLM_E_CLOSED");
    oracle_check_ended(q->number);
}

void free_queue_slot(worker *w, queue_slot *q) {
    if (!q->queue) return;
    if (q->engine_freed && !one_in(w, 4)) drain(w, q);
    oracle_queue_freed(q->number);
    CALL(pllm_queue_free, (pllm_queue *)(uintptr_t)q->queue);
    q->queue = NULL;
}

void free_queue(worker *w) {
    if (one_in(w, 8)) CALL(pllm_queue_free, NULL);
    if (w->index) free_queue_slot(w, &queues_of_racer(w->index)[below(w, QUEUES_OF_RACER)]);
    else free_queue_slot(w, &program.queues[below(w, QUEUES)]);
}
