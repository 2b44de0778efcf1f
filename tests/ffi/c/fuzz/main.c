// Runs random programs for a number of seconds.
//     fuzz MODEL_DIR GOLDEN_DIR SECONDS [SEED]           prints the seed, and at the end the calls
//     fuzz MODEL_DIR GOLDEN_DIR --replay SEED ITERATION  runs one of these programs again
//     fuzz MODEL_DIR GOLDEN_DIR --hash COUNT SEED        hash of the repeatable ones of COUNT
//     fuzz MODEL_DIR GOLDEN_DIR --mutation NAME          must end in a finding
//     fuzz --mutations | --functions                     prints their names
// A second process supervises the run and prints how to replay a crash or a hang. A replay with
// several threads makes the same calls, but the threads may interleave differently: try it several
// times. FUZZ_CALL_TIMEOUT=60: a call hangs if the run uses no CPU time for this number of seconds
// meanwhile, or this CPU time in each of its threads.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../cpu_time.h"
#include "fuzz.h"

const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "abort_on_error=1:allocator_may_return_null=1"; }

enum {
    MAX_PROGRAM_BYTES = 3072,
    MIN_PROGRAM_BYTES = 256,
    COVERAGE_SECONDS = 20,
    MAX_CALL_SECONDS = 1800,
    REPEAT_INTERVAL = 8
};

typedef struct {
    uint64_t seed, first, count;  // count 0: until the time is over
    uint64_t ms, cpu_ms;  // the least of both
    bool hash_only, check_coverage;
} run_options;

// ---- the programs ----

// splitmix64
static uint64_t next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static size_t write_program(uint64_t seed, uint64_t iteration, uint8_t *to) {
    uint64_t state = seed;
    state = next(&state) ^ iteration * 0xD6E8FEB86659FD93u;
    size_t len = MIN_PROGRAM_BYTES + next(&state) % (MAX_PROGRAM_BYTES - MIN_PROGRAM_BYTES);
    for (size_t i = 0; i < len; i++) to[i] = (uint8_t)next(&state);
    return len;
}

static program_result run_iteration(const run_options *t, uint64_t iteration) {
    static uint8_t program[MAX_PROGRAM_BYTES];
    shared_status->iteration = iteration;
    size_t len = write_program(t->seed, iteration, program);
    program_result v = run_program(program, len);
    if (v.repeatable && iteration % REPEAT_INTERVAL == 0) {
        uint64_t again = run_program(program, len).hash + (mutation == program_is_not_repeatable);
        EXPECT(v.hash == again, "the same program has other results: %llx and %llx", LLU(v.hash),
               LLU(again));
    }
    return v;
}

static uint64_t own_cpu_ms(void) { return (uint64_t)clock() / (CLOCKS_PER_SEC / 1000); }

static void *do_nothing(void *unused) { return unused; }

// A sanitizer may start a thread of its own with the first thread.
static void start_the_first_thread(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, do_nothing, NULL) == 0) pthread_join(thread, NULL);
}

static int run_iterations(const run_options *t) {
    start_the_first_thread();
    uint64_t hash = 0, iteration = t->first, end = now_ms() + t->ms;
    for (; t->count ? iteration < t->first + t->count : now_ms() < end || own_cpu_ms() < t->cpu_ms;
         iteration++) {
        program_result v = run_iteration(t, iteration);
        if (v.repeatable) hash = mix(hash, v.hash);
    }
    shared_status->iteration = iteration;
    if (t->hash_only) return printf("%016llx\n", LLU(hash)), 0;
    print_counts(iteration - t->first);
    return t->check_coverage && !every_function_was_covered();
}

// ---- the supervising process ----

static uint64_t call_timeout_ms(void) {
    const char *timeout = getenv("FUZZ_CALL_TIMEOUT");
    return (timeout ? strtoull(timeout, NULL, 10) : 30) * 1000;
}

// What the supervisor has seen of the run.
typedef struct {
    uint64_t cpu_ms, progress_ms;  // CPU time, and when it last changed
    struct {
        uint64_t since_ms, cpu_ms;
    } calls[WORKERS];  // at their starts
} observation;

// A busy machine slows a call, so the limits are CPU time. The wall clock is the last resort.
static bool find_hanging_call(pid_t child, observation *seen) {
    uint64_t timeout = call_timeout_ms(), cpu = (uint64_t)(1000 * cpu_seconds_of(child)), now = now_ms();
    if (cpu != seen->cpu_ms) seen->cpu_ms = cpu, seen->progress_ms = now;
    for (int i = 0; i < WORKERS; i++) {
        int function = shared_status->current_calls[i].function;
        uint64_t since = shared_status->current_calls[i].since_ms;
        if (function < 0) continue;
        if (since != seen->calls[i].since_ms)
            seen->calls[i].since_ms = since, seen->calls[i].cpu_ms = cpu;
        uint64_t used = cpu - seen->calls[i].cpu_ms;
        bool idle = now > since + timeout && now > seen->progress_ms + timeout;
        bool hangs = idle || used > timeout * WORKERS || now > since + MAX_CALL_SECONDS * 1000;
        if (!hangs || shared_status->current_calls[i].function != function) continue;
        printf("FINDING: %s has not returned for %llu s and %llu ms of CPU time\n",
               function_names[function], LLU(now - since) / 1000, LLU(used));
        return true;
    }
    return false;
}

static int wait_for(pid_t child) {
    observation seen = {.progress_ms = now_ms()};
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (find_hanging_call(child, &seen)) kill(child, SIGABRT), waitpid(child, &status, 0);
        else usleep(20000);
    }
    return status;
}

static int supervise(const run_options *t) {
    shared_status = mmap(NULL, sizeof *shared_status, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared_status == MAP_FAILED) return perror("mmap"), 2;
    for (int i = 0; i < WORKERS; i++) shared_status->current_calls[i].function = -1;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) return perror("fork"), 2;
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL), exit(run_iterations(t));
    int status = wait_for(child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    if (WIFSIGNALED(status))
        printf("the run ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else printf("the run ended with exit status %d\n", WEXITSTATUS(status));
    printf("FAILED; to replay it: fuzz MODEL_DIR GOLDEN_DIR --replay %llu %llu\n", LLU(t->seed),
           LLU(shared_status->iteration));
    return 1;
}

// ---- command line ----

#define AS_LINE(name, report) #name "|" report,
static const char *const mutations[] = {MUTATIONS(AS_LINE)};

static void print_lines(const char *const *lines, size_t count) {
    for (size_t i = 0; i < count; i++) puts(lines[i]);
}

static int mutation_named(const char *name) {
    for (size_t i = 0; i < COUNT(mutations); i++)
        if (!strncmp(mutations[i], name, strlen(name)) && mutations[i][strlen(name)] == '|')
            return (int)i + 1;
    fprintf(stderr, "no mutation is named %s\n", name);
    exit(2);
}

static uint64_t as_number(const char *text) {
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    if (*text && !*end) return value;
    fprintf(stderr, "not a number: %s\n", text);
    exit(2);
}

static uint64_t random_seed(void) {
    uint64_t seed = now_ms();
    return getrandom(&seed, sizeof seed, 0) == sizeof seed ? seed : now_ms();
}

static int usage(void) {
    fputs(
        "usage: fuzz MODEL_DIR GOLDEN_DIR SECONDS [SEED] | --replay SEED ITERATION | --hash COUNT "
        "SEED | --mutation NAME\n"
        "       fuzz --mutations | --functions\n",
        stderr);
    return 2;
}

static int run_for(uint64_t seconds, uint64_t seed) {
    printf("seed %llu\n", LLU(seed));
    bool check_coverage = seconds >= COVERAGE_SECONDS;
    return supervise(&(run_options){.seed = seed,
                                    .ms = seconds * 1000,
                                    .cpu_ms = check_coverage ? COVERAGE_SECONDS * 1000 : 0,
                                    .check_coverage = check_coverage});
}

static int run_mutation(const char *name) {
    mutation = mutation_named(name);
    bool is_coverage = mutation == function_never_fails;
    return supervise(
        &(run_options){.seed = 1,
                       .ms = is_coverage ? 3000 : 0,
                       .cpu_ms = is_coverage ? 0 : 20000,
                       .check_coverage = is_coverage});
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--mutations"))
        return print_lines(mutations, COUNT(mutations)), 0;
    if (argc == 2 && !strcmp(argv[1], "--functions"))
        return print_lines(function_names, FUNCTION_COUNT), 0;
    if (argc < 4) return usage();
    model_dir = argv[1];
    golden_dir = argv[2];
    const char *argument = argv[3];
    if (argc == 6 && !strcmp(argument, "--replay"))
        return supervise(
            &(run_options){.seed = as_number(argv[4]), .first = as_number(argv[5]), .count = 1});
    if (argc == 6 && !strcmp(argument, "--hash"))
        return supervise(&(run_options){
            .count = as_number(argv[4]), .seed = as_number(argv[5]), .hash_only = true});
    if (argc == 5 && !strcmp(argument, "--mutation")) return run_mutation(argv[4]);
    if (argc > 5 || argument[0] == '-') return usage();
    return run_for(as_number(argument), argc == 5 ? as_number(argv[4]) : random_seed());
}
