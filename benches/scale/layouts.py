"""All layouts of a number of devices, and the best of them."""

from step import Layout, capacity, decode, prefill, prefill_rate


def divides(model, tensor):
    return model.attention.heads % tensor == 0 and model.mlp_width % tensor == 0


def layouts(model, machine, devices, across_nodes=False):
    """Tensor parallel devices are in one node, unless `across_nodes`."""
    found = []
    for stages in (
        count for count in range(1, devices + 1) if devices % count == 0 and count <= model.layers
    ):
        group = devices // stages
        if divides(model, group) and (group <= machine.node or across_nodes):
            found.append(Layout(tensor=group, pipeline=stages))
        if model.experts and group > 1 and model.experts.count % group == 0:
            found.append(Layout(pipeline=stages, data=group))
    return found


def fitting(model, machine, devices, context, across_nodes=False):
    """The layouts whose KV pools hold at least one sequence."""
    all_layouts = layouts(model, machine, devices, across_nodes)
    return [
        layout
        for layout in all_layouts
        if capacity(model, machine, layout) >= context * layout.data
    ]


def most_sequences(model, machine, layout, context, limit):
    """The most sequences that fit in the KV pool and whose step takes at most `limit` seconds."""
    unit = layout.pipeline * layout.data
    low, high = 0, int(capacity(model, machine, layout) / context / unit)
    while low < high:
        middle = (low + high + 1) // 2
        if decode(model, machine, layout, middle * unit, context).seconds <= limit:
            low = middle
        else:
            high = middle - 1
    return low * unit


def fastest(model, machine, devices, context, across_nodes=False):
    """Returns the layout and the step in which one sequence waits least for a token, or None."""
    steps = [
        (layout, decode(model, machine, layout, 1, context))
        for layout in fitting(model, machine, devices, context, across_nodes)
    ]
    return min(steps, key=lambda pair: pair[1].seconds, default=None)


def largest_rate(model, machine, devices, context, limit):
    """Returns the layout, its sequences and the step with the most tokens per second, or None."""
    best = None
    for layout in fitting(model, machine, devices, context):
        sequences = most_sequences(model, machine, layout, context, limit)
        if sequences == 0:
            continue
        step = decode(model, machine, layout, sequences, context)
        if best is None or step.rate > best[2].rate:
            best = layout, sequences, step
    return best


def fastest_prompt(model, machine, devices, tokens):
    """Returns the layout and the time of a prompt that waits least for its first token, or None."""
    steps = [
        (layout, prefill(model, machine, layout, tokens))
        for layout in fitting(model, machine, devices, tokens)
    ]
    return min(steps, key=lambda pair: pair[1].seconds, default=None)


def largest_prompt_rate(model, machine, devices, prompt):
    """Returns the layout and the prompt tokens per second of the fastest one, or None."""
    rates = [
        (layout, prefill_rate(model, machine, layout, prompt))
        for layout in fitting(model, machine, devices, prompt)
    ]
    return max(rates, key=lambda pair: pair[1], default=None)
