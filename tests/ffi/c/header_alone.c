// Compiles the header alone and twice, and compares its constants, sizes and offsets with
// bindings/abi.json. Compiled as C99, C11 and C++17 with all warnings as errors. tests/ffi/abi
// compares the header with earlier releases.
#include "pagedllm.h"
#include "pagedllm.h"

#include <stddef.h>

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
// C99 has no static_assert. An array of negative length is an error as well.
#define ALWAYS(condition) typedef char JOIN(always_, __LINE__)[(condition) ? 1 : -1]
#define SIZE(type, bytes) ALWAYS(sizeof(type) == (bytes))
#define AT(type, field, bytes) ALWAYS(offsetof(type, field) == (bytes))

// The header defines only names that begin with PLLM_ or pllm_.
#if defined(LAYERS) || defined(WIDTH) || defined(HEADS) || defined(HEAD_DIM) || defined(VOCAB) || \
    defined(POSITIONS)
#error "pagedllm.h defines internal names of the library"
#endif
#ifdef EngineOptions_DEFAULT_KV_BYTES
#error "pagedllm.h defines internal names of the library"
#endif

// Offsets on machines with 8-byte pointers.
#if UINTPTR_MAX == UINT64_MAX
#include "layout.h"
#endif
