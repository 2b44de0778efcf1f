package pagedllm

// #include "glue.h"
import "C"

import "runtime"

// An Arena is a memory budget for KV pools. Several engines can share it (Options.Arena), and its
// size can change while they run. Any number of goroutines may use it.
type Arena struct {
	// arena is nil for the budget of an engine.
	arena  *shared[*C.pllm_arena]
	engine *Engine
}

// NewArena creates a budget of the given size. Resize can later raise it to at most mostBytes (0:
// to bytes). Nothing is allocated now: engines use memory for the blocks they fill. The budget must
// hold one sequence of MaxModelLen tokens for each engine. Close the arena when no more engines
// will be opened with it; its engines keep the budget.
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

// Arena returns the budget of the engine's KV pool: Options.Arena or the engine's own. Closing the
// engine closes it.
func (e *Engine) Arena() *Arena { return &Arena{engine: e} }

// Close frees the handle. Engines that were opened with the arena keep the budget, and Engine.Arena
// still returns it. Close waits for calls in progress, including an Open with the arena. It may be
// called at any time, from any goroutine, more than once. For the result of Engine.Arena it returns
// ErrInvalidArgument.
func (a *Arena) Close() error {
	if a.engine != nil {
		return &Error{ErrInvalidArgument, "this is an engine's arena: it closes with the engine"}
	}
	a.arena.close()
	return nil
}

// use makes a call on the arena.
func (a *Arena) use(call func(*C.pllm_arena) error) error {
	// The cleanup of an unreachable arena or engine must not close it during the call.
	defer runtime.KeepAlive(a)
	if a.engine == nil {
		return a.arena.use(call)
	}
	return a.engine.engine.use(func(engine *C.pllm_engine) error { return call(C.pllm_engine_arena(engine)) })
}

// Resize changes the size of the budget. No request ends, and results do not change. For a smaller
// size, the engines first drop cached blocks, then the KV blocks of idle sequences, then preempt
// the youngest running requests. The memory is returned to the system, by an engine in a step
// before its next step. If the size is too small for the engines and the requests in progress, the
// call returns ErrCapacity with the smallest possible size.
func (a *Arena) Resize(bytes int64) error {
	var args arguments
	var c C.uint64_t
	if args.setUint64(&c, "bytes", bytes); args.err != nil {
		return args.err
	}
	return a.use(func(arena *C.pllm_arena) error { return check(C.pllm_arena_resize(arena, c)) })
}

// An ArenaState is the state of a budget.
type ArenaState struct {
	Bytes int64
	// LeastBytes is the smallest size to which the budget can be resized now, given its engines and
	// their requests. MostBytes is the largest.
	LeastBytes, MostBytes int64
	// HeldBytes is the number of bytes that the engines hold. It exceeds Bytes while engines are
	// giving blocks back.
	HeldBytes int64
	Engines   int
}

// State returns the size of the budget and the bytes that its engines hold.
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
