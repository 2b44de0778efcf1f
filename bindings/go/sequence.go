package pagedllm

// #include "glue.h"
import "C"

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// A SequenceID is the id of a sequence of one engine. Ids are never reused. The first sequence of a
// request, a fork and an imported sequence have the id of their request. No other sequence has the
// id of a request.
type SequenceID uint64

// A Sequence is a sequence: its tokens and their KV blocks. It can be forked, appended to, rewound
// and resumed. An idle sequence waits to be resumed or closed. Close it when it is no longer
// needed.
type Sequence struct {
	engine *Engine
	id     SequenceID
	// owned is true until the sequence is closed or released.
	owned *atomic.Bool
}

// Sequence takes ownership of a sequence of a request with Keep, or of a released one. Only one
// Sequence may own an id.
func (e *Engine) Sequence(id SequenceID) *Sequence {
	s := &Sequence{e, id, new(atomic.Bool)}
	s.owned.Store(true)
	engine, owned := e.engine, s.owned // not s, because its cleanup must not refer to it
	whenUnreachable(s, func() { freeSequence(engine, id, owned) })
	return s
}

// ID returns the id of the sequence. It is valid after Close.
func (s *Sequence) ID() SequenceID { return s.id }

// Close frees the sequence. A running sequence ends with FinishAbort. Close may be called at any
// time, from any goroutine, more than once. If the sequence ended without being kept, Close returns
// ErrNotFound. If the engine is closed, Close returns nil.
func (s *Sequence) Close() error {
	defer runtime.KeepAlive(s)
	return freeSequence(s.engine.engine, s.id, s.owned)
}

func freeSequence(engine *shared[*C.pllm_engine], id SequenceID, owned *atomic.Bool) error {
	if !owned.Swap(false) {
		return nil
	}
	err := engine.use(func(c *C.pllm_engine) error { return check(C.pllm_sequence_free(c, C.uint64_t(id))) })
	if errors.Is(err, ErrClosed) {
		return nil
	}
	return err
}

// Release gives up ownership and returns the id; the sequence is not freed. Afterwards s behaves
// like a closed sequence.
func (s *Sequence) Release() SequenceID {
	s.owned.Store(false)
	return s.id
}

// use makes a call on the engine of the sequence.
func (s *Sequence) use(call func(*C.pllm_engine) error) error {
	defer runtime.KeepAlive(s)
	if !s.owned.Load() {
		return &Error{Code: ErrClosed, Message: "the sequence is closed"}
	}
	return s.engine.engine.use(call)
}

// useWith is use with a queue, or NULL for nil.
func (s *Sequence) useWith(queue *Queue, call func(*C.pllm_engine, *C.pllm_queue) error) error {
	defer runtime.KeepAlive(queue)
	return s.use(func(engine *C.pllm_engine) error {
		if queue == nil {
			return call(engine, nil)
		}
		return queue.mailbox.queue.use(func(c *C.pllm_queue) error { return call(engine, c) })
	})
}

// Fork creates a sequence with the first tokens of s; they share its KV blocks. Children of a
// running sequence run; children of an idle one are idle. If the queue of s is closed, as the queue
// of Stream or Generate is at their end, set Fork.Queue.
func (s *Sequence) Fork(how Fork) (*Sequence, error) {
	children, err := s.ForkMany(1, how)
	if err != nil {
		return nil, err
	}
	return children[0], nil
}

// ForkMany creates n sequences at once.
func (s *Sequence) ForkMany(n int, how Fork) ([]*Sequence, error) {
	var args arguments
	defer args.Unpin()
	c := how.toC(&args)
	if args.inRange("n", int64(n), 0, math.MaxUint32) {
		c.n = C.uint32_t(n)
	}
	if args.err != nil {
		return nil, args.err
	}
	var children []*Sequence
	err := s.useWith(how.Queue, func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		// If Go cannot allocate, the process ends. malloc returns NULL instead.
		ids := C.room_for_ids(c.n)
		if ids == nil {
			return &Error{Code: ErrOutOfMemory, Message: fmt.Sprintf("no memory for the ids of %d children; reduce n", n)}
		}
		defer C.free(unsafe.Pointer(ids))
		if err := check(C.pllm_sequence_fork(engine, C.uint64_t(s.id), c, ids)); err != nil {
			return err
		}
		for _, id := range unsafe.Slice(ids, n) {
			children = append(children, s.engine.Sequence(SequenceID(id)))
		}
		return nil
	})
	return children, err
}

// Append appends tokens. A running sequence continues after them from the next step on, and its
// MaxTokens grows by their number. An idle sequence computes them when it is resumed.
func (s *Sequence) Append(tokens []uint32) error {
	var args arguments
	defer args.Unpin()
	data, len := args.tokens(tokens)
	return s.use(func(engine *C.pllm_engine) error {
		return check(C.pllm_sequence_append(engine, C.uint64_t(s.id), data, len))
	})
}

// Rewind truncates the sequence to its first tokens (1 or more), also into the prompt. Its state is
// as it was then, including the random stream. Outputs that have been polled are not taken back. A
// running sequence continues from there.
func (s *Sequence) Rewind(tokens int) error {
	if tokens < 0 {
		return &Error{Code: ErrInvalidArgument, Message: fmt.Sprintf("tokens is %d; keep at least one token", tokens)}
	}
	return s.use(func(engine *C.pllm_engine) error {
		return check(C.pllm_sequence_rewind(engine, C.uint64_t(s.id), C.uint64_t(tokens)))
	})
}

// Resume continues an idle sequence. Only its last token and the tokens appended since are
// computed. Its queue stays the same: Queue.Resume selects another queue, and Stream and Generate
// create one. A sequence is idle from its last output on.
func (s *Sequence) Resume(how Resume) error { return s.resume(&how, nil) }

func (s *Sequence) resume(how *Resume, queue *Queue) error {
	var args arguments
	defer args.Unpin()
	c := how.toC(&args)
	if args.err != nil {
		return args.err
	}
	return s.useWith(queue, func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		return check(C.pllm_sequence_resume(engine, C.uint64_t(s.id), c))
	})
}

// Stream resumes the sequence when the loop over it begins, and returns its outputs as
// Engine.Stream does. Leaving the loop early, or a context that is done, aborts the generation.
// From the engine's next step on the sequence is idle again, unless LastTurn is set.
func (s *Sequence) Stream(ctx context.Context, how Resume) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		queue, info, err := s.resumeInNewQueue(ctx, &how)
		if err != nil {
			yield(Output{}, err)
			return
		}
		queue.stream(ctx, info.Request, 1)(yield)
		runtime.KeepAlive(s)
	}
}

// Generate resumes the sequence and waits until it ends. Contexts and errors are as in Stream.
func (s *Sequence) Generate(ctx context.Context, how Resume) (Completion, error) {
	defer runtime.KeepAlive(s)
	queue, info, err := s.resumeInNewQueue(ctx, &how)
	if err != nil {
		return Completion{}, err
	}
	all, err := queue.collect(ctx, info.Request, info.Index, 1, how.Sampling.OutputKind)
	return all[0], err
}

// resumeInNewQueue resumes the sequence with a new queue.
func (s *Sequence) resumeInNewQueue(ctx context.Context, how *Resume) (*Queue, SequenceInfo, error) {
	info, err := s.Info()
	if err != nil {
		return nil, info, err
	}
	queue, err := s.engine.queueFor(ctx, func(queue *Queue) error { return s.resume(how, queue) })
	return queue, info, err
}

// Export returns the state of the sequence after the engine's next step. Engine.Import creates a
// sequence from it, in this or another process. The sequence itself is not affected. The state
// contains the conversation in plain text.
func (s *Sequence) Export(ctx context.Context) ([]byte, error) {
	queue, err := s.engine.queueFor(ctx, s.exportTo)
	if err != nil {
		return nil, err
	}
	defer queue.Close()
	output, _, err := queue.next(ctx, nil) // the only output: the state or an error
	return output.sequenceState, cmp.Or(err, output.Err)
}

// exportTo exports the state as an output in queue.
func (s *Sequence) exportTo(queue *Queue) error {
	return s.useWith(queue, func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		return check(C.pllm_sequence_export(engine, C.uint64_t(s.id), queue))
	})
}

// Import creates an idle sequence from the state that Export returned, in this or another process,
// for an engine with the same model, BlockSize and KVType. With Resume.Continue it continues with
// the same bits, unless SequenceInfo.Inexact is true. Its outputs go to the engine's own queue;
// Queue.Import selects another queue.
func (e *Engine) Import(state []byte) (*Sequence, error) { return e.Queue().Import(state) }

// Info reads the state of the sequence.
func (s *Sequence) Info() (info SequenceInfo, err error) {
	err = s.use(func(engine *C.pllm_engine) error {
		c := C.pllm_sequence_info{struct_size: C.sizeof_pllm_sequence_info}
		if err := check(C.pllm_sequence_get_info(engine, C.uint64_t(s.id), &c)); err != nil {
			return err
		}
		info.fromC(&c)
		return nil
	})
	return info, err
}
