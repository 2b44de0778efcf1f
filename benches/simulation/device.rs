//! Descriptions of machines.

use std::path::Path;

use serde::Deserialize;

/// Errors are for the user of a simulation, as `problem (value, limit); remedy`.
pub type Result<T> = std::result::Result<T, String>;

/// A device by its data sheet, and the parts of it that kernels reach.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    pub name: String,
    /// Origin of the numbers.
    pub source: String,
    pub memory_bytes: u64,
    /// Bytes per second.
    pub memory_bandwidth: f64,
    /// Operations per second in 16 bits; a multiplication and an addition are two.
    pub flops: f64,
    /// Share of the bandwidth that a step reaches.
    pub bandwidth_efficiency: f64,
    /// Share of the operations that a step reaches.
    pub compute_efficiency: f64,
    /// Time per step that is neither reading nor computing, in microseconds.
    pub step_overhead_us: f64,
    /// Bytes per second to other devices, in one direction. 0: none.
    #[serde(default)]
    pub link_bandwidth: f64,
    /// Time of an exchange of a few bytes between all devices, in microseconds.
    #[serde(default)]
    pub link_latency_us: f64,
    /// Bytes per second to the memory of the host, in one direction. 0: swapping takes no time.
    #[serde(default)]
    pub host_bandwidth: f64,
    /// Time to start a copy to the host, in microseconds.
    #[serde(default)]
    pub host_latency_us: f64,
}

/// The descriptions in machines/.
pub const KNOWN: [(&str, &str); 6] = [
    ("a100-40gb", include_str!("machines/a100-40gb.json")),
    ("a100-80gb", include_str!("machines/a100-80gb.json")),
    ("h100", include_str!("machines/h100.json")),
    ("h200", include_str!("machines/h200.json")),
    ("b200", include_str!("machines/b200.json")),
    ("epyc-9654", include_str!("machines/epyc-9654.json")),
];

impl Device {
    /// Reads a file, or selects a known machine by its name.
    pub fn load(name: &str) -> Result<Device> {
        let known = KNOWN.into_iter().find(|(known, _)| *known == name).map(|(_, text)| text.to_string());
        let text = known
            .map_or_else(|| std::fs::read_to_string(Path::new(name)), Ok)
            .map_err(|error| format!("machine {name}: {error}; pass a JSON file or one of {}", KNOWN.map(|(name, _)| name).join(", ")))?;
        let device: Device = serde_json::from_str(&text).map_err(|error| format!("machine {name}: {error}"))?;
        device.check().map_err(|problem| format!("machine {name}: {problem}"))?;
        Ok(device)
    }

    pub fn check(&self) -> Result<()> {
        // Smaller numbers are in other units.
        let rates = [("memory_bandwidth", self.memory_bandwidth), ("flops", self.flops)];
        if let Some((name, value)) = rates.into_iter().find(|(_, value)| !(*value >= 1e9 && value.is_finite())) {
            return Err(format!("{name} is {value}; must be at least 1e9 per second"));
        }
        let links = [("link_bandwidth", self.link_bandwidth), ("host_bandwidth", self.host_bandwidth)];
        if let Some((name, value)) = links.into_iter().find(|(_, value)| !(*value == 0.0 || *value >= 1e6 && value.is_finite())) {
            return Err(format!("{name} is {value}; must be 0 or at least 1e6 bytes per second"));
        }
        let shares = [("bandwidth_efficiency", self.bandwidth_efficiency), ("compute_efficiency", self.compute_efficiency)];
        if let Some((name, value)) = shares.into_iter().find(|(_, value)| !(*value > 0.0 && *value <= 1.0)) {
            return Err(format!("{name} is {value}; must be above 0 to 1"));
        }
        let others = [
            ("step_overhead_us", self.step_overhead_us),
            ("link_latency_us", self.link_latency_us),
            ("host_latency_us", self.host_latency_us),
        ];
        if let Some((name, value)) = others.into_iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            return Err(format!("{name} is {value}; must be 0 to 1e6"));
        }
        if self.memory_bytes == 0 {
            return Err("memory_bytes is 0; a machine needs memory".into());
        }
        Ok(())
    }
}
