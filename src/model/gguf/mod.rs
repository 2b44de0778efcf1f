//! GGUF files, the format of llama.cpp: metadata and tensors. The reader is strict: a file that
//! states anything impossible is refused, and memory stays in proportion to the size of the file.

mod architecture;
mod metadata;
pub(super) mod model;
mod names;
mod split;
#[cfg(test)]
mod tests;
pub mod text;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use metadata::{Metadata, Value};

use crate::backend::blocks;
use crate::error::{Error, Result, try_vec};
use crate::sys::files;
use crate::types::blocks::BlockType;
use metadata::{Header, MAX_DIMENSIONS};

/// An open file, or all files of a model that is split.
#[derive(Debug)]
pub struct Gguf {
    pub(super) files: Vec<(PathBuf, File)>,
    /// The values of the first header.
    pub metadata: Metadata,
    tensors: HashMap<String, Tensor>,
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Sizes, the outermost dimension first: a matrix has `[rows, cols]`.
    pub shape: Vec<usize>,
    /// The storage type of its numbers.
    pub kind: BlockType,
    /// Index of its file.
    pub(super) file: usize,
    /// Position of its first byte in the file.
    pub(super) offset: u64,
    bytes: u64,
}

impl Tensor {
    /// Returns the tensors along the outermost dimension.
    fn split(self) -> impl Iterator<Item = Tensor> {
        let count = self.shape[0];
        (0..count).map(move |index| {
            let piece = self.piece(index, 1);
            Tensor { shape: piece.shape[1..].to_vec(), ..piece }
        })
    }

    /// Divides the tensor into tensors with these sizes along the outermost dimension.
    fn pieces(&self, sizes: &[usize]) -> Result<Vec<Tensor>> {
        if sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) != Some(self.shape[0])
            || self.shape.len() == 1 && self.kind.block_len() > 1
        {
            return Err(Error::model(format!("{} rows in {}; the metadata require {sizes:?}", self.shape[0], self.kind.name())));
        }
        let mut first = 0;
        let piece = |size: &usize| {
            first += size;
            self.piece(first - size, *size)
        };
        Ok(sizes.iter().map(piece).collect())
    }

    fn piece(&self, first: usize, count: usize) -> Tensor {
        let row_bytes = self.bytes / self.shape[0] as u64;
        let mut shape = self.shape.clone();
        shape[0] = count;
        Tensor { shape, offset: self.offset + first as u64 * row_bytes, bytes: count as u64 * row_bytes, ..*self }
    }
}

/// Bytes at the multiples of which tensors begin, unless the metadata have another number.
const ALIGNMENT: usize = 32;
const MAX_ALIGNMENT: usize = 1 << 20;
/// Maximum bytes of the name of a tensor, and of a key, by the format.
const MAX_NAME: usize = 64;
const MAX_KEY: usize = u16::MAX as usize;
/// Maximum number of files of a model.
const MAX_SPLITS: usize = 99_999;
const MAGIC: u32 = u32::from_le_bytes(*b"GGUF");
/// The least bytes of a value (key length, type, one byte) and of the description of a tensor.
const MIN_VALUE_BYTES: u64 = 13;
const MIN_TENSOR_BYTES: u64 = 24;

impl Gguf {
    /// Opens a file and checks its header. The numbers of the tensors are not read. If the model is
    /// split over files, the path is that of the first one.
    pub fn open(path: &Path) -> Result<Gguf> {
        let mut first = Gguf::open_one(path)?;
        let count = first.metadata.whole("split.count", MAX_SPLITS).map_err(|error| error.within(path.display()))?.unwrap_or(1);
        first.check_split(0, count).map_err(|error| error.within(path.display()))?;
        for index in 1..count {
            let path = split::path(path, index, count).map_err(|error| error.within(path.display()))?;
            let other = Gguf::open_one(&path)?;
            let merged = other.check_split(index, count).and_then(|()| first.add(other));
            merged.map_err(|error| error.within(path.display()))?;
        }
        Ok(first)
    }

    fn open_one(path: &Path) -> Result<Gguf> {
        let file = files::open(path)?.ok_or_else(|| Error::io(format!("{}: not found", path.display())))?;
        Gguf::read(path, file).map_err(|error| error.within(path.display()))
    }

    /// Checks that this file is the one with this index among `count`.
    fn check_split(&self, index: usize, count: usize) -> Result<()> {
        let number = |key: &str, default: usize| self.metadata.whole(key, MAX_SPLITS).map(|number| number.unwrap_or(default));
        let (own_index, own_count) = (number("split.no", 0)?, number("split.count", 1)?);
        match (own_index, own_count) == (index, count) {
            true => Ok(()),
            false => Err(Error::model(format!(
                "the file is number {} of {own_count} of a split model, and must be number {} of {count}; set model_path to the first file",
                own_index + 1,
                index + 1
            ))),
        }
    }

    fn add(&mut self, other: Gguf) -> Result<()> {
        let index = self.files.len();
        self.files.extend(other.files);
        self.tensors.try_reserve(other.tensors.len())?;
        for (name, tensor) in other.tensors {
            let tensor = Tensor { file: index, ..tensor };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::model(format!("tensor {name} is also in another file of the model")));
            }
        }
        Ok(())
    }

    fn read(path: &Path, file: File) -> Result<Gguf> {
        let len = file.metadata().map_err(|error| Error::io(format!("cannot be read: {error}")))?.len();
        let mut header = Header::new(&file, len);
        let magic = header.u32("the magic")?;
        if magic != MAGIC {
            return Err(Error::model("not a GGUF file: bad magic"));
        }
        let version = header.u32("the version")?;
        if !(2..=3).contains(&version) {
            let order = if version.swap_bytes() <= 3 { " in big-endian order" } else { "" };
            let version = version.min(version.swap_bytes());
            return Err(Error::unsupported(format!(
                "GGUF version {version}{order}; supported are 2 and 3, little-endian: convert the model again"
            )));
        }
        let (tensors, values) = (header.u64("the number of tensors")?, header.u64("the number of values")?);
        let tensors = header.check_rest("the list of tensors", tensors, MIN_TENSOR_BYTES)?;
        let values = header.check_rest("the list of values", values, MIN_VALUE_BYTES)?;
        let mut metadata = Metadata::default();
        for _ in 0..values {
            let key = header.text("a key")?;
            if key.len() > MAX_KEY {
                return Err(Error::model(format!("a key has {} bytes; at most {MAX_KEY} are allowed", key.len())));
            }
            let value = header.value(&key)?;
            if metadata.0.insert(key.clone(), value).is_some() {
                return Err(Error::model(format!("{key} has two values")));
            }
        }
        let alignment = metadata.whole("general.alignment", MAX_ALIGNMENT)?.unwrap_or(ALIGNMENT) as u64;
        if !alignment.is_power_of_two() {
            return Err(Error::model(format!("general.alignment is {alignment}; must be a power of two up to {MAX_ALIGNMENT}")));
        }
        let mut found = HashMap::new();
        found.try_reserve(tensors)?;
        for _ in 0..tensors {
            let (name, tensor) = read_tensor(&mut header, alignment)?;
            if found.insert(name.clone(), tensor).is_some() {
                return Err(Error::model(format!("tensor {name} is in the file twice")));
            }
        }
        let start = header.position.next_multiple_of(alignment);
        place(&mut found, start, len)?;
        Ok(Gguf { files: vec![(path.into(), file)], metadata, tensors: found })
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Returns all tensors with their names, in no order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Writes the numbers of whole blocks from number `first` on, which begins a block.
    pub fn read_f32(&self, tensor: &Tensor, first: usize, out: &mut [f32]) -> Result<()> {
        let kind = tensor.kind;
        let (start, end) = (first / kind.block_len() * kind.block_bytes(), (first + out.len()) / kind.block_len() * kind.block_bytes());
        let mut bytes = try_vec(end - start, 0u8)?;
        let position = tensor.offset + start as u64;
        let (path, file) = &self.files[tensor.file];
        let read = file.read_exact_at(&mut bytes, position);
        let place = |error: Error| error.within(path.display());
        read.map_err(|error| place(Error::io(format!("cannot read {} bytes at {position}: {error}", end - start))))?;
        blocks::unpack(kind, &bytes, out).map_err(place)
    }
}

/// Reads the description of a tensor. Its offset counts from the start of the data.
fn read_tensor(header: &mut Header, alignment: u64) -> Result<(String, Tensor)> {
    let name = header.text("the name of a tensor")?;
    if name.len() > MAX_NAME {
        return Err(Error::model(format!("the name of a tensor has {} bytes; at most {MAX_NAME} are allowed", name.len())));
    }
    let of = |problem: String| Error::model(format!("tensor {name}: {problem}"));
    let dimensions = header.u32(&name)?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(of(format!("it has {dimensions} dimensions; must be 1 to {MAX_DIMENSIONS}")));
    }
    let mut shape = Vec::new();
    let mut numbers = 1usize;
    for _ in 0..dimensions {
        let size = header.u64(&name)?;
        let product = usize::try_from(size).ok().filter(|&size| size > 0).and_then(|size| numbers.checked_mul(size));
        numbers = product.ok_or_else(|| of(format!("a dimension is {size}, after dimensions with the product {numbers}")))?;
        shape.insert(0, size as usize);
    }
    let kind = BlockType::from_number(header.u32(&name)?).map_err(|error| error.within(format_args!("tensor {name}")))?;
    let cols = shape[shape.len() - 1];
    if !cols.is_multiple_of(kind.block_len()) {
        return Err(of(format!("its rows have {cols} numbers, which is no multiple of {} ({})", kind.block_len(), kind.name())));
    }
    let offset = header.u64(&name)?;
    if !offset.is_multiple_of(alignment) {
        return Err(of(format!("its data begin at {offset}, which is no multiple of {alignment}")));
    }
    let bytes = (numbers / kind.block_len()).checked_mul(kind.block_bytes());
    let bytes = bytes.ok_or_else(|| of(format!("it has {numbers} numbers, which no file holds")))? as u64;
    Ok((name, Tensor { shape, kind, file: 0, offset, bytes }))
}

/// Moves the offsets to the start of the data. Tensors must lie in the file and must not overlap.
fn place(tensors: &mut HashMap<String, Tensor>, start: u64, len: u64) -> Result<()> {
    let mut places = Vec::new();
    places.try_reserve_exact(tensors.len())?;
    for (name, tensor) in tensors.iter_mut() {
        let end = start.checked_add(tensor.offset).and_then(|first| first.checked_add(tensor.bytes)).filter(|&end| end <= len);
        let Some(end) = end else {
            return Err(Error::model(format!(
                "tensor {name} has {} bytes at {} after the header of {start} bytes, and the file has {len}; download the file again",
                tensor.bytes, tensor.offset
            )));
        };
        tensor.offset = end - tensor.bytes;
        places.push((tensor.offset, end, name.as_str()));
    }
    places.sort_unstable();
    match places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(Error::model(format!("tensors {} and {} overlap at byte {}", pair[0].2, pair[1].2, pair[1].0))),
        None => Ok(()),
    }
}
