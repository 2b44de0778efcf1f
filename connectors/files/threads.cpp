#include "threads.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "directory.hpp"

namespace pllm_files {

namespace {

// Removes the first `len` bytes of the parts from `first` on.
void advance(Parts &parts, size_t &first, size_t len) {
    while (first < parts.size() && len >= parts[first].iov_len) len -= parts[first++].iov_len;
    if (len > 0) {
        parts[first].iov_base = static_cast<char *>(parts[first].iov_base) + len;
        parts[first].iov_len -= len;
    }
}

// Calls `transfer` until all parts are done, the end of the file, or an error. Returns the number
// of bytes, or -1.
template <class Transfer>
int64_t transfer_all(Parts &parts, Transfer transfer) {
    int64_t done = 0;
    for (size_t first = 0; first < parts.size();) {
        const auto count = static_cast<int>(std::min<size_t>(parts.size() - first, IOV_MAX));
        const ssize_t len = transfer(&parts[first], count, done);
        if (len < 0 && errno == EINTR) continue;
        if (len < 0) return -1;
        if (len == 0) break;
        done += len;
        advance(parts, first, static_cast<size_t>(len));
    }
    return done;
}

}  // namespace

Threads::Threads(Directory &directory, Completions &completions, unsigned threads)
    : directory_(directory), completions_(completions), max_writing_(std::max(threads, 2u) - 1) {
    try {
        for (unsigned i = 0; i < threads; i++) threads_.push_back(pllm_connector::spawn([this] { run(); }));
    } catch (...) {
        stop();
        throw;
    }
}

Threads::~Threads() { stop(); }

void Threads::stop() {
    {
        std::lock_guard lock(mutex_);
        stops_ = true;
    }
    changed_.notify_all();
    for (auto &thread : threads_) thread.join();
}

void Threads::start(Job job) {
    {
        std::lock_guard lock(mutex_);
        (job.kind == Job::PUT ? writes_ : reads_).push_back(std::move(job));
    }
    changed_.notify_one();
}

// Waits for the next operation. Returns false at the end.
bool Threads::next(Job &job, std::unique_lock<std::mutex> &lock) {
    const auto can_write = [this] { return !writes_.empty() && writing_ < max_writing_; };
    changed_.wait(lock, [&] { return stops_ || !reads_.empty() || can_write(); });
    if (stops_) return false;
    auto &queue = reads_.empty() ? writes_ : reads_;
    job = std::move(queue.front());
    queue.pop_front();
    return true;
}

void Threads::run() {
    std::unique_lock lock(mutex_);
    Job job;
    while (next(job, lock)) {
        const bool writes = job.kind == Job::PUT;
        writing_ += writes;
        lock.unlock();
        execute(job);
        lock.lock();
        writing_ -= writes;
        if (writes && !writes_.empty()) changed_.notify_one();
    }
}

void Threads::execute(Job &job) {
    try {
        switch (job.kind) {
            case Job::EXISTS: return exists(job);
            case Job::GET: return get(job);
            case Job::PUT: return put(job);
            case Job::REMOVE:
                const bool is_removed = unlinkat(directory_.fd(), Directory::value_name(job.keys.data()).c_str(), 0) == 0;
                return completions_.add(job.token, is_removed ? PLLM_KV_DONE : errno == ENOENT ? PLLM_KV_MISSING : PLLM_KV_FAILED);
        }
    } catch (const std::bad_alloc &) {
        completions_.add(job.token, PLLM_KV_FAILED);
    }
}

// The keys are those of a prefix, in order. Its end is less useful than its beginning, so it counts
// as used earlier.
void Threads::exists(Job &job) {
    const size_t count = job.keys.size() / pllm_connector::KEY_BYTES;
    const int64_t now = Directory::now_ns();
    for (size_t i = 0; i < count; i++) {
        const std::string name = Directory::value_name(&job.keys[i * pllm_connector::KEY_BYTES]);
        job.found[i] = directory_.use(name, now - static_cast<int64_t>(i) * 1000);
    }
    completions_.add(job.token, PLLM_KV_DONE);
}

void Threads::get(Job &job) {
    const std::string name = Directory::value_name(job.keys.data());
    // Without O_NONBLOCK, a pipe with this name would stop the thread.
    const File file(openat(directory_.fd(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
    if (!file) return completions_.add(job.token, errno == ENOENT ? PLLM_KV_MISSING : PLLM_KV_FAILED);
    struct stat status;
    if (fstat(file.fd(), &status) != 0 || !S_ISREG(status.st_mode)) return completions_.add(job.token, PLLM_KV_FAILED);
    const auto len = static_cast<uint64_t>(status.st_size);
    if (len != job.len) return completions_.add(job.token, PLLM_KV_DONE, len);
    const int64_t done = transfer_all(job.parts, [&](const iovec *parts, int count, int64_t offset) {
        return preadv(file.fd(), parts, count, offset);
    });
    if (done < 0) return completions_.add(job.token, PLLM_KV_FAILED);
    completions_.add(job.token, PLLM_KV_DONE, static_cast<uint64_t>(done));
}

void Threads::put(Job &job) {
    const std::string name = Directory::value_name(job.keys.data());
    struct stat status;
    const bool has_value = fstatat(directory_.fd(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(status.st_mode) &&
                           static_cast<uint64_t>(status.st_size) == job.len;
    if (has_value) return completions_.add(job.token, PLLM_KV_DONE);
    const Reservation reservation = directory_.reserve(job.len);
    if (!reservation) return completions_.add(job.token, PLLM_KV_FAILED);
    const int error = write(name, job);
    if (error != 0) directory_.on_write_error(error);
    completions_.add(job.token, error == 0 ? PLLM_KV_DONE : PLLM_KV_FAILED);
}

// Writes a temporary file and renames it. Returns an error number, or 0.
int Threads::write(const std::string &name, Job &job) {
    const std::string temporary = directory_.temporary_name();
    int error = 0;
    {
        const File file(openat(directory_.fd(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (!file) return errno;
        const int64_t done = transfer_all(job.parts, [&](const iovec *parts, int count, int64_t offset) {
            return pwritev(file.fd(), parts, count, offset);
        });
        if (done != static_cast<int64_t>(job.len)) error = done < 0 ? errno : ENOSPC;
    }
    if (error == 0 && renameat(directory_.fd(), temporary.c_str(), directory_.fd(), name.c_str()) != 0) error = errno;
    if (error != 0) unlinkat(directory_.fd(), temporary.c_str(), 0);
    return error;
}

}  // namespace pllm_files
