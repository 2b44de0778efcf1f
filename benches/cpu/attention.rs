//! Attention of a decode step: all tokens of every sequence are visible, and each cached byte is
//! read once.

use std::time::Instant;

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::{Alloc, AttentionShape, BackendTypes, KvOps, KvShape, Ops, Values};
use pagedllm::types::batch::{Batch, Span};
use pagedllm::types::options::{KvDtype, WeightFormat};

use crate::common::median;
use crate::noise::NoiseMonitor;
use crate::{Options, Result, probes};

const BLOCK: usize = 16;
const HEADS: usize = 32;
const HEAD_DIM: usize = 64;
const CONTEXTS: [usize; 2] = [2048, 8192];
/// KV heads: shared by query heads, as in model M, or one per query head.
const KV_HEADS: [usize; 2] = [4, 32];
/// Tokens per KV head of all sequences together: 285 MB in int8, more than most caches hold.
const TOKENS: usize = 2 << 20;
/// Tokens per call of `store_kv`.
const PIECE: usize = 1024;

pub fn bench(options: &Options) -> Result<()> {
    let memory = probes::Memory::new(options.probe_bytes(), options.threads);
    let arithmetic = crate::best_without_noise(options, WeightFormat::F32);
    println!("{} threads, {}, f32 arithmetic {:.0} GFLOP/s; GB/s are cached bytes", options.threads, options.isa.name(), arithmetic / 1e9);
    println!(
        "| query heads per KV head | context | KV | GB/s | memory limit | arithmetic limit | share of the lower limit | visible tokens, M/s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for kv_heads in KV_HEADS {
        for context in CONTEXTS {
            for dtype in KvDtype::ALL {
                let tokens = if options.quick { context } else { TOKENS / kv_heads };
                let case = Case::new(
                    options,
                    KvShape { blocks: tokens / BLOCK, block_size: BLOCK, kv_heads, head_dim: HEAD_DIM, values: Values::Own, dtype },
                    context,
                )?;
                let before = memory.bandwidth();
                let (seconds, noisy) = case.measure(if options.quick { 1 } else { 5 * options.reps })?;
                let bandwidth = median(vec![before, memory.bandwidth()]);
                case.print(seconds, bandwidth, arithmetic, noisy);
            }
        }
    }
    Ok(())
}

/// Sequences of equal length that decode together.
struct Case {
    backend: CpuBackend,
    attention: AttentionShape,
    shape: KvShape,
    context: usize,
    kv: <CpuBackend as BackendTypes>::Kv,
    inputs: <CpuBackend as BackendTypes>::Inputs,
    rows: usize,
}

impl Case {
    fn new(options: &Options, shape: KvShape, context: usize) -> Result<Case> {
        let attention = AttentionShape::new(HEADS, shape.kv_heads, HEAD_DIM, 0.125);
        let backend = CpuBackend::new(options.threads, Some(options.isa))?;
        backend.reserve(&attention)?;
        let kv = backend.kv(shape)?;
        let rows = shape.blocks * BLOCK / context;
        let mut case = Case { backend, attention, shape, context, kv, inputs: Default::default(), rows };
        case.fill()?;
        case.backend.upload(&case.decode(), &mut case.inputs)?;
        Ok(case)
    }

    fn qkv(&self, rows: usize) -> Result<<CpuBackend as BackendTypes>::Buf> {
        let number = |i: usize| (i.wrapping_mul(0x9E37_79B9) >> 7) as u16 as f32 / 32768.0 - 1.0;
        Ok(self.backend.vector(&(0..rows * self.attention.qkv_width()).map(number).collect::<Vec<_>>())?)
    }

    /// Writes K and V into every slot.
    fn fill(&mut self) -> Result<()> {
        let mut qkv = self.qkv(PIECE)?;
        for first in (0..self.shape.blocks * BLOCK).step_by(PIECE) {
            let slots = (first as u32..(first + PIECE) as u32).collect();
            self.backend.upload(&Batch { tokens: vec![0; PIECE], slots, ..Default::default() }, &mut self.inputs)?;
            self.backend.store_kv(&self.inputs, 0, &self.attention, None, &mut qkv, &mut self.kv);
        }
        Ok(())
    }

    /// A decode step: one token per sequence. The blocks are scattered over the pool.
    fn decode(&self) -> Batch {
        let (rows, blocks) = (self.rows, self.shape.blocks);
        let table = |row: usize| (row * self.context / BLOCK) as u32;
        Batch {
            tokens: vec![0; rows],
            positions: vec![self.context as u32 - 1; rows],
            spans: (0..rows).map(|row| Span { first_token: row as u32, tokens: 1, table: table(row) }).collect(),
            // An odd factor permutes the indices of a power of two.
            tables: (0..blocks).map(|i| (i.wrapping_mul(0x2545_F491) % blocks) as u32).collect(),
            ..Default::default()
        }
    }

    /// Returns the minimum time of `passes`, and whether the measurement is noisy.
    fn measure(&self, passes: usize) -> Result<(f64, bool)> {
        let qkv = self.qkv(self.rows)?;
        let mut out = self.backend.buffer(self.rows * self.attention.q_width())?;
        let monitor = NoiseMonitor::start(None);
        let mut pass = || {
            let start = Instant::now();
            self.backend.attention(&self.inputs, 0, &self.attention, None, &[], &qkv, &self.kv, &mut out);
            start.elapsed().as_secs_f64()
        };
        pass(); // wakes the threads and touches the pages
        let seconds = (0..passes).map(|_| pass()).fold(f64::INFINITY, f64::min);
        Ok((seconds, monitor.stop(None).is_noisy()))
    }

    fn print(&self, seconds: f64, bandwidth: f64, arithmetic: f64, noisy: bool) {
        let tokens = (self.rows * self.context) as f64;
        let bytes = tokens * (2 * self.shape.kv_heads * self.shape.dtype.head_bytes(HEAD_DIM)) as f64;
        let computed = bytes / (tokens * (4 * HEADS * HEAD_DIM) as f64 / arithmetic); // scores and values, two operations each
        let rate = bytes / seconds;
        println!(
            "| {} | {} | {} | {:.1} | {:.1} | {:.1} | {:.0} % | {:.1} |{}",
            HEADS / self.shape.kv_heads,
            self.context,
            self.shape.dtype.name(),
            rate / 1e9,
            bandwidth / 1e9,
            computed / 1e9,
            100.0 * rate / bandwidth.min(computed),
            tokens / seconds / 1e6,
            if noisy { " noisy" } else { "" }
        );
    }
}
