//! Measures the perplexity of low-precision weights, products, K and V, with the bundled model and
//! text of its training distribution.

#[path = "../../benches/quality/perplexity.rs"]
pub mod perplexity;

use crate::support::bundled_model;
use pagedllm::types::options::{Isa, KvDtype, WeightFormat};
use perplexity::{Perplexity, Texts, narrow_formats};

#[test]
fn low_precision_kv_changes_perplexity_by_less_than_a_thousandth() {
    let [exact, bf16, int8, f16, fp8] = KvDtype::ALL.map(|dtype| Perplexity::measure(&bundled_model(), Texts::HeldOut, None, dtype));
    assert!(exact.logprobs.len() > 3_000 && exact.perplexity() < 2.0, "{} tokens, {}", exact.logprobs.len(), exact.perplexity());
    for (name, reading) in [("bf16", &bf16), ("int8", &int8), ("f16", &f16), ("fp8", &fp8)] {
        let change = reading.perplexity() / exact.perplexity() - 1.0;
        let (mean, max) = reading.distance(&exact);
        println!(
            "{name}: perplexity {} against {}: {:+.4} %, {mean:.5}, {max:.3}",
            reading.perplexity(),
            exact.perplexity(),
            100.0 * change
        );
        assert!(change.abs() < 1e-3, "{name} changes perplexity by {change}");
        assert!(mean > 0.0, "{name} is stored as f32");
    }
    // More bits of fraction are more accurate.
    let distances = [&f16, &bf16, &int8, &fp8].map(|reading| reading.distance(&exact).0);
    assert!(distances.is_sorted_by(|a, b| a < b), "{distances:?}");
}

#[test]
fn products_in_bf16_change_perplexity_by_less_than_a_thousandth() {
    if !Isa::Avx512Bf16.is_present() {
        return println!("skipped: this machine lacks {}", Isa::Avx512Bf16.name());
    }
    // The stored weights are the same. Only products differ.
    let exact = Perplexity::measure(&bundled_model(), Texts::HeldOut, None, KvDtype::Bf16);
    let reading = Perplexity::measure_on(Isa::Avx512Bf16, &bundled_model(), Texts::HeldOut, None, KvDtype::Bf16);
    let (change, (mean, max)) = (reading.perplexity() / exact.perplexity() - 1.0, reading.distance(&exact));
    println!("{:+.4} %, log probabilities change by {mean}, at most {max}", 100.0 * change);
    assert!(mean > 0.0, "no product was computed in bf16");
    assert!(change.abs() < 1e-3, "products in bf16 change perplexity by {change}");
}

#[test]
fn integer_weights_change_perplexity_little_and_fewer_bits_more() {
    let read = |format| Perplexity::measure(&bundled_model(), Texts::HeldOut, format, KvDtype::F32);
    let exact = read(None);
    let mut int8 = f64::INFINITY;
    for format in narrow_formats() {
        let reading = read(Some(format));
        let (change, (distance, _)) = (reading.perplexity() / exact.perplexity() - 1.0, reading.distance(&exact));
        println!("{format:?}: {:+.4} %, log probabilities change by {distance}", 100.0 * change);
        match format {
            WeightFormat::Int8 => {
                assert!(change.abs() < 2e-3, "int8 changes perplexity by {change}");
                int8 = distance;
            }
            _ => {
                assert!(change < 5e-2, "{format:?} changes perplexity by {change}");
                assert!(distance > int8, "{format:?} is more accurate than int8");
            }
        }
    }
}
