/* FP4 packing with AVX2: integers only. The floating point was all done by the portable kernel, in
 * fp4_prepare: here a magnitude is compared with where its element changes, and an element looked
 * up. So the bytes are the portable ones, whatever the rounding mode or the handling of subnormals.
 */
#include "codec.h"

#ifdef KVSTORE_HAS_AVX2
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline, target("avx2")))

enum {
    STEP = 64,           /* values at a time: one vector of codes */
    MAGNITUDE_MASK = 0x7FFF,
    PREFETCH_BYTES = 4096 /* so far ahead packing reads: two passes hide the stream from the CPU */
};

/* Magnitudes are handled as 0x7FFF less themselves: AVX2 finds a least of 16 bits, no largest. */
INLINE __m256i flip(__m256i numbers) {
    return _mm256_andnot_si256(numbers, _mm256_set1_epi16(MAGNITUDE_MASK));
}

INLINE uint32_t largest(__m256i flipped) {
    const __m128i half = _mm_min_epu16(_mm256_castsi256_si128(flipped),
                                       _mm256_extracti128_si256(flipped, 1));
    return MAGNITUDE_MASK - (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(half)) % 0x10000U;
}

/* 16 floats to 16 bits each: their upper half, whose last bit is also set where the lower half is
 * not 0. Every scale and every element changes at a float whose bits beyond the 15th are 0, on one
 * side of it or the other, so these 16 bits decide every comparison as all 32 would. */
INLINE __m256i narrow(__m256i first, __m256i second) {
    const __m256i limit = _mm256_set1_epi32((int)0xFFFF0001);
    const __m256i zero = _mm256_setzero_si256();
    const __m256i a = _mm256_min_epu16(first, limit), b = _mm256_min_epu16(second, limit);
    const __m256i c = _mm256_or_si256(_mm256_srli_epi32(a, 16), a);
    const __m256i d = _mm256_or_si256(_mm256_srli_epi32(b, 16), b);
    const __m256i both = _mm256_packus_epi32(_mm256_blend_epi16(c, zero, 0xAA),
                                             _mm256_blend_epi16(d, zero, 0xAA));
    return _mm256_permute4x64_epi64(both, 0xD8);
}

INLINE __m256i load_16(const unsigned char *values, int dtype) {
    const __m256i *place = (const __m256i *)(const void *)values;
    const __m256i first = _mm256_loadu_si256(place);
    return dtype == KVSTORE_F32 ? narrow(first, _mm256_loadu_si256(place + 1)) : first;
}

/* 16 numbers to their codes, one in each 16 bits. */
INLINE __m256i codes_of(__m256i numbers, __m256i flipped, const uint32_t *starts) {
    __m256i codes = _mm256_and_si256(_mm256_srli_epi16(numbers, 12), _mm256_set1_epi16(8));
    for (int i = 0; i < 7; i++) {
        const __m256i start = _mm256_set1_epi32((int)starts[i]);
        codes = _mm256_sub_epi16(codes, _mm256_cmpgt_epi16(start, flipped));
    }
    return codes;
}

/* 64 codes, one in each 16 bits, to 32 bytes. */
INLINE __m256i join(const __m256i codes[4]) {
    const __m256i weights = _mm256_set1_epi16(0x1001);
    const __m256i a = _mm256_maddubs_epi16(_mm256_packus_epi16(codes[0], codes[1]), weights);
    const __m256i b = _mm256_maddubs_epi16(_mm256_packus_epi16(codes[2], codes[3]), weights);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void pack_step(const struct kvstore_codec *codec, const unsigned char *values,
                                  uint8_t *nibbles, uint8_t *scales,
                                  struct kvstore_pack_stats *stats, int dtype, size_t block) {
    const size_t bytes = WIDE_BYTES[dtype];
    const uint32_t infinity = magnitude_16_infinity(dtype);
    const size_t parts = block / 16, blocks = STEP / block;
    __m256i numbers[4], flipped[4], codes[4];
    uint32_t most = 0;
    for (size_t i = 0; i < 4; i++) {
        numbers[i] = load_16(values + i * 16 * bytes, dtype);
        flipped[i] = flip(numbers[i]);
    }
    for (size_t i = 0; i < blocks; i++) {
        const uint32_t amax = largest(parts == 1 ? flipped[i]
                                                 : _mm256_min_epu16(flipped[2 * i],
                                                                    flipped[2 * i + 1]));
        most = amax > most ? amax : most;
        scales[i] = codec->scale_of[amax];
    }
    for (size_t i = 0; i < 4; i++) {
        codes[i] = codes_of(numbers[i], flipped[i], codec->flipped_ends[scales[i / parts]]);
    }
    _mm256_storeu_si256((__m256i *)(void *)nibbles, join(codes));
    if (most >= infinity) { /* rare: what is counted or replaced is left to the definition */
        fp4_pack_portable(codec, values, STEP, nibbles, scales, stats);
    }
}

INLINE void pack_steps(const struct kvstore_codec *codec, const unsigned char *values,
                                   size_t count, uint8_t *nibbles, uint8_t *scales,
                                   struct kvstore_pack_stats *stats, int dtype, size_t block) {
    const size_t bytes = WIDE_BYTES[dtype];
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        for (size_t line = 0; line < STEP * bytes; line += 64) {
            _mm_prefetch((const char *)values + i * bytes + PREFETCH_BYTES + line, _MM_HINT_T0);
        }
        pack_step(codec, values + i * bytes, nibbles + i / 2, scales + i / block, stats, dtype,
                  block);
    }
    if (i < count) { /* the tail of a row: the same on a copy that is filled with zeros */
        const size_t rest = count - i;
        unsigned char padded[STEP * 4] = {0};
        uint8_t codes[STEP / 2], tail_scales[STEP / 16];
        memcpy(padded, values + i * bytes, rest * bytes);
        pack_step(codec, padded, codes, tail_scales, stats, dtype, block);
        memcpy(nibbles + i / 2, codes, rest / 2);
        memcpy(scales + i / block, tail_scales, rest / block);
    }
}

AVX2 void fp4_pack_avx2(const struct kvstore_codec *codec, const unsigned char *values,
                        size_t count, uint8_t *codes, uint8_t *scales,
                        struct kvstore_pack_stats *stats) {
    const int is_f32 = codec->dtype == KVSTORE_F32;
    const int half = codec->dtype; /* f16 and bf16 differ in their tables, and in infinity */
    if (codec->format == KVSTORE_NVFP4 && is_f32) {
        pack_steps(codec, values, count, codes, scales, stats, KVSTORE_F32, 16);
    } else if (codec->format == KVSTORE_NVFP4) {
        pack_steps(codec, values, count, codes, scales, stats, half, 16);
    } else if (is_f32) {
        pack_steps(codec, values, count, codes, scales, stats, KVSTORE_F32, 32);
    } else {
        pack_steps(codec, values, count, codes, scales, stats, half, 32);
    }
}

/* The nth byte of 32 elements, 16 under each of two scales. */
INLINE __m256i look_up(const uint8_t first[4][E2M1_CODES],
                                   const uint8_t second[4][E2M1_CODES], int n, __m256i codes) {
    const __m128i a = _mm_load_si128((const __m128i *)(const void *)first[n]);
    const __m128i b = _mm_load_si128((const __m128i *)(const void *)second[n]);
    return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1), codes);
}

/* Store vectors whose low halves follow each other, and then their high halves. Streams go by 16
 * bytes: an array is seldom aligned to more, and the CPU joins them to whole lines anyway. */
INLINE void put(unsigned char *place, const __m256i *found, size_t count,
                            int is_streamed) {
    for (size_t i = 0; i < count; i += 2) {
        if (is_streamed) {
            __m128i *low = (__m128i *)(void *)place + i, *high = low + count;
            _mm_stream_si128(low, _mm256_castsi256_si128(found[i]));
            _mm_stream_si128(low + 1, _mm256_castsi256_si128(found[i + 1]));
            _mm_stream_si128(high, _mm256_extracti128_si256(found[i], 1));
            _mm_stream_si128(high + 1, _mm256_extracti128_si256(found[i + 1], 1));
        } else {
            __m256i *low = (__m256i *)(void *)(place + 16 * i);
            _mm256_storeu_si256(low, _mm256_permute2x128_si256(found[i], found[i + 1], 0x20));
            _mm256_storeu_si256(low + count / 2,
                                _mm256_permute2x128_si256(found[i], found[i + 1], 0x31));
        }
    }
}

enum target { HALF, WIDE_SHORT, WIDE_LONG }; /* 16 bits; 32 with a lower half of 0; any 32 */

/* 32 values, 16 under each of two scales: their bytes are looked up apart, then zipped. */
INLINE void unpack_32(const struct kvstore_codec *codec, const uint8_t *nibbles,
                                  uint8_t scale, uint8_t next_scale, unsigned char *values,
                                  int is_streamed, enum target target) {
    const uint8_t(*a)[E2M1_CODES] = codec->elements[scale];
    const uint8_t(*b)[E2M1_CODES] = codec->elements[next_scale];
    const __m256i bytes =
        _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)nibbles));
    const __m256i codes = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)),
                                           _mm256_set1_epi16(0x0F0F));
    const int top = target == HALF ? 0 : 2; /* where the upper 16 bits lie */
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
    const __m256i wide[4] = {_mm256_unpacklo_epi16(lower[0], upper[0]),
                             _mm256_unpackhi_epi16(lower[0], upper[0]),
                             _mm256_unpacklo_epi16(lower[1], upper[1]),
                             _mm256_unpackhi_epi16(lower[1], upper[1])};
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
    if (i < count) { /* one block of 16 is left: beside a copy of itself */
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
    const enum target target =
        codec->dtype != KVSTORE_F32 ? HALF : codec->is_short ? WIDE_SHORT : WIDE_LONG;
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
