use super::group::GroupId;
use super::plan::{FinishReason, Verdict};
use crate::error::Result;
use crate::kv::{BlockTable, Chain, Paging, blocks_for};

/// Never reused.
pub type SeqId = u64;

/// The tokens of one stream and the blocks that hold their K and V.
#[derive(Debug, Default)]
pub struct Sequence {
    pub id: SeqId,
    /// None: it is idle, or a pin that is computed.
    pub group: Option<GroupId>,
    /// What it brought, or its parent.
    pub priority: i32,
    /// It is in no group, and waits for the host to resume or free it.
    pub idle: bool,
    /// The larger, the shorter it has been idle.
    pub idle_since: u64,
    /// It chooses no tokens: its blocks stay until it is removed, or has to give way.
    pub pinned: bool,
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
    /// It goes on as itself, as the step that is being committed has chosen.
    pub chosen: bool,
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
    pub fn new(id: SeqId, prompt: Vec<u32>, max_len: usize, root: Chain, paging: &Paging) -> Result<Sequence> {
        let mut sequence = Sequence { id, tokens: prompt, root, ..Sequence::default() };
        sequence.allow(max_len, paging)?;
        Ok(sequence)
    }

    /// Lets it grow to `max_len` tokens.
    pub fn allow(&mut self, max_len: usize, paging: &Paging) -> Result<()> {
        let blocks = blocks_for(max_len, paging.block_size());
        self.tokens.try_reserve_exact(max_len.saturating_sub(self.tokens.len()))?;
        self.chains.try_reserve_exact(blocks.saturating_sub(self.chains.len()))?;
        self.table.reserve(paging.entries(max_len))?;
        self.max_len = max_len;
        Ok(())
    }

    /// One that is nobody's yet, with what a branch of `max_len` tokens will need.
    pub fn shell(max_len: usize, paging: &Paging) -> Result<Sequence> {
        Sequence::new(0, Vec::new(), max_len, Chain::default(), paging)
    }

    /// A shell has room for a branch of `parent` still, which has become longer.
    pub fn keep_up_with(&mut self, parent: &Sequence, paging: &Paging) -> Result<()> {
        self.appended.clear();
        self.appended.try_reserve(parent.appended.len())?;
        self.tokens.clear();
        self.chains.clear();
        self.allow(parent.max_len, paging)
    }

    /// The same stream, cut to its first `len` tokens, with no blocks yet; made of a shell, or of one that nobody needs any more.
    pub fn branch(&self, shell: Sequence, id: SeqId, len: usize, paging: &Paging) -> Result<Sequence> {
        let Sequence { tokens, chains, appended, table, .. } = shell;
        let mut child = Sequence {
            id,
            tokens,
            chains,
            appended,
            table,
            priority: self.priority,
            generated: self.generated.saturating_sub(self.tokens.len() - len),
            keep: self.keep,
            logits_from: self.logits_from.map(|from| from.min(len)),
            past: self.past,
            root: self.root,
            ..Sequence::default()
        };
        child.tokens.clear();
        child.chains.clear();
        child.appended.clear();
        child.appended.try_reserve_exact(self.appended.len())?;
        child.allow(self.max_len.max(len), paging)?;
        child.max_len = self.max_len;
        child.tokens.extend_from_slice(&self.tokens[..len]);
        child.chains.extend_from_slice(&self.chains[..self.chains.len().min(len / paging.block_size())]);
        child.appended.extend_from_slice(&self.appended);
        child.take_back(len);
        Ok(child)
    }

    /// Tokens still to be computed; one while decoding.
    #[inline]
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens that it might choose in all, in this turn.
    pub fn most(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len()) + self.generated
    }

    /// Appends the chosen token and says whether that was the end.
    #[inline]
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
    pub fn append(&mut self, tokens: &[u32], longest: usize, paging: &Paging) -> Result<()> {
        let (at, len) = (self.tokens.len(), self.tokens.len() + tokens.len());
        let max_len = self.max_len.saturating_add(tokens.len()).clamp(len, longest);
        self.appended.try_reserve(1)?;
        let more = max_len.saturating_sub(self.max_len).min(tokens.len());
        self.allow(max_len, paging)?;
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

    /// Panics unless the invariants between two steps hold. For tests.
    pub fn check(&self, block_size: usize) {
        if self.group.is_some() {
            assert!(self.computed < self.tokens.len(), "the last token of a queued sequence is still to be computed");
            assert!(self.pinned || self.tokens.len() < self.max_len, "an unfinished sequence has room for a token");
        }
        assert!(self.logits_from.is_none_or(|from| from <= self.tokens.len()), "logits are wanted of what there is or comes next");
        assert!(self.computed <= self.tokens.len(), "no more is computed than there is");
        let blocks = self.table.places();
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
