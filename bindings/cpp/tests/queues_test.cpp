// Queues: pausing, poll(2), and outputs after the engine is freed.
#include <poll.h>

#include <atomic>
#include <future>

#include "support.hpp"

static bool is_readable(int fd, std::chrono::milliseconds timeout = 0ms) {
    pollfd entry = {fd, POLLIN, 0};
    return ::poll(&entry, 1, static_cast<int>(timeout.count())) == 1 && entry.revents == POLLIN;
}

TEST(Queue, receives_only_the_outputs_of_its_requests) {
    pagedllm::Engine engine = host_stepped_engine();
    const pagedllm::Queue a = engine.create_queue(64).value(), b = engine.create_queue(64).value();
    const std::string to_a = chat(france.question), to_b = chat(cow.question), to_own = chat(japanese.question);
    engine.add(greedy(to_a), a).value();
    engine.add(greedy(to_b), b).value();
    engine.add(greedy(to_own)).value();
    step_to_the_end(engine);
    EXPECT_EQ(read_to_the_end(a).text, france.answer);
    EXPECT_EQ(read_to_the_end(b).text, cow.answer);
    EXPECT_EQ(read_to_the_end(engine.queue()).text, japanese.answer);
    const pagedllm::QueueView view = a;
    EXPECT_TRUE(view.poll().value().empty() && b.poll().value().empty());
}

TEST(Queue, returns_an_empty_batch_after_the_timeout) {
    pagedllm::Engine engine = open_engine();
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(engine.queue().poll().value().empty());
    EXPECT_TRUE(engine.queue().poll(30ms).value().empty());
    EXPECT_TRUE(engine.queue().poll(-30ms).value().empty()) << "a negative timeout must not wait without limit";
    EXPECT_GE(std::chrono::steady_clock::now() - start, 29ms);
}

TEST(Queue, waits_without_limit_for_the_outputs_of_another_thread) {
    pagedllm::Engine engine = host_stepped_engine();
    const pagedllm::Queue queue = engine.create_queue(4).value();
    auto waiting = std::async(std::launch::async, [&] { return queue.poll(pagedllm::forever).value().size(); });
    EXPECT_EQ(waiting.wait_for(20ms), std::future_status::timeout);
    const std::string prompt = chat(france.question);
    engine.add(greedy(prompt), queue).value();
    engine.step().value();
    EXPECT_EQ(waiting.get(), 1u);
}

TEST(Queue, pauses_only_its_own_requests_if_it_is_full) {
    pagedllm::Engine engine = open_engine();
    const pagedllm::Queue slow = engine.create_queue(2).value();
    const std::string prompt = chat(france.question);
    engine.add(endless(prompt, 40), slow).value();
    std::vector<std::future<pagedllm::Result<pagedllm::Completion>>> fast;
    for (const Dialogue &dialogue : dialogues) {
        const std::string question = chat(dialogue.question);
        fast.push_back(engine.generate_async(greedy(question)));
    }
    for (size_t i = 0; i < fast.size(); i++) EXPECT_EQ(fast[i].get().value().text, dialogues[i].answer);
    EXPECT_TRUE(eventually([&] { return engine.stats().value().paused == 1; }));
    uint64_t tokens = 0;
    for (bool ended = false; !ended;) {
        const pagedllm::Outputs outputs = slow.poll(timeout_limit).value();
        ASSERT_FALSE(outputs.empty());
        EXPECT_LE(outputs.size(), 3u);  // the capacity and the outputs of the current step
        for (const pagedllm::Output &output : outputs) {
            tokens += output.tokens.size();
            EXPECT_EQ(output.generated_tokens, tokens);
            ended = output.is_last();
        }
    }
    EXPECT_EQ(tokens, 40u);
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
}

TEST(EventFd, is_readable_while_the_queue_is_not_empty) {
    pagedllm::Engine engine = host_stepped_engine();
    const pagedllm::Queue queue = engine.create_queue(64).value();
    const std::string prompt = chat(france.question);
    const int fd = queue.event_fd().value();
    EXPECT_EQ(queue.event_fd().value(), fd);
    EXPECT_FALSE(is_readable(fd));
    engine.add(greedy(prompt), queue).value();
    EXPECT_FALSE(is_readable(fd));
    engine.step().value();
    EXPECT_TRUE(is_readable(fd));
    EXPECT_EQ(queue.poll().value().size(), 1u);
    EXPECT_FALSE(is_readable(fd));
}

TEST(EventFd, wakes_poll_2_for_every_output) {
    pagedllm::Engine engine = open_engine();
    const pagedllm::Queue queue = engine.create_queue(2).value();
    const std::string prompt = chat(france.question);
    const int fd = queue.event_fd().value();
    engine.add(greedy(prompt), queue).value();
    std::string text;
    for (bool ended = false; !ended;) {
        ASSERT_TRUE(is_readable(fd, timeout_limit));
        for (const pagedllm::Output &output : queue.poll().value()) {
            text += output.text;
            ended = output.is_last();
        }
    }
    EXPECT_EQ(text, france.answer);
    EXPECT_FALSE(is_readable(fd));
}

TEST(Queue, returns_its_outputs_after_its_engine_is_freed_and_is_then_closed) {
    for (const bool started : {true, false}) {
        std::optional<pagedllm::Engine> engine = started ? open_engine() : host_stepped_engine();
        const pagedllm::Queue queue = engine->create_queue(2).value(), unused = engine->create_queue(2).value();
        const std::string prompt = chat(france.question);
        engine->add(endless(prompt), queue).value();
        if (started) ASSERT_TRUE(is_readable(queue.event_fd().value(), timeout_limit));
        else engine->step().value();
        engine.reset();
        EXPECT_TRUE(is_readable(queue.event_fd().value()));
        const pagedllm::Outputs outputs = queue.poll().value();
        ASSERT_GE(outputs.size(), 2u);
        EXPECT_EQ(outputs[0].tokens.size(), 1u);
        EXPECT_EQ(outputs[outputs.size() - 1].finish_reason, FinishReason::abort);
        EXPECT_EQ(outputs[outputs.size() - 1].error_code, Code::closed);
        for (int i = 0; i < 2; i++) EXPECT_TRUE(fails(Code::closed, queue.poll(pagedllm::forever)));
        EXPECT_TRUE(fails(Code::closed, unused.poll()));
        EXPECT_TRUE(is_readable(queue.event_fd().value()));
    }
}

TEST(Queue, aborts_only_its_own_requests_when_it_is_destroyed) {
    pagedllm::Engine engine = host_stepped_engine();
    const std::string prompt = chat(france.question);
    {
        const pagedllm::Queue queue = engine.create_queue(4).value();
        for (int i = 0; i < 3; i++) engine.add(endless(prompt), queue).value();
        engine.add(greedy(prompt)).value();
        EXPECT_EQ(engine.step().value().unfinished, 4u);
    }
    step_to_the_end(engine);
    EXPECT_EQ(engine.stats().value().finished_abort, 3u);
    EXPECT_EQ(read_to_the_end(engine.queue()).text, france.answer);
    EXPECT_TRUE(is_idle(engine));
}

TEST(Queue, leaks_nothing_if_many_threads_create_and_destroy_queues) {
    pagedllm::Engine engine = open_engine();
    std::vector<std::thread> clients;
    std::atomic<int> wrong{0};
    for (int i = 0; i < 8; i++) {
        clients.emplace_back([&, i] {
            const std::string prompt = chat(dialogues[0].question);
            for (int j = 0; j < 5; j++) {
                auto stream = engine.stream(endless(prompt, 50), 2);
                for (int outputs = 0; stream && outputs < i + j && stream->next(); outputs++) {
                }
                wrong += !stream || !stream->status();
            }
        });
    }
    for (std::thread &client : clients) client.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
    const pagedllm::Stats stats = engine.stats().value();
    EXPECT_EQ(stats.finished_abort + stats.finished_length, 8u * 5u);
}
