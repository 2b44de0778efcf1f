//! Masks are computed beside the forward pass, on one thread of their own.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::Constraint;
use crate::error::{Error, Result};
use crate::sys::quiet::no_panic;
use crate::sys::threads;

/// Computes masks. Its thread starts with the first; where that could not be started, or has died, whoever collects computes
/// them. Dropping it ends the thread, after the mask under way.
pub struct Masker {
    jobs: Option<Sender<Job>>,
    /// The jobs that the thread has not begun: whoever waits for masks helps with them.
    waiting: Receiver<Job>,
    done: Receiver<Masked>,
    /// What the thread answers with, until it is started.
    answers: Option<Sender<Masked>>,
    thread: Option<JoinHandle<()>>,
    /// Whose masks are not collected yet.
    pending: VecDeque<u64>,
}

struct Job {
    seq: u64,
    constraint: Constraint,
}

/// A constraint that has its mask, or that says why there is none; an error where a defect lost it.
pub struct Masked {
    pub seq: u64,
    pub constraint: Result<Constraint>,
}

impl Job {
    fn run(mut self) -> Masked {
        // Asked again, it answers the same.
        let masked = no_panic(|| drop(self.constraint.mask()));
        Masked { seq: self.seq, constraint: masked.map(|()| self.constraint).map_err(|panic| lost(&panic)) }
    }
}

fn lost(why: &str) -> Error {
    Error::internal(format!("a defect lost this request's grammar: {why}"))
}

impl Default for Masker {
    fn default() -> Masker {
        let (jobs, waiting) = unbounded();
        let (answers, done) = unbounded();
        Masker { jobs: Some(jobs), waiting, done, answers: Some(answers), thread: None, pending: VecDeque::new() }
    }
}

impl Masker {
    /// Begins to compute the mask of a sequence's constraint. `collect` gives it back.
    pub fn submit(&mut self, seq: u64, constraint: Constraint) {
        if let Some(answers) = self.answers.take() {
            self.start(answers);
        }
        self.pending.push_back(seq);
        if let Some(jobs) = &self.jobs {
            // We hold a receiver, so that nothing is refused.
            let _ = jobs.send(Job { seq, constraint });
        }
    }

    fn start(&mut self, answers: Sender<Masked>) {
        let jobs = self.waiting.clone();
        let work = move || {
            for masked in jobs.iter().map(Job::run) {
                if answers.send(masked).is_err() {
                    break; // nobody waits for it any more
                }
            }
        };
        self.thread = threads::spawn("pagedllm-masks".into(), work).ok();
    }

    /// The next mask that is ready, or one computed here and now, in no particular order. None: all have been collected.
    pub fn collect(&mut self) -> Option<Masked> {
        if self.pending.is_empty() {
            return None;
        }
        let ready = self.done.try_recv().or_else(|_| self.waiting.try_recv().map(Job::run));
        let masked = match ready.ok().or_else(|| self.done.recv().ok()) {
            Some(masked) => masked,
            // The thread is gone, and so is what it was at.
            None => Masked { seq: self.pending[0], constraint: Err(lost("the thread that computes masks has died")) },
        };
        self.pending.retain(|&seq| seq != masked.seq);
        Some(masked)
    }
}

impl Drop for Masker {
    fn drop(&mut self) {
        self.jobs = None;
        // What was not collected is not wanted.
        while self.waiting.try_recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::constraint::tests::byte_grammars;
    use crate::options::Grammar;

    fn constraint() -> Constraint {
        byte_grammars().compile(&Grammar::Choice(vec!["yes".into(), "no".into()])).unwrap()
    }

    fn collected(masker: &mut Masker) -> Vec<u64> {
        let mut seqs = Vec::new();
        while let Some(masked) = masker.collect() {
            let mut constraint = masked.constraint.unwrap();
            assert_eq!(constraint.mask().unwrap().iter().map(|word| word.count_ones()).sum::<u32>(), 4, "y, n, yes, no");
            seqs.push(masked.seq);
        }
        seqs.sort_unstable();
        seqs
    }

    #[test]
    fn what_is_submitted_comes_back_once_with_its_mask() {
        let mut masker = Masker::default();
        let first = constraint();
        for round in 0..3 {
            (0..20).for_each(|seq| masker.submit(round * 100 + seq, first.fork().unwrap()));
            assert_eq!(collected(&mut masker), (0..20).map(|seq| round * 100 + seq).collect::<Vec<_>>());
        }
        assert!(masker.collect().is_none());
    }

    /// As if its thread could not be started.
    fn alone() -> Masker {
        let mut masker = Masker::default();
        masker.answers = None;
        masker
    }

    #[test]
    fn without_a_thread_masks_are_computed_by_who_collects() {
        let mut masker = alone();
        (0..5).for_each(|seq| masker.submit(seq, constraint()));
        assert_eq!(collected(&mut masker), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_job_that_died_with_the_thread_is_an_error_of_its_request_alone() {
        let mut masker = alone();
        masker.submit(1, constraint());
        masker.submit(2, constraint());
        drop(masker.waiting.recv().unwrap());
        let answers: Vec<_> = std::iter::from_fn(|| masker.collect()).map(|masked| (masked.seq, masked.constraint.is_ok())).collect();
        assert_eq!(answers, [(2, true), (1, false)]);
    }

    #[test]
    fn a_constraint_that_fails_is_an_error_of_its_request_alone() {
        let mut masker = Masker::default();
        let mut broken = constraint();
        broken.advance(b'?' as u32).unwrap_err();
        masker.submit(1, broken);
        masker.submit(2, constraint());
        let answer = |masked: Masked| (masked.seq, masked.constraint.unwrap().mask().is_ok());
        let mut answers: Vec<_> = std::iter::from_fn(|| masker.collect()).map(answer).collect();
        answers.sort_unstable();
        assert_eq!(answers, [(1, false), (2, true)]);
    }

    #[test]
    fn dropping_it_ends_its_thread_with_jobs_left() {
        let mut masker = Masker::default();
        let first = constraint();
        (0..100).for_each(|seq| masker.submit(seq, first.fork().unwrap()));
        drop(masker);
    }
}
