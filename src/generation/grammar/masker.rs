//! Computation of token masks on threads of their own, concurrent with the forward pass.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, TryRecvError, never, select, unbounded};

use super::pending::SlowMask;
use super::{Constraint, GrammarPace};
use crate::error::{Error, Result};
use crate::sys::quiet::no_panic;
use crate::sys::threads;
use crate::types::SeqId;

/// The number of a mask. Masks are numbered in the order in which they are needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct MaskId(pub u64);

/// The service that computes masks. Its threads start with the first mask. If the system starts no
/// threads, `submit` computes the masks. Dropping the masker ends each thread after its current
/// mask.
pub struct Masker {
    /// Masks of grammars whose last masks took little time.
    quick: Lane,
    /// Masks of new grammars. The threads of `quick`, except one, compute them when no mask of a
    /// quick grammar waits.
    new: Lane,
    /// Masks of slow grammars, replays, and tokens of the host. Its thread has a low priority and
    /// takes the grammars in turn.
    slow: Lane,
    answers: Sender<Masked>,
    done: Receiver<Masked>,
    /// Masks that were received and not taken.
    received: Vec<Masked>,
    /// Masks that need not be computed.
    cancelled: Arc<Cancelled>,
    /// Whether masks wake the stepping thread, because some are late.
    wakes: Arc<AtomicBool>,
    wake: Wake,
}

/// Wakes the stepping thread.
type Wake = Arc<dyn Fn() + Send + Sync>;

/// The ids of cancelled masks that have not been answered.
#[derive(Default)]
struct Cancelled(Mutex<Vec<MaskId>>);

impl Cancelled {
    fn lock(&self) -> MutexGuard<'_, Vec<MaskId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an id. Without memory, the mask is computed and dropped.
    fn add(&self, id: MaskId) {
        let mut ids = self.lock();
        if ids.try_reserve(1).is_ok() {
            ids.push(id);
        }
    }

    fn has(&self, id: MaskId) -> bool {
        self.lock().contains(&id)
    }

    fn remove(&self, id: MaskId) {
        self.lock().retain(|&cancelled| cancelled != id);
    }
}

/// A queue of jobs, and the threads that process them.
#[derive(Default)]
struct Lane {
    jobs: Option<Sender<Job>>,
    waiting: Option<Receiver<Job>>,
    threads: Vec<JoinHandle<()>>,
}

/// Waits for a job and returns the next one of a quick thread. `None` if the masker has been
/// dropped.
fn next_quick(quick: &Receiver<Job>, new: &Receiver<Job>) -> Option<Job> {
    quick.try_recv().ok().or_else(|| {
        select! {
            recv(quick) -> job => job.ok(),
            recv(new) -> job => job.ok(),
        }
    })
}

/// The jobs of the slow thread, by grammar. Each grammar in turn has one mask computed, so that the
/// masks of one grammar do not delay those of the others.
#[derive(Default)]
struct Turns(VecDeque<(Arc<GrammarPace>, VecDeque<Job>)>);

impl Turns {
    /// Waits for a job and returns the next one. `None` if the masker has been dropped.
    fn next(&mut self, jobs: &Receiver<Job>) -> Option<Job> {
        if self.0.is_empty() {
            self.insert(jobs.recv().ok()?);
        }
        loop {
            match jobs.try_recv() {
                Ok(job) => self.insert(job),
                Err(TryRecvError::Empty) => return self.take(),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn insert(&mut self, job: Job) {
        let Some(pace) = job.constraint.as_ref().map(Constraint::pace) else { return };
        match self.0.iter_mut().find(|(grammar, _)| Arc::ptr_eq(grammar, &pace)) {
            Some((_, waiting)) => waiting.push_back(job),
            None => self.0.push_back((pace, VecDeque::from([job]))),
        }
    }

    fn take(&mut self) -> Option<Job> {
        let (pace, mut waiting) = self.0.pop_front()?;
        let job = waiting.pop_front();
        if !waiting.is_empty() {
            self.0.push_back((pace, waiting));
        }
        job
    }
}

/// A mask to compute. The drop of a job answers it in any case.
struct Job {
    id: MaskId,
    seq: SeqId,
    /// `None` after the answer.
    constraint: Option<Constraint>,
    answers: Sender<Masked>,
}

/// A constraint with its mask, or with the reason why it has none. An error if a defect destroyed
/// the constraint.
pub struct Masked {
    pub id: MaskId,
    pub seq: SeqId,
    pub constraint: Result<Constraint>,
    /// Whether only an end-of-sequence token can follow the pending token, if there was one.
    pub complete: Result<bool>,
}

impl Job {
    /// Computes the mask. If this takes long, a quick lane passes the job to `slow`. The first mask
    /// of a slow grammar shows that those behind it take long, too.
    fn run(mut self, slow: Option<&Sender<Job>>, cancelled: &Cancelled) {
        if cancelled.has(self.id) {
            return; // the drop answers
        }
        let Some(mut constraint) = self.constraint.take() else { return };
        let start = threads::cpu_time();
        let masked = no_panic(|| {
            if slow.is_some() && (constraint.is_slow() || !constraint.try_catch_up()) {
                return None;
            }
            let _lock = slow.is_none().then(|| SlowMask::new(constraint.pace()));
            let complete = constraint.catch_up();
            if slow.is_some() && !constraint.try_mask() {
                return None;
            }
            // The result of `mask` is kept in the constraint and returned by the next call.
            drop(constraint.mask());
            constraint.record_time(threads::cpu_time() - start);
            Some(complete)
        });
        match masked {
            Ok(Some(complete)) => self.answer(Ok(constraint), complete),
            Ok(None) => {
                self.constraint = Some(constraint);
                if let Some(slow) = slow {
                    // The masker has been dropped if this fails.
                    let _ = slow.send(self);
                }
            }
            Err(panic) => self.answer(Err(lost(&panic)), Err(lost(&panic))),
        }
    }

    fn answer(&self, constraint: Result<Constraint>, complete: Result<bool>) {
        // The masker has been dropped if this fails.
        let _ = self.answers.send(Masked { id: self.id, seq: self.seq, constraint, complete });
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.constraint.take().is_some() {
            let error = lost("the thread that computes masks has ended");
            self.answer(Err(error.clone()), Err(error));
        }
    }
}

fn lost(why: &str) -> Error {
    Error::internal(format!("the grammar of this request was lost: {why}"))
}

impl Lane {
    /// Creates a lane without threads.
    fn new() -> Lane {
        let (jobs, waiting) = unbounded();
        Lane { jobs: Some(jobs), waiting: Some(waiting), threads: Vec::new() }
    }

    /// Adds a thread, which calls `work` with the jobs. Does nothing if the system starts none.
    fn start(&mut self, name: &str, work: impl FnOnce(Receiver<Job>) + Send + 'static) {
        let Some(jobs) = self.waiting.clone() else { return };
        self.threads.extend(threads::spawn(name.into(), move || work(jobs)));
    }

    fn stop(&mut self) {
        self.jobs = None;
        // Jobs that have not begun are dropped.
        self.waiting.take().iter().for_each(|waiting| waiting.try_iter().for_each(drop));
    }

    fn join(&mut self) {
        // Panics of jobs are caught.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Masker {
    /// Number of threads that also compute the masks of new grammars. Two threads compute the masks
    /// of a batch in about the time of its forward pass. One more thread computes only those of
    /// quick grammars.
    const NEW_THREADS: usize = 2;

    /// Creates a masker whose late masks call `wake`, and reserves memory for `seqs` masks.
    pub fn new(seqs: usize, wake: impl Fn() + Send + Sync + 'static) -> Result<Masker> {
        let (answers, done) = unbounded();
        let (quick, new, slow, mut received) = (Lane::new(), Lane::new(), Lane::new(), Vec::new());
        received.try_reserve(seqs)?;
        let (cancelled, wakes) = (Arc::default(), Arc::default());
        Ok(Masker { quick, new, slow, answers, done, received, cancelled, wakes, wake: Arc::new(wake) })
    }

    /// Starts the computation of the mask of a sequence's constraint.
    pub fn submit(&mut self, id: MaskId, seq: SeqId, constraint: Constraint) {
        self.start_threads();
        let (lane, threads) = match (constraint.is_slow(), constraint.is_proven()) {
            (true, _) => (&self.slow, &self.slow.threads),
            (false, true) => (&self.quick, &self.quick.threads),
            (false, false) => (&self.new, &self.quick.threads),
        };
        let job = Job { id, seq, constraint: Some(constraint), answers: self.answers.clone() };
        match &lane.jobs {
            // The lane holds a receiver, so the send cannot fail.
            Some(jobs) if !threads.is_empty() => drop(jobs.send(job)),
            // A step that takes longer is better than none.
            _ => job.run(None, &self.cancelled),
        }
    }

    /// Cancels a mask that has not been taken. Its constraint is lost.
    pub fn cancel(&mut self, id: MaskId) {
        if !self.has(id) {
            self.cancelled.add(id);
        }
    }

    fn start_threads(&mut self) {
        if !self.slow.threads.is_empty() {
            return;
        }
        let (waker, cancelled) = (self.waker(), self.cancelled.clone());
        self.slow.start("pagedllm-slow", move |jobs| {
            threads::lower_priority();
            let mut turns = Turns::default();
            while let Some(job) = turns.next(&jobs) {
                job.run(None, &cancelled);
                waker();
            }
        });
        let Some(slow) = self.slow.jobs.clone().filter(|_| !self.slow.threads.is_empty()) else { return };
        for thread in 0..=Self::NEW_THREADS {
            let (slow, waker, cancelled) = (slow.clone(), self.waker(), self.cancelled.clone());
            // The last thread has only masks of quick grammars, so that they never wait for a slow
            // one.
            let new = self.new.waiting.clone().filter(|_| thread < Self::NEW_THREADS).unwrap_or_else(never);
            self.quick.start("pagedllm-masks", move |jobs| {
                while let Some(job) = next_quick(&jobs, &new) {
                    job.run(Some(&slow), &cancelled);
                    waker();
                }
            });
        }
    }

    /// Returns a function that wakes the stepping thread if it waits for late masks.
    fn waker(&self) -> impl Fn() + Send + use<> {
        let (wakes, wake) = (self.wakes.clone(), self.wake.clone());
        move || {
            if wakes.load(SeqCst) {
                wake();
            }
        }
    }

    /// Sets whether each later mask wakes the stepping thread.
    pub fn set_wakes(&self, wakes: bool) {
        self.wakes.store(wakes, SeqCst);
    }

    /// Receives masks until all of `ids` have come, or until `timeout` has passed.
    pub fn wait(&mut self, ids: &[MaskId], timeout: Option<Duration>) {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        // Answers of cancelled masks are among them.
        while self.received.try_reserve(1).is_ok()
            && let Ok(masked) = self.done.try_recv()
        {
            self.received.push(masked);
        }
        let mut missing = ids.iter().filter(|&&id| !self.has(id)).count();
        while missing > 0 && self.received.try_reserve(1).is_ok() {
            let masked = match until {
                Some(until) => self.done.recv_deadline(until).ok(),
                None => self.done.recv().ok(),
            };
            let Some(masked) = masked else { return };
            missing -= usize::from(ids.contains(&masked.id));
            self.received.push(masked);
        }
    }

    /// Returns whether the mask has been received.
    pub fn has(&self, id: MaskId) -> bool {
        self.received.iter().any(|masked| masked.id == id)
    }

    /// Takes a mask that has been received.
    pub fn take(&mut self, id: MaskId) -> Option<Masked> {
        let place = self.received.iter().position(|masked| masked.id == id)?;
        Some(self.received.swap_remove(place))
    }

    /// Drops all masks that have been received, except those of `ids`.
    pub fn retain(&mut self, ids: impl Fn(MaskId) -> bool) {
        let cancelled = &self.cancelled;
        self.received.retain(|masked| {
            let stays = ids(masked.id);
            if !stays {
                cancelled.remove(masked.id);
            }
            stays
        });
    }
}

impl Drop for Masker {
    fn drop(&mut self) {
        self.quick.stop();
        self.new.stop();
        self.slow.stop();
        // Quick threads hold a sender of the slow lane, so they end first.
        self.quick.join();
        self.slow.join();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::generation::grammar::tests::{byte_grammars, lose_lexer};
    use crate::types::options::Grammar;

    fn constraint() -> Constraint {
        byte_grammars().compile(&Grammar::Choice(vec!["yes".into(), "no".into()])).unwrap()
    }

    fn masker() -> Masker {
        Masker::new(8, || {}).unwrap()
    }

    fn submit(masker: &mut Masker, id: u64, constraint: Constraint) {
        masker.submit(MaskId(id), SeqId::from_raw(id + 100), constraint);
    }

    /// Waits for the masks and returns how many tokens each allows. `None`: its request has failed.
    fn collected(masker: &mut Masker, ids: impl Iterator<Item = u64>) -> Vec<Option<u32>> {
        let ids: Vec<_> = ids.map(MaskId).collect();
        masker.wait(&ids, None);
        let allowed = |mask: &[u32]| mask.iter().map(|word| word.count_ones()).sum();
        ids.iter()
            .map(|&id| {
                let masked = masker.take(id).unwrap();
                assert_eq!(masked.seq.get(), id.0 + 100);
                assert!(!masker.has(id));
                masked.constraint.ok().and_then(|mut constraint| constraint.mask().ok().map(allowed))
            })
            .collect()
    }

    #[test]
    fn each_submitted_constraint_is_returned_once_with_its_mask() {
        let mut masker = masker();
        let first = constraint();
        for round in 0..3 {
            (0..20).for_each(|id| submit(&mut masker, round * 100 + id, first.fork().unwrap()));
            assert_eq!(collected(&mut masker, (0..20).map(|id| round * 100 + id)), vec![Some(4); 20], "the tokens y, n, yes and no");
        }
    }

    #[test]
    fn submit_computes_masks_if_there_are_no_threads() {
        let mut masker = masker();
        masker.quick.waiting = None;
        masker.slow.waiting = None;
        (0..5).for_each(|id| submit(&mut masker, id, constraint()));
        assert!((0..5).all(|id| !masker.has(MaskId(id))));
        assert_eq!(collected(&mut masker, 0..5), [Some(4); 5]);
    }

    #[test]
    fn a_dropped_job_fails_only_its_request() {
        let mut masker = masker();
        drop(Job { id: MaskId(1), seq: SeqId::from_raw(101), constraint: Some(constraint()), answers: masker.answers.clone() });
        submit(&mut masker, 2, constraint());
        assert_eq!(collected(&mut masker, 1..3), [None, Some(4)]);
    }

    #[test]
    fn a_failed_constraint_fails_only_its_request() {
        let mut masker = masker();
        let mut broken = constraint();
        broken.advance(b'?' as u32).unwrap_err();
        submit(&mut masker, 1, broken);
        submit(&mut masker, 2, constraint());
        assert_eq!(collected(&mut masker, 1..3), [None, Some(4)]);
    }

    #[test]
    fn a_lost_lexer_is_replaced_on_the_thread_for_slow_masks() {
        let mut masker = masker();
        let grammars = byte_grammars();
        let grammar = Grammar::Choice(vec!["yes".into(), "no".into()]);
        let (mut first, mut second) = (grammars.compile(&grammar).unwrap(), grammars.compile(&grammar).unwrap());
        second.advance(b'y' as u32).unwrap();
        lose_lexer(&mut first);
        submit(&mut masker, 1, second);
        // The failure of a token is not explained in the step.
        assert!(!first.try_advance(b'n' as u32).unwrap() && !first.has_mask());
        submit(&mut masker, 2, first);
        masker.wait(&[MaskId(1), MaskId(2)], None);
        assert!(masker.received.iter().all(|masked| masked.complete == Ok(false)));
        assert_eq!(collected(&mut masker, 1..3), [Some(1); 2], "e, or o");
    }

    #[test]
    fn a_pending_token_is_consumed_before_the_mask() {
        let mut masker = masker();
        let mut constraint = byte_grammars().compile(&Grammar::Choice(vec!["y".into(), "no".into()])).unwrap();
        let (mut other, mut wrong) = (constraint.fork().unwrap(), constraint.fork().unwrap());
        constraint.advance_later(b'y' as u32).unwrap();
        other.advance_later(b'n' as u32).unwrap();
        wrong.advance_later(b'z' as u32).unwrap();
        for (id, constraint) in [(1, constraint), (2, other), (3, wrong)] {
            submit(&mut masker, id, constraint);
        }
        masker.wait(&[MaskId(1), MaskId(2), MaskId(3)], None);
        let complete = |id| masker.received.iter().find(|masked| masked.id == MaskId(id)).unwrap().complete.clone();
        assert_eq!((complete(1), complete(2)), (Ok(true), Ok(false)));
        let error = complete(3).unwrap_err();
        assert!(error.message().contains("token 122 (\"z\") is not allowed by the grammar at the start of the output"), "{error}");
    }

    #[test]
    fn late_masks_wake_the_stepping_thread() {
        let wakes = Arc::new(AtomicUsize::new(0));
        let count = wakes.clone();
        let mut masker = Masker::new(8, move || {
            count.fetch_add(1, SeqCst);
        })
        .unwrap();
        submit(&mut masker, 1, constraint());
        collected(&mut masker, 1..2);
        assert_eq!(wakes.load(SeqCst), 0);
        masker.set_wakes(true);
        submit(&mut masker, 2, constraint());
        while wakes.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(collected(&mut masker, 2..3), [Some(4)]);
    }

    #[test]
    fn dropping_the_masker_ends_its_threads_with_pending_jobs() {
        let mut masker = masker();
        let first = constraint();
        (0..100).for_each(|id| submit(&mut masker, id, first.fork().unwrap()));
        drop(masker);
    }

    #[test]
    fn a_cancelled_mask_is_answered_without_its_computation() {
        let (answers, done) = unbounded();
        let job = |id| Job { id: MaskId(id), seq: SeqId::from_raw(1), constraint: Some(constraint()), answers: answers.clone() };
        let cancelled = Cancelled::default();
        cancelled.add(MaskId(2));
        job(1).run(None, &cancelled);
        job(2).run(None, &cancelled);
        let answers: Vec<_> = done.try_iter().map(|masked| (masked.id.0, masked.constraint.is_ok())).collect();
        assert_eq!(answers, [(1, true), (2, false)]);
        cancelled.remove(MaskId(2));
        assert!(!cancelled.has(MaskId(2)));
    }

    #[test]
    fn masks_of_new_grammars_do_not_delay_those_of_quick_ones() {
        let ((quick, first), (new, second)) = (unbounded(), unbounded());
        let (answers, _done) = unbounded();
        let job = |id| {
            let constraint = Some(constraint());
            Job { id: MaskId(id), seq: SeqId::from_raw(id), constraint, answers: answers.clone() }
        };
        (1..=2).for_each(|id| new.send(job(id)).unwrap());
        (3..=4).for_each(|id| quick.send(job(id)).unwrap());
        let next = || next_quick(&first, &second).map(|job| job.id.0);
        assert_eq!([next(), next(), next(), next()], [3, 4, 1, 2].map(Some));
        drop((quick, new));
        assert_eq!(next(), None);
    }

    #[test]
    fn the_slow_thread_takes_the_grammars_in_turn() {
        let (jobs, waiting) = unbounded();
        let (answers, _done) = unbounded();
        let (busy, other) = (constraint(), constraint());
        let job = |id, constraint: &Constraint| {
            let constraint = Some(constraint.fork().unwrap());
            Job { id: MaskId(id), seq: SeqId::from_raw(id), constraint, answers: answers.clone() }
        };
        (1..=4).for_each(|id| jobs.send(job(id, &busy)).unwrap());
        (5..=6).for_each(|id| jobs.send(job(id, &other)).unwrap());
        let mut turns = Turns::default();
        let mut next = || turns.next(&waiting).map(|job| job.id.0);
        assert_eq!([next(), next()], [Some(1), Some(5)]);
        jobs.send(job(7, &busy)).unwrap();
        assert_eq!((0..5).map(|_| next()).collect::<Vec<_>>(), [2, 6, 3, 4, 7].map(Some));
        jobs.send(job(8, &busy)).unwrap();
        drop(jobs);
        assert_eq!(turns.next(&waiting).map(|job| job.id.0), None, "the masker has been dropped");
    }

    #[test]
    fn cancelled_masks_leave_nothing_behind() {
        let mut masker = masker();
        (0..50).for_each(|id| submit(&mut masker, id, constraint()));
        (10..50).for_each(|id| masker.cancel(MaskId(id)));
        assert_eq!(collected(&mut masker, 0..10), [Some(4); 10]);
        let all: Vec<_> = (10..50).map(MaskId).collect();
        masker.wait(&all, None);
        masker.retain(|_| false);
        assert_eq!((masker.received.len(), masker.cancelled.lock().len()), (0, 0));
    }

    /// The first mask shows that the grammar is slow. The masks behind it leave the lane for
    /// others.
    #[test]
    fn masks_of_a_slow_grammar_leave_the_quick_lane() {
        let (answers, done) = unbounded();
        let (slow, passed) = unbounded();
        let first = constraint();
        let second = first.fork().unwrap();
        first.record_time(Duration::from_secs(1));
        let job = Job { id: MaskId(2), seq: SeqId::from_raw(2), constraint: Some(second), answers };
        job.run(Some(&slow), &Cancelled::default());
        assert_eq!((passed.len(), done.len()), (1, 0));
        passed.recv().unwrap().run(None, &Cancelled::default());
        assert_eq!(done.len(), 1);
    }

    #[test]
    fn the_quick_lane_consumes_one_token_of_a_quick_grammar() {
        let (answers, done) = unbounded();
        let (slow, passed) = unbounded();
        let run = |tokens: &str, is_proven: bool, slow_mask: bool| {
            let mut constraint = constraint();
            (0..4).filter(|_| is_proven).for_each(|_| constraint.record_time(Duration::ZERO));
            tokens.bytes().for_each(|token| constraint.advance_later(token as u32).unwrap());
            let _other = slow_mask.then(|| SlowMask::new(constraint.pace()));
            let job = Job { id: MaskId(1), seq: SeqId::from_raw(1), constraint: Some(constraint), answers: answers.clone() };
            job.run(Some(&slow), &Cancelled::default());
            (passed.len(), done.len())
        };
        assert_eq!(run("y", true, false), (0, 1));
        assert_eq!(run("ye", true, false), (1, 1), "several tokens");
        assert_eq!(run("y", true, true), (2, 1), "the slow thread may hold the lock");
        assert_eq!(run("y", false, false), (3, 1), "the grammar may be slow");
    }
}
