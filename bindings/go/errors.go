package pagedllm

// #include "glue.h"
import "C"

import (
	"errors"
	"fmt"
	"io/fs"
)

// An Error is what the library or this package has to say: what kind of failure it is, and a message with the numbers and
// the remedy. All errors of this package are of this type, except a context's own.
type Error struct {
	Code    Code
	Message string
}

func (e *Error) Error() string { return e.Code.Error() + ": " + e.Message }

// Unwrap returns the code, so that errors.Is(err, ErrCapacity) tells kinds apart.
func (e *Error) Unwrap() error { return e.Code }

// A Code is a kind of failure. The codes are errors themselves, to be compared with errors.Is. ErrClosed also is
// fs.ErrClosed, and ErrUnsupported is errors.ErrUnsupported.
type Code int32

const (
	// ErrInvalidArgument: an argument is wrong: its value, its range, its encoding.
	ErrInvalidArgument Code = C.PLLM_E_INVALID_ARGUMENT
	// ErrNotFound: no live request or sequence has this id.
	ErrNotFound Code = C.PLLM_E_NOT_FOUND
	// ErrIO: a file could not be opened or read.
	ErrIO Code = C.PLLM_E_IO
	// ErrModel: the model's files are damaged, incomplete or contradict each other, or its numbers are not finite.
	ErrModel Code = C.PLLM_E_MODEL
	// ErrUnsupported: understood, and not offered by this build, model or machine.
	ErrUnsupported Code = C.PLLM_E_UNSUPPORTED
	// ErrCapacity: the budget of memory, blocks, requests or descriptors does not allow it.
	ErrCapacity Code = C.PLLM_E_CAPACITY
	// ErrBusy: somebody else is in the middle of what allows one at a time.
	ErrBusy Code = C.PLLM_E_BUSY
	// ErrOutOfMemory: the machine would not give the memory.
	ErrOutOfMemory Code = C.PLLM_E_OUT_OF_MEMORY
	// ErrInternal: a defect of the library. After one in a step the engine serves no more; closing it still works.
	ErrInternal Code = C.PLLM_E_INTERNAL
	// ErrClosed: the engine, the queue or the sequence has been closed.
	ErrClosed Code = C.PLLM_E_CLOSED
	// ErrCancelled: the loading was stopped. Open answers with the context's error instead.
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

// String names the code, such as "capacity".
func (c Code) String() string {
	if name, ok := codeNames[c]; ok {
		return name
	}
	return fmt.Sprintf("code %d", int32(c))
}

func (c Code) Error() string { return "pagedllm: " + c.String() }

// Is makes errors.Is match the standard library's name for the same thing.
func (c Code) Is(target error) bool {
	return c == ErrClosed && target == fs.ErrClosed || c == ErrUnsupported && target == errors.ErrUnsupported
}

// check turns the library's error into Go's, and frees it.
func check(e *C.pllm_error) error {
	if e == nil {
		return nil
	}
	defer C.pllm_error_free(e)
	return &Error{Code(C.pllm_error_code(e)), C.GoString(C.pllm_error_message(e))}
}
