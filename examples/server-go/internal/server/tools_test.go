package server

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

const (
	// reply is a response in the format of Hermes. A grammar makes the model write it.
	reply = `<think>It adds.</think>I add.` + "\n<tool_call>\n" +
		`{"name": "add", "arguments": {"a": 7, "b": 5}}` + "\n</tool_call>"
	tools = `"tools": [{"type": "function", "function": {"name": "add", "description": "Adds.",
		"parameters": {"type": "object",
		"properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
			"required": ["a", "b"], "additionalProperties": false,
		"$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}}}}}]`
)

// scripted returns the parameter that makes the model write a text.
func scripted(t *testing.T, text string) string {
	t.Helper()
	choice, err := json.Marshal([]string{text})
	if err != nil {
		t.Fatal(err)
	}
	return `"structured_outputs": {"choice": ` + string(choice) + `}`
}

func TestChatsSeparateReasoningContentAndCalls(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{` + sum + `, ` + tools + `, ` + scripted(t, reply)
	answer := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices", 0)
	message := at(t, answer, "message")
	if at(t, message, "reasoning_content") != "It adds." ||
		strings.TrimSpace(at(t, message, "content").(string)) != "I add." ||
		at(t, message, "tool_calls", 0, "function", "name") != "add" ||
		at(t, answer, "finish_reason") != "tool_calls" {
		t.Errorf("%v", answer)
	}
	call := at(t, message, "tool_calls", 0, "function", "arguments")
	events := stream(t, server, "/v1/chat/completions", body+`, "stream": true}`)
	delta := []any{"choices", 0, "delta"}
	if joined(events, append(delta, "reasoning_content")...) != "It adds." ||
		strings.TrimSpace(joined(events, append(delta, "content")...)) != "I add." ||
		joined(events, append(delta, "tool_calls", 0, "function", "name")...) != "add" ||
		joined(events, append(delta, "tool_calls", 0, "function", "arguments")...) != call ||
		joined(events, "choices", 0, "finish_reason") != "tool_calls" {
		t.Errorf("%v", events)
	}
}

func TestMessagesHaveBlocks(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{"max_tokens": 200, ` + sum + `, "tools": [{"name": "add", "input_schema": {"type": ` +
		`"object"}}], ` + scripted(t, reply)
	answer := ask(t, server, "/v1/messages", body+`}`, 200)
	content := at(t, answer, "content").([]any)
	if len(content) != 3 || at(t, content[0], "thinking") != "It adds." ||
		at(t, content[1], "type") != "text" ||
		!reflect.DeepEqual(at(t, content[2], "input"), map[string]any{"a": 7.0, "b": 5.0}) ||
		at(t, answer, "stop_reason") != "tool_use" {
		t.Errorf("%v", answer)
	}
	events := stream(t, server, "/v1/messages", body+`, "stream": true}`)
	if joined(events, "delta", "thinking") != "It adds." ||
		strings.TrimSpace(joined(events, "delta", "text")) != "I add." ||
		joined(events, "delta", "partial_json") != `{"a": 7, "b": 5}` ||
		joined(events, "delta", "stop_reason") != "tool_use" {
		t.Errorf("%v", events)
	}
	starts, stops := 0, 0
	for _, e := range events {
		switch {
		case e.name != at(t, e.data, "type"):
			t.Errorf("%v", e)
		case e.name == "content_block_start":
			starts++
		case e.name == "content_block_stop":
			stops++
		}
	}
	if starts != 3 || stops != 3 || events[0].name != "message_start" ||
		events[len(events)-1].name != "message_stop" {
		t.Errorf("%v", events)
	}
}

func TestMessagesContinueTheLastMessageAndStop(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	answer := ask(t, server, "/v1/messages", `{"max_tokens": 8, "temperature": 0,
		"stop_sequences": ["s."], "messages": [
		{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant",
			"content": "The capital of France is"}]}`, 200)
	if at(t, answer, "content", 0, "text") != " Pari" ||
		at(t, answer, "stop_reason") != "stop_sequence" || at(t, answer, "stop_sequence") != "s." {
		t.Errorf("%v", answer)
	}
	count := ask(t, server, "/v1/messages/count_tokens",
		`{"system": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": `+
			`"b"}]}]}`, 200)
	if at(t, count, "input_tokens").(float64) < 5 {
		t.Errorf("%v", count)
	}
}

func TestResponsesHaveItems(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{"input": "What is 7 + 5?", "temperature": 0, "tools": [{"type": "function",
		"name": ` +
		`"add", "parameters": {"type": "object"}}], ` + scripted(t, reply)
	answer := ask(t, server, "/v1/responses", body+`}`, 200)
	output := at(t, answer, "output").([]any)
	if len(output) != 3 || at(t, output[0], "content", 0, "text") != "It adds." ||
		at(t, output[1], "role") != "assistant" ||
		at(t, output[2], "arguments") != `{"a": 7, "b": 5}` ||
		at(t, answer, "status") != "completed" {
		t.Errorf("%v", answer)
	}
	events := stream(t, server, "/v1/responses", body+`, "stream": true}`)
	texts := map[string]string{"response.reasoning_text.delta": "",
		"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
	for i, e := range events {
		if at(t, e.data, "sequence_number") != float64(i) || at(t, e.data, "type") != e.name {
			t.Errorf("%v", e)
		}
		if _, ok := texts[e.name]; ok {
			texts[e.name] += at(t, e.data, "delta").(string)
		}
	}
	if texts["response.reasoning_text.delta"] != "It adds." ||
		strings.TrimSpace(texts["response.output_text.delta"]) != "I add." ||
		texts["response.function_call_arguments.delta"] != `{"a": 7, "b": 5}` {
		t.Errorf("%v", texts)
	}
	last := events[len(events)-1]
	if last.name != "response.completed" || len(at(t, last.data, "response",
		"output").([]any)) != 3 {
		t.Errorf("%v", last)
	}
}

// TestAConversationWithToolResultsIsRendered sends the same conversation to the three APIs.
func TestAConversationWithToolResultsIsRendered(t *testing.T) {
	model := open(t, pagedllm.Options{})
	var chat chatRequest
	var anthropic messagesRequest
	var items responsesRequest
	for body, value := range map[string]any{
		`{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
			{"role": "assistant", "content": null,
			"tool_calls": [{"id": "1", "type": "function", "function": {"name": "add",
				"arguments": "{\"a\": 7}"}}]}, {"role": "tool", "tool_call_id": "1",
				"content": "12"}]}`: &chat,
		`{"max_tokens": 1, "system": "s", "messages": [{"role": "user", "content": "u"},
			{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add",
			"input": {"a": 7}}]},
			{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
				"content": [{"type": "text", "text": "12"}]}]}]}`: &anthropic,
		`{"instructions": "s", "input": [{"role": "user", "content": "u"},
			{"type": "function_call", "call_id": "1", "name": "add", "arguments": "{\"a\": 7}"},
			{"type": "function_call_output", "call_id": "1", "output": "12"}]}`: &items,
	} {
		if err := decodeStrictly([]byte(body), value); err != nil {
			t.Fatal(err)
		}
	}
	var prompts []string
	for _, request := range []interface{ turn() (*turn, error) }{&chat, &anthropic, &items} {
		turn, err := request.turn()
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(turn.messages)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := model.render(turn); err != nil {
			t.Error(err)
		}
		prompts = append(prompts, strings.ReplaceAll(string(text), " ", ""))
	}
	if prompts[0] != prompts[1] || prompts[0] != prompts[2] ||
		!strings.Contains(prompts[0], `"arguments":{"a":7}`) {
		t.Errorf("%q", prompts)
	}
}

func TestAForcedCallIsValid(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{` + sum + `, ` + tools + `, "max_tokens": 200, "tool_choice": `
	for _, choice := range []string{`"required", "parallel_tool_calls": false`,
		`{"type": "function", "function": {"name": "add"}}`} {
		answer := at(t, ask(t, server, "/v1/chat/completions", body+choice+`}`, 200), "choices", 0)
		calls := at(t, answer, "message", "tool_calls").([]any)
		if len(calls) != 1 || at(t, answer, "message", "content") != nil ||
			at(t, answer, "finish_reason") != "tool_calls" {
			t.Errorf("%s: %v", choice, answer)
			continue
		}
		var arguments struct{ A, B *int }
		if err := json.Unmarshal([]byte(at(t, calls[0], "function", "arguments").(string)),
			&arguments); err != nil || arguments.A == nil || arguments.B == nil {
			t.Errorf("%s: %v, %v", choice, calls, err)
		} else if *arguments.A > 9 || *arguments.B > 9 {
			t.Errorf("%s: %v", choice, calls)
		}
	}
	none := at(t, ask(t, server, "/v1/chat/completions", body+`"none"}`, 200), "choices", 0,
		"message")
	if at(t, none, "tool_calls") != nil || at(t, none, "content") != "12" {
		t.Errorf("%v", none)
	}
	for _, choice := range []string{`{"type": "function", "function": {"name": "subtract"}}`,
		`"any"`, `{"type": "allowed_tools"}`,
		`"required", "response_format": {"type": "json_object"}`} {
		ask(t, server, "/v1/chat/completions", body+choice+`}`, 400)
	}
}

func TestSeveralStreamedChoicesEqualCompleteOnes(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "n": 3, ` +
		`"seed": 2, "temperature": 1.2, "max_tokens": 60`
	choices := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices").([]any)
	texts := make([]string, 3)
	for _, e := range stream(t, server, "/v1/chat/completions", body+`, "stream": true}`) {
		if e.data != nil {
			choice := at(t, e.data, "choices", 0)
			content, _ := at(t, choice, "delta", "content").(string)
			texts[int(at(t, choice, "index").(float64))] += content
		}
	}
	for i, choice := range choices {
		if want := at(t, choice, "message", "content"); texts[i] != want || want == "" {
			t.Errorf("%d: %q, want %q", i, texts[i], want)
		}
	}
	if texts[0] == texts[1] && texts[1] == texts[2] {
		t.Errorf("three equal samples: %q", texts)
	}
}

func TestTheFormatTextHasOnlyContent(t *testing.T) {
	model := open(t, pagedllm.Options{})
	model.Format = "text"
	server := start(t, limits(), model)
	body := `{` + sum + `, ` + scripted(t, reply)
	message := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices", 0, "message")
	if at(t, message, "content") != reply || at(t, message, "tool_calls") != nil {
		t.Errorf("%v", message)
	}
	if text := joined(stream(t, server, "/v1/chat/completions", body+`, "stream": true}`),
		"choices", 0, "delta", "content"); text != reply {
		t.Errorf("%q", text)
	}
}

// withTemplate makes a model directory with another chat template.
func withTemplate(t *testing.T, template string) (path string) {
	t.Helper()
	path = t.TempDir()
	for _, name := range []string{"config.json", "generation_config.json", "model.safetensors",
		"tokenizer.json", "tokenizer_config.json"} {
		original, err := filepath.Abs(filepath.Join("../../../model", name))
		if err == nil {
			err = os.Symlink(original, filepath.Join(path, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(path, "chat_template.jinja"), []byte(template),
		0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTheChatTemplateHasTheToolsAndSelectsTheFormat(t *testing.T) {
	model := open(t, pagedllm.Options{ModelPath: withTemplate(t, `{% for tool in tools %}[{{ tool.function.name }}: {{ tool.function.parameters.type }}]{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}{% if enable_thinking is false %}<think></think>{% endif %}`)})
	model.Format = ""
	server := start(t, limits(), model)
	messages := `"messages": [{"role": "user", "content": "u"}, {"role": "assistant",
		"content": null,
		"tool_calls": [{"id": "1", "type": "function", "function": {"name": "add",
			"arguments": "{\"a\":7}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "12"}]`
	tokens := at(t, ask(t, server, "/tokenize", `{`+messages+`, `+tools+
		`, "chat_template_kwargs": {"enable_thinking": false}}`, 200), "tokens")
	prompt := at(t, ask(t, server, "/detokenize", `{"tokens": `+
		strings.ReplaceAll(fmt.Sprint(tokens), " ", ", ")+`}`, 200), "prompt")
	const want = `[add: object]<|user|>u<|assistant|><tool_call>{"name": "add", "arguments": ` +
		`{"a": 7}}</tool_call><|tool|>12<think></think>`
	if prompt != want {
		t.Errorf("%q, want %q", prompt, want)
	}
	choice := at(t, ask(t, server, "/v1/chat/completions", `{`+messages+`, `+tools+`, `+
		scripted(t, reply)+`}`, 200), "choices", 0)
	if at(t, choice, "message", "tool_calls", 0, "function", "name") != "add" ||
		at(t, choice, "finish_reason") != "tool_calls" {
		t.Errorf("%v", choice)
	}
}

func TestTokensOfPromptsAreCounted(t *testing.T) {
	// The bundled template has no tools.
	model := open(t, pagedllm.Options{ModelPath: withTemplate(t,
		`{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages `+
			`%}{{ message.content }}{% endfor %}`)})
	server := start(t, limits(), model)
	count := func(extra string) any {
		body := `{"messages": [{"role": "user", "content": "What is 7 + 5?"}]` + extra
		count := at(t, ask(t, server, "/v1/messages/count_tokens", body+`}`, 200), "input_tokens")
		events := stream(t, server, "/v1/messages", body+`, "max_tokens": 1, "stream": true}`)
		if streamed := at(t, events[0].data, "message", "usage",
			"input_tokens"); streamed != count {
			t.Errorf("%s: a stream begins with %v, want %v", extra, streamed, count)
		}
		return count
	}
	const tool = `, "tools": [{"name": "add", "input_schema": {"type": "object"}}], "tool_choice": `
	without, none, auto := count(``), count(tool+`{"type": "none"}`), count(tool+`{"type": "auto"}`)
	if without != none || auto.(float64) <= none.(float64) {
		t.Errorf("%v, %v, %v", without, none, auto)
	}
}

func TestAnEmptyInputIsNamed(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for path, want := range map[string]string{"/v1/responses": "input",
		"/v1/chat/completions": "messages"} {
		for _, body := range []string{`{}`, `{"` + want + `": []}`} {
			if param := at(t, ask(t, server, path, body, 400), "error", "param"); param != want {
				t.Errorf("%s %s: %v", path, body, param)
			}
		}
	}
}
