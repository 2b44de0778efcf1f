//! Tensors in safetensors files, or in a GGUF file. Files are read by range instead of mapped, so
//! that a truncated file causes an error and not a signal.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::tensor::Metadata;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::config::Config;
use super::gguf::{self, Gguf};
use super::remedy;
use crate::backend::blocks;
use crate::error::{Error, Result, try_vec};
use crate::sys::files;
use crate::types::blocks::BlockType;
use crate::types::options::Dtype;

/// The maximum header size of the safetensors format.
const MAX_HEADER_BYTES: u64 = 100 << 20;

pub struct Checkpoint {
    files: Vec<Shard>,
    tensors: HashMap<String, Tensor>,
    /// Prefix of tensor names that checkpoints of a whole model have and those of its base model
    /// lack.
    prefix: &'static str,
    #[cfg(test)]
    pub(super) bytes_read: AtomicU64,
}

struct Shard {
    path: PathBuf,
    file: File,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    file: usize,
    offset: u64,
    /// The type in which numbers are read: F32 for blocks, except that bf16 holds those of MXFP4.
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    /// The blocks of a quantized tensor of a GGUF file. They are read as the numbers that they
    /// represent.
    blocks: Option<BlockType>,
}

impl Tensor {
    /// Returns the type of blocks in which the numbers are stored.
    pub fn blocks(&self) -> Option<BlockType> {
        self.blocks
    }
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    pub fn open(dir: &Path, prefix: &'static str) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::with_files(Vec::new(), HashMap::new(), prefix);
        match Config::load_optional(dir, "model.safetensors.index.json")? {
            Some(index) => checkpoint.open_shards(dir, &index)?,
            None => checkpoint.open_file(dir.join("model.safetensors"), remedy::for_files_of(dir))?,
        }
        Ok(checkpoint)
    }

    fn open_shards(&mut self, dir: &Path, index: &Config) -> Result<()> {
        let map = index.get("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| Error::model("model.safetensors.index.json: weight_map is missing"))?;
        // Sorted, so that error messages are deterministic.
        let mut shards = BTreeMap::new();
        for (tensor, shard) in map {
            let shard = shard.as_str().filter(|name| !name.contains('/') && !name.is_empty());
            let shard =
                shard.ok_or_else(|| Error::model(format!("model.safetensors.index.json: weight_map has no file name for {tensor}")))?;
            shards.insert(shard, tensor);
        }
        if shards.is_empty() {
            return Err(Error::model("model.safetensors.index.json: weight_map is empty"));
        }
        shards.keys().try_for_each(|shard| self.open_file(dir.join(shard), "download the model again"))?;
        match map.keys().find(|tensor| !self.tensors.contains_key(*tensor)) {
            Some(tensor) => {
                Err(Error::model(format!("model.safetensors.index.json: {tensor} is in none of the files; download the model again")))
            }
            None => Ok(()),
        }
    }

    /// Opens a file with tensors. `remedy` is what the host can do if it is missing.
    fn open_file(&mut self, path: PathBuf, remedy: &str) -> Result<()> {
        let place = path.display().to_string();
        let file = files::open(&path)?.ok_or_else(|| Error::io(format!("{place}: not found; {remedy}")))?;
        let (metadata, data_start) = read_header(&file).map_err(|e| e.within(&place))?;
        for (name, info) in metadata.tensors() {
            let tensor = Tensor {
                file: self.files.len(),
                offset: data_start + info.data_offsets.0 as u64,
                dtype: info.dtype,
                shape: info.shape.clone(),
                blocks: None,
            };
            self.tensors.try_reserve(1)?;
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::model(format!("{place}: {name} is also in another file")));
            }
        }
        self.files.push(Shard { path, file });
        Ok(())
    }

    /// Takes the files of a GGUF model, and its tensors by their names in Hugging Face.
    pub fn from_gguf(gguf: Gguf, named: Vec<(String, gguf::Tensor)>, prefix: &'static str) -> Result<Checkpoint> {
        let mut tensors = HashMap::new();
        tensors.try_reserve(named.len())?;
        for (name, tensor) in named {
            let (dtype, blocks) = match tensor.kind {
                BlockType::F32 => (safetensors::Dtype::F32, None),
                BlockType::F16 => (safetensors::Dtype::F16, None),
                BlockType::Bf16 => (safetensors::Dtype::BF16, None),
                BlockType::Mxfp4 => (safetensors::Dtype::BF16, Some(BlockType::Mxfp4)),
                kind => (safetensors::Dtype::F32, Some(kind)),
            };
            let tensor = Tensor { file: tensor.file, offset: tensor.offset, dtype, shape: tensor.shape, blocks };
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::model(format!("two tensors are {name}")));
            }
        }
        let files = gguf.files.into_iter().map(|(path, file)| Shard { path, file }).collect();
        Ok(Checkpoint::with_files(files, tensors, prefix))
    }

    fn with_files(files: Vec<Shard>, tensors: HashMap<String, Tensor>, prefix: &'static str) -> Checkpoint {
        Checkpoint {
            files,
            tensors,
            prefix,
            #[cfg(test)]
            bytes_read: AtomicU64::new(0),
        }
    }

    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(&format!("{}{name}", self.prefix)).or_else(|| self.tensors.get(name))
    }

    /// Returns the tensor with this name and shape, and its dtype.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<(&Tensor, Dtype)> {
        let tensor = self.shaped(name, shape)?;
        match tensor.dtype {
            safetensors::Dtype::F32 => Ok((tensor, Dtype::F32)),
            safetensors::Dtype::F16 => Ok((tensor, Dtype::F16)),
            safetensors::Dtype::BF16 => Ok((tensor, Dtype::Bf16)),
            _ => Err(self.stored_otherwise(name, tensor, "F32, F16, BF16")),
        }
    }

    /// Returns the tensor with this name and shape, whose elements are bytes.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<&Tensor> {
        let tensor = self.shaped(name, shape)?;
        match tensor.dtype {
            safetensors::Dtype::U8 => Ok(tensor),
            _ => Err(self.stored_otherwise(name, tensor, "U8")),
        }
    }

    fn stored_otherwise(&self, name: &str, tensor: &Tensor, supported: &str) -> Error {
        let path = self.files[tensor.file].path.display();
        Error::unsupported(format!("{path}: {name} is stored as {:?}; supported are {supported}", tensor.dtype))
    }

    fn shaped(&self, name: &str, shape: &[usize]) -> Result<&Tensor> {
        let tensor = self
            .find(name)
            .ok_or_else(|| Error::model(format!("tensor {}{name} is missing from {}", self.prefix, self.files[0].path.display())))?;
        let path = self.files[tensor.file].path.display();
        if tensor.shape != shape {
            return Err(Error::model(format!("{path}: {name} has shape {:?}; config.json requires {shape:?}", tensor.shape)));
        }
        Ok(tensor)
    }

    /// Fills `out` with the tensor's bytes from `start` on.
    pub fn read(&self, tensor: &Tensor, start: u64, out: &mut [u8]) -> Result<()> {
        match tensor.blocks {
            Some(kind) => self.read_blocks(tensor, kind, start as usize, out),
            None => self.read_stored(tensor, start, out),
        }
    }

    /// Fills `out` with bytes of the file from byte `start` of the tensor on.
    pub fn read_stored(&self, tensor: &Tensor, start: u64, out: &mut [u8]) -> Result<()> {
        let shard = &self.files[tensor.file];
        #[cfg(test)]
        self.bytes_read.fetch_add(out.len() as u64, Ordering::Relaxed);
        let read = shard.file.read_exact_at(out, tensor.offset + start);
        read.map_err(|e| Error::io(format!("{}: cannot read {} bytes at {}: {e}", shard.path.display(), out.len(), tensor.offset + start)))
    }

    /// Fills `out` with the numbers of quantized blocks. `start` is a byte among these numbers.
    fn read_blocks(&self, tensor: &Tensor, kind: BlockType, start: usize, out: &mut [u8]) -> Result<()> {
        let number_bytes = tensor.dtype.bitsize() / 8;
        let unpacked = kind.block_len() * number_bytes;
        let (first, end) = (start / unpacked, (start + out.len()).div_ceil(unpacked));
        let mut packed = try_vec((end - first) * kind.block_bytes(), 0u8)?;
        self.read_stored(tensor, (first * kind.block_bytes()) as u64, &mut packed)?;
        let mut numbers = try_vec((end - first) * kind.block_len(), 0.0f32)?;
        blocks::unpack(kind, &packed, &mut numbers).map_err(|error| error.within(self.files[tensor.file].path.display()))?;
        if let Some(number) = numbers.iter().find(|number| !number.is_finite()) {
            return Err(Error::model(format!("a block of {} has a scale that is too large: it gives the number {number}", kind.name())));
        }
        // The upper half of an f32 is its bf16.
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes().into_iter().skip(4 - number_bytes));
        out.iter_mut().zip(bytes.skip(start - first * unpacked)).for_each(|(out, byte)| *out = byte);
        Ok(())
    }

    /// Returns a hash of `what`, of every tensor's name, dtype and shape, and of samples of its
    /// numbers.
    pub fn fingerprint(&self, what: &str) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        let mut add = |bytes: &[u8]| {
            // Lengths delimit adjacent fields.
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(what.as_bytes());
        for (name, tensor) in self.tensors.iter().collect::<BTreeMap<_, _>>() {
            add(format!("{name} {:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
            if let Some(kind) = tensor.blocks {
                add(kind.name().as_bytes());
            }
            self.sample(tensor, &mut add)?;
        }
        Ok(hash.finalize().into())
    }

    /// Returns a hash of the names, sizes and modification times of the files.
    pub fn times(&self) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        for Shard { path, file } in &self.files {
            let metadata = file.metadata().map_err(|e| Error::io(format!("{}: cannot be read: {e}", path.display())))?;
            let name = path.file_name().unwrap_or_default().as_bytes();
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(metadata.len().to_le_bytes());
            hash.update(metadata.mtime().to_le_bytes());
            hash.update(metadata.mtime_nsec().to_le_bytes());
        }
        Ok(hash.finalize().into())
    }

    /// Visits the first, middle and last bytes of a tensor.
    fn sample(&self, tensor: &Tensor, mut visit: impl FnMut(&[u8])) -> Result<()> {
        let bytes = (tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize()).div_ceil(8);
        let sample = bytes.min(1024);
        let mut window = [0; 1024];
        for start in [0, (bytes - sample) / 2, bytes - sample] {
            self.read(tensor, start as u64, &mut window[..sample])?;
            visit(&window[..sample]);
        }
        Ok(())
    }

    /// Returns true if the dtypes, shapes and samples of two tensors are equal.
    pub fn are_alike(&self, one: &Tensor, other: &Tensor) -> Result<bool> {
        if (one.dtype, &one.shape) != (other.dtype, &other.shape) {
            return Ok(false);
        }
        let hash = |tensor| -> Result<[u8; 32]> {
            let mut hash = Sha256::new();
            self.sample(tensor, |bytes| hash.update(bytes))?;
            Ok(hash.finalize().into())
        };
        Ok(hash(one)? == hash(other)?)
    }

    /// Returns the weights and biases of layers in the order of their names, each with its layer.
    /// Excludes other tensors that some checkpoints store with them (masks, frequencies).
    pub fn of_layers(&self) -> Result<Vec<(&str, usize)>> {
        let mut names = try_vec(0, ("", 0))?;
        names.try_reserve_exact(self.tensors.len())?;
        let weights = self.tensors.iter().filter(|(_, tensor)| (1..=2).contains(&tensor.shape.len()));
        let own = weights.map(|(name, _)| name.strip_prefix(self.prefix).unwrap_or(name));
        names.extend(own.filter_map(|name| Some((name, layer_of(name)?))));
        names.sort_unstable();
        Ok(names)
    }

    /// Reads all numbers of the tensor with this name and shape, as f32.
    pub fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let (tensor, dtype) = self.tensor(name, shape)?;
        self.read_f32(tensor, dtype, 0, shape.iter().product())
    }

    /// Reads `len` numbers of a tensor from `start` on, as f32.
    pub fn read_f32(&self, tensor: &Tensor, dtype: Dtype, start: usize, len: usize) -> Result<Vec<f32>> {
        let mut bytes = try_vec(len * dtype.bytes(), 0u8)?;
        self.read(tensor, (start * dtype.bytes()) as u64, &mut bytes)?;
        let mut values = try_vec(len, 0.0f32)?;
        dtype.visit(&bytes, |i, value| values[i] = value);
        Ok(values)
    }
}

/// Returns the layer of a weight or bias.
fn layer_of(name: &str) -> Option<usize> {
    let mut path = name.strip_prefix("decoder.").unwrap_or(name).split('.');
    let layer = path.next().filter(|first| matches!(*first, "layers" | "h")).and(path.next())?.parse::<u32>().ok()?;
    (name.ends_with(".weight") || name.ends_with(".bias")).then_some(layer as usize)
}

/// Returns the header and the offset of the data. The safetensors crate checks offsets, overlaps
/// and sizes.
fn read_header(file: &File) -> Result<(Metadata, u64)> {
    let io = |e: std::io::Error| Error::io(format!("cannot be read: {e}"));
    let file_len = file.metadata().map_err(io)?.len();
    let damaged = |what: String| Error::model(format!("not a complete safetensors file ({what}); download it again"));
    let mut len = [0u8; 8];
    file.read_exact_at(&mut len, 0).map_err(|_| damaged(format!("{file_len} bytes")))?;
    let header_len = u64::from_le_bytes(len);
    if header_len > MAX_HEADER_BYTES || header_len + 8 > file_len {
        return Err(damaged(format!("header of {header_len} bytes, file of {file_len}")));
    }
    let mut header = try_vec(header_len as usize, 0u8)?;
    file.read_exact_at(&mut header, 8).map_err(io)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| damaged(format!("invalid header: {e}")))?;
    let (described, there) = (metadata.data_len() as u64, file_len - 8 - header_len);
    if described != there {
        return Err(damaged(format!("header describes {described} bytes of tensors, file of {file_len} bytes has {there}")));
    }
    Ok((metadata, 8 + header_len))
}
