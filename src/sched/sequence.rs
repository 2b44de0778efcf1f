use super::group::GroupId;
use super::plan::{FinishReason, Verdict};
use crate::error::Result;
use crate::kv::{BlockTable, Chain, blocks_for};

/// Never reused.
pub type SeqId = u64;

/// The tokens of one stream and the blocks that hold their K and V.
#[derive(Debug)]
pub struct Sequence {
    pub id: SeqId,
    /// None: it is idle, and waits for the host to resume or free it.
    pub group: Option<GroupId>,
    /// What it brought, or its parent.
    pub priority: i32,
    /// The larger, the shorter it has been idle.
    pub idle_since: u64,
    pub tokens: Vec<u32>,
    /// Tokens chosen since it began or was resumed.
    pub generated: usize,
    /// Tokens whose K and V are stored.
    pub computed: usize,
    pub max_len: usize,
    /// What its length was raised by, in order.
    appended: Vec<Appended>,
    /// A step has computed some of it since it was added, forked or resumed.
    pub begun: bool,
    /// It stays, idle, when it ends.
    pub keep: bool,
    /// Logits are wanted of every row from this position on; None: of the last one only.
    pub logits_from: Option<usize>,
    pub past: Past,
    pub table: BlockTable,
    /// Where its chain of full blocks begins, and the chain as far as it is known.
    root: Chain,
    chains: Vec<Chain>,
}

/// What became of a sequence since it began or was resumed, for who wants to know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Past {
    /// How often its blocks were taken from it.
    pub preemptions: u64,
    /// Tokens that it began with and that were found in the prefix index.
    pub cached: u64,
}

/// Tokens that were appended at `at` raised `max_len` by `more`.
#[derive(Debug, Clone, Copy)]
struct Appended {
    at: usize,
    more: usize,
}

impl Sequence {
    /// Reserves all that the step path would otherwise have to allocate.
    pub fn new(id: SeqId, prompt: Vec<u32>, max_len: usize, root: Chain, block_size: usize) -> Result<Sequence> {
        let mut sequence = Sequence {
            id,
            group: None,
            priority: 0,
            idle_since: 0,
            tokens: prompt,
            generated: 0,
            computed: 0,
            max_len: 0,
            appended: Vec::new(),
            begun: false,
            keep: false,
            logits_from: None,
            past: Past::default(),
            table: BlockTable::default(),
            root,
            chains: Vec::new(),
        };
        sequence.allow(max_len, block_size)?;
        Ok(sequence)
    }

    /// Lets it grow to `max_len` tokens.
    pub fn allow(&mut self, max_len: usize, block_size: usize) -> Result<()> {
        let blocks = blocks_for(max_len, block_size);
        self.tokens.try_reserve_exact(max_len.saturating_sub(self.tokens.len()))?;
        self.chains.try_reserve_exact(blocks.saturating_sub(self.chains.len()))?;
        self.table.reserve(blocks)?;
        self.max_len = max_len;
        Ok(())
    }

    /// The same stream, cut to its first `len` tokens, with no blocks yet.
    pub fn branch(&self, id: SeqId, len: usize, block_size: usize) -> Result<Sequence> {
        let mut tokens = Vec::new();
        tokens.try_reserve_exact(self.max_len.max(len))?;
        tokens.extend_from_slice(&self.tokens[..len]);
        let mut child = Sequence::new(id, tokens, self.max_len, self.root, block_size)?;
        child.chains.extend_from_slice(&self.chains[..self.chains.len().min(len / block_size)]);
        child.generated = self.generated.saturating_sub(self.tokens.len() - len);
        child.keep = self.keep;
        child.priority = self.priority;
        child.logits_from = self.logits_from.map(|from| from.min(len));
        child.past = self.past;
        child.appended.try_reserve_exact(self.appended.len())?;
        child.appended.extend_from_slice(&self.appended);
        child.take_back(len);
        Ok(child)
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
        self.generated += 1;
        match stops {
            true => Some(FinishReason::Stop),
            false if self.tokens.len() >= self.max_len => Some(FinishReason::Length),
            false => None,
        }
    }

    /// Forgets the tokens from `len` on. Those before it that are computed stay so.
    pub fn cut(&mut self, len: usize, block_size: usize) {
        self.generated = self.generated.saturating_sub(self.tokens.len() - len);
        self.tokens.truncate(len);
        self.chains.truncate(len / block_size);
        self.computed = self.computed.min(len);
        self.logits_from = self.logits_from.map(|from| from.min(len));
        self.take_back(len);
    }

    /// What was appended from `len` on no longer makes it longer.
    fn take_back(&mut self, len: usize) {
        while let Some(Appended { at, more }) = self.appended.last_mut() {
            let kept = (*more).min(len.saturating_sub(*at));
            self.max_len -= *more - kept;
            *more = kept;
            if kept > 0 {
                return;
            }
            self.appended.pop();
        }
    }

    /// More tokens at the end, which do not count as chosen: it may become longer by so many, up to `longest`.
    pub fn append(&mut self, tokens: &[u32], longest: usize, block_size: usize) -> Result<()> {
        let (at, len) = (self.tokens.len(), self.tokens.len() + tokens.len());
        let max_len = self.max_len.saturating_add(tokens.len()).clamp(len, longest);
        self.appended.try_reserve(1)?;
        let more = max_len.saturating_sub(self.max_len).min(tokens.len());
        self.allow(max_len, block_size)?;
        self.appended.extend((more > 0).then_some(Appended { at, more }));
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// The chains of its first `blocks` blocks, which its tokens fill.
    pub fn chains(&mut self, blocks: usize, block_size: usize) -> &[Chain] {
        for place in self.chains.len()..blocks {
            let before = self.chains.last().unwrap_or(&self.root);
            let chain = before.next(&self.tokens[place * block_size..][..block_size]);
            self.chains.push(chain);
        }
        &self.chains[..blocks]
    }

    pub fn table_and_chains(&mut self) -> (&mut BlockTable, &[Chain]) {
        (&mut self.table, &self.chains)
    }

    /// Tokens at the beginning that both have, where these are more than `least`. Neither's last one counts: it is to be computed.
    pub fn common(&self, other: &Sequence, least: usize) -> Option<usize> {
        let most = self.tokens.len().min(other.tokens.len()) - 1;
        if least >= most || self.tokens[least] != other.tokens[least] {
            return None;
        }
        let common = self.tokens[..most].iter().zip(&other.tokens[..most]).take_while(|(a, b)| a == b).count();
        (common > least).then_some(common)
    }

    /// The chains that have been needed so far.
    pub fn known_chains(&self) -> &[Chain] {
        &self.chains
    }

    /// Panics unless the invariants between two steps hold; `pinned`: it chooses no tokens. For tests.
    pub fn check(&self, block_size: usize, pinned: bool) {
        if self.group.is_some() {
            assert!(self.computed < self.tokens.len(), "the last token of a queued sequence is still to be computed");
            assert!(pinned || self.tokens.len() < self.max_len, "an unfinished sequence has room for a token");
        }
        assert!(self.logits_from.is_none_or(|from| from <= self.tokens.len()), "logits are wanted of what there is or comes next");
        assert!(self.computed <= self.tokens.len(), "no more is computed than there is");
        let blocks = self.table.blocks().len();
        assert!(blocks >= blocks_for(self.computed, block_size), "every computed token has a slot");
        assert!(blocks <= blocks_for(self.tokens.len(), block_size), "no block is reserved for tokens that do not exist");
        assert!(self.chains.len() <= self.tokens.len() / block_size, "only full blocks have a chain");
    }

    /// Panics unless the chains are those of its tokens. For tests.
    #[cfg(test)]
    pub fn check_chains(&self, block_size: usize) {
        let mut chain = self.root;
        for (tokens, known) in self.tokens.chunks_exact(block_size).zip(&self.chains) {
            chain = chain.next(tokens);
            assert_eq!(chain, *known, "a chain is that of the tokens");
        }
    }
}
