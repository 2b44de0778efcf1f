package pagedllm_test

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// keep generates the given number of greedy tokens and takes ownership of the kept sequence.
func keep(t *testing.T, engine *pagedllm.Engine, tokens int) (*pagedllm.Sequence, pagedllm.Completion) {
	t.Helper()
	request := chat(t, engine, france)
	request.Keep = true
	request.Sampling.MaxTokens, request.Sampling.LogProbs = tokens, true
	completion := generate(t, engine, request)
	sequence := engine.Sequence(completion.Sequence)
	t.Cleanup(func() { sequence.Close() })
	return sequence, completion
}

// more returns a Resume that generates the given number of greedy tokens.
func more(tokens int) pagedllm.Resume {
	return pagedllm.Resume{Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: tokens, LogProbs: true}}
}

func resume(t *testing.T, sequence *pagedllm.Sequence, how pagedllm.Resume) pagedllm.Completion {
	t.Helper()
	completion, err := sequence.Generate(background, how)
	if err != nil {
		t.Fatal(err)
	}
	return completion
}

// fork sets the engine's queue, because the queue of a finished Generate is closed.
func fork(t *testing.T, engine *pagedllm.Engine, parent *pagedllm.Sequence, at int) *pagedllm.Sequence {
	t.Helper()
	child, err := parent.Fork(pagedllm.Fork{At: at, Queue: engine.Queue()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { child.Close() })
	return child
}

func infoOf(t *testing.T, sequence *pagedllm.Sequence) pagedllm.SequenceInfo {
	t.Helper()
	info, err := sequence.Info()
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// wantSame requires the tokens of want from index from on, with the same bits.
func wantSame(t *testing.T, got, want pagedllm.Completion, from int) {
	t.Helper()
	if !slices.Equal(got.Tokens, want.Tokens[from:]) || !slices.Equal(got.LogProbs, want.LogProbs[from:]) {
		t.Errorf("%v %v, not %v %v", got.Tokens, got.LogProbs, want.Tokens[from:], want.LogProbs[from:])
	}
}

func TestAForkContinuesLikeItsParent(t *testing.T) {
	t.Parallel()
	engine := open(t)
	_, whole := keep(t, engine, 11)
	parent, _ := keep(t, engine, 4)
	child := fork(t, engine, parent, 0)
	if child.ID() == parent.ID() || infoOf(t, child).Len != infoOf(t, parent).Len {
		t.Errorf("%+v, %+v", infoOf(t, parent), infoOf(t, child))
	}
	wantSame(t, resume(t, child, more(7)), whole, 4)
	wantSame(t, resume(t, parent, more(7)), whole, 4)
	if info := infoOf(t, child); info.Len != 27 || !info.Idle || info.Request != pagedllm.RequestID(child.ID()) {
		t.Errorf("%+v", info)
	}
}

func TestAForkCanStartAtAnEarlierPosition(t *testing.T) {
	t.Parallel()
	engine := open(t)
	parent, whole := keep(t, engine, 11)
	for _, at := range []int{16, 17, 22} {
		wantSame(t, resume(t, fork(t, engine, parent, at), more(27-at)), whole, at-16)
	}
	if child := fork(t, engine, parent, 3); resume(t, child, more(2)).PromptTokens != 3 {
		t.Error("a fork inside the prompt has tokens after its position")
	}
	if infoOf(t, parent).Len != 27 {
		t.Error("the fork has changed its parent")
	}
}

// draw returns a request with a seed.
func draw(tokens int) pagedllm.Request {
	sampling := pagedllm.Sampling{Temperature: pagedllm.Ptr(1.5), Seed: pagedllm.Ptr(uint64(7)), MaxTokens: tokens, IgnoreEOS: true}
	return pagedllm.Request{Prompt: "Once upon", Sampling: sampling}
}

// step runs the given number of steps. 0: until no request is unfinished.
func step(t *testing.T, engine *pagedllm.Engine, steps int) {
	t.Helper()
	for i := 0; i < steps || steps == 0; i++ {
		if i == 10000 {
			t.Fatal("requests remain unfinished: a queue may be full")
		}
		if report, err := engine.Step(); err != nil {
			t.Fatal(err)
		} else if report.Unfinished == 0 {
			return
		}
	}
}

// tokensBySequence takes all outputs from the queue and returns their tokens by sequence.
func tokensBySequence(t *testing.T, queue *pagedllm.Queue) map[pagedllm.SequenceID][]uint32 {
	t.Helper()
	tokens := map[pagedllm.SequenceID][]uint32{}
	outputs, err := queue.TryPoll()
	if err != nil {
		t.Fatal(err)
	}
	for _, output := range outputs {
		tokens[output.Sequence] = append(tokens[output.Sequence], output.Tokens...)
	}
	return tokens
}

func TestForksOfARunningSequenceRunAndDifferOnlyWithASeed(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps, func(o *pagedllm.Options) { o.QueueCapacity = 1000 })
	queue := engine.Queue()
	id := add(t, queue, draw(20))
	step(t, engine, 5)
	parent := engine.Sequence(pagedllm.SequenceID(id))
	same, err := parent.ForkMany(2, pagedllm.Fork{})
	if err != nil {
		t.Fatal(err)
	}
	seeded, err := parent.ForkMany(2, pagedllm.Fork{Seed: pagedllm.Ptr(uint64(9)), UserData: pagedllm.Ptr(uint64(5))})
	if err != nil {
		t.Fatal(err)
	}
	step(t, engine, 0)
	tokens := tokensBySequence(t, queue)
	whole := tokens[parent.ID()]
	for _, child := range same {
		if len(whole) != 20 || !slices.Equal(tokens[child.ID()], whole[5:]) {
			t.Errorf("the parent generates %v, its fork %v", whole, tokens[child.ID()])
		}
	}
	a, b := tokens[seeded[0].ID()], tokens[seeded[1].ID()]
	if len(a) != 15 || len(b) != 15 || slices.Equal(a, b) || slices.Equal(a, whole[5:]) {
		t.Errorf("%v, %v", a, b)
	}
}

func TestIdleForksOfARunningSequenceGenerateNothing(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	id := add(t, engine.Queue(), draw(5))
	step(t, engine, 2)
	child, err := engine.Sequence(pagedllm.SequenceID(id)).Fork(pagedllm.Fork{Idle: true})
	if err != nil {
		t.Fatal(err)
	}
	step(t, engine, 0)
	if info := infoOf(t, child); !info.Idle {
		t.Errorf("%+v", info)
	}
	if stats := statsOf(t, engine); stats.Idle != 1 {
		t.Errorf("%+v", stats)
	}
}

func TestAForkCanBeStreamed(t *testing.T) {
	t.Parallel()
	engine := open(t, func(o *pagedllm.Options) { o.QueueCapacity = 4 })
	requests := map[pagedllm.RequestID]int{}
	var child *pagedllm.Sequence
	for output, err := range engine.Stream(background, draw(50)) {
		if err != nil {
			t.Fatal(err)
		}
		if requests[output.Request]++; child == nil {
			if child, err = engine.Sequence(output.Sequence).Fork(pagedllm.Fork{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(requests) != 2 || requests[pagedllm.RequestID(child.ID())] == 0 {
		t.Errorf("%v", requests)
	}
}

func TestAResumedSequenceComputesOnlyAppendedTokens(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 11)
	before := statsOf(t, engine).PromptTokens
	question, err := engine.Tokenize("<|user|>\nWhat does a cow say?<|end|>\n<|assistant|>\n", false)
	if err != nil {
		t.Fatal(err)
	}
	if err := sequence.Append(question); err != nil {
		t.Fatal(err)
	}
	answer := resume(t, sequence, more(0))
	// The last token of a turn is sampled, but computed only in the next turn.
	if computed := statsOf(t, engine).PromptTokens - before; computed < len(question) || computed > len(question)+1 {
		t.Errorf("%d tokens were appended, %d computed", len(question), computed)
	}
	if answer.PromptTokens != 27+len(question) {
		t.Errorf("%+v", answer)
	}
	// The result equals that of one prompt with the whole conversation.
	conversation := chat(t, engine, france).Prompt + paris + "<|end|><|user|>\nWhat does a cow say?<|end|>\n<|assistant|>\n"
	whole := generate(t, engine, pagedllm.Request{Prompt: conversation, RawPrompt: true, Sampling: more(0).Sampling})
	if whole.Text != answer.Text || whole.PromptTokens != answer.PromptTokens {
		t.Errorf("%+v, %+v", whole, answer)
	}
}

func TestARewoundSequenceGeneratesTheSameTokens(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, whole := keep(t, engine, 11)
	for _, tokens := range []int{26, 20, 16} {
		if err := sequence.Rewind(tokens); err != nil {
			t.Fatal(err)
		}
		if info := infoOf(t, sequence); info.Len != tokens {
			t.Errorf("%+v", info)
		}
		wantSame(t, resume(t, sequence, more(27-tokens)), whole, tokens-16)
	}
}

func TestARunningSequenceCanBeRewoundWithItsRandomNumbers(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps, func(o *pagedllm.Options) { o.QueueCapacity = 1000 })
	id := add(t, engine.Queue(), draw(12))
	step(t, engine, 8)
	sequence := engine.Sequence(pagedllm.SequenceID(id))
	prompt := infoOf(t, sequence).Len - 8
	if err := sequence.Rewind(prompt + 3); err != nil {
		t.Fatal(err)
	}
	step(t, engine, 0)
	tokens := tokensBySequence(t, engine.Queue())[sequence.ID()]
	if len(tokens) != 8+9 || !slices.Equal(tokens[3:8], tokens[8:13]) {
		t.Errorf("%v", tokens)
	}
}

func TestCancellingAResumedStreamMakesItsSequenceIdle(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 2)
	endlessly := pagedllm.Resume{Sampling: endless.Sampling}
	for _, leave := range []func(cancel func()) (stop bool){
		func(cancel func()) bool { cancel(); return false },
		func(func()) bool { return true },
	} {
		ctx, cancel := cancellable(t)
		var last error
		for output, err := range sequence.Stream(ctx, endlessly) {
			if last = err; err == nil && output.Sequence != sequence.ID() {
				t.Errorf("%+v", output)
			}
			if err == nil && leave(cancel) {
				break
			}
		}
		if ctx.Err() != nil {
			wantErr(t, last, ctx.Err())
		}
		eventually(t, "the sequence is idle", func() bool { return infoOf(t, sequence).Idle })
	}
	if got := resume(t, sequence, more(1)); len(got.Tokens) != 1 {
		t.Errorf("%+v", got)
	}
	if stats := statsOf(t, engine); stats.FinishedAbort != 2 || stats.Idle != 1 {
		t.Errorf("%+v", stats)
	}
}

func TestEachSampleCanBeResumed(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := draw(4)
	request.N, request.Keep = 3, true
	samples, err := engine.GenerateAll(background, request)
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	for i, sample := range samples {
		done.Add(1)
		go func() {
			defer done.Done()
			sequence := engine.Sequence(sample.Sequence)
			defer sequence.Close()
			if info := infoOf(t, sequence); info.Index != i || info.Request != pagedllm.RequestID(samples[0].Sequence) {
				t.Errorf("%+v", info)
			}
			if got := resume(t, sequence, more(6)); len(got.Tokens) == 0 || got.Sequence != sample.Sequence {
				t.Errorf("%+v", got)
			}
		}()
	}
	done.Wait()
	eventuallyIdle(t, engine)
}

func TestASequenceCanBeResumedIntoAnotherQueue(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 2)
	how := more(3)
	how.UserData = pagedllm.Ptr(uint64(11))
	how.LastTurn = true
	queue := newQueue(t, engine, 10)
	if err := queue.Resume(sequence, how); err != nil {
		t.Fatal(err)
	}
	for finished := false; !finished; {
		outputs, err := queue.Poll(background)
		if err != nil {
			t.Fatal(err)
		}
		for _, output := range outputs {
			finished = output.FinishReason == pagedllm.FinishLength
			if output.UserData != 11 || output.Sequence != sequence.ID() {
				t.Errorf("%+v", output)
			}
		}
	}
	_, err := sequence.Info()
	wantErr(t, err, pagedllm.ErrNotFound)
	wantErr(t, sequence.Close(), pagedllm.ErrNotFound) // keep was not set
	if err := sequence.Close(); err != nil {
		t.Error(err)
	}
}

func TestInvalidSequenceCallsAreRefused(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 4)
	other := open(t)
	_, errUnknown := engine.Sequence(1 << 40).Fork(pagedllm.Fork{})
	_, errZero := engine.Sequence(0).Info()
	_, errNegative := sequence.ForkMany(-1, pagedllm.Fork{})
	_, errNone := sequence.ForkMany(0, pagedllm.Fork{Queue: engine.Queue()})
	_, errMany := sequence.ForkMany(1<<20, pagedllm.Fork{Queue: engine.Queue()})
	_, errBeyond := sequence.Fork(pagedllm.Fork{At: 21, Queue: engine.Queue()})
	_, errBefore := sequence.Fork(pagedllm.Fork{At: -1})
	_, errQueue := sequence.Fork(pagedllm.Fork{Queue: other.Queue()})
	_, errHot := sequence.Generate(background, pagedllm.Resume{Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(-1.0)}})
	_, errEcho := sequence.Generate(background, pagedllm.Resume{Sampling: pagedllm.Sampling{Echo: true}})
	for _, bad := range []struct {
		err  error
		code pagedllm.Code
	}{
		{errUnknown, pagedllm.ErrNotFound},
		{errZero, pagedllm.ErrNotFound},
		{errNegative, pagedllm.ErrInvalidArgument},
		{errNone, pagedllm.ErrInvalidArgument},
		{errMany, pagedllm.ErrCapacity},
		{errBeyond, pagedllm.ErrInvalidArgument},
		{errBefore, pagedllm.ErrInvalidArgument},
		{errQueue, pagedllm.ErrInvalidArgument},
		{errHot, pagedllm.ErrInvalidArgument},
		{errEcho, pagedllm.ErrInvalidArgument},
		{sequence.Resume(more(1)), pagedllm.ErrInvalidArgument}, // its queue is closed
		{other.Queue().Resume(sequence, more(1)), pagedllm.ErrInvalidArgument},
		{sequence.Rewind(0), pagedllm.ErrInvalidArgument},
		{sequence.Rewind(-1), pagedllm.ErrInvalidArgument},
		{sequence.Rewind(21), pagedllm.ErrInvalidArgument},
		{sequence.Rewind(math.MaxInt), pagedllm.ErrInvalidArgument},
		{sequence.Append([]uint32{1024}), pagedllm.ErrInvalidArgument},
		{sequence.Append(make([]uint32, 5000)), pagedllm.ErrInvalidArgument},
		{engine.Sequence(1 << 40).Append([]uint32{5}), pagedllm.ErrNotFound},
		{engine.Sequence(1 << 40).Rewind(1), pagedllm.ErrNotFound},
		{engine.Queue().Resume(engine.Sequence(1<<40), more(1)), pagedllm.ErrNotFound},
		{engine.Sequence(1 << 40).Close(), pagedllm.ErrNotFound},
	} {
		wantMessage(t, bad.err, bad.code, "")
	}
	if got := resume(t, sequence, more(7)); got.Text != "rance is Paris." {
		t.Errorf("%+v", got)
	}
}

func TestARunningSequenceCannotBeResumed(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	id := add(t, engine.Queue(), draw(5))
	sequence := engine.Sequence(pagedllm.SequenceID(id))
	wantMessage(t, sequence.Resume(more(1)), pagedllm.ErrInvalidArgument, "runs already")
	_, err := sequence.Generate(background, more(1))
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "runs already")
}

func TestEveryCallAfterSequenceCloseReturnsErrClosed(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	id := add(t, engine.Queue(), draw(500))
	step(t, engine, 3)
	sequence := engine.Sequence(pagedllm.SequenceID(id))
	for range 2 {
		if err := sequence.Close(); err != nil {
			t.Error(err)
		}
	}
	step(t, engine, 0)
	outputs, err := engine.Queue().TryPoll()
	if err != nil || outputs[len(outputs)-1].FinishReason != pagedllm.FinishAbort {
		t.Errorf("%+v, %v", outputs, err)
	}
	for call, err := range sequenceCalls(sequence) {
		if !isClosed(err) {
			t.Errorf("%s: %v", call, err)
		}
	}
	eventuallyIdle(t, engine)
}

// sequenceCalls calls every function of a closed sequence.
func sequenceCalls(s *pagedllm.Sequence) map[string]error {
	errs := map[string]error{"Append": s.Append([]uint32{5}), "Rewind": s.Rewind(1), "Resume": s.Resume(pagedllm.Resume{})}
	_, errs["Export"] = s.Export(background)
	_, errs["Fork"] = s.Fork(pagedllm.Fork{})
	_, errs["ForkMany"] = s.ForkMany(2, pagedllm.Fork{})
	_, errs["Info"] = s.Info()
	_, errs["Generate"] = s.Generate(background, pagedllm.Resume{})
	for _, err := range s.Stream(background, pagedllm.Resume{}) {
		errs["Stream"] = err
	}
	return errs
}

func isClosed(err error) bool {
	e, ok := err.(*pagedllm.Error)
	return ok && e.Code == pagedllm.ErrClosed
}

func TestEverySequenceCallAfterEngineCloseReturnsErrClosed(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 2)
	engine.Close()
	for call, err := range sequenceCalls(sequence) {
		if !isClosed(err) {
			t.Errorf("%s: %v", call, err)
		}
	}
	if err := sequence.Close(); err != nil {
		t.Error(err)
	}
}

func TestClosingTheEngineEndsAResumedStream(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 2)
	var last error
	for _, err := range sequence.Stream(background, pagedllm.Resume{Sampling: endless.Sampling}) {
		last = err
		go engine.Close()
	}
	wantErr(t, last, pagedllm.ErrClosed)
}

func TestAnUnreachableSequenceIsFreedUnlessItWasReleased(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Keep = true
	var released pagedllm.SequenceID
	func() {
		engine.Sequence(generate(t, engine, request).Sequence)
		released = engine.Sequence(generate(t, engine, request).Sequence).Release()
	}()
	eventually(t, "the sequence is freed", func() bool {
		runtime.GC()
		return statsOf(t, engine).Idle == 1
	})
	again := engine.Sequence(released)
	if !infoOf(t, again).Idle {
		t.Error("the released sequence was freed")
	}
	again.Close()
	eventuallyIdle(t, engine)
}

func TestManyGoroutinesForkOneConversation(t *testing.T) {
	t.Parallel()
	engine := open(t)
	_, whole := keep(t, engine, 11)
	trunk, _ := keep(t, engine, 4)
	var done sync.WaitGroup
	for range 16 {
		done.Add(1)
		go func() {
			defer done.Done()
			for range 3 {
				branch, err := trunk.Fork(pagedllm.Fork{Queue: engine.Queue()})
				if err != nil {
					t.Error(err)
					return
				}
				got, err := branch.Generate(background, more(7))
				if err != nil || !slices.Equal(got.Tokens, whole.Tokens[4:]) {
					t.Errorf("%+v, %v", got, err)
				}
				if err := branch.Close(); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	done.Wait()
	eventually(t, "only the two kept sequences are idle", func() bool { return statsOf(t, engine).Idle == 2 })
}
