//! The division of an engine among workers.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// How many workers share the work. Their number is the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Division {
    /// Workers that divide each layer (tensor parallelism).
    pub tensor: usize,
    /// Groups of workers that divide the layers (pipeline parallelism).
    pub pipeline: usize,
}

impl Default for Division {
    fn default() -> Division {
        Division { tensor: 1, pipeline: 1 }
    }
}

impl Division {
    /// Returns the number of workers.
    pub fn workers(self) -> usize {
        self.tensor.saturating_mul(self.pipeline)
    }

    /// Returns the place of the worker with this rank. The workers of a stage have consecutive
    /// ranks.
    pub fn place(self, rank: usize) -> WorkerPlace {
        WorkerPlace { division: self, tensor_rank: rank % self.tensor, stage: rank / self.tensor }
    }
}

/// The place of a worker in the division.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkerPlace {
    /// The whole division.
    pub division: Division,
    /// Number of the worker among those that divide its layers.
    pub tensor_rank: usize,
    /// Number of the group of layers.
    pub stage: usize,
}

impl WorkerPlace {
    /// Returns the rank among all workers.
    pub fn rank(self) -> usize {
        self.stage * self.division.tensor + self.tensor_rank
    }

    /// Returns the rank among all workers of the one with this tensor rank in the same stage.
    pub fn rank_in_stage(self, tensor_rank: usize) -> usize {
        WorkerPlace { tensor_rank, ..self }.rank()
    }

    /// Returns whether this is the only worker.
    pub fn is_alone(self) -> bool {
        self.division.workers() == 1
    }

    /// Returns whether the worker has the first layers.
    pub fn is_first_stage(self) -> bool {
        self.stage == 0
    }

    /// Returns whether the worker has the last layers.
    pub fn is_last_stage(self) -> bool {
        self.stage + 1 == self.division.pipeline
    }

    /// Returns the rank from which the residual stream comes. Not for the first stage.
    pub fn previous(self) -> usize {
        self.rank() - self.division.tensor
    }

    /// Returns the rank to which the residual stream goes. Not for the last stage.
    pub fn next(self) -> usize {
        self.rank() + self.division.tensor
    }

    /// Returns the ranks that compute logits, each with its tokens of a vocabulary of `vocab`
    /// tokens.
    pub fn heads(self, vocab: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let tensor = self.division.tensor;
        let first = (self.division.pipeline - 1) * tensor;
        (0..tensor).map(move |rank| (first + rank, part_of(vocab, rank, tensor)))
    }
}

/// Returns part `rank` of `count` things that are divided among `ranks`. The last parts may be
/// smaller.
pub fn part_of(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let each = count.div_ceil(ranks);
    (rank * each).min(count)..((rank + 1) * each).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_of_a_stage_have_consecutive_ranks() {
        let division = Division { tensor: 2, pipeline: 3 };
        assert_eq!(division.workers(), 6);
        for rank in 0..6 {
            assert_eq!(division.place(rank).rank(), rank);
        }
        let place = division.place(3);
        assert_eq!((place.stage, place.tensor_rank, place.previous(), place.next()), (1, 1, 1, 5));
        assert_eq!([0, 1].map(|rank| place.rank_in_stage(rank)), [2, 3]);
        assert!(
            !place.is_first_stage() && !place.is_last_stage() && division.place(1).is_first_stage() && division.place(4).is_last_stage()
        );
        assert_eq!(place.heads(7).collect::<Vec<_>>(), [(4, 0..4), (5, 4..7)]);
    }

    #[test]
    fn parts_are_disjoint_and_complete() {
        for count in 0..20 {
            for ranks in 1..9 {
                let parts: Vec<usize> = (0..ranks).flat_map(|rank| part_of(count, rank, ranks)).collect();
                assert_eq!(parts, (0..count).collect::<Vec<_>>(), "{count} among {ranks}");
            }
        }
    }
}
