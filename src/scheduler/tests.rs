use super::*;
use crate::batch::NOWHERE;
use crate::kv::{BlockHash, Paging, blocks_for};

fn scheduler(blocks: usize, block_size: usize, max_batch_tokens: usize, max_seqs: usize, prefill_chunk: usize) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens, max_seqs, prefill_chunk, preemption: Preemption::Recompute };
    Scheduler::new(options, BlockManager::new(blocks, Paging::without_windows(block_size), false).unwrap()).unwrap()
}

fn add(scheduler: &mut Scheduler, id: SeqId, prompt: Vec<u32>, max_len: usize) {
    add_branching(scheduler, id, prompt, max_len, Branching::One);
}

fn add_branching(scheduler: &mut Scheduler, id: SeqId, prompt: Vec<u32>, max_len: usize, branching: Branching) {
    let root = BlockHash::default();
    take(scheduler, id, NewGroup { prompt, max_len, branching, priority: 0, keep: false, prompt_logits: false, root });
}

pub fn take(scheduler: &mut Scheduler, id: SeqId, arrival: NewGroup) {
    let prepared = arrival.prepare(scheduler.blocks.paging()).unwrap();
    scheduler.add(id, prepared).unwrap();
}

pub fn going_on(seq: SeqId, outcome: TokenOutcome) -> SampledToken {
    SampledToken { parent: seq, child: seq, outcome }
}

/// Runs a step with `outcome` for every sampled token. Returns the tokens per sequence.
fn step(scheduler: &mut Scheduler, outcome: TokenOutcome) -> Vec<(SeqId, usize)> {
    step_with(scheduler, outcome, |_| true)
}

fn step_with(scheduler: &mut Scheduler, outcome: TokenOutcome, ready: impl Fn(SeqId) -> bool) -> Vec<(SeqId, usize)> {
    scheduler.recheck_paused();
    let plan = scheduler.schedule(ready);
    scheduler.record_moves(true, true);
    let Some(plan) = plan else { return Vec::new() };
    let rows = plan.sequences.iter().map(|scheduled| (scheduled.seq, scheduled.rows)).collect();
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| going_on(scheduled.seq, outcome)).collect();
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
/// `step_in_flight` is set, the device has started this step.
fn foreseen_step(s: &mut Scheduler, is_ahead: bool) -> (StepPlan, Vec<(SeqId, u32)>) {
    let mut plan = if is_ahead { s.schedule_lookahead(|_| true) } else { s.schedule(|_| true) }.unwrap();
    s.reserve_lookahead(&mut plan);
    let foreseen = plan.sequences.iter().map(|scheduled| scheduled.seq).zip(plan.batch.next_slots.iter().copied()).collect();
    (plan, foreseen)
}

fn commit_all(s: &mut Scheduler, plan: StepPlan, outcome: impl Fn(SeqId) -> TokenOutcome) {
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| going_on(scheduled.seq, outcome(scheduled.seq))).collect();
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}

#[test]
fn what_is_foreseen_of_a_step_is_the_next_one() {
    let mut s = scheduler(64, 4, 32, 8, 10);
    for (id, len, max_len) in [(1, 3, 20), (2, 6, 11), (3, 4, 9)] {
        add(&mut s, id, vec![0; len], max_len);
    }
    let (prompts, foreseen) = foreseen_step(&mut s, false);
    assert!(foreseen.is_empty(), "nobody decodes yet");
    commit_all(&mut s, prompts, |_| TokenOutcome::Token(9));
    let (mut plan, mut foreseen) = foreseen_step(&mut s, false);
    let mut ended = Vec::new();
    while foreseen.iter().any(|&(_, slot)| slot != NOWHERE) {
        ended.extend(foreseen.iter().filter(|(_, slot)| *slot == NOWHERE).map(|(seq, _)| *seq));
        commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
        let before = std::mem::take(&mut foreseen);
        (plan, foreseen) = foreseen_step(&mut s, true);
        let now = plan.sequences.iter().map(|scheduled| scheduled.seq).zip(plan.batch.slots.iter().copied());
        assert!(now.eq(before.into_iter().filter(|(_, slot)| *slot != NOWHERE)));
    }
    assert_eq!((ended, foreseen.len()), (vec![2, 3], 0), "whose last token is chosen has no next one");
    s.rollback(plan);
    s.check();
}

#[test]
fn nothing_is_foreseen_where_others_may_join_and_whoever_comes_waits_for_one_step() {
    let mut s = scheduler(8, 4, 32, 2, 10);
    add(&mut s, 1, vec![0; 3], 30);
    let (plan, _) = foreseen_step(&mut s, false);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, foreseen) = foreseen_step(&mut s, false);
    assert_eq!(foreseen.len(), 1);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    add(&mut s, 2, vec![0; 3], 30);
    let (plan, foreseen) = foreseen_step(&mut s, true);
    assert_eq!((plan.sequences.len(), foreseen.len()), (1, 0), "it waits, and the next step is open");
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, foreseen) = foreseen_step(&mut s, false);
    assert_eq!((plan.sequences.len(), foreseen.len()), (2, 0), "it computes its prompt");
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    add(&mut s, 3, vec![0; 3], 30);
    let (plan, foreseen) = foreseen_step(&mut s, false);
    assert_eq!((plan.sequences.len(), foreseen.len()), (2, 2), "nobody else fits");
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, foreseen) = foreseen_step(&mut s, true);
    assert_eq!((plan.sequences.len(), foreseen.len()), (2, 2), "still nobody");
    commit_all(&mut s, plan, |seq| if seq == 1 { TokenOutcome::Stop(2) } else { TokenOutcome::Token(9) });
    let (plan, foreseen) = foreseen_step(&mut s, true);
    assert_eq!((plan.sequences.len(), foreseen.len()), (1, 0), "one has ended, and another waits for its place");
    s.rollback(plan);
}

#[test]
fn whoever_paused_goes_on_though_the_device_is_ahead() {
    let mut s = scheduler(16, 4, 32, 4, 10);
    add(&mut s, 1, vec![0; 3], 30);
    add(&mut s, 2, vec![0; 3], 30);
    let (plan, _) = foreseen_step(&mut s, false);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    for (ready, is_ahead, looks, all_scheduled, foreseen) in
        [(2, false, false, 2, 2), (1, true, false, 1, 1), (1, true, false, 1, 1), (2, true, true, 1, 0), (2, false, false, 2, 2)]
    {
        if looks {
            s.recheck_paused();
        }
        let mut plan = if is_ahead { s.schedule_lookahead(|seq| seq <= ready) } else { s.schedule(|seq| seq <= ready) }.unwrap();
        s.reserve_lookahead(&mut plan);
        assert_eq!((plan.sequences.len(), plan.batch.next_slots.len()), (all_scheduled, foreseen));
        commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    }
}

#[test]
fn a_block_that_was_taken_for_a_token_that_did_not_come_is_given_back() {
    for outcome in [TokenOutcome::Fail, TokenOutcome::Stop(2)] {
        let mut s = scheduler(8, 4, 32, 2, 10);
        let arrival = NewGroup {
            prompt: vec![0; 3],
            max_len: 30,
            branching: Branching::One,
            priority: 0,
            keep: true,
            prompt_logits: false,
            root: BlockHash::default(),
        };
        take(&mut s, 1, arrival);
        let (plan, _) = foreseen_step(&mut s, false);
        commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
        let (plan, foreseen) = foreseen_step(&mut s, false);
        assert_eq!((foreseen.len(), s.blocks.used_blocks()), (1, 2), "the fifth token has a block before it is chosen");
        s.rollback(plan);
        assert_eq!(s.blocks.used_blocks(), 1);
        let (plan, _) = foreseen_step(&mut s, false);
        commit_all(&mut s, plan, |_| outcome);
        assert_eq!(s.blocks.used_blocks(), 1, "only what is computed stays");
    }
}

#[test]
fn where_no_block_is_left_for_the_next_token_nothing_is_foreseen() {
    let mut s = scheduler(3, 4, 32, 2, 10);
    for id in [1, 2] {
        add(&mut s, id, vec![0; 3], 8);
    }
    let (plan, _) = foreseen_step(&mut s, false);
    commit_all(&mut s, plan, |_| TokenOutcome::Token(9));
    let (plan, foreseen) = foreseen_step(&mut s, false);
    assert_eq!((plan.sequences.len(), foreseen.len(), s.blocks.used_blocks()), (2, 0, 3));
    s.rollback(plan);
    s.check();
    assert_eq!(s.blocks.used_blocks(), 2, "what one of them got is given back");
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
fn the_youngest_is_preempted_and_comes_back_before_the_waiting() {
    let mut s = scheduler(5, 8, 64, 8, 64);
    (1..=3).for_each(|id| add(&mut s, id, vec![0; 15], 32));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 15), (2, 15)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    // Both need a third block and one is free: the younger is preempted and keeps its tokens.
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
    assert_eq!((s.preemptions(), s.waiting(), s.get(2).unwrap().tokens.len()), (1, 2, 17));
    s.remove(1);
    assert_eq!(step(&mut s, TokenOutcome::Token(9))[0], (2, 17));
}

#[test]
fn a_rolled_back_step_leaves_no_trace_in_lengths_and_is_planned_again() {
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
fn ends_by_length_stop_and_failure_return_every_block() {
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
            s.commit(plan, &[going_on(1, outcome)], &mut events);
        }
        assert_eq!(events, [Event::Advanced { sampled_token: 0, finish: Some(reason), stats: SequenceStats::default() }]);
        assert_eq!(s.blocks().free_blocks(), 16);
        s.check();
    }
}

#[test]
fn a_sequence_that_is_not_ready_keeps_its_blocks_and_goes_on_where_it_was() {
    let mut s = scheduler(64, 8, 64, 8, 64);
    (1..=2).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    step(&mut s, TokenOutcome::Token(9));
    assert_eq!(step_with(&mut s, TokenOutcome::Token(9), |id| id != 1), [(2, 1)]);
    assert_eq!((s.paused(), s.waiting(), s.running(), s.get(1).unwrap().computed), (1, 1, 1, 20));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    assert_eq!((s.paused(), s.preemptions()), (0, 0));
}

#[test]
fn a_sequence_that_is_not_ready_holds_up_nobody() {
    // One place in the batch and a pool for one sequence. The older one is not ready.
    let mut s = scheduler(4, 8, 64, 1, 64);
    add(&mut s, 1, vec![0; 20], 32);
    step(&mut s, TokenOutcome::Token(9));
    add(&mut s, 2, vec![0; 20], 32);
    assert_eq!(step_with(&mut s, TokenOutcome::Token(9), |id| id != 1), [(2, 20)]);
    // The other sequence took its blocks. Its tokens stay.
    assert_eq!((s.preemptions(), s.get(1).unwrap().tokens.len(), s.get(1).unwrap().computed), (1, 21, 0));
}

#[test]
fn a_sequence_that_is_ready_again_goes_before_the_younger() {
    // Places for one sequence at a time, and blocks for both.
    let mut s = scheduler(64, 8, 64, 1, 64);
    (1..=2).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    step(&mut s, TokenOutcome::Token(9));
    for tokens in 21..30 {
        let rows = step_with(&mut s, TokenOutcome::Token(9), |id| id != 1);
        assert_eq!((rows[0].0, s.paused()), (2, 1));
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
        assert_eq!(s.get(1).unwrap().tokens.len(), tokens + 1);
    }
    // The younger kept its blocks each time.
    assert_eq!((s.preemptions(), s.get(2).unwrap().tokens.len()), (0, 29));
}

#[test]
fn every_sequence_that_is_not_ready_counts_as_paused_though_nobody_is_admitted() {
    let mut s = scheduler(64, 8, 64, 2, 64);
    (1..=5).for_each(|id| add(&mut s, id, vec![0; 4], 60));
    step(&mut s, TokenOutcome::Token(9));
    assert_eq!(step_with(&mut s, TokenOutcome::Token(9), |id| id > 2).len(), 2);
    assert_eq!((s.paused(), s.running(), s.waiting()), (2, 2, 3));
    step_with(&mut s, TokenOutcome::Token(9), |id| id > 2);
    assert_eq!(s.paused(), 2);
}

#[test]
fn nothing_runs_while_nobody_is_ready() {
    let mut s = scheduler(64, 8, 64, 8, 64);
    (1..=3).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    assert!(step_with(&mut s, TokenOutcome::Token(9), |_| false).is_empty());
    assert_eq!((s.paused(), s.waiting(), s.blocks().used_blocks()), (3, 3, 0));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)).len(), 3);
}

/// Returns how often a failing step calls `ready`.
fn asks(s: &mut Scheduler, among: Option<&[SeqId]>, ready: impl Fn(SeqId) -> bool) -> usize {
    let asked = std::cell::Cell::new(0);
    let ready = |seq| {
        asked.set(asked.get() + 1);
        ready(seq)
    };
    let plan = match among {
        Some(seqs) => s.schedule_among(seqs, ready),
        None => s.schedule(ready),
    };
    plan.into_iter().for_each(|plan| s.rollback(plan));
    s.check();
    asked.get()
}

#[test]
fn a_step_costs_nothing_of_those_that_have_paused() {
    let mut s = scheduler(64, 8, 64, 8, 64);
    (1..=1000).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    assert!(asks(&mut s, None, |seq| seq == 1) >= 1000);
    assert_eq!(s.paused(), 999);
    for _ in 0..3 {
        assert!(asks(&mut s, None, |seq| seq == 1) <= 2);
    }
    s.recheck_paused();
    assert!(asks(&mut s, None, |seq| seq <= 2) >= 999);
    assert_eq!((s.paused(), s.running()), (998, 2), "who is ready goes on");
    assert!(asks(&mut s, None, |seq| seq <= 2) <= 4);
}

#[test]
fn a_step_of_some_leaves_the_others_where_they_wait_and_asks_nobody_else() {
    let mut s = scheduler(256, 8, 256, 4, 16);
    (1..=1000).for_each(|id| add(&mut s, id, vec![0; 20], 60));
    step(&mut s, TokenOutcome::Token(9));
    assert_eq!(s.running(), 4);
    for some in [&[1, 2][..], &[3, 4], &[3], &[2, 4]] {
        assert!(asks(&mut s, Some(some), |_| true) <= 2 * some.len());
        assert!(s.running_sequences().map(|sequence| sequence.id).eq(some.iter().copied()));
        assert_eq!((s.paused(), s.waiting()), (0, 1000 - some.len()));
    }
    let plan = s.schedule(|_| true).unwrap();
    assert!(plan.sequences.iter().map(|scheduled| scheduled.seq).eq(1..=4), "as if nothing had been tried");
    s.rollback(plan);
}

#[test]
fn there_is_room_for_a_group_of_every_branch() {
    let mut s = scheduler(640, 8, 640, 64, 64);
    for first in (0..12).map(|i| 1 + i * 4) {
        add_branching(&mut s, first, vec![0; 9], 60, Branching::Samples(4));
        let plan = s.schedule(|_| true).unwrap();
        let born = |seq: SeqId| (seq..seq + if seq == first { 4 } else { 1 }).map(move |child| (seq, child));
        let sampled = plan.sampled().flat_map(|scheduled| born(scheduled.seq));
        let sampled: Vec<SampledToken> =
            sampled.map(|(parent, child)| SampledToken { parent, child, outcome: TokenOutcome::Token(9) }).collect();
        s.commit(plan, &sampled, &mut Vec::new());
        s.check();
        assert!(s.groups.room() >= s.running(), "{} groups for {} sequences", s.groups.room(), s.running());
    }
}

#[test]
fn of_several_searches_each_keeps_the_beams_that_go_on_in_whichever_order() {
    let mut s = scheduler(64, 8, 64, 16, 64);
    [1, 11].into_iter().for_each(|first| add_branching(&mut s, first, vec![0; 9], 60, Branching::Beams(3)));
    let mut choose = |sampled: &[(SeqId, SeqId)]| {
        let plan = s.schedule(|_| true).unwrap();
        let sampled: Vec<SampledToken> =
            sampled.iter().map(|&(parent, child)| SampledToken { parent, child, outcome: TokenOutcome::Token(9) }).collect();
        let mut events = Vec::new();
        s.commit(plan, &sampled, &mut events);
        s.check();
        let dropped = |event: &Event| if let Event::Dropped { seq } = event { Some(*seq) } else { None };
        events.iter().filter_map(dropped).collect::<Vec<_>>()
    };
    assert_eq!(choose(&[(1, 1), (1, 2), (1, 3), (11, 11), (11, 12), (11, 13)]), [0; 0]);
    assert_eq!(choose(&[(3, 3), (3, 1), (2, 2), (13, 13), (12, 12), (11, 11)]), [1]);
    assert_eq!(choose(&[(2, 2), (12, 12)]), [3, 1, 11, 13], "nobody goes on by what was chosen a step ago");
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
                    s.remove(live.swap_remove(random.below(live.len())));
                }
                _ => {
                    let unready = random.below(6) as u64;
                    s.recheck_paused();
                    if let Some(plan) = s.schedule(|id| unready == 0 || id % 5 != unready) {
                        s.check();
                        assert!(plan.sequences.iter().all(|scheduled| unready == 0 || scheduled.seq % 5 != unready), "only the ready run");
                        match random.below(8) {
                            0 => s.rollback(plan),
                            _ => {
                                let outcome = if random.below(20) == 0 { TokenOutcome::Stop(1) } else { TokenOutcome::Token(1) };
                                let sampled: Vec<_> = plan.sampled().map(|p| going_on(p.seq, outcome)).collect();
                                let mut events = Vec::new();
                                s.commit(plan, &sampled, &mut events);
                                live.retain(|id| s.get(*id).is_ok());
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
fn admission_leaves_room_for_prompts_half_computed_and_for_the_watermark() {
    // 100 blocks of 16. Each prompt needs 60, so two would take blocks from each other.
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
    assert_eq!(s.running(), 1, "first come, first served: nobody overtakes");
}

#[test]
fn a_pin_is_computed_and_chooses_nothing() {
    for len in [1, 8, 9] {
        let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 4, prefill_chunk: 8, preemption: Preemption::Recompute };
        let mut s = Scheduler::new(options, BlockManager::new(16, Paging::without_windows(8), true).unwrap()).unwrap();
        s.pin(1, NewGroup::pin(vec![0; len], BlockHash::default()).prepare(&Paging::without_windows(8)).unwrap(), 0).unwrap();
        while let Some(plan) = s.schedule(|_| true) {
            assert_eq!((plan.sampled().count(), plan.batch.logit_rows.len()), (0, 0));
            s.commit(plan, &[], &mut Vec::new());
            s.check();
        }
        assert_eq!((s.get(1).unwrap().computed, s.blocks().used_blocks()), (len, blocks_for(len, 8)));
    }
}

#[test]
fn a_sequence_is_resumed_only_where_it_has_room_for_a_token() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 9], 12);
    s.fork(1, None, 2, true).unwrap();
    assert!(s.resume(2, 9, false).unwrap_err().message().contains("has 9 tokens and may have 9"));
    s.check();
    s.resume(2, 10, false).unwrap();
    s.check();
}

/// Adds two samples of a prompt of 16 tokens. The first step forks them.
fn two_samples(s: &mut Scheduler, max_len: usize, prompt_logits: bool) {
    let arrival = NewGroup {
        prompt: vec![0; 16],
        max_len,
        branching: Branching::Samples(2),
        priority: 0,
        keep: false,
        prompt_logits,
        root: BlockHash::default(),
    };
    take(s, 1, arrival);
    let plan = s.schedule(|_| true).unwrap();
    let sampled = [1, 2].map(|child| SampledToken { parent: 1, child, outcome: TokenOutcome::Token(child as u32) });
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}

#[test]
fn samples_that_caught_up_by_sharing_choose_in_the_same_step() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    two_samples(&mut s, 30, false);
    s.preempt_youngest();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 16)]);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)], "the other needs nothing but the blocks of the first");
}

#[test]
fn samples_that_no_longer_fit_together_go_on_one_after_the_other() {
    // Two blocks of prompt and one for each sample. Later, three for each.
    let mut s = scheduler(4, 8, 64, 8, 64);
    two_samples(&mut s, 24, false);
    for id in [1, 2] {
        s.rewind(id, 1).unwrap();
        s.append(id, &[id as u32; 20], 24).unwrap();
    }
    let mut steps = 0;
    while !step(&mut s, TokenOutcome::Token(9)).is_empty() {
        steps += 1;
        assert!(steps < 100, "they take each other's blocks for ever");
    }
    assert_eq!((s.running(), s.waiting(), s.blocks().used_blocks()), (0, 0, 0));
}

#[test]
fn who_wanted_the_prompts_logits_shares_prefixes_again_once_it_has_them() {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 32, prefill_chunk: 64, preemption: Preemption::Recompute };
    let mut s = Scheduler::new(options, BlockManager::new(16, Paging::without_windows(8), true).unwrap()).unwrap();
    two_samples(&mut s, 30, true);
    s.preempt_youngest();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (2, 1)]);
    assert_eq!(s.blocks().used_blocks(), 4, "two of the prompt, and one for each");
}

/// Creates idle forks of sequence 1, which has 16 tokens.
fn idle_forks(s: &mut Scheduler, children: std::ops::Range<SeqId>) {
    children.for_each(|child| s.fork(1, None, child, true).unwrap());
    s.check();
}

#[test]
fn idle_sequences_give_way_one_by_one_and_those_that_share_with_the_running_keep_what_they_have() {
    // Sequence 1 shares two blocks with its forks. Another idle sequence has two.
    let mut s = scheduler(9, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 16], 40);
    step(&mut s, TokenOutcome::Token(9));
    idle_forks(&mut s, 10..14);
    s.import(20, vec![7; 16], 16, 40, None, BlockHash::default()).unwrap();
    assert_eq!((s.idle(), s.blocks().idle_blocks(), s.blocks().free_blocks()), (5, 2, 5));
    add(&mut s, 2, vec![1; 33], 40);
    step(&mut s, TokenOutcome::Token(9));
    // They are younger than the forks, but only they have blocks of their own.
    assert_eq!((s.get(20).unwrap().computed, s.running()), (0, 2));
    assert!((10..14).all(|child| s.get(child).unwrap().computed == 16), "what the running have costs nothing");
    assert_eq!((s.blocks().idle_blocks(), s.preemptions()), (0, 0));
}

#[test]
fn blocks_that_only_idle_sequences_share_count_as_free_and_are_given_back_at_once() {
    let mut s = scheduler(3, 8, 64, 8, 64);
    let (prompt, branching, root) = (vec![0; 16], Branching::One, BlockHash::default());
    take(&mut s, 1, NewGroup { prompt, max_len: 17, branching, priority: 0, keep: true, prompt_logits: false, root });
    step(&mut s, TokenOutcome::Token(9));
    idle_forks(&mut s, 2..102);
    assert_eq!((s.idle(), s.blocks().idle_blocks(), s.blocks().available()), (101, 2, 1));
    add(&mut s, 200, vec![1; 17], 24);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(200, 17)]);
    assert_eq!((s.idle(), s.blocks().idle_blocks(), s.blocks().available()), (101, 0, 0));
}

/// A linear search among the idle sequences would take much longer than a second.
#[test]
fn ten_thousands_of_idle_sequences_cost_each_its_own() {
    let begun = std::time::Instant::now();
    let mut s = scheduler(64, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 16], 40);
    step(&mut s, TokenOutcome::Token(9));
    (2..50_002).for_each(|child| s.fork(1, None, child, child % 2 == 0).unwrap());
    s.remove(1);
    add(&mut s, 100_000, vec![1; 480], 490);
    (2..50_002).filter(|child| child % 4 < 2).for_each(|child| drop(s.remove(child)));
    for _ in 0..50 {
        let Some(plan) = s.schedule(|seq| seq == 100_000) else { break };
        let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| going_on(scheduled.seq, TokenOutcome::Token(9))).collect();
        s.commit(plan, &sampled, &mut Vec::new());
    }
    assert!(s.get(100_000).is_err(), "it had room to come to its end");
    s.check();
    assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
}

#[test]
fn what_is_appended_and_rewound_again_makes_nothing_longer() {
    let mut s = scheduler(16, 8, 64, 8, 64);
    add(&mut s, 1, vec![0; 10], 20);
    s.append(1, &[1; 50], 100).unwrap();
    s.append(1, &[2; 50], 115).unwrap();
    assert_eq!(s.get(1).unwrap().max_len, 115, "as long as any may be");
    s.fork(1, Some(30), 2, true).unwrap();
    s.rewind(1, 61).unwrap();
    assert_eq!(s.get(1).unwrap().max_len, 71, "one of the second fifty is left");
    s.rewind(1, 60).unwrap();
    assert_eq!(s.get(1).unwrap().max_len, 70);
    step(&mut s, TokenOutcome::Token(9));
    s.rewind(1, 30).unwrap();
    assert_eq!([1, 2].map(|id| s.get(id).unwrap().max_len), [40, 40], "a fork is like a rewind");
    s.rewind(1, 10).unwrap();
    assert_eq!(s.get(1).unwrap().max_len, 20);
    s.rewind(1, 5).unwrap();
    assert_eq!(s.get(1).unwrap().max_len, 20, "the prompt gives nothing");
    s.resume(2, 32, false).unwrap();
    s.rewind(2, 10).unwrap();
    assert_eq!(s.get(2).unwrap().max_len, 12, "two tokens more, as it was resumed for");
    s.check();
}

/// Runs a step and records the rows whose logits are wanted, except the last, which is sampled.
fn told(s: &mut Scheduler, rows: &mut Vec<(SeqId, usize)>) {
    let Some(plan) = s.schedule(|_| true) else { return };
    for scheduled in &plan.sequences {
        let end = scheduled.first + scheduled.rows;
        rows.extend((end - scheduled.logits..end - scheduled.samples as usize).map(|row| (scheduled.seq, row)));
    }
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| going_on(scheduled.seq, TokenOutcome::Token(9))).collect();
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}

fn wants_prompt(s: &mut Scheduler, prompt: Vec<u32>) {
    let (branching, root) = (Branching::One, BlockHash::default());
    take(s, 1, NewGroup { prompt, max_len: 60, branching, priority: 0, keep: false, prompt_logits: true, root });
}

#[test]
fn forks_of_a_prompt_half_told_are_told_the_rest() {
    let mut s = scheduler(32, 8, 64, 32, 8);
    wants_prompt(&mut s, vec![0; 20]);
    let mut rows = Vec::new();
    told(&mut s, &mut rows);
    s.fork(1, None, 2, false).unwrap();
    s.fork(1, Some(12), 3, false).unwrap();
    s.fork(1, Some(5), 4, false).unwrap();
    (0..4).for_each(|_| told(&mut s, &mut rows));
    let of = |seq| rows.iter().filter(|row| row.0 == seq).map(|row| row.1).collect::<Vec<_>>();
    assert_eq!(of(1), (0..19).collect::<Vec<_>>());
    assert_eq!([of(2), of(3), of(4)], [(8..19).collect(), (8..11).collect::<Vec<_>>(), vec![]]);
}

#[test]
fn no_row_of_a_prompt_is_told_twice_whatever_is_rewound() {
    let mut s = scheduler(32, 8, 64, 32, 8);
    wants_prompt(&mut s, vec![0; 20]);
    let mut rows = Vec::new();
    told(&mut s, &mut rows);
    s.rewind(1, 6).unwrap();
    assert_eq!(s.get(1).unwrap().logits_from, Some(6), "within what an import takes");
    s.append(1, &[1; 20], 60).unwrap();
    s.preempt_youngest();
    (0..6).for_each(|_| told(&mut s, &mut rows));
    assert!(s.get(1).unwrap().generated > 0);
    s.rewind(1, 12).unwrap();
    s.append(1, &[2; 10], 60).unwrap();
    (0..6).for_each(|_| told(&mut s, &mut rows));
    // Tokens appended within the prompt are reported with it. Tokens after the first sampled one
    // are not.
    assert_eq!(rows, (0..8).chain(6..25).map(|row| (1, row)).collect::<Vec<_>>());
}

#[test]
fn what_is_appended_to_a_sequence_is_looked_for_among_the_prefixes_when_it_begins_to_run() {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: 32, prefill_chunk: 64, preemption: Preemption::Recompute };
    let mut s = Scheduler::new(options, BlockManager::new(32, Paging::without_windows(8), true).unwrap()).unwrap();
    let prompt: Vec<u32> = (0..50).collect();
    add(&mut s, 1, prompt.clone(), 51);
    step(&mut s, TokenOutcome::Token(9));
    // One full block, and a part of the next one.
    for (id, len) in [(2, 8), (3, 13)] {
        let (prompt, branching, root) = (prompt[..len].to_vec(), Branching::One, BlockHash::default());
        take(&mut s, id, NewGroup { prompt, max_len: len + 1, branching, priority: 0, keep: true, prompt_logits: false, root });
        step(&mut s, TokenOutcome::Token(99));
        s.rewind(id, len).unwrap();
        s.append(id, &prompt_from(len), 100).unwrap();
        let before = s.prefix();
        s.resume(id, 51, false).unwrap();
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(id, 2)], "six blocks of eight are there");
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
fn a_group_that_was_swapped_out_goes_on_where_it_was_and_nobody_newer_comes_first() {
    let mut s = swapping(Preemption::Swap, 5, 5);
    (1..=2).for_each(|id| add(&mut s, id, vec![0; 15], 32));
    step(&mut s, TokenOutcome::Token(9));
    step(&mut s, TokenOutcome::Token(9));
    add(&mut s, 3, vec![0; 2], 32);
    // Both need a third block and one is free: the younger is preempted.
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)]);
    assert_eq!((s.preemptions(), s.preemptions_swapped(), s.blocks().swapped(), s.blocks().host_used()), (1, 1, 1, 2));
    for _ in 0..5 {
        assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)], "the newest would fit, and waits");
    }
    s.remove(1);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(2, 1), (3, 2)], "nothing is computed again");
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
}

#[test]
fn samples_that_had_to_go_come_back_sharing_what_they_shared() {
    for (preemption, computed) in [(Preemption::Swap, 0), (Preemption::Recompute, 16 + 4)] {
        let mut s = swapping(preemption, 16, 16);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        step(&mut s, TokenOutcome::Token(9));
        let before = s.blocks().used_blocks();
        assert_eq!(before, 4, "two of the prompt, and one for each");
        s.preempt_youngest();
        s.record_moves(true, true);
        s.check();
        assert_eq!(s.blocks().used_blocks(), 0);
        assert_eq!(s.blocks().host_used(), if computed == 0 { before } else { 0 }, "what is shared moves once");
        let mut rows = Vec::new();
        while s.get(1).unwrap().generated < 4 {
            rows.extend(step(&mut s, TokenOutcome::Token(9)));
        }
        assert_eq!((s.blocks().used_blocks(), s.blocks().host_used()), (before, 0));
        // The prompt once, and the sampled token of each.
        assert_eq!(rows.iter().map(|(_, rows)| rows).sum::<usize>(), computed + 2, "{rows:?}");
    }
}

#[test]
fn a_group_that_does_not_fit_the_host_tier_as_a_whole_is_computed_again() {
    for host_blocks in [3, 4] {
        let mut s = swapping(Preemption::Swap, 16, host_blocks);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        s.preempt_youngest();
        s.record_moves(true, true);
        s.check();
        let fits = host_blocks == 4;
        assert_eq!((s.blocks().swapped(), s.blocks().host_used()), if fits { (2, 4) } else { (0, 0) });
        assert_eq!([1, 2].map(|id| s.get(id).unwrap().computed), if fits { [17; 2] } else { [0; 2] });
    }
}

#[test]
fn who_could_not_be_moved_out_or_back_is_computed_again() {
    for (out, back) in [(false, true), (true, false)] {
        let mut s = swapping(Preemption::Swap, 16, 16);
        two_samples(&mut s, 30, false);
        step(&mut s, TokenOutcome::Token(9));
        s.preempt_youngest();
        s.record_moves(out, true);
        s.check();
        assert_eq!((s.preemptions(), s.preemptions_swapped()), (1, out as u64));
        let plan = s.schedule(|_| true).unwrap();
        assert_eq!(plan.sequences[0].rows, if out { 1 } else { 17 });
        s.rollback(plan);
        s.record_moves(true, back);
        s.check();
        assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
        assert_eq!([1, 2].map(|id| s.get(id).unwrap().computed), [0; 2]);
        while !step(&mut s, TokenOutcome::Token(9)).is_empty() {}
        assert_eq!(s.blocks().used_blocks(), 0);
    }
}

#[test]
fn auto_takes_what_has_cost_less_so_far() {
    // 17 tokens each, in 4 blocks that are copied out and back. The 16 prompt tokens are shared.
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
fn an_idle_sequence_gives_way_to_the_host_tier_and_goes_on_without_computing_again() {
    let mut s = swapping(Preemption::Swap, 6, 6);
    s.import(1, vec![7; 16], 16, 40, None, BlockHash::default()).unwrap();
    add(&mut s, 2, vec![1; 36], 48);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(2, 36)]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used(), s.preemptions()), (1, 2, 0));
    s.fork(1, Some(9), 3, true).unwrap();
    s.check();
    s.remove(2);
    [1, 3].into_iter().for_each(|id| s.resume(id, 40, false).unwrap());
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1), (3, 1)]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (0, 0));
}

#[test]
fn where_the_host_tier_is_full_the_longest_idle_leave_it() {
    let mut s = swapping(Preemption::Swap, 6, 5);
    for id in 1..=3 {
        s.import(id, vec![id as u32; 16], 16, 40, None, BlockHash::default()).unwrap();
    }
    add(&mut s, 4, vec![9; 47], 48);
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(4, 47)]);
    assert_eq!([1, 2, 3].map(|id| s.get(id).unwrap().computed), [0, 16, 16]);
    assert_eq!((s.blocks().swapped(), s.blocks().host_used()), (2, 4));
    // A group that must be preempted has precedence over idle sequences in the host tier.
    let mut s = swapping(Preemption::Swap, 7, 4);
    s.import(1, vec![7; 16], 16, 40, None, BlockHash::default()).unwrap();
    (2..=3).for_each(|id| add(&mut s, id, vec![id as u32; 23], 40));
    (0..3).for_each(|_| drop(step(&mut s, TokenOutcome::Token(9))));
    assert_eq!((s.preemptions_swapped(), s.get(1).unwrap().computed, s.get(3).unwrap().computed), (1, 0, 24));
}

#[test]
fn what_came_back_can_be_found_again() {
    let options = SchedulerOptions { max_batch_tokens: 128, max_seqs: 8, prefill_chunk: 128, preemption: Preemption::Swap };
    let mut s = Scheduler::new(options, BlockManager::new(4, Paging::without_windows(8), true).unwrap().with_host(4).unwrap()).unwrap();
    let arrival = |token, len: usize, max_len| {
        let (prompt, branching, root) = (vec![token; len], Branching::One, BlockHash::default());
        NewGroup { prompt, max_len, branching, priority: 0, keep: max_len == 17, prompt_logits: false, root }
    };
    take(&mut s, 1, arrival(7, 16, 17));
    step(&mut s, TokenOutcome::Token(9));
    // This request replaces all cached blocks.
    take(&mut s, 2, arrival(8, 31, 32));
    step(&mut s, TokenOutcome::Token(9));
    s.resume(1, 18, false).unwrap();
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(1, 1)], "it ends with that");
    let before = s.prefix().hits;
    take(&mut s, 3, arrival(7, 17, 18));
    assert_eq!(step(&mut s, TokenOutcome::Token(9)), [(3, 1)]);
    assert_eq!(s.prefix().hits - before, 16);
}

#[test]
fn blocks_that_were_reserved_for_a_step_that_failed_do_not_move() {
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
fn samples_and_beams_that_come_back_compute_their_beginning_once_whatever_the_windows() {
    for branching in [Branching::Samples(3), Branching::Beams(3)] {
        // The pool has exactly the blocks that the paging promises.
        let mut s = mixed(Paging::new(8, &[None, Some(8)]).max_blocks_of(3, 90, 120, 16), false);
        add_branching(&mut s, 1, (0..90).collect(), 120, branching);
        let mut last = None;
        while last.is_none() {
            let plan = s.schedule(|_| true).unwrap();
            let sampled: Vec<SampledToken> = plan
                .sampled()
                .flat_map(|_| (1..=3).map(|child| SampledToken { parent: 1, child, outcome: TokenOutcome::Token(child as u32) }))
                .collect();
            last = (!sampled.is_empty()).then_some(());
            s.commit(plan, &sampled, &mut Vec::new());
            s.check();
        }
        (0..12).for_each(|_| assert_eq!(step(&mut s, TokenOutcome::Token(7)).len(), 3));
        s.preempt_youngest();
        let (mut rows, mut steps) = (0, 0);
        while s.get(1).is_ok() {
            let told = step(&mut s, TokenOutcome::Token(7));
            assert!(!told.is_empty(), "{branching:?}: nobody goes on");
            rows += told.iter().map(|(_, rows)| if *rows > 1 { *rows } else { 0 }).sum::<usize>();
            steps += 1;
            assert!(steps < 200);
        }
        // The prompt once, and twelve tokens of each sequence.
        assert!((90..130).contains(&rows), "{branching:?}: {rows} rows");
        assert_eq!(s.preemptions(), 1, "{branching:?}");
    }
}

#[test]
fn what_others_have_too_is_not_counted_as_given_back() {
    let mut s = mixed(64, false);
    add(&mut s, 1, vec![0; 24], 200);
    step(&mut s, TokenOutcome::Token(9));
    step(&mut s, TokenOutcome::Token(9));
    let needed = |s: &Scheduler| s.blocks.needed(&s.get(1).unwrap().table, 24..200, 1);
    // 22 more blocks for the group without a window. The window takes two, and one is allocated.
    assert_eq!(needed(&s), 22 + 1);
    s.fork(1, None, 2, true).unwrap();
    assert_eq!(needed(&s), 22 + 2, "and now another's, too");
}

#[test]
fn a_pin_serves_its_own_prompt_whatever_the_windows() {
    for len in [24, 25, 31] {
        let mut s = mixed(15, true);
        let pin = NewGroup::pin(vec![3; len], BlockHash::default()).prepare(s.blocks.paging()).unwrap();
        s.pin(1, pin, 0).unwrap();
        while !step(&mut s, TokenOutcome::Token(9)).is_empty() {}
        // Another request needs the blocks that the pin does not hold.
        let (branching, root) = (Branching::One, BlockHash::root(&[1; 32], b""));
        take(&mut s, 3, NewGroup { prompt: vec![5; 48], max_len: 49, branching, priority: 0, keep: false, prompt_logits: false, root });
        while s.get(3).is_ok() {
            step(&mut s, TokenOutcome::Token(9));
        }
        let hits = s.prefix().hits;
        add(&mut s, 4, vec![3; len], len + 1);
        step(&mut s, TokenOutcome::Token(9));
        assert_eq!(s.prefix().hits - hits, ((len - 1) / 8 * 8) as u64, "a pin of {len} tokens");
    }
}

#[test]
fn a_token_counts_once_however_many_groups_have_blocks_of_it() {
    let mut s = mixed(64, false);
    add(&mut s, 1, vec![0; 40], 200);
    for _ in 0..4 {
        step(&mut s, TokenOutcome::Token(9));
    }
    let sequence = s.get(1).unwrap();
    let load = s.blocks.swap_out_load(std::iter::once(&sequence.table));
    assert_eq!((load.tokens, load.blocks), (sequence.computed, sequence.table.places() + 2));
}
