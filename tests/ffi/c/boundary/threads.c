// Many threads on one engine, with and without the engine's own thread.
#include "boundary.h"

#include <pthread.h>
#include <sched.h>

enum { TOKENS = 60 };

static void prepare_references(void) {
    for (unsigned q = 0; q < PROMPTS; q++) reference(q, TOKENS);
}

static void start_all(pthread_t *threads, size_t count, void *(*run)(void *), void *argument) {
    for (size_t i = 0; i < count; i++) CHECK(pthread_create(&threads[i], NULL, run, argument) == 0);
}

static void join_all(pthread_t *threads, size_t count) {
    for (size_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static bool is_either(int32_t code, int32_t a, int32_t b) { return code == a || code == b; }

// ---- many threads ----

enum { THREADS = 64, REQUESTS_PER_THREAD = 9 };

typedef struct {
    const pllm_engine *engine;
    atomic_uint aborts, completes;
} thread_group;

static void check_engine_calls(const pllm_engine *engine) {
    pllm_model_info info = {.struct_size = sizeof info};
    pllm_tokens *tokens = NULL;
    pllm_stats stats = stats_of(engine);
    CHECK(stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks_total);
    OK(pllm_engine_get_model_info(engine, &info));
    OK(pllm_engine_tokenize(engine, "What does a cow say?", PLLM_NUL_TERMINATED, 0, &tokens));
    CHECK(pllm_tokens_len(tokens) > 0);
    pllm_tokens_free(tokens);
}

static void generate_and_check(thread_group *c, pllm_queue *queue, unsigned i) {
    uint32_t tokens = 1 + i * 5 % TOKENS;
    generation a;
    add_prompt(c->engine, queue, i, tokens, &a);
    check_engine_calls(c->engine);
    // The request may have ended already.
    if (i % 3 == 0)
        CHECK(is_either(code_of(pllm_engine_abort(c->engine, a.id)), 0, PLLM_E_NOT_FOUND));
    while (!a.ends) take_outputs(queue, -1);
    CHECK(take_outputs(queue, 0) == 0 && a.ends == 1 && is_prefix(&a, i, TOKENS));
    CHECK(a.finish_reason == PLLM_FINISH_ABORT ||
          (a.finish_reason == PLLM_FINISH_LENGTH && a.tokens_len == tokens));
    atomic_fetch_add(a.finish_reason == PLLM_FINISH_ABORT ? &c->aborts : &c->completes, 1);
}

static void *run_thread(void *argument) {
    thread_group *c = argument;
    pllm_queue *queue = new_queue(c->engine, 3);
    for (unsigned i = 0; i < REQUESTS_PER_THREAD; i++) generate_and_check(c, queue, i);
    pllm_queue_free(queue);
    return NULL;
}

static void sixty_four_threads_share_one_engine(void) {
    prepare_references();
    pllm_engine *engine = open_engine(model_dir);
    thread_group c = {.engine = engine};
    pthread_t threads[THREADS];
    OK(pllm_engine_start(engine));
    start_all(threads, THREADS, run_thread, &c);
    join_all(threads, THREADS);
    OK(pllm_engine_stop(engine));
    pllm_stats s = stats_of(engine);
    CHECK(s.finished_abort == c.aborts && s.finished_length == c.completes &&
          c.aborts + c.completes == THREADS * REQUESTS_PER_THREAD);
    CHECK(s.waiting == 0 && s.running == 0 && s.blocks_used == 0 &&
          s.finished_stop + s.finished_error == 0);
    pllm_engine_free(engine);
}

// ---- start and stop ----

static void started_engine_refuses_step_and_start_with_busy(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_stop(engine));  // allowed if the engine was not started
    for (int i = 0; i < 200; i++) {
        OK(pllm_engine_start(engine));
        FAILS(PLLM_E_BUSY, "one thread at a time", pllm_engine_step(engine, &step));
        FAILS(PLLM_E_BUSY, "", pllm_engine_start(engine));
        OK(pllm_engine_stop(engine));
        OK(pllm_engine_stop(engine));
        OK(pllm_engine_step(engine, &step));
    }
    pllm_engine_free(engine);
}

static void stop_keeps_requests_and_steps_continue_them(void) {
    prepare_references();
    pllm_engine *engine = open_engine(model_dir);
    generation generations[PROMPTS];
    for (unsigned i = 0; i < PROMPTS; i++) add_prompt(engine, NULL, i, TOKENS, &generations[i]);
    pllm_step step = {.struct_size = sizeof step};
    // The engine's own thread and the host alternate, and no request ends early.
    for (int round = 0; round < 5; round++) {
        OK(pllm_engine_start(engine));
        take_outputs(pllm_engine_queue(engine), -1);
        OK(pllm_engine_stop(engine));
        OK(pllm_engine_step(engine, &step));
    }
    step_to_the_end(engine);
    for (unsigned i = 0; i < PROMPTS; i++) CHECK(is_complete(&generations[i], i, TOKENS));
    pllm_engine_free(engine);
}

typedef struct {
    pllm_engine *engine;
    atomic_bool stopped;
    atomic_uint starts, steps, busy, generated;
} race;

// CPU time that the calls may take to collide.
enum { RACE_CPU_SECONDS = 60 };

// Whether all calls have collided. The operating system decides how often each of them wins.
static bool calls_have_collided(race *t) {
    return atomic_load(&t->starts) > 10 && atomic_load(&t->steps) > 10 && atomic_load(&t->busy) > 0;
}

static bool may_still_collide(race *t) {
    return !calls_have_collided(t) && cpu_seconds() < RACE_CPU_SECONDS;
}

static void *start_and_stop_until_stopped(void *argument) {
    race *t = argument;
    while (!atomic_load(&t->stopped)) {
        int32_t code = code_of(pllm_engine_start(t->engine));
        CHECK(is_either(code, 0, PLLM_E_BUSY));
        atomic_fetch_add(code ? &t->busy : &t->starts, 1);
        sched_yield();
        OK(pllm_engine_stop(t->engine));
        sleep_ms(0);  // On one core the other threads would never find the engine stopped.
    }
    return NULL;
}

static void *step_until_stopped(void *argument) {
    race *t = argument;
    while (!atomic_load(&t->stopped)) {
        pllm_step step = {.struct_size = sizeof step};
        int32_t code = code_of(pllm_engine_step(t->engine, &step));
        CHECK(is_either(code, 0, PLLM_E_BUSY));
        atomic_fetch_add(code ? &t->busy : &t->steps, 1);
        sched_yield();
    }
    return NULL;
}

static void *generate_during_race(void *argument) {
    race *t = argument;
    pllm_queue *queue = new_queue(t->engine, 5);
    for (unsigned i = 0; i < 4 * PROMPTS || may_still_collide(t); i++) {
        generation a;
        add_prompt(t->engine, queue, i, TOKENS, &a);
        while (!a.ends) take_outputs(queue, 1);
        CHECK(is_complete(&a, i, TOKENS));
        atomic_fetch_add(&t->generated, 1);
    }
    pllm_queue_free(queue);
    return NULL;
}

static void start_and_stop_may_race_with_steps_and_requests(void) {
    prepare_references();
    race t = {.engine = open_engine(model_dir)};
    pthread_t starting[3], stepping[2], generating[4];
    start_all(starting, COUNT(starting), start_and_stop_until_stopped, &t);
    start_all(stepping, COUNT(stepping), step_until_stopped, &t);
    start_all(generating, COUNT(generating), generate_during_race, &t);
    join_all(generating, COUNT(generating));
    atomic_store(&t.stopped, true);
    join_all(starting, COUNT(starting));
    join_all(stepping, COUNT(stepping));
    if (!CHECK(calls_have_collided(&t)))
        printf("    %u starts, %u steps, busy %u times\n", t.starts, t.steps, t.busy);
    OK(pllm_engine_stop(t.engine));
    CHECK(t.generated >= COUNT(generating) * 4 * PROMPTS);
    CHECK(stats_of(t.engine).finished_length == t.generated && stats_of(t.engine).blocks_used == 0);
    pllm_engine_free(t.engine);
}

// ---- idle engines ----

// An engine that polls uses CPU time in every half second. On a busy machine, the threads may need
// more time to finish their work before they sleep.
static bool uses_no_cpu(void) {
    double used = 1;
    for (int round = 0; round < 20 && used >= 0.005; round++) {
        double before = cpu_seconds();
        sleep_ms(500);
        used = cpu_seconds() - before;
    }
    return used < 0.005;
}

static void idle_engine_uses_no_cpu(void) {
    pllm_engine_options options = options_for(model_dir);
    options.threads = 2;
    pllm_engine *engine = NULL;
    OK(pllm_engine_create(&options, &engine));
    OK(pllm_engine_start(engine));
    generation a;
    add_prompt(engine, NULL, 0, TOKENS, &a);
    while (!a.ends) take_outputs(pllm_engine_queue(engine), -1);
    CHECK(uses_no_cpu());
    // The same holds if all readers are slow.
    pllm_queue *slow = new_queue(engine, 2);
    add_prompt(engine, slow, 0, TOKENS, &a);
    while (stats_of(engine).paused == 0) sleep_ms(1);
    CHECK(uses_no_cpu());
    while (!a.ends) take_outputs(slow, -1);
    CHECK(a.tokens_len == TOKENS);
    pllm_queue_free(slow);
    pllm_engine_free(engine);
}

// ---- abandoned requests ----

enum { CLIENTS = 500, AT_ONCE = 25 };

static uint64_t random_state = 0x9E3779B97F4A7C15;

static unsigned random_below(unsigned n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)(random_state >> 33) % n;
}

typedef struct {
    pllm_queue *queue;
    generation generation;
    unsigned prompt_index;
    enum { WAITS, ABORTS, LEAVES } behaviour;
    bool done;
} client;

static void start_client(client *c, const pllm_engine *engine) {
    c->done = false;
    c->prompt_index = random_below(PROMPTS);
    c->behaviour = random_below(2) ? WAITS : random_below(2) ? ABORTS : LEAVES;
    c->queue = new_queue(engine, 1 + random_below(8));
    add_prompt(engine, c->queue, c->prompt_index, TOKENS, &c->generation);
}

static void end_client(client *c) {
    pllm_queue_free(c->queue);
    c->done = true;
}

// Polls for a client, or aborts or abandons its request at a random moment.
static void advance_client(client *c, const pllm_engine *engine) {
    bool act_now = random_below(10) == 0;
    if (c->behaviour == LEAVES && act_now) {
        end_client(c);
        return;
    }
    if (c->behaviour == ABORTS && act_now)
        CHECK(is_either(code_of(pllm_engine_abort(engine, c->generation.id)), 0, PLLM_E_NOT_FOUND));
    take_outputs(c->queue, 0);
    if (!c->generation.ends) return;
    CHECK(c->generation.finish_reason == PLLM_FINISH_ABORT
              ? c->behaviour == ABORTS
              : is_complete(&c->generation, c->prompt_index, TOKENS));
    CHECK(is_prefix(&c->generation, c->prompt_index, TOKENS));
    end_client(c);
}

static void abandoned_requests_do_not_affect_others(void) {
    prepare_references();
    pllm_engine *engine = open_engine(model_dir);
    static client clients[AT_ONCE];
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < AT_ONCE; i++) start_client(&clients[i], engine);
    for (unsigned started_clients = AT_ONCE, ended_clients = 0; ended_clients < CLIENTS;) {
        client *c = &clients[random_below(AT_ONCE)];
        if (c->done) continue;
        advance_client(c, engine);
        if (!c->done) continue;
        ended_clients++;
        if (started_clients < CLIENTS) started_clients++, start_client(c, engine);
    }
    wait_until_idle(engine);
    pllm_stats s = stats_of(engine);
    CHECK(s.finished_length + s.finished_abort == CLIENTS + 1 && s.finished_abort > 50 &&
          s.finished_length > 200);
    CHECK(s.blocks_used == 0 && s.paused == 0);
    pllm_engine_free(engine);
}

const test threads_tests[] = {
    TEST(sixty_four_threads_share_one_engine),
    TEST(started_engine_refuses_step_and_start_with_busy),
    TEST(stop_keeps_requests_and_steps_continue_them),
    TEST(start_and_stop_may_race_with_steps_and_requests),
    TEST(idle_engine_uses_no_cpu),
    TEST(abandoned_requests_do_not_affect_others),
    {0},
};
