// A connection: reads requests, and writes answers and streams, on the thread of the event loop.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "server.hpp"
#include "trace.hpp"

namespace server {

class Session;

// What all sessions share. `workers` parse, tokenize and format, so that a large request delays no
// other.
struct Service {
    Server &server;
    boost::asio::thread_pool &workers;
    std::set<Session *> sessions;
    std::function<void()> on_end = nullptr;  // called after the end of a session
    bool draining = false;  // no further request on a connection
    bool ending = false;    // no further output
};

// A session is in one state at a time, and its handlers run one at a time. It lives as long as a
// handler is pending.
class Session : public std::enable_shared_from_this<Session> {
public:
    Session(boost::asio::ip::tcp::socket socket, Service &service);
    ~Session();

    void start();
    // Closes the connection after its current request.
    void drain();
    // Ends the current request with an error.
    void end();

private:
    using Clock = std::chrono::steady_clock;
    using ErrorCode = boost::system::error_code;
    enum class State {
        idle,       // waits for the first byte of a request
        header,     // reads a header
        body,       // reads a body
        computing,  // a worker uses the request or the generation
        waiting,    // waits for outputs of the engine
        writing,    // writes an answer or a part of it
        lingering,  // discards what the client still sends, so that it can read the answer
    };
    // A request and what the log reports about it.
    struct Exchange {
        HttpRequest request;
        const Endpoint *endpoint = nullptr;
        std::unique_ptr<Slot> slot;
        TraceContext trace;
        Clock::time_point begin = Clock::now();
        bool head_only = false;  // HEAD: the answer has no body
        bool is_http_10 = false;
        Reply reply;        // of a worker
        std::string error;  // for the log
        unsigned logged_status = 499;  // the client has closed the connection
        bool failed = false;           // the stream has ended with an error
    };

    // Calls `call` unless the connection is closed, and closes it if `call` throws.
    template <class Call>
    void guard(Call call);
    // Returns a handler for the event loop that keeps the session alive and guards `call`.
    template <class Call>
    auto handler(Call call);
    // Makes the reply of the exchange on a worker thread, and passes it to on_reply.
    template <class Work>
    void run_on_worker(Work work);

    // Reading.
    void next_request();
    void read_header();
    void on_header(ErrorCode error);
    void read_body();
    [[nodiscard]] uint64_t body_limit() const;
    void on_body(ErrorCode error);
    void watch_client();
    void on_client(ErrorCode error, size_t bytes);

    // Answering.
    void on_reply(Reply reply);
    void wait_for_outputs();
    void on_outputs();
    void begin_stream();
    void write_events();
    void after_events();
    void refuse(const ApiError &error);
    void fail_stream(const ApiError &error);
    void write_reply(Reply reply);

    // Ending.
    void finish_exchange();
    void release_generation();
    void linger();
    void close();
    void report();

    // Deadlines.
    void set_state(State state, std::chrono::milliseconds limit);
    void arm_timer();
    void on_deadline();

    boost::asio::ip::tcp::socket socket_;
    Service &service_;
    boost::asio::steady_timer timer_;
    Clock::time_point deadline_ = Clock::time_point::max();
    Clock::time_point armed_until_ = Clock::time_point::max();
    State state_ = State::idle;
    bool closed_ = false;
    bool keep_alive_ = true;
    bool reading_ = false;              // watch_client reads
    bool waiting_for_outputs_ = false;  // wait_for_outputs waits
    boost::beast::flat_buffer buffer_;
    std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
    std::optional<boost::beast::http::response<boost::beast::http::string_body>> response_;
    std::shared_ptr<Exchange> exchange_;
    std::shared_ptr<Generation> generation_;
    std::optional<boost::asio::posix::stream_descriptor> outputs_;
    std::string text_;  // that is being written
};

}  // namespace server
