// Files of an engine: packed weights, traces, journals; and its metrics.
#include "abi_test.h"

#include <sys/stat.h>

static void packed_weights_are_saved_and_read(void) {
    char dir[] = "/tmp/abi_test_XXXXXX", command[64];
    if (!CHECK(mkdtemp(dir) != NULL)) return;
    pllm_engine_options options = options_for(model_dir);
    options.packed_path = dir;
    for (uint64_t packed = PLLM_PACKED_SAVED; packed >= PLLM_PACKED_READ; packed--) {
        pllm_engine *engine = NULL;
        if (!OK(pllm_engine_create(&options, &engine))) return;
        pllm_model_info info = {.struct_size = sizeof info};
        OK(pllm_engine_get_model_info(engine, &info));
        CHECK(info.packed == packed &&
              (info.packed_reason_len > 0) == (packed == PLLM_PACKED_SAVED));
        CHECK(info.blas_library_len == 0);
        pllm_sampling sampling = greedy();
        pllm_request request = text_request(FRANCE, &sampling);
        CHECK(text_is(run_request(engine, &request), PARIS, strlen(PARIS)));
        pllm_engine_free(engine);
    }
    snprintf(command, sizeof command, "rm -r %s", dir);
    CHECK(system(command) == 0);
}

static void metrics_report_running_requests(const pllm_engine *engine) {
    pllm_bytes *text = UNTOUCHED;
    INVALID(pllm_engine_get_metrics(NULL, &text));
    INVALID(pllm_engine_get_metrics(engine, NULL));
    CHECK(text == UNTOUCHED);
    pllm_sampling sampling = long_sampling();
    pllm_request request = token_request(&sampling);
    uint64_t id = 0;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_of(engine);
    INVALID(pllm_engine_snapshot(NULL, 1, 1, &text));
    INVALID(pllm_engine_snapshot(engine, 1, 1, NULL));
    CHECK(text == UNTOUCHED);
    if (!OK(pllm_engine_snapshot(engine, UINT64_MAX, UINT64_MAX, &text))) return;
    CHECK(memmem(pllm_bytes_data(text), pllm_bytes_len(text), "\"running\",", 10) != NULL);
    pllm_bytes_free(text);
    if (!OK(pllm_engine_get_metrics(engine, &text))) return;
    const char *data = pllm_bytes_data(text),
               running[] = "\npagedllm_num_requests_running{model_name=\"model\"} 1",
               end[] = "\n# EOF\n";
    uint64_t len = pllm_bytes_len(text);
    CHECK(memmem(data, len, running, strlen(running)) != NULL);
    CHECK(len > strlen(end) && !memcmp(data + len - strlen(end), end, strlen(end)));
    pllm_bytes_free(text);
    OK(pllm_engine_abort(engine, id));
    step_to_the_end(engine);
    discard_outputs(engine);
}

static uint64_t size_of_file(const char *path) {
    struct stat file = {.st_size = 0};
    return stat(path, &file) ? 0 : (uint64_t)file.st_size;
}

static void traces_and_journals_are_written_to_their_paths(void) {
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
    run_request(engine, &request);
    CHECK(stats_of(engine).traces_stopped == 0 && stats_of(engine).journals_stopped == 0);
    pllm_engine_free(engine);
    CHECK(size_of_file(trace) > 0 && size_of_file(journal) > 0);
    unlink(trace);
    unlink(journal);
    CHECK(rmdir(dir) == 0);
}

static void unwritable_paths_are_io_errors(void) {
    const char *const invalid[] = {"/nonexistent/file", "/tmp"};
    pllm_engine *engine = UNTOUCHED;
    for (size_t i = 0; i < COUNT(invalid); i++) {
        pllm_engine_options options = options_for(golden_dir);
        options.trace_path = invalid[i];
        FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
        options.trace_path = NULL;
        options.journal_path = invalid[i];
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

const test files_tests[] = {
    ALONE(packed_weights_are_saved_and_read),
    WITH_BUNDLED(metrics_report_running_requests),
    ALONE(traces_and_journals_are_written_to_their_paths),
    ALONE(unwritable_paths_are_io_errors),
    {0},
};
