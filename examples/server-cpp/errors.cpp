#include "errors.hpp"

#include <new>

#include "../shared/utf8.hpp"
#include "json.hpp"

namespace server {

using pagedllm::Code;

// Removes the middle of a long text. The beginning of a message is the problem, and the end is the
// remedy.
static std::string shorten(std::string_view text) {
    constexpr size_t head = 600, tail = 200;
    if (text.size() <= head + tail) return utf8::repaired(text);
    const auto is_inner = [&](size_t i) { return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
    size_t end = head;
    size_t begin = text.size() - tail;
    // A character has at most three inner bytes.
    for (int i = 0; i < 3 && is_inner(end); i++) end--;
    for (int i = 0; i < 3 && is_inner(begin); i++) begin++;
    return utf8::repaired(text.substr(0, end)) + " ... " + utf8::repaired(text.substr(begin));
}

ApiError::ApiError(unsigned status_code, const std::string &message) : std::runtime_error(shorten(message)), status(status_code) {}

ApiError bad_request(const std::string &param, const std::string &message) {
    ApiError error(400, message);
    error.param = shorten(param);
    return error;
}

ApiError unsupported(const std::string &param, const std::string &message) {
    ApiError error = bad_request(param, message);
    error.code = "unsupported_parameter";
    return error;
}

ApiError unknown_parameter(const std::string &name) {
    ApiError error = bad_request(name, "unknown parameter \"" + name + "\"; remove it");
    error.code = "unknown_parameter";
    return error;
}

ApiError try_later(unsigned status, const std::string &message, std::chrono::milliseconds retry_after) {
    ApiError error(status, message);
    error.retry_after = std::max(retry_after, std::chrono::milliseconds(1000));
    return error;
}

static unsigned status_of(Code code) {
    switch (code) {
        case Code::invalid_argument:
        case Code::unsupported:
        case Code::capacity: return 400;  // a full engine, whose error is temporary: see Generation::add
        case Code::not_found: return 404;
        case Code::out_of_memory:
        case Code::closed:
        case Code::busy:
        case Code::cancelled: return 503;
        default: return 500;  // internal, io, model and codes of later releases
    }
}

// Returns the parameter with which a message of the library begins ("top_p is 2; ..."), or "".
static std::string leading_name(const std::string &message) {
    const size_t end = message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_");
    if (end == std::string::npos || end == 0) return {};
    const bool is_name = message.compare(end, 4, " is ") == 0 || message.compare(end, 5, " has ") == 0;
    return is_name ? message.substr(0, end) : std::string();
}

ApiError to_api_error(const pagedllm::Error &error) {
    ApiError api(status_of(error.code), error.message);
    if (error.prompt_tokens > 0) {
        api.code = "context_length_exceeded";
    } else if (error.code == Code::invalid_argument || error.code == Code::unsupported) {
        api.param = leading_name(error.message);
        if (error.code == Code::unsupported) api.code = "unsupported_parameter";
    }
    return api;
}

ApiError current_api_error() noexcept {
    try {
        throw;
    } catch (const ApiError &error) {
        return error;
    } catch (const std::bad_alloc &) {
        return ApiError(503, "the server is out of memory; try again later");
    } catch (const std::exception &error) {
        return ApiError(500, std::string("internal error: ") + error.what());
    } catch (...) {
        return ApiError(500, "internal error: unknown exception");
    }
}

// Returns the "type" of OpenAI's error objects.
static const char *kind_of(unsigned status) {
    switch (status) {
        case 401: return "authentication_error";
        case 404: return "not_found_error";
        case 429: return "rate_limit_error";
        case 408:
        case 504: return "timeout_error";
        default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

std::string error_object(const ApiError &error) {
    std::string text;
    JsonWriter json(text);
    json.begin_object().key("error").begin_object();
    json.member("message", std::string_view(error.what())).member("type", kind_of(error.status));
    json.member_or_null("param", error.param).member_or_null("code", error.code);
    json.end_object().end_object();
    return text;
}

}  // namespace server
