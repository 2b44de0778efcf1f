package pagedllm

// #include "glue.h"
import "C"

import (
	"context"
	"fmt"
	"runtime"
	"time"
)

// Timing has the times of a sequence from the call that added, resumed or forked it. 0 if the event
// did not occur.
type Timing struct {
	// Queued is the time to its first step, FirstToken to its first token, and LastToken to its
	// last token.
	Queued, FirstToken, LastToken time.Duration
}

// A LogProb is a token and its log probability in the model's own distribution.
type LogProb struct {
	Token   uint32
	LogProb float32
}

// A Queue is a queue of outputs. Use it to serve many requests from one goroutine; for one request
// at a time, Engine.Stream is simpler. Any number of goroutines may use it. Each output goes to one
// of them.
type Queue struct {
	engine  *Engine
	mailbox *mailbox
}

// Queue returns the engine's own queue. Closing the engine closes it.
func (e *Engine) Queue() *Queue { return &Queue{e, e.own} }

// NewQueue creates a queue for some of the engine's requests. While the queue holds at least
// capacity outputs, the requests that write to it pause. Other requests continue, and no output is
// dropped. Close the queue when it is no longer needed.
func (e *Engine) NewQueue(capacity int) (*Queue, error) {
	if capacity < 0 {
		return nil, &Error{Code: ErrInvalidArgument, Message: fmt.Sprintf("capacity is %d; it must be positive", capacity)}
	}
	var c *C.pllm_queue
	err := e.engine.use(func(engine *C.pllm_engine) error {
		return check(C.pllm_queue_create(engine, C.uint64_t(capacity), &c))
	})
	if err != nil {
		return nil, err
	}
	queue := &shared[*C.pllm_queue]{name: "queue", object: c, free: func(c *C.pllm_queue) { C.pllm_queue_free(c) }}
	mailbox, err := newMailbox(queue)
	if err != nil {
		return nil, err
	}
	q := &Queue{e, mailbox}
	whenUnreachable(q, mailbox.close)
	return q, nil
}

// Close aborts the requests that write to the queue and frees the queue and its outputs. Polls in
// progress and later calls return ErrClosed. Close may be called at any time, from any goroutine,
// more than once. For the engine's own queue it returns ErrInvalidArgument.
func (q *Queue) Close() error {
	if q.mailbox == q.engine.own {
		return &Error{Code: ErrInvalidArgument, Message: "the engine's own queue closes with the engine; close the engine"}
	}
	q.mailbox.close()
	return nil
}

// Add adds a request with outputs to this queue. It takes part from the next step on. If the
// request can never fit, Add returns ErrCapacity with the numbers.
func (q *Queue) Add(request Request) (RequestID, error) {
	var args arguments
	defer args.Unpin()
	c := request.toC(&args)
	if args.err != nil {
		return 0, args.err
	}
	var id C.uint64_t
	err := q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		return check(C.pllm_engine_add_request(engine, c, &id))
	})
	return RequestID(id), err
}

// use makes a call on the engine and the queue.
func (q *Queue) use(call func(*C.pllm_engine, *C.pllm_queue) error) error {
	defer runtime.KeepAlive(q)
	return q.engine.engine.use(func(engine *C.pllm_engine) error {
		return q.mailbox.queue.use(func(queue *C.pllm_queue) error { return call(engine, queue) })
	})
}

// Resume continues an idle sequence with outputs to this queue. See Sequence.Resume.
func (q *Queue) Resume(sequence *Sequence, how Resume) error { return sequence.resume(&how, q) }

// Import creates an idle sequence from an exported state, with outputs to this queue. See
// Engine.Import.
func (q *Queue) Import(state []byte) (*Sequence, error) {
	var args arguments
	defer args.Unpin()
	data, len := args.bytes(state)
	var id C.uint64_t
	err := q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		return check(C.pllm_sequence_import(engine, data, len, queue, &id))
	})
	if err != nil {
		return nil, err
	}
	return q.engine.Sequence(SequenceID(id)), nil
}

// Poll takes all outputs from the queue, in the order in which they were made. If the queue is
// empty, Poll waits for the first output and blocks no thread. If the context is done, Poll returns
// its error, and no output is lost. Once the engine has failed or is closed, and all outputs have
// been taken, Poll returns that error.
func (q *Queue) Poll(ctx context.Context) ([]Output, error) {
	// The cleanup of an unreachable queue must not close it during the poll.
	defer runtime.KeepAlive(q)
	return q.mailbox.wait(ctx)
}

// TryPoll is Poll without waiting. If the queue is empty, it returns no outputs.
func (q *Queue) TryPoll() ([]Output, error) {
	defer runtime.KeepAlive(q)
	return q.mailbox.take()
}
