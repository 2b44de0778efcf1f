// Every call on a thread with a small stack.
#include "boundary.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

// A conversation with the maximum nesting that the library accepts.
static const char *nested_chat(void) {
    static char json[1024];
    size_t n =
        (size_t)snprintf(json, sizeof json, "[{\"role\": \"user\", \"content\": \"x\", \"deep\": ");
    for (int i = 0; i < 120; i++) json[n++] = '[';
    for (int i = 0; i < 120; i++) json[n++] = ']';
    strcpy(json + n, "}]");
    return json;
}

// Tokenizes and renders input that needs the deepest recursion of tokenizer and template.
static void use_text(const pllm_engine *engine) {
    static const char chat[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"add_generation_prompt\": "
        "true}";
    static char text[20000];
    memset(text, 'a', sizeof text - 1);
    pllm_tokens *tokens = NULL;
    pllm_bytes *bytes = NULL;
    OK(pllm_engine_render_chat(engine, chat, PLLM_NUL_TERMINATED, &bytes));
    pllm_bytes_free(bytes);
    int32_t code =
        code_of(pllm_engine_render_chat(engine, nested_chat(), PLLM_NUL_TERMINATED, &bytes));
    CHECK(code == 0 || code == PLLM_E_INVALID_ARGUMENT);
    if (code == 0) pllm_bytes_free(bytes);
    OK(pllm_engine_tokenize(engine, text, PLLM_NUL_TERMINATED, PLLM_TEXT_ADD_SPECIAL, &tokens));
    OK(pllm_engine_detokenize(engine, pllm_tokens_data(tokens), pllm_tokens_len(tokens), 0,
                              &bytes));
    CHECK(pllm_bytes_len(bytes) >= sizeof text - 1);
    pllm_bytes_free(bytes);
    pllm_tokens_free(tokens);
}

// Requests with each kind of grammar, beams, and stop strings.
static void use_sampling(pllm_engine *engine) {
    static const char *const stops[] = {"zzz", "yyy"};
    static const struct {
        uint32_t kind;
        const char *text;
    } grammars[] = {
        {PLLM_GRAMMAR_JSON_SCHEMA,
         "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\", \"pattern\": "
         "\"^[a-z]+$\"}}}"},
        {PLLM_GRAMMAR_REGEX, "(ab|cd){1,8}"},
        {PLLM_GRAMMAR_LARK, "start: /[a-z]+/ (\",\" start)?"},
    };
    for (size_t i = 0; i < COUNT(grammars) + 2; i++) {
        pllm_sampling sampling;
        pllm_sampling_init(&sampling, sizeof sampling);
        pllm_beam beam;
        pllm_beam_init(&beam, sizeof beam);
        pllm_request request;
        pllm_request_init(&request, sizeof request);
        request.prompt = "Hello";
        request.sampling = &sampling;
        sampling.max_tokens = 8;
        if (i < COUNT(grammars))
            sampling.grammar_kind = grammars[i].kind, sampling.grammar = grammars[i].text;
        if (i == COUNT(grammars)) sampling.stop = stops, sampling.stop_count = COUNT(stops);
        if (i == COUNT(grammars) + 1)
            beam.width = 2, request.beam = &beam, sampling.temperature = 0;
        pllm_admission admission = {.struct_size = sizeof admission};
        OK(pllm_engine_predict_admission(engine, &request, &admission));
        uint64_t id;
        OK(pllm_engine_add_request(engine, &request, &id));
    }
    step_to_the_end(engine);
}

// Keeps, forks, rewinds, appends to, exports and resumes a sequence.
static void use_sequences(pllm_engine *engine) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.max_tokens = 8;
    request.prompt = "Hello";
    request.sampling = &sampling;
    request.flags |= PLLM_REQUEST_KEEP;
    uint64_t id, other;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_to_the_end(engine);
    pllm_fork fork;
    pllm_fork_init(&fork, sizeof fork);
    OK(pllm_sequence_fork(engine, id, &fork, &other));
    const uint32_t tokens[] = {5, 6, 7};
    OK(pllm_sequence_append(engine, id, tokens, COUNT(tokens)));
    OK(pllm_sequence_rewind(engine, id, 2));
    pllm_sequence_info info = {.struct_size = sizeof info};
    OK(pllm_sequence_get_info(engine, id, &info));
    OK(pllm_sequence_export(engine, id, NULL));
    step_to_the_end(engine);
    pllm_pin pin;
    pllm_pin_init(&pin, sizeof pin);
    pin.prompt = "Hello, hello, hello";
    OK(pllm_prefix_pin(engine, &pin, &other));
    step_to_the_end(engine);
    OK(pllm_prefix_unpin(engine, other));
    pllm_resume resume;
    pllm_resume_init(&resume, sizeof resume);
    resume.sampling = &sampling;
    OK(pllm_sequence_resume(engine, id, &resume));
    step_to_the_end(engine);
    pllm_bytes *metrics = NULL;
    OK(pllm_engine_get_metrics(engine, &metrics));
    pllm_bytes_free(metrics);
    pllm_bytes *snapshot = NULL;
    OK(pllm_engine_snapshot(engine, UINT64_MAX, UINT64_MAX, &snapshot));
    pllm_bytes_free(snapshot);
    stats_of(engine);
}

static void use_kv_events(pllm_engine *engine) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = "Hello";
    pllm_bytes *hashes = NULL;
    OK(pllm_engine_hash_prompt(engine, &request, 0, &hashes));
    pllm_bytes_free(hashes);
    pllm_kv_events *events = NULL;
    OK(pllm_engine_snapshot_kv_events(engine, &events));
    pllm_kv_events_free(events);
    OK(pllm_engine_poll_kv_events(engine, 1, &events));
    CHECK(pllm_kv_events_len(events) > 0);
    pllm_kv_events_free(events);
}

static bool start_thread(pthread_t *thread, const size_t *stack_kib, void *(*run)(void *)) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    return pthread_attr_setstacksize(&attributes, *stack_kib << 10) == 0 &&
           pthread_create(thread, &attributes, run, (void *)stack_kib) == 0;
}

// Options of one of two workers of this process.
static pllm_engine_options worker_options(pllm_communicator *communicator, uint32_t rank) {
    enum { TIMEOUT_MS = 20000 };
    char path[64];
    const char *dir = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path, sizeof path, "%s/pagedllm-small-stacks-%d", dir, (int)getpid());
    pllm_communicator_init(communicator, sizeof *communicator);
    OK(pllm_communicator_shared_memory(path, rank, 2, TIMEOUT_MS, communicator));
    pllm_engine_options options = options_for(model_dir);
    options.tensor_parallel = 2;
    options.communicator = communicator;
    options.worker_timeout_ms = TIMEOUT_MS;
    return options;
}

static void *run_worker(void *unused) {
    (void)unused;
    pllm_communicator communicator;
    pllm_engine_options options = worker_options(&communicator, 1);
    if (!OK(pllm_worker_run(&options))) communicator.close(communicator.user_data);
    return NULL;
}

// Loads, runs and ends two workers, both on small stacks.
static void use_workers(const size_t *stack_kib) {
    pthread_t worker;
    if (!CHECK(start_thread(&worker, stack_kib, run_worker))) return;
    pllm_communicator communicator;
    pllm_engine_options options = worker_options(&communicator, 0);
    pllm_engine *engine = NULL;
    if (OK(pllm_engine_create(&options, &engine))) use_sequences(engine);
    else communicator.close(communicator.user_data);
    pllm_engine_free(engine);
    pthread_join(worker, NULL);
}

static void *make_every_call(void *stack_kib) {
    pllm_engine_options options = options_for(model_dir);
    options.kv_events_capacity = 1000;
    pllm_plan plan = {.struct_size = sizeof plan};
    OK(pllm_engine_plan(&options, &plan));
    pllm_engine *engine = NULL;
    OK(pllm_engine_create(&options, &engine));
    generation *generations = calloc(64, sizeof *generations);
    use_text(engine);
    use_sampling(engine);
    use_sequences(engine);
    for (unsigned i = 0; i < 64; i++) add_prompt(engine, NULL, i, 30, &generations[i]);
    step_to_the_end(engine);
    for (unsigned i = 0; i < 64; i++)
        CHECK(generations[i].ends == 1 && generations[i].tokens_len == 30);
    use_kv_events(engine);
    pllm_engine_free(engine);
    free(generations);
    use_workers(stack_kib);
    return NULL;
}

static bool works_with_stack(size_t kib) {
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        pthread_t thread;
        if (!start_thread(&thread, &kib, make_every_call)) _exit(2);
        pthread_join(thread, NULL);
        fflush(stdout);
        _exit(exit_code());
    }
    waitpid(child, &status, 0);
    return status == 0;
}

// The smallest stack size that some hosts give their threads.
static void every_call_works_on_a_64_kib_stack(void) {
    enum { GUARANTEED_KIB = 64 };
    size_t min_kib = 0;
    for (size_t kib = 512; kib >= 32 && works_with_stack(kib); kib /= 2) min_kib = kib;
    printf("    smallest stack: %zu KiB\n", min_kib);
    CHECK(SANITIZED || (min_kib && min_kib <= GUARANTEED_KIB));
}

const test small_stacks_tests[] = {
    TEST(every_call_works_on_a_64_kib_stack),
    {0},
};
