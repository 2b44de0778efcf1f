//! The prediction of the next step.

use super::*;

/// Plans a step like an engine whose device works ahead, and returns the predicted slots. If
/// `is_ahead` is set, the device has started this step.
fn predicted_step(s: &mut Scheduler, is_ahead: bool) -> (StepPlan, Vec<(u64, u32)>) {
    let mut plan = if is_ahead { s.schedule_lookahead(|_| true) } else { s.schedule(|_| true) }.unwrap();
    s.reserve_lookahead(&mut plan);
    let predicted = plan.sequences.iter().map(|scheduled| scheduled.seq.get()).zip(plan.batch.next_slots.iter().copied()).collect();
    (plan, predicted)
}

fn commit_all(s: &mut Scheduler, plan: StepPlan, outcome: impl Fn(u64) -> TokenOutcome) {
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, outcome(scheduled.seq.get()))).collect();
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}

#[test]
fn the_predicted_step_is_the_next_step() {
    let mut s = scheduler(64, 4, 32, 8, 10);
    for (id, len, max_len) in [(1, 3, 20), (2, 6, 11), (3, 4, 9)] {
        add(&mut s, id, vec![0; len], max_len);
    }
    let (prompts, predicted) = predicted_step(&mut s, false);
    assert!(predicted.is_empty(), "no sequence decodes yet");
    commit_all(&mut s, prompts, |_| TokenOutcome::Token(9));
    let (mut plan, mut predicted) = predicted_step(&mut s, false);
    let mut ended = Vec::new();
    while predicted.iter().any(|&(_, slot)| slot != NO_SLOT) {
        ended.extend(predicted.iter().filter(|(_, slot)| *slot == NO_SLOT).map(|(seq, _)| *seq));
        commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
        let before = std::mem::take(&mut predicted);
        (plan, predicted) = predicted_step(&mut s, true);
        let now = plan.sequences.iter().map(|scheduled| scheduled.seq.get()).zip(plan.batch.slots.iter().copied());
        assert!(now.eq(before.into_iter().filter(|(_, slot)| *slot != NO_SLOT)));
    }
    assert_eq!((ended, predicted.len()), (vec![2, 3], 0), "a sequence has no slot after its last token");
    s.rollback(plan);
    s.check();
}

#[test]
fn no_step_is_predicted_while_a_request_can_be_admitted() {
    let mut s = scheduler(8, 4, 32, 2, 10);
    add(&mut s, 1, vec![0; 3], 30);
    let (plan, _) = predicted_step(&mut s, false);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, predicted) = predicted_step(&mut s, false);
    assert_eq!(predicted.len(), 1);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    add(&mut s, 2, vec![0; 3], 30);
    let (plan, predicted) = predicted_step(&mut s, true);
    assert_eq!((plan.sequences.len(), predicted.len()), (1, 0), "the request waits, and the next step is not predicted");
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, predicted) = predicted_step(&mut s, false);
    assert_eq!((plan.sequences.len(), predicted.len()), (2, 0), "the request computes its prompt");
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    add(&mut s, 3, vec![0; 3], 30);
    let (plan, predicted) = predicted_step(&mut s, false);
    assert_eq!((plan.sequences.len(), predicted.len()), (2, 2), "the batch is full");
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, predicted) = predicted_step(&mut s, true);
    assert_eq!((plan.sequences.len(), predicted.len()), (2, 2), "the batch is still full");
    commit_all(&mut s, plan, |seq| if seq == 1 { TokenOutcome::Stop(2) } else { TokenOutcome::Token(9) });
    let (plan, predicted) = predicted_step(&mut s, true);
    assert_eq!((plan.sequences.len(), predicted.len()), (1, 0), "one sequence has ended, and another waits to replace it");
    s.rollback(plan);
}

#[test]
fn a_paused_sequence_continues_while_the_device_works_ahead() {
    let mut s = scheduler(16, 4, 32, 4, 10);
    add(&mut s, 1, vec![0; 3], 30);
    add(&mut s, 2, vec![0; 3], 30);
    let (plan, _) = predicted_step(&mut s, false);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    for (ready, is_ahead, looks, all_scheduled, predicted) in
        [(2, false, false, 2, 2), (1, true, false, 1, 1), (1, true, false, 1, 1), (2, true, true, 1, 0), (2, false, false, 2, 2)]
    {
        if looks {
            s.recheck_paused();
        }
        let mut plan =
            if is_ahead { s.schedule_lookahead(|seq| seq.get() <= ready) } else { s.schedule(|seq| seq.get() <= ready) }.unwrap();
        s.reserve_lookahead(&mut plan);
        assert_eq!((plan.sequences.len(), plan.batch.next_slots.len()), (all_scheduled, predicted));
        commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    }
}

#[test]
fn a_block_reserved_for_a_token_that_is_not_sampled_is_freed() {
    for outcome in [TokenOutcome::Fail, TokenOutcome::Stop(2)] {
        let mut s = scheduler(8, 4, 32, 2, 10);
        let group = NewGroup {
            prompt: vec![0; 3],
            max_len: 30,
            branching: Branching::One,
            priority: 0,
            keep: true,
            prompt_logits: false,
            root: BlockHash::default(),
        };
        add_group(&mut s, seq_id(1), group);
        let (plan, _) = predicted_step(&mut s, false);
        commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
        let (plan, predicted) = predicted_step(&mut s, false);
        assert_eq!((predicted.len(), s.blocks.used_blocks()), (1, 2), "the fifth token has a block before it is sampled");
        s.rollback(plan);
        assert_eq!(s.blocks.used_blocks(), 1);
        let (plan, _) = predicted_step(&mut s, false);
        commit_all(&mut s, plan, |_| outcome);
        assert_eq!(s.blocks.used_blocks(), 1, "only the blocks of computed tokens are kept");
    }
}

#[test]
fn no_step_is_predicted_without_a_free_block_for_each_next_token() {
    let mut s = scheduler(3, 4, 32, 2, 10);
    for id in [1, 2] {
        add(&mut s, id, vec![0; 3], 8);
    }
    let (plan, _) = predicted_step(&mut s, false);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, predicted) = predicted_step(&mut s, false);
    assert_eq!((plan.sequences.len(), predicted.len(), s.blocks.used_blocks()), (2, 0, 3));
    s.rollback(plan);
    s.check();
    assert_eq!(s.blocks.used_blocks(), 2, "the block reserved for one of them is freed");
}
