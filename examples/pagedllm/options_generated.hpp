// Generated from src/ffi by `make header`. Do not edit.
// The options of the tool that mirror the C API: scripts/bindings/command_line.py.
#pragma once

#include "options.hpp"

namespace tool {

inline constexpr Choice<pagedllm::Dtype> dtype_choices[] = {
    {"auto", pagedllm::Dtype::automatic},
    {"f32", pagedllm::Dtype::f32},
    {"bf16", pagedllm::Dtype::bf16},
    {"int8", pagedllm::Dtype::int8},
    {"f16", pagedllm::Dtype::f16},
    {"fp8", pagedllm::Dtype::fp8},
};

inline constexpr Choice<pagedllm::Isa> isa_choices[] = {
    {"auto", pagedllm::Isa::automatic},
    {"portable", pagedllm::Isa::portable},
    {"avx2", pagedllm::Isa::avx2},
    {"avx512", pagedllm::Isa::avx512},
    {"avx512-bf16", pagedllm::Isa::avx512_bf16},
    {"avx-vnni", pagedllm::Isa::avx_vnni},
    {"avx512-vnni", pagedllm::Isa::avx512_vnni},
};

inline constexpr Choice<pagedllm::Weights> weights_choices[] = {
    {"as-stored", pagedllm::Weights::as_stored},
    {"f32", pagedllm::Weights::f32},
    {"f16", pagedllm::Weights::f16},
    {"bf16", pagedllm::Weights::bf16},
    {"int8", pagedllm::Weights::int8},
    {"int4", pagedllm::Weights::int4},
    {"int4-asymmetric", pagedllm::Weights::int4_asymmetric},
    {"fp8", pagedllm::Weights::fp8},
};

inline constexpr Choice<pagedllm::Packed> packed_choices[] = {
    {"unused", pagedllm::Packed::unused},
    {"read", pagedllm::Packed::read},
    {"saved", pagedllm::Packed::saved},
    {"unsaved", pagedllm::Packed::unsaved},
};

inline constexpr Choice<pagedllm::Preemption> preemption_choices[] = {
    {"recompute", pagedllm::Preemption::recompute},
    {"swap", pagedllm::Preemption::swap},
    {"auto", pagedllm::Preemption::automatic},
};

inline constexpr Choice<pagedllm::Order> order_choices[] = {
    {"fcfs", pagedllm::Order::fcfs},
    {"priority", pagedllm::Order::priority},
    {"shortest-predicted", pagedllm::Order::shortest_predicted},
};

inline constexpr Choice<pagedllm::Batching> batching_choices[] = {
    {"mixed", pagedllm::Batching::mixed},
    {"prefill-first", pagedllm::Batching::prefill_first},
    {"decode-first", pagedllm::Batching::decode_first},
    {"static", pagedllm::Batching::static_},
};

inline constexpr Choice<pagedllm::Allocation> allocation_choices[] = {
    {"on-demand", pagedllm::Allocation::on_demand},
    {"max-tokens", pagedllm::Allocation::max_tokens},
};

inline constexpr Choice<pagedllm::EarlyStopping> early_stopping_choices[] = {
    {"no", pagedllm::EarlyStopping::no},
    {"yes", pagedllm::EarlyStopping::yes},
    {"never", pagedllm::EarlyStopping::never},
};

inline constexpr Choice<pagedllm::FinishReason> finish_reason_choices[] = {
    {"none", pagedllm::FinishReason::none},
    {"stop", pagedllm::FinishReason::stop},
    {"length", pagedllm::FinishReason::length},
    {"abort", pagedllm::FinishReason::abort},
    {"error", pagedllm::FinishReason::error},
    {"deadline", pagedllm::FinishReason::deadline},
};

inline constexpr Choice<pagedllm::StopReason> stop_reason_choices[] = {
    {"none", pagedllm::StopReason::none},
    {"eos", pagedllm::StopReason::eos},
    {"token", pagedllm::StopReason::token},
    {"string", pagedllm::StopReason::string},
    {"grammar", pagedllm::StopReason::grammar},
};

inline std::vector<Option> engine_options(pagedllm::Options &to) {
    return {
        text("--device", "TEXT", to.device,
            "\"cpu\" (default), or \"cuda:0\" for the first CUDA device. A list such as "
            "\"cuda:0,cuda:1\" divides the model among these devices."),
        size("--kv-bytes", "SIZE", to.kv_bytes,
            "KV pool size in bytes. 0 (default): enough for --max-seqs sequences of "
            "--max-model-len tokens, at most 1 GiB."),
        number("--block-size", "N", to.block_size,
            "Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256."),
        choice("--kv-dtype", dtype_choices, to.kv_dtype,
            "Data type of KV blocks: auto, f32, bf16, int8, f16, fp8. Default auto: f32 for "
            "models in f32, else bf16."),
        number("--max-model-len", "N", to.max_model_len,
            "Maximum length of a sequence in tokens, prompt and output together. 0 (default): "
            "the model's own maximum, or what the pool holds."),
        number("--max-batch-tokens", "N", to.max_batch_tokens,
            "Maximum number of tokens in one step, prompt and decode tokens of all sequences "
            "together. Default 512."),
        number("--max-seqs", "N", to.max_seqs,
            "Maximum number of running sequences, at most --max-batch-tokens. Default 64."),
        number("--prefill-chunk", "N", to.prefill_chunk,
            "Maximum number of prompt tokens of one sequence in one step. 0 (default): "
            "--max-batch-tokens."),
        number("--threads", "N", to.threads,
            "Number of threads. 0 (default): the number of CPUs on which the process may run."),
        choice("--isa", isa_choices, to.isa,
            "Instruction path: auto, portable, avx2, avx512, avx512-bf16, avx-vnni, "
            "avx512-vnni. Default auto. Results have the same bits within a path, not across "
            "paths."),
        toggle("--skip-tokenizer", to.skip_tokenizer, true,
            "Load no tokenizer: prompts and outputs are token ids."),
        toggle("--no-prefix-cache", to.no_prefix_cache, true,
            "Disable the prefix cache."),
        toggle("--batch-invariant", to.batch_invariant, true,
            "On a CUDA device: the results of a sequence do not depend on the batch, as on "
            "the CPU. Slower."),
        number("--max-waiting-requests", "N", to.max_waiting_requests,
            "Maximum number of requests that wait for their first step. 0 (default): no "
            "limit."),
        number("--max-waiting-tokens", "N", to.max_waiting_tokens,
            "Maximum number of tokens that the waiting requests have to compute. 0 (default): "
            "no limit."),
        size("--swap-bytes", "SIZE", to.swap_bytes,
            "Size in bytes of the host tier, which holds the KV of swapped requests and idle "
            "sequences. 0 (default): none."),
        text("--swap-path", "DIR", to.swap_path,
            "Directory for the host tier, which is a file there. Default: the tier is in "
            "memory."),
        choice("--preemption", preemption_choices, to.preemption,
            "Treatment of preempted requests: recompute, swap, auto. Default recompute. The "
            "others need --swap-bytes."),
        choice("--order", order_choices, to.order,
            "Order of the waiting requests: fcfs, priority, shortest-predicted. Default fcfs."),
        duration("--ageing-ms", "MS", to.ageing,
            "Waiting time in milliseconds after which a request is preferred. 0 (default): "
            "10,000."),
        choice("--batching", batching_choices, to.batching,
            "Composition of a step: mixed, prefill-first, decode-first, static. Default "
            "mixed."),
        number("--prefill-budget", "N", to.prefill_budget,
            "Prompt tokens for decode-first and prefill-first. 0 (default): 256 and 2048."),
        choice("--allocation", allocation_choices, to.allocation,
            "Number of blocks that a request needs to start: on-demand, max-tokens. Default "
            "on-demand."),
        text("--trace-path", "FILE", to.trace_path,
            "File for a trace of every step, in the format of Perfetto. An existing file is "
            "replaced."),
        text("--journal-path", "FILE", to.journal_path,
            "File for a journal, from which pagedllm-replay repeats the steps. It contains "
            "prompts. An existing file is replaced."),
        choice("--weight-format", weights_choices, to.weight_format,
            "Format of the weights in memory: as-stored, f32, f16, bf16, int8, int4, "
            "int4-asymmetric, fp8. Fewer bits take less memory and time, and cost quality. Of "
            "the 4-bit formats, int4-asymmetric is more precise. Default as-stored."),
        number("--weight-group", "N", to.weight_group,
            "Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. Smaller is "
            "more precise. 0 (default): 32."),
        text("--packed-path", "DIR", to.packed_path,
            "Directory that keeps packed weights, so that the next start is faster. Default: "
            "weights are packed each time."),
        text("--cpus", "TEXT", to.cpus,
            "CPUs to which the threads are pinned, such as 0-3,8. Default: threads are not "
            "pinned."),
        number("--memory-fraction", "X", to.memory_fraction,
            "CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights "
            "and working memory, for the KV pool. Cannot be combined with --kv-bytes. 0 "
            "(default): --kv-bytes is used."),
        size("--max-prompt-bytes", "SIZE", to.max_prompt_bytes,
            "Maximum length in bytes of a prompt. 0 (default): 64 for each token of "
            "--max-model-len, at least 1048576."),
        number("--tensor-parallel", "N", to.tensor_parallel,
            "Number of workers that divide each layer. 0 (default): 1, or with a list of "
            "devices their number divided by --pipeline-parallel. The number of attention "
            "heads and the widths of MLPs must be multiples of it, and so must the number of "
            "KV heads, unless it is a multiple of that."),
        number("--pipeline-parallel", "N", to.pipeline_parallel,
            "Number of groups of workers, each with some of the layers. 0 (default): 1."),
        duration("--worker-timeout-ms", "MS", to.worker_timeout,
            "Time in milliseconds after which a wait for another worker fails. It must be "
            "longer than any step, and than the difference between the times in which the "
            "workers load their parts of the model. 0 (default): 60000."),
    };
}

inline std::vector<Option> sampling_options(pagedllm::Sampling &to) {
    return {
        number("--seed", "N", to.seed,
            "Seed of the random numbers. Default: the same in each run."),
        tokens("--stop-token-ids", "ID,...", to.stop_token_ids,
            "Tokens that end the sequence. They are reported in tokens, but not in the text. "
            "At most 1024."),
        texts("--stop", "TEXT", to.stop,
            "Strings that end the sequence, within a token or across tokens. They do not "
            "appear in the text. At most 1024 strings of 16384 bytes in all."),
        number("--temperature", "X", to.temperature,
            "Temperature. 0 selects greedy sampling. Range 0 to 10,000. Default 1."),
        number("--top-p", "X", to.top_p,
            "Keeps the most probable tokens whose probabilities sum to at least this value. "
            "Range above 0 to 1. Default 1: all."),
        number("--min-p", "X", to.min_p,
            "Keeps tokens whose probability is at least this fraction of the largest. Range 0 "
            "to 1. Default 0: all."),
        number("--top-k", "N", to.top_k,
            "Keeps the k most probable tokens. Default 0: all."),
        number("--max-tokens", "N", to.max_tokens,
            "Maximum number of generated tokens. 0: only the prompt is computed. Default: up "
            "to --max-model-len."),
        number("--min-tokens", "N", to.min_tokens,
            "Number of tokens before which neither end-of-sequence tokens nor stops end the "
            "sequence. Default 0."),
        toggle("--ignore-eos", to.ignore_eos, true,
            "Do not stop at end-of-sequence tokens."),
        toggle("--include-stop", to.include_stop, true,
            "The stop string, or the text of the token that ends the sequence, stays in the "
            "text."),
        number("--typical-p", "X", to.typical_p,
            "Keeps the tokens with the most typical surprise whose probabilities sum to at "
            "least this value. Range above 0 to 1. Default 1: all."),
        number("--top-n-sigma", "X", to.top_n_sigma,
            "Keeps tokens whose logit is within this many standard deviations of the largest. "
            "Range 0 to 100. Default 0: all."),
        number("--xtc-probability", "X", to.xtc_probability,
            "Probability with which XTC removes the most probable tokens. Range 0 to 1. "
            "Default 0: never."),
        number("--xtc-threshold", "X", to.xtc_threshold,
            "Probability from which on a token counts as a top choice for XTC. Range 0 to "
            "0.5. Default 0.1."),
        number("--mirostat-tau", "X", to.mirostat_tau,
            "Mirostat 2: target surprise in bits per token. Range 0 to 100. Default 0: off."),
        number("--mirostat-eta", "X", to.mirostat_eta,
            "Mirostat 2: learning rate. Range above 0 to 1. Default 0.1."),
        number("--presence-penalty", "X", to.presence_penalty,
            "Subtracted from the logit of each token that has been generated. Range -2 to 2. "
            "Default 0."),
        number("--frequency-penalty", "X", to.frequency_penalty,
            "Subtracted from the logit of a token for each time it has been generated. Range "
            "-2 to 2. Default 0."),
        number("--repetition-penalty", "X", to.repetition_penalty,
            "Divides positive logits, and multiplies negative logits, of all tokens of the "
            "prompt and the output. Range 0.01 to 100. Default 1: off."),
        number("--no-repeat-ngram-size", "N", to.no_repeat_ngram_size,
            "No n-gram of this many tokens occurs twice. At most 256. Default 0: off."),
        biases("--logit-bias", "ID=VALUE", to.logit_bias,
            "Values that are added to the logits of tokens, from -100 to 100, as ID=VALUE."),
        texts("--bad-words", "TEXT", to.bad_words,
            "Texts that the output must not contain. At most 1024 texts of 65536 bytes in "
            "all."),
        token_lists("--bad-words-ids", "ID,...", to.bad_words_ids,
            "Token sequences that the output must not contain. At most 1024 sequences of at "
            "most 256 tokens each."),
        tokens("--allowed-token-ids", "ID,...", to.allowed_token_ids,
            "The only tokens that may be sampled. Default: all. At most as many as the "
            "vocabulary has tokens."),
    };
}

inline std::vector<Option> report_options(pagedllm::Sampling &to) {
    return {
        toggle("--logprobs", to.logprobs, true,
            "Report the log probability of each generated token, and of the --top-logprobs "
            "most probable tokens."),
        toggle("--prompt-logprobs", to.prompt_logprobs, true,
            "Report the log probability of each prompt token except the first."),
        toggle("--echo", to.echo, true,
            "The output begins with the prompt."),
        number("--top-logprobs", "N", to.top_logprobs,
            "With --logprobs: number of most probable tokens reported for each generated "
            "token. At most 128. Default 0."),
        number("--prompt-top-logprobs", "N", to.prompt_top_logprobs,
            "With --prompt-logprobs: number of most probable tokens reported for each prompt "
            "token. At most 128. Default 0."),
        number("--prompt-logprobs-start", "N", to.prompt_logprobs_start,
            "Position of the first prompt token whose log probability is reported. Default 0: "
            "all except the first token."),
    };
}

inline std::vector<Option> dry_options(pagedllm::Dry &to) {
    return {
        number("--dry-multiplier", "X", to.multiplier,
            "Strength of the penalty. Range 0 to 100. Default 0.8. 0 disables it."),
        number("--dry-base", "X", to.base,
            "Base of the exponential growth. Range 1 to 100. Default 1.75."),
        number("--dry-allowed-length", "N", to.allowed_length,
            "Length in tokens of the longest repetition without a penalty. Default 2."),
        number("--dry-penalty-last-n", "N", to.penalty_last_n,
            "Number of last tokens that are searched for repetitions. 0 (default): all."),
        texts("--dry-sequence-breakers", "TEXT", to.sequence_breakers,
            "Texts that end a repetition. Default: newline, colon, quotation mark and "
            "asterisk. At most 64 texts of at most 128 bytes each."),
    };
}

inline std::vector<Option> beam_options(pagedllm::Beam &to) {
    return {
        number("--beam-width", "N", to.width,
            "Number of beams, 2 to 64. Default 4."),
        number("--beam-groups", "N", to.groups,
            "Number of groups of beams, each with its own search. Default 1."),
        number("--beam-diversity-penalty", "X", to.diversity_penalty,
            "Subtracted from the log probability of a token for each beam of an earlier group "
            "that chose it in the same step, before the repetition penalty. Range 0 to "
            "1,000,000. Default 0."),
        number("--beam-length-penalty", "X", to.length_penalty,
            "The score of a beam is the sum of its log probabilities divided by its length to "
            "this power. Range -5 to 5. Default 1."),
        choice("--beam-early-stopping", early_stopping_choices, to.early_stopping,
            "When the search stops: no, yes, never. Default no."),
    };
}

inline std::vector<Option> request_options(pagedllm::Request &to) {
    return {
        number("--n", "N", to.n,
            "Number of results: samples, or best beams. Default 1."),
        toggle("--no-add-special", to.add_special, false,
            "The tokenizer adds no special tokens, such as BOS, to a prompt."),
        toggle("--no-skip-special", to.skip_special, false,
            "Special tokens stay in the text."),
        number("--best-of", "N", to.best_of,
            "Number of samples to generate, of which the n with the highest log probability "
            "are returned. 0 (default): n."),
        number("--truncate-prompt-tokens", "N", to.truncate_prompt_tokens,
            "Keeps only this many tokens at the end of the prompt. 0 (default) keeps all."),
        duration("--deadline-ms", "MS", to.deadline,
            "Time in milliseconds after which a request ends with the tokens it has. 0 "
            "(default): none."),
    };
}

}  // namespace tool
