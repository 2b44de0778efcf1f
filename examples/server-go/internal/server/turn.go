package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A turn is a request for the next message of a chat. Chat completions, messages and responses are
// converted to it.
type turn struct {
	messages []message
	tools    []tool
	choice   toolChoice
	// oneCall forbids several tool calls in one message.
	oneCall bool
	// variables are further variables of the chat template.
	variables map[string]json.RawMessage
	// continues is true if the last message is the beginning of the answer.
	continues bool
	// format is the constraint on the content. nil: none.
	format *pagedllm.Grammar
	params *samplingParams
	stream bool
	// logprobs is nil if the request does not ask for log probabilities.
	logprobs *int
}

// A message is a message in the form that chat templates take.
type message struct {
	Role             string            `json:"role"`
	Content          string            `json:"content"`
	Name             string            `json:"name,omitempty"`
	ReasoningContent string            `json:"reasoning_content,omitempty"`
	ToolCalls        []messageToolCall `json:"tool_calls,omitempty"`
	ToolCallID       string            `json:"tool_call_id,omitempty"`
}

// A messageToolCall is an earlier call of the model. Templates take its arguments as an object.
type messageToolCall struct {
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"function"`
}

// newToolCall checks that the arguments, which APIs pass as text, are an object.
func newToolCall(id, name, arguments string) (call messageToolCall, err error) {
	call.ID, call.Type = id, "function"
	call.Function.Name, call.Function.Arguments = name, json.RawMessage(arguments)
	if strings.TrimSpace(arguments) == "" {
		call.Function.Arguments = json.RawMessage("{}")
	}
	var object map[string]json.RawMessage
	if json.Unmarshal(call.Function.Arguments, &object) != nil || object == nil {
		return call, badRequest("", fmt.Sprintf("the arguments of tool call %q are not a JSON "+
			"object; send the text of an object", id))
	}
	return call, nil
}

// A conversation is the generation of a turn.
type conversation struct {
	*generation
	turn *turn
	// parsers separate reasoning, content and tool calls of each choice. nil: all is content.
	parsers []*pagedllm.ResponseParser
	// inCall has, for each choice, whether the last delta was a call that asContent has begun.
	inCall []bool
}

// A chatBody is a request for a turn of a chat in the form of its API.
type chatBody interface {
	apiRequest
	turn() (*turn, error)
}

// readTurn decodes the body of a request, and converts it.
func (s *Server) readTurn(w http.ResponseWriter, r *http.Request, body chatBody,
) (*Model, *turn, error) {
	model, err := s.read(w, r, body)
	if err != nil {
		return nil, nil, err
	}
	t, err := body.turn()
	if err != nil {
		return nil, nil, err
	}
	if len(t.messages) == 0 {
		return nil, nil, badRequest("messages", "the request has no messages; send at least one")
	}
	if t.choice.mode == "none" {
		t.tools = nil
	}
	return model, t, nil
}

// begin reads a request and starts its turn. Close the conversation.
func (s *Server) begin(w http.ResponseWriter, r *http.Request, body chatBody,
) (*conversation, error) {
	model, turn, err := s.readTurn(w, r, body)
	if err != nil {
		return nil, err
	}
	return s.startTurn(r.Context(), model, turn)
}

// startTurn renders the chat and adds its request. Close the conversation.
func (s *Server) startTurn(ctx context.Context, model *Model, t *turn) (*conversation, error) {
	request, err := t.request()
	if err != nil {
		return nil, err
	}
	format := model.formatFor(t)
	var prompt prompt
	err = s.compute(ctx, func() (err error) {
		prompt, err = model.render(t)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Special tokens mark the parts of a response.
	request.RawPrompt, request.ShowSpecial = true, request.ShowSpecial || format != "text"
	c := &conversation{turn: t, inCall: make([]bool, max(request.N, 1))}
	if format != "text" {
		if err := c.addParsers(model, t, format, prompt.text, max(request.N, 1)); err != nil {
			c.closeParsers()
			return nil, err
		}
	}
	if c.generation, err = s.start(ctx, model, request, prompts{prompt}, t.stream); err != nil {
		c.closeParsers()
		return nil, err
	}
	return c, nil
}

// request returns the request of the engine without its prompt.
func (t *turn) request() (pagedllm.Request, error) {
	request, err := t.params.request()
	if err != nil {
		return request, err
	}
	constraints := 0
	for _, is := range []bool{t.params.StructuredOutputs != nil, t.format != nil,
		t.choice.forced()} {
		if is {
			constraints++
		}
	}
	if constraints > 1 {
		return request, badRequest("", "the request has several constraints on the output; give "+
			"one of structured_outputs, a response format, and a tool choice that forces a call")
	}
	if t.format != nil {
		request.Sampling.Grammar = *t.format
	}
	if t.choice.forced() {
		if request.Sampling.Grammar, err = t.callGrammar(); err != nil {
			return request, err
		}
	}
	if t.logprobs != nil {
		request.Sampling.LogProbs, request.Sampling.TopLogProbs = true, *t.logprobs
	}
	return request, nil
}

// render renders the prompt with the model's chat template.
func (m *Model) render(t *turn) (prompt, error) {
	chat := map[string]any{"messages": t.messages}
	for name, value := range t.variables {
		if name == "messages" || name == "tools" {
			return prompt{}, badRequest("chat_template_kwargs",
				fmt.Sprintf("chat_template_kwargs has %q; send it as a member of the request",
					name))
		}
		chat[name] = value
	}
	if len(t.tools) > 0 {
		chat["tools"] = t.tools
	}
	if t.continues {
		chat["continue_final_message"], chat["add_generation_prompt"] = true, false
	}
	text, err := m.Engine.RenderChat(chat)
	return prompt{text: text}, err
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

// A part is a stretch of reasoning, of content, or a tool call.
type part struct {
	kind     partKind
	id, name string // of a tool call
	text     strings.Builder
	// cut is true if the response has ended within the part.
	cut bool
}

type partKind int

const (
	reasoningPart partKind = iota
	contentPart
	callPart
)

// parts are the parts of one response so far.
type parts struct {
	all []*part
	// handler reports the parts to a stream. It may be nil.
	handler partHandler
}

// A partHandler sends the parts of a response as events. index counts the parts.
type partHandler interface {
	begin(index int, p *part)
	extend(index int, p *part, text string)
	end(index int, p *part)
}

func (p *parts) add(delta *pagedllm.ResponseDelta) {
	if delta.ReasoningContent != "" {
		p.extend(reasoningPart, delta.ReasoningContent)
	}
	if delta.Content != "" {
		p.extend(contentPart, delta.Content)
	}
	for i := range delta.ToolCalls {
		if call := &delta.ToolCalls[i]; call.ID != "" {
			p.begin(&part{kind: callPart, id: call.ID, name: call.Function.Name})
		}
		p.extend(callPart, delta.ToolCalls[i].Function.Arguments)
	}
}

func (p *parts) begin(next *part) {
	p.end()
	p.all = append(p.all, next)
	if p.handler != nil {
		p.handler.begin(len(p.all)-1, next)
	}
}

func (p *parts) extend(kind partKind, text string) {
	if len(p.all) == 0 || p.all[len(p.all)-1].kind != kind {
		p.begin(&part{kind: kind})
	}
	last := p.all[len(p.all)-1]
	last.text.WriteString(text)
	if p.handler != nil && text != "" {
		p.handler.extend(len(p.all)-1, last, text)
	}
}

// end ends the last part. The response may continue with another.
func (p *parts) end() {
	if len(p.all) > 0 && p.handler != nil {
		p.handler.end(len(p.all)-1, p.all[len(p.all)-1])
	}
}

// finish ends the response. A call is complete if its arguments are an object.
func (p *parts) finish(output *pagedllm.Output) {
	if len(p.all) > 0 {
		last := p.all[len(p.all)-1]
		reason, _ := finishReason(output)
		last.cut = reason == "length"
		if last.kind == callPart {
			last.cut = !isObject(last.text.String())
		}
	}
	p.end()
}

// text returns the texts of all parts of a kind.
func (p *parts) text(kind partKind) string {
	var text strings.Builder
	for _, part := range p.all {
		if part.kind == kind {
			text.WriteString(part.text.String())
		}
	}
	return text.String()
}

func (p *parts) hasCalls() bool {
	for _, part := range p.all {
		if part.kind == callPart {
			return true
		}
	}
	return false
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

func now() int64 { return time.Now().Unix() }
