// Loads a server with many concurrent streams, and then with clients that vanish, that do not read
// and that send garbage, too. It checks that every text is that of a client alone, and that nothing
// is left behind.
//
// usage: load -url URL [-key KEY] [-model NAME] [-process ID] [-streams N] [-vanishing N] [-slow N]
// [-garbage N]
package main

import (
	"flag"
	"fmt"
	"os"
	"sync"
	"time"
)

// load is the load of one run.
type load struct {
	server    server
	process   int
	tokens    int
	streams   int
	vanishing int
	slow      int
	garbage   int
}

func main() {
	var l load
	flag.StringVar(&l.server.url, "url", "http://127.0.0.1:8080", "base `URL` of the server")
	flag.StringVar(&l.server.key, "key", "", "API `key`")
	flag.StringVar(&l.server.model, "model", "", "`name` of the model, if the server has several")
	flag.IntVar(&l.process, "process", 0, "process `id` of the server, to measure its CPU time")
	flag.IntVar(&l.tokens, "tokens", 48, "tokens of each stream")
	flag.IntVar(&l.streams, "streams", 1000, "concurrent streams")
	flag.IntVar(&l.vanishing, "vanishing", 200, "clients that vanish after the first token")
	flag.IntVar(&l.slow, "slow", 10, "clients that do not read")
	flag.IntVar(&l.garbage, "garbage", 50, "connections that send garbage")
	flag.Parse()
	l.server.open()
	if err := l.run(); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

// run first measures the streams alone, and then adds the other clients.
func (l *load) run() error {
	alone, err := l.textsAlone()
	if err != nil {
		return err
	}
	before, err := l.server.idleState()
	if err != nil {
		return err
	}
	streams := *l
	streams.vanishing, streams.slow, streams.garbage = 0, 0, 0
	if err := streams.measure(alone); err != nil {
		return err
	}
	begin := time.Now()
	if _, err := l.all(alone); err != nil {
		return err
	}
	fmt.Printf("load: with %d clients that vanished, %d that did not read and %d that sent "+
		"garbage: %.1f s, texts as alone\n",
		l.vanishing, l.slow, l.garbage, time.Since(begin).Seconds())
	return l.server.waitForState(before)
}

// measure prints the throughput and the CPU time of the host for each token.
func (l *load) measure(alone []string) error {
	before, err := hostCPU(l.process)
	if err != nil {
		return err
	}
	begin := time.Now()
	received, err := l.all(alone)
	if err != nil {
		return err
	}
	wall := time.Since(begin).Seconds()
	after, err := hostCPU(l.process)
	if err != nil {
		return err
	}
	fmt.Printf("load: %d streams of %d tokens: %.1f s, %.0f tokens/s, texts as alone\n", l.streams,
		l.tokens, wall, float64(received)/wall)
	if l.process != 0 {
		fmt.Printf("load: %.1f us of CPU time for each token, without the threads of the engine\n",
			(after-before).Seconds()*1e6/float64(received))
	}
	return nil
}

// questions have answers of the wanted length, because end tokens are ignored.
var questions = []string{
	"Tell me a story about a dog.", "What is 7 + 5?", "Count from 1.",
	"What is the capital of France?", "Give JSON for Anna, 31, Paris.",
	"What comes after Monday?", "Hello!", "What sound does a cow make?",
}

func (l *load) textsAlone() ([]string, error) {
	texts := make([]string, len(questions))
	for i := range questions {
		text, _, err := l.server.stream(i, l.tokens)
		if err != nil {
			return nil, err
		}
		texts[i] = text
	}
	return texts, nil
}

// all runs all clients at once. It returns the number of tokens that clients have received, and the
// first error.
func (l *load) all(alone []string) (received int, err error) {
	var clients sync.WaitGroup
	var mu sync.Mutex
	fail := func(problem error) {
		mu.Lock()
		defer mu.Unlock()
		if problem != nil && err == nil {
			err = problem
		}
	}
	start := func(count int, client func(i int) error) {
		for i := range count {
			clients.Add(1)
			go func() {
				defer clients.Done()
				fail(client(i))
			}()
		}
	}
	finished := make(chan struct{})
	var slow sync.WaitGroup
	slow.Add(l.slow)
	for range l.slow {
		go func() {
			defer slow.Done()
			fail(l.server.doNotRead(finished))
		}()
	}
	start(l.garbage, func(i int) error { return l.server.sendGarbage(i) })
	start(l.vanishing, func(i int) error {
		tokens, err := l.server.vanish(i, l.tokens)
		mu.Lock()
		received += tokens
		mu.Unlock()
		return err
	})
	start(l.streams, func(i int) error {
		text, tokens, err := l.server.stream(i, l.tokens)
		mu.Lock()
		received += tokens
		mu.Unlock()
		if err == nil && text != alone[i%len(alone)] {
			err = fmt.Errorf("stream %d has another text than alone: %q, want %q", i, text,
				alone[i%len(alone)])
		}
		return err
	})
	clients.Wait()
	// The server ends the slow readers while they are still connected.
	fail(l.server.waitUntilIdle())
	close(finished)
	slow.Wait()
	return received, err
}
