//! Tests of the simulation. Only pagedllm-simulate has them: benchmarks have no test harness.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::simulation::device::{Device, KNOWN, Result};
use crate::simulation::machine::{Machine, Pipeline, Swap};
use crate::simulation::measurement::{Measurement, options};
use crate::simulation::model::{Model, Parallel};
use crate::simulation::workload::{Branching, Content, SHAREGPT};
use crate::simulation::{Job, Served, Simulation};
use pagedllm::types::options::{EngineOptions, Policies, Preemption};

#[test]
fn all_known_machines_are_valid() {
    for (name, _) in KNOWN {
        assert!(!Device::load(name).unwrap().source.is_empty());
    }
}

#[test]
fn impossible_machines_are_refused_with_the_field() {
    let good: serde_json::Value = serde_json::from_str(KNOWN[0].1).unwrap();
    let refused = |name: &str, value: f64| {
        let mut bad = good.clone();
        bad[name] = if name == "memory_bytes" { (value as u64).into() } else { value.into() };
        serde_json::from_value::<Device>(bad).unwrap().check().unwrap_err()
    };
    for (name, value) in [
        ("memory_bytes", 0.0),
        ("memory_bandwidth", 0.0),
        ("flops", -1.0),
        // In GB/s.
        ("memory_bandwidth", 3350.0),
        ("step_overhead_us", 1e7),
        ("link_bandwidth", 450.0),
        ("bandwidth_efficiency", 1.1),
        ("compute_efficiency", 0.0),
        ("step_overhead_us", -1.0),
        ("link_bandwidth", -1.0),
        ("host_bandwidth", -1.0),
    ] {
        let problem = refused(name, value);
        assert!(problem.starts_with(&format!("{name} is {value}")), "{problem}");
    }
    assert!(Device::load("no-such-machine").unwrap_err().contains("one of a100-40gb"));
    let mut unknown = good.clone();
    unknown["memory"] = 1.into();
    assert!(serde_json::from_value::<Device>(unknown).is_err(), "a misspelled field is refused");
}

#[test]
fn a_pipeline_computes_a_long_step_in_parts_and_a_short_step_at_once() {
    let one = Machine { step: 8e-3, row: 80e-6, position: 0.0, overlaps: true, ..Machine::PAPER };
    let four = Machine { pipeline: Pipeline { stages: 4, ..Pipeline::NONE }, ..one };
    // One token reads the weights once: each stage waits for the previous one.
    assert_eq!(four.seconds(1.0, 0.0), one.seconds(1.0, 0.0));
    // 4,000 tokens take 320 ms on one device. Four parts take 7 of 16 such shares.
    let ratio = four.seconds(4000.0, 0.0).as_secs_f64() / one.seconds(4000.0, 0.0).as_secs_f64();
    assert!((ratio - 7.0 / 16.0).abs() < 1e-6, "{ratio}");
    let slow = Machine { pipeline: Pipeline { stages: 4, hop: 1e-3, hop_token: 0.0 }, ..one };
    assert!(slow.seconds(1.0, 0.0) >= one.seconds(1.0, 0.0) + Duration::from_millis(3));
}

const LLAMA_8B: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": false}"#;
const MIXTRAL: &str = r#"{"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": false}"#;

fn model(config: &str) -> Result<Model> {
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("pagedllm-simulate-{}-{number}.json", std::process::id()));
    std::fs::write(&path, config).unwrap();
    let model = Model::load(&path);
    std::fs::remove_file(&path).unwrap();
    model
}

#[test]
fn sizes_are_those_of_published_models() {
    let llama = model(LLAMA_8B).unwrap();
    // 8.03 billion with the embedding of 0.53 billion.
    assert!((llama.weights / 7.505e9 - 1.0).abs() < 1e-3, "{}", llama.weights);
    assert_eq!((llama.active, llama.kv_bytes()), (llama.weights, 131072.0));
    let mixtral = model(MIXTRAL).unwrap();
    // 46.7 and 12.9 billion with the embedding of 0.13 billion.
    assert!((mixtral.weights / 46.57e9 - 1.0).abs() < 1e-3, "{}", mixtral.weights);
    assert!((mixtral.active / 12.75e9 - 1.0).abs() < 2e-3, "{}", mixtral.active);
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_both_sizes() {
    let (mixtral, h100) = (model(MIXTRAL).unwrap(), Device::load("h100").unwrap());
    let problem = mixtral.on(&h100, Parallel::NONE, None).unwrap_err();
    assert!(problem.contains("93.1 GB of weights, 77.3 GB of memory in 1 devices"), "{problem}");
    let two = mixtral.on(&h100, Parallel::tensor(2), None).unwrap();
    assert!(two.slots > 300_000 && two.max_model_len == 32768 && two.exchange > 0.0);
    let stages = mixtral.on(&h100, Parallel { tensor: 1, pipeline: 2 }, None).unwrap();
    assert_eq!((stages.slots, stages.pipeline.stages, stages.exchange), (two.slots, 2, 0.0));
    // 16 devices and 8 KV heads: each head is on two devices.
    let [eight, sixteen] = [8, 16].map(|n| mixtral.on(&h100, Parallel::tensor(n), None).unwrap());
    assert!(sixteen.slots < 2 * eight.slots && sixteen.position == eight.position);
    assert!(mixtral.on(&h100, Parallel::tensor(2), Some(1)).unwrap_err().contains("--max-model-len is 1"));
    assert!(mixtral.on(&h100, Parallel { tensor: 1, pipeline: 33 }, None).unwrap_err().contains("has 32 layers"));
    let cpu = Device::load("epyc-9654").unwrap();
    assert!(mixtral.on(&cpu, Parallel::tensor(2), None).unwrap_err().contains("link_bandwidth"));
    assert!(model("{}").unwrap_err().contains("architecture"));
}

fn quick(jobs: &[Job], options: &EngineOptions) -> (Vec<Served>, Simulation) {
    let simulation = Simulation::new(options, Machine { slots: 4096, ..Machine::PAPER }).unwrap();
    simulation.sharing.count();
    (simulation.serve(jobs, &mut ()).unwrap(), simulation)
}

#[test]
fn samples_share_the_prompt_and_beams_share_more() {
    let job = Job::new(Duration::ZERO, 160, 40);
    let serve = |branching| quick(&[Job { branching, max_tokens: 200, ..job }], &options(Policies::default()));
    let (served, simulation) = serve(Branching::Samples(4));
    assert_eq!((served[0].tokens, served[0].finished), (160, 4));
    // 40 steps with 4 tables: 10 blocks of the prompt are shared, 1 to 3 blocks are not.
    let samples = simulation.sharing.saved();
    assert!((0.6..0.72).contains(&samples), "{samples}");
    let (served, simulation) = serve(Branching::Beams { width: 4, scale: 2.0 });
    assert_eq!((served[0].tokens, served[0].finished), (160, 4));
    let beams = simulation.sharing.saved();
    assert!(beams > samples, "{beams}");
    assert_eq!(serve(Branching::One).1.sharing.saved(), 0.0);
    // A prompt that does not fill its block, which the beams copy.
    let short = Job { prompt: 5, branching: Branching::Beams { width: 4, scale: 2.0 }, max_tokens: 200, ..job };
    assert_eq!(quick(&[short], &options(Policies::default())).0[0].tokens, 160);
}

#[test]
fn shared_content_is_found_in_the_prefix_cache_up_to_its_end() {
    let options = EngineOptions { prefix_cache: true, ..options(Policies::default()) };
    let job = |at, prompt, until| {
        let content = Content::Shared { text: 7, until };
        Job { content, ..Job::new(Duration::from_secs(at), prompt, 16) }
    };
    let (_, simulation) = quick(&[job(0, 100, 64), job(10, 100, 64)], &options);
    assert_eq!(simulation.engine.stats().prompt_tokens_cached, 64);
    // The second turn of a conversation continues the first one and its answer.
    let (_, simulation) = quick(&[job(0, 48, usize::MAX), job(10, 100, usize::MAX)], &options);
    assert_eq!(simulation.engine.stats().prompt_tokens_cached, 48);
}

#[test]
fn swapping_takes_the_time_of_its_copies() {
    let machine = Machine { swap: Swap { block: 1e-3, slot: 1e-6 }, slots: 2048, ..Machine::PAPER };
    assert_eq!(machine.swap_time(10, 16), Duration::from_micros(10_160));
    let jobs = SHAREGPT.jobs(40, 100.0, 1);
    let run = |preemption| Measurement::run(&EngineOptions { preemption, ..options(Policies::default()) }, machine, &jobs).unwrap();
    let (swap, recompute) = (run(Preemption::Swap), run(Preemption::Recompute));
    assert!(swap.preemptions > 0 && recompute.preemptions > 0);
    assert!(swap.served.iter().zip(&recompute.served).all(|(swap, recompute)| swap.tokens == recompute.tokens));
    let slow = Machine { swap: Swap { block: 50e-3, slot: 1e-6 }, ..machine };
    let options = EngineOptions { preemption: Preemption::Swap, ..options(Policies::default()) };
    assert!(Measurement::run(&options, slow, &jobs).unwrap().span > swap.span + Duration::from_millis(100));
}
