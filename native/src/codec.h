/* A prepared codec, and what the kernels of each format and level offer. Private to native/src. */
#ifndef KVSTORE_CODEC_H
#define KVSTORE_CODEC_H

#include "kernels.h"

enum { SCALE_CODES = 256, E2M1_CODES = 16, MAGNITUDES_16 = 1 << 15 };

/* Kernels work on a row: `count` values that follow each other, with their codes and scales. */
typedef void pack_row(const struct kvstore_codec *codec, const unsigned char *values, size_t count,
                      uint8_t *codes, uint8_t *scales, struct kvstore_pack_stats *stats);
typedef void unpack_row(const struct kvstore_codec *codec, const uint8_t *codes,
                        const uint8_t *scales, size_t count, unsigned char *values,
                        int is_streamed);

struct kvstore_codec {
    /* Answers of the portable FP4 kernel to every question that a faster one asks, so that the
     * two cannot differ. */
    /* What the 16 elements mean under a scale: their lowest bytes, the next ones, ... */
    uint8_t elements[SCALE_CODES][4][E2M1_CODES];
    /* Under a scale, the largest magnitude whose element is at most k, taken from 0x7FFF, in both
     * halves. Magnitudes are bits of 16: those of f16 and bf16; of f32 see narrow() in
     * fp4_avx2.c. */
    uint32_t flipped_ends[SCALE_CODES][8];
    uint8_t scale_of[MAGNITUDES_16]; /* the scale of a block with this largest magnitude */

    int dtype, format, rule;
    int is_short; /* elements of f32 that all have a lower half of 0 */
    float global_scale;
    size_t streamed_bytes; /* outputs from this size on do not pass through the cache */
    pack_row *pack;
    unpack_row *unpack;
};

int fp4_check(const struct kvstore_codec *codec);
void fp4_prepare(struct kvstore_codec *codec, int level);
pack_row fp4_pack_portable, fp8_pack_portable;
unpack_row fp4_unpack_portable, fp8_unpack_portable;

#if defined(__x86_64__)
#define KVSTORE_HAS_AVX2 1
pack_row fp4_pack_avx2;
unpack_row fp4_unpack_avx2;
#endif

#endif
