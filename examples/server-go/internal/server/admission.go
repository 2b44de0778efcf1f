package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// An apiRequest is the body of a request for a model.
type apiRequest interface{ modelName() string }

// read decodes the body of a request and returns its model.
func (s *Server) read(w http.ResponseWriter, r *http.Request, body apiRequest) (*Model, error) {
	if err := s.decode(w, r, body); err != nil {
		return nil, err
	}
	return s.model(r.Context(), body.modelName())
}

// model returns the model of a request. A client may leave the name out if there is only one.
func (s *Server) model(ctx context.Context, name string) (*Model, error) {
	for _, model := range s.models {
		if model.Name == name || name == "" && len(s.models) == 1 {
			recordOf(ctx).model = model.Name
			return model, nil
		}
	}
	e := refusal(http.StatusNotFound, fmt.Sprintf("there is no model %q; /v1/models lists the "+
		"models", name))
	e.code, e.param = "model_not_found", "model"
	return nil, e
}

// limit applies the limits of the server to a request for a number of prompts. It returns the
// number of results of each prompt.
func (s *Server) limit(request *pagedllm.Request, prompts int) (results int, err error) {
	results = max(request.N, 1)
	sequences := sequencesOf(request)
	if sequences > s.options.MaxResults/prompts {
		return 0, badRequest("n", fmt.Sprintf("%d prompts have %d sequences each (limit %d in "+
			"all); ask for fewer", prompts, sequences, s.options.MaxResults))
	}
	top := max(request.Sampling.TopLogProbs, request.Sampling.PromptTopLogProbs)
	if top > s.options.MaxLogprobs {
		return 0, badRequest("logprobs", fmt.Sprintf("the request asks for %d log probabilities "+
			"of each token (limit %d); ask for fewer", top, s.options.MaxLogprobs))
	}
	if limit := s.options.MaxTime; limit > 0 &&
		(request.Deadline == 0 || request.Deadline > limit) {
		request.Deadline = limit
	}
	return results, nil
}

// sequencesOf returns the number of sequences of a request.
func sequencesOf(request *pagedllm.Request) int {
	sequences := max(request.N, request.BestOf, 1)
	if request.Beam != nil {
		sequences = max(sequences, cmp.Or(request.Beam.Width, 4)) // the library's default
	}
	return sequences
}

// A generation is the work of the engine for one client: a queue, and one request for each prompt.
// A queue of its own keeps a slow client from delaying the others.
type generation struct {
	model   *Model
	queue   outputQueue
	record  *record
	results int // of each prompt
	// release ends the reservation of log probabilities.
	release func()
	// promptTokens is the number of tokens of all prompts.
	promptTokens int
	open         int // sequences that have not ended
}

// An outputQueue is a *pagedllm.Queue.
type outputQueue interface {
	Poll(ctx context.Context) ([]pagedllm.Output, error)
	Close() error
}

// start adds one request for each prompt. If one is refused, none runs. Close the generation; this
// aborts the requests that have not ended.
func (s *Server) start(ctx context.Context, model *Model, request pagedllm.Request,
	prompts []prompt, stream bool) (_ *generation, err error) {
	g := &generation{model: model, record: recordOf(ctx)}
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	if g.results, err = s.limit(&request, len(prompts)); err != nil {
		return nil, err
	}
	if !stream {
		request.Sampling.OutputKind = pagedllm.OutputFinal
	}
	err = s.compute(ctx, func() error { return model.tokenize(ctx, prompts, !request.RawPrompt) })
	if err != nil {
		return nil, err
	}
	if g.release, err = s.reserveLogprobs(model, &request, prompts, stream); err != nil {
		return nil, err
	}
	g.open = len(prompts) * g.results
	queue, err := model.Engine.NewQueue(64 + g.open)
	if err != nil {
		return nil, noQueue(err)
	}
	g.queue = queue
	for i, prompt := range prompts {
		request.UserData, request.PromptTokenIDs = uint64(i), prompt.tokens
		g.promptTokens += len(prompt.tokens)
		// The engine tokenizes stop strings and bad words.
		if err := s.compute(ctx, func() error { return s.add(queue, request) }); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// tokenize replaces the texts of prompts by their tokens.
func (m *Model) tokenize(ctx context.Context, prompts []prompt, addSpecial bool) (err error) {
	for i := range prompts {
		if prompts[i].text == "" {
			continue
		}
		if prompts[i].tokens, err = m.Engine.Tokenize(prompts[i].text, addSpecial); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil { // the client has gone
			return err
		}
	}
	return nil
}

func (g *generation) close() {
	if g.queue != nil {
		g.queue.Close()
	}
	if g.release != nil {
		g.release()
	}
}

// noQueue converts an error of NewQueue. The process has a descriptor again when a request has
// ended.
func noQueue(err error) error {
	if errors.Is(err, pagedllm.ErrCapacity) {
		return tryLater(http.StatusServiceUnavailable, toAPIError(err).message)
	}
	return err
}

// add adds a request, unless its first token would come too late.
func (s *Server) add(queue *pagedllm.Queue, request pagedllm.Request) error {
	if s.options.MaxWait > 0 {
		forecast, err := queue.PredictAdmission(request)
		if err != nil {
			return err
		}
		if !forecast.Admits ||
			forecast.FirstToken != nil && *forecast.FirstToken > s.options.MaxWait {
			return tooBusy(&forecast)
		}
	}
	_, err := queue.Add(request)
	if !isFull(err) {
		return err
	}
	forecast, err := queue.PredictAdmission(request)
	if err != nil {
		return err
	}
	return tooBusy(&forecast)
}

// isFull reports whether the engine has no place for a request at present.
func isFull(err error) bool {
	var e *pagedllm.Error
	return errors.As(err, &e) && e.Code == pagedllm.ErrCapacity && e.IsTemporary
}

func tooBusy(forecast *pagedllm.Admission) error {
	e := tryLater(http.StatusTooManyRequests,
		fmt.Sprintf("%d requests with %d tokens are waiting; try again later",
			forecast.WaitingRequests, forecast.WaitingTokens))
	if forecast.FirstToken != nil {
		e.retryAfter = max(e.retryAfter, *forecast.FirstToken)
	}
	return e
}

// next waits for outputs. An output with an error is the end of the generation: next returns the
// outputs before it, and the error.
func (g *generation) next(ctx context.Context) ([]pagedllm.Output, error) {
	outputs, err := g.queue.Poll(ctx)
	for i := range outputs {
		g.count(&outputs[i])
		if outputs[i].Err != nil {
			return outputs[:i], outputs[i].Err
		}
	}
	return outputs, err
}

// count adds an output to the usage.
func (g *generation) count(output *pagedllm.Output) {
	if output.FinishReason == pagedllm.FinishNone {
		return
	}
	g.open--
	usage := &g.record.usage
	usage.CompletionTokens += output.GeneratedTokens
	if output.Index == 0 { // samples share their prompt
		usage.PromptTokens += output.PromptTokens
		usage.addCached(min(output.CachedTokens, output.PromptTokens))
	}
	usage.TotalTokens = usage.PromptTokens + usage.CompletionTokens
	if first := output.Timing.FirstToken; first > 0 &&
		(g.record.firstToken == 0 || first < g.record.firstToken) {
		g.record.firstToken = first
	}
}

// choice returns the index of the result of an output: results of the first prompt come first.
func (g *generation) choice(output *pagedllm.Output) int {
	return int(output.UserData)*g.results + output.Index
}

// all waits for the end of all sequences and returns their outputs in the order of the choices. It
// is for generations without streams, which have one output for each sequence.
func (g *generation) all(ctx context.Context) ([]pagedllm.Output, error) {
	all := make([]pagedllm.Output, g.open)
	for g.open > 0 {
		outputs, err := g.next(ctx)
		if err != nil {
			return nil, err
		}
		for _, output := range outputs {
			choice := g.choice(&output)
			if output.FinishReason != pagedllm.FinishNone && choice < len(all) {
				all[choice] = output
			}
		}
	}
	// If at least one sequence has a token or has ended, the answer has what there is.
	late := func(output pagedllm.Output) bool {
		return output.FinishReason == pagedllm.FinishDeadline && output.GeneratedTokens == 0
	}
	if !slices.ContainsFunc(all, func(output pagedllm.Output) bool { return !late(output) }) {
		return nil, refusal(http.StatusGatewayTimeout,
			"no token was generated before the deadline; try again later")
	}
	return all, nil
}

// each passes every output to send and flushes the stream after each batch.
func (g *generation) each(ctx context.Context, s *Server, stream *eventStream,
	send func(*pagedllm.Output) error) error {
	idle := newIdleContext(ctx, s.options.KeepAlive)
	defer func() { idle.stop() }()
	for g.open > 0 {
		outputs, err := g.next(idle)
		if errors.Is(err, context.Canceled) && ctx.Err() == nil { // the timer, not the client
			err = stream.keepAlive()
			idle.stop()
			idle = newIdleContext(ctx, s.options.KeepAlive)
		}
		idle.timer.Reset(s.options.KeepAlive)
		for i := range outputs { // also those before an error
			if failed := send(&outputs[i]); failed != nil {
				return failed
			}
		}
		if err != nil {
			return err
		}
		if err := stream.flush(); err != nil {
			return err
		}
	}
	return nil
}

// An idleContext is done when its parent is done, or when its timer was not reset for a while. It
// costs less for each token than a context with a deadline for each wait.
type idleContext struct {
	context.Context
	cancel context.CancelFunc
	timer  *time.Timer
}

func newIdleContext(parent context.Context, wait time.Duration) *idleContext {
	ctx, cancel := context.WithCancel(parent)
	return &idleContext{ctx, cancel, time.AfterFunc(wait, cancel)}
}

func (c *idleContext) stop() {
	c.timer.Stop()
	c.cancel()
}

// usage counts tokens in the form of OpenAI.
type usage struct {
	PromptTokens     int           `json:"prompt_tokens"`
	CompletionTokens int           `json:"completion_tokens"`
	TotalTokens      int           `json:"total_tokens"`
	PromptDetails    promptDetails `json:"prompt_tokens_details"`
}

type promptDetails struct {
	CachedTokens int `json:"cached_tokens"`
	// CacheWriteTokens is always 0: writing to the prefix cache costs nothing.
	CacheWriteTokens int `json:"cache_write_tokens"`
}

func (u *usage) addCached(tokens int) { u.PromptDetails.CachedTokens += tokens }

// finishReason returns OpenAI's name for the end of a sequence, and the extension stop_reason: the
// stop string or the id of the stop token, or "deadline". A sequence that a deadline has ended is
// incomplete, as one that max_tokens has ended.
func finishReason(output *pagedllm.Output) (reason string, stop any) {
	switch output.FinishReason {
	case pagedllm.FinishNone:
		return "", nil
	case pagedllm.FinishDeadline:
		return "length", "deadline"
	case pagedllm.FinishLength:
		return "length", nil
	}
	switch output.StopReason {
	case pagedllm.StopString:
		return "stop", output.StopString
	case pagedllm.StopToken:
		return "stop", output.StopToken
	}
	return "stop", nil
}
