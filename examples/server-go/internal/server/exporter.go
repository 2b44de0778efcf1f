package server

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// An Exporter sends the spans of requests to a collector, by the protocol OTLP over HTTP in JSON.
// It never delays a request: if the collector is slow, spans are dropped.
type Exporter struct {
	url    string
	log    *slog.Logger
	client http.Client
	spans  chan finishedSpan
	quit   chan struct{}
	done   sync.WaitGroup
}

type finishedSpan struct {
	record *record
	name   string
	status int
	end    time.Time
}

const (
	maxSpans       = 512 // in one message
	exportInterval = 2 * time.Second
)

// NewExporter starts an exporter. url is that of the collector for traces.
func NewExporter(url string, log *slog.Logger) *Exporter {
	e := &Exporter{url: url, log: log, client: http.Client{Timeout: 10 * time.Second},
		spans: make(chan finishedSpan, 4*maxSpans), quit: make(chan struct{})}
	e.done.Add(1)
	go e.run()
	return e
}

// Close sends the spans of the requests that have ended.
func (e *Exporter) Close() {
	close(e.quit)
	e.done.Wait()
}

func (e *Exporter) add(s finishedSpan) {
	select {
	case e.spans <- s:
	default: // the collector is too slow
	}
}

func (e *Exporter) run() {
	defer e.done.Done()
	ticks := time.NewTicker(exportInterval)
	defer ticks.Stop()
	var batch []finishedSpan
	for open := true; open; {
		select {
		case next := <-e.spans:
			if batch = append(batch, next); len(batch) < maxSpans {
				continue
			}
		case <-ticks.C:
		case <-e.quit:
			open = false
			for len(e.spans) > 0 {
				batch = append(batch, <-e.spans)
			}
		}
		if len(batch) == 0 {
			continue
		}
		if err := e.send(batch); err != nil {
			e.log.Warn("spans were not sent", "count", len(batch), "error", err.Error())
		}
		batch = batch[:0]
	}
}

func (e *Exporter) send(batch []finishedSpan) error {
	spans := make([]otlpSpan, len(batch))
	for i := range batch {
		spans[i] = batch[i].otlp()
	}
	scope := map[string]any{"scope": map[string]string{"name": "server-go"}, "spans": spans}
	resource := map[string]any{"attributes": []attribute{textAttribute("service.name", "pagedllm")}}
	body, err := json.Marshal(map[string]any{"resourceSpans": []any{
		map[string]any{"resource": resource, "scopeSpans": []any{scope}}}})
	if err != nil {
		return err
	}
	response, err := e.client.Post(e.url, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	// The connection is used again only if the body has been read.
	io.Copy(io.Discard, io.LimitReader(response.Body, 1<<20))
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("the collector answers %s", response.Status)
	}
	return nil
}

// An otlpSpan is a span in OTLP. Numbers of 64 bits are text there.
type otlpSpan struct {
	TraceID    string         `json:"traceId"`
	SpanID     string         `json:"spanId"`
	ParentID   string         `json:"parentSpanId,omitempty"`
	Name       string         `json:"name"`
	Kind       int            `json:"kind"`
	Begin      string         `json:"startTimeUnixNano"`
	End        string         `json:"endTimeUnixNano"`
	Attributes []attribute    `json:"attributes"`
	Status     map[string]any `json:"status"`
}

type attribute struct {
	Key   string         `json:"key"`
	Value map[string]any `json:"value"`
}

func textAttribute(key, value string) attribute {
	return attribute{key, map[string]any{"stringValue": value}}
}

func intAttribute(key string, value int) attribute {
	return attribute{key, map[string]any{"intValue": strconv.Itoa(value)}}
}

// otlp names attributes by the semantic conventions of OpenTelemetry.
func (f *finishedSpan) otlp() otlpSpan {
	const kindServer, statusError = 2, 2
	r := f.record
	s := otlpSpan{TraceID: hex.EncodeToString(r.span.trace[:]),
		SpanID: hex.EncodeToString(r.span.id[:]), Name: f.name, Kind: kindServer,
		Begin:      strconv.FormatInt(r.begin.UnixNano(), 10),
		End:        strconv.FormatInt(f.end.UnixNano(), 10),
		Attributes: []attribute{intAttribute("http.response.status_code", f.status)},
		Status:     map[string]any{}}
	if r.span.parent != [8]byte{} {
		s.ParentID = hex.EncodeToString(r.span.parent[:])
	}
	if r.model != "" {
		s.Attributes = append(s.Attributes, textAttribute("gen_ai.request.model", r.model),
			intAttribute("gen_ai.usage.input_tokens", r.usage.PromptTokens),
			intAttribute("gen_ai.usage.output_tokens", r.usage.CompletionTokens))
	}
	if r.err != nil {
		s.Status = map[string]any{"message": r.err.message}
		if f.status >= 500 {
			s.Status["code"] = statusError
		}
	}
	return s
}
