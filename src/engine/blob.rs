//! A sequence as bytes: what it is, its K and V as they are stored, and a checksum over all of it.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::options::SamplingParams;

const MAGIC: &[u8; 8] = b"PLLMSEQ\0";
const VERSION: u32 = 1;
const CHECKSUM: usize = 32;

/// A sequence outside of any engine.
pub struct Blob {
    pub header: Header,
    pub kv: Vec<u8>,
}

#[derive(Default, Serialize, Deserialize)]
pub struct Header {
    /// The model's fingerprint.
    pub model: [u8; 32],
    /// How K and V are stored.
    pub layout: String,
    pub block_size: usize,
    /// The instruction path that computed them; none for a runner without one.
    pub isa: String,
    pub tokens: Vec<u32>,
    /// Tokens whose K and V are in the blob.
    pub computed: usize,
    pub prompt_len: usize,
    pub max_len: usize,
    pub seed: u64,
    /// Mirostat's state.
    pub mu: Option<f32>,
    pub params: SamplingParams,
    pub skip_special: bool,
    /// The log probability of each generated token, in bits, since JSON has no infinity.
    pub history: Vec<u32>,
    /// The same of outputs that are not deltas.
    pub logprobs: Vec<u32>,
    pub top: Vec<(u32, u32)>,
}

impl Blob {
    /// magic, version, length of the header, header, K and V, checksum
    pub fn encode(&self) -> Result<Vec<u8>> {
        let header = serde_json::to_vec(&self.header).map_err(|e| Error::internal(format!("a sequence could not be written: {e}")))?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(MAGIC.len() + 12 + header.len() + self.kv.len() + CHECKSUM)?;
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&self.kv);
        bytes.extend_from_slice(&Sha256::digest(&bytes));
        Ok(bytes)
    }

    pub fn decode(bytes: &[u8]) -> Result<Blob> {
        let damaged = |what: &str| Error::invalid(format!("these {} bytes are no exported sequence, or are damaged: {what}", bytes.len()));
        let (body, checksum) = bytes.split_at_checked(bytes.len().saturating_sub(CHECKSUM)).ok_or_else(|| damaged("they are too few"))?;
        let rest = body.strip_prefix(MAGIC).ok_or_else(|| damaged("they do not begin as one"))?;
        let (version, rest) = rest.split_first_chunk::<4>().ok_or_else(|| damaged("they are too few"))?;
        let version = u32::from_le_bytes(*version);
        if version > VERSION {
            return Err(Error::unsupported(format!(
                "the exported sequence has format {version}, this library reads up to {VERSION}: use a newer one"
            )));
        }
        if Sha256::digest(body)[..] != *checksum {
            return Err(damaged("the checksum differs"));
        }
        let (len, rest) = rest.split_first_chunk::<8>().ok_or_else(|| damaged("they are too few"))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (header, kv) = rest.split_at_checked(len).ok_or_else(|| damaged("the header is cut short"))?;
        let header: Header = serde_json::from_slice(header).map_err(|e| damaged(&format!("the header: {e}")))?;
        header.check().map_err(damaged)?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(kv.len())?;
        copy.extend_from_slice(kv);
        Ok(Blob { header, kv: copy })
    }
}

impl Header {
    /// A checksum can be made for anything.
    fn check(&self) -> std::result::Result<(), &'static str> {
        let generated = self.tokens.len().saturating_sub(self.prompt_len);
        let sound = [
            (!self.tokens.is_empty(), "it has no tokens"),
            ((1..=self.tokens.len()).contains(&self.prompt_len), "its prompt is longer than it is"),
            (self.computed <= self.tokens.len(), "more is computed than there is"),
            (self.history.len() == generated, "its history has another length"),
            (self.mu.is_none_or(f32::is_finite), "it holds what is no number"),
        ];
        sound.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
    }
}
