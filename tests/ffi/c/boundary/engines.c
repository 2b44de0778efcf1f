// Engines that are created and freed many times, and two engines at once.
#include "boundary.h"

#include <pthread.h>

// Creates, uses and frees an engine. Every second one is freed while requests run.
static void create_use_and_free(int i) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 4);
    generation a, b;
    CHECK(event_fd(queue) >= 0 && event_fd(pllm_engine_queue(engine)) >= 0);
    OK(pllm_engine_start(engine));
    add_prompt(engine, queue, 0, 3, &a);
    add_prompt(engine, NULL, 1, 100, &b);
    while (i % 2 && !a.ends) take_outputs(queue, -1);
    pllm_engine_free(engine);
    while (take_outputs(queue, 0) > 0) continue;
    CHECK(a.ends == 1);
    pllm_queue_free(queue);
}

static void freed_engines_leave_no_threads_descriptors_or_memory(void) {
    for (int i = 0; i < 40; i++) create_use_and_free(i);
    int threads_before = thread_count(), descriptors_before = descriptor_count();
    long resident = resident_kib();
    for (int i = 40; i < 200; i++) create_use_and_free(i);
    CHECK(thread_count_falls_to(threads_before));
    CHECK(descriptor_count() == descriptors_before);
    // The weights alone have 5 MiB: one leaked engine, or 26 KiB of each of 160 engines, would be
    // detected.
    CHECK(SANITIZED || resident_kib() - resident < 4 << 10);
}

enum { ROUNDS = 5, TOKENS = 40 };

static void *generate_for_every_prompt(void *engine) {
    for (unsigned i = 0; i < ROUNDS * PROMPTS; i++) {
        generation a;
        add_prompt(engine, NULL, i, TOKENS, &a);
        step_to_the_end(engine);
        CHECK(is_complete(&a, i, TOKENS));
    }
    return NULL;
}

static void two_engines_at_once_generate_the_same_tokens(void) {
    pllm_engine *engines[2];
    pthread_t generating[2];
    for (unsigned q = 0; q < PROMPTS; q++) reference(q, TOKENS);
    for (int i = 0; i < 2; i++) engines[i] = open_engine(model_dir);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&generating[i], NULL, generate_for_every_prompt, engines[i]) == 0);
    for (int i = 0; i < 2; i++) pthread_join(generating[i], NULL);
    for (int i = 0; i < 2; i++) CHECK(stats_of(engines[i]).finished_length == ROUNDS * PROMPTS);
    for (int i = 0; i < 2; i++) pllm_engine_free(engines[i]);
}

const test engines_tests[] = {
    TEST(freed_engines_leave_no_threads_descriptors_or_memory),
    TEST(two_engines_at_once_generate_the_same_tokens),
    {0},
};
