//! Measured durations of steps, prompt tokens and block transfers. Older measurements have less
//! weight, so that the estimates follow changes of the speed.

use std::time::Duration;

use crate::scheduler::Costs;
use crate::scheduler::simulate::StepLoad;

/// A weighted least-squares fit: seconds = the sum of feature * cost.
#[derive(Debug, Clone, Copy)]
struct LeastSquares<const N: usize> {
    moments: [[f64; N]; N],
    seconds: [f64; N],
}

/// Weight of a measurement relative to the next newer one. It halves after 700 steps.
const FADING: f64 = 0.999;

impl<const N: usize> Default for LeastSquares<N> {
    fn default() -> LeastSquares<N> {
        LeastSquares { moments: [[0.0; N]; N], seconds: [0.0; N] }
    }
}

impl<const N: usize> LeastSquares<N> {
    fn decay(&mut self, by: f64) {
        self.moments.as_flattened_mut().iter_mut().chain(&mut self.seconds).for_each(|sum| *sum *= by);
    }

    fn observe(&mut self, features: [f64; N], took: Duration) {
        for (i, row) in self.moments.iter_mut().enumerate() {
            row.iter_mut().zip(features).for_each(|(moment, feature)| *moment += features[i] * feature);
            self.seconds[i] += features[i] * took.as_secs_f64();
        }
    }

    /// Solves the fit. `doubt` is the weight of a prior of 0 for each cost, which keeps the system
    /// regular.
    fn solve(&self, doubt: impl Fn(f64) -> f64) -> [f64; N] {
        let (mut a, mut b) = (self.moments, self.seconds);
        (0..N).for_each(|i| a[i][i] += doubt(a[i][i]));
        for i in 0..N {
            for below in i + 1..N {
                let factor = a[below][i] / a[i][i];
                (i..N).for_each(|column| a[below][column] -= factor * a[i][column]);
                b[below] -= factor * b[i];
            }
        }
        let mut costs = [0.0; N];
        for i in (0..N).rev() {
            let known: f64 = (i + 1..N).map(|column| a[i][column] * costs[column]).sum();
            costs[i] = (b[i] - known) / a[i][i];
        }
        costs
    }
}

/// A model of the step time: seconds = fixed + tokens * per_token + positions * per_position +
/// products * per_product.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTimeModel(LeastSquares<UNKNOWNS>);

const UNKNOWNS: usize = 4;
/// Scales of the features, which make them similar in size.
const SCALES: [f64; UNKNOWNS] = [1.0, 1e-2, 1e-4, 1e-5];
/// The prior makes the system regular even if all steps had the same load.
const DAMPING: f64 = 1e-6;

fn features(load: StepLoad) -> [f64; UNKNOWNS] {
    let [steps, tokens, positions, products] = SCALES;
    [load.steps as f64 * steps, load.tokens as f64 * tokens, load.positions as f64 * positions, load.products as f64 * products]
}

impl StepTimeModel {
    pub fn observe(&mut self, load: StepLoad, took: Duration) {
        self.0.decay(FADING);
        self.0.observe(features(load), took);
    }

    /// Solves the model. Returns `None` before the first measurement.
    pub fn solve(&self) -> Option<StepCosts> {
        let weight = self.0.moments[0][0];
        (weight > 0.0).then(|| StepCosts(self.0.solve(|moment| DAMPING * (weight + moment))))
    }
}

/// Seconds per unit of each feature.
pub struct StepCosts([f64; UNKNOWNS]);

impl StepCosts {
    pub fn seconds(&self, load: StepLoad) -> f64 {
        self.0.iter().zip(features(load)).map(|(cost, feature)| cost * feature).sum::<f64>().max(0.0)
    }
}

/// All measurements.
#[derive(Debug, Default)]
pub struct StepTimer {
    pub model: StepTimeModel,
    prompts: LeastSquares<1>,
    moves: LeastSquares<1>,
}

/// The prior of a rate, in squared units. If the weight of the measurements fades below it, the
/// cost is estimated as almost zero. An operation that once seemed expensive is therefore tried
/// again.
const FORGOTTEN: f64 = 1e-2;

impl StepTimer {
    /// Records a step. If it also contains decodes, its duration is divided in proportion to the
    /// tokens.
    pub fn record_step(&mut self, load: StepLoad, took: Duration) {
        self.model.observe(load, took);
        // Transfers fade with every step: if they seem expensive, none are made, and no measurement
        // would correct the estimate.
        self.moves.decay(FADING);
        if load.prompt_tokens > 0 {
            let prompts = load.prompt_tokens as f64;
            self.prompts.decay(FADING);
            self.prompts.observe([prompts], took.mul_f64(prompts / load.tokens as f64));
        }
    }

    pub fn record_move(&mut self, blocks: usize, took: Duration) {
        self.moves.observe([blocks as f64], took);
    }

    pub fn costs(&self) -> Costs {
        let each = |fit: &LeastSquares<1>| fit.solve(|_| FORGOTTEN)[0];
        Costs { block: each(&self.moves), token: each(&self.prompts) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::simulate::test_times::{load, seconds};

    fn learned() -> StepTimeModel {
        let mut model = StepTimeModel::default();
        learn(&mut model, 200, 1.0);
        model
    }

    fn learn(model: &mut StepTimeModel, steps: usize, slowdown: f64) {
        for i in 1..=steps {
            let load = load(&[(i % 60 + 1, (i * 37) % 500), (1, i * 91 % 700)]);
            model.observe(load, Duration::from_secs_f64(slowdown * seconds(load)));
        }
    }

    #[test]
    fn step_times_are_estimated_from_past_steps() {
        assert!(StepTimeModel::default().solve().is_none());
        let costs = learned().solve().unwrap();
        for load in [load(&[(1, 100)]), load(&[(60, 4), (1, 80)])] {
            let (found, expected) = (costs.seconds(load), seconds(load));
            assert!((found / expected - 1.0).abs() < 0.01, "{found}, expected {expected}");
        }
    }

    #[test]
    fn identical_steps_are_predicted_with_their_measured_time() {
        let mut model = StepTimeModel::default();
        let load = load(&[(1, 112); 8]);
        (0..50).for_each(|_| model.observe(load, Duration::from_millis(25)));
        assert!((model.solve().unwrap().seconds(load) - 0.025).abs() < 1e-4);
    }

    #[test]
    fn the_step_time_model_adapts_to_a_slower_machine() {
        let mut model = StepTimeModel::default();
        learn(&mut model, 20_000, 1.0);
        learn(&mut model, 7000, 3.0);
        let (found, expected) = (model.solve().unwrap().seconds(load(&[(30, 200)])), 3.0 * seconds(load(&[(30, 200)])));
        assert!((found / expected - 1.0).abs() < 0.02, "{found}, expected {expected}");
    }

    fn prompt(tokens: usize) -> StepLoad {
        StepLoad { prompt_tokens: tokens, ..load(&[(tokens, 0)]) }
    }

    #[test]
    fn old_measurements_count_less() {
        let mut timer = StepTimer::default();
        assert_eq!(timer.costs(), Costs::default(), "the initial costs are the defaults");
        let milliseconds = Duration::from_millis;
        let assert_near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.02, "{found}, expected {expected}");
        for _ in 0..10_000 {
            timer.record_step(prompt(100), milliseconds(100));
            timer.record_move(10, milliseconds(500));
        }
        assert_near(timer.costs().token, 1e-3);
        assert_near(timer.costs().block, 50e-3);
        for _ in 0..10_000 {
            timer.record_step(prompt(100), milliseconds(400));
            timer.record_move(10, milliseconds(5));
        }
        assert_near(timer.costs().token, 4e-3);
        assert_near(timer.costs().block, 0.5e-3);
    }

    #[test]
    fn the_cost_of_a_long_unused_swap_decays_to_zero() {
        let mut timer = StepTimer::default();
        timer.record_move(100, Duration::from_secs(10));
        assert!(timer.costs().block > 0.099);
        (0..5000).for_each(|_| timer.record_step(prompt(50), Duration::from_millis(50)));
        assert!(timer.costs().block > 0.099, "after 250 s the cost has not decayed");
        (0..30_000).for_each(|_| timer.record_step(prompt(50), Duration::from_millis(50)));
        assert!(timer.costs().block < 1e-6, "{}", timer.costs().block);
        assert!((timer.costs().token - 1e-3).abs() < 1e-5);
    }
}
