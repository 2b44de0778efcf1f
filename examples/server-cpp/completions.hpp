// POST /v1/completions.
#pragma once

#include <functional>
#include <memory>

#include "generation.hpp"

namespace server {

// Returns the model of a name, or throws ApiError.
using FindModel = std::function<Model &(const std::string &name)>;

std::unique_ptr<Generation> start_completion(const JsonValue &body, const FindModel &find_model, const Limits &limits);

}  // namespace server
