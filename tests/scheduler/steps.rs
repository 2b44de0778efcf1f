//! After a warm-up, the scheduler and the block manager allocate no memory in a step. Meanwhile,
//! requests are added, forked, dropped, preempted, rescheduled, and end or fail.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::support::Random;
use pagedllm::kv::{BlockHash, BlockManager, Paging};
use pagedllm::scheduler::{Branching, Event, NewGroup, SampledToken, Scheduler, SchedulerOptions, StepPlan, TokenOutcome};
use pagedllm::types::options::Preemption;
use pagedllm::types::{RequestId, SeqId};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

impl Counting {
    fn count() {
        // Allocations while a thread ends are not counted.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counting::count();
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Counting::count();
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Counting::count();
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: usize = 16;
/// Maximum number of tokens of a sequence. Five of these fit the pool.
const MAX_LEN: usize = 176;
/// Steps until all buffers have their largest size, and measured steps.
const WARM_UP: usize = 4000;
const STEPS: usize = 8000;

/// A request that has not ended.
#[derive(Clone, Copy)]
struct Request {
    first: RequestId,
    branching: Branching,
}

impl Request {
    fn sequences(&self) -> impl Iterator<Item = SeqId> + use<> {
        self.first.sequences(self.branching.max_members() as u32)
    }
}

struct World {
    scheduler: Scheduler,
    random: Random,
    requests: Vec<Request>,
    next: u64,
    sampled: Vec<SampledToken>,
    events: Vec<Event>,
    /// Number of allocations of the scheduler.
    allocations: usize,
}

impl World {
    fn new(preemption: Preemption) -> World {
        let options = SchedulerOptions { max_batch_tokens: 256, max_seqs: 32, prefill_chunk: 64, preemption };
        let blocks = BlockManager::new(64, Paging::without_windows(BLOCK), true).unwrap().with_host(48).unwrap();
        World {
            scheduler: Scheduler::new(options, blocks).unwrap(),
            random: Random(88_172_645_463_325_252),
            requests: Vec::new(),
            next: 1,
            sampled: Vec::new(),
            events: Vec::with_capacity(3 * 32),
            allocations: 0,
        }
    }

    /// Calls the scheduler and counts its allocations.
    fn call<T>(&mut self, call: impl FnOnce(&mut Scheduler) -> T) -> T {
        let before = ALLOCATIONS.get();
        let result = call(&mut self.scheduler);
        self.allocations += ALLOCATIONS.get() - before;
        result
    }

    fn add(&mut self) {
        let n = 2 + self.random.below(4);
        let branching = [Branching::One, Branching::Samples(n), Branching::Beams(n)][self.random.below(3)];
        let prompt: Vec<u32> = (0..1 + self.random.below(100)).map(|i| if i < 20 { 0 } else { self.random.below(3) as u32 }).collect();
        let (max_len, keep) = (prompt.len() + 1 + self.random.below(60), self.random.below(4) == 0);
        let keep = keep && !matches!(branching, Branching::Beams(_));
        let group =
            NewGroup { prompt, max_len, branching, priority: 0, keep, logits_from: None, prompt_only: false, root: BlockHash::default() };
        let prepared = group.prepare(&Paging::without_windows(BLOCK)).unwrap();
        let first = RequestId::from_raw(self.next);
        // The lists of all sequences grow with their number. All other memory is reserved.
        self.scheduler.add(first.sequence(0), prepared).unwrap();
        self.next += branching.max_members() as u64;
        self.requests.push(Request { first, branching });
    }

    fn step(&mut self) {
        if self.requests.len() < 40 && self.random.below(3) == 0 {
            self.add();
        }
        if self.random.below(40) == 0 && !self.requests.is_empty() {
            let request = self.requests[self.random.below(self.requests.len())];
            let end = self.random.below(2) == 0 && !matches!(request.branching, Branching::Beams(_));
            request.sequences().for_each(|seq| self.call(|s| if end { s.end(seq) } else { drop(s.remove(seq)) }));
        }
        self.append();
        let unready = self.random.below(6) as u64;
        let ready = |seq: SeqId| unready > 3 || seq.get() % 5 != unready;
        let selected: [SeqId; 3] =
            [0; 3].map(|_| self.requests.get(self.random.below(60)).map_or(SeqId::default(), |request| request.first.sequence(0)));
        let plan = match self.random.below(10) {
            0 => self.call(|s| s.schedule_among(&selected, ready)),
            _ => self.call(|s| {
                s.recheck_paused();
                s.schedule(ready)
            }),
        };
        let (out, back) = (self.random.below(50) > 0, self.random.below(50) > 0);
        match plan {
            Some(plan) if back => {
                self.call(|s| s.record_moves(out, back));
                self.run(plan);
            }
            plan => self.call(|s| {
                plan.into_iter().for_each(|plan| s.rollback(plan));
                s.record_moves(out, back);
            }),
        }
        self.scheduler.check();
        let runs = |seq: SeqId| self.scheduler.get(seq).is_ok_and(|sequence| sequence.group.is_some());
        self.requests.retain(|request| request.sequences().any(runs));
        // Kept sequences are removed after some time.
        let old = self.next.saturating_sub(400)..self.next.saturating_sub(300);
        old.for_each(|seq| drop(self.call(|s| s.remove(SeqId::from_raw(seq)))));
    }

    /// Appends tokens. The scheduler reserves memory for the longer sequence and its future
    /// samples.
    fn append(&mut self) {
        let request = self.requests.get(self.random.below(200)).copied();
        let Some(request) = request.filter(|request| !matches!(request.branching, Branching::Beams(_))) else { return };
        let seq = request.first.sequence(0);
        if self.scheduler.get(seq).is_ok_and(|sequence| sequence.group.is_some() && sequence.tokens.len() < MAX_LEN - 4) {
            self.scheduler.append(seq, &[1, 2, 3], MAX_LEN).unwrap();
        }
    }

    fn run(&mut self, plan: StepPlan) {
        self.sampled.clear();
        for scheduled in plan.sampled() {
            let request = *self.requests.iter().find(|request| request.sequences().any(|seq| seq == scheduled.seq)).unwrap();
            let members: Vec<SeqId> = self.scheduler.members(scheduled.seq).collect();
            match request.branching {
                Branching::Beams(width) if members[0] == scheduled.seq => self.choose_beams(request, &members, width),
                Branching::Beams(_) => {}
                Branching::Samples(_) if scheduled.generated == 0 => self.choose(scheduled.seq, request.sequences()),
                _ => self.choose(scheduled.seq, std::iter::once(scheduled.seq)),
            }
        }
        let (sampled, mut events) = (std::mem::take(&mut self.sampled), std::mem::take(&mut self.events));
        self.call(|s| s.commit(plan, &sampled, &mut events));
        assert!(!events.iter().any(|event| matches!(event, Event::Failed { .. })), "no branch has failed");
        (self.sampled, self.events) = (sampled, events);
    }

    fn choose(&mut self, parent: SeqId, children: impl Iterator<Item = SeqId>) {
        for child in children {
            let token = self.random.below(2) as u32;
            let outcome = if self.random.below(40) == 0 { TokenOutcome::Stop(token) } else { TokenOutcome::Token(token) };
            self.sampled.push(SampledToken { parent, child, outcome });
        }
    }

    /// The first child of a beam keeps its id. The others use free ids.
    fn choose_beams(&mut self, request: Request, members: &[SeqId], width: usize) {
        let count = if self.random.below(30) == 0 { 0 } else { 1 + self.random.below(width) };
        let parents: Vec<SeqId> = (0..count).map(|_| members[self.random.below(members.len())]).collect();
        let mut free = request.sequences().filter(|seq| !parents.contains(seq));
        for (i, &parent) in parents.iter().enumerate() {
            let child = if parents[..i].contains(&parent) { free.next().unwrap() } else { parent };
            self.sampled.push(SampledToken { parent, child, outcome: TokenOutcome::Token(self.random.below(3) as u32) });
        }
    }
}

#[test]
fn steps_allocate_nothing_once_they_are_warm() {
    for preemption in [Preemption::Recompute, Preemption::Swap] {
        let mut world = World::new(preemption);
        (0..WARM_UP).for_each(|_| world.step());
        world.allocations = 0;
        (0..STEPS).for_each(|_| world.step());
        assert_eq!(world.allocations, 0, "{preemption:?}");
        let (all, swapped) = (world.scheduler.preemptions(), world.scheduler.preemptions_swapped());
        assert!(all > 100 && (swapped > 100) == (preemption == Preemption::Swap), "{all} preemptions, {swapped} by swap");
    }
}
