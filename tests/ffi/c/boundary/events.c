// Waiting for outputs: event descriptors with poll(2) and epoll(7), and the blocking poll.
#include "boundary.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/resource.h>

enum { TOKENS = 40 };

static bool readable(int fd) {
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    return poll(&entry, 1, 0) == 1 && entry.revents == POLLIN;
}

// As an event loop does that knows eventfds only.
static void read_it(int fd) {
    uint64_t count;
    if (read(fd, &count, sizeof count) < 0) CHECK(!readable(fd));
}

static void a_descriptor_is_readable_while_outputs_wait(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, UINT64_MAX);
    pllm_step step = {.struct_size = sizeof step};
    answer a, b;
    int fd = event_fd(queue), own = event_fd(pllm_engine_queue(engine));
    CHECK(fd != own && event_fd(queue) == fd);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) && (fcntl(fd, F_GETFL) & O_NONBLOCK));
    ask(engine, queue, 0, TOKENS, &a);
    CHECK(!readable(fd));
    while (!a.ends) {
        OK(pllm_engine_step(engine, &step));
        CHECK(readable(fd) && readable(fd) && !readable(own));
        CHECK(take(queue, 0) == 1 && !readable(fd));
        CHECK(take(queue, 0) == 0 && !readable(fd));
    }
    // Asked for when outputs wait already; and after the engine, when a poll answers at once.
    pllm_queue *late = new_queue(engine, UINT64_MAX);
    ask(engine, late, 0, 3, &b);
    OK(pllm_engine_step(engine, &step));
    CHECK(readable(event_fd(late)));
    pllm_engine_free(engine);
    CHECK(readable(fd) && take(queue, 0) == -1 && readable(fd));
    CHECK(take(late, 0) == 2 && readable(event_fd(late)) && take(late, 0) == -1);
    pllm_queue_free(queue);
    pllm_queue_free(late);
}

// A host may read the descriptor before it polls, at every turn.
static void reading_the_descriptor_loses_nothing(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 3);
    answer a, b;
    int fd = event_fd(queue);
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    OK(pllm_engine_start(engine));
    ask(engine, queue, 0, TOKENS, &a);
    while (!a.ends && CHECK(poll(&entry, 1, 10000) == 1)) {
        read_it(fd);
        take(queue, 0);
    }
    CHECK(is_whole(&a, 0, TOKENS));
    // The end of the engine is told as well: first the abort, then that it is closed.
    ask(engine, queue, 0, TOKENS, &b);
    while (!b.outputs) take(queue, -1);
    pllm_engine_free(engine);
    int64_t taken = 0;
    while (taken >= 0 && CHECK(poll(&entry, 1, 1000) == 1)) {
        read_it(fd);
        taken = take(queue, 0);
    }
    CHECK(b.ends == 1 && taken == -1);
    pllm_queue_free(queue);
}

// ---- epoll -------------------------------------------------------------------------------------------------------------

enum { STREAMS = 100 };

typedef struct {
    pllm_queue *queue;
    answer answer;
} stream;

static void one_loop_serves_a_hundred_queues(uint32_t mode) {
    static stream streams[STREAMS];
    pllm_engine *engine = open_engine(model_dir);
    int loop = epoll_create1(EPOLL_CLOEXEC);
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < STREAMS; i++) {
        streams[i].queue = new_queue(engine, 2);
        ask(engine, streams[i].queue, i, TOKENS, &streams[i].answer);
        struct epoll_event interest = {.events = EPOLLIN | mode, .data.ptr = &streams[i]};
        CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, event_fd(streams[i].queue), &interest) == 0);
    }
    for (unsigned ended = 0; ended < STREAMS;) {
        struct epoll_event events[16];
        int ready = epoll_wait(loop, events, COUNT(events), 10000);
        if (!CHECK(ready > 0)) break;
        for (int i = 0; i < ready; i++) {
            stream *s = events[i].data.ptr;
            int64_t taken = take(s->queue, 0);
            CHECK(taken > 0 || mode == EPOLLET);
            ended += taken > 0 && s->answer.ends;
        }
    }
    for (unsigned i = 0; i < STREAMS; i++) {
        CHECK(is_whole(&streams[i].answer, i, TOKENS));
        pllm_queue_free(streams[i].queue);
    }
    close(loop);
    pllm_engine_free(engine);
}

static void a_level_triggered_loop_gets_every_output(void) { one_loop_serves_a_hundred_queues(0); }

static void an_edge_triggered_loop_gets_every_output(void) { one_loop_serves_a_hundred_queues(EPOLLET); }

// ---- no descriptors ----------------------------------------------------------------------------------------------------

static void without_descriptors_the_engine_goes_on(void) {
    pllm_engine *engine = open_engine(model_dir), *none = NULL;
    pllm_queue *queue = new_queue(engine, UINT64_MAX);
    struct rlimit limit, nothing;
    answer a;
    int32_t fd = -77;
    undisturbed(0, TOKENS);
    getrlimit(RLIMIT_NOFILE, &limit);
    nothing = limit;
    nothing.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &nothing) == 0);
    FAILS(PLLM_E_CAPACITY, "ulimit", pllm_queue_get_event_fd(queue, &fd));
    pllm_engine_options options = options_for(model_dir);
    FAILS(PLLM_E_IO, "config.json", pllm_engine_create(&options, &none));
    CHECK(fd == -77 && none == NULL);
    OK(pllm_engine_start(engine));
    ask(engine, queue, 0, TOKENS, &a);
    while (!a.ends) take(queue, -1);
    CHECK(is_whole(&a, 0, TOKENS));
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(event_fd(queue) >= 0);
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

// ---- the blocking poll -------------------------------------------------------------------------------------------------

static void a_poll_ends_empty_when_time_runs_out(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 1);
    OK(pllm_engine_start(engine));
    for (int64_t timeout = 1; timeout <= 256; timeout *= 4) {
        double start = now();
        CHECK(take(queue, timeout) == 0);
        double waited = (now() - start) * 1000;
        CHECK(waited >= (double)timeout * 0.99 && waited < (double)timeout + 5000);  // never early; late as the machine is busy
    }
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

enum { SLEEPERS = 8 };

typedef struct {
    const pllm_queue *queue;
    atomic_uint outputs;
} sleepers;

static void *sleep_until_an_output_comes(void *argument) {
    sleepers *s = argument;
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(s->queue, -1, &outputs));
    CHECK(pllm_outputs_len(outputs) > 0);
    atomic_fetch_add(&s->outputs, (unsigned)pllm_outputs_len(outputs));
    pllm_outputs_free(outputs);
    return NULL;
}

// Several threads sleep on one queue, and each wakes for an output of its own.
static void polls_that_sleep_wake_when_outputs_come(void) {
    pllm_engine *engine = open_engine(model_dir);
    sleepers s = {.queue = pllm_engine_queue(engine)};
    pthread_t threads[SLEEPERS];
    answer a[SLEEPERS];
    OK(pllm_engine_start(engine));
    for (int i = 0; i < SLEEPERS; i++) CHECK(pthread_create(&threads[i], NULL, sleep_until_an_output_comes, &s) == 0);
    for (unsigned i = 0; i < SLEEPERS; i++) {
        ask(engine, NULL, i, 1, &a[i]);
        while (atomic_load(&s.outputs) <= i) sleep_ms(1);
    }
    for (int i = 0; i < SLEEPERS; i++) pthread_join(threads[i], NULL);
    CHECK(s.outputs == SLEEPERS);
    pllm_engine_free(engine);
}

const test_case event_cases[] = {
    CASE(a_descriptor_is_readable_while_outputs_wait),
    CASE(reading_the_descriptor_loses_nothing),
    CASE(a_level_triggered_loop_gets_every_output),
    CASE(an_edge_triggered_loop_gets_every_output),
    CASE(without_descriptors_the_engine_goes_on),
    CASE(a_poll_ends_empty_when_time_runs_out),
    CASE(polls_that_sleep_wake_when_outputs_come),
    {0},
};
