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
	"time"
	"unsafe"
)

// A SequenceID names a sequence of one engine. Ids are never reused, and no sequence has that of a request, but for a request's
// first sequence and one that was forked or imported: those have the request's own.
type SequenceID uint64

// A Sequence is tokens and what was computed for them: a value that can be forked, added to, cut back and resumed. It is idle
// while nothing of it is being generated. Close it when it is no longer needed.
type Sequence struct {
	engine *Engine
	id     SequenceID
	// owned until it is closed or released.
	owned *atomic.Bool
}

// Sequence takes over a sequence of a request with Keep, or one that was released. Take over each one only once.
func (e *Engine) Sequence(id SequenceID) *Sequence {
	s := &Sequence{e, id, new(atomic.Bool)}
	s.owned.Store(true)
	engine, owned := e.engine, s.owned // not s, for the net under it must not reach it
	whenForgotten(s, func() { freeSequence(engine, id, owned) })
	return s
}

// ID returns the sequence's id, also after Close.
func (s *Sequence) ID() SequenceID { return s.id }

// Close frees the sequence; one that runs ends with FinishAbort. It may be called at any time, from any goroutine, and again.
// Where the sequence has gone by itself, because it ended without being kept, Close is ErrNotFound; where the engine was closed,
// nil.
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

// Release has the sequence live on without s, for who knows its id. s is as if it had been closed.
func (s *Sequence) Release() SequenceID {
	s.owned.Store(false)
	return s.id
}

// use makes a call on the sequence's engine.
func (s *Sequence) use(call func(*C.pllm_engine) error) error {
	defer runtime.KeepAlive(s)
	if !s.owned.Load() {
		return &Error{ErrClosed, "the sequence has been closed"}
	}
	return s.engine.engine.use(call)
}

// useWith is use with a queue as well, or NULL for nil.
func (s *Sequence) useWith(queue *Queue, call func(*C.pllm_engine, *C.pllm_queue) error) error {
	defer runtime.KeepAlive(queue)
	return s.use(func(engine *C.pllm_engine) error {
		if queue == nil {
			return call(engine, nil)
		}
		return queue.mailbox.queue.use(func(c *C.pllm_queue) error { return call(engine, c) })
	})
}

// A Fork says how to fork. Every field's zero value is the library's default.
type Fork struct {
	// At is how many tokens the children share with their parent. 0: all that it has when the fork is made.
	At int
	// Seed has each child draw from a stream of its own of this seed. nil: all draw the same random numbers as their parent.
	Seed *uint64
	// UserData comes back in the children's outputs. nil: the parent's.
	UserData *uint64
	// Queue is where the children's outputs go. nil: where the parent's go.
	Queue *Queue
	// Idle has the children wait to be resumed, even where the parent runs.
	Idle bool
}

// Fork makes a sequence that begins with the tokens of s and shares what was computed for them. It runs where s does, and else
// waits to be resumed. Where the queue of s is gone, as that of a Stream or of Generate is when they end, name another one.
func (s *Sequence) Fork(how Fork) (*Sequence, error) {
	children, err := s.ForkMany(1, how)
	if err != nil {
		return nil, err
	}
	return children[0], nil
}

// ForkMany makes n of them at once.
func (s *Sequence) ForkMany(n int, how Fork) ([]*Sequence, error) {
	c := new(C.pllm_fork)
	C.pllm_fork_init(c, C.sizeof_pllm_fork)
	if err := how.toC(n, c); err != nil {
		return nil, err
	}
	var children []*Sequence
	err := s.useWith(how.Queue, func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		// Go would not survive it if there were no memory for the ids; C does.
		ids := C.room_for_ids(c.n)
		if ids == nil {
			return &Error{ErrOutOfMemory, fmt.Sprintf("no memory for the ids of %d children: ask for fewer", n)}
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

func (f *Fork) toC(n int, c *C.pllm_fork) error {
	var args arguments // pins nothing
	if args.inRange("n", int64(n), 0, math.MaxUint32) {
		c.n = C.uint32_t(n)
	}
	args.setUint64(&c.at, "At", int64(f.At))
	if f.Seed != nil {
		c.seed = C.uint64_t(*f.Seed)
		c.flags |= C.PLLM_FORK_SEED
	}
	if f.UserData != nil {
		c.user_data = C.uint64_t(*f.UserData)
		c.flags |= C.PLLM_FORK_USER_DATA
	}
	setFlag(&c.flags, f.Idle, C.PLLM_FORK_IDLE)
	return args.err
}

// Append adds tokens to the end. Where the sequence runs it goes on after them, from the next step on, and may become longer by
// as many; where it is idle they are computed when it is resumed.
func (s *Sequence) Append(tokens []uint32) error {
	var args arguments
	defer args.Unpin()
	data, len := args.tokens(tokens)
	return s.use(func(engine *C.pllm_engine) error {
		return check(C.pllm_sequence_append(engine, C.uint64_t(s.id), data, len))
	})
}

// Rewind cuts the sequence to its first tokens, at least one, also into the prompt. Everything is as it was then, the place in
// the random stream included; what has been polled stays polled. A sequence that runs goes on from there.
func (s *Sequence) Rewind(tokens int) error {
	if tokens < 0 {
		return &Error{ErrInvalidArgument, fmt.Sprintf("a sequence cannot be rewound to %d tokens: keep at least one", tokens)}
	}
	return s.use(func(engine *C.pllm_engine) error {
		return check(C.pllm_sequence_rewind(engine, C.uint64_t(s.id), C.uint64_t(tokens)))
	})
}

// A Resume says how an idle sequence goes on. Every field's zero value is the library's default.
type Resume struct {
	// Sampling says how tokens are chosen, and when it ends again. Counts (MaxTokens, MinTokens) and penalties begin anew.
	Sampling Sampling
	// UserData comes back in its outputs. nil: as before.
	UserData *uint64
	// LastTurn has the sequence go when it ends. By default it stays, and can be resumed again.
	LastTurn bool
	// ShowSpecial shows special tokens in the output's text.
	ShowSpecial bool
	// Continue has it go on as if it had never been idle, with its own parameters, counts, grammar and outputs. Of the other fields
	// only UserData, LastTurn and Deadline count then; and for Generate Sampling.OutputKind: it must be the sequence's own.
	Continue bool
	// Deadline is as in Request, for this turn.
	Deadline time.Duration
}

// Resume has an idle sequence go on; only tokens that were appended since are computed. Its outputs go where they went before:
// Queue.Resume names another queue, Stream and Generate make one. A sequence is idle from its last output on.
func (s *Sequence) Resume(how Resume) error { return s.resume(&how, nil) }

func (s *Sequence) resume(how *Resume, queue *Queue) error {
	var args arguments
	defer args.Unpin()
	c, err := how.toC(&args)
	if err != nil {
		return err
	}
	return s.useWith(queue, func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		return check(C.pllm_sequence_resume(engine, C.uint64_t(s.id), c))
	})
}

func (r *Resume) toC(args *arguments) (*C.pllm_resume, error) {
	c := new(C.pllm_resume)
	C.pllm_resume_init(c, C.sizeof_pllm_resume)
	c.sampling = r.Sampling.toC(args)
	if r.UserData != nil {
		c.user_data = C.uint64_t(*r.UserData)
		c.flags |= C.PLLM_RESUME_USER_DATA
	}
	if r.LastTurn {
		c.flags &^= C.PLLM_REQUEST_KEEP
	}
	setFlag(&c.flags, r.Continue, C.PLLM_RESUME_CONTINUE)
	if r.ShowSpecial {
		c.text_flags &^= C.PLLM_TEXT_SKIP_SPECIAL
	}
	c.deadline_ms = C.int64_t(wholeMilliseconds(r.Deadline))
	return c, args.err
}

// Stream resumes the sequence when the loop over it begins, and gives its outputs as Engine.Stream does. Leaving the loop early
// aborts what is being generated, and so does ctx: from the engine's next step on the sequence is idle again, unless this was
// its last turn.
func (s *Sequence) Stream(ctx context.Context, how Resume) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		queue, info, err := s.ask(ctx, &how)
		if err != nil {
			yield(Output{}, err)
			return
		}
		queue.stream(ctx, info.Request, 1)(yield)
		runtime.KeepAlive(s)
	}
}

// Generate resumes the sequence and waits until it ends. When ctx is done, and in all other respects, it does as Stream does.
func (s *Sequence) Generate(ctx context.Context, how Resume) (Completion, error) {
	defer runtime.KeepAlive(s)
	queue, info, err := s.ask(ctx, &how)
	if err != nil {
		return Completion{}, err
	}
	all, err := queue.collect(ctx, info.Request, info.Index, 1, how.Sampling.OutputKind)
	return all[0], err
}

// ask resumes with a queue of its own.
func (s *Sequence) ask(ctx context.Context, how *Resume) (*Queue, SequenceInfo, error) {
	info, err := s.Info()
	if err != nil {
		return nil, info, err
	}
	queue, err := s.engine.queueFor(ctx, func(queue *Queue) error { return s.resume(how, queue) })
	return queue, info, err
}

// Export writes the sequence down, as of the engine's next step, and waits for that: Engine.Import makes it anew, in this or
// another process. The sequence goes on undisturbed. The bytes hold the conversation in the clear.
func (s *Sequence) Export(ctx context.Context) ([]byte, error) {
	queue, err := s.engine.queueFor(ctx, s.exportTo)
	if err != nil {
		return nil, err
	}
	defer queue.Close()
	output, _, err := queue.next(ctx, nil) // the only one: the blob, or why there is none
	return output.blob, cmp.Or(err, output.Err)
}

// exportTo has the blob come as an output.
func (s *Sequence) exportTo(queue *Queue) error {
	return s.useWith(queue, func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		return check(C.pllm_sequence_export(engine, C.uint64_t(s.id), queue))
	})
}

// Import makes an idle sequence of what Export wrote, in this or another process, for an engine of the same model, BlockSize and
// KVType. Resume.Continue has it go on with the same bits, unless SequenceInfo.Inexact. Its outputs go to the engine's own queue;
// Queue.Import names another one.
func (e *Engine) Import(blob []byte) (*Sequence, error) { return e.Queue().Import(blob) }

// SequenceInfo is a sequence as of the last step, and of the calls since.
type SequenceInfo struct {
	// Request is the one it came from, Index which of the request's sequences it is, from 0.
	Request RequestID
	Index   int
	// Len is its number of tokens.
	Len int
	// Idle: it waits to be resumed or closed. Otherwise it runs, or waits to.
	Idle bool
	// Inexact: it was imported from a machine or an instruction path that cannot give the same bits.
	Inexact bool
}

// Info says what is known of the sequence.
func (s *Sequence) Info() (info SequenceInfo, err error) {
	err = s.use(func(engine *C.pllm_engine) error {
		c := C.pllm_sequence_info{struct_size: C.sizeof_pllm_sequence_info}
		if err := check(C.pllm_sequence_get_info(engine, C.uint64_t(s.id), &c)); err != nil {
			return err
		}
		info = SequenceInfo{
			Request: RequestID(c.request), Index: int(c.index), Len: int(c.len), Idle: c.idle != 0, Inexact: c.inexact != 0,
		}
		return nil
	})
	return info, err
}
