package pagedllm

// #include "glue.h"
import "C"

import (
	"fmt"
	"runtime"
)

// Plan computes what Open would allocate, from the headers of the model's files, without allocating
// it.
func (o Options) Plan() (Plan, error) {
	c := C.pllm_plan{struct_size: C.sizeof_pllm_plan}
	err := o.use(func(options *C.pllm_engine_options) error { return check(C.pllm_engine_plan(options, &c)) })
	if err != nil {
		return Plan{}, err
	}
	var plan Plan
	plan.fromC(&c)
	return plan, nil
}

// create makes a call that creates an engine, as take does, with the KV store. If the call succeeds,
// the library has the store, too.
func (o *Options) create(call func(*C.pllm_engine_options) error) error {
	if o.KVStore == nil {
		return o.take(call)
	}
	return o.KVStore.use(func(store *C.pllm_kv_store) error {
		return o.take(func(options *C.pllm_engine_options) error {
			options.kv_store = store
			return call(options)
		})
	})
}

// take makes a call with the options as a C struct, including the communicator. If the call
// succeeds, the library has the communicator.
func (o *Options) take(call func(*C.pllm_engine_options) error) error {
	if o.Communicator == nil {
		return o.use(call)
	}
	return o.Communicator.use(func(rank *groupRank) error {
		var pinner runtime.Pinner
		defer pinner.Unpin()
		pinner.Pin(rank)
		return o.use(func(options *C.pllm_engine_options) error {
			options.communicator = rank.c()
			return call(options)
		})
	})
}

// use makes a call with the options as a C struct, without the communicator and the KV store.
func (o *Options) use(call func(*C.pllm_engine_options) error) error {
	if version := C.pllm_abi_version(); version != C.PLLM_ABI_VERSION {
		return &Error{Code: ErrUnsupported, Message: fmt.Sprintf("the library has ABI version %d (this package: %d); "+
			"build the package with the header of this library", version, C.PLLM_ABI_VERSION)}
	}
	var args arguments
	defer args.Unpin()
	options := o.toC(&args)
	if args.err != nil {
		return args.err
	}
	if o.Budget == nil {
		return call(options)
	}
	return o.Budget.use(func(budget *C.pllm_budget) error {
		options.budget = budget
		return call(options)
	})
}
