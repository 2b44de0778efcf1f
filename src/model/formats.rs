//! The formats in which matrices are loaded.

use super::checkpoint::Checkpoint;
use super::parts::Parts;
use super::spec::{Attention, Experts, LatentAttention, Linear, Mlp, ModelSpec, Role};
use crate::backend::{Alloc, Section};
use crate::error::{Error, Result};
use crate::types::options::WeightFormat;

/// Selects the formats of a model's matrices on a backend.
#[derive(Clone, Copy)]
pub struct Formats<'a> {
    checkpoint: &'a Checkpoint,
    /// None: the storage type of each matrix.
    requested: Option<WeightFormat>,
    stores_blocks: bool,
}

impl<'a> Formats<'a> {
    pub fn new(backend: &impl Alloc, checkpoint: &'a Checkpoint, requested: Option<WeightFormat>) -> Formats<'a> {
        Formats { checkpoint, requested, stores_blocks: backend.stores_blocks() }
    }

    /// Visits every matrix in the order of loading.
    pub fn visit(self, spec: &ModelSpec, mut visit: impl FnMut(&Linear, &[Section]) -> Result<()>) -> Result<()> {
        spec.try_map(|linear, role| visit(linear, &self.of_matrix(linear, role)?.1), |_| Ok(()), |_| Ok(()))?;
        Ok(())
    }

    /// Refuses a layer whose experts, or whose heads, are stored differently: products with all of
    /// them are one operation.
    pub fn check_alike(self, spec: &ModelSpec) -> Result<()> {
        for layer in &spec.layers {
            if let Mlp::Experts(Experts { experts, .. }) = &layer.mlp {
                self.check_all(experts.iter().map(|expert| &expert.gate_up), Role::Inner)?;
                self.check_all(experts.iter().map(|expert| &expert.down), Role::Inner)?;
            }
            if let Attention::Latent(LatentAttention { keys, values, .. }) = &layer.attention {
                self.check_all(keys.iter(), Role::Exact)?;
                self.check_all(values.iter(), Role::Exact)?;
            }
        }
        Ok(())
    }

    fn check_all<'b>(self, matrices: impl Iterator<Item = &'b Linear>, role: Role) -> Result<()> {
        let mut first = None;
        for linear in matrices {
            let (_, sections) = self.of_matrix(linear, role)?;
            let first = first.get_or_insert_with(|| sections.clone());
            if *first != sections {
                return Err(Error::model(format!(
                    "{} is stored in another type than the same matrix of other experts or heads; convert the model again",
                    linear.parts[0].weight()
                )));
            }
        }
        Ok(())
    }

    /// Returns the tensors of a matrix and their formats, or an error if the requested format is
    /// not applicable.
    pub fn of_matrix(self, linear: &Linear, role: Role) -> Result<(Parts<'a>, Vec<Section>)> {
        let parts = Parts::find(linear, self.checkpoint)?;
        let sections = match for_role(self.requested, role) {
            // Products with blocks round the activations.
            None if self.stores_blocks && role != Role::Exact && parts.has_blocks() => {
                parts.as_stored().map_err(|error| error.within(linear.parts[0].weight()))?
            }
            wanted => {
                let to = applicable(linear, wanted.unwrap_or(parts.dtype.into()))?;
                vec![Section::numbers(linear.rows(), parts.dtype, to)]
            }
        };
        Ok((parts, sections))
    }
}

/// Returns the weight format for a role if `requested` is requested. None: the storage type.
fn for_role(requested: Option<WeightFormat>, role: Role) -> Option<WeightFormat> {
    match (requested, role) {
        (_, Role::Exact) => None,
        // Every token passes through these matrices, and the head decides between tokens with close
        // logits.
        (Some(WeightFormat::Int4 { .. }), Role::Vocabulary) => Some(WeightFormat::Int8),
        (Some(WeightFormat::Fp8), Role::Vocabulary) => None,
        (requested, _) => requested,
    }
}

/// Refuses groups that do not divide the columns.
fn applicable(linear: &Linear, format: WeightFormat) -> Result<WeightFormat> {
    match format {
        WeightFormat::Int4 { group, .. } if !linear.cols.is_multiple_of(group) => {
            let fits: Vec<_> = WeightFormat::GROUPS.into_iter().filter(|group| linear.cols.is_multiple_of(*group)).collect();
            let remedy = if fits.is_empty() { String::new() } else { format!("weight_group to one of {fits:?}, or ") };
            Err(Error::unsupported(format!(
                "weight_format is int4 in groups of {group}, but {} has {} columns{}; set {remedy}weight_format to int8",
                linear.parts[0].weight(),
                linear.cols,
                if linear.shard.is_some() { " per rank" } else { "" }
            )))
        }
        format => Ok(format),
    }
}
