class Communicator:
    """A rank of a group of processes that compute one model, created by shared_memory().

    Rank 0 is an Engine, and each other rank calls run_worker(). Both take the communicator if they
    succeed, and the library then closes it. If they fail, close it: the other ranks wait for that.

        with Communicator.shared_memory("/dev/shm/my-service", rank, 2) as world:
            options = {"communicator": world, "tensor_parallel": 2}
            if rank > 0:
                run_worker("models/mine", **options)  # returns when rank 0 closes its engine
            else:
                with Engine("models/mine", **options) as engine:
                    print(engine.generate("Once upon a time").text)

    A with statement closes it at its end. This has no effect on an engine or a worker.
    """

    def __init__(self, struct: Any) -> None:
        struct.is_taken = False  # whether it belongs to an engine or a worker

        def close(user_data: int) -> None:
            if not struct.is_taken:
                struct.close(user_data)

        self._struct = struct
        self._handle = _Handle("communicator", struct.user_data, close)

    @classmethod
    def shared_memory(cls, path: Path, rank: int, size: int, timeout: Optional[float] = 60) -> "Communicator":
        """Join a group of processes, or threads, of this host. Wait until all ranks have joined.

        They communicate through shared memory. Rank 0 creates the file at the path, usually below
        /dev/shm, where a file system in memory is. It removes the file when its communicator is
        closed. `timeout` limits the wait, in seconds; None is no limit. If a rank does not join in
        time, the call raises Code.IO. Ctrl-C ends the call; the rank leaves the group when the wait
        has ended.
        """
        name = os.fsencode(path)
        if b"\0" in name:
            raise Error(Code.INVALID_ARGUMENT, "path has a NUL byte; pass a path of a file")
        limit_ms = 0 if timeout is None else max(1, math.ceil(timeout * 1000))  # in C, 0 is no limit
        numbers = _u32("rank", rank), _u32("size", size), _u64("timeout in milliseconds", limit_ms)

        def join() -> "Communicator":
            struct = _Communicator(sizeof(_Communicator))
            _lib.pllm_communicator_shared_memory(name, *numbers, byref(struct))
            return cls(struct)

        return _on_thread("pagedllm-join", join)

    @property
    def rank(self) -> int:
        """Number of this rank, below size."""
        return self._struct.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._struct.size

    def close(self) -> None:
        """Leave the group. No effect on an engine or a worker that has the communicator."""
        self._handle.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Loading:
    """The progress function of a call that loads a model. It can cancel the loading."""

    # After the interpreter has ended, Python ends a thread that calls into it. So no thread of a worker
    # may report progress then.
    _in_use: "weakref.WeakSet[_Loading]" = weakref.WeakSet()

    def __init__(self, progress: Optional[Callable[[int, int], Any]]) -> None:
        self._progress = progress
        # Set while there are no reports: a thread that cannot be started makes none.
        self._finished = threading.Event()
        self._finished.set()
        self._cancelled = False
        self._raised: Optional[BaseException] = None
        self._in_use.add(self)

    def load(self, call: Callable[..., None], options: Any, budget: Optional[Budget],
             communicator: Optional[Communicator], kv_store: Optional[KvStore], *results: Any) -> None:
        """Make the call with the options. If it succeeds, the library has the communicator and the store."""
        options.progress = _Progress(self._report)
        # In this order: finish() cancels first, so it waits for this thread or keeps it from calling.
        self._finished.clear()
        try:
            if self._cancelled:
                raise Error(Code.CANCELLED, "the loading is cancelled")
            with _held(budget), _held(communicator), _offered(kv_store, options):
                options.budget = _pointer(budget)
                if communicator is not None:
                    options.communicator = ctypes.pointer(communicator._struct)
                call(byref(options), *results)
                if communicator is not None:
                    communicator._struct.is_taken = True
        except Error:
            if self._raised is not None:
                raise self._raised
            raise
        finally:
            self._finished.set()

    def cancel(self) -> None:
        self._cancelled = True

    def _report(self, _data: Any, done: int, total: int) -> bool:
        if self._cancelled:
            return True
        try:
            if self._progress is not None:
                self._progress(done, total)
        except BaseException as error:
            self._raised = error
            self.cancel()
        if done == total:
            self._finished.set()
        return self._cancelled

    @classmethod
    def finish(cls) -> None:
        """Cancel each load, and wait until it makes no further report.

        A load that waits for other ranks makes its next report after that wait. So this can take
        worker_timeout_ms. A limit here would let the library call an interpreter that has ended.
        """
        for loading in list(cls._in_use):
            loading.cancel()
            loading._finished.wait()


atexit.register(_Loading.finish)
# A forked child has no thread that loads.
os.register_at_fork(after_in_child=_Loading._in_use.clear)

_Value = TypeVar("_Value")


def _on_thread(name: str, call: Callable[[], _Value]) -> _Value:
    """Return the result of a call on another thread, so that Ctrl-C ends the wait.

    The thread does not delay the end of the process.
    """
    def run(future: "Optional[concurrent.futures.Future[_Value]]") -> None:
        assert future is not None
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            future = None  # the error refers to this frame

    result: "concurrent.futures.Future[_Value]" = concurrent.futures.Future()
    threading.Thread(target=run, args=(result,), name=name, daemon=True).start()
    try:
        return result.result()
    finally:
        del result  # an error refers to this frame
