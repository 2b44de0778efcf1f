//! The commands that rank 0 sends to the other workers, as plain numbers.

use super::group::Group;
use crate::backend::BatchSize;
use crate::error::{Error, Result};
use crate::sys::bytes::{as_bytes, as_bytes_mut};
use crate::types::batch::{Batch, BlockCopy, BlockMove, Bounds, Placeholder, Span, Tail};

/// What all workers do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Compute a batch.
    Step,
    /// Copy blocks to the host tier.
    SwapOut,
    /// Copy blocks back.
    SwapIn,
    /// Send the bytes of blocks to rank 0.
    Read,
    /// Receive the bytes of blocks from rank 0.
    Write,
    /// Move blocks and free the others.
    Shrink,
    /// End: the engine has been freed.
    Exit,
}

impl Kind {
    const ALL: [Kind; 7] = [Kind::Step, Kind::SwapOut, Kind::SwapIn, Kind::Read, Kind::Write, Kind::Shrink, Kind::Exit];
}

/// Numbers that a message has before its lists: the kind and the length of the lists.
const HEADER: usize = 2;

/// A message under construction, or a received one. Keeps its memory for the next message.
#[derive(Default)]
pub struct Message {
    words: Vec<u32>,
    /// First word that has not been read.
    next: usize,
}

impl Message {
    /// Creates a message with memory for the plans of batches up to `max`.
    pub fn for_batches(max: &BatchSize) -> Result<Message> {
        let mut words = Vec::new();
        words.try_reserve_exact(HEADER + Message::plan_len(max))?;
        Ok(Message { words, next: 0 })
    }

    /// Returns the numbers in the lists of the plan of the largest batch.
    fn plan_len(max: &BatchSize) -> usize {
        let BatchSize { tokens, sequences, logits, table_entries, groups } = *max;
        8 + tokens * (2 + groups) + table_entries + logits + sequences * (3 + 2 * groups + 2)
    }

    /// Returns the numbers in the lists of the longest message, if a list of blocks has up to
    /// `blocks`.
    pub fn max_len(max: &BatchSize, blocks: usize) -> usize {
        Message::plan_len(max).max(4 + 2 * blocks)
    }

    /// Starts a message that will have at most `capacity` numbers in its lists.
    fn begin(&mut self, kind: Kind, capacity: usize) -> Result<()> {
        self.words.clear();
        self.words.try_reserve(HEADER + capacity)?;
        self.words.extend([kind as u32, 0]);
        Ok(())
    }

    fn put<const N: usize>(&mut self, items: impl ExactSizeIterator<Item = [u32; N]>) {
        self.words.push(items.len() as u32);
        items.for_each(|item| self.words.extend(item));
    }

    /// Reads the next list.
    fn take<const N: usize>(&mut self) -> Result<impl ExactSizeIterator<Item = [u32; N]> + '_> {
        let damaged = || Error::internal("rank 0 has sent a damaged command");
        let len = *self.words.get(self.next).ok_or_else(damaged)? as usize;
        let start = self.next + 1;
        let words = self.words.get(start..).and_then(|rest| rest.get(..len.checked_mul(N)?)).ok_or_else(damaged)?;
        self.next = start + words.len();
        Ok(words.as_chunks::<N>().0.iter().copied())
    }

    /// Sends the message from rank 0 to the workers of its stage. Each worker relays it to the next
    /// stage.
    pub fn broadcast(&mut self, group: &Group) -> Result<()> {
        self.words[1] = (self.words.len() - HEADER) as u32;
        if group.place.division.tensor == 1 {
            return Ok(());
        }
        let (header, lists) = self.words.split_at_mut(HEADER);
        group.workers.tensor.broadcast(as_bytes_mut(header), 0, group.timeout())?;
        if lists.is_empty() { Ok(()) } else { group.workers.tensor.broadcast(as_bytes_mut(lists), 0, group.timeout()) }
    }

    /// Sends the message to the next stage, if there is one.
    pub fn relay(&self, group: &Group) -> Result<()> {
        if group.place.is_last_stage() {
            return Ok(());
        }
        let (header, lists) = self.words.split_at(HEADER);
        group.world().send(as_bytes(header), group.place.next(), group.timeout())?;
        if lists.is_empty() { Ok(()) } else { group.world().send(as_bytes(lists), group.place.next(), group.timeout()) }
    }

    /// Waits for the next message, whose lists have up to `max_len` numbers. The wait has no limit:
    /// an engine may be idle for any time.
    pub fn receive(&mut self, group: &Group, max_len: usize) -> Result<Kind> {
        let receive = |words: &mut [u32], timeout| match group.place.is_first_stage() {
            true => group.workers.tensor.broadcast(as_bytes_mut(words), 0, timeout),
            false => group.world().receive(as_bytes_mut(words), group.place.previous(), timeout),
        };
        let mut header = [0; HEADER];
        receive(&mut header, None)?;
        let [kind, len] = header;
        let kind = Kind::ALL.into_iter().find(|&known| known as u32 == kind);
        let kind = kind.ok_or_else(|| Error::internal("rank 0 has sent an unknown command"))?;
        if len as usize > max_len {
            return Err(Error::internal(format!("rank 0 has sent a command of {len} numbers; the limit is {max_len}")));
        }
        self.next = HEADER;
        self.words.clear();
        self.words.try_reserve(HEADER + len as usize)?;
        self.words.extend(header);
        self.words.resize(HEADER + len as usize, 0);
        if len > 0 {
            receive(&mut self.words[HEADER..], group.timeout())?;
        }
        Ok(kind)
    }

    pub fn put_exit(&mut self) -> Result<()> {
        self.begin(Kind::Exit, 0)
    }

    pub fn put_step(&mut self, batch: &Batch) -> Result<()> {
        let Batch { tokens, positions, slots, spans, tables, logit_rows, copies, placeholders } = batch;
        let numbers = [tokens, positions, slots, tables, logit_rows];
        let capacity =
            numbers.iter().map(|list| 1 + list.len()).sum::<usize>() + 3 + 3 * spans.len() + 2 * (copies.len() + placeholders.len());
        self.begin(Kind::Step, capacity)?;
        numbers.iter().for_each(|list| self.put(list.iter().map(|&number| [number])));
        self.put(spans.iter().map(|span| [span.first_token, span.tokens, span.table]));
        self.put(copies.iter().map(|copy| [copy.from, copy.to]));
        self.put(placeholders.iter().map(|placeholder| [placeholder.token, placeholder.sample]));
        Ok(())
    }

    pub fn take_step(&mut self, batch: &mut Batch) -> Result<()> {
        batch.clear();
        let Batch { tokens, positions, slots, spans, tables, logit_rows, copies, placeholders } = batch;
        for list in [tokens, positions, slots, tables, logit_rows] {
            fill(list, self.take()?.map(|[number]| number))?;
        }
        fill(spans, self.take()?.map(|[first_token, tokens, table]| Span { first_token, tokens, table }))?;
        fill(copies, self.take()?.map(|[from, to]| BlockCopy { from, to }))?;
        fill(placeholders, self.take()?.map(|[token, sample]| Placeholder { token, sample }))
    }

    pub fn put_moves(&mut self, kind: Kind, moves: &[BlockMove]) -> Result<()> {
        self.begin(kind, 1 + 2 * moves.len())?;
        self.put(moves.iter().map(|moved| [moved.device, moved.host]));
        Ok(())
    }

    pub fn take_moves(&mut self, moves: &mut Vec<BlockMove>, bounds: &Bounds) -> Result<()> {
        moves.clear();
        fill(moves, self.take()?.map(|[device, host]| BlockMove { device, host }))?;
        check(bounds.contain_moves(moves))
    }

    pub fn put_blocks(&mut self, kind: Kind, blocks: &[u32], tail: Tail) -> Result<()> {
        self.begin(kind, 4 + blocks.len())?;
        self.put(blocks.iter().map(|&block| [block]));
        self.put([[tail.blocks as u32, tail.slots as u32]].into_iter());
        Ok(())
    }

    pub fn take_blocks(&mut self, blocks: &mut Vec<u32>, bounds: &Bounds) -> Result<Tail> {
        blocks.clear();
        fill(blocks, self.take()?.map(|[block]| block))?;
        let [partial, slots] = self.take()?.next().unwrap_or_default().map(|number| number as usize);
        check(bounds.contain(blocks) && partial <= blocks.len() && slots <= bounds.block_size)?;
        Ok(Tail { blocks: partial, slots })
    }

    pub fn put_shrink(&mut self, moves: &[BlockCopy], blocks: usize) -> Result<()> {
        self.begin(Kind::Shrink, 3 + 2 * moves.len())?;
        self.put(moves.iter().map(|copy| [copy.from, copy.to]));
        self.put([[blocks as u32]].into_iter());
        Ok(())
    }

    pub fn take_shrink(&mut self, moves: &mut Vec<BlockCopy>, bounds: &Bounds) -> Result<usize> {
        moves.clear();
        fill(moves, self.take()?.map(|[from, to]| BlockCopy { from, to }))?;
        let [blocks] = self.take()?.next().unwrap_or_default().map(|number| number as usize);
        check(bounds.contain_copies(moves) && blocks <= bounds.blocks)?;
        Ok(blocks)
    }
}

fn check(is_valid: bool) -> Result<()> {
    match is_valid {
        true => Ok(()),
        false => Err(Error::internal("rank 0 has sent a command about blocks that do not exist")),
    }
}

fn fill<T>(list: &mut Vec<T>, items: impl ExactSizeIterator<Item = T>) -> Result<()> {
    list.try_reserve(items.len())?;
    list.extend(items);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::communicator::local::Local;
    use crate::types::parallel::Division;

    fn batch() -> Batch {
        Batch {
            tokens: vec![5, 6, 7],
            positions: vec![0, 1, 9],
            slots: vec![16, 17, 40, 16, 17, 40],
            spans: vec![Span { first_token: 0, tokens: 2, table: 0 }, Span { first_token: 2, tokens: 1, table: 2 }],
            tables: vec![1, 1, 2, 2],
            logit_rows: vec![1, 2],
            copies: vec![BlockCopy { from: 3, to: 4 }],
            placeholders: vec![Placeholder { token: 2, sample: 0 }],
        }
    }

    const BOUNDS: Bounds = Bounds { blocks: 99, host_blocks: 3, block_size: 8, groups: 2, max_len: 100 };

    /// Reads all commands on a worker, and passes them on.
    fn follow(group: &Group) {
        let (mut message, mut received) = (Message::default(), Batch::default());
        let (mut moves, mut blocks, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let next = |message: &mut Message, kind| {
            assert_eq!(message.receive(group, 40).unwrap(), kind);
            message.relay(group).unwrap();
        };
        next(&mut message, Kind::Step);
        message.take_step(&mut received).unwrap();
        assert_eq!(received, batch());
        next(&mut message, Kind::SwapIn);
        message.take_moves(&mut moves, &BOUNDS).unwrap();
        assert_eq!(moves, [BlockMove { device: 1, host: 2 }]);
        next(&mut message, Kind::Read);
        assert_eq!(message.take_blocks(&mut blocks, &BOUNDS).unwrap(), Tail { blocks: 1, slots: 3 });
        assert_eq!(blocks, [8, 9]);
        next(&mut message, Kind::Shrink);
        assert_eq!(message.take_shrink(&mut copies, &BOUNDS).unwrap(), 77);
        assert_eq!(copies, [BlockCopy { from: 1, to: 0 }]);
        next(&mut message, Kind::Exit);
        assert!(message.take_blocks(&mut blocks, &BOUNDS).is_err(), "an exit has no lists");
    }

    #[test]
    fn commands_reach_all_workers_of_all_stages() {
        for (tensor, pipeline) in [(2, 1), (1, 3), (2, 2), (3, 2)] {
            let division = Division { tensor, pipeline };
            let ranks = Local::group(division.workers()).into_iter().map(|world| {
                thread::spawn(move || {
                    let group = Group::new(Arc::new(world), division, Duration::from_secs(600)).unwrap();
                    if group.place.rank() > 0 {
                        return follow(&group);
                    }
                    let mut message = Message::default();
                    let mut send = |write: &dyn Fn(&mut Message) -> Result<()>| {
                        write(&mut message).unwrap();
                        message.broadcast(&group).unwrap();
                        message.relay(&group).unwrap();
                    };
                    send(&|message| message.put_step(&batch()));
                    send(&|message| message.put_moves(Kind::SwapIn, &[BlockMove { device: 1, host: 2 }]));
                    send(&|message| message.put_blocks(Kind::Read, &[8, 9], Tail { blocks: 1, slots: 3 }));
                    send(&|message| message.put_shrink(&[BlockCopy { from: 1, to: 0 }], 77));
                    send(&Message::put_exit);
                })
            });
            ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
        }
    }

    #[test]
    fn lists_that_are_longer_than_the_message_are_refused() {
        let mut message = Message { words: vec![0, 2, 1000, 1], next: HEADER };
        assert!(message.take::<2>().is_err());
        let mut message = Message { words: vec![0, 1, u32::MAX], next: HEADER };
        assert!(message.take_step(&mut Batch::default()).is_err());
    }

    #[test]
    fn commands_about_blocks_that_do_not_exist_are_refused() {
        let written = |write: &dyn Fn(&mut Message) -> Result<()>| {
            let mut message = Message::default();
            write(&mut message).unwrap();
            message.next = HEADER;
            message
        };
        let moved = |device, host| written(&|message| message.put_moves(Kind::SwapIn, &[BlockMove { device, host }]));
        let taken = |mut message: Message| message.take_moves(&mut Vec::new(), &BOUNDS).is_ok();
        assert_eq!([taken(moved(98, 2)), taken(moved(99, 2)), taken(moved(98, 3))], [true, false, false]);
        let read = |block, blocks, slots| written(&|message| message.put_blocks(Kind::Read, &[block], Tail { blocks, slots }));
        let taken = |mut message: Message| message.take_blocks(&mut Vec::new(), &BOUNDS).is_ok();
        let results = [taken(read(98, 1, 8)), taken(read(99, 1, 8)), taken(read(98, 2, 8)), taken(read(98, 1, 9))];
        assert_eq!(results, [true, false, false, false]);
        let shrunk = |to, blocks| written(&|message| message.put_shrink(&[BlockCopy { from: 1, to }], blocks));
        let taken = |mut message: Message| message.take_shrink(&mut Vec::new(), &BOUNDS).is_ok();
        assert_eq!([taken(shrunk(98, 99)), taken(shrunk(99, 99)), taken(shrunk(98, 100))], [true, false, false]);
    }

    #[test]
    fn commands_that_are_too_long_are_refused_before_memory_is_allocated() {
        let division = Division { tensor: 2, pipeline: 1 };
        let ranks = Local::group(2).into_iter().map(|world| {
            thread::spawn(move || {
                let group = Group::new(Arc::new(world), division, Duration::from_secs(600)).unwrap();
                if group.place.rank() == 0 {
                    let mut header = [Kind::Step as u32, u32::MAX];
                    return group.workers.tensor.broadcast(as_bytes_mut(&mut header), 0, None);
                }
                let mut message = Message::default();
                let error = message.receive(&group, 1000).unwrap_err();
                assert!(error.message().ends_with("a command of 4294967295 numbers; the limit is 1000"), "{error}");
                assert_eq!(message.words.capacity(), 0);
                Ok(())
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    }
}
