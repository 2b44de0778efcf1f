// What the benchmarks of KV stores share.
#ifndef KV_STORE_COMMON_H
#define KV_STORE_COMMON_H

#include <stddef.h>
#include <stdint.h>

#include "pagedllm.h"

// The first request of an engine has FIRST_LEN tokens and a full block, so that NIXL connects.
enum { BLOCK = 16, MAX_LEN = 4096, FIRST_SEED = 999, FIRST_LEN = 3 * BLOCK };

typedef enum { NO_STORE, FILES, VALKEY, NIXL } store_kind;

// The places of the stores, for all functions.
typedef struct {
    const char *model, *directory, *socket;
} places;
extern places place;

// A process that computes prompts and keeps their blocks in its store: owner.c.
typedef struct {
    int to, from;
    int pid;
} owner;

_Noreturn void fail(const char *text);
void check(pllm_error *error);
double now_ms(void);

// Returns 0 if a library that the store needs is missing.
int is_available(store_kind kind);

// What the engines of the benchmarks differ in. 0 selects the default.
typedef struct {
    store_kind store;
    uint32_t files_io, threads;
    // Prompt tokens of a step with PLLM_BATCHING_DECODE_FIRST.
    uint32_t prefill_budget;
} settings;

pllm_engine *create_engine(const settings *with);
uint64_t vocabulary_of(const pllm_engine *engine);
pllm_stats stats_of(const pllm_engine *engine);

// Writes random tokens, which depend on the seed only.
void make_prompt(uint64_t seed, uint64_t vocabulary, uint32_t *tokens, uint32_t len);

// Adds a request that generates max_tokens tokens.
uint64_t add_request(pllm_engine *engine, const uint32_t *tokens, uint32_t len, uint32_t max_tokens);

// Runs a request for one token. Returns the time to this token in milliseconds.
double run_prompt(pllm_engine *engine, uint64_t seed, uint32_t len);

// Steps until the store has this number of blocks of the engine. Blocks that were read are not written.
void finish_writes(pllm_engine *engine, uint64_t blocks);

// Sorts the values and returns a quantile, 0 to 1.
double quantile(double *values, size_t len, double at);

// Permits this process only the CPUs first to last of those that it had at its start. If it has none of
// them, its last CPU.
void pin(int first, int last);

// Starts a process, which is ready when the function returns. cpu < 0: all CPUs.
owner start_owner(store_kind kind, int threads, int cpu);
// Lets the owner compute a prompt and store its blocks. It answers with the time to the first token.
void send_prompt(const owner *to, uint64_t seed, uint32_t len);
double receive_time(const owner *from);
void end_owner(owner *running);

#endif
