package pagedllm

// #include "glue.h"
import "C"

import "fmt"

// Options say how an engine is made. Only ModelPath is needed: every other field's zero value is the library's default. A
// number that is negative or larger than the library can take is ErrInvalidArgument.
type Options struct {
	// ModelPath is a model directory as Hugging Face ships it.
	ModelPath string
	// Device is where to run: "cpu", the default.
	Device string
	// KVBytes is the size of the KV pool. 0: what MaxSeqs sequences of the full length need, at most 1 GiB.
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
	// Threads is how many compute, the stepping one included. 0: one per core.
	Threads int
	// ISA forces an instruction path. Bits are the same within one path, not across paths.
	ISA ISA
	// Seed seeds the requests that bring none of their own.
	Seed uint64
	// SkipTokenizer serves token ids only: no tokenizer is read, and calls with text are ErrUnsupported.
	SkipTokenizer bool
	// NoPrefixCache does not keep what was computed for the requests that come after with the same first tokens.
	NoPrefixCache bool
	// QueueCapacity is how many outputs may wait unread before the requests that write to a queue pause. 0: 65536 in the engine's
	// own queue, and 64 in that of each stream.
	QueueCapacity int
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
)

// String names the type as models do, such as "bf16".
func (d DType) String() string { return nameOf(d, "auto", "f32", "bf16") }

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
)

// String names the path as Info does, such as "avx512".
func (i ISA) String() string { return nameOf(i, "auto", "portable", "avx2", "avx512") }

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
}

// Plan is a dry run of Open: it reads the model's headers and says what would be allocated, without allocating it.
func (o Options) Plan() (Plan, error) {
	var args arguments
	defer args.Unpin()
	options, err := o.toC(&args)
	if err != nil {
		return Plan{}, err
	}
	plan := C.pllm_plan{struct_size: C.sizeof_pllm_plan}
	if err := check(C.pllm_engine_plan(options, &plan)); err != nil {
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
	}, nil
}

func (o *Options) toC(args *arguments) (*C.pllm_engine_options, error) {
	if version := C.pllm_abi_version(); version != C.PLLM_ABI_VERSION {
		return nil, &Error{ErrUnsupported, fmt.Sprintf("the library's ABI version is %d and this package was built for %d: "+
			"build it with the header of the library that it runs with", version, C.PLLM_ABI_VERSION)}
	}
	c := new(C.pllm_engine_options)
	C.pllm_engine_options_init(c, C.sizeof_pllm_engine_options)
	c.model_path, c.model_path_len = args.text(o.ModelPath)
	if o.Device != "" {
		c.device, c.device_len = args.text(o.Device)
	}
	args.setUint64(&c.kv_bytes, "KVBytes", o.KVBytes)
	args.setUint32(&c.block_size, "BlockSize", o.BlockSize)
	args.setUint32(&c.max_model_len, "MaxModelLen", o.MaxModelLen)
	args.setUint32(&c.max_batch_tokens, "MaxBatchTokens", o.MaxBatchTokens)
	args.setUint32(&c.max_seqs, "MaxSeqs", o.MaxSeqs)
	args.setUint32(&c.prefill_chunk, "PrefillChunk", o.PrefillChunk)
	args.setUint32(&c.threads, "Threads", o.Threads)
	args.setUint64(&c.queue_capacity, "QueueCapacity", int64(o.QueueCapacity))
	c.kv_dtype = C.uint32_t(o.KVType)
	c.isa = C.uint32_t(o.ISA)
	c.seed = C.uint64_t(o.Seed)
	if o.SkipTokenizer {
		c.flags |= C.PLLM_ENGINE_SKIP_TOKENIZER
	}
	if o.NoPrefixCache {
		c.flags |= C.PLLM_ENGINE_NO_PREFIX_CACHE
	}
	return c, args.err
}
