package pagedllm

// #include "glue.h"
import "C"

import (
	"errors"
	"io/fs"
)

// An Error is an error of the library or of this package: a stable code, and a message with the
// numbers and the remedy. All errors of this package have this type, except those of contexts.
type Error struct {
	Code    Code
	Message string
	// PromptTokens is the number of tokens of a prompt that is too long, and MaxModelLen is the
	// limit of the engine. Both are 0 for any other error.
	PromptTokens, MaxModelLen int
	// IsTemporary reports whether the same call can succeed later without a change, for example
	// when fewer requests wait.
	IsTemporary bool
}

func (e *Error) Error() string { return e.Code.Error() + ": " + e.Message }

// Unwrap returns the code, so that errors.Is(err, ErrCapacity) distinguishes kinds.
func (e *Error) Unwrap() error { return e.Code }

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
	return &Error{
		Code:         Code(C.pllm_error_code(e)),
		Message:      C.GoString(C.pllm_error_message(e)),
		PromptTokens: int(C.pllm_error_prompt_tokens(e)),
		MaxModelLen:  int(C.pllm_error_max_model_len(e)),
		IsTemporary:  C.pllm_error_is_temporary(e) != 0,
	}
}

// goError returns the error of an output, or nil if it has none.
func goError(code C.int32_t, message *C.char, len C.uint64_t) error {
	if code == 0 {
		return nil
	}
	return &Error{Code: Code(code), Message: goText(message, len)}
}
