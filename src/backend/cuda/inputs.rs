//! A batch on the device: everything that the kernels of a step read, in one copy.

use super::context::{Event, Stream};
use super::device::{BLOCKS_PER_MULTIPROCESSOR, Device};
use super::function::{Shape, launch};
use super::memory::{Address, Memory, Pinned};
use crate::backend::{BatchSize, Extent, HeadGroups};
use crate::error::Result;
use crate::types::batch::{Batch, NO_SLOT, Span};

/// Queries per tile of attention, in prefill and in decode. A query is one head of one row.
pub const PREFILL_TILE: u32 = 128;
const DECODE_TILE: u32 = 16;
/// Queries per tile in decode over latents, which all heads share.
const LATENT_DECODE_TILE: u32 = 64;
/// Numbers per tile (`AttentionTile` in `kernels/attention.cu`), which a kernel reads in two loads.
const TILE_NUMBERS: usize = 8;
/// Lengths of the parts of a sequence in decode are multiples of this number of tokens.
const PART_STEP: u64 = 64;
/// The minimum length, so that a thread block has enough work.
const MIN_PART: u64 = 256;
/// Threads of a block that fills placeholders.
const THREADS: u32 = 128;

/// A part of the batch: its offset in numbers and its count of elements.
#[derive(Debug, Clone, Copy, Default)]
pub struct InputRange {
    first: usize,
    pub count: u32,
}

/// The attention tiles of layers.
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    heads: HeadGroups,
    /// Sequences with more than one row in the batch.
    pub prefill: InputRange,
    /// Sequences with one row, in parts.
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
}

impl Inputs {
    /// Copies a batch to the device. `heads` has the distinct values of all layers. `kept`: the
    /// batch is padded to this many sequences of one row, and padding rows store nothing. The
    /// offsets of everything before the block tables then do not depend on the batch.
    pub fn take(&mut self, device: &Device, batch: &Batch, heads: &[HeadGroups], kept: Option<usize>) -> Result<Extent> {
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
        self.tiles.clear();
        self.tiles.try_reserve(heads.len())?;
        for &heads in heads {
            let prefill = self.push_tiles(batch.spans.iter().filter(|span| !is_decode(span)), heads.each, PREFILL_TILE, 0);
            let all = self.push_tiles(batch.spans.iter(), heads.each, PREFILL_TILE, missing);
            let division = Division::new(batch, heads, device.blocks_at_once());
            let decode = self.push_decode(batch, &division, kept);
            self.tiles.push(Tiles { heads, prefill, decode, all });
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

    pub fn tiles(&self, heads: HeadGroups) -> Option<Tiles> {
        self.tiles.iter().copied().find(|tiles| tiles.heads == heads)
    }

    /// Returns the maximum bytes of a batch on a device with this many blocks at once.
    pub fn bytes(size: BatchSize, heads: &[HeadGroups], blocks_at_once: u32) -> usize {
        let BatchSize { tokens: rows, sequences, logits, table_entries: places, groups } = size;
        let tiles: usize = heads.iter().map(|heads| tile_numbers(rows, sequences, heads, blocks_at_once)).sum();
        (rows * (2 + groups) + logits + places + 2 * sequences + tiles) * size_of::<u32>()
    }

    /// Returns the bytes of this batch, padded to `kept` rows.
    pub fn bytes_of(batch: &Batch, kept: Option<usize>, heads: &[HeadGroups], blocks_at_once: u32) -> usize {
        let Extent { rows, logits } = made(batch, kept);
        let sequences = batch.spans.len() + rows - batch.token_count();
        let size = BatchSize { tokens: rows, sequences, logits, table_entries: batch.tables.len(), groups: batch.groups() };
        Inputs::bytes(size, heads, blocks_at_once)
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

    /// Appends prefill tiles of the sequences. Tiles of padding rows have no rows.
    fn push_tiles<'a>(&mut self, spans: impl Iterator<Item = &'a Span>, heads_per_kv: u32, queries: u32, missing: usize) -> InputRange {
        let mut range = self.begin_tiles();
        for span in spans {
            for first_query in (0..span.tokens * heads_per_kv).step_by(queries as usize) {
                self.push_tile(&mut range, [span.first_token, span.tokens, span.table, first_query, 0, 0, 0, 0]);
            }
        }
        (0..missing as u32 * heads_per_kv.div_ceil(queries)).for_each(|_| self.push_tile(&mut range, [0; TILE_NUMBERS]));
        range
    }

    /// Appends decode tiles: one for each part of a sequence and group of queries. If the batch is
    /// padded to `kept` rows, so many empty ones follow that their number does not depend on it.
    fn push_decode(&mut self, batch: &Batch, division: &Division, kept: Option<usize>) -> InputRange {
        let (mut range, mut partial) = (self.begin_tiles(), 0);
        for span in batch.spans.iter().filter(is_decode) {
            let parts = division.parts(context_len(batch, span));
            for first_query in division.first_queries() {
                for part in 0..parts {
                    self.push_tile(&mut range, [span.first_token, 1, span.table, first_query, division.part_len, part, parts, partial]);
                }
                partial += if parts > 1 { parts } else { 0 };
            }
        }
        let total = kept.map_or(range.count, |rows| (rows * division.first_queries().count()) as u32 + division.more_parts);
        (range.count..total).for_each(|_| self.push_tile(&mut range, [0; TILE_NUMBERS]));
        range
    }

    fn begin_tiles(&mut self) -> InputRange {
        self.len = self.len.next_multiple_of(TILE_NUMBERS);
        InputRange { first: self.len, count: 0 }
    }

    fn push_tile(&mut self, range: &mut InputRange, tile: [u32; TILE_NUMBERS]) {
        tile.into_iter().for_each(|number| self.push_number(number));
        range.count += 1;
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

/// The division of sequences in decode into parts, of which about as many as thread blocks run at
/// once have the same length. So a long sequence does not run alone at the end of a step.
struct Division {
    heads: HeadGroups,
    /// Maximum number of tokens of a part.
    part_len: u32,
    /// Maximum number of parts beyond one per tile.
    more_parts: u32,
}

impl Division {
    fn new(batch: &Batch, heads: HeadGroups, blocks_at_once: u32) -> Division {
        let tokens: u64 = batch.spans.iter().filter(is_decode).map(|span| u64::from(context_len(batch, span))).sum();
        let division = Division { heads, part_len: 0, more_parts: more_parts(heads, blocks_at_once) };
        let work = tokens * division.first_queries().count() as u64 * u64::from(heads.kv_heads);
        let part_len = work.div_ceil(decode_blocks(heads, blocks_at_once).into()).next_multiple_of(PART_STEP).max(MIN_PART);
        Division { part_len: part_len.try_into().unwrap_or(u32::MAX), ..division }
    }

    fn parts(&self, len: u32) -> u32 {
        len.div_ceil(self.part_len)
    }

    /// The first query of each tile of a row.
    fn first_queries(&self) -> impl Iterator<Item = u32> + use<> {
        (0..self.heads.each).step_by(decode_tile(self.heads) as usize)
    }
}

/// Returns the queries per tile in decode.
pub fn decode_tile(heads: HeadGroups) -> u32 {
    if heads.latents { LATENT_DECODE_TILE } else { DECODE_TILE }
}

/// Returns the number of decode blocks that run at once on a device that `blocks_at_once` blocks of
/// other kernels occupy. A block of attention over latents has a multiprocessor alone.
pub fn decode_blocks(heads: HeadGroups, blocks_at_once: u32) -> u32 {
    if heads.latents { blocks_at_once / BLOCKS_PER_MULTIPROCESSOR } else { blocks_at_once }
}

/// A part has at least its share of the work, so this many parts are full, and each tile has at
/// most one that is not.
fn more_parts(heads: HeadGroups, blocks_at_once: u32) -> u32 {
    decode_blocks(heads, blocks_at_once) / heads.kv_heads.max(1)
}

/// Returns the number of tokens that the row of a sequence in decode attends to.
fn context_len(batch: &Batch, span: &Span) -> u32 {
    batch.positions[span.first_token as usize] + 1
}

fn is_decode(span: &&Span) -> bool {
    span.tokens == 1
}

/// Returns the numbers of all tiles. In each list, their count is at most that of full tiles plus
/// one per sequence, and decode tiles are more by `more_parts`.
fn tile_numbers(rows: usize, sequences: usize, heads: &HeadGroups, blocks_at_once: u32) -> usize {
    let tiles = (rows * heads.each as usize).div_ceil(decode_tile(*heads).min(PREFILL_TILE) as usize) + sequences;
    // Prefill and decode tiles share the rows of the batch; combined tiles have all of them.
    TILE_NUMBERS * (3 + 2 * tiles + more_parts(*heads, blocks_at_once) as usize)
}
