// What the libraries in connectors/ export, as their headers declare it. The package loads them
// when a store is opened, so that a build does not need them.
#ifndef PAGEDLLM_GO_CONNECTORS_H
#define PAGEDLLM_GO_CONNECTORS_H

#include <dlfcn.h>
#include <pagedllm.h>
#include <stdio.h>
#include <stdlib.h>

// pllm_files_store_options of pagedllm_files.h.
typedef struct {
    uint64_t struct_size;
    const char *directory;
    uint64_t directory_len;
    uint64_t max_bytes;
    uint32_t io;
    uint32_t threads;
} files_options;

// pllm_valkey_store_options of pagedllm_valkey.h.
typedef struct {
    uint64_t struct_size;
    const char *host;
    uint64_t host_len;
    const char *username;
    uint64_t username_len;
    const char *password;
    uint64_t password_len;
    const char *key_prefix;
    uint64_t key_prefix_len;
    uint64_t ttl_seconds;
    uint32_t port;
    uint32_t database;
    uint32_t timeout_ms;
    uint32_t reserved;
} valkey_options;

typedef struct {
    void (*init)(void *options, uint64_t struct_size);
    int32_t (*open)(const void *options, pllm_kv_store *out_store, char *out_error, uint64_t out_error_len);
} connector;

// Loads a library and its functions. Returns whether it succeeds; if not, `error` has the text. The
// library stays loaded, because a store that hangs can outlive its engine.
static inline int load_connector(const char *library, const char *init, const char *open, connector *out, char *error, uint64_t len) {
    void *loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (loaded) {
        *(void **)&out->init = dlsym(loaded, init);
        *(void **)&out->open = dlsym(loaded, open);
        if (out->init && out->open) return 1;
    }
    const char *text = dlerror();
    snprintf(error, len, "%s", text ? text : library);
    return 0;
}

static inline void init_options(const connector *c, void *options, uint64_t struct_size) { c->init(options, struct_size); }

static inline int32_t open_store(const connector *c, const void *options, pllm_kv_store *out, char *error, uint64_t len) {
    return c->open(options, out, error, len);
}

static inline pllm_kv_store *new_store(void) {
    pllm_kv_store *store = calloc(1, sizeof *store);
    if (store) store->struct_size = sizeof *store;
    return store;
}

static inline void close_store(const pllm_kv_store *store) { store->close(store->user_data); }

#endif
