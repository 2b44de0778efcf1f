//! Serving under load, on a simulated machine: what the engine itself costs, and what policies are worth.

mod forecast;
mod simulation;
mod speed;
mod workload;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    if std::env::args().any(|a| a == "forecast") {
        return forecast::print();
    }
    speed::print()?;
    forecast::print()
}
