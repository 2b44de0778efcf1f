// POST /tokenize and /detokenize.
#pragma once

#include <string>

#include "completions.hpp"

namespace server {

std::string answer_tokenize(const JsonValue &body, const FindModel &find_model);
std::string answer_detokenize(const JsonValue &body, const FindModel &find_model);

}  // namespace server
