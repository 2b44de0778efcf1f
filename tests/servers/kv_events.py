#!/usr/bin/env python3
"""Checks the KV events of a server with pyzmq, and with the classes by which vLLM's subscribers decode.

usage: kv_events.py PROGRAM [TEST ...]

PROGRAM is server-go, or another program with the same flags. The script starts it with the bundled
model, and with the further flags in SERVER_FLAGS.
"""

import concurrent.futures
import json
import re
import socket
import sys
import time
import unittest

import hostile
import msgspec
import zmq

END = (2**64 - 1).to_bytes(8, "big")


# The fields of vllm/distributed/kv_events.py in vLLM 0.33, as maps and as arrays.
class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def as_array(kind):
    """The class as vLLM had it until 0.23."""
    fields = [(field.name, field.type, field.default) if field.default is not msgspec.NODEFAULT else (field.name, field.type) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(kind.__name__, fields, array_like=True, omit_defaults=True, tag=kind.__name__)


OldBatch = msgspec.defstruct(
    "EventBatch",
    [("ts", float), ("events", list[as_array(BlockStored) | as_array(BlockRemoved) | as_array(AllBlocksCleared)]), ("data_parallel_rank", int | None, None)],
    array_like=True,
)
MAPS, ARRAYS = msgspec.msgpack.Decoder(EventBatch), msgspec.msgpack.Decoder(OldBatch)


class Server(hostile.Server):
    def __init__(self, *flags):
        super().__init__("-kv-events", "tcp://127.0.0.1:0", "-kv-events-replay", "tcp://127.0.0.1:0", "-threads", "1", *flags)
        self.context, self.sockets = zmq.Context(), []
        found = re.findall(r'publishing KV events" model=(\S+) topic=(\S+) endpoint=(\S+) replay=(\S+)', self.text())
        self.topics = {model: topic for model, topic, _, _ in found}
        self.endpoint = found[0][2]
        self.replays = {model: replay for model, _, _, replay in found}

    def stop(self):
        for each in self.sockets:
            each.close(linger=0)
        self.context.term()
        return super().stop()

    def subscribe(self, topic=""):
        """Returns a subscriber that receives all events from now on."""
        sub = self.context.socket(zmq.SUB)
        sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.connect(self.endpoint)
        assert monitor.poll(10000), "no handshake"
        sub.disable_monitor()
        monitor.close()
        self.sockets.append(sub)
        time.sleep(0.5)  # the subscription follows the handshake, and has no answer
        return sub

    def replay(self, first, model="tiny", kind=zmq.DEALER):
        """Returns the answers to a request for the batches from a number on."""
        client = self.context.socket(kind)
        self.sockets.append(client)
        client.connect(self.replays[model])
        request = [first.to_bytes(8, "big")]
        client.send_multipart(request if kind == zmq.REQ else [b"", *request])
        answers = []
        while client.poll(10000):
            answers.append(client.recv_multipart())
            if answers[-1][-2] == END or kind == zmq.REQ:
                return answers
        raise AssertionError(f"no end marker after {len(answers)} answers")

    def use(self, prompt, model="tiny", **options):
        """Generates some tokens, and returns those of the prompt and of the output."""
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **options}
        status, _, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        return prompt + json.loads(answer)["choices"][0]["token_ids"]


def receive(sub, wait_ms=1000):
    """Returns the messages of a subscriber until none arrives within a time."""
    messages = []
    while sub.poll(wait_ms):
        messages.append(sub.recv_multipart())
    return messages


class Cache:
    """The blocks of an engine by its events: for each hash, the hash before it and its tokens."""

    def __init__(self, decoder=MAPS):
        self.decoder, self.blocks, self.stored, self.removed = decoder, {}, 0, 0

    def apply(self, messages):
        for *_, payload in messages:
            batch = self.decoder.decode(payload)
            assert abs(batch.ts - time.time()) < 60, batch.ts
            assert batch.data_parallel_rank == 0
            for event in batch.events:
                getattr(self, type(event).__name__)(event)
        return self

    def BlockStored(self, event):
        assert event.medium == "GPU" and event.group_idx == 0 and event.lora_id is None
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size, event
        before = event.parent_block_hash
        assert before is None or before in self.blocks, "a block comes before its predecessor"
        for place, name in enumerate(event.block_hashes):
            begin = place * event.block_size
            self.blocks[name] = before, event.token_ids[begin : begin + event.block_size]
            before = name
        self.stored += len(event.block_hashes)

    def BlockRemoved(self, event):
        assert event.medium == "GPU" and event.group_idx == 0
        for name in event.block_hashes:
            del self.blocks[name]  # which it must have
        self.removed += len(event.block_hashes)

    def AllBlocksCleared(self, _):
        self.blocks.clear()

    def text(self, name):
        """Returns the tokens up to the end of a block."""
        before, tokens = self.blocks[name]
        return (self.text(before) if before is not None else []) + tokens

    def texts(self):
        return sorted(self.text(name) for name in self.blocks)


def prefixes(tokens, block_size=16):
    """Returns the text of each full block. The last token of a sequence is not computed."""
    return [tokens[: end + 1] for end in range(block_size - 1, len(tokens) - 1, block_size)]


def prompt(first, length):
    return [5 + (first * 37 + place * 11) % 1000 for place in range(length)]


class KvEvents(unittest.TestCase):
    def start(self, *flags):
        server = Server(*flags)
        self.addCleanup(lambda: self.assertEqual(server.stop(), 0))
        return server

    def test_blocks_have_the_tokens_of_prompt_and_output_and_form_chains(self):
        names = []
        for form, decoder, hashes, kind in [("map", MAPS, "int", int), ("array", ARRAYS, "bytes", bytes)]:
            server = self.start("-kv-events-format", form, "-kv-events-hashes", hashes)
            sub = server.subscribe()
            first = server.use(prompt(1, 100), max_tokens=30)
            second = server.use(first[:64] + prompt(2, 50))
            messages = receive(sub)
            cache = Cache(decoder).apply(messages)
            expected = prefixes(first) + [text for text in prefixes(second) if len(text) > 64]
            self.assertEqual(cache.texts(), sorted(expected))
            self.assertEqual({type(name) for name in cache.blocks}, {kind})
            names.append(list(cache.blocks))
            self.assertEqual([message[0] for message in messages], [b"tiny"] * len(messages))
            self.assertEqual([int.from_bytes(message[1], "big") for message in messages], list(range(len(messages))))
        self.assertEqual({len(name) for name in names[1]}, {32})
        self.assertEqual(names[0], [int.from_bytes(name, "big") % 2**64 for name in names[1]])

    def test_removed_blocks_are_reported_and_a_late_reader_receives_the_cached_ones(self):
        server = self.start("-kv-bytes", "1MiB", "-max-model-len", "256", "-kv-events-buffer", "2")
        sub = server.subscribe()
        texts = [server.use(prompt(number, 200)) for number in range(8)]
        messages = receive(sub)
        cache = Cache().apply(messages)
        self.assertGreater(cache.removed, 12)
        self.assertEqual(cache.stored - cache.removed, len(cache.blocks))
        self.assertIn(prefixes(texts[-1])[-1], cache.texts())
        self.assertNotIn(prefixes(texts[0])[-1], cache.texts())
        # Most batches are no longer kept.
        late = server.replay(0)
        self.assertEqual(int.from_bytes(late[0][2], "big"), len(messages) - 1)
        self.assertEqual(Cache().apply(late[:-1]).blocks, cache.blocks)
        # A reader that missed some batches has blocks that were removed. The answer corrects it.
        stale = Cache().apply(messages[:3])
        self.assertTrue(stale.blocks.keys() - cache.blocks.keys())
        self.assertEqual(stale.apply(server.replay(3)[:-1]).blocks, cache.blocks)

    def test_missed_batches_are_repeated_as_they_were(self):
        for form in "map", "array":
            server = self.start("-kv-events-format", form)
            sub = server.subscribe()
            for number in range(5):
                server.use(prompt(number, 40))
            messages = receive(sub)
            self.assertGreaterEqual(len(messages), 5)
            end = [b"", b"", END, b""] if form == "map" else [b"", END, b""]
            frames = [[b"", *(message if form == "map" else message[1:])] for message in messages]
            for first in 0, 2, len(messages) - 1, len(messages), 2**64 - 1:
                self.assertEqual(server.replay(first), frames[first:] + [end])
            # REQ sockets accept one answer for a request, and strip the empty frame.
            self.assertEqual(server.replay(2, kind=zmq.REQ), [frames[2][1:]])

    def test_each_model_has_a_topic_with_its_own_numbers_and_a_replay_socket(self):
        server = self.start("-model", f"other={hostile.MODEL}", "-kv-events-topic", "kv@host@{model}")
        self.assertEqual(server.topics, {"tiny": "kv@host@tiny", "other": "kv@host@other"})
        subs = {model: server.subscribe(topic) for model, topic in server.topics.items()}
        everything = server.subscribe()
        texts = {model: server.use(prompt(number, 50 + number), model) for number, model in enumerate(subs)}
        for model, sub in subs.items():
            messages = receive(sub)
            self.assertEqual(Cache().apply(messages).texts(), sorted(prefixes(texts[model])))
            self.assertEqual({message[0].decode() for message in messages}, {server.topics[model]})
            self.assertEqual([int.from_bytes(message[1], "big") for message in messages], list(range(len(messages))))
            self.assertEqual([message[1:] for message in server.replay(0, model)[:-1]], messages)
        self.assertEqual({message[0].decode() for message in receive(everything)}, set(server.topics.values()))

    def test_hostile_and_vanished_clients_disturb_neither_requests_nor_subscribers(self):
        server = self.start("-write-timeout", "2s")
        sub = server.subscribe()
        good = bytes([255, *[0] * 8, 127, 3, 0]) + b"NULL".ljust(52, b"\0")
        ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"
        held = []
        for address in server.endpoint, server.replays["tiny"]:
            port = int(address.rpartition(":")[2])
            for data in [b"", good[:20], good, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4, bytes(64), good + b"\x06" + (2**63).to_bytes(8, "big"), good + ready + b"\x02" + (2**63 - 1).to_bytes(8, "big"), good + ready + b"\x01\0" * 100, good + b"\x04\0", good + b"\x04\x09\x05READY\xff\0\0", good + ready.replace(b"SUB", b"PUB"), good + ready + b"\0\x01\x01"]:
                for linger in range(2):
                    client = socket.create_connection(("127.0.0.1", port))
                    client.sendall(data)
                    # A reset connection, and one that stays.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, (1).to_bytes(4, "little") + bytes(4))
                    client.close() if linger else held.append(client)
        invalid = server.context.socket(zmq.DEALER)
        server.sockets.append(invalid)
        invalid.connect(server.replays["tiny"])
        for request in [[b"x"], [b"", b"1234567"], [b"", bytes(9)], [b""] * 8]:
            invalid.send_multipart(request)
            self.assertFalse(invalid.poll(300))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda number: server.use(prompt(number, 60)), range(8)))
        messages = receive(sub)
        self.assertEqual(Cache().apply(messages).texts(), sorted(text for tokens in texts for text in prefixes(tokens)))
        self.assertEqual(len(server.replay(0)), len(messages) + 1)
        for client in held:
            client.close()

    def test_a_new_server_begins_with_number_0(self):
        server = self.start()
        sub = server.subscribe()
        server.use(prompt(1, 20))
        self.assertEqual([message[1] for message in receive(sub)], [bytes(8)])
        server = self.start("-kv-events", server.endpoint.replace("127.0.0.1:", "127.0.0.2:"))
        sub = server.subscribe()
        server.use(prompt(1, 20))
        self.assertEqual([message[1] for message in receive(sub)], [bytes(8)])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    hostile.program = sys.argv[1]
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
