//! Tests of models, weights, tokenizer files and the forward pass.

#[path = "../support/counting.rs"]
mod counting;
#[path = "../support/mod.rs"]
mod support;

mod bad_models;
mod beams;
mod gguf;
mod goldens;
mod packed;
mod parallel;
mod quality;
mod tokenizers;
