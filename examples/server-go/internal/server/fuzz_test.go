package server

import (
	"errors"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// FuzzBodies converts bodies to requests of the engine, up to the call of the engine. A body is
// valid, or is refused with a status below 500.
func FuzzBodies(f *testing.F) {
	for _, body := range []string{
		`{` + france + `, "n": 2, "stop": ["a"], "logit_bias": {"5": -100}, "logprobs": 3,
			"dry": ` +
			`{"base": 2}, "beam": {"width": 3}}`,
		`{` + sum + `, ` + tools + `, "tool_choice": "required", "stream": true, ` +
			`"stream_options": {"include_usage": true}}`,
		`{` + sum + `, "response_format": {"type": "json_schema", "json_schema": {"schema": ` +
			`{"type": "object"}}}, "max_completion_tokens": 5}`,
		`{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}], ` +
			`"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]}`,
		`{"max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user",
			"content": [{"type": "tool_result", "tool_use_id": "1", "content": "12"}]}],
			"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool",
				"name": "f"}, "thinking": {"type": "enabled", "budget_tokens": 5}}`,
		`{"instructions": "i", "input": [{"type": "function_call", "call_id": "1", "name": "f",
			"arguments": "{}"}, {"type": "reasoning", "content": []}],
			"tools": [{"type": "function", "name": "f"}],
				"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}`,
		`{"prompt": [[1, 2], [3]], "structured_outputs": {"choice": ["a"]}, "max_tokens": 0, ` +
			`"echo": true}`,
	} {
		f.Add([]byte(body))
	}
	type chat interface{ turn() (*turn, error) }
	check := func(t *testing.T, err error) {
		var api *apiError
		if err != nil && (!errors.As(err, &api) || api.status >= 500 || api.message == "") {
			t.Errorf("%#v", err)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var completion completionRequest
		err := decodeStrictly(body, &completion)
		if err == nil {
			var request pagedllm.Request
			request, err = completion.request()
			if err == nil && request.N < 0 {
				t.Errorf("%+v", request)
			}
		}
		check(t, err)
		for _, value := range []chat{&chatRequest{}, &messagesRequest{}, &responsesRequest{}} {
			err := decodeStrictly(body, value)
			var turn *turn
			if err == nil {
				turn, err = value.turn()
			}
			if err == nil {
				_, err = turn.request()
			}
			check(t, err)
		}
	})
}
