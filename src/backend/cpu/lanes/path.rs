//! Selection of the path: kernels run in a function that is compiled with the path's CPU features.

use super::Kernel;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::types::options::Isa;

impl Isa {
    /// Returns true if the CPU supports this path.
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

    /// Returns true if kernels can use this path. Tests emulate paths that the CPU does not support.
    pub(in super::super) fn can_run(self) -> bool {
        self.is_present() || (cfg!(all(test, target_arch = "x86_64")) && Isa::Avx2.is_present())
    }

    /// Returns true if products have wide tiles: vectors have 512 bits, the path is not emulated, and
    /// this build has such tiles (build.rs).
    pub(in super::super) fn has_wide_tiles(self) -> bool {
        cfg!(wide_tiles) && matches!(self, Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16) && self.is_present()
    }

    /// # Safety
    /// `self.can_run()`, and the kernel's pointers are valid as the kernel documents.
    #[inline]
    pub(in super::super) unsafe fn run<K: Kernel>(self, kernel: K) {
        #[cfg(all(test, target_arch = "x86_64"))]
        if !self.is_present() {
            // SAFETY: a path that can run and is not present requires AVX2 only.
            return unsafe { run_emulated(self, kernel) };
        }
        // SAFETY: the path is present, so each branch's CPU features are too.
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
                _ => kernel.run::<Portable>(),
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

/// # Safety
/// AVX2 is present, and the kernel's pointers are valid as the kernel documents.
#[cfg(all(test, target_arch = "x86_64"))]
unsafe fn run_emulated<K: Kernel>(isa: Isa, kernel: K) {
    use x86::emulated;
    // SAFETY: the caller upholds the contract of these functions.
    unsafe {
        match isa {
            Isa::Avx512Bf16 if K::PAIRS => run_on_avx2::<emulated::Avx512Bf16, K>(kernel),
            Isa::Avx512Bf16 | Isa::Avx512Vnni if K::BYTES => run_on_avx2::<emulated::Avx512Vnni, K>(kernel),
            Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 => run_on_avx2::<emulated::Avx512, K>(kernel),
            Isa::AvxVnni if K::BYTES => run_on_avx2::<emulated::AvxVnni, K>(kernel),
            _ => run_avx2(kernel),
        }
    }
}

/// Runs a kernel on emulated lanes. Together in one function, they would take the compiler minutes.
#[cfg(all(test, target_arch = "x86_64"))]
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_on_avx2<L: super::Lanes, K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the emulated lane types.
    unsafe { kernel.run::<L>() }
}
