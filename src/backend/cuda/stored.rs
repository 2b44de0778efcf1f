//! The storage types of matrices.

use super::records::{Records, Source};
use crate::backend::Storage;
use crate::error::{Error, Result};
use crate::types::options::{Dtype, WeightFormat};

/// The storage type of the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    As(Dtype),
    Fp8,
    Int8,
    /// Blocks of integer codes, and int4.
    Records(Records),
}

impl Stored {
    /// Errors: `Unsupported` for group sizes that int4 does not have.
    pub fn for_storage(storage: Storage) -> Result<Stored> {
        match storage {
            Storage::Numbers { to, .. } => Stored::for_format(to),
            Storage::Blocks(kind) => match Records::of(kind) {
                Some(records) => Ok(Stored::Records(records)),
                None => Err(Error::internal(format!("a section of {} blocks, which have no codes", kind.name()))),
            },
        }
    }

    fn for_format(format: WeightFormat) -> Result<Stored> {
        match format {
            WeightFormat::F32 => Ok(Stored::As(Dtype::F32)),
            WeightFormat::F16 => Ok(Stored::As(Dtype::F16)),
            WeightFormat::Bf16 => Ok(Stored::As(Dtype::Bf16)),
            WeightFormat::Fp8 => Ok(Stored::Fp8),
            WeightFormat::Int8 => Ok(Stored::Int8),
            WeightFormat::Int4 { group, offsets } if WeightFormat::GROUPS.contains(&group) => {
                Ok(Stored::Records(Records::of_int4(group, offsets)))
            }
            WeightFormat::Int4 { group, .. } => {
                Err(Error::unsupported(format!("weight_group is {group}; give one of {:?}", WeightFormat::GROUPS)))
            }
        }
    }

    /// Returns whether a number is a byte, and rows have a scale.
    pub fn is_bytes(self) -> bool {
        matches!(self, Stored::Fp8 | Stored::Int8)
    }

    /// Refuses columns that are not whole groups.
    pub fn check_columns(self, cols: usize) -> Result<()> {
        match self {
            Stored::Records(records) => match records.source() {
                Source::Int4 { group } if !cols.is_multiple_of(group) => Err(Error::unsupported(format!(
                    "weight_group is {group}, which does not divide {cols} columns; set weight_format to int8"
                ))),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Returns the type in which numbers are multiplied, to which a product rounds its rows.
    pub fn multiplied(self) -> Dtype {
        match self {
            Stored::As(dtype) => dtype,
            Stored::Fp8 | Stored::Int8 | Stored::Records(_) => Dtype::Bf16,
        }
    }

    /// Returns the numbers that a row occupies, including zero padding.
    pub fn pitch(self, cols: usize) -> usize {
        cols.next_multiple_of(if self.is_bytes() { 16 } else { 8 })
    }

    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Stored::As(dtype) => self.pitch(cols) * dtype.bytes(),
            Stored::Fp8 | Stored::Int8 => self.pitch(cols),
            Stored::Records(records) => records.row_bytes(cols),
        }
    }

    /// Returns the bytes of a row's scale, which follows all rows.
    pub fn scale_bytes(self) -> usize {
        if self.is_bytes() { size_of::<f32>() } else { 0 }
    }
}
