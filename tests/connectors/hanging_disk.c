// A disk that hangs: the call that the environment variable HANGING_CALL names does not return. Preload
// this library (LD_PRELOAD).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static void hang_if_selected(const char *call) {
    const char *hanging = getenv("HANGING_CALL");
    if (hanging && !strcmp(hanging, call))
        for (;;) pause();
}

// Returns the function of the C library.
static void *next(const char *call) { return dlsym(RTLD_NEXT, call); }

ssize_t preadv(int file, const struct iovec *parts, int count, off_t offset) {
    hang_if_selected("preadv");
    ssize_t (*function)(int, const struct iovec *, int, off_t);
    *(void **)&function = next("preadv");
    return function(file, parts, count, offset);
}

ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    hang_if_selected("pwritev");
    ssize_t (*function)(int, const struct iovec *, int, off_t);
    *(void **)&function = next("pwritev");
    return function(file, parts, count, offset);
}

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    hang_if_selected("utimensat");
    int (*function)(int, const char *, const struct timespec[2], int);
    *(void **)&function = next("utimensat");
    return function(folder, path, times, flags);
}
