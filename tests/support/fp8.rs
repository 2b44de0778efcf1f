//! Rounds weights to fp8 by a search among all its numbers.

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
    let mut inner = BTreeMap::new();
    let note = |linear: &Linear, role| {
        let all = linear.parts.iter().filter(|_| role == Role::Inner);
        inner.extend(all.map(|part| (part.weight(), linear.layout)));
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
            let values = inner.get(name).map_or(values.clone(), |layout| round_tensor(&values, tensor.shape(), *layout));
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            (name.to_string(), tensor.shape().to_vec(), bytes)
        })
        .collect();
    let view = |shape: &Vec<usize>, bytes| TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap();
    safetensors::serialize_to_file(rounded.iter().map(|(name, shape, bytes)| (name, view(shape, bytes))), None, &path).unwrap();
}

/// Rounds consecutive matrices. Their rows are outputs or inputs, depending on `layout`.
fn round_tensor(values: &[f32], shape: &[usize], layout: Layout) -> Vec<f32> {
    let [.., rows, cols] = *shape else { panic!("a matrix of shape {shape:?}") };
    match layout {
        Layout::InOut => values.chunks(rows * cols).flat_map(|matrix| transposed(&in_fp8(&transposed(matrix, cols), rows), rows)).collect(),
        Layout::OutIn => in_fp8(values, cols),
    }
}

/// Transposes a matrix with rows of `cols` elements.
fn transposed(matrix: &[f32], cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| matrix.chunks(cols).map(move |row| row[col])).collect()
}
