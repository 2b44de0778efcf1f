//! Locks on single bytes of a file. A lock belongs to an open file description: the system releases
//! it when the last descriptor is closed, at the latest when the process ends. Descriptors of
//! forked children count, until the children close them, run another program or end.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

fn call(file: &File, command: libc::c_int, kind: libc::c_int, byte: u64) -> io::Result<libc::flock> {
    // SAFETY: plain data, for which zeros are valid.
    let mut lock = unsafe { std::mem::zeroed::<libc::flock>() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = byte as _;
    lock.l_len = 1;
    // SAFETY: an open descriptor and an initialized lock.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock),
    }
}

/// Locks a byte. Returns false if it is locked by another open file description.
pub fn try_lock(file: &File, byte: u64) -> io::Result<bool> {
    match call(file, libc::F_OFD_SETLK, libc::F_WRLCK, byte) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Releases the lock of a byte, also if forked children have the descriptor.
pub fn unlock(file: &File, byte: u64) {
    // An error leaves the lock to the end of the process.
    let _ = call(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte);
}

/// Returns whether another open file description has locked a byte.
pub fn is_locked(file: &File, byte: u64) -> io::Result<bool> {
    Ok(call(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte)?.l_type as libc::c_int != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_has_one_owner_until_it_is_unlocked_or_closed() {
        let path = std::env::temp_dir().join(format!("pagedllm-locks-{}", std::process::id()));
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (one, two) = (open(), open());
        assert!(try_lock(&one, 5).unwrap() && try_lock(&two, 6).unwrap());
        assert!(!try_lock(&two, 5).unwrap() && is_locked(&two, 5).unwrap() && !is_locked(&one, 5).unwrap());
        let child = one.try_clone().unwrap();
        unlock(&one, 5);
        assert!(!is_locked(&two, 5).unwrap());
        drop(two);
        assert!(!is_locked(&one, 6).unwrap());
        drop(child);
        std::fs::remove_file(&path).unwrap();
    }
}
