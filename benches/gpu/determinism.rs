//! Properties that hold on a device as on a CPU. A repeated run has the same bits. In the mode
//! `batch_invariant` a sequence also has the same bits in any batch, after a swap, and after a
//! fork. If the device memory is exhausted, only the call that needs memory fails.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, BackendTypes};
use pagedllm::engine::{Engine, Fork, Prompt, Request};
use pagedllm::error::{Code, Error};
use pagedllm::types::SeqId;
use pagedllm::types::options::{EngineOptions, Preemption, SamplingParams};

use crate::Result;
use crate::line::verdict;
use crate::model::{self, Shape, VOCAB};
use crate::options::Options;

const PART: &str = "determinism";
const SMALL: Shape = Shape { name: "tiny", hidden: 128, inner: 64, layers: 1, heads: 2, kv_heads: 1, positions: 512 };
/// Sizes of the buffers that exhaust the device memory, in f32 numbers.
const BUFFER_SIZES: [usize; 3] = [256 << 20, 16 << 20, 1 << 20];

/// Tokens of a sequence, with the bits of their log probabilities.
type Answer = Vec<(u32, u32)>;
/// Tokens by sequence id.
type Answers = BTreeMap<SeqId, Answer>;

pub fn check(options: &Options) -> Result<()> {
    let shape = if options.small { &SMALL } else { &model::SHAPES[0] };
    let host = Host { dir: model::make(shape, &options.models)?, small: options.small };
    verdict(PART, "a repeated run has the same bits", host.repeated(false));
    verdict(PART, "a repeated run has the same bits, batch_invariant", host.repeated(true));
    verdict(PART, "same bits alone and in a batch, with any chunks", host.alone_and_in_a_batch());
    verdict(PART, "same bits after a swap", host.swapped());
    verdict(PART, "same bits after many forks", host.forked());
    verdict(PART, "an engine that is too large is refused", host.too_large());
    verdict(PART, "an engine runs while no device memory is free", host.without_free_memory());
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

    /// Returns the size, or a sixteenth of it with --small.
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

    fn alone_and_in_a_batch(&self) -> Result<()> {
        let together = answers(&self.options(true), self.requests())?;
        let chunked = EngineOptions { prefill_chunk: Some(self.size(100)), ..self.options(true) };
        for (request, expected) in self.requests().into_iter().zip(together.values()) {
            let alone = answers(&chunked, vec![request])?;
            same(alone.values(), std::iter::once(expected))?;
        }
        Ok(())
    }

    /// Compares with an engine whose pool holds a third of the sequences.
    fn swapped(&self) -> Result<()> {
        let requests = || (0..12).map(|seed| request(seed, self.size(200), self.size(200)));
        let large = self.options(true);
        let expected = answers(&large, requests().collect())?;
        let block_bytes = Engine::plan(&large)?.block_bytes;
        let all = 12 * self.size(400).div_ceil(large.block_size) as u64 * block_bytes;
        let small = EngineOptions {
            kv_bytes: Some(all / 3),
            max_model_len: Some(self.size(400) + large.block_size),
            swap_bytes: 2 * all,
            preemption: Preemption::Swap,
            ..large
        };
        let engine = Engine::create(&small)?;
        same(run(&engine, requests().collect())?.values(), expected.values())?;
        match engine.stats().blocks_swapped_in {
            0 => Err("no block was swapped".into()),
            _ => Ok(()),
        }
    }

    /// Forks all running sequences repeatedly. Each must continue like the first, which is the
    /// longest.
    fn forked(&self) -> Result<()> {
        let engine = Engine::create(&self.options(true))?;
        let mut running = vec![engine.add_request(request(1, self.size(333), self.size(96)))?.sequence(0)];
        let first = running[0];
        engine.step()?;
        let mut all = Answers::new();
        while running.len() < self.size(64) {
            engine.step()?;
            collect(&engine, &mut all)?;
            for parent in running.clone() {
                running.extend(engine.fork(parent, 1, &Fork::default())?);
            }
        }
        finish(&engine, &mut all)?;
        let longest = &all[&first];
        match all.values().find(|answer| !longest.ends_with(answer)) {
            Some(other) => {
                let tail = &longest[longest.len().saturating_sub(other.len())..];
                Err(format!("a fork differs from its parent: {}", difference(other, tail)).into())
            }
            None if all.len() < running.len() || engine.stats().blocks_copied == 0 => {
                Err(format!("{} of {} sequences have outputs", all.len(), running.len()).into())
            }
            None => Ok(()),
        }
    }

    fn too_large(&self) -> Result<()> {
        let expected = answers(&self.options(false), self.requests())?;
        let free = CudaBackend::new(0, false)?.free_bytes()?.ok_or("the device does not report its free memory")?;
        refused(Engine::create(&EngineOptions { kv_bytes: Some(2 * free), ..self.options(false) }))?;
        same(answers(&self.options(false), self.requests())?.values(), expected.values())
    }

    /// An engine runs while no device memory is free. Later another engine can be created.
    fn without_free_memory(&self) -> Result<()> {
        let engine = Engine::create(&self.options(false))?;
        let expected = run(&engine, self.requests())?; // afterwards it allocates nothing
        let other = CudaBackend::new(0, false)?;
        let taken = take_all(&other)?;
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

/// Runs requests that arrive together on a new engine.
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
        return Err(format!("{} sequences, expected {}", found.len(), expected.len()).into());
    }
    match found.zip(expected).find(|(found, expected)| found != expected) {
        Some((found, expected)) => Err(difference(found, expected).into()),
        None => Ok(()),
    }
}

/// Describes the first difference.
fn difference(found: &[(u32, u32)], expected: &[(u32, u32)]) -> String {
    let index = expected.iter().zip(found).position(|(expected, found)| expected != found);
    index.map_or(format!("{} tokens, expected {}", found.len(), expected.len()), |i| {
        let show = |(token, bits): (u32, u32)| format!("{token} ({})", f32::from_bits(bits));
        format!("token {i} is {}, expected {}", show(found[i]), show(expected[i]))
    })
}

fn refused(engine: std::result::Result<Engine, Error>) -> Result<()> {
    match engine {
        Err(error) if error.code() == Code::OutOfMemory => Ok(()),
        Err(error) => Err(format!("the engine was refused with a different error: {error}").into()),
        Ok(_) => Err("the engine got more memory than the device has".into()),
    }
}

fn take_all(backend: &CudaBackend) -> Result<Vec<<CudaBackend as BackendTypes>::Buf>> {
    let mut taken = Vec::new();
    for piece in BUFFER_SIZES {
        loop {
            match backend.buffer(piece) {
                Ok(buffer) => taken.push(buffer),
                Err(error) if error.code() == Code::OutOfMemory => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(taken)
}
