#include "directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <vector>

#include "threads.hpp"

namespace pllm_files {
namespace {

constexpr char FORMAT_FILE[] = "pagedllm-kv-store";
constexpr std::string_view FORMAT = "pagedllm files store 1\n";
constexpr char TEMPORARY[] = "tmp";
// Eviction starts when this part of the budget is free, and frees twice as much, so that it is
// rare. The same part bounds what a store writes between two scans.
constexpr uint64_t SLACK = 16;
// Age at which a file in tmp is what a process has left behind.
constexpr int64_t ABANDONED_NS = 600'000'000'000;
// A file occupies whole pages.
constexpr uint64_t PAGE = 4096;

struct CloseDir {
    void operator()(DIR *dir) const { closedir(dir); }
};
using Dir = std::unique_ptr<DIR, CloseDir>;

Dir open_dir(int parent, const char *name) {
    const int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return nullptr;
    Dir dir(fdopendir(fd));
    if (!dir) ::close(fd);
    return dir;
}

// Values are in 16 directories, by the first digit of their names.
constexpr char DIGITS[] = "0123456789abcdef";

bool is_value_name(const char *name) { return std::strlen(name) == 64 && std::strspn(name, DIGITS) == 64; }

uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

int64_t modified_ns(const struct stat &status) { return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec; }

[[noreturn]] void fail(int32_t code, const std::string &problem, const std::string &details, const std::string &remedy) {
    throw Error{code, problem + " (" + details + "); " + remedy};
}

// The printable beginning of a text of unknown origin.
std::string excerpt(std::string text) {
    text = text.substr(0, std::min<size_t>(text.find('\n'), 40));
    for (char &c : text)
        if (c < ' ' || c > '~') c = '?';
    return text;
}

int open_or_create(const std::string &path) {
    const int created = mkdir(path.c_str(), 0700), error = errno;
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) return fd;
    fail(PLLM_E_IO, "the directory of the store cannot be opened or created",
         path + ": " + std::strerror(created != 0 && error != EEXIST ? error : errno),
         "its parent directory must exist, and the process must have the rights");
}

}  // namespace

File::~File() {
    if (fd_ >= 0) ::close(fd_);
}

// A scan of all values. The second one evicts those that were last used at `oldest` or before.
struct Directory::Scan {
    struct Value {
        int64_t used;
        uint64_t bytes;
    };
    std::vector<Value> values;
    uint64_t total = 0;
    int64_t oldest = 0;
    // Bytes of the values to evict that were last used exactly at `oldest`.
    uint64_t ties = 0;
};

Directory::Directory(const std::string &path, uint64_t max_bytes) : directory_(open_or_create(path)), max_bytes_(max_bytes) {
    uint8_t random[8];
    if (getrandom(random, sizeof random, 0) != sizeof random) throw Error{PLLM_E_IO, "the system returns no random bytes"};
    random_ = pllm_connector::hex(random, sizeof random);
    open_format(path);
    // If the directory is read-only, its values can still be read.
    mkdirat(fd(), TEMPORARY, 0700);
    for (const char digit : std::string_view(DIGITS)) mkdirat(fd(), std::string(1, digit).c_str(), 0700);
    // Before the first write, whose budget depends on what the directory has.
    evict(false);
    thread_ = pllm_connector::spawn([this] { run(); });
}

Directory::~Directory() {
    {
        std::lock_guard lock(mutex_);
        stops_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Directory::open_format(const std::string &path) {
    File found(openat(fd(), FORMAT_FILE, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (found) {
        char text[256];
        const ssize_t len = pread(found.fd(), text, sizeof text, 0);
        const std::string format(text, len > 0 ? static_cast<size_t>(len) : 0);
        if (format == FORMAT) return;
        if (len == 0) return write_format(path);  // a power failure can leave it empty
        fail(PLLM_E_UNSUPPORTED, "another version has written the directory of the store",
             path + ": \"" + excerpt(format) + "\" instead of \"" + excerpt(std::string(FORMAT)) + "\"",
             "use another directory, or delete this one");
    }
    if (errno != ENOENT)
        fail(PLLM_E_IO, "the format of the store cannot be read", path + "/" + FORMAT_FILE + ": " + std::strerror(errno),
             "the process must have the rights");
    check_empty(path);
    write_format(path);
}

// Several processes may do this at the same time. Each of them renames a complete file.
void Directory::write_format(const std::string &path) {
    const std::string name = std::string(FORMAT_FILE) + "." + random_;
    File file(openat(fd(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    const bool is_written = file && write(file.fd(), FORMAT.data(), FORMAT.size()) == static_cast<ssize_t>(FORMAT.size()) &&
                            renameat(fd(), name.c_str(), fd(), FORMAT_FILE) == 0;
    if (is_written) return;
    const int error = errno;
    unlinkat(fd(), name.c_str(), 0);
    fail(PLLM_E_IO, "the directory of the store is not writable", path + ": " + std::strerror(error),
         "a new store needs a directory that the process can write");
}

// A store deletes only its own files. But a directory with other files is more likely a mistake.
void Directory::check_empty(const std::string &path) {
    const Dir dir = open_dir(fd(), ".");
    if (!dir)
        fail(PLLM_E_IO, "the directory of the store cannot be read", path + ": " + std::strerror(errno), "the process must have the rights");
    while (const dirent *entry = readdir(dir.get())) {
        const std::string_view name = entry->d_name;
        // Another process may be creating the store.
        if (name == "." || name == ".." || name == "lost+found" || name.substr(0, sizeof FORMAT_FILE - 1) == FORMAT_FILE) continue;
        struct stat status;
        if (fstatat(fd(), FORMAT_FILE, &status, 0) == 0) return;
        fail(PLLM_E_INVALID_ARGUMENT, "the directory of the store has other files", path + ": " + excerpt(entry->d_name),
             "use an empty directory or one that does not exist");
    }
}

std::string Directory::value_name(const uint8_t *key) {
    const std::string name = pllm_connector::hex(key, pllm_connector::KEY_BYTES);
    return name.substr(0, 1) + "/" + name;
}

std::string Directory::temporary_name() { return std::string(TEMPORARY) + "/" + random_ + "-" + std::to_string(names_++); }

int64_t Directory::now_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

bool Directory::use(const std::string &name, int64_t time_ns) {
    const timespec used = {time_ns / 1'000'000'000, time_ns % 1'000'000'000};
    const timespec times[2] = {{0, UTIME_OMIT}, used};
    if (utimensat(fd(), name.c_str(), times, AT_SYMLINK_NOFOLLOW) == 0) return true;
    if (errno != EACCES && errno != EPERM && errno != EROFS) return false;
    struct stat status;
    return fstatat(fd(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0;
}

Reservation Directory::reserve(uint64_t bytes) {
    bytes = pages(bytes);
    const uint64_t slack = max_bytes_ / SLACK;
    std::unique_lock lock(count_mutex_);
    const uint64_t used = used_ + bytes;
    const bool is_scan_due = used > max_bytes_ - slack || written_ - written_at_scan_ > slack;
    const bool fits = bytes <= max_bytes_ && used <= max_bytes_;
    if (fits) {
        used_ = used;
        written_ += bytes;
        writing_ += bytes;
    }
    lock.unlock();
    if (is_scan_due) wake();
    return fits ? Reservation(*this, bytes) : Reservation();
}

Reservation &Reservation::operator=(Reservation &&other) noexcept {
    std::swap(directory_, other.directory_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Reservation::~Reservation() {
    if (directory_) directory_->end_write(bytes_);
}

void Directory::end_write(uint64_t bytes) {
    std::lock_guard lock(count_mutex_);
    writing_ -= bytes;
}

void Directory::on_write_error(int error) {
    if (error != ENOSPC && error != EDQUOT) return;
    is_disk_full_ = true;
    wake();
}

void Directory::wake() {
    {
        std::lock_guard lock(mutex_);
        is_due_ = true;
    }
    changed_.notify_all();
}

// The thread that evicts. It waits between two scans of a full disk, which may be full of other
// files.
void Directory::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return is_due_ || stops_; });
        if (stops_) return;
        is_due_ = false;
        lock.unlock();
        const bool is_disk_full = is_disk_full_.exchange(false);
        try {
            evict(is_disk_full);
        } catch (const std::bad_alloc &) {
            // The next write tries again.
        }
        lock.lock();
        if (is_disk_full) changed_.wait_for(lock, std::chrono::seconds(1), [this] { return stops_; });
    }
}

// Scans the directory, which other stores may have changed. If the budget is nearly exhausted,
// evicts the least recently used values.
void Directory::evict(bool is_disk_full) {
    std::unique_lock lock(count_mutex_);
    // A scan may see these writes or not, so they are counted in any case.
    const uint64_t written = written_, writing = writing_;
    lock.unlock();
    Scan first;
    scan(first, false);
    const uint64_t slack = max_bytes_ / SLACK;
    uint64_t total = first.total;
    if (total > max_bytes_ - slack || is_disk_full) {
        uint64_t target = max_bytes_ - 2 * slack;
        if (is_disk_full) target = std::min(target, total - total / SLACK);
        std::sort(first.values.begin(), first.values.end(), [](const auto &a, const auto &b) { return a.used < b.used; });
        for (const auto &value : first.values) {
            if (total <= target) break;
            total -= std::min(total, value.bytes);
            first.ties = (value.used == first.oldest ? first.ties : 0) + value.bytes;
            first.oldest = value.used;
        }
        first.values.clear();
        // A value that has been used since the first scan stays.
        scan(first, true);
        total = first.total;
    }
    lock.lock();
    written_at_scan_ = written;
    used_ = total + writing + (written_ - written);
}

void Directory::scan(Scan &scan, bool evicts) {
    scan.total = 0;
    const int64_t now = now_ns();
    if (const Dir dir = open_dir(fd(), TEMPORARY)) {
        while (const dirent *entry = readdir(dir.get())) {
            struct stat status;
            const int in = dirfd(dir.get());
            if (fstatat(in, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode)) continue;
            const bool is_abandoned = now - modified_ns(status) > ABANDONED_NS;
            if (is_abandoned && unlinkat(in, entry->d_name, 0) == 0) continue;
            scan.total += pages(static_cast<uint64_t>(status.st_size));
        }
    }
    for (const char digit : std::string_view(DIGITS))
        if (const Dir dir = open_dir(fd(), std::string(1, digit).c_str())) scan_values(dirfd(dir.get()), scan, evicts);
}

void Directory::scan_values(int fd, Scan &scan, bool evicts) {
    const Dir dir = open_dir(fd, ".");
    if (!dir) return;
    while (const dirent *entry = readdir(dir.get())) {
        struct stat status;
        if (!is_value_name(entry->d_name) || fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode))
            continue;
        const int64_t used = modified_ns(status);
        const uint64_t bytes = pages(static_cast<uint64_t>(status.st_size));
        const bool is_tie = used == scan.oldest && scan.ties > 0;
        if (evicts && (used < scan.oldest || is_tie) && unlinkat(fd, entry->d_name, 0) == 0) {
            if (is_tie) scan.ties -= std::min(scan.ties, bytes);
            continue;
        }
        scan.total += bytes;
        if (!evicts) scan.values.push_back({used, bytes});
    }
}

}  // namespace pllm_files
