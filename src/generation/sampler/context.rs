//! The state of a sequence that sampling reads.

use super::history::SamplingHistory;

/// The state of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The prompt, followed by the generated tokens.
    pub tokens: &'a [u32],
    pub prompt_len: usize,
    /// Number of tokens that count towards `min_tokens`.
    pub generated: usize,
    /// Seed. The n-th random number of the seed samples the n-th token.
    pub seed: u64,
    pub history: &'a SamplingHistory,
    /// The grammar's mask: one bit per token, lowest bit first. Tokens beyond the mask are
    /// excluded.
    pub allowed: Option<&'a [u32]>,
}
