package server

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// samplingParams are the members that completions and chats share: those of OpenAI, and the
// sampling parameters of the library as extensions.
type samplingParams struct {
	Model            string             `json:"model"`
	N                *int               `json:"n"`
	Stream           bool               `json:"stream"`
	StreamOptions    *streamOptions     `json:"stream_options"`
	Temperature      *float64           `json:"temperature"`
	TopP             *float64           `json:"top_p"`
	Seed             *int64             `json:"seed"`
	Stop             textOrTexts        `json:"stop"`
	PresencePenalty  *float64           `json:"presence_penalty"`
	FrequencyPenalty *float64           `json:"frequency_penalty"`
	LogitBias        map[string]float64 `json:"logit_bias"`
	MaxTokens        *int               `json:"max_tokens"`
	// Accepted without effect on the answer.
	User            string          `json:"user"`
	Metadata        json.RawMessage `json:"metadata"`
	ServiceTier     string          `json:"service_tier"`
	SafetyID        string          `json:"safety_identifier"`
	PromptCacheKey  string          `json:"prompt_cache_key"`
	PromptRetention string          `json:"prompt_cache_retention"`
	PromptOptions   json.RawMessage `json:"prompt_cache_options"`
	extensions
}

// extensions are parameters of the library that OpenAI lacks. Their names are those of the library
// and, where it has them, of vLLM.
type extensions struct {
	BestOf              *int               `json:"best_of"`
	TopK                *int               `json:"top_k"`
	MinP                *float64           `json:"min_p"`
	TypicalP            *float64           `json:"typical_p"`
	TopNSigma           *float64           `json:"top_n_sigma"`
	XTCProbability      *float64           `json:"xtc_probability"`
	XTCThreshold        *float64           `json:"xtc_threshold"`
	MirostatTau         *float64           `json:"mirostat_tau"`
	MirostatEta         *float64           `json:"mirostat_eta"`
	RepetitionPenalty   *float64           `json:"repetition_penalty"`
	NoRepeatNgramSize   *int               `json:"no_repeat_ngram_size"`
	MinTokens           *int               `json:"min_tokens"`
	IgnoreEOS           bool               `json:"ignore_eos"`
	StopTokenIDs        []uint32           `json:"stop_token_ids"`
	IncludeStop         bool               `json:"include_stop_str_in_output"`
	SkipSpecialTokens   *bool              `json:"skip_special_tokens"`
	BadWords            []string           `json:"bad_words"`
	BadWordsIDs         [][]uint32         `json:"bad_words_ids"`
	AllowedTokenIDs     []uint32           `json:"allowed_token_ids"`
	DRY                 *dryParams         `json:"dry"`
	Beam                *beamParams        `json:"beam"`
	StructuredOutputs   *structuredOutputs `json:"structured_outputs"`
	PromptLogprobs      *int               `json:"prompt_logprobs"`
	PromptLogprobsStart *int               `json:"prompt_logprobs_start"`
	TruncatePrompt      *int               `json:"truncate_prompt_tokens"`
	ReturnTokenIDs      bool               `json:"return_token_ids"`
	CacheSalt           string             `json:"cache_salt"`
	Priority            int                `json:"priority"`
	DeadlineMS          *int64             `json:"deadline_ms"`
}

func (p *samplingParams) modelName() string { return p.Model }

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
	// Padding against attacks on encrypted streams. The server sends none.
	IncludeObfuscation bool `json:"include_obfuscation"`
}

type dryParams struct {
	Multiplier       *float64 `json:"multiplier"`
	Base             *float64 `json:"base"`
	AllowedLength    *int     `json:"allowed_length"`
	PenaltyLastN     *int     `json:"penalty_last_n"`
	SequenceBreakers []string `json:"sequence_breakers"`
}

type beamParams struct {
	Width            *int     `json:"width"`
	Groups           *int     `json:"groups"`
	DiversityPenalty *float64 `json:"diversity_penalty"`
	LengthPenalty    *float64 `json:"length_penalty"`
	EarlyStopping    string   `json:"early_stopping"`
}

// structuredOutputs has one constraint.
type structuredOutputs struct {
	JSON       json.RawMessage `json:"json"`
	JSONObject bool            `json:"json_object"`
	Regex      *string         `json:"regex"`
	Choice     []string        `json:"choice"`
	Grammar    *string         `json:"grammar"`
}

// textOrTexts is a string or an array of strings.
type textOrTexts []string

func (t *textOrTexts) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) == nil {
		if string(data) != "null" {
			*t = textOrTexts{text}
		}
		return nil
	}
	if json.Unmarshal(data, (*[]string)(t)) != nil {
		return badRequest("stop", "stop is neither a string nor an array of strings; send one of "+
			"them")
	}
	return nil
}

// request returns a request of the engine without its prompt.
func (p *samplingParams) request() (pagedllm.Request, error) {
	var check checks
	request := pagedllm.Request{
		N:              check.atLeast("n", p.N, 1),
		BestOf:         check.atLeast("best_of", p.BestOf, 1),
		TruncatePrompt: check.atLeast("truncate_prompt_tokens", p.TruncatePrompt, 1),
		CacheSalt:      []byte(p.CacheSalt),
		Priority:       p.Priority,
		ShowSpecial:    p.SkipSpecialTokens != nil && !*p.SkipSpecialTokens,
		Sampling:       p.sampling(&check),
	}
	if p.DeadlineMS != nil {
		if *p.DeadlineMS < 1 || *p.DeadlineMS > int64(math.MaxInt64/time.Millisecond) {
			check.fail("deadline_ms", fmt.Sprintf("deadline_ms is %d; must be positive",
				*p.DeadlineMS))
		} else {
			request.Deadline = time.Duration(*p.DeadlineMS) * time.Millisecond
		}
	}
	if p.Beam != nil {
		request.Beam = p.Beam.beam(&check)
	}
	if p.StreamOptions != nil && !p.Stream {
		check.fail("stream_options", `stream_options is given without "stream": true; remove it`)
	}
	if p.PromptLogprobs != nil && p.Stream {
		check.fail("prompt_logprobs", `prompt_logprobs cannot be streamed; remove "stream": true`)
	}
	return request, check.err
}

// wantsUsage reports whether a stream ends with the usage.
func (p *samplingParams) wantsUsage() bool {
	return p.StreamOptions != nil && p.StreamOptions.IncludeUsage
}

func (p *samplingParams) sampling(check *checks) pagedllm.Sampling {
	sampling := pagedllm.Sampling{
		StopTokens:          p.StopTokenIDs,
		Stop:                p.Stop,
		Temperature:         p.Temperature,
		TopP:                check.positive("top_p", p.TopP),
		MinP:                value(p.MinP),
		TopK:                check.atLeast("top_k", p.TopK, 0),
		MaxTokens:           check.atLeast("max_tokens", p.MaxTokens, 0),
		MinTokens:           check.atLeast("min_tokens", p.MinTokens, 0),
		IgnoreEOS:           p.IgnoreEOS,
		IncludeStop:         p.IncludeStop,
		ModelDefaults:       !p.asksForLibraryDefaults(),
		TypicalP:            check.positive("typical_p", p.TypicalP),
		TopNSigma:           value(p.TopNSigma),
		XTCProbability:      value(p.XTCProbability),
		XTCThreshold:        p.XTCThreshold,
		MirostatTau:         value(p.MirostatTau),
		MirostatEta:         check.positive("mirostat_eta", p.MirostatEta),
		PresencePenalty:     value(p.PresencePenalty),
		FrequencyPenalty:    value(p.FrequencyPenalty),
		RepetitionPenalty:   check.positive("repetition_penalty", p.RepetitionPenalty),
		NoRepeatNgramSize:   check.atLeast("no_repeat_ngram_size", p.NoRepeatNgramSize, 0),
		Grammar:             p.StructuredOutputs.grammar(check),
		LogitBias:           check.tokenBias(p.LogitBias),
		BadWords:            p.BadWords,
		BadTokens:           p.BadWordsIDs,
		AllowedTokens:       p.AllowedTokenIDs,
		PromptLogProbs:      p.PromptLogprobs != nil,
		PromptTopLogProbs:   check.atLeast("prompt_logprobs", p.PromptLogprobs, 0),
		PromptLogProbsStart: check.atLeast("prompt_logprobs_start", p.PromptLogprobsStart, 0),
		PromptOnly:          p.MaxTokens != nil && *p.MaxTokens == 0,
	}
	if p.Seed != nil {
		sampling.Seed = pagedllm.Ptr(uint64(*p.Seed))
	}
	if p.DRY != nil {
		sampling.DRY = p.DRY.dry(check)
	}
	return sampling
}

// asksForLibraryDefaults reports whether the request sets a parameter to the default of the
// library. The library cannot distinguish this from a parameter that is not set, and would replace
// it by the default of the model.
func (p *samplingParams) asksForLibraryDefaults() bool {
	isFloat := func(p *float64, value float64) bool { return p != nil && *p == value }
	isInt := func(p *int, value int) bool { return p != nil && *p == value }
	return isFloat(p.Temperature, 1) || isFloat(p.TopP, 1) || isFloat(p.MinP, 0) ||
		isFloat(p.TypicalP, 1) ||
		isFloat(p.RepetitionPenalty, 1) || isInt(p.TopK, 0) || isInt(p.NoRepeatNgramSize, 0)
}

func (d *dryParams) dry(check *checks) *pagedllm.DRY {
	dry := &pagedllm.DRY{
		Multiplier:       d.Multiplier,
		Base:             check.positive("dry.base", d.Base),
		LastTokens:       check.atLeast("dry.penalty_last_n", d.PenaltyLastN, 0),
		SequenceBreakers: d.SequenceBreakers,
	}
	if d.AllowedLength != nil {
		dry.AllowedLength = pagedllm.Ptr(check.atLeast("dry.allowed_length", d.AllowedLength, 0))
	}
	return dry
}

func (b *beamParams) beam(check *checks) *pagedllm.Beam {
	beam := &pagedllm.Beam{
		Width:            check.atLeast("beam.width", b.Width, 2),
		Groups:           check.atLeast("beam.groups", b.Groups, 1),
		DiversityPenalty: value(b.DiversityPenalty),
		LengthPenalty:    b.LengthPenalty,
	}
	switch b.EarlyStopping {
	case "", "no":
		beam.EarlyStopping = pagedllm.EarlyStoppingNo
	case "yes":
		beam.EarlyStopping = pagedllm.EarlyStoppingYes
	case "never":
		beam.EarlyStopping = pagedllm.EarlyStoppingNever
	default:
		check.fail("beam.early_stopping", fmt.Sprintf(`beam.early_stopping is %q; must be "no", `+
			`"yes" or "never"`, b.EarlyStopping))
	}
	return beam
}

func (s *structuredOutputs) grammar(check *checks) pagedllm.Grammar {
	if s == nil {
		return pagedllm.Grammar{}
	}
	var all []pagedllm.Grammar
	if s.JSON != nil {
		all = append(all, pagedllm.JSONSchema(schemaText(s.JSON)))
	}
	if s.JSONObject {
		all = append(all, pagedllm.JSONObject())
	}
	if s.Regex != nil {
		all = append(all, pagedllm.Regex(*s.Regex))
	}
	if s.Choice != nil {
		all = append(all, pagedllm.Choice(s.Choice...))
	}
	if s.Grammar != nil {
		all = append(all, pagedllm.Lark(*s.Grammar))
	}
	if len(all) != 1 {
		check.fail("structured_outputs", fmt.Sprintf("structured_outputs has %d constraints; give "+
			"one of json, json_object, regex, choice and grammar", len(all)))
		return pagedllm.Grammar{}
	}
	return all[0]
}

// schemaText returns a schema that is given as an object, or as a string that contains it.
func schemaText(schema json.RawMessage) string {
	var text string
	if json.Unmarshal(schema, &text) == nil {
		return text
	}
	return string(schema)
}

// value returns 0, which selects the default, for nil. For the fields of Sampling that it is used
// for, 0 is the default.
func value(p *float64) float64 {
	if p == nil {
		return 0
	}
	return *p
}

// checks collects the first error of a request. It checks only what the engine cannot: the wrapper
// takes 0 for the default where the client means an invalid 0.
type checks struct{ err error }

func (c *checks) fail(param, message string) {
	if c.err == nil {
		c.err = badRequest(param, message)
	}
}

// atLeast returns 0, which selects the default, for nil.
func (c *checks) atLeast(name string, p *int, least int) int {
	if p == nil {
		return 0
	}
	if *p < least || *p > math.MaxInt32 {
		c.fail(name, fmt.Sprintf("%s is %d; must be %d to %d", name, *p, least, math.MaxInt32))
	}
	return *p
}

func (c *checks) positive(name string, p *float64) float64 {
	if p != nil && *p == 0 {
		c.fail(name, fmt.Sprintf("%s is 0; must be above 0", name))
	}
	return value(p)
}

// tokenBias converts the keys of logit_bias, which are token ids in decimal.
func (c *checks) tokenBias(biases map[string]float64) map[uint32]float64 {
	if biases == nil {
		return nil
	}
	tokens := make(map[uint32]float64, len(biases))
	for key, bias := range biases {
		token, err := strconv.ParseUint(key, 10, 32)
		if err != nil {
			c.fail("logit_bias", fmt.Sprintf("logit_bias has the key %q; keys are token ids", key))
		}
		tokens[uint32(token)] = bias
	}
	return tokens
}
