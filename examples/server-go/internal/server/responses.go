package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// responsesRequest is a request of OpenAI's Responses API. The server stores no responses, so that
// a client sends the whole conversation as input. The parameters of the library are extensions.
type responsesRequest struct {
	Model             string            `json:"model"`
	Input             responsesInput    `json:"input"`
	Instructions      string            `json:"instructions"`
	MaxOutputTokens   *int              `json:"max_output_tokens"`
	Temperature       *float64          `json:"temperature"`
	TopP              *float64          `json:"top_p"`
	Seed              *int64            `json:"seed"`
	Stream            bool              `json:"stream"`
	Tools             []responsesTool   `json:"tools"`
	ToolChoice        toolChoice        `json:"tool_choice"`
	ParallelToolCalls *bool             `json:"parallel_tool_calls"`
	Text              *responsesText    `json:"text"`
	Reasoning         *reasoningOptions `json:"reasoning"`
	// Refused unless they have their default.
	PreviousResponseID string          `json:"previous_response_id"`
	Conversation       json.RawMessage `json:"conversation"`
	Background         bool            `json:"background"`
	Truncation         string          `json:"truncation"`
	// Accepted without effect on the answer.
	Store          *bool           `json:"store"`
	Include        []string        `json:"include"` // reasoning is never encrypted
	Metadata       json.RawMessage `json:"metadata"`
	User           string          `json:"user"`
	ServiceTier    string          `json:"service_tier"`
	SafetyID       string          `json:"safety_identifier"`
	PromptCacheKey string          `json:"prompt_cache_key"`
	CacheRetention string          `json:"prompt_cache_retention"`
	CacheOptions   json.RawMessage `json:"prompt_cache_options"`
	MaxToolCalls   *int            `json:"max_tool_calls"` // of tools that run in the server
	StreamOptions  json.RawMessage `json:"stream_options"`
	extensions
}

func (b *responsesRequest) modelName() string { return b.Model }

type responsesTool struct {
	Type        string          `json:"type"`
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Parameters  json.RawMessage `json:"parameters"`
	Strict      *bool           `json:"strict"`
}

type responsesText struct {
	Format *struct {
		Type string `json:"type"`
		schemaSpec
	} `json:"format"`
	Verbosity string `json:"verbosity"` // accepted without effect
}

type reasoningOptions struct {
	Effort          string `json:"effort"`
	Summary         string `json:"summary"` // reasoning is never summarized
	GenerateSummary string `json:"generate_summary"`
}

// responsesInput are the items of the conversation. An input that is a text is a message.
type responsesInput []inputItem

type inputItem struct {
	Type string `json:"type"` // "" is a message
	ID   string `json:"id"`
	// Of a message.
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"` // also of reasoning
	// Of a tool call and its output.
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Output    json.RawMessage `json:"output"`
	// Members of answers that clients send back.
	Status           string          `json:"status"`
	Summary          json.RawMessage `json:"summary"`
	EncryptedContent string          `json:"encrypted_content"`
}

var itemTypes = []string{"", "message", "reasoning", "function_call", "function_call_output"}

func (in *responsesInput) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) == nil {
		content, err := json.Marshal(text)
		*in = responsesInput{{Role: "user", Content: content}}
		return err
	}
	var items []inputItem
	if json.Unmarshal(data, &items) != nil {
		return badRequest("input", "input is neither a string nor an array of items; send one of "+
			"them")
	}
	for i, item := range items { // other types have other members
		if !slices.Contains(itemTypes, item.Type) {
			return unsupported("input", fmt.Sprintf("input[%d].type is %q; send message, "+
				"reasoning, function_call or function_call_output", i, item.Type))
		}
	}
	return decodeStrictly(data, (*[]inputItem)(in))
}

// turn converts the request.
func (b *responsesRequest) turn() (*turn, error) {
	if err := b.refuseUnsupported(); err != nil {
		return nil, err
	}
	if len(b.Input) == 0 {
		return nil, badRequest("input", "the request has no input; send a text or items")
	}
	var check checks
	t := &turn{stream: b.Stream, choice: b.ToolChoice,
		oneCall: b.ParallelToolCalls != nil && !*b.ParallelToolCalls}
	if b.Instructions != "" {
		t.messages = append(t.messages, message{Role: "system", Content: b.Instructions})
	}
	for i := range b.Input {
		if err := t.addItem(i, &b.Input[i]); err != nil {
			return nil, err
		}
	}
	for _, given := range b.Tools {
		t.tools = append(t.tools, tool{Type: given.Type,
			Function: toolFunction{Name: given.Name, Description: given.Description,
				Parameters: given.Parameters}})
	}
	if b.Reasoning != nil && b.Reasoning.Effort != "" {
		t.setVariable("reasoning_effort", b.Reasoning.Effort)
	}
	if b.Text != nil && b.Text.Format != nil {
		format := responseFormat{b.Text.Format.Type, &b.Text.Format.schemaSpec}
		t.format, check.err = format.grammar("text.format")
	}
	check.atLeast("max_output_tokens", b.MaxOutputTokens, 1)
	t.params = &samplingParams{MaxTokens: b.MaxOutputTokens, Temperature: b.Temperature,
		TopP: b.TopP, Seed: b.Seed, Stream: b.Stream, extensions: b.extensions}
	if check.err != nil {
		return nil, check.err
	}
	return t, checkTools(t.tools)
}

func (b *responsesRequest) refuseUnsupported() error {
	switch {
	case b.PreviousResponseID != "":
		return unsupported("previous_response_id",
			"previous_response_id is not supported, because responses are not stored; send the "+
				"whole conversation as input")
	case len(b.Conversation) > 0 && string(b.Conversation) != "null":
		return unsupported("conversation", "conversation is not supported, because conversations "+
			"are not stored; send the whole conversation as input")
	case b.Background:
		return unsupported("background", "background is not supported; wait for the answer, or "+
			"stream it")
	case b.Truncation != "" && b.Truncation != "disabled":
		return unsupported("truncation", `truncation is not supported; send "disabled", or `+
			`truncate_prompt_tokens`)
	case slices.ContainsFunc(b.Include,
		func(name string) bool { return name != "reasoning.encrypted_content" }):
		return unsupported("include", `include has more than "reasoning.encrypted_content"; `+
			`remove the others`)
	case b.BestOf != nil || b.Beam != nil || b.PromptLogprobs != nil || b.ReturnTokenIDs:
		return unsupported("", "best_of, beam, prompt_logprobs and return_token_ids are not "+
			"supported here; use /v1/chat/completions")
	}
	return nil
}

// addItem converts an item. Reasoning and tool calls that follow each other are one message.
func (t *turn) addItem(i int, item *inputItem) error {
	param := fmt.Sprintf("input[%d]", i)
	switch item.Type {
	case "", "message":
		text, err := textOf(item.Content, param, "input_text", "output_text", "text", "refusal")
		if err != nil {
			return err
		}
		role := item.Role
		switch role {
		case "developer":
			role = "system"
		case "assistant":
			t.openAssistant().Content += text
			return nil
		case "system", "user":
		default:
			return badRequest(param+".role",
				fmt.Sprintf("%s.role is %q; must be system, developer, user or assistant", param,
					role))
		}
		t.messages = append(t.messages, message{Role: role, Content: text})
	case "reasoning":
		if item.Content != nil {
			text, err := textOf(item.Content, param, "reasoning_text")
			if err != nil {
				return err
			}
			t.openAssistant().ReasoningContent += text
		}
	case "function_call":
		call, err := newToolCall(item.CallID, item.Name, item.Arguments)
		if err != nil {
			return err
		}
		last := t.openAssistant()
		last.ToolCalls = append(last.ToolCalls, call)
	case "function_call_output":
		text, err := textOf(item.Output, param, "input_text", "output_text", "text")
		if err != nil {
			return err
		}
		t.messages = append(t.messages, message{Role: "tool", ToolCallID: item.CallID,
			Content: text})
	}
	return nil
}

// openAssistant returns the last message if it is the assistant's, or a new one.
func (t *turn) openAssistant() *message {
	if n := len(t.messages); n == 0 || t.messages[n-1].Role != "assistant" {
		t.messages = append(t.messages, message{Role: "assistant"})
	}
	return &t.messages[len(t.messages)-1]
}

// A response is an answer, or its state in an event of a stream.
type response struct {
	ID                 string             `json:"id"`
	Object             string             `json:"object"`
	CreatedAt          int64              `json:"created_at"`
	Status             string             `json:"status"`
	Model              string             `json:"model"`
	Output             []outputItem       `json:"output"`
	Error              *responseError     `json:"error"`
	IncompleteDetails  *incompleteDetails `json:"incomplete_details"`
	Instructions       *string            `json:"instructions"`
	MaxOutputTokens    *int               `json:"max_output_tokens"`
	Metadata           json.RawMessage    `json:"metadata"`
	ParallelToolCalls  bool               `json:"parallel_tool_calls"`
	PreviousResponseID *string            `json:"previous_response_id"`
	Reasoning          reasoningState     `json:"reasoning"`
	Store              bool               `json:"store"`
	Temperature        *float64           `json:"temperature"`
	Text               any                `json:"text"`
	ToolChoice         any                `json:"tool_choice"`
	Tools              []responsesTool    `json:"tools"`
	TopP               *float64           `json:"top_p"`
	Truncation         string             `json:"truncation"`
	Usage              *responseUsage     `json:"usage"`
}

type responseError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

type incompleteDetails struct {
	Reason string `json:"reason"`
}

type reasoningState struct {
	Effort  *string `json:"effort"`
	Summary *string `json:"summary"`
}

type responseUsage struct {
	InputTokens   int            `json:"input_tokens"`
	InputDetails  promptDetails  `json:"input_tokens_details"`
	OutputTokens  int            `json:"output_tokens"`
	OutputDetails map[string]int `json:"output_tokens_details"`
	TotalTokens   int            `json:"total_tokens"`
}

// response returns the response to a request before its first output.
func (b *responsesRequest) response(model *Model, t *turn) *response {
	r := &response{ID: newID("resp_"), Object: "response", CreatedAt: now(), Status: "in_progress",
		Model: model.Name, Output: []outputItem{},
		Instructions: orNull(b.Instructions), MaxOutputTokens: b.MaxOutputTokens,
		Metadata: b.Metadata, ParallelToolCalls: !t.oneCall,
		Temperature: b.Temperature, TopP: b.TopP, Tools: b.Tools,
		ToolChoice: nonEmpty(t.choice.mode, "auto"), Truncation: "disabled"}
	if t.choice.mode == "named" {
		r.ToolChoice = map[string]string{"type": "function", "name": t.choice.name}
	}
	if r.Metadata == nil {
		r.Metadata = json.RawMessage("{}")
	}
	if r.Tools == nil {
		r.Tools = []responsesTool{}
	}
	if b.Reasoning != nil {
		r.Reasoning.Effort = orNull(b.Reasoning.Effort)
	}
	r.Text = map[string]any{"format": map[string]string{"type": "text"}}
	if b.Text != nil && b.Text.Format != nil {
		r.Text = map[string]any{"format": b.Text.Format}
	}
	return r
}

// complete sets the state at the end of the response.
func (r *response) complete(ctx context.Context, s *Server, c *conversation, last *pagedllm.Output,
	divided *parts, ids *itemIDs) error {
	r.Status = "completed"
	if reason, _ := finishReason(last); reason == "length" {
		r.Status, r.IncompleteDetails = "incomplete", &incompleteDetails{"max_output_tokens"}
	}
	for i, part := range divided.all {
		r.Output = append(r.Output, part.item(ids.of(i, part), part.status()))
	}
	var reasoning []uint32
	err := s.compute(ctx, func() (err error) {
		reasoning, err = c.model.Engine.Tokenize(divided.text(reasoningPart), false)
		return err
	})
	if err != nil {
		return err
	}
	usage := &c.record.usage
	r.Usage = &responseUsage{InputTokens: usage.PromptTokens, InputDetails: usage.PromptDetails,
		OutputTokens: usage.CompletionTokens,
		OutputDetails: map[string]int{
			"reasoning_tokens": min(len(reasoning), usage.CompletionTokens)},
		TotalTokens: usage.TotalTokens}
	return nil
}

func (s *Server) responses(w http.ResponseWriter, r *http.Request) error {
	var body responsesRequest
	c, err := s.begin(w, r, &body)
	if err != nil {
		return err
	}
	defer c.close()
	answer := body.response(c.model, c.turn)
	if body.Stream {
		s.streamResponse(w, r, c, answer)
		return nil
	}
	outputs, divided, err := c.answer(r.Context())
	if err != nil {
		return err
	}
	if err := answer.complete(r.Context(), s, c, &outputs[0], &divided[0], &itemIDs{}); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, answer)
	return nil
}
