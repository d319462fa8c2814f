/* Portable FP4 quantization: the reference, from which the tables of faster kernels are built.
 *
 * Arithmetic is in double, where every product and quotient below is exact or provably rounds the
 * same way, and no operand is a subnormal. Rounding to a narrow format (E2M1, E4M3, f16, bf16, f32)
 * is one function on bits with three parameters. */
#include "codec.h"

enum { BLOCK_MAX = 32 };

static const struct binary E2M1 = {1, 1, 3, 0x7, 0x7}; /* has no NaN: callers never pass one */
static const size_t BLOCK[] = {[KVSTORE_NVFP4] = 16, [KVSTORE_MXFP4] = 32};
static const uint8_t NAN_SCALE[] = {[KVSTORE_NVFP4] = 0x7F, [KVSTORE_MXFP4] = 0xFF};

static const double E2M1_VALUE[E2M1_CODES] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                              -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

static double scale_value(int format, uint8_t scale) {
    return format == KVSTORE_MXFP4 ? e8m0_value(scale) : e4m3_value(scale);
}

/* amax is the bits of a float other than NaN. Quotients by 6 and by global_scale are floats, as in
 * the original code of each rule; for V41 that equals the exact quotient. */
static uint8_t choose_scale(const struct kvstore_codec *codec, uint32_t amax) {
    const int rule = codec->rule;
    if (rule == KVSTORE_RULE_V41) {
        const double least = 6 * power_of_two(-9);
        const double value = widen(amax);
        return (uint8_t)round_to(&E4M3, (value > least ? value : least) / 6);
    }
    if (rule == KVSTORE_RULE_TORCHAO) {
        float value;
        memcpy(&value, &amax, sizeof value);
        const double quotient = value / 6.0F / codec->global_scale;
        const double least = power_of_two(-6);
        return (uint8_t)round_to(&E4M3, quotient > least ? quotient : least);
    }
    if (rule == KVSTORE_RULE_RCEIL && amax == F32_INFINITY) {
        return 254; /* infinity / 6 is infinite, and saturates to the largest scale */
    }
    /* Added to the fraction: carries into the exponent exactly when the rule rounds up. */
    static const uint32_t carry[] = {
        [KVSTORE_RULE_FLOOR] = 0, [KVSTORE_RULE_EVEN] = 0x200000, [KVSTORE_RULE_RCEIL] = 0x3FFFFF};
    const uint32_t exponent = (amax + carry[rule]) >> 23;
    return (uint8_t)(exponent > 2 ? exponent - 2 : 0);
}

/* The product as a float, as TORCHAO rounds it. Clamped first: 8 already saturates. */
static double float_product(double value, double factor) {
    const double product = value * factor;
    const double limit = 8.0;
    return (float)(product > limit ? limit : product < -limit ? -limit : product);
}

/* Computation of the elements of one block from its values. */
struct divisor {
    double scale;
    double reciprocal; /* 0 where elements are divided */
};

static struct divisor divisor_of(const struct kvstore_codec *codec, uint8_t scale) {
    const double value = scale_value(codec->format, scale);
    const int is_product = codec->rule == KVSTORE_RULE_TORCHAO;
    return (struct divisor){value, is_product ? 1.0F / codec->global_scale / (float)value : 0.0};
}

static uint8_t element_code(struct divisor by, uint32_t bits) {
    const double value = widen(bits);
    return (uint8_t)round_to(&E2M1, by.reciprocal == 0 ? value / by.scale
                                                       : float_product(value, by.reciprocal));
}

static uint32_t element_value(const struct kvstore_codec *codec, uint8_t scale, size_t element) {
    const double factor = scale_value(codec->format, scale) * (double)codec->global_scale;
    return round_to(&WIDE[codec->dtype], E2M1_VALUE[element] * factor); /* exact: 28 and 2 bits */
}

static void pack_block(const struct kvstore_codec *codec, const unsigned char *values,
                       uint8_t *nibbles, uint8_t *scale, struct kvstore_pack_stats *stats) {
    const size_t block = BLOCK[codec->format];
    uint32_t bits[BLOCK_MAX];
    uint32_t amax = 0; /* magnitudes compare as integers, with NaN above infinity */
    for (size_t i = 0; i < block; i++) {
        bits[i] = load(values + i * WIDE_BYTES[codec->dtype], codec->dtype);
        const uint32_t magnitude = bits[i] & F32_MAGNITUDE;
        amax = magnitude > amax ? magnitude : amax;
        stats->inf_values += magnitude == F32_INFINITY;
    }
    if (amax > F32_INFINITY) {
        stats->nan_blocks++;
        *scale = NAN_SCALE[codec->format];
        memset(nibbles, 0, block / 2);
        return;
    }
    *scale = choose_scale(codec, amax);
    const struct divisor by = divisor_of(codec, *scale);
    for (size_t i = 0; i < block / 2; i++) {
        nibbles[i] =
            (uint8_t)(element_code(by, bits[2 * i]) | element_code(by, bits[2 * i + 1]) << 4);
    }
}

void fp4_pack_portable(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                       uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats) {
    const size_t block = BLOCK[codec->format];
    const size_t block_bytes = block * WIDE_BYTES[codec->dtype];
    for (size_t i = 0; i < count / block; i++) {
        pack_block(codec, values + i * block_bytes, codes + i * block / 2, scales + i, stats);
    }
}

void fp4_unpack_portable(const struct kvstore_codec *codec, const uint8_t *codes,
                         const uint8_t *scales, size_t count, unsigned char *values,
                         int is_streamed) {
    (void)is_streamed;
    const size_t block = BLOCK[codec->format];
    const size_t bytes = WIDE_BYTES[codec->dtype];
    for (size_t i = 0; i < count / block; i++) {
        uint32_t table[E2M1_CODES];
        for (size_t element = 0; element < E2M1_CODES; element++) {
            table[element] = element_value(codec, scales[i], element);
        }
        for (size_t j = i * block / 2; j < (i + 1) * block / 2; j++) {
            store(values + 2 * j * bytes, codec->dtype, table[codes[j] & 0xF]);
            store(values + (2 * j + 1) * bytes, codec->dtype, table[codes[j] >> 4]);
        }
    }
}

int fp4_check(const struct kvstore_codec *codec) {
    const int rule = codec->rule;
    const int nvfp4 = rule == KVSTORE_RULE_V41 || rule == KVSTORE_RULE_TORCHAO;
    const int mxfp4 =
        rule == KVSTORE_RULE_FLOOR || rule == KVSTORE_RULE_EVEN || rule == KVSTORE_RULE_RCEIL;
    if (!(codec->format == KVSTORE_NVFP4 ? nvfp4 : mxfp4)) {
        return KVSTORE_ERR_RULE;
    }
    /* Within these bounds every scale, its reciprocal and their quotient are normal floats.
     * The negated test also refuses NaN. */
    const float global_scale = codec->global_scale;
    if (!(global_scale >= (float)power_of_two(-100) && global_scale <= (float)power_of_two(100)) ||
        (rule != KVSTORE_RULE_TORCHAO && global_scale != 1.0F)) {
        return KVSTORE_ERR_GLOBAL_SCALE;
    }
    return KVSTORE_OK;
}

/* Bits of the float equal to a magnitude of the dtype. */
static uint32_t magnitude_bits(int dtype, uint32_t magnitude) {
    return dtype == KVSTORE_F32   ? magnitude
           : dtype == KVSTORE_F16 ? f16_to_f32(magnitude)
                                  : magnitude << 16;
}

static void prepare_elements(struct kvstore_codec *codec, int level) {
    uint32_t lower = 0;
    for (size_t scale = 0; scale < SCALE_CODES; scale++) {
        union elements *elements = &codec->elements[scale];
        for (size_t element = 0; element < E2M1_CODES; element++) {
            const uint32_t value = element_value(codec, (uint8_t)scale, element);
            for (size_t i = 0; level == KVSTORE_LEVEL_AVX2 && i < 4; i++) {
                elements->bytes[i][element] = (uint8_t)(value >> 8 * i);
            }
            if (level == KVSTORE_LEVEL_AVX512 && codec->dtype == KVSTORE_F32) {
                elements->of_32[element] = value;
            } else if (level == KVSTORE_LEVEL_AVX512) {
                elements->of_16[0][element] = elements->of_16[1][element] = (uint16_t)value;
            }
            lower |= value & 0xFFFF;
        }
    }
    codec->is_short = lower == 0;
}

typedef uint8_t code_of(const struct kvstore_codec *codec, struct divisor by, uint32_t bits);

/* Largest finite magnitude with a `code` of at most `most`; codes grow with magnitudes. */
static uint32_t last_magnitude(const struct kvstore_codec *codec, code_of *code, struct divisor by,
                               uint32_t most) {
    uint32_t low = 0, high = magnitude_infinity(codec->dtype);
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (code(codec, by, magnitude_bits(codec->dtype, middle)) <= most) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static uint8_t code_of_element(const struct kvstore_codec *codec, struct divisor by,
                               uint32_t bits) {
    (void)codec;
    return element_code(by, bits);
}

static uint8_t code_of_scale(const struct kvstore_codec *codec, struct divisor by, uint32_t bits) {
    (void)by;
    return choose_scale(codec, bits);
}

/* Divide the magnitudes of a scale into cells; return 0 if subnormals are too close. */
static int prepare_cells(struct kvstore_codec *codec, uint8_t scale) {
    const struct divisor by = divisor_of(codec, scale);
    const int64_t half_octave = (int64_t)1 << (WIDE[codec->dtype].fraction_bits - 1);
    const uint32_t last = magnitude_infinity(codec->dtype) - 1;
    uint32_t ends[8];
    for (uint32_t element = 0; element < 8; element++) {
        ends[element] = last_magnitude(codec, code_of_element, by, element);
    }
    /* Cell k begins where no element is below k and none above k was reached. */
    int64_t low = 0, high = last;
    for (int k = 1; k < 8; k++) {
        const int64_t least = (int64_t)ends[k - 1] + 1 - k * half_octave;
        const int64_t most = (int64_t)ends[k] + 1 - k * half_octave;
        low = least > low ? least : low;
        high = ends[k] < last && most < high ? most : high;
    }
    union cells *cells = &codec->cells[scale];
    for (size_t i = 0; i < 16; i++) {
        if (codec->dtype == KVSTORE_F32) {
            cells->of_32.base[i % 8] = (uint32_t)low;
            cells->of_32.ends[i % 8] = ends[i % 8];
        } else {
            cells->of_16.base[i] = (uint16_t)low;
            cells->of_16.ends[i] = (uint16_t)ends[i % 8];
        }
    }
    return low <= high;
}

static void prepare_pack(struct kvstore_codec *codec) {
    const struct divisor none = {0, 0};
    const uint32_t infinity = magnitude_infinity(codec->dtype);
    const int shift = codec->dtype == KVSTORE_F32 ? 16 : 0;
    for (uint32_t i = 0; i < MAGNITUDES_16; i++) {
        const uint32_t amax = i << shift < infinity ? i << shift : infinity;
        codec->scale_of[i] = choose_scale(codec, magnitude_bits(codec->dtype, amax));
    }
    memset(codec->cells, 0, sizeof codec->cells);
    codec->least = 1;
    const uint8_t first = codec->scale_of[0], last = codec->scale_of[MAGNITUDES_16 - 1];
    for (uint32_t scale = first; scale <= last; scale++) {
        codec->scale_ends[scale] = last_magnitude(codec, code_of_scale, none, scale);
        if (!prepare_cells(codec, (uint8_t)scale)) {
            codec->least = codec->scale_ends[scale] + 1;
        }
    }
}

void fp4_prepare(struct kvstore_codec *codec, int level) {
    codec->pack = fp4_pack_portable;
    codec->unpack = fp4_unpack_portable;
#ifdef KVSTORE_HAS_X86
    if (level > KVSTORE_LEVEL_PORTABLE) {
        const int is_avx512 = level == KVSTORE_LEVEL_AVX512;
        prepare_elements(codec, level);
        prepare_pack(codec);
        codec->pack = is_avx512 ? fp4_pack_avx512 : fp4_pack_avx2;
        codec->unpack = is_avx512 ? fp4_unpack_avx512 : fp4_unpack_avx2;
    }
#else
    (void)level;
#endif
}
