package pagedllm

import (
	"context"
	"fmt"
	"iter"
	"strings"
)

// Stream adds a request when the loop over it begins, and gives its outputs as they come; looping again asks again. Each
// sequence of the request ends with an output whose FinishReason is set, and the loop with the last of them, or with an error.
// Leaving the loop early aborts the request, and so does ctx: once it is done, its error is the next element and the last one.
// When the engine is closed the last element's error is ErrClosed. Where a sequence's computation failed, its last output comes
// together with its error.
//
// A reader may fall behind by Options.QueueCapacity outputs before its request pauses. Waiting occupies no thread.
func (e *Engine) Stream(ctx context.Context, request Request) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		queue, id, err := e.ask(ctx, request)
		if err != nil {
			yield(Output{}, err)
			return
		}
		queue.stream(ctx, id, request.results())(yield)
	}
}

// ask adds a request with a queue of its own.
func (e *Engine) ask(ctx context.Context, request Request) (queue *Queue, id RequestID, err error) {
	queue, err = e.queueFor(ctx, func(queue *Queue) error {
		id, err = queue.Add(request)
		return err
	})
	return queue, id, err
}

// queueFor makes a queue for what begin begins.
func (e *Engine) queueFor(ctx context.Context, begin func(*Queue) error) (*Queue, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	queue, err := e.NewQueue(e.queueCapacity)
	if err != nil {
		return nil, err
	}
	if err := begin(queue); err != nil {
		queue.Close()
		return nil, err
	}
	return queue, nil
}

// stream gives what comes of so many sequences of a request, and closes the queue. What is forked from them, and writes to the
// same queue, is among it as long as they last.
func (q *Queue) stream(ctx context.Context, request RequestID, sequences int) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		defer q.Close()
		var pending []Output
		for sequences > 0 {
			var output Output
			var err error
			if output, pending, err = q.next(ctx, pending); err != nil {
				q.Close()
				yield(output, err)
				return
			}
			if output.Request == request && output.FinishReason != FinishNone {
				sequences--
			}
			if sequences == 0 {
				q.Close()
			}
			if !yield(output, output.Err) {
				return
			}
		}
	}
}

// next is the first of the pending outputs, and those after it; where none are pending, it waits for more.
func (q *Queue) next(ctx context.Context, pending []Output) (Output, []Output, error) {
	err := ctx.Err()
	if err == nil && len(pending) == 0 {
		pending, err = q.Poll(ctx)
	}
	if err != nil {
		return Output{}, nil, err
	}
	return pending[0], pending[1:], nil
}

// A Completion is all that came of one sequence.
type Completion struct {
	Text   string
	Tokens []uint32
	// LogProbs, TopLogProbs, PromptLogProbs, PromptTopLogProbs, Score, Timing, Preemptions and CachedTokens are as in Output.
	LogProbs          []float32
	TopLogProbs       [][]LogProb
	PromptLogProbs    []float32
	PromptTopLogProbs [][]LogProb
	Score             float64
	// FinishReason is FinishNone where an error came before the end.
	FinishReason FinishReason
	// Err is an *Error where FinishReason is FinishError, and where it is FinishAbort because the engine was closed; else nil.
	Err          error
	PromptTokens int
	// Sequence is what Engine.Sequence takes, where the request is kept.
	Sequence                  SequenceID
	Timing                    Timing
	Preemptions, CachedTokens int
}

// Generate runs one request to its end. When ctx is done, and in all other respects, it does as Stream does. An error comes
// with what was generated before it. It is for one result: with a larger Request.N, use GenerateAll.
func (e *Engine) Generate(ctx context.Context, request Request) (Completion, error) {
	if request.N > 1 { // nothing is thrown away in silence
		return Completion{}, &Error{ErrInvalidArgument, fmt.Sprintf("N is %d: GenerateAll gives them all", request.N)}
	}
	all, err := e.GenerateAll(ctx, request)
	if all == nil {
		return Completion{}, err
	}
	return all[0], err
}

// GenerateAll is Generate for any Request.N: it gives the results in the order of their indices. Where some failed, the error is
// the first one's.
func (e *Engine) GenerateAll(ctx context.Context, request Request) ([]Completion, error) {
	queue, id, err := e.ask(ctx, request)
	if err != nil {
		return nil, err
	}
	return queue.collect(ctx, id, 0, request.results(), request.Sampling.OutputKind)
}

// collect reads to the end what comes of n sequences of a request, whose indices begin with first.
func (q *Queue) collect(ctx context.Context, request RequestID, first, n int, kind OutputKind) ([]Completion, error) {
	all, texts := make([]Completion, n), make([]strings.Builder, n)
	var failure error
	for output, err := range q.stream(ctx, request, n) {
		ours := output.Request == request && output.Index >= first && output.Index < first+n
		if ours {
			i := output.Index - first
			if kind != OutputDelta { // this one has it all
				all[i] = Completion{}
				texts[i].Reset()
			}
			texts[i].WriteString(output.Text)
			all[i].add(&output)
		}
		if theStreams := output.Request == 0; failure == nil && (ours || theStreams) {
			failure = err
		}
	}
	for i := range all {
		all[i].Text = texts[i].String()
	}
	return all, failure
}

// add takes the next output in, but for its text.
func (c *Completion) add(output *Output) {
	c.Tokens = append(c.Tokens, output.Tokens...)
	c.LogProbs = append(c.LogProbs, output.LogProbs...)
	c.TopLogProbs = append(c.TopLogProbs, output.TopLogProbs...)
	c.PromptLogProbs = append(c.PromptLogProbs, output.PromptLogProbs...)
	c.PromptTopLogProbs = append(c.PromptTopLogProbs, output.PromptTopLogProbs...)
	c.Score = output.Score
	c.FinishReason = output.FinishReason
	c.Err = output.Err
	c.PromptTokens = max(c.PromptTokens, output.PromptTokens)
	c.Sequence = output.Sequence
	c.Timing = output.Timing
	c.Preemptions, c.CachedTokens = output.Preemptions, output.CachedTokens
}
