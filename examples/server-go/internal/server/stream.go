package server

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"time"
)

// A responseWriter remembers the status, and sets a deadline for each part of the answer, so that a
// client that does not read cannot occupy the server.
type responseWriter struct {
	http.ResponseWriter
	timeout  time.Duration
	status   int
	deadline time.Time // of the next write
	err      error     // of the first write that failed
}

// partBytes is the maximum length of a part of an answer.
const partBytes = 64 << 10

func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *responseWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
		w.extendDeadline()
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *responseWriter) Write(data []byte) (written int, err error) {
	for err == nil && written < len(data) {
		w.extendDeadline()
		var n int
		n, err = w.ResponseWriter.Write(data[written:min(len(data), written+partBytes)])
		written += n
	}
	if w.err == nil {
		w.err = err
	}
	return written, err
}

// extendDeadline sets the deadline of the next write. To save time, it does nothing within a tenth
// of the timeout after the last call.
func (w *responseWriter) extendDeadline() {
	if now := time.Now(); w.deadline.Sub(now) < w.timeout*9/10 {
		w.deadline = now.Add(w.timeout)
		http.NewResponseController(w.ResponseWriter).SetWriteDeadline(w.deadline)
	}
}

// An eventStream is an answer as Server-Sent Events.
type eventStream struct {
	writer     http.ResponseWriter
	connection *http.ResponseController
	buffer     bytes.Buffer
	encoder    *json.Encoder
	// err is the first error of a write: the client has gone or does not read.
	err error
}

// newEventStream begins an answer. Later errors are events.
func newEventStream(w http.ResponseWriter) *eventStream {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache")
	header.Set("X-Accel-Buffering", "no") // nginx would collect the events
	w.WriteHeader(http.StatusOK)
	e := &eventStream{writer: w, connection: http.NewResponseController(w)}
	e.encoder = json.NewEncoder(&e.buffer)
	e.encoder.SetEscapeHTML(false)
	return e
}

// add adds an event. It is sent by the next flush. name is "" for streams of unnamed events.
func (e *eventStream) add(name string, value any) {
	if name != "" {
		e.buffer.WriteString("event: ")
		e.buffer.WriteString(name)
		e.buffer.WriteByte('\n')
	}
	e.buffer.WriteString("data: ")
	if err := e.encoder.Encode(value); err != nil && e.err == nil { // also ends the line
		e.err = err
	}
	e.buffer.WriteByte('\n')
}

// flush sends the events that were added.
func (e *eventStream) flush() error {
	if e.err != nil || e.buffer.Len() == 0 {
		return e.err
	}
	_, err := e.writer.Write(e.buffer.Bytes())
	if err == nil {
		err = e.connection.Flush()
	}
	if err != nil {
		e.err = notTaken(err)
	}
	e.buffer.Reset()
	return e.err
}

// notTaken converts the error of a write.
func notTaken(err error) *apiError {
	return refusal(statusGone, "the client does not read its answer, or has closed the connection ("+
		err.Error()+")")
}

// fail ends a stream with an error, which event shows in the form of the API. The error is also
// that of the record.
func (e *eventStream) fail(ctx context.Context, err error, name string, event any) {
	recordOf(ctx).fail(err)
	e.add(name, event)
	e.flush()
}

// keepAlive sends a comment, which clients skip.
func (e *eventStream) keepAlive() error {
	e.buffer.WriteString(": waiting\n\n")
	return e.flush()
}

// done ends a stream of OpenAI.
func (e *eventStream) done() error {
	e.buffer.WriteString("data: [DONE]\n\n")
	return e.flush()
}
