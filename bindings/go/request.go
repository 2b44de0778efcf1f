package pagedllm

// #include "glue.h"
import "C"

import (
	"cmp"
	"time"
)

// A Request is a prompt with its parameters. Only a prompt is required: the zero value of each
// other field selects the library's default.
type Request struct {
	// Prompt is the prompt as text. It must be empty if PromptTokenIDs is given.
	Prompt string
	// PromptTokenIDs is the prompt as token ids. nil if it is given as text.
	PromptTokenIDs []uint32
	// RawPrompt is true if the tokenizer must not add its special tokens, such as BOS. Set it for a
	// prompt that RenderChat rendered.
	RawPrompt bool
	// ShowSpecial keeps special tokens in the text.
	ShowSpecial bool
	// Sampling is how the request samples its tokens, what it reports and when it ends.
	Sampling Sampling
	// N is the number of results: samples, or best beams. 0: 1. Each has its own Index and its own
	// last output.
	N int
	// BestOf is the number of samples to generate. If it is larger than N, the N samples with the
	// highest log probability are returned at the end, best first. 0: N.
	BestOf int
	// Beam selects beam search instead of sampling. The N best beams are returned at the end, best
	// first. nil: sampling.
	Beam *Beam
	// Keep keeps the sequences of the request when they end, for any reason. Engine.Sequence takes
	// ownership of one.
	Keep bool
	// TruncatePrompt is the number of tokens at the end of the prompt that are kept. 0: all.
	TruncatePrompt int
	// CacheSalt separates tenants: requests share blocks of the prefix cache only if their salts
	// are equal.
	CacheSalt []byte
	// UserData is returned in each output.
	UserData uint64
	// Deadline is the time from now, in whole milliseconds, after which the request ends with
	// FinishDeadline and the tokens it has. This is not an error. 0: none.
	Deadline time.Duration
	// Priority is used if Options.Order is OrderPriority: -100 to 100; higher runs first.
	Priority int
}

// Beam has the parameters of a beam search, as in generate of Hugging Face transformers. The zero
// value of each field selects the library's default.
type Beam struct {
	// Width is the number of beams, 2 to 64. 0: 4.
	Width int
	// Groups is the number of groups of beams, each with its own search. 0: 1.
	Groups int
	// DiversityPenalty is subtracted from the log probability of a token for each beam of an
	// earlier group that chose it in the same step.
	DiversityPenalty float64
	// LengthPenalty is an exponent: the score of a beam is the sum of its log probabilities divided
	// by its length to this power. nil: 1.
	LengthPenalty *float64
	// EarlyStopping is when the search ends.
	EarlyStopping EarlyStopping
}

// EarlyStopping is when a beam search ends.
type EarlyStopping uint32

const (
	// EarlyStoppingNo: stop when the best running beam, if it ended now, would not score higher
	// than the worst finished beam.
	EarlyStoppingNo EarlyStopping = C.PLLM_EARLY_STOPPING_NO
	// EarlyStoppingYes: stop as soon as Width beams are finished.
	EarlyStoppingYes EarlyStopping = C.PLLM_EARLY_STOPPING_YES
	// EarlyStoppingNever: stop when no running beam can reach a higher score than the worst
	// finished beam.
	EarlyStoppingNever EarlyStopping = C.PLLM_EARLY_STOPPING_NEVER
)

// A RequestID is the id of a request of one engine. Ids are never reused.
type RequestID uint64

func (r *Request) toC(args *arguments) (*C.pllm_request, error) {
	c := new(C.pllm_request)
	C.pllm_request_init(c, C.sizeof_pllm_request)
	c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len = args.prompt(r.Prompt, r.PromptTokenIDs)
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

// results returns the number of results.
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
