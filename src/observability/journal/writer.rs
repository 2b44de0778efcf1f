//! The writer of a journal. Each record has a length, a checksum and contents.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::records::{Header, MAGIC, RecordedCommand, RecordedEnd, Step, VERSION};
use crate::error::{Error, Result};
use crate::observability::log_file::LogFile;
use crate::types::kv_store::LookupProgress;

/// Size of a checksum in bytes.
pub const CHECKSUM: usize = 8;

/// Records of fewer bytes are encoded by the stepping thread.
const MIN_ENCODED: usize = 64 << 10;

/// Number of bytes before the contents of a record.
const HEAD: usize = 4 + CHECKSUM;

/// The writer of a journal. A thread of its own computes checksums and writes the file.
pub struct JournalWriter {
    file: LogFile,
    scratch: Vec<u8>,
}

/// `Record` with borrowed contents. Both have the same serialized form.
#[derive(Serialize)]
enum Borrowed<'a> {
    Command(&'a RecordedCommand<'a>),
    End(&'a RecordedEnd),
    Step(&'a Step),
    Closed,
    Lookup(&'a LookupProgress),
}

impl JournalWriter {
    pub fn create(path: &Path, header: &Header) -> Result<JournalWriter> {
        let header = serde_json::to_vec(header).map_err(|e| Error::internal(format!("the journal's header: {e}")))?;
        let (version, mut first) = (VERSION.to_le_bytes(), Vec::new());
        first.try_reserve_exact(MAGIC.len() + version.len() + HEAD + header.len())?;
        first.extend_from_slice(MAGIC);
        first.extend_from_slice(&version);
        let start = first.len();
        append(&header, &mut first);
        seal(&mut first[start..]);
        Ok(JournalWriter { file: LogFile::create(path, &first, seal)?, scratch: Vec::new() })
    }

    pub fn has_stopped(&self) -> bool {
        self.file.has_stopped()
    }

    pub fn command(&mut self, command: &RecordedCommand) {
        self.write_record(&Borrowed::Command(command));
    }

    pub fn ended(&mut self, ended: &RecordedEnd) {
        self.write_record(&Borrowed::End(ended));
    }

    /// Writes the blocks that a KV store has returned. If they are many bytes, the other thread
    /// encodes them.
    pub fn lookup(&mut self, lookup: &LookupProgress) {
        let len = lookup.blocks.iter().map(|block| block.value.len()).sum();
        if len < MIN_ENCODED {
            return self.write_record(&Borrowed::Lookup(lookup));
        }
        let mut blocks = Vec::new();
        if blocks.try_reserve_exact(lookup.blocks.len()).is_err() {
            return self.file.stop();
        }
        blocks.extend(lookup.blocks.iter().cloned()); // the values are shared
        let lookup = LookupProgress { blocks, ..*lookup };
        self.file.push_encoded(len, move || {
            let (mut contents, mut record) = (Vec::new(), Vec::new());
            encode(&Borrowed::Lookup(&lookup), &mut contents)?;
            record.try_reserve_exact(HEAD + contents.len()).ok()?;
            append(&contents, &mut record);
            Some(record)
        });
    }

    pub fn step(&mut self, step: &Step) {
        self.write_record(&Borrowed::Step(step));
    }

    pub fn close(&mut self) {
        self.write_record(&Borrowed::Closed);
        self.file.send_buffer();
    }

    /// Sends records to the other thread after a step. If `idle` is set, the stepping thread may
    /// sleep now.
    pub fn settle(&mut self, now: Duration, idle: bool) {
        match idle {
            true => self.file.send_buffer(),
            false => self.file.settle(now),
        }
    }

    fn write_record(&mut self, record: &Borrowed) {
        if self.file.has_stopped() {
            return;
        }
        match encode(record, &mut self.scratch) {
            Some(()) => append(&self.scratch, &mut self.file),
            None => self.file.stop(),
        }
    }
}

/// Replaces `contents` by the contents of a record. Returns `None` without memory for them.
fn encode(record: &Borrowed, contents: &mut Vec<u8>) -> Option<()> {
    let size = postcard::experimental::serialized_size(record).ok().filter(|&size| u32::try_from(size).is_ok())?;
    contents.clear();
    contents.try_reserve(size).ok()?;
    contents.resize(size, 0);
    postcard::to_slice(record, contents).ok().map(drop)
}

/// Appends a record with place for its checksum.
fn append(contents: &[u8], to: &mut impl Write) {
    for part in [(contents.len() as u32).to_le_bytes().as_slice(), &[0; CHECKSUM], contents] {
        // A vector and a log file take all bytes. After a failure, the file has stopped.
        let _ = to.write_all(part);
    }
}

/// Writes the checksums of complete records.
fn seal(mut records: &mut [u8]) {
    while let Some((head, rest)) = records.split_first_chunk_mut::<HEAD>() {
        let len = u32::from_le_bytes(*head.first_chunk().expect("the head is longer")) as usize;
        let (contents, others) = rest.split_at_mut(len);
        head[HEAD - CHECKSUM..].copy_from_slice(&checksum(contents));
        records = others;
    }
}

pub fn checksum(bytes: &[u8]) -> [u8; CHECKSUM] {
    *Sha256::digest(bytes).first_chunk().expect("a digest is longer")
}
