"""KV stores, with the libraries of connectors/ (`make connectors`)."""

import concurrent.futures
import ctypes
import gc
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from support import LAST_RESORT, MODEL, SMALL, Case, descriptors, open_engine

import pagedllm
from pagedllm import Code, Engine, Error, KvStore, Sampling, run_worker

# 31 full blocks and 4 tokens.
PROMPT = [3 + i * i % 250 for i in range(500)]
ANSWER = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
# An engine writes its blocks while it is closed, and the tests must not depend on time.
PATIENT = {"kv_store_timeout_ms": LAST_RESORT * 1000}


def answer(store, **options):
    """Return the answer of an engine with the store, and its hits."""
    with open_engine(kv_store=store, **{**PATIENT, **options}) as engine:
        completion = engine.generate(PROMPT, ANSWER)
        return completion, engine.stats().kv_store_hits


def count_closes(store):
    """Return a list that grows when a store is closed."""
    closes, kind = [], type(store._struct.close)
    original = kind(ctypes.cast(store._struct.close, ctypes.c_void_p).value)

    def close(data):
        closes.append(data)
        original(data)

    store._struct.close = kind(close)
    return closes


class Stores(Case):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.directory = self.folder / "store"

    def assertShared(self, open_store, **options):
        """Check that a second engine has the blocks of the first, and the same tokens."""
        expected = self.engine.generate(PROMPT, ANSWER)
        self.assertEqual((expected.cached_tokens, len(expected.tokens)), (0, 24))
        for cached, hits in ((0, 0), (496, 31)):
            completion, found = answer(open_store(), **options)
            self.assertEqual(completion.tokens, expected.tokens)
            self.assertEqual((completion.cached_tokens, found), (cached, hits))

    def test_an_engine_finds_the_blocks_of_another_one(self):
        self.assertShared(lambda: KvStore.files(self.directory))

    def test_an_engine_finds_blocks_with_all_options(self):
        self.assertShared(
            lambda: KvStore.files(self.directory, max_bytes=1 << 30, io_uring=False, threads=2),
            kv_store_max_bytes=64 << 20, kv_store_max_operations=8, kv_store_secret=b"a secret \0 of 32 bytes")
        self.assertEqual(answer(KvStore.files(self.directory), kv_store_secret=b"a secret \0 of 33 bytes")[1], 0)
        self.assertEqual(answer(KvStore.files(self.directory))[1], 0)

    def test_an_engine_finds_blocks_in_a_server(self):
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        self.assertIsNotNone(program, "neither valkey-server nor redis-server is installed")
        socket = str(self.folder / "socket")
        server = subprocess.Popen([program, "--port", "0", "--unixsocket", socket, "--save", "", "--requirepass", "sesame",
                                   "--dir", str(self.folder), "--logfile", str(self.folder / "log")])
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.assertEventually(lambda: os.path.exists(socket), "the server has started")
        store = {"username": "default", "password": "sesame", "database": 3, "key_prefix": "mine:", "ttl_seconds": 3600,
                 "timeout_ms": LAST_RESORT * 1000}
        self.assertShared(lambda: KvStore.valkey(socket, **store))
        # Each option has an effect, so blocks with other options are not found.
        for name, value in (("database", 4), ("key_prefix", "yours:"), ("password", "wrong"), ("username", "other")):
            self.assertEqual(answer(KvStore.valkey(socket, **{**store, name: value}))[1], 0, name)

    def test_wrong_options_are_errors(self):
        refused = self.assertRefused
        (self.folder / "other").write_text("a file")
        refused(Code.INVALID_ARGUMENT, str(self.folder), KvStore.files, self.folder)
        refused(Code.IO, "/nowhere/store", KvStore.files, "/nowhere/store")
        refused(Code.INVALID_ARGUMENT, "directory is empty", KvStore.files, "")
        refused(Code.INVALID_ARGUMENT, "max_bytes is 5", KvStore.files, self.directory, max_bytes=5)
        refused(Code.INVALID_ARGUMENT, "threads is 65", KvStore.files, self.directory, threads=65)
        refused(Code.INVALID_ARGUMENT, "threads is -1", KvStore.files, self.directory, threads=-1)
        refused(Code.INVALID_ARGUMENT, "port is 65536", KvStore.valkey, port=65536)
        refused(Code.INVALID_ARGUMENT, "timeout_ms is 3600001", KvStore.valkey, timeout_ms=3600001)
        refused(Code.INVALID_ARGUMENT, "ttl_seconds is 31536001", KvStore.valkey, ttl_seconds=31536001)
        with KvStore.files(self.directory) as store:
            refused(Code.INVALID_ARGUMENT, "kv_store_secret", open_engine, kv_store=store, kv_store_secret=b"short")
            refused(Code.INVALID_ARGUMENT, "kv_store_max_operations", open_engine, kv_store=store,
                    kv_store_max_operations=65537)
            refused(Code.INVALID_ARGUMENT, "kv_store_timeout_ms", open_engine, kv_store=store, kv_store_timeout_ms=3600001)

    def test_a_library_that_cannot_be_loaded_is_an_error(self):
        refused = self.assertRefused
        refused(Code.IO, "make connectors", KvStore.files, self.directory, library="/nowhere/libpagedllm_files.so")
        refused(Code.IO, "pllm_valkey_store", KvStore.valkey, library=pagedllm._lib._name)


class Ownership(Case):
    def setUp(self):
        super().setUp()
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.directory = folder + "/store"

    def open(self):
        store = KvStore.files(self.directory)
        return store, count_closes(store)

    def test_an_engine_closes_its_store_once(self):
        store, closes = self.open()
        with store:
            engine = open_engine(kv_store=store)
        store.close()
        self.assertEqual(len(closes), 0)
        engine.close()
        self.assertEqual(len(closes), 1)
        del store
        gc.collect()
        self.assertEqual(len(closes), 1)

    def test_a_store_of_another_engine_is_refused(self):
        store, closes = self.open()
        taken = "the KV store belongs to another engine; open a store for each engine"
        with open_engine(kv_store=store):
            self.assertRefused(Code.INVALID_ARGUMENT, taken, open_engine, kv_store=store)
        self.assertRefused(Code.INVALID_ARGUMENT, taken, open_engine, kv_store=store)
        store.close()
        self.assertRefused(Code.CLOSED, "the KV store is closed", open_engine, kv_store=store)
        self.assertEqual(len(closes), 1)

    def test_an_engine_that_cannot_be_created_leaves_the_store(self):
        store, closes = self.open()
        with store:
            self.assertRefused(Code.IO, "/nowhere", Engine, "/nowhere", kv_store=store)
            self.assertRefused(Code.INVALID_ARGUMENT, "prefix cache is disabled", open_engine, kv_store=store, prefix_cache=False)
            self.assertRefused(Code.INVALID_ARGUMENT, "communicator", run_worker, MODEL, kv_store=store, tensor_parallel=2, **SMALL)
            self.assertEqual(len(closes), 0)
            open_engine(kv_store=store).close()
            self.assertEqual(len(closes), 1)
        self.assertEqual(len(closes), 1)

    def test_a_store_that_is_not_used_is_closed_once(self):
        store, closes = self.open()
        with store:
            self.assertEqual(len(closes), 0)
        store.close()
        self.assertEqual(len(closes), 1)

    def test_a_store_that_is_unreachable_is_closed(self):
        gc.disable()
        self.addCleanup(gc.enable)
        before = descriptors()
        store = KvStore.files(self.directory)
        self.assertGreater(descriptors(), before)
        del store
        self.assertEqual(descriptors(), before)

    def test_threads_do_not_give_a_store_to_two_engines(self):
        store, closes = self.open()
        results = []

        def create():
            try:
                results.append(open_engine(kv_store=store))
            except Error as error:
                results.append(error.code)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(create)
        engines = [one for one in results if isinstance(one, Engine)]
        self.assertEqual([one for one in results if one not in engines], [Code.INVALID_ARGUMENT] * 3)
        engines[0].close()
        self.assertEqual(len(closes), 1)


if __name__ == "__main__":
    unittest.main()
