"""OpenVINO GenAI's continuous batching pipeline: paged attention, prompts in chunks."""

import time

import numpy
import openvino
import openvino_genai

BLOCK = 32  # positions of one KV block on CPUs


class Engine:
    version = f"openvino-genai {openvino_genai.__version__}"
    settings = "KV in u8 (default), default quantization of activations, 2,048 tokens per step, no prefix cache"

    def __init__(self, model, size):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = size.positions // BLOCK + size.sequences + 1
        scheduler.max_num_seqs = size.sequences
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": size.threads, "PERFORMANCE_HINT": "LATENCY"}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.requests = 0

    def run(self, requests):
        handles = [self.add(prompt, tokens) for prompt, tokens in requests]
        times = [[] for _ in handles]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter()
            for handle, token_times in zip(handles, times):
                if handle.can_read():
                    token_times += [now for output in handle.read().values() for _ in output.generated_ids]
        return times

    def add(self, prompt, tokens):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.eos_token_id = True, False, 2
        self.requests += 1
        return self.pipeline.add_request(self.requests, openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
