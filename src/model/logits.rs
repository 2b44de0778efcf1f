//! The columns of the logits that each worker of an engine computes.

use crate::backend::ColumnPart;
use crate::error::{Result, try_with_capacity};
use crate::types::parallel::{WorkerPlace, part_of};

/// Returns the columns of the logits that rank 0 receives from the workers of the last stage. Empty
/// if it computes all of them, and on other ranks.
pub fn logit_parts(vocab: usize, place: WorkerPlace) -> Result<Vec<ColumnPart>> {
    let mut parts = try_with_capacity(place.division.tensor)?;
    if place.rank() == 0 && !place.is_alone() {
        parts.extend(place.heads(vocab).map(|(rank, tokens)| ColumnPart { rank, first: tokens.start, count: tokens.len() }));
    }
    Ok(parts)
}

/// Returns the columns of the logits that a worker has space for.
pub fn logit_width(vocab: usize, place: WorkerPlace) -> usize {
    if place.rank() == 0 { vocab } else { part_of(vocab, place.tensor_rank, place.division.tensor).len() }
}
