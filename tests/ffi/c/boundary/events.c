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

// Event loops that only support eventfd read the counter.
static void read_event_fd(int fd) {
    uint64_t count;
    if (read(fd, &count, sizeof count) < 0) CHECK(!readable(fd));
}

static void event_fd_is_readable_while_outputs_are_queued(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, UINT64_MAX);
    pllm_step step = {.struct_size = sizeof step};
    generation a, b;
    int fd = event_fd(queue), own_fd = event_fd(pllm_engine_queue(engine));
    CHECK(fd != own_fd && event_fd(queue) == fd);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) && (fcntl(fd, F_GETFL) & O_NONBLOCK));
    add_prompt(engine, queue, 0, TOKENS, &a);
    CHECK(!readable(fd));
    while (!a.ends) {
        OK(pllm_engine_step(engine, &step));
        CHECK(readable(fd) && readable(fd) && !readable(own_fd));
        CHECK(take_outputs(queue, 0) == 1 && !readable(fd));
        CHECK(take_outputs(queue, 0) == 0 && !readable(fd));
    }
    // An event descriptor that is created when outputs are already queued, and one whose engine is
    // freed.
    pllm_queue *late = new_queue(engine, UINT64_MAX);
    add_prompt(engine, late, 0, 3, &b);
    OK(pllm_engine_step(engine, &step));
    CHECK(readable(event_fd(late)));
    pllm_engine_free(engine);
    CHECK(readable(fd) && take_outputs(queue, 0) == -1 && readable(fd));
    CHECK(take_outputs(late, 0) == 2 && readable(event_fd(late)) && take_outputs(late, 0) == -1);
    pllm_queue_free(queue);
    pllm_queue_free(late);
}

// A host may read the descriptor before each poll.
static void reading_the_event_fd_loses_no_output(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 3);
    generation a, b;
    int fd = event_fd(queue);
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    OK(pllm_engine_start(engine));
    add_prompt(engine, queue, 0, TOKENS, &a);
    while (!a.ends && CHECK(poll(&entry, 1, -1) == 1)) {
        read_event_fd(fd);
        take_outputs(queue, 0);
    }
    CHECK(is_complete(&a, 0, TOKENS));
    // Freeing the engine signals the descriptor: for the abort, then for the closed queue.
    add_prompt(engine, queue, 0, TOKENS, &b);
    while (!b.outputs) take_outputs(queue, -1);
    pllm_engine_free(engine);
    int64_t output_count = 0;
    while (output_count >= 0 && CHECK(poll(&entry, 1, -1) == 1)) {
        read_event_fd(fd);
        output_count = take_outputs(queue, 0);
    }
    CHECK(b.ends == 1 && output_count == -1);
    pllm_queue_free(queue);
}

// ---- epoll ----

enum { REQUESTS = 100 };

typedef struct {
    pllm_queue *queue;
    generation generation;
} queue_reader;

static void serve_a_hundred_queues(uint32_t mode) {
    static queue_reader readers[REQUESTS];
    pllm_engine *engine = open_engine(model_dir);
    int loop = epoll_create1(EPOLL_CLOEXEC);
    OK(pllm_engine_start(engine));
    for (unsigned i = 0; i < REQUESTS; i++) {
        readers[i].queue = new_queue(engine, 2);
        add_prompt(engine, readers[i].queue, i, TOKENS, &readers[i].generation);
        struct epoll_event interest = {.events = EPOLLIN | mode, .data.ptr = &readers[i]};
        CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, event_fd(readers[i].queue), &interest) == 0);
    }
    for (unsigned ended = 0; ended < REQUESTS;) {
        struct epoll_event events[16];
        int ready = epoll_wait(loop, events, COUNT(events), -1);
        if (!CHECK(ready > 0)) break;
        for (int i = 0; i < ready; i++) {
            queue_reader *s = events[i].data.ptr;
            int64_t output_count = take_outputs(s->queue, 0);
            CHECK(output_count > 0 || mode == EPOLLET);
            ended += output_count > 0 && s->generation.ends;
        }
    }
    for (unsigned i = 0; i < REQUESTS; i++) {
        CHECK(is_complete(&readers[i].generation, i, TOKENS));
        pllm_queue_free(readers[i].queue);
    }
    close(loop);
    pllm_engine_free(engine);
}

static void level_triggered_epoll_gets_every_output(void) { serve_a_hundred_queues(0); }

static void edge_triggered_epoll_gets_every_output(void) { serve_a_hundred_queues(EPOLLET); }

// ---- no free descriptors ----

static void engine_runs_without_free_descriptors(void) {
    pllm_engine *engine = open_engine(model_dir), *none = NULL;
    pllm_queue *queue = new_queue(engine, UINT64_MAX);
    struct rlimit limit, nothing;
    generation a;
    int32_t fd = -77;
    reference(0, TOKENS);
    getrlimit(RLIMIT_NOFILE, &limit);
    nothing = limit;
    nothing.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &nothing) == 0);
    FAILS(PLLM_E_CAPACITY, "ulimit", pllm_queue_get_event_fd(queue, &fd));
    pllm_engine_options options = options_for(model_dir);
    FAILS(PLLM_E_IO, "config.json", pllm_engine_create(&options, &none));
    CHECK(fd == -77 && none == NULL);
    OK(pllm_engine_start(engine));
    add_prompt(engine, queue, 0, TOKENS, &a);
    while (!a.ends) take_outputs(queue, -1);
    CHECK(is_complete(&a, 0, TOKENS));
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(event_fd(queue) >= 0);
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

// ---- the blocking poll ----

static void poll_returns_empty_after_its_timeout(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 1);
    OK(pllm_engine_start(engine));
    for (int64_t timeout = 1; timeout <= 256; timeout *= 4) {
        double start = now();
        CHECK(take_outputs(queue, timeout) == 0);
        double waited = (now() - start) * 1000;
        CHECK(waited >= (double)timeout * 0.99);  // a busy machine may be late
    }
    pllm_queue_free(queue);
    pllm_engine_free(engine);
}

enum { BLOCKED_POLLS = 8 };

typedef struct {
    const pllm_queue *queue;
    atomic_uint outputs;
} blocked_polls;

static void *poll_until_an_output(void *argument) {
    blocked_polls *s = argument;
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(s->queue, -1, &outputs));
    CHECK(pllm_outputs_len(outputs) > 0);
    atomic_fetch_add(&s->outputs, (unsigned)pllm_outputs_len(outputs));
    pllm_outputs_free(outputs);
    return NULL;
}

// Several threads block on one queue. Each returns with an output of its own.
static void blocked_polls_return_one_output_each(void) {
    pllm_engine *engine = open_engine(model_dir);
    blocked_polls s = {.queue = pllm_engine_queue(engine)};
    pthread_t threads[BLOCKED_POLLS];
    generation a[BLOCKED_POLLS];
    OK(pllm_engine_start(engine));
    for (int i = 0; i < BLOCKED_POLLS; i++)
        CHECK(pthread_create(&threads[i], NULL, poll_until_an_output, &s) == 0);
    for (unsigned i = 0; i < BLOCKED_POLLS; i++) {
        add_prompt(engine, NULL, i, 1, &a[i]);
        while (atomic_load(&s.outputs) <= i) sleep_ms(1);
    }
    for (int i = 0; i < BLOCKED_POLLS; i++) pthread_join(threads[i], NULL);
    CHECK(s.outputs == BLOCKED_POLLS);
    pllm_engine_free(engine);
}

const test events_tests[] = {
    TEST(event_fd_is_readable_while_outputs_are_queued),
    TEST(reading_the_event_fd_loses_no_output),
    TEST(level_triggered_epoll_gets_every_output),
    TEST(edge_triggered_epoll_gets_every_output),
    TEST(engine_runs_without_free_descriptors),
    TEST(poll_returns_empty_after_its_timeout),
    TEST(blocked_polls_return_one_output_each),
    {0},
};
