package pagedllm_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// request returns a request that generates the given number of tokens.
func request(tokens int) pagedllm.Request {
	return pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: tokens, IgnoreEOS: true}}
}

func newQueue(t *testing.T, engine *pagedllm.Engine, capacity int) *pagedllm.Queue {
	t.Helper()
	queue, err := engine.NewQueue(capacity)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { queue.Close() })
	return queue
}

func add(t *testing.T, queue *pagedllm.Queue, request pagedllm.Request) pagedllm.RequestID {
	t.Helper()
	id, err := queue.Add(request)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestOneReaderServesManyRequests(t *testing.T) {
	t.Parallel()
	engine := open(t)
	queue := newQueue(t, engine, 1000)
	left := map[pagedllm.RequestID]int{}
	for i := range 20 {
		left[add(t, queue, request(1+i))] = 1 + i
	}
	for len(left) > 0 {
		outputs, err := queue.Poll(background)
		if err != nil || len(outputs) == 0 {
			t.Fatalf("%v, %v", outputs, err)
		}
		for _, output := range outputs {
			left[output.Request] -= len(output.Tokens)
			if output.FinishReason != pagedllm.FinishNone {
				if left[output.Request] != 0 {
					t.Errorf("%d tokens are missing", left[output.Request])
				}
				delete(left, output.Request)
			}
		}
	}
}

// Each step signals the event once. If a wakeup were lost, a poll would wait without limit.
func TestNoWakeupIsLost(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	queue := newQueue(t, engine, 1)
	ctx, cancel := context.WithTimeout(background, lastResort)
	defer cancel()
	const tokens = 900
	add(t, queue, request(tokens))
	step := make(chan struct{})
	go func() {
		for range step {
			if _, err := engine.Step(); err != nil {
				t.Error(err)
			}
		}
	}()
	defer close(step)
	for range tokens {
		step <- struct{}{}
		if outputs, err := queue.Poll(ctx); err != nil || len(outputs) != 1 {
			t.Fatalf("%v, %v", outputs, err)
		}
	}
}

func TestManyPollersShareAQueue(t *testing.T) {
	t.Parallel()
	engine := open(t)
	queue := newQueue(t, engine, 1000)
	const pollers, tokens = 16, 200
	ctx, cancel := cancellable(t)
	var mu sync.Mutex
	var done sync.WaitGroup
	seen := 0
	for range pollers {
		done.Add(1)
		go func() {
			defer done.Done()
			for {
				outputs, err := queue.Poll(ctx)
				if err != nil {
					wantErr(t, err, context.Canceled)
					return
				}
				mu.Lock()
				for _, output := range outputs {
					seen += len(output.Tokens)
				}
				if seen == pollers*tokens {
					cancel()
				}
				mu.Unlock()
			}
		}()
	}
	for range pollers {
		add(t, queue, request(tokens))
	}
	done.Wait()
	if seen != pollers*tokens {
		t.Errorf("%d tokens", seen)
	}
}

func TestAContextEndsOnlyItsOwnPoll(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	queue := newQueue(t, engine, 10)
	type result struct {
		outputs []pagedllm.Output
		err     error
	}
	patient := make(chan result)
	go func() {
		outputs, err := queue.Poll(background)
		patient <- result{outputs, err}
	}()
	var impatient sync.WaitGroup
	for i := range 8 { // one poller holds the turn, the others wait for it
		impatient.Add(1)
		go func() {
			defer impatient.Done()
			ctx, cancel := context.WithTimeout(background, time.Duration(i)*5*time.Millisecond)
			defer cancel()
			_, err := queue.Poll(ctx)
			wantErr(t, err, context.DeadlineExceeded)
		}()
	}
	impatient.Wait()
	add(t, queue, request(1))
	if _, err := engine.Step(); err != nil {
		t.Fatal(err)
	}
	if got := <-patient; len(got.outputs) != 1 || got.err != nil {
		t.Errorf("%+v", got)
	}
}

// If the context is done while outputs arrive, no output is lost.
func TestCancellingAPollLosesNoOutput(t *testing.T) {
	t.Parallel()
	engine := open(t)
	queue := newQueue(t, engine, 10000)
	const tokens = 900
	add(t, queue, request(tokens))
	for seen := 0; seen < tokens; {
		ctx, cancel := context.WithTimeout(background, 300*time.Microsecond)
		outputs, err := queue.Poll(ctx)
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) || err != nil && outputs != nil {
			t.Fatalf("%v, %v", outputs, err)
		}
		for _, output := range outputs {
			if seen += len(output.Tokens); output.GeneratedTokens != seen {
				t.Fatalf("%d tokens seen of %d", seen, output.GeneratedTokens)
			}
		}
	}
}

func TestAFullQueuePausesItsRequestsAndDropsNoOutput(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	full, roomy := newQueue(t, engine, 3), newQueue(t, engine, 1000)
	add(t, full, request(50))
	add(t, roomy, request(50))
	var report pagedllm.StepReport
	for range 50 {
		var err error
		if report, err = engine.Step(); err != nil {
			t.Fatal(err)
		}
	}
	if report.Paused != 1 || report.Unfinished != 1 {
		t.Errorf("%+v", report)
	}
	if outputs, err := roomy.TryPoll(); len(outputs) != 50 || err != nil {
		t.Errorf("%d outputs, %v", len(outputs), err)
	}
	for seen := 0; seen < 50; {
		outputs, err := full.Poll(background)
		if err != nil || len(outputs) > 3 {
			t.Fatalf("%d outputs, %v", len(outputs), err)
		}
		seen += len(outputs)
		for range 3 {
			if _, err := engine.Step(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestClosingAQueueAbortsItsRequestsAndEndsItsPolls(t *testing.T) {
	t.Parallel()
	engine := open(t)
	queue, other := newQueue(t, engine, 1), newQueue(t, engine, 1)
	id := add(t, queue, endless)
	ended := make(chan error)
	for range 4 {
		go func() {
			for {
				if _, err := other.Poll(background); err != nil {
					ended <- err
					return
				}
			}
		}()
	}
	for range 2 {
		if err := errors.Join(queue.Close(), other.Close()); err != nil {
			t.Error(err)
		}
	}
	for range 4 {
		wantMessage(t, <-ended, pagedllm.ErrClosed, "queue")
	}
	_, err := queue.Add(endless)
	wantErr(t, err, pagedllm.ErrClosed)
	eventually(t, "the request is aborted", func() bool { return statsOf(t, engine).FinishedAbort == 1 })
	wantErr(t, engine.Abort(id), pagedllm.ErrNotFound)
	eventuallyIdle(t, engine)
}

func TestAQueueDeliversItsOutputsAfterItsEngineIsClosed(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	queue := newQueue(t, engine, 10)
	id := add(t, queue, endless)
	if _, err := engine.Step(); err != nil {
		t.Fatal(err)
	}
	engine.Close()
	outputs, err := queue.Poll(background)
	if err != nil || len(outputs) != 2 || outputs[0].GeneratedTokens != 1 ||
		outputs[1].Request != id || outputs[1].FinishReason != pagedllm.FinishAbort {
		t.Errorf("%+v, %v", outputs, err)
	}
	_, err = queue.Poll(background)
	wantMessage(t, err, pagedllm.ErrClosed, "engine")
}

func TestTheEnginesOwnQueueClosesWithTheEngine(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	wantMessage(t, engine.Queue().Close(), pagedllm.ErrInvalidArgument, "closes with the engine")
	if _, err := engine.Queue().TryPoll(); err != nil {
		t.Error(err)
	}
	wait := make(chan error)
	go func() {
		_, err := engine.Queue().Poll(background)
		wait <- err
	}()
	engine.Close()
	wantMessage(t, <-wait, pagedllm.ErrClosed, "engine")
}

func TestACapacityOfZeroIsRefused(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	_, err := engine.NewQueue(0)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "capacity is 0")
	_, err = engine.NewQueue(-1)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "capacity is -1")
}

func TestAPollKeepsAnOtherwiseUnreachableQueueOpen(t *testing.T) {
	engine := open(t, hostSteps)
	queue, err := engine.NewQueue(4)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := queue.Add(request(1)); err != nil {
		t.Fatal(err)
	}
	polled := make(chan error, 1)
	// The poll in progress is the last use of the queue.
	go func(queue *pagedllm.Queue) {
		_, err := queue.Poll(context.Background())
		polled <- err
	}(queue)
	queue = nil
	for range 20 {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	if _, err := engine.Step(); err != nil {
		t.Fatal(err)
	}
	if err := <-polled; err != nil {
		t.Fatalf("the queue was closed during a poll: %v", err)
	}
}
