#!/usr/bin/env python3
"""Converts a model for llama.cpp: `llama_cpp_models.py FROM TO.gguf bf16|int8|int4|q4_k_m`. int8 is Q8_0 and int4 is Q4_0, both with one scale per
32 inputs. In int4 the embedding and the head are Q8_0, as in OpenVINO. q4_k_m quantizes a file in bf16 as llama.cpp does."""

import json
import sys
from pathlib import Path

import gguf
import numpy

FORMATS = {"bf16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0, "int4": gguf.GGMLQuantizationType.Q4_0}


def tensors(path):
    """Yields each tensor as (name, numbers in f32)."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.tell()
        for name, about in header.items():
            start, end = about["data_offsets"]
            file.seek(data + start)
            halves = numpy.frombuffer(file.read(end - start), numpy.uint16)
            yield name, (halves.astype(numpy.uint32) << 16).view(numpy.float32).reshape(about["shape"])


def in_pairs(matrix, heads):
    """Reorders rows for RoPE: llama.cpp rotates neighbours, Hugging Face rotates the two halves of a head."""
    rows, inputs = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def write_parameters(writer, config, format):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type({"bf16": gguf.LlamaFileType.MOSTLY_BF16, "int8": gguf.LlamaFileType.MOSTLY_Q8_0, "int4": gguf.LlamaFileType.MOSTLY_Q4_0}[format])


def main(source, target, format):
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(target, "llama", use_temp_file=True)
    write_parameters(writer, config, format)
    for name, numbers in tensors(source / "model.safetensors"):
        kind = FORMATS[format]
        if numbers.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        elif format == "int4" and not name.endswith("_proj.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
        rotated_heads = heads.get(name.split(".")[-2])
        numbers = in_pairs(numbers, rotated_heads) if rotated_heads else numbers
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source, target):
    import llama_cpp as api

    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = api.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), parameters):
        sys.exit(f"llama.cpp could not quantize {source}")


if sys.argv[3] == "q4_k_m":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]))
else:
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
