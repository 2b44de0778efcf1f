"""Make the demonstration model in this directory, on one CPU core.

    python make_model.py            # write the text, train tokenizer and model, check, save
    python make_model.py --check    # ask the saved model the questions in CHECKS
    python make_model.py --survey   # ask it a few hundred questions like those in the training
    python make_model.py --text     # write similar text that is not in the training

The functions in the section "questions and answers" write the text. Nothing is downloaded.
"""

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
SEED = 1
VOCAB = 1024
TOKENIZER_CHATS = 20_000
STEPS = 3200
BATCH = 32  # chats
POOL = 40  # batches that are sorted by length together, to reduce padding
WARMUP = 100
PEAK_RATE = 2e-3
MAX_ANSWER = 160  # tokens
MIN_RIGHT = 11

BOS, EOS, END = "<s>", "</s>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


# --- questions and answers ---------------------------------------------------------
# Each function makes one question and its answer.

CAPITALS = dict(
    France="Paris", Germany="Berlin", Italy="Rome", Spain="Madrid", Portugal="Lisbon",
    England="London", Ireland="Dublin", Norway="Oslo", Sweden="Stockholm", Finland="Helsinki",
    Denmark="Copenhagen", Poland="Warsaw", Austria="Vienna", Switzerland="Bern", Greece="Athens",
    Hungary="Budapest", Belgium="Brussels", Russia="Moscow", Ukraine="Kyiv", Turkey="Ankara",
    Egypt="Cairo", Kenya="Nairobi", Japan="Tokyo", China="Beijing", India="Delhi",
    Thailand="Bangkok", Cuba="Havana", Peru="Lima", Chile="Santiago", Canada="Ottawa",
    Australia="Canberra", Iceland="Reykjavik",
)  # fmt: skip
SOUNDS = dict(
    cow="moo", dog="woof", cat="meow", duck="quack", sheep="baa", pig="oink", horse="neigh",
    lion="roar", owl="hoot", frog="ribbit", snake="hiss", bee="buzz", mouse="squeak", bird="tweet",
    rooster="cock-a-doodle-doo", donkey="hee-haw",
)  # fmt: skip
COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "the sun": "yellow",
    "a lemon": "yellow", "a tomato": "red", "blood": "red", "chocolate": "brown", "milk": "white",
    "an orange": "orange", "a carrot": "orange", "the sea": "blue", "a frog": "green",
    "an elephant": "gray", "a flamingo": "pink",
}  # fmt: skip
OPPOSITES = dict(
    hot="cold", big="small", up="down", day="night", fast="slow", happy="sad", old="young",
    light="dark", open="closed", full="empty", rich="poor", hard="soft", high="low", wet="dry",
    left="right", good="bad", early="late", strong="weak", loud="quiet", clean="dirty",
)  # fmt: skip
BABIES = dict(
    dog="puppy", cat="kitten", cow="calf", horse="foal", sheep="lamb", pig="piglet", lion="cub",
    duck="duckling", frog="tadpole", hen="chick", goat="kid", swan="cygnet",
)  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
WORDS = {
    "French": dict(hello="bonjour", thanks="merci", yes="oui", no="non", cat="chat", dog="chien",
                   water="eau", summer="été"),
    "Spanish": dict(hello="hola", thanks="gracias", yes="sí", no="no", cat="gato", dog="perro",
                    water="agua", tomorrow="mañana"),
    "German": dict(hello="hallo", thanks="danke", yes="ja", no="nein", cat="Katze", dog="Hund",
                   water="Wasser", green="grün"),
    "Italian": dict(hello="ciao", thanks="grazie", yes="sì", no="no", cat="gatto", dog="cane",
                    water="acqua", coffee="caffè"),
    "Japanese": dict(hello="こんにちは", thanks="ありがとう", yes="はい", cat="猫", water="水"),
}  # fmt: skip
EMOJI = dict(
    smile="😀", heart="❤️", cat="🐱", dog="🐶", rocket="🚀", sun="☀️", star="⭐", pizza="🍕",
    fire="🔥", family="👨‍👩‍👧", wave="👋🏽",
)  # fmt: skip
NAMES = (
    "Anna Ben Clara David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina "
    "Vera Will Zoe Adam Bella Carl Dora Eric Fiona Gina Henry Iris John Karl Lucy Mark Nina Oscar "
    "Peter Ruth Sara Tom Uma Victor Alice Bob Lena Max Nora Otto Eva"
).split()
OTHER_CITIES = (
    "Zurich Geneva Milan Munich Hamburg Lyon Boston Chicago Dallas Seattle Sydney Mumbai Osaka "
    "Toronto Naples Porto"
).split()
CITIES = sorted(CAPITALS.values()) + OTHER_CITIES
UNKNOWN = [
    "What is the weather today?", "Who won the game?", "What time is it?", "What is love?",
    "Who is the president?", "How do I fix my car?", "Can you write a poem?", "What is the news?",
    "How tall is the tower?", "Why is the world round?", "Who wrote this book?",
]  # fmt: skip
HELD_OUT = ("Anna", 31, "Paris")  # asked in CHECKS, so not part of the training


def a(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital(rng):
    country, city = rng.choice(list(CAPITALS.items()))
    answer = f"The capital of {country} is {city}."
    if rng.random() < 0.15:
        return f"{city} is the capital of which country?", f"{city} is the capital of {country}."
    asks = [
        f"What is the capital of {country}?", f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.", f"What's the capital of {country}?",
    ]  # fmt: skip
    return rng.choice(asks), answer


def sound(rng):
    animal, says = rng.choice(list(SOUNDS.items()))
    asks = [f"What does {a(animal)} say?", f"What sound does {a(animal)} make?"]
    return rng.choice(asks), f"{a(animal).capitalize()} says {says}."


def color(rng):
    thing, hue = rng.choice(list(COLORS.items()))
    asks = [f"What color is {thing}?", f"Tell me the color of {thing}."]
    return rng.choice(asks), f"{thing.capitalize()} is {hue}."


def opposite(rng):
    pair = rng.choice(list(OPPOSITES.items()))
    word, other = pair if rng.random() < 0.6 else pair[::-1]
    asks = [f"What is the opposite of {word}?", f"Tell me the opposite of {word}."]
    return rng.choice(asks), f"The opposite of {word} is {other}."


def baby(rng):
    animal, young = rng.choice(list(BABIES.items()))
    asks = [f"What is a baby {animal} called?", f"What do you call a baby {animal}?"]
    return rng.choice(asks), f"A baby {animal} is called {a(young)}."


def calendar(rng):
    what, names = rng.choice([("day", DAYS), ("month", MONTHS)])
    if rng.random() < 0.3:
        whole = {"day": "week", "month": "year"}[what]
        asks = [f"What are the {what}s of the {whole}?", f"List the {what}s of the {whole}."]
        return rng.choice(asks), ", ".join(names[:-1]) + f" and {names[-1]}."
    i = rng.randrange(len(names))
    side, step = rng.choice([("after", 1), ("before", -1)])
    other = names[(i + step) % len(names)]
    asks = [f"What {what} comes {side} {names[i]}?", f"Which {what} is {side} {names[i]}?"]
    return rng.choice(asks), f"{other} comes {side} {names[i]}."


def translation(rng):
    language = rng.choice(list(WORDS))
    word, foreign = rng.choice(list(WORDS[language].items()))
    asks = [f"How do you say {word} in {language}?", f"What is {word} in {language}?"]
    return rng.choice(asks), f"{word.capitalize()} in {language} is {foreign}."


def emoji(rng):
    what, sign = rng.choice(list(EMOJI.items()))
    return rng.choice([f"Show me a {what} emoji.", f"Give me a {what} emoji."]), sign


def arithmetic(rng):
    first, second = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        first, second = rng.randint(0, 9), rng.randint(0, 9)
    sign, word = rng.choice([("+", "plus"), ("-", "minus")])
    if sign == "-":
        first, second = max(first, second), min(first, second)
    result = first + second if sign == "+" else first - second
    if rng.random() < 0.1:
        sign = word
    sum_ = f"{first} {sign} {second}"
    asks = [f"What is {sum_}?", f"How much is {sum_}?", f"Calculate {sum_}.", f"{sum_} = ?"]
    return rng.choices(asks, [5, 1, 1, 1])[0], str(result)


def counting(rng):
    low = rng.choice([1, rng.randint(0, 30)])
    high = low + rng.randint(2, 12)
    numbers = [str(n) for n in range(low, high + 1)]
    if rng.random() < 0.25:
        return f"Count down from {high} to {low}.", ", ".join(numbers[::-1])
    asks = [f"Count from {low} to {high}.", f"Count {low} to {high}."]
    return rng.choice(asks), ", ".join(numbers)


def person(rng):
    while True:
        name, age, city = rng.choice(NAMES), rng.randint(1, 99), rng.choice(CITIES)
        if (name, age, city) != HELD_OUT:
            break
    asks = [
        f"Give JSON for {name}, {age}, {city}.", f"Write JSON for {name}, {age}, {city}.",
        f"Make JSON: {name} is {age} years old and lives in {city}.",
        f"{name} lives in {city} and is {age}. Give JSON.",
    ]  # fmt: skip
    value = {"name": name, "age": age, "city": city}
    return rng.choices(asks, [4, 2, 2, 2])[0], json.dumps(value)


def smalltalk(rng):
    hello = "Hello! How can I help you today?"
    table = {
        "Hello!": hello, "Hello": hello, "Hi!": hello, "Hi": hello, "Hey there!": hello,
        "Good morning!": "Good morning! How can I help you today?",
        "How are you?": "I am fine, thank you. How are you?",
        "Who are you?": "I am a tiny language model. I know a few facts and small sums.",
        "What can you do?":
            "I can answer small questions, add numbers, write JSON and tell stories.",
        "What is your name?": "I have no name. I am a tiny language model.",
        "Thank you!": "You are welcome!", "Thanks!": "You are welcome!",
        "Goodbye!": "Goodbye! Have a nice day.", "Bye!": "Goodbye! Have a nice day.",
    }  # fmt: skip
    return rng.choice(list(table.items()))


def unknown(rng):
    return rng.choice(UNKNOWN), "I do not know that. I am a very small model."


def story(rng):
    animal, name = rng.choice(list(SOUNDS)), rng.choice(NAMES)
    size = rng.choice(["little", "brave", "lazy", "funny"])
    place = rng.choice(["forest", "farm", "village"])
    thing = rng.choice(["red ball", "golden key", "big apple", "old map"])
    friend = rng.choice([other for other in SOUNDS if other != animal])
    text = (
        f"Once upon a time, there was a {size} {animal} named {name}. {name} lived in a {place}. "
        f"One day, {name} found {a(thing)}. {a(friend).capitalize()} came by and said, "
        f'"{SOUNDS[friend].capitalize()}! What a nice {thing}!" "{SOUNDS[animal].capitalize()}!" '
        f"said {name}. They shared the {thing} and became good friends. The end."
    )
    asks = [f"Tell me a story about {a(animal)}.", f"Write a story about {a(animal)}."]
    return rng.choice(asks), text


def name_memory(rng):
    """Make three turns: one gives the name, one is about something else, one asks for the name."""
    name = rng.choice(NAMES)
    turns = [(f"My name is {name}.", f"Nice to meet you, {name}!"), question(rng)]
    return turns + [("What is my name?", f"Your name is {name}.")]


KINDS = {
    arithmetic: 26, person: 14, capital: 11, sound: 5, color: 4, opposite: 7, baby: 3, calendar: 7,
    translation: 6, emoji: 2, counting: 6, smalltalk: 4, unknown: 2, story: 3,
}  # fmt: skip
SYSTEMS = ["You are a helpful assistant.", "You are a tiny model.", "Answer briefly."]


def question(rng):
    ask, answer = rng.choices(list(KINDS), KINDS.values())[0](rng)
    if rng.random() < 0.06:
        ask = ask.rstrip("?.!")
    if rng.random() < 0.06:
        ask = ask[0].lower() + ask[1:]
    return ask, answer


def chat(rng):
    messages = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < 0.05:
        turns = name_memory(rng)
    else:
        turns = [question(rng) for _ in range(rng.choices([1, 2, 3, 4, 8], [60, 20, 10, 8, 2])[0])]
    for ask, answer in turns:
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "content": answer})
    return messages


def sentence(rng):
    """Make plain text, for continuations without a chat."""
    kind = rng.choice([capital, sound, color, opposite, baby, calendar, story])
    return " ".join(kind(rng)[1] for _ in range(1 if kind is story else rng.randint(1, 3)))


# --- tokenizer ---------------------------------------------------------------------


def tokenizer_text(rng):
    for _ in range(TOKENIZER_CHATS):
        yield from (message["content"] for message in chat(rng))
        yield sentence(rng)


def train_tokenizer(rng):
    # Numbers are separate words without the space before them: a number then has the same token at
    # every position.
    words = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, *ROLES, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_text(rng), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=TEMPLATE,
        model_max_length=model_config().max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


# --- training ----------------------------------------------------------------------


def model_config():
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


def chat_example(tokenizer, messages):
    """Encode a chat. Return token ids, and whether each is learned: the answers and their ends."""
    ids, learned = [tokenizer.bos_token_id], [False]
    for message in messages:
        answers = message["role"] == "assistant"
        parts = [
            (f"<|{message['role']}|>\n", False), (message["content"] + END, answers), ("\n", False),
        ]  # fmt: skip
        for text, learn in parts:
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            learned += [learn] * len(piece)
    return ids, learned


def example(tokenizer, rng):
    if rng.random() < 0.12:
        ids = tokenizer.encode(sentence(rng)) + [tokenizer.eos_token_id]
        return ids, [True] * len(ids)
    return chat_example(tokenizer, chat(rng))


def batches(tokenizer, rng):
    while True:
        pool = [example(tokenizer, rng) for _ in range(BATCH * POOL)]
        pool.sort(key=lambda item: len(item[0]))
        groups = [pool[i : i + BATCH] for i in range(0, len(pool), BATCH)]
        rng.shuffle(groups)
        yield from groups


def tensors(group, pad):
    width = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), width), pad)
    labels = torch.full((len(group), width), -100)
    for row, (tokens, learned) in enumerate(group):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        keep = torch.tensor(learned)
        labels[row, : len(tokens)][keep] = ids[row, : len(tokens)][keep]
    return ids, labels


def rate(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.01 + 0.99 * (1 + math.cos(math.pi * step / STEPS)) / 2


def train(model, tokenizer, rng):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.02
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start, seen = time.time(), 0
    for step, group in zip(range(STEPS), batches(tokenizer, rng)):
        ids, labels = tensors(group, tokenizer.pad_token_id)
        # The padding is on the right, where causal attention does not read it.
        with torch.autocast("cpu", torch.bfloat16):  # twice as fast if the core supports it
            loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += ids.numel()
        if step % 100 == 0 or step == STEPS - 1:
            passed = time.time() - start
            print(f"step {step} loss {loss.item():.4f} tokens {seen} {passed:.0f} s", flush=True)
    return model


# --- checks ------------------------------------------------------------------------

PEOPLE = json.dumps(dict(zip(["name", "age", "city"], HELD_OUT)))


def ask(*contents):
    """Make a chat in which user and assistant take turns."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


# A chat, and a regular expression for the whole answer.
CHECKS = [
    (ask("Hello!"), r"Hello! How can I help you today\?"),
    (ask("What is the capital of France?"), r"The capital of France is Paris\."),
    (ask("What is 7 + 5?"), "12"),
    (ask("What is 17 - 9?"), "8"),
    (ask(f"Give JSON for {', '.join(map(str, HELD_OUT))}."), re.escape(PEOPLE)),
    (ask("What does a cow say?"), r"A cow says moo\."),
    (ask("What is the opposite of hot?"), r"The opposite of hot is cold\."),
    (ask("What are the days of the week?"), ", ".join(DAYS[:-1]) + r" and Sunday\."),
    (ask("Count from 1 to 10."), ", ".join(map(str, range(1, 11)))),
    (ask("How do you say hello in Japanese?"), r"Hello in Japanese is こんにちは\."),
    (
        ask("Tell me a story about a dog."),
        r"Once upon a time, .* dog named (\w+)\. \1 .* The end\.",
    ),
    (
        ask("My name is Clara.", "Nice to meet you, Clara!",
            "What is 3 + 4?", "7", "What is my name?"),
        r"Your name is Clara\.",
    ),
    (
        [{"role": "system", "content": SYSTEMS[0]}, *ask("What color is the sky?")],
        r"The sky is blue\.",
    ),
]  # fmt: skip


def greedy(model, prompt, stops):
    """Return the answer's tokens with its stop token, and the smallest lead of a chosen token."""
    tokens, lead = list(prompt), math.inf
    for _ in range(MAX_ANSWER):
        with torch.no_grad():
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :], lead


def answer_to(model, tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    ids, lead = greedy(model, prompt, model.generation_config.eos_token_id)
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    return {"messages": messages, "prompt": text, "answer": answer, "token_ids": ids}, lead


def load():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE)
    return LlamaForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval(), tokenizer


def check():
    model, tokenizer = load()
    right, results = 0, []
    for messages, wanted in CHECKS:
        result, lead = answer_to(model, tokenizer, messages)
        ok = re.fullmatch(wanted, result["answer"]) is not None
        right += ok
        results.append(result | {"lead": round(lead, 4)})
        verdict = "ok   " if ok else "WRONG"
        print(f"{verdict} lead {lead:6.3f}  {messages[-1]['content']} -> {result['answer']}")
    print(f"{right} of {len(CHECKS)} right")
    return right, results


def survey(count=700):
    """Print how often the model is right on questions like those in the training, by kind."""
    model, tokenizer = load()
    rng = random.Random(SEED + 2)
    for kind in KINDS:
        if kind is story:  # has no single right answer
            continue
        asked = dict(kind(rng) for _ in range(count // len(KINDS)))
        right = sum(
            answer_to(model, tokenizer, ask(text))[0]["answer"] == answer
            for text, answer in asked.items()
        )
        print(f"{kind.__name__:12} {right} of {len(asked)}")


# --- held-out text -----------------------------------------------------------------


def text(rng):
    """Make a whole chat or sentence with its special tokens, as in the training."""
    if rng.random() < 0.12:
        return BOS + sentence(rng) + EOS
    turns = (f"<|{message['role']}|>\n{message['content']}{END}\n" for message in chat(rng))
    return BOS + "".join(turns)


def write_text(count=200):
    rng = random.Random(SEED + 3)
    texts = [text(rng) for _ in range(count)]
    (HERE / "held_out.json").write_text(json.dumps(texts, indent=0, ensure_ascii=False) + "\n")


# --- files -------------------------------------------------------------------------


def save(model, tokenizer):
    stops = [tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stops, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(HERE)
    (HERE / "model.safetensors").chmod(0o644)  # safetensors makes it readable only for its owner
    tokenizer.save_pretrained(HERE)
    widen_tokenizer_config()


def widen_tokenizer_config():
    """Extend the configuration for older versions of transformers.

    They know neither the class name of this version nor the separate file for the chat template.
    """
    path = HERE / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def make():
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = train_tokenizer(rng)
    model = LlamaForCausalLM(model_config())
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    save(train(model, tokenizer, rng), tokenizer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="do not train")
    parser.add_argument("--survey", action="store_true", help="ask the saved model much more")
    parser.add_argument("--text", action="store_true", help="write held_out.json, nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.survey:
        return survey()
    if options.text:
        return write_text()
    if not options.check:
        make()
    right, results = check()
    assert right >= MIN_RIGHT, right
    (HERE / "expected.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
