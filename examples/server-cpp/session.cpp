#include "session.hpp"

#include <boost/asio/buffers_iterator.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <charconv>
#include <limits>
#include <sstream>

namespace server {

namespace asio = boost::asio;
namespace http = boost::beast::http;

static constexpr uint32_t max_header = 32 << 10;
// Bytes of further requests that are read while a request is in progress.
static constexpr size_t max_pipelined = 64 << 10;
// Maximum length of a body that no endpoint uses, in bytes.
static constexpr uint64_t max_unused_body = 4 << 10;

Session::Session(asio::ip::tcp::socket socket, Service &service)
    : socket_(std::move(socket)), service_(service), timer_(socket_.get_executor()), buffer_(max_pipelined) {
    service_.sessions.insert(this);
    service_.server.add_connections(1);
    ErrorCode ignored;
    socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
}

Session::~Session() {
    release_generation();
    service_.sessions.erase(this);
    service_.server.add_connections(-1);
    if (service_.on_end) service_.on_end();
}

template <class Call>
void Session::guard(Call call) {
    if (closed_) return;
    try {
        call();
    } catch (const std::exception &error) {
        log_line("ERROR", "a connection has failed", {{"error", error.what()}});
        close();
    }
}

template <class Call>
auto Session::handler(Call call) {
    return [self = shared_from_this(), call = std::move(call)](auto... arguments) mutable { self->guard([&] { call(arguments...); }); };
}

// If the client hangs up, on_reply is not called, and a generation in the reply ends with the
// exchange.
template <class Work>
void Session::run_on_worker(Work work) {
    set_state(State::computing, std::chrono::milliseconds(0));
    asio::post(service_.workers, [self = shared_from_this(), exchange = exchange_, loop = socket_.get_executor(), work]() mutable {
        exchange->reply = work(*exchange);
        // The session is moved, because it must end on the thread of the loop.
        asio::post(loop, [self = std::move(self), exchange = std::move(exchange)] {
            self->guard([&] { self->on_reply(std::move(exchange->reply)); });
        });
    });
}

// ---- reading ------------------------------------------------------------------------------------

// A client connects to send a request. Only between requests, a connection may be idle for longer.
void Session::start() {
    next_request();
    if (state_ == State::idle) set_state(State::idle, service_.server.options().header_timeout);
}

void Session::next_request() {
    exchange_.reset();
    parser_.reset();
    response_.reset();
    if (!keep_alive_ || service_.draining) return linger();
    set_state(State::idle, service_.server.options().idle_timeout);
    if (!reading_) return buffer_.size() > 0 ? read_header() : watch_client();
    if (buffer_.size() > 0) socket_.cancel();  // the next request has arrived; on_client reads it
}

// Reads while no header or body is read: the first bytes of the next request, or the end of the
// connection, which aborts the request in progress.
void Session::watch_client() {
    if (buffer_.size() >= max_pipelined) return;  // of a client that sends requests without an end
    reading_ = true;
    const size_t size = std::min<size_t>(4096, max_pipelined - buffer_.size());
    socket_.async_read_some(buffer_.prepare(size), handler([this](ErrorCode error, size_t bytes) { on_client(error, bytes); }));
}

void Session::on_client(ErrorCode error, size_t bytes) {
    reading_ = false;
    if (error && error != asio::error::operation_aborted) return close();
    buffer_.commit(bytes);
    switch (state_) {
        case State::idle: return read_header();
        case State::lingering: return linger();
        default: watch_client();
    }
}

void Session::read_header() {
    set_state(State::header, service_.server.options().header_timeout);
    parser_.emplace();
    parser_->header_limit(max_header);
    parser_->body_limit(std::numeric_limits<uint64_t>::max());  // read_body checks it
    http::async_read_header(socket_, buffer_, *parser_, handler([this](ErrorCode error, size_t) { on_header(error); }));
}

// Decodes %XX.
static std::string decoded(std::string_view text) {
    std::string result;
    for (size_t i = 0; i < text.size(); i++) {
        unsigned byte = 0;
        const char *begin = text.data() + i + 1;
        if (text[i] == '%' && i + 2 < text.size() && std::from_chars(begin, begin + 2, byte, 16).ptr == begin + 2) {
            result += static_cast<char>(byte);
            i += 2;
        } else {
            result += text[i];
        }
    }
    return result;
}

static std::string_view to_std(boost::beast::string_view text) { return {text.data(), text.size()}; }

// True if the bytes of the client are not HTTP, or exceed a limit.
static bool is_malformed(const boost::system::error_code &error) {
    return error.category() == http::make_error_code(http::error::bad_method).category() && error != http::error::end_of_stream &&
           error != http::error::partial_message;
}

void Session::on_header(ErrorCode error) {
    if (error && !is_malformed(error)) return close();
    exchange_ = std::make_shared<Exchange>();
    Exchange &exchange = *exchange_;
    const auto &head = parser_->get();
    exchange.request.method = head.method_string().to_string();
    const std::string_view target = to_std(head.target());
    exchange.request.path = decoded(target.substr(0, target.find('?')));
    exchange.request.host = head[http::field::host].to_string();
    exchange.request.content_type = head[http::field::content_type].to_string();
    exchange.request.authorization = head[http::field::authorization].to_string();
    exchange.request.api_key = head["X-Api-Key"].to_string();
    exchange.trace = TraceContext::from_header(to_std(head["traceparent"]));
    exchange.head_only = head.method() == http::verb::head;
    exchange.is_http_10 = head.version() < 11;
    exchange.endpoint = service_.server.find(exchange.request.path);
    keep_alive_ = !error && head.keep_alive();
    try {
        if (error) {
            const bool is_long = error == http::error::header_limit || error == http::error::buffer_overflow;
            throw ApiError(is_long ? 431 : 400, "the request is not HTTP (" + error.message() + ")");
        }
        service_.server.check(exchange.endpoint, exchange.request);
        const auto length = parser_->content_length();
        // A body of unknown length, or one that is refused by read_body, counts as the longest.
        const uint64_t bytes = length ? std::min<uint64_t>(*length, body_limit()) : parser_->chunked() ? body_limit() : 0;
        if (exchange.endpoint->is_limited) exchange.slot = service_.server.take_slot(bytes);
        read_body();
    } catch (const ApiError &refusal) {
        if (!parser_->is_done()) keep_alive_ = false;  // the body is not read
        refuse(refusal);
    }
}

static ApiError too_large(uint64_t limit) {
    return ApiError(413, "the body is too large (limit " + std::to_string(limit) + " bytes); send a shorter request");
}

// Endpoints that need no body may have no key, and their bodies do not count against max_bodies.
uint64_t Session::body_limit() const {
    return exchange_->endpoint->is_limited ? service_.server.options().max_body : max_unused_body;
}

void Session::read_body() {
    const auto length = parser_->content_length();
    if (length && *length > body_limit()) throw too_large(body_limit());
    parser_->body_limit(body_limit());
    set_state(State::body, service_.server.options().read_timeout);
    const auto read = [this] {
        http::async_read(socket_, buffer_, *parser_, handler([this](ErrorCode error, size_t) { on_body(error); }));
    };
    if (parser_->is_done() || !boost::beast::iequals(parser_->get()[http::field::expect], "100-continue")) return read();
    static constexpr std::string_view answer = "HTTP/1.1 100 Continue\r\n\r\n";
    asio::async_write(socket_, asio::buffer(answer), handler([this, read](ErrorCode error, size_t) { error ? close() : read(); }));
}

void Session::on_body(ErrorCode error) {
    if (error) keep_alive_ = false;
    if (error == asio::error::operation_aborted) {  // by on_deadline
        const std::string limit = std::to_string(service_.server.options().read_timeout.count());
        return refuse(ApiError(408, "the body did not arrive in time (limit " + limit + " ms); send it at once"));
    }
    if (error == http::error::body_limit) return refuse(too_large(body_limit()));
    if (error && is_malformed(error)) return refuse(bad_request("", "the body cannot be read (" + error.message() + ")"));
    if (error) return close();
    exchange_->request.body = std::move(parser_->get().body());
    watch_client();
    if (exchange_->endpoint->is_quick) return write_reply(service_.server.answer(*exchange_->endpoint, exchange_->request));
    run_on_worker([&server = service_.server](Exchange &exchange) {
        Reply reply = server.answer(*exchange.endpoint, exchange.request);
        exchange.request.body = std::string();
        return reply;
    });
}

// ---- answering ----------------------------------------------------------------------------------

void Session::on_reply(Reply reply) {
    if (service_.ending) return refuse(ApiError(503, "the server shuts down"));
    if (!reply.generation) return write_reply(std::move(reply));
    generation_ = std::move(reply.generation);
    outputs_.emplace(socket_.get_executor(), generation_->event_fd());
    if (generation_->streams()) return begin_stream();
    set_state(State::waiting, std::chrono::milliseconds(0));
    wait_for_outputs();
}

void Session::wait_for_outputs() {
    if (waiting_for_outputs_) return;
    waiting_for_outputs_ = true;
    outputs_->async_wait(asio::posix::stream_descriptor::wait_read, handler([this](ErrorCode error) {
                             waiting_for_outputs_ = false;
                             // While a comment is being written, the outputs wait for after_events.
                             if (!error && state_ == State::waiting) on_outputs();
                         }));
}

void Session::on_outputs() {
    try {
        generation_->take(text_);
    } catch (...) {
        const ApiError error = current_api_error();
        return generation_->streams() ? fail_stream(error) : refuse(error);
    }
    if (!text_.empty()) return write_events();
    if (!generation_->ended()) return wait_for_outputs();
    // The answer can be large.
    run_on_worker([generation = generation_](Exchange &) {
        Reply reply;
        try {
            reply.body = generation->answer();
        } catch (...) {
            reply = Reply::from_error(current_api_error());
        }
        return reply;
    });
}

// Begins a stream of Server-Sent Events. From now on, errors are events.
void Session::begin_stream() {
    http::response<http::empty_body> head(http::status::ok, exchange_->is_http_10 ? 10 : 11);
    head.set(http::field::content_type, "text/event-stream");
    head.set(http::field::cache_control, "no-cache");
    head.set("X-Accel-Buffering", "no");  // nginx would collect the events
    head.set("traceresponse", exchange_->trace.header());
    if (exchange_->is_http_10) keep_alive_ = false;  // the end of the connection ends the stream
    head.keep_alive(keep_alive_);
    if (!exchange_->is_http_10) head.chunked(true);
    std::ostringstream text;
    text << head.base();
    exchange_->logged_status = 200;
    auto header = std::make_shared<std::string>(text.str());
    set_state(State::writing, service_.server.options().write_timeout);
    asio::async_write(socket_, asio::buffer(*header), handler([this, header](ErrorCode error, size_t) {
                          if (error) return close();
                          generation_->begin(text_);
                          text_.empty() ? after_events() : write_events();
                      }));
}

// Writes the events in text_. Outputs that come meanwhile are one write later: a client may be as
// slow as its own answer.
void Session::write_events() {
    set_state(State::writing, service_.server.options().write_timeout);
    auto done = handler([this](ErrorCode error, size_t) {
        if (error) return close();
        text_.clear();
        after_events();
    });
    if (exchange_->is_http_10) {
        asio::async_write(socket_, asio::buffer(text_), std::move(done));
    } else {
        asio::async_write(socket_, http::make_chunk(asio::buffer(text_)), std::move(done));
    }
}

void Session::after_events() {
    if (!exchange_->failed && !generation_->ended()) {
        if (service_.ending) return fail_stream(ApiError(503, "the server shuts down"));
        set_state(State::waiting, service_.server.options().keep_alive);
        return wait_for_outputs();
    }
    if (exchange_->is_http_10) return finish_exchange();
    asio::async_write(socket_, http::make_chunk_last(), handler([this](ErrorCode error, size_t) { error ? close() : finish_exchange(); }));
}

void Session::refuse(const ApiError &error) { write_reply(Reply::from_error(error)); }

// Ends a stream with an error.
void Session::fail_stream(const ApiError &error) {
    exchange_->failed = true;
    exchange_->error = error.what();
    text_ += "data: " + error_object(error) + "\n\n";
    write_events();
}

void Session::write_reply(Reply reply) {
    exchange_->error = reply.error;
    exchange_->logged_status = reply.status;
    response_.emplace(static_cast<http::status>(reply.status), exchange_->is_http_10 ? 10 : 11);
    response_->set(http::field::content_type, reply.content_type);
    response_->set("traceresponse", exchange_->trace.header());
    for (const auto &[name, value] : reply.headers) response_->set(name, value);
    response_->content_length(reply.body.size());
    response_->keep_alive(keep_alive_ && !service_.draining);
    if (!exchange_->head_only) response_->body() = std::move(reply.body);
    set_state(State::writing, service_.server.options().write_timeout);
    http::async_write(socket_, *response_, handler([this](ErrorCode error, size_t) { error ? close() : finish_exchange(); }));
}

// ---- ending -------------------------------------------------------------------------------------

void Session::finish_exchange() {
    report();
    release_generation();
    next_request();
}

// Aborts the requests of the generation that have not ended. Its queue owns the descriptor.
void Session::release_generation() {
    if (outputs_) outputs_->release();
    outputs_.reset();
    generation_.reset();
}

// If the connection were closed while the client is sending, the client might not receive the
// answer.
void Session::linger() {
    if (state_ != State::lingering) {
        ErrorCode ignored;
        socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
        set_state(State::lingering, std::chrono::seconds(1));
    }
    buffer_.clear();
    if (!reading_) watch_client();
}

void Session::close() {
    if (closed_) return;
    closed_ = true;
    if (exchange_) report();
    release_generation();
    timer_.cancel();
    ErrorCode ignored;
    socket_.close(ignored);
}

void Session::drain() {
    if (state_ == State::idle) close();
}

void Session::end() {
    if (state_ != State::waiting) return;  // on_reply or after_events ends it
    const ApiError error(503, "the server shuts down");
    generation_->streams() ? fail_stream(error) : refuse(error);
}

// Writes the line of a request to the log, and counts the request.
void Session::report() {
    const Exchange &exchange = *exchange_;
    service_.server.count(exchange.endpoint, exchange.logged_status);
    // Probes such as /health come every few seconds.
    const bool is_frequent = exchange.endpoint && !exchange.endpoint->is_limited && exchange.logged_status == 200;
    if (is_frequent) return;
    const auto milliseconds = [](auto time) {
        return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) + "ms";
    };
    const Usage usage = generation_ ? generation_->usage() : Usage();
    log_line(exchange.logged_status >= 500 ? "ERROR" : "INFO", "request",
             {{"method", exchange.request.method},
              {"path", exchange.request.path},
              {"status", std::to_string(exchange.logged_status)},
              {"duration", milliseconds(Clock::now() - exchange.begin)},
              {"trace_id", exchange.trace.trace_id},
              {"span_id", exchange.trace.span_id},
              {"model", generation_ ? generation_->model() : std::string()},
              {"prompt_tokens", std::to_string(usage.prompt_tokens)},
              {"completion_tokens", std::to_string(usage.completion_tokens)},
              {"first_token", milliseconds(generation_ ? generation_->first_token() : pagedllm::Seconds(0))},
              {"error", exchange.error}});
}

// ---- deadlines ----------------------------------------------------------------------------------

// Sets the state and its time limit. 0: none. The timer is not moved for a later deadline, because
// that would take time for each token: when it fires too early, it is armed again.
void Session::set_state(State state, std::chrono::milliseconds limit) {
    state_ = state;
    deadline_ = limit.count() > 0 ? Clock::now() + limit : Clock::time_point::max();
    if (deadline_ < armed_until_) arm_timer();
}

void Session::arm_timer() {
    armed_until_ = deadline_;
    timer_.expires_at(deadline_);
    timer_.async_wait(handler([this](ErrorCode error) {
        if (error) return;  // the timer was armed for an earlier time
        armed_until_ = Clock::time_point::max();
        if (Clock::now() >= deadline_) {
            on_deadline();
        } else if (deadline_ != Clock::time_point::max()) {
            arm_timer();
        }
    }));
}

void Session::on_deadline() {
    switch (state_) {
        case State::waiting:  // of a stream
            text_ = ": waiting\n\n";
            return write_events();
        case State::body: return static_cast<void>(socket_.cancel());  // on_body refuses the request
        default:
            if (state_ == State::writing && exchange_) exchange_->error = "the client did not read in time";
            return close();
    }
}

}  // namespace server
