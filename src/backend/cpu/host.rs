//! The host tier of the CPU backend: swapped-out KV blocks in memory or in a file. Each block has a
//! fixed offset there, with all layers one after the other.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::SendPtr;
use super::kv::{self, Kv};
use super::pool::Pool;
use crate::error::{Error, Result, try_vec};
use crate::sys::{Pages, files};
use crate::types::batch::BlockMove;

pub struct Host {
    block_bytes: usize,
    store: Store,
}

enum Store {
    Memory(Pages),
    /// The file, and a buffer for one block.
    File(File, Vec<u8>),
}

impl Host {
    pub fn new(blocks: usize, block_bytes: u64, dir: Option<&Path>) -> Result<Host> {
        let bytes = block_bytes.checked_mul(blocks as u64).ok_or_else(Error::out_of_memory)?;
        let block_bytes = block_bytes as usize;
        let store = match dir {
            None => Store::Memory(Pages::partly_used(usize::try_from(bytes).map_err(|_| Error::out_of_memory())?)?),
            Some(dir) => Store::File(files::nameless(dir, bytes)?, try_vec(block_bytes, 0)?),
        };
        Ok(Host { block_bytes, store })
    }

    pub fn swap_out(&mut self, pool: &Pool, moves: &[BlockMove], layers: &[Kv]) -> Result<()> {
        let bytes = self.block_bytes;
        match &mut self.store {
            Store::Memory(pages) => {
                let (end, start) = (pages.bytes().len(), SendPtr(pages.bytes_mut().as_mut_ptr()));
                pool.run(moves.len(), &|task, _| {
                    let place = moves[task].host as usize * bytes;
                    assert!(place + bytes <= end, "host block {} is outside the host tier", moves[task].host);
                    // SAFETY: the range is inside the pages, and each host block occurs at most
                    // once.
                    gather(layers, moves[task].device, unsafe { std::slice::from_raw_parts_mut(start.get().add(place), bytes) });
                });
                Ok(())
            }
            Store::File(file, buffer) => moves.iter().try_for_each(|&BlockMove { device, host }| {
                gather(layers, device, buffer);
                file.write_all_at(buffer, host as u64 * bytes as u64).map_err(|e| failed("written", e))
            }),
        }
    }

    pub fn swap_in(&mut self, pool: &Pool, moves: &[BlockMove], layers: &mut [Kv]) -> Result<()> {
        let bytes = self.block_bytes;
        match &mut self.store {
            Store::Memory(pages) => {
                let mut offset = 0;
                for layer in layers {
                    let place = |host: u32| &pages.bytes()[host as usize * bytes + offset..(host as usize + 1) * bytes];
                    kv::copy_from_host(pool, moves, place, layer);
                    offset += layer.bytes();
                }
                Ok(())
            }
            Store::File(file, buffer) => moves.iter().try_for_each(|&BlockMove { device, host }| {
                file.read_exact_at(buffer, host as u64 * bytes as u64).map_err(|e| failed("read", e))?;
                scatter(buffer, device, layers);
                Ok(())
            }),
        }
    }
}

/// Copies K and V of one block, of all layers, to `to`.
fn gather(layers: &[Kv], block: u32, to: &mut [u8]) {
    layers.iter().fold(to, |to, layer| layer.pack(block, to));
}

fn scatter(from: &[u8], block: u32, layers: &mut [Kv]) {
    layers.iter_mut().fold(from, |from, layer| layer.unpack(block, from));
}

fn failed(what: &str, e: std::io::Error) -> Error {
    Error::io(format!("the swap file cannot be {what}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{KvShape, Values};
    use crate::types::options::KvDtype;

    const BLOCKS: usize = 6;

    /// Returns layers of different widths, and the bytes of a block over all of them.
    fn layers(dtype: KvDtype) -> (Vec<Kv>, u64) {
        let shape = |kv_heads| KvShape { blocks: BLOCKS, block_size: 8, kv_heads, head_dim: 3, values: Values::Own, dtype };
        let layers: Vec<Kv> = [2, 1, 4].map(|kv_heads| Kv::new(shape(kv_heads)).unwrap()).into();
        let bytes = layers.iter().map(Kv::bytes).sum::<usize>() as u64;
        (layers, bytes)
    }

    fn bytes_of(seed: u8, bytes: u64) -> Vec<u8> {
        (0..bytes).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect()
    }

    fn fill(layers: &mut [Kv], block: u32, seed: u8, bytes: u64) {
        scatter(&bytes_of(seed, bytes), block, layers);
    }

    fn content(layers: &[Kv], block: u32, bytes: u64) -> Vec<u8> {
        let mut content = vec![0; bytes as usize];
        gather(layers, block, &mut content);
        content
    }

    #[test]
    fn swapped_blocks_keep_their_bytes_in_memory_and_on_disk() {
        let dir = std::env::temp_dir();
        for (tier, dtype) in KvDtype::ALL.into_iter().flat_map(|dtype| [(None, dtype), (Some(dir.as_path()), dtype)]) {
            let (mut layers, bytes) = layers(dtype);
            let (pool, mut host) = (Pool::new(2).unwrap(), Host::new(4, bytes, tier).unwrap());
            (0..BLOCKS as u32).for_each(|block| fill(&mut layers, block, block as u8, bytes));
            let before: Vec<Vec<u8>> = (0..BLOCKS as u32).map(|block| content(&layers, block, bytes)).collect();
            let moves = |pairs: [(u32, u32); 3]| pairs.map(|(device, host)| BlockMove { device, host });
            host.swap_out(&pool, &moves([(5, 0), (0, 3), (2, 1)]), &layers).unwrap();
            (0..BLOCKS as u32).for_each(|block| fill(&mut layers, block, 100 + block as u8, bytes));
            host.swap_in(&pool, &moves([(1, 3), (4, 0), (0, 1)]), &mut layers).unwrap();
            let after = |block| content(&layers, block, bytes);
            assert_eq!([after(1), after(4), after(0)], [&before[0], &before[5], &before[2]].map(Clone::clone));
            assert_eq!([2, 3, 5].map(after), [102, 103, 105].map(|seed| bytes_of(seed, bytes)), "other blocks are unchanged");
        }
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let (mut layers, bytes) = layers(KvDtype::Bf16);
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let mut host = Host { block_bytes: bytes as usize, store: Store::File(full, vec![0; bytes as usize]) };
        let (pool, moves) = (Pool::new(1).unwrap(), [BlockMove { device: 1, host: 0 }]);
        let error = host.swap_out(&pool, &moves, &layers).unwrap_err();
        assert!(error.message().contains("the swap file cannot be written"), "{error}");
        host.store = Store::File(File::open("/dev/null").unwrap(), vec![0; bytes as usize]);
        let error = host.swap_in(&pool, &moves, &mut layers).unwrap_err();
        assert!(error.message().contains("the swap file cannot be read"), "{error}");
    }
}
