// Computes prompts and keeps their blocks in a store until the end of its input.
// usage: owner MODEL_DIR STORE_DIRECTORY SOCKET KIND THREADS
// The input has a seed and a length for each prompt. The answers are 0 when the engine is ready, and the
// time to the first token in milliseconds when the store has all full blocks of a prompt.
#include <stdlib.h>
#include <unistd.h>

#include "common.h"

static void answer(double time) {
    if (write(1, &time, sizeof time) != sizeof time) fail("the answers are not read");
}

int main(int argc, char **argv) {
    if (argc != 6) fail("usage: owner MODEL_DIR STORE_DIRECTORY SOCKET KIND THREADS");
    place = (places){argv[1], argv[2], argv[3]};
    const settings with = {.store = (store_kind)atoi(argv[4]), .threads = (uint32_t)atoi(argv[5])};
    pllm_engine *engine = create_engine(&with);
    run_prompt(engine, FIRST_SEED, FIRST_LEN);
    uint64_t message[2], blocks = FIRST_LEN / BLOCK;
    finish_writes(engine, blocks);
    answer(0);
    while (read(0, message, sizeof message) == sizeof message) {
        const double time = run_prompt(engine, message[0], (uint32_t)message[1]);
        blocks += message[1] / BLOCK;
        finish_writes(engine, blocks);
        answer(time);
    }
    pllm_engine_free(engine);
}
