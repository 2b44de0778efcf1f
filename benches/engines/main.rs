//! Time to load packed weights, and the cost of two engines in one process.

#[path = "../common.rs"]
mod common;
mod loading;
#[path = "../cpu/model.rs"]
#[allow(dead_code)] // only the CPU benchmark uses the rest
mod model;
mod together;

use std::path::Path;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Arguments: `loading` or `together`, and the model, S or M. The default is both, with S.
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let is_selected =
        |what: &str| !arguments.iter().any(|word| word == "loading" || word == "together") || arguments.iter().any(|word| word == what);
    let shape = &model::SHAPES[arguments.iter().any(|word| word == "M") as usize];
    let parent = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-models");
    let dir = model::make(shape, &parent)?;
    if is_selected("loading") {
        loading::print(shape.name, &dir, &parent.join("packed"))?;
    }
    if is_selected("together") {
        together::print(shape.name, &dir)?;
    }
    Ok(())
}
