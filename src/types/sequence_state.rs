//! The serialized state of a sequence: header, K and V as stored, and a checksum.

use std::borrow::Cow;
use std::io;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::options::SamplingParams;
use super::outputs::Logprobs;
use crate::error::{Error, Result, try_copy};

const MAGIC: &[u8; 8] = b"PLLMSEQ\0";
/// Version of the format. Release 0.3.0 began version 2.
const VERSION: u32 = 2;
const CHECKSUM: usize = 32;

/// The state of a sequence outside of an engine.
pub struct SequenceState<'a> {
    pub header: Header<'a>,
    pub kv: Vec<u8>,
}

/// The header of a sequence state.
#[derive(Default, Serialize, Deserialize)]
pub struct Header<'a> {
    /// Fingerprint of the model.
    pub model: [u8; 32],
    /// Storage layout of K and V.
    pub layout: String,
    pub block_size: usize,
    /// Instruction path that computed K and V. Empty for an executor without one.
    pub isa: String,
    pub tokens: Cow<'a, [u32]>,
    /// Number of tokens whose K and V are included.
    pub computed: usize,
    pub prompt_len: usize,
    pub max_len: usize,
    pub seed: u64,
    /// First position with a Mirostat state, and the states from there to the next position.
    pub mirostat: Option<(usize, Vec<Bits>)>,
    pub params: Cow<'a, SamplingParams>,
    pub skip_special: bool,
    /// Log probability of each generated token.
    pub history: Vec<Bits>,
    pub inserted: Cow<'a, [InsertedRange]>,
    /// Log probabilities that cumulative outputs repeat.
    pub logprobs: SerializedLogprobs,
    pub prompt_logprobs: SerializedLogprobs,
    /// First row of the prompt whose logits are still wanted.
    pub logits_from: Option<usize>,
}

/// A range of generated tokens, counted from the end of the prompt.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct InsertedRange {
    pub from: usize,
    pub to: usize,
    /// Whether the tokens ended the sequence, so that their text is hidden. Otherwise the host
    /// appended them, and stop strings in them are ignored.
    pub hidden: bool,
}

/// The bits of an f32, since JSON has no infinity.
pub type Bits = u32;

/// Log probabilities in serialized form.
#[derive(Default, Serialize, Deserialize)]
pub struct SerializedLogprobs {
    tokens: Vec<Bits>,
    top: Vec<(u32, Bits)>,
}

/// Serializes a state: magic, version, header length, header, K and V, checksum.
pub fn encode(header: &Header, kv: &[u8]) -> Result<Vec<u8>> {
    let mut json = Bytes::default();
    // A failed allocation is the only possible error.
    serde_json::to_writer(&mut json, header).map_err(|_| Error::out_of_memory())?;
    let Bytes(json) = json;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(MAGIC.len() + 12 + json.len() + kv.len() + CHECKSUM)?;
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&json);
    bytes.extend_from_slice(kv);
    bytes.extend_from_slice(&Sha256::digest(&bytes));
    Ok(bytes)
}

impl SequenceState<'_> {
    pub fn decode(bytes: &[u8]) -> Result<SequenceState<'static>> {
        let damaged = |what: &str| {
            Error::invalid(format!(
                "not an exported sequence ({} bytes): {what}; pass the bytes of pllm_output.sequence_state unchanged",
                bytes.len()
            ))
        };
        let (body, checksum) = bytes.split_at(bytes.len().saturating_sub(CHECKSUM));
        let rest = body.strip_prefix(MAGIC).ok_or_else(|| damaged("bad magic"))?;
        let (version, rest) = rest.split_first_chunk::<4>().ok_or_else(|| damaged("too short"))?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            let age = if version < VERSION { "an earlier" } else { "a newer" };
            return Err(Error::unsupported(format!(
                "sequence state of {age} release (format {version}, this library reads {VERSION}); import it with the release that exported it"
            )));
        }
        if Sha256::digest(body)[..] != *checksum {
            return Err(damaged("bad checksum"));
        }
        let (len, rest) = rest.split_first_chunk::<8>().ok_or_else(|| damaged("too short"))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (header, kv) = rest.split_at_checked(len).ok_or_else(|| damaged("the header is truncated"))?;
        let header: Header<'static> = serde_json::from_slice(header).map_err(|e| damaged(&format!("the header: {e}")))?;
        header.check().map_err(damaged)?;
        Ok(SequenceState { header, kv: try_copy(kv)? })
    }
}

impl Header<'_> {
    /// Returns the header with contents of its own.
    pub fn into_owned(self) -> Result<Header<'static>> {
        Ok(Header {
            tokens: Cow::Owned(try_copy(&self.tokens)?),
            params: Cow::Owned(self.params.try_clone()?),
            inserted: Cow::Owned(try_copy(&self.inserted)?),
            model: self.model,
            layout: self.layout,
            block_size: self.block_size,
            isa: self.isa,
            computed: self.computed,
            prompt_len: self.prompt_len,
            max_len: self.max_len,
            seed: self.seed,
            mirostat: self.mirostat,
            skip_special: self.skip_special,
            history: self.history,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            logits_from: self.logits_from,
        })
    }

    /// Checks the invariants of the header. A valid checksum does not exclude invalid contents.
    fn check(&self) -> std::result::Result<(), &'static str> {
        let generated = self.tokens.len().saturating_sub(self.prompt_len);
        let SamplingParams { logprobs, prompt_logprobs, .. } = *self.params;
        let sound = [
            (!self.tokens.is_empty(), "no tokens"),
            ((1..=self.tokens.len()).contains(&self.prompt_len), "prompt_len exceeds the tokens"),
            (self.computed <= self.tokens.len(), "more tokens are computed than exist"),
            (self.history.len() == generated, "the history has another length than the generated tokens"),
            (
                self.logprobs.is_of(logprobs) && self.prompt_logprobs.is_of(prompt_logprobs),
                "log probabilities that its parameters do not request",
            ),
            (self.prompt_logprobs.tokens.len() < self.prompt_len, "more prompt log probabilities than prompt tokens"),
            (self.logits_from.is_none_or(|from| from <= self.tokens.len()), "logits_from exceeds the tokens"),
            (self.mirostat_is_sound(), "the Mirostat states have another length or are not finite"),
        ];
        sound.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
    }
}

impl Header<'_> {
    fn mirostat_is_sound(&self) -> bool {
        let sound = |(first, mus): &(usize, Vec<Bits>)| {
            !mus.is_empty()
                && first.checked_add(mus.len()) == Some(self.tokens.len() + 1)
                && mus.iter().all(|&mu| f32::from_bits(mu).is_finite())
        };
        self.mirostat.is_some() == self.params.mirostat.is_some() && self.mirostat.as_ref().is_none_or(sound)
    }
}

impl SerializedLogprobs {
    pub fn new(logprobs: &Logprobs) -> Result<SerializedLogprobs> {
        let top = try_map(&logprobs.top, |(token, logprob)| (token, logprob.to_bits()))?;
        Ok(SerializedLogprobs { tokens: bits(&logprobs.tokens)?, top })
    }

    pub fn logprobs(&self) -> Result<Logprobs> {
        let top = try_map(&self.top, |(token, bits)| (token, f32::from_bits(bits)))?;
        Ok(Logprobs { tokens: numbers(&self.tokens)?, top })
    }

    /// Returns whether the list has the same number of alternatives for each token, at most as many
    /// as requested, and is empty if nothing was requested.
    fn is_of(&self, requested: Option<u32>) -> bool {
        match (requested, self.tokens.len()) {
            (Some(k), len @ 1..) => self.top.len().is_multiple_of(len) && self.top.len() / len <= k as usize,
            _ => self.tokens.is_empty() && self.top.is_empty(),
        }
    }
}

pub fn bits(numbers: &[f32]) -> Result<Vec<Bits>> {
    try_map(numbers, f32::to_bits)
}

pub fn numbers(bits: &[Bits]) -> Result<Vec<f32>> {
    try_map(bits, f32::from_bits)
}

fn try_map<T: Copy, U>(from: &[T], map: impl Fn(T) -> U) -> Result<Vec<U>> {
    let mut to = Vec::new();
    to.try_reserve_exact(from.len())?;
    to.extend(from.iter().map(|&value| map(value)));
    Ok(to)
}

/// A buffer that reports a failed allocation as an I/O error.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl io::Write for Bytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_reserve(bytes.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
