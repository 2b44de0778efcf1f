//! Defaults of sampling parameters that come with a model.

use super::SamplingParams;

/// The sampling parameters that generation_config.json recommends for a model, with the names of
/// `SamplingParams`.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ModelDefaults {
    /// 0 if the file has `"do_sample": false`.
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub typical_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub no_repeat_ngram_size: Option<u32>,
}

impl ModelDefaults {
    /// Sets the parameters that have their default.
    pub fn apply(&self, params: &mut SamplingParams) {
        fn replace<T: PartialEq>(param: &mut T, default: T, value: Option<T>) {
            if *param == default {
                *param = value.unwrap_or(default);
            }
        }
        let defaults = SamplingParams::default();
        replace(&mut params.temperature, defaults.temperature, self.temperature);
        replace(&mut params.top_k, defaults.top_k, self.top_k);
        replace(&mut params.top_p, defaults.top_p, self.top_p);
        replace(&mut params.min_p, defaults.min_p, self.min_p);
        replace(&mut params.typical_p, defaults.typical_p, self.typical_p);
        replace(&mut params.repetition_penalty, defaults.repetition_penalty, self.repetition_penalty);
        replace(&mut params.no_repeat_ngram_size, defaults.no_repeat_ngram_size, self.no_repeat_ngram_size);
    }
}
