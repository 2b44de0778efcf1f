// A worker with rank 1 of 2, which the tests start as a process.
// usage: worker MODEL_DIR GROUP_FILE BLOCK_SIZE
// The exit status is 0, or the code of the error.
#include <cstdio>
#include <cstdlib>

#include "pagedllm.hpp"

static int failed(const pagedllm::Error &error) {
    std::fprintf(stderr, "worker: %s\n", error.message.c_str());
    return static_cast<int>(error.code);
}

int main(int argc, char **argv) {
    if (argc != 4) return 99;
    auto world = pagedllm::Communicator::shared_memory(argv[2], 1, 2, std::chrono::minutes(10));
    if (!world) return failed(world.error());
    bool was_reported = false;
    pagedllm::Options options;
    options.model_path = argv[1];
    options.kv_bytes = 16 << 20;
    options.threads = 1;
    options.block_size = static_cast<uint32_t>(std::atoi(argv[3]));
    options.tensor_parallel = 2;
    options.communicator = &*world;
    options.worker_timeout = std::chrono::minutes(10);
    options.progress = [&](uint64_t, uint64_t) { return was_reported = true; };
    const pagedllm::Status ended = pagedllm::run_worker(options);
    if (!ended) return failed(ended.error());
    return was_reported ? 0 : 98;
}
