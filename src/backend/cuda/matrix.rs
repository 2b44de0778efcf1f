//! Matrices on the device: rows in their storage type, each aligned to 16 bytes. In fp8, the rows
//! are followed by their scales.

use half::{bf16, f16};

use super::device::Device;
use super::fp8;
use super::memory::{Address, Memory};
use super::stored::Stored;
use crate::backend::alloc::no_such_number;
use crate::backend::{RowSource, Section, Storage};
use crate::error::{Error, Result, try_vec};
use crate::types::options::Dtype;

/// Bytes that are read from a file at a time.
const LOAD_BYTES: usize = 16 << 20;

pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub stored: Stored,
    memory: Memory,
}

impl Matrix {
    pub fn bytes(cols: usize, section: &Section) -> u64 {
        let Storage::Numbers { to, .. } = section.storage else { return 0 };
        // Loading reports formats that cannot be stored.
        Stored::for_format(to).map_or(0, |stored| section.rows as u64 * (stored.row_bytes(cols) + stored.scale_bytes()) as u64)
    }

    /// Reads rows and stores them in the format of the section.
    pub fn load(device: &Device, cols: usize, sections: &[Section], source: RowSource) -> Result<Matrix> {
        let &[Section { rows, storage: Storage::Numbers { from: dtype, to: format } }] = sections else {
            return Err(Error::unsupported("internal error: a matrix on a CUDA device has blocks, or several sections"));
        };
        let stored = Stored::for_format(format)?;
        let matrix = Matrix { rows, cols, stored, memory: device.memory(Self::bytes(cols, &sections[0]))? };
        let (row, padded) = (cols * dtype.bytes(), stored.row_bytes(cols));
        let piece = (LOAD_BYTES / row.max(1)).clamp(1, rows.max(1));
        let mut read = try_vec(piece * row, 0u8)?;
        let mut written = try_vec(piece * padded, 0u8)?;
        let mut scales = try_vec(rows * stored.scale_bytes(), 0u8)?;
        let mut floats = try_vec(if stored == Stored::Fp8 { cols } else { 0 }, 0.0f32)?;
        for first in (0..rows).step_by(piece) {
            let count = piece.min(rows - first);
            (source.read)(first, &mut read[..count * row])?;
            (source.advance)(count * row)?;
            for (i, (from, to)) in read.chunks_exact(row.max(1)).zip(written.chunks_exact_mut(padded.max(1))).take(count).enumerate() {
                let converted = match stored {
                    Stored::As(to_dtype) => convert(dtype, to_dtype, from, to),
                    Stored::Fp8 => {
                        dtype.visit(from, |k, x| floats[k] = x);
                        let scale = fp8::store_row(&floats, to);
                        scale.map(|scale| scales.as_chunks_mut().0[first + i] = scale.to_le_bytes()).ok_or(NoSuchNumber)
                    }
                };
                converted.map_err(|NoSuchNumber| no_such_number(first + i, format))?;
            }
            device.write(&matrix.memory, (first * padded) as u64, &written[..count * padded])?;
        }
        device.write(&matrix.memory, (rows * padded) as u64, &scales)?;
        Ok(matrix)
    }

    pub fn address(&self) -> Address {
        self.memory.address()
    }

    /// Returns the address of the rows' scales, if they have scales.
    pub fn scales(&self) -> Address {
        self.address().at((self.rows * self.stored.row_bytes(self.cols)) as u64)
    }

    pub fn pitch(&self) -> usize {
        self.stored.pitch(self.cols)
    }
}

/// The error for a number that the format cannot represent.
struct NoSuchNumber;

/// Converts a row. `to` may be longer than the row, and is then padded with zeros.
fn convert(from: Dtype, to: Dtype, row: &[u8], out: &mut [u8]) -> std::result::Result<(), NoSuchNumber> {
    if from == to {
        out[..row.len()].copy_from_slice(row);
        return Ok(());
    }
    let mut fits = true;
    from.visit(row, |place, number| {
        let out = &mut out[place * to.bytes()..][..to.bytes()];
        let stored = match to {
            Dtype::F32 => {
                out.copy_from_slice(&number.to_le_bytes());
                number
            }
            Dtype::F16 => {
                out.copy_from_slice(&f16::from_f32(number).to_le_bytes());
                f16::from_f32(number).to_f32()
            }
            Dtype::Bf16 => {
                out.copy_from_slice(&bf16::from_f32(number).to_le_bytes());
                bf16::from_f32(number).to_f32()
            }
        };
        fits &= stored.is_finite();
    });
    if fits { Ok(()) } else { Err(NoSuchNumber) }
}
