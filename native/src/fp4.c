/* FP4 packing, portable: the definition that faster versions are compared with.
 *
 * Arithmetic is in double, where every product and quotient below is exact or provably rounds the
 * same way, and no operand is ever a subnormal. Rounding to a narrow format is one function on
 * bits, because all of them (E2M1, E4M3, f16, bf16, f32) differ only in three numbers. */
#include "kernels.h"

#include <string.h>

enum { BLOCK_MAX = 32, E2M1_CODES = 16 };

static const struct binary E2M1 = {1, 1, 3, 0x7, 0x7}; /* has no NaN: callers never ask for one */
static const size_t BLOCK[] = {[KVSTORE_NVFP4] = 16, [KVSTORE_MXFP4] = 32};
static const uint8_t NAN_SCALE[] = {[KVSTORE_NVFP4] = 0x7F, [KVSTORE_MXFP4] = 0xFF};

static const double E2M1_VALUE[E2M1_CODES] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                              -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

static double scale_value(int format, uint8_t scale) {
    return format == KVSTORE_MXFP4 ? e8m0_value(scale) : e4m3_value(scale);
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
                       struct kvstore_pack_stats *stats) {
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
                     ptrdiff_t scale_stride, struct kvstore_pack_stats *stats) {
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
    struct kvstore_pack_stats unused = {0, 0};
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
