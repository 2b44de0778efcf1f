//! Quality of weight formats and KV formats: perplexity of the bundled model on text that it was
//! not trained on.

mod perplexity;

use std::path::Path;

use pagedllm::types::options::{Isa, KvDtype, WeightFormat};
use perplexity::{Perplexity, narrow_formats};

fn main() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/model");
    let exact = Perplexity::measure(&model, None, KvDtype::F32);
    println!("{} tokens\n", exact.logprobs.len());
    print_head("KV");
    for dtype in KvDtype::ALL {
        print_row(dtype.name(), &Perplexity::measure(&model, None, dtype), &exact);
    }
    if Isa::Avx512Bf16.is_present() {
        print_row("bf16, products in bf16", &Perplexity::measure_on(Isa::Avx512Bf16, &model, None, KvDtype::Bf16), &exact);
    }
    println!();
    print_head("weights");
    for format in narrow_formats() {
        let name = match format {
            WeightFormat::Int4 { group, .. } => format!("{}, groups of {group}", format.name()),
            _ => format.name().into(),
        };
        print_row(&name, &Perplexity::measure(&model, Some(format), KvDtype::F32), &exact);
    }
}

fn print_head(what: &str) {
    println!("| {what} | perplexity | change from stored weights and KV in f32 | mean change of a token's log probability | max |");
    println!("| --- | --- | --- | --- | --- |");
}

fn print_row(name: &str, reading: &Perplexity, exact: &Perplexity) {
    let change = 100.0 * (reading.perplexity() / exact.perplexity() - 1.0);
    let (mean, max) = reading.distance(exact);
    println!("| {name} | {:.5} | {change:+.4} % | {mean:.5} | {max:.3} |", reading.perplexity());
}
