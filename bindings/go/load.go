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

func (l *loading) report(progress func(done, total int64)) {
	total := atomic.LoadUint64((*uint64)(&l.total))
	if progress != nil && total > 0 {
		progress(int64(atomic.LoadUint64((*uint64)(&l.done))), int64(total))
	}
}

// load starts a goroutine that creates the engine, reports its progress and waits for its end.
func load(ctx context.Context, options *Options) (*Engine, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	state := new(loading)
	defer context.AfterFunc(ctx, state.cancel)()
	// If Progress panics, the loading is cancelled, or the engine is closed by its cleanup.
	defer state.cancel()
	type result struct {
		engine *Engine
		err    error
	}
	results := make(chan result, 1)
	go func() {
		engine, err := create(options, state)
		results <- result{engine, err}
	}()
	ticks := time.NewTicker(50 * time.Millisecond)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
			state.report(options.Progress)
		case result := <-results:
			if errors.Is(result.err, ErrCancelled) {
				return nil, ctx.Err()
			}
			if result.err == nil {
				state.report(options.Progress)
			}
			return result.engine, result.err
		}
	}
}

func create(options *Options, state *loading) (*Engine, error) {
	var engine *C.pllm_engine
	err := options.use(func(c *C.pllm_engine_options) error {
		return check(C.create_engine(c, (*C.load_state)(state), &engine))
	})
	if err != nil {
		return nil, err
	}
	return newEngine(engine, options.QueueCapacity)
}
