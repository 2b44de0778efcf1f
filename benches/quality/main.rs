//! What it costs in quality to store K and V in fewer bits: the bundled model's perplexity on text it was not trained on.

mod perplexity;

use std::path::Path;

use pagedllm::options::KvDtype;
use perplexity::Reading;

fn main() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/model");
    let exact = Reading::of(&model, KvDtype::F32);
    println!("{} tokens\n", exact.logprobs.len());
    println!("| KV | perplexity | against f32 | a token's log probability changes by, on average | at most |");
    println!("| --- | --- | --- | --- | --- |");
    for dtype in KvDtype::ALL {
        let reading = Reading::of(&model, dtype);
        let change = 100.0 * (reading.perplexity() / exact.perplexity() - 1.0);
        let (mean, most) = reading.distance(&exact);
        println!("| {} | {:.5} | {change:+.4} % | {mean:.5} | {most:.3} |", dtype.name(), reading.perplexity());
    }
}
