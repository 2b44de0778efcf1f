// Ids of sequences: aborted, freed and forked sequences, and those of another engine.
#include "boundary.h"
#include "sequences.h"

static void sequences_belong_to_one_engine(void) {
    pllm_engine *engine = open_engine(model_dir), *other = open_engine(model_dir);
    generation a, b, c;
    pllm_fork options;
    pllm_queue *foreign_queue = new_queue(other, 8);
    uint64_t id = add_kept(engine, NULL, 0, FIRST_TOKENS, 1, &a), child = 0;
    step_to_the_end(engine);
    check_is_unknown(other, id);
    CHECK(add_kept(other, NULL, 1, FIRST_TOKENS, 1, &b) ==
          id);  // each engine numbers its own sequences
    step_to_the_end(other);
    pllm_fork_init(&options, sizeof options);
    options.queue = foreign_queue;
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine",
          pllm_sequence_fork(engine, id, &options, &child));
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", try_resume(engine, foreign_queue, id, 1, &c));
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine",
          pllm_sequence_export(engine, id, foreign_queue));
    OK(pllm_sequence_free(other, id));
    step(other, 1);
    resume(engine, NULL, id, ALL_TOKENS - FIRST_TOKENS, &c);
    step_to_the_end(engine);
    CHECK(child == 0 && continues_reference(&c, 0, FIRST_TOKENS));
    check_nothing_is_left(other);
    pllm_queue_free(foreign_queue);
    pllm_engine_free(other);
    pllm_engine_free(engine);
}

static void freed_and_ended_sequences_stay_unknown(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a, b;
    uint64_t kept = add_kept(engine, NULL, 0, 2, 1, &a);
    add_prompt(engine, NULL, 1, 2, &b);
    step_to_the_end(engine);
    check_is_unknown(engine, b.id);
    OK(pllm_sequence_free(engine, kept));
    check_is_unknown(engine, kept);  // before the next step
    step(engine, 1);
    check_is_unknown(engine, kept);
    FAILS(PLLM_E_NOT_FOUND, "", pllm_engine_abort(engine, kept));
    // A running sequence ends with an output that reports the abort.
    add_prompt(engine, NULL, 1, 100, &b);
    step(engine, 3);
    OK(pllm_sequence_free(engine, b.id));
    check_is_unknown(engine, b.id);
    step_to_the_end(engine);
    CHECK(b.ends == 1 && b.finish_reason == PLLM_FINISH_ABORT && b.tokens_len == 3);
    check_nothing_is_left(engine);
    pllm_engine_free(engine);
}

static void fork_of_an_aborted_parent_ends_with_an_error(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a, child = {0};
    add_prompt(engine, NULL, 0, 100, &a);
    step(engine, 3);
    OK(pllm_engine_abort(engine, a.id));
    fork_sequence(engine, a.id, PLLM_FORK_AT_END, NULL, &child);
    step_to_the_end(engine);
    CHECK(a.finish_reason == PLLM_FINISH_ABORT && child.ends == 1 &&
          child.finish_reason == PLLM_FINISH_ERROR);
    check_is_unknown(engine, child.id);
    check_nothing_is_left(engine);
    pllm_engine_free(engine);
}

// The fork was requested while its parent ran. The kept parent is aborted first: the fork ends, is
// kept as well, and can resume.
static void fork_of_an_aborted_kept_parent_is_idle_and_can_resume(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a, child, again;
    add_kept(engine, NULL, 0, FIRST_TOKENS, 1, &a);
    step(engine, 3);
    OK(pllm_engine_abort(engine, a.id));
    fork_sequence(engine, a.id, PLLM_FORK_AT_END, NULL, &child);
    CHECK(steps_to_the_end(engine, 50) < 50);
    take_outputs(pllm_engine_queue(engine), 0);
    CHECK(child.ends == 1 && info_of(engine, child.id).idle == 1);
    const uint64_t id = child.id;
    resume(engine, NULL, id, ALL_TOKENS - 3, &again);
    step_to_the_end(engine);
    CHECK(continues_reference(&again, 0, 3));
    OK(pllm_sequence_free(engine, id));
    OK(pllm_sequence_free(engine, a.id));
    step(engine, 1);
    check_nothing_is_left(engine);
    pllm_engine_free(engine);
}

// The request had not branched when it was aborted, and does not branch when it is resumed.
static void samples_aborted_before_the_first_token_resume_as_one_sequence(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a, again;
    uint64_t id = add_kept(engine, NULL, 0, FIRST_TOKENS, 3, &a);
    OK(pllm_engine_abort(engine, id));
    step(engine, 1);
    a.ends = 0;
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    CHECK(pllm_outputs_len(outputs) == 3);
    pllm_outputs_free(outputs);
    resume(engine, NULL, id, ALL_TOKENS, &again);
    step_to_the_end(engine);
    CHECK(continues_reference(&again, 0, 0));
    check_is_unknown(engine, id + 1);
    OK(pllm_sequence_free(engine, id));
    step(engine, 1);
    check_nothing_is_left(engine);
    pllm_engine_free(engine);
}

// Appended tokens count even if the sequence was aborted between the call and the step.
static void length_counts_tokens_appended_before_an_abort_is_applied(void) {
    pllm_engine *engine = open_engine(model_dir);
    generation a, again;
    uint64_t id = add_kept(engine, NULL, 0, FIRST_TOKENS, 1, &a);
    step(engine, 3);
    const uint64_t len = info_of(engine, id).len;
    OK(pllm_engine_abort(engine, id));
    OK(pllm_sequence_append(engine, id, (const uint32_t[]){9, 8, 7, 6}, 4));
    CHECK(info_of(engine, id).len == len + 4);
    step(engine, 1);
    CHECK(info_of(engine, id).len == len + 4 && info_of(engine, id).idle == 1);
    resume(engine, NULL, id, 6, &again);
    step_to_the_end(engine);
    CHECK(again.tokens_len == 6 && again.finish_reason == PLLM_FINISH_LENGTH &&
          info_of(engine, id).len == len + 10);
    pllm_engine_free(engine);
}

const test sequence_ids_tests[] = {
    TEST(sequences_belong_to_one_engine),
    TEST(freed_and_ended_sequences_stay_unknown),
    TEST(fork_of_an_aborted_parent_ends_with_an_error),
    TEST(fork_of_an_aborted_kept_parent_is_idle_and_can_resume),
    TEST(samples_aborted_before_the_first_token_resume_as_one_sequence),
    TEST(length_counts_tokens_appended_before_an_abort_is_applied),
    {0},
};
