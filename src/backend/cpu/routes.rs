//! Rows on their way to experts: who goes where, in the order in which the experts work.

use super::SendPtr;
use super::pool::Pool;
use crate::backend::Routing;
use crate::error::{Result, try_vec};

/// That one task chooses for.
const ROWS: usize = 16;

pub struct Routes {
    rows: usize,
    experts: usize,
    top_k: usize,
    choices: Vec<Choice>, // [rows, top_k], the heaviest of a row first
    sources: Vec<u32>,    // [routes], the row of each
    starts: Vec<u32>,     // [experts + 1], the first route to each expert
}

#[derive(Clone, Copy, Default)]
struct Choice {
    expert: u32,
    weight: f32,
    /// Its place among the routes.
    route: u32,
}

impl Routes {
    pub fn new(rows: usize, most: Routing) -> Result<Routes> {
        let routes = rows * most.top_k;
        Ok(Routes {
            rows: 0,
            experts: most.experts,
            top_k: most.top_k,
            choices: try_vec(routes, Choice::default())?,
            sources: try_vec(routes, 0)?,
            starts: try_vec(most.experts + 1, 0)?,
        })
    }

    pub fn bytes(rows: usize, most: Routing) -> u64 {
        let routes = rows * most.top_k;
        (routes * (size_of::<Choice>() + size_of::<u32>()) + (most.experts + 1) * size_of::<u32>()) as u64
    }

    /// `logits` is `[rows, experts]`.
    pub fn choose(&mut self, pool: &Pool, rows: usize, routing: Routing, logits: &[f32]) {
        let Routing { experts, top_k, normalized } = routing;
        (self.rows, self.experts, self.top_k) = (rows, experts, top_k);
        let choices = SendPtr(self.choices[..rows * top_k].as_mut_ptr());
        pool.run(rows.div_ceil(ROWS), &|task, _| {
            for row in task * ROWS..rows.min((task + 1) * ROWS) {
                // SAFETY: rows are disjoint and inside `choices`.
                let choices = unsafe { std::slice::from_raw_parts_mut(choices.get().add(row * top_k), top_k) };
                let logits = &logits[row * experts..][..experts];
                choose_best(logits, choices);
                weigh(logits, normalized, choices);
            }
        });
        self.starts[..=experts].fill(0);
        self.choices[..rows * top_k].iter().for_each(|choice| self.starts[choice.expert as usize + 1] += 1);
        (0..experts).for_each(|expert| self.starts[expert + 1] += self.starts[expert]);
        self.line_up();
    }

    /// Gives each choice its place: by expert, then by row. `starts` moves on by what was placed, and back.
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

    /// The routes to an expert.
    pub fn to(&self, expert: usize) -> std::ops::Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }

    pub fn experts(&self) -> usize {
        self.experts
    }

    /// The row of each route.
    pub fn sources(&self) -> &[u32] {
        &self.sources[..self.rows * self.top_k]
    }

    /// The routes of a row with their weights, the heaviest first.
    pub fn of(&self, row: usize) -> impl Iterator<Item = (usize, f32)> {
        self.choices[row * self.top_k..][..self.top_k].iter().map(|choice| (choice.route as usize, choice.weight))
    }

    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// The largest logits, the largest first; among equals the first.
fn choose_best(logits: &[f32], choices: &mut [Choice]) {
    let mut count = 0;
    for (expert, logit) in logits.iter().enumerate() {
        let worse = |choice: &Choice| logit.total_cmp(&logits[choice.expert as usize]).is_gt();
        let Some(place) = choices[..count].iter().position(worse).or((count < choices.len()).then_some(count)) else { continue };
        count = choices.len().min(count + 1);
        choices[place..count].rotate_right(1);
        choices[place] = Choice { expert: expert as u32, ..Choice::default() };
    }
}

/// The softmax over all experts; where it is normalized, over the chosen ones.
fn weigh(logits: &[f32], normalized: bool, choices: &mut [Choice]) {
    let most = logits[choices[0].expert as usize];
    let weight = |expert: usize| libm::expf(logits[expert] - most);
    choices.iter_mut().for_each(|choice| choice.weight = weight(choice.expert as usize));
    let sum: f32 = match normalized {
        true => choices.iter().map(|choice| choice.weight).sum(),
        false => (0..logits.len()).map(weight).sum(),
    };
    choices.iter_mut().for_each(|choice| choice.weight /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(rows: usize, routing: Routing, logits: &[f32]) -> Routes {
        // Larger than they need be, and used before.
        let mut routes = Routes::new(rows + 3, Routing { experts: routing.experts + 2, top_k: routing.top_k + 1, ..routing }).unwrap();
        let pool = Pool::new(2).unwrap();
        routes.choose(&pool, rows + 1, Routing { experts: routing.experts + 2, ..routing }, &vec![1.0; (rows + 1) * (routing.experts + 2)]);
        routes.choose(&pool, rows, routing, logits);
        routes
    }

    #[test]
    fn each_row_goes_to_its_best_experts_and_those_to_the_same_go_together() {
        let logits = [0.0, 3.0, 1.0, 5.0, 2.0, 2.0, 0.0, 9.0, 1.0];
        let routes = routes(3, Routing { experts: 3, top_k: 2, normalized: false }, &logits);
        let to: Vec<Vec<u32>> = (0..3).map(|expert| routes.to(expert).map(|route| routes.sources()[route]).collect()).collect();
        // Row 1 has two equals: the first comes first.
        assert_eq!(to, [vec![1], vec![0, 1, 2], vec![0, 2]]);
        let experts: Vec<Vec<usize>> = (0..3)
            .map(|row| routes.of(row).map(|(route, _)| (0..3).position(|expert| routes.to(expert).contains(&route)).unwrap()).collect())
            .collect();
        assert_eq!(experts, [vec![1, 2], vec![0, 1], vec![1, 2]]);
    }

    #[test]
    fn weights_are_the_softmax_over_all_experts_or_over_the_chosen() {
        let logits = [0.5f32, -1.0, 2.0, 1.0];
        let sum = |experts: &[usize]| experts.iter().map(|&e| (logits[e] as f64).exp()).sum::<f64>();
        for (normalized, over) in [(false, &[0, 1, 2, 3][..]), (true, &[2, 3])] {
            let routes = routes(1, Routing { experts: 4, top_k: 2, normalized }, &logits);
            let weights: Vec<f64> = routes.of(0).map(|(_, weight)| weight as f64).collect();
            for (weight, expert) in weights.iter().zip([2, 3]) {
                assert!((weight - (logits[expert] as f64).exp() / sum(over)).abs() < 1e-6, "{weights:?}");
            }
        }
    }

    #[test]
    fn logits_that_are_no_numbers_still_name_experts() {
        let routes = routes(1, Routing { experts: 3, top_k: 2, normalized: true }, &[f32::NAN; 3]);
        assert!(routes.of(0).all(|(route, weight)| route < 2 && weight.is_nan()));
    }
}
