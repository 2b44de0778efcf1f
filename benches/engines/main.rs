//! Engines as a host makes them: how long loading takes where packed weights are kept, and what two engines in one process cost each other.

#[path = "../common.rs"]
mod common;
mod loading;
#[path = "../cpu/model.rs"]
#[allow(dead_code)] // its other half is the CPU benchmark's
mod model;
mod together;

use std::path::Path;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// `loading` or `together`, and the model, S or M; without them all of S.
fn main() -> Result<()> {
    let asked: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wanted = |what: &str| !asked.iter().any(|word| word == "loading" || word == "together") || asked.iter().any(|word| word == what);
    let shape = &model::SHAPES[asked.iter().any(|word| word == "M") as usize];
    let parent = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-models");
    let dir = model::make(shape, &parent)?;
    if wanted("loading") {
        loading::print(shape.name, &dir, &parent.join("packed"))?;
    }
    if wanted("together") {
        together::print(shape.name, &dir)?;
    }
    Ok(())
}
