//! The host tier of the CPU backend: swapped-out KV blocks in memory. Each block has a fixed offset
//! there, with all layers one after the other.

use super::SendPtr;
use super::kv::{self, Kv};
use super::pool::Pool;
use crate::error::{Error, Result};
use crate::sys::Pages;
use crate::types::batch::BlockMove;

pub struct Host {
    block_bytes: usize,
    pages: Pages,
}

impl Host {
    pub fn new(blocks: usize, block_bytes: u64) -> Result<Host> {
        let bytes =
            block_bytes.checked_mul(blocks as u64).and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(Error::out_of_memory)?;
        Ok(Host { block_bytes: block_bytes as usize, pages: Pages::partly_used(bytes)? })
    }

    /// Returns the bytes of a block.
    pub fn block(&mut self, block: usize) -> &mut [u8] {
        &mut self.pages.bytes_mut()[block * self.block_bytes..(block + 1) * self.block_bytes]
    }

    pub fn swap_out(&mut self, pool: &Pool, moves: &[BlockMove], layers: &[Kv]) {
        let (bytes, end) = (self.block_bytes, self.pages.bytes().len());
        let start = SendPtr(self.pages.bytes_mut().as_mut_ptr());
        pool.run(moves.len(), &|task, _| {
            let place = moves[task].host as usize * bytes;
            assert!(place + bytes <= end, "host block {} is outside the host tier", moves[task].host);
            // SAFETY: the range is inside the pages, and each host block occurs at most once.
            gather(layers, moves[task].device, unsafe { std::slice::from_raw_parts_mut(start.get().add(place), bytes) });
        });
    }

    pub fn swap_in(&self, pool: &Pool, moves: &[BlockMove], layers: &mut [Kv]) {
        let bytes = self.block_bytes;
        let mut offset = 0;
        for layer in layers {
            let place = |host: u32| &self.pages.bytes()[host as usize * bytes + offset..(host as usize + 1) * bytes];
            kv::copy_from_host(pool, moves, place, layer);
            offset += layer.bytes();
        }
    }
}

/// Copies K and V of one block, of all layers, to `to`.
fn gather(layers: &[Kv], block: u32, to: &mut [u8]) {
    layers.iter().fold(to, |to, layer| layer.pack(block, to));
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

    fn scatter(from: &[u8], block: u32, layers: &mut [Kv]) {
        layers.iter_mut().fold(from, |from, layer| layer.unpack(block, from));
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
    fn swapped_blocks_keep_their_bytes() {
        for dtype in KvDtype::ALL {
            let (mut layers, bytes) = layers(dtype);
            let (pool, mut host) = (Pool::new(2).unwrap(), Host::new(4, bytes).unwrap());
            (0..BLOCKS as u32).for_each(|block| fill(&mut layers, block, block as u8, bytes));
            let before: Vec<Vec<u8>> = (0..BLOCKS as u32).map(|block| content(&layers, block, bytes)).collect();
            let moves = |pairs: [(u32, u32); 3]| pairs.map(|(device, host)| BlockMove { device, host });
            host.swap_out(&pool, &moves([(5, 0), (0, 3), (2, 1)]), &layers);
            (0..BLOCKS as u32).for_each(|block| fill(&mut layers, block, 100 + block as u8, bytes));
            host.swap_in(&pool, &moves([(1, 3), (4, 0), (0, 1)]), &mut layers);
            let after = |block| content(&layers, block, bytes);
            assert_eq!([after(1), after(4), after(0)], [&before[0], &before[5], &before[2]].map(Clone::clone));
            assert_eq!([2, 3, 5].map(after), [102, 103, 105].map(|seed| bytes_of(seed, bytes)), "other blocks are unchanged");
        }
    }
}
