//! C structs from JSON.

use std::any::Any;
use std::ffi::{CString, c_char, c_void};

use pagedllm::ffi::*;
use serde_json::Value as Json;

/// Owns the values that the pointers of C structs refer to.
#[derive(Default)]
pub struct Keep(Vec<Box<dyn Any>>);

impl Keep {
    pub fn text(&mut self, text: &str) -> *const c_char {
        let text = CString::new(text).unwrap();
        let pointer = text.as_ptr();
        self.0.push(Box::new(text));
        pointer
    }

    pub fn list<T: 'static>(&mut self, list: Vec<T>) -> (*const T, u64) {
        let (pointer, len) = (list.as_ptr(), list.len() as u64);
        self.0.push(Box::new(list));
        (pointer, len)
    }

    fn one<T: 'static>(&mut self, value: T) -> *const T {
        self.list(vec![value]).0
    }

    fn texts(&mut self, list: &Json) -> (*const *const c_char, u64) {
        let texts = list.as_array().into_iter().flatten().map(|text| self.text(text.as_str().unwrap())).collect();
        self.list(texts)
    }
}

/// Parses a list of token ids, `{"repeat": token, "times": n}`, or `{"from": token, "times": n}`
/// for ascending ids.
pub fn tokens(list: &Json) -> Vec<u32> {
    let number = |value: &Json| value.as_u64().unwrap() as u32;
    if let Some(list) = list.as_array() {
        return list.iter().map(number).collect();
    }
    let times = number(&list["times"]);
    match list.get("repeat") {
        Some(token) => vec![number(token); times as usize],
        None => (0..times).map(|i| number(&list["from"]) + i).collect(),
    }
}

fn number(value: &Json) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

/// Returns a struct of the C API with its defaults, which the function `init` writes.
pub fn with_defaults<T>(init: unsafe extern "C" fn(*mut T, u64)) -> T {
    // SAFETY: these structs contain integers, floats and pointers, and have the given size.
    unsafe {
        let mut value = std::mem::zeroed::<T>();
        init(&mut value, size_of::<T>() as u64);
        value
    }
}

/// Sets the fields that the JSON object contains. All other fields keep their defaults.
macro_rules! set {
    ($to:ident, $from:expr, $($field:ident: $type:ty),* $(,)?) => {
        $(if let Some(value) = $from.get(stringify!($field)) {
            $to.$field = number(value) as $type;
        })*
    };
}

/// Panics if the JSON object has a member that is not in `names`.
pub fn known(members: &Json, names: &str) {
    for name in members.as_object().unwrap().keys() {
        assert!(names.split_whitespace().any(|known| known == name), "unknown member {name:?} of {members}");
    }
}

const SAMPLING: &str = "temperature top_p min_p top_k max_tokens min_tokens typical_p top_n_sigma xtc_probability xtc_threshold \
    mirostat_tau mirostat_eta presence_penalty frequency_penalty repetition_penalty no_repeat_ngram_size seed stop stop_token_ids \
    ignore_eos logprobs prompt_logprobs prompt_logprobs_start echo include_stop output json_schema json_object regex choice lark dry logit_bias bad_words \
    bad_words_ids allowed_token_ids";

pub fn sampling(json: &Json, keep: &mut Keep) -> *const pllm_sampling {
    if json.is_null() {
        return std::ptr::null();
    }
    known(json, SAMPLING);
    let mut c = with_defaults(pllm_sampling_init);
    set!(c, json, temperature: f32, top_p: f32, min_p: f32, top_k: u32, max_tokens: u32, min_tokens: u32, typical_p: f32,
        top_n_sigma: f32, xtc_probability: f32, xtc_threshold: f32, mirostat_tau: f32, mirostat_eta: f32, presence_penalty: f32,
        frequency_penalty: f32, repetition_penalty: f32, no_repeat_ngram_size: u32, prompt_logprobs_start: u64);
    if let Some(seed) = json["seed"].as_u64() {
        (c.seed, c.flags) = (seed, c.flags | PLLM_SAMPLING_SEED);
    }
    if let Some(top) = json["logprobs"].as_u64() {
        (c.top_logprobs, c.flags) = (top as u32, c.flags | PLLM_SAMPLING_LOGPROBS);
    }
    if let Some(top) = json["prompt_logprobs"].as_u64() {
        (c.prompt_top_logprobs, c.flags) = (top as u32, c.flags | PLLM_SAMPLING_PROMPT_LOGPROBS);
    }
    for (name, flag) in
        [("ignore_eos", PLLM_SAMPLING_IGNORE_EOS), ("echo", PLLM_SAMPLING_ECHO), ("include_stop", PLLM_SAMPLING_INCLUDE_STOP)]
    {
        c.flags |= if json[name] == true { flag } else { 0 };
    }
    c.output_kind = match json["output"].as_str() {
        None | Some("delta") => PLLM_OUTPUT_DELTA,
        Some("cumulative") => PLLM_OUTPUT_CUMULATIVE,
        Some("final") => PLLM_OUTPUT_FINAL,
        Some(other) => panic!("output is {other:?}"),
    };
    exclusions(json, &mut c, keep);
    grammar(json, &mut c, keep);
    keep.one(c)
}

fn exclusions(json: &Json, c: &mut pllm_sampling, keep: &mut Keep) {
    let list = |name: &str| json[name].as_array().cloned().unwrap_or_default();
    (c.stop, c.stop_count) = keep.texts(&json["stop"]);
    (c.stop_token_ids, c.stop_token_ids_len) = keep.list(tokens(&Json::from(list("stop_token_ids"))));
    (c.bad_words, c.bad_word_count) = keep.texts(&json["bad_words"]);
    let mut words = Vec::new();
    for word in list("bad_words_ids") {
        let (tokens, tokens_len) = keep.list(tokens(&word));
        words.push(pllm_token_list { tokens, tokens_len });
    }
    (c.bad_words_ids, c.bad_words_ids_len) = keep.list(words);
    let bias =
        list("logit_bias").iter().map(|pair| pllm_logit_bias { token: number(&pair[0]) as u32, bias: number(&pair[1]) as f32 }).collect();
    (c.logit_bias, c.logit_bias_len) = keep.list(bias);
    if json.get("allowed_token_ids").is_some() {
        (c.allowed_token_ids, c.allowed_token_ids_len) = keep.list(tokens(&json["allowed_token_ids"]));
    }
    let Some(json) = json.get("dry") else { return };
    let mut dry = with_defaults(pllm_dry_init);
    set!(dry, json, multiplier: f32, base: f32, allowed_length: u32, penalty_last_n: u32);
    c.dry = keep.one(dry);
}

fn grammar(json: &Json, c: &mut pllm_sampling, keep: &mut Keep) {
    let kinds = [
        ("json_schema", PLLM_GRAMMAR_JSON_SCHEMA),
        ("json_object", PLLM_GRAMMAR_JSON_OBJECT),
        ("regex", PLLM_GRAMMAR_REGEX),
        ("choice", PLLM_GRAMMAR_CHOICE),
        ("lark", PLLM_GRAMMAR_LARK),
    ];
    for (name, kind) in kinds {
        let Some(grammar) = json.get(name) else { continue };
        c.grammar_kind = kind;
        match grammar {
            Json::String(text) => c.grammar = keep.text(text),
            Json::Array(_) => (c.choices, c.choice_count) = keep.texts(grammar),
            Json::Object(_) => c.grammar = keep.text(&grammar.to_string()),
            _ => {}
        }
    }
}

fn beam(json: &Json, keep: &mut Keep) -> *const pllm_beam {
    known(json, "width groups diversity_penalty length_penalty early_stopping");
    let mut c = with_defaults(pllm_beam_init);
    set!(c, json, width: u32, groups: u32, diversity_penalty: f32, length_penalty: f32);
    c.early_stopping = match json["early_stopping"].as_str() {
        None | Some("no") => PLLM_EARLY_STOPPING_NO,
        Some("yes") => PLLM_EARLY_STOPPING_YES,
        Some("never") => PLLM_EARLY_STOPPING_NEVER,
        Some(other) => panic!("early_stopping is {other:?}"),
    };
    keep.one(c)
}

/// A logits hook that allows only tokens whose id is divisible by three.
unsafe extern "C" fn allow_multiples_of_three(_: *mut c_void, _: u64, _: *const u32, _: u64, logits: *mut f32, vocab_size: u64) {
    // SAFETY: the library passes `vocab_size` logits.
    let logits = unsafe { std::slice::from_raw_parts_mut(logits, vocab_size as usize) };
    logits.iter_mut().enumerate().filter(|(token, _)| token % 3 != 0).for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
}

const REQUEST: &str = "prompt tokens n best_of truncate_prompt_tokens priority deadline_ms keep plain_text hook salt sampling beam";

/// Returns a request whose outputs go to `queue`.
pub fn request(json: &Json, others: &str, queue: *const pllm_queue, keep: &mut Keep) -> pllm_request {
    known(json, &format!("{REQUEST} {others}"));
    let mut c = with_defaults(pllm_request_init);
    set!(c, json, n: u32, best_of: u32, truncate_prompt_tokens: u32, priority: i32, deadline_ms: i64);
    if let Some(prompt) = json["prompt"].as_str() {
        c.prompt = keep.text(prompt);
    }
    if let Some(list) = json.get("tokens") {
        (c.prompt_token_ids, c.prompt_token_ids_len) = keep.list(tokens(list));
    }
    if json["plain_text"] == true {
        c.text_flags = 0;
    }
    if let Some(salt) = json["salt"].as_str() {
        (c.cache_salt, c.cache_salt_len) = keep.list(salt.as_bytes().to_vec());
    }
    c.flags |= if json["keep"] == true { PLLM_REQUEST_KEEP } else { 0 };
    c.logits_hook = (json["hook"] == true).then_some(allow_multiples_of_three);
    c.sampling = sampling(&json["sampling"], keep);
    c.beam = json.get("beam").map_or(std::ptr::null(), |json| beam(json, keep));
    c.queue = queue;
    c
}

pub fn pin(json: &Json, keep: &mut Keep) -> pllm_pin {
    known(json, "pin prompt tokens priority time_to_live_ms salt engine");
    let mut c = with_defaults(pllm_pin_init);
    set!(c, json, priority: u32, time_to_live_ms: u64);
    if let Some(prompt) = json["prompt"].as_str() {
        c.prompt = keep.text(prompt);
    }
    if let Some(list) = json.get("tokens") {
        (c.prompt_token_ids, c.prompt_token_ids_len) = keep.list(tokens(list));
    }
    if let Some(salt) = json["salt"].as_str() {
        (c.cache_salt, c.cache_salt_len) = keep.list(salt.as_bytes().to_vec());
    }
    c
}

const OPTIONS: &str = "kv_bytes seed block_size kv_dtype max_model_len max_batch_tokens max_seqs prefill_chunk threads queue_capacity \
    max_waiting_requests max_waiting_tokens swap_bytes preemption order ageing_ms batching prefill_budget allocation weight_format \
    weight_group no_prefix_cache budget swap_directory";

/// Returns the options of an engine. The JSON names enumerators in lower case.
pub fn options(model: &str, isa: u32, json: &Json, keep: &mut Keep) -> pllm_engine_options {
    if !json.is_null() {
        known(json, OPTIONS);
    }
    let mut c = with_defaults(pllm_engine_options_init);
    c.model_path = keep.text(model);
    (c.isa, c.threads) = (isa, 2);
    let json = &replace_enumerators(json);
    set!(c, json, kv_bytes: u64, seed: u64, block_size: u32, kv_dtype: u32, max_model_len: u32, max_batch_tokens: u32, max_seqs: u32,
        prefill_chunk: u32, threads: u32, queue_capacity: u64, max_waiting_requests: u64, max_waiting_tokens: u64, swap_bytes: u64,
        preemption: u32, order: u32, ageing_ms: u32, batching: u32, prefill_budget: u32, allocation: u32, weight_format: u32,
        weight_group: u32);
    c.flags |= if json["no_prefix_cache"] == true { PLLM_ENGINE_NO_PREFIX_CACHE } else { 0 };
    if !std::path::Path::new(model).join("tokenizer.json").exists() {
        c.flags |= PLLM_ENGINE_SKIP_TOKENIZER;
    }
    c
}

/// Replaces the names of enumerators by their numbers.
fn replace_enumerators(json: &Json) -> Json {
    let names = [
        ("f32", PLLM_DTYPE_F32),
        ("bf16", PLLM_DTYPE_BF16),
        ("int8", PLLM_DTYPE_INT8),
        ("f16", PLLM_DTYPE_F16),
        ("fp8", PLLM_DTYPE_FP8),
        ("weights_int8", PLLM_WEIGHTS_INT8),
        ("weights_int4", PLLM_WEIGHTS_INT4),
        ("weights_int4_asymmetric", PLLM_WEIGHTS_INT4_ASYMMETRIC),
        ("weights_bf16", PLLM_WEIGHTS_BF16),
        ("recompute", PLLM_PREEMPTION_RECOMPUTE),
        ("swap", PLLM_PREEMPTION_SWAP),
        ("fcfs", PLLM_ORDER_FCFS),
        ("priority", PLLM_ORDER_PRIORITY),
        ("shortest_predicted", PLLM_ORDER_SHORTEST_PREDICTED),
        ("mixed", PLLM_BATCHING_MIXED),
        ("prefill_first", PLLM_BATCHING_PREFILL_FIRST),
        ("decode_first", PLLM_BATCHING_DECODE_FIRST),
        ("static", PLLM_BATCHING_STATIC),
        ("on_demand", PLLM_ALLOCATION_ON_DEMAND),
        ("max_tokens", PLLM_ALLOCATION_MAX_TOKENS),
    ];
    let mut json = json.clone();
    for (name, value) in json.as_object_mut().into_iter().flatten() {
        if ["budget", "swap_directory"].contains(&&name[..]) {
            continue;
        }
        if let Some(text) = value.as_str() {
            let (_, number) = names.iter().find(|(known, _)| *known == text).unwrap_or_else(|| panic!("{name} is {text:?}"));
            *value = Json::from(*number);
        }
    }
    json
}
