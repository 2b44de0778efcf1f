use super::plan::{FinishReason, Verdict};
use crate::error::Result;
use crate::kv::{BlockTable, blocks_for};

/// Never reused; a larger one is younger.
pub type SeqId = u64;

/// The tokens of one stream and the blocks that hold their K and V.
#[derive(Debug)]
pub struct Sequence {
    pub id: SeqId,
    pub tokens: Vec<u32>, // the prompt, then what was generated
    pub prompt_len: usize,
    /// Tokens whose K and V are stored.
    pub computed: usize,
    max_len: usize,
    pub table: BlockTable,
}

impl Sequence {
    /// Reserves all that the step path would otherwise have to allocate.
    pub fn new(id: SeqId, prompt: Vec<u32>, max_len: usize, most_blocks: usize) -> Result<Sequence> {
        let mut tokens = prompt;
        let prompt_len = tokens.len();
        tokens.try_reserve_exact(max_len.saturating_sub(prompt_len))?;
        Ok(Sequence { id, tokens, prompt_len, computed: 0, max_len, table: BlockTable::with_capacity(most_blocks)? })
    }

    /// Tokens still to be computed; one while decoding.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Appends the chosen token and says whether that was the end.
    pub fn apply(&mut self, verdict: Verdict) -> Option<FinishReason> {
        let (token, stops) = match verdict {
            Verdict::Token(token) => (token, false),
            Verdict::Stop(token) => (token, true),
            Verdict::Fail => return Some(FinishReason::Error),
        };
        self.tokens.push(token);
        match stops {
            true => Some(FinishReason::Stop),
            false if self.tokens.len() >= self.max_len => Some(FinishReason::Length),
            false => None,
        }
    }

    pub fn check(&self, block_size: usize) {
        assert!(self.computed < self.tokens.len(), "the last token is always still to be computed");
        assert!(self.tokens.len() < self.max_len, "an unfinished sequence has room for a token");
        let blocks = self.table.blocks().len();
        assert!(blocks >= blocks_for(self.computed, block_size), "every computed token has a slot");
        assert!(blocks <= blocks_for(self.tokens.len(), block_size), "no block is reserved for tokens that do not exist");
    }
}
