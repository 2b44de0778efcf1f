//! Numbers as bytes in the order of this machine.

/// A number of which every pattern of bits is valid.
pub trait Plain: Copy + private::Sealed {}

impl Plain for f32 {}
impl Plain for u32 {}
impl Plain for u64 {}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// Returns the bytes of the numbers.
pub fn as_bytes<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: every byte of a plain number is initialized, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Returns the bytes of the numbers, to be written.
pub fn as_bytes_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every pattern of bits is a valid number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
