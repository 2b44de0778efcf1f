//! How long a request would wait for its first token: the steps ahead of it, played through at the pace of those that ran.

use std::collections::VecDeque;
use std::time::Duration;

use crate::kv::blocks_for;
use crate::sched::StepPlan;

/// What a step costs, as far as the steps so far tell: the weighted least squares of seconds = fixed + rows * per_row
/// + positions * per_position + products * per_product, where older steps count less and less.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    moments: [[f64; UNKNOWNS]; UNKNOWNS],
    seconds: [f64; UNKNOWNS],
}

const UNKNOWNS: usize = 4;
/// What an older step counts for beside the next one: half after 700.
const FADING: f64 = 0.999;
/// Brings the four to like sizes.
const SCALES: [f64; UNKNOWNS] = [1.0, 1e-2, 1e-4, 1e-5];
/// A little weight on 0, so that steps that were all alike have an answer too.
const DAMPING: f64 = 1e-6;

/// The size of a step, or of several.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    pub steps: usize,
    pub rows: usize,
    /// Positions whose K and V are read, of each sequence once a step.
    pub positions: usize,
    /// The same, once for each row.
    pub products: usize,
}

impl Load {
    pub fn of(plan: &StepPlan) -> Load {
        let mut load = Load { steps: 1, ..Load::default() };
        plan.parts.iter().for_each(|part| load.add(1, part.rows, part.first));
        load
    }

    /// A stream that computes so many rows in each of these steps, after the `first` positions.
    fn add(&mut self, steps: usize, rows: usize, first: usize) {
        let looked_back_on = steps * first + rows * steps * (steps + 1) / 2;
        self.rows += rows * steps;
        self.positions += looked_back_on;
        self.products += rows * looked_back_on;
    }

    fn features(self) -> [f64; UNKNOWNS] {
        let [steps, rows, positions, products] = SCALES;
        [self.steps as f64 * steps, self.rows as f64 * rows, self.positions as f64 * positions, self.products as f64 * products]
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

impl Pending {
    fn has_ended(&self) -> bool {
        self.prefill == 0 && self.output == 0
    }
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

/// How many tokens turns choose, as far as the last ones that ended tell.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    last: [u32; LISTED],
    ended: usize,
    /// The share of those that named a maximum and reached it, where newer ones count more.
    reached: f64,
}

const LISTED: usize = 256;
/// What the newest counts for in the share.
const NEWEST: f64 = 0.05;

impl Default for Lengths {
    fn default() -> Lengths {
        Lengths { last: [0; LISTED], ended: 0, reached: 1.0 }
    }
}

impl Lengths {
    pub fn observe(&mut self, generated: usize, max_tokens: Option<usize>) {
        self.last[self.ended % LISTED] = generated as u32;
        self.ended += 1;
        if let Some(most) = max_tokens {
            self.reached += ((generated >= most) as u32 as f64 - self.reached) * NEWEST;
        }
    }

    fn listed(&self) -> &[u32] {
        &self.last[..self.ended.min(LISTED)]
    }

    /// Tokens still to come of a turn that has `generated` so many, and may have `most`. Where hosts know their lengths, it is what
    /// they say; otherwise those are asked that were longer than this one is already.
    pub fn expect(&self, max_tokens: Option<usize>, generated: usize, most: usize) -> usize {
        let named = max_tokens.map_or(most, |tokens| tokens.min(most));
        let longer = self.listed().iter().filter(|&&length| length as usize > generated);
        let (count, sum) = longer.fold((0, 0), |(count, sum), &length| (count + 1, sum + length as usize));
        let expected = match count {
            _ if max_tokens.is_some() && self.reached > 0.5 => named,
            0 if self.ended == 0 => named,
            // Longer than all: as long again.
            0 => 2 * generated,
            _ => sum / count,
        };
        expected.min(named).saturating_sub(generated).max(1)
    }

    /// As `expect`, of the `i`-th of many that have not begun: together they are as different as those that ended.
    fn draw(&self, i: usize, max_tokens: Option<usize>) -> usize {
        let knows = max_tokens.is_some() && self.reached > 0.5;
        let listed = self.listed();
        let drawn = if knows || listed.is_empty() { usize::MAX } else { listed[i % listed.len()] as usize };
        drawn.min(max_tokens.unwrap_or(usize::MAX)).clamp(1, LONGEST)
    }
}

/// Of a stream of which nothing is known.
const LONGEST: usize = 1 << 20;

/// A turn that has not begun: the tokens it has to compute, and how many it may choose.
pub type Waits = (usize, Option<usize>);

/// The longer the wait, the coarser it is played: so many times as many steps at once.
const FINENESS: usize = 32;
/// More turns than the longest of queues needs.
const MOST_TURNS: usize = 10_000;

/// Steps to come.
struct Play {
    capacity: Capacity,
    costs: Costs,
    /// The oldest first.
    running: Vec<Pending>,
    /// First come first served; the last one is the request in question.
    queue: VecDeque<Pending>,
    /// Less than 0: somebody has to go.
    spare_blocks: i64,
    steps: usize,
    seconds: f64,
}

impl Outlook {
    /// Whether `tokens` could be computed from the next step on; `waiting`: others are before them.
    pub fn fits_now(&self, block_size: usize, width: usize, tokens: usize, waiting: bool) -> bool {
        !waiting && self.preempted.is_empty() && width <= self.places && blocks_for(tokens, block_size) <= self.spare_blocks
    }

    /// Seconds until a request with a prompt of so many tokens has its first token, after those that wait. None: no step has been seen.
    pub fn first_token(&self, capacity: Capacity, waiting: impl Iterator<Item = Waits>, prompt: usize, now: Duration) -> Option<f64> {
        let costs = self.pace.solve()?;
        let mut queue = self.preempted.clone();
        queue.try_reserve(waiting.size_hint().0 + 1).ok()?;
        let stream = |(i, (prefill, max_tokens))| Pending { prefill, computed: 0, output: self.lengths.draw(i, max_tokens) };
        queue.extend(waiting.enumerate().map(stream));
        queue.push_back(Pending { prefill: prompt, computed: 0, output: 1 });
        let rest_of_step = self.step.map_or(0.0, |(load, began)| costs.seconds(load) - now.saturating_sub(began).as_secs_f64());
        let (running, spare_blocks) = (self.running.clone(), self.spare_blocks as i64);
        let mut play = Play { capacity, costs, running, queue, spare_blocks, steps: 0, seconds: rest_of_step.max(0.0) };
        Some(play.until_first_token())
    }
}

impl Play {
    /// The last of the queue is the last to enter, and prefills last of all: its first token comes with the step after which
    /// nothing is left to prefill.
    fn until_first_token(&mut self) -> f64 {
        for _ in 0..MOST_TURNS {
            self.admit();
            self.turn(1 + self.steps / FINENESS);
            if self.queue.is_empty() && self.running.iter().all(|stream| stream.prefill == 0) {
                break;
            }
            self.preempt();
        }
        self.seconds
    }

    fn blocks(&self, tokens: usize) -> i64 {
        blocks_for(tokens, self.capacity.block_size) as i64
    }

    fn admit(&mut self) {
        let mut rows: usize = self.running.iter().map(|stream| stream.prefill.clamp(1, self.capacity.chunk)).sum();
        while self.running.len() < self.capacity.seqs && rows < self.capacity.rows {
            let Some(next) = self.next() else { return };
            rows += next.prefill.min(self.capacity.chunk);
            self.running.push(next);
        }
    }

    /// The first in the queue, if there is room for it.
    fn next(&mut self) -> Option<Pending> {
        let blocks = self.blocks(self.queue.front()?.prefill);
        if blocks > self.spare_blocks && !self.running.is_empty() {
            return None;
        }
        self.spare_blocks -= blocks;
        self.queue.pop_front()
    }

    /// So many steps. Whoever ends gives its place to the next at once.
    fn turn(&mut self, steps: usize) {
        let mut load = Load { steps, ..Load::default() };
        let mut room = self.capacity.rows * steps;
        let mut place = 0;
        while place < self.running.len() {
            let mut left = steps;
            while left > 0 && !self.running[place].has_ended() {
                left -= self.advance(place, left, &mut room, &mut load);
                if self.running[place].has_ended() {
                    self.spare_blocks += self.blocks(self.running[place].computed);
                    let next = self.next();
                    next.into_iter().for_each(|next| self.running[place] = next);
                }
            }
            place += 1;
        }
        self.running.retain(|stream| !stream.has_ended());
        self.steps += steps;
        self.seconds += self.costs.seconds(load);
    }

    /// Up to `most` steps of one stream. Says how many.
    fn advance(&mut self, place: usize, most: usize, room: &mut usize, load: &mut Load) -> usize {
        let Capacity { chunk, block_size, .. } = self.capacity;
        let stream = &mut self.running[place];
        if stream.prefill > 0 {
            let rows = stream.prefill.min(chunk * most).min(*room);
            load.add(1, rows, stream.computed);
            *room -= rows;
            (stream.computed, stream.prefill) = (stream.computed + rows, stream.prefill - rows);
            // The last row of a prompt chooses.
            stream.output -= (stream.prefill == 0) as usize;
            return if stream.prefill > 0 { most } else { rows.div_ceil(chunk).max(1) };
        }
        let chosen = most.min(stream.output);
        load.add(chosen, 1, stream.computed);
        *room = room.saturating_sub(chosen);
        self.spare_blocks -= (blocks_for(stream.computed + chosen, block_size) - blocks_for(stream.computed, block_size)) as i64;
        (stream.computed, stream.output) = (stream.computed + chosen, stream.output - chosen);
        chosen
    }

    /// Where there are fewer blocks than are needed, the youngest go, and compute again what they had.
    fn preempt(&mut self) {
        while self.spare_blocks < 0 && self.running.len() > 1 {
            let Some(Pending { prefill, computed, output }) = self.running.pop() else { return };
            self.spare_blocks += self.blocks(computed + prefill);
            self.queue.push_front(Pending { prefill: computed + prefill.max(1), computed: 0, output });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: Capacity = Capacity { seqs: 4, rows: 64, chunk: 64, block_size: 16 };

    fn seconds(load: Load) -> f64 {
        0.01 + 1e-4 * load.rows as f64 + 1e-5 * load.positions as f64 + 1e-6 * load.products as f64
    }

    fn load(parts: &[(usize, usize)]) -> Load {
        let mut load = Load { steps: 1, ..Load::default() };
        parts.iter().for_each(|&(rows, first)| load.add(1, rows, first));
        load
    }

    fn learned() -> Pace {
        let mut pace = Pace::default();
        for i in 1..200usize {
            let load = load(&[(i % 60 + 1, (i * 37) % 500), (1, i * 91 % 700)]);
            pace.observe(load, Duration::from_secs_f64(seconds(load)));
        }
        pace
    }

    #[test]
    fn the_pace_of_steps_is_learned_from_those_that_ran() {
        assert!(Pace::default().solve().is_none());
        let costs = learned().solve().unwrap();
        for load in [load(&[(1, 100)]), load(&[(60, 4), (1, 80)])] {
            let (told, right) = (costs.seconds(load), seconds(load));
            assert!((told / right - 1.0).abs() < 0.01, "{told} for {right}");
        }
    }

    #[test]
    fn steps_that_are_all_alike_are_told_as_they_were() {
        let mut pace = Pace::default();
        let load = load(&[(1, 112); 8]);
        (0..50).for_each(|_| pace.observe(load, Duration::from_millis(25)));
        assert!((pace.solve().unwrap().seconds(load) - 0.025).abs() < 1e-4);
    }

    #[test]
    fn a_prompt_alone_waits_for_its_own_steps() {
        let outlook = Outlook { pace: learned(), places: 4, spare_blocks: 100, ..Outlook::default() };
        let expected = seconds(load(&[(64, 0)])) + seconds(load(&[(36, 64)]));
        let told = outlook.first_token(CAPACITY, [].into_iter(), 100, Duration::ZERO).unwrap();
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
        let told = outlook.first_token(CAPACITY, [].into_iter(), 10, Duration::ZERO).unwrap();
        let decode = seconds(load(&[(1, 10); 4]));
        assert!((20.0 * decode..24.0 * decode).contains(&told), "{told}, a step takes {decode}");
        // With one more before it, it waits for the second end.
        let told = outlook.first_token(CAPACITY, [(10, None)].into_iter(), 10, Duration::ZERO).unwrap();
        assert!((50.0 * decode..70.0 * decode).contains(&told), "{told}, a step takes {decode}");
    }

    #[test]
    fn a_crowd_before_it_is_played_in_ever_larger_steps() {
        let running = vec![Pending { prefill: 0, computed: 10, output: 10 }; 4];
        let outlook = Outlook { pace: learned(), running, places: 0, spare_blocks: 100, ..Outlook::default() };
        let told = |crowd| outlook.first_token(CAPACITY, (0..crowd).map(|_| (10, Some(100))), 10, Duration::ZERO).unwrap();
        // Four at a time, each for a prefill and 100 steps, among three that decode.
        let each = 100.0 * seconds(load(&[(1, 60); 4])) / 4.0;
        for crowd in [100, 1000, 100_000] {
            let (told, right) = (told(crowd), crowd as f64 * each);
            assert!((told / right - 1.0).abs() < 0.15, "{told} for {right}");
        }
    }

    #[test]
    fn where_the_pool_is_full_the_youngest_compute_again() {
        let stream = |computed| Pending { prefill: 0, computed, output: 100 };
        let running = vec![stream(160), stream(160)];
        let full = Outlook { pace: learned(), running: running.clone(), places: 2, spare_blocks: 4, ..Outlook::default() };
        let roomy = Outlook { pace: learned(), running, places: 2, spare_blocks: 400, ..Outlook::default() };
        let told = |outlook: &Outlook| outlook.first_token(CAPACITY, [].into_iter(), 70, Duration::ZERO).unwrap();
        assert!(told(&full) > 100.0 * seconds(load(&[(1, 200)])) && told(&roomy) < 0.1, "{} and {}", told(&full), told(&roomy));
    }

    #[test]
    fn lengths_are_expected_as_they_were() {
        let mut lengths = Lengths::default();
        assert_eq!((lengths.expect(None, 0, 77), lengths.expect(Some(50), 10, 77)), (77, 40));
        // Hosts allow 100 and get 20 or 40.
        (0..100).for_each(|i| lengths.observe(20 + i % 2 * 20, Some(100)));
        assert_eq!(
            (lengths.expect(Some(100), 0, 500), lengths.expect(Some(100), 25, 500), lengths.expect(Some(100), 45, 500)),
            (30, 15, 45)
        );
        assert_eq!((lengths.expect(Some(25), 0, 500), lengths.draw(0, Some(100)), lengths.draw(1, Some(100))), (25, 20, 40));
        // Now they know.
        (0..100).for_each(|_| lengths.observe(60, Some(60)));
        assert_eq!((lengths.expect(Some(90), 10, 500), lengths.draw(3, Some(90))), (80, 90));
    }
}
