// Code generated from src/ffi by make header. DO NOT EDIT.

package pagedllm

// #include "glue.h"
import "C"

import "time"

// A BudgetInfo is the state of a budget.
type BudgetInfo struct {
	// Bytes is the size of the budget in bytes.
	Bytes int64
	// MinBytes is the smallest size in bytes to which it can be resized now, given its engines and
	// their requests.
	MinBytes int64
	// MaxBytes is the largest size in bytes to which it can be resized.
	MaxBytes int64
	// HeldBytes is the number of bytes that the engines hold. More than Bytes while engines are
	// giving blocks back.
	HeldBytes int64
	// Engines is the number of engines that use the budget.
	Engines int
}

func (b *BudgetInfo) fromC(c *C.pllm_budget_info) {
	b.Bytes = int64(c.bytes)
	b.MinBytes = int64(c.min_bytes)
	b.MaxBytes = int64(c.max_bytes)
	b.HeldBytes = int64(c.held_bytes)
	b.Engines = int(c.engines)
}

// A Plan is the memory that an engine would allocate.
type Plan struct {
	// WeightBytes is the number of bytes of the weights.
	WeightBytes int64
	// KVBytes is the number of bytes of the KV pool.
	KVBytes int64
	// WorkBytes is the number of bytes of activations, logits and working memory of kernels. Small
	// tables are not included.
	WorkBytes int64
	// Blocks is the number of KV blocks.
	Blocks int
	// BlockSize is the number of tokens per KV block.
	BlockSize int
	// BlockBytes is the number of bytes of one KV block: of all layers, or of the layers of one
	// group.
	BlockBytes int64
	// MaxModelLen is the maximum length of a sequence in tokens, prompt and output together.
	MaxModelLen int
	// FullSequences is the number of sequences of MaxModelLen tokens that fit at the same time.
	FullSequences int
	// KVType is the data type of KV blocks, not DTypeAuto.
	KVType DType
	// MaxBlocks is the maximum number of KV blocks, if the budget grows to its maximum.
	MaxBlocks int
	// SwapBytes is the number of bytes of the host tier, in memory or in its file.
	SwapBytes int64
	// SwapBlocks is the number of KV blocks in the host tier.
	SwapBlocks int
	// KVGroups is the number of layer groups with KV blocks of their own. A sequence has one block
	// of each group for every BlockSize tokens. For a group of layers with a window it has only the
	// blocks inside the window.
	KVGroups int
}

func (p *Plan) fromC(c *C.pllm_plan) {
	p.WeightBytes = int64(c.weight_bytes)
	p.KVBytes = int64(c.kv_bytes)
	p.WorkBytes = int64(c.work_bytes)
	p.Blocks = int(c.blocks)
	p.BlockSize = int(c.block_size)
	p.BlockBytes = int64(c.block_bytes)
	p.MaxModelLen = int(c.max_model_len)
	p.FullSequences = int(c.full_sequences)
	p.KVType = DType(c.kv_dtype)
	p.MaxBlocks = int(c.max_blocks)
	p.SwapBytes = int64(c.swap_bytes)
	p.SwapBlocks = int(c.swap_blocks)
	p.KVGroups = int(c.kv_groups)
}

// ModelInfo is the model and the limits of its engine.
type ModelInfo struct {
	// Architecture is the name in config.json, such as "LlamaForCausalLM".
	Architecture string
	// ISA is the instruction path, such as "avx512".
	ISA string
	// EOSTokens are tokens that end a sequence.
	EOSTokens []uint32
	// VocabSize is the number of tokens in the vocabulary.
	VocabSize int
	// Layers is the number of layers.
	Layers int
	// MaxPositions is the maximum length of a sequence for which the model was made.
	MaxPositions int
	// MaxModelLen is the maximum length of a sequence in this engine.
	MaxModelLen int
	// Threads is the number of threads.
	Threads int
	// Packed is the result of Options.PackedPath.
	Packed PackedForm
	// PackedReason is the reason, as text, why the packed weights were not read or not written.
	// Empty if there is nothing to report.
	PackedReason string
	// BlasLibrary: on a CUDA device, the library that computes products of many rows, such as
	// "cuBLASLt 12.9.1 (/usr/lib/libcublasLt.so.12)". If none does, "own kernels: " and the reason;
	// prompts then take longer. Empty on the CPU.
	BlasLibrary string
}

func (m *ModelInfo) fromC(c *C.pllm_model_info) {
	m.Architecture = goText(c.architecture, c.architecture_len)
	m.ISA = goText(c.isa, c.isa_len)
	m.EOSTokens = goTokens(c.eos_token_ids, c.eos_token_ids_len)
	m.VocabSize = int(c.vocab_size)
	m.Layers = int(c.layers)
	m.MaxPositions = int(c.max_positions)
	m.MaxModelLen = int(c.max_model_len)
	m.Threads = int(c.threads)
	m.Packed = PackedForm(c.packed)
	m.PackedReason = goText(c.packed_reason, c.packed_reason_len)
	m.BlasLibrary = goText(c.blas_library, c.blas_library_len)
}

// An Admission is the predicted admission of a request.
type Admission struct {
	// Admits is true if Queue.Add would accept the request, and false if too many requests wait,
	// its queue is full, or a shared budget cannot reserve its blocks.
	Admits bool
	// FitsNow is true if no request is ahead of it and its blocks are free, so that it would start
	// in the next step.
	FitsNow bool
	// FirstToken is the predicted time until its first token. nil if no step has been measured yet.
	FirstToken *time.Duration
	// WaitingRequests is the number of requests ahead of it.
	WaitingRequests int
	// WaitingTokens is the number of tokens that those requests have to compute.
	WaitingTokens int
}

func (a *Admission) fromC(c *C.pllm_admission) {
	a.Admits = c.admits != 0
	a.FitsNow = c.fits_now != 0
	if c.first_token_seconds >= 0 {
		a.FirstToken = Ptr(goDuration(c.first_token_seconds))
	}
	a.WaitingRequests = int(c.waiting_requests)
	a.WaitingTokens = int(c.waiting_tokens)
}

// A StepReport is the result of one step.
type StepReport struct {
	// Unfinished is the number of requests, exports and imports that have not ended, and of
	// commands left to the next steps. While it is not 0, step again, and poll the queues: requests
	// whose queue is full wait for that.
	Unfinished int
	// PrefillTokens is the number of prompt tokens computed.
	PrefillTokens int
	// DecodeTokens is the number of decode tokens computed.
	DecodeTokens int
	// Sequences is the number of sequences in the step.
	Sequences int
	// Paused is the number of sequences that were skipped because their queue is full, or because
	// they wait for a slow grammar.
	Paused int
}

func (s *StepReport) fromC(c *C.pllm_step) {
	s.Unfinished = int(c.unfinished)
	s.PrefillTokens = int(c.prefill_tokens)
	s.DecodeTokens = int(c.decode_tokens)
	s.Sequences = int(c.sequences)
	s.Paused = int(c.paused)
}

// Stats are counters since the creation of the engine, and its state after the last step.
type Stats struct {
	// Waiting is the number of sequences that wait for their first or next step.
	Waiting int
	// Running is the number of sequences that run.
	Running int
	// BlocksTotal is the number of KV blocks of the pool.
	BlocksTotal int
	// BlocksUsed is the number of KV blocks in use.
	BlocksUsed int
	// BlocksCached is the number of unused KV blocks that are in the prefix cache. They are evicted
	// when blocks are needed.
	BlocksCached int
	// BlocksFree is the number of KV blocks that are neither in use nor cached.
	BlocksFree int
	// SlotUtilization is the fraction of the token slots of all used and reserved blocks that hold
	// K and V of a token. 1 if there are none.
	SlotUtilization float64
	// Steps is the number of steps.
	Steps int
	// PromptTokens is the number of prompt tokens computed. Tokens that are recomputed after a
	// preemption count again.
	PromptTokens int
	// GeneratedTokens is the number of tokens generated.
	GeneratedTokens int
	// Preemptions is the number of preemptions.
	Preemptions int
	// FinishedStop is the number of results that ended with FinishStop: one for each sequence of a
	// request.
	FinishedStop int
	// FinishedLength is the number of results that ended with FinishLength: one for each sequence
	// of a request.
	FinishedLength int
	// FinishedAbort is the number of results that ended with FinishAbort: one for each sequence of
	// a request.
	FinishedAbort int
	// FinishedError is the number of results that ended with FinishError: one for each sequence of
	// a request.
	FinishedError int
	// Paused is the number of waiting sequences that the last step skipped because their queue is
	// full, or because they wait for a slow grammar.
	Paused int
	// Idle is the number of kept sequences that wait to be resumed or closed.
	Idle int
	// BlocksCopied is the number of blocks copied because a sequence wrote to a shared block.
	BlocksCopied int
	// PrefixQueries is the number of prompt tokens looked up in the prefix cache.
	PrefixQueries int
	// PrefixHits is the number of prompt tokens found in the prefix cache, which were not computed.
	PrefixHits int
	// FinishedDeadline is the number of results that ended with FinishDeadline: one for each
	// sequence of a request.
	FinishedDeadline int
	// AdmissionRejections is the number of requests refused because of Options.MaxWaitingRequests,
	// Options.MaxWaitingTokens or a full queue.
	AdmissionRejections int
	// StepsFailed is the number of steps that failed and were tried again, in part or as a whole.
	StepsFailed int
	// PreemptionsSwapped is the number of preemptions that swapped the request to the host tier.
	// The others were recomputed.
	PreemptionsSwapped int
	// Swapped is the number of sequences whose KV is in the host tier.
	Swapped int
	// SwapBlocksTotal is the number of KV blocks of the host tier.
	SwapBlocksTotal int
	// SwapBlocksUsed is the number of KV blocks in use in the host tier.
	SwapBlocksUsed int
	// BlocksSwappedOut is the number of blocks moved to the host tier.
	BlocksSwappedOut int
	// BlocksSwappedIn is the number of blocks moved back from the host tier.
	BlocksSwappedIn int
	// SwapFailures is the number of moves that failed, as on a full disk. Their sequences were
	// recomputed.
	SwapFailures int
	// PromptTokensCached is the number of tokens at the start of sequences that were found in the
	// prefix cache.
	PromptTokensCached int
	// TraceStopped is true if Options.TracePath was set and the trace has ended because the disk
	// failed or fell behind.
	TraceStopped bool
	// JournalStopped is true if Options.JournalPath was set and the journal has ended because the
	// disk failed or fell behind.
	JournalStopped bool
	// DiscardFailures is the number of times that the KV pool shrank and the system did not take
	// the memory back, as after mlockall. The budget is kept, but the memory of the process does
	// not shrink.
	DiscardFailures int
	// BlocksOutOfWindow is the number of blocks that sequences do not hold because they are outside
	// the windows of their layers. Blocks of forks count once for each fork.
	BlocksOutOfWindow int
	// KVStoreQueries is the number of KV blocks looked up in the KV store.
	KVStoreQueries int
	// KVStoreHits is the number of KV blocks read from the KV store, with a valid checksum.
	KVStoreHits int
	// KVStoreStored is the number of KV blocks written to the KV store.
	KVStoreStored int
	// KVStoreDropped is the full KV blocks that were not written to the KV store, because it was
	// slow or the pool had evicted them.
	KVStoreDropped int
	// KVStoreFailures is the operations of the KV store that failed or took too long, and damaged
	// blocks.
	KVStoreFailures int
	// KVStoreBytesRead is the number of bytes read from the KV store.
	KVStoreBytesRead int
	// KVStoreBytesWritten is the number of bytes written to the KV store.
	KVStoreBytesWritten int
}

func (s *Stats) fromC(c *C.pllm_stats) {
	s.Waiting = int(c.waiting)
	s.Running = int(c.running)
	s.BlocksTotal = int(c.blocks_total)
	s.BlocksUsed = int(c.blocks_used)
	s.BlocksCached = int(c.blocks_cached)
	s.BlocksFree = int(c.blocks_free)
	s.SlotUtilization = float64(c.slot_utilization)
	s.Steps = int(c.steps)
	s.PromptTokens = int(c.prompt_tokens)
	s.GeneratedTokens = int(c.generated_tokens)
	s.Preemptions = int(c.preemptions)
	s.FinishedStop = int(c.finished_stop)
	s.FinishedLength = int(c.finished_length)
	s.FinishedAbort = int(c.finished_abort)
	s.FinishedError = int(c.finished_error)
	s.Paused = int(c.paused)
	s.Idle = int(c.idle)
	s.BlocksCopied = int(c.blocks_copied)
	s.PrefixQueries = int(c.prefix_queries)
	s.PrefixHits = int(c.prefix_hits)
	s.FinishedDeadline = int(c.finished_deadline)
	s.AdmissionRejections = int(c.admission_rejections)
	s.StepsFailed = int(c.steps_failed)
	s.PreemptionsSwapped = int(c.preemptions_swapped)
	s.Swapped = int(c.swapped)
	s.SwapBlocksTotal = int(c.swap_blocks_total)
	s.SwapBlocksUsed = int(c.swap_blocks_used)
	s.BlocksSwappedOut = int(c.blocks_swapped_out)
	s.BlocksSwappedIn = int(c.blocks_swapped_in)
	s.SwapFailures = int(c.swap_failures)
	s.PromptTokensCached = int(c.prompt_tokens_cached)
	s.TraceStopped = c.traces_stopped != 0
	s.JournalStopped = c.journals_stopped != 0
	s.DiscardFailures = int(c.discard_failures)
	s.BlocksOutOfWindow = int(c.blocks_out_of_window)
	s.KVStoreQueries = int(c.kv_store_queries)
	s.KVStoreHits = int(c.kv_store_hits)
	s.KVStoreStored = int(c.kv_store_stored)
	s.KVStoreDropped = int(c.kv_store_dropped)
	s.KVStoreFailures = int(c.kv_store_failures)
	s.KVStoreBytesRead = int(c.kv_store_bytes_read)
	s.KVStoreBytesWritten = int(c.kv_store_bytes_written)
}

// An Output is an output of one sequence: new tokens, new text, its end, or the progress of its
// prompt.
type Output struct {
	// Request is the id of the request.
	Request RequestID
	// Sequence is the id of the sequence, for Engine.Sequence if the request has Keep.
	Sequence SequenceID
	// UserData is the UserData of the request.
	UserData uint64
	// Tokens are the new tokens. nil if there are none.
	Tokens []uint32
	// LogProbs has the log probability of each token. nil if the request did not ask for them. NaN
	// for tokens that have none: those of an echoed prompt before PromptLogProbsStart, its first
	// one, and tokens that the host appended.
	LogProbs []float32
	// Text is the new text, whole characters only. "" if there is none. The text can lag behind the
	// tokens.
	Text string
	// Err is an *Error if FinishReason is FinishError, or FinishAbort because the engine was
	// closed; else nil.
	Err error
	// PromptTokens is the number of tokens of the prompt.
	PromptTokens int
	// GeneratedTokens is the number of tokens generated so far.
	GeneratedTokens int
	// Index is the index of the sequence in its request, from 0.
	Index int
	// FinishReason is the reason why a sequence ended. Any value but FinishNone marks the last
	// output of the sequence.
	FinishReason FinishReason
	// Score is the sum of the log probabilities of all generated tokens, if the request enables log
	// probabilities or for the best of several samples. For a beam: its score after the length
	// penalty. Else 0.
	Score float64
	// TopLogProbs has the most probable tokens at the position of each token, most probable first.
	// nil if the request did not ask for them.
	TopLogProbs [][]LogProb
	// PromptLogProbs has the log probabilities of the prompt tokens except the first, from
	// Sampling.PromptLogProbsStart on, if the request enables them. They come in order, before the
	// first generated token, possibly in several outputs.
	PromptLogProbs []float32
	// PromptTopLogProbs has the most probable tokens at the position of each token of
	// PromptLogProbs.
	PromptTopLogProbs [][]LogProb
	// sequenceState is the state of an exported sequence. Sequence.Export receives it in a queue of
	// its own.
	sequenceState []byte
	// Timing has the times of the sequence, in its last output. It is zero in all other outputs.
	Timing Timing
	// Preemptions is, in the last output of a sequence, the number of times it was preempted.
	Preemptions int
	// CachedTokens is, in the last output of a sequence, the number of its first tokens that were
	// found in the prefix cache.
	CachedTokens int
	// StopReason is the condition that ended the sequence. StopNone unless FinishReason is
	// FinishStop.
	StopReason StopReason
	// StopToken is the token that ended the sequence if StopReason is StopEOS or StopToken, else 0.
	StopToken uint32
	// StopString is the string that ended the sequence if StopReason is StopString, else "".
	StopString string
	// ComputedTokens is the number of tokens of the sequence that are computed, or that the prefix
	// cache had. Only in outputs of Sampling.PrefillProgress, otherwise 0.
	ComputedTokens int
}

func (o *Output) fromC(c *C.pllm_output) {
	o.Request = RequestID(c.request)
	o.Sequence = SequenceID(c.sequence)
	o.UserData = uint64(c.user_data)
	o.Tokens = goTokens(c.tokens, c.tokens_len)
	o.LogProbs = goFloats(c.logprobs, c.tokens_len)
	o.Text = goText(c.text, c.text_len)
	o.Err = goError(c.error_code, c.error, c.error_len)
	o.PromptTokens = int(c.prompt_tokens)
	o.GeneratedTokens = int(c.generated_tokens)
	o.Index = int(c.index)
	o.FinishReason = FinishReason(c.finish_reason)
	o.Score = float64(c.score)
	o.TopLogProbs = goLogProbs(c.top_logprobs, c.top_logprobs_len, c.tokens_len)
	o.PromptLogProbs = goFloats(c.prompt_logprobs, c.prompt_logprobs_len)
	o.PromptTopLogProbs = goLogProbs(c.prompt_top_logprobs, c.prompt_top_logprobs_len, c.prompt_logprobs_len)
	o.sequenceState = goBytes(c.sequence_state, c.sequence_state_len)
	o.Timing.Queued = goDuration(c.queued_seconds)
	o.Timing.FirstToken = goDuration(c.first_token_seconds)
	o.Timing.LastToken = goDuration(c.last_token_seconds)
	o.Preemptions = int(c.preemptions)
	o.CachedTokens = int(c.cached_tokens)
	o.StopReason = StopReason(c.stop_reason)
	o.StopToken = uint32(c.stop_token)
	o.StopString = goText(c.stop_string, c.stop_string_len)
	o.ComputedTokens = int(c.computed_tokens)
}

// A Completion is everything that one sequence generated.
type Completion struct {
	// Sequence is the id of the sequence, for Engine.Sequence if the request has Keep.
	Sequence SequenceID
	// Tokens has the Tokens of all outputs.
	Tokens []uint32
	// LogProbs has the LogProbs of all outputs.
	LogProbs []float32
	// Text is the whole text.
	Text string
	// Err is an *Error if FinishReason is FinishError, or FinishAbort because the engine was
	// closed; else nil.
	Err error
	// PromptTokens is the number of tokens of the prompt.
	PromptTokens int
	// GeneratedTokens is the number of generated tokens. Tokens of an echoed prompt do not count.
	GeneratedTokens int
	// FinishReason is the reason why the sequence ended. FinishNone if an error occurred before the
	// end.
	FinishReason FinishReason
	// Score is as in the last Output.
	Score float64
	// TopLogProbs has the TopLogProbs of all outputs.
	TopLogProbs [][]LogProb
	// PromptLogProbs has the PromptLogProbs of all outputs.
	PromptLogProbs []float32
	// PromptTopLogProbs has the PromptTopLogProbs of all outputs.
	PromptTopLogProbs [][]LogProb
	// Timing is as in the last Output.
	Timing Timing
	// Preemptions is as in the last Output.
	Preemptions int
	// CachedTokens is as in the last Output.
	CachedTokens int
	// StopReason is as in the last Output.
	StopReason StopReason
	// StopToken is as in the last Output.
	StopToken uint32
	// StopString is as in the last Output.
	StopString string
}

// add adds the next output, except its text.
func (c *Completion) add(output *Output) {
	c.Sequence = output.Sequence
	c.Tokens = append(c.Tokens, output.Tokens...)
	c.LogProbs = append(c.LogProbs, output.LogProbs...)
	c.Err = output.Err
	c.PromptTokens = max(c.PromptTokens, output.PromptTokens)
	c.GeneratedTokens = max(c.GeneratedTokens, output.GeneratedTokens)
	c.FinishReason = output.FinishReason
	c.Score = output.Score
	c.TopLogProbs = append(c.TopLogProbs, output.TopLogProbs...)
	c.PromptLogProbs = append(c.PromptLogProbs, output.PromptLogProbs...)
	c.PromptTopLogProbs = append(c.PromptTopLogProbs, output.PromptTopLogProbs...)
	c.Timing = output.Timing
	c.Preemptions = output.Preemptions
	c.CachedTokens = output.CachedTokens
	c.StopReason = output.StopReason
	c.StopToken = output.StopToken
	c.StopString = output.StopString
}

// SequenceInfo is a sequence as of the last step and the calls since.
type SequenceInfo struct {
	// Request is the id of the request that created it.
	Request RequestID
	// Len is the number of its tokens, prompt and output.
	Len int
	// Index is the index of the sequence in its request, from 0. With Request.BestOf it is not the
	// rank of the result.
	Index int
	// Idle is true if it waits to be resumed or closed, and false if it runs or waits to run.
	Idle bool
	// Inexact is true if it was imported from a machine or an instruction path that does not
	// compute the same bits.
	Inexact bool
}

func (s *SequenceInfo) fromC(c *C.pllm_sequence_info) {
	s.Request = RequestID(c.request)
	s.Len = int(c.len)
	s.Index = int(c.index)
	s.Idle = c.idle != 0
	s.Inexact = c.inexact != 0
}

// A KVEvent is an event of the prefix cache.
type KVEvent struct {
	// SequenceNumber is the number of the step with this event. The first step with events has 1,
	// and each further step with events adds 1. All events of a step take effect together.
	SequenceNumber uint64
	// Time is the time of the step.
	Time time.Time
	// Hash is the hash of the block: its key in a KV store. Zero for KVCleared.
	Hash KVHash
	// ParentHash is the hash of the block before a stored block. If FirstToken is 0, it is a hash
	// that differs between salts. Zero unless Kind is KVStored.
	ParentHash KVHash
	// Tokens are the tokens of a stored block. nil if there are none.
	Tokens []uint32
	// FirstToken is the position of the first token of the block in its sequence.
	FirstToken int
	// Kind is the kind of the event.
	Kind KVEventKind
	// Medium is the place of the block. Values can be added.
	Medium KVMedium
	// Group is the layer group of the block. Models whose layers have different attention windows
	// have a block in each group for the same tokens. Group 0 has the longest window.
	Group int
}

func (k *KVEvent) fromC(c *C.pllm_kv_event) {
	k.SequenceNumber = uint64(c.sequence_number)
	k.Time = goTime(c.time_seconds)
	k.Hash = goHash(c.hash)
	k.ParentHash = goHash(c.parent_hash)
	k.Tokens = goTokens(c.tokens, c.tokens_len)
	k.FirstToken = int(c.first_token)
	k.Kind = KVEventKind(c.kind)
	k.Medium = KVMedium(c.medium)
	k.Group = int(c.group)
}
