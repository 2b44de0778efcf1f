package pagedllm

// #include "glue.h"
import "C"

import (
	"fmt"
	"math"
	"time"
)

// Options are the options of an engine. Only ModelPath is required: the zero value of each other
// field selects the library's default. A number that is negative or too large is
// ErrInvalidArgument.
type Options struct {
	// ModelPath is the model directory in the layout of Hugging Face.
	ModelPath string
	// Device is "cpu" (default), or "cuda:0" for the first CUDA device.
	Device string
	// Weights is the format of the weights in memory. Default WeightsAsStored.
	Weights Weights
	// WeightGroup is the number of inputs that share a scale in 4-bit formats: 32, 64 or 128. 0:
	// 32.
	WeightGroup int
	// PackedPath is a directory for packed weights, from which a later Open reads them as fast as
	// the disk. ModelInfo.Packed has the result. "": weights are packed each time.
	PackedPath string
	// KVBytes is the size of the KV pool in bytes. 0: enough for MaxSeqs sequences of MaxModelLen
	// tokens, at most 1 GiB, or the size of Budget.
	KVBytes int64
	// KVType is the data type of KV blocks. DTypeAuto: F32 for models in f32, else BF16.
	KVType DType
	// BlockSize is the number of tokens per KV block: 8, 16, 32, 64, 128 or 256. 0: 16.
	BlockSize int
	// MaxModelLen is the maximum length of a sequence in tokens, prompt and output together. 0: the
	// model's own maximum, or what the pool holds.
	MaxModelLen int
	// MaxBatchTokens is the maximum number of tokens in one step, prompt and decode tokens of all
	// sequences together. 0: 512.
	MaxBatchTokens int
	// MaxSeqs is the maximum number of running sequences, at most MaxBatchTokens. 0: 64.
	MaxSeqs int
	// PrefillChunk is the maximum number of prompt tokens of one sequence in one step. 0:
	// MaxBatchTokens.
	PrefillChunk int
	// Threads is the number of threads, including the stepping thread. 0: the number of CPUs in
	// CPUs, or of CPUs on which the process may run, within the quota of its container.
	Threads int
	// CPUs is a list of CPUs in the syntax of taskset -c, such as "0-3,8". Each thread of the
	// engine is pinned to one of them, in this order; the first is for the stepping thread. "":
	// threads are not pinned.
	CPUs string
	// ISA is the instruction path. Results have the same bits within a path, not across paths.
	ISA ISA
	// Seed is the seed for requests without a seed of their own.
	Seed uint64
	// SkipTokenizer serves token ids only: no tokenizer is loaded, and text calls return
	// ErrUnsupported.
	SkipTokenizer bool
	// NoPrefixCache disables the prefix cache.
	NoPrefixCache bool
	// BatchInvariant makes the results of a sequence on a CUDA device independent of the batch, as
	// on the CPU. It is slower.
	BatchInvariant bool
	// MemoryFraction is, for CUDA only, the fraction of the device memory that is free after
	// weights and working memory, for the KV pool: 0.01 to 1. It replaces KVBytes. 0: KVBytes is
	// used.
	MemoryFraction float64
	// QueueCapacity is the number of unread outputs at which the requests that write to a queue
	// pause. 0: 65536 for the engine's own queue, and 64 for the queue of each stream.
	QueueCapacity int
	// MaxWaitingRequests is the maximum number of requests, including resumed and forked sequences,
	// that wait for their first step. More are refused with ErrCapacity; one can always wait. 0: no
	// limit.
	MaxWaitingRequests int
	// MaxWaitingTokens is the maximum number of tokens that the waiting requests have to compute.
	// 0: no limit.
	MaxWaitingTokens int
	// MaxPromptBytes is the maximum length in bytes of a text prompt, of a chat's JSON and the
	// prompt it renders to, and of a text to tokenize. 0: 64 for each token of MaxModelLen, at
	// least 1048576.
	MaxPromptBytes int64
	// Budget is the budget from which the KV pool takes its bytes, instead of KVBytes. nil: a budget
	// of the engine's own.
	Budget *Budget
	// SwapBytes is the size in bytes of the host tier, which holds the KV of swapped requests and
	// idle sequences. 0: none.
	SwapBytes int64
	// SwapPath is a directory for the host tier, an unnamed file that disappears with the engine.
	// "": the host tier is in memory.
	SwapPath string
	// Preemption is the treatment of preempted requests. The values except PreemptionRecompute need
	// SwapBytes.
	Preemption Preemption
	// Order is the order of the waiting requests.
	Order Order
	// Ageing is the waiting time after which a request is preferred, in whole milliseconds; see
	// OrderPriority and OrderShortestPredicted. 0: 10 s.
	Ageing time.Duration
	// Batching is the composition of a step.
	Batching Batching
	// PrefillBudget is the number of prompt tokens for BatchingPrefillFirst and
	// BatchingDecodeFirst. 0: 2048 and 256.
	PrefillBudget int
	// Allocation is the number of blocks that a request needs to start.
	Allocation Allocation
	// TracePath is a file for a trace of every step, in the format of Perfetto and
	// chrome://tracing. An existing file is replaced. "": none.
	TracePath string
	// JournalPath is a file for a journal of all inputs of the engine. pagedllm-replay repeats its
	// steps bit for bit. It contains prompts. An existing file is replaced. "": none.
	JournalPath string
	// ModelName is the value of the label model_name in Engine.Metrics. "": the name of the model
	// directory.
	ModelName string
	// HostSteps is true if the host steps the engine with Engine.Step, or starts it later with
	// Engine.Start. By default, Open starts the engine's own thread.
	HostSteps bool
	// Progress, if not nil, reports the bytes of weights that have been read, out of total, from
	// time to time and once at the end. It runs on the goroutine that called Open. To cancel the
	// loading, cancel the context of Open.
	Progress func(done, total int64)
}

// DType is a data type of KV blocks.
type DType uint32

const (
	// DTypeAuto is selected by the library.
	DTypeAuto DType = C.PLLM_DTYPE_AUTO
	// F32 is 32-bit floating point.
	F32 DType = C.PLLM_DTYPE_F32
	// BF16 is bfloat16.
	BF16 DType = C.PLLM_DTYPE_BF16
	// INT8 is 8-bit integers with a scale for each head of each token: about half the bytes of
	// BF16, at a small cost in quality.
	INT8 DType = C.PLLM_DTYPE_INT8
	// F16 is 16-bit floating point. Values beyond 65504 are clamped.
	F16 DType = C.PLLM_DTYPE_F16
	// FP8 is 8-bit floating point (OCP E4M3) with the scales of INT8.
	FP8 DType = C.PLLM_DTYPE_FP8
)

// String returns the name of the type, such as "bf16".
func (d DType) String() string { return nameOf(d, "auto", "f32", "bf16", "int8", "f16", "fp8") }

// Weights is a format of the weights in memory. Fewer bits take less memory and time, and cost
// quality.
type Weights uint32

const (
	// WeightsAsStored is the format of the model's files.
	WeightsAsStored Weights = C.PLLM_WEIGHTS_AS_STORED
	// WeightsF32 is 32-bit floating point.
	WeightsF32 Weights = C.PLLM_WEIGHTS_F32
	// WeightsF16 is 16-bit floating point.
	WeightsF16 Weights = C.PLLM_WEIGHTS_F16
	// WeightsBF16 is bfloat16.
	WeightsBF16 Weights = C.PLLM_WEIGHTS_BF16
	// WeightsInt8 is 8-bit integers with a scale for each output, multiplied by 8-bit activations.
	WeightsInt8 Weights = C.PLLM_WEIGHTS_INT8
	// WeightsInt4 is 4-bit integers with a scale for each group of WeightGroup inputs of an output.
	// The embedding and the head are in 8 bits.
	WeightsInt4 Weights = C.PLLM_WEIGHTS_INT4
	// WeightsInt4Asymmetric is WeightsInt4 with an offset for each group: a little more precise.
	WeightsInt4Asymmetric Weights = C.PLLM_WEIGHTS_INT4_ASYMMETRIC
	// WeightsFP8 is, for CUDA only, 8-bit floating point with a scale for each output. The
	// embedding and the head are as stored.
	WeightsFP8 Weights = C.PLLM_WEIGHTS_FP8
)

// String returns the name of the format, such as "int8".
func (w Weights) String() string {
	return nameOf(w, "as_stored", "f32", "f16", "bf16", "int8", "int4", "int4_asymmetric", "fp8")
}

// PackedForm is the result of Options.PackedPath.
type PackedForm uint32

const (
	// PackedUnused: PackedPath was not set.
	PackedUnused PackedForm = C.PLLM_PACKED_UNUSED
	// PackedRead: the packed weights were read from PackedPath.
	PackedRead PackedForm = C.PLLM_PACKED_READ
	// PackedSaved: the weights were packed from the model's files and written to PackedPath.
	PackedSaved PackedForm = C.PLLM_PACKED_SAVED
	// PackedUnsaved: the weights were packed from the model's files and could not be written to
	// PackedPath.
	PackedUnsaved PackedForm = C.PLLM_PACKED_UNSAVED
)

// String returns the name of the result, such as "read".
func (p PackedForm) String() string { return nameOf(p, "unused", "read", "saved", "unsaved") }

// ISA is an instruction path of the CPU kernels.
type ISA uint32

const (
	// ISAAuto is the widest instruction path of the machine.
	ISAAuto ISA = C.PLLM_ISA_AUTO
	// Portable is for any CPU.
	Portable ISA = C.PLLM_ISA_PORTABLE
	// AVX2 is AVX2, FMA and F16C.
	AVX2 ISA = C.PLLM_ISA_AVX2
	// AVX512 is AVX-512 F, BW, DQ and VL.
	AVX512 ISA = C.PLLM_ISA_AVX512
	// AVX512BF16 is AVX512VNNI with AVX-512 BF16: activations that are multiplied by weights or KV
	// in bf16 are rounded to bf16. ISAAuto selects it if the machine has it.
	AVX512BF16 ISA = C.PLLM_ISA_AVX512_BF16
	// AVXVNNI is AVX2 with AVX-VNNI: products with integer weights are faster, with the same bits.
	AVXVNNI ISA = C.PLLM_ISA_AVX_VNNI
	// AVX512VNNI is AVX512 with AVX-512 VNNI: products with integer weights are faster, with the
	// same bits.
	AVX512VNNI ISA = C.PLLM_ISA_AVX512_VNNI
)

// String returns the name of the path, such as "avx512".
func (i ISA) String() string {
	return nameOf(i, "auto", "portable", "avx2", "avx512", "avx512_bf16", "avx_vnni", "avx512_vnni")
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

// String returns the name of the value, such as "swap".
func (p Preemption) String() string { return nameOf(p, "recompute", "swap", "auto") }

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
	// with a similar MaxTokens. To prevent starvation, a request that has waited for Options.Ageing
	// goes before new requests that are predicted to be up to 100 tokens shorter.
	OrderShortestPredicted Order = C.PLLM_ORDER_SHORTEST_PREDICTED
)

// String returns the name of the order, such as "priority".
func (o Order) String() string { return nameOf(o, "fcfs", "priority", "shortest_predicted") }

// Batching is the composition of a step.
type Batching uint32

const (
	// BatchingMixed: each step mixes prompt chunks and decodes, in the order of the requests.
	BatchingMixed Batching = C.PLLM_BATCHING_MIXED
	// BatchingPrefillFirst: each step has either prompts or decodes, and prompts go first: short
	// times to first token. After Options.PrefillBudget prompt tokens, the decodes get one step.
	BatchingPrefillFirst Batching = C.PLLM_BATCHING_PREFILL_FIRST
	// BatchingDecodeFirst: each step has every decode and at most Options.PrefillBudget prompt
	// tokens: bounds the time between tokens.
	BatchingDecodeFirst Batching = C.PLLM_BATCHING_DECODE_FIRST
	// BatchingStatic: static batching; no request is admitted until the running batch has finished.
	// For baselines.
	BatchingStatic Batching = C.PLLM_BATCHING_STATIC
)

// String returns the name of the value, such as "mixed".
func (b Batching) String() string {
	return nameOf(b, "mixed", "prefill_first", "decode_first", "static")
}

// Allocation is the number of blocks that a request needs to start.
type Allocation uint32

const (
	// AllocationOnDemand: blocks are allocated as a sequence grows. If the pool is full, the last
	// request in the order is preempted.
	AllocationOnDemand Allocation = C.PLLM_ALLOCATION_ON_DEMAND
	// AllocationMaxTokens: a request starts when the pool has blocks for its MaxTokens, so that
	// growing sequences cause no preemption.
	AllocationMaxTokens Allocation = C.PLLM_ALLOCATION_MAX_TOKENS
)

// String returns the name of the value, such as "on_demand".
func (a Allocation) String() string { return nameOf(a, "on_demand", "max_tokens") }

// nameOf returns the name of a value. The values count from 0.
func nameOf[T ~uint32](value T, names ...string) string {
	if int64(value) < int64(len(names)) {
		return names[value]
	}
	return fmt.Sprintf("%d", uint32(value))
}

// A Plan is the memory that an engine would allocate.
type Plan struct {
	WeightBytes int64
	KVBytes     int64
	// WorkBytes is the size of activations, logits and working memory of kernels. Small tables are
	// not included.
	WorkBytes int64
	// Blocks is the number of KV blocks, BlockSize the tokens per block, and BlockBytes the bytes
	// of one block: of all layers, or of the layers of one group.
	Blocks, BlockSize int
	BlockBytes        int64
	// MaxModelLen is the maximum length of a sequence in tokens, prompt and output together.
	// FullSequences sequences of this length fit at the same time.
	MaxModelLen, FullSequences int
	KVType                     DType
	// MaxBlocks is the maximum number of KV blocks, if the budget grows to its maximum.
	MaxBlocks int
	// SwapBytes is the size of the host tier in bytes, and SwapBlocks the number of KV blocks in
	// it.
	SwapBytes  int64
	SwapBlocks int
	// KVGroups is the number of layer groups with KV blocks of their own.
	KVGroups int
}

// Plan computes what Open would allocate, from the headers of the model's files, without allocating
// it.
func (o Options) Plan() (Plan, error) {
	plan := C.pllm_plan{struct_size: C.sizeof_pllm_plan}
	err := o.use(func(options *C.pllm_engine_options) error { return check(C.pllm_engine_plan(options, &plan)) })
	if err != nil {
		return Plan{}, err
	}
	return Plan{
		WeightBytes:   int64(plan.weight_bytes),
		KVBytes:       int64(plan.kv_bytes),
		WorkBytes:     int64(plan.work_bytes),
		Blocks:        int(plan.blocks),
		BlockSize:     int(plan.block_size),
		BlockBytes:    int64(plan.block_bytes),
		MaxModelLen:   int(plan.max_model_len),
		FullSequences: int(plan.full_sequences),
		KVType:        DType(plan.kv_dtype),
		MaxBlocks:     int(plan.max_blocks),
		SwapBytes:     int64(plan.swap_bytes),
		SwapBlocks:    int(plan.swap_blocks),
		KVGroups:      int(plan.kv_groups),
	}, nil
}

// use makes a call with the options as a C struct.
func (o *Options) use(call func(*C.pllm_engine_options) error) error {
	var args arguments
	defer args.Unpin()
	options, err := o.toC(&args)
	if err != nil {
		return err
	}
	if o.Budget == nil {
		return call(options)
	}
	return o.Budget.use(func(budget *C.pllm_budget) error {
		options.budget = budget
		return call(options)
	})
}

func (o *Options) toC(args *arguments) (*C.pllm_engine_options, error) {
	if version := C.pllm_abi_version(); version != C.PLLM_ABI_VERSION {
		return nil, &Error{ErrUnsupported, fmt.Sprintf("the library has ABI version %d (this package: %d); "+
			"build the package with the header of this library", version, C.PLLM_ABI_VERSION)}
	}
	c := new(C.pllm_engine_options)
	C.pllm_engine_options_init(c, C.sizeof_pllm_engine_options)
	c.model_path, c.model_path_len = args.text(o.ModelPath)
	args.setText(&c.device, &c.device_len, o.Device)
	args.setUint64(&c.kv_bytes, "KVBytes", o.KVBytes)
	args.setUint32(&c.block_size, "BlockSize", o.BlockSize)
	args.setUint32(&c.max_model_len, "MaxModelLen", o.MaxModelLen)
	args.setUint32(&c.max_batch_tokens, "MaxBatchTokens", o.MaxBatchTokens)
	args.setUint32(&c.max_seqs, "MaxSeqs", o.MaxSeqs)
	args.setUint32(&c.prefill_chunk, "PrefillChunk", o.PrefillChunk)
	args.setUint32(&c.threads, "Threads", o.Threads)
	args.setUint64(&c.queue_capacity, "QueueCapacity", int64(o.QueueCapacity))
	args.setUint32(&c.weight_group, "WeightGroup", o.WeightGroup)
	c.weight_format = C.uint32_t(o.Weights)
	c.kv_dtype = C.uint32_t(o.KVType)
	c.isa = C.uint32_t(o.ISA)
	c.seed = C.uint64_t(o.Seed)
	if o.SkipTokenizer {
		c.flags |= C.PLLM_ENGINE_SKIP_TOKENIZER
	}
	if o.NoPrefixCache {
		c.flags |= C.PLLM_ENGINE_NO_PREFIX_CACHE
	}
	if o.BatchInvariant {
		c.flags |= C.PLLM_ENGINE_BATCH_INVARIANT
	}
	c.memory_fraction = C.float(o.MemoryFraction)
	o.setPolicies(args, c)
	args.setText(&c.packed_path, &c.packed_path_len, o.PackedPath)
	args.setText(&c.cpus, &c.cpus_len, o.CPUs)
	args.setText(&c.trace_path, &c.trace_path_len, o.TracePath)
	args.setText(&c.journal_path, &c.journal_path_len, o.JournalPath)
	args.setText(&c.model_name, &c.model_name_len, o.ModelName)
	return c, args.err
}

// setPolicies sets the fields of memory limits, preemption and scheduling policies.
func (o *Options) setPolicies(args *arguments, c *C.pllm_engine_options) {
	args.setUint64(&c.max_waiting_requests, "MaxWaitingRequests", int64(o.MaxWaitingRequests))
	args.setUint64(&c.max_waiting_tokens, "MaxWaitingTokens", int64(o.MaxWaitingTokens))
	args.setUint64(&c.max_prompt_bytes, "MaxPromptBytes", o.MaxPromptBytes)
	args.setUint64(&c.swap_bytes, "SwapBytes", o.SwapBytes)
	args.setText(&c.swap_path, &c.swap_path_len, o.SwapPath)
	if ms := args.milliseconds("Ageing", o.Ageing, math.MaxUint32); ms != 0 {
		c.ageing_ms = C.uint32_t(ms)
	}
	args.setUint32(&c.prefill_budget, "PrefillBudget", o.PrefillBudget)
	c.preemption = C.uint32_t(o.Preemption)
	c.order = C.uint32_t(o.Order)
	c.batching = C.uint32_t(o.Batching)
	c.allocation = C.uint32_t(o.Allocation)
}
