/* The FP8 kernels under sanitizers, as test_fp4.c: exact heap blocks, any address, any bits. */
#include "testing.h"

#include <math.h>
#include <string.h>

static const int FORMATS[] = {KVSTORE_MXFP8, KVSTORE_FP8};

static int rule_of(int format) {
    return format == KVSTORE_MXFP8 ? KVSTORE_RULE_RCEIL : KVSTORE_RULE_AMAX;
}

static size_t scale_bytes_of(int format, size_t values) {
    return format == KVSTORE_MXFP8 ? values / 32 : 4;
}

/* Pack and unpack random bits (a NaN here and there) through rows that start at any address. */
static void any_shape(int dtype, int format, size_t rows, size_t values, size_t gap) {
    const size_t length[3] = {values * BYTES[dtype], values, scale_bytes_of(format, values)};
    size_t stride[3];
    unsigned char *memory[3];
    unsigned char *plane[3];
    for (int i = 0; i < 3; i++) {
        stride[i] = length[i] + gap;
        const size_t size = rows ? (rows - 1) * stride[i] + length[i] : 0;
        memory[i] = exactly(size + gap); /* the gap in front makes the plane unaligned */
        plane[i] = memory[i] + gap;
        for (size_t j = 0; j < size + gap; j++) {
            memory[i][j] = (unsigned char)random_bits();
        }
    }
    struct kvstore_pack_stats stats = {0, 0};
    EXPECT(kvstore_pack(codec_of(dtype, format, rule_of(format), 1), plane[0], rows, values,
                        (ptrdiff_t)stride[0], plane[1], (ptrdiff_t)stride[1], plane[2],
                        (ptrdiff_t)stride[2], &stats, NULL) == KVSTORE_OK);
    EXPECT(kvstore_pack(codec_of(dtype, format, rule_of(format), 1), plane[0], rows, values,
                        (ptrdiff_t)stride[0], plane[1], (ptrdiff_t)stride[1], plane[2],
                        (ptrdiff_t)stride[2], NULL, NULL) == KVSTORE_OK);
    static const uint8_t row_nan[4] = {0, 0, 0xC0, 0x7F};
    uint64_t nan_scales = 0;
    for (size_t row = 0; row < rows; row++) {
        const uint8_t *scale = plane[2] + row * stride[2];
        for (size_t i = 0; format == KVSTORE_MXFP8 && i < length[2]; i++) {
            nan_scales += scale[i] == 0xFF;
        }
        nan_scales += format == KVSTORE_FP8 && memcmp(scale, row_nan, 4) == 0;
    }
    EXPECT(stats.nan_blocks == nan_scales);
    for (size_t i = 0; i < rows * stride[2] && rows; i++) { /* any scale decodes, packed or not */
        if (i % 3 == 0 && i % stride[2] < length[2]) {
            plane[2][i] = (uint8_t)random_bits();
        }
    }
    for (int target = 0; target < 3; target++) {
        const size_t row_bytes = values * BYTES[target];
        unsigned char *out = exactly(rows * row_bytes);
        unsigned char *last = rows ? out + (rows - 1) * row_bytes : out; /* rows run backwards */
        EXPECT(kvstore_unpack(codec_of(target, format, rule_of(format), 1), plane[1],
                              (ptrdiff_t)stride[1], plane[2], (ptrdiff_t)stride[2], rows, values,
                              last, -(ptrdiff_t)row_bytes) == KVSTORE_OK);
        free(out);
    }
    for (int i = 0; i < 3; i++) {
        free(memory[i]);
    }
}

static float scale_of(const uint8_t bytes[4]) {
    const uint32_t bits = (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
                          (uint32_t)bytes[3] << 24;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

static void special_values(void) {
    float values[32] = {448.0F, -0.0F, 1.0625F, 1.1875F, -0x1p-10F, 0x1.8p-9F, 0x1p-6F, 17.0F};
    const uint8_t expected[8] = {0x7E, 0x80, 0x38, 0x3A, 0x80, 0x02, 0x08, 0x58};
    uint8_t codes[32];
    uint8_t scale[4];
    struct kvstore_pack_stats stats = {0, 0};
    for (int i = 0; i < 2; i++) {
        EXPECT(kvstore_pack(codec_of(KVSTORE_F32, FORMATS[i], rule_of(FORMATS[i]), 1), values, 1,
                            32, 0, codes, 0, scale, 0, &stats, NULL) == KVSTORE_OK);
        EXPECT(memcmp(codes, expected, 8) == 0);
        EXPECT(i == 0 ? scale[0] == 127 : scale_of(scale) == 1.0F);
    }
    values[3] = -INFINITY;
    for (int i = 0; i < 2; i++) {
        EXPECT(kvstore_pack(codec_of(KVSTORE_F32, FORMATS[i], rule_of(FORMATS[i]), 1), values, 1,
                            32, 0, codes, 0, scale, 0, &stats, NULL) == KVSTORE_OK);
        EXPECT(codes[3] == 0xFE);
        EXPECT(i == 0 ? scale[0] == 254 && codes[0] == 0
                      : scale_of(scale) == 1.0F && codes[0] == 0x7E);
    }
    EXPECT(stats.inf_values == 2 && stats.nan_blocks == 0);
    values[31] = -NAN;
    for (int i = 0; i < 2; i++) {
        EXPECT(kvstore_pack(codec_of(KVSTORE_F32, FORMATS[i], rule_of(FORMATS[i]), 1), values, 1,
                            32, 0, codes, 0, scale, 0, &stats, NULL) == KVSTORE_OK);
        EXPECT(i == 0 ? scale[0] == 0xFF : isnan(scale_of(scale)));
        EXPECT(codes[0] == 0 && stats.nan_blocks == (uint64_t)i + 1);
        EXPECT(kvstore_unpack(codec_of(KVSTORE_F32, FORMATS[i], rule_of(FORMATS[i]), 1), codes, 0,
                              scale, 0, 1, 32, values, 0) == KVSTORE_OK);
        EXPECT(isnan(values[0]) && isnan(values[31]));
    }
}

/* Every f32 exponent, every f16 and bf16 pattern: no shift or conversion may be undefined. */
static void every_exponent(int dtype, int format) {
    unsigned char *values = exactly(32 * BYTES[dtype]);
    uint8_t codes[32];
    uint8_t scale[4];
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        for (size_t i = 0; i < 32; i++) {
            if (dtype == KVSTORE_F32) {
                const uint32_t wide = bits << 16 | (uint32_t)i;
                memcpy(values + 4 * i, &wide, 4);
            } else {
                const uint16_t narrow = (uint16_t)(bits >> i);
                memcpy(values + 2 * i, &narrow, 2);
            }
        }
        EXPECT(kvstore_pack(codec_of(dtype, format, rule_of(format), 1), values, 1, 32, 0, codes, 0,
                            scale, 0, NULL, NULL) == KVSTORE_OK);
    }
    free(values);
}

static void every_scale_and_code(void) {
    uint8_t codes[256];
    unsigned char values[256 * 4];
    for (size_t i = 0; i < 256; i++) {
        codes[i] = (uint8_t)i;
    }
    for (int dtype = 0; dtype < 3; dtype++) {
        for (int high = 0; high < 256; high++) {
            uint8_t scales[8];
            memset(scales, high, 8);
            EXPECT(kvstore_unpack(codec_of(dtype, KVSTORE_MXFP8, rule_of(KVSTORE_MXFP8), 1), codes,
                                  0, scales, 0, 1, 256, values, 0) == KVSTORE_OK);
            for (int low = 0; low < 256; low += 5) {
                scales[2] = (uint8_t)low;
                EXPECT(kvstore_unpack(codec_of(dtype, KVSTORE_FP8, rule_of(KVSTORE_FP8), 1), codes,
                                      0, scales, 0, 1, 256, values, 0) == KVSTORE_OK);
            }
        }
    }
}

static void bad_arguments(void) {
    float values[64] = {1};
    uint8_t memory[128];
    memset(memory, 0xA5, sizeof memory);
    uint8_t *codes = memory;
    uint8_t *scales = memory + 96;
    const struct {
        int format, rule;
        size_t row_values;
        ptrdiff_t code_stride, scale_stride;
        int code;
    } cases[] = {
        {2, 4, 31, 32, 4, KVSTORE_ERR_SHAPE},
        {3, 5, 0, 32, 4, KVSTORE_ERR_SHAPE},
        {3, 5, SIZE_MAX, 32, 4, KVSTORE_ERR_SHAPE},
        {2, 4, SIZE_MAX - 31, 32, 4, KVSTORE_ERR_SHAPE},
        {3, 5, 32, 31, 4, KVSTORE_ERR_STRIDE},
        {3, 5, 32, 32, 3, KVSTORE_ERR_STRIDE},
        {2, 4, 32, PTRDIFF_MAX, 4, KVSTORE_ERR_STRIDE},
        {3, 5, 32, PTRDIFF_MIN, 4, KVSTORE_ERR_STRIDE},
        {3, 5, 32, 65, 4, KVSTORE_ERR_OVERLAP},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int code = kvstore_pack(codec_of(0, cases[i].format, cases[i].rule, 1), values, 2,
                                      cases[i].row_values, 128, codes, cases[i].code_stride, scales,
                                      cases[i].scale_stride, NULL, NULL);
        if (code != cases[i].code) {
            fprintf(stderr, "case %zu returned %d\n", i, code);
            exit(1);
        }
    }
    EXPECT(kvstore_pack(codec_of(0, 3, 5, 1), NULL, 1, 32, 0, codes, 0, scales, 0, NULL, NULL) ==
           KVSTORE_ERR_NULL);
    EXPECT(kvstore_pack(codec_of(0, 3, 5, 1), NULL, 0, 32, 0, NULL, 0, NULL, 0, NULL, NULL) ==
           KVSTORE_OK);
    EXPECT(kvstore_pack(codec_of(0, 2, 4, 1), NULL, 1, 0, 0, NULL, 0, NULL, 0, NULL, NULL) == KVSTORE_OK);
    EXPECT(kvstore_unpack(codec_of(0, 3, rule_of(3), 1), codes, 32, scales, 4, 2, 32, memory + 8,
                          128) == KVSTORE_ERR_OVERLAP);
    for (size_t i = 0; i < sizeof memory; i++) {
        EXPECT(memory[i] == 0xA5);
    }
}

void test_fp8(void) {
    for (int i = 0; i < 2; i++) {
        const size_t unit = FORMATS[i] == KVSTORE_MXFP8 ? 32 : 1;
        for (int dtype = 0; dtype < 3; dtype++) {
            for (size_t rows = 0; rows < 5; rows++) {
                for (size_t units = unit == 1; units < 9; units++) {
                    for (size_t gap = 0; gap < 8; gap += 1 + rows) {
                        any_shape(dtype, FORMATS[i], rows, units * unit, gap);
                    }
                }
            }
            any_shape(dtype, FORMATS[i], 2, 608, 1);
            every_exponent(dtype, FORMATS[i]);
        }
    }
    special_values();
    every_scale_and_code();
    bad_arguments();
    puts("fp8: ok");
}
