/* Packing of a row at every level. Included after the definitions of PREFETCH_BYTES and INLINE, and
 * before the two functions that depend on the level. */

enum {
    STEP = 64,      /* values at a time: one vector of AVX2, so that short rows have short tails */
    STEPS_AHEAD = 8 /* in cache, 512 numbers of 16 bits take 189 ns, of which 234 step by step */
};

/* The largest magnitude of each quarter of a step, as 32 bits. */
INLINE __m128i largest_of_quarters(const unsigned char *values, int dtype);

/* The codes of a step; those of odd quarters are undefined. */
INLINE void pack_codes(const struct kvstore_codec *codec, const unsigned char *values,
                       const uint8_t *scales, uint8_t *codes, int dtype, size_t block);

/* Look up the scales of four blocks of 16 values, or two of 32, by the largest of each quarter of a
 * step. Returns 0 if all have cells: no infinity, NaN or amax below `least`. */
INLINE int choose_scales(const struct kvstore_codec *codec, const unsigned char *values,
                         uint8_t *scales, int dtype, size_t block) {
    __m128i quarters = largest_of_quarters(values, dtype);
    const int infinity = (int)magnitude_infinity(dtype), least = (int)codec->least;
    const size_t parts = block / 16;
    uint32_t amax[4];
    if (parts == 2) {
        quarters = _mm_max_epu32(quarters, _mm_shuffle_epi32(quarters, _MM_SHUFFLE(2, 3, 0, 1)));
    }
    _mm_storeu_si128((__m128i *)(void *)amax, quarters);
    for (size_t i = 0; i < 4 / parts; i++) {
        const uint32_t most = amax[i * parts];
        if (dtype == KVSTORE_F32) {
            const uint8_t scale = codec->scale_of[most >> 16];
            scales[i] = (uint8_t)(scale + (most > codec->scale_ends[scale]));
        } else {
            scales[i] = codec->scale_of[most];
        }
    }
    /* Signed numbers, of which only the sign counts. 0 less one is negative: it has cells. */
    const __m128i less = _mm_sub_epi32(quarters, _mm_set1_epi32(1));
    const __m128i is_large = _mm_cmpgt_epi32(less, _mm_set1_epi32(infinity - 2));
    const __m128i is_small = _mm_cmpgt_epi32(_mm_set1_epi32(least - 1), less);
    return _mm_movemask_ps(
        _mm_castsi128_ps(_mm_or_si128(is_large, _mm_andnot_si128(less, is_small))));
}

/* Pack some steps: first all scales, then all codes, to hide the latency of scales. */
INLINE void pack_steps(const struct kvstore_codec *codec, const unsigned char *values, size_t steps,
                       uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats, int dtype,
                       size_t block) {
    const size_t bytes = STEP * WIDE_BYTES[dtype];
    unsigned odd = 0;
    for (size_t i = 0; i < steps; i++) {
        for (size_t line = 0; line < bytes; line += 64) {
            __builtin_prefetch((const void *)((uintptr_t)values + i * bytes + PREFETCH_BYTES + line));
        }
        const int is_odd =
            choose_scales(codec, values + i * bytes, scales + i * STEP / block, dtype, block);
        odd |= (unsigned)(is_odd != 0) << i;
    }
    for (size_t i = 0; i < steps; i++) {
        pack_codes(codec, values + i * bytes, scales + i * STEP / block, codes + i * STEP / 2,
                   dtype, block);
    }
    for (size_t i = 0; odd >> i; i++) {
        if (odd >> i & 1) { /* rare: infinities, NaN and very small values */
            fp4_pack_portable(codec, values + i * bytes, STEP, codes + i * STEP / 2,
                              scales + i * STEP / block, stats);
        }
    }
}

INLINE void pack_values(const struct kvstore_codec *codec, const unsigned char *values,
                        size_t count, uint8_t *codes, uint8_t *scales,
                        struct kvstore_pack_stats *stats, int dtype, size_t block) {
    const size_t bytes = WIDE_BYTES[dtype];
    size_t i = 0;
    for (; i + STEP * STEPS_AHEAD <= count; i += STEP * STEPS_AHEAD) {
        pack_steps(codec, values + i * bytes, STEPS_AHEAD, codes + i / 2, scales + i / block, stats,
                   dtype, block);
    }
    const size_t steps = (count - i) / STEP;
    if (steps > 0) {
        pack_steps(codec, values + i * bytes, steps, codes + i / 2, scales + i / block, stats,
                   dtype, block);
        i += STEP * steps;
    }
    if (i < count) { /* the tail of a row: the same on a copy that is filled with zeros */
        const size_t rest = count - i;
        unsigned char padded[STEP * 4] = {0};
        uint8_t tail_codes[STEP / 2], tail_scales[STEP / 16];
        memcpy(padded, values + i * bytes, rest * bytes);
        pack_steps(codec, padded, 1, tail_codes, tail_scales, stats, dtype, block);
        memcpy(codes + i / 2, tail_codes, rest / 2);
        memcpy(scales + i / block, tail_scales, rest / block);
    }
}

/* A copy of the walk for each combination, in which dtype and block are constants. */
INLINE void pack_any(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                     uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats) {
    const int is_nvfp4 = codec->format == KVSTORE_NVFP4;
    if (codec->dtype == KVSTORE_F32) {
        is_nvfp4 ? pack_values(codec, values, count, codes, scales, stats, KVSTORE_F32, 16)
                 : pack_values(codec, values, count, codes, scales, stats, KVSTORE_F32, 32);
    } else if (codec->dtype == KVSTORE_F16) {
        is_nvfp4 ? pack_values(codec, values, count, codes, scales, stats, KVSTORE_F16, 16)
                 : pack_values(codec, values, count, codes, scales, stats, KVSTORE_F16, 32);
    } else {
        is_nvfp4 ? pack_values(codec, values, count, codes, scales, stats, KVSTORE_BF16, 16)
                 : pack_values(codec, values, count, codes, scales, stats, KVSTORE_BF16, 32);
    }
}
