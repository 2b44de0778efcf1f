//! The shard of a model that one rank has, with tensor parallelism, pipeline parallelism or both.
//!
//! Tensor parallelism divides each layer: attention by heads, an MLP by its intermediate width,
//! experts by their number, and the vocabulary by tokens. The outputs of attention and MLP are sums
//! over all ranks. Everything else is the same on all ranks. Pipeline parallelism divides the
//! layers.

use std::ops::Range;
use std::slice::from_ref;

use super::{
    Attention, AttentionShape, Expert, Experts, HeadAttention, LatentAttention, LatentQueries, Layer, Linear, Mlp, ModelSpec, Norm, QkNorm,
    QkNormOver, SharedExpert, Vector,
};
use crate::backend::HeadShard;
use crate::error::{Error, Result};
use crate::types::parallel::part_of;

/// A rank of tensor parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    pub rank: usize,
    pub ranks: usize,
}

/// A stage of pipeline parallelism: consecutive layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    pub stage: usize,
    pub stages: usize,
}

impl ModelSpec {
    /// Returns the spec of a rank's shard. With one rank, it is the same spec.
    ///
    /// Errors: `InvalidArgument` if the ranks do not divide the heads or the widths of the MLPs.
    pub fn shard(&self, shard: Shard) -> Result<ModelSpec> {
        let Shard { rank, ranks } = shard;
        if rank >= ranks {
            return Err(Error::invalid(format!("rank {rank} of tensor parallelism is out of range (limit {ranks}); give a lower rank")));
        }
        let mut spec = self.clone();
        if ranks == 1 {
            return Ok(spec);
        }
        for layer in &mut spec.layers {
            let Layer { attention, mlp, .. } = layer;
            match attention {
                Attention::Heads(heads) => *heads = shard.head_attention(heads)?,
                Attention::Latent(latent) => *latent = shard.latent_attention(latent)?,
            }
            *mlp = shard.mlp(mlp)?;
        }
        let tokens = shard.tokens(spec.vocab_size);
        // Another stage may have the matrix, which has no rows here.
        let rows = |matrix: &Linear| tokens.start.min(matrix.rows())..tokens.end.min(matrix.rows());
        spec.embedding.tokens = spec.embedding.tokens.clone().with_rows(from_ref(&rows(&spec.embedding.tokens)));
        spec.head.weight = spec.head.weight.map(|weight| weight.clone().with_rows(from_ref(&rows(&weight))));
        Ok(spec)
    }

    /// Returns the spec of a stage. With one stage, it is the same spec.
    ///
    /// Only the first stage has the embedding, and only the last one the final norm and the head.
    /// In the other stages, their matrices have no rows, or are absent. If the head is tied to
    /// the embedding, the first and the last stage have the matrix.
    ///
    /// Errors: `InvalidArgument` if there are more stages than layers.
    pub fn stage(&self, stage: Stage) -> Result<ModelSpec> {
        let layers = stage.layers(self.layers.len())?;
        let mut spec = self.clone();
        if stage.stages == 1 {
            return Ok(spec);
        }
        let is_last = layers.end == spec.layers.len();
        let is_first = layers.start == 0;
        spec.layers = spec.layers[layers].to_vec();
        let without_rows = |matrix: Linear| matrix.with_rows(&[]);
        if !is_first {
            (spec.embedding.project, spec.embedding.positions) = (None, None);
        }
        if !(is_first || is_last && spec.head.weight.is_none()) {
            spec.embedding.tokens = without_rows(spec.embedding.tokens);
        }
        if !is_last {
            (spec.final_norm, spec.head.project) = (None, None);
            spec.head.weight = spec.head.weight.map(without_rows);
        }
        Ok(spec)
    }

    /// Returns the tokens of this rank: those of its logits if it has the head, or else those of
    /// its embedding. Empty if it has neither, or if there are fewer tokens than ranks.
    pub fn vocab(&self) -> Range<usize> {
        let of_head = self.head.weight.as_ref().filter(|weight| weight.rows() > 0);
        of_head.unwrap_or(&self.embedding.tokens).row_ranges().first().cloned().unwrap_or(0..0)
    }
}

impl Stage {
    /// Returns the layers of the stage, of a model with `layers` layers. If the stages do not
    /// divide them, earlier stages have one more, because the last one also computes the
    /// logits.
    ///
    /// Errors: `InvalidArgument` if there are more stages than layers.
    pub fn layers(self, layers: usize) -> Result<Range<usize>> {
        let Stage { stage, stages } = self;
        if stage >= stages {
            return Err(Error::invalid(format!("stage {stage} of the pipeline is out of range (limit {stages}); give a lower stage")));
        }
        if stages > layers {
            return Err(Error::invalid(format!(
                "pipeline_parallel is larger than the number of layers ({stages}, limit {layers}); lower pipeline_parallel"
            )));
        }
        Ok(share(layers, stage, stages))
    }
}

/// Returns share `index` of `of`, which are consecutive and of equal size. If `of` does not divide
/// `count`, the first shares have one more.
fn share(count: usize, index: usize, of: usize) -> Range<usize> {
    let start = |index: usize| index * (count / of) + index.min(count % of);
    start(index)..start(index + 1)
}

impl Shard {
    /// Returns the tokens of this rank, of a vocabulary with `vocab_size` tokens. All ranks have
    /// equally many, except the last ones, which may have fewer or none.
    pub fn tokens(self, vocab_size: usize) -> Range<usize> {
        part_of(vocab_size, self.rank, self.ranks)
    }

    /// Returns the part of this rank. `what` names what is divided.
    fn part(self, count: usize, what: &str) -> Result<Range<usize>> {
        let Shard { rank, ranks } = self;
        match count.is_multiple_of(ranks) {
            true => Ok(rank * (count / ranks)..(rank + 1) * (count / ranks)),
            false => Err(Error::invalid(format!(
                "tensor_parallel does not divide the model ({ranks} ranks, {count} {what}); set tensor_parallel to a divisor of {count}"
            ))),
        }
    }

    /// Returns the KV heads of this rank: its part, or the one that its queries share with those of
    /// other ranks.
    fn kv_heads(self, count: usize) -> Result<Range<usize>> {
        let Shard { rank, ranks } = self;
        match ranks.is_multiple_of(count) {
            true => Ok(rank * count / ranks..rank * count / ranks + 1),
            false => self.part(count, "KV heads"),
        }
    }

    fn head_attention(self, attention: &HeadAttention) -> Result<HeadAttention> {
        let HeadAttention { shape, qkv, out, qk_norm, rope, sinks } = attention.clone();
        let (heads, kv_heads) = (self.part(shape.heads, "attention heads")?, self.kv_heads(shape.kv_heads)?);
        let queries = times(&heads, shape.head_dim);
        let keys = times(&kv_heads, shape.head_dim);
        let at = |first: usize| first + keys.start..first + keys.end;
        let rows = [queries.clone(), at(shape.q_width()), at(shape.q_width() + shape.kv_width())];
        let qk_norm = qk_norm.map(|QkNorm { over, q, k }| match over {
            QkNormOver::EachHead => QkNorm { over, q: of_heads(q, &heads, &shape), k: of_heads(k, &kv_heads, &shape) },
            QkNormOver::AllHeads => QkNorm { over, q, k: self.norm_of_all_keys(k, &shape) },
        });
        Ok(HeadAttention {
            shape: AttentionShape { kv_heads: kv_heads.len(), ..of_shape(shape, &heads) },
            qkv: qkv.with_rows(&rows),
            out: self.summed(out, queries),
            qk_norm,
            rope,
            sinks: sinks.map(|sinks| Vector { shard: Some(Vec::from_iter([heads])), ..sinks }),
        })
    }

    /// Returns the norm over the keys of all ranks, in the order of ranks. If ranks share KV heads,
    /// they occur several times, which does not change the mean.
    fn norm_of_all_keys(self, norm: Norm, shape: &AttentionShape) -> Norm {
        if self.ranks <= shape.kv_heads {
            return norm;
        }
        let of_rank = |rank| times(&(rank * shape.kv_heads / self.ranks..rank * shape.kv_heads / self.ranks + 1), shape.head_dim);
        Norm { shard: Some((0..self.ranks).map(of_rank).collect()), ..norm }
    }

    fn latent_attention(self, attention: &LatentAttention) -> Result<LatentAttention> {
        let LatentAttention { shape, unrotated, queries, keys, values, out, .. } = attention.clone();
        let heads = self.part(shape.heads, "attention heads")?;
        let rotated = shape.head_dim - shape.value_dim();
        let turned = times(&heads, rotated);
        let first = shape.heads * unrotated;
        let rows = [times(&heads, unrotated), first + turned.start..first + turned.end];
        let width = values[0].rows();
        Ok(LatentAttention {
            shape: of_shape(shape, &heads),
            queries: match queries {
                LatentQueries::Direct(queries) => LatentQueries::Direct(queries.with_rows(&rows)),
                LatentQueries::LowRank { down, norm, up } => LatentQueries::LowRank { down, norm, up: up.with_rows(&rows) },
            },
            keys: keys[heads.clone()].to_vec(),
            values: values[heads.clone()].to_vec(),
            out: self.summed(out, times(&heads, width)),
            ..attention.clone()
        })
    }

    fn mlp(self, mlp: &Mlp) -> Result<Mlp> {
        Ok(match mlp.clone() {
            Mlp::Plain { up, act, down } => {
                let width = self.part(down.cols, "columns of an MLP")?;
                Mlp::Plain { up: up.with_rows(from_ref(&width)), act, down: self.summed(down, width) }
            }
            Mlp::Gated { gate_up, act, down } => {
                let Expert { gate_up, down } = self.gated(Expert { gate_up, down })?;
                Mlp::Gated { gate_up, act, down }
            }
            Mlp::Experts(experts) => {
                let local = share(experts.experts.len(), self.rank, self.ranks);
                let shared = |SharedExpert { expert, gate }| Ok::<_, Error>(SharedExpert { expert: self.gated(expert)?, gate });
                Mlp::Experts(Experts {
                    experts: experts.experts[local.clone()].to_vec(),
                    shared: experts.shared.map(shared).transpose()?,
                    local: Some(local),
                    ..experts
                })
            }
        })
    }

    /// Returns the shard of a gated MLP.
    fn gated(self, Expert { gate_up, down }: Expert) -> Result<Expert> {
        let inner = down.cols;
        let width = self.part(inner, "columns of an MLP")?;
        let rows = [width.clone(), inner + width.start..inner + width.end];
        Ok(Expert { gate_up: gate_up.with_rows(&rows), down: self.summed(down, width) })
    }

    /// Returns the shard of a matrix whose outputs are summed over all ranks. Only the first rank
    /// adds the bias.
    fn summed(self, matrix: Linear, cols: Range<usize>) -> Linear {
        let bias = matrix.bias && self.rank == 0;
        matrix.with_cols(cols).bias(bias)
    }
}

fn of_shape(shape: AttentionShape, heads: &Range<usize>) -> AttentionShape {
    AttentionShape { heads: heads.len(), shard: Some(HeadShard { first: heads.start, of: shape.heads }), ..shape }
}

/// Returns the norm of these heads, which has either the weights of one head for all, or weights
/// per head.
fn of_heads(norm: Norm, heads: &Range<usize>, shape: &AttentionShape) -> Norm {
    match norm.stored_width() == shape.head_dim {
        true => norm,
        false => Norm { shard: Some(Vec::from_iter([times(heads, shape.head_dim)])), ..norm },
    }
}

/// Returns the numbers of these objects, each of which has `width` numbers.
fn times(objects: &Range<usize>, width: usize) -> Range<usize> {
    objects.start * width..objects.end * width
}
