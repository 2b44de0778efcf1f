// The header stands alone, may be included twice, and its structs lie where programs built with it expect them.
// Compiled as C99, C11 and C++17 with every warning an error. A struct may grow at its end while the ABI version is
// the same, never in the middle: then add a line here, and leave the others as they are.
#include "pagedllm.h"
#include "pagedllm.h"

#include <stddef.h>

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
// C99 has no static_assert: an array of negative length does as well.
#define ALWAYS(condition) typedef char JOIN(always_, __LINE__)[(condition) ? 1 : -1]
#define SIZE(type, bytes) ALWAYS(sizeof(type) == (bytes))
#define AT(type, field, bytes) ALWAYS(offsetof(type, field) == (bytes))

// Numbers that never change.
ALWAYS(PLLM_NUL_TERMINATED == UINT64_MAX);
ALWAYS(PLLM_E_INVALID_ARGUMENT == 1 && PLLM_E_NOT_FOUND == 2 && PLLM_E_IO == 3);
ALWAYS(PLLM_E_MODEL == 4 && PLLM_E_UNSUPPORTED == 5 && PLLM_E_CAPACITY == 6);
ALWAYS(PLLM_E_BUSY == 7 && PLLM_E_OUT_OF_MEMORY == 8 && PLLM_E_INTERNAL == 9);
ALWAYS(PLLM_E_CLOSED == 10 && PLLM_E_CANCELLED == 11);
ALWAYS(PLLM_FINISH_NONE == 0 && PLLM_FINISH_STOP == 1 && PLLM_FINISH_LENGTH == 2);
ALWAYS(PLLM_FINISH_ABORT == 3 && PLLM_FINISH_ERROR == 4);
ALWAYS(PLLM_DTYPE_AUTO == 0 && PLLM_DTYPE_F32 == 1 && PLLM_DTYPE_BF16 == 2);
ALWAYS(PLLM_ISA_AUTO == 0 && PLLM_ISA_PORTABLE == 1 && PLLM_ISA_AVX2 == 2 && PLLM_ISA_AVX512 == 3);
ALWAYS(PLLM_ENGINE_SKIP_TOKENIZER == 1);
ALWAYS(PLLM_SAMPLING_SEED == 1 && PLLM_SAMPLING_IGNORE_EOS == 2 && PLLM_SAMPLING_LOGPROBS == 4);
ALWAYS(PLLM_TEXT_ADD_SPECIAL == 1 && PLLM_TEXT_SKIP_SPECIAL == 2);

// Only names that begin with PLLM_ or pllm_ belong to the library.
#if defined(LAYERS) || defined(WIDTH) || defined(HEADS) || defined(HEAD_DIM) || defined(VOCAB) || defined(POSITIONS)
#error "pagedllm.h defines names of the library's inside"
#endif
#ifdef EngineOptions_DEFAULT_KV_BYTES
#error "pagedllm.h defines names of the library's inside"
#endif

// Offsets, on machines with pointers of 8 bytes.
#if UINTPTR_MAX == UINT64_MAX

SIZE(pllm_engine_options, 120);
AT(pllm_engine_options, struct_size, 0);
AT(pllm_engine_options, model_path, 8);
AT(pllm_engine_options, model_path_len, 16);
AT(pllm_engine_options, device, 24);
AT(pllm_engine_options, device_len, 32);
AT(pllm_engine_options, kv_bytes, 40);
AT(pllm_engine_options, seed, 48);
AT(pllm_engine_options, block_size, 56);
AT(pllm_engine_options, kv_dtype, 60);
AT(pllm_engine_options, max_model_len, 64);
AT(pllm_engine_options, max_batch_tokens, 68);
AT(pllm_engine_options, max_seqs, 72);
AT(pllm_engine_options, prefill_chunk, 76);
AT(pllm_engine_options, threads, 80);
AT(pllm_engine_options, isa, 84);
AT(pllm_engine_options, flags, 88);
AT(pllm_engine_options, reserved, 92);
AT(pllm_engine_options, queue_capacity, 96);
AT(pllm_engine_options, progress, 104);
AT(pllm_engine_options, progress_data, 112);

SIZE(pllm_plan, 80);
AT(pllm_plan, struct_size, 0);
AT(pllm_plan, weight_bytes, 8);
AT(pllm_plan, kv_bytes, 16);
AT(pllm_plan, work_bytes, 24);
AT(pllm_plan, blocks, 32);
AT(pllm_plan, block_size, 40);
AT(pllm_plan, block_bytes, 48);
AT(pllm_plan, max_model_len, 56);
AT(pllm_plan, full_sequences, 64);
AT(pllm_plan, kv_dtype, 72);

SIZE(pllm_model_info, 96);
AT(pllm_model_info, struct_size, 0);
AT(pllm_model_info, architecture, 8);
AT(pllm_model_info, architecture_len, 16);
AT(pllm_model_info, isa, 24);
AT(pllm_model_info, isa_len, 32);
AT(pllm_model_info, eos_token_ids, 40);
AT(pllm_model_info, eos_token_ids_len, 48);
AT(pllm_model_info, vocab_size, 56);
AT(pllm_model_info, layers, 64);
AT(pllm_model_info, max_positions, 72);
AT(pllm_model_info, max_model_len, 80);
AT(pllm_model_info, threads, 88);

SIZE(pllm_sampling, 88);
AT(pllm_sampling, struct_size, 0);
AT(pllm_sampling, seed, 8);
AT(pllm_sampling, stop_token_ids, 16);
AT(pllm_sampling, stop_token_ids_len, 24);
AT(pllm_sampling, stop, 32);
AT(pllm_sampling, stop_lens, 40);
AT(pllm_sampling, stop_count, 48);
AT(pllm_sampling, temperature, 56);
AT(pllm_sampling, top_p, 60);
AT(pllm_sampling, min_p, 64);
AT(pllm_sampling, top_k, 68);
AT(pllm_sampling, max_tokens, 72);
AT(pllm_sampling, min_tokens, 76);
AT(pllm_sampling, flags, 80);
AT(pllm_sampling, reserved, 84);

SIZE(pllm_request, 72);
AT(pllm_request, struct_size, 0);
AT(pllm_request, prompt, 8);
AT(pllm_request, prompt_len, 16);
AT(pllm_request, prompt_tokens, 24);
AT(pllm_request, prompt_tokens_len, 32);
AT(pllm_request, sampling, 40);
AT(pllm_request, user_data, 48);
AT(pllm_request, n, 56);
AT(pllm_request, text_flags, 60);
AT(pllm_request, queue, 64);

SIZE(pllm_step, 48);
AT(pllm_step, struct_size, 0);
AT(pllm_step, unfinished, 8);
AT(pllm_step, prefill_tokens, 16);
AT(pllm_step, decode_tokens, 24);
AT(pllm_step, sequences, 32);
AT(pllm_step, paused, 40);

SIZE(pllm_stats, 136);
AT(pllm_stats, struct_size, 0);
AT(pllm_stats, waiting, 8);
AT(pllm_stats, running, 16);
AT(pllm_stats, blocks_total, 24);
AT(pllm_stats, blocks_used, 32);
AT(pllm_stats, blocks_cached, 40);
AT(pllm_stats, blocks_free, 48);
AT(pllm_stats, slot_utilization, 56);
AT(pllm_stats, steps, 64);
AT(pllm_stats, prompt_tokens, 72);
AT(pllm_stats, generated_tokens, 80);
AT(pllm_stats, preemptions, 88);
AT(pllm_stats, finished_stop, 96);
AT(pllm_stats, finished_length, 104);
AT(pllm_stats, finished_abort, 112);
AT(pllm_stats, finished_error, 120);
AT(pllm_stats, paused, 128);

SIZE(pllm_output, 120);
AT(pllm_output, struct_size, 0);
AT(pllm_output, request, 8);
AT(pllm_output, sequence, 16);
AT(pllm_output, user_data, 24);
AT(pllm_output, tokens, 32);
AT(pllm_output, tokens_len, 40);
AT(pllm_output, logprobs, 48);
AT(pllm_output, text, 56);
AT(pllm_output, text_len, 64);
AT(pllm_output, error, 72);
AT(pllm_output, error_len, 80);
AT(pllm_output, prompt_tokens, 88);
AT(pllm_output, generated_tokens, 96);
AT(pllm_output, index, 104);
AT(pllm_output, finish_reason, 108);
AT(pllm_output, error_code, 112);
AT(pllm_output, reserved, 116);

#endif
