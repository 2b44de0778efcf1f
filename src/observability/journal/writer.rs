//! The writer of a journal. Each record has a length, a checksum and contents.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::records::{Header, MAGIC, RecordedCommand, RecordedEnd, Step, VERSION};
use crate::error::{Error, Result};
use crate::observability::log_file::LogFile;
use crate::types::kv_store::FinishedLookup;

/// Size of a checksum in bytes.
pub const CHECKSUM: usize = 8;

/// The writer of a journal.
pub struct JournalWriter {
    sink: LogFile,
    scratch: Vec<u8>,
}

/// `Record` with borrowed contents. Both have the same serialized form.
#[derive(Serialize)]
enum Borrowed<'a> {
    Command(&'a RecordedCommand<'a>),
    End(&'a RecordedEnd),
    Step(&'a Step),
    Closed,
    Lookup(&'a FinishedLookup),
}

impl JournalWriter {
    pub fn create(path: &Path, header: &Header) -> Result<JournalWriter> {
        let mut writer = JournalWriter { sink: LogFile::create(path)?, scratch: Vec::new() };
        writer.sink.push(MAGIC);
        writer.sink.push(&VERSION.to_le_bytes());
        writer.scratch = serde_json::to_vec(header).map_err(|e| Error::internal(format!("the journal's header: {e}")))?;
        writer.write();
        writer.sink.flush_now();
        match writer.has_stopped() {
            true => {
                Err(Error::io(format!("{}: cannot be written, the disk is full or has failed; set another path or none", path.display())))
            }
            false => Ok(writer),
        }
    }

    pub fn has_stopped(&self) -> bool {
        self.sink.has_stopped()
    }

    pub fn command(&mut self, command: &RecordedCommand) {
        self.write_record(&Borrowed::Command(command));
    }

    pub fn ended(&mut self, ended: &RecordedEnd) {
        self.write_record(&Borrowed::End(ended));
    }

    /// Writes the blocks that a KV store has returned.
    pub fn lookup(&mut self, lookup: &FinishedLookup) {
        self.write_record(&Borrowed::Lookup(lookup));
    }

    pub fn step(&mut self, step: &Step) {
        self.write_record(&Borrowed::Step(step));
    }

    pub fn close(&mut self) {
        self.write_record(&Borrowed::Closed);
        self.sink.flush_now();
    }

    /// Writes buffered records after a step. If `idle` is set, the stepping thread may sleep now.
    pub fn settle(&mut self, now: Duration, idle: bool) {
        match idle {
            true => self.sink.flush_now(),
            false => self.sink.settle(now),
        }
    }

    fn write_record(&mut self, record: &Borrowed) {
        if self.sink.has_stopped() {
            return;
        }
        let size = postcard::experimental::serialized_size(record).ok();
        self.scratch.clear();
        let fits = size.filter(|&size| u32::try_from(size).is_ok() && self.scratch.try_reserve(size).is_ok());
        let Some(size) = fits else { return self.sink.stop() };
        self.scratch.resize(size, 0);
        match postcard::to_slice(record, &mut self.scratch) {
            Ok(_) => self.write(),
            Err(_) => self.sink.stop(),
        }
    }

    /// Appends the record in `scratch` to the file.
    fn write(&mut self) {
        self.sink.push(&(self.scratch.len() as u32).to_le_bytes());
        self.sink.push(&checksum(&self.scratch));
        self.sink.push(&self.scratch);
    }
}

pub fn checksum(bytes: &[u8]) -> [u8; CHECKSUM] {
    *Sha256::digest(bytes).first_chunk().expect("a digest is longer")
}
