// A libnccl.so.2 for machines without a device: ranks are threads of one process or of several, each
// with a device of libcuda.cpp. Functions for tests begin with shim_nccl_.
//
// Messages are copied through memory that all ranks share. An exchange is queued on its stream. When
// it runs, it blocks until every peer has taken what this rank sends, because NCCL promises no
// buffers. So an order of exchanges that could block forever on a device blocks here too, until the
// rank is aborted. The end of a peer's process does not end the wait.
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

// libcuda.cpp
API int shim_enqueue(void *stream, void (*function)(void *data), const void *data, size_t bytes);
API int shim_planned_failure(const char *api);
API int shim_current_device(int *device, int *primary);
API int shim_is_allocated(uint64_t address, size_t bytes);

enum Result { SUCCESS, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };

const int MAX_RANKS = 64;
const size_t PART_BYTES = 4 << 10; // less than messages of the tests have

// Names the shared memory of a group, a file without a path that the creator of the group has open.
// The system frees it with the last process that uses it, also if processes are killed.
struct UniqueId {
    pid_t process;
    int file;
    char unused[120];
};
static_assert(sizeof(UniqueId) == 128);

// A message from one rank to another, a part at a time. The sender fills an empty box, the receiver empties it.
struct Box {
    std::atomic<bool> full;
    size_t message_bytes, part_bytes;
    char part[PART_BYTES];
};

struct Member {
    std::atomic<pid_t> process; // 0: the rank has not joined
    int device;
};

// The shared memory of a communicator, zero at first. It has no locks, because a process may be killed
// at any time.
struct Group {
    std::atomic<uint32_t> changes; // a futex, which counts the changes of the other fields
    std::atomic<int> size, members_joined;
    std::atomic<bool> closed; // whether the creator has closed the file
    Member members[MAX_RANKS];
    Box boxes[MAX_RANKS][MAX_RANKS]; // by sender and receiver
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

static void notify(Group &group) {
    group.changes++;
    syscall(SYS_futex, &group.changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until a condition is met. `is_met` is called after each change.
template <class Condition> void wait(Group &group, Condition is_met) {
    for (;;) {
        uint32_t seen = group.changes;
        if (is_met()) return;
        syscall(SYS_futex, &group.changes, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
}

// Returns null if the creator has ended or has closed the file.
static std::shared_ptr<Group> open_group_of(const UniqueId &id) {
    std::string path = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.file);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    void *mapped = mmap(nullptr, sizeof(Group), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return nullptr;
    return {static_cast<Group *>(mapped), [](Group *group) { munmap(group, sizeof *group); }};
}

struct Comm {
    std::shared_ptr<Group> group;
    int rank, device;
    std::atomic<bool> aborted{false};
    std::atomic<int> error{SUCCESS};
};

struct Transfer {
    Comm *comm;
    void *stream;
    bool sends;
    uint64_t address;
    size_t bytes;
    int peer;
    size_t moved = 0; // bytes that were sent or received
};

static std::mutex mutex; // protects the following variables
static std::map<Comm *, std::shared_ptr<Comm>> comms;
static uint64_t exchanges = 0;
static int version = 22703;
static std::atomic<bool> holds_aborts{false};

struct OpenGroup {
    int depth = 0;
    std::vector<Transfer> transfers;
};
static thread_local OpenGroup open_group;

API int ncclGetVersion(int *out) {
    *out = version;
    return shim_planned_failure(__func__);
}

API const char *ncclGetErrorString(int result) {
    const char *texts[] = {"no error",         "unhandled cuda error", "unhandled system error",
                           "internal error",   "invalid argument",     "invalid usage",
                           "remote process exited or there was a network error"};
    return result >= 0 && result <= REMOTE_ERROR ? texts[result] : "unknown result code";
}

API int ncclGetUniqueId(UniqueId *id) {
    if (int planned = shim_planned_failure(__func__)) return planned;
    int file = memfd_create("nccl", MFD_CLOEXEC);
    if (file < 0) return SYSTEM_ERROR;
    if (ftruncate(file, sizeof(Group))) {
        close(file);
        return SYSTEM_ERROR;
    }
    *id = {getpid(), file, {}};
    return SUCCESS;
}

// Adds a rank to its group. Like NCCL, it refuses two ranks with one device. Each process has devices of
// its own.
static int enter(Group &group, int size, int rank, int device) {
    std::lock_guard<std::mutex> lock(mutex); // two threads of this process may enter
    for (auto &other : group.members)
        if (other.process == getpid() && other.device == device) return INVALID_USAGE;
    int unknown = 0;
    if (!group.size.compare_exchange_strong(unknown, size) && unknown != size) return INVALID_USAGE;
    pid_t absent = 0;
    if (!group.members[rank].process.compare_exchange_strong(absent, getpid())) return INVALID_USAGE;
    group.members[rank].device = device;
    group.members_joined++;
    notify(group);
    return SUCCESS;
}

// Waits for all ranks without a limit. Like NCCL, it refuses contexts other than the primary one.
API int ncclCommInitRank(Comm **out, int size, UniqueId id, int rank) {
    if (int planned = shim_planned_failure(__func__)) return planned;
    int device, primary;
    if (shim_current_device(&device, &primary) || !primary) return UNHANDLED_CUDA_ERROR;
    if (rank < 0 || rank >= size || size > MAX_RANKS) return INVALID_ARGUMENT;
    auto group = open_group_of(id);
    if (!group) return SYSTEM_ERROR;
    if (int refused = enter(*group, size, rank, device)) return refused;
    wait(*group, [&] { return group->members_joined == size; });
    if (id.process == getpid() && !group->closed.exchange(true)) close(id.file);
    auto comm = std::make_shared<Comm>();
    comm->group = group, comm->rank = rank, comm->device = device;
    std::lock_guard<std::mutex> lock(mutex);
    *out = comm.get();
    comms[comm.get()] = comm;
    return SUCCESS;
}

static std::shared_ptr<Comm> find(Comm *comm) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = comms.find(comm);
    return found == comms.end() ? nullptr : found->second;
}

// Ends the exchanges at once. NCCL then waits for its own threads, which shim_nccl_hold_aborts simulates.
API int ncclCommAbort(Comm *handle) {
    std::unique_lock<std::mutex> lock(mutex);
    auto ended = comms.extract(handle);
    lock.unlock();
    if (ended.empty()) return INVALID_ARGUMENT;
    ended.mapped()->aborted = true;
    notify(*ended.mapped()->group);
    while (holds_aborts) usleep(1000);
    return SUCCESS;
}

API int ncclCommGetAsyncError(Comm *handle, int *error) {
    auto comm = find(handle);
    if (!comm) return INVALID_ARGUMENT;
    *error = comm->error;
    return SUCCESS;
}

// An exchange on its stream. It has references of its own, since the communicator may be aborted
// before.
struct Exchange {
    std::shared_ptr<Comm> comm;
    std::vector<Transfer> transfers;
};

static void report_and_hang(Comm &comm, int error) {
    comm.error = error;
    wait(*comm.group, [&] { return comm.aborted.load(); });
}

// Moves the next part of a message, if its box permits it.
static bool move_part(Comm &comm, Transfer &transfer) {
    Group &group = *comm.group;
    Box &box = transfer.sends ? group.boxes[comm.rank][transfer.peer] : group.boxes[transfer.peer][comm.rank];
    if (transfer.moved == transfer.bytes || box.full == transfer.sends) return false;
    char *own = reinterpret_cast<char *>(transfer.address) + transfer.moved;
    if (transfer.sends) {
        box.message_bytes = transfer.bytes;
        box.part_bytes = std::min(PART_BYTES, transfer.bytes - transfer.moved);
        memcpy(box.part, own, box.part_bytes);
    } else if (box.message_bytes != transfer.bytes) {
        report_and_hang(comm, INTERNAL_ERROR);
        return false;
    } else {
        memcpy(own, box.part, box.part_bytes);
    }
    transfer.moved += box.part_bytes;
    box.full = transfer.sends;
    notify(group);
    return true;
}

// Returns whether the receiver has the whole message.
static bool is_complete(const Comm &comm, const Transfer &transfer) {
    return transfer.moved == transfer.bytes && !(transfer.sends && comm.group->boxes[comm.rank][transfer.peer].full);
}

static void run(void *data) {
    std::unique_ptr<Exchange> exchange(*static_cast<Exchange **>(data));
    int planned = shim_planned_failure("nccl_exchange");
    Comm &comm = *exchange->comm;
    {
        std::lock_guard<std::mutex> lock(mutex);
        exchanges++;
    }
    // The exchange hangs. The failure is reported asynchronously, except IN_PROGRESS.
    if (planned) report_and_hang(comm, planned == IN_PROGRESS ? SUCCESS : planned);
    auto &transfers = exchange->transfers;
    wait(*comm.group, [&] {
        for (auto &transfer : transfers)
            while (!comm.aborted && move_part(comm, transfer)) continue;
        auto completed = [&](const Transfer &transfer) { return is_complete(comm, transfer); };
        return comm.aborted || std::all_of(transfers.begin(), transfers.end(), completed);
    });
}

API int ncclGroupStart() {
    open_group.depth++;
    return shim_planned_failure(__func__);
}

API int ncclGroupEnd() {
    if (open_group.depth == 0) return INVALID_USAGE;
    if (--open_group.depth > 0) return SUCCESS;
    std::vector<Transfer> transfers = std::move(open_group.transfers);
    open_group.transfers.clear();
    if (int planned = shim_planned_failure(__func__)) return planned;
    if (transfers.empty()) return SUCCESS;
    auto comm = find(transfers[0].comm);
    if (!comm) return INVALID_ARGUMENT;
    auto exchange = new Exchange{comm, transfers};
    return shim_enqueue(transfers[0].stream, run, &exchange, sizeof exchange) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}

// Only exchanges in a group of one communicator and one stream, of bytes, with one message to and from
// each peer. A rank is its own peer only if it is alone.
static int queue(Transfer transfer, int type) {
    int device, primary;
    if (shim_current_device(&device, &primary)) return UNHANDLED_CUDA_ERROR;
    auto comm = find(transfer.comm);
    if (!comm || type != 0 || open_group.depth == 0) return INVALID_ARGUMENT;
    if (!primary || device != comm->device) return INVALID_USAGE;
    if (transfer.peer < 0 || transfer.peer >= comm->group->size) return INVALID_ARGUMENT;
    if (transfer.peer == comm->rank && comm->group->size > 1) return INVALID_ARGUMENT;
    if (transfer.bytes == 0 || !shim_is_allocated(transfer.address, transfer.bytes)) return INVALID_ARGUMENT;
    for (auto &other : open_group.transfers) {
        if (other.comm != transfer.comm || other.stream != transfer.stream) return INVALID_USAGE;
        if (other.peer == transfer.peer && other.sends == transfer.sends) return INVALID_USAGE;
    }
    open_group.transfers.push_back(transfer);
    return SUCCESS;
}

API int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    if (int planned = shim_planned_failure(__func__)) return planned;
    return queue({comm, stream, true, reinterpret_cast<uint64_t>(from), count, peer}, type);
}

API int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    if (int planned = shim_planned_failure(__func__)) return planned;
    return queue({comm, stream, false, reinterpret_cast<uint64_t>(to), count, peer}, type);
}

// ---- functions for tests

// Number of exchanges that have begun.
API uint64_t shim_nccl_exchanges() {
    std::lock_guard<std::mutex> lock(mutex);
    return exchanges;
}

// Calls of ncclCommAbort do not return while this is set.
API void shim_nccl_hold_aborts(int hold) {
    holds_aborts = hold != 0;
}

// Number of ranks that have not been aborted.
API uint64_t shim_nccl_ranks() {
    std::lock_guard<std::mutex> lock(mutex);
    return comms.size();
}
