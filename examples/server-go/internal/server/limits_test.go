package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// endless is a request that ends only at its maximum length, after about a thousand tokens.
const endless = `{"prompt": "Count", "max_tokens": 1000, "ignore_eos": true, "stream": true}`

// badInput are bodies with the status and the code of their errors.
var badInput = []struct {
	path, body string
	status     int
	code       any
}{
	{"/v1/completions", `{"prompt": "a", `, 400, nil},
	{"/v1/completions", `{"prompt": {"a": 1}}`, 400, nil},
	{"/v1/completions", `{"prompt": ""}`, 400, nil},
	{"/v1/completions", `{"prompt": []}`, 400, nil},
	{"/v1/completions", `{"prompt": [-1]}`, 400, nil},
	{"/v1/completions", `{"prompt": [null]}`, 400, nil},
	{"/v1/completions", `{"prompt": 5}`, 400, nil},
	{"/v1/completions", `{"prompt": [["a"]]}`, 400, nil},
	{"/v1/completions", `{"prompt": [99999]}`, 400, nil},
	{"/v1/completions", `{"prompt": "a", "n": -1}`, 400, nil},
	{"/v1/completions", `{"prompt": "a", "n": 1000000}`, 400, nil},
	{"/v1/completions", `{"prompt": "a", "top_p": 2}`, 400, nil},
	{"/v1/completions", `{"prompt": "a", "logprobs": 1000}`, 400, nil},
	{"/v1/completions", `{"prompt": "a", "suffix": "b"}`, 400, "unsupported_parameter"},
	{"/v1/completions", `{"prompt": "a", "colour": 1}`, 400, "unknown_parameter"},
	{"/v1/completions", `{"prompt": "a", "model": "none"}`, 404, "model_not_found"},
	{"/v1/completions", `{"prompt": "` + strings.Repeat("a b ", 5000) + `"}`, 400,
		"context_length_exceeded"},
	{"/v1/completions", `{"prompt": "a", "structured_outputs": {"regex": "("}}`, 400, nil},
	{"/v1/completions", "{\"prompt\": \"\xff\"}", 400, nil},
	{"/v1/completions", strings.Repeat("[", 100000), 400, nil},
	{"/v1/chat/completions", `{}`, 400, nil},
	{"/v1/chat/completions", `{"messages": [{"role": "king", "content": "a"}]}`, 400, nil},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": [{"type": "image_url", ` +
		`"image_url": {"url": "x"}}]}]}`, 400, "unsupported_parameter"},
	{"/v1/chat/completions", `{"messages": "hello"}`, 400, nil},
	{"/v1/chat/completions", `{"messages": [], "tools": [{"type": "web"}]}`, 400,
		"unsupported_parameter"},
	{"/v1/chat/completions", `{` + sum + `, "top_logprobs": 3}`, 400, nil},
	{"/v1/chat/completions", `{` + sum + `, "response_format": {"type": "xml"}}`, 400, nil},
	{"/v1/chat/completions", `{` + sum + `, "max_tokens": 1, "max_completion_tokens": 2}`, 400,
		nil},
	{"/v1/responses", `{"input": "a", "previous_response_id": "resp_1"}`, 400,
		"unsupported_parameter"},
	{"/v1/responses", `{"input": 5}`, 400, nil},
	{"/v1/responses", `{"input": [{"type": "computer_call"}]}`, 400, "unsupported_parameter"},
	{"/tokenize", `{}`, 400, nil},
	{"/detokenize", `{"tokens": [4000000000]}`, 400, nil},
	{"/nothing", `{}`, 404, nil},
}

func TestBadInputIsRefusedAndOtherStreamsContinue(t *testing.T) {
	model := open(t, pagedllm.Options{})
	server := start(t, limits(), model)
	other := make(chan string, 1)
	const long = `{"prompt": "Count", "max_tokens": 400, "ignore_eos": true, "temperature": 0`
	go func() {
		other <- joined(stream(t, server, "/v1/completions", long+`, "stream": true}`), "choices",
			0, "text")
	}()
	for _, test := range badInput {
		answer := ask(t, server, test.path, test.body, test.status)
		if message := at(t, answer, "error", "message"); message == "" ||
			at(t, answer, "error", "code") != test.code {
			t.Errorf("%s %.80s: %v", test.path, test.body, answer)
		}
	}
	for _, body := range []string{`{"messages": [{"role": "user", "content": "a"}]}`,
		`{"max_tokens": 5, "messages": [{"role": "system", "content": "a"}]}`} {
		if kind := at(t, ask(t, server, "/v1/messages", body, 400), "error",
			"type"); kind != "invalid_request_error" {
			t.Error(kind)
		}
	}
	if response, _ := get(t, server.URL+"/v1/completions"); response.StatusCode != 405 ||
		response.Header.Get("Allow") != "POST" {
		t.Error(response.Status)
	}
	alone := at(t, ask(t, server, "/v1/completions", long+`}`, 200), "choices", 0, "text")
	if text := <-other; text != alone {
		t.Errorf("%q, want %q", text, alone)
	}
}

func TestAHugeBodyIsRefusedWithoutBeingRead(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for _, chunked := range []bool{false, true} {
		var body io.Reader = bytes.NewReader(make([]byte, 100<<20))
		if chunked {
			body = io.MultiReader(body) // of unknown length
		}
		response, err := http.Post(server.URL+"/v1/completions", "application/json", body)
		if err != nil {
			continue // the server has closed the connection while the client was writing
		}
		response.Body.Close()
		if response.StatusCode != 413 {
			t.Errorf("chunked %v: %s", chunked, response.Status)
		}
	}
	ask(t, server, "/v1/completions", `{`+france+`}`, 200)
}

func TestKeysAreRequired(t *testing.T) {
	options := limits()
	options.Keys = Keys{sha256.Sum256([]byte("one")), sha256.Sum256([]byte("two"))}
	server := start(t, options, open(t, pagedllm.Options{}))
	for _, test := range []struct {
		header, value string
		status        int
	}{
		{"Authorization", "Bearer one", 200}, {"authorization", "bearer two", 200},
		{"X-Api-Key", "one", 200},
		{"Authorization", "Bearer three", 401}, {"Authorization", "Bearer ", 401},
		{"Authorization", "one", 401}, {"X", "", 401},
	} {
		response, body := get(t, server.URL+"/v1/models", test.header, test.value)
		if response.StatusCode != test.status {
			t.Errorf("%v: %s", test, response.Status)
		}
		if test.status == 401 && (response.Header.Get("WWW-Authenticate") == "" ||
			!strings.Contains(body, "authentication_error")) {
			t.Errorf("%v: %s", test, body)
		}
	}
	if response, _ := get(t, server.URL+"/health"); response.StatusCode != 200 {
		t.Error(response.Status)
	}
	ask(t, server, "/v1/chat/completions", `{`+sum+`}`, 401)
	keys, err := ReadKeys(strings.NewReader("# keys\n\n one \ntwo"))
	if err != nil || len(keys) != 2 || !keys.has("one") || keys.has("# keys") {
		t.Errorf("%v, %v", keys, err)
	}
}

func TestAClientThatHangsUpAbortsItsRequest(t *testing.T) {
	// the answer cannot end before the client hangs up
	model := open(t, pagedllm.Options{HostSteps: true})
	server := start(t, limits(), model)
	for i, streams := range []string{"true", "false"} {
		hangUp := postInBackground(t, server, strings.Replace(endless, "true}", streams+"}", 1))
		step := func() pagedllm.StepReport { return stepOf(t, model) }
		waitUntil(t, "the request runs", func() bool { return step().Sequences == 1 })
		hangUp()
		waitUntil(t, "the request is aborted", func() bool { return step().Unfinished == 0 })
		if stats, _ := model.Engine.Stats(); stats.FinishedAbort != i+1 || stats.BlocksUsed != 0 {
			t.Errorf("stream %s: %+v", streams, stats)
		}
	}
}

// postInBackground posts a request and returns a function that hangs up.
func postInBackground(t *testing.T, server *httptest.Server, body string) (hangUp func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+"/v1/completions",
		strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if response, err := http.DefaultClient.Do(request); err == nil {
			io.Copy(io.Discard, response.Body)
			response.Body.Close()
		}
	}()
	hangUp = func() {
		cancel()
		<-ended
	}
	t.Cleanup(hangUp)
	return hangUp
}

func stepOf(t *testing.T, model Model) pagedllm.StepReport {
	t.Helper()
	report, err := model.Engine.Step()
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// raw sends bytes to the server and returns the connection.
func raw(t *testing.T, address, text string) net.Conn {
	t.Helper()
	connection, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	connection.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(connection, text); err != nil {
		t.Fatal(err)
	}
	return connection
}

func rawPost(body string) string {
	return fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "+
		"application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func TestASlowReaderEndsAndOthersAreUndisturbed(t *testing.T) {
	model := open(t, pagedllm.Options{})
	options := limits()
	options.WriteTimeout = 300 * time.Millisecond
	server := start(t, options, model)
	// An answer with log probabilities is larger than the buffers of the connection.
	body := `{"prompt": "Count", "max_tokens": 1000, "ignore_eos": true, "stream": true, ` +
		`"logprobs": 100, "n": 8}`
	connection := raw(t, server.Listener.Addr().String(), rawPost(body))
	connection.(*net.TCPConn).SetReadBuffer(4096)
	waitUntil(t, "the request runs", func() bool { return !idle(t, model.Engine)() })
	ask(t, server, "/v1/completions", `{`+france+`}`, 200)
	waitUntil(t, "the slow reader is aborted", idle(t, model.Engine))
	if stats, _ := model.Engine.Stats(); stats.FinishedAbort == 0 {
		t.Errorf("%+v", stats)
	}
}

func TestSlowSendersAreDisconnected(t *testing.T) {
	options := limits()
	options.Keys = Keys{sha256.Sum256([]byte("one"))}
	server := start(t, options, open(t, pagedllm.Options{}))
	for name, text := range map[string]string{
		"headers": "POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
		"garbage": "\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
		"refused by key": "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: " +
			"application/json\r\nContent-Length: 50\r\n\r\n{",
		"body of a valid": "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " +
			"one\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
	} {
		begin := time.Now()
		if _, err := io.ReadAll(raw(t, server.Listener.Addr().String(), text)); err != nil {
			t.Errorf("%s: %v after %v", name, err, time.Since(begin))
		}
	}
}

func TestPipelinedRequestsAreAnsweredInOrder(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	request := rawPost(`{` + france + `, "stream": true}`)
	connection := raw(t, server.Listener.Addr().String(), request+request+rawPost(`{"n": `))
	reader := bufio.NewReader(connection)
	for i, status := range []int{200, 200, 400} {
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != status || status == 200 &&
			!strings.HasSuffix(string(body), "data: [DONE]\n\n") {
			t.Errorf("request %d: %s, %q, %v", i, response.Status, body, err)
		}
	}
}

func TestAFullServerAnswers429(t *testing.T) {
	model := open(t, pagedllm.Options{MaxSeqs: 1, MaxWaitingRequests: 1, HostSteps: true})
	server := start(t, limits(), model)
	postInBackground(t, server, endless)
	waitUntil(t, "one runs", func() bool { return stepOf(t, model).Sequences == 1 })
	postInBackground(t, server, endless)
	waitUntil(t, "one waits", func() bool { return stepOf(t, model).Unfinished == 2 })
	response, body := post(t, server, "/v1/completions", "application/json", `{`+france+`}`)
	if response.StatusCode != 429 || response.Header.Get("Retry-After") == "" ||
		!strings.Contains(string(body), "rate_limit_error") {
		t.Errorf("%s: %s", response.Status, body)
	}
	// A request that can never fit is an error of the client.
	ask(t, server, "/v1/completions", `{"prompt": "`+strings.Repeat("a b ", 5000)+`"}`, 400)
}

func TestTooManyRequestsInProgressAre429(t *testing.T) {
	options := limits()
	options.MaxRequests = 1
	s := newServer(t, options, open(t, pagedllm.Options{}))
	url := httptestServer(t, s)
	status := func() int {
		response, err := http.Post(url+"/v1/completions", "application/json",
			strings.NewReader(`{`+france+`}`))
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode == 429 && response.Header.Get("Retry-After") != "1" {
			t.Error(response.Header)
		}
		return response.StatusCode
	}
	s.slots <- struct{}{}
	if got := status(); got != 429 {
		t.Error(got)
	}
	<-s.slots
	s.bodies.Add(options.MaxBodiesBytes - 10)
	if got := status(); got != 429 {
		t.Error(got)
	}
	s.bodies.Add(10 - options.MaxBodiesBytes)
	if got := status(); got != 200 || s.bodies.Load() != 0 {
		t.Error(got, s.bodies.Load())
	}
}

func TestALateForecastIsRefused(t *testing.T) {
	model := open(t, pagedllm.Options{MaxSeqs: 1})
	options := limits()
	options.MaxWait = time.Nanosecond
	server := start(t, options, model)
	// Without a measured step there is no forecast, and the request is accepted.
	ask(t, server, "/v1/completions", `{`+france+`}`, 200)
	response, body := post(t, server, "/v1/completions", "application/json", `{`+france+`}`)
	if response.StatusCode != 429 || response.Header.Get("Retry-After") == "" {
		t.Errorf("%s: %s", response.Status, body)
	}
}

func TestTheTimeOfARequestIsLimited(t *testing.T) {
	model := open(t, pagedllm.Options{HostSteps: true}) // without steps, there is no token
	options := limits()
	options.MaxTime = 50 * time.Millisecond
	options.KeepAlive = 20 * time.Millisecond
	server := start(t, options, model)
	expire := func() {
		time.Sleep(2 * options.MaxTime)
		if _, err := model.Engine.Step(); err != nil {
			t.Error(err)
		}
	}
	response, err := http.Post(server.URL+"/v1/completions", "application/json",
		strings.NewReader(endless))
	if err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(response.Body)
	if comment, err := reader.ReadString('\n'); err != nil || comment != ": waiting\n" {
		t.Errorf("%q, %v", comment, err)
	}
	expire()
	body, err := io.ReadAll(reader)
	if err != nil || !strings.Contains(string(body), `"stop_reason":"deadline"`) {
		t.Errorf("%s, %v", body, err)
	}
	go func() {
		waitUntilAdded(t, model)
		expire()
	}()
	ask(t, server, "/v1/completions", `{`+france+`}`, 504)
}

// waitUntilAdded waits until an engine without steps has a request.
func waitUntilAdded(t *testing.T, model Model) {
	for range 2000 {
		admission, err := model.Engine.PredictAdmission(pagedllm.Request{Prompt: "a"})
		if err != nil || admission.WaitingRequests > 0 {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Error("no request was added within 10 s")
}

func TestClosingTheEngineEndsStreamsWithAnError(t *testing.T) {
	for path, body := range map[string]string{
		"/v1/completions": endless, "/v1/chat/completions": `{` + sum + `, "stream": true}`,
		"/v1/messages":  `{` + sum + `, "max_tokens": 9, "stream": true}`,
		"/v1/responses": `{"input": "a", "stream": true}`,
	} {
		// without steps, the stream cannot end before
		model := open(t, pagedllm.Options{HostSteps: true})
		server := start(t, limits(), model)
		go func() {
			waitUntilAdded(t, model)
			model.Engine.Close()
		}()
		events := stream(t, server, path, body)
		last := events[len(events)-1:]
		if message := joined(last, "error", "message") +
			joined(last, "response", "error", "message"); !strings.Contains(message, "freed") {
			t.Errorf("%s: %v", path, events)
		}
	}
}
