//! The architectures of GGUF files: their names in Hugging Face, and those of their tensors.

use super::Metadata;
use super::names::*;
use crate::error::{Error, Result};
use crate::model::spec::Pairs;

/// A value of `general.architecture`.
#[derive(Clone, Copy)]
pub struct Architecture {
    pub name: &'static str,
    /// The architecture in Hugging Face, and that of a model with experts.
    dense: Option<&'static str>,
    sparse: Option<(&'static str, ExpertNames)>,
    /// The architecture in Hugging Face of a model with experts whose scores are sigmoids.
    sigmoid: Option<&'static str>,
    /// The dimensions of a head that rotate together, if they differ from Hugging Face. The
    /// converter of llama.cpp permutes the rows of queries and keys of "llama" and "granite",
    /// so that dimensions 2i and 2i + 1 form a pair.
    pub pairs: Option<Pairs>,
    pub windows: Windows,
    /// Whether a part of a head may stay unrotated.
    pub partial_rope: bool,
    /// The matrix that has a bias if `attention_bias` is set.
    pub biased: &'static str,
    /// Whether branches that are parallel have separate norms, as branches in sequence have.
    pub parallel_norms: bool,
    /// The number of layers of the model that scales scores by its width per head, which files do
    /// not state.
    pub scaled_by_width: Option<usize>,
    /// Whether the bounds of YaRN are rounded to whole pairs, which files do not state.
    pub whole_yarn: bool,
    /// Whether `yarn_log_multiplier` is a tenth of mscale_all_dim, and mscale is the same.
    /// Otherwise it is mscale_all_dim, and mscale is 1.
    pub yarn_in_tenths: bool,
    pub names: Names,
}

/// The layers with a sliding window.
#[derive(Clone, Copy)]
pub enum Windows {
    None,
    /// All layers, if the file has a window.
    Optional,
    /// All layers but each nth.
    ExceptEach(usize),
}

const fn dense(name: &'static str, in_hugging_face: &'static str, names: Names) -> Architecture {
    Architecture {
        name,
        dense: Some(in_hugging_face),
        sparse: None,
        sigmoid: None,
        pairs: None,
        windows: Windows::None,
        partial_rope: false,
        biased: "attn_output",
        parallel_norms: false,
        scaled_by_width: None,
        whole_yarn: true,
        yarn_in_tenths: false,
        names,
    }
}

const fn sparse(name: &'static str, in_hugging_face: &'static str, experts: ExpertNames) -> Architecture {
    Architecture { dense: None, sparse: Some((in_hugging_face, experts)), ..dense(name, in_hugging_face, USUAL) }
}

const ARCHITECTURES: [Architecture; 22] = [
    Architecture {
        sparse: Some(("MixtralForCausalLM", MIXTRAL_EXPERTS)),
        pairs: Some(Pairs::Neighbours),
        ..dense("llama", "LlamaForCausalLM", USUAL)
    },
    dense("qwen2", "Qwen2ForCausalLM", USUAL),
    dense("qwen3", "Qwen3ForCausalLM", USUAL),
    sparse("qwen2moe", "Qwen2MoeForCausalLM", QWEN2_EXPERTS),
    sparse("qwen3moe", "Qwen3MoeForCausalLM", QWEN3_EXPERTS),
    dense("gemma", "GemmaForCausalLM", USUAL),
    Architecture { windows: Windows::ExceptEach(2), scaled_by_width: Some(46), ..dense("gemma2", "Gemma2ForCausalLM", SANDWICH) },
    Architecture { windows: Windows::ExceptEach(6), scaled_by_width: Some(62), ..dense("gemma3", "Gemma3ForCausalLM", SANDWICH) },
    Architecture { partial_rope: true, ..dense("phi2", "PhiForCausalLM", PHI2) },
    Architecture { windows: Windows::Optional, partial_rope: true, ..dense("phi3", "Phi3ForCausalLM", PHI3) },
    dense("falcon", "FalconForCausalLM", FALCON),
    Architecture { windows: Windows::Optional, ..dense("starcoder2", "Starcoder2ForCausalLM", STARCODER2) },
    Architecture { partial_rope: true, ..dense("stablelm", "StableLmForCausalLM", STABLELM) },
    dense("gpt2", "GPT2LMHeadModel", GPT2),
    Architecture { partial_rope: true, parallel_norms: true, ..dense("gptneox", "GPTNeoXForCausalLM", GPTNEOX) },
    dense("command-r", "CohereForCausalLM", USUAL),
    Architecture { windows: Windows::ExceptEach(4), ..dense("cohere2", "Cohere2ForCausalLM", USUAL) },
    Architecture { partial_rope: true, biased: "attn_q", ..dense("glm4", "Glm4ForCausalLM", GLM4) },
    Architecture { pairs: Some(Pairs::Neighbours), ..dense("granite", "GraniteForCausalLM", USUAL) },
    dense("olmo2", "Olmo2ForCausalLM", SANDWICH),
    Architecture {
        windows: Windows::ExceptEach(2),
        whole_yarn: false,
        names: GPT_OSS,
        ..sparse("gpt-oss", "GptOssForCausalLM", GPT_OSS_EXPERTS)
    },
    Architecture {
        sigmoid: Some("DeepseekV3ForCausalLM"),
        yarn_in_tenths: true,
        names: DEEPSEEK2,
        ..sparse("deepseek2", "DeepseekV2ForCausalLM", QWEN2_EXPERTS)
    },
];

/// Limit of numbers in the metadata. The config has narrower ones.
pub const MAX_NUMBER: usize = u32::MAX as usize;
/// Key of the function that gives the scores of experts, and its values.
pub const SCORES: &str = "expert_gating_func";
const SOFTMAX: usize = 1;
pub const SIGMOID: usize = 2;
const SOFTMAX_OF_CHOSEN: usize = 3;

impl Architecture {
    pub fn from_metadata(metadata: &Metadata) -> Result<Architecture> {
        let name = metadata.text("general.architecture")?.ok_or_else(|| Error::model("general.architecture is missing"))?;
        ARCHITECTURES.into_iter().find(|known| known.name == name).ok_or_else(|| {
            let known = ARCHITECTURES.map(|known| known.name).join(", ");
            Error::unsupported(format!("general.architecture is {name:.80}; supported in GGUF files are {known}"))
        })
    }

    /// Returns the name of the architecture in Hugging Face, and the names of its experts.
    pub fn in_hugging_face(&self, metadata: &Metadata) -> Result<(&'static str, Option<ExpertNames>)> {
        let key = format!("{}.expert_count", self.name);
        let experts = metadata.whole(&key, MAX_NUMBER)?.unwrap_or(0);
        let refused = || {
            Error::unsupported(format!(
                "{key} is {experts}; GGUF files of {} must have {}",
                self.name,
                if experts > 0 { "none" } else { "experts" }
            ))
        };
        if experts == 0 {
            return Ok((self.dense.ok_or_else(refused)?, None));
        }
        let (name, names) = self.sparse.ok_or_else(refused)?;
        let key = format!("{}.{SCORES}", self.name);
        match (metadata.whole(&key, MAX_NUMBER)?, self.sigmoid) {
            (None | Some(0 | SOFTMAX), _) => Ok((name, Some(names))),
            // Normalized weights are the softmax over the chosen experts.
            (Some(SOFTMAX_OF_CHOSEN), _) if names.normalized => Ok((name, Some(names))),
            (Some(SIGMOID), Some(sigmoid)) => Ok((sigmoid, Some(names))),
            (Some(other), sigmoid) => {
                let or_sigmoid = if sigmoid.is_some() { format!(" or {SIGMOID} (sigmoid)") } else { String::new() };
                Err(Error::unsupported(format!("{key} is {other}; files of {} must have {SOFTMAX} (softmax){or_sigmoid}", self.name)))
            }
        }
    }
}
