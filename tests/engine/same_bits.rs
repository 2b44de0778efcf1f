//! The same bits whatever the batch: each request alone, against all of them together under every kind of disturbance.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use crate::support::{Random, TempDir, configs, write_random_model};
use pagedllm::engine::{Engine, MemoryPlan, Prompt, Queue, Request};
use pagedllm::options::{
    AllocationPolicy, BatchingPolicy, EngineOptions, Isa, KvDtype, OrderPolicy, Policies, SamplingParams, WeightFormat,
};
use pagedllm::scheduler::FinishReason;
use serde_json::{Value, json};

const MAX_LEN: usize = 768;
/// They straddle the edges of blocks (8 to 256), tiles (3, 6, 8, 12) and spans (128).
const LENGTHS: [usize; 24] = [1, 2, 7, 8, 11, 13, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 383, 512, 700];

/// What must not change: tokens, and the bits of their log probabilities.
type Answers = HashMap<u64, Vec<(u32, u32)>>;

fn requests(vocab: usize) -> Vec<Request> {
    let mut random = Random(11);
    let one = |(i, &len): (usize, &usize)| {
        let prompt = (0..len).map(|_| random.below(vocab) as u32).collect();
        // Every other one samples, so that the generator is proven too.
        let temperature = if i % 2 == 0 { 0.0 } else { 0.9 };
        let sampling = SamplingParams {
            temperature,
            top_p: 0.95,
            seed: Some(i as u64),
            max_tokens: Some(40 + random.below(100)),
            ignore_eos: true,
            logprobs: Some(0),
            ..Default::default()
        };
        Request { user_data: i as u64, priority: i as i32 % 5, ..Request::new(Prompt::Tokens(prompt), sampling) }
    };
    // Short ones first: many are admitted, and then grow into each other's blocks.
    LENGTHS.iter().enumerate().map(one).collect()
}

/// Steps until all have ended. Queue number k is read every (k + 1)th step. Returns how often a sequence was passed over for its reader.
fn drain(engine: &Engine, queues: &[&Queue], answers: &mut Answers) -> u64 {
    let mut paused = 0;
    let mut read = |queue: &Queue| {
        for output in queue.poll(Some(Default::default())).unwrap() {
            assert!(matches!(output.finish, None | Some(FinishReason::Length)), "{:?}: {:?}", output.finish, output.error);
            let pairs = output.tokens.iter().copied().zip(output.logprobs.tokens.iter().map(|p| p.to_bits()));
            answers.entry(output.user_data).or_default().extend(pairs);
        }
    };
    for step in 1.. {
        let report = engine.step().unwrap();
        paused += report.paused;
        let all = report.unfinished == 0;
        queues.iter().enumerate().filter(|(k, _)| all || step % (k + 1) == 0).for_each(|(_, queue)| read(queue));
        if all {
            break;
        }
    }
    paused
}

/// Each request by itself, its prompt in one chunk.
fn alone(options: &EngineOptions) -> Answers {
    let engine = Engine::create(options).unwrap();
    let mut answers = Answers::new();
    for request in requests(engine.info().vocab_size) {
        engine.add_request(request).unwrap();
        assert_eq!(drain(&engine, &[engine.queue()], &mut answers), 0);
    }
    assert_eq!(engine.stats().preemptions, 0);
    answers
}

/// All together, their readers of different speed, so that some pause; and how often one was preempted.
fn together(options: &EngineOptions) -> (Answers, u64) {
    let engine = Engine::create(options).unwrap();
    let queues = [30, 6, 3, 2].map(|capacity| engine.create_queue(capacity).unwrap());
    for (i, request) in requests(engine.info().vocab_size).into_iter().enumerate() {
        engine.add_request_to(&queues[i % queues.len()], request).unwrap();
    }
    let mut answers = Answers::new();
    let paused = drain(&engine, &queues.each_ref(), &mut answers);
    assert!(paused > 20, "{paused}");
    let stats = engine.stats();
    assert_eq!((stats.blocks_used, stats.finished_length), (0, LENGTHS.len() as u64));
    (answers, stats.preemptions)
}

fn every_policy() -> Vec<Policies> {
    let ageing = Duration::from_millis(5);
    let orders = [OrderPolicy::Fcfs, OrderPolicy::Priority { ageing }, OrderPolicy::ShortestPredicted { ageing }];
    let batchings = [
        BatchingPolicy::Mixed,
        BatchingPolicy::PrefillFirst { threshold: 100 },
        BatchingPolicy::DecodeFirst { budget: 50 },
        BatchingPolicy::Static,
    ];
    let mut all = Vec::new();
    for order in orders {
        for batching in batchings {
            all.extend([AllocationPolicy::OnDemand, AllocationPolicy::MaxTokens].map(|allocation| Policies {
                order,
                batching,
                allocation,
            }));
        }
    }
    all
}

#[test]
fn under_every_policy() {
    let (_, config) = configs(MAX_LEN).pop().unwrap();
    let dir = TempDir::new();
    write_random_model(&dir.0, &config, false, 7);
    let base = EngineOptions { isa: None, ..options(&dir.0, Isa::Portable, KvDtype::F32) };
    let expected = alone(&base);
    let MemoryPlan { block_bytes, .. } = Engine::plan(&base).unwrap();
    for policies in every_policy() {
        let cramped = EngineOptions { prefill_chunk: Some(64), kv_bytes: Some(56 * block_bytes), policies, ..base.clone() };
        let (found, preemptions) = together(&cramped);
        let disturbs = policies.allocation == AllocationPolicy::OnDemand && policies.batching != BatchingPolicy::Static;
        assert!(preemptions >= 8 || !disturbs, "{policies:?}: only {preemptions} preemptions");
        assert_same(&format!("{policies:?}, preempted {preemptions} times"), &expected, &found);
    }
}

fn options(dir: &Path, isa: Isa, kv_dtype: KvDtype) -> EngineOptions {
    EngineOptions {
        model_dir: dir.into(),
        isa: Some(isa),
        kv_dtype: Some(kv_dtype),
        threads: Some(1),
        max_model_len: Some(MAX_LEN),
        max_batch_tokens: 1024,
        max_seqs: 24,
        skip_tokenizer: true,
        ..Default::default()
    }
}

fn assert_same(what: &str, expected: &Answers, found: &Answers) {
    for (request, expected) in expected {
        let found = &found[request];
        let first = expected.iter().zip(found).position(|(a, b)| a != b);
        assert!(expected == found, "{what}: request {request} (prompt of {}) differs from token {first:?} on", LENGTHS[*request as usize]);
    }
}

fn batch_changes_nothing(isa: Isa, kv_dtype: KvDtype) {
    if !isa.is_present() {
        return println!("skipped: this machine lacks {}", isa.name());
    }
    for (family, config) in configs(MAX_LEN) {
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, kv_dtype != KvDtype::F32, 7);
        nothing_changes(family, &options(&dir.0, isa, kv_dtype));
    }
}

fn of_family(name: &str) -> (&'static str, Value) {
    configs(MAX_LEN).into_iter().find(|(family, _)| *family == name).unwrap()
}

/// Whatever goes on beside a request, in an engine of these options.
fn nothing_changes(name: &str, base: &EngineOptions) {
    let expected = alone(base);
    for (threads, chunk) in [(1, 7), (2, 64)] {
        let what = format!("{name}, {threads} threads, chunks of {chunk}");
        let disturbed = EngineOptions { threads: Some(threads), prefill_chunk: Some(chunk), ..base.clone() };
        assert_same(&what, &expected, &together(&disturbed).0);
    }
    // Where some layers have a window, a sequence has few blocks for these.
    let MemoryPlan { block_bytes, groups, .. } = Engine::plan(base).unwrap();
    let kv_bytes = Some((48 + 8 * (groups as u64 - 1)) * block_bytes);
    let cramped = EngineOptions { threads: Some(2), prefill_chunk: Some(64), kv_bytes, ..base.clone() };
    let (found, preemptions) = together(&cramped);
    assert!(preemptions >= 8, "{name}: only {preemptions} preemptions");
    assert_same(&format!("{name}, preempted {preemptions} times"), &expected, &found);
    for block_size in [8, 256] {
        let (found, _) = together(&EngineOptions { block_size, max_batch_tokens: 100, ..base.clone() });
        assert_same(&format!("{name}, blocks of {block_size}"), &expected, &found);
    }
}

/// Every format of weights in whole numbers, on the widest path there is, and on the one below it, whose attention is in f32.
#[test]
fn weights_in_whole_numbers() {
    let int4 = |group, offsets| WeightFormat::Int4 { group, offsets };
    for (family, mut config) in ["qwen2-moe", "llama"].map(of_family) {
        let wide = json!({"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32});
        config.as_object_mut().unwrap().extend(wide.as_object().unwrap().clone());
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, true, 7);
        for format in [WeightFormat::Int8, int4(32, false), int4(32, true)] {
            for isa in [None, Some(Isa::Avx512Vnni)].into_iter().filter(|isa| isa.is_none_or(Isa::is_present)) {
                let base = EngineOptions { isa, weight_format: Some(format), ..options(&dir.0, Isa::Portable, KvDtype::Bf16) };
                nothing_changes(&format!("{family} in {} on {isa:?}", format.name()), &base);
            }
        }
    }
}

/// Of more rows than are in the middle of an MLP at once, where there is room for no more than these.
#[test]
fn mlps_that_are_wider_than_all_else() {
    let wide = json!({"n_inner": 600, "intermediate_size": 600, "shared_expert_intermediate_size": 600});
    for (family, mut config) in ["gpt2", "llama", "qwen2-moe"].map(of_family) {
        config.as_object_mut().unwrap().extend(wide.as_object().unwrap().clone());
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, false, 7);
        let of_rows = |max_batch_tokens| EngineOptions { max_batch_tokens, ..options(&dir.0, Isa::Portable, KvDtype::F32) };
        let in_one_go = alone(&EngineOptions { prefill_chunk: Some(64), ..of_rows(200) });
        assert_same(family, &in_one_go, &together(&of_rows(200)).0);
        let [few, many] = [1024, 2048].map(|rows| Engine::plan(&of_rows(rows)).unwrap().work_bytes);
        assert!(many - few < 1024 * 600 * 4, "{family}: {few} bytes for 1,024 rows, {many} for 2,048");
    }
}

#[test]
fn logits_lie_where_the_layers_have_worked() {
    let (dir, (_, mut config)) = (TempDir::new(), of_family("llama"));
    config["vocab_size"] = json!(1000);
    write_random_model(&dir.0, &config, false, 7);
    let of = |max_batch_tokens, max_seqs| EngineOptions { max_batch_tokens, max_seqs, ..options(&dir.0, Isa::Portable, KvDtype::F32) };
    let bytes = |rows, seqs| Engine::plan(&of(rows, seqs)).unwrap().work_bytes;
    assert_eq!(bytes(1024, 24), bytes(1024, 1), "the layers of 1,024 rows need more room than 24 rows of logits");
    assert!(bytes(24, 24) > bytes(24, 1) + 10 * 1000 * 4, "those of 24 need less");
    assert_same("few rows", &alone(&of(1024, 24)), &together(&of(24, 24)).0);
}

#[test]
fn portable_f32() {
    batch_changes_nothing(Isa::Portable, KvDtype::F32);
}

#[test]
fn portable_bf16() {
    batch_changes_nothing(Isa::Portable, KvDtype::Bf16);
}

#[test]
fn portable_int8() {
    batch_changes_nothing(Isa::Portable, KvDtype::Int8);
}

#[test]
fn avx2_f32() {
    batch_changes_nothing(Isa::Avx2, KvDtype::F32);
}

#[test]
fn avx2_bf16() {
    batch_changes_nothing(Isa::Avx2, KvDtype::Bf16);
}

#[test]
fn avx2_int8() {
    batch_changes_nothing(Isa::Avx2, KvDtype::Int8);
}

#[test]
fn avx2_f16() {
    batch_changes_nothing(Isa::Avx2, KvDtype::F16);
}

#[test]
fn avx2_fp8() {
    batch_changes_nothing(Isa::Avx2, KvDtype::Fp8);
}

#[test]
fn avx512_f32() {
    batch_changes_nothing(Isa::Avx512, KvDtype::F32);
}

#[test]
fn avx512_bf16() {
    batch_changes_nothing(Isa::Avx512, KvDtype::Bf16);
}

#[test]
fn avx512_with_products_in_bf16() {
    batch_changes_nothing(Isa::Avx512Bf16, KvDtype::Bf16);
}

#[test]
fn avx512_int8() {
    batch_changes_nothing(Isa::Avx512, KvDtype::Int8);
}

#[test]
fn avx512_f16() {
    batch_changes_nothing(Isa::Avx512, KvDtype::F16);
}

#[test]
fn avx512_fp8() {
    batch_changes_nothing(Isa::Avx512, KvDtype::Fp8);
}
