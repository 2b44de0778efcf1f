package server

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func TestSpansReachTheCollector(t *testing.T) {
	received := make(chan map[string]any, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var message map[string]any
		if err != nil || json.Unmarshal(body, &message) != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s %s: %v", r.URL.Path, body, err)
		}
		received <- message
	}))
	defer collector.Close()
	options := limits()
	options.Exporter = NewExporter(collector.URL+"/v1/traces", options.Log)
	server := start(t, options, open(t, pagedllm.Options{}))
	get(t, server.URL+"/v1/models", "traceparent",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	// not sampled
	get(t, server.URL+"/v1/models", "traceparent",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
	ask(t, server, "/v1/completions", `{`+france+`}`, 200)
	server.Close() // all requests have ended and been reported
	options.Exporter.Close()
	close(received)
	var spans []any
	for message := range received {
		spans = append(spans, at(t, message, "resourceSpans", 0, "scopeSpans", 0,
			"spans").([]any)...)
	}
	if len(spans) != 2 {
		t.Fatalf("%v", spans)
	}
	if at(t, spans[0], "traceId") != "0af7651916cd43dd8448eb211c80319c" ||
		at(t, spans[0], "parentSpanId") != "b7ad6b7169203331" ||
		at(t, spans[0], "name") != "GET /v1/models" {
		t.Errorf("%v", spans[0])
	}
	attributes := make(map[string]any)
	for _, a := range at(t, spans[1], "attributes").([]any) {
		for _, value := range at(t, a, "value").(map[string]any) {
			attributes[at(t, a, "key").(string)] = value
		}
	}
	if attributes["gen_ai.usage.input_tokens"] != "8" ||
		attributes["http.response.status_code"] != "200" {
		t.Errorf("%v", attributes)
	}
}

func TestASlowCollectorDelaysNoRequest(t *testing.T) {
	release := make(chan struct{})
	collector := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter,
		*http.Request) {
		<-release
	}))
	defer collector.Close()
	exporter := NewExporter(collector.URL, limits().Log)
	begin := time.Now()
	for range 10 * maxSpans {
		exporter.add(finishedSpan{record: &record{}})
	}
	if spent := time.Since(begin); spent > time.Second {
		t.Errorf("%v for %d spans", spent, 10*maxSpans)
	}
	close(release)
	exporter.Close()
}

func TestTheConnectionToTheCollectorIsUsedAgain(t *testing.T) {
	clients := make(map[string]bool)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		clients[r.RemoteAddr] = true
		w.Write(make([]byte, 100000))
	}))
	defer collector.Close()
	exporter := NewExporter(collector.URL, limits().Log)
	defer exporter.Close()
	for range 3 {
		if err := exporter.send([]finishedSpan{{record: &record{}}}); err != nil {
			t.Error(err)
		}
	}
	if len(clients) != 1 {
		t.Errorf("%d connections", len(clients))
	}
}
