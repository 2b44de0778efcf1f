//! The choice of grids for groups of 4-bit weights.

use half::f16;

use super::*;

const COLS: usize = 256;

/// Returns weights that are distributed as those of models: most are near 0, and a few are outliers.
/// Rows differ in size and in their mean.
fn weights(rows: usize) -> Vec<f32> {
    let [a, b, c] = [3, 4, 5].map(|seed| numbers(rows * COLS, seed));
    let weight = |i: usize| {
        let row = i / COLS;
        let outlier = if i.is_multiple_of(97) { 4.0 } else { 1.0 };
        (outlier * (a[i] + b[i] + c[i]) + 0.1 * (row % 7) as f32) * 0.5f32.powi((row % 5) as i32)
    };
    (0..rows * COLS).map(weight).collect()
}

fn int4(backend: &CpuBackend, weights: &[f32], group: usize, offsets: bool) -> Vec<f64> {
    let bytes = stored(weights, Dtype::F32).0;
    as_stored(&matrix_in(backend, &bytes, weights.len() / COLS, COLS, Dtype::F32, WeightFormat::Int4 { group, offsets }).unwrap())
}

fn errors(found: &[f64], weights: &[f32], group: usize) -> Vec<f64> {
    let of_group = |(found, x): (&[f64], &[f32])| found.iter().zip(x).map(|(found, x)| (found - *x as f64).powi(2)).sum();
    found.chunks_exact(group).zip(weights.chunks_exact(group)).map(of_group).collect()
}

/// A grid `offset + 0..=15 * scale`, with numbers that are in f16.
#[derive(Clone, Copy)]
struct Grid {
    scale: f64,
    offset: f64,
}

impl Grid {
    fn rounded(scale: f64, offset: f64) -> Grid {
        Grid { scale: f16::from_f64(scale).to_f64(), offset: f16::from_f64(offset).to_f64() }
    }

    fn position(self, x: f32) -> f64 {
        if self.scale == 0.0 { 0.0 } else { ((x as f64 - self.offset) / self.scale).round_ties_even().clamp(0.0, 15.0) }
    }

    fn error(self, x: &[f32]) -> f64 {
        x.iter().map(|&x| (x as f64 - self.offset - self.scale * self.position(x)).powi(2)).sum()
    }

    fn fitted(self, x: &[f32]) -> Grid {
        let mean = |of: &dyn Fn(f32) -> f64| x.iter().map(|&x| of(x)).sum::<f64>() / x.len() as f64;
        let (position, weight) = (mean(&|x| self.position(x)), mean(&|x| x as f64));
        let variance = mean(&|x| (self.position(x) - position).powi(2));
        let covariance = mean(&|x| (self.position(x) - position) * (x as f64 - weight));
        if variance == 0.0 { self } else { Grid::rounded(covariance / variance, weight - position * covariance / variance) }
    }
}

fn ends(x: &[f32]) -> (f64, f64) {
    x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), &x| (min.min(x as f64), max.max(x as f64)))
}

/// Returns the grid of an asymmetric group that spans all weights, to the nearest.
fn spanning_grid(x: &[f32]) -> Grid {
    let (min, max) = ends(x);
    Grid::rounded((max - min) / 15.0, min)
}

fn symmetric_grids(x: &[f32]) -> [Grid; 2] {
    let (min, max) = ends(x);
    let furthest = if max > -min { max } else { min };
    [furthest.abs() / 7.0, furthest / -8.0].map(|scale| f16::from_f64(scale).to_f64()).map(|scale| Grid { scale, offset: -8.0 * scale })
}

fn nearest(x: &[f32], grids: &[Grid]) -> Grid {
    grids.iter().copied().reduce(|best, grid| if grid.error(x) < best.error(x) { grid } else { best }).unwrap()
}

#[test]
fn errors_of_every_int4_group_are_those_of_the_best_candidate() {
    let rows = 40;
    let mut weights = weights(rows);
    // Groups of equal weights, and groups with large and with small weights.
    weights[..COLS].fill(0.75);
    weights[COLS..2 * COLS].iter_mut().for_each(|x| *x *= 5_000.0);
    weights[2 * COLS..3 * COLS].iter_mut().for_each(|x| *x *= 2e-4);
    for group in WeightFormat::GROUPS {
        let of_groups = |best: &dyn Fn(&[f32]) -> f64| weights.chunks_exact(group).map(best).collect::<Vec<f64>>();
        let symmetric = of_groups(&|x| nearest(x, &symmetric_grids(x)).error(x));
        let unfitted = of_groups(&|x| spanning_grid(x).error(x));
        let asymmetric = of_groups(&|x| {
            let fit = |grid: Grid| nearest(x, &[grid, grid.fitted(x)]);
            fit(fit(spanning_grid(x))).error(x)
        });
        for backend in backends() {
            let (name, near) = (backend.isa().name(), |a: f64, b: f64| (a - b).abs() <= 1e-4 * b.max(1e-12));
            let found = errors(&int4(&backend, &weights, group, false), &weights, group);
            assert!(found.iter().zip(&symmetric).all(|(found, best)| near(*found, *best)), "{name}: groups of {group}");
            let found = errors(&int4(&backend, &weights, group, true), &weights, group);
            assert!(found.iter().zip(&unfitted).all(|(found, best)| *found <= best * 1.0001 + 1e-16), "{name}: groups of {group}");
            // A weight in the middle of two positions may make another fit, but rarely.
            let like_f64 = found.iter().zip(&asymmetric).filter(|(found, best)| near(**found, **best)).count();
            assert!(like_f64 * 20 >= found.len() * 19, "{name}: groups of {group}: {like_f64} of {}", found.len());
        }
    }
}

#[test]
fn fits_of_asymmetric_int4_lower_the_error_of_round_to_nearest() {
    let backend = backends().next().unwrap();
    let weights = weights(64);
    for group in WeightFormat::GROUPS {
        let usual = weights.chunks_exact(group).map(|x| spanning_grid(x).error(x)).sum::<f64>();
        let found = errors(&int4(&backend, &weights, group, true), &weights, group).iter().sum::<f64>();
        assert!(found < 0.95 * usual, "groups of {group}: error {found}, round to nearest {usual}");
    }
}

/// A model that was quantized before loses nothing if it is quantized to the same grid again.
#[test]
fn weights_on_a_grid_are_exact_in_int4() {
    for backend in backends() {
        for group in WeightFormat::GROUPS {
            for (offsets, low) in [(false, -8.0), (true, -3.0)] {
                let scale = |i: usize| (1 + i / group % 20) as f32 / 1024.0;
                let weights: Vec<f32> = (0..20 * COLS).map(|i| (low + (i * 7 % 16) as f32) * scale(i)).collect();
                let found = int4(&backend, &weights, group, offsets);
                assert!(found.iter().zip(&weights).all(|(found, x)| *found == *x as f64), "{}: groups of {group}", backend.isa().name());
            }
        }
    }
}
