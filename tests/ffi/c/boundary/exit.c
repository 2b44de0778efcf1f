// Ends of a process whose engine is running.
#include "boundary.h"

#include <pthread.h>

static pllm_engine *busy_engine;
static generation endless_generations[4];

#if defined(__SANITIZE_ADDRESS__)
// Memory that an engine still holds when the process exits is not a leak.
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return busy_engine != NULL; }
#endif

static void keep_an_engine_busy(void) {
    busy_engine = open_engine(model_dir);
    OK(pllm_engine_start(busy_engine));
    for (unsigned i = 0; i < COUNT(endless_generations); i++)
        add_prompt(busy_engine, NULL, i, 500, &endless_generations[i]);
    take_outputs(pllm_engine_queue(busy_engine), -1);
}

static void calls_exit(void) {
    keep_an_engine_busy();
    exit(0);
}

static void returns_from_main(void) { keep_an_engine_busy(); }

static void exits_without_cleanup(void) {
    keep_an_engine_busy();
    _exit(0);
}

static void *poll_and_exit(void *unused) {
    (void)unused;
    take_outputs(pllm_engine_queue(busy_engine), -1);
    exit(0);
}

static void exits_from_a_thread_while_main_polls(void) {
    keep_an_engine_busy();
    pllm_queue *unused_queue = new_queue(busy_engine, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, poll_and_exit, NULL);
    take_outputs(unused_queue, -1);
}

static void ends_main_and_exits_from_the_last_thread(void) {
    keep_an_engine_busy();
    pthread_t thread;
    pthread_create(&thread, NULL, poll_and_exit, NULL);
    pthread_exit(NULL);
}

static void free_busy_engine(void) { pllm_engine_free(busy_engine); }

static void frees_the_engine_at_exit(void) {
    keep_an_engine_busy();
    atexit(free_busy_engine);
    exit(0);
}

static void use_busy_engine(void) {
    generation a;
    add_prompt(busy_engine, NULL, 0, 500, &a);
    take_outputs(pllm_engine_queue(busy_engine), 1000);
}

static void uses_the_engine_at_exit(void) {
    keep_an_engine_busy();
    atexit(use_busy_engine);
    exit(0);
}

static void process_may_exit_with_a_busy_engine(void) {
    const char *const names[] = {"calls_exit",
                                 "returns_from_main",
                                 "exits_without_cleanup",
                                 "exits_from_a_thread_while_main_polls",
                                 "ends_main_and_exits_from_the_last_thread",
                                 "frees_the_engine_at_exit",
                                 "uses_the_engine_at_exit"};
    for (int round = 0; round < 5; round++)
        for (size_t i = 0; i < COUNT(names); i++) {
            exit_result end = run_alone(names[i]);
            if (!CHECK(end.status == 0 && end.output[0] == 0))
                printf("    %s: wait status %x\n%s", names[i], (unsigned)end.status, end.output);
        }
}

const test exit_tests[] = {
    TEST(process_may_exit_with_a_busy_engine),
    HIDDEN(calls_exit),
    HIDDEN(returns_from_main),
    HIDDEN(exits_without_cleanup),
    HIDDEN(exits_from_a_thread_while_main_polls),
    HIDDEN(ends_main_and_exits_from_the_last_thread),
    HIDDEN(frees_the_engine_at_exit),
    HIDDEN(uses_the_engine_at_exit),
    {0},
};
