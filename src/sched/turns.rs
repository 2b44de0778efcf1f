//! What a group's members compute in a step.

use super::{Branching, GroupId, Scheduler, SeqId, StepPlan};
use crate::kv::blocks_for;

/// A member's rows in the step that is being planned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub seq: SeqId,
    pub rows: usize,
    pub samples: bool,
}

impl Scheduler {
    /// Plans the rows of `running[place]`, as far as the step still holds them. The group may have to go instead.
    pub(super) fn plan_group(&mut self, place: usize, plan: &mut StepPlan) {
        let id = self.running[place];
        let mut turns = std::mem::take(&mut self.turns);
        let planned = loop {
            turns.clear();
            if self.make_room(place, |s| s.bring_back(id)) {
                self.take_turns(id, plan, &mut turns);
                if turns.is_empty() || self.make_room(place, |s| s.prepare(&turns, plan)) {
                    break !turns.is_empty();
                }
            }
            if self.running.get(place) != Some(&id) {
                break false;
            }
            // It has one member less: the others may fit.
        };
        if planned {
            turns.iter().for_each(|turn| self.write(*turn, plan));
        }
        self.turns = turns;
    }

    /// What the group's members can do in this step. One alone goes on as far as it can. Several choose together, one row each,
    /// once each has computed all that it has; who came back after a preemption shares again what it shared before.
    fn take_turns(&mut self, id: GroupId, plan: &mut StepPlan, turns: &mut Vec<Turn>) {
        turns.clear();
        let group = self.groups.get_mut(&id).expect("a running group is known");
        plan.has_beams |= matches!(group.branching, Branching::Beams(_));
        match group.members[..] {
            [seq] => {
                let pin = group.branching == Branching::Pin;
                turns.extend(self.turn_alone(seq, pin, plan));
            }
            _ => {
                let members = std::mem::take(&mut group.members);
                self.turns_together(&members, plan, turns);
                self.groups.get_mut(&id).expect("a running group is known").members = members;
            }
        }
    }

    fn turn_alone(&self, seq: SeqId, pin: bool, plan: &StepPlan) -> Option<Turn> {
        let pending = self.sequences[&seq].pending();
        let rows = match pending {
            1 => (self.portion.decodes && plan.batch.rows() < self.options.max_batch_tokens) as usize,
            _ => self.rows_for(seq, self.prompt_room(plan), plan),
        };
        let samples = rows == pending && !pin;
        (rows > 0 && (!samples || plan.batch.logit_rows.len() < self.options.max_seqs)).then_some(Turn { seq, rows, samples })
    }

    fn turns_together(&mut self, members: &[SeqId], plan: &StepPlan, turns: &mut Vec<Turn>) {
        let may_choose = |s: &Scheduler| members.iter().all(|seq| s.sequences[seq].pending() == 1);
        if !may_choose(self) {
            self.catch_up(members, self.prompt_room(plan), plan, turns);
        }
        let room = self.options.max_batch_tokens - plan.batch.rows();
        let logits = self.options.max_seqs - plan.batch.logit_rows.len();
        // They may have caught up without computing anything, by sharing alone.
        if turns.is_empty() && self.portion.decodes && members.len() <= room.min(logits) && may_choose(self) {
            turns.extend(members.iter().map(|&seq| Turn { seq, rows: 1, samples: true }));
        }
    }

    /// Rows that the step still has for sequences that lack more than their last token.
    pub(super) fn prompt_room(&self, plan: &StepPlan) -> usize {
        self.portion.prompt_rows.min(self.options.max_batch_tokens - plan.batch.rows())
    }

    /// Members compute what they have, all but the last token. A member that begins as an older one does waits for that one to
    /// have computed what both have, and takes its blocks.
    fn catch_up(&mut self, members: &[SeqId], mut room: usize, plan: &StepPlan, turns: &mut Vec<Turn>) {
        for (place, &seq) in members.iter().enumerate() {
            if !self.share(seq, &members[..place]) {
                continue;
            }
            let rows = self.rows_for(seq, room, plan).min(self.sequences[&seq].pending() - 1);
            if rows > 0 {
                turns.push(Turn { seq, rows, samples: false });
                room -= rows;
            }
        }
    }

    /// False: one of the `older` is about to compute what this one also has.
    fn share(&mut self, seq: SeqId, older: &[SeqId]) -> bool {
        let sequence = &self.sequences[&seq];
        if sequence.pending() == 1 {
            return true;
        }
        let (mut common, mut best) = (sequence.computed, None);
        for &other in older {
            // Most do not even have the one token more that would make them the best.
            if let Some(more) = sequence.common(&self.sequences[&other], common) {
                (common, best) = (more, Some(other));
            }
        }
        let Some(best) = best else { return true };
        if self.sequences[&best].computed < common {
            return false;
        }
        if self.looks_back_on_gone(&self.sequences[&best], common + 1) {
            return true;
        }
        if let Ok(table) = self.blocks.fork(&self.sequences[&best].table, common, blocks_for(sequence.max_len, self.blocks.block_size())) {
            let sequence = self.sequences.get_mut(&seq).expect("a member is known");
            self.blocks.free(&mut sequence.table);
            (sequence.table, sequence.computed) = (table, common);
        }
        true
    }

    /// Rows of the sequence in a step that has room for so many.
    fn rows_for(&self, seq: SeqId, room: usize, plan: &StepPlan) -> usize {
        let sequence = &self.sequences[&seq];
        let rows = sequence.pending().min(self.options.prefill_chunk).min(room);
        let Some(from) = sequence.logits_from else { return rows };
        // Every running sequence has a row of logits; who wants more has those that nobody may need.
        let taken: usize = plan.parts.iter().map(|part| part.logits.saturating_sub(1)).sum();
        let logits =
            (self.options.max_seqs - self.width() + 1).saturating_sub(taken).min(self.options.max_seqs - plan.batch.logit_rows.len());
        rows.min(from.saturating_sub(sequence.computed) + logits)
    }

    fn write(&mut self, turn: Turn, plan: &mut StepPlan) {
        let sequence = &self.sequences[&turn.seq];
        if sequence.pending() > 1 {
            self.portion.prompt_rows -= turn.rows;
        }
        let positions = sequence.computed..sequence.computed + turn.rows;
        plan.push(sequence, positions, turn.samples, |position| self.blocks.slot(&sequence.table, position));
    }
}
