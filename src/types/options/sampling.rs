//! The sampling parameters of a request. `generation::sampler` cites their definitions.

use serde::{Deserialize, Serialize};

use super::Grammar;
use crate::error::{Error, Result, try_copy, try_texts};

/// The parameters of token selection, of the reports and of the end of a request. By default all
/// filters, penalties and reports are off.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Sampling temperature. 0 selects greedy decoding and ignores the filters below.
    pub temperature: f32,
    /// Whether parameters that have their default take the values of the model's
    /// generation_config.json. The engine applies them when the request is added.
    #[serde(skip)]
    pub model_defaults: bool,
    /// Number of most probable tokens to keep. 0 keeps all.
    pub top_k: u32,
    /// Keeps the most probable tokens whose probabilities add up to this value. 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the largest probability. 0 keeps all.
    pub min_p: f32,
    /// Keeps the tokens with the most typical surprise whose probabilities add up to this value. 1
    /// keeps all.
    pub typical_p: f32,
    /// Keeps tokens whose logit is within this number of standard deviations of the largest. 0
    /// keeps all.
    pub top_n_sigma: f32,
    /// Probability with which XTC removes the most probable tokens. 0 disables XTC.
    pub xtc_probability: f32,
    /// Probability from which XTC counts a token as a top choice, 0 to 0.5.
    pub xtc_threshold: f32,
    /// Mirostat, which controls the surprise of the text instead of the filters above.
    pub mirostat: Option<Mirostat>,
    /// Value subtracted from the logit of every generated token.
    pub presence_penalty: f32,
    /// Value subtracted from the logit of a token for each time that it was generated.
    pub frequency_penalty: f32,
    /// Divisor of the positive logits of all tokens of prompt and output. Negative logits are
    /// multiplied. 1 disables it.
    pub repetition_penalty: f32,
    /// Length of token runs that must not repeat, including those of the prompt. 0 disables it.
    pub no_repeat_ngram_size: u32,
    /// DRY, a penalty for tokens that extend a repetition.
    pub dry: Option<Dry>,
    /// Values added to the logits of these tokens. If a token occurs twice, both values apply.
    pub logit_bias: Vec<(u32, f32)>,
    /// Texts that the output must not contain.
    pub bad_words: Vec<String>,
    /// Sequences of tokens that the output must not contain.
    pub bad_words_ids: Vec<Vec<u32>>,
    /// The only tokens that may be sampled. Empty allows all.
    pub allowed_token_ids: Vec<u32>,
    /// Seed. `None` derives it from the seed of the engine and the request id.
    pub seed: Option<u64>,
    /// Maximum number of output tokens. 0 computes the prompt only. `None` is limited by
    /// `max_model_len` only.
    pub max_tokens: Option<usize>,
    /// Number of tokens before which end-of-sequence tokens, stop tokens and stop strings are
    /// ignored.
    pub min_tokens: usize,
    /// Whether to continue after end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Whether the output contains the stop string, or the text of the stop token.
    pub include_stop: bool,
    /// Number of most probable tokens to report beside the log probability of each output token.
    /// `None` reports nothing.
    pub logprobs: Option<u32>,
    /// As `logprobs`, for all tokens of the prompt except the first.
    pub prompt_logprobs: Option<u32>,
    /// First position of the prompt whose log probability is reported. Earlier tokens can come from
    /// the prefix cache.
    #[serde(default)]
    pub prompt_logprobs_start: usize,
    /// Whether the output begins with the prompt.
    pub echo: bool,
    /// Whether each step that computes a part of the prompt, but not its end, has an output.
    #[serde(default)]
    pub prefill_progress: bool,
    /// Contents of each output.
    pub output: OutputKind,
    /// Grammar that the output matches from its first token on.
    pub grammar: Option<Grammar>,
}

/// The contents of each output of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum OutputKind {
    /// The new tokens and text.
    #[default]
    Delta,
    /// All tokens and text so far.
    Cumulative,
    /// All tokens and text, in one output at the end.
    Final,
}

/// Don't Repeat Yourself: a token that would extend a repetition of `length` tokens loses
/// `multiplier * base ^ (length - allowed_length)` if `length >= allowed_length`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Dry {
    /// Factor of the penalty. 0 disables DRY.
    pub multiplier: f32,
    /// Base of the exponential growth with the length of the repetition.
    pub base: f32,
    /// Repetitions shorter than this have no penalty.
    pub allowed_length: u32,
    /// Number of last tokens in which repetitions are searched. `None` searches all.
    pub penalty_last_n: Option<usize>,
    /// Texts that end a repetition. `None` selects `DEFAULT_BREAKERS`, or no text without a
    /// tokenizer.
    pub sequence_breakers: Option<Vec<String>>,
}

impl Default for Dry {
    /// Returns the values that the author of DRY recommends.
    fn default() -> Self {
        Dry { multiplier: 0.8, base: 1.75, allowed_length: 2, penalty_last_n: None, sequence_breakers: None }
    }
}

/// Mirostat 2.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mirostat {
    /// Target surprise in bits per token.
    pub tau: f32,
    /// Learning rate of the correction.
    pub eta: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            model_defaults: false,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            mirostat: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            dry: None,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            bad_words_ids: Vec::new(),
            allowed_token_ids: Vec::new(),
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            include_stop: false,
            logprobs: None,
            prompt_logprobs: None,
            prompt_logprobs_start: 0,
            echo: false,
            prefill_progress: false,
            output: OutputKind::Delta,
            grammar: None,
        }
    }
}

impl SamplingParams {
    /// Copies the parameters. Fails if the system has no memory.
    pub fn try_clone(&self) -> Result<SamplingParams> {
        let mut bad_words_ids = Vec::new();
        bad_words_ids.try_reserve_exact(self.bad_words_ids.len())?;
        for word in &self.bad_words_ids {
            bad_words_ids.push(try_copy(word)?);
        }
        let dry = |dry: &Dry| {
            let sequence_breakers = dry.sequence_breakers.as_deref().map(try_texts).transpose()?;
            Ok::<_, Error>(Dry { sequence_breakers, ..*dry })
        };
        Ok(SamplingParams {
            dry: self.dry.as_ref().map(dry).transpose()?,
            logit_bias: try_copy(&self.logit_bias)?,
            bad_words: try_texts(&self.bad_words)?,
            bad_words_ids,
            allowed_token_ids: try_copy(&self.allowed_token_ids)?,
            stop_token_ids: try_copy(&self.stop_token_ids)?,
            stop: try_texts(&self.stop)?,
            grammar: self.grammar.as_ref().map(Grammar::try_clone).transpose()?,
            ..*self
        })
    }

    /// Returns the number of alternatives for each token of an echoed prompt, if the echo has log
    /// probabilities.
    pub fn echoed_logprobs(&self) -> Option<u32> {
        self.logprobs.filter(|_| self.echo)
    }

    /// Returns the number of alternatives for each token of the prompt, if their log probabilities
    /// are computed.
    pub fn prompt_alternatives(&self) -> Option<u32> {
        self.prompt_logprobs.max(self.echoed_logprobs())
    }

    /// Returns the first position of the prompt that has a log probability to report. The first
    /// token has none.
    pub fn first_scored(&self) -> usize {
        self.prompt_logprobs_start.max(1)
    }

    /// Returns whether the prompt is computed and no token is generated.
    pub fn is_prompt_only(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// The maximum number of reported alternatives per token.
    pub const MAX_LOGPROBS: u32 = 128;
    const MAX_TEMPERATURE: f32 = 1e4;
    /// The maximum number of stop strings, stop tokens or bad words.
    const MAX_STOPS: usize = 1024;
    /// The maximum size of all stop strings in bytes. Their automaton takes 24 times as much
    /// memory.
    const MAX_STOP_BYTES: usize = 16 << 10;
    /// The maximum size of all bad words in bytes. Each is tokenized in four ways.
    const MAX_BAD_WORD_BYTES: usize = 64 << 10;
    /// The maximum length in tokens of a bad word, or of a run that must not repeat.
    pub const MAX_NGRAM: usize = 256;

    /// Returns the default parameters with greedy decoding.
    pub fn greedy() -> Self {
        SamplingParams { temperature: 0.0, ..Default::default() }
    }

    /// Checks the values of the parameters for a vocabulary of this size.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        self.validate_draw()?;
        self.validate_penalties()?;
        self.validate_tokens(vocab_size)?;
        self.validate_end(vocab_size)?;
        at_most("logprobs", self.logprobs, Self::MAX_LOGPROBS)?;
        at_most("prompt_logprobs", self.prompt_logprobs, Self::MAX_LOGPROBS)?;
        match self.prompt_alternatives() {
            None if self.prompt_logprobs_start > 0 => Err(Error::invalid(format!(
                "prompt_logprobs_start is {} and no log probabilities of the prompt are requested; request them or set it to 0",
                self.prompt_logprobs_start
            ))),
            _ => Ok(()),
        }
    }

    /// Returns whether a parameter depends on how often a token has occurred.
    pub fn counts_tokens(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    fn validate_draw(&self) -> Result<()> {
        // NaN fails these comparisons.
        if !(self.temperature >= 0.0 && self.temperature <= Self::MAX_TEMPERATURE) {
            return Err(Error::invalid(format!("temperature is {}; must be 0 (greedy) to 10000", self.temperature)));
        }
        for (name, p) in [("top_p", self.top_p), ("typical_p", self.typical_p)] {
            if !(p > 0.0 && p <= 1.0) {
                return Err(Error::invalid(format!("{name} is {p}; must be above 0 and at most 1 (all tokens)")));
            }
        }
        between("min_p", self.min_p, 0.0, 1.0)?;
        between("top_n_sigma", self.top_n_sigma, 0.0, 100.0)?;
        between("xtc_probability", self.xtc_probability, 0.0, 1.0)?;
        if !(self.xtc_threshold >= 0.0 && self.xtc_threshold <= 0.5) {
            return Err(Error::invalid(format!(
                "xtc_threshold is {}; must be 0 to 0.5, since only one token can be more probable than 0.5",
                self.xtc_threshold
            )));
        }
        self.mirostat.map_or(Ok(()), |mirostat| self.validate_mirostat(mirostat))
    }

    fn validate_mirostat(&self, mirostat: Mirostat) -> Result<()> {
        above_zero("mirostat_tau", mirostat.tau, 100.0)?;
        above_zero("mirostat_eta", mirostat.eta, 1.0)?;
        let replaced = [
            ("temperature", self.temperature, self.temperature == 0.0, "raise it"),
            ("top_k", self.top_k as f32, self.top_k != 0, "set it to 0"),
            ("top_p", self.top_p, self.top_p != 1.0, "set it to 1"),
            ("min_p", self.min_p, self.min_p != 0.0, "set it to 0"),
            ("typical_p", self.typical_p, self.typical_p != 1.0, "set it to 1"),
            ("top_n_sigma", self.top_n_sigma, self.top_n_sigma != 0.0, "set it to 0"),
            ("xtc_probability", self.xtc_probability, self.xtc_probability != 0.0, "set it to 0"),
        ];
        match replaced.iter().find(|(_, _, contradicts, _)| *contradicts) {
            None => Ok(()),
            Some((name, value, _, remedy)) => {
                Err(Error::invalid(format!("{name} is {value} and mirostat_tau is set, which replaces it; {remedy} or unset mirostat_tau")))
            }
        }
    }

    fn validate_penalties(&self) -> Result<()> {
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        between("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        if self.no_repeat_ngram_size as usize > Self::MAX_NGRAM {
            return Err(Error::invalid(format!(
                "no_repeat_ngram_size is {}; must be 0 (off) to {}",
                self.no_repeat_ngram_size,
                Self::MAX_NGRAM
            )));
        }
        self.dry.as_ref().map_or(Ok(()), Dry::validate)
    }

    fn validate_tokens(&self, vocab_size: usize) -> Result<()> {
        for (name, count) in [("logit_bias", self.logit_bias.len()), ("allowed_token_ids", self.allowed_token_ids.len())] {
            if count > vocab_size {
                return Err(Error::invalid(format!(
                    "{name} has more tokens than the vocabulary ({count}, {vocab_size}); list each token once"
                )));
            }
        }
        for &(token, bias) in &self.logit_bias {
            between(&format!("logit_bias of token {token}"), bias, -100.0, 100.0)?;
        }
        in_vocabulary("logit_bias token id", self.logit_bias.iter().map(|(token, _)| token), vocab_size)?;
        in_vocabulary("allowed token id", &self.allowed_token_ids, vocab_size)?;
        in_vocabulary("bad_words_ids token id", self.bad_words_ids.iter().flatten(), vocab_size)?;
        for (name, count) in [("bad_words", self.bad_words.len()), ("bad_words_ids", self.bad_words_ids.len())] {
            if count > Self::MAX_STOPS {
                return Err(Error::invalid(format!("{name} has too many entries ({count}, at most {}); remove some", Self::MAX_STOPS)));
            }
        }
        within_bytes("bad_words", &self.bad_words, Self::MAX_BAD_WORD_BYTES)?;
        if self.bad_words.iter().any(String::is_empty) {
            return Err(Error::invalid("an entry of bad_words is empty; remove it"));
        }
        if self.bad_words_ids.iter().any(Vec::is_empty) {
            return Err(Error::invalid("an entry of bad_words_ids is empty; remove it"));
        }
        match self.bad_words_ids.iter().map(Vec::len).find(|&len| len > Self::MAX_NGRAM) {
            Some(len) => Err(Error::invalid(format!(
                "an entry of bad_words_ids is too long ({len} tokens, at most {}); shorten it",
                Self::MAX_NGRAM
            ))),
            None => Ok(()),
        }
    }

    fn validate_end(&self, vocab_size: usize) -> Result<()> {
        if let Some(max) = self.max_tokens
            && self.min_tokens > max
        {
            return Err(Error::invalid(format!(
                "min_tokens is {} and max_tokens is {max}; lower min_tokens or raise max_tokens",
                self.min_tokens
            )));
        }
        let stops = self.stop.len().max(self.stop_token_ids.len());
        if stops > Self::MAX_STOPS {
            return Err(Error::invalid(format!(
                "too many stop strings or stop tokens ({stops}, at most {} of each); remove some",
                Self::MAX_STOPS
            )));
        }
        within_bytes("stop", &self.stop, Self::MAX_STOP_BYTES)?;
        in_vocabulary("stop token id", &self.stop_token_ids, vocab_size)?;
        if self.stop.iter().any(|s| s.is_empty()) {
            return Err(Error::invalid("a stop string is empty and would match everywhere; remove it"));
        }
        self.grammar.as_ref().map_or(Ok(()), Grammar::validate)
    }
}

impl Dry {
    /// Default texts that end a repetition.
    pub const DEFAULT_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
    const MAX_BREAKERS: usize = 64;
    /// The maximum size of one breaker in bytes.
    const MAX_BREAKER_BYTES: usize = 128;

    /// Returns whether DRY has an effect.
    pub fn is_on(&self) -> bool {
        self.multiplier != 0.0
    }

    fn validate(&self) -> Result<()> {
        between("multiplier of pllm_dry", self.multiplier, 0.0, 100.0)?;
        between("base of pllm_dry", self.base, 1.0, 100.0)?;
        if self.penalty_last_n == Some(0) {
            return Err(Error::invalid("penalty_last_n of pllm_dry is 0; must be at least 1"));
        }
        let breakers = self.sequence_breakers.as_deref().unwrap_or_default();
        if breakers.len() > Self::MAX_BREAKERS {
            return Err(Error::invalid(format!(
                "too many sequence_breakers of pllm_dry ({}, at most {}); remove some",
                breakers.len(),
                Self::MAX_BREAKERS
            )));
        }
        if breakers.iter().any(|breaker| breaker.is_empty()) {
            return Err(Error::invalid("a sequence breaker of pllm_dry is empty; remove it"));
        }
        match breakers.iter().map(String::len).find(|&len| len > Self::MAX_BREAKER_BYTES) {
            Some(len) => Err(Error::invalid(format!(
                "an entry of sequence_breakers of pllm_dry is too long ({len} bytes, at most {}); shorten it",
                Self::MAX_BREAKER_BYTES
            ))),
            None => Ok(()),
        }
    }
}

fn within_bytes(name: &str, texts: &[String], max: usize) -> Result<()> {
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes <= max {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is too large ({bytes} bytes in all, at most {max}); remove or shorten entries")))
}

fn between(name: &str, value: f32, low: f32, high: f32) -> Result<()> {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}; must be {low} to {high}")))
}

fn above_zero(name: &str, value: f32, high: f32) -> Result<()> {
    if value > 0.0 && value <= high {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}; must be above 0 and at most {high}")))
}

fn at_most(name: &str, value: Option<u32>, max: u32) -> Result<()> {
    match value {
        Some(value) if value > max => Err(Error::invalid(format!("{name} is {value}; must be at most {max}"))),
        _ => Ok(()),
    }
}

fn in_vocabulary<'a>(name: &str, tokens: impl IntoIterator<Item = &'a u32>, vocab_size: usize) -> Result<()> {
    match tokens.into_iter().find(|&&token| token as usize >= vocab_size) {
        Some(token) => Err(Error::invalid(format!("{name} {token} is beyond the vocabulary of {vocab_size} tokens; use a smaller id"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 10;

    fn refusal_message(change: impl FnOnce(&mut SamplingParams)) -> String {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate(VOCAB).expect_err("the parameters must be refused").message().to_string()
    }

    fn assert_accepted(change: impl FnOnce(&mut SamplingParams)) {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate(VOCAB).unwrap();
    }

    #[test]
    fn nan_infinite_and_out_of_range_sampling_values_are_refused() {
        type Set = fn(&mut SamplingParams, f32);
        let numbers: [(&str, Set); 16] = [
            ("temperature", |p, x| p.temperature = x),
            ("top_p", |p, x| p.top_p = x),
            ("min_p", |p, x| p.min_p = x),
            ("typical_p", |p, x| p.typical_p = x),
            ("top_n_sigma", |p, x| p.top_n_sigma = x),
            ("xtc_probability", |p, x| p.xtc_probability = x),
            ("xtc_threshold", |p, x| p.xtc_threshold = x),
            ("repetition_penalty", |p, x| p.repetition_penalty = x),
            ("presence_penalty", |p, x| p.presence_penalty = x * 3.0),
            ("frequency_penalty", |p, x| p.frequency_penalty = x * 3.0),
            ("logit_bias of token 3", |p, x| p.logit_bias = vec![(3, x * 101.0)]),
            ("multiplier of pllm_dry", |p, x| p.dry = Some(Dry { multiplier: x, ..Dry::default() })),
            ("base of pllm_dry", |p, x| p.dry = Some(Dry { base: x, ..Dry::default() })),
            ("mirostat_tau", |p, x| p.mirostat = Some(Mirostat { tau: x, eta: 0.1 })),
            ("mirostat_eta", |p, x| p.mirostat = Some(Mirostat { tau: 5.0, eta: x })),
            ("temperature", |p, x| p.temperature = x.abs() * 1e5),
        ];
        for (name, set) in numbers {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0] {
                let message = refusal_message(|params| set(params, value));
                assert!(message.starts_with(&format!("{name} is ")), "{value}: {message}");
            }
        }
        refusal_message(|params| params.top_p = 0.0);
        refusal_message(|params| params.xtc_threshold = 0.51);
        refusal_message(|params| params.repetition_penalty = 0.0);
        SamplingParams::default().validate(VOCAB).unwrap();
        SamplingParams::greedy().validate(VOCAB).unwrap();
    }

    #[test]
    fn the_limits_of_every_range_are_accepted() {
        assert_accepted(|p| (p.min_p, p.xtc_probability, p.xtc_threshold, p.top_n_sigma) = (1.0, 1.0, 0.5, 100.0));
        assert_accepted(|p| (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) = (-2.0, 2.0, 0.01));
        assert_accepted(|p| (p.logprobs, p.prompt_logprobs) = (Some(0), Some(SamplingParams::MAX_LOGPROBS)));
        assert_accepted(|p| {
            p.dry = Some(Dry { multiplier: 0.0, base: 1.0, allowed_length: 0, penalty_last_n: Some(1), sequence_breakers: Some(vec![]) })
        });
        assert_accepted(|p| p.mirostat = Some(Mirostat { tau: 100.0, eta: 1.0 }));
        assert_accepted(|p| p.logit_bias = vec![(9, -100.0), (9, 100.0)]);
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_refused_with_its_id() {
        assert!(refusal_message(|p| p.stop_token_ids = vec![3, 10]).contains("stop token id 10"));
        assert!(refusal_message(|p| p.allowed_token_ids = vec![3, 11]).contains("allowed token id 11"));
        assert!(refusal_message(|p| p.logit_bias = vec![(12, 1.0)]).contains("token id 12"));
        assert!(refusal_message(|p| p.bad_words_ids = vec![vec![1], vec![2, 13]]).contains("token id 13"));
    }

    #[test]
    fn mirostat_is_refused_with_the_filters_that_it_replaces() {
        type Set = fn(&mut SamplingParams);
        let replaced: [(&str, Set); 7] = [
            ("temperature is 0", |p| p.temperature = 0.0),
            ("top_k is 40", |p| p.top_k = 40),
            ("top_p is 0.9", |p| p.top_p = 0.9),
            ("min_p is 0.1", |p| p.min_p = 0.1),
            ("typical_p is 0.5", |p| p.typical_p = 0.5),
            ("top_n_sigma is 2", |p| p.top_n_sigma = 2.0),
            ("xtc_probability is 0.5", |p| p.xtc_probability = 0.5),
        ];
        for (name, set) in replaced {
            let message = refusal_message(|params| {
                params.mirostat = Some(Mirostat { tau: 5.0, eta: 0.1 });
                set(params);
            });
            assert!(message.starts_with(name), "{message}");
            assert_accepted(set);
        }
    }

    #[test]
    fn empty_and_oversized_parameters_are_refused() {
        assert!(refusal_message(|p| p.logprobs = Some(129)).contains("must be at most 128"));
        assert!(refusal_message(|p| p.prompt_logprobs = Some(u32::MAX)).contains("prompt_logprobs"));
        assert!(refusal_message(|p| p.no_repeat_ngram_size = 257).contains("257"));
        assert!(refusal_message(|p| p.bad_words = vec![String::new()]).contains("of bad_words is empty"));
        assert!(refusal_message(|p| p.bad_words_ids = vec![vec![]]).contains("of bad_words_ids is empty"));
        assert!(refusal_message(|p| p.bad_words_ids = vec![vec![1]; 1025]).contains("bad_words_ids has too many entries (1025"));
        assert!(refusal_message(|p| p.bad_words_ids = vec![vec![1; 257]]).contains("257"));
        assert!(refusal_message(|p| p.allowed_token_ids = vec![1; 11]).contains("11"));
        assert!(refusal_message(|p| p.logit_bias = vec![(1, 0.0); 11]).contains("11"));
        assert!(refusal_message(|p| p.dry = Some(Dry { penalty_last_n: Some(0), ..Dry::default() })).contains("penalty_last_n"));
        assert!(refusal_message(|p| p.dry = Some(Dry { sequence_breakers: Some(vec!["".into()]), ..Dry::default() })).contains("empty"));
        assert!(refusal_message(|p| p.dry = Some(Dry { sequence_breakers: Some(vec!["x".into(); 65]), ..Dry::default() })).contains("65"));
    }

    #[test]
    fn each_limit_of_size_is_accepted_and_one_more_is_refused_with_both() {
        type Set = fn(&mut SamplingParams, usize);
        let limits: [(&str, usize, Set); 9] = [
            ("stop is too large", SamplingParams::MAX_STOP_BYTES, |p, n| p.stop = vec!["s".repeat(n - 1), "s".into()]),
            ("bad_words is too large", SamplingParams::MAX_BAD_WORD_BYTES, |p, n| p.bad_words = vec!["s".repeat(n - 1), "s".into()]),
            ("too many stop strings", SamplingParams::MAX_STOPS, |p, n| p.stop = vec!["s".into(); n]),
            ("too many stop strings or stop tokens", SamplingParams::MAX_STOPS, |p, n| p.stop_token_ids = vec![1; n]),
            ("bad_words has too many entries", SamplingParams::MAX_STOPS, |p, n| p.bad_words = vec!["s".into(); n]),
            ("bad_words_ids has too many entries", SamplingParams::MAX_STOPS, |p, n| p.bad_words_ids = vec![vec![1]; n]),
            ("an entry of bad_words_ids is too long", SamplingParams::MAX_NGRAM, |p, n| p.bad_words_ids = vec![vec![1; n]]),
            ("too many sequence_breakers", Dry::MAX_BREAKERS, |p, n| p.dry = Some(breaking(vec!["s".into(); n]))),
            ("an entry of sequence_breakers", Dry::MAX_BREAKER_BYTES, |p, n| p.dry = Some(breaking(vec!["s".repeat(n)]))),
        ];
        for (problem, limit, set) in limits {
            assert_accepted(|params| set(params, limit));
            let message = refusal_message(|params| set(params, limit + 1));
            let values = [(limit + 1).to_string(), limit.to_string()];
            assert!(message.starts_with(problem) && values.iter().all(|value| message.contains(value)), "{message}");
        }
    }

    fn breaking(texts: Vec<String>) -> Dry {
        Dry { sequence_breakers: Some(texts), ..Dry::default() }
    }
}
