//! The size of a model, from its config.json alone.

use std::convert::Infallible;
use std::path::Path;

use pagedllm::backend::Values;
use pagedllm::model::spec::{Linear, Mlp, ModelSpec};
use pagedllm::model::{Config, family};

use super::Result;
use super::machine::Device;
use super::simulation::Machine;

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

    /// Returns the machine of `devices` devices that share the model by tensor parallelism.
    pub fn on(&self, device: &Device, devices: usize, max_model_len: Option<usize>) -> Result<Machine> {
        if devices > 1 && device.link_bandwidth == 0.0 {
            return Err(format!("{} has no link_bandwidth, and {devices} devices exchange results; set it", device.name));
        }
        let count = devices as f64;
        let memory = device.memory_bytes as f64 * MEMORY_SHARE * count;
        let gb = |bytes: f64| bytes / 1e9;
        let pool = memory - self.weight_bytes();
        let slots = (pool / self.kv_bytes()).max(0.0) as usize;
        let max_model_len = max_model_len.unwrap_or(self.max_positions).min(self.max_positions).min(slots);
        if max_model_len < 2 {
            return Err(format!(
                "the model does not fit ({:.1} GB of weights, {:.1} GB of memory in {devices} devices); raise --tensor-parallel",
                gb(self.weight_bytes()),
                gb(memory)
            ));
        }
        let bandwidth = device.memory_bandwidth * device.bandwidth_efficiency * count;
        // Each layer adds up the results of attention and of its MLP over all devices: a ring sends
        // every number twice, except the part of the device itself.
        let sums = if devices > 1 { 2.0 * self.layers as f64 } else { 0.0 };
        let sent = 2.0 * (count - 1.0) / count * self.hidden_size as f64 * BYTES;
        Ok(Machine {
            overhead: (device.step_overhead_us + sums * device.link_latency_us) * 1e-6,
            step: self.weight_bytes() / bandwidth,
            row: 2.0 * self.active / (device.flops * device.compute_efficiency * count),
            overlaps: true,
            exchange: if devices > 1 { sums * sent / device.link_bandwidth } else { 0.0 },
            position: self.kv_bytes() / bandwidth,
            slots,
            max_model_len,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LLAMA_8B: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false}"#;
    const MIXTRAL: &str = r#"{"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": false}"#;

    fn model(config: &str) -> Result<Model> {
        static FILES: AtomicUsize = AtomicUsize::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pagedllm-simulate-{}-{number}.json", std::process::id()));
        std::fs::write(&path, config).unwrap();
        let model = Model::load(&path);
        std::fs::remove_file(&path).unwrap();
        model
    }

    #[test]
    fn sizes_are_those_of_published_models() {
        let llama = model(LLAMA_8B).unwrap();
        // 8.03 billion with the embedding of 0.53 billion.
        assert!((llama.weights / 7.505e9 - 1.0).abs() < 1e-3, "{}", llama.weights);
        assert_eq!((llama.active, llama.kv_bytes()), (llama.weights, 131072.0));
        let mixtral = model(MIXTRAL).unwrap();
        // 46.7 and 12.9 billion with the embedding of 0.13 billion.
        assert!((mixtral.weights / 46.57e9 - 1.0).abs() < 1e-3, "{}", mixtral.weights);
        assert!((mixtral.active / 12.75e9 - 1.0).abs() < 2e-3, "{}", mixtral.active);
    }

    #[test]
    fn a_model_that_does_not_fit_is_refused_with_both_sizes() {
        let (mixtral, h100) = (model(MIXTRAL).unwrap(), Device::load("h100").unwrap());
        let problem = mixtral.on(&h100, 1, None).unwrap_err();
        assert!(problem.contains("93.1 GB of weights, 72.0 GB of memory in 1 devices"), "{problem}");
        let two = mixtral.on(&h100, 2, None).unwrap();
        assert!(two.slots > 300_000 && two.max_model_len == 32768 && two.exchange > 0.0);
        let cpu = Device::load("epyc-9654").unwrap();
        assert!(mixtral.on(&cpu, 2, None).unwrap_err().contains("link_bandwidth"));
        assert!(model("{}").unwrap_err().contains("architecture"));
    }
}
