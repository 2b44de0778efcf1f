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

Threads. Any thread, or any number of asyncio tasks, may call anything on one Engine or Queue at any time; one iterator of
outputs is for one thread or task at a time. Calls release the GIL.

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
from ctypes import byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from typing import (Any, AsyncGenerator, Callable, Dict, Generator, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Type,
                    TypeVar, Union)

__all__ = ["Code", "Completion", "DType", "Engine", "Error", "FinishReason", "Info", "Isa", "Output", "Plan", "Queue", "Sampling",
           "Stats", "Step", "build_info", "plan", "version"]

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
    """Why a request ended: PLLM_FINISH_*."""
    NONE = 0  # it has not: more will come
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    OTHER = -1  # one that only a newer library knows

    @classmethod
    def _missing_(cls, value: object) -> "FinishReason":
        return cls.OTHER


@dataclass(frozen=True)
class Output:
    """News of one request: new tokens, new text, or its end. The text may lag behind the tokens."""
    request: int
    text: str
    tokens: List[int]
    logprobs: Optional[List[float]]  # one per token, where Sampling.logprobs asked for them
    finish_reason: FinishReason  # anything but NONE makes this the last one
    error: Optional[Error]  # with FinishReason.ERROR
    prompt_tokens: int
    generated_tokens: int  # so far
    user_data: int
    sequence: int
    index: int


@dataclass(frozen=True)
class Completion:
    """All that a request generated. FinishReason.ABORT: it was cut short by Engine.abort."""
    request: int
    text: str
    tokens: List[int]
    logprobs: Optional[List[float]]  # one per token, where Sampling.logprobs asked for them
    finish_reason: FinishReason
    prompt_tokens: int


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


# ---- what goes in ----------------------------------------------------------------------------------------------------


class DType(enum.IntEnum):
    """How K and V are stored."""
    AUTO = 0
    F32 = 1
    BF16 = 2


class Isa(enum.IntEnum):
    """An instruction path. Bits are the same within one path, not across paths."""
    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3


Text = Union[str, bytes]  # bytes are UTF-8
Prompt = Union[Text, Sequence[int]]  # text, or token ids


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
    ignore_eos: Optional[bool] = None  # go on past end-of-sequence tokens
    logprobs: Optional[bool] = None  # report the log probability of every sampled token


# ---- the library -----------------------------------------------------------------------------------------------------

_ABI_VERSION = 0
_QUEUE_CAPACITY = 64  # PLLM_QUEUE_CAPACITY
_ENGINE_SKIP_TOKENIZER = 1
_SAMPLING_SEED, _SAMPLING_IGNORE_EOS, _SAMPLING_LOGPROBS = 1, 2, 4
_TEXT_ADD_SPECIAL, _TEXT_SKIP_SPECIAL = 1, 2

_Progress = ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64)
_TokenIds = ctypes.POINTER(c_uint32)


def _struct(name: str, **fields: Any) -> Type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", c_uint64), *fields.items()]})


# The structs of pagedllm.h, field by field.
_Options = _struct(
    "_Options", model_path=c_char_p, model_path_len=c_uint64, device=c_char_p, device_len=c_uint64, kv_bytes=c_uint64,
    seed=c_uint64, block_size=c_uint32, kv_dtype=c_uint32, max_model_len=c_uint32, max_batch_tokens=c_uint32, max_seqs=c_uint32,
    prefill_chunk=c_uint32, threads=c_uint32, isa=c_uint32, flags=c_uint32, reserved=c_uint32, queue_capacity=c_uint64,
    progress=_Progress, progress_data=c_void_p)
_Sampling = _struct(
    "_Sampling", seed=c_uint64, stop_token_ids=_TokenIds, stop_token_ids_len=c_uint64, stop=ctypes.POINTER(c_char_p),
    stop_lens=ctypes.POINTER(c_uint64), stop_count=c_uint64, temperature=c_float, top_p=c_float, min_p=c_float, top_k=c_uint32,
    max_tokens=c_uint32, min_tokens=c_uint32, flags=c_uint32, reserved=c_uint32)
_Request = _struct(
    "_Request", prompt=c_char_p, prompt_len=c_uint64, prompt_tokens=_TokenIds, prompt_tokens_len=c_uint64,
    sampling=ctypes.POINTER(_Sampling), user_data=c_uint64, n=c_uint32, text_flags=c_uint32, queue=c_void_p)
_Output = _struct(
    "_Output", request=c_uint64, sequence=c_uint64, user_data=c_uint64, tokens=c_void_p, tokens_len=c_uint64, logprobs=c_void_p,
    text=c_void_p, text_len=c_uint64, error=c_void_p, error_len=c_uint64, prompt_tokens=c_uint64, generated_tokens=c_uint64,
    index=c_uint32, finish_reason=c_uint32, error_code=c_int32, reserved=c_uint32)
_Info = _struct(
    "_Info", architecture=c_void_p, architecture_len=c_uint64, isa=c_void_p, isa_len=c_uint64, eos_token_ids=c_void_p,
    eos_token_ids_len=c_uint64, vocab_size=c_uint64, layers=c_uint64, max_positions=c_uint64, max_model_len=c_uint64,
    threads=c_uint64)
_Step, _Stats, _Plan = (
    _struct("_" + record.__name__, **{name: c_double if name == "slot_utilization" else c_uint64 for name in record._fields})
    for record in (Step, Stats, Plan))


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
    functions(None, [pointer, size], "engine_options_init", "sampling_init", "request_init")
    functions(None, [pointer], "engine_free", "queue_free", "outputs_free", "tokens_free", "bytes_free", "error_free")
    functions(pointer, [pointer], "engine_queue", "tokens_data", "bytes_data")
    functions(size, [pointer], "outputs_len", "tokens_len", "bytes_len")
    functions(pointer, [pointer, size], "outputs_get")
    fallible([pointer], "engine_start", "engine_stop")
    fallible([pointer, pointer], "engine_plan", "engine_create", "engine_info", "engine_step", "engine_stats", "queue_event_fd")
    fallible([pointer, size], "engine_abort")
    fallible([pointer, pointer, pointer], "engine_add_request")
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


def _u64(name: str, value: int) -> int:
    if c_uint64(value).value != value:
        raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}: it does not fit into 64 bits without a sign")
    return value


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


_Record = TypeVar("_Record", Step, Stats, Plan)


def _filled(kind: Type[ctypes.Structure], fill: Callable[..., None], argument: Any) -> Any:
    struct = kind(sizeof(kind))
    fill(argument, byref(struct))
    return struct


def _record(kind: Type[_Record], struct: ctypes.Structure) -> _Record:
    return kind(*(getattr(struct, name) for name in kind._fields))


def _c_options(model_path: Union[str, bytes, "os.PathLike[Any]"], device: Optional[str], skip_tokenizer: Optional[bool],
               **numbers: Optional[int]) -> Any:
    options = _Options()
    _lib.pllm_engine_options_init(byref(options), sizeof(options))
    _assign_text(options, "model_path", os.fsencode(model_path))
    if device is not None:
        _assign_text(options, "device", _utf8(device))
    _assign(options, flags=_flag(options.flags, _ENGINE_SKIP_TOKENIZER, skip_tokenizer), **numbers)
    return options


def _c_sampling(sampling: Sampling) -> Any:
    c = _Sampling()
    _lib.pllm_sampling_init(byref(c), sizeof(c))
    flags = _flag(c.flags, _SAMPLING_SEED, None if sampling.seed is None else True)
    flags = _flag(flags, _SAMPLING_IGNORE_EOS, sampling.ignore_eos)
    flags = _flag(flags, _SAMPLING_LOGPROBS, sampling.logprobs)
    _assign(c, temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p, top_k=sampling.top_k,
            max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens, seed=sampling.seed, flags=flags)
    if sampling.stop_token_ids:
        c.stop_token_ids = _token_ids(sampling.stop_token_ids)
        c.stop_token_ids_len = len(sampling.stop_token_ids)
    if sampling.stop:
        stops = [_utf8(stop) for stop in ([sampling.stop] if isinstance(sampling.stop, (str, bytes)) else sampling.stop)]
        c.stop = (c_char_p * len(stops))(*stops)
        c.stop_lens = (c_uint64 * len(stops))(*map(len, stops))
        c.stop_count = len(stops)
    return c


def _c_request(prompt: Prompt, sampling: Optional[Sampling], user_data: Optional[int], n: Optional[int],
               add_special: Optional[bool], skip_special: Optional[bool]) -> Any:
    c = _Request()
    _lib.pllm_request_init(byref(c), sizeof(c))
    if isinstance(prompt, (str, bytes)):
        _assign_text(c, "prompt", _utf8(prompt))
    else:
        c.prompt_tokens = _token_ids(prompt)
        c.prompt_tokens_len = len(prompt)
    if sampling is not None:
        c.sampling = ctypes.pointer(_c_sampling(sampling))
    flags = _flag(_flag(c.text_flags, _TEXT_ADD_SPECIAL, add_special), _TEXT_SKIP_SPECIAL, skip_special)
    _assign(c, user_data=user_data, n=n, text_flags=flags)
    return c


def _py_output(address: int) -> Output:
    c = _Output()
    ctypes.memmove(byref(c), address, min(c_uint64.from_address(address).value, sizeof(c)))  # an older library's is shorter
    return Output(
        request=c.request, text=_text(c.text, c.text_len), tokens=_numbers(c_uint32, c.tokens, c.tokens_len),
        logprobs=_numbers(c_float, c.logprobs, c.tokens_len) if c.logprobs else None,
        finish_reason=FinishReason(c.finish_reason),
        error=Error(c.error_code, _text(c.error, c.error_len)) if c.error_code else None,
        prompt_tokens=c.prompt_tokens, generated_tokens=c.generated_tokens, user_data=c.user_data, sequence=c.sequence,
        index=c.index)


def _completion(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    logprobs = [p for output in outputs for p in output.logprobs or ()]
    return Completion(
        request=last.request, text="".join(output.text for output in outputs),
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=logprobs if any(output.logprobs is not None for output in outputs) else None,
        finish_reason=last.finish_reason, prompt_tokens=last.prompt_tokens)


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
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            outputs = self._poll(math.ceil(min(left_ms, self._POLL_MS)))
            if outputs or left_ms <= self._POLL_MS:
                return outputs

    def _poll(self, timeout_ms: int) -> List[Output]:
        batch = c_void_p()
        with self._handle:
            _lib.pllm_queue_poll(self._pointer, timeout_ms, byref(batch))
        try:
            return [_py_output(_lib.pllm_outputs_get(batch, i)) for i in range(_lib.pllm_outputs_len(batch))]
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


# ---- the engine ------------------------------------------------------------------------------------------------------


def plan(model_path: Union[str, bytes, "os.PathLike[Any]"], *, device: Optional[str] = None,
         skip_tokenizer: Optional[bool] = None, **numbers: Optional[int]) -> Plan:
    """What an Engine with these options would allocate. It reads the model's headers, and allocates nothing of it."""
    options = _c_options(model_path, device, skip_tokenizer, **numbers)
    return _record(Plan, _filled(_Plan, _lib.pllm_engine_plan, byref(options)))


class Engine:
    """One model, its KV pool and its requests. As a context manager it is closed at the end.

    model_path: a model directory as Hugging Face ships it.
    device: where to run; "cpu".
    kv_bytes: bytes of the KV pool.
    threads: threads that compute.
    max_model_len: longest sequence, prompt and output together.
    max_seqs: most sequences running at once.
    max_batch_tokens: most rows (prompt and decode tokens of all sequences) in one step.
    prefill_chunk: most prompt tokens of one sequence in one step.
    block_size: tokens per KV block. kv_dtype: how K and V are stored. isa: an instruction path to force.
    seed: seeds the requests that bring none of their own.
    queue_capacity: outputs that may wait in Engine.queue before its requests pause.
    skip_tokenizer: serve token ids only.
    host_steps: you call step(), or start() later on. Otherwise the library's own thread steps from the start.
    progress: called as progress(done, total), in bytes of weights, now and then. What it raises stops the loading and is raised
        here. It runs on a thread made for the loading: so Ctrl-C stops the loading, too."""

    def __init__(self, model_path: Union[str, bytes, "os.PathLike[Any]"], *, device: Optional[str] = None,
                 kv_bytes: Optional[int] = None, threads: Optional[int] = None, max_model_len: Optional[int] = None,
                 max_seqs: Optional[int] = None, max_batch_tokens: Optional[int] = None, prefill_chunk: Optional[int] = None,
                 block_size: Optional[int] = None, kv_dtype: Optional[DType] = None, isa: Optional[Isa] = None,
                 seed: Optional[int] = None, queue_capacity: Optional[int] = None, skip_tokenizer: Optional[bool] = None,
                 host_steps: bool = False, progress: Optional[Callable[[int, int], Any]] = None) -> None:
        options = _c_options(
            model_path, device, skip_tokenizer, kv_bytes=kv_bytes, threads=threads, max_model_len=max_model_len,
            max_seqs=max_seqs, max_batch_tokens=max_batch_tokens, prefill_chunk=prefill_chunk, block_size=block_size,
            kv_dtype=kv_dtype, isa=isa, seed=seed, queue_capacity=queue_capacity)
        self._handle = _create(options, progress)
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
        """Waits for all that the prompt gives; `request`: further keywords of add(). Ctrl-C, or whatever else ends the wait,
        aborts the request."""
        with contextlib.closing(self.stream(prompt, sampling, **request)) as outputs:
            return _completion(list(outputs))

    def stream(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
               **request: Any) -> Generator[Output, None, None]:
        """Adds a request now, and gives its outputs as they come; `request`: further keywords of add(). It pauses, and no other
        does, while `capacity` outputs wait to be read. Closing the generator, or letting go of it, aborts the request. A request
        whose computation fails raises its Error."""
        return self._read(self._added(capacity, prompt, sampling, request))

    async def agenerate(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Completion:
        """generate() for asyncio. Cancelling it aborts the request."""
        return _completion([output async for output in self.astream(prompt, sampling, **request)])

    def astream(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, capacity: int = _QUEUE_CAPACITY,
                **request: Any) -> AsyncGenerator[Output, None]:
        """stream() for asyncio: waits on the running event loop, without a thread. Cancelling the task that reads aborts the
        request, and so does aclose(); leaving the `async for` does so a turn of the loop later."""
        return self._aread(self._added(capacity, prompt, sampling, request))

    def add(self, prompt: Prompt, sampling: Optional[Sampling] = None, *, queue: Optional[Queue] = None,
            user_data: Optional[int] = None, n: Optional[int] = None, add_special: Optional[bool] = None,
            skip_special: Optional[bool] = None) -> int:
        """Adds a request and returns its id. Its outputs go to `queue`, by default Engine.queue.

        add_special: let the tokenizer add its special tokens, such as BOS; False for a prompt that render_chat wrote.
        skip_special: leave special tokens out of the text. user_data: comes back in every output. n: sequences to generate."""
        request = _c_request(prompt, sampling, user_data, n, add_special, skip_special)
        added = c_uint64()
        queue = self.queue if queue is None else queue
        with self._handle as engine, queue._handle:
            request.queue = queue._pointer
            _lib.pllm_engine_add_request(engine, byref(request), byref(added))
        return added.value

    def abort(self, request: int) -> None:
        """Ends a request at the next step; its last output says FinishReason.ABORT. One that has ended is Code.NOT_FOUND."""
        with self._handle as engine:
            _lib.pllm_engine_abort(engine, _u64("request", request))

    def _added(self, capacity: int, prompt: Prompt, sampling: Optional[Sampling], request: Mapping[str, Any]) -> Queue:
        queue = self.create_queue(capacity)
        self.add(prompt, sampling, queue=queue, **request)
        return queue

    def _read(self, queue: Queue) -> Generator[Output, None, None]:
        with queue:
            while True:
                for output in queue.poll():
                    if output.error is not None:
                        raise output.error
                    yield output
                    if output.finish_reason:
                        return

    async def _aread(self, queue: Queue) -> AsyncGenerator[Output, None]:
        with queue:
            while True:
                for output in queue.poll(0):
                    if output.error is not None:
                        raise output.error
                    yield output
                    if output.finish_reason:
                        return
                await queue._readable()

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
        "messages" and what else the template reads. Add the result with add_special=False."""
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
                max_positions=c.max_positions, max_model_len=c.max_model_len, threads=c.threads)

    def stats(self) -> Stats:
        """Counts since the engine was made, and the state after its last step."""
        with self._handle as engine:
            return _record(Stats, _filled(_Stats, _lib.pllm_engine_stats, engine))


def _create(options: Any, progress: Optional[Callable[[int, int], Any]]) -> _Handle:
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
        _lib.pllm_engine_create(byref(options), byref(made))
        return _Handle("engine", made.value or 0, _lib.pllm_engine_free)

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


def _taken(text: c_void_p) -> str:
    try:
        return _text(_lib.pllm_bytes_data(text), _lib.pllm_bytes_len(text))
    finally:
        _lib.pllm_bytes_free(text)
