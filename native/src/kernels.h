/* Shared code of kernels: numbers as bits, one rounding function for all formats, checks of strided
 * rows. Private to native/src. */
#ifndef KVSTORE_KERNELS_H
#define KVSTORE_KERNELS_H

#include "kvstore_native.h"

#include <float.h>
#include <string.h>

_Static_assert(sizeof(float) == 4 && FLT_MANT_DIG == 24, "float must be IEEE binary32");
_Static_assert(sizeof(double) == 8 && DBL_MANT_DIG == 53, "double must be IEEE binary64");

/* Binary format of round_to: sign, exponent and fraction, subnormals included. */
struct binary {
    int bias;
    int fraction_bits;
    int sign_shift;
    uint32_t top; /* code of values beyond the range: infinity, or the largest number */
    uint32_t nan;
};

static const struct binary E4M3 = {7, 3, 7, 0x7E, 0x7F};
static const struct binary WIDE[] = {
    [KVSTORE_F32] = {127, 23, 31, 0x7F800000, 0x7FC00000},
    [KVSTORE_F16] = {15, 10, 15, 0x7C00, 0x7E00},
    [KVSTORE_BF16] = {127, 7, 15, 0x7F80, 0x7FC0},
};
static const size_t WIDE_BYTES[] = {[KVSTORE_F32] = 4, [KVSTORE_F16] = 2, [KVSTORE_BF16] = 2};

static const uint32_t F32_MAGNITUDE = 0x7FFFFFFF;
static const uint32_t F32_INFINITY = 0x7F800000;

static inline uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double from_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 2^exponent, for the exponents of normal doubles. */
static inline double power_of_two(int exponent) {
    return from_bits((uint64_t)(exponent + 1023) << 52);
}

/* Round to the nearest code of a narrow format, ties to the even code. A code counts the steps of
 * the format from zero, so a carry out of the fraction is the right next exponent. */
static inline uint32_t round_to(const struct binary *narrow, double value) {
    const uint64_t bits = bits_of(value);
    const uint32_t sign = (uint32_t)(bits >> 63) << narrow->sign_shift;
    const uint64_t fraction = bits & (((uint64_t)1 << 52) - 1);
    const int exponent = (int)(bits >> 52 & 0x7FF);

    if (exponent == 0x7FF && fraction != 0) {
        return narrow->nan;
    }
    if (exponent == 0) { /* zero: a subnormal double is far below half a step of any format */
        return sign;
    }
    const int target = exponent - 1023 + narrow->bias;
    if (target >= 0xFF) { /* beyond every format here */
        return sign | narrow->top;
    }
    /* Below the first normal exponent, steps have a fixed width and the fraction loses bits. */
    const int normal = target > 0 ? target - 1 : 0;
    const int shift = 52 - narrow->fraction_bits + (target > 0 ? 0 : 1 - target);
    if (shift > 54) {
        return sign;
    }
    const uint64_t significand = fraction | (uint64_t)1 << 52;
    const uint64_t rest = significand & (((uint64_t)1 << shift) - 1);
    const uint64_t half = (uint64_t)1 << (shift - 1);
    uint64_t code = ((uint64_t)normal << narrow->fraction_bits) + (significand >> shift);
    if (rest > half || (rest == half && (code & 1))) {
        code++;
    }
    return sign | (code > narrow->top ? narrow->top : (uint32_t)code);
}

static inline uint32_t f16_to_f32(uint32_t half) {
    const uint32_t sign = (half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) { /* infinity or NaN */
        return sign | F32_INFINITY | (magnitude & 0x3FF) << 13;
    }
    if (magnitude >= 0x0400) {
        return sign | ((magnitude << 13) + ((uint32_t)(127 - 15) << 23));
    }
    if (magnitude == 0) {
        return sign;
    }
    uint32_t exponent = 127 - 14;
    uint32_t fraction = magnitude; /* in units of 2^-24: shift until the leading 1 is implicit */
    for (; fraction < 0x0400; fraction <<= 1) {
        exponent--;
    }
    return sign | exponent << 23 | (fraction & 0x3FF) << 13;
}

/* Read one number as the bits of the float that equals it. */
static inline uint32_t load(const unsigned char *source, int dtype) {
    uint32_t wide;
    uint16_t narrow;
    if (dtype == KVSTORE_F32) {
        memcpy(&wide, source, sizeof wide);
        return wide;
    }
    memcpy(&narrow, source, sizeof narrow);
    return dtype == KVSTORE_F16 ? f16_to_f32(narrow) : (uint32_t)narrow << 16;
}

static inline void store(unsigned char *target, int dtype, uint32_t code) {
    if (dtype == KVSTORE_F32) {
        memcpy(target, &code, sizeof code);
    } else {
        const uint16_t narrow = (uint16_t)code;
        memcpy(target, &narrow, sizeof narrow);
    }
}

/* The double equal to a float other than NaN. Not a cast, which loses subnormals in a thread that
 * flushes them to zero. */
static inline double widen(uint32_t bits) {
    const uint64_t sign = (uint64_t)(bits >> 31) << 63;
    const uint32_t magnitude = bits & F32_MAGNITUDE;
    double value;
    if (magnitude >= F32_INFINITY) {
        value = from_bits((uint64_t)0x7FF << 52);
    } else if (magnitude >= 0x00800000) {
        value = from_bits(((uint64_t)magnitude << 29) + ((uint64_t)(1023 - 127) << 52));
    } else {
        value = (double)magnitude * power_of_two(-149);
    }
    return from_bits(bits_of(value) | sign);
}

/* Value of an E4M3 byte: no infinity, and NaN if all seven low bits are set. */
static inline double e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 0xF;
    const int fraction = code & 0x7;
    if (exponent == 0xF && fraction == 0x7) {
        return from_bits((uint64_t)0x7FF8 << 48);
    }
    const double magnitude = exponent == 0 ? fraction * power_of_two(-9)
                                           : (8 + fraction) * power_of_two(exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
}

/* Value of an E8M0 byte: 2^(byte - 127), or NaN. */
static inline double e8m0_value(uint8_t code) {
    return code == 0xFF ? from_bits((uint64_t)0x7FF8 << 48) : power_of_two(code - 127);
}

/* Rows of bytes in memory. */
struct plane {
    const void *data;
    size_t row_bytes;
    ptrdiff_t stride;
};

static inline size_t magnitude_of(ptrdiff_t stride) {
    return stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
}

/* Bytes from the lowest to the highest of a plane; 0 if they exceed the address space. */
static inline size_t span_of(const struct plane *plane, size_t rows) {
    const size_t step = magnitude_of(plane->stride);
    const size_t limit = (size_t)PTRDIFF_MAX;
    if (plane->row_bytes > limit || (step && rows - 1 > (limit - plane->row_bytes) / step)) {
        return 0;
    }
    return plane->row_bytes + (rows - 1) * step;
}

static inline uintptr_t lowest_of(const struct plane *plane, size_t rows) {
    const uintptr_t first = (uintptr_t)plane->data;
    return plane->stride < 0 ? first - (rows - 1) * magnitude_of(plane->stride) : first;
}

/* Whether two planes share no byte. Planes that interleave must have the same stride. */
static inline int disjoint(const struct plane *a, size_t rows_a, const struct plane *b,
                           size_t rows_b) {
    const uintptr_t low_a = lowest_of(a, rows_a);
    const uintptr_t low_b = lowest_of(b, rows_b);
    if (low_a + span_of(a, rows_a) <= low_b || low_b + span_of(b, rows_b) <= low_a) {
        return 1;
    }
    const size_t step = magnitude_of(a->stride);
    if (step == 0 || step != magnitude_of(b->stride)) {
        return 0;
    }
    const size_t offset = low_b > low_a ? (low_b - low_a) % step
                                        : (step - (low_a - low_b) % step) % step;
    return offset >= a->row_bytes && offset + b->row_bytes <= step;
}

/* Checks that pack and unpack share. The first `outputs` planes are written. */
static inline int check(const struct plane planes[3], int outputs, size_t rows) {
    for (int i = 0; i < 3; i++) {
        if (planes[i].data == NULL) {
            return KVSTORE_ERR_NULL;
        }
        const int rows_overlap = rows > 1 && magnitude_of(planes[i].stride) < planes[i].row_bytes;
        if (span_of(&planes[i], rows) == 0 || (i < outputs && rows_overlap)) {
            return KVSTORE_ERR_STRIDE;
        }
    }
    for (int i = 0; i < outputs; i++) {
        for (int j = i + 1; j < 3; j++) {
            if (!disjoint(&planes[i], rows, &planes[j], rows)) {
                return KVSTORE_ERR_OVERLAP;
            }
        }
    }
    return KVSTORE_OK;
}

#endif
