//! What a host may choose: the engine's options and a request's sampling parameters.

use std::path::PathBuf;

use crate::error::{Error, Result};

/// The instruction path of the CPU kernels. Bits are the same within one path, not across paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust that the compiler vectorizes for the target's baseline.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }
}

/// How numbers are stored; all arithmetic on the CPU is in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// Everything `Engine::create` needs to know. `None` lets the engine choose.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// A model directory as Hugging Face ships it.
    pub model_dir: PathBuf,
    /// Where to run: "cpu".
    pub device: String,
    /// Bytes of the KV pool. None: what `max_seqs` full sequences need, at most 1 GiB.
    pub kv_bytes: Option<u64>,
    /// Tokens per KV block: 8, 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// How K and V are stored: f32 or bf16. None: f32 for models stored in f32, else bf16.
    pub kv_dtype: Option<Dtype>,
    /// Longest sequence, prompt and output together. None: the model's own, or what the pool holds.
    pub max_model_len: Option<usize>,
    /// Most rows (prompt and decode tokens of all sequences) in one step.
    pub max_batch_tokens: usize,
    /// Most sequences running at once.
    pub max_seqs: usize,
    /// Most prompt tokens of one sequence in one step. None: `max_batch_tokens`.
    pub prefill_chunk: Option<usize>,
    /// Threads of the CPU backend, the stepping thread included. None: one per core.
    pub threads: Option<usize>,
    /// The instruction path. None: the widest the machine has.
    pub isa: Option<Isa>,
    /// Seeds the requests that bring no seed of their own.
    pub seed: u64,
    /// Serve token ids only: no tokenizer is read and text calls are refused.
    pub skip_tokenizer: bool,
    /// Outputs that may wait in the engine's own queue before its requests pause.
    pub queue_capacity: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            model_dir: PathBuf::new(),
            device: "cpu".into(),
            kv_bytes: None,
            block_size: 16,
            kv_dtype: None,
            max_model_len: None,
            max_batch_tokens: 512,
            max_seqs: 64,
            prefill_chunk: None,
            threads: None,
            isa: None,
            seed: 0,
            skip_tokenizer: false,
            queue_capacity: Self::DEFAULT_QUEUE_CAPACITY,
        }
    }
}

impl EngineOptions {
    pub const DEFAULT_KV_BYTES: u64 = 1 << 30;
    pub const DEFAULT_QUEUE_CAPACITY: usize = 1 << 16;
    const MAX_BATCH_TOKENS: usize = 1 << 20;
    const MAX_SEQS: usize = 1 << 16;
    const MAX_THREADS: usize = 1024;

    pub fn thread_count(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
    }

    pub fn validate(&self) -> Result<()> {
        if self.device != "cpu" {
            return Err(Error::unsupported(format!("device is {:?}: this build runs on \"cpu\"", self.device)));
        }
        if !(8..=256).contains(&self.block_size) || !self.block_size.is_power_of_two() {
            return Err(Error::invalid(format!("block_size is {}: choose 8, 16, 32, 64, 128 or 256", self.block_size)));
        }
        if self.kv_dtype == Some(Dtype::F16) {
            return Err(Error::unsupported("kv_dtype is f16: the CPU backend stores K and V as f32 or bf16"));
        }
        within("max_batch_tokens", self.max_batch_tokens, Self::MAX_BATCH_TOKENS)?;
        within("max_seqs", self.max_seqs, Self::MAX_SEQS)?;
        if self.max_batch_tokens < self.max_seqs {
            return Err(Error::invalid(format!(
                "max_batch_tokens is {} and max_seqs {}: every running sequence needs a row, so raise the first or lower the second",
                self.max_batch_tokens, self.max_seqs
            )));
        }
        if let Some(chunk) = self.prefill_chunk {
            within("prefill_chunk", chunk, Self::MAX_BATCH_TOKENS)?;
        }
        if let Some(threads) = self.threads {
            within("threads", threads, Self::MAX_THREADS)?;
        }
        Ok(())
    }
}

fn within(name: &str, value: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}: it must be from 1 to {most}")))
}

/// What a request's output must look like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grammar {
    /// A JSON text that this schema (a JSON text itself) describes.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// The whole output matches this regular expression.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's dialect of Lark.
    Lark(String),
}

impl Grammar {
    /// Compiling one that large may take seconds.
    const MOST_BYTES: usize = 256 << 10;

    pub fn validate(&self) -> Result<()> {
        let bytes = match self {
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(texts) if texts.is_empty() => {
                return Err(Error::invalid("the grammar is a choice of 0 texts: give at least one"));
            }
            Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
            Grammar::JsonObject => 0,
        };
        if bytes > Self::MOST_BYTES {
            return Err(Error::invalid(format!("the grammar has {bytes} bytes: the limit is {}, so make it smaller", Self::MOST_BYTES)));
        }
        Ok(())
    }
}

/// How one request chooses its tokens and when it ends.
#[derive(Debug, Clone)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most probable tokens. 0: all.
    pub top_k: u32,
    /// Keep the most probable tokens that together reach this probability. 1: all.
    pub top_p: f32,
    /// Keep tokens at least this share as probable as the most probable one. 0: all.
    pub min_p: f32,
    /// None: derived from the engine's seed and the request's id.
    pub seed: Option<u64>,
    /// None: until the sequence is as long as the engine allows.
    pub max_tokens: Option<usize>,
    /// No end-of-sequence token, stop token or stop string counts before this many tokens.
    pub min_tokens: usize,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
    pub stop: Vec<String>,
    /// Report the log probability of every sampled token.
    pub logprobs: bool,
    /// The output follows this grammar from its first token on.
    pub grammar: Option<Grammar>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            logprobs: false,
            grammar: None,
        }
    }
}

impl SamplingParams {
    const MOST_STOPS: usize = 1024;

    pub fn greedy() -> Self {
        SamplingParams { temperature: 0.0, ..Default::default() }
    }

    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        // Comparisons are written so that NaN fails them.
        if !(self.temperature >= 0.0 && self.temperature <= 1e4) {
            return Err(Error::invalid(format!("temperature is {}: it must be from 0 (greedy) to 10000", self.temperature)));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::invalid(format!("top_p is {}: it must be above 0 and at most 1", self.top_p)));
        }
        if !(self.min_p >= 0.0 && self.min_p <= 1.0) {
            return Err(Error::invalid(format!("min_p is {}: it must be from 0 to 1", self.min_p)));
        }
        if self.max_tokens == Some(0) {
            return Err(Error::invalid("max_tokens is 0: ask for at least one token"));
        }
        if let Some(max) = self.max_tokens
            && self.min_tokens > max
        {
            return Err(Error::invalid(format!(
                "min_tokens is {} and max_tokens is {max}: lower the first or raise the second",
                self.min_tokens
            )));
        }
        let stops = self.stop.len().max(self.stop_token_ids.len());
        if stops > Self::MOST_STOPS {
            return Err(Error::invalid(format!(
                "{stops} stop strings or stop tokens are given, at most {} of each are looked for",
                Self::MOST_STOPS
            )));
        }
        if let Some(&id) = self.stop_token_ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(Error::invalid(format!("stop token id {id} is beyond the vocabulary of {vocab_size} tokens")));
        }
        if self.stop.iter().any(|s| s.is_empty()) {
            return Err(Error::invalid("a stop string is empty: it would match everywhere; leave it out"));
        }
        self.grammar.as_ref().map_or(Ok(()), Grammar::validate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_infinite_and_out_of_range_sampling_values_are_refused() {
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];
        for value in bad {
            assert!(SamplingParams { temperature: value, ..Default::default() }.validate(10).is_err());
            assert!(SamplingParams { top_p: value, ..Default::default() }.validate(10).is_err());
            assert!(SamplingParams { min_p: value, ..Default::default() }.validate(10).is_err());
        }
        assert!(SamplingParams { top_p: 0.0, ..Default::default() }.validate(10).is_err());
        assert!(SamplingParams::default().validate(10).is_ok());
    }

    #[test]
    fn a_stop_token_beyond_the_vocabulary_is_named() {
        let params = SamplingParams { stop_token_ids: vec![3, 10], ..Default::default() };
        assert!(params.validate(10).unwrap_err().message().contains("stop token id 10"));
    }

    #[test]
    fn block_sizes_are_powers_of_two_from_8_to_256() {
        for (size, ok) in [(0, false), (4, false), (8, true), (12, false), (256, true), (512, false)] {
            assert_eq!(EngineOptions { block_size: size, ..Default::default() }.validate().is_ok(), ok, "{size}");
        }
    }
}
