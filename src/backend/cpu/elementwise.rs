//! Elementwise ops: norms, activations, rotary positions, sums.

use super::Buf;
use super::lanes::{self, Kernel, Lanes, load_some, store_some};
use crate::backend::{Act, Glu, NormKind, NormOf, Pairs, RotaryEmbedding};

// These are macros instead of functions with closures: a closure that is not inlined is compiled
// without the CPU features of the path.

/// Replaces each vector `v` of `x` by the value of the expression.
macro_rules! map {
    ($lanes:ident, $x:expr, |$v:ident| $f:expr) => {
        for chunk in $x.chunks_mut($lanes::N) {
            let $v = load_some::<$lanes, f32>(chunk.as_ptr(), chunk.len());
            store_some::<$lanes>(chunk.as_mut_ptr(), $f, chunk.len());
        }
    };
}

/// Sums an expression over the vectors of `x`: one partial sum per lane, then the sum of the lanes.
macro_rules! sum_of {
    ($lanes:ident, $x:expr, |$v:ident| $f:expr) => {{
        let chunks = $x.chunks_exact($lanes::N);
        let rest = chunks.remainder();
        let mut total = $lanes::splat(0.0);
        for chunk in chunks {
            let $v = $lanes::load(chunk.as_ptr());
            total = $lanes::add(total, $f);
        }
        if !rest.is_empty() {
            let $v = load_some::<$lanes, f32>(rest.as_ptr(), rest.len());
            let mut tail = [0.0f32; 16];
            $lanes::store(tail.as_mut_ptr(), $f);
            tail[rest.len()..].fill(0.0);
            total = $lanes::add(total, $lanes::load(tail.as_ptr()));
        }
        lanes::sum::<$lanes>(total)
    }};
}

/// The coefficients of a norm: (x - mean) * factor * (weight + offset) + bias.
struct Scaling {
    mean: f32,
    factor: f32,
    offset: f32,
}

impl Scaling {
    #[inline(always)]
    unsafe fn for_row<L: Lanes>(kind: NormKind, eps: f32, x: &[f32]) -> Scaling {
        let width = x.len() as f32;
        // SAFETY: the caller guarantees the CPU features of `L`.
        unsafe {
            let (mean, offset) = match kind {
                NormKind::Layer => (sum_of!(L, x, |v| v) / width, 0.0),
                NormKind::Rms { unit_offset } => (0.0, if unit_offset { 1.0 } else { 0.0 }),
            };
            let squares = sum_of!(L, x, |v| {
                let v = L::sub(v, L::splat(mean));
                L::mul(v, v)
            });
            Scaling { mean, factor: 1.0 / (squares / width + eps).sqrt(), offset }
        }
    }
}

/// A norm whose width is the length of its weights.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    pub kind: NormKind,
    pub eps: f32,
    pub weight: &'a [f32],
    pub bias: Option<&'a [f32]>,
}

impl<'a> Norm<'a> {
    pub fn new(NormOf { kind, eps, weight, bias }: NormOf<'a, Buf>, width: usize) -> Norm<'a> {
        Norm { kind, eps, weight: &weight[..width], bias: bias.map(|bias| &bias[..width]) }
    }
}

/// out = norm(x)
pub struct NormRow<'a> {
    pub norm: Norm<'a>,
    pub x: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for NormRow<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let (width, norm) = (self.x.len(), self.norm);
        // SAFETY: the caller guarantees the CPU features of `L`. Every slice has `width` elements.
        unsafe {
            let Scaling { mean, factor, offset } = Scaling::for_row::<L>(norm.kind, norm.eps, self.x);
            for start in (0..width).step_by(L::N) {
                let count = width - start;
                let at = |slice: &[f32]| load_some::<L, f32>(slice.as_ptr().add(start), count);
                let y = L::mul(L::sub(at(self.x), L::splat(mean)), L::splat(factor));
                let weight = L::add(at(norm.weight), L::splat(offset));
                let y = match norm.bias {
                    Some(bias) => L::fma(y, weight, at(bias)),
                    None => L::mul(y, weight),
                };
                store_some::<L>(self.out.as_mut_ptr().add(start), y, count);
            }
        }
    }
}

/// The norm of one head, in place.
pub struct NormHead<'a> {
    pub norm: Norm<'a>,
    pub x: &'a mut [f32],
}

impl Kernel for NormHead<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the caller guarantees the CPU features of `L`.
        unsafe {
            let Scaling { mean, factor, offset } = Scaling::for_row::<L>(self.norm.kind, self.norm.eps, self.x);
            for (x, weight) in self.x.iter_mut().zip(self.norm.weight) {
                *x = (*x - mean) * factor * (weight + offset);
            }
            if let Some(bias) = self.norm.bias {
                self.x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
        }
    }
}

/// x += scale * y
pub struct Add<'a> {
    pub scale: f32,
    pub x: &'a mut [f32],
    pub y: &'a [f32],
}

impl Kernel for Add<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += self.scale * y;
        }
    }
}

pub struct Activate<'a> {
    pub act: Act,
    pub x: &'a mut [f32],
}

impl Kernel for Activate<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the caller guarantees the CPU features of `L`.
        unsafe { map!(L, self.x, |x| activated::<L>(self.act, x)) }
    }
}

/// out = glu(gate, up)
pub struct Gate<'a> {
    pub glu: Glu,
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for Gate<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Gate { glu, gate, up, out } = self;
        assert!(gate.len() == out.len() && up.len() == out.len());
        for ((out, gate), up) in out.chunks_mut(L::N).zip(gate.chunks(L::N)).zip(up.chunks(L::N)) {
            // SAFETY: the caller guarantees the CPU features of `L`. All three slices have the same
            // length.
            unsafe {
                let (gate, up) = (load_some::<L, f32>(gate.as_ptr(), out.len()), load_some::<L, f32>(up.as_ptr(), out.len()));
                let gated = match glu {
                    Glu::Of(act) => L::mul(activated::<L>(act, gate), up),
                    Glu::Clamped { alpha, limit } => L::mul(clamped_swish::<L>(alpha, limit, gate), clamped_plus_one::<L>(limit, up)),
                };
                store_some::<L>(out.as_mut_ptr(), gated, out.len());
            }
        }
    }
}

#[inline(always)]
unsafe fn activated<L: Lanes>(act: Act, x: L::V) -> L::V {
    // SAFETY: the caller guarantees the CPU features of `L`.
    unsafe {
        match act {
            Act::Relu => L::max(L::splat(0.0), x), // propagates NaN
            Act::Silu => L::div(x, L::add(L::splat(1.0), exp_of_minus::<L>(x))),
            Act::GeluTanh => {
                // x * (1 + tanh(u)) / 2 = x / (1 + e^(-2u))
                let cube = L::mul(L::mul(x, x), x);
                let u = L::mul(L::fma(cube, L::splat(0.044_715), x), L::splat(1.595_769));
                L::div(x, L::add(L::splat(1.0), exp_of_minus::<L>(u)))
            }
            Act::Gelu => {
                let mut lanes = [0.0; 16];
                L::store(lanes.as_mut_ptr(), x);
                for x in &mut lanes[..L::N] {
                    *x *= 0.5 * (1.0 + libm::erff(*x * std::f32::consts::FRAC_1_SQRT_2));
                }
                L::load(lanes.as_ptr())
            }
        }
    }
}

/// min(x, limit) / (1 + e^(-alpha * min(x, limit)))
#[inline(always)]
unsafe fn clamped_swish<L: Lanes>(alpha: f32, limit: f32, x: L::V) -> L::V {
    // SAFETY: the caller guarantees the CPU features of `L`.
    unsafe {
        let x = L::min(L::splat(limit), x); // propagates NaN
        L::div(x, L::add(L::splat(1.0), exp_of_minus::<L>(L::mul(x, L::splat(alpha)))))
    }
}

/// clamp(x, -limit, limit) + 1
#[inline(always)]
unsafe fn clamped_plus_one<L: Lanes>(limit: f32, x: L::V) -> L::V {
    // SAFETY: the caller guarantees the CPU features of `L`.
    unsafe { L::add(L::min(L::splat(limit), L::max(L::splat(-limit), x)), L::splat(1.0)) }
}

#[inline(always)]
unsafe fn exp_of_minus<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller guarantees the CPU features of `L`.
    unsafe { lanes::exp::<L>(L::sub(L::splat(0.0), x)) }
}

/// x = cap * tanh(x / cap)
#[inline(always)]
pub unsafe fn soft_cap<L: Lanes>(x: &mut [f32], cap: f32) {
    // SAFETY: the caller guarantees the CPU features of `L`.
    unsafe {
        map!(L, x, |x| {
            // tanh(u) = 1 - 2 / (1 + e^(2u))
            let e = lanes::exp::<L>(L::mul(x, L::splat(2.0 / cap)));
            let tanh = L::sub(L::splat(1.0), L::div(L::splat(2.0), L::add(L::splat(1.0), e)));
            L::mul(L::splat(cap), tanh)
        })
    }
}

/// x = soft_cap(x * scale)
pub struct ScaleAndCap<'a> {
    pub scale: f32,
    pub soft_cap: Option<f32>,
    pub x: &'a mut [f32],
}

impl Kernel for ScaleAndCap<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the caller guarantees the CPU features of `L`.
        unsafe {
            map!(L, self.x, |x| L::mul(x, L::splat(self.scale)));
            if let Some(cap) = self.soft_cap {
                soft_cap::<L>(self.x, cap);
            }
        }
    }
}

/// Rotates consecutive heads of one row.
pub struct TurnHeads<'a> {
    pub heads: &'a mut [f32], // [heads, dim]
    pub dim: usize,
    pub turn: RotaryEmbedding<'a, Buf>,
    pub row: usize,
}

impl Kernel for TurnHeads<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let RotaryEmbedding { rotated, pairs, angles } = self.turn;
        let angles = &angles[self.row * rotated..][..rotated];
        for head in self.heads.chunks_exact_mut(self.dim) {
            rotate(head, pairs, angles);
        }
    }
}

/// Rotates pair i of one head by the angle with cosine `angles[i]` and sine `angles[i + count]`.
#[inline(always)]
fn rotate(head: &mut [f32], pairs: Pairs, angles: &[f32]) {
    let count = angles.len() / 2;
    let (cos, sin) = (&angles[..count], &angles[count..2 * count]);
    match pairs {
        Pairs::Halves => {
            let (low, high) = head[..2 * count].split_at_mut(count);
            for i in 0..count {
                let (a, b) = (low[i], high[i]);
                low[i] = a * cos[i] - b * sin[i];
                high[i] = b * cos[i] + a * sin[i];
            }
        }
        Pairs::Neighbours => {
            for (i, pair) in head[..2 * count].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let [a, b] = *pair;
                *pair = [a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]];
            }
        }
    }
}
