//! A counter-based random generator (Philox 4x32-10, Salmon et al., SC 2011). The number at (seed,
//! position) requires no state, so it depends neither on the batch nor on preemptions.

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let products = [MULTIPLIERS[0] * counter[0] as u64, MULTIPLIERS[1] * counter[2] as u64];
        counter = [
            (products[1] >> 32) as u32 ^ counter[1] ^ key[0],
            products[1] as u32,
            (products[0] >> 32) as u32 ^ counter[3] ^ key[1],
            products[0] as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The purpose of a random number. Numbers of different purposes are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    Token = 0,
    /// Decides whether XTC applies.
    Xtc = 1,
}

/// Returns a uniform number in [0, 1) with 53 bits, for one purpose at one position of a seed.
pub fn uniform(seed: u64, position: u64, lane: Lane) -> f64 {
    fraction(seed, position, lane) as f64 / (1u64 << 53) as f64
}

/// Returns the same number in units of 2^-53.
pub fn fraction(seed: u64, position: u64, lane: Lane) -> u64 {
    let counter = [position as u32, (position >> 32) as u32, lane as u32, 0];
    let [a, b, ..] = philox(counter, [seed as u32, (seed >> 32) as u32]);
    ((a as u64) << 32 | b as u64) >> 11
}

/// Returns the seed of sample `i`. Sample 0 uses the seed of the request.
pub fn branch_seed(seed: u64, i: usize) -> u64 {
    seed.wrapping_add((i as u64).wrapping_mul(0xA076_1D64_78BD_642F))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123 for philox4x32-10.
    #[test]
    fn the_generator_gives_the_published_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn numbers_are_uniformly_distributed() {
        for lane in [Lane::Token, Lane::Xtc] {
            let mut counts = [0; 10];
            (0..10_000).for_each(|i| counts[(uniform(7, i, lane) * 10.0) as usize] += 1);
            assert!(counts.iter().all(|n| (900..1100).contains(n)), "{counts:?}");
        }
    }

    #[test]
    fn lanes_positions_and_seeds_have_different_numbers() {
        let number = uniform(7, 3, Lane::Token);
        assert_eq!(number, uniform(7, 3, Lane::Token));
        for other in [uniform(7, 3, Lane::Xtc), uniform(7, 4, Lane::Token), uniform(8, 3, Lane::Token)] {
            assert_ne!(number, other);
        }
    }
}
