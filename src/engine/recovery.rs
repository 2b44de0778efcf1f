//! Recovery from failed steps: which groups of a step fail, and when they are given up. Knows
//! neither the engine nor the device.

use std::time::Duration;

use crate::error::{Error, Result};

/// Time and number of failed steps in a row after which the groups of the step end.
pub const RETRY_TIMEOUT: Duration = Duration::from_secs(1);
const MIN_FAILURES: u32 = 3;

/// Number of failures without a success after which the search stops: the cause is not a request.
const MAX_FAILURES_WITHOUT_SUCCESS: u32 = 100;

/// The groups of a failed step, computed separately.
#[derive(Debug)]
pub struct Bisection<G> {
    /// Groups that failed alone, each with its error.
    pub failing: Vec<(G, Error)>,
    /// The last error.
    pub error: Error,
    /// Number of sequences that were computed.
    pub computed: u64,
    failures: u32,
}

/// Computes the groups of a step that failed with `error` in smaller and smaller steps. A group
/// that fails alone gets one more attempt, since a transient failure has no cause in the group.
///
/// `try_step` computes a step of some groups and returns the number of its sequences. A group that
/// is not ready counts as computed, with no sequence.
pub fn bisect<G: Copy>(groups: &[G], error: Error, mut try_step: impl FnMut(&[G]) -> Result<u64>) -> Bisection<G> {
    let mut bisection = Bisection { failing: Vec::new(), error, computed: 0, failures: 0 };
    bisection.search(groups, &mut try_step);
    bisection
}

impl<G: Copy> Bisection<G> {
    fn search(&mut self, groups: &[G], try_step: &mut impl FnMut(&[G]) -> Result<u64>) {
        if let &[alone] = groups {
            if !self.succeeds(groups, try_step) {
                self.failing.push((alone, self.error.clone()));
            }
            return;
        }
        let (left, right) = groups.split_at(groups.len() / 2);
        for half in [left, right] {
            if self.failures < MAX_FAILURES_WITHOUT_SUCCESS && !self.succeeds(half, try_step) {
                self.search(half, try_step);
            }
        }
    }

    fn succeeds(&mut self, groups: &[G], try_step: &mut impl FnMut(&[G]) -> Result<u64>) -> bool {
        match try_step(groups) {
            Ok(sequences) => {
                self.computed += sequences;
                true
            }
            Err(error) => {
                self.failures += (self.computed == 0) as u32;
                self.error = error;
                false
            }
        }
    }
}

/// The groups of the last failed step, and the failed steps in a row in which no group could be
/// computed.
pub struct Recovery<G> {
    /// Groups of the last failed step. Restored after they were lent to a bisection.
    pub groups: Vec<G>,
    streak: Option<FailureStreak<G>>,
}

struct FailureStreak<G> {
    since: Duration,
    steps: u32,
    /// Largest group id in the first step of the streak. Later groups have a timeout of their own.
    latest: G,
}

impl<G: Copy + Ord + Default> Recovery<G> {
    /// Creates the state for steps of at most `max_groups` groups.
    pub fn new(max_groups: usize) -> Result<Recovery<G>> {
        let mut groups = Vec::new();
        groups.try_reserve_exact(max_groups)?;
        Ok(Recovery { groups, streak: None })
    }

    /// Records that a step succeeded.
    pub fn record_success(&mut self) {
        self.streak = None;
    }

    /// Records that no group of a step could be computed. After the timeout, returns the largest id
    /// of the groups to end: the failure may be caused by them or by the device, and later groups
    /// are tried without them.
    pub fn record_failure(&mut self, now: Duration) -> Option<G> {
        let latest = self.groups.iter().copied().max().unwrap_or_default();
        let streak = self.streak.get_or_insert(FailureStreak { since: now, steps: 0, latest });
        streak.steps += 1;
        if streak.steps < MIN_FAILURES || now.saturating_sub(streak.since) < RETRY_TIMEOUT {
            return None;
        }
        self.streak.take().map(|streak| streak.latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bisects `count` groups of one sequence each. A step with a failing group fails, `transient`
    /// further attempts fail as well. Returns the result and the number of attempts.
    fn bisect_groups(count: usize, failing: &[usize], mut transient: u32) -> (Bisection<usize>, u32) {
        let groups: Vec<usize> = (0..count).collect();
        let mut attempts = 0;
        let bisection = bisect(&groups, Error::internal("the step"), |groups| {
            attempts += 1;
            if transient > 0 {
                transient -= 1;
                return Err(Error::internal("transient"));
            }
            match groups.iter().find(|group| failing.contains(group)) {
                Some(group) => Err(Error::internal(format!("group {group}"))),
                None => Ok(groups.len() as u64),
            }
        });
        (bisection, attempts)
    }

    #[test]
    fn exactly_the_failing_groups_are_found_each_with_its_error() {
        for count in 1..20 {
            for first in 0..count {
                for second in 0..count {
                    let (found, _) = bisect_groups(count, &[first, second], 0);
                    let mut expected = vec![first, second];
                    expected.sort();
                    expected.dedup();
                    let groups: Vec<usize> = found.failing.iter().map(|(group, _)| *group).collect();
                    assert_eq!((groups, found.computed), (expected.clone(), (count - expected.len()) as u64));
                    for (group, error) in found.failing {
                        assert_eq!(error.message(), format!("internal error: group {group}"));
                    }
                }
            }
        }
    }

    #[test]
    fn a_transient_failure_has_no_failing_group() {
        let (found, attempts) = bisect_groups(8, &[], 1);
        assert_eq!((found.failing.len(), found.computed), (0, 8));
        assert!(attempts <= 4, "{attempts}");
    }

    #[test]
    fn one_failing_group_of_many_needs_logarithmically_many_attempts() {
        let (found, attempts) = bisect_groups(1024, &[700], 0);
        assert_eq!(found.failing.len(), 1);
        assert!(attempts <= 2 * 10 + 1, "{attempts}");
    }

    #[test]
    fn the_search_stops_if_nothing_succeeds() {
        let (found, attempts) = bisect_groups(1000, &(0..1000).collect::<Vec<_>>(), 0);
        assert_eq!(found.computed, 0);
        assert!(attempts <= MAX_FAILURES_WITHOUT_SUCCESS + 1, "{attempts}");
    }

    #[test]
    fn groups_end_after_the_timeout_and_enough_failures() {
        let mut recovery = Recovery::<u64>::new(4).unwrap();
        recovery.groups.extend([3, 5]);
        assert_eq!(recovery.record_failure(Duration::ZERO), None);
        recovery.groups.push(9); // has a timeout of its own
        assert_eq!(recovery.record_failure(2 * RETRY_TIMEOUT), None, "only two steps have failed");
        assert_eq!(recovery.record_failure(2 * RETRY_TIMEOUT), Some(5));
        assert_eq!(recovery.record_failure(2 * RETRY_TIMEOUT), None, "a new streak begins");
    }

    #[test]
    fn a_success_ends_the_streak() {
        let mut recovery = Recovery::<u64>::new(4).unwrap();
        for _ in 0..10 {
            assert_eq!(recovery.record_failure(Duration::ZERO), None);
        }
        recovery.record_success();
        assert_eq!(recovery.record_failure(9 * RETRY_TIMEOUT), None);
    }
}
