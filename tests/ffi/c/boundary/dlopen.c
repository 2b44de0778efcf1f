// The library as a plugin: opened at run time, used and closed 20 times, in a process with few free
// thread-specific keys.
// usage: dlopen LIBRARY MODEL_DIR
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pagedllm.h"

static _Noreturn void fail(const char *message) {
    fprintf(stderr, "dlopen: %s\n", message);
    exit(1);
}

// Bindings that do not link the library look its functions up like this.
#define FUNCTION(name) __typeof__(name) *name##_ = (__typeof__(name) *)symbol(library, #name)

static void (*symbol(void *library, const char *name))(void) {
    void (*function)(void);
    void *address = dlsym(library, name);
    if (!address) fail(dlerror());
    memcpy(&function, &address, sizeof function);
    return function;
}

static void use(void *library, const char *model) {
    FUNCTION(pllm_engine_options_init);
    FUNCTION(pllm_engine_create);
    FUNCTION(pllm_engine_start);
    FUNCTION(pllm_engine_queue);
    FUNCTION(pllm_engine_add_request);
    FUNCTION(pllm_engine_free);
    FUNCTION(pllm_request_init);
    FUNCTION(pllm_queue_poll);
    FUNCTION(pllm_outputs_free);
    FUNCTION(pllm_engine_abort);
    FUNCTION(pllm_error_free);
    pllm_engine_options options;
    pllm_engine_options_init_(&options, sizeof options);
    options.model_path = model;
    options.kv_bytes = 8 << 20;
    options.threads = 2;
    pllm_request request;
    pllm_request_init_(&request, sizeof request);
    request.prompt = "Tell me a short story.";
    pllm_engine *engine;
    pllm_outputs *outputs;
    uint64_t id;
    bool succeeded = !pllm_engine_create_(&options, &engine) && !pllm_engine_start_(engine);
    succeeded = succeeded && !pllm_engine_add_request_(engine, &request, &id) &&
                !pllm_queue_poll_(pllm_engine_queue_(engine), -1, &outputs);
    if (!succeeded) fail("a call failed");
    pllm_outputs_free_(outputs);
    pllm_error_free_(pllm_engine_abort_(engine, 999));  // an error that is created and freed
    pllm_engine_free_(engine);
}

static long resident_kib(void) {
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &size, &resident) != 2)
        fail("cannot read /proc/self/statm");
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

typedef enum { UNUSED, USED, USED_BY_A_THREAD_THAT_ENDS } usage;
static const char *const names[] = {"unused", "used", "used by a thread that ends"};

typedef struct {
    void *library;
    const char *model;
} plugin;

static void *run(void *argument) {
    const plugin *p = argument;
    use(p->library, p->model);
    return NULL;
}

static void open_and_close(const char *path, const char *model, usage by) {
    plugin p = {dlopen(path, RTLD_NOW | RTLD_LOCAL), model};
    pthread_t thread;
    if (!p.library) fail(dlerror());
    if (by == USED) run(&p);
    if (by == USED_BY_A_THREAD_THAT_ENDS) {
        if (pthread_create(&thread, NULL, run, &p)) fail("pthread_create failed");
        pthread_join(thread, NULL);
    }
    if (dlclose(p.library)) fail(dlerror());
}

static bool is_in_memory(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library) dlclose(library);
    return library != NULL;
}

// A leak makes memory grow in every round. A new arena of malloc does so in one round.
static void check_open_and_close(const char *path, const char *model, usage by) {
    enum { WARM_UP = 5, TIMES = 15, ROUNDS = 4 };
    for (int i = 0; i < WARM_UP; i++) open_and_close(path, model, by);
    long grown = LONG_MAX;
    for (int round = 0; round < ROUNDS && grown > 512; round++) {
        long before = resident_kib();
        for (int i = 0; i < TIMES; i++) open_and_close(path, model, by);
        grown = resident_kib() - before;
    }
    printf("    %s: grew by %ld KiB, and %s memory\n", names[by], grown,
           is_in_memory(path) ? "stays in" : "leaves");
    if (grown > 512) fail("memory grows with every opening");
}

// A process has 1024 keys. A key that closing does not free would exhaust them.
static void reserve_most_keys(void) {
    enum { LEFT = 10 };
    pthread_key_t keys[2048];
    int count = 0;
    while (count < 2048 && pthread_key_create(&keys[count], NULL) == 0) count++;
    for (int i = 0; i < LEFT && count > 0; i++) pthread_key_delete(keys[--count]);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: dlopen LIBRARY MODEL_DIR\n"), 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    reserve_most_keys();
    // In this order: after a thread that is still running has used the library, it may stay loaded
    // until that thread ends.
    check_open_and_close(argv[1], argv[2], UNUSED);
    check_open_and_close(argv[1], argv[2], USED_BY_A_THREAD_THAT_ENDS);
    check_open_and_close(argv[1], argv[2], USED);
    printf("passed   library_can_be_opened_and_closed_twenty_times\n");
}
