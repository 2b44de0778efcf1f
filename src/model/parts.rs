//! Reads the rows of a matrix, or of a shard, from the tensors of a checkpoint that it consists of.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::checkpoint::{Checkpoint, Tensor};
use super::mxfp4;
use super::spec::{Layout, Linear, PartRows, RowOrder, Run, Source, TensorPart};
use crate::backend::{Section, Storage};
use crate::error::{Error, Result, try_vec, try_with_capacity};
use crate::types::blocks::BlockType;
use crate::types::options::Dtype;

/// The tensors of one matrix, read by row. Of a shard, only its rows and columns are read.
pub struct Parts<'a> {
    checkpoint: &'a Checkpoint,
    parts: Vec<Stored<'a>>,
    /// The rows of the matrix, in their order.
    pieces: Vec<PartRows>,
    /// The columns of the matrix in its tensors, of which there are `stored_cols`.
    cols: Range<usize>,
    stored_cols: usize,
    layout: Layout,
    order: RowOrder,
    /// The parts' common dtype, or f32 if they differ.
    pub dtype: Dtype,
    /// The index and the bytes of a piece that is stored as `[in, out]`.
    turned: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
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
        let (rows, cols) = (part.rows, linear.stored_cols());
        if let Source::Expert { index, count } = part.source
            && let Some((tensor, scales)) = mxfp4::find(checkpoint, &part.name, [count, rows, cols])?
        {
            let remedy = "lower tensor_parallel";
            check_blocks(&linear.col_range(), cols, (mxfp4::BLOCK, "MXFP4"), remedy).map_err(|error| error.within(&part.name))?;
            return Ok(Stored { tensor, scales: Some(scales), dtype: Dtype::Bf16, rows, offset: index * rows * cols });
        }
        let shape = linear.stored_shape(part);
        let (tensor, dtype) = checkpoint.tensor(&part.weight(), &part.tensor_shape(&shape))?;
        Ok(Stored { tensor, scales: None, dtype, rows, offset: part.offset(&shape) })
    }
}

impl<'a> Parts<'a> {
    pub fn find(linear: &Linear, checkpoint: &'a Checkpoint) -> Result<Parts<'a>> {
        let Linear { layout, order, .. } = *linear;
        let (pieces, cols, stored_cols) = (linear.part_rows(), linear.col_range(), linear.stored_cols());
        let parts: Vec<Stored> = linear.parts.iter().map(|part| Stored::find(linear, part, checkpoint)).collect::<Result<_>>()?;
        let first = parts[0].dtype;
        let dtype = if parts.iter().all(|part| part.dtype == first) { first } else { Dtype::F32 };
        Ok(Parts { checkpoint, parts, pieces, cols, stored_cols, layout, order, dtype, turned: Mutex::default() })
    }

    /// Returns whether a part is stored in blocks of codes, which can be kept.
    pub fn has_blocks(&self) -> bool {
        self.parts.iter().any(|part| self.blocks_of(part).is_some())
    }

    fn blocks_of(&self, part: &Stored) -> Option<BlockType> {
        part.tensor.blocks().filter(|kind| kind.codes().is_some() && self.layout == Layout::OutIn)
    }

    /// Returns sections that keep the storage of each part.
    ///
    /// Errors: `Unsupported` if a shard has columns that are not whole blocks.
    pub fn as_stored(&self) -> Result<Vec<Section>> {
        let mut sections: Vec<Section> = try_with_capacity(self.pieces.len().max(1))?;
        if self.pieces.is_empty() {
            sections.push(Section::numbers(0, self.dtype, self.dtype.into()));
        }
        for &PartRows { part, rows, .. } in &self.pieces {
            let part = &self.parts[part];
            let section = match self.blocks_of(part) {
                Some(kind) => {
                    let remedy = "set weight_format to int8 or lower tensor_parallel";
                    check_blocks(&self.cols, self.stored_cols, (kind.block_len(), kind.name()), remedy)?;
                    Section { rows, storage: Storage::Blocks(kind) }
                }
                None => Section::numbers(rows, part.dtype, part.dtype.into()),
            };
            match sections.last_mut().filter(|last| last.storage == section.storage) {
                Some(last) => last.rows += section.rows,
                None => sections.push(section),
            }
        }
        Ok(sections)
    }

    /// Fills `out` with whole rows of one of the matrix's sections, from row `first` of the matrix
    /// on.
    pub fn read_rows(&self, sections: &[Section], first: usize, out: &mut [u8]) -> Result<()> {
        let mut end = 0;
        let section = sections.iter().find(|section| {
            end += section.rows;
            first < end
        });
        let section = section.expect("the row is in a section");
        let row_bytes = section.row_bytes(self.cols.len());
        let (mut start, mut filled) = (0, 0);
        for (index, &PartRows { rows, .. }) in self.pieces.iter().enumerate() {
            let (from, end) = (first + filled / row_bytes, first + out.len() / row_bytes);
            if from < start + rows && from < end {
                let count = end.min(start + rows) - from;
                self.read_piece(section.storage, index, from - start, &mut out[filled..filled + count * row_bytes])?;
                filled += count * row_bytes;
            }
            start += rows;
        }
        Ok(())
    }

    /// Reads rows of a piece.
    fn read_piece(&self, storage: Storage, piece: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let dtype = self.part_of(piece).dtype;
        let from = match storage {
            Storage::Blocks(kind) => return self.read_blocks(kind, piece, first, out),
            Storage::Numbers { from, .. } => from,
        };
        if dtype == from {
            return self.read_stored(piece, first, out);
        }
        // Different dtypes are read as f32.
        let mut stored = try_vec(out.len() / size_of::<f32>() * dtype.bytes(), 0u8)?;
        self.read_stored(piece, first, &mut stored)?;
        dtype.visit(&stored, |i, value| out[4 * i..][..4].copy_from_slice(&value.to_le_bytes()));
        Ok(())
    }

    fn part_of(&self, piece: usize) -> &Stored<'a> {
        &self.parts[self.pieces[piece].part]
    }

    /// Reads rows of blocks.
    fn read_blocks(&self, kind: BlockType, piece: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let (&Stored { tensor, offset, .. }, stored_bytes) = (self.part_of(piece), kind.row_bytes(self.stored_cols));
        self.read_runs(piece, first, kind.row_bytes(self.cols.len()), false, out, |run, out| {
            let start = (offset / self.stored_cols + run.first) * stored_bytes + kind.row_bytes(self.cols.start);
            self.checkpoint.read_stored(tensor, start as u64, out)
        })
    }

    /// Reads rows in the dtype of the part; MXFP4 is read as bf16.
    fn read_stored(&self, piece: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let (&Stored { tensor, scales, dtype, offset, .. }, cols) = (self.part_of(piece), self.cols.len());
        let bytes = dtype.bytes();
        if self.layout == Layout::InOut && scales.is_none() {
            return self.read_turned(piece, first, out);
        }
        self.read_runs(piece, first, cols * bytes, scales.is_some(), out, |run, out| {
            let start = offset + run.first * self.stored_cols + self.cols.start;
            match scales {
                Some(scales) => mxfp4::StridedRows { blocks: tensor, scales, start, cols, step: run.step }.read(self.checkpoint, out),
                None => self.checkpoint.read(tensor, (start * bytes) as u64, out),
            }
        })
    }

    /// Calls `read` for runs of rows in the file, with their bytes in `out`. Rows are read one by
    /// one if they are not adjacent in the file. `strided`: `read` skips the rows between whole
    /// rows.
    fn read_runs(
        &self,
        piece: usize,
        first: usize,
        row_bytes: usize,
        strided: bool,
        mut out: &mut [u8],
        read: impl Fn(Run, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut row = self.pieces[piece].first + first;
        let has_whole_rows = self.cols.len() == self.stored_cols;
        while !out.is_empty() {
            let run = self.order.run_at(self.part_of(piece).rows, row);
            let at_once = if has_whole_rows && (run.step == 1 || strided) { run.rows } else { 1 };
            let (now, rest) = out.split_at_mut(out.len().min(at_once * row_bytes));
            read(run, now)?;
            row += now.len() / row_bytes;
            out = rest;
        }
        Ok(())
    }

    /// Reads rows of a part stored as `[in, out]`.
    fn read_turned(&self, piece: usize, first: usize, out: &mut [u8]) -> Result<()> {
        let &Stored { dtype, rows, .. } = self.part_of(piece);
        let (bytes, turned, stored) = (dtype.bytes(), self.turned(piece)?, self.turned_rows(piece));
        for (row, out) in out.chunks_exact_mut(self.cols.len() * bytes).enumerate() {
            let row = self.order.run_at(rows, self.pieces[piece].first + first + row).first - stored.start;
            for (col, element) in out.chunks_exact_mut(bytes).enumerate() {
                element.copy_from_slice(&turned[(col * stored.len() + row) * bytes..][..bytes]);
            }
        }
        Ok(())
    }

    /// Returns the rows of a part stored as `[in, out]` that are read for a piece.
    fn turned_rows(&self, piece: usize) -> Range<usize> {
        let PartRows { first, rows, .. } = self.pieces[piece];
        if self.order == RowOrder::Same { first..first + rows } else { 0..self.part_of(piece).rows }
    }

    /// Returns the bytes of a piece as `[cols, turned_rows]`. The first thread that needs them
    /// reads them. At the boundary of two pieces, both may be in memory briefly.
    fn turned(&self, piece: usize) -> Result<Arc<Vec<u8>>> {
        let mut held = self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((index, turned)) = &*held
            && *index == piece
        {
            return Ok(turned.clone());
        }
        *held = None;
        let (&Stored { tensor, dtype, rows, offset, .. }, wanted) = (self.part_of(piece), self.turned_rows(piece));
        let mut bytes = try_vec(wanted.len() * self.cols.len() * dtype.bytes(), 0u8)?;
        // Whole columns are adjacent in the file.
        let at_once = if wanted.len() == rows { self.cols.len() } else { 1 };
        for (index, out) in bytes.chunks_mut(at_once * wanted.len() * dtype.bytes()).enumerate() {
            let start = offset + (self.cols.start + index * at_once) * rows + wanted.start;
            self.checkpoint.read(tensor, (start * dtype.bytes()) as u64, out)?;
        }
        let turned = Arc::new(bytes);
        *held = Some((piece, turned.clone()));
        Ok(turned)
    }
}

/// Refuses columns of a shard that begin or end within a block of the row.
fn check_blocks(cols: &Range<usize>, stored_cols: usize, (block, kind): (usize, &str), remedy: &str) -> Result<()> {
    if cols.len() == stored_cols || cols.start.is_multiple_of(block) && cols.len().is_multiple_of(block) {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "a rank has {} of {stored_cols} columns, which are not whole blocks of {kind} ({block} numbers each); {remedy}",
        cols.len()
    )))
}
