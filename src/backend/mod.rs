//! The operations of a device, as the trait `Backend`. The module knows neither sequences nor model
//! names.
//!
//! A backend implements six traits: `Alloc` allocates and transfers memory, `KvOps` manages the KV
//! cache, `Ops` is the arithmetic of the forward pass, `Sampling` samples on the device,
//! `Graphs` controls the execution of whole steps, and `Collectives` exchanges activations with
//! other workers. A function names the traits that it needs, or
//! `Backend` for all of them.
#![allow(unsafe_code)]

mod alloc;
pub(crate) mod blocks;
mod collectives;
pub mod cpu;
pub mod cuda;
mod e4m3;
mod graphs;
mod kv;
mod operands;
mod ops;
mod sampling;

pub use alloc::{Alloc, BatchSize, Extent, InputLimits, PACKED_PIECE, PackedSource, RowSource, Section, Storage};
pub use collectives::{Collectives, ColumnPart, Workers};
pub use graphs::Graphs;
pub use kv::{KvOps, KvShape};
pub use operands::{
    Act, Activation, Addition, AttentionShape, Branch, ExpertGroups, ExpertOf, Glu, GroupScore, HeadGroups, HeadShard, Heads, MatrixOf,
    MlpOf, NormKind, NormOf, Pairs, RotaryEmbedding, Routing, Scores, Strips, Values, WithBias,
};
pub use ops::Ops;
pub use sampling::Sampling;

/// The types of a backend's objects. Their memory belongs to the device, except that of `Host`.
pub trait BackendTypes: Send + Sync {
    /// f32 numbers: activations, and weights of one dimension.
    type Buf: Send + Sync;
    /// A weight matrix in its storage format.
    type Matrix: Send + Sync;
    /// The KV pool of one layer, in blocks.
    type Kv: Send;
    /// An uploaded batch.
    type Inputs: Send + Default;
    /// The host tier: KV blocks, with all layers, that are swapped out of device memory.
    type Host: Send;
    /// The assignment of rows to experts.
    type Routes: Send;
    /// The state of on-device sampling.
    type Sampler: Send;
}

/// A device that computes forward passes. Shapes are given as `[rows, columns]`. A `Buf` is at
/// least as long as its shape requires.
///
/// Each row's result depends on that row only, in one fixed order of operations. It does not depend
/// on the rest of the batch.
///
/// A device may defer operations. Functions without a `Result` only queue their work. The device
/// skips all work after an error, and the next function that returns a `Result` reports it.
pub trait Backend: Alloc + KvOps + Ops + Sampling + Graphs + Collectives {}

impl<B: Alloc + KvOps + Ops + Sampling + Graphs + Collectives> Backend for B {}
