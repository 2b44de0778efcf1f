//! The storage types of matrices.

use super::records::Records;
use crate::backend::Storage;
use crate::error::{Error, Result};
use crate::types::options::{Dtype, WeightFormat};

/// The storage type of the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    As(Dtype),
    Fp8,
    /// Blocks of integer codes.
    Records(Records),
}

impl Stored {
    /// Errors: `Unsupported` for the integer formats, and for blocks without codes.
    pub fn for_storage(storage: Storage) -> Result<Stored> {
        match storage {
            Storage::Numbers { to, .. } => Stored::for_format(to),
            Storage::Blocks(kind) => match Records::of(kind) {
                Some(records) => Ok(Stored::Records(records)),
                None => Err(Error::internal(format!("a section of {} blocks, which have no codes", kind.name()))),
            },
        }
    }

    /// Errors: `Unsupported` for the integer formats.
    fn for_format(format: WeightFormat) -> Result<Stored> {
        match format {
            WeightFormat::F32 => Ok(Stored::As(Dtype::F32)),
            WeightFormat::F16 => Ok(Stored::As(Dtype::F16)),
            WeightFormat::Bf16 => Ok(Stored::As(Dtype::Bf16)),
            WeightFormat::Fp8 => Ok(Stored::Fp8),
            WeightFormat::Int8 | WeightFormat::Int4 { .. } => Err(Error::unsupported(format!(
                "weight_format is {}, which CUDA devices do not support; give f32, f16, bf16 or fp8",
                format.name()
            ))),
        }
    }

    /// Returns the type in which numbers are multiplied, to which a product rounds its rows.
    pub fn multiplied(self) -> Dtype {
        match self {
            Stored::As(dtype) => dtype,
            Stored::Fp8 | Stored::Records(_) => Dtype::Bf16,
        }
    }

    /// Returns the numbers that a row occupies, including zero padding.
    pub fn pitch(self, cols: usize) -> usize {
        cols.next_multiple_of(if self == Stored::Fp8 { 16 } else { 8 })
    }

    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Stored::As(dtype) => self.pitch(cols) * dtype.bytes(),
            Stored::Fp8 => self.pitch(cols),
            Stored::Records(records) => records.row_bytes(cols),
        }
    }

    /// Returns the bytes of a row's scale, which follows all rows.
    pub fn scale_bytes(self) -> usize {
        if self == Stored::Fp8 { size_of::<f32>() } else { 0 }
    }
}
