//! A file that grows while the engine works. Where the disk fails it stops, and no step does.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sys::files;

/// What is gathered is written once it is so much, or so old.
const MOST_BYTES: usize = 64 << 10;
const MOST_AGE: Duration = Duration::from_secs(1);

pub struct Sink {
    /// None: the disk has failed.
    file: Option<File>,
    /// Bytes written.
    len: u64,
    buffer: Vec<u8>,
    written: Duration,
}

impl Sink {
    /// Whatever was in the file is gone.
    pub fn create(path: &Path) -> Result<Sink> {
        let file = files::create(path)
            .map_err(|e| Error::io(format!("{}: cannot be written: {e}; name another file, or none", path.display())))?;
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(2 * MOST_BYTES)?;
        Ok(Sink { file: Some(file), len: 0, buffer, written: Duration::ZERO })
    }

    pub fn has_stopped(&self) -> bool {
        self.file.is_none()
    }

    /// Gathers bytes; where there is no memory for them, nothing is written any more.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.file.is_none() {
            return;
        }
        match self.buffer.try_reserve(bytes.len()) {
            Ok(()) => self.buffer.extend_from_slice(bytes),
            Err(_) => self.stop(),
        }
    }

    /// As `push`, for text.
    pub fn print(&mut self, text: std::fmt::Arguments) {
        // Writing to memory fails where there is none, and then the sink has stopped.
        let _ = self.write_fmt(text);
    }

    /// Writes what has gathered, if it is time.
    pub fn settle(&mut self, now: Duration) {
        if self.buffer.len() >= MOST_BYTES || now.saturating_sub(self.written) >= MOST_AGE {
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

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.flush_now();
    }
}
