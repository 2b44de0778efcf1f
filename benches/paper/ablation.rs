//! Which factor moves the ratio of sustained rates: one at a time, OPT-13B and ShareGPT.

use pagedllm::types::options::AllocationPolicy;
use serde_json::{Value, json};

use crate::rates::jobs;
use crate::simulation::Machine;
use crate::simulation::workload::{Lengths, MAX_LEN, SHAREGPT};
use crate::systems::*;
use crate::{Result, Scale, map, round};

/// A change of the experiment: its name, the machine, the lengths, and the systems: on demand, and
/// those that reserve.
type Factor = (&'static str, fn(Machine) -> Machine, Lengths, [System; 4]);

const CONTIGUOUS: [System; 4] = [OURS, ORACLE, POW2, MAX];
const PROMPTS_FIRST: [System; 4] = [VLLM, ORACLE, POW2, MAX];
const IN_BLOCKS: [System; 4] = [OURS, in_blocks(ORACLE), in_blocks(POW2), in_blocks(MAX)];

const fn in_blocks(system: System) -> System {
    let mut system = system;
    system.policies.allocation = AllocationPolicy::MaxTokens;
    system
}

const FACTORS: [Factor; 10] = [
    ("as in Figure 12", |machine| machine, SHAREGPT, CONTIGUOUS),
    ("reserved in blocks, not contiguous", |machine| machine, SHAREGPT, IN_BLOCKS),
    ("prompts first (vLLM 0.1.2) instead of mixed steps", |machine| machine, SHAREGPT, PROMPTS_FIRST),
    ("step costs of the data sheet, no overlap", |machine| Machine { slots: machine.slots, ..Machine::PAPER }, SHAREGPT, CONTIGUOUS),
    ("20 ms more per step", |machine| Machine { overhead: machine.overhead + 20e-3, ..machine }, SHAREGPT, CONTIGUOUS),
    ("K and V take no time to read", |machine| Machine { position: 0.0, ..machine }, SHAREGPT, CONTIGUOUS),
    ("K and V take twice as long to read", |machine| Machine { position: 2.0 * machine.position, ..machine }, SHAREGPT, CONTIGUOUS),
    ("pool of twice the size", |machine| Machine { slots: 2 * machine.slots, ..machine }, SHAREGPT, CONTIGUOUS),
    ("lengths with half the deviation", |machine| machine, Lengths { deviation: 0.5, ..SHAREGPT }, CONTIGUOUS),
    ("lengths with 1.3 times the deviation", |machine| machine, Lengths { deviation: 1.3, ..SHAREGPT }, CONTIGUOUS),
];

pub fn ablation(scale: &Scale) -> Result<Value> {
    let factors = &FACTORS[..scale.of(FACTORS.len(), 2)];
    let rows = map(factors, |&(name, machine, lengths, [on_demand, oracle, pow2, max])| {
        let jobs = jobs(lengths);
        let load = Load { machine: machine(OPT_13B.machine()?), jobs: &jobs, seconds: scale.seconds(), max_output: MAX_LEN };
        let sustained = |system: System| load.sustained(&system.options(), &system, 1.5);
        let ours = sustained(on_demand)?;
        let mut row = json!({ "factor": name, "sustained": round(ours) });
        for (system, key) in [(oracle, "oracle"), (pow2, "pow2"), (max, "max")] {
            row[key] = json!(round(ours / sustained(system)?));
        }
        Ok(row)
    })?;
    Ok(json!({ "trace_seconds": scale.seconds(), "rows": rows }))
}
