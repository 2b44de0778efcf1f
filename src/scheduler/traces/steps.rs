//! The steps of a trace.

use super::*;

impl Trace {
    /// Plans a step like the engine.
    pub(super) fn plan(&mut self, ready: impl Fn(SeqId) -> bool, chance: bool) -> Option<StepPlan> {
        self.s.recheck_paused();
        let is_ahead = std::mem::take(&mut self.is_ahead);
        loop {
            let mut plan = if is_ahead { self.s.schedule_lookahead(&ready) } else { self.s.schedule(&ready) };
            let (out, back) = self.make_moves(chance);
            if back {
                self.s.record_moves(out, back);
                plan.iter_mut().filter(|_| self.random.below(4) > 0).for_each(|plan| self.s.reserve_lookahead(plan));
                return plan;
            }
            plan.into_iter().for_each(|plan| self.s.rollback(plan));
            self.s.record_moves(out, back);
        }
    }

    pub(super) fn step(&mut self) {
        let unready = self.random.below(8) as u64;
        let ready = |seq: SeqId| unready == 0 || unready > 4 || seq.get() % 5 != unready;
        let all_ready = unready == 0 || unready > 4;
        let oldest = self.s.sequences.values().filter_map(|sequence| sequence.group).min();
        let before = self.s.preemptions();
        let (block, token) = (self.random.below(4) as f64, self.random.below(3) as f64);
        self.s.set_costs(Costs { block, token });
        let plan = self.plan(ready, true);
        // Pins that the scheduler has removed are deleted from the model.
        self.delete_ended();
        let Some(plan) = plan else {
            assert!(!all_ready || self.s.queues.groups.len() == 0, "a sequence could run: {}", self.state());
            return;
        };
        let group_of = |scheduled: &ScheduledSequence| self.sequence(&scheduled.seq).group.unwrap();
        assert!(plan.sequences.iter().all(|scheduled| self.s.is_ready(group_of(scheduled), &ready)), "only ready sequences run");
        let in_every_step = matches!(self.policies.batching, BatchingPolicy::Mixed | BatchingPolicy::DecodeFirst { .. });
        let runs_oldest = plan.sequences.iter().any(|scheduled| Some(group_of(scheduled)) == oldest);
        assert!(!all_ready || !in_every_step || runs_oldest || plan.is_closed, "the oldest group always runs");
        if self.s.preemptions() == before && !plan.is_closed {
            self.check_order();
        }
        self.check_budgets(&plan);
        self.check_plan(&plan);
        if self.random.below(8) == 0 {
            // The failed step has computed an unknown part.
            let done = self.random.below(plan.sequences.len() + 1);
            plan.batch.copies.iter().for_each(|copy| self.copy(copy.from, copy.to));
            plan.batch.slots[..plan.batch.slots.len() * done / plan.sequences.len()]
                .iter()
                .for_each(|&slot| self.slots[slot as usize] = GARBAGE);
            self.work_ahead(&plan);
            self.s.rollback(plan);
            return;
        }
        self.run(&plan);
        self.work_ahead(&plan);
        self.commit(plan, true);
    }

    /// Overwrites the predicted slots, since tokens that are not sampled have undefined contents
    /// there.
    pub(super) fn work_ahead(&mut self, plan: &StepPlan) {
        self.is_ahead = !plan.batch.next_slots.is_empty();
        assert!(!plan.is_closed || !self.is_ahead, "paused sequences may be ready, so the next step is not predicted");
        plan.batch.next_slots.iter().filter(|slot| **slot != NO_SLOT).for_each(|&slot| self.slots[slot as usize] = GARBAGE);
    }

    pub(super) fn commit(&mut self, plan: StepPlan, chance: bool) {
        let mut sampled = Vec::new();
        let mut groups: Vec<GroupId> = plan.sampled().map(|scheduled| self.sequence(&scheduled.seq).group.unwrap()).collect();
        groups.dedup();
        for group in groups {
            let branching = self.s.queues.groups[group].branching;
            let members: Vec<SeqId> = self.s.queues.groups[group].members.iter().map(|&slot| self.s.sequences[slot].id).collect();
            assert!(
                members.iter().all(|seq| plan.sampled().any(|scheduled| scheduled.seq == *seq)),
                "all sequences of a group are sampled in the same step"
            );
            match branching {
                Branching::Pin => panic!("a pin was sampled"),
                Branching::One => sampled.extend(members.iter().map(|&seq| sampled_token(seq, self.random_outcome(chance)))),
                Branching::Samples(n) => {
                    let parent = members[0];
                    let children = parent.own_request().sequences(n as u32);
                    sampled.extend(children.map(|child| SampledToken { parent, child, outcome: self.random_outcome(chance) }));
                }
                Branching::Beams(n) => self.choose_beams(&members, n, &mut sampled),
            }
        }
        let old = self.tokens.clone();
        let dropped = |id: &SeqId| !sampled.iter().any(|sampled_token| sampled_token.child == *id);
        self.tokens.retain(|id, _| !dropped(id) || !plan.sampled().any(|scheduled| scheduled.seq == *id));
        for SampledToken { parent, child, outcome } in &sampled {
            let mut tokens = old[parent].clone();
            if let TokenOutcome::Token(token) | TokenOutcome::Stop(token) = outcome {
                tokens.push(*token);
            }
            self.tokens.insert(*child, tokens);
        }
        let seqs: Vec<SeqId> = plan.sequences.iter().map(|scheduled| scheduled.seq).collect();
        let mut events = std::mem::take(&mut self.events);
        self.s.commit(plan, &sampled, &mut events);
        assert_eq!(events.iter().filter(|event| matches!(event, Event::Advanced { .. })).count(), sampled.len());
        for event in &events {
            if let Event::Advanced { sampled_token, finish: Some(_), .. } = event {
                let child = sampled[*sampled_token].child;
                assert!(self.s.sequences.get(child).is_none_or(|sequence| sequence.request.keep && sequence.group.is_none()));
            }
        }
        self.events = events;
        self.delete_ended();
        self.record_predecessors(&seqs);
    }

    pub(super) fn random_outcome(&mut self, chance: bool) -> TokenOutcome {
        let token = (self.random.below(12) == 0) as u32;
        match self.random.below(30) {
            0 if chance => TokenOutcome::Stop(token),
            1 if chance => TokenOutcome::Fail,
            _ => TokenOutcome::Token(token),
        }
    }

    /// Selects beams: the first child keeps its id, the others replace beams without children.
    pub(super) fn choose_beams(&mut self, members: &[SeqId], n: usize, sampled: &mut Vec<SampledToken>) {
        let request = self.beams[&members[0]];
        let count = if self.random.below(12) == 0 { 0 } else { 1 + self.random.below(n) };
        let mut parents: Vec<SeqId> = (0..count).map(|_| members[self.random.below(members.len())]).collect();
        parents.sort_by_key(|_| self.random.below(100));
        let mut free: Vec<SeqId> = request.sequences(n as u32).filter(|slot| !parents.contains(slot)).collect();
        let mut stayed = HashSet::new();
        for parent in parents {
            let child = if stayed.insert(parent) { parent } else { free.remove(self.random.below(free.len())) };
            sampled.push(SampledToken { parent, child, outcome: TokenOutcome::Token(self.random.below(3) as u32) });
        }
    }
}
