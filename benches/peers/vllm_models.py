#!/usr/bin/env python3
"""Converts a model for vLLM: `vllm_models.py FROM TO int8|int4`, in the layout of compressed-tensors. int8: one scale per output, activations
quantized at run time. int4: symmetric, one scale per group of 128. Embedding and head stay in bf16: vLLM quantizes neither on CPUs."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 128
PER_WORD = 8  # 4-bit numbers per int32


def int8(name, weight):
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale.bfloat16()}


def int4(name, weight):
    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // GROUP, GROUP)
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    integers = (groups / scale).round().to(torch.int32).view(outputs, inputs) + 8
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32)
    packed = (integers.view(outputs, inputs // PER_WORD, PER_WORD) << shifts).sum(dim=2, dtype=torch.int32)
    shape = torch.tensor([outputs, inputs])
    return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale.squeeze(2).bfloat16(), f"{name}.weight_shape": shape}


FORMATS = {
    "int8": (int8, "int-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "int4": (int4, "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None),
}


def main(source, target, format):
    quantize, layout, weights, activations = FORMATS[format]
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        matrix = name.removesuffix(".weight")
        tensors |= quantize(matrix, tensor.float()) if matrix.endswith("_proj") else {name: tensor}
    integers = {"type": "int", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**integers, **weights}, "input_activations": activations and {**integers, **activations}}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
