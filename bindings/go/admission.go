package pagedllm

// #include "glue.h"
import "C"

import "time"

// An Admission is the predicted admission of a request.
type Admission struct {
	// Admits is true if Add would accept the request. It is false if too many requests wait or the
	// queue is full.
	Admits bool
	// FitsNow is true if no request is ahead of it and its blocks are free, so that it would start
	// in the next step.
	FitsNow bool
	// FirstToken is the predicted time until its first token. nil: no step has been measured yet.
	FirstToken *time.Duration
	// WaitingRequests is the number of requests ahead of it, and WaitingTokens the number of tokens
	// that they have to compute.
	WaitingRequests, WaitingTokens int
}

// PredictAdmission predicts admission and time to first token for a request without adding it. It
// returns the errors that Add would return, except for grammars, which are not compiled.
func (e *Engine) PredictAdmission(request Request) (Admission, error) {
	return e.Queue().PredictAdmission(request)
}

// PredictAdmission is Engine.PredictAdmission for a request with outputs to this queue.
func (q *Queue) PredictAdmission(request Request) (admission Admission, err error) {
	var args arguments
	defer args.Unpin()
	c, err := request.toC(&args)
	if err != nil {
		return Admission{}, err
	}
	err = q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		answer := C.pllm_admission{struct_size: C.sizeof_pllm_admission}
		if err := check(C.pllm_engine_predict_admission(engine, c, &answer)); err != nil {
			return err
		}
		admission = Admission{
			Admits:          answer.admits != 0,
			FitsNow:         answer.fits_now != 0,
			WaitingRequests: int(answer.waiting_requests),
			WaitingTokens:   int(answer.waiting_tokens),
		}
		if answer.first_token_seconds >= 0 {
			admission.FirstToken = Ptr(goDuration(answer.first_token_seconds))
		}
		return nil
	})
	return admission, err
}
