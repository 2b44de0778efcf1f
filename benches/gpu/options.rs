//! Command-line options.

use std::path::PathBuf;

use crate::Result;

const USAGE: &str = "usage: gpu probe|paged-attention|decode-attention|prefill-attention|latent-attention|thresholds|products|fusions|draws|engine|serving|determinism|nccl \
    [--bandwidth=BYTES_PER_SECOND] [--flops=FLOP_PER_SECOND] [--model=DIR] [--models=DIR] [--small]";

pub enum Part {
    Probe,
    PagedAttention,
    DecodeAttention,
    PrefillAttention,
    LatentAttention,
    Thresholds,
    Products,
    Fusions,
    Draws,
    Engine,
    Serving,
    Determinism,
    Nccl,
}

pub struct Options {
    pub part: Part,
    pub ceilings: Ceilings,
    /// Folder of the model of the engine.
    pub model: PathBuf,
    /// Folder for generated small models.
    pub models: PathBuf,
    /// Selects sizes that are small enough for kernels on the host. Times are then meaningless.
    pub small: bool,
}

/// Limits of the device, measured in the same run.
#[derive(Clone, Copy)]
pub struct Ceilings {
    /// Bytes read and written per second by a copy.
    pub bandwidth: f64,
    /// Operations per second of a large product in bf16.
    pub flops: f64,
}

impl Ceilings {
    /// Lower bound of the time to move `bytes` and to compute `flops`.
    pub fn min_seconds(self, bytes: f64, flops: f64) -> f64 {
        (bytes / self.bandwidth).max(flops / self.flops)
    }
}

impl Options {
    pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Options> {
        let mut part = None;
        let mut options = Options {
            part: Part::Determinism,
            ceilings: Ceilings { bandwidth: f64::INFINITY, flops: f64::INFINITY },
            model: PathBuf::new(),
            models: std::env::temp_dir(),
            small: false,
        };
        for argument in arguments {
            match argument.split_once('=').unwrap_or((&argument, "")) {
                ("--bandwidth", number) => options.ceilings.bandwidth = number.parse()?,
                ("--flops", number) => options.ceilings.flops = number.parse()?,
                ("--model", dir) => options.model = dir.into(),
                ("--models", dir) => options.models = dir.into(),
                ("--small", _) => options.small = true,
                ("--bench", _) => {} // cargo adds it
                (name, _) => part = Some(Part::named(name)?),
            }
        }
        Ok(Options { part: part.ok_or(USAGE)?, ..options })
    }

    /// Returns the sizes to measure.
    pub fn sizes<'a, T>(&self, all: &'a [T], small: &'a [T]) -> &'a [T] {
        if self.small { small } else { all }
    }
}

impl Part {
    fn named(name: &str) -> Result<Part> {
        Ok(match name {
            "probe" => Part::Probe,
            "paged-attention" => Part::PagedAttention,
            "decode-attention" => Part::DecodeAttention,
            "prefill-attention" => Part::PrefillAttention,
            "latent-attention" => Part::LatentAttention,
            "thresholds" => Part::Thresholds,
            "products" => Part::Products,
            "fusions" => Part::Fusions,
            "draws" => Part::Draws,
            "engine" => Part::Engine,
            "serving" => Part::Serving,
            "determinism" => Part::Determinism,
            "nccl" => Part::Nccl,
            _ => return Err(USAGE.into()),
        })
    }
}
