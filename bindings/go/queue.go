package pagedllm

// #include "glue.h"
import "C"

import (
	"context"
	"fmt"
	"runtime"
)

// An Output is news of one sequence: new tokens, new text, or its end.
type Output struct {
	Request RequestID
	// Sequence is what Engine.Sequence takes, where the request is kept.
	Sequence SequenceID
	// Index is which of the request's sequences it is, from 0.
	Index int
	// UserData is the request's own.
	UserData uint64
	// Tokens are the new ones.
	Tokens []uint32
	// LogProbs holds one per token; nil where the request did not ask for them.
	LogProbs []float32
	// TopLogProbs holds, for each token, the most probable ones in its place, most probable first; nil where the request did
	// not ask for them.
	TopLogProbs [][]LogProb
	// PromptLogProbs are of the prompt's tokens but the first, where the request asked for them. They come in order, before the
	// first token, and may come in several outputs. PromptTopLogProbs holds the most probable ones for each.
	PromptLogProbs    []float32
	PromptTopLogProbs [][]LogProb
	// Text is the new text, never half a character. It may lag behind the tokens.
	Text string
	// FinishReason, if not FinishNone, makes this the sequence's last output.
	FinishReason FinishReason
	// Err is an *Error where FinishReason is FinishError, and where it is FinishAbort because the engine was closed; else nil.
	Err error
	// PromptTokens of the request, and its GeneratedTokens so far.
	PromptTokens, GeneratedTokens int
	// Score is the sum of the log probabilities of all generated tokens, where the request asked for them or for the best of
	// several samples; of a beam, its score after the length penalty. Else 0.
	Score float64
	// blob is what Sequence.Export waits for, in a queue of its own.
	blob []byte
}

// A LogProb is a token and its log probability under the model's own distribution.
type LogProb struct {
	Token   uint32
	LogProb float32
}

// A FinishReason is why a sequence ended.
type FinishReason uint32

const (
	// FinishNone: more will come.
	FinishNone FinishReason = C.PLLM_FINISH_NONE
	// FinishStop: an end-of-sequence token, a stop token or a stop string.
	FinishStop FinishReason = C.PLLM_FINISH_STOP
	// FinishLength: MaxTokens, or the longest sequence that the engine allows.
	FinishLength FinishReason = C.PLLM_FINISH_LENGTH
	// FinishAbort: the host asked for it.
	FinishAbort FinishReason = C.PLLM_FINISH_ABORT
	// FinishError: its computation failed; Output.Err says why.
	FinishError FinishReason = C.PLLM_FINISH_ERROR
)

// String names the reason, such as "length".
func (r FinishReason) String() string { return nameOf(r, "none", "stop", "length", "abort", "error") }

// A Queue is where outputs wait for their reader. Use one where a single goroutine serves many requests; for one request
// at a time, Engine.Stream is simpler. Any number of goroutines may use it, and each output goes to one of them.
type Queue struct {
	engine  *Engine
	mailbox *mailbox
}

// Queue returns the engine's own queue. It closes with the engine.
func (e *Engine) Queue() *Queue { return &Queue{e, e.own} }

// NewQueue makes a queue. While capacity outputs or more wait in it, the requests that write to it pause; no others wait for
// them and nothing is dropped. Close it when it is no longer needed.
func (e *Engine) NewQueue(capacity int) (*Queue, error) {
	if capacity < 0 {
		return nil, &Error{ErrInvalidArgument, fmt.Sprintf("the queue's capacity is %d: it must be positive", capacity)}
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
	whenForgotten(q, mailbox.close)
	return q, nil
}

// Close aborts the requests that still write to the queue and frees it, with the outputs that nobody took. Polls in progress
// end with ErrClosed, and so does every later call. It may be called at any time, from any goroutine, and again. The
// engine's own queue refuses it: it closes with the engine.
func (q *Queue) Close() error {
	if q.mailbox == q.engine.own {
		return &Error{ErrInvalidArgument, "this is the engine's own queue: it closes with the engine"}
	}
	q.mailbox.close()
	return nil
}

// Add adds a request whose outputs go to this queue. It takes part from the next step on. What could never run is refused
// here, with the numbers.
func (q *Queue) Add(request Request) (RequestID, error) {
	var args arguments
	defer args.Unpin()
	c, err := request.toC(&args)
	if err != nil {
		return 0, err
	}
	var id C.uint64_t
	err = q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		return check(C.pllm_engine_add_request(engine, c, &id))
	})
	return RequestID(id), err
}

// use makes a call on the engine, with the queue.
func (q *Queue) use(call func(*C.pllm_engine, *C.pllm_queue) error) error {
	defer runtime.KeepAlive(q)
	return q.engine.engine.use(func(engine *C.pllm_engine) error {
		return q.mailbox.queue.use(func(queue *C.pllm_queue) error { return call(engine, queue) })
	})
}

// Resume has an idle sequence go on, with its outputs in this queue: see Sequence.Resume.
func (q *Queue) Resume(sequence *Sequence, how Resume) error { return sequence.resume(&how, q) }

// Import makes an idle sequence of an exported one, with its outputs in this queue: see Engine.Import.
func (q *Queue) Import(blob []byte) (*Sequence, error) {
	var args arguments
	defer args.Unpin()
	data, len := args.bytes(blob)
	var id C.uint64_t
	err := q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		return check(C.pllm_sequence_import(engine, data, len, queue, &id))
	})
	if err != nil {
		return nil, err
	}
	return q.engine.Sequence(SequenceID(id)), nil
}

// Poll takes everything that is in the queue, in the order it was made, and waits for the first; while it waits it occupies no
// thread. A context that is done ends it with the context's error, and nothing is lost. Once the engine has failed or is
// closed, and the last outputs are taken, it answers with that error.
func (q *Queue) Poll(ctx context.Context) ([]Output, error) {
	// The net under forgotten queues must not close one that is being polled.
	defer runtime.KeepAlive(q)
	return q.mailbox.wait(ctx)
}

// TryPoll is Poll without the waiting: where there is nothing, it returns nothing.
func (q *Queue) TryPoll() ([]Output, error) {
	defer runtime.KeepAlive(q)
	return q.mailbox.take()
}
