// Loading of a model, and requests that Ctrl-C aborts.
#pragma once

#include <functional>
#include <pagedllm.hpp>

#include "commands.hpp"

namespace tool {

// Adds the argument MODEL and the options of an engine to a command.
void add_engine_options(Command &command, pagedllm::Options &options);

// Creates an engine. Shows a progress bar on a terminal. Throws pagedllm::Exception or Interrupted.
pagedllm::Engine load(pagedllm::Options options);

// Runs a request and passes each output to `read`. Ctrl-C aborts the request; then the result is false.
// Throws pagedllm::Exception if the request fails.
bool run(pagedllm::Engine &engine, const pagedllm::Request &request, const std::function<void(const pagedllm::Output &)> &read);

// Returns a line about the time of a sequence, for --timing.
std::string timing_text(const pagedllm::Output &last);

}  // namespace tool
