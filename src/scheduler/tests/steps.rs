//! The composition of steps, preemption, and admission.

use super::*;
use crate::types::outputs::FinishReason;
use crate::types::timing::SequenceStats;

#[test]
fn prefill_chunks_and_decode_tokens_share_a_step() {
    let mut s = scheduler(64, 16, 32, 8, 10);
    add(&mut s, 1, vec![0; 4], 100);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 4)]);
    add(&mut s, 2, vec![0; 25], 100);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 10)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 10)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 5)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
}

#[test]
fn only_the_row_that_reads_the_newest_token_is_sampled() {
    let mut s = scheduler(64, 16, 32, 8, 10);
    add(&mut s, 1, vec![0; 15], 100);
    let plan = s.schedule(|_| true).unwrap();
    assert_eq!((plan.sampled().count(), plan.batch.logit_rows.len()), (0, 0));
    s.commit(plan, &[], &mut Vec::new());
    let plan = s.schedule(|_| true).unwrap();
    assert_eq!(plan.batch.logit_rows, [4]);
    s.rollback(plan);
}

#[test]
fn a_batch_never_exceeds_its_tokens_or_sequences() {
    let mut s = scheduler(640, 16, 20, 3, 20);
    (1..=9).for_each(|id| add(&mut s, id, vec![0; 9], 50));
    for _ in 0..30 {
        let rows = step(&mut s, TokenOutcome::Token(9));
        assert!(rows.iter().map(|(_, rows)| rows).sum::<usize>() <= 20);
        assert!(s.running() <= 3);
    }
}

#[test]
fn the_youngest_is_preempted_and_rescheduled_before_waiting_requests() {
    let mut s = scheduler(5, 8, 64, 8, 64);
    (1..=3).for_each(|id| add(&mut s, id, vec![0; 15], 32));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 15), (2, 15)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    // Both need a third block and one is free: the younger one is preempted and keeps its tokens.
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
    assert_eq!((s.preemptions(), s.waiting(), s.get(seq_id(2)).unwrap().tokens.len()), (1, 2, 17));
    s.remove(seq_id(1));
    assert_eq!(step(&mut s, TokenOutcome::Token(9))[0], (2, 17));
}

#[test]
fn rollback_restores_all_lengths_and_the_same_step_is_planned() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    add(&mut s, 1, vec![5; 11], 32);
    let first = s.schedule(|_| true).unwrap();
    let batch = first.batch.clone();
    s.rollback(first);
    s.check();
    let again = s.schedule(|_| true).unwrap();
    assert_eq!(again.batch, batch);
    s.rollback(again);
}

#[test]
fn all_blocks_are_freed_after_length_stop_and_failure() {
    for (outcome, steps, reason) in [
        (TokenOutcome::Token(1), 3, FinishReason::Length),
        (TokenOutcome::Stop(2), 1, FinishReason::Stop),
        (TokenOutcome::Fail, 1, FinishReason::Error),
    ] {
        let mut s = scheduler(16, 8, 64, 8, 64);
        add(&mut s, 1, vec![0; 9], 12);
        let mut events = Vec::new();
        for _ in 0..steps {
            let plan = s.schedule(|_| true).unwrap();
            s.commit(plan, &[sampled_token(seq_id(1), outcome)], &mut events);
        }
        assert_eq!(events, [Event::Advanced { sampled_token: 0, finish: Some(reason), stats: SequenceStats::default() }]);
        assert_eq!(s.blocks().free_blocks(), 16);
        s.check();
    }
}

/// Long random traces: all invariants hold after every operation, and every sequence ends.
#[test]
fn invariants_hold_over_long_random_traces() {
    for seed in 0..20u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1);
        let block_size = 8 << random.below(3);
        let max_len = 8 * block_size;
        let mut s = scheduler(8 + random.below(24), block_size, 16 + random.below(64), 1 + random.below(12), 1 + random.below(64));
        let (mut next, mut live) = (1, Vec::new());
        for _ in 0..3000 {
            match random.below(10) {
                0 => {
                    let prompt = vec![0; 1 + random.below(max_len - 1)];
                    let len = (prompt.len() + 1 + random.below(40)).min(max_len);
                    add(&mut s, next, prompt, len);
                    live.push(next);
                    next += 1;
                }
                1 if !live.is_empty() => {
                    s.remove(seq_id(live.swap_remove(random.below(live.len()))));
                }
                _ => {
                    let unready = random.below(6) as u64;
                    s.recheck_paused();
                    if let Some(plan) = s.schedule(|id| unready == 0 || id.get() % 5 != unready) {
                        s.check();
                        assert!(
                            plan.sequences.iter().all(|scheduled| unready == 0 || scheduled.seq.get() % 5 != unready),
                            "only ready sequences run"
                        );
                        match random.below(8) {
                            0 => s.rollback(plan),
                            _ => {
                                let outcome = if random.below(20) == 0 { TokenOutcome::Stop(1) } else { TokenOutcome::Token(1) };
                                let sampled: Vec<_> = plan.sampled().map(|p| sampled_token(p.seq, outcome)).collect();
                                let mut events = Vec::new();
                                s.commit(plan, &sampled, &mut events);
                                live.retain(|id| s.get(seq_id(*id)).is_ok());
                            }
                        }
                    }
                }
            }
            s.check();
        }
        let mut steps = 0;
        while !step(&mut s, TokenOutcome::Token(1)).is_empty() {
            steps += 1;
            assert!(steps < 1_000_000, "starvation");
        }
        assert_eq!(s.blocks().free_blocks(), s.blocks().total());
    }
}

#[test]
fn admission_reserves_blocks_for_unfinished_prompts_and_the_watermark() {
    // 100 blocks of 16 tokens. Each prompt needs 60 blocks, so two of them do not fit.
    let mut s = scheduler(100, 16, 64, 8, 32);
    (1..=4).for_each(|id| add(&mut s, id, vec![0; 960], 961));
    while !step(&mut s, TokenOutcome::Token(1)).is_empty() {
        assert!(s.running() <= 1);
    }
    assert_eq!(s.preemptions(), 0);
    // A prompt of 99 blocks and one of 1 block fit 100 blocks, but not with the watermark of 1.
    let mut s = scheduler(100, 16, 4096, 8, 4096);
    add(&mut s, 1, vec![0; 10], 20);
    add(&mut s, 2, vec![0; 99 * 16], 99 * 16 + 1);
    step(&mut s, TokenOutcome::Token(1));
    assert_eq!((s.running(), s.waiting()), (1, 1));
    add(&mut s, 3, vec![0; 10], 20);
    step(&mut s, TokenOutcome::Token(1));
    assert_eq!(s.running(), 1, "first come, first served: no request overtakes");
}
