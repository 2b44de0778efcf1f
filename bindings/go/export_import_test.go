package pagedllm_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func export(t *testing.T, sequence *pagedllm.Sequence) []byte {
	t.Helper()
	state, err := sequence.Export(background)
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// imported imports an idle sequence with outputs to a new queue.
func imported(t *testing.T, engine *pagedllm.Engine, state []byte) (*pagedllm.Sequence, *pagedllm.Queue) {
	t.Helper()
	queue := newQueue(t, engine, 64)
	sequence, err := queue.Import(state)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sequence.Close() })
	return sequence, queue
}

// continued resumes a sequence as if it had never been idle.
var continued = pagedllm.Resume{Continue: true}

// readToTheEnd reads outputs from the queue until the sequence ends.
func readToTheEnd(t *testing.T, sequence *pagedllm.Sequence, queue *pagedllm.Queue) (all pagedllm.Completion) {
	t.Helper()
	for all.FinishReason == pagedllm.FinishNone {
		outputs, err := queue.Poll(background)
		if err != nil {
			t.Fatal(err)
		}
		for _, output := range outputs {
			if output.Sequence != sequence.ID() || output.Err != nil {
				t.Fatalf("%+v", output)
			}
			all.Tokens = append(all.Tokens, output.Tokens...)
			all.LogProbs = append(all.LogProbs, output.LogProbs...)
			all.FinishReason, all.PromptTokens = output.FinishReason, output.PromptTokens
		}
	}
	return all
}

func TestAnImportedSequenceContinuesWithTheSameTokens(t *testing.T) {
	t.Parallel()
	from, to := open(t, func(o *pagedllm.Options) { o.QueueCapacity = 4 }), open(t)
	request := draw(40)
	request.Sampling.LogProbs = true
	var whole pagedllm.Completion
	var state []byte
	for output, err := range from.Stream(background, request) {
		if err != nil {
			t.Fatal(err)
		}
		whole.Tokens = append(whole.Tokens, output.Tokens...)
		whole.LogProbs = append(whole.LogProbs, output.LogProbs...)
		whole.PromptTokens = output.PromptTokens
		// The request pauses because its queue is full, a few tokens ahead of its reader.
		if state == nil {
			running := from.Sequence(output.Sequence)
			state = export(t, running)
			running.Release()
		}
	}
	sequence, queue := imported(t, to, state)
	info := infoOf(t, sequence)
	generated := info.Len - whole.PromptTokens
	if !info.Idle || info.Inexact || generated < 1 || generated > 20 {
		t.Fatalf("%d of %d tokens are in the state: %+v", generated, len(whole.Tokens), info)
	}
	if err := sequence.Resume(continued); err != nil {
		t.Fatal(err)
	}
	rest := readToTheEnd(t, sequence, queue)
	wantSame(t, rest, whole, generated)
	if len(whole.Tokens) != 40 || rest.PromptTokens != whole.PromptTokens {
		t.Errorf("%+v, %+v", rest, whole)
	}
	if computed := statsOf(t, to).PromptTokens; computed > 1 {
		t.Errorf("%d tokens were recomputed", computed)
	}
	if info := infoOf(t, sequence); !info.Idle || info.Len != whole.PromptTokens+40 {
		t.Errorf("%+v", info)
	}
	if got := resume(t, sequence, more(2)); len(got.Tokens) != 2 {
		t.Errorf("%+v", got)
	}
}

func TestOneStateCanBeImportedManyTimes(t *testing.T) {
	t.Parallel()
	from, to := open(t), open(t)
	parent, whole := keep(t, from, 11)
	trunk := fork(t, from, parent, 20)
	state := export(t, trunk)
	for range 3 {
		sequence, err := to.Import(state)
		if err != nil {
			t.Fatal(err)
		}
		wantSame(t, resume(t, sequence, more(7)), whole, 4)
		if err := sequence.Close(); err != nil {
			t.Error(err)
		}
	}
	last, _ := imported(t, to, state)
	rest := resume(t, last, pagedllm.Resume{Continue: true, LastTurn: true})
	wantSame(t, rest, whole, 4)
	if rest.Text != "rance is Paris." {
		t.Errorf("%+v", rest)
	}
	_, err := last.Info()
	wantErr(t, err, pagedllm.ErrNotFound)
	eventuallyIdle(t, to)
	if stats := statsOf(t, from); stats.Idle != 2 {
		t.Errorf("%+v", stats)
	}
}

// afterEight returns the state of a sequence after 8 of 40 generated tokens, and the result with
// all of them.
func afterEight(t *testing.T, kind pagedllm.OutputKind) ([]byte, pagedllm.Completion) {
	t.Helper()
	engine := open(t)
	request := draw(40)
	request.Keep, request.Sampling.LogProbs, request.Sampling.OutputKind = true, true, kind
	whole := generate(t, engine, request)
	sequence := engine.Sequence(whole.Sequence)
	if err := sequence.Rewind(whole.PromptTokens + 8); err != nil {
		t.Fatal(err)
	}
	return export(t, sequence), whole
}

func TestAnImportedSequenceContinuesInAStreamOrQueueWithNewUserData(t *testing.T) {
	t.Parallel()
	engine := open(t)
	state, whole := afterEight(t, pagedllm.OutputDelta)
	how := pagedllm.Resume{Continue: true, LastTurn: true, UserData: pagedllm.Ptr(uint64(11))}
	how.Sampling.MaxTokens = 1 // has no effect with Continue
	streamed, queue := imported(t, engine, state)
	var rest pagedllm.Completion
	for output, err := range streamed.Stream(background, how) {
		if err != nil || output.UserData != 11 {
			t.Fatalf("%+v, %v", output, err)
		}
		rest.Tokens = append(rest.Tokens, output.Tokens...)
		rest.LogProbs = append(rest.LogProbs, output.LogProbs...)
	}
	wantSame(t, rest, whole, 8)
	_, err := streamed.Info()
	wantErr(t, err, pagedllm.ErrNotFound)

	queued, err := engine.Import(state)
	if err != nil {
		t.Fatal(err)
	}
	if err := queue.Resume(queued, how); err != nil {
		t.Fatal(err)
	}
	wantSame(t, readToTheEnd(t, queued, queue), whole, 8)
	eventuallyIdle(t, engine)
}

func TestAnImportedSequenceKeepsItsOutputKind(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for _, kind := range []pagedllm.OutputKind{pagedllm.OutputDelta, pagedllm.OutputCumulative, pagedllm.OutputFinal} {
		state, whole := afterEight(t, kind)
		sequence, _ := imported(t, engine, state)
		how := continued
		how.Sampling.OutputKind = kind
		rest := resume(t, sequence, how)
		if kind == pagedllm.OutputDelta {
			wantSame(t, rest, whole, 8)
			continue
		}
		wantSame(t, rest, whole, 0)
		if rest.Text != whole.Text {
			t.Errorf("%q, not %q", rest.Text, whole.Text)
		}
	}
}

func TestAStateOfAnotherInstructionPathIsInexact(t *testing.T) {
	t.Parallel()
	from, to := open(t), open(t, func(o *pagedllm.Options) { o.ISA = pagedllm.Portable })
	parent, _ := keep(t, from, 4)
	sequence, _ := imported(t, to, export(t, parent))
	if info := infoOf(t, sequence); info.Inexact != (from.ModelInfo().ISA != to.ModelInfo().ISA) {
		t.Errorf("%+v", info)
	}
	if infoOf(t, parent).Inexact {
		t.Error("a sequence that was never imported is inexact")
	}
}

func TestADamagedStateIsRefusedAndTheEngineContinues(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 4)
	state := export(t, sequence)
	for _, len := range []int{0, 1, 40, len(state) / 2, len(state) - 1} {
		_, err := engine.Import(state[:len])
		wantMessage(t, err, pagedllm.ErrInvalidArgument, "not an exported sequence")
	}
	_, err := engine.Import(nil)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "not an exported sequence")
	for _, place := range []int{0, 40, len(state) / 2, len(state) - 1} {
		bent := slices.Clone(state)
		bent[place] ^= 4
		_, err := engine.Import(bent)
		reason := "bad checksum"
		if place < 8 {
			reason = "bad magic"
		}
		wantMessage(t, err, pagedllm.ErrInvalidArgument, reason)
	}
	newer := slices.Clone(state)
	newer[8]++
	_, err = engine.Import(newer)
	wantMessage(t, err, pagedllm.ErrUnsupported, "of a newer release")
	wider := open(t, func(o *pagedllm.Options) { o.BlockSize = 32 })
	_, err = wider.Import(state)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "block_size")
	if got := resume(t, sequence, more(7)); got.Text != "rance is Paris." {
		t.Errorf("%+v", got)
	}
}

func TestInvalidExportsAndImportsAreRefused(t *testing.T) {
	t.Parallel()
	engine := open(t)
	sequence, _ := keep(t, engine, 4)
	state := export(t, sequence)
	_, err := engine.Sequence(1 << 40).Export(background)
	wantMessage(t, err, pagedllm.ErrNotFound, "")
	wantMessage(t, engine.Sequence(1<<40).Resume(continued), pagedllm.ErrNotFound, "")
	wantMessage(t, sequence.Resume(continued), pagedllm.ErrInvalidArgument, "queue")

	closed := newQueue(t, engine, 4)
	closed.Close()
	wantMessage(t, closed.Resume(sequence, continued), pagedllm.ErrClosed, "queue")
	_, err = closed.Import(state)
	wantMessage(t, err, pagedllm.ErrClosed, "queue")
	engine.Close()
	_, err = engine.Import(state)
	wantMessage(t, err, pagedllm.ErrClosed, "engine")
	_, err = sequence.Export(background)
	wantMessage(t, err, pagedllm.ErrClosed, "engine")
}

func TestAnExportWaitsForAStepUntilItsContextIsDone(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps, func(o *pagedllm.Options) { o.QueueCapacity = 1000 })
	id := add(t, engine.Queue(), draw(20))
	step(t, engine, 5)
	sequence := engine.Sequence(pagedllm.SequenceID(id))
	wantMessage(t, sequence.Resume(continued), pagedllm.ErrInvalidArgument, "runs already")
	ctx, cancel := context.WithTimeout(background, 10*time.Millisecond)
	defer cancel()
	for range 2 { // in the second call, the context is already done
		_, err := sequence.Export(ctx)
		wantErr(t, err, context.DeadlineExceeded)
	}
	step(t, engine, 0)
	if tokens := tokensBySequence(t, engine.Queue()); len(tokens) != 1 || len(tokens[sequence.ID()]) != 20 {
		t.Errorf("%v", tokens)
	}
	eventuallyIdle(t, engine)
}

func TestClosingTheEngineEndsAnExport(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	sequence := engine.Sequence(pagedllm.SequenceID(add(t, engine.Queue(), draw(20))))
	step(t, engine, 5)
	ended := make(chan error)
	go func() {
		_, err := sequence.Export(background)
		ended <- err
	}()
	time.Sleep(time.Millisecond) // the export is probably waiting now
	engine.Close()
	if err := <-ended; !isClosed(err) {
		t.Error(err)
	}
}

// An export of a sequence that ends before the next step returns an error.
func TestAnExportFailsIfTheSequenceEndsBeforeTheStep(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	id := add(t, engine.Queue(), draw(20))
	step(t, engine, 5)
	sequence := engine.Sequence(pagedllm.SequenceID(id))
	if err := engine.Abort(id); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() {
		_, err := sequence.Export(background)
		ended <- err
	}()
	for {
		if _, err := engine.Step(); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			var e *pagedllm.Error
			if !errors.As(err, &e) || e.Code != pagedllm.ErrNotFound {
				t.Error(err)
			}
			return
		case <-time.After(time.Millisecond):
		}
	}
}
