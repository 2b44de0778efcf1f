//! The routing of rows to experts, sorted by expert.

use std::ops::Range;

use super::SendPtr;
use super::pool::Pool;
use crate::backend::{ExpertGroups, GroupScore, Routing, Scores};
use crate::error::{Result, try_vec};

/// Rows per task.
const ROWS: usize = 16;

pub struct Routes {
    rows: usize,
    experts: usize,
    top_k: usize,
    choices: Vec<Choice>, // [rows, top_k], by descending score within a row
    sources: Vec<u32>,    // [routes], the row of each route
    starts: Vec<u32>,     // [experts + 1], the first route to each expert
    local: Range<usize>,  // the experts of this rank
}

#[derive(Clone, Copy, Default)]
struct Choice {
    expert: u32,
    /// The score that selected the expert.
    score: f32,
    weight: f32,
    /// Index among the routes.
    route: u32,
}

impl Routes {
    pub fn new(rows: usize, max: Routing) -> Result<Routes> {
        let routes = rows * max.top_k;
        Ok(Routes {
            rows: 0,
            experts: max.experts,
            top_k: max.top_k,
            choices: try_vec(routes, Choice::default())?,
            sources: try_vec(routes, 0)?,
            starts: try_vec(max.experts + 1, 0)?,
            local: 0..0,
        })
    }

    pub fn bytes(rows: usize, max: Routing) -> u64 {
        let routes = rows * max.top_k;
        (routes * (size_of::<Choice>() + size_of::<u32>()) + (max.experts + 1) * size_of::<u32>()) as u64
    }

    /// Chooses experts and weights for all rows. `logits` is `[rows, experts]`, `correction` is
    /// `[experts]`. All experts are local.
    pub fn choose(&mut self, pool: &Pool, rows: usize, routing: Routing, correction: Option<&[f32]>, logits: &[f32]) {
        let Routing { experts, top_k, .. } = routing;
        (self.rows, self.experts, self.top_k, self.local) = (rows, experts, top_k, 0..experts);
        let choices = SendPtr(self.choices[..rows * top_k].as_mut_ptr());
        pool.run(rows.div_ceil(ROWS), &|task, _| {
            for row in task * ROWS..rows.min((task + 1) * ROWS) {
                // SAFETY: rows are disjoint and inside `choices`.
                let choices = unsafe { std::slice::from_raw_parts_mut(choices.get().add(row * top_k), top_k) };
                let row = Row { routing, correction, logits: &logits[row * experts..][..experts] };
                row.choose(choices);
                row.weigh(choices);
            }
        });
        self.starts[..=experts].fill(0);
        self.choices[..rows * top_k].iter().for_each(|choice| self.starts[choice.expert as usize + 1] += 1);
        (0..experts).for_each(|expert| self.starts[expert + 1] += self.starts[expert]);
        self.line_up();
    }

    /// Assigns a route to each choice, ordered by expert and then by row: a counting sort. `starts`
    /// serves as the write positions and is restored at the end.
    fn line_up(&mut self) {
        for (i, choice) in self.choices[..self.rows * self.top_k].iter_mut().enumerate() {
            let next = &mut self.starts[choice.expert as usize];
            choice.route = *next;
            self.sources[*next as usize] = (i / self.top_k) as u32;
            *next += 1;
        }
        self.starts[..=self.experts].rotate_right(1);
        self.starts[0] = 0;
    }

    /// Ignores routes to other experts than these.
    pub fn limit_to(&mut self, local: Range<usize>) {
        self.local = local;
    }

    /// Returns the routes to an expert.
    pub fn to(&self, expert: usize) -> Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }

    /// Returns the experts of this rank.
    pub fn local(&self) -> Range<usize> {
        self.local.clone()
    }

    /// Returns the routes to the experts of this rank, which are adjacent.
    pub fn local_routes(&self) -> Range<usize> {
        self.starts[self.local.start] as usize..self.starts[self.local.end] as usize
    }

    /// Returns the row of each route.
    pub fn sources(&self) -> &[u32] {
        &self.sources[..self.rows * self.top_k]
    }

    /// Returns the routes of a row to the experts of this rank with their weights, by descending
    /// score.
    pub fn for_row(&self, row: usize) -> impl Iterator<Item = (usize, f32)> {
        let choices = self.choices[row * self.top_k..][..self.top_k].iter();
        let local = choices.filter(|choice| self.local.contains(&(choice.expert as usize)));
        local.map(|choice| (choice.route as usize, choice.weight))
    }

    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// The routing input of one row.
struct Row<'a> {
    routing: Routing,
    correction: Option<&'a [f32]>, // [experts]
    logits: &'a [f32],             // [experts]
}

impl Row<'_> {
    /// Returns the score that selects an expert. Softmax is monotonic, so the logit suffices.
    fn score(&self, expert: usize) -> f32 {
        match self.routing.scores {
            Scores::Softmax => self.logits[expert],
            Scores::Sigmoid => sigmoid(self.logits[expert]) + self.correction.map_or(0.0, |correction| correction[expert]),
        }
    }

    /// Chooses the experts with the highest scores, in descending order; among equals, the lower
    /// index wins.
    fn choose(&self, choices: &mut [Choice]) {
        let groups = self.routing.groups.map(|groups| (self.routing.experts / groups.count, self.choose_groups(groups)));
        // The score of experts in groups that were not chosen.
        let nothing = if self.routing.scores == Scores::Softmax { f32::NEG_INFINITY } else { 0.0 };
        let mut count = 0;
        for expert in 0..self.logits.len() {
            let score = match groups {
                Some((size, chosen)) if chosen >> (expert / size) & 1 == 0 => nothing,
                _ => self.score(expert),
            };
            let worse = |choice: &Choice| score.total_cmp(&choice.score).is_gt();
            let Some(place) = choices[..count].iter().position(worse).or((count < choices.len()).then_some(count)) else { continue };
            count = choices.len().min(count + 1);
            choices[place..count].rotate_right(1);
            choices[place] = Choice { expert: expert as u32, score, ..Choice::default() };
        }
    }

    /// Returns the chosen groups as a bit mask.
    fn choose_groups(&self, ExpertGroups { count, chosen, score: of_group }: ExpertGroups) -> u64 {
        let size = self.routing.experts / count;
        let mut scores = [0.0; ExpertGroups::MAX_COUNT];
        for (group, score) in scores[..count].iter_mut().enumerate() {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for expert in group * size..(group + 1) * size {
                let next = self.score(expert);
                second = second.max(next.min(first));
                first = first.max(next);
            }
            *score = match of_group {
                GroupScore::Best => first,
                GroupScore::BestTwo => first + second,
            };
        }
        let mut bits = 0;
        for _ in 0..chosen {
            let mut group = None;
            for other in (0..count).filter(|other| bits >> other & 1 == 0) {
                if group.is_none_or(|group: usize| scores[other].total_cmp(&scores[group]).is_gt()) {
                    group = Some(other);
                }
            }
            bits |= group.map_or(0, |group| 1 << group);
        }
        bits
    }

    fn weigh(&self, choices: &mut [Choice]) {
        let Routing { scores, normalized, scale, .. } = self.routing;
        let max = choices.iter().map(|choice| self.logits[choice.expert as usize]).fold(f32::NEG_INFINITY, f32::max);
        let weight = |expert: usize| match scores {
            Scores::Softmax => libm::expf(self.logits[expert] - max),
            Scores::Sigmoid => sigmoid(self.logits[expert]),
        };
        choices.iter_mut().for_each(|choice| choice.weight = weight(choice.expert as usize));
        let sum: f32 = match (scores, normalized) {
            (Scores::Softmax, false) => (0..self.logits.len()).map(weight).sum(),
            (Scores::Sigmoid, false) => 1.0,
            (Scores::Softmax, true) => choices.iter().map(|choice| choice.weight).sum(),
            // The epsilon avoids a division by zero if all weights are 0.
            (Scores::Sigmoid, true) => choices.iter().map(|choice| choice.weight).sum::<f32>() + 1e-20,
        };
        choices.iter_mut().for_each(|choice| choice.weight = choice.weight / sum * scale);
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(rows: usize, routing: Routing, logits: &[f32]) -> Routes {
        // Routes with more capacity than needed, and with data of an earlier call.
        let mut routes = Routes::new(rows + 3, Routing { experts: routing.experts + 2, top_k: routing.top_k + 1, ..routing }).unwrap();
        let pool = Pool::new(2).unwrap();
        let more = Routing { experts: routing.experts + 2, groups: None, ..routing };
        routes.choose(&pool, rows + 1, more, None, &vec![1.0; (rows + 1) * (routing.experts + 2)]);
        routes.choose(&pool, rows, routing, None, logits);
        routes
    }

    #[test]
    fn rows_are_routed_to_their_best_experts_and_grouped_by_expert() {
        let logits = [0.0, 3.0, 1.0, 5.0, 2.0, 2.0, 0.0, 9.0, 1.0];
        let routes = routes(3, Routing::softmax(3, 2, false), &logits);
        let to: Vec<Vec<u32>> = (0..3).map(|expert| routes.to(expert).map(|route| routes.sources()[route]).collect()).collect();
        // Row 1 has two equal logits: the lower index comes first.
        assert_eq!(to, [vec![1], vec![0, 1, 2], vec![0, 2]]);
        let experts: Vec<Vec<usize>> = (0..3)
            .map(|row| {
                routes.for_row(row).map(|(route, _)| (0..3).position(|expert| routes.to(expert).contains(&route)).unwrap()).collect()
            })
            .collect();
        assert_eq!(experts, [vec![1, 2], vec![0, 1], vec![1, 2]]);
    }

    #[test]
    fn weights_are_the_softmax_over_all_experts_or_the_selected_ones() {
        let logits = [0.5f32, -1.0, 2.0, 1.0];
        let sum = |experts: &[usize]| experts.iter().map(|&e| (logits[e] as f64).exp()).sum::<f64>();
        for (normalized, over) in [(false, &[0, 1, 2, 3][..]), (true, &[2, 3])] {
            let routes = routes(1, Routing::softmax(4, 2, normalized), &logits);
            let weights: Vec<f64> = routes.for_row(0).map(|(_, weight)| weight as f64).collect();
            for (weight, expert) in weights.iter().zip([2, 3]) {
                assert!((weight - (logits[expert] as f64).exp() / sum(over)).abs() < 1e-6, "{weights:?}");
            }
        }
    }

    /// The routing of DeepSeek V3 at small scale: the best two scores rank a group, corrected
    /// scores select experts, uncorrected scores are their weights.
    #[test]
    fn groups_are_selected_first_and_corrections_do_not_change_weights() {
        let groups = Some(ExpertGroups { count: 3, chosen: 2, score: GroupScore::BestTwo });
        let routing = Routing { scores: Scores::Sigmoid, scale: 2.5, groups, ..Routing::softmax(6, 2, true) };
        // The best expert has a neighbour with a very low score, so their group ranks last.
        let logits = [3.0, -9.0, 1.0, 0.5, 0.0, 0.2];
        let pool = Pool::new(1).unwrap();
        let mut routes = Routes::new(1, routing).unwrap();
        let mut chosen = |correction: &[f32]| -> Vec<(usize, f32)> {
            routes.choose(&pool, 1, routing, Some(correction), &logits);
            routes.for_row(0).map(|(route, weight)| ((0..6).find(|&expert| routes.to(expert).contains(&route)).unwrap(), weight)).collect()
        };
        let weights =
            |experts: [usize; 2]| experts.map(|e| 2.5 * sigmoid(logits[e]) / (sigmoid(logits[experts[0]]) + sigmoid(logits[experts[1]])));
        let near = |found: &[(usize, f32)], experts: [usize; 2]| {
            assert_eq!(found.iter().map(|choice| choice.0).collect::<Vec<_>>(), experts);
            assert!(found.iter().zip(weights(experts)).all(|(choice, weight)| (choice.1 - weight).abs() < 1e-6), "{found:?}");
        };
        near(&chosen(&[0.0; 6]), [2, 3]);
        near(&chosen(&[0.0, 0.0, 0.0, 0.0, 1.0, 0.0]), [4, 2]);
        near(&chosen(&[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]), [1, 0]);
    }

    #[test]
    fn routes_to_experts_of_other_ranks_are_ignored() {
        let logits = [0.0, 3.0, 1.0, 5.0, 2.0, 2.0, 0.0, 9.0, 1.0];
        let whole = routes(3, Routing::softmax(3, 2, false), &logits);
        let of_row = |routes: &Routes, row| routes.for_row(row).collect::<Vec<_>>();
        for local in [0..2, 2..3, 1..1, 0..3] {
            let mut routes = routes(3, Routing::softmax(3, 2, false), &logits);
            routes.limit_to(local.clone());
            let before = |expert| (0..expert).map(|expert| whole.to(expert).len()).sum();
            assert_eq!(routes.local_routes(), before(local.start)..before(local.end));
            for row in 0..3 {
                let mut expected = of_row(&whole, row);
                expected.retain(|(route, _)| routes.local_routes().contains(route));
                assert_eq!(of_row(&routes, row), expected);
            }
        }
    }

    #[test]
    fn logits_with_nan_still_select_valid_experts() {
        let routes = routes(1, Routing::softmax(3, 2, true), &[f32::NAN; 3]);
        assert!(routes.for_row(0).all(|(route, weight)| route < 2 && weight.is_nan()));
    }
}
