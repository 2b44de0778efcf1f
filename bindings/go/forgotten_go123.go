//go:build !go1.24

package pagedllm

import "runtime"

// whenForgotten calls release after object has become unreachable. release must not refer to
// object.
func whenForgotten[T any](object *T, release func()) {
	runtime.SetFinalizer(object, func(*T) { release() })
}
