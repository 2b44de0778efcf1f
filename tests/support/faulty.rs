//! A CPU backend that fails at points which the test selects.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::{
    Act, Alloc, AttentionShape, BackendTypes, Collectives, ExpertOf, Extent, Glu, Graphs, Heads, KvOps, KvShape, MatrixOf, MlpOf, NormOf,
    Ops, PackedSource, RotaryEmbedding, Routing, RowSource, Sampling, Section, Strips, Workers,
};
use pagedllm::error::{Error, Result};
use pagedllm::types::batch::{Batch, BlockCopy, BlockMove, Tail};

use super::Random;

/// A token with which every step fails if `poisoned` is set.
pub const POISON: u32 = 126;

/// A kind of operation of the device, some of which fail.
#[derive(Default)]
pub struct Point {
    /// Number of calls so far.
    pub seen: AtomicU64,
    /// The call that fails, counted from 1. 0: none.
    pub fails_at: AtomicU64,
    /// If not 0: one in `one_in` calls fails.
    pub one_in: AtomicU64,
}

impl Point {
    /// Lets the call after `others` further ones fail, unless an earlier one is still to fail.
    pub fn fail_after(&self, others: u64) {
        let seen = self.seen.load(SeqCst);
        if self.fails_at.load(SeqCst) <= seen {
            self.fails_at.store(seen + 1 + others, SeqCst);
        }
    }

    fn fails(&self) -> bool {
        let call = self.seen.fetch_add(1, SeqCst) + 1;
        call == self.fails_at.load(SeqCst) || Random(call).next().checked_rem(self.one_in.load(SeqCst)) == Some(0)
    }
}

/// The faults of the device. As on a real device, nothing is computed after a fault until an
/// upload, a read of results or a transfer of blocks has reported it.
#[derive(Default)]
pub struct Faults {
    /// Allocations before the first step.
    pub makes: Point,
    /// Operations of steps, and of a pool that shrinks.
    pub ops: Point,
    /// Transfers of blocks to the host tier and back.
    pub swaps: Point,
    /// Transfers of blocks to an exported sequence, and from one.
    pub exports: Point,
    /// Every step with the token `POISON` fails.
    pub poisoned: AtomicBool,
    /// Every step fails.
    pub dead: AtomicBool,
    /// Every operation has a defect: it panics.
    pub panics: AtomicBool,
    /// A fault that has not been reported.
    broken: AtomicBool,
    pub reported: AtomicU64,
}

impl Faults {
    /// Returns whether an operation is computed.
    fn op(&self) -> bool {
        assert!(!self.panics.load(SeqCst), "a planned defect");
        if self.ops.fails() || self.dead.load(SeqCst) {
            self.broken.store(true, SeqCst);
        }
        !self.broken.load(SeqCst)
    }

    fn report(&self) -> Result<()> {
        match self.broken.swap(false, SeqCst) {
            true => {
                self.reported.fetch_add(1, SeqCst);
                Err(Error::out_of_memory())
            }
            false => Ok(()),
        }
    }

    fn make(&self) -> Result<()> {
        if self.makes.fails() { Err(Error::out_of_memory()) } else { Ok(()) }
    }

    fn swap(&self) -> Result<()> {
        self.report()?;
        if self.swaps.fails() { Err(Error::io("the disk is full")) } else { Ok(()) }
    }

    fn export(&self) -> Result<()> {
        self.report()?;
        if self.exports.fails() { Err(Error::io("the device is lost")) } else { Ok(()) }
    }
}

pub struct Faulty {
    pub cpu: CpuBackend,
    pub faults: Arc<Faults>,
}

/// Operations that the CPU backend computes unless the device is broken.
macro_rules! ops {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)*) => {
        $(fn $name(&self, $($arg: $type),*) {
            if self.faults.op() {
                self.cpu.$name($($arg),*);
            }
        })*
    };
}

/// Allocations of the CPU backend, some of which fail.
macro_rules! makes {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $made:ty;)*) => {
        $(fn $name(&self, $($arg: $type),*) -> Result<$made> {
            self.faults.make()?;
            self.cpu.$name($($arg),*)
        })*
    };
}

/// Functions of the CPU backend that do not fail.
macro_rules! forwards {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $value:ty;)*) => {
        $(fn $name(&self, $($arg: $type),*) -> $value {
            self.cpu.$name($($arg),*)
        })*
    };
}

type Buf = <CpuBackend as BackendTypes>::Buf;
type Matrix = <CpuBackend as BackendTypes>::Matrix;
type Kv = <CpuBackend as BackendTypes>::Kv;
type Inputs = <CpuBackend as BackendTypes>::Inputs;
type Host = <CpuBackend as BackendTypes>::Host;
type Routes = <CpuBackend as BackendTypes>::Routes;

impl BackendTypes for Faulty {
    type Buf = Buf;
    type Matrix = Matrix;
    type Kv = Kv;
    type Inputs = Inputs;
    type Host = Host;
    type Routes = Routes;
    type Sampler = Infallible;
}

impl Alloc for Faulty {
    makes! {
        fn buffer(len: usize) -> Buf;
        fn vector(values: &[f32]) -> Buf;
        fn matrix(cols: usize, sections: &[Section], source: RowSource) -> Matrix;
        fn matrix_of_packed(cols: usize, sections: &[Section], source: PackedSource) -> Matrix;
        fn reserve(shape: &AttentionShape) -> ();
        fn reserve_rows(rows: usize, cols: usize) -> ();
        fn routes(rows: usize, max: Routing) -> Routes;
    }

    forwards! {
        fn free_bytes() -> Result<Option<u64>>;
        fn matrix_bytes(cols: usize, sections: &[Section]) -> u64;
        fn stores_blocks() -> bool;
        fn matrix_layout() -> &'static str;
        fn reserved_bytes(shape: &AttentionShape) -> u64;
        fn reserved_rows_bytes(rows: usize, cols: usize) -> u64;
        fn routes_bytes(rows: usize, max: Routing) -> u64;
    }

    fn packed_bytes<'a>(&'a self, matrix: &'a Matrix) -> Result<&'a [u8]> {
        self.faults.make()?;
        self.cpu.packed_bytes(matrix)
    }

    fn upload(&self, batch: &Batch, inputs: &mut Inputs) -> Result<Extent> {
        self.faults.op();
        self.faults.report()?;
        self.faults.broken.store(self.faults.poisoned.load(SeqCst) && batch.tokens.contains(&POISON), SeqCst);
        self.cpu.upload(batch, inputs)
    }

    fn read<'a>(&'a self, buf: &'a mut Buf, len: usize) -> Result<&'a [f32]> {
        self.faults.op();
        self.faults.report()?;
        self.cpu.read(buf, len)
    }
}

impl KvOps for Faulty {
    makes! {
        fn kv(shape: KvShape) -> Kv;
        fn host(blocks: usize, block_bytes: u64) -> Host;
    }

    forwards! {
        fn kv_block_bytes(shape: &KvShape) -> u64;
        fn kv_layout(layer: &Kv) -> String;
        fn kv_part_bytes(layer: &Kv) -> [usize; 2];
    }

    ops! {
        fn store_kv(inputs: &Inputs, group: usize, shape: &AttentionShape, turn: Option<RotaryEmbedding<Buf>>, qkv: &mut Buf, kv: &mut Kv);
        fn copy_blocks(copies: &[BlockCopy], layers: &mut [Kv]);
    }

    fn host_block<'a>(&self, host: &'a mut Host, block: usize) -> &'a mut [u8] {
        self.cpu.host_block(host, block)
    }

    fn swap_out(&self, moves: &[BlockMove], layers: &[Kv], host: &mut Host) -> Result<()> {
        let result = self.faults.swap();
        // A transfer that fails has copied half of the blocks.
        let done = if result.is_ok() { moves.len() } else { moves.len() / 2 };
        self.cpu.swap_out(&moves[..done], layers, host)?;
        result
    }

    fn swap_in(&self, moves: &[BlockMove], host: &mut Host, layers: &mut [Kv]) -> Result<()> {
        let result = self.faults.swap();
        let done = if result.is_ok() { moves.len() } else { moves.len() / 2 };
        self.cpu.swap_in(&moves[..done], host, layers)?;
        result
    }

    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Kv, out: &mut Vec<u8>) -> Result<()> {
        self.faults.export()?;
        self.cpu.read_blocks(blocks, tail, layer, out)
    }

    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Kv, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let result = self.faults.export();
        // A transfer that fails has copied half of the blocks.
        let done = if result.is_ok() { blocks.len() } else { blocks.len() / 2 };
        let rest = self.cpu.write_blocks(&blocks[..done], layer, bytes)?;
        result.map(|()| rest)
    }

    fn discard_blocks(&self, from: usize, layer: &mut Kv) -> Result<()> {
        if self.faults.op() { self.cpu.discard_blocks(from, layer) } else { self.faults.report() }
    }
}

impl Ops for Faulty {
    forwards! {
        fn mlp_rows(rows: usize) -> usize;
    }

    ops! {
        fn embed(inputs: &Inputs, table: &Matrix, first: usize, scale: f32, out: &mut Buf);
        fn add_positions(inputs: &Inputs, table: &Matrix, offset: usize, x: &mut Buf);
        fn matmul(rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, out: &mut Buf);
        fn add(len: usize, scale: f32, x: &mut Buf, y: &Buf);
        fn mlp(rows: usize, x: &Buf, mlp: MlpOf<Matrix, Buf>, wide: &mut Buf, narrow: &mut Buf, out: &mut Buf);
        fn norm(rows: usize, width: usize, norm: NormOf<Buf>, readers: &[&Matrix], x: &Buf, out: &mut Buf);
        fn add_norm(rows: usize, width: usize, scale: f32, y: &Buf, norm: NormOf<Buf>, readers: &[&Matrix], x: &mut Buf, out: &mut Buf);
        fn norm_heads(rows: usize, heads: Heads, norm: NormOf<Buf>, x: &mut Buf);
        fn angles(inputs: &Inputs, frequencies: &Buf, amplitude: f32, out: &mut Buf);
        fn rope(rows: usize, heads: Heads, turn: RotaryEmbedding<Buf>, x: &mut Buf);
        fn attention(inputs: &Inputs, group: usize, shape: &AttentionShape, sinks: Option<&Buf>, readers: &[&Matrix], qkv: &Buf, kv: &Kv, out: &mut Buf);
        fn split_strips(rows: usize, strips: Strips, x: &Buf, out: &mut Buf);
        fn join_strips(rows: usize, strips: Strips, x: &Buf, out: &mut Buf);
        fn matmul_strips(rows: usize, count: usize, x: &Buf, matrix: MatrixOf<Matrix>, out: &mut Buf);
        fn activate(len: usize, act: Act, x: &mut Buf);
        fn gate(rows: usize, width: usize, glu: Glu, readers: &[&Matrix], x: &Buf, out: &mut Buf);
        fn route(rows: usize, routing: Routing, local: Range<usize>, correction: Option<&Buf>, logits: &Buf, routes: &mut Routes);
        fn gather_routes(routes: &Routes, width: usize, x: &Buf, out: &mut Buf);
        fn matmul_routes(routes: &Routes, x: &Buf, expert: ExpertOf<Matrix, Buf>, out: &mut Buf);
        fn combine_routes(routes: &Routes, width: usize, x: &Buf, out: &mut Buf);
        fn add_gated(rows: usize, width: usize, gates: &Buf, x: &mut Buf, y: &Buf);
        fn gather(inputs: &Inputs, width: usize, x: &Buf, out: &mut Buf);
        fn scale_and_cap(len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Buf);
    }
}

impl Sampling for Faulty {}

impl Collectives for Faulty {
    fn join(&mut self, _workers: Workers) -> Result<()> {
        Err(Error::unsupported("no other workers"))
    }
}

impl Graphs for Faulty {
    fn wait(&self) -> Result<()> {
        self.faults.op();
        self.faults.report()
    }
}
