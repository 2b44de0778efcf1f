//! Loading of matrices from numbers and from packed bytes.

use super::*;

/// Packed weights are cached on disk. If this test fails, cached bytes would be misread, so
/// increase the version in `Matrix::LAYOUT`.
#[test]
fn the_layout_of_packed_weights_is_unchanged_for_its_version() {
    assert_eq!(Matrix::LAYOUT, "cpu panels of 32, 3");
    let (outs, cols) = (70, 128);
    let (bytes, _) = stored(&numbers(outs * cols, 2), Dtype::F32);
    let expected = [2219603078, 64443527, 2261333450, 2644511432, 1536834312, 222058335];
    let of_other_groups = [[611903422, 1066483286], [134496689, 2247335043]];
    let int4 = |group| [false, true].map(|offsets| WeightFormat::Int4 { group, offsets });
    for backend in backends() {
        let sum = |format| {
            let matrix = matrix_in(&backend, &bytes, outs, cols, Dtype::F32, format).unwrap();
            let packed = backend.packed_bytes(&matrix).unwrap();
            assert_eq!(packed.len() as u64, backend.matrix_bytes(cols, &[Section::numbers(outs, Dtype::F32, format)]));
            crc32fast::hash(packed)
        };
        assert_eq!(WeightFormat::all(64).map(sum), expected, "{}", backend.isa().name());
        assert_eq!([32, 128].map(|group| int4(group).map(sum)), of_other_groups, "{}", backend.isa().name());
    }
}

#[test]
fn a_matrix_is_restored_from_packed_bytes_and_a_missing_piece_is_an_error() {
    let backend = CpuBackend::new(3, None).unwrap();
    // Several pieces, the last one short.
    let (outs, cols) = (1100, 300);
    let (matrix, _) = matrix(&backend, &numbers(outs * cols, 5), outs, cols, Dtype::Bf16);
    let packed = backend.packed_bytes(&matrix).unwrap();
    assert!(packed.len() > 2 * PACKED_PIECE);
    let again = |missing: usize| {
        backend.matrix_of_packed(cols, &[Section::numbers(outs, Dtype::Bf16, WeightFormat::Bf16)], &|piece, out| match piece == missing {
            true => Err(Error::io(format!("piece {piece}"))),
            false => {
                out.copy_from_slice(&packed[piece * PACKED_PIECE..][..out.len()]);
                Ok(())
            }
        })
    };
    assert!(backend.packed_bytes(&again(usize::MAX).unwrap()).unwrap() == packed);
    for missing in [0, 2] {
        assert_eq!(again(missing).err().unwrap().message(), format!("piece {missing}"));
    }
}

#[test]
fn weights_do_not_depend_on_the_type_of_the_source() {
    let outs = 40;
    for (isa, cols) in backends().flat_map(|backend| [24, 37, 128, 300].map(|cols| (backend.isa(), cols))) {
        let backend = backends().find(|other| other.isa() == isa).unwrap();
        for (dtype, format) in
            [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|dtype| formats_for(cols, 32).map(move |format| (dtype, format)))
        {
            let (bytes, rounded) = stored(&numbers(outs * cols, 2), dtype);
            let [one, other] = [(bytes, dtype), (stored(&rounded, Dtype::F32).0, Dtype::F32)]
                .map(|(bytes, dtype)| as_stored(&matrix_in(&backend, &bytes, outs, cols, dtype, format).unwrap()));
            assert!(one == other, "{isa:?} {dtype:?} {format:?} {cols}");
        }
    }
}

#[test]
fn groups_that_do_not_divide_the_columns_are_refused() {
    let backend = backends().next().unwrap();
    let int4 = WeightFormat::Int4 { group: 64, offsets: false };
    let error = matrix_in(&backend, &stored(&numbers(4 * 96, 2), Dtype::F32).0, 4, 96, Dtype::F32, int4).err().unwrap();
    assert!(error.message().contains("weight_group is 64, which does not divide 96 columns"), "{error}");
}

/// Rows and columns of a matrix that needs several rounds of reading.
const WIDE: (usize, usize) = (300, 16_384);

/// Generates rows of a matrix with the width of `WIDE`. Rows in `bad` are NaN.
fn read_wide(bad: &[usize], first: usize, out: &mut [u8]) {
    for (row, out) in (first..).zip(out.chunks_exact_mut(4 * WIDE.1)) {
        for (k, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let number = (row * 31 + k * 17) % 1009;
            *out = if bad.contains(&row) { f32::NAN } else { number as f32 - 500.0 }.to_le_bytes();
        }
    }
}

#[test]
fn a_loaded_matrix_does_not_depend_on_the_number_of_threads() {
    let (rows, cols) = WIDE;
    for format in [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4 { group: 128, offsets: true }] {
        let loaded = [1, 2, 5].map(|threads| {
            let (backend, mut progress) = (CpuBackend::new(threads, None).unwrap(), Vec::new());
            let read = |first: usize, out: &mut [u8]| {
                read_wide(&[], first, out);
                Ok(())
            };
            let mut advance = |bytes| {
                progress.push(bytes);
                Ok(())
            };
            let matrix = backend
                .matrix(cols, &[Section::numbers(rows, Dtype::F32, format)], RowSource { read: &read, advance: &mut advance })
                .unwrap();
            assert!(progress.len() > 1 && progress.iter().sum::<usize>() == 4 * rows * cols, "{threads} threads: {progress:?}");
            crc32fast::hash(backend.packed_bytes(&matrix).unwrap())
        });
        assert_eq!(loaded, [loaded[0]; 3], "{format:?}");
    }
}

#[test]
fn loading_reports_the_first_error_and_progress_can_cancel_it() {
    let (rows, cols) = WIDE;
    let backend = CpuBackend::new(3, None).unwrap();
    let fault = |bad: &[usize], unread: usize, max_calls: usize| {
        let mut calls = 0;
        let read = |first: usize, out: &mut [u8]| {
            read_wide(bad, first, out);
            let here = first..first + out.len() / (4 * cols);
            if here.contains(&unread) { Err(Error::io(format!("row {unread} cannot be read"))) } else { Ok(()) }
        };
        let mut advance = |_| {
            calls += 1;
            if calls > max_calls { Err(Error::cancelled("enough")) } else { Ok(()) }
        };
        let section = Section::numbers(rows, Dtype::F32, WeightFormat::Int8);
        let loaded = backend.matrix(cols, &[section], RowSource { read: &read, advance: &mut advance });
        loaded.err().unwrap().message().to_string()
    };
    for _ in 0..5 {
        assert!(fault(&[297, 263], usize::MAX, 9).starts_with("row 263 has a number"));
        assert!(fault(&[70, 37], 133, 9).starts_with("row 37 has a number"));
        assert_eq!(fault(&[133], 40, 9), "row 40 cannot be read");
    }
    assert_eq!(fault(&[], usize::MAX, 1), "enough");
}

#[test]
fn an_error_names_the_row_of_a_weight_that_the_format_lacks() {
    let backend = backends().next().unwrap();
    let refusal = |bad: f32, format| {
        let mut weights = numbers(70 * 32, 5);
        weights[41 * 32 + 3] = bad;
        matrix_in(&backend, &stored(&weights, Dtype::F32).0, 70, 32, Dtype::F32, format).err().map(|error| error.message().to_string())
    };
    for format in WeightFormat::all(32) {
        let whole = format.is_whole();
        for bad in [f32::NAN, f32::INFINITY] {
            // Floating-point formats store non-finite numbers unchanged.
            assert_eq!(refusal(bad, format).map(|error| error.contains("row 41 has a number")), whole.then_some(true), "{format:?}");
        }
        let large = matches!(format, WeightFormat::F16 | WeightFormat::Int4 { .. });
        assert_eq!(refusal(1e6, format).is_some(), large, "{format:?}");
        assert_eq!(refusal(1e-40, format), None);
    }
}
