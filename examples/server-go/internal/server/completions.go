package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// defaultMaxTokens is OpenAI's default for completions.
const defaultMaxTokens = 16

type completionRequest struct {
	samplingParams
	Prompt   prompts `json:"prompt"`
	Logprobs *int    `json:"logprobs"`
	Echo     bool    `json:"echo"`
	Suffix   string  `json:"suffix"`
}

// A prompt is text or tokens.
type prompt struct {
	text   string
	tokens []uint32
}

// prompts is a string, an array of strings, an array of tokens or an array of arrays of tokens.
type prompts []prompt

func (p *prompts) UnmarshalJSON(data []byte) error {
	wrong := badRequest("prompt", "prompt is neither a string nor token ids; send one of them, "+
		"or an array of one kind")
	// The beginning shows the kind. Trying each would parse a long prompt several times.
	var err error
	switch first, second := beginning(data); {
	case first == 'n': // null
		return nil
	case first == '"':
		var text string
		err = json.Unmarshal(data, &text)
		*p = prompts{{text: text}}
	case first == '[' && second == '"':
		var texts []string
		err = json.Unmarshal(data, &texts)
		for _, text := range texts {
			*p = append(*p, prompt{text: text})
		}
	case first == '[' && second == '[':
		var lists [][]uint32
		err = json.Unmarshal(data, &lists)
		for _, tokens := range lists {
			*p = append(*p, prompt{tokens: tokens})
		}
	case first == '[' && second != ']' && second != 'n':
		var tokens []uint32
		err = json.Unmarshal(data, &tokens)
		*p = prompts{{tokens: tokens}}
	case first != '[':
		return wrong
	}
	if err != nil {
		return wrong
	}
	return nil
}

// beginning returns the first two bytes of a JSON value that are no spaces.
func beginning(data []byte) (first, second byte) {
	for _, b := range data {
		switch {
		case b == ' ' || b == '\t' || b == '\r' || b == '\n':
		case first == 0:
			first = b
		default:
			return first, b
		}
	}
	return first, 0
}

// A completion is an answer, or one event of a stream.
type completion struct {
	ID      string             `json:"id"`
	Object  string             `json:"object"`
	Created int64              `json:"created"`
	Model   string             `json:"model"`
	Choices []completionChoice `json:"choices"`
	Usage   *usage             `json:"usage,omitempty"`
}

type completionChoice struct {
	Index        int                 `json:"index"`
	Text         string              `json:"text"`
	Logprobs     *completionLogprobs `json:"logprobs"`
	FinishReason *string             `json:"finish_reason"`
	StopReason   any                 `json:"stop_reason,omitempty"`
	choiceExtensions
}

// choiceExtensions are what the library reports and OpenAI lacks.
type choiceExtensions struct {
	// Score is that of a beam, or of the best of several samples.
	Score          *float64         `json:"score,omitempty"`
	TokenIDs       []uint32         `json:"token_ids,omitempty"`
	PromptLogprobs []*promptLogprob `json:"prompt_logprobs,omitempty"`
}

func (s *Server) completions(w http.ResponseWriter, r *http.Request) error {
	var body completionRequest
	model, err := s.read(w, r, &body)
	if err != nil {
		return err
	}
	request, err := body.request()
	if err != nil {
		return err
	}
	g, err := s.start(r.Context(), model, request, body.Prompt, body.Stream)
	if err != nil {
		return err
	}
	defer g.close()
	answer := completion{ID: newID("cmpl-"), Object: "text_completion", Created: now(),
		Model: model.Name}
	if body.Stream {
		return s.streamCompletion(w, r, g, &body, answer)
	}
	outputs, err := g.all(r.Context())
	if err != nil {
		return err
	}
	for i := range outputs {
		choice, err := body.choice(r.Context(), g, &outputs[i], &textPosition{})
		if err != nil {
			return err
		}
		answer.Choices = append(answer.Choices, choice)
	}
	answer.Usage = &g.record.usage
	writeJSON(w, http.StatusOK, answer)
	return nil
}

func (c *completionRequest) request() (pagedllm.Request, error) {
	var check checks
	if c.Suffix != "" {
		return pagedllm.Request{}, unsupported("suffix", "suffix is not supported; remove it")
	}
	if len(c.Prompt) == 0 {
		return pagedllm.Request{}, badRequest("prompt",
			"the request has no prompt; send a string or token ids")
	}
	for i, prompt := range c.Prompt {
		if prompt.text == "" && len(prompt.tokens) == 0 {
			return pagedllm.Request{}, badRequest("prompt",
				fmt.Sprintf("prompt %d is empty; send at least one token", i))
		}
	}
	if c.MaxTokens == nil {
		c.MaxTokens = pagedllm.Ptr(defaultMaxTokens)
	}
	request, err := c.samplingParams.request()
	if err != nil {
		return request, err
	}
	request.Sampling.Echo = c.Echo
	request.Sampling.LogProbs = c.Logprobs != nil
	request.Sampling.TopLogProbs = check.atLeast("logprobs", c.Logprobs, 0)
	return request, check.err
}

// choice returns what an output adds to its choice. position is the end of the choice so far.
func (c *completionRequest) choice(ctx context.Context, g *generation, output *pagedllm.Output,
	position *textPosition) (completionChoice, error) {
	reason, stop := finishReason(output)
	choice := completionChoice{Index: g.choice(output), Text: output.Text,
		FinishReason: orNull(reason), StopReason: stop}
	var err error
	if c.Logprobs != nil {
		if choice.Logprobs, err = g.model.completionLogprobs(ctx, output, *c.Logprobs,
			position); err != nil {
			return choice, err
		}
	}
	choice.choiceExtensions, err = c.samplingParams.report(ctx, g.model, output)
	return choice, err
}

func (s *Server) streamCompletion(w http.ResponseWriter, r *http.Request, g *generation,
	body *completionRequest, event completion) error {
	stream := newEventStream(w)
	event.Choices = make([]completionChoice, 1)
	positions := make([]textPosition, g.open)
	err := g.each(r.Context(), s, stream, func(output *pagedllm.Output) error {
		var err error
		if event.Choices[0], err = body.choice(r.Context(), g, output,
			&positions[g.choice(output)]); err != nil {
			return err
		}
		// A token can be a part of a character, which comes with a later token.
		if output.Text != "" || output.FinishReason != pagedllm.FinishNone ||
			body.Logprobs != nil || body.ReturnTokenIDs {
			stream.add("", event)
		}
		return nil
	})
	if err != nil {
		stream.fail(r.Context(), err, "", toAPIError(err).openAI())
		return nil
	}
	if body.wantsUsage() {
		event.Choices, event.Usage = []completionChoice{}, &g.record.usage
		stream.add("", event)
	}
	stream.done()
	return nil
}

// newID returns an id that is unique with high probability.
func newID(prefix string) string {
	var bytes [12]byte
	rand.Read(bytes[:])
	return prefix + hex.EncodeToString(bytes[:])
}
