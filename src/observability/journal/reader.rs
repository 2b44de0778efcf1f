//! The reader of a journal.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use serde_json::Value;

use super::records::{Header, MAGIC, Record, RecordedCommand, RecordedEnd, Step, VERSION};
use super::writer::{CHECKSUM, checksum};
use crate::error::{Error, Result};
use crate::sys::files;
use crate::types::kv_store::LookupProgress;

/// An open journal.
pub struct JournalFile {
    pub header: Header,
    file: BufReader<File>,
    /// Number of bytes read.
    read: u64,
    ending: Option<Ending>,
}

/// The end of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The engine was freed.
    Closed,
    /// The last record is complete, but the engine was not freed: the process was killed, or the
    /// disk has failed.
    Open,
    /// Only `bytes` bytes are readable. The rest is damaged or truncated.
    Torn { bytes: u64 },
}

/// A step, with the commands before it and the sequences that ended in it.
#[derive(Default)]
pub struct Recorded {
    pub commands: Vec<RecordedCommand<'static>>,
    pub ended: Vec<RecordedEnd>,
    /// The blocks that a KV store had returned.
    pub lookups: Vec<LookupProgress>,
    pub step: Step,
}

impl JournalFile {
    pub fn open(path: &Path) -> Result<JournalFile> {
        let there = files::open(path)?;
        let file = there.ok_or_else(|| Error::io(format!("{}: no such file", path.display())))?;
        JournalFile::begin(BufReader::new(file)).map_err(|error| error.within(path.display()))
    }

    fn begin(mut file: BufReader<File>) -> Result<JournalFile> {
        let damaged = || Error::invalid("not a journal, or its start is damaged");
        let mut start = [0; MAGIC.len() + 4];
        file.read_exact(&mut start).map_err(|_| damaged())?;
        let version =
            start.strip_prefix(MAGIC).and_then(|version| Some(u32::from_le_bytes(version.try_into().ok()?))).ok_or_else(damaged)?;
        let (header, bytes) = frame(&mut file).ok_or_else(damaged)?;
        if version != VERSION {
            let library = serde_json::from_slice::<Value>(&header).ok().and_then(|header| Some(header["library"].as_str()?.to_string()));
            return Err(Error::unsupported(format!(
                "journal of another release (format {version}, library {} reads {VERSION}); replay it with release {}, which wrote it",
                env!("CARGO_PKG_VERSION"),
                library.unwrap_or_else(|| "unknown".into())
            )));
        }
        let header = serde_json::from_slice(&header).map_err(|e| Error::invalid(format!("the journal's header is damaged: {e}")))?;
        Ok(JournalFile { header, file, read: start.len() as u64 + bytes, ending: None })
    }

    /// Returns the next step. `None` if there is no further complete one.
    pub fn next_step(&mut self) -> Option<Recorded> {
        let mut recorded = Recorded::default();
        while self.ending.is_none() {
            match self.record() {
                Ok(Record::Command(command)) => recorded.commands.push(command),
                Ok(Record::End(ended)) => recorded.ended.push(ended),
                Ok(Record::Lookup(lookup)) => recorded.lookups.push(lookup),
                Ok(Record::Step(step)) => return Some(Recorded { step: *step, ..recorded }),
                Ok(Record::Closed) => self.ending = Some(Ending::Closed),
                Err(ending) => self.ending = Some(ending),
            }
        }
        None
    }

    /// Returns the end of the journal. `None` if it has not been reached.
    pub fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }

    fn record(&mut self) -> std::result::Result<Record, Ending> {
        let at_end = |file: &mut BufReader<File>| std::io::BufRead::fill_buf(file).is_ok_and(|rest| rest.is_empty());
        if at_end(&mut self.file) {
            return Err(Ending::Open);
        }
        let torn = Ending::Torn { bytes: self.read };
        let (payload, bytes) = frame(&mut self.file).ok_or_else(|| torn.clone())?;
        let record = postcard::from_bytes(&payload).map_err(|_| torn)?;
        self.read += bytes;
        Ok(record)
    }
}

/// Reads one record. Returns its contents and its size in bytes. `None` if it is incomplete or
/// damaged.
fn frame(file: &mut BufReader<File>) -> Option<(Vec<u8>, u64)> {
    let mut start = [0; 4 + CHECKSUM];
    file.read_exact(&mut start).ok()?;
    let (len, sum) = start.split_first_chunk::<4>()?;
    let len = u32::from_le_bytes(*len) as u64;
    let mut payload = Vec::new();
    // `take` limits the read to the existing bytes, so a damaged length causes no large allocation.
    file.take(len).read_to_end(&mut payload).ok()?;
    (payload.len() as u64 == len && checksum(&payload) == *sum).then_some((payload, start.len() as u64 + len))
}
