// Package server answers the HTTP APIs of OpenAI and Anthropic with engines of this process. Each
// file has one topic:
//
//	server.go        the endpoints and what all of them share
//	admission.go     models, limits, and how a request is added to its engine
//	turn.go          a turn of a chat: chat completions, messages and responses share it
//	conversation.go  the generation of a turn: reasoning, content and tool calls
//	stream.go        Server-Sent Events
//	page.go          the page for browsers, page.html
package server

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// Options are the limits of a server.
type Options struct {
	// Keys are the accepted API keys. Empty: every client is accepted.
	Keys Keys
	// LocalHostsOnly refuses requests whose Host header does not name this machine. A page of
	// another site can let its own name resolve to 127.0.0.1, and would then have the same origin
	// as the server.
	LocalHostsOnly bool
	// MaxBodyBytes is the maximum length of the body of a request in bytes.
	MaxBodyBytes int64
	// MaxBodiesBytes is the maximum length of the bodies of all requests in progress in bytes. A
	// request beyond it is refused with 429.
	MaxBodiesBytes int64
	// ReadTimeout is the time within which the body of a request must arrive.
	ReadTimeout time.Duration
	// WriteTimeout is the time within which a client must take each part of its answer.
	WriteTimeout time.Duration
	// MaxRequests is the maximum number of requests in progress. More are refused with 429.
	MaxRequests int
	// MaxResults is the maximum number of sequences of one request: prompts, samples and beams.
	MaxResults int
	// MaxLogprobs is the maximum number of alternatives for each token.
	MaxLogprobs int
	// MaxWait is the longest acceptable time to the first token. A request with a later forecast is
	// refused with 429. 0: no limit.
	MaxWait time.Duration
	// MaxTime is the time after which a request ends with the tokens it has. 0: no limit.
	MaxTime time.Duration
	// KeepAlive is the time after which a stream without an output has a comment, so that proxies
	// do not close the connection.
	KeepAlive time.Duration
	// Log has one line for each request.
	Log *slog.Logger
	// Exporter sends the spans of requests to a collector. nil: they are not sent.
	Exporter *Exporter
}

// A Model is an engine and the name by which clients select it.
type Model struct {
	Name   string
	Engine *pagedllm.Engine
	// Format is the format of reasoning and tool calls. "": that of the chat template.
	Format string

	tokens tokenTable
	// formatWithoutCalls is the format of responses to requests without tools.
	formatWithoutCalls string
	// beginsWithReasoning is true if a response begins inside of the reasoning.
	beginsWithReasoning bool
}

// A Server answers HTTP requests.
type Server struct {
	options  Options
	models   []*Model
	created  int64
	slots    chan struct{} // one element for each request in progress
	cpus     chan struct{} // one element for each call of compute
	bodies   atomic.Int64  // bytes of the requests in progress
	logprobs atomic.Int64  // log probabilities of the requests in progress
	draining atomic.Bool
	counters counters
}

// New creates a server. It does not close the engines. It returns an error if the format of a model
// does not exist.
func New(models []*Model, options Options) (*Server, error) {
	for _, model := range models {
		if err := model.detectFormat(); err != nil {
			return nil, fmt.Errorf("the format %q of model %q: %w", model.Format, model.Name, err)
		}
		model.tokens = make(tokenTable, model.Engine.ModelInfo().VocabSize)
	}
	return &Server{options: options, models: models, created: time.Now().Unix(),
		slots: make(chan struct{}, options.MaxRequests),
		cpus:  make(chan struct{}, runtime.GOMAXPROCS(0))}, nil
}

// compute runs work on texts of a client: decoding, rendering, tokenizing, adding a request. At most
// as many goroutines do so at once as there are CPUs, so that long texts leave time to the engines.
func (s *Server) compute(ctx context.Context, work func() error) error {
	select {
	case s.cpus <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.cpus }()
	return work()
}

// Drain makes /health fail, so that load balancers send no more requests.
func (s *Server) Drain() { s.draining.Store(true) }

// An endpoint answers a request, or returns an error before it has written anything.
type endpoint func(http.ResponseWriter, *http.Request) error

// Handler returns the handler of all endpoints.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/health", s.handle(http.MethodGet, s.health))
	mux.Handle("/metrics", s.handle(http.MethodGet, s.authorized(s.metrics)))
	mux.Handle("/{$}", s.handle(http.MethodGet, s.home))
	mux.Handle("/engine/snapshot", s.handle(http.MethodGet, s.authorized(s.snapshot)))
	mux.Handle("/v1/models", s.handle(http.MethodGet, s.authorized(s.listModels)))
	mux.Handle("/v1/models/{name...}", s.handle(http.MethodGet, s.authorized(s.getModel)))
	for path, answer := range map[string]endpoint{
		"/v1/completions":           s.completions,
		"/v1/chat/completions":      s.chat,
		"/v1/responses":             s.responses,
		"/v1/messages":              s.messages,
		"/v1/messages/count_tokens": s.countTokens,
		"/tokenize":                 s.tokenize,
		"/detokenize":               s.detokenize,
	} {
		mux.Handle(path, s.handle(http.MethodPost, s.authorized(s.limited(answer))))
	}
	mux.Handle("/", s.handle("", func(_ http.ResponseWriter, r *http.Request) error {
		return refusal(http.StatusNotFound, fmt.Sprintf("no endpoint has the path %q", r.URL.Path))
	}))
	return mux
}

// handle is the outermost part of every endpoint: method, trace, errors and log.
func (s *Server) handle(method string, answer endpoint) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		record := &record{begin: time.Now(), span: newSpan(r.Header["Traceparent"])}
		writer := &responseWriter{ResponseWriter: w, timeout: s.options.WriteTimeout}
		writer.Header().Set("traceresponse", record.span.header())
		r = r.WithContext(context.WithValue(r.Context(), recordKey{}, record))
		err := s.recovered(method, r, writer, answer)
		switch {
		case err != nil:
			record.fail(err)
		case writer.err != nil && record.err == nil:
			record.fail(notTaken(writer.err))
		}
		// An answer that cannot be completed must not look complete: the connection is closed.
		abort := err != nil && (writer.status != 0 || toAPIError(err).status == statusGone)
		if err != nil && !abort {
			refuse(writer, r, err)
		}
		s.report(r, writer, record)
		if abort {
			panic(http.ErrAbortHandler)
		}
	})
}

// recovered answers a request. A panic becomes an error.
func (s *Server) recovered(method string, r *http.Request, w http.ResponseWriter,
	answer endpoint) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			s.options.Log.Error("panic", "cause", fmt.Sprint(cause), "stack", string(debug.Stack()))
			err = refusal(http.StatusInternalServerError,
				"internal error: a defect of the server; its log has the cause")
		}
	}()
	if s.options.LocalHostsOnly && !isLocalHost(r.Host) {
		return refusal(http.StatusForbidden,
			fmt.Sprintf("the Host header is %q; send localhost, or set API keys", r.Host))
	}
	if method != "" && r.Method != method &&
		!(method == http.MethodGet && r.Method == http.MethodHead) {
		w.Header().Set("Allow", method)
		return refusal(http.StatusMethodNotAllowed,
			fmt.Sprintf("the method is %s; send %s", r.Method, method))
	}
	return answer(w, r)
}

// isLocalHost reports whether a Host header names this machine. Clients of HTTP/1.0 send none.
func isLocalHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	ip := net.ParseIP(host)
	return host == "" || strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
}

// limited refuses a request if too many are in progress, or if their bodies are too large together.
// It runs before the body is read.
func (s *Server) limited(answer endpoint) endpoint {
	return func(w http.ResponseWriter, r *http.Request) error {
		select {
		case s.slots <- struct{}{}:
			defer func() { <-s.slots }()
		default:
			return tryLater(http.StatusTooManyRequests,
				fmt.Sprintf("too many requests are in progress (limit %d); try again later",
					s.options.MaxRequests))
		}
		length := r.ContentLength
		if length < 0 || length > s.options.MaxBodyBytes { // not known, or refused by decode
			length = s.options.MaxBodyBytes
		}
		defer s.bodies.Add(-length)
		if s.bodies.Add(length) > s.options.MaxBodiesBytes {
			return tryLater(http.StatusTooManyRequests,
				fmt.Sprintf("the requests in progress are too large together (limit %d bytes); "+
					"try again later", s.options.MaxBodiesBytes))
		}
		return answer(w, r)
	}
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) error {
	if s.draining.Load() {
		return refusal(http.StatusServiceUnavailable, "the server shuts down")
	}
	for _, model := range s.models {
		if err := model.Engine.Healthy(); err != nil {
			return refusal(http.StatusServiceUnavailable,
				fmt.Sprintf("model %q: %v", model.Name, err))
		}
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	return nil
}

// A modelObject is a model in the lists of OpenAI and of Anthropic.
type modelObject struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	MaxModelLen int    `json:"max_model_len"`
	// Members of Anthropic.
	Type        string `json:"type"`
	DisplayName string `json:"display_name"`
	CreatedAt   string `json:"created_at"`
}

func (s *Server) describe(model *Model) modelObject {
	return modelObject{ID: model.Name, Object: "model", Created: s.created, OwnedBy: "pagedllm",
		MaxModelLen: model.Engine.ModelInfo().MaxModelLen, Type: "model", DisplayName: model.Name,
		CreatedAt: time.Unix(s.created, 0).UTC().Format(time.RFC3339)}
}

func (s *Server) listModels(w http.ResponseWriter, _ *http.Request) error {
	list := struct {
		Object  string        `json:"object"`
		Data    []modelObject `json:"data"`
		HasMore bool          `json:"has_more"`
	}{Object: "list"}
	for _, model := range s.models {
		list.Data = append(list.Data, s.describe(model))
	}
	writeJSON(w, http.StatusOK, list)
	return nil
}

func (s *Server) getModel(w http.ResponseWriter, r *http.Request) error {
	model, err := s.model(r.Context(), r.PathValue("name"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.describe(model))
	return nil
}
