//! Warm-up: the largest steps run once when an engine is created. They make all allocations of the
//! device, so that a lack of memory is detected early.

use crate::error::Result;
use crate::types::batch::{Batch, BlockCopy, Span};

/// The limits of the steps of an engine.
#[derive(Debug, Clone, Copy)]
pub struct WarmupLimits {
    pub tokens: usize,
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
        batch.reserve(stage.tokens, stage.sequences, stage.blocks, stage.groups)?;
        Ok(Warmup { stage, batch, blocks: 0 })
    }

    /// Adds a new sequence of at most `tokens` tokens. Returns false if nothing fits.
    fn add(&mut self, tokens: usize) -> bool {
        let WarmupLimits { block_size, groups, .. } = self.stage;
        let spare_blocks = (self.stage.blocks - self.blocks) / groups;
        let tokens = tokens.min(self.stage.tokens - self.batch.token_count()).min(spare_blocks * block_size);
        if tokens == 0 || self.batch.spans.len() == self.stage.sequences {
            return false;
        }
        let (first_token, table, first_block) = (self.batch.token_count(), self.batch.tables.len(), self.blocks);
        let batch = &mut self.batch;
        batch.spans.push(Span { first_token: first_token as u32, tokens: tokens as u32, table: table as u32 });
        for position in 0..tokens {
            batch.tokens.push(0);
            batch.positions.push(position as u32);
            let block = first_block + position / block_size * groups;
            batch.slots.extend((block..block + groups).map(|block| (block * block_size + position % block_size) as u32));
        }
        let table_entries = tokens.div_ceil(block_size) * groups;
        batch.tables.extend((first_block..first_block + table_entries).map(|block| block as u32));
        batch.logit_rows.push((first_token + tokens - 1) as u32);
        self.blocks += table_entries;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: WarmupLimits = WarmupLimits { tokens: 20, sequences: 5, blocks: 12, block_size: 8, groups: 2, max_len: 12 };

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
            assert_eq!((prompts.token_count(), decoding.token_count()), (prompt_tokens, decode_tokens), "{limits:?}");
            for batch in [prompts, decoding] {
                let mut slots = batch.slots.clone();
                slots.sort_unstable();
                slots.dedup();
                assert_eq!(slots.len(), batch.token_count() * limits.groups);
                assert!(slots.iter().all(|&slot| (slot as usize) < limits.blocks * limits.block_size));
                assert!(batch.copies.iter().all(|copy| (copy.to as usize) < limits.blocks));
            }
        }
    }
}
