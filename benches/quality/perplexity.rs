//! Perplexity of a model on a text, for any format of its weights, K and V.

use std::path::Path;
use std::time::Duration;

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::Result;
use pagedllm::types::options::{EngineOptions, Isa, KvDtype, SamplingParams, WeightFormat};

/// Log probabilities of a model on texts.
pub struct Perplexity {
    /// One per token that the model was trained to produce: answers of the assistant, and sentences
    /// outside chats.
    pub logprobs: Vec<f32>,
}

/// The texts that a model reads.
#[derive(Clone, Copy)]
pub enum Texts<'a> {
    /// The held-out texts beside the bundled model, which contain special tokens.
    HeldOut,
    /// A text, in pieces of `PIECE` tokens.
    Plain(&'a str),
}

/// Tokens of a piece of a text.
const PIECE: usize = 256;

impl Perplexity {
    /// Measures on the widest path that multiplies nothing in bf16.
    pub fn measure(model: &Path, texts: Texts, weight_format: Option<WeightFormat>, kv_dtype: KvDtype) -> Perplexity {
        Perplexity::try_measure(model, texts, weight_format, kv_dtype).unwrap()
    }

    /// Like `measure`. Errors: the model cannot be loaded in this format.
    pub fn try_measure(model: &Path, texts: Texts, weight_format: Option<WeightFormat>, kv_dtype: KvDtype) -> Result<Perplexity> {
        let in_f32 = Isa::ALL.into_iter().rfind(|isa| *isa != Isa::Avx512Bf16 && isa.is_present());
        Perplexity::try_measure_on(in_f32.unwrap_or(Isa::Portable), model, texts, weight_format, kv_dtype)
    }

    /// Measures on one instruction path.
    pub fn measure_on(isa: Isa, model: &Path, texts: Texts, weight_format: Option<WeightFormat>, kv_dtype: KvDtype) -> Perplexity {
        Perplexity::try_measure_on(isa, model, texts, weight_format, kv_dtype).unwrap()
    }

    fn try_measure_on(isa: Isa, model: &Path, texts: Texts, weight_format: Option<WeightFormat>, kv_dtype: KvDtype) -> Result<Perplexity> {
        let (model_dir, isa, kv_dtype) = (model.into(), Some(isa), Some(kv_dtype));
        let options = EngineOptions { model_dir, weight_format, isa, kv_dtype, prefix_cache: false, ..Default::default() };
        let engine = Engine::create(&options)?;
        let encode = |text: &str| engine.text().unwrap().encode(text, false).unwrap();
        let pieces: Vec<Vec<u32>> = match texts {
            Texts::HeldOut => held_out(model).iter().map(|text| encode(text)).collect(),
            Texts::Plain(text) => encode(text).chunks(PIECE).map(<[u32]>::to_vec).collect(),
        };
        for (i, tokens) in pieces.iter().enumerate() {
            let sampling = SamplingParams { prompt_logprobs: Some(0), max_tokens: Some(1), ..SamplingParams::greedy() };
            engine.add_request(Request { user_data: i as u64, ..Request::new(Prompt::Tokens(tokens.clone()), sampling) }).unwrap();
        }
        let mut outputs = Vec::new();
        while engine.step().unwrap().unfinished > 0 {
            outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        }
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        assert!(outputs.iter().all(|output| output.error.is_none()));
        let logprobs =
            |i: usize| outputs.iter().filter(move |output| output.user_data == i as u64).flat_map(|output| &output.prompt_logprobs.tokens);
        let [assistant, end] = ["<|assistant|>", "<|end|>"].map(|name| encode(name)[0]);
        let learned = |(i, tokens): (usize, &Vec<u32>)| {
            let answers = match texts {
                Texts::HeldOut => answer_tokens(tokens, assistant, end),
                Texts::Plain(_) => vec![true; tokens.len()],
            };
            assert_eq!(logprobs(i).count(), tokens.len() - 1);
            logprobs(i).zip(&answers[1..]).filter(|(_, answer)| **answer).map(|(logprob, _)| *logprob).collect::<Vec<_>>()
        };
        Ok(Perplexity { logprobs: pieces.iter().enumerate().flat_map(learned).collect() })
    }

    pub fn perplexity(&self) -> f64 {
        let sum: f64 = self.logprobs.iter().map(|&logprob| logprob as f64).sum();
        (-sum / self.logprobs.len() as f64).exp()
    }

    /// Returns the mean and the maximum distance of the log probabilities from those of `other`.
    pub fn distance(&self, other: &Perplexity) -> (f64, f64) {
        assert_eq!(self.logprobs.len(), other.logprobs.len());
        let distances = self.logprobs.iter().zip(&other.logprobs).map(|(a, b)| (a - b).abs() as f64);
        let (sum, max) = distances.fold((0.0, 0.0f64), |(sum, max), x| (sum + x, max.max(x)));
        (sum / self.logprobs.len() as f64, max)
    }
}

/// Returns every integer format, the most precise first.
pub fn narrow_formats() -> Vec<WeightFormat> {
    let int4 = |offsets| WeightFormat::GROUPS.map(|group| WeightFormat::Int4 { group, offsets });
    [WeightFormat::Int8].into_iter().chain(int4(true)).chain(int4(false)).collect()
}

/// Marks the tokens of the assistant's answers, with their ends. In a text that is not a chat, all
/// tokens.
fn answer_tokens(tokens: &[u32], assistant: u32, end: u32) -> Vec<bool> {
    let chat = tokens.contains(&assistant);
    let mut in_answer = !chat;
    let mut answers = vec![false; tokens.len()];
    for (i, &token) in tokens.iter().enumerate() {
        // A line break follows the marker.
        in_answer |= chat && i >= 2 && tokens[i - 2] == assistant;
        answers[i] = in_answer;
        in_answer &= !chat || token != end;
    }
    answers
}

fn held_out(model: &Path) -> Vec<String> {
    let file = std::fs::read_to_string(model.join("held_out.json")).unwrap();
    serde_json::from_str(&file).unwrap()
}
