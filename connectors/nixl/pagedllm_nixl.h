// A KV store in the memory of processes that exchange values by NIXL: docs/kv-stores.md.
#ifndef PAGEDLLM_NIXL_H
#define PAGEDLLM_NIXL_H

#include <stdint.h>

#include "pagedllm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Options of a store. Call pllm_nixl_store_options_init first. All strings are copied.
typedef struct {
  // sizeof(pllm_nixl_store_options).
  uint64_t struct_size;
  // Path of libnixl_capi.so, which is loaded when the store is opened. NULL (default): the system's
  // loader finds it.
  const char *library;
  // Length of library in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t library_len;
  // Name of the NIXL backend that transfers values, the same in all processes. NULL (default): "UCX".
  const char *backend;
  // Length of backend in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t backend_len;
  // Host name or address of the Valkey or Redis server that has the index. If it begins with "/",
  // the path of a Unix socket. Default: "127.0.0.1".
  const char *host;
  // Length of host in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t host_len;
  // User name in the server. NULL (default): that of the server.
  const char *username;
  // Length of username in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t username_len;
  // Password. NULL (default): none.
  const char *password;
  // Length of password in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t password_len;
  // Prefix of the names in the index, at most 256 bytes. NULL (default): "pagedllm:nixl:".
  const char *key_prefix;
  // Length of key_prefix in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t key_prefix_len;
  // Memory for the values of this store in bytes, which other processes read. 1 MiB to 64 TiB.
  // Default: 1 GiB.
  uint64_t max_bytes;
  // Memory in bytes for values that are being read from other processes. It limits their number, and
  // the length of a value. 1 MiB to 64 TiB. Default: 64 MiB.
  uint64_t staging_bytes;
  // TCP port of the server. Default: 6379.
  uint32_t port;
  // Number of the database. Default: 0.
  uint32_t database;
  // Time in milliseconds after which a read from a process is given up, and a connection to the server
  // that makes no progress is closed, at most 3600000. 0 (default): 2000.
  uint32_t timeout_ms;
  // Time in milliseconds for which the values of a process that has ended count as present, 100 to
  // 3600000. 0 (default): 10000.
  uint32_t lease_ms;
} pllm_nixl_store_options;

// Writes the defaults into a struct of struct_size bytes.
void pllm_nixl_store_options_init(pllm_nixl_store_options *options, uint64_t struct_size);

// Creates a store and writes its functions into out_store, whose struct_size must be set. Pass it
// to one engine as kv_store of pllm_engine_options. The function loads NIXL, creates an agent and
// registers the memory. It does not wait for the server: a server that is not there costs hits, and
// the store connects when it is back.
//
// Errors: returns 0, or one of PLLM_E_*. Then out_error has the text of the error, NUL-terminated
// and cut off at out_error_len bytes. out_error may be NULL. PLLM_E_INVALID_ARGUMENT: an option is
// wrong. PLLM_E_UNSUPPORTED: NIXL or its backend cannot be loaded. PLLM_E_OUT_OF_MEMORY: the system
// has no memory, or the backend cannot register it.
//
// Threads: any thread may call it. The store starts one thread, and NIXL starts its own.
//
// Ownership: out_store->close frees the store, and its values are lost. The engine calls it. If no
// engine was created with the store, the host calls it.
PLLM_NODISCARD int32_t pllm_nixl_store_open(const pllm_nixl_store_options *options, pllm_kv_store *out_store,
                                            char *out_error, uint64_t out_error_len);

#ifdef __cplusplus
}
#endif

#endif
