package pagedllm_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func newBudget(t *testing.T, bytes, maxBytes int64) *pagedllm.Budget {
	t.Helper()
	budget, err := pagedllm.NewBudget(bytes, maxBytes)
	if err != nil {
		t.Fatal(err)
	}
	return budget
}

// withBudget sets the budget of an engine.
func withBudget(budget *pagedllm.Budget) func(*pagedllm.Options) {
	return func(o *pagedllm.Options) { o.Budget, o.KVBytes = budget, 0 }
}

func stateOf(t *testing.T, budget *pagedllm.Budget) pagedllm.BudgetInfo {
	t.Helper()
	state, err := budget.Info()
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// takeAll takes all outputs from the engine's own queue.
func takeAll(t *testing.T, engine *pagedllm.Engine) []pagedllm.Output {
	t.Helper()
	outputs, err := engine.Queue().TryPoll()
	if err != nil {
		t.Fatal(err)
	}
	return outputs
}

func TestEnginesShareABudgetAndKeepItAfterClose(t *testing.T) {
	t.Parallel()
	budget := newBudget(t, 16<<20, 32<<20)
	first, second := open(t, withBudget(budget)), open(t, withBudget(budget))
	if state := stateOf(t, budget); state.Bytes != 16<<20 || state.MaxBytes != 32<<20 || state.Engines != 2 ||
		state.MinBytes == 0 || state.HeldBytes == 0 {
		t.Errorf("%+v", state)
	}
	for range 2 {
		if err := budget.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err := budget.Info()
	wantMessage(t, err, pagedllm.ErrClosed, "budget")
	wantErr(t, budget.Resize(8<<20), pagedllm.ErrClosed)
	_, err = pagedllm.Open(background, pagedllm.Options{ModelPath: model, Budget: budget})
	wantErr(t, err, pagedllm.ErrClosed)
	if text := generate(t, second, chat(t, second, france)).Text; text != paris {
		t.Errorf("%q", text)
	}
	if state := stateOf(t, first.Budget()); state.Engines != 2 || state.MaxBytes != 32<<20 {
		t.Errorf("%+v", state)
	}
}

func TestABudgetCanBeResizedWhileItsEngineRuns(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps, func(o *pagedllm.Options) { o.MaxModelLen, o.QueueCapacity = 256, 64 })
	budget, blocks := engine.Budget(), statsOf(t, engine).BlocksTotal
	add(t, engine.Queue(), chat(t, engine, france))
	step(t, engine, 1)
	minBytes := stateOf(t, budget).MinBytes
	if err := budget.Resize(minBytes); err != nil {
		t.Fatal(err)
	}
	if state := stateOf(t, budget); state.Bytes != minBytes || statsOf(t, engine).BlocksTotal >= blocks {
		t.Errorf("%+v, %d blocks before, %d after", state, blocks, statsOf(t, engine).BlocksTotal)
	}
	wantErr(t, budget.Resize(minBytes-1), pagedllm.ErrCapacity)
	wantErr(t, budget.Resize(17<<20), pagedllm.ErrCapacity)
	wantMessage(t, budget.Resize(-1), pagedllm.ErrInvalidArgument, "bytes is -1")
	step(t, engine, 0)
	var text strings.Builder
	for _, output := range takeAll(t, engine) {
		text.WriteString(output.Text)
	}
	if text.String() != paris {
		t.Errorf("%q", text.String())
	}
}

func TestAnEnginesOwnBudgetCanBeSharedAndClosesWithTheEngine(t *testing.T) {
	t.Parallel()
	first := open(t)
	budget := first.Budget()
	open(t, withBudget(budget))
	if state := stateOf(t, budget); state.Engines != 2 {
		t.Errorf("%+v", state)
	}
	wantMessage(t, budget.Close(), pagedllm.ErrInvalidArgument, "closes with the engine")
	first.Close()
	_, err := budget.Info()
	wantErr(t, err, pagedllm.ErrClosed)
	_, err = pagedllm.NewBudget(-1, 0)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "bytes is -1")
	_, err = pagedllm.NewBudget(2, 1)
	wantErr(t, err, pagedllm.ErrInvalidArgument)
}

func TestABudgetAndItsEngineKeepEachOtherReachable(t *testing.T) {
	engine := open(t, func(o *pagedllm.Options) { withBudget(newBudget(t, 16<<20, 0))(o) })
	budget := openUnheld(t).Budget()
	runtime.GC()
	runtime.GC()
	if stateOf(t, engine.Budget()).Bytes != 16<<20 || stateOf(t, budget).Engines != 1 {
		t.Error("a budget or engine in use was closed")
	}
}

func TestADeadlineReturnsTheTokensSoFarWithoutAnError(t *testing.T) {
	t.Parallel()
	var last pagedllm.Output
	// On a busy machine, the first step may begin after a short deadline.
	for deadline := 300 * time.Millisecond; last.GeneratedTokens == 0 && deadline < lastResort; deadline *= 2 {
		engine := open(t, hostSteps)
		request := endless
		request.Deadline = deadline
		add(t, engine.Queue(), request)
		step(t, engine, 1)
		time.Sleep(deadline + 10*time.Millisecond)
		step(t, engine, 0)
		outputs := takeAll(t, engine)
		last = outputs[len(outputs)-1]
		if last.FinishReason != pagedllm.FinishDeadline || last.Err != nil {
			t.Errorf("%+v", last)
		}
		if stats := statsOf(t, engine); stats.FinishedDeadline != 1 {
			t.Errorf("%+v", stats)
		}
	}
	if last.GeneratedTokens != 1 {
		t.Errorf("%+v", last)
	}
}

func TestEachTurnHasItsOwnDeadline(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Keep, request.Deadline = true, time.Hour
	sequence := engine.Sequence(generate(t, engine, request).Sequence)
	// A deadline of less than a millisecond is rounded up to one, not down to none.
	how := pagedllm.Resume{Sampling: pagedllm.Sampling{IgnoreEOS: true}, Deadline: 1}
	completion, err := sequence.Generate(background, how)
	if err != nil || completion.FinishReason != pagedllm.FinishDeadline {
		t.Errorf("%+v, %v", completion, err)
	}
}

func TestAPassedDeadlineIsRefused(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	for _, passed := range []time.Duration{-1, -time.Hour} {
		_, err := engine.Generate(background, pagedllm.Request{Prompt: "x", Deadline: passed})
		wantMessage(t, err, pagedllm.ErrInvalidArgument, "has passed")
	}
}

func TestOrderDeterminesTheFirstRequest(t *testing.T) {
	t.Parallel()
	for order, expected := range map[pagedllm.Order][]uint64{pagedllm.OrderFCFS: {0, 1}, pagedllm.OrderPriority: {1, 0}} {
		engine := open(t, hostSteps, func(o *pagedllm.Options) { o.Order, o.MaxSeqs, o.QueueCapacity = order, 1, 64 })
		for i := range 2 {
			request := chat(t, engine, france)
			request.UserData, request.Priority = uint64(i), i
			add(t, engine.Queue(), request)
		}
		step(t, engine, 0)
		var ends []uint64
		for _, output := range takeAll(t, engine) {
			if output.FinishReason != pagedllm.FinishNone {
				ends = append(ends, output.UserData)
			}
		}
		if !slices.Equal(ends, expected) {
			t.Errorf("%v: %v", order, ends)
		}
	}
	engine := open(t, hostSteps)
	for priority, words := range map[int]string{101: "priority is 101", -101: "priority is -101", 1 << 32: "Priority is 4294967296"} {
		_, err := engine.Queue().Add(pagedllm.Request{Prompt: "x", Priority: priority})
		wantMessage(t, err, pagedllm.ErrInvalidArgument, words)
	}
}

func TestPredictAdmissionAddsNoRequest(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps, func(o *pagedllm.Options) { o.MaxWaitingRequests, o.QueueCapacity = 1, 64 })
	request := chat(t, engine, france)
	predict := func() pagedllm.Admission {
		t.Helper()
		admission, err := engine.PredictAdmission(request)
		if err != nil {
			t.Fatal(err)
		}
		return admission
	}
	if empty := predict(); empty != (pagedllm.Admission{Admits: true, FitsNow: true}) {
		t.Errorf("%+v", empty)
	}
	add(t, engine.Queue(), request)
	if full := predict(); full.Admits || full.FitsNow || full.WaitingRequests != 1 || full.WaitingTokens == 0 {
		t.Errorf("%+v", full)
	}
	_, err := engine.Queue().Add(request)
	wantMessage(t, err, pagedllm.ErrCapacity, "max_waiting_requests is 1")
	var full *pagedllm.Error
	if !errors.As(err, &full) || !full.IsTemporary {
		t.Errorf("%+v is not temporary", err)
	}
	if stats := statsOf(t, engine); stats.AdmissionRejections != 1 {
		t.Errorf("%+v", stats)
	}
	step(t, engine, 0)
	if idle := predict(); !idle.Admits || !idle.FitsNow || idle.FirstToken == nil || *idle.FirstToken <= 0 {
		t.Errorf("%+v", idle)
	}
	if report, err := engine.Step(); err != nil || report.Unfinished != 0 {
		t.Errorf("PredictAdmission added a request: %+v, %v", report, err)
	}
	_, err = engine.PredictAdmission(pagedllm.Request{})
	wantErr(t, err, pagedllm.ErrInvalidArgument)
}

func TestSchedulingAndSwapOptionsReachTheLibrary(t *testing.T) {
	t.Parallel()
	options := small()
	plain, err := options.Plan()
	if err != nil {
		t.Fatal(err)
	}
	options.KVType = pagedllm.INT8
	options.SwapBytes, options.SwapPath = 1<<20, t.TempDir()
	options.Preemption = pagedllm.PreemptionAuto
	options.MaxWaitingTokens = 5
	options.Ageing = 3 * time.Second
	options.Batching, options.PrefillBudget = pagedllm.BatchingDecodeFirst, 4
	options.Allocation = pagedllm.AllocationMaxTokens
	plan, err := options.Plan()
	if err != nil {
		t.Fatal(err)
	}
	if plan.KVType != pagedllm.INT8 || plan.BlockBytes >= plain.BlockBytes || plan.MaxBlocks != plan.Blocks ||
		plan.SwapBlocks == 0 || plan.SwapBytes == 0 || plan.SwapBytes > 1<<20 {
		t.Errorf("%+v", plan)
	}
	engine := open(t, hostSteps, func(o *pagedllm.Options) { *o = options; o.HostSteps = true })
	add(t, engine.Queue(), chat(t, engine, france))
	_, err = engine.Queue().Add(chat(t, engine, france))
	wantMessage(t, err, pagedllm.ErrCapacity, "max_waiting_tokens is 5")
	if report, err := engine.Step(); err != nil || report.PrefillTokens != 4 {
		t.Errorf("%+v, %v", report, err)
	}
	if stats := statsOf(t, engine); stats.SwapBlocksTotal != plan.SwapBlocks {
		t.Errorf("%+v", stats)
	}
	options.SwapPath = "/nonexistent"
	_, err = pagedllm.Open(background, options)
	wantErr(t, err, pagedllm.ErrIO)
}

func TestTraceAndJournalAreWrittenToTheirPaths(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	trace, journal := filepath.Join(directory, "trace.json"), filepath.Join(directory, "journal")
	engine := open(t, func(o *pagedllm.Options) { o.TracePath, o.JournalPath = trace, journal })
	generate(t, engine, chat(t, engine, france))
	if stats := statsOf(t, engine); stats.TraceStopped || stats.JournalStopped {
		t.Errorf("%+v", stats)
	}
	engine.Close()
	for _, path := range []string{trace, journal} {
		if content, err := os.ReadFile(path); err != nil || len(content) == 0 {
			t.Errorf("%s: %d bytes, %v", path, len(content), err)
		}
	}
}

func TestTheLastOutputHasTheTimesOfItsRequest(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, "Tell me a short story about a small ship and the sea.")
	request.Sampling.IgnoreEOS, request.Sampling.MaxTokens = true, 30
	first := generate(t, engine, request)
	if timing := first.Timing; timing.Queued <= 0 || timing.FirstToken <= timing.Queued ||
		timing.LastToken <= timing.FirstToken || timing.LastToken > time.Minute {
		t.Errorf("%+v", timing)
	}
	if again := generate(t, engine, request); first.CachedTokens != 0 || again.CachedTokens == 0 || again.Preemptions != 0 {
		t.Errorf("%d cached tokens, then %d, %d preemptions", first.CachedTokens, again.CachedTokens, again.Preemptions)
	}
	if stats := statsOf(t, engine); stats.PromptTokensCached == 0 {
		t.Errorf("%+v", stats)
	}
	for output, err := range engine.Stream(background, request) {
		if err != nil || (output.Timing == pagedllm.Timing{}) != (output.FinishReason == pagedllm.FinishNone) {
			t.Errorf("%+v, %v", output, err)
		}
	}
}

func TestASnapshotHasTheBlocksOfTheRequests(t *testing.T) {
	t.Parallel()
	engine := open(t)
	generate(t, engine, chat(t, engine, france))
	text, err := engine.Snapshot(1000, 1000)
	if err != nil {
		t.Fatal(err)
	}
	var snapshot struct {
		Pool  struct{ Blocks, Free, Cached, Used int }
		Steps []struct{ Sequences int }
	}
	if err := json.Unmarshal(text, &snapshot); err != nil {
		t.Fatal(err, string(text))
	}
	pool := snapshot.Pool
	if pool.Cached == 0 || pool.Free+pool.Cached+pool.Used != pool.Blocks || len(snapshot.Steps) == 0 {
		t.Errorf("%s", text)
	}
	if text, err := engine.Snapshot(-1, -1); err != nil || !strings.Contains(string(text), `"runs":[]`) {
		t.Errorf("%v, %s", err, text)
	}
}

func TestMetricsAreAnOpenMetricsText(t *testing.T) {
	t.Parallel()
	engine := open(t)
	generate(t, engine, chat(t, engine, france))
	text, err := engine.Metrics()
	if err != nil || !strings.Contains(text, "pagedllm_request_success_total{") || !strings.HasSuffix(text, "# EOF\n") {
		t.Errorf("%v, %s", err, text)
	}
}
