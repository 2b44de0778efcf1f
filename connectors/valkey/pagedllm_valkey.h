// A KV store in a Valkey or Redis server: docs/kv-stores.md.
#ifndef PAGEDLLM_VALKEY_H
#define PAGEDLLM_VALKEY_H

#include <stdint.h>

#include "pagedllm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Options of a store. Call pllm_valkey_store_options_init first. All strings are copied.
typedef struct {
  // sizeof(pllm_valkey_store_options).
  uint64_t struct_size;
  // Host name or address of the server. If it begins with "/", the path of a Unix socket. An
  // address is better than a name: a slow name service delays the operations of the store. Default:
  // "127.0.0.1".
  const char *host;
  // Length of host in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t host_len;
  // User name. NULL (default): that of the server.
  const char *username;
  // Length of username in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t username_len;
  // Password. NULL (default): none.
  const char *password;
  // Length of password in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t password_len;
  // Prefix of the names of all keys, at most 256 bytes. NULL (default): "pagedllm:kv:".
  const char *key_prefix;
  // Length of key_prefix in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t key_prefix_len;
  // Time in seconds after which the server removes a value that was neither written nor looked up,
  // at most 31536000. 0 (default): never.
  uint64_t ttl_seconds;
  // TCP port. Default: 6379.
  uint32_t port;
  // Number of the database. Default: 0.
  uint32_t database;
  // Time in milliseconds after which a connection that makes no progress is closed, and its
  // operations fail, at most 3600000. 0 (default): 2000.
  uint32_t timeout_ms;
  // Must be 0.
  uint32_t reserved;
} pllm_valkey_store_options;

// Writes the defaults into a struct of struct_size bytes.
void pllm_valkey_store_options_init(pllm_valkey_store_options *options, uint64_t struct_size);

// Creates a store and writes its functions into out_store, whose struct_size must be set. Pass it
// to one engine as kv_store of pllm_engine_options. The function starts to connect and does not
// wait for the server: a server that is not there costs hits, and the store connects when it is
// back.
//
// Errors: returns 0, or one of PLLM_E_*. Then out_error has the text of the error, NUL-terminated
// and cut off at out_error_len bytes. out_error may be NULL. PLLM_E_INVALID_ARGUMENT: an option is
// wrong.
//
// Threads: any thread may call it. The store has no threads.
//
// Ownership: out_store->close frees the store. The engine calls it. If no engine was created with
// the store, the host calls it.
PLLM_NODISCARD int32_t pllm_valkey_store_open(const pllm_valkey_store_options *options, pllm_kv_store *out_store,
                                              char *out_error, uint64_t out_error_len);

#ifdef __cplusplus
}
#endif

#endif
