// Log probabilities in the forms of completions, chats and prompts.
#pragma once

#include <string>
#include <string_view>

#include "json.hpp"
#include "pagedllm.hpp"

namespace server {

// Returns the bytes of a token as text, with escapes (\xe2) if they are not UTF-8.
std::string printable(std::string_view bytes);

// Writes columns. `top` is the number of most probable tokens, and `offset` the number of characters
// before the output, which is updated.
void write_completion_logprobs(const pagedllm::Engine &engine, const pagedllm::Output &output, bool top, size_t &offset, JsonWriter &json);

// Writes rows, or null if there are none.
void write_chat_logprobs(const pagedllm::Engine &engine, const pagedllm::Output &output, JsonWriter &json);

// Writes an entry for each token of the prompt, null for those before `start`.
void write_prompt_logprobs(const pagedllm::Engine &engine, const pagedllm::Output &output, size_t start, JsonWriter &json);

}  // namespace server
