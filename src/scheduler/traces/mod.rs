//! Long random traces of all operations on sequences. A dense model predicts the contents of each
//! slot of both tiers and the tokens of each sequence. A wrong table, a missing copy or a wrong
//! prefix shows as wrong contents.

mod checks;
mod reader;
mod steps;

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use reader::{EventCounts, EventReader};

use super::tests::{Random, add_group, sampled_token};
use super::*;
use crate::kv::{BlockHash, NULL_BLOCK, Paging};
use crate::types::options::{AllocationPolicy, BatchingPolicy, OrderPolicy};
use crate::types::{IdAllocator, RequestId, options};

/// The contents of a slot: the hash of all tokens up to its own.
type Content = u64;
const SEEDS: u64 = 60;
const GARBAGE: Content = 0;

struct Trace {
    s: Scheduler,
    random: Random,
    policies: options::Policies,
    /// Time in microseconds.
    now: u64,
    max_len_in_pool: usize,
    /// [groups]
    windows: Vec<Option<usize>>,
    /// [blocks * block_size]
    slots: Vec<Content>,
    host: HostTier,
    /// Expected tokens of each sequence.
    tokens: HashMap<SeqId, Vec<u32>>,
    ids: IdAllocator,
    /// Request of each beam.
    beams: HashMap<SeqId, RequestId>,
    /// Maximum number of blocks of each request with beams.
    needs: HashMap<RequestId, usize>,
    cache: CacheModel,
    events: Vec<Event>,
    /// The step in flight, whose outcomes the host does not know yet.
    in_flight: Option<LaunchedStep>,
}

/// The host tier as a device sees it.
struct HostTier {
    /// [host blocks * block_size]
    slots: Vec<Content>,
    /// The host blocks that another thread reads, if the tier is a file.
    reads: Option<VecDeque<u32>>,
}

/// What is known of the prefix cache.
struct CacheModel {
    /// Predecessor of each known block hash.
    before: HashMap<BlockHash, BlockHash>,
    reader: EventReader,
}

/// A step that the device has computed and the scheduler has not committed.
struct LaunchedStep {
    plan: StepPlan,
    sampled: Vec<SampledToken>,
    /// The tokens that the device has sampled, in the order of their rows.
    device_samples: Vec<u32>,
}

impl Trace {
    fn new(seed: u64) -> Trace {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1);
        let block_size = 8 << random.below(3);
        let windows = random_windows(&mut random, block_size);
        let blocks = (4 + random.below(20)) * windows.len();
        let max_seqs = 1 + random.below(12);
        let max_batch_tokens = max_seqs + random.below(64);
        let prefill_chunk = 1 + random.below(64);
        let preemption = [Preemption::Recompute, Preemption::Swap, Preemption::Auto][random.below(3)];
        let host_blocks = if preemption == Preemption::Recompute { 0 } else { 1 + random.below(2 * blocks) };
        let options = SchedulerOptions { max_batch_tokens, max_seqs, prefill_chunk, preemption };
        let paging = Paging::new(block_size, &windows);
        let max_len_in_pool = paging.max_len_in(blocks, 6 * block_size, options.max_tokens_per_step());
        let manager = BlockManager::new(blocks, paging, random.below(3) > 0).unwrap().with_host(host_blocks).unwrap();
        let max_moves = [1, 2, 1 + random.below(8), usize::MAX][random.below(4)];
        let policies = if seed.is_multiple_of(3) { options::Policies::default() } else { random_policies(&mut random) };
        let mut s = Scheduler::with_policies(options, manager, Policies::new(&policies)).unwrap();
        s.limit_moves(max_moves);
        let reads = (random.below(3) == 0).then(VecDeque::new);
        if reads.is_some() {
            s.read_host_ahead().unwrap();
        }
        let reader = EventReader::new(&mut s, seed);
        Trace {
            s,
            policies,
            now: 0,
            max_len_in_pool,
            windows,
            slots: vec![GARBAGE; blocks * block_size],
            host: HostTier { slots: vec![GARBAGE; host_blocks * block_size], reads },
            tokens: HashMap::new(),
            ids: IdAllocator::default(),
            beams: HashMap::new(),
            needs: HashMap::new(),
            cache: CacheModel { before: HashMap::new(), reader },
            events: Vec::new(),
            in_flight: None,
            random,
        }
    }

    fn sequence(&self, id: &SeqId) -> &SequenceKv {
        self.s.get(*id).unwrap()
    }

    fn block_size(&self) -> usize {
        self.s.blocks.block_size()
    }

    /// Returns tokens with few distinct values, so that many sequences have common prefixes.
    fn random_tokens(&mut self, n: usize) -> Vec<u32> {
        let odd = self.random.below(3) == 0;
        (0..n).map(|i| if odd && self.random.below(16) == 0 { 1 + i as u32 % 2 } else { 0 }).collect()
    }

    fn random_root(&mut self) -> BlockHash {
        BlockHash::root(&[0; 32], &[self.random.below(4) as u8 / 3])
    }

    /// Returns a random sequence that the host may use in a call.
    fn random_sequence(&mut self, idle: bool) -> Option<SeqId> {
        let free = |seq: &&SeqId| match self.sequence(seq).group {
            Some(group) => !idle && matches!(self.s.queues.groups[group].branching, Branching::One | Branching::Samples(_)),
            None => !self.sequence(seq).request.pinned,
        };
        let mut known: Vec<SeqId> = self.tokens.keys().filter(free).copied().collect();
        known.sort_unstable();
        if known.is_empty() { None } else { Some(known[self.random.below(known.len())]) }
    }

    fn act(&mut self) {
        let few = self.tokens.len() < 30;
        self.now += self.random.below(20_000) as u64;
        self.s.begin_step(self.now);
        let (ended, room) = (self.random.below(4), self.random.below(4));
        self.end_reads(ended, room);
        match self.random.below(40) {
            0..4 if few => self.add(),
            4..7 if few => self.fork(),
            7..9 => self.append(),
            9..12 => self.rewind(),
            12..15 => self.resume(),
            15 => self.end(),
            16..18 => self.remove(),
            18 if few => self.pin(),
            19 => self.resize(),
            20 => self.fetch(),
            _ => self.step(),
        }
        self.check();
        self.cache.reader.read(&mut self.s);
    }

    fn add(&mut self) {
        let n = 2 + self.random.below(4);
        let branching = [Branching::One, Branching::One, Branching::Samples(n), Branching::Beams(n)][self.random.below(4)];
        let mut prompt_len = 1 + self.random.below(self.max_len_in_pool - 1);
        if self.random.below(3) == 0 {
            prompt_len = (prompt_len / self.block_size()).max(1) * self.block_size();
        }
        let prompt_len = prompt_len.min(self.max_len_in_pool - 1);
        let max_len = (prompt_len + 1 + self.random.below(3 * self.block_size())).min(self.max_len_in_pool);
        let max_blocks =
            self.s.blocks.paging().max_blocks_of(branching.max_members(), prompt_len, max_len, self.s.options.max_tokens_per_step());
        if max_blocks > self.s.blocks.total() || branching.max_members() > self.s.options.max_seqs {
            return;
        }
        let (prompt, root) = (self.random_tokens(prompt_len), self.random_root());
        let width = branching.max_members() as u32;
        let request = self.ids.request(width);
        if let Branching::Beams(_) = branching {
            self.beams.extend(request.sequences(width).map(|beam| (beam, request)));
            self.needs.insert(request, max_blocks);
        }
        let keep = !matches!(branching, Branching::Beams(_)) && self.random.below(2) == 0;
        let logits_from = (self.random.below(5) == 0).then(|| self.random.below(prompt_len));
        let prompt_only = branching == Branching::One && self.random.below(6) == 0;
        let max_len = if prompt_only { prompt_len } else { max_len };
        let priority = self.random.below(5) as i32 - 2;
        let id = request.sequence(0);
        self.tokens.insert(id, prompt.clone());
        add_group(&mut self.s, id, NewGroup { prompt, max_len, branching, priority, keep, logits_from, prompt_only, root });
    }

    fn fork(&mut self) {
        let Some(parent) = self.random_sequence(false) else { return };
        let tokens = &self.tokens[&parent];
        let len = 1 + self.random.below(tokens.len());
        let all = self.random.below(2) == 0;
        let child = self.ids.sequence();
        let runs = self.sequence(&parent).group.is_some() && self.random.below(2) == 0;
        self.s.fork(parent, if all { None } else { Some(len) }, child, runs).unwrap();
        let shared = if all { tokens.clone() } else { tokens[..len].to_vec() };
        self.tokens.insert(child, shared);
    }

    fn append(&mut self) {
        let Some(id) = self.random_sequence(false) else { return };
        let more = 1 + self.random.below(2 * self.block_size());
        let more = self.random_tokens(more);
        let runs = self.sequence(&id).group.is_some();
        let len = self.tokens[&id].len() + more.len();
        let fits = len < self.max_len_in_pool || (len == self.max_len_in_pool && (!runs || self.sequence(&id).request.prompt_only));
        assert_eq!(self.s.append(id, &more, self.max_len_in_pool).is_ok(), fits);
        if fits {
            self.tokens.get_mut(&id).unwrap().extend(more);
        }
    }

    fn rewind(&mut self) {
        let Some(id) = self.random_sequence(false) else { return };
        let tokens = self.tokens.get_mut(&id).unwrap();
        let len = 1 + self.random.below(tokens.len());
        self.s.rewind(id, len).unwrap();
        tokens.truncate(len);
    }

    fn resume(&mut self) {
        let Some(id) = self.random_sequence(true) else { return };
        let len = self.tokens[&id].len();
        let max_len = (len + self.random.below(3 * self.block_size())).min(self.max_len_in_pool);
        let (keep, prompt_only) = (self.random.below(2) == 0, self.random.below(5) == 0);
        let has_room = len < max_len || (prompt_only && len == max_len);
        assert_eq!(self.s.resume(id, max_len, keep, prompt_only).is_ok(), has_room, "a resumed sequence has room for a token");
    }

    fn end(&mut self) {
        let Some(id) = self.random_sequence(false) else { return };
        self.s.end(id);
        self.delete_ended();
    }

    fn remove(&mut self) {
        let mut known: Vec<SeqId> = self.tokens.keys().copied().collect();
        if known.is_empty() {
            return;
        }
        known.sort_unstable();
        let id = known[self.random.below(known.len())];
        // Beams are removed together.
        let removed = if self.beams.contains_key(&id) { self.s.members(id).collect() } else { vec![id] };
        for id in removed {
            self.s.remove(id);
            self.tokens.remove(&id);
        }
    }

    fn pin(&mut self) {
        if !self.s.blocks.caches_prefixes() {
            return;
        }
        let len = 1 + self.random.below(self.max_len_in_pool - 1);
        let (prompt, root) = (self.random_tokens(len), self.random_root());
        let id = self.ids.pin().sequence();
        self.tokens.insert(id, prompt.clone());
        let prepared = NewGroup::pin(prompt, root).prepare(self.s.blocks.paging()).unwrap();
        self.s.pin(id, prepared, self.random.below(3) as u32).unwrap();
    }

    /// Resizes the pool, with enough blocks for the pending requests.
    fn resize(&mut self) {
        let needs = self.beams.iter().filter(|(beam, _)| self.tokens.contains_key(beam)).map(|(_, request)| self.needs[request]);
        let alone = self.s.blocks.paging().max_blocks(self.max_len_in_pool, self.s.options.max_tokens_per_step());
        let min_blocks = needs.fold(alone, usize::max);
        let total = min_blocks + self.random.below(self.s.blocks.capacity() - min_blocks + 1);
        if total >= self.s.blocks.total() {
            return self.s.grow(total);
        }
        // Blocks move, so the step in flight is discarded.
        if let Some(step) = self.in_flight.take() {
            self.fail(step);
        }
        let moved = self.make_moves(true);
        self.record_moves(moved);
        let mut moves = Vec::new();
        self.s.shrink_pool(total, &mut moves).unwrap();
        let moved = self.make_moves(true);
        self.record_moves(moved);
        // Pins that the scheduler has removed are deleted from the model.
        self.delete_ended();
        self.check();
        if self.random.below(4) == 0 {
            return; // the transfers failed
        }
        moves.iter().for_each(|copy| self.copy(copy.from, copy.to));
        let end = total * self.block_size();
        self.slots[end..].fill(GARBAGE);
        self.s.shrink(total, &moves);
        assert_eq!(self.s.blocks.total(), total);
    }

    /// Swaps a sequence in, as an export does.
    fn fetch(&mut self) {
        let Some(id) = self.random_sequence(false) else { return };
        if !self.sequence(&id).table.is_on_device() {
            self.s.swap_in_sequence(id);
            let moved = self.make_moves(true);
            self.record_moves(moved);
        }
    }

    /// Makes the transfers like an executor: first those out, then those back. If a transfer fails,
    /// the contents of its target are undefined.
    fn make_moves(&mut self, chance: bool) -> (bool, bool) {
        let (size, moves) = (self.block_size(), self.s.moves());
        let hosts: HashSet<u32> = moves.out.iter().map(|out| out.host).collect();
        let devices: HashSet<u32> = moves.back.iter().map(|back| back.device).collect();
        assert_eq!((hosts.len(), devices.len()), (moves.out.len(), moves.back.len()), "no block is written twice");
        assert!(moves.back.iter().all(|back| !hosts.contains(&back.host)), "no block is read from the host tier while it is written");
        let works = [0, 0].map(|_| !chance || self.random.below(8) > 0);
        let moves = self.s.moves();
        let place = |block: u32| block as usize * size..(block as usize + 1) * size;
        for out in &moves.out {
            match works[0] {
                true => self.host.slots[place(out.host)].copy_from_slice(&self.slots[place(out.device)]),
                false => self.host.slots[place(out.host)].fill(GARBAGE),
            }
        }
        for back in &moves.back {
            match works[1] {
                true => self.slots[place(back.device)].copy_from_slice(&self.host.slots[place(back.host)]),
                false => self.slots[place(back.device)].fill(GARBAGE),
            }
        }
        (moves.out.is_empty() || works[0], moves.back.is_empty() || works[1])
    }

    /// Ends the oldest `ended` reads of a file. Only `room` blocks can be written to it in this
    /// step.
    fn end_reads(&mut self, ended: usize, room: usize) {
        let Some(reads) = &mut self.host.reads else { return };
        let ended = ended.min(reads.len());
        for block in reads.drain(..ended) {
            if self.random.below(8) == 0 {
                self.s.fail_read(block);
            } else {
                self.s.finish_read(block);
            }
        }
        if self.random.below(50) == 0 {
            self.s.drop_queued_out();
        }
        self.s.lower_limit_out(room);
    }

    /// Starts reads as the engine does after the transfers of a step. A block that is read again
    /// was cancelled before.
    fn begin_reads(&mut self) {
        let Some(reads) = &mut self.host.reads else { return };
        while reads.len() < 3
            && let Some(block) = self.s.next_to_read()
        {
            reads.retain(|&other| other != block);
            reads.push_back(block);
        }
    }

    fn record_moves(&mut self, (out, back): (bool, bool)) {
        self.s.record_moves(out, back);
        self.begin_reads();
    }

    fn delete_ended(&mut self) {
        self.tokens.retain(|id, _| self.s.sequences.find(*id).is_some());
    }

    fn copy(&mut self, from: u32, to: u32) {
        let size = self.block_size();
        self.slots.copy_within(from as usize * size..(from as usize + 1) * size, to as usize * size);
    }

    /// Executes the plan like a device: copies, then writes, then all reads of attention.
    fn run(&mut self, plan: &StepPlan) {
        plan.batch.copies.iter().for_each(|copy| self.copy(copy.from, copy.to));
        for (span, scheduled) in plan.batch.spans.iter().zip(&plan.sequences) {
            let tokens = self.expected_tokens(scheduled.seq);
            let contents = contents(&tokens);
            for row in span.first_token as usize..(span.first_token + span.tokens) as usize {
                let position = plan.batch.positions[row] as usize;
                let placeholder = plan.batch.placeholders.iter().find(|placeholder| placeholder.token as usize == row);
                let sample = |sample: u32| self.in_flight.as_ref().unwrap().device_samples[sample as usize];
                assert_eq!(placeholder.map_or(plan.batch.tokens[row], |placeholder| sample(placeholder.sample)), tokens[position]);
                let slots = plan.batch.slots.chunks_exact(self.windows.len()).nth(row).unwrap();
                (0..).zip(slots).for_each(|(group, &slot)| self.slots[slot as usize] = contents[position] + group);
            }
        }
        for (span, scheduled) in plan.batch.spans.iter().zip(&plan.sequences) {
            let contents = &contents(&self.expected_tokens(scheduled.seq))[..scheduled.first + scheduled.tokens];
            for (group, window) in self.windows.iter().enumerate() {
                let seen = window.map_or(0, |window| (scheduled.first + 1).saturating_sub(window));
                for (position, content) in contents.iter().enumerate().skip(seen) {
                    let entry = position / self.block_size() * self.windows.len() + group;
                    let block = plan.batch.tables[span.table as usize + entry] as usize;
                    let slot = block * self.block_size() + position % self.block_size();
                    assert_eq!(self.slots[slot], content + group as u64, "sequence {} at {position}: wrong contents", scheduled.seq);
                }
            }
        }
    }

    /// Returns the tokens of a sequence, with the one that the step in flight samples.
    fn expected_tokens(&self, seq: SeqId) -> Vec<u32> {
        let mut tokens = self.tokens[&seq].clone();
        if let Some(step) = self.in_flight.as_ref()
            && self.sequence(&seq).expected_len() > tokens.len()
            && let Some(sampled) = step.sampled.iter().find(|sampled| sampled.child == seq)
        {
            tokens.push(match sampled.outcome {
                TokenOutcome::Token(token) | TokenOutcome::Stop(token) => token,
                TokenOutcome::Complete | TokenOutcome::Fail => 0,
            });
        }
        tokens
    }

    /// Runs until all sequences have ended, and checks that nothing is left.
    fn drain(&mut self) -> EventCounts {
        let mut steps = 0;
        if let Some(step) = self.in_flight.take() {
            self.commit(step);
        }
        loop {
            self.s.begin_step(self.now);
            self.end_reads(1, 1);
            let plan = self.plan(|_| true, false);
            self.delete_ended();
            let Some(plan) = plan else {
                if !self.s.waits_for_moves() {
                    break;
                }
                steps += 1;
                assert!(steps < 20_000, "starvation");
                continue;
            };
            self.check_plan(&plan);
            self.run(&plan);
            let sampled = self.choose(&plan, false);
            self.commit(LaunchedStep { plan, sampled, device_samples: Vec::new() });
            self.check();
            steps += 1;
            assert!(steps < 20_000, "starvation");
        }
        assert!(self.s.queues.groups.len() == 0, "no group is left");
        let rest: Vec<SeqId> = self.tokens.keys().copied().collect();
        rest.into_iter().for_each(|id| drop(self.s.remove(id)));
        self.s.check();
        assert_eq!((self.s.blocks.used_blocks(), self.s.blocks.filled_slots(), self.s.idle()), (0, 0, 0));
        assert_eq!((self.s.blocks.host_used(), self.s.blocks.swapped()), (0, 0));
        self.cache.reader.finish(&mut self.s)
    }
}

/// Returns random windows for one to three layer groups.
fn random_windows(random: &mut Random, block_size: usize) -> Vec<Option<usize>> {
    let mut windows = vec![(random.below(3) == 0).then(|| 1 + random.below(3 * block_size))];
    for _ in 1..random.below(4) {
        windows.push((random.below(4) > 0).then(|| 1 + random.below(3 * block_size)));
    }
    windows
}

fn random_policies(random: &mut Random) -> options::Policies {
    let ageing = Duration::from_millis(1 + random.below(100) as u64);
    let rows = 1 + random.below(40);
    let orders = [OrderPolicy::Fcfs, OrderPolicy::Priority { ageing }, OrderPolicy::ShortestPredicted { ageing }];
    let batchings = [
        BatchingPolicy::Mixed,
        BatchingPolicy::PrefillFirst { threshold: rows },
        BatchingPolicy::DecodeFirst { budget: rows },
        BatchingPolicy::Static,
    ];
    options::Policies {
        order: orders[random.below(3)],
        batching: batchings[random.below(4)],
        allocation: [AllocationPolicy::OnDemand, AllocationPolicy::MaxTokens][random.below(2)],
    }
}

/// Returns the expected contents of the slots of these tokens.
fn contents(tokens: &[u32]) -> Vec<Content> {
    let next = |hash: &mut Content, token: &u32| {
        *hash = (*hash ^ *token as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) | 1;
        Some(*hash)
    };
    tokens.iter().scan(7, next).collect()
}

#[test]
fn every_token_attends_to_its_own_sequence_and_all_sequences_end() {
    let mut counts = EventCounts::default();
    for seed in 0..SEEDS {
        let mut trace = Trace::new(seed);
        (0..2000).for_each(|_| trace.act());
        counts += trace.drain();
    }
    assert!(counts.stored > 5000 && counts.removed > 3000 && counts.cleared > 100, "the traces have few events: {counts:?}");
}
