package pagedllm

// #include "glue.h"
import "C"

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// loading is shared by the loading thread, which never calls into Go, and the goroutine that
// watches it.
type loading C.load_state

func (l *loading) cancel() { atomic.StoreUint32((*uint32)(&l.cancelled), 1) }

// report returns whether the weights have been read.
func (l *loading) report(progress func(done, total int64)) bool {
	total, done := atomic.LoadUint64((*uint64)(&l.total)), atomic.LoadUint64((*uint64)(&l.done))
	if progress != nil && total > 0 {
		progress(int64(done), int64(total))
	}
	return total > 0 && done == total
}

// load starts a goroutine that makes a call which loads a model, reports its progress and waits for
// its end, or until abandoned is readable.
func load[T any](ctx context.Context, options *Options, abandoned <-chan struct{}, call func(*loading) (T, error)) (T, error) {
	var nothing T
	if err := ctx.Err(); err != nil {
		return nothing, err
	}
	state := new(loading)
	defer context.AfterFunc(ctx, state.cancel)()
	// If Progress panics, the loading is cancelled, or the engine is closed by its cleanup.
	defer state.cancel()
	type result struct {
		value T
		err   error
	}
	results := make(chan result, 1)
	go func() {
		value, err := call(state)
		results <- result{value, err}
	}()
	ticks := time.NewTicker(50 * time.Millisecond)
	defer ticks.Stop()
	isRead := false
	for {
		select {
		case <-ticks.C:
			if isRead = state.report(options.Progress); isRead {
				ticks.Stop()
			}
		case <-abandoned:
			return nothing, ctx.Err()
		case result := <-results:
			if errors.Is(result.err, ErrCancelled) && ctx.Err() != nil {
				return nothing, ctx.Err()
			}
			if result.err == nil && !isRead {
				state.report(options.Progress)
			}
			return result.value, result.err
		}
	}
}

func create(options *Options, state *loading) (*Engine, error) {
	var engine *C.pllm_engine
	err := options.create(func(c *C.pllm_engine_options) error {
		return check(C.create_engine(c, (*C.load_state)(state), &engine))
	})
	if err != nil {
		return nil, err
	}
	return newEngine(engine, options.QueueCapacity)
}
