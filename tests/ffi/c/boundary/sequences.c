// Sequences as values: many threads that fork, extend, cut, resume and free them, and what happens to them when a queue, a
// sibling or the engine goes.
#include "boundary.h"

#include <math.h>
#include <pthread.h>

enum { FIRST = 20, WHOLE = 40 };

// ---- asking, keeping, going on -----------------------------------------------------------------------------------------

static const char *const prompts[] = {
    "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n",
    "<s><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n",
};

static pllm_sampling greedily(uint32_t tokens) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = tokens;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    return sampling;
}

// Asks one of the first questions, n times over; the sequences stay. Sample i's outputs go to a[i] unless n is 1.
static uint64_t ask_and_keep(const pllm_engine *engine, const pllm_queue *to, unsigned question, uint32_t tokens, uint32_t n, answer *a) {
    pllm_sampling sampling = greedily(tokens);
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = prompts[question];
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.sampling = &sampling;
    request.flags = PLLM_REQUEST_KEEP;
    request.user_data = (uintptr_t)a;
    request.queue = to;
    request.n = n;
    *a = (answer){0};
    OK(pllm_engine_add_request(engine, &request, &a->id));
    return a->id;
}

static pllm_error *try_to_resume(const pllm_engine *engine, const pllm_queue *to, uint64_t sequence, uint32_t tokens, answer *a) {
    pllm_sampling sampling = greedily(tokens);
    pllm_resume how;
    pllm_resume_init(&how, sizeof how);
    how.sampling = &sampling;
    how.queue = to;
    how.flags |= PLLM_RESUME_USER_DATA;
    how.user_data = (uintptr_t)a;
    *a = (answer){.id = sequence};
    return pllm_sequence_resume(engine, sequence, &how);
}

static void resume(const pllm_engine *engine, const pllm_queue *to, uint64_t sequence, uint32_t tokens, answer *a) {
    OK(try_to_resume(engine, to, sequence, tokens, a));
}

static uint64_t fork_of(const pllm_engine *engine, uint64_t sequence, uint64_t at, const pllm_queue *to, answer *a) {
    pllm_fork how;
    uint64_t child = 0;
    pllm_fork_init(&how, sizeof how);
    how.at = at;
    how.queue = to;
    how.flags = PLLM_FORK_USER_DATA;
    how.user_data = (uintptr_t)a;
    *a = (answer){0};
    OK(pllm_sequence_fork(engine, sequence, &how, &child));
    return a->id = child;
}

static pllm_sequence_info look_at(const pllm_engine *engine, uint64_t sequence) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    OK(pllm_sequence_get_info(engine, sequence, &info));
    return info;
}

static void step(const pllm_engine *engine, unsigned times) {
    pllm_step report = {.struct_size = sizeof report};
    while (times-- > 0) OK(pllm_engine_step(engine, &report));
}

static unsigned steps_to_the_end(const pllm_engine *engine, unsigned most) {
    pllm_step report = {.struct_size = sizeof report, .unfinished = 1};
    unsigned steps = 0;
    while (report.unfinished && steps < most && OK(pllm_engine_step(engine, &report))) steps++;
    return steps;
}

static void is_unknown(const pllm_engine *engine, uint64_t sequence) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    uint64_t child = 0;
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_get_info(engine, sequence, &info));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_fork(engine, sequence, NULL, &child));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_append(engine, sequence, &(uint32_t){5}, 1));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_rewind(engine, sequence, 1));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_resume(engine, sequence, NULL));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_export(engine, sequence, NULL));
    FAILS(PLLM_E_NOT_FOUND, "", pllm_sequence_free(engine, sequence));
}

// All that came are the tokens of the undisturbed answer from `from` on.
static bool goes_on(const answer *a, unsigned question, size_t from) {
    const answer *whole = undisturbed(question, WHOLE);
    return a->ends == 1 && from + a->tokens_len == WHOLE && !memcmp(a->tokens, whole->tokens + from, a->tokens_len * sizeof *a->tokens);
}

static void nothing_is_left(const pllm_engine *engine) {
    pllm_stats s = stats_of(engine);
    CHECK(s.waiting == 0 && s.running == 0 && s.idle == 0 && s.blocks_used == 0);
}

// ---- a crowd -----------------------------------------------------------------------------------------------------------

enum { CROWD = 16, ROUNDS = 6 };

static void await(const pllm_queue *queue, const answer *a) {
    while (!a->ends) take(queue, -1);
}

// The same sequence once more, by way of a state.
static uint64_t copy_of(const pllm_engine *engine, const pllm_queue *queue, uint64_t sequence) {
    pllm_queue *states = new_queue(engine, 1);
    pllm_outputs *outputs = NULL;
    uint64_t copy = 0;
    OK(pllm_sequence_export(engine, sequence, states));
    OK(pllm_queue_poll(states, -1, &outputs));
    const pllm_output *o = pllm_outputs_get(outputs, 0);
    CHECK(pllm_outputs_len(outputs) == 1 && o->sequence == sequence && o->sequence_state && o->finish_reason == PLLM_FINISH_NONE);
    OK(pllm_sequence_import(engine, o->sequence_state, o->sequence_state_len, queue, &copy));
    pllm_outputs_free(outputs);
    pllm_queue_free(states);
    return copy;
}

// A conversation with every turn it can take; other threads take theirs at the same time.
static void take_every_turn(const pllm_engine *engine, pllm_queue *queue, unsigned question) {
    answer first, child, shorter, copied, running, doomed;
    uint64_t id = ask_and_keep(engine, queue, question, FIRST, 1, &first);
    await(queue, &first);
    const uint64_t len = look_at(engine, id).len;
    CHECK(first.tokens_len == FIRST && look_at(engine, id).idle == 1);
    const uint64_t copy = copy_of(engine, queue, id);
    CHECK(look_at(engine, copy).len == len && look_at(engine, copy).idle == 1);
    fork_of(engine, id, PLLM_FORK_AT_END, NULL, &child);
    fork_of(engine, id, len - 5, NULL, &shorter);
    CHECK(look_at(engine, shorter.id).len == len - 5);
    uint64_t ids[2] = {child.id, shorter.id};
    resume(engine, NULL, ids[0], WHOLE - FIRST, &child);
    resume(engine, NULL, ids[1], WHOLE - FIRST + 5, &shorter);
    FAILS(PLLM_E_INVALID_ARGUMENT, "runs already", try_to_resume(engine, NULL, ids[0], 1, &running));
    await(queue, &child);
    await(queue, &shorter);
    CHECK(goes_on(&child, question, FIRST) && goes_on(&shorter, question, FIRST - 5));
    resume(engine, NULL, copy, WHOLE - FIRST, &copied);
    await(queue, &copied);
    CHECK(goes_on(&copied, question, FIRST));
    OK(pllm_sequence_free(engine, copy));
    // The parent, meanwhile and after a detour, says the same.
    OK(pllm_sequence_append(engine, id, (const uint32_t[]){9, 8, 7}, 3));
    OK(pllm_sequence_rewind(engine, id, len));
    resume(engine, NULL, id, WHOLE - FIRST, &running);
    await(queue, &running);
    CHECK(goes_on(&running, question, FIRST));
    resume(engine, NULL, id, 300, &doomed);
    OK(pllm_sequence_free(engine, id));
    is_unknown(engine, id);
    await(queue, &doomed);
    CHECK(doomed.finish_reason == PLLM_FINISH_ABORT || doomed.finish_reason == PLLM_FINISH_LENGTH);
    for (int i = 0; i < 2; i++) OK(pllm_sequence_free(engine, ids[i]));
}

static void *be_one_of_many(void *argument) {
    const pllm_engine *engine = argument;
    pllm_queue *queue = new_queue(engine, 3);
    for (unsigned i = 0; i < ROUNDS; i++) take_every_turn(engine, queue, i % COUNT(prompts));
    CHECK(take(queue, 0) == 0);
    pllm_queue_free(queue);
    return NULL;
}

static void sixteen_threads_fork_append_rewind_resume_move_and_free(void) {
    for (unsigned q = 0; q < COUNT(prompts); q++) undisturbed(q, WHOLE);
    pllm_engine *engine = open_engine(model_dir);
    pthread_t threads[CROWD];
    OK(pllm_engine_start(engine));
    for (int i = 0; i < CROWD; i++) CHECK(pthread_create(&threads[i], NULL, be_one_of_many, engine) == 0);
    for (int i = 0; i < CROWD; i++) pthread_join(threads[i], NULL);
    wait_until_idle(engine);
    nothing_is_left(engine);
    CHECK(stats_of(engine).finished_error == 0);
    pllm_engine_free(engine);
}

// Forks of one sequence that others cut, extend and free at the same time: any of the promised answers, and nothing is lost.
typedef struct {
    const pllm_engine *engine;
    uint64_t sequence;
    atomic_bool over;
    atomic_uint forks;
} quarrel;

static void *cut_and_extend(void *argument) {
    quarrel *q = argument;
    for (unsigned i = 0; !atomic_load(&q->over); i++) {
        int32_t code = i % 2 ? code_of(pllm_sequence_rewind(q->engine, q->sequence, 5 + i % 7))
                             : code_of(pllm_sequence_append(q->engine, q->sequence, (const uint32_t[]){6, 7, 8, 9}, 1 + i % 4));
        CHECK(code == 0 || code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_NOT_FOUND);
        sleep_ms(0);
    }
    return NULL;
}

static void *fork_and_free(void *argument) {
    quarrel *q = argument;
    pllm_queue *queue = new_queue(q->engine, 2);
    for (unsigned i = 0; i < 40; i++) {
        pllm_fork how;
        uint64_t children[3] = {0};
        pllm_fork_init(&how, sizeof how);
        how.n = 3;
        how.queue = queue;
        how.flags = PLLM_FORK_SEED | (i % 2 ? PLLM_FORK_IDLE : 0);
        how.seed = i;
        int32_t code = code_of(pllm_sequence_fork(q->engine, q->sequence, &how, children));
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

static void one_sequence_may_be_forked_and_changed_by_many(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a;
    quarrel q = {.engine = engine};
    pthread_t forking[4], changing[2];
    pllm_queue *unread = new_queue(engine, UINT64_MAX);
    OK(pllm_engine_start(engine));
    q.sequence = ask_and_keep(engine, unread, 1, 600, 1, &a);
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&changing[i], NULL, cut_and_extend, &q) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&forking[i], NULL, fork_and_free, &q) == 0);
    for (int i = 0; i < 4; i++) pthread_join(forking[i], NULL);
    atomic_store(&q.over, true);
    for (int i = 0; i < 2; i++) pthread_join(changing[i], NULL);
    OK(pllm_sequence_free(engine, q.sequence));
    pllm_queue_free(unread);
    wait_until_idle(engine);
    nothing_is_left(engine);
    CHECK(q.forks > 10);
    pllm_engine_free(engine);
}

static void two_engines_do_not_know_each_other_s_sequences(void) {
    pllm_engine *engine = open_engine(model_dir), *other = open_engine(model_dir);
    answer a, b, c;
    pllm_fork how;
    pllm_queue *theirs = new_queue(other, 8);
    uint64_t id = ask_and_keep(engine, NULL, 0, FIRST, 1, &a), child = 0;
    step_to_the_end(engine);
    is_unknown(other, id);
    CHECK(ask_and_keep(other, NULL, 1, FIRST, 1, &b) == id);  // each counts for itself
    step_to_the_end(other);
    pllm_fork_init(&how, sizeof how);
    how.queue = theirs;
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", pllm_sequence_fork(engine, id, &how, &child));
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", try_to_resume(engine, theirs, id, 1, &c));
    FAILS(PLLM_E_INVALID_ARGUMENT, "another engine", pllm_sequence_export(engine, id, theirs));
    OK(pllm_sequence_free(other, id));
    step(other, 1);
    resume(engine, NULL, id, WHOLE - FIRST, &c);
    step_to_the_end(engine);
    CHECK(child == 0 && goes_on(&c, 0, FIRST));
    nothing_is_left(other);
    pllm_queue_free(theirs);
    pllm_engine_free(other);
    pllm_engine_free(engine);
}

// ---- ids ---------------------------------------------------------------------------------------------------------------

static void what_is_freed_or_ended_is_unknown_for_good(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a, b;
    uint64_t kept = ask_and_keep(engine, NULL, 0, 2, 1, &a);
    ask(engine, NULL, 1, 2, &b);
    step_to_the_end(engine);
    is_unknown(engine, b.id);
    OK(pllm_sequence_free(engine, kept));
    is_unknown(engine, kept);  // no step has seen it yet
    step(engine, 1);
    is_unknown(engine, kept);
    FAILS(PLLM_E_NOT_FOUND, "", pllm_engine_abort(engine, kept));
    // One that runs ends with an output that says so.
    ask(engine, NULL, 1, 100, &b);
    step(engine, 3);
    OK(pllm_sequence_free(engine, b.id));
    is_unknown(engine, b.id);
    step_to_the_end(engine);
    CHECK(b.ends == 1 && b.finish_reason == PLLM_FINISH_ABORT && b.tokens_len == 3);
    nothing_is_left(engine);
    pllm_engine_free(engine);
}

static void a_fork_whose_parent_ends_first_says_so(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a, child = {0};
    ask(engine, NULL, 0, 100, &a);
    step(engine, 3);
    OK(pllm_engine_abort(engine, a.id));
    fork_of(engine, a.id, PLLM_FORK_AT_END, NULL, &child);
    step_to_the_end(engine);
    CHECK(a.finish_reason == PLLM_FINISH_ABORT && child.ends == 1 && child.finish_reason == PLLM_FINISH_ERROR);
    is_unknown(engine, child.id);
    nothing_is_left(engine);
    pllm_engine_free(engine);
}

// Asked for while its parent ran, which is kept and ends first: the fork ends too, stays too, and can go on.
static void a_fork_whose_parent_ends_first_and_stays_stays_too(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a, child, again;
    ask_and_keep(engine, NULL, 0, FIRST, 1, &a);
    step(engine, 3);
    OK(pllm_engine_abort(engine, a.id));
    fork_of(engine, a.id, PLLM_FORK_AT_END, NULL, &child);
    CHECK(steps_to_the_end(engine, 50) < 50);
    take(pllm_engine_queue(engine), 0);
    CHECK(child.ends == 1 && look_at(engine, child.id).idle == 1);
    const uint64_t id = child.id;
    resume(engine, NULL, id, WHOLE - 3, &again);
    step_to_the_end(engine);
    CHECK(goes_on(&again, 0, 3));
    OK(pllm_sequence_free(engine, id));
    OK(pllm_sequence_free(engine, a.id));
    step(engine, 1);
    nothing_is_left(engine);
    pllm_engine_free(engine);
}

// It had not branched when it ended, and does not when it goes on.
static void a_request_for_several_that_ended_before_its_first_token_goes_on_alone(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a, again;
    uint64_t id = ask_and_keep(engine, NULL, 0, FIRST, 3, &a);
    OK(pllm_engine_abort(engine, id));
    step(engine, 1);
    a.ends = 0;
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    CHECK(pllm_outputs_len(outputs) == 3);
    pllm_outputs_free(outputs);
    resume(engine, NULL, id, WHOLE, &again);
    step_to_the_end(engine);
    CHECK(goes_on(&again, 0, 0));
    is_unknown(engine, id + 1);
    OK(pllm_sequence_free(engine, id));
    step(engine, 1);
    nothing_is_left(engine);
    pllm_engine_free(engine);
}

// What was appended counts, also where the sequence ended between the call and the step.
static void a_length_is_right_whatever_came_between(void) {
    pllm_engine *engine = open_engine(model_dir);
    answer a, again;
    uint64_t id = ask_and_keep(engine, NULL, 0, FIRST, 1, &a);
    step(engine, 3);
    const uint64_t len = look_at(engine, id).len;
    OK(pllm_engine_abort(engine, id));
    OK(pllm_sequence_append(engine, id, (const uint32_t[]){9, 8, 7, 6}, 4));
    CHECK(look_at(engine, id).len == len + 4);
    step(engine, 1);
    CHECK(look_at(engine, id).len == len + 4 && look_at(engine, id).idle == 1);
    resume(engine, NULL, id, 6, &again);
    step_to_the_end(engine);
    CHECK(again.tokens_len == 6 && again.finish_reason == PLLM_FINISH_LENGTH && look_at(engine, id).len == len + 10);
    pllm_engine_free(engine);
}

// ---- queues and engines that go ----------------------------------------------------------------------------------------

static void freeing_a_queue_ends_the_forks_that_write_to_it_and_nobody_else(void) {
    enum { FORKS = 4, LONG = 300 };
    undisturbed(1, LONG);
    pllm_engine *engine = open_engine(model_dir);
    answer parent, forks[FORKS], kept, other;
    pllm_queue *goes = new_queue(engine, 2), *stays = new_queue(engine, UINT64_MAX);
    OK(pllm_engine_start(engine));
    ask(engine, stays, 1, LONG, &parent);
    while (parent.tokens_len < 5) take(stays, -1);
    for (int i = 0; i < FORKS; i++) fork_of(engine, parent.id, 20, goes, &forks[i]);
    take(goes, -1);
    uint64_t id = ask_and_keep(engine, goes, 0, 1000, 1, &kept);
    pllm_queue_free(goes);
    await(stays, &parent);
    CHECK(is_whole(&parent, 1, LONG));
    wait_until_idle(engine);
    for (int i = 0; i < FORKS; i++) is_unknown(engine, forks[i].id);
    CHECK(stats_of(engine).finished_abort == FORKS + 1);
    // The one that was to stay did; it needs somewhere else to write to.
    uint64_t child = 0;
    FAILS(PLLM_E_INVALID_ARGUMENT, "freed", pllm_sequence_resume(engine, id, NULL));
    FAILS(PLLM_E_INVALID_ARGUMENT, "freed", pllm_sequence_fork(engine, id, NULL, &child));
    FAILS(PLLM_E_INVALID_ARGUMENT, "freed", pllm_sequence_export(engine, id, NULL));
    OK(pllm_sequence_free(engine, copy_of(engine, stays, id)));
    resume(engine, stays, id, 3, &other);
    await(stays, &other);
    CHECK(other.tokens_len == 3);
    OK(pllm_sequence_free(engine, id));
    pllm_queue_free(stays);
    wait_until_idle(engine);
    nothing_is_left(engine);
    pllm_engine_free(engine);
}

static void a_queue_that_goes_before_its_state_come_takes_nothing_along(void) {
    enum { LONG = 300 };
    undisturbed(1, LONG);
    for (int started = 0; started < 2; started++) {
        pllm_engine *engine = open_engine(model_dir);
        answer a;
        ask(engine, NULL, 1, LONG, &a);
        if (started) OK(pllm_engine_start(engine));
        for (int i = 0; i < 20; i++) {
            pllm_queue *states = new_queue(engine, 1);
            OK(pllm_sequence_export(engine, a.id, states));
            pllm_queue_free(states);
            if (!started) step(engine, 1);
        }
        if (!started) step_to_the_end(engine);
        await(pllm_engine_queue(engine), &a);
        if (started) wait_until_idle(engine);
        CHECK(is_whole(&a, 1, LONG) && stats_of(engine).finished_abort == 0);
        nothing_is_left(engine);
        pllm_engine_free(engine);
    }
}

// Two samples of one request, of which the second has been resumed into a queue of its own while the first still runs.
typedef struct {
    pllm_engine *engine;
    pllm_queue *first, *second;
    answer samples, resumed;
} siblings;

static siblings make_siblings(answer *samples, answer *resumed) {
    siblings s = {.engine = open_engine(model_dir)};
    s.first = new_queue(s.engine, UINT64_MAX);
    s.second = new_queue(s.engine, UINT64_MAX);
    uint64_t id = ask_and_keep(s.engine, s.first, 1, 10, 2, samples);
    step(s.engine, 5);
    // So that the first has more to say when the second has ended.
    OK(pllm_sequence_rewind(s.engine, id, look_at(s.engine, id).len - 4));
    for (int i = 0; i < 20 && !look_at(s.engine, id + 1).idle; i++) step(s.engine, 1);
    CHECK(look_at(s.engine, id).idle == 0 && look_at(s.engine, id + 1).idle == 1);
    resume(s.engine, s.second, id + 1, 50, resumed);
    step(s.engine, 1);
    return s;
}

static void a_sample_that_was_resumed_elsewhere_ends_there_with_its_engine(void) {
    static answer samples, resumed;
    siblings s = make_siblings(&samples, &resumed);
    samples.ends = 0;
    pllm_engine_free(s.engine);
    CHECK(take(s.second, -1) == 2 && take(s.second, -1) == -1);
    CHECK(resumed.ends == 1 && resumed.finish_reason == PLLM_FINISH_ABORT && resumed.tokens_len == 1);
    pllm_queue_free(s.first);
    pllm_queue_free(s.second);
}

static void a_sample_that_was_resumed_elsewhere_ends_with_that_queue_and_no_other(void) {
    static answer samples, resumed;
    siblings s = make_siblings(&samples, &resumed);
    pllm_queue_free(s.second);
    CHECK(steps_to_the_end(s.engine, 100) < 20 && stats_of(s.engine).finished_abort == 1);
    pllm_queue_free(s.first);
    pllm_engine_free(s.engine);
    s = make_siblings(&samples, &resumed);
    pllm_queue_free(s.first);
    steps_to_the_end(s.engine, 100);
    take(s.second, 0);
    CHECK(resumed.ends == 1 && resumed.finish_reason == PLLM_FINISH_LENGTH && resumed.tokens_len == 50);
    pllm_queue_free(s.second);
    pllm_engine_free(s.engine);
}

static void an_abort_is_not_lost_to_a_sample_that_is_resumed_after_it(void) {
    static answer samples, resumed;
    siblings s = make_siblings(&samples, &resumed);
    const uint64_t id = samples.id;
    OK(pllm_engine_abort(s.engine, id));
    step(s.engine, 1);
    answer again, once_more;
    resume(s.engine, s.second, id, 100, &again);
    OK(pllm_engine_abort(s.engine, id));
    resume(s.engine, s.second, id + 1, 100, &once_more);  // before any step has seen the abort
    step(s.engine, 3);
    OK(pllm_engine_abort(s.engine, id));
    CHECK(steps_to_the_end(s.engine, 50) < 3);
    take(s.second, 0);
    CHECK(again.ends == 1 && once_more.ends == 1 && once_more.finish_reason == PLLM_FINISH_ABORT);
    pllm_queue_free(s.first);
    pllm_queue_free(s.second);
    pllm_engine_free(s.engine);
}

static void a_turn_that_no_step_has_seen_ends_with_its_engine_as_itself(void) {
    static answer first, second;
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 8);
    uint64_t id = ask_and_keep(engine, NULL, 0, 5, 1, &first);
    step_to_the_end(engine);
    resume(engine, queue, id, 5, &second);
    pllm_engine_free(engine);
    CHECK(take(queue, -1) == 1 && take(queue, -1) == -1);
    CHECK(first.ends == 1 && second.ends == 1 && second.finish_reason == PLLM_FINISH_ABORT && second.tokens_len == 0);
    pllm_queue_free(queue);
}

static void an_engine_may_go_with_idle_sequences_and_pins(void) {
    int files = 0;
    for (int i = 0; i < 30; i++) {
        pllm_engine *engine = open_engine(model_dir);
        pllm_pin pin;
        uint64_t id, pinned, children[8];
        answer a;
        pllm_fork how;
        pllm_fork_init(&how, sizeof how);
        how.n = COUNT(children);
        pllm_pin_init(&pin, sizeof pin);
        pin.prompt = prompts[0];
        OK(pllm_prefix_pin(engine, &pin, &pinned));
        id = ask_and_keep(engine, NULL, 0, FIRST, 1, &a);
        step_to_the_end(engine);
        OK(pllm_sequence_fork(engine, id, &how, children));
        if (i % 2) step(engine, 1), CHECK(stats_of(engine).idle == 1 + COUNT(children));
        if (i % 3) OK(pllm_sequence_resume(engine, children[0], NULL));
        if (i % 5) OK(pllm_sequence_export(engine, id, NULL));
        pllm_engine_free(engine);
        if (i == 3) files = descriptors();
    }
    CHECK(descriptors() == files);
}

// ---- room --------------------------------------------------------------------------------------------------------------

// Three samples fit the pool while they share a prompt. Grown apart they do not: they take turns, and all end.
static void samples_that_outgrow_the_pool_together_end_all_the_same(void) {
    enum { PROMPT = 64, BLOCK_BYTES = 32768, SAMPLES = 3 };
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) prompt[i] = 10 + i;
    for (int grow = 0; grow < 2; grow++) {
        pllm_engine_options options = options_for(model_dir);
        options.kv_bytes = 7 * BLOCK_BYTES;
        options.max_model_len = 100;
        pllm_engine *engine = NULL;
        pllm_sampling sampling = greedily(2);
        pllm_request request;
        uint64_t id = 0;
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_request_init(&request, sizeof request);
        request.prompt_token_ids = prompt;
        request.prompt_token_ids_len = PROMPT;
        request.sampling = &sampling;
        request.n = SAMPLES;
        OK(pllm_engine_add_request(engine, &request, &id));
        step(engine, 1);
        for (uint64_t i = 0; i < SAMPLES; i++)
            OK(grow ? pllm_sequence_append(engine, id + i, prompt, 33 - i) : pllm_sequence_rewind(engine, id + i, 1 + i));
        CHECK(steps_to_the_end(engine, 1000) < 1000);
        CHECK(stats_of(engine).finished_length == SAMPLES);
        nothing_is_left(engine);
        pllm_engine_free(engine);
    }
}

// Also one token, or one more than a block, or than a block that is found: nothing is chosen after it.
static void a_prompt_of_any_length_may_be_pinned(void) {
    uint32_t prompt[40];
    for (uint32_t i = 0; i < COUNT(prompt); i++) prompt[i] = 10 + i;
    for (int prefilled = 0; prefilled < 2; prefilled++) {
        pllm_engine *engine = open_engine(model_dir);
        for (uint64_t len = 1; len <= COUNT(prompt); len++) {
            pllm_pin pin;
            uint64_t id = 0;
            pllm_pin_init(&pin, sizeof pin);
            pin.prompt_token_ids = prompt;
            pin.prompt_token_ids_len = len;
            pin.cache_salt = (const uint8_t *)&len;
            pin.cache_salt_len = prefilled ? 0 : sizeof len;
            OK(pllm_prefix_pin(engine, &pin, &id));
            step(engine, 2);
            CHECK(stats_of(engine).blocks_used == (len + 15) / 16 && stats_of(engine).generated_tokens == 0);
            OK(pllm_prefix_unpin(engine, id));
        }
        step(engine, 1);
        nothing_is_left(engine);
        pllm_engine_free(engine);
    }
}

// ---- hooks -------------------------------------------------------------------------------------------------------------

typedef struct {
    pllm_engine *engine;
    const pllm_queue *queue;
    atomic_uint calls, forks;
    uint64_t added;
    answer extra, child;
} meddler;

// Makes every token the one after the last, and does all that a thread may do.
static void meddle(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits, uint64_t vocab_size) {
    meddler *m = data;
    pllm_step report = {.struct_size = sizeof report};
    pllm_outputs *outputs = NULL;
    unsigned call = atomic_fetch_add(&m->calls, 1);
    FAILS(PLLM_E_BUSY, "", pllm_engine_step(m->engine, &report));
    CHECK(stats_of(m->engine).steps < 1000);
    CHECK(code_of(pllm_queue_poll(m->queue, 0, &outputs)) == 0);
    pllm_outputs_free(outputs);
    if (call == 2) ask(m->engine, NULL, 0, 5, &m->extra);
    if (call == 3) fork_of(m->engine, sequence, PLLM_FORK_AT_END, NULL, &m->child);
    if (call == 4) CHECK(code_of(pllm_engine_abort(m->engine, 1u << 30)) == PLLM_E_NOT_FOUND);
    const uint32_t next = (tokens[tokens_len - 1] + 1) % (uint32_t)vocab_size;
    for (uint64_t i = 0; i < vocab_size; i++) logits[i] = i == next ? 0 : -INFINITY;
}

static void a_hook_that_edits_may_call_what_any_thread_may(void) {
    enum { TOKENS = 12 };
    for (int started = 0; started < 2; started++) {
        static meddler m;
        pllm_engine *engine = open_engine(model_dir);
        pllm_queue *unused = new_queue(engine, 8);
        pllm_sampling sampling = greedily(TOKENS);
        pllm_request request;
        answer a = {0};
        m = (meddler){.engine = engine, .queue = unused};
        pllm_request_init(&request, sizeof request);
        request.prompt_token_ids = (const uint32_t[]){500};
        request.prompt_token_ids_len = 1;
        request.sampling = &sampling;
        request.user_data = (uintptr_t)&a;
        request.logits_hook = meddle;
        request.hook_data = &m;
        OK(pllm_engine_add_request(engine, &request, &a.id));
        if (started) OK(pllm_engine_start(engine));
        if (!started) step_to_the_end(engine);
        while (!a.ends || !m.extra.ends || !m.child.ends) take(pllm_engine_queue(engine), -1);
        CHECK(a.tokens_len == TOKENS && m.extra.tokens_len == 5 && m.child.ends == 1);
        for (uint32_t i = 0; i < TOKENS; i++) CHECK(a.tokens[i] == 501 + i);
        // The fork has its parent's hook, and goes on where it was.
        for (size_t i = 0; i < m.child.tokens_len; i++) CHECK(m.child.tokens[i] == 501 + TOKENS - m.child.tokens_len + i);
        CHECK(m.calls == TOKENS + m.child.tokens_len);
        pllm_queue_free(unused);
        pllm_engine_free(engine);
    }
}

static void forget_all(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits, uint64_t vocab_size) {
    (void)sequence, (void)tokens, (void)tokens_len;
    for (uint64_t i = 0; i < vocab_size; i++) logits[i] = *(const float *)data;
}

// What a hook leaves that is no distribution ends the request that has it, and no other.
static void a_hook_that_leaves_nothing_to_choose_from_ends_its_request(void) {
    static const float leavings[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < COUNT(leavings); i++)
        for (int greedy = 0; greedy < 2; greedy++) {
            pllm_engine *engine = open_engine(model_dir);
            pllm_sampling sampling = greedily(5);
            pllm_request request;
            answer a = {0}, other;
            sampling.temperature = greedy ? 0 : 1;
            pllm_request_init(&request, sizeof request);
            request.prompt = "Hello";
            request.sampling = &sampling;
            request.user_data = (uintptr_t)&a;
            request.logits_hook = forget_all;
            request.hook_data = (void *)(uintptr_t)&leavings[i];
            OK(pllm_engine_add_request(engine, &request, &a.id));
            ask(engine, NULL, 0, WHOLE, &other);
            step_to_the_end(engine);
            CHECK(a.ends == 1 && a.finish_reason == PLLM_FINISH_ERROR && is_whole(&other, 0, WHOLE));
            pllm_engine_free(engine);
        }
}

const test_case sequence_cases[] = {
    CASE(sixteen_threads_fork_append_rewind_resume_move_and_free),
    CASE(one_sequence_may_be_forked_and_changed_by_many),
    CASE(two_engines_do_not_know_each_other_s_sequences),
    CASE(what_is_freed_or_ended_is_unknown_for_good),
    CASE(a_fork_whose_parent_ends_first_says_so),
    CASE(a_fork_whose_parent_ends_first_and_stays_stays_too),
    CASE(a_request_for_several_that_ended_before_its_first_token_goes_on_alone),
    CASE(a_length_is_right_whatever_came_between),
    CASE(freeing_a_queue_ends_the_forks_that_write_to_it_and_nobody_else),
    CASE(a_queue_that_goes_before_its_state_come_takes_nothing_along),
    CASE(a_sample_that_was_resumed_elsewhere_ends_there_with_its_engine),
    CASE(a_sample_that_was_resumed_elsewhere_ends_with_that_queue_and_no_other),
    CASE(an_abort_is_not_lost_to_a_sample_that_is_resumed_after_it),
    CASE(a_turn_that_no_step_has_seen_ends_with_its_engine_as_itself),
    CASE(an_engine_may_go_with_idle_sequences_and_pins),
    CASE(samples_that_outgrow_the_pool_together_end_all_the_same),
    CASE(a_prompt_of_any_length_may_be_pinned),
    CASE(a_hook_that_edits_may_call_what_any_thread_may),
    CASE(a_hook_that_leaves_nothing_to_choose_from_ends_its_request),
    {0},
};
