//! Sequences that are forked, rewound, kept, moved or found in the prefix cache. Their bits equal
//! those of a request alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{self, BeamCase, TempDir, beam_cases, bundled_model, configs, goldens, write_random_model};
use pagedllm::engine::{Continue, Engine, Fork, LogitsHook, Output, Prompt, Request, Resume, Stats};
use pagedllm::error::Code;
use pagedllm::types::options::{BeamParams, Dry, EngineOptions, Grammar, Isa, Mirostat, OutputKind, SamplingParams};
use pagedllm::types::outputs::{FinishReason, Logprobs};
use pagedllm::types::{RequestId, SeqId};

const BLOCK: usize = 8;

struct Model {
    _dir: TempDir,
    options: EngineOptions,
}

impl Model {
    fn llama() -> Model {
        Model::from_family("llama")
    }

    fn from_family(name: &str) -> Model {
        let dir = TempDir::new();
        let (_, config) = configs(512).into_iter().find(|(family, _)| family.starts_with(name)).unwrap();
        write_random_model(&dir.0, &config, false, 5);
        let options = EngineOptions {
            model_dir: dir.0.clone(),
            skip_tokenizer: true,
            block_size: BLOCK,
            threads: Some(1),
            max_seqs: 16,
            ..Default::default()
        };
        Model { _dir: dir, options }
    }

    fn engine(&self) -> Engine {
        Engine::create(&self.options).unwrap()
    }

    /// Creates an engine whose pool has the given number of blocks.
    fn engine_with(&self, blocks: u64, max_model_len: usize) -> Engine {
        let bytes = Engine::plan(&self.options).unwrap().block_bytes * blocks;
        Engine::create(&EngineOptions { kv_bytes: Some(bytes), max_model_len: Some(max_model_len), ..self.options.clone() }).unwrap()
    }
}

fn sampled(seed: u64, max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        seed: Some(seed),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        logprobs: Some(0),
        ..Default::default()
    }
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + 11) % 127).collect()
}

fn request(prompt: Vec<u32>, sampling: SamplingParams) -> Request {
    Request::new(Prompt::Tokens(prompt), sampling)
}

/// Steps until all requests have ended, and returns all outputs.
fn drain(engine: &Engine) -> Vec<Output> {
    let mut outputs = Vec::new();
    for _ in 0..20_000 {
        let report = engine.step().unwrap();
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        if report.unfinished == 0 {
            return outputs;
        }
    }
    panic!("the requests do not end");
}

fn steps(engine: &Engine, n: usize) -> Vec<Output> {
    for _ in 0..n {
        engine.step().unwrap();
    }
    engine.queue().poll(Some(Duration::ZERO)).unwrap().into()
}

/// Returns the tokens and the bits of their log probabilities, by sequence.
fn answers(outputs: &[Output]) -> BTreeMap<SeqId, Vec<(u32, u32)>> {
    let mut answers: BTreeMap<SeqId, Vec<(u32, u32)>> = BTreeMap::new();
    for output in outputs {
        assert!(output.error.is_none(), "{:?}", output.error);
        let pairs = output.tokens.iter().copied().zip(output.logprobs.tokens.iter().map(|p| p.to_bits()));
        answers.entry(output.sequence).or_default().extend(pairs);
    }
    answers
}

fn alone(model: &Model, prompt: &[u32], sampling: SamplingParams) -> Vec<(u32, u32)> {
    let engine = Engine::create(&EngineOptions { prefix_cache: false, ..model.options.clone() }).unwrap();
    let id = engine.add_request(request(prompt.to_vec(), sampling)).unwrap().sequence(0);
    answers(&drain(&engine)).remove(&id).unwrap()
}

fn tokens(answer: &[(u32, u32)]) -> Vec<u32> {
    answer.iter().map(|(token, _)| *token).collect()
}

fn assert_empty(engine: &Engine) -> Stats {
    let stats = engine.stats();
    assert_eq!((stats.blocks_used, stats.idle, stats.running, stats.waiting), (0, 0, 0, 0), "{stats:?}");
    stats
}

/// Returns the code of an error whose message must contain `message`.
fn code<T: std::fmt::Debug>(result: pagedllm::error::Result<T>, message: &str) -> Code {
    let error = result.unwrap_err();
    assert!(error.message().contains(message), "{error}, expected {message}");
    error.code()
}

#[test]
fn a_fork_continues_like_its_parent_and_shares_its_blocks() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(request(prompt(29), sampled(3, 40))).unwrap().sequence(0);
    let before = steps(&engine, 13);
    let used = engine.stats().blocks_used;
    let children = engine.fork(id, 3, &Fork::default()).unwrap();
    engine.step().unwrap();
    // Each fork copies only the partially filled block.
    assert!(engine.stats().blocks_used <= used + 4, "{} from {used}", engine.stats().blocks_used);
    let outputs = drain(&engine);
    let whole = alone(&model, &prompt(29), sampled(3, 40));
    let after = answers(&outputs);
    assert_eq!([answers(&before)[&id].clone(), after[&id].clone()].concat(), whole);
    for child in children {
        assert_eq!(after[&child], whole[13..], "the fork uses the random numbers of its parent");
    }
    assert!(engine.stats().blocks_copied >= 3);
    assert_empty(&engine);
}

#[test]
fn children_that_take_several_steps_equal_their_parent() {
    let model = Model::llama();
    let engine = model.engine_with(1400, 512);
    let id = engine.add_request(request(prompt(29), sampled(3, 16))).unwrap().sequence(0);
    let before = steps(&engine, 13);
    let children = engine.fork(id, 1100, &Fork::default()).unwrap();
    let outputs = drain(&engine);
    let whole = alone(&model, &prompt(29), sampled(3, 16));
    let after = answers(&outputs);
    assert_eq!([answers(&before)[&id].clone(), after[&id].clone()].concat(), whole);
    assert!(children.iter().all(|child| after[child] == whole[13..]));
    assert_empty(&engine);
}

#[test]
fn forks_with_their_own_seeds_diverge() {
    let engine = Model::llama().engine();
    let id = engine.add_request(request(prompt(20), sampled(3, 60))).unwrap().sequence(0);
    steps(&engine, 5);
    let children = engine.fork(id, 4, &Fork { seed: Some(77), user_data: Some(9), ..Default::default() }).unwrap();
    let outputs = drain(&engine);
    let by_sequence = answers(&outputs);
    let different: std::collections::BTreeSet<_> = children.iter().map(|child| by_sequence[child].clone()).collect();
    assert_eq!(different.len(), 4);
    assert!(outputs.iter().all(|output| children.contains(&output.sequence) == (output.user_data == 9)));
    assert!(outputs.iter().all(|output| output.request == output.sequence.own_request()), "a fork is a new request");
}

#[test]
fn a_fork_at_an_earlier_position_equals_a_request_with_that_prompt() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(Request { keep: true, ..request(prompt(29), sampled(3, 30)) }).unwrap().sequence(0);
    let all = [prompt(29), tokens(&answers(&drain(&engine))[&id])].concat();
    for at in [1, 7, 8, 9, 28, 29, 30, 45, 59] {
        let child = engine.fork(id, 1, &Fork { at: Some(at), ..Default::default() }).unwrap()[0];
        assert_eq!(engine.sequence(child).unwrap().len, at);
        engine.resume(child, Resume { keep: false, ..Resume::new(sampled(8, 12)) }).unwrap();
        assert_eq!(answers(&drain(&engine))[&child], alone(&model, &all[..at], sampled(8, 12)), "at {at}");
    }
    engine.free(id).unwrap();
    engine.step().unwrap();
    assert_empty(&engine);
}

#[test]
fn a_rewound_sequence_regenerates_the_same_bits() {
    let model = Model::llama();
    let whole = alone(&model, &prompt(29), sampled(3, 40));
    for len in [1, 15, 29, 30, 32, 33, 40] {
        let engine = model.engine();
        let id = engine.add_request(request(prompt(29), sampled(3, 40))).unwrap().sequence(0);
        let before = steps(&engine, 15);
        assert_eq!(answers(&before)[&id], whole[..15]);
        engine.rewind(id, len).unwrap();
        let again = answers(&drain(&engine)).remove(&id).unwrap();
        match len {
            29.. => assert_eq!(again, whole[len - 29..], "{len}"),
            _ => assert_eq!(again[..10], alone(&model, &prompt(29)[..len], sampled(3, 10))[..], "{len}: rewound into the prompt"),
        }
        assert_empty(&engine);
    }
}

#[test]
fn a_resumed_conversation_computes_only_new_tokens() {
    let model = Model::llama();
    let engine = Engine::create(&EngineOptions { prefix_cache: false, ..model.options.clone() }).unwrap();
    let id = engine.add_request(Request { keep: true, ..request(prompt(100), sampled(1, 20)) }).unwrap().sequence(0);
    let mut all = [prompt(100), tokens(&answers(&drain(&engine))[&id])].concat();
    for turn in 2..5 {
        assert_eq!((engine.stats().idle, engine.sequence(id).unwrap().len), (1, all.len()));
        let more = prompt(10 * turn);
        engine.append(id, more.clone()).unwrap();
        all.extend(more);
        let before = engine.stats().prompt_tokens;
        engine.resume(id, Resume::new(sampled(turn as u64, 20))).unwrap();
        let answer = answers(&drain(&engine)).remove(&id).unwrap();
        assert_eq!(answer, alone(&model, &all, sampled(turn as u64, 20)), "turn {turn}");
        assert_eq!(
            engine.stats().prompt_tokens - before,
            10 * turn as u64 + 1,
            "the appended tokens and the last token of the previous turn are computed"
        );
        all.extend(tokens(&answer));
    }
    engine.free(id).unwrap();
    engine.step().unwrap();
    assert_empty(&engine);
}

#[test]
fn a_running_sequence_continues_from_appended_tokens() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(request(prompt(20), sampled(3, 30))).unwrap().sequence(0);
    let before = tokens(&answers(&steps(&engine, 6))[&id]);
    engine.append(id, prompt(17)).unwrap();
    let after = answers(&drain(&engine)).remove(&id).unwrap();
    let all = [prompt(20), before, prompt(17)].concat();
    assert_eq!(after, alone(&model, &all, sampled(3, 24)));
    assert_empty(&engine);
}

#[test]
fn samples_share_their_prompt_and_the_first_equals_a_single_request() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(Request { n: 4, ..request(prompt(80), sampled(3, 40)) }).unwrap();
    let mut outputs = steps(&engine, 3);
    let stats = engine.stats();
    assert_eq!((stats.running, stats.prompt_tokens), (4, 80), "the prompt is computed once");
    assert_eq!(stats.blocks_used, 10 + 4, "the samples share ten prompt blocks, and each has one block of its own");
    outputs.extend(drain(&engine));
    let by_sequence = answers(&outputs);
    assert_eq!(by_sequence[&id.sequence(0)], alone(&model, &prompt(80), sampled(3, 40)));
    assert_eq!(by_sequence.keys().map(|seq| seq.get() - id.get()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(by_sequence.values().collect::<std::collections::BTreeSet<_>>().len(), 4);
    for output in &outputs {
        assert_eq!((output.request, output.sequence), (id, id.sequence(output.index)));
    }
    assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 4);
    assert_empty(&engine);
}

#[test]
fn best_of_returns_the_most_probable_samples_in_order_of_score() {
    let engine = Model::llama().engine();
    let all = engine.add_request(Request { n: 6, ..request(prompt(20), sampled(3, 15)) }).unwrap().sequence(0);
    let mut scores: Vec<(f64, Vec<u32>)> = Vec::new();
    let outputs = drain(&engine);
    for (seq, answer) in answers(&outputs) {
        let last = outputs.iter().rfind(|output| output.sequence == seq).unwrap();
        let sum: f64 = answer.iter().map(|(_, bits)| f32::from_bits(*bits) as f64).sum();
        assert!((last.score - sum).abs() < 1e-9);
        scores.push((sum, tokens(&answer)));
    }
    assert_eq!(scores.len(), 6, "request {all}");
    scores.sort_by(|a, b| b.0.total_cmp(&a.0));
    engine.add_request(Request { n: 2, best_of: Some(6), ..request(prompt(20), sampled(3, 15)) }).unwrap();
    let best = drain(&engine);
    assert_eq!(best.len(), 2, "each result is one output");
    for (rank, output) in best.iter().enumerate() {
        assert_eq!((output.index as usize, &output.tokens, output.score), (rank, &scores[rank].1, scores[rank].0));
    }
    assert_empty(&engine);
}

#[test]
fn a_prefix_cache_hit_changes_no_bit() {
    let model = Model::llama();
    let engine = model.engine();
    let computed_and_cached = |len, salt: &[u8]| {
        let before = engine.stats();
        let id = engine.add_request(Request { salt: salt.to_vec(), ..request(prompt(len), sampled(4, 20)) }).unwrap().sequence(0);
        let answer = answers(&drain(&engine)).remove(&id).unwrap();
        assert_eq!(answer, alone(&model, &prompt(len), sampled(4, 20)));
        let stats = engine.stats();
        (stats.prompt_tokens - before.prompt_tokens, stats.prefix_hits - before.prefix_hits)
    };
    assert_eq!(computed_and_cached(100, b""), (100, 0));
    assert_eq!(computed_and_cached(100, b""), (4, 96), "the first twelve blocks are cached");
    assert_eq!(computed_and_cached(97, b""), (1, 96));
    assert_eq!(computed_and_cached(96, b""), (8, 88), "the last token is always computed");
    assert_eq!(computed_and_cached(50, b""), (2, 48));
    assert_eq!(computed_and_cached(100, b"tenant"), (100, 0), "another salt has no cache hits");
    assert_eq!(computed_and_cached(100, b"tenant"), (4, 96));
    assert_eq!(engine.stats().prefix_queries, 99 + 99 + 96 + 95 + 49 + 99 + 99);
    let stats = assert_empty(&engine);
    assert!(stats.blocks_cached > 0);
}

/// Runs samples and forks in a pool that is too small: requests are preempted, and cached prefixes
/// are reused and evicted.
#[test]
fn samples_and_forks_keep_their_bits_under_preemption() {
    let model = Model::llama();
    for (blocks, prefix_cache) in [(400, true), (40, true), (40, false)] {
        let bytes = Engine::plan(&model.options).unwrap().block_bytes * blocks;
        let options = EngineOptions {
            kv_bytes: Some(bytes),
            max_model_len: Some(200),
            prefix_cache,
            prefill_chunk: Some(13),
            ..model.options.clone()
        };
        let engine = Engine::create(&options).unwrap();
        let mut expected = BTreeMap::new();
        for i in 0..6 {
            let (prompt, sampling) = (prompt(20 + 17 * i), sampled(i as u64, 40));
            let id = engine.add_request(Request { n: 1 + i as u32 % 3, ..request(prompt.clone(), sampling.clone()) }).unwrap().sequence(0);
            expected.insert(id, alone(&model, &prompt, sampling));
        }
        let mut outputs = steps(&engine, 20);
        for id in expected.keys().copied().collect::<Vec<_>>() {
            // A request that has already ended cannot be forked.
            let Ok(children) = engine.fork(id, 2, &Fork::default()) else { continue };
            let so_far = |outputs: &[Output]| answers(outputs).get(&id).map_or(0, Vec::len);
            let generated = so_far(&outputs);
            children.iter().for_each(|&child| drop(expected.insert(child, expected[&id][generated..].to_vec())));
        }
        outputs.extend(drain(&engine));
        let found = answers(&outputs);
        for (id, answer) in &expected {
            assert_eq!(found.get(id).unwrap_or(&Vec::new()), answer, "sequence {id} with {blocks} blocks");
        }
        assert_eq!(engine.stats().preemptions > 0, blocks == 40, "{:?}", engine.stats());
        assert_empty(&engine);
    }
}

fn assert_engine_beams_match(file: &str) {
    let mut engines: BTreeMap<String, Engine> = BTreeMap::new();
    let cases = beam_cases(file);
    for group in cases.chunks(6) {
        let mut added: Vec<(RequestId, &BeamCase)> = Vec::new();
        for case in group {
            let options = EngineOptions {
                model_dir: goldens().join(&case.model),
                skip_tokenizer: true,
                block_size: 8,
                threads: Some(1),
                ..Default::default()
            };
            let engine = engines.entry(case.model.clone()).or_insert_with(|| Engine::create(&options).unwrap());
            let sampling = SamplingParams {
                max_tokens: Some(case.max_tokens),
                ignore_eos: true,
                stop_token_ids: case.eos.clone(),
                ..case.sampling.clone()
            };
            let beam = Some(case.params.clone());
            added.push((
                engine.add_request(Request { n: case.params.width, beam, ..request(case.prompt.clone(), sampling) }).unwrap(),
                case,
            ));
            // A greedy request decodes in the same batch.
            engine.add_request(request(case.prompt.clone(), SamplingParams { max_tokens: Some(9), ..SamplingParams::greedy() })).unwrap();
        }
        for (model, engine) in &engines {
            let outputs = drain(engine);
            for (id, case) in added.iter().filter(|(_, case)| case.model == *model) {
                let mine: Vec<&Output> = outputs.iter().filter(|output| output.request == *id).collect();
                assert_eq!(mine.len(), case.expected.len(), "{}", case.name());
                for (rank, (output, (tokens, score))) in mine.iter().zip(&case.expected).enumerate() {
                    assert_eq!((output.index as usize, &output.tokens), (rank, tokens), "{}", case.name());
                    assert!(output.logprobs.tokens.is_empty(), "logprobs were not requested");
                    assert!(
                        (output.score - *score as f64).abs() < 1e-4 + 1e-6 * score.abs() as f64,
                        "{}: {} {score}",
                        case.name(),
                        output.score
                    );
                }
            }
            assert_empty(engine);
        }
    }
}

#[test]
fn engine_beams_match_transformers_5() {
    assert_engine_beams_match("beams.json");
}

#[test]
fn engine_beam_groups_match_transformers_4() {
    assert_engine_beams_match("groups.json");
}

#[test]
fn preempted_beams_give_the_same_results() {
    let model = Model::llama();
    let search = |engine: &Engine| {
        let beam = Some(BeamParams { width: 4, ..Default::default() });
        let sampling = || SamplingParams { max_tokens: Some(40), ignore_eos: true, ..Default::default() };
        for len in [30, 41, 52] {
            engine.add_request(Request { n: 4, beam: beam.clone(), ..request(prompt(len), sampling()) }).unwrap();
        }
        let outputs = drain(engine);
        assert_empty(engine);
        outputs
            .into_iter()
            .map(|output| ((output.request, output.index), (output.tokens, output.score.to_bits())))
            .collect::<BTreeMap<_, _>>()
    };
    let large_pool = model.engine();
    let expected = search(&large_pool);
    assert_eq!((large_pool.stats().preemptions, expected.len()), (0, 12));
    let small_pool = model.engine_with(30, 100);
    assert_eq!(search(&small_pool), expected);
    assert!(small_pool.stats().preemptions > 0);
}

#[test]
fn a_pinned_prompt_is_not_evicted() {
    let model = Model::llama();
    let engine = model.engine_with(40, 160);
    let hits = |engine: &Engine| {
        let before = engine.stats().prefix_hits;
        engine.add_request(request(prompt(80), sampled(1, 2))).unwrap();
        drain(engine);
        engine.stats().prefix_hits - before
    };
    let flood = |engine: &Engine| {
        for i in 0..8 {
            engine.add_request(request([vec![i; 30], prompt(100)].concat(), sampled(1, 2))).unwrap();
        }
        drain(engine);
    };
    let pin = engine.pin(Prompt::Tokens(prompt(80)), true, b"", 1, None).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.stats().blocks_used, 10, "the next step computes a pinned prompt without a request");
    flood(&engine);
    assert_eq!(hits(&engine), 72);
    engine.unpin(pin).unwrap();
    flood(&engine);
    assert_eq!(hits(&engine), 0);
    assert_eq!(code(engine.unpin(pin), "unknown"), Code::NotFound);
    // Expiry.
    let pin = engine.pin(Prompt::Tokens(prompt(80)), true, b"", 1, Some(Duration::from_millis(1))).unwrap();
    engine.step().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    engine.step().unwrap();
    assert_eq!(code(engine.unpin(pin), "expired"), Code::NotFound);
    assert_empty(&engine);
}

#[test]
fn pins_are_evicted_by_priority_to_continue_a_sequence() {
    let model = Model::llama();
    let engine = model.engine_with(24, 180);
    let low = engine.pin(Prompt::Tokens(vec![5; 48]), true, b"", 1, None).unwrap();
    let high = engine.pin(Prompt::Tokens(vec![6; 48]), true, b"", 7, None).unwrap();
    steps(&engine, 2);
    assert_eq!(engine.stats().blocks_used, 12);
    engine.add_request(request(prompt(120), sampled(1, 20))).unwrap();
    assert_eq!(drain(&engine).last().unwrap().finish, Some(FinishReason::Length));
    engine.step().unwrap();
    assert_eq!(code(engine.unpin(low), "evicted"), Code::NotFound);
    engine.unpin(high).unwrap();
    engine.step().unwrap();
    assert_empty(&engine);
}

#[test]
fn prompt_logprobs_equal_the_logprobs_of_the_same_tokens_when_sampled() {
    let model = Model::llama();
    let answer = alone(&model, &prompt(30), SamplingParams { logprobs: Some(3), ..sampled(3, 50) });
    let all = [prompt(30), tokens(&answer)].concat();
    for prefill_chunk in [None, Some(7)] {
        let engine = Engine::create(&EngineOptions { prefill_chunk, max_seqs: 4, ..model.options.clone() }).unwrap();
        for _ in 0..2 {
            let id = engine.add_request(request(all.clone(), SamplingParams { prompt_logprobs: Some(3), ..sampled(1, 2) })).unwrap();
            let outputs = drain(&engine);
            let logprobs: Vec<f32> =
                outputs.iter().filter(|output| output.request == id).flat_map(|output| output.prompt_logprobs.tokens.clone()).collect();
            let tops: usize = outputs.iter().map(|output| output.prompt_logprobs.top.len()).sum();
            assert_eq!((logprobs.len(), tops), (all.len() - 1, 3 * (all.len() - 1)));
            let bits: Vec<u32> = logprobs[29..].iter().map(|p| p.to_bits()).collect();
            assert_eq!(bits, answer.iter().map(|(_, bits)| *bits).collect::<Vec<_>>());
        }
        assert_empty(&engine);
    }
}

#[test]
fn the_top_logprob_of_a_greedy_request_is_the_sampled_token() {
    let engine = Model::llama().engine();
    engine.add_request(request(prompt(9), SamplingParams { logprobs: Some(5), max_tokens: Some(6), ..SamplingParams::greedy() })).unwrap();
    for output in drain(&engine) {
        assert_eq!((output.tokens.len(), output.logprobs.top.len()), (1, 5));
        assert_eq!(output.logprobs.top[0], (output.tokens[0], output.logprobs.tokens[0]));
        assert!(output.logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
    }
}

#[test]
fn cumulative_and_final_outputs_equal_the_concatenated_deltas() {
    let engine = Engine::create(&EngineOptions { model_dir: bundled_model(), threads: Some(1), ..Default::default() }).unwrap();
    let run = |output, echo| {
        let sampling = SamplingParams { output, echo, logprobs: Some(2), max_tokens: Some(12), seed: Some(2), ..Default::default() };
        engine.add_request(Request::new(Prompt::Text("Who are you?".into()), sampling)).unwrap();
        drain(&engine)
    };
    for echo in [false, true] {
        let deltas = run(OutputKind::Delta, echo);
        let text: String = deltas.iter().map(|output| output.text.as_str()).collect();
        let all: Vec<u32> = deltas.iter().flat_map(|output| output.tokens.clone()).collect();
        assert_eq!(text.starts_with("Who are you?"), echo, "{text}");
        let whole = run(OutputKind::Final, echo);
        assert_eq!((whole.len(), &whole[0].text, &whole[0].tokens), (1, &text, &all));
        let growing = run(OutputKind::Cumulative, echo);
        assert!(growing.is_sorted_by_key(|output| output.tokens.len()));
        assert_eq!((&growing.last().unwrap().text, &growing.last().unwrap().tokens), (&text, &all));
        assert_eq!(bits(&growing.last().unwrap().logprobs), bits(&whole[0].logprobs));
    }
}

/// Returns the bits of log probabilities and of their alternatives, since NaN differs from itself.
fn bits(logprobs: &Logprobs) -> (Vec<u32>, Vec<(u32, u32)>) {
    let Logprobs { tokens, top } = logprobs;
    (tokens.iter().map(|p| p.to_bits()).collect(), top.iter().map(|(token, p)| (*token, p.to_bits())).collect())
}

#[test]
fn an_echoed_prompt_has_the_log_probabilities_of_its_tokens() {
    let model = Model::llama();
    for prefill_chunk in [None, Some(7)] {
        let engine = Engine::create(&EngineOptions { prefill_chunk, max_seqs: 4, ..model.options.clone() }).unwrap();
        let run = |sampling, n| {
            let id = engine.add_request(Request { n, ..request(prompt(30), sampling) }).unwrap();
            (id, drain(&engine))
        };
        let all = |outputs: &[Output], id: SeqId| {
            let mut all = Logprobs::default();
            for output in outputs.iter().filter(|output| output.sequence == id) {
                all.tokens.extend(&output.logprobs.tokens);
                all.top.extend(&output.logprobs.top);
            }
            all
        };
        let (_, outputs) = run(SamplingParams { prompt_logprobs: Some(5), ..sampled(1, 4) }, 1);
        let known: Vec<f32> = outputs.iter().flat_map(|output| output.prompt_logprobs.tokens.clone()).collect();
        let tops: Vec<(u32, f32)> = outputs.iter().flat_map(|output| output.prompt_logprobs.top.clone()).collect();
        for output in [OutputKind::Delta, OutputKind::Cumulative, OutputKind::Final] {
            // The second run finds the prompt in the prefix cache. One has other alternatives for
            // the prompt itself.
            for prompt_logprobs in [None, Some(5), Some(1)] {
                let sampling = SamplingParams { echo: true, logprobs: Some(3), prompt_logprobs, output, ..sampled(1, 4) };
                let (id, outputs) = run(sampling, 3);
                for sample in id.sequences(3) {
                    let ends: Vec<Output> = outputs.iter().filter(|output| output.sequence == sample).cloned().collect();
                    let whole = if output == OutputKind::Delta { all(&ends, sample) } else { ends.last().unwrap().logprobs.clone() };
                    assert_eq!((whole.tokens.len(), whole.top.len()), (34, 3 * 34), "{output:?}");
                    assert!(whole.tokens[0].is_nan() && whole.top[..3].iter().all(|(token, p)| *token == prompt(30)[0] && p.is_nan()));
                    assert_eq!(whole.tokens[1..30], known, "{output:?}");
                    assert!(whole.top[3..90].chunks(3).zip(tops.chunks(5)).all(|(some, all)| *some == all[..3]));
                    assert!(whole.tokens[30..].iter().all(|p| *p < 0.0));
                    // The first output has the whole prompt.
                    let first = ends.iter().find(|output| !output.tokens.is_empty()).unwrap();
                    assert!(first.tokens.starts_with(&prompt(30)) && (output != OutputKind::Delta || first.tokens.len() == 30));
                }
                let reported: Vec<(u32, f32)> =
                    outputs.iter().rfind(|output| output.sequence == id.sequence(0)).unwrap().prompt_logprobs.top.clone();
                assert!(output == OutputKind::Delta || reported.len() == 29 * prompt_logprobs.unwrap_or(0) as usize);
            }
        }
        // A request that ends early has the log probabilities that are known.
        let id = engine.add_request(request(prompt(30), SamplingParams { echo: true, logprobs: Some(0), ..sampled(1, 4) })).unwrap();
        let early = prefill_chunk.is_some();
        steps(&engine, early as usize);
        engine.abort(id).unwrap();
        let outputs = drain(&engine);
        assert_eq!((outputs.len(), &outputs[0].tokens, outputs[1].finish), (2, &prompt(30), Some(FinishReason::Abort)));
        assert!(outputs[0].logprobs.tokens.len() == 30 && outputs[0].logprobs.tokens[29].is_nan());
        assert_eq!(outputs[0].logprobs.tokens[1..3].iter().all(|p| *p < 0.0), early);
        assert_empty(&engine);
    }
}

#[test]
fn a_prompt_is_scored_without_a_generated_token() {
    let model = Model::llama();
    for (prefill_chunk, start) in [(None, 0), (Some(7), 0), (None, 21), (Some(7), 21)] {
        let engine = Engine::create(&EngineOptions { prefill_chunk, max_seqs: 4, ..model.options.clone() }).unwrap();
        let score = |params| {
            let id = engine.add_request(request(prompt(30), SamplingParams { max_tokens: Some(0), logprobs: Some(2), ..params })).unwrap();
            let outputs = drain(&engine);
            let last = outputs.last().unwrap().clone();
            assert!(outputs.iter().all(|output| output.request == id && output.generated_tokens == 0 && output.error.is_none()));
            assert_eq!((last.finish, &last.stop, last.timing.first_token), (Some(FinishReason::Length), &None, None));
            (outputs, last)
        };
        engine.add_request(request(prompt(30), SamplingParams { prompt_logprobs: Some(2), ..sampled(1, 4) })).unwrap();
        let known: Vec<u32> = drain(&engine).iter().flat_map(|output| bits(&output.prompt_logprobs).0).collect();
        let known = &known[start.max(1) - 1..];
        for output in [OutputKind::Delta, OutputKind::Cumulative, OutputKind::Final] {
            let params = SamplingParams { prompt_logprobs: Some(2), prompt_logprobs_start: start, output, ..sampled(1, 0) };
            let (outputs, last) = score(params.clone());
            let scored: Vec<u32> = match output {
                OutputKind::Delta => outputs.iter().flat_map(|output| bits(&output.prompt_logprobs).0).collect(),
                _ => bits(&last.prompt_logprobs).0,
            };
            assert_eq!(scored, known, "from {start}, {output:?}");
            assert_eq!(last.timing.cached_tokens as usize, start / BLOCK * BLOCK, "tokens before the start are reused");
            assert!(last.tokens.is_empty());
            let (outputs, last) = score(SamplingParams { prompt_logprobs: None, echo: true, ..params });
            let echo = if output == OutputKind::Delta { &outputs[0] } else { &last };
            assert_eq!(echo.tokens, prompt(30));
            let (nan, scored) = echo.logprobs.tokens.split_at(start.max(1));
            assert!(nan.iter().all(|p| p.is_nan()));
            assert_eq!(scored.iter().map(|p| p.to_bits()).collect::<Vec<_>>(), known);
        }
        assert_eq!(engine.stats().prompt_tokens_cached, 6 * (start / BLOCK * BLOCK) as u64, "in six requests");
        assert_empty(&engine);
    }
}

#[test]
fn a_prompt_without_generation_can_fill_the_maximum_length_and_is_kept() {
    let model = Model::llama();
    let engine = Engine::create(&EngineOptions { max_model_len: Some(64), ..model.options.clone() }).unwrap();
    let none = || SamplingParams { max_tokens: Some(0), ..SamplingParams::greedy() };
    let refuse = |request| engine.add_request(request);
    engine.add_request(request(prompt(64), SamplingParams { prompt_logprobs: Some(0), ..none() })).unwrap();
    assert_eq!(drain(&engine).iter().map(|output| output.prompt_logprobs.tokens.len()).sum::<usize>(), 63);
    assert_eq!(code(refuse(request(prompt(65), none())), "shorten the prompt to 64"), Code::InvalidArgument);
    assert_eq!(code(refuse(Request { n: 2, ..request(prompt(9), none()) }), "request is for 2 samples"), Code::InvalidArgument);
    let beam = Some(BeamParams { width: 2, ..BeamParams::default() });
    assert_eq!(code(refuse(Request { beam, ..request(prompt(9), none()) }), "request is for beams"), Code::InvalidArgument);
    let start = SamplingParams { prompt_logprobs: Some(0), prompt_logprobs_start: 9, ..none() };
    assert_eq!(code(refuse(request(prompt(9), start.clone())), "prompt_logprobs_start is 9"), Code::InvalidArgument);
    let useless = SamplingParams { prompt_logprobs: None, ..start };
    assert_eq!(code(refuse(request(prompt(30), useless)), "no log probabilities of the prompt"), Code::InvalidArgument);

    let kept = engine.add_request(Request { keep: true, ..request(prompt(30), none()) }).unwrap().sequence(0);
    drain(&engine);
    assert_eq!((engine.sequence(kept).unwrap().idle, engine.sequence(kept).unwrap().len), (true, 30));
    engine.append(kept, vec![7, 8, 9]).unwrap();
    engine.resume(kept, Resume::new(none())).unwrap();
    assert_eq!(drain(&engine).iter().map(|output| output.finish).collect::<Vec<_>>(), [Some(FinishReason::Length)]);
    let child = engine.fork(kept, 1, &Fork::default()).unwrap()[0];
    for id in [kept, child] {
        engine.resume(id, Resume { keep: false, ..Resume::new(sampled(1, 8)) }).unwrap();
        assert_eq!(answers(&drain(&engine))[&id], alone(&model, &[prompt(30), vec![7, 8, 9]].concat(), sampled(1, 8)));
    }
    assert_empty(&engine);
}

#[test]
fn tokens_appended_to_a_prompt_without_generation_are_computed_before_it_ends() {
    let model = Model::llama();
    let engine = Engine::create(&EngineOptions { max_model_len: Some(64), prefill_chunk: Some(8), ..model.options.clone() }).unwrap();
    let none = SamplingParams { max_tokens: Some(0), ..SamplingParams::greedy() };
    let id = engine.add_request(Request { keep: true, ..request(prompt(60), none) }).unwrap().sequence(0);
    steps(&engine, 2);
    engine.append(id, vec![1; 4]).unwrap();
    assert_eq!(code(engine.append(id, vec![1]), "max_model_len is 64"), Code::InvalidArgument);
    assert_eq!(drain(&engine).last().unwrap().finish, Some(FinishReason::Length));
    assert_eq!(engine.sequence(id).unwrap().len, 64);
    engine.free(id).unwrap();
    engine.step().unwrap();
    assert_empty(&engine);
}

#[test]
fn truncate_prompt_tokens_keeps_the_last_tokens_of_the_prompt() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(Request { truncate_prompt_tokens: Some(12), ..request(prompt(40), sampled(1, 8)) }).unwrap().sequence(0);
    assert_eq!(answers(&drain(&engine))[&id], alone(&model, &prompt(40)[28..], sampled(1, 8)));
    // A prompt beyond max_model_len is accepted if it is truncated.
    engine.add_request(Request { truncate_prompt_tokens: Some(12), ..request(prompt(4000), sampled(1, 8)) }).unwrap();
    assert_eq!(drain(&engine).last().unwrap().prompt_tokens, 12);
}

#[test]
fn the_logits_hook_receives_the_tokens_and_edits_the_logits_first() {
    let engine = Model::llama().engine();
    let hook: pagedllm::engine::LogitsHook = Arc::new(|_, tokens, logits| {
        logits.fill(f32::NEG_INFINITY);
        logits[tokens.len() % 100] = 0.0;
    });
    let sampling = SamplingParams { max_tokens: Some(5), ignore_eos: true, ..Default::default() };
    let id = engine.add_request(Request { hook: Some(hook), ..request(prompt(10), sampling) }).unwrap();
    let generated: Vec<u32> =
        drain(&engine).iter().filter(|output| output.request == id).flat_map(|output| output.tokens.clone()).collect();
    assert_eq!(generated, [10, 11, 12, 13, 14]);
}

#[test]
fn a_grammar_state_forks_and_rewinds_with_its_sequence() {
    let engine = Engine::create(&EngineOptions { model_dir: bundled_model(), threads: Some(1), ..Default::default() }).unwrap();
    let add = |grammar| {
        let (grammar, output) = (Some(grammar), OutputKind::Cumulative);
        // At this temperature both letters occur.
        let sampling = SamplingParams { temperature: 50.0, grammar, seed: Some(1), output, ..Default::default() };
        engine.add_request(Request::new(Prompt::Text("Say".into()), sampling))
    };
    let id = add(Grammar::Regex("[ab]{20}".into())).unwrap().sequence(0);
    steps(&engine, 6);
    let child = engine.fork(id, 1, &Fork { seed: Some(5), ..Default::default() }).unwrap()[0];
    engine.step().unwrap();
    let len = engine.sequence(child).unwrap().len;
    engine.rewind(child, len - 3).unwrap();
    assert_eq!(engine.sequence(child).unwrap().len, len - 3);
    let outputs = drain(&engine);
    let end = |seq| outputs.iter().rfind(|output| output.sequence == seq).unwrap();
    for output in [end(id), end(child)] {
        assert_eq!((output.finish, &output.error), (Some(FinishReason::Stop), &None));
        assert!(output.text.len() == 20 && output.text.chars().all(|c| "ab".contains(c)), "{}", output.text);
    }
    assert_ne!(end(id).text, end(child).text, "the fork has its own random numbers");
    assert_eq!(code(add(Grammar::JsonSchema("{\"type\": 7}".into())), "the grammar cannot be compiled"), Code::InvalidArgument);
    assert_eq!(code(add(Grammar::Regex("a\\".into())), "ends in a backslash"), Code::InvalidArgument);
}

#[test]
fn dry_penalizes_no_token_that_contains_a_sequence_breaker() {
    let engine = Engine::create(&EngineOptions { model_dir: bundled_model(), threads: Some(1), ..Default::default() }).unwrap();
    let text = engine.text().unwrap();
    let bytes = text.token_bytes(engine.info().vocab_size).unwrap().bytes;
    let token = bytes.iter().position(|bytes| bytes == b" \"").unwrap() as u32;
    assert_ne!(text.encode("\"", false).unwrap(), [token], "the token differs from the token of the breaker alone");
    let repeats = |breakers: Option<&[&str]>| {
        let sequence_breakers = breakers.map(|all| all.iter().map(|text| text.to_string()).collect());
        let dry = Some(Dry { multiplier: 100.0, base: 4.0, allowed_length: 1, sequence_breakers, ..Dry::default() });
        let sampling =
            SamplingParams { dry, logit_bias: vec![(token, 90.0)], max_tokens: Some(12), ignore_eos: true, ..SamplingParams::greedy() };
        engine.add_request(request(vec![10, 11], sampling)).unwrap();
        drain(&engine).iter().flat_map(|output| output.tokens.clone()).filter(|&generated| generated == token).count()
    };
    assert_eq!(repeats(None), 12);
    assert_eq!(repeats(Some(&["?", "\""])), 12);
    assert!(repeats(Some(&[])) < 12);
    assert!(repeats(Some(&["?"])) < 12);
}

#[test]
fn without_a_tokenizer_dry_has_no_default_breakers_and_refuses_explicit_breakers() {
    let engine = Model::llama().engine();
    let repeats = |dry| {
        let sampling =
            SamplingParams { dry, logit_bias: vec![(7, 90.0)], max_tokens: Some(12), ignore_eos: true, ..SamplingParams::greedy() };
        engine.add_request(request(prompt(4), sampling))?;
        Ok(drain(&engine).iter().flat_map(|output| output.tokens.clone()).filter(|&generated| generated == 7).count())
    };
    let dry = |breakers| Some(Dry { multiplier: 100.0, base: 4.0, allowed_length: 1, sequence_breakers: breakers, ..Dry::default() });
    assert_eq!(repeats(None).unwrap(), 12);
    assert!(repeats(dry(None)).unwrap() < 12);
    assert!(repeats(dry(Some(vec![]))).unwrap() < 12);
    assert_eq!(code(repeats(dry(Some(vec![":".into()]))), "unset sequence_breakers"), Code::Unsupported);
}

/// Every row of the table in the source has a case here.
#[test]
fn beam_search_is_refused_with_sampling_options() {
    type Change = fn(&mut Request);
    let cases: [(&str, Change); 17] = [
        ("best_of", |r| r.best_of = Some(2)),
        ("keep", |r| r.keep = true),
        ("a logits hook", |r| r.hook = Some(Arc::new(|_, _, _| ()))),
        ("temperature", |r| r.sampling.temperature = 0.5),
        ("top_k", |r| r.sampling.top_k = 3),
        ("top_p", |r| r.sampling.top_p = 0.5),
        ("min_p", |r| r.sampling.min_p = 0.5),
        ("typical_p", |r| r.sampling.typical_p = 0.5),
        ("top_n_sigma", |r| r.sampling.top_n_sigma = 1.0),
        ("xtc_probability", |r| r.sampling.xtc_probability = 0.5),
        ("mirostat", |r| r.sampling.mirostat = Some(Mirostat { tau: 5.0, eta: 0.1 })),
        ("seed", |r| r.sampling.seed = Some(0)),
        ("stop strings", |r| r.sampling.stop = vec!["x".into()]),
        ("prompt_logprobs", |r| r.sampling.prompt_logprobs = Some(0)),
        ("top_logprobs", |r| r.sampling.logprobs = Some(1)),
        ("echo", |r| r.sampling.echo = true),
        ("a grammar", |r| r.sampling.grammar = Some(Grammar::JsonObject)),
    ];
    let source = include_str!("../../src/engine/request.rs").split("fn no_sampling_with_beams").nth(1).unwrap().split("];").next().unwrap();
    let rows: Vec<&str> = source.lines().filter_map(|line| line.trim().strip_suffix("\"),")?.rsplit('"').next()).collect();
    assert_eq!(rows, cases.map(|(what, _)| what));
    let engine = Engine::create(&EngineOptions { model_dir: bundled_model(), threads: Some(1), ..Default::default() }).unwrap();
    let add = |change: Change| {
        let sampling = SamplingParams { max_tokens: Some(2), ..Default::default() };
        let mut request = Request { beam: Some(BeamParams::default()), ..request(vec![10, 11], sampling) };
        change(&mut request);
        engine.add_request(request)
    };
    for (what, change) in cases {
        assert_eq!(code(add(change), &format!("beam search excludes {what}")), Code::InvalidArgument);
    }
    add(|_| ()).unwrap();
    drain(&engine);
}

#[test]
fn a_conversation_after_a_grammar_answer_continues_forks_moves_and_rewinds() {
    let engine = Engine::create(&EngineOptions { model_dir: bundled_model(), threads: Some(1), ..Default::default() }).unwrap();
    let sampling = SamplingParams { grammar: Some(Grammar::Regex("[ab]{20}".into())), seed: Some(1), ..Default::default() };
    let request = Request { keep: true, ..Request::new(Prompt::Text("Say".into()), sampling) };
    let id = engine.add_request(request).unwrap().sequence(0);
    let answer = drain(&engine);
    assert_eq!(answer.last().unwrap().finish, Some(FinishReason::Stop));
    let len = engine.sequence(id).unwrap().len;
    // The text has characters that the grammar refuses, and characters that it accepts at its
    // start.
    let question = engine.text().unwrap().encode(" why? ab", false).unwrap();
    engine.append(id, question.clone()).unwrap();
    let children = engine.fork(id, 3, &Fork::default()).unwrap();
    let moved = engine.import(engine.queue(), &exported(&engine, id)).unwrap();
    let plain = SamplingParams { temperature: 0.0, max_tokens: Some(6), ignore_eos: true, logprobs: Some(0), ..Default::default() };
    for seq in [&children[..], &[moved]].concat() {
        assert_eq!(engine.sequence(seq).unwrap().len, len + question.len());
        engine.resume(seq, Resume { keep: false, ..Resume::new(plain.clone()) }).unwrap();
    }
    let found = answers(&drain(&engine));
    assert!(found.len() == 4 && found.values().all(|one| *one == found[&moved] && one.len() == 6), "{found:?}");

    // The grammar refuses to continue until all of the appended text is rewound.
    let continue_with_grammar = || engine.continue_sequence(id, Continue { keep: true, ..Continue::default() }).unwrap();
    continue_with_grammar();
    let refused = drain(&engine).pop().unwrap();
    assert!(refused.error.unwrap().message().contains("the host added it") && engine.sequence(id).unwrap().idle);
    engine.rewind(id, len + 1).unwrap();
    continue_with_grammar();
    assert_eq!(drain(&engine).pop().unwrap().finish, Some(FinishReason::Error));
    engine.rewind(id, len - 8).unwrap();
    continue_with_grammar();
    let again = drain(&engine);
    assert_eq!(again.last().unwrap().finish, Some(FinishReason::Stop));
    let tokens = |outputs: &[Output]| outputs.iter().flat_map(|output| output.tokens.clone()).collect::<Vec<u32>>();
    assert!(tokens(&answer).ends_with(&tokens(&again)) && tokens(&again).len() == 8, "{again:?}");
    engine.free(id).unwrap();
    engine.step().unwrap();
    assert_empty(&engine);
}

#[test]
fn mirostat_state_is_exported_and_an_import_accepts_a_logits_hook() {
    let model = Model::llama();
    let sampling = SamplingParams { mirostat: Some(Mirostat { tau: 3.0, eta: 0.3 }), temperature: 2.0, ..sampled(3, 40) };
    let engine = model.engine();
    let id = engine.add_request(Request { keep: true, ..request(prompt(20), sampling) }).unwrap().sequence(0);
    let whole = answers(&drain(&engine)).remove(&id).unwrap();
    let state = exported(&engine, id);
    for back in [1, 10, 30] {
        let other = model.engine();
        let seq = other.import(other.queue(), &state).unwrap();
        other.rewind(seq, 60 - back).unwrap();
        other.continue_sequence(seq, Continue::default()).unwrap();
        assert_eq!(answers(&drain(&other)).remove(&seq).unwrap(), whole[40 - back..], "rewound by {back}");
        let seq = other.import(other.queue(), &state).unwrap();
        other.rewind(seq, 60 - back).unwrap();
        let hook: LogitsHook = Arc::new(|_, _, logits| logits[7] = 1e4);
        other.continue_sequence(seq, Continue { hook: Some(hook), ..Continue::default() }).unwrap();
        assert_eq!(tokens(&answers(&drain(&other)).remove(&seq).unwrap()), vec![7; back]);
    }
}

#[test]
fn invalid_calls_are_refused_with_the_limits_and_change_no_other_sequence() {
    let model = Model::llama();
    let engine = model.engine_with(40, 160);
    let id = engine.add_request(Request { keep: true, ..request(prompt(20), sampled(3, 30)) }).unwrap().sequence(0);
    steps(&engine, 4);
    let invalid = Code::InvalidArgument;
    let fork = |at, n| engine.fork(id, n, &Fork { at, ..Default::default() });
    assert_eq!(code(fork(Some(0), 1), "has 24 tokens and cannot be forked at 0"), invalid);
    assert_eq!(code(fork(Some(25), 1), "has 24 tokens and cannot be forked at 25"), invalid);
    assert_eq!(code(fork(None, 0), "n is 0"), invalid);
    assert_eq!(code(fork(None, 41), "the pool has 40"), Code::Capacity);
    assert_eq!(code(engine.fork(SeqId::from_raw(99), 1, &Fork::default()), "99 is unknown"), Code::NotFound);
    assert_eq!(code(engine.append(id, prompt(136)), "max_model_len is 160"), invalid);
    assert_eq!(code(engine.append(id, vec![500]), "beyond the vocabulary"), invalid);
    assert_eq!(code(engine.rewind(id, 0), "must be 1 to 24"), invalid);
    assert_eq!(code(engine.rewind(id, 25), "must be 1 to 24"), invalid);
    assert_eq!(code(engine.resume(id, Resume::new(sampled(1, 2))), "runs already"), invalid);
    let add = |change: &dyn Fn(&mut Request)| {
        let mut request = request(prompt(20), sampled(3, 10));
        change(&mut request);
        engine.add_request(request)
    };
    assert_eq!(code(add(&|r| (r.n, r.best_of) = (3, Some(2))), "best_of is 2 and n is 3"), invalid);
    assert_eq!(code(add(&|r| r.n = 17), "max_seqs is 16"), invalid);
    assert_eq!(code(add(&|r| (r.n, r.sampling.max_tokens) = (4, None)), "the pool has 40"), Code::Capacity);
    assert_eq!(code(add(&|r| r.beam = Some(BeamParams::default())), "temperature"), invalid);
    let beams = |r: &mut Request| (r.beam, r.sampling) = (Some(BeamParams::default()), SamplingParams { echo: true, ..Default::default() });
    assert_eq!(code(add(&beams), "beam search excludes echo"), invalid);
    assert_eq!(code(add(&|r| r.truncate_prompt_tokens = Some(0)), "truncate_prompt_tokens is 0"), invalid);
    assert_eq!(code(add(&|r| r.sampling.logit_bias = vec![(127, 1.0)]), "127"), invalid);
    assert_eq!(code(add(&|r| r.sampling.bad_words_ids = vec![vec![]]), "empty"), invalid);
    let rest = answers(&drain(&engine)).remove(&id).unwrap();
    assert_eq!(rest, alone(&model, &prompt(20), sampled(3, 30))[4..], "the refused calls change no output");
    engine.free(id).unwrap();
    assert_eq!(code(engine.free(id), "unknown"), Code::NotFound);
    assert_eq!(code(engine.rewind(id, 1), "unknown"), Code::NotFound);
    engine.step().unwrap();
    assert_empty(&engine);
}

#[test]
fn an_abort_keeps_a_sequence_with_keep_set() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(Request { keep: true, ..request(prompt(20), sampled(3, 30)) }).unwrap().sequence(0);
    let before = answers(&steps(&engine, 7)).remove(&id).unwrap();
    engine.abort(id.own_request()).unwrap();
    assert_eq!(drain(&engine).last().unwrap().finish, Some(FinishReason::Abort));
    assert!(engine.sequence(id).unwrap().idle);
    engine.resume(id, Resume { keep: false, ..Resume::new(sampled(3, 23)) }).unwrap();
    let after = answers(&drain(&engine)).remove(&id).unwrap();
    assert_eq!([before, after].concat(), alone(&model, &prompt(20), sampled(3, 30)));
    assert_empty(&engine);
}

#[test]
fn every_run_of_a_failed_fork_ends_in_its_own_queue() {
    let model = Model::llama();
    let engine = model.engine();
    let elsewhere = engine.create_queue(8).unwrap();
    for continues in [false, true] {
        let parent = engine.add_request(request(prompt(20), sampled(3, 30))).unwrap().sequence(0);
        steps(&engine, 3);
        // All calls come before the next step, so the parent has ended when the engine applies the
        // fork.
        engine.abort(parent.own_request()).unwrap();
        let idle = Fork { idle: true, user_data: Some(1), ..Fork::default() };
        let child = engine.fork(parent, 1, &idle).unwrap()[0];
        match continues {
            true => engine.continue_sequence(child, Continue::default()).unwrap(),
            false => {
                let resume = Resume { queue: Some(&elsewhere), user_data: Some(2), ..Resume::new(sampled(3, 5)) };
                engine.resume(child, resume).unwrap();
            }
        }
        let mut outputs = drain(&engine);
        outputs.extend(elsewhere.poll(Some(Duration::ZERO)).unwrap());
        let of_child: Vec<_> = outputs.iter().filter(|output| output.sequence == child).collect();
        assert_eq!(of_child.iter().map(|output| output.user_data).collect::<Vec<_>>(), [1, if continues { 1 } else { 2 }]);
        for output in of_child {
            assert_eq!((output.finish, output.error.as_ref().unwrap().code()), (Some(FinishReason::Error), Code::NotFound));
        }
        assert_eq!(engine.stats().finished_error, if continues { 4 } else { 2 });
        assert_eq!(code(engine.sequence(child), "unknown"), Code::NotFound);
        assert_empty(&engine);
    }
}

#[test]
fn samples_aborted_before_they_exist_continue_as_one_sequence() {
    let model = Model::llama();
    for best_of in [None, Some(6)] {
        let engine = model.engine();
        let id = engine.add_request(Request { n: 4, best_of, keep: true, ..request(prompt(20), sampled(3, 30)) }).unwrap().sequence(0);
        engine.abort(id.own_request()).unwrap();
        assert_eq!(drain(&engine).iter().map(|output| output.finish).collect::<Vec<_>>(), [Some(FinishReason::Abort); 4]);
        engine.continue_sequence(id, Continue::default()).unwrap();
        let outputs = drain(&engine);
        assert!(outputs.iter().all(|output| (output.sequence, output.index) == (id, 0)));
        assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 1);
        assert_empty(&engine);
    }
}

/// Runs a request and returns its text and finish reason. After each token, `disturb` may abort and
/// continue the sequence.
fn run_with(sampling: &SamplingParams, mut disturb: impl FnMut(&Engine, SeqId, usize)) -> (String, Option<FinishReason>) {
    let engine = Engine::create(&EngineOptions { model_dir: bundled_model(), threads: Some(1), ..Default::default() }).unwrap();
    let request = Request { keep: true, ..Request::new(Prompt::Text("Once upon a time".into()), sampling.clone()) };
    let id = engine.add_request(request).unwrap().sequence(0);
    let (mut text, mut finish) = (String::new(), None);
    for tokens in 1.. {
        engine.step().unwrap();
        for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            assert!(output.error.is_none(), "{:?}", output.error);
            text += &output.text;
            finish = output.finish.filter(|finish| *finish != FinishReason::Abort);
        }
        if finish.is_some() {
            return (text, finish);
        }
        disturb(&engine, id, tokens);
    }
    unreachable!()
}

#[test]
fn an_aborted_and_continued_run_keeps_its_text_and_stop() {
    let plain = SamplingParams { temperature: 0.0, max_tokens: Some(24), ignore_eos: true, ..Default::default() };
    let (text, _) = run_with(&plain, |_, _, _| {});
    let chars: Vec<char> = text.chars().collect();
    // Some of these stop strings of three characters span two tokens.
    for at in (6..chars.len() - 3).step_by(5) {
        let stop: String = chars[at..at + 3].iter().collect();
        for min_tokens in [0, 4, 9] {
            let sampling = SamplingParams { stop: vec![stop.clone()], min_tokens, ..plain.clone() };
            let whole = run_with(&sampling, |_, _, _| {});
            for cut in [1, 3, 6, 8, 9] {
                let again = run_with(&sampling, |engine, id, tokens| {
                    if tokens == cut {
                        engine.abort(id.own_request()).unwrap();
                        engine.step().unwrap();
                        engine.continue_sequence(id, Continue { keep: true, ..Continue::default() }).unwrap();
                    }
                });
                // The abort emits held-back text that could start the stop string.
                let more = again.0.strip_prefix(&whole.0);
                assert!(
                    again.1 == whole.1 && more.is_some_and(|more| stop.starts_with(more) && more != stop),
                    "stop {stop:?}, min_tokens {min_tokens}, cut after {cut}: {again:?}, not {whole:?}"
                );
            }
        }
    }
}

fn exported(engine: &Engine, seq: SeqId) -> Vec<u8> {
    engine.export(seq, None).unwrap();
    engine.step().unwrap();
    let outputs = engine.queue().poll(Some(Duration::ZERO)).unwrap();
    outputs
        .into_iter()
        .find(|output| output.sequence == seq && !output.sequence_state.is_empty())
        .expect("the export emits an output with the state")
        .sequence_state
}

#[test]
fn an_imported_sequence_continues_with_the_same_bits() {
    let hard = SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.4, top_p: 0.9, ..sampled(3, 40) };
    let mirostat = SamplingParams { mirostat: Some(pagedllm::types::options::Mirostat { tau: 3.0, eta: 0.2 }), ..sampled(3, 40) };
    // Gemma 2 and gpt-oss have a window of 37, so blocks of the longer prompts are out of the
    // window. DeepSeek caches latents.
    let llama = [(29, sampled(3, 40)), (29, hard), (29, mirostat)].map(|(len, sampling)| ("llama", len, sampling));
    let others = ["gemma 2", "gpt-oss", "deepseek"].map(|family| [12, 29, 77].map(|len| (family, len, sampled(3, 40))));
    for (family, len, sampling) in llama.into_iter().chain(others.into_iter().flatten()) {
        let model = Model::from_family(family);
        let whole = alone(&model, &prompt(len), sampling.clone());
        let (from, to) = (model.engine(), model.engine());
        let id = from.add_request(request(prompt(len), sampling)).unwrap().sequence(0);
        steps(&from, 14);
        let idle = from.fork(id, 1, &Fork { idle: true, ..Default::default() }).unwrap()[0];
        from.step().unwrap();
        let generated = from.sequence(idle).unwrap().len - len;
        let state = exported(&from, idle);
        drop(from);
        let seq = to.import(to.queue(), &state).unwrap();
        to.continue_sequence(seq, Continue::default()).unwrap();
        let after = answers(&drain(&to)).remove(&seq).unwrap();
        assert_eq!(after, whole[generated..]);
        assert!(to.stats().prompt_tokens <= 1, "no prompt token was recomputed: {:?}", to.stats());
        assert_empty(&to);
    }
}

/// The slots after the last token are in a block that another sequence used before.
#[test]
fn an_export_contains_no_data_of_earlier_owners_of_its_blocks() {
    for (family, len) in [("llama", 29), ("gemma 2", 29), ("gemma 2", 61), ("deepseek", 29)] {
        let model = Model::from_family(family);
        let export = |engine: &Engine| {
            let id = engine.add_request(Request { keep: true, ..request(prompt(len), sampled(3, 5)) }).unwrap().sequence(0);
            drain(engine);
            exported(engine, id)
        };
        let used = Engine::create(&EngineOptions { prefix_cache: false, ..model.options.clone() }).unwrap();
        for i in 0..20 {
            used.add_request(request(prompt(40 + i), sampled(9, 30))).unwrap();
        }
        drain(&used);
        let fresh = Engine::create(&EngineOptions { prefix_cache: false, ..model.options.clone() }).unwrap();
        assert_eq!(export(&used), export(&fresh), "{family}");
    }
}

#[test]
fn exported_state_and_later_outputs_go_to_the_requested_queues() {
    let model = Model::llama();
    let engine = model.engine();
    let (states_queue, elsewhere) = (engine.create_queue(8).unwrap(), engine.create_queue(64).unwrap());
    let id = engine.add_request(Request { keep: true, user_data: 1, ..request(prompt(20), sampled(3, 30)) }).unwrap().sequence(0);
    let mut found = answers(&steps(&engine, 5)).remove(&id).unwrap();
    engine.export(id, Some(&states_queue)).unwrap();
    engine.abort(id.own_request()).unwrap();
    found.extend(answers(&drain(&engine)).remove(&id).unwrap_or_default());
    let states = states_queue.poll(Some(Duration::ZERO)).unwrap();
    let state = &states[0];
    assert_eq!((states.len(), state.sequence, state.user_data, state.finish, state.sequence_state.is_empty()), (1, id, 1, None, false));
    engine.continue_sequence(id, Continue { queue: Some(&elsewhere), user_data: Some(2), ..Continue::default() }).unwrap();
    assert!(drain(&engine).is_empty(), "the default queue receives no more outputs of the sequence");
    let outputs: Vec<Output> = elsewhere.poll(Some(Duration::ZERO)).unwrap().into();
    assert!(outputs.iter().all(|output| output.user_data == 2));
    found.extend(answers(&outputs).remove(&id).unwrap());
    assert_eq!(found, alone(&model, &prompt(20), sampled(3, 30)));
    assert_empty(&engine);

    // A sequence that ends before the engine applies its export.
    let id = engine.add_request(request(prompt(20), sampled(3, 30))).unwrap().sequence(0);
    steps(&engine, 2);
    engine.abort(id.own_request()).unwrap();
    engine.export(id, Some(&states_queue)).unwrap();
    drain(&engine);
    let outputs = states_queue.poll(Some(Duration::ZERO)).unwrap();
    assert_eq!((outputs[0].sequence, outputs[0].error.as_ref().unwrap().code(), outputs[0].finish), (id, Code::NotFound, None));
    // A queue of another engine, and an unknown sequence.
    let other = model.engine();
    let id = other.add_request(request(prompt(20), sampled(3, 30))).unwrap().sequence(0);
    assert_eq!(code(other.export(id, Some(&states_queue)), "another engine"), Code::InvalidArgument);
    assert_eq!(code(engine.export(SeqId::from_raw(77), None), "unknown"), Code::NotFound);
}

#[test]
fn an_export_includes_prompt_logprobs_and_pending_outputs() {
    let model = Model::llama();
    let sampling = SamplingParams { prompt_logprobs: Some(2), output: OutputKind::Final, ..sampled(3, 12) };
    let engine = Engine::create(&EngineOptions { prefill_chunk: Some(16), ..model.options.clone() }).unwrap();
    engine.add_request(request(prompt(60), sampling.clone())).unwrap();
    let here = drain(&engine).pop().unwrap();
    // The export happens before, within and after the prefill.
    for n in [0, 2, 12] {
        let id = engine.add_request(Request { keep: true, ..request(prompt(60), sampling.clone()) }).unwrap().sequence(0);
        steps(&engine, n);
        let state = exported(&engine, id);
        drain(&engine);
        engine.free(id).unwrap();
        let other = model.engine();
        let seq = other.import(other.queue(), &state).unwrap();
        other.continue_sequence(seq, Continue::default()).unwrap();
        let there = drain(&other).pop().unwrap();
        assert_eq!(there.prompt_logprobs.tokens.len(), 59);
        let contents = |output: &Output| (output.tokens.clone(), output.logprobs.clone(), output.prompt_logprobs.clone(), output.finish);
        assert_eq!(contents(&there), contents(&here), "moved after {n} steps");
    }
}

#[test]
fn an_import_into_a_full_pool_is_recomputed_and_one_from_another_path_is_inexact() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(Request { keep: true, ..request(prompt(60), sampled(3, 20)) }).unwrap().sequence(0);
    drain(&engine);
    let state = exported(&engine, id);
    let all = [prompt(60), tokens(&alone(&model, &prompt(60), sampled(3, 20)))].concat();

    let small_pool = model.engine_with(24, 150);
    let running = small_pool.add_request(request(prompt(110), sampled(1, 30))).unwrap().sequence(0);
    steps(&small_pool, 1);
    let seq = small_pool.import(small_pool.queue(), &state).unwrap();
    small_pool.resume(seq, Resume { keep: false, ..Resume::new(sampled(9, 10)) }).unwrap();
    let found = answers(&drain(&small_pool));
    assert_eq!(found[&seq], alone(&model, &all, sampled(9, 10)));
    assert_eq!(found[&running].len() + 1, 30);

    let other = Engine::create(&EngineOptions { isa: Some(Isa::Portable), ..model.options.clone() }).unwrap();
    let seq = other.import(other.queue(), &state).unwrap();
    let same = other.info().isa == engine.info().isa;
    assert_eq!((other.sequence(seq).unwrap().inexact, engine.sequence(id).unwrap().inexact), (!same, false));
    other.resume(seq, Resume::new(sampled(9, 10))).unwrap();
    assert_eq!(answers(&drain(&other))[&seq].len(), 10);
    // A path that only speeds up integer products gives the same bits as its base path.
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_present() && isa.bits() != *isa) {
        let [faster, plain] =
            [isa, isa.bits()].map(|isa| Engine::create(&EngineOptions { isa: Some(isa), ..model.options.clone() }).unwrap());
        let seq = faster.add_request(Request { keep: true, ..request(prompt(20), sampled(3, 10)) }).unwrap().sequence(0);
        drain(&faster);
        let seq = plain.import(plain.queue(), &exported(&faster, seq)).unwrap();
        assert!(!plain.sequence(seq).unwrap().inexact, "{isa:?}");
    }
}

#[test]
fn a_damaged_foreign_or_newer_state_is_refused_without_side_effects() {
    let model = Model::llama();
    let engine = model.engine();
    let id = engine.add_request(Request { keep: true, ..request(prompt(20), sampled(3, 10)) }).unwrap().sequence(0);
    drain(&engine);
    let state = exported(&engine, id);
    let import = |bytes: &[u8]| engine.import(engine.queue(), bytes);
    for len in [0, 1, 8, 12, 31, 32, 40, state.len() / 2, state.len() - 1] {
        assert_eq!(code(import(&state[..len]), "not an exported sequence"), Code::InvalidArgument, "{len}");
    }
    for i in (0..state.len()).step_by(97) {
        let mut damaged = state.clone();
        damaged[i] ^= 1 << (i % 8);
        assert!(import(&damaged).is_err(), "byte {i}");
    }
    for (version, age) in [(1, "an earlier release (format 1, this library reads 2)"), (3, "a newer release (format 3")] {
        let mut other = state.clone();
        other[8] = version;
        assert_eq!(code(import(&other), age), Code::Unsupported);
    }

    let foreign = {
        let dir = TempDir::new();
        write_random_model(&dir.0, &configs(512).pop().unwrap().1, false, 6);
        Engine::create(&EngineOptions { model_dir: dir.0.clone(), ..model.options.clone() }).unwrap()
    };
    assert_eq!(code(foreign.import(foreign.queue(), &state), "has another model"), Code::InvalidArgument);
    let wider = Engine::create(&EngineOptions { block_size: 16, ..model.options.clone() }).unwrap();
    assert_eq!(code(wider.import(wider.queue(), &state), "this engine has blocks of 16"), Code::InvalidArgument);
    let shorter = model.engine_with(24, 28);
    assert_eq!(code(shorter.import(shorter.queue(), &state), "max_model_len is 28"), Code::InvalidArgument);
    engine.check().unwrap();
}

/// A forged state has a valid checksum over arbitrary content.
#[test]
fn a_forged_state_never_causes_a_defect() {
    use sha2::{Digest, Sha256};
    let model = Model::llama();
    let engine = model.engine();
    let sampling = SamplingParams { prompt_logprobs: Some(1), output: OutputKind::Cumulative, ..sampled(3, 30) };
    let id = engine.add_request(request(prompt(20), sampling)).unwrap().sequence(0);
    steps(&engine, 10);
    let idle = engine.fork(id, 1, &Fork { idle: true, ..Default::default() }).unwrap()[0];
    drain(&engine);
    let state = exported(&engine, idle);
    let mut random = support::Random(4);
    let header = u64::from_le_bytes(state[12..20].try_into().unwrap()) as usize;
    let mut accepted = 0;
    for _ in 0..2000 {
        let mut forged = state[..state.len() - 32].to_vec();
        for _ in 0..=random.below(3) {
            // Mostly digits change, so that the header often parses but contains wrong numbers.
            let place = 20 + random.below(header);
            if forged[place].is_ascii_digit() || random.below(20) == 0 {
                forged[place] = b'0' + random.below(10) as u8;
            }
        }
        forged.extend_from_slice(&Sha256::digest(&forged));
        if let Ok(seq) = engine.import(engine.queue(), &forged) {
            accepted += 1;
            engine.continue_sequence(seq, Continue::default()).unwrap();
            drain(&engine);
            engine.check().unwrap();
            let _ = engine.free(seq); // a sequence that could not continue still exists
        }
    }
    assert!(accepted > 20, "{accepted}");
    engine.free(idle).unwrap();
    engine.step().unwrap();
    assert_empty(&engine);
}

/// Runs a scheduler over a model with a window in all layers or in every second layer. Returns the
/// bits of the logits of every step and the maximum number of used blocks.
fn windowed(alternate: bool, keeps_all: bool, forks: bool) -> (Vec<Vec<u32>>, usize) {
    use pagedllm::backend::cpu::CpuBackend;
    use pagedllm::engine::{Executor, ModelExecutor};
    use pagedllm::kv::{BlockManager, Paging};
    use pagedllm::model::{BatchLimits, KvCache, KvLayout, KvPool, ModelFiles};
    use pagedllm::scheduler::{SampledToken, Scheduler, SchedulerOptions, TokenOutcome};
    use pagedllm::types::options::{KvDtype, Preemption};

    const WINDOW: usize = 21;
    let model = Model::llama();
    let mut files = ModelFiles::open(&model.options.model_dir).unwrap();
    let windowed = files.spec.layers.iter_mut().skip(alternate as usize).step_by(1 + alternate as usize);
    windowed.for_each(|layer| layer.attention.shape_mut().window = Some(WINDOW));
    let mut windows = KvLayout::for_spec(&files.spec).windows;
    assert_eq!(windows, if alternate { vec![None, Some(WINDOW)] } else { vec![Some(WINDOW)] });
    windows.iter_mut().filter(|_| keeps_all).for_each(|window| *window = None);
    let paging = Paging::new(BLOCK, &windows);
    let backend = CpuBackend::new(1, None).unwrap();
    let kv = KvCache::new(&backend, &files.spec, KvPool { blocks: 120, block_size: BLOCK, dtype: KvDtype::F32 }).unwrap();
    let mut executor = ModelExecutor::new(files.load(backend, BatchLimits { tokens: 16, logits: 8 }, &mut |_, _| true).unwrap(), kv);
    let options = SchedulerOptions { max_batch_tokens: 16, max_seqs: 8, prefill_chunk: 16, preemption: Preemption::Recompute };
    let mut scheduler = Scheduler::new(options, BlockManager::new(120, paging.clone(), true).unwrap()).unwrap();
    for (id, len) in [(1, 100), (2, 9)] {
        let group = support::new_group(prompt(len), 160);
        scheduler.add(SeqId::from_raw(id), group.prepare(&paging).unwrap()).unwrap();
    }
    let (mut logit_bits, mut max_used, mut events) = (Vec::new(), 0, Vec::new());
    for step in 0..160 {
        let Some(plan) = scheduler.schedule(|_| true) else { break };
        let ticket = executor.submit(&plan.batch).unwrap();
        let logits = executor.wait(ticket).unwrap().logits;
        logit_bits.push(logits.iter().map(|x| x.to_bits()).collect());
        let argmax = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
        let outcomes = logits.chunks_exact(127).map(|row| TokenOutcome::Token(argmax(row)));
        let sampled_tokens: Vec<SampledToken> = plan
            .sampled()
            .zip(outcomes)
            .map(|(sequence, outcome)| SampledToken { parent: sequence.seq, child: sequence.seq, outcome })
            .collect();
        scheduler.commit(plan, &sampled_tokens, &mut events);
        scheduler.check();
        max_used = max_used.max(scheduler.blocks().used_blocks());
        if forks && step == 30 {
            (3..5).for_each(|child| scheduler.fork(SeqId::from_raw(1), None, SeqId::from_raw(child), false).unwrap());
        }
        if forks && step == 40 {
            // Both positions need blocks that the window has already released.
            scheduler.rewind(SeqId::from_raw(2), 12).unwrap();
            scheduler.fork(SeqId::from_raw(1), Some(30), SeqId::from_raw(6), false).unwrap();
        }
    }
    (logit_bits, max_used)
}

/// Every second layer has a window of 37 tokens.
#[test]
fn windowed_layers_hold_only_their_window_and_statistics_report_the_saved_blocks() {
    let model = Model::from_family("gemma 2");
    let plan = Engine::plan(&model.options).unwrap();
    assert_eq!((plan.groups, plan.max_model_len), (2, 512));
    let engine = Engine::create(&EngineOptions { max_batch_tokens: 32, ..model.options.clone() }).unwrap();
    engine.add_request(request(prompt(300), sampled(3, 100))).unwrap();
    for step in 1..=100usize {
        engine.step().unwrap();
        let computed = (32 * step).min(300 + step.saturating_sub(10));
        let (all, left) = (computed.div_ceil(BLOCK), computed.saturating_sub(37) / BLOCK);
        let Stats { blocks_used, blocks_out_of_window, .. } = engine.stats();
        assert_eq!((blocks_used, blocks_out_of_window), ((2 * all - left) as u64, left as u64), "{computed} tokens computed");
    }
    let alone = drain(&engine);
    let Stats { blocks_used, blocks_out_of_window, .. } = engine.stats();
    assert_eq!((blocks_used, blocks_out_of_window), (0, 0));
    // A request with the same first 296 tokens reuses the cached blocks that its windows need.
    let mut other = prompt(300);
    other[297] += 1;
    let hits = engine.stats().prefix_hits;
    engine.add_request(request(other, sampled(3, 4))).unwrap();
    drain(&engine);
    assert_eq!(engine.stats().prefix_hits - hits, 296);
    engine.add_request(request(prompt(300), sampled(3, 100))).unwrap();
    let tokens = |outputs: &[Output]| outputs.iter().flat_map(|output| output.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&drain(&engine)), tokens(&alone), "a cache hit changes no token");
    // 100 blocks hold a sequence of 512 tokens, although two layers without windows would need 128.
    let few = EngineOptions { max_batch_tokens: 32, kv_bytes: Some(100 * plan.block_bytes), ..model.options.clone() };
    assert_eq!(Engine::plan(&few).unwrap().max_model_len, 512);
    let fewer = EngineOptions { kv_bytes: Some(50 * plan.block_bytes), ..few };
    assert_eq!(
        Engine::plan(&fewer).unwrap().max_model_len,
        (50 - 10) * BLOCK,
        "ten blocks hold 68 tokens of the windowed layers and their partial blocks"
    );
}

#[test]
fn a_block_out_of_the_window_is_released_even_if_forks_shared_it() {
    for (alternate, forks) in [(false, false), (false, true), (true, false), (true, true)] {
        let (expected, without_windows) = windowed(alternate, true, forks);
        let (found, with_windows) = windowed(alternate, false, forks);
        assert_eq!(expected.len(), found.len());
        let full_layers = if alternate { without_windows / 2 } else { 0 };
        let max_blocks = full_layers + if forks { 5 * 5 + 4 } else { 2 * 5 };
        assert!(with_windows <= max_blocks && without_windows >= 20, "{with_windows} of {without_windows}");
        if !forks {
            assert_eq!(expected, found, "the release of blocks changes no bit");
        }
    }
}
