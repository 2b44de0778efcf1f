//! Rotary frequencies from a config, as transformers computes them; both of its spellings:
//! `rope_theta` with `rope_scaling` (version 4) and `rope_parameters` (version 5).

use std::f64::consts::TAU;

use super::super::config::Config;
use super::super::spec::Rope;
use crate::error::{Error, Result};

pub fn rope(config: &Config, rotated_dims: usize) -> Result<Rope> {
    let parameters = match config.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => config.object("rope_scaling")?,
    };
    let Some(parameters) = parameters else {
        return Ok(Rope { frequencies: frequencies(config.positive_or("rope_theta", 10_000.0)?, rotated_dims), amplitude: 1.0 });
    };
    let theta = parameters.positive_or("rope_theta", config.positive_or("rope_theta", 10_000.0)?)?;
    let mut rope = Rope { frequencies: frequencies(theta, rotated_dims), amplitude: 1.0 };
    match parameters.text_or("rope_type", parameters.text_or("type", "default")?)? {
        "default" => {}
        "linear" => {
            let factor = parameters.positive("factor")?;
            rope.frequencies.iter_mut().for_each(|f| *f = (*f as f64 / factor) as f32);
        }
        "llama3" => llama3(&parameters, &mut rope.frequencies)?,
        other => {
            return Err(Error::unsupported(format!("config.json: RoPE type is {other}; supported are default, linear, llama3")));
        }
    }
    if rope.frequencies.iter().any(|f| !f.is_finite()) {
        return Err(Error::model("config.json: the RoPE parameters give frequencies that are not finite numbers"));
    }
    Ok(rope)
}

/// 1 / theta^(2i / dims)
fn frequencies(theta: f64, dims: usize) -> Vec<f32> {
    (0..dims / 2).map(|i| (1.0 / theta.powf((2 * i) as f64 / dims as f64)) as f32).collect()
}

/// Long waves are stretched by `factor`, short ones kept, those between blended.
fn llama3(parameters: &Config, frequencies: &mut [f32]) -> Result<()> {
    let factor = parameters.positive("factor")?;
    let (low, high) = (parameters.positive("low_freq_factor")?, parameters.positive("high_freq_factor")?);
    let original = parameters.positive("original_max_position_embeddings")?;
    if high <= low {
        return Err(Error::model(format!("config.json: high_freq_factor is {high}, low_freq_factor {low}: the first must be the larger")));
    }
    for frequency in frequencies {
        let f = *frequency as f64;
        let waves = original * f / TAU; // whole turns within the original context
        let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
        *frequency = ((1.0 - kept) * f / factor + kept * f) as f32;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_spellings_give_the_same_frequencies() {
        let v4 = json!({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}});
        let v5 = json!({"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}});
        assert_eq!(rope(&Config::of(v4), 8).unwrap(), rope(&Config::of(v5), 8).unwrap());
    }

    #[test]
    fn an_unknown_type_is_named() {
        let error = rope(&Config::of(json!({"rope_scaling": {"rope_type": "spiral"}})), 8).unwrap_err();
        assert!(error.message().contains("spiral"), "{error}");
    }
}
