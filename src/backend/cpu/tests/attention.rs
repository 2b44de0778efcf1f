//! Attention over paged K and V.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// A test case of attention with two sequences: one in the middle of its prompt, one decoding.
struct Case {
    shape: AttentionShape,
    /// [heads], or empty.
    sinks: Vec<f32>,
    block_size: usize,
    dtype: KvDtype,
    /// Computes each row in a separate batch.
    alone: bool,
}

const CONTEXTS: [usize; 2] = [301, 140];
const ROWS: [usize; 2] = [19, 1];

impl Case {
    /// Stores all K and V, and then computes attention for the last rows of each sequence.
    fn run(&self, backend: &CpuBackend) -> (Vec<f32>, Vec<f64>) {
        let Case { shape, sinks, block_size, dtype, .. } = self;
        backend.reserve(shape).unwrap();
        let per_sequence = CONTEXTS[0].div_ceil(*block_size);
        let kv_shape = KvShape {
            blocks: 2 * per_sequence,
            block_size: *block_size,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            values: shape.values,
            dtype: *dtype,
        };
        let mut kv = backend.kv(kv_shape).unwrap();
        // Slots may hold anything before they are written: fill them with NaN.
        let stale = vec![0xff; 2 * per_sequence * kv.bytes()];
        kv.write(&Vec::from_iter(0..2 * per_sequence as u32), &stale).unwrap();
        // The sequences' blocks alternate, starting at the end of the pool.
        let tables: Vec<u32> = (0..2).flat_map(|s| (0..per_sequence).map(move |b| (2 * (per_sequence - b) - 1 - s) as u32)).collect();
        let slot = |s: usize, p: usize| tables[s * per_sequence + p / block_size] * *block_size as u32 + (p % block_size) as u32;
        let own = shape.values == Values::Own;
        let width = if own { shape.qkv_width() } else { shape.q_width() + shape.kv_width() };
        let all = numbers(2 * CONTEXTS[0] * width, 5); // [sequence, position, qkv or qk]
        let at = |s: usize, p: usize| &all[(s * CONTEXTS[0] + p) * width..][..width];

        let places: Vec<(usize, usize)> = (0..2).flat_map(|s| (0..CONTEXTS[s]).map(move |p| (s, p))).collect();
        let mut inputs = Inputs::default();
        let batch = Batch { tokens: vec![0; places.len()], slots: places.iter().map(|&(s, p)| slot(s, p)).collect(), ..Default::default() };
        backend.upload(&batch, &mut inputs).unwrap();
        let qkv: Vec<f32> = places.iter().flat_map(|&(s, p)| at(s, p)[if own { 0 } else { shape.q_width() }..].to_vec()).collect();
        backend.store_kv(&inputs, 0, shape, None, &mut buf(backend, &qkv), &mut kv);

        let rows: Vec<(usize, usize)> = (0..2).flat_map(|s| (CONTEXTS[s] - ROWS[s]..CONTEXTS[s]).map(move |p| (s, p))).collect();
        let span = |first_row: usize, rows: usize, s: usize| Span {
            first_token: first_row as u32,
            tokens: rows as u32,
            table: (s * per_sequence) as u32,
        };
        let spans = match self.alone {
            false => vec![span(0, ROWS[0], 0), span(ROWS[0], ROWS[1], 1)],
            true => rows.iter().enumerate().map(|(row, &(s, _))| span(row, 1, s)).collect(),
        };
        let positions = rows.iter().map(|row| row.1 as u32).collect();
        let batch = Batch { tokens: vec![0; rows.len()], positions, spans, tables, ..Default::default() };
        backend.upload(&batch, &mut inputs).unwrap();
        let qkv: Vec<f32> = rows.iter().flat_map(|&(s, p)| at(s, p)[..shape.row_width()].to_vec()).collect();
        let mut out = poisoned(backend, rows.len() * shape.out_width());
        let sinks = (!sinks.is_empty()).then(|| buf(backend, sinks));
        backend.attention(&inputs, 0, shape, sinks.as_ref(), &[], &buf(backend, &qkv), &kv, &mut out);
        let expected = rows.iter().flat_map(|&(s, p)| self.reference(p, |i| at(s, i))).collect();
        (out.to_vec(), expected)
    }

    /// Returns true if queries and probabilities are rounded to bf16.
    fn in_pairs(&self, backend: &CpuBackend) -> bool {
        let pairs = self.dtype == KvDtype::Bf16 && self.shape.values == Values::Own && self.shape.head_dim.is_multiple_of(2);
        pairs && backend.isa() == Isa::Avx512Bf16
    }

    /// Computes one row for all heads in f64, over K and V as stored.
    fn reference<'a>(&self, position: usize, at: impl Fn(usize) -> &'a [f32]) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, head_dim, values, scale, window, soft_cap, alibi, .. } = self.shape;
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut out = Vec::new();
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let part = |p: usize, start: usize| &at(p)[start * head_dim..][..head_dim];
            let kept = |p: usize, start: usize| as_cached(part(p, start), self.dtype);
            let score = |p: usize| {
                let dot: f64 = part(position, head).iter().zip(kept(p, heads + kv_head)).map(|(q, k)| *q as f64 * k as f64).sum();
                let far = alibi.map_or(0.0, |alibi| alibi as f64 * self.shape.slope(head) as f64 * (position - p) as f64);
                let score = dot * scale as f64 - far;
                soft_cap.map_or(score, |cap| cap as f64 * (score / cap as f64).tanh())
            };
            let weights: Vec<f64> = (first..=position).map(|p| score(p).exp()).collect();
            let total = weights.iter().sum::<f64>() + self.sinks.get(head).map_or(0.0, |sink| (*sink as f64).exp());
            let beside = if values == Values::Own { kv_heads } else { 0 };
            let values: Vec<_> = (first..=position).map(|p| kept(p, heads + beside + kv_head)).collect();
            out.extend(
                (0..self.shape.value_dim()).map(|d| weights.iter().zip(&values).map(|(w, value)| w * value[d] as f64).sum::<f64>() / total),
            );
        }
        out
    }
}

#[test]
fn attention_is_correct_and_batch_invariant_for_all_features() {
    let shape = |heads, kv_heads, head_dim| AttentionShape::new(heads, kv_heads, head_dim, 1.7);
    let latent =
        |heads, head_dim, values| AttentionShape { values: Values::OfKeys(values), ..AttentionShape::new(heads, 1, head_dim, 0.4) };
    let plain = Vec::new;
    let shapes = [
        (shape(4, 4, 64), plain()),
        (shape(8, 1, 32), plain()),
        (AttentionShape { scale: 0.2, ..shape(2, 1, 128) }, plain()),
        (shape(6, 2, 20), plain()),
        (shape(3, 3, 7), plain()),
        (AttentionShape { window: Some(130), ..shape(4, 2, 16) }, plain()),
        (AttentionShape { window: Some(1), ..shape(2, 1, 80) }, plain()),
        (AttentionShape { soft_cap: Some(2.0), ..shape(5, 1, 48) }, plain()),
        (AttentionShape { alibi: Some(0.7), ..shape(6, 2, 20) }, plain()),
        (shape(4, 2, 16), vec![5.0, -3.0, 0.0, 12.0]),
        (AttentionShape { window: Some(20), ..shape(2, 1, 24) }, vec![40.0, 1.0]),
        (latent(4, 40, 32), plain()),
        // More heads than a task takes, and odd dimensions.
        (latent(34, 27, 19), plain()),
        (AttentionShape { window: Some(40), ..latent(3, 80, 64) }, vec![0.0, 2.0, -1.0]),
    ];
    for backend in backends() {
        for (i, (shape, sinks)) in shapes.iter().enumerate() {
            for block_size in [8, 16, 256] {
                for dtype in KvDtype::ALL {
                    let case = Case { shape: *shape, sinks: sinks.clone(), block_size, dtype, alone: false };
                    let tolerance = if case.in_pairs(&backend) { 8e-3 } else { 2e-5 };
                    let (found, expected) = case.run(&backend);
                    let name = format!("{} shape {i}, blocks of {block_size}, {dtype:?}", backend.isa().name());
                    assert_near(&name, &found, &expected, tolerance);
                    if block_size == 16 {
                        assert!(found == Case { alone: true, ..case }.run(&backend).0, "{name}: a single row has other bits");
                    }
                }
            }
        }
    }
}

/// A context of three blocks, the last of which has one token.
#[test]
fn attention_refuses_tables_with_blocks_outside_the_pool() {
    let (block_size, blocks, position) = (256, 4, 512_usize);
    for backend in backends() {
        for (dtype, window) in KvDtype::ALL.into_iter().flat_map(|dtype| [None, Some(200), Some(1)].map(move |window| (dtype, window))) {
            let shape = AttentionShape { window, ..AttentionShape::new(2, 1, 8, 1.0) };
            backend.reserve(&shape).unwrap();
            let kv_shape = KvShape { blocks, block_size, kv_heads: 1, head_dim: 8, values: Values::Own, dtype };
            let kv = backend.kv(kv_shape).unwrap();
            let qkv = buf(&backend, &numbers(shape.row_width(), 3));
            let attend = |shape: &AttentionShape, tables: Vec<u32>| {
                let spans = vec![Span { first_token: 0, tokens: 1, table: 0 }];
                let batch = Batch { tokens: vec![0], positions: vec![position as u32], spans, tables, ..Default::default() };
                let mut inputs = Inputs::default();
                backend.upload(&batch, &mut inputs).unwrap();
                let mut out = poisoned(&backend, shape.out_width());
                let run = AssertUnwindSafe(|| backend.attention(&inputs, 0, shape, None, &[], &qkv, &kv, &mut out));
                catch_unwind(run).map_err(|panic| panic.downcast::<String>().map_or_else(|_| String::new(), |text| *text))
            };
            let name = format!("{} {dtype:?}, window {window:?}", backend.isa().name());
            attend(&shape, vec![0, 3, 1]).unwrap();
            let first_visible = (position + 1).saturating_sub(window.unwrap_or(position + 1)) / block_size;
            for entry in first_visible..3 {
                for outside in [blocks as u32, u32::MAX] {
                    let mut tables = vec![0, 3, 1];
                    tables[entry] = outside;
                    let error = attend(&shape, tables).unwrap_err();
                    assert!(error.contains(&format!("block {outside} of a table is outside the pool of 4 blocks")), "{name}: {error}");
                }
            }
            attend(&shape, vec![0, 3]).expect_err("a table that is too short");
            attend(&shape, vec![0, 3, 1]).expect("the backend remains usable");
            let other_heads = AttentionShape { kv_heads: 2, ..shape };
            let error = attend(&other_heads, vec![0, 3, 1]).unwrap_err();
            assert!(error.contains("the cache has 1 x 8, Own"), "{name}: {error}");
        }
    }
}
