//! Rounds the weights of models: to fp8 by a search among all its numbers, or by a function.

use std::collections::BTreeMap;
use std::path::Path;

use pagedllm::model::spec::{Layout, Linear, Role};
use pagedllm::model::{Config, family};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// Rounds each row to the nearest fp8 numbers, with a scale that maps its greatest magnitude to
/// 448. Ties round to the number with an even byte.
pub fn in_fp8(values: &[f32], cols: usize) -> Vec<f32> {
    let size = |byte: i32| if byte < 8 { byte as f32 } else { (8 + byte % 8) as f32 * 2f32.powi(byte / 8 - 1) } / 512.0;
    let sizes: Vec<f32> = (0..127).map(size).collect();
    let nearest = |x: f32| {
        let above = sizes.partition_point(|size| *size < x.abs()).min(126);
        let below = above.saturating_sub(1);
        let (up, down) = (sizes[above] - x.abs(), x.abs() - sizes[below]);
        let size = if up < down || up == down && above % 2 == 0 { sizes[above] } else { sizes[below] };
        size.copysign(x)
    };
    let row = |row: &[f32]| -> Vec<f32> {
        let max = row.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let (scale, inverse) = if max == 0.0 { (0.0, 0.0) } else { (max / 448.0, 448.0 / max) };
        row.iter().map(|x| nearest(x * inverse) * scale).collect()
    };
    values.chunks(cols).flat_map(row).collect()
}

/// Rounds the matrices in the layers of an f32 model to fp8.
pub fn round_model(dir: &Path) {
    round_model_by(dir, &|role, values, cols| match role {
        Role::Inner => in_fp8(values, cols),
        Role::Vocabulary | Role::Exact => values.to_vec(),
    });
}

/// Rounds rows of outputs with this number of columns.
type RoundRole<'a> = &'a dyn Fn(Role, &[f32], usize) -> Vec<f32>;
type RoundRows<'a> = &'a dyn Fn(&[f32], usize) -> Vec<f32>;

/// Rounds the matrices of an f32 model.
pub fn round_model_by(dir: &Path, round: RoundRole) {
    let mut all = BTreeMap::new();
    let note = |linear: &Linear, role| {
        all.extend(linear.parts.iter().map(|part| (part.weight(), (role, linear.layout))));
        Ok::<(), ()>(())
    };
    let config = Config::load(dir, "config.json").unwrap();
    (family(&config).unwrap().spec)(&config).unwrap().try_map(note, |_| Ok(()), |_| Ok(())).unwrap();
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let rounded: Vec<_> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, tensor)| {
            let values: Vec<f32> = tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let rounded = all.get(name).map(|&(role, layout)| {
                let round = |values: &[f32], cols: usize| round(role, values, cols);
                round_tensor(&values, tensor.shape(), layout, &round)
            });
            let values = rounded.unwrap_or(values);
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            (name.to_string(), tensor.shape().to_vec(), bytes)
        })
        .collect();
    let view = |shape: &Vec<usize>, bytes| TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap();
    safetensors::serialize_to_file(rounded.iter().map(|(name, shape, bytes)| (name, view(shape, bytes))), None, &path).unwrap();
}

/// Rounds consecutive matrices. Their rows are outputs or inputs, depending on `layout`.
fn round_tensor(values: &[f32], shape: &[usize], layout: Layout, round: RoundRows) -> Vec<f32> {
    let [.., rows, cols] = *shape else { panic!("a matrix of shape {shape:?}") };
    match layout {
        Layout::InOut => values.chunks(rows * cols).flat_map(|matrix| transposed(&round(&transposed(matrix, cols), rows), rows)).collect(),
        Layout::OutIn => round(values, cols),
    }
}

/// Transposes a matrix with rows of `cols` elements.
fn transposed(matrix: &[f32], cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| matrix.chunks(cols).map(move |row| row[col])).collect()
}
