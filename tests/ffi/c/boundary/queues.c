// Queues: who gets what, who waits for whom, and what a queue that goes takes with it.
#include "boundary.h"

#include <pthread.h>

enum { TOKENS = 60 };

static void outputs_go_to_the_queue_that_was_named(void) {
    enum { QUEUES = 3, EACH = 2 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queues[QUEUES];
    answer answers[QUEUES][EACH], own;
    for (unsigned q = 0; q < QUEUES; q++) {
        queues[q] = new_queue(engine, UINT64_MAX);
        for (unsigned i = 0; i < EACH; i++) ask(engine, queues[q], q + i, TOKENS, &answers[q][i]);
    }
    ask(engine, NULL, 5, TOKENS, &own);
    step_to_the_end(engine);
    CHECK(is_whole(&own, 5, TOKENS));
    for (unsigned q = 0; q < QUEUES; q++) {
        for (unsigned i = 0; i < EACH; i++) CHECK(answers[q][i].outputs == 0);  // not in the queues before
        CHECK(take(queues[q], 0) == EACH * TOKENS && take(queues[q], 0) == 0);
        for (unsigned i = 0; i < EACH; i++) CHECK(is_whole(&answers[q][i], q + i, TOKENS));
    }
    for (unsigned q = 0; q < QUEUES; q++) pllm_queue_free(queues[q]);
    pllm_engine_free(engine);
}

static void freeing_the_engine_s_own_queue_changes_nothing(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a;
    ask(engine, NULL, 1, TOKENS, &a);
    pllm_queue_free((pllm_queue *)pllm_engine_queue(engine));
    step_to_the_end(engine);
    CHECK(is_whole(&a, 1, TOKENS));
    pllm_engine_free(engine);
}

static void a_queue_of_another_engine_and_one_without_room_are_refused(void) {
    pllm_engine *engine = open_engine(model_dir), *other = open_engine(golden_dir);
    pllm_queue *theirs = new_queue(other, 8), *none = theirs;
    answer a = {0};
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", try_ask(engine, theirs, 0, 1, &a));
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", try_ask(engine, pllm_engine_queue(other), 0, 1, &a));
    pllm_engine_free(other);
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", try_ask(engine, theirs, 0, 1, &a));
    pllm_queue_free(theirs);
    FAILS(PLLM_E_INVALID_ARGUMENT, "capacity is 0", pllm_queue_create(engine, 0, &none));
    CHECK(none == theirs && a.id == 0);
    FAILS(PLLM_E_INVALID_ARGUMENT, "NULL", pllm_queue_create(engine, 1, NULL));
    FAILS(PLLM_E_INVALID_ARGUMENT, "NULL", pllm_queue_create(NULL, 1, &none));
    pllm_engine_free(engine);
}

// ---- slow readers ------------------------------------------------------------------------------------------------------

// A step starts only below the capacity, and adds at most one output for each request.
static int64_t take_within(const pllm_queue *queue, int64_t capacity, int64_t requests) {
    int64_t taken = take(queue, -1);
    CHECK(taken < capacity + requests);
    return taken;
}

static void a_slow_reader_pauses_alone_and_loses_nothing(void) {
    enum { CAPACITY = 4, SLOW = 3, FAST = 3 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *slow = new_queue(engine, CAPACITY), *fast = new_queue(engine, UINT64_MAX);
    answer slows[SLOW], fasts[FAST];
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < SLOW; i++) ask(engine, slow, i, TOKENS, &slows[i]);
    while (stats_of(engine).paused < SLOW) sleep_ms(1);
    for (unsigned i = 0; i < FAST; i++) ask(engine, fast, i, TOKENS, &fasts[i]);
    for (unsigned i = 0; i < FAST; i++) {
        while (!fasts[i].ends) take(fast, -1);
        CHECK(is_whole(&fasts[i], i, TOKENS));
    }
    CHECK(slows[0].outputs == 0 && stats_of(engine).paused == SLOW);
    for (unsigned i = 0; i < SLOW; i++) {
        while (!slows[i].ends) take_within(slow, CAPACITY, SLOW);
        CHECK(is_whole(&slows[i], i, TOKENS));
    }
    pllm_queue_free(slow);
    pllm_queue_free(fast);
    pllm_engine_free(engine);
}

static void the_engine_s_own_queue_pauses_at_its_capacity_too(void) {
    enum { CAPACITY = 2, REQUESTS = 2 };
    pllm_engine_options options = options_for(model_dir);
    options.queue_capacity = CAPACITY;
    pllm_engine *engine = NULL;
    OK(pllm_engine_create(&options, &engine));
    answer answers[REQUESTS];
    for (unsigned i = 0; i < REQUESTS; i++) ask(engine, NULL, i, TOKENS, &answers[i]);
    pllm_step step = {.struct_size = sizeof step};
    for (int i = 0; i < 50; i++) OK(pllm_engine_step(engine, &step));
    CHECK(step.unfinished == REQUESTS && step.paused == REQUESTS && step.sequences == 0);
    CHECK(take_within(pllm_engine_queue(engine), CAPACITY, REQUESTS) >= CAPACITY);
    step_to_the_end(engine);
    for (unsigned i = 0; i < REQUESTS; i++) CHECK(is_whole(&answers[i], i, TOKENS));
    pllm_engine_free(engine);
}

// ---- queues that go ----------------------------------------------------------------------------------------------------

static void freeing_a_queue_aborts_what_writes_to_it_and_nobody_else(void) {
    enum { ORPHANS = 4, OTHERS = 4 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *goes = new_queue(engine, 2), *stays = new_queue(engine, UINT64_MAX);
    answer orphans[ORPHANS], others[OTHERS];
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < ORPHANS; i++) ask(engine, goes, i, TOKENS, &orphans[i]);
    for (unsigned i = 0; i < OTHERS; i++) ask(engine, stays, i, TOKENS, &others[i]);
    take(goes, -1);
    pllm_queue_free(goes);
    for (unsigned i = 0; i < OTHERS; i++) {
        while (!others[i].ends) take(stays, -1);
        CHECK(is_whole(&others[i], i, TOKENS));
    }
    wait_until_idle(engine);
    CHECK(stats_of(engine).finished_abort == ORPHANS && stats_of(engine).finished_length == OTHERS + 1);
    for (unsigned i = 0; i < ORPHANS; i++) FAILS(PLLM_E_NOT_FOUND, "unknown or has ended", pllm_engine_abort(engine, orphans[i].id));
    pllm_queue_free(stays);
    pllm_engine_free(engine);
}

static void a_queue_outlives_its_engine_and_tells_every_end(void) {
    enum { REQUESTS = 4 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, UINT64_MAX), *unread = new_queue(engine, 1);
    answer answers[REQUESTS], never;
    pllm_step step = {.struct_size = sizeof step};
    ask(engine, queue, 0, 2, &answers[0]);
    for (unsigned i = 1; i < REQUESTS - 1; i++) ask(engine, queue, i, TOKENS, &answers[i]);
    for (int i = 0; i < 10; i++) OK(pllm_engine_step(engine, &step));
    ask(engine, queue, 3, TOKENS, &answers[3]);  // no step has seen it
    ask(engine, unread, 4, TOKENS, &never);
    pllm_engine_free(engine);
    while (take(queue, -1) >= 0) continue;
    for (unsigned i = 0; i < REQUESTS; i++) {
        CHECK(answers[i].ends == 1 && is_beginning(&answers[i], i, TOKENS));
        CHECK(answers[i].finish_reason == (i == 0 ? PLLM_FINISH_LENGTH : PLLM_FINISH_ABORT));
    }
    CHECK(answers[0].tokens_len == 2 && answers[1].tokens_len == 10 && answers[3].tokens_len == 0);
    for (int i = 0; i < 3; i++) FAILS(PLLM_E_CLOSED, "freed", pllm_queue_poll(queue, 1000, &(pllm_outputs *){NULL}));
    pllm_queue_free(queue);
    pllm_queue_free(unread);
}

typedef struct {
    pllm_queue *queue;
    int64_t outputs;
    atomic_bool polls;
} reader;

static void *read_to_the_close(void *argument) {
    reader *r = argument;
    for (int64_t taken = 0; taken >= 0; taken = take(r->queue, -1)) {
        r->outputs += taken;
        atomic_store(&r->polls, true);
    }
    return NULL;
}

// For some of these the engine goes before their thread sleeps, for most of them after.
static void a_poll_that_sleeps_wakes_when_the_engine_goes(void) {
    enum { READERS = 8 };
    for (int round = 0; round < 20; round++) {
        pllm_engine *engine = open_engine(model_dir);
        static reader readers[READERS];
        static answer answers[READERS];
        pthread_t threads[READERS];
        for (int i = 0; i < READERS; i++) {
            readers[i] = (reader){.queue = new_queue(engine, 1)};
            if (i % 2) ask(engine, readers[i].queue, 0, TOKENS, &answers[i]);
            CHECK(pthread_create(&threads[i], NULL, read_to_the_close, &readers[i]) == 0);
        }
        for (int i = 0; i < READERS; i++)
            while (!atomic_load(&readers[i].polls)) sleep_ms(0);
        pllm_engine_free(engine);
        for (int i = 0; i < READERS; i++) {
            pthread_join(threads[i], NULL);
            CHECK(readers[i].outputs == i % 2);
            pllm_queue_free(readers[i].queue);
        }
    }
}

const test_case queue_cases[] = {
    CASE(outputs_go_to_the_queue_that_was_named),
    CASE(a_queue_of_another_engine_and_one_without_room_are_refused),
    CASE(freeing_the_engine_s_own_queue_changes_nothing),
    CASE(a_slow_reader_pauses_alone_and_loses_nothing),
    CASE(the_engine_s_own_queue_pauses_at_its_capacity_too),
    CASE(freeing_a_queue_aborts_what_writes_to_it_and_nobody_else),
    CASE(a_queue_outlives_its_engine_and_tells_every_end),
    CASE(a_poll_that_sleeps_wakes_when_the_engine_goes),
    {0},
};
