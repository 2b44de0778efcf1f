package main

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestFlagsAreChecked(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(empty, []byte("# no key\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for arguments, valid := range map[string]bool{
		"-model a":                               true,
		"-model x=a -model y=a -format x=hermes": true,
		"-model a -kv-bytes 4GiB -max-body 1KiB": true,
		"":                                       false,
		"a":                                      false,
		"-model a b":                             false,
		"-model d/a -model e/a":                  false,
		"-model a -kv-bytes 4GB":                 false,
		"-model a -kv-bytes 99999999999999999GiB": false,
		"-model a -max-requests 0":                false,
		"-model a -write-timeout 0s":              false,
		"-model a -api-keys " + empty:             false,
		"-model a -api-keys /nothing":             false,
		"-model a -colour red":                    false,
		"-model a -max-connections 0":             false,
		"-model a -max-logprobs -1":               false,
		"-model a -drain -1s":                     false,
		"-model a -max-prompt-bytes 0":            false,
		"-model a -format b=hermes":               false,
		"-model a -format a=hermes":               true,
		"-model =a":                               false,
		"-model x=":                               false,
		"-model a/b=c -format b=c=hermes":         false,
		"-model a/b=c/d -format d=hermes":         true,
		"-h":                                      false,
		"-model a -kv-events tcp://*:5557 -kv-events-replay tcp://[::1]:5558":    true,
		"-model a -model b -kv-events tcp://*:5557 -kv-events-topic x@{model}":   true,
		"-model a -model b -kv-events tcp://*:5557 -kv-events-topic x":           false,
		"-model a -model b -kv-events tcp://*:1 -kv-events-replay tcp://*:65535": false,
		"-model a -model b -kv-events tcp://*:1 -kv-events-replay tcp://*:65534": true,
		"-model a -kv-events tcp://:5557":                                        false,
		"-model a -kv-events tcp://localhost":                                    false,
		"-model a -kv-events tcp://localhost:65536":                              false,
		"-model a -kv-events 127.0.0.1:5557":                                     false,
		"-model a -kv-events ipc:///tmp/events":                                  false,
		"-model a -kv-events-replay tcp://*:5558":                                false,
		"-model a -kv-events tcp://*:0 -kv-events-replay x":                      false,
		"-model a -kv-events tcp://*:0 -kv-events-format json":                   false,
		"-model a -kv-events tcp://*:0 -kv-events-hashes text":                   false,
		"-model a -kv-events tcp://*:0 -kv-events-buffer 0":                      false,
	} {
		if _, err := parseFlags(strings.Fields(arguments)); (err == nil) != valid {
			t.Errorf("%s: %v", arguments, err)
		}
	}
}

// log collects the log of a program.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

// waitFor returns the first match in the log.
func (l *log) waitFor(t *testing.T, pattern string) string {
	t.Helper()
	for range 3000 {
		l.mu.Lock()
		match := regexp.MustCompile(pattern).FindString(l.text.String())
		l.mu.Unlock()
		if match != "" {
			return match
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("the log has no %s", pattern)
	return ""
}

func TestASignalEndsTheServerAfterItsRequests(t *testing.T) {
	for _, test := range []struct {
		grace, length, ends string
	}{{"60s", `"max_tokens": 100`, `"finish_reason":"length"`},
		{"1ms", `"max_tokens": 1000, "n": 16`, `"error"`}} {
		url, ended := serving(t, "-drain 0s -grace "+test.grace)
		response, err := http.Post(url+"/v1/completions", "application/json",
			strings.NewReader(`{"prompt": "Count", "ignore_eos": true, "stream": true, `+
				test.length+`}`))
		if err != nil {
			t.Fatal(err)
		}
		syscall.Kill(os.Getpid(), syscall.SIGTERM)
		body, err := io.ReadAll(response.Body)
		if err != nil || !strings.Contains(string(body), test.ends) {
			t.Errorf("grace %s: %.300s, %v", test.grace, body, err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

const tinyFlags = "-model tiny=../model -address 127.0.0.1:0 -kv-bytes 16MiB -threads 1 "

// serving starts the program and returns its address.
func serving(t *testing.T, flags string) (url string, ended chan error) {
	t.Helper()
	config, err := parseFlags(strings.Fields(tinyFlags + flags))
	if err != nil {
		t.Fatal(err)
	}
	output := new(log)
	ended = make(chan error, 1)
	go func() { ended <- run(config, slog.New(slog.NewTextHandler(output, nil))) }()
	return output.waitFor(t, `http://[0-9.:]+`), ended
}

func TestHealthFailsBeforeTheServerCloses(t *testing.T) {
	url, ended := serving(t, "-drain 1s")
	syscall.Kill(os.Getpid(), syscall.SIGTERM)
	for status, begin := 0, time.Now(); status != 503; {
		response, err := http.Get(url + "/health")
		if err != nil || time.Since(begin) > 5*time.Second {
			t.Fatalf("%v, status %d", err, status)
		}
		response.Body.Close()
		status = response.StatusCode
	}
	response, err := http.Post(url+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt": "a"}`))
	if err != nil || response.StatusCode != 200 {
		t.Error(response, err) // requests are still accepted
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestFurtherConnectionsWait(t *testing.T) {
	url, ended := serving(t, "-drain 0s -max-connections 1")
	address := strings.TrimPrefix(url, "http://")
	first, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(first, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if _, err := first.Read(make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	client := http.Client{Timeout: 300 * time.Millisecond,
		Transport: &http.Transport{DisableKeepAlives: true}}
	if response, err := client.Get(url + "/health"); err == nil {
		t.Error(response.Status)
	}
	first.Close()
	client.Timeout = 10 * time.Second
	if response, err := client.Get(url + "/health"); err != nil || response.StatusCode != 200 {
		t.Error(response, err)
	}
	syscall.Kill(os.Getpid(), syscall.SIGTERM)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAnUnknownFormatEndsTheProgram(t *testing.T) {
	config, err := parseFlags(strings.Fields(tinyFlags + "-format klingon"))
	if err == nil {
		err = run(config, slog.New(slog.NewTextHandler(io.Discard, nil)))
	}
	if err == nil || !strings.Contains(err.Error(), "klingon") {
		t.Error(err)
	}
}

func TestOtherHostsAreRefusedWithoutKeys(t *testing.T) {
	url, ended := serving(t, "-drain 0s")
	request, err := http.NewRequest(http.MethodGet, url+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Host = "attacker.example"
	response, err := http.DefaultClient.Do(request)
	if err != nil || response.StatusCode != 403 {
		t.Error(response, err)
	}
	syscall.Kill(os.Getpid(), syscall.SIGTERM)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
