"""Creates tiny tokenizers and their outputs in the Python packages.

    python make_tokenizers.py

tokenizers/NAME/tokenizer.json   three kinds of tokenizers of hub models
tokenizers/cases.json            [{tokenizer, text, ids, ids_plain, decoded}]: encoded with and
                                 without special tokens, decoded without them; if text is
                                 null, ids are only decoded
tokenizers/chat_cases.json       [{name, template, bos_token, eos_token, messages, tools,
                                 add_generation_prompt, rendered, error}]: error is the message
                                 of the exception of the template (rendered is then null)
"""

import json
import random
from collections import Counter
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from chat_templates import CASES

HERE = Path(__file__).resolve().parent / "tokenizers"
MAX_BYTES = 60_000
ALPHABET = 90
RANDOM_TEXTS = 30
RANDOM_IDS = 15

TEXT = """
The cat sat on the mat, and the other cat watched the rain. It's raining; they'll stay inside.
We've got 12 apples, 345 pears and 6,789 plums. The price is $4.20 or €3.99 - isn't it cheap?
def add(a, b):\n    return a + b\n\nfor i in range(10):\n\tprint(add(i, 1))
El niño comió piñas en el café. Die Straße über den Fluß. Ça va très bien, merci!
今天天气很好，我们去公园吧。日本語のテキストも少しあります。한국어 문장도 있습니다.
Привет, мир! Как дела? Хорошо. שלום עולם. مرحبا بالعالم.
Smile 😀 and wave 👋, wave 👋🏽 again. 😀😀 The family 👨‍👩‍👧‍👦 is here. Rockets 🚀🚀 fly.
"""

CASE_TEXTS = [
    "",
    " ",
    "   three spaces before and two after  ",
    "The cat sat on the mat.",
    "It's raining; THEY'LL stay. We've 12345678 apples!",
    "line one\nline two\r\n\n\tindented\n\n\n",
    "def f(x):\n    return x ** 2  # square",
    "café and cafe\u0301 are two spellings",
    "Z\u0351\u036b\u0343a\u0328\u0301lgo",
    "今天天气很好",
    "東京は unseen 漢字 鬱",
    "한국어 문장, 한\u1100\u1161",
    "Привет, мир! Ёж",
    "שלום مرحبا",
    "😀",
    "👨‍👩‍👧‍👦 family, 👩🏽‍🚀 astronaut, 🏳️‍🌈 flag, 🇨🇭",
    "a😀b👋🏽c",
    "\u0000\u0001\u007f\u0080\u00ad\u200b\ufeff\ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 and 𐍈",
    "no▁break▁here ▁ and <0x41> as text",
    "<s>special</s> inside <|begin|>and<|end|>",
    "ﬁne ½ ² ℃ １２３",
]


# --- the tokenizers -------------------------------------------------------------


def begin_with(token, token_id):
    return TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


def byte_level():
    """As in GPT-2 and Llama 3: each byte is a letter, and an expression splits words."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.post_processor = begin_with("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    return tokenizer


def common_letters(text):
    """Returns the text without its rarer letters, which then need byte tokens.

    The limit_alphabet of the trainer selects randomly among equally rare letters.
    """
    counts = Counter(text)
    common = set(sorted(counts, key=lambda letter: (-counts[letter], letter))[:ALPHABET])
    return "".join(letter for letter in text if letter in common)


def sentencepiece_model():
    """A BPE with byte fallback and the first ids of Llama 2."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = BpeTrainer(vocab_size=200, show_progress=False)
    learner.train_from_iterator(common_letters(TEXT).splitlines(keepends=True), trainer)
    learned = json.loads(learner.to_str())["model"]
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {piece: i for i, piece in enumerate(first + pieces)}
    merges = [tuple(merge) for merge in learned["merges"]]
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def sentencepiece():
    tokenizer = Tokenizer(sentencepiece_model())
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = begin_with("<s>", tokenizer.token_to_id("<s>"))
    return tokenizer


def llama2():
    """As in Llama 2: the normalizer writes the spaces, and the decoder removes the first one."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"),
    ])  # fmt: skip
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return tokenizer


def metaspace():
    """The same pieces, with Metaspace as pre-tokenizer and decoder."""
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence([
        decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"),
    ])  # fmt: skip
    return tokenizer


# --- the cases ------------------------------------------------------------------


def random_texts(rng):
    letters = sorted(set(TEXT + "".join(CASE_TEXTS)))
    return ["".join(rng.choices(letters, k=rng.randint(1, 24))) for _ in range(RANDOM_TEXTS)]


def byte_ids(tokenizer):
    """Returns the tokens of one byte."""
    vocab = tokenizer.get_vocab()
    fallback = sorted(i for piece, i in vocab.items() if piece.startswith("<0x"))
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    return fallback or sorted(i for piece, i in vocab.items() if piece in alphabet)


def decode_case(name, tokenizer, ids):
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    return {"tokenizer": name, "text": None, "ids": ids, "ids_plain": ids, "decoded": decoded}


def text_case(name, tokenizer, text):
    ids = tokenizer.encode(text).ids
    return {
        "tokenizer": name,
        "text": text,
        "ids": ids,
        "ids_plain": tokenizer.encode(text, add_special_tokens=False).ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=True),
    }


def tokenizer_cases(name, tokenizer, rng):
    cases = [text_case(name, tokenizer, text) for text in CASE_TEXTS + random_texts(rng)]
    everything = range(tokenizer.get_vocab_size())
    for pool in (byte_ids(tokenizer), everything):
        for _ in range(RANDOM_IDS):
            ids = rng.choices(pool, k=rng.randint(1, 20))
            cases.append(decode_case(name, tokenizer, ids))
    return cases


def chat_case(name, template, messages, bos="<s>", eos="</s>", tools=None, generate=True):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama2(), bos_token=bos, eos_token=eos)
    case = {
        "name": name,
        "template": template,
        "bos_token": bos,
        "eos_token": eos,
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": generate,
        "rendered": None,
        "error": None,
    }
    try:
        case["rendered"] = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tools=tools,
            add_generation_prompt=generate,
            tokenize=False,
        )
    except Exception as error:
        case["error"] = str(error)
    return case


def write(name, value):
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def main():
    rng = random.Random(7)
    cases = []
    for make in (byte_level, llama2, metaspace):
        tokenizer = make()
        directory = HERE / make.__name__
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "tokenizer.json"
        tokenizer.save(str(path))
        assert path.stat().st_size < MAX_BYTES, path.stat().st_size
        cases += tokenizer_cases(make.__name__, tokenizer, rng)
    write("cases.json", cases)
    chats = [chat_case(**case) for case in CASES]
    for case, wanted in zip(chats, CASES):
        expects_error = wanted["name"].endswith("_error")
        assert expects_error == (case["error"] is not None), (case["name"], case["error"])
    write("chat_cases.json", chats)
    print(f"{len(cases)} tokenizer cases, {len(chats)} chat cases")


if __name__ == "__main__":
    main()
