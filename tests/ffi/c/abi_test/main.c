// Tests of the C API from a C program.
// usage: abi_test MODEL_DIR GOLDEN_DIR [TEST]
//     MODEL_DIR   the bundled model, which has a tokenizer and a chat template
//     GOLDEN_DIR  a tiny LLaMA without a tokenizer
//     TEST        the name of a test; default: all tests
#include "abi_test.h"

#include <stdatomic.h>

const char *model_dir, *golden_dir;
extern atomic_uint checks_passed, checks_failed;

// lengths_tests come first: their processes are forked before any engine exists.
static const test *const files[] = {
    lengths_tests,        library_tests,   process_tests,       struct_sizes_tests,
    null_arguments_tests, options_tests,   sampling_tests,      requests_tests,
    text_tests,           sequences_tests, export_import_tests, damaged_states_tests,
    pins_tests,           admission_tests, budgets_tests,       swap_tests,
    files_tests,          threads_tests,   kv_store_tests,      kv_events_tests,
    communicator_tests,   workers_tests,
};

// Engines that tests share, opened on first use.
static pllm_engine *bundled, *golden;
static generation first_generation;

static const generation *ask_for_the_capital(const pllm_engine *engine) {
    pllm_sampling sampling = greedy();
    pllm_request request = text_request(FRANCE, &sampling);
    return run_request(engine, &request);
}

static void run_test(const test *t) {
    if (t->with_bundled && !bundled) {
        bundled = open_engine(model_dir);
        first_generation = *ask_for_the_capital(bundled);
    }
    if (t->with_golden && !golden) golden = open_engine(golden_dir);
    if (t->alone) t->alone();
    else if (t->with_bundled) t->with_bundled(bundled);
    else t->with_golden(golden);
}

static void shared_engine_generates_the_same_tokens_after_all_tests(void) {
    if (!bundled) bundled = open_engine(model_dir);
    CHECK(same_generation(ask_for_the_capital(bundled), &first_generation) && is_idle(bundled));
    pllm_engine_free(bundled);
    pllm_engine_free(golden);
}

static unsigned passed, failed;

static void report(const test *t) {
    unsigned failed_before = checks_failed, passed_before = checks_passed;
    double start = now();
    run_test(t);
    int is_failure = checks_failed > failed_before;
    *(is_failure ? &failed : &passed) += 1;
    printf("%s %s (%u checks, %.1f s)\n", is_failure ? "FAILED  " : "passed  ", t->name,
           checks_passed - passed_before + checks_failed - failed_before, now() - start);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4)
        return fprintf(stderr, "usage: abi_test MODEL_DIR GOLDEN_DIR [TEST]\n"), 2;
    model_dir = argv[1];
    golden_dir = argv[2];
    for (size_t f = 0; f < COUNT(files); f++)
        for (const test *t = files[f]; t->name; t++)
            if (argc == 3 || !strcmp(argv[3], t->name)) report(t);
    const test last = ALONE(shared_engine_generates_the_same_tokens_after_all_tests);
    if (argc == 3) report(&last);
    if (passed + failed == 0) return fprintf(stderr, "abi_test: no test is named %s\n", argv[3]), 2;
    printf("%u passed, %u failed (%u checks)\n", passed, failed, checks_passed + checks_failed);
    return failed != 0;
}
