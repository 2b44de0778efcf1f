// Sampling parameters: invalid values, ends of generation, log probabilities, hooks, grammars.
#include "abi_test.h"

#include <math.h>

static void invalid_sampling_is_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
#define SAMPLING(assignment, refusal) \
    (sampling = greedy(), sampling.assignment, refusal(add_and_abort(engine, &request)))
    const float invalid[] = {NAN, -NAN, INFINITY, -INFINITY, -1, 1e30f};
    for (size_t i = 0; i < COUNT(invalid); i++) {
        SAMPLING(temperature = invalid[i], INVALID);
        SAMPLING(top_p = invalid[i], INVALID);
        SAMPLING(min_p = invalid[i], INVALID);
    }
    SAMPLING(top_p = 0, INVALID);
    SAMPLING(seed = 3, INVALID);  // without PLLM_SAMPLING_SEED
    SAMPLING(flags = 2 * PLLM_SAMPLING_PREFILL_PROGRESS, UNSUPPORTED);
    SAMPLING(reserved = 1, UNSUPPORTED);
    sampling = greedy();
    sampling.max_tokens = 3;
    sampling.min_tokens = 4;
    INVALID(add_and_abort(engine, &request));
    sampling = greedy();
    sampling.stop_token_ids = (const uint32_t[]){UINT32_MAX};
    sampling.stop_token_ids_len = 1;
    INVALID(add_and_abort(engine, &request));
    sampling = greedy();
    sampling.stop = (const char *const[]){""};
    sampling.stop_count = 1;
    INVALID(add_and_abort(engine, &request));
    request = token_request(NULL);
    request.text_flags = 4;
    UNSUPPORTED(add_and_abort(engine, &request));
    request = token_request(NULL);
    request.n = 0;
    INVALID(add_and_abort(engine, &request));
}

static void logprobs_are_returned_only_with_their_flag(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const generation *without = run_request(engine, &request);
    sampling.flags = PLLM_SAMPLING_LOGPROBS;
    const generation *with = run_request(engine, &request);
    CHECK(same_generation(with, without) && with->logprobs_len == with->tokens_len);
    for (uint64_t i = 0; i < with->logprobs_len; i++)
        CHECK(with->logprobs[i] <= 0 && with->logprobs[i] > -20);
}

static void generation_ends_at_max_tokens(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    for (uint32_t max = 1; max <= 9; max += 4) {
        sampling.max_tokens = max;
        const generation *a = run_request(engine, &request);
        CHECK(a->finish_reason == PLLM_FINISH_LENGTH && a->tokens_len == max &&
              text_matches_tokens(engine, a));
    }
}

static void prompt_is_scored_without_a_token(const pllm_engine *engine) {
    for (uint64_t start = 0; start <= COUNT(PROMPT); start++) {
        pllm_sampling sampling = greedy();
        pllm_request request = token_request(&sampling);
        pllm_outputs *outputs = NULL;
        uint64_t id = 0;
        sampling.max_tokens = 0;
        sampling.flags = PLLM_SAMPLING_PROMPT_LOGPROBS;
        sampling.output_kind = PLLM_OUTPUT_FINAL;
        sampling.prompt_logprobs_start = start;
        if (start == COUNT(PROMPT)) {
            FAILS(PLLM_E_INVALID_ARGUMENT, pllm_engine_add_request(engine, &request, &id));
            continue;
        }
        OK(pllm_engine_add_request(engine, &request, &id));
        step_to_the_end(engine);
        OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        CHECK(pllm_outputs_len(outputs) == 1);
        const pllm_output *o = pllm_outputs_get(outputs, 0);
        CHECK(o->finish_reason == PLLM_FINISH_LENGTH && o->tokens_len == 0);
        CHECK(o->generated_tokens == 0 && o->prompt_tokens == COUNT(PROMPT));
        CHECK(o->prompt_logprobs_len == COUNT(PROMPT) - (start ? start : 1));
        for (uint64_t i = 0; i < o->prompt_logprobs_len; i++) CHECK(o->prompt_logprobs[i] < 0);
        pllm_outputs_free(outputs);
    }
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    uint64_t id = 0;
    sampling.max_tokens = 0;
    request.n = 2;
    FAILS(PLLM_E_INVALID_ARGUMENT, pllm_engine_add_request(engine, &request, &id));
    CHECK(is_idle(engine));
}

static void ignore_eos_continues_past_the_eos_token(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const generation *stopped = run_request(engine, &request);
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    sampling.max_tokens = (uint32_t)stopped->tokens_len + 10;
    const generation *a = run_request(engine, &request);
    CHECK(a->finish_reason == PLLM_FINISH_LENGTH && a->tokens_len == stopped->tokens_len + 10);
    CHECK(!memcmp(a->tokens, stopped->tokens, stopped->tokens_len * sizeof *a->tokens));
    CHECK(text_matches_tokens(engine, a));
}

static void stop_token_ends_generation_and_its_text_is_omitted(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const generation *expected = run_request(engine, &request);
    sampling.stop_token_ids = (const uint32_t[]){1000, expected->tokens[4]};
    sampling.stop_token_ids_len = 2;
    const generation *a = run_request(engine, &request);
    CHECK(a->finish_reason == PLLM_FINISH_STOP && a->tokens_len == 5 &&
          text_matches_tokens(engine, a));
    CHECK(text_is(a, expected->text, expected->text_ends[3]));
}

// For each pair of neighbouring tokens: a stop string that begins in the first and ends in the
// second token.
static void stop_string_across_tokens_ends_generation_and_is_omitted(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const generation expected = *run_request(engine, &request);
    int tried = 0;
    for (uint64_t i = 0; i + 2 < expected.tokens_len; i++) {
        if (expected.text_ends[i] == 0 || expected.text_ends[i + 1] == expected.text_ends[i])
            continue;
        const char stop[3] = {expected.text[expected.text_ends[i] - 1],
                              expected.text[expected.text_ends[i]], 0};
        const char *stops[] = {"absent", stop};
        sampling.stop = stops;
        sampling.stop_count = 2;
        const generation *a = run_request(engine, &request);
        CHECK(a->finish_reason == PLLM_FINISH_STOP && a->tokens_len < expected.tokens_len);
        CHECK(text_is(a, expected.text, (uint64_t)(strstr(expected.text, stop) - expected.text)));
        tried++;
    }
    CHECK(tried > 5);
    // Lengths instead of NULs. A stop string that never occurs withholds no text.
    sampling.stop = (const char *const[]){"Parisian"};
    sampling.stop_lens = (const uint64_t[]){5};
    sampling.stop_count = 1;
    CHECK(text_is(run_request(engine, &request), PARIS, strlen("The capital of France is ")));
    sampling.stop_lens = NULL;
    CHECK(text_is(run_request(engine, &request), PARIS, strlen(PARIS)));
}

static void equal_seeds_give_equal_tokens(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    sampling.temperature = 1.5f;
    sampling.max_tokens = 20;
    sampling.flags = PLLM_SAMPLING_SEED;
    sampling.seed = 3;
    const generation *a = run_request(engine, &request), *b = run_request(engine, &request);
    CHECK(same_generation(a, b));
    sampling.seed = 4;
    CHECK(!same_generation(a, run_request(engine, &request)));
}

static void invalid_penalties_grammars_and_reports_are_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    const float invalid[] = {NAN, -NAN, INFINITY, -INFINITY, -3, 1e30f};
    for (size_t i = 0; i < COUNT(invalid); i++) {
        SAMPLING(typical_p = invalid[i], INVALID);
        SAMPLING(top_n_sigma = invalid[i], INVALID);
        SAMPLING(xtc_probability = invalid[i], INVALID);
        SAMPLING(xtc_threshold = invalid[i], INVALID);
        SAMPLING(mirostat_tau = invalid[i], INVALID);
        SAMPLING(presence_penalty = invalid[i], INVALID);
        SAMPLING(frequency_penalty = invalid[i], INVALID);
        SAMPLING(repetition_penalty = invalid[i], INVALID);
    }
    SAMPLING(repetition_penalty = 0, INVALID);
    SAMPLING(no_repeat_ngram_size = 257, INVALID);
    SAMPLING(top_logprobs = 1, INVALID);  // without PLLM_SAMPLING_LOGPROBS
    SAMPLING(prompt_top_logprobs = 1, INVALID);
    SAMPLING(output_kind = 3, INVALID);
    SAMPLING(grammar_kind = 6, INVALID);
    SAMPLING(grammar = "x", INVALID);  // without a grammar kind
    SAMPLING(logit_bias_len = 5000, INVALID);
    sampling = greedy();
    sampling.flags = PLLM_SAMPLING_LOGPROBS;
    sampling.top_logprobs = 129;
    INVALID(add_and_abort(engine, &request));
    static const struct {
        uint32_t kind;
        const char *grammar;
    } invalid_grammars[] = {
        {PLLM_GRAMMAR_JSON_SCHEMA, "{"}, {PLLM_GRAMMAR_JSON_SCHEMA, "{\"type\": \"nothing\"}"},
        {PLLM_GRAMMAR_REGEX, "("},       {PLLM_GRAMMAR_LARK, "start: ("},
        {PLLM_GRAMMAR_LARK, ""},         {PLLM_GRAMMAR_REGEX, "\xff"},
    };
    for (size_t i = 0; i < COUNT(invalid_grammars); i++) {
        sampling = greedy();
        sampling.grammar_kind = invalid_grammars[i].kind;
        sampling.grammar = invalid_grammars[i].grammar;
        INVALID(add_and_abort(engine, &request));
    }
    sampling = greedy();
    sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;  // no choices
    INVALID(add_and_abort(engine, &request));
    CHECK(step_of(engine).sequences == 0 && is_idle(engine));
}

// Every list has the length of the list that it belongs to.
static void check_lists(const pllm_output *o, uint64_t top, uint64_t prompt_top) {
    int possible = 1;
    // NaN: the first token of an echoed prompt has none.
    for (uint64_t i = 0; o->logprobs && i < o->tokens_len; i++) possible &= !(o->logprobs[i] > 0);
    for (uint64_t i = 0; i < o->prompt_logprobs_len; i++) possible &= o->prompt_logprobs[i] <= 0;
    for (uint64_t i = 0; i < o->top_logprobs_len; i++)
        possible &= !(o->top_logprobs[i].logprob > 0);
    for (uint64_t i = 0; i < o->prompt_top_logprobs_len; i++)
        possible &= o->prompt_top_logprobs[i].logprob <= 0;
    CHECK(possible);
    CHECK(o->top_logprobs_len == (o->logprobs ? top * o->tokens_len : 0));
    CHECK(o->prompt_top_logprobs_len == prompt_top * o->prompt_logprobs_len);
}

static void logprob_lists_match_tokens_in_every_output_kind(const pllm_engine *engine) {
    for (uint32_t kind = PLLM_OUTPUT_DELTA; kind <= PLLM_OUTPUT_FINAL; kind++)
        for (uint32_t echo = 0; echo <= PLLM_SAMPLING_ECHO; echo += PLLM_SAMPLING_ECHO) {
            pllm_sampling sampling = greedy();
            pllm_request request = text_request(FRANCE, &sampling);
            pllm_outputs *outputs = NULL;
            uint64_t id = 0, tokens = 0, prompt_logprobs = 0;
            sampling.max_tokens = 5;
            sampling.flags = PLLM_SAMPLING_LOGPROBS | PLLM_SAMPLING_PROMPT_LOGPROBS | echo;
            sampling.top_logprobs = 3;
            sampling.prompt_top_logprobs = 2;
            sampling.output_kind = kind;
            OK(pllm_engine_add_request(engine, &request, &id));
            step_to_the_end(engine);
            OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
            const uint64_t len = pllm_outputs_len(outputs);
            CHECK(kind != PLLM_OUTPUT_FINAL || len == 1);
            for (uint64_t i = 0; i < len; i++) {
                const pllm_output *o = pllm_outputs_get(outputs, i);
                check_lists(o, 3, 2);
                tokens = o->tokens_len + (kind == PLLM_OUTPUT_DELTA ? tokens : 0);
                prompt_logprobs =
                    o->prompt_logprobs_len + (kind == PLLM_OUTPUT_DELTA ? prompt_logprobs : 0);
                if (o->finish_reason && echo && kind != PLLM_OUTPUT_DELTA) {
                    CHECK(isnan(o->logprobs[0]));
                    CHECK(!memcmp(o->logprobs + 1, o->prompt_logprobs,
                                  (o->prompt_tokens - 1) * sizeof *o->logprobs));
                }
                if (o->finish_reason)
                    CHECK(tokens == 5 + (echo ? o->prompt_tokens : 0) &&
                          prompt_logprobs == o->prompt_tokens - 1);
            }
            pllm_outputs_free(outputs);
        }
    CHECK(is_idle(engine));
}

typedef struct {
    uint64_t calls, sequence, len, vocab;
    uint32_t next_token;
} hook_calls;

static void force_token(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len,
                        float *logits, uint64_t vocab_size) {
    hook_calls *h = data;
    h->calls++;
    h->sequence = sequence;
    h->len = tokens_len;
    h->vocab = vocab_size;
    for (uint64_t i = 0; i < vocab_size; i++) logits[i] = i == h->next_token ? 1 : -INFINITY;
    if (tokens_len && tokens[tokens_len - 1] == h->next_token) h->next_token++;
    if (h->next_token) logits[h->next_token] = 2;
}

static void logits_hook_determines_every_token(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    hook_calls h = {.next_token = 100};
    sampling.max_tokens = 4;
    request.logits_hook = force_token;
    request.hook_data = &h;
    const generation *a = run_request(engine, &request);
    CHECK(a->tokens_len == 4 && h.calls == 4 && h.len == COUNT(PROMPT) + 3 && h.vocab == 1024 &&
          h.sequence != 0);
    for (uint32_t i = 0; i < 4; i++) CHECK(a->tokens[i] == 100 + i);
    CHECK(is_idle(engine));
}

static void grammar_restricts_the_text(const pllm_engine *engine) {
    static const char *const colours[] = {"red", "green", "blue"};
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    sampling.grammar_kind = PLLM_GRAMMAR_REGEX;
    sampling.grammar = "[0-9]{3}-[a-c]+";
    sampling.max_tokens = 12;
    const generation *a = run_request(engine, &request);
    CHECK(a->text_len > 4 && a->text[3] == '-');
    for (uint64_t i = 0; i < a->text_len; i++)
        CHECK(i == 3 || strchr(i < 3 ? "0123456789" : "abc", a->text[i]));
    sampling = greedy();
    sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;
    sampling.choices = colours;
    sampling.choice_count = COUNT(colours);
    a = run_request(engine, &request);
    CHECK(text_is(a, "red", 3) || text_is(a, "green", 5) || text_is(a, "blue", 4));
    CHECK(a->finish_reason == PLLM_FINISH_STOP && is_idle(engine));
}

const test sampling_tests[] = {
    WITH_BUNDLED(invalid_sampling_is_refused),
    WITH_BUNDLED(logprobs_are_returned_only_with_their_flag),
    WITH_BUNDLED(generation_ends_at_max_tokens),
    WITH_BUNDLED(prompt_is_scored_without_a_token),
    WITH_BUNDLED(ignore_eos_continues_past_the_eos_token),
    WITH_BUNDLED(stop_token_ends_generation_and_its_text_is_omitted),
    WITH_BUNDLED(stop_string_across_tokens_ends_generation_and_is_omitted),
    WITH_BUNDLED(equal_seeds_give_equal_tokens),
    WITH_BUNDLED(invalid_penalties_grammars_and_reports_are_refused),
    WITH_BUNDLED(logprob_lists_match_tokens_in_every_output_kind),
    WITH_BUNDLED(logits_hook_determines_every_token),
    WITH_BUNDLED(grammar_restricts_the_text),
    {0},
};
