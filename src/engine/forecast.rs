//! How long a request would wait for its first token: the steps ahead of it, played through at the pace of those that ran.

use std::collections::VecDeque;
use std::time::Duration;

use crate::kv::blocks_for;
use crate::sched::StepPlan;

/// What a step's rows and the positions they look back on cost, as far as the steps so far tell: the weighted least squares of
/// seconds = fixed + rows * per_row + positions * per_position, where older steps count less and less.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    moments: [[f64; UNKNOWNS]; UNKNOWNS],
    seconds: [f64; UNKNOWNS],
}

const UNKNOWNS: usize = 3;
/// What an older step counts for beside the next one: half after 700.
const FADING: f64 = 0.999;
/// Brings the three to like sizes.
const SCALES: [f64; UNKNOWNS] = [1.0, 1e-2, 1e-5];
/// A little weight on 0, so that steps that were all alike have an answer too.
const DAMPING: f64 = 1e-6;

/// The size of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    pub rows: usize,
    /// Positions that its rows look back on, in all.
    pub positions: usize,
}

impl Load {
    pub fn of(plan: &StepPlan) -> Load {
        let positions = plan.parts.iter().map(|part| part.rows * (part.first + part.rows)).sum();
        Load { rows: plan.batch.rows(), positions }
    }

    fn add(&mut self, rows: usize, first: usize) {
        self.rows += rows;
        self.positions += rows * (first + rows);
    }

    fn features(self) -> [f64; UNKNOWNS] {
        [SCALES[0], self.rows as f64 * SCALES[1], self.positions as f64 * SCALES[2]]
    }
}

impl Pace {
    pub fn observe(&mut self, load: Load, took: Duration) {
        let features = load.features();
        for (i, row) in self.moments.iter_mut().enumerate() {
            row.iter_mut().zip(features).for_each(|(moment, feature)| *moment = *moment * FADING + features[i] * feature);
            self.seconds[i] = self.seconds[i] * FADING + features[i] * took.as_secs_f64();
        }
    }

    /// None: no step has been seen.
    fn solve(&self) -> Option<Costs> {
        let weight = self.moments[0][0];
        if weight == 0.0 {
            return None;
        }
        let mut a = self.moments;
        let mut b = self.seconds;
        (0..UNKNOWNS).for_each(|i| a[i][i] += DAMPING * (weight + a[i][i]));
        for i in 0..UNKNOWNS {
            for below in i + 1..UNKNOWNS {
                let factor = a[below][i] / a[i][i];
                (i..UNKNOWNS).for_each(|column| a[below][column] -= factor * a[i][column]);
                b[below] -= factor * b[i];
            }
        }
        let mut costs = [0.0; UNKNOWNS];
        for i in (0..UNKNOWNS).rev() {
            let known: f64 = (i + 1..UNKNOWNS).map(|column| a[i][column] * costs[column]).sum();
            costs[i] = (b[i] - known) / a[i][i];
        }
        Some(Costs(costs))
    }
}

/// Seconds for each of a step's features.
struct Costs([f64; UNKNOWNS]);

impl Costs {
    fn seconds(&self, load: Load) -> f64 {
        self.0.iter().zip(load.features()).map(|(cost, feature)| cost * feature).sum::<f64>().max(0.0)
    }
}

/// A stream that is on its way.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pending {
    /// Tokens that it has to compute before it can choose the next one.
    pub prefill: usize,
    /// Tokens before those.
    pub computed: usize,
    /// Tokens that it is expected to choose.
    pub output: usize,
}

/// Everything that a forecast depends on, as of the last step.
#[derive(Debug, Clone, Default)]
pub struct Outlook {
    pub pace: Pace,
    pub lengths: Lengths,
    /// Streams that run, the oldest first.
    pub running: Vec<Pending>,
    /// Streams that ran, and wait to go on.
    pub preempted: VecDeque<Pending>,
    /// Streams and KV blocks that may be added, beside all that the running have to compute.
    pub places: usize,
    pub spare_blocks: usize,
    /// Of a step that is under way: what it computes, and when it began.
    pub step: Option<(Load, Duration)>,
}

/// The limits within which steps are composed.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    pub seqs: usize,
    pub rows: usize,
    pub chunk: usize,
    pub block_size: usize,
}

/// How many tokens requests choose, as far as those that ended tell.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lengths {
    /// The mean.
    mean: f64,
    /// Of those that named a maximum: the share of it that they chose.
    share: f64,
    ended: u64,
    bounded: u64,
}

/// What one that ends counts for beside those before it, once there are enough.
const NEWEST: f64 = 0.02;

impl Lengths {
    pub fn observe(&mut self, generated: usize, max_tokens: Option<usize>) {
        let move_to = |mean: &mut f64, count: &mut u64, value: f64| {
            *count += 1;
            *mean += (value - *mean) * (1.0 / *count as f64).max(NEWEST);
        };
        move_to(&mut self.mean, &mut self.ended, generated as f64);
        if let Some(most) = max_tokens.filter(|&most| most > 0) {
            move_to(&mut self.share, &mut self.bounded, generated as f64 / most as f64);
        }
    }

    /// Tokens that a turn will choose. `most`: how many fit in any case.
    pub fn expect(&self, max_tokens: Option<usize>, most: usize) -> usize {
        let expected = match max_tokens {
            Some(tokens) if self.bounded > 0 => tokens as f64 * self.share,
            None if self.ended > 0 => self.mean,
            _ => most as f64,
        };
        (expected.round() as usize).clamp(1, most.max(1))
    }

    fn mean(&self) -> usize {
        (self.mean.round() as usize).max(1)
    }
}

/// Steps after which the rest is taken to go on at the pace so far.
const MOST_STEPS: usize = 4096;

/// Steps to come.
struct Play {
    capacity: Capacity,
    costs: Costs,
    running: Vec<Pending>,
    /// First come first served; the last one is the request in question.
    queue: VecDeque<Pending>,
    spare_blocks: usize,
    seconds: f64,
}

impl Outlook {
    /// Whether `tokens` could be computed from the next step on; `waiting`: others are before them.
    pub fn fits_now(&self, block_size: usize, width: usize, tokens: usize, waiting: bool) -> bool {
        !waiting && self.preempted.is_empty() && width <= self.places && blocks_for(tokens, block_size) <= self.spare_blocks
    }

    /// Seconds until a request with a prompt of so many tokens has its first token, where `waiting` requests with so many tokens
    /// are before it. None: no step has been seen.
    pub fn first_token(&self, capacity: Capacity, waiting: (usize, usize), prompt: usize, now: Duration) -> Option<f64> {
        let costs = self.pace.solve()?;
        let (requests, tokens) = waiting;
        let mut queue = self.preempted.clone();
        let others = (0..requests).map(|i| Pending {
            prefill: (tokens * (i + 1) / requests - tokens * i / requests).max(1),
            computed: 0,
            output: self.lengths.mean(),
        });
        queue.extend(others);
        queue.push_back(Pending { prefill: prompt, computed: 0, output: 1 });
        let rest_of_step = self.step.map_or(0.0, |(load, began)| costs.seconds(load) - now.saturating_sub(began).as_secs_f64());
        let running = self.running.clone();
        let mut play = Play { capacity, costs, running, queue, spare_blocks: self.spare_blocks, seconds: rest_of_step.max(0.0) };
        Some(play.until_first_token())
    }
}

impl Play {
    /// The last of the queue is the last to enter, and prefills last of all: its first token comes with the step after which
    /// nothing is left to prefill.
    fn until_first_token(&mut self) -> f64 {
        let (all, begun) = (self.queue.len(), self.seconds);
        for _ in 0..MOST_STEPS {
            self.admit();
            let steps = self.step();
            if self.queue.is_empty() && self.running.iter().all(|stream| stream.prefill == 0) {
                break;
            }
            if steps == 0 {
                break;
            }
        }
        match all - self.queue.len() {
            0 => self.seconds,
            entered => begun + (self.seconds - begun) * all as f64 / entered as f64,
        }
    }

    fn admit(&mut self) {
        let mut rows: usize = self.running.iter().map(|stream| stream.prefill.clamp(1, self.capacity.chunk)).sum();
        while let Some(next) = self.queue.front() {
            let blocks = blocks_for(next.computed + next.prefill, self.capacity.block_size);
            let fits = self.running.len() < self.capacity.seqs && rows < self.capacity.rows && blocks <= self.spare_blocks;
            if !fits && !self.running.is_empty() {
                return;
            }
            rows += next.prefill.min(self.capacity.chunk);
            self.spare_blocks = self.spare_blocks.saturating_sub(blocks);
            self.running.extend(self.queue.pop_front());
        }
    }

    /// One step, or as many alike as until the next stream ends where nobody prefills. Says how many.
    fn step(&mut self) -> usize {
        let prefills = self.running.iter().any(|stream| stream.prefill > 0);
        let until_an_end = self.running.iter().map(|stream| stream.output).min().unwrap_or(0);
        let steps = if prefills { 1 } else { until_an_end.max(1) };
        let mut load = Load::default();
        let mut room = self.capacity.rows;
        for stream in &mut self.running {
            let rows = stream.prefill.max(1).min(self.capacity.chunk).min(room);
            let held = blocks_for(stream.computed, self.capacity.block_size);
            load.add(rows, stream.computed);
            room -= rows;
            stream.computed += rows;
            let (decodes, chose) = (stream.prefill == 0, rows >= stream.prefill);
            stream.prefill -= rows.min(stream.prefill);
            if chose {
                stream.output = stream.output.saturating_sub(steps);
                stream.computed += steps - 1;
                // A prompt's blocks were taken when it entered.
                let grown = blocks_for(stream.computed, self.capacity.block_size) - held;
                self.spare_blocks = self.spare_blocks.saturating_sub(if decodes { grown } else { 0 });
            }
        }
        self.seconds += self.costs.seconds(load) * steps as f64;
        self.end_those_that_are_done();
        steps.min(load.rows)
    }

    fn end_those_that_are_done(&mut self) {
        let block_size = self.capacity.block_size;
        let spare = &mut self.spare_blocks;
        self.running.retain(|stream| {
            let ends = stream.output == 0 && stream.prefill == 0;
            *spare += if ends { blocks_for(stream.computed, block_size) } else { 0 };
            !ends
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: Capacity = Capacity { seqs: 4, rows: 64, chunk: 64, block_size: 16 };

    fn seconds(load: Load) -> f64 {
        0.01 + 1e-4 * load.rows as f64 + 1e-6 * load.positions as f64
    }

    fn learned() -> Pace {
        let mut pace = Pace::default();
        for i in 1..200usize {
            let load = Load { rows: i % 60 + 1, positions: (i * 37) % 5000 };
            pace.observe(load, Duration::from_secs_f64(seconds(load)));
        }
        pace
    }

    #[test]
    fn the_pace_of_steps_is_learned_from_those_that_ran() {
        assert!(Pace::default().solve().is_none());
        let costs = learned().solve().unwrap();
        for load in [Load { rows: 1, positions: 100 }, Load { rows: 64, positions: 4000 }] {
            let (told, right) = (costs.seconds(load), seconds(load));
            assert!((told / right - 1.0).abs() < 0.01, "{told} for {right}");
        }
    }

    #[test]
    fn steps_that_are_all_alike_are_told_as_they_were() {
        let mut pace = Pace::default();
        let load = Load { rows: 8, positions: 900 };
        (0..50).for_each(|_| pace.observe(load, Duration::from_millis(25)));
        assert!((pace.solve().unwrap().seconds(load) - 0.025).abs() < 1e-4);
    }

    #[test]
    fn a_prompt_alone_waits_for_its_own_steps() {
        let outlook = Outlook { pace: learned(), places: 4, spare_blocks: 100, ..Outlook::default() };
        let expected = seconds(Load { rows: 64, positions: 64 * 64 }) + seconds(Load { rows: 36, positions: 36 * 100 });
        let told = outlook.first_token(CAPACITY, (0, 0), 100, Duration::ZERO).unwrap();
        assert!((told / expected - 1.0).abs() < 0.02, "{told} for {expected}");
        assert!(outlook.fits_now(16, 1, 100, false));
        assert!(!outlook.fits_now(16, 5, 100, false) && !outlook.fits_now(16, 1, 100, true));
        assert!(!outlook.fits_now(16, 1, 16 * 100 + 1, false));
    }

    #[test]
    fn where_all_places_are_taken_it_waits_for_an_end() {
        let stream = |output| Pending { prefill: 0, computed: 10, output };
        let running = vec![stream(50), stream(20), stream(90), stream(70)];
        let outlook = Outlook { pace: learned(), running, spare_blocks: 100, ..Outlook::default() };
        let told = outlook.first_token(CAPACITY, (0, 0), 10, Duration::ZERO).unwrap();
        let decode = seconds(Load { rows: 4, positions: 44 });
        assert!((20.0 * decode..24.0 * decode).contains(&told), "{told}, a step takes {decode}");
        // With one more before it, it waits for the second end.
        let told = outlook.first_token(CAPACITY, (1, 10), 10, Duration::ZERO).unwrap();
        assert!((20.0 * decode..55.0 * decode).contains(&told), "{told}, a step takes {decode}");
    }

    #[test]
    fn a_crowd_before_it_is_not_played_to_the_end() {
        let running = vec![Pending { prefill: 0, computed: 10, output: 10 }; 4];
        let mut lengths = Lengths::default();
        lengths.observe(100, None);
        let outlook = Outlook { pace: learned(), lengths, running, spare_blocks: 100, ..Outlook::default() };
        let near = outlook.first_token(CAPACITY, (10_000, 100_000), 10, Duration::ZERO).unwrap();
        let far = outlook.first_token(CAPACITY, (100_000, 1_000_000), 10, Duration::ZERO).unwrap();
        assert!((far / near - 10.0).abs() < 0.5, "{far} and {near}");
    }

    #[test]
    fn lengths_are_expected_as_they_were() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.expect(None, 77), 77);
        (0..100).for_each(|_| lengths.observe(30, Some(60)));
        assert_eq!((lengths.expect(Some(80), 100), lengths.expect(None, 100), lengths.expect(None, 20)), (40, 30, 20));
    }
}
