//! Paused groups.

use super::*;

#[test]
fn a_paused_sequence_keeps_its_blocks_and_continues_without_recompute() {
    let mut s = scheduler(64, 8, 64, 8, 64);
    (1..=2).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    step(&mut s, TokenOutcome::Token(9));
    assert_eq!(step_with(&mut s, TokenOutcome::Token(9), |id| id != 1), [(2, 1)]);
    assert_eq!((s.paused(), s.waiting(), s.running(), s.get(seq_id(1)).unwrap().computed), (1, 1, 1, 20));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    assert_eq!((s.paused(), s.preemptions()), (0, 0));
}

#[test]
fn a_paused_sequence_does_not_block_other_sequences() {
    // The batch and the pool have room for one sequence. The older one is not ready.
    let mut s = scheduler(4, 8, 64, 1, 64);
    add(&mut s, 1, vec![0; 20], 32);
    step(&mut s, TokenOutcome::Token(9));
    add(&mut s, 2, vec![0; 20], 32);
    assert_eq!(step_with(&mut s, TokenOutcome::Token(9), |id| id != 1), [(2, 20)]);
    // The other sequence uses its blocks now. Its tokens are kept.
    assert_eq!((s.preemptions(), s.get(seq_id(1)).unwrap().tokens.len(), s.get(seq_id(1)).unwrap().computed), (1, 21, 0));
}

#[test]
fn a_sequence_that_is_ready_again_runs_before_younger_ones() {
    // The batch has room for one sequence, the pool for both.
    let mut s = scheduler(64, 8, 64, 1, 64);
    (1..=2).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    step(&mut s, TokenOutcome::Token(9));
    for tokens in 21..30 {
        let rows = step_with(&mut s, TokenOutcome::Token(9), |id| id != 1);
        assert_eq!((rows[0].0, s.paused()), (2, 1));
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
        assert_eq!(s.get(seq_id(1)).unwrap().tokens.len(), tokens + 1);
    }
    // The younger one kept its blocks each time.
    assert_eq!((s.preemptions(), s.get(seq_id(2)).unwrap().tokens.len()), (0, 29));
}

#[test]
fn sequences_that_are_not_ready_count_as_paused_even_if_none_is_admitted() {
    let mut s = scheduler(64, 8, 64, 2, 64);
    (1..=5).for_each(|id| add(&mut s, id, vec![0; 4], 60));
    step(&mut s, TokenOutcome::Token(9));
    assert_eq!(step_with(&mut s, TokenOutcome::Token(9), |id| id > 2).len(), 2);
    assert_eq!((s.paused(), s.running(), s.waiting()), (2, 2, 3));
    step_with(&mut s, TokenOutcome::Token(9), |id| id > 2);
    assert_eq!(s.paused(), 2);
}

#[test]
fn no_step_is_planned_while_no_sequence_is_ready() {
    let mut s = scheduler(64, 8, 64, 8, 64);
    (1..=3).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    assert!(step_with(&mut s, TokenOutcome::Token(9), |_| false).is_empty());
    assert_eq!((s.paused(), s.waiting(), s.blocks().used_blocks()), (3, 3, 0));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)).len(), 3);
}

/// Plans a step, rolls it back, and returns how often it called `ready`.
fn ready_calls(s: &mut Scheduler, among: Option<&[u64]>, ready: impl Fn(u64) -> bool) -> usize {
    let calls = std::cell::Cell::new(0);
    let ready = |seq: SeqId| {
        calls.set(calls.get() + 1);
        ready(seq.get())
    };
    let plan = match among {
        Some(ids) => s.schedule_among(&ids.iter().copied().map(seq_id).collect::<Vec<_>>(), ready),
        None => s.schedule(ready),
    };
    plan.into_iter().for_each(|plan| s.rollback(plan));
    s.check();
    calls.get()
}

#[test]
fn paused_sequences_add_no_cost_to_a_step() {
    let mut s = scheduler(64, 8, 64, 8, 64);
    (1..=1000).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    assert!(ready_calls(&mut s, None, |seq| seq == 1) >= 1000);
    assert_eq!(s.paused(), 999);
    for _ in 0..3 {
        assert!(ready_calls(&mut s, None, |seq| seq == 1) <= 2);
    }
    s.recheck_paused();
    assert!(ready_calls(&mut s, None, |seq| seq <= 2) >= 999);
    assert_eq!((s.paused(), s.running()), (998, 2), "sequences that are ready run");
    assert!(ready_calls(&mut s, None, |seq| seq <= 2) <= 4);
}

#[test]
fn a_step_of_chosen_sequences_keeps_the_queue_and_checks_no_other_sequence() {
    let mut s = scheduler(256, 8, 256, 4, 16);
    (1..=1000).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    step(&mut s, TokenOutcome::Token(9));
    assert_eq!(s.running(), 4);
    for chosen in [&[1, 2][..], &[3, 4], &[3], &[2, 4]] {
        assert!(ready_calls(&mut s, Some(chosen), |_| true) <= 2 * chosen.len());
        assert!(s.running_sequences().map(|sequence| sequence.id.get()).eq(chosen.iter().copied()));
        assert_eq!((s.paused(), s.waiting()), (0, 1000 - chosen.len()));
    }
    let plan = s.schedule(|_| true).unwrap();
    assert!(plan.sequences.iter().map(|scheduled| scheduled.seq.get()).eq(1..=4), "the smaller steps changed nothing");
    s.rollback(plan);
}
