package server

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// messagesRequest is a request of Anthropic's API. The parameters of the library are extensions.
type messagesRequest struct {
	messagesPrompt
	Stream        bool     `json:"stream"`
	MaxTokens     *int     `json:"max_tokens"`
	StopSequences []string `json:"stop_sequences"`
	Temperature   *float64 `json:"temperature"`
	TopP          *float64 `json:"top_p"`
	Seed          *int64   `json:"seed"`
	// Accepted without effect on the answer.
	Metadata      json.RawMessage `json:"metadata"`
	ServiceTier   string          `json:"service_tier"`
	InferenceGeo  string          `json:"inference_geo"`
	Speed         string          `json:"speed"`
	UserProfileID string          `json:"user_profile_id"`
	WorkspaceID   string          `json:"workspace_id"`
	Diagnostics   json.RawMessage `json:"diagnostics"`
	extensions
}

// messagesPrompt are the members from which a prompt is rendered.
type messagesPrompt struct {
	Model      string               `json:"model"`
	Messages   []anthropicMessage   `json:"messages"`
	System     systemText           `json:"system"`
	Tools      []anthropicTool      `json:"tools"`
	ToolChoice *anthropicToolChoice `json:"tool_choice"`
	Thinking   *thinking            `json:"thinking"`
	Output     *outputConfig        `json:"output_config"`
	// The prefix cache needs no marks.
	CacheControl json.RawMessage `json:"cache_control"`
}

func (m *messagesPrompt) modelName() string { return m.Model }

// outputConfig has a schema for the answer, and an effort, which becomes the variable
// reasoning_effort of the template.
type outputConfig struct {
	Effort string `json:"effort"`
	Format *struct {
		Type   string          `json:"type"`
		Schema json.RawMessage `json:"schema"`
	} `json:"format"`
}

// thinking becomes the variable enable_thinking of the template. A budget has no effect.
type thinking struct {
	Type         string `json:"type"`
	BudgetTokens *int   `json:"budget_tokens"`
	Display      string `json:"display"`
}

type anthropicTool struct {
	Type         string          `json:"type"`
	Name         string          `json:"name"`
	Description  string          `json:"description"`
	InputSchema  json.RawMessage `json:"input_schema"`
	Strict       *bool           `json:"strict"`        // no effect, as in chat completions
	CacheControl json.RawMessage `json:"cache_control"` // no effect
}

type anthropicToolChoice struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	OneCall bool   `json:"disable_parallel_tool_use"`
}

// systemText is a text or an array of text blocks.
type systemText string

func (s *systemText) UnmarshalJSON(data []byte) error {
	text, err := textOf(data, "system", "text")
	*s = systemText(text)
	return err
}

type anthropicMessage struct {
	Role    string          `json:"role"`
	Content anthropicBlocks `json:"content"`
}

// anthropicBlocks are the blocks of a content. A content that is a text is one block.
type anthropicBlocks []anthropicBlock

type anthropicBlock struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`        // text
	Thinking  string          `json:"thinking"`    // thinking
	ID        string          `json:"id"`          // tool_use
	Name      string          `json:"name"`        // tool_use
	Input     json.RawMessage `json:"input"`       // tool_use
	ToolUseID string          `json:"tool_use_id"` // tool_result
	Content   json.RawMessage `json:"content"`     // tool_result: a text, or text blocks
	// Members without effect: that of a result is its content, and those of answers are sent back.
	IsError      *bool           `json:"is_error"`      // tool_result
	CacheControl json.RawMessage `json:"cache_control"` // all
	Citations    json.RawMessage `json:"citations"`     // text
	Signature    string          `json:"signature"`     // thinking
	Data         string          `json:"data"`          // redacted_thinking
	Caller       json.RawMessage `json:"caller"`        // tool_use
}

var blockTypes = []string{"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}

func (b *anthropicBlocks) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) == nil {
		*b = anthropicBlocks{{Type: "text", Text: text}}
		return nil
	}
	var blocks []anthropicBlock
	if json.Unmarshal(data, &blocks) != nil {
		return badRequest("messages", "a content is neither a string nor an array of blocks; send "+
			"one of them")
	}
	for _, block := range blocks { // other types have other members
		if !slices.Contains(blockTypes, block.Type) {
			return unsupported("messages", fmt.Sprintf("a block has the type %q; send text, "+
				"thinking, tool_use or tool_result", block.Type))
		}
	}
	return decodeStrictly(data, (*[]anthropicBlock)(b))
}

// turn converts the messages.
func (m *messagesPrompt) turn() (*turn, error) {
	t := &turn{}
	if m.System != "" {
		t.messages = append(t.messages, message{Role: "system", Content: string(m.System)})
	}
	for i := range m.Messages {
		if role := m.Messages[i].Role; role != "user" && role != "assistant" {
			return nil, badRequest(fmt.Sprintf("messages[%d].role", i),
				fmt.Sprintf("messages[%d].role is %q; must be user or assistant", i, role))
		}
		if err := t.addBlocks(&m.Messages[i]); err != nil {
			return nil, err
		}
	}
	if len(m.Messages) > 0 { // the model continues the last message if it is its own
		last := &t.messages[len(t.messages)-1]
		t.continues = last.Role == "assistant" && last.ToolCalls == nil
	}
	for _, given := range m.Tools {
		if given.Type != "" && given.Type != "custom" {
			return nil, unsupported("tools",
				fmt.Sprintf("the tool %q has the type %q; only functions of the client are "+
					"supported", given.Name, given.Type))
		}
		t.tools = append(t.tools, tool{Type: "function",
			Function: toolFunction{Name: given.Name, Description: given.Description,
				Parameters: given.InputSchema}})
	}
	if m.Thinking != nil {
		t.setVariable("enable_thinking", m.Thinking.Type != "disabled")
	}
	if err := m.ToolChoice.apply(t); err != nil {
		return nil, err
	}
	if err := m.Output.apply(t); err != nil {
		return nil, err
	}
	return t, checkTools(t.tools)
}

func (o *outputConfig) apply(t *turn) (err error) {
	if o == nil {
		return nil
	}
	if o.Effort != "" {
		t.setVariable("reasoning_effort", o.Effort)
	}
	if o.Format != nil {
		format := responseFormat{o.Format.Type, &schemaSpec{Schema: o.Format.Schema}}
		t.format, err = format.grammar("output_config.format")
	}
	return err
}

func (c *anthropicToolChoice) apply(t *turn) error {
	if c == nil {
		return nil
	}
	t.oneCall = c.OneCall
	switch c.Type {
	case "auto", "none":
		t.choice.mode = c.Type
	case "any":
		t.choice.mode = "required"
	case "tool":
		t.choice = toolChoice{"named", c.Name}
	default:
		return badRequest("tool_choice", fmt.Sprintf("tool_choice.type is %q; must be auto, any, "+
			"tool or none", c.Type))
	}
	return nil
}

// addBlocks converts a message. The results of tools become messages of the role "tool".
func (t *turn) addBlocks(m *anthropicMessage) error {
	next := message{Role: m.Role}
	var texts []string
	hasResults := false
	for _, block := range m.Content {
		switch block.Type {
		case "text":
			texts = append(texts, block.Text)
		case "thinking":
			next.ReasoningContent += block.Thinking
		case "tool_use":
			call, err := newToolCall(block.ID, block.Name, string(block.Input))
			if err != nil {
				return err
			}
			next.ToolCalls = append(next.ToolCalls, call)
		case "tool_result":
			var text string
			if block.Content != nil {
				var err error
				if text, err = textOf(block.Content, "messages", "text"); err != nil {
					return err
				}
			}
			t.messages = append(t.messages, message{Role: "tool", ToolCallID: block.ToolUseID,
				Content: text})
			hasResults = true
		}
	}
	next.Content = strings.Join(texts, "\n")
	if !hasResults || len(texts) > 0 {
		t.messages = append(t.messages, next)
	}
	return nil
}

func (m *messagesRequest) turn() (*turn, error) {
	t, err := m.messagesPrompt.turn()
	if err != nil {
		return nil, err
	}
	if m.MaxTokens == nil {
		return nil, badRequest("max_tokens",
			"the request has no max_tokens; send the maximum number of tokens of the answer")
	}
	t.stream = m.Stream
	t.params = &samplingParams{MaxTokens: m.MaxTokens, Stop: m.StopSequences,
		Temperature: m.Temperature, TopP: m.TopP, Seed: m.Seed,
		Stream: m.Stream, extensions: m.extensions}
	if m.BestOf != nil || m.Beam != nil || m.PromptLogprobs != nil || m.ReturnTokenIDs {
		return nil, unsupported("", "best_of, beam, prompt_logprobs and return_token_ids are not "+
			"supported here; use /v1/chat/completions")
	}
	return t, nil
}

// A messagesResponse is an answer.
type messagesResponse struct {
	ID           string          `json:"id"`
	Type         string          `json:"type"`
	Role         string          `json:"role"`
	Model        string          `json:"model"`
	Content      []contentBlock  `json:"content"`
	StopReason   *string         `json:"stop_reason"`
	StopSequence *string         `json:"stop_sequence"`
	Usage        *anthropicUsage `json:"usage"`
}

type anthropicUsage struct {
	InputTokens              int `json:"input_tokens"`
	CacheCreationInputTokens int `json:"cache_creation_input_tokens"`
	CacheReadInputTokens     int `json:"cache_read_input_tokens"`
	OutputTokens             int `json:"output_tokens"`
}

// anthropicUsage counts the cached tokens separately, as Anthropic does.
func (u *usage) anthropic() *anthropicUsage {
	cached := u.PromptDetails.CachedTokens
	return &anthropicUsage{InputTokens: u.PromptTokens - cached, CacheReadInputTokens: cached,
		OutputTokens: u.CompletionTokens}
}

// A contentBlock has the members of its type: text, thinking or tool_use.
type contentBlock struct {
	Type      string          `json:"type"`
	Text      *string         `json:"text,omitempty"`
	Thinking  *string         `json:"thinking,omitempty"`
	Signature *string         `json:"signature,omitempty"`
	ID        string          `json:"id,omitempty"`
	Name      string          `json:"name,omitempty"`
	Input     json.RawMessage `json:"input,omitempty"`
}

// block returns a part as a block with the given text.
func (p *part) block(text string) contentBlock {
	switch p.kind {
	case reasoningPart:
		return contentBlock{Type: "thinking", Thinking: &text, Signature: new(string)}
	case callPart:
		return contentBlock{Type: "tool_use", ID: p.id, Name: p.name, Input: json.RawMessage(text)}
	}
	return contentBlock{Type: "text", Text: &text}
}

// anthropicStop returns the names of Anthropic for the end of a response.
func anthropicStop(output *pagedllm.Output, hasCalls bool) (reason string, sequence *string) {
	switch name, stop := finishReason(output); {
	case name == "length":
		return "max_tokens", nil
	case hasCalls:
		return "tool_use", nil
	default:
		if text, ok := stop.(string); ok {
			return "stop_sequence", &text
		}
		return "end_turn", nil
	}
}

func (s *Server) messages(w http.ResponseWriter, r *http.Request) error {
	var body messagesRequest
	c, err := s.begin(w, r, &body)
	if err != nil {
		return err
	}
	defer c.close()
	answer := messagesResponse{ID: newID("msg_"), Type: "message", Role: "assistant",
		Model: c.model.Name, Content: []contentBlock{}}
	if body.Stream {
		s.streamMessage(w, r, c, answer)
		return nil
	}
	outputs, divided, err := c.answer(r.Context())
	if err != nil {
		return err
	}
	// An input has to be an object. The model can have stopped within it.
	divided[0].all = slices.DeleteFunc(divided[0].all,
		func(p *part) bool { return p.kind == callPart && !isObject(p.text.String()) })
	for _, part := range divided[0].all {
		answer.Content = append(answer.Content, part.block(part.text.String()))
	}
	reason, sequence := anthropicStop(&outputs[0], divided[0].hasCalls())
	answer.StopReason, answer.StopSequence, answer.Usage = &reason, sequence,
		c.record.usage.anthropic()
	writeJSON(w, http.StatusOK, answer)
	return nil
}

func (s *Server) streamMessage(w http.ResponseWriter, r *http.Request, c *conversation,
	answer messagesResponse) {
	stream := newEventStream(w)
	answer.Usage = &anthropicUsage{InputTokens: c.promptTokens} // the end has all counts
	stream.add("message_start", map[string]any{"type": "message_start", "message": answer})
	err := stream.flush()
	divided := &parts{handler: blockEvents{stream}}
	var last pagedllm.Output
	if err == nil {
		last, err = c.stream(r.Context(), s, stream, divided)
	}
	if err != nil {
		stream.fail(r.Context(), err, "error", toAPIError(err).anthropic())
		return
	}
	reason, sequence := anthropicStop(&last, divided.hasCalls())
	stream.add("message_delta", map[string]any{"type": "message_delta",
		"usage": c.record.usage.anthropic(),
		"delta": map[string]any{"stop_reason": reason, "stop_sequence": sequence}})
	stream.add("message_stop", map[string]any{"type": "message_stop"})
	stream.flush()
}

// blockEvents sends the parts of a response as blocks.
type blockEvents struct{ stream *eventStream }

type blockStart struct {
	Type         string       `json:"type"`
	Index        int          `json:"index"`
	ContentBlock contentBlock `json:"content_block"`
}

type blockDelta struct {
	Type  string `json:"type"`
	Index int    `json:"index"`
	Delta struct {
		Type        string  `json:"type"`
		Text        *string `json:"text,omitempty"`
		Thinking    *string `json:"thinking,omitempty"`
		PartialJSON *string `json:"partial_json,omitempty"`
	} `json:"delta"`
}

func (e blockEvents) begin(index int, p *part) {
	begin := ""
	if p.kind == callPart {
		begin = "{}"
	}
	e.stream.add("content_block_start", blockStart{"content_block_start", index, p.block(begin)})
}

func (e blockEvents) extend(index int, p *part, text string) {
	event := blockDelta{Type: "content_block_delta", Index: index}
	switch p.kind {
	case reasoningPart:
		event.Delta.Type, event.Delta.Thinking = "thinking_delta", &text
	case contentPart:
		event.Delta.Type, event.Delta.Text = "text_delta", &text
	case callPart:
		event.Delta.Type, event.Delta.PartialJSON = "input_json_delta", &text
	}
	e.stream.add("content_block_delta", event)
}

func (e blockEvents) end(index int, _ *part) {
	e.stream.add("content_block_stop", map[string]any{"type": "content_block_stop", "index": index})
}

// countTokens answers with the number of tokens of a prompt.
func (s *Server) countTokens(w http.ResponseWriter, r *http.Request) error {
	var body messagesPrompt
	model, turn, err := s.readTurn(w, r, &body)
	if err != nil {
		return err
	}
	var tokens []uint32
	err = s.compute(r.Context(), func() (err error) {
		prompt, err := model.render(turn)
		if err == nil {
			tokens, err = model.Engine.Tokenize(prompt.text, false)
		}
		return err
	})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]int{"input_tokens": len(tokens)})
	return nil
}
