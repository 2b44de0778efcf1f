//! Exports: blocks are copied from the device in portions, and a thread encodes the result.

use std::collections::VecDeque;
use std::sync::Arc;

use super::worker::{Completions, EncodeJob, Worker};
use crate::error::Result;
use crate::kv::BlockId;
use crate::kv::connector::{BlockArrays, Connector, DeviceBlocks, Progress, TransferId};
use crate::output::queue::OutputSender;
use crate::sys::Pages;
use crate::types::SeqId;
use crate::types::batch::Tail;
use crate::types::outputs::Output;
use crate::types::sequence_state::Header;

/// An export is delivered in the step of its command if its K and V have at most this fraction of
/// the bytes that a step may copy: 256 KiB, which are encoded in 0.6 ms, during the forward pass.
const IN_STEP_FRACTION: usize = 8;

/// A sequence that is copied from the device.
pub struct Export {
    header: Header<'static>,
    arrays: BlockArrays,
    tail: Tail,
    kv: Pages,
    /// Number of blocks that have been copied.
    copied: usize,
    destination: Destination,
}

/// The receiver of an exported sequence.
struct Destination {
    sender: Arc<OutputSender>,
    /// The output without the state.
    output: Output,
}

/// An export of several steps, with the idle sequence that holds its blocks until they are copied.
struct HeldExport {
    export: Export,
    holder: SeqId,
    /// Blocks of the holder in this step.
    blocks: Vec<BlockId>,
}

/// An export that the worker encodes.
struct Encoding {
    id: TransferId,
    destination: Destination,
}

/// All exports. They finish in the order of their commands, except those that fail.
pub struct Exports {
    copying: VecDeque<HeldExport>,
    encoding: VecDeque<Encoding>,
    /// Exports whose result the current step waits for.
    in_step: VecDeque<Encoding>,
    finished: VecDeque<(Arc<OutputSender>, Output)>,
    /// Holders of exports that do not need them any more.
    released: Vec<SeqId>,
    worker: Worker,
    last_id: u64,
    last_holder: u64,
    /// Number of bytes that may be copied in a step, and in the rest of this step.
    max_bytes: usize,
    bytes_left: usize,
    /// Buffer for one block.
    block: Vec<u8>,
}

impl Export {
    /// Creates an export of a sequence with `blocks` visible blocks. `parts` has the bytes of one
    /// block in each array of the device.
    pub fn new(
        header: Header<'static>,
        parts: Vec<usize>,
        blocks: usize,
        tail: Tail,
        sender: Arc<OutputSender>,
        output: Output,
    ) -> Result<Export> {
        let arrays = BlockArrays::new(parts, blocks);
        let kv = Pages::partly_used(arrays.total_bytes())?;
        Ok(Export { header, arrays, tail, kv, copied: 0, destination: Destination { sender, output } })
    }

    /// Returns the bytes of K and V.
    pub fn bytes(&self) -> usize {
        self.arrays.total_bytes()
    }

    /// Returns the number of tokens whose K and V are copied.
    pub fn computed(&self) -> usize {
        self.header.computed
    }

    /// Removes K and V from the export. All tokens are recomputed after the import.
    fn drop_kv(&mut self) {
        self.header.computed = 0;
        (self.arrays, self.kv, self.copied) = (BlockArrays::default(), Pages::default(), 0);
    }

    fn is_copied(&self) -> bool {
        self.copied == self.arrays.blocks()
    }

    /// Copies at most `max_bytes` bytes of `blocks`, but at least one block. Returns the number of
    /// bytes.
    fn copy(&mut self, device: &mut dyn DeviceBlocks, blocks: &[BlockId], max_bytes: usize, block: &mut Vec<u8>) -> Result<usize> {
        let Export { arrays, tail, kv, copied, .. } = self;
        arrays.copy_portion(copied, max_bytes, |place| {
            let is_tail = place + tail.blocks >= arrays.blocks();
            block.clear();
            device.read_block(blocks[place], is_tail.then_some(tail.slots), block)?;
            arrays.scatter(place, block, kv.bytes_mut());
            Ok(())
        })
    }
}

impl Exports {
    pub fn new(completions: Completions, max_bytes: usize) -> Exports {
        Exports {
            copying: VecDeque::new(),
            encoding: VecDeque::new(),
            in_step: VecDeque::new(),
            finished: VecDeque::new(),
            released: Vec::new(),
            worker: Worker::new(completions),
            last_id: 0,
            last_holder: u64::MAX,
            max_bytes,
            bytes_left: max_bytes,
            block: Vec::new(),
        }
    }

    pub fn begin_step(&mut self) {
        self.bytes_left = self.max_bytes;
    }

    /// Returns whether this step can copy the export and wait for its encoding. The bytes are few,
    /// and no other export comes before.
    pub fn fits_in_step(&self, export: &Export) -> bool {
        let is_first = self.copying.is_empty() && self.encoding.is_empty();
        is_first && export.bytes() <= self.bytes_left.min(self.max_bytes / IN_STEP_FRACTION)
    }

    /// Copies a small export and starts its encoding. `finish_in_step` waits for it.
    pub fn copy_in_step(&mut self, mut export: Export, blocks: &[BlockId], device: &mut dyn DeviceBlocks) -> Result<()> {
        self.in_step.try_reserve(1)?;
        while !export.is_copied() {
            export.copy(device, blocks, usize::MAX, &mut self.block)?;
        }
        self.bytes_left -= export.bytes();
        let encoding = self.encode(export, false);
        self.in_step.push_back(encoding);
        Ok(())
    }

    /// Returns the id of the next holder. Holders count down from the largest id, so that they
    /// differ from all other sequences.
    pub fn next_holder(&mut self) -> SeqId {
        self.last_holder -= 1;
        SeqId::from_raw(self.last_holder)
    }

    /// Reserves memory for one more export of several steps.
    pub fn reserve(&mut self) -> Result<()> {
        self.copying.try_reserve(1)?;
        self.encoding.try_reserve(self.copying.len() + 1)?;
        self.finished.try_reserve(self.copying.len() + self.encoding.len() + 1)?;
        Ok(self.released.try_reserve(self.copying.len() + 1)?)
    }

    /// Adds an export of several steps. `holder` shares the blocks of the sequence. `reserve` has
    /// succeeded.
    pub fn enqueue(&mut self, export: Export, holder: SeqId) {
        self.copying.push_back(HeldExport { export, holder, blocks: Vec::new() });
    }

    /// Returns the holder of the blocks that `copy` copies next, and the number of tokens in them,
    /// if the step may copy more. The caller then calls `set_blocks`.
    pub fn next_to_copy(&self) -> Option<(SeqId, usize)> {
        let next = self.copying.front().filter(|_| self.bytes_left > 0)?;
        Some((next.holder, next.export.computed()))
    }

    /// Sets the blocks of the next holder. `None` means that the pool has taken them, so that the
    /// sequence is exported without K and V.
    pub fn set_blocks(&mut self, blocks: Option<Vec<BlockId>>) {
        let Some(next) = self.copying.front_mut() else { return };
        match blocks {
            Some(blocks) => next.blocks = blocks,
            None => next.export.drop_kv(),
        }
    }

    /// Copies what the step may still copy of the next export.
    pub fn copy_portion(&mut self, device: &mut dyn DeviceBlocks) {
        let copied = self.copy(device, self.bytes_left);
        self.bytes_left = self.bytes_left.saturating_sub(copied);
    }

    /// Returns a holder that is not needed any more.
    pub fn next_released(&mut self) -> Option<SeqId> {
        self.released.pop()
    }

    /// Waits for the exports that this step delivers.
    pub fn finish_in_step(&mut self) {
        while let Some(encoding) = self.in_step.pop_front() {
            self.finish(encoding);
        }
    }

    fn encode(&mut self, export: Export, announces: bool) -> Encoding {
        let Export { header, kv, destination, .. } = export;
        self.last_id += 1;
        let id = TransferId(self.last_id);
        self.worker.encode(EncodeJob { id, header: Box::new(header), kv, announces });
        Encoding { id, destination }
    }

    fn finish(&mut self, encoding: Encoding) {
        let Encoding { id, destination: Destination { sender, output } } = encoding;
        let output = match self.worker.wait(id) {
            Ok(sequence_state) => Output { sequence_state, ..output },
            Err(error) => Output { error: Some(error), ..output },
        };
        self.finished.push_back((sender, output));
    }

    /// Frees memory, on the thread of the exports if it is large.
    pub fn discard(&mut self, memory: Vec<u8>) {
        if memory.len() > self.max_bytes {
            self.worker.discard(memory);
        }
    }

    pub fn pending(&self) -> usize {
        self.copying.len() + self.encoding.len()
    }

    /// Returns the sequences that hold blocks for exports.
    pub fn holders(&self) -> impl Iterator<Item = SeqId> {
        self.copying.iter().map(|next| next.holder)
    }
}

impl Connector for Exports {
    type Finished = (Arc<OutputSender>, Output);

    fn copy(&mut self, device: &mut dyn DeviceBlocks, max_bytes: usize) -> usize {
        let Some(HeldExport { export, blocks, .. }) = self.copying.front_mut() else { return 0 };
        let result = export.copy(device, blocks, max_bytes, &mut self.block);
        if result.is_ok() && !export.is_copied() {
            return result.unwrap_or_default();
        }
        let Some(HeldExport { export, holder, .. }) = self.copying.pop_front() else { return 0 };
        self.released.push(holder);
        match result {
            Ok(copied) => {
                let encoding = self.encode(export, true);
                self.encoding.push_back(encoding);
                copied
            }
            Err(error) => {
                let copied = export.arrays.block_bytes();
                let Destination { sender, output } = export.destination;
                self.finished.push_back((sender, Output { error: Some(error), ..output }));
                copied
            }
        }
    }

    fn complete(&mut self, id: TransferId) {
        if let Some(place) = self.encoding.iter().position(|encoding| encoding.id == id)
            && let Some(encoding) = self.encoding.remove(place)
        {
            self.finish(encoding);
        }
    }

    fn poll(&mut self) -> Option<Self::Finished> {
        self.finished.pop_front()
    }

    fn progress(&self) -> Progress {
        match (self.copying.is_empty(), self.encoding.is_empty()) {
            (false, _) => Progress::Copying,
            (true, false) => Progress::Waiting,
            (true, true) => Progress::Idle,
        }
    }

    fn cancel_all(&mut self) {
        self.released.extend(self.copying.drain(..).map(|next| next.holder));
        self.encoding.clear();
        self.in_step.clear();
        self.finished.clear();
    }
}
