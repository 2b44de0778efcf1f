// A plugin's life: the library is opened at run time, used and closed again, twenty times in one process that has few
// thread-specific keys left to give.
// usage: dlopen LIBRARY MODEL_DIR
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pagedllm.h"

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "dlopen: %s\n", what);
    exit(1);
}

// As every binding does that links nothing.
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
    bool fine = !pllm_engine_create_(&options, &engine) && !pllm_engine_start_(engine);
    fine = fine && !pllm_engine_add_request_(engine, &request, &id) && !pllm_queue_poll_(pllm_engine_queue_(engine), -1, &outputs);
    if (!fine) fail("a call failed");
    pllm_outputs_free_(outputs);
    pllm_error_free_(pllm_engine_abort_(engine, 999));  // an error, made and freed
    pllm_engine_free_(engine);
}

static long resident_kib(void) {
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &size, &resident) != 2) fail("cannot read /proc/self/statm");
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

typedef enum { UNUSED, USED, USED_BY_A_THREAD_THAT_ENDS } use_by;
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

static void open_and_close(const char *path, const char *model, use_by by) {
    plugin p = {dlopen(path, RTLD_NOW | RTLD_LOCAL), model};
    pthread_t thread;
    if (!p.library) fail(dlerror());
    if (by == USED) run(&p);
    if (by == USED_BY_A_THREAD_THAT_ENDS) {
        if (pthread_create(&thread, NULL, run, &p)) fail("no thread");
        pthread_join(thread, NULL);
    }
    if (dlclose(p.library)) fail(dlerror());
}

static bool is_in_memory(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library) dlclose(library);
    return library != NULL;
}

static void come_and_go(const char *path, const char *model, use_by by) {
    enum { WARM_UP = 5, TIMES = 20 };
    long resident = 0;
    for (int i = 0; i < TIMES; i++) {
        open_and_close(path, model, by);
        if (i + 1 == WARM_UP) resident = resident_kib();
    }
    long grown = resident_kib() - resident;
    printf("    %s: grew by %ld KiB, and %s memory\n", names[by], grown, is_in_memory(path) ? "stays in" : "leaves");
    if (grown > 512) fail("it grows with every time it is opened");
}

// A process has 1024: what each opening takes and no closing gives back would end it some day.
static void take_most_keys(void) {
    enum { LEFT = 10 };
    pthread_key_t keys[2048];
    int count = 0;
    while (count < 2048 && pthread_key_create(&keys[count], NULL) == 0) count++;
    for (int i = 0; i < LEFT && count > 0; i++) pthread_key_delete(keys[--count]);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: dlopen LIBRARY MODEL_DIR\n"), 2;
    alarm(60);
    setvbuf(stdout, NULL, _IOLBF, 0);
    take_most_keys();
    // In this order: once used by a thread that lives on, it may stay until that thread ends.
    come_and_go(argv[1], argv[2], UNUSED);
    come_and_go(argv[1], argv[2], USED_BY_A_THREAD_THAT_ENDS);
    come_and_go(argv[1], argv[2], USED);
    printf("passed   a_plugin_comes_and_goes_twenty_times\n");
}
