//! The size of a model, from its config.json alone.

use std::convert::Infallible;
use std::path::Path;

use pagedllm::backend::Values;
use pagedllm::model::spec::{Linear, Mlp, ModelSpec};
use pagedllm::model::{Config, family};

use super::device::{Device, Result};
use super::machine::{Machine, Pipeline, Swap};

/// Bytes per number of weights, activations and the KV cache.
const BYTES: f64 = 2.0;
/// Share of a device's memory that holds weights and the KV pool.
const MEMORY_SHARE: f64 = 0.9;

/// The numbers of a model on which the time of a step depends.
#[derive(Debug)]
pub struct Model {
    pub architecture: &'static str,
    /// Numbers in all matrices that a step reads.
    pub weights: f64,
    /// Numbers in the matrices with which one token is multiplied.
    pub active: f64,
    /// Numbers in K and V of one token, in all layers. Windows are not considered.
    pub kv: f64,
    /// The most KV heads of a layer.
    pub kv_heads: usize,
    pub layers: usize,
    pub hidden_size: usize,
    pub max_positions: usize,
}

impl Model {
    /// Reads a config.json.
    pub fn load(path: &Path) -> Result<Model> {
        let (Some(dir), Some(file)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
            return Err(format!("model {}: not the path of a config.json", path.display()));
        };
        let spec = || {
            let config = Config::load(dir, file)?;
            let family = family(&config)?;
            Ok((family.architecture, (family.spec)(&config)?))
        };
        let (architecture, spec) = spec().map_err(|error: pagedllm::error::Error| format!("model {}: {error}", path.display()))?;
        Ok(Model::new(architecture, &spec))
    }

    fn new(architecture: &'static str, spec: &ModelSpec) -> Model {
        let size = |linear: &Linear| (linear.parts.iter().map(|part| part.rows).sum::<usize>() * linear.cols) as f64;
        let mut all = 0.0;
        let count = |linear: &Linear, _| {
            all += size(linear);
            Ok::<(), Infallible>(())
        };
        let Ok(_) = spec.try_map(count, |_| Ok(()), |_| Ok(()));
        // A step reads one row of the embedding per token, unless the head is the same matrix.
        let embedding = size(&spec.embedding.tokens);
        let weights = if spec.head.weight.is_some() { all - embedding } else { all };
        let idle = spec.layers.iter().map(|layer| match &layer.mlp {
            Mlp::Experts(experts) => {
                let per_expert = experts.experts.first().map_or(0.0, |expert| size(&expert.gate_up) + size(&expert.down));
                per_expert * experts.routing.experts.saturating_sub(experts.routing.top_k) as f64
            }
            _ => 0.0,
        });
        let kv = spec.layers.iter().map(|layer| {
            let shape = layer.attention.shape();
            shape.kv_width() * if shape.values == Values::Own { 2 } else { 1 }
        });
        Model {
            architecture,
            weights,
            active: weights - idle.sum::<f64>(),
            kv: kv.sum::<usize>() as f64,
            kv_heads: spec.layers.iter().map(|layer| layer.attention.shape().kv_heads).max().unwrap_or(1),
            layers: spec.layers.len(),
            hidden_size: spec.hidden_size,
            max_positions: spec.max_positions,
        }
    }

    pub fn weight_bytes(&self) -> f64 {
        self.weights * BYTES
    }

    pub fn kv_bytes(&self) -> f64 {
        self.kv * BYTES
    }

    /// Returns the machine of devices that share the model.
    pub fn on(&self, device: &Device, parallel: Parallel, max_model_len: Option<usize>) -> Result<Machine> {
        let devices = parallel.tensor * parallel.pipeline;
        if devices > 1 && device.link_bandwidth == 0.0 {
            return Err(format!("{} has no link_bandwidth, and {devices} devices exchange results; set it", device.name));
        }
        if parallel.pipeline > self.layers {
            return Err(format!("--pipeline-parallel is {}; the model has {} layers", parallel.pipeline, self.layers));
        }
        let count = parallel.tensor as f64;
        let memory = device.memory_bytes as f64 * MEMORY_SHARE * devices as f64;
        let gb = |bytes: f64| bytes / 1e9;
        let pool = memory - self.weight_bytes();
        // Every device has at least one KV head.
        let kv_bytes = self.kv_bytes() * (count / self.kv_heads as f64).max(1.0);
        let slots = (pool / kv_bytes).max(0.0) as usize;
        if let Some(max) = max_model_len.filter(|&max| max < 2) {
            return Err(format!("--max-model-len is {max}; a request has at least 2 tokens"));
        }
        let max_model_len = max_model_len.unwrap_or(self.max_positions).min(self.max_positions).min(slots);
        if max_model_len < 2 {
            return Err(format!(
                "the model does not fit ({:.1} GB of weights, {:.1} GB of memory in {devices} devices); raise --tensor-parallel or --pipeline-parallel",
                gb(self.weight_bytes()),
                gb(memory)
            ));
        }
        let bandwidth = device.memory_bandwidth * device.bandwidth_efficiency * count;
        // Each layer adds up the results of attention and of its MLP over all devices: a ring sends
        // every number twice, except the part of the device itself.
        let sums = if parallel.tensor > 1 { 2.0 * self.layers as f64 } else { 0.0 };
        let sent = 2.0 * (count - 1.0) / count * self.hidden_size as f64 * BYTES;
        Ok(Machine {
            overhead: device.step_overhead_us * 1e-6,
            step: self.weight_bytes() / bandwidth,
            row: 2.0 * self.active / (device.flops * device.compute_efficiency * count),
            overlaps: true,
            exchange_start: sums * device.link_latency_us * 1e-6,
            exchange: if parallel.tensor > 1 { sums * sent / device.link_bandwidth } else { 0.0 },
            position: kv_bytes / bandwidth,
            pipeline: Pipeline {
                stages: parallel.pipeline,
                hop: device.link_latency_us * 1e-6,
                hop_token: if parallel.pipeline > 1 { self.hidden_size as f64 * BYTES / device.link_bandwidth } else { 0.0 },
            },
            swap: self.swap(device, parallel, kv_bytes),
            slots,
            max_model_len,
        })
    }

    /// Every device copies its part of a block: K and V of each of its layers are one copy each.
    fn swap(&self, device: &Device, parallel: Parallel, kv_bytes: f64) -> Swap {
        if device.host_bandwidth == 0.0 {
            return Swap::NONE;
        }
        let copies = 2.0 * self.layers as f64 / parallel.pipeline as f64;
        let devices = (parallel.tensor * parallel.pipeline) as f64;
        Swap { block: copies * device.host_latency_us * 1e-6, slot: kv_bytes / (device.host_bandwidth * devices) }
    }
}

/// Numbers of devices that share each layer, and of stages with different layers.
#[derive(Debug, Clone, Copy)]
pub struct Parallel {
    pub tensor: usize,
    pub pipeline: usize,
}

impl Parallel {
    pub const NONE: Parallel = Parallel { tensor: 1, pipeline: 1 };

    pub fn tensor(tensor: usize) -> Parallel {
        Parallel { tensor, pipeline: 1 }
    }
}
