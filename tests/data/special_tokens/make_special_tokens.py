"""Records the special tokens and token ids that transformers reads from small tokenizer directories.

    python make_special_tokens.py    # with ../requirements.txt: special_tokens.json
    python make_special_tokens.py    # with requirements-4.57.txt: prompt_ids.json
    python make_special_tokens.py --classes    # with either: prints the effect of the flags on each tokenizer class

special_tokens.json   [{name, files, special_tokens_map, error}]: the variables of a chat template in transformers 5.
                      `error` is true if `AutoTokenizer.from_pretrained` refuses the directory
prompt_ids.json       [{name, files, post_processor, ids, ids_plain, error}]: `text` with and without special tokens,
                      encoded by transformers 4.57, which honours add_bos_token and add_eos_token; post_processor
                      is a name in `post_processors`

`files` has the JSON of each file. The tokenizer.json of a case is `tokenizer` with the members that the case replaces.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
CONFIG, MAP, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXT = "ab<s>c"
# Each class of transformers 4.57 that sets the tokens around a prompt, and some other classes.
CLASSES = {
    "LlamaTokenizerFast": ("<s>", "</s>"),
    "LlamaTokenizer": ("<s>", "</s>"),
    "CodeLlamaTokenizerFast": ("<s>", "</s>"),
    "GemmaTokenizerFast": ("<bos>", "<eos>"),
    "GemmaTokenizer": ("<bos>", "<eos>"),
    "CohereTokenizerFast": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "GPTNeoXTokenizerFast": ("<|endoftext|>", "<|endoftext|>"),
    "GPTNeoXTokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "GPT2TokenizerFast": ("<s>", "</s>"),
    "GPT2Tokenizer": ("<s>", "</s>"),
    "Qwen2TokenizerFast": ("<s>", "</s>"),
    "Qwen2Tokenizer": ("<s>", "</s>"),
    "CodeGenTokenizerFast": ("<s>", "</s>"),
    "PreTrainedTokenizerFast": ("<s>", "</s>"),
    "PreTrainedTokenizer": ("<s>", "</s>"),
}


def added(number, content, **changes):
    token = {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
    return {**token, "normalized": False, "special": True, **changes}


BASE = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [added(4, "<s>"), added(5, "</s>"), added(6, "<unk>"), added(7, "<pad>")],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3},
        "merges": [["a", "b"]],
    },
}


def token(content, **changes):
    """Returns an AddedToken in the form of tokenizer_config.json."""
    return {"__type": "AddedToken", **plain(content, **changes)}


def plain(content, **changes):
    """Returns an AddedToken in the form of special_tokens_map.json."""
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, **changes}


def decoder_entry(content):
    return {**plain(content), "special": True}


def padding(content):
    return {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 7,
        "pad_type_id": 0,
        "pad_token": content,
    }


def config_cases():
    """Yields cases that depend on tokenizer_config.json only."""
    named = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]
    yield "no config", None
    yield "empty config", {}
    yield "all named tokens as strings", {f"{name}_token": f"<{name}>" for name in named}
    yield "all named tokens as AddedToken", {f"{name}_token": token(f"<{name}>") for name in named}
    yield "AddedToken with lstrip and rstrip", {"mask_token": token("<mask>", lstrip=True, rstrip=True, normalized=True)}
    yield "AddedToken with special", {"bos_token": token("<s>", special=False)}
    yield "AddedToken with content alone", {"bos_token": {"__type": "AddedToken", "content": "<s>"}}
    yield "AddedToken without content", {"bos_token": {"__type": "AddedToken", "lstrip": True}}
    yield "AddedToken of another type", {"bos_token": {"__type": "Token", "content": "<s>"}}
    yield "AddedToken with an unknown member", {"bos_token": token("<s>", colour="red")}
    yield "AddedToken with content that is a number", {"bos_token": token(3)}
    yield "AddedToken with content null", {"bos_token": token(None)}
    yield "object without a type", {"bos_token": plain("<s>")}
    yield "null", {"bos_token": None, "eos_token": "</s>"}
    yield "empty string", {"bos_token": "", "eos_token": "</s>"}
    yield "spaces and line feeds", {"bos_token": " <s>\n", "eos_token": "\u2581</s> "}
    yield "unicode", {"bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "eos_token": "\U0001f600"}
    yield "tokens that the vocabulary lacks", {"bos_token": "<nowhere>", "eos_token": "</nowhere>"}
    for value in (7, True, 1.5, ["<s>"], [], {}):
        yield f"bos_token {json.dumps(value)}", {"bos_token": value}
    yield "add_bos_token is no token", {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>"}
    yield "add_bos_token as a string", {"add_bos_token": "<s>", "add_eos_token": "yes"}
    yield "another name that ends in _token", {"image_token": "<image>", "bos_token": "<s>"}
    yield "another name as AddedToken", {"image_token": token("<image>")}
    yield "another name as an object without a type", {"image_token": plain("<image>")}
    for value in (None, 7, True, ["<image>"], ""):
        yield f"image_token {json.dumps(value)}", {"image_token": value}
    yield "names that do not end in _token", {"image_tokens": "<image>", "token": "<t>", "_token": "<u>", "bos_token_id": 4}
    yield "a list of additional tokens", {"additional_special_tokens": ["<x>", "<s>"]}
    yield "a list of additional AddedTokens", {"additional_special_tokens": [token("<x>"), token("<y>")]}
    yield "a list of additional objects", {"additional_special_tokens": [plain("<x>")]}
    yield "additional tokens null", {"additional_special_tokens": None}
    yield "additional tokens as a string", {"additional_special_tokens": "<x>"}
    yield "additional tokens by name", {"additional_special_tokens": {"image_token": "<image>", "boi": "<boi>"}}
    yield "extra tokens as a list", {"extra_special_tokens": ["<x>", "<y>"]}
    yield "extra tokens as an empty list", {"extra_special_tokens": []}
    yield "extra tokens null", {"extra_special_tokens": None}
    yield "extra tokens as a number", {"extra_special_tokens": 3}
    yield "extra tokens as a string", {"extra_special_tokens": "<x>"}
    yield "extra tokens by name", {"extra_special_tokens": {"image_token": "<image>", "boi": "<boi>"}}
    yield "extra tokens by name as AddedTokens", {"extra_special_tokens": {"image_token": token("<image>", lstrip=True)}}
    yield "extra tokens by name as objects", {"extra_special_tokens": {"image_token": plain("<image>")}}
    yield "no extra tokens by name", {"extra_special_tokens": {}}
    yield "an extra token that is a number", {"extra_special_tokens": {"image_token": 3}}
    yield "an extra token that is null", {"extra_special_tokens": {"image_token": None}}
    yield "an extra token that is empty", {"extra_special_tokens": {"image_token": ""}}
    yield "an extra token with a standard name", {"bos_token": "<s>", "extra_special_tokens": {"bos_token": "<extra>"}}
    yield "an extra token with a standard name and null", {"bos_token": None, "extra_special_tokens": {"bos_token": "<extra>"}}
    both = {"extra_special_tokens": ["<x>"], "additional_special_tokens": {"image_token": "<image>"}}
    yield "extra tokens before additional ones", both
    yield "null extra tokens before additional ones", {**both, "extra_special_tokens": None}
    yield "an extra token against a name", {"image_token": "<one>", "extra_special_tokens": {"image_token": "<two>"}}
    yield "an extra token against a name as AddedToken", {"image_token": token("<one>"), "extra_special_tokens": {"image_token": "<two>"}}
    yield "model specific tokens", {"model_specific_special_tokens": {"image_token": "<image>"}}
    yield "model specific tokens as AddedTokens", {"model_specific_special_tokens": {"image_token": token("<image>")}}
    yield "model specific tokens null", {"model_specific_special_tokens": None}
    yield "model specific tokens as a list", {"model_specific_special_tokens": ["<image>"]}
    yield "model specific tokens after a name", {"audio_token": "<audio>", "model_specific_special_tokens": {"image_token": "<i>"}}
    yield "model specific tokens after an AddedToken", {"audio_token": token("<a>"), "model_specific_special_tokens": {"audio_token": "<i>"}}
    yield "an init_inputs member", {"init_inputs": [], "bos_token": "<s>"}


def map_cases():
    """Yields the config and the map of cases in which both files define tokens."""
    config = {"bos_token": "<c>", "eos_token": "</c>"}
    decoder = {"added_tokens_decoder": {"4": decoder_entry("<s>")}}
    yield "map alone", None, {"bos_token": "<m>", "pad_token": "<pad>"}
    yield "map before config", config, {"bos_token": "<m>"}
    yield "map as an object", config, {"bos_token": plain("<m>", lstrip=True)}
    yield "map as an object with special", config, {"bos_token": {**plain("<m>"), "special": False}}
    yield "map as an object with content alone", config, {"bos_token": {"content": "<m>"}}
    yield "map as an object with a type", config, {"bos_token": token("<m>")}
    yield "map as an object without content", config, {"bos_token": {"lstrip": True}}
    yield "map as an object with an unknown member", config, {"bos_token": plain("<m>", colour="red")}
    yield "map null", config, {"bos_token": None}
    yield "map empty", config, {"bos_token": ""}
    yield "map a number", config, {"bos_token": 3}
    yield "map a list", config, {"bos_token": ["<m>"]}
    yield "map without members", config, {}
    yield "map after a decoder", {**config, **decoder}, {"bos_token": "<m>", "pad_token": "<pad>"}
    yield "map after an empty decoder", {**config, "added_tokens_decoder": {}}, {"bos_token": "<m>"}
    yield "map after a decoder null", {**config, "added_tokens_decoder": None}, {"bos_token": "<m>"}
    yield "map after a decoder that is a list", {**config, "added_tokens_decoder": []}, {"bos_token": "<m>"}
    yield "map after a decoder of strings", {**config, "added_tokens_decoder": {"4": "<s>"}}, {"bos_token": "<m>"}
    yield "map with another name", config, {"image_token": "<image>"}
    yield "map with another name as an object", config, {"image_token": plain("<image>")}
    yield "map with another name null", {"image_token": "<c>"}, {"image_token": None}
    yield "map with another name that is a number", {"image_token": "<c>"}, {"image_token": 5}
    yield "another name in both", {"image_token": "<c>"}, {"image_token": "<m>"}
    yield "another name in both, AddedToken in config", {"image_token": token("<c>")}, {"image_token": "<m>"}
    yield "map with additional tokens", config, {"additional_special_tokens": ["<x>", "<y>"]}
    yield "map with additional objects", config, {"additional_special_tokens": [plain("<x>")]}
    yield "map with additional tokens by name", config, {"additional_special_tokens": {"image_token": "<image>"}}
    yield "map with additional tokens as a string", config, {"additional_special_tokens": "<x>"}
    yield "map with additional tokens and a config with them", {"additional_special_tokens": ["<x>"]}, {"additional_special_tokens": 3}
    yield "map with an extra list", config, {"extra_special_tokens": ["<x>", plain("<y>")]}
    yield "map with extra names", config, {"extra_special_tokens": {"image_token": "<image>"}}
    yield "map with extra names as objects", config, {"extra_special_tokens": {"image_token": plain("<image>")}}
    yield "map with extra names as AddedTokens", config, {"extra_special_tokens": {"image_token": token("<image>")}}
    yield "extra names in both", {"extra_special_tokens": {"a": "<c>", "b": "<c>"}}, {"extra_special_tokens": {"b": "<m>", "c": "<m>"}}
    yield "extra names in map, list in config", {"extra_special_tokens": ["<x>"]}, {"extra_special_tokens": {"b": "<m>"}}
    yield "extra list in map, names in config", {"extra_special_tokens": {"a": "<c>"}}, {"extra_special_tokens": ["<x>"]}
    yield "extra tokens null in map", {"extra_special_tokens": {"a": "<c>"}}, {"extra_special_tokens": None}
    yield "extra tokens a number in map", config, {"extra_special_tokens": 4}
    yield "extra names in map with a standard name", config, {"extra_special_tokens": {"bos_token": "<m>"}}
    yield "extra name in config, standard name in map", {"extra_special_tokens": {"bos_token": "<c>"}}, {"bos_token": "<m>"}
    yield "model specific tokens in map", config, {"model_specific_special_tokens": ["<x>"]}
    yield "padding before map", config, {"pad_token": None}


def special_cases():
    for name, config in config_cases():
        yield name, {} if config is None else {CONFIG: {**FAST, **config}}
    for name, config, tokens in map_cases():
        yield name, {MAP: tokens} if config is None else {CONFIG: {**FAST, **config}, MAP: tokens}
    pad = {TOKENIZER: {"padding": padding("<pad>")}}
    yield "map is a list", {CONFIG: FAST, MAP: ["<m>"]}
    yield "config without a class", {CONFIG: {"bos_token": "<s>"}}
    yield "padding of tokenizer.json", {CONFIG: FAST, **pad}
    yield "padding of tokenizer.json with another pad_token in config", {CONFIG: {**FAST, "pad_token": "</s>"}, **pad}
    yield "padding of tokenizer.json with null in config", {CONFIG: {**FAST, "pad_token": None}, **pad}
    yield "padding of tokenizer.json with null in map", {CONFIG: FAST, MAP: {"pad_token": None}, **pad}
    yield "padding of tokenizer.json with an extra token", {CONFIG: {**FAST, "extra_special_tokens": {"pad_token": "<x>"}}, **pad}
    yield "padding of tokenizer.json with an empty token", {TOKENIZER: {"padding": padding("")}}
    yield "added_tokens.json", {CONFIG: {**FAST, "bos_token": "<new>"}, "added_tokens.json": {"<new>": 8}}
    decoder = {"added_tokens_decoder": {"4": decoder_entry("<other>")}}
    yield "a decoder with other content", {CONFIG: {**FAST, "bos_token": "<s>", **decoder}}


def template(first, last):
    """Returns a post-processor that adds tokens around the text. Each is (name, id) or None."""
    ends = [first, last]
    pieces = [end and {"SpecialToken": {"id": end[0], "type_id": 0}} for end in ends]
    single = [piece for piece in (pieces[0], {"Sequence": {"id": "A", "type_id": 0}}, pieces[1]) if piece]
    tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in filter(None, ends)}
    pair = single + [{"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
POST_PROCESSORS = {
    "none": None,
    "byte level": BYTE_LEVEL,
    "first": template(("<s>", 4), None),
    "last": template(None, ("</s>", 5)),
    "both": template(("<s>", 4), ("</s>", 5)),
    "byte level and first": {"type": "Sequence", "processors": [BYTE_LEVEL, template(("<s>", 4), None)]},
}


def prompt_base():
    """Returns a tokenizer.json with the default tokens of all classes."""
    names = ["<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<UNK>"]
    tokens = [added(4 + number, name) for number, name in enumerate(names)]
    vocab = {**BASE["model"]["vocab"], **{token["content"]: token["id"] for token in tokens}}
    return {**BASE, "added_tokens": tokens, "model": {**BASE["model"], "vocab": vocab}}


def prompt_files(config, post_processor="none", model_type=None, **others):
    """Returns the files of a case and the name of its post-processor."""
    files = {CONFIG: config, **others}
    if model_type is not None:
        files["config.json"] = {"model_type": model_type}
    return files, post_processor


def flags_name(flags):
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in flags.items()) or "no flags"


def prompt_cases():
    flags = [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": False, "add_eos_token": True}]
    for name, (bos, eos) in CLASSES.items():
        config = {"tokenizer_class": name, "bos_token": bos, "eos_token": eos}
        for given in flags:
            for kind in ("byte level", "both"):
                yield f"{name}, {flags_name(given)}, {kind}", prompt_files({**config, **given}, kind)
    llama = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for kind in POST_PROCESSORS:
        for given in ({}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}):
            yield f"post-processor {kind}, {flags_name(given)}", prompt_files({**llama, **given}, kind)
    for value in (None, 0, 1, "", "no", [], {}):
        for flag in ("add_bos_token", "add_eos_token"):
            yield f"{flag} is {json.dumps(value)}", prompt_files({**llama, flag: value})
    for name in ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer"):
        both = {"tokenizer_class": name, "add_bos_token": True, "add_eos_token": True}
        yield f"default tokens of {name}", prompt_files(both)
        yield f"default tokens of {name} without flags", prompt_files({"tokenizer_class": name})
    first = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    yield "bos_token is another one", prompt_files({**first, "bos_token": "<bos>"})
    yield "bos_token is a typed object", prompt_files({**first, "bos_token": token("<bos>")})
    yield "bos_token is no special token", prompt_files({**first, "bos_token": "c"})
    yield "bos_token null", prompt_files({**first, "bos_token": None})
    yield "bos_token null without flags", prompt_files({"tokenizer_class": "LlamaTokenizer", "bos_token": None}, "both")
    yield "bos_token null, not added", prompt_files({**first, "bos_token": None, "add_bos_token": False}, "both")
    yield "eos_token null", prompt_files({**first, "eos_token": None, "add_eos_token": True})
    yield "special_tokens_map.json has another bos_token", prompt_files({**first, "bos_token": "<s>"}, **{MAP: {"bos_token": "<bos>"}})
    yield "special_tokens_map.json has bos_token null", prompt_files({**first, "bos_token": "<s>"}, **{MAP: {"bos_token": None}})
    decoder = {"added_tokens_decoder": {"4": decoder_entry("<s>")}}
    yield "special_tokens_map.json is not read", prompt_files({**first, "bos_token": "<s>", **decoder}, **{MAP: {"bos_token": "<bos>"}})
    for legacy in (True, False):
        yield f"legacy {legacy}", prompt_files({**llama, "legacy": legacy, "add_bos_token": False}, "both")
    no_class = {"bos_token": "<s>", "eos_token": "</s>"}
    for model_type in ("llama", "mistral", "mixtral", "phi3", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2"):
        yield f"model type {model_type} without a class", prompt_files(no_class, model_type=model_type)
    for model_type in ("gpt_neox", "stablelm", "olmo2", "falcon", "qwen2", "qwen3", "glm4", "smollm3", "gpt_oss", "starcoder2", "opt"):
        config = {**no_class, "add_bos_token": True}
        yield f"model type {model_type} without a class", prompt_files(config, model_type=model_type)
    yield "class before model type", prompt_files({**no_class, **FAST}, model_type="llama")
    yield "class of deepseek_v3 as released", prompt_files({**llama, "add_bos_token": True, "add_eos_token": False}, "byte level", "deepseek_v3")
    others = {"config.json": {"model_type": "qwen2", "tokenizer_class": "LlamaTokenizer"}}
    yield "class of config.json", prompt_files(no_class, **others)


def load_prompt(files, post_processor):
    return load(files, {**prompt_base(), "post_processor": POST_PROCESSORS[post_processor]})


def prompt_ids():
    for name, (files, post_processor) in prompt_cases():
        tokenizer = load_prompt(files, post_processor)
        case = {"name": name, "files": files, "post_processor": post_processor, "error": tokenizer is None}
        if tokenizer is not None:
            case["ids"] = tokenizer.encode(TEXT)
            case["ids_plain"] = tokenizer.encode(TEXT, add_special_tokens=False)
        yield case


def print_classes():
    for name, (bos, eos) in CLASSES.items():
        config = {"tokenizer_class": name, "bos_token": bos, "eos_token": eos}
        seen = []
        for given in ({}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}):
            loaded = [load_prompt(*prompt_files({**config, **given}, kind)) for kind in ("byte level", "both")]
            tokens = [one and " ".join(one.convert_ids_to_tokens(one.encode("c"))) for one in loaded]
            seen.append(f"{flags_name(given)}: {tokens[0]}, {tokens[1]}")
        print(name, "|", "; ".join(seen))


def write(directory, files, base):
    for name, content in {TOKENIZER: {}, **files}.items():
        content = {**base, **content} if name == TOKENIZER else content
        (Path(directory) / name).write_text(json.dumps(content), encoding="utf-8")


def load(files, base=BASE):
    """Returns the tokenizer of transformers for the files, or None if it refuses them."""
    with tempfile.TemporaryDirectory() as directory:
        write(directory, files, base)
        try:
            return AutoTokenizer.from_pretrained(directory)
        except Exception:
            return None


def special_tokens():
    for name, files in special_cases():
        tokenizer = load(files)
        tokens = None if tokenizer is None else dict(tokenizer.special_tokens_map)
        yield {"name": name, "files": files, "special_tokens_map": tokens, "error": tokenizer is None}


def store(name, head, cases):
    cases = list(cases)
    names = [case["name"] for case in cases]
    assert len(set(names)) == len(names), "two cases have the same name"
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    head = json.dumps({"transformers": transformers.__version__, **head})[:-1]
    (HERE / name).write_text(f'{head}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(name, len(cases), "cases,", sum(case["error"] for case in cases), "errors")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    if "--classes" in sys.argv:
        print_classes()
    elif transformers.__version__.startswith("4."):
        head = {"tokenizer": prompt_base(), "post_processors": POST_PROCESSORS, "text": TEXT}
        store("prompt_ids.json", head, prompt_ids())
    else:
        store("special_tokens.json", {"tokenizer": BASE}, special_tokens())
