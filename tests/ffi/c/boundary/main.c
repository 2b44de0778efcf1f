// The library inside a host process: many engines and threads, queues and descriptors, sequences,
// fork and exit, old and new headers.
// usage: boundary MODEL_DIR GOLDEN_DIR [TEST]
//     MODEL_DIR   the bundled model, which has a tokenizer
//     GOLDEN_DIR  a tiny LLaMA without a tokenizer
// Each test runs in its own process, so that a crash or a hang is reported by name and the other
// tests run. BOUNDARY_TIMEOUT_FACTOR=10 multiplies the limits of supervise.c (for sanitizers).
//        boundary --supervise PROGRAM [ARGUMENTS]
// Runs another program within the same limits.
#include "boundary.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

const char *model_dir, *golden_dir;

static const test *const files[] = {
    engines_tests,
    fork_tests,
    exit_tests,
    threads_tests,
    queues_tests,
    sequence_threads_tests,
    sequence_ids_tests,
    sequence_queues_tests,
    sequence_blocks_tests,
    hooks_tests,
    events_tests,
    signals_tests,
    small_stacks_tests,
    process_state_tests,
    versions_tests,
    progress_tests,
};

enum { PASSED = 0, FAILED = 1, SKIPPED = 77 };

_Noreturn void skip(const char *why) {
    printf("skipped: %s\n", why);
    exit(SKIPPED);
}

// Output goes to a file, because a test with much output would block on a pipe.
static pid_t start_alone(const char *name, int output) {
    pid_t child = fork();
    if (child != 0) return child;
    setpgid(0, 0);
    dup2(output, 1);
    dup2(output, 2);
    execl("/proc/self/exe", "boundary", model_dir, golden_dir, name, (char *)NULL);
    _exit(127);
}

exit_result run_alone(const char *name) {
    exit_result end = {.status = -1};
    char path[] = "/tmp/boundary_XXXXXX";
    int output = mkstemp(path);
    if (output < 0) return end;
    unlink(path);
    fcntl(output, F_SETFD, FD_CLOEXEC);
    fflush(stdout);
    pid_t child = start_alone(name, output);
    if (child > 0) {
        end.hang = wait_for(child, &end.status);
        kill(-child, SIGKILL);  // remaining child processes
    }
    ssize_t length = pread(output, end.output, sizeof end.output - 1, 0);
    end.output[length < 0 ? 0 : length] = 0;
    close(output);
    return end;
}

static const test *find(const char *name) {
    for (size_t f = 0; f < COUNT(files); f++)
        for (const test *t = files[f]; t->name; t++)
            if (!strcmp(t->name, name)) return t;
    return NULL;
}

static void print_result(const char *name, const exit_result *end, double seconds_taken) {
    bool exited = WIFEXITED(end->status);
    int code = exited ? WEXITSTATUS(end->status) : -1;
    if (end->hang) printf("FAILED   %s: hangs: %s\n", name, end->hang);
    else if (code == PASSED) printf("passed   %s (%.1f s)\n", name, seconds_taken);
    else if (code == SKIPPED) printf("skipped  %s\n", name);
    else if (exited) printf("FAILED   %s: exit status %d\n", name, code);
    else printf("FAILED   %s: %s\n", name, strsignal(WTERMSIG(end->status)));
    fputs(end->output, stdout);
    fflush(stdout);
}

// Returns PASSED, SKIPPED or FAILED.
static int report(const char *name) {
    double start = now();
    exit_result end = run_alone(name);
    print_result(name, &end, now() - start);
    int code = WIFEXITED(end.status) ? WEXITSTATUS(end.status) : FAILED;
    return code == PASSED || code == SKIPPED ? code : FAILED;
}

static int run_all(void) {
    unsigned passed = 0, skipped = 0, failed = 0;
    for (size_t f = 0; f < COUNT(files); f++)
        for (const test *t = files[f]; t->name; t++) {
            if (t->hidden) continue;
            int code = report(t->name);
            *(code == PASSED ? &passed : code == SKIPPED ? &skipped : &failed) += 1;
        }
    printf("%u passed, %u skipped, %u failed\n", passed, skipped, failed);
    return failed ? FAILED : PASSED;
}

static int run_program(char **arguments) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        execv(arguments[0], arguments);
        _exit(127);
    }
    const char *hang = child > 0 ? wait_for(child, &status) : "no child";
    if (hang) printf("FAILED   %s: hangs: %s\n", arguments[0], hang);
    else if (!WIFEXITED(status))
        printf("FAILED   %s: %s\n", arguments[0], strsignal(WTERMSIG(status)));
    return hang || !WIFEXITED(status) ? FAILED : WEXITSTATUS(status);
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "--supervise")) return run_program(argv + 2);
    if (argc < 3) return fprintf(stderr, "usage: boundary MODEL_DIR GOLDEN_DIR [TEST]\n"), 2;
    model_dir = argv[1];
    golden_dir = argv[2];
    if (argc == 3) return run_all();
    const test *t = find(argv[3]);
    if (!t) return fprintf(stderr, "no test is named %s\n", argv[3]), 2;
    t->run();
    return exit_code();
}
