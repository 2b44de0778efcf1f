package pagedllm_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func TestAStreamDeliversTheAnswerInPieces(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.UserData = 7
	var text strings.Builder
	var tokens, ends int
	for output, err := range engine.Stream(background, request) {
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString(output.Text)
		tokens += len(output.Tokens)
		if output.GeneratedTokens != tokens || output.UserData != 7 || output.LogProbs != nil || output.PromptTokens != 16 {
			t.Errorf("%+v", output)
		}
		if output.FinishReason != pagedllm.FinishNone {
			ends++
		}
	}
	if text.String() != paris || ends != 1 {
		t.Errorf("%q, %d ends", text.String(), ends)
	}
}

func TestEachLoopOverAStreamAddsARequest(t *testing.T) {
	t.Parallel()
	engine := open(t)
	answers := engine.Stream(background, chat(t, engine, france))
	if stats := statsOf(t, engine); stats.Waiting+stats.Running != 0 {
		t.Error("the request was added before the loop")
	}
	for range 2 {
		for _, err := range answers {
			if err != nil {
				t.Error(err)
			}
		}
	}
	eventually(t, "two requests end", func() bool { return statsOf(t, engine).FinishedStop == 2 })
}

func TestLeavingTheLoopAbortsTheRequest(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for _, err := range engine.Stream(background, endless) {
		if err != nil {
			t.Error(err)
		}
		break
	}
	eventually(t, "the request is aborted", func() bool { return statsOf(t, engine).FinishedAbort == 1 })
	eventuallyIdle(t, engine)
}

func TestAPanicInTheLoopAbortsTheRequest(t *testing.T) {
	t.Parallel()
	engine := open(t)
	func() {
		defer func() { recover() }()
		for range engine.Stream(background, endless) {
			panic("panic in Progress")
		}
	}()
	eventually(t, "the request is aborted", func() bool { return statsOf(t, engine).FinishedAbort == 1 })
}

func TestCancellingInTheLoopAbortsTheRequestAndYieldsOneFinalError(t *testing.T) {
	t.Parallel()
	engine := open(t)
	ctx, cancel := cancellable(t)
	var before, after int
	for output, err := range engine.Stream(ctx, endless) {
		switch {
		case ctx.Err() == nil && err == nil && output.FinishReason == pagedllm.FinishNone:
			if before++; before == 5 {
				cancel()
			}
		case after == 0:
			after++
			wantErr(t, err, context.Canceled)
			eventually(t, "the request is aborted while the loop continues", func() bool { return statsOf(t, engine).FinishedAbort == 1 })
		default:
			t.Errorf("an element after the error: %+v, %v", output, err)
		}
	}
	if before != 5 || after != 1 {
		t.Errorf("%d elements before the cancellation, %d after", before, after)
	}
	eventuallyIdle(t, engine)
}

// The engine is not stepped, so that only the context can end the stream.
func TestCancellingEndsAWaitingStream(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	ctx, cancel := cancellable(t)
	failed := make(chan error)
	go func() {
		completion, err := engine.Generate(ctx, endless)
		if len(completion.Tokens) > 1 {
			t.Errorf("%+v", completion)
		}
		failed <- err
	}()
	eventually(t, "the first token is generated", func() bool {
		engine.Step()
		return statsOf(t, engine).GeneratedTokens > 0
	})
	cancel()
	wantErr(t, <-failed, context.Canceled)
	if report, err := engine.Step(); err != nil || report.Unfinished != 0 {
		t.Errorf("%+v, %v", report, err)
	}
	eventuallyIdle(t, engine)
}

func TestADoneContextAddsNoRequest(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	ctx, cancel := cancellable(t)
	cancel()
	_, err := engine.Generate(ctx, endless)
	wantErr(t, err, context.Canceled)
	elements := 0
	for _, err := range engine.Stream(ctx, endless) {
		elements++
		wantErr(t, err, context.Canceled)
	}
	_, err = engine.Queue().Poll(ctx)
	wantErr(t, err, context.Canceled)
	if report, err := engine.Step(); elements != 1 || err != nil || report.Unfinished != 0 || report.Sequences != 0 {
		t.Errorf("%d elements, %+v, %v", elements, report, err)
	}
}

func TestAnErrorIncludesTheTokensSoFar(t *testing.T) {
	t.Parallel()
	engine := open(t)
	ctx, cancel := cancellable(t)
	done := make(chan pagedllm.Completion)
	go func() {
		completion, err := engine.Generate(ctx, endless)
		wantErr(t, err, context.Canceled)
		done <- completion
	}()
	eventually(t, "some tokens are generated", func() bool { return statsOf(t, engine).GeneratedTokens > 50 })
	cancel()
	if completion := <-done; completion.FinishReason != pagedllm.FinishNone || completion.Text == "" || completion.PromptTokens == 0 {
		t.Errorf("%+v", completion)
	}
}

func TestASlowReaderDelaysNoOtherRequest(t *testing.T) {
	t.Parallel()
	engine := open(t, func(o *pagedllm.Options) { o.QueueCapacity = 2 })
	long := pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{IgnoreEOS: true, MaxTokens: 100}}
	var fast sync.WaitGroup
	tokens := 0
	for output, err := range engine.Stream(background, long) {
		if err != nil {
			t.Fatal(err)
		}
		if tokens == 0 {
			for range 8 {
				fast.Add(1)
				go func() {
					defer fast.Done()
					if n := len(generate(t, engine, long).Tokens); n != 100 {
						t.Errorf("%d tokens", n)
					}
				}()
			}
			fast.Wait()
			eventually(t, "the slow request is paused", func() bool { return statsOf(t, engine).Paused == 1 })
		}
		tokens += len(output.Tokens)
	}
	if tokens != 100 {
		t.Errorf("%d tokens", tokens)
	}
}

// Each invalid request, and a part of the library's message for it.
func TestInvalidRequestsReturnTheLibrarysMessage(t *testing.T) {
	t.Parallel()
	engine := open(t)
	nan := math.NaN()
	for _, bad := range []struct {
		request pagedllm.Request
		words   string
	}{
		{pagedllm.Request{}, "prompt is empty"},
		{pagedllm.Request{PromptTokenIDs: []uint32{}}, "prompt is empty"},
		{pagedllm.Request{Prompt: "x", PromptTokenIDs: []uint32{1}}, "both set"},
		{pagedllm.Request{Prompt: "caf\xe9"}, "not UTF-8"},
		{pagedllm.Request{PromptTokenIDs: []uint32{1 << 31}}, "beyond the vocabulary"},
		{pagedllm.Request{PromptTokenIDs: make([]uint32, 5000)}, "prompt is 5000 tokens"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(-1.0)}}, "temperature is -1"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Temperature: &nan}}, "temperature is NaN"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(1e300)}}, "temperature is inf"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{TopP: 1.5}}, "top_p is 1.5"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{TopP: nan}}, "top_p is NaN"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{MinP: -0.5}}, "min_p is -0.5"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{TopK: -1}}, "TopK is -1"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{TopK: math.MaxUint32 + 2}}, "TopK is 4294967297"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{MaxTokens: -1}}, "MaxTokens is -1"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{MaxTokens: math.MaxInt}}, "MaxTokens is 9223372036854775807"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{MinTokens: math.MinInt}}, "MinTokens is -9223372036854775808"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{MinTokens: 3, MaxTokens: 2}}, "min_tokens is 3"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Stop: []string{"a", ""}}}, "stop string is empty"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Stop: []string{"\xff"}}}, "not UTF-8"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{StopTokens: []uint32{1024}}}, "stop token id 1024"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Stop: slices.Repeat([]string{"a"}, 1025)}}, "too many stop strings or stop tokens (1025"},
		{pagedllm.Request{Prompt: "x", Sampling: pagedllm.Sampling{Stop: []string{strings.Repeat("x", 16385)}}}, "stop is too large (16385 bytes in all, at most 16384)"},
	} {
		completion, err := engine.Generate(background, bad.request)
		wantMessage(t, err, pagedllm.ErrInvalidArgument, bad.words)
		if completion.Tokens != nil || completion.Text != "" {
			t.Errorf("%+v", completion)
		}
	}
	if text := generate(t, engine, chat(t, engine, france)).Text; text != paris {
		t.Errorf("%q", text)
	}
}

func TestTextCallsWithoutATokenizerAreUnsupported(t *testing.T) {
	t.Parallel()
	engine := open(t, skipTokenizer)
	_, err := engine.Tokenize("x", true)
	wantMessage(t, err, pagedllm.ErrUnsupported, "skip_tokenizer")
	_, err = engine.Detokenize([]uint32{5}, true)
	wantErr(t, err, errors.ErrUnsupported)
	_, err = engine.RenderChat([]pagedllm.Message{{Role: "user", Content: "x"}})
	wantErr(t, err, pagedllm.ErrUnsupported)
	_, err = engine.TokenBytes(5)
	wantErr(t, err, pagedllm.ErrUnsupported)
	_, err = engine.Generate(background, pagedllm.Request{Prompt: "x"})
	wantErr(t, err, pagedllm.ErrUnsupported)
	request := pagedllm.Request{PromptTokenIDs: []uint32{5, 6}, Sampling: pagedllm.Sampling{MaxTokens: 3, IgnoreEOS: true}}
	if completion := generate(t, engine, request); completion.Text != "" || len(completion.Tokens) != 3 {
		t.Errorf("%+v", completion)
	}
}

func TestStopStringsEndTheAnswerAndDoNotAppear(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.Stop = []string{"never generated", "of Fr", "\x00"}
	completion := generate(t, engine, request)
	if completion.Text != "The capital " || completion.FinishReason != pagedllm.FinishStop ||
		completion.StopReason != pagedllm.StopString || completion.StopString != "of Fr" || completion.StopToken != 0 {
		t.Errorf("%+v", completion)
	}
}

func TestStopTokensEndTheAnswer(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	whole := generate(t, engine, request)
	request.Sampling.StopTokens = []uint32{1000, whole.Tokens[3]}
	completion := generate(t, engine, request)
	if !slices.Equal(completion.Tokens, whole.Tokens[:4]) || completion.FinishReason != pagedllm.FinishStop ||
		completion.StopReason != pagedllm.StopToken || completion.StopToken != whole.Tokens[3] || completion.StopString != "" {
		t.Errorf("%+v", completion)
	}
}

func TestOnlyTheLastOutputHasAStopReason(t *testing.T) {
	t.Parallel()
	engine := open(t)
	var last pagedllm.Output
	for output, err := range engine.Stream(background, chat(t, engine, france)) {
		if err != nil {
			t.Fatal(err)
		}
		if last.StopReason != pagedllm.StopNone || last.StopToken != 0 {
			t.Errorf("%+v", last)
		}
		last = output
	}
	if last.StopReason != pagedllm.StopEOS || !slices.Contains(engine.ModelInfo().EOSTokens, last.StopToken) || last.StopString != "" {
		t.Errorf("%+v", last)
	}
}

func TestAnEndWithoutFinishStopHasNoStopReason(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.MaxTokens = 3
	if cut := generate(t, engine, request); cut.FinishReason != pagedllm.FinishLength ||
		cut.StopReason != pagedllm.StopNone || cut.StopToken != 0 || cut.StopString != "" {
		t.Errorf("%+v", cut)
	}
}

func TestACompleteGrammarIsAStopReason(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.Grammar = pagedllm.Regex("[0-9]{3}")
	if number := generate(t, engine, request); number.FinishReason != pagedllm.FinishStop ||
		number.StopReason != pagedllm.StopGrammar || number.StopToken != 0 || number.StopString != "" {
		t.Errorf("%+v", number)
	}
}

func TestGeneratedTokensExcludesAnEchoedPrompt(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for _, kind := range []pagedllm.OutputKind{pagedllm.OutputDelta, pagedllm.OutputCumulative, pagedllm.OutputFinal} {
		request := chat(t, engine, france)
		request.Sampling.OutputKind = kind
		plain := generate(t, engine, request)
		request.Sampling.Echo = true
		echo := generate(t, engine, request)
		if plain.GeneratedTokens != len(plain.Tokens) || echo.GeneratedTokens != plain.GeneratedTokens ||
			len(echo.Tokens) != echo.PromptTokens+echo.GeneratedTokens {
			t.Errorf("%+v, %+v", plain, echo)
		}
	}
}

func TestAPromptThatIsTooLongReportsItsTokensAndTheLimit(t *testing.T) {
	t.Parallel()
	engine := open(t, func(o *pagedllm.Options) { o.MaxModelLen = 100 })
	long := pagedllm.Request{PromptTokenIDs: slices.Repeat([]uint32{5}, 321)}
	_, generated := engine.Generate(background, long)
	_, added := engine.Queue().Add(long)
	_, predicted := engine.PredictAdmission(long)
	_, pinned := engine.Pin(pagedllm.Prefix{PromptTokenIDs: long.PromptTokenIDs})
	for _, err := range []error{generated, added, predicted, pinned} {
		var e *pagedllm.Error
		if !errors.As(err, &e) || e.Code != pagedllm.ErrInvalidArgument || e.PromptTokens != 321 || e.MaxModelLen != 100 {
			t.Errorf("%#v", err)
		}
	}
	text := strings.Repeat("x y ", 200)
	tokens, err := engine.Tokenize(text, true)
	if err != nil {
		t.Fatal(err)
	}
	_, err = engine.Generate(background, pagedllm.Request{Prompt: text})
	var e *pagedllm.Error
	if !errors.As(err, &e) || e.PromptTokens != len(tokens) || e.MaxModelLen != 100 {
		t.Errorf("%#v for %d tokens", err, len(tokens))
	}
	_, err = engine.Generate(background, pagedllm.Request{})
	if !errors.As(err, &e) || e.PromptTokens != 0 || e.MaxModelLen != 0 {
		t.Errorf("%#v", err)
	}
}

func TestMaxTokensAndMinTokensLimitTheLength(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	whole := generate(t, engine, request)
	request.Sampling.MaxTokens = 3
	if cut := generate(t, engine, request); !slices.Equal(cut.Tokens, whole.Tokens[:3]) || cut.FinishReason != pagedllm.FinishLength {
		t.Errorf("%+v", cut)
	}
	request.Sampling.MaxTokens, request.Sampling.MinTokens = 40, 20
	if long := generate(t, engine, request); len(long.Tokens) < 20 {
		t.Errorf("%+v", long)
	}
}

func TestEachTokenHasALogProb(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.LogProbs = true
	completion := generate(t, engine, request)
	if len(completion.LogProbs) != len(completion.Tokens) {
		t.Fatalf("%+v", completion)
	}
	for _, p := range completion.LogProbs {
		if !(p <= 0 && p > -1) { // the model is certain of this answer
			t.Errorf("%v", completion.LogProbs)
		}
	}
}

func TestEachTokenOfAnEchoedPromptExceptTheFirstHasALogProb(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.LogProbs, request.Sampling.Echo = true, true
	completion := generate(t, engine, request)
	if len(completion.LogProbs) != len(completion.Tokens) || len(completion.Tokens) <= completion.PromptTokens {
		t.Fatalf("%+v", completion)
	}
	for i, p := range completion.LogProbs {
		if isNaN := p != p; isNaN != (i == 0) || p > 0 {
			t.Errorf("token %d: %v", i, p)
		}
	}
}

func TestASeedDeterminesTheResult(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: 30, TopK: 500, TopP: 0.99, MinP: 1e-6}}
	tokens := func(seed *uint64) []uint32 {
		request.Sampling.Seed = seed
		return generate(t, engine, request).Tokens
	}
	zero := tokens(pagedllm.Ptr(uint64(0)))
	if !slices.Equal(zero, tokens(pagedllm.Ptr(uint64(0)))) {
		t.Error("two requests with one seed differ")
	}
	if slices.Equal(zero, tokens(pagedllm.Ptr(uint64(math.MaxUint64)))) {
		t.Error("requests with different seeds are equal")
	}
	if slices.Equal(tokens(nil), tokens(nil)) {
		t.Error("requests without a seed are equal")
	}
}

func TestTemperatureDefaultsToOneAndZeroIsGreedy(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := pagedllm.Request{Prompt: "Once", Sampling: pagedllm.Sampling{MaxTokens: 30, Seed: pagedllm.Ptr(uint64(5))}}
	tokens := func(temperature *float64) []uint32 {
		request.Sampling.Temperature = temperature
		return generate(t, engine, request).Tokens
	}
	unset, one, zero := tokens(nil), tokens(pagedllm.Ptr(1.0)), tokens(pagedllm.Ptr(0.0))
	if !slices.Equal(unset, one) || slices.Equal(unset, zero) {
		t.Errorf("unset %v, 1 %v, 0 %v", unset, one, zero)
	}
	request.Sampling.Seed = nil
	if !slices.Equal(zero, tokens(pagedllm.Ptr(0.0))) {
		t.Error("greedy sampling depends on the seed")
	}
}

func TestSpecialTokensAreHiddenByDefault(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	raw := generate(t, engine, request).PromptTokens
	request.Sampling.IgnoreEOS, request.Sampling.MaxTokens = true, 11
	if text := generate(t, engine, request).Text; text != paris {
		t.Errorf("%q", text)
	}
	request.ShowSpecial = true
	if text := generate(t, engine, request).Text; text != paris+"<|end|>" {
		t.Errorf("%q", text)
	}
	request.RawPrompt = false
	if withBOS := generate(t, engine, request).PromptTokens; withBOS != raw+1 {
		t.Errorf("%d tokens, %d raw", withBOS, raw)
	}
}

func TestTextNeverEndsInsideACharacter(t *testing.T) {
	t.Parallel()
	engine := open(t)
	var text string
	for output, err := range engine.Stream(background, chat(t, engine, "How do you say hello in Japanese?")) {
		if err != nil || !utf8.ValidString(output.Text) {
			t.Errorf("%q, %v", output.Text, err)
		}
		text += output.Text
	}
	if text != "Hello in Japanese is こんにちは." {
		t.Errorf("%q", text)
	}
}

func TestDetokenizeInvertsTokenize(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for _, text := range []string{"", "hello", " two  spaces ", "a\x00b\x00", "こんにちは 👋🏽", "<|user|>\n", strings.Repeat("long ", 5000)} {
		tokens, err := engine.Tokenize(text, false)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := engine.Detokenize(tokens, false); back != text || err != nil {
			t.Errorf("%.50q became %.50q, %v", text, back, err)
		}
		if special, err := engine.Tokenize(text, true); err != nil || len(special) != len(tokens)+1 {
			t.Errorf("%v, %v", special, err)
		}
	}
	_, err := engine.Tokenize("\xc3(", false)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "not UTF-8")
	_, err = engine.Detokenize([]uint32{math.MaxUint32}, false)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "vocabulary")
}

func TestTokenBytesOfATextAreItsBytes(t *testing.T) {
	t.Parallel()
	engine := open(t)
	text := "Caf\u00e9 \u20ac5 \U0001f600\n"
	tokens, err := engine.Tokenize(text, false)
	if err != nil {
		t.Fatal(err)
	}
	var all []byte
	for _, token := range tokens {
		bytes, err := engine.TokenBytes(token)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, bytes...)
		clear(bytes) // the caller owns them
	}
	if string(all) != text {
		t.Errorf("%q", all)
	}
	again, err := engine.TokenBytes(tokens[0])
	if err != nil || len(again) == 0 || again[0] != 'C' {
		t.Errorf("%q, %v", again, err)
	}
}

func TestEachIDOfTheVocabularyHasTokenBytes(t *testing.T) {
	t.Parallel()
	engine := open(t)
	info := engine.ModelInfo()
	for token := range uint32(info.VocabSize) {
		if _, err := engine.TokenBytes(token); err != nil {
			t.Errorf("token %d: %v", token, err)
		}
	}
	if name, err := engine.TokenBytes(info.EOSTokens[0]); err != nil || len(name) == 0 {
		t.Errorf("%q, %v", name, err)
	}
	for _, token := range []uint32{uint32(info.VocabSize), math.MaxUint32} {
		bytes, err := engine.TokenBytes(token)
		wantErr(t, err, pagedllm.ErrInvalidArgument)
		if bytes != nil {
			t.Errorf("token %d: %q", token, bytes)
		}
	}
}

func TestRenderChatAcceptsAnyJSONValue(t *testing.T) {
	t.Parallel()
	engine := open(t)
	message := pagedllm.Message{Role: "user", Content: "a\"\\\n\x00é<"}
	want, err := engine.RenderChat([]pagedllm.Message{message})
	if err != nil || !strings.Contains(want, message.Content) {
		t.Fatalf("%q, %v", want, err)
	}
	for _, same := range []any{
		map[string]any{"messages": []pagedllm.Message{message}},
		[]map[string]string{{"role": "user", "content": message.Content}},
	} {
		if text, err := engine.RenderChat(same); text != want || err != nil {
			t.Errorf("%q, %v", text, err)
		}
	}
	for _, bad := range []any{nil, 7, []int{1}, math.Inf(1), func() {}} {
		_, err := engine.RenderChat(bad)
		wantErr(t, err, pagedllm.ErrInvalidArgument)
	}
}

func TestResponseParserSeparatesContentAndToolCalls(t *testing.T) {
	t.Parallel()
	engine := open(t)
	parser, err := engine.NewResponseParser(pagedllm.ResponseSettings{Format: "hermes", Prompt: "<think>\n"})
	if err != nil {
		t.Fatal(err)
	}
	var content, reasoning, arguments, name, id string
	take := func(deltas []pagedllm.ResponseDelta, err error) {
		if err != nil {
			t.Fatal(err)
		}
		for _, delta := range deltas {
			content += delta.Content
			reasoning += delta.ReasoningContent
			for _, call := range delta.ToolCalls {
				id, name, arguments = id+call.ID, name+call.Function.Name, arguments+call.Function.Arguments
			}
		}
	}
	for _, r := range "Hm.</think>Yes \"\\\n\u00e9\x01 <tool_call>{\"name\": \"f\", \"arguments\": {\"x\": [1, 2]}}</tool_call> <tool" {
		take(parser.Feed(string(r)))
	}
	take(parser.Finish())
	if reasoning != "Hm." || content != "Yes \"\\\n\u00e9\x01 <tool" || id != "call_0" || name != "f" || arguments != `{"x": [1, 2]}` {
		t.Errorf("%q %q %q %q %q", reasoning, content, id, name, arguments)
	}
	_, err = parser.Feed("x")
	wantErr(t, err, pagedllm.ErrInvalidArgument)
	parser.Close()
	_, err = parser.Feed("x")
	wantErr(t, err, pagedllm.ErrClosed)
	for _, bad := range []pagedllm.ResponseSettings{{Format: "x"}, {Tools: 1}, {Tools: func() {}}} {
		_, err := engine.NewResponseParser(bad)
		wantErr(t, err, pagedllm.ErrInvalidArgument)
	}
}
