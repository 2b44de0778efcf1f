//! The formats in which matrices are loaded.

use super::checkpoint::Checkpoint;
use super::parts::Parts;
use super::spec::{Linear, ModelSpec, Role};
use crate::error::{Error, Result};
use crate::types::options::{Dtype, WeightFormat};

/// Visits every matrix in the order of loading, with its weight format.
pub fn visit(
    spec: &ModelSpec,
    checkpoint: &Checkpoint,
    requested: Option<WeightFormat>,
    mut visit: impl FnMut(&Linear, WeightFormat) -> Result<()>,
) -> Result<()> {
    let matrix = |linear: &Linear, role| {
        let dtype = Parts::find(linear, checkpoint)?.dtype;
        visit(linear, of_matrix(linear, dtype, for_role(requested, role))?)
    };
    spec.try_map(matrix, |_| Ok(()), |_| Ok(()))?;
    Ok(())
}

/// Returns the weight format for a role if `requested` is requested. None: the storage type.
pub fn for_role(requested: Option<WeightFormat>, role: Role) -> Option<WeightFormat> {
    match (requested, role) {
        (_, Role::Exact) => None,
        // Every token passes through these matrices, and the head decides between tokens with close
        // logits.
        (Some(WeightFormat::Int4 { .. }), Role::Vocabulary) => Some(WeightFormat::Int8),
        (Some(WeightFormat::Fp8), Role::Vocabulary) => None,
        (requested, _) => requested,
    }
}

/// Returns the format of a matrix, or an error if the wanted format is not applicable.
pub fn of_matrix(linear: &Linear, stored: Dtype, wanted: Option<WeightFormat>) -> Result<WeightFormat> {
    match wanted {
        Some(WeightFormat::Int4 { group, .. }) if !linear.cols.is_multiple_of(group) => {
            let fits: Vec<_> = WeightFormat::GROUPS.into_iter().filter(|group| linear.cols.is_multiple_of(*group)).collect();
            let remedy = if fits.is_empty() { String::new() } else { format!("weight_group to one of {fits:?}, or ") };
            Err(Error::unsupported(format!(
                "weight_format is int4 in groups of {group}, but {} has {} columns; set {remedy}weight_format to int8",
                linear.parts[0].weight(),
                linear.cols
            )))
        }
        wanted => Ok(wanted.unwrap_or(stored.into())),
    }
}
