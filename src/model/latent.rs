//! Latent attention (MLA): the cache holds one latent vector per token for all heads, which is not
//! expanded.

use super::decoder::{Angles, LayerKv, Output, Pass, Scratch, Widths};
use super::spec::{LatentAttention, LatentQueries};
use super::weights::{LoadedLinear, LoadedNorm};
use crate::backend::{Addition, Collectives, Heads, KvOps, Ops, Strips};

/// The dimensions of a row.
struct Dims {
    heads: usize,
    /// Unrotated dimensions of a head's query. `rotated` is the number of rotated ones.
    unrotated: usize,
    rotated: usize,
    /// Unrotated dimensions of a latent. It has as many rotated dimensions as a query.
    rank: usize,
}

impl Dims {
    fn from_attention<L, N>(LatentAttention { shape, unrotated, .. }: &LatentAttention<L, N>) -> Dims {
        let rank = shape.value_dim();
        Dims { heads: shape.heads, unrotated: *unrotated, rotated: shape.head_dim - rank, rank }
    }

    /// Returns the strips of a row with one strip per head: `dim` numbers, `pitch` apart, starting
    /// at `first`.
    fn strips(&self, first: usize, dim: usize, pitch: usize, stride: usize) -> Strips {
        Strips { first, count: self.heads, dim, pitch, stride }
    }
}

impl Widths {
    pub fn hold_latent(&mut self, latent: &LatentAttention) {
        let Dims { heads, unrotated, rotated, rank } = Dims::from_attention(latent);
        let values = latent.values[0].rows();
        let down = match &latent.queries {
            LatentQueries::Direct(_) => 0,
            LatentQueries::LowRank { down, .. } => down.rows(),
        };
        self.hold((heads * (unrotated + rotated)).max(heads * rank).max(heads * values), (heads * rank).max(rank + rotated).max(down));
        self.routed = self.routed.max(heads * unrotated.max(rotated).max(values)).max(down);
        self.queries = self.queries.max(heads * (rank + rotated));
    }
}

impl<B: Ops + KvOps + Collectives> Pass<'_, B> {
    /// Stores the rows' latents in the cache.
    #[allow(clippy::too_many_arguments)]
    pub fn latent_attention(
        &self,
        attention: &LatentAttention<LoadedLinear<B>, LoadedNorm<B>>,
        x: &B::Buf,
        LayerKv { group, kv }: &mut LayerKv<B>,
        angles: &[Angles<B>],
        scratch: &mut Scratch<B>,
        out: &mut Output<B::Buf>,
    ) -> Addition {
        let angles = &angles[attention.rope];
        self.queries(attention, x, angles, scratch);
        self.latents(attention, x, angles, scratch);
        self.backend.store_kv(self.inputs, *group, &attention.shape, None, &mut scratch.narrow, kv);
        self.look_for_latents(attention, scratch);
        self.backend.attention(self.inputs, *group, &attention.shape, None, &[], &scratch.queries, kv, &mut scratch.wide);
        self.values(attention, scratch);
        self.linear_add(&attention.out, &scratch.wide, out)
    }

    /// wide = the queries: the unrotated parts of all heads, and then the rotated parts of all
    /// heads.
    fn queries(
        &self,
        attention: &LatentAttention<LoadedLinear<B>, LoadedNorm<B>>,
        x: &B::Buf,
        angles: &Angles<B>,
        Scratch { wide, narrow, routed, .. }: &mut Scratch<B>,
    ) {
        let Dims { heads, unrotated, rotated, .. } = Dims::from_attention(attention);
        match &attention.queries {
            LatentQueries::Direct(queries) => self.linear(queries, x, wide),
            LatentQueries::LowRank { down, norm, up } => {
                self.linear(down, x, narrow);
                self.norm(norm, &[&up.weight], narrow, routed);
                self.linear(up, routed, wide);
            }
        }
        let turned = Heads { first: heads * unrotated, count: heads, dim: rotated, stride: heads * (unrotated + rotated) };
        self.backend.rope(self.rows, turned, angles.turn(), wide);
    }

    /// narrow = the latent and the rotated key of each row.
    fn latents(
        &self,
        attention: &LatentAttention<LoadedLinear<B>, LoadedNorm<B>>,
        x: &B::Buf,
        angles: &Angles<B>,
        Scratch { narrow, .. }: &mut Scratch<B>,
    ) {
        let Dims { rotated, rank, .. } = Dims::from_attention(attention);
        self.linear(&attention.latent, x, narrow);
        self.norm_heads(&attention.norm, Heads { first: 0, count: 1, dim: rank, stride: rank + rotated }, narrow);
        self.backend.rope(self.rows, Heads { first: rank, count: 1, dim: rotated, stride: rank + rotated }, angles.turn(), narrow);
    }

    /// queries = the queries in latent space: each head's unrotated part multiplied by its key
    /// matrix, followed by its rotated part.
    fn look_for_latents(
        &self,
        attention: &LatentAttention<LoadedLinear<B>, LoadedNorm<B>>,
        Scratch { wide, narrow, routed, queries, .. }: &mut Scratch<B>,
    ) {
        let dims = Dims::from_attention(attention);
        let Dims { heads, unrotated, rotated, rank } = dims;
        let (query, latent) = (heads * (unrotated + rotated), rank + rotated);
        self.backend.split_strips(self.rows, dims.strips(0, unrotated, unrotated, query), wide, routed);
        self.backend.matmul_strips(self.rows, heads, routed, &|head| &attention.keys[head].weight, narrow);
        self.backend.join_strips(self.rows, dims.strips(0, rank, latent, heads * latent), narrow, queries);
        self.backend.split_strips(self.rows, dims.strips(heads * unrotated, rotated, rotated, query), wide, routed);
        self.backend.join_strips(self.rows, dims.strips(rank, rotated, latent, heads * latent), routed, queries);
    }

    /// wide = each head's values, expanded from the attention output in latent space.
    fn values(&self, attention: &LatentAttention<LoadedLinear<B>, LoadedNorm<B>>, Scratch { wide, narrow, routed, .. }: &mut Scratch<B>) {
        let dims = Dims::from_attention(attention);
        let (Dims { heads, rank, .. }, values) = (&dims, attention.values[0].rows);
        self.backend.split_strips(self.rows, dims.strips(0, *rank, *rank, heads * rank), wide, narrow);
        self.backend.matmul_strips(self.rows, *heads, narrow, &|head| &attention.values[head].weight, routed);
        self.backend.join_strips(self.rows, dims.strips(0, values, values, heads * values), routed, wide);
    }
}
