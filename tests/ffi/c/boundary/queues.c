// Queues: which outputs they receive, back-pressure, and freeing.
#include "boundary.h"

#include <pthread.h>

enum { TOKENS = 60 };

static void outputs_go_to_the_named_queue(void) {
    enum { QUEUES = 3, EACH = 2 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queues[QUEUES];
    generation generations[QUEUES][EACH], own_generation;
    for (unsigned q = 0; q < QUEUES; q++) {
        queues[q] = new_queue(engine, UINT64_MAX);
        for (unsigned i = 0; i < EACH; i++)
            add_prompt(engine, queues[q], q + i, TOKENS, &generations[q][i]);
    }
    add_prompt(engine, NULL, 5, TOKENS, &own_generation);
    step_to_the_end(engine);
    CHECK(is_complete(&own_generation, 5, TOKENS));
    for (unsigned q = 0; q < QUEUES; q++) {
        for (unsigned i = 0; i < EACH; i++)
            CHECK(generations[q][i].outputs == 0);  // not in an earlier queue
        CHECK(take_outputs(queues[q], 0) == EACH * TOKENS && take_outputs(queues[q], 0) == 0);
        for (unsigned i = 0; i < EACH; i++) CHECK(is_complete(&generations[q][i], q + i, TOKENS));
    }
    for (unsigned q = 0; q < QUEUES; q++) pllm_queue_free(queues[q]);
    pllm_engine_free(engine);
}

static void freeing_the_queue_of_an_engine_has_no_effect(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a;
    add_prompt(engine, NULL, 1, TOKENS, &a);
    pllm_queue_free((pllm_queue *)pllm_engine_queue(engine));
    step_to_the_end(engine);
    CHECK(is_complete(&a, 1, TOKENS));
    pllm_engine_free(engine);
}

static void foreign_queues_and_zero_capacity_are_refused(void) {
    pllm_engine *engine = open_engine(model_dir), *other = open_engine(golden_dir);
    pllm_queue *foreign_queue = new_queue(other, 8), *none = foreign_queue;
    generation a = {0};
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine",
          try_add_prompt(engine, foreign_queue, 0, 1, &a));
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine",
          try_add_prompt(engine, pllm_engine_queue(other), 0, 1, &a));
    pllm_engine_free(other);
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine",
          try_add_prompt(engine, foreign_queue, 0, 1, &a));
    pllm_queue_free(foreign_queue);
    FAILS(PLLM_E_INVALID_ARGUMENT, "capacity is 0", pllm_queue_create(engine, 0, &none));
    CHECK(none == foreign_queue && a.id == 0);
    FAILS(PLLM_E_INVALID_ARGUMENT, "NULL", pllm_queue_create(engine, 1, NULL));
    FAILS(PLLM_E_INVALID_ARGUMENT, "NULL", pllm_queue_create(NULL, 1, &none));
    pllm_engine_free(engine);
}

// ---- slow readers ----

// A step starts only if the queue is below its capacity, and adds at most one output per request.
static int64_t take_within_capacity(const pllm_queue *queue, int64_t capacity, int64_t requests) {
    int64_t count = take_outputs(queue, -1);
    CHECK(count < capacity + requests);
    return count;
}

static void slow_reader_pauses_only_its_requests_and_loses_no_output(void) {
    enum { CAPACITY = 4, SLOW = 3, FAST = 3 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *slow = new_queue(engine, CAPACITY), *fast = new_queue(engine, UINT64_MAX);
    generation slow_generations[SLOW], fast_generations[FAST];
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < SLOW; i++) add_prompt(engine, slow, i, TOKENS, &slow_generations[i]);
    while (stats_of(engine).paused < SLOW) sleep_ms(1);
    for (unsigned i = 0; i < FAST; i++) add_prompt(engine, fast, i, TOKENS, &fast_generations[i]);
    for (unsigned i = 0; i < FAST; i++) {
        while (!fast_generations[i].ends) take_outputs(fast, -1);
        CHECK(is_complete(&fast_generations[i], i, TOKENS));
    }
    CHECK(slow_generations[0].outputs == 0 && stats_of(engine).paused == SLOW);
    for (unsigned i = 0; i < SLOW; i++) {
        while (!slow_generations[i].ends) take_within_capacity(slow, CAPACITY, SLOW);
        CHECK(is_complete(&slow_generations[i], i, TOKENS));
    }
    pllm_queue_free(slow);
    pllm_queue_free(fast);
    pllm_engine_free(engine);
}

static void own_queue_of_an_engine_pauses_at_its_capacity(void) {
    enum { CAPACITY = 2, REQUESTS = 2 };
    pllm_engine_options options = options_for(model_dir);
    options.queue_capacity = CAPACITY;
    pllm_engine *engine = NULL;
    OK(pllm_engine_create(&options, &engine));
    generation generations[REQUESTS];
    for (unsigned i = 0; i < REQUESTS; i++) add_prompt(engine, NULL, i, TOKENS, &generations[i]);
    pllm_step step = {.struct_size = sizeof step};
    for (int i = 0; i < 50; i++) OK(pllm_engine_step(engine, &step));
    CHECK(step.unfinished == REQUESTS && step.paused == REQUESTS && step.sequences == 0);
    CHECK(take_within_capacity(pllm_engine_queue(engine), CAPACITY, REQUESTS) >= CAPACITY);
    step_to_the_end(engine);
    for (unsigned i = 0; i < REQUESTS; i++) CHECK(is_complete(&generations[i], i, TOKENS));
    pllm_engine_free(engine);
}

// ---- freed queues ----

static void freeing_a_queue_aborts_only_its_requests(void) {
    enum { ABORTED = 4, OTHERS = 4 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *freed_queue = new_queue(engine, 2), *kept_queue = new_queue(engine, UINT64_MAX);
    generation aborted[ABORTED], others[OTHERS];
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < ABORTED; i++) add_prompt(engine, freed_queue, i, TOKENS, &aborted[i]);
    for (unsigned i = 0; i < OTHERS; i++) add_prompt(engine, kept_queue, i, TOKENS, &others[i]);
    take_outputs(freed_queue, -1);
    pllm_queue_free(freed_queue);
    for (unsigned i = 0; i < OTHERS; i++) {
        while (!others[i].ends) take_outputs(kept_queue, -1);
        CHECK(is_complete(&others[i], i, TOKENS));
    }
    wait_until_idle(engine);
    CHECK(stats_of(engine).finished_abort == ABORTED &&
          stats_of(engine).finished_length == OTHERS + 1);
    for (unsigned i = 0; i < ABORTED; i++)
        FAILS(PLLM_E_NOT_FOUND, "unknown or has ended", pllm_engine_abort(engine, aborted[i].id));
    pllm_queue_free(kept_queue);
    pllm_engine_free(engine);
}

static void queue_outlives_its_engine_and_returns_every_last_output(void) {
    enum { REQUESTS = 4 };
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, UINT64_MAX), *unread = new_queue(engine, 1);
    generation generations[REQUESTS], unread_generation;
    pllm_step step = {.struct_size = sizeof step};
    add_prompt(engine, queue, 0, 2, &generations[0]);
    for (unsigned i = 1; i < REQUESTS - 1; i++)
        add_prompt(engine, queue, i, TOKENS, &generations[i]);
    for (int i = 0; i < 10; i++) OK(pllm_engine_step(engine, &step));
    add_prompt(engine, queue, 3, TOKENS, &generations[3]);  // not yet seen by a step
    add_prompt(engine, unread, 4, TOKENS, &unread_generation);
    pllm_engine_free(engine);
    while (take_outputs(queue, -1) >= 0) continue;
    for (unsigned i = 0; i < REQUESTS; i++) {
        CHECK(generations[i].ends == 1 && is_prefix(&generations[i], i, TOKENS));
        CHECK(generations[i].finish_reason == (i == 0 ? PLLM_FINISH_LENGTH : PLLM_FINISH_ABORT));
    }
    CHECK(generations[0].tokens_len == 2 && generations[1].tokens_len == 10 &&
          generations[3].tokens_len == 0);
    for (int i = 0; i < 3; i++)
        FAILS(PLLM_E_CLOSED, "freed", pllm_queue_poll(queue, 1000, &(pllm_outputs *){NULL}));
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
    for (int64_t count = 0; count >= 0; count = take_outputs(r->queue, -1)) {
        r->outputs += count;
        atomic_store(&r->polls, true);
    }
    return NULL;
}

// In some rounds the engine is freed before the threads block, in most rounds after.
static void blocked_poll_returns_when_the_engine_is_freed(void) {
    enum { READERS = 8 };
    for (int round = 0; round < 20; round++) {
        pllm_engine *engine = open_engine(model_dir);
        static reader readers[READERS];
        static generation generations[READERS];
        pthread_t threads[READERS];
        for (int i = 0; i < READERS; i++) {
            readers[i] = (reader){.queue = new_queue(engine, 1)};
            if (i % 2) add_prompt(engine, readers[i].queue, 0, TOKENS, &generations[i]);
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

const test queues_tests[] = {
    TEST(outputs_go_to_the_named_queue),
    TEST(foreign_queues_and_zero_capacity_are_refused),
    TEST(freeing_the_queue_of_an_engine_has_no_effect),
    TEST(slow_reader_pauses_only_its_requests_and_loses_no_output),
    TEST(own_queue_of_an_engine_pauses_at_its_capacity),
    TEST(freeing_a_queue_aborts_only_its_requests),
    TEST(queue_outlives_its_engine_and_returns_every_last_output),
    TEST(blocked_poll_returns_when_the_engine_is_freed),
    {0},
};
