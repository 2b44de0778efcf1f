// Code generated from src/ffi by make header. DO NOT EDIT.

package pagedllm

// #include "glue.h"
import "C"

import "time"

// Options are the options of an engine. Only ModelPath is required: the zero value of each other
// field selects the library's default. A number that is negative or too large is
// ErrInvalidArgument.
type Options struct {
	// ModelPath is the model directory in the layout of Hugging Face, or a GGUF file.
	ModelPath string
	// Device is the device: "cpu" (default, also ""), or "cuda:0" (also "cuda") for the first CUDA
	// device. CUDA needs an NVIDIA driver for CUDA 12.0 or newer (525) and compute capability 8.0
	// or newer. Prompts are faster with NVIDIA's cuBLAS for CUDA 12 or 13 (libcublasLt.so.12
	// or.13), which ModelInfo.BlasLibrary reports. A list such as "cuda:0,cuda:1" divides the model
	// among up to 64 devices of one kind, which needs NCCL (libnccl.so.2). Lists have not been
	// tested on GPUs yet.
	Device string
	// KVBytes is the KV pool size in bytes. 0: enough for MaxSeqs sequences of MaxModelLen tokens,
	// at most 1 GiB.
	KVBytes int64
	// Seed is the seed for requests without a seed of their own.
	Seed uint64
	// BlockSize is the number of tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
	BlockSize int
	// KVType is the data type of KV blocks. Default DTypeAuto: f32 for models in f32, else bf16.
	KVType DType
	// MaxModelLen is the maximum length of a sequence in tokens, prompt and output together. 0: the
	// model's own maximum, or what the pool holds.
	MaxModelLen int
	// MaxBatchTokens is the maximum number of tokens in one step, prompt and decode tokens of all
	// sequences together. 0: 512.
	MaxBatchTokens int
	// MaxSeqs is the maximum number of running sequences, at most MaxBatchTokens. 0: 64.
	MaxSeqs int
	// PrefillChunk is the maximum number of prompt tokens of one sequence in one step. 0:
	// MaxBatchTokens.
	PrefillChunk int
	// Threads is the number of threads, including the stepping thread. 0: the number of CPUs in
	// CPUs, or of CPUs on which the process may run, within the quota of its container.
	Threads int
	// ISA is the instruction path. Default ISAAuto. Results have the same bits within a path, not
	// across paths.
	ISA ISA
	// SkipTokenizer serves token ids only: no tokenizer is loaded, and text calls return
	// ErrUnsupported.
	SkipTokenizer bool
	// NoPrefixCache disables the prefix cache.
	NoPrefixCache bool
	// BatchInvariant: on a CUDA device, the results of a sequence do not depend on the batch, as on
	// the CPU. Slower: products of many rows do not use cuBLASLt, and attention over long sequences
	// is not split.
	BatchInvariant bool
	// QueueCapacity is the number of unread outputs at which the requests that write to a queue
	// pause. 0: 65536 for the engine's own queue, and 64 for the queue of each stream.
	QueueCapacity int
	// Progress, if not nil, reports the bytes of weights that have been read, out of total, from
	// time to time and once at the end. It runs on the goroutine that called Open. To cancel the
	// loading, cancel the context of Open.
	Progress func(done, total int64)
	// MaxWaitingRequests is the maximum number of requests, including resumed and forked sequences,
	// that wait for their first step. More are refused with ErrCapacity; one can always wait. 0: no
	// limit.
	MaxWaitingRequests int
	// MaxWaitingTokens is the maximum number of tokens that the waiting requests have to compute.
	// 0: no limit.
	MaxWaitingTokens int
	// Budget is the budget from which the KV pool takes its bytes, instead of KVBytes. nil: a
	// budget of its own.
	Budget *Budget
	// SwapBytes is the size in bytes of the host tier, which holds the KV of swapped requests and
	// idle sequences. 0: none.
	SwapBytes int64
	// SwapPath is a directory for the host tier. The tier is an unnamed file there, which grows as
	// it is written and disappears with the engine. A thread of the engine reads and writes it. A
	// slow disk delays only the sequences that return from it; while it is behind, others are
	// recomputed. "": the tier is in memory. If the file cannot be written or read, as on a full
	// disk, the sequence is recomputed when it returns and Stats.SwapFailures counts it.
	SwapPath string
	// Preemption is the treatment of preempted requests. Default PreemptionRecompute. The others
	// need SwapBytes, and SwapBytes needs one of the others.
	Preemption Preemption
	// Order is the order of the waiting requests. Default OrderFCFS.
	Order Order
	// Ageing is the waiting time, in whole milliseconds, after which a request is preferred; see
	// Order. 0: 10 s.
	Ageing time.Duration
	// Batching is the composition of a step. Default BatchingMixed.
	Batching Batching
	// PrefillBudget is the number of prompt tokens for BatchingDecodeFirst and
	// BatchingPrefillFirst. 0: 256 and 2048.
	PrefillBudget int
	// Allocation is the number of blocks that a request needs to start. Default AllocationOnDemand.
	Allocation Allocation
	// TracePath is a file for a trace of every step, in the format of Perfetto and
	// chrome://tracing: the batch, the times of its phases, and the phases of each sequence. An
	// existing file is replaced. A thread of the engine writes it, at most about one second late.
	// If the disk fails or falls behind by 256 MiB, the trace ends and Stats.TraceStopped is true.
	// "": none.
	TracePath string
	// JournalPath is a file for a journal of all calls and of everything else on which steps
	// depend. pagedllm-replay repeats them bit for bit on a machine with the same instruction path.
	// It contains prompts, as tokens, and cache salts. An existing file is replaced. A thread of
	// the engine writes it, at most about one second late. If the disk fails or falls behind by 256
	// MiB, the journal ends and Stats.JournalStopped is true. "": none.
	JournalPath string
	// ModelName is the value of the label model_name in Engine.Metrics. "": the name of the model
	// directory.
	ModelName string
	// Weights is the format of the weights in memory. Fewer bits take less memory and time, and
	// cost quality. Small tensors that affect quality (routers of experts, learned positions) and
	// the projections of latents stay as stored. Default WeightsAsStored.
	Weights Weights
	// WeightGroup is the number of inputs that share a scale in 4-bit formats: 32, 64 or 128.
	// Smaller is more precise. 0: 32.
	WeightGroup int
	// PackedPath is a directory for packed weights. If it has the packed form of this model,
	// Weights and library, the form is checked and read as fast as the disk. Otherwise the weights
	// are packed and the form is written, or replaced. Several models and processes can share the
	// directory; unused files are not removed. It contains weights: protect it against writing as
	// the model is protected. If it cannot be written, the engine works and ModelInfo.Packed
	// reports it. "": weights are packed each time.
	PackedPath string
	// CPUs is a list of CPUs in the syntax of taskset -c, such as "0-3,8", one for each of Threads.
	// Each thread of the engine is pinned to one of them, in this order. The first is for the
	// stepping thread: the engine's own thread (Engine.Start) is pinned, a thread of the program is
	// not. "": threads are not pinned.
	CPUs string
	// MemoryFraction is, for CUDA only, the fraction, 0.01 to 1, of the device memory that is free
	// after weights and working memory, for the KV pool. Cannot be combined with KVBytes. 0:
	// KVBytes is used.
	MemoryFraction float64
	// MaxPromptBytes is the maximum length in bytes of a text prompt, of a chat's JSON and the
	// prompt it renders to, and of a text to tokenize. A longer one is ErrInvalidArgument. 0: 64
	// for each token of MaxModelLen, at least 1048576. Tokenization takes up to 16 bytes of memory
	// for each byte of text, and up to 512 for each byte of a stretch of at most 2 MiB without a
	// place to cut (docs/models.md).
	MaxPromptBytes int64
	// KVStore is the store of KV blocks outside of the pool. nil: none. A request first waits for
	// the blocks of its prompt that the store has. Full blocks are written to the store. Needs the
	// prefix cache. Each engine needs a store of its own. RunWorker ignores it.
	KVStore *KVStore
	// KVStoreMaxBytes is the maximum number of bytes of the blocks that are read or written at a
	// time. 0: 268435456.
	KVStoreMaxBytes int64
	// KVStoreMaxOperations is the maximum number of operations in flight, at most 65536. 0: 64.
	KVStoreMaxOperations int
	// KVStoreTimeout is the time, in whole milliseconds, in which the store must answer a lookup
	// and read its blocks, at most 3600000. Then the request continues without the others. If no
	// block has arrived by then, requests do not wait for 8 times this time. 0: 1 s.
	KVStoreTimeout time.Duration
	// KVStoreSecret is the secret for the keys and checksums of the blocks (HMAC-SHA-256), at least
	// 16 bytes, for a store that is not trusted. Only engines with the same secret share blocks.
	// nil: none.
	KVStoreSecret []byte
	// KVEventsCapacity is the maximum number of KV events that wait for Engine.PollKVEvents, at
	// most 1048576. 0: no events are recorded. 16384 suits most hosts. Needs the prefix cache.
	// Events take memory of the host: about 100 bytes and 4 for each token of a block, for each
	// event and twice for each block of the pool.
	KVEventsCapacity int
	// Communicator is the connection with the other workers that compute the model. Its size is
	// TensorParallel * PipelineParallel. nil: this engine computes the model with the devices of
	// this process.
	Communicator *Communicator
	// TensorParallel is the number of workers that divide each layer. 0: 1, or with a list of
	// devices their number divided by PipelineParallel. The number of attention heads and the
	// widths of MLPs must be multiples of it, and so must the number of KV heads, unless it is a
	// multiple of that.
	TensorParallel int
	// PipelineParallel is the number of groups of workers, each with some of the layers. 0: 1.
	PipelineParallel int
	// WorkerTimeout is the time, in whole milliseconds, after which a wait for another worker
	// fails. It must be longer than any step, and than the difference between the times in which
	// the workers load their parts of the model. 0: 60 s.
	WorkerTimeout time.Duration
	// HostSteps is true if the host steps the engine with Engine.Step, or starts it later with
	// Engine.Start. By default, Open starts the engine's own thread.
	HostSteps bool
}

func (o *Options) toC(args *arguments) *C.pllm_engine_options {
	c := new(C.pllm_engine_options)
	C.pllm_engine_options_init(c, C.sizeof_pllm_engine_options)
	args.Pin(c)
	c.model_path, c.model_path_len = args.text(o.ModelPath)
	args.setText(&c.device, &c.device_len, o.Device)
	args.setUint64(&c.kv_bytes, "KVBytes", o.KVBytes)
	c.seed = C.uint64_t(o.Seed)
	args.setUint32(&c.block_size, "BlockSize", o.BlockSize)
	c.kv_dtype = C.uint32_t(o.KVType)
	args.setUint32(&c.max_model_len, "MaxModelLen", o.MaxModelLen)
	args.setUint32(&c.max_batch_tokens, "MaxBatchTokens", o.MaxBatchTokens)
	args.setUint32(&c.max_seqs, "MaxSeqs", o.MaxSeqs)
	args.setUint32(&c.prefill_chunk, "PrefillChunk", o.PrefillChunk)
	args.setUint32(&c.threads, "Threads", o.Threads)
	c.isa = C.uint32_t(o.ISA)
	if o.SkipTokenizer {
		c.flags |= C.PLLM_ENGINE_SKIP_TOKENIZER
	}
	if o.NoPrefixCache {
		c.flags |= C.PLLM_ENGINE_NO_PREFIX_CACHE
	}
	if o.BatchInvariant {
		c.flags |= C.PLLM_ENGINE_BATCH_INVARIANT
	}
	args.setUint64(&c.queue_capacity, "QueueCapacity", int64(o.QueueCapacity))
	args.setUint64(&c.max_waiting_requests, "MaxWaitingRequests", int64(o.MaxWaitingRequests))
	args.setUint64(&c.max_waiting_tokens, "MaxWaitingTokens", int64(o.MaxWaitingTokens))
	args.setUint64(&c.swap_bytes, "SwapBytes", o.SwapBytes)
	args.setText(&c.swap_path, &c.swap_path_len, o.SwapPath)
	c.preemption = C.uint32_t(o.Preemption)
	c.order = C.uint32_t(o.Order)
	args.setMilliseconds32(&c.ageing_ms, "Ageing", o.Ageing)
	c.batching = C.uint32_t(o.Batching)
	args.setUint32(&c.prefill_budget, "PrefillBudget", o.PrefillBudget)
	c.allocation = C.uint32_t(o.Allocation)
	args.setText(&c.trace_path, &c.trace_path_len, o.TracePath)
	args.setText(&c.journal_path, &c.journal_path_len, o.JournalPath)
	args.setText(&c.model_name, &c.model_name_len, o.ModelName)
	c.weight_format = C.uint32_t(o.Weights)
	args.setUint32(&c.weight_group, "WeightGroup", o.WeightGroup)
	args.setText(&c.packed_path, &c.packed_path_len, o.PackedPath)
	args.setText(&c.cpus, &c.cpus_len, o.CPUs)
	args.setFloat(&c.memory_fraction, o.MemoryFraction)
	args.setUint64(&c.max_prompt_bytes, "MaxPromptBytes", o.MaxPromptBytes)
	args.setUint64(&c.kv_store_max_bytes, "KVStoreMaxBytes", o.KVStoreMaxBytes)
	args.setUint32(&c.kv_store_max_operations, "KVStoreMaxOperations", o.KVStoreMaxOperations)
	args.setMilliseconds32(&c.kv_store_timeout_ms, "KVStoreTimeout", o.KVStoreTimeout)
	c.kv_store_secret, c.kv_store_secret_len = args.bytes(o.KVStoreSecret)
	args.setUint64(&c.kv_events_capacity, "KVEventsCapacity", int64(o.KVEventsCapacity))
	args.setUint32(&c.tensor_parallel, "TensorParallel", o.TensorParallel)
	args.setUint32(&c.pipeline_parallel, "PipelineParallel", o.PipelineParallel)
	args.setMilliseconds64(&c.worker_timeout_ms, "WorkerTimeout", o.WorkerTimeout)
	return c
}

// A Request is a prompt with its parameters. Only a prompt is required: the zero value of each
// other field selects the library's default.
type Request struct {
	// Prompt is the prompt as UTF-8 text. "" if the prompt is given as tokens.
	Prompt string
	// PromptTokenIDs are the prompt as token ids. nil if the prompt is given as text.
	PromptTokenIDs []uint32
	// Sampling has the sampling parameters.
	Sampling Sampling
	// UserData is returned in each output of the request.
	UserData uint64
	// N is the number of results: samples, or best beams. 0: 1. Result i has the sequence id
	// request + i; with BestOf, result i is one of the ids request to request + BestOf - 1. Each
	// sequence has its own last output.
	N int
	// RawPrompt is true if the tokenizer must not add its special tokens, such as BOS. Set it for a
	// prompt that RenderChat rendered.
	RawPrompt bool
	// ShowSpecial keeps special tokens in the text.
	ShowSpecial bool
	// BestOf is the number of samples to generate. If it is larger than N, the N samples with the
	// highest log probability are returned at the end, best first. 0 selects N.
	BestOf int
	// TruncatePrompt keeps only this many tokens at the end of the prompt. 0 keeps all.
	TruncatePrompt int
	// Keep keeps the sequences of the request when they end, for any reason. Engine.Sequence takes
	// ownership of one.
	Keep bool
	// Beam is the beam search. nil selects sampling. The N best beams are returned at the end, best
	// first, whatever OutputKind is.
	//
	// ErrInvalidArgument if it is combined with BestOf, Keep, a temperature other than 0 or the
	// default, TopK, TopP, MinP, TypicalP, TopNSigma, XTC, mirostat, a seed, stop strings,
	// TopLogProbs, PromptLogProbs, Echo or a grammar.
	Beam *Beam
	// CacheSalt: requests share blocks of the prefix cache only if their salts are equal, so that
	// tenants cannot probe the prompts of other tenants. nil: the empty salt.
	CacheSalt []byte
	// Deadline is the deadline, in whole milliseconds, from now. When it passes, the request ends
	// with FinishDeadline and the tokens it has. 0: none. A negative deadline is
	// ErrInvalidArgument.
	Deadline time.Duration
	// Priority is the priority, -100 to 100; higher runs first. Used if the order is OrderPriority.
	// Forks inherit it.
	Priority int
	// KVStoreWait is the time, in whole milliseconds, for which the request waits for each next
	// block of its prompt that the KV store does not have yet, because another engine computes the
	// prompt. The engine reads each block when the store has it, and computes the prompt from the
	// first block on that has not appeared in this time. If no other request can run meanwhile, a
	// step waits for these blocks, too. 0: the request waits only for blocks that the store has.
	// ErrInvalidArgument if it is not 0 and the engine has no Options.KVStore.
	KVStoreWait time.Duration
}

func (r *Request) toC(args *arguments) *C.pllm_request {
	c := new(C.pllm_request)
	C.pllm_request_init(c, C.sizeof_pllm_request)
	args.Pin(c)
	c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len = args.prompt(r.Prompt, r.PromptTokenIDs)
	c.sampling = r.Sampling.toC(args)
	c.user_data = C.uint64_t(r.UserData)
	args.setUint32(&c.n, "N", r.N)
	if r.RawPrompt {
		c.text_flags &^= C.PLLM_TEXT_ADD_SPECIAL
	}
	if r.ShowSpecial {
		c.text_flags &^= C.PLLM_TEXT_SKIP_SPECIAL
	}
	args.setUint32(&c.best_of, "BestOf", r.BestOf)
	args.setUint32(&c.truncate_prompt_tokens, "TruncatePrompt", r.TruncatePrompt)
	if r.Keep {
		c.flags |= C.PLLM_REQUEST_KEEP
	}
	if r.Beam != nil {
		c.beam = r.Beam.toC(args)
	}
	c.cache_salt, c.cache_salt_len = args.bytes(r.CacheSalt)
	c.deadline_ms = C.int64_t(wholeMilliseconds(r.Deadline))
	args.setInt32(&c.priority, "Priority", r.Priority)
	args.setMilliseconds32(&c.kv_store_wait_ms, "KVStoreWait", r.KVStoreWait)
	return c
}

// Sampling is how a request samples its tokens, what it reports and when it ends.
//
// The parameters apply in this order: logit bias; repetition, frequency and presence penalty; DRY;
// exclusions and the grammar; temperature; top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or
// mirostat in their place; the draw.
//
// The zero value of each field selects the library's default. If 0 has a meaning of its own, the
// field is a pointer, made with [Ptr]:
//
//	pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 100} // greedy
type Sampling struct {
	// Seed is the seed. A request with a seed generates the same tokens in any batch. nil: the seed
	// is derived from the engine's seed and the request id.
	Seed *uint64
	// StopTokens are tokens that end the sequence. They are reported in tokens, but not in the
	// text. At most 1024.
	StopTokens []uint32
	// Stop are strings that end the sequence, within a token or across tokens. They do not appear
	// in the text. At most 1024 strings of 16384 bytes in all.
	Stop []string
	// Temperature is the temperature. 0 selects greedy sampling. Range 0 to 10,000. nil: 1.
	Temperature *float64
	// TopP keeps the most probable tokens whose probabilities sum to at least this value. Range
	// above 0 to 1. 0: all.
	TopP float64
	// MinP keeps tokens whose probability is at least this fraction of the largest. Range 0 to 1.
	// 0: all.
	MinP float64
	// TopK keeps the k most probable tokens. 0: all.
	TopK int
	// MaxTokens is the maximum number of generated tokens. 0: up to Options.MaxModelLen. See also
	// PromptOnly.
	MaxTokens int
	// MinTokens is the number of tokens before which neither end-of-sequence tokens nor stops end
	// the sequence.
	MinTokens int
	// IgnoreEOS does not stop at end-of-sequence tokens.
	IgnoreEOS bool
	// LogProbs reports the log probability of each generated token, and of the TopLogProbs most
	// probable tokens.
	LogProbs bool
	// PromptLogProbs reports the log probability of each prompt token except the first, from
	// PromptLogProbsStart on, and of the PromptTopLogProbs most probable tokens. Of several
	// samples, the first reports them. A fork does not report them again.
	PromptLogProbs bool
	// Echo: the output begins with the prompt. With LogProbs, the tokens of the prompt have log
	// probabilities, too: the prompt is computed from PromptLogProbsStart on even if the prefix
	// cache has it, and its output follows then.
	Echo bool
	// IncludeStop: the stop string, or the text of the token that ends the sequence, stays in the
	// text.
	IncludeStop bool
	// ModelDefaults: parameters that are left at their default take the values of the model's
	// generation_config.json, if it has them: temperature, TopK, TopP, MinP, TypicalP,
	// RepetitionPenalty and NoRepeatNgramSize. "do_sample": false selects temperature 0. Has no
	// effect on beam search.
	ModelDefaults bool
	// PrefillProgress: until the first token is generated or appended, each step that computes a
	// part of the prompt, but not its end, has an output with Output.ComputedTokens and without
	// tokens or text, whatever OutputKind is. The other tokens of the prompt follow in later steps,
	// because it is longer than Options.PrefillChunk or Options.MaxBatchTokens, or because the step
	// was full. These outputs count for the capacity of the queue. After a preemption the numbers
	// can be smaller again. Of several samples or beams, the first sequence reports them.
	PrefillProgress bool
	// TypicalP keeps the tokens with the most typical surprise whose probabilities sum to at least
	// this value. Range above 0 to 1. 0: all.
	TypicalP float64
	// TopNSigma keeps tokens whose logit is within this many standard deviations of the largest.
	// Range 0 to 100. 0: all.
	TopNSigma float64
	// XTCProbability is the probability with which XTC removes the most probable tokens. Range 0 to
	// 1. 0: never.
	XTCProbability float64
	// XTCThreshold is the probability from which on a token counts as a top choice for XTC. Range 0
	// to 0.5. nil: 0.1.
	XTCThreshold *float64
	// MirostatTau is, for mirostat 2, the target surprise in bits per token. Range 0 to 100. 0:
	// off.
	MirostatTau float64
	// MirostatEta is, for mirostat 2, the learning rate. Range above 0 to 1. 0: 0.1.
	MirostatEta float64
	// PresencePenalty is subtracted from the logit of each token that has been generated. Range -2
	// to 2.
	PresencePenalty float64
	// FrequencyPenalty is subtracted from the logit of a token for each time it has been generated.
	// Range -2 to 2.
	FrequencyPenalty float64
	// RepetitionPenalty divides positive logits, and multiplies negative logits, of all tokens of
	// the prompt and the output. Range 0.01 to 100. 0: off.
	RepetitionPenalty float64
	// NoRepeatNgramSize: no n-gram of this many tokens occurs twice. At most 256. 0: off.
	NoRepeatNgramSize int
	// TopLogProbs is, with LogProbs, the number of most probable tokens reported for each generated
	// token. At most 128.
	TopLogProbs int
	// PromptTopLogProbs is, with PromptLogProbs, the number of most probable tokens reported for
	// each prompt token. At most 128.
	PromptTopLogProbs int
	// OutputKind is the content of the outputs. Default OutputDelta.
	OutputKind OutputKind
	// Grammar is the constraint on the output.
	Grammar Grammar
	// DRY is the DRY penalty. nil: off.
	DRY *DRY
	// LogitBias has values that are added to logits, from -100 to 100. nil: none. At most as many
	// as the vocabulary has tokens.
	LogitBias map[uint32]float64
	// BadWords are texts that the output must not contain, as the tokenizer encodes them at the
	// beginning of a text, after a space and within a word. Other token sequences that spell the
	// same text are not excluded. At most 1024 texts of 65536 bytes in all.
	BadWords []string
	// BadTokens are token sequences that the output must not contain. At most 1024 sequences of at
	// most 256 tokens each.
	BadTokens [][]uint32
	// AllowedTokens are the only tokens that may be sampled. nil: all. At most as many as the
	// vocabulary has tokens.
	AllowedTokens []uint32
	// PromptLogProbsStart is the position of the first prompt token whose log probability is
	// reported, if PromptLogProbs or both Echo and LogProbs are set. Tokens before it can come from
	// the prefix cache. It counts in the truncated prompt, and must be below its length. 0: all
	// except the first token.
	PromptLogProbsStart int
	// PromptOnly computes and reports the prompt, and generates no tokens. N must be 1, and
	// MaxTokens 0.
	PromptOnly bool
}

func (s *Sampling) toC(args *arguments) *C.pllm_sampling {
	c := new(C.pllm_sampling)
	C.pllm_sampling_init(c, C.sizeof_pllm_sampling)
	args.Pin(c)
	if s.Seed != nil {
		c.seed = C.uint64_t(*s.Seed)
		c.flags |= C.PLLM_SAMPLING_SEED
	}
	c.stop_token_ids, c.stop_token_ids_len = args.tokens(s.StopTokens)
	c.stop, c.stop_lens, c.stop_count = args.texts(s.Stop)
	setFloatFrom(&c.temperature, s.Temperature)
	args.setFloat(&c.top_p, s.TopP)
	args.setFloat(&c.min_p, s.MinP)
	args.setUint32(&c.top_k, "TopK", s.TopK)
	args.setUint32(&c.max_tokens, "MaxTokens", s.MaxTokens)
	args.setUint32(&c.min_tokens, "MinTokens", s.MinTokens)
	if s.IgnoreEOS {
		c.flags |= C.PLLM_SAMPLING_IGNORE_EOS
	}
	if s.LogProbs {
		c.flags |= C.PLLM_SAMPLING_LOGPROBS
	}
	if s.PromptLogProbs {
		c.flags |= C.PLLM_SAMPLING_PROMPT_LOGPROBS
	}
	if s.Echo {
		c.flags |= C.PLLM_SAMPLING_ECHO
	}
	if s.IncludeStop {
		c.flags |= C.PLLM_SAMPLING_INCLUDE_STOP
	}
	if s.ModelDefaults {
		c.flags |= C.PLLM_SAMPLING_MODEL_DEFAULTS
	}
	if s.PrefillProgress {
		c.flags |= C.PLLM_SAMPLING_PREFILL_PROGRESS
	}
	args.setFloat(&c.typical_p, s.TypicalP)
	args.setFloat(&c.top_n_sigma, s.TopNSigma)
	args.setFloat(&c.xtc_probability, s.XTCProbability)
	setFloatFrom(&c.xtc_threshold, s.XTCThreshold)
	args.setFloat(&c.mirostat_tau, s.MirostatTau)
	args.setFloat(&c.mirostat_eta, s.MirostatEta)
	args.setFloat(&c.presence_penalty, s.PresencePenalty)
	args.setFloat(&c.frequency_penalty, s.FrequencyPenalty)
	args.setFloat(&c.repetition_penalty, s.RepetitionPenalty)
	args.setUint32(&c.no_repeat_ngram_size, "NoRepeatNgramSize", s.NoRepeatNgramSize)
	args.setUint32(&c.top_logprobs, "TopLogProbs", s.TopLogProbs)
	args.setUint32(&c.prompt_top_logprobs, "PromptTopLogProbs", s.PromptTopLogProbs)
	c.output_kind = C.uint32_t(s.OutputKind)
	s.Grammar.set(args, c)
	if s.DRY != nil {
		c.dry = s.DRY.toC(args)
	}
	c.logit_bias, c.logit_bias_len = args.biases(s.LogitBias)
	c.bad_words, c.bad_word_lens, c.bad_word_count = args.texts(s.BadWords)
	c.bad_words_ids, c.bad_words_ids_len = args.tokenLists(s.BadTokens)
	c.allowed_token_ids, c.allowed_token_ids_len = args.tokens(s.AllowedTokens)
	args.setUint64(&c.prompt_logprobs_start, "PromptLogProbsStart", int64(s.PromptLogProbsStart))
	if s.PromptOnly {
		args.setPromptOnly(&c.max_tokens, s.MaxTokens)
	}
	return c
}

// DRY is the DRY penalty: a token that would extend a repetition of length tokens loses Multiplier
// * Base ^ (length - AllowedLength). The zero value of each field selects the library's default.
type DRY struct {
	// Multiplier is the strength of the penalty. Range 0 to 100. nil: 0.8. 0 disables it.
	Multiplier *float64
	// Base is the base of the exponential growth. Range 1 to 100. 0: 1.75.
	Base float64
	// AllowedLength is the length in tokens of the longest repetition without a penalty. nil: 2.
	AllowedLength *int
	// LastTokens is the number of last tokens that are searched for repetitions. 0: all.
	LastTokens int
	// SequenceBreakers are texts that end a repetition, within a token or across tokens. nil:
	// newline, colon, quotation mark and asterisk, or none with Options.SkipTokenizer. Empty: none.
	// At most 64 texts of at most 128 bytes each.
	SequenceBreakers []string
}

func (d *DRY) toC(args *arguments) *C.pllm_dry {
	c := new(C.pllm_dry)
	C.pllm_dry_init(c, C.sizeof_pllm_dry)
	args.Pin(c)
	setFloatFrom(&c.multiplier, d.Multiplier)
	args.setFloat(&c.base, d.Base)
	args.setUint32From(&c.allowed_length, "AllowedLength", d.AllowedLength)
	args.setUint32(&c.penalty_last_n, "LastTokens", d.LastTokens)
	c.sequence_breakers, c.sequence_breaker_lens, c.sequence_breaker_count = args.texts(d.SequenceBreakers)
	return c
}

// Beam has the parameters of a beam search, as in generate of Hugging Face transformers: release 5,
// and release 4 for several groups.
//
// Logit bias, penalties and exclusions of Sampling apply to the log probabilities, in the order of
// transformers. Frequency and presence penalties and DRY, which transformers lacks, follow the
// repetition penalty. Bad words can forbid end tokens, which transformers ignores.
//
// The zero value of each field selects the library's default.
type Beam struct {
	// Width is the number of beams, 2 to 64. 0: 4.
	Width int
	// Groups is the number of groups of beams, each with its own search. 0: 1.
	Groups int
	// DiversityPenalty is subtracted from the log probability of a token for each beam of an
	// earlier group that chose it in the same step, before the repetition penalty. Range 0 to
	// 1,000,000.
	DiversityPenalty float64
	// LengthPenalty: the score of a beam is the sum of its log probabilities divided by its length
	// to this power. Range -5 to 5. nil: 1.
	LengthPenalty *float64
	// EarlyStopping is the condition that ends a beam search. Default EarlyStoppingNo.
	EarlyStopping EarlyStopping
}

func (b *Beam) toC(args *arguments) *C.pllm_beam {
	c := new(C.pllm_beam)
	C.pllm_beam_init(c, C.sizeof_pllm_beam)
	args.Pin(c)
	args.setUint32(&c.width, "Width", b.Width)
	args.setUint32(&c.groups, "Groups", b.Groups)
	args.setFloat(&c.diversity_penalty, b.DiversityPenalty)
	setFloatFrom(&c.length_penalty, b.LengthPenalty)
	c.early_stopping = C.uint32_t(b.EarlyStopping)
	return c
}

// A Fork has the parameters of a fork. The zero value of each field selects the library's default.
type Fork struct {
	// At is the number of tokens that the children share with their parent: 1 to its length. 0:
	// all.
	At int
	// Seed: each child draws from its own random stream of this seed, until it is resumed with
	// other parameters. nil: the children draw the same random numbers as their parent.
	Seed *uint64
	// UserData is returned in the outputs of the children. nil: the children have the UserData of
	// the parent.
	UserData *uint64
	// Queue is the queue for the outputs of the children. nil selects the parent's queue.
	Queue *Queue
	// Idle makes the children idle until they are resumed, even if the parent runs.
	Idle bool
}

func (f *Fork) toC(args *arguments) *C.pllm_fork {
	c := new(C.pllm_fork)
	C.pllm_fork_init(c, C.sizeof_pllm_fork)
	args.Pin(c)
	args.setUint64(&c.at, "At", int64(f.At))
	if f.Seed != nil {
		c.seed = C.uint64_t(*f.Seed)
		c.flags |= C.PLLM_FORK_SEED
	}
	if f.UserData != nil {
		c.user_data = C.uint64_t(*f.UserData)
		c.flags |= C.PLLM_FORK_USER_DATA
	}
	if f.Idle {
		c.flags |= C.PLLM_FORK_IDLE
	}
	return c
}

// A Resume is how an idle sequence continues. The zero value of each field selects the library's
// default.
type Resume struct {
	// Sampling has the sampling parameters. Counts (MaxTokens, MinTokens) and penalties start anew.
	Sampling Sampling
	// UserData is returned in the outputs. nil: the sequence keeps its UserData.
	UserData *uint64
	// LastTurn frees the sequence when it ends. By default it is kept and can be resumed again.
	LastTurn bool
	// Continue continues as if the sequence had never been idle, with its own parameters, counts,
	// grammar and output kind. Of the other fields, only UserData, LastTurn and Deadline are used.
	// A sequence that ended by its length must be rewound first; otherwise it ends again with
	// FinishError. For Generate, Sampling.OutputKind must be the output kind of the sequence.
	Continue bool
	// ShowSpecial keeps special tokens in the text.
	ShowSpecial bool
	// Deadline is as in Request, from this call on.
	Deadline time.Duration
}

func (r *Resume) toC(args *arguments) *C.pllm_resume {
	c := new(C.pllm_resume)
	C.pllm_resume_init(c, C.sizeof_pllm_resume)
	args.Pin(c)
	c.sampling = r.Sampling.toC(args)
	if r.UserData != nil {
		c.user_data = C.uint64_t(*r.UserData)
		c.flags |= C.PLLM_RESUME_USER_DATA
	}
	if r.LastTurn {
		c.flags &^= C.PLLM_REQUEST_KEEP
	}
	if r.Continue {
		c.flags |= C.PLLM_RESUME_CONTINUE
	}
	if r.ShowSpecial {
		c.text_flags &^= C.PLLM_TEXT_SKIP_SPECIAL
	}
	c.deadline_ms = C.int64_t(wholeMilliseconds(r.Deadline))
	return c
}

// A Prefix is a prompt that is kept in the prefix cache. Only a prompt is required: the zero value
// of each other field selects the library's default.
type Prefix struct {
	// Prompt is the prompt as UTF-8 text. "" if the prompt is given as tokens.
	Prompt string
	// PromptTokenIDs are the prompt as token ids. nil if the prompt is given as text.
	PromptTokenIDs []uint32
	// CacheSalt is as in Request.
	CacheSalt []byte
	// TimeToLive is the time, in whole milliseconds, for which the prompt is kept. 0: until it is
	// unpinned.
	TimeToLive time.Duration
	// Priority: if a sequence cannot continue otherwise, pins are dropped, those with the lowest
	// priority first.
	Priority int
	// RawPrompt is true if the tokenizer must not add its special tokens, such as BOS. Set it for a
	// prompt that RenderChat rendered.
	RawPrompt bool
}

func (p *Prefix) toC(args *arguments) *C.pllm_pin {
	c := new(C.pllm_pin)
	C.pllm_pin_init(c, C.sizeof_pllm_pin)
	args.Pin(c)
	c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len = args.prompt(p.Prompt, p.PromptTokenIDs)
	c.cache_salt, c.cache_salt_len = args.bytes(p.CacheSalt)
	args.setMilliseconds64(&c.time_to_live_ms, "TimeToLive", p.TimeToLive)
	args.setUint32(&c.priority, "Priority", p.Priority)
	if p.RawPrompt {
		c.text_flags &^= C.PLLM_TEXT_ADD_SPECIAL
	}
	return c
}
