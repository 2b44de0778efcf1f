class ResponseParser:
    """Separates reasoning, content and tool calls of one response while it is generated.

    engine: The model's engine. None: format must be given. The parser does not need it later.
    format: How the model writes reasoning and tool calls: one of build_info()["response_formats"].
        "auto": the format that the model's chat template shows.
    prompt: The rendered prompt. If it ends with the opening tag of the reasoning, the response
        begins inside of the reasoning.
    tools: The tools that the prompt contains, as OpenAI's API defines them. Formats whose arguments
        have no quotes take from them which arguments are strings.
    tool_call_id_prefix: Precedes the index of a call in its id, unless the model writes an id.

    Feed it the texts of a request with skip_special=False. A with statement closes it at its end.
    """

    def __init__(self, engine: Optional[Engine] = None, *, format: str = "auto", prompt: str = "",
                 tools: Optional[Sequence[Mapping[str, Any]]] = None, tool_call_id_prefix: str = "call_") -> None:
        settings = {"format": format, "prompt": prompt, "tools": tools, "tool_call_id_prefix": tool_call_id_prefix}
        utf8, created = json.dumps(settings).encode(), c_void_p()
        if engine is None:
            _lib.pllm_response_parser_create(None, utf8, len(utf8), byref(created))
        else:
            with engine._handle as pointer:
                _lib.pllm_response_parser_create(pointer, utf8, len(utf8), byref(created))
        self._handle = _Handle("parser", created.value or 0, _lib.pllm_response_parser_free)

    def feed(self, text: str) -> List[Dict[str, Any]]:
        """Parse the next piece. Return its deltas, as a chat completion streams them.

        A delta is {"content": ...}, {"reasoning_content": ...} or {"tool_calls": [...]}.
        """
        utf8, deltas = text.encode(), c_void_p()
        with self._handle as parser:
            _lib.pllm_response_parser_feed(parser, utf8, len(utf8), byref(deltas))
        return json.loads(_taken(deltas))

    def finish(self) -> List[Dict[str, Any]]:
        """End the response. Return the deltas of the text that was held back."""
        deltas = c_void_p()
        with self._handle as parser:
            _lib.pllm_response_parser_finish(parser, byref(deltas))
        return json.loads(_taken(deltas))

    def close(self) -> None:
        """Free the parser. It may be called more than once."""
        self._handle.close()

    def __enter__(self) -> "ResponseParser":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
