package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// An apiError is a refusal as the client sees it.
type apiError struct {
	status  int
	code    string // of OpenAI, such as "model_not_found"; may be ""
	param   string // the member of the request that is wrong; may be ""
	message string
	// retryAfter is the time after which the request can succeed. 0: not known.
	retryAfter time.Duration
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, param: param, message: message}
}

// unsupported refuses a member that the server knows but cannot honour.
func unsupported(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "unsupported_parameter", param: param, message: message}
}

// errGone is the end of a request whose client has hung up. It is logged and not sent.
var errGone = &apiError{status: 499, message: "the client has closed the connection"}

// toAPIError maps every error of the library to its HTTP status.
func toAPIError(err error) *apiError {
	var api *apiError
	if errors.As(err, &api) {
		return api
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return errGone
	}
	var library *pagedllm.Error
	if !errors.As(err, &library) {
		return &apiError{status: http.StatusInternalServerError, message: err.Error()}
	}
	e := &apiError{status: statusOf(library.Code), message: library.Message}
	switch {
	case library.PromptTokens > 0:
		e.code = "context_length_exceeded"
	case library.Code == pagedllm.ErrInvalidArgument:
		e.param = leadingName(library.Message)
	case library.Code == pagedllm.ErrUnsupported:
		e.code = "unsupported_parameter"
		e.param = leadingName(library.Message)
	}
	return e
}

func statusOf(code pagedllm.Code) int {
	switch code {
	case pagedllm.ErrInvalidArgument, pagedllm.ErrUnsupported:
		return http.StatusBadRequest
	case pagedllm.ErrNotFound:
		return http.StatusNotFound
	case pagedllm.ErrCapacity:
		return http.StatusTooManyRequests
	case pagedllm.ErrOutOfMemory, pagedllm.ErrClosed, pagedllm.ErrBusy, pagedllm.ErrCancelled:
		return http.StatusServiceUnavailable
	default: // ErrInternal, ErrIO, ErrModel and codes of later releases
		return http.StatusInternalServerError
	}
}

// leadingName returns the parameter with which a message of the library begins ("top_p is 2; ..."),
// or "".
func leadingName(message string) string {
	name, rest, _ := strings.Cut(message, " ")
	isName := strings.IndexFunc(name, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') }) < 0
	if isName && (strings.HasPrefix(rest, "is ") || strings.HasPrefix(rest, "has ")) {
		return name
	}
	return ""
}

// kind returns the "type" of OpenAI's error objects.
func (e *apiError) kind() string {
	switch e.status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return "timeout_error"
	}
	if e.status >= 500 {
		return "server_error"
	}
	return "invalid_request_error"
}

// anthropicKind returns the "type" of Anthropic's error objects.
func (e *apiError) anthropicKind() string {
	switch e.status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return "timeout_error"
	}
	if e.status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// An errorBody is the error object of OpenAI.
type errorBody struct {
	Error errorFields `json:"error"`
}

type errorFields struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

func (e *apiError) openAI() errorBody {
	return errorBody{errorFields{e.message, e.kind(), orNull(e.param), orNull(e.code)}}
}

// An anthropicError is the error object of Anthropic.
type anthropicError struct {
	Type  string `json:"type"`
	Error struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	} `json:"error"`
}

func (e *apiError) anthropic() (body anthropicError) {
	body.Type = "error"
	body.Error.Type = e.anthropicKind()
	body.Error.Message = e.message
	return body
}

// orNull returns nil, which becomes null in JSON, for "".
func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// refuse answers a request with an error, in the form of the API to which the path belongs.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	e := toAPIError(err)
	if e == errGone {
		return
	}
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(e.retryAfter.Seconds()))))
	}
	if e.status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	if strings.HasPrefix(r.URL.Path, "/v1/messages") {
		writeJSON(w, e.status, e.anthropic())
		return
	}
	writeJSON(w, e.status, e.openAI())
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil { // a defect, such as a number that JSON lacks
		status = http.StatusInternalServerError
		body.Reset()
		encoder.Encode((&apiError{status: status, message: "the answer cannot be encoded (" + err.Error() + ")"}).openAI())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(body.Bytes()) // fails only if the client has gone
}
