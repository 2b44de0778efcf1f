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
	info          Info
	queueCapacity int
}

// Open loads a model and starts to serve it. Close the engine when it is no longer needed. A context that is done stops the
// loading of weights at the next piece; what comes before it, the tokenizer and the configuration, is read to its end. After
// Open has returned, the context means nothing to the engine.
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

// newEngine takes over an engine of C's: it is freed when the result is closed, or with the error.
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
	whenForgotten(e, func() { closeEngine(engine, own) })
	return e, nil
}

// closeEngine takes the parts, for the net under a forgotten engine must not reach the engine.
func closeEngine(engine *shared[*C.pllm_engine], own *mailbox) {
	own.close()
	engine.close()
}

// Close ends every request, waits for calls under way, and returns the engine's memory. Streams and polls in progress end
// with ErrClosed, and so does every later call; queues made with NewQueue first give what they hold. It may be called at any
// time, from any goroutine, and again: it returns nil once the engine is closed.
func (e *Engine) Close() error {
	closeEngine(e.engine, e.own)
	return nil
}

// Start has a thread of the engine's own step from now on, asleep while there is nothing to do. Where it steps already,
// Start is ErrBusy.
func (e *Engine) Start() error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_start(c)) })
}

// Stop ends that thread after the step under way. Nothing is lost: requests wait until somebody steps again. It is fine where
// the engine was not started.
func (e *Engine) Stop() error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_stop(c)) })
}

// A StepReport says what one step did.
type StepReport struct {
	// Unfinished requests have not ended: step again while there are any.
	Unfinished int
	// PrefillTokens and DecodeTokens were computed, of so many Sequences.
	PrefillTokens, DecodeTokens, Sequences int
	// Paused sequences were passed over because their queue is full.
	Paused int
}

// Step runs one iteration, with one new token for each running sequence that is past its prompt. What came of it is in the
// queues. Only one goroutine at a time steps: while another does, or the engine was started, it is ErrBusy. It computes on
// its goroutine's thread until the iteration is done.
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

// Abort ends a request at the next step; the last output of each of its sequences says FinishAbort. An id that is unknown or has
// ended is ErrNotFound.
func (e *Engine) Abort(request RequestID) error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_abort(c, C.uint64_t(request))) })
}

// Stats are counts since the engine was made, and the state after its last step.
type Stats struct {
	// Waiting sequences wait for their first or next step; Paused are those of them whose queue is full.
	Waiting, Running, Paused int
	// Idle sequences were kept, and wait to be resumed or closed.
	Idle int
	// BlocksCached are those that nobody uses and that the prefix cache still finds; they are given away when they are needed.
	BlocksTotal, BlocksUsed, BlocksCached, BlocksFree int
	// SlotUtilization is the share of the slots of the blocks in use, or set aside for those that run, that hold a token's K and V;
	// 1 while there are none.
	SlotUtilization float64
	Steps           int
	// PromptTokens counts those computed, again where they were computed again after a preemption.
	PromptTokens, GeneratedTokens, Preemptions int
	// PreemptionsSwapped are those of them that went to the host tier; the others are computed again.
	PreemptionsSwapped int
	// Swapped sequences have their K and V in the host tier.
	Swapped, SwapBlocksTotal, SwapBlocksUsed int
	// BlocksSwappedOut moved to the host tier, BlocksSwappedIn back. Who was to move when SwapFailures failed is computed again.
	BlocksSwappedOut, BlocksSwappedIn, SwapFailures int
	// BlocksCopied counts those copied because a sequence wrote to one that others share.
	BlocksCopied int
	// PrefixQueries are prompt tokens looked for in the prefix cache, PrefixHits those that did not have to be computed.
	PrefixQueries, PrefixHits int
	// PromptTokensCached are tokens that sequences began with and that were found in the prefix cache.
	PromptTokensCached int
	// Requests that ended, by reason.
	FinishedStop, FinishedLength, FinishedAbort, FinishedError, FinishedDeadline int
	// AdmissionRejections are requests that were refused because too much waits.
	AdmissionRejections int
	// StepsFailed could not be computed and were tried again, in part or as a whole.
	StepsFailed int
	// TraceStopped and JournalStopped: the disk has failed, and the file of Options.TracePath or JournalPath has ended.
	TraceStopped, JournalStopped bool
	// DiscardFailures are times that the KV pool became smaller and the system did not take the memory back.
	DiscardFailures int
	// BlocksOutOfWindow are those that the sequences would have besides, did every layer look back on all tokens.
	BlocksOutOfWindow int
}

// Stats returns the engine's counts.
func (e *Engine) Stats() (stats Stats, err error) {
	err = e.engine.use(func(c *C.pllm_engine) error {
		s := C.pllm_stats{struct_size: C.sizeof_pllm_stats}
		if err := check(C.pllm_engine_stats(c, &s)); err != nil {
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

// Metrics returns what dashboards ask for, as of the last step: text in the OpenMetrics format, which is served to Prometheus as
// "application/openmetrics-text; version=1.0.0; charset=utf-8".
func (e *Engine) Metrics() (string, error) {
	return e.makeText(func(engine *C.pllm_engine, out **C.pllm_bytes) *C.pllm_error {
		return C.pllm_engine_metrics(engine, out)
	})
}

// Info is the model and the limits it is served with.
type Info struct {
	// Architecture is what config.json names it, such as "LlamaForCausalLM".
	Architecture string
	// ISA is the instruction path in use, such as "avx512".
	ISA string
	// EOSTokens end a sequence.
	EOSTokens []uint32
	VocabSize int
	Layers    int
	// MaxPositions is the longest sequence that the model was made for, MaxModelLen the longest that this engine allows.
	MaxPositions, MaxModelLen int
	Threads                   int
	// Packed is what became of Options.PackedPath, and PackedReason why the packed form was not read, or not written.
	Packed       PackedForm
	PackedReason string
}

// Info returns what Open found. It never changes, and stays after Close.
func (e *Engine) Info() Info {
	info := e.info
	info.EOSTokens = slices.Clone(info.EOSTokens)
	return info
}

func infoOf(engine *C.pllm_engine) (Info, error) {
	info := C.pllm_model_info{struct_size: C.sizeof_pllm_model_info}
	if err := check(C.pllm_engine_info(engine, &info)); err != nil {
		return Info{}, err
	}
	return Info{
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

// Version is the library's version, such as "0.2.0".
func Version() string { return C.GoString(C.pllm_version()) }

// BuildInfo is what this build and machine offer, as JSON: version, backends, instruction paths, model architectures.
func BuildInfo() string { return C.GoString(C.pllm_build_info()) }
