//! The leaves of a spec: where the checkpoint has the tensors of matrices, vectors and norms.

use std::ops::Range;

use crate::backend::NormKind;
use crate::types::debug::debug_without_none;

/// The location of a matrix of `[rows of all parts, cols]` and its bias in the checkpoint, or of a
/// shard of the matrix.
#[derive(Clone, PartialEq)]
pub struct Linear {
    /// Stacked along the rows.
    pub parts: Vec<TensorPart>,
    /// Columns of the shard.
    pub cols: usize,
    pub bias: bool,
    pub layout: Layout,
    pub order: RowOrder,
    /// The place of the shard in the stored matrix. None: it is the whole matrix.
    pub shard: Option<LinearShard>,
}

debug_without_none!(Linear { parts, cols, bias, layout, order; shard });

/// The place of a shard in a stored matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearShard {
    /// The rows of the shard, as rows of all parts in loaded order.
    pub rows: Vec<Range<usize>>,
    pub first_col: usize,
    /// Columns of the stored matrix.
    pub stored_cols: usize,
}

/// Consecutive rows of one part, in loaded order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartRows {
    /// Index of the part.
    pub part: usize,
    /// The first row within the part.
    pub first: usize,
    pub rows: usize,
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
        Linear { parts, cols, bias: false, layout: Layout::OutIn, order: RowOrder::Same, shard: None }
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

    /// Returns the rows of the shard.
    pub fn rows(&self) -> usize {
        self.row_ranges().iter().map(Range::len).sum()
    }

    /// Returns the rows of the shard, as rows of all parts in loaded order.
    pub fn row_ranges(&self) -> Vec<Range<usize>> {
        match &self.shard {
            Some(shard) => shard.rows.clone(),
            None => std::iter::once(0..self.parts.iter().map(|part| part.rows).sum()).collect(),
        }
    }

    /// Returns the columns of the shard in the stored matrix.
    pub fn col_range(&self) -> Range<usize> {
        let first = self.shard.as_ref().map_or(0, |shard| shard.first_col);
        first..first + self.cols
    }

    /// Returns the columns of the stored matrix.
    pub fn stored_cols(&self) -> usize {
        self.shard.as_ref().map_or(self.cols, |shard| shard.stored_cols)
    }

    /// Returns the rows of the shard as rows of its parts.
    pub fn part_rows(&self) -> Vec<PartRows> {
        let mut found = Vec::new();
        for range in self.row_ranges() {
            let mut start = 0;
            for (part, TensorPart { rows, .. }) in self.parts.iter().enumerate() {
                let within = range.start.clamp(start, start + rows)..range.end.clamp(start, start + rows);
                if !within.is_empty() {
                    found.push(PartRows { part, first: within.start - start, rows: within.len() });
                }
                start += rows;
            }
        }
        found
    }

    /// Returns the shard with these rows of this one, in this order.
    pub fn with_rows(self, rows: &[Range<usize>]) -> Linear {
        let selected = select(&self.row_ranges(), rows);
        let shard = LinearShard { rows: selected, first_col: self.col_range().start, stored_cols: self.stored_cols() };
        Linear { shard: Some(shard), ..self }
    }

    /// Returns the shard with these columns of this one.
    pub fn with_cols(self, cols: Range<usize>) -> Linear {
        let first_col = self.col_range().start + cols.start;
        let shard = LinearShard { rows: self.row_ranges(), first_col, stored_cols: self.stored_cols() };
        Linear { shard: Some(shard), cols: cols.len(), ..self }
    }

    /// Returns the shape of a part in its file.
    pub fn stored_shape(&self, part: &TensorPart) -> [usize; 2] {
        let cols = self.stored_cols();
        if self.layout == Layout::InOut { [cols, part.rows] } else { [part.rows, cols] }
    }
}

/// Returns the elements at `wanted` positions of a list that consists of these ranges, as ranges.
fn select(ranges: &[Range<usize>], wanted: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut selected = Vec::new();
    for wanted in wanted {
        let mut start = 0;
        for range in ranges {
            let end = start + range.len();
            let within = wanted.start.clamp(start, end)..wanted.end.clamp(start, end);
            if !within.is_empty() {
                selected.push(range.start + within.start - start..range.start + within.end - start);
            }
            start = end;
        }
    }
    selected
}

/// A one-dimensional tensor, or a shard of it.
#[derive(Clone, PartialEq)]
pub struct Vector {
    pub name: String,
    /// Elements of the tensor.
    pub len: usize,
    /// The elements of the shard. None: all of them.
    pub shard: Option<Vec<Range<usize>>>,
}

debug_without_none!(Vector { name, len; shard });

impl Vector {
    pub fn new(name: impl Into<String>, len: usize) -> Vector {
        Vector { name: name.into(), len, shard: None }
    }

    /// Returns the elements of the shard.
    pub fn width(&self) -> usize {
        self.shard.as_ref().map_or(self.len, |shard| shard.iter().map(Range::len).sum())
    }
}

/// The weight and bias of a norm, or a shard of them.
#[derive(Clone, PartialEq)]
pub struct Norm {
    /// Names of the tensors without ".weight", which are concatenated.
    pub parts: Vec<String>,
    /// Shape of each part.
    pub shape: Vec<usize>,
    pub kind: NormKind,
    pub eps: f32,
    pub bias: bool,
    /// The elements of the shard, among those of all parts. A range may occur several times. None:
    /// all elements, once.
    pub shard: Option<Vec<Range<usize>>>,
}

debug_without_none!(Norm { parts, shape, kind, eps, bias; shard });

impl Norm {
    pub fn new(name: impl Into<String>, width: usize, kind: NormKind, eps: f32) -> Norm {
        Norm { parts: vec![name.into()], shape: vec![width], kind, eps, bias: false, shard: None }
    }

    pub fn bias(self, bias: bool) -> Norm {
        Norm { bias, ..self }
    }

    /// Returns the elements of all parts.
    pub fn stored_width(&self) -> usize {
        self.parts.len() * self.shape.iter().product::<usize>()
    }

    /// Returns the elements of the shard.
    pub fn width(&self) -> usize {
        self.shard.as_ref().map_or_else(|| self.stored_width(), |shard| shard.iter().map(Range::len).sum())
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

    #[test]
    fn shards_of_shards_have_rows_and_columns_of_the_stored_matrix() {
        let parts = [("q", 6), ("k", 2), ("v", 2)].map(|(name, rows)| TensorPart::own(name, rows)).to_vec();
        let whole = Linear::stack(parts, 12);
        assert_eq!((whole.rows(), whole.col_range(), whole.stored_cols()), (10, 0..12, 12));
        let rows_of = |part, first, rows| PartRows { part, first, rows };
        assert_eq!(whole.part_rows(), [rows_of(0, 0, 6), rows_of(1, 0, 2), rows_of(2, 0, 2)]);

        let shard = whole.clone().with_rows(&[2..4, 7..8, 9..10]).with_cols(4..10);
        assert_eq!((shard.rows(), shard.cols, shard.col_range(), shard.stored_cols()), (4, 6, 4..10, 12));
        assert_eq!(shard.part_rows(), [rows_of(0, 2, 2), rows_of(1, 1, 1), rows_of(2, 1, 1)]);
        assert_eq!(shard.stored_shape(&shard.parts[0]), [6, 12]);

        let inner = shard.with_rows(&[3..4, 1..3]).with_cols(1..3);
        assert_eq!((inner.row_ranges(), inner.col_range(), inner.stored_cols()), (vec![9..10, 3..4, 7..8], 5..7, 12));
        let none = inner.with_rows(&[]);
        assert_eq!((none.rows(), none.part_rows()), (0, vec![]));
        assert_eq!(whole.with_rows(&[5..8, 0..1]).part_rows(), [rows_of(0, 5, 1), rows_of(1, 0, 2), rows_of(0, 0, 1)]);
    }
}
