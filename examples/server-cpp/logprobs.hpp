// Log probabilities in the forms of completions, chats and prompts.
#pragma once

#include "json.hpp"
#include "pagedllm.hpp"

namespace server {

// Writes columns. `top` is the number of most probable tokens, and `offset` the number of characters
// before the output, which is updated.
void write_completion_logprobs(const pagedllm::Engine &engine, const pagedllm::Output &output, bool top, size_t &offset, JsonWriter &json);

// Writes rows, or null if there are none.
void write_chat_logprobs(const pagedllm::Engine &engine, const pagedllm::Output &output, JsonWriter &json);

// Writes an entry for each token of the prompt, null for those before `start`.
void write_prompt_logprobs(const pagedllm::Engine &engine, const pagedllm::Output &output, size_t start, JsonWriter &json);

}  // namespace server
