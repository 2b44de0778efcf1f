"""libpagedllm for Python: LLM serving inside your own process. One module over ctypes, nothing to install beside the library.

    import pagedllm

    with pagedllm.Engine("models/mine") as engine:
        print(engine.generate("Once upon a time").text)
        for output in engine.stream("Once upon a time", pagedllm.Sampling(temperature=0, max_tokens=100)):
            print(output.text, end="", flush=True)

        async def answer():
            async for output in engine.astream("Once upon a time"):
                print(output.text, end="", flush=True)

What holds for everything here; the rest is as pagedllm.h says:

Errors. What the library refuses raises Error, with its code and its message. Using what was closed is Code.CLOSED.

Threads. Any thread, or any number of asyncio tasks, may call anything on one Engine, Queue or Arena at any time; one iterator of
outputs is for one thread or task at a time. Calls release the GIL.

Sequences. A request's id is that of its first sequence, too; with n of them the others have the ids after it. While one runs, or
is kept, it may be forked, appended to, rewound, resumed and moved to another engine: its tokens are computed once, however often
they are used.

Closing. close() may be called at any time, from any thread, and again. It ends the object at once: iterators in progress
and other calls raise Code.CLOSED. Its memory goes back when the last call under way on it has returned.
What is not closed is closed when it is garbage.

Defaults. Whatever is None is left to the library.

Processes. In a child made by os.fork (multiprocessing's "fork") every call on the parent's engine raises Code.UNSUPPORTED; the
parent goes on.

The library is looked for in the environment's PAGEDLLM_LIBRARY (a file), next to this module, in target/release of the
repository or lib of the installed tree that this module lies in, and then where the system's loader looks for libpagedllm.so.0.
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

__all__ = ["Admission", "Allocation", "Arena", "ArenaInfo", "Batching", "Beam", "Code", "Completion", "DType", "Dry",
           "EarlyStopping", "Engine", "Error", "FinishReason", "Grammar", "Info", "Isa", "LogitsHook", "Logprob", "Order",
           "Output", "OutputKind", "Plan", "Preemption", "Queue", "Sampling", "SequenceInfo", "Stats", "Step", "Weights",
           "build_info", "plan", "version"]

# ---- what comes out --------------------------------------------------------------------------------------------------


class Code(enum.IntEnum):
    """Why a call was refused: PLLM_E_*."""
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
    """What the library refused: a stable code, and a message with the numbers and the remedy."""

    def __init__(self, code: int, message: str) -> None:
        self.code = Code(code) if code in list(Code) else code  # a plain int where only a newer library knows it
        self.message = message
        super().__init__(self.code, message)

    def __str__(self) -> str:
        return self.message


class FinishReason(enum.IntEnum):
    """Why a sequence ended: PLLM_FINISH_*."""
    NONE = 0  # it has not: more will come
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    DEADLINE = 5  # its deadline passed
    OTHER = -1  # one that only a newer library knows

    @classmethod
    def _missing_(cls, value: object) -> "FinishReason":
        return cls.OTHER


class Logprob(NamedTuple):
    """A token and its log probability under the model's own distribution."""
    token: int
    logprob: float


@dataclass(frozen=True)
class Output:
    """News of one sequence: new tokens, new text, or its end. The text may lag behind the tokens."""
    request: int
    text: str
    tokens: List[int]
    logprobs: Optional[List[float]]  # one per token, where Sampling.logprobs asked for them
    finish_reason: FinishReason  # anything but NONE makes this the sequence's last one
    error: Optional[Error]  # with FinishReason.ERROR
    prompt_tokens: int
    generated_tokens: int  # so far
    user_data: int
    sequence: int
    index: int  # which of the request's sequences, from 0
    score: float  # the sum of the log probabilities, where they or best_of were asked for; of a beam, its score
    top_logprobs: Optional[List[List[Logprob]]]  # for each token, most probable first, where Sampling.top_logprobs asked for them
    prompt_logprobs: Optional[List[float]]  # of the prompt's tokens but the first, before the first token; in one output or more
    prompt_top_logprobs: Optional[List[List[Logprob]]]
    # In a sequence's last output; 0 in all others, and where it never came to that. No two are alike in it, so it is not compared.
    queued_seconds: float = field(compare=False)  # from the call that asked for it (added, resumed or forked it) to its first step,
    first_token_seconds: float = field(compare=False)  # to its first token,
    last_token_seconds: float = field(compare=False)  # and to its last one
    preemptions: int = field(compare=False)  # how often its blocks were taken from it
    cached_tokens: int = field(compare=False)  # with how many of its first tokens the prefix cache helped


@dataclass(frozen=True)
class Completion:
    """All that a sequence generated. Engine.abort cuts it short with FinishReason.ABORT, a deadline with FinishReason.DEADLINE."""
    request: int
    text: str
    tokens: List[int]
    logprobs: Optional[List[float]]  # one per token, where Sampling.logprobs asked for them
    finish_reason: FinishReason
    prompt_tokens: int
    sequence: int
    index: int  # which of the request's sequences, from 0
    score: float  # as in Output, and so is what follows
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
    """A sequence as of the last step and of the calls since."""
    request: int  # the request it came from
    length: int  # its tokens
    index: int  # which of the request's sequences, from 0
    idle: bool  # it waits to be resumed or freed; otherwise it runs, or waits to
    inexact: bool = False  # it was imported from a machine or an instruction path that cannot give the same bits


class Step(NamedTuple):
    """What one step did."""
    unfinished: int  # requests that have not ended: step again while there are any
    prefill_tokens: int
    decode_tokens: int
    sequences: int  # in the step
    paused: int  # passed over because their queue is full


class Stats(NamedTuple):
    """Counts since the engine was made, and the state after its last step."""
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
    idle: int  # sequences that were kept, and wait to be resumed or freed
    blocks_copied: int  # because a sequence wrote to one that others share
    prefix_queries: int  # prompt tokens looked for in the prefix cache,
    prefix_hits: int  # and those of them that did not have to be computed
    finished_deadline: int
    admission_rejections: int  # requests that were refused because too much waits
    steps_failed: int  # steps that could not be computed and were tried again, in part or as a whole
    preemptions_swapped: int  # of the preemptions: those to the host tier
    swapped: int  # sequences whose K and V are in the host tier
    swap_blocks_total: int
    swap_blocks_used: int
    blocks_swapped_out: int  # to the host tier,
    blocks_swapped_in: int  # and back
    swap_failures: int  # moves that failed, as on a full disk: who was to move is computed again
    prompt_tokens_cached: int  # tokens that sequences began with and that were found in the prefix cache
    traces_stopped: int  # 1: the disk has failed, and the trace has ended
    journals_stopped: int  # the same of the journal
    discard_failures: int  # times that the KV pool became smaller and the system did not take the memory back
    blocks_out_of_window: int  # that the sequences would have besides, did every layer look back on all tokens


class Admission(NamedTuple):
    """What would become of a request that was added now."""
    admits: bool  # it would be taken; otherwise too much waits, or its queue is not read
    fits_now: bool  # nobody is before it, and there is room for it: the next step would begin it
    first_token_seconds: Optional[float]  # until its first token is expected; None: no step has shown yet how long steps take
    waiting_requests: int  # before it,
    waiting_tokens: int  # and the tokens that these have to compute


class ArenaInfo(NamedTuple):
    """An arena as it is now."""
    bytes: int
    least_bytes: int  # what it can be resized to, for the engines and requests there are,
    most_bytes: int  # and up to what
    held_bytes: int  # by the engines: more than bytes while they are on their way down
    engines: int


class Plan(NamedTuple):
    """Where an engine's bytes go, known before any are taken."""
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    full_sequences: int
    kv_dtype: int  # a DType
    most_blocks: int  # KV blocks that there can be, should the arena grow
    swap_bytes: int  # of the host tier, in memory or in its file,
    swap_blocks: int  # and the blocks it holds
    kv_groups: int  # groups of layers whose K and V are in blocks of their own


class Packed(enum.IntEnum):
    """What became of packed_path."""
    UNUSED = 0  # none was given
    READ = 1  # the weights were read in their packed form
    SAVED = 2  # they were packed from the model's files, and their packed form was written
    UNSAVED = 3  # the same, and it could not be written


class Info(NamedTuple):
    """The model and the limits it is served with."""
    architecture: str
    isa: str
    eos_token_ids: List[int]
    vocab_size: int
    layers: int
    max_positions: int  # the longest sequence that the model was made for
    max_model_len: int  # the longest that this engine allows
    threads: int
    packed: Packed
    packed_reason: str  # why it was not read, or not written


# ---- what goes in ----------------------------------------------------------------------------------------------------


class DType(enum.IntEnum):
    """How K and V are stored."""
    AUTO = 0
    F32 = 1
    BF16 = 2
    INT8 = 3  # and a scale for each head of each token: about half the bytes of BF16, at a small cost in quality
    F16 = 4  # numbers beyond 65504 become 65504, with their sign
    FP8 = 5  # as INT8, in floating point (OCP E4M3)


class Isa(enum.IntEnum):
    """An instruction path. Bits are the same within one path, not across paths."""
    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4  # what is kept in bf16, weights or K and V, is multiplied by numbers that are rounded to it; AUTO takes it where it is
    AVX_VNNI = 5  # as AVX2 and AVX512, and faster for weights in whole numbers
    AVX512_VNNI = 6


class Weights(enum.IntEnum):
    """How weights are kept. Fewer bits are faster to read and take less memory, and cost quality."""
    AS_STORED = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    INT8 = 4  # with a scale for each output; multiplied by activations in 8 bits
    INT4 = 5  # with a scale for each group of inputs; embedding and head are in 8
    INT4_ASYMMETRIC = 6  # and each group begins at its least weight
    FP8 = 7  # on CUDA devices: floating point with a scale for each output; embedding and head are as stored


class Preemption(enum.IntEnum):
    """What becomes of who has to give way."""
    RECOMPUTE = 0  # they are computed again
    SWAP = 1  # their K and V wait in the host tier, where it has room
    AUTO = 2  # whichever costs less, by what moving and computing have cost so far


class Order(enum.IntEnum):
    """Who comes first."""
    FIRST_COME = 0
    PRIORITY = 1  # the higher priority; who has waited for ageing_ms comes before those one level above that come then
    SHORTEST_PREDICTED = 2  # who is likely to generate the fewest tokens, as many as those before that were allowed about as many


class Batching(enum.IntEnum):
    """What a step is made of."""
    MIXED = 0  # prompts, in chunks, and decodes together, in the order of the requests
    PREFILL_FIRST = 1  # prompts alone while there are any, with a step of decodes after prefill_budget prompt tokens
    DECODE_FIRST = 2  # every decode in every step, beside at most prefill_budget prompt tokens
    STATIC = 3  # nobody joins until all that run have ended; to compare with


class Allocation(enum.IntEnum):
    """For how many of its tokens a request needs room before it begins."""
    ON_DEMAND = 0  # those that it has; where the pool is full, whoever comes last is preempted
    MAX_TOKENS = 1  # all that it may come to have, so that nobody is preempted because somebody grows


class OutputKind(enum.IntEnum):
    """What each output holds."""
    DELTA = 0  # what is new
    CUMULATIVE = 1  # everything so far
    FINAL = 2  # there is one, at the end, and it holds everything


class EarlyStopping(enum.IntEnum):
    """When a beam search ends."""
    NO = 0  # when no running beam, ended now, would be better than the worst finished one
    YES = 1  # as soon as Beam.width beams are finished
    NEVER = 2  # when no running beam can become better than the worst finished one


Text = Union[str, bytes]  # bytes are UTF-8
Path = Union[str, bytes, "os.PathLike[Any]"]
Prompt = Union[Text, Sequence[int]]  # text, or token ids
Bytes = Union[bytes, bytearray, memoryview]

# Called as hook(sequence, tokens, logits) for every token, before anything else is done to the logits, which it edits in place:
# logits is a memoryview of floats, one for each token of the vocabulary, tokens one of the sequence's token ids; both end with the
# call (numpy.frombuffer(logits, "f") is no copy). It runs on the thread that steps and takes the GIL: what takes long here holds
# up all. What it raises goes to sys.unraisablehook; the logits are then as it left them. The function is held until the engine
# is freed: use one for many requests. It may call what any thread may, but not step, stop, or wait for outputs.
LogitsHook = Callable[[int, memoryview, memoryview], Any]


@dataclass(frozen=True)
class Grammar:
    """What the output must be. Made by one of the methods below."""
    kind: int  # PLLM_GRAMMAR_*
    text: Optional[Text] = None
    choices: Sequence[Text] = ()

    @classmethod
    def json_schema(cls, schema: Union[Text, Mapping[str, Any], bool]) -> "Grammar":
        """A JSON text that the schema describes."""
        return cls(1, schema if isinstance(schema, (str, bytes)) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls(2)

    @classmethod
    def regex(cls, expression: Text) -> "Grammar":
        """A text that the regular expression matches as a whole."""
        return cls(3, expression)

    @classmethod
    def choice(cls, choices: Sequence[Text]) -> "Grammar":
        """One of these texts."""
        return cls(4, choices=choices)

    @classmethod
    def lark(cls, grammar: Text) -> "Grammar":
        """A text that the Lark grammar describes."""
        return cls(5, grammar)


@dataclass(frozen=True)
class Dry:
    """A token that would make a repetition one longer than length tokens loses multiplier * base ** (length - allowed_length)."""
    multiplier: Optional[float] = None
    base: Optional[float] = None
    allowed_length: Optional[int] = None  # shorter repetitions are free
    penalty_last_n: Optional[int] = None  # how many tokens back repetitions are looked for; 0: to the beginning
    sequence_breakers: Optional[Sequence[Text]] = None  # texts that end a repetition; None: the library's, empty: none do


@dataclass(frozen=True)
class Beam:
    """Beam search, as generate of Hugging Face transformers does it."""
    width: Optional[int] = None  # beams side by side
    groups: Optional[int] = None  # into which they are divided, each with a search of its own
    diversity_penalty: Optional[float] = None  # for every beam of an earlier group that chose the token in the same step
    length_penalty: Optional[float] = None  # scores are sums of log probabilities divided by the length to this power
    early_stopping: Optional[EarlyStopping] = None


@dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens and when it ends. None: the library's default."""
    temperature: Optional[float] = None  # 0 is greedy
    top_p: Optional[float] = None  # keep the most probable tokens that together reach this probability
    min_p: Optional[float] = None  # keep tokens at least this share as probable as the most probable one
    top_k: Optional[int] = None  # keep the k most probable tokens
    max_tokens: Optional[int] = None
    min_tokens: Optional[int] = None  # neither end-of-sequence tokens nor stops count before this many tokens
    seed: Optional[int] = None  # with one, the same tokens come whatever runs beside it
    stop: Union[Text, Sequence[Text]] = ()  # strings that end it, also across tokens; they do not appear in the text
    stop_token_ids: Sequence[int] = ()  # tokens that end it; reported, their text is not
    include_stop: Optional[bool] = None  # the stop string, or the text of the token that ends it, stays in the text
    ignore_eos: Optional[bool] = None  # go on past end-of-sequence tokens
    logprobs: Optional[bool] = None  # report the log probability of every chosen token
    top_logprobs: Optional[int] = None  # and of so many of the most probable ones beside it
    prompt_logprobs: Optional[bool] = None  # the same of the prompt's tokens but the first
    prompt_top_logprobs: Optional[int] = None
    echo: Optional[bool] = None  # the output begins with the prompt
    output_kind: Optional[OutputKind] = None  # what each output holds
    grammar: Optional[Grammar] = None  # what the output must be
    typical_p: Optional[float] = None  # keep the tokens of the most typical surprise that together reach this probability
    top_n_sigma: Optional[float] = None  # keep tokens whose logit is within so many standard deviations of the largest
    xtc_probability: Optional[float] = None  # how often XTC takes the most probable tokens away
    xtc_threshold: Optional[float] = None  # from which probability on a token counts as a top choice for XTC
    mirostat_tau: Optional[float] = None  # Mirostat 2: the surprise to keep to, in bits per token
    mirostat_eta: Optional[float] = None  # how fast mirostat corrects
    presence_penalty: Optional[float] = None  # taken from the logit of every token that has been generated
    frequency_penalty: Optional[float] = None  # taken from a token's logit for every time it has been generated
    repetition_penalty: Optional[float] = None  # divides the logits of all tokens of prompt and output
    no_repeat_ngram_size: Optional[int] = None  # no run of so many tokens comes twice
    dry: Optional[Dry] = None
    logit_bias: Optional[Mapping[int, float]] = None  # added to the logits of these tokens
    bad_words: Sequence[Text] = ()  # texts that the output must not contain
    bad_words_ids: Sequence[Sequence[int]] = ()  # runs of tokens that it must not contain
    allowed_token_ids: Sequence[int] = ()  # the only tokens that may be chosen; none: all


# ---- the library -----------------------------------------------------------------------------------------------------

_ABI_VERSION = 0
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
    progress=_Progress, progress_data=c_void_p, max_waiting_requests=c_uint64, max_waiting_tokens=c_uint64, arena=c_void_p,
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
    "_Request", prompt=c_char_p, prompt_len=c_uint64, prompt_tokens=_TokenIds, prompt_tokens_len=c_uint64,
    sampling=ctypes.POINTER(_Sampling), user_data=c_uint64, n=c_uint32, text_flags=c_uint32, queue=c_void_p, best_of=c_uint32,
    truncate_prompt_tokens=c_uint32, flags=c_uint32, reserved=c_uint32, beam=ctypes.POINTER(_Beam), cache_salt=c_char_p,
    cache_salt_len=c_uint64, logits_hook=_LogitsHook, hook_data=c_void_p, deadline_ms=c_int64, priority=c_int32, reserved2=c_uint32)
_Output = _struct(
    "_Output", request=c_uint64, sequence=c_uint64, user_data=c_uint64, tokens=c_void_p, tokens_len=c_uint64, logprobs=c_void_p,
    text=c_void_p, text_len=c_uint64, error=c_void_p, error_len=c_uint64, prompt_tokens=c_uint64, generated_tokens=c_uint64,
    index=c_uint32, finish_reason=c_uint32, error_code=c_int32, reserved=c_uint32, score=c_double, top_logprobs=c_void_p,
    top_logprobs_len=c_uint64, prompt_logprobs=c_void_p, prompt_logprobs_len=c_uint64, prompt_top_logprobs=c_void_p,
    prompt_top_logprobs_len=c_uint64, blob=c_void_p, blob_len=c_uint64, queued_seconds=c_double, first_token_seconds=c_double,
    last_token_seconds=c_double, preemptions=c_uint64, cached_tokens=c_uint64)
_Fork = _struct(
    "_Fork", at=c_uint64, seed=c_uint64, user_data=c_uint64, queue=c_void_p, n=c_uint32, flags=c_uint32)
_Resume = _struct(
    "_Resume", sampling=ctypes.POINTER(_Sampling), queue=c_void_p, user_data=c_uint64, flags=c_uint32, text_flags=c_uint32,
    logits_hook=_LogitsHook, hook_data=c_void_p, deadline_ms=c_int64)
_Pin = _struct(
    "_Pin", prompt=c_char_p, prompt_len=c_uint64, prompt_tokens=_TokenIds, prompt_tokens_len=c_uint64, cache_salt=c_char_p,
    cache_salt_len=c_uint64, time_to_live_ms=c_uint64, priority=c_uint32, text_flags=c_uint32)
_SequenceInfo = _struct("_SequenceInfo", request=c_uint64, len=c_uint64, index=c_uint32, idle=c_uint32, inexact=c_uint64)
_Info = _struct(
    "_Info", architecture=c_void_p, architecture_len=c_uint64, isa=c_void_p, isa_len=c_uint64, eos_token_ids=c_void_p,
    eos_token_ids_len=c_uint64, vocab_size=c_uint64, layers=c_uint64, max_positions=c_uint64, max_model_len=c_uint64,
    threads=c_uint64, packed=c_uint64, packed_reason=c_void_p, packed_reason_len=c_uint64)
_DOUBLES = ("slot_utilization", "first_token_seconds")
_Step, _Stats, _Plan, _Admission, _ArenaInfo = (
    _struct("_" + record.__name__, **{name: c_double if name in _DOUBLES else c_uint64 for name in record._fields})
    for record in (Step, Stats, Plan, Admission, ArenaInfo))


def _load() -> ctypes.CDLL:
    here = pathlib.Path(__file__).resolve().parent
    named = os.environ.get("PAGEDLLM_LIBRARY")
    root = here.parents[1]
    files = (here / "libpagedllm.so", root / "target" / "release" / "libpagedllm.so", root.parent / "lib" / "libpagedllm.so.0")
    path = named or next((str(file) for file in files if file.exists()), "libpagedllm.so.0")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"{error}; set PAGEDLLM_LIBRARY to the library's file") from error
    if lib.pllm_abi_version() != _ABI_VERSION:
        raise ImportError(f"{path} has ABI {lib.pllm_abi_version()}, this module is for ABI {_ABI_VERSION}")
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
    functions(None, [pointer], "engine_free", "queue_free", "outputs_free", "tokens_free", "bytes_free", "error_free", "arena_free")
    functions(pointer, [pointer], "engine_queue", "engine_arena", "tokens_data", "bytes_data")
    functions(size, [pointer], "outputs_len", "tokens_len", "bytes_len")
    functions(pointer, [pointer, size], "outputs_get")
    fallible([pointer], "engine_start", "engine_stop")
    fallible([pointer, pointer], "engine_plan", "engine_create", "engine_info", "engine_step", "engine_stats", "engine_metrics",
             "queue_event_fd", "arena_state")
    fallible([pointer, size], "engine_abort", "sequence_free", "prefix_unpin", "arena_resize")
    fallible([size, size, pointer], "arena_create")
    fallible([pointer, size, size], "sequence_rewind")
    fallible([pointer, size, pointer], "sequence_export", "sequence_resume", "sequence_get_info")
    fallible([pointer, size, pointer, pointer], "sequence_fork")
    fallible([pointer, size, _TokenIds, size], "sequence_append")
    fallible([pointer, c_char_p, size, pointer, pointer], "sequence_import")
    fallible([pointer, pointer, pointer], "engine_add_request", "engine_admit", "prefix_pin")
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
    """The version of the library that was loaded, such as "0.2.0"."""
    return _lib.pllm_version().decode()


def build_info() -> Dict[str, Any]:
    """What it offers on this machine: version, backends, instruction paths, model architectures."""
    return json.loads(_lib.pllm_build_info())


# ---- between C and Python --------------------------------------------------------------------------------------------


def _assign(struct: ctypes.Structure, **values: Any) -> None:
    """Sets the fields that are not None. ctypes would cut an int to the field's size."""
    for name, value in values.items():
        if value is None:
            continue
        if not hasattr(struct, name):
            raise TypeError(f"there is no option {name!r}")
        setattr(struct, name, value)
        if isinstance(value, int) and getattr(struct, name) != value:
            raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}: it does not fit into its C type")


def _assign_text(struct: ctypes.Structure, name: str, utf8: bytes) -> None:
    _assign(struct, **{name: utf8, name + "_len": len(utf8)})


def _assign_texts(struct: ctypes.Structure, name: str, singular: str, texts: Optional[Sequence[Text]]) -> None:
    if texts is not None:
        utf8 = [_utf8(text) for text in texts]
        _assign(struct, **{name: (c_char_p * len(utf8))(*utf8), singular + "_lens": (c_uint64 * len(utf8))(*map(len, utf8)),
                           singular + "_count": len(utf8)})


def _assign_tokens(struct: ctypes.Structure, name: str, tokens: Sequence[int]) -> None:
    _assign(struct, **{name: _token_ids(tokens), name + "_len": len(tokens)})


def _assign_prompt(struct: ctypes.Structure, prompt: Prompt) -> None:
    if isinstance(prompt, (str, bytes)):
        _assign_text(struct, "prompt", _utf8(prompt))
    else:
        _assign_tokens(struct, "prompt_tokens", prompt)


def _made(kind: Type[ctypes.Structure], init: Callable[..., None], **values: Any) -> Any:
    """A struct with the library's defaults, but for the values that are not None."""
    struct = kind()
    init(byref(struct), sizeof(struct))
    _assign(struct, **values)
    return struct


def _u64(name: str, value: int) -> int:
    if c_uint64(value).value != value:
        raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}: it does not fit into 64 bits without a sign")
    return value


def _deadline_ms(seconds: Optional[float]) -> Optional[int]:
    if seconds is None:
        return None
    if not 0 < seconds < math.inf:  # in C, 0 is none; here it has passed
        raise Error(Code.INVALID_ARGUMENT, f"deadline is {seconds}: give the seconds that are left, or None for no deadline")
    return math.ceil(seconds * 1000)


def _flag(flags: int, flag: int, on: Optional[bool]) -> int:
    """`flags` with `flag` set or cleared; None leaves it."""
    return flags if on is None else flags | flag if on else flags & ~flag


def _utf8(text: Text) -> bytes:
    """What is not Unicode goes on as it is: the library says what is wrong with it."""
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def _token_ids(tokens: Iterable[int]) -> Any:
    try:
        ids = array.array("I", tokens)
    except OverflowError as error:
        raise Error(Code.INVALID_ARGUMENT, f"a token id does not fit into 32 bits without a sign: {error}") from None
    return (c_uint32 * len(ids)).from_buffer(ids)


def _text(address: Optional[int], length: int) -> str:
    return ctypes.string_at(address, length).decode() if address else ""


def _numbers(kind: Any, address: Optional[int], length: int) -> List[Any]:
    return (kind * length).from_address(address)[:] if address else []


_Record = TypeVar("_Record", Step, Stats, Plan, ArenaInfo)


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
    options = _made(_Options, _lib.pllm_engine_options_init, **numbers)
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
    c = _made(_Sampling, _lib.pllm_sampling_init, **{name: getattr(sampling, name) for name in _SAMPLING_NUMBERS})
    for flag, asked, number in (
            (_SAMPLING_SEED, None, sampling.seed), (_SAMPLING_LOGPROBS, sampling.logprobs, sampling.top_logprobs),
            (_SAMPLING_PROMPT_LOGPROBS, sampling.prompt_logprobs, sampling.prompt_top_logprobs),
            (_SAMPLING_IGNORE_EOS, sampling.ignore_eos, None), (_SAMPLING_ECHO, sampling.echo, None),
            (_SAMPLING_INCLUDE_STOP, sampling.include_stop, None)):
        given = None if number is None else True  # whoever gives the number means the flag that goes with it
        c.flags = _flag(c.flags, flag, given if asked is None else asked)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if getattr(sampling, name):
            _assign_tokens(c, name, getattr(sampling, name))
    _assign_texts(c, "stop", "stop", [sampling.stop] if isinstance(sampling.stop, (str, bytes)) else sampling.stop)
    _assign_texts(c, "bad_words", "bad_word", sampling.bad_words)
    if sampling.bad_words_ids:
        lists = [_token_ids(tokens) for tokens in sampling.bad_words_ids]
        c.bad_words_ids = (_TokenList * len(lists))(*(_TokenList(tokens, len(tokens)) for tokens in lists))
        c.bad_words_ids_len = len(lists)
    if sampling.logit_bias:
        c.logit_bias, c.logit_bias_len = (_LogitBias * len(sampling.logit_bias))(), len(sampling.logit_bias)
        for i, (token, bias) in enumerate(sampling.logit_bias.items()):
            _assign(c.logit_bias[i], token=token, bias=bias)
    if sampling.dry is not None:
        dry = _made(_Dry, _lib.pllm_dry_init, multiplier=sampling.dry.multiplier, base=sampling.dry.base,
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
    c = _made(_Request, _lib.pllm_request_init, deadline_ms=_deadline_ms(deadline), **numbers)
    _assign_prompt(c, prompt)
    if sampling is not None:
        c.sampling = ctypes.pointer(_c_sampling(sampling))
    if beam is not None:
        c.beam = ctypes.pointer(_made(
            _Beam, _lib.pllm_beam_init, width=beam.width, groups=beam.groups, diversity_penalty=beam.diversity_penalty,
            length_penalty=beam.length_penalty, early_stopping=beam.early_stopping))
    if cache_salt is not None:
        _assign_text(c, "cache_salt", _utf8(cache_salt))
    c.flags = _flag(c.flags, _REQUEST_KEEP, keep)
    c.text_flags = _flag(_flag(c.text_flags, _TEXT_ADD_SPECIAL, add_special), _TEXT_SKIP_SPECIAL, skip_special)
    return c


def _logprobs(address: Optional[int], length: int, tokens: int) -> Optional[List[List[Logprob]]]:
    """As many for each of the tokens."""
    if not address:
        return None
    flat = [Logprob(one.token, one.logprob) for one in (_Logprob * length).from_address(address)]
    each = length // tokens
    return [flat[i:i + each] for i in range(0, length, each)]


def _c_output(address: int) -> Any:
    c = _Output()
    ctypes.memmove(byref(c), address, min(c_uint64.from_address(address).value, sizeof(c)))  # an older library's is shorter
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


def _blob(address: int) -> bytes:
    """What an export gave."""
    c = _c_output(address)
    error = _c_error(c)
    if error is not None:
        raise error
    return bytes((ctypes.c_ubyte * c.blob_len).from_address(c.blob))  # string_at would cut its length to an int


def _completion(outputs: Sequence[Output], sampling: Optional[Sampling]) -> Completion:
    last = outputs[-1]
    if sampling is not None and sampling.output_kind == OutputKind.CUMULATIVE:
        outputs = outputs[-1:]

    def joined(name: str) -> Any:
        """None where no output has any."""
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
    """One for each sequence, by index."""
    by_index: Dict[int, List[Output]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [_completion(by_index[index], sampling) for index in sorted(by_index)]


# ---- handles ---------------------------------------------------------------------------------------------------------


class _Handle:
    """Something of the library's. `with handle as pointer` uses it; it is freed once it is closed and nobody uses it: by close(),
    or by the last user. So nobody waits, and a signal handler may close what its own thread is in the middle of using."""

    def __init__(self, what: str, pointer: int, free: Callable[[int], None]) -> None:
        self._what, self._pointer, self._free = what, pointer, free
        self._lock = threading.RLock()  # a signal handler may come in
        self._users = 0
        self._closed = False
        self._process = os.getpid()

    def __enter__(self) -> int:
        self._forget_the_parents_threads()
        with self._lock:
            self._users += 1  # first, so that a signal handler that closes from here on does not free it
            if not self._closed:
                return self._pointer
        self.__exit__()
        raise Error(Code.CLOSED, f"the {self._what} is closed")

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._users -= 1
        self._free_when_unused()

    def close(self) -> None:
        self._forget_the_parents_threads()
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

    def _forget_the_parents_threads(self) -> None:
        """In a forked child, those that hold the lock or use the handle are not there."""
        if self._process != os.getpid():
            self._lock, self._users, self._process = threading.RLock(), 0, os.getpid()


class _Hooks:
    """The host's functions that edit logits, as C calls them. They are kept until the engine is freed, as forks call them, too."""

    # Python takes down a thread that calls into it when it has ended, and the library's with it: so the steps stop before.
    _in_use: "weakref.WeakSet[_Handle]" = weakref.WeakSet()

    def __init__(self) -> None:
        self._callbacks: Dict[LogitsHook, Any] = {}
        self._calling: Optional[int] = None  # the thread that is inside of one

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
        """It waits for the thread that steps: so, where a hook closes the engine, or its garbage, on another one."""
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
    """Where the outputs of some requests arrive: Engine.queue, or one from Engine.create_queue.

    As a context manager it is closed at the end. Its fileno() makes it something that selectors and event loops wait for."""

    # How long a poll is inside the library at a time, so that signals are handled and close() takes effect.
    _POLL_MS = 100

    def __init__(self, handle: _Handle, pointer: int, engine: "Optional[Engine]") -> None:
        self._handle = handle
        self._pointer = pointer
        self._engine = engine  # None for an engine's own queue; else kept from becoming garbage while somebody reads

    def poll(self, timeout: Optional[float] = None) -> List[Output]:
        """Takes everything that is in the queue, in the order it was made. Waits up to `timeout` seconds for the first (0: not
        at all; None: as long as it takes); when time runs out the list is empty. Once the engine is closed or has failed, and
        the last outputs are taken, it raises."""
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
        """A descriptor that is readable while poll() would not wait. It lives as long as the queue; polling is what makes it
        unreadable again."""
        fd = c_int32()
        with self._handle:
            _lib.pllm_queue_event_fd(self._pointer, byref(fd))
        return fd.value

    def close(self) -> None:
        """Aborts what still writes to the queue, and closes it. An engine's own queue is closed with its engine, not here."""
        if self._engine is not None:
            self._handle.close()

    def __enter__(self) -> "Queue":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def _readable(self) -> None:
        """Waits on the event loop, without a thread."""
        loop, fd = asyncio.get_running_loop(), self.fileno()
        readable = asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)


class Arena:
    """A budget of KV bytes that engines of this process may share, and that may change while they run: Engine.arena, or one that is
    made here for Engine(..., arena=it). Nothing is allocated for it: engines map what most_bytes would take, and touch only what
    they use. Each needs room for its longest sequence (max_model_len).

    most_bytes: what it may be raised to later; None: no further.
    As a context manager it is closed at the end."""

    def __init__(self, bytes: int, most_bytes: Optional[int] = None) -> None:
        made = c_void_p()
        most = bytes if most_bytes is None else most_bytes
        _lib.pllm_arena_create(_u64("bytes", bytes), _u64("most_bytes", most), byref(made))
        self._pointer = made.value or 0
        self._handle = _Handle("arena", self._pointer, _lib.pllm_arena_free)
        self._borrowed = False

    @classmethod
    def _of(cls, engine: _Handle, pointer: int) -> "Arena":
        """The engine's: it lives as long."""
        arena = cls.__new__(cls)
        arena._handle, arena._pointer, arena._borrowed = engine, pointer, True
        return arena

    def resize(self, bytes: int) -> None:
        """Changes the budget, at any time. More is there at once. Where it becomes less, engines go down together: those that
        nobody steps before this returns, others before their next step. First goes what is only cached, then idle sequences lose
        their K and V, then the youngest that run are preempted: nothing ends, and the answers are the same. The memory beyond goes
        back to the system. Less than ArenaInfo.least_bytes, or more than most_bytes, is Code.CAPACITY."""
        with self._handle:
            _lib.pllm_arena_resize(self._pointer, _u64("bytes", bytes))

    def state(self) -> ArenaInfo:
        """The budget, and what the engines hold of it."""
        with self._handle:
            return _record(ArenaInfo, _filled(_ArenaInfo, _lib.pllm_arena_state, self._pointer))

    def close(self) -> None:
        """Lets go of it; engines that were made with it keep the budget. Engine.arena ends with its engine, not here."""
        if not self._borrowed:
            self._handle.close()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---- the engine ------------------------------------------------------------------------------------------------------


def plan(model_path: Path, *, arena: Optional[Arena] = None, **options: Any) -> Plan:
    """What an Engine with these options would allocate; host_steps and progress are none of them. It reads the model's headers, and
    allocates nothing of it."""
    c = _c_options(model_path, **options)
    with _held(arena):
        c.arena = _pointer(arena)
        return _record(Plan, _filled(_Plan, _lib.pllm_engine_plan, byref(c)))


class Engine:
    """One model, its KV pool and its requests. As a context manager it is closed at the end.

    model_path: a model directory as Hugging Face ships it.
    device: where to run: "cpu", or "cuda:0" for the first CUDA device. memory_fraction: the part of its memory that the KV pool takes, of what
        weights and working memory leave, in place of kv_bytes. batch_invariant: it gives a sequence the same bits whatever the batch, as the
        CPU always does; that costs speed.
    kv_bytes: bytes of the KV pool. arena: the budget from which it takes them instead, which engines may share.
    threads: threads that compute. cpus: those to which they are pinned, such as "0-3,8", the stepping one's first. None: the system places
        them.
    max_model_len: longest sequence, prompt and output together.
    max_seqs: most sequences running at once.
    max_batch_tokens: most rows (prompt and decode tokens of all sequences) in one step.
    prefill_chunk: most prompt tokens of one sequence in one step.
    weight_format: how weights are kept. weight_group: inputs of an output that share a scale in 4 bits: 32, 64 or 128.
    packed_path: a directory that keeps weights in their packed form, so that the next engine reads them as fast as the disk; info().packed
        tells what became of it. None: they are packed each time.
    block_size: tokens per KV block. kv_dtype: how K and V are stored. isa: an instruction path to force.
    seed: seeds the requests that bring none of their own.
    max_waiting_requests: that may wait for their first step before others are refused (Code.CAPACITY); one may always wait.
    max_waiting_tokens: that those may have to compute.
    max_prompt_bytes: maximum length in bytes of a text prompt, a chat or a text to tokenize. None: 64 for each token of the engine's
        max_model_len, at least 1 MiB.
    order: who comes first. ageing_ms: the more, the longer who stands behind has to wait.
    batching: what a step is made of. prefill_budget: of prompt tokens, for two of the batchings.
    allocation: for how many of its tokens a request needs room before it begins.
    preemption: what becomes of who has to give way. swap_bytes: of the host tier, to which their K and V go.
    swap_path: a directory; the host tier is a file there that has no name and is gone with the engine. None: it is memory.
    trace_path: a file to draw every step into, for Perfetto or chrome://tracing.
    journal_path: a file to write down all that steps depend on, prompts included, so that pagedllm-replay can run them again
        bit for bit. Both files are begun anew; where the disk fails they end, and no step does.
    model_name: the label of that name in metrics(). None: the model directory's name.
    queue_capacity: outputs that may wait in Engine.queue before its requests pause.
    skip_tokenizer: serve token ids only. prefix_cache: keep what was computed for requests that begin with the same tokens.
    host_steps: you call step(), or start() later on. Otherwise the library's own thread steps from the start.
    progress: called as progress(done, total), in bytes of weights, now and then. What it raises stops the loading and is raised
        here. It runs on a thread made for the loading: so Ctrl-C stops the loading, too."""

    def __init__(self, model_path: Path, *, device: Optional[str] = None, kv_bytes: Optional[int] = None,
                 arena: Optional[Arena] = None, threads: Optional[int] = None, max_model_len: Optional[int] = None,
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
        self._handle = _create(options, arena, progress, self._hooks.free_engine)
        if not host_steps:
            self.start()

    def close(self) -> None:
        """Ends every request and returns the engine's memory; queues that were created first give what they hold."""
        self._handle.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- requests

    def generate(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Completion:
        """Waits for all that the prompt gives; `request`: further keywords of add(). Of several results it is the first. Ctrl-C, or
        whatever else ends the wait, aborts the request."""
        return self.generate_all(prompt, sampling, **request)[0]

    def generate_all(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> List[Completion]:
        """generate() of all n results, by index."""
        return _collected(self.stream(prompt, sampling, **request), sampling)

    def stream(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
               **request: Any) -> Generator[Output, None, None]:
        """Adds a request now, and gives its outputs as they come; `request`: further keywords of add(). It pauses, and no other
        does, while `capacity` outputs wait to be read. Closing the generator, or letting go of it, aborts the request, and forks of
        its sequences that were given no queue of their own. A request whose computation fails raises its Error."""
        return self._read(*self._added(capacity, prompt, sampling, request))

    async def agenerate(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Completion:
        """generate() for asyncio. Cancelling it aborts the request."""
        return (await self.agenerate_all(prompt, sampling, **request))[0]

    async def agenerate_all(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> List[Completion]:
        """generate_all() for asyncio. Cancelling it aborts the request."""
        return await _acollected(self.astream(prompt, sampling, **request), sampling)

    def astream(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                **request: Any) -> AsyncGenerator[Output, None]:
        """stream() for asyncio: waits on the running event loop, without a thread. Cancelling the task that reads aborts the
        request, and so does aclose(); leaving the `async for` does so a turn of the loop later."""
        return self._aread(*self._added(capacity, prompt, sampling, request))

    def add(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, queue: Optional[Queue] = None,
            user_data: Optional[int] = None, n: Optional[int] = None, best_of: Optional[int] = None, beam: Optional[Beam] = None,
            keep: Optional[bool] = None, truncate_prompt_tokens: Optional[int] = None, cache_salt: Optional[Text] = None,
            deadline: Optional[float] = None, priority: Optional[int] = None, logits_hook: Optional[LogitsHook] = None,
            add_special: Optional[bool] = None, skip_special: Optional[bool] = None) -> int:
        """Adds a request and returns its id. Its outputs go to `queue`, by default Engine.queue.

        add_special: let the tokenizer add its special tokens, such as BOS; False for a prompt that render_chat wrote.
        skip_special: leave special tokens out of the text. user_data: comes back in every output.
        n: results, each with its index and its own last output; result i is sequence request + i.
        best_of: samples to draw, of which the n with the highest log probability are returned, best first, at the end.
        beam: return the n best beams instead, at the end.
        keep: its sequences stay when they end, whatever ended them, until free().
        truncate_prompt_tokens: keep only so many of the prompt's last tokens.
        cache_salt: only requests with the same one share what the prefix cache holds, so that tenants cannot probe each other.
        deadline: seconds from now, after which it ends with FinishReason.DEADLINE and what it has by then, wherever it is.
        priority: with Order.PRIORITY the higher comes first; -100 to 100, by default 0.
        logits_hook: edits the logits before every token; see LogitsHook."""
        added = c_uint64()
        self._ask(_lib.pllm_engine_add_request, added, prompt, sampling, queue=queue, user_data=user_data, n=n, best_of=best_of,
                  beam=beam, keep=keep, truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt, deadline=deadline,
                  priority=priority, logits_hook=logits_hook, add_special=add_special, skip_special=skip_special)
        return added.value

    def admit(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Admission:
        """What would become of the request if it were added now, without adding it, judged by the steps so far, by how long answers
        have been, and as if nothing of the prompt were in the prefix cache; `request`: further keywords of add(). What add() would
        refuse in any case is refused here too."""
        told = _Admission(sizeof(_Admission))
        self._ask(_lib.pllm_engine_admit, told, prompt, sampling, **request)
        first = told.first_token_seconds
        return Admission(admits=bool(told.admits), fits_now=bool(told.fits_now), first_token_seconds=None if first < 0 else first,
                         waiting_requests=told.waiting_requests, waiting_tokens=told.waiting_tokens)

    def _ask(self, call: Callable[..., None], answer: Any, prompt: Prompt, sampling: Optional[Sampling], *,
             queue: Optional[Queue] = None, logits_hook: Optional[LogitsHook] = None, **how: Any) -> None:
        request = _c_request(prompt, sampling, logits_hook=self._hooks.callback(logits_hook, self._handle), **how)
        queue = self.queue if queue is None else queue
        with self._handle as engine, queue._handle:
            request.queue = queue._pointer
            call(engine, byref(request), byref(answer))

    def abort(self, request: int) -> None:
        """Ends a request at the next step; its last output says FinishReason.ABORT. One that has ended is Code.NOT_FOUND."""
        with self._handle as engine:
            _lib.pllm_engine_abort(engine, _u64("request", request))

    def _added(self, capacity: int, prompt: Prompt, sampling: Optional[Sampling],
               request: Mapping[str, Any]) -> Tuple[Queue, int, int]:
        queue = self.create_queue(capacity)
        n = request.get("n")
        return queue, self.add(prompt, sampling, queue=queue, **request), 1 if n is None else n

    def _read(self, queue: Queue, request: int, sequences: int) -> Generator[Output, None, None]:
        """Until so many of the request's sequences have ended."""
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

    # -- sequences that run or were kept

    def fork(self, sequence: int, n: int = 1, *, at: Optional[int] = None, seed: Optional[int] = None, idle: Optional[bool] = None,
             user_data: Optional[int] = None, queue: Optional[Queue] = None) -> List[int]:
        """Makes n sequences that begin with the same tokens; nothing is computed again. Each is a request of its own, whose id is
        the sequence's. Those of a sequence that runs run, too; those of an idle one wait to be resumed.

        at: the tokens that they share with their parent; by default all. seed: each draws other random numbers; otherwise all
        draw the same as their parent. idle: they wait to be resumed, even where the parent runs.
        user_data, queue: by default the parent's. A queue that is closed, as that of stream() is when it has ended, takes none."""
        how = _made(_Fork, _lib.pllm_fork_init, n=n, at=at, seed=seed, user_data=user_data)
        flags = _flag(how.flags, _FORK_SEED, None if seed is None else True)
        how.flags = _flag(_flag(flags, _FORK_IDLE, idle), _FORK_USER_DATA, None if user_data is None else True)
        made = (c_uint64 * min(n, self.stats().blocks_total))()  # more than there are blocks are refused, and need no room
        with self._handle as engine, _held(queue):
            how.queue = _pointer(queue)
            _lib.pllm_sequence_fork(engine, _u64("sequence", sequence), byref(how), made)
        return list(made)

    def append(self, sequence: int, tokens: Sequence[int]) -> None:
        """Adds tokens to the end of a sequence. One that runs goes on after them, from the next step on; an idle one has them
        computed when it is resumed."""
        ids = _token_ids(tokens)
        with self._handle as engine:
            _lib.pllm_sequence_append(engine, _u64("sequence", sequence), ids, len(ids))

    def rewind(self, sequence: int, length: int) -> None:
        """Cuts a sequence to its first `length` tokens, also into the prompt. Everything is as it was then, the place in the random
        stream included; outputs that were read stay read. One that runs goes on from there."""
        with self._handle as engine:
            _lib.pllm_sequence_rewind(engine, _u64("sequence", sequence), _u64("length", length))

    def resume(self, sequence: int, sampling: Optional[Sampling] = None, *, queue: Optional[Queue] = None,
               user_data: Optional[int] = None, keep: Optional[bool] = None, deadline: Optional[float] = None, go_on: bool = False,
               skip_special: Optional[bool] = None, logits_hook: Optional[LogitsHook] = None) -> None:
        """An idle sequence goes on: only tokens that were appended since are computed. Counts (max_tokens, min_tokens) and
        penalties begin anew. keep: False lets it go when it ends; otherwise it stays. queue, user_data: by default as before.
        deadline: as in add(), for this turn.

        go_on: as if it had never been idle, with its own sampling, counts, grammar and hook; none of these is given then. It need
        not have ended: an idle fork, or one that was imported, goes on in the middle."""
        if go_on and not (sampling is skip_special is logits_hook is None):
            raise TypeError("with go_on, sampling, skip_special and logits_hook are the sequence's own: give none")
        how = _made(_Resume, _lib.pllm_resume_init, user_data=user_data, deadline_ms=_deadline_ms(deadline),
                    logits_hook=self._hooks.callback(logits_hook, self._handle))
        if sampling is not None:
            how.sampling = ctypes.pointer(_c_sampling(sampling))
        how.flags = _flag(_flag(how.flags, _REQUEST_KEEP, keep), _RESUME_USER_DATA, None if user_data is None else True)
        how.flags = _flag(how.flags, _RESUME_CONTINUE, go_on)
        how.text_flags = _flag(how.text_flags, _TEXT_SKIP_SPECIAL, skip_special)
        with self._handle as engine, _held(queue):
            how.queue = _pointer(queue)
            _lib.pllm_sequence_resume(engine, _u64("sequence", sequence), byref(how))

    def generate_resumed(self, sequence: int, sampling: Optional[Sampling] = None, **how: Any) -> Completion:
        """generate() for a sequence that was kept; `how`: further keywords of resume() but go_on, as only the sequence itself knows
        then what kind its outputs are of."""
        return _collected(self.stream_resumed(sequence, sampling, go_on=False, **how), sampling)[0]

    def stream_resumed(self, sequence: int, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                       **how: Any) -> Generator[Output, None, None]:
        """stream() for a sequence that was kept; `how`: further keywords of resume()."""
        return self._read(*self._resumed(capacity, sequence, sampling, how))

    async def agenerate_resumed(self, sequence: int, sampling: Optional[Sampling] = None, **how: Any) -> Completion:
        """generate_resumed() for asyncio."""
        return (await _acollected(self.astream_resumed(sequence, sampling, go_on=False, **how), sampling))[0]

    def astream_resumed(self, sequence: int, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                        **how: Any) -> AsyncGenerator[Output, None]:
        """stream_resumed() for asyncio."""
        return self._aread(*self._resumed(capacity, sequence, sampling, how))

    def free(self, sequence: int) -> None:
        """Forgets a sequence and gives back its memory. One that runs ends with FinishReason.ABORT."""
        with self._handle as engine:
            _lib.pllm_sequence_free(engine, _u64("sequence", sequence))

    def sequence_info(self, sequence: int) -> SequenceInfo:
        """What is known of a sequence. One that has ended and was not kept is Code.NOT_FOUND."""
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

    # -- sequences that move

    def export_sequence(self, sequence: int) -> bytes:
        """Writes a sequence down as it is at the next step, and waits for that: its tokens, what was computed for them, its
        parameters, its place in the random stream, grammar and text; no logits hook. It goes on, or stays idle, as before, and its
        readers notice nothing. The bytes hold the conversation in the clear. One that ends before that step, and was not kept, is
        Code.NOT_FOUND."""
        with self._exported(sequence) as queue:
            return queue._take(_blob, None)[0]

    async def aexport_sequence(self, sequence: int) -> bytes:
        """export_sequence() for asyncio."""
        with self._exported(sequence) as queue:
            while not (blobs := queue._take(_blob, 0)):
                await queue._readable()
            return blobs[0]

    def import_sequence(self, blob: Bytes, *, queue: Optional[Queue] = None) -> int:
        """Makes an idle sequence from what export_sequence() gave in this or another process, and returns its id. Resumed with
        go_on, it says what comes after that, with the same bits unless it is SequenceInfo.inexact. Its outputs go to `queue`, by
        default Engine.queue. What is damaged, of another model, block_size or kv_dtype is refused."""
        data = blob if isinstance(blob, bytes) else bytes(memoryview(blob))
        made = c_uint64()
        queue = self.queue if queue is None else queue
        with self._handle as engine, queue._handle:
            _lib.pllm_sequence_import(engine, data, len(data), queue._pointer, byref(made))
        return made.value

    def _exported(self, sequence: int) -> Queue:
        """Where the blob arrives, and nothing else."""
        queue = self.create_queue(1)
        with self._handle as engine:
            _lib.pllm_sequence_export(engine, _u64("sequence", sequence), queue._pointer)
        return queue

    # -- the prefix cache

    def pin(self, prompt: Prompt, *, cache_salt: Optional[Text] = None, time_to_live_ms: Optional[int] = None,
            priority: Optional[int] = None, add_special: Optional[bool] = None) -> int:
        """Computes a prompt, from the next step on, and keeps it for requests that begin with the same tokens. Returns its id.

        time_to_live_ms: by default until it is unpinned. priority: where a sequence could not go on otherwise, pins with the
        lowest one give way. cache_salt, add_special: as in add()."""
        c = _made(_Pin, _lib.pllm_pin_init, time_to_live_ms=time_to_live_ms, priority=priority)
        _assign_prompt(c, prompt)
        if cache_salt is not None:
            _assign_text(c, "cache_salt", _utf8(cache_salt))
        c.text_flags = _flag(c.text_flags, _TEXT_ADD_SPECIAL, add_special)
        pinned = c_uint64()
        with self._handle as engine:
            _lib.pllm_prefix_pin(engine, byref(c), byref(pinned))
        return pinned.value

    def unpin(self, pin: int) -> None:
        """Lets the prompt go when others need its place. Code.NOT_FOUND: the pin has expired, or had to give way."""
        with self._handle as engine:
            _lib.pllm_prefix_unpin(engine, _u64("pin", pin))

    # -- stepping

    def step(self) -> Step:
        """Runs one iteration, with one new token for each running sequence that is past its prompt. While another thread steps,
        or the library's own does, it is Code.BUSY."""
        with self._handle as engine:
            return _record(Step, _filled(_Step, _lib.pllm_engine_step, engine))

    def start(self) -> None:
        """From now on the library's own thread steps, asleep while there is nothing to do. Where it does already: Code.BUSY."""
        with self._handle as engine:
            _lib.pllm_engine_start(engine)

    def stop(self) -> None:
        """Ends that thread after the step under way. Nothing is lost: requests wait until somebody steps again."""
        with self._handle as engine:
            _lib.pllm_engine_stop(engine)

    # -- queues

    @property
    def queue(self) -> Queue:
        """The engine's own queue, for requests that were added without one."""
        with self._handle as engine:
            return Queue(self._handle, _lib.pllm_engine_queue(engine), None)

    def create_queue(self, capacity: int) -> Queue:
        """A queue for some of the requests. They pause, and no others do, while `capacity` outputs wait in it."""
        made = c_void_p()
        with self._handle as engine:
            _lib.pllm_queue_create(engine, _u64("capacity", capacity), byref(made))
        pointer = made.value or 0
        return Queue(_Handle("queue", pointer, _lib.pllm_queue_free), pointer, self)

    # -- memory

    @property
    def arena(self) -> Arena:
        """The budget of the KV pool: the one that it was made with, or its own."""
        with self._handle as engine:
            return Arena._of(self._handle, _lib.pllm_engine_arena(engine))

    # -- text

    def tokenize(self, text: Text, *, add_special: bool = False) -> List[int]:
        """The text's token ids."""
        utf8, tokens = _utf8(text), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_tokenize(engine, utf8, len(utf8), _flag(0, _TEXT_ADD_SPECIAL, add_special), byref(tokens))
        try:
            return _numbers(c_uint32, _lib.pllm_tokens_data(tokens), _lib.pllm_tokens_len(tokens))
        finally:
            _lib.pllm_tokens_free(tokens)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """The tokens' text."""
        ids, text = _token_ids(tokens), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_detokenize(engine, ids, len(ids), _flag(0, _TEXT_SKIP_SPECIAL, skip_special), byref(text))
        return _taken(text)

    def render_chat(self, messages: Union[Sequence[Mapping[str, Any]], Mapping[str, Any]]) -> str:
        """Renders a conversation, [{"role": "user", "content": "..."}, ...], with the model's own template; or a mapping with
        "messages" and what else the template reads. The manual lists the options, such as "continue_final_message", at
        pllm_engine_render_chat. Add the result with add_special=False."""
        utf8, text = json.dumps(messages).encode(), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_render_chat(engine, utf8, len(utf8), byref(text))
        return _taken(text)

    # -- insight

    def info(self) -> Info:
        """The model and the limits it is served with."""
        with self._handle as engine:
            c = _filled(_Info, _lib.pllm_engine_info, engine)
            return Info(
                architecture=_text(c.architecture, c.architecture_len), isa=_text(c.isa, c.isa_len),
                eos_token_ids=_numbers(c_uint32, c.eos_token_ids, c.eos_token_ids_len), vocab_size=c.vocab_size, layers=c.layers,
                max_positions=c.max_positions, max_model_len=c.max_model_len, threads=c.threads, packed=Packed(c.packed),
                packed_reason=_text(c.packed_reason, c.packed_reason_len))

    def stats(self) -> Stats:
        """Counts since the engine was made, and the state after its last step."""
        with self._handle as engine:
            return _record(Stats, _filled(_Stats, _lib.pllm_engine_stats, engine))

    def metrics(self) -> str:
        """What dashboards ask for, as of the last step, in the OpenMetrics format, which Prometheus scrapes as
        "application/openmetrics-text; version=1.0.0; charset=utf-8": gauges, counters and histograms, with the names that vLLM gave
        them after the prefix "pagedllm_". It waits for no step."""
        text = c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_metrics(engine, byref(text))
        return _taken(text)


def _create(options: Any, arena: Optional[Arena], progress: Optional[Callable[[int, int], Any]],
            free: Callable[[int], None]) -> _Handle:
    """Loads on a thread of its own. On this one, ctypes would lose a KeyboardInterrupt that arrives in the callback."""
    cancelled = threading.Event()
    raised: List[BaseException] = []

    def tell(_data: Any, done: int, total: int) -> bool:
        try:
            if progress is not None:
                progress(done, total)
        except BaseException as error:
            raised.append(error)
        return bool(raised) or cancelled.is_set()

    def load() -> _Handle:
        made = c_void_p()
        options.progress = _Progress(tell)
        with _held(arena):
            options.arena = _pointer(arena)
            _lib.pllm_engine_create(byref(options), byref(made))
        return _Handle("engine", made.value or 0, free)

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


def _held(thing: Union[Queue, Arena, None]) -> ContextManager[Any]:
    """It is not freed meanwhile."""
    return contextlib.nullcontext() if thing is None else thing._handle


def _pointer(thing: Union[Queue, Arena, None]) -> Optional[int]:
    return None if thing is None else thing._pointer


def _taken(text: c_void_p) -> str:
    try:
        return _text(_lib.pllm_bytes_data(text), _lib.pllm_bytes_len(text))
    finally:
        _lib.pllm_bytes_free(text)
