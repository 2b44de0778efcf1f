// Programs from a seed, one after the other, for so many seconds.
//     fuzz MODEL_DIR GOLDEN_DIR SECONDS [SEED]           prints the seed first, and at the end what was called
//     fuzz MODEL_DIR GOLDEN_DIR --replay SEED ITERATION  one of these programs again
//     fuzz MODEL_DIR GOLDEN_DIR --hash COUNT SEED        what came of the repeatable ones among the first COUNT, as a number
//     fuzz MODEL_DIR GOLDEN_DIR --sabotage NAME          spoils what one check sees: must end in a finding
//     fuzz --sabotages | --functions                     their names, and what the finding says | every function that is called
// The programs run in a process that another one watches, which says how to replay what crashes or hangs. Where many threads
// take part, a replay makes the same calls, but the threads may take other turns: try it several times.
// FUZZ_PATIENCE=60: so many seconds for one call.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fuzz.h"

const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "abort_on_error=1:allocator_may_return_null=1"; }

enum { LONGEST = 3072, SHORTEST = 256, COVERED_AFTER = 20, REPEATED = 8 };

typedef struct {
    uint64_t seed, first, count;  // count 0: until the time is up
    uint64_t ms;
    bool hash_only, covers;
} task;

// ---- the programs ------------------------------------------------------------------------------------------------------

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
    size_t len = SHORTEST + next(&state) % (LONGEST - SHORTEST);
    for (size_t i = 0; i < len; i++) to[i] = (uint8_t)next(&state);
    return len;
}

static verdict run_iteration(const task *t, uint64_t iteration) {
    static uint8_t program[LONGEST];
    run->iteration = iteration;
    size_t len = write_program(t->seed, iteration, program);
    verdict v = run_program(program, len);
    if (v.repeatable && iteration % REPEATED == 0) {
        uint64_t again = run_program(program, len).hash + (sabotage == a_run_is_not_repeatable);
        EXPECT(v.hash == again, "the same program gave other results: %llx and %llx", LLU(v.hash),
               LLU(again));
    }
    return v;
}

static int run_task(const task *t) {
    uint64_t hash = 0, iteration = t->first, end = now_ms() + t->ms;
    for (; t->count ? iteration < t->first + t->count : now_ms() < end; iteration++) {
        verdict v = run_iteration(t, iteration);
        if (v.repeatable) hash = mix(hash, v.hash);
    }
    run->iteration = iteration;
    if (t->hash_only) return printf("%016llx\n", LLU(hash)), 0;
    print_counts(iteration - t->first);
    return t->covers && !everything_was_tried();
}

// ---- the watching process ----------------------------------------------------------------------------------------------

static uint64_t patience_ms(void) {
    const char *patience = getenv("FUZZ_PATIENCE");
    return (patience ? strtoull(patience, NULL, 10) : 30) * 1000;
}

static bool hangs(uint64_t patience) {
    for (int i = 0; i < WORKERS; i++) {
        int function = run->under_way[i].function;
        uint64_t since = run->under_way[i].since_ms, now = now_ms();
        if (function < 0 || now < since + patience || run->under_way[i].function != function) continue;
        printf("FINDING: %s has been under way for %llu s\n", function_names[function], LLU(now - since) / 1000);
        return true;
    }
    return false;
}

static int wait_for(pid_t child) {
    uint64_t patience = patience_ms();
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (hangs(patience)) kill(child, SIGABRT), waitpid(child, &status, 0);
        else usleep(20000);
    }
    return status;
}

static int watch(const task *t) {
    run = mmap(NULL, sizeof *run, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (run == MAP_FAILED) return perror("mmap"), 2;
    for (int i = 0; i < WORKERS; i++) run->under_way[i].function = -1;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) return perror("fork"), 2;
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL), exit(run_task(t));
    int status = wait_for(child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    if (WIFSIGNALED(status)) printf("the run ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else printf("the run ended with exit status %d\n", WEXITSTATUS(status));
    printf("FAILED; to see it again: fuzz MODEL_DIR GOLDEN_DIR --replay %llu %llu\n", LLU(t->seed),
           LLU(run->iteration));
    return 1;
}

// ---- what is asked for -------------------------------------------------------------------------------------------------

#define AS_LINE(name, report) #name "|" report,
static const char *const sabotages[] = {SABOTAGES(AS_LINE)};

static void print_lines(const char *const *lines, size_t count) {
    for (size_t i = 0; i < count; i++) puts(lines[i]);
}

static int sabotage_named(const char *name) {
    for (size_t i = 0; i < COUNT(sabotages); i++)
        if (!strncmp(sabotages[i], name, strlen(name)) && sabotages[i][strlen(name)] == '|') return (int)i + 1;
    fprintf(stderr, "there is no sabotage %s\n", name);
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
    fputs("usage: fuzz MODEL_DIR GOLDEN_DIR SECONDS [SEED] | --replay SEED ITERATION | --hash COUNT SEED | --sabotage NAME\n"
          "       fuzz --sabotages | --functions\n", stderr);
    return 2;
}

static int run_for(uint64_t seconds, uint64_t seed) {
    printf("seed %llu\n", LLU(seed));
    return watch(&(task){.seed = seed, .ms = seconds * 1000, .covers = seconds >= COVERED_AFTER});
}

static int run_sabotaged(const char *name) {
    sabotage = sabotage_named(name);
    return watch(&(task){.seed = 1, .ms = 20000, .covers = sabotage == a_function_never_fails});
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--sabotages")) return print_lines(sabotages, COUNT(sabotages)), 0;
    if (argc == 2 && !strcmp(argv[1], "--functions")) return print_lines(function_names, FUNCTION_COUNT), 0;
    if (argc < 4) return usage();
    model_dir = argv[1];
    golden_dir = argv[2];
    const char *what = argv[3];
    if (argc == 6 && !strcmp(what, "--replay"))
        return watch(&(task){.seed = as_number(argv[4]), .first = as_number(argv[5]), .count = 1});
    if (argc == 6 && !strcmp(what, "--hash"))
        return watch(&(task){.count = as_number(argv[4]), .seed = as_number(argv[5]), .hash_only = true});
    if (argc == 5 && !strcmp(what, "--sabotage")) return run_sabotaged(argv[4]);
    if (argc > 5 || what[0] == '-') return usage();
    return run_for(as_number(what), argc == 5 ? as_number(argv[4]) : random_seed());
}
