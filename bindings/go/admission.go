package pagedllm

// #include "glue.h"
import "C"

// PredictAdmission predicts admission and time to first token for a request without adding it. It
// returns the errors that Add would return, except for grammars, which are not compiled.
func (e *Engine) PredictAdmission(request Request) (Admission, error) {
	return e.Queue().PredictAdmission(request)
}

// PredictAdmission is Engine.PredictAdmission for a request with outputs to this queue.
func (q *Queue) PredictAdmission(request Request) (admission Admission, err error) {
	var args arguments
	defer args.Unpin()
	c := request.toC(&args)
	if args.err != nil {
		return admission, args.err
	}
	err = q.use(func(engine *C.pllm_engine, queue *C.pllm_queue) error {
		c.queue = queue
		answer := C.pllm_admission{struct_size: C.sizeof_pllm_admission}
		if err := check(C.pllm_engine_predict_admission(engine, c, &answer)); err != nil {
			return err
		}
		admission.fromC(&answer)
		return nil
	})
	return admission, err
}
