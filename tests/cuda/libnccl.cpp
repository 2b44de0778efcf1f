// A libnccl.so.2 for machines without a device: ranks are threads of one process, each with a device of libcuda.cpp. Functions for tests
// begin with shim_nccl_.
//
// An exchange is queued on its stream. When it runs, it blocks until every peer has taken what this rank sends, because NCCL promises no
// buffers. So an order of exchanges that could block forever on a device blocks here too, until a rank is aborted.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
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

struct UniqueId {
    char bytes[128];
};

// A message that its sender offers.
struct Message {
    const void *from;
    size_t bytes;
    bool taken = false;
};

// The ranks of a communicator. `changed` is notified after each change.
struct Group {
    int size;
    std::vector<int> devices; // of the ranks that have come
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> messages; // by sender and receiver
    std::condition_variable changed;
};

struct Comm {
    std::shared_ptr<Group> group;
    int rank, device;
    bool aborted = false;
    int error = SUCCESS;
};

struct Transfer {
    Comm *comm;
    void *stream;
    bool sends;
    uint64_t address;
    size_t bytes;
    int peer;
};

static std::mutex mutex; // protects everything
static std::map<std::string, std::shared_ptr<Group>> groups;
static std::map<Comm *, std::shared_ptr<Comm>> comms;
static uint64_t exchanges = 0;
static int version = 22703;

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
    static uint64_t created = 0;
    std::lock_guard<std::mutex> lock(mutex);
    memset(id->bytes, 0, sizeof id->bytes);
    memcpy(id->bytes, &++created, sizeof created);
    return SUCCESS;
}

// Waits for all ranks without a limit. As NCCL, it refuses contexts other than the primary one, and two ranks with one device.
API int ncclCommInitRank(Comm **out, int size, UniqueId id, int rank) {
    if (int planned = shim_planned_failure(__func__)) return planned;
    int device, primary;
    if (shim_current_device(&device, &primary) || !primary) return UNHANDLED_CUDA_ERROR;
    if (rank < 0 || rank >= size) return INVALID_ARGUMENT;
    std::unique_lock<std::mutex> lock(mutex);
    auto &group = groups[std::string(id.bytes, sizeof id.bytes)];
    if (!group) group = std::make_shared<Group>();
    group->size = size;
    if (std::count(group->devices.begin(), group->devices.end(), device)) return INVALID_USAGE;
    group->devices.push_back(device);
    group->changed.notify_all();
    auto waiting = group;
    waiting->changed.wait(lock, [&] { return int(waiting->devices.size()) == size; });
    auto comm = std::make_shared<Comm>(Comm{waiting, rank, device});
    *out = comm.get();
    comms[comm.get()] = comm;
    return SUCCESS;
}

API int ncclCommAbort(Comm *comm) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = comms.find(comm);
    if (found == comms.end()) return INVALID_ARGUMENT;
    found->second->aborted = true;
    found->second->group->changed.notify_all();
    comms.erase(found);
    return SUCCESS;
}

API int ncclCommGetAsyncError(Comm *comm, int *error) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = comms.find(comm);
    if (found == comms.end()) return INVALID_ARGUMENT;
    *error = found->second->error;
    return SUCCESS;
}

// An exchange on its stream. It has references of its own, since the communicator may be aborted before.
struct Exchange {
    std::shared_ptr<Comm> comm;
    std::vector<Transfer> transfers;
};

static std::shared_ptr<Message> offer(Group &group, const Transfer &transfer, int rank) {
    auto message = std::make_shared<Message>(Message{reinterpret_cast<const void *>(transfer.address), transfer.bytes});
    group.messages[{rank, transfer.peer}].push_back(message);
    group.changed.notify_all();
    return message;
}

static void take(std::unique_lock<std::mutex> &lock, Comm &comm, const Transfer &transfer) {
    Group &group = *comm.group;
    auto &queue = group.messages[{transfer.peer, comm.rank}];
    group.changed.wait(lock, [&] { return comm.aborted || !queue.empty(); });
    if (comm.aborted) return;
    auto message = queue.front();
    if (message->bytes != transfer.bytes) {
        comm.error = INTERNAL_ERROR;
        group.changed.wait(lock, [&] { return comm.aborted; });
        return;
    }
    memcpy(reinterpret_cast<void *>(transfer.address), message->from, message->bytes);
    queue.pop_front();
    message->taken = true;
    group.changed.notify_all();
}

static void run(void *data) {
    std::unique_ptr<Exchange> exchange(*static_cast<Exchange **>(data));
    int planned = shim_planned_failure("nccl_exchange");
    Comm &comm = *exchange->comm;
    std::unique_lock<std::mutex> lock(mutex);
    exchanges++;
    if (planned) { // the exchange hangs, and reports the error asynchronously, except IN_PROGRESS
        comm.error = planned == IN_PROGRESS ? SUCCESS : planned;
        comm.group->changed.wait(lock, [&] { return comm.aborted; });
    }
    std::vector<std::shared_ptr<Message>> offered;
    for (auto &transfer : exchange->transfers)
        if (transfer.sends && !comm.aborted) offered.push_back(offer(*comm.group, transfer, comm.rank));
    for (auto &transfer : exchange->transfers)
        if (!transfer.sends) take(lock, comm, transfer);
    for (auto &message : offered) comm.group->changed.wait(lock, [&] { return comm.aborted || message->taken; });
    if (!comm.aborted) return;
    for (auto &[ranks, queue] : comm.group->messages) // their memory may be freed now
        queue.erase(std::remove_if(queue.begin(), queue.end(), [&, from = ranks.first](auto &) { return from == comm.rank; }), queue.end());
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
    std::unique_lock<std::mutex> lock(mutex);
    auto found = comms.find(transfers[0].comm);
    if (found == comms.end()) return INVALID_ARGUMENT;
    auto exchange = new Exchange{found->second, transfers};
    lock.unlock();
    return shim_enqueue(transfers[0].stream, run, &exchange, sizeof exchange) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}

// Only exchanges in a group of one communicator and one stream, of bytes.
static int queue(Transfer transfer, int type) {
    int device, primary;
    if (shim_current_device(&device, &primary)) return UNHANDLED_CUDA_ERROR;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = comms.find(transfer.comm);
    if (found == comms.end() || type != 0 || open_group.depth == 0) return INVALID_ARGUMENT;
    Comm &comm = *found->second;
    if (!primary || device != comm.device) return INVALID_USAGE;
    if (transfer.peer < 0 || transfer.peer >= comm.group->size || transfer.peer == comm.rank) return INVALID_ARGUMENT;
    if (transfer.bytes == 0 || !shim_is_allocated(transfer.address, transfer.bytes)) return INVALID_ARGUMENT;
    for (auto &other : open_group.transfers)
        if (other.comm != transfer.comm || other.stream != transfer.stream) return INVALID_USAGE;
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

// Number of ranks that have not been aborted.
API uint64_t shim_nccl_ranks() {
    std::lock_guard<std::mutex> lock(mutex);
    return comms.size();
}
