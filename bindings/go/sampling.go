package pagedllm

// #include "glue.h"
import "C"

// A Grammar is a constraint on the output. JSONSchema, JSONObject, Regex, Choice and Lark create
// it. The zero Grammar is no constraint.
type Grammar struct {
	kind    uint32
	text    string
	choices []string
}

// JSONSchema allows the JSON texts that the schema, itself a JSON text, describes.
func JSONSchema(schema string) Grammar {
	return Grammar{kind: C.PLLM_GRAMMAR_JSON_SCHEMA, text: schema}
}

// JSONObject allows any JSON object.
func JSONObject() Grammar { return Grammar{kind: C.PLLM_GRAMMAR_JSON_OBJECT} }

// Regex allows the texts that the regular expression matches as a whole.
func Regex(expression string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_REGEX, text: expression} }

// Choice allows one of the texts.
func Choice(texts ...string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_CHOICE, choices: texts} }

// Lark allows the texts that the Lark grammar describes.
func Lark(grammar string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_LARK, text: grammar} }

// Ptr returns a pointer to a value, for fields for which 0 is not the default. From Go 1.26 on, new
// does the same.
func Ptr[T any](value T) *T { return &value }

// set sets the fields of the constraint.
func (g Grammar) set(args *arguments, c *C.pllm_sampling) {
	c.grammar_kind = C.uint32_t(g.kind)
	if g.kind != C.PLLM_GRAMMAR_NONE {
		c.grammar, c.grammar_len = args.text(g.text)
	}
	c.choices, c.choice_lens, c.choice_count = args.texts(g.choices)
}
