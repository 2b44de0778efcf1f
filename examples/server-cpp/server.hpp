// The endpoints, and what all of them share. HTTP itself is in session.hpp.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "generation.hpp"

namespace server {

struct Options {
    // Accepted API keys. Empty: every client is accepted.
    std::vector<std::string> keys;
    // Refuses requests whose Host header does not name this machine. Otherwise, a page of another
    // site could use a server without keys by DNS rebinding.
    bool local_hosts_only = false;
    // Maximum number of open connections. Further clients wait in the queue of the kernel.
    size_t max_connections = 4096;
    // Maximum length of a body, and of the bodies of all requests in progress, in bytes.
    uint64_t max_body = 8 << 20;
    uint64_t max_bodies = 256 << 20;
    // Maximum number of requests in progress.
    int64_t max_requests = 2048;
    // Times within which headers and bodies must arrive, and within which a client must take each
    // part of its answer.
    std::chrono::milliseconds header_timeout{10'000}, read_timeout{30'000}, write_timeout{30'000};
    // Time after which an idle connection is closed.
    std::chrono::milliseconds idle_timeout{120'000};
    // Time after which a silent stream has a comment, so that proxies do not close the connection.
    std::chrono::milliseconds keep_alive{15'000};
    // Time for which /health fails before the server accepts no more connections.
    std::chrono::milliseconds drain{5'000};
    // Time for the requests in progress when the server shuts down.
    std::chrono::milliseconds grace{30'000};
    Limits limits;
};

struct HttpRequest {
    std::string method, path;  // the path without its query, decoded
    std::string host, content_type, authorization, api_key;
    std::string body;
};

// An answer: either a body, or a generation that makes it.
struct Reply {
    unsigned status = 200;
    std::string body;
    std::string content_type = "application/json";
    std::vector<std::pair<std::string, std::string>> headers = {};
    std::unique_ptr<Generation> generation = nullptr;
    std::string error = {};  // for the log

    static Reply from_error(const ApiError &error) noexcept;
};

class Server;

struct Endpoint {
    std::string path;
    std::string method;
    bool needs_key;
    // True if the requests count against max_requests and max_bodies.
    bool is_limited;
    // True if the thread of the event loop answers, so that no other request delays the answer.
    bool is_quick;
    Reply (Server::*answer)(const HttpRequest &request);
};

// The share of a request in the limits of the server, which its destruction gives back.
class Slot {
public:
    Slot(Server &server, uint64_t bytes);
    ~Slot();
    Slot(const Slot &) = delete;
    Slot &operator=(const Slot &) = delete;

private:
    Server &server_;
    const uint64_t bytes_;
};

// Any thread may call any function.
class Server {
public:
    Server(std::vector<std::unique_ptr<Model>> models, Options options);

    [[nodiscard]] const Options &options() const { return options_; }

    // Makes /health fail, so that load balancers send no more requests.
    void drain() { draining_ = true; }

    // Returns the endpoint of a request, or nullptr if there is none.
    [[nodiscard]] const Endpoint *find(const std::string &path) const;
    // Throws ApiError unless the method and the key are right. It does not need the body.
    void check(const Endpoint *endpoint, const HttpRequest &request) const;
    // Takes a slot, or throws ApiError if too many or too large requests are in progress.
    std::unique_ptr<Slot> take_slot(uint64_t body_bytes);
    // Answers a request. It can take long: it parses, tokenizes and compiles grammars.
    Reply answer(const Endpoint &endpoint, const HttpRequest &request) noexcept;

    // Counts a request for the metrics.
    void count(const Endpoint *endpoint, unsigned status);
    void add_connections(int number) { connections_ += number; }

private:
    friend class Slot;

    Model &find_model(const std::string &name);
    Reply health(const HttpRequest &request);
    Reply metrics(const HttpRequest &request);
    Reply list_models(const HttpRequest &request);
    Reply get_model(const HttpRequest &request);
    Reply completions(const HttpRequest &request);
    Reply chat(const HttpRequest &request);
    Reply tokenize(const HttpRequest &request);
    Reply detokenize(const HttpRequest &request);
    void describe(const Model &model, JsonWriter &json) const;
    std::string http_metrics();

    const std::vector<std::unique_ptr<Model>> models_;
    const Options options_;
    const std::vector<Endpoint> endpoints_;
    const int64_t created_;
    std::atomic<bool> draining_{false};
    std::atomic<int64_t> requests_{0};
    std::atomic<int64_t> connections_{0};
    std::atomic<uint64_t> bodies_{0};
    std::mutex mutex_;
    std::map<std::pair<std::string, unsigned>, uint64_t> counts_;  // by path and status
};

}  // namespace server
