// Checks, and helpers of several files.
#include "boundary.h"

#include <dirent.h>
#include <sys/resource.h>
#include <time.h>

// ---- checks ----

static atomic_uint failures;

// A mistake may repeat a thousand times, so only the first ten are printed.
static bool may_print(void) { return atomic_fetch_add(&failures, 1) < 10; }

static void print_error(const pllm_error *error) {
    printf("    error %d: \"%s\"\n", pllm_error_code(error), pllm_error_message(error));
}

bool check(bool ok, const char *condition, const char *file, int line) {
    if (!ok && may_print()) printf("    %s:%d: failed: %s\n", file, line, condition);
    return ok;
}

bool succeeds(pllm_error *error, const char *call, const char *file, int line) {
    if (error && may_print())
        printf("    %s:%d: failed: %s\n", file, line, call), print_error(error);
    pllm_error_free(error);
    return !error;
}

bool fails(int32_t code, const char *text, pllm_error *error, const char *call, const char *file,
           int line) {
    bool right = pllm_error_code(error) == code && strstr(pllm_error_message(error), text);
    if (!right && may_print())
        printf("    %s:%d: expected error %d, \"%s\": %s\n", file, line, code, text, call),
            print_error(error);
    pllm_error_free(error);
    return right;
}

int exit_code(void) { return atomic_load(&failures) != 0; }

int32_t code_of(pllm_error *error) {
    int32_t code = pllm_error_code(error);
    pllm_error_free(error);
    return code;
}

#if defined(__SANITIZE_THREAD__)
// The sanitizer does not see the locks of a library that is built without it, so it checks only the
// host's code.
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "ignore_noninstrumented_modules=1"; }
#endif

// ---- engines and requests ----

pllm_engine_options options_for(const char *path) {
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = path;
    options.kv_bytes = 8 << 20;
    options.threads = 1;
    if (path == golden_dir) options.flags = PLLM_ENGINE_SKIP_TOKENIZER;
    return options;
}

pllm_engine *open_engine(const char *path) {
    pllm_engine_options options = options_for(path);
    pllm_engine *engine = NULL;
    if (!OK(pllm_engine_create(&options, &engine))) exit(exit_code());
    return engine;
}

pllm_stats stats_of(const pllm_engine *engine) {
    pllm_stats stats = {.struct_size = sizeof stats};
    OK(pllm_engine_get_stats(engine, &stats));
    return stats;
}

pllm_queue *new_queue(const pllm_engine *engine, uint64_t capacity) {
    pllm_queue *queue = NULL;
    if (!OK(pllm_queue_create(engine, capacity, &queue))) exit(exit_code());
    return queue;
}

int event_fd(const pllm_queue *queue) {
    int32_t fd = -1;
    OK(pllm_queue_get_event_fd(queue, &fd));
    return fd;
}

static const char *const prompt_texts[PROMPTS] = {
    "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n",
    "<s><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n",
    "<s><|user|>\nCount from 1 to 10.<|end|>\n<|assistant|>\n",
    "<s><|user|>\nWhat are the days of the week?<|end|>\n<|assistant|>\n",
    "<s><|user|>\nGive JSON for Anna, 31, Paris.<|end|>\n<|assistant|>\n",
    "<s><|user|>\nWhat does a cow say?<|end|>\n<|assistant|>\n",
};

pllm_error *try_add_prompt(const pllm_engine *engine, const pllm_queue *to, unsigned prompt_index,
                           uint32_t tokens, generation *a) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = tokens;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = prompt_texts[prompt_index % PROMPTS];
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.sampling = &sampling;
    request.user_data = (uintptr_t)a;
    request.queue = to;
    return pllm_engine_add_request(engine, &request, &a->id);
}

void add_prompt(const pllm_engine *engine, const pllm_queue *to, unsigned prompt_index,
                uint32_t tokens, generation *a) {
    *a = (generation){0};
    OK(try_add_prompt(engine, to, prompt_index, tokens, a));
}

// Appends an output to the results of its request. Requests without results must not fail.
static void append_output(const pllm_output *o) {
    generation *a = (generation *)(uintptr_t)o->user_data;
    if (!a) {
        CHECK(o->finish_reason != PLLM_FINISH_ERROR);
        return;
    }
    CHECK(a->ends == 0);  // no output follows the last one
    if (!CHECK(a->tokens_len + o->tokens_len <= COUNT(a->tokens) &&
               a->text_len + o->text_len <= sizeof a->text))
        return;
    if (o->tokens) memcpy(a->tokens + a->tokens_len, o->tokens, o->tokens_len * sizeof *o->tokens);
    if (o->text) memcpy(a->text + a->text_len, o->text, o->text_len);
    a->tokens_len += o->tokens_len;
    a->text_len += o->text_len;
    a->outputs++;
    a->finish_reason = o->finish_reason;
    a->ends += o->finish_reason != PLLM_FINISH_NONE;
}

int64_t take_outputs(const pllm_queue *queue, int64_t timeout_ms) {
    pllm_outputs *outputs = NULL;
    pllm_error *error = pllm_queue_poll(queue, timeout_ms, &outputs);
    if (pllm_error_code(error) == PLLM_E_CLOSED) return pllm_error_free(error), -1;
    if (!OK(error)) return 0;
    int64_t count = (int64_t)pllm_outputs_len(outputs);
    for (int64_t i = 0; i < count; i++) append_output(pllm_outputs_get(outputs, (uint64_t)i));
    pllm_outputs_free(outputs);
    return count;
}

void step_to_the_end(const pllm_engine *engine) {
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    while (step.unfinished && OK(pllm_engine_step(engine, &step)))
        take_outputs(pllm_engine_queue(engine), 0);
}

static bool is_idle(const pllm_engine *engine) {
    pllm_stats s = stats_of(engine);
    return s.waiting == 0 && s.running == 0 && s.blocks_used == 0;
}

// Statistics are those of the last step. A last request makes sure that a step has applied all
// earlier commands.
void wait_until_idle(const pllm_engine *engine) {
    pllm_queue *queue = new_queue(engine, 1);
    generation last;
    add_prompt(engine, queue, 0, 1, &last);
    while (!last.ends) take_outputs(queue, 1000);
    pllm_queue_free(queue);
    while (!is_idle(engine)) sleep_ms(1);
}

const generation *reference(unsigned prompt_index, uint32_t tokens) {
    static generation generations[PROMPTS];
    static uint32_t lengths[PROMPTS];
    unsigned q = prompt_index % PROMPTS;
    if (lengths[q] == tokens) return &generations[q];
    pllm_engine *engine = open_engine(model_dir);
    add_prompt(engine, NULL, q, tokens, &generations[q]);
    step_to_the_end(engine);
    pllm_engine_free(engine);
    CHECK(generations[q].finish_reason == PLLM_FINISH_LENGTH &&
          generations[q].tokens_len == tokens && generations[q].text_len > 0);
    lengths[q] = tokens;
    return &generations[q];
}

bool is_prefix(const generation *a, unsigned prompt_index, uint32_t tokens) {
    const generation *expected = reference(prompt_index, tokens);
    return a->tokens_len <= expected->tokens_len && a->text_len <= expected->text_len &&
           !memcmp(a->tokens, expected->tokens, a->tokens_len * sizeof *a->tokens) &&
           !memcmp(a->text, expected->text, a->text_len);
}

bool is_complete(const generation *a, unsigned prompt_index, uint32_t tokens) {
    const generation *expected = reference(prompt_index, tokens);
    return is_prefix(a, prompt_index, tokens) && a->tokens_len == expected->tokens_len &&
           a->text_len == expected->text_len && a->ends == 1 &&
           a->finish_reason == expected->finish_reason;
}

// ---- the process ----

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

void sleep_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&time, &time)) continue;
}

static int directory_entries(const char *directory) {
    int count = 0;
    DIR *dir = opendir(directory);
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

int thread_count(void) { return directory_entries("/proc/self/task"); }

// A thread may be listed for a moment after it was joined. The limit only bounds a failing test.
bool thread_count_falls_to(int expected) {
    for (double end = now() + 300; thread_count() > expected && now() < end;) sleep_ms(1);
    return thread_count() <= expected;
}

int descriptor_count(void) { return directory_entries("/proc/self/fd"); }

long resident_kib(void) {
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &size, &resident) != 2) resident = 0;
    if (file) fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

double cpu_seconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}
