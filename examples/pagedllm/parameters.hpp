// The sampling parameters of a command line.
#pragma once

#include <pagedllm.hpp>
#include <set>

#include "commands.hpp"

namespace tool {

struct Parameters {
    pagedllm::Sampling sampling;
    pagedllm::Dry dry;
    pagedllm::Beam beam;
    bool has_dry = false;
    bool has_beam = false;
    bool has_model_defaults = true;
    std::set<std::string> given;     // names of the options of `sampling` that were given
    std::set<std::string> grammars;  // names of the options that gave a grammar

    // Adds the options of sampling, DRY and grammars to a command. The object must outlive the command.
    void add_to(Command &command);

    // Adds the options of a beam search.
    void add_beam_to(Command &command);

    // Returns the parameters. Throws UsageError if options contradict each other.
    [[nodiscard]] pagedllm::Sampling resolved() const;
};

}  // namespace tool
