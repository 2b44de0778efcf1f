package server

import (
	"bytes"
	"encoding/json"
	"strings"
)

// rebased returns a JSON schema that is a part of another schema: its references to itself (#,
// #/$defs/x) begin with the position of that part, such as #/$defs/tool0. The order of its members
// is that in which a model writes the properties, and does not change.
func rebased(schema json.RawMessage, position string) (json.RawMessage, error) {
	r := rebaser{in: json.NewDecoder(bytes.NewReader(schema)), position: position}
	r.in.UseNumber()
	err := r.value(schemaValue, true)
	return r.out.Bytes(), err
}

type rebaser struct {
	in       *json.Decoder
	out      bytes.Buffer
	position string
}

// A schemaPart is what a value within a schema is.
type schemaPart int

const (
	schemaValue  schemaPart = iota // a schema, or the value of a keyword
	schemasValue                   // an object of schemas by name
	dataValue                      // data, in which nothing is a reference
)

// of returns what a member is.
func (p schemaPart) of(name string) schemaPart {
	switch {
	case p == schemasValue:
		return schemaValue
	case p == dataValue:
		return dataValue
	}
	switch name {
	case "properties", "patternProperties", "dependentSchemas", "$defs", "definitions":
		return schemasValue
	case "const", "enum", "default", "examples":
		return dataValue
	}
	return schemaValue
}

// value copies the next value.
func (r *rebaser) value(part schemaPart, isRoot bool) error {
	token, err := r.in.Token()
	if err != nil {
		return err
	}
	switch token {
	case json.Delim('{'):
		return r.object(part, isRoot)
	case json.Delim('['):
		return r.array(part)
	}
	return r.write(token)
}

func (r *rebaser) array(part schemaPart) error {
	r.out.WriteByte('[')
	for i := 0; r.in.More(); i++ {
		if i > 0 {
			r.out.WriteByte(',')
		}
		if err := r.value(part, false); err != nil {
			return err
		}
	}
	r.out.WriteByte(']')
	_, err := r.in.Token()
	return err
}

func (r *rebaser) object(part schemaPart, isRoot bool) error {
	r.out.WriteByte('{')
	begin := r.out.Len()
	for r.in.More() {
		token, err := r.in.Token()
		if err != nil {
			return err
		}
		name, _ := token.(string)
		if isRoot && (name == "$id" || name == "$schema") { // only for the root of a document
			var dropped json.RawMessage
			if err := r.in.Decode(&dropped); err != nil {
				return err
			}
			continue
		}
		if r.out.Len() > begin {
			r.out.WriteByte(',')
		}
		if err := r.member(name, part); err != nil {
			return err
		}
	}
	r.out.WriteByte('}')
	_, err := r.in.Token()
	return err
}

func (r *rebaser) member(name string, part schemaPart) error {
	if err := r.write(name); err != nil {
		return err
	}
	r.out.WriteByte(':')
	if part == schemaValue && name == "$ref" {
		return r.reference()
	}
	return r.value(part.of(name), false)
}

// reference copies the value of $ref.
func (r *rebaser) reference() error {
	var value any
	if err := r.in.Decode(&value); err != nil {
		return err
	}
	text, _ := value.(string)
	if rest, ok := strings.CutPrefix(text, "#"); ok && (rest == "" || rest[0] == '/') {
		value = r.position + rest
	}
	return r.write(value)
}

func (r *rebaser) write(value any) error {
	text, err := json.Marshal(value)
	r.out.Write(text)
	return err
}
