//! The steps of a trace.

use super::*;

impl Trace {
    /// Plans a step like the engine.
    pub(super) fn plan(&mut self, ready: impl Fn(SeqId) -> bool, chance: bool) -> Option<StepPlan> {
        self.s.recheck_paused();
        loop {
            let plan = self.s.schedule(&ready);
            let moved = self.make_moves(chance);
            if moved.1 {
                self.record_moves(moved);
                return plan;
            }
            plan.into_iter().for_each(|plan| self.s.rollback(plan));
            self.record_moves(moved);
        }
    }

    /// Launches a step, and commits or fails an earlier one. Up to two steps are in flight.
    pub(super) fn step(&mut self) {
        let launched = if self.in_flight.is_none() || self.random.below(4) > 0 { self.launch() } else { None };
        if let Some(step) = self.in_flight.take() {
            match self.random.below(8) {
                0 => {
                    launched.into_iter().chain([step]).for_each(|step| self.fail(step));
                    return;
                }
                _ => self.commit(step),
            }
        }
        let Some(step) = launched else { return };
        match self.random.below(3) {
            0 => self.commit(step),
            _ => {
                // The tokens of the previous step are known, so sampling starts.
                let plan = step.plan;
                self.in_flight = Some(self.sample_on_device(LaunchedStep { plan, ..step }));
            }
        }
    }

    /// Plans a step, and computes it like a device.
    fn launch(&mut self) -> Option<LaunchedStep> {
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
        let alone = self.in_flight.is_none();
        // Groups may wait until their blocks have moved between the tiers.
        let waits = self.s.waits_for_moves();
        let Some(plan) = plan else {
            assert!(!all_ready || !alone || waits || self.s.queues.groups.len() == 0, "a sequence could run: {}", self.state());
            return None;
        };
        let group_of = |scheduled: &ScheduledSequence| self.sequence(&scheduled.seq).group.unwrap();
        assert!(plan.sequences.iter().all(|scheduled| self.s.is_ready(group_of(scheduled), &ready)), "only ready sequences run");
        let in_every_step = match self.policies.batching {
            BatchingPolicy::Mixed => true,
            // Decodes may leave no token to a prompt that has just replaced one of them.
            BatchingPolicy::DecodeFirst { .. } => self.s.options.max_batch_tokens > self.s.options.max_seqs,
            BatchingPolicy::PrefillFirst { .. } | BatchingPolicy::Static => false,
        };
        let runs_oldest = plan.sequences.iter().any(|scheduled| Some(group_of(scheduled)) == oldest);
        assert!(!all_ready || !alone || !in_every_step || waits || runs_oldest, "the oldest group always runs");
        if self.s.preemptions() == before {
            self.check_order();
        }
        self.check_budgets(&plan);
        self.check_plan(&plan);
        self.run(&plan);
        let sampled = self.choose(&plan, true);
        Some(LaunchedStep { plan, sampled, device_samples: Vec::new() })
    }

    /// Fails the newest step in flight, which has computed an unknown part.
    pub(super) fn fail(&mut self, LaunchedStep { plan, .. }: LaunchedStep) {
        let done = self.random.below(plan.sequences.len() + 1);
        let slots = &plan.batch.slots[..plan.batch.slots.len() * done / plan.sequences.len()];
        let used: HashSet<u32> = self.computed_slots();
        slots.iter().filter(|slot| !used.contains(slot)).for_each(|&slot| self.slots[slot as usize] = GARBAGE);
        self.s.rollback(plan);
    }

    /// Returns the slots of all computed tokens.
    fn computed_slots(&self) -> HashSet<u32> {
        let (size, groups) = (self.block_size(), self.windows.len());
        let of = |sequence: &SequenceKv| {
            let blocks = |at: usize| sequence.table.blocks()[at / size * groups..][..groups].to_vec();
            let slot = move |at: usize, block: u32| block * size as u32 + (at % size) as u32;
            let slots =
                (0..sequence.computed).flat_map(|at| blocks(at).into_iter().filter(|block| *block != NULL_BLOCK).map(move |b| slot(at, b)));
            slots.collect::<Vec<_>>()
        };
        self.s.sequences.values().filter(|sequence| !sequence.table.swapped()).flat_map(of).collect()
    }

    /// Lets the device sample some of the tokens of the only step in flight.
    fn sample_on_device(&mut self, mut step: LaunchedStep) -> LaunchedStep {
        self.s.mark_stale(&mut step.plan);
        for scheduled in &mut step.plan.sequences {
            let its = step.sampled.iter().find(|sampled| sampled.parent == scheduled.seq);
            let branching = self.s.get(scheduled.seq).ok().and_then(|s| Some(self.s.queues.groups[s.group?].branching));
            let may_sample = scheduled.samples
                && scheduled.logits == 1
                && branching == Some(Branching::One)
                && !scheduled.is_stale
                && !self.sequence(&scheduled.seq).request.prompt_only;
            if may_sample && self.random.below(5) > 0 {
                scheduled.device_sample = Some(step.device_samples.len() as u32);
                step.device_samples.push(match its.unwrap().outcome {
                    TokenOutcome::Token(token) | TokenOutcome::Stop(token) => token,
                    TokenOutcome::Fail => 0,
                    TokenOutcome::Complete => panic!("no token is wanted"),
                });
            }
        }
        self.s.set_device_samples(&step.plan);
        step
    }

    /// Chooses the outcome of each row that is sampled. Sequences may end by chance.
    pub(super) fn choose(&mut self, plan: &StepPlan, chance: bool) -> Vec<SampledToken> {
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
                Branching::One => sampled.extend(members.iter().map(|&seq| match self.sequence(&seq).request.prompt_only {
                    true => sampled_token(seq, TokenOutcome::Complete),
                    false => sampled_token(seq, self.random_outcome(chance)),
                })),
                Branching::Samples(n) => {
                    let parent = members[0];
                    let children = parent.own_request().sequences(n as u32);
                    sampled.extend(children.map(|child| SampledToken { parent, child, outcome: self.random_outcome(chance) }));
                }
                Branching::Beams(n) => self.choose_beams(&members, n, &mut sampled),
            }
        }
        sampled
    }

    pub(super) fn commit(&mut self, LaunchedStep { mut plan, mut sampled, .. }: LaunchedStep) {
        self.s.mark_stale(&mut plan);
        sampled.retain(|sampled| plan.sampled().any(|scheduled| scheduled.seq == sampled.parent));
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
        let current = plan.sequences.iter().filter(|scheduled| !scheduled.is_stale);
        let seqs: Vec<SeqId> = current.map(|scheduled| scheduled.seq).collect();
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
