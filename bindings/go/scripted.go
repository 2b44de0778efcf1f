//go:build pagedllm_scripted

package pagedllm

// #include "glue.h"
// extern pllm_engine *bench_engine_create(uint64_t pace_us);
// extern uint64_t bench_driver_cpu_ns(void);
import "C"

import "time"

// OpenScripted is for benches/polling, whose library has an engine without a model: it takes a step every pace.
func OpenScripted(pace time.Duration) (*Engine, error) {
	return newEngine(C.bench_engine_create(C.uint64_t(pace.Microseconds())), 64)
}

// ScriptedDriverCPU is the CPU time of the stepping thread so far.
func ScriptedDriverCPU() time.Duration { return time.Duration(C.bench_driver_cpu_ns()) }

// CopyTime is what it takes to copy what is in the queue into Go, without the calls that fetch and free it: all that would be left to do if
// the records lay in a ring mapped into the process.
func (q *Queue) CopyTime() (spent time.Duration, err error) {
	err = q.mailbox.queue.use(func(queue *C.pllm_queue) error {
		var batch C.output_batch
		if err := check(C.take_outputs(queue, &batch)); err != nil {
			return err
		}
		defer C.pllm_outputs_free(batch.outputs)
		begin := time.Now()
		copyOutputs(batch)
		spent = time.Since(begin)
		return nil
	})
	return spent, err
}
