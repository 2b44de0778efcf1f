//! The residual stream of a layer: its norms, and the additions of its branches.

use super::decoder::{Angles, LayerKv, LoadedLayer, Output, Pass, Scratch, Work};
use super::spec::{Attention, Residual};
use super::weights::{LoadedLinear, LoadedNorm};
use crate::backend::{Addition, BackendTypes, Collectives, KvOps, Ops};

impl<B: Ops + KvOps + Collectives> Pass<'_, B> {
    pub fn layer(&self, layer: &LoadedLayer<B>, mut kv: LayerKv<B>, work: &mut Work<B>) {
        let Work { x, normed, delta, scratch, angles, .. } = work;
        let (of_attention, of_mlp) = (matrices(layer.attention.input_readers()), matrices(layer.mlp.input_readers()));
        let mut attention = |x: &B::Buf, out: Output<B::Buf>| self.any_attention(layer, x, &mut kv, angles, scratch, out);
        match &layer.residual {
            Residual::PreNorm { attention: before, mlp } => {
                self.norm_for_products(before, &of_attention, x, normed);
                match attention(normed, self.added_to(x, layer, delta)) {
                    Addition::Done => self.norm_for_products(mlp, &of_mlp, x, normed),
                    Addition::Pending => self.add_norm(x, delta, layer, mlp, &of_mlp, normed),
                }
                let added = self.mlp(layer, normed, scratch, self.added_to(x, layer, delta));
                self.complete(added, x, delta, layer);
            }
            Residual::PostNorm { attention: after, mlp } => {
                attention(x, Output::only(delta));
                self.add_norm(x, delta, layer, after, &[], normed);
                self.mlp(layer, normed, scratch, Output::only(delta));
                self.add_norm(normed, delta, layer, mlp, &[], x);
            }
            Residual::BranchNorm { attention: after, mlp } => {
                attention(x, Output::only(delta));
                self.norm(after, &[], delta, normed);
                self.add(x, normed, layer);
                self.mlp(layer, x, scratch, Output::only(delta));
                self.norm(mlp, &[], delta, normed);
                self.add(x, normed, layer);
            }
            Residual::Parallel { attention: before, mlp: None } => {
                self.norm(before, &of_both(of_attention, of_mlp), x, normed);
                let added = attention(normed, self.added_to(x, layer, delta));
                self.complete(added, x, delta, layer);
                let added = self.mlp(layer, normed, scratch, self.added_to(x, layer, delta));
                self.complete(added, x, delta, layer);
            }
            Residual::Parallel { attention: before, mlp: Some(mlp) } => {
                self.norm_for_products(before, &of_attention, x, normed);
                attention(normed, Output::only(delta));
                // The stream changes before the products of the MLP.
                self.norm(mlp, &of_mlp, x, normed);
                self.add(x, delta, layer);
                let added = self.mlp(layer, normed, scratch, self.added_to(x, layer, delta));
                self.complete(added, x, delta, layer);
            }
            Residual::Sandwich { attention: before, after_attention, mlp, after_mlp } => {
                self.norm_for_products(before, &of_attention, x, normed);
                attention(normed, Output::only(delta));
                self.norm(after_attention, &[], delta, normed);
                self.add_norm(x, normed, layer, mlp, &of_mlp, delta);
                std::mem::swap(normed, delta);
                self.mlp(layer, normed, scratch, Output::only(delta));
                self.norm(after_mlp, &[], delta, normed);
                self.add(x, normed, layer);
            }
        }
    }

    fn any_attention(
        &self,
        layer: &LoadedLayer<B>,
        x: &B::Buf,
        kv: &mut LayerKv<B>,
        angles: &[Angles<B>],
        scratch: &mut Scratch<B>,
        mut out: Output<B::Buf>,
    ) -> Addition {
        let added = match &layer.attention {
            Attention::Heads(heads) => self.attention(heads, x, kv, angles, scratch, &mut out),
            Attention::Latent(latent) => self.latent_attention(latent, x, kv, angles, scratch, &mut out),
        };
        self.all_reduce(layer.attention.out().rows, out.delta);
        added
    }

    /// Returns the output of a branch that is added to `x`. With several workers, each has a part of the
    /// branch, and these are summed before.
    fn added_to<'a>(&self, x: &'a mut B::Buf, layer: &LoadedLayer<B>, delta: &'a mut B::Buf) -> Output<'a, B::Buf> {
        Output { delta, stream: (self.place.division.tensor == 1).then_some((x, layer.branch_scale)) }
    }

    /// x += branch_scale * y, unless that is done.
    fn complete(&self, added: Addition, x: &mut B::Buf, y: &B::Buf, layer: &LoadedLayer<B>) {
        if added == Addition::Pending {
            self.add(x, y, layer);
        }
    }

    /// x += branch_scale * y
    fn add(&self, x: &mut B::Buf, y: &B::Buf, layer: &LoadedLayer<B>) {
        self.backend.add(self.rows * layer.attention.out().rows, layer.branch_scale, x, y);
    }

    /// x += branch_scale * y; out = norm(x).
    fn add_norm(&self, x: &mut B::Buf, y: &B::Buf, layer: &LoadedLayer<B>, norm: &LoadedNorm<B>, readers: &[&B::Matrix], out: &mut B::Buf) {
        self.backend.add_norm(self.rows, norm.spec.width(), layer.branch_scale, y, norm.with_weights(), readers, x, out);
    }

    /// out = norm(x), which only products with `readers` read, before `x` changes. If they are one
    /// product, the backend may leave the norm to it.
    pub fn norm_for_products(&self, norm: &LoadedNorm<B>, readers: &[&B::Matrix], x: &B::Buf, out: &mut B::Buf) {
        match readers {
            [reader, others @ ..] if others.iter().all(|other| std::ptr::eq(*other, *reader)) => {
                self.backend.norm_for_product(self.rows, norm.spec.width(), norm.with_weights(), reader, x, out);
            }
            _ => self.norm(norm, readers, x, out),
        }
    }
}

fn matrices<B: BackendTypes, const N: usize>(linears: [&LoadedLinear<B>; N]) -> [&B::Matrix; N] {
    linears.map(|linear| &linear.weight)
}

fn of_both<'a, M>([a, b]: [&'a M; 2], [c, d, e, f]: [&'a M; 4]) -> [&'a M; 6] {
    [a, b, c, d, e, f]
}
