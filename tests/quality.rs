//! What storing K and V in fewer bits costs, on the bundled model and text of its own kind.

mod common;
#[path = "../benches/quality/perplexity.rs"]
mod perplexity;

use common::bundled_model;
use pagedllm::options::KvDtype;
use perplexity::Reading;

#[test]
fn int8_costs_less_than_a_thousandth_of_perplexity() {
    let [exact, bf16, int8] = KvDtype::ALL.map(|dtype| Reading::of(&bundled_model(), dtype));
    assert!(exact.logprobs.len() > 3_000 && exact.perplexity() < 2.0, "{} tokens, {}", exact.logprobs.len(), exact.perplexity());
    for (name, reading) in [("bf16", &bf16), ("int8", &int8)] {
        let change = reading.perplexity() / exact.perplexity() - 1.0;
        println!("{name}: perplexity {} against {}: {:+.4} %", reading.perplexity(), exact.perplexity(), 100.0 * change);
        assert!(change.abs() < 1e-3, "{name} changes perplexity by {change}");
        assert!(reading.distance(&exact).0 > 0.0, "{name} is stored as f32");
    }
    assert!(int8.distance(&bf16).0 > 0.0, "int8 is stored as bf16");
}
