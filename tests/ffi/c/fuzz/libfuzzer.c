// Entry points of libFuzzer. It detects calls that hang (-timeout) and leaks, and writes failing
// inputs to files. PLLM_MODEL, PLLM_GOLDEN: the bundled model, and a tiny LLaMA without a
// tokenizer.
#include "fuzz.h"

const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    model_dir = getenv("PLLM_MODEL");
    golden_dir = getenv("PLLM_GOLDEN");
    if (!model_dir || !golden_dir)
        fprintf(stderr, "PLLM_MODEL and PLLM_GOLDEN must name the models' directories\n"), exit(2);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    run_program(data, size);
    return 0;
}
