//! What a host may choose: the engine's options and a request's sampling parameters.

mod policies;
mod sampling;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use policies::{AllocationPolicy, BatchingPolicy, OrderPolicy, Policies};
pub use sampling::{Dry, Mirostat, OutputKind, SamplingParams};

use crate::arena::Arena;
use crate::error::{Error, Result, try_concat, try_texts};
use crate::sys::threads::{AllowedCpus, MOST_CPUS};

/// The instruction path of the CPU kernels. Bits are the same within one path, not across paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Isa {
    /// Plain Rust that the compiler vectorizes for the target's baseline.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same as `Avx512Vnni`, and AVX-512 BF16: weights that are kept in bf16 are multiplied by activations that are rounded to it, K and V
    /// in bf16 by queries and probabilities that are, and the products are summed in f32. Twice as fast where arithmetic is the limit.
    Avx512Bf16,
    /// The same as `Avx2`, and AVX-VNNI: weights in whole numbers are multiplied four at a time, with the same result.
    AvxVnni,
    /// The same as `Avx512`, and AVX-512 VNNI.
    Avx512Vnni,
}

impl Isa {
    /// From the narrowest to the widest.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16];

    /// The narrowest path that gives the same bits.
    pub fn bits(self) -> Isa {
        match self {
            Isa::AvxVnni => Isa::Avx2,
            Isa::Avx512Vnni => Isa::Avx512,
            other => other,
        }
    }

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

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Each number of little-endian bytes, with its place.
    pub fn visit(self, bytes: &[u8], mut visit: impl FnMut(usize, f32)) {
        match self {
            Dtype::F32 => bytes.as_chunks().0.iter().enumerate().for_each(|(i, b)| visit(i, f32::from_le_bytes(*b))),
            Dtype::F16 => bytes.as_chunks().0.iter().enumerate().for_each(|(i, b)| visit(i, half::f16::from_le_bytes(*b).to_f32())),
            Dtype::Bf16 => bytes.as_chunks().0.iter().enumerate().for_each(|(i, b)| visit(i, half::bf16::from_le_bytes(*b).to_f32())),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// How weights are kept. Those in whole numbers are multiplied by rows in whole numbers, of -127 to 127, which are made of activations as they
/// come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightFormat {
    F32,
    F16,
    Bf16,
    /// OCP's E4M3, with a scale for each output: floating point of 8 bits, for CUDA devices.
    Fp8,
    /// From -127 to 127, with a scale for each output.
    Int8,
    /// 16 steps, with a scale for each group of an output's inputs. With offsets they begin at the least weight of the group.
    Int4 {
        group: usize,
        offsets: bool,
    },
}

impl WeightFormat {
    /// Of weights that share a scale in int4.
    pub const GROUPS: [usize; 3] = [32, 64, 128];

    /// Every format that a CPU multiplies, those of four bits in groups of so many.
    pub fn all(group: usize) -> [WeightFormat; 6] {
        let int4 = |offsets| WeightFormat::Int4 { group, offsets };
        [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Int8, int4(false), int4(true)]
    }

    /// Whether its weights are whole numbers.
    pub fn is_whole(self) -> bool {
        matches!(self, WeightFormat::Int8 | WeightFormat::Int4 { .. })
    }

    pub fn name(self) -> &'static str {
        match self {
            WeightFormat::F32 => "f32",
            WeightFormat::F16 => "f16",
            WeightFormat::Bf16 => "bf16",
            WeightFormat::Fp8 => "fp8",
            WeightFormat::Int8 => "int8",
            WeightFormat::Int4 { offsets: false, .. } => "int4",
            WeightFormat::Int4 { offsets: true, .. } => "int4_asymmetric",
        }
    }
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> WeightFormat {
        match dtype {
            Dtype::F32 => WeightFormat::F32,
            Dtype::F16 => WeightFormat::F16,
            Dtype::Bf16 => WeightFormat::Bf16,
        }
    }
}

/// How K and V are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvDtype {
    F32,
    Bf16,
    /// Whole numbers from -127 to 127; those of one head of one token share a scale in f32.
    Int8,
    /// What is beyond 65504 is stored as that.
    F16,
    /// Numbers of 8 bits with a point that floats (E4M3), up to 448, with scales as in Int8.
    Fp8,
}

impl KvDtype {
    pub const ALL: [KvDtype; 5] = [KvDtype::F32, KvDtype::Bf16, KvDtype::Int8, KvDtype::F16, KvDtype::Fp8];

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 | KvDtype::F16 => 2,
            KvDtype::Int8 | KvDtype::Fp8 => 1,
        }
    }

    /// Bytes of the scale that one head of one token has.
    pub fn scale_bytes(self) -> usize {
        match self {
            KvDtype::F32 | KvDtype::Bf16 | KvDtype::F16 => 0,
            KvDtype::Int8 | KvDtype::Fp8 => size_of::<f32>(),
        }
    }

    /// Bytes of one head's K, or V, of one token.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + self.scale_bytes()
    }

    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
            KvDtype::F16 => "f16",
            KvDtype::Fp8 => "fp8",
        }
    }
}

/// What becomes of the K and V of those who have to give way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Preemption {
    /// They are dropped, and computed again.
    #[default]
    Recompute,
    /// They wait in the host tier, where it has room.
    Swap,
    /// Whichever costs less, by what moving and computing have cost so far.
    Auto,
}

/// What a model runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    Cpu,
    /// The CUDA device of this number.
    Cuda(usize),
}

/// Everything `Engine::create` needs to know. `None` lets the engine choose.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineOptions {
    /// A model directory as Hugging Face ships it.
    #[serde(skip)]
    pub model_dir: PathBuf,
    /// Where to run: "cpu".
    pub device: String,
    /// Bytes of the KV pool. None: what `max_seqs` full sequences need, at most 1 GiB.
    pub kv_bytes: Option<u64>,
    /// Take the KV pool's bytes from this budget, which other engines may share, instead of `kv_bytes`.
    #[serde(skip)]
    pub arena: Option<Arc<Arena>>,
    /// Tokens per KV block: 8, 16, 32, 64, 128 or 256.
    pub block_size: usize,
    /// How weights are kept. None: as the model's files have them. Embedding and head are kept in int8 where int4 is asked for, and as they are
    /// where fp8 is; what is small, and decides much (the choice among experts, learned positions), stays as it is, and so do the matrices by which latents are read.
    #[serde(default)]
    pub weight_format: Option<WeightFormat>,
    /// A directory that keeps the packed form of the weights: where it has that of this model, it is read; otherwise it is written once the weights are
    /// packed. None: they are packed each time.
    #[serde(skip)]
    pub packed_dir: Option<PathBuf>,
    /// How K and V are stored. None: f32 for models stored in f32, else bf16.
    pub kv_dtype: Option<KvDtype>,
    /// Longest sequence, prompt and output together. None: the model's own, or what the pool holds.
    pub max_model_len: Option<usize>,
    /// Most rows (prompt and decode tokens of all sequences) in one step.
    pub max_batch_tokens: usize,
    /// Most sequences running at once.
    pub max_seqs: usize,
    /// Most prompt tokens of one sequence in one step. None: `max_batch_tokens`.
    pub prefill_chunk: Option<usize>,
    /// Threads of the CPU backend, the stepping thread included. None: as many as `cpus`, or one per core.
    pub threads: Option<usize>,
    /// The CPUs to which the engine's own threads are pinned, one each, the stepping one's first: that one is pinned where it is the engine's.
    /// None: the system places them.
    #[serde(skip)]
    pub cpus: Option<Vec<usize>>,
    /// The instruction path. None: the widest the machine has.
    pub isa: Option<Isa>,
    /// Seeds the requests that bring no seed of their own.
    pub seed: u64,
    /// Serve token ids only: no tokenizer is read and text calls are refused.
    pub skip_tokenizer: bool,
    /// Outputs that may wait in the engine's own queue before its requests pause.
    pub queue_capacity: usize,
    /// Find again what was computed for the same tokens before.
    pub prefix_cache: bool,
    /// A CUDA device gives a sequence the same bits whatever the batch, as the CPU always does. Costs speed.
    pub batch_invariant: bool,
    /// The part of a CUDA device's memory for the KV pool, of what weights and working memory leave. None: as `kv_bytes` says.
    pub memory_fraction: Option<f32>,
    /// Requests that may wait for their first step, and tokens they may have in all, before others are refused.
    pub max_waiting_requests: Option<usize>,
    pub max_waiting_tokens: Option<usize>,
    /// Bytes of a text prompt, a chat or a text to tokenize at most. None: see `max_prompt_bytes()`.
    #[serde(skip)]
    pub max_prompt_bytes: Option<usize>,
    pub preemption: Preemption,
    /// Bytes of the host tier. 0: there is none.
    pub swap_bytes: u64,
    /// A directory: the host tier is a file there, which has no name and is gone with the engine. None: it is memory.
    #[serde(skip)]
    pub swap_dir: Option<PathBuf>,
    /// Who comes first, what a step is made of, and for how much a request needs room.
    pub policies: Policies,
    /// A file to draw every step into, in Chrome's trace event format.
    #[serde(skip)]
    pub trace_path: Option<PathBuf>,
    /// A file to write down what is asked for, so that it can be replayed.
    #[serde(skip)]
    pub journal_path: Option<PathBuf>,
    /// What the metrics call the model. None: as its directory is called.
    #[serde(skip)]
    pub model_name: Option<String>,
}

/// A request's priority is from minus this to this; without one it is 0.
pub const MOST_PRIORITY: i32 = 100;

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            model_dir: PathBuf::new(),
            device: "cpu".into(),
            kv_bytes: None,
            arena: None,
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
        }
    }
}

impl EngineOptions {
    pub const DEFAULT_KV_BYTES: u64 = 1 << 30;
    pub const DEFAULT_QUEUE_CAPACITY: usize = 1 << 16;
    const MAX_BATCH_TOKENS: usize = 1 << 20;
    const MAX_SEQS: usize = 1 << 16;
    const MAX_THREADS: usize = 1024;
    const PROMPT_BYTES_PER_TOKEN: usize = 64;
    const MIN_DEFAULT_PROMPT_BYTES: usize = 1 << 20;

    /// The limit in bytes of texts that are tokenized, for sequences of at most `max_model_len` tokens.
    pub fn max_prompt_bytes(&self, max_model_len: usize) -> usize {
        let default = max_model_len.saturating_mul(Self::PROMPT_BYTES_PER_TOKEN).max(Self::MIN_DEFAULT_PROMPT_BYTES);
        self.max_prompt_bytes.unwrap_or(default)
    }

    /// The most rows that one sequence has in a step.
    pub fn rows_at_once(&self) -> usize {
        self.prefill_chunk.map_or(self.max_batch_tokens, |chunk| chunk.min(self.max_batch_tokens))
    }

    /// What the model runs on.
    pub fn device(&self) -> Result<Device> {
        let digits = |name: &&str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        let ordinal = |name: &str| name.strip_prefix("cuda:").filter(digits)?.parse().ok();
        match self.device.as_str() {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            name => ordinal(name)
                .map(Device::Cuda)
                .ok_or_else(|| Error::unsupported(format!("device is {name:?}: choose \"cpu\", or \"cuda:0\" for the first CUDA device"))),
        }
    }

    /// Threads that compute. A device that is not the CPU needs none but the one that steps.
    pub fn thread_count(&self) -> usize {
        if !matches!(self.device(), Ok(Device::Cpu)) {
            return 1;
        }
        let pinned = self.cpus.as_ref().map(Vec::len);
        self.threads.or(pinned).unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
    }

    pub fn validate(&self) -> Result<()> {
        match self.device()? {
            Device::Cpu => self.validate_on_cpu()?,
            Device::Cuda(_) => self.validate_on_cuda()?,
        }
        if !(8..=256).contains(&self.block_size) || !self.block_size.is_power_of_two() {
            return Err(Error::invalid(format!("block_size is {}: choose 8, 16, 32, 64, 128 or 256", self.block_size)));
        }
        if self.arena.is_some() && self.kv_bytes.is_some() {
            return Err(Error::invalid("kv_bytes and an arena are both given: the arena's bytes are the pool's, so leave kv_bytes out"));
        }
        within("max_batch_tokens", self.max_batch_tokens, Self::MAX_BATCH_TOKENS)?;
        within("max_seqs", self.max_seqs, Self::MAX_SEQS)?;
        if self.max_batch_tokens < self.max_seqs {
            return Err(Error::invalid(format!(
                "max_batch_tokens is {} and max_seqs {}: every running sequence needs a row, so raise the first or lower the second",
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
            return Err(Error::invalid(format!("weight_group is {group}: choose one of {:?}", WeightFormat::GROUPS)));
        }
        self.policies.validate()?;
        self.validate_swapping()
    }

    /// The CPU's memory is the host's, who says how much of it he lends. Its bits never depend on the batch.
    fn validate_on_cpu(&self) -> Result<()> {
        if let Some(fraction) = self.memory_fraction {
            return Err(Error::unsupported(format!(
                "memory_fraction is {fraction} and device \"cpu\": it divides a CUDA device's memory, so give kv_bytes, or leave both out"
            )));
        }
        match self.weight_format {
            Some(WeightFormat::Fp8) => Err(Error::unsupported(
                "weight_format is fp8 and device \"cpu\": fp8 is for CUDA devices, so take int8, which a CPU multiplies faster",
            )),
            _ => Ok(()),
        }
    }

    /// What is said of the CPU's work is a mistake where there is none.
    fn validate_on_cuda(&self) -> Result<()> {
        let refused = |what: &str| Err(Error::unsupported(format!("device is {:?} and {what}", self.device)));
        if let Some(fraction) = self.memory_fraction {
            // NaN is not within.
            if !(0.01..=1.0).contains(&fraction) {
                return Err(Error::invalid(format!("memory_fraction is {fraction}: it must be from 0.01 to 1")));
            }
            if self.kv_bytes.is_some() || self.arena.is_some() {
                return Err(Error::invalid("memory_fraction is given, and kv_bytes or an arena: say one of them"));
            }
        }
        match self.weight_format {
            Some(format) if format.is_whole() => {
                refused(&format!("weight_format {}: a CUDA device takes f32, f16, bf16 and fp8", format.name()))
            }
            _ if self.packed_dir.is_some() => refused("packed_path is given: packed weights are the CPU's, so leave it out"),
            _ if self.isa.is_some() => refused("isa is given: that chooses among the CPU's instructions, so leave it out"),
            _ => Ok(()),
        }
    }

    /// Each is one that there is, and another; there are as many as threads.
    fn validate_cpus(&self, cpus: &[usize]) -> Result<()> {
        if self.thread_count() != cpus.len() {
            let threads = self.thread_count();
            return Err(Error::invalid(format!(
                "cpus names {} CPUs and threads is {threads}: name one for each, or leave threads out",
                cpus.len()
            )));
        }
        let allowed = AllowedCpus::read()?;
        for (i, cpu) in cpus.iter().enumerate() {
            if cpus[..i].contains(cpu) {
                return Err(Error::invalid(format!("cpus names CPU {cpu} twice: each thread needs one of its own")));
            }
            if !allowed.has(*cpu) {
                return Err(Error::unsupported(format!(
                    "cpus names CPU {cpu}, on which this thread may not run: it may on {}, from {} to {}",
                    allowed.iter().count(),
                    allowed.iter().next().unwrap_or_default(),
                    allowed.iter().last().unwrap_or_default()
                )));
            }
        }
        Ok(())
    }

    /// A tier that nobody uses, or nobody could, is a mistake.
    fn validate_swapping(&self) -> Result<()> {
        match (self.preemption, self.swap_bytes, &self.swap_dir) {
            (Preemption::Recompute, bytes @ 1.., _) => Err(Error::invalid(format!(
                "swap_bytes is {bytes} and preemption is to recompute: nothing would be swapped, so choose to swap or auto, or leave it at 0"
            ))),
            (Preemption::Swap | Preemption::Auto, 0, _) => Err(Error::invalid(
                "preemption may swap and swap_bytes is 0: there is no room to swap to, so raise it, or choose to recompute",
            )),
            (_, 0, Some(dir)) => Err(Error::invalid(format!("swap_path is {} and swap_bytes 0: say how large it may be", dir.display()))),
            _ => Ok(()),
        }
    }
}

/// CPUs as `taskset -c` takes them: numbers and ranges, such as 0-3,8.
pub fn cpu_list(text: &str) -> Result<Vec<usize>> {
    let wrong = |what: &str| Error::invalid(format!("cpus is {text:?}: {what}; write numbers and ranges, such as 0-3,8"));
    let number = |text: &str| {
        let number = text.parse::<usize>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        let number = number.ok_or_else(|| wrong("that is no list of CPUs"))?;
        if number < MOST_CPUS { Ok(number) } else { Err(wrong(&format!("CPUs have numbers below {MOST_CPUS}"))) }
    };
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(wrong(&format!("the range {part} is empty")));
        }
        if cpus.len() + (last - first) >= MOST_CPUS {
            return Err(wrong(&format!("those are more than {MOST_CPUS}")));
        }
        cpus.try_reserve(last - first + 1)?;
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

fn within(name: &str, value: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}: it must be from 1 to {most}")))
}

/// What a request's output must look like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    /// A JSON text that this schema (a JSON text itself) describes.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// The whole output matches this regular expression of Python's `re`.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's dialect of Lark, with regular expressions of Python's `re`.
    Lark(String),
}

impl Grammar {
    /// Compiling one that large may take seconds.
    const MOST_BYTES: usize = 256 << 10;

    pub fn try_clone(&self) -> Result<Grammar> {
        let copy = |text: &String| try_concat(&[text]);
        Ok(match self {
            Grammar::JsonSchema(text) => Grammar::JsonSchema(copy(text)?),
            Grammar::JsonObject => Grammar::JsonObject,
            Grammar::Regex(text) => Grammar::Regex(copy(text)?),
            Grammar::Choice(texts) => Grammar::Choice(try_texts(texts)?),
            Grammar::Lark(text) => Grammar::Lark(copy(text)?),
        })
    }

    pub fn validate(&self) -> Result<()> {
        let bytes = match self {
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
            Grammar::Choice(texts) if texts.is_empty() => {
                return Err(Error::invalid("the grammar is a choice of 0 texts: give at least one"));
            }
            Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
            Grammar::JsonObject => 0,
        };
        if bytes > Self::MOST_BYTES {
            return Err(Error::invalid(format!("the grammar has {bytes} bytes: the limit is {}, so make it smaller", Self::MOST_BYTES)));
        }
        Ok(())
    }
}

/// When a beam search has found enough. Except for `Yes` the finished beams must be as many as the width, and
/// the question is what a running beam can still reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum EarlyStopping {
    /// As soon as as many beams as the width are finished.
    Yes,
    /// When the best running beam, ended now, would be no better than the worst finished one. With a positive length
    /// penalty it might still have become better.
    #[default]
    No,
    /// When no running beam can become better than the worst finished one.
    Never,
}

/// Beam search: several continuations side by side, the best ones returned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BeamParams {
    /// Beams that run side by side: 2 to 64.
    pub width: u32,
    /// Groups into which the beams are divided, each with a search of its own.
    pub groups: u32,
    /// Taken off a token's log probability for every beam of an earlier group that chose it in the same step.
    pub diversity_penalty: f32,
    /// A finished beam's score is the sum of its log probabilities divided by its length to this power:
    /// above 0 favours long ones, below 0 short ones.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
}

impl Default for BeamParams {
    fn default() -> Self {
        BeamParams { width: 4, groups: 1, diversity_penalty: 0.0, length_penalty: 1.0, early_stopping: EarlyStopping::No }
    }
}

impl BeamParams {
    pub const MOST_BEAMS: u32 = 64;
    const MOST_DIVERSITY: f32 = 1e6;
    /// Lengths to this power, times a sum of log probabilities, are still well within f32.
    const MOST_LENGTH_PENALTY: f32 = 5.0;

    /// Whether these can be searched for the `n` best.
    pub fn validate(&self, n: usize) -> Result<()> {
        let BeamParams { width, groups, diversity_penalty, length_penalty, .. } = *self;
        if !(2..=Self::MOST_BEAMS).contains(&width) {
            return Err(Error::invalid(format!("the beam width is {width}: it must be from 2 to {}", Self::MOST_BEAMS)));
        }
        if n == 0 || n > width as usize {
            return Err(Error::invalid(format!("n is {n} and the beam width {width}: ask for 1 to {width} results, or raise the width")));
        }
        if groups == 0 || width % groups != 0 {
            return Err(Error::invalid(format!("{width} beams cannot be divided into {groups} groups of equal size")));
        }
        // Comparisons are written so that NaN fails them.
        if !(0.0..=Self::MOST_DIVERSITY).contains(&diversity_penalty) {
            let most = Self::MOST_DIVERSITY;
            return Err(Error::invalid(format!("diversity_penalty is {diversity_penalty}: it must be from 0 to {most}")));
        }
        if groups == 1 && diversity_penalty != 0.0 {
            return Err(Error::invalid(format!(
                "diversity_penalty is {diversity_penalty} and there is one group of beams: ask for 2 groups or more, or leave it at 0"
            )));
        }
        if groups > 1 && diversity_penalty == 0.0 {
            return Err(Error::invalid(format!(
                "diversity_penalty is 0 and there are {groups} groups of beams, which would all find the same: raise it or ask for 1 group"
            )));
        }
        if !(-Self::MOST_LENGTH_PENALTY..=Self::MOST_LENGTH_PENALTY).contains(&length_penalty) {
            let most = Self::MOST_LENGTH_PENALTY;
            return Err(Error::invalid(format!("length_penalty is {length_penalty}: it must be from -{most} to {most}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beams_that_contradict_themselves_are_refused_with_their_numbers() {
        let refused = |params: BeamParams, n: usize, why: &str| {
            let error = params.validate(n).unwrap_err();
            assert!(error.message().contains(why), "{error}, expected {why}");
        };
        let params = BeamParams::default;
        params().validate(4).unwrap();
        refused(params(), 5, "n is 5 and the beam width 4");
        refused(params(), 0, "n is 0");
        refused(BeamParams { width: 1, ..params() }, 1, "width is 1");
        refused(BeamParams { width: 65, ..params() }, 1, "from 2 to 64");
        refused(BeamParams { groups: 3, diversity_penalty: 1.0, ..params() }, 1, "4 beams cannot be divided into 3");
        refused(BeamParams { groups: 0, ..params() }, 1, "0 groups");
        refused(BeamParams { groups: 2, ..params() }, 1, "diversity_penalty is 0");
        refused(BeamParams { diversity_penalty: 0.5, ..params() }, 1, "one group");
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -5.5] {
            refused(BeamParams { length_penalty: value, ..params() }, 1, "length_penalty is");
            refused(BeamParams { groups: 2, diversity_penalty: value, ..params() }, 1, "diversity_penalty is");
        }
    }

    #[test]
    fn block_sizes_are_powers_of_two_from_8_to_256() {
        for (size, ok) in [(0, false), (4, false), (8, true), (12, false), (256, true), (512, false)] {
            assert_eq!(EngineOptions { block_size: size, ..Default::default() }.validate().is_ok(), ok, "{size}");
        }
    }

    #[test]
    fn cpus_are_read_as_other_programs_write_them() {
        assert_eq!(cpu_list("0-3,8").unwrap(), [0, 1, 2, 3, 8]);
        assert_eq!(cpu_list("5").unwrap(), [5]);
        assert_eq!(cpu_list("1023,7-7").unwrap(), [1023, 7]);
        for (text, why) in [
            ("", "no list"),
            ("a", "no list"),
            ("-1", "no list"),
            ("+1", "no list"),
            ("1-", "no list"),
            ("1--2", "no list"),
            ("1,,2", "no list"),
            (" 1", "no list"),
            ("3-1", "the range 3-1 is empty"),
            ("1024", "below 1024"),
            ("0-4294967295", "below 1024"),
            ("99999999999999999999", "no list"),
            ("0-1023,0", "more than 1024"),
        ] {
            let error = cpu_list(text).unwrap_err();
            assert!(error.message().contains(why), "{text}: {error}");
        }
    }
}
