// The end of an engine: every request must end, and nothing may stay in use.
#include "program.h"

typedef struct {
    worker *w;
    const engine_slot *e;
} engine_context;

static void abort_id(void *context, uint64_t id) {
    engine_context *a = context;
    worker *w = a->w;
    int32_t code = TRY(pllm_engine_abort, a->e->engine, id);
    EXPECT(code == 0 || code == PLLM_E_NOT_FOUND, "abort failed with %d", code);
}

static void poll_all(worker *w, engine_slot *e) {
    poll_and_check(w, &e->own, 0);
    for (int i = 0; i < QUEUES; i++)
        if (program.queues[i].queue && program.queues[i].engine == e->number)
            poll_and_check(w, &program.queues[i], 0);
}

static bool any_queue_expects_outputs(const engine_slot *e) {
    bool expects = oracle_expects_outputs(e->own.number);
    for (int i = 0; i < QUEUES; i++)
        expects |= program.queues[i].queue && program.queues[i].engine == e->number &&
                   oracle_expects_outputs(program.queues[i].number);
    return expects;
}

static void check_idle(worker *w, engine_slot *e) {
    pllm_stats s = {.struct_size = sizeof s};
    EXPECT(TRY(pllm_engine_get_stats, e->engine, &s) == 0, "stats failed");
    if (mutation == block_leaks) s.blocks_used++, s.blocks_free--;
    if (mutation == idle_sequence_leaks) s.idle++;
    EXPECT(s.swapped == 0 && s.swap_blocks_used == 0,
           "no sequence is unfinished or kept, and swap blocks are used");
    EXPECT(s.blocks_used == 0 && s.waiting == 0 && s.running == 0 && s.idle == 0,
           "no sequence is unfinished or kept, and blocks_used is %llu, waiting %llu, running "
           "%llu, idle %llu",
           LLU(s.blocks_used), LLU(s.waiting), LLU(s.running), LLU(s.idle));
    check_stats(e, &s);
    uint64_t ended = ended_of(&s);
    totals sum = oracle_totals(e->number);
    EXPECT(ended >= sum.runs && ended <= sum.runs + sum.uncertain,
           "%llu sequences must end and %llu may end, %llu have ended", LLU(sum.runs),
           LLU(sum.uncertain), LLU(ended));
    oracle_check_ended(e->own.number);
    for (int i = 0; i < QUEUES; i++)
        if (program.queues[i].queue && program.queues[i].engine == e->number)
            oracle_check_ended(program.queues[i].number);
}

static void free_kept_sequence(void *context, uint64_t id) {
    engine_context *a = context;
    free_sequence_of(a->w, a->e, id);
}

// Steps until every request has ended, and aborts some. Then frees all kept sequences and pins.
static void finish_engine(worker *w, engine_slot *e) {
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    unsigned max_rounds = below(w, 64);
    stop_unconditionally(w, e);
    for (unsigned round = 0; step.unfinished || any_queue_expects_outputs(e); round++) {
        EXPECT(round < 2000, "a request did not end in 2000 steps");
        if (round == max_rounds)
            oracle_for_each_unended(e->number, abort_id, &(engine_context){w, e});
        EXPECT(TRY(pllm_engine_step, e->engine, &step) == 0, "step failed");
        poll_all(w, e);
        // The loop would otherwise wait for the lost output until its limit.
        if ((mutation == last_output_is_lost || mutation == sample_is_lost) && step.unfinished == 0)
            break;
    }
    oracle_for_each_sequence(e->number, free_kept_sequence, &(engine_context){w, e});
    unpin_all(w, e);
    EXPECT(TRY(pllm_engine_step, e->engine, &step) == 0 && step.unfinished == 0,
           "a freed sequence runs");
    check_idle(w, e);
}

void free_engine_slot(worker *w, engine_slot *e) {
    if (!e->engine) return;
    if (below(w, 4) != 3) finish_engine(w, e);
    oracle_queue_freed(e->own.number);
    CALL(pllm_engine_free, e->engine);
    for (int i = 0; i < QUEUES; i++)
        if (program.queues[i].engine == e->number) program.queues[i].engine_freed = true;
    *e = (engine_slot){0};
}

void free_engine(worker *w) {
    if (one_in(w, 2)) CALL(pllm_engine_free, NULL);
    else free_engine_slot(w, &program.engines[below(w, ENGINES)]);
}
