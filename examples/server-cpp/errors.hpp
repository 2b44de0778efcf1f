// Refusals: every error of the library and of a request with its HTTP status and error object.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>

#include "pagedllm.hpp"

namespace server {

// A refusal as the client sees it. It is thrown while a request is read, and never leaves the
// handler of the request.
struct ApiError : std::runtime_error {
    // The message can repeat bytes of the client: a long one is shortened, and made valid UTF-8.
    ApiError(unsigned status_code, const std::string &message);

    unsigned status;
    std::string code = {};   // of OpenAI, such as "model_not_found"; may be empty
    std::string param = {};  // the member of the request that is wrong; may be empty
    std::string allow = {};  // the method to use instead, for 405
    // Time after which the request can succeed. 0: not known.
    std::chrono::milliseconds retry_after{0};
};

ApiError bad_request(const std::string &param, const std::string &message);

// Refuses a member that the server knows but cannot honour.
ApiError unsupported(const std::string &param, const std::string &message);

ApiError unknown_parameter(const std::string &name);

// Refuses a request that can succeed later.
ApiError try_later(unsigned status, const std::string &message, std::chrono::milliseconds retry_after = std::chrono::seconds(1));

// Maps an error of the library.
ApiError to_api_error(const pagedllm::Error &error);

// Returns the value, or throws the error as ApiError.
template <class T>
T value_of(pagedllm::Result<T> result) {
    if (!result.ok()) throw to_api_error(result.error());
    return std::move(*result);
}

// Maps the exception that is being handled.
ApiError current_api_error() noexcept;

// Returns the error object of OpenAI.
std::string error_object(const ApiError &error);

}  // namespace server
