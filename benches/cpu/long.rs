//! Contexts of thousands of tokens: whether the time of a decode step depends only on the bytes it
//! reads, and whether one long sequence delays the others.

use pagedllm::types::options::KvDtype;

use crate::cell::Cell;
use crate::model::Shape;
use crate::probes::Memory;
use crate::report::Sample;
use crate::run::{Measured, Run};
use crate::worker::Command;
use crate::{Options, Result, arithmetic};

/// Model S with more positions.
static SHAPE: Shape = Shape { name: "S-long", positions: 33_024, ..crate::model::SHAPES[0] };
const SHORT: u64 = 128;

pub fn bench(options: &Options) -> Result<()> {
    let weights = options.cells()[0].weights.clone();
    let cell = Cell { shape: &SHAPE, weights: weights.clone() };
    let (contexts, long, others, steps): (&[u64], u64, u64, usize) = match options.quick {
        true => (&[128, 512], 512, 3, 4),
        false => (&[2048, 8192, 32_768], 8192, 31, 64),
    };
    let kv_dtypes = options.kv_dtype.map_or(vec![KvDtype::Bf16, KvDtype::Int8], |dtype| vec![dtype]);
    let memory = Memory::new(options.probe_bytes(), options.threads);
    let arithmetic = arithmetic(options, weights.arithmetic());
    println!("model S, {} threads, {}, weights in {}", options.threads, options.isa.name(), weights.name());
    println!("| sequences | KV | tokens/s | share of the limit | GB/s read | memory GB/s | share of memory | cores busy |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for dtype in kv_dtypes {
        let mut engine = cell.engine(options, 1 + others as usize)?;
        engine.kv_dtype = Some(dtype);
        let mut run = Run::start(&cell, &engine, &memory, arithmetic)?;
        let decodes = |run: &mut Run, what: String| -> Result<()> {
            let measured = run.measure(&Command::Decode { steps })?;
            print(run, &format!("{what} | {}", dtype.name()), &measured);
            run.worker.abort_all()
        };
        for &context in contexts {
            run.worker.steps(&Command::Add { sequences: 1, tokens: context })?;
            decodes(&mut run, format!("1 of {context}"))?;
        }
        run.worker.steps(&Command::Add { sequences: 1, tokens: long })?;
        run.worker.steps(&Command::Add { sequences: others, tokens: SHORT })?;
        decodes(&mut run, format!("1 of {long}, {others} of {SHORT}"))?;
        // The same number of sequences with the same total of visible positions, which need no
        // splitting.
        let average = (long + others * SHORT) / (1 + others);
        run.worker.steps(&Command::Add { sequences: 1 + others, tokens: average })?;
        decodes(&mut run, format!("{} of {average}", 1 + others))?;
    }
    Ok(())
}

fn print(run: &Run, what: &str, measured: &Measured) {
    let Sample { value, limit, bandwidth, noise } = run.rate(measured.tokens(), measured);
    let bytes: f64 = measured.steps.iter().map(|step| run.costs.bytes(step)).sum();
    let read = bytes / measured.seconds;
    println!(
        "| {what} | {value:.1} | {:.0} % | {:.1} | {:.1} | {:.0} % | {:.0} % |{}",
        100.0 * value / limit,
        read / 1e9,
        bandwidth / 1e9,
        100.0 * read / bandwidth,
        100.0 * noise.own,
        if noise.is_noisy() { " noisy" } else { "" }
    );
}
