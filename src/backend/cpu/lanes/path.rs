//! Selection of the path: kernels run in a function that is compiled with the path's CPU features.

use super::Kernel;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::types::options::Isa;

impl Isa {
    pub fn is_present(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_present() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_present() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512Vnni.is_present() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_present()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Returns the widest path that the CPU supports.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.is_present()).unwrap_or(Isa::Portable)
    }

    /// Returns true if vectors have 512 bits.
    pub(in super::super) fn is_512(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16)
    }

    /// # Safety
    /// `self.is_present()`, and the kernel's pointers are valid as the kernel documents.
    #[inline]
    pub(in super::super) unsafe fn run<K: Kernel>(self, kernel: K) {
        // SAFETY: the caller guarantees that `self` is present, so each branch's CPU features are
        // too.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 if K::PAIRS => run_avx512_bf16(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512Vnni if K::BYTES => run_avx512_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 => run_avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni if K::BYTES => run_avx_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni | Isa::Avx2 => run_avx2(kernel),
                _ => kernel.run::<Portable<false>>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx512Bf16>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512_vnni<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx512Vnni>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
unsafe fn run_avx_vnni<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::AvxVnni>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx2>() }
}
