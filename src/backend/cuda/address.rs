//! Addresses on the device.

/// An address on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    pub const NULL: Address = Address(0);

    pub fn at(self, bytes: u64) -> Address {
        Address(self.0 + bytes)
    }
}
