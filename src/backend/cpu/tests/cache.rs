//! The KV cache: accuracy of its types, and copies of blocks.

use super::*;

/// A layer's cache and its rows of `[q, k, v]`, in consecutive slots.
struct Cached {
    shape: AttentionShape,
    kv: kv::Kv,
    inputs: Inputs,
}

impl Cached {
    const SHAPE: AttentionShape = AttentionShape {
        heads: 2,
        kv_heads: 2,
        head_dim: 20,
        values: Values::Own,
        scale: 0.3,
        window: None,
        soft_cap: None,
        alibi: None,
        shard: None,
    };
    const BLOCK: usize = 16;
    const BLOCKS: usize = 4;

    fn new(backend: &CpuBackend, dtype: KvDtype, qkv: &[f32]) -> Cached {
        let shape = Self::SHAPE;
        backend.reserve(&shape).unwrap();
        let kv_shape = KvShape {
            blocks: Self::BLOCKS,
            block_size: Self::BLOCK,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            values: shape.values,
            dtype,
        };
        let rows = qkv.len() / shape.qkv_width();
        let mut cached = Cached { shape, kv: backend.kv(kv_shape).unwrap(), inputs: Inputs::default() };
        let slots = (0..rows as u32).collect();
        backend.upload(&Batch { tokens: vec![0; rows], slots, ..Default::default() }, &mut cached.inputs).unwrap();
        backend.store_kv(&cached.inputs, 0, &shape, None, &mut buf(backend, qkv), &mut cached.kv);
        cached
    }

    /// Computes attention of the last row of `qkv` over these blocks.
    fn attend(&mut self, backend: &CpuBackend, qkv: &[f32], blocks: &[u32]) -> Vec<f32> {
        let width = self.shape.qkv_width();
        let position = (qkv.len() / width - 1) as u32;
        let spans = vec![Span { first_token: 0, tokens: 1, table: 0 }];
        let batch = Batch { tokens: vec![0], positions: vec![position], spans, tables: blocks.to_vec(), ..Default::default() };
        backend.upload(&batch, &mut self.inputs).unwrap();
        let mut out = poisoned(backend, self.shape.q_width());
        backend.attention(&self.inputs, 0, &self.shape, None, &[], &buf(backend, &qkv[qkv.len() - width..]), &self.kv, &mut out);
        out.to_vec()
    }

    /// Returns K and V of one head of a token in the first block, decoded from exported bytes.
    fn stored(&self, token: usize, head: usize) -> [Vec<f32>; 2] {
        let mut bytes = Vec::new();
        self.kv.read(&[0], Tail { blocks: 0, slots: 0 }, &mut bytes).unwrap();
        let (dims, block) = (self.shape.head_dim, Self::BLOCK);
        let halves = bytes.split_at(bytes.len() / 2);
        let number = |half: &[u8], at: usize| {
            let head = &half[head * block * (dims + 4)..];
            let scale = f32::from_le_bytes(*head[block * dims + token * 4..].first_chunk().unwrap());
            match self.kv.shape.dtype {
                KvDtype::Fp8 => E4m3(head[at]).to_f32() * scale,
                _ => head[at] as i8 as f32 * scale,
            }
        };
        let keys = (0..dims).map(|d| number(halves.0, d * block + token)).collect();
        [keys, (0..dims).map(|d| number(halves.1, token * dims + d)).collect()]
    }
}

fn with_scales() -> impl Iterator<Item = (CpuBackend, KvDtype)> {
    [KvDtype::Int8, KvDtype::Fp8].into_iter().flat_map(|dtype| backends().map(move |backend| (backend, dtype)))
}

/// The bound is half a step of rounding to the nearest. In int8, a step is 1/127 of the greatest
/// magnitude. In fp8, it is the last of four significant bits, or the smallest subnormal.
#[test]
fn one_byte_kv_is_accurate_to_half_a_unit_in_the_last_place() {
    for (backend, dtype) in with_scales() {
        let (shape, rows) = (Cached::SHAPE, 9);
        // Heads with very different magnitudes: each has its own scale.
        let size = |i: usize| [1e-30, 1.0, 3e4, 1e30][i / shape.head_dim % 4];
        let qkv: Vec<f32> = numbers(rows * shape.qkv_width(), 8).iter().enumerate().map(|(i, x)| x * size(i)).collect();
        let cached = Cached::new(&backend, dtype, &qkv);
        for (token, row) in qkv.chunks(shape.qkv_width()).enumerate() {
            for head in 0..2 {
                for (part, found) in [2 + head, 4 + head].into_iter().zip(cached.stored(token, head)) {
                    let given = &row[part * shape.head_dim..][..shape.head_dim];
                    let max = given.iter().fold(0.0f32, |max, x| max.max(x.abs())) as f64;
                    assert!(found.iter().any(|x| (x.abs() as f64 - max).abs() < 1e-6 * max), "the greatest number is exact");
                    for (given, found) in given.iter().zip(found) {
                        let error = (*given as f64 - found as f64).abs();
                        let bound = match dtype {
                            KvDtype::Fp8 => given.abs() as f64 / 16.0 + max / 448.0 / 1024.0,
                            _ => max / 254.0,
                        };
                        assert!(error <= bound * 1.0001, "{given} is stored as {found}, with numbers up to {max}");
                    }
                }
            }
        }
    }
}

#[test]
fn one_byte_kv_keeps_zeros_and_nan() {
    let shape = Cached::SHAPE;
    let (width, dims) = (shape.qkv_width(), shape.head_dim);
    // Index of the row whose second head gets a number that is not finite.
    const BAD: usize = 5;
    for (backend, dtype) in with_scales() {
        let mut qkv = numbers(9 * width, 8);
        for tiny in [0.0, -0.0, 1e-45, 1e-38] {
            qkv[2 * dims..4 * dims].fill(tiny);
            let cached = Cached::new(&backend, dtype, &qkv);
            assert!((0..2).all(|head| cached.stored(0, head)[0].iter().all(|&x| x == 0.0)), "{tiny}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for part in [3, 5] {
                let mut qkv = qkv.clone();
                qkv[BAD * width + part * dims + 7] = bad;
                let mut cached = Cached::new(&backend, dtype, &qkv);
                for rows in 1..=9 {
                    let out = cached.attend(&backend, &qkv[..rows * width], &[0]);
                    assert!(out[..dims].iter().all(|x| x.is_finite()), "{bad} does not affect the other head");
                    assert!(
                        out[dims..].iter().all(|x| x.is_nan() == (rows > BAD)),
                        "{bad} in part {part}, visible from row {rows}: {out:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn copied_and_exported_blocks_keep_their_scales() {
    for (backend, dtype) in with_scales() {
        let qkv = numbers(27 * Cached::SHAPE.qkv_width(), 8);
        let mut cached = Cached::new(&backend, dtype, &qkv);
        let expected = cached.attend(&backend, &qkv, &[0, 1]);
        backend.copy_blocks(&[BlockCopy { from: 0, to: 3 }, BlockCopy { from: 1, to: 2 }], std::slice::from_mut(&mut cached.kv));
        assert_eq!(cached.attend(&backend, &qkv, &[3, 2]), expected, "copied");
        let mut bytes = Vec::new();
        backend.read_blocks(&[3, 2], Tail { blocks: 0, slots: 0 }, &cached.kv, &mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, 2 * backend.kv_block_bytes(&cached.kv.shape));
        let mut other = Cached::new(&backend, dtype, &[]);
        assert!(backend.write_blocks(&[1, 3], &mut other.kv, &bytes).unwrap().is_empty());
        assert_eq!(other.attend(&backend, &qkv, &[1, 3]), expected, "after an export and an import");
    }
}

#[test]
fn f16_saturates_numbers_beyond_its_greatest() {
    let kept = |x| <half::f16 as kv::Cached>::nearest(x).to_f32();
    assert_eq!([65504.0, 65519.0, 65520.0, 1e30, f32::INFINITY, -1e30].map(kept), [65504.0, 65504.0, 65504.0, 65504.0, 65504.0, -65504.0]);
    assert!(kept(f32::NAN).is_nan());
}

#[test]
fn queries_and_keys_are_rotated_when_they_are_stored() {
    for backend in backends() {
        let (shape, rows) = (Cached::SHAPE, 5);
        let qkv = numbers(rows * shape.qkv_width(), 8);
        let angles = buf(&backend, &numbers(rows * 6, 9));
        let turn = RotaryEmbedding { rotated: 6, pairs: Pairs::Halves, angles: &angles };
        let mut turned = buf(&backend, &qkv);
        let heads = Heads { first: 0, count: shape.heads + shape.kv_heads, dim: shape.head_dim, stride: shape.qkv_width() };
        backend.rope(rows, heads, turn, &mut turned);
        let (mut found, mut expected) = (Cached::new(&backend, KvDtype::Int8, &turned), Cached::new(&backend, KvDtype::Int8, &turned));
        backend.store_kv(&expected.inputs, 0, &shape, None, &mut turned, &mut expected.kv);
        let mut at_once = buf(&backend, &qkv);
        found.kv.write(&[0], &vec![0; found.kv.bytes()]).unwrap();
        backend.store_kv(&found.inputs, 0, &shape, Some(turn), &mut at_once, &mut found.kv);
        assert!(at_once[..] == turned[..], "rows");
        assert!((0..rows).all(|token| (0..2).all(|head| found.stored(token, head) == expected.stored(token, head))), "K and V");
    }
}
