package pagedllm_test

import (
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// The tests in this file count threads and descriptors of the process, so they do not run in
// parallel.

func TestAThousandWaitingStreamsBlockNoThreads(t *testing.T) {
	const streams = 1000
	engine := open(t, hostSteps)
	before := kernelThreads(t)
	var done sync.WaitGroup
	for range streams {
		done.Add(1)
		go func() {
			defer done.Done()
			request := pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: 2}}
			for _, err := range engine.Stream(background, request) {
				if err != nil {
					t.Error(err)
				}
			}
		}()
	}
	eventually(t, "all streams wait", func() bool { return parked() >= streams })
	waiting := kernelThreads(t)
	if err := engine.Start(); err != nil {
		t.Fatal(err)
	}
	done.Wait()
	served := kernelThreads(t)
	t.Logf("threads: %d before, %d while %d streams wait, %d after they were served", before, waiting, streams, served)
	if waiting >= before+32 || served >= before+32 {
		t.Error("waiting streams block threads")
	}
	if stats := statsOf(t, engine); stats.FinishedLength+stats.FinishedStop != streams {
		t.Errorf("some requests did not finish: %+v", stats)
	}
}

func TestANewQueueWithoutFreeDescriptorsReturnsErrCapacity(t *testing.T) {
	engine := open(t)
	var normal syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &normal); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 64, Max: normal.Max}); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_NOFILE, &normal)
	var files []*os.File
	for {
		file, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		defer file.Close()
		files = append(files, file)
	}
	for free := range 2 { // a queue needs two descriptors
		_, err := engine.NewQueue(1)
		wantMessage(t, err, pagedllm.ErrCapacity, "ulimit -n")
		_, err = engine.Generate(background, endless)
		wantErr(t, err, pagedllm.ErrCapacity)
		files[free].Close()
	}
	generate(t, engine, pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: 1}})
}

// wantNoLeak runs work and requires as many goroutines and descriptors as before.
func wantNoLeak(t *testing.T, work func()) {
	t.Helper()
	goroutines, descriptors := runtime.NumGoroutine(), openDescriptors(t)
	work()
	eventually(t, "the numbers of goroutines and descriptors are as before", func() bool {
		return runtime.NumGoroutine() <= goroutines && openDescriptors(t) <= descriptors
	})
}

func TestStreamsLeakNoGoroutineAndNoDescriptor(t *testing.T) {
	engine := open(t)
	request := chat(t, engine, france)
	generate(t, engine, request) // start the runtime's threads and descriptors
	wantNoLeak(t, func() {
		for range 20 {
			generate(t, engine, request)
			for range engine.Stream(background, endless) {
				break
			}
			ctx, cancel := cancellable(t)
			for range engine.Stream(ctx, endless) {
				cancel()
			}
		}
	})
}

func TestEnginesLeakNoGoroutineNoDescriptorAndNoThread(t *testing.T) {
	once := func() {
		engine, err := pagedllm.Open(background, small())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := engine.Queue().Add(endless); err != nil {
			t.Error(err)
		}
		engine.Close()
	}
	once()
	threads := kernelThreads(t)
	wantNoLeak(t, func() {
		for range 100 {
			once()
		}
	})
	if after := kernelThreads(t); after > threads+8 {
		t.Errorf("%d threads before, %d after", threads, after)
	}
}

func TestAnUnreachableEngineIsFreed(t *testing.T) {
	wantNoLeak(t, func() {
		engine, err := pagedllm.Open(background, small())
		if err != nil {
			t.Fatal(err)
		}
		generate(t, engine, pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: 2}})
		engine = nil
		descriptors := openDescriptors(t)
		eventually(t, "the engine's descriptors are closed", func() bool {
			runtime.GC()
			return openDescriptors(t) <= descriptors-2
		})
	})
}

func TestAnUnreachableQueueAbortsItsRequests(t *testing.T) {
	engine := open(t)
	queue, err := engine.NewQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := queue.Add(endless); err != nil {
		t.Fatal(err)
	}
	queue = nil
	eventually(t, "the request is aborted", func() bool {
		runtime.GC()
		return statsOf(t, engine).FinishedAbort == 1
	})
	eventuallyIdle(t, engine)
}

func TestAQueueKeepsItsEngineReachable(t *testing.T) {
	queue := openQueue(t)
	runtime.GC()
	runtime.GC()
	if _, err := queue.Add(pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: 1}}); err != nil {
		t.Fatal(err)
	}
	if outputs, err := queue.Poll(background); err != nil || len(outputs) != 1 {
		t.Errorf("%v, %v", outputs, err)
	}
}

// openQueue returns the own queue of an engine to which the test holds no other reference.
func openQueue(t *testing.T) *pagedllm.Queue { return openUnheld(t).Queue() }

// openUnheld opens an engine without a cleanup, so that only the caller refers to it.
func openUnheld(t *testing.T) *pagedllm.Engine {
	engine, err := pagedllm.Open(background, small())
	if err != nil {
		t.Fatal(err)
	}
	return engine
}
