// Lengths of arguments that exceed any memory. Each call runs in its own process, and must run
// before any engine exists in this one.
#include "abi_test.h"

#include <signal.h>
#include <sys/wait.h>

#define LENGTH_ARGUMENTS(X)                                                                    \
    X(MODEL_PATH) X(DEVICE) X(SWAP_PATH) X(PACKED_PATH) X(CPUS) X(TRACE_PATH) X(JOURNAL_PATH)  \
    X(PROMPT_TEXT) X(PROMPT_TOKENS) X(STOP_TOKENS) X(STOPS) X(STOP_LENS) X(GRAMMAR) X(CHOICES) \
    X(CHOICE_LENS) X(BREAKERS) X(BREAKER_LENS) X(LOGIT_BIAS) X(BAD_WORDS) X(BAD_WORD_LENS)     \
    X(BAD_LISTS) X(BAD_LIST) X(ALLOWED) X(CACHE_SALT) X(APPEND) X(PIN_TEXT) X(PIN_TOKENS)      \
    X(PIN_SALT) X(STATE) X(TOKENIZE) X(DETOKENIZE) X(CHAT)
#define AS_CONSTANT(name) name,
#define AS_NAME(name) #name,
enum { LENGTH_ARGUMENTS(AS_CONSTANT) LENGTH_ARGUMENT_COUNT };
static const char *const LENGTH_ARGUMENT_NAMES[] = {LENGTH_ARGUMENTS(AS_NAME)};

static pllm_error *pin_with_length(const pllm_engine *engine, int argument, uint64_t len,
                                   const char *text, const uint32_t *tokens) {
    pllm_pin pin;
    uint64_t id;
    pllm_pin_init(&pin, sizeof pin);
    if (argument != PIN_TOKENS)
        pin.prompt = text, pin.prompt_len = argument == PIN_TEXT ? len : PLLM_NUL_TERMINATED;
    if (argument == PIN_TOKENS) pin.prompt_token_ids = tokens, pin.prompt_token_ids_len = len;
    if (argument == PIN_SALT) pin.cache_salt = (const uint8_t *)text, pin.cache_salt_len = len;
    return pllm_prefix_pin(engine, &pin, &id);
}

static pllm_error *append_with_length(const pllm_engine *engine, uint64_t len,
                                      const uint32_t *tokens) {
    pllm_request request = token_request(NULL);
    uint64_t id;
    if (!OK(pllm_engine_add_request(engine, &request, &id))) return NULL;
    return pllm_sequence_append(engine, id, tokens, len);
}

static pllm_error *call_with_length(const pllm_engine *engine, int argument, uint64_t len) {
    const char *text = before_guard_page("hello", 6);
    const uint32_t *tokens = before_guard_page(PROMPT, sizeof PROMPT);
    const char *stops[] = {text};
    const pllm_logit_bias bias = {5, 1};
    const pllm_token_list list = {tokens, argument == BAD_LIST ? len : 1};
    pllm_dry dry;
    pllm_dry_init(&dry, sizeof dry);
    dry.sequence_breakers = stops;
    dry.sequence_breaker_count = argument == BREAKERS ? len : 1;
    dry.sequence_breaker_lens = argument == BREAKER_LENS ? &len : NULL;
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(text, &sampling);
    uint64_t id;
    sampling.stop = stops;
    sampling.stop_count = 1;
    switch (argument) {
    case PROMPT_TEXT: request.prompt_len = len; break;
    case PROMPT_TOKENS:
        request.prompt = NULL;
        request.prompt_token_ids = tokens;
        request.prompt_token_ids_len = len;
        break;
    case STOP_TOKENS:
        sampling.stop_token_ids = tokens;
        sampling.stop_token_ids_len = len;
        break;
    case STOPS: sampling.stop_count = len; break;
    case STOP_LENS: sampling.stop_lens = &len; break;
    case GRAMMAR:
        sampling.grammar_kind = PLLM_GRAMMAR_REGEX;
        sampling.grammar = text;
        sampling.grammar_len = len;
        break;
    case CHOICES:
        sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;
        sampling.choices = stops;
        sampling.choice_count = len;
        break;
    case CHOICE_LENS:
        sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;
        sampling.choices = stops;
        sampling.choice_lens = &len;
        sampling.choice_count = 1;
        break;
    case BREAKERS:
    case BREAKER_LENS: sampling.dry = &dry; break;
    case LOGIT_BIAS:
        sampling.logit_bias = &bias;
        sampling.logit_bias_len = len;
        break;
    case BAD_WORDS:
        sampling.bad_words = stops;
        sampling.bad_word_count = len;
        break;
    case BAD_WORD_LENS:
        sampling.bad_words = stops;
        sampling.bad_word_lens = &len;
        sampling.bad_word_count = 1;
        break;
    case BAD_LISTS:
        sampling.bad_words_ids = &list;
        sampling.bad_words_ids_len = len;
        break;
    case BAD_LIST:
        sampling.bad_words_ids = &list;
        sampling.bad_words_ids_len = 1;
        break;
    case ALLOWED:
        sampling.allowed_token_ids = tokens;
        sampling.allowed_token_ids_len = len;
        break;
    case CACHE_SALT:
        request.cache_salt = (const uint8_t *)text;
        request.cache_salt_len = len;
        break;
    case APPEND: return append_with_length(engine, len, tokens);
    case PIN_TEXT:
    case PIN_TOKENS:
    case PIN_SALT: return pin_with_length(engine, argument, len, text, tokens);
    case STATE: return pllm_sequence_import(engine, (const uint8_t *)text, len, NULL, &id);
    case TOKENIZE: return pllm_engine_tokenize(engine, text, len, 0, &(pllm_tokens *){NULL});
    case DETOKENIZE: return pllm_engine_detokenize(engine, tokens, len, 0, &(pllm_bytes *){NULL});
    default: return pllm_engine_render_chat(engine, text, len, &(pllm_bytes *){NULL});
    }
    return pllm_engine_add_request(engine, &request, &id);
}

// Returns the error code of the call with this length.
static int error_code_with_length(int argument, uint64_t len) {
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    pllm_engine *engine = NULL;
    if (argument == MODEL_PATH)
        options.model_path = before_guard_page("path", 5), options.model_path_len = len;
    if (argument == DEVICE) options.device = before_guard_page("cpu", 4), options.device_len = len;
    const char *path = before_guard_page("path", 5);
    if (argument == SWAP_PATH) options.swap_path = path, options.swap_path_len = len;
    if (argument == PACKED_PATH) options.packed_path = path, options.packed_path_len = len;
    if (argument == CPUS) options.cpus = before_guard_page("0", 2), options.cpus_len = len;
    if (argument == TRACE_PATH) options.trace_path = path, options.trace_path_len = len;
    if (argument == JOURNAL_PATH) options.journal_path = path, options.journal_path_len = len;
    if (argument <= JOURNAL_PATH) return code_of(pllm_engine_plan(&options, &plan));
    if (code_of(pllm_engine_create(&options, &engine)) != 0) return -1;
    int code = code_of(call_with_length(engine, argument, len));
    pllm_engine_free(engine);
    return code;
}

// A host that computes a wrong length (an underflow, a cast error code) gets an error.
static void impossible_lengths_are_refused(void) {
    const uint64_t lengths[] = {UINT64_MAX - 1, 1ull << 63, 1ull << 62};
    for (int argument = 0; argument < LENGTH_ARGUMENT_COUNT; argument++)
        for (size_t i = 0; i < COUNT(lengths); i++) {
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) _exit(100 + error_code_with_length(argument, lengths[i]));
            int status = 0;
            waitpid(child, &status, 0);
            int code = WIFEXITED(status) ? WEXITSTATUS(status) - 100 : -WTERMSIG(status);
            if (!CHECK(code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_OUT_OF_MEMORY))
                printf("    %s with length %llx: wait status %x\n", LENGTH_ARGUMENT_NAMES[argument],
                       (unsigned long long)lengths[i], (unsigned)status);
        }
}

const test lengths_tests[] = {
    ALONE(impossible_lengths_are_refused),
    {0},
};
