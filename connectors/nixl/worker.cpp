#include "worker.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <cinttypes>
#include <set>

namespace pllm_nixl {
namespace {

using pllm_connector::Error;
using pllm_connector::Job;
using pllm_connector::total_len;

constexpr size_t MAX_IN_FLIGHT = 4096;
// Entries that are announced again between operations.
constexpr size_t MAX_ANNOUNCEMENTS = 256;
// Entries expire, so that those of a process that has ended do not stay. They are announced again in
// half of this time.
constexpr std::chrono::hours ENTRY_LIFE{24};
// The agent names no descriptor that is readable when a transfer ends.
constexpr std::chrono::microseconds TRANSFER_INTERVAL{100};
constexpr std::chrono::milliseconds LEAVE_TIMEOUT{200};
// Removes an entry if it is the expected one.
constexpr char REMOVE_SCRIPT[] =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0";

std::string random_name() {
    uint8_t bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw Error{PLLM_E_IO, "the system has no random numbers; retry"};
    return pllm_connector::hex(bytes, sizeof bytes);
}

std::string text_of(std::chrono::milliseconds time) { return std::to_string(time.count()); }

std::string text_of(const Location &location) {
    char text[128];
    std::snprintf(text, sizeof text, "1 %s %" PRIx64 " %" PRIx64 " %" PRIx64, location.agent.c_str(), location.address, location.len,
                  location.sequence);
    return text;
}

// Reads an entry of the index. Returns false if it is of another version, or no entry.
bool read_location(const std::string &text, Location &location) {
    char agent[33];
    if (std::sscanf(text.c_str(), "1 %32[0-9a-f] %" SCNx64 " %" SCNx64 " %" SCNx64, agent, &location.address, &location.len,
                    &location.sequence) != 4)
        return false;
    location.agent = agent;
    return text_of(location) == text;
}

Key key_at(const Job &job, size_t position) {
    Key key;
    std::memcpy(key.data(), job.keys.data() + position * KEY_BYTES, KEY_BYTES);
    return key;
}

void copy_out(const char *from, const pllm_connector::Parts &parts) {
    for (const iovec &part : parts) {
        std::memcpy(part.iov_base, from, part.iov_len);
        from += part.iov_len;
    }
}

}  // namespace

Memory::Memory(size_t len) : len_(len) {
    void *data = mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        throw Error{PLLM_E_OUT_OF_MEMORY, "the system has no " + std::to_string(len) + " bytes of memory; lower max_bytes or staging_bytes"};
    data_ = static_cast<char *>(data);
}

Memory::~Memory() { munmap(data_, len_); }

Worker::Worker(const Settings &settings, const Api &api, const std::string &backend, pllm_connector::Completions &completions)
    : settings_(settings),
      completions_(completions),
      memory_(settings.max_bytes + settings.staging_bytes),
      agent_(api, random_name(), backend, memory_.data(), memory_.len()),
      metadata_(agent_.metadata()),
      pool_(memory_.data(), settings.max_bytes),
      staging_(memory_.data() + settings.max_bytes, settings.staging_bytes),
      index_(settings.server, stop_),
      peers_(agent_, index_, settings.prefix, settings.lease) {
    thread_ = pllm_connector::spawn([this] { run(); });
}

Worker::~Worker() {
    stops_ = true;
    stop_.signal();
    wake_.signal();
    thread_.join();
}

bool Worker::start(Job job) {
    if (in_flight_ >= MAX_IN_FLIGHT) return false;
    completions_.expect();
    in_flight_++;
    try {
        std::lock_guard lock(mutex_);
        jobs_.push_back(std::move(job));
    } catch (...) {
        in_flight_--;
        completions_.cancel_expected();
        throw;
    }
    wake_.signal();
    return true;
}

void Worker::run() {
    std::vector<Task> tasks;
    while (!stops_) {
        try {
            take_jobs(tasks);
            process(tasks);
        } catch (...) {
            // Memory is exhausted. The commands refer to the tasks.
            index_.clear();
            for (Task &task : tasks) complete(task.job, task.is_done, PLLM_KV_FAILED);
        }
        tasks.clear();
        progress_reads();
        wait(Clock::now());
    }
    leave();
}

void Worker::take_jobs(std::vector<Task> &tasks) {
    wake_.clear();
    std::lock_guard lock(mutex_);
    tasks.reserve(jobs_.size());
    for (Job &job : jobs_) tasks.push_back(Task{std::move(job)});
    jobs_.clear();
}

// Two exchanges with the index at most: entries, and the leases of agents that are not known.
void Worker::process(std::vector<Task> &tasks) {
    const auto now = Clock::now();
    if (now >= next_renewal_) renew_lease(now);
    for (Task &task : tasks) begin(task);
    announce();
    index_.run();
    look_up_peers(tasks);
    index_.run();
    for (Task &task : tasks) end(task);
}

void Worker::begin(Task &task) {
    switch (task.job.kind) {
        case Job::PUT: return put(task);
        case Job::REMOVE: return remove(task);
        case Job::GET:
        case Job::EXISTS: return find(task);
    }
}

void Worker::put(Task &task) {
    std::vector<Value> evicted;
    const Value *value = pool_.put(key_at(task.job, 0), task.job.parts, task.job.len, evicted);
    for (const Value &old : evicted)
        if (!value || old.key != value->key) remove_entry(old.key, location_of(old));
    if (!value) return complete(task.job, task.is_done, PLLM_KV_FAILED);
    set_entry(*value, [this, &task](const Reply &reply) {
        complete(task.job, task.is_done, reply.kind == Reply::DONE ? PLLM_KV_DONE : PLLM_KV_FAILED);
    });
}

// A value of another process is not removed: that process may have replaced it in the meantime.
void Worker::remove(Task &task) {
    const Key key = key_at(task.job, 0);
    const Value *value = pool_.find(key);
    if (!value) return complete(task.job, task.is_done, PLLM_KV_MISSING);
    // Without the index, the entry names a header that is no longer there.
    remove_entry(key, location_of(*value), [this, &task](const Reply &) { complete(task.job, task.is_done, PLLM_KV_DONE); });
    pool_.remove(key);
}

// Own values need no index.
void Worker::find(Task &task) {
    for (size_t i = 0; i < task.job.keys.size() / KEY_BYTES; i++) {
        const Key key = key_at(task.job, i);
        const Value *value = pool_.find(key);
        if (!value) {
            locate(task, i, key);
        } else if (task.job.kind == Job::EXISTS) {
            task.job.found[i] = 1;
        } else {
            if (value->len == task.job.len) copy_out(pool_.data(*value), task.job.parts);
            complete(task.job, task.is_done, PLLM_KV_DONE, value->len);
        }
    }
}

void Worker::locate(Task &task, size_t position, const Key &key) {
    index_.add({"GET", name_of(key)}, [this, &task, position, key](const Reply &reply) {
        if (reply.kind == Reply::NOTHING) return;
        Location location;
        const bool is_entry = reply.kind == Reply::TEXT && read_location(reply.text, location);
        if (!is_entry) {
            task.has_failed = true;
        } else if (location.agent == agent_.name()) {
            // This store has evicted the value, and could not remove the entry.
            remove_entry(key, reply.text);
        } else {
            task.located.emplace_back(position, std::move(location));
        }
    });
}

void Worker::look_up_peers(const std::vector<Task> &tasks) {
    const auto now = Clock::now();
    std::set<std::string_view> names;
    for (const Task &task : tasks)
        for (const auto &[position, location] : task.located)
            if (names.insert(location.agent).second) peers_.look_up(location.agent, now);
}

void Worker::end(Task &task) {
    if (task.is_done) return;
    if (task.has_failed) return complete(task.job, task.is_done, PLLM_KV_FAILED);
    const auto now = Clock::now();
    for (const auto &[position, location] : task.located)
        if (peers_.has_ended(location.agent)) remove_entry(key_at(task.job, position), text_of(location));
    if (task.job.kind == Job::GET) return end_get(task);
    for (const auto &[position, location] : task.located) task.job.found[position] = peers_.is_usable(location.agent, now);
    complete(task.job, task.is_done, PLLM_KV_DONE);
}

void Worker::end_get(Task &task) {
    const auto now = Clock::now();
    if (task.located.empty() || !peers_.is_usable(task.located[0].second.agent, now))
        return complete(task.job, task.is_done, PLLM_KV_MISSING);
    Location &location = task.located[0].second;
    if (location.len != task.job.len) return complete(task.job, task.is_done, PLLM_KV_DONE, location.len);
    if (task.job.len > staging_.capacity() - sizeof(Header)) return complete(task.job, task.is_done, PLLM_KV_FAILED);
    reads_.push_back({std::move(task.job), std::move(location), now + settings_.server.timeout});
    task.is_done = true;
}

void Worker::complete(Job &job, bool &is_done, uint32_t status, uint64_t bytes) {
    if (is_done) return;
    is_done = true;
    in_flight_--;
    completions_.add(job.token, status, bytes);
}

size_t Worker::size_of(const Read &read) { return sizeof(Header) + read.location.len; }

void Worker::progress_reads() {
    const auto now = Clock::now();
    for (auto read = reads_.begin(); read != reads_.end();) read = progress(*read, now) ? reads_.erase(read) : std::next(read);
}

// Returns true if nothing of the read is left. A read that has timed out is missing; its staging memory is
// free when the transfer has ended.
bool Worker::progress(Read &read, Clock::time_point now) {
    if (!read.request && !read.is_done) start_read(read, now);
    if (!read.is_done) peers_.use(read.location.agent, now);
    const Transfer state = read.request ? agent_.state(read.request) : Transfer::RUNNING;
    if (state == Transfer::DONE && !read.is_done) end_read(read);
    const bool is_late = now >= read.deadline && !read.is_done;
    if (read.request && (state == Transfer::FAILED || is_late)) peers_.fail(read.location.agent, now);
    if (state == Transfer::FAILED || is_late) complete(read.job, read.is_done, PLLM_KV_MISSING);
    if (!read.is_done || (read.request && !agent_.release(read.request))) return false;
    if (read.staging) staging_.free(read.staging, size_of(read));
    return true;
}

// Without staging memory, the read waits.
void Worker::start_read(Read &read, Clock::time_point now) {
    if (!peers_.is_usable(read.location.agent, now)) return complete(read.job, read.is_done, PLLM_KV_MISSING);
    if (!read.staging) read.staging = staging_.allocate(size_of(read));
    if (!read.staging) return;
    read.request = agent_.start_read(read.location.agent, read.staging, read.location.address, size_of(read));
    if (read.request) return;
    peers_.fail(read.location.agent, now);
    complete(read.job, read.is_done, PLLM_KV_MISSING);
}

// If the owner has overwritten the value, the header names another one. If the owner overwrites it during
// the transfer, the bytes are damaged, which the checksum of the engine detects.
void Worker::end_read(Read &read) {
    Header header;
    std::memcpy(&header, read.staging, sizeof header);
    const Key key = key_at(read.job, 0);
    const bool is_value = header.magic == MAGIC && header.key == key && header.len == read.location.len &&
                          header.sequence == read.location.sequence;
    if (is_value) {
        copy_out(read.staging + sizeof header, read.job.parts);
        complete(read.job, read.is_done, PLLM_KV_DONE, read.location.len);
    } else {
        remove_entry(key, text_of(read.location));
        complete(read.job, read.is_done, PLLM_KV_MISSING);
    }
}

// Entries that other processes cannot have, or have removed, are announced again: after the server has
// lost its data, and after the lease has ended.
void Worker::renew_lease(Clock::time_point now) {
    const auto interval = settings_.lease / 3;
    next_renewal_ = now + interval;
    bool is_renewed = false;
    index_.add({"PSETEX", peers_.name_of_lease(agent_.name()), text_of(settings_.lease), metadata_},
               [&](const Reply &reply) { is_renewed = reply.kind == Reply::DONE; });
    index_.run();
    peers_.sweep(now);
    if (!is_renewed) return;
    const auto values = pool_.values().size();
    const bool is_new = index_.connections() != announced_connections_ || now > renewed_ + settings_.lease;
    const auto intervals = static_cast<size_t>(ENTRY_LIFE / 2 / interval) + 1;
    announcements_ = is_new ? values : announcements_ + values / intervals + 1;
    announced_connections_ = index_.connections();
    renewed_ = now;
}

// Writes some entries again. The next ones follow after the last ones, and after the newest value the
// oldest one.
void Worker::announce() {
    const auto &values = pool_.values();
    announcements_ = std::min(announcements_, values.size());
    for (size_t i = 0; i < MAX_ANNOUNCEMENTS && announcements_ > 0; i++, announcements_--) {
        const uint64_t first = values.front().sequence;
        if (next_announced_ < first || next_announced_ > values.back().sequence) next_announced_ = first;
        const Value &value = values[next_announced_++ - first];
        if (pool_.is_live(value)) set_entry(value, {});
    }
}

void Worker::set_entry(const Value &value, Index::Then then) {
    index_.add({"PSETEX", name_of(value.key), text_of(ENTRY_LIFE), location_of(value)}, std::move(then));
}

void Worker::remove_entry(const Key &key, const std::string &location, Index::Then then) {
    index_.add({"EVAL", REMOVE_SCRIPT, "1", name_of(key), location}, std::move(then));
}

std::string Worker::location_of(const Value &value) const {
    return text_of(Location{agent_.name(), reinterpret_cast<uint64_t>(pool_.address(value)), value.len, value.sequence});
}

std::string Worker::name_of(const Key &key) const { return settings_.prefix + pllm_connector::hex(key.data(), key.size()); }

void Worker::wait(Clock::time_point now) const {
    std::chrono::nanoseconds left = std::max<Clock::duration>(next_renewal_ - now, Clock::duration::zero());
    if (announcements_ > 0) left = std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds(1));
    if (!reads_.empty()) left = std::min<std::chrono::nanoseconds>(left, TRANSFER_INTERVAL);
    pollfd event = {wake_.fd(), POLLIN, 0};
    const timespec timeout = {static_cast<time_t>(left.count() / 1'000'000'000), static_cast<long>(left.count() % 1'000'000'000)};
    ppoll(&event, 1, &timeout, nullptr);
}

// Ends the lease, so that other processes need not wait for its end.
void Worker::leave() {
    stop_.clear();
    index_.clear();
    index_.add({"UNLINK", peers_.name_of_lease(agent_.name())});
    index_.run(LEAVE_TIMEOUT);
    for (const Read &read : reads_) {
        if (!read.request) continue;
        agent_.unload(read.location.agent);
        agent_.release(read.request);
    }
}

}  // namespace pllm_nixl
