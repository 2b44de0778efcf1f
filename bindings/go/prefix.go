package pagedllm

// #include "glue.h"
import "C"

import (
	"math"
	"time"
)

// A Prefix is a prompt that is kept in the prefix cache. Only a prompt is required: the zero value
// of each other field selects the library's default.
type Prefix struct {
	// Prompt, PromptTokenIDs, RawPrompt and CacheSalt are as in Request.
	Prompt         string
	PromptTokenIDs []uint32
	RawPrompt      bool
	CacheSalt      []byte
	// TimeToLive is the time for which the prompt is kept, in whole milliseconds. 0: until it is
	// unpinned.
	TimeToLive time.Duration
	// Priority orders the pins: if a sequence cannot continue otherwise, pins are dropped, those
	// with the lowest priority first.
	Priority int
}

// A PinID is the id of a pinned prompt of one engine. Ids are never reused.
type PinID uint64

// Pin computes a prompt, from the next step on, and keeps its blocks in the prefix cache: requests
// that begin with the same tokens reuse them. The pin stays until Unpin, the end of its TimeToLive,
// or Close.
func (e *Engine) Pin(prefix Prefix) (PinID, error) {
	var args arguments
	defer args.Unpin()
	c := new(C.pllm_pin)
	C.pllm_pin_init(c, C.sizeof_pllm_pin)
	c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len = args.prompt(prefix.Prompt, prefix.PromptTokenIDs)
	c.cache_salt, c.cache_salt_len = args.bytes(prefix.CacheSalt)
	if ms := args.milliseconds("TimeToLive", prefix.TimeToLive, math.MaxInt64); ms != 0 {
		c.time_to_live_ms = C.uint64_t(ms)
	}
	args.setUint32(&c.priority, "Priority", prefix.Priority)
	if prefix.RawPrompt {
		c.text_flags &^= C.PLLM_TEXT_ADD_SPECIAL
	}
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
