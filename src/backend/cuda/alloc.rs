//! Memory of the device, and transfers from and to the host.

use std::ops::Range;

use super::CudaBackend;
use super::attention::PartialResults;
use super::blas::Blas;
use super::buffer::Buf;
use super::inputs::Inputs;
use super::matrix::Matrix;
use super::routes::Routes;
use super::steps::Steps;
use super::uploads::Uploads;
use crate::backend::{Alloc, AttentionShape, Extent, Graphs, InputLimits, PackedSource, Routing, RowSource, Section};
use crate::error::{Error, Result};
use crate::types::batch::Batch;

impl Alloc for CudaBackend {
    fn free_bytes(&self) -> Result<Option<u64>> {
        self.device.free_bytes().map(Some)
    }

    fn buffer(&self, len: usize) -> Result<Buf> {
        Buf::new(&self.device, len)
    }

    fn vector(&self, values: &[f32]) -> Result<Buf> {
        Buf::from_numbers(&self.device, values)
    }

    fn matrix(&self, cols: usize, sections: &[Section], source: RowSource) -> Result<Matrix> {
        let mut uploads = self.uploads();
        let uploads = match &mut *uploads {
            Some(uploads) => uploads,
            none => none.insert(Uploads::new(&self.device)?),
        };
        Matrix::load(&self.device, uploads, cols, sections, source)
    }

    fn end_loading(&self) {
        *self.uploads() = None;
    }

    fn matrix_bytes(&self, cols: usize, sections: &[Section]) -> u64 {
        sections.iter().map(|section| Matrix::bytes(cols, section)).sum()
    }

    fn stores_blocks(&self) -> bool {
        true
    }

    fn packed_bytes<'a>(&'a self, _matrix: &'a Matrix) -> Result<&'a [u8]> {
        Err(no_packing())
    }

    fn matrix_of_packed(&self, _cols: usize, _sections: &[Section], _source: PackedSource) -> Result<Matrix> {
        Err(no_packing())
    }

    fn matrix_layout(&self) -> &'static str {
        "cuda rows"
    }

    fn reserve(&self, shape: &AttentionShape) -> Result<()> {
        let (mut kinds, heads) = (self.head_groups(), shape.head_groups());
        if !kinds.contains(&heads) {
            kinds.push(heads);
        }
        match self.invariant {
            true => Ok(()),
            false => PartialResults::reserve(&mut self.partial(), &self.device, shape),
        }
    }

    fn reserved_bytes(&self, shape: &AttentionShape) -> u64 {
        if self.invariant { 0 } else { PartialResults::bytes(&self.device, shape) }
    }

    fn reserve_rows(&self, rows: usize, cols: usize) -> Result<()> {
        self.blas.as_ref().map_or(Ok(()), |blas| blas.reserve(&self.device, rows, cols))
    }

    fn reserved_rows_bytes(&self, rows: usize, cols: usize) -> u64 {
        if self.blas.is_ok() { Blas::bytes(rows, cols) } else { 0 }
    }

    fn routes(&self, rows: usize, max: Routing) -> Result<Routes> {
        Routes::new(&self.device, rows, max)
    }

    fn routes_bytes(&self, rows: usize, max: Routing) -> u64 {
        Routes::bytes(rows, max)
    }

    fn reserve_inputs(&self, limits: &InputLimits, inputs: &mut Inputs) -> Result<()> {
        inputs.fit(&self.device, Inputs::bytes(limits.max, &limits.heads, self.device.blocks_at_once())).map(|_| ())
    }

    fn reserved_inputs_bytes(&self, limits: &InputLimits) -> u64 {
        Inputs::bytes(limits.max, &limits.heads, self.device.blocks_at_once()) as u64
    }

    fn upload(&self, batch: &Batch, inputs: &mut Inputs) -> Result<Extent> {
        let mut steps = self.steps();
        let Steps { graphs, samples } = &mut *steps;
        graphs.abandon(&self.device);
        self.device.check()?;
        let heads = self.head_groups();
        let mut kept = graphs.rows_for(batch);
        if inputs.fit(&self.device, Inputs::bytes_of(batch, kept, &heads, self.device.blocks_at_once()))? {
            graphs.clear();
            kept = None;
        }
        let extent = inputs.take(&self.device, batch, &heads, kept)?;
        match &self.exchange {
            Some(exchange) if !batch.placeholders.is_empty() => {
                // Only rank 0 samples.
                if exchange.is_first() {
                    inputs.fill_placeholders(&self.device, *samples);
                }
                let tokens = inputs.address(inputs.tokens);
                exchange.broadcast(&self.device, inputs.tokens.count as usize * size_of::<u32>(), tokens);
            }
            _ => inputs.fill_placeholders(&self.device, *samples),
        }
        if let Some(rows) = kept {
            graphs.begin(&self.device, rows);
        }
        Ok(extent)
    }

    fn read<'a>(&'a self, buf: &'a mut Buf, len: usize) -> Result<&'a [f32]> {
        self.launch_step(); // callers of single ops may not have called it
        buf.start_read(&self.device, len, std::iter::once(0..len))?;
        buf.finish_read(&self.device, len)
    }

    fn start_read(&self, buf: &mut Buf, width: usize, rows: usize, runs: impl Iterator<Item = Range<usize>>) -> Result<()> {
        buf.start_read(&self.device, rows * width, runs.map(|rows| rows.start * width..rows.end * width))
    }

    fn finish_read<'a>(&'a self, buf: &'a mut Buf, len: usize) -> Result<&'a [f32]> {
        buf.finish_read(&self.device, len)
    }
}

fn no_packing() -> Error {
    Error::unsupported("packed_path is not supported on CUDA devices; leave it out")
}
