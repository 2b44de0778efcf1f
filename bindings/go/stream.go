package pagedllm

import (
	"context"
	"fmt"
	"iter"
	"strings"
)

// Stream adds a request when the loop over it begins, and returns its outputs as they are
// generated. A second loop adds a second request. The last output of each sequence has a
// FinishReason. The loop ends after the last output of all sequences, or with an error.
//
// Leaving the loop early aborts the request. If the context is done, the request is aborted, and
// the last element has the error of the context. If the engine is closed, the error of the last
// element is ErrClosed. If the computation of a sequence failed, its last output comes with its
// error.
//
// While Options.QueueCapacity outputs are unread, the request pauses. Waiting blocks no thread.
func (e *Engine) Stream(ctx context.Context, request Request) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		queue, id, err := e.addToNewQueue(ctx, request)
		if err != nil {
			yield(Output{}, err)
			return
		}
		queue.stream(ctx, id, request.results())(yield)
	}
}

// addToNewQueue adds a request with a new queue.
func (e *Engine) addToNewQueue(ctx context.Context, request Request) (queue *Queue, id RequestID, err error) {
	queue, err = e.queueFor(ctx, func(queue *Queue) error {
		id, err = queue.Add(request)
		return err
	})
	return queue, id, err
}

// queueFor creates a queue and passes it to begin. If begin fails, the queue is closed.
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

// stream returns the outputs in the queue until the given number of sequences of the request have
// ended, and closes the queue. These include the outputs of forks that write to the same queue.
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

// next returns the first pending output and the rest. If none are pending, it waits for more.
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

// Generate runs a request for one result and waits for its end. Contexts and errors are as in
// Stream. With an error it also returns the tokens and the text generated before. If Request.N is
// larger than 1, use GenerateAll.
func (e *Engine) Generate(ctx context.Context, request Request) (Completion, error) {
	if request.N > 1 { // do not drop results silently
		return Completion{}, &Error{Code: ErrInvalidArgument, Message: fmt.Sprintf("N is %d; use GenerateAll for several results", request.N)}
	}
	all, err := e.GenerateAll(ctx, request)
	if all == nil {
		return Completion{}, err
	}
	return all[0], err
}

// GenerateAll is Generate for any Request.N. It returns the results in the order of their indices.
// If several fail, the error is the one that occurred first.
func (e *Engine) GenerateAll(ctx context.Context, request Request) ([]Completion, error) {
	queue, id, err := e.addToNewQueue(ctx, request)
	if err != nil {
		return nil, err
	}
	return queue.collect(ctx, id, 0, request.results(), request.Sampling.OutputKind)
}

// collect reads all outputs of n sequences of a request, from index first on.
func (q *Queue) collect(ctx context.Context, request RequestID, first, n int, kind OutputKind) ([]Completion, error) {
	all, texts := make([]Completion, n), make([]strings.Builder, n)
	var failure error
	for output, err := range q.stream(ctx, request, n) {
		ours := output.Request == request && output.Index >= first && output.Index < first+n
		if ours {
			i := output.Index - first
			if kind != OutputDelta && output.ComputedTokens == 0 { // this output has everything so far
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
