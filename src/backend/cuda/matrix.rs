//! Matrices on the device: rows in their storage type, each aligned to 16 bytes. In fp8 and int8, the
//! rows are followed by their scales.

use half::{bf16, f16};

use super::device::Device;
use super::fp8;
use super::memory::{Address, Memory};
use super::records::Source;
use super::stored::Stored;
use super::uploads::Uploads;
use crate::backend::alloc::no_such_number;
use crate::backend::cpu::{Int4Row, int8_row};
use crate::backend::{RowSource, Section, Storage};
use crate::error::{Error, Result, try_vec, try_with_capacity};
use crate::types::options::Dtype;

pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    /// At least one part.
    parts: Vec<Part>,
    memory: Memory,
}

/// Consecutive rows of one storage type.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Number of the first row in the matrix.
    pub first: usize,
    pub rows: usize,
    pub cols: usize,
    pub stored: Stored,
    pub address: Address,
}

impl Matrix {
    pub fn bytes(cols: usize, section: &Section) -> u64 {
        // Loading reports formats that cannot be stored.
        Stored::for_storage(section.storage).map_or(0, |stored| bytes_of(stored, section.rows, cols).next_multiple_of(16) as u64)
    }

    /// Reads rows and stores them in the formats of the sections.
    pub fn load(device: &Device, uploads: &mut Uploads, cols: usize, sections: &[Section], mut source: RowSource) -> Result<Matrix> {
        let memory = device.memory(sections.iter().map(|section| Self::bytes(cols, section)).sum())?;
        let mut matrix = Matrix { rows: 0, cols, parts: try_with_capacity(sections.len())?, memory };
        let loaded = matrix.load_sections(device, uploads, sections, &mut source);
        // Also after an error, because the memory is freed.
        let transferred = device.wait();
        loaded.and(transferred).map(|()| matrix)
    }

    fn load_sections(&mut self, device: &Device, uploads: &mut Uploads, sections: &[Section], source: &mut RowSource) -> Result<()> {
        let (cols, mut offset) = (self.cols, 0);
        for section in sections {
            let (first, rows, stored) = (self.rows, section.rows, Stored::for_storage(section.storage)?);
            stored.check_columns(cols)?;
            let part = Part { first, rows, cols, stored, address: self.memory.address().at(offset) };
            Loading { device, memory: &self.memory, offset, part, section }.run(uploads, source)?;
            self.parts.push(part);
            self.rows += rows;
            offset += Self::bytes(cols, section);
        }
        Ok(())
    }

    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the part that has all rows. None: there are several.
    pub fn only(&self) -> Option<&Part> {
        if let [part] = &self.parts[..] { Some(part) } else { None }
    }
}

impl Part {
    /// Returns the address of this part's numbers among those of all outputs, or null if these have none.
    pub fn outputs_at(&self, outputs: Address) -> Address {
        if outputs == Address::NULL { outputs } else { outputs.at((self.first * size_of::<f32>()) as u64) }
    }

    /// Returns the address of the rows' scales, if they have scales.
    pub fn scales(&self) -> Address {
        self.address.at((self.rows * self.stored.row_bytes(self.cols)) as u64)
    }

    pub fn pitch(&self) -> usize {
        self.stored.pitch(self.cols)
    }
}

fn bytes_of(stored: Stored, rows: usize, cols: usize) -> usize {
    rows * (stored.row_bytes(cols) + stored.scale_bytes())
}

/// The transfer of a part to the device.
struct Loading<'a> {
    device: &'a Device,
    memory: &'a Memory,
    /// Place of the part in the memory.
    offset: u64,
    part: Part,
    section: &'a Section,
}

impl Loading<'_> {
    fn run(&self, uploads: &mut Uploads, source: &mut RowSource) -> Result<()> {
        let Part { first, rows, cols, stored, .. } = self.part;
        let (row, padded) = (self.section.row_bytes(cols), stored.row_bytes(cols));
        let piece = Uploads::rows(row.max(padded)).min(rows);
        let is_verbatim =
            row == padded && matches!((self.section.storage, stored), (Storage::Numbers { from, .. }, Stored::As(to)) if from == to);
        let mut read = try_vec(if is_verbatim { 0 } else { piece * row }, 0u8)?;
        let mut scales = try_vec(rows * stored.scale_bytes(), 0u8)?;
        let converts = matches!(self.section.storage, Storage::Numbers { .. }) && !matches!(stored, Stored::As(_));
        let mut buffers = Buffers { floats: try_vec(if converts { cols } else { 0 }, 0.0f32)?, int4: Int4Row::default() };
        for start in (0..rows).step_by(piece.max(1)) {
            let count = piece.min(rows - start);
            let written = uploads.fill(self.device, count * padded)?;
            if is_verbatim {
                (source.read)(first + start, written)?;
            } else {
                let read = &mut read[..count * row];
                (source.read)(first + start, read)?;
                written.fill(0); // rows may be padded
                for (i, (from, to)) in read.chunks_exact(row.max(1)).zip(written.chunks_exact_mut(padded.max(1))).enumerate() {
                    if let Some(scale) = self.store_row(start + i, from, to, &mut buffers)? {
                        scales.as_chunks_mut().0[start + i] = scale.to_le_bytes();
                    }
                }
            }
            (source.advance)(count * row)?;
            uploads.send(self.device, self.memory, self.offset + (start * padded) as u64, count * padded);
        }
        self.device.write(self.memory, self.offset + (rows * padded) as u64, &scales)
    }

    /// Stores a row of the part. Returns its scale, if rows have scales.
    fn store_row(&self, row: usize, from: &[u8], to: &mut [u8], buffers: &mut Buffers) -> Result<Option<f32>> {
        let row = self.part.first + row;
        match (self.section.storage, self.part.stored) {
            (Storage::Blocks(_), Stored::Records(records)) => {
                let Source::Blocks(kind) = records.source() else { return Err(Error::internal("blocks are stored as int4")) };
                to.fill(0);
                records.store_blocks(kind, from, to).map(|()| None).map_err(|error| error.within(format_args!("row {row}")))
            }
            (Storage::Numbers { from: dtype, to: format }, Stored::As(to_dtype)) => {
                convert(dtype, to_dtype, from, to).map(|()| None).map_err(|NoSuchNumber| no_such_number(row, format))
            }
            (Storage::Numbers { from: dtype, to: format }, stored) => {
                dtype.visit(from, |k, x| buffers.floats[k] = x);
                buffers.store(stored, to).ok_or_else(|| no_such_number(row, format))
            }
            (Storage::Blocks(_), _) => Err(Error::internal("a section is stored as another one")),
        }
    }
}

/// A row on the way from its file to a format with scales.
struct Buffers {
    floats: Vec<f32>,
    int4: Int4Row,
}

impl Buffers {
    /// Stores the row, which may be shorter than `to`. Returns its scale, if rows have scales. None:
    /// the format cannot represent a number.
    fn store(&mut self, stored: Stored, to: &mut [u8]) -> Option<Option<f32>> {
        let Buffers { floats, int4 } = self;
        match stored {
            Stored::Fp8 => fp8::store_row(floats, to).map(Some),
            Stored::Int8 => int8_row(floats, &mut to[..floats.len()]).map(Some),
            Stored::Records(records) => {
                let Source::Int4 { group } = records.source() else { return None };
                to.fill(0);
                let fits = int4.quantize(floats, group, records.offsets());
                records.store_int4(int4, to);
                fits.then_some(None)
            }
            Stored::As(_) => None,
        }
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
