// Compiles the header alone and twice, and freezes the sizes and offsets of its structs. Compiled
// as C99, C11 and C++17 with all warnings as errors. While the ABI version stays the same, a struct
// may grow at its end, never in the middle: then add a line here, and change only its size.
#include "pagedllm.h"
#include "pagedllm.h"

#include <stddef.h>

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
// C99 has no static_assert. An array of negative length is an error as well.
#define ALWAYS(condition) typedef char JOIN(always_, __LINE__)[(condition) ? 1 : -1]
#define SIZE(type, bytes) ALWAYS(sizeof(type) == (bytes))
#define AT(type, field, bytes) ALWAYS(offsetof(type, field) == (bytes))

// Constants that never change.
ALWAYS(PLLM_NUL_TERMINATED == UINT64_MAX);
ALWAYS(PLLM_E_INVALID_ARGUMENT == 1 && PLLM_E_NOT_FOUND == 2 && PLLM_E_IO == 3);
ALWAYS(PLLM_E_MODEL == 4 && PLLM_E_UNSUPPORTED == 5 && PLLM_E_CAPACITY == 6);
ALWAYS(PLLM_E_BUSY == 7 && PLLM_E_OUT_OF_MEMORY == 8 && PLLM_E_INTERNAL == 9);
ALWAYS(PLLM_E_CLOSED == 10 && PLLM_E_CANCELLED == 11);
ALWAYS(PLLM_FINISH_NONE == 0 && PLLM_FINISH_STOP == 1 && PLLM_FINISH_LENGTH == 2);
ALWAYS(PLLM_FINISH_ABORT == 3 && PLLM_FINISH_ERROR == 4 && PLLM_FINISH_DEADLINE == 5);
ALWAYS(PLLM_DTYPE_AUTO == 0 && PLLM_DTYPE_F32 == 1 && PLLM_DTYPE_BF16 == 2 && PLLM_DTYPE_INT8 == 3);
ALWAYS(PLLM_DTYPE_F16 == 4 && PLLM_DTYPE_FP8 == 5);
ALWAYS(PLLM_ISA_AUTO == 0 && PLLM_ISA_PORTABLE == 1 && PLLM_ISA_AVX2 == 2 && PLLM_ISA_AVX512 == 3 &&
       PLLM_ISA_AVX512_BF16 == 4);
ALWAYS(PLLM_ISA_AVX_VNNI == 5 && PLLM_ISA_AVX512_VNNI == 6);
ALWAYS(PLLM_WEIGHTS_AS_STORED == 0 && PLLM_WEIGHTS_F32 == 1 && PLLM_WEIGHTS_F16 == 2 &&
       PLLM_WEIGHTS_BF16 == 3);
ALWAYS(PLLM_WEIGHTS_INT8 == 4 && PLLM_WEIGHTS_INT4 == 5 && PLLM_WEIGHTS_INT4_ASYMMETRIC == 6 &&
       PLLM_WEIGHTS_FP8 == 7);
ALWAYS(PLLM_PACKED_UNUSED == 0 && PLLM_PACKED_READ == 1 && PLLM_PACKED_SAVED == 2 &&
       PLLM_PACKED_UNSAVED == 3);
ALWAYS(PLLM_PREEMPTION_RECOMPUTE == 0 && PLLM_PREEMPTION_SWAP == 1 && PLLM_PREEMPTION_AUTO == 2);
ALWAYS(PLLM_ORDER_FCFS == 0 && PLLM_ORDER_PRIORITY == 1 && PLLM_ORDER_SHORTEST_PREDICTED == 2);
ALWAYS(PLLM_BATCHING_MIXED == 0 && PLLM_BATCHING_PREFILL_FIRST == 1);
ALWAYS(PLLM_BATCHING_DECODE_FIRST == 2 && PLLM_BATCHING_STATIC == 3);
ALWAYS(PLLM_ALLOCATION_ON_DEMAND == 0 && PLLM_ALLOCATION_MAX_TOKENS == 1);
ALWAYS(PLLM_ENGINE_SKIP_TOKENIZER == 1 && PLLM_ENGINE_NO_PREFIX_CACHE == 2);
ALWAYS(PLLM_SAMPLING_SEED == 1 && PLLM_SAMPLING_IGNORE_EOS == 2 && PLLM_SAMPLING_LOGPROBS == 4);
ALWAYS(PLLM_SAMPLING_PROMPT_LOGPROBS == 8 && PLLM_SAMPLING_ECHO == 16 &&
       PLLM_SAMPLING_INCLUDE_STOP == 32);
ALWAYS(PLLM_OUTPUT_DELTA == 0 && PLLM_OUTPUT_CUMULATIVE == 1 && PLLM_OUTPUT_FINAL == 2);
ALWAYS(PLLM_GRAMMAR_NONE == 0 && PLLM_GRAMMAR_JSON_SCHEMA == 1 && PLLM_GRAMMAR_JSON_OBJECT == 2);
ALWAYS(PLLM_GRAMMAR_REGEX == 3 && PLLM_GRAMMAR_CHOICE == 4 && PLLM_GRAMMAR_LARK == 5);
ALWAYS(PLLM_EARLY_STOPPING_NO == 0 && PLLM_EARLY_STOPPING_YES == 1 &&
       PLLM_EARLY_STOPPING_NEVER == 2);
ALWAYS(PLLM_REQUEST_KEEP == 1 && PLLM_RESUME_USER_DATA == 2 &&
       PLLM_RESUME_CONTINUE == 4);  // all are flags of pllm_resume
ALWAYS(PLLM_FORK_SEED == 1 && PLLM_FORK_IDLE == 2 && PLLM_FORK_USER_DATA == 4);
ALWAYS(PLLM_FORK_AT_END == UINT64_MAX && PLLM_QUEUE_CAPACITY == 64);
ALWAYS(PLLM_TEXT_ADD_SPECIAL == 1 && PLLM_TEXT_SKIP_SPECIAL == 2);

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

SIZE(pllm_engine_options, 296);
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
AT(pllm_engine_options, max_waiting_requests, 120);
AT(pllm_engine_options, max_waiting_tokens, 128);
AT(pllm_engine_options, budget, 136);
AT(pllm_engine_options, swap_bytes, 144);
AT(pllm_engine_options, swap_path, 152);
AT(pllm_engine_options, swap_path_len, 160);
AT(pllm_engine_options, preemption, 168);
AT(pllm_engine_options, order, 172);
AT(pllm_engine_options, ageing_ms, 176);
AT(pllm_engine_options, batching, 180);
AT(pllm_engine_options, prefill_budget, 184);
AT(pllm_engine_options, allocation, 188);
AT(pllm_engine_options, trace_path, 192);
AT(pllm_engine_options, trace_path_len, 200);
AT(pllm_engine_options, journal_path, 208);
AT(pllm_engine_options, journal_path_len, 216);
AT(pllm_engine_options, model_name, 224);
AT(pllm_engine_options, model_name_len, 232);
AT(pllm_engine_options, weight_format, 240);
AT(pllm_engine_options, weight_group, 244);
AT(pllm_engine_options, packed_path, 248);
AT(pllm_engine_options, packed_path_len, 256);
AT(pllm_engine_options, cpus, 264);
AT(pllm_engine_options, cpus_len, 272);
AT(pllm_engine_options, memory_fraction, 280);
AT(pllm_engine_options, reserved2, 284);
AT(pllm_engine_options, max_prompt_bytes, 288);

SIZE(pllm_plan, 112);
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
AT(pllm_plan, max_blocks, 80);
AT(pllm_plan, swap_bytes, 88);
AT(pllm_plan, swap_blocks, 96);
AT(pllm_plan, kv_groups, 104);

SIZE(pllm_model_info, 120);
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
AT(pllm_model_info, packed, 96);
AT(pllm_model_info, packed_reason, 104);
AT(pllm_model_info, packed_reason_len, 112);

SIZE(pllm_sampling, 264);
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
AT(pllm_sampling, typical_p, 88);
AT(pllm_sampling, top_n_sigma, 92);
AT(pllm_sampling, xtc_probability, 96);
AT(pllm_sampling, xtc_threshold, 100);
AT(pllm_sampling, mirostat_tau, 104);
AT(pllm_sampling, mirostat_eta, 108);
AT(pllm_sampling, presence_penalty, 112);
AT(pllm_sampling, frequency_penalty, 116);
AT(pllm_sampling, repetition_penalty, 120);
AT(pllm_sampling, no_repeat_ngram_size, 124);
AT(pllm_sampling, top_logprobs, 128);
AT(pllm_sampling, prompt_top_logprobs, 132);
AT(pllm_sampling, output_kind, 136);
AT(pllm_sampling, grammar_kind, 140);
AT(pllm_sampling, grammar, 144);
AT(pllm_sampling, grammar_len, 152);
AT(pllm_sampling, choices, 160);
AT(pllm_sampling, choice_lens, 168);
AT(pllm_sampling, choice_count, 176);
AT(pllm_sampling, dry, 184);
AT(pllm_sampling, logit_bias, 192);
AT(pllm_sampling, logit_bias_len, 200);
AT(pllm_sampling, bad_words, 208);
AT(pllm_sampling, bad_word_lens, 216);
AT(pllm_sampling, bad_word_count, 224);
AT(pllm_sampling, bad_words_ids, 232);
AT(pllm_sampling, bad_words_ids_len, 240);
AT(pllm_sampling, allowed_token_ids, 248);
AT(pllm_sampling, allowed_token_ids_len, 256);

SIZE(pllm_request, 144);
AT(pllm_request, struct_size, 0);
AT(pllm_request, prompt, 8);
AT(pllm_request, prompt_len, 16);
AT(pllm_request, prompt_token_ids, 24);
AT(pllm_request, prompt_token_ids_len, 32);
AT(pllm_request, sampling, 40);
AT(pllm_request, user_data, 48);
AT(pllm_request, n, 56);
AT(pllm_request, text_flags, 60);
AT(pllm_request, queue, 64);
AT(pllm_request, best_of, 72);
AT(pllm_request, truncate_prompt_tokens, 76);
AT(pllm_request, flags, 80);
AT(pllm_request, reserved, 84);
AT(pllm_request, beam, 88);
AT(pllm_request, cache_salt, 96);
AT(pllm_request, cache_salt_len, 104);
AT(pllm_request, logits_hook, 112);
AT(pllm_request, hook_data, 120);
AT(pllm_request, deadline_ms, 128);
AT(pllm_request, priority, 136);
AT(pllm_request, reserved2, 140);

SIZE(pllm_admission, 48);
AT(pllm_admission, struct_size, 0);
AT(pllm_admission, admits, 8);
AT(pllm_admission, fits_now, 16);
AT(pllm_admission, first_token_seconds, 24);
AT(pllm_admission, waiting_requests, 32);
AT(pllm_admission, waiting_tokens, 40);

SIZE(pllm_budget_info, 48);
AT(pllm_budget_info, struct_size, 0);
AT(pllm_budget_info, bytes, 8);
AT(pllm_budget_info, min_bytes, 16);
AT(pllm_budget_info, max_bytes, 24);
AT(pllm_budget_info, held_bytes, 32);
AT(pllm_budget_info, engines, 40);

SIZE(pllm_step, 48);
AT(pllm_step, struct_size, 0);
AT(pllm_step, unfinished, 8);
AT(pllm_step, prefill_tokens, 16);
AT(pllm_step, decode_tokens, 24);
AT(pllm_step, sequences, 32);
AT(pllm_step, paused, 40);

SIZE(pllm_stats, 288);
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
AT(pllm_stats, idle, 136);
AT(pllm_stats, blocks_copied, 144);
AT(pllm_stats, prefix_queries, 152);
AT(pllm_stats, prefix_hits, 160);
AT(pllm_stats, finished_deadline, 168);
AT(pllm_stats, admission_rejections, 176);
AT(pllm_stats, steps_failed, 184);
AT(pllm_stats, preemptions_swapped, 192);
AT(pllm_stats, swapped, 200);
AT(pllm_stats, swap_blocks_total, 208);
AT(pllm_stats, swap_blocks_used, 216);
AT(pllm_stats, blocks_swapped_out, 224);
AT(pllm_stats, blocks_swapped_in, 232);
AT(pllm_stats, swap_failures, 240);
AT(pllm_stats, prompt_tokens_cached, 248);
AT(pllm_stats, traces_stopped, 256);
AT(pllm_stats, journals_stopped, 264);
AT(pllm_stats, discard_failures, 272);
AT(pllm_stats, blocks_out_of_window, 280);

SIZE(pllm_output, 232);
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
AT(pllm_output, score, 120);
AT(pllm_output, top_logprobs, 128);
AT(pllm_output, top_logprobs_len, 136);
AT(pllm_output, prompt_logprobs, 144);
AT(pllm_output, prompt_logprobs_len, 152);
AT(pllm_output, prompt_top_logprobs, 160);
AT(pllm_output, prompt_top_logprobs_len, 168);
AT(pllm_output, sequence_state, 176);
AT(pllm_output, sequence_state_len, 184);
AT(pllm_output, queued_seconds, 192);
AT(pllm_output, first_token_seconds, 200);
AT(pllm_output, last_token_seconds, 208);
AT(pllm_output, preemptions, 216);
AT(pllm_output, cached_tokens, 224);

SIZE(pllm_dry, 48);
AT(pllm_dry, struct_size, 0);
AT(pllm_dry, multiplier, 8);
AT(pllm_dry, base, 12);
AT(pllm_dry, allowed_length, 16);
AT(pllm_dry, penalty_last_n, 20);
AT(pllm_dry, sequence_breakers, 24);
AT(pllm_dry, sequence_breaker_lens, 32);
AT(pllm_dry, sequence_breaker_count, 40);

SIZE(pllm_beam, 32);
AT(pllm_beam, struct_size, 0);
AT(pllm_beam, width, 8);
AT(pllm_beam, groups, 12);
AT(pllm_beam, diversity_penalty, 16);
AT(pllm_beam, length_penalty, 20);
AT(pllm_beam, early_stopping, 24);
AT(pllm_beam, reserved, 28);

SIZE(pllm_logit_bias, 8);
AT(pllm_logit_bias, token, 0);
AT(pllm_logit_bias, bias, 4);

SIZE(pllm_token_list, 16);
AT(pllm_token_list, tokens, 0);
AT(pllm_token_list, tokens_len, 8);

SIZE(pllm_logprob, 8);
AT(pllm_logprob, token, 0);
AT(pllm_logprob, logprob, 4);

SIZE(pllm_fork, 48);
AT(pllm_fork, struct_size, 0);
AT(pllm_fork, at, 8);
AT(pllm_fork, seed, 16);
AT(pllm_fork, user_data, 24);
AT(pllm_fork, queue, 32);
AT(pllm_fork, n, 40);
AT(pllm_fork, flags, 44);

SIZE(pllm_resume, 64);
AT(pllm_resume, struct_size, 0);
AT(pllm_resume, sampling, 8);
AT(pllm_resume, queue, 16);
AT(pllm_resume, user_data, 24);
AT(pllm_resume, flags, 32);
AT(pllm_resume, text_flags, 36);
AT(pllm_resume, logits_hook, 40);
AT(pllm_resume, hook_data, 48);
AT(pllm_resume, deadline_ms, 56);

SIZE(pllm_pin, 72);
AT(pllm_pin, struct_size, 0);
AT(pllm_pin, prompt, 8);
AT(pllm_pin, prompt_len, 16);
AT(pllm_pin, prompt_token_ids, 24);
AT(pllm_pin, prompt_token_ids_len, 32);
AT(pllm_pin, cache_salt, 40);
AT(pllm_pin, cache_salt_len, 48);
AT(pllm_pin, time_to_live_ms, 56);
AT(pllm_pin, priority, 64);
AT(pllm_pin, text_flags, 68);

SIZE(pllm_sequence_info, 40);
AT(pllm_sequence_info, struct_size, 0);
AT(pllm_sequence_info, request, 8);
AT(pllm_sequence_info, len, 16);
AT(pllm_sequence_info, index, 24);
AT(pllm_sequence_info, idle, 28);
AT(pllm_sequence_info, inexact, 32);

#endif
