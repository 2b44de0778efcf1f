// The commands of the tool, each with its arguments and options.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "options.hpp"

namespace tool {

struct Argument {
    Option option;
    bool is_required = true;
};

struct Group {
    std::string title;
    std::vector<Option> options;
};

struct Command {
    std::string name;
    std::string summary;
    std::string notes;  // at the end of the help
    std::vector<Argument> arguments;
    std::vector<Group> groups;
    std::function<void()> run;
};

Command chat_command();
Command complete_command();
Command bench_command();
Command plan_command();
Command inspect_command();

}  // namespace tool
