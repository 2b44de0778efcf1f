//! An architecture as data. Sum types exclude invalid combinations.
//!
//! The types are generic over their leaves. A spec has names and shapes of its weights (`Linear`,
//! `Norm`, `Vector`), a loaded model the weights themselves, in the same structure.

use std::convert::Infallible;

pub use crate::backend::{Act, AttentionShape, Glu, NormKind, Pairs, Routing};

/// A decoder-only transformer.
#[derive(Debug, Clone)]
pub struct Model<L = Linear, N = Norm, V = Vector> {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Maximum sequence length in positions.
    pub max_positions: usize,
    pub embedding: Embedding<L>,
    /// The rotary embeddings, to which layers refer by index.
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer<L, N, V>>,
    /// Number of layers in the checkpoint after these, which inference does not use (multi-token
    /// prediction).
    pub spare_layers: usize,
    pub final_norm: Option<N>,
    pub head: Head<L>,
}

pub type ModelSpec = Model;

impl ModelSpec {
    /// Returns true if one tensor holds all experts of a layer.
    pub fn has_experts_in_one_tensor(&self) -> bool {
        let in_one = |expert: &Expert| matches!(expert.down.parts[0].source, Source::Expert { .. });
        self.layers.iter().any(|layer| matches!(&layer.mlp, Mlp::Experts(experts) if experts.experts.iter().any(in_one)))
    }

    /// Returns the maximum number of columns of a matrix.
    pub fn max_cols(&self) -> usize {
        let mut max_cols = 0;
        let widest = |linear: &Linear, _| {
            max_cols = max_cols.max(linear.cols);
            Ok::<(), Infallible>(())
        };
        let Ok(_) = self.try_map(widest, |_| Ok(()), |_| Ok(()));
        max_cols
    }

    /// Selects the rotary frequencies for sequences of at most `max_len` positions.
    pub fn fit(&mut self, max_len: usize) {
        self.ropes.iter_mut().for_each(|rope| rope.fit(max_len));
    }
}

#[derive(Debug, Clone)]
pub struct Embedding<L = Linear> {
    pub tokens: L,
    /// Factor of the token embeddings.
    pub scale: f32,
    /// Projection from the embedding's width to the hidden size, if they differ.
    pub project: Option<L>,
    pub positions: Option<LearnedPositions<L>>,
}

#[derive(Debug, Clone)]
pub struct LearnedPositions<L = Linear> {
    pub table: L,
    /// Row of position 0 in the table.
    pub offset: usize,
}

/// A rotary embedding: pairs of dimensions are rotated by these frequencies (radians per position).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub frequencies: Vec<f32>, // [rotated dimensions / 2]
    pub amplitude: f32,
    pub pairs: Pairs,
    /// Factor by which sequences may exceed the config's positions.
    pub stretch: f64,
    pub long: Option<Long>,
}

/// Frequencies for sequences longer than `beyond` positions. They depend on the maximum length of
/// the engine instead of the length of a sequence. So cached K stays valid, and a sequence's
/// results do not depend on other sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct Long {
    pub beyond: usize,
    pub how: Longer,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Longer {
    /// Explicit frequencies.
    Other(Vec<f32>),
    /// A base that grows with the length.
    Dynamic { theta: f64, factor: f64 },
}

impl Rope {
    /// 1 / theta^(2i / dims) for each pair i.
    pub fn frequencies(theta: f64, dims: usize) -> Vec<f32> {
        (0..dims / 2).map(|i| (1.0 / theta.powf((2 * i) as f64 / dims as f64)) as f32).collect()
    }

    /// Returns the maximum sequence length of a model whose config has `positions`.
    pub fn reach(&self, positions: usize) -> usize {
        positions.max((positions as f64 * self.stretch) as usize)
    }

    /// Selects the frequencies for sequences of at most `max_len` positions.
    pub fn fit(&mut self, max_len: usize) {
        let dims = self.rotated();
        let Some(Long { how, beyond }) = self.long.take_if(|long| max_len > long.beyond) else { return };
        self.frequencies = match how {
            Longer::Other(frequencies) => frequencies,
            Longer::Dynamic { theta, factor } => {
                let stretch = factor * max_len as f64 / beyond as f64 - (factor - 1.0);
                Rope::frequencies(theta * stretch.powf(dims as f64 / (dims as f64 - 2.0)), dims)
            }
        };
    }

    /// Returns the number of rotated dimensions of a head.
    pub fn rotated(&self) -> usize {
        2 * self.frequencies.len()
    }
}

#[derive(Debug, Clone)]
pub struct Layer<L = Linear, N = Norm, V = Vector> {
    pub residual: Residual<N>,
    /// Factor of the outputs of attention and MLP before they are added to the residual stream.
    pub branch_scale: f32,
    pub attention: Attention<L, N, V>,
    pub mlp: Mlp<L, V>,
}

/// The positions of a layer's norms relative to its two residual additions.
#[derive(Debug, Clone)]
pub enum Residual<N = Norm> {
    /// x += attention(norm(x)); x += mlp(norm(x))
    PreNorm { attention: N, mlp: N },
    /// x = norm(x + attention(x)); x = norm(x + mlp(x))
    PostNorm { attention: N, mlp: N },
    /// x += attention(norm(x)) + mlp(norm(x)), with one norm for both if `mlp` is None
    Parallel { attention: N, mlp: Option<N> },
    /// x += norm(attention(x)); x += norm(mlp(x))
    BranchNorm { attention: N, mlp: N },
    /// x += norm(attention(norm(x))); x += norm(mlp(norm(x)))
    Sandwich { attention: N, after_attention: N, mlp: N, after_mlp: N },
}

#[derive(Debug, Clone)]
pub enum Attention<L = Linear, N = Norm, V = Vector> {
    Heads(HeadAttention<L, N, V>),
    Latent(LatentAttention<L, N>),
}

/// Attention with keys and values per KV head.
#[derive(Debug, Clone)]
pub struct HeadAttention<L = Linear, N = Norm, V = Vector> {
    pub shape: AttentionShape,
    /// Queries, keys and values, stacked into one product.
    pub qkv: L,
    pub out: L,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm<N>>,
    /// Index into `Model::ropes`. None: no rotary embedding.
    pub rope: Option<usize>,
    /// `[heads]` Attention sinks: scores without a value, which take part in the softmax.
    pub sinks: Option<V>,
}

/// Latent attention (MLA). The cache holds one latent per token for all heads, and a rotated key
/// that all heads share. Keys and values of heads are not computed: the key matrices are applied to
/// the queries, and the value matrices to the attention output.
#[derive(Debug, Clone)]
pub struct LatentAttention<L = Linear, N = Norm> {
    /// Shape of attention over latents. The values are the first dimensions of the keys, which are
    /// not rotated.
    pub shape: AttentionShape,
    /// Unrotated dimensions of a head's query.
    pub unrotated: usize,
    pub queries: LatentQueries<L, N>,
    /// Projection from the hidden size to the latent and the rotated key.
    pub latent: L,
    /// Norm of the unrotated part of the latent.
    pub norm: N,
    /// Index into `Model::ropes`.
    pub rope: usize,
    /// `[heads]` Matrix from the unrotated part of a query to latent space.
    pub keys: Vec<L>,
    /// `[heads]` Matrix from the attention output in latent space to values.
    pub values: Vec<L>,
    pub out: L,
}

/// The query projection. Its output has the unrotated parts of all heads, followed by the rotated
/// parts of all heads.
#[derive(Debug, Clone)]
pub enum LatentQueries<L = Linear, N = Norm> {
    Direct(L),
    /// up(norm(down(x)))
    LowRank {
        down: L,
        norm: N,
        up: L,
    },
}

impl<L, N, V> Attention<L, N, V> {
    pub fn shape(&self) -> &AttentionShape {
        match self {
            Attention::Heads(HeadAttention { shape, .. }) | Attention::Latent(LatentAttention { shape, .. }) => shape,
        }
    }

    pub fn out(&self) -> &L {
        match self {
            Attention::Heads(HeadAttention { out, .. }) | Attention::Latent(LatentAttention { out, .. }) => out,
        }
    }

    pub fn shape_mut(&mut self) -> &mut AttentionShape {
        match self {
            Attention::Heads(HeadAttention { shape, .. }) | Attention::Latent(LatentAttention { shape, .. }) => shape,
        }
    }
}

impl From<HeadAttention> for Attention {
    fn from(attention: HeadAttention) -> Attention {
        Attention::Heads(attention)
    }
}

#[derive(Debug, Clone)]
pub struct QkNorm<N = Norm> {
    pub over: QkNormOver,
    pub q: N,
    pub k: N,
}

/// The numbers over which a norm is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormOver {
    EachHead,
    AllHeads,
}

#[derive(Debug, Clone)]
pub enum Mlp<L = Linear, V = Vector> {
    /// down(act(up(x)))
    Plain { up: L, act: Act, down: L },
    /// down(act(gate(x)) * up(x)), with gate and up stacked into one product
    Gated { gate_up: L, act: Act, down: L },
    /// Gated MLPs, of which each row uses those with the best router scores.
    Experts(Experts<L, V>),
}

#[derive(Debug, Clone)]
pub struct Experts<L = Linear, V = Vector> {
    /// Projection from the hidden size to one logit per expert.
    pub router: L,
    /// `[experts]` Correction of the scores in the choice of experts.
    pub correction: Option<V>,
    pub routing: Routing,
    pub glu: Glu,
    pub experts: Vec<Expert<L>>,
    pub shared: Option<SharedExpert<L>>,
}

#[derive(Debug, Clone)]
pub struct Expert<L = Linear> {
    /// Gate and up, stacked into one product.
    pub gate_up: L,
    pub down: L,
}

/// An expert that every row uses: adds expert(x), or sigmoid(gate(x)) * expert(x).
#[derive(Debug, Clone)]
pub struct SharedExpert<L = Linear> {
    pub expert: Expert<L>,
    pub gate: Option<L>,
}

/// The projection from the last hidden state to logits.
#[derive(Debug, Clone)]
pub struct Head<L = Linear> {
    /// Projection from the hidden size to the embedding's width, if they differ.
    pub project: Option<L>,
    /// None: tied to the token embedding.
    pub weight: Option<L>,
    pub scale: f32,
    pub soft_cap: Option<f32>,
}

/// The role of a matrix, which determines its weight format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix within a layer, or a projection before or after all layers.
    Inner,
    /// A matrix with one row per token of the vocabulary.
    Vocabulary,
    /// A matrix that keeps its storage type, because it is sensitive to rounding or belongs to a
    /// single head.
    Exact,
}

/// The location of a matrix of `[rows of all parts, cols]` and its bias in the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    /// Stacked along the rows.
    pub parts: Vec<TensorPart>,
    pub cols: usize,
    pub bias: bool,
    pub layout: Layout,
    pub order: RowOrder,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TensorPart {
    pub name: String,
    pub rows: usize,
    pub source: Source,
}

/// The tensors of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// `{name}.weight` and `{name}.bias`, which belong to this part only.
    Own,
    /// `{name}` and `{name}_bias`, which hold all experts one after the other.
    Expert { index: usize, count: usize },
    /// `{name}.weight`, rows from `first` on, of `of` rows in the file.
    Rows { first: usize, of: usize },
}

/// The layout of a part in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `[out, in]`, like Linear in PyTorch.
    OutIn,
    /// `[in, out]`, like Conv1D in GPT-2.
    InOut,
}

/// The order of a part's rows in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// The order of the loaded matrix.
    Same,
    /// For each KV head: its queries, key and value. Loaded order: all queries, all keys, all
    /// values.
    ByKvHead { queries: usize, head_dim: usize },
    /// Rows of the first and of the second half alternate.
    Alternating,
    /// For each head: unrotated and rotated rows. Loaded order: unrotated rows of all heads,
    /// rotated rows of all heads.
    ByHead { unrotated: usize, rotated: usize },
}

/// Rows of a part that are consecutive in the loaded matrix. In the file, they begin at `first` and
/// are `step` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first: usize,
    pub rows: usize,
    pub step: usize,
}

impl RowOrder {
    /// Returns the max_len run in the file that begins at loaded row `row` of a part with `rows`
    /// rows.
    pub fn run_at(self, rows: usize, row: usize) -> Run {
        let run = |(first, rows)| Run { first, rows, step: 1 };
        let half = rows / 2;
        match self {
            RowOrder::Same => run((row, rows - row)),
            RowOrder::Alternating => Run { first: row % half * 2 + row / half, rows: half - row % half, step: 2 },
            RowOrder::ByHead { unrotated, rotated } => {
                let dim = unrotated + rotated;
                run(match row.checked_sub(rows / dim * unrotated) {
                    None => (row / unrotated * dim + row % unrotated, unrotated - row % unrotated),
                    Some(row) => (row / rotated * dim + unrotated + row % rotated, rotated - row % rotated),
                })
            }
            RowOrder::ByKvHead { queries, head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let kv_heads = rows / head_dim / (queries + 2);
                let (group, member) = match head.checked_sub(queries * kv_heads) {
                    None => (head / queries, head % queries),
                    Some(after) => (after % kv_heads, queries + after / kv_heads),
                };
                run(((group * (queries + 2) + member) * head_dim + within, head_dim - within))
            }
        }
    }
}

impl TensorPart {
    pub fn own(name: impl Into<String>, rows: usize) -> TensorPart {
        TensorPart { name: name.into(), rows, source: Source::Own }
    }

    pub fn weight(&self) -> String {
        match self.source {
            Source::Own | Source::Rows { .. } => format!("{}.weight", self.name),
            Source::Expert { .. } => self.name.clone(),
        }
    }

    pub fn bias(&self) -> String {
        match self.source {
            Source::Own | Source::Rows { .. } => format!("{}.bias", self.name),
            Source::Expert { .. } => format!("{}_bias", self.name),
        }
    }

    /// Returns the shape of the whole tensor. `shape` is that of the part.
    pub fn tensor_shape(&self, shape: &[usize]) -> Vec<usize> {
        match self.source {
            Source::Own => shape.to_vec(),
            Source::Expert { count, .. } => [&[count], shape].concat(),
            Source::Rows { of, .. } => [&[of], &shape[1..]].concat(),
        }
    }

    /// Returns the number of elements of the tensor before the part.
    pub fn offset(&self, shape: &[usize]) -> usize {
        match self.source {
            Source::Own => 0,
            Source::Expert { index, .. } => index * shape.iter().product::<usize>(),
            Source::Rows { first, .. } => first * shape[1..].iter().product::<usize>(),
        }
    }
}

impl Linear {
    pub fn new(name: impl Into<String>, rows: usize, cols: usize) -> Linear {
        Linear::stack(vec![TensorPart::own(name, rows)], cols)
    }

    pub fn stack(parts: Vec<TensorPart>, cols: usize) -> Linear {
        Linear { parts, cols, bias: false, layout: Layout::OutIn, order: RowOrder::Same }
    }

    pub fn bias(self, bias: bool) -> Linear {
        Linear { bias, ..self }
    }

    pub fn layout(self, layout: Layout) -> Linear {
        Linear { layout, ..self }
    }

    pub fn order(self, order: RowOrder) -> Linear {
        Linear { order, ..self }
    }

    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Returns the shape of a part in its file.
    pub fn stored_shape(&self, part: &TensorPart) -> [usize; 2] {
        if self.layout == Layout::InOut { [self.cols, part.rows] } else { [part.rows, self.cols] }
    }
}

/// A one-dimensional tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Vector {
    pub name: String,
    pub len: usize,
}

/// The weight and bias of a norm.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// Names of the tensors without ".weight", which are concatenated.
    pub parts: Vec<String>,
    /// Shape of each part.
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

impl HeadAttention {
    /// Returns separate q, k and v projections, stacked; most families name them
    /// `{layer}.{q,k,v}_proj`.
    pub fn stacked_qkv(layer: &str, names: [&str; 3], shape: &AttentionShape, hidden: usize) -> Linear {
        let widths = [shape.q_width(), shape.kv_width(), shape.kv_width()];
        Linear::stack(names.iter().zip(widths).map(|(name, width)| TensorPart::own(format!("{layer}.{name}"), width)).collect(), hidden)
    }
}

impl Model {
    /// Returns the same structure with each leaf replaced by the result of `linear`, `norm` or
    /// `vector`.
    pub fn try_map<L, N, V, E>(
        &self,
        mut linear: impl FnMut(&Linear, Role) -> Result<L, E>,
        mut norm: impl FnMut(&Norm) -> Result<N, E>,
        mut vector: impl FnMut(&Vector) -> Result<V, E>,
    ) -> Result<Model<L, N, V>, E> {
        let mut leaves = Leaves { linear: &mut linear, norm: &mut norm, vector: &mut vector };
        let layers = self.layers.iter().map(|layer| layer.try_map(&mut leaves)).collect::<Result<_, E>>()?;
        Ok(Model {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            max_positions: self.max_positions,
            embedding: self.embedding.try_map(&mut linear)?,
            ropes: self.ropes.clone(),
            layers,
            spare_layers: self.spare_layers,
            final_norm: self.final_norm.as_ref().map(norm).transpose()?,
            head: self.head.try_map(&mut linear)?,
        })
    }
}

/// The functions that replace the leaves of a layer.
struct Leaves<'a, L, N, V, E> {
    linear: &'a mut dyn FnMut(&Linear, Role) -> Result<L, E>,
    norm: &'a mut dyn FnMut(&Norm) -> Result<N, E>,
    vector: &'a mut dyn FnMut(&Vector) -> Result<V, E>,
}

impl Embedding {
    fn try_map<L, E>(&self, linear: &mut impl FnMut(&Linear, Role) -> Result<L, E>) -> Result<Embedding<L>, E> {
        let positions = match &self.positions {
            Some(LearnedPositions { table, offset }) => Some(LearnedPositions { table: linear(table, Role::Exact)?, offset: *offset }),
            None => None,
        };
        Ok(Embedding {
            tokens: linear(&self.tokens, Role::Vocabulary)?,
            scale: self.scale,
            project: self.project.as_ref().map(|project| linear(project, Role::Inner)).transpose()?,
            positions,
        })
    }
}

impl Layer {
    fn try_map<L, N, V, E>(&self, leaves: &mut Leaves<L, N, V, E>) -> Result<Layer<L, N, V>, E> {
        Ok(Layer {
            residual: self.residual.try_map(&mut leaves.norm)?,
            branch_scale: self.branch_scale,
            attention: match &self.attention {
                Attention::Heads(heads) => Attention::Heads(heads.try_map(leaves)?),
                Attention::Latent(latent) => Attention::Latent(latent.try_map(leaves)?),
            },
            mlp: self.mlp.try_map(leaves)?,
        })
    }
}

impl HeadAttention {
    fn try_map<L, N, V, E>(&self, Leaves { linear, norm, vector }: &mut Leaves<L, N, V, E>) -> Result<HeadAttention<L, N, V>, E> {
        let HeadAttention { shape, qkv, out, qk_norm, rope, sinks } = self;
        let qk_norm = match qk_norm {
            Some(QkNorm { over, q, k }) => Some(QkNorm { over: *over, q: norm(q)?, k: norm(k)? }),
            None => None,
        };
        let sinks = sinks.as_ref().map(vector).transpose()?;
        Ok(HeadAttention { shape: *shape, qkv: linear(qkv, Role::Inner)?, out: linear(out, Role::Inner)?, qk_norm, rope: *rope, sinks })
    }
}

impl LatentAttention {
    fn try_map<L, N, V, E>(&self, Leaves { linear, norm, .. }: &mut Leaves<L, N, V, E>) -> Result<LatentAttention<L, N>, E> {
        let queries = match &self.queries {
            LatentQueries::Direct(queries) => LatentQueries::Direct(linear(queries, Role::Inner)?),
            LatentQueries::LowRank { down, norm: between, up } => {
                LatentQueries::LowRank { down: linear(down, Role::Inner)?, norm: norm(between)?, up: linear(up, Role::Inner)? }
            }
        };
        Ok(LatentAttention {
            shape: self.shape,
            unrotated: self.unrotated,
            queries,
            latent: linear(&self.latent, Role::Inner)?,
            norm: norm(&self.norm)?,
            rope: self.rope,
            keys: self.keys.iter().map(|head| linear(head, Role::Exact)).collect::<Result<_, E>>()?,
            values: self.values.iter().map(|head| linear(head, Role::Exact)).collect::<Result<_, E>>()?,
            out: linear(&self.out, Role::Inner)?,
        })
    }
}

impl Mlp {
    fn try_map<L, N, V, E>(&self, leaves: &mut Leaves<L, N, V, E>) -> Result<Mlp<L, V>, E> {
        let mut inner = |linear: &Linear| (leaves.linear)(linear, Role::Inner);
        Ok(match self {
            Mlp::Plain { up, act, down } => Mlp::Plain { up: inner(up)?, act: *act, down: inner(down)? },
            Mlp::Gated { gate_up, act, down } => Mlp::Gated { gate_up: inner(gate_up)?, act: *act, down: inner(down)? },
            Mlp::Experts(experts) => Mlp::Experts(experts.try_map(leaves)?),
        })
    }
}

impl Experts {
    fn try_map<L, N, V, E>(&self, Leaves { linear, vector, .. }: &mut Leaves<L, N, V, E>) -> Result<Experts<L, V>, E> {
        let mut expert =
            |expert: &Expert| Ok(Expert { gate_up: linear(&expert.gate_up, Role::Inner)?, down: linear(&expert.down, Role::Inner)? });
        let experts = self.experts.iter().map(&mut expert).collect::<Result<_, E>>()?;
        let shared = match &self.shared {
            Some(shared) => Some((expert(&shared.expert)?, shared.gate.as_ref().map(|gate| linear(gate, Role::Exact)).transpose()?)),
            None => None,
        };
        Ok(Experts {
            router: linear(&self.router, Role::Exact)?,
            correction: self.correction.as_ref().map(vector).transpose()?,
            routing: self.routing,
            glu: self.glu,
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
    fn try_map<L, E>(&self, linear: &mut impl FnMut(&Linear, Role) -> Result<L, E>) -> Result<Head<L>, E> {
        Ok(Head {
            project: self.project.as_ref().map(|project| linear(project, Role::Inner)).transpose()?,
            weight: self.weight.as_ref().map(|weight| linear(weight, Role::Vocabulary)).transpose()?,
            scale: self.scale,
            soft_cap: self.soft_cap,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the file position of each row, and checks that runs are consistent with it.
    fn places(order: RowOrder, rows: usize) -> Vec<usize> {
        let first = |row| order.run_at(rows, row).first;
        for row in 0..rows {
            let run = order.run_at(rows, row);
            assert!(run.rows > 0 && row + run.rows <= rows);
            (0..run.rows).for_each(|next| assert_eq!(first(row + next), run.first + next * run.step, "{order:?}, row {row}"));
        }
        (0..rows).map(first).collect()
    }

    #[test]
    fn row_orders_give_the_file_position_of_each_row() {
        assert_eq!(places(RowOrder::Same, 3), [0, 1, 2]);
        assert_eq!(places(RowOrder::Alternating, 6), [0, 2, 4, 1, 3, 5]);
        // Two heads of 3 dimensions, the last of which is rotated.
        assert_eq!(places(RowOrder::ByHead { unrotated: 2, rotated: 1 }, 6), [0, 1, 3, 4, 2, 5]);
        // Two KV heads of one dimension: q0 q1 k0 v0 q2 q3 k1 v1.
        assert_eq!(places(RowOrder::ByKvHead { queries: 2, head_dim: 1 }, 8), [0, 1, 4, 5, 2, 6, 3, 7]);
        let wide = places(RowOrder::ByKvHead { queries: 2, head_dim: 3 }, 24);
        assert_eq!(wide[6..12], [12, 13, 14, 15, 16, 17]);
    }
}
