//! Speed of the kernels and the engine on a CUDA device, compared with the limits of the device.
//! README.md in this folder describes it.

mod attention;
#[path = "../common.rs"]
mod common;
mod determinism;
mod draws;
mod engine;
mod fusions;
mod latents;
mod line;
#[path = "../cpu/model.rs"]
#[allow(dead_code)] // only the CPU benchmark uses the rest
mod model;
mod nccl;
mod options;
mod paged;
mod probe;
mod products;
mod random;
mod serving;
#[path = "../simulation/mod.rs"]
mod simulation;
mod timing;

use std::process::ExitCode;

use options::{Options, Part};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let run = || -> Result<()> {
        let options = Options::parse(std::env::args().skip(1))?;
        match options.part {
            Part::Probe => probe::check(),
            Part::PagedAttention => paged::bench(&options),
            Part::DecodeAttention => attention::decode(&options),
            Part::PrefillAttention => attention::prefill(&options),
            Part::LatentAttention => latents::bench(&options),
            Part::Thresholds => products::thresholds(&options),
            Part::Products => products::bench(&options),
            Part::Fusions => fusions::bench(&options),
            Part::Draws => draws::bench(&options),
            Part::Engine => engine::bench(&options),
            Part::Serving => serving::bench(&options),
            Part::Nccl => nccl::check(&options),
            Part::Determinism => determinism::check(&options),
        }
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
