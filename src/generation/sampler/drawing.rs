//! Sampling on a device, from logits that stay in its memory.

use super::context::Context;
use super::exclude;
use super::outcome::{NoChoice, Sample};
use super::random::{Lane, fraction};
use super::resolved::ResolvedSampling;
use crate::types::batch::device_sampling::{
    DeviceSample, DeviceSampling, LogitEdit, MAX_EDITS, MAX_TOPS, NO_LOGPROBS, NO_MASK, SampleStatus, SamplingRow,
};
use crate::types::options::{Dry, SamplingParams};

/// Plans the sampling of a sequence's next token from a row of `vocab` logits, with `logprobs` top
/// log probabilities. Returns false if the device does not support the parameters.
pub fn plan_draw(
    draws: &mut DeviceSampling,
    row: u32,
    vocab: usize,
    logprobs: Option<u32>,
    rules: &ResolvedSampling,
    context: &Context,
) -> bool {
    let params = &rules.params;
    let (biases, counts) = (&params.logit_bias, if params.counts_tokens() { context.history.counts() } else { &[] });
    let mask = if exclude::applies(rules, context) { vocab.div_ceil(32) } else { 0 };
    let too_many = logprobs.unwrap_or(0) as usize > MAX_TOPS.min(vocab) || biases.len() + counts.len() > MAX_EDITS;
    if !is_simple(params) || too_many {
        return false;
    }
    let (first_edit, first_word) = (draws.edits.len(), draws.masks.len());
    draws.edits.extend(biases.iter().map(|&(token, bias)| LogitEdit { token, value: bias.to_bits(), before: 0.0 }));
    let biased = &mut draws.edits[first_edit..];
    biased.sort_unstable_by_key(|edit| edit.token);
    if biased.windows(2).any(|two| two[0].token == two[1].token) {
        draws.edits.truncate(first_edit); // biases of one token add up in order, but a device applies all edits in parallel
        return false;
    }
    let known = counts.iter().filter(|count| (count.token as usize) < vocab);
    draws.edits.extend(known.map(|count| LogitEdit { token: count.token, value: count.generated, before: 0.0 }));
    draws.masks.resize(first_word + mask, 0);
    if mask > 0 {
        exclude::mask(&mut draws.masks[first_word..], vocab, rules, context);
    }
    let fraction = fraction(context.seed, context.tokens.len() as u64, Lane::Token) << 11;
    draws.rows.push(SamplingRow {
        row,
        logprobs: logprobs.unwrap_or(NO_LOGPROBS),
        top_k: params.top_k,
        temperature: params.temperature,
        min_p: params.min_p,
        top_p: params.top_p,
        repetition_penalty: params.repetition_penalty,
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        fraction: [(fraction >> 32) as u32, fraction as u32],
        edits: first_edit as u32,
        biases: biases.len() as u32,
        counts: (draws.edits.len() - first_edit - biases.len()) as u32,
        mask: if mask > 0 { first_word as u32 } else { NO_MASK },
    });
    true
}

/// Returns true if a device supports these parameters. Truncation is irrelevant for greedy
/// sampling.
fn is_simple(params: &SamplingParams) -> bool {
    let is_plain = params.typical_p >= 1.0 && params.top_n_sigma == 0.0 && params.xtc_probability == 0.0 && params.mirostat.is_none();
    let dry = params.dry.as_ref().is_some_and(Dry::is_on);
    (is_plain || params.temperature == 0.0 && params.mirostat.is_none()) && !dry
}

/// Returns the sampled token.
pub fn chosen(drawn: &DeviceSample) -> Result<Sample, NoChoice> {
    match drawn.outcome {
        SampleStatus::TOKEN => Ok(Sample { token: drawn.token, surprise: None }),
        SampleStatus::EXCLUDED => Err(NoChoice::Excluded),
        _ => Err(NoChoice::NotFinite),
    }
}

/// Returns the log probability of a token with this logit.
pub fn logprob_of(drawn: &DeviceSample, logit: f32) -> f32 {
    (f64::from(logit) - drawn.normalizer()) as f32
}
