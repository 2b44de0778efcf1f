package pagedllm

// #include "glue.h"
import "C"

import "math"

// Sampling is how a request samples its tokens, what it reports and when it ends. The zero value of
// each field selects the library's default. If 0 has a meaning of its own, the field is a pointer,
// made with [Ptr]:
//
//	pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 100} // greedy
//
// The parameters apply in this order: LogitBias; repetition, frequency and presence penalty; DRY;
// exclusions and the grammar; Temperature; TopNSigma, MinP, TopK, TypicalP, TopP, XTC, or mirostat
// in their place; the draw.
type Sampling struct {
	// Temperature is the temperature. 0 selects greedy sampling. nil: 1.
	Temperature *float64
	// TopP keeps the most probable tokens whose probabilities sum to at least this value. 0: all.
	TopP float64
	// MinP keeps tokens whose probability is at least this fraction of the largest. 0: all.
	MinP float64
	// TopK keeps the k most probable tokens. 0: all.
	TopK int
	// TypicalP keeps the tokens with the most typical surprise whose probabilities sum to at least
	// this value. 0: all.
	TypicalP float64
	// TopNSigma keeps tokens whose logit is within this many standard deviations of the largest. 0:
	// all.
	TopNSigma float64
	// XTCProbability is the probability with which XTC removes the most probable tokens. 0: never.
	XTCProbability float64
	// XTCThreshold is the probability from which on a token counts as a top choice for XTC. nil:
	// 0.1.
	XTCThreshold *float64
	// MirostatTau is the target surprise of mirostat 2 in bits per token. 0: off.
	MirostatTau float64
	// MirostatEta is the learning rate of mirostat 2. 0: 0.1.
	MirostatEta float64
	// PresencePenalty is subtracted from the logit of each token that has been generated.
	PresencePenalty float64
	// FrequencyPenalty is subtracted from the logit of a token for each time it has been generated.
	FrequencyPenalty float64
	// RepetitionPenalty divides positive logits, and multiplies negative logits, of all tokens of
	// the prompt and the output. 0: 1, which is off.
	RepetitionPenalty float64
	// NoRepeatNgramSize is a number of tokens: no n-gram of this size occurs twice. 0: off.
	NoRepeatNgramSize int
	// DRY is the DRY penalty. nil: off.
	DRY *DRY
	// LogitBias has values that are added to the logits of these tokens.
	LogitBias map[uint32]float64
	// BadWords are texts that the output must not contain, and BadTokens token sequences.
	BadWords  []string
	BadTokens [][]uint32
	// AllowedTokens are the only tokens that may be sampled. nil: all.
	AllowedTokens []uint32
	// Grammar is the constraint on the output.
	Grammar Grammar
	// Seed is the seed of the request. A request with a seed generates the same tokens in any
	// batch. nil: the seed is derived from the engine's seed and the request id.
	Seed *uint64
	// MaxTokens is the maximum number of generated tokens. 0: up to MaxModelLen.
	MaxTokens int
	// MinTokens is the number of tokens before which neither end-of-sequence tokens nor stops end
	// the sequence.
	MinTokens int
	// Stop are strings that end the sequence, within a token or across tokens. They do not appear
	// in the text.
	Stop []string
	// StopTokens are tokens that end the sequence. They are reported in Tokens, but not in the
	// text.
	StopTokens []uint32
	// IncludeStop keeps the stop string, or the text of the token that ends the sequence, in the
	// text.
	IncludeStop bool
	// IgnoreEOS does not stop at end-of-sequence tokens.
	IgnoreEOS bool
	// LogProbs reports the log probability of each generated token, and of the TopLogProbs most
	// probable tokens.
	LogProbs    bool
	TopLogProbs int
	// PromptLogProbs reports the log probability of each prompt token except the first, and of the
	// PromptTopLogProbs most probable tokens.
	PromptLogProbs    bool
	PromptTopLogProbs int
	// Echo begins the output with the prompt.
	Echo bool
	// OutputKind is the content of each output.
	OutputKind OutputKind
}

// DRY is the DRY penalty: a token that would extend a repetition of length tokens loses Multiplier
// * Base ^ (length - AllowedLength). The zero value of each field selects the library's default.
type DRY struct {
	// Multiplier is the strength of the penalty. 0 disables it. nil: 0.8.
	Multiplier *float64
	// Base is the base of the exponential growth. 0: 1.75.
	Base float64
	// AllowedLength is the length in tokens of the longest repetition without a penalty. nil: 2.
	AllowedLength *int
	// LastTokens is the number of last tokens that are searched for repetitions. 0: all.
	LastTokens int
	// SequenceBreakers are texts that end a repetition. nil: newline, colon, quotation mark and
	// asterisk, or none with Options.SkipTokenizer. Empty: none.
	SequenceBreakers []string
}

// OutputKind is the content of each output.
type OutputKind uint32

const (
	// OutputDelta: each output has what is new.
	OutputDelta OutputKind = C.PLLM_OUTPUT_DELTA
	// OutputCumulative: each output has everything so far.
	OutputCumulative OutputKind = C.PLLM_OUTPUT_CUMULATIVE
	// OutputFinal: one output at the end has everything.
	OutputFinal OutputKind = C.PLLM_OUTPUT_FINAL
)

// A Grammar is a constraint on the output. JSONSchema, JSONObject, Regex, Choice and Lark create
// it. The zero Grammar is no constraint.
type Grammar struct {
	kind    uint32
	text    string
	choices []string
}

// JSONSchema allows the JSON texts that the schema, itself a JSON text, describes.
func JSONSchema(schema string) Grammar {
	return Grammar{kind: C.PLLM_GRAMMAR_JSON_SCHEMA, text: schema}
}

// JSONObject allows any JSON object.
func JSONObject() Grammar { return Grammar{kind: C.PLLM_GRAMMAR_JSON_OBJECT} }

// Regex allows the texts that the regular expression matches as a whole.
func Regex(expression string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_REGEX, text: expression} }

// Choice allows one of the texts.
func Choice(texts ...string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_CHOICE, choices: texts} }

// Lark allows the texts that the Lark grammar describes.
func Lark(grammar string) Grammar { return Grammar{kind: C.PLLM_GRAMMAR_LARK, text: grammar} }

// Ptr returns a pointer to a value, for fields for which 0 is not the default. From Go 1.26 on, new
// does the same.
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

// constrain sets the fields of logit bias, exclusions and grammar.
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
