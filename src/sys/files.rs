//! Files as a library must open them: a pipe, a device or a directory in a model file's place is an error, not a wait.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, Result};

/// Opens a regular file. None: there is no such file.
pub fn open(path: &Path) -> Result<Option<File>> {
    let io = |e: std::io::Error| Error::io(format!("{}: cannot be read: {e}", path.display()));
    // O_NONBLOCK: opening a pipe would otherwise wait for its writer. It means nothing for regular files.
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

/// Reads a whole file of at most `most` bytes. None: there is no such file.
pub fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = open(path)? else { return Ok(None) };
    let io = |e: std::io::Error| Error::io(format!("{}: cannot be read: {e}", path.display()));
    let len = file.metadata().map_err(io)?.len();
    let mut bytes = Vec::new();
    if len <= most {
        bytes.try_reserve_exact(len as usize + 1)?;
        // The file may have grown since its length was asked for.
        file.take(most + 1).read_to_end(&mut bytes).map_err(io)?;
    }
    let len = len.max(bytes.len() as u64);
    if len > most {
        return Err(Error::model(format!("{}: {len} bytes, and at most {most} are read: is it the right file?", path.display())));
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_an_error_at_once() {
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
