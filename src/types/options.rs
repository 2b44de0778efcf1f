//! The options of an engine and the sampling parameters of a request.

mod beam;
mod formats;
mod grammar;
mod kv_store;
mod model_defaults;
mod policies;
mod sampling;
mod workers;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use beam::{BeamParams, EarlyStopping};
pub use formats::{Dtype, KvDtype, WeightFormat};
pub use grammar::Grammar;
pub use kv_store::KvStoreOptions;
pub use model_defaults::ModelDefaults;
pub use policies::{AllocationPolicy, BatchingPolicy, OrderPolicy, Policies};
pub use sampling::{Dry, Mirostat, OutputKind, SamplingParams};
pub use workers::WorkerOptions;

use crate::error::{Error, Result};
use crate::memory::budget::MemoryBudget;
use crate::sys::threads::{AllowedCpus, MAX_CPUS};

/// The instruction path of the CPU kernels. Results are bit-identical within one path, not across
/// paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Isa {
    /// Plain Rust, vectorized by the compiler for the baseline of the target.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// `Avx512Vnni` and AVX-512 BF16. Activations are rounded to bf16 for the product with bf16
    /// weights. Queries and probabilities are rounded to bf16 for the product with bf16 K and V.
    /// Products are summed in f32. Twice as fast if arithmetic is the bottleneck.
    Avx512Bf16,
    /// `Avx2` and AVX-VNNI: integer weights are multiplied four at a time, with the same result.
    AvxVnni,
    /// `Avx512` and AVX-512 VNNI.
    Avx512Vnni,
}

impl Isa {
    /// All paths, from the narrowest to the widest.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16];

    /// Returns the narrowest path with bit-identical results.
    pub fn bits(self) -> Isa {
        match self {
            Isa::AvxVnni => Isa::Avx2,
            Isa::Avx512Vnni => Isa::Avx512,
            other => other,
        }
    }

    /// Returns the name of the path.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::AvxVnni => "avx_vnni",
            Isa::Avx512Vnni => "avx512_vnni",
        }
    }
}

/// The treatment of the KV blocks of preempted requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Preemption {
    /// Preempted requests lose their KV blocks and are recomputed when they are rescheduled.
    #[default]
    Recompute,
    /// Preempted requests are swapped to the host tier. If it is full, they are recomputed.
    Swap,
    /// The cheaper of both, by the measured costs of swapping and of recomputation.
    Auto,
}

/// The device that runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// The CUDA device with this ordinal.
    Cuda(usize),
}

/// The options of an engine. `None` selects a default.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineOptions {
    /// Model directory in the layout of Hugging Face.
    #[serde(skip)]
    pub model_dir: PathBuf,
    /// Device: "cpu", "cuda" or "cuda:N", or a list of devices that divide the model.
    pub device: String,
    /// Size of the KV pool in bytes. `None` selects the size of `max_seqs` full sequences, at most
    /// 1 GiB.
    pub kv_bytes: Option<u64>,
    /// Budget for the KV pool, instead of `kv_bytes`. Other engines may share it.
    #[serde(skip)]
    pub budget: Option<Arc<MemoryBudget>>,
    /// Tokens per KV block: 8, 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// Weight format. `None` keeps the format of the model files.
    ///
    /// With int4, embedding and head are int8. With fp8, they keep their format. Small tensors with
    /// a large influence (expert routers, learned positions) and the matrices that expand latents
    /// keep their format too.
    #[serde(default)]
    pub weight_format: Option<WeightFormat>,
    /// Directory for packed weights. Packed weights of this model are read from it. If it has none,
    /// they are written after packing. `None` packs the weights at every start.
    #[serde(skip)]
    pub packed_dir: Option<PathBuf>,
    /// KV cache type. `None` selects f32 for models that are stored in f32, otherwise bf16.
    pub kv_dtype: Option<KvDtype>,
    /// Maximum length of a sequence in tokens, prompt and output together. `None` selects the limit
    /// of the model, or what the pool can hold.
    pub max_model_len: Option<usize>,
    /// Maximum number of tokens (prompt and decode tokens of all sequences) in one step.
    pub max_batch_tokens: usize,
    /// Maximum number of running sequences.
    pub max_seqs: usize,
    /// Maximum number of prompt tokens of one sequence in one step. `None` selects
    /// `max_batch_tokens`.
    pub prefill_chunk: Option<usize>,
    /// Threads of the CPU backend, including the stepping thread. `None` selects the number of
    /// `cpus`, or one per core.
    pub threads: Option<usize>,
    /// CPUs to which the threads of the engine are pinned, one each. The first one is for the
    /// stepping thread and applies only to the thread of the engine. `None` leaves the placement to
    /// the system.
    #[serde(skip)]
    pub cpus: Option<Vec<usize>>,
    /// Instruction path. `None` selects the widest path of the machine.
    pub isa: Option<Isa>,
    /// Seed for requests without a seed of their own.
    pub seed: u64,
    /// Whether to serve token ids only. No tokenizer is read, and calls with text fail.
    pub skip_tokenizer: bool,
    /// Capacity of the queue of the engine in outputs. Its requests pause while it is full.
    pub queue_capacity: usize,
    /// Whether to reuse the KV blocks of equal prefixes.
    pub prefix_cache: bool,
    /// Whether results on a CUDA device are independent of the batch, as they always are on the
    /// CPU. Reduces speed.
    pub batch_invariant: bool,
    /// Fraction of the memory of a CUDA device for the KV pool, after weights and working memory.
    /// `None` applies `kv_bytes`.
    pub memory_fraction: Option<f32>,
    /// Limits for requests that wait for their first step, and for their tokens. Further requests
    /// are refused. `None` sets no limit.
    pub max_waiting_requests: Option<usize>,
    /// Maximum number of tokens of waiting requests. `None`: no limit.
    pub max_waiting_tokens: Option<usize>,
    /// Maximum size in bytes of a text prompt, a chat or a text to tokenize. `None` selects the
    /// default of `max_prompt_bytes()`.
    #[serde(skip)]
    pub max_prompt_bytes: Option<usize>,
    /// Treatment of the KV blocks of preempted requests.
    pub preemption: Preemption,
    /// Size of the host tier in bytes. 0 disables it.
    pub swap_bytes: u64,
    /// Directory for the host tier. The tier is an unlinked file there and disappears with the
    /// engine. `None` keeps the tier in memory. An empty path is a file in memory, for replays.
    #[serde(with = "is_set")]
    pub swap_dir: Option<PathBuf>,
    /// Order, batching and allocation policies of the scheduler.
    pub policies: Policies,
    /// File for a trace of all steps in Chrome's trace event format.
    #[serde(skip)]
    pub trace_path: Option<PathBuf>,
    /// File for a journal of all inputs, from which the steps can be replayed.
    #[serde(skip)]
    pub journal_path: Option<PathBuf>,
    /// Name of the model in the metrics. `None` selects the name of the model directory.
    #[serde(skip)]
    pub model_name: Option<String>,
    /// Store for KV blocks outside of the pool. `None`: blocks stay in the pool.
    #[serde(default)]
    pub kv_store: Option<KvStoreOptions>,
    /// Maximum number of unread events of the prefix cache. 0: none are recorded.
    #[serde(skip)]
    pub kv_events_capacity: usize,
    /// Division of the model among several workers.
    #[serde(skip)]
    pub workers: WorkerOptions,
}

/// The limit of the priority of a request, which ranges from `-MAX_PRIORITY` to `MAX_PRIORITY`.
pub const MAX_PRIORITY: i32 = 100;

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            model_dir: PathBuf::new(),
            device: "cpu".into(),
            kv_bytes: None,
            budget: None,
            block_size: 16,
            weight_format: None,
            packed_dir: None,
            kv_dtype: None,
            max_model_len: None,
            max_batch_tokens: 512,
            max_seqs: 64,
            prefill_chunk: None,
            threads: None,
            cpus: None,
            isa: None,
            seed: 0,
            skip_tokenizer: false,
            queue_capacity: Self::DEFAULT_QUEUE_CAPACITY,
            prefix_cache: true,
            batch_invariant: false,
            memory_fraction: None,
            max_waiting_requests: None,
            max_waiting_tokens: None,
            max_prompt_bytes: None,
            preemption: Preemption::Recompute,
            swap_bytes: 0,
            swap_dir: None,
            policies: Policies::default(),
            trace_path: None,
            journal_path: None,
            model_name: None,
            kv_store: None,
            kv_events_capacity: 0,
            workers: WorkerOptions::default(),
        }
    }
}

impl EngineOptions {
    /// Default size of the KV pool in bytes.
    pub const DEFAULT_KV_BYTES: u64 = 1 << 30;
    /// Default capacity of a queue in outputs.
    pub const DEFAULT_QUEUE_CAPACITY: usize = 1 << 16;
    /// Maximum of `max_batch_tokens`.
    pub const MAX_BATCH_TOKENS: usize = 1 << 20;
    /// Maximum of `kv_events_capacity`.
    pub const MAX_KV_EVENTS: usize = 1 << 20;
    const MAX_SEQS: usize = 1 << 16;
    const MAX_THREADS: usize = 1024;
    const PROMPT_BYTES_PER_TOKEN: usize = 64;
    const MIN_DEFAULT_PROMPT_BYTES: usize = 1 << 20;

    /// Returns the limit in bytes for texts that are tokenized.
    pub fn max_prompt_bytes(&self, max_model_len: usize) -> usize {
        let default = max_model_len.saturating_mul(Self::PROMPT_BYTES_PER_TOKEN).max(Self::MIN_DEFAULT_PROMPT_BYTES);
        self.max_prompt_bytes.unwrap_or(default)
    }

    /// Returns the maximum number of tokens of one sequence in one step.
    pub fn rows_at_once(&self) -> usize {
        self.prefill_chunk.map_or(self.max_batch_tokens, |chunk| chunk.min(self.max_batch_tokens))
    }

    /// Parses `device`, which is one device, or one for each of several workers of this process.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let digits = |name: &&str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        let ordinal = |name: &str| name.strip_prefix("cuda:").filter(digits)?.parse().ok();
        let names = self.device.split(',').count();
        if names > WorkerOptions::MAX_DEVICES {
            return Err(Error::invalid(format!("device names {names} devices; give at most {}", WorkerOptions::MAX_DEVICES)));
        }
        let mut devices = Vec::new();
        for name in self.device.split(',') {
            let device = match name {
                "cpu" => Some(Device::Cpu),
                "cuda" => Some(Device::Cuda(0)),
                name => ordinal(name).map(Device::Cuda),
            };
            devices.push(device.ok_or_else(|| {
                Error::unsupported(format!(
                    "device is {:?}; must be \"cpu\" or \"cuda:N\", where N is the number of a CUDA device, or a list such as \
                     \"cuda:0,cuda:1\"",
                    self.device
                ))
            })?);
        }
        Ok(devices)
    }

    /// Returns the device, or the first one of several.
    pub fn device(&self) -> Result<Device> {
        self.devices().map(|devices| devices[0])
    }

    /// Returns the number of compute threads of a worker. Other devices than the CPU use only the
    /// stepping thread.
    pub fn thread_count(&self) -> usize {
        let devices = match self.devices() {
            Ok(devices) if devices[0] == Device::Cpu => devices.len(),
            _ => return 1,
        };
        let pinned = self.cpus.as_ref().map(Vec::len);
        let available = || (std::thread::available_parallelism().map_or(1, |n| n.get()) / devices).max(1);
        self.threads.or(pinned).unwrap_or_else(available)
    }

    /// Checks the values of the options.
    pub fn validate(&self) -> Result<()> {
        match self.device()? {
            Device::Cpu => self.validate_on_cpu()?,
            Device::Cuda(_) => self.validate_on_cuda()?,
        }
        if !(8..=256).contains(&self.block_size) || !self.block_size.is_power_of_two() {
            return Err(Error::invalid(format!("block_size is {}; must be 8, 16, 32, 64, 128 or 256", self.block_size)));
        }
        if self.budget.is_some() && self.kv_bytes.is_some() {
            return Err(Error::invalid("kv_bytes and budget are both set; the pool has the bytes of the budget, so unset kv_bytes"));
        }
        if self.budget.is_some() && self.policies.allocation == AllocationPolicy::Contiguous {
            return Err(Error::invalid(
                "budget is set and the allocation policy is Contiguous, whose pool has a fixed size; unset one of them",
            ));
        }
        within("max_batch_tokens", self.max_batch_tokens, Self::MAX_BATCH_TOKENS)?;
        within("max_seqs", self.max_seqs, Self::MAX_SEQS)?;
        if self.max_batch_tokens < self.max_seqs {
            return Err(Error::invalid(format!(
                "max_batch_tokens is {} and max_seqs is {}; each running sequence needs one token per step, so raise max_batch_tokens or lower max_seqs",
                self.max_batch_tokens, self.max_seqs
            )));
        }
        if let Some(chunk) = self.prefill_chunk {
            within("prefill_chunk", chunk, Self::MAX_BATCH_TOKENS)?;
        }
        if let Some(threads) = self.threads {
            within("threads", threads, Self::MAX_THREADS)?;
        }
        if let Some(cpus) = &self.cpus {
            self.validate_cpus(cpus)?;
        }
        if let Some(WeightFormat::Int4 { group, .. }) = self.weight_format
            && !WeightFormat::GROUPS.contains(&group)
        {
            return Err(Error::invalid(format!("weight_group is {group}; must be one of {:?}", WeightFormat::GROUPS)));
        }
        self.validate_prefix_cache()?;
        self.policies.validate()?;
        self.workers.validate(self)?;
        self.validate_swapping()
    }

    /// Validates the options that need the prefix cache.
    fn validate_prefix_cache(&self) -> Result<()> {
        self.kv_store.as_ref().map_or(Ok(()), KvStoreOptions::validate)?;
        if self.kv_events_capacity > Self::MAX_KV_EVENTS {
            return Err(Error::invalid(format!(
                "kv_events_capacity is {}; must be at most {}",
                self.kv_events_capacity,
                Self::MAX_KV_EVENTS
            )));
        }
        let needs = [("kv_store", self.kv_store.is_some()), ("kv_events_capacity", self.kv_events_capacity > 0)];
        match needs.into_iter().find(|(_, is_set)| *is_set && !self.prefix_cache) {
            Some((name, _)) => {
                Err(Error::invalid(format!("{name} is set and the prefix cache is disabled; unset PLLM_ENGINE_NO_PREFIX_CACHE or {name}")))
            }
            None => Ok(()),
        }
    }

    /// Validates options for the CPU. A fraction of its memory is not supported, since the host
    /// shares it.
    fn validate_on_cpu(&self) -> Result<()> {
        if let Some(fraction) = self.memory_fraction {
            return Err(Error::unsupported(format!(
                "memory_fraction is {fraction} and device is \"cpu\"; memory_fraction is for CUDA devices, so set kv_bytes or neither"
            )));
        }
        match self.weight_format {
            Some(WeightFormat::Fp8) => {
                Err(Error::unsupported("weight_format is fp8 and device is \"cpu\"; fp8 is for CUDA devices, use int8"))
            }
            _ => Ok(()),
        }
    }

    /// Validates options for a CUDA device. Options of the CPU backend are rejected.
    fn validate_on_cuda(&self) -> Result<()> {
        let refused = |what: &str| Err(Error::unsupported(format!("device is {:?} and {what}", self.device)));
        if let Some(fraction) = self.memory_fraction {
            // NaN fails this comparison.
            if !(0.01..=1.0).contains(&fraction) {
                return Err(Error::invalid(format!("memory_fraction is {fraction}; must be 0.01 to 1")));
            }
            if self.kv_bytes.is_some() || self.budget.is_some() {
                return Err(Error::invalid("memory_fraction excludes kv_bytes and budget; set one of the three"));
            }
        }
        if self.packed_dir.is_some() {
            return refused("packed_path is set; packed weights are for the CPU, so unset it");
        }
        if self.isa.is_some() {
            return refused("isa is set; it selects CPU instructions, so unset it");
        }
        Ok(())
    }

    /// Checks that `cpus` names allowed, distinct CPUs, one for each thread.
    fn validate_cpus(&self, cpus: &[usize]) -> Result<()> {
        if self.thread_count() != cpus.len() {
            let threads = self.thread_count();
            return Err(Error::invalid(format!(
                "cpus has {} CPUs and threads is {threads}; list one CPU for each thread or unset threads",
                cpus.len()
            )));
        }
        let allowed = AllowedCpus::read()?;
        for (i, cpu) in cpus.iter().enumerate() {
            if cpus[..i].contains(cpu) {
                return Err(Error::invalid(format!("cpus has CPU {cpu} twice; list each CPU once")));
            }
            if !allowed.has(*cpu) {
                return Err(Error::unsupported(format!(
                    "cpus has CPU {cpu}, which this process may not use; it may use {} CPUs from {} to {}",
                    allowed.iter().count(),
                    allowed.iter().next().unwrap_or_default(),
                    allowed.iter().last().unwrap_or_default()
                )));
            }
        }
        Ok(())
    }

    /// Rejects a host tier that the preemption mode would not use, and the reverse.
    fn validate_swapping(&self) -> Result<()> {
        match (self.preemption, self.swap_bytes, &self.swap_dir) {
            (Preemption::Recompute, bytes @ 1.., _) => Err(Error::invalid(format!(
                "swap_bytes is {bytes} and preemption is PLLM_PREEMPTION_RECOMPUTE, so nothing would be swapped; set swap_bytes to 0 or choose another preemption"
            ))),
            (Preemption::Swap | Preemption::Auto, 0, _) => {
                Err(Error::invalid("preemption can swap and swap_bytes is 0; raise swap_bytes or choose PLLM_PREEMPTION_RECOMPUTE"))
            }
            (_, 0, Some(dir)) => Err(Error::invalid(format!("swap_path is {} and swap_bytes is 0; set swap_bytes", dir.display()))),
            _ => Ok(()),
        }
    }
}

/// Parses a list of CPUs in the syntax of `taskset -c`: numbers and ranges, such as 0-3,8.
pub fn cpu_list(text: &str) -> Result<Vec<usize>> {
    let wrong = |what: &str| Error::invalid(format!("cpus is {text:?}: {what}; write numbers and ranges, such as 0-3,8"));
    let number = |text: &str| {
        let number = text.parse::<usize>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        let number = number.ok_or_else(|| wrong("not a list of CPUs"))?;
        if number < MAX_CPUS { Ok(number) } else { Err(wrong(&format!("CPUs have numbers below {MAX_CPUS}"))) }
    };
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(wrong(&format!("the range {part} is empty")));
        }
        if cpus.len() + (last - first) >= MAX_CPUS {
            return Err(wrong(&format!("those are more than {MAX_CPUS}")));
        }
        cpus.try_reserve(last - first + 1)?;
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

fn within(name: &str, value: usize, max: usize) -> Result<()> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}; must be 1 to {max}")))
}

/// Records that a path is set, but not the path: it concerns only the host.
mod is_set {
    use std::path::PathBuf;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.is_some().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        Ok(bool::deserialize(deserializer)?.then(PathBuf::new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_powers_of_two_from_8_to_256() {
        for (size, ok) in [(0, false), (4, false), (8, true), (12, false), (256, true), (512, false)] {
            assert_eq!(EngineOptions { block_size: size, ..Default::default() }.validate().is_ok(), ok, "{size}");
        }
    }

    #[test]
    fn cpu_lists_have_the_format_of_linux() {
        assert_eq!(cpu_list("0-3,8").unwrap(), [0, 1, 2, 3, 8]);
        assert_eq!(cpu_list("5").unwrap(), [5]);
        assert_eq!(cpu_list("1023,7-7").unwrap(), [1023, 7]);
        for (text, message) in [
            ("", "not a list"),
            ("a", "not a list"),
            ("-1", "not a list"),
            ("+1", "not a list"),
            ("1-", "not a list"),
            ("1--2", "not a list"),
            ("1,,2", "not a list"),
            (" 1", "not a list"),
            ("3-1", "the range 3-1 is empty"),
            ("1024", "below 1024"),
            ("0-4294967295", "below 1024"),
            ("99999999999999999999", "not a list"),
            ("0-1023,0", "more than 1024"),
        ] {
            let error = cpu_list(text).unwrap_err();
            assert!(error.message().contains(message), "{text}: {error}");
        }
    }
}
