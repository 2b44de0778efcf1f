//! File access for a library: a pipe, a device or a directory in place of a file is an error and
//! never blocks.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Opens a regular file. Returns `None` if it does not exist.
pub fn open(path: &Path) -> Result<Option<File>> {
    let io = |e: std::io::Error| Error::io(format!("{}: cannot be read: {e}", path.display()));
    // O_NONBLOCK: without it, opening a pipe would wait for its writer. Regular files ignore it.
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    if !file.metadata().map_err(io)?.is_file() {
        return Err(Error::io(format!("{}: not a regular file", path.display())));
    }
    Ok(Some(file))
}

/// Returns the files of a directory with an extension, sorted by name. A missing directory has
/// none.
///
/// # Errors
/// The directory cannot be read, or has more than `MAX_LISTED` such files.
pub fn with_extension(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    const MAX_LISTED: usize = 256;
    let io = |e: std::io::Error| Error::io(format!("{}: cannot be read: {e}", dir.display()));
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(e) => return Err(io(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
        if found.len() > MAX_LISTED {
            let message = format!("{}: too many .{extension} files (at most {MAX_LISTED}); remove some", dir.display());
            return Err(Error::model(message));
        }
    }
    found.sort();
    Ok(found)
}

/// Creates an unlinked file of `bytes` in `dir`. No other process can open it, and it disappears
/// when it is closed. Disk space is allocated when the file is written.
pub fn nameless(dir: &Path, bytes: u64) -> Result<File> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let io = |e: std::io::Error| Error::io(format!("{}: cannot create a file of {bytes} bytes: {e}", dir.display()));
    within_limit(bytes)?;
    let name = format!(".pagedllm-swap-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let path = dir.join(name);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path).map_err(io)?;
    std::fs::remove_file(&path).map_err(io)?;
    file.set_len(bytes).map_err(io)?;
    Ok(file)
}

/// Creates a file of `bytes` bytes in memory. Memory is allocated when the file is written.
pub fn in_memory(bytes: u64) -> Result<File> {
    let io = |e: std::io::Error| Error::io(format!("cannot create a file of {bytes} bytes in memory: {e}"));
    within_limit(bytes)?;
    // SAFETY: the name is a string with its end, and no other object has the new descriptor.
    let file = unsafe {
        match libc::memfd_create(c"pagedllm".as_ptr(), libc::MFD_CLOEXEC) {
            -1 => return Err(io(std::io::Error::last_os_error())),
            descriptor => File::from_raw_fd(descriptor),
        }
    };
    file.set_len(bytes).map_err(io)?;
    Ok(file)
}

/// Creates or truncates a file with mode 0600. A pipe is rejected, since a write to it could block
/// or raise SIGPIPE.
pub fn create(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.file_type().is_fifo() {
        false => Ok(file),
        true => Err(std::io::Error::other("is a pipe")),
    }
}

/// Creates or truncates a file with mode 0600 and locks it against other calls of this function.
/// The contents that a killed process left there are discarded.
pub fn create_locked(path: &Path) -> Result<File> {
    let io = |what: &str| Error::io(format!("{}: cannot be written: {what}", path.display()));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
    let file = options.open(path).map_err(|e| io(&e.to_string()))?;
    if !file.metadata().map_err(|e| io(&e.to_string()))?.is_file() {
        return Err(io("not a regular file"));
    }
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(io("another engine is writing it")),
        Err(TryLockError::Error(e)) => return Err(io(&e.to_string())),
    }
    // The previous owner of the lock may have renamed the file. Readers may then use it under the
    // new name.
    if !is_at(&file, path) {
        return Err(io("another engine has replaced it"));
    }
    file.set_len(0).map_err(|e| io(&e.to_string()))?;
    Ok(file)
}

/// Returns whether `path` refers to this file.
pub fn is_at(file: &File, path: &Path) -> bool {
    let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let (file, there) = (file.metadata().map(place), std::fs::symlink_metadata(path).map(place));
    matches!((file, there), (Ok(file), Ok(there)) if file == there)
}

/// Appends all bytes to a file of length `len`.
pub fn append(file: &mut File, len: u64, bytes: &[u8]) -> Result<()> {
    within_limit(len + bytes.len() as u64)?;
    file.write_all(bytes).map_err(|e| Error::io(format!("cannot be written: {e}")))
}

/// Allocates space for a range of a file, so that no access to its mapping can fail.
pub fn reserve(file: &File, offset: u64, len: u64) -> Result<()> {
    within_limit(offset + len)?;
    loop {
        // SAFETY: a call without pointers.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t) } {
            0 => return Ok(()),
            libc::EINTR => {}
            code => {
                let reason = std::io::Error::from_raw_os_error(code);
                return Err(Error::capacity(format!("cannot allocate {len} bytes: {reason}; free space of the file system")));
            }
        }
    }
}

/// Changes the length of a file. The new bytes are zeros without space of their own.
pub fn set_len(file: &File, len: u64) -> Result<()> {
    within_limit(len)?;
    file.set_len(len).map_err(|e| Error::io(format!("cannot extend to {len} bytes: {e}")))
}

/// Checks the file size limit of the process. A write beyond it raises SIGXFSZ, which kills the
/// process.
fn within_limit(bytes: u64) -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is an initialized local struct.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
    if known && limit.rlim_cur != libc::RLIM_INFINITY && bytes > limit.rlim_cur {
        let limit = limit.rlim_cur;
        return Err(Error::capacity(format!(
            "file too large for this process ({bytes} bytes, RLIMIT_FSIZE {limit}); raise the limit or use a smaller file"
        )));
    }
    Ok(())
}

/// Reads a whole file of at most `max_bytes` bytes. Returns `None` if it does not exist.
pub fn read(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = open(path)? else { return Ok(None) };
    let io = |e: std::io::Error| Error::io(format!("{}: cannot be read: {e}", path.display()));
    let len = file.metadata().map_err(io)?.len();
    let mut bytes = Vec::new();
    if len <= max_bytes {
        bytes.try_reserve_exact(len as usize + 1)?;
        // The file may have grown since its length was read.
        file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(io)?;
    }
    let len = len.max(bytes.len() as u64);
    if len > max_bytes {
        return Err(Error::model(format!("{}: file too large ({len} bytes, limit {max_bytes})", path.display())));
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nameless_file_is_writable_and_leaves_no_file() {
        use std::os::unix::fs::FileExt;
        let dir = std::env::temp_dir().join(format!("pagedllm-nameless-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let file = nameless(&dir, 100).unwrap();
        file.write_all_at(&[7; 10], 90).unwrap();
        let (mut read, left) = ([0; 11], std::fs::read_dir(&dir).unwrap().count());
        file.read_exact_at(&mut read, 89).unwrap();
        std::fs::remove_dir(&dir).unwrap();
        assert_eq!((read, left), ([0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7], 0));
    }

    #[test]
    fn a_nameless_file_in_an_unsuitable_directory_is_refused() {
        for dir in ["/nonexistent", "/dev/null", "/proc"] {
            assert!(nameless(Path::new(dir), 100).unwrap_err().message().contains(": cannot create a file of 100 bytes: "), "{dir}");
        }
        assert!(nameless(&std::env::temp_dir(), 1 << 63).is_err());
    }

    #[test]
    fn a_path_that_is_not_a_regular_file_is_an_immediate_error() {
        assert_eq!(open(Path::new("/nonexistent")).unwrap().map(|_| ()), None);
        for path in ["/dev/null", "/"] {
            assert!(open(Path::new(path)).unwrap_err().message().contains("not a regular file"));
        }
        let pipe = std::env::temp_dir().join(format!("pagedllm-pipe-{}", std::process::id()));
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let opened = open(&pipe).map(|_| ());
        std::fs::remove_file(&pipe).unwrap();
        assert!(opened.unwrap_err().message().contains("not a regular file"));
    }
}
