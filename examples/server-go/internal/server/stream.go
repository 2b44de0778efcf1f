package server

import (
	"bytes"
	"encoding/json"
	"net/http"
	"time"
)

// A responseWriter remembers the status, and sets a deadline for the first write, so that a client
// that does not read cannot occupy the server.
type responseWriter struct {
	http.ResponseWriter
	timeout time.Duration
	status  int
}

func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *responseWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
		http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.timeout))
	}
	w.ResponseWriter.WriteHeader(status)
}

// An eventStream is an answer as Server-Sent Events.
type eventStream struct {
	writer     http.ResponseWriter
	connection *http.ResponseController
	timeout    time.Duration
	deadline   time.Time // of the next write
	buffer     bytes.Buffer
	encoder    *json.Encoder
	// err is the first error of a write: the client has gone or does not read.
	err error
}

// newEventStream begins an answer. From now on, errors are events.
func (s *Server) newEventStream(w http.ResponseWriter) *eventStream {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache")
	header.Set("X-Accel-Buffering", "no") // nginx would collect the events
	w.WriteHeader(http.StatusOK)
	e := &eventStream{writer: w, connection: http.NewResponseController(w), timeout: s.options.WriteTimeout}
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

// flush sends the events that were added. The deadline is for this flush only: a client may be as
// slow as its own answer.
func (e *eventStream) flush() error {
	if e.err != nil || e.buffer.Len() == 0 {
		return e.err
	}
	// A deadline is renewed when a tenth of its time has passed, because that takes time.
	if now := time.Now(); e.deadline.Sub(now) < e.timeout*9/10 {
		e.deadline = now.Add(e.timeout)
		e.connection.SetWriteDeadline(e.deadline)
	}
	if _, e.err = e.writer.Write(e.buffer.Bytes()); e.err == nil {
		e.err = e.connection.Flush()
	}
	e.buffer.Reset()
	return e.err
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
