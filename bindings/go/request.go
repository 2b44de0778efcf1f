package pagedllm

// #include "glue.h"
import "C"

import (
	"cmp"
	"time"
)

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
	// Sampling says how tokens are chosen, what is reported and when it ends.
	Sampling Sampling
	// N is how many results there are: samples, or the best beams. 0: 1. Each has its own Index and its own last output.
	N int
	// BestOf samples are drawn, and the N with the highest log probability returned, best first, at the end. 0: N.
	BestOf int
	// Beam, if not nil, searches for the most probable continuations instead of sampling: the results are the N best, at the end.
	Beam *Beam
	// Keep has its sequences stay when they end, whatever ended them: Engine.Sequence takes each over.
	Keep bool
	// TruncatePrompt keeps only so many of the prompt's last tokens. 0: all.
	TruncatePrompt int
	// CacheSalt: only requests with the same salt share what the prefix cache holds, so that tenants cannot probe each other.
	CacheSalt []byte
	// UserData comes back in every output.
	UserData uint64
	// Deadline, from now on and in whole milliseconds: when it has passed the request ends with FinishDeadline and what it has by
	// then, wherever it is, which is no error. A context that is done is one. 0: none.
	Deadline time.Duration
	// Priority, where Options.Order is OrderPriority: the higher comes first. From -100 to 100.
	Priority int
}

// Beam says how to search, as generate of Hugging Face transformers does it. Every field's zero value is the library's default.
type Beam struct {
	// Width is the beams side by side: 2 to 64. 0: 4.
	Width int
	// Groups divide them, each with a search of its own. 0: 1.
	Groups int
	// DiversityPenalty is taken off a token's log probability for every beam of an earlier group that chose it in the same step.
	DiversityPenalty float64
	// LengthPenalty: scores are sums of log probabilities divided by the length to this power. nil: 1.
	LengthPenalty *float64
	// EarlyStopping says when enough has been found.
	EarlyStopping EarlyStopping
}

// EarlyStopping is when a beam search ends, once as many beams are finished as it is wide.
type EarlyStopping uint32

const (
	// EarlyStoppingNo: when no running beam, ended now, would be better than the worst finished one.
	EarlyStoppingNo EarlyStopping = C.PLLM_EARLY_STOPPING_NO
	// EarlyStoppingYes: at once.
	EarlyStoppingYes EarlyStopping = C.PLLM_EARLY_STOPPING_YES
	// EarlyStoppingNever: when no running beam can become better than the worst finished one.
	EarlyStoppingNever EarlyStopping = C.PLLM_EARLY_STOPPING_NEVER
)

// A RequestID names a request of one engine. Ids are never reused.
type RequestID uint64

func (r *Request) toC(args *arguments) (*C.pllm_request, error) {
	c := new(C.pllm_request)
	C.pllm_request_init(c, C.sizeof_pllm_request)
	c.prompt, c.prompt_len, c.prompt_tokens, c.prompt_tokens_len = args.prompt(r.Prompt, r.PromptTokens)
	if r.RawPrompt {
		c.text_flags &^= C.PLLM_TEXT_ADD_SPECIAL
	}
	if r.ShowSpecial {
		c.text_flags &^= C.PLLM_TEXT_SKIP_SPECIAL
	}
	c.user_data = C.uint64_t(r.UserData)
	c.sampling = r.Sampling.toC(args)
	args.setUint32(&c.n, "N", r.N)
	args.setUint32(&c.best_of, "BestOf", r.BestOf)
	args.setUint32(&c.truncate_prompt_tokens, "TruncatePrompt", r.TruncatePrompt)
	setFlag(&c.flags, r.Keep, C.PLLM_REQUEST_KEEP)
	if r.Beam != nil {
		c.beam = r.Beam.toC(args)
	}
	c.cache_salt, c.cache_salt_len = args.bytes(r.CacheSalt)
	c.deadline_ms = C.int64_t(wholeMilliseconds(r.Deadline))
	args.setInt32(&c.priority, "Priority", r.Priority)
	return c, args.err
}

// results is how many there are to be.
func (r *Request) results() int { return cmp.Or(r.N, 1) }

func (b *Beam) toC(args *arguments) *C.pllm_beam {
	c := new(C.pllm_beam)
	C.pllm_beam_init(c, C.sizeof_pllm_beam)
	args.setUint32(&c.width, "Width", b.Width)
	args.setUint32(&c.groups, "Groups", b.Groups)
	args.setFloat(&c.diversity_penalty, b.DiversityPenalty)
	setFloatFrom(&c.length_penalty, b.LengthPenalty)
	c.early_stopping = C.uint32_t(b.EarlyStopping)
	args.Pin(c)
	return c
}
