"""libpagedllm for Python: LLM serving inside your own process.

This is one module over ctypes. It needs nothing except the library.

    import pagedllm

    with pagedllm.Engine("models/mine") as engine:
        print(engine.generate("Once upon a time").text)
        sampling = pagedllm.Sampling(temperature=0, max_tokens=100)
        for output in engine.stream("Once upon a time", sampling):
            print(output.text, end="", flush=True)

        async def answer():
            async for output in engine.astream("Once upon a time"):
                print(output.text, end="", flush=True)

These rules apply to everything in this module; pagedllm.h has the others.

Errors. A call that fails raises Error with a code and a message. A call on a closed object raises
Code.CLOSED.

Threads. Any thread and any number of asyncio tasks may call any method of an Engine, Queue or
Budget at any time. Only one thread or task at a time may use an iterator of outputs. Calls release
the GIL.

Sequences. The id of a request is also the id of its first sequence; the other sequences of a
request with n results have the ids after it. A running or kept sequence can be forked, appended to,
rewound, resumed and moved to another engine. Forks share the KV blocks of their common tokens.

Closing. close() may be called at any time, from any thread, more than once. It takes effect at
once: iterators in progress and later calls raise Code.CLOSED. The memory is freed when the last
call in progress has returned. The garbage collector closes objects that are unreachable.

Defaults. The value None selects the library's default.

Processes. In a child of os.fork (multiprocessing's "fork"), every call on an engine of the parent
raises Code.UNSUPPORTED. The parent is not affected.

The library is the first of: the file in the environment variable PAGEDLLM_LIBRARY; libpagedllm.so
next to this module; target/release of the repository, or lib of the installation, that contains
this module; and libpagedllm.so.1, as the system's loader finds it.
"""

import array
import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import enum
import json
import math
import os
import pathlib
import threading
import time
import weakref
from ctypes import byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, field
from typing import (Any, AsyncGenerator, Callable, ContextManager, Dict, Generator, Iterable, List, Mapping, NamedTuple, Optional,
                    Sequence, Tuple, Type, TypeVar, Union)

__all__ = ["Admission", "Allocation", "Batching", "Beam", "Budget", "BudgetInfo", "Code", "Completion", "DType", "Dry",
           "EarlyStopping", "Engine", "Error", "FinishReason", "Grammar", "Isa", "LogitsHook", "Logprob", "ModelInfo", "Order",
           "Output", "OutputKind", "Packed", "Plan", "Preemption", "Queue", "Sampling", "SequenceInfo", "Stats", "Step", "Weights",
           "build_info", "plan", "version"]

# ---- results -------------------------------------------------------------------------------------


class Code(enum.IntEnum):
    """Code of an error: PLLM_E_*."""
    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    IO = 3
    MODEL = 4
    UNSUPPORTED = 5
    CAPACITY = 6
    BUSY = 7
    OUT_OF_MEMORY = 8
    INTERNAL = 9
    CLOSED = 10
    CANCELLED = 11


class Error(Exception):
    """An error of the library: a stable code, and a message with the numbers and the remedy."""

    def __init__(self, code: int, message: str) -> None:
        # An int for a code that only a newer library knows.
        self.code = Code(code) if code in list(Code) else code
        self.message = message
        super().__init__(self.code, message)

    def __str__(self) -> str:
        return self.message


class FinishReason(enum.IntEnum):
    """Why a sequence ended: PLLM_FINISH_*."""
    NONE = 0  # the sequence has not ended
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    DEADLINE = 5  # the deadline passed
    OTHER = -1  # a reason that only a newer library knows

    @classmethod
    def _missing_(cls, value: object) -> "FinishReason":
        return cls.OTHER


class Logprob(NamedTuple):
    """A token and its log probability in the model's own distribution."""
    token: int
    logprob: float


@dataclass(frozen=True)
class Output:
    """An output of one sequence: new tokens, new text, or its end. Text can lag behind the tokens.
    """
    request: int
    text: str
    tokens: List[int]
    logprobs: Optional[List[float]]  # one for each token, with Sampling.logprobs
    finish_reason: FinishReason  # any value but NONE marks the last output
    error: Optional[Error]  # with FinishReason.ERROR, or if the engine was closed
    prompt_tokens: int
    generated_tokens: int  # so far
    user_data: int
    sequence: int
    index: int  # index of the sequence in its request, from 0
    # Sum of the log probabilities of all generated tokens, with Sampling.logprobs or best_of. For a
    # beam: its score after the length penalty. Else 0.
    score: float
    # The most probable tokens at the position of each token, most probable first, with
    # Sampling.top_logprobs.
    top_logprobs: Optional[List[List[Logprob]]]
    # Log probabilities of the prompt tokens except the first, with Sampling.prompt_logprobs. They
    # come before the first generated token, possibly in several outputs.
    prompt_logprobs: Optional[List[float]]
    prompt_top_logprobs: Optional[List[List[Logprob]]]
    # Set in the last output of a sequence. 0 in all others, and if the event did not occur. Not
    # compared, because times differ between runs.
    # Seconds from the call that added, resumed or forked the sequence to its first step.
    queued_seconds: float = field(compare=False)
    first_token_seconds: float = field(compare=False)  # seconds to its first token
    last_token_seconds: float = field(compare=False)  # seconds to its last token
    preemptions: int = field(compare=False)  # number of times it was preempted
    # Number of its first tokens that were found in the prefix cache.
    cached_tokens: int = field(compare=False)


@dataclass(frozen=True)
class Completion:
    """Everything that one sequence generated, until its end, an abort or its deadline."""
    request: int
    text: str
    tokens: List[int]
    logprobs: Optional[List[float]]  # one for each token, with Sampling.logprobs
    finish_reason: FinishReason
    prompt_tokens: int
    sequence: int
    index: int  # index of the sequence in its request, from 0
    score: float  # this and the next fields are as in Output
    top_logprobs: Optional[List[List[Logprob]]]
    prompt_logprobs: Optional[List[float]]
    prompt_top_logprobs: Optional[List[List[Logprob]]]
    queued_seconds: float = field(compare=False)
    first_token_seconds: float = field(compare=False)
    last_token_seconds: float = field(compare=False)
    preemptions: int = field(compare=False)
    cached_tokens: int = field(compare=False)


@dataclass(frozen=True)
class SequenceInfo:
    """A sequence as of the last step and the calls since."""
    request: int  # id of the request that created it
    length: int  # number of its tokens, prompt and output
    index: int  # index of the sequence in its request, from 0
    idle: bool  # True if it waits to be resumed or freed, False if it runs or waits to run.
    # True if it was imported from a machine or an instruction path that does not compute the same
    # bits.
    inexact: bool = False


class Step(NamedTuple):
    """Result of one step."""
    unfinished: int  # requests that have not ended; while it is not 0, step again
    prefill_tokens: int
    decode_tokens: int
    sequences: int  # sequences in the step
    paused: int  # sequences that were skipped: their queue is full, or their grammar is slow


class Stats(NamedTuple):
    """Counters since the creation of the engine, and its state after the last step."""
    waiting: int
    running: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    slot_utilization: float
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    finished_stop: int
    finished_length: int
    finished_abort: int
    finished_error: int
    paused: int
    idle: int  # kept sequences that wait to be resumed or freed
    blocks_copied: int  # blocks copied because a sequence wrote to a shared block
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found in the prefix cache, which were not computed
    finished_deadline: int
    admission_rejections: int  # requests refused because too many wait or their queue is full
    steps_failed: int  # steps that failed and were tried again, in part or as a whole
    preemptions_swapped: int  # preemptions that swapped the request to the host tier
    swapped: int  # sequences whose KV is in the host tier
    swap_blocks_total: int
    swap_blocks_used: int
    blocks_swapped_out: int  # blocks moved to the host tier
    blocks_swapped_in: int  # blocks moved back from the host tier
    swap_failures: int  # moves that failed, as on a full disk; their sequences were recomputed
    prompt_tokens_cached: int  # tokens at the start of sequences found in the prefix cache
    traces_stopped: int  # 1 if the trace has ended because the disk failed
    journals_stopped: int  # 1 if the journal has ended because the disk failed
    # Times that the KV pool shrank and the system did not take the memory back.
    discard_failures: int
    # Blocks that sequences do not hold because of the windows of their layers.
    blocks_out_of_window: int


class Admission(NamedTuple):
    """Predicted admission of a request."""
    admits: bool  # False if too many requests wait or the queue is full
    fits_now: bool  # no request is ahead of it and its blocks are free
    first_token_seconds: Optional[float]  # None: no step has been measured yet
    waiting_requests: int  # requests ahead of it
    waiting_tokens: int  # tokens that those requests have to compute


class BudgetInfo(NamedTuple):
    """The state of a budget."""
    bytes: int
    min_bytes: int  # smallest size to which it can be resized now
    max_bytes: int  # largest size to which it can be resized
    held_bytes: int  # held by the engines; more than bytes while they give blocks back
    engines: int


class Plan(NamedTuple):
    """Memory that an engine would allocate."""
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    full_sequences: int
    kv_dtype: int  # a DType
    max_blocks: int  # maximum number of KV blocks, if the budget grows to its maximum
    swap_bytes: int  # bytes of the host tier, in memory or in its file
    swap_blocks: int  # KV blocks in the host tier
    kv_groups: int  # layer groups with KV blocks of their own


class Packed(enum.IntEnum):
    """Result of packed_path."""
    UNUSED = 0  # packed_path was not set
    READ = 1  # the packed weights were read from packed_path
    SAVED = 2  # the weights were packed from the model's files and written to packed_path
    UNSAVED = 3  # the weights were packed and could not be written to packed_path


class ModelInfo(NamedTuple):
    """The model and the limits of its engine."""
    architecture: str
    isa: str
    eos_token_ids: List[int]
    vocab_size: int
    layers: int
    max_positions: int  # maximum length of a sequence that the model supports
    max_model_len: int  # maximum length of a sequence in this engine
    threads: int
    packed: Packed
    packed_reason: str  # why the packed weights were not read or not written


# ---- options and requests ------------------------------------------------------------------------


class DType(enum.IntEnum):
    """Data type of KV blocks."""
    AUTO = 0
    F32 = 1
    BF16 = 2
    # With a scale for each head of each token: about half the bytes of BF16, at a small cost in
    # quality.
    INT8 = 3
    F16 = 4  # values beyond 65504 are clamped
    FP8 = 5  # 8-bit floating point (OCP E4M3) with the scales of INT8


class Isa(enum.IntEnum):
    """Instruction path. Results have the same bits within a path, not across paths."""
    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    # Activations that are multiplied by weights or KV in bf16 are rounded to bf16. AUTO selects it
    # if the machine has it.
    AVX512_BF16 = 4
    # AVX2 or AVX512 with VNNI: products with integer weights are faster, with the same bits.
    AVX_VNNI = 5
    AVX512_VNNI = 6


class Weights(enum.IntEnum):
    """Format of the weights in memory. Fewer bits take less memory and time, and cost quality."""
    AS_STORED = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    INT8 = 4  # with a scale for each output; multiplied by 8-bit activations
    INT4 = 5  # With a scale for each group of inputs. The embedding and the head are in 8 bits.
    INT4_ASYMMETRIC = 6  # INT4 with an offset for each group
    FP8 = 7  # CUDA only: with a scale for each output. The embedding and the head are as stored.


class Preemption(enum.IntEnum):
    """Treatment of preempted requests."""
    RECOMPUTE = 0  # they lose their KV blocks and are recomputed when they are rescheduled
    SWAP = 1  # they are swapped to host memory; if it is full, they are recomputed
    AUTO = 2  # swap or recompute, whichever costs less by the measured times


class Order(enum.IntEnum):
    """Order of the waiting requests."""
    FCFS = 0  # first come, first served
    # Highest priority first. A request that has waited for ageing_ms goes before new requests of
    # the next higher priority.
    PRIORITY = 1
    # Shortest predicted output first, by recent requests with a similar max_tokens. A request that
    # has waited for ageing_ms goes before new requests that are predicted to be up to 100 tokens
    # shorter.
    SHORTEST_PREDICTED = 2


class Batching(enum.IntEnum):
    """Composition of a step."""
    MIXED = 0  # prompt chunks and decodes, in the order of the requests
    # Either prompts or decodes, and prompts go first. After prefill_budget prompt tokens, the
    # decodes get one step.
    PREFILL_FIRST = 1
    DECODE_FIRST = 2  # every decode and at most prefill_budget prompt tokens
    STATIC = 3  # No request is admitted until the running batch has finished. For baselines.


class Allocation(enum.IntEnum):
    """Number of blocks that a request needs to start."""
    # Blocks are allocated as a sequence grows. If the pool is full, the last request in the order
    # is preempted.
    ON_DEMAND = 0
    # A request starts when the pool has blocks for its max_tokens, so that growing sequences cause
    # no preemption.
    MAX_TOKENS = 1


class OutputKind(enum.IntEnum):
    """Content of each output."""
    DELTA = 0  # the new tokens and text
    CUMULATIVE = 1  # everything so far
    FINAL = 2  # one output at the end has everything


class EarlyStopping(enum.IntEnum):
    """When a beam search ends."""
    # When the best running beam, if it ended now, would not score higher than the worst finished
    # beam.
    NO = 0
    YES = 1  # as soon as Beam.width beams are finished
    NEVER = 2  # when no running beam can reach a higher score than the worst finished beam


Text = Union[str, bytes]  # bytes are UTF-8
Path = Union[str, bytes, "os.PathLike[Any]"]
Prompt = Union[Text, Sequence[int]]  # text or token ids
Bytes = Union[bytes, bytearray, memoryview]

# Edits the logits of each token before all other sampling parameters: hook(sequence, tokens,
# logits). tokens is a memoryview of the sequence's token ids. logits is a writable memoryview of
# floats, one for each token of the vocabulary; numpy.frombuffer(logits, "f") does not copy it. Both
# are valid only during the call.
#
# The hook runs on the stepping thread and takes the GIL: its time adds to the step of all
# sequences. An exception goes to sys.unraisablehook, and the logits stay as the hook left them. The
# engine keeps the function until it is freed: use one function for many requests. It may call any
# function except step, stop and calls that wait for outputs.
LogitsHook = Callable[[int, memoryview, memoryview], Any]


@dataclass(frozen=True)
class Grammar:
    """A constraint on the output. The methods below create it."""
    kind: int  # PLLM_GRAMMAR_*
    text: Optional[Text] = None
    choices: Sequence[Text] = ()

    @classmethod
    def json_schema(cls, schema: Union[Text, Mapping[str, Any], bool]) -> "Grammar":
        """Allow the JSON texts that the schema describes."""
        return cls(1, schema if isinstance(schema, (str, bytes)) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Allow any JSON object."""
        return cls(2)

    @classmethod
    def regex(cls, expression: Text) -> "Grammar":
        """Allow the texts that the regular expression matches as a whole."""
        return cls(3, expression)

    @classmethod
    def choice(cls, choices: Sequence[Text]) -> "Grammar":
        """Allow one of these texts."""
        return cls(4, choices=choices)

    @classmethod
    def lark(cls, grammar: Text) -> "Grammar":
        """Allow the texts that the Lark grammar describes."""
        return cls(5, grammar)


@dataclass(frozen=True)
class Dry:
    """The DRY penalty for repetitions.

    A token that would extend a repetition of length tokens loses multiplier * base ** (length -
    allowed_length).
    """
    multiplier: Optional[float] = None
    base: Optional[float] = None
    allowed_length: Optional[int] = None  # length of the longest repetition without a penalty
    penalty_last_n: Optional[int] = None  # number of last tokens that are searched; 0: all
    # Texts that end a repetition. None: the library's default. Empty: none.
    sequence_breakers: Optional[Sequence[Text]] = None


@dataclass(frozen=True)
class Beam:
    """Parameters of a beam search, as in generate of Hugging Face transformers."""
    width: Optional[int] = None  # number of beams
    groups: Optional[int] = None  # number of groups of beams, each with its own search
    # Subtracted from the log probability of a token for each beam of an earlier group that chose it
    # in the same step.
    diversity_penalty: Optional[float] = None
    # The score of a beam is the sum of its log probabilities divided by its length to this power.
    length_penalty: Optional[float] = None
    early_stopping: Optional[EarlyStopping] = None


@dataclass(frozen=True)
class Sampling:
    """How a request samples its tokens, what it reports and when it ends. None: the default."""
    temperature: Optional[float] = None  # 0 selects greedy sampling
    # Keeps the most probable tokens whose probabilities sum to at least this value.
    top_p: Optional[float] = None
    # Keeps tokens whose probability is at least this fraction of the largest.
    min_p: Optional[float] = None
    top_k: Optional[int] = None  # keeps the k most probable tokens
    max_tokens: Optional[int] = None
    # Number of tokens before which neither end-of-sequence tokens nor stops end the sequence.
    min_tokens: Optional[int] = None
    seed: Optional[int] = None  # with a seed, the tokens are the same in any batch
    # Strings that end the sequence, within a token or across tokens. They do not appear in the
    # text.
    stop: Union[Text, Sequence[Text]] = ()
    # Tokens that end the sequence. They are reported in tokens, but not in the text.
    stop_token_ids: Sequence[int] = ()
    # Keeps the stop string, or the text of the token that ends the sequence, in the text.
    include_stop: Optional[bool] = None
    ignore_eos: Optional[bool] = None  # does not stop at end-of-sequence tokens
    logprobs: Optional[bool] = None  # reports the log probability of each generated token
    top_logprobs: Optional[int] = None  # and of this number of most probable tokens
    prompt_logprobs: Optional[bool] = None  # reports that of each prompt token except the first
    prompt_top_logprobs: Optional[int] = None
    echo: Optional[bool] = None  # the output begins with the prompt
    output_kind: Optional[OutputKind] = None  # content of each output
    grammar: Optional[Grammar] = None  # constraint on the output
    # Keeps the tokens with the most typical surprise whose probabilities sum to at least this
    # value.
    typical_p: Optional[float] = None
    # Keeps tokens whose logit is within this many standard deviations of the largest.
    top_n_sigma: Optional[float] = None
    # Probability with which XTC removes the most probable tokens.
    xtc_probability: Optional[float] = None
    # Probability from which on a token counts as a top choice for XTC.
    xtc_threshold: Optional[float] = None
    mirostat_tau: Optional[float] = None  # Mirostat 2: target surprise in bits per token
    mirostat_eta: Optional[float] = None  # Mirostat 2: learning rate
    # Subtracted from the logit of each token that has been generated.
    presence_penalty: Optional[float] = None
    # Subtracted from the logit of a token for each time it has been generated.
    frequency_penalty: Optional[float] = None
    # Divides positive logits, and multiplies negative logits, of all tokens of the prompt and the
    # output.
    repetition_penalty: Optional[float] = None
    no_repeat_ngram_size: Optional[int] = None  # no n-gram of this size occurs twice
    dry: Optional[Dry] = None
    logit_bias: Optional[Mapping[int, float]] = None  # added to the logits of these tokens
    bad_words: Sequence[Text] = ()  # texts that the output must not contain
    bad_words_ids: Sequence[Sequence[int]] = ()  # token sequences that it must not contain
    allowed_token_ids: Sequence[int] = ()  # the only tokens that may be sampled; empty: all


# ---- library -------------------------------------------------------------------------------------

_ABI_VERSION = 1
_QUEUE_CAPACITY = 64  # PLLM_QUEUE_CAPACITY
_ENGINE_SKIP_TOKENIZER, _ENGINE_NO_PREFIX_CACHE, _ENGINE_BATCH_INVARIANT = 1, 2, 4
_SAMPLING_SEED, _SAMPLING_IGNORE_EOS, _SAMPLING_LOGPROBS, _SAMPLING_PROMPT_LOGPROBS = 1, 2, 4, 8
_SAMPLING_ECHO, _SAMPLING_INCLUDE_STOP = 16, 32
_TEXT_ADD_SPECIAL, _TEXT_SKIP_SPECIAL = 1, 2
_REQUEST_KEEP, _RESUME_USER_DATA, _RESUME_CONTINUE = 1, 2, 4
_FORK_SEED, _FORK_IDLE, _FORK_USER_DATA = 1, 2, 4

_Progress = ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64)
_LogitsHook = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_void_p, c_uint64, c_void_p, c_uint64)
_TokenIds = ctypes.POINTER(c_uint32)
_Texts, _Lengths = ctypes.POINTER(c_char_p), ctypes.POINTER(c_uint64)


def _struct(name: str, **fields: Any) -> Type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", c_uint64), *fields.items()]})


# The structs of pagedllm.h, field by field.
_Options = _struct(
    "_Options", model_path=c_char_p, model_path_len=c_uint64, device=c_char_p, device_len=c_uint64, kv_bytes=c_uint64,
    seed=c_uint64, block_size=c_uint32, kv_dtype=c_uint32, max_model_len=c_uint32, max_batch_tokens=c_uint32, max_seqs=c_uint32,
    prefill_chunk=c_uint32, threads=c_uint32, isa=c_uint32, flags=c_uint32, reserved=c_uint32, queue_capacity=c_uint64,
    progress=_Progress, progress_data=c_void_p, max_waiting_requests=c_uint64, max_waiting_tokens=c_uint64, budget=c_void_p,
    swap_bytes=c_uint64, swap_path=c_char_p, swap_path_len=c_uint64, preemption=c_uint32, order=c_uint32, ageing_ms=c_uint32,
    batching=c_uint32, prefill_budget=c_uint32, allocation=c_uint32, trace_path=c_char_p, trace_path_len=c_uint64,
    journal_path=c_char_p, journal_path_len=c_uint64, model_name=c_char_p, model_name_len=c_uint64, weight_format=c_uint32,
    weight_group=c_uint32, packed_path=c_char_p, packed_path_len=c_uint64,
    cpus=c_char_p, cpus_len=c_uint64, memory_fraction=c_float, reserved2=c_uint32,
    max_prompt_bytes=c_uint64)
_Dry = _struct(
    "_Dry", multiplier=c_float, base=c_float, allowed_length=c_uint32, penalty_last_n=c_uint32, sequence_breakers=_Texts,
    sequence_breaker_lens=_Lengths, sequence_breaker_count=c_uint64)
_Beam = _struct(
    "_Beam", width=c_uint32, groups=c_uint32, diversity_penalty=c_float, length_penalty=c_float, early_stopping=c_uint32,
    reserved=c_uint32)


class _LogitBias(ctypes.Structure):
    _fields_ = [("token", c_uint32), ("bias", c_float)]


class _Logprob(ctypes.Structure):
    _fields_ = [("token", c_uint32), ("logprob", c_float)]


class _TokenList(ctypes.Structure):
    _fields_ = [("tokens", _TokenIds), ("tokens_len", c_uint64)]


_Sampling = _struct(
    "_Sampling", seed=c_uint64, stop_token_ids=_TokenIds, stop_token_ids_len=c_uint64, stop=_Texts, stop_lens=_Lengths,
    stop_count=c_uint64, temperature=c_float, top_p=c_float, min_p=c_float, top_k=c_uint32, max_tokens=c_uint32,
    min_tokens=c_uint32, flags=c_uint32, reserved=c_uint32, typical_p=c_float, top_n_sigma=c_float, xtc_probability=c_float,
    xtc_threshold=c_float, mirostat_tau=c_float, mirostat_eta=c_float, presence_penalty=c_float, frequency_penalty=c_float,
    repetition_penalty=c_float, no_repeat_ngram_size=c_uint32, top_logprobs=c_uint32, prompt_top_logprobs=c_uint32,
    output_kind=c_uint32, grammar_kind=c_uint32, grammar=c_char_p, grammar_len=c_uint64, choices=_Texts, choice_lens=_Lengths,
    choice_count=c_uint64, dry=ctypes.POINTER(_Dry), logit_bias=ctypes.POINTER(_LogitBias), logit_bias_len=c_uint64,
    bad_words=_Texts, bad_word_lens=_Lengths, bad_word_count=c_uint64, bad_words_ids=ctypes.POINTER(_TokenList),
    bad_words_ids_len=c_uint64, allowed_token_ids=_TokenIds, allowed_token_ids_len=c_uint64)
_Request = _struct(
    "_Request", prompt=c_char_p, prompt_len=c_uint64, prompt_token_ids=_TokenIds, prompt_token_ids_len=c_uint64,
    sampling=ctypes.POINTER(_Sampling), user_data=c_uint64, n=c_uint32, text_flags=c_uint32, queue=c_void_p, best_of=c_uint32,
    truncate_prompt_tokens=c_uint32, flags=c_uint32, reserved=c_uint32, beam=ctypes.POINTER(_Beam), cache_salt=c_char_p,
    cache_salt_len=c_uint64, logits_hook=_LogitsHook, hook_data=c_void_p, deadline_ms=c_int64, priority=c_int32, reserved2=c_uint32)
_Output = _struct(
    "_Output", request=c_uint64, sequence=c_uint64, user_data=c_uint64, tokens=c_void_p, tokens_len=c_uint64, logprobs=c_void_p,
    text=c_void_p, text_len=c_uint64, error=c_void_p, error_len=c_uint64, prompt_tokens=c_uint64, generated_tokens=c_uint64,
    index=c_uint32, finish_reason=c_uint32, error_code=c_int32, reserved=c_uint32, score=c_double, top_logprobs=c_void_p,
    top_logprobs_len=c_uint64, prompt_logprobs=c_void_p, prompt_logprobs_len=c_uint64, prompt_top_logprobs=c_void_p,
    prompt_top_logprobs_len=c_uint64, sequence_state=c_void_p, sequence_state_len=c_uint64, queued_seconds=c_double, first_token_seconds=c_double,
    last_token_seconds=c_double, preemptions=c_uint64, cached_tokens=c_uint64)
_Fork = _struct(
    "_Fork", at=c_uint64, seed=c_uint64, user_data=c_uint64, queue=c_void_p, n=c_uint32, flags=c_uint32)
_Resume = _struct(
    "_Resume", sampling=ctypes.POINTER(_Sampling), queue=c_void_p, user_data=c_uint64, flags=c_uint32, text_flags=c_uint32,
    logits_hook=_LogitsHook, hook_data=c_void_p, deadline_ms=c_int64)
_Pin = _struct(
    "_Pin", prompt=c_char_p, prompt_len=c_uint64, prompt_token_ids=_TokenIds, prompt_token_ids_len=c_uint64, cache_salt=c_char_p,
    cache_salt_len=c_uint64, time_to_live_ms=c_uint64, priority=c_uint32, text_flags=c_uint32)
_SequenceInfo = _struct("_SequenceInfo", request=c_uint64, len=c_uint64, index=c_uint32, idle=c_uint32, inexact=c_uint64)
_Info = _struct(
    "_Info", architecture=c_void_p, architecture_len=c_uint64, isa=c_void_p, isa_len=c_uint64, eos_token_ids=c_void_p,
    eos_token_ids_len=c_uint64, vocab_size=c_uint64, layers=c_uint64, max_positions=c_uint64, max_model_len=c_uint64,
    threads=c_uint64, packed=c_uint64, packed_reason=c_void_p, packed_reason_len=c_uint64)
_DOUBLES = ("slot_utilization", "first_token_seconds")
_Step, _Stats, _Plan, _Admission, _BudgetInfo = (
    _struct("_" + record.__name__, **{name: c_double if name in _DOUBLES else c_uint64 for name in record._fields})
    for record in (Step, Stats, Plan, Admission, BudgetInfo))


def _load() -> ctypes.CDLL:
    here = pathlib.Path(__file__).resolve().parent
    named = os.environ.get("PAGEDLLM_LIBRARY")
    root = here.parents[1]
    files = (here / "libpagedllm.so", root / "target" / "release" / "libpagedllm.so", root.parent / "lib" / "libpagedllm.so.1")
    path = named or next((str(file) for file in files if file.exists()), "libpagedllm.so.1")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"{error}; set PAGEDLLM_LIBRARY to the path of the library") from error
    if lib.pllm_abi_version() != _ABI_VERSION:
        raise ImportError(f"{path} has ABI version {lib.pllm_abi_version()} (this module: {_ABI_VERSION}); "
                          "use the module and the library of one release")
    return _declare(lib)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    def functions(result: Any, arguments: Sequence[Any], *names: str) -> None:
        for name in names:
            function = getattr(lib, "pllm_" + name)
            function.restype, function.argtypes = result, arguments

    def fallible(arguments: Sequence[Any], *names: str) -> None:
        functions(c_void_p, arguments, *names)
        for name in names:
            getattr(lib, "pllm_" + name).errcheck = _check

    pointer, size = c_void_p, c_uint64
    functions(c_char_p, [], "version", "build_info")
    functions(c_int32, [pointer], "error_code")
    functions(c_char_p, [pointer], "error_message")
    functions(None, [pointer, size], "engine_options_init", "sampling_init", "request_init", "dry_init", "beam_init", "fork_init",
              "resume_init", "pin_init")
    functions(None, [pointer], "engine_free", "queue_free", "outputs_free", "tokens_free", "bytes_free", "error_free", "budget_free")
    functions(pointer, [pointer], "engine_queue", "engine_budget", "tokens_data", "bytes_data")
    functions(size, [pointer], "outputs_len", "tokens_len", "bytes_len")
    functions(pointer, [pointer, size], "outputs_get")
    fallible([pointer], "engine_start", "engine_stop")
    fallible([pointer, pointer], "engine_plan", "engine_create", "engine_get_model_info", "engine_step", "engine_get_stats", "engine_get_metrics",
             "queue_get_event_fd", "budget_get_info")
    fallible([pointer, size], "engine_abort", "sequence_free", "prefix_unpin", "budget_resize")
    fallible([size, size, pointer], "budget_create")
    fallible([pointer, size, size], "sequence_rewind")
    fallible([pointer, size, pointer], "sequence_export", "sequence_resume", "sequence_get_info")
    fallible([pointer, size, pointer, pointer], "sequence_fork")
    fallible([pointer, size, _TokenIds, size], "sequence_append")
    fallible([pointer, c_char_p, size, pointer, pointer], "sequence_import")
    fallible([pointer, pointer, pointer], "engine_add_request", "engine_predict_admission", "prefix_pin")
    fallible([pointer, size, pointer], "queue_create")
    fallible([pointer, c_int64, pointer], "queue_poll")
    fallible([pointer, c_char_p, size, pointer], "engine_render_chat")
    fallible([pointer, c_char_p, size, c_uint32, pointer], "engine_tokenize")
    fallible([pointer, _TokenIds, size, c_uint32, pointer], "engine_detokenize")
    return lib


def _check(error: Optional[int], _function: Any, _arguments: Any) -> None:
    if error:
        try:
            raise Error(_lib.pllm_error_code(error), _lib.pllm_error_message(error).decode())
        finally:
            _lib.pllm_error_free(error)


_lib = _load()


def version() -> str:
    """Return the version of the loaded library, such as "0.3.0"."""
    return _lib.pllm_version().decode()


def build_info() -> Dict[str, Any]:
    """Return a description of this build and machine, as pllm_build_info does."""
    return json.loads(_lib.pllm_build_info())


# ---- conversions between C and Python ------------------------------------------------------------


def _assign(struct: ctypes.Structure, **values: Any) -> None:
    """Set the fields that are not None. Without the check, ctypes would truncate integers."""
    for name, value in values.items():
        if value is None:
            continue
        if not hasattr(struct, name):
            raise TypeError(f"unknown option {name!r}")
        setattr(struct, name, value)
        if isinstance(value, int) and getattr(struct, name) != value:
            raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}; {_range(struct, name)}")


def _assign_text(struct: ctypes.Structure, name: str, utf8: bytes) -> None:
    _assign(struct, **{name: utf8, name + "_len": len(utf8)})


def _assign_texts(struct: ctypes.Structure, name: str, singular: str, texts: Optional[Sequence[Text]]) -> None:
    if texts is not None:
        utf8 = [_utf8(text) for text in texts]
        _assign(struct, **{name: (c_char_p * len(utf8))(*utf8), singular + "_lens": (c_uint64 * len(utf8))(*map(len, utf8)),
                           singular + "_count": len(utf8)})


def _assign_tokens(struct: ctypes.Structure, name: str, tokens: Sequence[int]) -> None:
    _assign(struct, **{name: _token_ids(name, tokens), name + "_len": len(tokens)})


def _assign_prompt(struct: ctypes.Structure, prompt: Prompt) -> None:
    if isinstance(prompt, (str, bytes)):
        _assign_text(struct, "prompt", _utf8(prompt))
    else:
        _assign_tokens(struct, "prompt_token_ids", prompt)


def _defaults(kind: Type[ctypes.Structure], init: Callable[..., None], **values: Any) -> Any:
    """Return a struct with the library's defaults, except the values that are not None."""
    struct = kind()
    init(byref(struct), sizeof(struct))
    _assign(struct, **values)
    return struct


def _range(struct: ctypes.Structure, name: str) -> str:
    """Describe the values of a field."""
    kind = dict(struct._fields_)[name]
    if kind in (c_float, c_double):
        return "it must be a float"
    bits = 8 * sizeof(kind)
    signed = kind(-1).value < 0
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return f"must be {low} to {high}"


def _refuse_continuation(how: Mapping[str, Any]) -> None:
    if how.get("continue_generation"):
        raise TypeError("continue_generation needs stream_resumed() or astream_resumed()")


def _u64(name: str, value: int) -> int:
    if c_uint64(value).value != value:
        raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}; must be 0 to {2**64 - 1}")
    return value


def _deadline_ms(seconds: Optional[float]) -> Optional[int]:
    if seconds is None:
        return None
    if not 0 < seconds < 2**63 / 1000:  # in C, 0 means no deadline
        raise Error(Code.INVALID_ARGUMENT, f"deadline is {seconds}; pass the remaining seconds, or None for no deadline")
    return math.ceil(seconds * 1000)


def _flag(flags: int, flag: int, on: Optional[bool]) -> int:
    """Return `flags` with `flag` set or cleared. None leaves it unchanged."""
    return flags if on is None else flags | flag if on else flags & ~flag


def _utf8(text: Text) -> bytes:
    """Encode text as UTF-8. Surrogates are passed through: the library reports the error."""
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def _token_ids(name: str, tokens: Iterable[int]) -> Any:
    try:
        ids = array.array("I", tokens)
    except OverflowError as error:
        raise Error(Code.INVALID_ARGUMENT, f"a token id of {name} does not fit into 32 bits ({error}); "
                    f"must be 0 to {2**32 - 1}") from None
    return (c_uint32 * len(ids)).from_buffer(ids)


def _text(address: Optional[int], length: int) -> str:
    return ctypes.string_at(address, length).decode() if address else ""


def _numbers(kind: Any, address: Optional[int], length: int) -> List[Any]:
    return (kind * length).from_address(address)[:] if address else []


_Record = TypeVar("_Record", Step, Stats, Plan, BudgetInfo)


def _filled(kind: Type[ctypes.Structure], fill: Callable[..., None], argument: Any) -> Any:
    struct = kind(sizeof(kind))
    fill(argument, byref(struct))
    return struct


def _record(kind: Type[_Record], struct: ctypes.Structure) -> _Record:
    return kind(*(getattr(struct, name) for name in kind._fields))


def _c_options(model_path: Path, *, device: Optional[str] = None, swap_path: Optional[Path] = None,
               trace_path: Optional[Path] = None, journal_path: Optional[Path] = None, packed_path: Optional[Path] = None,
               model_name: Optional[str] = None, cpus: Optional[str] = None,
               skip_tokenizer: Optional[bool] = None, prefix_cache: Optional[bool] = None,
               batch_invariant: Optional[bool] = None, **numbers: Optional[float]) -> Any:
    options = _defaults(_Options, _lib.pllm_engine_options_init, **numbers)
    paths = {"model_path": model_path, "swap_path": swap_path, "trace_path": trace_path, "journal_path": journal_path,
             "packed_path": packed_path}
    for name, path in paths.items():
        if path is not None:
            _assign_text(options, name, os.fsencode(path))
    for name, text in {"device": device, "model_name": model_name, "cpus": cpus}.items():
        if text is not None:
            _assign_text(options, name, _utf8(text))
    flags = _flag(options.flags, _ENGINE_SKIP_TOKENIZER, skip_tokenizer)
    flags = _flag(flags, _ENGINE_NO_PREFIX_CACHE, None if prefix_cache is None else not prefix_cache)
    options.flags = _flag(flags, _ENGINE_BATCH_INVARIANT, batch_invariant)
    return options


# Fields of Sampling that are the same in C.
_SAMPLING_NUMBERS = (
    "temperature", "top_p", "min_p", "top_k", "max_tokens", "min_tokens", "seed", "top_logprobs", "prompt_top_logprobs",
    "output_kind", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "mirostat_tau", "mirostat_eta",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size")


def _c_sampling(sampling: Sampling) -> Any:
    c = _defaults(_Sampling, _lib.pllm_sampling_init, **{name: getattr(sampling, name) for name in _SAMPLING_NUMBERS})
    for flag, setting, number in (
            (_SAMPLING_SEED, None, sampling.seed), (_SAMPLING_LOGPROBS, sampling.logprobs, sampling.top_logprobs),
            (_SAMPLING_PROMPT_LOGPROBS, sampling.prompt_logprobs, sampling.prompt_top_logprobs),
            (_SAMPLING_IGNORE_EOS, sampling.ignore_eos, None), (_SAMPLING_ECHO, sampling.echo, None),
            (_SAMPLING_INCLUDE_STOP, sampling.include_stop, None)):
        given = None if number is None else True  # a number implies its flag
        c.flags = _flag(c.flags, flag, given if setting is None else setting)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if getattr(sampling, name):
            _assign_tokens(c, name, getattr(sampling, name))
    _assign_texts(c, "stop", "stop", [sampling.stop] if isinstance(sampling.stop, (str, bytes)) else sampling.stop)
    _assign_texts(c, "bad_words", "bad_word", sampling.bad_words)
    if sampling.bad_words_ids:
        lists = [_token_ids("bad_words_ids", tokens) for tokens in sampling.bad_words_ids]
        c.bad_words_ids = (_TokenList * len(lists))(*(_TokenList(tokens, len(tokens)) for tokens in lists))
        c.bad_words_ids_len = len(lists)
    if sampling.logit_bias:
        c.logit_bias, c.logit_bias_len = (_LogitBias * len(sampling.logit_bias))(), len(sampling.logit_bias)
        for i, (token, bias) in enumerate(sampling.logit_bias.items()):
            if c_uint32(token).value != token:
                raise Error(Code.INVALID_ARGUMENT, f"a token id of logit_bias is {token}; must be 0 to {2**32 - 1}")
            _assign(c.logit_bias[i], token=token, bias=bias)
    if sampling.dry is not None:
        dry = _defaults(_Dry, _lib.pllm_dry_init, multiplier=sampling.dry.multiplier, base=sampling.dry.base,
                        allowed_length=sampling.dry.allowed_length, penalty_last_n=sampling.dry.penalty_last_n)
        _assign_texts(dry, "sequence_breakers", "sequence_breaker", sampling.dry.sequence_breakers)
        c.dry = ctypes.pointer(dry)
    if sampling.grammar is not None:
        _assign(c, grammar_kind=sampling.grammar.kind)
        if sampling.grammar.text is not None:
            _assign_text(c, "grammar", _utf8(sampling.grammar.text))
        _assign_texts(c, "choices", "choice", sampling.grammar.choices)
    return c


def _c_request(prompt: Prompt, sampling: Optional[Sampling], *, beam: Optional[Beam] = None, cache_salt: Optional[Text] = None,
               keep: Optional[bool] = None, deadline: Optional[float] = None, add_special: Optional[bool] = None,
               skip_special: Optional[bool] = None, **numbers: Any) -> Any:
    c = _defaults(_Request, _lib.pllm_request_init, deadline_ms=_deadline_ms(deadline), **numbers)
    _assign_prompt(c, prompt)
    if sampling is not None:
        c.sampling = ctypes.pointer(_c_sampling(sampling))
    if beam is not None:
        c.beam = ctypes.pointer(_defaults(
            _Beam, _lib.pllm_beam_init, width=beam.width, groups=beam.groups, diversity_penalty=beam.diversity_penalty,
            length_penalty=beam.length_penalty, early_stopping=beam.early_stopping))
    if cache_salt is not None:
        _assign_text(c, "cache_salt", _utf8(cache_salt))
    c.flags = _flag(c.flags, _REQUEST_KEEP, keep)
    c.text_flags = _flag(_flag(c.text_flags, _TEXT_ADD_SPECIAL, add_special), _TEXT_SKIP_SPECIAL, skip_special)
    return c


def _logprobs(address: Optional[int], length: int, tokens: int) -> Optional[List[List[Logprob]]]:
    """Return the alternatives, the same number for each of the tokens."""
    if not address:
        return None
    flat = [Logprob(one.token, one.logprob) for one in (_Logprob * length).from_address(address)]
    each = length // tokens
    return [flat[i:i + each] for i in range(0, length, each)]


def _c_output(address: int) -> Any:
    c = _Output()
    # The struct of an older library is shorter.
    ctypes.memmove(byref(c), address, min(c_uint64.from_address(address).value, sizeof(c)))
    return c


def _c_error(c: Any) -> Optional[Error]:
    return Error(c.error_code, _text(c.error, c.error_len)) if c.error_code else None


def _py_output(address: int) -> Output:
    c = _c_output(address)
    return Output(
        request=c.request, text=_text(c.text, c.text_len), tokens=_numbers(c_uint32, c.tokens, c.tokens_len),
        logprobs=_numbers(c_float, c.logprobs, c.tokens_len) if c.logprobs else None,
        finish_reason=FinishReason(c.finish_reason), error=_c_error(c), prompt_tokens=c.prompt_tokens,
        generated_tokens=c.generated_tokens, user_data=c.user_data, sequence=c.sequence, index=c.index, score=c.score,
        top_logprobs=_logprobs(c.top_logprobs, c.top_logprobs_len, c.tokens_len),
        prompt_logprobs=_numbers(c_float, c.prompt_logprobs, c.prompt_logprobs_len) if c.prompt_logprobs else None,
        prompt_top_logprobs=_logprobs(c.prompt_top_logprobs, c.prompt_top_logprobs_len, c.prompt_logprobs_len),
        queued_seconds=c.queued_seconds, first_token_seconds=c.first_token_seconds, last_token_seconds=c.last_token_seconds,
        preemptions=c.preemptions, cached_tokens=c.cached_tokens)


def _state(address: int) -> bytes:
    """Return the state of an exported sequence."""
    c = _c_output(address)
    error = _c_error(c)
    if error is not None:
        raise error
    # string_at would truncate the length to an int.
    return bytes((ctypes.c_ubyte * c.sequence_state_len).from_address(c.sequence_state))


def _completion(outputs: Sequence[Output], sampling: Optional[Sampling]) -> Completion:
    last = outputs[-1]
    if sampling is not None and sampling.output_kind == OutputKind.CUMULATIVE:
        outputs = outputs[-1:]

    def joined(name: str) -> Any:
        """Concatenate the lists of a field. None if no output has the field."""
        lists = [values for values in (getattr(output, name) for output in outputs) if values is not None]
        return [value for values in lists for value in values] if lists else None

    return Completion(
        request=last.request, text="".join(output.text for output in outputs), tokens=joined("tokens"), logprobs=joined("logprobs"),
        finish_reason=last.finish_reason, prompt_tokens=last.prompt_tokens, sequence=last.sequence, index=last.index,
        score=last.score, top_logprobs=joined("top_logprobs"), prompt_logprobs=joined("prompt_logprobs"),
        prompt_top_logprobs=joined("prompt_top_logprobs"), queued_seconds=last.queued_seconds,
        first_token_seconds=last.first_token_seconds, last_token_seconds=last.last_token_seconds, preemptions=last.preemptions,
        cached_tokens=last.cached_tokens)


def _completions(outputs: Sequence[Output], sampling: Optional[Sampling]) -> List[Completion]:
    """Return one completion for each sequence, by index."""
    by_index: Dict[int, List[Output]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [_completion(by_index[index], sampling) for index in sorted(by_index)]


# ---- handles -------------------------------------------------------------------------------------


class _Handle:
    """An object of the library, for `with handle as pointer`.

    It is freed after close() when no call uses it: by close(), or by the last user. So close() does
    not wait, and a signal handler can close an object that its own thread is using.
    """

    def __init__(self, what: str, pointer: int, free: Callable[[int], None]) -> None:
        self._what, self._pointer, self._free = what, pointer, free
        self._lock = threading.RLock()  # reentrant, because a signal handler can run at any point
        self._users = 0
        self._closed = False
        self._process = os.getpid()

    def __enter__(self) -> int:
        self._renew_lock_after_fork()
        with self._lock:
            # First, so that a signal handler that closes the handle from here on does not free it.
            self._users += 1
            if not self._closed:
                return self._pointer
        self.__exit__()
        raise Error(Code.CLOSED, f"the {self._what} is closed")

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._users -= 1
        self._free_when_unused()

    def close(self) -> None:
        self._renew_lock_after_fork()
        self._closed = True
        self._free_when_unused()

    __del__ = close

    def _free_when_unused(self) -> None:
        with self._lock:
            if self._users or not self._closed:
                return
            pointer, self._pointer = self._pointer, 0
        if pointer:
            self._free(pointer)

    def _renew_lock_after_fork(self) -> None:
        """Reset the state in a forked child, which has no other threads."""
        if self._process != os.getpid():
            self._lock, self._users, self._process = threading.RLock(), 0, os.getpid()


class _Hooks:
    """The callbacks for logits hooks. They live as long as the engine, because forks use them."""

    # After the interpreter has ended, Python ends a thread that calls into it, which would end the
    # stepping thread. So the engines are stopped before.
    _in_use: "weakref.WeakSet[_Handle]" = weakref.WeakSet()

    def __init__(self) -> None:
        self._callbacks: Dict[LogitsHook, Any] = {}
        self._calling: Optional[int] = None  # id of the thread in a hook

    def callback(self, hook: Optional[LogitsHook], engine: _Handle) -> Any:
        if hook is None:
            return None
        self._in_use.add(engine)
        return self._callbacks.setdefault(hook, _LogitsHook(self._caller(hook)))

    def _caller(self, hook: LogitsHook) -> Callable[..., None]:
        def call(_data: Any, sequence: int, tokens: int, tokens_len: int, logits: int, vocab_size: int) -> None:
            self._calling = threading.get_ident()
            try:
                with _view("I", tokens, tokens_len).toreadonly() as ids, _view("f", logits, vocab_size) as numbers:
                    hook(sequence, ids, numbers)
            finally:
                self._calling = None
        return call

    def free_engine(self, pointer: int) -> None:
        """Free the engine. This waits for the stepping thread, so a hook uses a new thread."""
        if self._calling == threading.get_ident():
            threading.Thread(target=self.free_engine, args=(pointer,)).start()
        else:
            _lib.pllm_engine_free(pointer)

    @classmethod
    def stop(cls) -> None:
        for handle in list(cls._in_use):
            with contextlib.suppress(Error), handle as engine:
                _lib.pllm_engine_stop(engine)


atexit.register(_Hooks.stop)


def _view(kind: str, address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * (4 * length)).from_address(address)).cast("B").cast(kind)


class Queue:
    """A queue of outputs: Engine.queue, or one from Engine.create_queue.

    A with statement closes it at its end. Its fileno() works with selectors and event loops.
    """

    # Maximum time of one library call, so that signals are handled and close() takes effect.
    _POLL_MS = 100

    def __init__(self, handle: _Handle, pointer: int, engine: "Optional[Engine]") -> None:
        self._handle = handle
        self._pointer = pointer
        # None for the engine's own queue. Else it keeps the engine alive while the queue is in use.
        self._engine = engine

    def poll(self, timeout: Optional[float] = None) -> List[Output]:
        """Take all outputs from the queue, in the order in which they were generated.

        If the queue is empty, wait up to `timeout` seconds for the first output (0: not at all;
        None: without limit). If the time runs out, the list is empty. Once the engine has failed or
        is closed, and all outputs have been taken, the call raises that error.
        """
        return self._take(_py_output, timeout)

    def _take(self, read: Callable[[int], Any], timeout: Optional[float]) -> List[Any]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            outputs = self._poll(read, math.ceil(min(left_ms, self._POLL_MS)))
            if outputs or left_ms <= self._POLL_MS:
                return outputs

    def _poll(self, read: Callable[[int], Any], timeout_ms: int) -> List[Any]:
        batch = c_void_p()
        with self._handle:
            _lib.pllm_queue_poll(self._pointer, timeout_ms, byref(batch))
        try:
            return [read(_lib.pllm_outputs_get(batch, i)) for i in range(_lib.pllm_outputs_len(batch))]
        finally:
            _lib.pllm_outputs_free(batch)

    def fileno(self) -> int:
        """Return an eventfd that is readable while the queue is not empty.

        It is valid until the queue is closed. Polling the queue resets it.
        """
        fd = c_int32()
        with self._handle:
            _lib.pllm_queue_get_event_fd(self._pointer, byref(fd))
        return fd.value

    def close(self) -> None:
        """Close the queue and abort the requests that write to it. No effect on Engine.queue."""
        if self._engine is not None:
            self._handle.close()

    def __enter__(self) -> "Queue":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def _readable(self) -> None:
        """Wait on the event loop, without a thread."""
        loop, fd = asyncio.get_running_loop(), self.fileno()
        readable = asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)


class Budget:
    """A memory budget for KV pools. Engines can share it, and its size can change while they run.

    It is Engine.budget, or created here for Engine(..., budget=budget). Nothing is allocated for it:
    engines reserve address space for max_bytes and use memory for the blocks they fill. The budget
    must hold one sequence of max_model_len tokens for each engine.

    max_bytes: maximum size to which it can be resized later. None: bytes.

    A with statement closes it at its end.
    """

    def __init__(self, bytes: int, max_bytes: Optional[int] = None) -> None:
        created = c_void_p()
        maximum = bytes if max_bytes is None else max_bytes
        _lib.pllm_budget_create(_u64("bytes", bytes), _u64("max_bytes", maximum), byref(created))
        self._pointer = created.value or 0
        self._handle = _Handle("budget", self._pointer, _lib.pllm_budget_free)
        self._borrowed = False

    @classmethod
    def _of(cls, engine: _Handle, pointer: int) -> "Budget":
        """Return the budget of an engine. It is valid as long as the engine."""
        budget = cls.__new__(cls)
        budget._handle, budget._pointer, budget._borrowed = engine, pointer, True
        return budget

    def resize(self, bytes: int) -> None:
        """Change the size of the budget. No request ends, and results do not change.

        A larger size takes effect at once. For a smaller size, the engines first drop cached
        blocks, then the KV blocks of idle sequences, then preempt the youngest running requests.
        Engines that are not in a step shrink before this method returns, the others before their
        next step. The memory is returned to the system. A size below BudgetInfo.min_bytes or above
        max_bytes raises Code.CAPACITY.
        """
        with self._handle:
            _lib.pllm_budget_resize(self._pointer, _u64("bytes", bytes))

    def info(self) -> BudgetInfo:
        """Return the size of the budget and the bytes that its engines hold."""
        with self._handle:
            return _record(BudgetInfo, _filled(_BudgetInfo, _lib.pllm_budget_get_info, self._pointer))

    def close(self) -> None:
        """Free the handle. Its engines keep the budget. No effect on Engine.budget."""
        if not self._borrowed:
            self._handle.close()

    def __enter__(self) -> "Budget":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---- engines -------------------------------------------------------------------------------------


def plan(model_path: Path, *, budget: Optional[Budget] = None, **options: Any) -> Plan:
    """Compute what an Engine with these options would allocate, without allocating it.

    host_steps and progress are not options of this function.
    """
    c = _c_options(model_path, **options)
    with _held(budget):
        c.budget = _pointer(budget)
        return _record(Plan, _filled(_Plan, _lib.pllm_engine_plan, byref(c)))


class Engine:
    """One model, its KV pool and its requests. A with statement closes it at its end.

    model_path: model directory in the layout of Hugging Face.
    device: "cpu", or "cuda:0" for the first CUDA device.
    memory_fraction: CUDA only: fraction of the device memory that is free after weights and working
        memory, for the KV pool. Replaces kv_bytes.
    batch_invariant: makes the results of a sequence on a CUDA device independent of the batch, as
        on the CPU. It is slower.
    kv_bytes: size of the KV pool in bytes.
    budget: budget from which the KV pool takes its bytes, instead of kv_bytes.
    threads: number of threads, including the stepping thread.
    cpus: list of CPUs to which the threads are pinned, such as "0-3,8"; the first is for the
        stepping thread. None: threads are not pinned.
    max_model_len: maximum length of a sequence in tokens, prompt and output together.
    max_seqs: maximum number of running sequences.
    max_batch_tokens: maximum number of tokens in one step, prompt and decode tokens of all
        sequences together.
    prefill_chunk: maximum number of prompt tokens of one sequence in one step.
    weight_format: format of the weights in memory.
    weight_group: number of inputs that share a scale in 4-bit formats: 32, 64 or 128.
    packed_path: directory for packed weights, from which a later engine reads them as fast as the
        disk. model_info().packed has the result. None: weights are packed each time.
    block_size: tokens per KV block.
    kv_dtype: data type of KV blocks.
    isa: instruction path.
    seed: seed for requests without a seed of their own.
    max_waiting_requests: maximum number of requests that wait for their first step. More are
        refused with Code.CAPACITY; one can always wait.
    max_waiting_tokens: maximum number of tokens that the waiting requests have to compute.
    max_prompt_bytes: maximum length in bytes of a text prompt, of a chat's JSON and the prompt it
        renders to, and of a text to tokenize. None: 64 for each token of max_model_len, at least
        1048576.
    order: order of the waiting requests.
    ageing_ms: waiting time in milliseconds after which a request is preferred; see Order.
    batching: composition of a step.
    prefill_budget: prompt tokens for Batching.PREFILL_FIRST and Batching.DECODE_FIRST.
    allocation: number of blocks that a request needs to start.
    preemption: treatment of preempted requests. SWAP and AUTO need swap_bytes.
    swap_bytes: size in bytes of the host tier, which holds the KV of swapped requests and idle
        sequences.
    swap_path: directory for the host tier, an unnamed file that disappears with the engine. None:
        the host tier is in memory.
    trace_path: file for a trace of every step, in the format of Perfetto and chrome://tracing. An
        existing file is replaced. If the disk fails, the trace ends.
    journal_path: file for a journal of all inputs of the engine. pagedllm-replay repeats its steps
        bit for bit. It contains prompts. An existing file is replaced. If the disk fails, the
        journal ends.
    model_name: value of the label model_name in metrics(). None: the name of the model directory.
    queue_capacity: capacity, in outputs, of Engine.queue. While it is full, its requests pause.
    skip_tokenizer: serve token ids only.
    prefix_cache: False disables the prefix cache.
    host_steps: if True, call step(), or start() later. If False, a thread of the engine steps it
        from the start.
    progress: called as progress(done, total) with bytes of weights. An exception cancels the
        loading, and this constructor raises it. The model is loaded on another thread, so that
        Ctrl-C cancels the loading as well.
    """

    def __init__(self, model_path: Path, *, device: Optional[str] = None, kv_bytes: Optional[int] = None,
                 budget: Optional[Budget] = None, threads: Optional[int] = None, max_model_len: Optional[int] = None,
                 max_seqs: Optional[int] = None, max_batch_tokens: Optional[int] = None, prefill_chunk: Optional[int] = None,
                 block_size: Optional[int] = None, kv_dtype: Optional[DType] = None, isa: Optional[Isa] = None,
                 seed: Optional[int] = None, max_waiting_requests: Optional[int] = None, max_waiting_tokens: Optional[int] = None,
                 max_prompt_bytes: Optional[int] = None,
                 order: Optional[Order] = None, ageing_ms: Optional[int] = None, batching: Optional[Batching] = None,
                 prefill_budget: Optional[int] = None, allocation: Optional[Allocation] = None,
                 preemption: Optional[Preemption] = None, swap_bytes: Optional[int] = None, swap_path: Optional[Path] = None,
                 trace_path: Optional[Path] = None, journal_path: Optional[Path] = None, model_name: Optional[str] = None,
                 weight_format: Optional[Weights] = None, weight_group: Optional[int] = None,
                 packed_path: Optional[Path] = None, cpus: Optional[str] = None,
                 queue_capacity: Optional[int] = None,
                 skip_tokenizer: Optional[bool] = None, prefix_cache: Optional[bool] = None,
                 memory_fraction: Optional[float] = None, batch_invariant: Optional[bool] = None, host_steps: bool = False,
                 progress: Optional[Callable[[int, int], Any]] = None) -> None:
        options = _c_options(
            model_path, device=device, kv_bytes=kv_bytes, threads=threads, max_model_len=max_model_len, max_seqs=max_seqs,
            max_batch_tokens=max_batch_tokens, prefill_chunk=prefill_chunk, block_size=block_size, kv_dtype=kv_dtype, isa=isa,
            seed=seed, max_waiting_requests=max_waiting_requests, max_waiting_tokens=max_waiting_tokens,
            max_prompt_bytes=max_prompt_bytes, order=order, ageing_ms=ageing_ms, batching=batching,
            prefill_budget=prefill_budget, allocation=allocation, preemption=preemption,
            swap_bytes=swap_bytes, swap_path=swap_path, trace_path=trace_path, journal_path=journal_path,
            model_name=model_name, weight_format=weight_format, weight_group=weight_group, packed_path=packed_path,
            cpus=cpus, queue_capacity=queue_capacity,
            skip_tokenizer=skip_tokenizer, prefix_cache=prefix_cache, memory_fraction=memory_fraction,
            batch_invariant=batch_invariant)
        self._hooks = _Hooks()
        self._handle = _create(options, budget, progress, self._hooks.free_engine)
        if not host_steps:
            self.start()

    def close(self) -> None:
        """End every request and free the engine. Its queues first return the outputs they hold."""
        self._handle.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- requests

    def generate(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Completion:
        """Run a request and return its first result. `request`: further keywords of add().

        If an exception such as Ctrl-C ends the wait, the request is aborted.
        """
        return self.generate_all(prompt, sampling, **request)[0]

    def generate_all(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> List[Completion]:
        """Run a request and return all n results, by index. See generate()."""
        return _collected(self.stream(prompt, sampling, **request), sampling)

    def stream(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
               **request: Any) -> Generator[Output, None, None]:
        """Add a request now and return its outputs as they are generated.

        While `capacity` outputs are unread, the request pauses; other requests continue. Closing or
        deleting the generator aborts the request, and the forks of its sequences without a queue of
        their own. If the computation of the request fails, the generator raises its Error.
        `request`: further keywords of add().
        """
        return self._read(*self._added(capacity, prompt, sampling, request))

    async def agenerate(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Completion:
        """Run generate() in asyncio. Cancelling the task aborts the request."""
        return (await self.agenerate_all(prompt, sampling, **request))[0]

    async def agenerate_all(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> List[Completion]:
        """Run generate_all() in asyncio. Cancelling the task aborts the request."""
        return await _acollected(self.astream(prompt, sampling, **request), sampling)

    def astream(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                **request: Any) -> AsyncGenerator[Output, None]:
        """Run stream() in asyncio. It waits on the running event loop, without a thread.

        Cancelling the task that reads, or aclose(), aborts the request. Leaving the `async for`
        loop aborts it in the next iteration of the event loop.
        """
        return self._aread(*self._added(capacity, prompt, sampling, request))

    def add(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, queue: Optional[Queue] = None,
            user_data: Optional[int] = None, n: Optional[int] = None, best_of: Optional[int] = None, beam: Optional[Beam] = None,
            keep: Optional[bool] = None, truncate_prompt_tokens: Optional[int] = None, cache_salt: Optional[Text] = None,
            deadline: Optional[float] = None, priority: Optional[int] = None, logits_hook: Optional[LogitsHook] = None,
            add_special: Optional[bool] = None, skip_special: Optional[bool] = None) -> int:
        """Add a request and return its id. `queue`, by default Engine.queue, receives its outputs.

        add_special: the tokenizer adds its special tokens, such as BOS. Set it to False for a
            prompt that render_chat rendered.
        skip_special: special tokens are left out of the text.
        user_data: returned in each output.
        n: number of results, each with its index and its own last output. Result i has the sequence
            id request + i.
        best_of: number of samples to generate. The n samples with the highest log probability are
            returned at the end, best first.
        beam: beam search instead of sampling. The n best beams are returned at the end, best first.
        keep: the sequences are kept when they end, for any reason, until free().
        truncate_prompt_tokens: number of tokens at the end of the prompt that are kept.
        cache_salt: requests share blocks of the prefix cache only if their salts are equal, so that
            tenants cannot probe the prompts of other tenants.
        deadline: seconds from now after which the request ends with FinishReason.DEADLINE and the
            tokens it has.
        priority: with Order.PRIORITY: -100 to 100, default 0; higher runs first.
        logits_hook: edits the logits of each token; see LogitsHook.
        """
        added = c_uint64()
        self._ask(_lib.pllm_engine_add_request, added, prompt, sampling, queue=queue, user_data=user_data, n=n, best_of=best_of,
                  beam=beam, keep=keep, truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt, deadline=deadline,
                  priority=priority, logits_hook=logits_hook, add_special=add_special, skip_special=skip_special)
        return added.value

    def predict_admission(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Admission:
        """Predict admission and time to first token for a request without adding it.

        The prediction uses the measured step times and the lengths of recent outputs. It assumes
        that the prompt is not in the prefix cache. It raises the errors that add() would raise,
        except for grammars, which are not compiled. `request`: further keywords of add().
        """
        c = _Admission(sizeof(_Admission))
        self._ask(_lib.pllm_engine_predict_admission, c, prompt, sampling, **request)
        first = c.first_token_seconds
        return Admission(admits=bool(c.admits), fits_now=bool(c.fits_now), first_token_seconds=None if first < 0 else first,
                         waiting_requests=c.waiting_requests, waiting_tokens=c.waiting_tokens)

    def _ask(self, call: Callable[..., None], answer: Any, prompt: Prompt, sampling: Optional[Sampling], *,
             queue: Optional[Queue] = None, logits_hook: Optional[LogitsHook] = None, **how: Any) -> None:
        request = _c_request(prompt, sampling, logits_hook=self._hooks.callback(logits_hook, self._handle), **how)
        queue = self.queue if queue is None else queue
        with self._handle as engine, queue._handle:
            request.queue = queue._pointer
            call(engine, byref(request), byref(answer))

    def abort(self, request: int) -> None:
        """Abort a request at the next step. Its last output has FinishReason.ABORT.

        If the request has ended, the call raises Code.NOT_FOUND.
        """
        with self._handle as engine:
            _lib.pllm_engine_abort(engine, _u64("request", request))

    def _added(self, capacity: int, prompt: Prompt, sampling: Optional[Sampling],
               request: Mapping[str, Any]) -> Tuple[Queue, int, int]:
        queue = self.create_queue(capacity)
        n = request.get("n")
        return queue, self.add(prompt, sampling, queue=queue, **request), 1 if n is None else n

    def _read(self, queue: Queue, request: int, sequences: int) -> Generator[Output, None, None]:
        """Return outputs until the given number of sequences of the request have ended."""
        with queue:
            while True:
                for output in queue.poll():
                    if output.error is not None:
                        raise output.error
                    yield output
                    sequences -= output.request == request and output.finish_reason != FinishReason.NONE
                    if not sequences:
                        return

    async def _aread(self, queue: Queue, request: int, sequences: int) -> AsyncGenerator[Output, None]:
        with queue:
            while True:
                for output in queue.poll(0):
                    if output.error is not None:
                        raise output.error
                    yield output
                    sequences -= output.request == request and output.finish_reason != FinishReason.NONE
                    if not sequences:
                        return
                await queue._readable()

    # -- running and kept sequences

    def fork(self, sequence: int, n: int = 1, *, at: Optional[int] = None, seed: Optional[int] = None, idle: Optional[bool] = None,
             user_data: Optional[int] = None, queue: Optional[Queue] = None) -> List[int]:
        """Create n sequences with the first tokens of a sequence and return their ids.

        They share its KV blocks. Each child is a request of its own, whose id is its sequence id.
        Children of a running sequence run; children of an idle one are idle.

        at: number of tokens that the children share with their parent. None: all.
        seed: each child draws from its own random stream of this seed. None: the children draw the
            same random numbers as their parent.
        idle: the children are idle until they are resumed, even if the parent runs.
        user_data: returned in the outputs of the children. None: that of the parent.
        queue: queue for the outputs of the children. None: that of the parent, which must be open;
            the queue of stream() is closed at its end.
        """
        how = _defaults(_Fork, _lib.pllm_fork_init, n=n, at=at, seed=seed, user_data=user_data)
        flags = _flag(how.flags, _FORK_SEED, None if seed is None else True)
        how.flags = _flag(_flag(flags, _FORK_IDLE, idle), _FORK_USER_DATA, None if user_data is None else True)
        # The library rejects a larger n before it writes an id.
        created = (c_uint64 * min(n, self.stats().blocks_total))()
        with self._handle as engine, _held(queue):
            how.queue = _pointer(queue)
            _lib.pllm_sequence_fork(engine, _u64("sequence", sequence), byref(how), created)
        return list(created)

    def append(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence.

        A running sequence continues after them from the next step on. An idle sequence computes
        them when it is resumed.
        """
        ids = _token_ids("tokens", tokens)
        with self._handle as engine:
            _lib.pllm_sequence_append(engine, _u64("sequence", sequence), ids, len(ids))

    def rewind(self, sequence: int, length: int) -> None:
        """Truncate a sequence to its first `length` tokens, also into the prompt.

        Its state is as it was then, including the random stream. Outputs that have been read are
        not taken back. A running sequence continues from there.
        """
        with self._handle as engine:
            _lib.pllm_sequence_rewind(engine, _u64("sequence", sequence), _u64("length", length))

    def resume(self, sequence: int, sampling: Optional[Sampling] = None, *, queue: Optional[Queue] = None,
               user_data: Optional[int] = None, keep: Optional[bool] = None, deadline: Optional[float] = None,
               continue_generation: bool = False, skip_special: Optional[bool] = None,
               logits_hook: Optional[LogitsHook] = None) -> None:
        """Continue an idle sequence.

        Only its last token and the tokens appended since are computed. Counts (max_tokens,
        min_tokens) and penalties start anew.

        queue: queue for the outputs. None: the queue of the sequence.
        user_data: returned in the outputs. None: the sequence keeps its user_data.
        keep: False frees the sequence when it ends. By default it is kept.
        deadline: as in add(), from this call on.
        continue_generation: continue as if the sequence had never been idle, with its own sampling,
            counts, grammar and hook. sampling, skip_special and logits_hook must not be given. The
            sequence need not have ended: idle forks and imported sequences continue where they are.
        """
        if continue_generation and not (sampling is skip_special is logits_hook is None):
            raise TypeError("continue_generation keeps the parameters of the sequence; "
                            "leave out sampling, skip_special and logits_hook")
        how = _defaults(_Resume, _lib.pllm_resume_init, user_data=user_data, deadline_ms=_deadline_ms(deadline),
                        logits_hook=self._hooks.callback(logits_hook, self._handle))
        if sampling is not None:
            how.sampling = ctypes.pointer(_c_sampling(sampling))
        how.flags = _flag(_flag(how.flags, _REQUEST_KEEP, keep), _RESUME_USER_DATA, None if user_data is None else True)
        how.flags = _flag(how.flags, _RESUME_CONTINUE, continue_generation)
        how.text_flags = _flag(how.text_flags, _TEXT_SKIP_SPECIAL, skip_special)
        with self._handle as engine, _held(queue):
            how.queue = _pointer(queue)
            _lib.pllm_sequence_resume(engine, _u64("sequence", sequence), byref(how))

    def generate_resumed(self, sequence: int, sampling: Optional[Sampling] = None, **how: Any) -> Completion:
        """Run generate() for a kept sequence. `how`: further keywords of resume().

        Not continue_generation: only the sequence knows the kind of its outputs. Use
        stream_resumed() instead.
        """
        _refuse_continuation(how)
        return _collected(self.stream_resumed(sequence, sampling, **how), sampling)[0]

    def stream_resumed(self, sequence: int, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                       **how: Any) -> Generator[Output, None, None]:
        """Run stream() for a kept sequence. `how`: further keywords of resume()."""
        return self._read(*self._resumed(capacity, sequence, sampling, how))

    async def agenerate_resumed(self, sequence: int, sampling: Optional[Sampling] = None, **how: Any) -> Completion:
        """Run generate_resumed() in asyncio."""
        _refuse_continuation(how)
        return (await _acollected(self.astream_resumed(sequence, sampling, **how), sampling))[0]

    def astream_resumed(self, sequence: int, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                        **how: Any) -> AsyncGenerator[Output, None]:
        """Run stream_resumed() in asyncio."""
        return self._aread(*self._resumed(capacity, sequence, sampling, how))

    def free(self, sequence: int) -> None:
        """Free a sequence and its blocks. A running sequence ends with FinishReason.ABORT."""
        with self._handle as engine:
            _lib.pllm_sequence_free(engine, _u64("sequence", sequence))

    def sequence_info(self, sequence: int) -> SequenceInfo:
        """Read the state of a sequence. If it ended without being kept, raise Code.NOT_FOUND."""
        c = _SequenceInfo(sizeof(_SequenceInfo))
        with self._handle as engine:
            _lib.pllm_sequence_get_info(engine, _u64("sequence", sequence), byref(c))
        return SequenceInfo(request=c.request, length=c.len, index=c.index, idle=bool(c.idle), inexact=bool(c.inexact))

    def _resumed(self, capacity: int, sequence: int, sampling: Optional[Sampling],
                 how: Mapping[str, Any]) -> Tuple[Queue, int, int]:
        queue = self.create_queue(capacity)
        request = self.sequence_info(sequence).request
        self.resume(sequence, sampling, queue=queue, **how)
        return queue, request, 1

    # -- export and import

    def export_sequence(self, sequence: int) -> bytes:
        """Return the state of a sequence at the next step.

        The state has the tokens, KV blocks, sampling parameters, random stream, grammar and text,
        but not the logits hook. It contains the conversation in plain text. The sequence is not
        affected. If the sequence ends before that step and is not kept, the call raises
        Code.NOT_FOUND.
        """
        with self._exported(sequence) as queue:
            return queue._take(_state, None)[0]

    async def aexport_sequence(self, sequence: int) -> bytes:
        """Run export_sequence() in asyncio."""
        with self._exported(sequence) as queue:
            while not (states := queue._take(_state, 0)):
                await queue._readable()
            return states[0]

    def import_sequence(self, state: Bytes, *, queue: Optional[Queue] = None) -> int:
        """Create an idle sequence from the state of export_sequence() and return its id.

        The state can come from another process. Resumed with continue_generation, the sequence
        continues with the same bits unless SequenceInfo.inexact is True. `queue`, by default
        Engine.queue, receives its outputs. If the state is damaged, or was exported with another
        model, block_size or kv_dtype, the call raises an Error.
        """
        data = state if isinstance(state, bytes) else bytes(memoryview(state))
        created = c_uint64()
        queue = self.queue if queue is None else queue
        with self._handle as engine, queue._handle:
            _lib.pllm_sequence_import(engine, data, len(data), queue._pointer, byref(created))
        return created.value

    def _exported(self, sequence: int) -> Queue:
        """Return a queue that receives only the state."""
        queue = self.create_queue(1)
        with self._handle as engine:
            _lib.pllm_sequence_export(engine, _u64("sequence", sequence), queue._pointer)
        return queue

    # -- prefix cache

    def pin(self, prompt: Prompt, *, cache_salt: Optional[Text] = None, time_to_live_ms: Optional[int] = None,
            priority: Optional[int] = None, add_special: Optional[bool] = None) -> int:
        """Keep a prompt in the prefix cache and return the id of the pin.

        The prompt is computed from the next step on. Requests that begin with the same tokens reuse
        the blocks.

        time_to_live_ms: time in milliseconds for which the prompt is kept. None: until it is
            unpinned.
        priority: if a sequence cannot continue otherwise, pins are dropped, those with the lowest
            priority first.
        cache_salt: as in add().
        add_special: as in add().
        """
        c = _defaults(_Pin, _lib.pllm_pin_init, time_to_live_ms=time_to_live_ms, priority=priority)
        _assign_prompt(c, prompt)
        if cache_salt is not None:
            _assign_text(c, "cache_salt", _utf8(cache_salt))
        c.text_flags = _flag(c.text_flags, _TEXT_ADD_SPECIAL, add_special)
        pinned = c_uint64()
        with self._handle as engine:
            _lib.pllm_prefix_pin(engine, byref(c), byref(pinned))
        return pinned.value

    def unpin(self, pin: int) -> None:
        """Unpin a prompt. If the pin has expired or was dropped, raise Code.NOT_FOUND."""
        with self._handle as engine:
            _lib.pllm_prefix_unpin(engine, _u64("pin", pin))

    # -- stepping

    def step(self) -> Step:
        """Run one iteration and generate one token for each sequence whose prompt is complete.

        If another thread or the engine's own thread is stepping the engine, the call raises
        Code.BUSY.
        """
        with self._handle as engine:
            return _record(Step, _filled(_Step, _lib.pllm_engine_step, engine))

    def start(self) -> None:
        """Start the engine's own thread. If it is already running, raise Code.BUSY."""
        with self._handle as engine:
            _lib.pllm_engine_start(engine)

    def stop(self) -> None:
        """Stop the engine's own thread after the current step. Requests wait for the next step."""
        with self._handle as engine:
            _lib.pllm_engine_stop(engine)

    # -- queues

    @property
    def queue(self) -> Queue:
        """Return the engine's own queue, for requests that are added without a queue."""
        with self._handle as engine:
            return Queue(self._handle, _lib.pllm_engine_queue(engine), None)

    def create_queue(self, capacity: int) -> Queue:
        """Create a queue for some requests. While it holds `capacity` outputs, they pause."""
        created = c_void_p()
        with self._handle as engine:
            _lib.pllm_queue_create(engine, _u64("capacity", capacity), byref(created))
        pointer = created.value or 0
        return Queue(_Handle("queue", pointer, _lib.pllm_queue_free), pointer, self)

    # -- memory budgets

    @property
    def budget(self) -> Budget:
        """Return the budget of the KV pool: the budget of the constructor or the engine's own."""
        with self._handle as engine:
            return Budget._of(self._handle, _lib.pllm_engine_budget(engine))

    # -- text

    def tokenize(self, text: Text, *, add_special: bool = False) -> List[int]:
        """Encode text as token ids."""
        utf8, tokens = _utf8(text), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_tokenize(engine, utf8, len(utf8), _flag(0, _TEXT_ADD_SPECIAL, add_special), byref(tokens))
        try:
            return _numbers(c_uint32, _lib.pllm_tokens_data(tokens), _lib.pllm_tokens_len(tokens))
        finally:
            _lib.pllm_tokens_free(tokens)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Decode token ids as text."""
        ids, text = _token_ids("tokens", tokens), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_detokenize(engine, ids, len(ids), _flag(0, _TEXT_SKIP_SPECIAL, skip_special), byref(text))
        return _taken(text)

    def render_chat(self, messages: Union[Sequence[Mapping[str, Any]], Mapping[str, Any]]) -> str:
        """Render a chat, [{"role": "user", "content": "..."}, ...], with the model's chat template.

        A mapping has "messages" and variables of the template. pllm_engine_render_chat documents
        the members, such as "continue_final_message". Add a request with the result and
        add_special=False.
        """
        utf8, text = json.dumps(messages).encode(), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_render_chat(engine, utf8, len(utf8), byref(text))
        return _taken(text)

    # -- statistics

    def model_info(self) -> ModelInfo:
        """Return the model and the limits of the engine."""
        with self._handle as engine:
            c = _filled(_Info, _lib.pllm_engine_get_model_info, engine)
            return ModelInfo(
                architecture=_text(c.architecture, c.architecture_len), isa=_text(c.isa, c.isa_len),
                eos_token_ids=_numbers(c_uint32, c.eos_token_ids, c.eos_token_ids_len), vocab_size=c.vocab_size, layers=c.layers,
                max_positions=c.max_positions, max_model_len=c.max_model_len, threads=c.threads, packed=Packed(c.packed),
                packed_reason=_text(c.packed_reason, c.packed_reason_len))

    def stats(self) -> Stats:
        """Return counters since the creation of the engine, and its state after the last step."""
        with self._handle as engine:
            return _record(Stats, _filled(_Stats, _lib.pllm_engine_get_stats, engine))

    def metrics(self) -> str:
        """Return metrics, as of the last step, in the OpenMetrics text format.

        They are gauges, counters and histograms. The content type is "application/openmetrics-text;
        version=1.0.0; charset=utf-8". The names are those of vLLM with the prefix "pagedllm_". The
        call does not wait for a step.
        """
        text = c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_get_metrics(engine, byref(text))
        return _taken(text)


def _create(options: Any, budget: Optional[Budget], progress: Optional[Callable[[int, int], Any]],
            free: Callable[[int], None]) -> _Handle:
    """Create an engine on another thread. ctypes would lose a KeyboardInterrupt in the callback."""
    cancelled = threading.Event()
    raised: List[BaseException] = []

    def report(_data: Any, done: int, total: int) -> bool:
        try:
            if progress is not None:
                progress(done, total)
        except BaseException as error:
            raised.append(error)
        return bool(raised) or cancelled.is_set()

    def load() -> _Handle:
        created = c_void_p()
        options.progress = _Progress(report)
        with _held(budget):
            options.budget = _pointer(budget)
            _lib.pllm_engine_create(byref(options), byref(created))
        return _Handle("engine", created.value or 0, free)

    loader = concurrent.futures.ThreadPoolExecutor(1, "pagedllm-load")
    try:
        return loader.submit(load).result()
    except Error:
        if raised:
            raise raised[0]
        raise
    finally:
        cancelled.set()
        loader.shutdown(wait=False)


def _collected(outputs: Generator[Output, None, None], sampling: Optional[Sampling]) -> List[Completion]:
    with contextlib.closing(outputs):
        return _completions(list(outputs), sampling)


async def _acollected(outputs: AsyncGenerator[Output, None], sampling: Optional[Sampling]) -> List[Completion]:
    return _completions([output async for output in outputs], sampling)


def _held(thing: Union[Queue, Budget, None]) -> ContextManager[Any]:
    """Keep an object from being freed in a with statement."""
    return contextlib.nullcontext() if thing is None else thing._handle


def _pointer(thing: Union[Queue, Budget, None]) -> Optional[int]:
    return None if thing is None else thing._pointer


def _taken(text: c_void_p) -> str:
    try:
        return _text(_lib.pllm_bytes_data(text), _lib.pllm_bytes_len(text))
    finally:
        _lib.pllm_bytes_free(text)
