//! The queues of groups: waiting, running and paused.

use super::group::{Queue, SequenceGroup, SequenceGroups};
use super::ids::GroupId;
use super::ordered::OrderedSet;
use super::slab::Slot;
use crate::error::Result;

/// All groups, each in one queue. In a queue, older groups precede younger ones.
#[derive(Debug, Default)]
pub(super) struct GroupQueues {
    pub groups: SequenceGroups,
    pub waiting: OrderedSet<GroupId>,
    pub running: Vec<GroupId>,
    pub paused: OrderedSet<GroupId>,
    /// Whether some paused groups may be ready.
    pub recheck_paused: bool,
    /// Waiting groups that are excluded while a step of selected groups is planned. Empty between
    /// steps.
    set_aside: OrderedSet<GroupId>,
}

impl GroupQueues {
    /// Creates empty queues, with space for `max_running` running groups.
    pub fn new(max_running: usize) -> Result<GroupQueues> {
        let mut queues = GroupQueues::default();
        queues.running.try_reserve(max_running)?;
        Ok(queues)
    }

    /// Reserves space for `total` groups in every queue.
    pub fn try_reserve(&mut self, total: usize) -> Result<()> {
        self.groups.try_reserve(total.saturating_sub(self.groups.len()))?;
        self.waiting.try_reserve(total)?;
        self.set_aside.try_reserve(total)?;
        self.paused.try_reserve(total)
    }

    /// Adds a group that arrives now to its queue, the waiting one.
    pub fn insert(&mut self, rank: u64, group: SequenceGroup) -> GroupId {
        let id = self.groups.insert(rank, group);
        self.waiting.insert(id);
        id
    }

    /// Moves a group to the waiting queue. The caller has removed it from its former queue.
    pub fn wait(&mut self, id: GroupId) {
        self.waiting.insert(id);
        self.groups.change(id, |group| group.queue = Queue::Waiting);
    }

    /// Pauses a group. The caller has removed it from its former queue.
    pub fn pause(&mut self, id: GroupId) {
        self.paused.insert(id);
        self.groups.change(id, |group| group.queue = Queue::Paused);
    }

    /// Starts a group and returns its place among the running ones. The caller has removed it from
    /// its former queue.
    pub fn start(&mut self, id: GroupId) -> usize {
        let place = self.running.partition_point(|&other| other < id);
        self.running.insert(place, id);
        self.groups.change(id, |group| (group.queue, group.started) = (Queue::Running, true));
        place
    }

    /// Removes a member from its group. An empty group is removed.
    pub fn remove_member(&mut self, id: GroupId, slot: Slot) {
        self.groups.change(id, |group| group.members.retain(|&other| other != slot));
        if !self.groups[id].members.is_empty() {
            return;
        }
        match self.groups.remove(id).queue {
            Queue::Waiting => drop(self.waiting.remove(id) || self.set_aside.remove(id)),
            Queue::Paused => drop(self.paused.remove(id)),
            Queue::Running => drop(self.running.binary_search(&id).map(|place| self.running.remove(place))),
        }
    }

    /// Selects groups for `set_aside_others`.
    pub fn select(&mut self, groups: impl Iterator<Item = GroupId>) {
        for group in groups {
            self.set_aside.insert(group);
        }
    }

    pub fn is_selected(&self, id: GroupId) -> bool {
        self.set_aside.contains(id)
    }

    /// Moves all running groups except the selected ones to the waiting queue, and excludes all
    /// waiting groups except the selected ones until `restore_waiting`.
    pub fn set_aside_others(&mut self) {
        let mut selected = std::mem::take(&mut self.set_aside);
        let mut running = std::mem::take(&mut self.running);
        running.retain(|&id| {
            let stays = selected.contains(id);
            if !stays {
                self.wait(id);
            }
            stays
        });
        self.running = running;
        selected.retain(|id| self.waiting.remove(id));
        self.set_aside = std::mem::replace(&mut self.waiting, selected);
    }

    /// Ends the exclusion of waiting groups.
    pub fn restore_waiting(&mut self) {
        std::mem::swap(&mut self.waiting, &mut self.set_aside);
        while let Some(id) = self.set_aside.pop_first() {
            self.waiting.insert(id);
        }
    }

    /// Returns the maximum number of sequences of the running groups in a step.
    pub fn running_width(&self) -> usize {
        self.groups.tally(Queue::Running).width
    }

    /// Panics unless every group is in exactly one queue. For tests.
    pub fn check(&self) {
        let queues: [(Queue, Vec<GroupId>); 3] = [
            (Queue::Waiting, self.waiting.iter().collect()),
            (Queue::Running, self.running.clone()),
            (Queue::Paused, self.paused.iter().collect()),
        ];
        for (queue, groups) in &queues {
            assert!(groups.is_sorted(), "a queue is not ordered by age");
            assert!(groups.iter().all(|&id| self.groups[id].queue == *queue), "a group of the queue {queue:?} has another queue");
        }
        assert_eq!(self.set_aside.len(), 0, "groups are set aside between steps");
        let queued: usize = queues.iter().map(|(_, groups)| groups.len()).sum();
        assert_eq!(queued, self.groups.len(), "a group is not in exactly one queue");
        self.groups.check();
        for group in self.groups.values() {
            assert!(group.width() <= group.members.len() + group.shells.len(), "a group lacks the sequences of its future samples");
        }
    }
}
