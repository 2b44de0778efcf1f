//! Figure 18a: the attention kernel of the CPU with blocks, compared with contiguous K and V.

use std::time::Instant;

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::{Alloc, AttentionShape, BackendTypes, KvOps, KvShape, Ops, Values};
use pagedllm::types::batch::{Batch, Span};
use pagedllm::types::options::KvDtype;
use serde_json::{Value, json};

use crate::{Result, Scale, round};

/// Heads of OPT-13B.
const HEADS: usize = 40;
const HEAD_DIM: usize = 128;
const BATCHES: [usize; 2] = [8, 32];
const CONTEXTS: [usize; 3] = [64, 128, 256];
const BLOCK_SIZES: [usize; 6] = crate::blocks::SIZES;

/// One layer with sequences of equal length that decode together.
struct Case {
    backend: CpuBackend,
    attention: AttentionShape,
    kv: <CpuBackend as BackendTypes>::Kv,
    inputs: <CpuBackend as BackendTypes>::Inputs,
    qkv: <CpuBackend as BackendTypes>::Buf, // [rows, heads * 3 * head_dim]
    out: <CpuBackend as BackendTypes>::Buf, // [rows, heads * head_dim]
}

impl Case {
    /// The blocks lie in random places. Contiguous K and V are one block per sequence.
    fn new(rows: usize, context: usize, block_size: usize) -> Result<Case> {
        let per_sequence = context.div_ceil(block_size);
        let blocks = rows * per_sequence;
        let attention = AttentionShape::new(HEADS, HEADS, HEAD_DIM, 0.125);
        let backend = CpuBackend::new(std::thread::available_parallelism().map_or(1, usize::from), None)?;
        backend.reserve(&attention)?;
        let shape = KvShape { blocks, block_size, kv_heads: HEADS, head_dim: HEAD_DIM, values: Values::Own, dtype: KvDtype::Bf16 };
        let mut kv = backend.kv(shape)?;
        let mut inputs = Default::default();
        let slots = blocks * block_size;
        let number = |i: usize| (i.wrapping_mul(0x9E37_79B9) >> 7) as u16 as f32 / 32768.0 - 1.0;
        let vector = |rows: usize| backend.vector(&(0..rows * attention.qkv_width()).map(number).collect::<Vec<_>>());
        let mut filling = vector(slots.min(1024))?;
        for first in (0..slots).step_by(1024) {
            let end = slots.min(first + 1024);
            let tokens = vec![0; end - first];
            backend.upload(&Batch { tokens, slots: (first as u32..end as u32).collect(), ..Default::default() }, &mut inputs)?;
            backend.store_kv(&inputs, 0, &attention, None, &mut filling, &mut kv);
        }
        let mut tables: Vec<u32> = (0..blocks as u32).collect();
        for i in (1..blocks).rev() {
            tables.swap(i, crate::simulation::workload::mix(1, i as u64) as usize % (i + 1));
        }
        let span = |row: usize| Span { first_token: row as u32, tokens: 1, table: (row * per_sequence) as u32 };
        let decode = Batch {
            tokens: vec![0; rows],
            positions: vec![context as u32 - 1; rows],
            spans: (0..rows).map(span).collect(),
            tables,
            ..Default::default()
        };
        backend.upload(&decode, &mut inputs)?;
        let (qkv, out) = (vector(rows)?, backend.buffer(rows * attention.q_width())?);
        Ok(Case { backend, attention, kv, inputs, qkv, out })
    }

    /// Returns the time of one call in seconds.
    fn time(&mut self) -> f64 {
        let start = Instant::now();
        self.backend.attention(&self.inputs, 0, &self.attention, None, &[], &self.qkv, &self.kv, &mut self.out);
        start.elapsed().as_secs_f64()
    }
}

/// Returns the times of each block size relative to one block per sequence: the medians of pairs
/// that run one after the other.
pub fn relative_times(rows: usize, context: usize, sizes: &[usize], pairs: usize) -> Result<Vec<f64>> {
    let mut contiguous = Case::new(rows, context, context)?;
    sizes
        .iter()
        .map(|&size| {
            let mut paged = Case::new(rows, context, size)?;
            // Wakes the threads and touches the pages.
            paged.time();
            contiguous.time();
            let mut ratios: Vec<f64> = (0..pairs).map(|_| paged.time() / contiguous.time()).collect();
            ratios.sort_by(f64::total_cmp);
            Ok(ratios[pairs / 2])
        })
        .collect()
}

pub fn figure_18a(scale: &Scale) -> Result<Value> {
    let mut rows = Vec::new();
    for &batch in &BATCHES[..scale.of(2, 1)] {
        for &context in &CONTEXTS[..scale.of(3, 1)] {
            let sizes: Vec<usize> = BLOCK_SIZES.into_iter().filter(|&size| size <= context).collect();
            let ratios = relative_times(batch, context, &sizes, scale.of(401, 5))?;
            let ratios: Vec<[f64; 2]> = sizes.iter().zip(ratios).map(|(&size, ratio)| [size as f64, round(ratio)]).collect();
            rows.push(json!({ "batch": batch, "context": context, "ratios": ratios }));
        }
    }
    Ok(json!({ "heads": HEADS, "head_dim": HEAD_DIM, "kv_dtype": "bf16", "rows": rows }))
}
