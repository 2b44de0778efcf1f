// Programs: the weighted choice of calls, concurrent workers, and the checks at the end.
#include "program.h"

#include <dirent.h>
#include <pthread.h>
#include <unistd.h>

const char *model_dir, *golden_dir;
program_objects program;

typedef struct {
    void (*call)(worker *w);
    unsigned weight;
    bool exclusive;  // frees or creates objects that other workers may be using
} operation;

static const operation operations[] = {
    {add_request, 12, false},
    {poll_queue, 12, false},
    {step_engine, 10, false},
    {abort_request, 5, false},
    {get_stats, 4, false},
    {get_model_info, 2, false},
    {create_engine, 1, true},
    {free_engine, 1, true},
    {plan_engine, 1, false},
    {create_queue, 4, false},
    {free_queue, 2, false},
    {event_descriptor, 5, false},
    {start_engine, 2, false},
    {stop_engine, 1, false},
    {tokenize, 4, false},
    {detokenize, 4, false},
    {check_null_handles, 1, false},
    {render_chat, 3, false},
    {parse_response, 3, false},
    {free_any_kept, 3, false},
    {check_engine_queue, 1, false},
    {check_library_info, 1, false},
    {fork_sequence, 6, false},
    {append_to_sequence, 4, false},
    {rewind_sequence, 4, false},
    {resume_sequence, 7, false},
    {free_sequence, 2, false},
    {get_sequence_info, 3, false},
    {pin_prefix, 2, false},
    {unpin_any, 4, false},
    {export_sequence, 2, false},
    {import_sequence, 2, false},
    {predict_only, 2, false},
    {get_metrics, 2, false},
    {get_snapshot, 2, false},
    {get_token_bytes, 2, false},
    {check_health, 2, false},
    {create_budget, 2, true},
    {free_budget, 1, true},
    {resize_budget, 6, false},
    {shrink_budget_during_requests, 4, false},
    {get_budget_info, 2, false},
    {check_engine_budget, 1, false},
    {poll_kv_events, 3, false},
    {snapshot_kv_events, 2, false},
    {hash_prompt, 3, false},
    {join_communicator, 2, false},
    {run_worker_in_vain, 1, false},
    {run_worker_of_an_engine, 1, true},
};

static const operation *any_operation(worker *w) {
    unsigned total = 0, i = 0;
    for (size_t o = 0; o < COUNT(operations); o++) total += operations[o].weight;
    for (unsigned at = below(w, total); at >= operations[i].weight; i++) at -= operations[i].weight;
    return &operations[i];
}

static void run_operations(worker *w) {
    while (w->next < w->end) {
        const operation *o = any_operation(w);
        w->buffers = 0;
        if (w->index == 0 && !any_engine(w)->engine && !one_in(w, 4))
            create_engine(w), w->buffers = 0;
        if (!o->exclusive || w->index == 0) o->call(w);
        leave(w);
    }
}

static void *run_racer(void *racer) {
    worker *w = racer;
    run_operations(w);
    free_all_kept(w);
    leave(w);
    return NULL;
}

// Splits the rest of the program among threads that use the same engines and queues.
static void run_racers(worker *w) {
    worker racers[RACERS];
    pthread_t threads[RACERS];
    size_t share = (size_t)(w->end - w->next) / RACERS;
    oracle_set_racing(program.racing = true);
    for (unsigned i = 0; i < RACERS; i++) {
        racers[i] =
            (worker){.index = 1 + i, .next = w->next + i * share, .end = w->next + (i + 1) * share};
        if (pthread_create(&threads[i], NULL, run_racer, &racers[i]))
            perror("pthread_create"), exit(2);
    }
    for (unsigned i = 0; i < RACERS; i++) pthread_join(threads[i], NULL);
    oracle_set_racing(program.racing = false);
    w->next = w->end;
    // It is not known which engines are started.
    for (int i = 0; i < ENGINES; i++)
        if (program.engines[i].engine) stop_unconditionally(w, &program.engines[i]);
}

static void free_everything(worker *w) {
    if (below(w, 2)) free_budgets(w);  // before their engines
    for (int i = 0; i < ENGINES; i++) free_engine_slot(w, &program.engines[i]);
    free_budgets(w);
    for (int i = 0; i < QUEUES; i++) free_queue_slot(w, &program.queues[i]);
    free_all_kept(w);
    leave(w);
}

static int directory_entries(const char *directory) {
    int count = 0;
    DIR *dir = opendir(directory);
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

// A thread may be listed for a moment after it was joined. The limit only bounds a failing run.
static int thread_count_after_join(int expected) {
    int count = directory_entries("/proc/self/task");
    uint64_t timeout_ms = mutation == thread_leaks ? 200 : 300000;
    for (uint64_t end = now_ms() + timeout_ms; count > expected && now_ms() < end;
         count = directory_entries("/proc/self/task"))
        usleep(100);
    return count;
}

static void *sleep_long(void *unused) {
    sleep(1000);
    return unused;
}

static void leak_by_mutation(void) {
    pthread_t thread;
    if (mutation == descriptor_leaks) (void)!dup(0);
    if (mutation == thread_leaks) pthread_create(&thread, NULL, sleep_long, NULL);
}

program_result run_program(const uint8_t *bytes, size_t len) {
    int descriptors = directory_entries("/proc/self/fd"),
        threads = directory_entries("/proc/self/task");
    worker main_worker = {.next = bytes, .end = bytes + len}, *w = &main_worker;
    enum { HOST_STEPS, HOST_STEPS_TOO, ENGINE_STEPS, MANY_THREADS } mode = below(w, 4);
    references_generate();
    memset(&program, 0, sizeof program);
    oracle_clear();
    program.may_start = mode >= ENGINE_STEPS;
    const uint8_t *ending = w->end > w->next + 64 ? w->end - 64 : w->next, *end = w->end;
    w->end = mode == MANY_THREADS ? w->next + (ending - w->next) / 4 : ending;
    for (int tries = 0; tries < 4 && !program.engines[0].engine && !program.engines[1].engine;
         tries++)
        w->buffers = 0, create_engine(w);
    run_operations(w);
    if (mode == MANY_THREADS) w->end = ending, run_racers(w);
    w->end = end;
    free_everything(w);
    leak_by_mutation();
    int descriptors_now = directory_entries("/proc/self/fd"),
        threads_now = thread_count_after_join(threads);
    EXPECT(descriptors_now <= descriptors, "%d descriptors are open after the program, %d before",
           descriptors_now, descriptors);
    EXPECT(threads_now <= threads, "%d threads exist after the program, %d before", threads_now,
           threads);
    return (program_result){!program.may_start && !program.uses_grammars, w->hash};
}
