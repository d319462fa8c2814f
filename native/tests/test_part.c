/* Sums, and parts that are verified as they are handed out, under sanitizers: every buffer is a
 * heap block of its exact size. Values of sums are checked in tests/codec/test_parts.py; here, that
 * levels agree, that a part is the same sum however it is cut, and what is refused. */
#include "testing.h"

static uint64_t sum_of(const uint8_t *data, size_t bytes, int level) {
    uint64_t sum = 0;
    EXPECT(kvstore_xxh3_64(data, bytes, level, &sum) == KVSTORE_OK);
    return sum;
}

static uint8_t *random_bytes(size_t bytes) {
    uint8_t *memory = exactly(bytes);
    for (size_t i = 0; i < bytes; i++) {
        memory[i] = (uint8_t)random_bits();
    }
    return memory;
}

static void every_length(void) {
    for (size_t bytes = 0; bytes < 2200; bytes += bytes < 300 ? 1 : 37) {
        uint8_t *data = random_bytes(bytes);
        EXPECT(sum_of(data, bytes, test_level) == sum_of(data, bytes, KVSTORE_LEVEL_PORTABLE));
        free(data);
    }
}

/* Copy rows of `row` bytes, `gap` apart, in units: every byte must come, and none beside them. */
static void copied(size_t units, size_t rows, size_t row, size_t gap, size_t streamed_bytes) {
    const size_t all = units * rows, bytes = all * (row + 3), stride = row + gap;
    uint8_t *part = random_bytes(bytes);
    uint8_t *target = exactly(all * stride), *other = exactly(all * 3);
    memset(target, 0xA5, all * stride);
    const struct kvstore_segment segments[] = {
        {NULL, units, rows, row, target, (ptrdiff_t)stride},
        {NULL, units, rows, 3, all > 0 ? other + (all - 1) * 3 : other, -3},
    };
    const uint64_t sum = sum_of(part, bytes, 0);
    EXPECT(kvstore_read_part(part, bytes, sum, segments, 2, test_level, streamed_bytes) ==
           KVSTORE_OK);
    for (size_t i = 0; i < all; i++) {
        const uint8_t *unit = part + i / rows * rows * (row + 3);
        EXPECT(memcmp(target + i * stride, unit + i % rows * row, row) == 0);
        EXPECT(memcmp(other + (all - 1 - i) * 3, unit + rows * row + i % rows * 3, 3) == 0);
        for (size_t j = row; j < stride; j++) {
            EXPECT(target[i * stride + j] == 0xA5);
        }
    }
    EXPECT(kvstore_read_part(part, bytes, sum + 1, segments, 2, test_level, streamed_bytes) ==
           KVSTORE_ERR_SUM);
    free(part);
    free(target);
    free(other);
}

/* What is unpacked is what kvstore_unpack unpacks, from every format to every dtype. */
static void unpacked(int format, int rule, size_t values, size_t codes, size_t scales) {
    enum { UNITS = 3, ROWS = 5 };
    const size_t unit = ROWS * (codes + scales), bytes = UNITS * unit;
    uint8_t *part = random_bytes(bytes);
    for (int dtype = 0; dtype < 3; dtype++) {
        const size_t row = values * BYTES[dtype];
        uint8_t *target = exactly(UNITS * ROWS * row), *expected = exactly(ROWS * row);
        const struct kvstore_codec *codec = codec_of(dtype, format, rule, 1);
        const struct kvstore_segment segment = {codec, UNITS, ROWS, values, target, (ptrdiff_t)row};
        EXPECT(kvstore_read_part(part, bytes, sum_of(part, bytes, 0), &segment, 1, test_level,
                                 dtype ? 0 : SIZE_MAX) == KVSTORE_OK);
        for (size_t i = 0; i < UNITS; i++) {
            EXPECT(kvstore_unpack(codec, part + i * unit, (ptrdiff_t)codes,
                                  part + i * unit + ROWS * codes, (ptrdiff_t)scales, ROWS, values,
                                  expected, (ptrdiff_t)row) == KVSTORE_OK);
            EXPECT(memcmp(target + i * ROWS * row, expected, ROWS * row) == 0);
        }
        free(target);
        free(expected);
    }
    free(part);
}

static void refused(void) {
    uint8_t part[64] = {0}, target[64];
    memset(target, 0xA5, sizeof target);
    const struct kvstore_codec *codec = codec_of(0, KVSTORE_NVFP4, KVSTORE_RULE_V41, 1);
    const struct {
        struct kvstore_segment first, second;
        size_t part_bytes;
        int code;
    } cases[] = {
        {{NULL, 1, 2, 8, target, 8}, {NULL, 1, 1, 8, target + 16, 0}, 25, KVSTORE_ERR_SHAPE},
        {{NULL, 1, 2, 8, target, 8}, {NULL, 1, 1, 8, target + 16, 0}, 23, KVSTORE_ERR_SHAPE},
        {{NULL, 1, 2, 8, target, 8}, {NULL, 2, 1, 8, target + 16, 8}, 24, KVSTORE_ERR_SHAPE},
        {{NULL, SIZE_MAX, 2, 8, target, 8}, {0}, 24, KVSTORE_ERR_SHAPE},
        {{NULL, 2, SIZE_MAX, 8, target, 8}, {0}, 24, KVSTORE_ERR_SHAPE},
        {{NULL, SIZE_MAX / 2 + 2, 2, 8, target, 8}, {0}, 16, KVSTORE_ERR_SHAPE},
        {{NULL, 1, SIZE_MAX / 8 + 3, 8, target, 8}, {0}, 16, KVSTORE_ERR_SHAPE},
        {{codec, 1, 1, 8, target, 8}, {0}, 24, KVSTORE_ERR_SHAPE},
        {{NULL, 1, 2, 8, NULL, 8}, {NULL, 1, 1, 8, target + 16, 0}, 24, KVSTORE_ERR_NULL},
        {{NULL, 1, 2, 8, target, 7}, {NULL, 1, 1, 8, target + 16, 0}, 24, KVSTORE_ERR_STRIDE},
        {{NULL, 1, 2, 8, target, PTRDIFF_MIN}, {NULL, 1, 1, 8, target, 0}, 24, KVSTORE_ERR_STRIDE},
        {{NULL, 1, 2, 8, target, 8}, {NULL, 1, 1, 8, target + 15, 0}, 24, KVSTORE_ERR_OVERLAP},
        {{NULL, 1, 2, 8, target, 12}, {NULL, 1, 2, 5, target + 8, 12}, 26, KVSTORE_ERR_OVERLAP},
        {{NULL, 1, 2, 8, part + 23, 8}, {NULL, 1, 1, 8, target, 0}, 24, KVSTORE_ERR_OVERLAP},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct kvstore_segment segments[] = {cases[i].first, cases[i].second};
        const int code =
            kvstore_read_part(part, cases[i].part_bytes, 0, segments, 2, test_level, 0);
        if (code != cases[i].code) {
            fprintf(stderr, "case %zu returned %d\n", i, code);
            exit(1);
        }
    }
    const struct kvstore_segment segment = {NULL, 1, 1, 8, target, 8};
    EXPECT(kvstore_read_part(NULL, 8, 0, &segment, 1, test_level, 0) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_read_part(part, 8, 0, NULL, 1, test_level, 0) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_read_part(part, 8, 0, &segment, 1, -1, 0) == KVSTORE_ERR_LEVEL);
    EXPECT(kvstore_read_part(part, 8, 0, &segment, 1, kvstore_level() + 1, 0) == KVSTORE_ERR_LEVEL);
    EXPECT(kvstore_read_part(part, SIZE_MAX, 0, &segment, 1, test_level, 0) == KVSTORE_ERR_SHAPE);
    EXPECT(kvstore_read_part(NULL, 0, sum_of(NULL, 0, 0), NULL, 0, test_level, 0) == KVSTORE_OK);
    uint64_t sum = 7;
    EXPECT(kvstore_xxh3_64(part, 1, -1, &sum) == KVSTORE_ERR_LEVEL);
    EXPECT(kvstore_xxh3_64(part, 1, kvstore_level() + 1, &sum) == KVSTORE_ERR_LEVEL);
    EXPECT(kvstore_xxh3_64(NULL, 1, 0, &sum) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_xxh3_64(part, 1, 0, NULL) == KVSTORE_ERR_NULL);
    EXPECT(sum == 7);
    for (size_t i = 0; i < sizeof target; i++) {
        EXPECT(target[i] == 0xA5);
    }
}

void test_part(void) {
    every_length();
    const size_t row[] = {0, 1, 4, 15, 16, 21, 32, 64, 100, 128, 129, 192, 256, 1000};
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        for (size_t rows = 0; rows < 70; rows += rows < 4 ? 1 : 31) {
            for (size_t units = 0; units < 4; units++) {
                copied(units, rows, row[i], 0, SIZE_MAX);
                copied(units, rows, row[i], 7, SIZE_MAX);
                copied(units, rows, row[i], 16, 0);
            }
        }
    }
    unpacked(KVSTORE_NVFP4, KVSTORE_RULE_TORCHAO, 48, 24, 3);
    unpacked(KVSTORE_NVFP4, KVSTORE_RULE_TORCHAO, 16384, 8192, 1024);
    unpacked(KVSTORE_MXFP4, KVSTORE_RULE_FLOOR, 96, 48, 3);
    unpacked(KVSTORE_MXFP8, KVSTORE_RULE_RCEIL, 64, 64, 2);
    unpacked(KVSTORE_FP8, KVSTORE_RULE_AMAX, 10, 10, 4);
    refused();
    puts("part: ok");
}
