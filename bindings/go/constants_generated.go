// Code generated from src/ffi by make header. DO NOT EDIT.

package pagedllm

// #include "glue.h"
import "C"

import "fmt"

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
	// ErrCapacity: a limit of memory, blocks, requests or queues does not allow it.
	ErrCapacity Code = C.PLLM_E_CAPACITY
	// ErrBusy: another thread is stepping this engine.
	ErrBusy Code = C.PLLM_E_BUSY
	// ErrOutOfMemory: the system has no memory left.
	ErrOutOfMemory Code = C.PLLM_E_OUT_OF_MEMORY
	// ErrInternal: a defect of the library. If it occurs in a step, the engine has failed: each
	// request ends with FinishError, later calls return the same error, and Engine.Close still
	// works.
	ErrInternal Code = C.PLLM_E_INTERNAL
	// ErrClosed: the engine, the budget, the queue or the sequence has been closed.
	ErrClosed Code = C.PLLM_E_CLOSED
	// ErrCancelled: the loading was cancelled. Open returns the error of the context instead.
	ErrCancelled Code = C.PLLM_E_CANCELLED
)

// String returns the name, such as "not found".
func (c Code) String() string {
	switch c {
	case ErrInvalidArgument:
		return "invalid argument"
	case ErrNotFound:
		return "not found"
	case ErrIO:
		return "i/o"
	case ErrModel:
		return "model"
	case ErrUnsupported:
		return "unsupported"
	case ErrCapacity:
		return "capacity"
	case ErrBusy:
		return "busy"
	case ErrOutOfMemory:
		return "out of memory"
	case ErrInternal:
		return "internal"
	case ErrClosed:
		return "closed"
	case ErrCancelled:
		return "cancelled"
	}
	return fmt.Sprintf("code %d", int32(c))
}

// DType is a data type of KV blocks.
type DType uint32

const (
	// DTypeAuto: selected by the library.
	DTypeAuto DType = C.PLLM_DTYPE_AUTO
	// F32: 32-bit floating point.
	F32 DType = C.PLLM_DTYPE_F32
	// BF16: bfloat16.
	BF16 DType = C.PLLM_DTYPE_BF16
	// INT8: 8-bit integers with a scale in f32 for each head of each token: about half the bytes of
	// bf16, at a small cost in quality.
	INT8 DType = C.PLLM_DTYPE_INT8
	// F16: 16-bit floating point. Values beyond 65504 are clamped.
	F16 DType = C.PLLM_DTYPE_F16
	// FP8: 8-bit floating point (OCP E4M3) with the scales of INT8. More precise for small values
	// beside large ones, less precise for large values.
	FP8 DType = C.PLLM_DTYPE_FP8
)

// String returns the name, such as "f32".
func (d DType) String() string {
	switch d {
	case DTypeAuto:
		return "auto"
	case F32:
		return "f32"
	case BF16:
		return "bf16"
	case INT8:
		return "int8"
	case F16:
		return "f16"
	case FP8:
		return "fp8"
	}
	return fmt.Sprintf("%d", uint32(d))
}

// ISA is an instruction path of the CPU kernels.
type ISA uint32

const (
	// ISAAuto: the widest instruction path of the machine: AVX512BF16, AVX512VNNI, AVX512, AVXVNNI,
	// AVX2, Portable.
	ISAAuto ISA = C.PLLM_ISA_AUTO
	// Portable: any CPU.
	Portable ISA = C.PLLM_ISA_PORTABLE
	// AVX2: AVX2, FMA and F16C.
	AVX2 ISA = C.PLLM_ISA_AVX2
	// AVX512: AVX-512 F, BW, DQ and VL.
	AVX512 ISA = C.PLLM_ISA_AVX512
	// AVX512BF16: as AVX512VNNI, with AVX-512 BF16: activations that are multiplied by weights or
	// KV in bf16 are rounded to bf16, and the products are summed in f32. Up to twice as fast for
	// prompts.
	AVX512BF16 ISA = C.PLLM_ISA_AVX512_BF16
	// AVXVNNI: as AVX2, with AVX-VNNI: products with integer weights are faster, with the same
	// bits.
	AVXVNNI ISA = C.PLLM_ISA_AVX_VNNI
	// AVX512VNNI: as AVX512, with AVX-512 VNNI: products with integer weights are faster, with the
	// same bits.
	AVX512VNNI ISA = C.PLLM_ISA_AVX512_VNNI
)

// String returns the name, such as "portable".
func (i ISA) String() string {
	switch i {
	case ISAAuto:
		return "auto"
	case Portable:
		return "portable"
	case AVX2:
		return "avx2"
	case AVX512:
		return "avx512"
	case AVX512BF16:
		return "avx512_bf16"
	case AVXVNNI:
		return "avx_vnni"
	case AVX512VNNI:
		return "avx512_vnni"
	}
	return fmt.Sprintf("%d", uint32(i))
}

// PackedForm is the result of Options.PackedPath.
type PackedForm uint32

const (
	// PackedUnused: Options.PackedPath was not set.
	PackedUnused PackedForm = C.PLLM_PACKED_UNUSED
	// PackedRead: the packed weights were read from Options.PackedPath.
	PackedRead PackedForm = C.PLLM_PACKED_READ
	// PackedSaved: the weights were packed from the model's files and written to
	// Options.PackedPath.
	PackedSaved PackedForm = C.PLLM_PACKED_SAVED
	// PackedUnsaved: the weights were packed from the model's files and could not be written to
	// Options.PackedPath.
	PackedUnsaved PackedForm = C.PLLM_PACKED_UNSAVED
)

// String returns the name, such as "read".
func (p PackedForm) String() string {
	switch p {
	case PackedUnused:
		return "unused"
	case PackedRead:
		return "read"
	case PackedSaved:
		return "saved"
	case PackedUnsaved:
		return "unsaved"
	}
	return fmt.Sprintf("%d", uint32(p))
}

// Preemption is the treatment of preempted requests.
type Preemption uint32

const (
	// PreemptionRecompute: preempted requests lose their KV blocks and are recomputed when they are
	// rescheduled.
	PreemptionRecompute Preemption = C.PLLM_PREEMPTION_RECOMPUTE
	// PreemptionSwap: preempted requests are swapped to host memory. If it is full, they are
	// recomputed.
	PreemptionSwap Preemption = C.PLLM_PREEMPTION_SWAP
	// PreemptionAuto: swap or recompute, whichever costs less by the measured times.
	PreemptionAuto Preemption = C.PLLM_PREEMPTION_AUTO
)

// String returns the name, such as "swap".
func (p Preemption) String() string {
	switch p {
	case PreemptionRecompute:
		return "recompute"
	case PreemptionSwap:
		return "swap"
	case PreemptionAuto:
		return "auto"
	}
	return fmt.Sprintf("%d", uint32(p))
}

// OutputKind is the content of each output.
type OutputKind uint32

const (
	// OutputDelta: each output has the new tokens and the new text only.
	OutputDelta OutputKind = C.PLLM_OUTPUT_DELTA
	// OutputCumulative: each output has all tokens and the whole text so far.
	OutputCumulative OutputKind = C.PLLM_OUTPUT_CUMULATIVE
	// OutputFinal: one output at the end of the sequence has all tokens and the whole text.
	OutputFinal OutputKind = C.PLLM_OUTPUT_FINAL
)

// EarlyStopping is the condition that ends a beam search.
type EarlyStopping uint32

const (
	// EarlyStoppingNo: stop when the best running beam, if it ended now, would not score higher
	// than the worst finished beam.
	EarlyStoppingNo EarlyStopping = C.PLLM_EARLY_STOPPING_NO
	// EarlyStoppingYes: stop as soon as Beam.Width beams are finished.
	EarlyStoppingYes EarlyStopping = C.PLLM_EARLY_STOPPING_YES
	// EarlyStoppingNever: stop when no running beam can reach a higher score than the worst
	// finished beam.
	EarlyStoppingNever EarlyStopping = C.PLLM_EARLY_STOPPING_NEVER
)

// FinishReason is the reason why a sequence ended.
type FinishReason uint32

const (
	// FinishNone: the sequence has not ended.
	FinishNone FinishReason = C.PLLM_FINISH_NONE
	// FinishStop: an end-of-sequence token, a stop token or a stop string.
	FinishStop FinishReason = C.PLLM_FINISH_STOP
	// FinishLength: Sampling.MaxTokens or Options.MaxModelLen was reached.
	FinishLength FinishReason = C.PLLM_FINISH_LENGTH
	// FinishAbort: the host aborted the request.
	FinishAbort FinishReason = C.PLLM_FINISH_ABORT
	// FinishError: the computation failed. See Output.Err.
	FinishError FinishReason = C.PLLM_FINISH_ERROR
	// FinishDeadline: the deadline passed. The outputs have the tokens generated by then.
	FinishDeadline FinishReason = C.PLLM_FINISH_DEADLINE
)

// String returns the name, such as "stop".
func (f FinishReason) String() string {
	switch f {
	case FinishNone:
		return "none"
	case FinishStop:
		return "stop"
	case FinishLength:
		return "length"
	case FinishAbort:
		return "abort"
	case FinishError:
		return "error"
	case FinishDeadline:
		return "deadline"
	}
	return fmt.Sprintf("%d", uint32(f))
}

// KVEventKind is the kind of a KV event.
type KVEventKind uint32

const (
	// KVStored: the block is in the cache from now on.
	KVStored KVEventKind = C.PLLM_KV_EVENT_STORED
	// KVRemoved: the block is no longer in the cache.
	KVRemoved KVEventKind = C.PLLM_KV_EVENT_REMOVED
	// KVCleared: no block is in the cache. KVStored of each block that is there follows.
	KVCleared KVEventKind = C.PLLM_KV_EVENT_CLEARED
)

// String returns the name, such as "removed".
func (k KVEventKind) String() string {
	switch k {
	case KVStored:
		return "stored"
	case KVRemoved:
		return "removed"
	case KVCleared:
		return "cleared"
	}
	return fmt.Sprintf("%d", uint32(k))
}

// KVMedium is the place of a KV block.
type KVMedium uint32

const (
	// KVMediumPool: the KV pool of the engine, in the memory of its device.
	KVMediumPool KVMedium = C.PLLM_KV_MEDIUM_POOL
)

// String returns the name, such as "pool".
func (k KVMedium) String() string {
	switch k {
	case KVMediumPool:
		return "pool"
	}
	return fmt.Sprintf("%d", uint32(k))
}

// StopReason is the condition that ended a sequence with FinishStop.
type StopReason uint32

const (
	// StopNone: the sequence has not ended, or for another reason than FinishStop.
	StopNone StopReason = C.PLLM_STOP_NONE
	// StopEOS: an end-of-sequence token of the model.
	StopEOS StopReason = C.PLLM_STOP_EOS
	// StopToken: a token of Sampling.StopTokens.
	StopToken StopReason = C.PLLM_STOP_TOKEN
	// StopString: a string of Sampling.Stop.
	StopString StopReason = C.PLLM_STOP_STRING
	// StopGrammar: the grammar was complete.
	StopGrammar StopReason = C.PLLM_STOP_GRAMMAR
)

// String returns the name, such as "eos".
func (s StopReason) String() string {
	switch s {
	case StopNone:
		return "none"
	case StopEOS:
		return "eos"
	case StopToken:
		return "token"
	case StopString:
		return "string"
	case StopGrammar:
		return "grammar"
	}
	return fmt.Sprintf("%d", uint32(s))
}

// Order is the order of the waiting requests.
type Order uint32

const (
	// OrderFCFS: first come, first served.
	OrderFCFS Order = C.PLLM_ORDER_FCFS
	// OrderPriority: highest Request.Priority first. It can preempt running requests of lower
	// priority. To prevent starvation, a request that has waited for Options.Ageing goes before new
	// requests of the next higher priority.
	OrderPriority Order = C.PLLM_ORDER_PRIORITY
	// OrderShortestPredicted: shortest predicted output first. The prediction uses recent requests
	// with a similar Sampling.MaxTokens. To prevent starvation, a request that has waited for
	// Options.Ageing goes before new requests that are predicted to be up to 100 tokens shorter.
	OrderShortestPredicted Order = C.PLLM_ORDER_SHORTEST_PREDICTED
)

// String returns the name, such as "priority".
func (o Order) String() string {
	switch o {
	case OrderFCFS:
		return "fcfs"
	case OrderPriority:
		return "priority"
	case OrderShortestPredicted:
		return "shortest_predicted"
	}
	return fmt.Sprintf("%d", uint32(o))
}

// Batching is the composition of a step.
type Batching uint32

const (
	// BatchingMixed: each step mixes prompt chunks and decodes, in the order of the requests.
	BatchingMixed Batching = C.PLLM_BATCHING_MIXED
	// BatchingPrefillFirst: each step has either prompts or decodes, and prompts go first. After
	// Options.PrefillBudget prompt tokens, the decodes get one step.
	BatchingPrefillFirst Batching = C.PLLM_BATCHING_PREFILL_FIRST
	// BatchingDecodeFirst: each step has every decode and at most Options.PrefillBudget prompt
	// tokens: bounds the time between tokens.
	BatchingDecodeFirst Batching = C.PLLM_BATCHING_DECODE_FIRST
	// BatchingStatic: static batching: no request is admitted until the running batch has finished.
	// For baselines.
	BatchingStatic Batching = C.PLLM_BATCHING_STATIC
)

// String returns the name, such as "prefill_first".
func (b Batching) String() string {
	switch b {
	case BatchingMixed:
		return "mixed"
	case BatchingPrefillFirst:
		return "prefill_first"
	case BatchingDecodeFirst:
		return "decode_first"
	case BatchingStatic:
		return "static"
	}
	return fmt.Sprintf("%d", uint32(b))
}

// Allocation is the number of blocks that a request needs to start.
type Allocation uint32

const (
	// AllocationOnDemand: blocks are allocated as a sequence grows. If the pool is full, the last
	// request in the order is preempted.
	AllocationOnDemand Allocation = C.PLLM_ALLOCATION_ON_DEMAND
	// AllocationMaxTokens: a request starts when the pool has blocks for its Sampling.MaxTokens, so
	// that growing sequences cause no preemption. Forks and appended tokens of running sequences
	// are not included.
	AllocationMaxTokens Allocation = C.PLLM_ALLOCATION_MAX_TOKENS
)

// String returns the name, such as "max_tokens".
func (a Allocation) String() string {
	switch a {
	case AllocationOnDemand:
		return "on_demand"
	case AllocationMaxTokens:
		return "max_tokens"
	}
	return fmt.Sprintf("%d", uint32(a))
}

// Weights is the format of the weights in memory.
type Weights uint32

const (
	// WeightsAsStored: as in the model's files. Infinities and NaNs are kept.
	WeightsAsStored Weights = C.PLLM_WEIGHTS_AS_STORED
	// WeightsF32: 32-bit floating point.
	WeightsF32 Weights = C.PLLM_WEIGHTS_F32
	// WeightsF16: 16-bit floating point.
	WeightsF16 Weights = C.PLLM_WEIGHTS_F16
	// WeightsBF16: bfloat16.
	WeightsBF16 Weights = C.PLLM_WEIGHTS_BF16
	// WeightsInt8: 8-bit integers with a scale for each output. The CPU multiplies them by 8-bit
	// activations, which have a scale for every 128 values of a row. CUDA devices multiply them by
	// activations in bf16.
	WeightsInt8 Weights = C.PLLM_WEIGHTS_INT8
	// WeightsInt4: 4-bit integers with a scale for each group of Options.WeightGroup inputs of an
	// output. The embedding and the head are in 8 bits. Activations are as for WeightsInt8.
	WeightsInt4 Weights = C.PLLM_WEIGHTS_INT4
	// WeightsInt4Asymmetric: as WeightsInt4, with an offset for each group, for 16 more bits a
	// group. With groups of the same size, it is the more precise of the two formats.
	WeightsInt4Asymmetric Weights = C.PLLM_WEIGHTS_INT4_ASYMMETRIC
	// WeightsFP8: CUDA only: 8-bit floating point (OCP E4M3) with a scale for each output. The
	// embedding and the head are as stored. Products of many rows multiply by fp8 activations with
	// a scale for each row, if the device supports it. All other products, those of experts and
	// those with Options.BatchInvariant multiply by bf16 activations.
	WeightsFP8 Weights = C.PLLM_WEIGHTS_FP8
)

// String returns the name, such as "f32".
func (w Weights) String() string {
	switch w {
	case WeightsAsStored:
		return "as_stored"
	case WeightsF32:
		return "f32"
	case WeightsF16:
		return "f16"
	case WeightsBF16:
		return "bf16"
	case WeightsInt8:
		return "int8"
	case WeightsInt4:
		return "int4"
	case WeightsInt4Asymmetric:
		return "int4_asymmetric"
	case WeightsFP8:
		return "fp8"
	}
	return fmt.Sprintf("%d", uint32(w))
}
