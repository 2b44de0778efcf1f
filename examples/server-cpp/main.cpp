// Serves models over HTTP with the API of OpenAI. docs/servers.md describes it.
//
// usage: server-cpp -model [NAME=]PATH [-model ...] [flags]
//
//     curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json'
//         -d '{"messages": [{"role": "user", "content": "What is 7 + 5?"}]}'
#include <sys/resource.h>

#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <iostream>

#include "flags.hpp"
#include "session.hpp"

namespace server {

namespace asio = boost::asio;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

// Accepts connections until a signal, and then ends the sessions.
class Listener {
public:
    Listener(asio::io_context &loop, Service &service, const Flags &flags)
        : loop_(loop), service_(service), acceptor_(loop, flags.address), signals_(loop, SIGINT, SIGTERM), timer_(loop) {
        service_.on_end = [this] {
            if (!waits_for_end_) return;
            waits_for_end_ = false;
            accept();
        };
        const tcp::endpoint local = acceptor_.local_endpoint();
        if (!local.address().is_loopback() && service.server.options().keys.empty()) {
            log_line("WARN", "the server has no API keys and is not limited to this machine; set -api-keys");
        }
        std::ostringstream url;
        url << "listening on http://" << local;
        log_line("INFO", url.str());
        signals_.async_wait([this](ErrorCode error, int) {
            if (!error) shut_down();
        });
        accept();
    }
    ~Listener() { service_.on_end = nullptr; }
    Listener(const Listener &) = delete;
    Listener &operator=(const Listener &) = delete;

private:
    void accept() {
        if (!acceptor_.is_open()) return;
        waits_for_end_ = service_.sessions.size() >= service_.server.options().max_connections;
        if (waits_for_end_) return;
        acceptor_.async_accept([this](ErrorCode error, tcp::socket socket) {
            if (!acceptor_.is_open()) return;
            if (!error) {
                std::make_shared<Session>(std::move(socket), service_)->start();
                return accept();
            }
            // Without descriptors, the next call would fail at once.
            log_line("WARN", "no connection was accepted", {{"error", error.message()}});
            accept_timer_.expires_after(std::chrono::milliseconds(100));
            accept_timer_.async_wait([this](ErrorCode cancelled) {
                if (!cancelled) accept();
            });
        });
    }

    void shut_down() {
        const Options &options = service_.server.options();
        log_line("INFO", "shutting down",
                 {{"drain", std::to_string(options.drain.count()) + "ms"}, {"grace", std::to_string(options.grace.count()) + "ms"}});
        signals_.clear();  // a second signal ends the process
        service_.server.drain();
        // Load balancers notice that /health fails, and choose another server.
        timer_.expires_after(options.drain);
        timer_.async_wait([this](ErrorCode error) {
            if (!error) stop_listening();
        });
    }

    void stop_listening() {
        service_.draining = true;
        ErrorCode ignored;
        acceptor_.close(ignored);
        for_each_session(&Session::drain);
        timer_.expires_after(service_.server.options().grace);
        timer_.async_wait([this](ErrorCode error) {
            if (!error) end_requests();
        });
        stop_when_idle();
    }

    void end_requests() {
        log_line("WARN", "ending the requests in progress");
        service_.ending = true;
        for_each_session(&Session::end);
        timer_.expires_after(service_.server.options().write_timeout);
        timer_.async_wait([this](ErrorCode error) {
            if (!error) loop_.stop();
        });
    }

    void stop_when_idle() {
        if (service_.sessions.empty()) return loop_.stop();
        idle_.expires_after(std::chrono::milliseconds(20));
        idle_.async_wait([this](ErrorCode) { stop_when_idle(); });
    }

    // A call can end sessions.
    void for_each_session(void (Session::*call)()) {
        std::vector<std::shared_ptr<Session>> all;
        for (Session *session : service_.sessions) all.push_back(session->shared_from_this());
        for (const std::shared_ptr<Session> &session : all) (session.get()->*call)();
    }

    asio::io_context &loop_;
    Service &service_;
    tcp::acceptor acceptor_;
    asio::signal_set signals_;
    asio::steady_timer timer_;
    asio::steady_timer idle_{loop_};
    asio::steady_timer accept_timer_{loop_};
    bool waits_for_end_ = false;  // the end of a session allows another connection
};

// The KV pools of all models share one budget.
static std::vector<std::unique_ptr<Model>> open_models(Flags &flags) {
    std::vector<std::unique_ptr<Model>> models;
    std::optional<pagedllm::Budget> budget;
    if (flags.engine.memory_fraction == 0) {
        budget = pagedllm::Budget::create(flags.kv_bytes).value();
        flags.engine.budget = &*budget;
    }
    for (const ModelFlag &model : flags.models) {
        flags.engine.model_path = model.path;
        flags.engine.model_name = model.name;
        pagedllm::Engine engine = pagedllm::Engine::create(flags.engine).value();
        const pagedllm::ModelInfo info = engine.model_info().value();
        log_line("INFO", "loaded", 
                 {{"model", model.name},
                  {"architecture", std::string(info.architecture)},
                  {"max_model_len", std::to_string(info.max_model_len)},
                  {"isa", std::string(info.isa)}});
        const uint64_t max_model_len = info.max_model_len;
        models.push_back(std::unique_ptr<Model>(new Model{model.name, flags.format_of(model.name), std::move(engine), max_model_len}));
    }
    return models;
}

// Each stream has two descriptors: its connection and the event of its queue.
static void allow_many_descriptors() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void run(Flags &flags) {
    allow_many_descriptors();
    std::signal(SIGPIPE, SIG_IGN);
    flags.server.local_hosts_only = flags.address.address().is_loopback() && flags.server.keys.empty();
    Server server(open_models(flags), flags.server);
    asio::thread_pool workers(flags.workers);
    Service service{server, workers, {}};
    asio::io_context loop(1);
    // The address is taken after the models are loaded, so that no client connects too early.
    Listener listener(loop, service, flags);
    loop.run();
    workers.join();
}

}  // namespace server

int main(int argc, char **argv) {
    std::optional<server::Flags> flags;
    try {
        flags = server::parse_flags(argc, argv);
        if (!flags) return 0;  // help
    } catch (const std::exception &error) {
        std::cerr << "server-cpp: " << error.what() << "\n";
        return 2;
    }
    try {
        server::run(*flags);
    } catch (const std::exception &error) {
        server::log_line("ERROR", error.what());
        return 1;
    }
}
