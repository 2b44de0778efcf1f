//! libpagedllm: LLM serving inside the process of the host. This page lists the modules.

#![deny(unsafe_code)]

pub mod backend;
pub mod batch; // the input of one forward pass as flat data
pub mod budget; // a budget of KV bytes for one or several engines
pub mod decode; // sampling: from logits to a token
pub mod engine; // requests, steps and outputs
pub mod error; // the error type: a code and a message with the values and the remedy
pub mod ffi; // the C ABI
pub mod kv; // the block manager: which KV block holds which tokens
pub mod model; // the spec of an architecture, the weights, and the decoder that interprets the spec
pub mod options; // engine options and sampling parameters
pub mod sched; // the scheduler: selects the sequences of each step
mod sys;
pub mod text; // tokenizer, incremental detokenizer, chat template
