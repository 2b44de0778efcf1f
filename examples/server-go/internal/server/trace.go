package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net/http"
	"strings"
	"time"
)

// A span is the place of a request in a trace, as W3C Trace Context defines it.
type span struct {
	trace  [16]byte
	id     [8]byte
	parent [8]byte // zero if the client sent none
	flags  byte
}

// newSpan continues the trace of the header traceparent, or begins a trace. With several such
// headers, none of them is valid.
func newSpan(traceparents []string) (s span) {
	rand.Read(s.id[:])
	var fields []string
	if len(traceparents) == 1 {
		fields = strings.Split(traceparents[0], "-")
	}
	// Version 00 has four fields, and later versions can have more.
	valid := len(fields) >= 4 && isHex(fields[0], 1) && fields[0] != "ff" &&
		(fields[0] != "00" || len(fields) == 4) &&
		isHex(fields[1], 16) && isHex(fields[2], 8) && isHex(fields[3], 1)
	if valid {
		hex.Decode(s.trace[:], []byte(fields[1]))
		hex.Decode(s.parent[:], []byte(fields[2]))
		var flags [1]byte
		hex.Decode(flags[:], []byte(fields[3]))
		s.flags = flags[0] & 1 // the only flag that this server knows: the trace is sampled
	}
	if s.trace == [16]byte{} || s.parent == [8]byte{} {
		s = span{id: s.id, flags: 1}
		rand.Read(s.trace[:])
	}
	return s
}

// isHex reports whether a text is the given number of bytes in lower-case hexadecimal.
func isHex(text string, bytes int) bool {
	return len(text) == 2*bytes && strings.Trim(text, "0123456789abcdef") == ""
}

// header returns the value of the header traceresponse.
func (s *span) header() string {
	return "00-" + hex.EncodeToString(s.trace[:]) + "-" + hex.EncodeToString(s.id[:]) + "-" +
		hex.EncodeToString([]byte{s.flags})
}

// A record is what the log, the metrics and the trace report about a request.
type record struct {
	begin      time.Time
	span       span
	model      string
	usage      usage
	firstToken time.Duration // 0: none
	err        *apiError     // of a refusal, or in a stream
}

// fail records why a request failed.
func (r *record) fail(err error) { r.err = toAPIError(err) }

// outcome returns the status of a request. The status of an error in a stream, whose header was
// sent before the error, is that of the error.
func (r *record) outcome(sent int) int {
	if r.err != nil {
		return r.err.status
	}
	return sent
}

type recordKey struct{}

// recordOf returns the record of a request of handle.
func recordOf(ctx context.Context) *record { return ctx.Value(recordKey{}).(*record) }

// report ends the record of a request.
func (s *Server) report(r *http.Request, w *responseWriter, record *record) {
	status := record.outcome(w.status)
	duration := time.Since(record.begin)
	s.counters.add(r.Pattern, status)
	if s.options.Exporter != nil && record.span.flags&1 == 1 {
		s.options.Exporter.add(finishedSpan{record, r.Method + " " + r.Pattern, status,
			record.begin.Add(duration)})
	}
	level, attributes := slog.LevelInfo, []slog.Attr{
		slog.String("method", r.Method), slog.String("path", shorten(r.URL.Path)),
		slog.Int("status", status),
		slog.Duration("duration", duration),
		slog.String("trace_id", hex.EncodeToString(record.span.trace[:])),
		slog.String("span_id", hex.EncodeToString(record.span.id[:]))}
	if record.model != "" {
		attributes = append(attributes, slog.String("model", record.model),
			slog.Int("prompt_tokens", record.usage.PromptTokens),
			slog.Int("completion_tokens", record.usage.CompletionTokens),
			slog.Duration("first_token", record.firstToken))
	}
	switch r.URL.Path {
	case "/health", "/metrics", "/engine/snapshot":
		level = slog.LevelDebug // they come every few seconds
	}
	if record.err != nil {
		attributes = append(attributes, slog.String("error", record.err.message))
		if status >= 500 {
			level = slog.LevelError
		}
	}
	s.options.Log.LogAttrs(context.Background(), level, "request", attributes...)
}
