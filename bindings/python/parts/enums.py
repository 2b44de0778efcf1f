# ---- enums ---------------------------------------------------------------------------------------


class Code(enum.IntEnum):
    """Code of an error: PLLM_E_*."""
    # generated: members PLLM_E


class FinishReason(enum.IntEnum):
    """Why a sequence ended: PLLM_FINISH_*."""
    # generated: members PLLM_FINISH
    OTHER = -1  # A reason that only a newer library knows.

    @classmethod
    def _missing_(cls, value: object) -> "FinishReason":
        return cls.OTHER


class StopReason(enum.IntEnum):
    """What ended a sequence with FinishReason.STOP: PLLM_STOP_*."""
    # generated: members PLLM_STOP
    OTHER = -1  # A reason that only a newer library knows.

    @classmethod
    def _missing_(cls, value: object) -> "StopReason":
        return cls.OTHER


class Packed(enum.IntEnum):
    """Result of packed_path."""
    # generated: members PLLM_PACKED


class DType(enum.IntEnum):
    """Data type of KV blocks."""
    # generated: members PLLM_DTYPE


class Isa(enum.IntEnum):
    """Instruction path. Results have the same bits within a path, not across paths."""
    # generated: members PLLM_ISA


class Weights(enum.IntEnum):
    """Format of the weights in memory. Fewer bits take less memory and time, and cost quality."""
    # generated: members PLLM_WEIGHTS


class Preemption(enum.IntEnum):
    """Treatment of preempted requests."""
    # generated: members PLLM_PREEMPTION


class Order(enum.IntEnum):
    """Order of the waiting requests."""
    # generated: members PLLM_ORDER


class Batching(enum.IntEnum):
    """Composition of a step."""
    # generated: members PLLM_BATCHING


class Allocation(enum.IntEnum):
    """Number of blocks that a request needs to start."""
    # generated: members PLLM_ALLOCATION


class KvEventKind(enum.IntEnum):
    """What has happened to a block of the prefix cache."""
    # generated: members PLLM_KV_EVENT


class KvMedium(enum.IntEnum):
    """Place of a KV block."""
    # generated: members PLLM_KV_MEDIUM


class OutputKind(enum.IntEnum):
    """Content of each output."""
    # generated: members PLLM_OUTPUT


class EarlyStopping(enum.IntEnum):
    """When a beam search ends."""
    # generated: members PLLM_EARLY_STOPPING
