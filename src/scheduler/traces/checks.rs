//! The checks of a trace against its dense model.

use super::*;

impl Trace {
    /// Checks that a waiting group is not older than all running groups, except with static
    /// batching.
    pub(super) fn check_order(&self) {
        let (Some(oldest), Some(&youngest)) = (self.s.queues.waiting.first(), self.s.queues.running.last()) else { return };
        if oldest < youngest && self.s.planning.budget.new_groups {
            assert!(self.s.queues.running[0] < oldest, "the oldest group runs if it can");
        }
    }

    pub(super) fn check_budgets(&self, plan: &StepPlan) {
        // The sequence is pending as it was before the launch.
        let prompts =
            |scheduled: &&ScheduledSequence| self.sequence(&scheduled.seq).pending() + scheduled.tokens - scheduled.samples as usize > 1;
        let prompt_rows: usize = plan.sequences.iter().filter(prompts).map(|scheduled| scheduled.tokens).sum();
        if let BatchingPolicy::DecodeFirst { budget } = self.policies.batching {
            assert!(prompt_rows <= budget, "{prompt_rows} prompt tokens");
        }
    }

    pub(super) fn check_plan(&self, plan: &StepPlan) {
        let batch = &plan.batch;
        assert!(batch.token_count() > 0 && batch.token_count() <= self.s.options.max_batch_tokens);
        assert!(batch.logit_rows.len() <= self.s.options.max_seqs, "{} rows of logits", batch.logit_rows.len());
        assert!(plan.sequences.len() <= self.s.options.max_seqs);
        // The buffers were reserved for these maxima.
        let max_copies = plan.sequences.len() * self.windows.len();
        assert!(batch.copies.len() <= max_copies, "only the first token of a sequence can lie in a shared block");
        assert!(batch.tables.len() <= plan.sequences.len() * self.s.blocks.paging().entries(self.max_len_in_pool));
        let targets: HashSet<u32> = batch.copies.iter().map(|copy| copy.to).collect();
        assert_eq!(targets.len(), batch.copies.len(), "each block is the target of at most one copy");
        assert!(batch.copies.iter().all(|copy| !targets.contains(&copy.from)), "copies do not depend on their order");
        let slots: HashSet<u32> = batch.slots.iter().copied().collect();
        assert_eq!(slots.len(), batch.token_count() * self.windows.len(), "every token has its own slot in each layer group");
        let mut seen = HashSet::new();
        for scheduled in &plan.sequences {
            assert!(seen.insert(scheduled.seq), "each sequence is scheduled once");
            let sequence = self.sequence(&scheduled.seq);
            assert_eq!(scheduled.first + scheduled.tokens, sequence.scheduled());
            self.s.blocks.check_writable(&sequence.table, scheduled.first..scheduled.first + scheduled.tokens, &batch.copies);
            let pin = self.s.queues.groups[sequence.group.unwrap()].branching == Branching::Pin;
            let len = sequence.expected_len() - scheduled.samples as usize;
            assert_eq!(scheduled.samples, !pin && scheduled.first + scheduled.tokens == len);
            assert!(scheduled.logits <= scheduled.tokens && scheduled.logits >= scheduled.samples as usize);
        }
        assert_eq!(plan.sequences.iter().map(|scheduled| scheduled.logits).sum::<usize>(), batch.logit_rows.len());
    }

    /// Records the predecessor of each block hash.
    pub(super) fn record_predecessors(&mut self, seqs: &[SeqId]) {
        for sequence in seqs.iter().filter_map(|&seq| self.s.sequences.get(seq)) {
            sequence.check_chains(self.s.blocks.block_size());
            for group in (0..self.windows.len()).filter(|&group| self.windows[group].is_none()) {
                let of_group = |pair: &[BlockHash]| (pair[1].for_group(group), pair[0].for_group(group));
                self.cache.before.extend(sequence.known_block_hashes().windows(2).map(of_group));
            }
        }
    }

    pub(super) fn check(&self) {
        self.s.check_with(self.in_flight.as_ref().map_or(&[], |step| &step.plan.batch.copies));
        let known: HashSet<SeqId> = self.s.sequences.values().map(|sequence| sequence.id).collect();
        assert_eq!(known, self.tokens.keys().copied().collect(), "the model has the same sequences");
        for (id, tokens) in &self.tokens {
            assert_eq!(*tokens, self.sequence(id).tokens, "sequence {id}");
        }
        self.s.blocks.check_order(|hash| self.cache.before.get(hash).copied());
        self.check_contents();
        self.check_map();
    }

    /// Checks that a map has the blocks of all sequences, and no others.
    fn check_map(&self) {
        let blocks = &self.s.blocks;
        let (device, host, sequences) = (blocks.capacity(), blocks.host_total(), self.tokens.len());
        let mut map = PoolMap::new(device, host, sequences).unwrap();
        self.s.write_map(&mut map, |id| Some(id.own_request()));
        assert_eq!((map.sequences.len(), map.sequences_omitted), (sequences, 0));
        let of_device = |is: fn(&MappedBlock) -> bool| map.device.blocks.iter().filter(|block| is(block)).count();
        assert_eq!((map.device.total, map.device.free, map.device.cached), (blocks.total(), blocks.free_blocks(), blocks.cached_blocks()));
        assert_eq!(of_device(|block| block.users == 0 && block.is_cached), map.device.cached);
        assert_eq!(of_device(|block| block.users == 0 && !block.is_cached), map.device.free);
        let running: Vec<SeqId> = self.s.running_sequences().map(|sequence| sequence.id).collect();
        assert!(map.sequences.iter().map(|mapped| mapped.id).take(running.len()).eq(running), "the running sequences come first");
        let mut users = [vec![0; map.device.blocks.len()], vec![0; map.host.blocks.len()]];
        for mapped in &map.sequences {
            let sequence = self.sequence(&mapped.id);
            let mapped_values = (mapped.tokens, mapped.max_len, mapped.computed, mapped.is_swapped);
            assert_eq!(mapped_values, (sequence.tokens.len(), sequence.max_len(), sequence.computed, sequence.table.swapped()));
            sequence.table.held().for_each(|block| users[mapped.is_swapped as usize][block as usize] += 1);
        }
        for (tier, users) in [&map.device, &map.host].into_iter().zip(users) {
            for (block, (mapped, users)) in tier.blocks.iter().zip(users).enumerate() {
                // Copies and transfers use blocks, too.
                assert!(mapped.users >= users, "block {block} has {} of {users} users", mapped.users);
                assert_eq!(mapped.sequence.is_some(), users > 0, "block {block} and its sequence disagree");
                let holds = |id: SeqId| self.sequence(&id).table.held().any(|held| held as usize == block);
                assert!(mapped.sequence.is_none_or(holds), "block {block} belongs to another sequence");
            }
        }
        // A smaller map has the first ones of each.
        let mut small = PoolMap::new(1, 1, 1).unwrap();
        let capacity = small.device.blocks.capacity().min(device);
        self.s.write_map(&mut small, |_| None);
        assert_eq!((small.device.blocks.len(), small.sequences.len()), (capacity.min(blocks.total()), sequences.min(1)));
        assert_eq!(small.sequences_omitted, sequences - sequences.min(1));
    }

    /// Checks the contents of all computed tokens in both tiers.
    pub(super) fn check_contents(&self) {
        for sequence in self.s.sequences.values() {
            let (contents, table, size) = (contents(&sequence.tokens), &sequence.table, self.block_size());
            for (position, content) in contents[..sequence.computed].iter().enumerate() {
                let blocks = table.blocks().chunks_exact(self.windows.len()).nth(position / size).unwrap();
                for (group, &block) in blocks.iter().enumerate() {
                    if block != NULL_BLOCK {
                        let (block, hosted) = self.s.blocks.location(table, block);
                        let slot = block as usize * size + position % size;
                        assert_eq!(
                            if hosted { self.host.slots[slot] } else { self.slots[slot] },
                            content + group as u64,
                            "sequence {} at {position}: wrong contents",
                            sequence.id
                        );
                    }
                    let seen = self.windows[group].is_none_or(|window| position + window > sequence.computed);
                    assert!(block != NULL_BLOCK || !seen, "sequence {} at {position}: a visible block is missing", sequence.id);
                }
            }
        }
    }

    pub(super) fn state(&self) -> String {
        let Scheduler { options, queues, pins, blocks, .. } = &self.s;
        let policies = &self.policies;
        let sequences: Vec<_> =
            self.s.sequences.values().map(|s| (s.id, s.tokens.len(), s.computed, s.max_len(), s.logits_from, s.table.blocks())).collect();
        format!(
            "{options:?} {policies:?}\n{queues:?}\nidle {} pins {pins:?}\n{sequences:?}\n{} of {} blocks of {}",
            self.s.idle(),
            blocks.available(),
            blocks.total(),
            blocks.block_size()
        )
    }
}
