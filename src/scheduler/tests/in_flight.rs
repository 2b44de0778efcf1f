//! Two steps in flight: a step is planned before the tokens of the previous one are known.

use super::*;
use crate::types::batch::Placeholder;

/// Starts the sampling of the oldest step in flight. The device samples all rows except those of
/// `on_host`.
fn sample(s: &mut Scheduler, plan: &mut StepPlan, on_host: &[u64]) {
    let sampled = plan.sequences.iter_mut().filter(|scheduled| scheduled.samples && !on_host.contains(&scheduled.seq.get()));
    (0..).zip(sampled).for_each(|(sample, scheduled)| scheduled.device_sample = Some(sample));
    s.set_device_samples(plan);
}

fn commit_all(s: &mut Scheduler, mut plan: StepPlan, outcome: impl Fn(u64) -> TokenOutcome) {
    s.mark_stale(&mut plan);
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, outcome(scheduled.seq.get()))).collect();
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}

fn token(_: u64) -> TokenOutcome {
    TokenOutcome::Token(9)
}

fn seqs(plan: &StepPlan) -> Vec<u64> {
    plan.sequences.iter().map(|scheduled| scheduled.seq.get()).collect()
}

/// Returns a scheduler with decoding sequences of 3 tokens that may have 30.
fn decoding(ids: &[u64]) -> Scheduler {
    let mut s = scheduler(16, 4, 32, 4, 10);
    s.reserve_steps(2).unwrap();
    ids.iter().for_each(|&id| add(&mut s, id, vec![0; 3], 30));
    let plan = s.schedule(|_| true).unwrap();
    commit_all(&mut s, plan, token);
    s
}

#[test]
fn the_next_step_has_placeholders_for_the_tokens_of_the_step_in_flight() {
    let mut s = decoding(&[1, 2]);
    let mut plan = s.schedule(|_| true).unwrap();
    assert!(plan.batch.placeholders.is_empty());
    for position in 4..12 {
        sample(&mut s, &mut plan, &[]);
        let next = s.schedule(|_| true).unwrap();
        assert_eq!(next.batch.placeholders, [0, 1].map(|i| Placeholder { token: i, sample: i }));
        assert_eq!(next.batch.positions, [position; 2]);
        commit_all(&mut s, plan, token);
        plan = next;
    }
    assert_eq!(s.find(seq_id(1)).unwrap().tokens.len(), 12);
}

#[test]
fn a_sequence_that_the_host_samples_is_left_out_of_the_next_step() {
    let mut s = decoding(&[1, 2, 3]);
    let mut plan = s.schedule(|_| true).unwrap();
    sample(&mut s, &mut plan, &[2]);
    let mut next = s.schedule(|_| true).unwrap();
    assert_eq!(seqs(&next), [1, 3]);
    commit_all(&mut s, plan, token);
    sample(&mut s, &mut next, &[]);
    let third = s.schedule(|_| true).unwrap();
    assert_eq!(seqs(&third), [1, 2, 3], "it continues with its token");
    assert_eq!(third.batch.placeholders.len(), 2);
    commit_all(&mut s, next, token);
    commit_all(&mut s, third, token);
}

#[test]
fn a_prompt_joins_and_continues_in_the_next_step() {
    let mut s = decoding(&[1]);
    let mut plan = s.schedule(|_| true).unwrap();
    sample(&mut s, &mut plan, &[]);
    add(&mut s, 2, vec![0; 15], 30);
    let mut next = s.schedule(|_| true).unwrap();
    assert_eq!((seqs(&next), next.batch.token_count()), (vec![1, 2], 11), "a decode and the first chunk");
    commit_all(&mut s, plan, token);
    sample(&mut s, &mut next, &[]);
    let third = s.schedule(|_| true).unwrap();
    assert_eq!((seqs(&third), third.batch.token_count()), (vec![1, 2], 6), "the second chunk follows the first one in flight");
    commit_all(&mut s, next, token);
    commit_all(&mut s, third, token);
    assert_eq!(s.find(seq_id(2)).unwrap().tokens.len(), 16);
}

#[test]
fn a_sequence_that_reaches_its_length_is_not_planned_again() {
    let mut s = scheduler(16, 4, 32, 4, 10);
    s.reserve_steps(2).unwrap();
    add(&mut s, 1, vec![0; 3], 5);
    let mut plan = s.schedule(|_| true).unwrap();
    sample(&mut s, &mut plan, &[]);
    let mut next = s.schedule(|_| true).unwrap();
    commit_all(&mut s, plan, token);
    sample(&mut s, &mut next, &[]);
    assert!(s.schedule(|_| true).is_none(), "the step in flight samples the fifth and last token");
    commit_all(&mut s, next, token);
    assert!(s.find(seq_id(1)).is_none());
}

#[test]
fn the_row_of_a_sequence_that_has_ended_or_changed_is_ignored() {
    type Change = fn(&mut Scheduler);
    let changes: [(Change, Option<usize>); 5] = [
        (|s| s.end(seq_id(1)), None),
        (|s| drop(s.remove(seq_id(1))), None),
        (|s| s.rewind(seq_id(1), 2).unwrap(), Some(2)),
        (|s| s.append(seq_id(1), &[7, 7], 30).unwrap(), Some(6)),
        (|s| assert!(s.schedule(|seq| seq != seq_id(1)).is_none()), Some(4)),
    ];
    for (change, len) in changes {
        let mut s = decoding(&[1]);
        let mut plan = s.schedule(|_| true).unwrap();
        sample(&mut s, &mut plan, &[]);
        change(&mut s);
        s.check();
        commit_all(&mut s, plan, token);
        assert_eq!(s.find(seq_id(1)).map(|sequence| sequence.tokens.len()), len);
    }
}

#[test]
fn the_next_row_of_a_sequence_that_ends_is_ignored_and_its_blocks_are_freed() {
    for outcome in [TokenOutcome::Stop(2), TokenOutcome::Fail] {
        let mut s = decoding(&[1, 2]);
        let mut plan = s.schedule(|_| true).unwrap();
        sample(&mut s, &mut plan, &[]);
        let next = s.schedule(|_| true).unwrap();
        assert_eq!(seqs(&next), [1, 2]);
        commit_all(&mut s, plan, |seq| if seq == 1 { outcome } else { token(seq) });
        assert!(s.find(seq_id(1)).is_none());
        assert_eq!(s.blocks.used_blocks(), 2, "the blocks of the other sequence, with one for its placeholder");
        commit_all(&mut s, next, token);
        assert_eq!(s.find(seq_id(2)).unwrap().tokens.len(), 6);
    }
}

#[test]
fn failed_steps_are_rolled_back_the_newest_first() {
    let mut s = decoding(&[1, 2]);
    let used = s.blocks.used_blocks();
    let mut plan = s.schedule(|_| true).unwrap();
    sample(&mut s, &mut plan, &[]);
    let next = s.schedule(|_| true).unwrap();
    assert!(s.blocks.used_blocks() > used, "the placeholders have a block each");
    s.rollback(next);
    s.check();
    let again = s.schedule(|_| true).unwrap();
    assert_eq!(again.batch.placeholders.len(), 2, "only the newest step has failed");
    s.rollback(again);
    s.rollback(plan);
    s.check();
    assert_eq!(s.blocks.used_blocks(), used);
    let plan = s.schedule(|_| true).unwrap();
    assert_eq!((plan.batch.positions.clone(), plan.batch.placeholders.len()), (vec![3, 3], 0));
    commit_all(&mut s, plan, token);
}

#[test]
fn a_step_may_sample_several_tokens_of_a_sequence() {
    let mut s = decoding(&[1, 2]);
    let plan = s.schedule(|_| true).unwrap();
    let sampled = [(1, 9), (1, 8), (1, 7), (2, 9)].map(|(seq, token)| sampled_token(seq_id(seq), TokenOutcome::Token(token)));
    let mut events = Vec::new();
    s.commit(plan, &sampled, &mut events);
    assert_eq!(events.len(), 4);
    s.check();
    assert_eq!(s.find(seq_id(1)).unwrap().tokens, [0, 0, 0, 9, 9, 8, 7]);
    assert_eq!(s.find(seq_id(2)).unwrap().tokens.len(), 5);
}

#[test]
fn a_sequence_does_not_return_to_a_block_that_a_failed_step_may_have_overwritten() {
    let mut s = decoding(&[1]);
    for _ in 0..2 {
        let plan = s.schedule(|_| true).unwrap();
        commit_all(&mut s, plan, token);
    }
    // This step computes the second token of a block, and the fork computes it again.
    let mut first = s.schedule(|_| true).unwrap();
    sample(&mut s, &mut first, &[]);
    s.fork(seq_id(1), None, seq_id(2), true).unwrap();
    let second = s.schedule(|_| true).unwrap();
    let copied: Vec<u32> = second.batch.copies.iter().map(|copy| copy.from).collect();
    assert_eq!((seqs(&second), copied.len()), (vec![1, 2], 1));
    assert!(second.batch.slots.iter().any(|slot| slot / 4 == copied[0]), "the fork writes the block that was copied");
    s.mark_stale(&mut first);
    s.commit(first, &[sampled_token(seq_id(1), token(1))], &mut Vec::new());
    s.check_with(&second.batch.copies);
    assert_eq!(s.find(seq_id(1)).unwrap().computed, 6);
    s.rollback(second);
    s.check();
    assert_eq!(s.find(seq_id(1)).unwrap().computed, 0, "it is recomputed");
    while let Some(plan) = s.schedule(|_| true) {
        commit_all(&mut s, plan, token);
    }
    assert_eq!(s.blocks().used_blocks(), 0);
}

#[test]
fn decodes_are_divided_among_the_stages_of_a_pipeline() {
    for (ids, stages, expected) in [
        (&[1, 2, 3, 4, 5][..], 2, &[&[1, 2, 3][..], &[4, 5]][..]),
        (&[1, 2, 3, 4, 5], 3, &[&[1, 2], &[3, 4], &[5]]),
        (&[1, 2], 3, &[&[1], &[2], &[]]),
    ] {
        let mut s = scheduler(16, 4, 32, 5, 10);
        s.reserve_steps(stages).unwrap();
        s.divide_decodes(stages);
        ids.iter().for_each(|&id| add(&mut s, id, vec![0; 3], 30));
        // The prompts are in one step.
        let plan = s.schedule(|_| true).unwrap();
        assert_eq!(seqs(&plan), ids);
        commit_all(&mut s, plan, token);
        for _ in 0..3 {
            let plans: Vec<StepPlan> = (0..stages).map_while(|_| s.schedule(|_| true)).collect();
            let planned: Vec<Vec<u64>> = plans.iter().map(seqs).collect();
            assert!(planned.iter().eq(expected.iter().filter(|seqs| !seqs.is_empty())), "{planned:?}");
            plans.into_iter().for_each(|plan| commit_all(&mut s, plan, token));
        }
    }
}
