//! Tests of engines through the Rust API. The folder is one binary, because each further binary costs a link.

#[path = "../support/mod.rs"]
mod support;

mod dense_model;
mod faults;
mod insight;
mod journal;
mod requests;
mod same_bits;
mod sequences;
mod structured;
mod swap;

mod ledger;
