//! The CUDA backend: kernels of `kernels/`, launched one after the other on one stream; another carries draws to the device, and tokens back.
//!
//! Activations are f32; matrices, and K and V, are what they are stored as. An op only queues its kernel: what goes wrong is told where a batch
//! comes and where results are read (`device`).

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

use ahead::Ahead;
use blas::Blas;
use device::{Address, Device, Function, Memory, Pinned, Shape, launch};
use drawing::Drawing;
use graphs::Graphs;
use inputs::{Inputs, Part};
use kv::{Host, Kv, MoveList};
use matrix::{Matrix, Stored};
use routes::Routes;

use super::{
    Act, AttentionShape, Backend, BatchSize, ExpertOf, Extent, Glu, Heads, InputLimits, KvShape, MatrixOf, NormKind, NormOf, PackedSource,
    Pairs, Routing, RowSource, Strips, Turn, Values,
};
use crate::batch::draws::{DrawLimits, Drawn, Draws};
use crate::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::error::{Error, Result};
use crate::options::{Dtype, WeightFormat};

/// What build.rs made of `kernels/`. Empty: there was no nvcc.
static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

const WARP: usize = 32;
/// Threads of a block that touches each number once.
const FLAT: u32 = 256;
/// Products of more rows than this are cuBLASLt's.
const MANY_ROWS: usize = 64;

pub struct CudaBackend {
    /// For products of many rows. None: the machine has none, and ours compute them.
    blas: Option<Blas>,
    device: Device,
    /// Nothing may depend on the batch: neither how a product is computed, nor how a sequence is cut.
    invariant: bool,
    /// How many heads share a KV head, of each kind of layer.
    heads_per_kv: Mutex<Vec<u32>>,
    /// What parts of a long sequence give, until they are merged.
    partial: Mutex<Option<Memory>>,
    tables: Tables,
    steps: Mutex<Steps>,
    moves: Mutex<MoveList>,
}

/// The step that is under way, and what is kept of others.
#[derive(Default)]
struct Steps {
    graphs: Graphs,
    ahead: Ahead,
}

/// f32 numbers on the device.
pub struct Buf {
    memory: Memory,
    len: usize,
    /// Where they come when they are read.
    read: Option<Pinned>,
}

impl Buf {
    fn address(&self) -> Address {
        self.memory.address()
    }
}

/// Where the bias is, or nowhere.
fn address_of(buf: Option<&Buf>) -> Address {
    buf.map_or(Address::NULL, Buf::address)
}

/// Lists of addresses and sizes that kernels read, made when they are first needed, and again where they have changed: an address may come to
/// stand for something else.
#[derive(Default)]
struct Tables(Mutex<HashMap<Key, Table>>);

struct Table {
    numbers: Vec<u64>,
    memory: Memory,
}

impl Tables {
    /// The list of that name, on the device.
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

/// What a list names, by the address of the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// Where levels begin in the tier that begins there.
    Bases(Address),
    /// How far blocks of each level are apart in it.
    Strides(Address),
    /// Bytes of each level of a block of the pool that begins there.
    Levels(Address),
    Matrices(Address),
    Biases(Address),
    /// Of ALiBi, for so many heads, and by how much in bits.
    Slopes(usize, u32),
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // What is given back next may still be in use.
        let _ = self.device.wait();
    }
}

/// A tier's blocks, as `move_blocks` finds them: where each level's begin, and how far they are apart.
#[derive(Clone, Copy)]
struct Tier {
    bases: Address,
    strides: Address,
}

impl CudaBackend {
    /// On the device of this number. `invariant`: a row has the same bits whatever the batch.
    pub fn new(ordinal: usize, invariant: bool) -> Result<CudaBackend> {
        if IMAGE.is_empty() {
            return Err(Error::unsupported(
                "device is a CUDA device and this library was built without one's kernels: build it where nvcc is (make cuda-toolkit brings one)",
            ));
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

    /// Launches a kernel whose threads share `count` numbers.
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

    /// Of the first numbers of a buffer these runs, each from some number on. Where there are none nobody waits. What is read is pinned, not the
    /// whole buffer: only its beginning may ever be.
    fn read_runs<'a>(&self, buf: &'a mut Buf, len: usize, runs: impl Iterator<Item = (Range<usize>, usize)>) -> Result<&'a [f32]> {
        const BYTES: usize = size_of::<f32>();
        if len > buf.len {
            return Err(Error::internal(format!("{len} numbers were to be read of {}", buf.len)));
        }
        let pinned = match &mut buf.read {
            Some(pinned) if pinned.bytes().len() >= len * BYTES => pinned,
            read => read.insert(self.device.pinned(len * BYTES, "lower max_seqs")?),
        };
        let mut runs = runs.map(|(run, from)| (run.start * BYTES..run.end * BYTES, from * BYTES)).peekable();
        match runs.peek() {
            None => self.device.check()?,
            // SAFETY: the buffer is so long.
            Some(_) => unsafe { self.device.read(buf.memory.address(), pinned.bytes_mut(), runs)? },
        }
        // SAFETY: pinned memory begins as zeros, aligned to a page, and every bit pattern is a float.
        Ok(unsafe { std::slice::from_raw_parts(pinned.bytes().as_ptr().cast(), len) })
    }

    fn heads_per_kv(&self) -> MutexGuard<'_, Vec<u32>> {
        self.heads_per_kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Products of rows that come in parts: `rows` in each or, where `starts` say how many, about so many.
    fn product(&self, Rows { each, most, parts }: Rows, x: &Buf, first: &Matrix, lists: Lists, bias: Option<&Buf>, out: &mut Buf) {
        let (function, shape) = first.product(&self.device.kernels, each, most, parts);
        let Lists { matrices, biases, starts } = lists;
        let (rows, outs, cols) = (most as u32, first.rows as u32, first.cols as u32);
        let (x, w, bias, out) = (x.address(), first.address(), address_of(bias), out.address());
        launch!(self.device, function, shape, out, x, w, bias, matrices, biases, starts, rows, outs, cols);
    }

    /// The one of three kernels that reads a table, of f32, f16, bf16. Where there is none the next `check` says so.
    fn of_table(&self, table: &Matrix, kernels: [Function; 3]) -> Option<Function> {
        table.pick(kernels).map_err(|error| self.device.refuse(error)).ok()
    }

    /// The list of some matrices' addresses. Where it cannot be made the next `check` says so, and nothing is launched meanwhile.
    fn list(&self, key: Key, numbers: impl Iterator<Item = u64> + Clone) -> Address {
        self.tables.get(&self.device, key, numbers).unwrap_or_else(|error| {
            self.device.refuse(error);
            Address::NULL
        })
    }

    /// Queues copies of blocks, all levels of each.
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

    /// Blocks that begin at an address of the host, in each of which all levels lie one after the other.
    fn host_tier(&self, start: Address, layers: &[Kv]) -> Result<Tier> {
        let all: u64 = layers.iter().map(Kv::block_bytes).sum();
        let next = |at: &mut u64, kv: &Kv| Some(std::mem::replace(at, *at + kv.block_bytes()));
        Ok(Tier {
            bases: self.tables.get(&self.device, Key::Bases(start), layers.iter().scan(start.0, next))?,
            strides: self.tables.get(&self.device, Key::Strides(start), layers.iter().map(|_| all))?,
        })
    }
}

/// Makes it at least so large. What was in it is gone.
fn grow<'a>(device: &Device, memory: &'a mut Option<Memory>, bytes: u64) -> Result<&'a Memory> {
    if memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
        device.wait()?; // nothing uses what is given back
        *memory = None;
        *memory = Some(device.memory(bytes)?);
    }
    memory.as_ref().ok_or_else(Error::out_of_memory)
}

/// The rows of products: about so many in each, and at most.
struct Rows {
    each: usize,
    most: usize,
    parts: usize,
}

impl Rows {
    fn alike(rows: usize, parts: usize) -> Rows {
        Rows { each: rows, most: rows, parts }
    }
}

/// The matrices of a product in parts, their biases, and where the rows of each begin.
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

/// A block of threads for each row, of whole warps. How many depends on the row's width alone, and so does the order of its sums.
fn row_shape(rows: usize, width: usize) -> Shape {
    Shape::new((rows as u32, 1, 1), row_threads(width))
}

/// A thread for each number of rows of `width`.
fn grid_shape(rows: usize, width: usize) -> Shape {
    Shape::new((rows as u32, width.div_ceil(FLAT as usize) as u32, 1), FLAT)
}

fn row_threads(width: usize) -> u32 {
    width.next_multiple_of(WARP).clamp(WARP, 512) as u32
}

impl Backend for CudaBackend {
    type Buf = Buf;
    type Matrix = Matrix;
    type Kv = Kv;
    type Inputs = Inputs;
    type Host = Host;
    type Routes = Routes;
    type Drawing = Drawing;

    fn buffer(&self, len: usize) -> Result<Buf> {
        let bytes = len.checked_mul(size_of::<f32>()).ok_or_else(Error::out_of_memory)?;
        Ok(Buf { memory: self.device.memory(bytes as u64)?, len, read: None })
    }

    fn vector(&self, values: &[f32]) -> Result<Buf> {
        let buf = self.buffer(values.len())?;
        // SAFETY: the bytes of the numbers, borrowed as long as these.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        self.device.write(&buf.memory, 0, bytes)?;
        Ok(buf)
    }

    fn matrix(&self, rows: usize, cols: usize, dtype: Dtype, format: WeightFormat, source: RowSource) -> Result<Matrix> {
        Matrix::load(&self.device, rows, cols, dtype, format, source)
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

    fn kv(&self, shape: KvShape) -> Result<Kv> {
        Kv::new(&self.device, shape)
    }

    fn matrix_bytes(&self, rows: usize, cols: usize, format: WeightFormat) -> u64 {
        Matrix::bytes(rows, cols, format)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv::block_bytes(shape)
    }

    fn is_lost(&self) -> bool {
        self.device.is_lost()
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.device.free_bytes().map(Some)
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

    fn routes(&self, rows: usize, most: Routing) -> Result<Routes> {
        Routes::new(&self.device, rows, most)
    }

    fn routes_bytes(&self, rows: usize, most: Routing) -> u64 {
        Routes::bytes(rows, most)
    }

    fn reserve_inputs(&self, limits: &InputLimits, inputs: &mut Inputs) -> Result<()> {
        self.steps().ahead.reserve(&limits.most)?;
        inputs.fit(&self.device, Inputs::bytes(limits.most, &limits.heads_per_kv)).map(|_| ())
    }

    fn reserved_inputs_bytes(&self, limits: &InputLimits) -> u64 {
        Inputs::bytes(limits.most, &limits.heads_per_kv) as u64
    }

    fn drawing(&self, limits: DrawLimits) -> Result<Option<Drawing>> {
        Drawing::new(&self.device, limits).map(Some)
    }

    fn drawing_bytes(&self, limits: DrawLimits) -> u64 {
        Drawing::bytes(limits)
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
            graphs.forget();
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

    /// If the step was recorded before, it is played.
    fn begin(&self) {
        self.steps().graphs.end(&self.device);
    }

    fn keep(&self, most: &BatchSize, batch: &Batch, inputs: &mut Inputs) -> Result<Option<Extent>> {
        let mut steps = self.steps();
        steps.graphs.abandon(&self.device);
        self.device.check()?; // how the last one went
        let Some(rows) = steps.graphs.next_rows(most) else { return self.device.wait().map(|()| None) };
        let extent = inputs.take(&self.device, batch, &self.heads_per_kv(), Some(rows))?;
        // What cuBLASLt does for the first time for so many rows may be nothing that can be recorded.
        let is_new = rows > MANY_ROWS && self.blas.is_some();
        steps.graphs.begin_recording(&self.device, rows, is_new);
        Ok(Some(extent))
    }

    fn works_ahead(&self, rows: usize) -> bool {
        self.steps().graphs.has_rows_for(rows)
    }

    fn is_ahead(&self) -> bool {
        self.steps().ahead.is_under_way()
    }

    fn forget_foreseen(&self) {
        if self.steps().ahead.forget() {
            // What went wrong in it concerns nobody, unless the device is lost; and then it says so again.
            let _ = self.device.wait();
        }
    }

    fn read<'a>(&'a self, buf: &'a mut Buf, len: usize) -> Result<&'a [f32]> {
        self.begin(); // whoever gave single ops may not have
        self.read_runs(buf, len, std::iter::once((0..len, 0)))
    }

    fn read_rows<'a>(&'a self, buf: &'a mut Buf, width: usize, rows: usize, runs: impl Iterator<Item = Range<usize>>) -> Result<&'a [f32]> {
        self.begin();
        let steps = self.steps();
        let numbers = |(rows, from): (Range<usize>, usize)| (rows.start * width..rows.end * width, from * width);
        self.read_runs(buf, rows * width, runs.flat_map(|run| steps.ahead.runs(run)).map(numbers))
    }

    fn draw<'a>(&'a self, drawing: &'a mut Drawing, vocab: usize, logits: &mut Buf, draws: &Draws) -> Result<&'a [Drawn]> {
        self.begin();
        let mut steps = self.steps();
        let Steps { graphs, ahead } = &mut *steps;
        let mut goes_on = false;
        let go_on = |drawn| {
            if let Some(rows) = ahead.go_on(&self.device, draws.draws.len(), drawn) {
                graphs.play(&self.device, rows);
                goes_on = true;
            }
        };
        let drawn = drawing.draw(&self.device, vocab, logits, draws, |row| ahead.row(row), go_on)?;
        if goes_on {
            ahead.went_on(drawn);
        }
        Ok(drawn)
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

    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Kv]) {
        if copies.is_empty() {
            return;
        }
        let pairs = copies.iter().map(|&BlockCopy { from, to }| (from, to));
        let copied = self.pool(layers).and_then(|pool| self.move_blocks(pairs, layers, pool, pool));
        copied.unwrap_or_else(|error| self.device.refuse(error));
    }

    fn discard_blocks(&self, _from: usize, _layer: &mut Kv) -> Result<()> {
        Err(Error::unsupported("a CUDA device does not take a part of the KV pool back"))
    }

    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Kv, out: &mut Vec<u8>) -> Result<()> {
        layer.read(&self.device, blocks, tail, out)
    }

    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Kv, bytes: &'a [u8]) -> Result<&'a [u8]> {
        layer.write(&self.device, blocks, bytes)
    }

    fn kv_layout(&self, layer: &Kv) -> String {
        layer.layout()
    }

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
            self.product(Rows::alike(rows, 1), x, w, Lists::NONE, bias, out);
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

    fn rope(&self, rows: usize, heads: Heads, turn: Turn<Buf>, x: &mut Buf) {
        let shape = Shape::new((rows as u32, heads.count as u32, 1), WARP as u32);
        let (first, dim, stride) = (heads.first as u32, heads.dim as u32, heads.stride as u32);
        let (angles, rotated, pairs) = (turn.angles.address(), turn.rotated as u32, pairs_number(turn.pairs));
        launch!(self.device, self.device.kernels.rope, shape, x.address(), angles, first, dim, stride, rotated, pairs);
    }

    fn store_kv(&self, inputs: &Inputs, group: usize, shape: &AttentionShape, turn: Option<Turn<Buf>>, qkv: &mut Buf, kv: &mut Kv) {
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

    fn attention(&self, inputs: &Inputs, group: usize, shape: &AttentionShape, sinks: Option<&Buf>, qkv: &Buf, kv: &Kv, out: &mut Buf) {
        let slopes = shape.alibi.map_or(Address::NULL, |steepness| {
            let bits = |head: usize| u64::from((steepness * shape.slope(head.min(shape.heads - 1))).to_bits());
            // Two to a number, the first in its low half.
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
        self.product(Rows::alike(rows, count), x, first, Lists { matrices, ..Lists::NONE }, None, out);
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
        // A row goes to an expert once.
        let rows = Rows { each: routes.len().div_ceil(routes.experts), most: routes.rows, parts: routes.experts };
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
        let Part { count, .. } = inputs.logit_rows;
        let (shape, wanted) = (grid_shape(count as usize, width), inputs.address(inputs.logit_rows));
        launch!(self.device, self.device.kernels.gather, shape, out.address(), x.address(), wanted, width as u32);
    }

    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Buf) {
        let cap = soft_cap.unwrap_or(0.0);
        launch!(self.device, self.device.kernels.scale_and_cap, self.flat(len), x.address(), len as u64, scale, cap);
    }
}

fn no_packing() -> Error {
    Error::unsupported("packed weights are kept for the CPU alone: leave packed_path out on a CUDA device")
}
