"""Machines: nodes of devices with links inside of a node and a network between nodes."""

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEVICES = HERE.parent / "simulation" / "machines"
DATA = json.loads((HERE / "machines.json").read_text())


@dataclass(frozen=True)
class Machine:
    """Rates are those that kernels and links reach, in bytes or operations per second. Times are in
    seconds."""

    name: str
    memory: float  # bytes of a device
    bandwidth: float  # of the memory
    flops: float  # in 16 bits
    flops_8bit: float  # 0: the device has none
    link: float  # to devices of the same node, in one direction
    network: float  # to devices of other nodes, in one direction, per device
    link_latency: float  # of an exchange between devices of a node
    network_latency: float  # of an exchange between nodes
    step: float  # per step: neither reads nor computes
    layer: float  # per layer: neither reads nor computes
    expert_layer: float  # in addition, per layer with experts
    sequence_layer: float  # per layer and sequence of a decode step
    node: int = 8  # devices of a node


def load(name):
    """Reads the device of the simulator, and from machines.json what the simulator lacks."""
    if name not in DATA["machines"]:
        raise ValueError(f"machine {name} is unknown; use one of {', '.join(DATA['machines'])}")
    own, kernels, links = DATA["machines"][name], DATA["kernels"], DATA["links"]
    device = json.loads((DEVICES / f"{own.get('device', name)}.json").read_text())
    return Machine(
        name=name,
        memory=device["memory_bytes"],
        bandwidth=device["memory_bandwidth"] * kernels["bandwidth_share"],
        flops=device["flops"] * kernels["flops_share"],
        flops_8bit=own["flops_8bit"] * kernels["flops_8bit_share"],
        link=own.get("link_bandwidth", device["link_bandwidth"]) * links["share"],
        network=own["network_bandwidth"] * links["share"],
        link_latency=links["link_latency_us"] * 1e-6,
        network_latency=links["network_latency_us"] * 1e-6,
        step=kernels["step_us"] * 1e-6,
        layer=kernels["layer_us"] * 1e-6,
        expert_layer=kernels["expert_layer_us"] * 1e-6,
        sequence_layer=kernels["sequence_layer_us"] * 1e-6,
    )
