//! Tests of engines through the Rust API. The folder is one binary, because each further binary
//! costs a link.

#[path = "../support/mod.rs"]
mod support;

mod batch_invariance;
mod commands;
mod dense_model;
mod faults;
mod in_flight;
mod journal;
mod kv_events;
mod kv_store;
mod ledger;
mod parallel;
mod requests;
mod sequences;
mod snapshot;
mod structured;
mod swap;
mod telemetry;
mod transfers;
