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
        return self._take(_output, timeout)

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
