//! Ranks that are threads of one process.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Communicator;
use crate::error::{Error, Result};

/// A rank of a group of threads. After it is dropped, waits for its messages fail.
pub struct Local {
    group: Arc<Group>,
    rank: usize,
}

struct Group {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Messages from each rank to each rank: `[sender * size + receiver]`.
    channels: Vec<Channel>,
    /// Groups of a division that not all members have taken yet, by color.
    divisions: HashMap<usize, (Arc<Group>, usize)>,
    /// The ranks that have ended.
    ended: HashSet<usize>,
}

/// Messages on their way from one rank to another. The memory is used again, so that steps allocate
/// nothing.
#[derive(Default)]
struct Channel {
    lens: VecDeque<usize>,
    /// The bytes of the messages, one after the other.
    bytes: VecDeque<u8>,
}

impl Channel {
    fn push(&mut self, message: &[u8]) -> Result<()> {
        self.lens.try_reserve(1)?;
        self.bytes.try_reserve(message.len())?;
        self.lens.push_back(message.len());
        self.bytes.extend(message);
        Ok(())
    }

    /// Removes the next message, which has the length of `out`. Returns whether there is one.
    fn pop(&mut self, out: &mut [u8], from: usize) -> Result<bool> {
        let Some(len) = self.lens.pop_front() else { return Ok(false) };
        if len != out.len() {
            self.bytes.drain(..len);
            return Err(Error::internal(format!("rank {from} has sent {len} bytes, {} were expected", out.len())));
        }
        let (first, second) = self.bytes.as_slices();
        let split = len.min(first.len());
        out[..split].copy_from_slice(&first[..split]);
        out[split..].copy_from_slice(&second[..len - split]);
        self.bytes.drain(..len);
        Ok(true)
    }
}

impl Group {
    fn new(size: usize) -> Arc<Group> {
        let channels = (0..size * size).map(|_| Channel::default()).collect();
        let state = State { channels, divisions: HashMap::new(), ended: HashSet::new() };
        Arc::new(Group { size, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Local {
    /// Creates a group of this many ranks.
    pub fn group(size: usize) -> Vec<Local> {
        let group = Group::new(size);
        (0..size).map(|rank| Local { group: group.clone(), rank }).collect()
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank;
        (0..self.group.size).filter(move |&other| other != rank)
    }
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize, timeout: Option<Duration>) -> Result<()> {
        match self.rank == root {
            true => self.others().try_for_each(|other| self.send(bytes, other, timeout)),
            false => self.receive(bytes, root, timeout),
        }
    }

    fn all_gather(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        self.others().try_for_each(|other| self.send(bytes, other, timeout))?;
        let part = bytes.len();
        out[self.rank * part..][..part].copy_from_slice(bytes);
        self.others().try_for_each(|other| self.receive(&mut out[other * part..][..part], other, timeout))
    }

    fn all_to_all(&self, bytes: &[u8], out: &mut [u8], timeout: Option<Duration>) -> Result<()> {
        let part = bytes.len() / self.group.size;
        self.others().try_for_each(|other| self.send(&bytes[other * part..][..part], other, timeout))?;
        out[self.rank * part..][..part].copy_from_slice(&bytes[self.rank * part..][..part]);
        self.others().try_for_each(|other| self.receive(&mut out[other * part..][..part], other, timeout))
    }

    fn send(&self, bytes: &[u8], to: usize, _timeout: Option<Duration>) -> Result<()> {
        self.group.lock().channels[self.rank * self.group.size + to].push(bytes)?;
        self.group.changed.notify_all();
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8], from: usize, timeout: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        let mut state = self.group.lock();
        loop {
            if state.channels[from * self.group.size + self.rank].pop(bytes, from)? {
                return Ok(());
            }
            // Another rank may be the first to be done. Those that wait for it fail and end too.
            if state.ended.contains(&from) {
                return Err(Error::internal(format!("rank {from} has ended")));
            }
            let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(began.elapsed()));
            if left.is_zero() {
                return Err(Error::internal(format!("rank {from} has sent nothing for {:?}", began.elapsed())));
            }
            let limit = left.min(Duration::from_secs(3600));
            state = self.group.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn split(&self, color: usize, timeout: Option<Duration>) -> Result<Arc<dyn Communicator>> {
        let mut colors = vec![0; size_of::<usize>() * self.group.size];
        self.all_gather(&color.to_ne_bytes(), &mut colors, timeout)?;
        let colors = colors.as_chunks().0.iter().map(|&bytes| usize::from_ne_bytes(bytes));
        let members: Vec<usize> = colors.enumerate().filter(|&(_, other)| other == color).map(|(rank, _)| rank).collect();
        let mut state = self.group.lock();
        let (group, taken) = state.divisions.entry(color).or_insert_with(|| (Group::new(members.len()), 0));
        *taken += 1;
        let (group, complete) = (group.clone(), *taken == members.len());
        if complete {
            state.divisions.remove(&color);
        }
        let rank = members.iter().position(|&member| member == self.rank).unwrap_or(0);
        Ok(Arc::new(Local { group, rank }))
    }

    fn check(&self) -> Result<()> {
        match self.group.lock().ended.iter().min() {
            None => Ok(()),
            Some(rank) => Err(Error::internal(format!("rank {rank} has ended"))),
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.group.lock().ended.insert(self.rank);
        self.group.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_has_ended_is_noticed_without_a_call() {
        let mut ranks = Local::group(3);
        assert_eq!(ranks[0].check(), Ok(()));
        drop(ranks.remove(1));
        assert!(ranks.iter().all(|rank| rank.check().unwrap_err().message() == "internal error: rank 1 has ended"));
    }
}
