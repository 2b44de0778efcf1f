//! Matrices on the device: rows of numbers as they are stored, each aligned to 16 bytes.

use half::{bf16, f16};

use super::device::{Address, Device, Function, Memory, Shape};
use super::kernels::Kernels;
use crate::backend::RowSource;
use crate::error::{Error, Result, try_vec};
use crate::options::{Dtype, WeightFormat};

/// Bytes that are read from a file at a time.
const LOAD_BYTES: usize = 16 << 20;
/// Numbers that a row's are rounded up to.
const ALIGNED: usize = 8;

pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
    memory: Memory,
}

pub fn pitch(cols: usize) -> usize {
    cols.next_multiple_of(ALIGNED)
}

/// What is stored in a format. The device multiplies numbers in floating point.
fn dtype_of(format: WeightFormat) -> Result<Dtype> {
    match format {
        WeightFormat::F32 => Ok(Dtype::F32),
        WeightFormat::F16 => Ok(Dtype::F16),
        WeightFormat::Bf16 => Ok(Dtype::Bf16),
        WeightFormat::Int8 | WeightFormat::Int4 { .. } => {
            Err(Error::unsupported(format!("weight_format is {}: a CUDA device takes f32, f16 and bf16", format.name())))
        }
    }
}

impl Matrix {
    pub fn bytes(rows: usize, cols: usize, format: WeightFormat) -> u64 {
        // What cannot be stored is refused when it is loaded.
        let bytes = dtype_of(format).map_or(0, Dtype::bytes);
        (rows * pitch(cols) * bytes) as u64
    }

    /// Reads rows of `dtype`, and stores them in `format`.
    pub fn load(device: &Device, rows: usize, cols: usize, dtype: Dtype, format: WeightFormat, source: RowSource) -> Result<Matrix> {
        let stored = dtype_of(format)?;
        let matrix = Matrix { rows, cols, dtype: stored, memory: device.memory(Self::bytes(rows, cols, format))? };
        let (row, padded) = (cols * dtype.bytes(), pitch(cols) * stored.bytes());
        let piece = (LOAD_BYTES / row.max(1)).clamp(1, rows.max(1));
        let mut read = try_vec(piece * row, 0u8)?;
        let mut written = try_vec(piece * padded, 0u8)?;
        for first in (0..rows).step_by(piece) {
            let count = piece.min(rows - first);
            source(first, &mut read[..count * row])?;
            for (i, (from, to)) in read.chunks_exact(row.max(1)).zip(written.chunks_exact_mut(padded.max(1))).take(count).enumerate() {
                convert(dtype, stored, from, to).map_err(|NoSuchNumber| refused(first + i, format))?;
            }
            device.write(&matrix.memory, (first * padded) as u64, &written[..count * padded])?;
        }
        Ok(matrix)
    }

    pub fn address(&self) -> Address {
        self.memory.address()
    }

    pub fn pitch(&self) -> usize {
        pitch(self.cols)
    }

    /// The one of three kernels that takes its numbers: of f32, f16, bf16.
    pub fn pick(&self, functions: [Function; 3]) -> Function {
        let [f32, f16, bf16] = functions;
        match self.dtype {
            Dtype::F32 => f32,
            Dtype::F16 => f16,
            Dtype::Bf16 => bf16,
        }
    }

    /// The kernel for so many rows, and how it is launched for `count` products of at most `most` rows. Whichever is taken, a row has the same bits.
    pub fn product(&self, kernels: &Kernels, rows: usize, most: usize, count: usize) -> (Function, Shape) {
        let all = kernels.products(self.dtype);
        let (function, tile) = all.into_iter().find(|(_, tile)| rows <= tile.rows).unwrap_or(all[2]);
        let grid = (self.rows.div_ceil(tile.outs) as u32, most.div_ceil(tile.rows) as u32, count as u32);
        (function, Shape { shared: tile.shared(), ..Shape::new(grid, Tile::THREADS) })
    }
}

/// What a block of threads multiplies at a time, as `kernels/matmul.cu` has it.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    rows: usize,
    outs: usize,
    /// Bytes of a step of a row in shared memory.
    pitch: usize,
    /// Steps that there is room for.
    stages: usize,
}

impl Tile {
    pub const FEW: Tile = Tile { rows: 16, outs: 32, pitch: 256 + 16, stages: 6 };
    pub const SOME: Tile = Tile { rows: 64, outs: 64, pitch: 128 + 16, stages: 4 };
    pub const MANY: Tile = Tile { rows: 128, outs: 128, pitch: 64 + 16, stages: 4 };
    const THREADS: u32 = 128;

    /// Bytes of the steps of weights on their way, and of two of the rows.
    pub const fn shared(self) -> u32 {
        ((self.stages * self.outs + 2 * self.rows) * self.pitch) as u32
    }
}

/// The format does not have it.
struct NoSuchNumber;

/// A row of one type as one of another; `to` may be longer, and ends in zeros then.
fn convert(from: Dtype, to: Dtype, row: &[u8], out: &mut [u8]) -> std::result::Result<(), NoSuchNumber> {
    if from == to {
        out[..row.len()].copy_from_slice(row);
        return Ok(());
    }
    for (place, bytes) in row.chunks_exact(from.bytes()).enumerate() {
        let number = match from {
            Dtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        };
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
        if !stored.is_finite() {
            return Err(NoSuchNumber);
        }
    }
    Ok(())
}

fn refused(row: usize, format: WeightFormat) -> Error {
    Error::model(format!("row {row} holds a number that is infinite, not a number or too large for weight_format {}", format.name()))
}
