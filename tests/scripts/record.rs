//! The record of a script: the results of its calls and the outputs of its sequences.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::fmt::Write;

use pagedllm::ffi::*;
use serde_json::{Value as Json, json};

/// The concatenated outputs of one sequence.
#[derive(Default)]
pub struct Generated {
    tokens: Vec<u32>,
    text: String,
    /// Bits of log probabilities, 8 hexadecimal digits each. Alternatives have the prefix `token:`.
    logprobs: String,
    top_logprobs: String,
    prompt_logprobs: String,
    prompt_top_logprobs: String,
    /// Finish reasons. A resumed sequence has one per run.
    ends: Vec<u32>,
    error_codes: Vec<i32>,
    /// Bits of the score in the last output of the latest run.
    score: u64,
}

/// # Safety
/// `data` is null or has `len` values.
unsafe fn slice<'a, T>(data: *const T, len: u64) -> &'a [T] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(data, len as usize) }
}

fn bits(values: &[f32], out: &mut String) {
    values.iter().for_each(|value| write!(out, "{:08x}", value.to_bits()).unwrap());
}

fn alternatives(values: &[pllm_logprob], out: &mut String) {
    values.iter().for_each(|value| write!(out, "{}:{:08x} ", value.token, value.logprob.to_bits()).unwrap());
}

impl Generated {
    /// # Safety
    /// The output's pointers are valid.
    pub unsafe fn collect(&mut self, output: &pllm_output) {
        // SAFETY: the caller's contract.
        unsafe {
            self.tokens.extend(slice(output.tokens, output.tokens_len));
            let text = slice::<c_char>(output.text, output.text_len).iter().map(|&byte| byte as u8).collect();
            self.text += &String::from_utf8(text).expect("text is UTF-8");
            bits(slice(output.logprobs, output.tokens_len), &mut self.logprobs);
            alternatives(slice(output.top_logprobs, output.top_logprobs_len), &mut self.top_logprobs);
            bits(slice(output.prompt_logprobs, output.prompt_logprobs_len), &mut self.prompt_logprobs);
            alternatives(slice(output.prompt_top_logprobs, output.prompt_top_logprobs_len), &mut self.prompt_top_logprobs);
        }
        if output.finish_reason != PLLM_FINISH_NONE {
            self.ends.push(output.finish_reason);
            self.score = output.score.to_bits();
        }
        self.error_codes.extend((output.error_code != 0).then_some(output.error_code));
    }

    fn to_json(&self) -> Json {
        let mut json = json!({"tokens": self.tokens, "ends": self.ends});
        for (name, text) in [
            ("text", &self.text),
            ("logprobs", &self.logprobs),
            ("top_logprobs", &self.top_logprobs),
            ("prompt_logprobs", &self.prompt_logprobs),
            ("prompt_top_logprobs", &self.prompt_top_logprobs),
        ] {
            if !text.is_empty() {
                json[name] = text[..].into();
            }
        }
        if !self.error_codes.is_empty() {
            json["error_codes"] = json!(self.error_codes);
        }
        if self.score != 0 {
            json["score"] = format!("{:016x}", self.score).into();
        }
        json
    }
}

/// The recorded result of a script.
#[derive(Default)]
pub struct Record {
    /// Results of calls that return more than success.
    calls: Vec<Json>,
    pub sequences: BTreeMap<String, Generated>,
}

impl Record {
    /// Records a call. `index` is its position in the script.
    pub fn call(&mut self, index: usize, name: &str, result: Json) {
        if result.as_object().is_none_or(|members| !members.is_empty()) {
            self.calls.push(json!({"index": index, "call": name, "result": result}));
        }
    }

    pub fn to_json(&self) -> Json {
        let sequences: serde_json::Map<String, Json> =
            self.sequences.iter().map(|(name, generated)| (name.clone(), generated.to_json())).collect();
        json!({"calls": self.calls, "sequences": sequences})
    }
}
