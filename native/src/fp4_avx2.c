/* FP4 with AVX2, on integers only: fp4_prepare computes all floating-point results in advance.
 * Magnitudes are compared with the limits of their elements, and elements are looked up, so the
 * bytes equal the portable ones in any rounding mode and subnormal mode. */
#include "codec.h"

#ifdef KVSTORE_HAS_X86
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline, target("avx2")))

enum {
    PREFETCH_BYTES = 4096 /* of packing: two passes hide the stream from the CPU */
};

#include "fp4_rows.h"

INLINE __m256i vector(const void *address) { return _mm256_loadu_si256(address); }

INLINE __m128i larger(__m128i a, __m128i b, int is_wide) {
    return is_wide ? _mm_max_epu32(a, b) : _mm_max_epu16(a, b);
}

INLINE __m128i fold(__m256i magnitudes, int is_wide) {
    return larger(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1),
                  is_wide);
}

/* The largest number of each of four vectors, in 32 bits, by transposing. */
INLINE __m128i largest(const __m128i v[4], int is_wide) {
    const __m128i a =
        larger(_mm_unpacklo_epi32(v[0], v[1]), _mm_unpackhi_epi32(v[0], v[1]), is_wide);
    const __m128i b =
        larger(_mm_unpacklo_epi32(v[2], v[3]), _mm_unpackhi_epi32(v[2], v[3]), is_wide);
    const __m128i c = larger(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b), is_wide);
    return is_wide ? c : _mm_srli_epi32(_mm_max_epu16(c, _mm_slli_epi32(c, 16)), 16);
}

/* The codes of 16 magnitudes of 16 bits: their cell, plus one above its end, which is looked up by
 * its two bytes. */
INLINE __m256i codes_of_16(__m256i magnitudes, const union cells *cells, int is_f16) {
    const __m256i above = _mm256_subs_epu16(magnitudes, vector(cells->of_16.base));
    const __m256i half_octaves = is_f16 ? _mm256_srli_epi16(above, 9) : _mm256_srli_epi16(above, 6);
    const __m256i cell = _mm256_min_epu16(half_octaves, _mm256_set1_epi16(7));
    const __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(cell, _mm256_set1_epi16(0x0202)),
                                           _mm256_set1_epi16(0x0100));
    const __m256i ends = _mm256_shuffle_epi8(vector(cells->of_16.ends), bytes);
    return _mm256_sub_epi16(cell, _mm256_cmpgt_epi16(magnitudes, ends));
}

/* The same of 8 magnitudes of 32 bits. */
INLINE __m256i codes_of_32(__m256i magnitudes, const union cells *cells) {
    const __m256i base = vector(cells->of_32.base);
    const __m256i above = _mm256_sub_epi32(_mm256_max_epu32(magnitudes, base), base);
    const __m256i cell = _mm256_min_epu32(_mm256_srli_epi32(above, 22), _mm256_set1_epi32(7));
    const __m256i ends = _mm256_permutevar8x32_epi32(vector(cells->of_32.ends), cell);
    return _mm256_sub_epi32(cell, _mm256_cmpgt_epi32(magnitudes, ends));
}

/* 32 codes and their numbers, of 16 bits each, to 16 words of two codes. Narrowing with saturation
 * keeps the sign of numbers. */
INLINE __m256i join(const __m256i codes[2], const __m256i numbers[2]) {
    const __m256i signs = _mm256_and_si256(
        _mm256_srli_epi16(_mm256_packs_epi16(numbers[0], numbers[1]), 4), _mm256_set1_epi8(8));
    return _mm256_maddubs_epi16(_mm256_or_si256(_mm256_packus_epi16(codes[0], codes[1]), signs),
                                _mm256_set1_epi16(0x1001));
}

INLINE __m128i largest_of_quarters(const unsigned char *values, int dtype) {
    const __m256i mask_16 = _mm256_set1_epi16(0x7FFF), mask_32 = _mm256_set1_epi32(0x7FFFFFFF);
    const int is_f32 = dtype == KVSTORE_F32;
    __m128i folded[4];
    for (size_t i = 0; i < 4; i++) {
        if (is_f32) {
            const __m256i a = vector(values + i * 64), b = vector(values + i * 64 + 32);
            folded[i] = fold(
                _mm256_max_epu32(_mm256_and_si256(a, mask_32), _mm256_and_si256(b, mask_32)), 1);
        } else {
            folded[i] = fold(_mm256_and_si256(vector(values + i * 32), mask_16), 0);
        }
    }
    return largest(folded, is_f32);
}

INLINE void pack_codes(const struct kvstore_codec *codec, const unsigned char *values,
                       const uint8_t *scales, uint8_t *nibbles, int dtype, size_t block) {
    const __m256i mask_16 = _mm256_set1_epi16(0x7FFF), mask_32 = _mm256_set1_epi32(0x7FFFFFFF);
    const int is_f32 = dtype == KVSTORE_F32;
    __m256i codes[4], numbers[4];
    for (size_t i = 0; i < 4; i++) {
        const union cells *cells = &codec->cells[scales[i * 16 / block]];
        if (is_f32) {
            const __m256i a = vector(values + i * 64), b = vector(values + i * 64 + 32);
            codes[i] = _mm256_packus_epi32(codes_of_32(_mm256_and_si256(a, mask_32), cells),
                                           codes_of_32(_mm256_and_si256(b, mask_32), cells));
            numbers[i] = _mm256_packs_epi32(a, b);
        } else {
            numbers[i] = vector(values + i * 32);
            codes[i] =
                codes_of_16(_mm256_and_si256(numbers[i], mask_16), cells, dtype == KVSTORE_F16);
        }
    }
    const __m256i joined = _mm256_packus_epi16(join(codes, numbers), join(codes + 2, numbers + 2));
    __m128i *address = (__m128i *)(void *)nibbles;
    if (is_f32) { /* after narrowing, pairs of codes alternate between vectors */
        const __m128i low = _mm256_castsi256_si128(joined);
        const __m128i high = _mm256_extracti128_si256(joined, 1);
        _mm_storeu_si128(address, _mm_unpacklo_epi16(low, high));
        _mm_storeu_si128(address + 1, _mm_unpackhi_epi16(low, high));
    } else {
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256((__m256i *)(void *)address, _mm256_permutevar8x32_epi32(joined, order));
    }
}

AVX2 void fp4_pack_avx2(const struct kvstore_codec *codec, const unsigned char *values,
                        size_t count, uint8_t *codes, uint8_t *scales,
                        struct kvstore_pack_stats *stats) {
    pack_any(codec, values, count, codes, scales, stats);
}

/* The nth byte of 32 elements, 16 under each of two scales. */
INLINE __m256i look_up(const uint8_t first[4][E2M1_CODES], const uint8_t second[4][E2M1_CODES],
                       int n, __m256i codes) {
    const __m128i a = _mm_load_si128((const __m128i *)(const void *)first[n]);
    const __m128i b = _mm_load_si128((const __m128i *)(const void *)second[n]);
    return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1), codes);
}

/* Store vectors, first the low halves, then the high halves. Streams are 16 bytes wide: arrays are
 * seldom aligned to more, and the CPU combines stores to whole lines. */
INLINE void put(unsigned char *address, const __m256i *found, size_t count, int is_streamed) {
    for (size_t i = 0; i < count; i += 2) {
        if (is_streamed) {
            __m128i *low = (__m128i *)(void *)address + i, *high = low + count;
            _mm_stream_si128(low, _mm256_castsi256_si128(found[i]));
            _mm_stream_si128(low + 1, _mm256_castsi256_si128(found[i + 1]));
            _mm_stream_si128(high, _mm256_extracti128_si256(found[i], 1));
            _mm_stream_si128(high + 1, _mm256_extracti128_si256(found[i + 1], 1));
        } else {
            __m256i *low = (__m256i *)(void *)(address + 16 * i);
            _mm256_storeu_si256(low, _mm256_permute2x128_si256(found[i], found[i + 1], 0x20));
            _mm256_storeu_si256(low + count / 2,
                                _mm256_permute2x128_si256(found[i], found[i + 1], 0x31));
        }
    }
}

enum target { HALF, WIDE_SHORT, WIDE_LONG }; /* 16 bits; 32 with a lower half of 0; any 32 */

/* 32 values, 16 under each of two scales: their bytes are looked up apart, then zipped. */
INLINE void unpack_32(const struct kvstore_codec *codec, const uint8_t *nibbles, uint8_t scale,
                      uint8_t next_scale, unsigned char *values, int is_streamed,
                      enum target target) {
    const uint8_t (*a)[E2M1_CODES] = codec->elements[scale].bytes;
    const uint8_t (*b)[E2M1_CODES] = codec->elements[next_scale].bytes;
    const __m256i bytes =
        _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)nibbles));
    const __m256i codes = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)),
                                           _mm256_set1_epi16(0x0F0F));
    const int top = target == HALF ? 0 : 2; /* position of the upper 16 bits */
    const __m256i low = look_up(a, b, top, codes), high = look_up(a, b, top + 1, codes);
    const __m256i upper[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    if (target == HALF) {
        put(values, upper, 2, is_streamed);
        return;
    }
    __m256i lower[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if (target == WIDE_LONG) {
        const __m256i first = look_up(a, b, 0, codes), second = look_up(a, b, 1, codes);
        lower[0] = _mm256_unpacklo_epi8(first, second);
        lower[1] = _mm256_unpackhi_epi8(first, second);
    }
    const __m256i wide[4] = {
        _mm256_unpacklo_epi16(lower[0], upper[0]), _mm256_unpackhi_epi16(lower[0], upper[0]),
        _mm256_unpacklo_epi16(lower[1], upper[1]), _mm256_unpackhi_epi16(lower[1], upper[1])};
    put(values, wide, 4, is_streamed);
}

INLINE void unpack_blocks(const struct kvstore_codec *codec, const uint8_t *nibbles,
                          const uint8_t *scales, size_t count, unsigned char *values,
                          int is_streamed, enum target target) {
    const int is_nvfp4 = codec->format == KVSTORE_NVFP4;
    const size_t bytes = target == HALF ? 2 : 4;
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        unpack_32(codec, nibbles + i / 2, scales[0], scales[is_nvfp4], values + bytes * i,
                  is_streamed, target);
        scales += 1 + is_nvfp4;
    }
    if (i < count) { /* one block of 16 is left: paired with itself */
        uint8_t codes[16] = {0};
        unsigned char padded[32 * 4];
        memcpy(codes, nibbles + i / 2, 8);
        unpack_32(codec, codes, scales[0], scales[0], padded, 0, target);
        memcpy(values + bytes * i, padded, 16 * bytes);
    }
}

AVX2 void fp4_unpack_avx2(const struct kvstore_codec *codec, const uint8_t *codes,
                          const uint8_t *scales, size_t count, unsigned char *values,
                          int is_streamed) {
    const int streamed = is_streamed && (uintptr_t)values % 16 == 0;
    const enum target target = codec->dtype != KVSTORE_F32 ? HALF
                               : codec->is_short           ? WIDE_SHORT
                                                           : WIDE_LONG;
    if (target == HALF) {
        streamed ? unpack_blocks(codec, codes, scales, count, values, 1, HALF)
                 : unpack_blocks(codec, codes, scales, count, values, 0, HALF);
    } else if (target == WIDE_SHORT) {
        streamed ? unpack_blocks(codec, codes, scales, count, values, 1, WIDE_SHORT)
                 : unpack_blocks(codec, codes, scales, count, values, 0, WIDE_SHORT);
    } else {
        streamed ? unpack_blocks(codec, codes, scales, count, values, 1, WIDE_LONG)
                 : unpack_blocks(codec, codes, scales, count, values, 0, WIDE_LONG);
    }
}
#endif
