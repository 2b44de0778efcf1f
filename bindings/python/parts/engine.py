# ---- engines -------------------------------------------------------------------------------------


def plan(model_path: Path, *,
         # generated: parameters pllm_engine_options
         ) -> Plan:
    """Compute what an Engine with these options would allocate, without allocating it."""
    c = _c_engine_options(
        model_path=model_path,
        # generated: arguments pllm_engine_options
    )
    with _held(budget):
        c.budget = _pointer(budget)
        return _filled(_Plan, _py_plan, _lib.pllm_engine_plan, byref(c))


class Engine:
    """One model, its KV pool and its requests. A with statement closes it at its end.

    model_path: Model directory in the layout of Hugging Face.
    # generated: documentation pllm_engine_options
    host_steps: If True, call step(), or start() later. If False, a thread of the engine steps it
        from the start.
    progress: Called as progress(done, total) with bytes of weights. An exception cancels the
        loading, and this constructor raises it. The model is loaded on another thread, so that
        Ctrl-C cancels the loading as well. A process that then ends first waits for the loading. If
        the loading waits for other workers, this can take worker_timeout_ms.
    """

    def __init__(self, model_path: Path, *,
                 # generated: parameters pllm_engine_options
                 host_steps: bool = False, progress: Optional[Callable[[int, int], Any]] = None) -> None:
        options = _c_engine_options(
            model_path=model_path,
            # generated: arguments pllm_engine_options
        )
        self._hooks = _Hooks()
        self._handle = _create(options, budget, communicator, kv_store, progress, self._hooks.free_engine)
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

    def add(self, prompt: Prompt, sampling: Optional[Sampling] = None, *,
            # generated: parameters pllm_request
            ) -> int:
        """Add a request and return its id.

        # generated: documentation pllm_request
        """
        added = c_uint64()
        self._ask(
            _lib.pllm_engine_add_request, added, queue=queue, logits_hook=logits_hook, prompt=prompt, sampling=sampling,
            # generated: arguments pllm_request
        )
        return added.value

    def predict_admission(self, prompt: Prompt, sampling: Optional[Sampling] = None, **request: Any) -> Admission:
        """Predict admission and time to first token for a request without adding it.

        The prediction uses the measured step times and the lengths of recent outputs. It assumes
        that the prompt is not in the prefix cache. It raises the errors that add() would raise,
        except for grammars, which are not compiled. `request`: further keywords of add().
        """
        c = _Admission(sizeof(_Admission))
        self._ask(_lib.pllm_engine_predict_admission, c, prompt=prompt, sampling=sampling, **request)
        return _py_admission(c)

    def _ask(self, call: Callable[..., None], answer: Any, *, queue: Optional[Queue] = None,
             logits_hook: Optional[LogitsHook] = None, **request: Any) -> None:
        c = _c_request(**request)
        _assign(c, "logits_hook", self._hooks.callback(logits_hook, self._handle))
        queue = self.queue if queue is None else queue
        with self._handle as engine, queue._handle:
            c.queue = queue._pointer
            call(engine, byref(c), byref(answer))

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

    def fork(self, sequence: int, n: int = 1, *,
             # generated: parameters pllm_fork
             ) -> List[int]:
        """Create n sequences with the first tokens of a sequence and return their ids.

        They share its KV blocks. Each child is a request of its own, whose id is its sequence id.
        Children of a running sequence run; children of an idle one are idle.

        # generated: documentation pllm_fork
        """
        how = _c_fork(
            n=n,
            # generated: arguments pllm_fork
        )
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

    def resume(self, sequence: int, sampling: Optional[Sampling] = None, *, continue_generation: bool = False,
               # generated: parameters pllm_resume
               ) -> None:
        """Continue an idle sequence.

        Only its last token and the tokens appended since are computed. Counts (max_tokens,
        min_tokens) and penalties start anew.

        continue_generation: Continue as if the sequence had never been idle, with its own sampling,
            counts, grammar and hook. sampling, skip_special and logits_hook must not be given. The
            sequence need not have ended: idle forks and imported sequences continue where they are.
        # generated: documentation pllm_resume
        """
        if continue_generation and not (sampling is skip_special is logits_hook is None):
            raise TypeError("continue_generation keeps the parameters of the sequence; "
                            "leave out sampling, skip_special and logits_hook")
        how = _c_resume(
            sampling=sampling, continue_generation=continue_generation,
            # generated: arguments pllm_resume
        )
        _assign(how, "logits_hook", self._hooks.callback(logits_hook, self._handle))
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
        with self._handle as engine:
            return _filled(_SequenceInfo, _py_sequence_info, _lib.pllm_sequence_get_info, engine, _u64("sequence", sequence))

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

    def pin(self, prompt: Prompt, *,
            # generated: parameters pllm_pin
            ) -> int:
        """Keep a prompt in the prefix cache and return the id of the pin.

        The prompt is computed from the next step on. Requests that begin with the same tokens reuse
        the blocks.

        # generated: documentation pllm_pin
        """
        c = _c_pin(
            prompt=prompt,
            # generated: arguments pllm_pin
        )
        pinned = c_uint64()
        with self._handle as engine:
            _lib.pllm_prefix_pin(engine, byref(c), byref(pinned))
        return pinned.value

    def unpin(self, pin: int) -> None:
        """Unpin a prompt. If the pin has expired or was dropped, raise Code.NOT_FOUND."""
        with self._handle as engine:
            _lib.pllm_prefix_unpin(engine, _u64("pin", pin))

    # -- KV events

    def poll_kv_events(self, timeout: float = 0.0) -> List[KvEvent]:
        """Take the events of the prefix cache since the last call, in their order.

        If there are none, wait up to `timeout` seconds for the first one. Needs kv_events_capacity.
        If more events were not read, the list is that of snapshot_kv_events() instead. A reader that
        applies the events in their order therefore always ends with the blocks that are cached. Two
        threads get different events.
        """
        if not 0 <= timeout < 2**32 / 1000:
            raise Error(Code.INVALID_ARGUMENT, f"timeout is {timeout}; must be 0 to {2**32 // 1000 - 1} seconds")
        return self._kv_events(_lib.pllm_engine_poll_kv_events, math.ceil(timeout * 1000))

    def snapshot_kv_events(self) -> List[KvEvent]:
        """List the blocks of the prefix cache: KvEventKind.CLEARED, and STORED of each block.

        The events that poll_kv_events() returns are not affected.
        """
        return self._kv_events(_lib.pllm_engine_snapshot_kv_events)

    def hash_prompt(self, prompt: Prompt, *, group: int = 0, **request: Any) -> List[bytes]:
        """Compute the hashes of the full blocks of a prompt, as events have them.

        Nothing is added to the engine. `group`: a layer group, below Plan.kv_groups; 0 exists in every
        model. `request`: further keywords of add(), of which only cache_salt, add_special and
        truncate_prompt_tokens are used.
        """
        c, hashes = _c_request(prompt=prompt, sampling=None, **request), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_hash_prompt(engine, byref(c), _u32("group", group), byref(hashes))
        try:
            data = ctypes.string_at(_lib.pllm_bytes_data(hashes), _lib.pllm_bytes_len(hashes))
        finally:
            _lib.pllm_bytes_free(hashes)
        return [data[start:start + 32] for start in range(0, len(data), 32)]

    def _kv_events(self, call: Callable[..., None], *arguments: Any) -> List[KvEvent]:
        batch = c_void_p()
        with self._handle as engine:
            call(engine, *arguments, byref(batch))
        try:
            records = [_lib.pllm_kv_events_get(batch, i) for i in range(_lib.pllm_kv_events_len(batch))]
            return [_py_kv_event(_record(_KvEvent, record)) for record in records]
        finally:
            _lib.pllm_kv_events_free(batch)

    # -- stepping

    def step(self) -> Step:
        """Run one iteration and generate one token for each sequence whose prompt is complete.

        If another thread or the engine's own thread is stepping the engine, the call raises
        Code.BUSY.
        """
        with self._handle as engine:
            return _filled(_Step, _py_step, _lib.pllm_engine_step, engine)

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
            _lib.pllm_engine_tokenize(engine, utf8, len(utf8), _TEXT_ADD_SPECIAL if add_special else 0, byref(tokens))
        try:
            return _numbers(c_uint32, _lib.pllm_tokens_data(tokens), _lib.pllm_tokens_len(tokens))
        finally:
            _lib.pllm_tokens_free(tokens)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Decode token ids as text."""
        ids, text = _token_ids("tokens", tokens), c_void_p()
        with self._handle as engine:
            _lib.pllm_engine_detokenize(engine, ids, len(ids), _TEXT_SKIP_SPECIAL if skip_special else 0, byref(text))
        return _taken(text)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token contributes to a text. They can be a part of a character.

        A special token has its name, and an id that only the model knows has no bytes. The first
        call reads the whole vocabulary. An id that is not below ModelInfo.vocab_size raises
        Code.INVALID_ARGUMENT. With skip_tokenizer, the call raises Code.UNSUPPORTED.
        """
        data, length = c_void_p(), c_uint64()
        with self._handle as engine:
            _lib.pllm_engine_get_token_bytes(engine, _u32("token", token), byref(data), byref(length))
            return ctypes.string_at(data, length.value) if data else b""

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

    # -- health and statistics

    def health(self) -> Optional[Error]:
        """Return None if the engine works, and the Error that has stopped it if it has failed.

        An engine fails after Code.INTERNAL, or if its device was lost. Then all its requests have
        ended, and only a new engine can serve. The call does not wait for a step. If the engine is
        closed, the call raises Code.CLOSED.
        """
        with self._handle as engine:
            try:
                _lib.pllm_engine_health(engine)
            except Error as error:
                if error.code == Code.UNSUPPORTED:  # in a forked child
                    raise
                # The traceback would keep the engine alive as long as the error.
                return error.with_traceback(None)
        return None

    def model_info(self) -> ModelInfo:
        """Return the model and the limits of the engine."""
        with self._handle as engine:
            return _filled(_ModelInfo, _py_model_info, _lib.pllm_engine_get_model_info, engine)

    def stats(self) -> Stats:
        """Return counters since the creation of the engine, and its state after the last step."""
        with self._handle as engine:
            return _filled(_Stats, _py_stats, _lib.pllm_engine_get_stats, engine)

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

    def snapshot(self, max_blocks: Optional[int] = None, max_sequences: Optional[int] = None) -> Dict[str, Any]:
        """Describe the engine after its current step.

        The result says which sequences have which blocks, and what the last steps computed.
        pllm_engine_snapshot in the C header describes the members. It has the first max_blocks
        blocks of each tier and at most max_sequences sequences. None: as many as possible.
        """
        text = c_void_p()
        limits = [2**64 - 1 if limit is None else limit for limit in (max_blocks, max_sequences)]
        with self._handle as engine:
            _lib.pllm_engine_snapshot(engine, *limits, byref(text))
        return json.loads(_taken(text))


def _create(options: Any, budget: Optional[Budget], communicator: Optional[Communicator], kv_store: Optional[KvStore],
            progress: Optional[Callable[[int, int], Any]], free: Callable[[int], None]) -> _Handle:
    """Create an engine on another thread. ctypes would lose a KeyboardInterrupt in the callback."""
    loading = _Loading(progress)

    def load() -> _Handle:
        created = c_void_p()
        loading.load(_lib.pllm_engine_create, options, budget, communicator, kv_store, byref(created))
        return _Handle("engine", created.value or 0, free)

    loader = concurrent.futures.ThreadPoolExecutor(1, "pagedllm-load")
    try:
        return loader.submit(load).result()
    finally:
        loading.cancel()
        loader.shutdown(wait=False)


def run_worker(model_path: Path, *,
               # generated: parameters pllm_engine_options
               progress: Optional[Callable[[int, int], Any]] = None) -> None:
    """Run one of several workers that compute a model with the Engine of rank 0.

    That engine is in another process or thread. The options are those of the engine: the same model
    and formats, and a communicator with another rank. A kv_store is ignored. The call loads this
    worker's part of the model, and returns when the engine is closed. An error ends the engine,
    too: its calls raise Code.INTERNAL.

    progress: As for Engine. Ctrl-C ends the call and cancels the loading, and the end of the process
        waits for it as for that of an engine. A worker that has loaded its part continues on another
        thread, until the engine is closed or this process ends.
    """
    options = _c_engine_options(
        model_path=model_path,
        # generated: arguments pllm_engine_options
    )
    loading = _Loading(progress)
    try:
        _on_thread("pagedllm-worker", lambda: loading.load(_lib.pllm_worker_run, options, budget, communicator, None))
    finally:
        loading.cancel()


def _collected(outputs: Generator[Output, None, None], sampling: Optional[Sampling]) -> List[Completion]:
    with contextlib.closing(outputs):
        return _completions(list(outputs), sampling)


async def _acollected(outputs: AsyncGenerator[Output, None], sampling: Optional[Sampling]) -> List[Completion]:
    return _completions([output async for output in outputs], sampling)


def _refuse_continuation(how: Mapping[str, Any]) -> None:
    if how.get("continue_generation"):
        raise TypeError("continue_generation needs stream_resumed() or astream_resumed()")


def _held(thing: Union[Queue, Budget, Communicator, None]) -> ContextManager[Any]:
    """Keep an object from being freed in a with statement."""
    return contextlib.nullcontext() if thing is None else thing._handle


def _pointer(thing: Union[Queue, Budget, None]) -> Optional[int]:
    return None if thing is None else thing._pointer


def _taken(text: c_void_p) -> str:
    try:
        return _text(_lib.pllm_bytes_data(text), _lib.pllm_bytes_len(text))
    finally:
        _lib.pllm_bytes_free(text)
