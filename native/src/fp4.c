/* FP4 packing, portable: the definition that faster versions are compared with.
 *
 * Arithmetic is in double, where every product and quotient below is exact or provably rounds the
 * same way, and no operand is ever a subnormal. Rounding to a narrow format is one function on
 * bits, because all of them (E2M1, E4M3, f16, bf16, f32) differ only in three numbers. */
#include "kvstore_native.h"

#include <float.h>
#include <string.h>

_Static_assert(sizeof(float) == 4 && FLT_MANT_DIG == 24, "float must be IEEE binary32");
_Static_assert(sizeof(double) == 8 && DBL_MANT_DIG == 53, "double must be IEEE binary64");

enum { BLOCK_MAX = 32, E2M1_CODES = 16 };

/* A binary format, as round_to sees it: a sign, an exponent and a fraction, subnormals included. */
struct binary {
    int bias;
    int fraction_bits;
    int sign_shift;
    uint32_t top; /* code that everything too large becomes: infinity, or the largest number */
    uint32_t nan;
};

static const struct binary E2M1 = {1, 1, 3, 0x7, 0x7}; /* has no NaN: callers never ask for one */
static const struct binary E4M3 = {7, 3, 7, 0x7E, 0x7F};
static const struct binary WIDE[] = {
    [KVSTORE_F32] = {127, 23, 31, 0x7F800000, 0x7FC00000},
    [KVSTORE_F16] = {15, 10, 15, 0x7C00, 0x7E00},
    [KVSTORE_BF16] = {127, 7, 15, 0x7F80, 0x7FC0},
};
static const size_t WIDE_BYTES[] = {[KVSTORE_F32] = 4, [KVSTORE_F16] = 2, [KVSTORE_BF16] = 2};

static const size_t BLOCK[] = {[KVSTORE_NVFP4] = 16, [KVSTORE_MXFP4] = 32};
static const uint8_t NAN_SCALE[] = {[KVSTORE_NVFP4] = 0x7F, [KVSTORE_MXFP4] = 0xFF};

static const double E2M1_VALUE[E2M1_CODES] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                              -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

static const uint32_t F32_MAGNITUDE = 0x7FFFFFFF;
static const uint32_t F32_INFINITY = 0x7F800000;

static uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double from_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 2^exponent, for the exponents of normal doubles. */
static double power_of_two(int exponent) { return from_bits((uint64_t)(exponent + 1023) << 52); }

/* Round to the nearest code of a narrow format, ties to the even code. A code counts the steps of
 * the format from zero, so a carry out of the fraction is the right next exponent. */
static uint32_t round_to(const struct binary *narrow, double value) {
    const uint64_t bits = bits_of(value);
    const uint32_t sign = (uint32_t)(bits >> 63) << narrow->sign_shift;
    const uint64_t fraction = bits & (((uint64_t)1 << 52) - 1);
    const int exponent = (int)(bits >> 52 & 0x7FF);

    if (exponent == 0x7FF && fraction != 0) {
        return narrow->nan;
    }
    if (exponent == 0) { /* zero: a subnormal double lies far below half a step of any format */
        return sign;
    }
    const int target = exponent - 1023 + narrow->bias;
    if (target >= 0xFF) { /* beyond every format here */
        return sign | narrow->top;
    }
    /* Below the first normal exponent, the steps stay as wide and the fraction loses bits. */
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

static uint32_t f16_to_f32(uint32_t half) {
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
static uint32_t load(const unsigned char *source, int dtype) {
    uint32_t wide;
    uint16_t narrow;
    if (dtype == KVSTORE_F32) {
        memcpy(&wide, source, sizeof wide);
        return wide;
    }
    memcpy(&narrow, source, sizeof narrow);
    return dtype == KVSTORE_F16 ? f16_to_f32(narrow) : (uint32_t)narrow << 16;
}

static void store(unsigned char *target, int dtype, uint32_t code) {
    if (dtype == KVSTORE_F32) {
        memcpy(target, &code, sizeof code);
    } else {
        const uint16_t narrow = (uint16_t)code;
        memcpy(target, &narrow, sizeof narrow);
    }
}

/* The double that equals a float that is no NaN. Not a cast: a thread that treats subnormals as
 * zero would lose them. */
static double widen(uint32_t bits) {
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

static double scale_value(int format, uint8_t scale) {
    if (format == KVSTORE_MXFP4) {
        return scale == 0xFF ? from_bits((uint64_t)0x7FF8 << 48) : power_of_two(scale - 127);
    }
    const int exponent = scale >> 3 & 0xF;
    const int fraction = scale & 0x7;
    if (exponent == 0xF && fraction == 0x7) {
        return from_bits((uint64_t)0x7FF8 << 48);
    }
    const double magnitude = exponent == 0 ? fraction * power_of_two(-9)
                                           : (8 + fraction) * power_of_two(exponent - 10);
    return scale & 0x80 ? -magnitude : magnitude;
}

/* amax is the bits of a float that is no NaN. The quotients by 6 and by global_scale are floats,
 * as in the code that each rule is named after; for V41 that equals the exact quotient. */
static uint8_t choose_scale(int rule, uint32_t amax, float global_scale) {
    if (rule == KVSTORE_RULE_V41) {
        const double least = 6 * power_of_two(-9);
        const double value = widen(amax);
        return (uint8_t)round_to(&E4M3, (value > least ? value : least) / 6);
    }
    if (rule == KVSTORE_RULE_TORCHAO) {
        float value;
        memcpy(&value, &amax, sizeof value);
        const double quotient = value / 6.0F / global_scale;
        const double least = power_of_two(-6);
        return (uint8_t)round_to(&E4M3, quotient > least ? quotient : least);
    }
    if (rule == KVSTORE_RULE_RCEIL && amax == F32_INFINITY) {
        return 254; /* infinity / 6 is infinite, and saturates to the largest scale */
    }
    /* Added to the fraction: carries into the exponent exactly when the rule rounds up. */
    static const uint32_t carry[] = {[KVSTORE_RULE_FLOOR] = 0,
                                     [KVSTORE_RULE_EVEN] = 0x200000,
                                     [KVSTORE_RULE_RCEIL] = 0x3FFFFF};
    const uint32_t exponent = (amax + carry[rule]) >> 23;
    return (uint8_t)(exponent > 2 ? exponent - 2 : 0);
}

/* The product as a float, which is what TORCHAO rounds. Clamped first: 8 already saturates. */
static double float_product(double value, double factor) {
    const double product = value * factor;
    const double limit = 8.0;
    return (float)(product > limit ? limit : product < -limit ? -limit : product);
}

static void pack_block(const unsigned char *values, int dtype, int format, int rule,
                       float global_scale, uint8_t *nibbles, uint8_t *scale,
                       struct kvstore_fp4_stats *stats) {
    const size_t block = BLOCK[format];
    uint32_t bits[BLOCK_MAX];
    uint32_t amax = 0; /* magnitudes compare as integers, with NaN above infinity */
    for (size_t i = 0; i < block; i++) {
        bits[i] = load(values + i * WIDE_BYTES[dtype], dtype);
        const uint32_t magnitude = bits[i] & F32_MAGNITUDE;
        amax = magnitude > amax ? magnitude : amax;
        stats->inf_values += magnitude == F32_INFINITY;
    }
    if (amax > F32_INFINITY) {
        stats->nan_blocks++;
        *scale = NAN_SCALE[format];
        memset(nibbles, 0, block / 2);
        return;
    }
    *scale = choose_scale(rule, amax, global_scale);
    const double divisor = scale_value(format, *scale);
    const int multiply = rule == KVSTORE_RULE_TORCHAO;
    const double reciprocal = multiply ? 1.0F / global_scale / (float)divisor : 0.0;
    uint8_t codes[BLOCK_MAX];
    for (size_t i = 0; i < block; i++) {
        const double value = widen(bits[i]);
        const double scaled = multiply ? float_product(value, reciprocal) : value / divisor;
        codes[i] = (uint8_t)round_to(&E2M1, scaled);
    }
    for (size_t i = 0; i < block / 2; i++) {
        nibbles[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

static void unpack_block(const uint8_t *nibbles, uint8_t scale, int format, float global_scale,
                         unsigned char *values, int dtype) {
    const double factor = scale_value(format, scale) * (double)global_scale; /* exact: 28 bits */
    uint32_t table[E2M1_CODES];
    for (size_t code = 0; code < E2M1_CODES; code++) {
        table[code] = round_to(&WIDE[dtype], E2M1_VALUE[code] * factor);
    }
    const size_t bytes = WIDE_BYTES[dtype];
    for (size_t i = 0; i < BLOCK[format] / 2; i++) {
        store(values + 2 * i * bytes, dtype, table[nibbles[i] & 0xF]);
        store(values + (2 * i + 1) * bytes, dtype, table[nibbles[i] >> 4]);
    }
}

/* Rows of bytes in memory. */
struct plane {
    const void *data;
    size_t row_bytes;
    ptrdiff_t stride;
};

static size_t magnitude_of(ptrdiff_t stride) {
    return stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
}

/* Bytes from the lowest to the highest of a plane; 0 if they exceed the address space. */
static size_t span_of(const struct plane *plane, size_t rows) {
    const size_t step = magnitude_of(plane->stride);
    const size_t limit = (size_t)PTRDIFF_MAX;
    if (plane->row_bytes > limit || (step && rows - 1 > (limit - plane->row_bytes) / step)) {
        return 0;
    }
    return plane->row_bytes + (rows - 1) * step;
}

static uintptr_t lowest_of(const struct plane *plane, size_t rows) {
    const uintptr_t first = (uintptr_t)plane->data;
    return plane->stride < 0 ? first - (rows - 1) * magnitude_of(plane->stride) : first;
}

/* Whether two planes share no byte. Planes that interleave must have the same stride. */
static int disjoint(const struct plane *a, const struct plane *b, size_t rows) {
    const uintptr_t low_a = lowest_of(a, rows);
    const uintptr_t low_b = lowest_of(b, rows);
    if (low_a + span_of(a, rows) <= low_b || low_b + span_of(b, rows) <= low_a) {
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

/* Check what pack and unpack have in common. The first `outputs` planes are written. */
static int check(const struct plane planes[3], int outputs, size_t rows) {
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
            if (!disjoint(&planes[i], &planes[j], rows)) {
                return KVSTORE_ERR_OVERLAP;
            }
        }
    }
    return KVSTORE_OK;
}

static int check_numbers(int dtype, int format, float global_scale, size_t row_values) {
    if (dtype != KVSTORE_F32 && dtype != KVSTORE_F16 && dtype != KVSTORE_BF16) {
        return KVSTORE_ERR_DTYPE;
    }
    if (format != KVSTORE_NVFP4 && format != KVSTORE_MXFP4) {
        return KVSTORE_ERR_FORMAT;
    }
    /* Between these bounds every scale, its reciprocal and the quotient of both are normal floats.
     * The negated test also refuses NaN. */
    if (!(global_scale >= (float)power_of_two(-100) && global_scale <= (float)power_of_two(100)) ||
        (format == KVSTORE_MXFP4 && global_scale != 1.0F)) {
        return KVSTORE_ERR_GLOBAL_SCALE;
    }
    if (row_values % BLOCK[format] != 0 || row_values > (size_t)PTRDIFF_MAX / 4) {
        return KVSTORE_ERR_SHAPE;
    }
    return KVSTORE_OK;
}

static int check_rule(int format, int rule, float global_scale) {
    const int nvfp4 = rule == KVSTORE_RULE_V41 || rule == KVSTORE_RULE_TORCHAO;
    const int mxfp4 =
        rule == KVSTORE_RULE_FLOOR || rule == KVSTORE_RULE_EVEN || rule == KVSTORE_RULE_RCEIL;
    if (!(format == KVSTORE_NVFP4 ? nvfp4 : mxfp4)) {
        return KVSTORE_ERR_RULE;
    }
    if (rule == KVSTORE_RULE_V41 && global_scale != 1.0F) {
        return KVSTORE_ERR_GLOBAL_SCALE;
    }
    return KVSTORE_OK;
}

int kvstore_fp4_pack(const void *values, int dtype, size_t rows, size_t row_values,
                     ptrdiff_t value_stride, int format, int rule, float global_scale,
                     uint8_t *nibbles, ptrdiff_t nibble_stride, uint8_t *scales,
                     ptrdiff_t scale_stride, struct kvstore_fp4_stats *stats) {
    int code = check_numbers(dtype, format, global_scale, row_values);
    code = code ? code : check_rule(format, rule, global_scale);
    if (code != KVSTORE_OK || rows == 0 || row_values == 0) {
        return code;
    }
    const size_t block = BLOCK[format];
    const size_t value_bytes = WIDE_BYTES[dtype];
    const struct plane planes[3] = {{nibbles, row_values / 2, nibble_stride},
                                    {scales, row_values / block, scale_stride},
                                    {values, row_values * value_bytes, value_stride}};
    code = check(planes, 2, rows);
    if (code != KVSTORE_OK) {
        return code;
    }
    struct kvstore_fp4_stats unused = {0, 0};
    for (size_t row = 0; row < rows; row++) {
        const unsigned char *value_row =
            (const unsigned char *)values + (ptrdiff_t)row * value_stride;
        uint8_t *nibble_row = nibbles + (ptrdiff_t)row * nibble_stride;
        uint8_t *scale_row = scales + (ptrdiff_t)row * scale_stride;
        for (size_t i = 0; i < row_values / block; i++) {
            pack_block(value_row + i * block * value_bytes, dtype, format, rule, global_scale,
                       nibble_row + i * block / 2, scale_row + i, stats ? stats : &unused);
        }
    }
    return KVSTORE_OK;
}

int kvstore_fp4_unpack(const uint8_t *nibbles, ptrdiff_t nibble_stride, const uint8_t *scales,
                       ptrdiff_t scale_stride, size_t rows, size_t row_values, int format,
                       float global_scale, void *values, int dtype, ptrdiff_t value_stride) {
    int code = check_numbers(dtype, format, global_scale, row_values);
    if (code != KVSTORE_OK || rows == 0 || row_values == 0) {
        return code;
    }
    const size_t block = BLOCK[format];
    const size_t value_bytes = WIDE_BYTES[dtype];
    const struct plane planes[3] = {{values, row_values * value_bytes, value_stride},
                                    {nibbles, row_values / 2, nibble_stride},
                                    {scales, row_values / block, scale_stride}};
    code = check(planes, 1, rows);
    if (code != KVSTORE_OK) {
        return code;
    }
    for (size_t row = 0; row < rows; row++) {
        const uint8_t *nibble_row = nibbles + (ptrdiff_t)row * nibble_stride;
        const uint8_t *scale_row = scales + (ptrdiff_t)row * scale_stride;
        unsigned char *value_row = (unsigned char *)values + (ptrdiff_t)row * value_stride;
        for (size_t i = 0; i < row_values / block; i++) {
            unpack_block(nibble_row + i * block / 2, scale_row[i], format, global_scale,
                         value_row + i * block * value_bytes, dtype);
        }
    }
    return KVSTORE_OK;
}
