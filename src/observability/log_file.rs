//! A buffered output file. After a disk error, the file stops growing and the engine continues.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sys::files;

/// Size and age at which the buffer is written.
const MAX_BYTES: usize = 64 << 10;
const MAX_AGE: Duration = Duration::from_secs(1);

/// A buffered file for a trace or a journal.
pub struct LogFile {
    /// The file. `None` after a disk error.
    file: Option<File>,
    /// Number of bytes written.
    len: u64,
    buffer: Vec<u8>,
    written: Duration,
}

impl LogFile {
    /// Creates or truncates the file.
    pub fn create(path: &Path) -> Result<LogFile> {
        let file = files::create(path)
            .map_err(|e| Error::io(format!("{}: cannot be written: {e}; name another file, or none", path.display())))?;
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(2 * MAX_BYTES)?;
        Ok(LogFile { file: Some(file), len: 0, buffer, written: Duration::ZERO })
    }

    pub fn has_stopped(&self) -> bool {
        self.file.is_none()
    }

    /// Appends bytes to the buffer. Without memory for them, the sink stops.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.file.is_none() {
            return;
        }
        match self.buffer.try_reserve(bytes.len()) {
            Ok(()) => self.buffer.extend_from_slice(bytes),
            Err(_) => self.stop(),
        }
    }

    /// Appends formatted text.
    pub fn print(&mut self, text: std::fmt::Arguments) {
        // The write fails only without memory, and then the sink has stopped.
        let _ = self.write_fmt(text);
    }

    /// Writes the buffer if it is large or old enough.
    pub fn settle(&mut self, now: Duration) {
        if self.buffer.len() >= MAX_BYTES || now.saturating_sub(self.written) >= MAX_AGE {
            self.written = now;
            self.flush_now();
        }
    }

    pub fn flush_now(&mut self) {
        let Some(file) = &mut self.file else { return };
        if files::append(file, self.len, &self.buffer).is_err() {
            return self.stop();
        }
        self.len += self.buffer.len() as u64;
        self.buffer.clear();
    }

    pub fn stop(&mut self) {
        (self.file, self.buffer) = (None, Vec::new());
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
    fn drop(&mut self) {
        self.flush_now();
    }
}
