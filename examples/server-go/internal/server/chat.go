package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

type chatRequest struct {
	samplingParams
	chatPrompt
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	Logprobs            bool            `json:"logprobs"`
	TopLogprobs         *int            `json:"top_logprobs"`
	ResponseFormat      *responseFormat `json:"response_format"`
	ToolChoice          toolChoice      `json:"tool_choice"`
	ParallelToolCalls   *bool           `json:"parallel_tool_calls"`
	Modalities          []string        `json:"modalities"`
	// Accepted without effect on the answer.
	Store     *bool  `json:"store"`
	Verbosity string `json:"verbosity"`
}

// chatPrompt are the members from which a prompt is rendered.
type chatPrompt struct {
	Messages             []chatMessage              `json:"messages"`
	Tools                []tool                     `json:"tools"`
	ReasoningEffort      string                     `json:"reasoning_effort"`
	ChatTemplateKwargs   map[string]json.RawMessage `json:"chat_template_kwargs"`
	ContinueFinalMessage bool                       `json:"continue_final_message"`
}

// A chatMessage is a message as clients send it.
type chatMessage struct {
	Role             string          `json:"role"`
	Content          chatContent     `json:"content"`
	Name             string          `json:"name"`
	ReasoningContent string          `json:"reasoning_content"`
	ToolCalls        []chatToolCall  `json:"tool_calls"`
	ToolCallID       string          `json:"tool_call_id"`
	Refusal          string          `json:"refusal"`
	Audio            json.RawMessage `json:"audio"`
	// Members of answers that clients send back.
	FunctionCall json.RawMessage `json:"function_call"`
	Annotations  json.RawMessage `json:"annotations"`
}

type chatToolCall struct {
	Index    *int   `json:"index"`
	ID       string `json:"id"`
	Type     string `json:"type"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

// chatContent is a text, or an array of text parts, which are joined by newlines.
type chatContent string

func (c *chatContent) UnmarshalJSON(data []byte) error {
	text, err := textOf(data, "messages", "text", "refusal")
	*c = chatContent(text)
	return err
}

// A textPart is a part of a content.
type textPart struct {
	Type    string `json:"type"`
	Text    string `json:"text"`
	Refusal string `json:"refusal"`
	// Members of answers that clients send back, and marks that the prefix cache does not need.
	Annotations  json.RawMessage `json:"annotations"`
	Logprobs     json.RawMessage `json:"logprobs"`
	Citations    json.RawMessage `json:"citations"`
	CacheControl json.RawMessage `json:"cache_control"`
}

// textOf returns a string, or the texts of an array of parts with one of the given types.
func textOf(data []byte, param string, types ...string) (string, error) {
	var text string
	if json.Unmarshal(data, &text) == nil { // also null
		return text, nil
	}
	var parts []textPart
	if err := json.Unmarshal(data, &parts); err != nil {
		return "", badRequest(param, "a content is neither a string nor an array of parts; send "+
			"one of them")
	}
	for _, part := range parts { // other types have other members
		if !slices.Contains(types, part.Type) {
			return "", unsupported(param, fmt.Sprintf("a part of a content has the type %q; send "+
				"%s", part.Type, strings.Join(types, " or ")))
		}
	}
	parts = nil
	if err := decodeStrictly(data, &parts); err != nil {
		return "", err
	}
	var texts []string
	for _, part := range parts {
		texts = append(texts, nonEmpty(part.Text, part.Refusal))
	}
	return strings.Join(texts, "\n"), nil
}

// turn converts the members to those of templates. The role "developer" is OpenAI's newer name of
// "system".
func (c *chatPrompt) turn() (*turn, error) {
	t := &turn{tools: c.Tools, variables: c.ChatTemplateKwargs, continues: c.ContinueFinalMessage}
	for i := range c.Messages {
		m := &c.Messages[i]
		switch m.Role {
		case "system", "user", "assistant", "tool":
		case "developer":
			m.Role = "system"
		default:
			return nil, badRequest(fmt.Sprintf("messages[%d].role", i),
				fmt.Sprintf("messages[%d].role is %q; must be system, developer, user, assistant "+
					"or tool", i, m.Role))
		}
		next := message{Role: m.Role, Content: nonEmpty(string(m.Content), m.Refusal), Name: m.Name,
			ReasoningContent: m.ReasoningContent, ToolCallID: m.ToolCallID}
		for _, call := range m.ToolCalls {
			converted, err := newToolCall(call.ID, call.Function.Name, call.Function.Arguments)
			if err != nil {
				return nil, err
			}
			next.ToolCalls = append(next.ToolCalls, converted)
		}
		t.messages = append(t.messages, next)
	}
	if c.ReasoningEffort != "" {
		t.setVariable("reasoning_effort", c.ReasoningEffort)
	}
	return t, checkTools(t.tools)
}

// setVariable sets a variable of the template that the request does not set itself.
func (t *turn) setVariable(name string, value any) {
	if t.variables == nil {
		t.variables = make(map[string]json.RawMessage)
	}
	if _, ok := t.variables[name]; !ok {
		t.variables[name], _ = json.Marshal(value)
	}
}

// turn converts the request.
func (c *chatRequest) turn() (*turn, error) {
	var check checks
	t, err := c.chatPrompt.turn()
	if err != nil {
		return nil, err
	}
	if c.MaxCompletionTokens != nil {
		if c.MaxTokens != nil && *c.MaxTokens != *c.MaxCompletionTokens {
			check.fail("max_tokens", "max_tokens and max_completion_tokens differ; send "+
				"max_completion_tokens")
		}
		check.atLeast("max_completion_tokens", c.MaxCompletionTokens, 0)
		c.MaxTokens = c.MaxCompletionTokens
	}
	if slices.ContainsFunc(c.Modalities, func(modality string) bool { return modality != "text" }) {
		check.err = unsupported("modalities", `modalities has more than "text"; remove the others`)
	}
	if c.TopLogprobs != nil && !c.Logprobs {
		check.fail("top_logprobs", `top_logprobs is given without "logprobs": true; set it`)
	}
	top := check.atLeast("top_logprobs", c.TopLogprobs, 0)
	if c.Logprobs {
		t.logprobs = &top
	}
	t.choice, t.params, t.stream = c.ToolChoice, &c.samplingParams, c.Stream
	t.oneCall = c.ParallelToolCalls != nil && !*c.ParallelToolCalls
	if check.err == nil {
		t.format, check.err = c.ResponseFormat.grammar("response_format")
	}
	return t, check.err
}

// A chatCompletion is an answer, or one event of a stream.
type chatCompletion struct {
	ID      string       `json:"id"`
	Object  string       `json:"object"`
	Created int64        `json:"created"`
	Model   string       `json:"model"`
	Choices []chatChoice `json:"choices"`
	Usage   *usage       `json:"usage,omitempty"`
}

type chatChoice struct {
	Index        int           `json:"index"`
	Message      *chatAnswer   `json:"message,omitempty"`
	Delta        *chatDelta    `json:"delta,omitempty"`
	Logprobs     *chatLogprobs `json:"logprobs"`
	FinishReason *string       `json:"finish_reason"`
	StopReason   any           `json:"stop_reason,omitempty"`
	choiceExtensions
}

type chatAnswer struct {
	Role             string       `json:"role"`
	Content          *string      `json:"content"`
	Refusal          *string      `json:"refusal"`
	ReasoningContent string       `json:"reasoning_content,omitempty"`
	ToolCalls        []answerCall `json:"tool_calls,omitempty"`
}

// An answerCall is a tool call of an answer that is not streamed.
type answerCall struct {
	ID       string                    `json:"id"`
	Type     string                    `json:"type"`
	Function pagedllm.ToolFunctionCall `json:"function"`
}

type chatDelta struct {
	Role string `json:"role,omitempty"`
	pagedllm.ResponseDelta
}

func (s *Server) chat(w http.ResponseWriter, r *http.Request) error {
	var body chatRequest
	c, err := s.begin(w, r, &body)
	if err != nil {
		return err
	}
	defer c.close()
	answer := chatCompletion{ID: newID("chatcmpl-"), Object: "chat.completion", Created: now(),
		Model: c.model.Name}
	if body.Stream {
		answer.Object = "chat.completion.chunk"
		s.streamChat(w, r, c, &body, answer)
		return nil
	}
	outputs, divided, err := c.answer(r.Context())
	if err != nil {
		return err
	}
	for i := range outputs {
		choice, err := body.choice(r.Context(), c, &outputs[i], divided[i].hasCalls())
		if err != nil {
			return err
		}
		choice.Message = divided[i].chatAnswer()
		answer.Choices = append(answer.Choices, choice)
	}
	answer.Usage = &c.record.usage
	writeJSON(w, http.StatusOK, answer)
	return nil
}

// chatAnswer joins the parts of a response. The content is null if there are only calls.
func (p *parts) chatAnswer() *chatAnswer {
	answer := &chatAnswer{Role: "assistant", ReasoningContent: p.text(reasoningPart)}
	for _, part := range p.all {
		if part.kind == callPart {
			answer.ToolCalls = append(answer.ToolCalls, answerCall{ID: part.id, Type: "function",
				Function: pagedllm.ToolFunctionCall{Name: part.name,
					Arguments: part.text.String()}})
		}
	}
	if content := p.text(contentPart); content != "" || answer.ToolCalls == nil {
		answer.Content = &content
	}
	return answer
}

// choice returns the end and the log probabilities of an output.
func (c *chatRequest) choice(ctx context.Context, conversation *conversation,
	output *pagedllm.Output, hasCalls bool) (choice chatChoice, err error) {
	reason, stop := finishReason(output)
	if reason == "stop" && hasCalls {
		reason = "tool_calls"
	}
	choice = chatChoice{Index: conversation.choice(output), FinishReason: orNull(reason),
		StopReason: stop}
	if c.Logprobs {
		rows, err := conversation.model.chatLogprobs(ctx, output)
		if err != nil {
			return choice, err
		}
		if rows != nil {
			choice.Logprobs = &chatLogprobs{rows}
		}
	}
	choice.choiceExtensions, err = c.samplingParams.report(ctx, conversation.model, output)
	return choice, err
}

func (s *Server) streamChat(w http.ResponseWriter, r *http.Request, c *conversation,
	body *chatRequest, event chatCompletion) {
	stream := newEventStream(w)
	event.Choices = make([]chatChoice, 1)
	hasCalls := make([]bool, c.open)
	for i := range hasCalls {
		event.Choices[0] = chatChoice{Index: i, Delta: &chatDelta{Role: "assistant"}}
		stream.add("", event)
	}
	err := stream.flush()
	if err == nil {
		err = c.each(r.Context(), s, stream, func(output *pagedllm.Output) error {
			return body.sendDeltas(r.Context(), stream, &event, c, output, hasCalls)
		})
	}
	if err != nil {
		stream.fail(r.Context(), err, "", toAPIError(err).openAI())
		return
	}
	if body.wantsUsage() {
		event.Choices, event.Usage = []chatChoice{}, &c.record.usage
		stream.add("", event)
	}
	stream.done()
}

// sendDeltas sends one event for each delta of an output. The last one also has the log
// probabilities and, at the end of a choice, the reason.
func (c *chatRequest) sendDeltas(ctx context.Context, stream *eventStream, event *chatCompletion,
	conversation *conversation, output *pagedllm.Output, hasCalls []bool) error {
	deltas, err := conversation.deltas(output)
	if err != nil {
		return err
	}
	index := conversation.choice(output)
	for i := range deltas {
		hasCalls[index] = hasCalls[index] || deltas[i].ToolCalls != nil
		if i < len(deltas)-1 {
			event.Choices[0] = chatChoice{Index: index, Delta: &chatDelta{ResponseDelta: deltas[i]}}
			stream.add("", event)
		}
	}
	last, err := c.choice(ctx, conversation, output, hasCalls[index])
	if err != nil {
		return err
	}
	last.Delta = &chatDelta{}
	if len(deltas) > 0 {
		last.Delta.ResponseDelta = deltas[len(deltas)-1]
	}
	if len(deltas) > 0 || last.FinishReason != nil || last.Logprobs != nil || last.TokenIDs != nil {
		event.Choices[0] = last
		stream.add("", event)
	}
	return nil
}
