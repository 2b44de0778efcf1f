//! How fast the CPU backend serves, beside how fast this machine could: see benches/README.md.

mod attention;
mod cell;
#[path = "../common.rs"]
mod common;
mod limits;
mod long;
mod matmul;
mod model;
mod noise;
mod options;
mod probes;
mod report;
mod run;
mod scheduler;
mod server;
mod table;
mod worker;
mod workload;

use std::process::ExitCode;

use limits::Arithmetic;
use noise::Watch;
use options::{Mode, Options};
use pagedllm::options::{Isa, KvDtype, WeightFormat};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const MOST_TRIES: usize = 20;

fn main() -> ExitCode {
    let run = || -> Result<()> {
        if std::env::args().nth(1).as_deref() == Some(worker::ARGUMENT) {
            return server::serve();
        }
        let options = Options::parse(std::env::args().skip(1))?;
        match options.mode {
            Mode::Cell | Mode::Table => table::bench(&options),
            Mode::Scheduler => scheduler::bench(&options),
            Mode::Long => long::bench(&options),
            Mode::Attention => attention::bench(&options),
            Mode::Matmul => matmul::bench(&options),
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

/// Of the cores, now.
fn arithmetic(options: &Options, weights: WeightFormat) -> Arithmetic {
    let pairs = options.isa == Isa::Avx512Bf16 && options.kv_dtype.unwrap_or(KvDtype::Bf16) == KvDtype::Bf16;
    let attention = if pairs { WeightFormat::Bf16 } else { WeightFormat::F32 };
    Arithmetic { weights: undisturbed(options, weights), attention: undisturbed(options, attention) }
}

/// Steady but for what others take from it: the best of some tries, until one of them was alone.
fn undisturbed(options: &Options, format: WeightFormat) -> f64 {
    let mut best = 0.0f64;
    for _ in 0..if options.quick { 1 } else { MOST_TRIES } {
        let watch = Watch::start(None);
        best = best.max(probes::arithmetic(options.isa, format, options.threads));
        if !watch.stop(None).too_much() {
            break;
        }
    }
    best
}
