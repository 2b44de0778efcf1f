// Several threads on one engine, and polls that wait.
#include "abi_test.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

// Bounds a failing test. A busy machine may take long.
enum { LAST_RESORT_SECONDS = 600 };

typedef struct {
    const pllm_engine *engine;
    atomic_int *stop;
    atomic_uint steps, busy, failures;
} stepper;

static void *step_until_stopped(void *argument) {
    stepper *s = argument;
    while (!atomic_load(s->stop)) {
        pllm_step step = {.struct_size = sizeof step};
        pllm_error *error = pllm_engine_step(s->engine, &step);
        if (!error) atomic_fetch_add(&s->steps, 1);
        else if (pllm_error_code(error) == PLLM_E_BUSY && strlen(pllm_error_message(error)) > 9)
            atomic_fetch_add(&s->busy, 1);
        else atomic_fetch_add(&s->failures, 1);
        pllm_error_free(error);
        // A host does some work between two steps. Without it the other thread would never find the
        // engine idle.
        nanosleep(&(struct timespec){0, 20000}, NULL);
    }
    return NULL;
}

// Keeps enough requests running that the two threads collide.
static uint64_t keep_engine_busy(const pllm_engine *engine, uint64_t unfinished) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.max_tokens = 100;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    for (uint64_t id; unfinished < 16; unfinished++)
        OK(pllm_engine_add_request(engine, &request, &id));
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 5, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++)
        unfinished -= pllm_outputs_get(outputs, i)->finish_reason != 0;
    pllm_outputs_free(outputs);
    return unfinished;
}

static int steps_have_collided(const stepper *a, const stepper *b) {
    return a->steps > 20 && b->steps > 20 && a->busy + b->busy > 0;
}

static void concurrent_steps_return_busy(void) {
    pllm_engine *engine = open_engine(golden_dir);
    atomic_int stop = 0;
    stepper steppers[2] = {{.engine = engine, .stop = &stop}, {.engine = engine, .stop = &stop}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, step_until_stopped, &steppers[i]);
    uint64_t unfinished = 0;
    double end = now() + LAST_RESORT_SECONDS;
    while (!steps_have_collided(&steppers[0], &steppers[1]) && now() < end)
        unfinished = keep_engine_busy(engine, unfinished);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECK(steps_have_collided(&steppers[0], &steppers[1]));
    CHECK(steppers[0].failures + steppers[1].failures == 0);
    pllm_engine_free(engine);  // with unfinished requests
}

enum { WORKERS = 4, REQUESTS_PER_WORKER = 150, REQUESTS = WORKERS * REQUESTS_PER_WORKER };

typedef struct {
    const pllm_engine *engine;
    atomic_uint ends[REQUESTS], tokens[REQUESTS], reported_tokens[REQUESTS];
    atomic_uint ended, failures;
    atomic_int stop;
} workload;

typedef struct {
    workload *workload;
    uint32_t first;
} worker;

static void count_output(workload *c, const pllm_output *o) {
    if (o->user_data >= REQUESTS) {
        atomic_fetch_add(&c->failures, 1);
        return;
    }
    atomic_fetch_add(&c->tokens[o->user_data], (unsigned)o->tokens_len);
    if (o->finish_reason == PLLM_FINISH_NONE) return;
    if (o->finish_reason > PLLM_FINISH_ABORT) atomic_fetch_add(&c->failures, 1);
    atomic_store(&c->reported_tokens[o->user_data], (unsigned)o->generated_tokens);
    atomic_fetch_add(&c->ends[o->user_data], 1);
    atomic_fetch_add(&c->ended, 1);
}

static void poll_and_count(workload *c, int64_t timeout_ms) {
    pllm_outputs *outputs = NULL;
    pllm_error *error = pllm_queue_poll(pllm_engine_queue(c->engine), timeout_ms, &outputs);
    if (error) atomic_fetch_add(&c->failures, 1);
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++)
        count_output(c, pllm_outputs_get(outputs, i));
    pllm_error_free(error);
    pllm_outputs_free(outputs);
}

// Adds its share of requests, aborts every third, reads the statistics and polls in between.
static void *add_abort_and_poll(void *argument) {
    worker *w = argument;
    workload *c = w->workload;
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    for (uint32_t i = 0; i < REQUESTS_PER_WORKER; i++) {
        sampling.max_tokens = 1 + i % 17;
        request.user_data = w->first + i;
        uint64_t id = 0;
        pllm_error *error = pllm_engine_add_request(c->engine, &request, &id);
        if (error) atomic_fetch_add(&c->failures, 1);
        pllm_error_free(error);
        if (i % 3 == 0) {
            if (i % 2) sched_yield();
            error = pllm_engine_abort(c->engine, id);
            // The request may have ended already.
            if (error && pllm_error_code(error) != PLLM_E_NOT_FOUND)
                atomic_fetch_add(&c->failures, 1);
            pllm_error_free(error);
        }
        pllm_stats stats = {.struct_size = sizeof stats};
        error = pllm_engine_get_stats(c->engine, &stats);
        if (error ||
            stats.blocks_used + stats.blocks_cached + stats.blocks_free != stats.blocks_total)
            atomic_fetch_add(&c->failures, 1);
        pllm_error_free(error);
        if (i % 5 == 0) poll_and_count(c, 0);
    }
    double end = now() + LAST_RESORT_SECONDS;
    while (atomic_load(&c->ended) < REQUESTS && now() < end) poll_and_count(c, 10);
    return NULL;
}

static void every_request_of_four_threads_ends_exactly_once(void) {
    static workload c;
    pllm_engine *engine = open_engine(golden_dir);
    c.engine = engine;
    worker workers[WORKERS];
    pthread_t threads[WORKERS], stepping;
    stepper s = {.engine = engine, .stop = &c.stop};
    pthread_create(&stepping, NULL, step_until_stopped, &s);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i] = (worker){&c, i * REQUESTS_PER_WORKER};
        pthread_create(&threads[i], NULL, add_abort_and_poll, &workers[i]);
    }
    for (int i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
    atomic_store(&c.stop, 1);
    pthread_join(stepping, NULL);
    poll_and_count(&c, 0);
    CHECK(c.failures == 0 && s.failures == 0 && s.busy == 0);
    CHECK(c.ended == REQUESTS);
    for (int i = 0; i < REQUESTS; i++) CHECK(c.ends[i] == 1 && c.tokens[i] == c.reported_tokens[i]);
    pllm_stats stats = stats_of(engine);
    CHECK(stats.finished_stop + stats.finished_length + stats.finished_abort == REQUESTS &&
          stats.finished_error == 0);
    CHECK(stats.finished_abort > 0 && stats.finished_length + stats.finished_stop > 0 &&
          is_idle(engine));
    pllm_engine_free(engine);
}

static void poll_returns_empty_after_its_timeout(const pllm_engine *engine) {
    pllm_outputs *outputs = NULL;
    poll_and_count(&(workload){.engine = engine}, 0);  // empties the queue
    double start = now();
    OK(pllm_queue_poll(pllm_engine_queue(engine), 80, &outputs));
    double waited = now() - start;
    CHECK(outputs != NULL && pllm_outputs_len(outputs) == 0 &&
          pllm_outputs_get(outputs, 0) == NULL);
    CHECK(waited >= 0.075);
    pllm_outputs_free(outputs);
}

static void *generate_after_100_ms(void *engine) {
    sleep_ms(100);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.max_tokens = 1;
    uint64_t id = 0;
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_add_request(engine, &request, &id));
    OK(pllm_engine_step(engine, &step));
    return NULL;
}

static void poll_waits_for_outputs_of_another_thread(const pllm_engine *engine) {
    const int64_t timeouts[] = {600000, -1, INT64_MIN, INT64_MAX};
    for (size_t i = 0; i < COUNT(timeouts); i++) {
        pthread_t thread;
        pllm_outputs *outputs = NULL;
        double start = now();
        pthread_create(&thread, NULL, generate_after_100_ms, (void *)(uintptr_t)engine);
        OK(pllm_queue_poll(pllm_engine_queue(engine), timeouts[i], &outputs));
        CHECK(pllm_outputs_len(outputs) == 1 &&
              pllm_outputs_get(outputs, 0)->finish_reason == PLLM_FINISH_LENGTH);
        CHECK(now() - start > 0.09);
        pthread_join(thread, NULL);
        pllm_outputs_free(outputs);
    }
}

const test threads_tests[] = {
    ALONE(concurrent_steps_return_busy),
    ALONE(every_request_of_four_threads_ends_exactly_once),
    WITH_GOLDEN(poll_returns_empty_after_its_timeout),
    WITH_GOLDEN(poll_waits_for_outputs_of_another_thread),
    {0},
};
