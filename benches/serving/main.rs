//! Serving under load, on a simulated machine: what the engine itself costs, what policies are worth, how well it forecasts.

mod figures;
mod forecast;
mod policies;
mod rates;
mod simulation;
mod slots;
mod speed;
mod workload;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// Prints its tables.
type Part = fn() -> Result<()>;

/// All parts, or those that are named.
fn main() -> Result<()> {
    let named: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let parts: [(&str, Part); 6] = [
        ("requests", speed::print_requests),
        ("steps", speed::print_steps),
        ("policies", policies::print),
        ("rates", rates::print),
        ("slots", slots::print),
        ("forecast", forecast::print),
    ];
    for (name, print) in parts {
        if named.is_empty() || named.iter().any(|named| named == name) {
            print()?;
        }
    }
    Ok(())
}
