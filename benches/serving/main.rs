//! Serving under load on a simulated machine: the cost of the engine, the effect of policies, and
//! the error of predictions.

mod forecast;
mod policies;
#[path = "../simulation/mod.rs"]
mod simulation;
mod slots;
mod speed;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// Prints the tables of one part.
type Part = fn() -> Result<()>;

/// Runs the parts named in the arguments, or all.
fn main() -> Result<()> {
    let named: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let parts: [(&str, Part); 5] = [
        ("requests", speed::print_requests),
        ("steps", speed::print_steps),
        ("policies", policies::print),
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
