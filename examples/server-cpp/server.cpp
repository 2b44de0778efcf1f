#include "server.hpp"

#include <boost/asio/ip/address.hpp>
#include <ctime>

#include "chat.hpp"
#include "completions.hpp"
#include "text.hpp"

namespace server {

Reply Reply::from_error(const ApiError &error) noexcept {
    Reply reply;
    reply.status = error.status;
    reply.error = error.what();
    reply.body = error_object(error) + "\n";
    if (error.retry_after.count() > 0) {
        reply.headers.emplace_back("Retry-After", std::to_string((error.retry_after.count() + 999) / 1000));
    }
    if (error.status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
    if (!error.allow.empty()) reply.headers.emplace_back("Allow", error.allow);
    return reply;
}

Slot::Slot(Server &server, uint64_t bytes) : server_(server), bytes_(bytes) {
    server_.requests_++;
    server_.bodies_ += bytes_;
}

Slot::~Slot() {
    server_.requests_--;
    server_.bodies_ -= bytes_;
}

Server::Server(std::vector<std::unique_ptr<Model>> models, Options options)
    : models_(std::move(models)),
      options_(std::move(options)),
      endpoints_{
          {"/health", "GET", false, false, true, &Server::health},
          {"/metrics", "GET", true, false, false, &Server::metrics},
          {"/v1/models", "GET", true, false, true, &Server::list_models},
          {"/v1/models/{name}", "GET", true, false, true, &Server::get_model},
          {"/v1/completions", "POST", true, true, false, &Server::completions},
          {"/v1/chat/completions", "POST", true, true, false, &Server::chat},
          {"/tokenize", "POST", true, true, false, &Server::tokenize},
          {"/detokenize", "POST", true, true, false, &Server::detokenize},
      },
      created_(std::time(nullptr)) {}

static constexpr std::string_view models_prefix = "/v1/models/";

const Endpoint *Server::find(const std::string &path) const {
    const bool is_model = path.size() > models_prefix.size() && path.compare(0, models_prefix.size(), models_prefix) == 0;
    for (const Endpoint &endpoint : endpoints_) {
        if (endpoint.path == path || (is_model && endpoint.path == "/v1/models/{name}")) return &endpoint;
    }
    return nullptr;
}

// Compares in a time that depends only on the length of the given text.
static bool equal_in_constant_time(std::string_view given, std::string_view key) {
    unsigned difference = given.size() == key.size() ? 0 : 1;
    for (size_t i = 0; i < given.size(); i++) {
        difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned>(static_cast<unsigned char>(key[i % key.size()]));
    }
    return difference == 0;
}

static void make_lower(std::string &text) {
    for (char &c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

// OpenAI sends the key as a bearer token, and Anthropic in x-api-key.
static std::string_view key_of(const HttpRequest &request) {
    const std::string_view header = request.authorization;
    const size_t space = header.find(' ');
    std::string scheme(header.substr(0, std::min(space, header.size())));
    make_lower(scheme);
    if (scheme != "bearer") return request.api_key;
    const size_t begin = header.find_first_not_of(' ', std::min(space, header.size()));
    return begin == std::string_view::npos ? std::string_view() : header.substr(begin);
}

// Returns whether a Host header names this machine. Clients of HTTP/1.0 send none.
static bool is_local_host(std::string host) {
    if (!host.empty() && host.front() == '[') {
        host = host.substr(1, host.find(']') - 1);  // IPv6
    } else {
        host = host.substr(0, host.find(':'));
    }
    make_lower(host);
    if (host.empty() || host == "localhost") return true;
    boost::system::error_code error;
    const auto address = boost::asio::ip::make_address(host, error);
    return !error && address.is_loopback();
}

void Server::check(const Endpoint *endpoint, const HttpRequest &request) const {
    if (options_.local_hosts_only && !is_local_host(request.host)) {
        throw ApiError(403, "the Host header is \"" + request.host + "\"; send localhost, or set API keys");
    }
    if (!endpoint) throw ApiError(404, "no endpoint has the path \"" + request.path + "\"");
    if (request.method != endpoint->method && !(endpoint->method == "GET" && request.method == "HEAD")) {
        ApiError error(405, "the method is " + request.method + "; send " + endpoint->method);
        error.allow = endpoint->method;
        throw error;
    }
    if (!endpoint->needs_key || options_.keys.empty()) return;
    const std::string_view given = key_of(request);
    bool is_valid = false;
    for (const std::string &key : options_.keys) is_valid |= equal_in_constant_time(given, key);
    if (is_valid) return;
    ApiError error(401, given.empty() ? "the request has no API key; send it as bearer token or in x-api-key" : "the API key is not valid");
    error.code = given.empty() ? "missing_api_key" : "invalid_api_key";
    throw error;
}

std::unique_ptr<Slot> Server::take_slot(uint64_t body_bytes) {
    if (requests_ >= options_.max_requests) {
        throw try_later(429, "too many requests are in progress (limit " + std::to_string(options_.max_requests) + "); try again later");
    }
    if (bodies_ + body_bytes > options_.max_bodies) {
        throw try_later(429, "the requests in progress are too large together (limit " + std::to_string(options_.max_bodies) +
                                " bytes); try again later");
    }
    return std::make_unique<Slot>(*this, body_bytes);
}

Reply Server::answer(const Endpoint &endpoint, const HttpRequest &request) noexcept {
    try {
        return (this->*endpoint.answer)(request);
    } catch (...) {
        return Reply::from_error(current_api_error());
    }
}

// A browser sends JSON to another origin only if that origin allows it, so that pages of other
// origins cannot use a server on the loopback interface.
static rapidjson::Document parse_body(const HttpRequest &request) {
    std::string type = request.content_type.substr(0, request.content_type.find_first_of("; \t"));
    make_lower(type);
    if (type != "application/json") throw ApiError(415, "content type is \"" + request.content_type + "\"; send application/json");
    return parse_json(request.body);
}

// A client may leave the name out if there is only one model.
Model &Server::find_model(const std::string &name) {
    for (const std::unique_ptr<Model> &model : models_) {
        if (model->name == name || (name.empty() && models_.size() == 1)) return *model;
    }
    ApiError error(404, "there is no model \"" + name + "\"; /v1/models lists the models");
    error.code = "model_not_found";
    error.param = "model";
    throw error;
}

Reply Server::completions(const HttpRequest &request) {
    const rapidjson::Document body = parse_body(request);
    Reply reply;
    reply.generation = start_completion(body, [this](const std::string &name) -> Model & { return find_model(name); }, options_.limits);
    return reply;
}

Reply Server::chat(const HttpRequest &request) {
    const rapidjson::Document body = parse_body(request);
    Reply reply;
    reply.generation = start_chat(body, [this](const std::string &name) -> Model & { return find_model(name); }, options_.limits);
    return reply;
}

Reply Server::tokenize(const HttpRequest &request) {
    Reply reply;
    reply.body = answer_tokenize(parse_body(request), [this](const std::string &name) -> Model & { return find_model(name); });
    return reply;
}

Reply Server::detokenize(const HttpRequest &request) {
    Reply reply;
    reply.body = answer_detokenize(parse_body(request), [this](const std::string &name) -> Model & { return find_model(name); });
    return reply;
}

Reply Server::health(const HttpRequest &) {
    if (draining_) throw ApiError(503, "the server shuts down");
    for (const std::unique_ptr<Model> &model : models_) {
        if (const pagedllm::Status status = model->engine.health(); !status.ok()) {
            throw ApiError(503, "model \"" + model->name + "\": " + status.error().message);
        }
    }
    Reply reply;
    reply.body = "{\"status\":\"ok\"}\n";
    return reply;
}

void Server::describe(const Model &model, JsonWriter &json) const {
    json.begin_object().member("id", model.name).member("object", "model").member("created", created_);
    json.member("owned_by", "pagedllm").member("max_model_len", model.max_model_len).end_object();
}

Reply Server::list_models(const HttpRequest &) {
    Reply reply;
    JsonWriter json(reply.body);
    json.begin_object().member("object", "list").key("data").begin_array();
    for (const std::unique_ptr<Model> &model : models_) describe(*model, json);
    json.end_array().end_object();
    return reply;
}

Reply Server::get_model(const HttpRequest &request) {
    Reply reply;
    JsonWriter json(reply.body);
    describe(find_model(request.path.substr(models_prefix.size())), json);
    return reply;
}

}  // namespace server
