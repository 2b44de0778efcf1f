use std::ffi::c_char;
use std::mem::offset_of;
use std::ptr::null;

use super::convert::{self, PLLM_NUL_TERMINATED, Versioned, known_flags, slice, some, string, strings};
use crate::error::{Error, Result, try_concat, try_copy};
use crate::types::options::{Dry, Grammar, Mirostat, OutputKind, SamplingParams};

/// Use the seed field. Without this flag the seed is derived from the engine's seed and the request
/// id.
pub const PLLM_SAMPLING_SEED: u32 = 1;
/// Do not stop at end-of-sequence tokens.
pub const PLLM_SAMPLING_IGNORE_EOS: u32 = 2;
/// Report the log probability of each generated token, and of the top_logprobs most probable
/// tokens.
pub const PLLM_SAMPLING_LOGPROBS: u32 = 4;
/// Report the log probability of each prompt token except the first, from prompt_logprobs_start on,
/// and of the prompt_top_logprobs most probable tokens. Of several samples, the first reports them.
/// A fork does not report them again.
pub const PLLM_SAMPLING_PROMPT_LOGPROBS: u32 = 8;
/// The output begins with the prompt. With PLLM_SAMPLING_LOGPROBS, the tokens of the prompt have
/// log probabilities, too: the prompt is computed from prompt_logprobs_start on even if the prefix
/// cache has it, and its output follows then.
pub const PLLM_SAMPLING_ECHO: u32 = 16;
/// The stop string, or the text of the token that ends the sequence, stays in the text.
pub const PLLM_SAMPLING_INCLUDE_STOP: u32 = 32;
/// Parameters that are left at their default take the values of the model's
/// generation_config.json, if it has them: temperature, top_k, top_p, min_p, typical_p,
/// repetition_penalty and no_repeat_ngram_size. "do_sample": false selects temperature 0. Has no
/// effect on beam search.
pub const PLLM_SAMPLING_MODEL_DEFAULTS: u32 = 64;

/// Until the first token is generated or appended, each step that computes a part of the prompt, but
/// not its end, has an output with computed_tokens and without tokens or text, whatever output_kind
/// is. The other tokens of the prompt follow in later steps, because it is longer than
/// prefill_chunk or max_batch_tokens, or because the step was full. These outputs count for the
/// capacity of the queue. After a preemption the numbers can be smaller again. Of several samples
/// or beams, the first sequence reports them.
pub const PLLM_SAMPLING_PREFILL_PROGRESS: u32 = 128;

/// Value of max_tokens: as many tokens as max_model_len allows.
pub const PLLM_UNLIMITED_TOKENS: u32 = u32::MAX;

/// Each output has the new tokens and the new text only.
pub const PLLM_OUTPUT_DELTA: u32 = 0;
/// Each output has all tokens and the whole text so far.
pub const PLLM_OUTPUT_CUMULATIVE: u32 = 1;
/// One output at the end of the sequence has all tokens and the whole text.
pub const PLLM_OUTPUT_FINAL: u32 = 2;

/// No constraint.
pub const PLLM_GRAMMAR_NONE: u32 = 0;
/// A JSON text that the schema in grammar (itself a JSON text) describes. Properties come in the
/// order of "properties".
/// - "pattern" and the names of "patternProperties" are regular expressions of ECMA-262, in Unicode
///   mode if they are valid there, otherwise by annex B. Lookarounds, backreferences and word
///   boundaries are errors.
/// - A "format" that cannot be generated is an annotation.
/// - "propertyNames" has one of "enum", "const", "pattern" and the lengths, or a "$ref" to such a
///   schema, in a schema without "properties" and "patternProperties". Otherwise it is an error.
/// - Keywords that cannot be generated are errors: among others "uniqueItems", "contains", "not",
///   "if" and "dependentRequired".
/// - A grammar has at most 64 members of "patternProperties". An object has at most about 500
///   optional properties, or 3,000 required ones. Objects with more properties of both kinds
///   together can be refused.
///
/// The object "x-guidance" at the root of the schema has these options:
/// - "strict_formats" (default false): if true, the formats of JSON Schema that cannot be generated
///   are errors: idn-email, idn-hostname, iri, iri-reference, json-pointer, regex,
///   relative-json-pointer, uri-reference and uri-template.
/// - "lenient" (default false): if true, keywords that cannot be generated are ignored, such as
///   "uniqueItems" in the schema of a set. The output may then violate them: check it.
/// - "coerce_one_of" (default false): if true, "oneOf" means "anyOf" if its schemas may overlap. If
///   false, such a "oneOf" is an error.
/// - "whitespace_flexible" (default true): if false, there is no white space between the parts of
///   the text.
/// - "whitespace_pattern" (default: one space or tab, or a line break and at most 40 of these): the
///   text between two parts, as a regular expression of Rust.
/// - "item_separator" (default ","): a regular expression of Rust.
/// - "key_separator" (default ":"): a regular expression of Rust.
/// - "json_allowed_escapes" (default "nrbtf\\\"", with "u" if the schema has no names of properties
///   or demands other control characters): the characters that may follow a backslash in strings.
/// - "json_allow_general_unicode_escapes" (default false): if true, strings without a pattern may
///   write any character as \u and digits.
pub const PLLM_GRAMMAR_JSON_SCHEMA: u32 = 1;
/// Any JSON object.
pub const PLLM_GRAMMAR_JSON_OBJECT: u32 = 2;
/// A text that the regular expression in grammar matches as a whole: a pattern of Python's re for
/// str. Lookarounds, backreferences, word boundaries, atomic groups, possessive quantifiers,
/// conditions, \N and the anchors of lines are errors.
pub const PLLM_GRAMMAR_REGEX: u32 = 3;
/// One of the texts in choices.
pub const PLLM_GRAMMAR_CHOICE: u32 = 4;
/// A text that the Lark grammar in grammar describes. Its regular expressions are those of Python's
/// re, with \p{Name} for Unicode properties. A schema after %json is read like that of
/// PLLM_GRAMMAR_JSON_SCHEMA, with options of its own.
pub const PLLM_GRAMMAR_LARK: u32 = 5;

/// A value that is added to the logit of a token.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct pllm_logit_bias {
    pub token: u32,
    pub bias: f32,
}

/// A list of token ids.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pllm_token_list {
    pub tokens: *const u32,
    pub tokens_len: u64,
}

/// The DRY penalty: a token that would extend a repetition of length tokens loses multiplier * base
/// ^ (length - allowed_length). Call pllm_dry_init first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_dry {
    /// sizeof(pllm_dry).
    pub struct_size: u64,
    /// Strength of the penalty. Range 0 to 100. Default 0.8. 0 disables it.
    pub multiplier: f32,
    /// Base of the exponential growth. Range 1 to 100. Default 1.75.
    pub base: f32,
    /// Length in tokens of the longest repetition without a penalty. Default 2.
    pub allowed_length: u32,
    /// Number of last tokens that are searched for repetitions. 0 (default): all.
    pub penalty_last_n: u32,
    /// Texts that end a repetition, within a token or across tokens. NULL with a count of 0
    /// (default): newline, colon, quotation mark and asterisk, or none with
    /// PLLM_ENGINE_SKIP_TOKENIZER. A non-NULL pointer with a count of 0: none. At most 64 texts of
    /// at most 128 bytes each.
    pub sequence_breakers: *const *const c_char,
    /// Length of each text in bytes. NULL: the texts are NUL-terminated.
    pub sequence_breaker_lens: *const u64,
    /// Number of texts.
    pub sequence_breaker_count: u64,
}

// SAFETY: repr(C), the 32-bit fields fill whole words, numbers and pointers only.
unsafe impl Versioned for pllm_dry {
    const NAME: &'static str = "pllm_dry";
    const FIRST_SIZE: usize = 48;
    fn defaults() -> Self {
        let dry = Dry::default();
        pllm_dry {
            struct_size: size_of::<Self>() as u64,
            multiplier: dry.multiplier,
            base: dry.base,
            allowed_length: dry.allowed_length,
            penalty_last_n: 0,
            sequence_breakers: null(),
            sequence_breaker_lens: null(),
            sequence_breaker_count: 0,
        }
    }
}

impl pllm_dry {
    /// # Safety
    /// As `convert::read`, and its arrays are readable.
    unsafe fn to_dry(dry: *const Self) -> Result<Dry> {
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(dry) }?;
        let sequence_breakers = match c.sequence_breaker_count {
            0 if c.sequence_breakers.is_null() => None,
            // SAFETY: the caller's contract.
            count => Some(unsafe { strings("a sequence breaker", c.sequence_breakers, c.sequence_breaker_lens, count) }?),
        };
        let penalty_last_n = some(c.penalty_last_n);
        Ok(Dry { multiplier: c.multiplier, base: c.base, allowed_length: c.allowed_length, penalty_last_n, sequence_breakers })
    }
}

/// Writes the defaults into a struct of struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_dry_init(dry: *mut pllm_dry, struct_size: u64) {
    // SAFETY: the caller's contract.
    super::guard_or((), || unsafe { convert::init(dry, struct_size) });
}

/// How a request samples its tokens, what it reports and when it ends. Call pllm_sampling_init
/// first.
///
/// The parameters apply in this order: logit bias; repetition, frequency and presence penalty; DRY;
/// exclusions and the grammar; temperature; top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or
/// mirostat in their place; the draw.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_sampling {
    /// sizeof(pllm_sampling).
    pub struct_size: u64,
    /// Seed, used with PLLM_SAMPLING_SEED. A request with a seed generates the same tokens in any
    /// batch.
    pub seed: u64,
    /// Tokens that end the sequence. They are reported in tokens, but not in the text. At most
    /// 1024.
    pub stop_token_ids: *const u32,
    /// Number of stop tokens.
    pub stop_token_ids_len: u64,
    /// Strings that end the sequence, within a token or across tokens. They do not appear in the
    /// text. At most 1024 strings of 16384 bytes in all.
    pub stop: *const *const c_char,
    /// Length of each string in bytes. NULL: the strings are NUL-terminated.
    pub stop_lens: *const u64,
    /// Number of stop strings.
    pub stop_count: u64,
    /// Temperature. 0 selects greedy sampling. Range 0 to 10,000. Default 1.
    pub temperature: f32,
    /// Keeps the most probable tokens whose probabilities sum to at least this value. Range above
    /// 0 to 1. Default 1: all.
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the largest. Range 0 to 1.
    /// Default 0: all.
    pub min_p: f32,
    /// Keeps the k most probable tokens. Default 0: all.
    pub top_k: u32,
    /// Maximum number of generated tokens. 0: only the prompt is computed and reported; n and
    /// best_of must be 1, without a beam search. PLLM_UNLIMITED_TOKENS (default): up to
    /// max_model_len. 0 is unlimited for programs built with a header without
    /// prompt_logprobs_start.
    pub max_tokens: u32,
    /// Number of tokens before which neither end-of-sequence tokens nor stops end the sequence.
    /// Default 0.
    pub min_tokens: u32,
    /// PLLM_SAMPLING_* flags. Default 0.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Keeps the tokens with the most typical surprise whose probabilities sum to at least this
    /// value. Range above 0 to 1. Default 1: all.
    pub typical_p: f32,
    /// Keeps tokens whose logit is within this many standard deviations of the largest. Range 0 to
    /// 100. Default 0: all.
    pub top_n_sigma: f32,
    /// Probability with which XTC removes the most probable tokens. Range 0 to 1. Default 0: never.
    pub xtc_probability: f32,
    /// Probability from which on a token counts as a top choice for XTC. Range 0 to 0.5. Default
    /// 0.1.
    pub xtc_threshold: f32,
    /// Mirostat 2: target surprise in bits per token. Range 0 to 100. Default 0: off.
    pub mirostat_tau: f32,
    /// Mirostat 2: learning rate. Range above 0 to 1. Default 0.1.
    pub mirostat_eta: f32,
    /// Subtracted from the logit of each token that has been generated. Range -2 to 2. Default 0.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it has been generated. Range -2 to 2.
    /// Default 0.
    pub frequency_penalty: f32,
    /// Divides positive logits, and multiplies negative logits, of all tokens of the prompt and the
    /// output. Range 0.01 to 100. Default 1: off.
    pub repetition_penalty: f32,
    /// No n-gram of this many tokens occurs twice. At most 256. Default 0: off.
    pub no_repeat_ngram_size: u32,
    /// With PLLM_SAMPLING_LOGPROBS: number of most probable tokens reported for each generated
    /// token. At most 128. Default 0.
    pub top_logprobs: u32,
    /// With PLLM_SAMPLING_PROMPT_LOGPROBS: number of most probable tokens reported for each prompt
    /// token. At most 128. Default 0.
    pub prompt_top_logprobs: u32,
    /// Content of the outputs: PLLM_OUTPUT_*. Default PLLM_OUTPUT_DELTA.
    pub output_kind: u32,
    /// Kind of the constraint on the output: PLLM_GRAMMAR_*. Default PLLM_GRAMMAR_NONE.
    pub grammar_kind: u32,
    /// The schema, regular expression or grammar, UTF-8.
    pub grammar: *const c_char,
    /// Length of grammar in bytes, or PLLM_NUL_TERMINATED (default).
    pub grammar_len: u64,
    /// The texts of PLLM_GRAMMAR_CHOICE.
    pub choices: *const *const c_char,
    /// Length of each text in bytes. NULL: the texts are NUL-terminated.
    pub choice_lens: *const u64,
    /// Number of choices.
    pub choice_count: u64,
    /// DRY penalty. NULL (default): off.
    pub dry: *const pllm_dry,
    /// Values that are added to logits, from -100 to 100. NULL (default): none. At most as many as
    /// the vocabulary has tokens.
    pub logit_bias: *const pllm_logit_bias,
    /// Number of entries in logit_bias.
    pub logit_bias_len: u64,
    /// Texts that the output must not contain, as the tokenizer encodes them at the beginning of a
    /// text, after a space and within a word. Other token sequences that spell the same text are
    /// not excluded. At most 1024 texts of 65536 bytes in all.
    pub bad_words: *const *const c_char,
    /// Length of each text in bytes. NULL: the texts are NUL-terminated.
    pub bad_word_lens: *const u64,
    /// Number of bad words.
    pub bad_word_count: u64,
    /// Token sequences that the output must not contain. At most 1024 sequences of at most 256
    /// tokens each.
    pub bad_words_ids: *const pllm_token_list,
    /// Number of token sequences.
    pub bad_words_ids_len: u64,
    /// The only tokens that may be sampled. NULL (default): all. At most as many as the vocabulary
    /// has tokens.
    pub allowed_token_ids: *const u32,
    /// Number of allowed tokens.
    pub allowed_token_ids_len: u64,
    /// Position of the first prompt token whose log probability is reported, if
    /// PLLM_SAMPLING_PROMPT_LOGPROBS or both PLLM_SAMPLING_ECHO and PLLM_SAMPLING_LOGPROBS are set.
    /// Tokens before it can come from the prefix cache. It counts in the truncated prompt, and must
    /// be below its length. Default 0: all except the first token.
    pub prompt_logprobs_start: u64,
}

// SAFETY: repr(C), the 32-bit fields fill whole words, numbers and pointers only.
unsafe impl Versioned for pllm_sampling {
    const NAME: &'static str = "pllm_sampling";
    const FIRST_SIZE: usize = 88;
    fn defaults() -> Self {
        let params = SamplingParams::default();
        pllm_sampling {
            struct_size: size_of::<Self>() as u64,
            seed: 0,
            stop_token_ids: null(),
            stop_token_ids_len: 0,
            stop: null(),
            stop_lens: null(),
            stop_count: 0,
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            top_k: params.top_k,
            max_tokens: PLLM_UNLIMITED_TOKENS,
            min_tokens: 0,
            flags: 0,
            reserved: 0,
            typical_p: params.typical_p,
            top_n_sigma: params.top_n_sigma,
            xtc_probability: params.xtc_probability,
            xtc_threshold: params.xtc_threshold,
            mirostat_tau: 0.0,
            mirostat_eta: 0.1,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            repetition_penalty: params.repetition_penalty,
            no_repeat_ngram_size: params.no_repeat_ngram_size,
            top_logprobs: 0,
            prompt_top_logprobs: 0,
            output_kind: PLLM_OUTPUT_DELTA,
            grammar_kind: PLLM_GRAMMAR_NONE,
            grammar: null(),
            grammar_len: PLLM_NUL_TERMINATED,
            choices: null(),
            choice_lens: null(),
            choice_count: 0,
            dry: null(),
            logit_bias: null(),
            logit_bias_len: 0,
            bad_words: null(),
            bad_word_lens: null(),
            bad_word_count: 0,
            bad_words_ids: null(),
            bad_words_ids_len: 0,
            allowed_token_ids: null(),
            allowed_token_ids_len: 0,
            prompt_logprobs_start: 0,
        }
    }
}

const ALL_FLAGS: u32 = PLLM_SAMPLING_SEED
    | PLLM_SAMPLING_IGNORE_EOS
    | PLLM_SAMPLING_LOGPROBS
    | PLLM_SAMPLING_PROMPT_LOGPROBS
    | PLLM_SAMPLING_ECHO
    | PLLM_SAMPLING_INCLUDE_STOP
    | PLLM_SAMPLING_MODEL_DEFAULTS
    | PLLM_SAMPLING_PREFILL_PROGRESS;

impl pllm_sampling {
    /// Returns the parameters, or the defaults for NULL.
    /// # Safety
    /// As `convert::read`, and its arrays are readable.
    pub(super) unsafe fn to_params(sampling: *const Self) -> Result<SamplingParams> {
        if sampling.is_null() {
            return Ok(SamplingParams::default());
        }
        // SAFETY: the caller's contract.
        let c = unsafe { convert::read(sampling) }?;
        known_flags("sampling flags", c.flags, ALL_FLAGS)?;
        known_flags("reserved", c.reserved, 0)?;
        c.check_flags()?;
        let flag = |flag: u32| c.flags & flag != 0;
        // SAFETY: the caller's contract, for all arrays and strings.
        unsafe {
            Ok(SamplingParams {
                temperature: c.temperature,
                model_defaults: flag(PLLM_SAMPLING_MODEL_DEFAULTS),
                top_k: c.top_k,
                top_p: c.top_p,
                min_p: c.min_p,
                typical_p: c.typical_p,
                top_n_sigma: c.top_n_sigma,
                xtc_probability: c.xtc_probability,
                xtc_threshold: c.xtc_threshold,
                mirostat: (c.mirostat_tau != 0.0).then_some(Mirostat { tau: c.mirostat_tau, eta: c.mirostat_eta }),
                presence_penalty: c.presence_penalty,
                frequency_penalty: c.frequency_penalty,
                repetition_penalty: c.repetition_penalty,
                no_repeat_ngram_size: c.no_repeat_ngram_size,
                dry: if c.dry.is_null() { None } else { Some(pllm_dry::to_dry(c.dry)?) },
                logit_bias: c.logit_bias()?,
                bad_words: strings("a bad word", c.bad_words, c.bad_word_lens, c.bad_word_count)?,
                bad_words_ids: c.bad_words_ids()?,
                allowed_token_ids: try_copy(slice("allowed_token_ids", c.allowed_token_ids, c.allowed_token_ids_len)?)?,
                seed: flag(PLLM_SAMPLING_SEED).then_some(c.seed),
                max_tokens: c.max_tokens(),
                min_tokens: c.min_tokens as usize,
                ignore_eos: flag(PLLM_SAMPLING_IGNORE_EOS),
                stop_token_ids: try_copy(slice("stop_token_ids", c.stop_token_ids, c.stop_token_ids_len)?)?,
                stop: strings("a stop string", c.stop, c.stop_lens, c.stop_count)?,
                include_stop: flag(PLLM_SAMPLING_INCLUDE_STOP),
                logprobs: flag(PLLM_SAMPLING_LOGPROBS).then_some(c.top_logprobs),
                prompt_logprobs: flag(PLLM_SAMPLING_PROMPT_LOGPROBS).then_some(c.prompt_top_logprobs),
                prompt_logprobs_start: usize::try_from(c.prompt_logprobs_start).unwrap_or(usize::MAX),
                echo: flag(PLLM_SAMPLING_ECHO),
                prefill_progress: flag(PLLM_SAMPLING_PREFILL_PROGRESS),
                output: output_kind(c.output_kind)?,
                grammar: c.grammar()?,
            })
        }
    }

    /// `None` if the number of tokens is unlimited.
    fn max_tokens(&self) -> Option<usize> {
        match self.max_tokens {
            PLLM_UNLIMITED_TOKENS => None,
            // In older headers, 0 means unlimited.
            0 if self.struct_size <= offset_of!(Self, prompt_logprobs_start) as u64 => None,
            tokens => Some(tokens as usize),
        }
    }

    /// A number that its flag does not switch on was meant to be.
    fn check_flags(&self) -> Result<()> {
        let numbers = [
            ("seed", self.seed, "PLLM_SAMPLING_SEED", PLLM_SAMPLING_SEED),
            ("top_logprobs", self.top_logprobs as u64, "PLLM_SAMPLING_LOGPROBS", PLLM_SAMPLING_LOGPROBS),
            ("prompt_top_logprobs", self.prompt_top_logprobs as u64, "PLLM_SAMPLING_PROMPT_LOGPROBS", PLLM_SAMPLING_PROMPT_LOGPROBS),
        ];
        match numbers.into_iter().find(|&(_, value, _, flag)| value != 0 && self.flags & flag == 0) {
            Some((name, value, flag, _)) => {
                Err(Error::invalid(format!("{name} is {value} and flags has no {flag}; set the flag or set {name} to 0")))
            }
            None => Ok(()),
        }
    }

    /// # Safety
    /// The array is readable.
    unsafe fn logit_bias(&self) -> Result<Vec<(u32, f32)>> {
        // SAFETY: the caller's contract.
        let biases = unsafe { slice("logit_bias", self.logit_bias, self.logit_bias_len) }?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(biases.len())?;
        copy.extend(biases.iter().map(|bias| (bias.token, bias.bias)));
        Ok(copy)
    }

    /// # Safety
    /// The arrays are readable.
    unsafe fn bad_words_ids(&self) -> Result<Vec<Vec<u32>>> {
        // SAFETY: the caller's contract.
        let lists = unsafe { slice("bad_words_ids", self.bad_words_ids, self.bad_words_ids_len) }?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(lists.len())?;
        for list in lists {
            // SAFETY: the caller's contract.
            copy.push(try_copy(unsafe { slice("bad_words_ids", list.tokens, list.tokens_len) }?)?);
        }
        Ok(copy)
    }

    /// # Safety
    /// The strings are readable.
    unsafe fn grammar(&self) -> Result<Option<Grammar>> {
        // SAFETY: the caller's contract.
        let text = || try_concat(&[unsafe { string("grammar", self.grammar, self.grammar_len) }?]);
        let grammar = match self.grammar_kind {
            PLLM_GRAMMAR_NONE if !self.grammar.is_null() || self.choice_count > 0 => {
                return Err(Error::invalid("grammar or choices is set and grammar_kind is PLLM_GRAMMAR_NONE; set grammar_kind"));
            }
            PLLM_GRAMMAR_NONE => return Ok(None),
            PLLM_GRAMMAR_JSON_SCHEMA => Grammar::JsonSchema(text()?),
            PLLM_GRAMMAR_JSON_OBJECT => Grammar::JsonObject,
            PLLM_GRAMMAR_REGEX => Grammar::Regex(text()?),
            // SAFETY: the caller's contract.
            PLLM_GRAMMAR_CHOICE => Grammar::Choice(unsafe { strings("a choice", self.choices, self.choice_lens, self.choice_count) }?),
            PLLM_GRAMMAR_LARK => Grammar::Lark(text()?),
            other => return Err(Error::invalid(format!("grammar_kind is {other}; must be one of PLLM_GRAMMAR_*"))),
        };
        Ok(Some(grammar))
    }
}

fn output_kind(value: u32) -> Result<OutputKind> {
    match value {
        PLLM_OUTPUT_DELTA => Ok(OutputKind::Delta),
        PLLM_OUTPUT_CUMULATIVE => Ok(OutputKind::Cumulative),
        PLLM_OUTPUT_FINAL => Ok(OutputKind::Final),
        other => Err(Error::invalid(format!("output_kind is {other}; must be one of PLLM_OUTPUT_*"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_breakers_select_the_defaults_and_an_empty_list_selects_none() {
        let read = |sequence_breakers: *const *const c_char, sequence_breaker_count: u64| {
            let dry = pllm_dry { sequence_breakers, sequence_breaker_count, ..pllm_dry::defaults() };
            // SAFETY: the struct and its array of one string outlive the call.
            unsafe { pllm_dry::to_dry(&dry) }.unwrap().sequence_breakers
        };
        let one = [c"x".as_ptr()];
        assert_eq!(read(null(), 0), None);
        assert_eq!(read(one.as_ptr(), 0), Some(vec![]));
        assert_eq!(read(one.as_ptr(), 1), Some(vec!["x".to_string()]));
    }
}
