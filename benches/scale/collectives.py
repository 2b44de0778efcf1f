"""Times of collectives: the latency of each phase, and its bytes over the bandwidth."""

import math


def exchange(machine, near, far):
    """One phase. Each device sends `near` bytes in its node and `far` bytes to other nodes."""
    if near == 0 and far == 0:
        return 0.0
    latency = machine.network_latency if far else machine.link_latency
    return latency + max(near / machine.link, far / machine.network)


def to_all(machine, devices, size):
    """One phase. Each device sends `size` bytes to every other device."""
    near = min(devices, machine.node) - 1
    return exchange(machine, near * size, (devices - 1 - near) * size)


def ordered_sum(machine, devices, size):
    """All-to-all, then all-gather: each device adds one part in the order of the ranks."""
    return 2 * to_all(machine, devices, size / devices)


def gathered_sum(machine, devices, size):
    """All-gather of everything: each device adds everything in the order of the ranks."""
    return to_all(machine, devices, size)


def gathered_sum_limit(machine, devices):
    """The bytes up to which the gathered sum is faster than the ordered sum within a node."""
    phases = machine.link_latency * machine.link
    return phases * devices / ((devices - 1) * (devices - 2)) if devices > 2 else math.inf


def broadcast(machine, devices, size):
    """A tree over the nodes, then one phase within each node."""
    nodes = math.ceil(devices / machine.node)
    hops = math.ceil(math.log2(nodes))
    inside = exchange(machine, size if min(devices, machine.node) > 1 else 0, 0)
    return hops * exchange(machine, 0, size) + inside
