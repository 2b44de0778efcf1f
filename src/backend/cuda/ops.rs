//! The operations of the forward pass: the launches of their kernels.

use std::ops::Range;

use super::attention::NewTokens;
use super::blas::Blas;
use super::buffer::{Buf, Operand};
use super::few_rows::Rows;
use super::function::{FLAT, Function, Shape, WARP, launch, row_threads};
use super::inputs::{InputRange, Inputs};
use super::kernels::{RowCounts, act_number, dtype_number, glu_numbers, norm_number, pairs_number};
use super::kv::Kv;
use super::matrix::{Matrix, Part};
use super::memory::Address;
use super::routes::Routes;
use super::stored::Stored;
use super::tables::Key;
use super::{CudaBackend, attention, blas};
use crate::backend::{
    Act, Activation, Addition, AttentionShape, Branch, ExpertOf, Glu, Heads, KvOps, MatrixOf, MlpOf, NormOf, Ops, RotaryEmbedding, Routing,
    Strips, WithBias,
};
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
        let (out, bias) = (out.output(), self.optional(bias));
        for (index, part) in w.parts().iter().enumerate() {
            let at = |address| part.outputs_at(address);
            let [matrices, biases, starts] = groups.as_ref().map_or([Address::NULL; 3], |groups| self.lists(groups, index, &at));
            let (bias, out) = (at(bias), at(out));
            if groups.is_none() && self.multiply_few(counts.max, x, part, bias, Rows { address: out, stride: w.rows, added: None }) {
                continue;
            }
            let (rows, outs, cols, stride) = (counts.max as u32, part.rows as u32, part.cols as u32, w.rows as u32);
            let (Operand { address: x, rounded }, address) = (self.operand(x, part), part.address);
            let (function, shape) = self.device.kernels.products.select(part.stored, part.rows, counts, self.device.multiprocessors);
            // Only products with records take their form.
            macro_rules! multiply {
                ($($form:expr),*) => {
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
                        $($form,)*
                        rounded
                    )
                };
            }
            match part.stored {
                Stored::Records(records) => multiply!(records.bytes() as u32, records.flags()),
                _ => multiply!(),
            }
        }
    }

    /// Returns the lists of matrices and biases of groups, with part `index` of each, and of their
    /// first rows. `at` returns the address of a part in an address of the whole.
    fn lists(&self, groups: &Groups, index: usize, at: &dyn Fn(Address) -> Address) -> [Address; 3] {
        let &Groups { count, of, starts } = groups;
        let part = |group| of(group).0.parts()[index].address;
        let matrices = self.list(Key::Matrices(part(0)), (0..count).map(|group| part(group).0));
        let of_bias = |group| at(self.optional(of(group).1));
        let biases = match of_bias(0) {
            Address::NULL => Address::NULL,
            first => self.list(Key::Biases(first), (0..count).map(|group| of_bias(group).0)),
        };
        [matrices, biases, starts]
    }

    /// Returns the value. After an error, nothing is launched until the next `check` reports it.
    pub(super) fn or_refuse<T>(&self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.device.refuse(error)).ok()
    }
}

impl CudaBackend {
    /// Returns the type in which an operation stores rows that only products with the matrices
    /// `readers` read: the type to which all these products round them, or f32.
    pub(super) fn type_for(&self, rows: usize, readers: &[&Matrix]) -> Dtype {
        if self.keeps_f32 {
            return Dtype::F32;
        }
        let mut types = readers.iter().flat_map(|&w| w.parts().iter().map(move |part| self.operand_type(rows, w, part)));
        let first = types.next().unwrap_or(Dtype::F32);
        if types.all(|dtype| dtype == first) { first } else { Dtype::F32 }
    }

    /// Returns the type to which a product with a part of a matrix rounds its rows.
    fn operand_type(&self, rows: usize, w: &Matrix, part: &Part) -> Dtype {
        // Products read aligned groups of eight numbers. cuBLASLt multiplies rows in fp8, which have
        // scales.
        let is_aligned = part.cols.is_multiple_of(8);
        let becomes_fp8 = part.stored == Stored::Fp8 && self.blas_part(rows, w).is_some();
        if is_aligned && !becomes_fp8 { part.stored.multiplied() } else { Dtype::F32 }
    }

    /// Returns the matrix if cuBLASLt computes products of this many rows with it.
    pub(super) fn blas_part<'a>(&self, rows: usize, w: &'a Matrix) -> Option<(&Blas, &'a Part)> {
        let part = w.only().filter(|part| matches!(part.stored, Stored::As(Dtype::F16 | Dtype::Bf16) | Stored::Fp8))?;
        self.blas.as_ref().ok().filter(|_| rows >= self.min_blas_rows).map(|blas| (blas, part))
    }

    /// `out[r] = glu(y[..width], y[width..])` with `y = w * x[r] + bias`, read by a product with
    /// `reader`. `wide` holds intermediate results of `[rows, 2 * width]`.
    #[allow(clippy::too_many_arguments)]
    fn gated_matmul(
        &self,
        rows: usize,
        x: &Buf,
        (w, bias): WithBias<Matrix, Buf>,
        (width, glu): (usize, Glu),
        reader: &Matrix,
        wide: &mut Buf,
        out: &mut Buf,
    ) {
        if !self.multiply_few_gated(rows, x, (w, bias), glu, reader, out) {
            self.matmul(rows, x, w, bias, wide);
            self.gate(rows, width, glu, &[reader], wide, out);
        }
    }

    /// Computes the rows that `down` of an MLP reads. Returns the buffer that has them.
    fn activations<'a>(&self, rows: usize, x: &Buf, mlp: &MlpOf<Matrix, Buf>, wide: &'a mut Buf, narrow: &'a mut Buf) -> &'a Buf {
        let &MlpOf { up, activation, width, down } = mlp;
        match activation {
            Activation::Plain(act) => {
                self.matmul(rows, x, up.0, up.1, wide);
                self.activate(rows * width, act, wide);
                wide
            }
            Activation::Gated(glu) => {
                self.gated_matmul(rows, x, up, (width, glu), down.0, wide, narrow);
                narrow
            }
        }
    }

    /// Launches attention. If there are new tokens, it rotates and stores the rows too.
    #[allow(clippy::too_many_arguments)]
    fn attention_of(
        &self,
        inputs: &Inputs,
        group: usize,
        shape: &AttentionShape,
        new_tokens: NewTokens,
        sinks: Option<&Buf>,
        readers: &[&Matrix],
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) {
        let slopes = shape.alibi.map_or(Address::NULL, |steepness| {
            let bits = |head: usize| u64::from((steepness * shape.slope(head.min(shape.heads - 1))).to_bits());
            // Two f32 per u64, the first in the low half.
            let pairs = (0..shape.heads.div_ceil(2)).map(|pair| bits(2 * pair) | bits(2 * pair + 1) << 32);
            self.list(Key::Slopes(shape.heads, steepness.to_bits()), pairs)
        });
        let stores = self.type_for(inputs.rows as usize, readers);
        let (sinks, qkv, out) = (self.optional(sinks), self.input(qkv), out.output_in(stores));
        let args = attention::Args { inputs, group, shape, slopes, sinks, qkv, kv, out, stores, new_tokens };
        args.run(&self.device, self.partial().as_ref());
    }

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
        let (out, address, first, count) = (out.output(), table.address, first as u32, table.rows as u32);
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
        launch!(self.device, function, shape, self.input(x), table.address, positions, cols, pitch, offset as u32);
    }

    fn matmul(&self, rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, out: &mut Buf) {
        if let Some((blas, part)) = self.blas_part(rows, w)
            && [Stored::As(Dtype::F32), part.stored].contains(&Stored::As(x.dtype()))
        {
            let (Operand { address: x, rounded }, bias) = (self.operand(x, part), self.optional(bias));
            let product = blas::Product { rows, x, rounded: rounded == 1, w: part, bias, out: out.output() };
            if blas.multiply(&self.device, product) {
                return;
            }
        }
        self.product(RowCounts::alike(rows, 1), x, w, bias, None, out);
    }

    fn mlp(&self, rows: usize, x: &Buf, mlp: MlpOf<Matrix, Buf>, wide: &mut Buf, narrow: &mut Buf, out: &mut Buf) {
        let (w, bias) = mlp.down;
        self.matmul(rows, self.activations(rows, x, &mlp, wide, narrow), w, bias, out);
    }

    fn matmul_add(&self, rows: usize, x: &Buf, (w, bias): WithBias<Matrix, Buf>, to: Branch<Buf>) -> Addition {
        if self.add_few(rows, x, (w, bias), to.scale, to.x) {
            return Addition::Done;
        }
        self.matmul(rows, x, w, bias, to.delta);
        Addition::Pending
    }

    fn mlp_add(&self, rows: usize, x: &Buf, mlp: MlpOf<Matrix, Buf>, wide: &mut Buf, narrow: &mut Buf, to: Branch<Buf>) -> Addition {
        self.matmul_add(rows, self.activations(rows, x, &mlp, wide, narrow), mlp.down, to)
    }

    fn add(&self, len: usize, scale: f32, x: &mut Buf, y: &Buf) {
        launch!(self.device, self.device.kernels.elementwise.add, self.flat(len), self.input(x), self.input(y), len as u64, scale);
    }

    fn norm(&self, rows: usize, width: usize, norm: NormOf<Buf>, readers: &[&Matrix], x: &Buf, out: &mut Buf) {
        let (shape, stores) = (Shape::for_rows(rows, width), self.type_for(rows, readers));
        let (weight, bias) = (self.input(norm.weight), self.optional(norm.bias));
        let (x, out, kind) = (self.input(x), out.output_in(stores), norm_number(norm.kind));
        let (norm_rows, stores) = (self.device.kernels.norms.norm_rows, dtype_number(stores));
        launch!(self.device, norm_rows, shape, out, x, weight, bias, width as u32, kind, norm.eps, stores);
    }

    fn norm_for_product(&self, rows: usize, width: usize, norm: NormOf<Buf>, reader: &Matrix, x: &Buf, out: &mut Buf) {
        match self.pending_norm(rows, norm, reader, x) {
            Some(pending) => out.leave_norm(pending),
            None => self.norm(rows, width, norm, &[reader], x, out),
        }
    }

    fn add_norm(&self, rows: usize, width: usize, scale: f32, y: &Buf, norm: NormOf<Buf>, readers: &[&Matrix], x: &mut Buf, out: &mut Buf) {
        let (shape, stores) = (Shape::for_rows(rows, width), self.type_for(rows, readers));
        let (weight, bias) = (self.input(norm.weight), self.optional(norm.bias));
        let (x, y, out, kind) = (self.input(x), self.input(y), out.output_in(stores), norm_number(norm.kind));
        let (add_norm, stores) = (self.device.kernels.norms.add_norm, dtype_number(stores));
        launch!(self.device, add_norm, shape, out, x, y, weight, bias, width as u32, kind, norm.eps, scale, stores);
    }

    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Buf>, x: &mut Buf) {
        let Heads { first, count, dim, stride } = heads;
        let shape = Shape::new((rows as u32, count as u32, 1), row_threads(dim));
        let (weight, bias, own) = (self.input(norm.weight), self.optional(norm.bias), (norm.weight.len / dim) as u32);
        let (first, dim, stride, kind) = (first as u32, dim as u32, stride as u32, norm_number(norm.kind));
        launch!(
            self.device,
            self.device.kernels.norms.norm_heads,
            shape,
            self.input(x),
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
        launch!(
            self.device,
            self.device.kernels.rotation.angles,
            shape,
            out.output(),
            positions,
            self.input(frequencies),
            count,
            amplitude
        );
    }

    fn rope(&self, rows: usize, heads: Heads, turn: RotaryEmbedding<Buf>, x: &mut Buf) {
        let shape = Shape::new((rows as u32, heads.count as u32, 1), WARP as u32);
        let (first, dim, stride) = (heads.first as u32, heads.dim as u32, heads.stride as u32);
        let (angles, rotated, pairs) = (self.input(turn.angles), turn.rotated as u32, pairs_number(turn.pairs));
        launch!(self.device, self.device.kernels.rotation.rope, shape, self.input(x), angles, first, dim, stride, rotated, pairs);
    }

    fn attention(
        &self,
        inputs: &Inputs,
        group: usize,
        shape: &AttentionShape,
        sinks: Option<&Buf>,
        readers: &[&Matrix],
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) {
        self.attention_of(inputs, group, shape, NewTokens::STORED, sinks, readers, qkv, kv, out);
    }

    fn store_and_attend(
        &self,
        inputs: &Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<RotaryEmbedding<Buf>>,
        sinks: Option<&Buf>,
        readers: &[&Matrix],
        qkv: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) {
        let stores = attention::stores_rows(&self.device, inputs, shape, kv, self.partial().as_ref());
        if !stores {
            self.store_kv(inputs, group, shape, turn, qkv, kv);
        }
        let new_tokens = if stores { self.new_tokens(inputs, turn) } else { NewTokens::STORED };
        self.attention_of(inputs, group, shape, new_tokens, sinks, readers, qkv, kv, out);
    }

    fn split_strips(&self, rows: usize, strips: Strips, x: &Buf, out: &mut Buf) {
        self.copy_strips(self.device.kernels.elementwise.split_strips, rows, strips, self.input(x), out.output());
    }

    fn join_strips(&self, rows: usize, strips: Strips, x: &Buf, out: &mut Buf) {
        self.copy_strips(self.device.kernels.elementwise.join_strips, rows, strips, self.input(x), out.output());
    }

    fn matmul_strips(&self, rows: usize, count: usize, x: &Buf, matrix: MatrixOf<Matrix>, out: &mut Buf) {
        let groups = Groups { count, of: &|strip| (matrix(strip), None), starts: Address::NULL };
        self.product(RowCounts::alike(rows, count), x, matrix(0), None, Some(groups), out);
    }

    fn activate(&self, len: usize, act: Act, x: &mut Buf) {
        launch!(self.device, self.device.kernels.elementwise.activate, self.flat(len), self.input(x), len as u64, act_number(act));
    }

    fn gate(&self, rows: usize, width: usize, glu: Glu, readers: &[&Matrix], x: &Buf, out: &mut Buf) {
        let (shape, kernels) = (Shape::for_numbers(rows, width), &self.device.kernels);
        let ((act, alpha, limit), width, stores) = (glu_numbers(glu), width as u32, self.type_for(rows, readers));
        let (x, out) = (self.input(x), out.output_in(stores));
        launch!(self.device, kernels.elementwise.gate, shape, out, x, width, act, alpha, limit, dtype_number(stores));
    }

    fn route(&self, rows: usize, routing: Routing, local: Range<usize>, correction: Option<&Buf>, logits: &Buf, routes: &mut Routes) {
        routes.choose(&self.device, rows, routing, local, self.optional(correction), self.input(logits));
    }

    fn gather_routes(&self, routes: &Routes, width: usize, x: &Buf, out: &mut Buf) {
        // Rounded rows are copied as f32 numbers, each of which holds two of theirs.
        let (dtype, words) = (x.dtype(), width * x.dtype().bytes() / size_of::<f32>());
        let Some(from) = self.or_refuse(x.operand(dtype)) else { return };
        launch!(
            self.device,
            self.device.kernels.experts.gather_routes,
            Shape::for_rows(routes.len(), words),
            out.output_in(dtype),
            from,
            routes.sources.address(),
            routes.local_starts(),
            routes.local.len() as u32,
            words as u32
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
        let (places, weights, x, out) = (routes.places.address(), routes.weights.address(), self.input(x), out.output());
        let (starts, experts, width, top_k) = (routes.local_starts(), routes.local.len() as u32, width as u32, routes.top_k as u32);
        let combine_routes = self.device.kernels.experts.combine_routes;
        launch!(self.device, combine_routes, shape, out, x, places, weights, starts, experts, width, top_k);
    }

    fn add_gated(&self, rows: usize, width: usize, gates: &Buf, x: &mut Buf, y: &Buf) {
        let shape = Shape::for_numbers(rows, width);
        let (x, y, gates) = (self.input(x), self.input(y), self.input(gates));
        launch!(self.device, self.device.kernels.elementwise.add_gated, shape, x, y, gates, width as u32);
    }

    fn gather(&self, inputs: &Inputs, width: usize, x: &Buf, out: &mut Buf) {
        let InputRange { count, .. } = inputs.logit_rows;
        let (shape, wanted) = (Shape::for_numbers(count as usize, width), inputs.address(inputs.logit_rows));
        launch!(self.device, self.device.kernels.elementwise.gather, shape, out.output(), self.input(x), wanted, width as u32);
    }

    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Buf) {
        let cap = soft_cap.unwrap_or(0.0);
        launch!(self.device, self.device.kernels.elementwise.scale_and_cap, self.flat(len), self.input(x), len as u64, scale, cap);
    }
}

/// Returns the rows of a table, which is one tensor.
fn only(table: &Matrix) -> Result<&Part> {
    table.only().ok_or_else(|| Error::internal("table in several parts"))
}
