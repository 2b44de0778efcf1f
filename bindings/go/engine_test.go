package pagedllm_test

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func TestModelInfoDescribesTheModel(t *testing.T) {
	t.Parallel()
	engine := open(t)
	info := engine.ModelInfo()
	if info.Architecture != "LlamaForCausalLM" || info.VocabSize != 1024 || info.Layers != 4 || info.Threads != 1 ||
		info.MaxPositions != 1024 || info.MaxModelLen != 1024 || len(info.EOSTokens) != 2 || info.ISA == "" {
		t.Errorf("%+v", info)
	}
	info.EOSTokens[0]++
	if engine.ModelInfo().EOSTokens[0] == info.EOSTokens[0] {
		t.Error("the caller can change the engine's EOS tokens")
	}
	if !strings.Contains(pagedllm.BuildInfo(), pagedllm.Version()) {
		t.Errorf("%s is not in %s", pagedllm.Version(), pagedllm.BuildInfo())
	}
}

func TestPlanMatchesTheOpenedEngine(t *testing.T) {
	t.Parallel()
	options := small()
	options.BlockSize, options.KVType = 32, pagedllm.F32
	plan, err := options.Plan()
	if err != nil {
		t.Fatal(err)
	}
	if plan.BlockSize != 32 || plan.KVType != pagedllm.F32 || plan.KVBytes != int64(plan.Blocks)*plan.BlockBytes ||
		plan.KVBytes > options.KVBytes || plan.WeightBytes < 5<<20 || plan.WorkBytes == 0 || plan.FullSequences == 0 {
		t.Errorf("%+v", plan)
	}
	engine := open(t, func(o *pagedllm.Options) { *o = options })
	if stats := statsOf(t, engine); stats.BlocksTotal != plan.Blocks || engine.ModelInfo().MaxModelLen != plan.MaxModelLen {
		t.Errorf("planned %+v, opened %+v", plan, stats)
	}
}

func TestProgressEndsWithTheTotal(t *testing.T) {
	t.Parallel()
	var last, total int64
	open(t, func(o *pagedllm.Options) {
		o.Progress = func(done, all int64) { last, total = done, all }
	})
	if total < 5<<20 || last != total {
		t.Errorf("%d of %d bytes", last, total)
	}
}

// Each invalid option, and a part of the library's message for it.
func TestInvalidOptionsReturnTheLibrarysMessage(t *testing.T) {
	t.Parallel()
	damaged := t.TempDir()
	if err := os.WriteFile(damaged+"/config.json", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []struct {
		change func(*pagedllm.Options)
		code   pagedllm.Code
		words  string
	}{
		{func(o *pagedllm.Options) { o.ModelPath = "" }, pagedllm.ErrInvalidArgument, "model_path is empty"},
		{func(o *pagedllm.Options) { o.ModelPath = "mod\xff" }, pagedllm.ErrInvalidArgument, "not UTF-8"},
		{func(o *pagedllm.Options) { o.ModelPath = model + "\x00x" }, pagedllm.ErrIO, "does not exist"},
		{func(o *pagedllm.Options) { o.ModelPath = "nowhere" }, pagedllm.ErrIO, "nowhere"},
		{func(o *pagedllm.Options) { o.ModelPath = t.TempDir() }, pagedllm.ErrIO, "config.json: not found"},
		{func(o *pagedllm.Options) { o.ModelPath = damaged }, pagedllm.ErrModel, "config.json"},
		{func(o *pagedllm.Options) { o.Device = "abacus" }, pagedllm.ErrUnsupported, "abacus"},
		{func(o *pagedllm.Options) { o.Device = "cuda:99" }, pagedllm.ErrUnsupported, "cuda:99"},
		{func(o *pagedllm.Options) { o.MemoryFraction = 0.5 }, pagedllm.ErrUnsupported, "memory_fraction is 0.5"},
		{func(o *pagedllm.Options) { o.KVBytes = 1 }, pagedllm.ErrCapacity, "raise kv_bytes to"},
		{func(o *pagedllm.Options) { o.BlockSize = 12 }, pagedllm.ErrInvalidArgument, "block_size is 12"},
		{func(o *pagedllm.Options) { o.MaxBatchTokens = 3 }, pagedllm.ErrInvalidArgument, "max_batch_tokens is 3"},
		{func(o *pagedllm.Options) { o.MaxSeqs = math.MaxUint32 }, pagedllm.ErrInvalidArgument, "max_seqs is 4294967295"},
		{func(o *pagedllm.Options) { o.Threads = 1 << 20 }, pagedllm.ErrInvalidArgument, "threads is 1048576"},
		{func(o *pagedllm.Options) { o.Threads = 10000 }, pagedllm.ErrInvalidArgument, "threads is 10000"},
		{func(o *pagedllm.Options) { o.CPUs = "3-1" }, pagedllm.ErrInvalidArgument, "the range 3-1 is empty"},
		{func(o *pagedllm.Options) { o.ISA = 99 }, pagedllm.ErrInvalidArgument, "isa is 99"},
		{func(o *pagedllm.Options) { o.Weights = 99 }, pagedllm.ErrInvalidArgument, "weight_format is 99"},
		{func(o *pagedllm.Options) { o.WeightGroup = 64 }, pagedllm.ErrInvalidArgument, "weight_group is 64"},
		{func(o *pagedllm.Options) { o.KVType = 99 }, pagedllm.ErrInvalidArgument, "kv_dtype is 99"},
		{func(o *pagedllm.Options) { o.Preemption = 99 }, pagedllm.ErrInvalidArgument, "preemption is 99"},
		{func(o *pagedllm.Options) { o.Preemption = pagedllm.PreemptionSwap }, pagedllm.ErrInvalidArgument, "swap_bytes"},
		{func(o *pagedllm.Options) { o.Order = 99 }, pagedllm.ErrInvalidArgument, "order is 99"},
		{func(o *pagedllm.Options) { o.Batching = 99 }, pagedllm.ErrInvalidArgument, "batching is 99"},
		{func(o *pagedllm.Options) { o.Allocation = 99 }, pagedllm.ErrInvalidArgument, "allocation is 99"},
	} {
		options := small()
		bad.change(&options)
		_, err := options.Plan()
		wantMessage(t, err, bad.code, bad.words)
		_, err = pagedllm.Open(background, options)
		wantMessage(t, err, bad.code, bad.words)
	}
	options := small()
	options.KVBytes = math.MaxInt64
	_, err := pagedllm.Open(background, options)
	wantMessage(t, err, pagedllm.ErrOutOfMemory, "the system refused an allocation")
}

func TestTextsLongerThanMaxPromptBytesAreRefused(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps, func(o *pagedllm.Options) { o.MaxPromptBytes = 100 })
	longest := strings.Repeat("x", 100)
	if _, err := engine.Tokenize(longest, false); err != nil {
		t.Error(err)
	}
	_, tokenize := engine.Tokenize(longest+"x", false)
	_, add := engine.Queue().Add(pagedllm.Request{Prompt: longest + "x"})
	_, render := engine.RenderChat([]pagedllm.Message{{Role: "user", Content: longest}})
	for _, err := range []error{tokenize, add, render} {
		wantMessage(t, err, pagedllm.ErrInvalidArgument, "max_prompt_bytes 100")
	}
}

func TestNumbersOutOfRangeAreRefused(t *testing.T) {
	t.Parallel()
	for name, field := range map[string]func(*pagedllm.Options) *int{
		"BlockSize":      func(o *pagedllm.Options) *int { return &o.BlockSize },
		"MaxModelLen":    func(o *pagedllm.Options) *int { return &o.MaxModelLen },
		"MaxBatchTokens": func(o *pagedllm.Options) *int { return &o.MaxBatchTokens },
		"MaxSeqs":        func(o *pagedllm.Options) *int { return &o.MaxSeqs },
		"PrefillChunk":   func(o *pagedllm.Options) *int { return &o.PrefillChunk },
		"Threads":        func(o *pagedllm.Options) *int { return &o.Threads },
		"PrefillBudget":  func(o *pagedllm.Options) *int { return &o.PrefillBudget },
		"WeightGroup":    func(o *pagedllm.Options) *int { return &o.WeightGroup },
	} {
		for _, value := range []int{-1, math.MinInt, math.MaxUint32 + 1, math.MaxUint32 + 17, math.MaxInt} {
			options := small()
			*field(&options) = value
			_, err := options.Plan()
			wantMessage(t, err, pagedllm.ErrInvalidArgument, name+" is ")
		}
	}
	for _, options := range []pagedllm.Options{
		{KVBytes: -1}, {QueueCapacity: -1}, {MaxWaitingRequests: -1}, {MaxWaitingTokens: -1}, {MaxPromptBytes: -1}, {SwapBytes: -1},
	} {
		_, err := options.Plan()
		wantMessage(t, err, pagedllm.ErrInvalidArgument, " is -1; must be 0 to ")
	}
	for _, ageing := range []time.Duration{-1, math.MinInt64, (math.MaxUint32 + 1) * time.Millisecond} {
		options := pagedllm.Options{Ageing: ageing}
		_, err := options.Plan()
		wantMessage(t, err, pagedllm.ErrInvalidArgument, "Ageing is "+ageing.String()+"; must be 0s to 1193h2m47.295s")
	}
}

func TestQuantizedWeightsNeedFewerBytes(t *testing.T) {
	t.Parallel()
	bytes := func(weights pagedllm.Weights) int64 {
		options := small()
		options.Weights = weights
		plan, err := options.Plan()
		if err != nil {
			t.Fatal(err)
		}
		return plan.WeightBytes
	}
	bf16, int8, int4 := bytes(pagedllm.WeightsBF16), bytes(pagedllm.WeightsInt8), bytes(pagedllm.WeightsInt4)
	if int8 > bf16*11/20 || int4 >= int8 {
		t.Errorf("%d bytes in bf16, %d in int8, %d in int4", bf16, int8, int4)
	}
}

func TestPackedWeightsAreSavedAndReadBack(t *testing.T) {
	t.Parallel()
	options := small()
	options.PackedPath = t.TempDir()
	for _, want := range []struct {
		form   pagedllm.PackedForm
		reason string
	}{{pagedllm.PackedSaved, "no packed weights yet"}, {pagedllm.PackedRead, ""}} {
		engine, err := pagedllm.Open(context.Background(), options)
		if err != nil {
			t.Fatal(err)
		}
		info := engine.ModelInfo()
		engine.Close()
		if info.Packed != want.form || info.PackedReason != want.reason {
			t.Errorf("%v, %q: want %v, %q", info.Packed, info.PackedReason, want.form, want.reason)
		}
	}
	options.PackedPath = "/nonexistent"
	if _, err := pagedllm.Open(context.Background(), options); !errors.Is(err, pagedllm.ErrIO) {
		t.Errorf("%v", err)
	}
}

func TestOpenWithADoneContextLoadsNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := cancellable(t)
	cancel()
	progressed := false
	options := small()
	options.Progress = func(done, total int64) { progressed = true }
	engine, err := pagedllm.Open(ctx, options)
	wantErr(t, err, context.Canceled)
	if engine != nil || progressed {
		t.Error("the engine was loaded")
	}
}

func TestCancellingTheContextStopsLoading(t *testing.T) {
	t.Parallel()
	ctx, cancel := cancellable(t)
	var done, total int64
	options := small()
	options.ModelPath = modelOf(t, 200, 0)
	options.Progress = func(d, n int64) {
		done, total = d, n
		cancel()
	}
	engine, err := pagedllm.Open(ctx, options)
	wantErr(t, err, context.Canceled)
	if engine != nil || done >= total {
		t.Errorf("%d of %d bytes were loaded", done, total)
	}
}

func TestAPanicInProgressReachesTheCaller(t *testing.T) {
	t.Parallel()
	defer func() {
		if recover() != "panic in Progress" {
			t.Error("the panic did not reach the caller")
		}
	}()
	options := small()
	options.Progress = func(done, total int64) { panic("panic in Progress") }
	pagedllm.Open(background, options)
}

func TestASecondSteppingThreadIsRefused(t *testing.T) {
	t.Parallel()
	engine := open(t)
	wantMessage(t, engine.Start(), pagedllm.ErrBusy, "stepping this engine")
	eventually(t, "a step is refused", func() bool {
		_, err := engine.Step()
		return errors.Is(err, pagedllm.ErrBusy)
	})
	for range 2 {
		if err := engine.Stop(); err != nil {
			t.Error(err)
		}
	}
	if _, err := engine.Step(); err != nil {
		t.Error(err)
	}
}

func TestAHostCanStepAndPoll(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	queue := engine.Queue()
	request := chat(t, engine, france)
	request.UserData = math.MaxUint64
	id, err := queue.Add(request)
	if err != nil {
		t.Fatal(err)
	}
	if outputs, err := queue.TryPoll(); len(outputs) != 0 || err != nil {
		t.Errorf("before any step: %v, %v", outputs, err)
	}
	var text string
	report := pagedllm.StepReport{Unfinished: 1}
	for steps := 0; report.Unfinished > 0; steps++ {
		if report, err = engine.Step(); err != nil {
			t.Fatal(err)
		}
		if prefill := report.PrefillTokens > 0; report.Sequences != 1 || prefill != (steps == 0) || prefill == (report.DecodeTokens > 0) {
			t.Errorf("step %d: %+v", steps, report)
		}
		outputs, err := queue.TryPoll()
		if err != nil {
			t.Fatal(err)
		}
		for _, output := range outputs {
			if output.Request != id || output.UserData != math.MaxUint64 {
				t.Errorf("%+v", output)
			}
			text += output.Text
		}
	}
	if text != paris {
		t.Errorf("%q", text)
	}
}

func TestAbortEndsARequest(t *testing.T) {
	t.Parallel()
	engine := open(t)
	var last pagedllm.Output
	for output, err := range engine.Stream(background, endless) {
		if err != nil {
			t.Fatal(err)
		}
		if output.GeneratedTokens == 3 && output.FinishReason == pagedllm.FinishNone {
			if err := engine.Abort(output.Request); err != nil {
				t.Error(err)
			}
		}
		last = output
	}
	if last.FinishReason != pagedllm.FinishAbort {
		t.Errorf("%+v", last)
	}
	eventuallyIdle(t, engine)
	wantMessage(t, engine.Abort(last.Request), pagedllm.ErrNotFound, "")
	wantMessage(t, engine.Abort(math.MaxUint64), pagedllm.ErrNotFound, "18446744073709551615")
}

func TestTwoEnginesRunAtTheSameTime(t *testing.T) {
	t.Parallel()
	engines := []*pagedllm.Engine{open(t), open(t)}
	var done sync.WaitGroup
	for i, question := range []string{france, "What is 7 + 5?"} {
		done.Add(1)
		go func() {
			defer done.Done()
			for range 10 {
				if text := generate(t, engines[i], chat(t, engines[i], question)).Text; text != []string{paris, "12"}[i] {
					t.Errorf("engine %d: %q", i, text)
				}
			}
		}()
	}
	done.Wait()
	engines[0].Close()
	if text := generate(t, engines[1], chat(t, engines[1], france)).Text; text != paris {
		t.Errorf("%q", text)
	}
}

func TestSixtyFourGoroutinesShareAnEngine(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	var done sync.WaitGroup
	for i := range 64 {
		done.Add(1)
		go func() {
			defer done.Done()
			if text := generate(t, engine, request).Text; text != paris {
				t.Errorf("%q", text)
			}
			for output, err := range engine.Stream(background, endless) {
				if err != nil || output.GeneratedTokens > i%5 {
					break
				}
			}
			if _, err := engine.Tokenize("hello", true); err != nil {
				t.Error(err)
			}
			statsOf(t, engine)
		}()
	}
	done.Wait()
	eventuallyIdle(t, engine)
	if stats := statsOf(t, engine); stats.FinishedStop != 64 || stats.FinishedAbort != 64 || stats.FinishedError != 0 {
		t.Errorf("%+v", stats)
	}
}

// everyCall calls every function of a closed engine and its queue.
func everyCall(engine *pagedllm.Engine, queue *pagedllm.Queue) map[string]error {
	errs := map[string]error{"Start": engine.Start(), "Stop": engine.Stop(), "Abort": engine.Abort(1), "Healthy": engine.Healthy()}
	_, errs["Step"] = engine.Step()
	_, errs["Stats"] = engine.Stats()
	_, errs["Metrics"] = engine.Metrics()
	_, errs["Snapshot"] = engine.Snapshot(1, 1)
	_, errs["PredictAdmission"] = engine.PredictAdmission(endless)
	_, errs["Budget.Info"] = engine.Budget().Info()
	errs["Resize"] = engine.Budget().Resize(1 << 24)
	_, errs["Tokenize"] = engine.Tokenize("x", false)
	_, errs["Detokenize"] = engine.Detokenize(nil, false)
	_, errs["TokenBytes"] = engine.TokenBytes(5)
	_, errs["RenderChat"] = engine.RenderChat([]pagedllm.Message{})
	_, errs["NewQueue"] = engine.NewQueue(1)
	_, errs["Generate"] = engine.Generate(background, endless)
	_, errs["Add"] = engine.Queue().Add(endless)
	_, errs["Poll"] = engine.Queue().Poll(background)
	_, errs["TryPoll"] = engine.Queue().TryPoll()
	_, errs["Add to a queue"] = queue.Add(endless)
	_, errs["Poll of a queue"] = queue.Poll(background)
	_, errs["TryPoll of a queue"] = queue.TryPoll()
	for _, err := range engine.Stream(background, endless) {
		errs["Stream"] = err
	}
	return errs
}

func TestEveryCallAfterCloseReturnsErrClosed(t *testing.T) {
	t.Parallel()
	engine := open(t)
	queue, err := engine.NewQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := engine.Close(); err != nil {
			t.Error(err)
		}
	}
	for call, err := range everyCall(engine, queue) {
		if !errors.Is(err, pagedllm.ErrClosed) || !errors.Is(err, fs.ErrClosed) {
			t.Errorf("%s: %v", call, err)
		}
	}
	if engine.ModelInfo().Layers != 4 {
		t.Error("ModelInfo has lost its values")
	}
	for range 2 {
		if err := queue.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err = queue.Poll(background)
	wantMessage(t, err, pagedllm.ErrClosed, "queue")
}

func TestCloseEndsCallsInProgress(t *testing.T) {
	t.Parallel()
	for round := range 10 {
		hostSteps := round%2 == 1
		engine := open(t, func(o *pagedllm.Options) { o.HostSteps = hostSteps })
		queue, err := engine.NewQueue(1)
		if err != nil {
			t.Fatal(err)
		}
		var started, done sync.WaitGroup
		run := func(work func(started func()) error) {
			started.Add(1)
			done.Add(1)
			go func() {
				defer done.Done()
				wantErr(t, work(sync.OnceFunc(started.Done)), pagedllm.ErrClosed)
			}()
		}
		for range 4 {
			run(func(started func()) error {
				for { // the stream can reach its end before the engine is closed
					for _, err := range engine.Stream(background, endless) {
						started()
						if err != nil {
							return err
						}
					}
				}
			})
			run(func(started func()) error { started(); _, err := engine.Queue().Poll(background); return err })
			run(func(started func()) error { started(); _, err := queue.Poll(background); return err })
			run(func(started func()) error {
				for started(); ; {
					if _, err := engine.Stats(); err != nil {
						return err
					}
				}
			})
		}
		if hostSteps {
			run(func(started func()) error {
				for started(); ; {
					if _, err := engine.Step(); err != nil {
						return err
					}
				}
			})
		}
		started.Wait()
		for range 3 { // three goroutines close the engine concurrently
			done.Add(1)
			go func() {
				defer done.Done()
				if err := engine.Close(); err != nil {
					t.Error(err)
				}
				_, err := engine.Stats()
				wantErr(t, err, pagedllm.ErrClosed)
			}()
		}
		done.Wait()
		queue.Close()
	}
}

func TestCodesAreErrorsWithNames(t *testing.T) {
	t.Parallel()
	err := error(&pagedllm.Error{Code: pagedllm.ErrCapacity, Message: "full"})
	wantErr(t, err, pagedllm.ErrCapacity)
	if errors.Is(err, pagedllm.ErrBusy) || errors.Is(err, fs.ErrClosed) || err.Error() != "pagedllm: capacity: full" {
		t.Error(err)
	}
	wantErr(t, &pagedllm.Error{Code: pagedllm.ErrUnsupported}, errors.ErrUnsupported)
	names := map[string]bool{}
	for code := pagedllm.ErrInvalidArgument; code <= pagedllm.ErrCancelled; code++ {
		names[code.String()] = true
	}
	if len(names) != 11 || names["code 5"] || pagedllm.Code(12).String() != "code 12" {
		t.Errorf("%v", names)
	}
	if pagedllm.FinishAbort.String() != "abort" || pagedllm.FinishReason(9).String() != "9" {
		t.Error(pagedllm.FinishAbort, pagedllm.FinishReason(9))
	}
	if pagedllm.StopEOS.String() != "eos" || pagedllm.StopReason(9).String() != "9" {
		t.Error(pagedllm.StopEOS, pagedllm.StopReason(9))
	}
	if pagedllm.AVX2.String() != "avx2" || pagedllm.BF16.String() != "bf16" || pagedllm.INT8.String() != "int8" || pagedllm.FP8.String() != "fp8" {
		t.Error(pagedllm.AVX2, pagedllm.BF16, pagedllm.INT8, pagedllm.FP8)
	}
}

// The weights of this model are not finite: the request ends with an error, and the engine
// continues.
func TestNonFiniteWeightsFailTheRequest(t *testing.T) {
	t.Parallel()
	engine := open(t, skipTokenizer, func(o *pagedllm.Options) { o.ModelPath = modelOf(t, 1, 0xff) })
	for range 2 {
		var elements int
		for output, err := range engine.Stream(background, pagedllm.Request{PromptTokenIDs: []uint32{5, 6, 7}}) {
			elements++
			wantMessage(t, err, pagedllm.ErrModel, "finite")
			if output.FinishReason != pagedllm.FinishError || output.Err != err {
				t.Errorf("%+v", output)
			}
		}
		if elements != 1 {
			t.Errorf("%d elements", elements)
		}
	}
	eventually(t, "the errors are counted", func() bool { return statsOf(t, engine).FinishedError == 2 })
	if err := engine.Healthy(); err != nil {
		t.Error(err)
	}
}

func TestAnEngineIsHealthyUntilItIsClosed(t *testing.T) {
	t.Parallel()
	engine := open(t)
	if err := engine.Healthy(); err != nil {
		t.Error(err)
	}
	for _, err := range engine.Stream(background, endless) {
		if err != nil {
			t.Fatal(err)
		}
		if err := engine.Healthy(); err != nil {
			t.Error(err)
		}
		break
	}
	engine.Close()
	wantMessage(t, engine.Healthy(), pagedllm.ErrClosed, "engine")
}

func TestATimeoutReturnsTheContextsError(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	ctx, cancel := context.WithTimeout(background, 20*time.Millisecond)
	defer cancel()
	_, err := engine.Generate(ctx, endless)
	wantErr(t, err, context.DeadlineExceeded)
}
