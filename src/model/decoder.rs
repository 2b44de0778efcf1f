//! The forward pass: interprets a spec, layer by layer, on any backend.

use super::kv_cache::KvCache;
use super::logits;
use super::spec::{
    Attention, Embedding, Expert, Experts, Glu, Head, HeadAttention, Layer, Mlp, Model, ModelSpec, Pairs, QkNorm, QkNormOver, Rope,
    Routing, SharedExpert,
};
use super::weights::{LoadedLinear, LoadedModel, LoadedNorm};
use crate::backend::{
    Activation, Addition, Alloc, Backend, BackendTypes, BatchSize, Branch, Collectives, ColumnPart, Extent, HeadGroups, Heads, InputLimits,
    KvOps, MlpOf, Ops, RotaryEmbedding,
};
use crate::error::{Error, Result};
use crate::types::batch::Batch;
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::types::parallel::WorkerPlace;

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
    pub(super) place: WorkerPlace,
    /// The columns of the logits that other workers compute too. Empty for a single worker.
    logit_parts: Vec<ColumnPart>,
}

/// The activations. Each buffer has the width of the widest layer.
pub(super) struct Work<B: BackendTypes> {
    pub x: B::Buf,      // [rows, hidden] the residual stream
    pub normed: B::Buf, // [rows, hidden or embedding width]
    pub delta: B::Buf,  // [rows, hidden or embedding width] output of a branch
    pub scratch: Scratch<B>,
    pub angles: Vec<Angles<B>>,
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
    pub normed: usize,
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
    fn for_spec(spec: &ModelSpec, place: WorkerPlace) -> Widths {
        let mut widths = Widths {
            hidden: spec.hidden_size,
            normed: spec.hidden_size.max(spec.embedding.tokens.cols),
            wide: 0,
            narrow: 0,
            mlp_wide: 0,
            mlp_narrow: 0,
            vocab: logits::logit_width(spec.vocab_size, place),
            routed: 0,
            queries: 0,
            routing: Routing::softmax(0, 0, false),
        };
        for layer in &spec.layers {
            match &layer.attention {
                Attention::Heads(heads) => {
                    widths.hold(heads.shape.qkv_width(), heads.shape.q_width());
                    widths.hold_norm_of_all(heads, place);
                }
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
pub fn work_bytes<B: Backend>(backend: &B, spec: &ModelSpec, limits: BatchLimits, threads: usize, place: WorkerPlace) -> u64 {
    let widths = Widths::for_spec(spec, place);
    let [wide, narrow] = shared_lens(backend, limits, &widths);
    let Widths { hidden, normed, routed, queries, routing, .. } = widths;
    let angles: usize = spec.ropes.iter().map(Rope::rotated).sum();
    let floats = limits.tokens * (hidden + 2 * normed + routed + queries + angles) + wide + narrow;
    let reserved = spec.layers.iter().map(|layer| backend.reserved_bytes(layer.attention.shape())).max();
    let routes = backend.routes_bytes(limits.tokens, routing);
    let packed = backend.reserved_rows_bytes(limits.tokens, spec.max_cols());
    let drawing = backend.sampler_bytes(limits.draws(spec));
    let exchanged = match place.is_alone() {
        true => 0,
        false => backend.reserved_exchange_bytes(widths.exchanged(limits, spec, place), place.division.tensor),
    };
    (floats * size_of::<f32>()) as u64 + routes + packed + drawing + exchanged + reserved.unwrap_or(0) * threads as u64
}

impl<B: Backend> Decoder<B> {
    pub fn new(backend: B, spec: &ModelSpec, model: LoadedModel<B>, limits: BatchLimits, place: WorkerPlace) -> Result<Decoder<B>> {
        let widths = Widths::for_spec(spec, place);
        let [wide, narrow] = shared_lens(&backend, limits, &widths);
        let Widths { hidden, normed, routed, queries, routing, .. } = widths;
        let rows = |width: usize| backend.buffer(limits.tokens * width);
        spec.layers.iter().try_for_each(|layer| backend.reserve(layer.attention.shape()))?;
        backend.reserve_rows(limits.tokens, spec.max_cols())?;
        if !place.is_alone() {
            backend.reserve_exchange(widths.exchanged(limits, spec, place))?;
        }
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
        let device_sampler = backend.sampler(draw_limits)?;
        let logit_parts = logits::logit_parts(spec.vocab_size, place)?;
        Ok(Decoder { device_sampler, backend, model, work, inputs: B::Inputs::default(), draw_limits, place, logit_parts })
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
        let extent = self.begin(batch, kv)?;
        self.run(extent, kv);
        Ok(())
    }

    /// Uploads a batch, which `run` computes.
    pub fn begin(&mut self, batch: &Batch, kv: &mut KvCache<B>) -> Result<Extent> {
        if batch.groups() != kv.groups {
            return Err(Error::internal(format!(
                "the batch has block tables for {} groups of layers, the model has {}",
                batch.groups(),
                kv.groups
            )));
        }
        let extent = self.backend.upload(batch, &mut self.inputs)?;
        self.backend.copy_blocks(&batch.copies, &mut kv.levels);
        Ok(extent)
    }

    /// Lets the device capture the decode steps that it replays later, within `max`. `batch` has
    /// one row.
    pub fn keep_steps(&mut self, max: &BatchSize, batch: &Batch, kv: &mut KvCache<B>) -> Result<()> {
        while let Some(extent) = self.backend.capture(max, batch, &mut self.inputs)? {
            self.run(extent, kv);
        }
        Ok(())
    }

    /// Computes the uploaded batch.
    pub fn run(&mut self, extent: Extent, kv: &mut KvCache<B>) {
        self.compute(extent, kv);
        self.deliver(extent);
    }

    /// Computes the layers of this worker. The residual stream comes from the previous stage.
    pub fn compute(&mut self, Extent { rows, .. }: Extent, kv: &mut KvCache<B>) {
        let Decoder { backend, model, work, inputs, place, .. } = self;
        let pass = Pass { backend, inputs, rows, place: *place };
        pass.angles(work);
        match place.is_first_stage() {
            true => pass.embed(model, work),
            false => backend.receive(rows * model.hidden_size, &mut work.x, place.previous()),
        }
        for (layer, place) in model.layers.iter().zip(&kv.places) {
            pass.layer(layer, LayerKv { group: place.group, kv: &mut kv.levels[place.level] }, work);
        }
    }

    /// Sends the residual stream to the next stage. The last stage computes the logits and sends
    /// them to rank 0.
    pub fn deliver(&mut self, Extent { rows, logits }: Extent) {
        let Decoder { backend, model, work, inputs, place, .. } = self;
        match place.is_last_stage() {
            true => Pass { backend, inputs, rows, place: *place }.head(model, logits, work),
            false => backend.send(rows * model.hidden_size, &work.x, place.next()),
        }
        backend.launch_step();
    }

    pub fn vocab_size(&self) -> usize {
        self.model.vocab_size
    }

    /// Receives the columns of the logits that other workers have computed. Does nothing on other
    /// ranks than 0.
    pub fn receive_logits(&mut self, rows: usize) {
        if rows > 0 && !self.logit_parts.is_empty() {
            self.backend.receive_columns(rows, self.model.vocab_size, &self.logit_parts, &mut self.work.scratch.wide);
        }
    }

    /// Returns the logits of the last pass, `[rows, vocab]`: one row per entry of `logit_rows`.
    pub fn logits(&mut self, rows: usize) -> Result<&[f32]> {
        self.receive_logits(rows);
        self.backend.read(&mut self.work.scratch.wide, rows * self.model.vocab_size)
    }

    /// Reads the first `rows` rows of logits, which may be undefined. Does nothing on workers that
    /// do not sample.
    pub fn read_logits(&mut self, rows: usize) -> Result<()> {
        match self.place.rank() {
            0 => self.backend.read(&mut self.work.scratch.wide, rows * self.model.vocab_size).map(|_| ()),
            _ => Ok(()),
        }
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

/// The output of a branch, which is attention or an MLP.
pub(super) struct Output<'a, Buf> {
    pub delta: &'a mut Buf,
    /// The residual stream, if the backend may add the branch to it at once, and the branch's factor.
    pub stream: Option<(&'a mut Buf, f32)>,
}

impl<'a, Buf> Output<'a, Buf> {
    pub fn only(delta: &'a mut Buf) -> Output<'a, Buf> {
        Output { delta, stream: None }
    }
}

/// The forward pass of one batch.
pub(super) struct Pass<'a, B: BackendTypes> {
    pub backend: &'a B,
    pub inputs: &'a B::Inputs,
    pub rows: usize,
    pub place: WorkerPlace,
}

pub(super) type LoadedLayer<B> = Layer<LoadedLinear<B>, LoadedNorm<B>, <B as BackendTypes>::Buf>;

impl<B: Ops + KvOps + Collectives> Pass<'_, B> {
    fn angles(&self, work: &mut Work<B>) {
        for Angles { frequencies, amplitude, buf, .. } in &mut work.angles {
            self.backend.angles(self.inputs, frequencies, *amplitude, buf);
        }
    }

    fn embed(&self, model: &LoadedModel<B>, work: &mut Work<B>) {
        let Embedding { tokens, scale, project, positions } = &model.embedding;
        match project {
            None => {
                self.backend.embed(self.inputs, &tokens.weight, tokens.first_row, *scale, &mut work.x);
                self.all_reduce(model.hidden_size, &mut work.x);
            }
            Some(project) => {
                self.backend.embed(self.inputs, &tokens.weight, tokens.first_row, *scale, &mut work.normed);
                self.all_reduce(tokens.cols, &mut work.normed);
                self.linear(project, &work.normed, &mut work.x);
            }
        }
        if let Some(positions) = positions {
            self.backend.add_positions(self.inputs, &positions.table.weight, positions.offset, &mut work.x);
        }
    }

    /// Stores K and V of the rows in the cache.
    #[allow(clippy::too_many_arguments)]
    pub fn attention(
        &self,
        attention: &HeadAttention<LoadedLinear<B>, LoadedNorm<B>, B::Buf>,
        x: &B::Buf,
        LayerKv { group, kv }: &mut LayerKv<B>,
        angles: &[Angles<B>],
        scratch: &mut Scratch<B>,
        out: &mut Output<B::Buf>,
    ) -> Addition {
        let Scratch { wide, narrow, routed, queries, .. } = scratch;
        let HeadAttention { shape, qkv, out: project, qk_norm, rope, sinks } = attention;
        let heads = |first, count| Heads { first, count, dim: shape.head_dim, stride: shape.qkv_width() };
        let all = |heads: Heads| Heads { count: 1, dim: heads.count * heads.dim, ..heads };
        self.linear(qkv, x, wide);
        if let Some(QkNorm { over, q, k }) = qk_norm {
            for (norm, heads) in [(q, heads(0, shape.heads)), (k, heads(shape.q_width(), shape.kv_heads))] {
                match over {
                    QkNormOver::EachHead => self.norm_heads(norm, heads, wide),
                    QkNormOver::AllHeads if self.place.division.tensor == 1 => self.norm_heads(norm, all(heads), wide),
                    QkNormOver::AllHeads => self.norm_heads_of_all(norm, heads, wide, [routed, queries]),
                }
            }
        }
        let turn = rope.map(|rope| angles[rope].turn());
        self.backend.store_and_attend(self.inputs, *group, shape, turn, sinks.as_ref(), &[&project.weight], wide, kv, narrow);
        self.linear_add(project, narrow, out)
    }

    pub fn mlp(&self, layer: &LoadedLayer<B>, x: &B::Buf, scratch: &mut Scratch<B>, mut out: Output<B::Buf>) -> Addition {
        let Scratch { wide, narrow, .. } = scratch;
        let out = &mut out;
        let added = match &layer.mlp {
            Mlp::Plain { up, act, down } => self.up_and_down(up, Activation::Plain(*act), down, x, [wide, narrow], out),
            Mlp::Gated { gate_up, act, down } => self.up_and_down(gate_up, Activation::Gated(Glu::Of(*act)), down, x, [wide, narrow], out),
            Mlp::Experts(experts) => {
                self.experts(experts, x, scratch, out.delta);
                Addition::Pending
            }
        };
        self.all_reduce(layer.attention.out().rows, out.delta);
        added
    }

    /// Rows of the same expert are multiplied together.
    fn experts(&self, experts: &Experts<LoadedLinear<B>, B::Buf>, x: &B::Buf, scratch: &mut Scratch<B>, out: &mut B::Buf) {
        let local = experts.local();
        let Experts { router, correction, routing, glu, experts, shared, .. } = experts;
        let Scratch { wide, narrow, routed, routes, .. } = scratch;
        let (hidden, first) = (router.cols, local.start);
        self.linear(router, x, narrow);
        self.backend.route(self.rows, *routing, local, correction.as_ref(), narrow, routes);
        if let Some(Expert { gate_up, down }) = experts.first() {
            self.backend.gather_routes(routes, hidden, x, routed);
            self.backend.matmul_routes(routes, routed, &|expert| experts[expert - first].gate_up.parts(), wide);
            self.backend.gate(self.rows * routing.top_k, gate_up.rows / 2, *glu, &[&down.weight], wide, narrow);
            self.backend.matmul_routes(routes, narrow, &|expert| experts[expert - first].down.parts(), routed);
        }
        self.backend.combine_routes(routes, hidden, routed, out);
        if let Some(SharedExpert { expert, gate }) = shared {
            self.up_and_down(&expert.gate_up, Activation::Gated(*glu), &expert.down, x, [wide, narrow], &mut Output::only(routed));
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
        let weight = weight.as_ref().unwrap_or(&embedding.tokens);
        if let Some(norm) = final_norm {
            match project {
                None => last.norm_for_products(norm, &[&weight.weight], delta, normed),
                // The output of this product replaces the rows before the norm.
                Some(project) => last.norm(norm, &[&project.weight], delta, normed),
            }
            std::mem::swap(delta, normed);
        }
        if let Some(project) = project {
            last.linear(project, delta, normed);
            std::mem::swap(delta, normed);
        }
        // A rank has no tokens if there are more ranks than tokens.
        if weight.rows > 0 {
            last.linear(weight, delta, out);
        }
        if weight.rows > 0 && (*scale != 1.0 || soft_cap.is_some()) {
            self.backend.scale_and_cap(logits * weight.rows, *scale, *soft_cap, out);
        }
        last.send_logits(weight.rows, out);
    }

    pub fn linear(&self, linear: &LoadedLinear<B>, x: &B::Buf, out: &mut B::Buf) {
        self.backend.matmul(self.rows, x, &linear.weight, linear.bias.as_ref(), out);
    }

    /// Computes the last product of a branch.
    pub fn linear_add(&self, linear: &LoadedLinear<B>, x: &B::Buf, Output { delta, stream }: &mut Output<B::Buf>) -> Addition {
        match stream {
            Some((stream, scale)) => self.backend.matmul_add(self.rows, x, linear.parts(), Branch { scale: *scale, x: stream, delta }),
            None => {
                self.linear(linear, x, delta);
                Addition::Pending
            }
        }
    }

    /// out = down(activation(up(x))), with `wide` and `narrow` as intermediate buffers.
    fn up_and_down(
        &self,
        up: &LoadedLinear<B>,
        activation: Activation,
        down: &LoadedLinear<B>,
        x: &B::Buf,
        [wide, narrow]: [&mut B::Buf; 2],
        Output { delta, stream }: &mut Output<B::Buf>,
    ) -> Addition {
        let width = if matches!(activation, Activation::Gated(_)) { up.rows / 2 } else { up.rows };
        let mlp = MlpOf { up: up.parts(), activation, width, down: down.parts() };
        match stream {
            Some((stream, scale)) => self.backend.mlp_add(self.rows, x, mlp, wide, narrow, Branch { scale: *scale, x: stream, delta }),
            None => {
                self.backend.mlp(self.rows, x, mlp, wide, narrow, delta);
                Addition::Pending
            }
        }
    }

    pub fn norm(&self, norm: &LoadedNorm<B>, readers: &[&B::Matrix], x: &B::Buf, out: &mut B::Buf) {
        self.backend.norm(self.rows, norm.spec.width(), norm.with_weights(), readers, x, out);
    }

    pub fn norm_heads(&self, norm: &LoadedNorm<B>, heads: Heads, x: &mut B::Buf) {
        self.backend.norm_heads(self.rows, heads, norm.with_weights(), x);
    }
}

fn no_sampler() -> Error {
    Error::internal("device sampling without its buffers")
}
