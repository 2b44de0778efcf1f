//! The parameters of beam search.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The condition that ends a beam search. Except for `Yes`, as many beams as the width must be
/// finished, and the condition compares the best score that a running beam can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum EarlyStopping {
    /// Ends when as many beams as the width are finished.
    Yes,
    /// Ends when the best running beam would not beat the worst finished one if it ended now. With
    /// a positive length penalty it could still improve.
    #[default]
    No,
    /// Ends when no running beam can still beat the worst finished one.
    Never,
}

/// The parameters of a beam search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BeamParams {
    /// Number of beams, 2 to 64.
    pub width: u32,
    /// Number of groups into which the beams are divided. Each group is a search of its own.
    pub groups: u32,
    /// Penalty on the log probability of a token, for each beam of an earlier group that chose it
    /// in the same step.
    pub diversity_penalty: f32,
    /// Exponent of the length by which the sum of log probabilities is divided. Values above 0
    /// favour long beams, values below 0 short ones.
    pub length_penalty: f32,
    /// Condition that ends the search.
    pub early_stopping: EarlyStopping,
}

impl Default for BeamParams {
    fn default() -> Self {
        BeamParams { width: 4, groups: 1, diversity_penalty: 0.0, length_penalty: 1.0, early_stopping: EarlyStopping::No }
    }
}

impl BeamParams {
    /// Maximum beam width.
    pub const MAX_BEAMS: u32 = 64;
    const MAX_DIVERSITY: f32 = 1e6;
    /// With this limit, a length to this power times a sum of log probabilities fits f32.
    const MAX_LENGTH_PENALTY: f32 = 5.0;

    /// Checks whether the search can return the `n` best beams.
    pub fn validate(&self, n: usize) -> Result<()> {
        let BeamParams { width, groups, diversity_penalty, length_penalty, .. } = *self;
        if !(2..=Self::MAX_BEAMS).contains(&width) {
            return Err(Error::invalid(format!("width of pllm_beam is {width}; must be 2 to {}", Self::MAX_BEAMS)));
        }
        if n == 0 || n > width as usize {
            return Err(Error::invalid(format!("n is {n} and width of pllm_beam is {width}; n must be 1 to {width}")));
        }
        if groups == 0 || width % groups != 0 {
            return Err(Error::invalid(format!("groups of pllm_beam is {groups}; must divide width ({width})")));
        }
        // NaN fails these comparisons.
        if !(0.0..=Self::MAX_DIVERSITY).contains(&diversity_penalty) {
            let max = Self::MAX_DIVERSITY;
            return Err(Error::invalid(format!("diversity_penalty is {diversity_penalty}; must be 0 to {max}")));
        }
        if groups == 1 && diversity_penalty != 0.0 {
            return Err(Error::invalid(format!(
                "diversity_penalty is {diversity_penalty} and groups is 1; raise groups or set diversity_penalty to 0"
            )));
        }
        if groups > 1 && diversity_penalty == 0.0 {
            return Err(Error::invalid(format!(
                "diversity_penalty is 0 and groups is {groups}, so all groups would find the same; raise diversity_penalty or set groups to 1"
            )));
        }
        if !(-Self::MAX_LENGTH_PENALTY..=Self::MAX_LENGTH_PENALTY).contains(&length_penalty) {
            let max = Self::MAX_LENGTH_PENALTY;
            return Err(Error::invalid(format!("length_penalty is {length_penalty}; must be -{max} to {max}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inconsistent_beam_parameters_are_refused_with_their_values() {
        let assert_refused = |params: BeamParams, n: usize, message: &str| {
            let error = params.validate(n).unwrap_err();
            assert!(error.message().contains(message), "{error}, expected {message}");
        };
        let params = BeamParams::default;
        params().validate(4).unwrap();
        assert_refused(params(), 5, "n is 5 and width of pllm_beam is 4");
        assert_refused(params(), 0, "n is 0");
        assert_refused(BeamParams { width: 1, ..params() }, 1, "width of pllm_beam is 1");
        assert_refused(BeamParams { width: 65, ..params() }, 1, "must be 2 to 64");
        assert_refused(BeamParams { groups: 3, diversity_penalty: 1.0, ..params() }, 1, "groups of pllm_beam is 3; must divide width (4)");
        assert_refused(BeamParams { groups: 0, ..params() }, 1, "groups of pllm_beam is 0");
        assert_refused(BeamParams { groups: 2, ..params() }, 1, "diversity_penalty is 0");
        assert_refused(BeamParams { diversity_penalty: 0.5, ..params() }, 1, "groups is 1");
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -5.5] {
            assert_refused(BeamParams { length_penalty: value, ..params() }, 1, "length_penalty is");
            assert_refused(BeamParams { groups: 2, diversity_penalty: value, ..params() }, 1, "diversity_penalty is");
        }
    }
}
