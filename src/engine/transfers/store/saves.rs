//! Full blocks that are copied from the pool to a store.

use std::collections::VecDeque;
use std::sync::Arc;

use super::board::Counts;
use super::client::StoreClient;
use super::value::HEADER;
use super::worker::Job;
use crate::error::Result;
use crate::kv::connector::{Connector, DeviceBlocks, Progress, TransferId};
use crate::kv::{BlockHash, BlockId};

/// Maximum number of blocks that wait. Further blocks are not stored.
const MAX_WAITING: usize = 1 << 15;

/// The blocks that wait to be stored.
pub struct Saves {
    client: Option<Arc<StoreClient>>,
    waiting: VecDeque<BlockHash>,
    /// Block of the next copy.
    source: Option<(BlockHash, BlockId)>,
    block_bytes: usize,
    max_bytes: usize,
    /// Number of bytes that this step may copy, and that the store may take.
    bytes_left: usize,
    buffer: Vec<u8>,
}

impl Saves {
    pub fn new(client: Option<Arc<StoreClient>>, block_bytes: usize, max_bytes: usize) -> Result<Saves> {
        let mut waiting = VecDeque::new();
        waiting.try_reserve_exact(MAX_WAITING)?;
        Ok(Saves { client, waiting, source: None, block_bytes, max_bytes, bytes_left: 0, buffer: Vec::new() })
    }

    /// Begins a step. `room` is the number of bytes that the store may take.
    pub fn begin_step(&mut self, room: u64) {
        self.bytes_left = self.max_bytes.max(self.value_bytes()).min(usize::try_from(room).unwrap_or(usize::MAX));
    }

    fn value_bytes(&self) -> usize {
        HEADER + self.block_bytes
    }

    /// Adds a block of the prefix cache.
    pub fn enqueue(&mut self, hash: BlockHash) {
        match self.waiting.len() < MAX_WAITING {
            true => self.waiting.push_back(hash),
            false => self.count_dropped(),
        }
    }

    /// Counts a block that is not stored.
    pub fn count_dropped(&self) {
        if let Some(client) = &self.client {
            Counts::add(&client.board.counts.dropped, 1);
        }
    }

    /// Returns the next block if this step may copy it.
    pub fn next_to_copy(&mut self) -> Option<BlockHash> {
        if self.waiting.is_empty() {
            return None;
        }
        if self.bytes_left < self.value_bytes() {
            self.client.iter().for_each(|client| client.board.want_room());
            return None;
        }
        self.waiting.pop_front()
    }

    /// Copies a block and passes it to the store.
    pub fn copy_from(&mut self, hash: BlockHash, block: BlockId, device: &mut dyn DeviceBlocks) {
        self.source = Some((hash, block));
        let copied = self.copy(device, self.bytes_left);
        self.bytes_left = self.bytes_left.saturating_sub(copied);
    }

    /// Returns whether this step could copy further blocks.
    pub fn can_copy(&self) -> bool {
        !self.waiting.is_empty() && self.bytes_left >= self.value_bytes()
    }
}

impl Connector for Saves {
    type Finished = ();

    fn copy(&mut self, device: &mut dyn DeviceBlocks, _max_bytes: usize) -> usize {
        let Some((hash, block)) = self.source.take() else { return 0 };
        let mut buffer = match &self.client {
            Some(client) => match client.board.take_for_write() {
                Some(buffer) => buffer,
                None => {
                    self.count_dropped();
                    return self.value_bytes();
                }
            },
            // A replay reads the block as the recording did, and stores nothing.
            None => std::mem::take(&mut self.buffer),
        };
        let len = HEADER + self.block_bytes;
        buffer.resize(HEADER, 0);
        let result = device.read_block(block, None, &mut buffer);
        let is_complete = result.is_ok() && buffer.len() == len;
        match &self.client {
            Some(client) if is_complete => client.submit(Job::Save { hash, value: buffer }),
            Some(client) => {
                self.count_dropped();
                buffer.resize(len, 0);
                client.board.end_write(buffer);
            }
            None => self.buffer = buffer,
        }
        len
    }

    /// The end of a write changes nothing in the engine.
    fn complete(&mut self, _id: TransferId) {}

    fn poll(&mut self) -> Option<()> {
        None
    }

    fn progress(&self) -> Progress {
        if self.can_copy() { Progress::Copying } else { Progress::Idle }
    }

    fn cancel_all(&mut self) {
        self.waiting.clear();
    }
}
