//! Batch invariance: each request gives the same bits alone and with all others in one batch, under
//! every kind of disturbance.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use crate::support::{Random, TempDir, configs, write_random_model};
use pagedllm::engine::{Engine, MemoryPlan, Prompt, Queue, Request};
use pagedllm::types::options::{
    AllocationPolicy, BatchingPolicy, EngineOptions, Isa, KvDtype, OrderPolicy, Policies, SamplingParams, WeightFormat,
};
use pagedllm::types::outputs::FinishReason;
use serde_json::{Value, json};

const MAX_LEN: usize = 768;
/// Prompt lengths around the boundaries of blocks (8 to 256), tiles (3, 6, 8, 12) and spans (128).
const LENGTHS: [usize; 24] = [1, 2, 7, 8, 11, 13, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 383, 512, 700];

/// By user data: tokens, and the bits of their log probabilities.
type Answers = HashMap<u64, Vec<(u32, u32)>>;

fn requests(vocab: usize) -> Vec<Request> {
    let mut random = Random(11);
    let one = |(i, &len): (usize, &usize)| {
        let prompt = (0..len).map(|_| random.below(vocab) as u32).collect();
        // Every other request samples, so that the random numbers are tested, too.
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
    // Short prompts come first: many are admitted, and then grow until the pool is full.
    LENGTHS.iter().enumerate().map(one).collect()
}

/// Steps until all requests have ended. Queue k is polled every (k + 1)th step. Returns how often a
/// full queue paused a sequence.
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

/// Runs each request alone, with its prompt in one chunk.
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

/// Runs all requests together. Readers have different speeds, so some requests pause. Returns the
/// number of preemptions, too.
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
fn every_policy_gives_the_bits_of_a_request_alone() {
    let (_, config) = configs(MAX_LEN).pop().unwrap();
    let dir = TempDir::new();
    write_random_model(&dir.0, &config, false, 7);
    let base = EngineOptions { isa: None, ..options(&dir.0, Isa::Portable, KvDtype::F32) };
    let expected = alone(&base);
    let MemoryPlan { block_bytes, .. } = Engine::plan(&base).unwrap();
    for policies in every_policy() {
        let small_pool = EngineOptions { prefill_chunk: Some(64), kv_bytes: Some(56 * block_bytes), policies, ..base.clone() };
        let (found, preemptions) = together(&small_pool);
        let must_preempt = policies.allocation == AllocationPolicy::OnDemand && policies.batching != BatchingPolicy::Static;
        assert!(preemptions >= 8 || !must_preempt, "{policies:?}: only {preemptions} preemptions");
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

fn assert_batch_invariant_in_all_families(isa: Isa, kv_dtype: KvDtype) {
    if !isa.is_present() {
        return println!("skipped: this machine lacks {}", isa.name());
    }
    for (i, (family, config)) in configs(MAX_LEN).into_iter().enumerate() {
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, kv_dtype != KvDtype::F32, 7);
        let disturbance = Disturbance::ALL[(i + isa as usize + kv_dtype as usize) % Disturbance::ALL.len()];
        assert_batch_invariant(family, &options(&dir.0, isa, kv_dtype), &[disturbance]);
    }
}

fn family_config(name: &str) -> (&'static str, Value) {
    configs(MAX_LEN).into_iter().find(|(family, _)| *family == name).unwrap()
}

/// Options that change the batches of an engine. With all of them for every family, path and type,
/// these tests would take minutes. Every family, path and type therefore has preemption and one
/// more, so that each family has all of them on some path, and each path in some families.
#[derive(Debug, Clone, Copy)]
enum Disturbance {
    Chunks { threads: usize, tokens: usize },
    BlockSize(usize),
}

impl Disturbance {
    const ALL: [Disturbance; 4] = [
        Disturbance::Chunks { threads: 1, tokens: 7 },
        Disturbance::Chunks { threads: 2, tokens: 64 },
        Disturbance::BlockSize(8),
        Disturbance::BlockSize(256),
    ];

    fn apply(self, base: &EngineOptions) -> EngineOptions {
        match self {
            Disturbance::Chunks { threads, tokens } => {
                EngineOptions { threads: Some(threads), prefill_chunk: Some(tokens), ..base.clone() }
            }
            Disturbance::BlockSize(block_size) => EngineOptions { block_size, max_batch_tokens: 100, ..base.clone() },
        }
    }
}

/// Asserts that requests in an engine with these options give the same bits alone, after
/// preemptions and under each disturbance.
fn assert_batch_invariant(name: &str, base: &EngineOptions, disturbances: &[Disturbance]) {
    let expected = alone(base);
    for disturbance in disturbances {
        assert_same(&format!("{name}, {disturbance:?}"), &expected, &together(&disturbance.apply(base)).0);
    }
    // Layers with a window need only a few blocks per sequence.
    let MemoryPlan { block_bytes, groups, .. } = Engine::plan(base).unwrap();
    let kv_bytes = Some((48 + 8 * (groups as u64 - 1)) * block_bytes);
    let small_pool = EngineOptions { threads: Some(2), prefill_chunk: Some(64), kv_bytes, ..base.clone() };
    let (found, preemptions) = together(&small_pool);
    assert!(preemptions >= 8, "{name}: only {preemptions} preemptions");
    assert_same(&format!("{name}, preempted {preemptions} times"), &expected, &found);
}

/// Tests every integer weight format on the widest instruction path, and on the next one, whose
/// attention is in f32.
#[test]
fn integer_weights_give_the_same_bits_in_every_batch() {
    let int4 = |group, offsets| WeightFormat::Int4 { group, offsets };
    for (family, mut config) in ["qwen2-moe", "llama"].map(family_config) {
        let wide = json!({"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32});
        config.as_object_mut().unwrap().extend(wide.as_object().unwrap().clone());
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, true, 7);
        for format in [WeightFormat::Int8, int4(32, false), int4(32, true)] {
            for isa in [None, Some(Isa::Avx512Vnni)].into_iter().filter(|isa| isa.is_none_or(Isa::is_present)) {
                let base = EngineOptions { isa, weight_format: Some(format), ..options(&dir.0, Isa::Portable, KvDtype::Bf16) };
                assert_batch_invariant(&format!("{family} in {} on {isa:?}", format.name()), &base, &Disturbance::ALL);
            }
        }
    }
}

/// An MLP computes a limited number of tokens at once. The workspace holds its intermediate values
/// only for these tokens.
#[test]
fn wide_mlps_give_the_same_bits_in_every_batch() {
    let wide = json!({"n_inner": 600, "intermediate_size": 600, "shared_expert_intermediate_size": 600});
    for (family, mut config) in ["gpt2", "llama", "qwen2-moe"].map(family_config) {
        config.as_object_mut().unwrap().extend(wide.as_object().unwrap().clone());
        let dir = TempDir::new();
        write_random_model(&dir.0, &config, false, 7);
        let with_tokens = |max_batch_tokens| EngineOptions { max_batch_tokens, ..options(&dir.0, Isa::Portable, KvDtype::F32) };
        let in_one_piece = alone(&EngineOptions { prefill_chunk: Some(64), ..with_tokens(200) });
        assert_same(family, &in_one_piece, &together(&with_tokens(200)).0);
        let [few, many] = [1024, 2048].map(|tokens| Engine::plan(&with_tokens(tokens)).unwrap().work_bytes);
        assert!(many - few < 1024 * 600 * 4, "{family}: {few} bytes for 1,024 tokens, {many} for 2,048");
    }
}

#[test]
fn logits_share_the_workspace_of_the_layers() {
    let (dir, (_, mut config)) = (TempDir::new(), family_config("llama"));
    config["vocab_size"] = json!(1000);
    write_random_model(&dir.0, &config, false, 7);
    let with_limits =
        |max_batch_tokens, max_seqs| EngineOptions { max_batch_tokens, max_seqs, ..options(&dir.0, Isa::Portable, KvDtype::F32) };
    let bytes = |tokens, seqs| Engine::plan(&with_limits(tokens, seqs)).unwrap().work_bytes;
    assert_eq!(bytes(1024, 24), bytes(1024, 1), "the layers need more memory for 1,024 tokens than the logits of 24 tokens");
    assert!(bytes(24, 24) > bytes(24, 1) + 10 * 1000 * 4, "the layers need less memory for 24 tokens than the logits of 24 tokens");
    assert_same("few tokens", &alone(&with_limits(1024, 24)), &together(&with_limits(24, 24)).0);
}

#[test]
fn the_portable_path_with_f32_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Portable, KvDtype::F32);
}

#[test]
fn the_portable_path_with_bf16_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Portable, KvDtype::Bf16);
}

#[test]
fn the_portable_path_with_int8_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Portable, KvDtype::Int8);
}

#[test]
fn avx2_with_f32_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx2, KvDtype::F32);
}

#[test]
fn avx2_with_bf16_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx2, KvDtype::Bf16);
}

#[test]
fn avx2_with_int8_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx2, KvDtype::Int8);
}

#[test]
fn avx2_with_f16_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx2, KvDtype::F16);
}

#[test]
fn avx2_with_fp8_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx2, KvDtype::Fp8);
}

#[test]
fn avx512_with_f32_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx512, KvDtype::F32);
}

#[test]
fn avx512_with_bf16_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx512, KvDtype::Bf16);
}

#[test]
fn avx512_bf16_products_give_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx512Bf16, KvDtype::Bf16);
}

#[test]
fn avx512_with_int8_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx512, KvDtype::Int8);
}

#[test]
fn avx512_with_f16_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx512, KvDtype::F16);
}

#[test]
fn avx512_with_fp8_gives_the_same_bits_in_every_batch() {
    assert_batch_invariant_in_all_families(Isa::Avx512, KvDtype::Fp8);
}
