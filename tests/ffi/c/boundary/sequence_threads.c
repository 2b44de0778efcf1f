// Many threads that use sequences of one engine.
#include "boundary.h"
#include "sequences.h"

#include <pthread.h>

enum { THREADS = 16, ROUNDS = 6 };

// Uses every sequence call in one conversation, while other threads do the same.
static void make_every_sequence_call(const pllm_engine *engine, pllm_queue *queue,
                                     unsigned prompt_index) {
    generation first, child, shorter, copied, running, freed;
    uint64_t id = add_kept(engine, queue, prompt_index, FIRST_TOKENS, 1, &first);
    wait_for_end(queue, &first);
    const uint64_t len = info_of(engine, id).len;
    CHECK(first.tokens_len == FIRST_TOKENS && info_of(engine, id).idle == 1);
    const uint64_t copy = copy_sequence(engine, queue, id);
    CHECK(info_of(engine, copy).len == len && info_of(engine, copy).idle == 1);
    fork_sequence(engine, id, PLLM_FORK_AT_END, NULL, &child);
    fork_sequence(engine, id, len - 5, NULL, &shorter);
    CHECK(info_of(engine, shorter.id).len == len - 5);
    uint64_t ids[2] = {child.id, shorter.id};
    resume(engine, NULL, ids[0], ALL_TOKENS - FIRST_TOKENS, &child);
    resume(engine, NULL, ids[1], ALL_TOKENS - FIRST_TOKENS + 5, &shorter);
    FAILS(PLLM_E_INVALID_ARGUMENT, "runs already", try_resume(engine, NULL, ids[0], 1, &running));
    wait_for_end(queue, &child);
    wait_for_end(queue, &shorter);
    CHECK(continues_reference(&child, prompt_index, FIRST_TOKENS) &&
          continues_reference(&shorter, prompt_index, FIRST_TOKENS - 5));
    resume(engine, NULL, copy, ALL_TOKENS - FIRST_TOKENS, &copied);
    wait_for_end(queue, &copied);
    CHECK(continues_reference(&copied, prompt_index, FIRST_TOKENS));
    OK(pllm_sequence_free(engine, copy));
    // The parent generates the same tokens after an append and a rewind.
    OK(pllm_sequence_append(engine, id, (const uint32_t[]){9, 8, 7}, 3));
    OK(pllm_sequence_rewind(engine, id, len));
    resume(engine, NULL, id, ALL_TOKENS - FIRST_TOKENS, &running);
    wait_for_end(queue, &running);
    CHECK(continues_reference(&running, prompt_index, FIRST_TOKENS));
    resume(engine, NULL, id, 300, &freed);
    OK(pllm_sequence_free(engine, id));
    check_is_unknown(engine, id);
    wait_for_end(queue, &freed);
    CHECK(freed.finish_reason == PLLM_FINISH_ABORT || freed.finish_reason == PLLM_FINISH_LENGTH);
    for (int i = 0; i < 2; i++) OK(pllm_sequence_free(engine, ids[i]));
}

static void *run_conversations(void *argument) {
    const pllm_engine *engine = argument;
    pllm_queue *queue = new_queue(engine, 3);
    for (unsigned i = 0; i < ROUNDS; i++)
        make_every_sequence_call(engine, queue, i % SEQUENCE_PROMPTS);
    CHECK(take_outputs(queue, 0) == 0);
    pllm_queue_free(queue);
    return NULL;
}

static void sixteen_threads_use_every_sequence_call(void) {
    for (unsigned q = 0; q < SEQUENCE_PROMPTS; q++) reference(q, ALL_TOKENS);
    pllm_engine *engine = open_engine(model_dir);
    pthread_t threads[THREADS];
    OK(pllm_engine_start(engine));
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, run_conversations, engine) == 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    wait_until_idle(engine);
    check_nothing_is_left(engine);
    CHECK(stats_of(engine).finished_error == 0);
    pllm_engine_free(engine);
}

// Threads that rewind, append to, fork and free one sequence. Every documented error is allowed,
// and no block leaks.
typedef struct {
    const pllm_engine *engine;
    uint64_t sequence;
    atomic_bool stopped;
    atomic_uint forks;
} contention;

static void *rewind_and_append(void *argument) {
    contention *q = argument;
    for (unsigned i = 0; !atomic_load(&q->stopped); i++) {
        int32_t code =
            i % 2 ? code_of(pllm_sequence_rewind(q->engine, q->sequence, 5 + i % 7))
                  : code_of(pllm_sequence_append(q->engine, q->sequence,
                                                 (const uint32_t[]){6, 7, 8, 9}, 1 + i % 4));
        CHECK(code == 0 || code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_NOT_FOUND);
        sleep_ms(0);
    }
    return NULL;
}

static void *fork_and_free(void *argument) {
    contention *q = argument;
    pllm_queue *queue = new_queue(q->engine, 2);
    for (unsigned i = 0; i < 40; i++) {
        pllm_fork options;
        uint64_t children[3] = {0};
        pllm_fork_init(&options, sizeof options);
        options.n = 3;
        options.queue = queue;
        options.flags = PLLM_FORK_SEED | (i % 2 ? PLLM_FORK_IDLE : 0);
        options.seed = i;
        int32_t code = code_of(pllm_sequence_fork(q->engine, q->sequence, &options, children));
        CHECK(code == 0 || code == PLLM_E_NOT_FOUND || code == PLLM_E_CAPACITY);
        if (code == 0) atomic_fetch_add(&q->forks, 1);
        pllm_outputs *outputs = NULL;
        OK(pllm_queue_poll(queue, i % 3, &outputs));
        pllm_outputs_free(outputs);
        for (int c = 0; code == 0 && c < 3; c++) {
            int32_t freed = code_of(pllm_sequence_free(q->engine, children[c]));
            CHECK(freed == 0 || freed == PLLM_E_NOT_FOUND);
        }
    }
    pllm_queue_free(queue);
    return NULL;
}

static void threads_may_fork_and_change_the_same_sequence(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a;
    contention q = {.engine = engine};
    pthread_t forking[4], changing[2];
    pllm_queue *unread = new_queue(engine, UINT64_MAX);
    OK(pllm_engine_start(engine));
    q.sequence = add_kept(engine, unread, 1, 600, 1, &a);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&changing[i], NULL, rewind_and_append, &q) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&forking[i], NULL, fork_and_free, &q) == 0);
    for (int i = 0; i < 4; i++) pthread_join(forking[i], NULL);
    atomic_store(&q.stopped, true);
    for (int i = 0; i < 2; i++) pthread_join(changing[i], NULL);
    OK(pllm_sequence_free(engine, q.sequence));
    pllm_queue_free(unread);
    wait_until_idle(engine);
    check_nothing_is_left(engine);
    CHECK(q.forks > 10);
    pllm_engine_free(engine);
}

const test sequence_threads_tests[] = {
    TEST(sixteen_threads_use_every_sequence_call),
    TEST(threads_may_fork_and_change_the_same_sequence),
    {0},
};
