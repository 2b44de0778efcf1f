//! The leaves of a spec: where the checkpoint has the tensors of matrices, vectors and norms.

use crate::backend::NormKind;

/// The location of a matrix of `[rows of all parts, cols]` and its bias in the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    /// Stacked along the rows.
    pub parts: Vec<TensorPart>,
    pub cols: usize,
    pub bias: bool,
    pub layout: Layout,
    pub order: RowOrder,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TensorPart {
    pub name: String,
    pub rows: usize,
    pub source: Source,
}

/// The tensors of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// `{name}.weight` and `{name}.bias`, which belong to this part only.
    Own,
    /// `{name}` and `{name}_bias`, which hold all experts one after the other.
    Expert { index: usize, count: usize },
    /// `{name}.weight`, rows from `first` on, of `of` rows in the file.
    Rows { first: usize, of: usize },
}

/// The layout of a part in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `[out, in]`, like Linear in PyTorch.
    OutIn,
    /// `[in, out]`, like Conv1D in GPT-2.
    InOut,
}

/// The order of a part's rows in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// The order of the loaded matrix.
    Same,
    /// For each KV head: its queries, key and value. Loaded order: all queries, all keys, all
    /// values.
    ByKvHead { queries: usize, head_dim: usize },
    /// Rows of the first and of the second half alternate.
    Alternating,
    /// For each head: unrotated and rotated rows. Loaded order: unrotated rows of all heads,
    /// rotated rows of all heads.
    ByHead { unrotated: usize, rotated: usize },
}

/// Rows of a part that are consecutive in the loaded matrix. In the file, they begin at `first` and
/// are `step` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first: usize,
    pub rows: usize,
    pub step: usize,
}

impl RowOrder {
    /// Returns the max_len run in the file that begins at loaded row `row` of a part with `rows`
    /// rows.
    pub fn run_at(self, rows: usize, row: usize) -> Run {
        let run = |(first, rows)| Run { first, rows, step: 1 };
        let half = rows / 2;
        match self {
            RowOrder::Same => run((row, rows - row)),
            RowOrder::Alternating => Run { first: row % half * 2 + row / half, rows: half - row % half, step: 2 },
            RowOrder::ByHead { unrotated, rotated } => {
                let dim = unrotated + rotated;
                run(match row.checked_sub(rows / dim * unrotated) {
                    None => (row / unrotated * dim + row % unrotated, unrotated - row % unrotated),
                    Some(row) => (row / rotated * dim + unrotated + row % rotated, rotated - row % rotated),
                })
            }
            RowOrder::ByKvHead { queries, head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let kv_heads = rows / head_dim / (queries + 2);
                let (group, member) = match head.checked_sub(queries * kv_heads) {
                    None => (head / queries, head % queries),
                    Some(after) => (after % kv_heads, queries + after / kv_heads),
                };
                run(((group * (queries + 2) + member) * head_dim + within, head_dim - within))
            }
        }
    }
}

impl TensorPart {
    pub fn own(name: impl Into<String>, rows: usize) -> TensorPart {
        TensorPart { name: name.into(), rows, source: Source::Own }
    }

    pub fn weight(&self) -> String {
        match self.source {
            Source::Own | Source::Rows { .. } => format!("{}.weight", self.name),
            Source::Expert { .. } => self.name.clone(),
        }
    }

    pub fn bias(&self) -> String {
        match self.source {
            Source::Own | Source::Rows { .. } => format!("{}.bias", self.name),
            Source::Expert { .. } => format!("{}_bias", self.name),
        }
    }

    /// Returns the shape of the whole tensor. `shape` is that of the part.
    pub fn tensor_shape(&self, shape: &[usize]) -> Vec<usize> {
        match self.source {
            Source::Own => shape.to_vec(),
            Source::Expert { count, .. } => [&[count], shape].concat(),
            Source::Rows { of, .. } => [&[of], &shape[1..]].concat(),
        }
    }

    /// Returns the number of elements of the tensor before the part.
    pub fn offset(&self, shape: &[usize]) -> usize {
        match self.source {
            Source::Own => 0,
            Source::Expert { index, .. } => index * shape.iter().product::<usize>(),
            Source::Rows { first, .. } => first * shape[1..].iter().product::<usize>(),
        }
    }
}

impl Linear {
    pub fn new(name: impl Into<String>, rows: usize, cols: usize) -> Linear {
        Linear::stack(vec![TensorPart::own(name, rows)], cols)
    }

    pub fn stack(parts: Vec<TensorPart>, cols: usize) -> Linear {
        Linear { parts, cols, bias: false, layout: Layout::OutIn, order: RowOrder::Same }
    }

    pub fn bias(self, bias: bool) -> Linear {
        Linear { bias, ..self }
    }

    pub fn layout(self, layout: Layout) -> Linear {
        Linear { layout, ..self }
    }

    pub fn order(self, order: RowOrder) -> Linear {
        Linear { order, ..self }
    }

    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Returns the shape of a part in its file.
    pub fn stored_shape(&self, part: &TensorPart) -> [usize; 2] {
        if self.layout == Layout::InOut { [self.cols, part.rows] } else { [part.rows, self.cols] }
    }
}

/// A one-dimensional tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Vector {
    pub name: String,
    pub len: usize,
}

/// The weight and bias of a norm.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// Names of the tensors without ".weight", which are concatenated.
    pub parts: Vec<String>,
    /// Shape of each part.
    pub shape: Vec<usize>,
    pub kind: NormKind,
    pub eps: f32,
    pub bias: bool,
}

impl Norm {
    pub fn new(name: impl Into<String>, width: usize, kind: NormKind, eps: f32) -> Norm {
        Norm { parts: vec![name.into()], shape: vec![width], kind, eps, bias: false }
    }

    pub fn bias(self, bias: bool) -> Norm {
        Norm { bias, ..self }
    }

    pub fn width(&self) -> usize {
        self.parts.len() * self.shape.iter().product::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the file position of each row, and checks that runs are consistent with it.
    fn places(order: RowOrder, rows: usize) -> Vec<usize> {
        let first = |row| order.run_at(rows, row).first;
        for row in 0..rows {
            let run = order.run_at(rows, row);
            assert!(run.rows > 0 && row + run.rows <= rows);
            (0..run.rows).for_each(|next| assert_eq!(first(row + next), run.first + next * run.step, "{order:?}, row {row}"));
        }
        (0..rows).map(first).collect()
    }

    #[test]
    fn row_orders_give_the_file_position_of_each_row() {
        assert_eq!(places(RowOrder::Same, 3), [0, 1, 2]);
        assert_eq!(places(RowOrder::Alternating, 6), [0, 2, 4, 1, 3, 5]);
        // Two heads of 3 dimensions, the last of which is rotated.
        assert_eq!(places(RowOrder::ByHead { unrotated: 2, rotated: 1 }, 6), [0, 1, 3, 4, 2, 5]);
        // Two KV heads of one dimension: q0 q1 k0 v0 q2 q3 k1 v1.
        assert_eq!(places(RowOrder::ByKvHead { queries: 2, head_dim: 1 }, 8), [0, 1, 4, 5, 2, 6, 3, 7]);
        let wide = places(RowOrder::ByKvHead { queries: 2, head_dim: 3 }, 24);
        assert_eq!(wide[6..12], [12, 13, 14, 15, 16, 17]);
    }
}
