package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"strings"
	"time"
)

// server is the server under load.
type server struct {
	url, key, model string
	client          http.Client
}

// clientTimeout is the longest time that a client waits.
const clientTimeout = 5 * time.Minute

func (s *server) open() {
	s.client.Transport = &http.Transport{MaxIdleConnsPerHost: 1}
	s.client.Timeout = clientTimeout
}

// body returns a request for question i.
func (s *server) body(i, tokens int, more map[string]any) []byte {
	request := map[string]any{
		"messages": []any{map[string]string{"role": "user",
			"content": questions[i%len(questions)]}},
		"temperature":    0.8,
		"seed":           i % len(questions),
		"max_tokens":     tokens,
		"ignore_eos":     true,
		"stream":         true,
		"stream_options": map[string]bool{"include_usage": true},
	}
	if s.model != "" {
		request["model"] = s.model
	}
	for name, value := range more {
		request[name] = value
	}
	text, err := json.Marshal(request)
	if err != nil {
		panic(err) // the request is made of texts and numbers
	}
	return text
}

func (s *server) request(ctx context.Context, method, path string, body []byte) (
	*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+s.key)
	response, err := s.client.Do(request)
	if err == nil && response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(response.Body)
		response.Body.Close()
		return nil, fmt.Errorf("%s: %s: %s", path, response.Status, text)
	}
	return response, err
}

// A chunk is an event of a stream.
type chunk struct {
	Choices []struct {
		Delta struct{ Content string }
	}
	Usage *struct {
		CompletionTokens int `json:"completion_tokens"`
	}
	Error *struct{ Message string }
}

// stream reads the answer to question i and returns its text and the number of its tokens.
func (s *server) stream(i, tokens int) (text string, received int, err error) {
	response, err := s.request(context.Background(), http.MethodPost, "/v1/chat/completions",
		s.body(i, tokens, nil))
	if err != nil {
		return "", 0, err
	}
	defer response.Body.Close()
	var answer strings.Builder
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var next chunk
		if err := json.Unmarshal([]byte(data), &next); err != nil {
			return "", 0, fmt.Errorf("%q: %w", data, err)
		}
		switch {
		case next.Error != nil:
			return "", 0, fmt.Errorf("stream %d: %s", i, next.Error.Message)
		case next.Usage != nil:
			received = next.Usage.CompletionTokens
		case len(next.Choices) > 0:
			answer.WriteString(next.Choices[0].Delta.Content)
		}
	}
	if received != tokens {
		return "", 0, fmt.Errorf("stream %d has %d tokens, want %d (%v)", i, received, tokens,
			lines.Err())
	}
	return answer.String(), received, nil
}

// vanish closes the connection after the first event with a text.
func (s *server) vanish(i, tokens int) (received int, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	response, err := s.request(ctx, http.MethodPost, "/v1/chat/completions",
		s.body(i, 20*tokens, nil))
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if strings.Contains(lines.Text(), `"content":"`) {
			return 1, nil
		}
	}
	return 0, fmt.Errorf("client %d has no token before it vanishes (%v)", i, lines.Err())
}

// dial opens a connection without the HTTP client.
func (s *server) dial() (net.Conn, error) {
	connection, err := net.DialTimeout("tcp", strings.TrimPrefix(s.url, "http://"), clientTimeout)
	if err == nil {
		connection.SetDeadline(time.Now().Add(clientTimeout))
	}
	return connection, err
}

// doNotRead asks for an answer that is larger than the buffers of the system, and reads nothing.
// The server needs -max-logprobs 100.
func (s *server) doNotRead(finished <-chan struct{}) error {
	connection, err := s.dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	connection.(*net.TCPConn).SetReadBuffer(4096)
	content := s.body(0, 900, map[string]any{"logprobs": true, "top_logprobs": 100})
	_, err = fmt.Fprintf(connection, "POST /v1/chat/completions HTTP/1.1\r\n"+
		"Host: load\r\nAuthorization: Bearer %s\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", s.key, len(content),
		content)
	<-finished
	return err
}

// sendGarbage sends random bytes, some of them after a valid beginning, and waits until the server
// closes the connection.
func (s *server) sendGarbage(i int) error {
	connection, err := s.dial()
	if err != nil {
		return err
	}
	defer connection.Close()
	bytes := make([]byte, 1+rand.Intn(8000))
	rand.Read(bytes)
	if i%2 == 0 {
		fmt.Fprintf(connection, "POST /v1/chat/completions HTTP/1.1\r\n"+
			"Host: load\r\nAuthorization: Bearer %s\r\n"+
			"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n",
			s.key, len(bytes))
	}
	connection.Write(bytes)
	connection.(*net.TCPConn).CloseWrite()
	io.Copy(io.Discard, connection) // an error means that the server has closed the connection
	return nil
}
