//! What must hold on a device as it does on a CPU: a run repeated has the same bits; in the mode `batch_invariant` also a sequence among
//! others, one that was swapped out and in, and one that was forked; and a device without memory ends nothing but what asked for it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pagedllm::backend::Backend;
use pagedllm::backend::cuda::CudaBackend;
use pagedllm::engine::{Engine, Fork, Prompt, Request};
use pagedllm::error::{Code, Error};
use pagedllm::options::{EngineOptions, Preemption, SamplingParams};

use crate::Result;
use crate::line::verdict;
use crate::model::{self, Shape, VOCAB};
use crate::options::Options;

const PART: &str = "determinism";
const SMALL: Shape = Shape { name: "tiny", hidden: 128, inner: 64, layers: 1, heads: 2, kv_heads: 1, positions: 512 };
/// Of the device's memory, that are taken until there is none; numbers of f32.
const PIECES: [usize; 3] = [256 << 20, 16 << 20, 1 << 20];

/// A sequence's tokens, with the bits of their log probabilities.
type Answer = Vec<(u32, u32)>;
/// By sequence.
type Answers = BTreeMap<u64, Answer>;

pub fn check(options: &Options) -> Result<()> {
    let shape = if options.small { &SMALL } else { &model::SHAPES[0] };
    let host = Host { dir: model::make(shape, &options.models)?, small: options.small };
    verdict(PART, "a run repeated has the same bits", host.repeated(false));
    verdict(PART, "a run repeated has the same bits, batch_invariant", host.repeated(true));
    verdict(PART, "alone as among others, whatever the chunks", host.alone_and_among_others());
    verdict(PART, "swapped out and in", host.swapped());
    verdict(PART, "a storm of forks", host.forked());
    verdict(PART, "more memory than there is", host.too_large());
    verdict(PART, "all memory taken meanwhile", host.starved());
    Ok(())
}

struct Host {
    dir: PathBuf,
    small: bool,
}

impl Host {
    fn options(&self, batch_invariant: bool) -> EngineOptions {
        EngineOptions {
            model_dir: self.dir.clone(),
            device: "cuda:0".into(),
            batch_invariant,
            kv_bytes: Some(self.size(512 << 20) as u64),
            skip_tokenizer: true,
            prefix_cache: false,
            ..Default::default()
        }
    }

    /// As many as there are, or so many that the kernels manage on the host.
    fn size(&self, size: usize) -> usize {
        if self.small { size.div_ceil(16) } else { size }
    }

    fn requests(&self) -> Vec<Request> {
        let prompts = [700, 16, 1, 300, 64, 900, 33, 128].into_iter().enumerate();
        prompts.map(|(seed, tokens)| request(seed, self.size(tokens), self.size(64))).collect()
    }

    fn repeated(&self, batch_invariant: bool) -> Result<()> {
        let options = self.options(batch_invariant);
        let [first, second] = [answers(&options, self.requests())?, answers(&options, self.requests())?];
        same(first.values(), second.values())
    }

    fn alone_and_among_others(&self) -> Result<()> {
        let together = answers(&self.options(true), self.requests())?;
        let chunked = EngineOptions { prefill_chunk: Some(self.size(100)), ..self.options(true) };
        for (request, among) in self.requests().into_iter().zip(together.values()) {
            let alone = answers(&chunked, vec![request])?;
            same(alone.values(), std::iter::once(among))?;
        }
        Ok(())
    }

    /// A pool that holds a third of them.
    fn swapped(&self) -> Result<()> {
        let requests = || (0..12).map(|seed| request(seed, self.size(200), self.size(200)));
        let roomy = self.options(true);
        let expected = answers(&roomy, requests().collect())?;
        let block_bytes = Engine::plan(&roomy)?.block_bytes;
        let all = 12 * self.size(400).div_ceil(roomy.block_size) as u64 * block_bytes;
        let tight = EngineOptions {
            kv_bytes: Some(all / 3),
            max_model_len: Some(self.size(400) + roomy.block_size),
            swap_bytes: 2 * all,
            preemption: Preemption::Swap,
            ..roomy
        };
        let engine = Engine::create(&tight)?;
        same(run(&engine, requests().collect())?.values(), expected.values())?;
        match engine.stats().blocks_swapped_in {
            0 => Err("nothing was swapped".into()),
            _ => Ok(()),
        }
    }

    /// All that run are forked, again and again: every one goes on as the first, which says the most.
    fn forked(&self) -> Result<()> {
        let engine = Engine::create(&self.options(true))?;
        let mut live = vec![engine.add_request(request(1, self.size(333), self.size(96)))?];
        let first = live[0];
        engine.step()?;
        let mut all = Answers::new();
        while live.len() < self.size(64) {
            engine.step()?;
            collect(&engine, &mut all)?;
            for parent in live.clone() {
                live.extend(engine.fork(parent, 1, &Fork::default())?);
            }
        }
        finish(&engine, &mut all)?;
        let said = &all[&first];
        match all.values().find(|answer| !said.ends_with(answer)) {
            Some(other) => {
                let same_place = &said[said.len().saturating_sub(other.len())..];
                Err(format!("a fork went another way than its parent: {}", difference(other, same_place)).into())
            }
            None if all.len() < live.len() || engine.stats().blocks_copied == 0 => {
                Err(format!("{} of {} answered", all.len(), live.len()).into())
            }
            None => Ok(()),
        }
    }

    fn too_large(&self) -> Result<()> {
        let expected = answers(&self.options(false), self.requests())?;
        let free = CudaBackend::new(0, false)?.free_bytes()?.ok_or("the device does not say how much memory is free")?;
        refused(Engine::create(&EngineOptions { kv_bytes: Some(2 * free), ..self.options(false) }))?;
        same(answers(&self.options(false), self.requests())?.values(), expected.values())
    }

    /// An engine goes on while there is nothing left, and another can be made when there is again.
    fn starved(&self) -> Result<()> {
        let engine = Engine::create(&self.options(false))?;
        let expected = run(&engine, self.requests())?; // it has all that it needs, from then on
        let hog = CudaBackend::new(0, false)?;
        let taken = take_all(&hog)?;
        refused(Engine::create(&self.options(false)))?;
        same(run(&engine, self.requests())?.values(), expected.values())?;
        drop((engine, taken));
        same(answers(&self.options(false), self.requests())?.values(), expected.values())
    }
}

fn request(seed: usize, tokens: usize, max_tokens: usize) -> Request {
    let prompt = (0..tokens).map(|i| ((i * 7919 + seed * 104_729) % VOCAB) as u32).collect();
    let sampling = SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, logprobs: Some(0), ..SamplingParams::greedy() };
    Request::new(Prompt::Tokens(prompt), sampling)
}

/// Of requests that come at once, to an engine of their own.
fn answers(options: &EngineOptions, requests: Vec<Request>) -> Result<Answers> {
    run(&Engine::create(options)?, requests)
}

fn run(engine: &Engine, requests: Vec<Request>) -> Result<Answers> {
    requests.into_iter().try_for_each(|request| engine.add_request(request).map(drop))?;
    let mut all = Answers::new();
    finish(engine, &mut all)?;
    Ok(all)
}

fn finish(engine: &Engine, all: &mut Answers) -> Result<()> {
    while engine.step()?.unfinished > 0 {
        collect(engine, all)?;
    }
    collect(engine, all)
}

fn collect(engine: &Engine, all: &mut Answers) -> Result<()> {
    for output in engine.queue().poll(Some(Default::default()))? {
        if let Some(error) = output.error {
            return Err(error.into());
        }
        let bits = output.logprobs.tokens.iter().map(|logprob| logprob.to_bits());
        all.entry(output.sequence).or_default().extend(output.tokens.iter().copied().zip(bits));
    }
    Ok(())
}

fn same<'a>(found: impl ExactSizeIterator<Item = &'a Answer>, expected: impl ExactSizeIterator<Item = &'a Answer>) -> Result<()> {
    if found.len() != expected.len() {
        return Err(format!("{} answers, not {}", found.len(), expected.len()).into());
    }
    match found.zip(expected).find(|(found, expected)| found != expected) {
        Some((found, expected)) => Err(difference(found, expected).into()),
        None => Ok(()),
    }
}

/// The first token that is not as it should be.
fn difference(found: &[(u32, u32)], expected: &[(u32, u32)]) -> String {
    let place = expected.iter().zip(found).position(|(expected, found)| expected != found);
    place.map_or(format!("{} tokens, not {}", found.len(), expected.len()), |i| {
        let show = |(token, bits): (u32, u32)| format!("{token} ({})", f32::from_bits(bits));
        format!("token {i} is {}, not {}", show(found[i]), show(expected[i]))
    })
}

fn refused(engine: std::result::Result<Engine, Error>) -> Result<()> {
    match engine {
        Err(error) if error.code() == Code::OutOfMemory => Ok(()),
        Err(error) => Err(format!("it was refused, but so: {error}").into()),
        Ok(_) => Err("the device gave more memory than it has".into()),
    }
}

fn take_all(hog: &CudaBackend) -> Result<Vec<<CudaBackend as Backend>::Buf>> {
    let mut taken = Vec::new();
    for piece in PIECES {
        loop {
            match hog.buffer(piece) {
                Ok(buffer) => taken.push(buffer),
                Err(error) if error.code() == Code::OutOfMemory => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(taken)
}
