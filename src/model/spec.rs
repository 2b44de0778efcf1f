//! An architecture as data. Sum types, so that a combination that makes no sense cannot be written down.
//!
//! The types are generic over their leaves: a spec holds the names and shapes of its weights
//! (`Linear`, `Norm`), a loaded model holds the weights themselves, in the same structure.

pub use crate::backend::{Act, AttentionShape, NormKind, Pairs, Routing};

/// A decoder-only transformer.
#[derive(Debug, Clone)]
pub struct Model<L = Linear, N = Norm> {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// The longest sequence it was made for.
    pub max_positions: usize,
    pub embedding: Embedding<L>,
    /// The rotary embeddings that layers refer to by index.
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer<L, N>>,
    pub final_norm: Option<N>,
    pub head: Head<L>,
}

pub type ModelSpec = Model;

impl ModelSpec {
    /// Settles what depends on how long sequences may become.
    pub fn fit(&mut self, longest: usize) {
        self.ropes.iter_mut().for_each(|rope| rope.fit(longest));
    }
}

#[derive(Debug, Clone)]
pub struct Embedding<L = Linear> {
    pub tokens: L,
    /// Token embeddings are multiplied by this.
    pub scale: f32,
    /// From the embedding's width to the hidden size, where they differ.
    pub project: Option<L>,
    pub positions: Option<LearnedPositions<L>>,
}

#[derive(Debug, Clone)]
pub struct LearnedPositions<L = Linear> {
    pub table: L,
    /// Position p is row p + offset.
    pub offset: usize,
}

/// Rotary positions: pairs of dimensions turn at these frequencies (radians per position).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub frequencies: Vec<f32>, // [rotated dimensions / 2]
    pub amplitude: f32,
    pub pairs: Pairs,
    /// By how much longer sequences may be than the config's positions.
    pub stretch: f64,
    pub long: Option<Long>,
}

/// What becomes of frequencies where sequences may be longer than `beyond`. They depend on how long any may be, and not on how long
/// one is: K in the cache stays right, and a sequence's bits do not depend on its neighbours.
#[derive(Debug, Clone, PartialEq)]
pub struct Long {
    pub beyond: usize,
    pub how: Longer,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Longer {
    /// They are these.
    Other(Vec<f32>),
    /// Their base grows with the length.
    Dynamic { theta: f64, factor: f64 },
}

impl Rope {
    /// 1 / theta^(2i / dims) for each pair i.
    pub fn frequencies(theta: f64, dims: usize) -> Vec<f32> {
        (0..dims / 2).map(|i| (1.0 / theta.powf((2 * i) as f64 / dims as f64)) as f32).collect()
    }

    /// The longest sequence of a model whose config says `positions`.
    pub fn reach(&self, positions: usize) -> usize {
        positions.max((positions as f64 * self.stretch) as usize)
    }

    /// For sequences of at most `longest` positions.
    pub fn fit(&mut self, longest: usize) {
        let dims = self.rotated();
        let Some(Long { how, beyond }) = self.long.take_if(|long| longest > long.beyond) else { return };
        self.frequencies = match how {
            Longer::Other(frequencies) => frequencies,
            Longer::Dynamic { theta, factor } => {
                let stretch = factor * longest as f64 / beyond as f64 - (factor - 1.0);
                Rope::frequencies(theta * stretch.powf(dims as f64 / (dims as f64 - 2.0)), dims)
            }
        };
    }

    /// Dimensions of a head that turn.
    pub fn rotated(&self) -> usize {
        2 * self.frequencies.len()
    }
}

#[derive(Debug, Clone)]
pub struct Layer<L = Linear, N = Norm> {
    pub residual: Residual<N>,
    /// What attention and MLP add to the residual stream is multiplied by this.
    pub branch_scale: f32,
    pub attention: Attention<L, N>,
    pub mlp: Mlp<L>,
}

/// Where a layer's norms stand around its two residual sums.
#[derive(Debug, Clone)]
pub enum Residual<N = Norm> {
    /// x += attention(norm(x)); x += mlp(norm(x))
    PreNorm { attention: N, mlp: N },
    /// x = norm(x + attention(x)); x = norm(x + mlp(x))
    PostNorm { attention: N, mlp: N },
    /// x += attention(norm(x)) + mlp(norm(x)); one norm for both where `mlp` has none
    Parallel { attention: N, mlp: Option<N> },
    /// x += norm(attention(x)); x += norm(mlp(x))
    BranchNorm { attention: N, mlp: N },
    /// x += norm(attention(norm(x))); x += norm(mlp(norm(x)))
    Sandwich { attention: N, after_attention: N, mlp: N, after_mlp: N },
}

#[derive(Debug, Clone)]
pub struct Attention<L = Linear, N = Norm> {
    pub shape: AttentionShape,
    /// Queries, keys and values, stacked: one product.
    pub qkv: L,
    pub out: L,
    /// Norms of the queries and of the keys.
    pub qk_norm: Option<QkNorm<N>>,
    /// Index into `Model::ropes`.
    pub rope: Option<usize>,
}

#[derive(Debug, Clone)]
pub struct QkNorm<N = Norm> {
    pub over: QkNormOver,
    pub q: N,
    pub k: N,
}

/// What one norm is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormOver {
    EachHead,
    AllHeads,
}

#[derive(Debug, Clone)]
pub enum Mlp<L = Linear> {
    /// down(act(up(x)))
    Plain { up: L, act: Act, down: L },
    /// down(act(gate(x)) * up(x)); gate and up are stacked: one product
    Gated { gate_up: L, act: Act, down: L },
    /// Of many gated ones each row takes those that its router likes best.
    Experts(Experts<L>),
}

#[derive(Debug, Clone)]
pub struct Experts<L = Linear> {
    /// From the hidden size to one logit per expert.
    pub router: L,
    pub routing: Routing,
    pub act: Act,
    pub experts: Vec<Expert<L>>,
    pub shared: Option<SharedExpert<L>>,
}

#[derive(Debug, Clone)]
pub struct Expert<L = Linear> {
    /// Gate and up are stacked: one product.
    pub gate_up: L,
    pub down: L,
}

/// One that every row takes: sigmoid(gate(x)) * expert(x) is added.
#[derive(Debug, Clone)]
pub struct SharedExpert<L = Linear> {
    pub expert: Expert<L>,
    pub gate: L,
}

/// From the last hidden state to logits.
#[derive(Debug, Clone)]
pub struct Head<L = Linear> {
    /// From the hidden size to the embedding's width, where they differ.
    pub project: Option<L>,
    /// None: the token embedding, tied.
    pub weight: Option<L>,
    pub scale: f32,
    pub soft_cap: Option<f32>,
}

/// Where a matrix of `[rows of all parts, cols]` and its bias are found in the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    /// Stacked one below the other: (name without ".weight", rows).
    pub parts: Vec<(String, usize)>,
    pub cols: usize,
    pub bias: bool,
    pub layout: Layout,
}

/// How a part lies in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `[out, in]`, as torch's Linear.
    OutIn,
    /// `[in, out]`, as GPT-2's Conv1D.
    InOut,
    /// `[out, in]`, and its rows are, for each KV head, those of its queries, its key and its value; loaded, they are those of all
    /// queries, all keys, all values.
    ByKvHead { queries: usize, head_dim: usize },
}

impl Layout {
    /// Where in a part of so many rows its row `row`, as loaded, lies in the file; and how many follow it there that are also next.
    pub fn run_at(self, rows: usize, row: usize) -> (usize, usize) {
        let Layout::ByKvHead { queries, head_dim } = self else { return (row, rows - row) };
        let (head, within) = (row / head_dim, row % head_dim);
        let kv_heads = rows / head_dim / (queries + 2);
        let (group, member) = match head.checked_sub(queries * kv_heads) {
            None => (head / queries, head % queries),
            Some(after) => (after % kv_heads, queries + after / kv_heads),
        };
        ((group * (queries + 2) + member) * head_dim + within, head_dim - within)
    }
}

impl Linear {
    pub fn new(name: impl Into<String>, rows: usize, cols: usize) -> Linear {
        Linear::stack(vec![(name.into(), rows)], cols)
    }

    pub fn stack(parts: Vec<(String, usize)>, cols: usize) -> Linear {
        Linear { parts, cols, bias: false, layout: Layout::OutIn }
    }

    pub fn bias(self, bias: bool) -> Linear {
        Linear { bias, ..self }
    }

    pub fn layout(self, layout: Layout) -> Linear {
        Linear { layout, ..self }
    }

    pub fn rows(&self) -> usize {
        self.parts.iter().map(|(_, rows)| rows).sum()
    }
}

/// The weights of a norm, and its bias.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// Where its numbers are found, one part after the other: names without ".weight".
    pub parts: Vec<String>,
    /// Of each part.
    pub shape: Vec<usize>,
    pub kind: NormKind,
    pub eps: f32,
    pub bias: bool,
}

impl Norm {
    pub fn new(name: impl Into<String>, width: usize, kind: NormKind, eps: f32) -> Norm {
        Norm { parts: vec![name.into()], shape: vec![width], kind, eps, bias: false }
    }

    pub fn bias(self, bias: bool) -> Norm {
        Norm { bias, ..self }
    }

    pub fn width(&self) -> usize {
        self.parts.len() * self.shape.iter().product::<usize>()
    }
}

impl Attention {
    /// Separate q, k and v of `layer`, as most families name them: `{layer}.{q,k,v}_proj`.
    pub fn stacked_qkv(layer: &str, names: [&str; 3], shape: &AttentionShape, hidden: usize) -> Linear {
        let widths = [shape.q_width(), shape.kv_width(), shape.kv_width()];
        Linear::stack(names.iter().zip(widths).map(|(name, width)| (format!("{layer}.{name}"), width)).collect(), hidden)
    }
}

impl Model {
    /// The same structure with each leaf replaced by what `linear` and `norm` make of it.
    pub fn try_map<L, N, E>(
        &self,
        mut linear: impl FnMut(&Linear) -> Result<L, E>,
        mut norm: impl FnMut(&Norm) -> Result<N, E>,
    ) -> Result<Model<L, N>, E> {
        let (linear, norm) = (&mut linear, &mut norm);
        Ok(Model {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            max_positions: self.max_positions,
            embedding: self.embedding.try_map(linear)?,
            ropes: self.ropes.clone(),
            layers: self.layers.iter().map(|layer| layer.try_map(linear, norm)).collect::<Result<_, E>>()?,
            final_norm: self.final_norm.as_ref().map(norm).transpose()?,
            head: self.head.try_map(linear)?,
        })
    }
}

impl Embedding {
    fn try_map<L, E>(&self, linear: &mut impl FnMut(&Linear) -> Result<L, E>) -> Result<Embedding<L>, E> {
        let positions = match &self.positions {
            Some(LearnedPositions { table, offset }) => Some(LearnedPositions { table: linear(table)?, offset: *offset }),
            None => None,
        };
        Ok(Embedding {
            tokens: linear(&self.tokens)?,
            scale: self.scale,
            project: self.project.as_ref().map(linear).transpose()?,
            positions,
        })
    }
}

impl Layer {
    fn try_map<L, N, E>(
        &self,
        linear: &mut impl FnMut(&Linear) -> Result<L, E>,
        norm: &mut impl FnMut(&Norm) -> Result<N, E>,
    ) -> Result<Layer<L, N>, E> {
        let Attention { shape, qkv, out, qk_norm, rope } = &self.attention;
        let qk_norm = match qk_norm {
            Some(QkNorm { over, q, k }) => Some(QkNorm { over: *over, q: norm(q)?, k: norm(k)? }),
            None => None,
        };
        let attention = Attention { shape: *shape, qkv: linear(qkv)?, out: linear(out)?, qk_norm, rope: *rope };
        Ok(Layer { residual: self.residual.try_map(norm)?, branch_scale: self.branch_scale, attention, mlp: self.mlp.try_map(linear)? })
    }
}

impl Mlp {
    fn try_map<L, E>(&self, linear: &mut impl FnMut(&Linear) -> Result<L, E>) -> Result<Mlp<L>, E> {
        Ok(match self {
            Mlp::Plain { up, act, down } => Mlp::Plain { up: linear(up)?, act: *act, down: linear(down)? },
            Mlp::Gated { gate_up, act, down } => Mlp::Gated { gate_up: linear(gate_up)?, act: *act, down: linear(down)? },
            Mlp::Experts(experts) => Mlp::Experts(experts.try_map(linear)?),
        })
    }
}

impl Experts {
    fn try_map<L, E>(&self, linear: &mut impl FnMut(&Linear) -> Result<L, E>) -> Result<Experts<L>, E> {
        let mut expert = |expert: &Expert| Ok(Expert { gate_up: linear(&expert.gate_up)?, down: linear(&expert.down)? });
        let experts = self.experts.iter().map(&mut expert).collect::<Result<_, E>>()?;
        let shared = match &self.shared {
            Some(shared) => Some((expert(&shared.expert)?, linear(&shared.gate)?)),
            None => None,
        };
        Ok(Experts {
            router: linear(&self.router)?,
            routing: self.routing,
            act: self.act,
            experts,
            shared: shared.map(|(expert, gate)| SharedExpert { expert, gate }),
        })
    }
}

impl Residual {
    fn try_map<N, E>(&self, norm: &mut impl FnMut(&Norm) -> Result<N, E>) -> Result<Residual<N>, E> {
        Ok(match self {
            Residual::PreNorm { attention, mlp } => Residual::PreNorm { attention: norm(attention)?, mlp: norm(mlp)? },
            Residual::PostNorm { attention, mlp } => Residual::PostNorm { attention: norm(attention)?, mlp: norm(mlp)? },
            Residual::BranchNorm { attention, mlp } => Residual::BranchNorm { attention: norm(attention)?, mlp: norm(mlp)? },
            Residual::Parallel { attention, mlp } => {
                Residual::Parallel { attention: norm(attention)?, mlp: mlp.as_ref().map(norm).transpose()? }
            }
            Residual::Sandwich { attention, after_attention, mlp, after_mlp } => Residual::Sandwich {
                attention: norm(attention)?,
                after_attention: norm(after_attention)?,
                mlp: norm(mlp)?,
                after_mlp: norm(after_mlp)?,
            },
        })
    }
}

impl Head {
    fn try_map<L, E>(&self, linear: &mut impl FnMut(&Linear) -> Result<L, E>) -> Result<Head<L>, E> {
        Ok(Head {
            project: self.project.as_ref().map(&mut *linear).transpose()?,
            weight: self.weight.as_ref().map(linear).transpose()?,
            scale: self.scale,
            soft_cap: self.soft_cap,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_by_kv_head_are_found_where_they_lie() {
        let layout = Layout::ByKvHead { queries: 2, head_dim: 3 };
        // Two KV heads: q0 q1 k0 v0 q2 q3 k1 v1, three rows each.
        let heads = [0, 1, 4, 5, 2, 6, 3, 7];
        for row in 0..24 {
            assert_eq!(layout.run_at(24, row), (heads[row / 3] * 3 + row % 3, 3 - row % 3), "row {row}");
        }
        assert_eq!(Layout::OutIn.run_at(24, 5), (5, 19));
    }
}
