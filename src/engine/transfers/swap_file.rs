//! The host tier in a file. A thread reads and writes the file. The stepping thread only copies
//! blocks, and never waits for the disk.
//!
//! The executor has a small tier in memory. Blocks that leave are moved there, and copied to
//! buffers for the thread. Blocks that return take the opposite way, after the thread has read
//! them.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};

use crate::error::{Error, Result, try_vec};
use crate::executor::Executor;
use crate::kv::BlockId;
use crate::output::wakeup::Wakeup;
use crate::sys::{files, threads};
use crate::types::batch::BlockMove;

/// The end of a read or a write. It is an input of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedTransfer {
    /// Number of the transfer, from 1.
    pub id: u64,
    pub succeeded: bool,
}

/// A host tier in a file.
pub struct SwapFile {
    block_bytes: usize,
    /// Maximum number of reads, and of writes, that have not ended.
    max_pending: usize,
    /// Number of transfers that have ended. They end in the order of their starts.
    ended_transfers: u64,
    pending: VecDeque<Pending>,
    reads: usize,
    /// [blocks] The last read of each block. Earlier ones were cancelled.
    last_read: Vec<u64>,
    /// Blocks that have been read, until this step copies them.
    contents: HashMap<BlockId, Vec<u8>>,
    /// Buffers of blocks.
    spare: Vec<Vec<u8>>,
    /// Moves between the device and the executor's tier in memory.
    staged: Vec<BlockMove>,
    jobs: Option<Sender<Job>>,
    thread: DiskThread,
}

/// A transfer that has not ended.
struct Pending {
    block: BlockId,
    is_write: bool,
}

/// The thread, and what it has done.
struct DiskThread {
    handle: Option<JoinHandle<()>>,
    waiting: Receiver<Job>,
    done: Receiver<Done>,
    ended: Receiver<EndedTransfer>,
}

/// Work of the thread.
struct Job {
    id: u64,
    block: BlockId,
    buffer: Vec<u8>,
    is_write: bool,
}

/// The result of a job with its buffer.
struct Done {
    buffer: Vec<u8>,
    succeeded: bool,
    took: Duration,
}

/// A read or write that was completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedTransfer {
    /// The block that was read, if its contents are still wanted, and whether they are there.
    pub read: Option<(BlockId, bool)>,
    /// How long the disk has taken. `None` after a failure.
    pub took: Option<Duration>,
}

impl SwapFile {
    /// Creates a file of `blocks` blocks in `dir`, and its thread. At most `max_pending` reads and
    /// as many writes are pending. An empty `dir` stands for a file in memory, for replays.
    pub fn create(dir: &Path, blocks: usize, block_bytes: usize, max_pending: usize, wakeup: Arc<Wakeup>) -> Result<SwapFile> {
        let bytes = (blocks as u64).checked_mul(block_bytes as u64).ok_or_else(Error::out_of_memory)?;
        let file = match dir.as_os_str().is_empty() {
            true => files::in_memory(bytes)?,
            false => files::nameless(dir, bytes)?,
        };
        SwapFile::start(file, blocks, block_bytes, max_pending, wakeup)
    }

    fn start(file: File, blocks: usize, block_bytes: usize, max_pending: usize, wakeup: Arc<Wakeup>) -> Result<SwapFile> {
        let max_pending = max_pending.clamp(1, blocks.max(1));
        let (jobs, waiting) = unbounded::<Job>();
        let (results, done) = unbounded();
        let (announce, ended) = unbounded();
        let mut disk = Disk { file, block_bytes, is_lost: try_vec(blocks, false)? };
        let last_read = try_vec(blocks, 0)?;
        let queue = waiting.clone();
        let work = move || {
            for job in queue {
                let (id, result) = (job.id, disk.run(job));
                let end = EndedTransfer { id, succeeded: result.succeeded };
                // The order matters: a step that has the input takes the result.
                let _ = (results.send(result), announce.send(end));
                wakeup.wake();
            }
        };
        let handle = threads::spawn("pagedllm-swap".into(), work)
            .map_err(|e| Error::capacity(format!("cannot start the thread of the swap file: {e}; raise the limit of threads")))?;
        let mut swap_file = SwapFile {
            block_bytes,
            max_pending,
            ended_transfers: 0,
            pending: VecDeque::new(),
            reads: 0,
            last_read,
            contents: HashMap::new(),
            spare: Vec::new(),
            staged: Vec::new(),
            jobs: Some(jobs),
            thread: DiskThread { handle: Some(handle), waiting, done, ended },
        };
        swap_file.pending.try_reserve_exact(2 * max_pending)?;
        // A map that is at most half full does not allocate when entries come and go.
        swap_file.contents.try_reserve(2 * max_pending)?;
        swap_file.spare.try_reserve_exact(2 * max_pending)?;
        swap_file.staged.try_reserve_exact(max_pending)?;
        Ok(swap_file)
    }

    /// Returns where the ends of transfers appear, as inputs of a step.
    pub fn ended(&self) -> Receiver<EndedTransfer> {
        self.thread.ended.clone()
    }

    /// Returns how many blocks can be written now.
    pub fn room(&self) -> usize {
        self.max_pending.saturating_sub(self.pending.len() - self.reads)
    }

    /// Returns how many blocks may be read now.
    pub fn reads_left(&self) -> usize {
        self.max_pending.saturating_sub(self.reads)
    }

    /// Returns whether transfers have not ended. Their ends wake the stepping thread.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Starts to write blocks, for which there must be room.
    pub fn move_out(&mut self, executor: &mut dyn Executor, moves: &[BlockMove]) -> Result<()> {
        for portion in moves.chunks(self.max_pending) {
            executor.swap_out(stage(&mut self.staged, portion))?;
            for (slot, to) in portion.iter().enumerate() {
                let mut buffer = self.take_buffer()?;
                buffer.extend_from_slice(executor.host_block(slot));
                self.start_transfer(to.host, buffer, true);
            }
        }
        Ok(())
    }

    /// Copies blocks that were read to the device.
    pub fn move_in(&mut self, executor: &mut dyn Executor, moves: &[BlockMove]) -> Result<()> {
        for portion in moves.chunks(self.max_pending) {
            for (slot, from) in portion.iter().enumerate() {
                let contents = self.contents.remove(&from.host).ok_or_else(|| Error::internal("a host block was not read"))?;
                executor.host_block(slot).copy_from_slice(&contents);
                self.recycle(contents);
            }
            executor.swap_in(stage(&mut self.staged, portion))?;
        }
        Ok(())
    }

    /// Starts to read a block. An earlier read of the same block is cancelled. Without memory for
    /// the contents, the read fails when it ends.
    pub fn read(&mut self, block: BlockId) {
        let buffer = self.take_buffer().unwrap_or_default();
        self.last_read[block as usize] = self.start_transfer(block, buffer, false);
        self.reads += 1;
    }

    fn take_buffer(&mut self) -> Result<Vec<u8>> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.try_reserve_exact(self.block_bytes)?;
        Ok(buffer)
    }

    fn start_transfer(&mut self, block: BlockId, buffer: Vec<u8>, is_write: bool) -> u64 {
        self.pending.push_back(Pending { block, is_write });
        let id = self.ended_transfers + self.pending.len() as u64;
        if let Some(jobs) = &self.jobs {
            // `waiting` is a receiver of this channel, so the send cannot fail.
            let _ = jobs.send(Job { id, block, buffer, is_write });
        }
        id
    }

    /// Completes a transfer that has ended. In a replay, the thread may be slower than in the
    /// recording: then this call waits for it. Returns `None` if the end belongs to another file.
    pub fn complete(&mut self, ended: EndedTransfer) -> Option<CompletedTransfer> {
        let Pending { block, is_write } = self.pending.pop_front()?;
        self.ended_transfers += 1;
        let id = self.ended_transfers;
        self.reads -= !is_write as usize;
        let Done { buffer, succeeded, took } = self.thread.done.recv().ok()?;
        let succeeded = succeeded && ended == EndedTransfer { id, succeeded: true };
        let is_wanted = !is_write && self.last_read[block as usize] == id;
        match is_wanted && succeeded {
            true => drop(self.contents.insert(block, buffer)),
            false => self.recycle(buffer),
        }
        Some(CompletedTransfer { read: is_wanted.then_some((block, succeeded)), took: succeeded.then_some(took) })
    }

    /// Drops the contents that the transfers of this step have not taken.
    pub fn drop_contents(&mut self) {
        let mut contents = std::mem::take(&mut self.contents);
        contents.drain().for_each(|(_, buffer)| self.recycle(buffer));
        self.contents = contents;
    }

    /// Keeps a buffer for later transfers.
    fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < self.spare.capacity() {
            self.spare.push(buffer);
        }
    }
}

/// Lists moves between the blocks of a portion on the device and the first blocks of the tier in
/// memory.
fn stage<'a>(staged: &'a mut Vec<BlockMove>, portion: &[BlockMove]) -> &'a [BlockMove] {
    staged.clear();
    staged.extend((0..).zip(portion).map(|(host, of)| BlockMove { device: of.device, host }));
    staged
}

/// The file as its thread sees it.
struct Disk {
    file: File,
    block_bytes: usize,
    /// [blocks] Whether the last write of the block has failed, so that the file has other
    /// contents.
    is_lost: Vec<bool>,
}

impl Disk {
    fn run(&mut self, Job { block, mut buffer, is_write, .. }: Job) -> Done {
        let (began, offset) = (Instant::now(), u64::from(block) * self.block_bytes as u64);
        let is_lost = &mut self.is_lost[block as usize];
        let succeeded = match is_write {
            true => self.file.write_all_at(&buffer, offset).is_ok(),
            // A buffer without memory can take nothing.
            false if *is_lost || buffer.capacity() < self.block_bytes => false,
            false => {
                buffer.resize(self.block_bytes, 0);
                self.file.read_exact_at(&mut buffer, offset).is_ok()
            }
        };
        if is_write {
            *is_lost = !succeeded;
        }
        Done { buffer, succeeded, took: began.elapsed() }
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        self.jobs = None;
        // Jobs that have not begun are dropped.
        while self.thread.waiting.try_recv().is_ok() {}
        if let Some(handle) = self.thread.handle.take() {
            let _ = handle.join(); // nothing follows, even after a panic
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{InFlightStep, StepOutput};
    use crate::types::batch::Batch;

    const BYTES: usize = 5;

    /// An executor whose device has one byte for each block.
    struct Bytes {
        device: [u8; 4],
        tier: [[u8; BYTES]; 2],
    }

    impl Executor for Bytes {
        fn submit(&mut self, _: &Batch) -> Result<InFlightStep> {
            Ok(InFlightStep::new(0))
        }

        fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
            Ok(StepOutput::from_logits(&[]))
        }

        fn swap_out(&mut self, moves: &[BlockMove]) -> Result<()> {
            moves.iter().for_each(|of| self.tier[of.host as usize].fill(self.device[of.device as usize]));
            Ok(())
        }

        fn swap_in(&mut self, moves: &[BlockMove]) -> Result<()> {
            moves.iter().for_each(|of| self.device[of.device as usize] = self.tier[of.host as usize][0]);
            Ok(())
        }

        fn host_block(&mut self, block: usize) -> &mut [u8] {
            &mut self.tier[block]
        }
    }

    fn executor(device: [u8; 4]) -> Bytes {
        Bytes { device, tier: [[0; BYTES]; 2] }
    }

    fn swap_file(file: File) -> SwapFile {
        SwapFile::start(file, 4, BYTES, 2, Arc::default()).unwrap()
    }

    fn in_memory() -> SwapFile {
        swap_file(files::in_memory(4 * BYTES as u64).unwrap())
    }

    fn moves<const N: usize>(pairs: [(u32, u32); N]) -> [BlockMove; N] {
        pairs.map(|(device, host)| BlockMove { device, host })
    }

    /// Waits for the next end of a transfer, and completes it.
    fn complete(file: &mut SwapFile) -> Option<(BlockId, bool)> {
        let ended = file.ended().recv().unwrap();
        file.complete(ended).unwrap().read
    }

    #[test]
    fn blocks_return_as_they_left_last() {
        for dir in [std::env::temp_dir(), Default::default()] {
            let mut file = SwapFile::create(&dir, 4, BYTES, 2, Arc::default()).unwrap();
            let mut executor = executor([10, 11, 12, 13]);
            file.move_out(&mut executor, &moves([(1, 3), (2, 0)])).unwrap();
            assert_eq!((file.room(), file.is_busy()), (0, true));
            assert_eq!([complete(&mut file), complete(&mut file)], [None, None]);
            file.move_out(&mut executor, &moves([(0, 3)])).unwrap();
            [3, 0].into_iter().for_each(|block| file.read(block));
            assert_eq!((file.reads_left(), file.room()), (0, 1));
            assert_eq!([0; 3].map(|_| complete(&mut file)), [None, Some((3, true)), Some((0, true))]);
            executor.device = [0; 4];
            file.move_in(&mut executor, &moves([(2, 0), (1, 3)])).unwrap();
            assert_eq!(executor.device, [0, 10, 12, 0]);
            assert!(!file.is_busy());
        }
    }

    #[test]
    fn a_cancelled_read_has_no_contents_for_a_later_one() {
        let (mut file, mut executor) = (in_memory(), executor([0, 7, 0, 0]));
        file.read(1);
        // The block is written again, so the first read is not used.
        file.move_out(&mut executor, &moves([(1, 1)])).unwrap();
        file.read(1);
        assert_eq!([0; 3].map(|_| complete(&mut file)), [None, None, Some((1, true))]);
        file.move_in(&mut executor, &moves([(3, 1)])).unwrap();
        assert_eq!(executor.device[3], 7);
        file.read(1);
        assert_eq!(complete(&mut file), Some((1, true)));
        file.drop_contents();
        assert!(file.move_in(&mut executor, &moves([(3, 1)])).is_err());
    }

    #[test]
    fn a_block_whose_write_has_failed_cannot_be_read() {
        let mut file = swap_file(File::options().read(true).write(true).open("/dev/full").unwrap());
        file.move_out(&mut executor([1; 4]), &moves([(0, 2)])).unwrap();
        // /dev/full can be read: as zeros.
        file.read(2);
        assert_eq!([0; 2].map(|_| complete(&mut file)), [None, Some((2, false))]);
    }

    #[test]
    fn a_recorded_failure_is_repeated() {
        let mut file = in_memory();
        file.read(0);
        let failed = CompletedTransfer { read: Some((0, false)), took: None };
        assert_eq!(file.complete(EndedTransfer { id: 1, succeeded: false }), Some(failed));
        // A journal of another engine names transfers that were not started.
        assert_eq!(file.complete(EndedTransfer { id: 2, succeeded: true }), None);
        file.read(0);
        assert_eq!(file.complete(EndedTransfer { id: 7, succeeded: true }), Some(failed));
    }

    #[test]
    fn a_directory_that_cannot_have_the_file_is_an_error() {
        let error = SwapFile::create(Path::new("/proc"), 4, BYTES, 2, Arc::default()).err().unwrap();
        assert!(error.message().starts_with("/proc: cannot create a file of 20 bytes: "), "{error}");
        assert!(SwapFile::create(Path::new("/tmp"), usize::MAX, usize::MAX, 2, Arc::default()).is_err());
    }
}
