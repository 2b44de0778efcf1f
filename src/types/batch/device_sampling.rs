//! Sampling on the device, as flat data. `generation::sampler` writes the parameters and a backend
//! samples. Neither module depends on the other.

use std::ops::Range;

use crate::error::Result;

/// The largest number of top tokens that one sample can report.
pub const MAX_TOPS: usize = 20;
/// The value of `SamplingRow::logprobs` if no log probability is wanted.
pub const NO_LOGPROBS: u32 = u32::MAX;
/// The value of `SamplingRow::mask` if all tokens are allowed.
pub const NO_MASK: u32 = u32::MAX;

/// The sampling parameters of one row, with the meaning that `decode` defines. The layout matches
/// `kernels/draw.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct SamplingRow {
    /// Index of the row in the logits of the step.
    pub row: u32,
    /// Number of top tokens to report with the log probability, or `NO_LOGPROBS`.
    pub logprobs: u32,
    pub top_k: u32,
    pub temperature: f32,
    pub min_p: f32,
    pub top_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// The random number as a fraction of 2^64: the high half, then the low half.
    pub fraction: [u32; 2],
    /// Index of the first edit of this row. `biases` edits with a bias come first, then `counts`
    /// edits with a token count.
    pub edits: u32,
    pub biases: u32,
    pub counts: u32,
    /// Index of the first word of the mask, or `NO_MASK`. Bit i of the mask, lowest first, is set
    /// if token i is allowed.
    pub mask: u32,
}

/// A change of the logit of one token.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct LogitEdit {
    pub token: u32,
    /// The bits of an f32 bias, or the number of times that the token was generated.
    pub value: u32,
    /// Space in which the backend saves the original logit.
    pub before: f32,
}

/// The capacities of `DeviceSampling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSamplingLimits {
    pub max_rows: usize,
    pub edits: usize,
    /// Size of all masks in words of 32 bits.
    pub mask: usize,
}

/// The largest number of edits of one sample: a few hundred biases, or the penalties of some pages
/// of text. The limit is per sample. With a shared limit, the other sequences of the step would
/// decide whether a token is sampled on the device.
pub const MAX_EDITS: usize = 4096;

impl DeviceSamplingLimits {
    /// Returns the limits for one sample per row, each with a mask.
    pub fn for_rows(rows: usize, vocab: usize) -> DeviceSamplingLimits {
        DeviceSamplingLimits { max_rows: rows, edits: rows * MAX_EDITS, mask: rows * vocab.div_ceil(32) }
    }
}

/// The samples of a step in ascending order of rows, with their edits and masks.
#[derive(Debug, Default)]
pub struct DeviceSampling {
    pub rows: Vec<SamplingRow>,
    pub edits: Vec<LogitEdit>,
    pub masks: Vec<u32>,
}

impl DeviceSampling {
    pub fn new(limits: DeviceSamplingLimits) -> Result<DeviceSampling> {
        let mut draws = DeviceSampling::default();
        draws.rows.try_reserve_exact(limits.max_rows)?;
        draws.edits.try_reserve_exact(limits.edits)?;
        draws.masks.try_reserve_exact(limits.mask)?;
        Ok(draws)
    }

    pub fn clear(&mut self) {
        self.rows.clear();
        self.edits.clear();
        self.masks.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the ranges of the first `rows` rows that are not sampled.
    pub fn other_rows(&self, rows: usize) -> impl Iterator<Item = Range<usize>> {
        let ends = self.rows.iter().map(|draw| draw.row as usize).chain(std::iter::once(rows));
        let starts = std::iter::once(0).chain(self.rows.iter().map(|draw| draw.row as usize + 1));
        starts.zip(ends).map(|(start, end)| start..end).filter(|run| !run.is_empty())
    }
}

/// The result of one sample. The layout matches `kernels/draw.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct DeviceSample {
    pub outcome: SampleStatus,
    pub token: u32,
    /// The logit of the sampled token as the model computed it. Valid if a log probability was
    /// requested. `greatest` is the largest logit of the row.
    pub logit: f32,
    pub greatest: f32,
    /// The sum of e^(logit - greatest) over all tokens, in units of 2^-40. 0 if no log probability
    /// was requested.
    pub powers: u64,
    /// The most probable tokens with their logits, the most probable first.
    pub tops: [TopToken; MAX_TOPS],
}

/// A token with its logit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct TopToken {
    pub token: u32,
    pub logit: f32,
}

/// The status of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct SampleStatus(pub u32);

impl SampleStatus {
    pub const TOKEN: SampleStatus = SampleStatus(0);
    /// The logits hold NaN or infinity.
    pub const NOT_FINITE: SampleStatus = SampleStatus(1);
    /// No token is allowed.
    pub const EXCLUDED: SampleStatus = SampleStatus(2);
}

impl DeviceSample {
    /// Returns the logarithm of the softmax denominator. A logit minus this value is a log
    /// probability.
    pub fn normalizer(&self) -> f64 {
        const UNIT: f64 = 1.0 / (1u64 << 40) as f64;
        f64::from(self.greatest) + libm::log(self.powers as f64 * UNIT)
    }
}

/// The sizes in `kernels/draw.cu`.
const _: () = assert!(size_of::<SamplingRow>() == 60 && size_of::<LogitEdit>() == 12 && size_of::<DeviceSample>() == 24 + 8 * MAX_TOPS);

#[cfg(test)]
mod tests {
    use super::*;

    fn row(row: u32) -> SamplingRow {
        SamplingRow {
            row,
            logprobs: NO_LOGPROBS,
            top_k: 0,
            temperature: 1.0,
            min_p: 0.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            fraction: [0; 2],
            edits: 0,
            biases: 0,
            counts: 0,
            mask: NO_MASK,
        }
    }

    #[test]
    fn other_rows_are_those_that_are_not_sampled() {
        let mut sampling = DeviceSampling::new(DeviceSamplingLimits::for_rows(4, 10)).unwrap();
        let others = |sampling: &DeviceSampling, rows| sampling.other_rows(rows).map(|run| (run.start, run.end)).collect::<Vec<_>>();
        assert_eq!(others(&sampling, 3), [(0, 3)]);
        assert!(others(&sampling, 0).is_empty());
        sampling.rows.extend([0, 1, 4].map(row));
        assert_eq!(others(&sampling, 5), [(2, 4)]);
        assert_eq!(others(&sampling, 7), [(2, 4), (5, 7)]);
    }
}
