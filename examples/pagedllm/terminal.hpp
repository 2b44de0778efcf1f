// Standard input, standard output and Ctrl-C.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tool {

// Ctrl-C ended what the tool was doing.
class Interrupted : public std::exception {};

// The reader of standard output has closed its end of the pipe.
class OutputClosed : public std::exception {};

// Standard input or output failed.
class StreamError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Prepares the three standard streams and the signals of the process. Call it before anything else.
void prepare_streams();

bool is_terminal(int descriptor);

// Returns whether Ctrl-C was pressed since the last take_interrupt.
bool is_interrupted();

// As is_interrupted, and resets it. A second Ctrl-C before this call ends the process.
bool take_interrupt();

// Waits until the descriptor can be read. Returns false if Ctrl-C comes first.
bool wait_readable(int descriptor);

// Writes to standard output without a buffer. Throws OutputClosed, StreamError or Interrupted.
void print(std::string_view text);

// Writes a line to standard error. Its errors are ignored.
void print_note(const std::string &line);

// Standard input.
class Input {
public:
    // Returns the next line without its end, or nothing at the end. Throws Interrupted or StreamError.
    std::optional<std::string> line();

    // Returns everything up to the end.
    std::string rest();

private:
    bool read_more();

    std::string buffer_;
    bool ended_ = false;
};

// A line of standard error that shows how much is done. It appears on a terminal only.
class ProgressBar {
public:
    explicit ProgressBar(std::string what);
    ~ProgressBar();
    ProgressBar(const ProgressBar &) = delete;
    ProgressBar &operator=(const ProgressBar &) = delete;

    void draw(uint64_t done, uint64_t total);

private:
    std::string what_;
    bool is_shown_;
    int percent_ = -1;
};

}  // namespace tool
