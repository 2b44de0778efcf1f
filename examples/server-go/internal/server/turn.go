package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
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
	c := &conversation{turn: t}
	if c.generation, err = s.start(ctx, model, request, prompts{prompt}, t.stream); err != nil {
		return nil, err
	}
	// Only now: start limits the number of choices and the length of the prompt.
	choices := c.generation.results
	c.inCall = make([]bool, choices)
	if format != "text" {
		if err := c.addParsers(model, t, format, prompt.text, choices); err != nil {
			c.close()
			return nil, err
		}
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

func now() int64 { return time.Now().Unix() }
