#include "ring.hpp"

#ifndef PLLM_FILES_URING

namespace pllm_files {

std::unique_ptr<Ring> Ring::create(Directory &, Completions &, std::string &reason) {
    reason = "the library was built without liburing";
    return nullptr;
}

}  // namespace pllm_files

#else

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "directory.hpp"

namespace pllm_files {
namespace {

// Operations at a time. Others wait.
constexpr unsigned SLOTS = 64;
// Entries of the longest chain: open, transfer, close.
constexpr unsigned CHAIN = 3;
// Kernel threads for what cannot be done at once.
constexpr unsigned WORKERS = 8;

constexpr int OPERATIONS[] = {IORING_OP_STATX, IORING_OP_OPENAT, IORING_OP_READV,    IORING_OP_WRITEV,
                              IORING_OP_CLOSE, IORING_OP_RENAMEAT, IORING_OP_UNLINKAT};

class UringRing final : public Ring {
public:
    UringRing(Directory &directory, Completions &completions) : directory_(directory), completions_(completions) {}
    ~UringRing() override;

    // Returns the reason why there is no ring, or nullptr.
    const char *open();
    void start(Job job) override;
    void progress() override;

private:
    // A value is first looked up. Then its file is opened, transferred and closed. A file that was
    // written is renamed, or removed after an error.
    enum Stage { LOOK_UP, TRANSFER, RENAME, REMOVE };
    enum Step : unsigned { STATX, OPEN, DATA, CLOSE, LAST };

    struct Slot {
        Job job;
        Stage stage;
        std::string name, temporary;
        Reservation reservation;
        struct statx status;
        int results[LAST + 1];
        unsigned pending;  // entries whose result is missing
    };

    io_uring_sqe *entry() { return io_uring_get_sqe(&ring_); }
    void queue(io_uring_sqe *sqe, unsigned slot, Step step, unsigned flags = 0);
    void run(unsigned slot, void (UringRing::*step)(unsigned));
    void begin(unsigned slot);
    void end_stage(unsigned slot);
    void after_lookup(unsigned slot);
    void transfer(unsigned slot);
    void after_transfer(unsigned slot);
    void rename_or_remove(unsigned slot, Stage stage);
    void finish(unsigned slot, uint32_t status, uint64_t bytes = 0);
    void reap();

    Directory &directory_;
    Completions &completions_;
    io_uring ring_;
    bool is_open_ = false, stops_ = false;
    std::vector<Slot> slots_{SLOTS};
    std::vector<unsigned> free_;
    std::deque<Job> waiting_;
};

const char *UringRing::open() {
    if (io_uring_queue_init(SLOTS * CHAIN, &ring_, 0) != 0) return "the system does not permit io_uring";
    is_open_ = true;
    io_uring_probe *probe = io_uring_get_probe_ring(&ring_);
    bool is_known = probe != nullptr;
    for (const int operation : OPERATIONS) is_known = is_known && io_uring_opcode_supported(probe, operation);
    io_uring_free_probe(probe);
    if (!is_known || io_uring_register_files_sparse(&ring_, SLOTS) != 0) return "the kernel is older than Linux 5.19";
    unsigned workers[2] = {WORKERS, WORKERS};
    io_uring_register_iowq_max_workers(&ring_, workers);
    if (io_uring_register_eventfd(&ring_, completions_.event()) != 0) return "io_uring has no event descriptor";
    for (unsigned slot = 0; slot < SLOTS; slot++) free_.push_back(slot);
    return nullptr;
}

// Waits for the operations in flight, whose buffers the kernel uses.
UringRing::~UringRing() {
    if (!is_open_) return;
    stops_ = true;
    waiting_.clear();
    while (free_.size() < SLOTS) {
        io_uring_submit_and_wait(&ring_, 1);
        reap();
    }
    io_uring_queue_exit(&ring_);
}

void UringRing::start(Job job) { waiting_.push_back(std::move(job)); }

void UringRing::progress() {
    reap();
    for (; !waiting_.empty() && !free_.empty(); waiting_.pop_front()) {
        const unsigned slot = free_.back();
        free_.pop_back();
        slots_[slot].job = std::move(waiting_.front());
        run(slot, &UringRing::begin);
    }
    io_uring_submit(&ring_);
    reap();  // reads from the page cache end at once
    io_uring_submit(&ring_);
}

// The submission queue has CHAIN entries for each slot, so there is always one. Call it after
// io_uring_prep, which clears the entry.
void UringRing::queue(io_uring_sqe *sqe, unsigned slot, Step step, unsigned flags) {
    sqe->user_data = uint64_t{slot} * 8 + step;
    sqe->flags |= static_cast<uint8_t>(flags);
    slots_[slot].pending++;
}

void UringRing::reap() {
    io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
        const auto slot = static_cast<unsigned>(cqe->user_data / 8);
        slots_[slot].results[cqe->user_data % 8] = cqe->res;
        io_uring_cqe_seen(&ring_, cqe);
        if (--slots_[slot].pending == 0) run(slot, &UringRing::end_stage);
    }
}

// Runs a step of an operation, which fails if the memory is exhausted.
void UringRing::run(unsigned slot, void (UringRing::*step)(unsigned)) {
    try {
        (this->*step)(slot);
    } catch (const std::bad_alloc &) {
        finish(slot, PLLM_KV_FAILED);
    }
}

void UringRing::begin(unsigned slot) {
    Slot &s = slots_[slot];
    s.stage = LOOK_UP;
    s.name = Directory::value_name(s.job.keys.data());
    io_uring_sqe *sqe = entry();
    io_uring_prep_statx(sqe, directory_.fd(), s.name.c_str(), AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_SIZE, &s.status);
    queue(sqe, slot, STATX);
}

void UringRing::end_stage(unsigned slot) {
    Slot &s = slots_[slot];
    switch (s.stage) {
        case LOOK_UP: return after_lookup(slot);
        case TRANSFER: return after_transfer(slot);
        case RENAME:
            if (s.results[LAST] == 0) return finish(slot, PLLM_KV_DONE);
            return rename_or_remove(slot, REMOVE);
        case REMOVE: return finish(slot, PLLM_KV_FAILED);
    }
}

void UringRing::after_lookup(unsigned slot) {
    Slot &s = slots_[slot];
    const int error = -s.results[STATX];
    const bool is_file = error == 0 && S_ISREG(s.status.stx_mode);
    const bool fits = is_file && s.status.stx_size == s.job.len;
    if (stops_) return finish(slot, PLLM_KV_FAILED);
    if (s.job.kind == Job::GET) {
        if (error == ENOENT) return finish(slot, PLLM_KV_MISSING);
        // The open of a pipe with this name would not return.
        if (!is_file) return finish(slot, PLLM_KV_FAILED);
        if (!fits) return finish(slot, PLLM_KV_DONE, s.status.stx_size);
    } else {
        if (fits) return finish(slot, PLLM_KV_DONE);
        s.reservation = directory_.reserve(s.job.len);
        if (!s.reservation) return finish(slot, PLLM_KV_FAILED);
        s.temporary = directory_.temporary_name();
    }
    transfer(slot);
}

void UringRing::transfer(unsigned slot) {
    Slot &s = slots_[slot];
    s.stage = TRANSFER;
    const auto parts = static_cast<unsigned>(s.job.parts.size());
    const int file = static_cast<int>(slot);
    io_uring_sqe *open = entry(), *data = entry(), *close = entry();
    if (s.job.kind == Job::GET) {
        io_uring_prep_openat_direct(open, directory_.fd(), s.name.c_str(), O_RDONLY | O_NOFOLLOW, 0, slot);
        io_uring_prep_readv(data, file, s.job.parts.data(), parts, 0);
    } else {
        io_uring_prep_openat_direct(open, directory_.fd(), s.temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600, slot);
        io_uring_prep_writev(data, file, s.job.parts.data(), parts, 0);
    }
    io_uring_prep_close_direct(close, slot);
    // The file is closed whatever the result of the transfer is. A write by a kernel thread is not
    // subject to the signals of the host, such as SIGXFSZ.
    queue(open, slot, OPEN, IOSQE_IO_LINK);
    queue(data, slot, DATA, IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK | (s.job.kind == Job::PUT ? IOSQE_ASYNC : 0u));
    queue(close, slot, CLOSE);
}

void UringRing::after_transfer(unsigned slot) {
    Slot &s = slots_[slot];
    const int error = -s.results[OPEN], done = s.results[DATA];
    if (s.job.kind == Job::GET) {
        if (error == ENOENT) return finish(slot, PLLM_KV_MISSING);
        if (error > 0 || done < 0) return finish(slot, PLLM_KV_FAILED);
        return finish(slot, PLLM_KV_DONE, static_cast<uint64_t>(done));
    }
    if (error <= 0 && static_cast<uint64_t>(std::max(done, 0)) == s.job.len) return rename_or_remove(slot, RENAME);
    directory_.on_write_error(error > 0 ? error : done < 0 ? -done : ENOSPC);
    if (error > 0) return finish(slot, PLLM_KV_FAILED);
    rename_or_remove(slot, REMOVE);
}

void UringRing::rename_or_remove(unsigned slot, Stage stage) {
    Slot &s = slots_[slot];
    s.stage = stage;
    io_uring_sqe *sqe = entry();
    if (stage == RENAME) {
        io_uring_prep_renameat(sqe, directory_.fd(), s.temporary.c_str(), directory_.fd(), s.name.c_str(), 0);
    } else {
        io_uring_prep_unlinkat(sqe, directory_.fd(), s.temporary.c_str(), 0);
    }
    queue(sqe, slot, LAST);
}

void UringRing::finish(unsigned slot, uint32_t status, uint64_t bytes) {
    slots_[slot].reservation = Reservation();
    completions_.add(slots_[slot].job.token, status, bytes);
    free_.push_back(slot);  // within the reserved memory
}

}  // namespace

std::unique_ptr<Ring> Ring::create(Directory &directory, Completions &completions, std::string &reason) {
    auto ring = std::make_unique<UringRing>(directory, completions);
    const char *problem = ring->open();
    if (!problem) return ring;
    reason = problem;
    return nullptr;
}

}  // namespace pllm_files

#endif
