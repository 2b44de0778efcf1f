//! Current speed of the machine: bytes read from memory and arithmetic operations, per second.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use pagedllm::types::options::{Isa, WeightFormat};

/// Multiply-adds in flight: enough to hide their latency on two pipes, few enough for 16 registers.
const CHAINS: usize = 12;
const PASSES: usize = 3;

/// A buffer larger than any cache, in huge pages if the system has them.
pub struct Memory {
    words: Vec<u64>,
    threads: usize,
}

impl Memory {
    pub fn new(bytes: usize, threads: usize) -> Memory {
        let mut words: Vec<u64> = Vec::with_capacity(bytes / 8);
        advise_huge_pages(words.as_mut_ptr().cast(), bytes);
        words.resize(bytes / 8, 1);
        Memory { words, threads }
    }

    pub fn bytes(&self) -> usize {
        8 * self.words.len()
    }

    /// Bytes per second: the best of several passes of all threads together.
    pub fn bandwidth(&self) -> f64 {
        let part = self.words.len() / self.threads;
        let pass = |thread: usize| read(&self.words[thread * part..][..part]);
        let seconds = (0..PASSES).map(|_| run_on_threads(self.threads, pass));
        (part * self.threads * 8) as f64 / seconds.fold(f64::INFINITY, f64::min)
    }
}

/// Touches and frees memory. A hypervisor may back memory only at the first touch, at a twentieth
/// of the normal speed, and reclaim it after some seconds. That cost must not count as the
/// engine's.
pub fn touch_memory(bytes: usize, threads: usize) {
    black_box(Memory::new(bytes, threads));
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(start: *mut u8, bytes: usize) {
    let first = start.align_offset(4096);
    // SAFETY: the range is whole pages inside the buffer. The call is a hint, and its failure is
    // harmless.
    unsafe { libc::madvise(start.add(first).cast(), (bytes - first) / 4096 * 4096, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_start: *mut u8, _bytes: usize) {}

/// Seconds from a common start until the last of `threads` has finished.
fn run_on_threads(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let timed = |thread: usize| {
        barrier.wait();
        let start = Instant::now();
        work(thread);
        start.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
        let first = timed(0);
        others.into_iter().map(|other| other.join().expect("a probe does not panic")).fold(first, f64::max)
    })
}

/// Reads every byte. Two streams use more memory channels than one, and wide loads keep more cache
/// lines in flight than narrow ones.
fn read(words: &[u64]) {
    let (low, high) = words.split_at(words.len() / 2);
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512.is_present() {
        // SAFETY: the features are present.
        return unsafe { x86::read_512(low, high) };
    } else if Isa::Avx2.is_present() {
        // SAFETY: the features are present.
        return unsafe { x86::read_256(low, high) };
    }
    let sum = |words: &[u64; 32], sums: &mut [u64; 32]| sums.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= word);
    let mut sums = [0u64; 32];
    for (low, high) in low.as_chunks::<32>().0.iter().zip(high.as_chunks::<32>().0) {
        sum(low, &mut sums);
        sum(high, &mut sums);
    }
    black_box(sums);
}

/// Operations per second of all threads together, with the instruction of this path for weights of
/// this format. A multiply-add counts as two.
pub fn arithmetic(isa: Isa, format: WeightFormat, threads: usize) -> f64 {
    const ROUNDS: u64 = 20_000_000;
    let whole = format.is_whole();
    let (lanes, run): (usize, unsafe fn(u64)) = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if format == WeightFormat::Bf16 => (32, x86::multiply_add_pairs),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512Vnni if whole => (64, x86::multiply_add_bytes_512),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni if whole => (32, x86::multiply_add_bytes_256),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if whole => (32, x86::multiply_add_words_512),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if whole => (16, x86::multiply_add_words_256),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 => (16, x86::multiply_add_512),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni | Isa::Avx2 => (8, x86::multiply_add_256),
        _ => (4, multiply_then_add),
    };
    // SAFETY: `Options::parse` has checked that this machine supports the path.
    let pass = |_| unsafe { run(ROUNDS) };
    let seconds = (0..3 * PASSES).map(|_| run_on_threads(threads, pass)).fold(f64::INFINITY, f64::min);
    (ROUNDS as usize * CHAINS * lanes * 2 * threads) as f64 / seconds
}

/// The operations of the portable kernels: baseline vectors, and rounding after each operation.
fn multiply_then_add(rounds: u64) {
    let (factor, summand) = black_box((0.999f32, 0.001f32));
    let mut sums = [0.0f32; 4 * CHAINS];
    for _ in 0..rounds {
        sums.iter_mut().for_each(|sum| *sum = *sum * factor + summand);
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::CHAINS;

    macro_rules! read {
        ($name:ident, $features:literal, $vectors:literal, $zero:ident, $load:ident, $xor:ident) => {
            /// Reads 32 words as the given number of vectors.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(low: &[u64], high: &[u64]) {
                let mut sums = [$zero(); $vectors];
                for (low, high) in low.as_chunks::<32>().0.iter().zip(high.as_chunks::<32>().0) {
                    for words in [low, high] {
                        for (i, sum) in sums.iter_mut().enumerate() {
                            // SAFETY: the last vector ends at the end of the 32 words.
                            *sum = $xor(*sum, unsafe { $load(words.as_ptr().add(32 / $vectors * i).cast()) });
                        }
                    }
                }
                black_box(sums);
            }
        };
    }

    read!(read_512, "avx512f", 4, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_xor_si512);
    read!(read_256, "avx2", 8, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_xor_si256);

    macro_rules! multiply_add {
        ($name:ident, $features:literal, $set1:ident, $fma:ident) => {
            #[target_feature(enable = $features)]
            pub unsafe fn $name(rounds: u64) {
                let (factor, summand) = black_box(($set1(0.999), $set1(0.001)));
                let mut sums = [$set1(0.0); CHAINS];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = $fma(*sum, factor, summand);
                    }
                }
                black_box(sums);
            }
        };
    }

    /// Two products per lane.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn multiply_add_pairs(rounds: u64) {
        // SAFETY: every bit pattern is a bf16 number; these are small.
        let pairs = |x: f32| unsafe { std::mem::transmute::<__m512, __m512bh>(_mm512_set1_ps(x)) };
        let (a, b) = black_box((pairs(0.5), pairs(0.25)));
        let mut sums = [_mm512_set1_ps(0.0); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    macro_rules! multiply_add_bytes {
        ($name:ident, $features:literal, $set1:ident, $dot:ident) => {
            /// Four products per lane.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(rounds: u64) {
                let (a, b) = black_box(($set1(0x0201_0302), $set1(0x0102_0301)));
                let mut sums = [$set1(0); CHAINS];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = $dot(*sum, a, b);
                    }
                }
                black_box(sums);
            }
        };
    }

    macro_rules! multiply_add_words {
        ($name:ident, $features:literal, $set1:ident, $madd:ident, $add:ident) => {
            /// Two products of 16-bit integers per lane; the addition is a separate instruction.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(rounds: u64) {
                let factor = black_box($set1(0x0001_0002));
                let mut sums = [$set1(0x0003_0001); CHAINS];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        // A product of the sum itself: the compiler would compute a constant
                        // product once.
                        *sum = $add(*sum, $madd(*sum, factor));
                    }
                }
                black_box(sums);
            }
        };
    }

    multiply_add_words!(multiply_add_words_512, "avx512f,avx512bw", _mm512_set1_epi32, _mm512_madd_epi16, _mm512_add_epi32);
    multiply_add_words!(multiply_add_words_256, "avx2", _mm256_set1_epi32, _mm256_madd_epi16, _mm256_add_epi32);
    multiply_add_bytes!(multiply_add_bytes_512, "avx512f,avx512vnni", _mm512_set1_epi32, _mm512_dpbusd_epi32);
    multiply_add_bytes!(multiply_add_bytes_256, "avx2,avxvnni", _mm256_set1_epi32, _mm256_dpbusd_avx_epi32);
    multiply_add!(multiply_add_512, "avx512f", _mm512_set1_ps, _mm512_fmadd_ps);
    multiply_add!(multiply_add_256, "avx2,fma", _mm256_set1_ps, _mm256_fmadd_ps);
}
