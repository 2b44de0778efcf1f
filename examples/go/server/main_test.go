package main

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

const story = "Tell me a short story."

func open(t *testing.T, hostSteps bool) *pagedllm.Engine {
	t.Helper()
	options := pagedllm.Options{ModelPath: "../../model", Threads: 1, KVBytes: 16 << 20, HostSteps: hostSteps}
	engine, err := pagedllm.Open(context.Background(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	return engine
}

func serve(t *testing.T, handler http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
}

// request sends a question and returns a function for its events. ok is false after the last event.
func request(t *testing.T, ctx context.Context, server *httptest.Server, question string) (next func() (e event, ok bool)) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/ask?question="+url.QueryEscape(question), nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := server.Client().Do(r)
	if err != nil {
		t.Error(err)
		return func() (event, bool) { return event{}, false }
	}
	t.Cleanup(func() { response.Body.Close() })
	if kind := response.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Errorf("the content type is %s", kind)
	}
	lines := bufio.NewScanner(response.Body)
	return func() (e event, ok bool) {
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				if err := json.Unmarshal([]byte(data), &e); err != nil {
					t.Error(err)
				}
				return e, true
			}
		}
		return e, false
	}
}

// stepOnce steps until a step has computed a sequence, then closes the channel.
func stepOnce(t *testing.T, engine *pagedllm.Engine) (stepped <-chan struct{}) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			report, err := engine.Step()
			if err != nil {
				t.Error(err)
			}
			if err != nil || report.Sequences > 0 {
				return
			}
		}
	}()
	return done
}

func TestADisconnectedClientAbortsItsRequest(t *testing.T) {
	engine := open(t, true) // the answer cannot end before the client disconnects
	handled := make(chan struct{})
	server := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(handled)
		ask(engine)(w, r)
	}))
	stepped := stepOnce(t, engine)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	next := request(t, ctx, server, story)
	if first, ok := next(); !ok || first.Text == "" || first.FinishReason != "none" || first.Error != "" {
		t.Errorf("%+v, %v", first, ok)
	}
	<-stepped
	cancel()
	<-handled
	if report, err := engine.Step(); err != nil || report.Unfinished != 0 {
		t.Errorf("%+v, %v", report, err)
	}
	stats, err := engine.Stats()
	if err != nil || stats.FinishedAbort != 1 || stats.BlocksUsed != 0 {
		t.Errorf("%+v, %v", stats, err)
	}
}

func TestFiftyClientsAreServedConcurrently(t *testing.T) {
	engine := open(t, false)
	server := serve(t, ask(engine))
	var clients sync.WaitGroup
	for range 50 {
		clients.Add(1)
		go func() {
			defer clients.Done()
			next := request(t, context.Background(), server, story)
			var text string
			var last event
			for e, ok := next(); ok; e, ok = next() {
				text += e.Text
				last = e
			}
			if text == "" || last.FinishReason != "stop" && last.FinishReason != "length" || last.Error != "" {
				t.Errorf("%q, %+v", text, last)
			}
		}()
	}
	clients.Wait()
	if stats, err := engine.Stats(); err != nil || stats.FinishedStop+stats.FinishedLength != 50 || stats.FinishedAbort != 0 {
		t.Errorf("%+v, %v", stats, err)
	}
}

func TestClosingTheEngineEndsEveryAnswer(t *testing.T) {
	engine := open(t, true)
	server := serve(t, ask(engine))
	stepped := stepOnce(t, engine)
	next := request(t, context.Background(), server, story)
	next()
	<-stepped
	engine.Close()
	var last event
	for e, ok := next(); ok; e, ok = next() {
		last = e
	}
	if !strings.Contains(last.Error, "closed") {
		t.Errorf("%+v", last)
	}
}
