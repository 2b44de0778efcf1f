//! Loading of weights: from names in a spec to packed matrices on a backend.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ops::Range;

use super::checkpoint::{Checkpoint, Tensor};
use super::formats::Formats;
use super::packed::Reader;
use super::parts::Parts;
use super::spec::{Linear, Model, ModelSpec, Norm, PartRows, Role, TensorPart, Vector};
use crate::backend::{Alloc, BackendTypes, NormOf, RowSource, Section};
use crate::error::{Code, Error, Result, try_vec, try_with_capacity};
use crate::types::options::{Dtype, WeightFormat};

/// A linear map with its weights.
pub struct LoadedLinear<B: BackendTypes> {
    pub weight: B::Matrix,
    pub bias: Option<B::Buf>,
    pub rows: usize,
    pub cols: usize,
    /// Number of the first row in the whole matrix. Rows of a table are consecutive.
    pub first_row: usize,
}

impl<B: BackendTypes> LoadedLinear<B> {
    /// Returns the matrix and the bias.
    pub fn parts(&self) -> (&B::Matrix, Option<&B::Buf>) {
        (&self.weight, self.bias.as_ref())
    }
}

/// A norm with its weights.
pub struct LoadedNorm<B: BackendTypes> {
    pub spec: Norm,
    pub weight: B::Buf,
    pub bias: Option<B::Buf>,
}

impl<B: BackendTypes> LoadedNorm<B> {
    pub fn with_weights(&self) -> NormOf<'_, B::Buf> {
        NormOf { kind: self.spec.kind, eps: self.spec.eps, weight: &self.weight, bias: self.bias.as_ref() }
    }
}

pub type LoadedModel<B> = Model<LoadedLinear<B>, LoadedNorm<B>, <B as BackendTypes>::Buf>;

/// Callback that receives (bytes of matrices read so far, total bytes) during a load. Returning
/// `false` cancels the load.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// The source of packed matrices.
pub enum Origin<'a, B: BackendTypes> {
    /// The model's files. The callback receives each packed matrix.
    Files(&'a mut dyn FnMut(&B::Matrix)),
    /// The packed form.
    Packed(Reader),
}

/// Loads all weights. The memory peak is the packed weights plus one tensor.
pub fn load<'a, B: Alloc>(
    backend: &'a B,
    spec: &ModelSpec,
    checkpoint: &'a Checkpoint,
    requested: Option<WeightFormat>,
    origin: Origin<'a, B>,
    progress: LoadProgress<'a>,
) -> Result<LoadedModel<B>> {
    let (formats, mut total) = (Formats::new(backend, checkpoint, requested), 0);
    formats.check_alike(spec)?;
    formats.visit(spec, |linear, sections| {
        total += source_bytes(linear, sections);
        Ok(())
    })?;
    let mut loading = Loading { backend, checkpoint, formats, origin, meter: Meter { done: 0, total, tell: progress } };
    loading.meter.advance(0)?;
    spec.try_map(
        |linear, role| loading.linear(linear, role),
        |norm| load_norm(backend, norm, checkpoint),
        |vector| load_vector(backend, vector, checkpoint),
    )
}

/// Returns the bytes of a matrix in the model's files.
fn source_bytes(linear: &Linear, sections: &[Section]) -> u64 {
    sections.iter().map(|section| section.rows as u64 * section.row_bytes(linear.cols) as u64).sum()
}

struct Meter<'a> {
    done: u64,
    total: u64,
    tell: LoadProgress<'a>,
}

impl Meter<'_> {
    fn advance(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        match (self.tell)(self.done, self.total) {
            true => Ok(()),
            false => Err(Error::cancelled(format!("loading was cancelled after {} of {} bytes", self.done, self.total))),
        }
    }
}

/// Checks the name and shape of every tensor. Returns the bytes of the packed weights.
pub fn bytes<B: Alloc>(backend: &B, spec: &ModelSpec, checkpoint: &Checkpoint, requested: Option<WeightFormat>) -> Result<u64> {
    let (formats, total) = (Formats::new(backend, checkpoint, requested), Cell::new(0));
    formats.check_alike(spec)?;
    let add = |bytes: Result<u64>| bytes.map(|bytes| total.set(total.get() + bytes));
    spec.try_map(
        |linear, role| add(linear_bytes(backend, linear, checkpoint, &formats.of_matrix(linear, role)?.1)),
        |norm| add(norm_bytes(norm, checkpoint)),
        |vector| add(checkpoint.tensor(&vector.name, &[vector.len]).map(|_| (vector.width() * size_of::<f32>()) as u64)),
    )?;
    Ok(total.get())
}

fn linear_bytes<B: Alloc>(backend: &B, linear: &Linear, checkpoint: &Checkpoint, sections: &[Section]) -> Result<u64> {
    bias_of(linear, checkpoint, |_, _, _| Ok(()))?;
    let bias_rows = if linear.bias { linear.rows() } else { 0 };
    Ok(backend.matrix_bytes(linear.cols, sections) + (bias_rows * size_of::<f32>()) as u64)
}

fn norm_bytes(norm: &Norm, checkpoint: &Checkpoint) -> Result<u64> {
    let vectors = if norm.bias { &["weight", "bias"][..] } else { &["weight"] };
    for (part, suffix) in norm.parts.iter().flat_map(|part| vectors.iter().map(move |suffix| (part, suffix))) {
        checkpoint.tensor(&format!("{part}.{suffix}"), &norm.shape)?;
    }
    Ok((vectors.len() * norm.width() * size_of::<f32>()) as u64)
}

/// Rejects checkpoints with weights of layers that the spec does not use: the config belongs to
/// another model.
pub fn refuse_unused(spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<()> {
    let used = RefCell::new(HashSet::new());
    let add = |weight: String, bias: Option<String>| {
        let mut used = used.borrow_mut();
        used.try_reserve(2)?;
        used.insert(weight);
        used.extend(bias);
        Ok::<(), Error>(())
    };
    spec.try_map(
        |linear, _| linear.parts.iter().try_for_each(|part| add(part.weight(), linear.bias.then(|| part.bias()))),
        |norm| norm.parts.iter().try_for_each(|name| add(format!("{name}.weight"), norm.bias.then(|| format!("{name}.bias")))),
        |vector| add(vector.name.clone(), None),
    )?;
    let used = used.into_inner();
    let layers = spec.layers.len();
    let spare = layers..layers + spec.spare_layers;
    match checkpoint.of_layers()?.into_iter().find(|(name, layer)| !spare.contains(layer) && !used.contains(*name)) {
        Some((name, _)) => {
            Err(Error::model(format!("tensor {name} is not part of the model that config.json describes; correct config.json")))
        }
        None => Ok(()),
    }
}

/// Returns the separate head of a model whose config ties it to the embedding but whose file has a
/// different one, as transformers does.
pub fn own_head(spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<Option<Linear>> {
    let embedding = &spec.embedding.tokens;
    let (None, Some(tokens)) = (&spec.head.weight, checkpoint.find(&embedding.parts[0].weight())) else { return Ok(None) };
    for name in ["lm_head", "embed_out"] {
        if let Some(head) = checkpoint.find(&format!("{name}.weight"))
            && !checkpoint.are_alike(head, tokens)?
        {
            return Ok(Some(Linear::new(name, embedding.rows(), embedding.cols)));
        }
    }
    Ok(None)
}

/// Returns the storage type of the model's matrices: that of its token embedding. Quantized weights
/// are usually made from bf16.
pub fn storage(spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<Dtype> {
    let parts = Parts::find(&spec.embedding.tokens, checkpoint)?;
    Ok(if parts.has_blocks() { Dtype::Bf16 } else { parts.dtype })
}

pub(super) fn load_norm<B: Alloc>(backend: &B, norm: &Norm, checkpoint: &Checkpoint) -> Result<LoadedNorm<B>> {
    let vector = |suffix: &str| {
        let mut values = try_vec(0, 0.0f32)?;
        values.try_reserve_exact(norm.stored_width())?;
        for part in &norm.parts {
            values.extend_from_slice(&checkpoint.numbers(&format!("{part}.{suffix}"), &norm.shape)?);
        }
        backend.vector(&of_shard(values, norm.shard.as_deref())?)
    };
    Ok(LoadedNorm { spec: norm.clone(), weight: vector("weight")?, bias: norm.bias.then(|| vector("bias")).transpose()? })
}

pub(super) fn load_vector<B: Alloc>(backend: &B, Vector { name, len, shard }: &Vector, checkpoint: &Checkpoint) -> Result<B::Buf> {
    backend.vector(&of_shard(checkpoint.numbers(name, &[*len])?, shard.as_deref())?)
}

/// Returns the elements of a shard.
fn of_shard(values: Vec<f32>, shard: Option<&[Range<usize>]>) -> Result<Vec<f32>> {
    let Some(ranges) = shard else { return Ok(values) };
    let mut of_shard = try_with_capacity(ranges.iter().map(Range::len).sum())?;
    ranges.iter().for_each(|range| of_shard.extend_from_slice(&values[range.clone()]));
    Ok(of_shard)
}

struct Loading<'a, B: Alloc> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    formats: Formats<'a>,
    origin: Origin<'a, B>,
    meter: Meter<'a>,
}

impl<B: Alloc> Loading<'_, B> {
    fn linear(&mut self, linear: &Linear, role: Role) -> Result<LoadedLinear<B>> {
        let (parts, sections) = self.formats.of_matrix(linear, role)?;
        let weight = match &mut self.origin {
            Origin::Packed(reader) => {
                let weight = reader.matrix(self.backend, linear.cols, &sections)?;
                self.meter.advance(source_bytes(linear, &sections))?;
                weight
            }
            Origin::Files(show) => {
                let weight = pack(self.backend, linear, &parts, &sections, &mut self.meter)?;
                show(&weight);
                weight
            }
        };
        let bias = load_bias(self.backend, linear, self.checkpoint)?;
        let first_row = linear.row_ranges().first().map_or(0, |range| range.start);
        Ok(LoadedLinear { weight, bias, rows: linear.rows(), cols: linear.cols, first_row })
    }
}

fn pack<B: Alloc>(backend: &B, linear: &Linear, parts: &Parts, sections: &[Section], meter: &mut Meter) -> Result<B::Matrix> {
    let source = RowSource { read: &|first, out| parts.read_rows(sections, first, out), advance: &mut |bytes| meter.advance(bytes as u64) };
    let weight = backend.matrix(linear.cols, sections, source);
    weight.map_err(|error| match error.code() {
        Code::Model => {
            let names: Vec<_> = linear.parts.iter().map(TensorPart::weight).collect();
            Error::model(format!("tensor {}: {}", names.join(" + "), error.message()))
        }
        _ => error,
    })
}

pub(super) fn load_bias<B: Alloc>(backend: &B, linear: &Linear, checkpoint: &Checkpoint) -> Result<Option<B::Buf>> {
    let mut parts = try_with_capacity(linear.parts.len())?;
    bias_of(linear, checkpoint, |part, tensor, dtype| {
        parts.push(checkpoint.read_f32(tensor, dtype, part.offset(&[part.rows]), part.rows)?);
        Ok(())
    })?;
    if !linear.bias {
        return Ok(None);
    }
    let mut bias = try_with_capacity(linear.rows())?;
    for PartRows { part, first, rows } in linear.part_rows() {
        let values = &parts[part];
        bias.extend((first..first + rows).map(|row| values[linear.order.run_at(values.len(), row).first]));
    }
    backend.vector(&bias).map(Some)
}

/// Visits the biases of the parts, if there are any.
fn bias_of(linear: &Linear, checkpoint: &Checkpoint, mut visit: impl FnMut(&TensorPart, &Tensor, Dtype) -> Result<()>) -> Result<()> {
    for part in linear.parts.iter().filter(|_| linear.bias) {
        let (tensor, dtype) = checkpoint.tensor(&part.bias(), &part.tensor_shape(&[part.rows]))?;
        visit(part, tensor, dtype)?;
    }
    Ok(())
}
