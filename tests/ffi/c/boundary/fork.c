// fork(2) of a process with a running engine.
#include "boundary.h"

#include <pthread.h>
#include <sys/wait.h>

enum { TOKENS = 40 };

#define CHECK_REFUSED(call) FAILS(PLLM_E_UNSUPPORTED, "fork", call)

static void check_every_call_is_refused(pllm_engine *engine, pllm_queue *queue, uint64_t id) {
    const pllm_queue *own = pllm_engine_queue(engine);
    pllm_model_info info = {.struct_size = sizeof info};
    pllm_stats stats = {.struct_size = sizeof stats};
    pllm_step step = {.struct_size = sizeof step};
    pllm_sequence_info sequence = {.struct_size = sizeof sequence};
    pllm_pin pin;
    uint64_t child = 0;
    generation a;
    pllm_pin_init(&pin, sizeof pin);
    pin.prompt = "Hello";
    CHECK_REFUSED(try_add_prompt(engine, NULL, 0, 1, &a));
    CHECK_REFUSED(try_add_prompt(engine, queue, 0, 1, &a));
    CHECK_REFUSED(pllm_engine_abort(engine, id));
    CHECK_REFUSED(pllm_sequence_fork(engine, id, NULL, &child));
    CHECK_REFUSED(pllm_sequence_append(engine, id, &(uint32_t){5}, 1));
    CHECK_REFUSED(pllm_sequence_rewind(engine, id, 1));
    CHECK_REFUSED(pllm_sequence_resume(engine, id, NULL));
    CHECK_REFUSED(pllm_sequence_free(engine, id));
    CHECK_REFUSED(pllm_sequence_export(engine, id, NULL));
    CHECK_REFUSED(pllm_sequence_export(engine, id, queue));
    CHECK_REFUSED(pllm_sequence_import(engine, (const uint8_t *)"state", 4, NULL, &child));
    CHECK_REFUSED(pllm_sequence_get_info(engine, id, &sequence));
    CHECK_REFUSED(pllm_prefix_pin(engine, &pin, &child));
    CHECK_REFUSED(pllm_prefix_unpin(engine, 1));
    CHECK_REFUSED(pllm_engine_get_model_info(engine, &info));
    CHECK_REFUSED(pllm_engine_get_stats(engine, &stats));
    CHECK_REFUSED(pllm_engine_snapshot(engine, 1, 1, &(pllm_bytes *){NULL}));
    CHECK_REFUSED(pllm_engine_step(engine, &step));
    CHECK_REFUSED(pllm_engine_start(engine));
    CHECK_REFUSED(pllm_engine_stop(engine));
    CHECK_REFUSED(pllm_queue_create(engine, 1, &(pllm_queue *){NULL}));
    CHECK_REFUSED(pllm_queue_poll(own, -1, &(pllm_outputs *){NULL}));
    CHECK_REFUSED(pllm_queue_poll(queue, -1, &(pllm_outputs *){NULL}));
    CHECK_REFUSED(pllm_queue_get_event_fd(own, &(int32_t){0}));
    CHECK_REFUSED(pllm_queue_get_event_fd(queue, &(int32_t){0}));
    CHECK_REFUSED(pllm_engine_tokenize(engine, "a", 1, 0, &(pllm_tokens *){NULL}));
    CHECK_REFUSED(pllm_engine_detokenize(engine, &(uint32_t){5}, 1, 0, &(pllm_bytes *){NULL}));
    CHECK_REFUSED(pllm_engine_render_chat(engine, "[]", 2, &(pllm_bytes *){NULL}));
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

// A new engine works in the child, also with its own thread.
static void check_new_engine_works(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a;
    OK(pllm_engine_start(engine));
    add_prompt(engine, NULL, 0, TOKENS, &a);
    while (!a.ends) take_outputs(pllm_engine_queue(engine), 1000);
    CHECK(is_complete(&a, 0, TOKENS));
    pllm_engine_free(engine);
}

typedef struct {
    const pllm_engine *engine;
    atomic_bool stop;
} caller;

// Holds locks of the library often, so that a fork happens while one is held.
static void *call_until_stopped(void *argument) {
    caller *h = argument;
    while (!atomic_load(&h->stop)) {
        pllm_queue *queue = NULL;
        OK(pllm_queue_create(h->engine, 1, &queue));
        stats_of(h->engine);
        take_outputs(queue, 0);
        pllm_queue_free(queue);
    }
    return NULL;
}

static void fork_and_check(pllm_engine *engine, pllm_queue *queue, uint64_t id) {
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        check_every_call_is_refused(engine, queue, id);
        check_new_engine_works();
        fflush(stdout);
        _exit(exit_code());
    }
    const char *hang = child > 0 ? wait_for(child, &status) : "no child";
    if (!CHECK(!hang)) printf("    the child hangs: %s\n", hang);
    if (!CHECK(status == 0)) printf("    wait status of the child: %x\n", (unsigned)status);
}

static void forked_child_is_refused_and_its_parent_continues(void) {
    enum { REQUESTS = 6, LONG_TOKENS = 400, FORKS = 12 };
    if (SANITIZED) skip("the allocator of a sanitizer does not survive a fork with many threads");
    for (unsigned q = 0; q < REQUESTS; q++) reference(q, LONG_TOKENS);
    reference(0, TOKENS);
    pllm_engine *engine = open_engine(model_dir);
    // A small queue, so that requests pause until it is polled.
    pllm_queue *queue = new_queue(engine, 8);
    caller h = {.engine = engine};
    pthread_t calling;
    static generation generations[REQUESTS];
    for (unsigned i = 0; i < REQUESTS; i++)
        add_prompt(engine, queue, i, LONG_TOKENS, &generations[i]);
    OK(pllm_engine_start(engine));
    CHECK(pthread_create(&calling, NULL, call_until_stopped, &h) == 0);
    for (int i = 0; i < FORKS; i++) {
        take_outputs(queue, 1000);
        fork_and_check(engine, queue, generations[0].id);
    }
    CHECK(!generations[0].ends);  // every fork happened while requests were running
    for (unsigned i = 0; i < REQUESTS; i++)
        while (!generations[i].ends) take_outputs(queue, -1);
    atomic_store(&h.stop, true);
    pthread_join(calling, NULL);
    reference(0, LONG_TOKENS);
    for (unsigned i = 0; i < REQUESTS; i++) CHECK(is_complete(&generations[i], i, LONG_TOKENS));
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

const test fork_tests[] = {
    TEST(forked_child_is_refused_and_its_parent_continues),
    {0},
};
