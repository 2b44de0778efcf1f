//! Memory of a device: allocations, and transfers from and to the host.

use std::ops::Range;

use super::{AttentionShape, BackendTypes, HeadGroups, Routing};
use crate::error::{Error, Result};
use crate::types::batch::Batch;
use crate::types::blocks::BlockType;
use crate::types::options::{Dtype, WeightFormat};

/// Allocates memory, and transfers weights, batches and results.
///
/// Allocations return `OutOfMemory` if the memory is exhausted. Each `*_bytes` function returns the
/// exact number of bytes that another function allocates, so that memory can be planned before it
/// is allocated.
pub trait Alloc: BackendTypes {
    /// Returns the unallocated bytes of device memory. None: the backend uses host memory.
    fn free_bytes(&self) -> Result<Option<u64>>;

    /// Allocates a buffer of `len` numbers, whose contents are unspecified.
    fn buffer(&self, len: usize) -> Result<Self::Buf>;
    /// Allocates a buffer with these numbers.
    fn vector(&self, values: &[f32]) -> Result<Self::Buf>;

    /// Creates a matrix of `[rows of all sections, cols]`, packed in the backend's own layout. The
    /// group or block size of each section divides `cols`.
    ///
    /// Errors: `Model` if the format cannot represent a number, `Unsupported` if the backend does
    /// not support the format, and the errors of `source`.
    fn matrix(&self, cols: usize, sections: &[Section], source: RowSource) -> Result<Self::Matrix>;
    /// Frees what only the creation of matrices needs.
    fn end_loading(&self) {}
    /// Returns the bytes that such a matrix allocates.
    fn matrix_bytes(&self, cols: usize, sections: &[Section]) -> u64;
    /// Returns whether matrices can have `Storage::Blocks`, and several sections.
    fn stores_blocks(&self) -> bool {
        false
    }
    /// Returns the packed bytes of a matrix. Their number is `matrix_bytes`.
    ///
    /// Errors: `Unsupported` if the backend has no packed form.
    fn packed_bytes<'a>(&'a self, matrix: &'a Self::Matrix) -> Result<&'a [u8]>;
    /// Creates a matrix from its packed bytes.
    ///
    /// Errors: `Unsupported` if the backend has no packed form, and the errors of `source`.
    fn matrix_of_packed(&self, cols: usize, sections: &[Section], source: PackedSource) -> Result<Self::Matrix>;
    /// Returns the name of the packed layout. Packed bytes are valid for every backend with the
    /// same name.
    fn matrix_layout(&self) -> &'static str;

    /// Allocates working memory for attention of this shape, so that no step allocates.
    fn reserve(&self, shape: &AttentionShape) -> Result<()>;
    /// Returns the bytes that `reserve` allocates per thread.
    fn reserved_bytes(&self, shape: &AttentionShape) -> u64;
    /// Allocates working memory for products of up to `rows` rows with up to `cols` columns.
    fn reserve_rows(&self, rows: usize, cols: usize) -> Result<()>;
    /// Returns the bytes that `reserve_rows` allocates.
    fn reserved_rows_bytes(&self, rows: usize, cols: usize) -> u64;

    /// Allocates routes for up to `rows` rows. `max` bounds the number of experts and `top_k`. No
    /// step allocates more.
    ///
    /// Errors: `Unsupported` if the backend does not support this many experts.
    fn routes(&self, rows: usize, max: Routing) -> Result<Self::Routes>;
    /// Returns the bytes that `routes` allocates.
    fn routes_bytes(&self, rows: usize, max: Routing) -> u64;

    /// Allocates input buffers for batches up to the limits, so that no step allocates.
    fn reserve_inputs(&self, _limits: &InputLimits, _inputs: &mut Self::Inputs) -> Result<()> {
        Ok(())
    }
    /// Returns the bytes that `reserve_inputs` allocates.
    fn reserved_inputs_bytes(&self, _limits: &InputLimits) -> u64 {
        0
    }
    /// Uploads a batch and starts its step. Returns the extent that the following ops have to use.
    /// Reports pending errors of the device.
    fn upload(&self, batch: &Batch, inputs: &mut Self::Inputs) -> Result<Extent>;

    /// Waits for the ops that compute the buffer. Returns its first `len` numbers, or the pending
    /// error of the device.
    fn read<'a>(&'a self, buf: &'a mut Self::Buf, len: usize) -> Result<&'a [f32]>;
    /// Starts to read the logits of a step: `[rows, width]`. Only the rows in `_runs` are read. Ops
    /// that are queued afterwards may overwrite the buffer.
    fn start_read(&self, _buf: &mut Self::Buf, _width: usize, _rows: usize, _runs: impl Iterator<Item = Range<usize>>) -> Result<()> {
        Ok(())
    }
    /// Waits for the last `start_read`. Returns the first `len` numbers; the contents of the rows
    /// that were not read are unspecified. Errors: the pending error of the device.
    fn finish_read<'a>(&'a self, buf: &'a mut Self::Buf, len: usize) -> Result<&'a [f32]> {
        self.read(buf, len)
    }
}

/// Consecutive rows of a matrix that are stored alike. The tensors of one matrix may differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Section {
    pub rows: usize,
    pub storage: Storage,
}

/// What a source has and what the matrix stores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Storage {
    /// Numbers, which are converted.
    Numbers { from: Dtype, to: WeightFormat },
    /// Blocks of integer codes, whose numbers are kept exactly.
    Blocks(BlockType),
}

impl Section {
    /// Returns a section of numbers, which are converted.
    pub fn numbers(rows: usize, from: Dtype, to: WeightFormat) -> Section {
        Section { rows, storage: Storage::Numbers { from, to } }
    }

    /// Returns the bytes of a row in the source.
    pub fn row_bytes(&self, cols: usize) -> usize {
        match self.storage {
            Storage::Numbers { from, .. } => cols * from.bytes(),
            Storage::Blocks(kind) => kind.row_bytes(cols),
        }
    }
}

/// Source of the rows of a matrix.
pub struct RowSource<'a> {
    /// Reads whole rows of one section, starting at the given row of the matrix: little-endian
    /// numbers, or blocks. Several threads may call it concurrently, in any order. Each row is read
    /// once.
    pub read: &'a (dyn Fn(usize, &mut [u8]) -> Result<()> + Sync),
    /// Reports how many more bytes have been read. The loading thread calls it from time to time,
    /// while no thread reads. An error aborts the load.
    pub advance: &'a mut dyn FnMut(usize) -> Result<()>,
}

/// Reads one piece of a packed matrix, by the number of the piece. A piece has `PACKED_PIECE`
/// bytes; the last one may be shorter. Any thread may call it.
pub type PackedSource<'a> = &'a (dyn Fn(usize, &mut [u8]) -> Result<()> + Sync);

/// Bytes per piece of a packed matrix. A piece fits the L2 cache of a core, so its checksum is
/// computed while the piece is cached.
pub const PACKED_PIECE: usize = 256 << 10;

/// The size of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchSize {
    pub tokens: usize,
    pub sequences: usize,
    pub logits: usize,
    /// Block-table entries, summed over all groups.
    pub table_entries: usize,
    pub groups: usize,
}

/// Number of rows that operations process, and number of those rows whose logits are read. A device
/// may process more rows than the batch has, as padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub rows: usize,
    pub logits: usize,
}

impl Extent {
    pub fn for_batch(batch: &Batch) -> Extent {
        Extent { rows: batch.token_count(), logits: batch.logit_rows.len() }
    }
}

/// The largest batch of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct InputLimits {
    pub max: BatchSize,
    /// The distinct divisions of heads of all layers.
    pub heads: Vec<HeadGroups>,
}

/// Returns the error for a row with a number that the format cannot represent.
pub(super) fn no_such_number(row: usize, format: WeightFormat) -> Error {
    Error::model(format!("row {row} has a number that is NaN, infinite or too large for weight_format {}", format.name()))
}
