//! Attention: the rate at which decode reads K and V, and the rate at which prefill computes.

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, AttentionShape, BackendTypes, KvOps, KvShape, Ops, Values};
use pagedllm::kv::blocks_for;
use pagedllm::types::batch::{Batch, Span};
use pagedllm::types::options::KvDtype;
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
pub const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 16;
/// More bytes than the caches of any device hold.
const BEYOND_CACHES: u64 = 512 << 20;
const MAX_LAYERS: u64 = 256;
/// Share of the device memory that stays free.
const SPARE: f64 = 0.1;
/// Tokens per call of `store_kv`.
const CHUNK: usize = 2048;

type Kv = <CudaBackend as BackendTypes>::Kv;
type Inputs = <CudaBackend as BackendTypes>::Inputs;

pub fn attention_shape(heads: usize, kv_heads: usize) -> AttentionShape {
    AttentionShape::new(heads, kv_heads, HEAD_DIM, 1.0 / (HEAD_DIM as f32).sqrt())
}

/// Sequences, all but the last one of equal length. Their blocks are scattered over the pool.
#[derive(Clone, Copy)]
pub struct Sequences {
    count: usize,
    /// Length of each sequence but the last one.
    tokens: usize,
    /// Length of the last sequence.
    last: usize,
    /// Tokens of a block, a power of two.
    block_size: usize,
}

impl Sequences {
    pub fn equal(count: usize, tokens: usize) -> Sequences {
        Sequences { count, tokens, last: tokens, block_size: BLOCK_SIZE }
    }

    fn with_last(self, last: usize) -> Sequences {
        Sequences { last, ..self }
    }

    pub fn in_blocks_of(self, block_size: usize) -> Sequences {
        Sequences { block_size, ..self }
    }

    /// Bytes of K and V in bf16.
    pub fn bytes(self, kv_heads: usize) -> usize {
        2 * self.all_tokens() * kv_heads * KvDtype::Bf16.head_bytes(HEAD_DIM)
    }

    fn tokens_of(self, sequence: usize) -> usize {
        if sequence + 1 == self.count { self.last } else { self.tokens }
    }

    fn all_tokens(self) -> usize {
        (self.count - 1) * self.tokens + self.last
    }

    fn blocks_of(self, sequence: usize) -> usize {
        blocks_for(self.tokens_of(sequence), self.block_size)
    }

    fn blocks(self) -> usize {
        (0..self.count).map(|sequence| self.blocks_of(sequence)).sum()
    }

    fn block(self, sequence: usize, index: usize) -> u32 {
        // 7919 is a prime that divides no number of blocks here, so no block occurs twice.
        ((sequence * blocks_for(self.tokens, self.block_size) + index) * 7919 % self.blocks()) as u32
    }

    fn slot(self, sequence: usize, position: usize) -> u32 {
        self.block(sequence, position / self.block_size) * self.block_size as u32 + (position % self.block_size) as u32
    }

    /// A batch of the last `rows` tokens of each sequence.
    fn batch(self, rows: usize) -> Batch {
        let mut batch = Batch::default();
        for sequence in 0..self.count {
            batch.spans.push(Span { first_token: batch.tokens.len() as u32, tokens: rows as u32, table: batch.tables.len() as u32 });
            self.push(&mut batch, sequence, self.tokens_of(sequence) - rows..self.tokens_of(sequence));
            batch.tables.extend((0..self.blocks_of(sequence)).map(|index| self.block(sequence, index)));
        }
        batch
    }

    fn push(self, batch: &mut Batch, sequence: usize, positions: std::ops::Range<usize>) {
        batch.tokens.extend(positions.clone().map(|_| 0));
        batch.slots.extend(positions.clone().map(|position| self.slot(sequence, position)));
        batch.positions.extend(positions.map(|position| position as u32));
    }

    /// Operations of attention for the last `rows` tokens: queries by keys, and probabilities by
    /// values.
    pub fn flops(self, rows: usize, shape: &AttentionShape) -> f64 {
        let pairs = |tokens: usize| -> usize { (tokens - rows..tokens).map(|position| position + 1).sum() };
        let all: usize = (0..self.count).map(|sequence| pairs(self.tokens_of(sequence))).sum();
        2.0 * (all * (shape.q_width() + shape.out_width())) as f64
    }
}

/// K and V of the sequences, in so many layers that the caches of the device do not hold them.
struct Cache {
    layers: Vec<Kv>,
    inputs: Inputs,
}

impl Cache {
    /// Returns None if the device has too little memory.
    fn new(backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences, small: bool) -> Result<Option<Cache>> {
        let AttentionShape { kv_heads, head_dim, values, .. } = *shape;
        let (blocks, block_size) = (sequences.blocks(), sequences.block_size);
        let kv = KvShape { blocks, block_size, kv_heads, head_dim, values, dtype: KvDtype::Bf16 };
        let bytes = backend.kv_block_bytes(&kv) * blocks as u64;
        let layers = if small { 2 } else { BEYOND_CACHES.div_ceil(bytes).min(MAX_LAYERS) };
        if backend.free_bytes()?.is_some_and(|free| (bytes * layers) as f64 > free as f64 * (1.0 - SPARE)) {
            return Ok(None);
        }
        let layers: std::result::Result<_, _> = (0..layers).map(|_| backend.kv(kv)).collect();
        let mut cache = Cache { layers: layers?, inputs: Inputs::default() };
        cache.fill(backend, shape, sequences)?;
        Ok(Some(cache))
    }

    fn fill(&mut self, backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences) -> Result<()> {
        let longest = sequences.tokens.max(sequences.last);
        let width = if shape.values == Values::Own { shape.qkv_width() } else { shape.kv_width() };
        let mut rows = backend.vector(&numbers(longest.min(CHUNK) * width))?;
        for sequence in 0..sequences.count {
            for first in (0..sequences.tokens_of(sequence)).step_by(CHUNK) {
                let mut batch = Batch::default();
                sequences.push(&mut batch, sequence, first..(first + CHUNK).min(sequences.tokens_of(sequence)));
                backend.upload(&batch, &mut self.inputs)?;
                self.layers.iter_mut().for_each(|layer| backend.store_kv(&self.inputs, 0, shape, None, &mut rows, layer));
            }
        }
        Ok(())
    }

    /// Seconds of attention for the last `rows` tokens of each sequence, in one layer.
    fn seconds(&mut self, backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences, rows: usize) -> Result<f64> {
        backend.upload(&sequences.batch(rows), &mut self.inputs)?;
        let qkv = backend.vector(&numbers(sequences.count * rows * shape.row_width()))?;
        let mut out = backend.buffer(sequences.count * rows * shape.out_width())?;
        seconds(backend, |call| {
            let layer = &self.layers[call % self.layers.len()];
            backend.attention(&self.inputs, 0, shape, None, &[], &qkv, layer, &mut out);
        })
    }
}

/// Returns the seconds of attention for the last `rows` tokens of each sequence. None: the device has
/// too little memory.
pub fn time(options: &Options, backend: &CudaBackend, shape: &AttentionShape, sequences: Sequences, rows: usize) -> Result<Option<f64>> {
    backend.reserve(shape)?;
    let cache = Cache::new(backend, shape, sequences, options.small)?;
    cache.map(|mut cache| cache.seconds(backend, shape, sequences, rows)).transpose()
}

/// Measures bytes of K and V read per second, for sequences of equal length and with a longer one.
pub fn decode(options: &Options) -> Result<()> {
    let equal = [1, 16, 64, 256].iter().flat_map(|&count| [512, 4096, 32_768].map(|tokens| Sequences::equal(count, tokens)));
    let mixed = [(32, 1024, 32_768), (64, 512, 8192)].map(|(count, tokens, last)| Sequences::equal(count, tokens).with_last(last));
    let all: Vec<Sequences> = equal.chain(mixed).collect();
    let small = [Sequences::equal(1, 200), Sequences::equal(3, 200).with_last(900)];
    let backend = CudaBackend::new(0, false)?;
    for (heads, kv_heads) in HEADS {
        for &sequences in options.sizes(&all, &small) {
            let Sequences { count, tokens, last, .. } = sequences;
            let layer = attention_shape(heads, kv_heads);
            let longest = if last == tokens { String::new() } else { format!(", one of {last}") };
            let case = format!("{heads}/{kv_heads} heads, batch {count}, context {tokens}{longest}");
            let bytes = sequences.bytes(kv_heads);
            let shape = json!({"heads": heads, "kv_heads": kv_heads, "batch": count, "context": tokens, "longest": last, "bytes": bytes});
            match time(options, &backend, &layer, sequences, 1)? {
                Some(seconds) => {
                    let (value, limit) = (bytes as f64 / seconds, options.ceilings.bandwidth);
                    Line { part: DECODE, case, shape, value, unit: "B/s", limit }.print();
                }
                None => skipped(DECODE, &case, &format!("the device has too little memory for {} MB of K and V", bytes / 1_000_000)),
            }
        }
    }
    Ok(())
}

/// Measures operations per second for one sequence: a whole prompt, and the last chunk of a long
/// prompt. The last lines are those of kernels for Hopper that copy boxes of K and V (TMA).
pub fn prefill(options: &Options) -> Result<()> {
    let whole = [512, 1024, 2048, 4096, 8192, 16_384].map(|tokens| (tokens, tokens));
    let parts = [(16_384, 512), (16_384, 2048)];
    let mut backend = CudaBackend::new(0, false)?;
    prefill_on(options, &backend, "", &[&whole[..], &parts].concat())?;
    let pool = KvShape { blocks: 1, block_size: BLOCK_SIZE, kv_heads: 1, head_dim: HEAD_DIM, values: Values::Own, dtype: KvDtype::Bf16 };
    if !backend.can_copy_boxes(&pool) {
        skipped(PREFILL, "boxes", "the device has no kernel that copies boxes");
        return Ok(());
    }
    backend.copy_boxes(true);
    prefill_on(options, &backend, ", boxes", &[whole[2], whole[4], whole[5], parts[0]])
}

/// Measures each pair of a sequence length and a number of last rows.
fn prefill_on(options: &Options, backend: &CudaBackend, copies: &str, lengths: &[(usize, usize)]) -> Result<()> {
    for (heads, kv_heads) in HEADS {
        for &(tokens, rows) in options.sizes(lengths, &[(100, 100), (150, 30)]) {
            let (layer, sequences) = (attention_shape(heads, kv_heads), Sequences::equal(1, tokens));
            let what = if rows == tokens { format!("{tokens} tokens") } else { format!("{rows} tokens after {}", tokens - rows) };
            let case = format!("{heads}/{kv_heads} heads, {what}{copies}");
            let shape = json!({"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "tokens": tokens, "rows": rows});
            match time(options, backend, &layer, sequences, rows)? {
                Some(seconds) => {
                    let (value, limit) = (sequences.flops(rows, &layer) / seconds, options.ceilings.flops);
                    Line { part: PREFILL, case, shape, value, unit: "FLOP/s", limit }.print();
                }
                None => skipped(PREFILL, &case, "the device has too little memory"),
            }
        }
    }
    Ok(())
}
