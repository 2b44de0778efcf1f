// Engines that several workers compute: rank 0 is the engine, the others are threads.
#include "abi_test.h"

#include <pthread.h>
#include <stdatomic.h>

static const uint64_t LIMIT_MS = 300000;

static const char *group_path(void) {
    static char path[64];
    const char *dir = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path, sizeof path, "%s/pagedllm-workers-%d", dir, (int)getpid());
    return path;
}

static pllm_engine_options options_of(uint32_t tensor, uint32_t pipeline,
                                      const pllm_communicator *c) {
    pllm_engine_options options = options_for(model_dir);
    options.tensor_parallel = tensor, options.pipeline_parallel = pipeline;
    options.communicator = c, options.worker_timeout_ms = LIMIT_MS;
    return options;
}

// A worker that runs on a thread.
typedef struct {
    pthread_t thread;
    uint32_t rank, tensor, pipeline;
    // Changes the options of the worker. NULL: no change.
    void (*change)(pllm_engine_options *);
    // Changes the functions of the worker's communicator. NULL: no change.
    void (*change_functions)(pllm_communicator *);
    // Number of messages that the worker receives before its communicator fails. 0: no limit.
    uint32_t max_messages;
    int has_failed;  // whether its communicator has failed
    int32_t code;    // result of pllm_worker_run
} worker;

// A communicator that fails after a number of broadcasts.
typedef struct {
    pllm_communicator inner;
    atomic_uint left;
    atomic_int has_failed;
} limited;

static int32_t limited_broadcast(void *data, void *bytes, uint64_t len, uint32_t root,
                                 uint64_t timeout_ms) {
    limited *l = data;
    if (atomic_fetch_sub(&l->left, 1) == 1) {
        l->has_failed = 1;
        return PLLM_E_IO;
    }
    return l->inner.broadcast(l->inner.user_data, bytes, len, root, timeout_ms);
}

static int32_t limited_all_gather(void *data, const void *bytes, uint64_t len, void *out,
                                  uint64_t timeout_ms) {
    limited *l = data;
    return l->inner.all_gather(l->inner.user_data, bytes, len, out, timeout_ms);
}

static int32_t limited_all_to_all(void *data, const void *bytes, uint64_t len, void *out,
                                  uint64_t timeout_ms) {
    limited *l = data;
    return l->inner.all_to_all(l->inner.user_data, bytes, len, out, timeout_ms);
}

static int32_t limited_send(void *data, const void *bytes, uint64_t len, uint32_t to,
                            uint64_t timeout_ms) {
    limited *l = data;
    return l->inner.send(l->inner.user_data, bytes, len, to, timeout_ms);
}

static int32_t limited_receive(void *data, void *bytes, uint64_t len, uint32_t from,
                               uint64_t timeout_ms) {
    limited *l = data;
    return l->inner.receive(l->inner.user_data, bytes, len, from, timeout_ms);
}

static void limited_close(void *data) {
    limited *l = data;
    l->inner.close(l->inner.user_data);
}

// Returns a struct of the host's functions, which use the library's communicator.
static pllm_communicator wrapped(limited *l) {
    return (pllm_communicator){.struct_size = sizeof(pllm_communicator),
                               .user_data = l,
                               .rank = l->inner.rank,
                               .size = l->inner.size,
                               .broadcast = limited_broadcast,
                               .all_gather = limited_all_gather,
                               .all_to_all = limited_all_to_all,
                               .send = limited_send,
                               .receive = limited_receive,
                               .close = limited_close};
}

static void *run_worker(void *data) {
    worker *w = data;
    limited l = {.inner = {.struct_size = sizeof l.inner}, .left = w->max_messages};
    uint32_t size = w->tensor * w->pipeline;
    if (!OK(pllm_communicator_shared_memory(group_path(), w->rank, size, LIMIT_MS, &l.inner)))
        return NULL;
    pllm_communicator own = wrapped(&l);
    if (w->change_functions) w->change_functions(&own);
    pllm_communicator *c = w->max_messages || w->change_functions ? &own : &l.inner;
    pllm_engine_options options = options_of(w->tensor, w->pipeline, c);
    if (w->change) w->change(&options);
    w->code = code_of(pllm_worker_run(&options));
    w->has_failed = l.has_failed;
    if (w->code) c->close(c->user_data);
    return NULL;
}

static void start_workers(worker *workers, uint32_t tensor, uint32_t pipeline) {
    for (uint32_t rank = 1; rank < tensor * pipeline; rank++) {
        worker *w = &workers[rank];
        w->rank = rank, w->tensor = tensor, w->pipeline = pipeline, w->code = -1;
        CHECK(pthread_create(&w->thread, NULL, run_worker, w) == 0);
    }
}

static void join_group(pllm_communicator *c, uint32_t size) {
    *c = (pllm_communicator){.struct_size = sizeof *c};
    OK(pllm_communicator_shared_memory(group_path(), 0, size, LIMIT_MS, c));
}

static void several_workers_answer_as_one(void) {
    static const uint32_t divisions[][2] = {{2, 1}, {1, 2}, {2, 2}};
    for (size_t i = 0; i < sizeof divisions / sizeof divisions[0]; i++) {
        uint32_t tensor = divisions[i][0], pipeline = divisions[i][1];
        worker workers[4] = {{0}};
        pllm_communicator c;
        start_workers(workers, tensor, pipeline);
        join_group(&c, tensor * pipeline);
        pllm_engine_options options = options_of(tensor, pipeline, &c);
        pllm_engine *engine = NULL;
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_sampling sampling = greedy();
        pllm_request request = text_request(FRANCE, &sampling);
        CHECK(text_is(run_request(engine, &request), PARIS, strlen(PARIS)));
        CHECK(is_idle(engine));
        pllm_engine_free(engine);
        for (uint32_t rank = 1; rank < tensor * pipeline; rank++) {
            pthread_join(workers[rank].thread, NULL);
            CHECK(workers[rank].code == 0);
        }
        CHECK(access(group_path(), F_OK) != 0);
    }
}

static void an_engine_ends_with_its_worker(void) {
    worker workers[2] = {{0}, {.max_messages = 20}};
    limited l = {.left = 0};
    start_workers(workers, 2, 1);
    join_group(&l.inner, 2);
    pllm_communicator c = wrapped(&l);  // all ranks have a communicator of the same kind
    pllm_engine_options options = options_of(2, 1, &c);
    pllm_engine *engine = NULL;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    pllm_sampling sampling = long_sampling();
    pllm_request request = text_request(STORY, &sampling);
    uint64_t id;
    OK(pllm_engine_add_request(engine, &request, &id));
    pllm_error *error;
    pllm_step step = {.struct_size = sizeof step};
    do error = pllm_engine_step(engine, &step);
    while (!error);
    CHECK(code_of(error) == PLLM_E_INTERNAL);
    CHECK(code_of(pllm_engine_health(engine)) == PLLM_E_INTERNAL);
    static generation a;
    a = (generation){0};
    collect_outputs(engine, id, &a);
    CHECK(a.finish_reason == PLLM_FINISH_ERROR && a.error_code == PLLM_E_INTERNAL);
    pthread_join(workers[1].thread, NULL);
    CHECK(workers[1].code == PLLM_E_INTERNAL && workers[1].has_failed);
    pllm_engine_free(engine);
}

static void change_block_size(pllm_engine_options *o) { o->block_size = 32; }
static void change_isa(pllm_engine_options *o) { o->isa = 99; }
static void change_dtype(pllm_engine_options *o) { o->kv_dtype = 99; }
static void change_flags(pllm_engine_options *o) { o->flags = 1u << 31; }
static void change_device(pllm_engine_options *o) { o->device = "\xff"; }
static void change_model(pllm_engine_options *o) { o->model_path = NULL; }

// Starts two ranks, one of which has other options. Both must refuse them.
static void refused_by_both(uint32_t other_rank, void (*change)(pllm_engine_options *),
                            int32_t code) {
    worker workers[2] = {{0}, {.change = other_rank == 1 ? change : NULL}};
    pllm_communicator c;
    pllm_engine *engine = UNTOUCHED;
    start_workers(workers, 2, 1);
    join_group(&c, 2);
    pllm_engine_options options = options_of(2, 1, &c);
    if (other_rank == 0) change(&options);
    CHECK(code_of(pllm_engine_create(&options, &engine)) == code && engine == UNTOUCHED);
    // The other rank has its error before the communicator is closed.
    pthread_join(workers[1].thread, NULL);
    CHECK(workers[1].code == code);
    c.close(c.user_data);
}

static void options_that_one_rank_refuses_are_errors_of_both(void) {
    for (uint32_t rank = 0; rank < 2; rank++) {
        refused_by_both(rank, change_block_size, PLLM_E_INVALID_ARGUMENT);
        refused_by_both(rank, change_isa, PLLM_E_INVALID_ARGUMENT);
        refused_by_both(rank, change_dtype, PLLM_E_INVALID_ARGUMENT);
        refused_by_both(rank, change_flags, PLLM_E_UNSUPPORTED);
        refused_by_both(rank, change_device, PLLM_E_INVALID_ARGUMENT);
        refused_by_both(rank, change_model, PLLM_E_INVALID_ARGUMENT);
    }
}

static void a_missing_out_parameter_is_an_error_of_both(void) {
    worker workers[2] = {{0}};
    pllm_communicator c;
    start_workers(workers, 2, 1);
    join_group(&c, 2);
    pllm_engine_options options = options_of(2, 1, &c);
    INVALID(pllm_engine_create(&options, NULL));
    pthread_join(workers[1].thread, NULL);
    CHECK(workers[1].code == PLLM_E_INVALID_ARGUMENT);
    c.close(c.user_data);
}

static void remove_send(pllm_communicator *c) { c->send = NULL; }
static void keep_functions(pllm_communicator *c) { (void)c; }

static void a_missing_function_of_one_rank_ends_both(void) {
    worker workers[2] = {{0}, {.change_functions = remove_send}};
    limited l = {.left = 0};
    pllm_engine *engine = UNTOUCHED;
    start_workers(workers, 2, 1);
    join_group(&l.inner, 2);
    pllm_communicator c = wrapped(&l);
    pllm_engine_options options = options_of(2, 1, &c);
    // The other rank leaves the group because its struct is refused.
    CHECK(code_of(pllm_engine_create(&options, &engine)) == PLLM_E_INTERNAL);
    c.close(c.user_data);
    pthread_join(workers[1].thread, NULL);
    CHECK(workers[1].code == PLLM_E_INVALID_ARGUMENT && engine == UNTOUCHED);
}

// Rank 3 has functions without split, the others have the library's.
static void a_group_that_one_rank_cannot_divide_is_refused_by_all(void) {
    worker workers[4] = {{0}, {0}, {0}, {.change_functions = keep_functions}};
    pllm_communicator c;
    pllm_engine *engine = UNTOUCHED;
    start_workers(workers, 2, 2);
    join_group(&c, 4);
    pllm_engine_options options = options_of(2, 2, &c);
    CHECK(code_of(pllm_engine_create(&options, &engine)) == PLLM_E_UNSUPPORTED);
    for (uint32_t rank = 1; rank < 4; rank++) {
        pthread_join(workers[rank].thread, NULL);
        CHECK(workers[rank].code == PLLM_E_UNSUPPORTED);
    }
    c.close(c.user_data);
}

static void a_rank_0_without_an_engine_ends_its_workers(void) {
    worker workers[2] = {{0}};
    pllm_communicator c;
    pllm_engine *engine = UNTOUCHED;
    start_workers(workers, 2, 1);
    join_group(&c, 2);
    pllm_engine_options options = options_of(2, 1, &c);
    options.journal_path = "/does-not-exist/journal";
    CHECK(code_of(pllm_engine_create(&options, &engine)) == PLLM_E_IO);
    pthread_join(workers[1].thread, NULL);
    CHECK(workers[1].code == PLLM_E_IO && engine == UNTOUCHED);
    c.close(c.user_data);
}

static void workers_that_do_not_fit_are_refused(void) {
    pllm_communicator c;
    pllm_engine *engine = UNTOUCHED;
    pllm_engine_options options = options_of(2, 1, NULL);
    INVALID(pllm_engine_create(&options, &engine));
    INVALID(pllm_worker_run(&options));
    INVALID(pllm_worker_run(NULL));
    pllm_plan divided = plan_of(&options);
    options.tensor_parallel = 0;
    CHECK(divided.block_bytes * 2 == plan_of(&options).block_bytes);
    INVALID(pllm_worker_run(&options));
    options.tensor_parallel = 3;
    INVALID(pllm_engine_plan(&options, &divided));
    options.tensor_parallel = 1025;
    INVALID(pllm_engine_plan(&options, &divided));

    // A group of one rank is too small for two workers, and rank 0 is no worker.
    join_group(&c, 1);
    INVALID(pllm_engine_create(&options, &engine));
    options.tensor_parallel = 1;
    INVALID(pllm_worker_run(&options));
    pllm_communicator huge = c;
    huge.size = UINT32_MAX;
    options.communicator = &huge;
    INVALID(pllm_engine_create(&options, &engine));
    options.communicator = &c;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    // The communicator belongs to the engine.
    pllm_engine *second = UNTOUCHED;
    INVALID(pllm_engine_create(&options, &second));
    pllm_engine_free(engine);
    INVALID(pllm_engine_create(&options, &second));
    CHECK(second == UNTOUCHED);
}

const test workers_tests[] = {
    ALONE(several_workers_answer_as_one),
    ALONE(an_engine_ends_with_its_worker),
    ALONE(options_that_one_rank_refuses_are_errors_of_both),
    ALONE(a_missing_out_parameter_is_an_error_of_both),
    ALONE(a_missing_function_of_one_rank_ends_both),
    ALONE(a_group_that_one_rank_cannot_divide_is_refused_by_all),
    ALONE(a_rank_0_without_an_engine_ends_its_workers),
    ALONE(workers_that_do_not_fit_are_refused),
    {0},
};
