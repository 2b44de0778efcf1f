"""The time of a step: what each stage of a pipeline computes, reads and exchanges."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import collectives

SUM_BYTES = 4.0  # of a number in a sum and in a hidden state: activations are f32
KV_BYTES = 2.0
TABLE_BYTES = 2.0  # of a number of the embedding and the head
LOGIT_BYTES = 4.0
DISPATCH_BYTES = 1.0 + 4.0 / 128  # of a number sent to an expert: fp8, a scale per 128 numbers
COMBINE_BYTES = 2.0  # of a number of an expert's result
MEMORY_SHARE = 0.9  # of a device, for weights and the KV pool
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Layout:
    """`tensor` devices share each layer, and `pipeline` stages have different layers. With `data`
    devices, attention is replicated, each device has its own sequences, and the experts are divided
    among all of them."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def stage_devices(self):
        return self.tensor * self.data

    @property
    def devices(self):
        return self.stage_devices * self.pipeline

    def __str__(self):
        group = (
            f"EP {self.data}" if self.data > 1 else f"TP {self.tensor}" if self.tensor > 1 else ""
        )
        stages = f"PP {self.pipeline}" if self.pipeline > 1 else ""
        return " x ".join(part for part in (group, stages) if part) or "one device"


class Parts(NamedTuple):
    """Seconds."""

    products: float = 0.0  # with weights: computing, or reading the weights
    attention: float = 0.0  # computing, or reading K and V
    fixed: float = 0.0
    communication: float = 0.0

    def plus(self, other, times=1):
        return Parts(*(a + times * b for a, b in zip(self, other)))

    def total(self):
        return sum(self)


class Stage(NamedTuple):
    plain: int  # layers without experts
    expert: int  # layers with experts
    first: bool
    last: bool

    @property
    def layers(self):
        return self.plain + self.expert


class Work(NamedTuple):
    """What a stage computes at once. `local`: on the device that has the most."""

    tokens: float
    local_tokens: float
    local_pairs: float  # of a token and a visible position
    local_positions: float  # whose K and V are read
    local_sequences: float
    logits: float
    is_decode: bool


def stages(model, layout):
    """Divides the layers. If possible, the first and the last stage get no extra layer, since they
    have the tables."""
    count = layout.pipeline
    least, extra = divmod(model.layers, count)
    order = sorted(range(count), key=lambda stage: (stage in (0, count - 1), stage))
    result, begin = [], 0
    for number in range(count):
        end = begin + least + (number in order[:extra])
        plain = max(0, min(end, model.plain_layers) - begin)
        result.append(Stage(plain, end - begin - plain, number == 0, number == count - 1))
        begin = end
    return result


def attention_numbers(model, layout):
    """Numbers of weights of a layer's attention on a device. A device has at least one KV head."""
    attention = model.attention
    return attention.split / layout.tensor + attention.per_kv_head * max(
        1.0, attention.kv_heads / layout.tensor
    )


def kv_bytes(model, layout):
    """Bytes of the cache per token and layer on a device."""
    return KV_BYTES * model.attention.kv_width * max(1.0, model.attention.kv_heads / layout.tensor)


def weight_bytes(model, layout, stage):
    """Bytes of the weights of a stage on a device."""
    numbers = (
        stage.layers * attention_numbers(model, layout) + stage.plain * model.mlp / layout.tensor
    )
    if stage.expert:
        experts = model.experts
        numbers += stage.expert * (experts.router + experts.shared / layout.tensor)
        numbers += stage.expert * experts.size * experts.count / layout.stage_devices
    tables = stage.first + (stage.last and not (model.tied and stage.first))
    return numbers * model.weight_bytes + tables * TABLE_BYTES * model.table / layout.tensor


def capacity(model, machine, layout):
    """Tokens that the KV pools of all devices hold. Negative: the weights do not fit."""

    def tokens(stage):
        pool = machine.memory * MEMORY_SHARE - weight_bytes(model, layout, stage)
        return pool / (stage.layers * kv_bytes(model, layout))

    return layout.data * min(tokens(stage) for stage in stages(model, layout))


def product(machine, numbers, read, tokens, bytes_each, has_8bit=False):
    """Multiplies `tokens` tokens by `numbers` weights each, and reads `read` weights."""
    flops = machine.flops_8bit if has_8bit else machine.flops
    return max(read * bytes_each / machine.bandwidth, 2 * numbers * tokens / flops)


def routed_bytes(model, machine, layout, work):
    """Copies of local tokens that go to experts of the same node and of other nodes."""
    devices, experts = layout.data, model.experts
    near = (min(devices, machine.node) - 1) / devices
    far = 1 - near - 1 / devices
    copies = experts.active * far
    if not work.is_decode and far:
        # A long batch sends a token once to each node, whose devices pass it on.
        nodes = devices / machine.node
        copies = min(copies, min(experts.max_nodes, nodes) * (nodes - 1) / nodes)
        near = (machine.node - 1) / machine.node
    numbers = work.local_tokens * model.hidden
    return numbers * experts.active * near, numbers * copies


def expert_time(model, machine, layout, work):
    """The MLP of a layer with experts: products and communication."""
    experts, group = model.experts, layout.stage_devices
    has_8bit = model.weight_bytes == 1 and machine.flops_8bit > 0

    def multiply(numbers, read, tokens):
        return product(machine, numbers, read, tokens, model.weight_bytes, has_8bit)

    shared = experts.router + experts.shared / layout.tensor
    own = experts.size * experts.count / group
    # Each token selects its experts evenly.
    touched = 1 - (1 - experts.active / experts.count) ** work.tokens
    routed = experts.size * experts.active / group
    products = multiply(shared, shared, work.local_tokens) + multiply(
        routed, own * touched, work.tokens
    )
    if layout.data == 1:
        return products, 0.0
    near, far = routed_bytes(model, machine, layout, work)
    sent = sum(
        collectives.exchange(machine, near * size, far * size)
        for size in (DISPATCH_BYTES, COMBINE_BYTES)
    )
    return products, sent


def layer_time(model, machine, layout, work, has_experts):
    has_8bit = model.weight_bytes == 1 and machine.flops_8bit > 0
    numbers = attention_numbers(model, layout)
    products = product(machine, numbers, numbers, work.local_tokens, model.weight_bytes, has_8bit)
    communication = 0.0
    if has_experts:
        products_of_experts, communication = expert_time(model, machine, layout, work)
        products += products_of_experts
    else:
        mlp = model.mlp / layout.tensor
        products += product(machine, mlp, mlp, work.local_tokens, model.weight_bytes, has_8bit)
    communication += 2 * collectives.ordered_sum(
        machine, layout.tensor, SUM_BYTES * work.tokens * model.hidden
    )
    pair = model.attention.decode_flops if work.is_decode else model.attention.prefill_flops
    reading = work.local_positions * kv_bytes(model, layout) / machine.bandwidth
    computing = work.local_pairs * pair / layout.tensor / machine.flops
    fixed = machine.layer + machine.expert_layer * has_experts
    if work.is_decode:
        fixed += machine.sequence_layer * work.local_sequences
    return Parts(products, max(reading, computing), fixed, communication)


def plan_bytes(tokens, sequences, context):
    """Bytes of a batch as plain data (src/types/batch): token, position and slot of each token;
    span, row of logits, placeholder and block table of each sequence."""
    return tokens * 12 + sequences * (12 + 4 + 8 + 4 * math.ceil(context / BLOCK_SIZE))


def stage_time(model, machine, layout, stage, work, plan=0.0):
    time = Parts()
    if stage.plain:
        time = time.plus(layer_time(model, machine, layout, work, False), stage.plain)
    if stage.expert:
        time = time.plus(layer_time(model, machine, layout, work, True), stage.expert)
    if stage.first:
        sent = collectives.broadcast(machine, layout.devices, plan)
        sent += collectives.ordered_sum(
            machine, layout.tensor, SUM_BYTES * work.tokens * model.hidden
        )
        time = time.plus(Parts(fixed=machine.step, communication=sent))
    if stage.last:
        table = model.table / layout.tensor
        rows = work.logits / layout.data
        gathered = collectives.to_all(
            machine, layout.tensor, LOGIT_BYTES * rows * model.vocab / layout.tensor
        )
        time = time.plus(
            Parts(
                products=product(machine, table, table, rows, TABLE_BYTES), communication=gathered
            )
        )
    return time


def hop(model, machine, layout, stage, work):
    """Sends the hidden states to the next stage. Each device sends all those that it has."""
    if layout.pipeline == 1:
        return 0.0
    size = SUM_BYTES * work.local_tokens * model.hidden
    crosses = (stage + 1) * layout.stage_devices % machine.node == 0
    return collectives.exchange(machine, 0 if crosses else size, size if crosses else 0)


class Step(NamedTuple):
    seconds: (
        float  # from a token of a sequence to its next one, or from a prompt to its first token
    )
    parts: Parts
    rate: float  # tokens per second

    def communication_share(self):
        return self.parts.communication / self.seconds


def passes(model, machine, layout, work, plan):
    """Times of all stages with the hop to the next one."""
    divided = stages(model, layout)
    times = [stage_time(model, machine, layout, stage, work, plan) for stage in divided]
    last = len(times) - 1
    return [
        (
            time
            if number == last
            else time.plus(Parts(communication=hop(model, machine, layout, number, work)))
        )
        for number, time in enumerate(times)
    ]


def decode(model, machine, layout, sequences, context):
    """A step of all sequences. A pipeline has as many batches in flight as stages."""
    groups = min(layout.pipeline, sequences)
    each = sequences / groups
    local = max(1.0, each / layout.data)
    work = Work(each, local, local * context, local * context, local, each, True)
    times = passes(model, machine, layout, work, plan_bytes(each, each, context))
    through = sum(time.total() for time in times)
    slowest = max(time.total() for time in times)
    seconds = max(through, groups * slowest)
    parts = Parts(*(sum(column) for column in zip(*times)))
    return Step(seconds, parts, sequences / seconds)


def prefill(model, machine, layout, tokens):
    """One prompt on an idle machine. A pipeline computes it in the fastest number of chunks."""

    def chunked(chunks):
        each = tokens / chunks
        pairs = tokens * (tokens + 1) / 2 / chunks
        work = Work(each, each, pairs, tokens / 2, 1, 1, False)
        times = passes(model, machine, layout, work, plan_bytes(each, 1, tokens))
        seconds = sum(time.total() for time in times) + (chunks - 1) * max(
            time.total() for time in times
        )
        parts = Parts(*(chunks * sum(column) for column in zip(*times)))
        return Step(seconds, parts, tokens / seconds)

    counts = [
        2**power for power in range(7) if layout.pipeline > 1 and tokens >= 128 << power
    ] or [1]
    return min((chunked(count) for count in counts), key=lambda step: step.seconds)


def prefill_rate(model, machine, layout, prompt, tokens=8192):
    """Tokens per second of prompts without a pause. Each group of devices with its own sequences
    computes `tokens` tokens at once."""
    work = Work(
        tokens * layout.data,
        tokens,
        tokens * prompt / 2,
        tokens / 2,
        tokens / prompt,
        layout.data * tokens / prompt,
        False,
    )
    times = passes(model, machine, layout, work, plan_bytes(work.tokens, work.logits, prompt))
    return work.tokens / max(time.total() for time in times)
