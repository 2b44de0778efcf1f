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
            return _filled(_BudgetInfo, _py_budget_info, _lib.pllm_budget_get_info, self._pointer)

    def close(self) -> None:
        """Free the handle. Its engines keep the budget. No effect on Engine.budget."""
        if not self._borrowed:
            self._handle.close()

    def __enter__(self) -> "Budget":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
