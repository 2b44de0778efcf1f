//! Swapping to the host tier.

use super::*;

/// A pool with blocks of 8 and a host tier.
fn swapping(preemption: Preemption, blocks: usize, host_blocks: usize) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens: 128, max_seqs: 8, prefill_chunk: 128, preemption };
    Scheduler::new(options, BlockManager::new(blocks, Paging::without_windows(8), false).unwrap().with_host(host_blocks).unwrap()).unwrap()
}

#[test]
fn a_swapped_group_continues_without_recompute_before_newer_requests() {
    let mut s = swapping(Preemption::Swap, 5, 5);
    (1..=2).for_each(|id| add(&mut s, id, vec![0; 15], 32));
    step(&mut s, TokenOutcome::Token(9));
    step(&mut s, TokenOutcome::Token(9));
    add(&mut s, 3, vec![0; 2], 32);
    // Both need a third block and one is free: the younger one is preempted.
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
    assert_eq!((s.preemptions(), s.preemptions_swapped(), s.blocks().swapped(), s.blocks().host_used()), (1, 1, 1, 2));
    for _ in 0..5 {
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)], "the newest request would fit, but waits");
    }
    s.remove(seq_id(1));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(2, 1), (3, 2)], "no token is recomputed");
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
}

#[test]
fn preempted_samples_share_the_same_blocks_after_rescheduling() {
    for (preemption, computed) in [(Preemption::Swap, 0), (Preemption::Recompute, 16 + 4)] {
        let mut s = swapping(preemption, 16, 16);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        step(&mut s, TokenOutcome::Token(9));
        let before = s.blocks().used_blocks();
        assert_eq!(before, 4, "two blocks of the prompt, and one for each sample");
        s.preempt_youngest();
        s.record_moves(true, true);
        s.check();
        assert_eq!(s.blocks().used_blocks(), 0);
        assert_eq!(s.blocks().host_used(), if computed == 0 { before } else { 0 }, "shared blocks are copied once");
        let mut rows = Vec::new();
        while s.get(seq_id(1)).unwrap().generated < 4 {
            rows.extend(step(&mut s, TokenOutcome::Token(9)));
        }
        assert_eq!((s.blocks().used_blocks(), s.blocks().host_used()), (before, 0));
        // The prompt once, and the sampled token of each sequence.
        assert_eq!(rows.iter().map(|(_, rows)| rows).sum::<usize>(), computed + 2, "{rows:?}");
    }
}

#[test]
fn a_group_that_does_not_fit_the_host_tier_is_recomputed() {
    for host_blocks in [3, 4] {
        let mut s = swapping(Preemption::Swap, 16, host_blocks);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        s.preempt_youngest();
        s.record_moves(true, true);
        s.check();
        let fits = host_blocks == 4;
        assert_eq!((s.blocks().swapped(), s.blocks().host_used()), if fits { (2, 4) } else { (0, 0) });
        assert_eq!([1, 2].map(|id| s.get(seq_id(id)).unwrap().computed), if fits { [17; 2] } else { [0; 2] });
    }
}

#[test]
fn a_group_whose_swap_fails_is_recomputed() {
    for (out, back) in [(false, true), (true, false)] {
        let mut s = swapping(Preemption::Swap, 16, 16);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        s.preempt_youngest();
        s.record_moves(out, true);
        s.check();
        assert_eq!((s.preemptions(), s.preemptions_swapped()), (1, out as u64));
        let plan = s.schedule(|_| true).unwrap();
        assert_eq!(plan.sequences[0].tokens, if out { 1 } else { 17 });
        s.rollback(plan);
        s.record_moves(true, back);
        s.check();
        assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
        assert_eq!([1, 2].map(|id| s.get(seq_id(id)).unwrap().computed), [0; 2]);
        while !step(&mut s, TokenOutcome::Token(9)).is_empty() {}
        assert_eq!(s.blocks().used_blocks(), 0);
    }
}

#[test]
fn automatic_preemption_selects_the_cheaper_method() {
    // 17 tokens each, in four blocks that are copied out and in. The 16 prompt tokens are shared.
    let cases = [((0.0, 0.0), true), ((1.0, 0.0), true), ((1.0, 1.0), true), ((2.25, 1.0), true), ((2.3, 1.0), false), ((1.0, 0.1), false)];
    for ((block, token), swaps) in cases {
        let mut s = swapping(Preemption::Auto, 16, 16);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        s.set_costs(Costs { block, token });
        s.preempt_youngest();
        s.record_moves(true, true);
        assert_eq!(s.preemptions_swapped() == 1, swaps, "a block costs {block}, a token {token}");
    }
}

#[test]
fn an_idle_sequence_is_swapped_to_the_host_tier_and_resumes_without_recompute() {
    let mut s = swapping(Preemption::Swap, 6, 6);
    import(&mut s, seq_id(1), vec![7; 16]);
    add(&mut s, 2, vec![1; 36], 48);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(2, 36)]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used(), s.preemptions()), (1, 2, 0));
    s.fork(seq_id(1), Some(9), seq_id(3), false).unwrap();
    s.check();
    s.remove(seq_id(2));
    [1, 3].into_iter().for_each(|id| s.resume(seq_id(id), 40, false, false).unwrap());
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (3, 1)]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
}

#[test]
fn the_longest_idle_sequences_leave_a_full_host_tier() {
    let mut s = swapping(Preemption::Swap, 6, 5);
    for id in 1..=3 {
        import(&mut s, seq_id(id), vec![id as u32; 16]);
    }
    add(&mut s, 4, vec![9; 47], 48);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(4, 47)]);
    assert_eq!([1, 2, 3].map(|id| s.get(seq_id(id)).unwrap().computed), [0, 16, 16]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (2, 4));
    // A group that must be preempted has precedence over idle sequences in the host tier.
    let mut s = swapping(Preemption::Swap, 7, 4);
    import(&mut s, seq_id(1), vec![7; 16]);
    (2..=3).for_each(|id| add(&mut s, id, vec![id as u32; 23], 40));
    (0..3).for_each(|_| drop(step(&mut s, TokenOutcome::Token(9))));
    assert_eq!((s.preemptions_swapped(), s.get(seq_id(1)).unwrap().computed, s.get(seq_id(3)).unwrap().computed), (1, 0, 24));
}

#[test]
fn swapped_in_blocks_return_to_the_prefix_cache() {
    let options = SchedulerOptions { max_batch_tokens: 128, max_seqs: 8, prefill_chunk: 128, preemption: Preemption::Swap };
    let mut s = Scheduler::new(options, BlockManager::new(4, Paging::without_windows(8), true).unwrap().with_host(4).unwrap()).unwrap();
    let group = |token, len: usize, max_len| {
        let (prompt, branching, root) = (vec![token; len], Branching::One, BlockHash::default());
        NewGroup { prompt, max_len, branching, priority: 0, keep: max_len == 17, logits_from: None, prompt_only: false, root }
    };
    add_group(&mut s, seq_id(1), group(7, 16, 17));
    step(&mut s, TokenOutcome::Token(9));
    // This request replaces all cached blocks.
    add_group(&mut s, seq_id(2), group(8, 31, 32));
    step(&mut s, TokenOutcome::Token(9));
    s.resume(seq_id(1), 18, false, false).unwrap();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)], "the resumed sequence ends with this token");
    let before = s.prefix().hits;
    add_group(&mut s, seq_id(3), group(7, 17, 18));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(3, 1)]);
    assert_eq!(s.prefix().hits - before, 16);
}

#[test]
fn blocks_reserved_by_a_failed_step_are_not_swapped() {
    let mut s = swapping(Preemption::Swap, 16, 16);
    add(&mut s, 1, vec![0; 20], 60);
    let plan = s.schedule(|_| true).unwrap();
    s.rollback(plan);
    assert_eq!(s.blocks().used_blocks(), 3);
    s.preempt_youngest();
    assert!(s.moves().is_empty());
    s.record_moves(true, true);
    assert_eq!((s.preemptions(), s.preemptions_swapped(), s.blocks().used_blocks()), (1, 0, 0));
}

#[test]
fn other_groups_run_while_a_long_group_is_swapped_in_portions() {
    let mut s = swapping(Preemption::Swap, 12, 12);
    s.limit_moves(2);
    add(&mut s, 1, vec![0; 15], 60);
    add(&mut s, 2, vec![0; 60], 90);
    while s.preemptions() == 0 {
        step(&mut s, TokenOutcome::Token(9));
    }
    // Group 1 continues, while two of the nine blocks leave the device in each step.
    let mut used = vec![s.blocks().used_blocks()];
    while s.blocks().has_queued_out() {
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
        used.push(s.blocks().used_blocks());
    }
    assert_eq!((used, s.preemptions(), s.preemptions_swapped(), s.blocks().host_used()), (vec![11, 9, 7, 5, 4], 1, 1, 9));
    s.remove(seq_id(1));
    add(&mut s, 3, vec![0; 3], 20);
    // Group 2 returns, and a younger group runs meanwhile.
    let steps: Vec<_> = (0..5).map(|_| step(&mut s, TokenOutcome::Token(9))).collect();
    assert_eq!(steps, [vec![(3, 3)], vec![(3, 1)], vec![(3, 1)], vec![(3, 1)], vec![(2, 1), (3, 1)]]);
    assert_eq!((s.blocks().host_used(), s.waits_for_moves()), (0, false));
}

#[test]
fn an_import_waits_until_the_blocks_of_other_sequences_are_copied() {
    let mut s = swapping(Preemption::Swap, 4, 12);
    s.limit_moves(1);
    [1, 2].into_iter().for_each(|id| import(&mut s, seq_id(id), vec![id as u32; 16]));
    s.import(seq_id(3), vec![3; 24], 40, None, BlockHash::default()).unwrap();
    let mut results = Vec::new();
    loop {
        s.begin_step(0);
        assert!(s.schedule(|_| true).is_none());
        let result = s.adopt(seq_id(3), 24);
        assert!(s.moves().out.len() <= 1, "a step moves one block");
        s.record_moves(true, true);
        s.check();
        results.push(result);
        if result != BlocksResult::Pending {
            break;
        }
    }
    assert_eq!(results, [BlocksResult::Pending, BlocksResult::Pending, BlocksResult::Done]);
    assert_eq!((s.get(seq_id(3)).unwrap().computed, s.get(seq_id(1)).unwrap().computed, s.blocks().swapped()), (24, 16, 2));
    assert_eq!(s.adopt(seq_id(9), 8), BlocksResult::Refused);
}

#[test]
fn decodes_continue_under_every_policy_while_a_group_returns() {
    let batchings = [
        options::BatchingPolicy::Mixed,
        options::BatchingPolicy::PrefillFirst { threshold: 64 },
        options::BatchingPolicy::DecodeFirst { budget: 64 },
    ];
    for batching in batchings {
        let mut s = swapping(Preemption::Swap, 6, 6);
        s.policies = Policies::new(&options::Policies { batching, ..Default::default() });
        s.limit_moves(1);
        import(&mut s, seq_id(1), vec![7; 16]);
        add(&mut s, 2, vec![1; 36], 48);
        while step(&mut s, TokenOutcome::Token(9)).is_empty() {
            assert!(s.waits_for_moves());
        }
        assert_eq!(s.blocks().host_used(), 2);
        s.remove(seq_id(2));
        add(&mut s, 3, vec![2; 3], 20);
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(3, 3)]);
        s.resume(seq_id(1), 40, false, false).unwrap();
        let steps = [(); 2].map(|()| step(&mut s, TokenOutcome::Token(9)));
        assert_eq!(steps, [vec![(3, 1)], vec![(3, 1), (1, 1)]], "{batching:?}");
    }
}

#[test]
fn no_group_is_preempted_while_the_blocks_of_an_idle_sequence_leave() {
    let mut s = swapping(Preemption::Swap, 8, 12);
    s.limit_moves(2);
    add(&mut s, 1, vec![0; 32], 60);
    add(&mut s, 2, vec![1; 3], 60);
    (0..2).for_each(|_| drop(step(&mut s, TokenOutcome::Token(9))));
    // The first four blocks of the fork are shared. The last one becomes its own.
    s.fork(seq_id(1), None, seq_id(9), false).unwrap();
    (0..7).for_each(|_| assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]));
    let steps = [(); 3].map(|()| step(&mut s, TokenOutcome::Token(9)));
    assert_eq!(steps, [vec![(2, 1)], vec![(2, 1)], vec![(1, 1), (2, 1)]]);
    assert_eq!((s.preemptions(), s.blocks().swapped()), (0, 1));
}

#[test]
fn a_sequence_waits_for_blocks_that_leave_before_it_returns() {
    let mut s = swapping(Preemption::Swap, 8, 12);
    s.limit_moves(1);
    // Each import takes the blocks of the longest idle sequence. The six blocks of the second one
    // have not all left when the first one returns.
    for (id, computed) in [(1, 16), (2, 48), (3, 16), (4, 8)] {
        s.import(seq_id(id), vec![id as u32; 50], 60, None, BlockHash::default()).unwrap();
        s.begin_step(0);
        while s.adopt(seq_id(id), computed) == BlocksResult::Pending {
            s.record_moves(true, true);
            s.begin_step(0);
        }
        s.record_moves(true, true);
    }
    assert!(s.get(seq_id(1)).unwrap().table.swapped() && s.blocks().has_queued_out());
    let mut results = Vec::new();
    while results.last() != Some(&BlocksResult::Done) && results.len() < 9 {
        s.begin_step(0);
        results.push(s.swap_in_sequence(seq_id(1)));
        s.record_moves(true, true);
        s.check();
    }
    assert_eq!(results, [BlocksResult::Pending, BlocksResult::Pending, BlocksResult::Done]);
}
