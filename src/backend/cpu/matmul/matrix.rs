//! A weight matrix, packed in panels.
//!
//! Layout of a panel of 32 outputs:
//! - f32, f16: `[k][32]`.
//! - bf16: `[k / 2][32][2]`. An odd last column is padded with a zero.
//! - int8: `[k / 4][32][4]` bytes, where 128 represents 0, and then `[32]` scales in f32.
//! - int4: for each group, `[k / 8][32][4]` bytes, where 8 represents 0, and then `[32]` scales in
//!   f16. The low halves of four bytes are four columns, and the high halves the next four.
//! - int4 with offsets: as int4, but 0 represents the offset of a group. After its scales, a group
//!   has `[32]` offsets in f16.
//! - Blocks of a file: see `blocks`.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};

use super::super::SendPtr;
use super::super::lanes::{Element, Kernel, Lanes, greatest_magnitude, load_some, prefetch, store_some};
use super::super::pool::Pool;
use super::blocks::PackBlocks;
use super::bytes::STEP_BYTES;
use super::quantize::{self, INT4_ZERO, INT8_ZERO};
use super::rows::GROUP;
use super::{Format, LINE, Machine, PANEL};
use crate::backend::alloc::no_such_number;
use crate::backend::{PACKED_PIECE, PackedSource, RowSource, Section, Storage};
use crate::error::{Error, Result, try_vec, try_with_capacity};
use crate::sys::Pages;
use crate::types::options::{Dtype, Isa, WeightFormat};

/// Approximate bytes of rows that a thread reads from the source and packs at once, in whole
/// panels.
const LOAD_BYTES: usize = 512 << 10;
/// Approximate bytes that all threads read between two calls of `advance`, unless one round of all
/// threads is more.
const TOLD_BYTES: usize = 16 << 20;
/// Columns of a row that are converted at once. In int4, whole groups are converted.
const AT_ONCE: usize = GROUP;
/// Prefetch distance in rows.
const ROWS_AHEAD: usize = 2;

pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    sections: Vec<PackedRange>,
    pages: Pages, // the panels of all sections
}

/// Rows of a matrix in one format, which begin a panel of their own.
struct PackedRange {
    first_row: usize,
    rows: usize,
    format: Format,
    /// Place of its panels in the pages.
    bytes: Range<usize>,
}

/// A section of a matrix with its panels.
#[derive(Clone, Copy)]
pub struct PackedSection<'a> {
    pub first_row: usize,
    pub rows: usize,
    pub cols: usize,
    pub format: Format,
    panels: &'a [u8], // [rows / 32 rounded up][panel_bytes]
}

impl PackedSection<'_> {
    pub fn panel_bytes(&self) -> usize {
        panel_bytes(self.format, self.cols)
    }

    pub fn panel(&self, panel: usize) -> *const u8 {
        self.panels[panel * self.panel_bytes()..].as_ptr()
    }
}

fn panel_bytes(format: Format, cols: usize) -> usize {
    match format {
        Format::F32 => cols * PANEL * 4,
        Format::F16 => cols * PANEL * 2,
        Format::Bf16 => cols.next_multiple_of(2) * PANEL * 2,
        Format::Int8 => cols.div_ceil(4) * STEP_BYTES + PANEL * size_of::<f32>(),
        Format::Int4 { group, offsets } => cols / group * group_bytes(group, offsets),
        Format::Blocks(layout) => layout.panel_bytes(cols),
    }
}

/// Returns the bytes of a section.
fn section_bytes(rows: usize, cols: usize, format: Format) -> usize {
    rows.div_ceil(PANEL) * panel_bytes(format, cols)
}

/// Returns the bytes of a group of a panel in int4.
fn group_bytes(group: usize, offsets: bool) -> usize {
    group / 8 * STEP_BYTES + PANEL * size_of::<f16>() * (1 + offsets as usize)
}

/// Returns the index of column `k` of output `n` in its panel, for floating-point formats.
#[inline(always)]
fn place(format: Format, k: usize, n: usize) -> usize {
    if format == Format::Bf16 { (k / 2 * PANEL + n) * 2 + k % 2 } else { k * PANEL + n }
}

impl Matrix {
    /// The name of the layout above, which is the same on every path. Its version
    /// increases with every change of the layout or of the rounding, because packed weights are
    /// cached on disk.
    pub const LAYOUT: &str = "cpu panels of 32, 3";

    pub fn bytes(cols: usize, sections: &[Section]) -> u64 {
        // Loading reports formats that cannot be packed.
        let of_section =
            |section: &Section| Format::for_storage(section.storage).map_or(0, |format| section_bytes(section.rows, cols, format) as u64);
        sections.iter().map(of_section).sum()
    }

    fn zeroed(cols: usize, sections: &[Section]) -> Result<Matrix> {
        let mut ranges = try_with_capacity(sections.len())?;
        let (mut rows, mut bytes) = (0, 0);
        for section in sections {
            if let Storage::Numbers { to: WeightFormat::Int4 { group, .. }, .. } = section.storage
                && !cols.is_multiple_of(group)
            {
                return Err(Error::unsupported(format!(
                    "weight_group is {group}, which does not divide {cols} columns; set weight_format to int8"
                )));
            }
            if let Storage::Blocks(kind) = section.storage
                && !cols.is_multiple_of(kind.block_len())
            {
                return Err(Error::unsupported(format!("internal error: {} columns are no whole blocks of {}", cols, kind.name())));
            }
            let format = Format::for_storage(section.storage)?;
            let end = bytes + section_bytes(section.rows, cols, format);
            ranges.push(PackedRange { first_row: rows, rows: section.rows, format, bytes: bytes..end });
            (rows, bytes) = (rows + section.rows, end);
        }
        Ok(Matrix { rows, cols, sections: ranges, pages: Pages::zeroed(bytes)? })
    }

    /// Reads the rows of all sections and packs them.
    pub fn load(machine: Machine, cols: usize, sections: &[Section], mut source: RowSource) -> Result<Matrix> {
        let mut matrix = Self::zeroed(cols, sections)?;
        let mut buffers: Vec<Mutex<Vec<u8>>> = try_with_capacity(machine.pool.threads())?;
        buffers.resize_with(machine.pool.threads(), Mutex::default);
        for (section, range) in sections.iter().zip(&matrix.sections) {
            let (bytes, format) = (&mut matrix.pages.bytes_mut()[range.bytes.clone()], range.format);
            let packing = Packing { isa: machine.isa, format, storage: section.storage, cols, row_bytes: section.row_bytes(cols) };
            packing.load(machine.pool, range, bytes, &buffers, &mut source)?;
        }
        Ok(matrix)
    }

    /// Reads a matrix from the output of `packed`.
    pub fn of_packed(pool: &Pool, cols: usize, sections: &[Section], source: PackedSource) -> Result<Matrix> {
        let mut matrix = Self::zeroed(cols, sections)?;
        let bytes = matrix.pages.bytes().len();
        let start = SendPtr(matrix.pages.bytes_mut().as_mut_ptr());
        pool.try_run(bytes.div_ceil(PACKED_PIECE), &|piece, _| {
            let first = piece * PACKED_PIECE;
            // SAFETY: pieces are disjoint and inside the pages.
            source(piece, unsafe { std::slice::from_raw_parts_mut(start.get().add(first), PACKED_PIECE.min(bytes - first)) })
        })?;
        Ok(matrix)
    }

    pub fn packed(&self) -> &[u8] {
        self.pages.bytes()
    }

    /// Returns the number of sections.
    pub fn sections(&self) -> usize {
        self.sections.len()
    }

    pub fn section(&self, section: usize) -> PackedSection<'_> {
        let PackedRange { first_row, rows, format, ref bytes } = self.sections[section];
        PackedSection { first_row, rows, cols: self.cols, format, panels: &self.pages.bytes()[bytes.clone()] }
    }

    /// out = scale * row `n`, as f32.
    pub fn read_row(&self, n: usize, scale: f32, out: &mut [f32]) {
        self.visit_row(n, |k, value| out[k] = value * scale);
    }

    /// out += row `n`.
    pub fn add_row(&self, n: usize, out: &mut [f32]) {
        self.visit_row(n, |k, value| out[k] += value);
    }

    fn visit_row(&self, n: usize, mut visit: impl FnMut(usize, f32)) {
        let section = self.sections.partition_point(|range| range.first_row + range.rows <= n);
        let PackedSection { first_row, format, panels, .. } = self.section(section);
        let n = n - first_row;
        let bytes = panel_bytes(format, self.cols);
        let (panel, n) = (&panels[n / PANEL * bytes..][..bytes], n % PANEL);
        let mut each = |value: &dyn Fn(usize) -> f32| (0..self.cols).for_each(|k| visit(k, value(k)));
        let (twos, fours) = (panel.as_chunks::<2>().0, panel.as_chunks::<4>().0);
        match format {
            Format::F32 => each(&|k| f32::from_le_bytes(fours[place(format, k, n)])),
            Format::F16 => each(&|k| f16::from_le_bytes(twos[place(format, k, n)]).to_f32()),
            Format::Bf16 => each(&|k| bf16::from_le_bytes(twos[place(format, k, n)]).to_f32()),
            Format::Int8 => {
                let scale = f32::from_le_bytes(fours[fours.len() - PANEL + n]);
                each(&|k| scale * (panel[place_int8(k, n)] as f32 - INT8_ZERO as f32));
            }
            Format::Int4 { group, offsets } => {
                each(&|k| read_int4(&panel[k / group * group_bytes(group, offsets)..], group, offsets, k % group, n))
            }
            Format::Blocks(layout) => layout.visit_row(panel, n, visit),
        }
    }
}

/// Conversion of rows of a file to panels.
struct Packing {
    isa: Isa,
    format: Format,
    storage: Storage,
    cols: usize,
    row_bytes: usize,
}

impl Packing {
    /// Reads the rows of a section and packs them in `panels`. Each thread packs the rows that it
    /// reads, while they are in its core's cache. `buffers` has one buffer per thread.
    fn load(&self, pool: &Pool, range: &PackedRange, panels: &mut [u8], buffers: &[Mutex<Vec<u8>>], source: &mut RowSource) -> Result<()> {
        let (threads, row_bytes, count) = (pool.threads(), self.row_bytes, range.rows.div_ceil(PANEL));
        let rows_of = |panels: &Range<usize>| panels.start * PANEL..range.rows.min(panels.end * PANEL);
        // Small matrices are divided so that every thread has work.
        let each = (LOAD_BYTES / (PANEL * row_bytes).max(1)).clamp(1, count.div_ceil(2 * threads).max(1));
        let at_once = each * threads.max(TOLD_BYTES / (each * PANEL * row_bytes).max(1));
        for first in (0..count).step_by(at_once) {
            let some = first..count.min(first + at_once);
            self.for_panels(pool, panels, &some, each, |panels, worker, packed| {
                let rows = rows_of(&panels);
                let mut buffer = buffers[worker].lock().unwrap_or_else(PoisonError::into_inner);
                if buffer.len() < each * PANEL * row_bytes {
                    *buffer = try_vec(each * PANEL * row_bytes, 0u8)?;
                }
                let bytes = &mut buffer[..rows.len() * row_bytes];
                (source.read)(range.first_row + rows.start, bytes)?;
                self.pack(range.first_row + rows.start, bytes, packed)
            })?;
            (source.advance)(rows_of(&some).len() * row_bytes)?;
        }
        Ok(())
    }

    /// Calls `f` for groups of `each` panels with their indices, the thread's index and the panels'
    /// bytes.
    fn for_panels(
        &self,
        pool: &Pool,
        all: &mut [u8],
        panels: &Range<usize>,
        each: usize,
        f: impl Fn(Range<usize>, usize, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<()> {
        let panel_bytes = panel_bytes(self.format, self.cols);
        let start = SendPtr(all[panels.start * panel_bytes..panels.end * panel_bytes].as_mut_ptr());
        pool.try_run(panels.len().div_ceil(each), &|task, worker| {
            let piece = task * each..panels.len().min((task + 1) * each);
            let first = start.get().wrapping_add(piece.start * panel_bytes);
            // SAFETY: tasks have disjoint panels, inside the slice that is cut above.
            let bytes = unsafe { std::slice::from_raw_parts_mut(first, piece.len() * panel_bytes) };
            f(panels.start + piece.start..panels.start + piece.end, worker, bytes)
        })
    }

    /// Packs rows, from the first row of a panel on. It is row `first` of the matrix. The error
    /// names the first row that cannot be packed.
    fn pack(&self, first: usize, rows: &[u8], panels: &mut [u8]) -> Result<()> {
        let (cols, row_bytes) = (self.cols, self.row_bytes);
        let panels = panels.chunks_exact_mut(panel_bytes(self.format, cols).max(1));
        for (index, (bytes, panel)) in rows.chunks(PANEL * row_bytes.max(1)).zip(panels).enumerate() {
            let first = first + index * PANEL;
            match (self.format, self.storage) {
                (Format::Blocks(layout), _) => {
                    let mut refused = None;
                    // SAFETY: the CPU supports the path.
                    unsafe { self.isa.run(PackBlocks { layout, row_bytes, rows: bytes, panel, refused: &mut refused }) };
                    if let Some((row, error)) = refused {
                        return Err(error.within(format_args!("row {}", first + row)));
                    }
                }
                (Format::F16, Storage::Numbers { from: Dtype::F16, .. }) => copy::<2>(bytes, row_bytes, panel),
                (Format::F32, Storage::Numbers { from: Dtype::F32, .. }) | (Format::Bf16, Storage::Numbers { from: Dtype::Bf16, .. }) => {
                    copy::<4>(bytes, row_bytes, panel)
                }
                (format, Storage::Numbers { from, to }) => {
                    let (rows, mut refused) = (StoredRows { dtype: from, cols, bytes }, usize::MAX);
                    // SAFETY: the CPU supports the path.
                    unsafe { self.isa.run(Convert { format, rows, panel, refused: &mut refused }) };
                    if refused != usize::MAX {
                        return Err(no_such_number(first + refused, to));
                    }
                }
                (_, Storage::Blocks(_)) => unreachable!("blocks are packed as blocks"),
            }
        }
        Ok(())
    }
}

/// Packs a panel's rows without conversion, interleaving elements of N bytes. Processes one cache
/// line of each row at a time, so that source and destination stay in the L1 cache.
fn copy<const N: usize>(rows: &[u8], row_bytes: usize, panel: &mut [u8]) {
    let panel = panel.as_chunks_mut::<N>().0;
    for line in (0..row_bytes).step_by(LINE) {
        for (n, row) in rows.chunks_exact(row_bytes).enumerate() {
            let (elements, last) = row[line..row_bytes.min(line + LINE)].as_chunks::<N>();
            let first = line / N * PANEL + n;
            for (place, element) in elements.iter().enumerate() {
                panel[first + place * PANEL] = *element;
            }
            // An odd last column has fewer than N bytes; its padding is zero.
            if !last.is_empty() {
                panel[first + elements.len() * PANEL][..last.len()].copy_from_slice(last);
            }
        }
    }
}

/// Rows as they are stored in their file.
struct StoredRows<'a> {
    dtype: Dtype,
    cols: usize,
    bytes: &'a [u8], // [rows, cols]
}

impl StoredRows<'_> {
    fn each(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.bytes.chunks_exact(self.cols * self.dtype.bytes()).enumerate()
    }

    /// Prefetches columns of a row: hardware prefetchers do not follow accesses from row to row.
    #[inline(always)]
    fn prefetch_row(&self, row: *const u8, first: usize, count: usize) {
        let size = self.dtype.bytes();
        (0..count * size).step_by(LINE).for_each(|line| prefetch(row.wrapping_add(first * size + line)));
    }

    #[inline(always)]
    unsafe fn greatest_magnitude<L: Lanes>(&self, row: &[u8]) -> f32 {
        let (mut max_abs, mut numbers) = (0, [0.0; AT_ONCE]);
        for k in (0..self.cols).step_by(AT_ONCE) {
            let x = &mut numbers[..AT_ONCE.min(self.cols - k)];
            // SAFETY: the caller guarantees the CPU features of `L`.
            unsafe { self.read::<L>(row, k, x) };
            max_abs = greatest_magnitude(x).to_bits().max(max_abs); // compared as bits: non-finite numbers are the greatest
        }
        f32::from_bits(max_abs)
    }

    /// Reads columns of a row as f32, from `first` on, until `out` is full.
    #[inline(always)]
    unsafe fn read<L: Lanes>(&self, row: &[u8], first: usize, out: &mut [f32]) {
        let size = self.dtype.bytes();
        let from = row[first * size..][..out.len() * size].as_ptr();
        // SAFETY: the slice above bounds the reads, and loads need no alignment. The caller
        // guarantees the CPU features of `L`.
        unsafe {
            match self.dtype {
                Dtype::F32 => read_as::<L, f32>(from.cast(), out),
                Dtype::F16 => read_as::<L, f16>(from.cast(), out),
                Dtype::Bf16 => read_as::<L, bf16>(from.cast(), out),
            }
        }
    }
}

#[inline(always)]
unsafe fn read_as<L: Lanes, E: Element>(mut from: *const E, out: &mut [f32]) {
    let mut vectors = out.chunks_exact_mut(L::N);
    // SAFETY: the caller guarantees the CPU features of `L` and as many elements as `out` holds.
    // Loads need no alignment.
    unsafe {
        for out in &mut vectors {
            L::store(out.as_mut_ptr(), E::load::<L>(from));
            from = from.add(L::N);
        }
        let rest = vectors.into_remainder();
        store_some::<L>(rest.as_mut_ptr(), load_some::<L, E>(from, rest.len()), rest.len());
    }
}

/// The rows of one panel.
struct Convert<'a> {
    format: Format,
    rows: StoredRows<'a>,
    panel: &'a mut [u8],
    /// Minimum index in the panel of a row that the format cannot represent.
    refused: &'a mut usize,
}

impl Kernel for Convert<'_> {
    /// Converts a range of columns of all rows at a time, so that the destination stays in the L1
    /// cache.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        const SMALL: usize = WeightFormat::GROUPS[0];
        const MIDDLE: usize = WeightFormat::GROUPS[1];
        // SAFETY: the caller guarantees the CPU features of `L`.
        unsafe {
            match self.format {
                Format::Int4 { group: SMALL, offsets } => self.groups::<L, SMALL>(offsets),
                Format::Int4 { group: MIDDLE, offsets } => self.groups::<L, MIDDLE>(offsets),
                Format::Int4 { offsets, .. } => self.groups::<L, GROUP>(offsets),
                _ => self.columns::<L>(),
            }
        }
    }
}

impl Convert<'_> {
    /// Converts to int4. The group size is a compile-time constant, so that loops over a group are
    /// unrolled without remainders.
    #[inline(always)]
    unsafe fn groups<L: Lanes, const N: usize>(self, offsets: bool) {
        let Convert { rows, panel, refused, .. } = self;
        let mut numbers = [0.0; N];
        for (group, out) in panel.chunks_exact_mut(group_bytes(N, offsets)).enumerate() {
            for (n, row) in rows.each() {
                rows.prefetch_row(row.as_ptr().wrapping_add(ROWS_AHEAD * row.len()), group * N, N);
                // SAFETY: the caller guarantees the CPU features of `L`.
                unsafe {
                    rows.read::<L>(row, group * N, &mut numbers);
                    store_int4::<L, N>(out, n, &numbers, offsets);
                }
                // The scales and offsets of a group are in f16.
                if !quantize::fits_int4(&numbers) {
                    *refused = n.min(*refused);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn columns<L: Lanes>(self) {
        let Convert { format, rows, panel, refused } = self;
        let mut numbers = [0.0; AT_ONCE];
        if format == Format::Int8 {
            for (n, row) in rows.each() {
                // SAFETY: the caller guarantees the CPU features of `L`.
                let scale = quantize::int8_scale(unsafe { rows.greatest_magnitude::<L>(row) });
                scales_of_int8(panel)[n] = scale.to_le_bytes();
                if !scale.is_finite() {
                    *refused = n.min(*refused);
                }
            }
        }
        for k in (0..rows.cols).step_by(AT_ONCE) {
            for (n, row) in rows.each() {
                let x = &mut numbers[..AT_ONCE.min(rows.cols - k)];
                rows.prefetch_row(row.as_ptr().wrapping_add(ROWS_AHEAD * row.len()), k, x.len());
                // SAFETY: the caller guarantees the CPU features of `L`.
                unsafe { rows.read::<L>(row, k, x) };
                if !store(format, panel, n, k, x) {
                    *refused = n.min(*refused);
                }
            }
        }
    }
}

/// Returns the scales of a panel's outputs.
fn scales_of_int8(panel: &mut [u8]) -> &mut [[u8; 4]] {
    let scales = panel.len() - PANEL * size_of::<f32>();
    panel[scales..].as_chunks_mut().0
}

fn place_int8(k: usize, n: usize) -> usize {
    k / 4 * STEP_BYTES + n * 4 + k % 4
}

/// Returns the byte of column `k` of a group, and the bit position in it.
fn place_int4(k: usize, n: usize) -> (usize, usize) {
    (k / 8 * STEP_BYTES + n * 4 + k % 4, k % 8 / 4 * 4)
}

/// Decodes column `k` of a group.
fn read_int4(bytes: &[u8], group: usize, offsets: bool, k: usize, n: usize) -> f32 {
    let ((byte, shift), tail) = (place_int4(k, n), &bytes[group / 8 * STEP_BYTES..].as_chunks::<2>().0);
    let number = |place: usize| f16::from_le_bytes(tail[place]).to_f32();
    let whole = (bytes[byte] >> shift & 15) as f32;
    match offsets {
        true => number(n) * whole + number(PANEL + n),
        false => number(n) * (whole - INT4_ZERO as f32),
    }
}

/// Stores consecutive columns of output `n`, from `k` on, in its panel. Returns false if the format
/// cannot represent a number.
#[inline(always)]
fn store(format: Format, panel: &mut [u8], n: usize, k: usize, x: &[f32]) -> bool {
    let holds = |finite: bool, x: f32| finite || !x.is_finite();
    let places = (k..).map(|k| place(format, k, n));
    match format {
        Format::F32 => {
            places.zip(x).for_each(|(place, x)| panel.as_chunks_mut().0[place] = x.to_le_bytes());
            true
        }
        Format::F16 => places.zip(x).fold(true, |all, (place, &x)| {
            let number = f16::from_f32(x);
            panel.as_chunks_mut().0[place] = number.to_le_bytes();
            all & holds(number.is_finite(), x)
        }),
        Format::Bf16 => places.zip(x).fold(true, |all, (place, &x)| {
            let number = bf16::from_f32(x);
            panel.as_chunks_mut().0[place] = number.to_le_bytes();
            all & holds(number.is_finite(), x)
        }),
        Format::Int8 => {
            store_int8(panel, n, k, x);
            true
        }
        Format::Int4 { .. } => unreachable!("int4 comes in groups"),
        Format::Blocks(_) => unreachable!("blocks are packed as blocks"),
    }
}

#[inline(always)]
fn store_int8(panel: &mut [u8], n: usize, k: usize, x: &[f32]) {
    let mut bytes = [INT8_ZERO as u8; AT_ONCE]; // pads the last word
    quantize::int8(x, f32::from_le_bytes(scales_of_int8(panel)[n]), &mut bytes);
    let fours = panel.as_chunks_mut::<4>().0;
    for (word, four) in bytes.as_chunks::<4>().0[..x.len().div_ceil(4)].iter().enumerate() {
        fours[(k / 4 + word) * PANEL + n] = *four;
    }
}

#[inline(always)]
unsafe fn store_int4<L: Lanes, const N: usize>(out: &mut [u8], n: usize, x: &[f32; N], offsets: bool) {
    let mut halves = [0u8; N];
    // SAFETY: the caller guarantees the CPU features of `L`.
    let (scale, offset) = unsafe { quantize::int4::<L>(x, offsets, &mut halves) };
    for (halves, step) in halves.as_chunks().0.iter().zip(out.as_chunks_mut::<STEP_BYTES>().0) {
        // Low halves: four columns. High halves: the next four.
        let eight = u64::from_le_bytes(*halves);
        step.as_chunks_mut().0[n] = (eight as u32 | (eight >> 28) as u32).to_le_bytes();
    }
    let tail = out[N / 8 * STEP_BYTES..].as_chunks_mut().0;
    tail[n] = scale.to_le_bytes();
    if offsets {
        tail[PANEL + n] = offset.to_le_bytes();
    }
}
