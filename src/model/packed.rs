//! The packed form of a model's matrices: a cache file with the packed weights, so that the next
//! load only reads it.
//!
//! Its parts, in this order:
//! - The identity: lines of text, padded with zeros to `HEADER_BYTES`.
//! - The matrices, in the order of loading. The backend determines their sizes.
//! - A CRC-32 (4 bytes) for each piece of each matrix.
//!
//! The reader derives every size and the whole header from the model's files, and trusts nothing in
//! the form. If anything differs, or the checksum of a piece is wrong, the weights are loaded from
//! the model's files.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::checkpoint::Checkpoint;
use super::formats::Formats;
use super::spec::ModelSpec;
use crate::backend::{Alloc, PACKED_PIECE, Section};
use crate::error::{Error, Result, Text, try_format, try_vec};
use crate::sys::files;
use crate::types::hex::Hex;
use crate::types::options::WeightFormat;

/// Version of the file format. The backend has its own version of the matrix layout.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 512;
const SUM_BYTES: usize = size_of::<u32>();

/// The use of the packed form in a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PackedForm {
    /// No directory was configured.
    #[default]
    Unused,
    /// The weights were read from it.
    Read,
    /// The weights were loaded from the model's files, and the form was written.
    Saved,
    /// The weights were loaded from the model's files, and the form could not be written.
    Unsaved,
}

/// The use of the packed form, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PackedReport {
    pub form: PackedForm,
    /// Reasons why it was not read or not written. Empty if it was read.
    pub reason: String,
}

/// The path of a model's packed form, and its expected header and sizes.
pub struct TensorLocation {
    path: PathBuf,
    header: Vec<u8>, // [HEADER_BYTES]
    matrix_bytes: u64,
    pieces: usize,
}

impl TensorLocation {
    pub fn for_model<B: Alloc>(
        dir: &Path,
        backend: &B,
        spec: &ModelSpec,
        checkpoint: &Checkpoint,
        requested: Option<WeightFormat>,
    ) -> Result<TensorLocation> {
        let (mut made, mut matrix_bytes, mut pieces) = (Sha256::new(), 0, 0);
        Formats::new(backend, checkpoint, requested).visit(spec, |linear, sections| {
            made.update(try_format(format_args!("{linear:?} {sections:?}\n"))?);
            let bytes = backend.matrix_bytes(linear.cols, sections);
            matrix_bytes += bytes;
            pieces += pieces_of(bytes);
            Ok(())
        })?;
        let model = hex(&checkpoint.fingerprint(&hex(&made.finalize())?)?)?;
        let mut text = Text::default();
        let files = hex(&checkpoint.times()?)?;
        let layout = backend.matrix_layout();
        write!(text, "pagedllm packed weights\nversion {VERSION}\nlayout {layout}\nmodel {model}\nfiles {files}\n")
            .map_err(|_| Error::out_of_memory())?;
        let mut header = text.0.into_bytes();
        header.try_reserve_exact(HEADER_BYTES)?;
        header.resize(HEADER_BYTES, 0);
        Ok(TensorLocation { path: dir.join(format!("{}.packed", &model[..32])), header, matrix_bytes, pieces })
    }

    fn bytes(&self) -> u64 {
        HEADER_BYTES as u64 + self.matrix_bytes + (self.pieces * SUM_BYTES) as u64
    }

    /// Opens the form if it matches this model. Its contents are checked as they are read.
    pub fn open(&self) -> Result<Reader> {
        let file = files::open(&self.path)?.ok_or_else(|| Error::not_found("no packed weights yet"))?;
        let io = |e: std::io::Error| self.error(&format!("cannot be read: {e}"));
        let bytes = file.metadata().map_err(io)?.len();
        let mut header = [0; HEADER_BYTES];
        let read = header.len().min(bytes as usize);
        file.read_exact_at(&mut header[..read], 0).map_err(io)?;
        if header[..] != self.header[..] {
            return Err(self.error(self.otherwise(&header)));
        }
        if bytes != self.bytes() {
            return Err(self.error(&format!("wrong size ({bytes} bytes, expected {})", self.bytes())));
        }
        let mut sums = try_vec(self.pieces * SUM_BYTES, 0)?;
        file.read_exact_at(&mut sums, HEADER_BYTES as u64 + self.matrix_bytes).map_err(io)?;
        Ok(Reader { path: self.path.clone(), file, sums, offset: HEADER_BYTES as u64, piece: 0 })
    }

    /// Describes how a header differs from the expected one.
    fn otherwise(&self, header: &[u8; HEADER_BYTES]) -> &'static str {
        const LINES: [&str; 5] = [
            "not packed weights",
            "packed by another version of the library",
            "packed for other kernels",
            "packed from another model",
            "packed before the model files changed",
        ];
        let lines = header.split(|&byte| byte == b'\n').zip(self.header.split(|&byte| byte == b'\n'));
        let same = lines.take_while(|(found, wanted)| found == wanted).count();
        LINES.get(same).copied().unwrap_or("damaged header")
    }

    fn error(&self, what: &str) -> Error {
        Error::io(format!("{}: {what}", self.path.display()))
    }

    /// Starts a new form. An existing one is kept until the new one is finished.
    pub fn create(&self) -> Result<Writer<'_>> {
        let mut sums = Vec::new();
        sums.try_reserve_exact(self.pieces * SUM_BYTES)?;
        let unfinished = self.path.with_extension("unfinished");
        let file = files::create_locked(&unfinished)?;
        let mut writer = Writer { place: self, unfinished, file, len: 0, sums };
        writer.append(&self.header)?;
        Ok(writer)
    }
}

fn hex(hash: &[u8]) -> Result<String> {
    try_format(format_args!("{}", Hex(hash)))
}

/// Returns the number of pieces of a matrix.
fn pieces_of(bytes: u64) -> usize {
    bytes.div_ceil(PACKED_PIECE as u64) as usize
}

/// A reader of the matrices, in the order in which they were written.
pub struct Reader {
    path: PathBuf,
    file: File,
    sums: Vec<u8>, // [pieces] of SUM_BYTES
    /// Offset of the next matrix in the file. `piece` is its index in `sums`.
    offset: u64,
    piece: usize,
}

impl Reader {
    pub fn matrix<B: Alloc>(&mut self, backend: &B, cols: usize, sections: &[Section]) -> Result<B::Matrix> {
        let sums = self.sums.as_chunks::<SUM_BYTES>().0;
        let matrix = backend.matrix_of_packed(cols, sections, &|piece, out| {
            let (number, offset) = (self.piece + piece, self.offset + (piece * PACKED_PIECE) as u64);
            let read = self.file.read_exact_at(out, offset);
            read.map_err(|e| Error::io(format!("{}: cannot read {} bytes at {offset}: {e}", self.path.display(), out.len())))?;
            match crc32fast::hash(out).to_le_bytes() == sums[number] {
                true => Ok(()),
                false => Err(Error::io(format!("{}: wrong checksum ({} bytes at {offset})", self.path.display(), out.len()))),
            }
        })?;
        let bytes = backend.matrix_bytes(cols, sections);
        self.offset += bytes;
        self.piece += pieces_of(bytes);
        Ok(matrix)
    }
}

/// An unfinished form, under a temporary name. Dropping it deletes the file. If the process is
/// killed, the next writer overwrites the file.
pub struct Writer<'a> {
    place: &'a TensorLocation,
    unfinished: PathBuf,
    file: File,
    len: u64,
    sums: Vec<u8>, // [pieces so far] of SUM_BYTES
}

impl Writer<'_> {
    pub fn add<B: Alloc>(&mut self, backend: &B, matrix: &B::Matrix) -> Result<()> {
        let bytes = backend.packed_bytes(matrix)?;
        for piece in bytes.chunks(PACKED_PIECE) {
            self.sums.extend_from_slice(&crc32fast::hash(piece).to_le_bytes());
            self.append(piece)?;
        }
        Ok(())
    }

    /// Renames the file to the form's name. Does not sync it to disk: checksums detect what a crash
    /// of the machine may lose.
    pub fn finish(mut self) -> Result<()> {
        let sums = std::mem::take(&mut self.sums);
        self.append(&sums)?;
        let renamed = fs::rename(&self.unfinished, &self.place.path);
        renamed.map_err(|e| self.place.error(&format!("cannot be replaced: {e}")))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        files::append(&mut self.file, self.len, bytes).map_err(|e| e.within(self.unfinished.display()))?;
        self.len += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        // After a rename, the temporary name may belong to another writer, whose file must stay.
        if files::is_at(&self.file, &self.unfinished) {
            let _ = fs::remove_file(&self.unfinished);
        }
    }
}
