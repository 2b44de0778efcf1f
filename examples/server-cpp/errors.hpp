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
    ApiError(unsigned status_code, const std::string &message) : std::runtime_error(message), status(status_code) {}

    unsigned status;
    std::string code = {};   // of OpenAI, such as "model_not_found"; may be empty
    std::string param = {};  // the member of the request that is wrong; may be empty
    std::string allow = {};  // the method to use instead, for 405
    // Time after which the request can succeed. 0: not known.
    std::chrono::milliseconds retry_after{0};
};

ApiError bad_request(std::string param, const std::string &message);

// Refuses a member that the server knows but cannot honour.
ApiError unsupported(std::string param, const std::string &message);

ApiError unknown_parameter(const std::string &name);

ApiError too_many_requests(const std::string &message, std::chrono::milliseconds retry_after = std::chrono::seconds(1));

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
