"""llama.cpp through its C API, with the batches of its server: the next token of every running sequence, then waiting prompts."""

import time

import llama_cpp as api
import numpy

BATCH = 2048  # tokens per call, as in llama-server
COMMITS = {"0.3.36": "0c1e57098"}  # of llama.cpp, from the changelog of the package


class Engine:
    version = f"llama-cpp-python {api.__version__}, llama.cpp {COMMITS.get(api.__version__, 'of an unknown commit')}"
    settings = "KV in f16, one cache for all sequences, default use of flash attention, 2,048 tokens per call"

    def __init__(self, model, size):
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx = size.positions
        params.n_seq_max = size.sequences
        params.kv_unified = True
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = size.threads
        params.no_perf = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot create a context of {size.positions} positions for {model}")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)

    def run(self, requests):
        sequences = [Sequence(id, prompt, tokens) for id, (prompt, tokens) in enumerate(requests)]
        while any(sequence.left for sequence in sequences):
            self.step([sequence for sequence in sequences if sequence.left])
        return [sequence.times for sequence in sequences]

    def step(self, running):
        self.batch.n_tokens = 0
        decoding = [sequence for sequence in running if sequence.times]
        prompts = [sequence for sequence in running if not sequence.times]
        rows = [(sequence, row) for sequence in decoding + prompts if (row := self.feed(sequence)) is not None]
        if api.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode failed on a batch of {self.batch.n_tokens} tokens")
        tokens = [self.most_probable(row) for _, row in rows]
        now = time.perf_counter()
        for (sequence, _), token in zip(rows, tokens):
            sequence.append(token, now)
            if not sequence.left:
                api.llama_memory_seq_rm(api.llama_get_memory(self.context), sequence.id, -1, -1)

    def feed(self, sequence):
        """Adds tokens of the sequence to the batch. Returns the row of the logits, or None if the prompt is not complete."""
        free = BATCH - self.batch.n_tokens
        chunk, sequence.pending = sequence.pending[:free], sequence.pending[free:]
        for token in chunk:
            row = self.batch.n_tokens
            self.batch.token[row], self.batch.pos[row] = token, sequence.computed
            self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, sequence.id
            self.batch.logits[row] = False
            self.batch.n_tokens += 1
            sequence.computed += 1
        if sequence.pending or not chunk:
            return None
        self.batch.logits[row] = True
        return row

    def most_probable(self, row):
        logits = api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


class Sequence:
    def __init__(self, id, prompt, tokens):
        self.id, self.pending, self.computed, self.left, self.times = id, prompt, 0, tokens, []

    def append(self, token, now):
        self.pending, self.left = [token], self.left - 1
        self.times.append(now)
