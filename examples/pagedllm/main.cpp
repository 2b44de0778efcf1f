// A command-line tool for models: chat, complete, bench, plan, inspect. docs/command-line.md describes it.
//
// usage: pagedllm COMMAND MODEL [OPTIONS]
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iterator>

#include "commands.hpp"
#include "terminal.hpp"

namespace tool {

// Exit codes, as docs/command-line.md lists them.
enum ExitCode {
    success = 0,
    failure = 1,          // the library or a file reported an error
    usage = 2,            // the command line is wrong
    interrupted = 130,    // as a program that SIGINT ends
    output_closed = 141,  // as a program that SIGPIPE ends
};

static constexpr const char *footer =
    "pagedllm COMMAND --help lists the options of a command. docs/command-line.md has examples.\n\n"
    "Exit codes: 0; 1 for an error of the model or the library; 2 for a wrong command line;\n"
    "130 after Ctrl-C; 141 if the reader of the output has gone.";

// Divides a text in lines that fit beside the names of options.
static std::string wrapped(const std::string &text) {
    constexpr size_t width = 66;
    std::string result;
    size_t column = 0;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        if (column > 0) result += column + 1 + word.size() > width ? "\n" : " ";
        column = column > 0 && column + 1 + word.size() <= width ? column + 1 + word.size() : word.size();
        result += word;
    }
    return result;
}

static void add_option(CLI::App &app, const Option &option, const std::string &group) {
    const CLI::callback_t set = [option](const CLI::results_t &values) {
        if (values.size() > 1 && !option.repeats) {
            throw UsageError(option.name + " is given " + std::to_string(values.size()) + " times; give it once");
        }
        for (const std::string &value : values) option.set(value);
        return true;
    };
    CLI::Option *added = nullptr;
    if (option.value.empty()) {
        added = app.add_flag_function(option.name, [option](int64_t) { option.set(""); }, wrapped(option.help));
    } else {
        added = app.add_option(option.name, set, wrapped(option.help));
        added->option_text(option.value + (option.repeats ? " ..." : ""))->type_size(1)->expected(1);
        added->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    }
    added->group(group);
}

static void add_command(CLI::App &app, const Command &command) {
    CLI::App *sub = app.add_subcommand(command.name, command.summary);
    sub->group("Commands")->footer(command.notes);
    for (const Argument &argument : command.arguments) {
        const CLI::callback_t set = [option = argument.option](const CLI::results_t &values) { return option.set(values.at(0)), true; };
        CLI::Option *added = sub->add_option(argument.option.name, set, wrapped(argument.option.help));
        added->required(argument.is_required)->type_size(1)->expected(1)->option_text(argument.is_required ? " " : "(optional)");
    }
    for (const Group &group : command.groups) {
        for (const Option &option : group.options) add_option(*sub, option, group.title);
    }
}

static std::string version_text() {
    return std::string("pagedllm ") + pllm_version() + " (ABI " + std::to_string(pllm_abi_version()) + ")";
}

// Returns the help without the double empty lines between groups.
static std::string help_of(const CLI::App &app) {
    std::string text = app.help();
    for (size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;) text.erase(at, 1);
    return text;
}

// Throws UsageError unless the first argument is the name of a command or asks for help or the version.
static void check_command(const std::vector<Command> &commands, int argc, char **argv) {
    const std::string given = argc > 1 ? argv[1] : "";
    if (given == "-h" || given == "--help" || given == "--version") return;
    std::string names;
    for (const Command &command : commands) {
        if (command.name == given) return;
        names += (names.empty() ? "" : ", ") + command.name;
    }
    refuse("the command", given, "one of " + names);
}

// Parses the command line and runs its command.
static int run(int argc, char **argv) {
    CLI::App app("LLM serving inside your own process: a tool for models.");
    app.name("pagedllm");
    app.require_subcommand(1);
    app.set_version_flag("--version", version_text(), "Print the version of the library and exit.");
    app.footer(footer);
    app.get_formatter()->column_width(32);
    app.get_formatter()->label("Positionals", "Arguments");
    app.get_formatter()->label("SUBCOMMAND", "COMMAND");
    app.set_help_flag("-h,--help", "Print this help and exit.");
    const std::vector<Command> commands = {chat_command(), complete_command(), bench_command(), plan_command(), inspect_command()};
    for (const Command &command : commands) add_command(app, command);
    check_command(commands, argc, argv);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp &) {
        print(help_of(app));
        return success;
    } catch (const CLI::CallForVersion &) {
        print(version_text() + "\n");
        return success;
    } catch (const CLI::ParseError &error) {
        const auto chosen = app.get_subcommands();
        const std::string name = chosen.empty() ? "" : " " + chosen.front()->get_name();
        throw UsageError(std::string(error.what()) + "; see pagedllm" + name + " --help");
    }
    for (const Command &command : commands) {
        if (app.got_subcommand(command.name)) command.run();
    }
    return success;
}

}  // namespace tool

int main(int argc, char **argv) {
    tool::prepare_streams();
    try {
        return tool::run(argc, argv);
    } catch (const tool::Interrupted &) {
        return tool::interrupted;
    } catch (const tool::OutputClosed &) {
        return tool::output_closed;
    } catch (const tool::UsageError &error) {
        tool::print_note(std::string("pagedllm: ") + error.what());
        return tool::usage;
    } catch (const std::exception &error) {
        tool::print_note(std::string("pagedllm: ") + error.what());
        return tool::failure;
    }
}
