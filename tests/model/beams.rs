//! Compares beam search with `generate` of Hugging Face transformers. Each row is computed from all
//! tokens before it.

use std::collections::HashMap;

use crate::support::{BeamCase, beam_cases, goldens};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::error::Result;
use pagedllm::generation::beam::{BeamScratch, BeamSearch, BeamStep, Hypothesis};
use pagedllm::generation::sampler::{Context, ResolvedSampling, Sampler, SamplingHistory, log_softmax};
use pagedllm::model::{BatchLimits, Decoder, KvCache, KvPool, ModelFiles};
use pagedllm::types::batch::{Batch, Span};
use pagedllm::types::options::KvDtype;

const POSITIONS: usize = 64;

struct Model {
    decoder: Decoder<CpuBackend>,
    kv: KvCache<CpuBackend>,
    /// Cache of log probabilities by their tokens, since cases share prompts.
    known: HashMap<Vec<u32>, Vec<f32>>,
    vocab: usize,
    sampler: Sampler,
}

impl Model {
    fn load(name: &str) -> Model {
        let files = ModelFiles::open(&goldens().join(name)).unwrap();
        let backend = CpuBackend::new(1, None).unwrap();
        let pool = KvPool { blocks: POSITIONS / 16, block_size: 16, dtype: KvDtype::F32 };
        let kv = KvCache::new(&backend, &files.spec, pool).unwrap();
        let decoder = files.load(backend, BatchLimits { tokens: POSITIONS, logits: 1 }, &mut |_, _| true).unwrap();
        let vocab = files.spec.vocab_size;
        Model { decoder, kv, known: HashMap::new(), vocab, sampler: Sampler::new(vocab).unwrap() }
    }

    fn log_probabilities(&mut self, tokens: &[u32]) -> &[f32] {
        if !self.known.contains_key(tokens) {
            let row = self.compute(tokens);
            self.known.insert(tokens.to_vec(), row);
        }
        &self.known[tokens]
    }

    fn compute(&mut self, tokens: &[u32]) -> Vec<f32> {
        let rows = tokens.len() as u32;
        let batch = Batch {
            tokens: tokens.to_vec(),
            positions: (0..rows).collect(),
            slots: (0..rows).collect(),
            spans: vec![Span { first_token: 0, tokens: rows, table: 0 }],
            tables: (0..POSITIONS as u32 / 16).collect(),
            logit_rows: vec![rows - 1],
            ..Batch::default()
        };
        self.decoder.forward(&batch, &mut self.kv).unwrap();
        let logits = self.decoder.logits(1).unwrap();
        let mut row = vec![0.0; logits.len()];
        log_softmax(logits, &mut row);
        row
    }
}

/// [slots] The tokens of each sequence, built only by forks and appends.
type Slots = Vec<Option<Vec<u32>>>;

fn advance(slots: &mut Slots, step: &BeamStep) {
    for &slot in &step.dropped {
        slots[slot] = None;
    }
    let before = slots.clone();
    for next in step.next.iter().filter(|next| next.slot != next.parent) {
        assert!(slots[next.slot].is_none(), "slot {} is in use", next.slot);
        let parent = before[next.parent].clone().or_else(|| panic!("slot {} is empty and cannot be forked", next.parent));
        slots[next.slot] = parent;
    }
    for next in &step.next {
        slots[next.slot].as_mut().unwrap().push(next.token);
    }
}

fn process(sampler: &mut Sampler, rules: &ResolvedSampling, tokens: &[u32], prompt_len: usize, row: &mut [f32]) -> Result<()> {
    let memory = SamplingHistory::new(rules, tokens, prompt_len)?;
    let context = Context { tokens, prompt_len, generated: tokens.len() - prompt_len, seed: 0, history: &memory, allowed: None };
    Ok(sampler.process(row, rules, &context)?)
}

fn search(model: &mut Model, case: &BeamCase, n: usize) -> Vec<Hypothesis> {
    let mut search = BeamSearch::new(&case.params, n, &case.eos, case.max_tokens).unwrap();
    let rules = ResolvedSampling { params: case.sampling.clone(), eos: case.eos.as_slice().into(), ..ResolvedSampling::default() };
    let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
    let mut slots: Slots = vec![None; case.params.width as usize];
    slots[0] = Some(case.prompt.clone());
    while !search.is_done() {
        let mut rows = Vec::new();
        for slot in &slots {
            match slot {
                Some(tokens) => rows.extend_from_slice(model.log_probabilities(tokens)),
                None => rows.resize(rows.len() + model.vocab, 0.0),
            }
        }
        let mut process =
            |slot: usize, row: &mut [f32]| process(&mut model.sampler, &rules, slots[slot].as_ref().unwrap(), case.prompt.len(), row);
        search.decide(&rows, &mut process, &mut scratch, &mut step).unwrap();
        search.commit(&step).unwrap();
        advance(&mut slots, &step);
    }
    assert!(slots.iter().all(Option::is_none), "a finished search has dropped its slots");
    search.best().unwrap()
}

/// A length penalty of -1 gives scores of hundreds, where f32 has steps of 3e-5.
fn tolerance(score: f32) -> f32 {
    1e-4 + 1e-6 * score.abs()
}

fn agrees_with_transformers(file: &str) {
    let mut models = HashMap::new();
    let cases = beam_cases(file);
    assert!(cases.len() > 50, "{} cases", cases.len());
    for case in &cases {
        let model = models.entry(case.model.clone()).or_insert_with(|| Model::load(&case.model));
        for n in 1..=case.params.width as usize {
            let found = search(model, case, n);
            let tokens: Vec<&[u32]> = found.iter().map(|hypothesis| hypothesis.tokens.as_slice()).collect();
            let expected: Vec<&[u32]> = case.expected[..n].iter().map(|(tokens, _)| tokens.as_slice()).collect();
            assert_eq!(tokens, expected, "{}, {n} best", case.name());
            for (found, (_, score)) in found.iter().zip(&case.expected) {
                assert!((found.score - score).abs() <= tolerance(*score), "{}: score {}, transformers {score}", case.name(), found.score);
            }
        }
    }
}

#[test]
fn beams_equal_those_of_transformers_5() {
    agrees_with_transformers("beams.json");
}

#[test]
fn diverse_groups_of_beams_equal_those_of_transformers_4() {
    agrees_with_transformers("groups.json");
}
