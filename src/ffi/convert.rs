//! Checked conversion of structs, arrays and strings of the host.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;

use crate::error::{Error, Result, try_concat};

/// Length value that marks a string as NUL-terminated.
pub const PLLM_NUL_TERMINATED: u64 = u64::MAX;

/// A struct whose first field is `uint64_t struct_size`.
///
/// # Safety
/// `repr(C)`, no padding, first field u64, and every bit pattern is a value.
pub unsafe trait Versioned: Copy {
    const NAME: &'static str;
    /// Size of the struct in its first release. Programs cannot have a smaller one. Never changes.
    const FIRST_SIZE: usize;
    /// Returns the defaults, with `struct_size` set.
    fn defaults() -> Self;
}

/// Maximum size of an array. A larger size is a defect of the caller, such as a negative length,
/// and would cause an invalid access.
const MAX_ARRAY_BYTES: u64 = 1 << 40;

/// Upper bound for the size of a struct in all versions.
const MAX_BYTES: u64 = 1 << 16;

fn check_size<T: Versioned>(size: u64) -> Result<usize> {
    // Structs grow by whole words, so other sizes are invalid.
    if !(T::FIRST_SIZE as u64..=MAX_BYTES).contains(&size) || !size.is_multiple_of(8) {
        return Err(Error::invalid(format!(
            "{}.struct_size is {size}; set it to sizeof({}), which is {} in this library",
            T::NAME,
            T::NAME,
            size_of::<T>()
        )));
    }
    Ok(size as usize)
}

/// Reads a struct of an older, the same or a newer version.
///
/// # Safety
/// `from` is NULL or points to `struct_size` readable bytes.
pub unsafe fn read<T: Versioned>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Err(Error::invalid(format!("{} is NULL", T::NAME)));
    }
    let from = from.cast::<u8>();
    // SAFETY: the caller's contract; at least the size itself is readable.
    let size = check_size::<T>(unsafe { from.cast::<u64>().read_unaligned() })?;
    // SAFETY: as above.
    let bytes = unsafe { std::slice::from_raw_parts(from, size) };
    let (known, unknown) = bytes.split_at(size.min(size_of::<T>()));
    if unknown.iter().any(|&byte| byte != 0) {
        return Err(Error::unsupported(format!(
            "{} has {size} bytes, this library knows {} of them and the others are not zero; use a newer library or clear them",
            T::NAME,
            size_of::<T>()
        )));
    }
    let mut value = T::defaults();
    // SAFETY: `known` is at most as long as T, of which every bit pattern is a value.
    unsafe { std::ptr::copy_nonoverlapping(known.as_ptr(), (&raw mut value).cast(), known.len()) };
    Ok(value)
}

/// Writes a struct within the size that the caller declares. Fields unknown to this library become
/// zero.
///
/// # Safety
/// `to` is NULL or points to `struct_size` writable bytes.
pub unsafe fn write<T: Versioned>(to: *mut T, value: &T) -> Result<()> {
    // SAFETY: the caller's contract.
    let size = unsafe { out_size(to) }?;
    let known = size.min(size_of::<T>());
    let to = to.cast::<u8>();
    // SAFETY: `size` bytes are writable; the first 8 hold the caller's size and stay.
    unsafe {
        std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>().add(8), to.add(8), known - 8);
        to.add(known).write_bytes(0, size - known);
    }
    Ok(())
}

/// Returns the declared size of an output struct. Call it before the work is done.
///
/// # Safety
/// `to` is NULL or points to `struct_size` readable bytes.
pub unsafe fn out_size<T: Versioned>(to: *const T) -> Result<usize> {
    if to.is_null() {
        return Err(Error::invalid(format!("{} to be written is NULL", T::NAME)));
    }
    // SAFETY: the caller's contract.
    check_size::<T>(unsafe { to.cast::<u64>().read_unaligned() })
}

/// Writes the defaults within `size` bytes. An invalid size is stored in the struct, so that the
/// next call with the struct refuses it.
///
/// # Safety
/// `to` is NULL or points to `size` writable bytes.
pub unsafe fn init<T: Versioned>(to: *mut T, size: u64) {
    if to.is_null() || size < size_of::<u64>() as u64 {
        return;
    }
    // SAFETY: `size` bytes are writable; the size goes first, so that `write` finds it.
    unsafe {
        to.cast::<u64>().write_unaligned(size);
        let _ = write(to, &T::defaults());
    }
}

/// Returns the address of a slice, or NULL if the slice is empty: some languages refuse the
/// dangling pointer of Rust.
pub fn start<T>(slice: &[T]) -> *const T {
    if slice.is_empty() { std::ptr::null() } else { slice.as_ptr() }
}

/// # Safety
/// `data` is NULL or points to `len` readable elements that outlive `'a`.
pub unsafe fn slice<'a, T>(name: &str, data: *const T, len: u64) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(Error::invalid(format!("{name} is NULL and its length is {len}")));
    }
    let most = MAX_ARRAY_BYTES / size_of::<T>() as u64;
    if len > most || !data.is_aligned() {
        return Err(Error::invalid(format!("{name} is not a valid array (length {len}, address {data:?})")));
    }
    // SAFETY: the caller's contract; length and alignment are possible.
    Ok(unsafe { std::slice::from_raw_parts(data, len as usize) })
}

/// # Safety
/// `data` is NULL or points to `len` readable bytes, or with `PLLM_NUL_TERMINATED` to a
/// NUL-terminated string. It is valid for `'a`.
pub unsafe fn string<'a>(name: &str, data: *const c_char, len: u64) -> Result<&'a str> {
    let bytes = match len {
        PLLM_NUL_TERMINATED if data.is_null() => return Err(Error::invalid(format!("{name} is NULL"))),
        // SAFETY: the caller's contract.
        PLLM_NUL_TERMINATED => unsafe { CStr::from_ptr(data) }.to_bytes(),
        // SAFETY: the caller's contract.
        _ => unsafe { slice(name, data.cast::<u8>(), len) }?,
    };
    std::str::from_utf8(bytes).map_err(|e| Error::invalid(format!("{name} is not UTF-8: byte {} of {}", e.valid_up_to(), bytes.len())))
}

/// # Safety
/// The arrays have `count` readable elements, and the strings are readable. If `lens` is NULL, the
/// strings are NUL-terminated.
pub unsafe fn strings(name: &str, data: *const *const c_char, lens: *const u64, count: u64) -> Result<Vec<String>> {
    // SAFETY: the caller's contract.
    let strings = unsafe { slice(name, data, count) }?;
    // SAFETY: the caller's contract.
    let lens: &[u64] = if lens.is_null() { &[] } else { unsafe { slice(name, lens, count) }? };
    let mut copies = Vec::new();
    copies.try_reserve_exact(strings.len())?;
    for (i, &data) in strings.iter().enumerate() {
        let len = lens.get(i).copied().unwrap_or(PLLM_NUL_TERMINATED);
        // SAFETY: the caller's contract.
        copies.push(try_concat(&[unsafe { string(name, data, len) }?])?);
    }
    Ok(copies)
}

/// # Safety
/// `pointer` is NULL or points to a live T that outlives `'a`.
pub unsafe fn borrow<'a, T>(name: &str, pointer: *const T) -> Result<&'a T> {
    // SAFETY: the caller's contract.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::invalid(format!("{name} is NULL")))
}

/// Checks the pointer to an output before the work is done.
pub fn not_null<T>(name: &str, out: *mut T) -> Result<*mut T> {
    if out.is_null() { Err(Error::invalid(format!("{name} is NULL"))) } else { Ok(out) }
}

/// Returns a string. NULL: none.
/// # Safety
/// As `string`.
pub unsafe fn optional<'a>(name: &str, data: *const c_char, len: u64) -> Result<Option<&'a str>> {
    // SAFETY: the caller's contract.
    if data.is_null() { Ok(None) } else { Ok(Some(unsafe { string(name, data, len) }?)) }
}

/// Returns a path. NULL: none.
/// # Safety
/// As `string`.
pub unsafe fn path(name: &str, data: *const c_char, len: u64) -> Result<Option<PathBuf>> {
    if data.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    match unsafe { string(name, data, len) }? {
        "" => Err(Error::invalid(format!("{name} is empty; set a path or NULL"))),
        path => Ok(Some(path.into())),
    }
}

/// 0 lets the library choose.
pub fn some(value: u32) -> Option<usize> {
    (value > 0).then_some(value as usize)
}

/// 0 is no limit.
pub fn limit(value: u64) -> Option<usize> {
    (value > 0).then_some(usize::try_from(value).unwrap_or(usize::MAX))
}

/// Refuses flags that this library does not know.
pub fn known_flags(name: &str, flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::unsupported(format!(
            "{name} has bits {unknown:#x} that this library does not support; clear them or use a newer library"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    /// A struct whose last field was added in a later version.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct TestStruct {
        struct_size: u64,
        old: u64,
        new: u64,
    }

    // SAFETY: repr(C), u64 only.
    unsafe impl Versioned for TestStruct {
        const NAME: &'static str = "test_struct";
        const FIRST_SIZE: usize = 16;
        fn defaults() -> Self {
            TestStruct { struct_size: 24, old: 1, new: 2 }
        }
    }

    fn read_words(words: &[u64]) -> Result<TestStruct> {
        // SAFETY: the first word is the number of bytes, or a size that is refused.
        unsafe { read(words.as_ptr().cast::<TestStruct>()) }
    }

    #[test]
    fn an_older_struct_gets_defaults_for_missing_fields() {
        assert_eq!(read_words(&[16, 7]).unwrap(), TestStruct { struct_size: 16, old: 7, new: 2 });
        assert_eq!(read_words(&[24, 7, 8]).unwrap().new, 8);
    }

    #[test]
    fn a_newer_struct_is_read_if_its_unknown_fields_are_zero() {
        assert_eq!(read_words(&[40, 7, 8, 0, 0]).unwrap().new, 8);
        assert_eq!(read_words(&[40, 7, 8, 0, 1]).unwrap_err().code(), Code::Unsupported);
    }

    #[test]
    fn a_struct_size_of_no_version_is_refused() {
        for size in [0, 7, 8, 12, 17, 20, 1 << 20, u64::MAX] {
            assert_eq!(read_words(&[size, 0, 0, 0]).unwrap_err().code(), Code::InvalidArgument, "{size}");
        }
    }

    #[test]
    fn out_structs_are_written_within_the_given_size_and_unknown_fields_are_zeroed() {
        for words in [2, 3, 5] {
            let mut out = [99u64; 6];
            out[0] = 8 * words as u64;
            // SAFETY: the array is larger than the given size.
            unsafe { write(out.as_mut_ptr().cast(), &TestStruct { struct_size: 24, old: 3, new: 4 }) }.unwrap();
            let expected = [8 * words as u64, 3, 4, 0, 0];
            assert_eq!((&out[..words], out[words]), (&expected[..words], 99));
        }
    }
}
