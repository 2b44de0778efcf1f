//! A cell: one model in one weight format, one line of the table.

use std::path::{Path, PathBuf};

use pagedllm::types::options::{EngineOptions, WeightFormat};

use crate::model::{self, Shape};
use crate::{Options, Result};

#[derive(Clone, Copy)]
pub struct Cell {
    pub shape: &'static Shape,
    pub weights: WeightFormat,
}

impl Cell {
    pub fn name(&self) -> String {
        format!("{}-{}", self.shape.name, self.weights.name())
    }

    /// Number of int4 weights that share a scale.
    pub fn group(&self) -> Option<usize> {
        match self.weights {
            WeightFormat::Int4 { group, .. } => Some(group),
            _ => None,
        }
    }

    /// Options of the engine. The prefix cache is off because no prompt occurs twice.
    pub fn engine(&self, options: &Options, max_seqs: usize) -> Result<EngineOptions> {
        Ok(EngineOptions {
            model_dir: model::make(self.shape, &target()?.join("bench-models"))?,
            threads: Some(options.threads),
            isa: Some(options.isa),
            weight_format: Some(self.weights),
            kv_dtype: options.kv_dtype,
            max_seqs,
            prefix_cache: false,
            skip_tokenizer: true,
            ..Default::default()
        })
    }
}

/// Target folder of cargo, which also contains models and results.
pub fn target() -> Result<PathBuf> {
    Ok(Path::new(env!("CARGO_TARGET_TMPDIR")).parent().ok_or("the target directory has no parent")?.to_path_buf())
}
