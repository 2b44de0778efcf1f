//! The arithmetic of the forward pass.

use std::ops::Range;

use super::{
    Act, Addition, AttentionShape, BackendTypes, Branch, ExpertOf, Glu, Heads, KvOps, MatrixOf, MlpOf, NormOf, RotaryEmbedding, Routing,
    Strips, WithBias,
};

/// Computes the operations of a forward pass. In the formulas, `r` is the index of a row.
///
/// No operation returns an error: `Alloc::read` reports errors of the device.
///
/// Some operations have a parameter `readers`: the matrices of all products that read their output.
/// An empty list states that other operations read it too. If only products read the output,
/// directly or after `gather_routes`, a backend may store it as these products round it. Results do
/// not depend on `readers`.
pub trait Ops: BackendTypes {
    /// `out[r] = table[tokens[r] - first] * scale`. `table` is `[tokens, width]` and begins with
    /// token `first`, `out` is `[rows, width]`. Tokens that are not in the table give 0.
    fn embed(&self, inputs: &Self::Inputs, table: &Self::Matrix, first: usize, scale: f32, out: &mut Self::Buf);
    /// `x[r] += table[positions[r] + offset]`. `table` is `[positions, width]`, `x` is
    /// `[rows, width]`.
    fn add_positions(&self, inputs: &Self::Inputs, table: &Self::Matrix, offset: usize, x: &mut Self::Buf);
    /// `out[r] = w * x[r] + bias`. `w` is `[outputs, inputs]`, `x` is `[rows, inputs]`, `out` is
    /// `[rows, outputs]`, and `bias` is `[outputs]`.
    fn matmul(&self, rows: usize, x: &Self::Buf, w: &Self::Matrix, bias: Option<&Self::Buf>, out: &mut Self::Buf);
    /// `out[r] = down * activation(up * x[r])`, rows of the hidden size. `wide` and `narrow` hold
    /// intermediate results of `mlp_rows` rows. `narrow` is used only by gated activations.
    fn mlp(
        &self,
        rows: usize,
        x: &Self::Buf,
        mlp: MlpOf<Self::Matrix, Self::Buf>,
        wide: &mut Self::Buf,
        narrow: &mut Self::Buf,
        out: &mut Self::Buf,
    );
    /// Like `matmul` with the output `delta`. If it takes no further kernel, the backend also adds the
    /// product to the residual stream.
    fn matmul_add(&self, rows: usize, x: &Self::Buf, (w, bias): WithBias<Self::Matrix, Self::Buf>, to: Branch<Self::Buf>) -> Addition {
        self.matmul(rows, x, w, bias, to.delta);
        Addition::Pending
    }
    /// Like `mlp` with the output `delta`, which the backend may add as in `matmul_add`.
    fn mlp_add(
        &self,
        rows: usize,
        x: &Self::Buf,
        mlp: MlpOf<Self::Matrix, Self::Buf>,
        wide: &mut Self::Buf,
        narrow: &mut Self::Buf,
        to: Branch<Self::Buf>,
    ) -> Addition {
        self.mlp(rows, x, mlp, wide, narrow, to.delta);
        Addition::Pending
    }
    /// Returns how many of `rows` rows an MLP processes at once; the result does not decrease as
    /// `rows` grows.
    fn mlp_rows(&self, rows: usize) -> usize {
        rows
    }
    /// `x += scale * y`, over `len` numbers.
    fn add(&self, len: usize, scale: f32, x: &mut Self::Buf, y: &Self::Buf);
    /// `out[r] = norm(x[r])`, rows of `width`.
    #[allow(clippy::too_many_arguments)]
    fn norm(&self, rows: usize, width: usize, norm: NormOf<Self::Buf>, readers: &[&Self::Matrix], x: &Self::Buf, out: &mut Self::Buf);
    /// `out[r] = norm(x[r])`, rows of `width` that only one product reads, of `reader` and directly. The
    /// backend may leave the norm to this product. Therefore `x` must not change before the product has
    /// been queued, nor be its output.
    fn norm_for_product(
        &self,
        rows: usize,
        width: usize,
        norm: NormOf<Self::Buf>,
        reader: &Self::Matrix,
        x: &Self::Buf,
        out: &mut Self::Buf,
    ) {
        self.norm(rows, width, norm, &[reader], x, out);
    }
    /// `x[r] += scale * y[r]`, then `out[r] = norm(x[r])`, rows of `width`.
    #[allow(clippy::too_many_arguments)]
    fn add_norm(
        &self,
        rows: usize,
        width: usize,
        scale: f32,
        y: &Self::Buf,
        norm: NormOf<Self::Buf>,
        readers: &[&Self::Matrix],
        x: &mut Self::Buf,
        out: &mut Self::Buf,
    );
    /// `x = norm(x)` for each head. Weight and bias have the size of one head and apply to all
    /// heads, or the size of all heads together.
    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Self::Buf>, x: &mut Self::Buf);
    /// `out[r] = [cos..., sin...]` of `position[r] * frequency` in radians, times `amplitude`, for
    /// all `frequencies`. `out` is `[rows, 2 * frequencies]`.
    fn angles(&self, inputs: &Self::Inputs, frequencies: &Self::Buf, amplitude: f32, out: &mut Self::Buf);
    /// Rotates the heads of each row of `x` by the angles of the row.
    fn rope(&self, rows: usize, heads: Heads, turn: RotaryEmbedding<Self::Buf>, x: &mut Self::Buf);
    /// `out[r]` = attention of the row's queries over the stored K and V, up to the row's own
    /// position. `qkv` is `[rows, row_width]`, `out` is `[rows, out_width]`. `sinks` is `[heads]`:
    /// one additional score per head, without a value.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        shape: &AttentionShape,
        sinks: Option<&Self::Buf>,
        readers: &[&Self::Matrix],
        qkv: &Self::Buf,
        kv: &Self::Kv,
        out: &mut Self::Buf,
    );
    /// `KvOps::store_kv`, followed by `attention`, with the same bits. A backend may do both in one
    /// kernel, so `qkv` is unspecified afterwards. The values are `Values::Own`.
    #[allow(clippy::too_many_arguments)]
    fn store_and_attend(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<RotaryEmbedding<Self::Buf>>,
        sinks: Option<&Self::Buf>,
        readers: &[&Self::Matrix],
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
        out: &mut Self::Buf,
    ) where
        Self: KvOps,
    {
        self.store_kv(inputs, group, shape, turn, qkv, kv);
        self.attention(inputs, group, shape, sinks, readers, qkv, kv, out);
    }
    /// `out[h][r] = x[r][strip h]`. `x` is `[rows, stride]`, `out` is `[count, rows, dim]`.
    fn split_strips(&self, rows: usize, strips: Strips, x: &Self::Buf, out: &mut Self::Buf);
    /// `out[r][strip h] = x[h][r]`. `x` is `[count, rows, dim]`, `out` is `[rows, stride]`.
    fn join_strips(&self, rows: usize, strips: Strips, x: &Self::Buf, out: &mut Self::Buf);
    /// `out[h][r] = matrix(h) * x[h][r]`, for h in 0..count. All matrices have the same shape.
    fn matmul_strips(&self, rows: usize, count: usize, x: &Self::Buf, matrix: MatrixOf<Self::Matrix>, out: &mut Self::Buf);
    /// `x = act(x)`, over `len` numbers.
    fn activate(&self, len: usize, act: Act, x: &mut Self::Buf);
    /// `out[r] = glu(x[r][..width], x[r][width..])`. `x` is `[rows, 2 * width]`.
    fn gate(&self, rows: usize, width: usize, glu: Glu, readers: &[&Self::Matrix], x: &Self::Buf, out: &mut Self::Buf);
    /// Chooses the experts with the best scores for each row, and computes their weights. `logits`
    /// is `[rows, experts]`, `correction` is `[experts]`. The following operations process only
    /// routes to `local` experts. Other rows of their outputs are unspecified.
    fn route(
        &self,
        rows: usize,
        routing: Routing,
        local: Range<usize>,
        correction: Option<&Self::Buf>,
        logits: &Self::Buf,
        routes: &mut Self::Routes,
    );
    /// `out[i] = x[row of route i]`, rows of `width`. Routes to the same expert are adjacent.
    fn gather_routes(&self, routes: &Self::Routes, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// `out[i] = w * x[i] + bias`, with w and bias of route i's expert: one product per local
    /// expert that has rows. `expert` maps the index in the layer.
    fn matmul_routes(&self, routes: &Self::Routes, x: &Self::Buf, expert: ExpertOf<Self::Matrix, Self::Buf>, out: &mut Self::Buf);
    /// `out[r]` = sum of `x[i] * weight` over the routes of row r to local experts, in order of
    /// descending score; rows of `width`.
    fn combine_routes(&self, routes: &Self::Routes, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// `x[r] += sigmoid(gates[r]) * y[r]`, rows of `width`.
    fn add_gated(&self, rows: usize, width: usize, gates: &Self::Buf, x: &mut Self::Buf, y: &Self::Buf);
    /// `out[i] = x[logit_rows[i]]`, rows of `width`. `out` has one row per entry of `logit_rows`.
    fn gather(&self, inputs: &Self::Inputs, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// `x *= scale`, then `x = cap * tanh(x / cap)` if there is a cap; over `len` numbers.
    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Self::Buf);
}
