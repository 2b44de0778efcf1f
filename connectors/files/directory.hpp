// The directory of a store: the names of its files, its format, and its budget.
//
//   pagedllm-kv-store     the format, one line
//   a/ab34...             a value, named by its key in hexadecimal digits, below the first one
//   tmp/...               values that are being written
//
// The directory is the only state. A value appears by an atomic rename and never changes, so
// several stores can use the directory without locks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "jobs.hpp"

namespace pllm_files {

using pllm_connector::Error;

// A file descriptor that is closed at the end of its scope.
class File {
public:
    explicit File(int fd = -1) : fd_(fd) {}
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File();

    explicit operator bool() const { return fd_ >= 0; }
    int fd() const { return fd_; }

private:
    int fd_;
};

class Directory;

// The bytes of a value in the budget while it is written. Null: the budget does not allow it.
class Reservation {
public:
    Reservation() = default;
    Reservation(Directory &directory, uint64_t bytes) : directory_(&directory), bytes_(bytes) {}
    Reservation(Reservation &&other) noexcept : directory_(std::exchange(other.directory_, nullptr)), bytes_(other.bytes_) {}
    Reservation &operator=(Reservation &&other) noexcept;
    ~Reservation();

    explicit operator bool() const { return directory_ != nullptr; }

private:
    Directory *directory_ = nullptr;
    uint64_t bytes_ = 0;
};

class Directory {
public:
    // Opens the directory, or creates it. Throws Error.
    Directory(const std::string &path, uint64_t max_bytes);
    ~Directory();

    int fd() const { return directory_.fd(); }

    // The name of a value, relative to the directory.
    static std::string value_name(const uint8_t *key);

    // A new name for a value that is being written.
    std::string temporary_name();

    // Returns whether there is a value, and marks it as used at a time in nanoseconds since 1970.
    bool use(const std::string &name, int64_t time_ns);
    static int64_t now_ns();

    // Counts a value of `bytes` bytes before it is written. Returns null if the budget does not allow
    // it, because values are written faster than they are evicted.
    Reservation reserve(uint64_t bytes);

    // Makes the thread evict values, because the disk has no space. Ignores other errors.
    void on_write_error(int error);

private:
    friend class Reservation;
    struct Scan;

    void open_format(const std::string &path);
    void check_empty(const std::string &path);
    void write_format(const std::string &path);
    void run();
    void scan(Scan &scan, bool evicts);
    void scan_values(int fd, Scan &scan, bool evicts);
    void evict(bool is_disk_full);
    void wake();

    File directory_;
    const uint64_t max_bytes_;
    std::atomic<uint64_t> names_{0};
    std::string random_;

    void end_write(uint64_t bytes);

    std::mutex count_mutex_;  // protects the numbers in the next line
    // Bytes of the last scan and of later writes, of all writes of this store, of its writes at the
    // beginning of the last scan, and of the writes that have not ended.
    uint64_t used_ = 0, written_ = 0, written_at_scan_ = 0, writing_ = 0;
    std::atomic<bool> is_disk_full_{false};

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_due_ = false, stops_ = false;
    std::thread thread_;
};

}  // namespace pllm_files
