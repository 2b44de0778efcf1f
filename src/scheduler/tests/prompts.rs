//! The logits of prompts, and the prefix cache.

use super::*;
use crate::types::outputs::FinishReason;

#[test]
fn a_request_uses_the_prefix_cache_after_its_prompt_logits_are_delivered() {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 32, prefill_chunk: 64, preemption: Preemption::Recompute };
    let mut s = Scheduler::new(options, BlockManager::new(16, Paging::without_windows(8), true).unwrap()).unwrap();
    two_samples(&mut s, 30, true);
    s.preempt_youngest();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    assert_eq!(s.blocks().used_blocks(), 4, "two blocks of the prompt, and one for each sample");
}

/// Runs a step and records the rows whose logits are requested, except the sampled one.
fn record_prompt_rows(s: &mut Scheduler, rows: &mut Vec<(u64, usize)>) {
    let Some(plan) = s.schedule(|_| true) else { return };
    for scheduled in &plan.sequences {
        let end = scheduled.first + scheduled.tokens;
        rows.extend((end - scheduled.logits..end - scheduled.samples as usize).map(|row| (scheduled.seq.get(), row)));
    }
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, TokenOutcome::Token(9))).collect();
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}

fn add_with_prompt_logits(s: &mut Scheduler, prompt: Vec<u32>) {
    let (branching, root) = (Branching::One, BlockHash::default());
    add_group(
        s,
        seq_id(1),
        NewGroup { prompt, max_len: 60, branching, priority: 0, keep: false, logits_from: Some(0), prompt_only: false, root },
    );
}

#[test]
fn forks_of_an_unfinished_prompt_report_the_remaining_prompt_logits() {
    let mut s = scheduler(32, 8, 64, 32, 8);
    add_with_prompt_logits(&mut s, vec![0; 20]);
    let mut rows = Vec::new();
    record_prompt_rows(&mut s, &mut rows);
    s.fork(seq_id(1), None, seq_id(2), true).unwrap();
    s.fork(seq_id(1), Some(12), seq_id(3), true).unwrap();
    s.fork(seq_id(1), Some(5), seq_id(4), true).unwrap();
    (0..4).for_each(|_| record_prompt_rows(&mut s, &mut rows));
    let rows_of = |seq| rows.iter().filter(|row| row.0 == seq).map(|row| row.1).collect::<Vec<_>>();
    assert_eq!(rows_of(1), (0..19).collect::<Vec<_>>());
    assert_eq!([rows_of(2), rows_of(3), rows_of(4)], [(8..19).collect(), (8..11).collect::<Vec<_>>(), vec![]]);
}

#[test]
fn each_prompt_row_is_reported_once_after_any_rewind() {
    let mut s = scheduler(32, 8, 64, 32, 8);
    add_with_prompt_logits(&mut s, vec![0; 20]);
    let mut rows = Vec::new();
    record_prompt_rows(&mut s, &mut rows);
    s.rewind(seq_id(1), 6).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().logits_from, Some(6), "a position that an import accepts");
    s.append(seq_id(1), &[1; 20], 60).unwrap();
    s.preempt_youngest();
    (0..6).for_each(|_| record_prompt_rows(&mut s, &mut rows));
    assert!(s.get(seq_id(1)).unwrap().generated > 0);
    s.rewind(seq_id(1), 12).unwrap();
    s.append(seq_id(1), &[2; 10], 60).unwrap();
    (0..6).for_each(|_| record_prompt_rows(&mut s, &mut rows));
    // Tokens appended within the prompt are reported with it. Tokens after the first sampled one
    // are not.
    assert_eq!(rows, (0..8).chain(6..25).map(|row| (1, row)).collect::<Vec<_>>());
}

#[test]
fn appended_tokens_are_looked_up_in_the_prefix_cache_when_the_sequence_resumes() {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 32, prefill_chunk: 64, preemption: Preemption::Recompute };
    let mut s = Scheduler::new(options, BlockManager::new(32, Paging::without_windows(8), true).unwrap()).unwrap();
    let prompt: Vec<u32> = (0..50).collect();
    add(&mut s, 1, prompt.clone(), 51);
    step(&mut s, TokenOutcome::Token(9));
    // The kept tokens are one full block, or one full block and a part of the next one.
    for (id, len) in [(2, 8), (3, 13)] {
        let (prompt, branching, root) = (prompt[..len].to_vec(), Branching::One, BlockHash::default());
        add_group(
            &mut s,
            seq_id(id),
            NewGroup { prompt, max_len: len + 1, branching, priority: 0, keep: true, logits_from: None, prompt_only: false, root },
        );
        step(&mut s, TokenOutcome::Token(99));
        s.rewind(seq_id(id), len).unwrap();
        s.append(seq_id(id), &prompt_from(len), 100).unwrap();
        let before = s.prefix();
        s.resume(seq_id(id), 51, false, false).unwrap();
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(id, 2)], "six blocks of eight tokens are cached");
        let after = s.prefix();
        assert_eq!((after.queries - before.queries, after.hits - before.hits), (49 - len as u64, 48 - len as u64));
    }
    assert_eq!(s.blocks().used_blocks(), 0);
}

fn prompt_from(len: usize) -> Vec<u32> {
    (len as u32..50).collect()
}

#[test]
fn a_request_for_its_prompt_only_ends_without_a_token_and_can_fill_the_maximum_length() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    let add_prompt = |s: &mut Scheduler, id: u64, keep: bool| {
        let (prompt, branching, root) = (vec![id as u32; 16], Branching::One, BlockHash::default());
        let group = NewGroup { prompt, max_len: 16, branching, priority: 0, keep, logits_from: Some(8), prompt_only: true, root };
        add_group(s, seq_id(id), group);
    };
    add_prompt(&mut s, 1, false);
    add_prompt(&mut s, 2, true);
    let (mut ended, mut rows) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let Some(plan) = s.schedule(|_| true) else { break };
        for part in plan.sequences.iter().filter(|part| part.seq == seq_id(1)) {
            rows.extend(part.first + part.tokens - part.logits..part.first + part.tokens);
        }
        let sampled: Vec<_> = plan.sampled().map(|part| sampled_token(part.seq, TokenOutcome::Complete)).collect();
        let mut events = Vec::new();
        s.commit(plan, &sampled, &mut events);
        s.check();
        ended.extend(events.iter().filter_map(|event| match event {
            Event::Advanced { sampled_token, finish, .. } => Some((sampled[*sampled_token].child.get(), *finish)),
            _ => None,
        }));
    }
    assert_eq!(rows, (8..16).collect::<Vec<_>>(), "logits of no other row are computed");
    ended.sort_by_key(|(id, _)| *id);
    assert_eq!(ended, [(1, Some(FinishReason::Length)), (2, Some(FinishReason::Length))]);
    assert!(s.find(seq_id(1)).is_none());
    let kept = s.get(seq_id(2)).unwrap();
    assert_eq!((kept.tokens.len(), kept.computed, kept.generated), (16, 16, 0));
    // It can be resumed for its last token only, or to generate.
    s.resume(seq_id(2), 16, true, true).unwrap();
    assert_eq!(step(&mut s, TokenOutcome::Complete), [(2, 1)]);
    assert!(s.resume(seq_id(2), 16, false, false).unwrap_err().message().contains("has 16 tokens of at most 16"));
    s.resume(seq_id(2), 17, false, false).unwrap();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(2, 1)]);
    assert_eq!(s.sequences.len(), 0);
}
