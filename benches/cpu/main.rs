//! Speed of the CPU backend, compared with the limits of this machine. benches/README.md describes
//! it.

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
mod scaling;
mod scheduler;
mod server;
mod table;
mod worker;
mod workload;

use std::process::ExitCode;

use limits::Arithmetic;
use noise::NoiseMonitor;
use options::{Mode, Options};
use pagedllm::types::options::{Isa, KvDtype, WeightFormat};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const MAX_TRIES: usize = 20;

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
            Mode::Scaling => scaling::bench(options),
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

/// Operations per second of the cores, measured now.
fn arithmetic(options: &Options, weights: WeightFormat) -> Arithmetic {
    let pairs = options.isa == Isa::Avx512Bf16 && options.kv_dtype.unwrap_or(KvDtype::Bf16) == KvDtype::Bf16;
    let attention = if pairs { WeightFormat::Bf16 } else { WeightFormat::F32 };
    Arithmetic { weights: best_without_noise(options, weights), attention: best_without_noise(options, attention) }
}

/// Only other processes lower the rate. Therefore this is the best of several tries, up to the
/// first one without noise.
fn best_without_noise(options: &Options, format: WeightFormat) -> f64 {
    let mut best = 0.0f64;
    let tries = match options.mode {
        _ if options.quick => 1,
        Mode::Scaling => 3, // it has a limit of time
        _ => MAX_TRIES,
    };
    for _ in 0..tries {
        let monitor = NoiseMonitor::start(None);
        best = best.max(probes::arithmetic(options.isa, format, options.threads));
        if !monitor.stop(None).is_noisy() {
            break;
        }
    }
    best
}
