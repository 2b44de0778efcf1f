package pagedllm

// #include "glue.h"
import "C"

import "time"

// A Prefix is a prompt to keep in the prefix cache. Every field's zero value is the library's default; a prompt is needed.
type Prefix struct {
	// Prompt, PromptTokens, RawPrompt and CacheSalt are as in Request.
	Prompt       string
	PromptTokens []uint32
	RawPrompt    bool
	CacheSalt    []byte
	// TimeToLive is how long it is kept, in whole milliseconds. 0: until it is unpinned.
	TimeToLive time.Duration
	// Priority: where a sequence could not go on otherwise, pins with the lowest one give way.
	Priority int
}

// A PinID names a pinned prompt of one engine. Ids are never reused.
type PinID uint64

// Pin computes a prompt, from the next step on, and keeps its blocks: requests that begin with the same tokens find them. It
// stays until Unpin, its time is over, or the engine is closed.
func (e *Engine) Pin(prefix Prefix) (PinID, error) {
	var args arguments
	defer args.Unpin()
	c := new(C.pllm_pin)
	C.pllm_pin_init(c, C.sizeof_pllm_pin)
	c.prompt, c.prompt_len, c.prompt_tokens, c.prompt_tokens_len = args.prompt(prefix.Prompt, prefix.PromptTokens)
	c.cache_salt, c.cache_salt_len = args.bytes(prefix.CacheSalt)
	args.setUint64(&c.time_to_live_ms, "TimeToLive in milliseconds", wholeMilliseconds(prefix.TimeToLive))
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

// Unpin lets the prompt's blocks go when others need their place. It is ErrNotFound where the pin has expired, or had to give way.
func (e *Engine) Unpin(pin PinID) error {
	return e.engine.use(func(engine *C.pllm_engine) error { return check(C.pllm_prefix_unpin(engine, C.uint64_t(pin))) })
}
