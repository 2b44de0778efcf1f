//! libpagedllm: LLM serving inside the process of the host.
//!
//! This page is for hosts in Rust. An engine owns one model, its KV pool and its requests. A host
//! adds requests, steps the engine, and polls a queue for outputs:
//!
//! ```
//! use pagedllm::engine::{Engine, Prompt, Request};
//! use pagedllm::types::options::{EngineOptions, SamplingParams};
//! use std::time::Duration;
//!
//! let options = EngineOptions { model_dir: "examples/model".into(), ..Default::default() };
//! let engine = Engine::create(&options)?;
//! let prompt = engine.text()?.render_chat(r#"[{"role": "user", "content": "What is 7 + 5?"}]"#)?;
//! let mut request = Request::new(Prompt::Text(prompt), SamplingParams::greedy());
//! request.add_special = false; // the chat template has written the special tokens
//! engine.add_request(request)?;
//!
//! let mut text = String::new();
//! while engine.step()?.unfinished > 0 {
//!     for output in engine.queue().poll(Some(Duration::ZERO))? {
//!         text += &output.text;
//!     }
//! }
//! for output in engine.queue().poll(Some(Duration::ZERO))? {
//!     text += &output.text;
//! }
//! assert!(text.contains("12"), "{text}");
//! # Ok::<(), pagedllm::error::Error>(())
//! ```
//!
//! [`engine`] has requests, sequences, steps and outputs, [`types`] the options of engines and of
//! sampling and the ids, [`text`] the tokenizer and the chat template, [`memory::budget`] the
//! memory that several engines share, and [`error`] the error type. The other modules are internal
//! and not listed here. They can change in any release. The stable interface is the C ABI
//! (`include/pagedllm.h`); `docs/` describes both.

#![deny(unsafe_code)]
#![warn(missing_docs)]

#[doc(hidden)]
pub mod backend; // the ops of a forward pass, on the CPU and on CUDA devices
#[doc(hidden)]
pub mod communicator; // bytes between the workers of one engine
pub mod engine; // requests, sequences and steps; it connects all other modules
pub mod error;
#[doc(hidden)]
pub mod executor; // the interface between scheduling and computation
#[doc(hidden)]
pub mod ffi; // the C ABI
#[doc(hidden)]
pub mod generation; // sampling, grammars, beam search, stop strings: from logits to tokens and text
#[doc(hidden)]
pub mod kv; // the block manager: which KV block holds which tokens
pub mod memory; // the memory plan, and the budget that several engines share
#[doc(hidden)]
pub mod model; // the spec of an architecture, the weights, and the decoder that interprets the spec
#[doc(hidden)]
pub mod observability; // statistics, metrics, traces, journals
#[doc(hidden)]
pub mod output; // the queues from which the host reads outputs
#[doc(hidden)]
pub mod scheduler; // the scheduler: selects the sequences of each step
mod sys; // the few system calls
pub mod text;
pub mod types; // ids, options, batches, outputs
