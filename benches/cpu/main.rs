//! How fast the CPU backend serves, beside how fast this machine could: see benches/README.md.

mod attention;
mod limits;
mod matmul;
mod model;
mod noise;
mod probes;
mod report;
mod worker;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use limits::{Arithmetic, Costs, Work};
use model::{SHAPES, Shape};
use noise::{Noise, Watch};
use pagedllm::options::{Isa, KvDtype, WeightFormat};
use report::{Report, Sample, Unit, median};
use serde_json::{Value, json};
use worker::Worker;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "cargo bench --bench cpu -- [--model S|M] [--threads N] [--isa portable|avx2|avx_vnni|avx512|avx512_vnni|avx512_bf16] [--kv-dtype f32|bf16|int8] [--weights f32|f16|bf16|int8|int4|int4_asymmetric] [--group 32|64|128] [--reps N] [--quick] [--attention|--matmul]";
/// Prompt length of the sequences that decode.
const CONTEXT: u64 = 128;
const DECODE_STEPS: u64 = 16;
const MOST_TRIES: usize = 20;
/// What a batch of 32 must at least give over one sequence.
const GOAL: f64 = 5.0;

pub struct Options {
    shape: &'static Shape,
    threads: usize,
    isa: Isa,
    kv_dtype: Option<KvDtype>,
    /// As in the file, unless another format is asked for; its groups, where it has some.
    weights: Option<WeightFormat>,
    group: usize,
    reps: usize,
    /// A smoke test: little of everything.
    quick: bool,
    /// Attention alone.
    attention: bool,
    /// Products alone.
    matmul: bool,
    /// This process is the engine's.
    worker: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let mut options = Options {
            shape: &SHAPES[1],
            threads,
            isa: Isa::detect(),
            kv_dtype: None,
            weights: None,
            group: WeightFormat::GROUPS[0],
            reps: 3,
            quick: false,
            attention: false,
            matmul: false,
            worker: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--bench" => {} // cargo adds it
                "--model" => options.shape = pick(&SHAPES, |shape| shape.name, &value()?)?,
                "--threads" => options.threads = value()?.parse::<usize>()?.max(1),
                "--isa" => options.isa = *pick(&Isa::ALL, |isa| isa.name(), &value()?)?,
                "--kv-dtype" => options.kv_dtype = Some(*pick(&KvDtype::ALL, |dtype| dtype.name(), &value()?)?),
                "--reps" => options.reps = value()?.parse::<usize>()?.max(1),
                "--quick" => (options.quick, options.shape, options.reps) = (true, &SHAPES[0], 1),
                "--weights" => options.weights = Some(*pick(&WeightFormat::all(options.group), |format| format.name(), &value()?)?),
                "--group" => options.group = value()?.parse()?,
                "--attention" => options.attention = true,
                "--matmul" => options.matmul = true,
                "--worker" => options.worker = Some(value()?.into()),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}").into()),
            }
        }
        match options.isa.is_present() {
            true => Ok(options),
            false => Err(format!("this machine lacks {}", options.isa.name()).into()),
        }
    }

    /// That of `--weights`, or all, with groups of as many as `--group` says.
    fn formats(&self) -> Vec<WeightFormat> {
        let grouped = |format| match format {
            WeightFormat::Int4 { offsets, .. } => WeightFormat::Int4 { group: self.group, offsets },
            other => other,
        };
        self.weights.map_or(WeightFormat::all(self.group).to_vec(), |format| vec![grouped(format)])
    }

    /// That of `--weights`, or the file's.
    fn format(&self) -> WeightFormat {
        self.weights.map_or(WeightFormat::Bf16, |_| self.formats()[0])
    }

    fn prompts(&self) -> &'static [u64] {
        if self.quick { &[64] } else { &[512, 2048] }
    }

    fn batches(&self) -> &'static [u64] {
        if self.quick { &[1, 4] } else { &[1, 2, 4, 8, 16, 32] }
    }

    fn most_sequences(&self) -> usize {
        self.batches().iter().max().map_or(1, |&batch| batch as usize)
    }

    /// Larger than any cache; the smoke test only needs a number.
    fn probe_bytes(&self) -> usize {
        if self.quick { 128 << 20 } else { 1 << 30 }
    }
}

fn pick<'a, T>(all: &'a [T], name: impl Fn(&T) -> &'static str, wanted: &str) -> Result<&'a T> {
    let found = all.iter().find(|one| name(one) == wanted);
    Ok(found.ok_or_else(|| format!("{wanted} is none of {:?}", all.iter().map(name).collect::<Vec<_>>()))?)
}

fn main() -> ExitCode {
    let run = || -> Result<()> {
        let options = Options::parse(std::env::args().skip(1))?;
        match &options.worker {
            Some(dir) => worker::serve(&options, dir),
            None if options.matmul => matmul::bench(&options),
            None if options.attention => attention::bench(&options),
            None => bench(&options),
        }
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> Result<()> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().ok_or("the target directory has no place")?;
    let dir = model::make(options.shape, &target.join("bench-models"))?;
    let memory = probes::Memory::new(options.probe_bytes(), options.threads);
    let mut report = Report::default();
    let (mut arithmetic, mut kv_dtype) = (Arithmetic::default(), Value::Null);
    for rep in 0..options.reps {
        eprintln!("repetition {} of {}", rep + 1, options.reps);
        let now = Arithmetic { weights: undisturbed(options, options.format()), f32: undisturbed(options, WeightFormat::F32) };
        arithmetic = arithmetic.max(now);
        let mut run = Run::start(options, &dir, &memory, arithmetic, &mut report)?;
        run.all()?;
        kv_dtype = run.worker.loaded["kv_dtype"].take();
    }
    let about = json!({
        "version": env!("CARGO_PKG_VERSION"), "cpu": cpu_name(), "model": options.shape.name, "threads": options.threads,
        "isa": options.isa.name(), "weights": options.format().name(), "kv_dtype": kv_dtype, "reps": options.reps,
        "arithmetic_gflop_s": (arithmetic.weights / 1e9).round(), "f32_gflop_s": (arithmetic.f32 / 1e9).round(),
    });
    print(&about, &report);
    let path = target.join("bench-results/cpu.json");
    report.save(&path, about)?;
    println!("saved as {}", path.display());
    Ok(())
}

/// Steady but for what others take from it: the best of some tries, until one of them was alone.
fn undisturbed(options: &Options, format: WeightFormat) -> f64 {
    let mut best = 0.0f64;
    for _ in 0..if options.quick { 1 } else { MOST_TRIES } {
        let watch = Watch::start(None);
        best = best.max(probes::arithmetic(options.isa, format, options.threads));
        if !watch.stop(None).too_much() {
            break;
        }
    }
    best
}

fn print(about: &Value, report: &Report) {
    let keys = ["cpu", "model", "threads", "isa", "weights", "kv_dtype", "reps", "arithmetic_gflop_s", "f32_gflop_s"];
    let [cpu, model, threads, isa, weights, kv_dtype, reps, arithmetic, f32] = keys.map(|key| about[key].to_string().replace('"', ""));
    println!("{cpu}\nmodel {model}, {threads} threads, {isa}, weights in {weights}, KV in {kv_dtype}, medians of {reps}");
    println!("arithmetic with weights at {arithmetic} GFLOP/s, in f32 at {f32}");
    report.print();
    if let (Some(alone), Some(batch)) = (report.value("decode 1"), report.value("decode 32")) {
        println!("a batch of 32 makes {:.1} times the tokens of one sequence alone (goal: at least {GOAL})", batch / alone);
    }
}

fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split_once(':'));
    name.map_or("unknown", |(_, name)| name.trim()).to_string()
}

/// One repetition: a fresh engine through every measurement.
struct Run<'a> {
    options: &'a Options,
    worker: Worker,
    costs: Costs,
    memory: &'a probes::Memory,
    arithmetic: Arithmetic,
    report: &'a mut Report,
}

/// What the worker answered, and what the machine was like meanwhile.
struct Answer {
    numbers: Value,
    bandwidth: f64,
    noise: Noise,
}

impl Answer {
    fn int(&self, key: &str) -> u64 {
        self.numbers[key].as_u64().unwrap_or(0)
    }

    fn seconds(&self) -> f64 {
        self.numbers["seconds"].as_f64().unwrap_or(f64::NAN)
    }
}

impl<'a> Run<'a> {
    /// Loads the model.
    fn start(
        options: &'a Options,
        dir: &Path,
        memory: &'a probes::Memory,
        arithmetic: Arithmetic,
        report: &'a mut Report,
    ) -> Result<Run<'a>> {
        let bandwidth = memory.bandwidth();
        let watch = Watch::start(None);
        let worker = Worker::start(dir)?;
        let noise = watch.stop(Some(worker.id()));
        let number = |key: &str| worker.loaded[key].as_f64().unwrap_or(f64::NAN);
        report.add("load", Unit::Seconds, Sample { value: number("load_seconds"), limit: number("read_seconds"), bandwidth, noise });
        let costs = Costs::of(options.shape, options.format(), number("weight_bytes") as u64, number("kv_head_bytes") as usize);
        Ok(Run { options, worker, costs, memory, arithmetic, report })
    }

    fn all(&mut self) -> Result<()> {
        self.worker.ask("prefill 16")?; // threads and pages awake
        self.options.prompts().iter().try_for_each(|&tokens| self.prefill(tokens))?;
        self.options.batches().iter().try_for_each(|&batch| self.decode(batch))?;
        self.worker.ask("leave")?;
        self.peak_memory()
    }

    fn prefill(&mut self, tokens: u64) -> Result<()> {
        let answer = self.ask(&format!("prefill {tokens}"))?;
        let work = self.costs.prefill(tokens, answer.int("steps"));
        self.add_rate(format!("prefill {tokens}"), tokens, work, answer);
        Ok(())
    }

    /// Fills up the batch with fresh sequences; those already there have grown a little.
    fn decode(&mut self, batch: u64) -> Result<()> {
        let smaller = self.options.batches().iter().filter(|&&other| other < batch).max().copied().unwrap_or(0);
        self.worker.ask(&format!("join {} {CONTEXT}", batch - smaller))?;
        let answer = self.ask(&format!("decode {DECODE_STEPS}"))?;
        let work = self.costs.decode(answer.int("steps"), answer.int("tokens"), answer.int("positions"));
        self.add_rate(format!("decode {batch}"), batch * DECODE_STEPS, work, answer);
        Ok(())
    }

    fn peak_memory(&mut self) -> Result<()> {
        let Answer { numbers, bandwidth, noise } = self.ask("memory")?;
        let mebibytes = |key: &str| numbers[key].as_f64().map_or(f64::NAN, |bytes| bytes / (1 << 20) as f64);
        let sample = Sample { value: mebibytes("peak_bytes"), limit: mebibytes("plan_bytes"), bandwidth, noise };
        self.report.add("peak memory", Unit::Mebibytes, sample);
        Ok(())
    }

    /// A question with the memory's speed taken just before and just after it.
    fn ask(&mut self, question: &str) -> Result<Answer> {
        let before = self.memory.bandwidth();
        let watch = Watch::start(Some(self.worker.id()));
        let numbers = self.worker.ask(question)?;
        let noise = watch.stop(Some(self.worker.id()));
        Ok(Answer { numbers, bandwidth: median(vec![before, self.memory.bandwidth()]), noise })
    }

    fn add_rate(&mut self, name: String, tokens: u64, work: Work, answer: Answer) {
        let Answer { bandwidth, noise, .. } = answer;
        let rate = |seconds: f64| tokens as f64 / seconds;
        let sample = Sample { value: rate(answer.seconds()), limit: rate(work.seconds(bandwidth, self.arithmetic)), bandwidth, noise };
        self.report.add(name, Unit::TokensPerSecond, sample);
    }
}
