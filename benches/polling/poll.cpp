// Events per second and the host's CPU time per event, from C++: one queue for all streams, and one queue per stream in an epoll loop.
#include <sys/epoll.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <pagedllm.hpp>
#include <vector>

extern "C" pllm_engine *bench_engine_create(uint64_t pace_us);
extern "C" uint64_t bench_driver_cpu_ns(void);

using Clock = std::chrono::steady_clock;

static double host_cpu_seconds() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    auto seconds = [](timeval time) { return double(time.tv_sec) + double(time.tv_usec) * 1e-6; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime) - double(bench_driver_cpu_ns()) * 1e-9;
}

static uint64_t sum;  // of the outputs, so that the compiler keeps the reads

static uint64_t take(const pagedllm::QueueView &queue, std::chrono::milliseconds timeout) {
    const pagedllm::Outputs outputs = queue.poll(timeout).value();
    for (const pagedllm::Output output : outputs) sum += output.tokens[0] + output.request;
    return outputs.size();
}

// Calls `read`, which returns the number of events, for a second. Prints the row.
template <class Read>
static void measure(const char *how, size_t streams, uint64_t pace_us, Read read) {
    for (const auto end = Clock::now() + std::chrono::milliseconds(200); Clock::now() < end;) read();
    const auto begin = Clock::now();
    const double cpu = host_cpu_seconds();
    uint64_t events = 0;
    while (Clock::now() < begin + std::chrono::seconds(1)) events += read();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::printf("| C++ | %s | %zu | %s | %.0f | %.2f |\n", how, streams, pace_us ? "1ms" : "none", double(events) / seconds,
                (host_cpu_seconds() - cpu) * 1e6 / double(events));
    std::fflush(stdout);
}

static const std::vector<uint32_t> prompt{1};

static pagedllm::Request request() { return {pagedllm::Span<const uint32_t>(prompt)}; }

static void one_queue(size_t streams, uint64_t pace_us) {
    auto engine = pagedllm::Engine::adopt(bench_engine_create(pace_us));
    const auto queue = engine.create_queue(4096).value();
    for (size_t i = 0; i < streams; i++) (void)engine.add(request(), queue).value();
    engine.start().value();
    measure("one queue, blocking poll", streams, pace_us, [&] { return take(queue, pagedllm::forever); });
}

static void queue_per_stream(size_t streams, uint64_t pace_us) {
    auto engine = pagedllm::Engine::adopt(bench_engine_create(pace_us));
    std::vector<pagedllm::Queue> queues;
    const int loop = epoll_create1(EPOLL_CLOEXEC);
    for (size_t i = 0; i < streams; i++) {
        queues.push_back(engine.create_queue(64).value());
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = i;
        epoll_ctl(loop, EPOLL_CTL_ADD, queues.back().event_fd().value(), &event);
        (void)engine.add(request(), queues.back()).value();
    }
    engine.start().value();
    std::vector<epoll_event> ready(streams);
    measure("one queue per stream, epoll", streams, pace_us, [&] {
        uint64_t events = 0;
        const int count = epoll_wait(loop, ready.data(), int(ready.size()), -1);
        for (int i = 0; i < count; i++) events += take(queues[ready[size_t(i)].data.u64], std::chrono::milliseconds(0));
        return events;
    });
}

int main() {
    for (const uint64_t pace_us : {0, 1000}) {
        for (const size_t streams : {1, 16, 256}) one_queue(streams, pace_us);
        for (const size_t streams : {1, 16, 256}) queue_per_stream(streams, pace_us);
    }
    return sum == 0;
}
