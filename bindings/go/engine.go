package pagedllm

// #include "glue.h"
import "C"

import (
	"cmp"
	"context"
	"slices"
)

// An Engine is one model, its KV pool and its requests. Any number of goroutines may use it.
type Engine struct {
	engine        *shared[*C.pllm_engine]
	own           *mailbox
	info          ModelInfo
	queueCapacity int
}

// Open loads a model, creates an engine and, unless Options.HostSteps is set, starts it. Close the
// engine when it is no longer needed. If the context is done, the loading of weights stops; the
// configuration and the tokenizer are read to their end. After Open has returned, the context has
// no effect on the engine.
func Open(ctx context.Context, options Options) (*Engine, error) {
	engine, err := load(ctx, &options)
	if err != nil {
		return nil, err
	}
	if !options.HostSteps {
		err = engine.Start()
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		engine.Close()
		return nil, err
	}
	return engine, nil
}

// newEngine takes ownership of a C engine. It is freed when the result is closed, or on an error.
func newEngine(c *C.pllm_engine, queueCapacity int) (*Engine, error) {
	engine := &shared[*C.pllm_engine]{name: "engine", object: c, free: func(c *C.pllm_engine) { C.pllm_engine_free(c) }}
	info, err := infoOf(c)
	if err != nil {
		engine.close()
		return nil, err
	}
	own, err := newMailbox(&shared[*C.pllm_queue]{name: "engine", object: C.pllm_engine_queue(c), free: func(*C.pllm_queue) {}})
	if err != nil {
		engine.close()
		return nil, err
	}
	e := &Engine{engine, own, info, cmp.Or(queueCapacity, C.PLLM_QUEUE_CAPACITY)}
	whenUnreachable(e, func() { closeEngine(engine, own) })
	return e, nil
}

// closeEngine takes the parts of an engine, because the cleanup of an unreachable Engine must not
// refer to it.
func closeEngine(engine *shared[*C.pllm_engine], own *mailbox) {
	own.close()
	engine.close()
}

// Close ends every request, waits for calls in progress and returns the engine's memory. Streams
// and polls in progress, and later calls, return ErrClosed. Queues made with NewQueue first return
// the outputs they hold. Close may be called at any time, from any goroutine, more than once. It
// returns nil when the engine is closed.
func (e *Engine) Close() error {
	closeEngine(e.engine, e.own)
	return nil
}

// Start starts a thread of the engine that steps it, and sleeps while there is nothing to do. If
// the thread is already running, Start returns ErrBusy.
func (e *Engine) Start() error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_start(c)) })
}

// Stop stops the engine's thread after the current step and joins it. No request is lost: they wait
// until the engine is stepped again. Stop has no effect if the thread is not running.
func (e *Engine) Stop() error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_stop(c)) })
}

// A StepReport is the result of one step.
type StepReport struct {
	// Unfinished is the number of requests that have not ended. While it is not 0, step again.
	Unfinished int
	// PrefillTokens and DecodeTokens are the numbers of tokens computed, and Sequences the number
	// of sequences in the step.
	PrefillTokens, DecodeTokens, Sequences int
	// Paused is the number of sequences that were skipped because their queue is full, or because
	// they wait for a slow grammar.
	Paused int
}

// Step runs one iteration and generates one token for each sequence whose prompt is complete. The
// results are in the queues. If another goroutine or the engine's own thread is stepping the
// engine, Step returns ErrBusy. It blocks its thread until the iteration has ended.
func (e *Engine) Step() (report StepReport, err error) {
	err = e.engine.use(func(c *C.pllm_engine) error {
		step := C.pllm_step{struct_size: C.sizeof_pllm_step}
		if err := check(C.pllm_engine_step(c, &step)); err != nil {
			return err
		}
		report = StepReport{
			Unfinished:    int(step.unfinished),
			PrefillTokens: int(step.prefill_tokens),
			DecodeTokens:  int(step.decode_tokens),
			Sequences:     int(step.sequences),
			Paused:        int(step.paused),
		}
		return nil
	})
	return report, err
}

// Abort aborts a request at the next step. The last output of each sequence has FinishAbort. If the
// id is unknown or the request has ended, Abort returns ErrNotFound.
func (e *Engine) Abort(request RequestID) error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_abort(c, C.uint64_t(request))) })
}

// Stats are counters since the creation of the engine, and its state after the last step.
type Stats struct {
	// Waiting sequences wait for their first or next step, and Running sequences run. Paused counts
	// the waiting sequences that the last step skipped because their queue is full, or because they
	// wait for a slow grammar.
	Waiting, Running, Paused int
	// Idle is the number of kept sequences that wait to be resumed or closed.
	Idle int
	// BlocksCached is the number of unused blocks in the prefix cache. They are evicted when blocks
	// are needed. BlocksFree blocks are neither in use nor cached.
	BlocksTotal, BlocksUsed, BlocksCached, BlocksFree int
	// SlotUtilization is the fraction of the token slots of all used and reserved blocks that hold
	// K and V of a token. 1 if there are none.
	SlotUtilization float64
	Steps           int
	// PromptTokens counts computed prompt tokens. Tokens that are recomputed after a preemption
	// count again.
	PromptTokens, GeneratedTokens, Preemptions int
	// PreemptionsSwapped counts preemptions that swapped the request to the host tier. The others
	// were recomputed.
	PreemptionsSwapped int
	// Swapped is the number of sequences whose KV is in the host tier, which has SwapBlocksTotal
	// blocks.
	Swapped, SwapBlocksTotal, SwapBlocksUsed int
	// BlocksSwappedOut counts blocks moved to the host tier, and BlocksSwappedIn blocks moved back.
	// SwapFailures counts failed moves, whose sequences were recomputed.
	BlocksSwappedOut, BlocksSwappedIn, SwapFailures int
	// BlocksCopied counts blocks copied because a sequence wrote to a shared block.
	BlocksCopied int
	// PrefixQueries counts prompt tokens looked up in the prefix cache, and PrefixHits those found
	// there, which were not computed.
	PrefixQueries, PrefixHits int
	// PromptTokensCached counts tokens at the start of sequences that were found in the prefix
	// cache.
	PromptTokensCached int
	// Numbers of requests that have ended, by finish reason.
	FinishedStop, FinishedLength, FinishedAbort, FinishedError, FinishedDeadline int
	// AdmissionRejections counts requests refused because of MaxWaitingRequests, MaxWaitingTokens
	// or a full queue.
	AdmissionRejections int
	// StepsFailed counts steps that failed and were tried again, in part or as a whole.
	StepsFailed int
	// TraceStopped and JournalStopped are true if the file of Options.TracePath or
	// Options.JournalPath has ended because the disk failed.
	TraceStopped, JournalStopped bool
	// DiscardFailures counts the times that the KV pool shrank and the system did not take the
	// memory back.
	DiscardFailures int
	// BlocksOutOfWindow counts the blocks that sequences do not hold because they are outside the
	// windows of their layers.
	BlocksOutOfWindow int
}

// Stats returns the engine's counters and state.
func (e *Engine) Stats() (stats Stats, err error) {
	err = e.engine.use(func(c *C.pllm_engine) error {
		s := C.pllm_stats{struct_size: C.sizeof_pllm_stats}
		if err := check(C.pllm_engine_get_stats(c, &s)); err != nil {
			return err
		}
		stats = Stats{
			Waiting: int(s.waiting), Running: int(s.running), Paused: int(s.paused), Idle: int(s.idle),
			BlocksTotal: int(s.blocks_total), BlocksUsed: int(s.blocks_used),
			BlocksCached: int(s.blocks_cached), BlocksFree: int(s.blocks_free),
			SlotUtilization: float64(s.slot_utilization),
			Steps:           int(s.steps),
			PromptTokens:    int(s.prompt_tokens), GeneratedTokens: int(s.generated_tokens), Preemptions: int(s.preemptions),
			PreemptionsSwapped: int(s.preemptions_swapped),
			Swapped:            int(s.swapped), SwapBlocksTotal: int(s.swap_blocks_total), SwapBlocksUsed: int(s.swap_blocks_used),
			BlocksSwappedOut: int(s.blocks_swapped_out), BlocksSwappedIn: int(s.blocks_swapped_in),
			SwapFailures:  int(s.swap_failures),
			BlocksCopied:  int(s.blocks_copied),
			PrefixQueries: int(s.prefix_queries), PrefixHits: int(s.prefix_hits),
			PromptTokensCached: int(s.prompt_tokens_cached),
			FinishedStop:       int(s.finished_stop), FinishedLength: int(s.finished_length),
			FinishedAbort: int(s.finished_abort), FinishedError: int(s.finished_error), FinishedDeadline: int(s.finished_deadline),
			AdmissionRejections: int(s.admission_rejections),
			StepsFailed:         int(s.steps_failed),
			TraceStopped:        s.traces_stopped != 0, JournalStopped: s.journals_stopped != 0,
			DiscardFailures: int(s.discard_failures), BlocksOutOfWindow: int(s.blocks_out_of_window),
		}
		return nil
	})
	return stats, err
}

// Metrics returns gauges, counters and histograms, as of the last step, in the OpenMetrics text
// format ("application/openmetrics-text; version=1.0.0; charset=utf-8").
func (e *Engine) Metrics() (string, error) {
	return e.makeText(func(engine *C.pllm_engine, out **C.pllm_bytes) *C.pllm_error {
		return C.pllm_engine_get_metrics(engine, out)
	})
}

// ModelInfo is the model and the limits of its engine.
type ModelInfo struct {
	// Architecture is the name in config.json, such as "LlamaForCausalLM".
	Architecture string
	// ISA is the instruction path, such as "avx512".
	ISA string
	// EOSTokens are the tokens that end a sequence.
	EOSTokens []uint32
	VocabSize int
	Layers    int
	// MaxPositions is the maximum length of a sequence for which the model was made, and
	// MaxModelLen the maximum length in this engine.
	MaxPositions, MaxModelLen int
	Threads                   int
	// Packed is the result of Options.PackedPath, and PackedReason why the packed weights were not
	// read or not written.
	Packed       PackedForm
	PackedReason string
}

// ModelInfo describes the model and the limits of the engine. It does not change, and is valid after
// Close.
func (e *Engine) ModelInfo() ModelInfo {
	info := e.info
	info.EOSTokens = slices.Clone(info.EOSTokens)
	return info
}

func infoOf(engine *C.pllm_engine) (ModelInfo, error) {
	info := C.pllm_model_info{struct_size: C.sizeof_pllm_model_info}
	if err := check(C.pllm_engine_get_model_info(engine, &info)); err != nil {
		return ModelInfo{}, err
	}
	return ModelInfo{
		Architecture: goText(info.architecture, info.architecture_len),
		ISA:          goText(info.isa, info.isa_len),
		EOSTokens:    goTokens(info.eos_token_ids, info.eos_token_ids_len),
		VocabSize:    int(info.vocab_size),
		Layers:       int(info.layers),
		MaxPositions: int(info.max_positions),
		MaxModelLen:  int(info.max_model_len),
		Threads:      int(info.threads),
		Packed:       PackedForm(info.packed),
		PackedReason: goText(info.packed_reason, info.packed_reason_len),
	}, nil
}

// Version returns the version of the library, such as "0.3.0".
func Version() string { return C.GoString(C.pllm_version()) }

// BuildInfo returns a JSON object that describes this build and machine: version, backends,
// instruction paths, model architectures.
func BuildInfo() string { return C.GoString(C.pllm_build_info()) }
