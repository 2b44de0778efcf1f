package pagedllm_test

import (
	"encoding/json"
	"errors"
	"math"
	"slices"
	"testing"
	"unicode/utf8"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// wantRefusal requires an error about the input, not ErrInternal or ErrClosed.
func wantRefusal(t *testing.T, err error) {
	t.Helper()
	var e *pagedllm.Error
	if !errors.As(err, &e) || e.Message == "" || e.Code == pagedllm.ErrInternal || e.Code == pagedllm.ErrClosed {
		t.Fatal(err)
	}
}

func FuzzTokenizeRoundTrip(f *testing.F) {
	engine := open(f, hostSteps)
	for _, text := range []string{"", "hello", "a\x00b", "こんにちは", "\xff\xfe", "<|user|>", "<s>", "é👋🏽\u200d"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		tokens, err := engine.Tokenize(text, false)
		if err != nil {
			wantRefusal(t, err)
			if utf8.ValidString(text) {
				t.Fatal("valid text is refused: ", err)
			}
			return
		}
		if back, err := engine.Detokenize(tokens, false); err != nil || back != text {
			t.Fatalf("%q became %q, %v", text, back, err)
		}
	})
}

func FuzzDetokenize(f *testing.F) {
	engine := open(f, hostSteps)
	f.Add([]byte{}, true)
	f.Add([]byte{0, 1, 255, 9}, false)
	f.Fuzz(func(t *testing.T, bytes []byte, skipSpecial bool) {
		text, err := engine.Detokenize(tokensOf(bytes), skipSpecial)
		if err != nil {
			wantRefusal(t, err)
		} else if !utf8.ValidString(text) {
			t.Fatalf("%q", text)
		}
	})
}

// tokensOf returns token ids, most of them in the vocabulary.
func tokensOf(bytes []byte) []uint32 {
	tokens := make([]uint32, 0, len(bytes)/2)
	for pair := range slices.Chunk(bytes, 2) {
		if len(pair) == 2 {
			tokens = append(tokens, uint32(pair[0])<<2|uint32(pair[1])&7)
		}
	}
	return tokens
}

func FuzzRenderChat(f *testing.F) {
	engine := open(f, hostSteps)
	for _, conversation := range []string{
		`[{"role": "user", "content": "x"}]`, `{"messages": []}`, `[1]`, `null`, `"\u0000"`, `{"messages": [{"role": 1}], "tools": {}}`,
	} {
		f.Add(conversation)
	}
	f.Fuzz(func(t *testing.T, conversation string) {
		text, err := engine.RenderChat(json.RawMessage(conversation))
		if err != nil {
			wantRefusal(t, err)
		} else if !utf8.ValidString(text) {
			t.Fatalf("%q", text)
		}
	})
}

func FuzzRequest(f *testing.F) {
	engine := open(f, func(o *pagedllm.Options) { o.MaxModelLen = 48 })
	f.Add("Once", []byte(nil), 0.0, 0.0, 0.0, 0, 3, 0, uint64(1), "stop", uint8(0))
	f.Add("", []byte{1, 2, 3, 4}, 1.0, 0.9, 0.1, 40, 9, 2, uint64(0), "", uint8(255))
	f.Add("\xff", []byte(nil), math.NaN(), -1.0, math.Inf(1), -1, math.MaxInt, math.MinInt, uint64(math.MaxUint64), "\x00", uint8(3))
	f.Fuzz(func(t *testing.T, prompt string, tokens []byte, temperature, topP, minP float64, topK, maxTokens, minTokens int,
		seed uint64, stop string, flags uint8) {
		request := pagedllm.Request{Prompt: prompt, RawPrompt: flags&1 != 0, ShowSpecial: flags&2 != 0, UserData: seed}
		if flags&4 != 0 {
			request.PromptTokenIDs = tokensOf(tokens)
		}
		request.Sampling = pagedllm.Sampling{Temperature: &temperature, TopP: topP, MinP: minP, TopK: topK, MaxTokens: maxTokens,
			MinTokens: minTokens, IgnoreEOS: flags&8 != 0, LogProbs: flags&16 != 0}
		if flags&32 != 0 {
			request.Sampling.Seed = &seed
		}
		if flags&64 != 0 {
			request.Sampling.Stop = []string{stop, prompt}
		}
		if flags&128 != 0 {
			request.Sampling.StopTokens = tokensOf(tokens)
		}
		completion, err := engine.Generate(background, request)
		if err != nil {
			wantRefusal(t, err)
			return
		}
		length := completion.PromptTokens + len(completion.Tokens)
		if completion.FinishReason == pagedllm.FinishNone || !utf8.ValidString(completion.Text) || length > 48 ||
			maxTokens > 0 && len(completion.Tokens) > maxTokens || request.Sampling.LogProbs != (completion.LogProbs != nil) {
			t.Fatalf("%+v", completion)
		}
	})
}

func FuzzOptions(f *testing.F) {
	f.Add("cpu", int64(1<<24), 16, 512, 64, 0, 0, 1, uint32(0), uint32(0), false)
	f.Add("\x00", int64(-1), -1, 1<<40, -1<<40, 7, 9, math.MaxInt, uint32(9), uint32(math.MaxUint32), true)
	f.Fuzz(func(t *testing.T, device string, kvBytes int64, blockSize, maxBatchTokens, maxSeqs, prefillChunk, maxModelLen, threads int,
		kvType, isa uint32, bare bool) {
		plan, err := pagedllm.Options{
			ModelPath: model, Device: device, KVBytes: kvBytes, KVType: pagedllm.DType(kvType), BlockSize: blockSize,
			MaxModelLen: maxModelLen, MaxBatchTokens: maxBatchTokens, MaxSeqs: maxSeqs, PrefillChunk: prefillChunk,
			Threads: threads, ISA: pagedllm.ISA(isa), SkipTokenizer: bare,
		}.Plan()
		if err != nil {
			wantRefusal(t, err)
		} else if plan.KVBytes <= 0 || kvBytes > 0 && plan.KVBytes > kvBytes || plan.FullSequences < 1 {
			t.Fatalf("%+v", plan)
		}
	})
}
