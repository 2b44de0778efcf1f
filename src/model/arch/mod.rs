//! The model families. Each is a function from a Hugging Face config to a `ModelSpec`.

mod base;
mod cohere;
mod deepseek;
mod experts;
mod falcon;
mod gemma;
mod gemma2;
mod gemma3;
mod glm4;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod opt;
mod phi;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen_moe;
mod rope;
mod smollm3;
mod stablelm;
mod starcoder2;

use super::config::Config;
use super::spec::{Act, ModelSpec};
use crate::error::{Error, Result};

/// A model family: its names in config.json, the prefix of its tensor names, and its spec.
pub struct Family {
    pub architecture: &'static str,
    pub model_type: &'static str,
    pub prefix: &'static str,
    pub spec: fn(&Config) -> Result<ModelSpec>,
}

pub const FAMILIES: &[Family] = &[
    Family { architecture: "GPT2LMHeadModel", model_type: "gpt2", prefix: "transformer.", spec: gpt2::spec },
    Family { architecture: "OPTForCausalLM", model_type: "opt", prefix: "model.", spec: opt::spec },
    Family { architecture: "LlamaForCausalLM", model_type: "llama", prefix: "model.", spec: llama::spec },
    Family { architecture: "MistralForCausalLM", model_type: "mistral", prefix: "model.", spec: mistral::spec },
    Family { architecture: "MixtralForCausalLM", model_type: "mixtral", prefix: "model.", spec: mixtral::spec },
    Family { architecture: "Qwen2ForCausalLM", model_type: "qwen2", prefix: "model.", spec: qwen2::spec },
    Family { architecture: "Qwen3ForCausalLM", model_type: "qwen3", prefix: "model.", spec: qwen3::spec },
    Family { architecture: "Qwen2MoeForCausalLM", model_type: "qwen2_moe", prefix: "model.", spec: qwen_moe::spec2 },
    Family { architecture: "Qwen3MoeForCausalLM", model_type: "qwen3_moe", prefix: "model.", spec: qwen_moe::spec3 },
    Family { architecture: "GemmaForCausalLM", model_type: "gemma", prefix: "model.", spec: gemma::spec },
    Family { architecture: "Gemma2ForCausalLM", model_type: "gemma2", prefix: "model.", spec: gemma2::spec },
    Family { architecture: "Gemma3ForCausalLM", model_type: "gemma3_text", prefix: "model.", spec: gemma3::spec },
    Family {
        architecture: "Gemma3ForConditionalGeneration",
        model_type: "gemma3",
        prefix: "language_model.model.",
        spec: gemma3::spec_of_text,
    },
    Family { architecture: "PhiForCausalLM", model_type: "phi", prefix: "model.", spec: phi::spec },
    Family { architecture: "Phi3ForCausalLM", model_type: "phi3", prefix: "model.", spec: phi3::spec },
    Family { architecture: "GPTNeoXForCausalLM", model_type: "gpt_neox", prefix: "gpt_neox.", spec: gpt_neox::spec },
    Family { architecture: "FalconForCausalLM", model_type: "falcon", prefix: "transformer.", spec: falcon::spec },
    Family { architecture: "StableLmForCausalLM", model_type: "stablelm", prefix: "model.", spec: stablelm::spec },
    Family { architecture: "Starcoder2ForCausalLM", model_type: "starcoder2", prefix: "model.", spec: starcoder2::spec },
    Family { architecture: "Olmo2ForCausalLM", model_type: "olmo2", prefix: "model.", spec: olmo2::spec },
    Family { architecture: "GraniteForCausalLM", model_type: "granite", prefix: "model.", spec: granite::spec },
    Family { architecture: "SmolLM3ForCausalLM", model_type: "smollm3", prefix: "model.", spec: smollm3::spec },
    Family { architecture: "Glm4ForCausalLM", model_type: "glm4", prefix: "model.", spec: glm4::spec },
    Family { architecture: "CohereForCausalLM", model_type: "cohere", prefix: "model.", spec: cohere::spec },
    Family { architecture: "Cohere2ForCausalLM", model_type: "cohere2", prefix: "model.", spec: cohere::spec2 },
    Family { architecture: "GptOssForCausalLM", model_type: "gpt_oss", prefix: "model.", spec: gpt_oss::spec },
    Family { architecture: "DeepseekV2ForCausalLM", model_type: "deepseek_v2", prefix: "model.", spec: deepseek::spec2 },
    Family { architecture: "DeepseekV3ForCausalLM", model_type: "deepseek_v3", prefix: "model.", spec: deepseek::spec3 },
];

/// Bounds on config values. Real models are far below, and products of these bounds do not
/// overflow.
mod limits {
    pub const MAX_LAYERS: usize = 1024;
    pub const MAX_WIDTH: usize = 1 << 18;
    pub const MAX_HEADS: usize = 1 << 12;
    pub const MAX_HEAD_DIM: usize = 1 << 12;
    pub const MAX_EXPERTS: usize = 1 << 12;
    pub const MAX_VOCAB: usize = 1 << 24;
    pub const MAX_POSITIONS: usize = 1 << 27;
    /// Bound on the number of tensors of one kind in a model.
    const MAX_TENSORS: usize = 1 << 17;

    /// Limits the number of tensors, because the spec contains all names before the checkpoint is
    /// checked.
    pub fn check_tensor_count(layers: usize, each: usize, what: &str) -> crate::error::Result<()> {
        match layers * each <= MAX_TENSORS {
            true => Ok(()),
            false => Err(crate::error::Error::model(format!(
                "config.json: too many {what} ({layers} layers with {each} each, limit {MAX_TENSORS})"
            ))),
        }
    }
}

/// Returns the family that the config names.
pub fn family(config: &Config) -> Result<&'static Family> {
    let architectures = config.texts("architectures");
    let model_type = config.text_or("model_type", "")?;
    // The first checkpoints of LLaMA have another name.
    let first_llama = |name: &str, family: &Family| name == "LLaMAForCausalLM" && family.architecture == "LlamaForCausalLM";
    let is_named = |family: &&Family| match architectures.is_empty() {
        true => family.model_type == model_type,
        false => architectures.iter().any(|&name| name == family.architecture || first_llama(name, family)),
    };
    FAMILIES.iter().find(is_named).ok_or_else(|| {
        let name = architectures.first().copied().unwrap_or(if model_type.is_empty() { "absent" } else { model_type });
        let name: String = name.chars().take(80).collect();
        let nearest = nearest(&name).join(", ");
        Error::unsupported(format!(
            "config.json: architecture is {name}, which is not supported; the nearest of the {} names in docs/models.md are {nearest}",
            FAMILIES.len()
        ))
    })
}

/// Returns the three supported names that are most similar to a name.
fn nearest(name: &str) -> Vec<&'static str> {
    let mut names: Vec<_> = FAMILIES.iter().map(|family| family.architecture).collect();
    names.sort_by(|a, b| strsim::jaro_winkler(name, b).total_cmp(&strsim::jaro_winkler(name, a)));
    names.truncate(3);
    names
}

fn act(config: &Config, field: &str, default: &str) -> Result<Act> {
    match config.text_or(field, default)? {
        "relu" => Ok(Act::Relu),
        "silu" | "swish" => Ok(Act::Silu),
        "gelu" => Ok(Act::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Act::GeluTanh),
        other => {
            Err(Error::unsupported(format!("config.json: {field} is {other}; supported are relu, silu, gelu, gelu_new, gelu_pytorch_tanh")))
        }
    }
}

/// Returns the width of a head if the config has only the number of heads.
fn head_dim(width: usize, heads: usize) -> Result<usize> {
    if !width.is_multiple_of(heads) {
        return Err(Error::model(format!("config.json: a hidden size of {width} is not a multiple of {heads} attention heads")));
    }
    Ok(width / heads)
}

/// 1 / sqrt(head_dim), rounded as in PyTorch.
fn standard_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_error_names_the_unsupported_architecture_and_the_nearest_ones() {
        for (name, expected) in [("Qwen3MoeForCausaLM", "Qwen3MoeForCausalLM"), ("Gemma4ForCausalLM", "Gemma3ForCausalLM")] {
            let message = family(&Config::from_json(json!({"architectures": [name]}))).err().unwrap();
            let names = message.message().split("docs/models.md are ").nth(1).unwrap().split(", ");
            assert_eq!(names.clone().count(), 3, "{message}");
            assert!(message.message().contains(name) && names.clone().any(|near| near == expected), "{message}");
        }
    }

    #[test]
    fn the_first_name_of_llama_is_known() {
        let family = family(&Config::from_json(json!({"architectures": ["LLaMAForCausalLM"]}))).unwrap();
        assert_eq!(family.architecture, "LlamaForCausalLM");
    }

    #[test]
    fn heads_that_do_not_divide_the_width_are_refused() {
        assert!(head_dim(30, 4).is_err());
        assert_eq!(head_dim(32, 4).unwrap(), 8);
    }

    #[test]
    fn a_null_window_is_none_and_an_absent_one_is_the_default_of_the_family() {
        let windows = |kind: &str, window: Option<serde_json::Value>| {
            let mut config = json!({"model_type": kind, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
                "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 8, "use_sliding_window": true, "max_window_layers": 1,
                "num_experts": 2, "num_experts_per_tok": 1});
            window.into_iter().for_each(|window| config["sliding_window"] = window);
            let config = Config::from_json(config);
            let spec = (family(&config).unwrap().spec)(&config);
            spec.map(|spec| spec.layers.iter().map(|layer| layer.attention.shape().window).collect::<Vec<_>>())
        };
        assert_eq!(windows("mistral", None).unwrap(), [Some(4096), Some(4096)]);
        assert_eq!(windows("mistral", Some(json!(null))).unwrap(), [None, None]);
        assert_eq!(windows("mixtral", None).unwrap(), [None, None]);
        assert_eq!(windows("qwen2", None).unwrap(), [None, Some(4096)]);
        assert_eq!(windows("qwen2", Some(json!(7))).unwrap(), [None, Some(7)]);
        assert_eq!(windows("gemma2", None).unwrap(), [Some(4096), None]);
        for kind in ["gemma2", "gemma3_text", "cohere2"] {
            assert!(windows(kind, Some(json!(null))).unwrap_err().message().contains("sliding_window is null"), "{kind}");
        }
    }

    #[test]
    fn rope_scaling_applies_once() {
        for (kind, factor) in [("deepseek_v2", 1), ("deepseek_v2", 4), ("deepseek_v3", 4), ("llama", 4)] {
            let config =
                Config::from_json(json!({"model_type": kind, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
                "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
                "qk_rope_head_dim": 6, "v_head_dim": 4, "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
                "max_position_embeddings": 100, "rope_parameters": {"rope_type": "linear", "factor": factor}}));
            let spec = (family(&config).unwrap().spec)(&config).unwrap();
            assert_eq!(spec.max_positions, 100 * factor, "{kind}");
            assert_eq!(spec.ropes[0].rotated(), if kind == "llama" { 2 } else { 6 }, "{kind}");
        }
    }

    #[test]
    fn the_first_gemma_models_use_the_approximated_gelu() {
        let act = |more: serde_json::Value| {
            let mut config = json!({"model_type": "gemma", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8,
                "num_hidden_layers": 1, "vocab_size": 8});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let config = Config::from_json(config);
            match &(family(&config).unwrap().spec)(&config).unwrap().layers[0].mlp {
                crate::model::spec::Mlp::Gated { act, .. } => *act,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(act(json!({"hidden_act": "gelu"})), Act::GeluTanh);
        assert_eq!(act(json!({"hidden_act": "gelu", "hidden_activation": null})), Act::GeluTanh);
        assert_eq!(act(json!({"hidden_act": "gelu", "hidden_activation": "relu"})), Act::Relu);
        assert_eq!(act(json!({"hidden_act": "silu"})), Act::Silu);
        assert_eq!(act(json!({})), Act::GeluTanh);
    }
}
