//! libpagedllm: LLM serving inside your own process. This page is the map.

#![deny(unsafe_code)]

pub mod arena; // a budget of KV bytes, for one engine or several
pub mod backend;
pub mod batch; // one forward pass as flat data
pub mod decode; // from logits to a token
pub mod engine; // commands in, steps, outputs out
pub mod error; // one error type: code, message with the numbers and the remedy
pub mod ffi; // the C ABI
pub mod kv; // which block holds which tokens
pub mod model; // an architecture as data, its weights, its one decoder
pub mod options; // engine options and sampling parameters
pub mod sched; // who runs next
mod sys;
pub mod text; // tokenizer, incremental detokenizer, chat template
