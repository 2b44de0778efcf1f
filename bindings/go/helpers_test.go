package pagedllm_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

const model = "../../examples/model"

var (
	background = context.Background()
	france     = "What is the capital of France?"
	paris      = "The capital of France is Paris."
	greedy     = pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0)}
	// endless generates tokens up to MaxModelLen, as fast as they are read.
	endless = pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{IgnoreEOS: true, Seed: pagedllm.Ptr(uint64(1))}}
)

// small returns options for a small engine, in which no request runs far ahead of its reader.
func small() pagedllm.Options {
	return pagedllm.Options{ModelPath: model, Threads: 1, KVBytes: 16 << 20, QueueCapacity: 8}
}

func hostSteps(o *pagedllm.Options)     { o.HostSteps = true }
func skipTokenizer(o *pagedllm.Options) { o.SkipTokenizer = true }

// open opens an engine and closes it at the end of the test.
func open(t testing.TB, changes ...func(*pagedllm.Options)) *pagedllm.Engine {
	t.Helper()
	options := small()
	for _, change := range changes {
		change(&options)
	}
	engine, err := pagedllm.Open(background, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	return engine
}

// chat returns a request for the greedy answer to a question.
func chat(t testing.TB, engine *pagedllm.Engine, question string) pagedllm.Request {
	t.Helper()
	prompt, err := engine.RenderChat([]pagedllm.Message{{Role: "user", Content: question}})
	if err != nil {
		t.Fatal(err)
	}
	return pagedllm.Request{Prompt: prompt, RawPrompt: true, Sampling: greedy}
}

func generate(t testing.TB, engine *pagedllm.Engine, request pagedllm.Request) pagedllm.Completion {
	t.Helper()
	completion, err := engine.Generate(background, request)
	if err != nil {
		t.Fatal(err)
	}
	return completion
}

func statsOf(t testing.TB, engine *pagedllm.Engine) pagedllm.Stats {
	t.Helper()
	stats, err := engine.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return stats
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("the error is %v, not %v", err, want)
	}
}

// wantMessage requires an error with the code whose message contains the words.
func wantMessage(t testing.TB, err error, code pagedllm.Code, words string) {
	t.Helper()
	var e *pagedllm.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Message, words) {
		t.Errorf("the error is %q, not of code %v about %q", err, code, words)
	}
}

// lastResort bounds a test that fails. A busy machine may take long.
const lastResort = 5 * time.Minute

// eventually waits until another thread has made the condition true.
func eventually(t testing.TB, what string, happens func() bool) {
	t.Helper()
	for deadline := time.Now().Add(lastResort); !happens(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, lastResort)
		}
	}
}

// eventuallyIdle waits until no request runs or waits and no block is in use.
func eventuallyIdle(t testing.TB, engine *pagedllm.Engine) {
	t.Helper()
	eventually(t, "no request is left and no block is in use", func() bool {
		stats := statsOf(t, engine)
		return stats.BlocksUsed == 0 && stats.BlocksFree+stats.BlocksCached == stats.BlocksTotal && stats.Waiting+stats.Running == 0
	})
}

// parked counts the goroutines that wait on the network poller.
func parked() int {
	stacks := make([]byte, 8<<20)
	return bytes.Count(stacks[:runtime.Stack(stacks, true)], []byte(" [IO wait"))
}

// kernelThreads counts the threads of the process.
func kernelThreads(t testing.TB) int { return countEntries(t, "/proc/self/task") }

func openDescriptors(t testing.TB) int { return countEntries(t, "/proc/self/fd") }

func countEntries(t testing.TB, directory string) int {
	t.Helper()
	entries, err := os.ReadDir(directory)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func cancellable(t testing.TB) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(background)
	t.Cleanup(cancel)
	return ctx, cancel
}
