// POST /v1/chat/completions.
#pragma once

#include <memory>

#include "completions.hpp"

namespace server {

std::unique_ptr<Generation> start_chat(const JsonValue &body, const FindModel &find_model, const Limits &limits);

}  // namespace server
