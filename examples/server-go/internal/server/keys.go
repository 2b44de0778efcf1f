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
// in another case. The body has been decoded as a value of type t. A proxy that checks the body can
// take the other one of two members.
func checkKeys(body []byte, t reflect.Type) error {
	c := keyChecker{json.NewDecoder(bytes.NewReader(body))}
	c.in.UseNumber()
	return c.value(t)
}

type keyChecker struct{ in *json.Decoder }

// value checks the next value. t is nil if its names are not parameters.
func (c *keyChecker) value(t reflect.Type) error {
	token, err := c.in.Token()
	if err != nil {
		return jsonError(err, c.in.InputOffset())
	}
	switch token {
	case json.Delim('{'):
		return c.object(t)
	case json.Delim('['):
		for c.in.More() {
			if err := c.value(elementOf(t, reflect.Slice)); err != nil {
				return err
			}
		}
		_, err = c.in.Token()
	}
	return err
}

func (c *keyChecker) object(t reflect.Type) error {
	parameters, element := parametersOf(t), elementOf(t, reflect.Map)
	seen := make(map[string]bool)
	for c.in.More() {
		token, err := c.in.Token()
		if err != nil {
			return jsonError(err, c.in.InputOffset())
		}
		name, _ := token.(string)
		if seen[name] {
			return badRequest(name, fmt.Sprintf("an object has two members %q; send one", name))
		}
		seen[name] = true
		next := element
		if parameters != nil {
			known := false
			if next, known = parameters[name]; !known { // encoding/json has accepted another case
				return unknown(name, fmt.Sprintf("send %q", strings.ToLower(name)))
			}
		}
		if err := c.value(next); err != nil {
			return err
		}
	}
	_, err := c.in.Token()
	return err
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
