package pagedllm

// #include "glue.h"
import "C"

import (
	"time"
	"unsafe"
)

// A KVHash names a block of KV by its tokens and all tokens before them. Engines with the same model,
// weight format, KVType, BlockSize and instruction path have equal hashes for equal prompts and salts.
type KVHash [32]byte

// PollKVEvents takes the events of the prefix cache since the last call, in their order, without
// waiting. It needs Options.KVEventsCapacity. If more events were not read, it returns those of
// SnapshotKVEvents instead. A reader that applies the events in their order therefore always ends with
// the blocks that are cached. Two readers get different events.
func (e *Engine) PollKVEvents() ([]KVEvent, error) {
	return e.kvEvents(func(engine *C.pllm_engine, out **C.pllm_kv_events) *C.pllm_error {
		return C.pllm_engine_poll_kv_events(engine, 0, out)
	})
}

// SnapshotKVEvents lists the blocks of the prefix cache as events: KVCleared, and KVStored of each
// block. The events that PollKVEvents returns are not affected.
func (e *Engine) SnapshotKVEvents() ([]KVEvent, error) {
	return e.kvEvents(func(engine *C.pllm_engine, out **C.pllm_kv_events) *C.pllm_error {
		return C.pllm_engine_snapshot_kv_events(engine, out)
	})
}

// HashPrompt returns the hashes of the full blocks of a prompt, as events have them. Only the prompt
// and the salt of the request are used, and nothing is added to the engine. group is a layer group,
// below Plan.KVGroups; 0 exists in every model.
func (e *Engine) HashPrompt(request Request, group int) ([]KVHash, error) {
	var args arguments
	defer args.Unpin()
	c := request.toC(&args)
	var number C.uint32_t
	args.setUint32(&number, "group", group)
	if args.err != nil {
		return nil, args.err
	}
	bytes, err := e.makeText(func(engine *C.pllm_engine, out **C.pllm_bytes) *C.pllm_error {
		return C.pllm_engine_hash_prompt(engine, c, number, out)
	})
	hashes := make([]KVHash, len(bytes)/len(KVHash{}))
	for i := range hashes {
		copy(hashes[i][:], bytes[i*len(KVHash{}):])
	}
	return hashes, err
}

func (e *Engine) kvEvents(call func(*C.pllm_engine, **C.pllm_kv_events) *C.pllm_error) (events []KVEvent, err error) {
	err = e.engine.use(func(engine *C.pllm_engine) error {
		var batch *C.pllm_kv_events
		if err := check(call(engine, &batch)); err != nil {
			return err
		}
		defer C.pllm_kv_events_free(batch)
		events = make([]KVEvent, C.pllm_kv_events_len(batch))
		for i := range events {
			events[i].fromC(C.pllm_kv_events_get(batch, C.uint64_t(i)))
		}
		return nil
	})
	return events, err
}

// goHash copies a hash. NULL is the zero hash.
func goHash(data *C.uint8_t) (hash KVHash) {
	if data != nil {
		hash = *(*KVHash)(unsafe.Pointer(data))
	}
	return hash
}

func goTime(seconds C.double) time.Time { return time.UnixMicro(int64(float64(seconds) * 1e6)) }
