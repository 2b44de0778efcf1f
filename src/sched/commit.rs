//! What a step that ran, or failed, has changed.

use super::{Branching, Choice, Event, FinishReason, Part, Scheduler, Sequence, StepPlan};
use crate::error::Error;

impl Scheduler {
    /// The step ran: lengths advance, sequences fork and are dropped, tokens are appended, finished sequences leave.
    pub fn commit(&mut self, plan: StepPlan, choices: &[Choice], events: &mut Vec<Event>) {
        events.clear();
        self.blocks.settle(&plan.batch.copies);
        let decodes = plan.parts.iter().filter(|part| part.decodes()).count();
        self.policies.batching.ran(plan.batch.rows() - decodes, decodes);
        plan.parts.iter().for_each(|part| self.advance(part));
        self.fork_chosen(choices, events);
        self.drop_beams(&plan, choices, events);
        for (choice, Choice { child, verdict, .. }) in choices.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(child) else { continue };
            let (finish, past) = (sequence.apply(*verdict), sequence.past);
            if let Some(why) = finish {
                if matches!(why, FinishReason::Stop | FinishReason::Length) {
                    let most = sequence.max_len.saturating_sub(sequence.tokens.len()) + sequence.generated;
                    self.policies.order.learn(most, sequence.generated);
                }
                self.end(*child);
            }
            events.push(Event::Advanced { choice, finish, past });
        }
        self.spare = plan;
    }

    /// The part's rows are computed, and what they filled can be found from now on.
    fn advance(&mut self, part: &Part) {
        let block_size = self.blocks.block_size();
        let computed = part.first + part.rows;
        // Where no token comes of the last row, it is computed once more.
        let first = self.first_seen(computed - 1);
        let sequence = self.sequences.get_mut(&part.seq).expect("a planned sequence is known");
        self.blocks.fill(&sequence.table, part.first..computed);
        (sequence.computed, sequence.begun) = (computed, true);
        if let Some(from) = &mut sequence.logits_from {
            *from = computed.max(*from);
        }
        if part.samples {
            // The prompt is told. What may follow it was chosen or appended.
            sequence.logits_from = None;
        }
        if self.blocks.keeps_prefixes() {
            sequence.chains(computed / block_size, block_size);
            let (table, chains) = sequence.table_and_chains();
            for place in part.first / block_size..computed / block_size {
                self.blocks.index(table, place, chains);
            }
        }
        self.blocks.slide(&mut sequence.table, first);
        // A pin: it has come to its end and chooses nothing.
        if !part.samples && sequence.pending() == 0 {
            let group = sequence.group.take();
            self.leave(part.seq, group);
        }
    }

    /// Children come into being before any token is appended; one that takes a dropped beam's id takes its place.
    fn fork_chosen(&mut self, choices: &[Choice], events: &mut Vec<Event>) {
        let mut born: Vec<(usize, Sequence)> = Vec::new();
        for (choice, Choice { parent, child, .. }) in choices.iter().enumerate().filter(|(_, choice)| choice.parent != choice.child) {
            let len = self.sequences[parent].tokens.len();
            let room = born.try_reserve(1).and_then(|()| self.sequences.try_reserve(born.len() + 1));
            match room.map_err(Error::from).and_then(|()| self.branch(*parent, len, *child)) {
                Ok(sequence) => born.push((choice, sequence)),
                Err(_) => events.push(Event::Failed { choice }),
            }
        }
        for (choice, mut sequence) in born {
            let Choice { parent, child, .. } = choices[choice];
            let group = self.sequences[&parent].group.expect("who chooses is in a group");
            if let Some(mut dropped) = self.sequences.remove(&child) {
                self.blocks.free(&mut dropped.table);
            } else {
                let group = self.groups.get_mut(&group).expect("a group with members is known");
                group.members.push(child);
                if let Branching::Samples(_) = group.branching {
                    group.branching = Branching::One;
                }
            }
            (sequence.group, sequence.begun) = (Some(group), true);
            self.sequences.insert(child, sequence);
            events.push(Event::Forked { choice });
        }
    }

    /// Beams that were sampled and that no choice goes on with.
    fn drop_beams(&mut self, plan: &StepPlan, choices: &[Choice], events: &mut Vec<Event>) {
        if !plan.has_beams {
            return;
        }
        for part in plan.sampled() {
            let group = self.sequences.get(&part.seq).and_then(|sequence| sequence.group);
            let beams = group.is_some_and(|group| matches!(self.groups[&group].branching, Branching::Beams(_)));
            if beams && !choices.iter().any(|choice| choice.child == part.seq) {
                self.remove(part.seq);
                events.push(Event::Dropped { seq: part.seq });
            }
        }
    }

    /// The step failed: no length has changed. Blocks it reserved stay with their sequences, for the next try.
    pub fn rollback(&mut self, mut plan: StepPlan) {
        let mut copies = std::mem::take(&mut plan.batch.copies);
        self.undo_copies(0, plan.parts.iter().map(|part| part.seq), &mut copies);
        plan.batch.copies = copies;
        self.spare = plan;
    }
}
