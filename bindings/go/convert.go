package pagedllm

// #include "glue.h"
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"
	"unsafe"
)

// arguments converts Go values to the fields of a C struct. A zero value keeps the library's
// default. Memory that the fields point to stays pinned until Unpin. err is the error for the first
// value that does not fit the C type.
type arguments struct {
	runtime.Pinner
	err error
}

func (a *arguments) setUint32(field *C.uint32_t, name string, value int) {
	if a.inRange(name, int64(value), 0, math.MaxUint32) && value != 0 {
		*field = C.uint32_t(value)
	}
}

func (a *arguments) setInt32(field *C.int32_t, name string, value int) {
	if a.inRange(name, int64(value), math.MinInt32, math.MaxInt32) && value != 0 {
		*field = C.int32_t(value)
	}
}

func (a *arguments) setUint64(field *C.uint64_t, name string, value int64) {
	if a.inRange(name, value, 0, math.MaxInt64) && value != 0 {
		*field = C.uint64_t(value)
	}
}

func (a *arguments) setFloat(field *C.float, value float64) {
	if value != 0 {
		*field = C.float(value)
	}
}

// setUint32From sets a field for which 0 is not the default. nil keeps the default.
func (a *arguments) setUint32From(field *C.uint32_t, name string, value *int) {
	if value != nil && a.inRange(name, int64(*value), 0, math.MaxUint32) {
		*field = C.uint32_t(*value)
	}
}

// setPromptOnly sets the maximum number of tokens to 0, which is not the zero value of MaxTokens.
func (a *arguments) setPromptOnly(field *C.uint32_t, maxTokens int) {
	if maxTokens != 0 {
		a.refuse("PromptOnly is set and MaxTokens is %d; set one of them to its zero value", maxTokens)
	}
	*field = 0
}

// setFloatFrom sets a field for which 0 is not the default. nil keeps the default.
func setFloatFrom(field *C.float, value *float64) {
	if value != nil {
		*field = C.float(*value)
	}
}

func (a *arguments) inRange(name string, value, low, high int64) bool {
	if value >= low && value <= high {
		return true
	}
	a.refuse("%s is %d; must be %d to %d", name, value, low, high)
	return false
}

func (a *arguments) setMilliseconds32(field *C.uint32_t, name string, value time.Duration) {
	if ms := a.milliseconds(name, value, math.MaxUint32); ms != 0 {
		*field = C.uint32_t(ms)
	}
}

func (a *arguments) setMilliseconds64(field *C.uint64_t, name string, value time.Duration) {
	if ms := a.milliseconds(name, value, math.MaxInt64); ms != 0 {
		*field = C.uint64_t(ms)
	}
}

// milliseconds returns a duration in whole milliseconds from 0 to high.
func (a *arguments) milliseconds(name string, value time.Duration, high int64) int64 {
	ms := wholeMilliseconds(value)
	if ms < 0 || ms > high {
		limit := time.Duration(min(high, math.MaxInt64/int64(time.Millisecond))) * time.Millisecond
		a.refuse("%s is %v; must be 0s to %v", name, value, limit)
		return 0
	}
	return ms
}

// refuse sets the error unless an earlier argument has set it.
func (a *arguments) refuse(format string, values ...any) {
	if a.err == nil {
		a.err = &Error{Code: ErrInvalidArgument, Message: fmt.Sprintf(format, values...)}
	}
}

// nothing is the address of an empty string. NULL would mean that no string is given.
var nothing [1]byte

func (a *arguments) text(s string) (*C.char, C.uint64_t) {
	data := unsafe.StringData(s)
	if len(s) == 0 {
		data = &nothing[0]
	}
	a.Pin(data)
	return (*C.char)(unsafe.Pointer(data)), C.uint64_t(len(s))
}

// setText sets a text unless it is empty.
func (a *arguments) setText(data **C.char, len *C.uint64_t, s string) {
	if s != "" {
		*data, *len = a.text(s)
	}
}

// texts returns NULL for a nil slice, but not for an empty one.
func (a *arguments) texts(all []string) (**C.char, *C.uint64_t, C.uint64_t) {
	if all == nil {
		return nil, nil, 0
	}
	data := make([]*C.char, len(all))
	lens := make([]C.uint64_t, len(all))
	for i, s := range all {
		data[i], lens[i] = a.text(s)
	}
	a.Pin(unsafe.SliceData(data))
	a.Pin(unsafe.SliceData(lens))
	return unsafe.SliceData(data), unsafe.SliceData(lens), C.uint64_t(len(all))
}

// tokens returns NULL for a nil slice, but not for an empty one.
func (a *arguments) tokens(ids []uint32) (*C.uint32_t, C.uint64_t) {
	if ids == nil {
		return nil, 0
	}
	data := unsafe.SliceData(ids)
	a.Pin(data)
	return (*C.uint32_t)(unsafe.Pointer(data)), C.uint64_t(len(ids))
}

// prompt converts the text, the token ids, or both if both are given, which the library refuses.
func (a *arguments) prompt(prompt string, ids []uint32) (text *C.char, len C.uint64_t, tokens *C.uint32_t, count C.uint64_t) {
	if ids == nil || prompt != "" {
		text, len = a.text(prompt)
	}
	tokens, count = a.tokens(ids)
	return text, len, tokens, count
}

func (a *arguments) bytes(all []byte) (*C.uint8_t, C.uint64_t) {
	data, len := array(a, all)
	return (*C.uint8_t)(data), len
}

func (a *arguments) biases(all map[uint32]float64) (*C.pllm_logit_bias, C.uint64_t) {
	var biases []C.pllm_logit_bias
	for token, bias := range all {
		biases = append(biases, C.pllm_logit_bias{token: C.uint32_t(token), bias: C.float(bias)})
	}
	return array(a, biases)
}

func (a *arguments) tokenLists(all [][]uint32) (*C.pllm_token_list, C.uint64_t) {
	lists := make([]C.pllm_token_list, len(all))
	for i, list := range all {
		lists[i].tokens, lists[i].tokens_len = a.tokens(list)
	}
	return array(a, lists)
}

// array returns NULL for an empty slice.
func array[T any](a *arguments, all []T) (*T, C.uint64_t) {
	if len(all) == 0 {
		return nil, 0
	}
	a.Pin(&all[0])
	return &all[0], C.uint64_t(len(all))
}

// wholeMilliseconds rounds away from 0, because 0 means no limit.
func wholeMilliseconds(d time.Duration) int64 {
	milliseconds := d.Milliseconds()
	switch rest := d - time.Duration(milliseconds)*time.Millisecond; {
	case rest > 0:
		milliseconds++
	case rest < 0:
		milliseconds--
	}
	return milliseconds
}

func goDuration(seconds C.double) time.Duration {
	return time.Duration(float64(seconds) * float64(time.Second))
}

// goText copies a C string.
func goText(data *C.char, len C.uint64_t) string {
	return string(unsafe.Slice((*byte)(unsafe.Pointer(data)), len))
}

func goBytes(data *C.uint8_t, len C.uint64_t) []byte {
	return slices.Clone(unsafe.Slice((*byte)(unsafe.Pointer(data)), len))
}

func goTokens(data *C.uint32_t, len C.uint64_t) []uint32 {
	return slices.Clone(unsafe.Slice((*uint32)(unsafe.Pointer(data)), len))
}

func goFloats(data *C.float, len C.uint64_t) []float32 {
	if data == nil {
		return nil
	}
	return slices.Clone(unsafe.Slice((*float32)(data), len))
}

// goLogProbs copies the alternatives, the same number for each token.
func goLogProbs(data *C.pllm_logprob, len, tokens C.uint64_t) [][]LogProb {
	if tokens == 0 || len < tokens {
		return nil
	}
	all := make([]LogProb, len)
	for i, alternative := range unsafe.Slice(data, len) {
		all[i] = LogProb{Token: uint32(alternative.token), LogProb: float32(alternative.logprob)}
	}
	return slices.Collect(slices.Chunk(all, int(len/tokens)))
}
