//! The largest steps, once before the first one: what they take has then been taken, and what does not fit is known when an engine is created.

use crate::batch::{Batch, BlockCopy, Span};
use crate::error::Result;

/// Room that steps have.
#[derive(Debug, Clone, Copy)]
pub struct Stage {
    pub rows: usize,
    pub sequences: usize,
    pub blocks: usize,
    pub block_size: usize,
    pub groups: usize,
    /// Most tokens of a sequence.
    pub longest: usize,
}

/// As many rows of prompts, and as many decodes, as a step can have, and a copy of a block.
pub fn largest_batches(stage: Stage) -> Result<[Batch; 2]> {
    let mut prompts = Rehearsal::new(stage)?;
    while prompts.add(stage.longest) {}
    // Copies come before all else, and nothing is in these blocks yet.
    prompts.batch.copies.extend((stage.blocks > 0).then(|| BlockCopy { from: 0, to: stage.blocks as u32 - 1 }));
    let mut decodes = Rehearsal::new(stage)?;
    while decodes.add(1) {}
    Ok([prompts, decodes].map(|rehearsal| rehearsal.batch))
}

/// A step of one row. None: there is no room for a sequence.
pub fn one_decode(stage: Stage) -> Result<Option<Batch>> {
    let mut decode = Rehearsal::new(stage)?;
    Ok(decode.add(1).then_some(decode.batch))
}

struct Rehearsal {
    stage: Stage,
    batch: Batch,
    /// That are taken.
    blocks: usize,
}

impl Rehearsal {
    fn new(stage: Stage) -> Result<Rehearsal> {
        let mut batch = Batch::default();
        batch.reserve(stage.rows, stage.sequences, stage.blocks, stage.groups)?;
        Ok(Rehearsal { stage, batch, blocks: 0 })
    }

    /// A sequence that begins, of at most so many rows. False: there is no room.
    fn add(&mut self, rows: usize) -> bool {
        let Stage { block_size, groups, .. } = self.stage;
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

    const STAGE: Stage = Stage { rows: 20, sequences: 5, blocks: 12, block_size: 8, groups: 2, longest: 12 };

    #[test]
    fn the_largest_batches_fill_what_there_is_and_nothing_twice() {
        for (stage, rows, decodes) in [
            (STAGE, 20, 5),
            (Stage { blocks: 4, ..STAGE }, 12, 2),
            (Stage { sequences: 1, ..STAGE }, 12, 1),
            (Stage { blocks: 1, ..STAGE }, 0, 0),
            (Stage { blocks: 1, groups: 1, ..STAGE }, 8, 1),
        ] {
            let [prompts, decoding] = largest_batches(stage).unwrap();
            assert_eq!((prompts.rows(), decoding.rows()), (rows, decodes), "{stage:?}");
            for batch in [prompts, decoding] {
                let mut slots = batch.slots.clone();
                slots.sort_unstable();
                slots.dedup();
                assert_eq!(slots.len(), batch.rows() * stage.groups);
                assert!(slots.iter().all(|&slot| (slot as usize) < stage.blocks * stage.block_size));
                assert!(batch.copies.iter().all(|copy| (copy.to as usize) < stage.blocks));
            }
        }
    }
}
