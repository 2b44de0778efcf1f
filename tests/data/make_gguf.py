"""usage: make_gguf.py (with the packages of requirements.txt)

Writes gguf_blocks.gguf: a tensor of random blocks for each storage type, and beside each the numbers of the gguf package,
as a tensor "NAME.expected" in F32.
"""

from pathlib import Path

import gguf
import numpy as np

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "F16", "BF16"]
# Bytes of scales and offsets in f16.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "F16": [0]}
NUMBERS = 1024


def blocks(name, random):
    kind = gguf.GGMLQuantizationType[name]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, size=(NUMBERS // block_len, block_bytes), dtype=np.uint8)
    for at in SCALES.get(name, []):
        # All finite scales: large, subnormal, negative.
        bits = random.integers(0, 1 << 16, size=len(data), dtype=np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] &= 0x83FF
        data[:, at:at + 2] = bits[:, None].view(np.uint8)
    if name == "MXFP4":
        data[:, 0] = random.integers(0, 255, size=len(data))
        data[:3, 0] = [0, 1, 254]
    if name == "BF16":
        data[:, 1] &= 0xBF
    rows = data.reshape(1, -1)
    return kind, rows, gguf.quants.dequantize(rows, kind).astype(np.float32)


def main():
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(Path(__file__).parent / "gguf_blocks.gguf", "test")
    writer.add_uint32("test.whole", 7)
    writer.add_float32("test.float", 0.5)
    writer.add_bool("test.flag", True)
    writer.add_string("test.text", "text")
    writer.add_array("test.integers", [-1, 2])
    writer.add_array("test.floats", [0.25, 2.0])
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.texts", ["one", "", "drei"])
    for name in TYPES:
        kind, rows, expected = blocks(name, random)
        writer.add_tensor(name, rows, raw_dtype=kind)
        writer.add_tensor(f"{name}.expected", expected)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
