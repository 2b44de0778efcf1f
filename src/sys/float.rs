//! Protection of the results from the floating-point mode of the host: rounding direction and
//! flushing of subnormals.

/// A guard that sets round-to-nearest and keeps subnormals on this thread. Its drop restores the
/// mode of the host.
#[must_use]
pub struct StandardMode {
    saved: u64,
}

impl StandardMode {
    pub fn enter() -> StandardMode {
        let saved = read();
        write(STANDARD);
        StandardMode { saved }
    }
}

impl Drop for StandardMode {
    fn drop(&mut self) {
        write(self.saved);
    }
}

/// All exceptions masked, round to nearest, no flushing of subnormals.
#[cfg(target_arch = "x86_64")]
const STANDARD: u64 = 0x1F80;
#[cfg(not(target_arch = "x86_64"))]
const STANDARD: u64 = 0;

#[cfg(target_arch = "x86_64")]
fn read() -> u64 {
    let mut mode = 0u32;
    // SAFETY: stores the SSE control register to a local variable.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
    mode as u64
}

#[cfg(target_arch = "x86_64")]
fn write(mode: u64) {
    let mode = mode as u32;
    // SAFETY: `mode` was read from the register, or is the standard value.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> u64 {
    let mode;
    // SAFETY: reads the floating-point control register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack, preserves_flags)) };
    mode
}

#[cfg(target_arch = "aarch64")]
fn write(mode: u64) {
    // SAFETY: `mode` was read from the register, or is the standard value.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nomem, nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn read() -> u64 {
    0
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn write(_: u64) {}

/// Runs `body` with rounding towards infinity, as on a thread whose host has set it.
#[cfg(all(test, target_arch = "x86_64"))]
pub fn rounding_up<T>(body: impl FnOnce() -> T) -> T {
    struct Restore(u64);
    impl Drop for Restore {
        fn drop(&mut self) {
            write(self.0);
        }
    }
    let _restore = Restore(read());
    write(STANDARD | 0x4000);
    body()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_float_mode_of_the_host_is_replaced_and_restored() {
        const FLUSH_AND_ROUND_UP: u64 = 0x1F80 | 0x8040 | 0x4000;
        let before = read();
        write(FLUSH_AND_ROUND_UP);
        let inside = {
            let _mode = StandardMode::enter();
            read()
        };
        let after = read();
        write(before);
        assert_eq!((inside & 0xFFC0, after & 0xFFC0), (0x1F80, FLUSH_AND_ROUND_UP & 0xFFC0));
    }
}
