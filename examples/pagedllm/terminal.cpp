#include "terminal.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tool {

static volatile std::sig_atomic_t interrupt_pending = 0;
static int interrupt_event = -1;  // readable while an interrupt is pending

// Async-signal-safe.
static void on_interrupt(int signal) {
    if (interrupt_pending) {
        std::signal(signal, SIG_DFL);
        std::raise(signal);
        return;
    }
    const int error = errno;
    const uint64_t one = 1;
    interrupt_pending = write(interrupt_event, &one, sizeof one) > 0;  // cannot fail: its counter is 0 or 1
    errno = error;
}

void prepare_streams() {
    // A closed descriptor would become that of the next file. /dev/null takes its place. It is opened
    // for reading, so that writing to a closed standard output is an error.
    for (int descriptor = 0; descriptor <= 2; descriptor++) {
        if (fcntl(descriptor, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0) std::abort();
    }
    interrupt_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct sigaction action = {};
    action.sa_handler = on_interrupt;
    sigaction(SIGINT, &action, nullptr);
    std::signal(SIGPIPE, SIG_IGN);  // write returns EPIPE instead
}

bool is_terminal(int descriptor) { return isatty(descriptor) == 1; }

bool is_interrupted() { return interrupt_pending != 0; }

bool take_interrupt() {
    // A signal between the two resets would leave one of them behind.
    sigset_t signals, former;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, &former);
    const bool was_pending = is_interrupted();
    uint64_t count = 0;
    if (was_pending && read(interrupt_event, &count, sizeof count) > 0) interrupt_pending = 0;
    pthread_sigmask(SIG_SETMASK, &former, nullptr);
    return was_pending;
}

// Waits for events of a descriptor. Returns false if Ctrl-C comes first.
static bool wait_for(int descriptor, short events) {
    for (;;) {
        pollfd both[] = {{descriptor, events, 0}, {interrupt_event, POLLIN, 0}};
        const int ready = poll(both, 2, -1);
        if (ready < 0 && errno != EINTR) throw StreamError(std::string("poll failed (") + std::strerror(errno) + ")");
        if (ready > 0 && both[0].revents) return true;
        if (ready > 0 && both[1].revents) return false;
    }
}

bool wait_readable(int descriptor) { return wait_for(descriptor, POLLIN); }

void print(std::string_view text) {
    // A pipe that can be written takes this many bytes without waiting.
    constexpr size_t piece = 4096;
    while (!text.empty()) {
        if (!wait_for(STDOUT_FILENO, POLLOUT)) throw Interrupted();
        const ssize_t written = write(STDOUT_FILENO, text.data(), std::min(text.size(), piece));
        if (written >= 0) {
            text.remove_prefix(static_cast<size_t>(written));
        } else if (errno == EPIPE) {
            throw OutputClosed();
        } else if (errno != EINTR && errno != EAGAIN) {
            throw StreamError(std::string("standard output cannot be written (") + std::strerror(errno) + "); redirect it to another file");
        }
    }
}

void print_note(const std::string &line) {
    std::fputs((line + "\n").c_str(), stderr);  // unbuffered
}

bool Input::read_more() {
    if (ended_) return false;
    char part[65536];
    for (;;) {
        if (!wait_readable(STDIN_FILENO)) throw Interrupted();
        const ssize_t count = read(STDIN_FILENO, part, sizeof part);
        if (count > 0) {
            buffer_.append(part, static_cast<size_t>(count));
            return true;
        }
        if (count == 0) {
            ended_ = true;
            return false;
        }
        if (errno != EINTR && errno != EAGAIN) {
            throw StreamError(std::string("standard input cannot be read (") + std::strerror(errno) + "); redirect it from another file");
        }
    }
}

std::optional<std::string> Input::line() {
    size_t searched = 0;
    size_t end = 0;
    while ((end = buffer_.find('\n', searched)) == std::string::npos) {
        searched = buffer_.size();
        if (read_more()) continue;
        if (buffer_.empty()) return std::nullopt;
        return std::exchange(buffer_, {});
    }
    std::string line = buffer_.substr(0, end);
    buffer_.erase(0, end + 1);
    return line;
}

std::string Input::rest() {
    while (read_more()) {
    }
    return std::exchange(buffer_, {});
}

ProgressBar::ProgressBar(std::string what) : what_(std::move(what)), is_shown_(is_terminal(STDERR_FILENO)) {}

ProgressBar::~ProgressBar() {
    if (percent_ >= 0) std::fputs("\r\x1b[K", stderr);  // removes the line
}

void ProgressBar::draw(uint64_t done, uint64_t total) {
    const int percent = total ? static_cast<int>(static_cast<double>(done) / static_cast<double>(total) * 100) : 100;
    if (!is_shown_ || percent == percent_) return;
    percent_ = percent;
    const size_t filled = static_cast<size_t>(std::clamp(percent, 0, 100)) * 40 / 100;
    std::fprintf(stderr, "\r%s [%s] %3d%%", what_.c_str(), (std::string(filled, '#') + std::string(40 - filled, '.')).c_str(), percent);
}

}  // namespace tool
