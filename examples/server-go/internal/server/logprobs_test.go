package server

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func TestLogProbabilitiesAreLimited(t *testing.T) {
	options := limits()
	options.MaxLogprobs, options.MaxResults = 20, 256
	server := start(t, options, open(t, pagedllm.Options{MaxSeqs: 256}))
	for _, extra := range []string{`"logprobs": 21`, `"prompt_logprobs": 21`} {
		ask(t, server, "/v1/completions", `{`+france+`, `+extra+`}`, 400)
	}
	ask(t, server, "/v1/chat/completions", `{`+sum+`, "logprobs": true, "top_logprobs": 21}`, 400)
	// 256 sequences of up to a thousand tokens with 21 log probabilities each
	body := `{"prompt": "a", "n": 256, "logprobs": 20, "max_tokens": `
	answer := ask(t, server, "/v1/completions", body+`1000}`, 400)
	if message := at(t, answer, "error", "message"); !strings.Contains(message.(string),
		"5376000 log probabilities") {
		t.Error(message)
	}
	ask(t, server, "/v1/completions", body+`1}`, 200)
}

func TestOnlyHeldLogProbabilitiesCount(t *testing.T) {
	model := open(t, pagedllm.Options{})
	scores := pagedllm.Sampling{LogProbs: true, TopLogProbs: 4, MaxTokens: 100}
	echo := scores
	echo.Echo = true
	prompts := []prompt{{tokens: make([]uint32, 10)}, {tokens: make([]uint32, 10)}}
	for i, test := range []struct {
		request pagedllm.Request
		stream  bool
		want    int
	}{
		{pagedllm.Request{Sampling: scores}, false, 2 * 100 * 5},
		{pagedllm.Request{Sampling: scores, N: 3}, false, 2 * 3 * 100 * 5},
		{pagedllm.Request{Sampling: scores, N: 3}, true, 0},
		{pagedllm.Request{Sampling: scores, BestOf: 3}, true, 2 * 3 * 100 * 5},
		{pagedllm.Request{Sampling: echo}, false, 2 * 110 * 5},
		{pagedllm.Request{Sampling: echo, TruncatePrompt: 4}, true, 2 * 4 * 5},
		{pagedllm.Request{Sampling: pagedllm.Sampling{LogProbs: true}}, false, 2 * (1024 - 10)},
		{pagedllm.Request{Sampling: pagedllm.Sampling{PromptLogProbs: true, PromptTopLogProbs: 1}},
			false, 2 * 10 * 2},
		{pagedllm.Request{Sampling: pagedllm.Sampling{PromptLogProbs: true, PromptOnly: true,
			LogProbs: true}}, false, 2 * 10},
		{pagedllm.Request{}, false, 0},
	} {
		if got := model.heldLogprobs(&test.request, prompts, test.stream); got != test.want {
			t.Errorf("%d: %d, want %d", i, got, test.want)
		}
	}
}

func TestRequestsShareTheLimitOfLogProbabilities(t *testing.T) {
	s := newServer(t, limits(), open(t, pagedllm.Options{}))
	url := httptestServer(t, s)
	ask := func(want int) {
		t.Helper()
		response, err := http.Post(url+"/v1/completions", "application/json",
			strings.NewReader(`{`+france+`, "logprobs": 1}`))
		if err != nil || response.StatusCode != want ||
			(response.Header.Get("Retry-After") != "") != (want == 429) {
			t.Error(response, err)
		}
		response.Body.Close()
	}
	s.logprobs.Add(maxAllLogprobs - 10)
	ask(429)
	s.logprobs.Add(10 - maxAllLogprobs)
	ask(200)
	waitUntil(t, "the reservation ends", func() bool { return s.logprobs.Load() == 0 })
}

func TestOffsetsAreThoseOfTheText(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	answer := ask(t, server, "/v1/completions",
		`{"prompt": "été 😀 x", "temperature": 0, "echo": true, "logprobs": 0}`, 200)
	text := []rune(at(t, answer, "choices", 0, "text").(string))
	tokens := at(t, answer, "choices", 0, "logprobs", "tokens").([]any)
	offsets := at(t, answer, "choices", 0, "logprobs", "text_offset").([]any)
	whole := 0
	for i, token := range tokens {
		token, offset := token.(string), int(offsets[i].(float64))
		// a part of a character, a special token
		if strings.HasPrefix(token, `\x`) || strings.HasPrefix(token, "<") {
			continue
		}
		whole++
		if !strings.HasPrefix(string(text[offset:]), token) {
			t.Errorf("token %q is not at %d of %q", token, offset, string(text))
		}
	}
	if whole < 4 || !strings.Contains(fmt.Sprint(tokens), `\x`) {
		t.Errorf("the test needs characters of several tokens: %q", tokens)
	}
}

func TestAlternativesHaveNoAlternatives(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	answer := ask(t, server, "/v1/chat/completions", `{`+sum+
		`, "logprobs": true, "top_logprobs": 2}`, 200)
	row := at(t, answer, "choices", 0, "logprobs", "content", 0)
	if nested, ok := at(t, row, "top_logprobs", 0).(map[string]any)["top_logprobs"]; ok {
		t.Error(nested)
	}
	answer = ask(t, server, "/v1/chat/completions", `{`+sum+`, "logprobs": true}`, 200)
	if row := at(t, answer, "choices", 0, "logprobs", "content",
		0); len(at(t, row, "top_logprobs").([]any)) != 0 {
		t.Error(row)
	}
}

func TestTextsWaitForACPU(t *testing.T) {
	model := open(t, pagedllm.Options{})
	s := newServer(t, limits(), model)
	url := httptestServer(t, s)
	for range cap(s.cpus) {
		s.cpus <- struct{}{}
	}
	answered := make(chan string, 4)
	for path, body := range map[string]string{
		"/tokenize": `{"prompt": "a"}`, "/v1/completions": `{` + france + `}`,
		"/v1/chat/completions":      `{` + sum + `}`,
		"/v1/messages/count_tokens": `{"messages": [{"role": "user", "content": "a"}]}`,
	} {
		go func() {
			response, err := http.Post(url+path, "application/json", strings.NewReader(body))
			if err == nil {
				response.Body.Close()
				answered <- response.Status
			}
		}()
	}
	waitUntil(t, "the requests are in progress", func() bool { return len(s.slots) == 4 })
	select {
	case status := <-answered:
		t.Errorf("%s without a CPU", status)
	default:
	}
	for range cap(s.cpus) {
		<-s.cpus
	}
	for range 4 {
		if status := <-answered; status != "200 OK" {
			t.Error(status)
		}
	}
}

func TestAClientThatHasGoneNeedsNoCPU(t *testing.T) {
	model := open(t, pagedllm.Options{})
	s := newServer(t, limits(), model)
	server := httptest.NewServer(s.Handler())
	t.Cleanup(server.Close)
	for range cap(s.cpus) {
		s.cpus <- struct{}{}
	}
	hangUp := postInBackground(t, server, `{`+france+`}`)
	waitUntil(t, "the request is in progress", func() bool { return len(s.slots) == 1 })
	hangUp()
	waitUntil(t, "the request ends without a CPU", func() bool { return len(s.slots) == 0 })

	gone, cancel := context.WithCancel(context.Background())
	cancel()
	output := pagedllm.Output{Tokens: []uint32{1}, LogProbs: []float32{-1},
		PromptLogProbs: []float32{-1}}
	served := s.models[0]
	if _, err := served.chatLogprobs(gone, &output); err != context.Canceled {
		t.Error(err)
	}
	if _, err := served.completionLogprobs(gone, &output, 0,
		&textPosition{}); err != context.Canceled {
		t.Error(err)
	}
	params := samplingParams{extensions: extensions{PromptLogprobs: pagedllm.Ptr(0)}}
	if _, err := params.report(gone, served, &output); err != context.Canceled {
		t.Error(err)
	}
}
