"""Name, bandwidth and noise of the machine. Results of a busy machine are not kept."""

import mmap
import os
import subprocess
import sys
import time

MAX_NOISE = 0.1
"""Share of the cores, used by other processes or taken by the hypervisor, above which a row is noisy."""


def cpu_name():
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else "unknown"


def cpu_vectors():
    """Returns the vector instructions that matter for the kernels of the engines."""
    with open("/proc/cpuinfo") as info:
        flags = next((line.split() for line in info if line.startswith("flags")), [])
    return [flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags]


def bandwidth(probe):
    """Returns the GB per second that all cores read from memory now. `probe` is the program built from bandwidth.c."""
    return float(subprocess.run([probe], check=True, capture_output=True, text=True).stdout)


def touch_memory_in_child(size):
    """Touches memory in another process, so that the peak memory of this process does not change.

    A hypervisor may back memory only at the first touch, at a twentieth of the normal speed, and reclaim it after
    some seconds. That cost must not count as the engine's.
    """
    subprocess.run([sys.executable, __file__, str(size)], check=True)


def touch_memory(size):
    """Touches `size` bytes, at most half of the free memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with mmap.mmap(-1, max(1, min(size, free // 2))) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1


def process_tree():
    """Returns the ids of this process and all its descendants."""
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    left += [int(child) for child in children.read().split()]
        except OSError:
            pass  # the process has ended
    return found


def peak_mebibytes():
    """Returns the sum of the peak memory of this process and its descendants."""
    kibibytes = 0
    for pid in process_tree():
        with open(f"/proc/{pid}/status") as status:
            kibibytes += sum(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return kibibytes / 1024


def all_ticks():
    """Returns the ticks used by all processes and those taken by the hypervisor, since the machine started."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return user + nice + system + irq + softirq, steal


def own_ticks():
    """Returns the ticks used by this process and its descendants, with those that have ended."""
    ticks = 0
    for pid in process_tree():
        try:
            with open(f"/proc/{pid}/stat") as stat:
                ticks += sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:15]))
        except OSError:
            pass  # the process has ended and is in its parent's count
    return ticks


class NoiseMonitor:
    """`with NoiseMonitor() as monitor: work()` sets `monitor.noise`: the shares of the cores that other processes used."""

    def __enter__(self):
        self.since, self.own, (self.busy, self.steal) = time.perf_counter(), own_ticks(), all_ticks()
        return self

    def __exit__(self, *_):
        busy, steal = all_ticks()
        other = (busy - self.busy) - (own_ticks() - self.own)
        ticks = (time.perf_counter() - self.since) * os.sysconf("SC_CLK_TCK") * os.cpu_count()
        self.noise = {"other": round(max(0, other) / ticks, 3), "steal": round((steal - self.steal) / ticks, 3)}


def noise(row):
    """Returns the larger of both shares. 0 if the noise was not measured."""
    return max(row.get("noise", {}).values(), default=0)


def noisy(row):
    return noise(row) > MAX_NOISE


if __name__ == "__main__":
    touch_memory(int(sys.argv[1]))
