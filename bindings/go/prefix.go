package pagedllm

// #include "glue.h"
import "C"

// A PinID is the id of a pinned prompt of one engine. Ids are never reused.
type PinID uint64

// Pin computes a prompt, from the next step on, and keeps its blocks in the prefix cache: requests
// that begin with the same tokens reuse them. The pin stays until Unpin, the end of its TimeToLive,
// or Close.
func (e *Engine) Pin(prefix Prefix) (PinID, error) {
	var args arguments
	defer args.Unpin()
	c := prefix.toC(&args)
	if args.err != nil {
		return 0, args.err
	}
	var id C.uint64_t
	err := e.engine.use(func(engine *C.pllm_engine) error { return check(C.pllm_prefix_pin(engine, c, &id)) })
	return PinID(id), err
}

// Unpin unpins a prompt: its blocks can be evicted again. If the pin has expired or was dropped,
// Unpin returns ErrNotFound.
func (e *Engine) Unpin(pin PinID) error {
	return e.engine.use(func(engine *C.pllm_engine) error { return check(C.pllm_prefix_unpin(engine, C.uint64_t(pin))) })
}
