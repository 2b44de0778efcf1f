package server

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// serve starts a server whose only endpoint reads sampling parameters.
func serve(t *testing.T) *httptest.Server {
	t.Helper()
	s := newServer(t, Options{MaxBodyBytes: 1 << 16, ReadTimeout: 200 * time.Millisecond})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var params samplingParams
		err := s.decode(w, r, &params)
		if err == nil {
			_, err = params.request()
		}
		if err != nil {
			refuse(w, r, err)
		}
	}))
	t.Cleanup(server.Close)
	return server
}

func post(t *testing.T, server *httptest.Server, path, kind, body string) (*http.Response, []byte) {
	t.Helper()
	response, err := http.Post(server.URL+path, kind, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, answer
}

func TestABadBodyIsRefusedWithItsStatusAndParameter(t *testing.T) {
	server := serve(t)
	for _, test := range []struct {
		body   string
		status int
		param  string
	}{
		{`{"temperature": 0.5, "n": 2, "stop": "x", "logit_bias": {"5": -100}}`, 200, ""},
		{`{"temperature": null, "stop": null}`, 200, ""},
		{``, 400, ""},
		{`{"n": `, 400, ""},
		{`{"n": 1} {}`, 400, ""},
		{`[]`, 400, ""},
		{"{\"user\": \"\xff\"}", 400, ""},
		{`{"n": "two"}`, 400, "n"},
		{`{"top_k": 1.5}`, 400, "top_k"},
		{`{"n": 99999999999999999999}`, 400, "n"},
		{`{"n": 0}`, 400, "n"},
		{`{"max_tokens": -1}`, 400, "max_tokens"},
		{`{"top_p": 0}`, 400, "top_p"},
		{`{"stop": 5}`, 400, "stop"},
		{`{"logit_bias": {"five": 1}}`, 400, "logit_bias"},
		{`{"deadline_ms": -5}`, 400, "deadline_ms"},
		{`{"structured_outputs": {"regex": "a", "json_object": true}}`, 400, "structured_outputs"},
		{`{"beam": {"early_stopping": "perhaps"}}`, 400, "beam.early_stopping"},
		{`{"temprature": 1}`, 400, "temprature"},
		{`{"user": "` + strings.Repeat("x", 1<<16) + `"}`, 413, ""},
	} {
		response, answer := post(t, server, "/v1/completions", "application/json", test.body)
		if response.StatusCode != test.status {
			t.Errorf("%.60q: status %d, want %d: %s", test.body, response.StatusCode, test.status,
				answer)
		}
		if test.status == 200 {
			continue
		}
		var body errorBody
		if err := json.Unmarshal(answer, &body); err != nil ||
			body.Error.Type != "invalid_request_error" || body.Error.Message == "" {
			t.Errorf("%.60q: %s, %v", test.body, answer, err)
		}
		if param := body.Error.Param; test.param != "" && (param == nil || *param != test.param) {
			t.Errorf("%.60q: %s, want the parameter %q", test.body, answer, test.param)
		}
	}
}

func TestHostsOfThisMachineAreKnown(t *testing.T) {
	for host, local := range map[string]bool{
		"localhost": true, "LocalHost:8080": true, "127.0.0.1:1": true, "[::1]:80": true,
		"[::1]": true, "::1": true, "": true,
		"localhost.example": false, "127.0.0.1.example:80": false, "192.168.0.1": false,
		"attacker": false,
	} {
		if isLocalHost(host) != local {
			t.Errorf("%q: %v", host, !local)
		}
	}
}

func TestOtherContentTypesAreRefused(t *testing.T) {
	server := serve(t)
	if response, _ := post(t, server, "/v1/completions", "text/plain",
		`{}`); response.StatusCode != 415 {
		t.Errorf("status %d", response.StatusCode)
	}
}

func TestTheErrorsOfMessagesHaveTheFormOfAnthropic(t *testing.T) {
	_, answer := post(t, serve(t), "/v1/messages", "application/json", `{"n": 0}`)
	var body anthropicError
	if err := json.Unmarshal(answer, &body); err != nil || body.Type != "error" ||
		body.Error.Type != "invalid_request_error" {
		t.Errorf("%s, %v", answer, err)
	}
}

func TestABodyThatDoesNotArriveIsATimeout(t *testing.T) {
	server := serve(t)
	connection, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	io.WriteString(connection, "POST / HTTP/1.1\r\nHost: x\r\nContent-Type: "+
		"application/json\r\nContent-Length: 50\r\n\r\n{")
	connection.SetReadDeadline(time.Now().Add(5 * time.Second))
	answer, err := io.ReadAll(connection) // the server closes the connection
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") {
		t.Errorf("%s, %v", answer, err)
	}
}

func TestEveryCodeOfTheLibraryHasAStatus(t *testing.T) {
	for code, status := range map[pagedllm.Code]int{
		pagedllm.ErrInvalidArgument: 400, pagedllm.ErrUnsupported: 400, pagedllm.ErrNotFound: 404,
		pagedllm.ErrCapacity: 400, pagedllm.ErrOutOfMemory: 503, pagedllm.ErrClosed: 503,
		pagedllm.ErrInternal: 500, pagedllm.Code(999): 500,
	} {
		if e := toAPIError(&pagedllm.Error{Code: code, Message: "x"}); e.status != status {
			t.Errorf("%v: status %d, want %d", code, e.status, status)
		}
	}
	e := toAPIError(&pagedllm.Error{Code: pagedllm.ErrInvalidArgument,
		Message: "top_p is 2; must be above 0 to 1"})
	if e.param != "top_p" {
		t.Errorf("parameter %q", e.param)
	}
	long := toAPIError(&pagedllm.Error{Code: pagedllm.ErrInvalidArgument, Message: "x",
		PromptTokens: 9, MaxModelLen: 8})
	if long.code != "context_length_exceeded" {
		t.Errorf("code %q", long.code)
	}
}

func TestAnExplicitDefaultDisablesTheDefaultsOfTheModel(t *testing.T) {
	for body, modelDefaults := range map[string]bool{`{}`: true, `{"temperature": 0.7}`: true,
		`{"temperature": 1}`: false, `{"top_k": 0}`: false} {
		var params samplingParams
		if err := decodeStrictly([]byte(body), &params); err != nil {
			t.Fatal(err)
		}
		request, err := params.request()
		if err != nil || request.Sampling.ModelDefaults != modelDefaults {
			t.Errorf("%s: %v, %v", body, request.Sampling.ModelDefaults, err)
		}
	}
}

func TestKeysAreUniqueAndHaveTheirCase(t *testing.T) {
	for body, param := range map[string]string{
		`{"n": 1, "n": 2}`:                 "n",
		`{"N": 1}`:                         "N",
		`{"n": 1, "N": 2}`:                 "N",
		`{"Beam": {}}`:                     "Beam",
		`{"beam": {"Width": 2}}`:           "Width",
		`{"beam": {"ſtrict": 2}}`:          "ſtrict",
		`{"logit_bias": {"5": 1, "5": 2}}`: "5",
		`{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": {"b": 1, ` +
			`"b": 2}}}}]}`: "b",
		`{"tools": [{"type": "function", "function": {"Name": ` +
			`"f"}}]}`: "Name",
		`{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "colour": ` +
			`1}]}]}`: "colour",
		`{"messages": [{"role": "user", "content": [{"type": "text", "Text": ` +
			`"a"}]}]}`: "Text",
		`{"tool_choice": {"type": "function", "function": {"name": "f", "strength": ` +
			`5}}}`: "strength",
	} {
		var request chatRequest
		err := decodeStrictly([]byte(body), &request)
		var api *apiError
		if !errors.As(err, &api) || api.status != 400 || api.param != param {
			t.Errorf("%s: %+v", body, err)
		}
	}
	for body, value := range map[string]any{
		`{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", ` +
			`"content": "a", "is_errror": true}]}]}`: &messagesRequest{},
		`{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "text": ` +
			`"b"}]}]}`: &messagesRequest{},
		`{"input": [{"role": "user", "content": "a", "colour": ` +
			`1}]}`: &responsesRequest{},
	} {
		if err := decodeStrictly([]byte(body), value); err == nil {
			t.Error(body)
		}
	}
	for body, value := range map[string]any{
		`{"chat_template_kwargs": {"a": 1, "A": 2}, "logit_bias": {"5": 1, "6": 2}, "n": 1,
			"tools": [{"type": "function", "function": {"name": "f",
			"parameters": {"Type": 1, "type": 2}}}], "messages": [{"role": "user",
				"content": [{"type": "text", "text": "a"}, {"type": "text",
				"text": "b"}]}]}`: &chatRequest{},
		`{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", ` +
			`"content": "a", "is_error": true}]}]}`: &messagesRequest{},
		`{"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "status": ` +
			`"completed"}]}`: &responsesRequest{},
	} {
		if err := decodeStrictly([]byte(body), value); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
	include := responsesRequest{Include: []string{"message.output_text.logprobs"}}
	if err := include.refuseUnsupported(); err == nil {
		t.Error("include")
	}
}
