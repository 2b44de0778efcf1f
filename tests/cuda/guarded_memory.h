#pragma once
#include <stddef.h>
#include <sys/mman.h>

#include <new>

// Memory between two inaccessible pages. The page before it catches stack overflows.
class GuardedMemory {
    static const size_t PAGE = 4096;
    char *begin_;
    size_t bytes_;

  public:
    explicit GuardedMemory(size_t bytes) : bytes_((bytes + PAGE - 1) / PAGE * PAGE) {
        void *mapped = mmap(nullptr, bytes_ + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        begin_ = static_cast<char *>(mapped) + PAGE;
        if (mprotect(begin_, bytes_, PROT_READ | PROT_WRITE) == 0) return;
        munmap(mapped, bytes_ + 2 * PAGE);
        throw std::bad_alloc();
    }
    ~GuardedMemory() { munmap(begin_ - PAGE, bytes_ + 2 * PAGE); }
    GuardedMemory(const GuardedMemory &) = delete;

    char *end() const { return begin_ + bytes_; }
};
