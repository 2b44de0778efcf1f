//! Command-line options.

use std::path::PathBuf;

use pagedllm::types::options::{Isa, KvDtype, WeightFormat};

use crate::Result;
use crate::cell::{Cell, Weights};
use crate::model::{SHAPES, Shape};

const USAGE: &str = "cargo bench --bench cpu -- [--model S|M] [--weights f32|f16|bf16|int8|int4|int4_asymmetric] [--group 32|64|128] \
    [--threads N] [--isa portable|avx2|avx_vnni|avx512|avx512_vnni|avx512_bf16] [--kv-dtype f32|bf16|int8] [--reps N] [--quick] \
    [--table|--scheduler [--cells S-bf16,M-int4,...] [--gguf DIR]] [--long|--attention|--matmul|--scaling] [--models DIR] [--json PATH]";

/// Kind of measurement.
#[derive(Clone, Copy, PartialEq)]
pub enum Mode {
    /// One cell, with batches of every size.
    Cell,
    /// All cells, with the rows that benches/peers compares.
    Table,
    /// Share of a step that is not spent in the model.
    Scheduler,
    /// Contexts of thousands of tokens.
    Long,
    Attention,
    Matmul,
    /// Numbers of threads: 1, 2, 4, up to all.
    Scaling,
}

pub struct Options {
    pub mode: Mode,
    pub shape: &'static Shape,
    /// Cells of `--cells`. If it is empty, the mode selects them.
    chosen: Vec<Cell>,
    pub threads: usize,
    pub isa: Isa,
    pub kv_dtype: Option<KvDtype>,
    /// Format of `--weights`.
    weights: Option<WeightFormat>,
    group: usize,
    pub reps: usize,
    /// Smoke test: small sizes, one repetition.
    pub quick: bool,
    /// Directory of files CELL.gguf. A cell with a file has its weights.
    gguf: Option<PathBuf>,
    /// Directory of the models of the benchmark.
    pub models: Option<PathBuf>,
    /// Output file of the results.
    pub json: Option<PathBuf>,
}

impl Options {
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Options> {
        let (mut weights, mut cells) = (None, None);
        let mut options = Options::default();
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
                "--weights" => weights = Some(value()?),
                "--group" => options.group = value()?.parse()?,
                "--cells" => cells = Some(value()?),
                "--gguf" => options.gguf = Some(value()?.into()),
                "--models" => options.models = Some(value()?.into()),
                "--json" => options.json = Some(value()?.into()),
                "--table" => options.mode = Mode::Table,
                "--scheduler" => options.mode = Mode::Scheduler,
                "--long" => options.mode = Mode::Long,
                "--attention" => options.mode = Mode::Attention,
                "--matmul" => options.mode = Mode::Matmul,
                "--scaling" => options.mode = Mode::Scaling,
                _ => return Err(format!("unknown argument {arg}\n{USAGE}").into()),
            }
        }
        // Formats need the value of --group, which may follow them.
        options.weights = weights.map(|name| format_named(&name, options.group)).transpose()?;
        let named = |cells: String| cells.split(',').map(|name| options.cell_named(name)).collect::<Result<_>>();
        options.chosen = cells.map(named).transpose()?.unwrap_or_default();
        match options.isa.is_present() {
            true => Ok(options),
            false => Err(format!("--isa: this machine does not support {}", options.isa.name()).into()),
        }
    }

    /// Cells of `--cells`, or all cells of the mode.
    pub fn cells(&self) -> Vec<Cell> {
        let formats = [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4 { group: self.group, offsets: false }];
        let shapes = if self.quick { &SHAPES[..1] } else { &SHAPES[..] };
        match self.mode {
            _ if !self.chosen.is_empty() => self.chosen.clone(),
            Mode::Table | Mode::Scheduler => {
                shapes.iter().flat_map(|shape| formats.map(|format| Cell { shape, weights: Weights::Made(format) })).collect()
            }
            Mode::Scaling => [formats[0], formats[2]].map(|format| Cell { shape: &SHAPES[0], weights: Weights::Made(format) }).into(),
            _ => vec![Cell { shape: self.shape, weights: Weights::Made(self.weights.unwrap_or(WeightFormat::Bf16)) }],
        }
    }

    /// Format of `--weights`, or all formats.
    pub fn formats(&self) -> Vec<WeightFormat> {
        self.weights.map_or(WeightFormat::all(self.group).to_vec(), |format| vec![format])
    }

    fn cell_named(&self, name: &str) -> Result<Cell> {
        let (shape, weights) = name.split_once('-').ok_or_else(|| format!("--cells: {name} is not a cell; use a name such as S-int8"))?;
        let file = self.gguf.as_ref().map(|dir| dir.join(format!("{name}.gguf"))).filter(|path| path.exists());
        let weights = match file {
            Some(path) => Weights::File(weights.into(), path),
            None => Weights::Made(format_named(weights, self.group)?),
        };
        Ok(Cell { shape: pick(&SHAPES, |shape| shape.name, shape)?, weights })
    }

    /// Size of the bandwidth probe: larger than any cache. The smoke test only needs some value.
    pub fn probe_bytes(&self) -> usize {
        if self.quick { 128 << 20 } else { 1 << 30 }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            mode: Mode::Cell,
            shape: &SHAPES[1],
            chosen: Vec::new(),
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            isa: Isa::detect(),
            kv_dtype: None,
            weights: None,
            group: 128,
            reps: 3,
            quick: false,
            gguf: None,
            models: None,
            json: None,
        }
    }
}

fn format_named(name: &str, group: usize) -> Result<WeightFormat> {
    pick(&WeightFormat::all(group), |format| format.name(), name).copied()
}

fn pick<'a, T>(all: &'a [T], name: impl Fn(&T) -> &'static str, wanted: &str) -> Result<&'a T> {
    let found = all.iter().find(|one| name(one) == wanted);
    Ok(found.ok_or_else(|| format!("unknown value {wanted}; use one of {:?}", all.iter().map(name).collect::<Vec<_>>()))?)
}
