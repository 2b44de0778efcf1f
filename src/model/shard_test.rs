//! Shards of all golden models: together they are the whole model, and each reads only its part.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::formats::Formats;
use super::parts::Parts;
use super::spec::{Attention, HeadAttention, LatentAttention, Linear, Mlp, ModelSpec, Norm, QkNormOver, Role, Shard, Stage, Vector};
use super::weights;
use super::{BatchLimits, ModelFiles, PackedForm};
use crate::backend::cpu::{Buf, CpuBackend};
use crate::backend::{Section, Storage, Values};
use crate::error::Error;
use crate::types::blocks::BlockType;
use crate::types::options::WeightFormat;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Opens all golden models, with their names.
fn goldens() -> Vec<(String, ModelFiles)> {
    let entries = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.retain(|name| golden(name).join("expected.safetensors").exists());
    names.sort_unstable();
    assert!(names.len() > 70, "{names:?}");
    names.into_iter().map(|name| (name.clone(), ModelFiles::open(&golden(&name)).unwrap_or_else(|e| panic!("{name}: {e}")))).collect()
}

/// Returns whether a rank can have a shard of the model.
fn divides(spec: &ModelSpec, ranks: usize) -> bool {
    spec.layers.iter().all(|layer| {
        let shape = layer.attention.shape();
        let kv_divides = shape.kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(shape.kv_heads);
        let width = match &layer.mlp {
            Mlp::Plain { down, .. } | Mlp::Gated { down, .. } => down.cols,
            Mlp::Experts(experts) => experts.shared.as_ref().map_or(0, |shared| shared.expert.down.cols),
        };
        shape.heads.is_multiple_of(ranks) && kv_divides && width.is_multiple_of(ranks)
    })
}

/// Returns the shards of all ranks of all stages.
fn shards(spec: &ModelSpec, ranks: usize, stages: usize) -> Vec<(Shard, ModelSpec)> {
    let mut shards = Vec::new();
    for stage in 0..stages {
        let of_stage = spec.stage(Stage { stage, stages }).unwrap();
        shards.extend((0..ranks).map(|rank| (Shard { rank, ranks }, of_stage.shard(Shard { rank, ranks }).unwrap())));
    }
    shards
}

/// A leaf of a spec.
enum Leaf {
    Matrix(Linear),
    Norm(Norm),
    Vector(Vector),
}

fn leaves(spec: &ModelSpec) -> Vec<Leaf> {
    let found = std::cell::RefCell::new(Vec::new());
    let add = |leaf| {
        found.borrow_mut().push(leaf);
        Ok::<(), std::convert::Infallible>(())
    };
    let Ok(_) = spec.try_map(
        |linear, _| add(Leaf::Matrix(linear.clone())),
        |norm| add(Leaf::Norm(norm.clone())),
        |vector| add(Leaf::Vector(vector.clone())),
    );
    found.into_inner()
}

fn matrices(spec: &ModelSpec) -> Vec<Linear> {
    let only = |leaf| if let Leaf::Matrix(matrix) = leaf { Some(matrix) } else { None };
    leaves(spec).into_iter().filter_map(only).collect()
}

/// Reads the numbers of a matrix, a few rows at a time.
fn numbers(files: &ModelFiles, linear: &Linear) -> Vec<f32> {
    let parts = Parts::find(linear, &files.checkpoint).unwrap();
    let sections = [Section::numbers(linear.rows(), parts.dtype, WeightFormat::F32)];
    let row_bytes = linear.cols * parts.dtype.bytes();
    let mut numbers = vec![f32::NAN; linear.rows() * linear.cols];
    for first in (0..linear.rows()).step_by(5) {
        let mut bytes = vec![0; row_bytes * 5.min(linear.rows() - first)];
        parts.read_rows(&sections, first, &mut bytes).unwrap();
        parts.dtype.visit(&bytes, |i, number| numbers[first * linear.cols + i] = number);
    }
    numbers
}

/// Matrices that are put together from shards, by the tensors that they consist of.
#[derive(Default)]
struct Assembled(HashMap<String, Cells>);

/// The numbers of a matrix, each with the number of shards that have it.
struct Cells {
    cols: usize,
    cells: Vec<(f32, usize)>,
}

impl Assembled {
    fn key(linear: &Linear) -> String {
        format!("{:?}", linear.parts)
    }

    fn add(&mut self, files: &ModelFiles, shard: &Linear) {
        let stored_rows: usize = shard.parts.iter().map(|part| part.rows).sum();
        let cols = shard.stored_cols();
        let cells = || Cells { cols, cells: vec![(f32::NAN, 0); stored_rows * cols] };
        let Cells { cells, .. } = self.0.entry(Self::key(shard)).or_insert_with(cells);
        let rows = shard.row_ranges().into_iter().flatten();
        for (row, numbers) in rows.zip(numbers(files, shard).chunks_exact(shard.cols)) {
            for (cell, &number) in cells[row * cols..][shard.col_range()].iter_mut().zip(numbers) {
                assert!(cell.1 == 0 || cell.0.to_bits() == number.to_bits(), "shards differ");
                *cell = (number, cell.1 + 1);
            }
        }
    }
}

#[test]
fn shards_of_all_ranks_and_stages_are_the_whole_model_bit_for_bit() {
    let mut divided = 0;
    for (name, files) in goldens() {
        for (ranks, stages) in [(2, 1), (4, 1), (1, 2), (2, 2)] {
            if !divides(&files.spec, ranks) || files.spec.layers.len() < stages {
                continue;
            }
            divided += 1;
            let mut assembled = Assembled::default();
            for (_, spec) in shards(&files.spec, ranks, stages) {
                matrices(&spec).iter().for_each(|matrix| assembled.add(&files, matrix));
            }
            for whole in matrices(&files.spec) {
                let Cells { cols, cells } = &assembled.0[&Assembled::key(&whole)];
                assert_eq!((*cols, cells.len()), (whole.cols, whole.rows() * whole.cols));
                for (cell, number) in cells.iter().zip(numbers(&files, &whole)) {
                    let place = || format!("{name}, {ranks} ranks, {stages} stages: {}", whole.parts[0].name);
                    assert_eq!(cell.0.to_bits(), number.to_bits(), "{}", place());
                    // A matrix is on one rank of its stage, on all or some of them, or in both stages.
                    let shares = ranks.div_ceil(files.spec.layers[0].attention.shape().kv_heads);
                    assert!([1, ranks, stages, ranks * stages, shares].contains(&cell.1), "{}", place());
                }
            }
        }
    }
    assert!(divided > 200, "{divided}");
}

/// Returns the numbers of objects of `width` numbers.
fn scaled(range: &std::ops::Range<usize>, width: usize) -> std::ops::Range<usize> {
    range.start * width..range.end * width
}

fn check_heads(whole: &HeadAttention, local: &HeadAttention, rank: usize) {
    let (shape, all) = (&local.shape, &whole.shape);
    let shard = shape.shard.unwrap();
    assert_eq!((shard.first, shard.of), (rank * shape.heads, all.heads));
    let queries = shard.first..shard.first + shape.heads;
    assert_eq!(local.out.col_range(), scaled(&queries, shape.head_dim));
    // Each query has the KV head of the whole model.
    let kv_head = |query: usize| query / (all.heads / all.kv_heads);
    let kv_heads = kv_head(queries.start)..kv_head(queries.end - 1) + 1;
    assert_eq!(kv_heads.len(), shape.kv_heads);
    for query in 0..shape.heads {
        assert_eq!(kv_heads.start + query / (shape.heads / shape.kv_heads), kv_head(shard.first + query));
    }
    let keys = scaled(&kv_heads, shape.head_dim);
    let at = |first: usize| first + keys.start..first + keys.end;
    let rows = [scaled(&queries, shape.head_dim), at(all.q_width()), at(all.q_width() + all.kv_width())];
    assert_eq!(local.qkv.row_ranges(), rows);
    assert_eq!(local.qkv.rows(), shape.qkv_width());
    assert_eq!(local.sinks.as_ref().map(Vector::width), whole.sinks.as_ref().map(|_| shape.heads));
    let Some((norm, of_whole)) = local.qk_norm.as_ref().zip(whole.qk_norm.as_ref()) else { return };
    match norm.over {
        QkNormOver::EachHead if of_whole.q.width() == shape.head_dim => assert_eq!(norm.k, of_whole.k),
        QkNormOver::EachHead => assert_eq!((norm.q.width(), norm.k.width()), (shape.q_width(), shape.kv_width())),
        // The norm is over the queries, or the keys, of all ranks.
        QkNormOver::AllHeads => {
            let ranks = all.heads / shape.heads;
            assert_eq!((norm.q.width(), norm.k.width()), (all.q_width(), ranks * shape.kv_width()));
        }
    }
}

fn check_latent(whole: &LatentAttention, local: &LatentAttention, rank: usize) {
    let heads = rank * local.shape.heads..(rank + 1) * local.shape.heads;
    let width = whole.values[0].rows();
    assert_eq!(local.shape.values, whole.shape.values);
    assert!(matches!(local.shape.values, Values::OfKeys(_)) && local.shape.kv_heads == 1);
    assert_eq!(local.out.col_range(), scaled(&heads, width));
    assert_eq!((&local.keys[..], &local.values[..]), (&whole.keys[heads.clone()], &whole.values[heads]));
    assert_eq!((&local.latent, &local.norm), (&whole.latent, &whole.norm));
}

#[test]
fn a_rank_has_the_heads_and_widths_whose_products_belong_together() {
    for (name, files) in goldens() {
        for ranks in [2, 4] {
            if !divides(&files.spec, ranks) {
                continue;
            }
            for (Shard { rank, .. }, spec) in shards(&files.spec, ranks, 1) {
                for (whole, local) in files.spec.layers.iter().zip(&spec.layers) {
                    match (&whole.attention, &local.attention) {
                        (Attention::Heads(whole), Attention::Heads(local)) => check_heads(whole, local, rank),
                        (Attention::Latent(whole), Attention::Latent(local)) => check_latent(whole, local, rank),
                        _ => panic!("{name}"),
                    }
                    assert_eq!(local.attention.out().bias, whole.attention.out().bias && rank == 0);
                    check_mlp(&whole.mlp, &local.mlp, rank);
                }
            }
        }
    }
}

fn check_mlp(whole: &Mlp, local: &Mlp, rank: usize) {
    let check_gated = |gate_up: &Linear, down: &Linear, whole: &Linear| {
        let (cols, inner) = (down.col_range(), down.stored_cols());
        assert_eq!(gate_up.row_ranges(), [cols.clone(), inner + cols.start..inner + cols.end]);
        assert_eq!(down.bias, whole.bias && rank == 0);
    };
    match (whole, local) {
        (Mlp::Plain { down: whole, .. }, Mlp::Plain { up, down, .. }) => {
            assert_eq!(up.row_ranges(), Vec::from_iter([down.col_range()]));
            assert_eq!(down.bias, whole.bias && rank == 0);
        }
        (Mlp::Gated { down: whole, .. }, Mlp::Gated { gate_up, down, .. }) => check_gated(gate_up, down, whole),
        (Mlp::Experts(whole), Mlp::Experts(local)) => {
            assert_eq!((local.routing, &local.router), (whole.routing, &whole.router));
            for (expert, index) in local.experts.iter().zip(local.local()) {
                assert_eq!((&expert.gate_up, &expert.down), (&whole.experts[index].gate_up, &whole.experts[index].down));
            }
            assert_eq!(local.experts.len(), local.local().len());
            if let Some((local, whole)) = local.shared.as_ref().zip(whole.shared.as_ref()) {
                check_gated(&local.expert.gate_up, &local.expert.down, &whole.expert.down);
                assert_eq!(local.gate, whole.gate);
            }
        }
        _ => panic!("the kinds of MLP differ"),
    }
}

#[test]
fn one_rank_or_one_stage_has_the_unchanged_spec() {
    for (name, files) in goldens() {
        let spec = files.spec.shard(Shard { rank: 0, ranks: 1 }).unwrap().stage(Stage { stage: 0, stages: 1 }).unwrap();
        assert_eq!(format!("{spec:?}"), format!("{:?}", files.spec), "{name}");
        assert!(!format!("{spec:?}").contains("shard") && !format!("{spec:?}").contains("local"), "{name}");
        assert_eq!(spec.vocab(), 0..spec.vocab_size);
    }
}

/// Returns the bytes that are read from the model's files during a call.
fn bytes_read(files: &ModelFiles, read: impl FnOnce()) -> u64 {
    let before = files.checkpoint.bytes_read.load(Ordering::Relaxed);
    read();
    files.checkpoint.bytes_read.load(Ordering::Relaxed) - before
}

#[test]
fn a_shard_reads_only_its_rows_and_columns() {
    let mut exact = 0;
    // Blocks that a column divides are read by both ranks.
    for (name, files) in goldens().into_iter().filter(|(name, files)| files.gguf.is_none() && !name.contains("mxfp4")) {
        let read = |linear: &Linear| bytes_read(&files, || drop(numbers(&files, linear)));
        let whole: u64 = matrices(&files.spec).iter().map(read).sum();
        for ranks in [2, 4].into_iter().filter(|&ranks| divides(&files.spec, ranks)) {
            let of_ranks: Vec<Vec<Linear>> = shards(&files.spec, ranks, 1).iter().map(|(_, spec)| matrices(spec)).collect();
            for matrix in of_ranks.iter().flatten().filter(|matrix| matrix.shard.is_some()) {
                let bytes: usize =
                    matrix.part_rows().iter().map(|piece| piece.rows * matrix.cols * dtype_of(&files, matrix, piece.part)).sum();
                assert_eq!(read(matrix), bytes as u64, "{name}: {}", matrix.parts[0].name);
            }
            let by_rank: Vec<u64> = of_ranks.iter().map(|matrices| matrices.iter().map(read).sum()).collect();
            // Routers, positions and latents are on all ranks.
            let is_on_all = |matrix: &&Linear| of_ranks.iter().all(|of_rank| of_rank.contains(matrix));
            let undivided: u64 = of_ranks[0].iter().filter(is_on_all).map(read).sum();
            let shares_kv_heads = files.spec.layers.iter().any(|layer| layer.attention.shape().kv_heads < ranks && is_heads(layer));
            if !shares_kv_heads {
                assert_eq!(by_rank.iter().sum::<u64>(), whole + (ranks as u64 - 1) * undivided, "{name}, {ranks} ranks");
            }
            let has_experts = files.spec.layers.iter().any(|layer| matches!(layer.mlp, Mlp::Experts(_)));
            if !shares_kv_heads && !has_experts && files.spec.vocab_size.is_multiple_of(ranks) {
                exact += 1;
                by_rank.iter().for_each(|&of_rank| assert_eq!(of_rank, undivided + (whole - undivided) / ranks as u64, "{name}"));
            }
        }
    }
    assert!(exact > 20, "{exact}");
}

fn is_heads(layer: &super::spec::Layer) -> bool {
    matches!(layer.attention, Attention::Heads(_))
}

/// Returns the bytes of a number of a part.
fn dtype_of(files: &ModelFiles, matrix: &Linear, part: usize) -> usize {
    let part = &matrix.parts[part];
    let shape = part.tensor_shape(&matrix.stored_shape(part));
    files.checkpoint.tensor(&part.weight(), &shape).unwrap().1.bytes()
}

/// Loads a spec on the CPU and returns the biases, norms and vectors, by name.
fn vectors(files: &ModelFiles, spec: &ModelSpec) -> HashMap<String, Vec<f32>> {
    let backend = CpuBackend::new(1, None).unwrap();
    let mut found = HashMap::new();
    let numbers = |buf: Buf, len: usize| buf[..len].to_vec();
    for leaf in leaves(spec) {
        match leaf {
            Leaf::Matrix(linear) => {
                if let Some(bias) = weights::load_bias(&backend, &linear, &files.checkpoint).unwrap() {
                    found.insert(format!("{:?}", linear.parts), numbers(bias, linear.rows()));
                }
            }
            Leaf::Norm(norm) => {
                let weight = weights::load_norm(&backend, &norm, &files.checkpoint).unwrap().weight;
                found.insert(format!("{:?}", norm.parts), numbers(weight, norm.width()));
            }
            Leaf::Vector(vector) => {
                let len = vector.width();
                found.insert(vector.name.clone(), numbers(weights::load_vector(&backend, &vector, &files.checkpoint).unwrap(), len));
            }
        }
    }
    found
}

#[test]
fn biases_norms_and_vectors_are_those_of_the_shard() {
    let mut compared = 0;
    for (name, files) in goldens() {
        let whole = vectors(&files, &files.spec);
        for ranks in [2, 4] {
            if !divides(&files.spec, ranks) {
                continue;
            }
            for (_, spec) in shards(&files.spec, ranks, 1) {
                let local = vectors(&files, &spec);
                for leaf in leaves(&spec) {
                    let (key, ranges) = match leaf {
                        Leaf::Matrix(linear) => (format!("{:?}", linear.parts), Some(linear.row_ranges())),
                        Leaf::Norm(norm) => (format!("{:?}", norm.parts), norm.shard),
                        Leaf::Vector(vector) => (vector.name, vector.shard),
                    };
                    let (Some(local), Some(whole)) = (local.get(&key), whole.get(&key)) else { continue };
                    let ranges = ranges.unwrap_or_else(|| std::iter::once(0..whole.len()).collect());
                    let expected: Vec<f32> = ranges.into_iter().flatten().map(|i| whole[i]).collect();
                    assert_eq!(*local, expected, "{name}: {key}");
                    compared += usize::from(local.len() < whole.len());
                }
            }
        }
    }
    assert!(compared > 200, "{compared}");
}

#[test]
fn a_stage_has_its_layers_and_the_first_and_last_one_their_tables() {
    for (name, files) in goldens().into_iter().filter(|(_, files)| files.spec.layers.len() > 1) {
        let layers = files.spec.layers.len();
        let stages = shards(&files.spec, 1, 2);
        let [(_, first), (_, last)] = &stages[..] else { panic!("two stages") };
        assert_eq!((first.layers.len(), last.layers.len()), (layers.div_ceil(2), layers / 2), "{name}");
        let tied = files.spec.head.weight.is_none();
        let rows = |spec: &ModelSpec| (spec.embedding.tokens.rows(), spec.head.weight.as_ref().map(Linear::rows));
        let vocab = files.spec.vocab_size;
        assert_eq!(rows(first), (vocab, (!tied).then_some(0)), "{name}");
        assert_eq!(rows(last), if tied { (vocab, None) } else { (0, Some(vocab)) }, "{name}");
        assert_eq!((first.vocab(), last.vocab()), (0..vocab, 0..vocab));
        assert!(first.final_norm.is_none() && first.head.project.is_none());
        assert!(last.embedding.project.is_none() && last.embedding.positions.is_none());

        let backend = CpuBackend::new(2, None).unwrap();
        let bytes = |spec: &ModelSpec| weights::bytes(&backend, spec, &files.checkpoint, None).unwrap();
        let twice = if tied { bytes_of_tokens(&backend, &files) } else { 0 };
        assert_eq!(bytes(first) + bytes(last), bytes(&files.spec) + twice, "{name}");
        let load = |spec: &ModelSpec| {
            let origin = weights::Origin::Files(&mut |_| ());
            weights::load(&backend, spec, &files.checkpoint, None, origin, &mut |_, _| true).map(drop)
        };
        stages.iter().for_each(|(_, spec)| load(spec).unwrap());
    }
}

fn bytes_of_tokens(backend: &CpuBackend, files: &ModelFiles) -> u64 {
    use crate::backend::Alloc;
    let tokens = &files.spec.embedding.tokens;
    let (_, sections) = Formats::new(backend, &files.checkpoint, None).of_matrix(tokens, Role::Vocabulary).unwrap();
    backend.matrix_bytes(tokens.cols, &sections)
}

fn refused(result: crate::error::Result<ModelSpec>) -> String {
    result.err().map(|error: Error| error.message().to_string()).unwrap()
}

#[test]
fn ranks_and_stages_that_do_not_divide_the_model_are_refused_with_the_numbers() {
    let open = |name: &str| ModelFiles::open(&golden(name)).unwrap().spec;
    let shard = |name: &str, rank, ranks| refused(open(name).shard(Shard { rank, ranks }));
    assert!(shard("llama", 0, 3).contains("(3 ranks, 4 attention heads); set tensor_parallel to a divisor of 4"));
    assert!(shard("llama", 2, 2).contains("rank 2 of tensor parallelism is out of range (limit 2)"));
    assert!(shard("deepseek_v3", 0, 8).contains("(8 ranks, 4 attention heads)"));
    let stage = |stages| refused(open("llama").stage(Stage { stage: 0, stages }));
    assert!(stage(4).contains("pipeline_parallel is larger than the number of layers (4, limit 3)"));
    assert!(stage(0).contains("stage 0 of the pipeline is out of range (limit 0)"));

    let mut wide = open("llama");
    let Mlp::Gated { gate_up, down, .. } = &mut wide.layers[1].mlp else { panic!() };
    (*gate_up, *down) = (Linear::new("gate_up", 2 * 73, 32), Linear::new("down", 32, 73));
    assert!(
        refused(wide.shard(Shard { rank: 0, ranks: 2 }))
            .contains("(2 ranks, 73 columns of an MLP); set tensor_parallel to a divisor of 73")
    );
    let Attention::Heads(heads) = &mut wide.layers[0].attention else { panic!() };
    (heads.shape.heads, heads.shape.kv_heads) = (12, 6);
    assert!(refused(wide.shard(Shard { rank: 0, ranks: 4 })).contains("(4 ranks, 6 KV heads)"));
}

#[test]
fn columns_that_are_not_whole_blocks_or_groups_are_refused_with_the_numbers() {
    let backend = CpuBackend::new(1, None).unwrap();
    let (mut compared, gguf) = (0, goldens().into_iter().filter(|(_, files)| files.gguf.is_some()));
    for (name, files) in gguf {
        let sections = |linear: &Linear, format| Formats::new(&backend, &files.checkpoint, format).of_matrix(linear, Role::Inner);
        let in_blocks = |linear: &&Linear| Parts::find(linear, &files.checkpoint).unwrap().has_blocks() && linear.cols > 48;
        let all = matrices(&files.spec);
        let Some(matrix) = all.iter().find(in_blocks) else { continue };
        let shard = matrix.clone().with_cols(3..34);
        let error = sections(&shard, None).err().unwrap();
        let expected = format!("a rank has 31 of {} columns, which are not whole blocks of ", matrix.cols);
        assert!(error.message().contains(&expected), "{name}: {error}");
        assert!(error.message().starts_with(&matrix.parts[0].weight()), "{name}: {error}");
        // Converted blocks are divided at any column.
        assert!(sections(&shard, Some(WeightFormat::F32)).is_ok());
        for (all, some) in numbers(&files, matrix).chunks_exact(matrix.cols).zip(numbers(&files, &shard).chunks_exact(31)) {
            assert_eq!(all[3..34], *some, "{name}");
        }
        let grouped = sections(&matrix.clone().with_cols(0..48), Some(WeightFormat::Int4 { group: 32, offsets: false })).err().unwrap();
        assert!(grouped.message().contains("has 48 columns per rank; set weight_format to int8"), "{name}: {grouped}");
        compared += 1;
    }
    assert!(compared > 3, "{compared}");
}

#[test]
fn columns_of_mxfp4_are_read_in_whole_blocks() {
    let files = ModelFiles::open(&golden("gpt_oss_mxfp4_bf16")).unwrap();
    let Mlp::Experts(experts) = &files.spec.layers[1].mlp else { panic!("experts") };
    // The rows of `gate_up` alternate in the file.
    let down = &experts.experts[1].down;
    for (matrix, cols) in [(&experts.experts[2].gate_up, 32..64), (down, 32..64), (down, 32..96), (down, 0..32)] {
        let shard = matrix.clone().with_cols(cols.clone());
        for (all, some) in numbers(&files, matrix).chunks_exact(matrix.cols).zip(numbers(&files, &shard).chunks_exact(cols.len())) {
            assert_eq!(all[cols.clone()], *some);
        }
        // 16 bytes of numbers and one of scales for 32 columns.
        assert_eq!(bytes_read(&files, || drop(numbers(&files, &shard))), (shard.rows() * cols.len() / 32 * 17) as u64);
    }
    let error = Parts::find(&down.clone().with_cols(0..48), &files.checkpoint).err().unwrap();
    let expected = "a rank has 48 of 96 columns, which are not whole blocks of MXFP4 (32 numbers each)";
    assert!(error.message().contains(expected), "{error}");
}

/// Reads a matrix as it is stored. None: it is not in blocks, or in blocks of several types.
fn blocks(files: &ModelFiles, linear: &Linear) -> Option<(BlockType, Vec<u8>)> {
    let parts = Parts::find(linear, &files.checkpoint).unwrap();
    let sections = parts.as_stored().unwrap();
    let [Section { rows, storage: Storage::Blocks(kind) }] = sections[..] else { return None };
    let mut bytes = vec![0; rows * kind.row_bytes(linear.cols)];
    parts.read_rows(&sections, 0, &mut bytes).unwrap();
    Some((kind, bytes))
}

#[test]
fn a_shard_of_a_matrix_in_blocks_has_the_blocks_of_its_rows_and_columns() {
    let mut compared = 0;
    for (name, files) in goldens().into_iter().filter(|(_, files)| files.gguf.is_some()) {
        for matrix in matrices(&files.spec) {
            let Some((kind, whole)) = blocks(&files, &matrix) else { continue };
            let (row, block) = (kind.row_bytes(matrix.cols), kind.block_len());
            let (rows, cols) = ([5..8, 0..2], matrix.cols - block..matrix.cols);
            let (_, some) = blocks(&files, &matrix.clone().with_rows(&rows).with_cols(cols.clone())).unwrap();
            let expected = rows.into_iter().flatten().map(|n| &whole[n * row + kind.row_bytes(cols.start)..(n + 1) * row]);
            assert_eq!(some, expected.collect::<Vec<_>>().concat(), "{name}: {}", matrix.parts[0].name);
            compared += usize::from(cols.start > 0);
        }
    }
    assert!(compared > 20, "{compared}");
}

#[test]
fn each_rank_has_a_packed_form_of_its_own() {
    let dir = std::env::temp_dir().join(format!("pagedllm-shard-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for rank in 0..2 {
        let mut files = ModelFiles::open(&golden("llama")).unwrap();
        files.spec = files.spec.shard(Shard { rank, ranks: 2 }).unwrap();
        for expected in [PackedForm::Saved, PackedForm::Read] {
            let backend = CpuBackend::new(1, None).unwrap();
            let limits = BatchLimits { tokens: 4, logits: 2 };
            let (_, report) = files.load_packed(&dir, backend, limits, &mut |_, _| true).unwrap();
            assert_eq!(report.form, expected, "{}", report.reason);
        }
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn more_ranks_than_tokens_or_experts_leave_some_ranks_without() {
    let spec = ModelFiles::open(&golden("mixtral")).unwrap().spec;
    let tokens: Vec<_> = (0..4).map(|rank| Shard { rank, ranks: 4 }.tokens(5)).collect();
    assert_eq!(tokens, [0..2, 2..4, 4..5, 5..5]);
    let mut small = ModelSpec { vocab_size: 2, ..spec };
    small.embedding.tokens = Linear::new("embed_tokens", 2, small.hidden_size);
    for layer in &mut small.layers {
        let Mlp::Experts(experts) = &mut layer.mlp else { panic!("experts") };
        experts.experts.truncate(3);
    }
    let shards = shards(&small, 4, 1);
    let local = |spec: &ModelSpec| match &spec.layers[0].mlp {
        Mlp::Experts(experts) => experts.local(),
        _ => panic!("experts"),
    };
    assert_eq!(shards.iter().map(|(_, spec)| local(spec)).collect::<Vec<_>>(), [0..1, 1..2, 2..3, 3..3]);
    assert_eq!(shards.iter().map(|(_, spec)| spec.embedding.tokens.rows()).collect::<Vec<_>>(), [1, 1, 0, 0]);
}
