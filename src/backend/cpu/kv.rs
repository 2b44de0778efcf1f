//! The KV cache of one layer, in blocks.
//!
//! A block holds its heads one after the other. A head holds its numbers, then, in int8 and fp8,
//! one f32 scale per token. K is stored as `[dim][token]`, V as `[token][dim]`; `attention`
//! explains why. In bf16, two numbers that are summed consecutively are adjacent: K as `[dim /
//! 2][token][2]`, V as `[token / 2][dim][2]`. The K of a block is contiguous, and so is its V, so
//! blocks can be copied without knowledge of their contents.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::elementwise::TurnHeads;
use super::lanes::{Kernel, Lanes, ROUNDER, greatest_magnitude, load_some, load_some_words};
use super::matmul::Machine;
use super::pool::Pool;
use super::{Buf, Inputs, SendPtr};
use crate::backend::e4m3::E4m3;
use crate::backend::{AttentionShape, KvShape, RotaryEmbedding, Values};
use crate::error::{Error, Result};
use crate::sys::Pages;
use crate::types::batch::{BlockCopy, BlockMove, Tail};
use crate::types::options::KvDtype;

pub struct Kv {
    pub(super) shape: KvShape,
    k: Pages,
    v: Pages,
}

impl Kv {
    pub fn new(shape: KvShape) -> Result<Kv> {
        let [k, v] = halves(&shape).map(|bytes| bytes * shape.blocks);
        Ok(Kv { shape, k: Pages::partly_used(k)?, v: Pages::partly_used(v)? })
    }

    pub fn discard(&mut self, from: usize) -> Result<()> {
        let [k, v] = halves(&self.shape);
        self.k.discard(from * k).and(self.v.discard(from * v))
    }

    /// Appends K and then V of the blocks, with zeros for the unused slots of the tail.
    pub fn read(&self, blocks: &[u32], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        let [k, v] = halves(&self.shape);
        out.try_reserve((k + v) * blocks.len())?;
        for (pages, bytes, by_token) in [(&self.k, k, false), (&self.v, v, true)] {
            blocks.iter().for_each(|&block| out.extend_from_slice(&pages.bytes()[block as usize * bytes..][..bytes]));
            let newest = out.len() - bytes * tail.blocks.min(blocks.len());
            out[newest..].chunks_exact_mut(bytes.max(1)).for_each(|half| blank(&self.shape, by_token, tail.slots, half));
        }
        Ok(())
    }

    pub fn write<'a>(&mut self, blocks: &[u32], mut from: &'a [u8]) -> Result<&'a [u8]> {
        for (pages, bytes) in [&mut self.k, &mut self.v].into_iter().zip(halves(&self.shape)) {
            for &block in blocks {
                let (part, rest) =
                    from.split_at_checked(bytes).ok_or_else(|| Error::invalid("the exported sequence is truncated in its K and V"))?;
                pages.bytes_mut()[block as usize * bytes..][..bytes].copy_from_slice(part);
                from = rest;
            }
        }
        Ok(from)
    }

    /// Returns the bytes of a block of this layer.
    pub fn bytes(&self) -> usize {
        self.part_bytes().iter().sum()
    }

    /// Returns the bytes of K and of V of a block of this layer.
    pub fn part_bytes(&self) -> [usize; 2] {
        halves(&self.shape)
    }

    /// Copies K and then V of one block to `to`. Returns the rest of `to`.
    pub fn pack<'a>(&self, block: u32, mut to: &'a mut [u8]) -> &'a mut [u8] {
        for (pages, bytes) in [&self.k, &self.v].into_iter().zip(halves(&self.shape)) {
            let (part, rest) = to.split_at_mut(bytes);
            part.copy_from_slice(&pages.bytes()[block as usize * bytes..][..bytes]);
            to = rest;
        }
        to
    }

    /// Copies K and then V of one block from the beginning of `from`. Returns the rest of `from`.
    pub fn unpack<'a>(&mut self, block: u32, mut from: &'a [u8]) -> &'a [u8] {
        for (pages, bytes) in [&mut self.k, &mut self.v].into_iter().zip(halves(&self.shape)) {
            let (part, rest) = from.split_at(bytes);
            pages.bytes_mut()[block as usize * bytes..][..bytes].copy_from_slice(part);
            from = rest;
        }
        from
    }

    pub fn layout(&self) -> String {
        let KvShape { block_size, kv_heads, head_dim, dtype, .. } = self.shape;
        let name = dtype.name();
        match self.shape.values {
            Values::Own if in_pairs(&self.shape) => {
                let (pairs_of_dims, pairs_of_tokens) = (head_dim / 2, block_size / 2);
                format!("{name} k[{kv_heads},{pairs_of_dims},{block_size},2] v[{kv_heads},{pairs_of_tokens},{head_dim},2]")
            }
            Values::Own => format!("{name} k[{kv_heads},{head_dim},{block_size}] v[{kv_heads},{block_size},{head_dim}]"),
            Values::OfKeys(_) => format!("{name} kv[{kv_heads},{block_size},{head_dim}]"),
        }
    }

    pub fn block_bytes(shape: &KvShape) -> u64 {
        halves(shape).iter().sum::<usize>() as u64
    }

    /// Returns the addresses of K and V of one head of a block.
    pub fn head<E: Cached>(&self, block: usize, head: usize) -> [Head<E>; 2] {
        [&self.k, &self.v].map(|pages| Head::at(&self.shape, pages.bytes().as_ptr().cast_mut(), block, head))
    }
}

/// Returns the bytes of a block's K and of its V. With `Values::OfKeys`, the keys are stored in V.
fn halves(shape: &KvShape) -> [usize; 2] {
    let bytes = shape.block_size * shape.kv_heads * shape.dtype.head_bytes(shape.head_dim);
    [if shape.values == Values::Own { bytes } else { 0 }, bytes]
}

/// Returns true if the numbers are stored in pairs: bf16 with an even head_dim and separate values.
pub(super) fn in_pairs(shape: &KvShape) -> bool {
    shape.dtype == KvDtype::Bf16 && shape.values == Values::Own && shape.head_dim.is_multiple_of(2)
}

/// Calls a function that is generic over the element type, with the element type of the shape.
macro_rules! with_cached {
    ($shape:expr, $f:ident($($argument:expr),*)) => {
        match $shape.dtype {
            $crate::types::options::KvDtype::F32 => $f::<f32>($($argument),*),
            $crate::types::options::KvDtype::Bf16 if $crate::backend::cpu::kv::in_pairs($shape) => $f::<$crate::backend::cpu::kv::Paired>($($argument),*),
            $crate::types::options::KvDtype::Bf16 => $f::<half::bf16>($($argument),*),
            $crate::types::options::KvDtype::Int8 => $f::<i8>($($argument),*),
            $crate::types::options::KvDtype::F16 => $f::<half::f16>($($argument),*),
            $crate::types::options::KvDtype::Fp8 => $f::<$crate::backend::e4m3::E4m3>($($argument),*),
        }
    };
}
pub(super) use with_cached;

/// Clears the slots from `filled` on in a block's K, or in its V if `by_token`.
fn blank(shape: &KvShape, by_token: bool, filled: usize, half: &mut [u8]) {
    with_cached!(shape, blank_as(shape, by_token, filled, half));
}

fn blank_as<E: Cached>(shape: &KvShape, by_token: bool, filled: usize, half: &mut [u8]) {
    let KvShape { block_size, head_dim, dtype, .. } = *shape;
    for head in half.chunks_exact_mut(block_size * dtype.head_bytes(head_dim)) {
        let (numbers, scales) = head.split_at_mut(block_size * head_dim * size_of::<E>());
        for token in filled..block_size {
            for dim in 0..head_dim {
                let place = if by_token { E::value(token, dim, head_dim) } else { E::key(token, dim, block_size) };
                numbers[place * size_of::<E>()..][..size_of::<E>()].fill(0);
            }
        }
        let scale = scales.len() / block_size;
        scales[filled * scale..].fill(0);
    }
}

/// K or V of one head of one block.
#[derive(Clone, Copy)]
pub struct Head<E> {
    pub numbers: *mut E,  // laid out by `Cached::key` or `Cached::value`
    pub scales: *mut f32, // [block_size], valid only if the type has scales
}

impl<E: Cached> Head<E> {
    #[inline(always)]
    fn at(shape: &KvShape, pages: *mut u8, block: usize, head: usize) -> Head<E> {
        let KvShape { block_size, kv_heads, head_dim, dtype, .. } = *shape;
        let numbers = pages.wrapping_add((block * kv_heads + head) * block_size * dtype.head_bytes(head_dim)).cast::<E>();
        // Aligned for f32, because a block has a multiple of 8 tokens.
        Head { numbers, scales: numbers.wrapping_add(block_size * head_dim).cast() }
    }
}

/// An element type of the KV cache, and the position of its elements in a head of a block.
pub trait Cached: Copy + Send + Sync + 'static {
    /// Largest storable magnitude, for types whose numbers are multiples of a scale per head and
    /// token.
    const MAX: Option<f32> = None;
    const SCALED: bool = Self::MAX.is_some();
    /// Adjacent numbers of one sum: dimensions of K, or tokens of V.
    const DEPTH: usize = 1;
    /// Rounds to the nearest number of the type.
    fn nearest(x: f32) -> Self;
    /// Loads `count` (at most N) numbers that are `DEPTH` apart, the first of them at `p + k`.
    ///
    /// # Safety
    /// As for `Lanes`. The numbers exist, and N of them if `count` is N.
    unsafe fn load<L: Lanes>(p: *const Self, k: usize, count: usize) -> L::V;
    /// Returns the index of an element of K. `value` does the same for V.
    #[inline(always)]
    fn key(token: usize, dim: usize, block_size: usize) -> usize {
        (dim / Self::DEPTH * block_size + token) * Self::DEPTH + dim % Self::DEPTH
    }
    #[inline(always)]
    fn value(token: usize, dim: usize, head_dim: usize) -> usize {
        (token / Self::DEPTH * head_dim + dim) * Self::DEPTH + token % Self::DEPTH
    }
}

/// A bf16 number that is stored beside the next summand.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Paired(bf16);

impl Cached for Paired {
    const DEPTH: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Paired, k: usize, count: usize) -> L::V {
        // SAFETY: the caller upholds this function's contract. A block's numbers are page-aligned,
        // and pairs are aligned to their size.
        unsafe {
            let pairs = load_some_words::<L>(p.cast(), count);
            if k == 0 { L::low_bf16(pairs) } else { L::high_bf16(pairs) }
        }
    }
    #[inline(always)]
    fn nearest(x: f32) -> Paired {
        Paired(bf16::from_f32(x))
    }
}

/// Implements `load` for types with a DEPTH of 1.
macro_rules! load_alone {
    () => {
        #[inline(always)]
        unsafe fn load<L: Lanes>(p: *const Self, _k: usize, count: usize) -> L::V {
            // SAFETY: the caller upholds this function's contract.
            unsafe { load_some::<L, Self>(p, count) }
        }
    };
}

impl Cached for f32 {
    load_alone!();
    #[inline(always)]
    fn nearest(x: f32) -> f32 {
        x
    }
}

impl Cached for bf16 {
    load_alone!();
    #[inline(always)]
    fn nearest(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}

impl Cached for f16 {
    load_alone!();
    /// Saturates: an infinity would turn every result that depends on it into NaN.
    #[inline(always)]
    fn nearest(x: f32) -> f16 {
        const MAX: f32 = 65504.0;
        f16::from_f32(x.clamp(-MAX, MAX)) // propagates NaN
    }
}

impl Cached for E4m3 {
    const MAX: Option<f32> = Some(E4m3::MAX);
    load_alone!();
    #[inline(always)]
    fn nearest(x: f32) -> E4m3 {
        E4m3::nearest(x)
    }
}

impl Cached for i8 {
    const MAX: Option<f32> = Some(127.0);
    load_alone!();
    #[inline(always)]
    fn nearest(x: f32) -> i8 {
        (x + ROUNDER - ROUNDER) as i8 // NaN becomes 0
    }
}

/// Copies K and then V of these blocks of one layer from the host tier. `place` returns the layer's
/// bytes of a host block.
pub fn copy_from_host<'a>(pool: &Pool, moves: &[BlockMove], place: impl Fn(u32) -> &'a [u8] + Sync, layer: &mut Kv) {
    let (sizes, blocks) = (halves(&layer.shape), layer.shape.blocks);
    let pages = [SendPtr(layer.k.bytes_mut().as_mut_ptr()), SendPtr(layer.v.bytes_mut().as_mut_ptr())];
    pool.run(2 * moves.len(), &|task, _| {
        let (BlockMove { device, host }, half) = (moves[task / 2], task % 2);
        assert!((device as usize) < blocks, "a move to block {device} is outside the pool of {blocks} blocks");
        let (bytes, before) = (sizes[half], half * sizes[0]);
        let from = &place(host)[before..][..bytes];
        // SAFETY: the block is inside the pages, and each device block occurs at most once.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), pages[half].get().add(device as usize * bytes), bytes) };
    });
}

/// Copies whole blocks in every layer.
pub fn copy_blocks(pool: &Pool, copies: &[BlockCopy], layers: &mut [Kv]) {
    for Kv { shape, k, v } in layers {
        let sizes = halves(shape);
        let pages = [SendPtr(k.bytes_mut().as_mut_ptr()), SendPtr(v.bytes_mut().as_mut_ptr())];
        pool.run(2 * copies.len(), &|task, _| {
            let BlockCopy { from, to } = copies[task / 2];
            let (from, to) = (from as usize, to as usize);
            assert!(from.max(to) < shape.blocks, "a copy from block {from} to {to} is outside the pool of {} blocks", shape.blocks);
            let (start, bytes) = (pages[task % 2].get(), sizes[task % 2]);
            // SAFETY: both blocks are inside the pages. No block is both a source and a destination
            // of a step's copies.
            unsafe { std::ptr::copy_nonoverlapping(start.add(from * bytes), start.add(to * bytes), bytes) };
        });
    }
}

/// Maximum number of rows per task of `store`.
const MAX_STORED: usize = 16;

/// The arguments of `store`, except the buffers that it modifies.
#[derive(Clone, Copy)]
pub struct StoreArgs<'a> {
    pub inputs: &'a Inputs,
    pub group: usize,
    pub shape: &'a AttentionShape,
    pub turn: Option<RotaryEmbedding<'a, Buf>>,
}

/// Rotates the queries and keys of each row of `qkv`, and writes its K and V to the row's slot in
/// `group`.
pub fn store(machine: Machine, args: StoreArgs, qkv: &mut Buf, kv: &mut Kv) {
    let shape = kv.shape;
    with_cached!(&shape, store_as(machine, args, qkv, kv));
}

fn store_as<E: Cached>(Machine { isa, pool }: Machine, args: StoreArgs, qkv: &mut Buf, kv: &mut Kv) {
    let Kv { shape, k, v } = kv;
    let (k, v) = (SendPtr(k.bytes_mut().as_mut_ptr()), SendPtr(v.bytes_mut().as_mut_ptr()));
    let rows = args.inputs.batch.token_count();
    let width = if args.shape.values == Values::Own { args.shape.qkv_width() } else { args.shape.kv_width() };
    let qkv = SendPtr(qkv[..rows * width].as_mut_ptr());
    // The keys of consecutive tokens share cache lines, so each task takes consecutive rows.
    let at_once = rows.div_ceil(4 * pool.threads()).clamp(1, MAX_STORED);
    pool.run(rows.div_ceil(at_once), &|task, _| {
        for row in task * at_once..rows.min((task + 1) * at_once) {
            // SAFETY: rows are disjoint and inside `qkv`. Their slots are distinct, and the kernel
            // checks that they exist. The CPU supports `isa`.
            unsafe {
                let qkv = std::slice::from_raw_parts_mut(qkv.get().add(row * width), width);
                isa.run(StoreRow::<E> { args, row, qkv, kv: shape, k, v, element: PhantomData });
            }
        }
    });
}

struct StoreRow<'a, E> {
    args: StoreArgs<'a>,
    row: usize,
    qkv: &'a mut [f32],
    kv: &'a KvShape,
    k: SendPtr<u8>,
    v: SendPtr<u8>,
    element: PhantomData<E>,
}

impl<E: Cached> Kernel for StoreRow<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let StoreRow { args: StoreArgs { inputs, group, shape, turn }, row, qkv, kv, k, v, .. } = self;
        let KvShape { block_size, kv_heads, head_dim, blocks, .. } = *kv;
        let slot = inputs.batch.slots[row * inputs.batch.groups() + group] as usize;
        let (block, token) = (slot / block_size, slot % block_size);
        assert!(block < blocks, "slot {slot} is outside the pool of {blocks} blocks");
        assert!(
            shape.kv_width() == kv_heads * head_dim && shape.values == kv.values,
            "the keys have {} numbers and the values {:?}; the cache has {kv_heads} x {head_dim}, {:?}",
            shape.kv_width(),
            shape.values,
            kv.values
        );
        let (keys, values) = match shape.values {
            Values::OfKeys(_) => (&[][..], &*qkv),
            Values::Own => {
                let (turned, values) = qkv.split_at_mut(shape.q_width() + shape.kv_width());
                if let Some(turn) = turn {
                    // SAFETY: the caller guarantees the CPU features of `L`.
                    unsafe { TurnHeads { heads: &mut *turned, dim: head_dim, turn, row }.run::<L>() };
                }
                (&turned[shape.q_width()..], &*values)
            }
        };
        // SAFETY: block, heads and token are inside the pool's shape, and no other row has this
        // slot.
        unsafe {
            for (head, numbers) in keys.chunks_exact(head_dim).enumerate() {
                Head::<E>::at(kv, k.get(), block, head).write(numbers, token, |dim| E::key(token, dim, block_size));
            }
            for (head, numbers) in values.chunks_exact(head_dim).enumerate() {
                Head::<E>::at(kv, v.get(), block, head).write(numbers, token, |dim| E::value(token, dim, head_dim));
            }
        }
    }
}

impl<E: Cached> Head<E> {
    /// Writes one token's numbers to the positions that `place` returns.
    ///
    /// # Safety
    /// The positions are inside the head, and no other thread accesses them.
    #[inline(always)]
    unsafe fn write(&self, numbers: &[f32], token: usize, place: impl Fn(usize) -> usize) {
        const AT_ONCE: usize = 64;
        let scale = E::MAX.map_or(1.0, |max_abs| scale_of(numbers, max_abs));
        let divisor = if scale == 0.0 { 1.0 } else { scale }; // all numbers are stored as 0 * scale
        for (part, numbers) in numbers.chunks(AT_ONCE).enumerate() {
            let mut nearest = [E::nearest(0.0); AT_ONCE];
            for (nearest, number) in nearest.iter_mut().zip(numbers) {
                *nearest = E::nearest(if E::SCALED { number / divisor } else { *number });
            }
            for (i, &nearest) in nearest[..numbers.len()].iter().enumerate() {
                // SAFETY: the caller upholds this function's contract.
                unsafe { self.numbers.add(place(part * AT_ONCE + i)).write(nearest) };
            }
        }
        if E::SCALED {
            // SAFETY: the caller upholds this function's contract.
            unsafe { self.scales.add(token).write(scale) };
        }
    }
}

/// Returns the scale that maps the largest magnitude to `max_abs`. If a number is not finite, the
/// scale is NaN, and so is every result computed with it. If the scale would be subnormal, it is 0.
#[inline(always)]
fn scale_of(numbers: &[f32], max_abs: f32) -> f32 {
    let scale = greatest_magnitude(numbers) / max_abs;
    match scale {
        _ if !scale.is_finite() => f32::NAN,
        _ if scale < f32::MIN_POSITIVE => 0.0,
        _ => scale,
    }
}
