package pagedllm

// #include "glue.h"
import "C"

import (
	"encoding/json"
	"runtime"
	"strings"
)

// A ResponseParser separates reasoning, content and tool calls of one response while it is
// generated. Feed it the texts of a request with ShowSpecial. Any number of goroutines may use it.
type ResponseParser struct {
	parser *shared[*C.pllm_response_parser]
}

// ResponseSettings are the settings of a ResponseParser.
type ResponseSettings struct {
	// Format is the way in which the model writes reasoning and tool calls. Empty: the format that the
	// model's chat template shows. BuildInfo lists all formats.
	Format string `json:"format,omitempty"`
	// Prompt is the rendered prompt. If it ends with the opening tag of the reasoning, the response
	// begins inside of the reasoning.
	Prompt string `json:"prompt,omitempty"`
	// Tools is the array of tools that the prompt contains, as OpenAI's API defines it. Formats whose
	// arguments have no quotes take from it which arguments are strings.
	Tools any `json:"tools,omitempty"`
	// ToolCallIDPrefix precedes the index of a call in its id. Empty: "call_".
	ToolCallIDPrefix string `json:"tool_call_id_prefix,omitempty"`
}

// A ResponseDelta is a part of a response, in the form in which a chat completion streams it. It has
// one of its members.
type ResponseDelta struct {
	Content          string          `json:"content,omitempty"`
	ReasoningContent string          `json:"reasoning_content,omitempty"`
	ToolCalls        []ToolCallDelta `json:"tool_calls,omitempty"`
}

// A ToolCallDelta begins a tool call, if it has an ID, or adds to the arguments of the call.
type ToolCallDelta struct {
	Index    int              `json:"index"`
	ID       string           `json:"id,omitempty"`
	Type     string           `json:"type,omitempty"`
	Function ToolFunctionCall `json:"function"`
}

// A ToolFunctionCall has the name of a function, at the beginning of a call, or a part of its
// arguments, which are JSON.
type ToolFunctionCall struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

// NewResponseParser creates the parser of one response. The parser does not need the engine later.
func (e *Engine) NewResponseParser(settings ResponseSettings) (*ResponseParser, error) {
	text, err := json.Marshal(settings)
	if err != nil {
		return nil, &Error{Code: ErrInvalidArgument, Message: "the settings cannot be encoded as JSON (" + err.Error() + ")"}
	}
	var c *C.pllm_response_parser
	err = e.engine.use(func(engine *C.pllm_engine) error {
		var args arguments
		defer args.Unpin()
		data, len := args.text(string(text))
		return check(C.pllm_response_parser_create(engine, data, len, &c))
	})
	if err != nil {
		return nil, err
	}
	free := func(c *C.pllm_response_parser) { C.pllm_response_parser_free(c) }
	p := &ResponseParser{&shared[*C.pllm_response_parser]{name: "parser", object: c, free: free}}
	whenUnreachable(p, p.parser.close)
	return p, nil
}

// Feed parses the next piece of the response.
func (p *ResponseParser) Feed(text string) ([]ResponseDelta, error) {
	return p.deltas(func(parser *C.pllm_response_parser, out **C.pllm_bytes) *C.pllm_error {
		var args arguments
		defer args.Unpin()
		data, len := args.text(text)
		return C.pllm_response_parser_feed(parser, data, len, out)
	})
}

// Finish ends the response and returns the deltas of the text that was held back.
func (p *ResponseParser) Finish() ([]ResponseDelta, error) {
	return p.deltas(func(parser *C.pllm_response_parser, out **C.pllm_bytes) *C.pllm_error {
		return C.pllm_response_parser_finish(parser, out)
	})
}

// Close frees the parser. It may be called at any time, more than once.
func (p *ResponseParser) Close() error {
	p.parser.close()
	return nil
}

func (p *ResponseParser) deltas(call func(*C.pllm_response_parser, **C.pllm_bytes) *C.pllm_error) (deltas []ResponseDelta, err error) {
	defer runtime.KeepAlive(p)
	err = p.parser.use(func(parser *C.pllm_response_parser) error {
		var out *C.pllm_bytes
		if err := check(call(parser, &out)); err != nil {
			return err
		}
		defer C.pllm_bytes_free(out)
		deltas, err = decodeDeltas(goText(C.pllm_bytes_data(out), C.pllm_bytes_len(out)))
		return err
	})
	return deltas, err
}

// decodeDeltas decodes the JSON of the library. Most pieces of a response are one piece of content or
// reasoning without escapes, for which encoding/json would cost more than all else that the host
// computes for a token.
func decodeDeltas(text string) (deltas []ResponseDelta, err error) {
	if piece, ok := onlyMember(text, "content"); ok {
		return []ResponseDelta{{Content: piece}}, nil
	}
	if piece, ok := onlyMember(text, "reasoning_content"); ok {
		return []ResponseDelta{{ReasoningContent: piece}}, nil
	}
	if text == "[]" {
		return nil, nil
	}
	err = json.Unmarshal([]byte(text), &deltas)
	return deltas, err
}

// onlyMember returns the text of [{"name":"text"}] if it has no escapes.
func onlyMember(text, name string) (piece string, ok bool) {
	if piece, ok = strings.CutPrefix(text, `[{"`+name+`":"`); ok {
		piece, ok = strings.CutSuffix(piece, `"}]`)
	}
	return piece, ok && !strings.ContainsAny(piece, `"\`)
}
