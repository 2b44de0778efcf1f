// The C ABI from a C program: wrong arguments to every entry point, sizes of structs, threads, lifetimes, silence.
// usage: abi_test MODEL_DIR GOLDEN_DIR
//     MODEL_DIR   the bundled model, which has a tokenizer and a chat template
//     GOLDEN_DIR  a tiny LLaMA without a tokenizer
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pagedllm.h"

static const char *model_dir, *golden_dir;

// ---- checks ----------------------------------------------------------------------------------------------------------

static atomic_uint passed, failed;

static int check(int ok, const char *what, int line) {
    atomic_fetch_add(ok ? &passed : &failed, 1);
    if (!ok) printf("%s:%d: failed: %s\n", __FILE__, line, what);
    return ok;
}
#define CHECK(condition) check(!!(condition), #condition, __LINE__)

// Success; otherwise says what the error was.
static int ok(pllm_error *error, const char *call, int line) {
    if (error) printf("%s:%d: error %d: %s\n", __FILE__, line, pllm_error_code(error), pllm_error_message(error));
    pllm_error_free(error);
    return check(!error, call, line);
}
#define OK(call) ok(call, #call, __LINE__)

// Failure with this code, and a message that says something.
static int fails(int32_t code, pllm_error *error, const char *call, int line) {
    int right = error && pllm_error_code(error) == code && strlen(pllm_error_message(error)) > 9;
    if (!right) printf("%s:%d: error %d: \"%s\"\n", __FILE__, line, pllm_error_code(error), pllm_error_message(error));
    pllm_error_free(error);
    return check(right, call, line);
}
#define FAILS(code, call) fails(code, call, #call, __LINE__)
#define INVALID(call) FAILS(PLLM_E_INVALID_ARGUMENT, call)
#define UNSUPPORTED(call) FAILS(PLLM_E_UNSUPPORTED, call)
#define CAPACITY(call) FAILS(PLLM_E_CAPACITY, call)

#define COUNT(array) (sizeof(array) / sizeof *(array))

// What outputs hold before a call that must not write them.
enum { POISON = 0xA5 };
static void *const UNTOUCHED = (void *)(uintptr_t)0xA5A5A5A5A5A5A5A5u;

static int all(const void *bytes, uint64_t from, uint64_t to, int value) {
    for (uint64_t i = from; i < to; i++)
        if (((const unsigned char *)bytes)[i] != value) return 0;
    return 1;
}

static void sleep_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// ---- engines and requests --------------------------------------------------------------------------------------------

static pllm_engine_options options_for(const char *path) {
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = path;
    options.model_path_len = PLLM_NUL_TERMINATED;
    options.kv_bytes = 4 << 20;
    options.max_batch_tokens = 64;
    options.max_seqs = 16;
    options.threads = 2;
    if (path == golden_dir) options.flags = PLLM_ENGINE_SKIP_TOKENIZER;
    return options;
}

static pllm_engine *open_engine(const char *path) {
    pllm_engine_options options = options_for(path);
    pllm_engine *engine = NULL;
    if (!OK(pllm_engine_create(&options, &engine))) exit(1);
    return engine;
}

static pllm_sampling greedy(void) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    return sampling;
}

static pllm_request text_request(const char *prompt, const pllm_sampling *sampling) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = prompt;
    request.prompt_len = PLLM_NUL_TERMINATED;
    request.sampling = sampling;
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    return request;
}

static const uint32_t PROMPT[] = {5, 6, 7, 8};

static pllm_request token_request(const pllm_sampling *sampling) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = PROMPT;
    request.prompt_token_ids_len = COUNT(PROMPT);
    request.sampling = sampling;
    return request;
}

static const char *const FRANCE = "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n";
static const char *const PARIS = "The capital of France is Paris.";
static const char *const STORY = "<s><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n";

// Everything that came of one request.
typedef struct {
    uint32_t tokens[2048], text_ends[2048];  // per token: how long the text was after it
    float logprobs[2048];
    char text[16384];
    uint64_t tokens_len, text_len, logprobs_len, outputs, prompt_tokens, generated_tokens, user_data;
    uint32_t finish_reason;
    int32_t error_code;
} answer;

static void take(answer *a, const pllm_output *o) {
    CHECK(o->struct_size == sizeof *o && o->index == 0 && o->reserved == 0 && o->sequence_state == NULL && o->sequence_state_len == 0);
    CHECK(a->finish_reason == PLLM_FINISH_NONE);  // nothing comes after the end
    CHECK(a->tokens_len + o->tokens_len <= COUNT(a->tokens) && a->text_len + o->text_len < sizeof a->text);
    CHECK((o->tokens != NULL) == (o->tokens_len > 0) && (o->text != NULL) == (o->text_len > 0));
    if (o->text) memcpy(a->text + a->text_len, o->text, o->text_len);
    a->text_len += o->text_len;
    for (uint64_t i = 0; i < o->tokens_len; i++) {
        if (o->logprobs) a->logprobs[a->logprobs_len++] = o->logprobs[i];
        a->text_ends[a->tokens_len] = (uint32_t)a->text_len;
        a->tokens[a->tokens_len++] = o->tokens[i];
    }
    CHECK(o->generated_tokens == a->tokens_len);
    CHECK((o->error != NULL) == (o->finish_reason == PLLM_FINISH_ERROR));
    double queued = o->queued_seconds, first = o->first_token_seconds, last = o->last_token_seconds;
    if (o->finish_reason == PLLM_FINISH_NONE) CHECK(queued == 0 && first == 0 && last == 0 && o->preemptions == 0 && o->cached_tokens == 0);
    if (o->finish_reason == PLLM_FINISH_LENGTH) CHECK(0 < queued && queued <= first && first <= last);
    a->outputs++;
    a->prompt_tokens = o->prompt_tokens;
    a->generated_tokens = o->generated_tokens;
    a->user_data = o->user_data;
    a->finish_reason = o->finish_reason;
    a->error_code = o->error_code;
}

// Everything in the queue that is this request's.
static void collect_from(const pllm_queue *queue, uint64_t id, answer *a) {
    pllm_outputs *outputs = NULL;
    if (!OK(pllm_queue_poll(queue, 0, &outputs))) return;
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++)
        if (pllm_outputs_get(outputs, i)->request == id) take(a, pllm_outputs_get(outputs, i));
    pllm_outputs_free(outputs);
}

static void collect(const pllm_engine *engine, uint64_t id, answer *a) { collect_from(pllm_engine_queue(engine), id, a); }

static answer *run(const pllm_engine *engine, const pllm_request *request) {
    static answer answers[4];  // the last few stay valid
    static int next;
    answer *a = &answers[next++ % 4];
    memset(a, 0, sizeof *a);
    uint64_t id = 0;
    if (!OK(pllm_engine_add_request(engine, request, &id))) return a;
    CHECK(id != 0);
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    while (step.unfinished && OK(pllm_engine_step(engine, &step))) collect(engine, id, a);
    CHECK(a->finish_reason != PLLM_FINISH_NONE);
    return a;
}

static int same(const answer *a, const answer *b) {
    return a->tokens_len == b->tokens_len && !memcmp(a->tokens, b->tokens, a->tokens_len * sizeof *a->tokens) &&
           a->text_len == b->text_len && !memcmp(a->text, b->text, a->text_len) && a->finish_reason == b->finish_reason;
}

static pllm_stats stats_of(const pllm_engine *engine) {
    pllm_stats stats = {.struct_size = sizeof stats};
    OK(pllm_engine_get_stats(engine, &stats));
    return stats;
}

// Nobody holds a block; what the prefix cache could still find is nobody's.
static int idle(const pllm_engine *engine) {
    pllm_stats s = stats_of(engine);
    return s.blocks_free + s.blocks_cached == s.blocks_total && s.blocks_used == 0 && s.waiting == 0 && s.running == 0 && s.idle == 0;
}

// ---- lengths that no memory has: before any engine, each in a process of its own -------------------------------------

#define HUGE_CASES_ARE(X)                                                                                                       \
    X(MODEL_PATH) X(DEVICE) X(SWAP_PATH) X(PACKED_PATH) X(CPUS) X(TRACE_PATH) X(JOURNAL_PATH) X(PROMPT_TEXT) X(PROMPT_TOKENS) X(STOP_TOKENS)           \
    X(STOPS) X(STOP_LENS) X(GRAMMAR) X(CHOICES) X(CHOICE_LENS) X(BREAKERS) X(BREAKER_LENS) X(LOGIT_BIAS) X(BAD_WORDS)           \
    X(BAD_WORD_LENS) X(BAD_LISTS) X(BAD_LIST) X(ALLOWED) X(CACHE_SALT) X(APPEND) X(PIN_TEXT) X(PIN_TOKENS) X(PIN_SALT)          \
    X(STATE) X(TOKENIZE) X(DETOKENIZE) X(CHAT)
#define AS_CASE(name) name,
#define AS_NAME(name) #name,
enum { HUGE_CASES_ARE(AS_CASE) HUGE_CASES };
static const char *const HUGE_NAMES[] = {HUGE_CASES_ARE(AS_NAME)};

// A copy right before memory that may not be read, so that one byte too many is always seen. It stays.
static const void *at_the_edge(const void *bytes, size_t len) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (len + page - 1) / page * page;
    char *pages = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + room, page, PROT_NONE)) _exit(98);
    return memcpy(pages + room - len, bytes, len);
}

static pllm_error *pin_with_length(const pllm_engine *engine, int what, uint64_t len, const char *text, const uint32_t *tokens) {
    pllm_pin pin;
    uint64_t id;
    pllm_pin_init(&pin, sizeof pin);
    if (what != PIN_TOKENS) pin.prompt = text, pin.prompt_len = what == PIN_TEXT ? len : PLLM_NUL_TERMINATED;
    if (what == PIN_TOKENS) pin.prompt_token_ids = tokens, pin.prompt_token_ids_len = len;
    if (what == PIN_SALT) pin.cache_salt = (const uint8_t *)text, pin.cache_salt_len = len;
    return pllm_prefix_pin(engine, &pin, &id);
}

static pllm_error *append_with_length(const pllm_engine *engine, uint64_t len, const uint32_t *tokens) {
    pllm_request request = token_request(NULL);
    uint64_t id;
    if (!OK(pllm_engine_add_request(engine, &request, &id))) return NULL;
    return pllm_sequence_append(engine, id, tokens, len);
}

static pllm_error *ask_with_length(const pllm_engine *engine, int what, uint64_t len) {
    const char *text = at_the_edge("hello", 6);
    const uint32_t *tokens = at_the_edge(PROMPT, sizeof PROMPT);
    const char *stops[] = {text};
    const pllm_logit_bias bias = {5, 1};
    const pllm_token_list list = {tokens, what == BAD_LIST ? len : 1};
    pllm_dry dry;
    pllm_dry_init(&dry, sizeof dry);
    dry.sequence_breakers = stops;
    dry.sequence_breaker_count = what == BREAKERS ? len : 1;
    dry.sequence_breaker_lens = what == BREAKER_LENS ? &len : NULL;
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(text, &sampling);
    uint64_t id;
    sampling.stop = stops;
    sampling.stop_count = 1;
    switch (what) {
        case PROMPT_TEXT: request.prompt_len = len; break;
        case PROMPT_TOKENS: request.prompt = NULL; request.prompt_token_ids = tokens; request.prompt_token_ids_len = len; break;
        case STOP_TOKENS: sampling.stop_token_ids = tokens; sampling.stop_token_ids_len = len; break;
        case STOPS: sampling.stop_count = len; break;
        case STOP_LENS: sampling.stop_lens = &len; break;
        case GRAMMAR: sampling.grammar_kind = PLLM_GRAMMAR_REGEX; sampling.grammar = text; sampling.grammar_len = len; break;
        case CHOICES: sampling.grammar_kind = PLLM_GRAMMAR_CHOICE; sampling.choices = stops; sampling.choice_count = len; break;
        case CHOICE_LENS:
            sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;
            sampling.choices = stops;
            sampling.choice_lens = &len;
            sampling.choice_count = 1;
            break;
        case BREAKERS:
        case BREAKER_LENS: sampling.dry = &dry; break;
        case LOGIT_BIAS: sampling.logit_bias = &bias; sampling.logit_bias_len = len; break;
        case BAD_WORDS: sampling.bad_words = stops; sampling.bad_word_count = len; break;
        case BAD_WORD_LENS: sampling.bad_words = stops; sampling.bad_word_lens = &len; sampling.bad_word_count = 1; break;
        case BAD_LISTS: sampling.bad_words_ids = &list; sampling.bad_words_ids_len = len; break;
        case BAD_LIST: sampling.bad_words_ids = &list; sampling.bad_words_ids_len = 1; break;
        case ALLOWED: sampling.allowed_token_ids = tokens; sampling.allowed_token_ids_len = len; break;
        case CACHE_SALT: request.cache_salt = (const uint8_t *)text; request.cache_salt_len = len; break;
        case APPEND: return append_with_length(engine, len, tokens);
        case PIN_TEXT:
        case PIN_TOKENS:
        case PIN_SALT: return pin_with_length(engine, what, len, text, tokens);
        case STATE: return pllm_sequence_import(engine, (const uint8_t *)text, len, NULL, &id);
        case TOKENIZE: return pllm_engine_tokenize(engine, text, len, 0, &(pllm_tokens *){NULL});
        case DETOKENIZE: return pllm_engine_detokenize(engine, tokens, len, 0, &(pllm_bytes *){NULL});
        default: return pllm_engine_render_chat(engine, text, len, &(pllm_bytes *){NULL});
    }
    return pllm_engine_add_request(engine, &request, &id);
}

static int code_of(pllm_error *error) {
    int code = pllm_error_code(error);
    pllm_error_free(error);
    return code;
}

// The code of the error that the call gives.
static int code_with_length(int what, uint64_t len) {
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    pllm_engine *engine = NULL;
    if (what == MODEL_PATH) options.model_path = at_the_edge("path", 5), options.model_path_len = len;
    if (what == DEVICE) options.device = at_the_edge("cpu", 4), options.device_len = len;
    const char *path = at_the_edge("path", 5);
    if (what == SWAP_PATH) options.swap_path = path, options.swap_path_len = len;
    if (what == PACKED_PATH) options.packed_path = path, options.packed_path_len = len;
    if (what == CPUS) options.cpus = at_the_edge("0", 2), options.cpus_len = len;
    if (what == TRACE_PATH) options.trace_path = path, options.trace_path_len = len;
    if (what == JOURNAL_PATH) options.journal_path = path, options.journal_path_len = len;
    if (what <= JOURNAL_PATH) return code_of(pllm_engine_plan(&options, &plan));
    if (code_of(pllm_engine_create(&options, &engine)) != 0) return -1;
    int code = code_of(ask_with_length(engine, what, len));
    pllm_engine_free(engine);
    return code;
}

// A host that computes a length wrongly (a difference that went below zero, an error code cast) gets an error back.
static void a_length_that_no_memory_has_is_refused(void) {
    const uint64_t lengths[] = {UINT64_MAX - 1, 1ull << 63, 1ull << 62};
    for (int what = 0; what < HUGE_CASES; what++)
        for (size_t i = 0; i < COUNT(lengths); i++) {
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) _exit(100 + code_with_length(what, lengths[i]));
            int status = 0;
            waitpid(child, &status, 0);
            int code = WIFEXITED(status) ? WEXITSTATUS(status) - 100 : -WTERMSIG(status);
            if (!CHECK(code == PLLM_E_INVALID_ARGUMENT || code == PLLM_E_OUT_OF_MEMORY))
                printf("    %s with length %llx: wait status %x\n", HUGE_NAMES[what], (unsigned long long)lengths[i], (unsigned)status);
        }
}

// ---- the library and NULL --------------------------------------------------------------------------------------------

static void the_library_names_itself(void) {
    CHECK(pllm_abi_version() == PLLM_ABI_VERSION);
    CHECK(strchr(pllm_version(), '.') != NULL);
    CHECK(pllm_build_info()[0] == '{' && strstr(pllm_build_info(), pllm_version()) && strstr(pllm_build_info(), "LlamaForCausalLM"));
    CHECK(pllm_build_info() == pllm_build_info());
}

static void null_is_free_and_empty(void) {
    pllm_engine_free(NULL);
    pllm_error_free(NULL);
    pllm_outputs_free(NULL);
    pllm_tokens_free(NULL);
    pllm_bytes_free(NULL);
    pllm_budget_free(NULL);
    pllm_engine_options_init(NULL, sizeof(pllm_engine_options));
    pllm_request_init(NULL, sizeof(pllm_request));
    pllm_sampling_init(NULL, sizeof(pllm_sampling));
    pllm_dry_init(NULL, sizeof(pllm_dry));
    pllm_beam_init(NULL, sizeof(pllm_beam));
    pllm_fork_init(NULL, sizeof(pllm_fork));
    pllm_resume_init(NULL, sizeof(pllm_resume));
    pllm_pin_init(NULL, sizeof(pllm_pin));
    CHECK(pllm_error_code(NULL) == 0);
    CHECK(pllm_error_message(NULL)[0] == 0);
    CHECK(pllm_outputs_len(NULL) == 0 && pllm_outputs_get(NULL, 0) == NULL);
    CHECK(pllm_tokens_len(NULL) == 0 && pllm_tokens_data(NULL) == NULL);
    CHECK(pllm_bytes_len(NULL) == 0 && pllm_bytes_data(NULL) == NULL);
    CHECK(pllm_engine_queue(NULL) == NULL && pllm_engine_budget(NULL) == NULL);
}

static void null_engines_and_options_are_refused_and_outputs_stay(const pllm_engine *engine) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *out = UNTOUCHED;
    _Alignas(8) unsigned char bytes[256];
    memset(bytes, POISON, sizeof bytes);
    *(uint64_t *)(void *)bytes = sizeof(pllm_plan);
    INVALID(pllm_engine_plan(NULL, (pllm_plan *)(void *)bytes));
    INVALID(pllm_engine_plan(&options, NULL));
    INVALID(pllm_engine_create(NULL, &out));
    INVALID(pllm_engine_create(&options, NULL));
    INVALID(pllm_engine_get_model_info(NULL, (pllm_model_info *)(void *)bytes));
    INVALID(pllm_engine_get_model_info(engine, NULL));
    INVALID(pllm_engine_step(NULL, (pllm_step *)(void *)bytes));
    uint64_t steps = stats_of(engine).steps;
    INVALID(pllm_engine_step(engine, NULL));
    CHECK(stats_of(engine).steps == steps);
    INVALID(pllm_engine_get_stats(NULL, (pllm_stats *)(void *)bytes));
    INVALID(pllm_engine_get_stats(engine, NULL));
    CHECK(out == UNTOUCHED && all(bytes, 8, sizeof bytes, POISON));
    options.model_path = NULL;
    INVALID(pllm_engine_create(&options, &out));
    options.model_path_len = 0;
    INVALID(pllm_engine_create(&options, &out));
    options.model_path_len = 5;
    INVALID(pllm_engine_create(&options, &out));
    CHECK(out == UNTOUCHED);
}

static void null_requests_are_refused_and_outputs_stay(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling), neither = request, both = request, no_length = request;
    uint64_t id = 77;
    INVALID(pllm_engine_add_request(NULL, &request, &id));
    INVALID(pllm_engine_add_request(engine, NULL, &id));
    INVALID(pllm_engine_add_request(engine, &request, NULL));
    neither.prompt_token_ids = NULL;
    INVALID(pllm_engine_add_request(engine, &neither, &id));
    both.prompt = "hello";
    INVALID(pllm_engine_add_request(engine, &both, &id));
    no_length.prompt_token_ids_len = 0;
    INVALID(pllm_engine_add_request(engine, &no_length, &id));
    sampling.stop_token_ids_len = 1;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    sampling = greedy();
    sampling.stop_count = 1;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    const char *stops[] = {NULL};
    sampling.stop = stops;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    sampling.stop_lens = (const uint64_t[]){3};
    INVALID(pllm_engine_add_request(engine, &request, &id));
    INVALID(pllm_engine_abort(NULL, 1));
    CHECK(id == 77);
    // What the failed ones took, if anything, would run now.
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_step(engine, &step));
    CHECK(step.unfinished == 0 && step.sequences == 0);
}

static void null_text_is_refused_and_outputs_stay(const pllm_engine *engine) {
    pllm_outputs *outputs = UNTOUCHED;
    pllm_tokens *tokens = UNTOUCHED;
    pllm_bytes *bytes = UNTOUCHED;
    const char *chat = "[{\"role\": \"user\", \"content\": \"x\"}]";
    INVALID(pllm_queue_poll(NULL, 0, &outputs));
    INVALID(pllm_queue_poll(pllm_engine_queue(engine), 0, NULL));
    INVALID(pllm_engine_tokenize(NULL, "a", 1, 0, &tokens));
    INVALID(pllm_engine_tokenize(engine, NULL, 1, 0, &tokens));
    INVALID(pllm_engine_tokenize(engine, NULL, PLLM_NUL_TERMINATED, 0, &tokens));
    INVALID(pllm_engine_tokenize(engine, "a", 1, 0, NULL));
    INVALID(pllm_engine_detokenize(NULL, PROMPT, 1, 0, &bytes));
    INVALID(pllm_engine_detokenize(engine, NULL, 1, 0, &bytes));
    INVALID(pllm_engine_detokenize(engine, PROMPT, 1, 0, NULL));
    INVALID(pllm_engine_render_chat(NULL, chat, strlen(chat), &bytes));
    INVALID(pllm_engine_render_chat(engine, NULL, 3, &bytes));
    INVALID(pllm_engine_render_chat(engine, NULL, PLLM_NUL_TERMINATED, &bytes));
    INVALID(pllm_engine_render_chat(engine, chat, strlen(chat), NULL));
    CHECK(outputs == UNTOUCHED && tokens == UNTOUCHED && bytes == UNTOUCHED);
}

// ---- sizes of structs ------------------------------------------------------------------------------------------------

// Longer than any struct here; the bytes of one struct, then what lies behind it.
typedef union {
    uint64_t struct_size;
    unsigned char bytes[70000];
} place;

typedef void init_fn(void *to, uint64_t size);
static void init_options(void *to, uint64_t size) { pllm_engine_options_init(to, size); }
static void init_request(void *to, uint64_t size) { pllm_request_init(to, size); }
static void init_sampling(void *to, uint64_t size) { pllm_sampling_init(to, size); }

// Every version's size is a multiple of 8, and none was smaller than the first.
static int is_a_size(uint64_t size, uint64_t first) { return size >= first && size <= 65536 && size % 8 == 0; }

// A size that no version has stays in the struct, if it has room for one, so that the next call refuses it.
static void init_stays_within_its_size(init_fn *init, uint64_t first, uint64_t known) {
    static place whole, cut;
    init(&whole, known);
    CHECK(whole.struct_size == known);
    for (uint64_t size = 0; size <= known + 16; size++) {
        memset(&cut, POISON, sizeof cut);
        init(&cut, size);
        uint64_t written = is_a_size(size, first) ? size : size < 8 ? 0 : 8, common = written < known ? written : known;
        CHECK(written == 0 || cut.struct_size == size);
        CHECK(written == 0 || !memcmp(cut.bytes + 8, whole.bytes + 8, common - 8));
        CHECK(all(&cut, common, written, 0) && all(&cut, written, sizeof cut, POISON));
    }
    memset(&cut, POISON, sizeof cut);
    init(&cut, 65537);
    CHECK(cut.struct_size == 65537 && all(&cut, 8, sizeof cut, POISON));
}

// How a struct reaches the library: `at` lies at the struct, the answer is the library's.
typedef pllm_error *use_fn(const pllm_engine *engine, place *at);

static pllm_error *use_options(const pllm_engine *engine, place *at) {
    (void)engine;
    pllm_plan plan = {.struct_size = sizeof plan};
    return pllm_engine_plan((pllm_engine_options *)(void *)at, &plan);
}

static pllm_error *add(const pllm_engine *engine, const pllm_request *request) {
    uint64_t id = 0;
    pllm_error *error = pllm_engine_add_request(engine, request, &id);
    if (!error) pllm_error_free(pllm_engine_abort(engine, id));
    return error;
}

static pllm_error *use_request(const pllm_engine *engine, place *at) { return add(engine, (pllm_request *)(void *)at); }

static pllm_error *use_sampling(const pllm_engine *engine, place *at) {
    pllm_request request = token_request((pllm_sampling *)(void *)at);
    return add(engine, &request);
}

// `valid` is a struct that the library accepts.
static void a_struct_to_be_read_has_the_size_of_some_version(const pllm_engine *engine, use_fn *use, const void *valid, uint64_t first, uint64_t known) {
    static place at;
    const uint64_t never[] = {65537, 1ull << 32, UINT64_MAX};
    for (size_t i = 0; i < COUNT(never); i++) {
        memcpy(&at, valid, known);
        at.struct_size = never[i];
        INVALID(use(engine, &at));
    }
    // What lies behind the end of a struct is not read: here it is what a newer version would refuse.
    for (uint64_t size = 0; size <= known; size++) {
        memset(&at, 0xFF, sizeof at);
        memcpy(&at, valid, size);
        at.struct_size = size;
        is_a_size(size, first) ? OK(use(engine, &at)) : INVALID(use(engine, &at));
    }
    // Newer programs know more fields, which are all zero unless they are used.
    const uint64_t newer[] = {known + 8, known + 64, 65536};
    for (size_t i = 0; i < COUNT(newer); i++) {
        memset(&at, 0, sizeof at);
        memcpy(&at, valid, known);
        at.struct_size = newer[i];
        OK(use(engine, &at));
        at.bytes[newer[i] - 1] = 1;
        UNSUPPORTED(use(engine, &at));
        at.bytes[newer[i] - 1] = 0;
        at.bytes[newer[i]] = 1;  // not the struct's any more
        OK(use(engine, &at));
    }
}

static pllm_error *write_plan(const pllm_engine *engine, place *at) {
    (void)engine;
    pllm_engine_options options = options_for(golden_dir);
    return pllm_engine_plan(&options, (pllm_plan *)(void *)at);
}
static pllm_error *write_info(const pllm_engine *engine, place *at) { return pllm_engine_get_model_info(engine, (pllm_model_info *)(void *)at); }
static pllm_error *write_step(const pllm_engine *engine, place *at) { return pllm_engine_step(engine, (pllm_step *)(void *)at); }
static pllm_error *write_stats(const pllm_engine *engine, place *at) { return pllm_engine_get_stats(engine, (pllm_stats *)(void *)at); }

static void a_struct_to_be_written_has_the_size_of_some_version(const pllm_engine *engine, use_fn *write, uint64_t first, uint64_t known) {
    static place whole, at;
    memset(&whole, POISON, sizeof whole);
    whole.struct_size = known;
    OK(write(engine, &whole));
    CHECK(whole.struct_size == known);
    for (uint64_t size = 0; size <= known + 64; size++) {
        memset(&at, POISON, sizeof at);
        at.struct_size = size;
        uint64_t written = is_a_size(size, first) ? size : 8, common = written < known ? written : known;
        is_a_size(size, first) ? OK(write(engine, &at)) : INVALID(write(engine, &at));
        CHECK(at.struct_size == size && !memcmp(at.bytes + 8, whole.bytes + 8, common - 8));
        CHECK(all(&at, common, written, 0) && all(&at, written, sizeof at, POISON));
    }
    const uint64_t never[] = {65537, 1ull << 32, UINT64_MAX};
    for (size_t i = 0; i < COUNT(never); i++) {
        memset(&at, POISON, sizeof at);
        at.struct_size = never[i];
        INVALID(write(engine, &at));
        CHECK(at.struct_size == never[i] && all(&at, 8, sizeof at, POISON));
    }
}

static void structs_have_the_size_of_some_version(const pllm_engine *engine) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(NULL);
    pllm_step step = {.struct_size = sizeof step};
    init_stays_within_its_size(init_options, 96, sizeof options);
    init_stays_within_its_size(init_request, 64, sizeof request);
    init_stays_within_its_size(init_sampling, 88, sizeof sampling);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_options, &options, 96, sizeof options);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_request, &request, 64, sizeof request);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_sampling, &sampling, 88, sizeof sampling);
    OK(pllm_engine_step(engine, &step));  // ends what the above added
    CHECK(step.unfinished == 0);
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_plan, 80, sizeof(pllm_plan));
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_info, 96, sizeof(pllm_model_info));
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_step, 40, sizeof(pllm_step));
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_stats, 128, sizeof(pllm_stats));
    CHECK(idle(engine));
}

// ---- values ----------------------------------------------------------------------------------------------------------

static void unknown_flags_and_numbers_are_refused(const pllm_engine *engine) {
    pllm_plan plan = {.struct_size = sizeof plan};
    pllm_engine_options options;
#define OPTION(assignment, refusal) (options = options_for(golden_dir), options.assignment, refusal(pllm_engine_plan(&options, &plan)))
    OPTION(flags |= PLLM_ENGINE_NO_PREFIX_CACHE, OK);
    OPTION(flags |= PLLM_ENGINE_BATCH_INVARIANT, OK);
    OPTION(flags = 8, UNSUPPORTED);
    OPTION(reserved2 = 1, UNSUPPORTED);
    OPTION(memory_fraction = 0.5f, UNSUPPORTED);
    OPTION(device = "cuda:99", UNSUPPORTED);
    OPTION(flags |= 1u << 31, UNSUPPORTED);
    OPTION(reserved = 1, UNSUPPORTED);
    OPTION(kv_dtype = PLLM_DTYPE_INT8, OK);
    OPTION(kv_dtype = PLLM_DTYPE_F16, OK);
    OPTION(kv_dtype = PLLM_DTYPE_FP8, OK);
    OPTION(kv_dtype = 6, INVALID);
    OPTION(weight_format = PLLM_WEIGHTS_INT8, OK);
    OPTION(weight_format = PLLM_WEIGHTS_FP8, UNSUPPORTED);  // on the CPU
    OPTION(weight_format = 8, INVALID);
    OPTION(weight_group = 32, INVALID);  // of what?
    OPTION(preemption = 3, INVALID);
    OPTION(order = 3, INVALID);
    OPTION(batching = 4, INVALID);
    OPTION(allocation = 2, INVALID);
    OPTION(preemption = PLLM_PREEMPTION_SWAP, INVALID);  // to where?
    OPTION(preemption = PLLM_PREEMPTION_AUTO, INVALID);
    OPTION(swap_bytes = 1 << 20, INVALID);  // what for?
    OPTION(swap_path = "/tmp", INVALID);    // how much?
    OPTION(packed_path = "", INVALID);
    OPTION(trace_path = "", INVALID);
    OPTION(journal_path = "", INVALID);
    OPTION(isa = 9, INVALID);
    OPTION(block_size = 12, INVALID);
    OPTION(threads = 10000, INVALID);
    OPTION(threads = UINT32_MAX, INVALID);  // -1
    OPTION(cpus = "", INVALID);
    OPTION(cpus = "0-", INVALID);
    OPTION(cpus = "0,0", INVALID);
    OPTION(cpus = "0", INVALID);  // for two threads
    OPTION(cpus = "1022-1023", UNSUPPORTED);
    OPTION(max_seqs = 65, INVALID);
    OPTION(max_model_len = 1, INVALID);
    OPTION(max_model_len = 129, INVALID);
    options = options_for(golden_dir);
    options.device = "cuda:0";
    options.device_len = PLLM_NUL_TERMINATED;
    UNSUPPORTED(pllm_engine_plan(&options, &plan));
    options.device = "cpu, and more";
    options.device_len = 3;
    OK(pllm_engine_plan(&options, &plan));
    OPTION(kv_bytes = 1, CAPACITY);
    pllm_tokens *tokens = UNTOUCHED;
    UNSUPPORTED(pllm_engine_tokenize(engine, "a", 1, 4, &tokens));
    UNSUPPORTED(pllm_engine_detokenize(engine, PROMPT, 1, 4, &(pllm_bytes *){NULL}));
    CHECK(tokens == UNTOUCHED);
}

static void wrong_sampling_is_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
#define SAMPLING(assignment, refusal) (sampling = greedy(), sampling.assignment, refusal(add(engine, &request)))
    const float wrong[] = {NAN, -NAN, INFINITY, -INFINITY, -1, 1e30f};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        SAMPLING(temperature = wrong[i], INVALID);
        SAMPLING(top_p = wrong[i], INVALID);
        SAMPLING(min_p = wrong[i], INVALID);
    }
    SAMPLING(top_p = 0, INVALID);
    SAMPLING(seed = 3, INVALID);  // without its flag
    SAMPLING(flags = 64, UNSUPPORTED);
    SAMPLING(reserved = 1, UNSUPPORTED);
    sampling = greedy();
    sampling.max_tokens = 3;
    sampling.min_tokens = 4;
    INVALID(add(engine, &request));
    sampling = greedy();
    sampling.stop_token_ids = (const uint32_t[]){UINT32_MAX};
    sampling.stop_token_ids_len = 1;
    INVALID(add(engine, &request));
    sampling = greedy();
    sampling.stop = (const char *const[]){""};
    sampling.stop_count = 1;
    INVALID(add(engine, &request));
    request = token_request(NULL);
    request.text_flags = 4;
    UNSUPPORTED(add(engine, &request));
    request = token_request(NULL);
    request.n = 0;
    INVALID(add(engine, &request));
}

static void wrong_prompts_are_refused(const pllm_engine *engine) {
    static const uint32_t many[5000] = {1};
    pllm_request request = token_request(NULL);
    request.prompt_token_ids = (const uint32_t[]){1, UINT32_MAX};
    request.prompt_token_ids_len = 2;
    INVALID(add(engine, &request));
    request.prompt_token_ids = many;
    request.prompt_token_ids_len = COUNT(many);
    INVALID(add(engine, &request));
    request.prompt_token_ids = (const uint32_t *)(uintptr_t)((uintptr_t)many + 1);  // not aligned
    request.prompt_token_ids_len = 3;
    INVALID(add(engine, &request));
    request = text_request("", NULL);
    INVALID(add(engine, &request));
}

static void text_that_is_not_utf8_is_refused(const pllm_engine *engine) {
    static const char *const wrong[] = {"\xff", "ab\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80", "a\x80z"};
    pllm_tokens *tokens = UNTOUCHED;
    pllm_bytes *bytes = UNTOUCHED;
    for (size_t i = 0; i < COUNT(wrong); i++) {
        pllm_engine_options options = options_for(wrong[i]);
        pllm_plan plan = {.struct_size = sizeof plan};
        INVALID(pllm_engine_plan(&options, &plan));
        options = options_for(golden_dir);
        options.device = wrong[i];
        options.device_len = strlen(wrong[i]);
        INVALID(pllm_engine_plan(&options, &plan));
        pllm_request request = text_request(wrong[i], NULL);
        INVALID(add(engine, &request));
        pllm_sampling sampling = greedy();
        sampling.stop = &wrong[i];
        sampling.stop_count = 1;
        request = text_request("hello", &sampling);
        INVALID(add(engine, &request));
        INVALID(pllm_engine_tokenize(engine, wrong[i], PLLM_NUL_TERMINATED, 0, &tokens));
        INVALID(pllm_engine_render_chat(engine, wrong[i], strlen(wrong[i]), &bytes));
    }
    CHECK(tokens == UNTOUCHED && bytes == UNTOUCHED);
}

static void a_chat_that_is_no_chat_is_refused(const pllm_engine *engine) {
    static const char *const wrong[] = {"", "{", "[", "3", "null", "\"x\"", "{}", "{\"messages\": 3}", "[{\"role\": \"user\"}",
                                        "[] x", "{\"messages\": [], \"messages\"", "[{\"role\": \"\\ud800\", \"content\": \"\"}]"};
    static char deep[200000];
    pllm_bytes *bytes = UNTOUCHED;
    for (size_t i = 0; i < COUNT(wrong); i++) INVALID(pllm_engine_render_chat(engine, wrong[i], strlen(wrong[i]), &bytes));
    memset(deep, '[', sizeof deep);
    INVALID(pllm_engine_render_chat(engine, deep, sizeof deep, &bytes));
    CHECK(bytes == UNTOUCHED);
}

static void a_missing_model_is_an_error(void) {
    pllm_engine_options options = options_for("/nonexistent/model");
    _Alignas(8) unsigned char bytes[sizeof(pllm_plan)];
    pllm_engine *engine = UNTOUCHED;
    memset(bytes, POISON, sizeof bytes);
    *(uint64_t *)(void *)bytes = sizeof bytes;
    FAILS(PLLM_E_IO, pllm_engine_plan(&options, (pllm_plan *)(void *)bytes));
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    options.model_path = "a\0b";
    options.model_path_len = 3;
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    CHECK(engine == UNTOUCHED && all(bytes, 8, sizeof bytes, POISON));
}

static void text_needs_a_tokenizer(const pllm_engine *golden) {
    pllm_tokens *tokens = UNTOUCHED;
    pllm_bytes *bytes = UNTOUCHED;
    pllm_request request = text_request("hello", NULL);
    UNSUPPORTED(add(golden, &request));
    UNSUPPORTED(pllm_engine_tokenize(golden, "a", 1, 0, &tokens));
    UNSUPPORTED(pllm_engine_detokenize(golden, PROMPT, 1, 0, &bytes));
    UNSUPPORTED(pllm_engine_render_chat(golden, "[]", 2, &bytes));
    pllm_sampling sampling = greedy();
    sampling.stop = (const char *const[]){"x"};
    sampling.stop_count = 1;
    request = token_request(&sampling);
    UNSUPPORTED(add(golden, &request));
    CHECK(tokens == UNTOUCHED && bytes == UNTOUCHED);
}

static void ids_that_are_not_live_are_not_found(const pllm_engine *engine) {
    const uint64_t unknown[] = {0, 1ull << 40, UINT64_MAX};
    for (size_t i = 0; i < COUNT(unknown); i++) FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(engine, unknown[i]));
    pllm_sampling sampling = greedy();
    sampling.max_tokens = 2;
    pllm_request request = token_request(&sampling);
    pllm_step step = {.struct_size = sizeof step};
    uint64_t finished = 0, aborted = 0, next = 0;
    answer a = {0}, b = {0};
    OK(pllm_engine_add_request(engine, &request, &finished));
    do OK(pllm_engine_step(engine, &step));
    while (step.unfinished);
    FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(engine, finished));
    OK(pllm_engine_add_request(engine, &request, &aborted));
    OK(pllm_engine_abort(engine, aborted));
    OK(pllm_engine_step(engine, &step));
    CHECK(step.unfinished == 0);
    FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(engine, aborted));
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        if (o->request == finished || o->request == aborted) take(o->request == finished ? &a : &b, o);
    }
    pllm_outputs_free(outputs);
    CHECK(a.finish_reason == PLLM_FINISH_LENGTH && a.tokens_len == 2);
    CHECK(b.finish_reason == PLLM_FINISH_ABORT && b.tokens_len == 0);
    OK(pllm_engine_add_request(engine, &request, &next));
    CHECK(next != finished && next != aborted);
    OK(pllm_engine_abort(engine, next));
    OK(pllm_engine_step(engine, &step));
    CHECK(idle(engine));
}

// ---- text and generation ---------------------------------------------------------------------------------------------

static void text_and_tokens_go_back_and_forth(const pllm_engine *engine) {
    const char *text = "Hello, world! \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80";
    pllm_tokens *tokens = NULL;
    pllm_bytes *bytes = NULL;
    OK(pllm_engine_tokenize(engine, text, PLLM_NUL_TERMINATED, 0, &tokens));
    OK(pllm_engine_detokenize(engine, pllm_tokens_data(tokens), pllm_tokens_len(tokens), PLLM_TEXT_SKIP_SPECIAL, &bytes));
    CHECK(pllm_bytes_len(bytes) == strlen(text) && !memcmp(pllm_bytes_data(bytes), text, strlen(text)));
    pllm_tokens_free(tokens);
    pllm_bytes_free(bytes);
    OK(pllm_engine_tokenize(engine, NULL, 0, 0, &tokens));
    CHECK(pllm_tokens_len(tokens) == 0 && pllm_tokens_data(tokens) == NULL);
    pllm_tokens_free(tokens);
    OK(pllm_engine_detokenize(engine, NULL, 0, 0, &bytes));
    CHECK(pllm_bytes_len(bytes) == 0 && pllm_bytes_data(bytes) == NULL);
    pllm_bytes_free(bytes);
    bytes = UNTOUCHED;
    INVALID(pllm_engine_detokenize(engine, (const uint32_t[]){5, UINT32_MAX}, 2, 0, &bytes));
    INVALID(pllm_engine_detokenize(engine, (const uint32_t[]){1024}, 1, 0, &bytes));
    CHECK(bytes == UNTOUCHED);
    const char *chat = "[{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]";
    OK(pllm_engine_render_chat(engine, chat, PLLM_NUL_TERMINATED, &bytes));
    CHECK(pllm_bytes_len(bytes) == strlen(FRANCE) && !memcmp(pllm_bytes_data(bytes), FRANCE, strlen(FRANCE)));
    pllm_bytes_free(bytes);
}

static int text_is(const answer *a, const char *text, uint64_t len) { return a->text_len == len && !memcmp(a->text, text, len); }

// The streamed pieces are what the tokens say together; the one that ended the sequence has no text.
static int text_is_of_tokens(const pllm_engine *engine, const answer *a) {
    uint64_t shown = a->tokens_len - (a->finish_reason == PLLM_FINISH_STOP);
    pllm_bytes *bytes = NULL;
    OK(pllm_engine_detokenize(engine, a->tokens, shown, PLLM_TEXT_SKIP_SPECIAL, &bytes));
    int same = text_is(a, pllm_bytes_data(bytes), pllm_bytes_len(bytes));
    pllm_bytes_free(bytes);
    return same;
}

static void an_answer_ends_with_the_model_s_own_stop(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    pllm_tokens *prompt = NULL;
    request.user_data = 0xFEDCBA9876543210;
    const answer *a = run(engine, &request);
    CHECK(a->finish_reason == PLLM_FINISH_STOP && a->error_code == 0);
    CHECK(text_is(a, PARIS, strlen(PARIS)) && text_is_of_tokens(engine, a));
    CHECK(a->logprobs_len == 0);
    CHECK(a->user_data == 0xFEDCBA9876543210);
    CHECK(a->generated_tokens == a->tokens_len && a->tokens[a->tokens_len - 1] == 5);
    OK(pllm_engine_tokenize(engine, FRANCE, PLLM_NUL_TERMINATED, 0, &prompt));
    CHECK(a->prompt_tokens == pllm_tokens_len(prompt));
    pllm_tokens_free(prompt);
    CHECK(idle(engine));
}

static void logprobs_come_where_they_are_asked_for(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const answer *without = run(engine, &request);
    sampling.flags = PLLM_SAMPLING_LOGPROBS;
    const answer *with = run(engine, &request);
    CHECK(same(with, without) && with->logprobs_len == with->tokens_len);
    for (uint64_t i = 0; i < with->logprobs_len; i++) CHECK(with->logprobs[i] <= 0 && with->logprobs[i] > -20);
}

static void max_tokens_ends_an_answer(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    for (uint32_t most = 1; most <= 9; most += 4) {
        sampling.max_tokens = most;
        const answer *a = run(engine, &request);
        CHECK(a->finish_reason == PLLM_FINISH_LENGTH && a->tokens_len == most && text_is_of_tokens(engine, a));
    }
}

static void ignore_eos_goes_on(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const answer *stopped = run(engine, &request);
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    sampling.max_tokens = (uint32_t)stopped->tokens_len + 10;
    const answer *a = run(engine, &request);
    CHECK(a->finish_reason == PLLM_FINISH_LENGTH && a->tokens_len == stopped->tokens_len + 10);
    CHECK(!memcmp(a->tokens, stopped->tokens, stopped->tokens_len * sizeof *a->tokens));
    CHECK(text_is_of_tokens(engine, a));
}

static void a_stop_token_ends_an_answer_without_its_text(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const answer *whole = run(engine, &request);
    sampling.stop_token_ids = (const uint32_t[]){1000, whole->tokens[4]};
    sampling.stop_token_ids_len = 2;
    const answer *a = run(engine, &request);
    CHECK(a->finish_reason == PLLM_FINISH_STOP && a->tokens_len == 5 && text_is_of_tokens(engine, a));
    CHECK(text_is(a, whole->text, whole->text_ends[3]));
}

// For each two neighbouring tokens: a stop string that begins in the first and ends in the second.
static void a_stop_string_across_tokens_ends_an_answer_and_is_not_shown(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const answer whole = *run(engine, &request);
    int tried = 0;
    for (uint64_t i = 0; i + 2 < whole.tokens_len; i++) {
        if (whole.text_ends[i] == 0 || whole.text_ends[i + 1] == whole.text_ends[i]) continue;
        const char stop[3] = {whole.text[whole.text_ends[i] - 1], whole.text[whole.text_ends[i]], 0};
        const char *stops[] = {"never said", stop};
        sampling.stop = stops;
        sampling.stop_count = 2;
        const answer *a = run(engine, &request);
        CHECK(a->finish_reason == PLLM_FINISH_STOP && a->tokens_len < whole.tokens_len);
        CHECK(text_is(a, whole.text, (uint64_t)(strstr(whole.text, stop) - whole.text)));
        tried++;
    }
    CHECK(tried > 5);
    // Lengths instead of NULs; a stop string that never comes holds nothing back.
    sampling.stop = (const char *const[]){"Parisian"};
    sampling.stop_lens = (const uint64_t[]){5};
    sampling.stop_count = 1;
    CHECK(text_is(run(engine, &request), PARIS, strlen("The capital of France is ")));
    sampling.stop_lens = NULL;
    CHECK(text_is(run(engine, &request), PARIS, strlen(PARIS)));
}

static void a_seed_decides_alone(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    sampling.temperature = 1.5f;
    sampling.max_tokens = 20;
    sampling.flags = PLLM_SAMPLING_SEED;
    sampling.seed = 3;
    const answer *a = run(engine, &request), *b = run(engine, &request);
    CHECK(same(a, b));
    sampling.seed = 4;
    CHECK(!same(a, run(engine, &request)));
}

// Streams of several requests at once: pieces of each are told apart, and counts add up.
static void usage_counts_add_up(const pllm_engine *engine) {
    pllm_stats before = stats_of(engine);
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    sampling.max_tokens = 7;
    uint64_t ids[6], generated = 0, prompts = 0, ended = 0;
    for (size_t i = 0; i < COUNT(ids); i++) {
        request.user_data = i;
        OK(pllm_engine_add_request(engine, &request, &ids[i]));
    }
    pllm_step step = {.struct_size = sizeof step};
    uint64_t decoded = 0, prefilled = 0;
    do {
        OK(pllm_engine_step(engine, &step));
        decoded += step.decode_tokens;
        prefilled += step.prefill_tokens;
        pllm_outputs *outputs = NULL;
        OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
            const pllm_output *o = pllm_outputs_get(outputs, i);
            CHECK(o->user_data < COUNT(ids) && ids[o->user_data] == o->request);
            generated += o->tokens_len;
            if (o->finish_reason) ended++, prompts += o->prompt_tokens;
        }
        CHECK(pllm_outputs_get(outputs, pllm_outputs_len(outputs)) == NULL && pllm_outputs_get(outputs, UINT64_MAX) == NULL);
        pllm_outputs_free(outputs);
    } while (step.unfinished);
    pllm_stats after = stats_of(engine);
    CHECK(ended == COUNT(ids) && generated == 7 * COUNT(ids));
    CHECK(after.generated_tokens - before.generated_tokens == generated);
    CHECK(after.prompt_tokens - before.prompt_tokens == prompts && prefilled == prompts);
    CHECK(decoded == generated - COUNT(ids));  // the first token of each comes of its prompt
    CHECK(after.finished_length - before.finished_length == COUNT(ids));
    CHECK(idle(engine));
}

static void info_and_plan_agree(const pllm_engine *engine) {
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    pllm_model_info info = {.struct_size = sizeof info};
    OK(pllm_engine_plan(&options, &plan));
    OK(pllm_engine_get_model_info(engine, &info));
    CHECK(info.architecture_len == strlen("LlamaForCausalLM") && !memcmp(info.architecture, "LlamaForCausalLM", info.architecture_len));
    CHECK(info.isa_len > 0 && info.vocab_size == 1024 && info.layers == 4 && info.max_positions == 1024 && info.threads == 2);
    CHECK(info.eos_token_ids_len == 2 && info.eos_token_ids[0] == 5 && info.eos_token_ids[1] == 1);
    CHECK(info.max_model_len == plan.max_model_len);
    CHECK(plan.blocks == stats_of(engine).blocks_total && plan.kv_bytes == plan.blocks * plan.block_bytes && plan.kv_bytes <= options.kv_bytes);
    CHECK(plan.block_size == 16 && plan.kv_dtype == PLLM_DTYPE_BF16 && plan.weight_bytes >= 2 * 2623744 && plan.work_bytes > 0);
}

// ---- sequences as values ---------------------------------------------------------------------------------------------

static const uint64_t NEVER[] = {0, 1ull << 40, UINT64_MAX};

static pllm_step step_of(const pllm_engine *engine) {
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_step(engine, &step));
    return step;
}

static void step_to_the_end(const pllm_engine *engine) {
    while (step_of(engine).unfinished) continue;
}

static pllm_sequence_info info_of(const pllm_engine *engine, uint64_t sequence) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    OK(pllm_sequence_get_info(engine, sequence, &info));
    return info;
}

// Ends after so many greedy tokens, and stays.
static uint64_t keep_one(const pllm_engine *engine, uint32_t tokens) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    uint64_t id = 0;
    sampling.max_tokens = tokens;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    request.flags = PLLM_REQUEST_KEEP;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_to_the_end(engine);
    collect(engine, 0, &(answer){0});
    CHECK(info_of(engine, id).idle == 1 && info_of(engine, id).len == COUNT(PROMPT) + tokens);
    return id;
}

static void forget(const pllm_engine *engine, uint64_t sequence) {
    OK(pllm_sequence_free(engine, sequence));
    step_of(engine);
}

static uint64_t kept;  // what the structs below are tried on

static pllm_error *use_dry(const pllm_engine *engine, place *at) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.dry = (pllm_dry *)(void *)at;
    return add(engine, &request);
}

static pllm_error *use_beam(const pllm_engine *engine, place *at) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.max_tokens = 1;
    request.beam = (pllm_beam *)(void *)at;
    return add(engine, &request);
}

static pllm_error *use_fork(const pllm_engine *engine, place *at) {
    uint64_t child = 0;
    pllm_error *error = pllm_sequence_fork(engine, kept, (pllm_fork *)(void *)at, &child);
    if (!error) OK(pllm_sequence_free(engine, child));
    return error;
}

static pllm_error *use_resume(const pllm_engine *engine, place *at) {
    uint64_t child = 0;
    OK(pllm_sequence_fork(engine, kept, NULL, &child));
    pllm_error *error = pllm_sequence_resume(engine, child, (pllm_resume *)(void *)at);
    OK(pllm_sequence_free(engine, child));
    return error;
}

static pllm_error *use_pin(const pllm_engine *engine, place *at) {
    uint64_t pin = 0;
    pllm_error *error = pllm_prefix_pin(engine, (pllm_pin *)(void *)at, &pin);
    if (!error) OK(pllm_prefix_unpin(engine, pin));
    return error;
}

static pllm_error *write_sequence_info(const pllm_engine *engine, place *at) {
    return pllm_sequence_get_info(engine, kept, (pllm_sequence_info *)(void *)at);
}

static void init_dry(void *to, uint64_t size) { pllm_dry_init(to, size); }
static void init_beam(void *to, uint64_t size) { pllm_beam_init(to, size); }
static void init_fork(void *to, uint64_t size) { pllm_fork_init(to, size); }
static void init_resume(void *to, uint64_t size) { pllm_resume_init(to, size); }
static void init_pin(void *to, uint64_t size) { pllm_pin_init(to, size); }

static pllm_pin token_pin(void) {
    pllm_pin pin;
    pllm_pin_init(&pin, sizeof pin);
    pin.prompt_token_ids = PROMPT;
    pin.prompt_token_ids_len = COUNT(PROMPT);
    return pin;
}

static void structs_of_sequences_have_the_size_of_some_version(const pllm_engine *engine) {
    pllm_dry dry;
    pllm_beam beam;
    pllm_fork how;
    pllm_resume resume;
    pllm_pin pin = token_pin();
    pllm_dry_init(&dry, sizeof dry);
    pllm_beam_init(&beam, sizeof beam);
    pllm_fork_init(&how, sizeof how);
    pllm_resume_init(&resume, sizeof resume);
    kept = keep_one(engine, 3);
    init_stays_within_its_size(init_dry, 48, sizeof dry);
    init_stays_within_its_size(init_beam, 32, sizeof beam);
    init_stays_within_its_size(init_fork, 48, sizeof how);
    init_stays_within_its_size(init_resume, 56, sizeof resume);
    init_stays_within_its_size(init_pin, 72, sizeof pin);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_dry, &dry, 48, sizeof dry);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_beam, &beam, 32, sizeof beam);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_fork, &how, 48, sizeof how);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_resume, &resume, 56, sizeof resume);
    a_struct_to_be_read_has_the_size_of_some_version(engine, use_pin, &pin, 72, sizeof pin);
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_sequence_info, 32, sizeof(pllm_sequence_info));
    forget(engine, kept);
    step_to_the_end(engine);
    collect(engine, 0, &(answer){0});
    CHECK(idle(engine));
}

static void null_sequences_and_pins_are_refused_and_outputs_stay(const pllm_engine *engine) {
    const uint64_t id = keep_one(engine, 3);
    pllm_fork how;
    pllm_pin pin = token_pin(), neither = pin, both = pin, no_salt = pin;
    pllm_sequence_info info;
    uint64_t out = 77;
    pllm_fork_init(&how, sizeof how);
    memset(&info, POISON, sizeof info);
    info.struct_size = sizeof info;
    INVALID(pllm_sequence_fork(NULL, id, &how, &out));
    INVALID(pllm_sequence_fork(engine, id, &how, NULL));
    INVALID(pllm_sequence_append(NULL, id, PROMPT, 1));
    INVALID(pllm_sequence_append(engine, id, NULL, 1));
    OK(pllm_sequence_append(engine, id, NULL, 0));
    INVALID(pllm_sequence_rewind(NULL, id, 1));
    INVALID(pllm_sequence_resume(NULL, id, NULL));
    INVALID(pllm_sequence_free(NULL, id));
    INVALID(pllm_sequence_get_info(NULL, id, &info));
    INVALID(pllm_sequence_get_info(engine, id, NULL));
    INVALID(pllm_prefix_pin(NULL, &pin, &out));
    INVALID(pllm_prefix_pin(engine, NULL, &out));
    INVALID(pllm_prefix_pin(engine, &pin, NULL));
    INVALID(pllm_prefix_unpin(NULL, 1));
    neither.prompt_token_ids = NULL;
    INVALID(pllm_prefix_pin(engine, &neither, &out));
    both.prompt = "hello";
    INVALID(pllm_prefix_pin(engine, &both, &out));
    no_salt.cache_salt_len = 3;
    INVALID(pllm_prefix_pin(engine, &no_salt, &out));
    CHECK(out == 77 && all(&info, 8, sizeof info, POISON));
    CHECK(info_of(engine, id).idle == 1 && info_of(engine, id).len == COUNT(PROMPT) + 3);
    forget(engine, id);
    CHECK(idle(engine));
}

// Every list of the sampling parameters: NULL with a length, and a list that holds NULL.
static void null_lists_are_refused(const pllm_engine *engine) {
    static const char *const null_text[] = {NULL};
    static const pllm_token_list null_list[] = {{NULL, 1}};
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_dry dry;
#define LIST(list, len) (sampling = greedy(), sampling.len = 1, INVALID(add(engine, &request)))
#define LIST_OF_NULL(list, len, null) (sampling = greedy(), sampling.list = null, sampling.len = 1, INVALID(add(engine, &request)))
    LIST(logit_bias, logit_bias_len);
    LIST(bad_words, bad_word_count);
    LIST_OF_NULL(bad_words, bad_word_count, null_text);
    LIST(bad_words_ids, bad_words_ids_len);
    LIST_OF_NULL(bad_words_ids, bad_words_ids_len, null_list);
    LIST(allowed_token_ids, allowed_token_ids_len);
    for (uint32_t kind = PLLM_GRAMMAR_JSON_SCHEMA; kind <= PLLM_GRAMMAR_LARK; kind++) {
        sampling = greedy();
        sampling.grammar_kind = kind;
        sampling.choice_count = 1;
        if (kind != PLLM_GRAMMAR_JSON_OBJECT) INVALID(add(engine, &request));
        sampling.choices = null_text;
        if (kind == PLLM_GRAMMAR_CHOICE) INVALID(add(engine, &request));
    }
    sampling = greedy();
    pllm_dry_init(&dry, sizeof dry);
    sampling.dry = &dry;
    dry.sequence_breaker_count = 1;
    INVALID(add(engine, &request));
    dry.sequence_breakers = null_text;
    INVALID(add(engine, &request));
    request = token_request(NULL);
    request.cache_salt_len = 1;
    INVALID(add(engine, &request));
    CHECK(step_of(engine).sequences == 0 && idle(engine));
}

static void wrong_new_sampling_is_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    const float wrong[] = {NAN, -NAN, INFINITY, -INFINITY, -3, 1e30f};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        SAMPLING(typical_p = wrong[i], INVALID);
        SAMPLING(top_n_sigma = wrong[i], INVALID);
        SAMPLING(xtc_probability = wrong[i], INVALID);
        SAMPLING(xtc_threshold = wrong[i], INVALID);
        SAMPLING(mirostat_tau = wrong[i], INVALID);
        SAMPLING(presence_penalty = wrong[i], INVALID);
        SAMPLING(frequency_penalty = wrong[i], INVALID);
        SAMPLING(repetition_penalty = wrong[i], INVALID);
    }
    SAMPLING(repetition_penalty = 0, INVALID);
    SAMPLING(no_repeat_ngram_size = 257, INVALID);
    SAMPLING(top_logprobs = 1, INVALID);  // without its flag
    SAMPLING(prompt_top_logprobs = 1, INVALID);
    SAMPLING(output_kind = 3, INVALID);
    SAMPLING(grammar_kind = 6, INVALID);
    SAMPLING(grammar = "x", INVALID);  // of no kind
    SAMPLING(logit_bias_len = 5000, INVALID);
    sampling = greedy();
    sampling.flags = PLLM_SAMPLING_LOGPROBS;
    sampling.top_logprobs = 129;
    INVALID(add(engine, &request));
    static const struct { uint32_t kind; const char *grammar; } nonsense[] = {
        {PLLM_GRAMMAR_JSON_SCHEMA, "{"}, {PLLM_GRAMMAR_JSON_SCHEMA, "{\"type\": \"nothing\"}"}, {PLLM_GRAMMAR_REGEX, "("},
        {PLLM_GRAMMAR_LARK, "start: ("}, {PLLM_GRAMMAR_LARK, ""}, {PLLM_GRAMMAR_REGEX, "\xff"},
    };
    for (size_t i = 0; i < COUNT(nonsense); i++) {
        sampling = greedy();
        sampling.grammar_kind = nonsense[i].kind;
        sampling.grammar = nonsense[i].grammar;
        INVALID(add(engine, &request));
    }
    sampling = greedy();
    sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;  // of nothing
    INVALID(add(engine, &request));
    CHECK(step_of(engine).sequences == 0 && idle(engine));
}

static void wrong_branching_is_refused(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request;
    pllm_beam beam;
    sampling.max_tokens = 2;
#define REQUEST(assignment, refusal) (request = token_request(&sampling), request.assignment, refusal(add(engine, &request)))
    REQUEST(n = 2, OK);
    REQUEST(n = UINT32_MAX, INVALID);
    REQUEST(best_of = UINT32_MAX, INVALID);
    REQUEST(n = 17, INVALID);  // max_seqs is 16
    REQUEST(flags = 2, UNSUPPORTED);
    REQUEST(reserved = 1, UNSUPPORTED);
    request = token_request(&sampling);
    request.n = 3;
    request.best_of = 2;
    INVALID(add(engine, &request));
#define BEAM(assignment, refusal) (pllm_beam_init(&beam, sizeof beam), beam.assignment, REQUEST(beam = &beam, refusal))
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
    INVALID(add(engine, &request));
    step_to_the_end(engine);
    collect(engine, 0, &(answer){0});
    CHECK(idle(engine));
}

static void wrong_uses_of_a_sequence_are_refused(const pllm_engine *engine) {
    static const uint32_t many[5000] = {1}, beyond[] = {1, 2, 3, UINT32_MAX};
    const uint64_t id = keep_one(engine, 3), len = COUNT(PROMPT) + 3;
    uint64_t out[4] = {77, 77, 77, 77};
    pllm_fork how;
    pllm_resume resume;
    pllm_pin pin;
    pllm_sampling sampling = greedy();
#define FORK(assignment, refusal) (pllm_fork_init(&how, sizeof how), how.assignment, refusal(pllm_sequence_fork(engine, id, &how, out)))
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
#define RESUME(assignment, refusal) \
    (pllm_resume_init(&resume, sizeof resume), resume.assignment, refusal(pllm_sequence_resume(engine, id, &resume)))
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
#define PIN(assignment, refusal) (pin = token_pin(), pin.assignment, refusal(pllm_prefix_pin(engine, &pin, out)))
    PIN(text_flags = PLLM_TEXT_SKIP_SPECIAL, UNSUPPORTED);
    PIN(prompt_token_ids_len = 0, INVALID);
    PIN(prompt_token_ids = beyond, INVALID);
    pin.prompt_token_ids = many;
    pin.prompt_token_ids_len = COUNT(many);
    INVALID(pllm_prefix_pin(engine, &pin, out));
    for (size_t i = 0; i < COUNT(out); i++) CHECK(out[i] == 77);
    CHECK(info_of(engine, id).idle == 1 && info_of(engine, id).len == len);
    OK(pllm_sequence_resume(engine, id, NULL));
    INVALID(pllm_sequence_resume(engine, id, NULL));  // it runs
    forget(engine, id);
    collect(engine, 0, &(answer){0});
    CHECK(idle(engine));
}

static pllm_resume going_on(uint32_t flags) {
    pllm_resume how;
    pllm_resume_init(&how, sizeof how);
    how.flags = PLLM_RESUME_CONTINUE | flags;
    return how;
}

static pllm_error *go_on(const pllm_engine *engine, uint64_t sequence, uint32_t flags) {
    const pllm_resume how = going_on(flags);
    return pllm_sequence_resume(engine, sequence, &how);
}

static void every_call_on_a_stale_sequence_is_not_found(const pllm_engine *engine, uint64_t id) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    uint64_t out = 77;
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_fork(engine, id, NULL, &out));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_append(engine, id, PROMPT, 1));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_rewind(engine, id, 1));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_resume(engine, id, NULL));
    FAILS(PLLM_E_NOT_FOUND, go_on(engine, id, 0));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_export(engine, id, NULL));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_free(engine, id));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_get_info(engine, id, &info));
    FAILS(PLLM_E_NOT_FOUND, pllm_prefix_unpin(engine, id));
    CHECK(out == 77 && info.len == 0);
}

static void sequences_that_are_gone_are_not_found(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_pin pin = token_pin();
    uint64_t not_kept = 0, pinned = 0;
    for (size_t i = 0; i < COUNT(NEVER); i++) every_call_on_a_stale_sequence_is_not_found(engine, NEVER[i]);
    sampling.max_tokens = 2;
    OK(pllm_engine_add_request(engine, &request, &not_kept));
    step_to_the_end(engine);
    every_call_on_a_stale_sequence_is_not_found(engine, not_kept);
    uint64_t freed = keep_one(engine, 1);
    OK(pllm_sequence_free(engine, freed));
    every_call_on_a_stale_sequence_is_not_found(engine, freed);  // from the call on, and for good
    step_of(engine);
    every_call_on_a_stale_sequence_is_not_found(engine, freed);
    OK(pllm_prefix_pin(engine, &pin, &pinned));
    OK(pllm_prefix_unpin(engine, pinned));
    every_call_on_a_stale_sequence_is_not_found(engine, pinned);
    step_of(engine);
    collect(engine, 0, &(answer){0});
    CHECK(idle(engine));
}

// Whatever ended it, and wherever it was.
static void a_kept_sequence_stays_however_it_ends(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    sampling.max_tokens = 100;
    request.flags = PLLM_REQUEST_KEEP;
    for (uint32_t n = 1; n <= 3; n++)
        for (int steps = 0; steps < 3; steps++) {
            uint64_t id = 0, begun = steps ? n : 1;
            request.n = n;
            OK(pllm_engine_add_request(engine, &request, &id));
            for (int i = 0; i < steps; i++) step_of(engine);
            OK(pllm_engine_abort(engine, id));
            CHECK(step_of(engine).unfinished == 0);
            CHECK(stats_of(engine).idle == begun);
            for (uint64_t i = 0; i < begun; i++) CHECK(info_of(engine, id + i).idle == 1);
            for (uint64_t i = 0; i < begun; i++) OK(pllm_sequence_free(engine, id + i));
            step_of(engine);
            CHECK(idle(engine));
        }
    collect(engine, 0, &(answer){0});
}

// Where there are two of everything: what came of a request's sequences, by index.
typedef struct {
    uint64_t outputs, ends, tokens_len, request;
    uint64_t sequences[8];
    uint32_t tokens[8][64], lens[8];
    double scores[8];
} branches;

static void gather(const pllm_engine *engine, branches *b) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        if (o->request != b->request || !CHECK(o->index < 8 && b->lens[o->index] + o->tokens_len <= 64)) continue;
        b->outputs++;
        b->ends += o->finish_reason != PLLM_FINISH_NONE;
        b->sequences[o->index] = o->sequence;
        b->scores[o->index] = o->score;
        for (uint64_t t = 0; t < o->tokens_len; t++) b->tokens[o->index][b->lens[o->index]++] = o->tokens[t];
    }
    pllm_outputs_free(outputs);
}

static branches run_branches(const pllm_engine *engine, const pllm_request *request) {
    branches b = {0};
    OK(pllm_engine_add_request(engine, request, &b.request));
    step_to_the_end(engine);
    gather(engine, &b);
    CHECK(b.ends == request->n && idle(engine));
    return b;
}

// What a beam search says comes at its end, and none of its beams can be taken out on the way.
static void beams_belong_together(const pllm_engine *engine, const pllm_request *request) {
    branches b = {0};
    uint64_t out = 77;
    OK(pllm_engine_add_request(engine, request, &b.request));
    for (int i = 0; i < 3; i++) step_of(engine);
    gather(engine, &b);
    CHECK(b.outputs == 0);
    INVALID(pllm_sequence_fork(engine, b.request, NULL, &out));
    INVALID(pllm_sequence_append(engine, b.request, PROMPT, 1));
    INVALID(pllm_sequence_rewind(engine, b.request, 1));
    INVALID(pllm_sequence_export(engine, b.request, NULL));
    INVALID(pllm_sequence_free(engine, b.request));
    every_call_on_a_stale_sequence_is_not_found(engine, b.request + 1);
    OK(pllm_engine_abort(engine, b.request));
    step_to_the_end(engine);
    gather(engine, &b);
    CHECK(b.ends == request->n && b.outputs == request->n && out == 77 && idle(engine));
}

static void n_samples_end_one_by_one_and_the_best_ones_at_the_end(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    pllm_beam beam;
    sampling.temperature = 1.5f;
    sampling.max_tokens = 20;
    sampling.flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS;
    sampling.seed = 9;
    request.n = 3;
    branches samples = run_branches(engine, &request);
    CHECK(samples.outputs == 60);
    for (uint64_t i = 0; i < 3; i++) CHECK(samples.sequences[i] == samples.request + i && samples.lens[i] == 20);
    CHECK(memcmp(samples.tokens[0], samples.tokens[1], sizeof samples.tokens[0]));
    request.best_of = 3;
    request.n = 1;
    branches best = run_branches(engine, &request);
    double most = samples.scores[0];
    for (int i = 1; i < 3; i++) most = samples.scores[i] > most ? samples.scores[i] : most;
    CHECK(best.outputs == 1 && best.lens[0] == 20 && best.scores[0] > most - 1e-4 && best.scores[0] < most + 1e-4);
    sampling = greedy();
    sampling.max_tokens = 6;
    pllm_beam_init(&beam, sizeof beam);
    request.best_of = 0;
    request.n = 2;
    request.beam = &beam;
    for (beam.width = 2; beam.width <= 4; beam.width += 2) {
        branches beams = run_branches(engine, &request);
        CHECK(beams.outputs == 2 && beams.lens[0] > 0 && beams.lens[1] > 0 && beams.scores[0] >= beams.scores[1]);
        every_call_on_a_stale_sequence_is_not_found(engine, beams.request);
        every_call_on_a_stale_sequence_is_not_found(engine, beams.request + 1);
    }
    beams_belong_together(engine, &request);
}

// A conversation: what is resumed goes on as if it had been one prompt from the beginning, and only what is new is computed.
static void what_is_kept_goes_on_as_one_prompt_would(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request first = text_request(FRANCE, &sampling), whole;
    pllm_resume resume;
    pllm_tokens *next = NULL;
    answer a = {0}, b = {0};
    uint32_t all_tokens[256];
    uint64_t id = 0, len = 0, before;
    pllm_step step;
    sampling.max_tokens = 40;
    first.flags = PLLM_REQUEST_KEEP;
    OK(pllm_engine_add_request(engine, &first, &id));
    for (step = step_of(engine); step.unfinished; step = step_of(engine)) collect(engine, id, &a);
    collect(engine, id, &a);
    const char *turn = "\n<|user|>\nWhat is the capital of Japan?<|end|>\n<|assistant|>\n";
    OK(pllm_engine_tokenize(engine, turn, PLLM_NUL_TERMINATED, 0, &next));
    OK(pllm_sequence_append(engine, id, pllm_tokens_data(next), pllm_tokens_len(next)));
    before = stats_of(engine).prompt_tokens;
    pllm_resume_init(&resume, sizeof resume);
    resume.sampling = &sampling;
    OK(pllm_sequence_resume(engine, id, &resume));
    for (step = step_of(engine); step.unfinished; step = step_of(engine)) collect(engine, id, &b);
    collect(engine, id, &b);
    // The last answer's last token had been chosen, and not computed yet.
    CHECK(stats_of(engine).prompt_tokens - before == pllm_tokens_len(next) + 1);
    CHECK(b.prompt_tokens == a.prompt_tokens + a.tokens_len + pllm_tokens_len(next) && b.finish_reason == PLLM_FINISH_STOP);
    pllm_tokens *prompt = NULL;
    OK(pllm_engine_tokenize(engine, FRANCE, PLLM_NUL_TERMINATED, 0, &prompt));
    const struct { const uint32_t *tokens; uint64_t len; } parts[] = {
        {pllm_tokens_data(prompt), pllm_tokens_len(prompt)}, {a.tokens, a.tokens_len}, {pllm_tokens_data(next), pllm_tokens_len(next)}};
    for (size_t i = 0; i < COUNT(parts); len += parts[i++].len) memcpy(all_tokens + len, parts[i].tokens, parts[i].len * sizeof *all_tokens);
    whole = token_request(&sampling);
    whole.prompt_token_ids = all_tokens;
    whole.prompt_token_ids_len = len;
    CHECK(same(run(engine, &whole), &b));
    pllm_tokens_free(prompt);
    pllm_tokens_free(next);
    forget(engine, id);
    CHECK(idle(engine));
}

static void a_rewound_sequence_says_the_same_again_and_its_forks_too(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling);
    pllm_fork how;
    branches b = {0}, again = {0}, children[2] = {{0}, {0}};
    uint64_t ids[2] = {0, 0};
    sampling.temperature = 1.2f;
    sampling.flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS;
    sampling.seed = 5;
    sampling.max_tokens = 20;
    OK(pllm_engine_add_request(engine, &request, &b.request));
    for (int i = 0; i < 10; i++) step_of(engine);
    gather(engine, &b);
    const uint64_t len = info_of(engine, b.request).len, prompt = len - 10;
    pllm_fork_init(&how, sizeof how);
    how.at = prompt + 2;
    OK(pllm_sequence_fork(engine, b.request, &how, &ids[0]));
    how.flags = PLLM_FORK_SEED | PLLM_FORK_USER_DATA;
    how.seed = 6;
    how.user_data = 4711;
    OK(pllm_sequence_fork(engine, b.request, &how, &ids[1]));
    OK(pllm_sequence_rewind(engine, b.request, prompt + 2));
    for (int i = 0; i < 8; i++) step_of(engine);
    again.request = b.request;
    for (int i = 0; i < 2; i++) children[i].request = ids[i];
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        branches *to = o->request == again.request ? &again : o->request == ids[0] ? &children[0] : &children[1];
        CHECK(o->tokens_len == 1 && o->index == 0 && o->sequence == to->request && to->lens[0] < 64);
        CHECK(o->user_data == (to == &children[1] ? 4711 : 0));
        to->tokens[0][to->lens[0]++] = o->tokens[0];
    }
    pllm_outputs_free(outputs);
    CHECK(again.lens[0] == 8 && !memcmp(again.tokens[0], b.tokens[0] + 2, 8 * sizeof(uint32_t)));
    CHECK(children[0].lens[0] == 8 && !memcmp(children[0].tokens[0], b.tokens[0] + 2, 8 * sizeof(uint32_t)));
    CHECK(children[1].lens[0] == 8 && memcmp(children[1].tokens[0], b.tokens[0] + 2, 8 * sizeof(uint32_t)));
    CHECK(stats_of(engine).blocks_copied > 0);
    for (int i = 0; i < 2; i++) OK(pllm_sequence_free(engine, ids[i]));
    forget(engine, b.request);
    collect(engine, 0, &(answer){0});
    CHECK(idle(engine));
}

// ---- sequences that move ---------------------------------------------------------------------------------------------

// A sequence written down, and what it had said by then.
typedef struct {
    uint8_t *bytes;
    uint64_t len;
    answer said;
} writing;

static pllm_queue *new_queue(const pllm_engine *engine, uint64_t capacity) {
    pllm_queue *queue = NULL;
    if (!OK(pllm_queue_create(engine, capacity, &queue))) exit(1);
    return queue;
}

static uint64_t outputs_in(const pllm_queue *queue) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(queue, 0, &outputs));
    uint64_t len = pllm_outputs_len(outputs);
    pllm_outputs_free(outputs);
    return len;
}

// The one output of a queue.
static pllm_outputs *only_output(const pllm_queue *queue, const pllm_output **o) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(queue, 0, &outputs));
    if (!CHECK(pllm_outputs_len(outputs) == 1)) exit(1);
    *o = pllm_outputs_get(outputs, 0);
    return outputs;
}

static int is_a_state(const pllm_output *o, uint64_t sequence) {
    return o->sequence == sequence && o->sequence_state && o->sequence_state_len > 0 && o->finish_reason == PLLM_FINISH_NONE && !o->error && !o->tokens &&
           !o->text && !o->logprobs && !o->top_logprobs && !o->prompt_logprobs;
}

static writing written(const pllm_engine *engine, uint64_t sequence) {
    writing w = {0};
    pllm_queue *queue = new_queue(engine, 1);
    const pllm_output *o;
    OK(pllm_sequence_export(engine, sequence, queue));
    step_of(engine);
    pllm_outputs *outputs = only_output(queue, &o);
    if (!CHECK(is_a_state(o, sequence))) exit(1);
    w.bytes = memcpy(malloc(o->sequence_state_len), o->sequence_state, o->sequence_state_len);
    w.len = o->sequence_state_len;
    pllm_outputs_free(outputs);
    pllm_queue_free(queue);
    return w;
}

// `a`: what it has said. It is written down before the step that tells so; what it says in that step goes into `a`.
static writing write_down(const pllm_engine *engine, uint64_t sequence, answer *a) {
    const answer said = *a;
    writing w = written(engine, sequence);
    w.said = said;
    collect(engine, sequence, a);
    return w;
}

static uint64_t read_back(const pllm_engine *engine, const writing *w) {
    uint64_t id = 0;
    OK(pllm_sequence_import(engine, w->bytes, w->len, NULL, &id));
    CHECK(id != 0);
    return id;
}

static pllm_sampling drawn(void) {
    pllm_sampling sampling = greedy();
    sampling.temperature = 1.2f;
    sampling.seed = 5;
    sampling.max_tokens = 30;
    sampling.flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS;
    return sampling;
}

// With what it had said, it says what one says that never moved.
static void goes_on_to_the_same_end(const pllm_engine *engine, const writing *w, const answer *whole) {
    answer a = w->said;
    const uint64_t id = read_back(engine, w), len = whole->prompt_tokens + a.tokens_len;
    const pllm_sequence_info info = info_of(engine, id);
    CHECK(info.request == id && info.len == len && info.index == 0 && info.idle == 1 && info.inexact == 0);
    CHECK(step_of(engine).sequences == 0 && stats_of(engine).idle == 1);  // it waits
    OK(go_on(engine, id, 0));
    INVALID(go_on(engine, id, 0));  // it runs
    step_to_the_end(engine);
    collect(engine, id, &a);
    CHECK(same(&a, whole) && !memcmp(a.logprobs, whole->logprobs, sizeof a.logprobs) && a.user_data == 0);
    every_call_on_a_stale_sequence_is_not_found(engine, id);
    CHECK(idle(engine));
}

// Wherever it was: not begun, begun, nearly done.
static void a_sequence_that_moves_says_what_it_would_have_said(const pllm_engine *engine) {
    static const unsigned places[] = {0, 1, 10, 29};
    pllm_engine *other = open_engine(model_dir);
    pllm_sampling sampling = drawn();
    pllm_request request = text_request(STORY, &sampling);
    const answer whole = *run(engine, &request);
    for (size_t i = 0; i < COUNT(places); i++) {
        uint64_t id = 0;
        answer a = {0};
        OK(pllm_engine_add_request(engine, &request, &id));
        for (unsigned steps = 0; steps < places[i]; steps++) step_of(engine);
        collect(engine, id, &a);
        writing w = write_down(engine, id, &a);
        CHECK(w.said.tokens_len == places[i]);
        step_to_the_end(engine);
        collect(engine, id, &a);
        CHECK(same(&a, &whole));  // who was written down does not notice
        goes_on_to_the_same_end(engine, &w, &whole);
        goes_on_to_the_same_end(other, &w, &whole);
        free(w.bytes);
    }
    pllm_engine_free(other);
}

// Nothing else comes, and the counts are those of what it has said.
static void ends_with_an_error(const pllm_queue *queue, uint64_t sequence, const answer *said) {
    const pllm_output *o;
    pllm_outputs *outputs = only_output(queue, &o);
    CHECK(o->sequence == sequence && o->finish_reason == PLLM_FINISH_ERROR && o->user_data == said->user_data);
    CHECK(o->error_code == PLLM_E_INVALID_ARGUMENT && o->error_len > 9 && !o->tokens && !o->text && !o->sequence_state);
    CHECK(o->prompt_tokens == said->prompt_tokens && o->generated_tokens == said->generated_tokens && said->generated_tokens > 0);
    pllm_outputs_free(outputs);
}

// A sequence that had said nothing when it was written down, and what it says where it does not move.
static writing unsaid(const pllm_engine *engine, answer *whole) {
    pllm_sampling sampling = drawn();
    pllm_request request = text_request(STORY, &sampling);
    answer a = {0};
    uint64_t id = 0;
    *whole = *run(engine, &request);
    request.user_data = 4711;
    OK(pllm_engine_add_request(engine, &request, &id));
    writing w = write_down(engine, id, &a);
    forget(engine, id);
    collect(engine, id, &a);
    CHECK(a.finish_reason == PLLM_FINISH_ABORT && a.user_data == 4711);
    return w;
}

static void to_go_on_asks_for_nothing_but_where_whose_and_whether_to_keep(const pllm_engine *engine) {
    pllm_engine *other = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 64);
    pllm_sampling wrong = {.struct_size = 8};
    answer whole, a = {0};
    writing w = unsaid(engine, &whole);
    const uint64_t id = read_back(engine, &w);
    pllm_resume how = going_on(PLLM_RESUME_USER_DATA | PLLM_REQUEST_KEEP);
    how.sampling = &wrong;
    how.text_flags = UINT32_MAX;
    how.user_data = 4712;
    how.queue = pllm_engine_queue(other);
    INVALID(pllm_sequence_resume(engine, id, &how));
    CHECK(info_of(engine, id).idle == 1);
    how.queue = queue;
    OK(pllm_sequence_resume(engine, id, &how));
    step_to_the_end(engine);
    collect_from(queue, id, &a);
    CHECK(same(&a, &whole) && a.user_data == 4712 && info_of(engine, id).idle == 1);
    free(w.bytes);
    forget(engine, id);
    pllm_queue_free(queue);
    pllm_engine_free(other);
    CHECK(outputs_in(pllm_engine_queue(engine)) == 0 && idle(engine));
}

// To go on is its end, and it stays; what is not said anew, where its outputs go and whose they are, stays too.
static void what_has_nothing_more_to_say_cannot_go_on(const pllm_engine *engine) {
    pllm_queue *queue = new_queue(engine, 64);
    answer whole, a = {0};
    writing w = unsaid(engine, &whole);
    uint64_t id = read_back(engine, &w);
    free(w.bytes);
    pllm_resume how = going_on(PLLM_RESUME_USER_DATA | PLLM_REQUEST_KEEP);
    how.queue = queue;
    how.user_data = 4712;
    OK(pllm_sequence_resume(engine, id, &how));
    step_to_the_end(engine);
    collect_from(queue, id, &a);
    OK(go_on(engine, id, PLLM_REQUEST_KEEP));
    step_to_the_end(engine);
    ends_with_an_error(queue, id, &a);
    CHECK(info_of(engine, id).idle == 1);
    w = written(engine, id);
    forget(engine, id);
    // As little where it moves; the user's word does not move.
    id = read_back(engine, &w);
    OK(go_on(engine, id, PLLM_REQUEST_KEEP));
    step_to_the_end(engine);
    a.user_data = 0;
    ends_with_an_error(pllm_engine_queue(engine), id, &a);
    free(w.bytes);
    forget(engine, id);
    pllm_queue_free(queue);
    CHECK(idle(engine));
}

static void a_state_comes_where_it_is_wanted(const pllm_engine *engine) {
    pllm_sampling sampling = drawn();
    pllm_request request = text_request(STORY, &sampling);
    pllm_queue *queue = new_queue(engine, 1);
    pllm_outputs *outputs = NULL;
    const pllm_output *there;
    uint64_t id = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    OK(pllm_sequence_export(engine, id, NULL));
    OK(pllm_sequence_export(engine, id, queue));
    OK(pllm_sequence_export(engine, id, pllm_engine_queue(engine)));
    step_of(engine);
    pllm_outputs *elsewhere = only_output(queue, &there);
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    CHECK(is_a_state(there, id) && pllm_outputs_len(outputs) == 3 && pllm_outputs_get(outputs, 2)->tokens_len == 1);
    for (uint64_t i = 0; i < 2; i++) {
        const pllm_output *here = pllm_outputs_get(outputs, i);
        CHECK(is_a_state(here, id) && here->sequence_state_len == there->sequence_state_len && !memcmp(here->sequence_state, there->sequence_state, there->sequence_state_len));
    }
    pllm_outputs_free(outputs);
    pllm_outputs_free(elsewhere);
    pllm_queue_free(queue);
    forget(engine, id);
    collect(engine, 0, &(answer){0});
    CHECK(idle(engine));
}

// Unless it is kept: then there is something to write down.
static void a_sequence_that_ends_before_it_is_written_down_says_so_where_the_state_is_wanted(const pllm_engine *engine) {
    for (int keep = 0; keep < 2; keep++) {
        pllm_sampling sampling = drawn();
        pllm_request request = text_request(STORY, &sampling);
        pllm_queue *queue = new_queue(engine, 1);
        const pllm_output *o;
        answer a = {0};
        uint64_t id = 0;
        request.flags = keep ? PLLM_REQUEST_KEEP : 0;
        request.user_data = 4711;
        OK(pllm_engine_add_request(engine, &request, &id));
        step_of(engine);
        OK(pllm_engine_abort(engine, id));
        OK(pllm_sequence_export(engine, id, queue));
        step_of(engine);
        pllm_outputs *outputs = only_output(queue, &o);
        CHECK(o->request == id && o->sequence == id && o->user_data == 4711 && o->finish_reason == PLLM_FINISH_NONE);
        CHECK(keep ? is_a_state(o, id) : !o->sequence_state && !o->sequence_state_len && o->error_code == PLLM_E_NOT_FOUND && o->error && o->error_len > 9);
        collect(engine, id, &a);  // its own outputs know nothing of it
        CHECK(a.finish_reason == PLLM_FINISH_ABORT && a.tokens_len == 1);
        if (keep) forget(engine, id);
        pllm_outputs_free(outputs);
        pllm_queue_free(queue);
        CHECK(idle(engine));
    }
}

// What was said of a prompt, all in all: in the last output, or one after the other.
typedef struct {
    float logprobs[64];
    pllm_logprob top[128];
    uint64_t len, top_len, ends;
} heard;

static void hear(const pllm_engine *engine, uint32_t kind, heard *h) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        if (kind != PLLM_OUTPUT_DELTA) h->len = h->top_len = 0;
        if (!CHECK(h->len + o->prompt_logprobs_len <= COUNT(h->logprobs))) break;
        for (uint64_t at = 0; at < o->prompt_logprobs_len; at++) h->logprobs[h->len++] = o->prompt_logprobs[at];
        for (uint64_t at = 0; at < o->prompt_top_logprobs_len; at++) h->top[h->top_len++] = o->prompt_top_logprobs[at];
        h->ends += o->finish_reason != PLLM_FINISH_NONE;
    }
    pllm_outputs_free(outputs);
}

static uint64_t ask_of_the_prompt(const pllm_engine *engine, uint32_t kind, unsigned steps, heard *h) {
    pllm_sampling sampling = drawn();
    pllm_request request = text_request(STORY, &sampling);
    uint64_t id = 0;
    sampling.max_tokens = 8;
    sampling.flags |= PLLM_SAMPLING_PROMPT_LOGPROBS;
    sampling.prompt_top_logprobs = 2;
    sampling.output_kind = kind;
    *h = (heard){0};
    OK(pllm_engine_add_request(engine, &request, &id));
    while (steps-- > 0) step_of(engine);
    hear(engine, kind, h);
    return id;
}

// Wherever it was in its prompt, or behind it.
static void what_is_said_of_a_prompt_moves_with_it(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = NULL;
    options.prefill_chunk = 4;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    for (uint32_t kind = PLLM_OUTPUT_DELTA; kind <= PLLM_OUTPUT_FINAL; kind++) {
        heard whole, moved;
        ask_of_the_prompt(engine, kind, 20, &whole);
        CHECK(whole.ends == 1 && whole.len >= 12 && whole.top_len == 2 * whole.len);
        for (unsigned steps = 0; steps < 6; steps++) {
            uint64_t id = ask_of_the_prompt(engine, kind, steps, &moved);
            writing w = written(engine, id);
            forget(engine, id);
            outputs_in(pllm_engine_queue(engine));
            OK(go_on(engine, read_back(engine, &w), 0));
            step_to_the_end(engine);
            hear(engine, kind, &moved);
            CHECK(moved.ends == 1 && moved.len == whole.len && moved.top_len == whole.top_len);
            CHECK(!memcmp(moved.logprobs, whole.logprobs, sizeof whole.logprobs) && !memcmp(moved.top, whole.top, sizeof whole.top));
            free(w.bytes);
        }
    }
    CHECK(idle(engine));
    pllm_engine_free(engine);
}

static void null_state_are_refused_and_outputs_stay(const pllm_engine *engine) {
    const uint64_t id = keep_one(engine, 3);
    writing w = write_down(engine, id, &(answer){0}), again = write_down(engine, id, &(answer){0});
    uint64_t out = 77;
    INVALID(pllm_sequence_export(NULL, id, NULL));
    INVALID(pllm_sequence_import(NULL, w.bytes, w.len, NULL, &out));
    INVALID(pllm_sequence_import(engine, NULL, w.len, NULL, &out));
    INVALID(pllm_sequence_import(engine, NULL, 0, NULL, &out));
    INVALID(pllm_sequence_import(engine, w.bytes, 0, NULL, &out));
    INVALID(pllm_sequence_import(engine, w.bytes, w.len, NULL, NULL));
    CHECK(out == 77 && stats_of(engine).idle == 1);
    CHECK(w.len == again.len && !memcmp(w.bytes, again.bytes, w.len));  // it has not changed
    free(w.bytes);
    free(again.bytes);
    forget(engine, id);
    CHECK(idle(engine));
}

// Bytes 8 to 11 say which format it is: another one is for a newer library.
static void refuse_damaged(const pllm_engine *engine, const uint8_t *bytes, uint64_t len, uint64_t flipped) {
    uint64_t out = 77;
    pllm_error *error = pllm_sequence_import(engine, bytes, len, NULL, &out);
    flipped / 4 == 2 ? UNSUPPORTED(error) : INVALID(error);
    CHECK(out == 77);
}

static void a_damaged_state_is_refused(const pllm_engine *engine) {
    enum { PLACES = 64, BEGINNING = 24 };
    const uint64_t id = keep_one(engine, 20);
    writing w = write_down(engine, id, &(answer){0});
    uint8_t *bytes = malloc(w.len);
    for (uint64_t i = 0; i < BEGINNING + PLACES; i++) {
        uint64_t at = i < BEGINNING ? i : i - BEGINNING == PLACES - 1 ? w.len - 1 : (i - BEGINNING) * w.len / PLACES;
        memcpy(bytes, w.bytes, w.len);
        bytes[at] ^= (uint8_t)(2u << at % 7);
        refuse_damaged(engine, bytes, w.len, at);
    }
    free(bytes);
    const uint64_t lengths[] = {1, 7, 8, 11, 12, 19, 20, 31, 32, 33, 51, 52, 53, 1000, w.len / 2, w.len - 33, w.len - 32, w.len - 1};
    for (size_t i = 0; i < COUNT(lengths); i++) {
        refuse_damaged(engine, at_the_edge(w.bytes, lengths[i]), lengths[i], 0);
        refuse_damaged(engine, w.bytes + (w.len - lengths[i]), lengths[i], 0);
    }
    bytes = memcpy(calloc(1, w.len + 1), w.bytes, w.len);
    refuse_damaged(engine, bytes, w.len + 1, 0);
    free(bytes);
    step_of(engine);
    CHECK(stats_of(engine).idle == 1);
    forget(engine, id);
    OK(pllm_sequence_free(engine, read_back(engine, &w)));  // the state itself is sound
    step_of(engine);
    free(w.bytes);
    CHECK(idle(engine));
}

static void a_state_is_refused_where_it_does_not_belong(const pllm_engine *engine) {
    const uint64_t id = keep_one(engine, 20);
    writing w = write_down(engine, id, &(answer){0});
    pllm_engine *golden = open_engine(golden_dir), *other = NULL;
    uint64_t out = 77;
    INVALID(pllm_sequence_import(golden, w.bytes, w.len, NULL, &out));
    INVALID(pllm_sequence_import(engine, w.bytes, w.len, pllm_engine_queue(golden), &out));
    INVALID(pllm_sequence_export(engine, id, pllm_engine_queue(golden)));
    pllm_engine_options options;
#define IMPORT(assignment, refusal)                                                                                               \
    (options = options_for(model_dir), options.assignment, OK(pllm_engine_create(&options, &other)),                              \
     refusal(pllm_sequence_import(other, w.bytes, w.len, NULL, &out)), CHECK(idle(other)), pllm_engine_free(other))
    IMPORT(block_size = 32, INVALID);
    IMPORT(kv_dtype = PLLM_DTYPE_F32, INVALID);
    IMPORT(max_model_len = 23, INVALID);  // it has 24 tokens
    CHECK(out == 77);
    IMPORT(max_model_len = 24, OK);
    CHECK(out != 77);
    free(w.bytes);
    forget(engine, id);
    pllm_engine_free(golden);
    CHECK(idle(engine));
}

static void what_is_imported_writes_to_the_queue_that_was_named(const pllm_engine *engine) {
    enum { CAPACITY_OF_IT = 2, MORE = 16 };  // max_seqs outputs beyond the capacity
    pllm_sampling sampling = drawn();
    pllm_request request = text_request(STORY, &sampling);
    pllm_queue *queue = new_queue(engine, CAPACITY_OF_IT);
    answer a = {0};
    uint64_t id = 0, exports = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    writing w = write_down(engine, id, &a);
    forget(engine, id);
    collect(engine, 0, &a);
    OK(pllm_sequence_import(engine, w.bytes, w.len, queue, &id));
    OK(go_on(engine, id, PLLM_REQUEST_KEEP));
    for (int i = 0; i < 5; i++) step_of(engine);
    CHECK(outputs_in(queue) == CAPACITY_OF_IT && outputs_in(pllm_engine_queue(engine)) == 0);
    OK(pllm_engine_abort(engine, id));
    step_of(engine);
    CHECK(outputs_in(queue) == 1 && info_of(engine, id).idle == 1);
    // Nobody reads what is exported: this does not go on for ever.
    for (; exports < CAPACITY_OF_IT + MORE; exports++, step_of(engine))
        if (!OK(pllm_sequence_export(engine, id, NULL))) break;
    CAPACITY(pllm_sequence_export(engine, id, NULL));
    CHECK(outputs_in(queue) == exports);
    pllm_queue_free(queue);
    INVALID(go_on(engine, id, 0));
    INVALID(pllm_sequence_export(engine, id, NULL));
    free(w.bytes);
    forget(engine, id);
    CHECK(idle(engine));
}

// Each list is as long as what it goes with.
static void check_lists(const pllm_output *o, uint64_t top, uint64_t prompt_top) {
    int possible = 1;
    for (uint64_t i = 0; o->logprobs && i < o->tokens_len; i++) possible &= o->logprobs[i] <= 0;
    for (uint64_t i = 0; i < o->prompt_logprobs_len; i++) possible &= o->prompt_logprobs[i] <= 0;
    for (uint64_t i = 0; i < o->top_logprobs_len; i++) possible &= o->top_logprobs[i].logprob <= 0;
    for (uint64_t i = 0; i < o->prompt_top_logprobs_len; i++) possible &= o->prompt_top_logprobs[i].logprob <= 0;
    CHECK(possible);
    CHECK(o->top_logprobs_len == (o->logprobs ? top * o->tokens_len : 0));
    CHECK(o->prompt_top_logprobs_len == prompt_top * o->prompt_logprobs_len);
}

static void what_is_reported_adds_up_in_every_kind_of_output(const pllm_engine *engine) {
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
                prompt_logprobs = o->prompt_logprobs_len + (kind == PLLM_OUTPUT_DELTA ? prompt_logprobs : 0);
                if (o->finish_reason) CHECK(tokens == 5 + (echo ? o->prompt_tokens : 0) && prompt_logprobs == o->prompt_tokens - 1);
            }
            pllm_outputs_free(outputs);
        }
    CHECK(idle(engine));
}

typedef struct {
    uint64_t calls, sequence, len, vocab;
    uint32_t wanted;
} hooked;

static void only_one(void *data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits, uint64_t vocab_size) {
    hooked *h = data;
    h->calls++;
    h->sequence = sequence;
    h->len = tokens_len;
    h->vocab = vocab_size;
    for (uint64_t i = 0; i < vocab_size; i++) logits[i] = i == h->wanted ? 1 : -INFINITY;
    if (tokens_len && tokens[tokens_len - 1] == h->wanted) h->wanted++;
    if (h->wanted) logits[h->wanted] = 2;
}

static void a_hook_chooses_every_token(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    hooked h = {.wanted = 100};
    sampling.max_tokens = 4;
    request.logits_hook = only_one;
    request.hook_data = &h;
    const answer *a = run(engine, &request);
    CHECK(a->tokens_len == 4 && h.calls == 4 && h.len == COUNT(PROMPT) + 3 && h.vocab == 1024 && h.sequence != 0);
    for (uint32_t i = 0; i < 4; i++) CHECK(a->tokens[i] == 100 + i);
    CHECK(idle(engine));
}

static void a_grammar_decides_what_may_be_said(const pllm_engine *engine) {
    static const char *const colours[] = {"red", "green", "blue"};
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    sampling.grammar_kind = PLLM_GRAMMAR_REGEX;
    sampling.grammar = "[0-9]{3}-[a-c]+";
    sampling.max_tokens = 12;
    const answer *a = run(engine, &request);
    CHECK(a->text_len > 4 && a->text[3] == '-');
    for (uint64_t i = 0; i < a->text_len; i++) CHECK(i == 3 || strchr(i < 3 ? "0123456789" : "abc", a->text[i]));
    sampling = greedy();
    sampling.grammar_kind = PLLM_GRAMMAR_CHOICE;
    sampling.choices = colours;
    sampling.choice_count = COUNT(colours);
    a = run(engine, &request);
    CHECK(text_is(a, "red", 3) || text_is(a, "green", 5) || text_is(a, "blue", 4));
    CHECK(a->finish_reason == PLLM_FINISH_STOP && idle(engine));
}

// Prompts of more than a block: the second finds what the first computed, unless they are told apart; pins keep it there.
static void prompts_that_begin_alike_are_computed_once(const pllm_engine *engine) {
    uint32_t prompt[50];
    for (uint32_t i = 0; i < COUNT(prompt); i++) prompt[i] = 300 + i;
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_pin pin = token_pin();
    uint64_t id = 0;
    sampling.max_tokens = 1;
    pin.prompt_token_ids = request.prompt_token_ids = prompt;
    pin.prompt_token_ids_len = request.prompt_token_ids_len = COUNT(prompt);
    pllm_stats before = stats_of(engine);
    run(engine, &request);
    pllm_stats once = stats_of(engine);
    run(engine, &request);
    pllm_stats twice = stats_of(engine);
    CHECK(once.prompt_tokens - before.prompt_tokens == 50 && once.blocks_cached >= 3);
    CHECK(twice.prompt_tokens - once.prompt_tokens == 2 && twice.prefix_hits - once.prefix_hits == 48);
    request.cache_salt = (const uint8_t *)"another tenant";
    request.cache_salt_len = 14;
    run(engine, &request);
    CHECK(stats_of(engine).prompt_tokens - twice.prompt_tokens == 50);
    OK(pllm_prefix_pin(engine, &pin, &id));
    step_of(engine);
    CHECK(stats_of(engine).blocks_used == 4);
    OK(pllm_prefix_unpin(engine, id));
    step_of(engine);
    CHECK(idle(engine));
    pin.time_to_live_ms = 1;
    OK(pllm_prefix_pin(engine, &pin, &id));
    step_of(engine);
    sleep_ms(5);
    step_of(engine);
    FAILS(PLLM_E_NOT_FOUND, pllm_prefix_unpin(engine, id));
    CHECK(idle(engine));
}

// ---- who waits, and for how long -------------------------------------------------------------------------------------

// Refused for want of room, in a message that says this.
static int no_room(pllm_error *error, const char *says, const char *call, int line) {
    int right = strstr(pllm_error_message(error), says) != NULL;
    if (!right) printf("%s:%d: the message is \"%s\"\n", __FILE__, line, pllm_error_message(error));
    return fails(PLLM_E_CAPACITY, error, call, line) && check(right, says, line);
}
#define NO_ROOM(call, says) no_room(call, says, #call, __LINE__)

static pllm_admission admission_of(const pllm_engine *engine, const pllm_request *request) {
    pllm_admission admission = {.struct_size = sizeof admission};
    OK(pllm_engine_predict_admission(engine, request, &admission));
    return admission;
}

static pllm_sampling many_tokens(void) {
    pllm_sampling sampling = greedy();
    sampling.max_tokens = 100;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    return sampling;
}

static void a_deadline_that_has_passed_is_refused(const pllm_engine *engine) {
    const uint64_t id = keep_one(engine, 3);
    const int64_t passed_ms[] = {-1, -1000, INT64_MIN};
    pllm_request request = token_request(NULL);
    pllm_resume how;
    pllm_resume_init(&how, sizeof how);
    for (size_t i = 0; i < COUNT(passed_ms); i++) {
        request.deadline_ms = how.deadline_ms = passed_ms[i];
        INVALID(add(engine, &request));
        INVALID(pllm_sequence_resume(engine, id, &how));
    }
    request.deadline_ms = INT64_MAX;
    OK(add(engine, &request));
    step_to_the_end(engine);
    collect(engine, 0, &(answer){0});
    forget(engine, id);
    CHECK(idle(engine));
}

static void a_deadline_ends_a_turn_with_what_it_has(const pllm_engine *engine) {
    pllm_sampling sampling = many_tokens();
    pllm_request request = token_request(&sampling);
    pllm_resume how;
    uint64_t id = 0, before = stats_of(engine).finished_deadline;
    answer first = {0}, second = {0};
    request.flags = PLLM_REQUEST_KEEP;
    request.deadline_ms = 50;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_of(engine);
    sleep_ms(60);
    CHECK(step_of(engine).unfinished == 0);
    collect(engine, id, &first);
    CHECK(first.finish_reason == PLLM_FINISH_DEADLINE && first.error_code == 0 && first.tokens_len < sampling.max_tokens);
    // It was to stay. The next turn has a time of its own.
    pllm_resume_init(&how, sizeof how);
    how.sampling = &sampling;
    OK(pllm_sequence_resume(engine, id, &how));
    step_to_the_end(engine);
    collect(engine, id, &second);
    CHECK(second.finish_reason == PLLM_FINISH_LENGTH && second.tokens_len == sampling.max_tokens);
    OK(pllm_sequence_rewind(engine, id, COUNT(PROMPT)));
    how.deadline_ms = 1;
    OK(pllm_sequence_resume(engine, id, &how));
    sleep_ms(5);
    step_to_the_end(engine);
    memset(&second, 0, sizeof second);
    collect(engine, id, &second);
    CHECK(second.finish_reason == PLLM_FINISH_DEADLINE && second.tokens_len == 0);
    CHECK(stats_of(engine).finished_deadline == before + 2);
    forget(engine, id);
    CHECK(idle(engine));
}

static void a_priority_out_of_range_is_refused(const pllm_engine *engine) {
    const struct {
        int32_t priority;
        int fine;
    } cases[] = {{-100, 1}, {100, 1}, {-101, 0}, {101, 0}, {INT32_MIN, 0}, {INT32_MAX, 0}};
    pllm_request request = token_request(NULL);
    for (size_t i = 0; i < COUNT(cases); i++) {
        request.priority = cases[i].priority;
        cases[i].fine ? OK(add(engine, &request)) : INVALID(add(engine, &request));
    }
    request.priority = 0;
    request.reserved2 = 1;
    UNSUPPORTED(add(engine, &request));
    step_to_the_end(engine);
    collect(engine, 0, &(answer){0});
}

static void the_higher_priority_comes_first(void) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = NULL;
    pllm_request request = token_request(NULL);
    uint64_t low = 0, high = 0;
    options.order = PLLM_ORDER_PRIORITY;
    options.max_seqs = 1;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    request.priority = -5;
    OK(pllm_engine_add_request(engine, &request, &low));
    request.priority = 5;
    OK(pllm_engine_add_request(engine, &request, &high));
    step_to_the_end(engine);
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    CHECK(pllm_outputs_len(outputs) >= 2 && pllm_outputs_get(outputs, 0)->request == high);
    pllm_outputs_free(outputs);
    pllm_engine_free(engine);
}

static void texts_beyond_max_prompt_bytes_are_refused(void) {
    static char text[(1 << 20) + 2];
    memset(text, ' ', sizeof text - 1);
    pllm_engine *engine = NULL;
    pllm_engine_options options = options_for(model_dir);
    pllm_tokens *tokens = NULL;
    pllm_bytes *prompt = NULL;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = text;
    uint64_t id = 77;
    options.max_prompt_bytes = 100;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    OK(pllm_engine_tokenize(engine, text, 100, 0, &tokens));
    pllm_tokens_free(tokens);
    INVALID(pllm_engine_tokenize(engine, text, 101, 0, &tokens));
    request.prompt_len = 101;
    INVALID(pllm_engine_add_request(engine, &request, &id));
    INVALID(pllm_engine_render_chat(engine, text, 101, &prompt));
    CHECK(id == 77);
    pllm_engine_free(engine);
    // The default: 64 bytes for each token of max_model_len, at least 1 MiB.
    options.max_prompt_bytes = 0;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    OK(pllm_engine_tokenize(engine, text, 1 << 20, 0, &tokens));
    pllm_tokens_free(tokens);
    INVALID(pllm_engine_tokenize(engine, text, (1 << 20) + 1, 0, &tokens));
    pllm_engine_free(engine);
}

static void too_much_that_waits_is_refused_with_the_numbers(void) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *few = NULL, *little = NULL;
    pllm_request request = token_request(NULL);
    uint64_t id = 77;
    options.max_waiting_requests = 2;
    if (!OK(pllm_engine_create(&options, &few))) return;
    options.max_waiting_requests = 0;
    options.max_waiting_tokens = 10;
    if (!OK(pllm_engine_create(&options, &little))) return;
    pllm_engine *const engines[] = {few, little};
    const char *const says[] = {"2 requests wait and max_waiting_requests is 2", "8 tokens wait and max_waiting_tokens is 10"};
    for (size_t i = 0; i < COUNT(engines); i++) {
        OK(pllm_engine_add_request(engines[i], &request, &id));
        CHECK(admission_of(engines[i], &request).admits == 1);
        OK(pllm_engine_add_request(engines[i], &request, &id));
        pllm_admission admission = admission_of(engines[i], &request);
        CHECK(admission.admits == 0 && admission.fits_now == 0);
        CHECK(admission.waiting_requests == 2 && admission.waiting_tokens == 2 * COUNT(PROMPT));
        id = 77;
        NO_ROOM(pllm_engine_add_request(engines[i], &request, &id), says[i]);
        CHECK(id == 77 && stats_of(engines[i]).admission_rejections == 1);
        // Once they have begun, others may wait.
        step_of(engines[i]);
        CHECK(admission_of(engines[i], &request).admits == 1);
        OK(pllm_engine_add_request(engines[i], &request, &id));
        pllm_engine_free(engines[i]);
    }
}

static void admission_is_told_beforehand_and_adds_nothing(void) {
    pllm_engine *engine = open_engine(golden_dir);
    pllm_request request = token_request(NULL);
    pllm_admission admission = admission_of(engine, &request);
    CHECK(admission.admits == 1 && admission.fits_now == 1 && admission.waiting_requests == 0 && admission.waiting_tokens == 0);
    CHECK(admission.first_token_seconds < 0);  // no step has shown anything
    run(engine, &request);
    CHECK(admission_of(engine, &request).first_token_seconds > 0 && admission_of(engine, &request).first_token_seconds < 60);
    CHECK(idle(engine) && step_of(engine).unfinished == 0);
    _Alignas(8) unsigned char bytes[sizeof(pllm_admission)];
    memset(bytes, POISON, sizeof bytes);
    *(uint64_t *)(void *)bytes = sizeof bytes;
    pllm_admission *out = (pllm_admission *)(void *)bytes;
    INVALID(pllm_engine_predict_admission(NULL, &request, out));
    INVALID(pllm_engine_predict_admission(engine, NULL, out));
    INVALID(pllm_engine_predict_admission(engine, &request, NULL));
    request.n = 0;
    INVALID(pllm_engine_predict_admission(engine, &request, out));
    CHECK(all(bytes, 8, sizeof bytes, POISON));
    pllm_engine_free(engine);
}

// ---- memory that is shared, grows, shrinks and overflows -------------------------------------------------------------

static pllm_plan plan_of(const pllm_engine_options *options) {
    pllm_plan plan = {.struct_size = sizeof plan};
    OK(pllm_engine_plan(options, &plan));
    return plan;
}

static pllm_budget_info state_of(const pllm_budget *budget) {
    pllm_budget_info info = {.struct_size = sizeof info};
    OK(pllm_budget_get_info(budget, &info));
    return info;
}

static pllm_engine *open_on(const pllm_budget *budget) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = NULL;
    options.budget = budget;
    options.kv_bytes = 0;
    if (!OK(pllm_engine_create(&options, &engine))) exit(1);
    return engine;
}

static void wrong_budgets_are_refused(void) {
    pllm_budget *budget = UNTOUCHED;
    pllm_budget_info info = {.struct_size = sizeof info};
    INVALID(pllm_budget_create(0, 0, &budget));
    INVALID(pllm_budget_create(0, 100, &budget));
    INVALID(pllm_budget_create(100, 99, &budget));
    INVALID(pllm_budget_create(100, 100, NULL));
    INVALID(pllm_budget_resize(NULL, 100));
    INVALID(pllm_budget_get_info(NULL, &info));
    CHECK(budget == UNTOUCHED);
    OK(pllm_budget_create(100, 0, &budget));
    INVALID(pllm_budget_get_info(budget, NULL));
    CHECK(state_of(budget).bytes == 100 && state_of(budget).max_bytes == 100 && state_of(budget).engines == 0);
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = UNTOUCHED;
    options.budget = budget;
    INVALID(pllm_engine_create(&options, &engine));  // with kv_bytes besides
    options.kv_bytes = 0;
    CAPACITY(pllm_engine_create(&options, &engine));
    CHECK(engine == UNTOUCHED && state_of(budget).engines == 0);
    pllm_budget_free(budget);
}

static void an_budget_becomes_no_smaller_than_its_engine_needs_and_no_larger_than_it_was_made_for(void) {
    pllm_engine_options options = options_for(golden_dir);
    const pllm_plan plan = plan_of(&options);
    const uint64_t block = plan.block_bytes, least = plan.max_model_len / plan.block_size * block;
    pllm_budget *budget = NULL;
    OK(pllm_budget_create(4 * least, 8 * least, &budget));
    pllm_engine *engine = open_on(budget);
    pllm_budget_info info = state_of(budget);
    CHECK(info.bytes == 4 * least && info.min_bytes == least && info.max_bytes == 8 * least && info.engines == 1);
    CHECK(info.held_bytes >= least && info.held_bytes <= info.bytes);
    char number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)least);
    NO_ROOM(pllm_budget_resize(budget, least - 1), number);
    CAPACITY(pllm_budget_resize(budget, 8 * least + 1));
    CAPACITY(pllm_budget_resize(budget, 0));
    CHECK(state_of(budget).bytes == 4 * least);
    OK(pllm_budget_resize(budget, least));
    CHECK(state_of(budget).held_bytes == least && stats_of(engine).blocks_total == least / block);
    OK(pllm_budget_resize(budget, 8 * least));
    pllm_request request = token_request(NULL);
    run(engine, &request);
    CHECK(stats_of(engine).blocks_total == 8 * least / block);
    pllm_engine_free(engine);
    CHECK(state_of(budget).engines == 0 && state_of(budget).held_bytes == 0);
    pllm_budget_free(budget);
}

// The same request, several times at once.
enum { TIMES = 3, SHARERS = 2 };
typedef struct {
    uint64_t ids[TIMES], preemptions;
    answer answers[TIMES];
} chorus;

static void add_chorus(const pllm_engine *engine, const pllm_request *request, chorus *c) {
    memset(c, 0, sizeof *c);
    for (int i = 0; i < TIMES; i++) OK(pllm_engine_add_request(engine, request, &c->ids[i]));
}

static void all_say(const pllm_engine *engine, chorus *c, const answer *expected) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t o = 0; o < pllm_outputs_len(outputs); o++) {
        const pllm_output *output = pllm_outputs_get(outputs, o);
        c->preemptions += output->preemptions;
        for (int i = 0; i < TIMES; i++)
            if (output->request == c->ids[i]) take(&c->answers[i], output);
    }
    pllm_outputs_free(outputs);
    for (int i = 0; i < TIMES; i++) CHECK(same(&c->answers[i], expected));
    CHECK(stats_of(engine).preemptions == c->preemptions);
}

static void two_engines_on_one_budget_answer_as_one_alone_would(void) {
    pllm_sampling sampling = many_tokens();
    pllm_request request = token_request(&sampling);
    pllm_engine *alone = open_engine(golden_dir);
    const answer expected = *run(alone, &request);
    const uint64_t least = state_of(pllm_engine_budget(alone)).min_bytes;
    pllm_engine_free(alone);
    pllm_budget *budget = NULL;
    OK(pllm_budget_create(6 * least, 0, &budget));
    pllm_engine *const engines[SHARERS] = {open_on(budget), open_on(budget)};
    CHECK(state_of(budget).engines == SHARERS && state_of(budget).min_bytes == SHARERS * least);
    static chorus choruses[SHARERS];
    for (int e = 0; e < SHARERS; e++) add_chorus(engines[e], &request, &choruses[e]);
    uint64_t unfinished = 1;
    for (unsigned round = 0; unfinished; round++) {
        if (round % 10 == 5) OK(pllm_budget_resize(budget, (round / 10 % 2 ? 6 : 2) * least));
        unfinished = 0;
        for (int e = 0; e < SHARERS; e++) unfinished += step_of(engines[e]).unfinished;
        CHECK(state_of(budget).held_bytes <= state_of(budget).bytes);
    }
    for (int e = 0; e < SHARERS; e++) all_say(engines[e], &choruses[e], &expected);
    CHECK(choruses[0].preemptions + choruses[1].preemptions > 0);
    // The engines keep it alive.
    pllm_budget_free(budget);
    CHECK(state_of(pllm_engine_budget(engines[0])).engines == SHARERS);
    pllm_engine_free(engines[1]);
    CHECK(state_of(pllm_engine_budget(engines[0])).engines == 1 && same(run(engines[0], &request), &expected));
    pllm_engine_free(engines[0]);
}

static void an_engine_s_own_budget_is_borrowed_and_can_be_resized(const pllm_engine *engine) {
    const pllm_budget *budget = pllm_engine_budget(engine);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    const answer before = *run(engine, &request);
    CHECK(budget && budget == pllm_engine_budget(engine));
    const pllm_budget_info info = state_of(budget);
    CHECK(info.engines == 1 && info.max_bytes == info.bytes);
    OK(pllm_budget_resize(budget, info.min_bytes));
    CHECK(state_of(budget).held_bytes == info.min_bytes && same(run(engine, &request), &before));
    OK(pllm_budget_resize(budget, info.bytes));
    CHECK(same(run(engine, &request), &before) && idle(engine));
}

// All want most of the pool; who has to give way waits in the host tier.
static void what_is_swapped_out_goes_on_as_if_it_had_stayed(const char *swap_path) {
    pllm_engine_options options = options_for(golden_dir);
    const pllm_plan roomy = plan_of(&options);
    pllm_sampling sampling = many_tokens();
    pllm_request request = token_request(&sampling);
    pllm_engine *engine = open_engine(golden_dir);
    const answer expected = *run(engine, &request);
    pllm_engine_free(engine);
    options.kv_bytes = (roomy.max_model_len / roomy.block_size + 1) * roomy.block_bytes;
    options.preemption = PLLM_PREEMPTION_SWAP;
    options.swap_bytes = 64 * roomy.block_bytes;
    options.swap_path = swap_path;
    options.flags |= PLLM_ENGINE_NO_PREFIX_CACHE;
    CHECK(plan_of(&options).swap_blocks == 64 && plan_of(&options).swap_bytes == options.swap_bytes);
    if (!OK(pllm_engine_create(&options, &engine))) return;
    static chorus c;
    add_chorus(engine, &request, &c);
    step_to_the_end(engine);
    all_say(engine, &c, &expected);
    pllm_stats stats = stats_of(engine);
    CHECK(stats.preemptions_swapped > 0 && stats.swap_failures == 0);
    CHECK(stats.blocks_swapped_out > 0 && stats.blocks_swapped_in == stats.blocks_swapped_out);
    CHECK(stats.swap_blocks_total == 64 && stats.swap_blocks_used == 0 && stats.swapped == 0);
    pllm_engine_free(engine);
}

static void weights_in_whole_numbers_take_less_room(void) {
    pllm_engine_options options = options_for(model_dir);
    const uint64_t stored = plan_of(&options).weight_bytes;
    for (uint32_t format = PLLM_WEIGHTS_INT8; format <= PLLM_WEIGHTS_INT4_ASYMMETRIC; format++) {
        pllm_engine *engine = NULL;
        options.weight_format = format;
        options.weight_group = format == PLLM_WEIGHTS_INT8 ? 0 : 64;
        CHECK(plan_of(&options).weight_bytes < stored * 11 / 20);
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_sampling sampling = greedy();
        pllm_request request = text_request(FRANCE, &sampling);
        CHECK(text_is(run(engine, &request), PARIS, strlen(PARIS)));
        pllm_engine_free(engine);
    }
}

static void packed_weights_are_kept_and_read_again(void) {
    char dir[] = "/tmp/abi_test_XXXXXX", command[64];
    if (!CHECK(mkdtemp(dir) != NULL)) return;
    pllm_engine_options options = options_for(model_dir);
    options.packed_path = dir;
    for (uint64_t packed = PLLM_PACKED_SAVED; packed >= PLLM_PACKED_READ; packed--) {
        pllm_engine *engine = NULL;
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_model_info info = {.struct_size = sizeof info};
        OK(pllm_engine_get_model_info(engine, &info));
        CHECK(info.packed == packed && (info.packed_reason_len > 0) == (packed == PLLM_PACKED_SAVED));
        pllm_sampling sampling = greedy();
        pllm_request request = text_request(FRANCE, &sampling);
        CHECK(text_is(run(engine, &request), PARIS, strlen(PARIS)));
        pllm_engine_free(engine);
    }
    snprintf(command, sizeof command, "rm -r %s", dir);
    CHECK(system(command) == 0);
}

static void k_and_v_in_8_bits_take_less_room(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = NULL;
    const pllm_plan wide = plan_of(&options);
    options.kv_dtype = PLLM_DTYPE_INT8;
    const pllm_plan narrow = plan_of(&options);
    CHECK(wide.kv_dtype == PLLM_DTYPE_BF16 && narrow.kv_dtype == PLLM_DTYPE_INT8 && narrow.block_bytes < wide.block_bytes * 3 / 4);
    if (!OK(pllm_engine_create(&options, &engine))) return;
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    CHECK(text_is(run(engine, &request), PARIS, strlen(PARIS)));
    pllm_engine_free(engine);
}

static pllm_error *write_admission(const pllm_engine *engine, place *at) {
    pllm_request request = token_request(NULL);
    return pllm_engine_predict_admission(engine, &request, (pllm_admission *)(void *)at);
}

static pllm_error *write_budget(const pllm_engine *engine, place *at) {
    return pllm_budget_get_info(pllm_engine_budget(engine), (pllm_budget_info *)(void *)at);
}

static void admissions_and_budgets_have_the_size_of_some_version(void) {
    pllm_engine *engine = open_engine(golden_dir);
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_admission, 48, sizeof(pllm_admission));
    a_struct_to_be_written_has_the_size_of_some_version(engine, write_budget, 48, sizeof(pllm_budget_info));
    pllm_engine_free(engine);
}

// ---- what can be seen from outside -----------------------------------------------------------------------------------

static void metrics_are_a_text_that_says_what_runs(const pllm_engine *engine) {
    pllm_bytes *text = UNTOUCHED;
    INVALID(pllm_engine_get_metrics(NULL, &text));
    INVALID(pllm_engine_get_metrics(engine, NULL));
    CHECK(text == UNTOUCHED);
    pllm_sampling sampling = many_tokens();
    pllm_request request = token_request(&sampling);
    uint64_t id = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_of(engine);
    if (!OK(pllm_engine_get_metrics(engine, &text))) return;
    const char *data = pllm_bytes_data(text), running[] = "\npagedllm_num_requests_running{model_name=\"model\"} 1", end[] = "\n# EOF\n";
    uint64_t len = pllm_bytes_len(text);
    CHECK(memmem(data, len, running, strlen(running)) != NULL);
    CHECK(len > strlen(end) && !memcmp(data + len - strlen(end), end, strlen(end)));
    pllm_bytes_free(text);
    OK(pllm_engine_abort(engine, id));
    step_to_the_end(engine);
    collect(engine, 0, &(answer){0});
}

static uint64_t size_of_file(const char *path) {
    struct stat file = {.st_size = 0};
    return stat(path, &file) ? 0 : (uint64_t)file.st_size;
}

static void traces_and_journals_are_written_where_they_are_wanted(void) {
    char dir[] = "/tmp/abi_test_XXXXXX", trace[64], journal[64];
    if (!CHECK(mkdtemp(dir) != NULL)) return;
    snprintf(trace, sizeof trace, "%s/trace.json", dir);
    snprintf(journal, sizeof journal, "%s/journal", dir);
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = NULL;
    pllm_request request = token_request(NULL);
    options.trace_path = trace;
    options.journal_path = journal;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    run(engine, &request);
    CHECK(stats_of(engine).traces_stopped == 0 && stats_of(engine).journals_stopped == 0);
    pllm_engine_free(engine);
    CHECK(size_of_file(trace) > 0 && size_of_file(journal) > 0);
    unlink(trace);
    unlink(journal);
    what_is_swapped_out_goes_on_as_if_it_had_stayed(dir);
    CHECK(rmdir(dir) == 0);  // the tier's file has no name
}

static void files_that_cannot_be_written_are_refused(void) {
    const char *const wrong[] = {"/nonexistent/file", "/tmp"};
    pllm_engine *engine = UNTOUCHED;
    for (size_t i = 0; i < COUNT(wrong); i++) {
        pllm_engine_options options = options_for(golden_dir);
        options.trace_path = wrong[i];
        FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
        options.trace_path = NULL;
        options.journal_path = wrong[i];
        FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    }
    pllm_engine_options options = options_for(golden_dir);
    options.preemption = PLLM_PREEMPTION_SWAP;
    options.swap_bytes = 1 << 20;
    options.swap_path = "/nonexistent";
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    options = options_for(golden_dir);
    options.packed_path = "/nonexistent";
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    CHECK(engine == UNTOUCHED);
}

// ---- threads ---------------------------------------------------------------------------------------------------------

typedef struct {
    const pllm_engine *engine;
    atomic_int *stop;
    atomic_uint steps, busy, wrong;
} stepper;

static void *step_all_the_time(void *argument) {
    stepper *s = argument;
    while (!atomic_load(s->stop)) {
        pllm_step step = {.struct_size = sizeof step};
        pllm_error *error = pllm_engine_step(s->engine, &step);
        if (!error) atomic_fetch_add(&s->steps, 1);
        else if (pllm_error_code(error) == PLLM_E_BUSY && strlen(pllm_error_message(error)) > 9) atomic_fetch_add(&s->busy, 1);
        else atomic_fetch_add(&s->wrong, 1);
        pllm_error_free(error);
        // A host has something to do between two steps; one that has nothing would leave the others no gap.
        nanosleep(&(struct timespec){0, 20000}, NULL);
    }
    return NULL;
}

// As many as one queue's worth of work, so that two threads surely meet.
static uint64_t keep_busy(const pllm_engine *engine, uint64_t live) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.max_tokens = 100;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    for (uint64_t id; live < 16; live++) OK(pllm_engine_add_request(engine, &request, &id));
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 5, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) live -= pllm_outputs_get(outputs, i)->finish_reason != 0;
    pllm_outputs_free(outputs);
    return live;
}

static int met(const stepper *a, const stepper *b) { return a->steps > 20 && b->steps > 20 && a->busy + b->busy > 0; }

static void two_threads_step_and_one_at_a_time_gets_through(void) {
    pllm_engine *engine = open_engine(golden_dir);
    atomic_int stop = 0;
    stepper steppers[2] = {{.engine = engine, .stop = &stop}, {.engine = engine, .stop = &stop}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, step_all_the_time, &steppers[i]);
    uint64_t live = 0;
    for (double end = now() + 60; !met(&steppers[0], &steppers[1]) && now() < end;) live = keep_busy(engine, live);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECK(met(&steppers[0], &steppers[1]));
    CHECK(steppers[0].wrong + steppers[1].wrong == 0);
    pllm_engine_free(engine);  // with requests that have not ended
}

enum { WORKERS = 4, EACH = 150, REQUESTS = WORKERS * EACH };

typedef struct {
    const pllm_engine *engine;
    atomic_uint ends[REQUESTS], tokens[REQUESTS], claimed[REQUESTS];
    atomic_uint ended, wrong;
    atomic_int stop;
} crowd;

typedef struct {
    crowd *crowd;
    uint32_t first;
} worker;

static void count(crowd *c, const pllm_output *o) {
    if (o->user_data >= REQUESTS) {
        atomic_fetch_add(&c->wrong, 1);
        return;
    }
    atomic_fetch_add(&c->tokens[o->user_data], (unsigned)o->tokens_len);
    if (o->finish_reason == PLLM_FINISH_NONE) return;
    if (o->finish_reason > PLLM_FINISH_ABORT) atomic_fetch_add(&c->wrong, 1);
    atomic_store(&c->claimed[o->user_data], (unsigned)o->generated_tokens);
    atomic_fetch_add(&c->ends[o->user_data], 1);
    atomic_fetch_add(&c->ended, 1);
}

static void poll_and_count(crowd *c, int64_t timeout_ms) {
    pllm_outputs *outputs = NULL;
    pllm_error *error = pllm_queue_poll(pllm_engine_queue(c->engine), timeout_ms, &outputs);
    if (error) atomic_fetch_add(&c->wrong, 1);
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) count(c, pllm_outputs_get(outputs, i));
    pllm_error_free(error);
    pllm_outputs_free(outputs);
}

// Adds its share of requests, aborts every third, looks at the stats and polls in between.
static void *add_abort_poll_and_look(void *argument) {
    worker *w = argument;
    crowd *c = w->crowd;
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    for (uint32_t i = 0; i < EACH; i++) {
        sampling.max_tokens = 1 + i % 17;
        request.user_data = w->first + i;
        uint64_t id = 0;
        pllm_error *error = pllm_engine_add_request(c->engine, &request, &id);
        if (error) atomic_fetch_add(&c->wrong, 1);
        pllm_error_free(error);
        if (i % 3 == 0) {
            if (i % 2) sched_yield();
            error = pllm_engine_abort(c->engine, id);
            // It may have ended meanwhile.
            if (error && pllm_error_code(error) != PLLM_E_NOT_FOUND) atomic_fetch_add(&c->wrong, 1);
            pllm_error_free(error);
        }
        pllm_stats stats = {.struct_size = sizeof stats};
        error = pllm_engine_get_stats(c->engine, &stats);
        if (error || stats.blocks_used + stats.blocks_cached + stats.blocks_free != stats.blocks_total) atomic_fetch_add(&c->wrong, 1);
        pllm_error_free(error);
        if (i % 5 == 0) poll_and_count(c, 0);
    }
    for (double end = now() + 60; atomic_load(&c->ended) < REQUESTS && now() < end;) poll_and_count(c, 10);
    return NULL;
}

static void every_request_of_four_threads_ends_exactly_once(void) {
    static crowd c;
    pllm_engine *engine = open_engine(golden_dir);
    c.engine = engine;
    worker workers[WORKERS];
    pthread_t threads[WORKERS], stepping;
    stepper s = {.engine = engine, .stop = &c.stop};
    pthread_create(&stepping, NULL, step_all_the_time, &s);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i] = (worker){&c, i * EACH};
        pthread_create(&threads[i], NULL, add_abort_poll_and_look, &workers[i]);
    }
    for (int i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
    atomic_store(&c.stop, 1);
    pthread_join(stepping, NULL);
    poll_and_count(&c, 0);
    CHECK(c.wrong == 0 && s.wrong == 0 && s.busy == 0);
    CHECK(c.ended == REQUESTS);
    for (int i = 0; i < REQUESTS; i++) CHECK(c.ends[i] == 1 && c.tokens[i] == c.claimed[i]);
    pllm_stats stats = stats_of(engine);
    CHECK(stats.finished_stop + stats.finished_length + stats.finished_abort == REQUESTS && stats.finished_error == 0);
    CHECK(stats.finished_abort > 0 && stats.finished_length + stats.finished_stop > 0 && idle(engine));
    pllm_engine_free(engine);
}

static void a_poll_without_outputs_ends_empty_when_time_runs_out(const pllm_engine *engine) {
    pllm_outputs *outputs = NULL;
    poll_and_count(&(crowd){.engine = engine}, 0);  // empties it
    double start = now();
    OK(pllm_queue_poll(pllm_engine_queue(engine), 80, &outputs));
    double waited = now() - start;
    CHECK(outputs != NULL && pllm_outputs_len(outputs) == 0 && pllm_outputs_get(outputs, 0) == NULL);
    CHECK(waited >= 0.075 && waited < 30);
    pllm_outputs_free(outputs);
}

static void *generate_after_a_while(void *engine) {
    sleep_ms(100);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    sampling.max_tokens = 1;
    uint64_t id = 0;
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_add_request(engine, &request, &id));
    OK(pllm_engine_step(engine, &step));
    return NULL;
}

static void a_poll_waits_for_what_another_thread_makes(pllm_engine *engine) {
    const int64_t timeouts[] = {60000, -1, INT64_MIN, INT64_MAX};
    for (size_t i = 0; i < COUNT(timeouts); i++) {
        pthread_t thread;
        pllm_outputs *outputs = NULL;
        double start = now();
        pthread_create(&thread, NULL, generate_after_a_while, engine);
        OK(pllm_queue_poll(pllm_engine_queue(engine), timeouts[i], &outputs));
        CHECK(pllm_outputs_len(outputs) == 1 && pllm_outputs_get(outputs, 0)->finish_reason == PLLM_FINISH_LENGTH);
        CHECK(now() - start > 0.09);
        pthread_join(thread, NULL);
        pllm_outputs_free(outputs);
    }
}

// ---- lifetimes and neighbours ----------------------------------------------------------------------------------------

static int entries(const char *directory) {
    int count = 0;
    DIR *dir = opendir(directory);
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

static void outputs_outlive_their_engine(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    sampling.flags = PLLM_SAMPLING_LOGPROBS;
    uint64_t id = 0;
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_add_request(engine, &request, &id));
    do OK(pllm_engine_step(engine, &step));
    while (step.unfinished);
    pllm_outputs *outputs = NULL;
    pllm_tokens *tokens = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    OK(pllm_engine_tokenize(engine, "a b", 3, 0, &tokens));
    pllm_error *error = pllm_engine_abort(engine, id);
    pllm_engine_free(engine);
    answer a = {0};
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) take(&a, pllm_outputs_get(outputs, i));
    CHECK(text_is(&a, PARIS, strlen(PARIS)) && a.logprobs_len == a.tokens_len);
    CHECK(pllm_tokens_len(tokens) > 0 && pllm_tokens_data(tokens)[0] < 1024);
    FAILS(PLLM_E_NOT_FOUND, error);
    pllm_tokens_free(tokens);
    pllm_outputs_free(outputs);
}

static void twenty_engines_come_and_go_without_a_trace(void) {
    int threads = 0, files = 0;
    for (int i = 0; i < 20; i++) {
        pllm_engine *engine = open_engine(golden_dir);
        pllm_sampling sampling = greedy();
        pllm_request request = token_request(&sampling);
        sampling.max_tokens = 3;
        if (i % 2) CHECK(run(engine, &request)->tokens_len == 3);
        else OK(pllm_engine_add_request(engine, &request, &(uint64_t){0}));  // ends with the engine
        pllm_engine_free(engine);
        if (i == 0) threads = entries("/proc/self/task"), files = entries("/proc/self/fd");
    }
    CHECK(entries("/proc/self/task") == threads);
    CHECK(entries("/proc/self/fd") == files);
}

static void two_engines_do_not_know_each_other(const pllm_engine *engine) {
    pllm_engine *other = open_engine(model_dir), *golden = open_engine(golden_dir);
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling), tokens = token_request(&sampling);
    sampling.max_tokens = 20;
    const answer alone = *run(engine, &request);
    uint64_t a_id = 0, b_id = 0, golden_id = 0;
    answer a = {0}, b = {0}, c = {0};
    OK(pllm_engine_add_request(engine, &request, &a_id));
    OK(pllm_engine_add_request(other, &request, &b_id));
    OK(pllm_engine_add_request(golden, &tokens, &golden_id));
    FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(other, a_id == b_id ? a_id + 1 : a_id));
    pllm_step steps[3] = {{.struct_size = sizeof *steps}, {.struct_size = sizeof *steps}, {.struct_size = sizeof *steps}};
    do {
        OK(pllm_engine_step(engine, &steps[0]));
        OK(pllm_engine_step(other, &steps[1]));
        OK(pllm_engine_step(golden, &steps[2]));
        collect(engine, a_id, &a);
        collect(other, b_id, &b);
        collect(golden, golden_id, &c);
    } while (steps[0].unfinished || steps[1].unfinished || steps[2].unfinished);
    CHECK(same(&a, &alone) && same(&b, &alone) && c.finish_reason != PLLM_FINISH_NONE && c.text_len == 0);
    pllm_engine_free(other);
    CHECK(same(run(engine, &request), &alone));
    pllm_engine_free(golden);
}

// ---- what the host sees of it ----------------------------------------------------------------------------------------

static const int SIGNALS[] = {SIGSEGV, SIGINT, SIGPIPE, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTERM, SIGCHLD, SIGUSR1, SIGALRM};

typedef struct {
    struct sigaction actions[COUNT(SIGNALS)];
    sigset_t mask;
    char directory[4096], environment[65536];
    mode_t umask;
} surroundings;

static void look_around(surroundings *s) {
    extern char **environ;
    memset(s, 0, sizeof *s);
    for (size_t i = 0; i < COUNT(SIGNALS); i++) sigaction(SIGNALS[i], NULL, &s->actions[i]);
    pthread_sigmask(SIG_SETMASK, NULL, &s->mask);
    if (!getcwd(s->directory, sizeof s->directory)) CHECK(!"getcwd");
    size_t len = 0;
    for (char **e = environ; *e && len < sizeof s->environment; e++)
        len += (size_t)snprintf(s->environment + len, sizeof s->environment - len, "%s\n", *e);
    umask(s->umask = umask(0));
}

static void engines_leave_the_process_as_it_was(void) {
    static surroundings before, after;
    look_around(&before);
    pllm_engine *engine = open_engine(model_dir);
    pllm_request request = text_request(FRANCE, NULL);
    run(engine, &request);
    pllm_engine_free(engine);
    look_around(&after);
    for (size_t i = 0; i < COUNT(SIGNALS); i++) {
        CHECK(before.actions[i].sa_handler == after.actions[i].sa_handler);
        CHECK(before.actions[i].sa_flags == after.actions[i].sa_flags);
    }
    CHECK(!memcmp(&before.mask, &after.mask, sizeof before.mask));
    CHECK(!strcmp(before.directory, after.directory) && before.umask == after.umask);
    CHECK(!strcmp(before.environment, after.environment));
}

// Calls that fail, each in its own way; what they return is looked at elsewhere.
static void fail_in_many_ways(const pllm_engine *engine) {
    const char *paths[] = {"", "/nonexistent", "/", "/dev/null", "tests/goldens/tokenizers"};
    for (size_t i = 0; i < COUNT(paths); i++) {
        pllm_engine_options options = options_for(paths[i]);
        pllm_engine *out = NULL;
        pllm_error_free(pllm_engine_create(&options, &out));
    }
    pllm_sampling sampling = greedy();
    pllm_request request = text_request("\xff", &sampling);
    pllm_error_free(add(engine, &request));
    sampling.temperature = NAN;
    pllm_error_free(add(engine, &request));
    pllm_bytes *bytes = NULL;
    pllm_error_free(pllm_engine_render_chat(engine, "[{\"role\": 3}]", PLLM_NUL_TERMINATED, &bytes));
    pllm_bytes_free(bytes), bytes = NULL;
    pllm_error_free(pllm_engine_render_chat(engine, "{\"messages\": [3, null]}", PLLM_NUL_TERMINATED, &bytes));
    pllm_bytes_free(bytes), bytes = NULL;
    pllm_error_free(pllm_engine_detokenize(engine, (const uint32_t[]){UINT32_MAX}, 1, 0, &bytes));
    pllm_error_free(pllm_engine_abort(engine, 12345678));
    pllm_error_free(pllm_engine_step(NULL, NULL));
    pllm_error_free(pllm_queue_poll(NULL, 0, NULL));
}

// The golden model with a tokenizer whose decoder panics: it takes a letter away from the end of an empty token.
static const char *const PANICS = "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"\": 0, \"a\": 1}, \"merges\": []},"
                                  " \"decoder\": {\"type\": \"Strip\", \"content\": \"a\", \"start\": 0, \"stop\": 1}}";
static const char *const LINKS[] = {"config.json", "generation_config.json", "model.safetensors"};

static void make_model_that_panics(const char *dir) {
    char from[4200], to[4200], golden[4096];
    if (!CHECK(realpath(golden_dir, golden) != NULL)) return;
    for (size_t i = 0; i < COUNT(LINKS); i++) {
        snprintf(from, sizeof from, "%s/%s", golden, LINKS[i]);
        snprintf(to, sizeof to, "%s/%s", dir, LINKS[i]);
        CHECK(symlink(from, to) == 0);
    }
    snprintf(to, sizeof to, "%s/tokenizer.json", dir);
    FILE *file = fopen(to, "w");
    if (!CHECK(file != NULL)) return;
    CHECK(fputs(PANICS, file) >= 0 && fclose(file) == 0);
}

static void remove_model(const char *dir) {
    char path[4200];
    for (size_t i = 0; i < COUNT(LINKS); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, LINKS[i]);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    unlink(path);
    rmdir(dir);
}

// The error of a call that meets a panic of a third party's code.
static pllm_error *meet_a_panic(const char *dir) {
    pllm_engine_options options = options_for(dir);
    pllm_engine *engine = NULL;
    pllm_bytes *bytes = NULL;
    pllm_error *error = pllm_engine_create(&options, &engine);
    if (!error) error = pllm_engine_detokenize(engine, (const uint32_t[]){0}, 1, 0, &bytes);
    pllm_bytes_free(bytes);
    pllm_engine_free(engine);
    return error;
}

static void nothing_is_printed(const pllm_engine *engine) {
    char name[] = "/tmp/abi_test_XXXXXX", dir[] = "/tmp/abi_test_XXXXXX";
    int file = mkstemp(name), out = dup(1), err = dup(2);
    if (!CHECK(file >= 0 && out >= 0 && err >= 0 && mkdtemp(dir))) return;
    unlink(name);
    make_model_that_panics(dir);
    fflush(stdout);
    dup2(file, 1);
    dup2(file, 2);
    fail_in_many_ways(engine);
    pllm_error *panic = meet_a_panic(dir);
    fflush(NULL);
    off_t printed = lseek(file, 0, SEEK_END);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    close(file);
    remove_model(dir);
    CHECK(printed == 0);
    INVALID(panic);
}

// ---- all of it -------------------------------------------------------------------------------------------------------

static void with_the_bundled_model(void) {
    pllm_engine *engine = open_engine(model_dir);
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    const answer before = *run(engine, &request);
    null_engines_and_options_are_refused_and_outputs_stay(engine);
    null_requests_are_refused_and_outputs_stay(engine);
    null_text_is_refused_and_outputs_stay(engine);
    unknown_flags_and_numbers_are_refused(engine);
    wrong_sampling_is_refused(engine);
    wrong_prompts_are_refused(engine);
    text_that_is_not_utf8_is_refused(engine);
    a_chat_that_is_no_chat_is_refused(engine);
    ids_that_are_not_live_are_not_found(engine);
    text_and_tokens_go_back_and_forth(engine);
    an_answer_ends_with_the_model_s_own_stop(engine);
    logprobs_come_where_they_are_asked_for(engine);
    max_tokens_ends_an_answer(engine);
    ignore_eos_goes_on(engine);
    a_stop_token_ends_an_answer_without_its_text(engine);
    a_stop_string_across_tokens_ends_an_answer_and_is_not_shown(engine);
    a_seed_decides_alone(engine);
    usage_counts_add_up(engine);
    info_and_plan_agree(engine);
    structs_of_sequences_have_the_size_of_some_version(engine);
    null_sequences_and_pins_are_refused_and_outputs_stay(engine);
    null_lists_are_refused(engine);
    wrong_new_sampling_is_refused(engine);
    wrong_branching_is_refused(engine);
    wrong_uses_of_a_sequence_are_refused(engine);
    sequences_that_are_gone_are_not_found(engine);
    a_kept_sequence_stays_however_it_ends(engine);
    n_samples_end_one_by_one_and_the_best_ones_at_the_end(engine);
    what_is_kept_goes_on_as_one_prompt_would(engine);
    a_rewound_sequence_says_the_same_again_and_its_forks_too(engine);
    a_sequence_that_moves_says_what_it_would_have_said(engine);
    to_go_on_asks_for_nothing_but_where_whose_and_whether_to_keep(engine);
    what_has_nothing_more_to_say_cannot_go_on(engine);
    a_state_comes_where_it_is_wanted(engine);
    a_sequence_that_ends_before_it_is_written_down_says_so_where_the_state_is_wanted(engine);
    what_is_said_of_a_prompt_moves_with_it();
    null_state_are_refused_and_outputs_stay(engine);
    a_damaged_state_is_refused(engine);
    a_state_is_refused_where_it_does_not_belong(engine);
    what_is_imported_writes_to_the_queue_that_was_named(engine);
    what_is_reported_adds_up_in_every_kind_of_output(engine);
    a_hook_chooses_every_token(engine);
    a_grammar_decides_what_may_be_said(engine);
    prompts_that_begin_alike_are_computed_once(engine);
    a_deadline_that_has_passed_is_refused(engine);
    a_deadline_ends_a_turn_with_what_it_has(engine);
    a_priority_out_of_range_is_refused(engine);
    an_engine_s_own_budget_is_borrowed_and_can_be_resized(engine);
    metrics_are_a_text_that_says_what_runs(engine);
    two_engines_do_not_know_each_other(engine);
    nothing_is_printed(engine);
    // After all of that.
    CHECK(same(run(engine, &request), &before) && idle(engine));
    pllm_engine_free(engine);
}

static void with_the_golden(void) {
    pllm_engine *engine = open_engine(golden_dir);
    structs_have_the_size_of_some_version(engine);
    text_needs_a_tokenizer(engine);
    a_poll_without_outputs_ends_empty_when_time_runs_out(engine);
    a_poll_waits_for_what_another_thread_makes(engine);
    pllm_engine_free(engine);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: abi_test MODEL_DIR GOLDEN_DIR\n"), 2;
    model_dir = argv[1];
    golden_dir = argv[2];
    a_length_that_no_memory_has_is_refused();
    the_library_names_itself();
    null_is_free_and_empty();
    engines_leave_the_process_as_it_was();
    a_missing_model_is_an_error();
    with_the_golden();
    with_the_bundled_model();
    the_higher_priority_comes_first();
    texts_beyond_max_prompt_bytes_are_refused();
    too_much_that_waits_is_refused_with_the_numbers();
    admission_is_told_beforehand_and_adds_nothing();
    admissions_and_budgets_have_the_size_of_some_version();
    wrong_budgets_are_refused();
    an_budget_becomes_no_smaller_than_its_engine_needs_and_no_larger_than_it_was_made_for();
    two_engines_on_one_budget_answer_as_one_alone_would();
    what_is_swapped_out_goes_on_as_if_it_had_stayed(NULL);
    k_and_v_in_8_bits_take_less_room();
    weights_in_whole_numbers_take_less_room();
    packed_weights_are_kept_and_read_again();
    traces_and_journals_are_written_where_they_are_wanted();
    files_that_cannot_be_written_are_refused();
    two_threads_step_and_one_at_a_time_gets_through();
    every_request_of_four_threads_ends_exactly_once();
    outputs_outlive_their_engine();
    twenty_engines_come_and_go_without_a_trace();
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
