package pagedllm

// #include "glue.h"
import "C"

// A Request is a prompt and what to make of it. Its zero value's every field is the library's default; a prompt is needed.
type Request struct {
	// Prompt is the prompt as text. It must be empty where PromptTokens is given.
	Prompt string
	// PromptTokens is the prompt as token ids; nil where it is given as text.
	PromptTokens []uint32
	// RawPrompt says that Prompt brings its own special tokens, as RenderChat writes them: the tokenizer adds none, such as
	// BOS.
	RawPrompt bool
	// ShowSpecial shows special tokens in the output's text.
	ShowSpecial bool
	// Sampling says how tokens are chosen and when it ends.
	Sampling Sampling
	// UserData comes back in every output.
	UserData uint64
}

// Sampling says how a request chooses its tokens and when it ends. Every field's zero value is the library's default. Where
// 0 itself means something else the field is a pointer, made with [Ptr]:
//
//	pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 100} // greedy
type Sampling struct {
	// Temperature of 0 is greedy. nil: 1.
	Temperature *float64
	// TopP keeps the most probable tokens that together reach this probability. 0: all.
	TopP float64
	// MinP keeps tokens at least this share as probable as the most probable one. 0: all.
	MinP float64
	// TopK keeps the k most probable tokens. 0: all.
	TopK int
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
	// IgnoreEOS goes on past end-of-sequence tokens.
	IgnoreEOS bool
	// LogProbs reports the log probability of every sampled token.
	LogProbs bool
}

// Ptr returns a pointer to a value, for the fields of [Sampling] that tell 0 from nothing. From Go 1.26 on, new does the
// same.
func Ptr[T any](value T) *T { return &value }

// A RequestID names a request of one engine. Ids are never reused.
type RequestID uint64

func (r *Request) toC(args *arguments) (*C.pllm_request, error) {
	c := new(C.pllm_request)
	C.pllm_request_init(c, C.sizeof_pllm_request)
	if r.PromptTokens == nil || r.Prompt != "" {
		c.prompt, c.prompt_len = args.text(r.Prompt)
	}
	c.prompt_tokens, c.prompt_tokens_len = args.tokens(r.PromptTokens)
	if r.RawPrompt {
		c.text_flags &^= C.PLLM_TEXT_ADD_SPECIAL
	}
	if r.ShowSpecial {
		c.text_flags &^= C.PLLM_TEXT_SKIP_SPECIAL
	}
	c.user_data = C.uint64_t(r.UserData)
	c.sampling = r.Sampling.toC(args)
	args.Pin(c.sampling)
	return c, args.err
}

func (s *Sampling) toC(args *arguments) *C.pllm_sampling {
	c := new(C.pllm_sampling)
	C.pllm_sampling_init(c, C.sizeof_pllm_sampling)
	if s.Temperature != nil {
		c.temperature = C.float(*s.Temperature)
	}
	args.setFloat(&c.top_p, s.TopP)
	args.setFloat(&c.min_p, s.MinP)
	args.setUint32(&c.top_k, "TopK", s.TopK)
	args.setUint32(&c.max_tokens, "MaxTokens", s.MaxTokens)
	args.setUint32(&c.min_tokens, "MinTokens", s.MinTokens)
	if s.Seed != nil {
		c.seed = C.uint64_t(*s.Seed)
		c.flags |= C.PLLM_SAMPLING_SEED
	}
	if s.IgnoreEOS {
		c.flags |= C.PLLM_SAMPLING_IGNORE_EOS
	}
	if s.LogProbs {
		c.flags |= C.PLLM_SAMPLING_LOGPROBS
	}
	c.stop_token_ids, c.stop_token_ids_len = args.tokens(s.StopTokens)
	if len(s.Stop) > 0 {
		c.stop, c.stop_lens = args.texts(s.Stop)
		c.stop_count = C.uint64_t(len(s.Stop))
	}
	return c
}
