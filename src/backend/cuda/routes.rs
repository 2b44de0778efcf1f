//! The routing of rows to experts, sorted by expert.

use std::ops::Range;

use super::device::Device;
use super::function::{Shape, WARP, launch};
use super::memory::{Address, Memory};
use crate::backend::{GroupScore, Routing, Scores};
use crate::error::{Error, Result};

/// Constants of `kernels/experts.cu`: warps per block of `route`, one row each; warps per block of
/// `sort_routes`; and the maximum number of experts.
const ROUTE_WARPS: usize = 4;
const SORT_WARPS: usize = 8;
const MAX_EXPERTS: usize = 512;

pub struct Routes {
    /// Rows of the current step.
    pub rows: usize,
    pub experts: usize,
    pub top_k: usize,
    /// The experts of this rank.
    pub local: Range<usize>,
    pub choices: Memory, // [rows, top_k] experts, by descending score within a row
    pub weights: Memory, // [rows, top_k]
    pub places: Memory,  // [rows, top_k] the route of each choice
    pub sources: Memory, // [routes] the row of each route
    pub starts: Memory,  // [experts + 1] the first route to each expert
}

impl Routes {
    pub fn new(device: &Device, rows: usize, max: Routing) -> Result<Routes> {
        if max.experts > MAX_EXPERTS {
            return Err(Error::unsupported(format!(
                "too many experts for CUDA devices ({}, limit {MAX_EXPERTS}); set device to \"cpu\"",
                max.experts
            )));
        }
        let numbers = |count: usize| device.memory((count * size_of::<u32>()) as u64);
        let routes = rows * max.top_k;
        Ok(Routes {
            rows: 0,
            experts: max.experts,
            top_k: max.top_k,
            local: 0..0,
            choices: numbers(routes)?,
            weights: numbers(routes)?,
            places: numbers(routes)?,
            sources: numbers(routes)?,
            starts: numbers(max.experts + 1)?,
        })
    }

    pub fn bytes(rows: usize, max: Routing) -> u64 {
        ((4 * rows * max.top_k + max.experts + 1) * size_of::<u32>()) as u64
    }

    /// Chooses experts and weights for all rows. `logits` is `[rows, experts]`, `correction` is
    /// `[experts]` or null.
    pub fn choose(&mut self, device: &Device, rows: usize, routing: Routing, local: Range<usize>, correction: Address, logits: Address) {
        (self.rows, self.experts, self.top_k, self.local) = (rows, routing.experts, routing.top_k, local);
        let (choices, weights, places) = (self.choices.address(), self.weights.address(), self.places.address());
        let (sources, starts) = (self.sources.address(), self.starts.address());
        let (groups, chosen, best_two) =
            routing.groups.map_or((0, 0, false), |groups| (groups.count, groups.chosen, groups.score == GroupScore::BestTwo));
        let [rows, experts, top_k, groups, chosen] = [rows, routing.experts, routing.top_k, groups, chosen].map(|number| number as u32);
        let (sigmoid, normalized) = (routing.scores == Scores::Sigmoid, routing.normalized);
        let [sigmoid, normalized, best_two] = [sigmoid, normalized, best_two].map(u32::from);
        let shape = Shape::new((rows.div_ceil(ROUTE_WARPS as u32), 1, 1), (ROUTE_WARPS * WARP) as u32);
        launch!(
            device,
            device.kernels.experts.route,
            shape,
            choices,
            weights,
            logits,
            correction,
            rows,
            experts,
            top_k,
            sigmoid,
            normalized,
            routing.scale,
            groups,
            chosen,
            best_two,
        );
        let shape = Shape::new((experts, 1, 1), (SORT_WARPS * WARP) as u32);
        launch!(device, device.kernels.experts.sort_routes, shape, starts, sources, places, choices, rows, experts, top_k);
    }

    /// Returns the address of the first route to each local expert, followed by that of the first
    /// route after them: `[local experts + 1]`.
    pub fn local_starts(&self) -> Address {
        self.starts.address().at((self.local.start * size_of::<u32>()) as u64)
    }

    pub fn len(&self) -> usize {
        self.rows * self.top_k
    }
}
