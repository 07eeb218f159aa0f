//! Well-mixed numbers: the core draws no random ones, but must spread things and rank them alike everywhere.

/// A well-mixed function of `x` (the finaliser of splitmix64).
pub(crate) const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A well-mixed function of `bytes`, the same on every machine and in every version: members of mixed
/// versions must rank each other alike. Not for bytes that somebody wants to collide.
#[must_use]
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(mix(bytes.len() as u64), |state, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(state ^ u64::from_le_bytes(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changing the function would let members of mixed versions disagree for as long as both run.
    #[test]
    fn the_function_is_what_it_always_was() {
        assert_eq!(mix(1), 0x910a_2dec_8902_5cc1);
        assert_eq!(hash(b""), mix(0));
        assert_eq!(hash(b"holdfast-0"), 0x9f24_257f_d4bf_78f7);
    }

    #[test]
    fn one_bit_changes_about_half_of_them() {
        let ones: u32 = (0..64).map(|bit| (mix(7) ^ mix(7 ^ (1 << bit))).count_ones()).sum();
        assert!((64 * 26..64 * 38).contains(&ones), "{ones}");
        assert_ne!(hash(b"a"), hash(b"a\0"));
    }
}
