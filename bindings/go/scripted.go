//go:build pagedllm_scripted

package pagedllm

// #include "glue.h"
// extern pllm_engine *bench_engine_create(uint64_t pace_us);
// extern uint64_t bench_driver_cpu_ns(void);
import "C"

import "time"

// OpenScripted opens the engine without a model of benches/polling. Each of its steps takes one
// pace.
func OpenScripted(pace time.Duration) (*Engine, error) {
	return newEngine(C.bench_engine_create(C.uint64_t(pace.Microseconds())), 64)
}

// ScriptedDriverCPU returns the CPU time of the stepping thread so far.
func ScriptedDriverCPU() time.Duration { return time.Duration(C.bench_driver_cpu_ns()) }

// CopyTime returns the time to copy the outputs of the queue to Go, without the calls that fetch
// and free them. It is the time that a ring of outputs in memory of the process would still need.
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
