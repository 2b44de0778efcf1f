//! Which factor moves the ratio of sustained rates, one at a time.

use pagedllm::types::options::AllocationPolicy;
use serde_json::{Value, json};

use crate::rates::{guess, jobs};
use crate::simulation::Machine;
use crate::simulation::workload::{ALPACA, Lengths, MAX_LEN, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, map, round};

/// A change of the experiment.
struct Factor {
    name: &'static str,
    deployment: Deployment,
    machine: fn(Machine) -> Machine,
    lengths: Lengths,
    /// On demand, and three that reserve.
    systems: [System; 4],
}

const NONE: Factor =
    Factor { name: "as in Figure 12", deployment: OPT_13B, machine: |machine| machine, lengths: SHAREGPT, systems: CONTIGUOUS };
const SHORT: Factor = Factor { lengths: ALPACA, ..NONE };
const LARGE: Factor = Factor { deployment: OPT_175B, ..NONE };

const CONTIGUOUS: [System; 4] = [OURS, ORACLE, POW2, MAX];
const PROMPTS_FIRST: [System; 4] = [VLLM, ORACLE, POW2, MAX];
const IN_BLOCKS: [System; 4] = [OURS, in_blocks(ORACLE), in_blocks(POW2), in_blocks(MAX)];

const fn in_blocks(system: System) -> System {
    let mut system = system;
    system.policies.allocation = AllocationPolicy::MaxTokens;
    system
}

fn slower<const MS: u32>(machine: Machine) -> Machine {
    Machine { overhead: machine.overhead + f64::from(MS) * 1e-3, ..machine }
}

fn data_sheet(machine: Machine) -> Machine {
    Machine { slots: machine.slots, ..Machine::PAPER }
}

const FACTORS: [Factor; 17] = [
    NONE,
    Factor { name: "reserved in blocks, not contiguous", systems: IN_BLOCKS, ..NONE },
    Factor { name: "on demand as vLLM 0.1.2: prompts first, 256 sequences", systems: PROMPTS_FIRST, ..NONE },
    Factor { name: "all of the bandwidth and of the operations, without overlap", machine: data_sheet, ..NONE },
    Factor { name: "20 ms more per step", machine: slower::<20>, ..NONE },
    Factor { name: "K and V take no time to read", machine: |machine| Machine { position: 0.0, ..machine }, ..NONE },
    Factor {
        name: "K and V take twice as long to read",
        machine: |machine| Machine { position: 2.0 * machine.position, ..machine },
        ..NONE
    },
    Factor { name: "pool of twice the size", machine: |machine| Machine { slots: 2 * machine.slots, ..machine }, ..NONE },
    Factor { name: "lengths with half the deviation", lengths: Lengths { deviation: 0.5, ..SHAREGPT }, ..NONE },
    Factor { name: "lengths with 1.3 times the deviation", lengths: Lengths { deviation: 1.3, ..SHAREGPT }, ..NONE },
    SHORT,
    Factor { name: "lengths with 0.7 times the deviation", lengths: Lengths { deviation: 0.7, ..ALPACA }, ..SHORT },
    Factor { name: "0.2 ms more per token", machine: |machine| Machine { row: machine.row + 2e-4, ..machine }, ..SHORT },
    LARGE,
    Factor { name: "pool of half the size", machine: |machine| Machine { slots: machine.slots / 2, ..machine }, ..LARGE },
    Factor { name: "20 ms more per step", machine: slower::<20>, ..LARGE },
    Factor { name: "50 ms more per step", machine: slower::<50>, ..LARGE },
];

pub fn ablation(scale: &Scale) -> Result<Value> {
    let factors = &FACTORS[..scale.of(FACTORS.len(), 2)];
    let rows = map(factors, |factor| {
        let jobs = jobs(factor.lengths);
        let machine = (factor.machine)(factor.deployment.machine()?);
        let load = Load { machine, jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
        let sustained = |system: System| load.sustained(&system.options(), &system, guess(&factor.lengths));
        let [on_demand, oracle, pow2, max] = factor.systems;
        let ours = sustained(on_demand)?;
        let mut row =
            json!({ "model": factor.deployment.name, "data": factor.lengths.name, "factor": factor.name, "sustained": round(ours) });
        for (system, key) in [(oracle, "oracle"), (pow2, "pow2"), (max, "max")] {
            row[key] = json!(round(ours / sustained(system)?));
        }
        Ok(row)
    })?;
    Ok(json!({ "trace_seconds": scale.seconds(), "rows": rows }))
}
