//! A batch on the device: everything that the kernels of a step read, in one copy.

use super::context::{Event, Stream};
use super::device::Device;
use super::function::{Shape, launch};
use super::memory::{Address, Memory, Pinned};
use crate::backend::{BatchSize, Extent};
use crate::error::Result;
use crate::types::batch::{Batch, NO_SLOT, Span};

/// Queries per tile of attention, in prefill and in decode. A query is one head of one row.
pub const PREFILL_TILE: u32 = 64;
pub const DECODE_TILE: u32 = 16;
/// Numbers per tile, which a kernel reads at once.
const TILE_NUMBERS: usize = 4;
/// Threads of a block that fills placeholders.
const THREADS: u32 = 128;

/// A part of the batch: its offset in numbers and its count of elements.
#[derive(Debug, Clone, Copy, Default)]
pub struct InputRange {
    first: usize,
    pub count: u32,
}

/// The attention tiles of layers with this many heads per KV head.
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    heads_per_kv: u32,
    /// Sequences with more than one row in the batch.
    pub prefill: InputRange,
    /// Sequences with one row.
    pub decode: InputRange,
    /// All sequences, in prefill tiles.
    pub all: InputRange,
}

#[derive(Default)]
pub struct Inputs {
    memory: Option<Memory>,
    staging: Option<Pinned>,
    /// Event after the copy of `staging` to the device.
    sent: Option<Event>,
    /// Used length of `staging` in numbers.
    len: usize,
    pub rows: u32,
    pub groups: u32,
    pub tokens: InputRange,
    pub positions: InputRange,
    pub slots: InputRange,
    pub tables: InputRange,
    /// Pairs of a token and its device sample.
    placeholders: InputRange,
    pub logit_rows: InputRange,
    pub tiles: Vec<Tiles>,
    /// One number: the context length of the longest sequence with one row, rounded up.
    pub max_decode_len: InputRange,
}

impl Inputs {
    /// Copies a batch to the device. `heads_per_kv` has the distinct values of all layers. `kept`:
    /// the batch is padded to this many sequences of one row, and padding rows store nothing. The
    /// offsets of all parts before the block tables then do not depend on the batch.
    pub fn take(&mut self, device: &Device, batch: &Batch, heads_per_kv: &[u32], kept: Option<usize>) -> Result<Extent> {
        if let Some(sent) = &self.sent {
            device.wait_for(sent)?; // the previous contents have been copied
        }
        let (of, extent) = (Extent::for_batch(batch), made(batch, kept));
        let (missing, groups) = (extent.rows - of.rows, batch.groups());
        self.len = 0;
        (self.rows, self.groups) = (extent.rows as u32, groups as u32);
        self.tokens = self.push(&batch.tokens, missing, 0);
        self.positions = self.push(&batch.positions, missing, 0);
        self.slots = self.push(&batch.slots, missing * groups, NO_SLOT);
        self.logit_rows = self.push(&batch.logit_rows, extent.logits - of.logits, 0);
        self.max_decode_len = self.push(&[max_decode_len(batch)], 0, 0);
        self.tiles.clear();
        self.tiles.try_reserve(heads_per_kv.len())?;
        for &heads_per_kv in heads_per_kv {
            let prefill = self.push_tiles(batch.spans.iter().filter(|span| !is_decode(span)), heads_per_kv, PREFILL_TILE, 0);
            let decode = self.push_tiles(batch.spans.iter().filter(is_decode), heads_per_kv, DECODE_TILE, missing);
            let all = self.push_tiles(batch.spans.iter(), heads_per_kv, PREFILL_TILE, missing);
            self.tiles.push(Tiles { heads_per_kv, prefill, decode, all });
        }
        self.tables = self.push(&batch.tables, 0, 0);
        self.placeholders = InputRange { first: self.len, count: batch.placeholders.len() as u32 };
        batch
            .placeholders
            .iter()
            .flat_map(|placeholder| [placeholder.token, placeholder.sample])
            .for_each(|number| self.push_number(number));
        self.send(device)?;
        Ok(extent)
    }

    /// Queues the replacement of the placeholders by the samples of the previous step.
    pub fn fill_placeholders(&self, device: &Device, samples: Address) {
        let InputRange { count, .. } = self.placeholders;
        let shape = Shape::new((count.div_ceil(THREADS), 1, 1), THREADS);
        let (tokens, placeholders) = (self.address(self.tokens), self.address(self.placeholders));
        launch!(device, device.kernels.sampling.fill_placeholders, shape, tokens, placeholders, samples, count);
    }

    fn send(&mut self, device: &Device) -> Result<()> {
        let (Some(memory), Some(staging)) = (&self.memory, &self.staging) else { return Ok(()) };
        let sent = match &self.sent {
            Some(sent) => sent,
            None => self.sent.insert(device.event()?),
        };
        device.send(Stream::Compute, memory, staging, 0..self.len * size_of::<u32>());
        device.record(sent, Stream::Compute);
        Ok(())
    }

    /// Returns the address of a part on the device.
    pub fn address(&self, part: InputRange) -> Address {
        self.memory.as_ref().map_or(Address::NULL, |memory| memory.address().at((part.first * size_of::<u32>()) as u64))
    }

    pub fn tiles(&self, heads_per_kv: u32) -> Option<Tiles> {
        self.tiles.iter().copied().find(|tiles| tiles.heads_per_kv == heads_per_kv)
    }

    /// Returns the maximum bytes of a batch on the device.
    pub fn bytes(BatchSize { tokens: rows, sequences, logits, table_entries: places, groups }: BatchSize, heads_per_kv: &[u32]) -> usize {
        let tiles: usize = heads_per_kv.iter().map(|&heads| tile_numbers(rows, sequences, heads as usize)).sum();
        (rows * (2 + groups) + logits + 1 + places + 2 * sequences + tiles) * size_of::<u32>()
    }

    /// Returns the bytes of this batch, padded to `kept` rows.
    pub fn bytes_of(batch: &Batch, kept: Option<usize>, heads_per_kv: &[u32]) -> usize {
        let Extent { rows, logits } = made(batch, kept);
        let sequences = batch.spans.len() + rows - batch.token_count();
        Inputs::bytes(
            BatchSize { tokens: rows, sequences, logits, table_entries: batch.tables.len(), groups: batch.groups() },
            heads_per_kv,
        )
    }

    /// Grows the buffers to at least this many bytes. Returns true if they were reallocated.
    pub fn fit(&mut self, device: &Device, bytes: usize) -> Result<bool> {
        let small = self.staging.as_ref().is_none_or(|staging| staging.bytes().len() < bytes);
        if small {
            device.wait()?; // no work uses the buffers that are freed
            (self.memory, self.staging) = (None, None);
            self.memory = Some(device.memory(bytes as u64)?);
            self.staging = Some(device.pinned(bytes, "lower max_batch_tokens or max_seqs")?);
        }
        Ok(small)
    }

    /// Appends numbers, and then `more` times the number `each`.
    fn push(&mut self, numbers: &[u32], more: usize, each: u32) -> InputRange {
        let part = InputRange { first: self.len, count: (numbers.len() + more) as u32 };
        numbers.iter().for_each(|&number| self.push_number(number));
        (0..more).for_each(|_| self.push_number(each));
        part
    }

    /// Appends tiles: (first row, rows, block table, first query) of a sequence's part of the
    /// batch. Tiles of padding rows have no rows.
    fn push_tiles<'a>(&mut self, spans: impl Iterator<Item = &'a Span>, heads_per_kv: u32, queries: u32, missing: usize) -> InputRange {
        self.len = self.len.next_multiple_of(TILE_NUMBERS);
        let mut part = InputRange { first: self.len, count: 0 };
        for span in spans {
            for first_query in (0..span.tokens * heads_per_kv).step_by(queries as usize) {
                [span.first_token, span.tokens, span.table, first_query].into_iter().for_each(|number| self.push_number(number));
                part.count += 1;
            }
        }
        let missing = missing as u32 * heads_per_kv.div_ceil(queries);
        (0..missing as usize * TILE_NUMBERS).for_each(|_| self.push_number(0));
        part.count += missing;
        part
    }

    fn push_number(&mut self, number: u32) {
        if let Some(staging) = &mut self.staging {
            staging.bytes_mut()[self.len * size_of::<u32>()..][..size_of::<u32>()].copy_from_slice(&number.to_ne_bytes());
        }
        self.len += 1;
    }
}

/// Returns the extent of a batch, padded to `kept` rows.
fn made(batch: &Batch, kept: Option<usize>) -> Extent {
    kept.map_or(Extent::for_batch(batch), |rows| Extent { rows, logits: rows })
}

/// Returns the longest context of decode, rounded up so that it rarely changes: the division of
/// sequences into splits, and so the bits of results, depends on it.
fn max_decode_len(batch: &Batch) -> u32 {
    rounded_up(batch.spans.iter().filter(is_decode).map(|span| batch.positions[span.first_token as usize] + 1))
}

fn rounded_up(lengths: impl Iterator<Item = u32>) -> u32 {
    lengths.max().unwrap_or(0).next_power_of_two()
}

fn is_decode(span: &&Span) -> bool {
    span.tokens == 1
}

/// Returns the numbers of all prefill, decode and combined tiles. Their count is at most that of
/// full tiles plus one per sequence.
fn tile_numbers(rows: usize, sequences: usize, heads_per_kv: usize) -> usize {
    let tiles = (rows * heads_per_kv).div_ceil(DECODE_TILE.min(PREFILL_TILE) as usize) + sequences;
    3 * TILE_NUMBERS + 2 * TILE_NUMBERS * tiles
}
