// A race that ThreadSanitizer must report despite tsan.supp: two threads increment a counter
// without a lock around calls of the library.
// usage: unsynchronized MODEL_DIR
#include <cstdio>
#include <thread>

#include "pagedllm.hpp"

int main(int argc, char **argv) {
    pagedllm::Options options;
    options.model_path = argc > 1 ? argv[1] : "";
    options.kv_bytes = 16 << 20;
    options.threads = 1;
    auto engine = pagedllm::Engine::create(options).value();
    int answers = 0;
    const auto generate = [&] { answers += engine.generate({"Hello"}).ok(); };
    std::thread other(generate);
    generate();
    other.join();
    std::printf("%d answers\n", answers);
}
