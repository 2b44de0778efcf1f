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
