//! Attention alone: how fast decode reads K and V, and how fast prefill computes.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{AttentionShape, Backend, KvShape};
use pagedllm::batch::{Batch, Span};
use pagedllm::kv::blocks_for;
use pagedllm::options::KvDtype;
use serde_json::json;

use crate::Result;
use crate::line::{Line, skipped};
use crate::options::Options;
use crate::random::numbers;
use crate::timing::seconds;

const DECODE: &str = "decode attention";
const PREFILL: &str = "prefill attention";
/// Heads and KV heads of LLaMA-3-8B and of LLaMA-7B, all of the same width.
const HEADS: [(usize, usize); 2] = [(32, 8), (32, 32)];
const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 16;
/// More than any device keeps of what it has read.
const BEYOND_CACHES: u64 = 512 << 20;
const MOST_LAYERS: u64 = 256;
/// What a device must keep free, of all.
const SPARE: f64 = 0.1;
/// Written at a time.
const FILLED: usize = 2048;

type Kv = <CudaBackend as Backend>::Kv;
type Inputs = <CudaBackend as Backend>::Inputs;

fn shape_of(heads: usize, kv_heads: usize) -> AttentionShape {
    AttentionShape::new(heads, kv_heads, HEAD_DIM, 1.0 / (HEAD_DIM as f32).sqrt())
}

/// Sequences of equal length. Their blocks lie scattered among each other.
#[derive(Clone, Copy)]
struct Sequences {
    count: usize,
    tokens: usize,
}

impl Sequences {
    fn blocks_each(self) -> usize {
        blocks_for(self.tokens, BLOCK_SIZE)
    }

    fn blocks(self) -> usize {
        self.count * self.blocks_each()
    }

    fn block(self, sequence: usize, place: usize) -> u32 {
        // The step is a prime, and no count of blocks here has it as a factor: so no block comes twice.
        ((sequence * self.blocks_each() + place) * 7919 % self.blocks()) as u32
    }

    fn slot(self, sequence: usize, position: usize) -> u32 {
        self.block(sequence, position / BLOCK_SIZE) * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32
    }

    /// The last so many tokens of each.
    fn last(self, rows: usize) -> Batch {
        let mut batch = Batch::default();
        for sequence in 0..self.count {
            batch.spans.push(Span { first_row: batch.tokens.len() as u32, rows: rows as u32, table: batch.tables.len() as u32 });
            self.push(&mut batch, sequence, self.tokens - rows..self.tokens);
            batch.tables.extend((0..self.blocks_each()).map(|place| self.block(sequence, place)));
        }
        batch
    }

    fn push(self, batch: &mut Batch, sequence: usize, positions: std::ops::Range<usize>) {
        batch.tokens.extend(positions.clone().map(|_| 0));
        batch.slots.extend(positions.clone().map(|position| self.slot(sequence, position)));
        batch.positions.extend(positions.map(|position| position as u32));
    }

    /// What attention of the last rows has to multiply, twice: queries by keys, and probabilities by values.
    fn flops(self, rows: usize, shape: &AttentionShape) -> f64 {
        let pairs: usize = (self.tokens - rows..self.tokens).map(|position| position + 1).sum();
        4.0 * (self.count * pairs * shape.q_width()) as f64
    }
}

/// K and V of the sequences, in as many layers as it takes for the device to find none in its caches.
struct Cache {
    layers: Vec<Kv>,
    inputs: Inputs,
}

impl Cache {
    /// None: the device has no room for it.
    fn new(backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences, small: bool) -> Result<Option<Cache>> {
        let AttentionShape { kv_heads, head_dim, values, .. } = *shape;
        let kv = KvShape { blocks: sequences.blocks(), block_size: BLOCK_SIZE, kv_heads, head_dim, values, dtype: KvDtype::Bf16 };
        let bytes = backend.kv_block_bytes(&kv) * sequences.blocks() as u64;
        let wanted = if small { 2 } else { BEYOND_CACHES.div_ceil(bytes).min(MOST_LAYERS) };
        if backend.free_bytes()?.is_some_and(|free| (bytes * wanted) as f64 > free as f64 * (1.0 - SPARE)) {
            return Ok(None);
        }
        let layers: std::result::Result<_, _> = (0..wanted).map(|_| backend.kv(kv)).collect();
        let mut cache = Cache { layers: layers?, inputs: Inputs::default() };
        cache.fill(backend, shape, sequences)?;
        Ok(Some(cache))
    }

    fn fill(&mut self, backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences) -> Result<()> {
        let mut rows = backend.vector(&numbers(FILLED * shape.qkv_width()))?;
        for sequence in 0..sequences.count {
            for first in (0..sequences.tokens).step_by(FILLED) {
                let mut batch = Batch::default();
                sequences.push(&mut batch, sequence, first..(first + FILLED).min(sequences.tokens));
                backend.upload(&batch, &mut self.inputs)?;
                self.layers.iter_mut().for_each(|layer| backend.store_kv(&self.inputs, 0, shape, None, &mut rows, layer));
            }
        }
        Ok(())
    }

    /// Seconds of attention of each sequence's last rows, in one layer.
    fn seconds(&mut self, backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences, rows: usize) -> Result<f64> {
        backend.upload(&sequences.last(rows), &mut self.inputs)?;
        let qkv = backend.vector(&numbers(sequences.count * rows * shape.qkv_width()))?;
        let mut out = backend.buffer(sequences.count * rows * shape.out_width())?;
        seconds(backend, |call| {
            let layer = &self.layers[call % self.layers.len()];
            backend.attention(&self.inputs, 0, shape, None, &qkv, layer, &mut out);
        })
    }
}

/// None: the device has no room for it.
fn time(options: &Options, backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences, rows: usize) -> Result<Option<f64>> {
    backend.reserve(shape)?;
    let cache = Cache::new(backend, shape, sequences, options.small)?;
    cache.map(|mut cache| cache.seconds(backend, shape, sequences, rows)).transpose()
}

/// Bytes of K and V that are read a second.
pub fn decode(options: &Options) -> Result<()> {
    let backend = CudaBackend::new(0, false)?;
    for (heads, kv_heads) in HEADS {
        for &count in options.sizes(&[1, 16, 64, 256], &[1, 3]) {
            for &tokens in options.sizes(&[512, 4096, 32_768], &[200]) {
                let layer = shape_of(heads, kv_heads);
                let case = format!("{heads}/{kv_heads} heads, batch {count}, context {tokens}");
                let bytes = 2 * count * tokens * kv_heads * KvDtype::Bf16.head_bytes(HEAD_DIM);
                let shape = json!({"heads": heads, "kv_heads": kv_heads, "batch": count, "context": tokens, "bytes": bytes});
                match time(options, &backend, &layer, Sequences { count, tokens }, 1)? {
                    Some(seconds) => {
                        let (value, limit) = (bytes as f64 / seconds, options.ceilings.bandwidth);
                        Line { part: DECODE, case, shape, value, unit: "B/s", limit }.print();
                    }
                    None => skipped(DECODE, &case, &format!("the device has no room for {} MB of K and V", bytes / 1_000_000)),
                }
            }
        }
    }
    Ok(())
}

/// How much is computed a second for one sequence: of a whole prompt, and of the last part of a long one.
pub fn prefill(options: &Options) -> Result<()> {
    let whole = [512, 1024, 2048, 4096, 8192, 16_384].map(|tokens| (tokens, tokens));
    let parts = [(16_384, 512), (16_384, 2048)];
    let all = [&whole[..], &parts].concat();
    let backend = CudaBackend::new(0, false)?;
    for (heads, kv_heads) in HEADS {
        for &(tokens, rows) in options.sizes(&all, &[(100, 100), (100, 30)]) {
            let (layer, sequences) = (shape_of(heads, kv_heads), Sequences { count: 1, tokens });
            let what = if rows == tokens { format!("{tokens} tokens") } else { format!("{rows} tokens after {}", tokens - rows) };
            let case = format!("{heads}/{kv_heads} heads, {what}");
            let shape = json!({"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "tokens": tokens, "rows": rows});
            match time(options, &backend, &layer, sequences, rows)? {
                Some(seconds) => {
                    let (value, limit) = (sequences.flops(rows, &layer) / seconds, options.ceilings.flops);
                    Line { part: PREFILL, case, shape, value, unit: "FLOP/s", limit }.print();
                }
                None => skipped(PREFILL, &case, "the device has no room for it"),
            }
        }
    }
    Ok(())
}
