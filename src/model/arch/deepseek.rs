//! DeepSeek V2 and V3: latent attention, and experts. Each row is routed to a few experts of a few
//! groups, and all rows use the shared experts.

use super::super::config::Config;
use super::super::spec::*;
use super::base::{Base, DEFAULTS, Defaults, refuse_true};
use super::experts::{NAMES, expert, routing_among};
use super::rope::score_scale;
use super::{limits, standard_scale};
use crate::backend::{ExpertGroups, GroupScore, Scores, Values};
use crate::error::{Error, Result};

/// Epsilon of the norms inside attention, independent of the config's epsilon.
const EPS: f32 = 1e-6;

pub fn spec2(config: &Config) -> Result<ModelSpec> {
    refuse_true(config, &["norm_topk_prob"])?;
    must_be_one_of(config, "scoring_func", &["softmax"])?;
    let method = must_be_one_of(config, "topk_method", &["greedy", "group_limited_greedy"])?;
    let router = Router {
        scores: Scores::Softmax,
        normalized: false,
        scale: 1.0,
        groups: (method == "group_limited_greedy").then_some(GroupScore::Best),
    };
    spec(config, &DEFAULTS, router, Pairs::Neighbours)
}

pub fn spec3(config: &Config) -> Result<ModelSpec> {
    must_be_one_of(config, "scoring_func", &["sigmoid"])?;
    must_be_one_of(config, "topk_method", &["noaux_tc"])?;
    let config = &config.clone().or(&[("n_group", 8), ("topk_group", 4), ("first_k_dense_replace", 3)]);
    let router = Router {
        scores: Scores::Sigmoid,
        normalized: config.flag_or("norm_topk_prob", true)?,
        scale: 2.5,
        groups: Some(GroupScore::BestTwo),
    };
    let pairs = if config.flag_or("rope_interleave", true)? { Pairs::Neighbours } else { Pairs::Halves };
    let mut model = spec(config, &Defaults { positions: 4096, ..DEFAULTS }, router, pairs)?;
    model.spare_layers = config.whole_or("num_nextn_predict_layers", limits::MAX_LAYERS, 0)?;
    Ok(model)
}

fn spec(config: &Config, defaults: &Defaults, router: Router, pairs: Pairs) -> Result<ModelSpec> {
    // `head_dim` of the config is ignored: this field has the number of rotated dimensions.
    let rotated = config.count("qk_rope_head_dim", limits::MAX_HEAD_DIM)?;
    let base = Base::read(&config.clone().with("head_dim", rotated), defaults)?;
    let base = Base { rope: Rope { pairs, ..base.rope }, ..base };
    let moe_layer_freq = config.whole_or("moe_layer_freq", limits::MAX_LAYERS, 1)?;
    if moe_layer_freq != 1 {
        return Err(Error::unsupported(format!("config.json: moe_layer_freq is {moe_layer_freq}; only 1 is supported")));
    }
    limits::check_tensor_count(base.layers, 2 * base.shape.heads, "matrices of heads")?;
    let latent = Latent::read(config, base.shape.heads, rotated)?;
    let dense = config.whole_or("first_k_dense_replace", limits::MAX_LAYERS, 0)?;
    let sparse = Sparse::read(config, router.routing(config, base.layers)?)?;
    Ok(base.model(|i| Layer {
        attention: Attention::Latent(latent.attention(&base, i)),
        mlp: if i < dense { base.gated_mlp(i) } else { sparse.mlp(&base, i) },
        ..base.layer(i)
    }))
}

struct Latent {
    heads: usize,
    /// Unrotated dimensions of a head's query. `rotated` is the number of rotated ones.
    unrotated: usize,
    rotated: usize,
    values: usize,
    rank: usize,
    query_rank: Option<usize>,
    scale: f32,
    bias: bool,
}

impl Latent {
    fn read(config: &Config, heads: usize, rotated: usize) -> Result<Latent> {
        let dim = |name| config.count(name, limits::MAX_HEAD_DIM);
        let unrotated = dim("qk_nope_head_dim")?;
        Ok(Latent {
            heads,
            unrotated,
            rotated,
            values: dim("v_head_dim")?,
            rank: dim("kv_lora_rank")?,
            query_rank: if config.has("q_lora_rank") { Some(config.count("q_lora_rank", limits::MAX_WIDTH)?) } else { None },
            scale: score_scale(config)? * standard_scale(unrotated + rotated),
            bias: config.flag_or("attention_bias", false)?,
        })
    }

    fn attention(&self, base: &Base, layer: usize) -> LatentAttention {
        let Latent { heads, unrotated, rotated, values, rank, .. } = *self;
        let named = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let norm = |name, width| Norm::new(named(name), width, base.norms.kind, EPS);
        let order = RowOrder::ByHead { unrotated, rotated };
        let queries = |name, cols| Linear::new(named(name), heads * (unrotated + rotated), cols).order(order);
        // kv_b_proj has for each head the rows that expand a latent to its key, and then those that
        // expand it to its value.
        let of_head =
            |first, rows| TensorPart { name: named("kv_b_proj"), rows, source: Source::Rows { first, of: heads * (unrotated + values) } };
        let first = |head| head * (unrotated + values);
        LatentAttention {
            shape: AttentionShape { values: Values::OfKeys(rank), ..AttentionShape::new(heads, 1, rank + rotated, self.scale) },
            unrotated,
            queries: match self.query_rank {
                None => LatentQueries::Direct(queries("q_proj", base.hidden)),
                Some(between) => LatentQueries::LowRank {
                    down: Linear::new(named("q_a_proj"), between, base.hidden).bias(self.bias),
                    norm: norm("q_a_layernorm", between),
                    up: queries("q_b_proj", between),
                },
            },
            latent: Linear::new(named("kv_a_proj_with_mqa"), rank + rotated, base.hidden).bias(self.bias),
            norm: norm("kv_a_layernorm", rank),
            rope: 0,
            keys: (0..heads).map(|head| Linear::stack(vec![of_head(first(head), rank)], unrotated).layout(Layout::InOut)).collect(),
            values: (0..heads).map(|head| Linear::stack(vec![of_head(first(head) + unrotated, values)], rank)).collect(),
            out: Linear::new(named("o_proj"), base.hidden, heads * values).bias(self.bias),
        }
    }
}

struct Sparse {
    routing: Routing,
    inner: usize,
    /// Total width of the shared experts, which are merged into one.
    shared: Option<usize>,
}

impl Sparse {
    fn read(config: &Config, routing: Routing) -> Result<Sparse> {
        let inner = config.count("moe_intermediate_size", limits::MAX_WIDTH)?;
        let shared = if config.has("n_shared_experts") { Some(config.count("n_shared_experts", limits::MAX_EXPERTS)?) } else { None };
        Ok(Sparse { routing, inner, shared: shared.map(|shared| shared * inner) })
    }

    fn mlp(&self, base: &Base, layer: usize) -> Mlp {
        let mlp = format!("layers.{layer}.mlp");
        let correction = Vector::new(format!("{mlp}.gate.e_score_correction_bias"), self.routing.experts);
        let expert = |name: &str, inner| expert(&format!("{mlp}.{name}"), NAMES, base.hidden, inner);
        Mlp::Experts(Experts {
            router: Linear::new(format!("{mlp}.gate"), self.routing.experts, base.hidden),
            correction: (self.routing.scores == Scores::Sigmoid).then_some(correction),
            routing: self.routing,
            glu: Glu::Of(base.act),
            experts: (0..self.routing.experts).map(|e| expert(&format!("experts.{e}"), self.inner)).collect(),
            shared: self.shared.map(|inner| SharedExpert { expert: expert("shared_experts", inner), gate: None }),
            local: None,
        })
    }
}

/// The routing parameters that differ between the two generations.
struct Router {
    scores: Scores,
    normalized: bool,
    /// Default of `routed_scaling_factor`.
    scale: f64,
    /// Score of a group of experts. None: there are no groups.
    groups: Option<GroupScore>,
}

impl Router {
    fn routing(&self, config: &Config, layers: usize) -> Result<Routing> {
        let plain = routing_among(config, "n_routed_experts", layers, self.normalized)?;
        let groups = self.groups.map(|score| expert_groups(config, plain, score)).transpose()?;
        let scale = config.positive_or("routed_scaling_factor", self.scale)? as f32;
        Ok(Routing { scores: self.scores, scale, groups, ..plain })
    }
}

/// Returns the config's value. The default is the first supported value; unsupported values are an
/// error.
fn must_be_one_of<'a>(config: &'a Config, name: &str, supported: &[&'a str]) -> Result<&'a str> {
    let said = config.text_or(name, supported[0])?;
    if !supported.contains(&said) {
        let supported = supported.join(", ");
        return Err(Error::unsupported(format!("config.json: {name} is {said}; supported in this family: {supported}")));
    }
    Ok(said)
}

fn expert_groups(config: &Config, Routing { experts, top_k, .. }: Routing, score: GroupScore) -> Result<ExpertGroups> {
    let (count, chosen) = (config.count("n_group", ExpertGroups::MAX_COUNT)?, config.count("topk_group", ExpertGroups::MAX_COUNT)?);
    let min = if score == GroupScore::BestTwo { 2 } else { 1 };
    if !experts.is_multiple_of(count) || experts / count < min || chosen > count || chosen * (experts / count) < top_k {
        return Err(Error::model(format!(
            "config.json: inconsistent expert groups (n_group {count}, topk_group {chosen}, {experts} experts, num_experts_per_tok {top_k}); \
             n_group must divide the experts into groups of at least {min}, of which topk_group must have num_experts_per_tok experts"
        )));
    }
    Ok(ExpertGroups { count, chosen, score })
}
