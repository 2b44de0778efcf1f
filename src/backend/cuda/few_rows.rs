//! Products of few rows (`kernels/few_rows.cu`): with the norm of their rows, and with the addition to a
//! residual stream.

use super::CudaBackend;
use super::buffer::{Buf, Operand, PendingNorm};
use super::function::{Function, Shape, launch};
use super::kernels::{FewRows, Output, dtype_number, glu_numbers};
use super::matrix::{Matrix, Part};
use super::memory::Address;
use crate::backend::{Glu, NormKind, NormOf, WithBias};
use crate::types::options::Dtype;

/// The rows that a product writes.
#[derive(Clone, Copy)]
pub struct Rows {
    pub address: Address,
    pub stride: usize,
    /// The factor of the product if it is added to the rows.
    pub added: Option<f32>,
}

/// The rows that a product reads, as arguments of its kernel.
struct NormedOperand {
    rows: Operand,
    /// The weights of the norm, or null.
    weight: Address,
    offset: f32,
    eps: f32,
}

impl CudaBackend {
    /// Returns the kernel for a product of few rows, and its launch configuration. None: there is
    /// none for this product, or not in batch-invariant mode, because a row would have other
    /// bits.
    fn few_rows(&self, part: &Part, rows: usize, output: Output) -> Option<(Function, Shape)> {
        if self.invariant { None } else { self.device.kernels.few_rows.select(part.stored, rows, part.rows, output) }
    }

    /// Launches the product with a part of a matrix. Returns false if no kernel for few rows computes
    /// it.
    pub(super) fn multiply_few(&self, rows: usize, x: &Buf, part: &Part, bias: Address, to: Rows) -> bool {
        let Some((function, shape)) = self.few_rows(part, rows, Output::Plain) else { return false };
        let NormedOperand { rows: Operand { address: x, rounded }, weight, offset, eps } = self.normed_operand(x, part);
        let (rows, outs, cols, stride) = (rows as u32, part.rows as u32, part.cols as u32, to.stride as u32);
        let (adds, scale) = (u32::from(to.added.is_some()), to.added.unwrap_or(1.0));
        let (out, w) = (to.address, part.address);
        launch!(self.device, function, shape, out, x, w, bias, weight, rows, outs, cols, stride, rounded, offset, eps, adds, scale);
        true
    }

    /// `out[r] = glu(y[r])` with `y = w * x[r] + bias`, read by a product with `reader`. Returns false if
    /// no kernel for few rows computes it.
    pub(super) fn multiply_few_gated(
        &self,
        rows: usize,
        x: &Buf,
        (w, bias): WithBias<Matrix, Buf>,
        glu: Glu,
        reader: &Matrix,
        out: &mut Buf,
    ) -> bool {
        let Some(part) = w.only() else { return false };
        let Some((function, shape)) = self.few_rows(part, rows, Output::Gated) else { return false };
        let NormedOperand { rows: Operand { address: x, rounded }, weight, offset, eps } = self.normed_operand(x, part);
        let ((act, alpha, limit), bias, stores) = (glu_numbers(glu), self.optional(bias), self.type_for(rows, &[reader]));
        let (out, w, stores) = (out.output_in(stores), part.address, dtype_number(stores));
        let (rows, outs, cols) = (rows as u32, part.rows as u32, part.cols as u32);
        launch!(self.device, function, shape, out, x, w, bias, weight, rows, outs, cols, rounded, offset, eps, act, alpha, limit, stores);
        true
    }

    /// `x[r] += scale * (w * y[r] + bias)`. Returns false if that takes other kernels than those for few
    /// rows. Nothing is launched then.
    pub(super) fn add_few(&self, rows: usize, y: &Buf, (w, bias): WithBias<Matrix, Buf>, scale: f32, x: &mut Buf) -> bool {
        if !self.uses_few_rows(rows, w) {
            return false;
        }
        let (x, bias) = (self.input(x), self.optional(bias));
        w.parts().iter().all(|part| {
            let [bias, address] = [bias, x].map(|address| part.outputs_at(address));
            self.multiply_few(rows, y, part, bias, Rows { address, stride: w.rows, added: Some(scale) })
        })
    }

    fn uses_few_rows(&self, rows: usize, w: &Matrix) -> bool {
        self.blas_part(rows, w).is_none() && w.parts().iter().all(|part| self.few_rows(part, rows, Output::Plain).is_some())
    }

    /// Returns a norm that the product of `reader` computes. None: it is computed before.
    ///
    /// Products in bf16 multiply numbers before their norm, which f16 may not represent.
    pub(super) fn pending_norm(&self, rows: usize, norm: NormOf<Buf>, reader: &Matrix, x: &Buf) -> Option<PendingNorm> {
        let NormOf { kind: NormKind::Rms { unit_offset }, eps, weight, bias: None } = norm else { return None };
        let part = reader.only().filter(|part| part.stored.multiplied() == Dtype::Bf16)?;
        // Half as many bytes of the matrix hide reads of half as many rows.
        let most = if part.stored.is_bytes() { self.max_normed_rows / 2 } else { self.max_normed_rows };
        if rows > most.min(FewRows::MAX_NORMED_ROWS) || !self.uses_few_rows(rows, reader) {
            return None;
        }
        let offset = if unit_offset { 1.0 } else { 0.0 };
        Some(PendingNorm { x: self.input(x), weight: self.input(weight), offset, eps })
    }

    fn normed_operand(&self, x: &Buf, part: &Part) -> NormedOperand {
        match x.pending_norm() {
            Some(PendingNorm { x, weight, offset, eps }) => NormedOperand { rows: Operand { address: x, rounded: 0 }, weight, offset, eps },
            None => NormedOperand { rows: self.operand(x, part), weight: Address::NULL, offset: 0.0, eps: 0.0 },
        }
    }
}
