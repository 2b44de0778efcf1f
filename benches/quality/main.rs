//! Quality of weight formats and KV formats: perplexity of the bundled model on text that it was
//! not trained on, or of another model on another text: `-- MODEL TEXT`.

mod perplexity;

use std::path::Path;

use pagedllm::types::options::{Isa, KvDtype, WeightFormat};
use perplexity::{Perplexity, Texts, narrow_formats};

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    match &given[..] {
        [model, text] => print_weights(Path::new(model), Texts::Plain(&std::fs::read_to_string(text).unwrap())),
        _ => {
            let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/model");
            print_kv(&model);
            print_weights(&model, Texts::HeldOut);
        }
    }
}

fn print_kv(model: &Path) {
    let measure = |dtype| Perplexity::measure(model, Texts::HeldOut, None, dtype);
    let exact = measure(KvDtype::F32);
    print_head("KV", &exact);
    for dtype in KvDtype::ALL {
        print_row(dtype.name(), &measure(dtype), &exact);
    }
    if Isa::Avx512Bf16.is_present() {
        let rounded = Perplexity::measure_on(Isa::Avx512Bf16, model, Texts::HeldOut, None, KvDtype::Bf16);
        print_row("bf16, products in bf16", &rounded, &exact);
    }
    println!();
}

fn print_weights(model: &Path, texts: Texts) {
    let measure = |format| Perplexity::measure(model, texts, format, KvDtype::F32);
    let exact = measure(Some(WeightFormat::F32));
    print_head("weights", &exact);
    print_row("as stored", &measure(None), &exact);
    for format in narrow_formats() {
        let name = match format {
            WeightFormat::Int4 { group, .. } => format!("{}, groups of {group}", format.name()),
            _ => format.name().into(),
        };
        match Perplexity::try_measure(model, texts, Some(format), KvDtype::F32) {
            Ok(reading) => print_row(&name, &reading, &exact),
            Err(error) => println!("| {name} | {error} |"),
        }
    }
}

fn print_head(what: &str, exact: &Perplexity) {
    println!("{} tokens, perplexity {:.5} in f32\n", exact.logprobs.len(), exact.perplexity());
    println!("| {what} | perplexity | change from f32 | mean change of a token's log probability | max |");
    println!("| --- | --- | --- | --- | --- |");
}

fn print_row(name: &str, reading: &Perplexity, exact: &Perplexity) {
    let change = 100.0 * (reading.perplexity() / exact.perplexity() - 1.0);
    let (mean, max) = reading.distance(exact);
    println!("| {name} | {:.5} | {change:+.4} % | {mean:.5} | {max:.3} |", reading.perplexity());
}
