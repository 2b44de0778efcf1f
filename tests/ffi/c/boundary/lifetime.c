// Engines come and go, side by side, over fork(2), and with the process.
#include "boundary.h"

#include <pthread.h>
#include <sys/wait.h>

// ---- coming and going --------------------------------------------------------------------------------------------------

// One life of an engine; every second one ends in the middle of its work.
static void live_and_die(int i) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 4);
    answer a, b;
    CHECK(event_fd(queue) >= 0 && event_fd(pllm_engine_queue(engine)) >= 0);
    OK(pllm_engine_start(engine));
    ask(engine, queue, 0, 3, &a);
    ask(engine, NULL, 1, 100, &b);
    while (i % 2 && !a.ends) take(queue, -1);
    pllm_engine_free(engine);
    while (take(queue, 0) > 0) continue;
    CHECK(a.ends == 1);
    pllm_queue_free(queue);
}

// A thread that was joined may still be listed for a moment.
static bool threads_come_down_to(int expected) {
    for (double end = now() + 5; threads() > expected && now() < end;) sleep_ms(1);
    return threads() <= expected;
}

static void two_hundred_engines_leave_nothing_behind(void) {
    for (int i = 0; i < 40; i++) live_and_die(i);
    int threads_before = threads(), descriptors_before = descriptors();
    long resident = resident_kib();
    for (int i = 40; i < 200; i++) live_and_die(i);
    CHECK(threads_come_down_to(threads_before));
    CHECK(descriptors() == descriptors_before);
    // The weights alone are 5 MiB: one engine kept of the 160, or 26 KiB of each, would be seen.
    CHECK(SANITIZED || resident_kib() - resident < 4 << 10);
}

enum { ROUNDS = 5, TOKENS = 40 };

static void *ask_every_question(void *engine) {
    for (unsigned i = 0; i < ROUNDS * QUESTIONS; i++) {
        answer a;
        ask(engine, NULL, i, TOKENS, &a);
        step_to_the_end(engine);
        CHECK(is_whole(&a, i, TOKENS));
    }
    return NULL;
}

static void two_engines_at_once_answer_as_alone(void) {
    pllm_engine *engines[2];
    pthread_t asking[2];
    for (unsigned q = 0; q < QUESTIONS; q++) undisturbed(q, TOKENS);
    for (int i = 0; i < 2; i++) engines[i] = open_engine(model_dir);
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&asking[i], NULL, ask_every_question, engines[i]) == 0);
    for (int i = 0; i < 2; i++) pthread_join(asking[i], NULL);
    for (int i = 0; i < 2; i++) CHECK(stats_of(engines[i]).finished_length == ROUNDS * QUESTIONS);
    for (int i = 0; i < 2; i++) pllm_engine_free(engines[i]);
}

// ---- fork --------------------------------------------------------------------------------------------------------------

#define REFUSED(call) FAILS(PLLM_E_UNSUPPORTED, "fork", call)

static void every_call_is_refused(pllm_engine *engine, pllm_queue *queue, uint64_t live) {
    const pllm_queue *own = pllm_engine_queue(engine);
    pllm_model_info info = {.struct_size = sizeof info};
    pllm_stats stats = {.struct_size = sizeof stats};
    pllm_step step = {.struct_size = sizeof step};
    pllm_sequence_info sequence = {.struct_size = sizeof sequence};
    pllm_pin pin;
    uint64_t child = 0;
    answer a;
    pllm_pin_init(&pin, sizeof pin);
    pin.prompt = "Hello";
    REFUSED(try_ask(engine, NULL, 0, 1, &a));
    REFUSED(try_ask(engine, queue, 0, 1, &a));
    REFUSED(pllm_engine_abort(engine, live));
    REFUSED(pllm_sequence_fork(engine, live, NULL, &child));
    REFUSED(pllm_sequence_append(engine, live, &(uint32_t){5}, 1));
    REFUSED(pllm_sequence_rewind(engine, live, 1));
    REFUSED(pllm_sequence_resume(engine, live, NULL));
    REFUSED(pllm_sequence_free(engine, live));
    REFUSED(pllm_sequence_export(engine, live, NULL));
    REFUSED(pllm_sequence_export(engine, live, queue));
    REFUSED(pllm_sequence_import(engine, (const uint8_t *)"state", 4, NULL, &child));
    REFUSED(pllm_sequence_get_info(engine, live, &sequence));
    REFUSED(pllm_prefix_pin(engine, &pin, &child));
    REFUSED(pllm_prefix_unpin(engine, 1));
    REFUSED(pllm_engine_get_model_info(engine, &info));
    REFUSED(pllm_engine_get_stats(engine, &stats));
    REFUSED(pllm_engine_step(engine, &step));
    REFUSED(pllm_engine_start(engine));
    REFUSED(pllm_engine_stop(engine));
    REFUSED(pllm_queue_create(engine, 1, &(pllm_queue *){NULL}));
    REFUSED(pllm_queue_poll(own, -1, &(pllm_outputs *){NULL}));
    REFUSED(pllm_queue_poll(queue, -1, &(pllm_outputs *){NULL}));
    REFUSED(pllm_queue_get_event_fd(own, &(int32_t){0}));
    REFUSED(pllm_queue_get_event_fd(queue, &(int32_t){0}));
    REFUSED(pllm_engine_tokenize(engine, "a", 1, 0, &(pllm_tokens *){NULL}));
    REFUSED(pllm_engine_detokenize(engine, &(uint32_t){5}, 1, 0, &(pllm_bytes *){NULL}));
    REFUSED(pllm_engine_render_chat(engine, "[]", 2, &(pllm_bytes *){NULL}));
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

// A new engine serves in the child, also on a thread of its own.
static void a_new_engine_answers(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a;
    OK(pllm_engine_start(engine));
    ask(engine, NULL, 0, TOKENS, &a);
    while (!a.ends) take(pllm_engine_queue(engine), 1000);
    CHECK(is_whole(&a, 0, TOKENS));
    pllm_engine_free(engine);
}

typedef struct {
    const pllm_engine *engine;
    atomic_bool stop;
} hammer;

// So that forks meet locks that are held.
static void *call_all_the_time(void *argument) {
    hammer *h = argument;
    while (!atomic_load(&h->stop)) {
        pllm_queue *queue = NULL;
        OK(pllm_queue_create(h->engine, 1, &queue));
        stats_of(h->engine);
        take(queue, 0);
        pllm_queue_free(queue);
    }
    return NULL;
}

static void fork_and_look(pllm_engine *engine, pllm_queue *queue, uint64_t live) {
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);  // not inherited, and a deadlock is what this looks for
        every_call_is_refused(engine, queue, live);
        a_new_engine_answers();
        fflush(stdout);
        _exit(exit_code());
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (!CHECK(status == 0)) printf("    wait status of the child: %x\n", (unsigned)status);
}

static void a_forked_child_is_told_so_and_the_parent_goes_on(void) {
    enum { STREAMS = 6, LONG = 400, FORKS = 12 };
    if (SANITIZED) skip("the sanitizers' own allocator does not live through a fork of many threads");
    for (unsigned q = 0; q < STREAMS; q++) undisturbed(q, LONG);
    undisturbed(0, TOKENS);
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 8);  // so small that streams wait until somebody reads
    hammer h = {.engine = engine};
    pthread_t hammering;
    static answer answers[STREAMS];
    for (unsigned i = 0; i < STREAMS; i++) ask(engine, queue, i, LONG, &answers[i]);
    OK(pllm_engine_start(engine));
    CHECK(pthread_create(&hammering, NULL, call_all_the_time, &h) == 0);
    for (int i = 0; i < FORKS; i++) {
        take(queue, 1000);
        fork_and_look(engine, queue, answers[0].id);
    }
    CHECK(!answers[0].ends);  // all forks were in the middle of it
    for (unsigned i = 0; i < STREAMS; i++)
        while (!answers[i].ends) take(queue, -1);
    atomic_store(&h.stop, true);
    pthread_join(hammering, NULL);
    undisturbed(0, LONG);
    for (unsigned i = 0; i < STREAMS; i++) CHECK(is_whole(&answers[i], i, LONG));
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

// ---- the end of the process --------------------------------------------------------------------------------------------

static pllm_engine *busy;
static answer endless[4];

#if defined(__SANITIZE_ADDRESS__)
// What a process leaves in its engine when it ends is no leak.
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return busy != NULL; }
#endif

static void keep_an_engine_busy(void) {
    busy = open_engine(model_dir);
    OK(pllm_engine_start(busy));
    for (unsigned i = 0; i < COUNT(endless); i++) ask(busy, NULL, i, 500, &endless[i]);
    take(pllm_engine_queue(busy), -1);
}

static void exits(void) {
    keep_an_engine_busy();
    exit(0);
}

static void returns_from_main(void) { keep_an_engine_busy(); }

static void exits_at_once(void) {
    keep_an_engine_busy();
    _exit(0);
}

static void *poll_and_exit(void *unused) {
    (void)unused;
    take(pllm_engine_queue(busy), -1);
    exit(0);
}

static void exits_from_a_thread_while_main_polls(void) {
    keep_an_engine_busy();
    pllm_queue *never = new_queue(busy, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, poll_and_exit, NULL);
    take(never, -1);
}

static void ends_main_and_exits_from_the_last_thread(void) {
    keep_an_engine_busy();
    pthread_t thread;
    pthread_create(&thread, NULL, poll_and_exit, NULL);
    pthread_exit(NULL);
}

static void free_it(void) { pllm_engine_free(busy); }

static void frees_the_engine_at_exit(void) {
    keep_an_engine_busy();
    atexit(free_it);
    exit(0);
}

static void use_it(void) {
    answer a;
    ask(busy, NULL, 0, 500, &a);
    take(pllm_engine_queue(busy), 1000);
}

static void uses_the_engine_at_exit(void) {
    keep_an_engine_busy();
    atexit(use_it);
    exit(0);
}

static void a_process_may_end_with_a_busy_engine(void) {
    const char *const endings[] = {"exits", "returns_from_main", "exits_at_once", "exits_from_a_thread_while_main_polls",
                                   "ends_main_and_exits_from_the_last_thread", "frees_the_engine_at_exit", "uses_the_engine_at_exit"};
    for (int round = 0; round < 5; round++)
        for (size_t i = 0; i < COUNT(endings); i++) {
            ending end = run_alone(endings[i]);
            if (!CHECK(end.status == 0 && end.output[0] == 0))
                printf("    %s: wait status %x\n%s", endings[i], (unsigned)end.status, end.output);
        }
}

const test_case lifetime_cases[] = {
    CASE(two_hundred_engines_leave_nothing_behind),
    CASE(two_engines_at_once_answer_as_alone),
    CASE(a_forked_child_is_told_so_and_the_parent_goes_on),
    CASE(a_process_may_end_with_a_busy_engine),
    HIDDEN(exits),
    HIDDEN(returns_from_main),
    HIDDEN(exits_at_once),
    HIDDEN(exits_from_a_thread_while_main_polls),
    HIDDEN(ends_main_and_exits_from_the_last_thread),
    HIDDEN(frees_the_engine_at_exit),
    HIDDEN(uses_the_engine_at_exit),
    {0},
};
