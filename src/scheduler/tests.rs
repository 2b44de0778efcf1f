use super::*;
use crate::batch::NO_SLOT;
use crate::kv::{BlockHash, Paging, blocks_for};

fn scheduler(blocks: usize, block_size: usize, max_batch_tokens: usize, max_seqs: usize, prefill_chunk: usize) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens, max_seqs, prefill_chunk, preemption: Preemption::Recompute };
    Scheduler::new(options, BlockManager::new(blocks, Paging::without_windows(block_size), false).unwrap()).unwrap()
}

pub fn seq_id(id: u64) -> SeqId {
    SeqId::from_raw(id)
}

fn add(scheduler: &mut Scheduler, id: u64, prompt: Vec<u32>, max_len: usize) {
    add_branching(scheduler, id, prompt, max_len, Branching::One);
}

fn add_branching(scheduler: &mut Scheduler, id: u64, prompt: Vec<u32>, max_len: usize, branching: Branching) {
    let root = BlockHash::default();
    add_group(scheduler, seq_id(id), NewGroup { prompt, max_len, branching, priority: 0, keep: false, prompt_logits: false, root });
}

pub fn add_group(scheduler: &mut Scheduler, id: SeqId, group: NewGroup) {
    let prepared = group.prepare(scheduler.blocks.paging()).unwrap();
    scheduler.add(id, prepared).unwrap();
}

pub fn sampled_token(seq: SeqId, outcome: TokenOutcome) -> SampledToken {
    SampledToken { parent: seq, child: seq, outcome }
}

/// Runs a step with `outcome` for every sampled token. Returns the tokens per sequence.
fn step(scheduler: &mut Scheduler, outcome: TokenOutcome) -> Vec<(u64, usize)> {
    step_with(scheduler, outcome, |_| true)
}

fn step_with(scheduler: &mut Scheduler, outcome: TokenOutcome, ready: impl Fn(u64) -> bool) -> Vec<(u64, usize)> {
    scheduler.recheck_paused();
    let plan = scheduler.schedule(|seq| ready(seq.get()));
    scheduler.record_moves(true, true);
    let Some(plan) = plan else { return Vec::new() };
    let rows = plan.sequences.iter().map(|scheduled| (scheduled.seq.get(), scheduled.tokens)).collect();
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, outcome)).collect();
    scheduler.commit(plan, &sampled, &mut Vec::new());
    scheduler.check();
    rows
}

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

pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
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
    s.fork(seq_id(1), None, seq_id(2), true).unwrap();
    assert!(s.resume(seq_id(2), 9, false).unwrap_err().message().contains("has 9 tokens of at most 9"));
    s.check();
    s.resume(seq_id(2), 10, false).unwrap();
    s.check();
}

/// Adds two samples of a prompt of 16 tokens. The first step forks them.
fn two_samples(s: &mut Scheduler, max_len: usize, prompt_logits: bool) {
    let group = NewGroup {
        prompt: vec![0; 16],
        max_len,
        branching: Branching::Samples(2),
        priority: 0,
        keep: false,
        prompt_logits,
        root: BlockHash::default(),
    };
    add_group(s, seq_id(1), group);
    let plan = s.schedule(|_| true).unwrap();
    let sampled = [1, 2].map(|child| SampledToken { parent: seq_id(1), child: seq_id(child), outcome: TokenOutcome::Token(child as u32) });
    s.commit(plan, &sampled, &mut Vec::new());
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

#[test]
fn a_request_uses_the_prefix_cache_after_its_prompt_logits_are_delivered() {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 32, prefill_chunk: 64, preemption: Preemption::Recompute };
    let mut s = Scheduler::new(options, BlockManager::new(16, Paging::without_windows(8), true).unwrap()).unwrap();
    two_samples(&mut s, 30, true);
    s.preempt_youngest();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    assert_eq!(s.blocks().used_blocks(), 4, "two blocks of the prompt, and one for each sample");
}

/// Creates idle forks of sequence 1, which has 16 tokens.
fn idle_forks(s: &mut Scheduler, children: std::ops::Range<u64>) {
    children.for_each(|child| s.fork(seq_id(1), None, seq_id(child), true).unwrap());
    s.check();
}

#[test]
fn idle_sequences_lose_blocks_one_by_one_except_blocks_of_running_sequences() {
    // Sequence 1 shares two blocks with its forks. Another idle sequence has two.
    let mut s = scheduler(9, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 16], 40);
    step(&mut s, TokenOutcome::Token(9));
    idle_forks(&mut s, 10..14);
    s.import(seq_id(20), vec![7; 16], 16, 40, None, BlockHash::default()).unwrap();
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
    add_group(&mut s, seq_id(1), NewGroup { prompt, max_len: 17, branching, priority: 0, keep: true, prompt_logits: false, root });
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
    let started = std::time::Instant::now();
    let mut s = scheduler(64, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 16], 40);
    step(&mut s, TokenOutcome::Token(9));
    (2..50_002).for_each(|child| s.fork(seq_id(1), None, seq_id(child), child % 2 == 0).unwrap());
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
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

#[test]
fn rewinding_appended_tokens_restores_the_length_limit() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 10], 20);
    s.append(seq_id(1), &[1; 50], 100).unwrap();
    s.append(seq_id(1), &[2; 50], 115).unwrap();
    assert_eq!(s.get(seq_id(1)).unwrap().max_len(), 115, "the maximum of any sequence");
    s.fork(seq_id(1), Some(30), seq_id(2), true).unwrap();
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
    s.resume(seq_id(2), 32, false).unwrap();
    s.rewind(seq_id(2), 10).unwrap();
    assert_eq!(s.get(seq_id(2)).unwrap().max_len(), 12, "two more tokens, the number that it was resumed for");
    s.check();
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
    add_group(s, seq_id(1), NewGroup { prompt, max_len: 60, branching, priority: 0, keep: false, prompt_logits: true, root });
}

#[test]
fn forks_of_an_unfinished_prompt_report_the_remaining_prompt_logits() {
    let mut s = scheduler(32, 8, 64, 32, 8);
    add_with_prompt_logits(&mut s, vec![0; 20]);
    let mut rows = Vec::new();
    record_prompt_rows(&mut s, &mut rows);
    s.fork(seq_id(1), None, seq_id(2), false).unwrap();
    s.fork(seq_id(1), Some(12), seq_id(3), false).unwrap();
    s.fork(seq_id(1), Some(5), seq_id(4), false).unwrap();
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
            NewGroup { prompt, max_len: len + 1, branching, priority: 0, keep: true, prompt_logits: false, root },
        );
        step(&mut s, TokenOutcome::Token(99));
        s.rewind(seq_id(id), len).unwrap();
        s.append(seq_id(id), &prompt_from(len), 100).unwrap();
        let before = s.prefix();
        s.resume(seq_id(id), 51, false).unwrap();
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(id, 2)], "six blocks of eight tokens are cached");
        let after = s.prefix();
        assert_eq!((after.queries - before.queries, after.hits - before.hits), (49 - len as u64, 48 - len as u64));
    }
    assert_eq!(s.blocks().used_blocks(), 0);
}

fn prompt_from(len: usize) -> Vec<u32> {
    (len as u32..50).collect()
}

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
    s.import(seq_id(1), vec![7; 16], 16, 40, None, BlockHash::default()).unwrap();
    add(&mut s, 2, vec![1; 36], 48);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(2, 36)]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used(), s.preemptions()), (1, 2, 0));
    s.fork(seq_id(1), Some(9), seq_id(3), true).unwrap();
    s.check();
    s.remove(seq_id(2));
    [1, 3].into_iter().for_each(|id| s.resume(seq_id(id), 40, false).unwrap());
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (3, 1)]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
}

#[test]
fn the_longest_idle_sequences_leave_a_full_host_tier() {
    let mut s = swapping(Preemption::Swap, 6, 5);
    for id in 1..=3 {
        s.import(seq_id(id), vec![id as u32; 16], 16, 40, None, BlockHash::default()).unwrap();
    }
    add(&mut s, 4, vec![9; 47], 48);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(4, 47)]);
    assert_eq!([1, 2, 3].map(|id| s.get(seq_id(id)).unwrap().computed), [0, 16, 16]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (2, 4));
    // A group that must be preempted has precedence over idle sequences in the host tier.
    let mut s = swapping(Preemption::Swap, 7, 4);
    s.import(seq_id(1), vec![7; 16], 16, 40, None, BlockHash::default()).unwrap();
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
        NewGroup { prompt, max_len, branching, priority: 0, keep: max_len == 17, prompt_logits: false, root }
    };
    add_group(&mut s, seq_id(1), group(7, 16, 17));
    step(&mut s, TokenOutcome::Token(9));
    // This request replaces all cached blocks.
    add_group(&mut s, seq_id(2), group(8, 31, 32));
    step(&mut s, TokenOutcome::Token(9));
    s.resume(seq_id(1), 18, false).unwrap();
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
    s.fork(seq_id(1), None, seq_id(2), true).unwrap();
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
            NewGroup { prompt: vec![5; 48], max_len: 49, branching, priority: 0, keep: false, prompt_logits: false, root },
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
