//! Tests of exports and imports on a device of numbered blocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::engine::command::Command;
use crate::error::{Error, Result};
use crate::kv::BlockId;
use crate::kv::connector::{DeviceBlocks, TransferId};
use crate::output::queue::OutputSender;
use crate::output::wakeup::Wakeup;
use crate::types::batch::{BlockMove, Moves, Tail};
use crate::types::outputs::Output;
use crate::types::sequence_state::{Header, SequenceState};
use crate::types::{QueueId, RequestId, SeqId};

/// Bytes of one block: three of K and one of V.
const PARTS: [usize; 2] = [3, 1];

/// Blocks of four bytes, some of which cannot be copied.
#[derive(Default)]
struct Blocks {
    contents: Vec<[u8; 4]>,
    copied: usize,
    failing: Option<BlockId>,
}

impl Blocks {
    /// Creates blocks of which block `i` contains `i`.
    fn numbered(count: u8) -> Blocks {
        Blocks { contents: (0..count).map(|i| [i; 4]).collect(), ..Blocks::default() }
    }

    fn count(&mut self, block: BlockId) -> Result<()> {
        self.copied += 1;
        if self.failing == Some(block) { Err(Error::io("the device is lost")) } else { Ok(()) }
    }
}

impl DeviceBlocks for Blocks {
    fn read_block(&mut self, block: BlockId, filled_slots: Option<usize>, out: &mut Vec<u8>) -> Result<()> {
        self.count(block)?;
        out.extend(&self.contents[block as usize][..filled_slots.unwrap_or(4)]);
        out.resize(4, 0);
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<()> {
        self.count(block)?;
        self.contents[block as usize] = bytes.try_into().unwrap();
        Ok(())
    }

    fn move_out(&mut self, moves: &[BlockMove]) -> Result<()> {
        moves.iter().try_for_each(|moved| self.count(moved.device))
    }

    fn move_in(&mut self, moves: &[BlockMove]) -> Result<()> {
        moves.iter().try_for_each(|moved| self.count(moved.device))
    }
}

fn sender() -> Arc<OutputSender> {
    Arc::new(OutputSender::new(QueueId::default(), 8, 8, Arc::default(), Arc::default()))
}

fn seq(id: u64) -> SeqId {
    SeqId::from_raw(id)
}

fn completions() -> (Completions, Arc<Wakeup>) {
    let wakeup = Arc::new(Wakeup::default());
    (Completions::new(wakeup.clone()), wakeup)
}

/// An export of 8 tokens per block, whose last block has 2 filled slots.
fn export(id: u64, blocks: usize) -> Export {
    let header = Header { tokens: vec![1; 8 * blocks + 1].into(), computed: 8 * blocks, prompt_len: 1, ..Header::default() };
    let header = Header { history: vec![0; 8 * blocks], ..header };
    let output = Output { sequence: seq(id), ..Output::default() };
    Export::new(header, PARTS.to_vec(), blocks, Tail { blocks: 1, slots: 2 }, sender(), output).unwrap()
}

/// Waits for the ids of completed transfers.
fn completed(completions: &Completions) -> Vec<TransferId> {
    let (mut ids, began) = (Vec::new(), Instant::now());
    while ids.is_empty() {
        completions.take(&mut ids);
        assert!(began.elapsed() < Duration::from_secs(300), "no transfer is completed");
    }
    ids
}

fn state(output: &Output) -> SequenceState<'static> {
    SequenceState::decode(&output.sequence_state).unwrap()
}

#[test]
fn an_export_is_copied_in_portions_and_encoded_by_the_thread() {
    let ((completions, wakeup), mut device) = (completions(), Blocks::numbered(10));
    let mut exports = Exports::new(completions.clone(), 8);
    assert_eq!(exports.progress(), Progress::Idle);
    assert!(!exports.fits_in_step(&export(1, 1)));
    exports.reserve().unwrap();
    exports.enqueue(export(1, 3), seq(99));
    let mut steps = 0;
    while exports.progress() == Progress::Copying {
        exports.begin_step();
        let before = device.copied;
        while let Some((holder, computed)) = exports.next_to_copy() {
            assert_eq!((holder, computed), (seq(99), 24));
            exports.set_blocks(Some(vec![7, 2, 5]));
            exports.copy_portion(&mut device);
        }
        assert!(device.copied - before <= 2, "a step copies at most 8 bytes");
        steps += 1;
    }
    assert_eq!((steps, exports.next_released(), exports.next_released()), (2, Some(seq(99)), None));
    assert_eq!((exports.progress(), exports.pending()), (Progress::Waiting, 1));
    wakeup.wait(None); // for the thread
    let ids = completed(&completions);
    assert!(exports.poll().is_none(), "the result is an input of the step");
    ids.into_iter().for_each(|id| exports.complete(id));
    let (_, output) = exports.poll().unwrap();
    assert_eq!((output.sequence, exports.progress()), (seq(1), Progress::Idle));
    // K of all blocks comes before V of all blocks. The last block has zeros after 2 slots.
    assert_eq!(state(&output).kv, [7, 7, 7, 2, 2, 2, 5, 5, 0, 7, 2, 0]);
}

#[test]
fn a_small_export_finishes_in_its_step_and_is_not_announced() {
    let ((completions, _), mut device) = (completions(), Blocks::numbered(10));
    let mut exports = Exports::new(completions.clone(), 64);
    assert!(exports.fits_in_step(&export(1, 2)) && !exports.fits_in_step(&export(1, 3)));
    exports.copy_in_step(export(1, 2), &[3, 4], &mut device).unwrap();
    exports.finish_in_step();
    let (_, output) = exports.poll().unwrap();
    assert_eq!(state(&output).kv, [3, 3, 3, 4, 4, 0, 3, 0]);
    let mut ids = Vec::new();
    completions.take(&mut ids);
    assert!(ids.is_empty() && exports.pending() == 0);
    // The bytes of small exports count too.
    for _ in 0..7 {
        exports.copy_in_step(export(1, 2), &[3, 4], &mut device).unwrap();
    }
    assert!(!exports.fits_in_step(&export(1, 1)));
    exports.begin_step();
    assert!(exports.fits_in_step(&export(1, 1)));
}

#[test]
fn exports_finish_in_order_and_a_small_one_waits_for_those_before_it() {
    let ((completions, _), mut device) = (completions(), Blocks::numbered(20));
    let mut exports = Exports::new(completions.clone(), 1000);
    for id in 1..4 {
        exports.reserve().unwrap();
        exports.enqueue(export(id, id as usize), seq(90 + id));
    }
    assert!(!exports.fits_in_step(&export(9, 1)));
    while exports.next_to_copy().is_some() {
        exports.set_blocks(Some(vec![1, 2, 3]));
        exports.copy_portion(&mut device);
    }
    let mut found = Vec::new();
    while found.len() < 3 {
        completed(&completions).into_iter().for_each(|id| exports.complete(id));
        found.extend(std::iter::from_fn(|| exports.poll()).map(|(_, output)| output.sequence.get()));
    }
    assert_eq!(found, [1, 2, 3]);
}

#[test]
fn a_failed_copy_ends_only_its_export() {
    let ((completions, _), mut device) = (completions(), Blocks { failing: Some(4), ..Blocks::numbered(10) });
    let mut exports = Exports::new(completions.clone(), 1000);
    for (id, holder) in [(1, 91), (2, 92)] {
        exports.reserve().unwrap();
        exports.enqueue(export(id, 2), seq(holder));
    }
    exports.set_blocks(Some(vec![3, 4]));
    exports.copy_portion(&mut device);
    let (_, output) = exports.poll().unwrap();
    assert_eq!((output.sequence, output.error.unwrap().message()), (seq(1), "the device is lost"));
    assert_eq!((exports.next_released(), exports.pending()), (Some(seq(91)), 1));
    exports.set_blocks(Some(vec![3, 5]));
    exports.copy_portion(&mut device);
    completed(&completions).into_iter().for_each(|id| exports.complete(id));
    assert_eq!(state(&exports.poll().unwrap().1).kv.len(), 8);
}

#[test]
fn an_export_without_its_blocks_has_no_kv() {
    let ((completions, _), mut device) = (completions(), Blocks::numbered(10));
    let mut exports = Exports::new(completions.clone(), 4);
    exports.reserve().unwrap();
    exports.enqueue(export(1, 3), seq(99));
    exports.set_blocks(Some(vec![1, 2, 3]));
    exports.copy_portion(&mut device);
    exports.begin_step();
    exports.set_blocks(None);
    exports.copy_portion(&mut device);
    assert_eq!(exports.next_released(), Some(seq(99)));
    completed(&completions).into_iter().for_each(|id| exports.complete(id));
    let state = state(&exports.poll().unwrap().1);
    assert_eq!((state.header.computed, state.kv.len(), state.header.tokens.len()), (0, 0, 25));
}

#[test]
fn cancelled_transfers_have_no_results() {
    let ((completions, _), mut device) = (completions(), Blocks::numbered(10));
    let mut transfers = Transfers::new(completions.clone(), 8, None);
    for id in 1..3 {
        transfers.exports.reserve().unwrap();
        transfers.exports.enqueue(export(id, 2), seq(90 + id));
    }
    transfers.exports.set_blocks(Some(vec![1, 2]));
    transfers.exports.copy_portion(&mut device);
    transfers.imports.enqueue(import(5, 3)).unwrap();
    assert_eq!((transfers.pending(), transfers.progress(false)), (3, Progress::Copying));
    transfers.cancel_all();
    assert_eq!((transfers.pending(), transfers.progress(false)), (0, Progress::Idle));
    completed(&completions).into_iter().for_each(|id| transfers.exports.complete(id));
    assert!(transfers.exports.poll().is_none() && transfers.imports.poll().is_none());
}

/// An import whose block `i` contains `50 + i`.
fn import(id: u64, blocks: u8) -> Import {
    let numbers = || (0..blocks).map(|i| 50 + i);
    let kv = numbers().flat_map(|number| [number; 3]).chain(numbers()).collect();
    Import::new(seq(id), 8 * blocks as usize, sender(), kv, PARTS.to_vec(), blocks.into()).unwrap()
}

#[test]
fn an_import_is_copied_in_portions() {
    let (mut imports, mut device) = (Imports::new(8), Blocks::numbered(10));
    imports.enqueue(import(1, 5)).unwrap();
    let mut steps = 0;
    while imports.progress() == Progress::Copying {
        imports.begin_step();
        while imports.next_to_copy().is_some() {
            imports.set_blocks(vec![9, 8, 7, 6, 5]);
            imports.copy_portion(&mut device);
        }
        steps += 1;
    }
    let (import, result) = imports.poll().unwrap();
    assert_eq!((steps, import.seq, result.is_ok()), (3, seq(1), true));
    assert_eq!(device.contents[5..], [[54; 4], [53; 4], [52; 4], [51; 4], [50; 4]]);
}

#[test]
fn a_failed_import_returns_its_deferred_commands() {
    let (mut imports, mut device) = (Imports::new(100), Blocks { failing: Some(1), ..Blocks::numbered(10) });
    imports.enqueue(import(1, 3)).unwrap();
    assert!(imports.defer(seq(1), Command::Append { seq: seq(1), tokens: vec![4] }).is_ok());
    imports.set_blocks(vec![0, 1, 2]);
    imports.copy_portion(&mut device);
    let (import, result) = imports.poll().unwrap();
    assert_eq!((result.unwrap_err().message(), import.deferred.len(), imports.pending()), ("the device is lost", 1, 0));
    assert!(Import::new(seq(1), 8, sender(), vec![1, 2, 3], PARTS.to_vec(), 1).is_err(), "truncated K and V");
}

#[test]
fn commands_for_an_imported_sequence_and_its_forks_are_deferred() {
    let mut imports = Imports::new(8);
    imports.enqueue(import(4, 3)).unwrap();
    let before = |imports: &Imports, command: Command| imports.sequence_before(&command).is_some();
    let child =
        crate::engine::command::ForkedSequence { id: seq(6), seed: None, user_data: 0, sender: sender(), requested_at: Duration::ZERO };
    assert!(before(&imports, Command::Free { seq: seq(4) }) && before(&imports, Command::Abort { request: RequestId::from_raw(4) }));
    assert!(!before(&imports, Command::Free { seq: seq(6) }) && !before(&imports, Command::Unpin { id: crate::types::PinId::from_raw(4) }));
    let fork = Command::Fork { parent: seq(4), len: None, children: vec![child], idle: true };
    assert!(imports.defer(seq(4), fork).is_ok());
    assert!(before(&imports, Command::Rewind { seq: seq(6), len: 1 }));
    assert_eq!(imports.take(seq(4)).unwrap().deferred.len(), 1);
    assert!(!before(&imports, Command::Rewind { seq: seq(6), len: 1 }));
}

/// Makes the moves of blocks 0 to 2 out and of blocks 3 to 5 back, in portions of `max_bytes`.
/// Returns the bytes of each portion and the result.
fn move_tiers(device: &mut Blocks, max_bytes: usize) -> (Vec<usize>, Option<MovedBlocks>) {
    let moves = |blocks: std::ops::Range<u32>| blocks.map(|device| BlockMove { device, host: device }).collect();
    let moves = Moves { out: moves(0..3), back: moves(3..6) };
    let (mut transfers, mut portions) = (TierMoves::new(&moves, 4), Vec::new());
    while transfers.progress() == Progress::Copying {
        assert_eq!(transfers.poll(), None);
        portions.push(transfers.copy(device, max_bytes));
    }
    assert_eq!(transfers.copy(device, max_bytes), 0);
    let result = transfers.poll();
    assert_eq!(transfers.poll(), None, "the result is returned once");
    (portions, result)
}

#[test]
fn moves_between_the_tiers_are_made_in_portions_out_before_back() {
    let moved = |out, back| Some(MovedBlocks { out, back });
    assert_eq!(move_tiers(&mut Blocks::numbered(6), usize::MAX), (vec![12, 12], moved(true, true)));
    assert_eq!(move_tiers(&mut Blocks::numbered(6), 8), (vec![8, 4, 8, 4], moved(true, true)));
    assert_eq!(move_tiers(&mut Blocks::numbered(6), 1).0, [4; 6]);
    let failing = |block| Blocks { failing: Some(block), ..Blocks::numbered(6) };
    assert_eq!(move_tiers(&mut failing(1), 4), (vec![4, 4, 4, 4, 4], moved(false, true)));
    assert_eq!(move_tiers(&mut failing(4), 4), (vec![4, 4, 4, 4, 4], moved(true, false)));
    assert_eq!(TierMoves::new(&Moves::default(), 4).poll(), None);
}
