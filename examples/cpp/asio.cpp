// Serves several requests from one Asio loop, each with its own queue. The engine steps in the
// background.
//
// usage: asio MODEL_DIR      (standalone Asio: compile with -DASIO_STANDALONE)
#include <unistd.h>

#include <asio.hpp>
#include <cerrno>
#include <iostream>
#include <list>
#include <string>
#include <system_error>

#include "pagedllm.hpp"

static const char *const questions[] = {"What is the capital of France?", "What is 7 + 5?", "What does a cow say?",
                                        "Count from 1 to 10.", "How do you say hello in Japanese?"};

// Returns a duplicate of the queue's descriptor. Asio closes the descriptor it gets, and the queue
// owns the original.
static int duplicate(int fd) {
    const int ours = dup(fd);
    if (ours < 0) throw std::system_error(errno, std::generic_category());
    return ours;
}

// A client: its question, its queue and its answer so far. Its handlers keep its address, so it
// must not move while the loop runs.
class Client {
public:
    Client(asio::io_context &loop, pagedllm::Engine &engine, const std::string &question)
        : question_(question), queue_(engine.create_queue(8).value()), ready_(loop, duplicate(queue_.event_fd().value())) {
        const std::string prompt = engine.render_chat(R"([{"role": "user", "content": ")" + question + R"("}])").value();
        pagedllm::Request request{prompt};
        request.sampling.temperature = 0;
        request.add_special = false;  // the template has written the special tokens
        engine.add(request, queue_).value();
        wait();
    }

    friend std::ostream &operator<<(std::ostream &out, const Client &client) {
        return out << client.question_ << "\n    " << client.answer_ << "\n";
    }

private:
    void wait() {
        ready_.async_wait(asio::posix::stream_descriptor::wait_read, [this](const std::error_code &error) {
            if (error) throw std::system_error(error);
            if (!take_outputs()) wait();
        });
    }

    // Takes the available outputs without waiting. Returns true if the answer is complete.
    bool take_outputs() {
        bool ended = false;
        for (const pagedllm::Output &output : queue_.poll().value()) {
            answer_ += output.text;
            ended = output.is_last();
        }
        return ended;
    }

    std::string question_;
    pagedllm::Queue queue_;
    asio::posix::stream_descriptor ready_;
    std::string answer_;
};

static void run(const char *model) {
    pagedllm::Options options;
    options.model_path = model;
    auto engine = pagedllm::Engine::create(options).value();
    asio::io_context loop;
    std::list<Client> clients;
    for (const char *question : questions) clients.emplace_back(loop, engine, question);
    loop.run();
    for (const Client &client : clients) std::cout << client;
}

int main(int argc, char **argv) {
    try {
        run(argc > 1 ? argv[1] : "examples/model");
    } catch (const std::exception &error) {
        std::cerr << "error: " << error.what() << "\n";
        return 1;
    }
}
