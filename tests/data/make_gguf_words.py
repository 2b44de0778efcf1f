"""usage: make_gguf_words.py (in an environment with llama-cpp-python 0.3.36 and gguf)

Writes gguf_words_llama_cpp.json: the words into which llama.cpp cuts texts, for names of `tokenizer.ggml.pre`. The vocabulary has
every part of a text, and the merges have every pair of parts. So each word becomes one token.
"""

import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp

HERE = Path(__file__).parent
NAMES = [
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "poro-chat",
    "bloom",
    "gpt3-finnish",
    "viking",
    "exaone",
    "minerva-7b",
    "gpt-2",
    "llama-bpe",
    "dbrx",
    "qwen2",
    "stablelm2",
    "tekken",
    "gpt-4o",
    "command-r",
    "smollm",
    "starcoder",
]  # not falcon, whose numbers llama.cpp separates in the text, and the published tokenizer in its bytes
TEXTS = [
    "HTTPServer's caféBar 12345, I'LL don't",
    "日本語 テスト2024/x\n\n  !?",
    "a/b//c  \t trailing \r\n",
    "Ελληνικά Українська հայերեն ქართული",
    "«Où? Là…» “dit-il”， 你好。 한국어: ok!",
    "x=f(a,b)[0]; // 3.14 != 2.71",
    "  spaces   at both ends   ",
]


def characters():
    """Returns the character of each byte in tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + index) for index, byte in enumerate(hidden)
    }


def words_of(pre, text, path):
    shown = characters()
    whole = "".join(shown[byte] for byte in text.encode())
    ends = range(len(whole) + 1)
    parts = {whole[first:end] for first in ends for end in ends[first + 1 :]}
    tokens = list(shown.values()) + sorted(part for part in parts if len(part) > 1)
    merges = sorted(
        {(part[:cut], part[cut:]) for part in parts for cut in range(1, len(part))},
        key=lambda pair: (len(pair[0]) + len(pair[1]), pair),
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ids = model.tokenize(text.encode(), add_bos=False, special=False)
    return [tokens[token] for token in ids]


def main():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "words.gguf"
        words = [
            {"pre": pre, "words": [words_of(pre, text, path) for text in TEXTS]} for pre in NAMES
        ]
    document = {"texts": TEXTS, "words": words}
    target = HERE / "gguf_words_llama_cpp.json"
    target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
