//! Tests of the scheduler, the block manager and admission.

#[path = "../support/mod.rs"]
mod support;

mod admission;
mod steps;
