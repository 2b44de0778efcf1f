//! Exports and imports of sequences: their commands, their portions in each step, and their
//! results.

use std::sync::Arc;

use super::command::{Command, ImportedSequence, PendingOutput};
use super::deferred_commands::DeferredCommands;
use super::device::Device;
use super::lifecycle::Lifecycle;
use super::transfers::{Export, Import};
use crate::error::{Error, Result};
use crate::kv::connector::{Connector, TransferId};
use crate::kv::{BlockHash, BlockId};
use crate::output::queue::OutputSender;
use crate::scheduler::BlocksResult;
use crate::types::SeqId;
use crate::types::batch::Tail;
use crate::types::outputs::Output;
use crate::types::sequence_state::Header;

/// The instruction path of a sequence whose K and V were computed on several paths.
const MIXED: &str = "mixed";

impl Lifecycle {
    /// Applies a command, or defers it while the import of its sequence has not finished.
    pub fn apply(&mut self, command: Command, device: &mut Device) {
        let Some(seq) = self.transfers.imports.sequence_before(&command) else { return self.apply_after_mask(command, device) };
        // The end of a generation must not wait. The sequence loses K and V, and the commands for
        // it are applied in their order.
        let ends = matches!(command, Command::Abort { .. } | Command::End { .. } | Command::Free { .. });
        let refused = self.transfers.imports.defer(seq, command).err();
        if (ends || refused.is_some())
            && let Some(import) = self.transfers.imports.take(seq)
        {
            self.scheduler.drop_blocks(seq);
            let deferred = self.finish_import(import, Ok(()));
            deferred.into_iter().for_each(|command| self.apply_after_mask(command, device));
        }
        if let Some(command) = refused {
            self.apply_after_mask(command, device);
        }
    }

    /// Delivers the exports that other threads have completed.
    pub fn complete_transfers(&mut self, finished: &[TransferId]) {
        self.transfers.begin_step();
        finished.iter().for_each(|&id| self.transfers.exports.complete(id));
        self.deliver_exports();
    }

    /// Waits for the small exports of this step, and delivers them.
    pub fn finish_exports_in_step(&mut self) {
        self.transfers.exports.finish_in_step();
        self.deliver_exports();
    }

    /// Copies the portion of this step of all exports and imports.
    pub fn copy_transfers(&mut self, device: &mut Device) {
        self.transfers.waits_for_moves = false;
        while let Some((holder, computed)) = self.transfers.exports.next_to_copy() {
            if !self.swap_in(holder, device) {
                self.transfers.waits_for_moves = true;
                break;
            }
            let blocks = self.blocks_of(holder, computed);
            self.transfers.exports.set_blocks(blocks);
            self.transfers.exports.copy_portion(device);
            self.release_holders();
        }
        self.deliver_exports();
        while let Some((seq, computed)) = self.transfers.imports.next_to_copy() {
            if !self.transfers.imports.has_begun() {
                let adoption = self.scheduler.adopt(seq, computed);
                // Other sequences may have been swapped out to free the blocks.
                device.move_blocks(&mut self.scheduler, |_| {});
                if adoption == BlocksResult::Pending {
                    self.transfers.waits_for_moves = true;
                    break;
                }
            }
            match self.blocks_of(seq, computed) {
                Some(blocks) => {
                    self.transfers.imports.set_blocks(blocks);
                    self.transfers.imports.copy_portion(device);
                }
                // The pool has no blocks, or has taken them, so all tokens are recomputed.
                None => {
                    if let Some(import) = self.transfers.imports.take(seq) {
                        self.scheduler.drop_blocks(seq);
                        let deferred = self.finish_import(import, Ok(()));
                        self.release_deferred(deferred, device);
                    }
                }
            }
            while let Some((import, result)) = self.transfers.imports.poll() {
                let deferred = self.finish_import(import, result);
                self.release_deferred(deferred, device);
            }
        }
    }

    /// Returns the visible blocks of the sequence if its first `computed` tokens are on the device.
    fn blocks_of(&self, seq: SeqId, computed: usize) -> Option<Vec<BlockId>> {
        let sequence = self.scheduler.find(seq).filter(|sequence| sequence.computed == computed)?;
        // Without memory for the list, the tokens are recomputed.
        self.scheduler.blocks().visible_blocks(&sequence.table, computed).ok().flatten()
    }

    /// Exports a sequence. The sequence continues, whether the export succeeds or not.
    pub(super) fn export(&mut self, seq: SeqId, pending: PendingOutput, device: &mut Device) {
        let PendingOutput { sender, last, .. } = pending;
        if let Err(error) = self.begin_export(seq, &sender, device) {
            self.deliver_export(&sender, Output { error: Some(error), ..last });
        }
    }

    fn begin_export(&mut self, seq: SeqId, sender: &Arc<OutputSender>, device: &mut Device) -> Result<()> {
        let gone = || {
            Error::not_found(format!(
                "sequence {seq} ended before the export and was not kept; set PLLM_REQUEST_KEEP to export sequences that have ended"
            ))
        };
        let is_ready = self.swap_in(seq, device);
        let exported = self.live.sequences.get(&seq).ok_or_else(gone)?;
        let sequence = self.scheduler.get(seq)?;
        let (manager, computed) = (self.scheduler.blocks(), sequence.computed);
        let blocks = manager.visible_blocks(&sequence.table, computed)?;
        // If visible blocks are missing, all tokens are recomputed after the import.
        let is_missing = if is_ready { blocks.is_none() } else { manager.sees_null_block(&sequence.table, computed) };
        let computed = if is_missing { 0 } else { computed };
        let header = exported.export(Header {
            model: self.model.fingerprint,
            layout: device.executor.layout(),
            block_size: self.scheduler.blocks().block_size(),
            isa: if exported.inexact { MIXED.into() } else { self.model.isa.into() },
            tokens: sequence.tokens.as_slice().into(),
            computed,
            max_len: sequence.max_len(),
            logits_from: sequence.logits_from,
            ..Header::default()
        })?;
        let slots = computed - computed.saturating_sub(1) / header.block_size * header.block_size;
        let tail = Tail { blocks: self.scheduler.blocks().paging().groups(), slots };
        let parts = device.executor.kv_part_bytes();
        let count = self.scheduler.blocks().paging().visible_blocks(computed);
        let export = Export::new(header.into_owned()?, parts, count, tail, sender.clone(), exported.output())?;
        let exports = &mut self.transfers.exports;
        if is_ready && exports.fits_in_step(&export) {
            return exports.copy_in_step(export, &blocks.unwrap_or_default(), device);
        }
        // The holder is an idle sequence, so the pool can take its blocks if it needs them.
        exports.reserve()?;
        let holder = exports.next_holder();
        self.scheduler.fork(seq, None, holder, false)?;
        exports.enqueue(export, holder);
        Ok(())
    }

    fn deliver_exports(&mut self) {
        self.release_holders();
        while let Some((sender, output)) = self.transfers.exports.poll() {
            self.deliver_export(&sender, output);
        }
    }

    fn release_holders(&mut self) {
        while let Some(holder) = self.transfers.exports.next_released() {
            self.scheduler.remove(holder);
        }
    }

    fn deliver_export(&mut self, sender: &Arc<OutputSender>, output: Output) {
        let seq = output.sequence;
        self.delivery.push(sender, output);
        if self.scheduler.find(seq).is_none() {
            self.delivery.forget(seq);
        }
    }

    /// Imports a sequence. Its K and V are copied in the steps from this one on.
    pub(super) fn import(&mut self, id: SeqId, imported: ImportedSequence, device: &mut Device) {
        let sender = imported.sequence.generation.sender.clone();
        if let Err(error) = self.begin_import(id, imported, device) {
            self.fail_import(&sender, Output { request: id.own_request(), sequence: id, ..Output::default() }.failed(error));
        }
    }

    fn begin_import(&mut self, id: SeqId, imported: ImportedSequence, device: &mut Device) -> Result<()> {
        self.live.sequences.try_reserve(1)?;
        let ImportedSequence { sequence: imported, header, kv, recorded } = imported;
        recorded.into_iter().for_each(|memory| self.transfers.exports.discard(memory));
        let sender = imported.generation.sender.clone();
        let root = BlockHash::for_sequence(&self.model.fingerprint, id);
        let computed = header.computed;
        self.scheduler.import(id, header.tokens.into_owned(), header.max_len, header.logits_from, root)?;
        match self.scheduler.blocks().paging().visible_blocks(computed) {
            0 => self.transfers.exports.discard(kv),
            blocks => {
                let import = Import::new(id, computed, sender, kv, device.executor.kv_part_bytes(), blocks)?;
                self.transfers.imports.enqueue(import)?;
            }
        }
        self.live.sequences.insert(id, imported);
        // Small ones are complete before the next command.
        self.copy_transfers(device);
        Ok(())
    }

    /// Ends an import. Returns the commands that have waited for it.
    fn finish_import(&mut self, import: Import, result: Result<()>) -> DeferredCommands {
        let Import { seq, sender, deferred, kv, .. } = import;
        self.transfers.exports.discard(kv);
        if let Err(error) = result {
            self.fail_import(&sender, Output { request: seq.own_request(), sequence: seq, ..Output::default() }.failed(error));
        }
        deferred
    }

    /// Swaps a sequence in if enough blocks are available, as far as this step may copy. Returns
    /// false if a later step continues.
    fn swap_in(&mut self, seq: SeqId, device: &mut Device) -> bool {
        if self.scheduler.find(seq).is_none_or(|sequence| sequence.table.is_on_device()) {
            return true;
        }
        let swap = self.scheduler.swap_in_sequence(seq);
        device.move_blocks(&mut self.scheduler, |_| {});
        swap != BlocksResult::Pending
    }

    /// Panics unless exactly the pending exports and forks have holders. For tests.
    pub fn check_transfers(&self) {
        let holders = self
            .transfers
            .exports
            .holders()
            .chain(self.forks.holders())
            .inspect(|&holder| assert!(self.scheduler.find(holder).is_some(), "an export or a fork lacks its holder"));
        assert_eq!(holders.count(), self.scheduler.ids().filter(|id| id.get() > u64::MAX / 2).count(), "a holder is not needed");
        self.transfers.imports.sequences().for_each(|seq| assert!(self.scheduler.find(seq).is_some(), "an import lacks its sequence"));
    }
}
