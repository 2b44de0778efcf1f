//! Serving under load, on a simulated machine: what the engine itself costs, and what policies are worth.

mod simulation;
mod speed;
mod workload;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    speed::print()
}
