package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"
)

// checkKeys refuses what encoding/json accepts: two members with one name, and names of parameters
// in another case. A proxy that checks the body can take the other one of two members. The body is
// valid JSON, because it has been decoded as a value of type t. The tokens of encoding/json would
// take seconds for a body of numbers.
func checkKeys(body []byte, t reflect.Type) error {
	c := keyChecker{body: body}
	return c.value(t)
}

type keyChecker struct {
	body []byte
	at   int
}

// next returns the next byte that is no space.
func (c *keyChecker) next() byte {
	for {
		switch b := c.body[c.at]; b {
		case ' ', '\t', '\r', '\n':
			c.at++
		default:
			return b
		}
	}
}

// value checks the next value. t is nil if its names are not parameters.
func (c *keyChecker) value(t reflect.Type) error {
	switch c.next() {
	case '{':
		return c.object(t)
	case '[':
		return c.array(elementOf(t, reflect.Slice))
	case '"':
		c.skipText()
		return nil
	}
	// A number or a name.
	for c.at < len(c.body) && strings.IndexByte(",]} \t\r\n", c.body[c.at]) < 0 {
		c.at++
	}
	return nil
}

func (c *keyChecker) array(element reflect.Type) error {
	c.at++
	for c.next() != ']' {
		if err := c.value(element); err != nil {
			return err
		}
		if c.next() == ',' {
			c.at++
		}
	}
	c.at++
	return nil
}

func (c *keyChecker) object(t reflect.Type) error {
	parameters, element := parametersOf(t), elementOf(t, reflect.Map)
	seen := make(map[string]bool)
	c.at++
	for c.next() != '}' {
		name := c.text()
		if seen[name] {
			return badRequest(name, fmt.Sprintf("an object has two members %q; send one", name))
		}
		seen[name] = true
		next := element
		if parameters != nil {
			known := false
			// encoding/json has accepted another case.
			if next, known = parameters[name]; !known {
				return unknown(name, fmt.Sprintf("send %q", strings.ToLower(name)))
			}
		}
		c.next() // is the colon
		c.at++
		if err := c.value(next); err != nil {
			return err
		}
		if c.next() == ',' {
			c.at++
		}
	}
	c.at++
	return nil
}

// skipText skips the next value, which is a string.
func (c *keyChecker) skipText() {
	for c.at++; c.body[c.at] != '"'; c.at++ {
		if c.body[c.at] == '\\' {
			c.at++
		}
	}
	c.at++
}

// text returns the next value, which is a string.
func (c *keyChecker) text() (text string) {
	c.next()
	begin := c.at
	c.skipText()
	literal := c.body[begin:c.at]
	if bytes.IndexByte(literal, '\\') < 0 {
		return string(literal[1 : len(literal)-1])
	}
	json.Unmarshal(literal, &text)
	return text
}

// elementOf returns the type of the elements of a type of the given kind, or nil.
func elementOf(t reflect.Type, kind reflect.Kind) reflect.Type {
	if t = plain(t); t != nil && t.Kind() == kind {
		return t.Elem()
	}
	return nil
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// plain returns the type to which a pointer points. It is nil for a type that decodes itself, and
// then calls decodeStrictly.
func plain(t reflect.Type) reflect.Type {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || reflect.PointerTo(t).Implements(unmarshaler) {
		return nil
	}
	return t
}

var structParameters sync.Map // from types to the results of parametersOf

// parametersOf returns the types of the members of a struct by their names, or nil.
func parametersOf(t reflect.Type) map[string]reflect.Type {
	if t = plain(t); t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	if known, ok := structParameters.Load(t); ok {
		return known.(map[string]reflect.Type)
	}
	parameters := make(map[string]reflect.Type)
	for _, field := range reflect.VisibleFields(t) {
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" {
			parameters[name] = field.Type
		}
	}
	structParameters.Store(t, parameters)
	return parameters
}
