package server

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A conversation is the generation of a turn.
type conversation struct {
	*generation
	turn *turn
	// parsers separate reasoning, content and tool calls of each choice. nil: all is content.
	parsers []*pagedllm.ResponseParser
	// inCall has, for each choice, whether the last delta was a call that asContent has begun.
	inCall []bool
}

// formatFor returns the format of the parser of a response.
func (m *Model) formatFor(t *turn) string {
	switch {
	case t.choice.forced():
		return "json"
	case t.format != nil: // the grammar allows only content
		return "text"
	case len(t.tools) == 0:
		return m.formatWithoutCalls
	}
	return m.Format
}

// detectFormat checks the format of a model, and finds the format of responses without tool calls.
// Most formats have the tags <think> and </think>, which the format "think" takes.
func (m *Model) detectFormat() error {
	m.formatWithoutCalls = m.Format
	tags, err := m.reasoning("<think>a</think>b")
	if err != nil {
		return err
	}
	begun, err := m.reasoning("a</think>b")
	if err != nil {
		return err
	}
	sentence, err := m.reasoning("Here is my thought process: a") // of Granite, besides its tags
	if err != nil {
		return err
	}
	m.beginsWithReasoning = begun == "a"
	if m.beginsWithReasoning || tags == "a" && sentence == "" {
		m.formatWithoutCalls = "think"
	}
	return nil
}

// reasoning returns what the parser of the model's format takes for reasoning.
func (m *Model) reasoning(response string) (reasoning string, err error) {
	parser, err := m.Engine.NewResponseParser(pagedllm.ResponseSettings{Format: m.Format})
	if err != nil {
		return "", err
	}
	defer parser.Close()
	deltas, err := parser.Feed(response)
	if err != nil {
		return "", err
	}
	rest, err := parser.Finish()
	for _, delta := range append(deltas, rest...) {
		reasoning += delta.ReasoningContent
	}
	return reasoning, err
}

// tailBytes is the part of a prompt in which a parser looks for the beginning of the reasoning.
const tailBytes = 256

func (c *conversation) addParsers(model *Model, t *turn, format, prompt string, count int) error {
	settings := pagedllm.ResponseSettings{Format: format,
		Prompt: prompt[max(0, len(prompt)-tailBytes):]}
	if len(t.tools) > 0 {
		settings.Tools = t.tools
	} else if model.beginsWithReasoning {
		settings.Prompt = "<think>"
	}
	for range count {
		parser, err := model.Engine.NewResponseParser(settings)
		if err != nil {
			return err
		}
		c.parsers = append(c.parsers, parser)
	}
	return nil
}

func (c *conversation) close() {
	c.generation.close()
	c.closeParsers()
}

func (c *conversation) closeParsers() {
	for _, parser := range c.parsers {
		parser.Close()
	}
}

// deltas parses the text of an output.
func (c *conversation) deltas(output *pagedllm.Output) ([]pagedllm.ResponseDelta, error) {
	if c.parsers == nil {
		if output.Text == "" {
			return nil, nil
		}
		return []pagedllm.ResponseDelta{{Content: output.Text}}, nil
	}
	parser := c.parsers[c.choice(output)]
	var deltas []pagedllm.ResponseDelta
	if output.Text != "" {
		var err error
		if deltas, err = parser.Feed(output.Text); err != nil {
			return nil, err
		}
	}
	if output.FinishReason != pagedllm.FinishNone {
		rest, err := parser.Finish()
		if err != nil {
			return nil, err
		}
		deltas = append(deltas, rest...)
	}
	return c.allowed(deltas, output), nil
}

// allowed converts deltas to those that the request allows.
func (c *conversation) allowed(deltas []pagedllm.ResponseDelta,
	output *pagedllm.Output) []pagedllm.ResponseDelta {
	switch {
	case c.turn.choice.forced():
		// A call that max_tokens has cut before its arguments is no content.
		deltas = slices.DeleteFunc(deltas,
			func(d pagedllm.ResponseDelta) bool { return d.Content != "" })
	case len(c.turn.tools) == 0:
		return c.asContent(deltas, output)
	}
	for i := range deltas {
		calls := deltas[i].ToolCalls
		for k := range calls {
			// Ids with this prefix are the parser's. Models can have ids of their own.
			if strings.HasPrefix(calls[k].ID, "call_") {
				calls[k].ID = newCallID()
			}
		}
		if c.turn.oneCall {
			deltas[i].ToolCalls = slices.DeleteFunc(calls,
				func(call pagedllm.ToolCallDelta) bool { return call.Index > 0 })
		}
	}
	return slices.DeleteFunc(deltas, func(d pagedllm.ResponseDelta) bool {
		return d.Content == "" && d.ReasoningContent == "" && len(d.ToolCalls) == 0
	})
}

// asContent writes the calls of a request without tools as JSON into the content.
func (c *conversation) asContent(deltas []pagedllm.ResponseDelta,
	output *pagedllm.Output) []pagedllm.ResponseDelta {
	inCall := &c.inCall[output.Index]
	end := func() string {
		if !*inCall {
			return ""
		}
		*inCall = false
		return "}"
	}
	for i := range deltas {
		if deltas[i].ToolCalls == nil {
			deltas[i].Content = end() + deltas[i].Content
		}
		for _, call := range deltas[i].ToolCalls {
			if call.ID != "" {
				name, _ := json.Marshal(call.Function.Name)
				deltas[i].Content += end() + `{"name": ` + string(name) + `, "arguments": `
				*inCall = true
			}
			deltas[i].Content += call.Function.Arguments
		}
		deltas[i].ToolCalls = nil
	}
	if output.FinishReason != pagedllm.FinishNone && *inCall {
		deltas = append(deltas, pagedllm.ResponseDelta{Content: end()})
	}
	return deltas
}

// answer waits for a response that is not streamed, and divides it.
func (c *conversation) answer(ctx context.Context) (
	outputs []pagedllm.Output, divided []parts, err error) {
	if outputs, err = c.all(ctx); err != nil {
		return nil, nil, err
	}
	divided = make([]parts, len(outputs))
	for i := range outputs {
		deltas, err := c.deltas(&outputs[i])
		if err != nil {
			return nil, nil, err
		}
		for d := range deltas {
			divided[i].add(&deltas[d])
		}
		divided[i].finish(&outputs[i])
	}
	return outputs, divided, nil
}

// stream passes the parts of the only response to a handler, and returns its last output.
func (c *conversation) stream(ctx context.Context, s *Server, events *eventStream,
	divided *parts) (last pagedllm.Output, err error) {
	err = c.each(ctx, s, events, func(output *pagedllm.Output) error {
		deltas, err := c.deltas(output)
		for i := range deltas {
			divided.add(&deltas[i])
		}
		if output.FinishReason != pagedllm.FinishNone {
			divided.finish(output)
			last = *output
		}
		return err
	})
	return last, err
}
