/* FP4 with AVX-512 (BW, DQ, VL and VBMI): as fp4_avx2.c, twice as wide, with look-ups of whole
 * numbers instead of bytes. */
#include "codec.h"

#ifdef KVSTORE_HAS_X86
#include "avx512.h"

#define INLINE static inline __attribute__((always_inline)) AVX512

enum {
    PREFETCH_BYTES = 8192 /* of packing: two passes hide the stream from the CPU */
};

#include "fp4_rows.h"

INLINE __m512i vector(const void *address) { return _mm512_loadu_si512(address); }

/* The halves of a table of 32 entries of 16 bits: of one scale, and of the next. */
INLINE __m512i two_of_16(const uint16_t *first, const uint16_t *second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const void *)first)),
                              _mm256_loadu_si256((const void *)second), 1);
}

INLINE __m512i twice_of_32(const uint32_t *table) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)table));
}

/* The largest of the four blocks of 16 magnitudes in two vectors of 16 bits, in 32 bits each. */
INLINE __m128i largest_of_16(__m512i a, __m512i b) {
    const __m512i other_lane = _mm512_setr_epi64(2, 3, 0, 1, 6, 7, 4, 5);
    const __m512i lanes =
        _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m512i words = _mm512_max_epu16(lanes, _mm512_permutexvar_epi64(other_lane, lanes));
    const __m512i pairs = _mm512_max_epu16(words, _mm512_srli_epi64(words, 32));
    const __m512i found = _mm512_max_epu16(pairs, _mm512_srli_epi64(pairs, 16));
    /* The lowest word of each 64 bits: of the lower halves of `a` and `b`, then of the upper ones.
     */
    const __m512i address = _mm512_setr_epi32(0, 16, 4, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm_and_si128(_mm512_castsi512_si128(_mm512_permutexvar_epi16(address, found)),
                         _mm_set1_epi32(0xFFFF));
}

/* The largest of each of four vectors of 32 bits, by transposing. */
INLINE __m128i largest_of_32(const __m512i v[4]) {
    const __m512i a =
        _mm512_max_epu32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b =
        _mm512_max_epu32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    const __m512i c = _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_max_epu32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

/* The codes of 32 numbers of 16 bits, 16 under each of two scales. */
INLINE __m512i codes_of_16(__m512i numbers, const union cells *first, const union cells *second,
                           int is_f16) {
    const __m512i base = two_of_16(first->of_16.base, second->of_16.base);
    const __m512i ends = two_of_16(first->of_16.ends, second->of_16.ends);
    const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i magnitudes = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7FFF));
    const __m512i above = _mm512_subs_epu16(magnitudes, base);
    const __m512i half_octaves = is_f16 ? _mm512_srli_epi16(above, 9) : _mm512_srli_epi16(above, 6);
    const __m512i cell = _mm512_min_epu16(half_octaves, _mm512_set1_epi16(7));
    const __m512i end = _mm512_permutexvar_epi16(_mm512_or_si512(cell, half), ends);
    const __m512i codes = _mm512_mask_add_epi16(cell, _mm512_cmpgt_epi16_mask(magnitudes, end),
                                                cell, _mm512_set1_epi16(1));
    return _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(numbers, 12), _mm512_set1_epi16(8),
                                     A_OR_B_AND_C);
}

/* The codes of 16 numbers of 32 bits. */
INLINE __m512i codes_of_32(__m512i numbers, const union cells *cells) {
    const __m512i magnitudes = _mm512_and_si512(numbers, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i base = twice_of_32(cells->of_32.base);
    const __m512i above = _mm512_sub_epi32(_mm512_max_epu32(magnitudes, base), base);
    const __m512i cell = _mm512_min_epu32(_mm512_srli_epi32(above, 22), _mm512_set1_epi32(7));
    const __m512i end = _mm512_permutexvar_epi32(cell, twice_of_32(cells->of_32.ends));
    const __m512i codes = _mm512_mask_add_epi32(cell, _mm512_cmpgt_epi32_mask(magnitudes, end),
                                                cell, _mm512_set1_epi32(1));
    return _mm512_ternarylogic_epi32(codes, _mm512_srli_epi32(numbers, 28), _mm512_set1_epi32(8),
                                     A_OR_B_AND_C);
}

/* 64 codes, one a byte, to 32 bytes, whose words are then put in order. */
INLINE void store_codes(uint8_t *nibbles, __m512i codes, __m256i order) {
    const __m256i joined =
        _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001)));
    _mm256_storeu_si256((void *)nibbles, _mm256_permutexvar_epi16(order, joined));
}

INLINE __m128i largest_of_quarters(const unsigned char *values, int dtype) {
    const __m512i mask_16 = _mm512_set1_epi16(0x7FFF), mask_32 = _mm512_set1_epi32(0x7FFFFFFF);
    if (dtype == KVSTORE_F32) {
        const __m512i magnitudes[4] = {_mm512_and_si512(vector(values), mask_32),
                                       _mm512_and_si512(vector(values + 64), mask_32),
                                       _mm512_and_si512(vector(values + 128), mask_32),
                                       _mm512_and_si512(vector(values + 192), mask_32)};
        return largest_of_32(magnitudes);
    }
    return largest_of_16(_mm512_and_si512(vector(values), mask_16),
                         _mm512_and_si512(vector(values + 64), mask_16));
}

INLINE void pack_codes(const struct kvstore_codec *codec, const unsigned char *values,
                       const uint8_t *scales, uint8_t *nibbles, int dtype, size_t block) {
    const union cells *cells[4];
    for (size_t i = 0; i < 4; i++) {
        cells[i] = &codec->cells[scales[i * 16 / block]];
    }
    if (dtype == KVSTORE_F32) {
        const __m512i a = _mm512_packus_epi32(codes_of_32(vector(values), cells[0]),
                                              codes_of_32(vector(values + 64), cells[1]));
        const __m512i b = _mm512_packus_epi32(codes_of_32(vector(values + 128), cells[2]),
                                              codes_of_32(vector(values + 192), cells[3]));
        store_codes(nibbles, _mm512_packus_epi16(a, b),
                    _mm256_setr_epi16(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    } else {
        const int is_f16 = dtype == KVSTORE_F16;
        const __m512i a = codes_of_16(vector(values), cells[0], cells[1], is_f16);
        const __m512i b = codes_of_16(vector(values + 64), cells[2], cells[3], is_f16);
        store_codes(nibbles, _mm512_packus_epi16(a, b),
                    _mm256_setr_epi16(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    }
}

AVX512 void fp4_pack_avx512(const struct kvstore_codec *codec, const unsigned char *values,
                            size_t count, uint8_t *codes, uint8_t *scales,
                            struct kvstore_pack_stats *stats) {
    pack_any(codec, values, count, codes, scales, stats);
}

/* Store of values: to the cache, or non-temporal with 16 or 64 bytes, by alignment. NumPy aligns
 * large arrays to 16 only; the processor combines those stores to lines. */
enum stream { CACHED = 0, BY_16 = 16, BY_64 = 64 };

INLINE void put(unsigned char *address, __m512i values, enum stream stream) {
    if (stream == BY_64) {
        _mm512_stream_si512((void *)address, values);
    } else if (stream == BY_16) {
        _mm_stream_si128((void *)address, _mm512_castsi512_si128(values));
        _mm_stream_si128((void *)(address + 16), _mm512_extracti32x4_epi32(values, 1));
        _mm_stream_si128((void *)(address + 32), _mm512_extracti32x4_epi32(values, 2));
        _mm_stream_si128((void *)(address + 48), _mm512_extracti32x4_epi32(values, 3));
    } else {
        _mm512_storeu_si512(address, values);
    }
}

/* 16 values of 32 bits from 8 bytes. The look-up uses the lowest four bits of an index. */
INLINE void unpack_of_32(const union elements *elements, const uint8_t *codes,
                         unsigned char *values, enum stream stream) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)codes));
    const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    put(values, _mm512_permutexvar_epi32(index, vector(elements->of_32)), stream);
}

/* 32 values of 16 bits from 16 bytes. The fifth bit of an index selects the table of a scale; with
 * one scale both tables are equal. */
INLINE void unpack_of_16(const union elements *first, const union elements *second,
                         const uint8_t *codes, unsigned char *values, enum stream stream,
                         int is_one) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)codes));
    const __m512i shifted = _mm512_slli_epi32(bytes, 12);
    if (is_one) {
        const __m512i index = _mm512_or_si512(bytes, shifted);
        put(values, _mm512_permutexvar_epi16(index, vector(first->of_16)), stream);
    } else {
        const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        const __m512i index =
            _mm512_ternarylogic_epi32(bytes, shifted, _mm512_set1_epi16(0xF), A_OR_B_THEN_C);
        put(values,
            _mm512_permutexvar_epi16(_mm512_or_si512(index, half),
                                     two_of_16(first->of_16[0], second->of_16[0])),
            stream);
    }
}

INLINE void unpack_32(const struct kvstore_codec *codec, const uint8_t *codes, uint8_t scale,
                      uint8_t next_scale, unsigned char *values, enum stream stream, int is_f32,
                      int is_nvfp4) {
    const union elements *first = &codec->elements[scale], *second = &codec->elements[next_scale];
    if (is_f32) {
        unpack_of_32(first, codes, values, stream);
        unpack_of_32(second, codes + 8, values + 64, stream);
    } else {
        unpack_of_16(first, second, codes, values, stream, !is_nvfp4);
    }
}

INLINE void unpack_blocks(const struct kvstore_codec *codec, const uint8_t *codes,
                          const uint8_t *scales, size_t count, unsigned char *values,
                          enum stream stream, int is_f32, int is_nvfp4) {
    const size_t bytes = is_f32 ? 4 : 2;
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        unpack_32(codec, codes + i / 2, scales[0], scales[is_nvfp4], values + bytes * i, stream,
                  is_f32, is_nvfp4);
        scales += 1 + is_nvfp4;
    }
    if (i < count) { /* one block of 16 is left: paired with itself */
        uint8_t padded_codes[16] = {0};
        unsigned char padded[32 * 4];
        memcpy(padded_codes, codes + i / 2, 8);
        unpack_32(codec, padded_codes, scales[0], scales[0], padded, CACHED, is_f32, is_nvfp4);
        memcpy(values + bytes * i, padded, 16 * bytes);
    }
}

INLINE void unpack_any(const struct kvstore_codec *codec, const uint8_t *codes,
                       const uint8_t *scales, size_t count, unsigned char *values,
                       enum stream stream) {
    const int is_nvfp4 = codec->format == KVSTORE_NVFP4;
    if (codec->dtype == KVSTORE_F32) {
        is_nvfp4 ? unpack_blocks(codec, codes, scales, count, values, stream, 1, 1)
                 : unpack_blocks(codec, codes, scales, count, values, stream, 1, 0);
    } else {
        is_nvfp4 ? unpack_blocks(codec, codes, scales, count, values, stream, 0, 1)
                 : unpack_blocks(codec, codes, scales, count, values, stream, 0, 0);
    }
}

AVX512 void fp4_unpack_avx512(const struct kvstore_codec *codec, const uint8_t *codes,
                              const uint8_t *scales, size_t count, unsigned char *values,
                              int is_streamed) {
    const uintptr_t address = (uintptr_t)values;
    if (is_streamed && address % 64 == 0) {
        unpack_any(codec, codes, scales, count, values, BY_64);
    } else if (is_streamed && address % 16 == 0) {
        unpack_any(codec, codes, scales, count, values, BY_16);
    } else {
        unpack_any(codec, codes, scales, count, values, CACHED);
    }
}
#endif
