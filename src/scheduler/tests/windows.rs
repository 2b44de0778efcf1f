//! Layer groups with windows.

use super::*;

/// A pool with blocks of 8, and two layer groups: one without a window, one with a window of 8.
fn mixed(blocks: usize, prefixes: bool) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 8, prefill_chunk: 16, preemption: Preemption::Recompute };
    Scheduler::new(options, BlockManager::new(blocks, Paging::new(8, &[None, Some(8)]), prefixes).unwrap()).unwrap()
}

#[test]
fn preempted_samples_and_beams_recompute_their_prompt_once_with_windows() {
    for branching in [Branching::Samples(3), Branching::Beams(3)] {
        // The pool has exactly the maximum number of blocks that `max_blocks_of` states.
        let mut s = mixed(Paging::new(8, &[None, Some(8)]).max_blocks_of(3, 90, 120, 16), false);
        add_branching(&mut s, 1, (0..90).collect(), 120, branching);
        let mut last = None;
        while last.is_none() {
            let plan = s.schedule(|_| true).unwrap();
            let sampled: Vec<SampledToken> = plan
                .sampled()
                .flat_map(|_| {
                    (1..=3).map(|child| SampledToken {
                        parent: seq_id(1),
                        child: seq_id(child),
                        outcome: TokenOutcome::Token(child as u32),
                    })
                })
                .collect();
            last = (!sampled.is_empty()).then_some(());
            s.commit(plan, &sampled, &mut Vec::new());
            s.check();
        }
        (0..12).for_each(|_| assert_eq!(step(&mut s, TokenOutcome::Token(7)).len(), 3));
        s.preempt_youngest();
        let (mut rows, mut steps) = (0, 0);
        while s.get(seq_id(1)).is_ok() {
            let scheduled = step(&mut s, TokenOutcome::Token(7));
            assert!(!scheduled.is_empty(), "{branching:?}: no sequence is scheduled");
            rows += scheduled.iter().map(|(_, rows)| if *rows > 1 { *rows } else { 0 }).sum::<usize>();
            steps += 1;
            assert!(steps < 200);
        }
        // The prompt once, and twelve tokens of each sequence.
        assert!((90..130).contains(&rows), "{branching:?}: {rows} rows");
        assert_eq!(s.preemptions(), 1, "{branching:?}");
    }
}

#[test]
fn blocks_shared_with_other_sequences_do_not_count_as_freed() {
    let mut s = mixed(64, false);
    add(&mut s, 1, vec![0; 24], 200);
    step(&mut s, TokenOutcome::Token(9));
    step(&mut s, TokenOutcome::Token(9));
    let needed = |s: &Scheduler| s.blocks.needed(&s.get(seq_id(1)).unwrap().table, 24..200, 1);
    // 22 more blocks for the group without a window. The window needs two blocks and has one.
    assert_eq!(needed(&s), 22 + 1);
    s.fork(seq_id(1), None, seq_id(2), false).unwrap();
    assert_eq!(needed(&s), 22 + 2, "the block is now shared with the fork");
}

#[test]
fn a_pinned_prompt_is_found_in_the_prefix_cache_with_windows() {
    for len in [24, 25, 31] {
        let mut s = mixed(15, true);
        let pin = NewGroup::pin(vec![3; len], BlockHash::default()).prepare(s.blocks.paging()).unwrap();
        s.pin(seq_id(1), pin, 0).unwrap();
        while !step(&mut s, TokenOutcome::Token(9)).is_empty() {}
        // Another request needs the blocks that the pin does not hold.
        let (branching, root) = (Branching::One, BlockHash::root(&[1; 32], b""));
        add_group(
            &mut s,
            seq_id(3),
            NewGroup { prompt: vec![5; 48], max_len: 49, branching, priority: 0, keep: false, logits_from: None, prompt_only: false, root },
        );
        while s.get(seq_id(3)).is_ok() {
            step(&mut s, TokenOutcome::Token(9));
        }
        let hits = s.prefix().hits;
        add(&mut s, 4, vec![3; len], len + 1);
        step(&mut s, TokenOutcome::Token(9));
        assert_eq!(s.prefix().hits - hits, ((len - 1) / 8 * 8) as u64, "a pin of {len} tokens");
    }
}

#[test]
fn a_token_counts_once_in_the_swap_load_of_several_layer_groups() {
    let mut s = mixed(64, false);
    add(&mut s, 1, vec![0; 40], 200);
    for _ in 0..4 {
        step(&mut s, TokenOutcome::Token(9));
    }
    let sequence = s.get(seq_id(1)).unwrap();
    let load = s.blocks.swap_out_load(std::iter::once(&sequence.table));
    assert_eq!((load.tokens, load.blocks), (sequence.computed, sequence.table.places() + 2));
}
