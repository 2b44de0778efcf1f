/*
 * libpagedllm: LLM serving inside your own process.
 *
 *     pllm_engine_options options;
 *     pllm_engine_options_init(&options, sizeof options);
 *     options.model_path = "models/mine";
 *     pllm_engine *engine;
 *     pllm_error *error = pllm_engine_create(&options, &engine);
 *     ...pllm_engine_add_request...
 *     pllm_step step = {sizeof step};
 *     do {
 *         error = pllm_engine_step(engine, &step);
 *         ...pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs)...
 *     } while (!error && step.unfinished);
 *
 * These rules apply to every function:
 *
 * Errors. A function that can fail returns pllm_error *. NULL is success; the caller frees any
 * other value with pllm_error_free. Outputs (out_*) are written only on success. A defect of the
 * library is PLLM_E_INTERNAL. Later releases can add codes and finish reasons: treat an unknown
 * code as an error and an unknown finish reason as an end.
 *
 * Side effects. The library prints nothing, handles no signals and does not abort the process,
 * unless the system refuses memory for a small allocation (docs/allocations.md).
 *
 * Pointers. A pointer is NULL or valid for the whole call. NULL for a required argument is
 * PLLM_E_INVALID_ARGUMENT; freeing NULL is allowed. The caller owns an object that is returned
 * through a pointer to a pointer. A returned pointer is borrowed from the first argument.
 *
 * Structs. Each struct starts with struct_size. For a struct that the caller fills, call its _init
 * function with sizeof, then set fields. For a struct that the library fills, set struct_size to
 * sizeof. A program built with an older or a newer header keeps working: fields that one side does
 * not know have their default, or are zero. Unknown flags and reserved fields that are not 0 are
 * PLLM_E_UNSUPPORTED.
 *
 * Strings are UTF-8 with a length in bytes. The length PLLM_NUL_TERMINATED marks a NUL-terminated
 * string.
 *
 * Threads. Any thread may call any function at any time, also during a step, with two exceptions:
 * only one thread steps an engine (a second one gets PLLM_E_BUSY), and no other call on an object
 * may be in progress when it is freed. pllm_engine_start starts a thread that steps the engine.
 *
 * Stacks. Every function works on a thread with a stack of at least 64 KiB, whatever the model's
 * files, except calls that load NVIDIA's driver. Work that needs more stack runs on a temporary
 * thread of the library.
 *
 * Processes. In a child of fork(), calls on an engine of the parent return PLLM_E_UNSUPPORTED,
 * except that freeing it is allowed. The parent is not affected.
 */

#ifndef PAGEDLLM_H
#define PAGEDLLM_H

/* Generated from src/ffi by cbindgen: change it there and run `make header`. */

#include <stdint.h>
#if defined(__cplusplus) && __cplusplus >= 201703L
#define PLLM_NODISCARD [[nodiscard]]
#elif defined(__GNUC__)
#define PLLM_NODISCARD __attribute__((warn_unused_result))
#else
#define PLLM_NODISCARD
#endif


// Version of the ABI, and of the soname libpagedllm.so.1. Programs that were built with another
// version must be rebuilt.
#define PLLM_ABI_VERSION 1

// Length value that marks a string as NUL-terminated.
#define PLLM_NUL_TERMINATED UINT64_MAX

// An argument is invalid: a value, a range, a text encoding.
#define PLLM_E_INVALID_ARGUMENT 1

// No live request, sequence or pin has this id.
#define PLLM_E_NOT_FOUND 2

// A file cannot be opened, read or written.
#define PLLM_E_IO 3

// The model's files are damaged, incomplete or contradictory, or its weights are not finite.
#define PLLM_E_MODEL 4

// This build, model or machine does not support the request.
#define PLLM_E_UNSUPPORTED 5

// A limit of memory, blocks, requests or queues does not allow it.
#define PLLM_E_CAPACITY 6

// Another thread is stepping this engine.
#define PLLM_E_BUSY 7

// The system has no memory left.
#define PLLM_E_OUT_OF_MEMORY 8

// A defect of the library. If it occurs in a step, the engine has failed: each request ends with
// PLLM_FINISH_ERROR, later calls return the same error, and pllm_engine_free still works.
#define PLLM_E_INTERNAL 9

// The engine that owns this object has been freed.
#define PLLM_E_CLOSED 10

// The host's progress callback cancelled the call.
#define PLLM_E_CANCELLED 11

// The operation has succeeded.
#define PLLM_KV_DONE 0

// The store has no value of the key.
#define PLLM_KV_MISSING 1

// The operation has failed.
#define PLLM_KV_FAILED 2

// Selected by the library.
#define PLLM_DTYPE_AUTO 0

// 32-bit floating point.
#define PLLM_DTYPE_F32 1

// bfloat16.
#define PLLM_DTYPE_BF16 2

// 8-bit integers with a scale in f32 for each head of each token: about half the bytes of bf16, at
// a small cost in quality.
#define PLLM_DTYPE_INT8 3

// 16-bit floating point. Values beyond 65504 are clamped.
#define PLLM_DTYPE_F16 4

// 8-bit floating point (OCP E4M3) with the scales of PLLM_DTYPE_INT8. More precise for small
// values beside large ones, less precise for large values.
#define PLLM_DTYPE_FP8 5

// The widest instruction path of the machine: AVX512_BF16, AVX512_VNNI, AVX512, AVX_VNNI, AVX2,
// PORTABLE.
#define PLLM_ISA_AUTO 0

// Any CPU.
#define PLLM_ISA_PORTABLE 1

// AVX2, FMA and F16C.
#define PLLM_ISA_AVX2 2

// AVX-512 F, BW, DQ and VL.
#define PLLM_ISA_AVX512 3

// As PLLM_ISA_AVX512_VNNI, with AVX-512 BF16: activations that are multiplied by weights or KV in
// bf16 are rounded to bf16, and the products are summed in f32. Up to twice as fast for prompts.
#define PLLM_ISA_AVX512_BF16 4

// As PLLM_ISA_AVX2, with AVX-VNNI: products with integer weights are faster, with the same bits.
#define PLLM_ISA_AVX_VNNI 5

// As PLLM_ISA_AVX512, with AVX-512 VNNI: products with integer weights are faster, with the same
// bits.
#define PLLM_ISA_AVX512_VNNI 6

// As in the model's files. Infinities and NaNs are kept.
#define PLLM_WEIGHTS_AS_STORED 0

// 32-bit floating point.
#define PLLM_WEIGHTS_F32 1

// 16-bit floating point.
#define PLLM_WEIGHTS_F16 2

// bfloat16.
#define PLLM_WEIGHTS_BF16 3

// 8-bit integers with a scale for each output. The CPU multiplies them by 8-bit activations, which
// have a scale for every 128 values of a row. CUDA devices multiply them by activations in bf16.
#define PLLM_WEIGHTS_INT8 4

// 4-bit integers with a scale for each group of weight_group inputs of an output. The embedding
// and the head are in 8 bits. Activations are as for PLLM_WEIGHTS_INT8.
#define PLLM_WEIGHTS_INT4 5

// As PLLM_WEIGHTS_INT4, with an offset for each group, for 16 more bits a group. With groups of the
// same size, it is the more precise of the two formats.
#define PLLM_WEIGHTS_INT4_ASYMMETRIC 6

// CUDA only: 8-bit floating point (OCP E4M3) with a scale for each output. The embedding and the
// head are as stored. Products of many rows multiply by fp8 activations with a scale for each row,
// if the device supports it. All other products, those of experts and those with
// PLLM_ENGINE_BATCH_INVARIANT multiply by bf16 activations.
#define PLLM_WEIGHTS_FP8 7

// packed_path was not set.
#define PLLM_PACKED_UNUSED 0

// The packed weights were read from packed_path.
#define PLLM_PACKED_READ 1

// The weights were packed from the model's files and written to packed_path.
#define PLLM_PACKED_SAVED 2

// The weights were packed from the model's files and could not be written to packed_path.
#define PLLM_PACKED_UNSAVED 3

// Serve token ids only: no tokenizer is loaded, and text calls return PLLM_E_UNSUPPORTED.
#define PLLM_ENGINE_SKIP_TOKENIZER 1

// Disable the prefix cache.
#define PLLM_ENGINE_NO_PREFIX_CACHE 2

// On a CUDA device: the results of a sequence do not depend on the batch, as on the CPU. Slower:
// products of many rows do not use cuBLASLt, and attention over long sequences is not split.
#define PLLM_ENGINE_BATCH_INVARIANT 4

// Preempted requests lose their KV blocks and are recomputed when they are rescheduled.
#define PLLM_PREEMPTION_RECOMPUTE 0

// Preempted requests are swapped to host memory. If it is full, they are recomputed.
#define PLLM_PREEMPTION_SWAP 1

// Swap or recompute, whichever costs less by the measured times.
#define PLLM_PREEMPTION_AUTO 2

// First come, first served.
#define PLLM_ORDER_FCFS 0

// Highest priority of pllm_request first. It can preempt running requests of lower priority. To
// prevent starvation, a request that has waited for ageing_ms goes before new requests of the next
// higher priority.
#define PLLM_ORDER_PRIORITY 1

// Shortest predicted output first. The prediction uses recent requests with a similar max_tokens.
// To prevent starvation, a request that has waited for ageing_ms goes before new requests that are
// predicted to be up to 100 tokens shorter.
#define PLLM_ORDER_SHORTEST_PREDICTED 2

// Each step mixes prompt chunks and decodes, in the order of the requests.
#define PLLM_BATCHING_MIXED 0

// Each step has either prompts or decodes, and prompts go first. After prefill_budget prompt
// tokens, the decodes get one step.
#define PLLM_BATCHING_PREFILL_FIRST 1

// Each step has every decode and at most prefill_budget prompt tokens: bounds the time between
// tokens.
#define PLLM_BATCHING_DECODE_FIRST 2

// Static batching: no request is admitted until the running batch has finished. For baselines.
#define PLLM_BATCHING_STATIC 3

// Blocks are allocated as a sequence grows. If the pool is full, the last request in the order is
// preempted.
#define PLLM_ALLOCATION_ON_DEMAND 0

// A request starts when the pool has blocks for its max_tokens, so that growing sequences cause no
// preemption. Forks and appended tokens of running sequences are not included.
#define PLLM_ALLOCATION_MAX_TOKENS 1

// Use the seed field. Without this flag the seed is derived from the engine's seed and the request
// id.
#define PLLM_SAMPLING_SEED 1

// Do not stop at end-of-sequence tokens.
#define PLLM_SAMPLING_IGNORE_EOS 2

// Report the log probability of each generated token, and of the top_logprobs most probable
// tokens.
#define PLLM_SAMPLING_LOGPROBS 4

// Report the log probability of each prompt token except the first, from prompt_logprobs_start on,
// and of the prompt_top_logprobs most probable tokens. Of several samples, the first reports them.
// A fork does not report them again.
#define PLLM_SAMPLING_PROMPT_LOGPROBS 8

// The output begins with the prompt. With PLLM_SAMPLING_LOGPROBS, the tokens of the prompt have
// log probabilities, too: the prompt is computed from prompt_logprobs_start on even if the prefix
// cache has it, and its output follows then.
#define PLLM_SAMPLING_ECHO 16

// The stop string, or the text of the token that ends the sequence, stays in the text.
#define PLLM_SAMPLING_INCLUDE_STOP 32

// Parameters that are left at their default take the values of the model's
// generation_config.json, if it has them: temperature, top_k, top_p, min_p, typical_p,
// repetition_penalty and no_repeat_ngram_size. "do_sample": false selects temperature 0. Has no
// effect on beam search.
#define PLLM_SAMPLING_MODEL_DEFAULTS 64

// Until the first token is generated or appended, each step that computes a part of the prompt, but
// not its end, has an output with computed_tokens and without tokens or text, whatever output_kind
// is. The other tokens of the prompt follow in later steps, because it is longer than
// prefill_chunk or max_batch_tokens, or because the step was full. These outputs count for the
// capacity of the queue. After a preemption the numbers can be smaller again. Of several samples
// or beams, the first sequence reports them.
#define PLLM_SAMPLING_PREFILL_PROGRESS 128

// Value of max_tokens: as many tokens as max_model_len allows.
#define PLLM_UNLIMITED_TOKENS UINT32_MAX

// Each output has the new tokens and the new text only.
#define PLLM_OUTPUT_DELTA 0

// Each output has all tokens and the whole text so far.
#define PLLM_OUTPUT_CUMULATIVE 1

// One output at the end of the sequence has all tokens and the whole text.
#define PLLM_OUTPUT_FINAL 2

// No constraint.
#define PLLM_GRAMMAR_NONE 0

// A JSON text that the schema in grammar (itself a JSON text) describes. Properties come in the
// order of "properties".
// - "pattern" and the names of "patternProperties" are regular expressions of ECMA-262, in Unicode
//   mode if they are valid there, otherwise by annex B. Lookarounds, backreferences and word
//   boundaries are errors.
// - A "format" that cannot be generated is an annotation.
// - "propertyNames" has one of "enum", "const", "pattern" and the lengths, or a "$ref" to such a
//   schema, in a schema without "properties" and "patternProperties". Otherwise it is an error.
// - Keywords that cannot be generated are errors: among others "uniqueItems", "contains", "not",
//   "if" and "dependentRequired".
// - A grammar has at most 64 members of "patternProperties". An object has at most about 500
//   optional properties, or 3,000 required ones. Objects with more properties of both kinds
//   together can be refused.
//
// The object "x-guidance" at the root of the schema has these options:
// - "strict_formats" (default false): if true, the formats of JSON Schema that cannot be generated
//   are errors: idn-email, idn-hostname, iri, iri-reference, json-pointer, regex,
//   relative-json-pointer, uri-reference and uri-template.
// - "lenient" (default false): if true, keywords that cannot be generated are ignored, such as
//   "uniqueItems" in the schema of a set. The output may then violate them: check it.
// - "coerce_one_of" (default false): if true, "oneOf" means "anyOf" if its schemas may overlap. If
//   false, such a "oneOf" is an error.
// - "whitespace_flexible" (default true): if false, there is no white space between the parts of
//   the text.
// - "whitespace_pattern" (default: one space or tab, or a line break and at most 40 of these): the
//   text between two parts, as a regular expression of Rust.
// - "item_separator" (default ","): a regular expression of Rust.
// - "key_separator" (default ":"): a regular expression of Rust.
// - "json_allowed_escapes" (default "nrbtf\\\"", with "u" if the schema has no names of properties
//   or demands other control characters): the characters that may follow a backslash in strings.
// - "json_allow_general_unicode_escapes" (default false): if true, strings without a pattern may
//   write any character as \u and digits.
#define PLLM_GRAMMAR_JSON_SCHEMA 1

// Any JSON object.
#define PLLM_GRAMMAR_JSON_OBJECT 2

// A text that the regular expression in grammar matches as a whole: a pattern of Python's re for
// str. Lookarounds, backreferences, word boundaries, atomic groups, possessive quantifiers,
// conditions, \N and the anchors of lines are errors.
#define PLLM_GRAMMAR_REGEX 3

// One of the texts in choices.
#define PLLM_GRAMMAR_CHOICE 4

// A text that the Lark grammar in grammar describes. Its regular expressions are those of Python's
// re, with \p{Name} for Unicode properties. A schema after %json is read like that of
// PLLM_GRAMMAR_JSON_SCHEMA, with options of its own.
#define PLLM_GRAMMAR_LARK 5

// The tokenizer adds its special tokens, such as BOS. Do not set it for a prompt that a chat
// template rendered.
#define PLLM_TEXT_ADD_SPECIAL 1

// Special tokens are left out of the text.
#define PLLM_TEXT_SKIP_SPECIAL 2

// The sequences of the request are kept when they end, for any reason, and become idle.
// pllm_sequence_resume continues one; pllm_sequence_free frees it.
#define PLLM_REQUEST_KEEP 1

// Stop when the best running beam, if it ended now, would not score higher than the worst finished
// beam.
#define PLLM_EARLY_STOPPING_NO 0

// Stop as soon as width beams are finished.
#define PLLM_EARLY_STOPPING_YES 1

// Stop when no running beam can reach a higher score than the worst finished beam.
#define PLLM_EARLY_STOPPING_NEVER 2

// The sequence has not ended.
#define PLLM_FINISH_NONE 0

// An end-of-sequence token, a stop token or a stop string.
#define PLLM_FINISH_STOP 1

// max_tokens or max_model_len was reached.
#define PLLM_FINISH_LENGTH 2

// The host aborted the request.
#define PLLM_FINISH_ABORT 3

// The computation failed. See error and error_code.
#define PLLM_FINISH_ERROR 4

// The deadline passed. The outputs have the tokens generated by then.
#define PLLM_FINISH_DEADLINE 5

// The sequence has not ended, or for another reason than PLLM_FINISH_STOP.
#define PLLM_STOP_NONE 0

// An end-of-sequence token of the model.
#define PLLM_STOP_EOS 1

// A token of stop_token_ids.
#define PLLM_STOP_TOKEN 2

// A string of stop.
#define PLLM_STOP_STRING 3

// The grammar was complete.
#define PLLM_STOP_GRAMMAR 4

// A suitable capacity for the queue of one request.
#define PLLM_QUEUE_CAPACITY 64

// The fork has all tokens of its parent.
#define PLLM_FORK_AT_END UINT64_MAX

// Use the seed field. Without this flag the children draw the same random numbers as their parent.
#define PLLM_FORK_SEED 1

// The children are idle until they are resumed, even if the parent runs.
#define PLLM_FORK_IDLE 2

// Use the user_data field. Without this flag the children have the user_data of the parent.
#define PLLM_FORK_USER_DATA 4

// Use the user_data field. Without this flag the sequence keeps its user_data.
#define PLLM_RESUME_USER_DATA 2

// Continue as if the sequence had never been idle, with its own parameters, counts, grammar and
// output kind. Of the other fields only queue, user_data, logits_hook (NULL: keep it), deadline_ms
// and PLLM_REQUEST_KEEP are used. A sequence that ended by its length must be rewound first;
// otherwise it ends again with PLLM_FINISH_ERROR.
#define PLLM_RESUME_CONTINUE 4

// The block is in the cache from now on.
#define PLLM_KV_EVENT_STORED 0

// The block is no longer in the cache.
#define PLLM_KV_EVENT_REMOVED 1

// No block is in the cache. PLLM_KV_EVENT_STORED of each block that is there follows.
#define PLLM_KV_EVENT_CLEARED 2

// The KV pool of the engine, in the memory of its device.
#define PLLM_KV_MEDIUM_POOL 0

// A memory budget for KV pools. Several engines of a process can share it, and its size can change
// while they run. Any thread may use it.
//
// An engine that needs more blocks than are free reclaims blocks that other engines only cache. An
// engine with requests gives its cached blocks back before its next step, so step every engine
// that has requests. An engine without requests gives them back at once.
typedef struct pllm_budget pllm_budget;

// A UTF-8 text, or the hashes of pllm_engine_hash_prompt. The caller frees it with
// pllm_bytes_free.
typedef struct pllm_bytes pllm_bytes;

// An engine: one model, its KV pool and its requests. Any thread may use it; one thread at a time
// steps it.
typedef struct pllm_engine pllm_engine;

// An error: a stable code, and a message with the numbers and the remedy. The caller frees it with
// pllm_error_free.
typedef struct pllm_error pllm_error;

// A batch of KV events. The caller frees it with pllm_kv_events_free. It stays valid after the
// engine is freed.
typedef struct pllm_kv_events pllm_kv_events;

// A batch of outputs. The caller frees it with pllm_outputs_free. It stays valid after the engine
// is freed.
typedef struct pllm_outputs pllm_outputs;

// A queue of outputs. Any thread may poll it.
typedef struct pllm_queue pllm_queue;

// The parser of one response: it separates reasoning, content and tool calls while the response is
// generated. The caller frees it with pllm_response_parser_free.
typedef struct pllm_response_parser pllm_response_parser;

// A list of token ids. The caller frees it with pllm_tokens_free.
typedef struct pllm_tokens pllm_tokens;

// The state of a budget. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_budget_info).
  uint64_t struct_size;
  // Size of the budget in bytes.
  uint64_t bytes;
  // Smallest size in bytes to which it can be resized now, given its engines and their requests.
  uint64_t min_bytes;
  // Largest size in bytes to which it can be resized.
  uint64_t max_bytes;
  // Bytes that the engines hold. More than bytes while engines are giving blocks back.
  uint64_t held_bytes;
  // Engines that use the budget.
  uint64_t engines;
} pllm_budget_info;

// Starts to look for keys_len keys of 32 bytes each, back to back. Before the completion, sets
// out_found[i] to 1 if the store has key i. The bytes are 0 before the call. Returns 0 if the
// operation has started. After another value, there is no completion.
typedef int32_t (*pllm_kv_exists)(void *user_data,
                                  uint64_t token,
                                  const uint8_t *keys,
                                  uint64_t keys_len,
                                  uint8_t *out_found);

// A part of a value. An element of arrays, so it never grows.
typedef struct {
  // First byte.
  void *data;
  // Length in bytes.
  uint64_t len;
} pllm_kv_buffer;

// Starts to read the value of a key of 32 bytes into buffers_len buffers, one after the other.
// Returns as pllm_kv_exists.
typedef int32_t (*pllm_kv_get)(void *user_data,
                               uint64_t token,
                               const uint8_t *key,
                               const pllm_kv_buffer *buffers,
                               uint64_t buffers_len);

// Starts to write a value, which is the concatenation of the buffers. The store does not change
// the buffers. If it has a value of this key, it may keep that one. Returns as pllm_kv_exists.
typedef int32_t (*pllm_kv_put)(void *user_data,
                               uint64_t token,
                               const uint8_t *key,
                               const pllm_kv_buffer *buffers,
                               uint64_t buffers_len);

// Starts to remove a value, which was damaged. Returns as pllm_kv_exists.
typedef int32_t (*pllm_kv_remove)(void *user_data, uint64_t token, const uint8_t *key);

// The end of an operation of a KV store. An element of arrays, so it never grows.
typedef struct {
  // Token of the operation.
  uint64_t token;
  // For get: the size of the stored value in bytes. If it differs from the size of the buffers,
  // the value counts as damaged. Otherwise ignored.
  uint64_t bytes;
  // One of PLLM_KV_DONE, PLLM_KV_MISSING, PLLM_KV_FAILED. Other values count as PLLM_KV_FAILED.
  uint32_t status;
  // Ignored.
  uint32_t reserved;
} pllm_kv_completion;

// Waits until an operation ends, at most timeout_us microseconds; 0 does not wait. Writes up to
// capacity completions and returns their number. The engine calls it only while operations are in
// flight.
typedef uint64_t (*pllm_kv_poll)(void *user_data,
                                 uint64_t timeout_us,
                                 pllm_kv_completion *out_completions,
                                 uint64_t capacity);

// Ends all operations. After it returns, the store uses no buffer, and the engine calls no
// function.
typedef void (*pllm_kv_close)(void *user_data);

// A store that keeps KV blocks outside of the pool: on a disk, on another host. The functions
// start operations and return at once; poll reports their end. A key names a block of one model,
// layout and instruction path, and one salt, by its tokens. Values have a checksum. A store that
// fails, is slow or returns damaged values costs computation, never correctness. It is trusted not
// to forge values, unless kv_store_secret of pllm_engine_options is set.
//
// Threads: one thread of the engine calls all functions, one at a time. They must return normally:
// no exception, no longjmp. They must not call the engine.
//
// Ownership: the engine copies the struct. user_data is valid until close returns. If
// pllm_engine_create fails, the engine calls no function, and the host may use or close the store.
// Keys and arrays of buffers are valid during the call; the memory of buffers and out_found until
// the completion, or until close returns.
typedef struct {
  // sizeof(pllm_kv_store).
  uint64_t struct_size;
  // Passed to the functions.
  void *user_data;
  // Looks for keys. Required.
  pllm_kv_exists exists;
  // Reads a value. Required.
  pllm_kv_get get;
  // Writes a value. Required.
  pllm_kv_put put;
  // Removes a value. Required.
  pllm_kv_remove remove;
  // Reports the end of operations. Required.
  pllm_kv_poll poll;
  // Ends the use of the store. Required. pllm_engine_free waits for it, and for the last writes,
  // up to kv_store_timeout_ms and 2 seconds. If close does not return by then, its thread is
  // left behind, and user_data and the code of the store must stay valid.
  pllm_kv_close close;
} pllm_kv_store;

// Copies len bytes of rank root to all ranks. The root may return before the other ranks have
// them. Returns 0, or another number for an error.
typedef int32_t (*pllm_communicator_broadcast)(void *user_data,
                                               void *bytes,
                                               uint64_t len,
                                               uint32_t root,
                                               uint64_t timeout_ms);

// Copies len bytes of each rank to all ranks: those of rank i to out + i * len. Returns as
// pllm_communicator_broadcast.
typedef int32_t (*pllm_communicator_all_gather)(void *user_data,
                                                const void *bytes,
                                                uint64_t len,
                                                void *out,
                                                uint64_t timeout_ms);

// Copies part i of the bytes to rank i. bytes and out have a part of len bytes for each rank, back
// to back. Part i of out comes from rank i. Returns as pllm_communicator_broadcast.
typedef int32_t (*pllm_communicator_all_to_all)(void *user_data,
                                                const void *bytes,
                                                uint64_t len,
                                                void *out,
                                                uint64_t timeout_ms);

// Sends len bytes to another rank. May return before the other rank has them. Returns as
// pllm_communicator_broadcast.
typedef int32_t (*pllm_communicator_send)(void *user_data,
                                          const void *bytes,
                                          uint64_t len,
                                          uint32_t to,
                                          uint64_t timeout_ms);

// Receives the next len bytes that another rank sends. Both ranks give the same length. Returns as
// pllm_communicator_broadcast.
typedef int32_t (*pllm_communicator_receive)(void *user_data,
                                             void *bytes,
                                             uint64_t len,
                                             uint32_t from,
                                             uint64_t timeout_ms);

// Divides the group: ranks with the same color form a new group, in the order of their ranks.
// Writes the user data, the rank and the size of a communicator of that group. It has the same
// functions, and is closed on its own. Returns as pllm_communicator_broadcast.
typedef int32_t (*pllm_communicator_split)(void *user_data,
                                           uint32_t color,
                                           uint64_t timeout_ms,
                                           void **out_user_data,
                                           uint32_t *out_rank,
                                           uint32_t *out_size);

// Leaves the group. The calls of the other ranks that wait for this rank should then fail.
typedef void (*pllm_communicator_close)(void *user_data);

// A rank of a group whose ranks exchange bytes: the workers of one engine. A host can use that of
// pllm_communicator_shared_memory, that of bindings/mpi, or its own.
//
// All ranks call the same functions in the same order. A function waits until the other ranks have
// done their part, at most timeout_ms milliseconds; 0 is no limit. After an error, all later calls
// of the rank fail, and those of the other ranks should.
//
// Threads: one thread at a time calls the functions, not always the same one. They must return
// normally: no exception, no longjmp. They must not call the engine.
//
// Ownership: pllm_engine_create and pllm_worker_run copy the struct. If they succeed, the library
// calls close, once and last. If they fail, the host closes the communicator, which the other
// ranks wait for. The library closes what split returns in any case, before the communicator
// itself. user_data is valid until close returns. A communicator is for one engine or worker.
// pllm_engine_plan ignores it.
typedef struct {
  // sizeof(pllm_communicator).
  uint64_t struct_size;
  // Passed to the functions.
  void *user_data;
  // Number of this rank, below size.
  uint32_t rank;
  // Number of ranks.
  uint32_t size;
  // Copies bytes of one rank to all. Required.
  pllm_communicator_broadcast broadcast;
  // Copies bytes of each rank to all. Required.
  pllm_communicator_all_gather all_gather;
  // Copies different bytes to each rank. Required.
  pllm_communicator_all_to_all all_to_all;
  // Sends bytes to one rank. Required.
  pllm_communicator_send send;
  // Receives bytes from one rank. Required.
  pllm_communicator_receive receive;
  // Divides the group. NULL: not possible, so an engine cannot have tensor and pipeline
  // parallelism together.
  pllm_communicator_split split;
  // Leaves the group. Required.
  pllm_communicator_close close;
} pllm_communicator;

// The DRY penalty: a token that would extend a repetition of length tokens loses multiplier * base
// ^ (length - allowed_length). Call pllm_dry_init first.
typedef struct {
  // sizeof(pllm_dry).
  uint64_t struct_size;
  // Strength of the penalty. Range 0 to 100. Default 0.8. 0 disables it.
  float multiplier;
  // Base of the exponential growth. Range 1 to 100. Default 1.75.
  float base;
  // Length in tokens of the longest repetition without a penalty. Default 2.
  uint32_t allowed_length;
  // Number of last tokens that are searched for repetitions. 0 (default): all.
  uint32_t penalty_last_n;
  // Texts that end a repetition, within a token or across tokens. NULL with a count of 0
  // (default): newline, colon, quotation mark and asterisk, or none with
  // PLLM_ENGINE_SKIP_TOKENIZER. A non-NULL pointer with a count of 0: none. At most 64 texts of
  // at most 128 bytes each.
  const char *const *sequence_breakers;
  // Length of each text in bytes. NULL: the texts are NUL-terminated.
  const uint64_t *sequence_breaker_lens;
  // Number of texts.
  uint64_t sequence_breaker_count;
} pllm_dry;

// Parameters of a beam search, as in generate of Hugging Face transformers: release 5, and release
// 4 for several groups. Call pllm_beam_init first.
//
// Logit bias, penalties and exclusions of pllm_sampling apply to the log probabilities, in the
// order of transformers. Frequency and presence penalties and DRY, which transformers lacks,
// follow the repetition penalty. Bad words can forbid end tokens, which transformers ignores.
typedef struct {
  // sizeof(pllm_beam).
  uint64_t struct_size;
  // Number of beams, 2 to 64. Default 4.
  uint32_t width;
  // Number of groups of beams, each with its own search. Default 1.
  uint32_t groups;
  // Subtracted from the log probability of a token for each beam of an earlier group that chose
  // it in the same step, before the repetition penalty. Range 0 to 1,000,000. Default 0.
  float diversity_penalty;
  // The score of a beam is the sum of its log probabilities divided by its length to this power.
  // Range -5 to 5. Default 1.
  float length_penalty;
  // PLLM_EARLY_STOPPING_*. Default PLLM_EARLY_STOPPING_NO.
  uint32_t early_stopping;
  // Must be 0.
  uint32_t reserved;
} pllm_beam;

// Reports the bytes of weights that have been read, out of total, on the thread that creates the
// engine. A result other than 0 cancels the loading: pllm_engine_create returns PLLM_E_CANCELLED.
// It must return normally: no exception, no longjmp. It must not use the engine that is being
// created.
typedef int32_t (*pllm_progress)(void *progress_data, uint64_t done, uint64_t total);

// Options of an engine. Call pllm_engine_options_init first. The strings need to be valid only
// during the call.
typedef struct {
  // sizeof(pllm_engine_options).
  uint64_t struct_size;
  // Model directory in the layout of Hugging Face, or a GGUF file. UTF-8.
  const char *model_path;
  // Length of model_path in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t model_path_len;
  // Device: "cpu" (default, also NULL), or "cuda:0" (also "cuda") for the first CUDA device.
  // CUDA needs an NVIDIA driver for CUDA 12.0 or newer (525) and compute capability 8.0 or newer.
  // Prompts are faster with NVIDIA's cuBLAS for CUDA 12 or 13 (libcublasLt.so.12 or .13), which
  // blas_library of pllm_model_info reports. A list such as "cuda:0,cuda:1" divides the model
  // among up to 64 devices of one kind, which needs NCCL (libnccl.so.2). Lists have not been tested
  // on GPUs yet.
  const char *device;
  // Length of device in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t device_len;
  // KV pool size in bytes. 0 (default): enough for max_seqs sequences of max_model_len tokens,
  // at most 1 GiB.
  uint64_t kv_bytes;
  // Seed for requests without a seed of their own. Default 0.
  uint64_t seed;
  // Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
  uint32_t block_size;
  // Data type of KV blocks: PLLM_DTYPE_*. Default PLLM_DTYPE_AUTO: f32 for models in f32, else
  // bf16.
  uint32_t kv_dtype;
  // Maximum length of a sequence in tokens, prompt and output together. 0 (default): the model's
  // own maximum, or what the pool holds.
  uint32_t max_model_len;
  // Maximum number of tokens in one step, prompt and decode tokens of all sequences together.
  // Default 512.
  uint32_t max_batch_tokens;
  // Maximum number of running sequences, at most max_batch_tokens. Default 64.
  uint32_t max_seqs;
  // Maximum number of prompt tokens of one sequence in one step. 0 (default): max_batch_tokens.
  uint32_t prefill_chunk;
  // Number of threads, including the stepping thread. 0 (default): the number of CPUs in cpus,
  // or of CPUs on which the process may run, within the quota of its container.
  uint32_t threads;
  // Instruction path: PLLM_ISA_*. Default PLLM_ISA_AUTO. Results have the same bits within a
  // path, not across paths.
  uint32_t isa;
  // PLLM_ENGINE_* flags. Default 0.
  uint32_t flags;
  // Must be 0.
  uint32_t reserved;
  // Capacity, in outputs, of the engine's own queue. See pllm_queue_create. 0 (default): 65536.
  // Unlimited for programs built with a header without this field.
  uint64_t queue_capacity;
  // Called while weights are loaded. NULL (default): not called.
  pllm_progress progress;
  // Passed to progress.
  void *progress_data;
  // Maximum number of requests, including resumed and forked sequences, that wait for their
  // first step. More are refused with PLLM_E_CAPACITY; one can always wait. 0 (default): no
  // limit.
  uint64_t max_waiting_requests;
  // Maximum number of tokens that the waiting requests have to compute. 0 (default): no limit.
  uint64_t max_waiting_tokens;
  // Budget from which the KV pool takes its bytes, instead of kv_bytes. NULL (default): a budget
  // of its own.
  const pllm_budget *budget;
  // Size in bytes of the host tier, which holds the KV of swapped requests and idle sequences. 0
  // (default): none.
  uint64_t swap_bytes;
  // Directory for the host tier. The tier is an unnamed file there, which grows as it is written
  // and disappears with the engine. A thread of the engine reads and writes it. A slow disk
  // delays only the sequences that return from it; while it is behind, others are recomputed.
  // NULL (default): the tier is in memory. If the file cannot be written or read, as on a full
  // disk, the sequence is recomputed when it returns and swap_failures of pllm_stats counts it.
  const char *swap_path;
  // Length of swap_path in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t swap_path_len;
  // PLLM_PREEMPTION_*. Default PLLM_PREEMPTION_RECOMPUTE. The others need swap_bytes, and
  // swap_bytes needs one of the others.
  uint32_t preemption;
  // Order of the waiting requests: PLLM_ORDER_*. Default PLLM_ORDER_FCFS.
  uint32_t order;
  // Waiting time in milliseconds after which a request is preferred; see PLLM_ORDER_*. 0
  // (default): 10,000.
  uint32_t ageing_ms;
  // Composition of a step: PLLM_BATCHING_*. Default PLLM_BATCHING_MIXED.
  uint32_t batching;
  // Prompt tokens for PLLM_BATCHING_DECODE_FIRST and PLLM_BATCHING_PREFILL_FIRST. 0 (default):
  // 256 and 2048.
  uint32_t prefill_budget;
  // Number of blocks that a request needs to start: PLLM_ALLOCATION_*. Default
  // PLLM_ALLOCATION_ON_DEMAND.
  uint32_t allocation;
  // File for a trace of every step, in the format of Perfetto and chrome://tracing: the batch,
  // the times of its phases, and the phases of each sequence. UTF-8. An existing file is
  // replaced. A thread of the engine writes it, at most about one second late. If the disk fails
  // or falls behind by 256 MiB, the trace ends and traces_stopped of pllm_stats is 1. NULL
  // (default): none.
  const char *trace_path;
  // Length of trace_path in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t trace_path_len;
  // File for a journal of all calls and of everything else on which steps depend.
  // pagedllm-replay repeats them bit for bit on a machine with the same instruction path. It
  // contains prompts, as tokens, and cache salts. UTF-8. An existing file is replaced. A thread
  // of the engine writes it, at most about one second late. If the disk fails or falls
  // behind by 256 MiB, the journal ends and journals_stopped of pllm_stats is 1. NULL
  // (default): none.
  const char *journal_path;
  // Length of journal_path in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t journal_path_len;
  // Value of the label model_name in pllm_engine_get_metrics. UTF-8. NULL (default): the name of
  // the model directory.
  const char *model_name;
  // Length of model_name in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t model_name_len;
  // Format of the weights in memory: PLLM_WEIGHTS_*. Fewer bits take less memory and time, and
  // cost quality. Small tensors that affect quality (routers of experts, learned positions) and
  // the projections of latents stay as stored. Default PLLM_WEIGHTS_AS_STORED.
  uint32_t weight_format;
  // Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. Smaller is more
  // precise. 0 (default): 32.
  uint32_t weight_group;
  // Directory for packed weights. If it has the packed form of this model, weight_format and
  // library, the form is checked and read as fast as the disk. Otherwise the weights are packed
  // and the form is written, or replaced. Several models and processes can share the directory;
  // unused files are not removed. It contains weights: protect it against writing as the model
  // is protected. If it cannot be written, the engine works and packed of pllm_model_info
  // reports it. UTF-8. NULL (default): weights are packed each time.
  const char *packed_path;
  // Length of packed_path in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t packed_path_len;
  // List of CPUs in the syntax of taskset -c, such as "0-3,8", one for each of threads. Each
  // thread of the engine is pinned to one of them, in this order. The first is for the stepping
  // thread: the engine's own thread (pllm_engine_start) is pinned, a thread of the program is
  // not. NULL (default): threads are not pinned.
  const char *cpus;
  // Length of cpus in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t cpus_len;
  // CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights and working
  // memory, for the KV pool. Cannot be combined with kv_bytes. 0 (default): kv_bytes is used.
  float memory_fraction;
  // Must be 0.
  uint32_t reserved2;
  // Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and
  // of a text to tokenize. A longer one is PLLM_E_INVALID_ARGUMENT. 0 (default): 64 for each
  // token of max_model_len, at least 1048576. Tokenization takes up to 16 bytes of memory for
  // each byte of text, and up to 512 for each byte of a stretch of at most 2 MiB without a place
  // to cut (docs/models.md).
  uint64_t max_prompt_bytes;
  // Store for KV blocks outside of the pool, which is copied. NULL (default): none. A request
  // first waits for the blocks of its prompt that the store has. Full blocks are written to
  // the store. Needs the prefix cache. Each engine needs a store of its own.
  const pllm_kv_store *kv_store;
  // Maximum number of bytes of the blocks that are read or written at a time. 0 (default):
  // 268435456.
  uint64_t kv_store_max_bytes;
  // Maximum number of operations in flight, at most 65536. 0 (default): 64.
  uint32_t kv_store_max_operations;
  // Time in milliseconds in which the store must answer a lookup and read its blocks, at most
  // 3600000. Then the request continues without the others. If no block has arrived by then,
  // requests do not wait for 8 times this time. 0 (default): 1000.
  uint32_t kv_store_timeout_ms;
  // Secret for the keys and checksums of the blocks (HMAC-SHA-256), at least 16 bytes, for a
  // store that is not trusted. Only engines with the same secret share blocks. It is copied.
  // NULL (default): none.
  const uint8_t *kv_store_secret;
  // Length of kv_store_secret in bytes.
  uint64_t kv_store_secret_len;
  // Maximum number of KV events that wait for pllm_engine_poll_kv_events, at most 1048576. 0
  // (default): no events are recorded. 16384 suits most hosts. Needs the prefix cache. Events
  // take memory of the host: about 100 bytes and 4 for each token of a block, for each event
  // and twice for each block of the pool.
  uint64_t kv_events_capacity;
  // Connection with the other workers that compute the model (docs/parallel.md), which is
  // copied. NULL (default): this engine computes it with the devices of this process. Its
  // ranks are tensor_parallel * pipeline_parallel. Each engine or worker needs a
  // communicator of its own.
  const pllm_communicator *communicator;
  // Number of workers that divide each layer. 0 (default): 1, or with a list of devices their
  // number divided by pipeline_parallel. The number of attention heads and the widths of MLPs
  // must be multiples of it, and so must the number of KV heads, unless it is a multiple of
  // that.
  uint32_t tensor_parallel;
  // Number of groups of workers, each with some of the layers. 0 (default): 1.
  uint32_t pipeline_parallel;
  // Time in milliseconds after which a wait for another worker fails. It must be longer than any
  // step, and than the difference between the times in which the workers load their parts of the
  // model. 0 (default): 60000.
  uint64_t worker_timeout_ms;
} pllm_engine_options;

// Memory that an engine would allocate. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_plan).
  uint64_t struct_size;
  // Bytes of the weights.
  uint64_t weight_bytes;
  // Bytes of the KV pool.
  uint64_t kv_bytes;
  // Bytes of activations, logits and working memory of kernels. Small tables are not included.
  uint64_t work_bytes;
  // Number of KV blocks.
  uint64_t blocks;
  // Tokens per KV block.
  uint64_t block_size;
  // Bytes of one KV block: of all layers, or of the layers of one group.
  uint64_t block_bytes;
  // Maximum length of a sequence in tokens, prompt and output together.
  uint64_t max_model_len;
  // Number of sequences of max_model_len tokens that fit at the same time.
  uint64_t full_sequences;
  // Data type of KV blocks: PLLM_DTYPE_*, not PLLM_DTYPE_AUTO.
  uint64_t kv_dtype;
  // Maximum number of KV blocks, if the budget grows to its maximum.
  uint64_t max_blocks;
  // Bytes of the host tier, in memory or in its file.
  uint64_t swap_bytes;
  // Number of KV blocks in the host tier.
  uint64_t swap_blocks;
  // Number of layer groups with KV blocks of their own. A sequence has one block of each group
  // for every block_size tokens. For a group of layers with a window it has only the blocks
  // inside the window.
  uint64_t kv_groups;
} pllm_plan;

// The model and the limits of its engine. Set struct_size before the call. Pointers are valid
// until the engine is freed.
typedef struct {
  // sizeof(pllm_model_info).
  uint64_t struct_size;
  // Name in config.json, such as "LlamaForCausalLM". UTF-8.
  const char *architecture;
  // Length of architecture in bytes.
  uint64_t architecture_len;
  // Instruction path, such as "avx512".
  const char *isa;
  // Length of isa in bytes.
  uint64_t isa_len;
  // Tokens that end a sequence.
  const uint32_t *eos_token_ids;
  // Number of end-of-sequence tokens.
  uint64_t eos_token_ids_len;
  // Number of tokens in the vocabulary.
  uint64_t vocab_size;
  // Number of layers.
  uint64_t layers;
  // Maximum length of a sequence for which the model was made.
  uint64_t max_positions;
  // Maximum length of a sequence in this engine.
  uint64_t max_model_len;
  // Number of threads.
  uint64_t threads;
  // Result of packed_path: PLLM_PACKED_*.
  uint64_t packed;
  // Reason, as text, why the packed weights were not read or not written. Empty if there is
  // nothing to report.
  const char *packed_reason;
  // Length of packed_reason in bytes.
  uint64_t packed_reason_len;
  // On a CUDA device: the library that computes products of many rows, such as
  // "cuBLASLt 12.9.1 (/usr/lib/libcublasLt.so.12)". If none does, "own kernels: " and the reason;
  // prompts then take longer. Empty on the CPU.
  const char *blas_library;
  // Length of blas_library in bytes.
  uint64_t blas_library_len;
} pllm_model_info;

// A value that is added to the logit of a token.
typedef struct {
  uint32_t token;
  float bias;
} pllm_logit_bias;

// A list of token ids.
typedef struct {
  const uint32_t *tokens;
  uint64_t tokens_len;
} pllm_token_list;

// How a request samples its tokens, what it reports and when it ends. Call pllm_sampling_init
// first.
//
// The parameters apply in this order: logit bias; repetition, frequency and presence penalty; DRY;
// exclusions and the grammar; temperature; top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or
// mirostat in their place; the draw.
typedef struct {
  // sizeof(pllm_sampling).
  uint64_t struct_size;
  // Seed, used with PLLM_SAMPLING_SEED. A request with a seed generates the same tokens in any
  // batch.
  uint64_t seed;
  // Tokens that end the sequence. They are reported in tokens, but not in the text. At most
  // 1024.
  const uint32_t *stop_token_ids;
  // Number of stop tokens.
  uint64_t stop_token_ids_len;
  // Strings that end the sequence, within a token or across tokens. They do not appear in the
  // text. At most 1024 strings of 16384 bytes in all.
  const char *const *stop;
  // Length of each string in bytes. NULL: the strings are NUL-terminated.
  const uint64_t *stop_lens;
  // Number of stop strings.
  uint64_t stop_count;
  // Temperature. 0 selects greedy sampling. Range 0 to 10,000. Default 1.
  float temperature;
  // Keeps the most probable tokens whose probabilities sum to at least this value. Range above
  // 0 to 1. Default 1: all.
  float top_p;
  // Keeps tokens whose probability is at least this fraction of the largest. Range 0 to 1.
  // Default 0: all.
  float min_p;
  // Keeps the k most probable tokens. Default 0: all.
  uint32_t top_k;
  // Maximum number of generated tokens. 0: only the prompt is computed and reported; n and
  // best_of must be 1, without a beam search. PLLM_UNLIMITED_TOKENS (default): up to
  // max_model_len. 0 is unlimited for programs built with a header without
  // prompt_logprobs_start.
  uint32_t max_tokens;
  // Number of tokens before which neither end-of-sequence tokens nor stops end the sequence.
  // Default 0.
  uint32_t min_tokens;
  // PLLM_SAMPLING_* flags. Default 0.
  uint32_t flags;
  // Must be 0.
  uint32_t reserved;
  // Keeps the tokens with the most typical surprise whose probabilities sum to at least this
  // value. Range above 0 to 1. Default 1: all.
  float typical_p;
  // Keeps tokens whose logit is within this many standard deviations of the largest. Range 0 to
  // 100. Default 0: all.
  float top_n_sigma;
  // Probability with which XTC removes the most probable tokens. Range 0 to 1. Default 0: never.
  float xtc_probability;
  // Probability from which on a token counts as a top choice for XTC. Range 0 to 0.5. Default
  // 0.1.
  float xtc_threshold;
  // Mirostat 2: target surprise in bits per token. Range 0 to 100. Default 0: off.
  float mirostat_tau;
  // Mirostat 2: learning rate. Range above 0 to 1. Default 0.1.
  float mirostat_eta;
  // Subtracted from the logit of each token that has been generated. Range -2 to 2. Default 0.
  float presence_penalty;
  // Subtracted from the logit of a token for each time it has been generated. Range -2 to 2.
  // Default 0.
  float frequency_penalty;
  // Divides positive logits, and multiplies negative logits, of all tokens of the prompt and the
  // output. Range 0.01 to 100. Default 1: off.
  float repetition_penalty;
  // No n-gram of this many tokens occurs twice. At most 256. Default 0: off.
  uint32_t no_repeat_ngram_size;
  // With PLLM_SAMPLING_LOGPROBS: number of most probable tokens reported for each generated
  // token. At most 128. Default 0.
  uint32_t top_logprobs;
  // With PLLM_SAMPLING_PROMPT_LOGPROBS: number of most probable tokens reported for each prompt
  // token. At most 128. Default 0.
  uint32_t prompt_top_logprobs;
  // Content of the outputs: PLLM_OUTPUT_*. Default PLLM_OUTPUT_DELTA.
  uint32_t output_kind;
  // Kind of the constraint on the output: PLLM_GRAMMAR_*. Default PLLM_GRAMMAR_NONE.
  uint32_t grammar_kind;
  // The schema, regular expression or grammar, UTF-8.
  const char *grammar;
  // Length of grammar in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t grammar_len;
  // The texts of PLLM_GRAMMAR_CHOICE.
  const char *const *choices;
  // Length of each text in bytes. NULL: the texts are NUL-terminated.
  const uint64_t *choice_lens;
  // Number of choices.
  uint64_t choice_count;
  // DRY penalty. NULL (default): off.
  const pllm_dry *dry;
  // Values that are added to logits, from -100 to 100. NULL (default): none. At most as many as
  // the vocabulary has tokens.
  const pllm_logit_bias *logit_bias;
  // Number of entries in logit_bias.
  uint64_t logit_bias_len;
  // Texts that the output must not contain, as the tokenizer encodes them at the beginning of a
  // text, after a space and within a word. Other token sequences that spell the same text are
  // not excluded. At most 1024 texts of 65536 bytes in all.
  const char *const *bad_words;
  // Length of each text in bytes. NULL: the texts are NUL-terminated.
  const uint64_t *bad_word_lens;
  // Number of bad words.
  uint64_t bad_word_count;
  // Token sequences that the output must not contain. At most 1024 sequences of at most 256
  // tokens each.
  const pllm_token_list *bad_words_ids;
  // Number of token sequences.
  uint64_t bad_words_ids_len;
  // The only tokens that may be sampled. NULL (default): all. At most as many as the vocabulary
  // has tokens.
  const uint32_t *allowed_token_ids;
  // Number of allowed tokens.
  uint64_t allowed_token_ids_len;
  // Position of the first prompt token whose log probability is reported, if
  // PLLM_SAMPLING_PROMPT_LOGPROBS or both PLLM_SAMPLING_ECHO and PLLM_SAMPLING_LOGPROBS are set.
  // Tokens before it can come from the prefix cache. It counts in the truncated prompt, and must
  // be below its length. Default 0: all except the first token.
  uint64_t prompt_logprobs_start;
} pllm_sampling;

// Edits logits[0..vocab_size] of the token that follows tokens[0..tokens_len] of the sequence,
// before all other sampling parameters.
//
// Called on the stepping thread, once for each token. For the first token of several samples it is
// called once for all of them. It is called again if a step is tried again. Its time adds to the
// step of all sequences. It must return normally: no exception, no longjmp. It may call any
// function that any thread may call, but pllm_engine_step and pllm_engine_snapshot return
// PLLM_E_BUSY, and pllm_engine_stop, pllm_engine_free and a blocking poll would deadlock.
typedef void (*pllm_logits_hook)(void *hook_data,
                                 uint64_t sequence,
                                 const uint32_t *tokens,
                                 uint64_t tokens_len,
                                 float *logits,
                                 uint64_t vocab_size);

// A request. Call pllm_request_init first. Its pointers, except hook_data, need to be valid only
// during the call.
typedef struct {
  // sizeof(pllm_request).
  uint64_t struct_size;
  // Prompt as UTF-8 text. NULL if the prompt is given as tokens.
  const char *prompt;
  // Length of prompt in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t prompt_len;
  // Prompt as token ids. NULL if the prompt is given as text.
  const uint32_t *prompt_token_ids;
  // Number of prompt tokens.
  uint64_t prompt_token_ids_len;
  // Sampling parameters. NULL selects the defaults of pllm_sampling_init.
  const pllm_sampling *sampling;
  // Returned in each output of the request.
  uint64_t user_data;
  // Number of results: samples, or best beams. Default 1. Result i has the sequence id request +
  // i; with best_of, result i is one of the ids request to request + best_of - 1. Each sequence
  // has its own last output.
  uint32_t n;
  // PLLM_TEXT_* flags. Default PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL.
  uint32_t text_flags;
  // Queue for the outputs. NULL (default) selects the engine's own queue.
  const pllm_queue *queue;
  // Number of samples to generate. If it is larger than n, the n samples with the highest log
  // probability are returned at the end, best first. 0 (default) selects n.
  uint32_t best_of;
  // Keeps only this many tokens at the end of the prompt. 0 (default) keeps all.
  uint32_t truncate_prompt_tokens;
  // PLLM_REQUEST_* flags. Default 0.
  uint32_t flags;
  // Must be 0.
  uint32_t reserved;
  // Beam search. NULL (default) selects sampling. The n best beams are returned at the end, best
  // first, whatever output_kind is.
  //
  // PLLM_E_INVALID_ARGUMENT if it is combined with best_of, PLLM_REQUEST_KEEP, logits_hook, a
  // temperature other than 0 or the default, top_k, top_p, min_p, typical_p, top_n_sigma, XTC,
  // mirostat, a seed, stop strings, top_logprobs, PLLM_SAMPLING_PROMPT_LOGPROBS,
  // PLLM_SAMPLING_ECHO or a grammar.
  const pllm_beam *beam;
  // Requests share blocks of the prefix cache only if their salts are equal, so that tenants
  // cannot probe the prompts of other tenants. NULL (default): the empty salt.
  const uint8_t *cache_salt;
  // Length of cache_salt in bytes.
  uint64_t cache_salt_len;
  // Edits the logits of each token. NULL (default): none.
  pllm_logits_hook logits_hook;
  // Passed to logits_hook. Must be valid until the last output of the request has been made.
  void *hook_data;
  // Deadline in milliseconds from now. When it passes, the request ends with
  // PLLM_FINISH_DEADLINE and the tokens it has. 0 (default): none. A negative deadline is
  // PLLM_E_INVALID_ARGUMENT.
  int64_t deadline_ms;
  // Priority, -100 to 100; higher runs first. Used if the order is PLLM_ORDER_PRIORITY. Default
  // 0. Forks inherit it.
  int32_t priority;
  // Must be 0.
  uint32_t reserved2;
  // Time in milliseconds for which the request waits for each next block of its prompt that the
  // KV store does not have yet, because another engine computes the prompt. The engine reads each
  // block when the store has it, and computes the prompt from the first block on that has not
  // appeared in this time. If no other request can run meanwhile, a step waits for these blocks,
  // too. 0 (default): the request waits only for blocks that the store has.
  // PLLM_E_INVALID_ARGUMENT if it is not 0 and the engine has no kv_store.
  uint32_t kv_store_wait_ms;
  // Must be 0.
  uint32_t reserved3;
} pllm_request;

// Predicted admission of a request. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_admission).
  uint64_t struct_size;
  // 1 if pllm_engine_add_request would accept the request, 0 if too many requests wait, its
  // queue is full, or a shared budget cannot reserve its blocks.
  uint64_t admits;
  // 1 if no request is ahead of it and its blocks are free, so that it would start in the next
  // step.
  uint64_t fits_now;
  // Predicted seconds until its first token. Negative if no step has been measured yet.
  double first_token_seconds;
  // Number of requests ahead of it.
  uint64_t waiting_requests;
  // Number of tokens that those requests have to compute.
  uint64_t waiting_tokens;
} pllm_admission;

// Result of one step. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_step).
  uint64_t struct_size;
  // Number of requests, exports and imports that have not ended, and of commands left to the
  // next steps. While it is not 0, step again, and poll the queues: requests whose queue is
  // full wait for that.
  uint64_t unfinished;
  // Number of prompt tokens computed.
  uint64_t prefill_tokens;
  // Number of decode tokens computed.
  uint64_t decode_tokens;
  // Number of sequences in the step.
  uint64_t sequences;
  // Number of sequences that were skipped because their queue is full, or because they wait for
  // a slow grammar.
  uint64_t paused;
} pllm_step;

// Counters since the creation of the engine, and its state after the last step. Set struct_size
// before the call.
typedef struct {
  // sizeof(pllm_stats).
  uint64_t struct_size;
  // Sequences that wait for their first or next step.
  uint64_t waiting;
  // Sequences that run.
  uint64_t running;
  // KV blocks of the pool.
  uint64_t blocks_total;
  // KV blocks in use.
  uint64_t blocks_used;
  // Unused KV blocks that are in the prefix cache. They are evicted when blocks are needed.
  uint64_t blocks_cached;
  // KV blocks that are neither in use nor cached.
  uint64_t blocks_free;
  // Fraction of the token slots of all used and reserved blocks that hold K and V of a token. 1
  // if there are none.
  double slot_utilization;
  // Steps.
  uint64_t steps;
  // Prompt tokens computed. Tokens that are recomputed after a preemption count again.
  uint64_t prompt_tokens;
  // Tokens generated.
  uint64_t generated_tokens;
  // Preemptions.
  uint64_t preemptions;
  // Results that ended with PLLM_FINISH_STOP: one for each sequence of a request.
  uint64_t finished_stop;
  // Results that ended with PLLM_FINISH_LENGTH: one for each sequence of a request.
  uint64_t finished_length;
  // Results that ended with PLLM_FINISH_ABORT: one for each sequence of a request.
  uint64_t finished_abort;
  // Results that ended with PLLM_FINISH_ERROR: one for each sequence of a request.
  uint64_t finished_error;
  // Waiting sequences that the last step skipped because their queue is full, or because they
  // wait for a slow grammar.
  uint64_t paused;
  // Kept sequences that wait to be resumed or freed.
  uint64_t idle;
  // Blocks copied because a sequence wrote to a shared block.
  uint64_t blocks_copied;
  // Prompt tokens looked up in the prefix cache.
  uint64_t prefix_queries;
  // Prompt tokens found in the prefix cache, which were not computed.
  uint64_t prefix_hits;
  // Results that ended with PLLM_FINISH_DEADLINE: one for each sequence of a request.
  uint64_t finished_deadline;
  // Requests refused because of max_waiting_requests, max_waiting_tokens or a full queue.
  uint64_t admission_rejections;
  // Steps that failed and were tried again, in part or as a whole.
  uint64_t steps_failed;
  // Preemptions that swapped the request to the host tier. The others were recomputed.
  uint64_t preemptions_swapped;
  // Sequences whose KV is in the host tier.
  uint64_t swapped;
  // KV blocks of the host tier.
  uint64_t swap_blocks_total;
  // KV blocks in use in the host tier.
  uint64_t swap_blocks_used;
  // Blocks moved to the host tier.
  uint64_t blocks_swapped_out;
  // Blocks moved back from the host tier.
  uint64_t blocks_swapped_in;
  // Moves that failed, as on a full disk. Their sequences were recomputed.
  uint64_t swap_failures;
  // Tokens at the start of sequences that were found in the prefix cache.
  uint64_t prompt_tokens_cached;
  // 1 if trace_path was set and the trace has ended because the disk failed or fell
  // behind.
  uint64_t traces_stopped;
  // 1 if journal_path was set and the journal has ended because the disk failed or fell
  // behind.
  uint64_t journals_stopped;
  // Times that the KV pool shrank and the system did not take the memory back, as after
  // mlockall. The budget is kept, but the memory of the process does not shrink.
  uint64_t discard_failures;
  // Blocks that sequences do not hold because they are outside the windows of their layers.
  // Blocks of forks count once for each fork.
  uint64_t blocks_out_of_window;
  // KV blocks looked up in the KV store.
  uint64_t kv_store_queries;
  // KV blocks read from the KV store, with a valid checksum.
  uint64_t kv_store_hits;
  // KV blocks written to the KV store.
  uint64_t kv_store_stored;
  // Full KV blocks that were not written to the KV store, because it was slow or the pool had
  // evicted them.
  uint64_t kv_store_dropped;
  // Operations of the KV store that failed or took too long, and damaged blocks.
  uint64_t kv_store_failures;
  // Bytes read from the KV store.
  uint64_t kv_store_bytes_read;
  // Bytes written to the KV store.
  uint64_t kv_store_bytes_written;
} pllm_stats;

// A token and its log probability in the model's own distribution, before sampling parameters
// apply.
typedef struct {
  uint32_t token;
  float logprob;
} pllm_logprob;

// An output of one sequence: new tokens, new text, its end, or the progress of its prompt. The
// output and its pointers are valid until the batch is freed.
typedef struct {
  // Size of this struct in the library. Fields beyond it do not exist.
  uint64_t struct_size;
  // Id of the request.
  uint64_t request;
  // Id of the sequence.
  uint64_t sequence;
  // user_data of the request.
  uint64_t user_data;
  // New tokens. NULL if there are none.
  const uint32_t *tokens;
  // Number of tokens.
  uint64_t tokens_len;
  // Log probability of each token. NULL if the request did not ask for them. NaN for tokens that
  // have none: those of an echoed prompt before prompt_logprobs_start, its first one, and tokens
  // that the host appended.
  const float *logprobs;
  // New text: UTF-8, not NUL-terminated, whole characters only. NULL if there is none. The text
  // can lag behind the tokens.
  const char *text;
  // Length of text in bytes.
  uint64_t text_len;
  // Error message: UTF-8, not NUL-terminated. Set if finish_reason is PLLM_FINISH_ERROR, if it
  // is PLLM_FINISH_ABORT because the engine was freed, and, with PLLM_FINISH_NONE, if an export
  // or a change of an idle sequence failed. Else NULL.
  const char *error;
  // Length of error in bytes.
  uint64_t error_len;
  // Tokens of the prompt.
  uint64_t prompt_tokens;
  // Tokens generated so far.
  uint64_t generated_tokens;
  // Index of the sequence in its request, from 0.
  uint32_t index;
  // PLLM_FINISH_*. Any value but PLLM_FINISH_NONE marks the last output of the sequence.
  uint32_t finish_reason;
  // PLLM_E_* if error is set, else 0. PLLM_E_CLOSED if the engine was freed.
  int32_t error_code;
  // 0.
  uint32_t reserved;
  // Sum of the log probabilities of all generated tokens, if the request enables log
  // probabilities or for the best of several samples. For a beam: its score after the length
  // penalty. Else 0.
  double score;
  // The most probable tokens at the position of each token, most probable first:
  // top_logprobs_len / tokens_len for each token. NULL if the request did not ask for them.
  const pllm_logprob *top_logprobs;
  // Number of entries in top_logprobs.
  uint64_t top_logprobs_len;
  // Log probabilities of the prompt tokens except the first, from prompt_logprobs_start on, if
  // the request enables them. They come in order, before the first generated token, possibly
  // in several outputs.
  const float *prompt_logprobs;
  // Number of entries in prompt_logprobs.
  uint64_t prompt_logprobs_len;
  // The most probable tokens at the position of each prompt token, as in top_logprobs.
  const pllm_logprob *prompt_top_logprobs;
  // Number of entries in prompt_top_logprobs.
  uint64_t prompt_top_logprobs_len;
  // State of an exported sequence. NULL in all other outputs.
  const uint8_t *sequence_state;
  // Length of sequence_state in bytes.
  uint64_t sequence_state_len;
  // In the last output of a sequence: seconds from the call that added, resumed or forked it to
  // its first step. 0 if it never ran, and in all other outputs.
  double queued_seconds;
  // In the last output of a sequence: seconds from the same call to its first token, or 0.
  double first_token_seconds;
  // In the last output of a sequence: seconds from the same call to its last token, or 0.
  double last_token_seconds;
  // In the last output of a sequence: number of times it was preempted.
  uint64_t preemptions;
  // In the last output of a sequence: number of its first tokens that were found in the prefix
  // cache.
  uint64_t cached_tokens;
  // What ended the sequence: PLLM_STOP_*. PLLM_STOP_NONE unless finish_reason is
  // PLLM_FINISH_STOP.
  uint32_t stop_reason;
  // The token of PLLM_STOP_EOS or PLLM_STOP_TOKEN, else 0.
  uint32_t stop_token;
  // The string of PLLM_STOP_STRING: UTF-8, not NUL-terminated. Else NULL.
  const char *stop_string;
  // Length of stop_string in bytes.
  uint64_t stop_string_len;
  // Number of tokens of the sequence that are computed, or that the prefix cache had. Only in
  // outputs of PLLM_SAMPLING_PREFILL_PROGRESS, otherwise 0.
  uint64_t computed_tokens;
} pllm_output;

// Parameters of a fork. Call pllm_fork_init first.
typedef struct {
  // sizeof(pllm_fork).
  uint64_t struct_size;
  // Number of tokens that the children share with their parent: 1 to its length, or
  // PLLM_FORK_AT_END (default).
  uint64_t at;
  // With PLLM_FORK_SEED: each child draws from its own random stream of this seed, until it is
  // resumed with other parameters.
  uint64_t seed;
  // With PLLM_FORK_USER_DATA: returned in the outputs of the children.
  uint64_t user_data;
  // Queue for the outputs of the children. NULL (default) selects the parent's queue.
  const pllm_queue *queue;
  // Number of children. Default 1.
  uint32_t n;
  // PLLM_FORK_* flags. Default 0.
  uint32_t flags;
} pllm_fork;

// How an idle sequence continues. Call pllm_resume_init first.
typedef struct {
  // sizeof(pllm_resume).
  uint64_t struct_size;
  // Sampling parameters. NULL selects the defaults of pllm_sampling_init. Counts (max_tokens,
  // min_tokens) and penalties start anew.
  const pllm_sampling *sampling;
  // Queue for the outputs. NULL (default) keeps the queue of the sequence.
  const pllm_queue *queue;
  // With PLLM_RESUME_USER_DATA: returned in the outputs.
  uint64_t user_data;
  // PLLM_REQUEST_KEEP (default), PLLM_RESUME_*.
  uint32_t flags;
  // PLLM_TEXT_SKIP_SPECIAL (default) or 0.
  uint32_t text_flags;
  // Edits the logits of each token. NULL (default): none.
  pllm_logits_hook logits_hook;
  // Passed to logits_hook.
  void *hook_data;
  // As in pllm_request, from this call on.
  int64_t deadline_ms;
} pllm_resume;

// A prompt that is kept in the prefix cache. Call pllm_pin_init first.
typedef struct {
  // sizeof(pllm_pin).
  uint64_t struct_size;
  // Prompt as UTF-8 text. NULL if the prompt is given as tokens.
  const char *prompt;
  // Length of prompt in bytes, or PLLM_NUL_TERMINATED (default).
  uint64_t prompt_len;
  // Prompt as token ids. NULL if the prompt is given as text.
  const uint32_t *prompt_token_ids;
  // Number of prompt tokens.
  uint64_t prompt_token_ids_len;
  // As in pllm_request.
  const uint8_t *cache_salt;
  // Length of cache_salt in bytes.
  uint64_t cache_salt_len;
  // Time in milliseconds for which the prompt is kept. 0 (default): until it is unpinned.
  uint64_t time_to_live_ms;
  // If a sequence cannot continue otherwise, pins are dropped, those with the lowest priority
  // first. Default 0.
  uint32_t priority;
  // PLLM_TEXT_ADD_SPECIAL (default) or 0.
  uint32_t text_flags;
} pllm_pin;

// A sequence as of the last step and the calls since. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_sequence_info).
  uint64_t struct_size;
  // Id of the request that created it.
  uint64_t request;
  // Number of its tokens, prompt and output.
  uint64_t len;
  // Index of the sequence in its request, from 0. With best_of it is not the rank of the result.
  uint32_t index;
  // 1 if it waits to be resumed or freed, 0 if it runs or waits to run.
  uint32_t idle;
  // 1 if it was imported from a machine or an instruction path that does not compute the same
  // bits.
  uint64_t inexact;
} pllm_sequence_info;

// An event of the prefix cache. Pointers are valid until the batch is freed.
typedef struct {
  // Size of this struct in the library. Fields beyond it do not exist.
  uint64_t struct_size;
  // Number of the step with this event. The first step with events has 1, and each further step
  // with events adds 1. All events of a step take effect together.
  uint64_t sequence_number;
  // Time of the step in seconds since 1970 (UTC).
  double time_seconds;
  // Hash of the block, 32 bytes: its key in a KV store. NULL for PLLM_KV_EVENT_CLEARED.
  const uint8_t *hash;
  // Hash of the block before a stored block, 32 bytes. If first_token is 0, a hash that differs
  // between salts. NULL unless kind is PLLM_KV_EVENT_STORED.
  const uint8_t *parent_hash;
  // Tokens of a stored block. NULL if there are none.
  const uint32_t *tokens;
  // Number of tokens.
  uint64_t tokens_len;
  // Position of the first token of the block in its sequence.
  uint64_t first_token;
  // Kind of the event: PLLM_KV_EVENT_*.
  uint32_t kind;
  // Place of the block: PLLM_KV_MEDIUM_*. Values can be added.
  uint32_t medium;
  // Layer group of the block. Models whose layers have different attention windows have a block
  // in each group for the same tokens. Group 0 has the longest window.
  uint32_t group;
  // 0.
  uint32_t reserved;
} pllm_kv_event;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the ABI version of the loaded library. Compare it with PLLM_ABI_VERSION.
uint32_t pllm_abi_version(void);

// Returns the version of the library, such as "0.3.0".
const char *pllm_version(void);

// Returns a JSON object that describes this build and machine: version, CPU backends, instruction
// paths, model architectures, formats of responses.
const char *pllm_build_info(void);

// Returns the code of an error, one of PLLM_E_*, or 0 for NULL (success).
int32_t pllm_error_code(const pllm_error *error);

// Returns the message of an error: UTF-8, NUL-terminated, valid until the error is freed. Returns
// "" for NULL.
const char *pllm_error_message(const pllm_error *error);

// Returns the number of tokens of a prompt that is too long for max_model_len. 0 for any other
// error, and for NULL.
uint64_t pllm_error_prompt_tokens(const pllm_error *error);

// Returns max_model_len of the engine for which a prompt is too long. 0 for any other error, and
// for NULL.
uint64_t pllm_error_max_model_len(const pllm_error *error);

// Returns 1 if the same call can succeed later, without a change of its arguments or of the
// options: too many requests wait, a queue is full, other engines hold the budget, the engine is
// busy, or the system has no memory left. 0 for any other error, and for NULL.
int32_t pllm_error_is_temporary(const pllm_error *error);

// Frees an error. NULL is allowed.
void pllm_error_free(pllm_error *error);

// Creates a budget of bytes bytes. pllm_budget_resize can later raise it to at most max_bytes (0:
// to bytes). Nothing is allocated now. Engines created with it (pllm_engine_options.budget)
// reserve address space for max_bytes and use memory for the blocks they fill. The budget must
// hold one sequence of max_model_len tokens for each engine.
//
// Free it with pllm_budget_free.
PLLM_NODISCARD pllm_error *pllm_budget_create(uint64_t bytes, uint64_t max_bytes, pllm_budget **out_budget);

// Frees the handle. The budget lives until its last engine is freed. NULL is allowed. Do not free
// the result of pllm_engine_budget.
void pllm_budget_free(pllm_budget *budget);

// Changes the size of a budget. A larger size takes effect at once. For a smaller size, the
// engines first drop cached blocks, then the KV blocks of idle sequences, then preempt the
// youngest running requests. No request ends, and results do not change. Used blocks are then
// moved together, and the memory behind them is returned to the system. Engines that are not in a
// step shrink before this function returns, the others before their next step (see
// pllm_budget_get_info).
//
// Errors: PLLM_E_CAPACITY, with the numbers, if bytes is above max_bytes, or too small for the
// longest sequence of each engine and for the requests in progress. Any thread may call it at any
// time.
PLLM_NODISCARD pllm_error *pllm_budget_resize(const pllm_budget *budget, uint64_t bytes);

// Reads the size of a budget and the bytes that its engines hold. Any thread may call it.
PLLM_NODISCARD pllm_error *pllm_budget_get_info(const pllm_budget *budget, pllm_budget_info *out_info);

// Returns the budget of the engine's KV pool: its own, or the one it was created with. Borrowed;
// valid until the engine is freed. Returns NULL for NULL.
const pllm_budget *pllm_engine_budget(const pllm_engine *engine);

// Writes the defaults into a struct of struct_size bytes.
void pllm_kv_store_init(pllm_kv_store *store, uint64_t struct_size);

// Writes the defaults into a struct of struct_size bytes: no functions.
void pllm_communicator_init(pllm_communicator *communicator, uint64_t struct_size);

// Joins a group of processes, or threads, of this host, which communicate through shared memory.
// Waits until all ranks have joined.
//
// Rank 0 creates the file at the NUL-terminated path, usually below /dev/shm, where a file system
// in memory is. It removes the file when it closes the communicator, and replaces one whose rank 0
// has ended. The file takes 1 MiB for each rank, and 4 MiB for each pair of ranks that send to
// each other. size is 1 to 64. timeout_ms limits the wait; 0 is no limit.
//
// The end of a process ends the waits of the other ranks within about 0.1 seconds. A forked child
// cannot use the communicator.
//
// Errors: PLLM_E_INVALID_ARGUMENT if a rank is started twice, is not below size, or other ranks
// have another size; PLLM_E_UNSUPPORTED if another rank has another version of the library;
// PLLM_E_CAPACITY if there is no memory for the file; PLLM_E_IO if the file cannot be created or
// is not that of a communicator, or if a rank does not join in time or has ended. The functions of
// the communicator return the code of the error: PLLM_E_INTERNAL if another rank has ended or
// failed, or has not done its part in time.
//
// Ownership: the host calls close, unless a call that takes the communicator has succeeded. Set
// struct_size of out_communicator before the call.
PLLM_NODISCARD
pllm_error *pllm_communicator_shared_memory(const char *path,
                                            uint32_t rank,
                                            uint32_t size,
                                            uint64_t timeout_ms,
                                            pllm_communicator *out_communicator);

// Writes the defaults into a struct of struct_size bytes.
void pllm_dry_init(pllm_dry *dry, uint64_t struct_size);

// Writes the defaults into a struct of struct_size bytes.
void pllm_beam_init(pllm_beam *beam, uint64_t struct_size);

// Writes the defaults into a struct of struct_size bytes.
void pllm_engine_options_init(pllm_engine_options *options, uint64_t struct_size);

// Computes the memory that pllm_engine_create would allocate, from the headers of the model's
// files, without allocating it.
//
// Errors: as pllm_engine_create, except PLLM_E_CANCELLED.
PLLM_NODISCARD pllm_error *pllm_engine_plan(const pllm_engine_options *options, pllm_plan *out_plan);

// Loads a model and creates an engine for it.
//
// Errors: PLLM_E_INVALID_ARGUMENT, PLLM_E_IO, PLLM_E_MODEL, PLLM_E_UNSUPPORTED, PLLM_E_CAPACITY if
// the options leave too little memory for one sequence, PLLM_E_OUT_OF_MEMORY, PLLM_E_CANCELLED.
// Free the engine with pllm_engine_free.
PLLM_NODISCARD pllm_error *pllm_engine_create(const pllm_engine_options *options, pllm_engine **out_engine);

// Runs one of several workers that compute a model with the engine of rank 0, which is in another
// process or thread (docs/parallel.md). The options are those of the engine: the same model and
// formats, and a communicator with another rank. Loads this worker's part of the model, and
// returns NULL when the engine is freed. Its progress function can cancel the loading.
//
// An error ends the engine, too: its calls return PLLM_E_INTERNAL.
//
// Errors: those of pllm_engine_create, on all ranks if the options of one rank are invalid,
// if it cannot load its part, or if rank 0 cannot create the engine;
// PLLM_E_INVALID_ARGUMENT if the communicator is NULL or has rank 0; PLLM_E_INTERNAL if another
// rank has ended or does not respond within worker_timeout_ms.
PLLM_NODISCARD pllm_error *pllm_worker_run(const pllm_engine_options *options);

// Ends every request, joins the engine's threads and returns its memory. Ends the other workers of
// the model; one that hangs is waited for, at most for worker_timeout_ms. NULL is allowed. No
// other call on this engine may be in progress, including a poll of its own queue.
//
// Queues from pllm_queue_create stay valid. They return the outputs they hold, a last output for
// each request that was live, and then PLLM_E_CLOSED. Batches that have been polled stay valid.
void pllm_engine_free(pllm_engine *engine);

// Returns NULL if the engine works, and the error that has stopped it if it has failed: after
// PLLM_E_INTERNAL, or if its device was lost. Then all its requests have ended, and only a new
// engine can serve. Any thread may call it, also during a step. Does not wait for a step.
PLLM_NODISCARD pllm_error *pllm_engine_health(const pllm_engine *engine);

// Describes the model and the limits of the engine. Any thread may call it.
PLLM_NODISCARD pllm_error *pllm_engine_get_model_info(const pllm_engine *engine, pllm_model_info *out_info);

// Writes the defaults into a struct of struct_size bytes.
void pllm_request_init(pllm_request *request, uint64_t struct_size);

// Writes the defaults into a struct of struct_size bytes.
void pllm_sampling_init(pllm_sampling *sampling, uint64_t struct_size);

// Adds a request to the waiting queue. It takes part from the next step on. Request ids are never
// reused.
//
// Errors: PLLM_E_INVALID_ARGUMENT, also if the prompt does not fit max_model_len; PLLM_E_CAPACITY,
// with the numbers, if the request can never fit the pool, too many requests wait, or its queue is
// full; PLLM_E_UNSUPPORTED. Any thread may call it, also during a step.
PLLM_NODISCARD
pllm_error *pllm_engine_add_request(const pllm_engine *engine,
                                    const pllm_request *request,
                                    uint64_t *out_request);

// Predicts admission and time to first token for a request without adding it. The prediction
// simulates the waiting requests with the engine's own policies, the measured step times and the
// lengths of recent outputs. It assumes that the prompt is not in the prefix cache and that no
// later request overtakes. It runs on the calling thread and takes some milliseconds with 100,000
// waiting requests.
//
// Errors: as pllm_engine_add_request for a request that can never run. Too many waiting requests
// and a full queue are no errors here: see pllm_admission.admits. Grammars are not compiled. Any
// thread may call it, also during a step.
PLLM_NODISCARD
pllm_error *pllm_engine_predict_admission(const pllm_engine *engine,
                                          const pllm_request *request,
                                          pllm_admission *out_admission);

// Aborts a request at the next step. Its last output has PLLM_FINISH_ABORT. If earlier calls for
// the request wait for a slow grammar, the abort takes effect after them.
//
// Errors: PLLM_E_NOT_FOUND if the id is unknown or the request has ended. Any thread may call it.
PLLM_NODISCARD pllm_error *pllm_engine_abort(const pllm_engine *engine, uint64_t request);

// Runs one iteration: it computes up to max_batch_tokens tokens of the scheduled sequences and
// generates one token for each sequence whose prompt is complete. The results are in the queues.
//
// If a step cannot be computed, it is tried again without the requests that may have caused the
// failure. A request that fails alone ends with PLLM_FINISH_ERROR and the others continue. If no
// request can be computed, the call returns the error and nothing is lost: the next call tries
// again. After one second of failures, the requests of the step end with PLLM_FINISH_ERROR.
//
// Errors: PLLM_E_BUSY if another thread is stepping this engine; PLLM_E_OUT_OF_MEMORY;
// PLLM_E_INTERNAL.
PLLM_NODISCARD pllm_error *pllm_engine_step(const pllm_engine *engine, pllm_step *out_step);

// Starts a thread of the engine that steps it, and sleeps while there is nothing to do. If steps
// fail for one second, their requests end with PLLM_FINISH_ERROR and the others continue.
//
// Errors: PLLM_E_BUSY if the thread is already running; PLLM_E_CAPACITY if the system starts no
// thread; the error of an engine that has failed. While it runs, pllm_engine_step returns
// PLLM_E_BUSY.
PLLM_NODISCARD pllm_error *pllm_engine_start(const pllm_engine *engine);

// Stops the engine's thread after the current step and joins it. No request is lost: they wait
// until the engine is stepped again. Has no effect if the thread is not running.
PLLM_NODISCARD pllm_error *pllm_engine_stop(const pllm_engine *engine);

// Returns the engine's own queue. Borrowed; valid until the engine is freed. Returns NULL for
// NULL.
const pllm_queue *pllm_engine_queue(const pllm_engine *engine);

// Reads counters since the creation of the engine, and its state after the last step. Any thread
// may call it.
PLLM_NODISCARD pllm_error *pllm_engine_get_stats(const pllm_engine *engine, pllm_stats *out_stats);

// Describes the engine after its current step, to be displayed: which sequences have which
// blocks, and what the last steps computed. max_blocks is the number of blocks of each tier,
// from the first one, and max_sequences the number of sequences; more than 1048576 and 16384 are
// reduced to these. The text is a JSON object. Members can be added:
//
// - time: seconds since the engine was created; block_size: tokens per block; layer_groups.
// - counts: waiting, running, paused, idle and swapped sequences, steps, generated_tokens,
//   prompt_tokens, prompt_tokens_cached, prefix_queries, prefix_hits and preemptions, as in
//   pllm_stats. Paused sequences and prompts that are being pinned are also counted as waiting or
//   running.
// - pool, host_tier: the number of blocks of the tier, of which free, cached and used, and runs of
//   consecutive blocks with the same use: [number, "free"], [number, "cached"] (only the prefix
//   cache has them), or [number, "used", users of each block, id of a sequence that uses them, or
//   0]. Queued copies are users, too.
// - sequences, the running ones first: the ids sequence and request (0: none), state ("running",
//   "waiting", "paused", "idle", "pinned"), tokens, max_len (the length at which it ends),
//   computed_tokens (with stored K and V), cached_tokens (prompt tokens that the prefix cache had),
//   generated_tokens (since it was added, resumed or continued), blocks (in all layer groups,
//   including those out of their window), tier ("pool" or "host"). A paused sequence was skipped,
//   because its queue is full, or it waits for a slow grammar or a KV store. Exports and forks in
//   progress have idle sequences of their own, which counts does not include. sequences_omitted is
//   the number of sequences that are not listed.
// - steps, the last 128 with sequences, the oldest first: start (as time), seconds,
//   prefill_tokens, decode_tokens, sequences.
//
// Requests that the engine has not started to schedule are not included. The call waits for the
// end of the current step; if several threads call, each step answers one of them. The stepping
// thread only copies the numbers, and reads at most 1048576 entries of block tables to find the
// sequences of blocks. The text is formatted by the calling thread.
//
// Errors: PLLM_E_OUT_OF_MEMORY; PLLM_E_BUSY in a logits hook, which runs on the stepping thread;
// the error of an engine that has failed. Any thread may call it. Free the text with
// pllm_bytes_free.
PLLM_NODISCARD
pllm_error *pllm_engine_snapshot(const pllm_engine *engine,
                                 uint64_t max_blocks,
                                 uint64_t max_sequences,
                                 pllm_bytes **out_json);

// Writes gauges, counters and histograms, as of the last step, in the OpenMetrics text format
// ("application/openmetrics-text; version=1.0.0; charset=utf-8"). The names are those of vLLM with
// the prefix "pagedllm_". The label model_name is the option of that name. Buckets of times have
// the bounds 1, 2.5 and 5 times each power of ten, from 0.5 ms to 2500 s. Buckets of token counts
// have the powers of two, from 1 to 2^20.
//
// Any thread may call it; it does not wait for a step. Free the text with pllm_bytes_free.
PLLM_NODISCARD pllm_error *pllm_engine_get_metrics(const pllm_engine *engine, pllm_bytes **out_text);

// Creates a queue for some of the engine's requests (pllm_request.queue), so that each thread,
// client or event loop reads its own.
//
// capacity is a number of outputs. While the queue holds at least that many, the requests that
// write to it pause. Other requests continue, and no output is dropped. Beyond the capacity, a
// step in progress can add one output for each request, and the end of a request can add one. Once
// max_seqs outputs exceed the capacity, new requests for this queue return PLLM_E_CAPACITY.
//
// Free it with pllm_queue_free, before or after its engine.
PLLM_NODISCARD pllm_error *pllm_queue_create(const pllm_engine *engine, uint64_t capacity, pllm_queue **out_queue);

// Frees a queue and aborts the requests that write to it. NULL is allowed. No other call on the
// queue may be in progress. Has no effect on the engine's own queue.
void pllm_queue_free(pllm_queue *queue);

// Returns an eventfd that is readable while the queue is not empty, for epoll and similar calls
// (Linux). Borrowed; valid until the queue is freed. Polling the queue resets it; reading it is
// allowed but not needed.
//
// Errors: PLLM_E_CAPACITY if the process has no descriptor left.
PLLM_NODISCARD pllm_error *pllm_queue_get_event_fd(const pllm_queue *queue, int32_t *out_fd);

// Takes all outputs from the queue, in the order in which they were made. If the queue is empty,
// waits for the first output: up to timeout_ms milliseconds, not at all (0), or without limit
// (negative). If the time runs out, the batch is empty; this is not an error.
//
// Errors: once an engine has failed or is freed, and all its outputs have been taken, the error of
// the engine or PLLM_E_CLOSED; PLLM_E_OUT_OF_MEMORY, with the outputs still in the queue. Any
// thread may call it, also during a step. Free the batch with pllm_outputs_free.
PLLM_NODISCARD pllm_error *pllm_queue_poll(const pllm_queue *queue, int64_t timeout_ms, pllm_outputs **out_outputs);

// Returns the number of outputs in a batch, 0 for NULL.
uint64_t pllm_outputs_len(const pllm_outputs *outputs);

// Returns output i of a batch, or NULL if there is none. Borrowed; valid until the batch is freed.
// Consecutive outputs are struct_size bytes apart.
const pllm_output *pllm_outputs_get(const pllm_outputs *outputs, uint64_t i);

// Frees a batch. NULL is allowed.
void pllm_outputs_free(pllm_outputs *outputs);

// Writes the defaults into a struct of struct_size bytes.
void pllm_fork_init(pllm_fork *fork, uint64_t struct_size);

// Writes the defaults into a struct of struct_size bytes.
void pllm_resume_init(pllm_resume *resume, uint64_t struct_size);

// Writes the defaults into a struct of struct_size bytes.
void pllm_pin_init(pllm_pin *pin, uint64_t struct_size);

// Creates how->n sequences (how NULL: one) with the first tokens of a sequence. They share its KV
// blocks; the random stream, penalty counts, grammar state, stop strings and text are copied. Each
// child is a request of its own, and its sequence id is also its request id. The ids are written
// to out_sequences, an array of n.
//
// Children of a running sequence run; children of an idle one are idle. If the parent ends before
// the next step and is not kept, the children end with PLLM_FINISH_ERROR, including those that
// wait to be resumed; a child that has been resumed gets one more such output for the resume.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept; PLLM_E_INVALID_ARGUMENT if n is 0 or at is beyond the end; PLLM_E_CAPACITY if n is too
// large, too many requests wait or the queue is full. Any thread may call it, also during a step.
PLLM_NODISCARD
pllm_error *pllm_sequence_fork(const pllm_engine *engine,
                               uint64_t sequence,
                               const pllm_fork *how,
                               uint64_t *out_sequences);

// Appends tokens to a sequence. A running sequence continues after them from the next step on, and
// its max_tokens grows by their number. An idle sequence computes them when it is resumed. If the
// sequence ends before the next step and is not kept, it is not changed. If the tokens violate the
// grammar of the sequence, it ends with PLLM_FINISH_ERROR when it continues with that grammar;
// rewinding it to before the tokens repairs it.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept; PLLM_E_INVALID_ARGUMENT if a token is unknown or the tokens do not fit max_model_len. Any
// thread may call it, also during a step.
PLLM_NODISCARD
pllm_error *pllm_sequence_append(const pllm_engine *engine,
                                 uint64_t sequence,
                                 const uint32_t *tokens,
                                 uint64_t tokens_len);

// Truncates a sequence to its first len tokens (1 or more), also into the prompt. Its state is as
// it was then, including the random stream. Outputs that have been polled are not taken back. A
// running sequence continues from there.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept; PLLM_E_INVALID_ARGUMENT if len is 0 or beyond the end. Any thread may call it, also during
// a step.
PLLM_NODISCARD pllm_error *pllm_sequence_rewind(const pllm_engine *engine, uint64_t sequence, uint64_t len);

// Continues an idle sequence. Only its last token and the tokens appended since are computed. how
// NULL selects the defaults.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept; PLLM_E_INVALID_ARGUMENT if it is not idle or a parameter is invalid; PLLM_E_CAPACITY if
// too many requests wait or the queue is full. Any thread may call it, also during a step.
PLLM_NODISCARD pllm_error *pllm_sequence_resume(const pllm_engine *engine, uint64_t sequence, const pllm_resume *how);

// Frees a sequence and its blocks. A running sequence ends with PLLM_FINISH_ABORT. Its id is
// invalid from now on.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept. Any thread may call it, also during a step.
PLLM_NODISCARD pllm_error *pllm_sequence_free(const pllm_engine *engine, uint64_t sequence);

// Reads the state of a sequence.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept. Any thread may call it, also during a step.
PLLM_NODISCARD
pllm_error *pllm_sequence_get_info(const pllm_engine *engine,
                                   uint64_t sequence,
                                   pllm_sequence_info *out_info);

// Exports the state of a sequence: tokens, KV blocks, sampling parameters, random stream, grammar
// and text, as they are at the beginning of the next step. The state arrives as an output of the
// sequence (sequence_state, sequence_state_len), in queue (NULL: the queue of its other outputs):
// in that step if it is small or nothing else runs, otherwise in a later step, since a step copies
// a limited number of bytes. If the export fails, or the sequence has ended by the next step, that
// output has error and error_code.
//
// The state names the model, the layout of the KV blocks and the instruction path, and has a
// checksum. It contains the conversation in plain text. It does not contain the logits hook: pass
// it again with PLLM_RESUME_CONTINUE.
//
// Errors: PLLM_E_NOT_FOUND if the sequence is unknown, has not started, or has ended without being
// kept. Any thread may call it, also during a step.
PLLM_NODISCARD pllm_error *pllm_sequence_export(const pllm_engine *engine, uint64_t sequence, const pllm_queue *queue);

// Creates an idle sequence from an exported state, in this or another process. Resumed with
// PLLM_RESUME_CONTINUE, it continues with the same bits on a machine that computes the same (see
// pllm_sequence_info.inexact). queue receives its outputs (NULL: the engine's own queue).
//
// Errors: PLLM_E_INVALID_ARGUMENT if the state is damaged, or made with another model, block_size
// or kv_dtype; PLLM_E_UNSUPPORTED if it was made by a release with another format of states;
// PLLM_E_CAPACITY if the queue is full. Any thread may call it, also during a step.
PLLM_NODISCARD
pllm_error *pllm_sequence_import(const pllm_engine *engine,
                                 const uint8_t *state,
                                 uint64_t state_len,
                                 const pllm_queue *queue,
                                 uint64_t *out_sequence);

// Computes a prompt, from the next step on, and keeps its blocks in the prefix cache: requests
// that begin with the same tokens reuse them. pllm_prefix_unpin undoes it.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the prompt is empty or does not fit max_model_len;
// PLLM_E_UNSUPPORTED if the engine has no prefix cache, or no tokenizer for a text. Any thread may
// call it, also during a step.
PLLM_NODISCARD pllm_error *pllm_prefix_pin(const pllm_engine *engine, const pllm_pin *pin, uint64_t *out_pin);

// Unpins a prompt: its blocks can be evicted again.
//
// Errors: PLLM_E_NOT_FOUND if the pin has expired or was dropped. Any thread may call it, also
// during a step.
PLLM_NODISCARD pllm_error *pllm_prefix_unpin(const pllm_engine *engine, uint64_t pin);

// Encodes text as token ids. flags: PLLM_TEXT_ADD_SPECIAL or 0.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the text is longer than max_prompt_bytes or cannot be
// encoded; PLLM_E_UNSUPPORTED if the engine has no tokenizer. Any thread may call it.
PLLM_NODISCARD
pllm_error *pllm_engine_tokenize(const pllm_engine *engine,
                                 const char *text,
                                 uint64_t len,
                                 uint32_t flags,
                                 pllm_tokens **out_tokens);

// Decodes token ids as text. flags: PLLM_TEXT_SKIP_SPECIAL or 0.
//
// Errors: PLLM_E_INVALID_ARGUMENT if an id is unknown; PLLM_E_UNSUPPORTED if the engine has no
// tokenizer. Any thread may call it.
PLLM_NODISCARD
pllm_error *pllm_engine_detokenize(const pllm_engine *engine,
                                   const uint32_t *tokens,
                                   uint64_t len,
                                   uint32_t flags,
                                   pllm_bytes **out_text);

// Returns the bytes that a token contributes to a text. They can be a part of a character. A
// special token has its name, and an id that only the model knows has no bytes. Borrowed; valid
// until the engine is freed. The first call reads the whole vocabulary.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the id is not below vocab_size of pllm_model_info;
// PLLM_E_UNSUPPORTED if the engine has no tokenizer. Any thread may call it.
PLLM_NODISCARD
pllm_error *pllm_engine_get_token_bytes(const pllm_engine *engine,
                                        uint32_t token,
                                        const uint8_t **out_bytes,
                                        uint64_t *out_len);

// Renders a chat with the model's chat template, as `apply_chat_template` of transformers 5.5.4
// does. Add a request with the result without PLLM_TEXT_ADD_SPECIAL.
//
// messages_json is an array of messages, [{"role": "user", "content": "..."}], or an object with
// "messages" and any of these members. Each other member is a variable of the template.
//
// - "tools", "documents": arrays, null by default.
// - "add_generation_prompt": true (default) ends the prompt where the assistant's answer begins.
// - "continue_final_message": true ends the prompt after the content of the last message, so that
//   the model continues it. Excludes "add_generation_prompt": true. Default false.
// - "chat_template": the name of one of the model's templates. Default: "tool_use" if "tools" is
//   given and the model has that template, else "default".
// - "chat_template_content_format": "string" joins the text parts of a content that is an array by
//   newlines before the template sees it, for templates that take only strings. Default "openai":
//   content is not changed.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the JSON is not a chat, the template raises an error, or the
// chat or its prompt exceeds max_prompt_bytes; PLLM_E_CAPACITY if the rendering exceeds a limit of
// docs/models.md; PLLM_E_MODEL if the template does not compile; PLLM_E_UNSUPPORTED if the model
// has no template. Any thread may call it.
PLLM_NODISCARD
pllm_error *pllm_engine_render_chat(const pllm_engine *engine,
                                    const char *messages_json,
                                    uint64_t len,
                                    pllm_bytes **out_text);

// Returns the token ids. Borrowed. Returns NULL for NULL and for an empty list.
const uint32_t *pllm_tokens_data(const pllm_tokens *tokens);

// Returns the number of token ids, 0 for NULL.
uint64_t pllm_tokens_len(const pllm_tokens *tokens);

// Frees a list of token ids. NULL is allowed.
void pllm_tokens_free(pllm_tokens *tokens);

// Returns the bytes, which are not NUL-terminated. Borrowed. Returns NULL for NULL and for an
// empty text.
const char *pllm_bytes_data(const pllm_bytes *bytes);

// Returns the number of bytes, 0 for NULL.
uint64_t pllm_bytes_len(const pllm_bytes *bytes);

// Frees a text. NULL is allowed.
void pllm_bytes_free(pllm_bytes *bytes);

// Creates the parser of a response. Feed it the texts of the outputs of one sequence, generated
// without PLLM_TEXT_SKIP_SPECIAL, because special tokens mark the parts of a response.
//
// settings_json is an object with any of these members:
//
// - "format": how the model writes reasoning and tool calls. "auto" (default): the format that the
//   chat template of the engine's model shows. Else one of "response_formats" of pllm_build_info.
// - "prompt": the rendered prompt. If it ends with the opening tag of the reasoning, the response
//   begins inside of the reasoning.
// - "tools": the array of tools that the prompt contains, as OpenAI's API defines it. Formats
//   whose arguments have no quotes take from it which arguments are strings.
// - "tool_call_id_prefix": the id of a call is this prefix and the index of the call, unless the
//   model writes an id. Default "call_". At most 256 bytes.
//
// engine may be NULL if "format" names a format. The parser does not keep it.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the settings are invalid or a format is unknown;
// PLLM_E_UNSUPPORTED if engine has no tokenizer. Any thread may call it.
PLLM_NODISCARD
pllm_error *pllm_response_parser_create(const pllm_engine *engine,
                                        const char *settings_json,
                                        uint64_t len,
                                        pllm_response_parser **out_parser);

// Parses the next piece of the response. *out_deltas is a JSON array of deltas as a chat
// completion streams them, which may be empty: {"content": TEXT}, {"reasoning_content": TEXT},
// {"tool_calls": [{"index": I, "id": ID, "type": "function", "function": {"name": NAME,
// "arguments": ""}}]} at the beginning of a call, and {"tool_calls": [{"index": I, "function":
// {"arguments": TEXT}}]} for the parts of its arguments. The concatenated deltas do not depend on
// how the response is divided in pieces. The caller frees *out_deltas with pllm_bytes_free.
//
// Malformed text is no error: if it is not the beginning of a call it is content, and after the
// beginning of a call it belongs to the arguments. At most 64 KiB of text are held back until
// their meaning is known.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the text is not UTF-8 or has more than 16 MiB, or the
// response has ended. Any thread may call it; calls on one parser wait for each other.
PLLM_NODISCARD
pllm_error *pllm_response_parser_feed(pllm_response_parser *parser,
                                      const char *text,
                                      uint64_t len,
                                      pllm_bytes **out_deltas);

// Ends the response. *out_deltas has the deltas of the text that was held back, as
// pllm_response_parser_feed returns them. The caller frees it with pllm_bytes_free.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the response has ended. Any thread may call it; calls on one
// parser wait for each other.
PLLM_NODISCARD pllm_error *pllm_response_parser_finish(pllm_response_parser *parser, pllm_bytes **out_deltas);

// Frees a parser. NULL is allowed. No other call on the parser may be in progress.
void pllm_response_parser_free(pllm_response_parser *parser);

// Takes the events of the prefix cache since the last call, in their order. If there are none,
// waits for the first one, up to timeout_ms milliseconds. If the time runs out, the batch is
// empty; this is not an error.
//
// If more than kv_events_capacity events were not read, they are dropped, and the batch is that of
// pllm_engine_snapshot_kv_events instead. A reader that applies the events in their order
// therefore always ends with the blocks that are cached.
//
// Errors: PLLM_E_UNSUPPORTED if kv_events_capacity is 0; PLLM_E_OUT_OF_MEMORY, with the events
// still to be read; the error of an engine that has failed. Any thread may call it, also during a
// step. Two threads get different events. Free the batch with pllm_kv_events_free.
PLLM_NODISCARD
pllm_error *pllm_engine_poll_kv_events(const pllm_engine *engine,
                                       uint32_t timeout_ms,
                                       pllm_kv_events **out_events);

// Lists the blocks of the prefix cache: PLLM_KV_EVENT_CLEARED, and PLLM_KV_EVENT_STORED of each
// block. The events have the number and the time of the last step with events, or 0. Later changes
// have larger numbers. The events that pllm_engine_poll_kv_events returns are not affected.
//
// Errors, threads and ownership: as pllm_engine_poll_kv_events. A step that ends waits while the
// blocks are copied, about 2 ms for 100,000 blocks.
PLLM_NODISCARD pllm_error *pllm_engine_snapshot_kv_events(const pllm_engine *engine, pllm_kv_events **out_events);

// Computes the hashes of the full blocks of a prompt, as events and stores have them: 32 bytes for
// each block, in the order of the blocks. Two engines have the same hashes if they have the same
// model and weight format, kv_dtype, block_size, instruction path, kind of device, and
// kv_store_secret. Of the request, only the prompt, text_flags, truncate_prompt_tokens and
// cache_salt are used. Nothing is added to the engine. A request computes at least the last token
// of its prompt, so it never uses the last block if the prompt ends with it.
//
// group is a layer group, below the number of groups of the model; 0 exists in every model.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the prompt is invalid or group is too large;
// PLLM_E_UNSUPPORTED if the prompt is a text and the engine has no tokenizer. Any thread may call
// it. Free the hashes with pllm_bytes_free.
PLLM_NODISCARD
pllm_error *pllm_engine_hash_prompt(const pllm_engine *engine,
                                    const pllm_request *request,
                                    uint32_t group,
                                    pllm_bytes **out_hashes);

// Returns the number of events in a batch, 0 for NULL.
uint64_t pllm_kv_events_len(const pllm_kv_events *events);

// Returns event i of a batch, or NULL if there is none. Borrowed; valid until the batch is freed.
// Consecutive events are struct_size bytes apart.
const pllm_kv_event *pllm_kv_events_get(const pllm_kv_events *events, uint64_t i);

// Frees a batch. NULL is allowed.
void pllm_kv_events_free(pllm_kv_events *events);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PAGEDLLM_H */
