//! Matrices of quantized blocks: exact numbers, correct products, the same bits in any batch.

use super::products::quantized;
use super::*;
use crate::backend::blocks::unpack;
use crate::backend::{Section, Storage};
use crate::types::blocks::BlockType;

fn types() -> impl Iterator<Item = BlockType> {
    BlockType::all().filter(|kind| kind.codes().is_some())
}

/// Returns the places of the f16 numbers of a block.
fn halves(kind: BlockType) -> &'static [usize] {
    match kind {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        _ => &[0],
    }
}

/// Returns random blocks. Their numbers are about 1.
fn random_blocks(kind: BlockType, count: usize, seed: u64) -> Vec<u8> {
    let largest = match kind {
        BlockType::Q4_0 | BlockType::Q4_1 => 0.1,
        BlockType::Q5_0 | BlockType::Q5_1 => 0.05,
        BlockType::Q8_0 | BlockType::Iq4Nl => 0.008,
        BlockType::Q2_K => 0.02,
        BlockType::Q3_K => 0.008,
        BlockType::Q4_K => 0.001,
        _ => 0.0005,
    };
    let (bytes, scales) = (numbers(count * kind.block_bytes(), seed), numbers(2 * count, seed + 1));
    let mut blocks: Vec<u8> = bytes.iter().map(|number| (number * 10_000.0) as i32 as u8).collect();
    for (index, block) in blocks.chunks_exact_mut(kind.block_bytes()).enumerate() {
        for (number, at) in halves(kind).iter().enumerate() {
            let scale = half::f16::from_f32(largest * scales[2 * index + number]);
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    blocks
}

/// The rows of a section, as they are stored, and the numbers that they represent.
struct Stored {
    section: Section,
    bytes: Vec<u8>,
    numbers: Vec<f32>,
}

fn blocks(kind: BlockType, rows: usize, cols: usize, seed: u64) -> Stored {
    let bytes = random_blocks(kind, rows * cols / kind.block_len(), seed);
    let mut numbers = vec![0.0; rows * cols];
    unpack(kind, &bytes, &mut numbers).unwrap();
    Stored { section: Section { rows, storage: Storage::Blocks(kind) }, bytes, numbers }
}

fn floats(rows: usize, cols: usize, seed: u64) -> Stored {
    let (bytes, numbers) = stored(&numbers(rows * cols, seed), Dtype::Bf16);
    Stored { section: Section::numbers(rows, Dtype::Bf16, WeightFormat::F32), bytes, numbers }
}

/// Loads a matrix of these sections.
fn load(backend: &CpuBackend, cols: usize, parts: &[Stored]) -> Result<Matrix> {
    let read = |first: usize, out: &mut [u8]| {
        let mut before = 0;
        for part in parts {
            let row_bytes = part.section.row_bytes(cols);
            if first < before + part.section.rows {
                out.copy_from_slice(&part.bytes[(first - before) * row_bytes..][..out.len()]);
                return Ok(());
            }
            before += part.section.rows;
        }
        unreachable!("row {first} is in no section")
    };
    let sections: Vec<Section> = parts.iter().map(|part| part.section).collect();
    let matrix = backend.matrix(cols, &sections, RowSource { read: &read, advance: &mut |_| Ok(()) })?;
    assert_eq!(backend.packed_bytes(&matrix)?.len() as u64, backend.matrix_bytes(cols, &sections));
    Ok(matrix)
}

/// Returns the product of each output with the rows of `x`, which are rounded as the section
/// requires.
fn expected(parts: &[Stored], x: &[f32], cols: usize, bias: &[f32]) -> Vec<f64> {
    let rows = x.len() / cols;
    let outs: usize = parts.iter().map(|part| part.section.rows).sum();
    let mut out = vec![0.0; rows * outs];
    let mut first = 0;
    for part in parts {
        let x = match part.section.storage {
            Storage::Blocks(kind) => quantized(x, cols, kind.codes().unwrap().group),
            Storage::Numbers { .. } => x.iter().map(|&x| x as f64).collect(),
        };
        for (row, n) in (0..rows).flat_map(|row| (0..part.section.rows).map(move |n| (row, n))) {
            let w = &part.numbers[n * cols..][..cols];
            let dot: f64 = x[row * cols..][..cols].iter().zip(w).map(|(x, &w)| x * w as f64).sum();
            out[row * outs + first + n] = dot + bias[first + n] as f64;
        }
        first += part.section.rows;
    }
    out
}

#[test]
fn a_matrix_has_exactly_the_numbers_of_its_blocks() {
    for backend in backends() {
        for (kind, rows) in types().flat_map(|kind| [1, 32, 70].map(|rows| (kind, rows))) {
            let part = blocks(kind, rows, 512, rows as u64);
            let expected: Vec<f64> = part.numbers.iter().map(|&number| number as f64).collect();
            let matrix = load(&backend, 512, &[part]).unwrap();
            assert!(as_stored(&matrix) == expected, "{} {}", backend.isa().name(), kind.name());
        }
    }
}

/// Packed weights are cached on disk. If this test fails, increase the version in `Matrix::LAYOUT`.
#[test]
fn the_layout_of_packed_blocks_is_unchanged() {
    let expected = [
        3629363032, 187034369, 1561427643, 784212863, 1705140878, 3608723115, 3360246679, 3373053028, 4264131810, 2188155900, 17681910,
        1936939623,
    ];
    for backend in backends() {
        let sum = |kind| crc32fast::hash(backend.packed_bytes(&load(&backend, 512, &[blocks(kind, 70, 512, 1)]).unwrap()).unwrap());
        let sums: Vec<u32> = types().map(sum).collect();
        assert_eq!(sums, expected, "{}", backend.isa().name());
    }
}

#[test]
fn products_with_blocks_are_correct_on_all_paths() {
    for backend in backends() {
        // Shapes with several tiles per panel, several stretches, and tiles that are computed alone.
        for (kind, (rows, outs, cols)) in
            types().flat_map(|kind| [(1, 1, 256), (2, 33, 512), (7, 70, 768), (16, 64, 512), (75, 40, 256)].map(|shape| (kind, shape)))
        {
            let cols = if kind.block_len() == 32 { cols + 32 } else { cols };
            let parts = [blocks(kind, outs, cols, 3)];
            let (x, bias) = (numbers(rows * cols, 1), numbers(outs, 2));
            let (w, mut out) = (load(&backend, cols, &parts).unwrap(), poisoned(&backend, rows * outs));
            backend.matmul(rows, &buf(&backend, &x), &w, Some(&buf(&backend, &bias)), &mut out);
            let name = format!("{} {} {rows}x{cols}x{outs}", backend.isa().name(), kind.name());
            assert_near(&name, &out, &expected(&parts, &x, cols, &bias), 2e-5);
        }
    }
}

#[test]
fn a_row_times_blocks_has_the_same_bits_alone_and_in_a_batch() {
    let (outs, cols) = (70, 512);
    for (backend, kind) in backends().flat_map(|backend| types().map(move |kind| (CpuBackend::new(2, Some(backend.isa())).unwrap(), kind)))
    {
        backend.reserve_rows(128, cols).unwrap();
        let w = load(&backend, cols, &[blocks(kind, outs, cols, 5)]).unwrap();
        let x = numbers(100 * cols, 6);
        let product = |x: &[f32]| {
            let mut out = poisoned(&backend, x.len() / cols * outs);
            backend.matmul(x.len() / cols, &buf(&backend, x), &w, None, &mut out);
            out.iter().map(|number| number.to_bits()).collect::<Vec<_>>()
        };
        let alone: Vec<u32> = x.chunks_exact(cols).flat_map(product).collect();
        for rows in [2, 3, 7, 13, 48, 100] {
            let name = format!("{} {} {rows}", backend.isa().name(), kind.name());
            assert!(product(&x[..rows * cols]) == alone[..rows * outs], "{name}");
        }
    }
}

#[test]
fn paths_with_vnni_have_the_bits_of_those_without() {
    let (rows, outs, cols) = (21, 70, 512);
    let x = numbers(rows * cols, 6);
    for (kind, isa) in types().flat_map(|kind| [Isa::AvxVnni, Isa::Avx512Vnni].map(|isa| (kind, isa))) {
        let product = |isa: Isa| {
            let backend = CpuBackend::new(2, Some(isa)).unwrap();
            backend.reserve_rows(rows, cols).unwrap();
            let (w, mut out) = (load(&backend, cols, &[blocks(kind, outs, cols, 5)]).unwrap(), poisoned(&backend, rows * outs));
            backend.matmul(rows, &buf(&backend, &x), &w, None, &mut out);
            out.iter().map(|number| number.to_bits()).collect::<Vec<_>>()
        };
        if isa.can_run() {
            assert!(product(isa) == product(isa.bits()), "{} {}", isa.name(), kind.name());
        }
    }
}

#[test]
fn sections_of_one_matrix_may_have_different_types() {
    let cols = 512;
    let part = |kind: Option<BlockType>, rows: usize| match kind {
        Some(kind) => blocks(kind, rows, cols, rows as u64),
        None => floats(rows, cols, rows as u64),
    };
    let (q4, q6, q8) = (Some(BlockType::Q4_K), Some(BlockType::Q6_K), Some(BlockType::Q8_0));
    for (backend, order) in backends().flat_map(|backend| {
        let isa = backend.isa();
        [[q4, q6, None], [None, q8, q4], [q6, q6, q8]].map(|order| (CpuBackend::new(2, Some(isa)).unwrap(), order))
    }) {
        backend.reserve_rows(ROOM.0, cols).unwrap();
        let parts = [part(order[0], 64), part(order[1], 7), part(order[2], 33)];
        let (rows, outs) = (21, 64 + 7 + 33);
        let (x, bias) = (numbers(rows * cols, 1), numbers(outs, 2));
        let (w, mut out) = (load(&backend, cols, &parts).unwrap(), poisoned(&backend, rows * outs));
        backend.matmul(rows, &buf(&backend, &x), &w, Some(&buf(&backend, &bias)), &mut out);
        assert_near(backend.isa().name(), &out, &expected(&parts, &x, cols, &bias), 2e-5);
        let exact: Vec<f64> = parts.iter().flat_map(|part| &part.numbers).map(|&number| number as f64).collect();
        assert!(as_stored(&w) == exact);
    }
}

#[test]
fn a_block_with_a_scale_that_is_not_finite_is_refused_with_its_row() {
    let backend = backends().next().unwrap();
    for (kind, row) in types().flat_map(|kind| [0, 37, 69].map(|row| (kind, row))) {
        let mut part = blocks(kind, 70, 512, 1);
        let at = row * kind.row_bytes(512) + kind.block_bytes() + halves(kind)[0];
        part.bytes[at..at + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
        let error = load(&backend, 512, &[floats(3, 512, 1), part]).err().unwrap();
        assert!(error.message().starts_with(&format!("row {}: a scale of a block is NaN", row + 3)), "{}: {error}", kind.name());
    }
}

/// The largest sums of products: all codes at their maximum, and all inputs equal.
#[test]
fn the_largest_products_do_not_overflow() {
    let (outs, cols) = (33, 512);
    for backend in backends() {
        for (kind, sign) in types().flat_map(|kind| [-1.0, 1.0].map(|sign| (kind, sign))) {
            let mut part = blocks(kind, outs, cols, 1);
            for block in part.bytes.chunks_exact_mut(kind.block_bytes()) {
                block.fill(0xFF);
                for at in halves(kind) {
                    block[*at..at + 2].copy_from_slice(&half::f16::from_f32(0.001).to_le_bytes());
                }
            }
            unpack(kind, &part.bytes, &mut part.numbers).unwrap();
            let parts = [part];
            let (x, bias) = (vec![sign; 3 * cols], vec![0.0; outs]);
            let (w, mut out) = (load(&backend, cols, &parts).unwrap(), poisoned(&backend, 3 * outs));
            backend.matmul(3, &buf(&backend, &x), &w, None, &mut out);
            assert_near(&format!("{} {}", backend.isa().name(), kind.name()), &out, &expected(&parts, &x, cols, &bias), 2e-5);
        }
    }
}
