package server

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

const twoCalls = `I add.<tool_call>{"name": "add", "arguments": {"a": ` +
	`1}}</tool_call><tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>`

func TestRequestsWithoutToolsHaveNoCalls(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for _, extra := range []string{``, `, ` + tools + `, "tool_choice": "none"`} {
		body := `{` + sum + `, ` + scripted(t, reply) + extra
		choice := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices", 0)
		content := strings.TrimPrefix(reply, "<think>It adds.</think>")
		message := at(t, choice, "message")
		if at(t, message, "content") != content ||
			at(t, message, "reasoning_content") != "It adds." ||
			at(t, message, "tool_calls") != nil || at(t, choice, "finish_reason") != "stop" {
			t.Errorf("%s: %v", extra, choice)
		}
		if text := joined(stream(t, server, "/v1/chat/completions", body+`, "stream": true}`),
			"choices", 0, "delta", "content"); text != content {
			t.Errorf("%s: %q", extra, text)
		}
	}
}

// TestCallsOfOtherFormatsBecomeContent has formats whose reasoning has other tags.
func TestCallsOfOtherFormatsBecomeContent(t *testing.T) {
	for format, response := range map[string]string{
		"mistral": `[THINK]Hm.[/THINK]a[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ` +
			`{"name": "g", "arguments": {}}]`,
		"granite": `Here is my thought process: Hm. Here is my response: a<|tool_call|>[{"name": ` +
			`"f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]`,
	} {
		model := open(t, pagedllm.Options{})
		model.Format = format
		server := start(t, limits(), model)
		body := `{` + sum + `, ` + scripted(t, response)
		choice := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices", 0)
		content, _ := at(t, choice, "message", "content").(string)
		reasoning, _ := at(t, choice, "message", "reasoning_content").(string)
		if strings.Join(strings.Fields(content),
			"") != `a{"name":"f","arguments":{"x":1}}{"name":"g","arguments":{}}` ||
			strings.TrimSpace(reasoning) != "Hm." || at(t, choice, "finish_reason") != "stop" {
			t.Errorf("%s: %v", format, choice)
		}
	}
}

func TestAResponseThatBeginsWithItsReasoningIsSeparatedWithoutTools(t *testing.T) {
	model := open(t, pagedllm.Options{})
	model.Format = "deepseek_r1"
	server := start(t, limits(), model)
	message := at(t, ask(t, server, "/v1/chat/completions", `{`+sum+`, `+
		scripted(t, `Hm.</think>12`)+`}`, 200), "choices", 0, "message")
	if at(t, message, "content") != "12" || at(t, message, "reasoning_content") != "Hm." {
		t.Error(message)
	}
}

func TestAnAnswerWithASchemaIsContent(t *testing.T) {
	model := open(t, pagedllm.Options{})
	model.Format = "json" // its calls are objects with these members
	server := start(t, limits(), model)
	schema := `{"type": "object", "properties": {"name": {"const": "add"},
		"arguments": {"const": ` +
		`{}}}, "required": ["name", "arguments"], "additionalProperties": false}`
	body := `{` + sum + `, ` + tools + `, "response_format": {"type": "json_schema", ` +
		`"json_schema": {"name": "s", "schema": ` + schema + `}}}`
	choice := at(t, ask(t, server, "/v1/chat/completions", body, 200), "choices", 0)
	content, _ := at(t, choice, "message", "content").(string)
	if strings.Join(strings.Fields(content), "") != `{"name":"add","arguments":{}}` ||
		at(t, choice, "message", "tool_calls") != nil {
		t.Error(choice)
	}
}

func TestParallelCallsCanBeDisabled(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for extra, want := range map[string]int{``: 2, `, "parallel_tool_calls": false`: 1} {
		body := `{` + sum + `, ` + tools + `, ` + scripted(t, twoCalls) + extra
		calls := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices", 0,
			"message", "tool_calls").([]any)
		if len(calls) != want || at(t, calls[0], "function", "arguments") != `{"a": 1}` {
			t.Errorf("%s: %v", extra, calls)
		}
		names := joined(stream(t, server, "/v1/chat/completions", body+`, "stream": true}`),
			"choices", 0, "delta", "tool_calls", 0, "function", "name")
		if names != strings.Repeat("add", want) {
			t.Errorf("%s: %v", extra, names)
		}
	}
	answer := ask(t, server, "/v1/messages", `{`+sum+
		`, "max_tokens": 300, "tools": [{"name": "add", "input_schema": {"type": "object"}}], `+
		`"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}, `+
		scripted(t, twoCalls)+`}`, 200)
	if content := at(t, answer, "content").([]any); len(content) != 2 {
		t.Error(content)
	}
}

func TestACallThatMaxTokensCutsIsIncomplete(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	whole := `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2345678}}</tool_call>`
	tokens := at(t, ask(t, server, "/tokenize", `{"prompt": `+quoted(whole[:len(whole)-20])+
		`, "add_special_tokens": false}`, 200), "count")
	cut := `_tokens": ` + quoted(tokens) + `, ` + scripted(t, whole)
	body := `{"input": "a", "tools": [{"type": "function", "name": "add"}], "max_output` + cut
	answer := ask(t, server, "/v1/responses", body+`}`, 200)
	if at(t, answer, "status") != "incomplete" ||
		at(t, answer, "output", 0, "type") != "function_call" ||
		at(t, answer, "output", 0, "status") != "incomplete" {
		t.Error(answer)
	}
	events := stream(t, server, "/v1/responses", body+`, "stream": true}`)
	if joined(events, "item", "status") != "in_progressincomplete" ||
		events[len(events)-1].name != "response.incomplete" {
		t.Error(events)
	}
	message := ask(t, server, "/v1/messages", `{`+sum+
		`, "tools": [{"name": "add", "input_schema": {}}], "max`+cut+`}`, 200)
	if len(at(t, message, "content").([]any)) != 0 ||
		at(t, message, "stop_reason") != "max_tokens" {
		t.Error(message)
	}
}

func quoted(value any) string {
	text, _ := json.Marshal(value)
	return string(text)
}

func TestInputsOfMessagesAreObjects(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{` + sum + `, "max_tokens": 300, "tools": [{"name": "add", "input_schema": {}}], `
	answer := ask(t, server, "/v1/messages",
		body+scripted(t, `a<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>`)+`}`, 200)
	for _, block := range at(t, answer, "content").([]any) {
		if at(t, block, "type") == "tool_use" {
			t.Error(answer)
		}
	}
}

func TestIdsOfCallsHaveNineLettersAndDigits(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	answer := ask(t, server, "/v1/chat/completions", `{`+sum+`, `+tools+`, `+scripted(t, twoCalls)+
		`}`, 200)
	calls := at(t, answer, "choices", 0, "message", "tool_calls").([]any)
	first, second := at(t, calls[0], "id").(string), at(t, calls[1], "id").(string)
	if valid := regexp.MustCompile(`^[0-9A-Za-z]{9}$`); !valid.MatchString(first) ||
		!valid.MatchString(second) || first == second {
		t.Errorf("%q, %q", first, second)
	}
	if _, ok := calls[0].(map[string]any)["index"]; ok {
		t.Error("a call that is not streamed has an index")
	}
}

func TestSchemasOfForcedCallsCanReferToThemselves(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for name, parameters := range map[string]string{
		"none": `null`,
		"defs": `{"type": "object", "properties": {"a": {"$ref": "#/$defs/digit"}}, ` +
			`"required": ["a"], "additionalProperties": false, "$defs": {"digit": {"type": ` +
			`"integer", "maximum": 9}}}`,
		"definitions": `{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", ` +
			`"properties": {"a": {"$ref": "#/definitions/digit"}}, "required": ["a"], ` +
			`"additionalProperties": false, "definitions": {"digit": {"enum": [7]}}}`,
		"root": `{"$id": "https://example.com/tree", "type": "object", "properties": {"a": ` +
			`{"const": 7}, "next": {"$ref": "#"}}, "required": ["a"], "additionalProperties": ` +
			`false}`,
		"pointer": `{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": ` +
			`"#/properties/a"}}, "required": ["a"], "additionalProperties": false}`,
	} {
		// Another tool defines the same name differently.
		body := `{` + sum + `, "tools": [{"type": "function", "function": {"name": "f",
			"parameters": ` + parameters + `}},
			{"type": "function", "function": {"name": "g",
				"parameters": {"$defs": {"digit": {"type": "string"}}}}}],
				"tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 60}`
		choice := at(t, ask(t, server, "/v1/chat/completions", body, 200), "choices", 0)
		if calls, _ := at(t, choice, "message", "tool_calls").([]any); len(calls) != 1 {
			t.Errorf("%s: %v", name, choice)
		}
	}
}

func TestReferencesWithinASchemaAreRebased(t *testing.T) {
	for schema, want := range map[string]string{
		`{"$ref": "#"}`: `{"$ref":"#/p"}`,
		`{"z": [{"$ref": "#/a/0"}, 1.50], "a": ` +
			`{}}`: `{"z":[{"$ref":"#/p/a/0"},1.50],"a":{}}`,
		`{"properties": {"$ref": {"$ref": "#/x"}, "default": {"$ref": ` +
			`"#"}}}`: `{"properties":{"$ref":{"$ref":"#/p/x"},"default":{"$ref":"#/p"}}}`,
		`{"default": {"$ref": "#"}, "enum": [{"$ref": ` +
			`"#/x"}]}`: `{"default":{"$ref":"#"},"enum":[{"$ref":"#/x"}]}`,
		`{"$id": "a", "$schema": "b", "items": {"$ref": ` +
			`"#anchor"}}`: `{"items":{"$ref":"#anchor"}}`,
		`true`: `true`, `[]`: `[]`,
	} {
		if got, err := rebased(json.RawMessage(schema), "#/p"); err != nil || string(got) != want {
			t.Errorf("%s: %s, %v", schema, got, err)
		}
	}
}

func TestAnUnknownFormatIsRefusedAtTheStart(t *testing.T) {
	model := open(t, pagedllm.Options{})
	model.Format = "klingon"
	if _, err := New([]*Model{&model}, limits()); err == nil ||
		!strings.Contains(err.Error(), "klingon") {
		t.Error(err)
	}
}
