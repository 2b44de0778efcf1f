//! The CUDA backend: kernels of `kernels/` that are launched in order on one stream. A second
//! stream copies sampling parameters to the device and tokens back.
//!
//! Activations are f32. Matrices, K and V have their storage types. An op only queues its kernel;
//! errors are reported when a batch is uploaded and when results are read (`device`).

mod ahead;
mod attention;
mod blas;
mod context;
mod device;
mod drawing;
mod fp8;
mod graphs;
mod inputs;
mod kernels;
mod kv;
mod matrix;
mod routes;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ahead::NextStep;
use blas::Blas;
use device::{Address, Device, Function, Memory, Pinned, Shape, launch};
use drawing::DeviceSampler;
use graphs::CapturedGraphs;
use inputs::{InputRange, Inputs};
use kv::{Host, Kv, MoveList};
use matrix::{Matrix, Stored};
use routes::Routes;

use super::{
    Act, Alloc, AttentionShape, BackendTypes, BatchSize, ExpertOf, Extent, Glu, Graphs, Heads, InputLimits, KvOps, KvShape, MatrixOf,
    NormKind, NormOf, Ops, PackedSource, Pairs, RotaryEmbedding, Routing, RowSource, Sampling, Strips, Values,
};
use crate::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::error::{Error, Result};
use crate::options::{Dtype, WeightFormat};

/// The fatbin that build.rs compiled from `kernels/`. Empty if nvcc was missing.
static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

const WARP: usize = 32;
/// Threads per block of elementwise kernels.
const FLAT: u32 = 256;
/// Products of more rows use cuBLASLt.
const MANY_ROWS: usize = 64;

pub struct CudaBackend {
    /// For products of many rows. None: cuBLASLt is not available, and own kernels compute them.
    blas: Option<Blas>,
    device: Device,
    /// Batch-invariant mode: results do not depend on the batch, so neither product algorithms nor
    /// splits of sequences vary.
    invariant: bool,
    /// Query heads per KV head, for each kind of layer.
    heads_per_kv: Mutex<Vec<u32>>,
    /// Partial attention results of split sequences, before they are merged.
    partial: Mutex<Option<Memory>>,
    tables: Tables,
    steps: Mutex<Steps>,
    moves: Mutex<MoveList>,
}

/// The step in flight, and the captured graphs.
#[derive(Default)]
struct Steps {
    graphs: CapturedGraphs,
    ahead: NextStep,
}

/// f32 numbers on the device.
pub struct Buf {
    memory: Memory,
    len: usize,
    /// Pinned memory for reads.
    read: Option<Pinned>,
}

impl Buf {
    fn address(&self) -> Address {
        self.memory.address()
    }
}

/// Returns the address of a buffer, or null.
fn address_of(buf: Option<&Buf>) -> Address {
    buf.map_or(Address::NULL, Buf::address)
}

/// Device-side lists of addresses and sizes. A list is created at its first use, and again if its
/// contents change, because an address may be reused.
#[derive(Default)]
struct Tables(Mutex<HashMap<Key, Table>>);

struct Table {
    numbers: Vec<u64>,
    memory: Memory,
}

impl Tables {
    /// Returns the address of the list with this key.
    fn get(&self, device: &Device, key: Key, numbers: impl Iterator<Item = u64> + Clone) -> Result<Address> {
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = tables.get(&key).filter(|table| table.numbers.iter().copied().eq(numbers.clone())) {
            return Ok(table.memory.address());
        }
        let numbers: Vec<u64> = numbers.collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let memory = device.memory(bytes.len() as u64)?;
        device.write(&memory, 0, &bytes)?;
        let address = memory.address();
        tables.insert(key, Table { numbers, memory });
        Ok(address)
    }
}

/// The identity of a list, by the address of its first object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// Base addresses of the levels of the tier at this address.
    Bases(Address),
    /// Strides of the levels of the tier at this address.
    Strides(Address),
    /// Bytes per block of each level of the pool at this address.
    Levels(Address),
    Matrices(Address),
    Biases(Address),
    /// ALiBi slopes, by number of heads and bits of the factor.
    Slopes(usize, u32),
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Queued work may still use the memory that is freed next.
        let _ = self.device.wait();
    }
}

/// A tier of blocks, as `move_blocks` accesses it: lists with the base and the stride of each
/// level.
#[derive(Clone, Copy)]
struct Tier {
    bases: Address,
    strides: Address,
}

impl CudaBackend {
    /// Opens the device with this ordinal. `invariant`: a row has the same bits in every batch.
    pub fn new(ordinal: usize, invariant: bool) -> Result<CudaBackend> {
        if IMAGE.is_empty() {
            return Err(Error::unsupported(format!(
                "device is cuda:{ordinal}, but this library was built without CUDA kernels; \
                 build it with nvcc (make cuda-toolkit installs one), or set device to \"cpu\""
            )));
        }
        let device = Device::open(ordinal, IMAGE)?;
        let moves = Mutex::new(MoveList::new(&device)?);
        Ok(CudaBackend {
            blas: if invariant { None } else { Blas::open(&device) },
            invariant,
            device,
            heads_per_kv: Mutex::default(),
            partial: Mutex::default(),
            tables: Tables::default(),
            steps: Mutex::default(),
            moves,
        })
    }

    /// Returns the launch configuration of a kernel that distributes `count` numbers over its
    /// threads.
    fn flat(&self, count: usize) -> Shape {
        let blocks = count.div_ceil(FLAT as usize).min(32 * self.device.multiprocessors as usize);
        Shape::new((blocks as u32, 1, 1), FLAT)
    }

    fn partial(&self) -> MutexGuard<'_, Option<Memory>> {
        self.partial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads ranges of the first `len` numbers of a buffer; each range comes with its offset on the
    /// device. Without ranges, it does not wait. The pinned memory has the size of the reads,
    /// because most buffers are never read completely.
    fn read_runs<'a>(&self, buf: &'a mut Buf, len: usize, runs: impl Iterator<Item = (Range<usize>, usize)>) -> Result<&'a [f32]> {
        const BYTES: usize = size_of::<f32>();
        if len > buf.len {
            return Err(Error::internal(format!("read of {len} numbers from a buffer of {}", buf.len)));
        }
        let pinned = match &mut buf.read {
            Some(pinned) if pinned.bytes().len() >= len * BYTES => pinned,
            read => read.insert(self.device.pinned(len * BYTES, "lower max_seqs")?),
        };
        let mut runs = runs.map(|(run, from)| (run.start * BYTES..run.end * BYTES, from * BYTES)).peekable();
        match runs.peek() {
            None => self.device.check()?,
            // SAFETY: `len` is at most `buf.len`, and the offsets are rows of the same buffer.
            Some(_) => unsafe { self.device.read(buf.memory.address(), pinned.bytes_mut(), runs)? },
        }
        // SAFETY: pinned memory is zeroed when it is allocated, page-aligned, and every bit pattern
        // is a valid float.
        Ok(unsafe { std::slice::from_raw_parts(pinned.bytes().as_ptr().cast(), len) })
    }

    fn heads_per_kv(&self) -> MutexGuard<'_, Vec<u32>> {
        self.heads_per_kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches products of rows in parts, each with its own matrix: `each` rows per part or, with
    /// `starts`, about `each`.
    fn product(&self, RowCounts { each, max, parts }: RowCounts, x: &Buf, first: &Matrix, lists: Lists, bias: Option<&Buf>, out: &mut Buf) {
        let (function, shape) = first.product(&self.device.kernels, each, max, parts);
        let Lists { matrices, biases, starts } = lists;
        let (rows, outs, cols) = (max as u32, first.rows as u32, first.cols as u32);
        let (x, w, bias, out) = (x.address(), first.address(), address_of(bias), out.address());
        launch!(self.device, function, shape, out, x, w, bias, matrices, biases, starts, rows, outs, cols);
    }

    /// Selects the kernel that reads a table from those for f32, f16 and bf16. If there is none,
    /// the next `check` reports an error.
    fn of_table(&self, table: &Matrix, kernels: [Function; 3]) -> Option<Function> {
        table.pick(kernels).map_err(|error| self.device.refuse(error)).ok()
    }

    /// Returns the address of a list. If it cannot be created, the next `check` reports the error,
    /// and nothing is launched before.
    fn list(&self, key: Key, numbers: impl Iterator<Item = u64> + Clone) -> Address {
        self.tables.get(&self.device, key, numbers).unwrap_or_else(|error| {
            self.device.refuse(error);
            Address::NULL
        })
    }

    /// Queues copies of blocks, with all levels of each.
    fn move_blocks(&self, mut moves: impl ExactSizeIterator<Item = (u32, u32)>, layers: &[Kv], from: Tier, to: Tier) -> Result<()> {
        let (device, Some(first)) = (&self.device, layers.first()) else { return Ok(()) };
        let bytes = self.tables.get(device, Key::Levels(first.address()), layers.iter().map(Kv::block_bytes))?;
        let mut list = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
        while moves.len() > 0 {
            let (count, moves) = list.send(device, &mut moves)?;
            let shape = Shape::new((count, layers.len() as u32, 1), FLAT);
            launch!(device, device.kernels.move_blocks, shape, to.bases, to.strides, from.bases, from.strides, bytes, moves);
        }
        Ok(())
    }

    fn pool(&self, layers: &[Kv]) -> Result<Tier> {
        let start = layers.first().map_or(Address::NULL, Kv::address);
        Ok(Tier {
            bases: self.tables.get(&self.device, Key::Bases(start), layers.iter().map(|kv| kv.address().0))?,
            strides: self.tables.get(&self.device, Key::Strides(start), layers.iter().map(Kv::block_bytes))?,
        })
    }

    /// Returns the tier of blocks that begins at a host address, with all levels of a block one
    /// after the other.
    fn host_tier(&self, start: Address, layers: &[Kv]) -> Result<Tier> {
        let all: u64 = layers.iter().map(Kv::block_bytes).sum();
        let next = |at: &mut u64, kv: &Kv| Some(std::mem::replace(at, *at + kv.block_bytes()));
        Ok(Tier {
            bases: self.tables.get(&self.device, Key::Bases(start), layers.iter().scan(start.0, next))?,
            strides: self.tables.get(&self.device, Key::Strides(start), layers.iter().map(|_| all))?,
        })
    }
}

/// Grows memory to at least `bytes`. Its contents are lost.
fn grow<'a>(device: &Device, memory: &'a mut Option<Memory>, bytes: u64) -> Result<&'a Memory> {
    if memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
        device.wait()?; // no queued work uses the memory that is freed
        *memory = None;
        *memory = Some(device.memory(bytes)?);
    }
    memory.as_ref().ok_or_else(Error::out_of_memory)
}

/// The rows of products in parts: the expected and the maximum number per part.
struct RowCounts {
    each: usize,
    max: usize,
    parts: usize,
}

impl RowCounts {
    fn alike(rows: usize, parts: usize) -> RowCounts {
        RowCounts { each: rows, max: rows, parts }
    }
}

/// The matrices and biases of a product in parts, and the first row of each part.
struct Lists {
    matrices: Address,
    biases: Address,
    starts: Address,
}

impl Lists {
    const NONE: Lists = Lists { matrices: Address::NULL, biases: Address::NULL, starts: Address::NULL };
}

fn act_number(act: Act) -> u32 {
    match act {
        Act::Relu => 0,
        Act::Silu => 1,
        Act::Gelu => 2,
        Act::GeluTanh => 3,
    }
}

fn norm_number(kind: NormKind) -> u32 {
    match kind {
        NormKind::Rms { unit_offset: false } => 0,
        NormKind::Rms { unit_offset: true } => 1,
        NormKind::Layer => 2,
    }
}

fn pairs_number(pairs: Pairs) -> u32 {
    match pairs {
        Pairs::Halves => 0,
        Pairs::Neighbours => 1,
    }
}

/// Returns one block of whole warps per row. The number of threads, and so the order of summation,
/// depends on the width only.
fn row_shape(rows: usize, width: usize) -> Shape {
    Shape::new((rows as u32, 1, 1), row_threads(width))
}

/// Returns one thread per number of rows of `width`.
fn grid_shape(rows: usize, width: usize) -> Shape {
    Shape::new((rows as u32, width.div_ceil(FLAT as usize) as u32, 1), FLAT)
}

fn row_threads(width: usize) -> u32 {
    width.next_multiple_of(WARP).clamp(WARP, 512) as u32
}

impl BackendTypes for CudaBackend {
    type Buf = Buf;
    type Matrix = Matrix;
    type Kv = Kv;
    type Inputs = Inputs;
    type Host = Host;
    type Routes = Routes;
    type Sampler = DeviceSampler;
}

impl Alloc for CudaBackend {
    fn free_bytes(&self) -> Result<Option<u64>> {
        self.device.free_bytes().map(Some)
    }

    fn buffer(&self, len: usize) -> Result<Buf> {
        let bytes = len.checked_mul(size_of::<f32>()).ok_or_else(Error::out_of_memory)?;
        Ok(Buf { memory: self.device.memory(bytes as u64)?, len, read: None })
    }

    fn vector(&self, values: &[f32]) -> Result<Buf> {
        let buf = self.buffer(values.len())?;
        // SAFETY: the slice covers the numbers, and is borrowed as long as they are.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        self.device.write(&buf.memory, 0, bytes)?;
        Ok(buf)
    }

    fn matrix(&self, rows: usize, cols: usize, dtype: Dtype, format: WeightFormat, source: RowSource) -> Result<Matrix> {
        Matrix::load(&self.device, rows, cols, dtype, format, source)
    }

    fn matrix_bytes(&self, rows: usize, cols: usize, format: WeightFormat) -> u64 {
        Matrix::bytes(rows, cols, format)
    }

    fn packed_bytes<'a>(&'a self, _matrix: &'a Matrix) -> Result<&'a [u8]> {
        Err(no_packing())
    }

    fn matrix_of_packed(&self, _rows: usize, _cols: usize, _format: WeightFormat, _source: PackedSource) -> Result<Matrix> {
        Err(no_packing())
    }

    fn matrix_layout(&self) -> &'static str {
        "cuda rows"
    }

    fn reserve(&self, shape: &AttentionShape) -> Result<()> {
        let mut kinds = self.heads_per_kv();
        let heads_per_kv = attention::heads_per_kv(shape);
        if !kinds.contains(&heads_per_kv) {
            kinds.push(heads_per_kv);
        }
        match self.invariant {
            true => Ok(()),
            false => grow(&self.device, &mut self.partial(), self.reserved_bytes(shape)).map(|_| ()),
        }
    }

    fn reserved_bytes(&self, shape: &AttentionShape) -> u64 {
        if self.invariant { 0 } else { attention::partial_bytes(&self.device, shape) }
    }

    fn reserve_rows(&self, rows: usize, cols: usize) -> Result<()> {
        self.blas.as_ref().map_or(Ok(()), |blas| blas.reserve(&self.device, rows, cols))
    }

    fn reserved_rows_bytes(&self, rows: usize, cols: usize) -> u64 {
        if self.blas.is_some() { Blas::bytes(rows, cols) } else { 0 }
    }

    fn routes(&self, rows: usize, max: Routing) -> Result<Routes> {
        Routes::new(&self.device, rows, max)
    }

    fn routes_bytes(&self, rows: usize, max: Routing) -> u64 {
        Routes::bytes(rows, max)
    }

    fn reserve_inputs(&self, limits: &InputLimits, inputs: &mut Inputs) -> Result<()> {
        self.steps().ahead.reserve(&limits.max)?;
        inputs.fit(&self.device, Inputs::bytes(limits.max, &limits.heads_per_kv)).map(|_| ())
    }

    fn reserved_inputs_bytes(&self, limits: &InputLimits) -> u64 {
        Inputs::bytes(limits.max, &limits.heads_per_kv) as u64
    }

    fn upload(&self, batch: &Batch, inputs: &mut Inputs) -> Result<Extent> {
        let mut steps = self.steps();
        let Steps { graphs, ahead } = &mut *steps;
        graphs.abandon(&self.device);
        let is_done = ahead.has(batch);
        self.device.check()?;
        let heads_per_kv = self.heads_per_kv();
        let mut kept = graphs.rows_for(batch);
        if inputs.fit(&self.device, Inputs::bytes_of(batch, kept, &heads_per_kv))? {
            graphs.clear();
            kept = None;
        }
        let extent = inputs.take(&self.device, batch, &heads_per_kv, kept)?;
        ahead.look_at(batch, inputs, kept)?;
        match kept {
            _ if is_done => graphs.pass_over(&self.device),
            Some(rows) => graphs.begin(&self.device, rows),
            None => {}
        }
        Ok(extent)
    }

    fn read<'a>(&'a self, buf: &'a mut Buf, len: usize) -> Result<&'a [f32]> {
        self.launch_step(); // callers of single ops may not have called it
        self.read_runs(buf, len, std::iter::once((0..len, 0)))
    }

    fn read_rows<'a>(&'a self, buf: &'a mut Buf, width: usize, rows: usize, runs: impl Iterator<Item = Range<usize>>) -> Result<&'a [f32]> {
        self.launch_step();
        let steps = self.steps();
        let numbers = |(rows, from): (Range<usize>, usize)| (rows.start * width..rows.end * width, from * width);
        self.read_runs(buf, rows * width, runs.flat_map(|run| steps.ahead.runs(run)).map(numbers))
    }
}

impl KvOps for CudaBackend {
    fn kv(&self, shape: KvShape) -> Result<Kv> {
        Kv::new(&self.device, shape)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv::block_bytes(shape)
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
        let KvShape { block_size, dtype, .. } = kv.shape;
        let own = shape.values == Values::Own;
        let (heads, halves) = (if own { shape.heads } else { 0 }, kv::halves(&kv.shape));
        let (angles, rotated, pairs) =
            turn.map_or((Address::NULL, 0, 0), |turn| (turn.angles.address(), turn.rotated as u32, pairs_number(turn.pairs)));
        let launched = Shape::new((inputs.rows, 1, 1), (WARP * (heads + halves * shape.kv_heads).clamp(1, 16)) as u32);
        launch!(
            self.device,
            self.device.kernels.store_kv(dtype),
            launched,
            kv.address(),
            qkv.address(),
            angles,
            inputs.address(inputs.slots),
            heads as u32,
            shape.kv_heads as u32,
            halves as u32,
            shape.head_dim as u32,
            rotated,
            pairs,
            block_size.ilog2(),
            inputs.groups,
            group as u32,
        );
    }

    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Kv]) {
        if copies.is_empty() {
            return;
        }
        let pairs = copies.iter().map(|&BlockCopy { from, to }| (from, to));
        let copied = self.pool(layers).and_then(|pool| self.move_blocks(pairs, layers, pool, pool));
        copied.unwrap_or_else(|error| self.device.refuse(error));
    }

    fn host(&self, blocks: usize, block_bytes: u64, dir: Option<&Path>) -> Result<Host> {
        Host::new(&self.device, blocks, block_bytes, dir)
    }

    fn swap_out(&self, moves: &[BlockMove], layers: &[Kv], host: &mut Host) -> Result<()> {
        host.take(moves, |moves, start| {
            let pairs = moves.iter().map(|&BlockMove { device, host }| (device, host));
            self.move_blocks(pairs, layers, self.pool(layers)?, self.host_tier(start, layers)?)?;
            self.device.wait()
        })
    }

    fn swap_in(&self, moves: &[BlockMove], host: &mut Host, layers: &mut [Kv]) -> Result<()> {
        host.give(moves, |moves, start| {
            let pairs = moves.iter().map(|&BlockMove { device, host }| (host, device));
            self.move_blocks(pairs, layers, self.host_tier(start, layers)?, self.pool(layers)?)?;
            self.device.wait()
        })
    }

    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Kv, out: &mut Vec<u8>) -> Result<()> {
        layer.read(&self.device, blocks, tail, out)
    }

    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Kv, bytes: &'a [u8]) -> Result<&'a [u8]> {
        layer.write(&self.device, blocks, bytes)
    }

    fn discard_blocks(&self, _from: usize, _layer: &mut Kv) -> Result<()> {
        Err(Error::unsupported("a CUDA device cannot release part of the KV pool"))
    }
}

impl Ops for CudaBackend {
    fn embed(&self, inputs: &Inputs, table: &Matrix, scale: f32, out: &mut Buf) {
        let kernels = &self.device.kernels;
        let Some(function) = self.of_table(table, [kernels.embed_f32, kernels.embed_f16, kernels.embed_bf16]) else { return };
        let (tokens, cols, pitch) = (inputs.address(inputs.tokens), table.cols as u32, table.pitch() as u32);
        let shape = grid_shape(inputs.rows as usize, table.cols);
        launch!(self.device, function, shape, out.address(), table.address(), tokens, cols, pitch, scale);
    }

    fn add_positions(&self, inputs: &Inputs, table: &Matrix, offset: usize, x: &mut Buf) {
        let kernels = &self.device.kernels;
        let functions = [kernels.add_positions_f32, kernels.add_positions_f16, kernels.add_positions_bf16];
        let Some(function) = self.of_table(table, functions) else { return };
        let (positions, cols, pitch) = (inputs.address(inputs.positions), table.cols as u32, table.pitch() as u32);
        let shape = grid_shape(inputs.rows as usize, table.cols);
        launch!(self.device, function, shape, x.address(), table.address(), positions, cols, pitch, offset as u32);
    }

    fn matmul(&self, rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, out: &mut Buf) {
        let product = blas::Product { rows, x: x.address(), w, bias: address_of(bias), out: out.address() };
        let many = rows > MANY_ROWS && w.stored != Stored::As(Dtype::F32);
        if !many || !self.blas.as_ref().is_some_and(|blas| blas.multiply(&self.device, product)) {
            self.product(RowCounts::alike(rows, 1), x, w, Lists::NONE, bias, out);
        }
    }

    fn add(&self, len: usize, scale: f32, x: &mut Buf, y: &Buf) {
        launch!(self.device, self.device.kernels.add, self.flat(len), x.address(), y.address(), len as u64, scale);
    }

    fn norm(&self, rows: usize, width: usize, norm: NormOf<Buf>, x: &Buf, out: &mut Buf) {
        let shape = row_shape(rows, width);
        let (weight, bias) = (norm.weight.address(), address_of(norm.bias));
        let (x, out, kind) = (x.address(), out.address(), norm_number(norm.kind));
        launch!(self.device, self.device.kernels.norm_rows, shape, out, x, weight, bias, width as u32, kind, norm.eps);
    }

    fn add_norm(&self, rows: usize, width: usize, scale: f32, y: &Buf, norm: NormOf<Buf>, x: &mut Buf, out: &mut Buf) {
        let shape = row_shape(rows, width);
        let (weight, bias) = (norm.weight.address(), address_of(norm.bias));
        let (x, y, out, kind) = (x.address(), y.address(), out.address(), norm_number(norm.kind));
        launch!(self.device, self.device.kernels.add_norm, shape, out, x, y, weight, bias, width as u32, kind, norm.eps, scale);
    }

    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Buf>, x: &mut Buf) {
        let Heads { first, count, dim, stride } = heads;
        let shape = Shape::new((rows as u32, count as u32, 1), row_threads(dim));
        let (weight, bias, own) = (norm.weight.address(), address_of(norm.bias), (norm.weight.len / dim) as u32);
        let (first, dim, stride, kind) = (first as u32, dim as u32, stride as u32, norm_number(norm.kind));
        launch!(self.device, self.device.kernels.norm_heads, shape, x.address(), weight, bias, first, dim, stride, own, kind, norm.eps);
    }

    fn angles(&self, inputs: &Inputs, frequencies: &Buf, amplitude: f32, out: &mut Buf) {
        let shape = row_shape(inputs.rows as usize, frequencies.len);
        let (positions, count) = (inputs.address(inputs.positions), frequencies.len as u32);
        launch!(self.device, self.device.kernels.angles, shape, out.address(), positions, frequencies.address(), count, amplitude);
    }

    fn rope(&self, rows: usize, heads: Heads, turn: RotaryEmbedding<Buf>, x: &mut Buf) {
        let shape = Shape::new((rows as u32, heads.count as u32, 1), WARP as u32);
        let (first, dim, stride) = (heads.first as u32, heads.dim as u32, heads.stride as u32);
        let (angles, rotated, pairs) = (turn.angles.address(), turn.rotated as u32, pairs_number(turn.pairs));
        launch!(self.device, self.device.kernels.rope, shape, x.address(), angles, first, dim, stride, rotated, pairs);
    }

    fn attention(&self, inputs: &Inputs, group: usize, shape: &AttentionShape, sinks: Option<&Buf>, qkv: &Buf, kv: &Kv, out: &mut Buf) {
        let slopes = shape.alibi.map_or(Address::NULL, |steepness| {
            let bits = |head: usize| u64::from((steepness * shape.slope(head.min(shape.heads - 1))).to_bits());
            // Two f32 per u64, the first in the low half.
            let pairs = (0..shape.heads.div_ceil(2)).map(|pair| bits(2 * pair) | bits(2 * pair + 1) << 32);
            self.list(Key::Slopes(shape.heads, steepness.to_bits()), pairs)
        });
        attention::Args { inputs, group, shape, slopes, sinks, qkv, kv, out }.run(&self.device, self.partial().as_ref());
    }

    fn split_strips(&self, rows: usize, strips: Strips, x: &Buf, out: &mut Buf) {
        let Strips { first, count, dim, pitch, stride } = strips;
        let shape = grid_shape(count * rows, dim);
        let [rows, first, dim, pitch, stride] = [rows, first, dim, pitch, stride].map(|number| number as u32);
        launch!(self.device, self.device.kernels.split_strips, shape, out.address(), x.address(), rows, first, dim, pitch, stride);
    }

    fn join_strips(&self, rows: usize, strips: Strips, x: &Buf, out: &mut Buf) {
        let Strips { first, count, dim, pitch, stride } = strips;
        let shape = grid_shape(count * rows, dim);
        let [rows, first, dim, pitch, stride] = [rows, first, dim, pitch, stride].map(|number| number as u32);
        launch!(self.device, self.device.kernels.join_strips, shape, out.address(), x.address(), rows, first, dim, pitch, stride);
    }

    fn matmul_strips(&self, rows: usize, count: usize, x: &Buf, matrix: MatrixOf<Matrix>, out: &mut Buf) {
        let first = matrix(0);
        let matrices = self.list(Key::Matrices(first.address()), (0..count).map(|strip| matrix(strip).address().0));
        self.product(RowCounts::alike(rows, count), x, first, Lists { matrices, ..Lists::NONE }, None, out);
    }

    fn activate(&self, len: usize, act: Act, x: &mut Buf) {
        launch!(self.device, self.device.kernels.activate, self.flat(len), x.address(), len as u64, act_number(act));
    }

    fn gate(&self, rows: usize, width: usize, glu: Glu, x: &Buf, out: &mut Buf) {
        let (shape, kernels) = (grid_shape(rows, width), &self.device.kernels);
        let (width, x, out) = (width as u32, x.address(), out.address());
        match glu {
            Glu::Of(act) => launch!(self.device, kernels.gate, shape, out, x, width, act_number(act)),
            Glu::Clamped { alpha, limit } => launch!(self.device, kernels.gate_clamped, shape, out, x, width, alpha, limit),
        }
    }

    fn route(&self, rows: usize, routing: Routing, correction: Option<&Buf>, logits: &Buf, routes: &mut Routes) {
        routes.choose(&self.device, rows, routing, address_of(correction), logits.address());
    }

    fn gather_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        let shape = row_shape(routes.len(), width);
        launch!(self.device, self.device.kernels.gather_routes, shape, out.address(), x.address(), routes.sources.address(), width as u32);
    }

    fn matmul_routes(&self, routes: &Routes, x: &Buf, expert: ExpertOf<Matrix, Buf>, out: &mut Buf) {
        let (first, bias) = expert(0);
        let matrices = self.list(Key::Matrices(first.address()), (0..routes.experts).map(|e| expert(e).0.address().0));
        let biases = bias
            .map_or(Address::NULL, |bias| self.list(Key::Biases(bias.address()), (0..routes.experts).map(|e| address_of(expert(e).1).0)));
        let lists = Lists { matrices, biases, starts: routes.starts.address() };
        // Each row chooses an expert at most once, so an expert has at most `routes.rows` rows.
        let rows = RowCounts { each: routes.len().div_ceil(routes.experts), max: routes.rows, parts: routes.experts };
        self.product(rows, x, first, lists, None, out);
    }

    fn combine_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        let shape = row_shape(routes.rows, width);
        let (places, weights, x, out) = (routes.places.address(), routes.weights.address(), x.address(), out.address());
        launch!(self.device, self.device.kernels.combine_routes, shape, out, x, places, weights, width as u32, routes.top_k as u32);
    }

    fn add_gated(&self, rows: usize, width: usize, gates: &Buf, x: &mut Buf, y: &Buf) {
        let shape = grid_shape(rows, width);
        let (x, y, gates) = (x.address(), y.address(), gates.address());
        launch!(self.device, self.device.kernels.add_gated, shape, x, y, gates, width as u32);
    }

    fn gather(&self, inputs: &Inputs, width: usize, x: &Buf, out: &mut Buf) {
        let InputRange { count, .. } = inputs.logit_rows;
        let (shape, wanted) = (grid_shape(count as usize, width), inputs.address(inputs.logit_rows));
        launch!(self.device, self.device.kernels.gather, shape, out.address(), x.address(), wanted, width as u32);
    }

    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Buf) {
        let cap = soft_cap.unwrap_or(0.0);
        launch!(self.device, self.device.kernels.scale_and_cap, self.flat(len), x.address(), len as u64, scale, cap);
    }
}

impl Sampling for CudaBackend {
    fn sampler(&self, limits: DeviceSamplingLimits) -> Result<Option<DeviceSampler>> {
        DeviceSampler::new(&self.device, limits).map(Some)
    }

    fn sampler_bytes(&self, limits: DeviceSamplingLimits) -> u64 {
        DeviceSampler::bytes(limits)
    }

    fn sample<'a>(
        &'a self,
        drawing: &'a mut DeviceSampler,
        vocab: usize,
        logits: &mut Buf,
        draws: &DeviceSampling,
    ) -> Result<&'a [DeviceSample]> {
        self.launch_step();
        let mut steps = self.steps();
        let Steps { graphs, ahead } = &mut *steps;
        let mut step_started = false;
        let prepare_next = |drawn| {
            if let Some(rows) = ahead.prepare_next(&self.device, draws.rows.len(), drawn) {
                graphs.play(&self.device, rows);
                step_started = true;
            }
        };
        let drawn = drawing.draw(&self.device, vocab, logits, draws, |row| ahead.row(row), prepare_next)?;
        if step_started {
            ahead.mark_launched(drawn);
        }
        Ok(drawn)
    }
}

impl Graphs for CudaBackend {
    /// Launches the captured graph if the step has one.
    fn launch_step(&self) {
        self.steps().graphs.end(&self.device);
    }

    fn capture(&self, max: &BatchSize, batch: &Batch, inputs: &mut Inputs) -> Result<Option<Extent>> {
        let mut steps = self.steps();
        steps.graphs.abandon(&self.device);
        self.device.check()?; // reports the errors of the last capture
        let Some(rows) = steps.graphs.next_rows(max) else { return self.device.wait().map(|()| None) };
        let extent = inputs.take(&self.device, batch, &self.heads_per_kv(), Some(rows))?;
        // The first cuBLASLt call for a number of rows may not be capturable.
        let is_new = rows > MANY_ROWS && self.blas.is_some();
        steps.graphs.begin_recording(&self.device, rows, is_new);
        Ok(Some(extent))
    }

    fn can_run_ahead(&self, rows: usize) -> bool {
        self.steps().graphs.has_rows_for(rows)
    }

    fn step_in_flight(&self) -> bool {
        self.steps().ahead.is_under_way()
    }

    fn cancel_in_flight(&self) {
        if self.steps().ahead.forget() {
            // Errors of the discarded step do not matter, unless the device is lost; in that case
            // every later call reports it.
            let _ = self.device.wait();
        }
    }

    fn is_lost(&self) -> bool {
        self.device.is_lost()
    }
}

fn no_packing() -> Error {
    Error::unsupported("packed_path is not supported on CUDA devices; leave it out")
}
