// The C boundary as a host meets it: many engines and threads, queues and descriptors, sequences,
// fork and exit, old and new headers.
// usage: boundary MODEL_DIR GOLDEN_DIR [CASE...]
//     MODEL_DIR   the bundled model, which has a tokenizer
//     GOLDEN_DIR  a tiny LLaMA without a tokenizer
// Every case is a process: one that crashes or hangs is told by its name, and the others run.
// BOUNDARY_PATIENCE=10 gives each ten times as long (valgrind, sanitizers).
#include "boundary.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

const char *model_dir, *golden_dir;

static const test_case *const groups[] = {lifetime_cases, thread_cases, queue_cases,   sequence_cases,
                                          event_cases,    host_cases,   version_cases, load_cases};

enum { PASSED = 0, FAILED = 1, SKIPPED = 77, SECONDS = 30 };

_Noreturn void skip(const char *why) {
    printf("skipped: %s\n", why);
    exit(SKIPPED);
}

static unsigned seconds(void) {
    const char *patience = getenv("BOUNDARY_PATIENCE");
    return SECONDS * (patience ? (unsigned)atoi(patience) : 1);
}

// The whole output in a file: a pipe that nobody reads would make a talkative case wait.
static pid_t start_alone(const char *name, int output) {
    pid_t child = fork();
    if (child != 0) return child;
    setpgid(0, 0);
    dup2(output, 1);
    dup2(output, 2);
    alarm(seconds());  // lives on after exec, where its signal ends the process
    execl("/proc/self/exe", "boundary", model_dir, golden_dir, name, (char *)NULL);
    _exit(127);
}

ending run_alone(const char *name) {
    ending end = {.status = -1};
    char path[] = "/tmp/boundary_XXXXXX";
    int output = mkstemp(path);
    if (output < 0) return end;
    unlink(path);
    fcntl(output, F_SETFD, FD_CLOEXEC);
    fflush(stdout);
    pid_t child = start_alone(name, output);
    if (child > 0 && waitpid(child, &end.status, 0) == child) kill(-child, SIGKILL);  // children it left behind
    ssize_t length = pread(output, end.output, sizeof end.output - 1, 0);
    end.output[length < 0 ? 0 : length] = 0;
    close(output);
    return end;
}

static const test_case *find(const char *name) {
    for (size_t g = 0; g < COUNT(groups); g++)
        for (const test_case *c = groups[g]; c->name; c++)
            if (!strcmp(c->name, name)) return c;
    return NULL;
}

static void describe(const char *name, const ending *end, double seconds_taken) {
    bool exited = WIFEXITED(end->status);
    int code = exited ? WEXITSTATUS(end->status) : -1;
    if (code == PASSED) printf("passed   %s (%.1f s)\n", name, seconds_taken);
    else if (code == SKIPPED) printf("skipped  %s\n", name);
    else if (exited) printf("FAILED   %s: exit status %d\n", name, code);
    else if (WTERMSIG(end->status) == SIGALRM) printf("FAILED   %s: hung for %u s\n", name, seconds());
    else printf("FAILED   %s: %s\n", name, strsignal(WTERMSIG(end->status)));
    fputs(end->output, stdout);
    fflush(stdout);
}

// True unless the case failed.
static bool report(const char *name) {
    double start = now();
    ending end = run_alone(name);
    describe(name, &end, now() - start);
    return WIFEXITED(end.status) && (WEXITSTATUS(end.status) == PASSED || WEXITSTATUS(end.status) == SKIPPED);
}

static int run_all(void) {
    unsigned run = 0, failed = 0;
    for (size_t g = 0; g < COUNT(groups); g++)
        for (const test_case *c = groups[g]; c->name; c++)
            if (!c->hidden) run++, failed += !report(c->name);
    printf("%u cases, %u failed\n", run, failed);
    return failed ? FAILED : PASSED;
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: boundary MODEL_DIR GOLDEN_DIR [CASE]\n"), 2;
    model_dir = argv[1];
    golden_dir = argv[2];
    if (argc == 3) return run_all();
    const test_case *c = find(argv[3]);
    if (!c) return fprintf(stderr, "there is no case %s\n", argv[3]), 2;
    c->run();
    return exit_code();
}
