package pagedllm

// #include "glue.h"
import "C"

import "runtime"

// An Arena is a budget of KV bytes that engines may share (Options.Arena), and that may change while they run. Any number of
// goroutines may use it.
type Arena struct {
	// arena is nil where the engine lends its own.
	arena  *shared[*C.pllm_arena]
	engine *Engine
}

// NewArena makes a budget of so many bytes, which Resize may later raise to mostBytes (0: no further). Nothing is allocated:
// engines touch only what they use. Each needs room for its longest sequence. Close the arena when no more engines are to be
// opened with it: those that were keep the budget.
func NewArena(bytes, mostBytes int64) (*Arena, error) {
	var args arguments
	var cBytes, cMost C.uint64_t
	args.setUint64(&cBytes, "bytes", bytes)
	args.setUint64(&cMost, "mostBytes", mostBytes)
	if args.err != nil {
		return nil, args.err
	}
	var c *C.pllm_arena
	if err := check(C.pllm_arena_create(cBytes, cMost, &c)); err != nil {
		return nil, err
	}
	arena := &shared[*C.pllm_arena]{name: "arena", object: c, free: func(c *C.pllm_arena) { C.pllm_arena_free(c) }}
	a := &Arena{arena: arena}
	whenForgotten(a, arena.close)
	return a, nil
}

// Arena returns the budget of the engine's KV pool: Options.Arena, or the engine's own. It closes with the engine.
func (e *Engine) Arena() *Arena { return &Arena{engine: e} }

// Close lets go of the arena; engines that were opened with it keep the budget, and Engine.Arena still gives it. It waits for
// calls under way, an Open with the arena among them. It may be called at any time, from any goroutine, and again. What
// Engine.Arena returned refuses it: it closes with the engine.
func (a *Arena) Close() error {
	if a.engine != nil {
		return &Error{ErrInvalidArgument, "this is an engine's arena: it closes with the engine"}
	}
	a.arena.close()
	return nil
}

// use makes a call on the arena.
func (a *Arena) use(call func(*C.pllm_arena) error) error {
	// The net under a forgotten arena, or its engine, must not close what is being used.
	defer runtime.KeepAlive(a)
	if a.engine == nil {
		return a.arena.use(call)
	}
	return a.engine.engine.use(func(engine *C.pllm_engine) error { return call(C.pllm_engine_arena(engine)) })
}

// Resize changes the budget. Nothing ends because of it, and the answers are the same: what is only cached goes first, then idle
// sequences lose what was computed for them, then the youngest that run are preempted. The memory beyond goes back to the
// system, of an engine that is stepping before its next step. Less than the engines and the requests there are need is
// ErrCapacity, with the number that would do.
func (a *Arena) Resize(bytes int64) error {
	var args arguments
	var c C.uint64_t
	if args.setUint64(&c, "bytes", bytes); args.err != nil {
		return args.err
	}
	return a.use(func(arena *C.pllm_arena) error { return check(C.pllm_arena_resize(arena, c)) })
}

// An ArenaState is an arena as it is now.
type ArenaState struct {
	Bytes int64
	// LeastBytes is what Resize can lower it to, for the engines and requests there are; MostBytes what it can raise it to.
	LeastBytes, MostBytes int64
	// HeldBytes is what the engines hold: more than Bytes while they are on their way down.
	HeldBytes int64
	Engines   int
}

// State returns the budget, and what the engines hold of it.
func (a *Arena) State() (state ArenaState, err error) {
	err = a.use(func(arena *C.pllm_arena) error {
		c := C.pllm_arena_info{struct_size: C.sizeof_pllm_arena_info}
		if err := check(C.pllm_arena_state(arena, &c)); err != nil {
			return err
		}
		state = ArenaState{
			Bytes:      int64(c.bytes),
			LeastBytes: int64(c.least_bytes),
			MostBytes:  int64(c.most_bytes),
			HeldBytes:  int64(c.held_bytes),
			Engines:    int(c.engines),
		}
		return nil
	})
	return state, err
}
