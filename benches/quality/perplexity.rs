//! How well a model foresees a text, whatever its weights, K and V are stored as.

use std::path::Path;
use std::time::Duration;

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::options::{EngineOptions, Isa, KvDtype, SamplingParams, WeightFormat};

/// What the bundled model says of its held-out text.
pub struct Reading {
    /// Log probabilities of what it was trained to say: an assistant's answers, and sentences that are no chat.
    pub logprobs: Vec<f32>,
}

impl Reading {
    /// On the widest path that multiplies nothing in bf16.
    pub fn of(model: &Path, weight_format: Option<WeightFormat>, kv_dtype: KvDtype) -> Reading {
        let in_f32 = Isa::ALL.into_iter().rfind(|isa| *isa != Isa::Avx512Bf16 && isa.is_present());
        Reading::on(in_f32.unwrap_or(Isa::Portable), model, weight_format, kv_dtype)
    }

    pub fn on(isa: Isa, model: &Path, weight_format: Option<WeightFormat>, kv_dtype: KvDtype) -> Reading {
        let (model_dir, isa, kv_dtype) = (model.into(), Some(isa), Some(kv_dtype));
        let options = EngineOptions { model_dir, weight_format, isa, kv_dtype, prefix_cache: false, ..Default::default() };
        let engine = Engine::create(&options).unwrap();
        // They say their special tokens themselves.
        let texts: Vec<_> = texts(model).iter().map(|text| engine.text().unwrap().encode(text, false).unwrap()).collect();
        for (i, tokens) in texts.iter().enumerate() {
            let sampling = SamplingParams { prompt_logprobs: Some(0), max_tokens: Some(1), ..SamplingParams::greedy() };
            engine.add_request(Request { user_data: i as u64, ..Request::new(Prompt::Tokens(tokens.clone()), sampling) }).unwrap();
        }
        let mut read = Vec::new();
        while engine.step().unwrap().unfinished > 0 {
            read.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        }
        read.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        assert!(read.iter().all(|output| output.error.is_none()));
        let of =
            |i: usize| read.iter().filter(move |output| output.user_data == i as u64).flat_map(|output| &output.prompt_logprobs.tokens);
        let [assistant, end] = ["<|assistant|>", "<|end|>"].map(|name| engine.text().unwrap().encode(name, false).unwrap()[0]);
        let learned = |(i, tokens): (usize, &Vec<u32>)| {
            let said = said(tokens, assistant, end);
            assert_eq!(of(i).count(), tokens.len() - 1);
            of(i).zip(&said[1..]).filter(|(_, said)| **said).map(|(logprob, _)| *logprob).collect::<Vec<_>>()
        };
        Reading { logprobs: texts.iter().enumerate().flat_map(learned).collect() }
    }

    pub fn perplexity(&self) -> f64 {
        let sum: f64 = self.logprobs.iter().map(|&logprob| logprob as f64).sum();
        (-sum / self.logprobs.len() as f64).exp()
    }

    /// How far its log probabilities are from another's: on average, and at most.
    pub fn distance(&self, other: &Reading) -> (f64, f64) {
        assert_eq!(self.logprobs.len(), other.logprobs.len());
        let distances = self.logprobs.iter().zip(&other.logprobs).map(|(a, b)| (a - b).abs() as f64);
        let (sum, most) = distances.fold((0.0, 0.0f64), |(sum, most), x| (sum + x, most.max(x)));
        (sum / self.logprobs.len() as f64, most)
    }
}

/// Every format in whole numbers, the best first.
pub fn narrow_formats() -> Vec<WeightFormat> {
    let int4 = |offsets| WeightFormat::GROUPS.map(|group| WeightFormat::Int4 { group, offsets });
    [WeightFormat::Int8].into_iter().chain(int4(true)).chain(int4(false)).collect()
}

/// Which tokens are the assistant's own words, up to their end; all, where nobody speaks.
fn said(tokens: &[u32], assistant: u32, end: u32) -> Vec<bool> {
    let chat = tokens.contains(&assistant);
    let mut speaks = !chat;
    let mut said = vec![false; tokens.len()];
    for (i, &token) in tokens.iter().enumerate() {
        // A new line comes first.
        speaks |= chat && i >= 2 && tokens[i - 2] == assistant;
        said[i] = speaks;
        speaks &= !chat || token != end;
    }
    said
}

fn texts(model: &Path) -> Vec<String> {
    let file = std::fs::read_to_string(model.join("held_out.json")).unwrap();
    serde_json::from_str(&file).unwrap()
}
