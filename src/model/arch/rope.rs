//! Rotary frequencies from a config, as transformers computes them. Reads both formats:
//! `rope_theta` with `rope_scaling` (version 4) and `rope_parameters` (version 5).

use std::f64::consts::TAU;

use super::super::config::Config;
use super::super::spec::{Long, Longer, Pairs, Rope};
use super::limits;
use crate::error::{Error, Result};

/// Field names and defaults of a family, for the base and for the rotated part of a head.
#[derive(Clone, Copy)]
pub struct RopeDefaults {
    pub theta: (&'static str, f64),
    /// None: every model of the family rotates whole heads.
    pub part: Option<(&'static str, f64)>,
}

/// Reads the rotary embedding of all layers, or of those with full attention.
pub fn rope(config: &Config, head_dim: usize, defaults: &RopeDefaults) -> Result<Rope> {
    if config.has("rope_parameters") && config.has("rope_scaling") {
        return Err(Error::model(
            "config.json: rope_parameters and rope_scaling are both set; move the fields of rope_scaling into rope_parameters",
        ));
    }
    let parameters = match config.object("rope_parameters")? {
        Some(parameters) => Some(parameters.object("full_attention")?.unwrap_or(parameters)),
        None => config.object("rope_scaling")?,
    };
    Source { config, parameters: parameters.unwrap_or_default(), head_dim, defaults }.rope()
}

/// Reads the rotary embedding of layers with a window, in models with two embeddings.
pub fn local_rope(config: &Config, head_dim: usize, defaults: &RopeDefaults) -> Result<Rope> {
    let parameters = config.object("rope_parameters")?.unwrap_or_default().object("sliding_attention")?;
    Source { config, parameters: parameters.unwrap_or_default(), head_dim, defaults }.rope()
}

/// Returns the additional factor of scores in a YaRN model with `mscale_all_dim`.
pub fn score_scale(config: &Config) -> Result<f32> {
    let name = if config.has("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
    let parameters = config.object(name)?.unwrap_or_default();
    let kind = parameters.text_or("rope_type", parameters.text_or("type", "default")?)?;
    if kind == "default" || !is_given(&parameters, "mscale_all_dim") {
        return Ok(1.0);
    }
    let scale = yarn_scale(parameters.positive("factor")?, parameters.positive("mscale_all_dim")?).powi(2) as f32;
    if !scale.is_finite() {
        return Err(Error::model("config.json: mscale_all_dim gives an attention scale that is not a finite number"));
    }
    Ok(scale)
}

/// Returns true if a factor is present and not 0.
fn is_given(parameters: &Config, name: &str) -> bool {
    parameters.get(name).is_some_and(|value| value.as_f64() != Some(0.0))
}

/// Returns the YaRN attention factor of a model whose context was extended by `factor`.
fn yarn_scale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// The config objects from which a rotary embedding is read.
struct Source<'a> {
    config: &'a Config,
    parameters: Config,
    head_dim: usize,
    defaults: &'a RopeDefaults,
}

impl Source<'_> {
    fn rope(&self) -> Result<Rope> {
        let (theta, dims) = (self.positive("rope_theta", self.defaults.theta)?, self.rotated()?);
        let mut rope = Rope { frequencies: Rope::frequencies(theta, dims), amplitude: 1.0, pairs: Pairs::Halves, stretch: 1.0, long: None };
        let parameters = &self.parameters;
        match parameters.text_or("rope_type", parameters.text_or("type", "default")?)? {
            "default" => {}
            "linear" => {
                let factor = self.factor()?;
                divide(&mut rope.frequencies, |_| factor);
                rope.stretch = factor;
            }
            "dynamic" => {
                let (beyond, factor) = (self.config.count("max_position_embeddings", limits::MAX_POSITIONS)?, self.factor()?);
                rope.stretch = factor;
                rope.long = Some(Long { beyond, how: Longer::Dynamic { theta, factor } });
            }
            "llama3" => self.llama3(&mut rope.frequencies)?,
            // Early configs of Phi-3 use this name for longrope.
            "yarn" if parameters.has("short_factor") => self.longrope(&mut rope)?,
            "yarn" => self.yarn(theta, &mut rope)?,
            "longrope" | "su" => self.longrope(&mut rope)?,
            other => {
                return Err(Error::unsupported(format!(
                    "config.json: RoPE type is {other}; supported are default, linear, dynamic, llama3, yarn, longrope"
                )));
            }
        }
        let long = rope.long.iter().filter_map(|long| if let Longer::Other(frequencies) = &long.how { Some(frequencies) } else { None });
        if long.chain([&rope.frequencies]).flatten().any(|f| !f.is_finite()) || !rope.amplitude.is_finite() {
            return Err(Error::model("config.json: the RoPE parameters give frequencies that are not finite numbers"));
        }
        Ok(rope)
    }

    /// Reads a number from the RoPE parameters, or else from the family's field of the config.
    fn positive(&self, name: &str, (named, default): (&str, f64)) -> Result<f64> {
        self.parameters.positive_or(name, self.config.positive_or(named, default)?)
    }

    /// Returns the number of rotated dimensions of a head.
    fn rotated(&self) -> Result<usize> {
        const NAME: &str = "partial_rotary_factor";
        let part = self.positive(NAME, self.defaults.part.unwrap_or((NAME, 1.0)))?;
        if self.defaults.part.is_none() && part != 1.0 {
            return Err(Error::unsupported(format!("config.json: {NAME} is {part}; this family supports only 1")));
        }
        let dims = (self.head_dim as f64 * part) as usize;
        if dims > self.head_dim || dims < 2 || !dims.is_multiple_of(2) {
            let head_dim = self.head_dim;
            return Err(Error::model(format!(
                "config.json: wrong number of rotary dimensions ({dims}, head_dim is {head_dim}); it must be even, from 2 to {head_dim}"
            )));
        }
        Ok(dims)
    }

    fn factor(&self) -> Result<f64> {
        self.parameters.positive("factor")
    }

    /// Returns the context length before the extension. Some configs have it outside of the RoPE
    /// parameters.
    fn original(&self) -> Result<f64> {
        const NAME: &str = "original_max_position_embeddings";
        let from = if self.config.has(NAME) { self.config } else { &self.parameters };
        from.positive(NAME)
    }

    /// Returns the factor of the context extension, derived from the lengths if it is absent.
    fn stretch(&self) -> Result<f64> {
        match self.parameters.has("factor") {
            true => self.factor(),
            false => Ok(self.config.positive("max_position_embeddings")? / self.original()?),
        }
    }

    /// Divides low frequencies by `factor`, keeps high ones, and interpolates between.
    fn llama3(&self, frequencies: &mut [f32]) -> Result<()> {
        let (low, high) = (self.parameters.positive("low_freq_factor")?, self.parameters.positive("high_freq_factor")?);
        let (factor, original) = (self.factor()?, self.original()?);
        if high <= low {
            return Err(Error::model(format!(
                "config.json: high_freq_factor is {high}, but low_freq_factor is {low}; high_freq_factor must be larger"
            )));
        }
        for frequency in frequencies {
            let f = *frequency as f64;
            let waves = original * f / TAU; // full rotations within the original context
            let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            *frequency = ((1.0 - kept) * f / factor + kept * f) as f32;
        }
        Ok(())
    }

    /// YaRN: keeps dimensions with many rotations within the original context, divides the
    /// frequencies of those with few, and interpolates between, linearly in the dimension.
    fn yarn(&self, theta: f64, rope: &mut Rope) -> Result<()> {
        let (factor, original, dims) = (self.stretch()?, self.original()?, rope.rotated() as f64);
        let (fast, slow) = (self.parameters.positive_or("beta_fast", 32.0)?, self.parameters.positive_or("beta_slow", 1.0)?);
        let dim_that_turns = |times: f64| dims * (original / (times * TAU)).ln() / (2.0 * theta.ln());
        let whole = self.parameters.flag_or("truncate", true)?;
        let (low, high) = (dim_that_turns(fast), dim_that_turns(slow));
        let (low, high) = if whole { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dims - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        for (i, frequency) in rope.frequencies.iter_mut().enumerate() {
            let stretched = ((i as f64 - low) / width).clamp(0.0, 1.0);
            let f = *frequency as f64;
            *frequency = (f / factor * stretched + f * (1.0 - stretched)) as f32;
        }
        rope.amplitude = self.yarn_amplitude(factor)? as f32;
        if self.config.has("max_position_embeddings") {
            rope.stretch = factor * original / self.config.positive("max_position_embeddings")?;
        }
        Ok(())
    }

    fn yarn_amplitude(&self, factor: f64) -> Result<f64> {
        let there = |name| is_given(&self.parameters, name);
        let scale = |name| Ok::<f64, Error>(yarn_scale(factor, self.parameters.positive(name)?));
        let amplitude = match there("mscale") && there("mscale_all_dim") {
            true => scale("mscale")? / scale("mscale_all_dim")?,
            false => yarn_scale(factor, 1.0),
        };
        self.parameters.positive_or("attention_factor", amplitude)
    }

    /// LongRoPE: each frequency has its own divisor, one for contexts up to the original length,
    /// and one for longer contexts.
    fn longrope(&self, rope: &mut Rope) -> Result<()> {
        let (count, original, factor) = (rope.frequencies.len(), self.original()?, self.stretch()?);
        let mut long = rope.frequencies.clone();
        for (name, frequencies) in [("short_factor", &mut rope.frequencies), ("long_factor", &mut long)] {
            let factors = self.parameters.positives(name, count)?;
            divide(frequencies, |i| factors[i]);
        }
        let amplitude = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
        rope.amplitude = self.parameters.positive_or("attention_factor", amplitude)? as f32;
        rope.long = Some(Long { beyond: original as usize, how: Longer::Other(long) });
        Ok(())
    }
}

fn divide(frequencies: &mut [f32], by: impl Fn(usize) -> f64) {
    frequencies.iter_mut().enumerate().for_each(|(i, frequency)| *frequency = (*frequency as f64 / by(i)) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn from_config(config: Value, head_dim: usize) -> Result<Rope> {
        let defaults = RopeDefaults { theta: ("rope_theta", 10_000.0), part: Some(("partial_rotary_factor", 1.0)) };
        rope(&Config::from_json(config), head_dim, &defaults)
    }

    #[test]
    fn both_spellings_give_the_same_frequencies() {
        let v4 = json!({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}});
        let v5 = json!({"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}});
        assert_eq!(from_config(v4, 8).unwrap(), from_config(v5, 8).unwrap());
    }

    #[test]
    fn an_error_names_the_unknown_type() {
        let error = from_config(json!({"rope_scaling": {"rope_type": "spiral"}}), 8).unwrap_err();
        assert!(error.message().contains("spiral"), "{error}");
    }

    #[test]
    fn only_the_rotated_part_of_a_head_has_frequencies() {
        assert_eq!(from_config(json!({"partial_rotary_factor": 0.4}), 20).unwrap().rotated(), 8);
        for (part, head_dim) in [(0.5, 14), (1.5, 8), (0.1, 8)] {
            let error = from_config(json!({"partial_rotary_factor": part}), head_dim).unwrap_err();
            assert!(error.message().contains("must be even, from 2"), "{error}");
        }
    }

    #[test]
    fn dynamic_frequencies_equal_the_default_ones_up_to_the_length_of_the_model() {
        let dynamic = json!({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}});
        let mut short = from_config(dynamic, 8).unwrap();
        let mut long = short.clone();
        short.fit(64);
        assert_eq!(short.frequencies, from_config(json!({}), 8).unwrap().frequencies);
        long.fit(128);
        // theta * (2 * 128 / 64 - 1)^(8 / 6)
        assert_eq!(long.frequencies, Rope::frequencies(10_000.0 * 3f64.powf(8.0 / 6.0), 8));
    }

    #[test]
    fn a_list_of_factors_needs_one_per_pair() {
        let config = |long: Value| json!({"original_max_position_embeddings": 64, "max_position_embeddings": 64, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": long}});
        for wrong in [json!([1.0]), json!([1.0, 0.0]), json!([1.0, "2"]), json!(3), json!(null)] {
            assert!(from_config(config(wrong), 4).unwrap_err().message().contains("long_factor"));
        }
        assert!(from_config(config(json!([4.0, 8.0])), 4).is_ok());
    }
}
