//go:build !go1.24

package pagedllm

import "runtime"

// whenUnreachable calls release after object has become unreachable. release must not refer to
// object.
func whenUnreachable[T any](object *T, release func()) {
	runtime.SetFinalizer(object, func(*T) { release() })
}
