//! The start of a group: rank 0 creates the file, the others open it, and all wait for each other.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use super::SharedMemory;
use super::segment::{
    ABSENT, CREATION_LOCK, Failure, Header, JOINED, MAX_RANKS, Segment, VERSION, file_bytes, first_process, rank_lock, refuse,
};
use super::waiting::{Limits, group_error};
use crate::error::{Error, Result};
use crate::sys::file_locks::{is_locked, try_lock, unlock};
use crate::sys::files::is_at;
use crate::sys::process::{ProcessHandle, pid_namespace};

/// Time between two attempts to open the file.
const RETRY: Duration = Duration::from_millis(2);

/// A group that a rank joins.
pub struct Group<'a> {
    pub path: &'a Path,
    pub rank: usize,
    pub size: usize,
}

impl Group<'_> {
    fn check(&self) -> Result<()> {
        let (rank, size) = (self.rank, self.size);
        if !(1..=MAX_RANKS).contains(&size) {
            return Err(Error::invalid(format!("size is {size}; must be 1 to {MAX_RANKS}")));
        }
        match rank < size {
            true => Ok(()),
            false => Err(Error::invalid(format!("rank is {rank}; must be below size ({size})"))),
        }
    }

    /// Creates or opens the file, and locks the byte of this rank.
    pub fn open(&self, limits: &Limits) -> Result<Segment> {
        self.check()?;
        loop {
            let attempt = if self.rank == 0 { self.create() } else { self.open_existing() };
            if let Some(segment) = attempt.map_err(|error| error.within(self.path.display()))? {
                return Ok(segment);
            }
            if let Some(error) = limits.obstacle() {
                return Err(error);
            }
            if limits.left().is_zero() {
                let error = limits.timed_out(0).within(self.path.display());
                return Err(Error::new(error.code(), format!("{}; start all {} ranks", error.message(), self.size)));
            }
            std::thread::sleep(RETRY.min(limits.left()));
        }
    }

    fn in_use(&self) -> Error {
        Error::invalid(format!("rank {} is already in use; start each rank once, or choose another path", self.rank))
    }

    /// Creates the file. Returns `None` if another one was there, which is now removed, or if
    /// another rank 0 is creating one.
    fn create(&self) -> Result<Option<Segment>> {
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).mode(0o600).open(self.path) {
            Ok(file) => self.initialize(file),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => self.remove_stale().map(|()| None),
            Err(e) => Err(Error::io(format!("cannot be created: {e}"))),
        }
    }

    fn initialize(&self, file: File) -> Result<Option<Segment>> {
        let io = |e: std::io::Error| Error::io(format!("cannot be initialized: {e}"));
        let is_ours = try_lock(&file, CREATION_LOCK).map_err(io)? && try_lock(&file, rank_lock(0)).map_err(io)?;
        if !is_ours || !is_at(&file, self.path) {
            return Ok(None);
        }
        let descriptor = file.try_clone().map_err(io)?;
        let created = Header::write(&file, self.size).map_err(io).and_then(|()| Segment::create(file, self.size));
        if created.is_err() {
            let _ = std::fs::remove_file(self.path);
        }
        unlock(&descriptor, CREATION_LOCK);
        created.map(Some)
    }

    /// Removes the file of a rank 0 that has ended.
    fn remove_stale(&self) -> Result<()> {
        let Some(file) = self.open_file()? else { return Ok(()) };
        let io = |e: std::io::Error| Error::io(format!("cannot be replaced: {e}"));
        if !try_lock(&file, CREATION_LOCK).map_err(io)? || !is_at(&file, self.path) {
            return Ok(());
        }
        Header::read(&file)?;
        if has_first_rank(&file).map_err(io)? {
            return Err(self.in_use());
        }
        std::fs::remove_file(self.path).map_err(io)
    }

    /// Opens the file if its rank 0 lives. Returns `None` if it is not there yet.
    fn open_existing(&self) -> Result<Option<Segment>> {
        let io = |e: std::io::Error| Error::io(format!("cannot be opened: {e}"));
        let Some(file) = self.open_file()? else { return Ok(None) };
        let Some(header) = Header::read(&file)? else { return Ok(None) };
        if !has_first_rank(&file).map_err(io)? {
            return Ok(None);
        }
        if header.version != VERSION {
            refuse(&file, &header, self.rank, Failure::Version(VERSION));
            let message = format!("version {} of the format, this library has {VERSION}; use one library for all ranks", header.version);
            return Err(Error::unsupported(message));
        }
        if header.size as usize != self.size {
            refuse(&file, &header, self.rank, Failure::Size(self.size as u32));
            let message = format!("rank 0 expects {} ranks, not {}; start all ranks with the same size", header.size, self.size);
            return Err(Error::invalid(message));
        }
        if file.metadata().map_err(io)?.len() < file_bytes(self.size) as u64 {
            return Ok(None);
        }
        if !try_lock(&file, rank_lock(self.rank)).map_err(io)? {
            return Err(self.in_use());
        }
        let segment = Segment::open(file, self.size)?;
        match segment.state(self.rank).load() {
            ABSENT => Ok(Some(segment)),
            _ => Err(Error::invalid(format!("rank {} has ended; start all ranks again", self.rank))),
        }
    }

    /// Opens a regular file. Returns `None` if there is none.
    fn open_file(&self) -> Result<Option<File>> {
        let mut options = OpenOptions::new();
        // O_NONBLOCK: opening a pipe would wait.
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = match options.open(self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(format!("cannot be opened: {e}"))),
        };
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(Some(file)),
            _ => Err(Error::io("not a regular file; choose another path")),
        }
    }
}

/// Returns whether the process of rank 0 lives. Its lock alone may be that of a forked child.
fn has_first_rank(file: &File) -> std::io::Result<bool> {
    let (pid, namespace) = first_process(file);
    Ok(is_locked(file, rank_lock(0))? && !matches!(open_process(pid, namespace), Process::Ended))
}

enum Process {
    Found(ProcessHandle),
    Ended,
    /// It is in another container, or the system has no such handles.
    Unknown,
}

fn open_process(pid: u32, namespace: u32) -> Process {
    if pid == 0 || namespace == 0 || namespace != pid_namespace() {
        return Process::Unknown;
    }
    match ProcessHandle::open(pid) {
        Ok(process) if process.has_ended() => Process::Ended,
        Ok(process) => Process::Found(process),
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Process::Ended,
        Err(_) => Process::Unknown,
    }
}

impl SharedMemory {
    /// Announces this rank, and waits for all others.
    pub(super) fn meet(&mut self, limits: &Limits) -> Result<()> {
        let ranks = 0..self.segment.size();
        self.segment.set_process(self.rank, std::process::id(), pid_namespace());
        self.segment.state(self.rank).publish(JOINED);
        for rank in ranks.clone() {
            self.wait(self.segment.state(rank), rank, limits, |state| state != ABSENT)?;
        }
        for rank in ranks {
            let (pid, namespace) = self.segment.process(rank);
            let process = match open_process(pid, namespace) {
                _ if pid == std::process::id() => None,
                Process::Found(process) => Some(process),
                Process::Unknown => None,
                Process::Ended if self.segment.state(rank).load() == JOINED => {
                    return Err(group_error(format!("the process of rank {rank} has ended")));
                }
                Process::Ended => None,
            };
            self.processes.push(process);
        }
        Ok(())
    }
}
