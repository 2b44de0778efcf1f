# ---- options -------------------------------------------------------------------------------------

Text = Union[str, bytes]  # bytes are UTF-8
Path = Union[str, bytes, "os.PathLike[Any]"]
Prompt = Union[Text, Sequence[int]]  # text or token ids
Bytes = Union[bytes, bytearray, memoryview]

# Edits the logits of each token before all other sampling parameters: hook(sequence, tokens,
# logits). tokens is a memoryview of the sequence's token ids. logits is a writable memoryview of
# floats, one for each token of the vocabulary; numpy.frombuffer(logits, "f") does not copy it. Both
# are valid only during the call.
#
# The hook runs on the stepping thread and takes the GIL: its time adds to the step of all
# sequences. An exception goes to sys.unraisablehook, and the logits stay as the hook left them. The
# engine keeps the function until it is freed: use one function for many requests. It may call any
# function except step, stop and calls that wait for outputs.
LogitsHook = Callable[[int, memoryview, memoryview], Any]


@dataclass(frozen=True)
class Grammar:
    """A constraint on the output. The methods below create it."""
    kind: int  # PLLM_GRAMMAR_*
    text: Optional[Text] = None
    choices: Sequence[Text] = ()

    @classmethod
    def json_schema(cls, schema: Union[Text, Mapping[str, Any], bool]) -> "Grammar":
        """Allow the JSON texts that the schema describes."""
        return cls(_GRAMMAR_JSON_SCHEMA, schema if isinstance(schema, (str, bytes)) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Allow any JSON object."""
        return cls(_GRAMMAR_JSON_OBJECT)

    @classmethod
    def regex(cls, expression: Text) -> "Grammar":
        """Allow the texts that the regular expression matches as a whole."""
        return cls(_GRAMMAR_REGEX, expression)

    @classmethod
    def choice(cls, choices: Sequence[Text]) -> "Grammar":
        """Allow one of these texts."""
        return cls(_GRAMMAR_CHOICE, choices=choices)

    @classmethod
    def lark(cls, grammar: Text) -> "Grammar":
        """Allow the texts that the Lark grammar describes."""
        return cls(_GRAMMAR_LARK, grammar)


# generated: class pllm_dry


# generated: class pllm_beam


# generated: class pllm_sampling
