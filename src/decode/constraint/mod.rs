//! Structured output: which tokens a grammar allows next. llguidance runs the grammars; this module contains its failures.
//!
//! Nothing of the crate gets out: a panic in it is an error of the one request, its limits bound time and memory, it prints nothing,
//! and grammars are compiled on a thread whose stack is deep enough for them.

mod cache;
mod compile;
mod failure;
mod lark;
mod pattern;
mod schema;
mod vocabulary;

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::StopReason;
use llguidance::{ParserFactory, TokenParser};

pub use vocabulary::Vocabulary;

use crate::error::{Code, Error, Result};
use crate::options::Grammar;
use crate::sys::quiet::no_panic;
use cache::Cache;

/// Compiles grammars over one vocabulary. Sync: any thread that adds a request compiles its grammar.
pub struct Grammars {
    shared: Arc<Shared>,
    cache: Mutex<Cache>,
}

/// What every constraint of an engine has in common.
struct Shared {
    factory: ParserFactory,
    /// One bit per token that a grammar may allow. Rows that no token has are not among them.
    known: Vec<u32>,
    /// The same for the tokens that end a sequence.
    ends: Vec<u32>,
}

/// A grammar as it is before the first token.
struct Compiled {
    /// Never advanced, so that its lexer has learnt nothing.
    pristine: Mutex<TokenParser>,
    /// Its requests begin as copies of this one, and share the lexer: what one has learnt the others find.
    common: Mutex<TokenParser>,
}

/// A lexer that has learnt so many states is left to those who have it: it is on its way to the limit of 50,000.
const MOST_COMMON_STATES: usize = 10_000;

impl Compiled {
    fn new(parser: TokenParser) -> Compiled {
        Compiled { common: Mutex::new(parser.deep_clone()), pristine: Mutex::new(parser) }
    }

    /// A parser at the beginning, whose lexer is shared.
    fn together(&self) -> std::result::Result<Box<TokenParser>, String> {
        let mut common = self.common.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = no_panic(|| common.parser.lexer_stats());
        if stats.map_or(true, |stats| stats.error || stats.num_states > MOST_COMMON_STATES) {
            *common = *self.alone()?;
        }
        no_panic(|| Box::new(common.clone()))
    }

    /// A parser at the beginning, with a lexer of its own.
    fn alone(&self) -> std::result::Result<Box<TokenParser>, String> {
        no_panic(|| Box::new(self.pristine.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()))
    }
}

impl Grammars {
    /// Takes from milliseconds to a second, by the size of the vocabulary, so it is for the first request that needs it.
    pub fn new(vocabulary: Vocabulary) -> Result<Grammars> {
        let (known, ends) = (vocabulary.known()?, vocabulary.ends()?);
        let factory = no_panic(|| vocabulary::factory(vocabulary)).flatten();
        let factory = factory.map_err(|why| Error::model(format!("grammars cannot use this model's vocabulary: {why}")))?;
        Ok(Grammars { shared: Arc::new(Shared { factory, known, ends }), cache: Mutex::default() })
    }

    /// A constraint at the grammar's beginning. Grammars that were compiled lately are only copied.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint> {
        if let Some(compiled) = self.cache().get(grammar) {
            return Constraint::new(self.shared.clone(), compiled);
        }
        let compiled = Arc::new(compile::on_deep_stack(self.shared.clone(), grammar)?);
        let constraint = Constraint::new(self.shared.clone(), compiled.clone())?;
        // Without memory for a copy it is compiled again next time.
        if let Ok(grammar) = grammar.try_clone() {
            self.cache().insert(grammar, compiled);
        }
        Ok(constraint)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where one sequence is in its grammar. After an error of `mask` or `advance` it answers nothing but that error.
pub struct Constraint {
    shared: Arc<Shared>,
    compiled: Arc<Compiled>,
    parser: Box<TokenParser>,
    /// The lexer is not shared, or only with forks.
    alone: bool,
    /// Every token so far.
    tokens: Vec<u32>,
    /// The last token was an end. The parser is not told of it.
    ended: bool,
    /// After those, the ones that the grammar does not allow.
    strayed: Option<Box<Strayed>>,
    mask: Vec<u32>,
    /// The mask is that of the present state.
    fresh: bool,
    failure: Option<Error>,
}

/// Tokens that lead out of the grammar, or come after its end. The parser has not seen them, so that they can be taken back.
#[derive(Clone)]
struct Strayed {
    tokens: usize,
    why: Error,
}

impl Constraint {
    fn new(shared: Arc<Shared>, compiled: Arc<Compiled>) -> Result<Constraint> {
        let parser = compiled.together().map_err(broken)?;
        let mut constraint = Constraint {
            shared,
            compiled,
            parser,
            alone: false,
            tokens: Vec::new(),
            ended: false,
            strayed: None,
            mask: Vec::new(),
            fresh: false,
            failure: None,
        };
        constraint.mask.try_reserve_exact(constraint.shared.known.len())?;
        Ok(constraint)
    }

    /// A copy that goes its own way from here.
    pub fn fork(&self) -> Result<Constraint> {
        self.check()?;
        let mut tokens = Vec::new();
        tokens.try_reserve(self.tokens.len() + 1)?;
        tokens.extend_from_slice(&self.tokens);
        let mut mask = Vec::new();
        mask.try_reserve_exact(self.shared.known.len())?;
        mask.extend_from_slice(&self.mask);
        Ok(Constraint {
            shared: self.shared.clone(),
            compiled: self.compiled.clone(),
            parser: no_panic(|| self.parser.clone()).map_err(broken)?,
            alone: self.alone,
            tokens,
            ended: self.ended,
            strayed: self.strayed.clone(),
            mask,
            fresh: self.fresh,
            failure: None,
        })
    }

    /// What may come next: one bit per token, bit t % 32 of word t / 32. It is kept until the state changes.
    /// Where the grammar may end, the tokens that end a sequence are among them; where it must, they alone.
    pub fn mask(&mut self) -> Result<&[u32]> {
        self.check()?;
        if let Some(strayed) = &self.strayed {
            return Err(strayed.why.clone());
        }
        if !self.fresh {
            self.try_twice(Constraint::compute)?;
            self.fresh = true;
        }
        Ok(&self.mask)
    }

    /// Where the lexer is shared, what goes wrong may be another request's doing: then once more, alone.
    fn try_twice(&mut self, work: impl Fn(&mut Constraint) -> Result<()>) -> Result<()> {
        let mut outcome = work(self);
        if outcome.is_err() && !self.alone {
            outcome = self.replay(self.tokens.len()).and_then(|()| work(self));
        }
        outcome.inspect_err(|error| self.failure = Some(error.clone()))
    }

    fn compute(&mut self) -> Result<()> {
        self.mask.clear();
        if self.is_complete() {
            self.mask.extend_from_slice(&self.shared.ends);
            return Ok(());
        }
        let allowed = no_panic(|| self.parser.compute_mask()).map_err(broken)?.map_err(|e| self.stuck(&e))?;
        self.mask.extend(allowed.as_slice().iter().zip(&self.shared.known).map(|(allowed, known)| allowed & known));
        Ok(())
    }

    /// Room for so many tokens more.
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        Ok(self.tokens.try_reserve_exact(tokens)?)
    }

    /// A token was committed.
    pub fn advance(&mut self, token: u32) -> Result<()> {
        self.check()?;
        if self.ended {
            let why = failure::after_end(&self.shared, &self.tokens, token);
            self.stray(1, why.clone());
            return Err(why);
        }
        self.tokens.try_reserve(1)?;
        self.try_twice(|constraint| constraint.consume(token)).map_err(|error| self.explained(error, token))?;
        self.tokens.push(token);
        self.fresh = false;
        Ok(())
    }

    /// The host's own tokens follow. Where they lead out of the grammar there is no mask, until they are taken back.
    pub fn append(&mut self, tokens: &[u32]) -> Result<()> {
        for (place, &token) in tokens.iter().enumerate() {
            if self.strayed.is_none() && self.allows(token)? {
                self.advance(token)?;
                continue;
            }
            if self.strayed.is_none() {
                let why = failure::refused(&self.shared, &mut self.parser, &self.tokens, token, Some("the host added it"));
                self.stray(tokens.len() - place, why);
            } else {
                self.stray(tokens.len() - place, Error::invalid("tokens that the grammar does not allow were added before"));
            }
            break;
        }
        Ok(())
    }

    fn stray(&mut self, tokens: usize, why: Error) {
        self.strayed.get_or_insert_with(|| Box::new(Strayed { tokens: 0, why })).tokens += tokens;
    }

    /// Whether the grammar allows the token here. Changes nothing.
    fn allows(&mut self, token: u32) -> Result<bool> {
        self.check()?;
        if self.ended || !has(&self.shared.known, token) {
            return Ok(false);
        }
        if has(&self.shared.ends, token) {
            return no_panic(|| self.parser.is_accepting()).map_err(broken);
        }
        let valid = no_panic(|| self.parser.validate_tokens_raw(&[token])).map_err(broken)?;
        Ok(valid.is_ok_and(|valid| valid == 1))
    }

    /// The error with its cause. The parser has taken a part of the token, so it is brought back to where it stood before.
    fn explained(&mut self, error: Error, token: u32) -> Error {
        if error.code() != Code::InvalidArgument || self.replay(self.tokens.len()).is_err() {
            return error;
        }
        let error = match failure::fits(&self.shared, &mut self.parser, token) {
            true => failure::too_much(&self.shared, &self.tokens, error.message()),
            false => failure::refused(&self.shared, &mut self.parser, &self.tokens, token, None),
        };
        self.failure = Some(error.clone());
        error
    }

    fn consume(&mut self, token: u32) -> Result<()> {
        if has(&self.shared.ends, token) && no_panic(|| self.parser.is_accepting()).map_err(broken)? {
            self.ended = true;
            return Ok(());
        }
        let step = || {
            self.parser.consume_token(token)?;
            self.parser.check_stop()
        };
        let Err(why) = no_panic(step).map_err(broken)? else { return Ok(()) };
        match no_panic(|| self.parser.parser.get_error()).map_err(broken)? {
            Some(limit) => Err(failure::too_much(&self.shared, &self.tokens, &limit.message())),
            None => Err(Error::invalid(compile::reason(&why))),
        }
    }

    /// Takes back the last tokens.
    pub fn rewind(&mut self, tokens: usize) -> Result<()> {
        self.check()?;
        let tokens = self.rewind_strayed(tokens);
        if tokens == 0 {
            return Ok(());
        }
        let Some(left) = self.tokens.len().checked_sub(tokens) else {
            return Err(Error::invalid(format!("{tokens} tokens cannot be taken back: there are {}", self.tokens.len())));
        };
        // The parser has not seen the end.
        let seen = tokens - usize::from(self.ended);
        if seen == 0 || no_panic(|| self.parser.rollback(seen)).is_ok_and(|done| done.is_ok()) {
            self.parser.invalidate_bias_cache();
        } else {
            self.replay(left).inspect_err(|error| self.failure = Some(error.clone()))?;
        }
        self.tokens.truncate(left);
        (self.ended, self.fresh) = (false, false);
        Ok(())
    }

    /// Takes back what the parser has not seen, and says how many are left to take back.
    fn rewind_strayed(&mut self, tokens: usize) -> usize {
        let Some(strayed) = &mut self.strayed else { return tokens };
        let back = tokens.min(strayed.tokens);
        strayed.tokens -= back;
        if strayed.tokens == 0 {
            self.strayed = None;
        }
        tokens - back
    }

    /// Begins anew, alone, and goes as far again: some grammars (those with a stop string within) can't go back.
    fn replay(&mut self, tokens: usize) -> Result<()> {
        self.parser = self.compiled.alone().map_err(broken)?;
        (self.alone, self.ended) = (true, false);
        (0..tokens).try_for_each(|i| {
            self.refuel()?;
            self.consume(self.tokens[i])
        })?;
        self.refuel()
    }

    /// What one step may cost is counted from the mask before it on. Where none is wanted, this computes an empty one.
    fn refuel(&mut self) -> Result<()> {
        let nothing = vocabulary::Nothing(self.shared.factory.tok_env().clone());
        no_panic(|| self.parser.parser.compute_bias(&nothing, b" ")).map(drop).map_err(broken)
    }

    /// Nothing but an end can follow.
    pub fn is_complete(&self) -> bool {
        self.ended || self.parser.stop_reason() == StopReason::NoExtension
    }

    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn stuck(&mut self, why: &impl std::fmt::Display) -> Error {
        if self.parser.stop_reason() == StopReason::NoExtensionBias {
            return failure::stuck(&self.shared, &mut self.parser, &self.tokens);
        }
        failure::too_much(&self.shared, &self.tokens, &compile::reason(why))
    }
}

fn has(set: &[u32], token: u32) -> bool {
    set.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A panic of the crate ends this constraint and no other.
fn broken(panic: String) -> Error {
    Error::internal(format!("a defect met by this request's grammar ended the request: {}", compile::reason(&panic)))
}

#[cfg(test)]
pub(crate) mod tests;
