//! Imports: blocks are copied to the device in portions. Commands for a sequence wait until all of
//! its blocks are there.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::command::Command;
use crate::engine::deferred_commands::DeferredCommands;
use crate::error::{Error, Result};
use crate::kv::BlockId;
use crate::kv::connector::{BlockArrays, Connector, DeviceBlocks, Progress, TransferId};
use crate::output::queue::OutputSender;
use crate::types::SeqId;

/// A sequence that is copied to the device.
pub struct Import {
    pub seq: SeqId,
    /// Number of tokens whose K and V are copied.
    pub computed: usize,
    /// Receiver of an error.
    pub sender: Arc<OutputSender>,
    /// Commands for the sequence and for its forks.
    pub deferred: DeferredCommands,
    pub kv: Vec<u8>,
    /// Blocks of the sequence in this step.
    blocks: Vec<BlockId>,
    arrays: BlockArrays,
    /// Number of blocks that have been copied.
    copied: usize,
}

/// All imports. They finish in the order of their commands, except those that fail.
pub struct Imports {
    copying: VecDeque<Import>,
    finished: VecDeque<(Import, Result<()>)>,
    /// Number of bytes that may be copied in a step, and in the rest of this step.
    max_bytes: usize,
    bytes_left: usize,
    /// Buffer for one block.
    block: Vec<u8>,
}

impl Import {
    /// Creates the import of a sequence with `blocks` visible blocks. `parts` has the bytes of one
    /// block in each array of the device.
    pub fn new(seq: SeqId, computed: usize, sender: Arc<OutputSender>, kv: Vec<u8>, parts: Vec<usize>, blocks: usize) -> Result<Import> {
        let arrays = BlockArrays::new(parts, blocks);
        if arrays.total_bytes() > kv.len() {
            return Err(Error::invalid("the exported sequence is truncated in its K and V"));
        }
        Ok(Import { seq, computed, sender, deferred: DeferredCommands::default(), kv, blocks: Vec::new(), arrays, copied: 0 })
    }

    fn is_copied(&self) -> bool {
        self.copied == self.arrays.blocks()
    }

    /// Copies at most `max_bytes` bytes, but at least one block. Returns the number of bytes.
    fn copy(&mut self, device: &mut dyn DeviceBlocks, max_bytes: usize, block: &mut Vec<u8>) -> Result<usize> {
        let Import { arrays, kv, blocks, copied, .. } = self;
        arrays.copy_portion(copied, max_bytes, |place| {
            block.clear();
            block.try_reserve(arrays.block_bytes())?;
            arrays.gather(place, kv, block);
            device.write_block(blocks[place], block)
        })
    }

    fn concerns(&self, seq: SeqId) -> bool {
        self.seq == seq || self.deferred.creates(seq)
    }
}

impl Imports {
    pub fn new(max_bytes: usize) -> Imports {
        Imports { copying: VecDeque::new(), finished: VecDeque::new(), max_bytes, bytes_left: max_bytes, block: Vec::new() }
    }

    pub fn begin_step(&mut self) {
        self.bytes_left = self.max_bytes;
    }

    /// Adds an import.
    pub fn enqueue(&mut self, import: Import) -> Result<()> {
        self.copying.try_reserve(1)?;
        self.finished.try_reserve(self.copying.len() + 1)?;
        self.copying.push_back(import);
        Ok(())
    }

    /// Returns the sequence whose blocks `copy` copies next, and the number of tokens in them, if
    /// the step may copy more. The caller then calls `set_blocks`.
    pub fn next_to_copy(&self) -> Option<(SeqId, usize)> {
        let next = self.copying.front().filter(|_| self.bytes_left > 0)?;
        Some((next.seq, next.computed))
    }

    /// Returns whether blocks of the next sequence have been copied. If not, the caller allocates
    /// the blocks first.
    pub fn has_begun(&self) -> bool {
        self.copying.front().is_some_and(|next| next.copied > 0)
    }

    /// Sets the blocks of the next sequence.
    pub fn set_blocks(&mut self, blocks: Vec<BlockId>) {
        if let Some(next) = self.copying.front_mut() {
            next.blocks = blocks;
        }
    }

    /// Copies what the step may still copy of the next import.
    pub fn copy_portion(&mut self, device: &mut dyn DeviceBlocks) {
        let copied = self.copy(device, self.bytes_left);
        self.bytes_left = self.bytes_left.saturating_sub(copied);
    }

    /// Removes the import of a sequence.
    pub fn take(&mut self, seq: SeqId) -> Option<Import> {
        let place = self.copying.iter().position(|import| import.seq == seq)?;
        self.copying.remove(place)
    }

    /// Returns the imported sequence for which the command must wait. `None` if it need not wait.
    pub fn sequence_before(&self, command: &Command) -> Option<SeqId> {
        if self.copying.is_empty() {
            return None;
        }
        let target = command.target()?;
        self.copying.iter().find(|import| import.concerns(target)).map(|import| import.seq)
    }

    /// Defers a command until the import of `seq` has finished. Returns the command if there is no
    /// memory.
    pub fn defer(&mut self, seq: SeqId, command: Command) -> std::result::Result<(), Command> {
        match self.copying.iter_mut().find(|import| import.seq == seq) {
            Some(import) => import.deferred.defer(command),
            None => Err(command),
        }
    }

    pub fn pending(&self) -> usize {
        self.copying.len()
    }

    /// Returns the sequences that are copied.
    pub fn sequences(&self) -> impl Iterator<Item = SeqId> {
        self.copying.iter().map(|import| import.seq)
    }
}

impl Connector for Imports {
    type Finished = (Import, Result<()>);

    fn copy(&mut self, device: &mut dyn DeviceBlocks, max_bytes: usize) -> usize {
        let Some(import) = self.copying.front_mut() else { return 0 };
        let result = import.copy(device, max_bytes, &mut self.block);
        let copied = *result.as_ref().unwrap_or(&import.arrays.block_bytes());
        if (result.is_err() || import.is_copied())
            && let Some(import) = self.copying.pop_front()
        {
            self.finished.push_back((import, result.map(drop)));
        }
        copied
    }

    /// No other thread completes an import.
    fn complete(&mut self, _id: TransferId) {}

    fn poll(&mut self) -> Option<Self::Finished> {
        self.finished.pop_front()
    }

    fn progress(&self) -> Progress {
        if self.copying.is_empty() { Progress::Idle } else { Progress::Copying }
    }

    fn cancel_all(&mut self) {
        self.copying.clear();
        self.finished.clear();
    }
}
