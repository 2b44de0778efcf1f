//! How well a model foresees a text, whatever its K and V are stored as.

use std::path::Path;
use std::time::Duration;

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::options::{EngineOptions, KvDtype, SamplingParams};

/// What the bundled model says of its held-out text.
pub struct Reading {
    /// Log probabilities of all tokens but each text's first.
    pub logprobs: Vec<f32>,
}

impl Reading {
    pub fn of(model: &Path, kv_dtype: KvDtype) -> Reading {
        let options = EngineOptions { model_dir: model.into(), kv_dtype: Some(kv_dtype), prefix_cache: false, ..Default::default() };
        let engine = Engine::create(&options).unwrap();
        for (i, text) in texts(model).into_iter().enumerate() {
            let sampling = SamplingParams { prompt_logprobs: Some(0), max_tokens: Some(1), ..SamplingParams::greedy() };
            // The texts say their special tokens themselves.
            let request = Request { user_data: i as u64, add_special: false, ..Request::new(Prompt::Text(text), sampling) };
            engine.add_request(request).unwrap();
        }
        let mut read = Vec::new();
        while engine.step().unwrap().unfinished > 0 {
            read.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        }
        read.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
        assert!(read.iter().all(|output| output.error.is_none()));
        read.sort_by_key(|output| output.user_data);
        Reading { logprobs: read.into_iter().flat_map(|output| output.prompt_logprobs.tokens).collect() }
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

fn texts(model: &Path) -> Vec<String> {
    let file = std::fs::read_to_string(model.join("held_out.json")).unwrap();
    serde_json::from_str(&file).unwrap()
}
