// Many threads on one engine, the engine's own thread among them.
#include "boundary.h"

#include <pthread.h>
#include <sched.h>

enum { TOKENS = 60 };

static void know_the_answers(void) {
    for (unsigned q = 0; q < QUESTIONS; q++) undisturbed(q, TOKENS);
}

static void start_all(pthread_t *threads, size_t count, void *(*run)(void *), void *argument) {
    for (size_t i = 0; i < count; i++) CHECK(pthread_create(&threads[i], NULL, run, argument) == 0);
}

static void join_all(pthread_t *threads, size_t count) {
    for (size_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static bool one_of(int32_t code, int32_t a, int32_t b) { return code == a || code == b; }

// ---- a crowd -----------------------------------------------------------------------------------------------------------

enum { CROWD = 64, EACH = 9 };

typedef struct {
    const pllm_engine *engine;
    atomic_uint aborts, wholes;
} crowd;

static void look_around(const pllm_engine *engine) {
    pllm_model_info info = {.struct_size = sizeof info};
    pllm_tokens *tokens = NULL;
    pllm_stats stats = stats_of(engine);
    CHECK(stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks_total);
    OK(pllm_engine_get_model_info(engine, &info));
    OK(pllm_engine_tokenize(engine, "What does a cow say?", PLLM_NUL_TERMINATED, 0, &tokens));
    CHECK(pllm_tokens_len(tokens) > 0);
    pllm_tokens_free(tokens);
}

static void ask_and_read(crowd *c, pllm_queue *queue, unsigned i) {
    uint32_t tokens = 1 + i * 5 % TOKENS;
    answer a;
    ask(c->engine, queue, i, tokens, &a);
    look_around(c->engine);
    // It may have ended meanwhile.
    if (i % 3 == 0) CHECK(one_of(code_of(pllm_engine_abort(c->engine, a.id)), 0, PLLM_E_NOT_FOUND));
    while (!a.ends) take(queue, -1);
    CHECK(take(queue, 0) == 0 && a.ends == 1 && is_beginning(&a, i, TOKENS));
    CHECK(a.finish_reason == PLLM_FINISH_ABORT || (a.finish_reason == PLLM_FINISH_LENGTH && a.tokens_len == tokens));
    atomic_fetch_add(a.finish_reason == PLLM_FINISH_ABORT ? &c->aborts : &c->wholes, 1);
}

static void *be_one_of_many(void *argument) {
    crowd *c = argument;
    pllm_queue *queue = new_queue(c->engine, 3);
    for (unsigned i = 0; i < EACH; i++) ask_and_read(c, queue, i);
    pllm_queue_free(queue);
    return NULL;
}

static void sixty_four_threads_share_one_engine(void) {
    know_the_answers();
    pllm_engine *engine = open_engine(model_dir);
    crowd c = {.engine = engine};
    pthread_t threads[CROWD];
    OK(pllm_engine_start(engine));
    start_all(threads, CROWD, be_one_of_many, &c);
    join_all(threads, CROWD);
    OK(pllm_engine_stop(engine));
    pllm_stats s = stats_of(engine);
    CHECK(s.finished_abort == c.aborts && s.finished_length == c.wholes && c.aborts + c.wholes == CROWD * EACH);
    CHECK(s.waiting == 0 && s.running == 0 && s.blocks_used == 0 && s.finished_stop + s.finished_error == 0);
    pllm_engine_free(engine);
}

// ---- start and stop ----------------------------------------------------------------------------------------------------

static void an_engine_that_steps_itself_refuses_another_stepper(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_stop(engine));  // fine where it was not started
    for (int i = 0; i < 200; i++) {
        OK(pllm_engine_start(engine));
        FAILS(PLLM_E_BUSY, "one at a time", pllm_engine_step(engine, &step));
        FAILS(PLLM_E_BUSY, "", pllm_engine_start(engine));
        OK(pllm_engine_stop(engine));
        OK(pllm_engine_stop(engine));
        OK(pllm_engine_step(engine, &step));
    }
    pllm_engine_free(engine);
}

static void stop_keeps_requests_and_steps_go_on_with_them(void) {
    know_the_answers();
    pllm_engine *engine = open_engine(model_dir);
    answer answers[QUESTIONS];
    for (unsigned i = 0; i < QUESTIONS; i++) ask(engine, NULL, i, TOKENS, &answers[i]);
    pllm_step step = {.struct_size = sizeof step};
    // Their own thread and the host take turns, and neither ends them.
    for (int turn = 0; turn < 5; turn++) {
        OK(pllm_engine_start(engine));
        take(pllm_engine_queue(engine), -1);
        OK(pllm_engine_stop(engine));
        OK(pllm_engine_step(engine, &step));
    }
    step_to_the_end(engine);
    for (unsigned i = 0; i < QUESTIONS; i++) CHECK(is_whole(&answers[i], i, TOKENS));
    pllm_engine_free(engine);
}

typedef struct {
    pllm_engine *engine;
    atomic_bool over;
    atomic_uint starts, steps, busy, asked;
    double until;
} turmoil;

// Whether everything has come between everything else: who wins how often is the system's choice.
static bool has_raged(turmoil *t) {
    return atomic_load(&t->starts) > 10 && atomic_load(&t->steps) > 10 && atomic_load(&t->busy) > 0;
}

static void *start_and_stop(void *argument) {
    turmoil *t = argument;
    while (!atomic_load(&t->over)) {
        int32_t code = code_of(pllm_engine_start(t->engine));
        CHECK(one_of(code, 0, PLLM_E_BUSY));
        atomic_fetch_add(code ? &t->busy : &t->starts, 1);
        sched_yield();
        OK(pllm_engine_stop(t->engine));
        sleep_ms(0);  // On one core the others would never find it stopped.
    }
    return NULL;
}

static void *step_by_hand(void *argument) {
    turmoil *t = argument;
    while (!atomic_load(&t->over)) {
        pllm_step step = {.struct_size = sizeof step};
        int32_t code = code_of(pllm_engine_step(t->engine, &step));
        CHECK(one_of(code, 0, PLLM_E_BUSY));
        atomic_fetch_add(code ? &t->busy : &t->steps, 1);
        sched_yield();
    }
    return NULL;
}

static void *ask_in_the_turmoil(void *argument) {
    turmoil *t = argument;
    pllm_queue *queue = new_queue(t->engine, 5);
    for (unsigned i = 0; i < 4 * QUESTIONS || (!has_raged(t) && now() < t->until); i++) {
        answer a;
        ask(t->engine, queue, i, TOKENS, &a);
        while (!a.ends) take(queue, 1);
        CHECK(is_whole(&a, i, TOKENS));
        atomic_fetch_add(&t->asked, 1);
    }
    pllm_queue_free(queue);
    return NULL;
}

static void start_and_stop_may_race_with_everything(void) {
    know_the_answers();
    turmoil t = {.engine = open_engine(model_dir), .until = now() + 10};
    pthread_t starting[3], stepping[2], asking[4];
    start_all(starting, COUNT(starting), start_and_stop, &t);
    start_all(stepping, COUNT(stepping), step_by_hand, &t);
    start_all(asking, COUNT(asking), ask_in_the_turmoil, &t);
    join_all(asking, COUNT(asking));
    atomic_store(&t.over, true);
    join_all(starting, COUNT(starting));
    join_all(stepping, COUNT(stepping));
    if (!CHECK(has_raged(&t))) printf("    %u starts, %u steps, %u times busy\n", t.starts, t.steps, t.busy);
    OK(pllm_engine_stop(t.engine));
    CHECK(t.asked >= COUNT(asking) * 4 * QUESTIONS);
    CHECK(stats_of(t.engine).finished_length == t.asked && stats_of(t.engine).blocks_used == 0);
    pllm_engine_free(t.engine);
}

// ---- idling ------------------------------------------------------------------------------------------------------------

static double cpu_of_half_a_second(void) {
    double before = cpu_seconds();
    sleep_ms(500);
    return cpu_seconds() - before;
}

static void an_idle_engine_burns_no_cpu(void) {
    pllm_engine_options options = options_for(model_dir);
    options.threads = 2;
    pllm_engine *engine = NULL;
    OK(pllm_engine_create(&options, &engine));
    OK(pllm_engine_start(engine));
    answer a;
    ask(engine, NULL, 0, TOKENS, &a);
    while (!a.ends) take(pllm_engine_queue(engine), -1);
    CHECK(cpu_of_half_a_second() < 0.005);
    // Nor one whose readers are all slow.
    pllm_queue *slow = new_queue(engine, 2);
    ask(engine, slow, 0, TOKENS, &a);
    while (stats_of(engine).paused == 0) sleep_ms(1);
    CHECK(cpu_of_half_a_second() < 0.005);
    while (!a.ends) take(slow, -1);
    CHECK(a.tokens_len == TOKENS);
    pllm_queue_free(slow);
    pllm_engine_free(engine);
}

// ---- clients that vanish -----------------------------------------------------------------------------------------------

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
    answer answer;
    unsigned question;
    enum { STAYS, ABORTS, GOES } fate;
    bool done;
} client;

static void come(client *c, const pllm_engine *engine) {
    c->done = false;
    c->question = random_below(QUESTIONS);
    c->fate = random_below(2) ? STAYS : random_below(2) ? ABORTS : GOES;
    c->queue = new_queue(engine, 1 + random_below(8));
    ask(engine, c->queue, c->question, TOKENS, &c->answer);
}

static void leave(client *c) {
    pllm_queue_free(c->queue);
    c->done = true;
}

// Lets a client do something, or vanish. Its fate comes over it at any moment.
static void turn(client *c, const pllm_engine *engine) {
    bool now_or_never = random_below(10) == 0;
    if (c->fate == GOES && now_or_never) {
        leave(c);
        return;
    }
    if (c->fate == ABORTS && now_or_never) CHECK(one_of(code_of(pllm_engine_abort(engine, c->answer.id)), 0, PLLM_E_NOT_FOUND));
    take(c->queue, 0);
    if (!c->answer.ends) return;
    CHECK(c->answer.finish_reason == PLLM_FINISH_ABORT ? c->fate == ABORTS : is_whole(&c->answer, c->question, TOKENS));
    CHECK(is_beginning(&c->answer, c->question, TOKENS));
    leave(c);
}

static void clients_that_vanish_disturb_nobody(void) {
    know_the_answers();
    pllm_engine *engine = open_engine(model_dir);
    static client clients[AT_ONCE];
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < AT_ONCE; i++) come(&clients[i], engine);
    for (unsigned come_so_far = AT_ONCE, gone = 0; gone < CLIENTS;) {
        client *c = &clients[random_below(AT_ONCE)];
        if (c->done) continue;
        turn(c, engine);
        if (!c->done) continue;
        gone++;
        if (come_so_far < CLIENTS) come_so_far++, come(c, engine);
    }
    wait_until_idle(engine);
    pllm_stats s = stats_of(engine);
    CHECK(s.finished_length + s.finished_abort == CLIENTS + 1 && s.finished_abort > 50 && s.finished_length > 200);
    CHECK(s.blocks_used == 0 && s.paused == 0);
    pllm_engine_free(engine);
}

const test_case thread_cases[] = {
    CASE(sixty_four_threads_share_one_engine),
    CASE(an_engine_that_steps_itself_refuses_another_stepper),
    CASE(stop_keeps_requests_and_steps_go_on_with_them),
    CASE(start_and_stop_may_race_with_everything),
    CASE(an_idle_engine_burns_no_cpu),
    CASE(clients_that_vanish_disturb_nobody),
    {0},
};
