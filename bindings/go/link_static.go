//go:build pagedllm_static

package pagedllm

// #cgo LDFLAGS: -l:libpagedllm.a -lm -ldl -lpthread -lgcc_s
import "C"
