# ---- results -------------------------------------------------------------------------------------


class Error(Exception):
    """An error of the library: a stable code, and a message with the numbers and the remedy.

    prompt_tokens: Number of tokens of a prompt that is too long. None for any other error.
    max_model_len: The limit of the engine for which a prompt is too long. None for any other error.
    is_temporary: Whether the same call can succeed later without a change, for example when fewer requests wait.
    """

    def __init__(self, code: int, message: str, prompt_tokens: Optional[int] = None,
                 max_model_len: Optional[int] = None, is_temporary: bool = False) -> None:
        self.code = _member(Code, code)
        self.message = message
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len
        self.is_temporary = is_temporary
        super().__init__(self.code, message)

    def __str__(self) -> str:
        return self.message


class Logprob(NamedTuple):
    """A token and its log probability in the model's own distribution."""
    token: int
    logprob: float


# generated: class pllm_output


# generated: completion


# generated: class pllm_sequence_info


# generated: class pllm_step


# generated: class pllm_stats


# generated: class pllm_admission


# generated: class pllm_budget_info


# generated: class pllm_plan


# generated: class pllm_model_info


# generated: class pllm_kv_event
