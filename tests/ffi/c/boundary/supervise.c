// Waits for a child process and ends it if it hangs. A busy machine slows progress, so the limits
// are CPU time. The wall clock is the last resort.
#include "boundary.h"

#include <signal.h>
#include <sys/wait.h>

enum { IDLE_SECONDS = 60, CPU_SECONDS = 300, WALL_SECONDS = 1800 };

static unsigned factor(void) {
    const char *given = getenv("BOUNDARY_TIMEOUT_FACTOR");
    return given ? (unsigned)atoi(given) : 1;
}

// CPU time of a process, and of its children that it has waited for. 0 if it is unknown.
static double cpu_seconds_of(pid_t process) {
    char path[32], line[1024];
    unsigned long user = 0, kernel = 0, children_user = 0, children_kernel = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    const char *name_end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    const char *format = ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %lu %lu";
    if (!name_end ||
        sscanf(name_end, format, &user, &kernel, &children_user, &children_kernel) != 4)
        return 0;
    return (double)(user + kernel + children_user + children_kernel) /
           (double)sysconf(_SC_CLK_TCK);
}

const char *wait_for(pid_t child, int *status) {
    static char hang[80];
    const double start = now();
    double cpu = -1, progress = start;
    hang[0] = 0;
    for (pid_t ended; (ended = waitpid(child, status, WNOHANG)) != child; sleep_ms(5)) {
        if (ended < 0) return "the child cannot be waited for";
        double cpu_now = cpu_seconds_of(child);
        if (cpu_now != cpu) cpu = cpu_now, progress = now();
        if (now() - progress > IDLE_SECONDS * factor())
            snprintf(hang, sizeof hang, "no CPU time for %u s", IDLE_SECONDS * factor());
        else if (cpu_now > CPU_SECONDS * factor())
            snprintf(hang, sizeof hang, "%u s of CPU time", CPU_SECONDS * factor());
        else if (now() - start > WALL_SECONDS * factor())
            snprintf(hang, sizeof hang, "no end after %u s", WALL_SECONDS * factor());
        if (hang[0]) kill(child, SIGKILL);
    }
    return hang[0] ? hang : NULL;
}
