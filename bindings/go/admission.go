package pagedllm

// #include "glue.h"
import "C"

import "time"

// An Admission is what would become of a request that was added now.
type Admission struct {
	// Admits: it would be taken. Else too much waits, or its queue is not read.
	Admits bool
	// FitsNow: nobody is before it, and there is room for it: the next step would begin it.
	FitsNow bool
	// FirstToken is how long its first token is expected to take. nil: no step has shown yet how long steps take.
	FirstToken *time.Duration
	// WaitingRequests are before it, with so many WaitingTokens to compute.
	WaitingRequests, WaitingTokens int
}

// Admit says what would become of the request if it were added now, without adding it. A request that would be refused in any
// case is refused here, too.
func (e *Engine) Admit(request Request) (Admission, error) { return e.Queue().Admit(request) }

// Admit is Engine.Admit for a request whose outputs would go to this queue.
func (q *Queue) Admit(request Request) (admission Admission, err error) {
	var args arguments
	defer args.Unpin()
	c, err := request.toC(&args)
	if err != nil {
		return Admission{}, err
	}
	err = q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		told := C.pllm_admission{struct_size: C.sizeof_pllm_admission}
		if err := check(C.pllm_engine_admit(engine, c, &told)); err != nil {
			return err
		}
		admission = Admission{
			Admits:          told.admits != 0,
			FitsNow:         told.fits_now != 0,
			WaitingRequests: int(told.waiting_requests),
			WaitingTokens:   int(told.waiting_tokens),
		}
		if told.first_token_seconds >= 0 {
			admission.FirstToken = Ptr(goDuration(told.first_token_seconds))
		}
		return nil
	})
	return admission, err
}
