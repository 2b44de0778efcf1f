// Serves several requests from one epoll loop, each with its own queue. The engine steps in
// the background.
//
// usage: epoll MODEL_DIR
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <string>
#include <system_error>
#include <vector>

#include "pagedllm.hpp"

static const char *const questions[] = {"What is the capital of France?", "What is 7 + 5?", "What does a cow say?",
                                        "Count from 1 to 10.", "How do you say hello in Japanese?"};

// A client: its question, its queue and its answer so far.
struct Client {
    std::string question;
    pagedllm::Queue queue;
    std::string answer;
};

static Client ask(pagedllm::Engine &engine, const std::string &question) {
    Client client{question, engine.create_queue(8).value(), {}};
    const std::string prompt = engine.render_chat(R"([{"role": "user", "content": ")" + question + R"("}])").value();
    pagedllm::Request request{prompt};
    request.sampling.temperature = 0;
    request.add_special = false;  // the template has written the special tokens
    engine.add(request, client.queue).value();
    return client;
}

// Takes the available outputs without waiting. Returns true if the answer is complete.
static bool take_outputs(Client &client) {
    bool ended = false;
    for (const pagedllm::Output &output : client.queue.poll().value()) {
        client.answer += output.text;
        ended = output.is_last();
    }
    return ended;
}

static int checked(int result) {
    if (result < 0) throw std::system_error(errno, std::generic_category());
    return result;
}

struct Epoll {
    const int fd = checked(epoll_create1(EPOLL_CLOEXEC));
    ~Epoll() { close(fd); }
};

static void serve(std::vector<Client> &clients) {
    const Epoll epoll;
    for (size_t i = 0; i < clients.size(); i++) {
        epoll_event event = {};
        event.events = EPOLLIN;
        event.data.u64 = i;
        checked(epoll_ctl(epoll.fd, EPOLL_CTL_ADD, clients[i].queue.event_fd().value(), &event));
    }
    for (size_t open = clients.size(); open > 0;) {
        epoll_event events[4];
        const int ready = epoll_wait(epoll.fd, events, 4, -1);
        if (ready < 0 && errno == EINTR) continue;
        checked(ready);
        for (int i = 0; i < ready; i++) {
            Client &client = clients[events[i].data.u64];
            if (!take_outputs(client)) continue;
            checked(epoll_ctl(epoll.fd, EPOLL_CTL_DEL, client.queue.event_fd().value(), nullptr));
            open--;
        }
    }
}

static void run(const char *model) {
    pagedllm::Options options;
    options.model_path = model;
    auto engine = pagedllm::Engine::create(options).value();
    std::vector<Client> clients;
    for (const char *question : questions) clients.push_back(ask(engine, question));
    serve(clients);
    for (const Client &client : clients) std::cout << client.question << "\n    " << client.answer << "\n";
}

int main(int argc, char **argv) {
    try {
        run(argc > 1 ? argv[1] : "examples/model");
    } catch (const std::exception &error) {
        std::cerr << "error: " << error.what() << "\n";
        return 1;
    }
}
