//! Computation of token masks, concurrent with the forward pass, on one thread.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::Constraint;
use crate::error::{Error, Result};
use crate::sys::quiet::no_panic;
use crate::sys::threads;
use crate::types::SeqId;

/// The service that computes masks. Its thread starts with the first mask. If the thread could not
/// be started, or has died, `collect` computes them. Dropping the masker ends the thread after its
/// current mask.
pub struct Masker {
    jobs: Option<Sender<Job>>,
    /// Jobs that the thread has not started. Threads that wait for masks process them too.
    waiting: Receiver<Job>,
    done: Receiver<Masked>,
    /// Sender for the thread, until it is started.
    answers: Option<Sender<Masked>>,
    thread: Option<JoinHandle<()>>,
    /// Sequences whose masks have not been collected.
    pending: VecDeque<SeqId>,
}

struct Job {
    seq: SeqId,
    constraint: Constraint,
}

/// A constraint with its mask, or with the reason why it has none. An error if a defect destroyed
/// the constraint.
pub struct Masked {
    pub seq: SeqId,
    pub constraint: Result<Constraint>,
}

impl Job {
    fn run(mut self) -> Masked {
        // The result of `mask` is kept in the constraint and returned by the next call.
        let masked = no_panic(|| drop(self.constraint.mask()));
        Masked { seq: self.seq, constraint: masked.map(|()| self.constraint).map_err(|panic| lost(&panic)) }
    }
}

fn lost(why: &str) -> Error {
    Error::internal(format!("the grammar of this request was lost: {why}"))
}

impl Default for Masker {
    fn default() -> Masker {
        let (jobs, waiting) = unbounded();
        let (answers, done) = unbounded();
        Masker { jobs: Some(jobs), waiting, done, answers: Some(answers), thread: None, pending: VecDeque::new() }
    }
}

impl Masker {
    /// Starts the computation of the mask of a sequence's constraint. `collect` returns it.
    pub fn submit(&mut self, seq: SeqId, constraint: Constraint) {
        if let Some(answers) = self.answers.take() {
            self.start(answers);
        }
        self.pending.push_back(seq);
        if let Some(jobs) = &self.jobs {
            // `self.waiting` is a receiver of this channel, so the send cannot fail.
            let _ = jobs.send(Job { seq, constraint });
        }
    }

    fn start(&mut self, answers: Sender<Masked>) {
        let jobs = self.waiting.clone();
        let work = move || {
            for masked in jobs.iter().map(Job::run) {
                if answers.send(masked).is_err() {
                    break; // the masker has been dropped
                }
            }
        };
        self.thread = threads::spawn("pagedllm-masks".into(), work).ok();
    }

    /// Returns the next computed mask, in no particular order, or computes one. None: all masks
    /// have been collected.
    pub fn collect(&mut self) -> Option<Masked> {
        if self.pending.is_empty() {
            return None;
        }
        let ready = self.done.try_recv().or_else(|_| self.waiting.try_recv().map(Job::run));
        let masked = match ready.ok().or_else(|| self.done.recv().ok()) {
            Some(masked) => masked,
            // The thread has died, and its current job is lost.
            None => Masked { seq: self.pending[0], constraint: Err(lost("the thread that computes masks has died")) },
        };
        self.pending.retain(|&seq| seq != masked.seq);
        Some(masked)
    }
}

impl Drop for Masker {
    fn drop(&mut self) {
        self.jobs = None;
        // Uncollected masks are discarded.
        while self.waiting.try_recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::grammar::tests::byte_grammars;
    use crate::types::options::Grammar;

    fn constraint() -> Constraint {
        byte_grammars().compile(&Grammar::Choice(vec!["yes".into(), "no".into()])).unwrap()
    }

    fn collected(masker: &mut Masker) -> Vec<u64> {
        let mut seqs = Vec::new();
        while let Some(masked) = masker.collect() {
            let mut constraint = masked.constraint.unwrap();
            assert_eq!(constraint.mask().unwrap().iter().map(|word| word.count_ones()).sum::<u32>(), 4, "the tokens y, n, yes and no");
            seqs.push(masked.seq.get());
        }
        seqs.sort_unstable();
        seqs
    }

    #[test]
    fn each_submitted_constraint_is_collected_once_with_its_mask() {
        let mut masker = Masker::default();
        let first = constraint();
        for round in 0..3 {
            (0..20).for_each(|seq| masker.submit(SeqId::from_raw(round * 100 + seq), first.fork().unwrap()));
            assert_eq!(collected(&mut masker), (0..20).map(|seq| round * 100 + seq).collect::<Vec<_>>());
        }
        assert!(masker.collect().is_none());
    }

    /// Returns a masker whose thread could not be started.
    fn masker_without_thread() -> Masker {
        let mut masker = Masker::default();
        masker.answers = None;
        masker
    }

    #[test]
    fn collect_computes_masks_if_there_is_no_thread() {
        let mut masker = masker_without_thread();
        (0..5).for_each(|seq| masker.submit(SeqId::from_raw(seq), constraint()));
        assert_eq!(collected(&mut masker), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_job_lost_with_its_thread_fails_only_its_request() {
        let mut masker = masker_without_thread();
        masker.submit(SeqId::from_raw(1), constraint());
        masker.submit(SeqId::from_raw(2), constraint());
        drop(masker.waiting.recv().unwrap());
        let answers: Vec<_> = std::iter::from_fn(|| masker.collect()).map(|masked| (masked.seq.get(), masked.constraint.is_ok())).collect();
        assert_eq!(answers, [(2, true), (1, false)]);
    }

    #[test]
    fn a_failed_constraint_fails_only_its_request() {
        let mut masker = Masker::default();
        let mut broken = constraint();
        broken.advance(b'?' as u32).unwrap_err();
        masker.submit(SeqId::from_raw(1), broken);
        masker.submit(SeqId::from_raw(2), constraint());
        let answer = |masked: Masked| (masked.seq.get(), masked.constraint.unwrap().mask().is_ok());
        let mut answers: Vec<_> = std::iter::from_fn(|| masker.collect()).map(answer).collect();
        answers.sort_unstable();
        assert_eq!(answers, [(1, false), (2, true)]);
    }

    #[test]
    fn dropping_the_masker_ends_its_thread_with_pending_jobs() {
        let mut masker = Masker::default();
        let first = constraint();
        (0..100).for_each(|seq| masker.submit(SeqId::from_raw(seq), first.fork().unwrap()));
        drop(masker);
    }
}
