//! Tests of engines as a host uses them. One binary for the folder: each more costs a link.

#[path = "../support/mod.rs"]
mod support;

mod faults;
mod insight;
mod journal;
mod requests;
mod same_bits;
mod sequences;
mod structured;
mod swap;
mod traces;
mod turns;
