//! The operations of the forward pass: the launches of their kernels.

use std::ops::Range;

use super::buffer::{Buf, address_of};
use super::function::{FLAT, Function, Shape, WARP, launch, row_threads};
use super::inputs::{InputRange, Inputs};
use super::kernels::{Output, RowCounts, act_number, glu_numbers, norm_number, pairs_number};
use super::kv::Kv;
use super::matrix::{Matrix, Part};
use super::memory::Address;
use super::routes::Routes;
use super::stored::Stored;
use super::tables::Key;
use super::{CudaBackend, attention, blas};
use crate::backend::{Act, AttentionShape, ExpertOf, Glu, Heads, MatrixOf, NormOf, Ops, RotaryEmbedding, Routing, Strips, WithBias};
use crate::error::{Error, Result};
use crate::types::options::Dtype;

/// Products of rows in groups, each with its own matrix and bias. `starts` is a list of the first
/// row of each group, whose sizes only the device knows, or null.
struct Groups<'a> {
    count: usize,
    of: ExpertOf<'a, Matrix, Buf>,
    starts: Address,
}

impl CudaBackend {
    /// Returns the launch configuration of a kernel that distributes `count` numbers over its
    /// threads.
    fn flat(&self, count: usize) -> Shape {
        let blocks = count.div_ceil(FLAT as usize).min(32 * self.device.multiprocessors as usize);
        Shape::new((blocks as u32, 1, 1), FLAT)
    }

    /// Launches products with each part of a matrix. With groups of rows, each group has its own
    /// matrix, of the same form as `w`.
    fn product(&self, counts: RowCounts, x: &Buf, w: &Matrix, bias: Option<&Buf>, groups: Option<Groups>, out: &mut Buf) {
        for (index, part) in w.parts().iter().enumerate() {
            let at = |address: Address| if address == Address::NULL { address } else { address.at((part.first * size_of::<f32>()) as u64) };
            let (mut matrices, mut biases, mut starts) = (Address::NULL, Address::NULL, Address::NULL);
            if let Some(Groups { count, of, starts: first_rows }) = &groups {
                starts = *first_rows;
                matrices = self.list(Key::Matrices(part.address), (0..*count).map(|group| of(group).0.parts()[index].address.0));
                let of_bias = |group| at(address_of(of(group).1));
                if of_bias(0) != Address::NULL {
                    biases = self.list(Key::Biases(of_bias(0)), (0..*count).map(|group| of_bias(group).0));
                }
            }
            let (rows, outs, cols, stride) = (counts.max as u32, part.rows as u32, part.cols as u32, w.rows as u32);
            let (x, bias, out) = (x.address(), at(address_of(bias)), at(out.address()));
            let address = part.address;
            if let Some((function, shape)) = self.few_rows(part, counts.max, Output::Plain).filter(|_| groups.is_none()) {
                launch!(self.device, function, shape, out, x, address, bias, rows, outs, cols, stride);
                continue;
            }
            let (function, shape) = self.device.kernels.products.select(part.stored, part.rows, counts);
            match part.stored {
                Stored::Records(records) => {
                    let (bytes, flags) = (records.bytes() as u32, records.flags());
                    launch!(
                        self.device,
                        function,
                        shape,
                        out,
                        x,
                        address,
                        bias,
                        matrices,
                        biases,
                        starts,
                        rows,
                        outs,
                        cols,
                        stride,
                        bytes,
                        flags
                    );
                }
                _ => launch!(self.device, function, shape, out, x, address, bias, matrices, biases, starts, rows, outs, cols, stride),
            }
        }
    }

    /// Returns the kernel for a product of few rows, and its launch configuration. None: there is
    /// none for this product, or not in batch-invariant mode, because a row would have other
    /// bits.
    fn few_rows(&self, part: &Part, rows: usize, output: Output) -> Option<(Function, Shape)> {
        if self.invariant { None } else { self.device.kernels.few_rows.select(part.stored, rows, part.rows, output) }
    }

    /// Returns the value. After an error, nothing is launched until the next `check` reports it.
    fn or_refuse<T>(&self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.device.refuse(error)).ok()
    }
}

impl CudaBackend {
    /// Runs a kernel that copies strips between two layouts.
    pub(super) fn copy_strips(&self, kernel: Function, rows: usize, strips: Strips, x: Address, out: Address) {
        let Strips { first, count, dim, pitch, stride } = strips;
        let shape = Shape::for_numbers(count * rows, dim);
        let [rows, first, dim, pitch, stride] = [rows, first, dim, pitch, stride].map(|number| number as u32);
        launch!(self.device, kernel, shape, out, x, rows, first, dim, pitch, stride);
    }
}

impl Ops for CudaBackend {
    fn embed(&self, inputs: &Inputs, table: &Matrix, first: usize, scale: f32, out: &mut Buf) {
        let Some(table) = self.or_refuse(only(table)) else { return };
        let Some(function) = self.or_refuse(self.device.kernels.tables.embed(table.stored)) else { return };
        let (tokens, cols, pitch) = (inputs.address(inputs.tokens), table.cols as u32, table.pitch() as u32);
        let shape = Shape::for_numbers(inputs.rows as usize, table.cols);
        let (out, address, first, count) = (out.address(), table.address, first as u32, table.rows as u32);
        match table.stored {
            Stored::Records(records) => {
                launch!(
                    self.device,
                    function,
                    shape,
                    out,
                    address,
                    tokens,
                    first,
                    count,
                    cols,
                    scale,
                    records.bytes() as u32,
                    records.flags()
                )
            }
            _ => launch!(self.device, function, shape, out, address, tokens, first, count, cols, pitch, scale),
        }
    }

    fn add_positions(&self, inputs: &Inputs, table: &Matrix, offset: usize, x: &mut Buf) {
        let Some(table) = self.or_refuse(only(table)) else { return };
        let Some(function) = self.or_refuse(self.device.kernels.tables.add_positions(table.stored)) else { return };
        let (positions, cols, pitch) = (inputs.address(inputs.positions), table.cols as u32, table.pitch() as u32);
        let shape = Shape::for_numbers(inputs.rows as usize, table.cols);
        launch!(self.device, function, shape, x.address(), table.address, positions, cols, pitch, offset as u32);
    }

    fn matmul(&self, rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, out: &mut Buf) {
        let by_blas = |part: &&Part| rows >= self.min_blas_rows && !matches!(part.stored, Stored::As(Dtype::F32) | Stored::Records(_));
        if let (Ok(blas), Some(part)) = (&self.blas, w.only().filter(by_blas)) {
            let product = blas::Product { rows, x: x.address(), w: part, bias: address_of(bias), out: out.address() };
            if blas.multiply(&self.device, product) {
                return;
            }
        }
        self.product(RowCounts::alike(rows, 1), x, w, bias, None, out);
    }

    fn gated_matmul(
        &self,
        rows: usize,
        x: &Buf,
        (w, bias): WithBias<Matrix, Buf>,
        (width, glu): (usize, Glu),
        wide: &mut Buf,
        out: &mut Buf,
    ) {
        let few = w.only().and_then(|part| Some((part, self.few_rows(part, rows, Output::Gated)?)));
        let Some((part, (function, shape))) = few else {
            self.matmul(rows, x, w, bias, wide);
            return self.gate(rows, width, glu, wide, out);
        };
        let ((act, alpha, limit), bias) = (glu_numbers(glu), address_of(bias));
        let (rows, outs, cols, x, out) = (rows as u32, part.rows as u32, part.cols as u32, x.address(), out.address());
        launch!(self.device, function, shape, out, x, part.address, bias, rows, outs, cols, act, alpha, limit);
    }

    fn add(&self, len: usize, scale: f32, x: &mut Buf, y: &Buf) {
        launch!(self.device, self.device.kernels.elementwise.add, self.flat(len), x.address(), y.address(), len as u64, scale);
    }

    fn norm(&self, rows: usize, width: usize, norm: NormOf<Buf>, x: &Buf, out: &mut Buf) {
        let shape = Shape::for_rows(rows, width);
        let (weight, bias) = (norm.weight.address(), address_of(norm.bias));
        let (x, out, kind) = (x.address(), out.address(), norm_number(norm.kind));
        launch!(self.device, self.device.kernels.norms.norm_rows, shape, out, x, weight, bias, width as u32, kind, norm.eps);
    }

    fn add_norm(&self, rows: usize, width: usize, scale: f32, y: &Buf, norm: NormOf<Buf>, x: &mut Buf, out: &mut Buf) {
        let shape = Shape::for_rows(rows, width);
        let (weight, bias) = (norm.weight.address(), address_of(norm.bias));
        let (x, y, out, kind) = (x.address(), y.address(), out.address(), norm_number(norm.kind));
        launch!(self.device, self.device.kernels.norms.add_norm, shape, out, x, y, weight, bias, width as u32, kind, norm.eps, scale);
    }

    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Buf>, x: &mut Buf) {
        let Heads { first, count, dim, stride } = heads;
        let shape = Shape::new((rows as u32, count as u32, 1), row_threads(dim));
        let (weight, bias, own) = (norm.weight.address(), address_of(norm.bias), (norm.weight.len / dim) as u32);
        let (first, dim, stride, kind) = (first as u32, dim as u32, stride as u32, norm_number(norm.kind));
        launch!(
            self.device,
            self.device.kernels.norms.norm_heads,
            shape,
            x.address(),
            weight,
            bias,
            first,
            dim,
            stride,
            own,
            kind,
            norm.eps
        );
    }

    fn angles(&self, inputs: &Inputs, frequencies: &Buf, amplitude: f32, out: &mut Buf) {
        let shape = Shape::for_rows(inputs.rows as usize, frequencies.len);
        let (positions, count) = (inputs.address(inputs.positions), frequencies.len as u32);
        launch!(self.device, self.device.kernels.rotation.angles, shape, out.address(), positions, frequencies.address(), count, amplitude);
    }

    fn rope(&self, rows: usize, heads: Heads, turn: RotaryEmbedding<Buf>, x: &mut Buf) {
        let shape = Shape::new((rows as u32, heads.count as u32, 1), WARP as u32);
        let (first, dim, stride) = (heads.first as u32, heads.dim as u32, heads.stride as u32);
        let (angles, rotated, pairs) = (turn.angles.address(), turn.rotated as u32, pairs_number(turn.pairs));
        launch!(self.device, self.device.kernels.rotation.rope, shape, x.address(), angles, first, dim, stride, rotated, pairs);
    }

    fn attention(&self, inputs: &Inputs, group: usize, shape: &AttentionShape, sinks: Option<&Buf>, qkv: &Buf, kv: &Kv, out: &mut Buf) {
        let slopes = shape.alibi.map_or(Address::NULL, |steepness| {
            let bits = |head: usize| u64::from((steepness * shape.slope(head.min(shape.heads - 1))).to_bits());
            // Two f32 per u64, the first in the low half.
            let pairs = (0..shape.heads.div_ceil(2)).map(|pair| bits(2 * pair) | bits(2 * pair + 1) << 32);
            self.list(Key::Slopes(shape.heads, steepness.to_bits()), pairs)
        });
        attention::Args { inputs, group, shape, slopes, sinks, qkv, kv, out }.run(&self.device, self.partial().as_ref());
    }

    fn split_strips(&self, rows: usize, strips: Strips, x: &Buf, out: &mut Buf) {
        self.copy_strips(self.device.kernels.elementwise.split_strips, rows, strips, x.address(), out.address());
    }

    fn join_strips(&self, rows: usize, strips: Strips, x: &Buf, out: &mut Buf) {
        self.copy_strips(self.device.kernels.elementwise.join_strips, rows, strips, x.address(), out.address());
    }

    fn matmul_strips(&self, rows: usize, count: usize, x: &Buf, matrix: MatrixOf<Matrix>, out: &mut Buf) {
        let groups = Groups { count, of: &|strip| (matrix(strip), None), starts: Address::NULL };
        self.product(RowCounts::alike(rows, count), x, matrix(0), None, Some(groups), out);
    }

    fn activate(&self, len: usize, act: Act, x: &mut Buf) {
        launch!(self.device, self.device.kernels.elementwise.activate, self.flat(len), x.address(), len as u64, act_number(act));
    }

    fn gate(&self, rows: usize, width: usize, glu: Glu, x: &Buf, out: &mut Buf) {
        let (shape, kernels) = (Shape::for_numbers(rows, width), &self.device.kernels);
        let ((act, alpha, limit), width) = (glu_numbers(glu), width as u32);
        launch!(self.device, kernels.elementwise.gate, shape, out.address(), x.address(), width, act, alpha, limit);
    }

    fn route(&self, rows: usize, routing: Routing, local: Range<usize>, correction: Option<&Buf>, logits: &Buf, routes: &mut Routes) {
        routes.choose(&self.device, rows, routing, local, address_of(correction), logits.address());
    }

    fn gather_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        let shape = Shape::for_rows(routes.len(), width);
        launch!(
            self.device,
            self.device.kernels.experts.gather_routes,
            shape,
            out.address(),
            x.address(),
            routes.sources.address(),
            routes.local_starts(),
            routes.local.len() as u32,
            width as u32
        );
    }

    fn matmul_routes(&self, routes: &Routes, x: &Buf, expert: ExpertOf<Matrix, Buf>, out: &mut Buf) {
        // Each row chooses an expert at most once, so an expert has at most `routes.rows` rows.
        let (first, count) = (routes.local.start, routes.local.len());
        let rows = RowCounts { each: routes.len().div_ceil(routes.experts), max: routes.rows, groups: count };
        let groups = Groups { count, of: &|local| expert(first + local), starts: routes.local_starts() };
        self.product(rows, x, expert(first).0, None, Some(groups), out);
    }

    fn combine_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        let shape = Shape::for_rows(routes.rows, width);
        let (places, weights, x, out) = (routes.places.address(), routes.weights.address(), x.address(), out.address());
        let (starts, experts, width, top_k) = (routes.local_starts(), routes.local.len() as u32, width as u32, routes.top_k as u32);
        let combine_routes = self.device.kernels.experts.combine_routes;
        launch!(self.device, combine_routes, shape, out, x, places, weights, starts, experts, width, top_k);
    }

    fn add_gated(&self, rows: usize, width: usize, gates: &Buf, x: &mut Buf, y: &Buf) {
        let shape = Shape::for_numbers(rows, width);
        let (x, y, gates) = (x.address(), y.address(), gates.address());
        launch!(self.device, self.device.kernels.elementwise.add_gated, shape, x, y, gates, width as u32);
    }

    fn gather(&self, inputs: &Inputs, width: usize, x: &Buf, out: &mut Buf) {
        let InputRange { count, .. } = inputs.logit_rows;
        let (shape, wanted) = (Shape::for_numbers(count as usize, width), inputs.address(inputs.logit_rows));
        launch!(self.device, self.device.kernels.elementwise.gather, shape, out.address(), x.address(), wanted, width as u32);
    }

    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Buf) {
        let cap = soft_cap.unwrap_or(0.0);
        launch!(self.device, self.device.kernels.elementwise.scale_and_cap, self.flat(len), x.address(), len as u64, scale, cap);
    }
}

/// Returns the rows of a table, which is one tensor.
fn only(table: &Matrix) -> Result<&Part> {
    table.only().ok_or_else(|| Error::internal("table in several parts"))
}
