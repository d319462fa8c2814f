/* The FP4 kernels under sanitizers: every buffer is a heap block of its exact size, so that one
 * byte read or written beside it stops the run. Values are checked in tests/codec; here it is only
 * that NaN, ties, tails, odd strides and bad arguments behave as the header says. */
#include "testing.h"

#include <math.h>
#include <string.h>

static const size_t BLOCK[] = {16, 32};

/* Pack and unpack random bits (a NaN here and there) through rows that start at any address. */
static void any_shape(int dtype, int format, int rule, size_t rows, size_t blocks, size_t gap) {
    const size_t values = blocks * BLOCK[format];
    const size_t stride[3] = {values * BYTES[dtype] + gap, values / 2 + gap, blocks + gap};
    const size_t length[3] = {values * BYTES[dtype], values / 2, blocks};
    unsigned char *memory[3];
    unsigned char *plane[3];
    for (int i = 0; i < 3; i++) {
        const size_t size = rows ? (rows - 1) * stride[i] + length[i] : 0;
        memory[i] = exactly(size + gap); /* the gap in front makes the plane unaligned */
        plane[i] = memory[i] + gap;
        for (size_t j = 0; j < size + gap; j++) {
            memory[i][j] = (unsigned char)random_bits();
        }
    }
    struct kvstore_pack_stats stats = {0, 0};
    EXPECT(kvstore_pack(codec_of(dtype, format, rule, 1), plane[0], rows, values,
                        (ptrdiff_t)stride[0], plane[1], (ptrdiff_t)stride[1], plane[2],
                        (ptrdiff_t)stride[2], &stats, NULL) == KVSTORE_OK);
    EXPECT(kvstore_pack(codec_of(dtype, format, rule, 1), plane[0], rows, values,
                        (ptrdiff_t)stride[0], plane[1], (ptrdiff_t)stride[1], plane[2],
                        (ptrdiff_t)stride[2], NULL, NULL) == KVSTORE_OK);
    uint64_t nan_scales = 0;
    for (size_t row = 0; row < rows; row++) {
        for (size_t i = 0; i < blocks; i++) {
            nan_scales += plane[2][row * stride[2] + i] == (format == KVSTORE_NVFP4 ? 0x7F : 0xFF);
        }
    }
    EXPECT(stats.nan_blocks == nan_scales);
    for (int target = 0; target < 3; target++) {
        const size_t row_bytes = values * BYTES[target];
        unsigned char *out = exactly(rows * row_bytes);
        unsigned char *last = rows ? out + (rows - 1) * row_bytes : out; /* rows run backwards */
        EXPECT(kvstore_unpack(codec_of(target, format, unpack_rule(format), 1), plane[1],
                              (ptrdiff_t)stride[1], plane[2], (ptrdiff_t)stride[2], rows, values,
                              last, -(ptrdiff_t)row_bytes) == KVSTORE_OK);
        free(out);
    }
    for (int i = 0; i < 3; i++) {
        free(memory[i]);
    }
}

static void special_values(void) {
    float values[16] = {0.25F, -0.0F, 0.75F, 6.0F, 1.25F, 2.5F, 3.5F, 5.0F};
    uint8_t nibbles[8];
    uint8_t scale;
    struct kvstore_pack_stats stats = {0, 0};
    const uint8_t expected[8] = {0x80, 0x72, 0x42, 0x66, 0, 0, 0, 0};
    EXPECT(kvstore_pack(codec_of(KVSTORE_F32, KVSTORE_NVFP4, KVSTORE_RULE_V41, 1), values, 1, 16, 0,
                        nibbles, 0, &scale, 0, &stats, NULL) == KVSTORE_OK);
    EXPECT(scale == 0x38 && memcmp(nibbles, expected, 8) == 0);

    values[3] = INFINITY;
    EXPECT(kvstore_pack(codec_of(KVSTORE_F32, KVSTORE_NVFP4, KVSTORE_RULE_TORCHAO, 0.5F), values, 1,
                        16, 0, nibbles, 0, &scale, 0, &stats, NULL) == KVSTORE_OK);
    EXPECT(scale == 0x7E && nibbles[1] == 0x70 && stats.inf_values == 1);

    values[15] = -NAN;
    EXPECT(kvstore_pack(codec_of(KVSTORE_F32, KVSTORE_NVFP4, KVSTORE_RULE_V41, 1), values, 1, 16, 0,
                        nibbles, 0, &scale, 0, &stats, NULL) == KVSTORE_OK);
    EXPECT(scale == 0x7F && nibbles[0] == 0 && stats.nan_blocks == 1);
    EXPECT(kvstore_unpack(codec_of(KVSTORE_F32, KVSTORE_NVFP4, unpack_rule(KVSTORE_NVFP4), 1),
                          nibbles, 0, &scale, 0, 1, 16, values, 0) == KVSTORE_OK);
    EXPECT(isnan(values[0]) && isnan(values[15]));
}

/* Every f32 exponent, every f16 and bf16 pattern: no shift or conversion may be undefined. */
static void every_exponent(int dtype, int format, int rule) {
    unsigned char *values = exactly(BLOCK[format] * BYTES[dtype]);
    uint8_t nibbles[16];
    uint8_t scales[1];
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        for (size_t i = 0; i < BLOCK[format]; i++) {
            if (dtype == KVSTORE_F32) {
                const uint32_t wide = bits << 16 | (uint32_t)i;
                memcpy(values + 4 * i, &wide, 4);
            } else {
                const uint16_t narrow = (uint16_t)(bits >> i);
                memcpy(values + 2 * i, &narrow, 2);
            }
        }
        EXPECT(kvstore_pack(codec_of(dtype, format, rule, 1), values, 1, BLOCK[format], 0, nibbles,
                            0, scales, 0, NULL, NULL) == KVSTORE_OK);
    }
    free(values);
}

static void every_scale_byte(void) {
    uint8_t nibbles[16];
    unsigned char values[32 * 4];
    for (size_t i = 0; i < 16; i++) {
        nibbles[i] = (uint8_t)(i << 4 | (15 - i));
    }
    for (int byte = 0; byte < 256; byte++) {
        const uint8_t scale[2] = {(uint8_t)byte, (uint8_t)byte};
        for (int dtype = 0; dtype < 3; dtype++) {
            EXPECT(kvstore_unpack(codec_of(dtype, KVSTORE_MXFP4, unpack_rule(KVSTORE_MXFP4), 1),
                                  nibbles, 16, scale, 2, 1, 32, values, 0) == KVSTORE_OK);
            for (int power = -100; power <= 100; power += 50) {
                EXPECT(kvstore_unpack(codec_of(dtype, KVSTORE_NVFP4, unpack_rule(KVSTORE_NVFP4),
                                               ldexpf(1, power)),
                                      nibbles, 16, scale, 2, 1, 32, values, 0) == KVSTORE_OK);
            }
        }
    }
}

static void bad_arguments(void) {
    float values[32] = {1};
    uint8_t memory[64];
    memset(memory, 0xA5, sizeof memory);
    uint8_t *nibbles = memory;
    uint8_t *scales = memory + 32;
    const struct {
        int format, rule;
        size_t row_values;
        ptrdiff_t nibble_stride;
        int code;
    } cases[] = {
        {1, 2, 16, 8, KVSTORE_ERR_SHAPE},
        {0, 0, 15, 8, KVSTORE_ERR_SHAPE},
        {0, 0, SIZE_MAX - 15, 8, KVSTORE_ERR_SHAPE},
        {0, 0, 16, 7, KVSTORE_ERR_STRIDE},
        {0, 0, 16, PTRDIFF_MAX, KVSTORE_ERR_STRIDE},
        {0, 0, 16, PTRDIFF_MIN, KVSTORE_ERR_STRIDE},
        {0, 0, 16, 29, KVSTORE_ERR_OVERLAP},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int code =
            kvstore_pack(codec_of(0, cases[i].format, cases[i].rule, 1), values, 2,
                         cases[i].row_values, 64, nibbles, cases[i].nibble_stride, scales, 1, NULL, NULL);
        if (code != cases[i].code) {
            fprintf(stderr, "case %zu returned %d\n", i, code);
            exit(1);
        }
    }
    EXPECT(kvstore_pack(codec_of(0, 0, 0, 1), NULL, 1, 16, 0, nibbles, 0, scales, 0, NULL, NULL) ==
           KVSTORE_ERR_NULL);
    EXPECT(kvstore_pack(codec_of(0, 0, 0, 1), NULL, 0, 16, 0, NULL, 0, NULL, 0, NULL, NULL) ==
           KVSTORE_OK);
    EXPECT(kvstore_unpack(codec_of(0, 0, 0, 1), nibbles, 8, scales, 1, 2, 16, memory + 8, 64) ==
           KVSTORE_ERR_OVERLAP);
    for (size_t i = 0; i < sizeof memory; i++) {
        EXPECT(memory[i] == 0xA5);
    }
}

void test_fp4(void) {
    for (int rule = KVSTORE_RULE_V41; rule <= KVSTORE_RULE_RCEIL; rule++) {
        const int format = rule <= KVSTORE_RULE_TORCHAO ? KVSTORE_NVFP4 : KVSTORE_MXFP4;
        for (int dtype = 0; dtype < 3; dtype++) {
            for (size_t rows = 0; rows < 5; rows++) {
                for (size_t blocks = 0; blocks < 11; blocks++) {
                    for (size_t gap = 0; gap < 8; gap += 1 + rows) {
                        any_shape(dtype, format, rule, rows, blocks, gap);
                    }
                }
            }
            every_exponent(dtype, format, rule);
        }
    }
    special_values();
    every_scale_byte();
    bad_arguments();
    puts("fp4: ok");
}
