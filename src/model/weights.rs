//! From names in a spec to packed weights on a backend.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use super::checkpoint::{Checkpoint, Tensor, to_f32};
use super::spec::{Layout, Linear, Model, ModelSpec, Norm};
use crate::backend::Backend;
use crate::error::{Error, Result, try_vec};
use crate::options::Dtype;

/// A linear map with its weights.
pub struct LoadedLinear<B: Backend> {
    pub weight: B::Matrix,
    pub bias: Option<B::Buf>,
    pub rows: usize,
}

/// A norm with its weights.
pub struct LoadedNorm<B: Backend> {
    pub spec: Norm,
    pub weight: B::Buf,
    pub bias: Option<B::Buf>,
}

pub type LoadedModel<B> = Model<LoadedLinear<B>, LoadedNorm<B>>;

/// Told of (bytes of matrices read so far, of all) while weights are loaded; `false` stops the loading.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// Loads every weight. The largest thing it needs beside the packed weights is one tensor.
pub fn load<B: Backend>(backend: &B, spec: &ModelSpec, checkpoint: &Checkpoint, progress: LoadProgress) -> Result<LoadedModel<B>> {
    let total = Cell::new(0);
    let count = |linear: &Linear| {
        total.set(total.get() + (linear.rows() * linear.cols * Parts::find(linear, checkpoint)?.dtype.bytes()) as u64);
        Ok::<(), Error>(())
    };
    spec.try_map(count, |_| Ok(()))?;
    let meter = RefCell::new(Meter { done: 0, total: total.get(), tell: progress });
    meter.borrow_mut().advance(0)?;
    spec.try_map(
        |linear| load_linear(backend, linear, checkpoint, &mut |bytes| meter.borrow_mut().advance(bytes)),
        |norm| load_norm(backend, norm, checkpoint),
    )
}

struct Meter<'a> {
    done: u64,
    total: u64,
    tell: LoadProgress<'a>,
}

impl Meter<'_> {
    fn advance(&mut self, bytes: usize) -> Result<()> {
        self.done += bytes as u64;
        match (self.tell)(self.done, self.total) {
            true => Ok(()),
            false => Err(Error::cancelled(format!("loading was cancelled after {} of {} bytes", self.done, self.total))),
        }
    }
}

/// Checks that every tensor is there in its shape, and adds up what the packed weights will take.
pub fn bytes<B: Backend>(backend: &B, spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<u64> {
    let total = Cell::new(0);
    let add = |bytes: Result<u64>| bytes.map(|bytes| total.set(total.get() + bytes));
    spec.try_map(|linear| add(linear_bytes(backend, linear, checkpoint)), |norm| add(norm_bytes(norm, checkpoint)))?;
    Ok(total.get())
}

fn linear_bytes<B: Backend>(backend: &B, linear: &Linear, checkpoint: &Checkpoint) -> Result<u64> {
    let parts = Parts::find(linear, checkpoint)?;
    let mut bytes = backend.matrix_bytes(linear.rows(), linear.cols, parts.dtype);
    bias_of(linear, checkpoint, |_, rows, _| {
        bytes += (rows * size_of::<f32>()) as u64;
        Ok(())
    })?;
    Ok(bytes)
}

fn norm_bytes(norm: &Norm, checkpoint: &Checkpoint) -> Result<u64> {
    let vectors = if norm.bias { &["weight", "bias"][..] } else { &["weight"] };
    for (part, suffix) in norm.parts.iter().flat_map(|part| vectors.iter().map(move |suffix| (part, suffix))) {
        checkpoint.tensor(&format!("{part}.{suffix}"), &norm.shape)?;
    }
    Ok((vectors.len() * norm.width() * size_of::<f32>()) as u64)
}

/// Refuses weights of layers that nothing asks for: the config is of another model than the file.
pub fn refuse_unused(spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<()> {
    let used = RefCell::new(HashSet::new());
    let add = |name: &str, bias: bool| {
        let mut used = used.borrow_mut();
        used.try_reserve(2)?;
        used.insert(format!("{name}.weight"));
        if bias {
            used.insert(format!("{name}.bias"));
        }
        Ok::<(), Error>(())
    };
    spec.try_map(
        |linear| linear.parts.iter().try_for_each(|(name, _)| add(name, linear.bias)),
        |norm| norm.parts.iter().try_for_each(|name| add(name, norm.bias)),
    )?;
    let used = used.into_inner();
    match checkpoint.of_layers()?.into_iter().find(|&name| !used.contains(name)) {
        Some(name) => Err(Error::model(format!(
            "tensor {name} is there, and the model that config.json describes has none of that name: it would be computed without it"
        ))),
        None => Ok(()),
    }
}

/// The head of a model whose config ties it to the embedding and whose file has another, as transformers has it.
pub fn own_head(spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<Option<Linear>> {
    let embedding = &spec.embedding.tokens;
    let (None, Some(tokens)) = (&spec.head.weight, checkpoint.find(&format!("{}.weight", embedding.parts[0].0))) else { return Ok(None) };
    for name in ["lm_head", "embed_out"] {
        if let Some(head) = checkpoint.find(&format!("{name}.weight"))
            && !checkpoint.are_alike(head, tokens)?
        {
            return Ok(Some(Linear::new(name, embedding.rows(), embedding.cols)));
        }
    }
    Ok(None)
}

/// How the model's matrices are stored: the type of its token embedding.
pub fn storage(spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<Dtype> {
    Ok(Parts::find(&spec.embedding.tokens, checkpoint)?.dtype)
}

fn load_norm<B: Backend>(backend: &B, norm: &Norm, checkpoint: &Checkpoint) -> Result<LoadedNorm<B>> {
    let vector = |suffix: &str| {
        let mut values = try_vec(0, 0.0f32)?;
        values.try_reserve_exact(norm.width())?;
        for part in &norm.parts {
            let (tensor, dtype) = checkpoint.tensor(&format!("{part}.{suffix}"), &norm.shape)?;
            values.extend_from_slice(&checkpoint.read_f32(tensor, dtype)?);
        }
        backend.vector(&values)
    };
    Ok(LoadedNorm { spec: norm.clone(), weight: vector("weight")?, bias: norm.bias.then(|| vector("bias")).transpose()? })
}

fn load_linear<B: Backend>(
    backend: &B,
    linear: &Linear,
    checkpoint: &Checkpoint,
    advance: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<LoadedLinear<B>> {
    let mut parts = Parts::find(linear, checkpoint)?;
    let weight = backend.matrix(linear.rows(), linear.cols, parts.dtype, &mut |first, out| {
        parts.read_rows(first, out)?;
        advance(out.len())
    })?;
    let mut bias = try_vec(0, 0.0f32)?;
    bias_of(linear, checkpoint, |tensor, _, dtype| {
        let values = checkpoint.read_f32(tensor, dtype)?;
        bias.try_reserve_exact(values.len())?;
        bias.extend((0..values.len()).map(|row| values[linear.layout.run_at(values.len(), row).0]));
        Ok(())
    })?;
    let bias = linear.bias.then(|| backend.vector(&bias)).transpose()?;
    Ok(LoadedLinear { weight, bias, rows: linear.rows() })
}

/// Visits the biases of the parts, if it has any.
fn bias_of(linear: &Linear, checkpoint: &Checkpoint, mut visit: impl FnMut(&Tensor, usize, Dtype) -> Result<()>) -> Result<()> {
    for (name, rows) in linear.parts.iter().filter(|_| linear.bias) {
        let (tensor, dtype) = checkpoint.tensor(&format!("{name}.bias"), &[*rows])?;
        visit(tensor, *rows, dtype)?;
    }
    Ok(())
}

/// The tensors that make up one matrix, served row by row in one type.
struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    parts: Vec<(&'a Tensor, Dtype, usize)>, // with its rows
    cols: usize,
    layout: Layout,
    /// The parts' common type, or f32 where they differ.
    dtype: Dtype,
    /// A part stored as `[in, out]`, read whole: its index and bytes.
    whole: Option<(usize, Vec<u8>)>,
    piece: Vec<u8>,
}

impl<'a> Parts<'a> {
    fn find(linear: &Linear, checkpoint: &'a Checkpoint) -> Result<Parts<'a>> {
        let mut parts = Vec::new();
        for (name, rows) in &linear.parts {
            let shape = match linear.layout {
                Layout::OutIn | Layout::ByKvHead { .. } => [*rows, linear.cols],
                Layout::InOut => [linear.cols, *rows],
            };
            let (tensor, dtype) = checkpoint.tensor(&format!("{name}.weight"), &shape)?;
            parts.push((tensor, dtype, *rows));
        }
        let first = parts[0].1;
        let dtype = if parts.iter().all(|part| part.1 == first) { first } else { Dtype::F32 };
        Ok(Parts { checkpoint, parts, cols: linear.cols, layout: linear.layout, dtype, whole: None, piece: Vec::new() })
    }

    /// Fills `out` with whole rows from row `first`.
    fn read_rows(&mut self, first: usize, out: &mut [u8]) -> Result<()> {
        let row_bytes = self.cols * self.dtype.bytes();
        let (mut start, mut filled) = (0, 0);
        for part in 0..self.parts.len() {
            let rows = self.parts[part].2;
            let (from, end) = (first + filled / row_bytes, first + out.len() / row_bytes);
            if from < start + rows && from < end {
                let count = end.min(start + rows) - from;
                self.read_part(part, from - start, count, &mut out[filled..filled + count * row_bytes])?;
                filled += count * row_bytes;
            }
            start += rows;
        }
        Ok(())
    }

    fn read_part(&mut self, part: usize, first: usize, count: usize, out: &mut [u8]) -> Result<()> {
        let dtype = self.parts[part].1;
        if dtype == self.dtype {
            return self.read_stored(part, first, out);
        }
        let len = count * self.cols * dtype.bytes();
        let mut piece = std::mem::take(&mut self.piece);
        piece.clear();
        piece.try_reserve_exact(len)?;
        piece.resize(len, 0);
        self.read_stored(part, first, &mut piece)?;
        to_f32(&piece, dtype, |i, value| out[4 * i..][..4].copy_from_slice(&value.to_le_bytes()));
        self.piece = piece;
        Ok(())
    }

    /// As the part's numbers are stored.
    fn read_stored(&mut self, part: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let ((tensor, dtype, rows), cols) = (self.parts[part], self.cols);
        let bytes = dtype.bytes();
        if self.layout == Layout::InOut {
            let whole = self.whole(part)?;
            for (i, element) in out.chunks_exact_mut(bytes).enumerate() {
                let (row, col) = (first + i / cols, i % cols);
                element.copy_from_slice(&whole[(col * rows + row) * bytes..][..bytes]);
            }
            return Ok(());
        }
        let (row_bytes, mut row, mut out) = (cols * bytes, first, out);
        while !out.is_empty() {
            let (stored, run) = self.layout.run_at(rows, row);
            let (now, rest) = out.split_at_mut(out.len().min(run * row_bytes));
            self.checkpoint.read(tensor, (stored * row_bytes) as u64, now)?;
            row += now.len() / row_bytes;
            out = rest;
        }
        Ok(())
    }

    fn whole(&mut self, part: usize) -> Result<&[u8]> {
        if self.whole.as_ref().is_none_or(|(index, _)| *index != part) {
            let (tensor, dtype, rows) = self.parts[part];
            let mut bytes = try_vec(rows * self.cols * dtype.bytes(), 0u8)?;
            self.checkpoint.read(tensor, 0, &mut bytes)?;
            self.whole = Some((part, bytes));
        }
        Ok(self.whole.as_ref().map_or(&[], |(_, bytes)| bytes))
    }
}
