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
 * What holds for every function:
 *
 * Errors. A function that can fail returns pllm_error *: NULL is success, anything else is yours to free with
 * pllm_error_free. Outputs (out_*) are written only on success. Nothing is printed, no signal is handled, nothing
 * aborts; a defect inside the library comes back as PLLM_E_INTERNAL. Later releases may have more codes and finish
 * reasons: take an unknown code for an error, an unknown finish reason for an end.
 *
 * Pointers. A pointer is NULL or points to what its type says, alive for the whole call. NULL where something is
 * needed is PLLM_E_INVALID_ARGUMENT; freeing NULL is fine. What comes out through a pointer to a pointer is yours to
 * free; a pointer that is returned is borrowed from the first argument.
 *
 * Structs. Each begins with struct_size. Structs you fill: call their _init with sizeof, then set fields. Structs that
 * are filled for you: set struct_size to sizeof first. So a program built against an older or a newer header keeps
 * working: what one side does not know is a default, or zero.
 *
 * Strings are UTF-8 with a length in bytes; the length PLLM_NUL_TERMINATED says that they end with a NUL.
 *
 * Threads. Any function may be called from any thread at any time, also while another thread steps, with two
 * exceptions: one thread steps at a time (a second one gets PLLM_E_BUSY), and freeing something needs that no other call
 * on it is under way. Or the engine steps itself: pllm_engine_start.
 *
 * Stacks. Every function works on a thread with a stack of at least 64 KiB, whatever the model's files, except calls that load
 * NVIDIA's driver. What needs more, such as compiling a template or a grammar, runs on a temporary thread of the library.
 *
 * Processes. In a child made by fork() every call on the parent's engine answers PLLM_E_UNSUPPORTED, except that freeing
 * it is fine; the parent goes on.
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


// The version of the ABI. While it is 0, names may still change between releases.
#define PLLM_ABI_VERSION 0

// A length that says: the string ends with a NUL.
#define PLLM_NUL_TERMINATED UINT64_MAX

// An argument is wrong: its value, its range, its encoding.
#define PLLM_E_INVALID_ARGUMENT 1

// No live request or sequence has this id.
#define PLLM_E_NOT_FOUND 2

// A file could not be opened or read.
#define PLLM_E_IO 3

// The model's files are damaged, incomplete or contradict each other, or its numbers are not finite.
#define PLLM_E_MODEL 4

// Understood, and not offered by this build, model or machine.
#define PLLM_E_UNSUPPORTED 5

// The budget of memory, blocks or requests does not allow it.
#define PLLM_E_CAPACITY 6

// Another thread is in the middle of what allows one at a time.
#define PLLM_E_BUSY 7

// The machine would not give the memory.
#define PLLM_E_OUT_OF_MEMORY 8

// A defect of the library. After one in a step, the engine serves no more: every request ends with an output that says
// so, later calls for work are refused with the same message, and freeing it still works.
#define PLLM_E_INTERNAL 9

// What this was asked of has been freed: the engine of a queue.
#define PLLM_E_CLOSED 10

// The host's own callback asked to stop.
#define PLLM_E_CANCELLED 11

// Let the library choose.
#define PLLM_DTYPE_AUTO 0

#define PLLM_DTYPE_F32 1

#define PLLM_DTYPE_BF16 2

// 8 bits a number and, for each head of each token, a scale in f32: about half the bytes of bf16, at a small cost in quality.
#define PLLM_DTYPE_INT8 3

// Numbers beyond 65504 become 65504, with their sign.
#define PLLM_DTYPE_F16 4

// As INT8, with numbers of 8 bits in floating point (OCP E4M3): small numbers beside great ones keep more, great ones less.
#define PLLM_DTYPE_FP8 5

// The widest instruction path that the machine has: AVX512_BF16 before AVX512_VNNI before AVX512, then those of AVX2.
#define PLLM_ISA_AUTO 0

#define PLLM_ISA_PORTABLE 1

#define PLLM_ISA_AVX2 2

#define PLLM_ISA_AVX512 3

// As AVX512_VNNI, but for weights, and K and V, that are kept in bf16: what they are multiplied by is rounded to bf16, too, and summed in f32.
// Up to twice as fast where many tokens are computed at once; AVX512_VNNI rounds nothing there.
#define PLLM_ISA_AVX512_BF16 4

// As AVX2 and AVX512, with AVX-VNNI and AVX-512 VNNI: weights in whole numbers are multiplied faster, and nothing else changes.
#define PLLM_ISA_AVX_VNNI 5

#define PLLM_ISA_AVX512_VNNI 6

// As the model's files have them. A number that is infinite or not a number is kept.
#define PLLM_WEIGHTS_AS_STORED 0

#define PLLM_WEIGHTS_F32 1

#define PLLM_WEIGHTS_F16 2

#define PLLM_WEIGHTS_BF16 3

// Whole numbers of 8 bits, with a scale for each output. They are multiplied by activations in 8 bits, of which every 128 of a row share a scale.
#define PLLM_WEIGHTS_INT8 4

// Whole numbers of 4 bits, with a scale for each group of weight_group inputs of an output. The embedding and the head are in 8.
#define PLLM_WEIGHTS_INT4 5

// The same, and each group begins at its least weight: a little more exact, for 16 bits more a group.
#define PLLM_WEIGHTS_INT4_ASYMMETRIC 6

// On CUDA devices: floating point of 8 bits (OCP's E4M3), with a scale for each output; the embedding and the head are as they are stored. Products of
// many rows are multiplied by activations in it, too, where the device can, each row with a scale; all others, experts' and those with
// PLLM_ENGINE_BATCH_INVARIANT, by activations in bf16.
#define PLLM_WEIGHTS_FP8 7

// No packed_path was given.
#define PLLM_PACKED_UNUSED 0

// The weights were read in their packed form.
#define PLLM_PACKED_READ 1

// The weights were packed from the model's files, and their packed form was written.
#define PLLM_PACKED_SAVED 2

// The weights were packed from the model's files, and their packed form could not be written.
#define PLLM_PACKED_UNSAVED 3

// Serve token ids only: no tokenizer is read, and text calls answer PLLM_E_UNSUPPORTED.
#define PLLM_ENGINE_SKIP_TOKENIZER 1

// Do not keep what was computed for the requests that come after with the same first tokens.
#define PLLM_ENGINE_NO_PREFIX_CACHE 2

// On a CUDA device: give a sequence the same bits whatever the batch, as the CPU always does. It costs speed: products of many rows are not
// left to cuBLASLt, and long sequences are not cut into parts.
#define PLLM_ENGINE_BATCH_INVARIANT 4

// Who has to give way is computed again.
#define PLLM_PREEMPTION_RECOMPUTE 0

// Their K and V wait in the host tier, where it has room.
#define PLLM_PREEMPTION_SWAP 1

// Whichever costs less, by what moving and computing have cost so far.
#define PLLM_PREEMPTION_AUTO 2

// First come, first served.
#define PLLM_ORDER_FIRST_COME 0

// The higher priority of pllm_request first; it may take the place, and the blocks, of what runs. Who has waited for ageing_ms comes
// before those one level above that come then, so that nobody waits for ever.
#define PLLM_ORDER_PRIORITY 1

// Whoever is likely to generate the fewest tokens first: as many as those before that were allowed about as many. Who has waited
// for ageing_ms comes before those that come then with a hundred tokens less.
#define PLLM_ORDER_SHORTEST_PREDICTED 2

// Prompts, in chunks, and decodes together, in the order of the requests.
#define PLLM_BATCHING_MIXED 0

// Prompts alone while there are any, then decodes alone: first tokens come soon. When prefill_budget prompt tokens have held the
// decodes up, they get a step in between.
#define PLLM_BATCHING_PREFILL_FIRST 1

// Every decode in every step, beside at most prefill_budget prompt tokens: bounds the time between two tokens.
#define PLLM_BATCHING_DECODE_FIRST 2

// Nobody joins until all that run have ended. To compare with.
#define PLLM_BATCHING_STATIC 3

// For those that it has: blocks are taken as it grows. Where the pool is full, whoever comes last is preempted.
#define PLLM_ALLOCATION_ON_DEMAND 0

// For all that it may come to have, so that nobody is preempted because somebody grows. (What is forked or appended while it runs
// was not foreseen.)
#define PLLM_ALLOCATION_MAX_TOKENS 1

// Use the seed field; without this the seed comes from the engine's and the request's id.
#define PLLM_SAMPLING_SEED 1

// Go on past end-of-sequence tokens.
#define PLLM_SAMPLING_IGNORE_EOS 2

// Report the log probability of every chosen token, and of so many of the most probable ones as top_logprobs says.
#define PLLM_SAMPLING_LOGPROBS 4

// The same of the prompt's tokens but the first; prompt_top_logprobs says of how many more. They are told once: by the first of
// several samples, and not again by a fork.
#define PLLM_SAMPLING_PROMPT_LOGPROBS 8

// The output begins with the prompt.
#define PLLM_SAMPLING_ECHO 16

// The stop string, or the text of the token that ends the sequence, stays in the text.
#define PLLM_SAMPLING_INCLUDE_STOP 32

// Each output holds what is new.
#define PLLM_OUTPUT_DELTA 0

// Each output holds everything so far.
#define PLLM_OUTPUT_CUMULATIVE 1

// One output, at the end, holds everything.
#define PLLM_OUTPUT_FINAL 2

// Anything.
#define PLLM_GRAMMAR_NONE 0

// A JSON text that the schema in grammar (itself a JSON text) describes. "pattern" and the names of "patternProperties" are
// regular expressions of ECMA-262, in Unicode mode if they are valid there, otherwise by annex B. Lookarounds, backreferences
// and word boundaries are errors, and so are the keywords that cannot be generated. A "format" that cannot be generated is an
// annotation. Properties come in the order of "properties". The object "x-guidance" at the root of the schema has options:
// "strict_formats" (default false): if true, the formats of JSON Schema that cannot be generated are errors: idn-email,
// idn-hostname, iri, iri-reference, json-pointer, regex, relative-json-pointer, uri-reference and uri-template.
// "whitespace_flexible" (default true): if false, no white space between the parts of the text. "whitespace_pattern" (default: one
// space or tab, or a line break and at most 40 of these): what may stand between two parts, a regular expression of Rust.
// "item_separator" (default ",") and "key_separator" (default ":"): regular expressions of Rust. "coerce_one_of" (default
// false): if true, "oneOf" is taken for "anyOf" where the schemas may overlap, which is an error otherwise. "lenient" (default
// false): if true, keywords that cannot be generated are ignored. "json_allowed_escapes" (default "nrbtf\\\"", with "u" if the schema
// has no names of properties or demands other control characters): what may follow a backslash within strings.
// "json_allow_general_unicode_escapes" (default false): if true, strings without a pattern may write any character as \u and digits.
#define PLLM_GRAMMAR_JSON_SCHEMA 1

// Any JSON object.
#define PLLM_GRAMMAR_JSON_OBJECT 2

// A text that the regular expression in grammar matches as a whole: a pattern of Python's re for str. Lookarounds,
// backreferences, word boundaries, atomic groups, possessive quantifiers, conditions, \N and the anchors of lines are errors.
#define PLLM_GRAMMAR_REGEX 3

// One of the texts in choices.
#define PLLM_GRAMMAR_CHOICE 4

// A text that the Lark grammar in grammar describes. Its regular expressions are those of Python's re, with \p{Name} for Unicode
// properties. A schema after %json is read like that of PLLM_GRAMMAR_JSON_SCHEMA, with options of its own.
#define PLLM_GRAMMAR_LARK 5

// Let the tokenizer add its special tokens, such as BOS. Leave it out for a prompt that a chat template wrote.
#define PLLM_TEXT_ADD_SPECIAL 1

// Leave special tokens out of text.
#define PLLM_TEXT_SKIP_SPECIAL 2

// The request's sequences stay when they end, whatever ended them: pllm_sequence_resume lets them go on,
// pllm_sequence_free lets them go.
#define PLLM_REQUEST_KEEP 1

// When no running beam, ended now, would be better than the worst finished one.
#define PLLM_EARLY_STOPPING_NO 0

// As soon as width beams are finished.
#define PLLM_EARLY_STOPPING_YES 1

// When no running beam can become better than the worst finished one.
#define PLLM_EARLY_STOPPING_NEVER 2

// More will come.
#define PLLM_FINISH_NONE 0

// An end-of-sequence token, a stop token or a stop string.
#define PLLM_FINISH_STOP 1

// max_tokens, or the longest sequence that the engine allows.
#define PLLM_FINISH_LENGTH 2

// The host asked for it.
#define PLLM_FINISH_ABORT 3

// Its computation failed; the error fields say why.
#define PLLM_FINISH_ERROR 4

// Its deadline passed; what it had generated by then is in the outputs.
#define PLLM_FINISH_DEADLINE 5

// A capacity that suits the queue of one request.
#define PLLM_QUEUE_CAPACITY 64

// All the tokens that the parent has when the fork is made.
#define PLLM_AT_END UINT64_MAX

// Use the seed field; without this the children draw the same random numbers as their parent.
#define PLLM_FORK_SEED 1

// The children wait to be resumed, even where the parent runs.
#define PLLM_FORK_IDLE 2

// Use the user_data field; without this the children have the parent's.
#define PLLM_FORK_USER_DATA 4

// Use the user_data field; without this the sequence's own stays.
#define PLLM_RESUME_USER_DATA 2

// Go on as if the sequence had never been idle, with its own parameters, counts, grammar and kind of outputs; of the other
// fields only queue, user_data, logits_hook (NULL: the one it has), deadline_ms and PLLM_REQUEST_KEEP are looked at. One that ended by its
// length has to be rewound first: it ends again with PLLM_FINISH_ERROR.
#define PLLM_RESUME_CONTINUE 4

// A budget of KV bytes that engines of this process may share, and that may change while they run. Any thread may use it.
//
// An engine that needs more than there is asks the others for what they only cache. Those that have requests give it before their next
// step, so step an engine as long as it has any; of those that have none, the step of the engine that asks takes it.
typedef struct pllm_arena pllm_arena;

// Bytes, here always UTF-8 text. Belongs to the caller.
typedef struct pllm_bytes pllm_bytes;

// An engine: one model, its KV pool and its requests. Any thread may use it; one at a time steps it.
typedef struct pllm_engine pllm_engine;

// What went wrong: a stable code and a message with the numbers and the remedy. Belongs to the caller.
typedef struct pllm_error pllm_error;

// A batch of outputs. Belongs to the caller; reading it makes no call into the engine and outlives it.
typedef struct pllm_outputs pllm_outputs;

// A queue of outputs that any thread may poll.
typedef struct pllm_queue pllm_queue;

// Token ids. Belongs to the caller.
typedef struct pllm_tokens pllm_tokens;

// An arena as it is now. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_arena_info)
  uint64_t struct_size;
  uint64_t bytes;
  // What it can be resized to: from least_bytes, for the engines and requests there are, to most_bytes.
  uint64_t least_bytes;
  uint64_t most_bytes;
  // What the engines hold: more than bytes while they are on their way down.
  uint64_t held_bytes;
  uint64_t engines;
} pllm_arena_info;

// DRY: a token that would make a repetition one longer than length tokens loses multiplier * base ^ (length - allowed_length).
// Fill it with pllm_dry_init first.
typedef struct {
  // sizeof(pllm_dry)
  uint64_t struct_size;
  // Default 0.8. 0: off.
  float multiplier;
  // Default 1.75.
  float base;
  // Shorter repetitions are free. Default 2.
  uint32_t allowed_length;
  // How many tokens back repetitions are looked for. 0 (default): to the beginning.
  uint32_t penalty_last_n;
  // Texts that end a repetition, within a token or across several. NULL with a count of 0 (default): newline, colon, quotation
  // mark, asterisk, or none with PLLM_ENGINE_SKIP_TOKENIZER. Another pointer with a count of 0: none.
  const char *const *sequence_breakers;
  // Length of each of them in bytes; NULL: they end with a NUL.
  const uint64_t *sequence_breaker_lens;
  uint64_t sequence_breaker_count;
} pllm_dry;

// Beam search, as generate of Hugging Face transformers does it: release 5, and for several groups release 4. Fill it with
// pllm_beam_init first. Logit bias, penalties and exclusions of pllm_sampling apply to the log probabilities, in the order in
// which transformers applies them; frequency and presence penalties and DRY, which it does not have, follow the repetition
// penalty. Bad words may forbid end tokens, where transformers would ignore that.
typedef struct {
  // sizeof(pllm_beam)
  uint64_t struct_size;
  // Beams side by side: 2 to 64. Default 4.
  uint32_t width;
  // Groups into which they are divided, each with a search of its own. Default 1.
  uint32_t groups;
  // Taken off a token's log probability for every beam of an earlier group that chose it in the same step, before the repetition
  // penalty multiplies what is left. Default 0.
  float diversity_penalty;
  // Scores are sums of log probabilities divided by the length to this power. Default 1.
  float length_penalty;
  // PLLM_EARLY_STOPPING_*.
  uint32_t early_stopping;
  // Must be 0.
  uint32_t reserved;
} pllm_beam;

// Told how many bytes of weights have been read, of how many in all, on the thread that creates the engine. Any other
// answer than 0 stops the loading: pllm_engine_create then returns PLLM_E_CANCELLED. It must return (no exception, no
// longjmp) and call nothing of this library on the engine being made.
typedef int32_t (*pllm_progress)(void *progress_data, uint64_t done, uint64_t total);

// How an engine is made. Fill it with pllm_engine_options_init first. The strings need to live only during the call.
typedef struct {
  // sizeof(pllm_engine_options)
  uint64_t struct_size;
  // A model directory as Hugging Face ships it. UTF-8.
  const char *model_path;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t model_path_len;
  // Where to run: "cpu", the default (also NULL), or "cuda:0" for the first CUDA device ("cuda" is the same). Of those NVIDIA's driver for CUDA 13
  // and compute capability 8.0 or newer are needed, and weights in f32, f16, bf16 or fp8.
  const char *device;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t device_len;
  // Bytes of the KV pool. 0: what max_seqs sequences of the full length need, at most 1 GiB.
  uint64_t kv_bytes;
  // Seeds the requests that bring no seed of their own. Default 0.
  uint64_t seed;
  // Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
  uint32_t block_size;
  // How K and V are stored: PLLM_DTYPE_AUTO (default: f32 for models in f32, else bf16), PLLM_DTYPE_F32, PLLM_DTYPE_BF16,
  // PLLM_DTYPE_INT8, PLLM_DTYPE_F16 or PLLM_DTYPE_FP8.
  uint32_t kv_dtype;
  // Longest sequence, prompt and output together. 0 (default): the model's own, or what the pool holds.
  uint32_t max_model_len;
  // Most rows (prompt and decode tokens of all sequences) in one step. Default 512.
  uint32_t max_batch_tokens;
  // Most sequences running at once, at most max_batch_tokens. Default 64.
  uint32_t max_seqs;
  // Most prompt tokens of one sequence in one step. 0 (default): max_batch_tokens.
  uint32_t prefill_chunk;
  // Threads, the stepping one included. 0 (default): as many as cpus names, or one for each CPU on which the process may run, within a
  // container's quota.
  uint32_t threads;
  // PLLM_ISA_AUTO (default) or a path to force. Bits are the same within one path, not across paths.
  uint32_t isa;
  // PLLM_ENGINE_* flags.
  uint32_t flags;
  // Must be 0.
  uint32_t reserved;
  // Outputs that may wait in the engine's own queue before its requests pause. 0 (default): 65536. Programs built with a
  // header that lacks this field have no bound.
  uint64_t queue_capacity;
  // Called while weights are loaded. NULL (default): nobody is told.
  pllm_progress progress;
  // Handed to progress.
  void *progress_data;
  // Requests, and resumed and forked sequences, that may wait for their first step before others are refused with
  // PLLM_E_CAPACITY. 0 (default): as many as memory holds. One may always wait.
  uint64_t max_waiting_requests;
  // Tokens that those may have to compute. 0 (default): no limit.
  uint64_t max_waiting_tokens;
  // The budget from which the KV pool takes its bytes, in place of kv_bytes. NULL (default): the engine has its own.
  const pllm_arena *arena;
  // Bytes of the host tier, to which K and V go of requests and kept sequences that have to give way. 0 (default): there is
  // none.
  uint64_t swap_bytes;
  // A directory: the host tier is a file there that has no name, takes room as it is written and is gone with the engine. NULL
  // (default): it is memory. Where it cannot be written or read later, as on a full disk, who was to move is computed again, and
  // swap_failures in pllm_stats counts it.
  const char *swap_path;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t swap_path_len;
  // PLLM_PREEMPTION_*: the default is to recompute. The others need swap_bytes.
  uint32_t preemption;
  // Who comes first: PLLM_ORDER_*.
  uint32_t order;
  // Milliseconds, for the orders that have a use for it. 0 (default): 10,000. The more, the longer who stands behind has to wait.
  uint32_t ageing_ms;
  // What a step is made of: PLLM_BATCHING_*.
  uint32_t batching;
  // Prompt tokens, for the two batchings that have a use for it. 0 (default): 256 for PLLM_BATCHING_DECODE_FIRST, 2048 for
  // PLLM_BATCHING_PREFILL_FIRST.
  uint32_t prefill_budget;
  // For how many of its tokens a request needs room before it begins: PLLM_ALLOCATION_*.
  uint32_t allocation;
  // A file to draw every step into, in the format that Perfetto and chrome://tracing open: what it consisted of, how long each of its
  // parts took, and when each sequence was queued, prefilled and decoded. UTF-8; what was in the file is gone. Where the disk fails
  // tracing ends, and no step does: traces_stopped in pllm_stats. NULL (default): none.
  const char *trace_path;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t trace_path_len;
  // A file to write down what is asked of the engine, and whatever else its steps depend on, so that pagedllm-replay can run them again
  // bit for bit on a machine with the same instruction path. Prompts are in it, as tokens, and cache salts. UTF-8; what was in the file is gone. Where
  // the disk fails the journal ends, and no step does: journals_stopped in pllm_stats. NULL (default): none.
  const char *journal_path;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t journal_path_len;
  // What the label model_name of pllm_engine_metrics says. UTF-8. NULL (default): the model directory's name.
  const char *model_name;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t model_name_len;
  // How weights are kept: PLLM_WEIGHTS_*. Fewer bits are faster to read and take less memory, and cost quality. What is small and
  // decides much (the choice among experts, learned positions) stays as the files have it, and so do the matrices by which latents are
  // read.
  uint32_t weight_format;
  // Inputs of an output that share a scale in 4 bits: 32, 64 or 128. 0 (default): 32. The fewer, the more exact.
  uint32_t weight_group;
  // A directory that keeps weights in their packed form, so that the next engine reads them as fast as the disk and packs nothing: where it has the
  // form of this very model, weight_format and library, it is read and checked; otherwise the weights are packed and the form is written, or
  // replaced. Several models and processes may share it; what nobody uses any more stays until somebody removes it. It holds weights: let
  // nobody write there who may not write the model. A disk that is full, or takes nothing, is no error: packed in pllm_model_info tells. UTF-8.
  // NULL (default): weights are packed each time.
  const char *packed_path;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t packed_path_len;
  // CPUs, as taskset -c takes them, such as "0-3,8": each of the engine's threads is pinned to one, in this order. The first is the
  // stepping thread's: the engine's own is pinned there (pllm_engine_start); one of the program's is left where it is. NULL (default): the
  // system places them.
  const char *cpus;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t cpus_len;
  // The part of a CUDA device's memory that the KV pool takes, of what is free once weights and working memory have their place: from 0.01 to 1, in
  // place of kv_bytes. 0 (default): as kv_bytes says.
  float memory_fraction;
  // Must be 0.
  uint32_t reserved2;
  // Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and of a text to tokenize. Longer ones
  // are refused with PLLM_E_INVALID_ARGUMENT before they are tokenized. 0 (default): 64 for each token of the engine's
  // max_model_len, at least 1048576. Tokenizing takes up to 16 bytes of memory for each byte, and up to 512 for each byte of a
  // stretch without a place to cut (docs/models.md), of 2 MiB at most.
  uint64_t max_prompt_bytes;
} pllm_engine_options;

// Where the bytes go, known before any are taken. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_plan)
  uint64_t struct_size;
  uint64_t weight_bytes;
  uint64_t kv_bytes;
  // Activations, logits and the kernels' working memory; small tables are not counted.
  uint64_t work_bytes;
  // KV blocks, and the tokens each holds.
  uint64_t blocks;
  uint64_t block_size;
  // Bytes of one block: of all layers, or of those of one group.
  uint64_t block_bytes;
  // Longest sequence, prompt and output together.
  uint64_t max_model_len;
  // Sequences of that length that fit at once.
  uint64_t full_sequences;
  // PLLM_DTYPE_F32, PLLM_DTYPE_BF16, PLLM_DTYPE_INT8, PLLM_DTYPE_F16 or PLLM_DTYPE_FP8.
  uint64_t kv_dtype;
  // KV blocks that there can be, should the arena grow.
  uint64_t most_blocks;
  // Of the host tier, in memory or in its file, and the blocks it holds.
  uint64_t swap_bytes;
  uint64_t swap_blocks;
  // Groups of layers whose K and V are in blocks of their own: a sequence has a block of each for every block_size of its tokens, and
  // where the layers of a group have a window, only for those that are still looked back on.
  uint64_t kv_groups;
} pllm_plan;

// The model and the limits it is served with. Set struct_size before the call; pointers live as long as the engine.
typedef struct {
  // sizeof(pllm_model_info)
  uint64_t struct_size;
  // As config.json names it, such as "LlamaForCausalLM".
  const char *architecture;
  uint64_t architecture_len;
  // The instruction path in use, such as "avx512".
  const char *isa;
  uint64_t isa_len;
  // Tokens that end a sequence.
  const uint32_t *eos_token_ids;
  uint64_t eos_token_ids_len;
  uint64_t vocab_size;
  uint64_t layers;
  // The longest sequence that the model was made for.
  uint64_t max_positions;
  // The longest that this engine allows.
  uint64_t max_model_len;
  uint64_t threads;
  // What became of packed_path: PLLM_PACKED_*.
  uint64_t packed;
  // Why the packed form was not read, or not written. Empty where nothing is to be said. For people.
  const char *packed_reason;
  uint64_t packed_reason_len;
} pllm_model_info;

// Added to the logit of a token.
typedef struct {
  uint32_t token;
  float bias;
} pllm_logit_bias;

// Some token ids.
typedef struct {
  const uint32_t *tokens;
  uint64_t tokens_len;
} pllm_token_list;

// How a request chooses its tokens, what it reports and when it ends. Fill it with pllm_sampling_init first. What applies, in
// this order: logit bias; repetition, frequency and presence penalty; DRY; exclusions and the grammar; temperature;
// top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or mirostat in their place; the draw.
typedef struct {
  // sizeof(pllm_sampling)
  uint64_t struct_size;
  // Used with PLLM_SAMPLING_SEED. A request with a seed gives the same tokens whatever runs beside it.
  uint64_t seed;
  // Tokens that end the sequence; reported, their text is not.
  const uint32_t *stop_token_ids;
  uint64_t stop_token_ids_len;
  // Strings that end the sequence, also across tokens; they do not appear in the text.
  const char *const *stop;
  // Length of each of them in bytes; NULL: they end with a NUL.
  const uint64_t *stop_lens;
  uint64_t stop_count;
  // 0 is greedy. Default 1.
  float temperature;
  // Keep the most probable tokens that together reach this probability. Default 1: all.
  float top_p;
  // Keep tokens at least this share as probable as the most probable one. Default 0: all.
  float min_p;
  // Keep the k most probable tokens. Default 0: all.
  uint32_t top_k;
  // 0 (default): until the sequence is as long as the engine allows.
  uint32_t max_tokens;
  // Neither end-of-sequence tokens nor stops count before this many tokens. Default 0.
  uint32_t min_tokens;
  // PLLM_SAMPLING_* flags.
  uint32_t flags;
  // Must be 0.
  uint32_t reserved;
  // Keep the tokens of the most typical surprise that together reach this probability. Default 1: all.
  float typical_p;
  // Keep tokens whose logit is within so many standard deviations of the largest. Default 0: all.
  float top_n_sigma;
  // How often XTC takes the most probable tokens away. Default 0: never.
  float xtc_probability;
  // From which probability on a token counts as a top choice for XTC. Default 0.1.
  float xtc_threshold;
  // Mirostat 2: the surprise to keep to, in bits per token. Default 0: off.
  float mirostat_tau;
  // How fast mirostat corrects. Default 0.1.
  float mirostat_eta;
  // Taken from the logit of every token that has been generated. Default 0.
  float presence_penalty;
  // Taken from a token's logit for every time it has been generated. Default 0.
  float frequency_penalty;
  // Divides the logits of all tokens of prompt and output (multiplies those below 0). Default 1: off.
  float repetition_penalty;
  // No run of so many tokens comes twice. Default 0: off.
  uint32_t no_repeat_ngram_size;
  // With PLLM_SAMPLING_LOGPROBS: the most probable tokens that are reported beside each chosen one. Default 0.
  uint32_t top_logprobs;
  // With PLLM_SAMPLING_PROMPT_LOGPROBS: the same for the prompt. Default 0.
  uint32_t prompt_top_logprobs;
  // PLLM_OUTPUT_DELTA (default), PLLM_OUTPUT_CUMULATIVE or PLLM_OUTPUT_FINAL.
  uint32_t output_kind;
  // What the output must be: PLLM_GRAMMAR_*. Default PLLM_GRAMMAR_NONE.
  uint32_t grammar_kind;
  // The schema, regular expression or grammar.
  const char *grammar;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t grammar_len;
  // The texts of PLLM_GRAMMAR_CHOICE.
  const char *const *choices;
  // Length of each of them in bytes; NULL: they end with a NUL.
  const uint64_t *choice_lens;
  uint64_t choice_count;
  // NULL (default): DRY is off.
  const pllm_dry *dry;
  const pllm_logit_bias *logit_bias;
  uint64_t logit_bias_len;
  // Texts that the output must not contain, as the tokenizer itself writes them: at the beginning of a text, after a space and
  // within a word. Other tokens that spell the same text are not kept from coming.
  const char *const *bad_words;
  // Length of each of them in bytes; NULL: they end with a NUL.
  const uint64_t *bad_word_lens;
  uint64_t bad_word_count;
  // Runs of tokens that the output must not contain.
  const pllm_token_list *bad_words_ids;
  uint64_t bad_words_ids_len;
  // The only tokens that may be chosen. NULL (default): all.
  const uint32_t *allowed_token_ids;
  uint64_t allowed_token_ids_len;
} pllm_sampling;

// Edits logits[0..vocab_size] of the token that follows tokens[0..tokens_len] of the sequence, before anything else does.
// Called on the thread that steps, once for each token (once for the first of all samples together; again where a step is tried
// again); what takes long here holds up all. It must return (no exception, no longjmp). It may call what any thread may call; pllm_engine_step answers PLLM_E_BUSY, and pllm_engine_stop,
// pllm_engine_free and a poll that waits would wait for themselves.
typedef void (*pllm_logits_hook)(void *hook_data,
                                 uint64_t sequence,
                                 const uint32_t *tokens,
                                 uint64_t tokens_len,
                                 float *logits,
                                 uint64_t vocab_size);

// A request. Fill it with pllm_request_init first. What it points to needs to live only during the call, hook_data aside.
typedef struct {
  // sizeof(pllm_request)
  uint64_t struct_size;
  // The prompt as text, UTF-8; NULL where it is given as tokens.
  const char *prompt;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t prompt_len;
  // The prompt as token ids; NULL where it is given as text.
  const uint32_t *prompt_tokens;
  uint64_t prompt_tokens_len;
  // NULL: the defaults of pllm_sampling_init.
  const pllm_sampling *sampling;
  // Comes back in every output.
  uint64_t user_data;
  // Results: samples, or the best beams. Default 1. Sample i is sequence request + i; each has its own last output.
  uint32_t n;
  // PLLM_TEXT_* flags. Default: PLLM_TEXT_ADD_SPECIAL | PLLM_TEXT_SKIP_SPECIAL.
  uint32_t text_flags;
  // Where its outputs go. NULL (default): the engine's own queue.
  const pllm_queue *queue;
  // Samples to draw. Where they are more than n, the n with the highest log probability are returned, best first, at the end.
  // 0 (default): n.
  uint32_t best_of;
  // Keep only so many of the prompt's last tokens. 0 (default): all.
  uint32_t truncate_prompt_tokens;
  // PLLM_REQUEST_* flags.
  uint32_t flags;
  // Must be 0.
  uint32_t reserved;
  // NULL (default): samples. Otherwise the request's outputs are the n best beams, best first, all of them at the end, whatever
  // output_kind says. Beams cannot be combined with best_of, PLLM_REQUEST_KEEP, logits_hook, a temperature (0 and the default
  // mean nothing here), top_k, top_p, min_p, typical_p, top_n_sigma, XTC, mirostat, a seed, stop strings, top_logprobs,
  // PLLM_SAMPLING_PROMPT_LOGPROBS, PLLM_SAMPLING_ECHO or a grammar: PLLM_E_INVALID_ARGUMENT.
  const pllm_beam *beam;
  // Only requests with the same salt share what the prefix cache holds, so that tenants cannot probe each other.
  const uint8_t *cache_salt;
  uint64_t cache_salt_len;
  // NULL (default): nobody edits the logits.
  pllm_logits_hook logits_hook;
  // Handed to logits_hook, until the request's last output has been made.
  void *hook_data;
  // Milliseconds from now, after which it ends with PLLM_FINISH_DEADLINE and what it has by then, wherever it is. 0 (default):
  // none. A negative one has passed: PLLM_E_INVALID_ARGUMENT.
  int64_t deadline_ms;
  // Where the engine's order is PLLM_ORDER_PRIORITY: the higher comes first. -100 to 100, default 0. Forks have their parent's.
  int32_t priority;
  // Must be 0.
  uint32_t reserved2;
} pllm_request;

// What would become of a request that was added now. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_admission)
  uint64_t struct_size;
  // 1: pllm_engine_add_request would take it. 0: too much waits, or its queue is not read.
  uint64_t admits;
  // 1: nobody is before it, and there is room for it: the next step would begin it.
  uint64_t fits_now;
  // Seconds until its first token is expected; negative: no step has shown yet how long steps take.
  double first_token_seconds;
  // Requests before it, and the tokens that these have to compute.
  uint64_t waiting_requests;
  uint64_t waiting_tokens;
} pllm_admission;

// What one step did. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_step)
  uint64_t struct_size;
  // Requests that have not ended: step again while this is not 0, and poll: those whose queue is full wait for that.
  uint64_t unfinished;
  uint64_t prefill_tokens;
  uint64_t decode_tokens;
  // Sequences in the step.
  uint64_t sequences;
  // Sequences passed over because their queue is full.
  uint64_t paused;
} pllm_step;

// Counts since the engine was made, and the state after its last step. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_stats)
  uint64_t struct_size;
  // Sequences that wait for their first or next step.
  uint64_t waiting;
  uint64_t running;
  uint64_t blocks_total;
  uint64_t blocks_used;
  // Blocks that nobody uses and that the prefix cache still finds; given away when they are needed.
  uint64_t blocks_cached;
  uint64_t blocks_free;
  // Share of the slots of the blocks in use, or set aside for those that run, that hold a token's K and V; 1 while there are none.
  double slot_utilization;
  uint64_t steps;
  // Prompt tokens computed; those computed again after a preemption count again.
  uint64_t prompt_tokens;
  uint64_t generated_tokens;
  uint64_t preemptions;
  // Requests that ended, by reason.
  uint64_t finished_stop;
  uint64_t finished_length;
  uint64_t finished_abort;
  uint64_t finished_error;
  // Of the waiting: those the last step passed over because their queue is full.
  uint64_t paused;
  // Sequences that were kept, and wait to be resumed or freed.
  uint64_t idle;
  // Blocks copied because a sequence wrote to one that others share.
  uint64_t blocks_copied;
  // Prompt tokens looked for in the prefix cache, and those of them that did not have to be computed.
  uint64_t prefix_queries;
  uint64_t prefix_hits;
  // Requests that ended because their deadline passed.
  uint64_t finished_deadline;
  // Requests that were refused because too much waits (max_waiting_requests, max_waiting_tokens, an unread queue).
  uint64_t admission_rejections;
  // Steps that could not be computed and were tried again, in part or as a whole.
  uint64_t steps_failed;
  // Of the preemptions: those of requests that went to the host tier. The others are computed again.
  uint64_t preemptions_swapped;
  // Sequences whose K and V are in the host tier.
  uint64_t swapped;
  uint64_t swap_blocks_total;
  uint64_t swap_blocks_used;
  // Blocks that moved to the host tier, and back.
  uint64_t blocks_swapped_out;
  uint64_t blocks_swapped_in;
  // Moves that failed, as on a full disk: who was to move is computed again.
  uint64_t swap_failures;
  // Tokens that sequences began with and that were found in the prefix cache.
  uint64_t prompt_tokens_cached;
  // 1 where trace_path was given and the disk has failed: the trace has ended.
  uint64_t traces_stopped;
  // The same of journal_path.
  uint64_t journals_stopped;
  // Times that the KV pool became smaller and the system did not take the memory back, as where the program has locked its memory
  // (mlockall): the budget is kept, but the process is no smaller.
  uint64_t discard_failures;
  // Blocks that the sequences would have besides, did every layer look back on all tokens: those that left the windows of the layers
  // that have one. Those of forks count for each.
  uint64_t blocks_out_of_window;
} pllm_stats;

// A token and its log probability under the model's own distribution.
typedef struct {
  uint32_t token;
  float logprob;
} pllm_logprob;

// News of one sequence: new tokens, new text, or its end. It and what it points to live as long as its batch.
typedef struct {
  // Bytes of this struct as the library knows it: a field that lies beyond is not there.
  uint64_t struct_size;
  uint64_t request;
  uint64_t sequence;
  // The request's own word, returned.
  uint64_t user_data;
  // NULL where there are none.
  const uint32_t *tokens;
  uint64_t tokens_len;
  // One per token; NULL where the request did not ask for them.
  const float *logprobs;
  // UTF-8, not NUL-terminated, never half a character; NULL where there is none. It may lag behind the tokens.
  const char *text;
  uint64_t text_len;
  // UTF-8, not NUL-terminated: why, where finish_reason is PLLM_FINISH_ERROR, where it is PLLM_FINISH_ABORT because the
  // engine was freed, and where (PLLM_FINISH_NONE) it could not be exported, or, while it was idle, changed. Else NULL.
  const char *error;
  uint64_t error_len;
  uint64_t prompt_tokens;
  // Tokens generated so far.
  uint64_t generated_tokens;
  // Which of the request's sequences, from 0.
  uint32_t index;
  // PLLM_FINISH_*; anything but PLLM_FINISH_NONE makes this the sequence's last output.
  uint32_t finish_reason;
  // PLLM_E_*, or 0. Together with error; PLLM_E_CLOSED where the engine was freed.
  int32_t error_code;
  uint32_t reserved;
  // The sum of the log probabilities of all generated tokens, where the request asked for log probabilities or for the best
  // of several samples; of a beam, its score after the length penalty. Else 0.
  double score;
  // The most probable tokens in place of each of `tokens`, most probable first: top_logprobs_len / tokens_len for each.
  // NULL where the request did not ask for them.
  const pllm_logprob *top_logprobs;
  uint64_t top_logprobs_len;
  // Of the prompt's tokens but the first, where the request asked for them; they come in order, before the first token,
  // and may come in several outputs.
  const float *prompt_logprobs;
  uint64_t prompt_logprobs_len;
  const pllm_logprob *prompt_top_logprobs;
  uint64_t prompt_top_logprobs_len;
  // An exported sequence. NULL in all other outputs.
  const uint8_t *blob;
  uint64_t blob_len;
  // In a sequence's last output: seconds from the call that asked for it (added, resumed or forked it) until its first step began,
  // its first token was there, and its last one was. 0 where it never came to that, and in all other outputs.
  double queued_seconds;
  double first_token_seconds;
  double last_token_seconds;
  // In the last output: how often its blocks were taken from it, and with how many of its first tokens the prefix cache helped.
  uint64_t preemptions;
  uint64_t cached_tokens;
} pllm_output;

// How to fork. Fill it with pllm_fork_init first.
typedef struct {
  // sizeof(pllm_fork)
  uint64_t struct_size;
  // The tokens that the children share with their parent: 1 to its length, or PLLM_AT_END (default).
  uint64_t at;
  // With PLLM_FORK_SEED: each child draws from a stream of its own of this seed, until it is resumed with other parameters.
  uint64_t seed;
  // With PLLM_FORK_USER_DATA: comes back in the children's outputs.
  uint64_t user_data;
  // Where the children's outputs go. NULL (default): where the parent's go.
  const pllm_queue *queue;
  // Children. Default 1.
  uint32_t n;
  // PLLM_FORK_* flags.
  uint32_t flags;
} pllm_fork;

// How an idle sequence goes on. Fill it with pllm_resume_init first.
typedef struct {
  // sizeof(pllm_resume)
  uint64_t struct_size;
  // NULL: the defaults of pllm_sampling_init. Counts (max_tokens, min_tokens) and penalties begin anew.
  const pllm_sampling *sampling;
  // Where its outputs go. NULL (default): where they went before.
  const pllm_queue *queue;
  // With PLLM_RESUME_USER_DATA: comes back in its outputs.
  uint64_t user_data;
  // PLLM_REQUEST_KEEP (default), PLLM_RESUME_*.
  uint32_t flags;
  // PLLM_TEXT_SKIP_SPECIAL (default) or 0.
  uint32_t text_flags;
  // NULL (default): nobody edits the logits.
  pllm_logits_hook logits_hook;
  // Handed to logits_hook.
  void *hook_data;
  // As in pllm_request, for this turn.
  int64_t deadline_ms;
} pllm_resume;

// A prompt to keep in the prefix cache. Fill it with pllm_pin_init first.
typedef struct {
  // sizeof(pllm_pin)
  uint64_t struct_size;
  // The prompt as text, UTF-8; NULL where it is given as tokens.
  const char *prompt;
  // In bytes, or PLLM_NUL_TERMINATED (the default).
  uint64_t prompt_len;
  // The prompt as token ids; NULL where it is given as text.
  const uint32_t *prompt_tokens;
  uint64_t prompt_tokens_len;
  // As in pllm_request.
  const uint8_t *cache_salt;
  uint64_t cache_salt_len;
  // How long it is kept, in milliseconds. 0 (default): until it is unpinned.
  uint64_t time_to_live_ms;
  // Where a sequence could not go on otherwise, pins with the lowest priority give way. Default 0.
  uint32_t priority;
  // PLLM_TEXT_ADD_SPECIAL (default) or 0.
  uint32_t text_flags;
} pllm_pin;

// A sequence as of the last step and of the calls since. Set struct_size before the call.
typedef struct {
  // sizeof(pllm_sequence_info)
  uint64_t struct_size;
  // The request it came from.
  uint64_t request;
  // Its tokens.
  uint64_t len;
  // Which of the request's sequences, from 0; with best_of not the rank that its result had.
  uint32_t index;
  // 1: it waits to be resumed or freed. 0: it runs, or waits to.
  uint32_t idle;
  // 1: it was imported from a machine or an instruction path that cannot give the same bits.
  uint64_t inexact;
} pllm_sequence_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The ABI version of the library that was loaded: compare it with PLLM_ABI_VERSION.
uint32_t pllm_abi_version(void);

// The library's version, such as "0.2.0".
const char *pllm_version(void);

// What this build and machine offer, as JSON: version, backends, instruction paths, model architectures.
const char *pllm_build_info(void);

// The error's code, one of PLLM_E_*; 0 for NULL (success).
int32_t pllm_error_code(const pllm_error *error);

// The error's message: UTF-8, ends with a NUL, lives as long as the error. "" for NULL.
const char *pllm_error_message(const pllm_error *error);

// Frees an error. NULL is fine.
void pllm_error_free(pllm_error *error);

// Makes a budget of so many bytes, which pllm_arena_resize may later raise to most_bytes (0: no further). Nothing is allocated:
// engines made with it (pllm_engine_options.arena) map what most_bytes would take, and touch only what they use. Each needs room
// for its longest sequence (max_model_len). Free it with pllm_arena_free.
PLLM_NODISCARD
pllm_error *pllm_arena_create(uint64_t bytes,
                              uint64_t most_bytes,
                              pllm_arena **out_arena);

// Lets go of the arena; engines that were made with it keep it alive. NULL is fine. Not for what pllm_engine_arena returns.
void pllm_arena_free(pllm_arena *arena);

// Changes the budget, at any time, from any thread. More is there at once. Where it becomes less, engines go down together: those
// in which no step is under way before this returns, others before their next step (pllm_arena_info tells). First goes what is only cached, then
// idle sequences lose their K and V, then the youngest that run are preempted: nothing ends, and the answers are the same. What is left
// moves together, and the memory beyond goes back to the system. Less than the longest sequences of the engines and the requests
// under way need is refused with the number that would do: PLLM_E_CAPACITY.
PLLM_NODISCARD
pllm_error *pllm_arena_resize(const pllm_arena *arena,
                              uint64_t bytes);

// The budget, and what the engines hold of it. May be called from any thread.
PLLM_NODISCARD pllm_error *pllm_arena_state(const pllm_arena *arena, pllm_arena_info *out_info);

// The budget of the engine's KV pool, its own or the one that it was made with, borrowed: it lives as long as the engine. NULL for
// NULL.
const pllm_arena *pllm_engine_arena(const pllm_engine *engine);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_dry_init(pllm_dry *dry, uint64_t struct_size);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_beam_init(pllm_beam *beam, uint64_t struct_size);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_engine_options_init(pllm_engine_options *options, uint64_t struct_size);

// A dry run of pllm_engine_create: reads the model's headers and says what would be allocated, without allocating it.
PLLM_NODISCARD pllm_error *pllm_engine_plan(const pllm_engine_options *options, pllm_plan *out_plan);

// Opens a model and makes an engine that serves it. Free it with pllm_engine_free.
PLLM_NODISCARD pllm_error *pllm_engine_create(const pllm_engine_options *options, pllm_engine **out_engine);

// Ends every request, joins the engine's threads and returns its memory. NULL is fine. No other call on this engine may be
// under way, polling its own queue included. Queues that were created stay: they give the outputs they hold, a last
// one for each request that was live among them, and then answer PLLM_E_CLOSED. Batches already polled stay valid.
void pllm_engine_free(pllm_engine *engine);

// The model and the limits it is served with.
PLLM_NODISCARD pllm_error *pllm_engine_info(const pllm_engine *engine, pllm_model_info *out_info);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_request_init(pllm_request *request, uint64_t struct_size);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_sampling_init(pllm_sampling *sampling, uint64_t struct_size);

// Adds a request; it takes part from the next step on. What could never run is refused here, with the numbers.
// May be called from any thread, also while another one steps. Ids are never reused.
PLLM_NODISCARD
pllm_error *pllm_engine_add_request(const pllm_engine *engine,
                                    const pllm_request *request,
                                    uint64_t *out_request);

// What would become of the request if it were added now, without adding it: whether it would be taken, whether it could begin at
// once, and when its first token is expected, judged by the steps so far, by how long answers have been, by the engine's own policies,
// and as if nothing of the prompt were in the prefix cache and nobody came later who goes before it. All that waits is played through
// on the calling thread: some milliseconds where 100,000 wait. What could never run is refused here too; grammars are not compiled. May be called from
// any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_engine_admit(const pllm_engine *engine,
                              const pllm_request *request,
                              pllm_admission *out_admission);

// Ends a request at the next step; its last output says PLLM_FINISH_ABORT.
// An id that is unknown or has ended is PLLM_E_NOT_FOUND. May be called from any thread.
PLLM_NODISCARD pllm_error *pllm_engine_abort(const pllm_engine *engine, uint64_t request);

// Runs one iteration: up to max_batch_tokens rows of all running sequences, one new token for each that is past its
// prompt. What came of it is in the queue. A second thread that steps meanwhile gets PLLM_E_BUSY. Where a step cannot be
// computed, it is tried again without those that may be to blame: a request with which no step can be ends with
// PLLM_FINISH_ERROR, and the others go on. Where that does not help, the call is an error (PLLM_E_OUT_OF_MEMORY) and nothing
// is lost: the next one tries again. After a second of that the requests in it end with PLLM_FINISH_ERROR, and the engine
// goes on with the others.
PLLM_NODISCARD
pllm_error *pllm_engine_step(const pllm_engine *engine,
                             pllm_step *out_step);

// From now on a thread of the engine's own steps, asleep while there is nothing to do; pllm_engine_step answers
// PLLM_E_BUSY, and so does a second start. Where steps cannot be computed for a second, the requests in them end with
// PLLM_FINISH_ERROR and the others go on.
PLLM_NODISCARD pllm_error *pllm_engine_start(const pllm_engine *engine);

// Joins the engine's thread after the step under way. Nothing is lost: requests wait until somebody steps again.
// Fine where it was not started.
PLLM_NODISCARD pllm_error *pllm_engine_stop(const pllm_engine *engine);

// The engine's own queue, borrowed: it lives as long as the engine. NULL for NULL.
const pllm_queue *pllm_engine_queue(const pllm_engine *engine);

// Counts since the engine was made, and the state after its last step. May be called from any thread.
PLLM_NODISCARD pllm_error *pllm_engine_stats(const pllm_engine *engine, pllm_stats *out_stats);

// What dashboards ask for: gauges, counters and histograms as of the last step, with the names that vLLM gave them after the prefix
// "pagedllm_". The text is in the OpenMetrics format, which Prometheus scrapes as
// "application/openmetrics-text; version=1.0.0; charset=utf-8"; the label model_name is the option of that name. Histograms of
// times have buckets up to 1, 2.5 and 5 times each power of ten, from 0.5 ms to 2500 s; those of tokens up to the powers of two, from 1 to
// 2^20. May be called from any thread, and waits for no step. Free it with pllm_bytes_free.
PLLM_NODISCARD
pllm_error *pllm_engine_metrics(const pllm_engine *engine,
                                pllm_bytes **out_text);

// Makes a queue for some of the engine's requests (pllm_request.queue), so that threads, clients or event loops each
// read their own. capacity: while so many outputs or more wait in it, the requests that write to it pause; no others wait
// for them and nothing is dropped. A step under way may add one output for each request beyond the capacity, and so may
// the end of each; once max_seqs outputs are there beyond it, further requests are refused with PLLM_E_CAPACITY. Free it
// with pllm_queue_free.
PLLM_NODISCARD
pllm_error *pllm_queue_create(const pllm_engine *engine,
                              uint64_t capacity,
                              pllm_queue **out_queue);

// Frees a queue, before or after its engine; what still writes to it is aborted. NULL is fine. No other call on it may be
// under way. The engine's own queue is left alone: it goes with the engine.
void pllm_queue_free(pllm_queue *queue);

// A descriptor that is readable while a poll of this queue would not have to wait, for epoll and what is built on it (Linux).
// Borrowed: it lives as long as the queue. Polling makes it unreadable again; reading it is not needed, and allowed.
PLLM_NODISCARD
pllm_error *pllm_queue_event_fd(const pllm_queue *queue,
                                int32_t *out_fd);

// Takes everything that is in the queue, in the order it was made. Waits up to timeout_ms for the first
// (0: not at all; negative: as long as it takes). When time runs out the batch is empty; that is no error.
// Once an engine has failed or is freed and its last outputs are taken, polling answers with that error.
// Free the batch with pllm_outputs_free. May be called from any thread, also while another one steps.
PLLM_NODISCARD pllm_error *pllm_queue_poll(const pllm_queue *queue, int64_t timeout_ms, pllm_outputs **out_outputs);

// How many outputs the batch has; 0 for NULL.
uint64_t pllm_outputs_len(const pllm_outputs *outputs);

// Output i of the batch, borrowed from it; NULL where there is none. Each output lies struct_size bytes after the one before.
const pllm_output *pllm_outputs_get(const pllm_outputs *outputs,
                                    uint64_t i);

// Frees a batch. NULL is fine.
void pllm_outputs_free(pllm_outputs *outputs);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_fork_init(pllm_fork *fork, uint64_t struct_size);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_resume_init(pllm_resume *resume, uint64_t struct_size);

// Fills in the defaults, within struct_size bytes and never beyond them.
void pllm_pin_init(pllm_pin *pin, uint64_t struct_size);

// Makes how->n sequences (how NULL: one) that begin with the parent's tokens and share its KV blocks; nothing is copied but
// what is not KV: the place in the random stream, penalty counts, grammar state, stop strings, text. Each child is a request
// of its own, whose id is the sequence's; the ids are written to out_sequences, which has room for n (nothing is written
// where the call fails). Children of a sequence that runs run too; those of an idle one wait to be resumed. A parent that ends
// before the next step, and is not kept, ends its children with PLLM_FINISH_ERROR, also those that wait; for what those were
// resumed to do, another such output comes. May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_fork(const pllm_engine *engine,
                               uint64_t sequence,
                               const pllm_fork *how,
                               uint64_t *out_sequences);

// Adds tokens to the end of a sequence. One that runs goes on after them, from the next step on, and may become longer by as
// many; an idle one has them computed when it is resumed. A sequence that ends before the next step, and is not kept, is not
// changed. Where they lead out of its grammar, it ends with PLLM_FINISH_ERROR as soon as it is to go on with that grammar; to
// rewind it to before them mends that. May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_append(const pllm_engine *engine,
                                 uint64_t sequence,
                                 const uint32_t *tokens,
                                 uint64_t tokens_len);

// Cuts a sequence to its first len tokens, 1 or more; also into the prompt. Everything is as it was then, the place in the
// random stream included; what has been polled stays polled. One that runs goes on from there. May be called from any
// thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_rewind(const pllm_engine *engine,
                                 uint64_t sequence,
                                 uint64_t len);

// An idle sequence goes on. Only its last token and those that were appended since are computed. how NULL: the defaults.
// May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_resume(const pllm_engine *engine,
                                 uint64_t sequence,
                                 const pllm_resume *how);

// Forgets a sequence and gives back its blocks. One that runs ends with PLLM_FINISH_ABORT. Its id is unknown from now on.
// May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_free(const pllm_engine *engine,
                               uint64_t sequence);

// What is known of a sequence. May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_get_info(const pllm_engine *engine,
                                   uint64_t sequence,
                                   pllm_sequence_info *out_info);

// Writes a sequence down: its tokens, KV, sampling parameters, random stream, grammar and text. The blob comes after the next
// step as an output of the sequence (blob, blob_len), into queue (NULL: where its other outputs go); or, where it could not be
// written or the sequence has ended by then, such an output has error and error_code. It names the model, the layout of the KV and the
// instruction path, and has a checksum; it holds the conversation in the clear. The logits hook is not part of it:
// give it again with PLLM_RESUME_CONTINUE.
// May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_export(const pllm_engine *engine,
                                 uint64_t sequence,
                                 const pllm_queue *queue);

// Makes an idle sequence from a blob, in this or another process; resumed with PLLM_RESUME_CONTINUE it goes on with the same
// bits, on a machine that computes the same (see pllm_sequence_info.inexact). A blob that is damaged, of another model, of
// another block_size or kv_dtype, or of a newer library is an error. queue: where its outputs go (NULL: the engine's own).
// May be called from any thread, also while another one steps.
PLLM_NODISCARD
pllm_error *pllm_sequence_import(const pllm_engine *engine,
                                 const uint8_t *blob,
                                 uint64_t blob_len,
                                 const pllm_queue *queue,
                                 uint64_t *out_sequence);

// Computes a prompt, from the next step on, and keeps its blocks: requests that begin with the same tokens find them.
// Undo it with pllm_prefix_unpin. May be called from any thread, also while another one steps.
PLLM_NODISCARD pllm_error *pllm_prefix_pin(const pllm_engine *engine, const pllm_pin *pin, uint64_t *out_pin);

// Lets the prompt's blocks go when others need their place. PLLM_E_NOT_FOUND: the pin has expired, or had to give way.
// May be called from any thread, also while another one steps.
PLLM_NODISCARD pllm_error *pllm_prefix_unpin(const pllm_engine *engine, uint64_t pin);

// Turns text into token ids. flags: PLLM_TEXT_ADD_SPECIAL or 0. A text of more than max_prompt_bytes (pllm_engine_options) is
// PLLM_E_INVALID_ARGUMENT.
PLLM_NODISCARD
pllm_error *pllm_engine_tokenize(const pllm_engine *engine,
                                 const char *text,
                                 uint64_t len,
                                 uint32_t flags,
                                 pllm_tokens **out_tokens);

// Turns token ids into text. flags: PLLM_TEXT_SKIP_SPECIAL or 0.
PLLM_NODISCARD
pllm_error *pllm_engine_detokenize(const pllm_engine *engine,
                                   const uint32_t *tokens,
                                   uint64_t len,
                                   uint32_t flags,
                                   pllm_bytes **out_text);

// Renders a chat with the model's own template, as `apply_chat_template` of transformers 5.5.4 does. Add a request with the
// result without PLLM_TEXT_ADD_SPECIAL.
//
// messages_json is an array of messages, [{"role": "user", "content": "..."}], or an object with "messages" and any of these
// members. Each other member is a variable of the template.
//
// - "tools", "documents": arrays, null by default.
// - "add_generation_prompt": true (default) ends the prompt where the assistant's answer begins.
// - "continue_final_message": true ends the prompt behind the last message's content, so that the model continues it. Excludes
//   "add_generation_prompt": true. Default false.
// - "chat_template": the name of one of the model's templates. Default: "tool_use" if "tools" is given and the model has
//   that template, else "default".
// - "chat_template_content_format": "string" joins the text parts of a content that is an array by newlines before the
//   template sees it, for templates that take only strings. Default "openai": content stays as it is.
//
// Errors: PLLM_E_INVALID_ARGUMENT if the JSON is no chat, the template raises an error, or the chat or its prompt exceeds
// max_prompt_bytes; PLLM_E_CAPACITY if the rendering exceeds a limit of docs/models.md; PLLM_E_MODEL if the template does not
// compile; PLLM_E_UNSUPPORTED if the model has no template.
PLLM_NODISCARD
pllm_error *pllm_engine_render_chat(const pllm_engine *engine,
                                    const char *messages_json,
                                    uint64_t len,
                                    pllm_bytes **out_text);

// The ids, borrowed; NULL for NULL and where there are none.
const uint32_t *pllm_tokens_data(const pllm_tokens *tokens);

// How many ids there are; 0 for NULL.
uint64_t pllm_tokens_len(const pllm_tokens *tokens);

// Frees token ids. NULL is fine.
void pllm_tokens_free(pllm_tokens *tokens);

// The bytes, borrowed, not NUL-terminated; NULL for NULL and where there are none.
const char *pllm_bytes_data(const pllm_bytes *bytes);

// How many bytes there are; 0 for NULL.
uint64_t pllm_bytes_len(const pllm_bytes *bytes);

// Frees bytes. NULL is fine.
void pllm_bytes_free(pllm_bytes *bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PAGEDLLM_H */
