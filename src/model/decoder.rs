//! The forward pass: interprets a spec, layer by layer, on any backend.

use super::kv_layout::{KvLayout, LayerPlace};
use super::spec::{
    Attention, AttentionShape, Embedding, Expert, Experts, Glu, Head, HeadAttention, Layer, Mlp, Model, ModelSpec, Pairs, QkNorm,
    QkNormOver, Residual, Rope, Routing, SharedExpert,
};
use super::weights::{LoadedLinear, LoadedModel, LoadedNorm};
use crate::backend::{
    Activation, Alloc, Backend, BackendTypes, BatchSize, Extent, HeadGroups, Heads, InputLimits, KvOps, KvShape, MlpOf, Ops,
    RotaryEmbedding,
};
use crate::error::{Error, Result};
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::types::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::types::options::KvDtype;

/// The paged KV cache of all layers.
pub struct KvCache<B: BackendTypes> {
    levels: Vec<B::Kv>,
    places: Vec<LayerPlace>, // [layers]
    groups: usize,
    host: Option<B::Host>,
}

impl<B: KvOps> KvCache<B> {
    pub fn new(backend: &B, spec: &ModelSpec, pool: KvPool) -> Result<KvCache<B>> {
        let layout = KvLayout::for_spec(spec);
        let levels = layout.of_levels(&spec.layers).map(|layer| backend.kv(pool.shape(layer))).collect::<Result<_>>()?;
        Ok(KvCache { levels, groups: layout.windows.len(), places: layout.places().to_vec(), host: None })
    }

    /// Adds a host tier in memory for swapped-out blocks.
    pub fn add_host_tier(&mut self, backend: &B, blocks: usize, block_bytes: u64) -> Result<()> {
        self.host = Some(backend.host(blocks, block_bytes)?);
        Ok(())
    }

    pub fn swap_out(&mut self, backend: &B, moves: &[BlockMove]) -> Result<()> {
        backend.swap_out(moves, &self.levels, self.host.as_mut().ok_or_else(no_host)?)
    }

    pub fn swap_in(&mut self, backend: &B, moves: &[BlockMove]) -> Result<()> {
        backend.swap_in(moves, self.host.as_mut().ok_or_else(no_host)?, &mut self.levels)
    }

    /// Appends the bytes of a sequence's blocks, level by level.
    /// Returns the bytes of a block of the host tier. Without a tier there are none.
    pub fn host_block(&mut self, backend: &B, block: usize) -> &mut [u8] {
        self.host.as_mut().map_or(&mut [], |host| backend.host_block(host, block))
    }

    pub fn read(&self, backend: &B, blocks: &[u32], tail: Tail, out: &mut Vec<u8>) -> Result<()> {
        self.levels.iter().try_for_each(|level| backend.read_blocks(blocks, tail, level, out))
    }

    /// Returns the bytes of one block in each of the arrays in which `read` stores blocks.
    pub fn part_bytes(&self, backend: &B) -> Vec<usize> {
        self.levels.iter().flat_map(|level| backend.kv_part_bytes(level)).collect()
    }

    pub fn write(&mut self, backend: &B, blocks: &[u32], bytes: &[u8]) -> Result<()> {
        self.levels.iter_mut().try_fold(bytes, |bytes, level| backend.write_blocks(blocks, level, bytes)).map(|_| ())
    }

    /// Copies whole blocks. An asynchronous device reports errors at the next read.
    pub fn copy(&mut self, backend: &B, copies: &[BlockCopy]) {
        backend.copy_blocks(copies, &mut self.levels);
    }

    /// Returns the memory of all blocks from index `blocks` on to the system, on all levels. An
    /// error on one level does not skip the others.
    pub fn discard(&mut self, backend: &B, blocks: usize) -> Result<()> {
        self.levels.iter_mut().map(|level| backend.discard_blocks(blocks, level)).fold(Ok(()), Result::and)
    }

    /// Returns a description of the KV layout of all layers.
    pub fn layout(&self, backend: &B) -> String {
        let levels = self.levels.iter().map(|level| backend.kv_layout(level)).collect::<Vec<_>>().join("; ");
        if self.groups == 1 { levels } else { format!("{} groups of {levels}", self.groups) }
    }
}

fn no_host() -> Error {
    Error::internal("swap without a host tier")
}

/// The size of a KV cache.
#[derive(Debug, Clone, Copy)]
pub struct KvPool {
    pub blocks: usize,
    pub block_size: usize,
    pub dtype: KvDtype,
}

impl KvPool {
    fn shape<L, N, V>(&self, layer: &Layer<L, N, V>) -> KvShape {
        let AttentionShape { kv_heads, head_dim, values, .. } = *layer.attention.shape();
        KvShape { blocks: self.blocks, block_size: self.block_size, kv_heads, head_dim, values, dtype: self.dtype }
    }

    /// Returns the bytes of one block: one layer of each level.
    pub fn block_bytes<B: KvOps>(&self, backend: &B, spec: &ModelSpec) -> u64 {
        KvLayout::for_spec(spec).of_levels(&spec.layers).map(|layer| backend.kv_block_bytes(&self.shape(layer))).sum()
    }
}

/// The largest batch, which determines the size of the activations.
#[derive(Debug, Clone, Copy)]
pub struct BatchLimits {
    pub tokens: usize,
    pub logits: usize,
}

impl BatchLimits {
    fn draws(&self, spec: &ModelSpec) -> DeviceSamplingLimits {
        DeviceSamplingLimits::for_rows(self.logits, spec.vocab_size)
    }
}

pub struct Decoder<B: Backend> {
    backend: B,
    model: LoadedModel<B>,
    work: Work<B>,
    inputs: B::Inputs,
    device_sampler: Option<B::Sampler>,
    draw_limits: DeviceSamplingLimits,
}

/// The activations. Each buffer has the width of the widest layer.
struct Work<B: BackendTypes> {
    x: B::Buf,      // [rows, hidden] the residual stream
    normed: B::Buf, // [rows, hidden or embedding width]
    delta: B::Buf,  // [rows, hidden or embedding width] output of a branch
    scratch: Scratch<B>,
    angles: Vec<Angles<B>>,
}

/// Intermediate results of attention, MLP and head. A row has one route per expert that it is
/// routed to.
pub(super) struct Scratch<B: BackendTypes> {
    pub wide: B::Buf,    // [rows, qkv], [MLP rows, up] or [routes, up]; in the head [logits, vocab]
    pub narrow: B::Buf,  // [rows, attention output or experts], [MLP rows, gated] or [routes, gated]
    pub routed: B::Buf,  // [routes, hidden] or [heads, rows, head]
    pub queries: B::Buf, // [rows, queries over latents of all heads]
    routes: B::Routes,
}

/// The rotary angles of all rows, for one rotary embedding.
pub(super) struct Angles<B: BackendTypes> {
    pub rotated: usize,
    pub pairs: Pairs,
    frequencies: B::Buf, // [rotated / 2]
    amplitude: f32,
    pub buf: B::Buf, // [rows, rotated]
}

impl<B: Alloc> Angles<B> {
    fn new(backend: &B, rope: &Rope, rows: usize) -> Result<Angles<B>> {
        Ok(Angles {
            rotated: rope.rotated(),
            pairs: rope.pairs,
            frequencies: backend.vector(&rope.frequencies)?,
            amplitude: rope.amplitude,
            buf: backend.buffer(rows * rope.rotated())?,
        })
    }
}

impl<B: BackendTypes> Angles<B> {
    pub fn turn(&self) -> RotaryEmbedding<'_, B::Buf> {
        RotaryEmbedding { rotated: self.rotated, pairs: self.pairs, angles: &self.buf }
    }
}

/// The columns of each buffer in `Work`.
pub(super) struct Widths {
    hidden: usize,
    normed: usize,
    wide: usize,
    narrow: usize,
    /// Intermediate width of MLPs. They use `wide` and `narrow` too, but for fewer rows at once.
    mlp_wide: usize,
    mlp_narrow: usize,
    /// Width of the logits, which use `wide` after the layers.
    vocab: usize,
    pub routed: usize,
    pub queries: usize,
    /// The maximum over all layers.
    routing: Routing,
}

impl Widths {
    fn for_spec(spec: &ModelSpec) -> Widths {
        let mut widths = Widths {
            hidden: spec.hidden_size,
            normed: spec.hidden_size.max(spec.embedding.tokens.cols),
            wide: 0,
            narrow: 0,
            mlp_wide: 0,
            mlp_narrow: 0,
            vocab: spec.vocab_size,
            routed: 0,
            queries: 0,
            routing: Routing::softmax(0, 0, false),
        };
        for layer in &spec.layers {
            match &layer.attention {
                Attention::Heads(heads) => widths.hold(heads.shape.qkv_width(), heads.shape.q_width()),
                Attention::Latent(latent) => widths.hold_latent(latent),
            }
            match &layer.mlp {
                Mlp::Plain { up, .. } => widths.hold_mlp(up.rows(), 0),
                Mlp::Gated { gate_up, down, .. } => widths.hold_mlp(gate_up.rows(), down.cols),
                Mlp::Experts(experts) => widths.hold_experts(experts),
            }
        }
        widths
    }

    pub fn hold(&mut self, wide: usize, narrow: usize) {
        (self.wide, self.narrow) = (self.wide.max(wide), self.narrow.max(narrow));
    }

    fn hold_mlp(&mut self, wide: usize, narrow: usize) {
        (self.mlp_wide, self.mlp_narrow) = (self.mlp_wide.max(wide), self.mlp_narrow.max(narrow));
    }

    fn hold_experts(&mut self, Experts { routing, experts, shared, .. }: &Experts) {
        for Expert { gate_up, down } in experts {
            self.hold(routing.top_k * gate_up.rows(), routing.top_k * down.cols);
        }
        if let Some(SharedExpert { expert: Expert { gate_up, down }, .. }) = shared {
            self.hold_mlp(gate_up.rows(), down.cols);
        }
        self.hold(0, routing.experts);
        self.routed = self.routed.max(routing.top_k * self.hidden);
        self.routing.experts = self.routing.experts.max(routing.experts);
        self.routing.top_k = self.routing.top_k.max(routing.top_k);
    }
}

/// Returns the lengths of `Scratch::wide` and `Scratch::narrow`.
fn shared_lens<B: Ops>(backend: &B, limits: BatchLimits, widths: &Widths) -> [usize; 2] {
    let &Widths { wide, narrow, mlp_wide, mlp_narrow, vocab, .. } = widths;
    let mlp_rows = backend.mlp_rows(limits.tokens);
    let of_layers = |each: usize, mlp: usize| (limits.tokens * each).max(mlp_rows * mlp);
    [of_layers(wide, mlp_wide).max(limits.logits * vocab), of_layers(narrow, mlp_narrow)]
}

/// Returns the largest batch within `limits`. The block tables of a sequence have `places` entries,
/// summed over all groups.
pub fn input_limits(spec: &ModelSpec, limits: BatchLimits, places: usize, groups: usize) -> InputLimits {
    let mut heads: Vec<HeadGroups> = spec.layers.iter().map(|layer| layer.attention.shape().head_groups()).collect();
    heads.sort_unstable();
    heads.dedup();
    let BatchLimits { tokens: rows, logits } = limits;
    InputLimits { max: BatchSize { tokens: rows, sequences: logits, logits, table_entries: logits * places, groups }, heads }
}

/// Returns the bytes of all activations, and of the working memory of `threads` threads, for
/// batches within `limits`.
pub fn work_bytes<B: Backend>(backend: &B, spec: &ModelSpec, limits: BatchLimits, threads: usize) -> u64 {
    let widths = Widths::for_spec(spec);
    let [wide, narrow] = shared_lens(backend, limits, &widths);
    let Widths { hidden, normed, routed, queries, routing, .. } = widths;
    let angles: usize = spec.ropes.iter().map(Rope::rotated).sum();
    let floats = limits.tokens * (hidden + 2 * normed + routed + queries + angles) + wide + narrow;
    let reserved = spec.layers.iter().map(|layer| backend.reserved_bytes(layer.attention.shape())).max();
    let routes = backend.routes_bytes(limits.tokens, routing);
    let packed = backend.reserved_rows_bytes(limits.tokens, spec.max_cols());
    let drawing = backend.sampler_bytes(limits.draws(spec));
    (floats * size_of::<f32>()) as u64 + routes + packed + drawing + reserved.unwrap_or(0) * threads as u64
}

impl<B: Backend> Decoder<B> {
    pub fn new(backend: B, spec: &ModelSpec, model: LoadedModel<B>, limits: BatchLimits) -> Result<Decoder<B>> {
        let widths = Widths::for_spec(spec);
        let [wide, narrow] = shared_lens(&backend, limits, &widths);
        let Widths { hidden, normed, routed, queries, routing, .. } = widths;
        let rows = |width: usize| backend.buffer(limits.tokens * width);
        spec.layers.iter().try_for_each(|layer| backend.reserve(layer.attention.shape()))?;
        backend.reserve_rows(limits.tokens, spec.max_cols())?;
        let work = Work {
            x: rows(hidden)?,
            normed: rows(normed)?,
            // The head swaps it with `normed`.
            delta: rows(normed)?,
            scratch: Scratch {
                wide: backend.buffer(wide)?,
                narrow: backend.buffer(narrow)?,
                routed: rows(routed)?,
                queries: rows(queries)?,
                routes: backend.routes(limits.tokens, routing)?,
            },
            angles: spec.ropes.iter().map(|rope| Angles::new(&backend, rope, limits.tokens)).collect::<Result<_>>()?,
        };
        let draw_limits = limits.draws(spec);
        Ok(Decoder { device_sampler: backend.sampler(draw_limits)?, backend, model, work, inputs: B::Inputs::default(), draw_limits })
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Reserves memory for the largest batch, so that no step allocates.
    pub fn reserve_inputs(&mut self, limits: &InputLimits) -> Result<()> {
        self.backend.reserve_inputs(limits, &mut self.inputs)
    }

    /// Runs the forward pass of a batch.
    pub fn forward(&mut self, batch: &Batch, kv: &mut KvCache<B>) -> Result<()> {
        if batch.groups() != kv.groups {
            return Err(Error::internal(format!(
                "the batch has block tables for {} groups of layers, the model has {}",
                batch.groups(),
                kv.groups
            )));
        }
        let extent = self.backend.upload(batch, &mut self.inputs)?;
        self.backend.copy_blocks(&batch.copies, &mut kv.levels);
        self.pass(extent, kv);
        Ok(())
    }

    /// Lets the device capture the decode steps that it replays later, within `max`. `batch` has
    /// one row.
    pub fn keep_steps(&mut self, max: &BatchSize, batch: &Batch, kv: &mut KvCache<B>) -> Result<()> {
        while let Some(extent) = self.backend.capture(max, batch, &mut self.inputs)? {
            self.pass(extent, kv);
        }
        Ok(())
    }

    fn pass(&mut self, Extent { rows, logits }: Extent, kv: &mut KvCache<B>) {
        let Decoder { backend, model, work, inputs, .. } = self;
        let pass = Pass { backend, inputs, rows };
        pass.embed(model, work);
        for (layer, place) in model.layers.iter().zip(&kv.places) {
            pass.layer(layer, LayerKv { group: place.group, kv: &mut kv.levels[place.level] }, work);
        }
        pass.head(model, logits, work);
        backend.launch_step();
    }

    /// Returns the logits of the last pass, `[rows, vocab]`: one row per entry of `logit_rows`.
    pub fn logits(&mut self, rows: usize) -> Result<&[f32]> {
        self.backend.read(&mut self.work.scratch.wide, rows * self.model.vocab_size)
    }

    /// Returns the limits of on-device sampling. None: the device does not sample, and only logits
    /// are available.
    pub fn draw_limits(&self) -> Option<DeviceSamplingLimits> {
        self.device_sampler.is_some().then_some(self.draw_limits)
    }

    /// Starts to sample a token from each row of the last pass that `sampling` names, and to read
    /// the logits of the others. `rows` is the number of rows of logits.
    pub fn start_outputs(&mut self, rows: usize, sampling: &DeviceSampling) -> Result<()> {
        let Decoder { backend, model, work: Work { scratch: Scratch { wide: logits, .. }, .. }, device_sampler, .. } = self;
        if !sampling.is_empty() {
            backend.start_sampling(device_sampler.as_mut().ok_or_else(no_sampler)?, model.vocab_size, logits, sampling)?;
        }
        backend.start_read(logits, model.vocab_size, rows, sampling.other_rows(rows))
    }

    /// Waits for `start_outputs`. Returns the logits, which are unspecified for sampled rows, and
    /// the samples.
    pub fn outputs(&mut self, rows: usize, samples: usize) -> Result<(&[f32], &[DeviceSample])> {
        let Decoder { backend, model, work: Work { scratch: Scratch { wide: logits, .. }, .. }, device_sampler, .. } = self;
        let samples = match samples {
            0 => &[],
            _ => backend.finish_sampling(device_sampler.as_mut().ok_or_else(no_sampler)?, samples)?,
        };
        Ok((backend.finish_read(logits, rows * model.vocab_size)?, samples))
    }
}

/// The KV cache of a layer's level, and the group of its block tables.
pub(super) struct LayerKv<'a, B: BackendTypes> {
    pub group: usize,
    pub kv: &'a mut B::Kv,
}

/// The forward pass of one batch.
pub(super) struct Pass<'a, B: BackendTypes> {
    pub backend: &'a B,
    pub inputs: &'a B::Inputs,
    pub rows: usize,
}

type LoadedLayer<B> = Layer<LoadedLinear<B>, LoadedNorm<B>, <B as BackendTypes>::Buf>;

impl<B: Ops + KvOps> Pass<'_, B> {
    fn embed(&self, model: &LoadedModel<B>, work: &mut Work<B>) {
        let Embedding { tokens, scale, project, positions } = &model.embedding;
        match project {
            None => self.backend.embed(self.inputs, &tokens.weight, tokens.first_row, *scale, &mut work.x),
            Some(project) => {
                self.backend.embed(self.inputs, &tokens.weight, tokens.first_row, *scale, &mut work.normed);
                self.linear(project, &work.normed, &mut work.x);
            }
        }
        if let Some(positions) = positions {
            self.backend.add_positions(self.inputs, &positions.table.weight, positions.offset, &mut work.x);
        }
        for Angles { frequencies, amplitude, buf, .. } in &mut work.angles {
            self.backend.angles(self.inputs, frequencies, *amplitude, buf);
        }
    }

    fn layer(&self, layer: &LoadedLayer<B>, mut kv: LayerKv<B>, work: &mut Work<B>) {
        let Work { x, normed, delta, scratch, angles, .. } = work;
        let mut attention = |x: &B::Buf, out: &mut B::Buf| match &layer.attention {
            Attention::Heads(heads) => self.attention(heads, x, &mut kv, angles, scratch, out),
            Attention::Latent(latent) => self.latent_attention(latent, x, &mut kv, angles, scratch, out),
        };
        match &layer.residual {
            Residual::PreNorm { attention: before, mlp } => {
                self.norm(before, x, normed);
                attention(normed, delta);
                self.add_norm(x, delta, layer, mlp, normed);
                self.mlp(&layer.mlp, normed, scratch, delta);
                self.add(x, delta, layer);
            }
            Residual::PostNorm { attention: after, mlp } => {
                attention(x, delta);
                self.add_norm(x, delta, layer, after, normed);
                self.mlp(&layer.mlp, normed, scratch, delta);
                self.add_norm(normed, delta, layer, mlp, x);
            }
            Residual::BranchNorm { attention: after, mlp } => {
                attention(x, delta);
                self.norm(after, delta, normed);
                self.add(x, normed, layer);
                self.mlp(&layer.mlp, x, scratch, delta);
                self.norm(mlp, delta, normed);
                self.add(x, normed, layer);
            }
            Residual::Parallel { attention: before, mlp } => {
                self.norm(before, x, normed);
                attention(normed, delta);
                if let Some(mlp) = mlp {
                    self.norm(mlp, x, normed);
                }
                self.add(x, delta, layer);
                self.mlp(&layer.mlp, normed, scratch, delta);
                self.add(x, delta, layer);
            }
            Residual::Sandwich { attention: before, after_attention, mlp, after_mlp } => {
                self.norm(before, x, normed);
                attention(normed, delta);
                self.norm(after_attention, delta, normed);
                self.add_norm(x, normed, layer, mlp, delta);
                std::mem::swap(normed, delta);
                self.mlp(&layer.mlp, normed, scratch, delta);
                self.norm(after_mlp, delta, normed);
                self.add(x, normed, layer);
            }
        }
    }

    /// Reads `x` and writes `out`. Stores K and V of the rows in the cache.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &self,
        attention: &HeadAttention<LoadedLinear<B>, LoadedNorm<B>, B::Buf>,
        x: &B::Buf,
        LayerKv { group, kv }: &mut LayerKv<B>,
        angles: &[Angles<B>],
        scratch: &mut Scratch<B>,
        out: &mut B::Buf,
    ) {
        let Scratch { wide, narrow, .. } = scratch;
        let HeadAttention { shape, qkv, out: project, qk_norm, rope, sinks } = attention;
        let heads = |first, count| Heads { first, count, dim: shape.head_dim, stride: shape.qkv_width() };
        let all = |heads: Heads| Heads { count: 1, dim: heads.count * heads.dim, ..heads };
        self.linear(qkv, x, wide);
        if let Some(QkNorm { over, q, k }) = qk_norm {
            let (queries, keys) = (heads(0, shape.heads), heads(shape.q_width(), shape.kv_heads));
            let normed = |heads| if *over == QkNormOver::AllHeads { all(heads) } else { heads };
            self.norm_heads(q, normed(queries), wide);
            self.norm_heads(k, normed(keys), wide);
        }
        self.backend.store_kv(self.inputs, *group, shape, rope.map(|rope| angles[rope].turn()), wide, kv);
        self.backend.attention(self.inputs, *group, shape, sinks.as_ref(), wide, kv, narrow);
        self.linear(project, narrow, out);
    }

    fn mlp(&self, mlp: &Mlp<LoadedLinear<B>, B::Buf>, x: &B::Buf, scratch: &mut Scratch<B>, out: &mut B::Buf) {
        let Scratch { wide, narrow, .. } = scratch;
        match mlp {
            Mlp::Plain { up, act, down } => self.up_and_down(up, Activation::Plain(*act), down, x, [wide, narrow, out]),
            Mlp::Gated { gate_up, act, down } => self.up_and_down(gate_up, Activation::Gated(Glu::Of(*act)), down, x, [wide, narrow, out]),
            Mlp::Experts(experts) => self.experts(experts, x, scratch, out),
        }
    }

    /// Rows of the same expert are multiplied together.
    fn experts(&self, experts: &Experts<LoadedLinear<B>, B::Buf>, x: &B::Buf, scratch: &mut Scratch<B>, out: &mut B::Buf) {
        let local = experts.local();
        let Experts { router, correction, routing, glu, experts, shared, .. } = experts;
        let Scratch { wide, narrow, routed, routes, .. } = scratch;
        let (hidden, first) = (router.cols, local.start);
        self.linear(router, x, narrow);
        self.backend.route(self.rows, *routing, local, correction.as_ref(), narrow, routes);
        if let Some(Expert { gate_up, .. }) = experts.first() {
            self.backend.gather_routes(routes, hidden, x, routed);
            self.backend.matmul_routes(routes, routed, &|expert| experts[expert - first].gate_up.parts(), wide);
            self.backend.gate(self.rows * routing.top_k, gate_up.rows / 2, *glu, wide, narrow);
            self.backend.matmul_routes(routes, narrow, &|expert| experts[expert - first].down.parts(), routed);
        }
        self.backend.combine_routes(routes, hidden, routed, out);
        if let Some(SharedExpert { expert, gate }) = shared {
            self.up_and_down(&expert.gate_up, Activation::Gated(*glu), &expert.down, x, [wide, narrow, routed]);
            match gate {
                Some(gate) => {
                    self.linear(gate, x, narrow);
                    self.backend.add_gated(self.rows, hidden, narrow, out, routed);
                }
                None => self.backend.add(self.rows * hidden, 1.0, out, routed),
            }
        }
    }

    /// Computes the logits of the rows that need them.
    fn head(&self, model: &LoadedModel<B>, logits: usize, work: &mut Work<B>) {
        let Model { hidden_size, embedding, final_norm, head, .. } = model;
        let Head { project, weight, scale, soft_cap } = head;
        let Work { x, normed, delta, scratch: Scratch { wide: out, .. }, .. } = work;
        self.backend.gather(self.inputs, *hidden_size, x, delta);
        let last = Pass { rows: logits, ..*self };
        if let Some(norm) = final_norm {
            last.norm(norm, delta, normed);
            std::mem::swap(delta, normed);
        }
        if let Some(project) = project {
            last.linear(project, delta, normed);
            std::mem::swap(delta, normed);
        }
        let weight = weight.as_ref().unwrap_or(&embedding.tokens);
        // A rank has no tokens if there are more ranks than tokens.
        if weight.rows > 0 {
            last.linear(weight, delta, out);
        }
        if weight.rows > 0 && (*scale != 1.0 || soft_cap.is_some()) {
            self.backend.scale_and_cap(logits * weight.rows, *scale, *soft_cap, out);
        }
    }

    pub fn linear(&self, linear: &LoadedLinear<B>, x: &B::Buf, out: &mut B::Buf) {
        self.backend.matmul(self.rows, x, &linear.weight, linear.bias.as_ref(), out);
    }

    /// out = down(activation(up(x))), with `wide` and `narrow` as intermediate buffers.
    fn up_and_down(
        &self,
        up: &LoadedLinear<B>,
        activation: Activation,
        down: &LoadedLinear<B>,
        x: &B::Buf,
        [wide, narrow, out]: [&mut B::Buf; 3],
    ) {
        let width = if matches!(activation, Activation::Gated(_)) { up.rows / 2 } else { up.rows };
        self.backend.mlp(self.rows, x, MlpOf { up: up.parts(), activation, width, down: down.parts() }, wide, narrow, out);
    }

    pub fn norm(&self, norm: &LoadedNorm<B>, x: &B::Buf, out: &mut B::Buf) {
        self.backend.norm(self.rows, norm.spec.width(), norm.with_weights(), x, out);
    }

    /// x += branch_scale * y; out = norm(x).
    fn add_norm(&self, x: &mut B::Buf, y: &B::Buf, layer: &LoadedLayer<B>, norm: &LoadedNorm<B>, out: &mut B::Buf) {
        self.backend.add_norm(self.rows, norm.spec.width(), layer.branch_scale, y, norm.with_weights(), x, out);
    }

    pub fn norm_heads(&self, norm: &LoadedNorm<B>, heads: Heads, x: &mut B::Buf) {
        self.backend.norm_heads(self.rows, heads, norm.with_weights(), x);
    }

    fn add(&self, x: &mut B::Buf, y: &B::Buf, layer: &LoadedLayer<B>) {
        self.backend.add(self.rows * layer.attention.out().rows, layer.branch_scale, x, y);
    }
}

fn no_sampler() -> Error {
    Error::internal("device sampling without its buffers")
}
