"""What the machine is, what it can do right now, and who else uses it: numbers taken on a busy one are not worth keeping."""

import mmap
import os
import subprocess
import sys
import time

TOO_MUCH = 0.1
"""A share of the cores above this, used by others or kept by the hypervisor, spoils a measurement."""


def cpu_name():
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else "unknown"


def cpu_vectors():
    """The instructions that decide how fast a peer's kernels can be."""
    with open("/proc/cpuinfo") as info:
        flags = next((line.split() for line in info if line.startswith("flags")), [])
    return [flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags]


def bandwidth(probe):
    """GB a second that all cores read from memory just now; `probe` is the program made of bandwidth.c."""
    return float(subprocess.run([probe], check=True, capture_output=True, text=True).stdout)


def have_memory_lent(size):
    """A hypervisor may lend memory only when it is first touched, at a twentieth of its speed, and want it back when it is free for some
    seconds: what that costs is not the engine's. Another process touches as much, half of what there is at most: so this one's peak is its own."""
    subprocess.run([sys.executable, __file__, str(size)], check=True)


def touch_memory(size):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with mmap.mmap(-1, max(1, min(size, free // 2))) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1


def family():
    """This process and all its descendants."""
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    left += [int(child) for child in children.read().split()]
        except OSError:
            pass  # it ended meanwhile
    return found


def peak_mebibytes():
    """The most memory that this process ever had, with the most of each descendant's."""
    kibibytes = 0
    for pid in family():
        with open(f"/proc/{pid}/status") as status:
            kibibytes += sum(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return kibibytes / 1024


def all_ticks():
    """(used by anybody, kept by the hypervisor) since the machine started."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return user + nice + system + irq + softirq, steal


def own_ticks():
    """Used by this process and its descendants, those that ended included."""
    ticks = 0
    for pid in family():
        try:
            with open(f"/proc/{pid}/stat") as stat:
                ticks += sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:15]))
        except OSError:
            pass  # it ended meanwhile, and is in its parent's count
    return ticks


class Watch:
    """`with Watch() as watch: work()`; then `watch.noise` holds the shares of the cores that others had."""

    def __enter__(self):
        self.since, self.own, (self.busy, self.steal) = time.perf_counter(), own_ticks(), all_ticks()
        return self

    def __exit__(self, *_):
        busy, steal = all_ticks()
        other = (busy - self.busy) - (own_ticks() - self.own)
        ticks = (time.perf_counter() - self.since) * os.sysconf("SC_CLK_TCK") * os.cpu_count()
        self.noise = {"other": round(max(0, other) / ticks, 3), "steal": round((steal - self.steal) / ticks, 3)}


def noise(row):
    """The greater share of both; 0 where none was measured."""
    return max(row.get("noise", {}).values(), default=0)


def noisy(row):
    return noise(row) > TOO_MUCH


if __name__ == "__main__":
    touch_memory(int(sys.argv[1]))
