// The wrapper in a program that is compiled with -fno-exceptions -fno-rtti.
// usage: no_exceptions_test MODEL_DIR
#include <cstdio>
#include <string>

#include "pagedllm.hpp"

#if defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "compile this with -fno-exceptions -fno-rtti"
#endif

// Without exceptions there is no value() of Result and Status.
template <class T, class = void>
constexpr bool has_value_function = false;
template <class T>
constexpr bool has_value_function<T, std::void_t<decltype(std::declval<T &>().value())>> = true;
static_assert(has_value_function<std::optional<int>> && !has_value_function<pagedllm::Result<int>>);
static_assert(!has_value_function<pagedllm::Status>);

static int failed = 0;

static void check(bool good, const char *what, int line) {
    if (good) return;
    std::printf("no_exceptions_test.cpp:%d: failed: %s\n", line, what);
    failed++;
}
#define CHECK(condition) check(condition, #condition, __LINE__)

static pagedllm::Request greedy(const std::string &prompt) {
    pagedllm::Request request{prompt};
    request.sampling.temperature = 0;
    request.add_special = false;
    return request;
}

static void generate_future_and_stream_give_the_answer(pagedllm::Engine &engine) {
    const std::string answer = "The capital of France is Paris.";
    const auto prompt = engine.render_chat(R"([{"role": "user", "content": "What is the capital of France?"}])");
    CHECK(prompt.ok());
    if (!prompt) return;
    const auto whole = engine.generate(greedy(*prompt));
    CHECK(whole && whole->text == answer);
    const auto later = engine.generate_async(greedy(*prompt)).get();
    CHECK(later && later->text == answer);
    auto stream = engine.stream(greedy(*prompt));
    CHECK(stream.ok());
    if (!stream) return;
    std::string text;
    for (const pagedllm::Output &output : *stream) text += output.text;
    CHECK(stream->status() && text == answer);
}

static void sequences_and_several_results_work(pagedllm::Engine &engine) {
    const auto prompt = engine.render_chat(R"([{"role": "user", "content": "What is the capital of France?"}])");
    CHECK(prompt.ok());
    if (!prompt) return;
    pagedllm::Request request = greedy(*prompt);
    request.keep = true;
    request.sampling.max_tokens = 4;
    const auto first = engine.generate(request);
    CHECK(first && first->text == "The capital of F");
    if (!first) return;
    pagedllm::Sequence trunk = engine.sequence(first->sequence);
    const pagedllm::QueueView queue = engine.queue();
    pagedllm::Fork fork;
    fork.queue = &queue;
    auto branch = trunk.fork(fork);
    CHECK(branch.ok());
    if (!branch) return;
    pagedllm::Resume how;
    how.sampling.temperature = 0;
    const auto state = branch->export_state();
    CHECK(state.ok());
    if (!state) return;
    auto moved = engine.import_sequence(*state);
    CHECK(moved.ok());
    if (!moved) return;
    CHECK(moved->generate(how)->text == "rance is Paris.");
    const auto rest = branch->generate(how);
    CHECK(rest && rest->text == "rance is Paris.");
    CHECK(!branch->rewind(0) && trunk.free());
    CHECK(trunk.info().error().code == pagedllm::Code::invalid_argument);
    request.keep = false;
    request.n = 3;
    const auto all = engine.generate_all(request);
    CHECK(all && all->size() == 3);
    CHECK(engine.pin({*prompt}).ok());
}

static void errors_are_returned(pagedllm::Engine &engine) {
    const auto refused = engine.generate({""});
    CHECK(!refused && refused.error().code == pagedllm::Code::invalid_argument && !refused.error().message.empty());
    CHECK(refused.error().prompt_tokens == 0 && refused.error().max_model_len == 0);
    const std::vector<uint32_t> many(5000, 300);
    const auto too_long = engine.generate({many});
    CHECK(!too_long && too_long.error().prompt_tokens == 5000 && too_long.error().max_model_len > 0);
    CHECK(engine.health().ok());
    CHECK(*engine.token_bytes(5) == "<|end|>" && !engine.token_bytes(1024));
    const pagedllm::Status unknown = engine.abort(1 << 20);
    CHECK(!unknown && unknown.error().code == pagedllm::Code::not_found);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    pagedllm::Options options;
    options.model_path = argv[1];
    options.kv_bytes = 16 << 20;
    options.threads = 1;
    int calls = 0;
    options.progress = [&](uint64_t, uint64_t) { return ++calls > 1; };
    const auto cancelled = pagedllm::Engine::create(options);
    CHECK(!cancelled && cancelled.error().code == pagedllm::Code::cancelled && calls == 1);
    auto engine = pagedllm::Engine::create(options);
    CHECK(engine.ok());
    if (!engine) return 1;
    generate_future_and_stream_give_the_answer(*engine);
    sequences_and_several_results_work(*engine);
    errors_are_returned(*engine);
    CHECK(engine->start().error().code == pagedllm::Code::busy);
    std::printf("%s\n", failed ? "failed" : "passed");
    return failed != 0;
}
