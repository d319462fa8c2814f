/* Prepared codec, and kernel functions of each format and level. Private to native/src. */
#ifndef KVSTORE_CODEC_H
#define KVSTORE_CODEC_H

#include "kernels.h"

enum { SCALE_CODES = 256, E2M1_CODES = 16, MAGNITUDES_16 = 1 << 15 };

/* Kernels process a row: `count` consecutive values with their codes and scales. */
typedef void pack_row(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                      uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats);
typedef void unpack_row(const struct kvstore_codec *codec, const uint8_t *codes,
                        const uint8_t *scales, size_t count, unsigned char *values,
                        int is_streamed);

/* Limits of magnitudes with the same element under one scale. Eight cells of half an octave, the
 * first from 0 on and the last unbounded: magnitudes of cell k have element k, or k + 1 above
 * ends[k]. All are repeated to fill vectors. */
union cells {
    struct {
        uint16_t base[16], ends[16];
    } of_16;
    struct {
        uint32_t base[8], ends[8];
    } of_32;
};

/* Values of the 16 elements under one scale. */
union elements {
    uint8_t bytes[4][E2M1_CODES];  /* their lowest bytes, the next ones, ... */
    uint16_t of_16[2][E2M1_CODES]; /* numbers of 16 bits, twice */
    uint32_t of_32[E2M1_CODES];
};

typedef void squares_of_row(const unsigned char *values, const unsigned char *unpacked,
                            size_t count, int dtype, struct kvstore_pack_error *sums);

/* Sizes of a row of each format. A block of 0 values is the whole row. */
struct shape {
    size_t block, values_per_byte, scale_bytes;
};
static const struct shape SHAPE[] = {
    [KVSTORE_NVFP4] = {16, 2, 1},
    [KVSTORE_MXFP4] = {32, 2, 1},
    [KVSTORE_MXFP8] = {32, 1, 1},
    [KVSTORE_FP8] = {0, 1, 4},
};

struct kvstore_codec {
    /* Tables of results of the portable FP4 kernel for the faster ones, so that all are equal.
     * Magnitudes are the bits of a number without its sign. */
    union elements elements[SCALE_CODES];
    union cells cells[SCALE_CODES];
    /* Scale of a block by its largest magnitude; for f32 by its upper 16 bits, and the next scale
     * above the end of this one. */
    uint8_t scale_of[MAGNITUDES_16];
    uint32_t scale_ends[SCALE_CODES];
    uint32_t least; /* a block with a smaller largest magnitude, but not 0, has no cells */

    int dtype, format, rule;
    int is_short; /* elements of f32 that all have a lower half of 0 */
    float global_scale;
    size_t streamed_bytes; /* outputs of at least this size bypass the cache */
    pack_row *pack;
    unpack_row *unpack;
    squares_of_row *squares;
};

/* Infinity of the dtype, above the magnitude of every number. */
static inline uint32_t magnitude_infinity(int dtype) { return WIDE[dtype].top; }

/* Add the squared differences of a row's values and its dequantized codes. */
void measure_row(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                 const uint8_t *codes, const uint8_t *scales, struct kvstore_pack_error *sums);
squares_of_row squares_portable, squares_avx2;

int fp4_check(const struct kvstore_codec *codec);
void fp4_prepare(struct kvstore_codec *codec, int level);
pack_row fp4_pack_portable, fp8_pack_portable;
unpack_row fp4_unpack_portable, fp8_unpack_portable;

/* Bytes of a row of `values` values. Returns OK or SHAPE. */
struct row_bytes {
    size_t values, codes, scales;
    int is_joinable; /* consecutive rows form one row: rows have no scale of their own */
};
int codec_row(const struct kvstore_codec *codec, size_t values, struct row_bytes *row);

/* Fence non-temporal stores, once per call: a fence per row loses most of their gain. */
void end_stream(int is_streamed);

#if defined(__x86_64__)
#define KVSTORE_HAS_X86 1
pack_row fp4_pack_avx2, fp4_pack_avx512;
unpack_row fp4_unpack_avx2, fp4_unpack_avx512;
#endif

#endif
