//! Reads the rows of a matrix from the tensors of a checkpoint that it consists of.

use std::sync::{Arc, Mutex, PoisonError};

use super::checkpoint::{Checkpoint, Tensor};
use super::mxfp4;
use super::spec::{Layout, Linear, RowOrder, Run, Source, TensorPart};
use crate::backend::{Section, Storage};
use crate::error::{Result, try_vec, try_with_capacity};
use crate::types::blocks::BlockType;
use crate::types::options::Dtype;

/// The tensors of one matrix, read by row.
pub struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    parts: Vec<Stored<'a>>,
    cols: usize,
    layout: Layout,
    order: RowOrder,
    /// The parts' common dtype, or f32 if they differ.
    pub dtype: Dtype,
    /// A part stored as `[in, out]`, read completely: its index and bytes.
    whole: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
}

/// A part in its file.
#[derive(Clone, Copy)]
struct Stored<'a> {
    tensor: &'a Tensor,
    /// The scales, if the numbers are in MXFP4.
    scales: Option<&'a Tensor>,
    dtype: Dtype,
    rows: usize,
    /// Elements of the tensor before the part.
    offset: usize,
}

impl<'a> Stored<'a> {
    fn find(linear: &Linear, part: &TensorPart, checkpoint: &'a Checkpoint) -> Result<Stored<'a>> {
        let rows = part.rows;
        if let Source::Expert { index, count } = part.source
            && let Some((tensor, scales)) = mxfp4::find(checkpoint, &part.name, [count, rows, linear.cols])?
        {
            return Ok(Stored { tensor, scales: Some(scales), dtype: Dtype::Bf16, rows, offset: index * rows * linear.cols });
        }
        let shape = linear.stored_shape(part);
        let (tensor, dtype) = checkpoint.tensor(&part.weight(), &part.tensor_shape(&shape))?;
        Ok(Stored { tensor, scales: None, dtype, rows, offset: part.offset(&shape) })
    }
}

impl<'a> Parts<'a> {
    pub fn find(linear: &Linear, checkpoint: &'a Checkpoint) -> Result<Parts<'a>> {
        let Linear { cols, layout, order, .. } = *linear;
        let parts: Vec<Stored> = linear.parts.iter().map(|part| Stored::find(linear, part, checkpoint)).collect::<Result<_>>()?;
        let first = parts[0].dtype;
        let dtype = if parts.iter().all(|part| part.dtype == first) { first } else { Dtype::F32 };
        Ok(Parts { checkpoint, parts, cols, layout, order, dtype, whole: Mutex::default() })
    }

    /// Returns whether a part is stored in blocks of codes, which can be kept.
    pub fn has_blocks(&self) -> bool {
        self.parts.iter().any(|part| self.blocks_of(part).is_some())
    }

    fn blocks_of(&self, part: &Stored) -> Option<BlockType> {
        part.tensor.blocks().filter(|kind| kind.codes().is_some() && self.layout == Layout::OutIn)
    }

    /// Returns sections that keep the storage of each part.
    pub fn as_stored(&self) -> Result<Vec<Section>> {
        let mut sections: Vec<Section> = try_with_capacity(self.parts.len())?;
        for part in &self.parts {
            let section = match self.blocks_of(part) {
                Some(kind) => Section { rows: part.rows, storage: Storage::Blocks(kind) },
                None => Section::numbers(part.rows, part.dtype, part.dtype.into()),
            };
            match sections.last_mut().filter(|last| last.storage == section.storage) {
                Some(last) => last.rows += section.rows,
                None => sections.push(section),
            }
        }
        Ok(sections)
    }

    /// Fills `out` with whole rows of one of the matrix's sections, from row `first` of the matrix on.
    pub fn read_rows(&self, sections: &[Section], first: usize, out: &mut [u8]) -> Result<()> {
        let mut end = 0;
        let section = sections.iter().find(|section| {
            end += section.rows;
            first < end
        });
        let section = section.expect("the row is in a section");
        let row_bytes = section.row_bytes(self.cols);
        let (mut start, mut filled) = (0, 0);
        for part in 0..self.parts.len() {
            let rows = self.parts[part].rows;
            let (from, end) = (first + filled / row_bytes, first + out.len() / row_bytes);
            if from < start + rows && from < end {
                let count = end.min(start + rows) - from;
                self.read_part(section.storage, part, from - start, &mut out[filled..filled + count * row_bytes])?;
                filled += count * row_bytes;
            }
            start += rows;
        }
        Ok(())
    }

    fn read_part(&self, storage: Storage, part: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let dtype = self.parts[part].dtype;
        let from = match storage {
            Storage::Blocks(kind) => return self.read_blocks(kind, part, first, out),
            Storage::Numbers { from, .. } => from,
        };
        if dtype == from {
            return self.read_stored(part, first, out);
        }
        // Different dtypes are read as f32.
        let mut piece = try_vec(out.len() / size_of::<f32>() * dtype.bytes(), 0u8)?;
        self.read_stored(part, first, &mut piece)?;
        dtype.visit(&piece, |i, value| out[4 * i..][..4].copy_from_slice(&value.to_le_bytes()));
        Ok(())
    }

    /// Reads rows of blocks.
    fn read_blocks(&self, kind: BlockType, part: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let (Stored { tensor, offset, .. }, row_bytes) = (self.parts[part], kind.row_bytes(self.cols));
        self.read_runs(part, first, row_bytes, false, out, |run, out| {
            self.checkpoint.read_stored(tensor, ((offset / self.cols + run.first) * row_bytes) as u64, out)
        })
    }

    /// Reads rows in the dtype of the part; MXFP4 is read as bf16.
    fn read_stored(&self, part: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let (Stored { tensor, scales, dtype, offset, .. }, cols) = (self.parts[part], self.cols);
        let bytes = dtype.bytes();
        if self.layout == Layout::InOut && scales.is_none() {
            return self.read_turned(part, first, out);
        }
        self.read_runs(part, first, cols * bytes, scales.is_some(), out, |run, out| {
            let start = offset + run.first * cols;
            match scales {
                Some(scales) => mxfp4::StridedRows { blocks: tensor, scales, start, cols, step: run.step }.read(self.checkpoint, out),
                None => self.checkpoint.read(tensor, (start * bytes) as u64, out),
            }
        })
    }

    /// Calls `read` for runs of rows in the file, with their bytes in `out`. Unless `strided`, rows that
    /// are not adjacent in the file are read one by one.
    fn read_runs(
        &self,
        part: usize,
        first: usize,
        row_bytes: usize,
        strided: bool,
        mut out: &mut [u8],
        read: impl Fn(Run, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut row = first;
        while !out.is_empty() {
            let run = self.order.run_at(self.parts[part].rows, row);
            let at_once = if run.step == 1 || strided { run.rows } else { 1 };
            let (now, rest) = out.split_at_mut(out.len().min(at_once * row_bytes));
            read(run, now)?;
            row += now.len() / row_bytes;
            out = rest;
        }
        Ok(())
    }

    /// Reads rows of a part stored as `[in, out]`.
    fn read_turned(&self, part: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let Stored { dtype, rows, .. } = self.parts[part];
        let (bytes, whole) = (dtype.bytes(), self.whole(part)?);
        for (row, out) in out.chunks_exact_mut(self.cols * bytes).enumerate() {
            let row = self.order.run_at(rows, first + row).first;
            for (col, element) in out.chunks_exact_mut(bytes).enumerate() {
                element.copy_from_slice(&whole[(col * rows + row) * bytes..][..bytes]);
            }
        }
        Ok(())
    }

    /// Returns the bytes of a part. The first thread that needs them reads them. At the boundary of
    /// two parts, both may be in memory briefly.
    fn whole(&self, part: usize) -> Result<Arc<Vec<u8>>> {
        let mut held = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((index, whole)) = &*held
            && *index == part
        {
            return Ok(whole.clone());
        }
        *held = None;
        let Stored { tensor, dtype, rows, offset, .. } = self.parts[part];
        let mut bytes = try_vec(rows * self.cols * dtype.bytes(), 0u8)?;
        self.checkpoint.read(tensor, (offset * dtype.bytes()) as u64, &mut bytes)?;
        let whole = Arc::new(bytes);
        *held = Some((part, whole.clone()));
        Ok(whole)
    }
}
