package server

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A tool is a function that the model can call.
type tool struct {
	Type     string       `json:"type"`
	Function toolFunction `json:"function"`
}

type toolFunction struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Parameters  json.RawMessage `json:"parameters,omitempty"`
	// Strict has no effect: arguments are constrained if the tool choice forces a call.
	Strict *bool `json:"strict,omitempty"`
}

func checkTools(tools []tool) error {
	for i := range tools {
		if tools[i].Type != "function" {
			return unsupported("tools", fmt.Sprintf(`tools[%d].type is %q; must be "function"`, i,
				tools[i].Type))
		}
		if tools[i].Function.Name == "" {
			return badRequest("tools", fmt.Sprintf("tools[%d] has no name", i))
		}
		if string(tools[i].Function.Parameters) == "null" {
			tools[i].Function.Parameters = nil
		}
		tools[i].Function.Strict = nil // not for the chat template
	}
	return nil
}

// A toolChoice is whether the model has to call a tool.
type toolChoice struct {
	mode string // "", "auto", "none", "required"; "named" with a name
	name string
}

// forced reports whether the response has to be a tool call.
func (c *toolChoice) forced() bool { return c.mode == "required" || c.mode == "named" }

// UnmarshalJSON takes the forms of chat completions and of responses.
func (c *toolChoice) UnmarshalJSON(data []byte) error {
	if json.Unmarshal(data, &c.mode) == nil {
		if !slices.Contains([]string{"", "auto", "none", "required"}, c.mode) {
			return badRequest("tool_choice",
				fmt.Sprintf(`tool_choice is %q; must be "auto", "none", "required" or a function`,
					c.mode))
		}
		return nil
	}
	var named struct {
		Type     string `json:"type"`
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	}
	if json.Unmarshal(data, &named) != nil || named.Type != "function" {
		return unsupported("tool_choice", `tool_choice is not supported; send "auto", "none", `+
			`"required" or a function`)
	}
	if err := decodeStrictly(data, &named); err != nil {
		return err
	}
	c.mode, c.name = "named", nonEmpty(named.Function.Name, named.Name)
	return nil
}

// callGrammar allows only calls of the tools: a JSON array of objects with name and arguments,
// which the parser of the format "json" takes.
func (t *turn) callGrammar() (pagedllm.Grammar, error) {
	var items []any
	definitions := map[string]json.RawMessage{}
	for i, tool := range t.tools {
		if t.choice.mode == "named" && tool.Function.Name != t.choice.name {
			continue
		}
		parameters := tool.Function.Parameters
		if parameters == nil {
			parameters = json.RawMessage(`{"type": "object"}`)
		}
		name := fmt.Sprintf("tool%d", i)
		rebased, err := rebased(parameters, "#/$defs/"+name)
		if err != nil {
			return pagedllm.Grammar{}, notASchema(err)
		}
		definitions[name] = rebased
		items = append(items, map[string]any{
			"type":                 "object",
			"properties":           callProperties{tool.Function.Name, name},
			"required":             []string{"name", "arguments"},
			"additionalProperties": false,
		})
	}
	if len(items) == 0 {
		return pagedllm.Grammar{}, badRequest("tool_choice",
			fmt.Sprintf("tool_choice forces a call of %q, which is not in tools; send the tool",
				nonEmpty(t.choice.name, "a tool")))
	}
	schema := map[string]any{"type": "array", "minItems": 1,
		"items": map[string]any{"anyOf": items}, "$defs": definitions}
	if t.oneCall || t.choice.mode == "named" {
		schema["maxItems"] = 1
	}
	text, err := json.Marshal(schema)
	if err != nil {
		return pagedllm.Grammar{}, notASchema(err)
	}
	return pagedllm.JSONSchema(string(text)), nil
}

func notASchema(err error) *apiError {
	return badRequest("tools", "the parameters of a tool are not a JSON schema ("+err.Error()+")")
}

// callProperties are the properties of a call in the order in which the model has to write them.
type callProperties struct{ name, definition string }

func (c callProperties) MarshalJSON() ([]byte, error) {
	name, err := json.Marshal(c.name)
	return fmt.Appendf(nil, `{"name": {"const": %s}, "arguments": {"$ref": "#/$defs/%s"}}`, name,
		c.definition), err
}

// isObject reports whether a text is a JSON object.
func isObject(text string) bool {
	return strings.HasPrefix(strings.TrimSpace(text), "{") && json.Valid([]byte(text))
}

// newCallID returns an id for a tool call. The templates of Mistral take only ids of nine letters
// and digits.
func newCallID() string {
	const letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	var id [9]byte
	rand.Read(id[:])
	for i := range id {
		id[i] = letters[id[i]%62]
	}
	return string(id[:])
}

// responseFormat is the format of the content in chats, and, without the level of json_schema, in
// responses.
type responseFormat struct {
	Type       string      `json:"type"`
	JSONSchema *schemaSpec `json:"json_schema"`
}

type schemaSpec struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Schema      json.RawMessage `json:"schema"`
	Strict      *bool           `json:"strict"`
}

// grammar returns the constraint, or nil for text.
func (f *responseFormat) grammar(param string) (*pagedllm.Grammar, error) {
	switch {
	case f == nil || f.Type == "text":
		return nil, nil
	case f.Type == "json_object":
		return pagedllm.Ptr(pagedllm.JSONObject()), nil
	case f.Type == "json_schema" && f.JSONSchema != nil && len(f.JSONSchema.Schema) > 0:
		return pagedllm.Ptr(pagedllm.JSONSchema(string(f.JSONSchema.Schema))), nil
	case f.Type == "json_schema":
		return nil, badRequest(param, param+" has no schema; send one")
	}
	return nil, badRequest(param, fmt.Sprintf(`%s.type is %q; must be "text", "json_object" or `+
		`"json_schema"`, param, f.Type))
}
