"""usage: check_gguf.py [NAME ...] (in an environment with llama-cpp-python 0.3.36, gguf and safetensors)

Prints the largest difference between the expected logits of gguf_NAME/ and those of llama.cpp, for the numbers of the file in F32.
The expectations come from transformers, and make_gguf.py and make_gguf_families.py write the files. So llama.cpp shows whether
these scripts have the names, orders of rows, and keys of its files.
"""

import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from safetensors import safe_open

HERE = Path(__file__).parent


def with_f32(source, target):
    """Writes a copy with all numbers in F32, and without a tokenizer."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *rest = field.types
        writer.add_key_value(name, field.contents(), kind, rest[0] if rest else None)
    writer.add_tokenizer_model("no_vocab")
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            writer.add_vocab_size(numbers.shape[0])
        writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(path, tokens):
    f32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        str(path), n_ctx=len(tokens), logits_all=True, type_k=f32, type_v=f32, verbose=False
    )
    model.eval(tokens)
    return np.array(model.scores[: len(tokens)])


def check(name):
    with safe_open(HERE / name / "expected.safetensors", "np") as expected:
        tokens = expected.get_tensor("tokens").tolist()
        logits = expected.get_tensor("logits")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        with_f32(HERE / name / "model.gguf", path)
        found = logits_of(path, tokens)[-len(logits) :]
    largest = np.abs(found - logits).max()
    print(f"{name}: {largest:.1e} of {np.abs(logits).max():.1f}", flush=True)


if __name__ == "__main__":
    names = sorted(path.parent.name for path in HERE.glob("gguf_*/model.gguf"))
    for name in sys.argv[1:] or names:
        check(name)
