"""llama.cpp by its C interface, batched as its server does: every running sequence's next token, then as much of the waiting prompts as fits."""

import time

import llama_cpp as api
import numpy

BATCH = 2048  # tokens of one call, as llama-server takes them
COMMITS = {"0.3.36": "0c1e57098"}  # of llama.cpp, as that package's changelog says


class Engine:
    version = f"llama-cpp-python {api.__version__}, llama.cpp {COMMITS.get(api.__version__, 'of an unknown commit')}"
    settings = "KV in f16, one cache for all sequences, attention in flash form as it chooses, 2,048 tokens a call"

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
            raise RuntimeError(f"llama.cpp makes no context of {size.positions} positions for {model}")
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
        answers = [(sequence, row) for sequence in decoding + prompts if (row := self.feed(sequence)) is not None]
        if api.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama.cpp fails on a batch of {self.batch.n_tokens} tokens")
        tokens = [self.likeliest(row) for _, row in answers]
        now = time.perf_counter()
        for (sequence, _), token in zip(answers, tokens):
            sequence.take(token, now)
            if not sequence.left:
                api.llama_memory_seq_rm(api.llama_get_memory(self.context), sequence.id, -1, -1)

    def feed(self, sequence):
        """Puts as much of what the model has not seen into the batch as fits; the row of the next token's logits, if it will have one."""
        room = BATCH - self.batch.n_tokens
        piece, sequence.unseen = sequence.unseen[:room], sequence.unseen[room:]
        for token in piece:
            row = self.batch.n_tokens
            self.batch.token[row], self.batch.pos[row] = token, sequence.seen
            self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, sequence.id
            self.batch.logits[row] = False
            self.batch.n_tokens += 1
            sequence.seen += 1
        if sequence.unseen or not piece:
            return None
        self.batch.logits[row] = True
        return row

    def likeliest(self, row):
        logits = api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


class Sequence:
    def __init__(self, id, prompt, tokens):
        self.id, self.unseen, self.seen, self.left, self.times = id, prompt, 0, tokens, []

    def take(self, token, now):
        self.unseen, self.left = [token], self.left - 1
        self.times.append(now)
