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

// refusal creates an error. Its message can repeat text of the client, so that it is shortened.
func refusal(status int, message string) *apiError {
	return &apiError{status: status, message: shorten(message)}
}

func badRequest(param, message string) *apiError {
	e := refusal(http.StatusBadRequest, message)
	e.param = shorten(param)
	return e
}

// unsupported refuses a member that the server knows but cannot honour.
func unsupported(param, message string) *apiError {
	e := badRequest(param, message)
	e.code = "unsupported_parameter"
	return e
}

// tryLater refuses a request that can succeed later.
func tryLater(status int, message string) *apiError {
	e := refusal(status, message)
	e.retryAfter = time.Second
	return e
}

// shorten removes the middle of a long text. The beginning of a message is the problem, and the end
// is the remedy.
func shorten(text string) string {
	const head, tail = 600, 200
	if len(text) <= head+tail {
		return text
	}
	return strings.ToValidUTF8(text[:head], "") + " ... " +
		strings.ToValidUTF8(text[len(text)-tail:], "")
}

// statusGone is the status of a request whose client has hung up or does not read. It is logged and
// not sent.
const statusGone = 499

var errGone = refusal(statusGone, "the client has closed the connection")

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
		return refusal(http.StatusInternalServerError, err.Error())
	}
	e := refusal(statusOf(library.Code), library.Message)
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
	case pagedllm.ErrInvalidArgument, pagedllm.ErrUnsupported, pagedllm.ErrCapacity:
		// A full engine, whose error of capacity is temporary, has another status: see add.
		return http.StatusBadRequest
	case pagedllm.ErrNotFound:
		return http.StatusNotFound
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
	isOther := func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') }
	isName := strings.IndexFunc(name, isOther) < 0
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
		encoder.Encode(refusal(status, "the answer cannot be encoded ("+err.Error()+")").openAI())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(body.Bytes()) // fails only if the client has gone
}
