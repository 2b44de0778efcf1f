//! Blocks that samples and beams share, with the production scheduler and a hash as the model.
//!
//! Lengths are log-normal with the means of the two data sets of the PagedAttention paper. Which
//! beams survive depends on the model. The results of the paper, on OPT-13B, are printed for
//! comparison and are not a target.

use pagedllm::generation::beam::{BeamScratch, BeamSearch, BeamStep};
use pagedllm::generation::sampler::{Lane, log_softmax, uniform};
use pagedllm::kv::{BlockHash, BlockManager, Paging, blocks_for};
use pagedllm::scheduler::{Branching, NewGroup, SampledToken, Scheduler, SchedulerOptions, TokenOutcome};
use pagedllm::types::options::{BeamParams, Preemption};
use pagedllm::types::{RequestId, SeqId};

const BLOCK: usize = 16;
const REQUESTS: u64 = 48;
const VOCAB: usize = 64;
const MAX_LEN: usize = 2048;

struct Lengths {
    name: &'static str,
    prompt: f64,
    output: f64,
    /// Figure 15 of the paper: samples and beams, from 2 to 6, in percent.
    paper: [&'static str; 2],
}

const DATA: [Lengths; 2] = [
    Lengths { name: "Alpaca", prompt: 19.0, output: 58.0, paper: ["6.1 to 9.8", "37.6 to 55.2"] },
    Lengths { name: "ShareGPT", prompt: 161.0, output: 338.0, paper: ["16.2 to 30.5", "44.3 to 66.3"] },
];

pub fn print() {
    println!(
        "## Blocks saved by sharing\n\nShare of the blocks that sequences without sharing would use, over all steps; blocks of {BLOCK} tokens.\n"
    );
    println!("| lengths | decoding | 2 | 4 | 6 | the paper, 2 to 6 |\n| --- | --- | --- | --- | --- | --- |");
    for data in &DATA {
        for (kind, name) in ["samples", "beams"].into_iter().enumerate() {
            let saved = [2, 4, 6]
                .map(|n| format!("{:.1} %", 100.0 * saved(data, if kind == 0 { Branching::Samples(n) } else { Branching::Beams(n) })));
            println!("| {} | {name} | {} | {} %|", data.name, saved.join(" | "), data.paper[kind]);
        }
    }
    println!();
}

/// Returns a log-normal length with this mean and a standard deviation of 1 in the exponent.
fn length(mean: f64, seed: u64) -> usize {
    let (a, b) = (uniform(seed, 0, Lane::Token).max(1e-12), uniform(seed, 1, Lane::Token));
    let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    ((mean * (normal - 0.5).exp()) as usize).clamp(1, MAX_LEN / 2 - 1)
}

/// Returns the share of saved blocks. Requests run one after the other, because they share nothing
/// with each other.
fn saved(data: &Lengths, branching: Branching) -> f64 {
    let options = SchedulerOptions { max_batch_tokens: 4096, max_seqs: 256, prefill_chunk: 4096, preemption: Preemption::Recompute };
    let mut scheduler = Scheduler::new(options, BlockManager::new(100_000, Paging::without_windows(BLOCK), false).unwrap()).unwrap();
    let (mut shared, mut unshared) = (0, 0);
    for request in 1..=REQUESTS {
        let (prompt, output) = (length(data.prompt, 2 * request), length(data.output, 2 * request + 1));
        let prompt: Vec<u32> = (0..prompt).map(|i| (uniform(request, 10 + i as u64, Lane::Token) * VOCAB as f64) as u32).collect();
        let (id, max_len) = (RequestId::from_raw(request * 1000), prompt.len() + output);
        let arrival = NewGroup {
            prompt,
            max_len,
            branching,
            priority: 0,
            keep: false,
            logits_from: None,
            prompt_only: false,
            root: BlockHash::default(),
        };
        scheduler.add(id.sequence(0), arrival.prepare(&Paging::without_windows(BLOCK)).unwrap()).unwrap();
        match branching {
            Branching::Beams(width) => run(&mut scheduler, id, &mut Beams::new(width, output), &mut shared, &mut unshared),
            _ => run(&mut scheduler, id, &mut Samples(branching.max_members() as u32), &mut shared, &mut unshared),
        }
    }
    1.0 - shared as f64 / unshared as f64
}

/// Chooses the next tokens of all sampled sequences of a request.
trait Decide {
    fn decide(&mut self, scheduler: &Scheduler, id: RequestId, sampled: &[SeqId]) -> Vec<SampledToken>;
}

fn run(scheduler: &mut Scheduler, id: RequestId, decide: &mut dyn Decide, shared: &mut usize, unshared: &mut usize) {
    let mut events = Vec::new();
    while let Some(plan) = scheduler.schedule(|_| true) {
        let sampled: Vec<SeqId> = plan.sampled().map(|part| part.seq).collect();
        let choices = decide.decide(scheduler, id, &sampled);
        scheduler.commit(plan, &choices, &mut events);
        let members = id.sequences(6).filter_map(|seq| scheduler.get(seq).ok());
        *unshared += members.map(|sequence| blocks_for(sequence.computed, BLOCK)).sum::<usize>();
        *shared += scheduler.blocks().used_blocks();
    }
}

struct Samples(u32);

impl Decide for Samples {
    fn decide(&mut self, scheduler: &Scheduler, id: RequestId, sampled: &[SeqId]) -> Vec<SampledToken> {
        let parent = id.sequence(0);
        let first = sampled == [parent] && scheduler.get(parent).unwrap().generated == 0;
        let choose = |seq: SeqId, parent: SeqId| {
            let len = scheduler.get(parent).unwrap().tokens.len() as u64;
            SampledToken { parent, child: seq, outcome: TokenOutcome::Token((uniform(seq.get(), len, Lane::Token) * VOCAB as f64) as u32) }
        };
        match first {
            true => id.sequences(self.0).map(|seq| choose(seq, parent)).collect(),
            false => sampled.iter().map(|&seq| choose(seq, seq)).collect(),
        }
    }
}

struct Beams {
    search: BeamSearch,
    scratch: BeamScratch,
    step: BeamStep,
    rows: Vec<f32>,
}

impl Beams {
    fn new(width: usize, output: usize) -> Beams {
        let params = BeamParams { width: width as u32, ..Default::default() };
        let search = BeamSearch::new(&params, 1, &[], output).unwrap();
        Beams { search, scratch: BeamScratch::default(), step: BeamStep::default(), rows: vec![0.0; width * VOCAB] }
    }
}

impl Decide for Beams {
    fn decide(&mut self, scheduler: &Scheduler, id: RequestId, sampled: &[SeqId]) -> Vec<SampledToken> {
        for &seq in sampled {
            let tokens = &scheduler.get(seq).unwrap().tokens;
            let last = u64::from(tokens[tokens.len() - 1]) << 20 | u64::from(tokens[tokens.len().saturating_sub(2)]);
            // Peaked like a trained model: the best token has about a third of the probability.
            let logits: Vec<f32> =
                (0..VOCAB as u64).map(|token| -1.6 * (uniform(last, token, Lane::Token).max(1e-9) * 8.0).ln() as f32).collect();
            let slot = id.sample_of(seq).unwrap() as usize;
            log_softmax(&logits, &mut self.rows[slot * VOCAB..][..VOCAB]);
        }
        self.search.decide(&self.rows, &mut |_, _| Ok(()), &mut self.scratch, &mut self.step).unwrap();
        self.search.commit(&self.step).unwrap();
        let choice = |next: &pagedllm::generation::beam::Next| SampledToken {
            parent: id.sequence(next.parent as u32),
            child: id.sequence(next.slot as u32),
            outcome: TokenOutcome::Token(next.token),
        };
        self.step.next.iter().map(choice).collect()
    }
}
