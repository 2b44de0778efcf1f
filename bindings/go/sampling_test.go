package pagedllm_test

import (
	"encoding/json"
	"errors"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func generateAll(t *testing.T, engine *pagedllm.Engine, request pagedllm.Request) []pagedllm.Completion {
	t.Helper()
	all, err := engine.GenerateAll(background, request)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != max(request.N, 1) {
		t.Fatalf("%d results", len(all))
	}
	return all
}

func TestGenerateAllReturnsEverySample(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := draw(20)
	first := generate(t, engine, request)
	request.N = 3
	all := generateAll(t, engine, request)
	for i, completion := range all {
		if len(completion.Tokens) != 20 || completion.FinishReason != pagedllm.FinishLength || completion.Err != nil ||
			completion.Sequence != all[0].Sequence+pagedllm.SequenceID(i) {
			t.Errorf("%+v", completion)
		}
	}
	if !slices.Equal(all[0].Tokens, first.Tokens) {
		t.Error("the first sample differs from a request with n = 1")
	}
	if slices.Equal(all[0].Tokens, all[1].Tokens) || slices.Equal(all[1].Tokens, all[2].Tokens) {
		t.Errorf("%+v", all)
	}
	eventuallyIdle(t, engine)
}

func TestAStreamOfSamplesEndsWithItsLastSample(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := draw(20)
	request.N = 3
	want := generateAll(t, engine, request)
	var tokens [3][]uint32
	ends := 0
	for output, err := range engine.Stream(background, request) {
		if err != nil {
			t.Fatal(err)
		}
		if ends == 3 {
			t.Error("the stream continues after the last sample")
		}
		tokens[output.Index] = append(tokens[output.Index], output.Tokens...)
		if output.FinishReason != pagedllm.FinishNone {
			ends++
		}
	}
	for i := range tokens {
		if !slices.Equal(tokens[i], want[i].Tokens) {
			t.Errorf("%v, not %v", tokens[i], want[i].Tokens)
		}
	}
	if ends != 3 {
		t.Errorf("%d samples ended", ends)
	}
}

func TestLeavingAStreamOfSamplesAbortsEverySample(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := endless
	request.N = 3
	for output, err := range engine.Stream(background, request) {
		if err != nil {
			t.Fatal(err)
		}
		if output.GeneratedTokens == 3 {
			break
		}
	}
	eventually(t, "the samples are aborted", func() bool { return statsOf(t, engine).FinishedAbort == 3 })
	eventuallyIdle(t, engine)
}

func TestGenerateRefusesSeveralResults(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := draw(1)
	request.N = 2
	_, err := engine.Generate(background, request)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, "GenerateAll")
}

func TestBestOfReturnsTheSamplesWithTheHighestScores(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := draw(10)
	request.N = 6
	request.Sampling.LogProbs = true
	scores := []float64{}
	for _, completion := range generateAll(t, engine, request) {
		scores = append(scores, completion.Score)
	}
	slices.Sort(scores)
	request.N, request.BestOf = 2, 6
	best := generateAll(t, engine, request)
	if best[0].Score != scores[5] || best[1].Score != scores[4] {
		t.Errorf("%+v of %v", best, scores)
	}
	sum := 0.0
	for _, p := range best[0].LogProbs {
		sum += float64(p)
	}
	if math.Abs(sum-best[0].Score) > 1e-4 {
		t.Errorf("the score is %v, the sum of the log probabilities is %v", best[0].Score, sum)
	}
}

func TestBeamsAreSortedByScoreAndTheFirstIsNoWorseThanGreedy(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.N = 3
	request.Beam = &pagedllm.Beam{Width: 4, EarlyStopping: pagedllm.EarlyStoppingNever}
	beams := generateAll(t, engine, request)
	if beams[0].Text != paris {
		t.Errorf("%q", beams[0].Text)
	}
	for i, beam := range beams {
		if beam.Err != nil || beam.Score > 0 || i > 0 && (beam.Score > beams[i-1].Score || beam.Text == beams[i-1].Text) {
			t.Errorf("%d: %+v", i, beam)
		}
	}
	// A length penalty of 0 is not the default: the scores are sums of log probabilities.
	request.Beam.LengthPenalty = pagedllm.Ptr(0.0)
	if sums := generateAll(t, engine, request); sums[0].Score >= beams[0].Score {
		t.Errorf("%v is not below %v", sums[0].Score, beams[0].Score)
	}
}

func TestOutputsMatchTheirGrammar(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	text := func(grammar pagedllm.Grammar) string {
		request.Sampling.Grammar = grammar
		completion := generate(t, engine, request)
		if completion.FinishReason != pagedllm.FinishStop {
			t.Errorf("%+v", completion)
		}
		return completion.Text
	}
	request.Sampling.MaxTokens = 200
	var person struct {
		Name *string
		Old  *bool
	}
	schema := `{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "old": {"type": "boolean"}},
		"required": ["name", "old"], "additionalProperties": false}`
	if got := text(pagedllm.JSONSchema(schema)); json.Unmarshal([]byte(got), &person) != nil || person.Name == nil || person.Old == nil {
		t.Errorf("%q", got)
	}
	if got := text(pagedllm.Regex("[a-f]{3}-[0-9]{2}")); !regexp.MustCompile("^[a-f]{3}-[0-9]{2}$").MatchString(got) {
		t.Errorf("%q", got)
	}
	if got := text(pagedllm.Choice("Berlin", "Rome", "Ro\"m")); got != "Berlin" && got != "Rome" && got != "Ro\"m" {
		t.Errorf("%q", got)
	}
	if got := text(pagedllm.Lark("start: \"yes\" | \"no\"")); got != "yes" && got != "no" {
		t.Errorf("%q", got)
	}
	request.Sampling.LogitBias = map[uint32]float64{}
	for _, close := range []string{"{", "}"} {
		tokens, err := engine.Tokenize(close, false)
		if err != nil {
			t.Fatal(err)
		}
		request.Sampling.LogitBias[tokens[len(tokens)-1]] = 100
	}
	if got := text(pagedllm.JSONObject()); json.Unmarshal([]byte(got), &map[string]any{}) != nil {
		t.Errorf("%q", got)
	}
}

func TestLogProbsIncludeTheMostProbableTokens(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.LogProbs, request.Sampling.TopLogProbs = true, 5
	request.Sampling.PromptLogProbs, request.Sampling.PromptTopLogProbs = true, 3
	completion := generate(t, engine, request)
	if len(completion.TopLogProbs) != len(completion.Tokens) || len(completion.LogProbs) != len(completion.Tokens) {
		t.Fatalf("%+v", completion)
	}
	for i, top := range completion.TopLogProbs {
		descends := slices.IsSortedFunc(top, func(a, b pagedllm.LogProb) int { return int(math.Copysign(1, float64(b.LogProb-a.LogProb))) })
		if len(top) != 5 || !descends || top[0].Token != completion.Tokens[i] || top[0].LogProb != completion.LogProbs[i] {
			t.Errorf("%d: %v", i, top)
		}
	}
	if len(completion.PromptLogProbs) != completion.PromptTokens-1 || len(completion.PromptTopLogProbs) != completion.PromptTokens-1 {
		t.Errorf("%+v", completion)
	}
	for _, top := range completion.PromptTopLogProbs {
		if len(top) != 3 {
			t.Errorf("%v", top)
		}
	}
	request.Sampling = greedy
	if plain := generate(t, engine, request); plain.LogProbs != nil || plain.TopLogProbs != nil || plain.PromptLogProbs != nil ||
		plain.PromptTopLogProbs != nil || plain.Score != 0 {
		t.Errorf("%+v", plain)
	}
}

func TestAPromptIsScoredWithoutAGeneratedToken(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.Sampling.PromptLogProbs = true
	want := generate(t, engine, request).PromptLogProbs
	for _, start := range []int{0, 5} {
		request.Sampling.PromptOnly, request.Sampling.PromptLogProbsStart = true, start
		scored := generate(t, engine, request)
		if scored.FinishReason != pagedllm.FinishLength || len(scored.Tokens) > 0 || scored.GeneratedTokens != 0 ||
			!slices.Equal(scored.PromptLogProbs, want[max(start, 1)-1:]) {
			t.Errorf("%+v", scored)
		}
	}
	request.Sampling.MaxTokens = 3
	if _, err := engine.Generate(background, request); !errors.Is(err, pagedllm.ErrInvalidArgument) {
		t.Error(err)
	}
}

func TestEveryOutputKindGivesTheSameResult(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := draw(20)
	request.N, request.Sampling.LogProbs, request.Sampling.TopLogProbs = 2, true, 2
	want := generateAll(t, engine, request)
	for _, kind := range []pagedllm.OutputKind{pagedllm.OutputCumulative, pagedllm.OutputFinal} {
		request.Sampling.OutputKind = kind
		for i, completion := range generateAll(t, engine, request) {
			if completion.Text != want[i].Text || !slices.Equal(completion.Tokens, want[i].Tokens) ||
				!slices.Equal(completion.LogProbs, want[i].LogProbs) || len(completion.TopLogProbs) != len(want[i].TopLogProbs) {
				t.Errorf("%+v, not %+v", completion, want[i])
			}
		}
		outputs := 0
		for range engine.Stream(background, request) {
			outputs++
		}
		if (kind == pagedllm.OutputFinal) != (outputs == 2) {
			t.Errorf("%d outputs", outputs)
		}
	}
}

func TestEchoAndIncludeStopAddPromptAndStopString(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	request.ShowSpecial, request.Sampling.Echo = true, true
	if text := generate(t, engine, request).Text; text != request.Prompt+paris {
		t.Errorf("%q", text)
	}
	request.Sampling.Echo, request.Sampling.IncludeStop = false, true
	if text := generate(t, engine, request).Text; text != paris+"<|end|>" {
		t.Errorf("%q", text)
	}
	request.Sampling.Stop = []string{"of Fr"}
	if text := generate(t, engine, request).Text; text != "The capital of Fr" {
		t.Errorf("%q", text)
	}
}

func TestAllowedTokensBadWordsAndBiasRestrictTheChoice(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := chat(t, engine, france)
	whole := generate(t, engine, request)
	request.Sampling.MaxTokens = 11
	with := func(change func(*pagedllm.Sampling)) pagedllm.Completion {
		changed := request
		change(&changed.Sampling)
		return generate(t, engine, changed)
	}
	if got := with(func(s *pagedllm.Sampling) { s.BadWords = []string{"Paris"} }); strings.Contains(got.Text, "Paris") {
		t.Errorf("%q", got.Text)
	}
	run := whole.Tokens[2:4]
	got := with(func(s *pagedllm.Sampling) { s.BadTokens = [][]uint32{run} })
	if got.Tokens[2] != run[0] || got.Tokens[3] == run[1] {
		t.Errorf("%v", got.Tokens)
	}
	allowed := []uint32{300, 279}
	for _, token := range with(func(s *pagedllm.Sampling) { s.AllowedTokens = allowed }).Tokens {
		if !slices.Contains(allowed, token) {
			t.Errorf("%d", token)
		}
	}
	for _, token := range with(func(s *pagedllm.Sampling) { s.LogitBias = map[uint32]float64{300: 100, 279: 50} }).Tokens {
		if token != 300 {
			t.Errorf("%d", token)
		}
	}
	again := func(s *pagedllm.Sampling) { s.AllowedTokens, s.IgnoreEOS = allowed, true }
	got = with(func(s *pagedllm.Sampling) {
		again(s)
		s.FrequencyPenalty, s.LogitBias = 2, map[uint32]float64{300: 0.5}
	})
	if n := len(slices.DeleteFunc(slices.Clone(got.Tokens), func(token uint32) bool { return token == 300 })); n == 0 || n == 11 {
		t.Errorf("%v", got.Tokens)
	}
}

func TestTruncatePromptKeepsTheLastTokens(t *testing.T) {
	t.Parallel()
	engine := open(t)
	request := pagedllm.Request{PromptTokenIDs: []uint32{9, 8, 7, 6, 5}, TruncatePrompt: 3, Sampling: pagedllm.Sampling{MaxTokens: 1, Echo: true}}
	if completion := generate(t, engine, request); completion.PromptTokens != 3 || !slices.Equal(completion.Tokens[:3], []uint32{7, 6, 5}) {
		t.Errorf("%+v", completion)
	}
}

// Each field has an invalid value. The message of the library names the field and the value.
func TestEverySamplingFieldReachesTheLibrary(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for words, change := range map[string]func(*pagedllm.Request){
		"typical_p is 2":                        func(r *pagedllm.Request) { r.Sampling.TypicalP = 2 },
		"top_n_sigma is -1":                     func(r *pagedllm.Request) { r.Sampling.TopNSigma = -1 },
		"xtc_probability is 2":                  func(r *pagedllm.Request) { r.Sampling.XTCProbability = 2 },
		"xtc_threshold is 0.75":                 func(r *pagedllm.Request) { r.Sampling.XTCThreshold = pagedllm.Ptr(0.75) },
		"mirostat_tau is -1":                    func(r *pagedllm.Request) { r.Sampling.MirostatTau = -1 },
		"mirostat_eta is 2":                     func(r *pagedllm.Request) { r.Sampling.MirostatTau, r.Sampling.MirostatEta = 5, 2 },
		"presence_penalty is 3":                 func(r *pagedllm.Request) { r.Sampling.PresencePenalty = 3 },
		"frequency_penalty is -3":               func(r *pagedllm.Request) { r.Sampling.FrequencyPenalty = -3 },
		"repetition_penalty is -1":              func(r *pagedllm.Request) { r.Sampling.RepetitionPenalty = -1 },
		"no_repeat_ngram_size is 300":           func(r *pagedllm.Request) { r.Sampling.NoRepeatNgramSize = 300 },
		"NoRepeatNgramSize is -1":               func(r *pagedllm.Request) { r.Sampling.NoRepeatNgramSize = -1 },
		"multiplier of pllm_dry is 101":         func(r *pagedllm.Request) { r.Sampling.DRY = &pagedllm.DRY{Multiplier: pagedllm.Ptr(101.0)} },
		"base of pllm_dry is 0.5":               func(r *pagedllm.Request) { r.Sampling.DRY = &pagedllm.DRY{Base: 0.5} },
		"AllowedLength is -1":                   func(r *pagedllm.Request) { r.Sampling.DRY = &pagedllm.DRY{AllowedLength: pagedllm.Ptr(-1)} },
		"LastTokens is -1":                      func(r *pagedllm.Request) { r.Sampling.DRY = &pagedllm.DRY{LastTokens: -1} },
		"sequence breaker of pllm_dry is empty": func(r *pagedllm.Request) { r.Sampling.DRY = &pagedllm.DRY{SequenceBreakers: []string{"", "x"}} },
		"logit_bias of token 7 is":              func(r *pagedllm.Request) { r.Sampling.LogitBias = map[uint32]float64{7: math.Inf(1)} },
		"logit_bias token id":                   func(r *pagedllm.Request) { r.Sampling.LogitBias = map[uint32]float64{1024: 1} },
		"an entry of bad_words is empty":        func(r *pagedllm.Request) { r.Sampling.BadWords = []string{""} },
		"bad_words_ids token id":                func(r *pagedllm.Request) { r.Sampling.BadTokens = [][]uint32{{1}, {2, 1024}} },
		"an entry of bad_words_ids is empty":    func(r *pagedllm.Request) { r.Sampling.BadTokens = [][]uint32{nil} },
		"allowed token id":                      func(r *pagedllm.Request) { r.Sampling.AllowedTokens = []uint32{1024} },
		"logprobs is 129":                       func(r *pagedllm.Request) { r.Sampling.LogProbs, r.Sampling.TopLogProbs = true, 129 },
		"top_logprobs is 2 and flags":           func(r *pagedllm.Request) { r.Sampling.TopLogProbs = 2 },
		"prompt_logprobs is 129":                func(r *pagedllm.Request) { r.Sampling.PromptLogProbs, r.Sampling.PromptTopLogProbs = true, 129 },
		"prompt_top_logprobs is 2 and":          func(r *pagedllm.Request) { r.Sampling.PromptTopLogProbs = 2 },
		"output_kind is 9":                      func(r *pagedllm.Request) { r.Sampling.OutputKind = 9 },
		"schema is not valid JSON":              func(r *pagedllm.Request) { r.Sampling.Grammar = pagedllm.JSONSchema("{") },
		"grammar cannot be compiled":            func(r *pagedllm.Request) { r.Sampling.Grammar = pagedllm.Regex("(") },
		"choices is empty":                      func(r *pagedllm.Request) { r.Sampling.Grammar = pagedllm.Choice() },
		"Expected token":                        func(r *pagedllm.Request) { r.Sampling.Grammar = pagedllm.Lark("nonsense") },
		"N is -1":                               func(r *pagedllm.Request) { r.N = -1 },
		"max_seqs is":                           func(r *pagedllm.Request) { r.N = math.MaxUint32 },
		"best_of is 2 and n is 3":               func(r *pagedllm.Request) { r.N, r.BestOf = 3, 2 },
		"TruncatePrompt is -1":                  func(r *pagedllm.Request) { r.TruncatePrompt = -1 },
		"width of pllm_beam is 1":               func(r *pagedllm.Request) { r.Beam = &pagedllm.Beam{Width: 1} },
		"groups":                                func(r *pagedllm.Request) { r.Beam = &pagedllm.Beam{Groups: 3} },
		"diversity_penalty is":                  func(r *pagedllm.Request) { r.Beam = &pagedllm.Beam{Groups: 2, DiversityPenalty: -1} },
		"length_penalty is":                     func(r *pagedllm.Request) { r.Beam = &pagedllm.Beam{LengthPenalty: pagedllm.Ptr(-100.0)} },
		"early_stopping is 9":                   func(r *pagedllm.Request) { r.Beam = &pagedllm.Beam{EarlyStopping: 9} },
		"beam search excludes best_of":          func(r *pagedllm.Request) { r.Beam, r.BestOf = &pagedllm.Beam{}, 4 },
		"beam search excludes keep":             func(r *pagedllm.Request) { r.Beam, r.Keep = &pagedllm.Beam{}, true },
	} {
		request := pagedllm.Request{Prompt: "x", Sampling: greedy}
		if strings.Contains(words, "mirostat") {
			request.Sampling = pagedllm.Sampling{}
		}
		change(&request)
		_, err := engine.GenerateAll(background, request)
		wantMessage(t, err, pagedllm.ErrInvalidArgument, words)
	}
	if text := generate(t, engine, chat(t, engine, france)).Text; text != paris {
		t.Errorf("%q", text)
	}
}

func TestEmptyDRYBreakersDifferFromTheDefaults(t *testing.T) {
	t.Parallel()
	engine := open(t)
	colon, err := engine.Tokenize(":", false)
	if err != nil || len(colon) != 1 {
		t.Fatal(colon, err)
	}
	for name, test := range map[string]struct {
		breakers []string
		punished bool
	}{
		"nil":      {nil, false},
		"empty":    {[]string{}, true},
		"other":    {[]string{"?"}, true},
		"included": {[]string{"?", ":"}, false},
	} {
		request := pagedllm.Request{Prompt: "Hello"}
		request.Sampling = pagedllm.Sampling{
			Temperature: pagedllm.Ptr(0.0), MaxTokens: 12, IgnoreEOS: true, LogitBias: map[uint32]float64{colon[0]: 90},
			DRY: &pagedllm.DRY{Multiplier: pagedllm.Ptr(100.0), Base: 4, AllowedLength: pagedllm.Ptr(1), SequenceBreakers: test.breakers},
		}
		tokens := generate(t, engine, request).Tokens
		others := slices.DeleteFunc(slices.Clone(tokens), func(token uint32) bool { return token == colon[0] })
		if (len(others) > 0) != test.punished {
			t.Errorf("%s: %v", name, tokens)
		}
	}
}

func TestEachTruncationChangesTheSampleAndIsRepeatable(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for name, change := range map[string]func(*pagedllm.Sampling){
		"TypicalP":          func(s *pagedllm.Sampling) { s.TypicalP = 0.1 },
		"TopNSigma":         func(s *pagedllm.Sampling) { s.TopNSigma = 0.5 },
		"XTC":               func(s *pagedllm.Sampling) { s.XTCProbability, s.XTCThreshold = 1, pagedllm.Ptr(0.0) },
		"Mirostat":          func(s *pagedllm.Sampling) { s.MirostatTau = 1 },
		"PresencePenalty":   func(s *pagedllm.Sampling) { s.PresencePenalty = 2 },
		"RepetitionPenalty": func(s *pagedllm.Sampling) { s.RepetitionPenalty = 3 },
		"NoRepeatNgramSize": func(s *pagedllm.Sampling) { s.NoRepeatNgramSize = 1 },
		"DRY": func(s *pagedllm.Sampling) {
			s.DRY = &pagedllm.DRY{Multiplier: pagedllm.Ptr(50.0), AllowedLength: pagedllm.Ptr(0), SequenceBreakers: []string{"\x00"}}
		},
	} {
		request := draw(60)
		plain := generate(t, engine, request)
		change(&request.Sampling)
		changed := generate(t, engine, request)
		if slices.Equal(plain.Tokens, changed.Tokens) {
			t.Errorf("%s changes nothing", name)
		}
		if again := generate(t, engine, request); !slices.Equal(again.Tokens, changed.Tokens) {
			t.Errorf("%s: two requests with one seed differ", name)
		}
	}
}

func TestRequestsWithTheSameSaltShareCachedBlocks(t *testing.T) {
	t.Parallel()
	engine := open(t)
	prompt := strings.Repeat("long ", 100)
	computed := func(salt string) int {
		before := statsOf(t, engine).PromptTokens
		generate(t, engine, pagedllm.Request{Prompt: prompt, CacheSalt: []byte(salt), Sampling: pagedllm.Sampling{MaxTokens: 1}})
		return statsOf(t, engine).PromptTokens - before
	}
	whole := computed("")
	if again := computed(""); again > 16 || whole < 100 {
		t.Errorf("the first request computed %d tokens, the second %d", whole, again)
	}
	if other := computed("a\x00b"); other != whole {
		t.Errorf("with another salt, %d tokens were computed", other)
	}
	if same := computed("a\x00b"); same > 16 {
		t.Errorf("with the same salt, %d tokens were computed", same)
	}
	if stats := statsOf(t, engine); stats.PrefixHits == 0 || stats.PrefixQueries <= stats.PrefixHits || stats.BlocksCached == 0 {
		t.Errorf("%+v", stats)
	}
}

func TestAPinnedPromptIsComputedBeforeTheFirstRequest(t *testing.T) {
	t.Parallel()
	engine := open(t)
	prompt := strings.Repeat("long ", 100)
	pin, err := engine.Pin(pagedllm.Prefix{Prompt: prompt, Priority: 3})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the prompt is computed", func() bool { return statsOf(t, engine).PromptTokens > 100 })
	before := statsOf(t, engine)
	generate(t, engine, pagedllm.Request{Prompt: prompt, Sampling: pagedllm.Sampling{MaxTokens: 1}})
	if after := statsOf(t, engine); after.PrefixHits-before.PrefixHits < 100 {
		t.Errorf("%+v", after)
	}
	if err := engine.Unpin(pin); err != nil {
		t.Error(err)
	}
	wantErr(t, engine.Unpin(pin), pagedllm.ErrNotFound)
	eventuallyIdle(t, engine)
}

func TestAPinExpiresAfterItsTimeToLive(t *testing.T) {
	t.Parallel()
	engine := open(t, hostSteps)
	pin, err := engine.Pin(pagedllm.Prefix{Prompt: "x", TimeToLive: 1})
	if err != nil {
		t.Fatal(err)
	}
	// The first step computes the prompt, unless the pin has expired before. The second step finds
	// the pin expired.
	for range 2 {
		if _, err := engine.Step(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
	wantErr(t, engine.Unpin(pin), pagedllm.ErrNotFound)
	eventuallyIdle(t, engine)
}

func TestInvalidPrefixesAreRefused(t *testing.T) {
	t.Parallel()
	engine := open(t)
	for _, bad := range []pagedllm.Prefix{
		{}, {Prompt: "x", PromptTokenIDs: []uint32{1}}, {PromptTokenIDs: []uint32{1024}}, {Prompt: "\xff"},
		{Prompt: "x", TimeToLive: -1e9}, {Prompt: "x", TimeToLive: -1}, {Prompt: "x", Priority: -1}, {PromptTokenIDs: make([]uint32, 5000)},
	} {
		_, err := engine.Pin(bad)
		wantMessage(t, err, pagedllm.ErrInvalidArgument, "")
	}
	bare := open(t, func(o *pagedllm.Options) { o.NoPrefixCache = true })
	_, err := bare.Pin(pagedllm.Prefix{Prompt: "x"})
	wantErr(t, err, pagedllm.ErrUnsupported)
	engine.Close()
	_, err = engine.Pin(pagedllm.Prefix{Prompt: "x"})
	wantErr(t, err, pagedllm.ErrClosed)
	wantErr(t, engine.Unpin(1), pagedllm.ErrClosed)
}
