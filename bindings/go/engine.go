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
	engine, err := load(ctx, &options, nil, func(state *loading) (*Engine, error) { return create(&options, state) })
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

// Step runs one iteration and generates one token for each sequence whose prompt is complete. The
// results are in the queues. If another goroutine or the engine's own thread is stepping the
// engine, Step returns ErrBusy. It blocks its thread until the iteration has ended.
func (e *Engine) Step() (report StepReport, err error) {
	err = e.engine.use(func(c *C.pllm_engine) error {
		step := C.pllm_step{struct_size: C.sizeof_pllm_step}
		if err := check(C.pllm_engine_step(c, &step)); err != nil {
			return err
		}
		report.fromC(&step)
		return nil
	})
	return report, err
}

// Abort aborts a request at the next step. The last output of each sequence has FinishAbort. If the
// id is unknown or the request has ended, Abort returns ErrNotFound.
func (e *Engine) Abort(request RequestID) error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_abort(c, C.uint64_t(request))) })
}

// Healthy returns nil if the engine works, and the error that has stopped it if it has failed. Then
// all its requests have ended, and only a new engine can serve. If the engine is closed, Healthy
// returns ErrClosed. It does not wait for a step.
func (e *Engine) Healthy() error {
	return e.engine.use(func(c *C.pllm_engine) error { return check(C.pllm_engine_health(c)) })
}

// Stats returns the engine's counters and state.
func (e *Engine) Stats() (stats Stats, err error) {
	err = e.engine.use(func(c *C.pllm_engine) error {
		s := C.pllm_stats{struct_size: C.sizeof_pllm_stats}
		if err := check(C.pllm_engine_get_stats(c, &s)); err != nil {
			return err
		}
		stats.fromC(&s)
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

// Snapshot describes the engine after its current step as a JSON object: which sequences have which
// blocks, and what the last steps computed. It has the first maxBlocks blocks of each tier and at
// most maxSequences sequences. pllm_engine_snapshot in the C header describes the members.
func (e *Engine) Snapshot(maxBlocks, maxSequences int) ([]byte, error) {
	text, err := e.makeText(func(engine *C.pllm_engine, out **C.pllm_bytes) *C.pllm_error {
		return C.pllm_engine_snapshot(engine, C.uint64_t(max(maxBlocks, 0)), C.uint64_t(max(maxSequences, 0)), out)
	})
	return []byte(text), err
}

// ModelInfo describes the model and the limits of the engine. It does not change, and is valid after
// Close.
func (e *Engine) ModelInfo() ModelInfo {
	info := e.info
	info.EOSTokens = slices.Clone(info.EOSTokens)
	return info
}

func infoOf(engine *C.pllm_engine) (info ModelInfo, err error) {
	c := C.pllm_model_info{struct_size: C.sizeof_pllm_model_info}
	if err := check(C.pllm_engine_get_model_info(engine, &c)); err != nil {
		return info, err
	}
	info.fromC(&c)
	return info, nil
}

// Version returns the version of the library, such as "0.3.0".
func Version() string { return C.GoString(C.pllm_version()) }

// BuildInfo returns a JSON object that describes this build and machine: version, backends,
// instruction paths, model architectures.
func BuildInfo() string { return C.GoString(C.pllm_build_info()) }
