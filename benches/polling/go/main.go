// Events per second and the host's CPU time per event, from Go: one queue for all requests, and one
// goroutine with a Stream per request. Then an upper bound of what a mapped ring of records could save.
package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	pagedllm "github.com/libpagedllm/libpagedllm/bindings/go"
)

var request = pagedllm.Request{PromptTokenIDs: []uint32{1}}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func hostCPU() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano()+usage.Stime.Nano()) - pagedllm.ScriptedDriverCPU()
}

// measure counts events for a second and prints the row.
func measure(how string, streams int, pace time.Duration, events *atomic.Int64) (cpuPerEvent time.Duration) {
	time.Sleep(200 * time.Millisecond)
	begin, cpu, before := time.Now(), hostCPU(), events.Load()
	time.Sleep(time.Second)
	count, seconds := events.Load()-before, time.Since(begin).Seconds()
	cpuPerEvent = (hostCPU() - cpu) / time.Duration(count)
	fmt.Printf("| Go | %s | %d | %s | %.0f | %.2f |\n", how, streams, between(pace), float64(count)/seconds, float64(cpuPerEvent.Nanoseconds())/1000)
	return cpuPerEvent
}

func oneQueue(streams int, pace time.Duration) time.Duration {
	engine := must(pagedllm.OpenScripted(pace))
	defer engine.Close()
	queue := must(engine.NewQueue(4096))
	for range streams {
		must(queue.Add(request))
	}
	var events atomic.Int64
	var reader sync.WaitGroup
	reader.Add(1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer reader.Done()
		for {
			outputs, err := queue.Poll(ctx)
			if err != nil {
				return
			}
			events.Add(int64(len(outputs)))
		}
	}()
	must(0, engine.Start())
	cpu := measure("one queue, Poll", streams, pace, &events)
	cancel()
	reader.Wait()
	return cpu
}

func streamPerRequest(streams int, pace time.Duration) time.Duration {
	engine := must(pagedllm.OpenScripted(pace))
	defer engine.Close()
	var events atomic.Int64
	var readers sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	for range streams {
		readers.Add(1)
		go func() {
			defer readers.Done()
			for _, err := range engine.Stream(ctx, request) {
				if err != nil {
					return
				}
				events.Add(1)
			}
		}()
	}
	must(0, engine.Start())
	cpu := measure("one Stream per request", streams, pace, &events)
	cancel()
	readers.Wait()
	return cpu
}

// pollAndCopy returns the time to take a step's outputs, and the part of it that copies them into Go.
func pollAndCopy(streams int) (poll, copied time.Duration) {
	engine := must(pagedllm.OpenScripted(0))
	defer engine.Close()
	queue := must(engine.NewQueue(4096))
	for range streams {
		must(queue.Add(request))
	}
	must(engine.Step())
	must(queue.TryPoll())
	const rounds = 5000
	for range rounds {
		must(engine.Step())
		begin := time.Now()
		must(queue.TryPoll())
		poll += time.Since(begin)
		must(engine.Step())
		copied += must(queue.CopyTime())
	}
	return poll / rounds, copied / rounds
}

func main() {
	type row struct {
		how     string
		streams int
		pace    time.Duration
		cost    time.Duration
	}
	var rows []row
	for _, pace := range []time.Duration{0, time.Millisecond} {
		for _, streams := range []int{1, 16, 256} {
			rows = append(rows, row{"one queue", streams, pace, oneQueue(streams, pace)})
		}
		for _, streams := range []int{1, 16, 256} {
			rows = append(rows, row{"one Stream per request", streams, pace, streamPerRequest(streams, pace)})
		}
	}
	fmt.Println("\n| Outputs in a batch | TryPoll | part that copies into Go | a ring would save per batch |\n| --- | --- | --- | --- |")
	saved := map[int]time.Duration{}
	for _, batch := range []int{1, 16, 256} {
		poll, copied := pollAndCopy(batch)
		saved[batch] = max(poll-copied, 0)
		fmt.Printf("| %d | %v | %v | %v |\n", batch, poll, copied, saved[batch])
	}
	fmt.Println("\n| How | Streams | Time between steps | A ring would gain at most |\n| --- | --- | --- | --- |")
	for _, row := range rows {
		// With one Stream per request, a batch has one output. If readers fall behind, its size is unknown.
		if row.how == "one Stream per request" && row.pace == 0 && row.streams > 1 {
			continue
		}
		batch := map[bool]int{true: row.streams, false: 1}[row.how == "one queue"]
		rest := max(row.cost-saved[batch]/time.Duration(batch), 1)
		fmt.Printf("| %s | %d | %s | %.2fx |\n", row.how, row.streams, between(row.pace), float64(row.cost)/float64(rest))
	}
}

func between(pace time.Duration) string {
	if pace == 0 {
		return "none"
	}
	return pace.String()
}
