package pagedllm

// #include "glue.h"
import "C"

import "runtime"

// A Budget is a memory budget for KV pools. Several engines can share it (Options.Budget), and its
// size can change while they run. Any number of goroutines may use it.
type Budget struct {
	// budget is nil for the budget of an engine.
	budget *shared[*C.pllm_budget]
	engine *Engine
}

// NewBudget creates a budget of the given size. Resize can later raise it to at most maxBytes (0:
// to bytes). Nothing is allocated now: engines use memory for the blocks they fill. The budget must
// hold one sequence of MaxModelLen tokens for each engine. Close the budget when no more engines
// will be opened with it; its engines keep the budget.
func NewBudget(bytes, maxBytes int64) (*Budget, error) {
	var args arguments
	var cBytes, cMax C.uint64_t
	args.setUint64(&cBytes, "bytes", bytes)
	args.setUint64(&cMax, "maxBytes", maxBytes)
	if args.err != nil {
		return nil, args.err
	}
	var c *C.pllm_budget
	if err := check(C.pllm_budget_create(cBytes, cMax, &c)); err != nil {
		return nil, err
	}
	budget := &shared[*C.pllm_budget]{name: "budget", object: c, free: func(c *C.pllm_budget) { C.pllm_budget_free(c) }}
	b := &Budget{budget: budget}
	whenUnreachable(b, budget.close)
	return b, nil
}

// Budget returns the budget of the engine's KV pool: Options.Budget or the engine's own. Closing the
// engine closes it.
func (e *Engine) Budget() *Budget { return &Budget{engine: e} }

// Close frees the handle. Engines that were opened with the budget keep the budget, and Engine.Budget
// still returns it. Close waits for calls in progress, including an Open with the budget. It may be
// called at any time, from any goroutine, more than once. For the result of Engine.Budget it returns
// ErrInvalidArgument.
func (b *Budget) Close() error {
	if b.engine != nil {
		return &Error{Code: ErrInvalidArgument, Message: "the engine's own budget closes with the engine; close the engine"}
	}
	b.budget.close()
	return nil
}

// use makes a call on the budget.
func (b *Budget) use(call func(*C.pllm_budget) error) error {
	// The cleanup of an unreachable budget or engine must not close it during the call.
	defer runtime.KeepAlive(b)
	if b.engine == nil {
		return b.budget.use(call)
	}
	return b.engine.engine.use(func(engine *C.pllm_engine) error { return call(C.pllm_engine_budget(engine)) })
}

// Resize changes the size of the budget. No request ends, and results do not change. For a smaller
// size, the engines first drop cached blocks, then the KV blocks of idle sequences, then preempt
// the youngest running requests. The memory is returned to the system, by an engine in a step
// before its next step. If the size is too small for the engines and the requests in progress, the
// call returns ErrCapacity with the smallest possible size.
func (b *Budget) Resize(bytes int64) error {
	var args arguments
	var c C.uint64_t
	if args.setUint64(&c, "bytes", bytes); args.err != nil {
		return args.err
	}
	return b.use(func(budget *C.pllm_budget) error { return check(C.pllm_budget_resize(budget, c)) })
}

// Info returns the size of the budget and the bytes that its engines hold.
func (b *Budget) Info() (info BudgetInfo, err error) {
	err = b.use(func(budget *C.pllm_budget) error {
		c := C.pllm_budget_info{struct_size: C.sizeof_pllm_budget_info}
		if err := check(C.pllm_budget_get_info(budget, &c)); err != nil {
			return err
		}
		info.fromC(&c)
		return nil
	})
	return info, err
}
