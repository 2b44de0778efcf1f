package pagedllm

// #include "glue.h"
import "C"

import (
	"errors"
	"fmt"
	"io/fs"
)

// An Error is an error of the library or of this package: a stable code, and a message with the
// numbers and the remedy. All errors of this package have this type, except those of contexts.
type Error struct {
	Code    Code
	Message string
}

func (e *Error) Error() string { return e.Code.Error() + ": " + e.Message }

// Unwrap returns the code, so that errors.Is(err, ErrCapacity) distinguishes kinds.
func (e *Error) Unwrap() error { return e.Code }

// A Code is a kind of error. The codes are errors themselves, for errors.Is. ErrClosed is also
// fs.ErrClosed, and ErrUnsupported is also errors.ErrUnsupported.
type Code int32

const (
	// ErrInvalidArgument: an argument is invalid: a value, a range, a text encoding.
	ErrInvalidArgument Code = C.PLLM_E_INVALID_ARGUMENT
	// ErrNotFound: no live request, sequence or pin has this id.
	ErrNotFound Code = C.PLLM_E_NOT_FOUND
	// ErrIO: a file cannot be opened, read or written.
	ErrIO Code = C.PLLM_E_IO
	// ErrModel: the model's files are damaged, incomplete or contradictory, or its weights are not
	// finite.
	ErrModel Code = C.PLLM_E_MODEL
	// ErrUnsupported: this build, model or machine does not support the request.
	ErrUnsupported Code = C.PLLM_E_UNSUPPORTED
	// ErrCapacity: a limit of memory, blocks, requests, queues or file descriptors does not allow
	// it.
	ErrCapacity Code = C.PLLM_E_CAPACITY
	// ErrBusy: another thread is stepping this engine.
	ErrBusy Code = C.PLLM_E_BUSY
	// ErrOutOfMemory: the system has no memory left.
	ErrOutOfMemory Code = C.PLLM_E_OUT_OF_MEMORY
	// ErrInternal: a defect of the library. If it occurs in a step, the engine has failed; closing
	// it still works.
	ErrInternal Code = C.PLLM_E_INTERNAL
	// ErrClosed: the engine, the budget, the queue or the sequence has been closed.
	ErrClosed Code = C.PLLM_E_CLOSED
	// ErrCancelled: the loading was cancelled. Open returns the error of the context instead.
	ErrCancelled Code = C.PLLM_E_CANCELLED
)

var codeNames = map[Code]string{
	ErrInvalidArgument: "invalid argument",
	ErrNotFound:        "not found",
	ErrIO:              "i/o",
	ErrModel:           "model",
	ErrUnsupported:     "unsupported",
	ErrCapacity:        "capacity",
	ErrBusy:            "busy",
	ErrOutOfMemory:     "out of memory",
	ErrInternal:        "internal",
	ErrClosed:          "closed",
	ErrCancelled:       "cancelled",
}

// String returns the name of the code, such as "capacity".
func (c Code) String() string {
	if name, ok := codeNames[c]; ok {
		return name
	}
	return fmt.Sprintf("code %d", int32(c))
}

func (c Code) Error() string { return "pagedllm: " + c.String() }

// Is matches ErrClosed with fs.ErrClosed and ErrUnsupported with errors.ErrUnsupported.
func (c Code) Is(target error) bool {
	return c == ErrClosed && target == fs.ErrClosed || c == ErrUnsupported && target == errors.ErrUnsupported
}

// check converts an error of the library and frees it.
func check(e *C.pllm_error) error {
	if e == nil {
		return nil
	}
	defer C.pllm_error_free(e)
	return &Error{Code(C.pllm_error_code(e)), C.GoString(C.pllm_error_message(e))}
}
