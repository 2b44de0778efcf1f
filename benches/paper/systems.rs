//! The systems, models and machines of the paper.

use pagedllm::types::options::{AllocationPolicy, BatchingPolicy, EngineOptions, OrderPolicy, Policies};

use crate::Result;
use crate::simulation::device::Device;
use crate::simulation::measurement::{Measurement, options};
use crate::simulation::model::{Model, Parallel};
use crate::simulation::workload::MAX_LEN;
use crate::simulation::{Job, Machine, Observer, Served, Simulation};

/// A serving system, as policies of the production scheduler.
#[derive(Debug, Clone, Copy)]
pub struct System {
    pub name: &'static str,
    pub policies: Policies,
    pub max_tokens: MaxTokens,
    pub max_batch_tokens: usize,
    pub max_seqs: usize,
}

/// What a system knows of the length of an output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaxTokens {
    /// The true length.
    Known,
    /// The next power of two.
    PowerOfTwo,
    /// Only the limit.
    Maximum,
}

impl MaxTokens {
    /// Returns the `max_tokens` of a request, of which an output may have `limit` tokens.
    fn of(self, job: &Job, limit: usize) -> usize {
        match self {
            MaxTokens::Known => job.output,
            MaxTokens::PowerOfTwo => job.output.next_power_of_two().min(limit),
            MaxTokens::Maximum => limit,
        }
    }
}

const fn policies(batching: BatchingPolicy, allocation: AllocationPolicy) -> Policies {
    Policies { order: OrderPolicy::Fcfs, batching, allocation }
}

const fn mixed(name: &'static str, allocation: AllocationPolicy, max_tokens: MaxTokens) -> System {
    System { name, policies: policies(BatchingPolicy::Mixed, allocation), max_tokens, max_batch_tokens: 2048, max_seqs: 512 }
}

/// Decodes run only in steps without prompts.
const PREFILL_FIRST: BatchingPolicy = BatchingPolicy::PrefillFirst { threshold: EngineOptions::MAX_BATCH_TOKENS };

pub const OURS: System = mixed("libpagedllm", AllocationPolicy::OnDemand, MaxTokens::Maximum);
/// The default limits of vLLM 0.1.2. Unlike it, the scheduler may cut a prompt in two.
pub const VLLM: System = System {
    name: "vLLM 0.1.2",
    policies: policies(PREFILL_FIRST, AllocationPolicy::OnDemand),
    max_batch_tokens: 2560,
    max_seqs: 256,
    ..OURS
};
pub const TRT_RESERVED: System = mixed("TensorRT-LLM, reserved", AllocationPolicy::MaxTokens, MaxTokens::Maximum);
pub const ORACLE: System = mixed("Orca (Oracle)", AllocationPolicy::Contiguous, MaxTokens::Known);
pub const POW2: System = mixed("Orca (Pow2)", AllocationPolicy::Contiguous, MaxTokens::PowerOfTwo);
pub const MAX: System = mixed("Orca (Max)", AllocationPolicy::Contiguous, MaxTokens::Maximum);
/// A batch has as many requests as fit into memory: all their prompts are computed in one step.
pub const FASTER_TRANSFORMER: System = System {
    name: "FasterTransformer",
    policies: policies(BatchingPolicy::Static, AllocationPolicy::Contiguous),
    max_batch_tokens: 1 << 16,
    ..MAX
};

impl System {
    pub fn options(&self) -> EngineOptions {
        EngineOptions { max_batch_tokens: self.max_batch_tokens, max_seqs: self.max_seqs, ..options(self.policies) }
    }

    /// Returns the jobs with the `max_tokens` of this system, for outputs up to `max_output`.
    pub fn jobs(&self, mut jobs: Vec<Job>, max_output: usize) -> Vec<Job> {
        jobs.iter_mut().for_each(|job| job.max_tokens = self.max_tokens.of(job, max_output.min(MAX_LEN - job.prompt)));
        jobs
    }
}

/// A model and the machine on which the paper serves it (Table 1).
#[derive(Debug, Clone, Copy)]
pub struct Deployment {
    pub name: &'static str,
    config: &'static str,
    pub device: &'static str,
    pub devices: usize,
    /// KV slots in Table 1.
    pub slots: usize,
}

const fn deployment(name: &'static str, config: &'static str, device: &'static str, devices: usize, slots: usize) -> Deployment {
    Deployment { name, config, device, devices, slots }
}

pub const OPT_13B: Deployment = deployment("OPT-13B", "opt-13b", "a100-40gb", 1, 15_700);
pub const OPT_66B: Deployment = deployment("OPT-66B", "opt-66b", "a100-40gb", 4, 9_700);
pub const OPT_175B: Deployment = deployment("OPT-175B", "opt-175b", "a100-80gb", 8, 60_100);
pub const LLAMA_13B: Deployment = deployment("LLaMA-13B", "llama-13b", "a100-40gb", 1, 15_700);

impl Deployment {
    pub fn model(&self) -> Result<Model> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("benches/paper/models/{}.json", self.config));
        Ok(Model::load(&path)?)
    }

    pub fn device(&self) -> Result<Device> {
        Ok(Device::load(self.device)?)
    }

    /// Returns the machine with the memory that `Model::on` computes.
    pub fn computed(&self) -> Result<Machine> {
        Ok(self.model()?.on(&self.device()?, Parallel::tensor(self.devices), None)?)
    }

    /// Returns the machine with the memory of Table 1.
    pub fn machine(&self) -> Result<Machine> {
        Ok(Machine { slots: self.slots, max_model_len: MAX_LEN, ..self.computed()? })
    }
}

/// The highest normalized latency, in seconds per token, of a rate that a system sustains.
pub const SUSTAINED: f64 = 0.2;

/// Ends a simulation when the latencies of finished requests alone are too high.
struct LatencyLimit {
    sum: f64,
    max: f64,
}

impl Observer for LatencyLimit {
    fn finished(&mut self, served: &Served) {
        self.sum += served.normalized_latency().as_secs_f64();
    }

    fn is_over(&self) -> bool {
        self.sum >= self.max
    }
}

/// An experiment: requests at a rate on a machine.
pub struct Load<'a> {
    pub machine: Machine,
    /// Returns the requests at a rate per second, for a number of seconds.
    pub jobs: &'a (dyn Fn(f64, f64) -> Vec<Job> + Sync),
    pub seconds: f64,
    pub max_output: usize,
}

impl Load<'_> {
    pub fn run(&self, options: &EngineOptions, system: &System, rate: f64) -> Result<Measurement> {
        Ok(Measurement::run(options, self.machine, &system.jobs((self.jobs)(rate, self.seconds), self.max_output))?)
    }

    /// Returns the highest rate at which the normalized latency is below `SUSTAINED`, within 3 %.
    /// The search begins at `guess`.
    pub fn sustained(&self, options: &EngineOptions, system: &System, guess: f64) -> Result<f64> {
        self.highest(guess, |rate| {
            let jobs = system.jobs((self.jobs)(rate, self.seconds), self.max_output);
            let mut limit = LatencyLimit { sum: 0.0, max: SUSTAINED * jobs.len() as f64 };
            Simulation::new(options, self.machine)?.serve(&jobs, &mut limit)?;
            Ok(!limit.is_over())
        })
    }

    /// Returns the highest rate that a system sustains, within 3 %.
    pub fn highest(&self, guess: f64, is_sustained: impl Fn(f64) -> Result<bool>) -> Result<f64> {
        let (mut low, mut high) = (guess, 2.0 * guess);
        if is_sustained(guess)? {
            while is_sustained(high)? {
                (low, high) = (high, 2.0 * high);
            }
        } else {
            (low, high) = (guess / 2.0, guess);
            while !is_sustained(low)? {
                (low, high) = (low / 2.0, low);
                if low < guess / 4096.0 {
                    return Err(format!("no rate down to {low} is sustained").into());
                }
            }
        }
        while high / low > 1.03 {
            let rate = (low * high).sqrt();
            match is_sustained(rate)? {
                true => low = rate,
                false => high = rate,
            }
        }
        Ok(low)
    }
}
