package server

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// A fakeQueue returns a batch of outputs for each poll, and an error after the last one.
type fakeQueue struct {
	batches [][]pagedllm.Output
	err     error
}

func (q *fakeQueue) Poll(ctx context.Context) ([]pagedllm.Output, error) {
	if len(q.batches) == 0 {
		if q.err == nil {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return nil, q.err
	}
	batch := q.batches[0]
	q.batches = q.batches[1:]
	return batch, nil
}

func (q *fakeQueue) Close() error { return nil }

func fakeGeneration(sequences int, err error, batches ...[]pagedllm.Output) *generation {
	return &generation{queue: &fakeQueue{batches, err}, record: &record{}, results: sequences,
		open: sequences}
}

// texts runs each and returns the texts that it passes on.
func texts(ctx context.Context, g *generation, keepAlive time.Duration) (texts []string,
	written string, err error) {
	recorder := httptest.NewRecorder()
	s := &Server{options: Options{KeepAlive: keepAlive}}
	stream := newEventStream(&responseWriter{ResponseWriter: recorder, timeout: time.Second})
	err = g.each(ctx, s, stream, func(output *pagedllm.Output) error {
		texts = append(texts, output.Text)
		return nil
	})
	return texts, recorder.Body.String(), err
}

func TestOutputsBeforeAnErrorAreSent(t *testing.T) {
	failure := errors.New("it failed")
	g := fakeGeneration(2, nil, []pagedllm.Output{{Text: "a"},
		{Err: failure, FinishReason: pagedllm.FinishError}, {Text: "b"}})
	sent, _, err := texts(context.Background(), g, time.Minute)
	if strings.Join(sent, "") != "a" || err != failure || g.open != 1 {
		t.Errorf("%q, %v, %d open", sent, err, g.open)
	}
}

func TestOnlyTheIdleTimerCausesAComment(t *testing.T) {
	failure := errors.New("it failed")
	// The queue fails after the timer has fired.
	slow := fakeGeneration(1, failure)
	slow.queue = slowQueue{slow.queue}
	if _, written, err := texts(context.Background(), slow, time.Millisecond); err != failure {
		t.Errorf("%q, %v", written, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, written, err := texts(ctx, fakeGeneration(1, nil), 10*time.Millisecond)
	if !strings.HasPrefix(written, ": waiting\n\n: waiting\n\n") || err == nil {
		t.Errorf("%q, %v", written, err)
	}
}

// A slowQueue waits before each poll.
type slowQueue struct{ outputQueue }

func (q slowQueue) Poll(ctx context.Context) ([]pagedllm.Output, error) {
	time.Sleep(20 * time.Millisecond)
	return q.outputQueue.Poll(context.WithoutCancel(ctx))
}

func TestADeadlineKeepsTheResultsOfOtherSequences(t *testing.T) {
	late := pagedllm.Output{Index: 0, FinishReason: pagedllm.FinishDeadline}
	some := pagedllm.Output{Index: 1, FinishReason: pagedllm.FinishDeadline, GeneratedTokens: 3,
		Text: "abc"}
	outputs, err := fakeGeneration(2, nil, []pagedllm.Output{late, some}).all(context.Background())
	if err != nil || len(outputs) != 2 || outputs[1].Text != "abc" {
		t.Errorf("%v, %v", outputs, err)
	}
	some.GeneratedTokens = 0
	_, err = fakeGeneration(2, nil, []pagedllm.Output{late, some}).all(context.Background())
	if err == nil || toAPIError(err).status != 504 {
		t.Error(err)
	}
}

// handled starts a server with one endpoint and returns its log.
func handled(t *testing.T, answer endpoint) (*Server, *httptest.Server, func() string) {
	t.Helper()
	output := new(lockedBuffer)
	options := limits()
	options.Log = slog.New(slog.NewTextHandler(output, nil))
	s := newServer(t, options)
	mux := http.NewServeMux()
	mux.Handle("/", s.handle("", answer))
	server := httptest.NewUnstartedServer(mux)
	server.Config.ErrorLog = slog.NewLogLogger(options.Log.Handler(), slog.LevelWarn)
	server.Start()
	t.Cleanup(server.Close)
	return s, server, output.String
}

// counted waits until the metrics have a request with a status.
func counted(t *testing.T, s *Server, status string) {
	t.Helper()
	waitUntil(t, "the status "+status+" is counted", func() bool {
		return strings.Contains(s.counters.text(0), `status="`+status+`"} 1`)
	})
}

func TestAPanicBeforeTheAnswerIsStatus500(t *testing.T) {
	s, server, log := handled(t, func(http.ResponseWriter,
		*http.Request) error {
		panic("a broken invariant")
	})
	response, body := get(t, server.URL+"/")
	if response.StatusCode != 500 || !strings.Contains(body, "internal error") ||
		strings.Contains(body, "invariant") {
		t.Errorf("%s: %s", response.Status, body)
	}
	counted(t, s, "500")
	if !strings.Contains(log(), "a broken invariant") ||
		!strings.Contains(log(), "outcome_test.go") {
		t.Errorf("%s", log())
	}
}

func TestAPanicWithinTheAnswerClosesTheConnection(t *testing.T) {
	s, server, _ := handled(t, func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		w.Write(make([]byte, 10000))
		panic("a defect")
	})
	response, err := http.Get(server.URL)
	if err == nil {
		_, err = io.ReadAll(response.Body)
	}
	if err == nil {
		t.Error("the answer looks complete")
	}
	counted(t, s, "500")
}

func TestAnErrorInAStreamIsItsOutcome(t *testing.T) {
	s, server, log := handled(t, func(w http.ResponseWriter, r *http.Request) error {
		stream := newEventStream(w)
		err := &pagedllm.Error{Code: pagedllm.ErrOutOfMemory, Message: "no memory"}
		stream.fail(r.Context(), err, "", toAPIError(err).openAI())
		return nil
	})
	response, body := get(t, server.URL+"/")
	if response.StatusCode != 200 || !strings.Contains(body, "no memory") {
		t.Errorf("%s: %s", response.Status, body)
	}
	counted(t, s, "503")
	waitUntil(t, "it is logged", func() bool {
		return strings.Contains(log(), "level=ERROR msg=request") &&
			strings.Contains(log(), "status=503")
	})
}

func TestAnAnswerThatIsNotTakenIsItsOutcome(t *testing.T) {
	s, server, _ := handled(t, func(w http.ResponseWriter, _ *http.Request) error {
		writeJSON(w, http.StatusOK, strings.Repeat("a", 48<<20))
		return nil
	})
	connection := raw(t, server.Listener.Addr().String(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := io.ReadFull(connection, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	connection.Close()
	counted(t, s, "499")
}

func TestAClientThatEndsItsHalfOfTheConnectionHasNoEmptyAnswer(t *testing.T) {
	model := open(t, pagedllm.Options{HostSteps: true}) // the answer cannot end
	server := start(t, limits(), model)
	body := strings.Replace(endless, `, "stream": true`, "", 1)
	connection := raw(t, server.Listener.Addr().String(), rawPost(body)).(*net.TCPConn)
	waitUntil(t, "the request runs", func() bool { return stepOf(t, model).Sequences == 1 })
	if err := connection.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(connection); err != nil || len(answer) > 0 {
		t.Errorf("%q, %v", answer, err)
	}
}

func TestErrorsRepeatOnlyAPartOfALongText(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	long := strings.Repeat("é", 100000)
	for body, remedy := range map[string]string{
		`{"model": "` + long + `"}`: "lists the models",
		`{"` + long + `": 1}`:       "remove it",
		`{"prompt": "a", "structured_outputs": {"regex": "(` + long + `"}}`: "",
		`{"prompt": "a", "beam": {"early_stopping": "` + long +
			`"}}`: `"never"`,
		`{"prompt": "a", "logit_bias": {"` + long +
			`": 1}}`: "token ids",
		`{"prompt": "a", "structured_outputs": {"grammar": "start: \"` + long + ` \u0000"}}`: "",
	} {
		response, answer := post(t, server, "/v1/completions", "application/json", body)
		if response.StatusCode/100 != 4 || len(answer) > 4000 ||
			!strings.Contains(strings.ReplaceAll(string(answer), `\"`, `"`), remedy) {
			t.Errorf("%.40s: %s, %d bytes: %.300s", body, response.Status, len(answer), answer)
		}
	}
	if _, body := get(t, server.URL+"/"+strings.Repeat("x", 20000)); len(body) > 2000 {
		t.Errorf("%d bytes", len(body))
	}
}

func TestALargeAnswerHasADeadlineForEachPart(t *testing.T) {
	const size = 48 << 20
	ended := make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writer := &responseWriter{ResponseWriter: w, timeout: 500 * time.Millisecond}
		writer.WriteHeader(http.StatusOK)
		_, err := writer.Write(make([]byte, size))
		ended <- err
	}))
	defer server.Close()
	connection := raw(t, server.Listener.Addr().String(),
		"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	connection.SetDeadline(time.Now().Add(time.Minute))
	reader, total, begin := bufio.NewReaderSize(connection, 1<<20), 0, time.Now()
	for buffer := make([]byte, 1<<20); ; time.Sleep(20 * time.Millisecond) {
		n, err := io.ReadFull(reader, buffer)
		total += n
		if err != nil {
			break
		}
	}
	if err := <-ended; err != nil || total < size || time.Since(begin) < 600*time.Millisecond {
		t.Errorf("%v, %d bytes in %v", err, total, time.Since(begin))
	}
}

func TestPermanentErrorsOfCapacityAre400(t *testing.T) {
	model := open(t, pagedllm.Options{ModelPath: withTemplate(t,
		`{% for i in range(100000) %}{% for k in range(100000) %}{{ k }}{% endfor %}{% endfor %}`)})
	server := start(t, limits(), model)
	_, err := model.Engine.RenderChat([]pagedllm.Message{{Role: "user", Content: "a"}})
	if !errors.Is(err, pagedllm.ErrCapacity) {
		t.Fatal(err) // the test needs a template beyond a limit
	}
	ask(t, server, "/v1/chat/completions", `{`+sum+`}`, 400)
	e := toAPIError(noQueue(&pagedllm.Error{Code: pagedllm.ErrCapacity,
		Message: "no file descriptor"}))
	if e.status != 503 || e.retryAfter == 0 {
		t.Errorf("%+v", e)
	}
}

func TestWithoutADescriptorARequestCanBeRepeated(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	ask(t, server, "/v1/completions", `{`+france+`}`, 200) // opens the connection
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := syscall.Rlimit{Cur: 3, Max: limit.Max} // open descriptors remain
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	response, body := post(t, server, "/v1/completions", "application/json", `{`+france+`}`)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if response.StatusCode != 503 || response.Header.Get("Retry-After") == "" {
		t.Errorf("%s: %s", response.Status, body)
	}
	ask(t, server, "/v1/completions", `{`+france+`}`, 200)
}
