//! The CPU backend: packed weights, paged attention and a thread pool. Results do not depend on the
//! number of threads.

mod attention;
mod collectives;
mod elementwise;
mod host;
mod kv;
mod lanes;
mod matmul;
mod pool;
mod routes;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use attention::{AttentionScratch, Tile};
use collectives::Exchange;
use elementwise::{Activate, Add, Gate, Norm, NormHead, NormRow, ScaleAndCap, TurnHeads};
use host::Host;
use kv::Kv;
use lanes::Kernel;
pub(super) use matmul::{Int4Row, int8_row};
use matmul::{Machine, Matrix, PackedRows};
use pool::Pool;
use routes::Routes;

use super::{
    Act, Activation, Alloc, AttentionShape, BackendTypes, Collectives, ColumnPart, ExpertOf, Extent, Glu, Graphs, Heads, KvOps, KvShape,
    MatrixOf, MlpOf, NormOf, Ops, PackedSource, RotaryEmbedding, Routing, RowSource, Sampling, Section, Strips, WithBias, Workers,
};
use crate::error::{Error, Result};
use crate::sys::Numbers;
use crate::types::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::types::options::Isa;

/// Maximum number of rows that an MLP processes at once, which bounds its memory. The weights are
/// read again for each part. On two cores, the arithmetic of this many rows hides these reads: it
/// is as fast as all rows at once, and as 256 rows.
const MLP_ROWS: usize = 128;
/// Numbers per task of an elementwise op.
const FLAT: usize = 4096;

pub struct CpuBackend {
    isa: Isa,
    pool: Pool,
    scratch: Vec<Mutex<AttentionScratch>>, // [threads]
    packed: Mutex<PackedRows>,
    matmuls: AtomicU64,
    exchange: Exchange,
}

/// One-dimensional weights, and activations.
pub type Buf = Numbers<f32>;

/// A batch and the data that this backend derives from it once per step.
#[derive(Default)]
pub struct Inputs {
    batch: Batch,
    tiles: Vec<Tile>,
}

/// A pointer that the tasks of one kernel share; each writes its own part.
struct SendPtr<T>(*mut T);

impl<T> Clone for SendPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SendPtr<T> {}
// SAFETY: every use states why the parts that it accesses are disjoint.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: every use states why the parts that it accesses are disjoint.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

impl CpuBackend {
    pub fn new(threads: usize, isa: Option<Isa>) -> Result<CpuBackend> {
        CpuBackend::with_pool(isa, || Pool::new(threads))
    }

    /// Creates a backend with one thread per CPU in `cpus`. The first CPU is for the calling
    /// thread, which the caller pins itself.
    pub fn pinned(cpus: &[usize], isa: Option<Isa>) -> Result<CpuBackend> {
        CpuBackend::with_pool(isa, || Pool::pinned(cpus))
    }

    fn with_pool(isa: Option<Isa>, pool: impl FnOnce() -> Result<Pool>) -> Result<CpuBackend> {
        let isa = isa.unwrap_or_else(Isa::detect);
        if !isa.can_run() {
            return Err(Error::unsupported(format!(
                "isa is {}, which this machine does not support; give at most {}",
                isa.name(),
                Isa::detect().name()
            )));
        }
        let pool = pool()?;
        let scratch = (0..pool.threads()).map(|_| Mutex::new(AttentionScratch::empty())).collect();
        Ok(CpuBackend { isa, pool, scratch, packed: Mutex::default(), matmuls: AtomicU64::new(0), exchange: Exchange::default() })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Returns the number of matrix products so far. Tests use it to check batching: one product
    /// per weight and step, except that an MLP has one per `MLP_ROWS` rows.
    pub fn matmuls(&self) -> u64 {
        self.matmuls.load(Ordering::Relaxed)
    }

    fn kernel<K: Kernel>(&self, kernel: K) {
        // SAFETY: `new` rejects paths that the CPU does not support, and the kernels of
        // `elementwise` work on slices.
        unsafe { self.isa.run(kernel) }
    }

    fn packed(&self) -> MutexGuard<'_, PackedRows> {
        // The data is valid after a panic, because every product writes it anew.
        self.packed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn machine(&self) -> Machine<'_> {
        Machine { isa: self.isa, pool: &self.pool }
    }

    /// out[r] = w * x[r] + bias.
    fn linear(&self, rows: usize, x: &[f32], (w, bias): WithBias<Matrix, Buf>, out: &mut [f32]) {
        self.product(matmul::Strips { rows, count: 1, x, matrix: &|_| w, bias: bias.map(|bias| &bias[..]), out });
    }

    fn product(&self, strips: matmul::Strips) {
        self.matmuls.fetch_add(1, Ordering::Relaxed);
        matmul::product(self.machine(), &mut self.packed(), strips);
    }

    /// Calls `f(row, &mut out[row])` for each row of `width`, with rows distributed over the
    /// threads.
    fn rows(&self, rows: usize, width: usize, out: &mut Buf, f: impl Fn(usize, &mut [f32]) + Sync) {
        let out = &mut out[..rows * width];
        let out = SendPtr(out.as_mut_ptr());
        let per_task = (8192 / width.max(1)).clamp(1, rows.max(1)); // large enough to be worth waking a thread
        self.pool.run(rows.div_ceil(per_task), &|task, _| {
            for row in task * per_task..rows.min((task + 1) * per_task) {
                // SAFETY: rows are disjoint and inside `out`.
                f(row, unsafe { std::slice::from_raw_parts_mut(out.get().add(row * width), width) });
            }
        });
    }

    /// Calls `f(index, head)` for each head of each row.
    fn heads(&self, rows: usize, heads: Heads, x: &mut Buf, f: impl Fn(usize, &mut [f32]) + Sync) {
        self.rows(rows, heads.stride, x, |_, x| {
            let all = x[heads.first..][..heads.count * heads.dim].chunks_exact_mut(heads.dim);
            all.enumerate().for_each(|(index, head)| f(index, head));
        });
    }

    /// Calls `f(start, part)` for consecutive parts of `x[..len]`.
    fn flat(&self, len: usize, x: &mut Buf, f: impl Fn(usize, &mut [f32]) + Sync) {
        let x = &mut x[..len];
        let x = SendPtr(x.as_mut_ptr());
        self.pool.run(len.div_ceil(FLAT), &|task, _| {
            let start = task * FLAT;
            // SAFETY: parts are disjoint and inside `x`.
            f(start, unsafe { std::slice::from_raw_parts_mut(x.get().add(start), FLAT.min(len - start)) });
        });
    }
}

impl BackendTypes for CpuBackend {
    type Buf = Buf;
    type Matrix = Matrix;
    type Kv = Kv;
    type Inputs = Inputs;
    type Host = Host;
    type Routes = Routes;
    type Sampler = Infallible;
}

impl Alloc for CpuBackend {
    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn buffer(&self, len: usize) -> Result<Buf> {
        Numbers::zeroed(len)
    }

    fn vector(&self, values: &[f32]) -> Result<Buf> {
        let mut buf = self.buffer(values.len())?;
        buf.copy_from_slice(values);
        Ok(buf)
    }

    fn matrix(&self, cols: usize, sections: &[Section], source: RowSource) -> Result<Matrix> {
        Matrix::load(self.machine(), cols, sections, source)
    }

    fn matrix_bytes(&self, cols: usize, sections: &[Section]) -> u64 {
        Matrix::bytes(cols, sections)
    }

    fn stores_blocks(&self) -> bool {
        true
    }

    fn packed_bytes<'a>(&'a self, matrix: &'a Matrix) -> Result<&'a [u8]> {
        Ok(matrix.packed())
    }

    fn matrix_of_packed(&self, cols: usize, sections: &[Section], source: PackedSource) -> Result<Matrix> {
        Matrix::of_packed(&self.pool, cols, sections, source)
    }

    fn matrix_layout(&self) -> &'static str {
        Matrix::LAYOUT
    }

    fn reserve(&self, shape: &AttentionShape) -> Result<()> {
        self.scratch.iter().try_for_each(|scratch| scratch.lock().unwrap_or_else(|e| e.into_inner()).fit(shape))
    }

    fn reserved_bytes(&self, shape: &AttentionShape) -> u64 {
        AttentionScratch::bytes(shape)
    }

    fn reserve_rows(&self, rows: usize, cols: usize) -> Result<()> {
        self.packed().reserve(rows, cols)
    }

    fn reserved_rows_bytes(&self, rows: usize, cols: usize) -> u64 {
        PackedRows::bytes(rows, cols)
    }

    fn routes(&self, rows: usize, max: Routing) -> Result<Routes> {
        Routes::new(rows, max)
    }

    fn routes_bytes(&self, rows: usize, max: Routing) -> u64 {
        Routes::bytes(rows, max)
    }

    fn upload(&self, batch: &Batch, inputs: &mut Inputs) -> Result<Extent> {
        inputs.batch.copy_from(batch)?;
        attention::cut_tiles(batch, &mut inputs.tiles)?;
        Ok(Extent::for_batch(batch))
    }

    fn read<'a>(&'a self, buf: &'a mut Buf, len: usize) -> Result<&'a [f32]> {
        self.exchange.check()?;
        Ok(&buf[..len])
    }
}

impl KvOps for CpuBackend {
    fn kv(&self, shape: KvShape) -> Result<Kv> {
        Kv::new(shape)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        Kv::block_bytes(shape)
    }

    fn kv_part_bytes(&self, layer: &Kv) -> [usize; 2] {
        layer.part_bytes()
    }

    fn kv_layout(&self, layer: &Kv) -> String {
        layer.layout()
    }

    fn store_kv(
        &self,
        inputs: &Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<RotaryEmbedding<Buf>>,
        qkv: &mut Buf,
        kv: &mut Kv,
    ) {
        kv::store(self.machine(), kv::StoreArgs { inputs, group, shape, turn }, qkv, kv);
    }

    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Kv]) {
        kv::copy_blocks(&self.pool, copies, layers);
    }

    fn host(&self, blocks: usize, block_bytes: u64) -> Result<Host> {
        Host::new(blocks, block_bytes)
    }

    fn host_block<'a>(&self, host: &'a mut Host, block: usize) -> &'a mut [u8] {
        host.block(block)
    }

    fn swap_out(&self, moves: &[BlockMove], layers: &[Kv], host: &mut Host) -> Result<()> {
        host.swap_out(&self.pool, moves, layers);
        Ok(())
    }

    fn swap_in(&self, moves: &[BlockMove], host: &mut Host, layers: &mut [Kv]) -> Result<()> {
        host.swap_in(&self.pool, moves, layers);
        Ok(())
    }

    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Kv, out: &mut Vec<u8>) -> Result<()> {
        layer.read(blocks, tail, out)
    }

    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Kv, bytes: &'a [u8]) -> Result<&'a [u8]> {
        layer.write(blocks, bytes)
    }

    fn discard_blocks(&self, from: usize, layer: &mut Kv) -> Result<()> {
        layer.discard(from)
    }
}

impl Ops for CpuBackend {
    fn embed(&self, inputs: &Inputs, table: &Matrix, first: usize, scale: f32, out: &mut Buf) {
        let tokens = &inputs.batch.tokens;
        self.rows(tokens.len(), table.cols, out, |row, out| match (tokens[row] as usize).checked_sub(first) {
            Some(place) if place < table.rows => table.read_row(place, scale, out),
            _ => out.fill(0.0),
        });
    }

    fn add_positions(&self, inputs: &Inputs, table: &Matrix, offset: usize, x: &mut Buf) {
        let positions = &inputs.batch.positions;
        self.rows(positions.len(), table.cols, x, |row, x| table.add_row(positions[row] as usize + offset, x));
    }

    fn matmul(&self, rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, out: &mut Buf) {
        self.linear(rows, x, (w, bias), out);
    }

    fn mlp(&self, rows: usize, x: &Buf, mlp: MlpOf<Matrix, Buf>, wide: &mut Buf, narrow: &mut Buf, out: &mut Buf) {
        let MlpOf { up, activation, width, down } = mlp;
        let parts = rows.div_ceil(MLP_ROWS);
        for part in 0..parts {
            let (first, end) = (part * rows / parts, (part + 1) * rows / parts);
            let (rows, out) = (end - first, &mut out[first * down.0.rows..]);
            self.linear(rows, &x[first * up.0.cols..], up, wide);
            // Computing gates panel by panel inside the product's tasks was slower: it cost the
            // following tiles more than it saved.
            match activation {
                Activation::Plain(act) => {
                    self.activate(rows * width, act, wide);
                    self.linear(rows, wide, down, out);
                }
                Activation::Gated(glu) => {
                    self.gate(rows, width, glu, &[], wide, narrow);
                    self.linear(rows, narrow, down, out);
                }
            }
        }
    }

    fn mlp_rows(&self, rows: usize) -> usize {
        rows.min(MLP_ROWS)
    }

    fn add(&self, len: usize, scale: f32, x: &mut Buf, y: &Buf) {
        self.flat(len, x, |start, x| self.kernel(Add { scale, y: &y[start..][..x.len()], x }));
    }

    fn norm(&self, rows: usize, width: usize, norm: NormOf<Buf>, _readers: &[&Matrix], x: &Buf, out: &mut Buf) {
        let norm = Norm::new(norm, width);
        self.rows(rows, width, out, |row, out| self.kernel(NormRow { norm, x: &x[row * width..][..width], out }));
    }

    fn add_norm(
        &self,
        rows: usize,
        width: usize,
        scale: f32,
        y: &Buf,
        norm: NormOf<Buf>,
        _readers: &[&Matrix],
        x: &mut Buf,
        out: &mut Buf,
    ) {
        let norm = Norm::new(norm, width);
        let x = SendPtr(x[..rows * width].as_mut_ptr());
        self.rows(rows, width, out, |row, out| {
            // SAFETY: rows are disjoint and inside `x`, and each belongs to one task.
            let x = unsafe { std::slice::from_raw_parts_mut(x.get().add(row * width), width) };
            self.kernel(Add { scale, y: &y[row * width..][..width], x: &mut *x });
            self.kernel(NormRow { norm, x, out });
        });
    }

    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Buf>, x: &mut Buf) {
        let own = |index: usize, all: &'_ Buf| index * heads.dim % all.len();
        let NormOf { kind, eps, weight, bias } = norm;
        self.heads(rows, heads, x, |index, head| {
            let weight = &weight[own(index, weight)..][..heads.dim];
            let bias = bias.map(|bias| &bias[own(index, bias)..][..heads.dim]);
            self.kernel(NormHead { norm: Norm { kind, eps, weight, bias }, x: head });
        });
    }

    fn angles(&self, inputs: &Inputs, frequencies: &Buf, amplitude: f32, out: &mut Buf) {
        let positions = &inputs.batch.positions;
        self.rows(positions.len(), 2 * frequencies.len(), out, |row, out| {
            let (cos, sin) = out.split_at_mut(frequencies.len());
            for (i, frequency) in frequencies.iter().enumerate() {
                let angle = positions[row] as f32 * frequency;
                (cos[i], sin[i]) = (libm::cosf(angle) * amplitude, libm::sinf(angle) * amplitude);
            }
        });
    }

    fn rope(&self, rows: usize, heads: Heads, turn: RotaryEmbedding<Buf>, x: &mut Buf) {
        self.rows(rows, heads.stride, x, |row, x| {
            self.kernel(TurnHeads { heads: &mut x[heads.first..][..heads.count * heads.dim], dim: heads.dim, turn, row });
        });
    }

    fn attention(
        &self,
        inputs: &Inputs,
        group: usize,
        shape: &AttentionShape,
        sinks: Option<&Buf>,
        _readers: &[&Matrix],
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) {
        let groups = inputs.batch.groups();
        let args = attention::Args { inputs, group, groups, shape, sinks: sinks.map(|sinks| &sinks[..shape.heads]), qkv, kv };
        attention::attention(self.machine(), &self.scratch, args, out);
    }

    fn split_strips(&self, rows: usize, Strips { first, count, dim, pitch, stride }: Strips, x: &Buf, out: &mut Buf) {
        self.rows(count * rows, dim, out, |place, out| {
            let (strip, row) = (place / rows, place % rows);
            out.copy_from_slice(&x[row * stride + first + strip * pitch..][..dim]);
        });
    }

    fn join_strips(&self, rows: usize, Strips { first, count, dim, pitch, stride }: Strips, x: &Buf, out: &mut Buf) {
        self.rows(rows, stride, out, |row, out| {
            for strip in 0..count {
                out[first + strip * pitch..][..dim].copy_from_slice(&x[(strip * rows + row) * dim..][..dim]);
            }
        });
    }

    fn matmul_strips(&self, rows: usize, count: usize, x: &Buf, matrix: MatrixOf<Matrix>, out: &mut Buf) {
        self.product(matmul::Strips { rows, count, x, matrix, bias: None, out });
    }

    fn activate(&self, len: usize, act: Act, x: &mut Buf) {
        self.flat(len, x, |_, x| self.kernel(Activate { act, x }));
    }

    fn gate(&self, rows: usize, width: usize, glu: Glu, _readers: &[&Matrix], x: &Buf, out: &mut Buf) {
        self.rows(rows, width, out, |row, out| {
            let (gate, up) = x[row * 2 * width..][..2 * width].split_at(width);
            self.kernel(Gate { glu, gate, up, out });
        });
    }

    fn route(&self, rows: usize, routing: Routing, local: Range<usize>, correction: Option<&Buf>, logits: &Buf, routes: &mut Routes) {
        routes.choose(&self.pool, rows, routing, correction.map(|correction| &correction[..routing.experts]), logits);
        routes.limit_to(local);
    }

    fn gather_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        let (sources, local) = (routes.sources(), routes.local_routes());
        self.rows(sources.len(), width, out, |route, out| {
            if local.contains(&route) {
                out.copy_from_slice(&x[sources[route] as usize * width..][..width]);
            }
        });
    }

    fn matmul_routes(&self, routes: &Routes, x: &Buf, expert: ExpertOf<Matrix, Buf>, out: &mut Buf) {
        for (place, to) in routes.local().map(|place| (place, routes.to(place))).filter(|(_, to)| !to.is_empty()) {
            let (w, bias) = expert(place);
            self.linear(to.len(), &x[to.start * w.cols..], (w, bias), &mut out[to.start * w.rows..]);
        }
    }

    fn combine_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        self.rows(routes.rows(), width, out, |row, out| {
            out.fill(0.0);
            for (route, scale) in routes.for_row(row) {
                self.kernel(Add { scale, x: &mut *out, y: &x[route * width..][..width] });
            }
        });
    }

    fn add_gated(&self, rows: usize, width: usize, gates: &Buf, x: &mut Buf, y: &Buf) {
        self.rows(rows, width, x, |row, x| {
            let scale = 1.0 / (1.0 + libm::expf(-gates[row]));
            self.kernel(Add { scale, x, y: &y[row * width..][..width] });
        });
    }

    fn gather(&self, inputs: &Inputs, width: usize, x: &Buf, out: &mut Buf) {
        let wanted = &inputs.batch.logit_rows;
        self.rows(wanted.len(), width, out, |row, out| out.copy_from_slice(&x[wanted[row] as usize * width..][..width]));
    }

    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Buf) {
        self.flat(len, x, |_, x| self.kernel(ScaleAndCap { scale, soft_cap, x }));
    }
}

impl Sampling for CpuBackend {}

impl Graphs for CpuBackend {
    fn check(&self) -> Result<()> {
        self.exchange.check()
    }

    fn wait(&self) -> Result<()> {
        self.exchange.check()
    }

    fn is_lost(&self) -> bool {
        self.exchange.check().is_err()
    }
}

impl Collectives for CpuBackend {
    fn join(&mut self, workers: Workers) -> Result<()> {
        self.exchange = Exchange::new(workers);
        Ok(())
    }

    fn reserve_exchange(&self, len: usize) -> Result<()> {
        self.exchange.reserve(len)
    }

    fn reserved_exchange_bytes(&self, len: usize, ranks: usize) -> u64 {
        Exchange::reserved_bytes(len, ranks)
    }

    fn all_reduce(&self, len: usize, x: &mut Buf) {
        self.exchange.all_reduce(&mut x[..len]);
    }

    fn all_gather(&self, len: usize, x: &Buf, out: &mut Buf) {
        self.exchange.all_gather(&x[..len], out);
    }

    fn send(&self, len: usize, x: &Buf, to: usize) {
        self.exchange.send(&x[..len], to);
    }

    fn receive(&self, len: usize, x: &mut Buf, from: usize) {
        self.exchange.receive(&mut x[..len], from);
    }

    fn receive_columns(&self, rows: usize, width: usize, parts: &[ColumnPart], x: &mut Buf) {
        self.exchange.receive_columns(rows, width, parts, x);
    }
}
