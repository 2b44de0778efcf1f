package main

import (
	"bytes"
	"io"
	"log/slog"
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
	}{{"60s", `"max_tokens": 100`, `"finish_reason":"length"`}, {"1ms", `"max_tokens": 1000, "n": 16`, `"error"`}} {
		config, err := parseFlags(strings.Fields("-model tiny=../model -address 127.0.0.1:0 -kv-bytes 16MiB -threads 1 -grace " + test.grace))
		if err != nil {
			t.Fatal(err)
		}
		output := new(log)
		ended := make(chan error, 1)
		go func() { ended <- run(config, slog.New(slog.NewTextHandler(output, nil))) }()
		url := output.waitFor(t, `http://[0-9.:]+`)
		response, err := http.Post(url+"/v1/completions", "application/json",
			strings.NewReader(`{"prompt": "Count", "ignore_eos": true, "stream": true, `+test.length+`}`))
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
