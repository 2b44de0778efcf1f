// Findings, and counts of calls.
#include <stdarg.h>
#include <time.h>

#include "fuzz.h"

int mutation = no_mutation;

static run_status own_status;
run_status *shared_status = &own_status;

#define AS_NAME(function) #function,
#define AS_TRUE(function) true,
#define AS_FALSE(function) false,
const char *const function_names[FUNCTION_COUNT] = {FUNCTIONS(AS_NAME, AS_NAME)};
const bool function_fallible[FUNCTION_COUNT] = {FUNCTIONS(AS_TRUE, AS_FALSE)};

uint64_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

void finding(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "FINDING: %s\n", text);
    abort();
}

void enter(const worker *w, int function) {
    if (!function_fallible[function]) shared_status->succeeded[function]++;
    shared_status->current_calls[w->index].since_ms = now_ms();
    shared_status->current_calls[w->index].function = function;
}

void leave(const worker *w) { shared_status->current_calls[w->index].function = -1; }

void print_counts(uint64_t programs) {
    uint64_t calls = 0;
    printf("%-28s %12s %12s\n", "function", "succeeded", "failed");
    for (int f = 0; f < FUNCTION_COUNT; f++) {
        uint64_t succeeded = shared_status->succeeded[f], failed = shared_status->failed[f];
        calls += succeeded + failed;
        printf("%-28s %12llu", function_names[f], LLU(succeeded));
        if (function_fallible[f]) printf(" %12llu\n", LLU(failed));
        else printf(" %12s\n", "-");
    }
    printf("%llu programs, %llu calls\n", LLU(programs), LLU(calls));
}

bool every_function_was_covered(void) {
    bool all = true;
    if (mutation == function_never_fails) shared_status->failed[N_pllm_queue_get_event_fd] = 0;
    for (int f = 0; f < FUNCTION_COUNT; f++) {
        if (shared_status->succeeded[f] == 0)
            printf("FINDING: %s never succeeded\n", function_names[f]), all = false;
        if (function_fallible[f] && shared_status->failed[f] == 0)
            printf("FINDING: %s never failed\n", function_names[f]), all = false;
    }
    return all;
}
