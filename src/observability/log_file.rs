//! A file that a thread of its own writes. After a disk error, or if the disk is too slow, the file
//! stops growing and the engine continues.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

use crate::error::{Error, Result};
use crate::sys::quiet::no_panic;
use crate::sys::{files, threads};

/// Size and age at which the buffer goes to the thread.
const MAX_BYTES: usize = 64 << 10;
const MAX_AGE: Duration = Duration::from_secs(1);

/// If this many bytes wait for the disk, the file stops growing.
const MAX_WAITING: usize = 256 << 20;

/// Maximum number of parts that wait for the thread.
const MAX_PARTS: usize = 32;

/// A part of the file.
enum Part {
    Bytes(Vec<u8>),
    /// Bytes that the thread encodes, and their estimated number.
    Encoded(usize, Box<dyn FnOnce() -> Option<Vec<u8>> + Send>),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Encoded(len, _) => *len,
        }
    }
}

/// What both threads see.
#[derive(Default)]
struct Shared {
    /// Set after an error.
    has_stopped: AtomicBool,
    /// Number of bytes that were sent to the thread and are not written yet.
    waiting: AtomicUsize,
}

/// A file for a trace or a journal. The stepping thread appends, and never waits for the disk.
pub struct LogFile {
    buffer: Vec<u8>,
    /// Time at which the buffer was sent.
    sent: Duration,
    shared: Arc<Shared>,
    /// `None` after a stop.
    parts: Option<Sender<Part>>,
    /// Empty buffers that the thread returns.
    empty: Receiver<Vec<u8>>,
    thread: Option<JoinHandle<()>>,
}

impl LogFile {
    /// Creates or truncates the file, and writes its first bytes. The thread calls `seal` for all
    /// later bytes, before it writes them.
    pub fn create(path: &Path, first: &[u8], seal: fn(&mut [u8])) -> Result<LogFile> {
        let failed = |e: &dyn std::fmt::Display| {
            Error::io(format!("{}: cannot be written: {e}; free disk space, name another file, or none", path.display()))
        };
        let mut file = files::create(path).map_err(|e| failed(&e))?;
        files::append(&mut file, 0, first).map_err(|e| failed(&e.message()))?;
        LogFile::start(file, first.len() as u64, seal)
    }

    fn start(file: File, len: u64, seal: fn(&mut [u8])) -> Result<LogFile> {
        let (parts, received) = bounded(MAX_PARTS);
        let (returns, empty) = bounded(2);
        let buffer = || -> Result<Vec<u8>> {
            let mut buffer = Vec::new();
            buffer.try_reserve_exact(2 * MAX_BYTES)?;
            Ok(buffer)
        };
        // The channel has room for both.
        let _ = (returns.send(buffer()?), returns.send(buffer()?));
        // Nothing fails after the start of the thread, which `drop` joins.
        let buffer = buffer()?;
        let shared = Arc::new(Shared::default());
        let mut writer = Writer { file, len, seal, shared: shared.clone() };
        let work = move || received.iter().for_each(|part| writer.write(part, &returns));
        let thread = threads::spawn("pagedllm-log".into(), work)
            .map_err(|e| Error::capacity(format!("cannot start a thread that writes the file: {e}; raise the limit of threads")))?;
        Ok(LogFile { buffer, sent: Duration::ZERO, shared, parts: Some(parts), empty, thread: Some(thread) })
    }

    pub fn has_stopped(&self) -> bool {
        self.parts.is_none() || self.shared.has_stopped.load(Ordering::Acquire)
    }

    /// Appends bytes to the buffer. Without memory for them, the file stops growing.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.parts.is_none() {
            return;
        }
        match self.buffer.try_reserve(bytes.len()) {
            Ok(()) => self.buffer.extend_from_slice(bytes),
            Err(_) => self.stop(),
        }
        if self.buffer.len() > MAX_WAITING {
            self.stop();
        }
    }

    /// Appends bytes that the thread encodes, about `len`. If there are none, the file stops
    /// growing.
    pub fn push_encoded(&mut self, len: usize, encode: impl FnOnce() -> Option<Vec<u8>> + Send + 'static) {
        self.send_buffer();
        self.send(Part::Encoded(len, Box::new(encode)));
    }

    /// Appends formatted text.
    pub fn print(&mut self, text: std::fmt::Arguments) {
        // The write fails only without memory, and then the file has stopped.
        let _ = self.write_fmt(text);
    }

    /// Sends the buffer to the thread if it is large or old enough, and the thread has time for it.
    pub fn settle(&mut self, now: Duration) {
        if self.has_stopped() {
            return self.stop();
        }
        let is_due = self.buffer.len() >= MAX_BYTES || now.saturating_sub(self.sent) >= MAX_AGE;
        if !is_due {
            return;
        }
        self.sent = now;
        match self.empty.is_empty() {
            false => self.send_buffer(),
            // The disk is slow. The buffer grows until one returns.
            true if self.waiting() + self.buffer.len() > MAX_WAITING => self.stop(),
            true => {}
        }
    }

    /// Sends the buffer to the thread.
    pub fn send_buffer(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let next = self.empty.try_recv().unwrap_or_default();
        let full = std::mem::replace(&mut self.buffer, next);
        self.send(Part::Bytes(full));
    }

    fn waiting(&self) -> usize {
        self.shared.waiting.load(Ordering::Relaxed)
    }

    fn send(&mut self, part: Part) {
        let Some(parts) = &self.parts else { return };
        let len = part.len();
        if self.waiting().saturating_add(len) > MAX_WAITING {
            return self.stop();
        }
        self.shared.waiting.fetch_add(len, Ordering::Relaxed);
        let Err(TrySendError::Full(part)) = parts.try_send(part) else { return };
        // Many small parts wait. They are few bytes, so the buffer keeps the part.
        self.shared.waiting.fetch_sub(len, Ordering::Relaxed);
        match part {
            Part::Bytes(bytes) => self.buffer = bytes,
            Part::Encoded(_, encode) => match encode() {
                Some(bytes) => self.push(&bytes),
                None => self.stop(),
            },
        }
    }

    /// Ends the file before its next part.
    pub fn stop(&mut self) {
        (self.parts, self.buffer) = (None, Vec::new());
    }
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for LogFile {
    /// Waits until everything is written.
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            let rest = std::mem::take(&mut self.buffer);
            self.shared.waiting.fetch_add(rest.len(), Ordering::Relaxed);
            let _ = parts.send(Part::Bytes(rest)); // fails only if the thread has ended
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its panics are caught
        }
    }
}

/// The thread's part of a file.
struct Writer {
    file: File,
    /// Number of bytes written.
    len: u64,
    seal: fn(&mut [u8]),
    shared: Arc<Shared>,
}

impl Writer {
    fn write(&mut self, part: Part, returns: &Sender<Vec<u8>>) {
        let len = part.len();
        if !self.shared.has_stopped.load(Ordering::Relaxed) {
            match no_panic(|| self.append(part)) {
                Ok(Some(buffer)) if buffer.capacity() <= 4 * MAX_BYTES => drop(returns.try_send(buffer)),
                Ok(Some(_large)) => drop(returns.try_send(Vec::new())),
                Ok(None) | Err(_) => self.shared.has_stopped.store(true, Ordering::Release),
            }
        }
        self.shared.waiting.fetch_sub(len, Ordering::Relaxed);
    }

    /// Appends a part. Returns an empty buffer, or `None` after a failure.
    fn append(&mut self, part: Part) -> Option<Vec<u8>> {
        let mut bytes = match part {
            Part::Bytes(bytes) => bytes,
            Part::Encoded(_, encode) => encode()?,
        };
        (self.seal)(&mut bytes);
        files::append(&mut self.file, self.len, &bytes).ok()?;
        self.len += bytes.len() as u64;
        bytes.clear();
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::mpsc;

    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("pagedllm-log-{}-{name}", std::process::id()))
    }

    fn wait_until_stopped(file: &LogFile) {
        while !file.has_stopped() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn parts_are_written_in_their_order_and_sealed_once() {
        let path = path("order");
        let mut file = LogFile::create(&path, b"first", |bytes| bytes.make_ascii_uppercase()).unwrap();
        file.push(b" a");
        file.push_encoded(2, || Some(b" b".into()));
        file.print(format_args!(" {}", "c"));
        // More buffers than there are spare ones.
        for count in 0..10 {
            file.print(format_args!(" {count}"));
            file.send_buffer();
        }
        file.push(b" d");
        assert!(!file.has_stopped());
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "first A B C 0 1 2 3 4 5 6 7 8 9 D");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn old_bytes_are_sent_and_new_ones_wait() {
        let path = path("age");
        let mut file = LogFile::create(&path, b"", |_| {}).unwrap();
        file.push(b"a");
        file.settle(MAX_AGE / 2);
        assert_eq!(file.buffer, b"a");
        file.settle(MAX_AGE);
        assert!(file.buffer.is_empty());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_full_disk_refuses_the_file_or_stops_it() {
        let error = LogFile::create(Path::new("/dev/full"), b"first", |_| {}).err().unwrap();
        assert!(error.message().starts_with("/dev/full: cannot be written: "), "{error}");
        let mut file = LogFile::create(Path::new("/dev/full"), b"", |_| {}).unwrap();
        file.push(b"later");
        file.send_buffer();
        wait_until_stopped(&file);
        file.push(b"more");
        file.settle(MAX_AGE);
        assert!(file.parts.is_none() && file.buffer.is_empty(), "a stopped file keeps nothing");
    }

    #[test]
    fn a_slow_disk_stops_the_file_without_a_delay() {
        let path = path("slow");
        let mut file = LogFile::create(&path, b"", |_| {}).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        file.push_encoded(MAX_WAITING - 10, move || wait.recv().ok().map(|()| b"slow".into()));
        // The thread waits, so buffers do not return. The third one grows instead.
        for part in ["1", "2", "3"] {
            file.push(part.as_bytes());
            file.settle(file.sent + MAX_AGE);
        }
        assert_eq!(file.buffer, b"3");
        assert!(!file.has_stopped());
        file.push(b"45678901");
        file.settle(file.sent + MAX_AGE);
        assert!(file.has_stopped());
        go.send(()).unwrap();
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "slow12", "what was sent is written");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn many_small_parts_behind_a_slow_disk_are_kept() {
        let path = path("small");
        let mut file = LogFile::create(&path, b"", |_| {}).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        file.push_encoded(1, move || wait.recv().ok().map(|()| b"0".into()));
        for _ in 0..2 * MAX_PARTS {
            file.push(b"1");
            file.send_buffer();
        }
        file.push_encoded(1, || Some(b"2".into()));
        assert!(!file.has_stopped());
        go.send(()).unwrap();
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("0{}2", "1".repeat(2 * MAX_PARTS)));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_failed_encoding_stops_the_file() {
        for encode in [|| None, || panic!("no record")] {
            let mut file = LogFile::create(Path::new("/dev/null"), b"", |_| {}).unwrap();
            file.push_encoded(1, encode);
            wait_until_stopped(&file);
        }
    }
}
