"""libpagedllm for Python: LLM serving inside your own process.

This is a wrapper over ctypes. It needs nothing except the library.
`python -m pagedllm --help` shows its command line.

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
in the folder of this package; target/release of the repository, or lib of the installation, that
contains this package; and libpagedllm.so.1, as the system's loader finds it.
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
from dataclasses import dataclass, field, fields
from typing import (Any, AsyncGenerator, Callable, ContextManager, Dict, Generator, Iterable, List, Mapping, NamedTuple, Optional,
                    Sequence, Tuple, Type, TypeVar, Union)

__all__ = ["Admission", "Allocation", "Batching", "Beam", "Budget", "BudgetInfo", "Code", "Communicator", "Completion", "DType", "Dry",
           "EarlyStopping", "Engine", "Error", "FinishReason", "Grammar", "Isa", "KvStore", "LogitsHook", "Logprob", "ModelInfo", "Order",
           "Output", "OutputKind", "Packed", "Plan", "Preemption", "Queue", "Sampling", "SequenceInfo", "Stats", "Step", "StopReason",
           "Weights", "build_info", "plan", "run_worker", "version"]
