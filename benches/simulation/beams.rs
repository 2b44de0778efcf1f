//! Random scores for beam search. A hook cannot set them, because beam search excludes hooks.

use std::collections::HashMap;

use pagedllm::types::batch::Batch;

use super::workload::{draw, mix};
use super::{EOS, VOCAB};

/// Number of first prompt tokens that contain the length at which a sequence ends.
pub const DIGITS: usize = 3;
const BASE: usize = VOCAB - EOS - 1;

/// Returns the prompt token at a position below `DIGITS` of a sequence that ends at `len` tokens.
pub fn digit(len: usize, position: usize) -> usize {
    EOS + 1 + len / BASE.pow(position as u32) % BASE
}

/// The lengths at which running sequences end, by their first block.
#[derive(Default)]
pub struct Ends(HashMap<u32, [usize; DIGITS]>);

impl Ends {
    /// Writes the logits of all rows: random scores, and EOS at the end of a sequence. The larger
    /// `scale` is, the more the best token stands out.
    pub fn score(&mut self, batch: &Batch, scale: f32, logits: &mut [f32]) {
        // A fork may have a copy of the first block.
        for copy in &batch.copies {
            if let Some(digits) = self.0.get(&copy.from).copied() {
                self.0.insert(copy.to, digits);
            }
        }
        let mut rows = batch.logit_rows.iter().zip(logits.chunks_exact_mut(VOCAB)).peekable();
        for span in &batch.spans {
            let digits = self.0.entry(batch.tables[span.table as usize]).or_default();
            for row in span.first_token as usize..(span.first_token + span.tokens) as usize {
                let (position, token) = (batch.positions[row] as usize, batch.tokens[row]);
                if let Some(digit) = digits.get_mut(position) {
                    *digit = token as usize - EOS - 1;
                }
                if let Some((_, logits)) = rows.next_if(|&(&logit_row, _)| logit_row as usize == row) {
                    let end = digits.iter().rev().fold(0, |len, digit| len * BASE + digit);
                    // Beams of a request are in different slots.
                    let seed = mix(u64::from(batch.slots[row]), (position * VOCAB) as u64 + u64::from(token));
                    write(logits, position + 2 >= end, seed, scale);
                }
            }
        }
    }
}

fn write(logits: &mut [f32], is_last: bool, seed: u64, scale: f32) {
    for (token, logit) in logits.iter_mut().enumerate() {
        *logit = match token {
            EOS => f32::NEG_INFINITY,
            // A Gumbel variable: the probabilities are exponential variables to a power.
            _ => -scale * (-draw(seed, token as u64).ln()).ln() as f32,
        };
    }
    if is_last {
        logits.fill(f32::NEG_INFINITY);
        logits[EOS] = 0.0;
    }
}
