//! A cell: one model in one weight format, one line of the table.

use std::path::{Path, PathBuf};

use pagedllm::types::options::{EngineOptions, WeightFormat};

use crate::model::{self, Shape};
use crate::{Options, Result};

#[derive(Clone)]
pub struct Cell {
    pub shape: &'static Shape,
    pub weights: Weights,
}

#[derive(Clone)]
pub enum Weights {
    /// The random model of the benchmark, converted to a format.
    Made(WeightFormat),
    /// A GGUF file of this name and path, in the types of the file.
    File(String, PathBuf),
}

impl Weights {
    pub fn name(&self) -> &str {
        match self {
            Weights::Made(format) => format.name(),
            Weights::File(name, _) => name,
        }
    }

    /// Returns the format that is multiplied by the same instruction.
    pub fn arithmetic(&self) -> WeightFormat {
        match self {
            Weights::Made(format) => *format,
            Weights::File(..) => WeightFormat::Int8,
        }
    }
}

impl Cell {
    pub fn name(&self) -> String {
        format!("{}-{}", self.shape.name, self.weights.name())
    }

    /// Number of int4 weights that share a scale.
    pub fn group(&self) -> Option<usize> {
        match self.weights {
            Weights::Made(WeightFormat::Int4 { group, .. }) => Some(group),
            _ => None,
        }
    }

    /// Options of the engine. The prefix cache is off because no prompt occurs twice.
    pub fn engine(&self, options: &Options, max_seqs: usize) -> Result<EngineOptions> {
        let (model_dir, weight_format) = match &self.weights {
            Weights::Made(format) => {
                let models = options.models.clone().map_or_else(|| Ok(target()?.join("bench-models")), Result::Ok)?;
                (model::make(self.shape, &models)?, Some(*format))
            }
            Weights::File(_, path) => (path.clone(), None),
        };
        Ok(EngineOptions {
            model_dir,
            threads: Some(options.threads),
            isa: Some(options.isa),
            weight_format,
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
