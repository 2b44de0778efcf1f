// Waits for a child process and ends it if it hangs. A busy machine slows progress, so the limits
// are CPU time. The wall clock is the last resort.
#include "boundary.h"

#include <signal.h>
#include <sys/wait.h>

#include "../cpu_time.h"

enum { IDLE_SECONDS = 60, CPU_SECONDS = 300, WALL_SECONDS = 1800 };

static unsigned factor(void) {
    const char *given = getenv("BOUNDARY_TIMEOUT_FACTOR");
    return given ? (unsigned)atoi(given) : 1;
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
