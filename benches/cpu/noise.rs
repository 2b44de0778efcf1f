//! CPU time of other processes during a measurement. Results of a busy machine are not kept.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

/// Share of the cores above which a measurement is noisy.
const MAX_NOISE: f64 = 0.1;

/// Shares of all cores.
#[derive(Debug, Clone, Copy, Default)]
pub struct Noise {
    /// Used by other processes.
    pub other: f64,
    /// Taken by the hypervisor.
    pub steal: f64,
    /// Used by this process and its worker.
    pub own: f64,
}

impl Noise {
    pub fn is_noisy(&self) -> bool {
        self.other.max(self.steal) > MAX_NOISE
    }

    pub fn json(&self) -> Value {
        let round = |share: f64| (share * 1000.0).round() / 1000.0;
        json!({"other": round(self.other), "steal": round(self.steal)})
    }
}

/// Clock ticks since the start of the machine.
#[derive(Default)]
struct Ticks {
    busy: f64,
    steal: f64,
    own: f64,
}

impl Ticks {
    /// `child` is the worker process, if it has started.
    fn now(child: Option<u32>) -> Option<Ticks> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let cpu: Vec<f64> = stat.lines().next()?.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal; guest time is in user time too
        let &[user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = cpu.as_slice() else { return None };
        let own = process("self")? + child.map_or(Some(0.0), |child| process(&child.to_string()))?;
        Some(Ticks { busy: user + nice + system + irq + softirq, steal, own })
    }
}

/// Clock ticks of all threads of a process.
fn process(pid: &str) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect(); // the name before it may contain spaces
    Some(fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?)
}

/// Measures the noise between `start` and `stop`. Without /proc the result is zero.
pub struct NoiseMonitor {
    since: Instant,
    ticks: Ticks,
}

impl NoiseMonitor {
    pub fn start(child: Option<u32>) -> NoiseMonitor {
        NoiseMonitor { since: Instant::now(), ticks: Ticks::now(child).unwrap_or_default() }
    }

    /// The child may have started after `start`.
    pub fn stop(self, child: Option<u32>) -> Noise {
        let Some(ticks) = Ticks::now(child) else { return Noise::default() };
        // SAFETY: the call takes no pointers.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as f64;
        let all = (self.since.elapsed().as_secs_f64() * per_second * cores).max(1.0);
        let own = ticks.own - self.ticks.own;
        let other = (ticks.busy - self.ticks.busy) - own;
        Noise { other: other.max(0.0) / all, steal: (ticks.steal - self.ticks.steal) / all, own: own / all }
    }
}
