//! Warm-up: the largest steps run once when an engine is created. They make all allocations of the
//! device, so that a lack of memory is detected early.

use crate::batch::{Batch, BlockCopy, Span};
use crate::error::Result;

/// The limits of the steps of an engine.
#[derive(Debug, Clone, Copy)]
pub struct WarmupLimits {
    pub rows: usize,
    pub sequences: usize,
    pub blocks: usize,
    pub block_size: usize,
    pub groups: usize,
    /// Maximum length of a sequence in tokens.
    pub max_len: usize,
}

/// Returns the largest prefill step, with a block copy, and the largest decode step.
pub fn largest_batches(stage: WarmupLimits) -> Result<[Batch; 2]> {
    let mut prompts = Warmup::new(stage)?;
    while prompts.add(stage.max_len) {}
    // The copies precede the computation, and these blocks are empty.
    prompts.batch.copies.extend((stage.blocks > 0).then(|| BlockCopy { from: 0, to: stage.blocks as u32 - 1 }));
    let mut decodes = Warmup::new(stage)?;
    while decodes.add(1) {}
    Ok([prompts, decodes].map(|warmup| warmup.batch))
}

/// Returns a step with one decode. `None` if no sequence fits.
pub fn single_decode(stage: WarmupLimits) -> Result<Option<Batch>> {
    let mut decode = Warmup::new(stage)?;
    Ok(decode.add(1).then_some(decode.batch))
}

/// A batch under construction for the warm-up.
struct Warmup {
    stage: WarmupLimits,
    batch: Batch,
    /// Number of allocated blocks.
    blocks: usize,
}

impl Warmup {
    fn new(stage: WarmupLimits) -> Result<Warmup> {
        let mut batch = Batch::default();
        batch.reserve(stage.rows, stage.sequences, stage.blocks, stage.groups)?;
        Ok(Warmup { stage, batch, blocks: 0 })
    }

    /// Adds a new sequence of at most `rows` tokens. Returns false if nothing fits.
    fn add(&mut self, rows: usize) -> bool {
        let WarmupLimits { block_size, groups, .. } = self.stage;
        let spare_blocks = (self.stage.blocks - self.blocks) / groups;
        let rows = rows.min(self.stage.rows - self.batch.rows()).min(spare_blocks * block_size);
        if rows == 0 || self.batch.spans.len() == self.stage.sequences {
            return false;
        }
        let (first_row, table, first_block) = (self.batch.rows(), self.batch.tables.len(), self.blocks);
        let batch = &mut self.batch;
        batch.spans.push(Span { first_row: first_row as u32, rows: rows as u32, table: table as u32 });
        for position in 0..rows {
            batch.tokens.push(0);
            batch.positions.push(position as u32);
            let block = first_block + position / block_size * groups;
            batch.slots.extend((block..block + groups).map(|block| (block * block_size + position % block_size) as u32));
        }
        let places = rows.div_ceil(block_size) * groups;
        batch.tables.extend((first_block..first_block + places).map(|block| block as u32));
        batch.logit_rows.push((first_row + rows - 1) as u32);
        self.blocks += places;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: WarmupLimits = WarmupLimits { rows: 20, sequences: 5, blocks: 12, block_size: 8, groups: 2, max_len: 12 };

    #[test]
    fn warmup_batches_fill_their_limits_and_write_each_slot_once() {
        for (limits, prompt_tokens, decode_tokens) in [
            (LIMITS, 20, 5),
            (WarmupLimits { blocks: 4, ..LIMITS }, 12, 2),
            (WarmupLimits { sequences: 1, ..LIMITS }, 12, 1),
            (WarmupLimits { blocks: 1, ..LIMITS }, 0, 0),
            (WarmupLimits { blocks: 1, groups: 1, ..LIMITS }, 8, 1),
        ] {
            let [prompts, decoding] = largest_batches(limits).unwrap();
            assert_eq!((prompts.rows(), decoding.rows()), (prompt_tokens, decode_tokens), "{limits:?}");
            for batch in [prompts, decoding] {
                let mut slots = batch.slots.clone();
                slots.sort_unstable();
                slots.dedup();
                assert_eq!(slots.len(), batch.rows() * limits.groups);
                assert!(slots.iter().all(|&slot| (slot as usize) < limits.blocks * limits.block_size));
                assert!(batch.copies.iter().all(|copy| (copy.to as usize) < limits.blocks));
            }
        }
    }
}
