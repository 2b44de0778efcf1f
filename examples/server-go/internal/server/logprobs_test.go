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
	request := pagedllm.Request{N: 256, Sampling: pagedllm.Sampling{LogProbs: true, TopLogProbs: 20,
		MaxTokens: 1000}}
	model := open(t, pagedllm.Options{})
	if err := model.limitLogprobs(&request, []prompt{{tokens: []uint32{1}}}, true); err != nil {
		t.Error(err) // a stream holds one part at a time
	}
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
