// Sequences whose queue, sibling or engine is freed.
#include "boundary.h"
#include "sequences.h"

static void freeing_a_queue_aborts_only_the_forks_that_write_to_it(void) {
    enum { FORKS = 4, LONG_TOKENS = 300 };
    reference(1, LONG_TOKENS);
    pllm_engine *engine = open_engine(model_dir);
    generation parent, forks[FORKS], kept, other;
    pllm_queue *freed_queue = new_queue(engine, 2), *kept_queue = new_queue(engine, UINT64_MAX);
    OK(pllm_engine_start(engine));
    add_prompt(engine, kept_queue, 1, LONG_TOKENS, &parent);
    while (parent.tokens_len < 5) take_outputs(kept_queue, -1);
    for (int i = 0; i < FORKS; i++) fork_sequence(engine, parent.id, 20, freed_queue, &forks[i]);
    take_outputs(freed_queue, -1);
    uint64_t id = add_kept(engine, freed_queue, 0, 1000, 1, &kept);
    pllm_queue_free(freed_queue);
    wait_for_end(kept_queue, &parent);
    CHECK(is_complete(&parent, 1, LONG_TOKENS));
    wait_until_idle(engine);
    for (int i = 0; i < FORKS; i++) check_is_unknown(engine, forks[i].id);
    CHECK(stats_of(engine).finished_abort == FORKS + 1);
    // The kept sequence still exists. It needs another queue.
    uint64_t child = 0;
    FAILS(PLLM_E_INVALID_ARGUMENT, "freed", pllm_sequence_resume(engine, id, NULL));
    FAILS(PLLM_E_INVALID_ARGUMENT, "freed", pllm_sequence_fork(engine, id, NULL, &child));
    FAILS(PLLM_E_INVALID_ARGUMENT, "freed", pllm_sequence_export(engine, id, NULL));
    OK(pllm_sequence_free(engine, copy_sequence(engine, kept_queue, id)));
    resume(engine, kept_queue, id, 3, &other);
    wait_for_end(kept_queue, &other);
    CHECK(other.tokens_len == 3);
    OK(pllm_sequence_free(engine, id));
    pllm_queue_free(kept_queue);
    wait_until_idle(engine);
    check_nothing_is_left(engine);
    pllm_engine_free(engine);
}

static void freeing_a_queue_before_its_state_arrives_aborts_no_request(void) {
    enum { LONG_TOKENS = 300 };
    reference(1, LONG_TOKENS);
    for (int started = 0; started < 2; started++) {
        pllm_engine *engine = open_engine(model_dir);
        generation a;
        add_prompt(engine, NULL, 1, LONG_TOKENS, &a);
        if (started) OK(pllm_engine_start(engine));
        for (int i = 0; i < 20; i++) {
            pllm_queue *states = new_queue(engine, 1);
            OK(pllm_sequence_export(engine, a.id, states));
            pllm_queue_free(states);
            if (!started) step(engine, 1);
        }
        if (!started) step_to_the_end(engine);
        wait_for_end(pllm_engine_queue(engine), &a);
        if (started) wait_until_idle(engine);
        CHECK(is_complete(&a, 1, LONG_TOKENS) && stats_of(engine).finished_abort == 0);
        check_nothing_is_left(engine);
        pllm_engine_free(engine);
    }
}

// Two samples of one request. The second one was resumed to another queue while the first one still
// runs.
typedef struct {
    pllm_engine *engine;
    pllm_queue *first, *second;
} siblings;

static siblings make_siblings(generation *samples, generation *resumed) {
    siblings s = {.engine = open_engine(model_dir)};
    s.first = new_queue(s.engine, UINT64_MAX);
    s.second = new_queue(s.engine, UINT64_MAX);
    uint64_t id = add_kept(s.engine, s.first, 1, 10, 2, samples);
    step(s.engine, 5);
    // So that the first sample still runs after the second one has ended.
    OK(pllm_sequence_rewind(s.engine, id, info_of(s.engine, id).len - 4));
    for (int i = 0; i < 20 && !info_of(s.engine, id + 1).idle; i++) step(s.engine, 1);
    CHECK(info_of(s.engine, id).idle == 0 && info_of(s.engine, id + 1).idle == 1);
    resume(s.engine, s.second, id + 1, 50, resumed);
    step(s.engine, 1);
    return s;
}

static void sample_resumed_to_another_queue_ends_there_with_its_engine(void) {
    static generation samples, resumed;
    siblings s = make_siblings(&samples, &resumed);
    samples.ends = 0;
    pllm_engine_free(s.engine);
    CHECK(take_outputs(s.second, -1) == 2 && take_outputs(s.second, -1) == -1);
    CHECK(resumed.ends == 1 && resumed.finish_reason == PLLM_FINISH_ABORT &&
          resumed.tokens_len == 1);
    pllm_queue_free(s.first);
    pllm_queue_free(s.second);
}

static void sample_resumed_to_another_queue_ends_only_with_that_queue(void) {
    static generation samples, resumed;
    siblings s = make_siblings(&samples, &resumed);
    pllm_queue_free(s.second);
    CHECK(steps_to_the_end(s.engine, 100) < 20 && stats_of(s.engine).finished_abort == 1);
    pllm_queue_free(s.first);
    pllm_engine_free(s.engine);
    s = make_siblings(&samples, &resumed);
    pllm_queue_free(s.first);
    steps_to_the_end(s.engine, 100);
    take_outputs(s.second, 0);
    CHECK(resumed.ends == 1 && resumed.finish_reason == PLLM_FINISH_LENGTH &&
          resumed.tokens_len == 50);
    pllm_queue_free(s.second);
    pllm_engine_free(s.engine);
}

static void abort_also_ends_a_sample_resumed_before_the_next_step(void) {
    static generation samples, resumed;
    siblings s = make_siblings(&samples, &resumed);
    const uint64_t id = samples.id;
    OK(pllm_engine_abort(s.engine, id));
    step(s.engine, 1);
    generation again, once_more;
    resume(s.engine, s.second, id, 100, &again);
    OK(pllm_engine_abort(s.engine, id));
    resume(s.engine, s.second, id + 1, 100, &once_more);  // before a step has applied the abort
    step(s.engine, 3);
    OK(pllm_engine_abort(s.engine, id));
    CHECK(steps_to_the_end(s.engine, 50) < 3);
    take_outputs(s.second, 0);
    CHECK(again.ends == 1 && once_more.ends == 1 && once_more.finish_reason == PLLM_FINISH_ABORT);
    pllm_queue_free(s.first);
    pllm_queue_free(s.second);
    pllm_engine_free(s.engine);
}

static void resume_not_yet_applied_ends_with_its_engine(void) {
    static generation first, second;
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 8);
    uint64_t id = add_kept(engine, NULL, 0, 5, 1, &first);
    step_to_the_end(engine);
    resume(engine, queue, id, 5, &second);
    pllm_engine_free(engine);
    CHECK(take_outputs(queue, -1) == 1 && take_outputs(queue, -1) == -1);
    CHECK(first.ends == 1 && second.ends == 1 && second.finish_reason == PLLM_FINISH_ABORT &&
          second.tokens_len == 0);
    pllm_queue_free(queue);
}

static void engine_may_be_freed_with_idle_sequences_and_pins(void) {
    int files = 0;
    for (int i = 0; i < 30; i++) {
        pllm_engine *engine = open_engine(model_dir);
        pllm_pin pin;
        uint64_t id, pinned, children[8];
        generation a;
        pllm_fork options;
        pllm_fork_init(&options, sizeof options);
        options.n = COUNT(children);
        pllm_pin_init(&pin, sizeof pin);
        pin.prompt = prompts[0];
        OK(pllm_prefix_pin(engine, &pin, &pinned));
        id = add_kept(engine, NULL, 0, FIRST_TOKENS, 1, &a);
        step_to_the_end(engine);
        OK(pllm_sequence_fork(engine, id, &options, children));
        if (i % 2) step(engine, 1), CHECK(stats_of(engine).idle == 1 + COUNT(children));
        if (i % 3) OK(pllm_sequence_resume(engine, children[0], NULL));
        if (i % 5) OK(pllm_sequence_export(engine, id, NULL));
        pllm_engine_free(engine);
        if (i == 3) files = descriptor_count();
    }
    CHECK(descriptor_count() == files);
}

const test sequence_queues_tests[] = {
    TEST(freeing_a_queue_aborts_only_the_forks_that_write_to_it),
    TEST(freeing_a_queue_before_its_state_arrives_aborts_no_request),
    TEST(sample_resumed_to_another_queue_ends_there_with_its_engine),
    TEST(sample_resumed_to_another_queue_ends_only_with_that_queue),
    TEST(abort_also_ends_a_sample_resumed_before_the_next_step),
    TEST(resume_not_yet_applied_ends_with_its_engine),
    TEST(engine_may_be_freed_with_idle_sequences_and_pins),
    {0},
};
