/* Portable FP8 quantization: the reference for faster kernels.
 *
 * Arithmetic is in double, where no operand is a subnormal. A quotient of two floats that is not on
 * a midpoint of E4M3 (5 significant bits) or of a float (25) differs from it by more than 2^-31 of
 * its size, so its double is not on one either: rounding the double rounds the exact quotient. */
#include "bytes.h"
#include "codec.h"

enum { MX_BLOCK = 32, MX_LARGEST = 254, MX_NAN = 0xFF };

static const uint32_t F32_LARGEST = 0x7F7FFFFF;
static const uint32_t F32_NAN = 0x7FC00000;

/* 2^ceil(log2(amax / 448)) as E8M0, for the bits of a float other than NaN. 448 is 1.75 * 2^8: the
 * addend carries into the exponent exactly if the fraction exceeds .75. */
static uint8_t rceil_scale(uint32_t amax) {
    if (amax == F32_INFINITY) {
        return MX_LARGEST; /* infinity / 448 is infinite, and saturates to the largest scale */
    }
    const uint32_t exponent = (amax + 0x1FFFFF) >> 23;
    return (uint8_t)(exponent > 8 ? exponent - 8 : 0);
}

/* amax / 448 as the bits of a float, where amax is the largest finite magnitude of the row. Only a
 * row of zeros has scale 0: other scales that round to 0 become the least float. */
static uint32_t amax_scale(uint32_t amax, int has_infinity) {
    if (amax == 0) { /* without finite values, an infinity becomes the largest float */
        amax = has_infinity ? F32_LARGEST : 0;
    }
    const uint32_t scale = round_to(&WIDE[KVSTORE_F32], widen(amax) / 448);
    return scale == 0 && amax != 0 ? 1 : scale;
}

static void pack_block(const unsigned char *values, size_t count, int dtype, int format,
                       uint8_t *codes, uint8_t *scale, struct kvstore_pack_stats *stats) {
    const size_t bytes = WIDE_BYTES[dtype];
    uint32_t amax = 0; /* magnitudes compare as integers, with NaN above infinity */
    uint32_t finite = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t magnitude = load(values + i * bytes, dtype) & F32_MAGNITUDE;
        amax = magnitude > amax ? magnitude : amax;
        finite = magnitude > finite && magnitude < F32_INFINITY ? magnitude : finite;
        stats->inf_values += magnitude == F32_INFINITY;
    }
    const int is_nan = amax > F32_INFINITY;
    stats->nan_blocks += (uint64_t)is_nan;
    double divisor;
    if (format == KVSTORE_MXFP8) {
        *scale = is_nan ? MX_NAN : rceil_scale(amax);
        divisor = e8m0_value(*scale);
    } else {
        const uint32_t bits = is_nan ? F32_NAN : amax_scale(finite, amax == F32_INFINITY);
        store_le32(scale, bits);
        divisor = bits == 0 ? 1.0 : widen(bits); /* zeros keep their signs */
    }
    if (is_nan) {
        memset(codes, 0, count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        codes[i] = (uint8_t)round_to(&E4M3, widen(load(values + i * bytes, dtype)) / divisor);
    }
}

static void unpack_block(const uint8_t *codes, size_t count, const uint8_t *scale, int format,
                         unsigned char *values, int dtype) {
    double factor;
    if (format == KVSTORE_MXFP8) {
        factor = e8m0_value(*scale);
    } else {
        const uint32_t bits = load_le32(scale);
        factor = (bits & F32_MAGNITUDE) > F32_INFINITY ? e8m0_value(MX_NAN) : widen(bits);
    }
    const size_t bytes = WIDE_BYTES[dtype];
    for (size_t i = 0; i < count; i++) { /* the product is exact: 4 and 24 bits */
        store(values + i * bytes, dtype, round_to(&WIDE[dtype], e4m3_value(codes[i]) * factor));
    }
}

void fp8_pack_portable(const struct kvstore_codec *codec, const unsigned char *values,
                       size_t count, uint8_t *codes, uint8_t *scales,
                       struct kvstore_pack_stats *stats) {
    const size_t block = codec->format == KVSTORE_MXFP8 ? MX_BLOCK : count;
    for (size_t i = 0; i < count / block; i++) {
        pack_block(values + i * block * WIDE_BYTES[codec->dtype], block, codec->dtype,
                   codec->format, codes + i * block, scales + i, stats);
    }
}

void fp8_unpack_portable(const struct kvstore_codec *codec, const uint8_t *codes,
                         const uint8_t *scales, size_t count, unsigned char *values,
                         int is_streamed) {
    (void)is_streamed;
    const size_t block = codec->format == KVSTORE_MXFP8 ? MX_BLOCK : count;
    for (size_t i = 0; i < count / block; i++) {
        unpack_block(codes + i * block, block, scales + i, codec->format,
                     values + i * block * WIDE_BYTES[codec->dtype], codec->dtype);
    }
}
