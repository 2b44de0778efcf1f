//go:build go1.24

package pagedllm

import "runtime"

// whenForgotten has release called some time after object became unreachable. release must not reach object.
func whenForgotten[T any](object *T, release func()) {
	runtime.AddCleanup(object, func(release func()) { release() }, release)
}
