package pagedllm

import (
	"context"
	"iter"
	"strings"
)

// Stream adds a request when the loop over it begins, and gives its outputs as they come; looping again asks again. The last
// element is the output whose FinishReason is set, or an error. Leaving the loop early aborts the request, and so does ctx:
// once it is done, its error is the next element and the last one. When the engine is closed the last element's error is
// ErrClosed. Where the request's computation failed, the last output comes together with its error.
//
// A reader may fall behind by Options.QueueCapacity outputs before its request pauses. Waiting occupies no thread.
func (e *Engine) Stream(ctx context.Context, request Request) iter.Seq2[Output, error] {
	return func(yield func(Output, error) bool) {
		queue, err := e.ask(ctx, request)
		if err != nil {
			yield(Output{}, err)
			return
		}
		defer queue.Close()
		var pending []Output
		for {
			var output Output
			output, pending, err = queue.next(ctx, pending)
			last := err != nil || output.FinishReason != FinishNone
			if last {
				queue.Close()
			}
			if !yield(output, err) || last {
				return
			}
		}
	}
}

// ask adds a request with a queue of its own.
func (e *Engine) ask(ctx context.Context, request Request) (*Queue, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	queue, err := e.NewQueue(e.queueCapacity)
	if err != nil {
		return nil, err
	}
	if _, err := queue.Add(request); err != nil {
		queue.Close()
		return nil, err
	}
	return queue, nil
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
	return pending[0], pending[1:], pending[0].Err
}

// A Completion is all that came of one request.
type Completion struct {
	Text   string
	Tokens []uint32
	// LogProbs holds one per token; nil where the request did not ask for them.
	LogProbs []float32
	// FinishReason is FinishNone where an error came before the end.
	FinishReason FinishReason
	PromptTokens int
}

// Generate runs one request to its end. When ctx is done, and in all other respects, it does as Stream does. An error comes
// with what was generated before it.
func (e *Engine) Generate(ctx context.Context, request Request) (Completion, error) {
	var whole Completion
	var text strings.Builder
	var failure error
	for output, err := range e.Stream(ctx, request) {
		text.WriteString(output.Text)
		whole.Tokens = append(whole.Tokens, output.Tokens...)
		whole.LogProbs = append(whole.LogProbs, output.LogProbs...)
		whole.FinishReason = output.FinishReason
		whole.PromptTokens = max(whole.PromptTokens, output.PromptTokens)
		failure = err
	}
	whole.Text = text.String()
	return whole, failure
}
