//! The host tier in a file. A thread reads and writes the file. The stepping thread only copies
//! blocks between the device and buffers, and never waits for the disk.

use std::collections::HashMap;
use std::fs::File;
use std::mem;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};

use crate::error::{Error, Result, try_vec};
use crate::kv::BlockId;
use crate::output::wakeup::Wakeup;
use crate::sys::{files, threads};

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
    last_id: u64,
    /// The reads and writes that have not ended.
    reads: HashMap<u64, BlockId>,
    writes: usize,
    /// The last read of each block that is being read. Earlier ones were cancelled.
    last_read: HashMap<BlockId, u64>,
    /// Blocks that have been read, until this step copies them.
    contents: HashMap<BlockId, Vec<u8>>,
    /// Buffers of blocks.
    spare: Vec<Vec<u8>>,
    jobs: Option<Sender<Job>>,
    waiting: Receiver<Job>,
    done: Receiver<Done>,
    ended: Receiver<EndedTransfer>,
    thread: Option<JoinHandle<()>>,
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
    id: u64,
    buffer: Vec<u8>,
    succeeded: bool,
    took: Duration,
}

/// Transfers that have ended, and the time that the disk has taken for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskTime {
    pub blocks: usize,
    pub took: Duration,
}

impl SwapFile {
    /// Creates a file of `blocks` blocks in `dir`, and its thread. At most `max_pending` reads and as
    /// many writes are pending. An empty `dir` stands for a file in memory, for replays.
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
        let (jobs, waiting) = bounded(2 * max_pending);
        let (results, done) = unbounded();
        let (announce, ended) = unbounded();
        let mut disk = Disk { file, block_bytes, is_lost: try_vec(blocks, false)? };
        let queue = waiting.clone();
        let work = move || {
            for job in queue {
                let result = disk.run(job);
                let end = EndedTransfer { id: result.id, succeeded: result.succeeded };
                // The order matters: a step that has the input takes the result.
                let _ = (results.send(result), announce.send(end));
                wakeup.wake();
            }
        };
        let thread = threads::spawn("pagedllm-swap".into(), work)
            .map_err(|e| Error::capacity(format!("cannot start the thread of the swap file: {e}; raise the limit of threads")))?;
        let mut swap_file = SwapFile {
            block_bytes,
            max_pending,
            last_id: 0,
            reads: HashMap::new(),
            writes: 0,
            last_read: HashMap::new(),
            contents: HashMap::new(),
            spare: Vec::new(),
            jobs: Some(jobs),
            waiting,
            done,
            ended,
            thread: Some(thread),
        };
        swap_file.reads.try_reserve(max_pending)?;
        swap_file.last_read.try_reserve(max_pending)?;
        swap_file.contents.try_reserve(max_pending)?;
        swap_file.spare.try_reserve_exact(2 * max_pending)?;
        Ok(swap_file)
    }

    /// Returns where the ends of transfers appear, as inputs of a step.
    pub fn ended(&self) -> Receiver<EndedTransfer> {
        self.ended.clone()
    }

    /// Returns how many blocks can be written without waiting for the disk.
    pub fn room(&self) -> usize {
        self.max_pending.saturating_sub(self.writes)
    }

    /// Returns how many blocks may be read now.
    pub fn reads_left(&self) -> usize {
        self.max_pending.saturating_sub(self.reads.len())
    }

    /// Returns whether transfers have not ended. Their ends wake the stepping thread.
    pub fn is_busy(&self) -> bool {
        self.writes + self.reads.len() > 0
    }

    /// Returns an empty buffer for the contents of a block.
    pub fn take_buffer(&mut self) -> Result<Vec<u8>> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.try_reserve_exact(self.block_bytes)?;
        Ok(buffer)
    }

    /// Starts to write a block. If there is no room, waits for the disk.
    pub fn write(&mut self, block: BlockId, contents: Vec<u8>) {
        self.writes += 1;
        self.submit(block, contents, true);
    }

    /// Starts to read a block. An earlier read of the same block is cancelled. Without memory for
    /// the contents, the read fails when it ends.
    pub fn read(&mut self, block: BlockId) {
        let buffer = self.take_buffer().unwrap_or_default();
        let id = self.submit(block, buffer, false);
        // The memory was reserved when the file was created.
        self.reads.insert(id, block);
        self.last_read.insert(block, id);
    }

    fn submit(&mut self, block: BlockId, buffer: Vec<u8>, is_write: bool) -> u64 {
        self.last_id += 1;
        let job = Job { id: self.last_id, block, buffer, is_write };
        // The thread ends only after the sender is dropped.
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
        self.last_id
    }

    /// Completes a transfer that has ended. Returns the block that was read, if its contents are
    /// still wanted. In a replay, the thread may be slower than in the recording: then this call
    /// waits for it.
    pub fn complete(&mut self, ended: EndedTransfer, disk_time: &mut DiskTime) -> Option<BlockId> {
        // A journal that does not fit has the ends of other transfers.
        if !self.is_busy() {
            return None;
        }
        // The transfers end in the order of their starts.
        let Done { id, buffer, succeeded, took } = self.done.recv().ok()?;
        disk_time.blocks += 1;
        disk_time.took += took;
        let Some(block) = self.reads.remove(&id) else {
            self.writes -= 1;
            self.recycle(buffer);
            return None;
        };
        if self.last_read.get(&block) != Some(&id) {
            self.recycle(buffer);
            return None;
        }
        self.last_read.remove(&block);
        match succeeded && ended.succeeded && id == ended.id {
            true => drop(self.contents.insert(block, buffer)),
            false => self.recycle(buffer),
        }
        Some(block)
    }

    /// Takes the contents of a block that was read. They are `None` after a failure.
    pub fn take(&mut self, block: BlockId) -> Option<Vec<u8>> {
        self.contents.remove(&block)
    }

    /// Drops the contents that the transfers of this step have not taken.
    pub fn drop_contents(&mut self) {
        let mut contents = mem::take(&mut self.contents);
        contents.drain().for_each(|(_, buffer)| self.recycle(buffer));
        self.contents = contents;
    }

    /// Keeps a buffer for later transfers.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < self.spare.capacity() {
            self.spare.push(buffer);
        }
    }
}

/// The file as its thread sees it.
struct Disk {
    file: File,
    block_bytes: usize,
    /// [blocks] Whether the last write of the block has failed, so that the file has other contents.
    is_lost: Vec<bool>,
}

impl Disk {
    fn run(&mut self, Job { id, block, mut buffer, is_write }: Job) -> Done {
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
        Done { id, buffer, succeeded, took: began.elapsed() }
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        self.jobs = None;
        // Jobs that have not begun are dropped.
        while self.waiting.try_recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // nothing follows, even after a panic
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 5;

    fn swap_file(file: File) -> SwapFile {
        SwapFile::start(file, 4, BYTES, 2, Arc::default()).unwrap()
    }

    fn write(file: &mut SwapFile, block: BlockId, byte: u8) {
        let mut contents = file.take_buffer().unwrap();
        contents.resize(BYTES, byte);
        file.write(block, contents);
    }

    /// Waits for the next end of a transfer, and completes it.
    fn complete(file: &mut SwapFile) -> (Option<BlockId>, bool) {
        let ended = file.ended().recv().unwrap();
        (file.complete(ended, &mut DiskTime::default()), ended.succeeded)
    }

    #[test]
    fn blocks_are_read_as_they_were_written_last() {
        for dir in [std::env::temp_dir(), Default::default()] {
            let mut file = SwapFile::create(&dir, 4, BYTES, 2, Arc::default()).unwrap();
            write(&mut file, 3, 1);
            write(&mut file, 0, 2);
            assert_eq!((file.room(), file.is_busy()), (0, true));
            assert_eq!([complete(&mut file), complete(&mut file)], [(None, true), (None, true)]);
            write(&mut file, 3, 3);
            file.read(3);
            file.read(0);
            assert_eq!((file.reads_left(), file.room()), (0, 1));
            assert_eq!([0; 3].map(|_| complete(&mut file).0), [None, Some(3), Some(0)]);
            assert_eq!([file.take(3), file.take(0), file.take(0)], [Some(vec![3; BYTES]), Some(vec![2; BYTES]), None]);
            assert!(!file.is_busy());
        }
    }

    #[test]
    fn a_cancelled_read_has_no_contents_for_a_later_one() {
        let mut file = swap_file(files::in_memory(4 * BYTES as u64).unwrap());
        file.read(1);
        // The block is written again, so the first read is not used.
        write(&mut file, 1, 7);
        file.read(1);
        assert_eq!([0; 3].map(|_| complete(&mut file).0), [None, None, Some(1)]);
        assert_eq!(file.take(1), Some(vec![7; BYTES]));
        file.read(1);
        assert_eq!(complete(&mut file).0, Some(1));
        file.drop_contents();
        assert_eq!(file.take(1), None);
    }

    #[test]
    fn a_block_whose_write_has_failed_cannot_be_read() {
        let mut file = swap_file(File::options().read(true).write(true).open("/dev/full").unwrap());
        write(&mut file, 2, 1);
        file.read(2);
        assert_eq!(complete(&mut file), (None, false));
        // /dev/full can be read: as zeros.
        assert_eq!(complete(&mut file), (Some(2), false));
        assert_eq!(file.take(2), None);
    }

    #[test]
    fn a_recorded_failure_is_repeated() {
        let mut file = swap_file(files::in_memory(4 * BYTES as u64).unwrap());
        file.read(0);
        let recorded = EndedTransfer { id: 1, succeeded: false };
        assert_eq!(file.complete(recorded, &mut DiskTime::default()), Some(0));
        assert_eq!(file.take(0), None);
        // A journal that does not fit names transfers that were not started.
        assert_eq!(file.complete(EndedTransfer { id: 2, succeeded: true }, &mut DiskTime::default()), None);
    }

    #[test]
    fn a_write_without_room_waits_for_the_disk() {
        let mut file = swap_file(files::in_memory(4 * BYTES as u64).unwrap());
        (0..100).for_each(|i| write(&mut file, i % 4, i as u8));
        assert_eq!(file.room(), 0);
        assert!((0..100).all(|_| complete(&mut file) == (None, true)));
        file.read(3);
        assert_eq!((complete(&mut file).0, file.take(3)), (Some(3), Some(vec![99; BYTES])));
    }

    #[test]
    fn a_directory_that_cannot_have_the_file_is_an_error() {
        let error = SwapFile::create(Path::new("/proc"), 4, BYTES, 2, Arc::default()).err().unwrap();
        assert!(error.message().starts_with("/proc: cannot create a file of 20 bytes: "), "{error}");
        assert!(SwapFile::create(Path::new("/tmp"), usize::MAX, usize::MAX, 2, Arc::default()).is_err());
    }
}
