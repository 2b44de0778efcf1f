//go:build !pagedllm_static && !pagedllm_pkgconfig

package pagedllm

// #cgo LDFLAGS: -lpagedllm
import "C"
