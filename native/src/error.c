/* Quantization error: sums of the squared differences and of the squared values. */
#include "codec.h"

enum {
    PIECE = 512
}; /* values dequantized at a time: with their sources they fit the first-level cache */

static double float_of(const unsigned char *values, size_t i, int dtype) {
    const uint32_t bits = load(values + i * WIDE_BYTES[dtype], dtype);
    /* widen() does not accept NaN */
    return (bits & F32_MAGNITUDE) > F32_INFINITY ? from_bits((uint64_t)0x7FF8 << 48) : widen(bits);
}

void squares_portable(const unsigned char *values, const unsigned char *unpacked, size_t count,
                      int dtype, struct kvstore_pack_error *sums) {
    for (size_t i = 0; i < count; i++) {
        const double value = float_of(values, i, dtype);
        const double difference = float_of(unpacked, i, dtype) - value;
        sums->difference += difference * difference;
        sums->value += value * value;
    }
}

void measure_row(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                 const uint8_t *codes, const uint8_t *scales, struct kvstore_pack_error *sums) {
    const struct shape shape = SHAPE[codec->format];
    const size_t bytes = WIDE_BYTES[codec->dtype];
    _Alignas(64) unsigned char unpacked[PIECE * 4];
    for (size_t i = 0; i < count; i += PIECE) {
        const size_t segment = count - i < PIECE ? count - i : PIECE;
        codec->unpack(codec, codes + i / shape.values_per_byte,
                      scales + (shape.block ? i / shape.block * shape.scale_bytes : 0), segment,
                      unpacked, 0);
        codec->squares(values + i * bytes, unpacked, segment, codec->dtype, sums);
    }
}

#ifdef KVSTORE_HAS_X86
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline, target("avx2,f16c")))

/* 16 numbers, in a fixed order for each dtype. */
INLINE void floats(const unsigned char *values, int dtype, __m256 found[2]) {
    const __m256i first = _mm256_loadu_si256((const void *)values);
    if (dtype == KVSTORE_F32) {
        found[0] = _mm256_castsi256_ps(first);
        found[1] = _mm256_castsi256_ps(_mm256_loadu_si256((const void *)(values + 32)));
    } else if (dtype == KVSTORE_F16) {
        found[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(first));
        found[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1));
    } else {
        const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000);
        found[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
        found[1] = _mm256_castsi256_ps(_mm256_and_si256(first, upper));
    }
}

INLINE double total(__m256 lanes) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(lanes));
    const __m256d sums = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_extractf128_ps(lanes, 1)));
    double parts[4];
    _mm256_storeu_pd(parts, sums);
    return parts[0] + parts[1] + (parts[2] + parts[3]);
}

INLINE void squares(const unsigned char *values, const unsigned char *unpacked, size_t count,
                    int dtype, struct kvstore_pack_error *sums) {
    /* Where sums of squares of this many floats have all their bits. */
    const double least = 1e-30, most = 1e30;
    __m256 difference[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    __m256 value[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    const size_t bytes = 16 * WIDE_BYTES[dtype], whole = count / 16;
    for (size_t i = 0; i < whole; i++) {
        __m256 was[2], is[2];
        floats(values + i * bytes, dtype, was);
        floats(unpacked + i * bytes, dtype, is);
        for (size_t j = 0; j < 2; j++) {
            const __m256 apart = _mm256_sub_ps(is[j], was[j]);
            difference[j] = _mm256_add_ps(difference[j], _mm256_mul_ps(apart, apart));
            value[j] = _mm256_add_ps(value[j], _mm256_mul_ps(was[j], was[j]));
        }
    }
    const double d = total(_mm256_add_ps(difference[0], difference[1]));
    const double v = total(_mm256_add_ps(value[0], value[1]));
    size_t from = 0;
    if (v >= least && v <= most && d <= most) { /* false for NaN */
        sums->difference += d;
        sums->value += v;
        from = whole * 16;
    }
    squares_portable(values + from / 16 * bytes, unpacked + from / 16 * bytes, count - from, dtype,
                     sums);
}

AVX2 void squares_avx2(const unsigned char *values, const unsigned char *unpacked, size_t count,
                       int dtype, struct kvstore_pack_error *sums) {
    if (dtype == KVSTORE_F32) {
        squares(values, unpacked, count, KVSTORE_F32, sums);
    } else if (dtype == KVSTORE_F16) {
        squares(values, unpacked, count, KVSTORE_F16, sums);
    } else {
        squares(values, unpacked, count, KVSTORE_BF16, sums);
    }
}
#endif
