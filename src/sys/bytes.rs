//! Numbers as bytes in the order of this machine.

/// Returns the bytes of the numbers.
pub fn as_bytes(numbers: &[f32]) -> &[u8] {
    // SAFETY: every byte of an f32 is initialized, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Returns the bytes of the numbers, to be written.
pub fn as_bytes_mut(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above, and every pattern of bits is a valid f32.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
