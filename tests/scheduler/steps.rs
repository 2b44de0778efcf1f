//! The scheduler and the block manager allocate nothing of their own in a step, once they are warm: whatever joins, forks, is
//! dropped, gives way to others, comes back, fails or ends meanwhile.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::support::Random;
use pagedllm::kv::{BlockHash, BlockManager, Paging};
use pagedllm::options::Preemption;
use pagedllm::scheduler::{Branching, Event, NewGroup, SampledToken, Scheduler, SchedulerOptions, StepPlan, TokenOutcome};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

impl Counting {
    fn count() {
        // A thread that ends counts nothing any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counting::count();
        // SAFETY: as asked.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Counting::count();
        // SAFETY: as asked.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Counting::count();
        // SAFETY: as asked.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as asked.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: usize = 16;
/// Most tokens of a sequence. Five of them fit the pool.
const LONGEST: usize = 176;
/// Steps until everything has had its largest size, and steps that are watched.
const WARM_UP: usize = 4000;
const STEPS: usize = 8000;

/// A request that has not ended.
#[derive(Clone, Copy)]
struct Request {
    first: u64,
    branching: Branching,
}

impl Request {
    fn sequences(&self) -> std::ops::Range<u64> {
        self.first..self.first + self.branching.max_members() as u64
    }
}

struct World {
    scheduler: Scheduler,
    random: Random,
    requests: Vec<Request>,
    next: u64,
    choices: Vec<SampledToken>,
    events: Vec<Event>,
    /// Made by the scheduler, so far.
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
            choices: Vec::new(),
            events: Vec::with_capacity(3 * 32),
            allocations: 0,
        }
    }

    /// What the scheduler is asked for, and nothing else, counts.
    fn ask<T>(&mut self, ask: impl FnOnce(&mut Scheduler) -> T) -> T {
        let before = ALLOCATIONS.get();
        let answer = ask(&mut self.scheduler);
        self.allocations += ALLOCATIONS.get() - before;
        answer
    }

    fn add(&mut self) {
        let n = 2 + self.random.below(4);
        let branching = [Branching::One, Branching::Samples(n), Branching::Beams(n)][self.random.below(3)];
        let prompt: Vec<u32> = (0..1 + self.random.below(100)).map(|i| if i < 20 { 0 } else { self.random.below(3) as u32 }).collect();
        let (max_len, keep) = (prompt.len() + 1 + self.random.below(60), self.random.below(4) == 0);
        let keep = keep && !matches!(branching, Branching::Beams(_));
        let arrival = NewGroup { prompt, max_len, branching, priority: 0, keep, prompt_logits: false, root: BlockHash::default() };
        let newcomer = arrival.prepare(&Paging::without_windows(BLOCK)).unwrap();
        let first = self.next;
        // Lists of all that there are grow with their number. Nothing else does.
        self.scheduler.add(first, newcomer).unwrap();
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
            request.sequences().for_each(|seq| self.ask(|s| if end { s.end(seq) } else { drop(s.remove(seq)) }));
        }
        self.append();
        let unready = self.random.below(6) as u64;
        let ready = |seq| unready > 3 || seq % 5 != unready;
        let some: [u64; 3] = [0; 3].map(|_| self.requests.get(self.random.below(60)).map_or(0, |request| request.first));
        let plan = match self.random.below(10) {
            0 => self.ask(|s| s.schedule_among(&some, ready)),
            _ => self.ask(|s| {
                s.recheck_paused();
                s.schedule(ready)
            }),
        };
        let (out, back) = (self.random.below(50) > 0, self.random.below(50) > 0);
        match plan {
            Some(plan) if back => {
                self.ask(|s| s.record_moves(out, back));
                self.run(plan);
            }
            plan => self.ask(|s| {
                plan.into_iter().for_each(|plan| s.rollback(plan));
                s.record_moves(out, back);
            }),
        }
        self.scheduler.check();
        let runs = |seq| self.scheduler.get(seq).is_ok_and(|sequence| sequence.group.is_some());
        self.requests.retain(|request| request.sequences().any(runs));
        // Those that were kept go in their turn.
        let old = self.next.saturating_sub(400)..self.next.saturating_sub(300);
        old.for_each(|seq| drop(self.ask(|s| s.remove(seq))));
    }

    /// Makes room for all that it makes longer, samples to come included.
    fn append(&mut self) {
        let request = self.requests.get(self.random.below(200)).copied();
        let Some(request) = request.filter(|request| !matches!(request.branching, Branching::Beams(_))) else { return };
        if self.scheduler.get(request.first).is_ok_and(|sequence| sequence.group.is_some() && sequence.tokens.len() < LONGEST - 4) {
            self.scheduler.append(request.first, &[1, 2, 3], LONGEST).unwrap();
        }
    }

    fn run(&mut self, plan: StepPlan) {
        self.choices.clear();
        for part in plan.sampled() {
            let request = *self.requests.iter().find(|request| request.sequences().contains(&part.seq)).unwrap();
            let members: Vec<u64> = self.scheduler.members(part.seq).collect();
            match request.branching {
                Branching::Beams(width) if members[0] == part.seq => self.choose_beams(request, &members, width),
                Branching::Beams(_) => {}
                Branching::Samples(_) if part.generated == 0 => self.choose(part.seq, request.sequences()),
                _ => self.choose(part.seq, part.seq..part.seq + 1),
            }
        }
        let (choices, mut events) = (std::mem::take(&mut self.choices), std::mem::take(&mut self.events));
        self.ask(|s| s.commit(plan, &choices, &mut events));
        assert!(!events.iter().any(|event| matches!(event, Event::Failed { .. })), "every branch had what it is made of");
        (self.choices, self.events) = (choices, events);
    }

    fn choose(&mut self, parent: u64, children: std::ops::Range<u64>) {
        for child in children {
            let token = self.random.below(2) as u32;
            let verdict = if self.random.below(40) == 0 { TokenOutcome::Stop(token) } else { TokenOutcome::Token(token) };
            self.choices.push(SampledToken { parent, child, outcome: verdict });
        }
    }

    /// A beam's first child stays where it is; the others take places that are free.
    fn choose_beams(&mut self, request: Request, members: &[u64], width: usize) {
        let chosen = if self.random.below(30) == 0 { 0 } else { 1 + self.random.below(width) };
        let parents: Vec<u64> = (0..chosen).map(|_| members[self.random.below(members.len())]).collect();
        let mut free = request.sequences().filter(|seq| !parents.contains(seq));
        for (i, &parent) in parents.iter().enumerate() {
            let child = if parents[..i].contains(&parent) { free.next().unwrap() } else { parent };
            self.choices.push(SampledToken { parent, child, outcome: TokenOutcome::Token(self.random.below(3) as u32) });
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
        assert!(all > 100 && (swapped > 100) == (preemption == Preemption::Swap), "{all} gave way, {swapped} of them to the host tier");
    }
}
