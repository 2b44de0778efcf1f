//! What it costs in quality to keep weights, or K and V, in fewer bits: the bundled model's perplexity on text it was not trained on.

mod perplexity;

use std::path::Path;

use pagedllm::options::{Isa, KvDtype, WeightFormat};
use perplexity::{Reading, narrow_formats};

fn main() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/model");
    let exact = Reading::of(&model, None, KvDtype::F32);
    println!("{} tokens\n", exact.logprobs.len());
    head("KV");
    for dtype in KvDtype::ALL {
        row(dtype.name(), &Reading::of(&model, None, dtype), &exact);
    }
    if Isa::Avx512Bf16.is_present() {
        row("bf16, products in bf16", &Reading::on(Isa::Avx512Bf16, &model, None, KvDtype::Bf16), &exact);
    }
    println!();
    head("weights");
    for format in narrow_formats() {
        let name = match format {
            WeightFormat::Int4 { group, .. } => format!("{}, groups of {group}", format.name()),
            _ => format.name().into(),
        };
        row(&name, &Reading::of(&model, Some(format), KvDtype::F32), &exact);
    }
}

fn head(what: &str) {
    println!("| {what} | perplexity | against what is stored, KV in f32 | a token's log probability changes by, on average | at most |");
    println!("| --- | --- | --- | --- | --- |");
}

fn row(name: &str, reading: &Reading, exact: &Reading) {
    let change = 100.0 * (reading.perplexity() / exact.perplexity() - 1.0);
    let (mean, most) = reading.distance(exact);
    println!("| {name} | {:.5} | {change:+.4} % | {mean:.5} | {most:.3} |", reading.perplexity());
}
