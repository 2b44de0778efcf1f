//go:build pagedllm_pkgconfig && !pagedllm_static

package pagedllm

// #cgo pkg-config: pagedllm
import "C"
