//! Biases and penalties of single tokens.

use super::history::SamplingHistory;
use crate::types::options::SamplingParams;

/// Adds `change` to a logit. The result stays finite if the logit is; an excluded token stays
/// excluded.
pub fn shift(logit: &mut f32, change: f32) {
    set(logit, *logit + change);
}

fn set(logit: &mut f32, value: f32) {
    if *logit > f32::NEG_INFINITY {
        *logit = value.clamp(f32::MIN, f32::MAX);
    }
}

/// Applies logit bias, as OpenAI's API and (for single tokens) SequenceBiasLogitsProcessor of
/// transformers define it.
pub fn apply_bias(logits: &mut [f32], bias: &[(u32, f32)]) {
    for &(token, bias) in bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            shift(logit, bias);
        }
    }
}

/// Applies the repetition penalty over prompt and output (CTRL, Keskar et al. 2019), then frequency
/// and presence penalty over the output only (OpenAI's API; vLLM).
pub fn apply(logits: &mut [f32], params: &SamplingParams, memory: &SamplingHistory) {
    for count in memory.counts() {
        let Some(logit) = logits.get_mut(count.token as usize) else { continue };
        let penalized = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        set(logit, penalized);
        if count.generated > 0 {
            shift(logit, -(params.frequency_penalty * count.generated as f32 + params.presence_penalty));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::sampler::resolved::ResolvedSampling;

    #[test]
    fn penalties_count_prompt_and_output_as_defined() {
        let params = SamplingParams { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 0.25, ..Default::default() };
        let rules = ResolvedSampling { params, ..ResolvedSampling::default() };
        let history = SamplingHistory::new(&rules, &[0, 1, 2, 2, 2, 1], 2).unwrap(); // 0: prompt; 1: both; 2: output; 3: neither
        let mut logits = [4.0, -4.0, 4.0, 4.0];
        apply(&mut logits, &rules.params, &history);
        assert_eq!(logits, [2.0, -8.75, 0.75, 4.0]);
    }

    #[test]
    fn penalties_neither_exclude_a_token_nor_include_an_excluded_one() {
        let params = SamplingParams { repetition_penalty: 100.0, ..Default::default() };
        let rules = ResolvedSampling { params, ..ResolvedSampling::default() };
        let history = SamplingHistory::new(&rules, &[0, 1, 9], 0).unwrap();
        let mut logits = [f32::MIN, f32::NEG_INFINITY];
        apply(&mut logits, &rules.params, &history);
        apply_bias(&mut logits, &[(0, -100.0), (1, 100.0), (8, 1.0)]);
        assert_eq!(logits, [f32::MIN, f32::NEG_INFINITY]);
    }
}
