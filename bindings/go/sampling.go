package pagedllm

// #include "glue.h"
import "C"

import "math"

// Sampling says how a request chooses its tokens, what it reports and when it ends. Every field's zero value is the library's
// default. Where 0 itself means something else the field is a pointer, made with [Ptr]:
//
//	pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 100} // greedy
//
// What applies, in this order: LogitBias; the repetition, frequency and presence penalties; DRY; exclusions and the grammar;
// Temperature; TopNSigma, MinP, TopK, TypicalP, TopP and XTC, or mirostat in their place; the draw.
type Sampling struct {
	// Temperature of 0 is greedy. nil: 1.
	Temperature *float64
	// TopP keeps the most probable tokens that together reach this probability. 0: all.
	TopP float64
	// MinP keeps tokens at least this share as probable as the most probable one. 0: all.
	MinP float64
	// TopK keeps the k most probable tokens. 0: all.
	TopK int
	// TypicalP keeps the tokens of the most typical surprise that together reach this probability. 0: all.
	TypicalP float64
	// TopNSigma keeps tokens whose logit is within so many standard deviations of the largest. 0: all.
	TopNSigma float64
	// XTCProbability is how often XTC takes the most probable tokens away.
	XTCProbability float64
	// XTCThreshold is from which probability on a token counts as a top choice for XTC. nil: 0.1.
	XTCThreshold *float64
	// MirostatTau is the surprise that mirostat 2 keeps to, in bits per token. 0: mirostat is off.
	MirostatTau float64
	// MirostatEta is how fast mirostat corrects. 0: 0.1.
	MirostatEta float64
	// PresencePenalty is taken from the logit of every token that has been generated.
	PresencePenalty float64
	// FrequencyPenalty is taken from a token's logit for every time it has been generated.
	FrequencyPenalty float64
	// RepetitionPenalty divides the logits of all tokens of prompt and output, and multiplies those below 0. 0: 1, which is off.
	RepetitionPenalty float64
	// NoRepeatNgramSize: no run of so many tokens comes twice. 0: off.
	NoRepeatNgramSize int
	// DRY, if not nil, punishes what would go on repeating the text.
	DRY *DRY
	// LogitBias is added to the logits of these tokens.
	LogitBias map[uint32]float64
	// BadWords are texts that the output must not contain, BadTokens runs of tokens.
	BadWords  []string
	BadTokens [][]uint32
	// AllowedTokens are the only ones that may be chosen. None: all may.
	AllowedTokens []uint32
	// Grammar says what the output must be.
	Grammar Grammar
	// Seed: a request with a seed gives the same tokens whatever runs beside it. nil: one made of the engine's seed and the
	// request's id.
	Seed *uint64
	// MaxTokens ends it after so many tokens. 0: when the sequence is as long as the engine allows.
	MaxTokens int
	// MinTokens: neither end-of-sequence tokens nor stops count before this many tokens.
	MinTokens int
	// Stop are strings that end it, also across tokens; they do not appear in the text.
	Stop []string
	// StopTokens are tokens that end it; reported, their text is not.
	StopTokens []uint32
	// IncludeStop leaves the stop string, or the text of the token that ends the sequence, in the text.
	IncludeStop bool
	// IgnoreEOS goes on past end-of-sequence tokens.
	IgnoreEOS bool
	// LogProbs reports the log probability of every chosen token, and TopLogProbs those of so many of the most probable ones
	// beside it.
	LogProbs    bool
	TopLogProbs int
	// PromptLogProbs and PromptTopLogProbs do the same for the prompt's tokens but the first.
	PromptLogProbs    bool
	PromptTopLogProbs int
	// Echo begins the output with the prompt.
	Echo bool
	// OutputKind says what each output holds.
	OutputKind OutputKind
}

// DRY: a token that would make a repetition one longer than length tokens loses Multiplier * Base ^ (length - AllowedLength).
// Every field's zero value is the library's default.
type DRY struct {
	// Multiplier: nil: 0.8.
	Multiplier *float64
	// Base: 0: 1.75.
	Base float64
	// AllowedLength: shorter repetitions are free. nil: 2.
	AllowedLength *int
	// LastTokens is how many tokens back repetitions are looked for. 0: to the beginning.
	LastTokens int
	// SequenceBreakers are texts that end a repetition. nil: newline, colon, quotation mark, asterisk, or none where the
	// tokenizer was skipped; empty: none.
	SequenceBreakers []string
}

// OutputKind is what each output holds.
type OutputKind uint32

const (
	// OutputDelta is what is new.
	OutputDelta OutputKind = C.PLLM_OUTPUT_DELTA
	// OutputCumulative is everything so far.
	OutputCumulative OutputKind = C.PLLM_OUTPUT_CUMULATIVE
	// OutputFinal is everything, in one output at the end.
	OutputFinal OutputKind = C.PLLM_OUTPUT_FINAL
)

// A Grammar is what an output must be: made by JSONSchema, JSONObject, Regex, Choice or Lark. The zero Grammar allows
// anything.
type Grammar struct {
	kind    uint32
	text    string
	choices []string
}

// JSONSchema is a JSON text that the schema, itself a JSON text, describes.
func JSONSchema(schema string) Grammar {
	return Grammar{kind: C.PLLM_GRAMMAR_JSON_SCHEMA, text: schema}
}

// JSONObject is any JSON object.
func JSONObject() Grammar { return Grammar{kind: C.PLLM_GRAMMAR_JSON_OBJECT} }

// Regex is a text that the regular expression matches as a whole.
func Regex(expression string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_REGEX, text: expression} }

// Choice is one of the texts.
func Choice(texts ...string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_CHOICE, choices: texts} }

// Lark is a text that the Lark grammar describes.
func Lark(grammar string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_LARK, text: grammar} }

// Ptr returns a pointer to a value, for the fields of [Sampling] that tell 0 from nothing. From Go 1.26 on, new does the
// same.
func Ptr[T any](value T) *T { return &value }

func (s *Sampling) toC(args *arguments) *C.pllm_sampling {
	c := new(C.pllm_sampling)
	C.pllm_sampling_init(c, C.sizeof_pllm_sampling)
	s.draw(c, args)
	s.penalize(c, args)
	s.constrain(c, args)
	s.end(c, args)
	s.report(c, args)
	args.Pin(c)
	return c
}

func (s *Sampling) draw(c *C.pllm_sampling, args *arguments) {
	setFloatFrom(&c.temperature, s.Temperature)
	args.setFloat(&c.top_p, s.TopP)
	args.setFloat(&c.min_p, s.MinP)
	args.setUint32(&c.top_k, "TopK", s.TopK)
	args.setFloat(&c.typical_p, s.TypicalP)
	args.setFloat(&c.top_n_sigma, s.TopNSigma)
	args.setFloat(&c.xtc_probability, s.XTCProbability)
	setFloatFrom(&c.xtc_threshold, s.XTCThreshold)
	args.setFloat(&c.mirostat_tau, s.MirostatTau)
	args.setFloat(&c.mirostat_eta, s.MirostatEta)
	if s.Seed != nil {
		c.seed = C.uint64_t(*s.Seed)
		c.flags |= C.PLLM_SAMPLING_SEED
	}
}

func (s *Sampling) penalize(c *C.pllm_sampling, args *arguments) {
	args.setFloat(&c.presence_penalty, s.PresencePenalty)
	args.setFloat(&c.frequency_penalty, s.FrequencyPenalty)
	args.setFloat(&c.repetition_penalty, s.RepetitionPenalty)
	args.setUint32(&c.no_repeat_ngram_size, "NoRepeatNgramSize", s.NoRepeatNgramSize)
	if s.DRY != nil {
		c.dry = s.DRY.toC(args)
	}
}

// constrain says which tokens may come.
func (s *Sampling) constrain(c *C.pllm_sampling, args *arguments) {
	var biases []C.pllm_logit_bias
	for token, bias := range s.LogitBias {
		biases = append(biases, C.pllm_logit_bias{token: C.uint32_t(token), bias: C.float(bias)})
	}
	c.logit_bias, c.logit_bias_len = array(args, biases)
	c.bad_words, c.bad_word_lens, c.bad_word_count = args.texts(s.BadWords)
	runs := make([]C.pllm_token_list, len(s.BadTokens))
	for i, run := range s.BadTokens {
		runs[i].tokens, runs[i].tokens_len = args.tokens(run)
	}
	c.bad_words_ids, c.bad_words_ids_len = array(args, runs)
	c.allowed_token_ids, c.allowed_token_ids_len = args.tokens(s.AllowedTokens)
	c.grammar_kind = C.uint32_t(s.Grammar.kind)
	if s.Grammar.kind != C.PLLM_GRAMMAR_NONE {
		c.grammar, c.grammar_len = args.text(s.Grammar.text)
	}
	c.choices, c.choice_lens, c.choice_count = args.texts(s.Grammar.choices)
}

func (s *Sampling) end(c *C.pllm_sampling, args *arguments) {
	args.setUint32(&c.max_tokens, "MaxTokens", s.MaxTokens)
	args.setUint32(&c.min_tokens, "MinTokens", s.MinTokens)
	c.stop, c.stop_lens, c.stop_count = args.texts(s.Stop)
	c.stop_token_ids, c.stop_token_ids_len = args.tokens(s.StopTokens)
	setFlag(&c.flags, s.IncludeStop, C.PLLM_SAMPLING_INCLUDE_STOP)
	setFlag(&c.flags, s.IgnoreEOS, C.PLLM_SAMPLING_IGNORE_EOS)
}

func (s *Sampling) report(c *C.pllm_sampling, args *arguments) {
	setFlag(&c.flags, s.LogProbs, C.PLLM_SAMPLING_LOGPROBS)
	args.setUint32(&c.top_logprobs, "TopLogProbs", s.TopLogProbs)
	setFlag(&c.flags, s.PromptLogProbs, C.PLLM_SAMPLING_PROMPT_LOGPROBS)
	args.setUint32(&c.prompt_top_logprobs, "PromptTopLogProbs", s.PromptTopLogProbs)
	setFlag(&c.flags, s.Echo, C.PLLM_SAMPLING_ECHO)
	c.output_kind = C.uint32_t(s.OutputKind)
}

func (d *DRY) toC(args *arguments) *C.pllm_dry {
	c := new(C.pllm_dry)
	C.pllm_dry_init(c, C.sizeof_pllm_dry)
	setFloatFrom(&c.multiplier, d.Multiplier)
	args.setFloat(&c.base, d.Base)
	if d.AllowedLength != nil && args.inRange("AllowedLength", int64(*d.AllowedLength), 0, math.MaxUint32) {
		c.allowed_length = C.uint32_t(*d.AllowedLength)
	}
	args.setUint32(&c.penalty_last_n, "LastTokens", d.LastTokens)
	c.sequence_breakers, c.sequence_breaker_lens, c.sequence_breaker_count = args.texts(d.SequenceBreakers)
	args.Pin(c)
	return c
}
