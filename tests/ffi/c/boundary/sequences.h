// Shared by the tests of sequences.
#ifndef SEQUENCES_H
#define SEQUENCES_H

#include "boundary.h"

// The reference has ALL_TOKENS tokens, and most sequences stop first after FIRST_TOKENS.
enum { FIRST_TOKENS = 20, ALL_TOKENS = 40 };
enum { SEQUENCE_PROMPTS = 2 };
extern const char *const prompts[SEQUENCE_PROMPTS];

pllm_sampling greedy_sampling(uint32_t tokens);

// Adds a request for `n` samples and keeps its sequences. Outputs of sample i go to a[i] unless n
// is 1.
uint64_t add_kept(const pllm_engine *engine, const pllm_queue *to, unsigned prompt_index,
                  uint32_t tokens, uint32_t n, generation *a);

pllm_error *try_resume(const pllm_engine *engine, const pllm_queue *to, uint64_t sequence,
                       uint32_t tokens, generation *a);

void resume(const pllm_engine *engine, const pllm_queue *to, uint64_t sequence, uint32_t tokens,
            generation *a);

uint64_t fork_sequence(const pllm_engine *engine, uint64_t sequence, uint64_t at,
                       const pllm_queue *to, generation *a);

pllm_sequence_info info_of(const pllm_engine *engine, uint64_t sequence);

void step(const pllm_engine *engine, unsigned times);

unsigned steps_to_the_end(const pllm_engine *engine, unsigned max_steps);

void check_is_unknown(const pllm_engine *engine, uint64_t sequence);

// The outputs are the tokens of the reference from `from` on.
bool continues_reference(const generation *a, unsigned prompt_index, size_t from);

void check_nothing_is_left(const pllm_engine *engine);

void wait_for_end(const pllm_queue *queue, const generation *a);

// Copies a sequence by export and import.
uint64_t copy_sequence(const pllm_engine *engine, const pllm_queue *queue, uint64_t sequence);

#endif
