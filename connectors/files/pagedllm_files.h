// A KV store in a directory of a local disk: docs/kv-stores.md.
#ifndef PAGEDLLM_FILES_H
#define PAGEDLLM_FILES_H

#include <stdint.h>

#include "pagedllm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Values of pllm_files_store_options.io.
// io_uring if the system permits it, otherwise threads. The default.
#define PLLM_FILES_IO_AUTO 0
// Threads that call preadv and pwritev.
#define PLLM_FILES_IO_THREADS 1
// io_uring. It is an error if the system does not permit it.
#define PLLM_FILES_IO_URING 2

// Options of a store. Call pllm_files_store_options_init first.
typedef struct {
  // sizeof(pllm_files_store_options).
  uint64_t struct_size;
  // Directory of the store. It is created if it does not exist; its parent must exist. An existing
  // directory must be empty or that of a store. Several stores, also of other processes, may use it
  // at the same time. Required.
  const char *directory;
  // Length of directory in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t directory_len;
  // Number of bytes that the files may occupy, at least 1048576. Above it, the least recently used
  // values are evicted. Default: 10737418240 (10 GiB).
  uint64_t max_bytes;
  // One of PLLM_FILES_IO_*. Default: PLLM_FILES_IO_AUTO.
  uint32_t io;
  // Number of threads for PLLM_FILES_IO_THREADS, 1 to 64. 0 (default): 4.
  uint32_t threads;
} pllm_files_store_options;

// Writes the defaults into a struct of struct_size bytes.
void pllm_files_store_options_init(pllm_files_store_options *options, uint64_t struct_size);

// Opens a store and writes its functions into out_store, whose struct_size must be set. Pass it to
// one engine as kv_store of pllm_engine_options. The function reads the directory, so it may wait
// for the disk.
//
// Errors: returns 0, or one of PLLM_E_*. Then out_error has the text of the error, NUL-terminated
// and cut off at out_error_len bytes. out_error may be NULL. PLLM_E_UNSUPPORTED: another version
// has written the directory, or the system does not permit io_uring. PLLM_E_INVALID_ARGUMENT: the
// directory has other files. PLLM_E_IO: the directory cannot be created or read.
//
// Threads: any thread may call it.
//
// Ownership: out_store->close frees the store. The engine calls it. If no engine was created with
// the store, the host calls it.
PLLM_NODISCARD int32_t pllm_files_store_open(const pllm_files_store_options *options, pllm_kv_store *out_store,
                                             char *out_error, uint64_t out_error_len);

#ifdef __cplusplus
}
#endif

#endif
