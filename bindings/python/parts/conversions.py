# ---- conversions between C and Python ------------------------------------------------------------


def _unsigned(kind: Any, name: str, value: int) -> int:
    """Return the value. Without the check, ctypes would truncate it."""
    if kind(value).value != value:
        raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}; must be 0 to {kind(-1).value}")
    return value


def _u32(name: str, value: int) -> int:
    return _unsigned(c_uint32, name, value)


def _u64(name: str, value: int) -> int:
    return _unsigned(c_uint64, name, value)


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


def _defaults(kind: Type[ctypes.Structure], init: Callable[..., None]) -> Any:
    """Return a struct with the library's defaults."""
    struct = kind()
    init(byref(struct), sizeof(struct))
    return struct


def _assign(struct: ctypes.Structure, name: str, value: Any) -> None:
    """Set a field unless the value is None. Without the check, ctypes would truncate integers."""
    if value is None:
        return
    setattr(struct, name, value)
    if isinstance(value, int) and getattr(struct, name) != value:
        raise Error(Code.INVALID_ARGUMENT, f"{name} is {value}; {_range(struct, name)}")


def _range(struct: ctypes.Structure, name: str) -> str:
    """Describe the values of a field."""
    kind = dict(struct._fields_)[name]
    if kind in (c_float, c_double):
        return "it must be a float"
    bits = 8 * sizeof(kind)
    signed = kind(-1).value < 0
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return f"must be {low} to {high}"


def _assign_text(struct: Any, name: str, text: Optional[Text]) -> None:
    if text is not None:
        utf8 = _utf8(text)
        setattr(struct, name, utf8)
        setattr(struct, name + "_len", len(utf8))


def _assign_path(struct: Any, name: str, path: Optional[Path]) -> None:
    _assign_text(struct, name, None if path is None else os.fsencode(path))


def _assign_texts(struct: Any, name: str, lens: str, count: str, texts: Union[Text, Sequence[Text], None]) -> None:
    if texts is not None:
        utf8 = [_utf8(text) for text in ([texts] if isinstance(texts, (str, bytes)) else texts)]
        setattr(struct, name, (c_char_p * len(utf8))(*utf8))
        setattr(struct, lens, (c_uint64 * len(utf8))(*map(len, utf8)))
        setattr(struct, count, len(utf8))


def _assign_array(struct: Any, name: str, values: Any) -> None:
    setattr(struct, name, values)
    setattr(struct, name + "_len", len(values))


def _assign_tokens(struct: Any, name: str, tokens: Sequence[int]) -> None:
    if tokens:
        _assign_array(struct, name, _token_ids(name, tokens))


def _assign_token_lists(struct: Any, name: str, lists: Sequence[Sequence[int]]) -> None:
    if lists:
        arrays = [_token_ids(name, tokens) for tokens in lists]
        values = (_TokenList * len(arrays))()
        for value, tokens in zip(values, arrays):
            _assign_array(value, "tokens", tokens)
        _assign_array(struct, name, values)


def _assign_logit_bias(struct: Any, name: str, biases: Optional[Mapping[int, float]]) -> None:
    if biases:
        values = (_LogitBias * len(biases))()
        for value, (token, bias) in zip(values, biases.items()):
            if c_uint32(token).value != token:
                raise Error(Code.INVALID_ARGUMENT, f"a token id of {name} is {token}; must be 0 to {2**32 - 1}")
            _assign(value, "token", token)
            _assign(value, "bias", bias)
        _assign_array(struct, name, values)


def _assign_prompt(struct: Any, name: str, prompt: Prompt) -> None:
    if isinstance(prompt, (str, bytes)):
        _assign_text(struct, name, prompt)
    else:
        name += "_token_ids"
        _assign_array(struct, name, _token_ids(name, prompt))


def _assign_grammar(struct: Any, name: str, grammar: Optional[Grammar]) -> None:
    if grammar is not None:
        _assign(struct, name + "_kind", grammar.kind)
        _assign_text(struct, name, grammar.text)
        _assign_texts(struct, "choices", "choice_lens", "choice_count", grammar.choices)


def _assign_deadline(struct: Any, name: str, seconds: Optional[float]) -> None:
    if seconds is None:
        return
    if not 0 < seconds < 2**63 / 1000:  # in C, 0 means no deadline
        raise Error(Code.INVALID_ARGUMENT, f"deadline is {seconds}; pass the remaining seconds, or None for no deadline")
    _assign(struct, name, math.ceil(seconds * 1000))


def _assign_struct(struct: Any, name: str, convert: Callable[[Any], Any], value: Any) -> None:
    if value is not None:
        setattr(struct, name, ctypes.pointer(convert(value)))


def _assign_flag(struct: Any, name: str, flag: int, on: Optional[bool]) -> None:
    """Set or clear a flag. None leaves it unchanged."""
    if on is not None:
        flags = getattr(struct, name)
        setattr(struct, name, flags | flag if on else flags & ~flag)


def _given(value: Any) -> Optional[bool]:
    return None if value is None else True


def _inverted(on: Optional[bool]) -> Optional[bool]:
    return None if on is None else not on


# generated: setters


def _text(address: Optional[int], length: int) -> str:
    return ctypes.string_at(address, length).decode() if address else ""


def _numbers(kind: Any, address: Optional[int], length: int) -> List[Any]:
    return (kind * length).from_address(address)[:] if address else []


def _hash(address: Optional[int]) -> Optional[bytes]:
    return ctypes.string_at(address, 32) if address else None


_Member = TypeVar("_Member", bound=enum.IntEnum)


def _member(kind: Type[_Member], value: int) -> Any:
    """Return the member, or the number if only a newer library knows it."""
    try:
        return kind(value)
    except ValueError:
        return value


def _logprobs(address: Optional[int], length: int) -> Optional[List[float]]:
    return _numbers(c_float, address, length) if address else None


def _top_logprobs(address: Optional[int], length: int, tokens: int) -> Optional[List[List[Logprob]]]:
    """Return the alternatives, the same number for each of the tokens."""
    if not address:
        return None
    flat = [Logprob(one.token, one.logprob) for one in (_Logprob * length).from_address(address)]
    each = length // tokens
    return [flat[i:i + each] for i in range(0, length, each)]


def _py_error(c: Any) -> Optional[Error]:
    return Error(c.error_code, _text(c.error, c.error_len)) if c.error_code else None


# generated: readers


def _record(kind: Any, address: int) -> Any:
    c = kind()
    # The struct of an older library is shorter.
    ctypes.memmove(byref(c), address, min(c_uint64.from_address(address).value, sizeof(c)))
    return c


def _output(address: int) -> Output:
    return _py_output(_record(_Output, address))


def _state(address: int) -> bytes:
    """Return the state of an exported sequence."""
    c = _record(_Output, address)
    error = _py_error(c)
    if error is not None:
        raise error
    # string_at would truncate the length to an int.
    return bytes((ctypes.c_ubyte * c.sequence_state_len).from_address(c.sequence_state))


_Record = TypeVar("_Record")


def _filled(kind: Type[ctypes.Structure], read: Callable[[Any], _Record], fill: Callable[..., None], *arguments: Any) -> _Record:
    """Return what the library writes to the struct."""
    struct = kind(sizeof(kind))
    fill(*arguments, byref(struct))
    return read(struct)


def _completion(outputs: Sequence[Output], sampling: Optional[Sampling]) -> Completion:
    if sampling is not None and sampling.output_kind == OutputKind.CUMULATIVE:
        outputs = outputs[-1:]

    def joined(name: str) -> Any:
        """Concatenate texts and lists. The other fields are those of the last output."""
        values = [value for value in (getattr(output, name) for output in outputs) if value is not None]
        if values and isinstance(values[0], list):
            return [item for value in values for item in value]
        return "".join(values) if name == "text" else values[-1] if values else None

    return Completion(**{one.name: joined(one.name) for one in fields(Completion)})


def _completions(outputs: Sequence[Output], sampling: Optional[Sampling]) -> List[Completion]:
    """Return one completion for each sequence, by index."""
    by_index: Dict[int, List[Output]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [_completion(by_index[index], sampling) for index in sorted(by_index)]
