// Sampling parameters.
#include "program.h"

// Up to three texts. Half of the time without lengths, if all texts end with NUL.
typedef struct {
    const char **texts;
    const uint64_t *lens;
    uint64_t count;
} text_list;

static text_list any_text_list(worker *w, const char *const *typical, unsigned typical_len) {
    text_list list = {.count = below(w, 4)};
    uint64_t *lens = guarded(w, list.count * sizeof *lens);
    bool all_end_with_nul = true;
    list.texts = guarded(w, list.count * sizeof *list.texts);
    for (uint64_t i = 0; i < list.count; i++) {
        argument text =
            one_in(w, 4) ? any_text(w)
                         : (argument){typical[below(w, typical_len)], PLLM_NUL_TERMINATED, false};
        list.texts[i] = text.data;
        lens[i] = text.len;
        all_end_with_nul &= text.len == PLLM_NUL_TERMINATED;
    }
    list.lens = all_end_with_nul && below(w, 2) ? NULL : lens;
    if (one_in(w, 16)) list.texts = NULL;
    return list;
}

static const char *const typical_stops[] = {"e", " the", ".", "capital", "\xE6\x97\xA5"};

static void choose_stops(worker *w, const engine_slot *e, pllm_sampling *s) {
    if (one_in(w, 3)) {
        argument ids = any_tokens(w, e->vocab);
        s->stop_token_ids = ids.data;
        s->stop_token_ids_len = ids.len;
    }
    if (!one_in(w, e->has_text ? 4 : 32)) return;
    text_list stops = any_text_list(w, typical_stops, COUNT(typical_stops));
    s->stop = stops.texts;
    s->stop_lens = stops.lens;
    s->stop_count = stops.count;
}

static void choose_exclusions(worker *w, const engine_slot *e, pllm_sampling *s) {
    if (one_in(w, 8)) {
        s->logit_bias_len = below(w, 4);
        pllm_logit_bias *biases = guarded(w, s->logit_bias_len * sizeof *biases);
        for (uint64_t i = 0; i < s->logit_bias_len; i++)
            biases[i] =
                (pllm_logit_bias){(uint32_t)number(w, 2) % (e->vocab ? e->vocab : 8),
                                  one_in(w, 8) ? interesting_float(w) : (float)byte(w) - 100};
        s->logit_bias = one_in(w, 16) ? NULL : biases;
    }
    if (one_in(w, 12)) {
        argument ids = any_tokens(w, e->vocab);
        s->allowed_token_ids = ids.data;
        s->allowed_token_ids_len = ids.len;
    }
    if (one_in(w, 12)) {
        s->bad_words_ids_len = below(w, 3);
        pllm_token_list *lists = guarded(w, s->bad_words_ids_len * sizeof *lists);
        for (uint64_t i = 0; i < s->bad_words_ids_len; i++) {
            argument ids = any_tokens(w, e->vocab);
            lists[i] = (pllm_token_list){ids.data, ids.len};
        }
        s->bad_words_ids = one_in(w, 16) ? NULL : lists;
    }
    if (!one_in(w, e->has_text ? 12 : 64)) return;
    text_list words = any_text_list(w, typical_stops, COUNT(typical_stops));
    s->bad_words = words.texts;
    s->bad_word_lens = words.lens;
    s->bad_word_count = words.count;
}

static const pllm_dry *any_dry(worker *w) {
    static const char *const typical[] = {"\n", ":", "\"", "e"};
    pllm_dry d;
    uint64_t declared;
    pllm_dry *at = any_input_struct(w, &dry_type, &d, &declared);
    d.allowed_length = below(w, 4);
    d.penalty_last_n = below(w, 2) ? 0 : byte(w);
    if (one_in(w, 8)) d.multiplier = interesting_float(w);
    if (one_in(w, 8)) d.base = interesting_float(w);
    if (one_in(w, 2)) {
        text_list breakers = any_text_list(w, typical, COUNT(typical));
        d.sequence_breakers = breakers.texts;
        d.sequence_breaker_lens = breakers.lens;
        d.sequence_breaker_count = breakers.count;
    }
    return copy_fields(at, &dry_type, &d, declared);
}

static void choose_grammar(worker *w, pllm_sampling *s) {
    static const struct {
        uint32_t kind;
        const char *grammar;
    } typical[] = {
        {PLLM_GRAMMAR_JSON_SCHEMA,
         "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}}, \"required\": "
         "[\"a\"]}"},
        {PLLM_GRAMMAR_JSON_SCHEMA, "{\"enum\": [1, \"two\", null]}"},
        {PLLM_GRAMMAR_JSON_SCHEMA, "{\"type\": 7}"},
        {PLLM_GRAMMAR_JSON_OBJECT, NULL},
        {PLLM_GRAMMAR_REGEX, "[a-c]{2,5}x?"},
        {PLLM_GRAMMAR_REGEX, "(("},
        {PLLM_GRAMMAR_LARK, "start: \"a\" | \"b\" start"},
        {PLLM_GRAMMAR_LARK, "start: start"},
        {PLLM_GRAMMAR_NONE, "a"},
    };
    unsigned i = below(w, COUNT(typical) + 3);
    if (i < COUNT(typical)) {
        s->grammar_kind = typical[i].kind;
        s->grammar = typical[i].grammar;
        return;
    }
    text_list choices = any_text_list(w, typical_stops, COUNT(typical_stops));
    s->grammar_kind = one_in(w, 8) ? interesting_u32(w) : PLLM_GRAMMAR_CHOICE;
    s->choices = choices.texts;
    s->choice_lens = choices.lens;
    s->choice_count = choices.count;
    if (!one_in(w, 4)) return;
    argument text = any_text(w);
    s->grammar_kind = 1 + below(w, 5);
    s->grammar = text.data;
    s->grammar_len = text.len;
}

static void choose_penalties(worker *w, pllm_sampling *s) {
    switch (below(w, 9)) {
    case 0: s->typical_p = (float)(1 + below(w, 16)) / 16; break;
    case 1: s->top_n_sigma = (float)below(w, 64) / 16; break;
    case 2: s->xtc_probability = (float)below(w, 17) / 16; break;
    case 3:
        s->mirostat_tau = (float)below(w, 64) / 8, s->temperature = 1, s->top_k = 0, s->top_p = 1;
        break;
    case 4: s->presence_penalty = (float)below(w, 65) / 16 - 2; break;
    case 5: s->frequency_penalty = (float)below(w, 65) / 16 - 2; break;
    case 6: s->repetition_penalty = (float)(1 + below(w, 64)) / 16; break;
    case 7: s->no_repeat_ngram_size = below(w, 5); break;
    default: s->dry = any_dry(w); break;
    }
}

// Fields of the outputs. `with_prompt`: the request has a prompt to report.
static void choose_reports(worker *w, pllm_sampling *s, bool with_prompt) {
    if (s->flags & PLLM_SAMPLING_LOGPROBS) s->top_logprobs = below(w, 2) ? below(w, 5) : 0;
    if (one_in(w, 6)) s->flags |= PLLM_SAMPLING_INCLUDE_STOP;
    if (one_in(w, 6)) s->flags |= PLLM_SAMPLING_PREFILL_PROGRESS;
    if (one_in(w, with_prompt ? 6 : 64)) s->flags |= PLLM_SAMPLING_ECHO;
    if (one_in(w, with_prompt ? 6 : 64))
        s->flags |= PLLM_SAMPLING_PROMPT_LOGPROBS, s->prompt_top_logprobs = below(w, 4),
            s->prompt_logprobs_start = one_in(w, 3) ? below(w, 16) : 0;
    s->output_kind = one_in(w, 3) ? 1 + below(w, 2) : PLLM_OUTPUT_DELTA;
}

static void corrupt_the_sampling(worker *w, pllm_sampling *s) {
    float *const numbers[] = {&s->temperature,
                              &s->top_p,
                              &s->min_p,
                              &s->typical_p,
                              &s->top_n_sigma,
                              &s->xtc_probability,
                              &s->xtc_threshold,
                              &s->mirostat_tau,
                              &s->mirostat_eta,
                              &s->presence_penalty,
                              &s->frequency_penalty,
                              &s->repetition_penalty};
    uint32_t *const counts[] = {
        &s->top_k,       &s->max_tokens,           &s->min_tokens,   &s->flags,
        &s->reserved,    &s->no_repeat_ngram_size, &s->top_logprobs, &s->prompt_top_logprobs,
        &s->output_kind, &s->grammar_kind};
    unsigned i = below(w, COUNT(numbers) + COUNT(counts) + 1);
    if (i < COUNT(numbers)) *numbers[i] = interesting_float(w);
    else if (i < COUNT(numbers) + COUNT(counts)) *counts[i - COUNT(numbers)] = interesting_u32(w);
    else *(below(w, 2) ? &s->seed : &s->prompt_logprobs_start) = interesting_u64(w);
}

void record_sampling(expected_run *t, const pllm_sampling *s) {
    t->limited = s->max_tokens != PLLM_UNLIMITED_TOKENS, t->max_tokens = s->max_tokens;
    t->logprobs = s->flags & PLLM_SAMPLING_LOGPROBS;
    t->prompt_logprobs = s->flags & PLLM_SAMPLING_PROMPT_LOGPROBS;
    t->echo = s->flags & PLLM_SAMPLING_ECHO;
    t->progress = s->flags & PLLM_SAMPLING_PREFILL_PROGRESS;
    t->grammar = s->grammar_kind != PLLM_GRAMMAR_NONE;
    if (t->grammar) program.uses_grammars = true;
    t->top = s->top_logprobs, t->prompt_top = s->prompt_top_logprobs, t->kind = s->output_kind;
}

const pllm_sampling *any_sampling(worker *w, const engine_slot *e, bool with_prompt,
                                  expected_run *t) {
    pllm_sampling s;
    uint64_t declared;
    pllm_sampling *at = any_input_struct(w, &sampling_type, &s, &declared);
    s.temperature = below(w, 2) ? 0 : (float)below(w, 32) / 16;
    s.top_k = below(w, 2) ? below(w, 64) : 0;
    s.top_p = below(w, 2) ? 1 : (float)(1 + below(w, 16)) / 16;
    s.max_tokens = below(w, 13);
    s.min_tokens = one_in(w, 4) ? below(w, s.max_tokens + 1) : 0;
    s.flags = byte(w) & (PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS);
    if (s.flags & PLLM_SAMPLING_SEED) s.seed = byte(w);
    choose_stops(w, e, &s);
    choose_exclusions(w, e, &s);
    choose_reports(w, &s, with_prompt);
    if (one_in(w, 4)) choose_penalties(w, &s);
    if (one_in(w, e->has_text ? 10 : 64)) choose_grammar(w, &s);
    while (one_in(w, 8)) corrupt_the_sampling(w, &s);
    copy_fields(at, &sampling_type, &s, declared);
    bool is_old = declared <= offsetof(pllm_sampling, prompt_logprobs_start);
    if (is_old && s.max_tokens == 0) s.max_tokens = PLLM_UNLIMITED_TOKENS;
    record_sampling(t, &s);
    return at;
}
