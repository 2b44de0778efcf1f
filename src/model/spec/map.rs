//! Replaces the leaves of a model, for example names of tensors by the tensors.

use super::{
    Attention, Embedding, Expert, Experts, Head, HeadAttention, LatentAttention, LatentQueries, Layer, LearnedPositions, Linear, Mlp,
    Model, Norm, QkNorm, Residual, SharedExpert, Vector,
};

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
            local: self.local.clone(),
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
