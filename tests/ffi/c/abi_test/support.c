// Checks, and helpers of several files.
#include "abi_test.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

// ---- checks ----

atomic_uint checks_passed, checks_failed;

int check(int ok, const char *condition, const char *file, int line) {
    atomic_fetch_add(ok ? &checks_passed : &checks_failed, 1);
    if (!ok) printf("%s:%d: failed: %s\n", file, line, condition);
    return ok;
}

int ok(pllm_error *error, const char *call, const char *file, int line) {
    if (error)
        printf("%s:%d: error %d: %s\n", file, line, pllm_error_code(error),
               pllm_error_message(error));
    pllm_error_free(error);
    return check(!error, call, file, line);
}

int fails(int32_t code, pllm_error *error, const char *call, const char *file, int line) {
    int as_expected =
        error && pllm_error_code(error) == code && strlen(pllm_error_message(error)) > 9;
    if (!as_expected)
        printf("%s:%d: error %d: \"%s\"\n", file, line, pllm_error_code(error),
               pllm_error_message(error));
    pllm_error_free(error);
    return check(as_expected, call, file, line);
}

int fails_with_capacity(pllm_error *error, const char *text, const char *call, const char *file,
                        int line) {
    int as_expected = strstr(pllm_error_message(error), text) != NULL;
    if (!as_expected) printf("%s:%d: message \"%s\"\n", file, line, pllm_error_message(error));
    return fails(PLLM_E_CAPACITY, error, call, file, line) && check(as_expected, text, file, line);
}

int all_bytes_are(const void *bytes, uint64_t from, uint64_t to, int value) {
    for (uint64_t i = from; i < to; i++)
        if (((const unsigned char *)bytes)[i] != value) return 0;
    return 1;
}

const void *before_guard_page(const void *bytes, size_t len) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = (len + page - 1) / page * page;
    char *pages =
        mmap(NULL, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + size, page, PROT_NONE)) _exit(98);
    return memcpy(pages + size - len, bytes, len);
}

int code_of(pllm_error *error) {
    int code = pllm_error_code(error);
    pllm_error_free(error);
    return code;
}

// ---- time ----

void sleep_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// ---- engines and requests ----

pllm_engine_options options_for(const char *path) {
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

pllm_engine *open_engine(const char *path) {
    pllm_engine_options options = options_for(path);
    pllm_engine *engine = NULL;
    if (!OK(pllm_engine_create(&options, &engine))) exit(1);
    return engine;
}

pllm_plan plan_of(const pllm_engine_options *options) {
    pllm_plan plan = {.struct_size = sizeof plan};
    OK(pllm_engine_plan(options, &plan));
    return plan;
}

pllm_stats stats_of(const pllm_engine *engine) {
    pllm_stats stats = {.struct_size = sizeof stats};
    OK(pllm_engine_get_stats(engine, &stats));
    return stats;
}

int is_idle(const pllm_engine *engine) {
    pllm_stats s = stats_of(engine);
    return s.blocks_free + s.blocks_cached == s.blocks_total && s.blocks_used == 0 &&
           s.waiting == 0 && s.running == 0 && s.idle == 0;
}

pllm_step step_of(const pllm_engine *engine) {
    pllm_step step = {.struct_size = sizeof step};
    OK(pllm_engine_step(engine, &step));
    return step;
}

void step_to_the_end(const pllm_engine *engine) {
    while (step_of(engine).unfinished) continue;
}

pllm_sampling greedy(void) {
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    return sampling;
}

pllm_sampling long_sampling(void) {
    pllm_sampling sampling = greedy();
    sampling.max_tokens = 100;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    return sampling;
}

pllm_sampling seeded_sampling(void) {
    pllm_sampling sampling = greedy();
    sampling.temperature = 1.2f;
    sampling.seed = 5;
    sampling.max_tokens = 30;
    sampling.flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS | PLLM_SAMPLING_LOGPROBS;
    return sampling;
}

pllm_request text_request(const char *prompt, const pllm_sampling *sampling) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = prompt;
    request.prompt_len = PLLM_NUL_TERMINATED;
    request.sampling = sampling;
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    return request;
}

pllm_request token_request(const pllm_sampling *sampling) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt_token_ids = PROMPT;
    request.prompt_token_ids_len = COUNT(PROMPT);
    request.sampling = sampling;
    return request;
}

pllm_error *add_and_abort(const pllm_engine *engine, const pllm_request *request) {
    uint64_t id = 0;
    pllm_error *error = pllm_engine_add_request(engine, request, &id);
    if (!error) pllm_error_free(pllm_engine_abort(engine, id));
    return error;
}

// ---- outputs ----

void append_output(generation *a, const pllm_output *o) {
    CHECK(o->struct_size == sizeof *o && o->index == 0 && o->reserved == 0 &&
          o->sequence_state == NULL && o->sequence_state_len == 0);
    CHECK(a->finish_reason == PLLM_FINISH_NONE);  // no output follows the last one
    CHECK(a->tokens_len + o->tokens_len <= COUNT(a->tokens) &&
          a->text_len + o->text_len < sizeof a->text);
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
    if (o->finish_reason == PLLM_FINISH_NONE)
        CHECK(queued == 0 && first == 0 && last == 0 && o->preemptions == 0 &&
              o->cached_tokens == 0);
    if (o->finish_reason == PLLM_FINISH_LENGTH)
        CHECK(0 < queued && queued <= first && first <= last);
    a->outputs++;
    a->prompt_tokens = o->prompt_tokens;
    a->generated_tokens = o->generated_tokens;
    a->user_data = o->user_data;
    a->finish_reason = o->finish_reason;
    a->error_code = o->error_code;
}

void collect_outputs_from(const pllm_queue *queue, uint64_t id, generation *a) {
    pllm_outputs *outputs = NULL;
    if (!OK(pllm_queue_poll(queue, 0, &outputs))) return;
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++)
        if (pllm_outputs_get(outputs, i)->request == id)
            append_output(a, pllm_outputs_get(outputs, i));
    pllm_outputs_free(outputs);
}

void collect_outputs(const pllm_engine *engine, uint64_t id, generation *a) {
    collect_outputs_from(pllm_engine_queue(engine), id, a);
}

void discard_outputs(const pllm_engine *engine) { collect_outputs(engine, 0, &(generation){0}); }

generation *run_request(const pllm_engine *engine, const pllm_request *request) {
    static generation generations[4];  // the last four results stay valid
    static int next;
    generation *a = &generations[next++ % 4];
    memset(a, 0, sizeof *a);
    uint64_t id = 0;
    if (!OK(pllm_engine_add_request(engine, request, &id))) return a;
    CHECK(id != 0);
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    while (step.unfinished && OK(pllm_engine_step(engine, &step))) collect_outputs(engine, id, a);
    CHECK(a->finish_reason != PLLM_FINISH_NONE);
    return a;
}

int same_generation(const generation *a, const generation *b) {
    return a->tokens_len == b->tokens_len &&
           !memcmp(a->tokens, b->tokens, a->tokens_len * sizeof *a->tokens) &&
           a->text_len == b->text_len && !memcmp(a->text, b->text, a->text_len) &&
           a->finish_reason == b->finish_reason;
}

int text_is(const generation *a, const char *text, uint64_t len) {
    return a->text_len == len && !memcmp(a->text, text, len);
}

int text_matches_tokens(const pllm_engine *engine, const generation *a) {
    uint64_t shown = a->tokens_len - (a->finish_reason == PLLM_FINISH_STOP);
    pllm_bytes *bytes = NULL;
    OK(pllm_engine_detokenize(engine, a->tokens, shown, PLLM_TEXT_SKIP_SPECIAL, &bytes));
    int same_generation = text_is(a, pllm_bytes_data(bytes), pllm_bytes_len(bytes));
    pllm_bytes_free(bytes);
    return same_generation;
}

pllm_queue *new_queue(const pllm_engine *engine, uint64_t capacity) {
    pllm_queue *queue = NULL;
    if (!OK(pllm_queue_create(engine, capacity, &queue))) exit(1);
    return queue;
}

uint64_t outputs_in(const pllm_queue *queue) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(queue, 0, &outputs));
    uint64_t len = pllm_outputs_len(outputs);
    pllm_outputs_free(outputs);
    return len;
}

pllm_outputs *only_output(const pllm_queue *queue, const pllm_output **o) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(queue, 0, &outputs));
    if (!CHECK(pllm_outputs_len(outputs) == 1)) exit(1);
    *o = pllm_outputs_get(outputs, 0);
    return outputs;
}

// ---- copies of a request ----

void add_copies(const pllm_engine *engine, const pllm_request *request, request_copies *c) {
    memset(c, 0, sizeof *c);
    for (int i = 0; i < COPIES; i++) OK(pllm_engine_add_request(engine, request, &c->ids[i]));
}

void check_copies(const pllm_engine *engine, request_copies *c, const generation *expected) {
    pllm_outputs *outputs = NULL;
    OK(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t o = 0; o < pllm_outputs_len(outputs); o++) {
        const pllm_output *output = pllm_outputs_get(outputs, o);
        c->preemptions += output->preemptions;
        for (int i = 0; i < COPIES; i++)
            if (output->request == c->ids[i]) append_output(&c->generations[i], output);
    }
    pllm_outputs_free(outputs);
    for (int i = 0; i < COPIES; i++) CHECK(same_generation(&c->generations[i], expected));
    CHECK(stats_of(engine).preemptions == c->preemptions);
}

// ---- sequences and pins ----

uint64_t keep_sequence(const pllm_engine *engine, uint32_t tokens) {
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    uint64_t id = 0;
    sampling.max_tokens = tokens;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    request.flags = PLLM_REQUEST_KEEP;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_to_the_end(engine);
    discard_outputs(engine);
    CHECK(info_of(engine, id).idle == 1 && info_of(engine, id).len == COUNT(PROMPT) + tokens);
    return id;
}

void free_sequence(const pllm_engine *engine, uint64_t sequence) {
    OK(pllm_sequence_free(engine, sequence));
    step_of(engine);
}

pllm_sequence_info info_of(const pllm_engine *engine, uint64_t sequence) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    OK(pllm_sequence_get_info(engine, sequence, &info));
    return info;
}

pllm_resume continue_options(uint32_t flags) {
    pllm_resume options;
    pllm_resume_init(&options, sizeof options);
    options.flags = PLLM_RESUME_CONTINUE | flags;
    return options;
}

pllm_error *resume_continue(const pllm_engine *engine, uint64_t sequence, uint32_t flags) {
    const pllm_resume options = continue_options(flags);
    return pllm_sequence_resume(engine, sequence, &options);
}

pllm_pin token_pin(void) {
    pllm_pin pin;
    pllm_pin_init(&pin, sizeof pin);
    pin.prompt_token_ids = PROMPT;
    pin.prompt_token_ids_len = COUNT(PROMPT);
    return pin;
}

void check_every_call_is_not_found(const pllm_engine *engine, uint64_t id) {
    pllm_sequence_info info = {.struct_size = sizeof info};
    uint64_t out = 77;
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_fork(engine, id, NULL, &out));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_append(engine, id, PROMPT, 1));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_rewind(engine, id, 1));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_resume(engine, id, NULL));
    FAILS(PLLM_E_NOT_FOUND, resume_continue(engine, id, 0));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_export(engine, id, NULL));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_free(engine, id));
    FAILS(PLLM_E_NOT_FOUND, pllm_sequence_get_info(engine, id, &info));
    FAILS(PLLM_E_NOT_FOUND, pllm_prefix_unpin(engine, id));
    CHECK(out == 77 && info.len == 0);
}

// ---- exported states ----

int is_state_output(const pllm_output *o, uint64_t sequence) {
    return o->sequence == sequence && o->sequence_state && o->sequence_state_len > 0 &&
           o->finish_reason == PLLM_FINISH_NONE && !o->error && !o->tokens && !o->text &&
           !o->logprobs && !o->top_logprobs && !o->prompt_logprobs;
}

exported_sequence export_state(const pllm_engine *engine, uint64_t sequence) {
    exported_sequence exported = {0};
    pllm_queue *queue = new_queue(engine, 1);
    const pllm_output *o;
    OK(pllm_sequence_export(engine, sequence, queue));
    step_of(engine);
    pllm_outputs *outputs = only_output(queue, &o);
    if (!CHECK(is_state_output(o, sequence))) exit(1);
    exported.bytes =
        memcpy(malloc(o->sequence_state_len), o->sequence_state, o->sequence_state_len);
    exported.len = o->sequence_state_len;
    pllm_outputs_free(outputs);
    pllm_queue_free(queue);
    return exported;
}

exported_sequence export_and_collect(const pllm_engine *engine, uint64_t sequence, generation *a) {
    const generation emitted = *a;
    exported_sequence exported = export_state(engine, sequence);
    exported.emitted = emitted;
    collect_outputs(engine, sequence, a);
    return exported;
}

uint64_t import_state(const pllm_engine *engine, const exported_sequence *exported) {
    uint64_t id = 0;
    OK(pllm_sequence_import(engine, exported->bytes, exported->len, NULL, &id));
    CHECK(id != 0);
    return id;
}
