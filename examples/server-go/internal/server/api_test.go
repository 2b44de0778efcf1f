package server

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

const (
	france = `"prompt": "The capital of France is", "temperature": 0`
	sum    = `"messages": [{"role": "user", "content": "What is 7 + 5?"}], "temperature": 0`
)

func TestStreamedCompletionsEqualCompleteOnes(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for _, extra := range []string{``, `, "max_tokens": 40, "ignore_eos": true`, `, "echo": true`,
		`, "stop": ["ari"]`, `, "n": 2, "seed": 5, "temperature": 1`,
		`, "echo": true, "max_tokens": 0`, `, "best_of": 3, "temperature": 0.9, "seed": 1`} {
		body := `{` + strings.Replace(france, `, "temperature": 0`, "", 1) + extra
		if !strings.Contains(extra, "temperature") {
			body += `, "temperature": 0`
		}
		whole := ask(t, server, "/v1/completions", body+`}`, 200)
		events := stream(t, server, "/v1/completions", body+
			`, "stream": true, "stream_options": {"include_usage": true}}`)
		choices := at(t, whole, "choices").([]any)
		for i, choice := range choices {
			var text, reason string
			for _, e := range events[:len(events)-2] {
				if at(t, e.data, "choices", 0, "index") == float64(i) {
					text += at(t, e.data, "choices", 0, "text").(string)
					if end, ok := at(t, e.data, "choices", 0, "finish_reason").(string); ok {
						reason += end
					}
				}
			}
			if want := at(t, choice, "text"); text != want ||
				reason != at(t, choice, "finish_reason") {
				t.Errorf("%s: %q, %q, want %v", extra, text, reason, choice)
			}
		}
		last := events[len(events)-2].data
		for _, count := range []string{"prompt_tokens", "completion_tokens", "total_tokens"} {
			if at(t, last, "usage", count) != at(t, whole, "usage", count) {
				t.Errorf("%s: %v, want %v", extra, at(t, last, "usage"), at(t, whole, "usage"))
			}
		}
		if events[len(events)-1].data != nil {
			t.Errorf("%s: the stream does not end with [DONE]", extra)
		}
	}
}

func TestCompletionsTakePromptsInEveryForm(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	want := at(t, ask(t, server, "/v1/completions", `{`+france+`}`, 200), "choices", 0, "text")
	if !strings.HasPrefix(want.(string), " Paris.") {
		t.Fatalf("%q", want)
	}
	tokens := at(t, ask(t, server, "/tokenize", `{"prompt": "The capital of France is"}`, 200),
		"tokens")
	ids := strings.ReplaceAll(fmt.Sprint(tokens), " ", ", ")
	for _, prompt := range []string{`["The capital of France is"]`, ids, `[` + ids + `, ` + ids +
		`]`} {
		answer := ask(t, server, "/v1/completions", `{"prompt": `+prompt+`, "temperature": 0}`, 200)
		for i, choice := range at(t, answer, "choices").([]any) {
			if at(t, choice, "text") != want || at(t, choice, "index") != float64(i) {
				t.Errorf("%s: %v", prompt, choice)
			}
		}
	}
	text := at(t, ask(t, server, "/detokenize", `{"tokens": `+ids+`, "skip_special_tokens": true}`,
		200), "prompt")
	if text != "The capital of France is" {
		t.Errorf("%q", text)
	}
}

func TestCompletionsReportLogProbabilities(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	answer := ask(t, server, "/v1/completions", `{`+france+
		`, "logprobs": 2, "echo": true, "prompt_logprobs": 1}`, 200)
	columns := at(t, answer, "choices", 0, "logprobs")
	tokens := at(t, columns, "tokens").([]any)
	for _, name := range []string{"token_logprobs", "top_logprobs", "text_offset"} {
		if column := at(t, columns, name).([]any); len(column) != len(tokens) {
			t.Errorf("%s has %d entries, want %d", name, len(column), len(tokens))
		}
	}
	if at(t, columns, "token_logprobs", 0) != nil ||
		at(t, columns, "token_logprobs", 1).(float64) >= 0 {
		t.Errorf("%v", columns)
	}
	scores := at(t, answer, "choices", 0, "prompt_logprobs").([]any)
	if len(scores) != 8 || scores[0] != nil ||
		at(t, scores[1], "logprob") != at(t, columns, "token_logprobs", 1) {
		t.Errorf("%v", scores)
	}
}

func TestBeamSearchReturnsTheBestBeamsFirst(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	answer := ask(t, server, "/v1/completions",
		`{"prompt": "The capital of", "beam": {"width": 3}, "n": 3}`, 200)
	first, last := at(t, answer, "choices", 0, "score").(float64),
		at(t, answer, "choices", 2, "score").(float64)
	if first < last || at(t, answer, "choices", 0, "text") == at(t, answer, "choices", 1, "text") {
		t.Errorf("%v", answer)
	}
}

func TestChatsAnswerWithLogProbabilitiesOfBytes(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	body := `{` + sum + `, "logprobs": true, "top_logprobs": 2`
	whole := ask(t, server, "/v1/chat/completions", body+`}`, 200)
	if at(t, whole, "choices", 0, "message", "content") != "12" ||
		at(t, whole, "choices", 0, "finish_reason") != "stop" {
		t.Errorf("%v", whole)
	}
	rows := at(t, whole, "choices", 0, "logprobs", "content").([]any)
	if len(rows) != 2 || !reflect.DeepEqual(at(t, rows[0], "bytes"), []any{49.0, 50.0}) ||
		len(at(t, rows[0], "top_logprobs").([]any)) != 2 {
		t.Errorf("%v", rows)
	}
	events := stream(t, server, "/v1/chat/completions", body+`, "stream": true}`)
	var streamed []any
	for _, e := range events[:len(events)-1] {
		if logprobs := at(t, e.data, "choices", 0, "logprobs"); logprobs != nil {
			streamed = append(streamed, at(t, logprobs, "content").([]any)...)
		}
	}
	if !reflect.DeepEqual(streamed, rows) ||
		joined(events, "choices", 0, "delta", "content") != "12" {
		t.Errorf("%v", events)
	}
}

func TestChatsTakeDeveloperMessagesAndParts(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	render := func(messages string) any {
		return at(t, ask(t, server, "/tokenize", `{"messages": `+messages+`}`, 200), "tokens")
	}
	plain := render(`[{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}]`)
	parts := render(`[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": ` +
		`"text", "text": "b"}]}, {"role": "user", "content": "c"}]`)
	if !reflect.DeepEqual(plain, parts) {
		t.Errorf("%v, want %v", parts, plain)
	}
}

func TestResponseFormatsConstrainTheAnswer(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	schema := `{"type": "object", "properties": {"name": {"enum": ["Anna"]}, "age": {"type": ` +
		`"integer", "maximum": 99}}, "required": ["name", "age"], "additionalProperties": false}`
	question := `"messages": [{"role": "user", "content": "Give JSON for Anna, 31, Paris."}], ` +
		`"temperature": 0`
	for path, format := range map[string]string{
		"/v1/chat/completions": `"response_format": {"type": "json_schema", "json_schema": ` +
			`{"name": "person", "schema": ` + schema + `}}`,
		"/v1/responses": `"text": {"format": {"type": "json_schema", "name": "person", ` +
			`"schema": ` + schema + `}}`,
	} {
		body, content := question, []any{"choices", 0, "message", "content"}
		if path == "/v1/responses" {
			body, content = strings.Replace(question, "messages", "input", 1),
				[]any{"output", 0, "content", 0, "text"}
		}
		text := at(t, ask(t, server, path, `{`+body+`, `+format+`}`, 200), content...).(string)
		if compact := strings.Join(strings.Fields(text), ""); !strings.HasPrefix(compact,
			`{"name":"Anna","age":`) || !strings.HasSuffix(compact, "}") {
			t.Errorf("%s: %q", path, text)
		}
	}
}

func TestTheGGUFModelAnswersAChat(t *testing.T) {
	if _, err := os.Stat(gguf); err != nil {
		t.Skipf("%s is missing; run scripts/setup.sh test", gguf)
	}
	smol := open(t, pagedllm.Options{ModelPath: gguf, MaxModelLen: 512})
	smol.Name, smol.Format = "smol", ""
	server := start(t, limits(), open(t, pagedllm.Options{}), smol)
	body := `{"model": "smol", "messages": [{"role": "user", "content": "What is the capital of ` +
		`France?"}], "temperature": 0, "max_tokens": 24`
	whole := at(t, ask(t, server, "/v1/chat/completions", body+`}`, 200), "choices", 0, "message",
		"content").(string)
	prompt, err := smol.Engine.RenderChat([]pagedllm.Message{{Role: "user",
		Content: "What is the capital of France?"}})
	if err != nil {
		t.Fatal(err)
	}
	alone, err := smol.Engine.Generate(context.Background(),
		pagedllm.Request{Prompt: prompt, RawPrompt: true,
			Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 24}})
	if err != nil || whole == "" || whole != alone.Text {
		t.Errorf("%q, want %q, %v", whole, alone.Text, err)
	}
	if text := joined(stream(t, server, "/v1/chat/completions", body+`, "stream": true}`),
		"choices", 0, "delta", "content"); text != whole {
		t.Errorf("%q, want %q", text, whole)
	}
	if message := at(t, ask(t, server, "/v1/chat/completions", `{"messages": []}`, 404), "error",
		"code"); message != "model_not_found" {
		t.Errorf("%v", message) // there are two models
	}
}

func get(t *testing.T, url string, header ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(body)
}

func TestMetricsOfSeveralModelsAreOneText(t *testing.T) {
	first := open(t, pagedllm.Options{ModelName: "tiny"})
	second := open(t, pagedllm.Options{ModelName: "other"})
	second.Name = "other"
	server := start(t, limits(), first, second)
	ask(t, server, "/v1/completions", `{"model": "other", `+france+`}`, 200)
	response, text := get(t, server.URL+"/metrics")
	if kind := response.Header.Get("Content-Type"); !strings.HasPrefix(kind,
		"application/openmetrics-text; version=1.0.0") {
		t.Error(kind)
	}
	if strings.Count(text, "# EOF\n") != 1 || !strings.HasSuffix(text, "# EOF\n") {
		t.Error("the text does not have one end")
	}
	types := make(map[string]bool)
	for _, line := range strings.Split(text, "\n") {
		if name, ok := strings.CutPrefix(line, "# TYPE "); ok {
			if types[name] {
				t.Errorf("%s occurs twice", name)
			}
			types[name] = true
		}
	}
	for _, sample := range []string{`pagedllm_generation_tokens_total{model_name="tiny"} 0`,
		`pagedllm_http_requests_total{path="/v1/completions",status="200"} 1`} {
		if !strings.Contains(text, sample+"\n") {
			t.Errorf("%s is missing", sample)
		}
	}
}

func TestTheListOfModelsAndTheHealthAreReported(t *testing.T) {
	model := open(t, pagedllm.Options{})
	handler := newServer(t, limits(), model)
	server := start(t, limits(), model)
	if response, body := get(t, server.URL+"/v1/models/tiny"); response.StatusCode != 200 ||
		!strings.Contains(body, `"max_model_len":1024`) {
		t.Errorf("%s", body)
	}
	if response, _ := get(t, server.URL+"/v1/models/none"); response.StatusCode != 404 {
		t.Error(response.Status)
	}
	if response, _ := get(t, server.URL+"/health"); response.StatusCode != 200 {
		t.Error(response.Status)
	}
	handler.Drain()
	draining := httptestServer(t, handler)
	if response, _ := get(t, draining+"/health"); response.StatusCode != 503 {
		t.Error(response.Status)
	}
	model.Engine.Close()
	if response, _ := get(t, server.URL+"/health"); response.StatusCode != 503 {
		t.Error(response.Status)
	}
	if code := at(t, ask(t, server, "/v1/completions", `{`+france+`}`, 503), "error",
		"type"); code != "server_error" {
		t.Error(code)
	}
}

func TestTheTraceOfTheClientIsContinued(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	const trace = "0af7651916cd43dd8448eb211c80319c"
	for header, continued := range map[string]bool{
		"00-" + trace + "-b7ad6b7169203331-01":                  true,
		"01-" + trace + "-b7ad6b7169203331-01-later":            true,
		"00-" + trace + "-b7ad6b7169203331-01-later":            false,
		"ff-" + trace + "-b7ad6b7169203331-01":                  false,
		"00-" + trace + "-0000000000000000-01":                  false,
		"00-" + strings.ToUpper(trace) + "-b7ad6b7169203331-01": false,
		"":                                     false,
		"00-" + trace + "-b7ad6b7169203331-ff": true,
	} {
		response, _ := get(t, server.URL+"/health", "traceparent", header)
		answer := response.Header.Get("traceresponse")
		if strings.HasPrefix(answer, "00-"+trace+"-") != continued || len(answer) != 55 ||
			strings.Contains(answer, "b7ad6b7169203331") {
			t.Errorf("%q: %q", header, answer)
		}
		if !strings.HasSuffix(answer, "-01") { // other flags are not passed on
			t.Errorf("%q: %q", header, answer)
		}
	}
	header := "00-" + trace + "-b7ad6b7169203331-01"
	if two := newSpan([]string{header, header}); strings.Contains(two.header(), trace) {
		t.Error(two.header())
	}
}
