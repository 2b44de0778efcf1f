//! The work of the ranks other than 0: they do what rank 0 sends.

use super::command::{Kind, Message};
use super::describe_blocks;
use super::group::Group;
use crate::backend::{Backend, BatchSize};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::executor::local::ModelExecutor;
use crate::types::batch::{Batch, BlockMove, Bounds};

/// Follows rank 0, whose batches are up to `max`, until its engine is freed. Errors: those of this
/// worker, and `Internal` if another worker has ended or does not respond in time, or if a command
/// refers to what does not exist. Rank 0 fails then, too.
pub fn serve<B: Backend>(mut local: Box<ModelExecutor<B>>, group: &Group, max: &BatchSize, bounds: &Bounds) -> Result<()> {
    let (part_bytes, _) = describe_blocks(&local, group)?;
    let own_bytes: usize = part_bytes[group.place.rank()].iter().sum();
    let (mut message, mut batch, mut moves) = group.agree(reserve(max, bounds.blocks))?;
    // Rank 0 creates its engine now, which can fail.
    group.agree(Ok(()))?;
    let max_len = Message::max_len(max, bounds.blocks);
    let (mut copies, mut blocks, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        let kind = message.receive(group, max_len)?;
        if kind != Kind::Step {
            message.relay(group)?;
        }
        match kind {
            Kind::Step => {
                message.take_step(&mut batch)?;
                check_size(&batch, max)?;
                batch.check(bounds)?;
                let extent = local.begin(&batch)?;
                local.compute(extent);
                // Only now, because the next stage may be busy.
                message.relay(group)?;
                let _ = local.deliver(extent);
                local.finish()?;
            }
            Kind::SwapOut => {
                message.take_moves(&mut moves, bounds)?;
                local.swap_out(&moves)?;
            }
            Kind::SwapIn => {
                message.take_moves(&mut moves, bounds)?;
                local.swap_in(&moves)?;
            }
            Kind::Read => {
                let tail = message.take_blocks(&mut blocks, bounds)?;
                bytes.clear();
                local.read_blocks(&blocks, tail, &mut bytes)?;
                group.world().send(&bytes, 0, group.timeout())?;
            }
            Kind::Write => {
                message.take_blocks(&mut blocks, bounds)?;
                let len = blocks.len() * own_bytes;
                bytes.try_reserve(len.saturating_sub(bytes.len()))?;
                bytes.resize(len, 0);
                group.world().receive(&mut bytes, 0, group.timeout())?;
                local.write_blocks(&blocks, &bytes)?;
            }
            Kind::Shrink => {
                let blocks = message.take_shrink(&mut copies, bounds)?;
                local.shrink(&copies, blocks)?;
            }
            Kind::Exit => return Ok(()),
        }
        local.backend().check()?;
        if local.is_lost() {
            return Err(Error::internal("the device is lost"));
        }
    }
}

/// Reserves what steps need: a message, a batch, and the list of the blocks that a step moves.
fn reserve(max: &BatchSize, blocks: usize) -> Result<(Message, Batch, Vec<BlockMove>)> {
    let (mut batch, mut moves) = (Batch::default(), Vec::new());
    batch.reserve(max.tokens, max.sequences, max.table_entries, max.groups)?;
    moves.try_reserve(blocks)?;
    Ok((Message::for_batches(max)?, batch, moves))
}

/// Fails if a batch is larger than the working memory, or needs samples that no step has.
fn check_size(batch: &Batch, max: &BatchSize) -> Result<()> {
    let sizes = [
        (batch.tokens.len(), max.tokens),
        (batch.spans.len(), max.sequences),
        (batch.logit_rows.len(), max.logits),
        (batch.tables.len(), max.table_entries),
    ];
    let has_samples = batch.placeholders.iter().all(|placeholder| (placeholder.sample as usize) < max.logits);
    match has_samples && sizes.iter().all(|(size, limit)| size <= limit) {
        true => Ok(()),
        false => Err(Error::internal("rank 0 has sent a batch that is larger than the working memory")),
    }
}
