//! Models: an architecture as data, its weights, and the decoder that interprets them.

mod arch;
mod checkpoint;
mod collective;
mod config;
mod decoder;
mod formats;
pub mod gguf;
mod kv_cache;
mod kv_layout;
mod latent;
mod logits;
mod mxfp4;
mod packed;
mod parts;
mod remedy;
mod residual;
#[cfg(test)]
mod shard_test;
pub mod spec;
mod weights;

use std::path::{Path, PathBuf};

pub use arch::{FAMILIES, Family, family};
use checkpoint::Checkpoint;
pub use config::Config;
pub use decoder::{BatchLimits, Decoder, input_limits, work_bytes};
pub use kv_cache::{KvCache, KvPool};
pub use kv_layout::KvLayout;
pub use packed::{PackedForm, PackedReport};
use packed::{TensorLocation, Writer};
use spec::{ModelSpec, Shard, Stage};
pub use weights::LoadProgress;
use weights::{LoadedModel, Origin};

use crate::backend::{Alloc, Backend, KvOps};
use crate::error::{Code, Error, Result, try_format};
use crate::types::options::{Dtype, ModelDefaults, WeightFormat};
use crate::types::parallel::WorkerPlace;

/// A model directory, opened and validated but not loaded.
pub struct ModelFiles {
    pub architecture: &'static str,
    pub spec: ModelSpec,
    /// Storage type of the weights. It determines the default type of K and V.
    pub dtype: Dtype,
    /// Format of the loaded weights. None: their storage type.
    pub weight_format: Option<WeightFormat>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Sampling parameters of generation_config.json. An error affects only requests that want
    /// them.
    pub sampling_defaults: Result<ModelDefaults>,
    /// The GGUF file of the model, if it is one.
    pub gguf: Option<GgufSource>,
    /// The place of this worker among those that divide the model.
    pub place: WorkerPlace,
    /// The part of a divided model that this worker computes.
    part: Option<ModelSpec>,
    /// Groups and levels of the layers of that part.
    kv_layout: KvLayout,
    checkpoint: Checkpoint,
}

/// A GGUF file and the values of its header.
pub struct GgufSource {
    pub path: PathBuf,
    pub metadata: gguf::Metadata,
}

impl ModelFiles {
    /// Opens a directory in the layout of Hugging Face, or a GGUF file.
    pub fn open(path: &Path) -> Result<ModelFiles> {
        match gguf::model::find(path)? {
            Some(file) => ModelFiles::open_gguf(&file),
            None => ModelFiles::open_directory(path),
        }
    }

    fn open_directory(dir: &Path) -> Result<ModelFiles> {
        if !dir.is_dir() {
            return Err(Error::io(format!("model_path {:?} does not exist or is not a directory", dir.display().to_string())));
        }
        let config = Config::load(dir, "config.json")?;
        let family = family(&config)?;
        let spec = (family.spec)(&config)?;
        refuse_quantized(&config, &spec)?;
        let checkpoint = Checkpoint::open(dir, family.prefix)?;
        let generation = Config::load_optional(dir, "generation_config.json")?.unwrap_or_default();
        ModelFiles::check(family, spec, checkpoint, &config, &generation)
    }

    fn open_gguf(path: &Path) -> Result<ModelFiles> {
        let mut file = gguf::Gguf::open(path)?;
        let open = || {
            let config = Config::new("as config.json".into(), gguf::model::config(&file)?);
            let family = family(&config)?;
            let mut spec = (family.spec)(&config)?;
            gguf::model::adapt(&file, &mut spec)?;
            let tensors = gguf::model::tensors(&file)?;
            let metadata = std::mem::take(&mut file.metadata);
            let checkpoint = Checkpoint::from_gguf(file, tensors, family.prefix)?;
            let files = ModelFiles::check(family, spec, checkpoint, &config, &Config::default())?;
            Ok(ModelFiles { gguf: Some(GgufSource { path: path.into(), metadata }), ..files })
        };
        open().map_err(|error: Error| error.within(path.display()))
    }

    fn check(family: &Family, mut spec: ModelSpec, checkpoint: Checkpoint, config: &Config, generation: &Config) -> Result<ModelFiles> {
        if let Some(head) = weights::own_head(&spec, &checkpoint)? {
            spec.head.weight = Some(head);
        }
        weights::refuse_unused(&spec, &checkpoint)?;
        let dtype = weights::storage(&spec, &checkpoint)?;
        let eos_token_ids = eos_token_ids(generation, config, spec.vocab_size)?;
        let sampling_defaults = sampling_defaults(generation);
        let kv_layout = KvLayout::for_spec(&spec);
        Ok(ModelFiles {
            architecture: family.architecture,
            spec,
            dtype,
            weight_format: None,
            eos_token_ids,
            sampling_defaults,
            gguf: None,
            place: WorkerPlace::default(),
            part: None,
            kv_layout,
            checkpoint,
        })
    }

    /// Selects the part of the model that one of several workers computes.
    ///
    /// Errors: `InvalidArgument` if the model cannot be divided in this way.
    pub fn divide(&mut self, place: WorkerPlace) -> Result<()> {
        let WorkerPlace { division, tensor_rank, stage } = place;
        let (shard, stage) = (Shard { rank: tensor_rank, ranks: division.tensor }, Stage { stage, stages: division.pipeline });
        self.kv_layout = self.kv_layout.for_stage(stage.layers(self.spec.layers.len())?);
        self.part = if place.is_alone() { None } else { Some(self.spec.stage(stage)?.shard(shard)?) };
        self.place = place;
        Ok(())
    }

    /// Selects the rotary frequencies for sequences of at most `max_len` positions.
    pub fn fit(&mut self, max_len: usize) {
        self.spec.fit(max_len);
        self.part.iter_mut().for_each(|part| part.fit(max_len));
    }

    /// Returns the window of each group of layers, which has block tables of its own.
    pub fn windows(&self) -> Vec<Option<usize>> {
        self.kv_layout.windows.clone()
    }

    /// Returns the bytes of one block of this worker.
    pub fn kv_block_bytes<B: KvOps>(&self, backend: &B, pool: KvPool) -> u64 {
        pool.block_bytes_with(backend, self.part(), &self.kv_layout)
    }

    /// Allocates the KV cache of this worker's layers.
    pub fn kv_cache<B: KvOps>(&self, backend: &B, pool: KvPool) -> Result<KvCache<B>> {
        KvCache::with_layout(backend, self.part(), &self.kv_layout, pool)
    }

    /// Returns the part of the model that this worker computes.
    pub fn part(&self) -> &ModelSpec {
        self.part.as_ref().unwrap_or(&self.spec)
    }

    /// Returns the bytes of the packed weights. Reports missing or misshapen tensors.
    pub fn weight_bytes<B: Alloc>(&self, backend: &B) -> Result<u64> {
        weights::bytes(backend, self.part(), &self.checkpoint, self.weight_format)
    }

    /// Returns a hash of the architecture, of the weight format, of every tensor's name, dtype and
    /// shape, and of samples of its numbers. It distinguishes models that compute different
    /// results.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        self.checkpoint.fingerprint(&try_format(format_args!("{} {:?} {:?}", self.architecture, self.spec, self.weight_format))?)
    }

    pub fn load<B: Backend>(&self, backend: B, limits: BatchLimits, progress: LoadProgress) -> Result<Decoder<B>> {
        let model = self.load_from(&backend, Origin::Files(&mut |_| ()), progress)?;
        Decoder::new(backend, self.part(), model, limits, self.place)
    }

    /// Like `load`, from the packed form in this directory. If it is absent, damaged or of another
    /// model, the weights are loaded from the model's files and the packed form is written.
    pub fn load_packed<B: Backend>(
        &self,
        dir: &Path,
        backend: B,
        limits: BatchLimits,
        progress: LoadProgress,
    ) -> Result<(Decoder<B>, PackedReport)> {
        if !dir.is_dir() {
            return Err(Error::io(format!("packed_path {} does not exist or is not a directory", dir.display())));
        }
        let place = TensorLocation::for_model(dir, &backend, self.part(), &self.checkpoint, self.weight_format)?;
        let read = place.open().and_then(|reader| self.load_from(&backend, Origin::Packed(reader), &mut *progress));
        let (model, report) = match read {
            Ok(model) => (model, PackedReport { form: PackedForm::Read, reason: String::new() }),
            Err(e) if matches!(e.code(), Code::Cancelled | Code::OutOfMemory) => return Err(e),
            // If the model's files cause the error, loading from them reports it again.
            Err(why) => self.load_and_save(&place, &backend, why, progress)?,
        };
        Ok((Decoder::new(backend, self.part(), model, limits, self.place)?, report))
    }

    /// Loads the weights from the model's files and writes the packed form. `why` is the reason why
    /// the form could not be read.
    fn load_and_save<B: Alloc>(
        &self,
        place: &TensorLocation,
        backend: &B,
        why: Error,
        progress: LoadProgress,
    ) -> Result<(LoadedModel<B>, PackedReport)> {
        let mut writer = place.create();
        let mut save = |matrix: &B::Matrix| {
            if let Ok(form) = &mut writer
                && let Err(e) = form.add(backend, matrix)
            {
                writer = Err(e);
            }
        };
        let model = self.load_from(backend, Origin::Files(&mut save), progress)?;
        let report = match writer.and_then(Writer::finish) {
            Ok(()) => PackedReport { form: PackedForm::Saved, reason: try_format(format_args!("{why}"))? },
            Err(e) => PackedReport { form: PackedForm::Unsaved, reason: try_format(format_args!("{why}; {e}"))? },
        };
        Ok((model, report))
    }

    fn load_from<'a, B: Alloc>(&'a self, backend: &'a B, origin: Origin<'a, B>, progress: LoadProgress<'a>) -> Result<LoadedModel<B>> {
        weights::load(backend, self.part(), &self.checkpoint, self.weight_format, origin, progress)
    }
}

/// Rejects quantized weights, except experts in MXFP4.
fn refuse_quantized(config: &Config, spec: &ModelSpec) -> Result<()> {
    let Some(quantization) = config.object("quantization_config")? else { return Ok(()) };
    let method: String = quantization.text_or("quant_method", "unknown")?.chars().take(80).collect();
    if method == "mxfp4" && spec.has_experts_in_one_tensor() {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "config.json: unsupported quantization (method {method}); use a checkpoint with weights in f32, f16 or bf16, or with experts in mxfp4"
    )))
}

/// Returns the end-of-sequence tokens. generation_config.json has precedence, as in transformers.
/// Ids beyond the vocabulary are dropped, because they cannot be sampled.
fn eos_token_ids(generation: &Config, config: &Config, vocab_size: usize) -> Result<Vec<u32>> {
    let mut ids = generation.token_ids("eos_token_id")?;
    if ids.is_empty() {
        ids = config.token_ids("eos_token_id")?;
    }
    ids.retain(|&id| (id as usize) < vocab_size);
    Ok(ids)
}

/// Returns the sampling parameters of generation_config.json.
fn sampling_defaults(generation: &Config) -> Result<ModelDefaults> {
    let number = |name| generation.number(name).map(|number| number.map(|number| number as f32));
    let whole = |name| match generation.has(name) {
        true => generation.whole_or(name, i32::MAX as usize, 0).map(|number| Some(number as u32)),
        false => Ok(None),
    };
    let temperature = if generation.flag_or("do_sample", true)? { number("temperature")? } else { Some(0.0) };
    Ok(ModelDefaults {
        temperature,
        top_k: whole("top_k")?,
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        typical_p: number("typical_p")?,
        repetition_penalty: number("repetition_penalty")?,
        no_repeat_ngram_size: whole("no_repeat_ngram_size")?,
    })
}
