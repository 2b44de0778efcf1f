//! Forks, samples, beams, pins and idle sequences.

use super::*;
use crate::sys::cpu_time;

#[test]
fn the_group_table_has_room_for_a_group_of_each_branch() {
    let mut s = scheduler(640, 8, 640, 64, 64);
    for first in (0..12).map(|i| 1 + i * 4) {
        add_branching(&mut s, first, vec![0; 9], 60, Branching::Samples(4));
        let plan = s.schedule(|_| true).unwrap();
        let children = |seq: SeqId| seq.own_request().sequences(if seq.get() == first { 4 } else { 1 }).map(move |child| (seq, child));
        let sampled = plan.sampled().flat_map(|scheduled| children(scheduled.seq));
        let sampled: Vec<SampledToken> =
            sampled.map(|(parent, child)| SampledToken { parent, child, outcome: TokenOutcome::Token(9) }).collect();
        s.commit(plan, &sampled, &mut Vec::new());
        s.check();
        assert!(s.queues.groups.capacity() >= s.running(), "{} groups for {} sequences", s.queues.groups.capacity(), s.running());
    }
}

#[test]
fn each_beam_search_drops_only_its_own_beams_in_any_order() {
    let mut s = scheduler(64, 8, 64, 16, 64);
    [1, 11].into_iter().for_each(|first| add_branching(&mut s, first, vec![0; 9], 60, Branching::Beams(3)));
    let mut choose = |sampled: &[(u64, u64)]| {
        let plan = s.schedule(|_| true).unwrap();
        let sampled: Vec<SampledToken> = sampled
            .iter()
            .map(|&(parent, child)| SampledToken { parent: seq_id(parent), child: seq_id(child), outcome: TokenOutcome::Token(9) })
            .collect();
        let mut events = Vec::new();
        s.commit(plan, &sampled, &mut events);
        s.check();
        let dropped = |event: &Event| if let Event::Dropped { seq } = event { Some(seq.get()) } else { None };
        events.iter().filter_map(dropped).collect::<Vec<_>>()
    };
    assert_eq!(choose(&[(1, 1), (1, 2), (1, 3), (11, 11), (11, 12), (11, 13)]), [0; 0]);
    assert_eq!(choose(&[(3, 3), (3, 1), (2, 2), (13, 13), (12, 12), (11, 11)]), [1]);
    assert_eq!(choose(&[(2, 2), (12, 12)]), [3, 1, 11, 13], "beams sampled one step earlier do not continue");
}

#[test]
fn a_pin_is_computed_and_samples_no_token() {
    for len in [1, 8, 9] {
        let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 4, prefill_chunk: 8, preemption: Preemption::Recompute };
        let mut s = Scheduler::new(options, BlockManager::new(16, Paging::without_windows(8), true).unwrap()).unwrap();
        s.pin(seq_id(1), NewGroup::pin(vec![0; len], BlockHash::default()).prepare(&Paging::without_windows(8)).unwrap(), 0).unwrap();
        while let Some(plan) = s.schedule(|_| true) {
            assert_eq!((plan.sampled().count(), plan.batch.logit_rows.len()), (0, 0));
            s.commit(plan, &[], &mut Vec::new());
            s.check();
        }
        assert_eq!((s.get(seq_id(1)).unwrap().computed, s.blocks().used_blocks()), (len, blocks_for(len, 8)));
    }
}

#[test]
fn a_sequence_without_room_for_a_token_cannot_be_resumed() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 9], 12);
    s.fork(seq_id(1), None, seq_id(2), false).unwrap();
    assert!(s.resume(seq_id(2), 9, false, false).unwrap_err().message().contains("has 9 tokens of at most 9"));
    s.check();
    s.resume(seq_id(2), 10, false, false).unwrap();
    s.check();
}

#[test]
fn samples_that_share_a_recomputed_prompt_continue_in_the_same_step() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    two_samples(&mut s, 30, false);
    s.preempt_youngest();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 16)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)], "the second sample uses the blocks of the first");
}

#[test]
fn a_sample_that_lost_its_blocks_shares_those_of_a_younger_one() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    two_samples(&mut s, 30, false);
    assert!(s.schedule(|_| false).is_none(), "both wait");
    s.drop_blocks(seq_id(1));
    s.recheck_paused();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)], "nothing is recomputed");
}

#[test]
fn samples_that_do_not_fit_together_run_one_after_the_other() {
    // At first two blocks for the prompt and one for each sample, later three for each sample.
    let mut s = scheduler(4, 8, 64, 8, 64);
    two_samples(&mut s, 24, false);
    for id in [1, 2] {
        s.rewind(seq_id(id), 1).unwrap();
        s.append(seq_id(id), &[id as u32; 20], 24).unwrap();
    }
    let mut steps = 0;
    while !step(&mut s, TokenOutcome::Token(9)).is_empty() {
        steps += 1;
        assert!(steps < 100, "the samples preempt each other without end");
    }
    assert_eq!((s.running(), s.waiting(), s.blocks().used_blocks()), (0, 0, 0));
}

/// Creates idle forks of sequence 1, which has 16 tokens.
fn idle_forks(s: &mut Scheduler, children: std::ops::Range<u64>) {
    children.for_each(|child| s.fork(seq_id(1), None, seq_id(child), false).unwrap());
    s.check();
}

#[test]
fn idle_sequences_lose_blocks_one_by_one_except_blocks_of_running_sequences() {
    // Sequence 1 shares two blocks with its forks. Another idle sequence has two.
    let mut s = scheduler(9, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 16], 40);
    step(&mut s, TokenOutcome::Token(9));
    idle_forks(&mut s, 10..14);
    import(&mut s, seq_id(20), vec![7; 16]);
    assert_eq!((s.idle(), s.blocks().idle_blocks(), s.blocks().free_blocks()), (5, 2, 5));
    add(&mut s, 2, vec![1; 33], 40);
    step(&mut s, TokenOutcome::Token(9));
    // This sequence is younger than the forks, but only it has blocks of its own.
    assert_eq!((s.get(seq_id(20)).unwrap().computed, s.running()), (0, 2));
    assert!((10..14).all(|child| s.get(seq_id(child)).unwrap().computed == 16), "forks keep the blocks of running sequences");
    assert_eq!((s.blocks().idle_blocks(), s.preemptions()), (0, 0));
}

#[test]
fn blocks_shared_only_by_idle_sequences_count_as_free_and_are_freed_together() {
    let mut s = scheduler(3, 8, 64, 8, 64);
    let (prompt, branching, root) = (vec![0; 16], Branching::One, BlockHash::default());
    add_group(
        &mut s,
        seq_id(1),
        NewGroup { prompt, max_len: 17, branching, priority: 0, keep: true, logits_from: None, prompt_only: false, root },
    );
    step(&mut s, TokenOutcome::Token(9));
    idle_forks(&mut s, 2..102);
    assert_eq!((s.idle(), s.blocks().idle_blocks(), s.blocks().available()), (101, 2, 1));
    add(&mut s, 200, vec![1; 17], 24);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(200, 17)]);
    assert_eq!((s.idle(), s.blocks().idle_blocks(), s.blocks().available()), (101, 0, 0));
}

/// A linear search among the idle sequences would take much longer than a second.
#[test]
fn fifty_thousand_idle_sequences_take_linear_time() {
    let started = cpu_time::of_thread();
    let mut s = scheduler(64, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 16], 40);
    step(&mut s, TokenOutcome::Token(9));
    (2..50_002).for_each(|child| s.fork(seq_id(1), None, seq_id(child), child % 2 != 0).unwrap());
    s.remove(seq_id(1));
    add(&mut s, 100_000, vec![1; 480], 490);
    (2..50_002).filter(|child| child % 4 < 2).for_each(|child| drop(s.remove(seq_id(child))));
    for _ in 0..50 {
        let Some(plan) = s.schedule(|seq| seq.get() == 100_000) else { break };
        let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, TokenOutcome::Token(9))).collect();
        s.commit(plan, &sampled, &mut Vec::new());
    }
    assert!(s.get(seq_id(100_000)).is_err(), "the request had enough blocks to finish");
    s.check();
    let used = cpu_time::of_thread() - started;
    assert!(used.as_secs() < 20, "{used:?}");
}

#[test]
fn rewinding_appended_tokens_restores_the_length_limit() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 10], 20);
    s.append(seq_id(1), &[1; 50], 100).unwrap();
    s.append(seq_id(1), &[2; 50], 115).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().max_len(), 115, "the maximum of any sequence");
    s.fork(seq_id(1), Some(30), seq_id(2), false).unwrap();
    s.rewind(seq_id(1), 61).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().max_len(), 71, "one of the second 50 tokens is left");
    s.rewind(seq_id(1), 60).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().max_len(), 70);
    step(&mut s, TokenOutcome::Token(9));
    s.rewind(seq_id(1), 30).unwrap();
    assert_eq!([1, 2].map(|id| s.get(seq_id(id)).unwrap().max_len()), [40, 40], "a fork has the limit of a rewound sequence");
    s.rewind(seq_id(1), 10).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().max_len(), 20);
    s.rewind(seq_id(1), 5).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().max_len(), 20, "rewinding within the prompt does not change the limit");
    s.resume(seq_id(2), 32, false, false).unwrap();
    s.rewind(seq_id(2), 10).unwrap();
    assert_eq!(s.get(seq_id(2)).unwrap().max_len(), 12, "two more tokens, the number that it was resumed for");
    s.check();
}
