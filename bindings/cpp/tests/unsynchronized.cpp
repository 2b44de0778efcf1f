// A race that ThreadSanitizer must report in spite of tsan.supp: two threads count their answers without a lock, and calls into
// the library between them are none.
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
    const auto ask = [&] { answers += engine.generate({"Hello"}).ok(); };
    std::thread other(ask);
    ask();
    other.join();
    std::printf("%d answers\n", answers);
}
