// The host process: lifetimes, several engines, process state, output streams.
#include "abi_test.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

static int directory_entries(const char *directory) {
    int count_output = 0;
    DIR *dir = opendir(directory);
    while (dir && readdir(dir)) count_output++;
    if (dir) closedir(dir);
    return count_output;
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
    generation a = {0};
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++)
        append_output(&a, pllm_outputs_get(outputs, i));
    CHECK(text_is(&a, PARIS, strlen(PARIS)) && a.logprobs_len == a.tokens_len);
    CHECK(pllm_tokens_len(tokens) > 0 && pllm_tokens_data(tokens)[0] < 1024);
    FAILS(PLLM_E_NOT_FOUND, error);
    pllm_tokens_free(tokens);
    pllm_outputs_free(outputs);
}

static void freed_engines_leave_no_threads_and_no_files(void) {
    int threads = 0, files = 0;
    for (int i = 0; i < 20; i++) {
        pllm_engine *engine = open_engine(golden_dir);
        pllm_sampling sampling = greedy();
        pllm_request request = token_request(&sampling);
        sampling.max_tokens = 3;
        if (i % 2) CHECK(run_request(engine, &request)->tokens_len == 3);
        else OK(pllm_engine_add_request(engine, &request, &(uint64_t){0}));  // ends with its engine
        pllm_engine_free(engine);
        if (i == 0)
            threads = directory_entries("/proc/self/task"),
            files = directory_entries("/proc/self/fd");
    }
    CHECK(directory_entries("/proc/self/task") == threads);
    CHECK(directory_entries("/proc/self/fd") == files);
}

static void engines_are_independent(const pllm_engine *engine) {
    pllm_engine *other = open_engine(model_dir), *golden = open_engine(golden_dir);
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(STORY, &sampling), tokens = token_request(&sampling);
    sampling.max_tokens = 20;
    const generation undisturbed = *run_request(engine, &request);
    uint64_t a_id = 0, b_id = 0, golden_id = 0;
    generation a = {0}, b = {0}, c = {0};
    OK(pllm_engine_add_request(engine, &request, &a_id));
    OK(pllm_engine_add_request(other, &request, &b_id));
    OK(pllm_engine_add_request(golden, &tokens, &golden_id));
    FAILS(PLLM_E_NOT_FOUND, pllm_engine_abort(other, a_id == b_id ? a_id + 1 : a_id));
    pllm_step steps[3] = {{.struct_size = sizeof *steps},
                          {.struct_size = sizeof *steps},
                          {.struct_size = sizeof *steps}};
    do {
        OK(pllm_engine_step(engine, &steps[0]));
        OK(pllm_engine_step(other, &steps[1]));
        OK(pllm_engine_step(golden, &steps[2]));
        collect_outputs(engine, a_id, &a);
        collect_outputs(other, b_id, &b);
        collect_outputs(golden, golden_id, &c);
    } while (steps[0].unfinished || steps[1].unfinished || steps[2].unfinished);
    CHECK(same_generation(&a, &undisturbed) && same_generation(&b, &undisturbed) &&
          c.finish_reason != PLLM_FINISH_NONE && c.text_len == 0);
    pllm_engine_free(other);
    CHECK(same_generation(run_request(engine, &request), &undisturbed));
    pllm_engine_free(golden);
}

static const int SIGNALS[] = {SIGSEGV, SIGINT,  SIGPIPE, SIGABRT, SIGBUS, SIGFPE,
                              SIGILL,  SIGTERM, SIGCHLD, SIGUSR1, SIGALRM};

typedef struct {
    struct sigaction actions[COUNT(SIGNALS)];
    sigset_t mask;
    char directory[4096], environment[65536];
    mode_t umask;
} process_state;

static void read_process_state(process_state *s) {
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

static void engine_leaves_the_process_state_unchanged(void) {
    static process_state before, after;
    read_process_state(&before);
    pllm_engine *engine = open_engine(model_dir);
    pllm_request request = text_request(FRANCE, NULL);
    run_request(engine, &request);
    pllm_engine_free(engine);
    read_process_state(&after);
    for (size_t i = 0; i < COUNT(SIGNALS); i++) {
        CHECK(before.actions[i].sa_handler == after.actions[i].sa_handler);
        CHECK(before.actions[i].sa_flags == after.actions[i].sa_flags);
    }
    CHECK(!memcmp(&before.mask, &after.mask, sizeof before.mask));
    CHECK(!strcmp(before.directory, after.directory) && before.umask == after.umask);
    CHECK(!strcmp(before.environment, after.environment));
}

// Calls that fail in different ways. Other tests check their errors.
static void make_failing_calls(const pllm_engine *engine) {
    const char *paths[] = {"", "/nonexistent", "/", "/dev/null", "tests/data/tokenizers"};
    for (size_t i = 0; i < COUNT(paths); i++) {
        pllm_engine_options options = options_for(paths[i]);
        pllm_engine *out = NULL;
        pllm_error_free(pllm_engine_create(&options, &out));
    }
    pllm_sampling sampling = greedy();
    pllm_request request = text_request("\xff", &sampling);
    pllm_error_free(add_and_abort(engine, &request));
    sampling.temperature = NAN;
    pllm_error_free(add_and_abort(engine, &request));
    pllm_bytes *bytes = NULL;
    pllm_error_free(
        pllm_engine_render_chat(engine, "[{\"role\": 3}]", PLLM_NUL_TERMINATED, &bytes));
    pllm_bytes_free(bytes), bytes = NULL;
    pllm_error_free(
        pllm_engine_render_chat(engine, "{\"messages\": [3, null]}", PLLM_NUL_TERMINATED, &bytes));
    pllm_bytes_free(bytes), bytes = NULL;
    pllm_error_free(pllm_engine_detokenize(engine, (const uint32_t[]){UINT32_MAX}, 1, 0, &bytes));
    pllm_error_free(pllm_engine_abort(engine, 12345678));
    pllm_error_free(pllm_engine_step(NULL, NULL));
    pllm_error_free(pllm_queue_poll(NULL, 0, NULL));
}

// A tokenizer for the golden model whose decoder panics: it removes a character from an empty
// token.
static const char *const PANICKING_TOKENIZER =
    "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"\": 0, \"a\": 1}, \"merges\": []},"
    " \"decoder\": {\"type\": \"Strip\", \"content\": \"a\", \"start\": 0, \"stop\": 1}}";
static const char *const LINKED_FILES[] = {"config.json", "generation_config.json",
                                           "model.safetensors"};

static void make_panicking_model(const char *dir) {
    char from[4200], to[4200], golden[4096];
    if (!CHECK(realpath(golden_dir, golden) != NULL)) return;
    for (size_t i = 0; i < COUNT(LINKED_FILES); i++) {
        snprintf(from, sizeof from, "%s/%s", golden, LINKED_FILES[i]);
        snprintf(to, sizeof to, "%s/%s", dir, LINKED_FILES[i]);
        CHECK(symlink(from, to) == 0);
    }
    snprintf(to, sizeof to, "%s/tokenizer.json", dir);
    FILE *file = fopen(to, "w");
    if (!CHECK(file != NULL)) return;
    CHECK(fputs(PANICKING_TOKENIZER, file) >= 0 && fclose(file) == 0);
}

static void remove_panicking_model(const char *dir) {
    char path[4200];
    for (size_t i = 0; i < COUNT(LINKED_FILES); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, LINKED_FILES[i]);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    unlink(path);
    rmdir(dir);
}

// Returns the error of a call that catches a panic of third-party code.
static pllm_error *error_of_panicking_model(const char *dir) {
    pllm_engine_options options = options_for(dir);
    pllm_engine *engine = NULL;
    pllm_bytes *bytes = NULL;
    pllm_error *error = pllm_engine_create(&options, &engine);
    if (!error) error = pllm_engine_detokenize(engine, (const uint32_t[]){0}, 1, 0, &bytes);
    pllm_bytes_free(bytes);
    pllm_engine_free(engine);
    return error;
}

static void library_prints_nothing(const pllm_engine *engine) {
    char name[] = "/tmp/abi_test_XXXXXX", dir[] = "/tmp/abi_test_XXXXXX";
    int file = mkstemp(name), out = dup(1), err = dup(2);
    if (!CHECK(file >= 0 && out >= 0 && err >= 0 && mkdtemp(dir))) return;
    unlink(name);
    make_panicking_model(dir);
    fflush(stdout);
    dup2(file, 1);
    dup2(file, 2);
    make_failing_calls(engine);
    pllm_error *panic = error_of_panicking_model(dir);
    fflush(NULL);
    off_t printed = lseek(file, 0, SEEK_END);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    close(file);
    remove_panicking_model(dir);
    CHECK(printed == 0);
    INVALID(panic);
}

const test process_tests[] = {
    ALONE(outputs_outlive_their_engine),   ALONE(freed_engines_leave_no_threads_and_no_files),
    WITH_BUNDLED(engines_are_independent), ALONE(engine_leaves_the_process_state_unchanged),
    WITH_BUNDLED(library_prints_nothing),  {0},
};
