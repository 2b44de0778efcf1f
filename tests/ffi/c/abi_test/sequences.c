// Sequences: samples, beams, keep, fork, rewind, append, resume.
#include "abi_test.h"

#include <math.h>

static void invalid_samples_and_beams_are_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request;
    pllm_beam beam;
    sampling.max_tokens = 2;
#define REQUEST(assignment, refusal)                         \
    (request = token_request(&sampling), request.assignment, \
     refusal(add_and_abort(engine, &request)))
    REQUEST(n = 2, OK);
    REQUEST(n = UINT32_MAX, INVALID);
    REQUEST(best_of = UINT32_MAX, INVALID);
    REQUEST(n = 17, INVALID);  // max_seqs is 16
    REQUEST(flags = 2, UNSUPPORTED);
    REQUEST(reserved = 1, UNSUPPORTED);
    request = token_request(&sampling);
    request.n = 3;
    request.best_of = 2;
    INVALID(add_and_abort(engine, &request));
#define BEAM(assignment, refusal) \
    (pllm_beam_init(&beam, sizeof beam), beam.assignment, REQUEST(beam = &beam, refusal))
    BEAM(width = 4, OK);
    BEAM(width = 1, INVALID);
    BEAM(width = 65, INVALID);
    BEAM(width = 17, INVALID);
    BEAM(width = UINT32_MAX, INVALID);
    BEAM(groups = 0, INVALID);
    BEAM(groups = 3, INVALID);
    BEAM(groups = 2, INVALID);  // without a diversity penalty
    BEAM(diversity_penalty = NAN, INVALID);
    BEAM(length_penalty = INFINITY, INVALID);
    BEAM(early_stopping = 3, INVALID);
    BEAM(reserved = 1, UNSUPPORTED);
    pllm_beam_init(&beam, sizeof beam);
    request = token_request(&sampling);
    request.beam = &beam;
    request.flags = PLLM_REQUEST_KEEP;
    INVALID(add_and_abort(engine, &request));
    step_to_the_end(engine);
    discard_outputs(engine);
    CHECK(is_idle(engine));
}

static void invalid_sequence_calls_are_refused(const pllm_engine *engine) {
    static const uint32_t many[5000] = {1}, beyond[] = {1, 2, 3, UINT32_MAX};
    const uint64_t id = keep_sequence(engine, 3), len = COUNT(PROMPT) + 3;
    uint64_t out[4] = {77, 77, 77, 77};
    pllm_fork options;
    pllm_resume resume;
    pllm_pin pin;
    pllm_sampling sampling = greedy();
#define FORK(assignment, refusal)                                  \
    (pllm_fork_init(&options, sizeof options), options.assignment, \
     refusal(pllm_sequence_fork(engine, id, &options, out)))
    FORK(at = 0, INVALID);
    FORK(at = len + 1, INVALID);
    FORK(at = UINT64_MAX - 1, INVALID);
    FORK(n = 0, INVALID);
    FORK(n = UINT32_MAX, CAPACITY);
    FORK(flags = 8, UNSUPPORTED);
    INVALID(pllm_sequence_append(engine, id, (const uint32_t[]){1, UINT32_MAX}, 2));
    INVALID(pllm_sequence_append(engine, id, (const uint32_t[]){1024}, 1));
    INVALID(pllm_sequence_append(engine, id, many, COUNT(many)));
    INVALID(pllm_sequence_rewind(engine, id, 0));
    INVALID(pllm_sequence_rewind(engine, id, len + 1));
    INVALID(pllm_sequence_rewind(engine, id, UINT64_MAX));
#define RESUME(assignment, refusal)                               \
    (pllm_resume_init(&resume, sizeof resume), resume.assignment, \
     refusal(pllm_sequence_resume(engine, id, &resume)))
    RESUME(flags = 8, UNSUPPORTED);
    RESUME(flags = PLLM_RESUME_CONTINUE | 8, UNSUPPORTED);
    RESUME(text_flags = PLLM_TEXT_ADD_SPECIAL, UNSUPPORTED);
    sampling.flags = PLLM_SAMPLING_ECHO;
    RESUME(sampling = &sampling, INVALID);
    sampling.flags = PLLM_SAMPLING_PROMPT_LOGPROBS;
    RESUME(sampling = &sampling, INVALID);
    sampling = greedy();
    sampling.temperature = NAN;
    RESUME(sampling = &sampling, INVALID);
#define PIN(assignment, refusal) \
    (pin = token_pin(), pin.assignment, refusal(pllm_prefix_pin(engine, &pin, out)))
    PIN(text_flags = PLLM_TEXT_SKIP_SPECIAL, UNSUPPORTED);
    PIN(prompt_token_ids_len = 0, INVALID);
    PIN(prompt_token_ids = beyond, INVALID);
    pin.prompt_token_ids = many;
    pin.prompt_token_ids_len = COUNT(many);
    INVALID(pllm_prefix_pin(engine, &pin, out));
    for (size_t i = 0; i < COUNT(out); i++) CHECK(out[i] == 77);
    CHECK(info_of(engine, id).idle == 1 && info_of(engine, id).len == len);
    OK(pllm_sequence_resume(engine, id, NULL));
    INVALID(pllm_sequence_resume(engine, id, NULL));  // already running
    free_sequence(engine, id);
    discard_outputs(engine);
    CHECK(is_idle(engine));
}

static void freed_and_ended_sequences_are_not_found(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_pin pin = token_pin();
    uint64_t not_kept = 0, pinned = 0;
    for (size_t i = 0; i < COUNT(UNKNOWN_IDS); i++)
        check_every_call_is_not_found(engine, UNKNOWN_IDS[i]);
    sampling.max_tokens = 2;
    OK(pllm_engine_add_request(engine, &request, &not_kept));
    step_to_the_end(engine);
    check_every_call_is_not_found(engine, not_kept);
    uint64_t freed = keep_sequence(engine, 1);
    OK(pllm_sequence_free(engine, freed));
    check_every_call_is_not_found(engine, freed);  // unknown from this call on
    step_of(engine);
    check_every_call_is_not_found(engine, freed);
    OK(pllm_prefix_pin(engine, &pin, &pinned));
    OK(pllm_prefix_unpin(engine, pinned));
    check_every_call_is_not_found(engine, pinned);
    step_of(engine);
    discard_outputs(engine);
    CHECK(is_idle(engine));
}

// Any number of samples, aborted before, at and after the first token.
static void kept_sequences_are_idle_after_an_abort(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    sampling.max_tokens = 100;
    request.flags = PLLM_REQUEST_KEEP;
    for (uint32_t n = 1; n <= 3; n++)
        for (int steps = 0; steps < 3; steps++) {
            uint64_t id = 0, started = steps ? n : 1;
            request.n = n;
            OK(pllm_engine_add_request(engine, &request, &id));
            for (int i = 0; i < steps; i++) step_of(engine);
            OK(pllm_engine_abort(engine, id));
            CHECK(step_of(engine).unfinished == 0);
            CHECK(stats_of(engine).idle == started);
            for (uint64_t i = 0; i < started; i++) CHECK(info_of(engine, id + i).idle == 1);
            for (uint64_t i = 0; i < started; i++) OK(pllm_sequence_free(engine, id + i));
            step_of(engine);
            CHECK(is_idle(engine));
        }
    discard_outputs(engine);
}

// Outputs of all sequences of a request, by index.
typedef struct {
    uint64_t outputs, ends, tokens_len, request;
    uint64_t sequences[8];
    uint32_t tokens[8][64], lens[8];
    double scores[8];
} branch_outputs;

static void collect_branches(const pllm_engine *engine, branch_outputs *b) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        if (o->request != b->request ||
            !CHECK(o->index < 8 && b->lens[o->index] + o->tokens_len <= 64))
            continue;
        b->outputs++;
        b->ends += o->finish_reason != PLLM_FINISH_NONE;
        b->sequences[o->index] = o->sequence;
        b->scores[o->index] = o->score;
        for (uint64_t t = 0; t < o->tokens_len; t++)
            b->tokens[o->index][b->lens[o->index]++] = o->tokens[t];
    }
    pllm_outputs_free(outputs);
}

static branch_outputs run_branches(const pllm_engine *engine, const pllm_request *request) {
    branch_outputs b = {0};
    OK(pllm_engine_add_request(engine, request, &b.request));
    step_to_the_end(engine);
    collect_branches(engine, &b);
    CHECK(b.ends == request->n && is_idle(engine));
    return b;
}

// A beam search emits no output before its end, and its beams cannot be changed one by one.
static void check_beams_are_inseparable(const pllm_engine *engine, const pllm_request *request) {
    branch_outputs b = {0};
    uint64_t out = 77;
    OK(pllm_engine_add_request(engine, request, &b.request));
    for (int i = 0; i < 3; i++) step_of(engine);
    collect_branches(engine, &b);
    CHECK(b.outputs == 0);
    INVALID(pllm_sequence_fork(engine, b.request, NULL, &out));
    INVALID(pllm_sequence_append(engine, b.request, PROMPT, 1));
    INVALID(pllm_sequence_rewind(engine, b.request, 1));
    INVALID(pllm_sequence_export(engine, b.request, NULL));
    INVALID(pllm_sequence_free(engine, b.request));
    check_every_call_is_not_found(engine, b.request + 1);
    OK(pllm_engine_abort(engine, b.request));
    step_to_the_end(engine);
    collect_branches(engine, &b);
    CHECK(b.ends == request->n && b.outputs == request->n && out == 77 && is_idle(engine));
}

static void samples_stream_and_best_of_and_beams_return_at_the_end(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    pllm_beam beam;
    sampling.temperature = 1.5f;
    sampling.max_tokens = 20;
    sampling.flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS;
    sampling.seed = 9;
    request.n = 3;
    branch_outputs samples = run_branches(engine, &request);
    CHECK(samples.outputs == 60);
    for (uint64_t i = 0; i < 3; i++)
        CHECK(samples.sequences[i] == samples.request + i && samples.lens[i] == 20);
    CHECK(memcmp(samples.tokens[0], samples.tokens[1], sizeof samples.tokens[0]));
    request.best_of = 3;
    request.n = 1;
    branch_outputs best = run_branches(engine, &request);
    double max_score = samples.scores[0];
    for (int i = 1; i < 3; i++)
        max_score = samples.scores[i] > max_score ? samples.scores[i] : max_score;
    CHECK(best.outputs == 1 && best.lens[0] == 20 && best.scores[0] > max_score - 1e-4 &&
          best.scores[0] < max_score + 1e-4);
    sampling = greedy();
    sampling.max_tokens = 6;
    pllm_beam_init(&beam, sizeof beam);
    request.best_of = 0;
    request.n = 2;
    request.beam = &beam;
    for (beam.width = 2; beam.width <= 4; beam.width += 2) {
        branch_outputs beams = run_branches(engine, &request);
        CHECK(beams.outputs == 2 && beams.lens[0] > 0 && beams.lens[1] > 0 &&
              beams.scores[0] >= beams.scores[1]);
        check_every_call_is_not_found(engine, beams.request);
        check_every_call_is_not_found(engine, beams.request + 1);
    }
    check_beams_are_inseparable(engine, &request);
}

// A resumed sequence generates what one long prompt would, and only new tokens are computed.
static void resumed_conversation_equals_one_prompt(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request first = text_request(FRANCE, &sampling), one_prompt;
    pllm_resume resume;
    pllm_tokens *next = NULL;
    generation a = {0}, b = {0};
    uint32_t all_tokens[256];
    uint64_t id = 0, len = 0, before;
    pllm_step step;
    sampling.max_tokens = 40;
    first.flags = PLLM_REQUEST_KEEP;
    OK(pllm_engine_add_request(engine, &first, &id));
    for (step = step_of(engine); step.unfinished; step = step_of(engine))
        collect_outputs(engine, id, &a);
    collect_outputs(engine, id, &a);
    const char *message = "\n<|user|>\nWhat is the capital of Japan?<|end|>\n<|assistant|>\n";
    OK(pllm_engine_tokenize(engine, message, PLLM_NUL_TERMINATED, 0, &next));
    OK(pllm_sequence_append(engine, id, pllm_tokens_data(next), pllm_tokens_len(next)));
    before = stats_of(engine).prompt_tokens;
    pllm_resume_init(&resume, sizeof resume);
    resume.sampling = &sampling;
    OK(pllm_sequence_resume(engine, id, &resume));
    for (step = step_of(engine); step.unfinished; step = step_of(engine))
        collect_outputs(engine, id, &b);
    collect_outputs(engine, id, &b);
    // The last sampled token had no KV entry yet, so it is computed as well.
    CHECK(stats_of(engine).prompt_tokens - before == pllm_tokens_len(next) + 1);
    CHECK(b.prompt_tokens == a.prompt_tokens + a.tokens_len + pllm_tokens_len(next) &&
          b.finish_reason == PLLM_FINISH_STOP);
    pllm_tokens *prompt = NULL;
    OK(pllm_engine_tokenize(engine, FRANCE, PLLM_NUL_TERMINATED, 0, &prompt));
    const struct {
        const uint32_t *tokens;
        uint64_t len;
    } parts[] = {{pllm_tokens_data(prompt), pllm_tokens_len(prompt)},
                 {a.tokens, a.tokens_len},
                 {pllm_tokens_data(next), pllm_tokens_len(next)}};
    for (size_t i = 0; i < COUNT(parts); len += parts[i++].len)
        memcpy(all_tokens + len, parts[i].tokens, parts[i].len * sizeof *all_tokens);
    one_prompt = token_request(&sampling);
    one_prompt.prompt_token_ids = all_tokens;
    one_prompt.prompt_token_ids_len = len;
    CHECK(same_generation(run_request(engine, &one_prompt), &b));
    pllm_tokens_free(prompt);
    pllm_tokens_free(next);
    free_sequence(engine, id);
    CHECK(is_idle(engine));
}

static void rewound_sequence_and_its_fork_repeat_the_same_tokens(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    pllm_fork options;
    branch_outputs b = {0}, again = {0}, children[2] = {{0}, {0}};
    uint64_t ids[2] = {0, 0};
    sampling.temperature = 1.2f;
    sampling.flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS;
    sampling.seed = 5;
    sampling.max_tokens = 20;
    OK(pllm_engine_add_request(engine, &request, &b.request));
    for (int i = 0; i < 10; i++) step_of(engine);
    collect_branches(engine, &b);
    const uint64_t len = info_of(engine, b.request).len, prompt = len - 10;
    pllm_fork_init(&options, sizeof options);
    options.at = prompt + 2;
    OK(pllm_sequence_fork(engine, b.request, &options, &ids[0]));
    options.flags = PLLM_FORK_SEED | PLLM_FORK_USER_DATA;
    options.seed = 6;
    options.user_data = 4711;
    OK(pllm_sequence_fork(engine, b.request, &options, &ids[1]));
    OK(pllm_sequence_rewind(engine, b.request, prompt + 2));
    for (int i = 0; i < 8; i++) step_of(engine);
    again.request = b.request;
    for (int i = 0; i < 2; i++) children[i].request = ids[i];
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        branch_outputs *to = o->request == again.request ? &again
                             : o->request == ids[0]      ? &children[0]
                                                         : &children[1];
        CHECK(o->tokens_len == 1 && o->index == 0 && o->sequence == to->request &&
              to->lens[0] < 64);
        CHECK(o->user_data == (to == &children[1] ? 4711 : 0));
        to->tokens[0][to->lens[0]++] = o->tokens[0];
    }
    pllm_outputs_free(outputs);
    CHECK(again.lens[0] == 8 && !memcmp(again.tokens[0], b.tokens[0] + 2, 8 * sizeof(uint32_t)));
    CHECK(children[0].lens[0] == 8 &&
          !memcmp(children[0].tokens[0], b.tokens[0] + 2, 8 * sizeof(uint32_t)));
    CHECK(children[1].lens[0] == 8 &&
          memcmp(children[1].tokens[0], b.tokens[0] + 2, 8 * sizeof(uint32_t)));
    CHECK(stats_of(engine).blocks_copied > 0);
    for (int i = 0; i < 2; i++) OK(pllm_sequence_free(engine, ids[i]));
    free_sequence(engine, b.request);
    discard_outputs(engine);
    CHECK(is_idle(engine));
}

const test sequences_tests[] = {
    WITH_BUNDLED(invalid_samples_and_beams_are_refused),
    WITH_BUNDLED(invalid_sequence_calls_are_refused),
    WITH_BUNDLED(freed_and_ended_sequences_are_not_found),
    WITH_BUNDLED(kept_sequences_are_idle_after_an_abort),
    WITH_BUNDLED(samples_stream_and_best_of_and_beams_return_at_the_end),
    WITH_BUNDLED(resumed_conversation_equals_one_prompt),
    WITH_BUNDLED(rewound_sequence_and_its_fork_repeat_the_same_tokens),
    {0},
};
