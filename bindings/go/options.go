package pagedllm

// #include "glue.h"
import "C"

import (
	"fmt"
	"time"
)

// Options say how an engine is made. Only ModelPath is needed: every other field's zero value is the library's default. A
// number that is negative or larger than the library can take is ErrInvalidArgument.
type Options struct {
	// ModelPath is a model directory as Hugging Face ships it.
	ModelPath string
	// Device is where to run: "cpu", the default, or "cuda:0" for the first CUDA device.
	Device string
	// Weights is how weights are kept. WeightsAsStored: as the model's files have them.
	Weights Weights
	// WeightGroup is the inputs of an output that share a scale in 4 bits: 32, 64 or 128. 0: 32.
	WeightGroup int
	// PackedPath is a directory that keeps weights in their packed form, so that the next Open reads them as fast as the disk.
	// Info.Packed tells what became of it. "": they are packed each time.
	PackedPath string
	// KVBytes is the size of the KV pool. 0: what MaxSeqs sequences of the full length need, at most 1 GiB, or what Arena has.
	KVBytes int64
	// KVType is how K and V are stored. DTypeAuto: F32 for models in f32, else BF16.
	KVType DType
	// BlockSize is the tokens per KV block: 8, 16, 32, 64, 128 or 256. 0: 16.
	BlockSize int
	// MaxModelLen is the longest sequence, prompt and output together. 0: the model's own, or what the pool holds.
	MaxModelLen int
	// MaxBatchTokens is the most rows (prompt and decode tokens of all sequences) in one step. 0: 512.
	MaxBatchTokens int
	// MaxSeqs is the most sequences running at once, at most MaxBatchTokens. 0: 64.
	MaxSeqs int
	// PrefillChunk is the most prompt tokens of one sequence in one step. 0: MaxBatchTokens.
	PrefillChunk int
	// Threads is how many compute, the stepping one included. 0: as many as CPUs names, or one per core.
	Threads int
	// CPUs are those to which the engine's threads are pinned, as taskset -c takes them, such as "0-3,8": the stepping one's first. "":
	// the system places them.
	CPUs string
	// ISA forces an instruction path. Bits are the same within one path, not across paths.
	ISA ISA
	// Seed seeds the requests that bring none of their own.
	Seed uint64
	// SkipTokenizer serves token ids only: no tokenizer is read, and calls with text are ErrUnsupported.
	SkipTokenizer bool
	// NoPrefixCache does not keep what was computed for the requests that come after with the same first tokens.
	NoPrefixCache bool
	// BatchInvariant: a CUDA device gives a sequence the same bits whatever the batch, as the CPU always does. It costs speed.
	BatchInvariant bool
	// MemoryFraction is the part of a CUDA device's memory that the KV pool takes, of what weights and working memory leave: from 0.01 to 1, in
	// place of KVBytes. 0: as KVBytes says.
	MemoryFraction float64
	// QueueCapacity is how many outputs may wait unread before the requests that write to a queue pause. 0: 65536 in the engine's
	// own queue, and 64 in that of each stream.
	QueueCapacity int
	// MaxWaitingRequests is how many requests, and resumed and forked sequences, may wait for their first step before others are
	// refused with ErrCapacity. 0: as many as memory holds. One may always wait.
	MaxWaitingRequests int
	// MaxWaitingTokens is how many tokens those may have to compute. 0: no limit.
	MaxWaitingTokens int
	// MaxPromptBytes is the maximum length in bytes of a text prompt, a chat or a text to tokenize. 0: 64 for each token of the
	// engine's MaxModelLen, at least 1 MiB.
	MaxPromptBytes int64
	// Arena is the budget from which the KV pool takes its bytes, in place of KVBytes. nil: the engine has its own.
	Arena *Arena
	// SwapBytes is the size of the host tier, where requests and kept sequences that have to give way may wait. 0: there is none.
	SwapBytes int64
	// SwapPath is a directory for the host tier's file, which has no name and is gone with the engine. "": it is memory.
	SwapPath string
	// Preemption is what becomes of those who have to give way. All but PreemptionRecompute need SwapBytes.
	Preemption Preemption
	// Order is who comes first.
	Order Order
	// Ageing is for the orders other than first come: who has waited for so long comes before those that come then and stand
	// little before it. In whole milliseconds. 0: 10 s.
	Ageing time.Duration
	// Batching is what a step is made of.
	Batching Batching
	// PrefillBudget is the prompt tokens that BatchingPrefillFirst and BatchingDecodeFirst speak of. 0: 2048 and 256.
	PrefillBudget int
	// Allocation is for how many of its tokens a request needs room before it begins.
	Allocation Allocation
	// TracePath is a file to draw every step into, for Perfetto or chrome://tracing. What was in it is gone. "": none.
	TracePath string
	// JournalPath is a file to write down what is asked of the engine, prompts included, so that pagedllm-replay can run it again
	// bit for bit. What was in it is gone. "": none.
	JournalPath string
	// ModelName is the label model_name in Engine.Metrics. "": the model directory's name.
	ModelName string
	// HostSteps leaves the stepping to the host, which calls Engine.Step, or Engine.Start later on. By default the engine is
	// started by Open and steps itself.
	HostSteps bool
	// Progress, if not nil, is told how many bytes of weights have been read, of how many in all: now and then, and once more
	// at the end. It runs on the goroutine that called Open; cancel Open's context to stop the loading.
	Progress func(done, total int64)
}

// DType is how numbers are stored.
type DType uint32

const (
	// DTypeAuto lets the library choose.
	DTypeAuto DType = C.PLLM_DTYPE_AUTO
	// F32 is IEEE single precision.
	F32 DType = C.PLLM_DTYPE_F32
	// BF16 is the upper half of F32.
	BF16 DType = C.PLLM_DTYPE_BF16
	// INT8, for K and V, is 8 bits a number and a scale for each head of each token: about half the bytes of BF16.
	INT8 DType = C.PLLM_DTYPE_INT8
	// F16 is IEEE half precision; numbers beyond 65504 become 65504, with their sign.
	F16 DType = C.PLLM_DTYPE_F16
	// FP8, for K and V, is as INT8, with numbers of 8 bits in floating point (OCP E4M3).
	FP8 DType = C.PLLM_DTYPE_FP8
)

// String names the type as models do, such as "bf16".
func (d DType) String() string { return nameOf(d, "auto", "f32", "bf16", "int8", "f16", "fp8") }

// Weights is how weights are kept. Fewer bits are faster to read and take less memory, and cost quality.
type Weights uint32

const (
	// WeightsAsStored keeps them as the model's files have them.
	WeightsAsStored Weights = C.PLLM_WEIGHTS_AS_STORED
	// WeightsF32 is IEEE single precision.
	WeightsF32 Weights = C.PLLM_WEIGHTS_F32
	// WeightsF16 is IEEE half precision.
	WeightsF16 Weights = C.PLLM_WEIGHTS_F16
	// WeightsBF16 is the upper half of single precision.
	WeightsBF16 Weights = C.PLLM_WEIGHTS_BF16
	// WeightsInt8 is whole numbers of 8 bits with a scale for each output, multiplied by activations in 8 bits.
	WeightsInt8 Weights = C.PLLM_WEIGHTS_INT8
	// WeightsInt4 is whole numbers of 4 bits with a scale for each group of inputs; embedding and head are in 8.
	WeightsInt4 Weights = C.PLLM_WEIGHTS_INT4
	// WeightsInt4Asymmetric: and each group begins at its least weight.
	WeightsInt4Asymmetric Weights = C.PLLM_WEIGHTS_INT4_ASYMMETRIC
	// WeightsFP8 is floating point of 8 bits with a scale for each output, on CUDA devices; embedding and head are as stored.
	WeightsFP8 Weights = C.PLLM_WEIGHTS_FP8
)

// String names the format, such as "int8".
func (w Weights) String() string {
	return nameOf(w, "as_stored", "f32", "f16", "bf16", "int8", "int4", "int4_asymmetric", "fp8")
}

// PackedForm is what became of Options.PackedPath.
type PackedForm uint32

const (
	// PackedUnused: none was given.
	PackedUnused PackedForm = C.PLLM_PACKED_UNUSED
	// PackedRead: the weights were read in their packed form.
	PackedRead PackedForm = C.PLLM_PACKED_READ
	// PackedSaved: the weights were packed from the model's files, and their packed form was written.
	PackedSaved PackedForm = C.PLLM_PACKED_SAVED
	// PackedUnsaved: the same, and it could not be written.
	PackedUnsaved PackedForm = C.PLLM_PACKED_UNSAVED
)

// String names what became of it, such as "read".
func (p PackedForm) String() string { return nameOf(p, "unused", "read", "saved", "unsaved") }

// ISA is an instruction path of the CPU kernels.
type ISA uint32

const (
	// ISAAuto is the widest that the machine has.
	ISAAuto ISA = C.PLLM_ISA_AUTO
	// Portable runs everywhere.
	Portable ISA = C.PLLM_ISA_PORTABLE
	// AVX2 is for x86 with AVX2, FMA and F16C.
	AVX2 ISA = C.PLLM_ISA_AVX2
	// AVX512 is for x86 with AVX-512 F, BW, DQ and VL.
	AVX512 ISA = C.PLLM_ISA_AVX512
	// AVX512BF16 multiplies what is kept in bf16, weights or K and V, by numbers that are rounded to it. ISAAuto takes it where it is.
	AVX512BF16 ISA = C.PLLM_ISA_AVX512_BF16
	// AVXVNNI is AVX2 with AVX-VNNI: weights in whole numbers are multiplied faster.
	AVXVNNI ISA = C.PLLM_ISA_AVX_VNNI
	// AVX512VNNI is AVX512 with AVX-512 VNNI: the same.
	AVX512VNNI ISA = C.PLLM_ISA_AVX512_VNNI
)

// String names the path as Info does, such as "avx512".
func (i ISA) String() string {
	return nameOf(i, "auto", "portable", "avx2", "avx512", "avx512_bf16", "avx_vnni", "avx512_vnni")
}

// Preemption is what becomes of those who have to give way.
type Preemption uint32

const (
	// PreemptionRecompute: they are computed again.
	PreemptionRecompute Preemption = C.PLLM_PREEMPTION_RECOMPUTE
	// PreemptionSwap: their K and V wait in the host tier, where it has room.
	PreemptionSwap Preemption = C.PLLM_PREEMPTION_SWAP
	// PreemptionAuto: whichever costs less, by what moving and computing have cost so far.
	PreemptionAuto Preemption = C.PLLM_PREEMPTION_AUTO
)

// String names it, such as "swap".
func (p Preemption) String() string { return nameOf(p, "recompute", "swap", "auto") }

// Order is who comes first.
type Order uint32

const (
	// OrderFirstCome: first come, first served.
	OrderFirstCome Order = C.PLLM_ORDER_FIRST_COME
	// OrderPriority: the higher Request.Priority; it may take the place, and the blocks, of what runs. Who has waited for
	// Options.Ageing comes before those one level above that come then, so that nobody waits for ever.
	OrderPriority Order = C.PLLM_ORDER_PRIORITY
	// OrderShortestPredicted: whoever is likely to generate the fewest tokens, judged by those before that were allowed about as
	// many. Who has waited for Options.Ageing comes before those that come then with a hundred tokens less.
	OrderShortestPredicted Order = C.PLLM_ORDER_SHORTEST_PREDICTED
)

// String names the order, such as "priority".
func (o Order) String() string { return nameOf(o, "first_come", "priority", "shortest_predicted") }

// Batching is what a step is made of.
type Batching uint32

const (
	// BatchingMixed: prompts, in chunks, and decodes together, in the order of the requests.
	BatchingMixed Batching = C.PLLM_BATCHING_MIXED
	// BatchingPrefillFirst: prompts alone while there are any, then decodes alone: first tokens come soon. When
	// Options.PrefillBudget prompt tokens have held the decodes up, they get a step in between.
	BatchingPrefillFirst Batching = C.PLLM_BATCHING_PREFILL_FIRST
	// BatchingDecodeFirst: every decode in every step, beside at most Options.PrefillBudget prompt tokens: bounds the time between
	// two tokens.
	BatchingDecodeFirst Batching = C.PLLM_BATCHING_DECODE_FIRST
	// BatchingStatic: nobody joins until all that run have ended. To compare with.
	BatchingStatic Batching = C.PLLM_BATCHING_STATIC
)

// String names it, such as "mixed".
func (b Batching) String() string {
	return nameOf(b, "mixed", "prefill_first", "decode_first", "static")
}

// Allocation is for how many of its tokens a request needs room before it begins.
type Allocation uint32

const (
	// AllocationOnDemand: for those that it has. Where the pool is full later, whoever comes last is preempted.
	AllocationOnDemand Allocation = C.PLLM_ALLOCATION_ON_DEMAND
	// AllocationMaxTokens: for all that it may come to have, so that nobody is preempted because somebody grows.
	AllocationMaxTokens Allocation = C.PLLM_ALLOCATION_MAX_TOKENS
)

// String names it, such as "on_demand".
func (a Allocation) String() string { return nameOf(a, "on_demand", "max_tokens") }

// nameOf names a value that counts from 0.
func nameOf[T ~uint32](value T, names ...string) string {
	if int64(value) < int64(len(names)) {
		return names[value]
	}
	return fmt.Sprintf("%d", uint32(value))
}

// A Plan says where the bytes go.
type Plan struct {
	WeightBytes int64
	KVBytes     int64
	// WorkBytes are activations, logits and the kernels' working memory; small tables are not counted.
	WorkBytes int64
	// Blocks is the number of KV blocks, BlockSize the tokens in each, BlockBytes its size across all layers.
	Blocks, BlockSize int
	BlockBytes        int64
	// MaxModelLen is the longest sequence, prompt and output together; FullSequences of that length fit at once.
	MaxModelLen, FullSequences int
	KVType                     DType
	// MostBlocks there can be, should the arena grow.
	MostBlocks int
	// SwapBytes is the host tier's size, SwapBlocks the KV blocks it holds.
	SwapBytes  int64
	SwapBlocks int
	// KVGroups are groups of layers whose K and V are in blocks of their own.
	KVGroups int
}

// Plan is a dry run of Open: it reads the model's headers and says what would be allocated, without allocating it.
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
		MostBlocks:    int(plan.most_blocks),
		SwapBytes:     int64(plan.swap_bytes),
		SwapBlocks:    int(plan.swap_blocks),
		KVGroups:      int(plan.kv_groups),
	}, nil
}

// use makes a call with the options as C has them.
func (o *Options) use(call func(*C.pllm_engine_options) error) error {
	var args arguments
	defer args.Unpin()
	options, err := o.toC(&args)
	if err != nil {
		return err
	}
	if o.Arena == nil {
		return call(options)
	}
	return o.Arena.use(func(arena *C.pllm_arena) error {
		options.arena = arena
		return call(options)
	})
}

func (o *Options) toC(args *arguments) (*C.pllm_engine_options, error) {
	if version := C.pllm_abi_version(); version != C.PLLM_ABI_VERSION {
		return nil, &Error{ErrUnsupported, fmt.Sprintf("the library's ABI version is %d and this package was built for %d: "+
			"build it with the header of the library that it runs with", version, C.PLLM_ABI_VERSION)}
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

// setPolicies says how memory is shared out, and who comes first.
func (o *Options) setPolicies(args *arguments, c *C.pllm_engine_options) {
	args.setUint64(&c.max_waiting_requests, "MaxWaitingRequests", int64(o.MaxWaitingRequests))
	args.setUint64(&c.max_waiting_tokens, "MaxWaitingTokens", int64(o.MaxWaitingTokens))
	args.setUint64(&c.max_prompt_bytes, "MaxPromptBytes", o.MaxPromptBytes)
	args.setUint64(&c.swap_bytes, "SwapBytes", o.SwapBytes)
	args.setText(&c.swap_path, &c.swap_path_len, o.SwapPath)
	args.setUint32(&c.ageing_ms, "Ageing in milliseconds", int(wholeMilliseconds(o.Ageing)))
	args.setUint32(&c.prefill_budget, "PrefillBudget", o.PrefillBudget)
	c.preemption = C.uint32_t(o.Preemption)
	c.order = C.uint32_t(o.Order)
	c.batching = C.uint32_t(o.Batching)
	c.allocation = C.uint32_t(o.Allocation)
}
