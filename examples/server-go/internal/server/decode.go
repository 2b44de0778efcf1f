package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// decode reads the JSON body of a request into a value. Unknown members are errors, so that no
// parameter is ignored silently.
func (s *Server) decode(w http.ResponseWriter, r *http.Request, value any) error {
	// A browser sends JSON to another origin only after that origin has allowed it, so that the
	// pages of other sites cannot use a server on the loopback interface.
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != "application/json" {
		return refusal(http.StatusUnsupportedMediaType,
			fmt.Sprintf("content type is %q; send application/json", r.Header.Get("Content-Type")))
	}
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	if !utf8.Valid(body) {
		return badRequest("", "the body is not UTF-8; encode it as UTF-8")
	}
	return s.compute(r.Context(), func() error { return decodeStrictly(body, value) })
}

func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	tooLarge := refusal(http.StatusRequestEntityTooLarge,
		fmt.Sprintf("the body is too large (limit %d bytes); send a shorter request",
			s.options.MaxBodyBytes))
	if r.ContentLength > s.options.MaxBodyBytes {
		return nil, tooLarge
	}
	connection := http.NewResponseController(w)
	connection.SetReadDeadline(time.Now().Add(s.options.ReadTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.options.MaxBodyBytes))
	var limit *http.MaxBytesError
	switch {
	case errors.As(err, &limit):
		return nil, tooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		return nil, refusal(http.StatusRequestTimeout,
			fmt.Sprintf("the body did not arrive in time (limit %v); send it at once",
				s.options.ReadTimeout))
	case err != nil:
		return nil, badRequest("", "the body cannot be read ("+err.Error()+")")
	}
	// net/http continues to read, to notice that the client hangs up. This read has no deadline.
	connection.SetReadDeadline(time.Time{})
	return body, nil
}

func decodeStrictly(body []byte, value any) error {
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		return jsonError(err, decoder.InputOffset())
	}
	if _, err := decoder.Token(); err != io.EOF {
		return badRequest("", fmt.Sprintf("the body has more than one JSON value (at byte %d); "+
			"send one object", decoder.InputOffset()))
	}
	return checkKeys(body, reflect.TypeOf(value))
}

func jsonError(err error, offset int64) error {
	var api *apiError
	var syntax *json.SyntaxError
	var wrongType *json.UnmarshalTypeError
	switch {
	case errors.As(err, &api): // of an UnmarshalJSON method
		return api
	case errors.As(err, &syntax):
		return badRequest("", fmt.Sprintf("the body is not JSON (at byte %d: %s)", syntax.Offset,
			syntax))
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return badRequest("", fmt.Sprintf("the JSON ends too early (at byte %d); send a complete "+
			"object", offset))
	case errors.As(err, &wrongType):
		name := memberName(wrongType.Field)
		return badRequest(name, fmt.Sprintf("%s is a %s; must be of type %s",
			nonEmpty(name, "the body"), wrongType.Value, jsonType(wrongType.Type.Kind().String())))
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		name = strings.Trim(name, `"`)
		return unknown(name, "remove it")
	}
	return badRequest("", strings.TrimPrefix(err.Error(), "json: "))
}

func unknown(name, remedy string) *apiError {
	e := badRequest(name, fmt.Sprintf("unknown parameter %q; %s", name, remedy))
	e.code = "unknown_parameter"
	return e
}

// memberName removes the names of embedded Go structs, which are not members of the request.
func memberName(field string) string {
	isEmbedded := func(name string) bool {
		return name == "samplingParams" || name == "extensions" || name == "chatPrompt"
	}
	return strings.Join(slices.DeleteFunc(strings.Split(field, "."), isEmbedded), ".")
}

// jsonType names a kind of Go in the terms of JSON.
func jsonType(kind string) string {
	switch {
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "integer"
	case strings.HasPrefix(kind, "float"):
		return "number"
	case kind == "slice":
		return "array"
	case kind == "struct", kind == "map":
		return "object"
	case kind == "bool":
		return "boolean"
	}
	return kind
}

func nonEmpty(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}
