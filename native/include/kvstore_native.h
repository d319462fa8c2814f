/* kvstore native kernels: the C contract. Comments here are the manual.
 *
 * No function allocates, keeps state, prints or exits; every one may run in any thread. A function
 * that returns a code returns KVSTORE_OK or a negative one, and then its outputs are untouched. */
#ifndef KVSTORE_NATIVE_H
#define KVSTORE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

/* Version of this contract. Python refuses a module built from another one. */
int kvstore_native_version(void);

enum {
    KVSTORE_OK = 0,
    KVSTORE_ERR_DTYPE = -1,        /* no such element type */
    KVSTORE_ERR_FORMAT = -2,       /* no such format, or not one of the function's */
    KVSTORE_ERR_RULE = -3,         /* no such scale rule for the format */
    KVSTORE_ERR_GLOBAL_SCALE = -4, /* outside [2^-100, 2^100], or not 1 where it must be */
    KVSTORE_ERR_SHAPE = -5,        /* row_values does not fill blocks, or is 0 for FP8 */
    KVSTORE_ERR_NULL = -6,         /* a null pointer to something that is not empty */
    KVSTORE_ERR_STRIDE = -7,       /* output rows overlap, or a plane exceeds the address space */
    KVSTORE_ERR_OVERLAP = -8       /* an output shares bytes with another buffer */
};

/* Element types of the wide side. Native byte order; no alignment is needed. */
enum { KVSTORE_F32 = 0, KVSTORE_F16 = 1, KVSTORE_BF16 = 2 };

/* FP4 formats: E2M1 values in blocks that share one scale byte. docs/format.md, section 3.
 *   NVFP4  16 values, scale E4M3, value = e2m1 * e4m3 * global_scale
 *   MXFP4  32 values, scale E8M0 (byte e means 2^(e - 127)), value = e2m1 * 2^(e - 127) */
enum { KVSTORE_NVFP4 = 0, KVSTORE_MXFP4 = 1 };

/* FP8 formats: E4M3 codes (largest 448, no infinity, NaN 0x7F and 0xFF).
 *   MXFP8  32 values, scale E8M0, value = e4m3 * 2^(e - 127)
 *   FP8    a whole row, scale a float32 in 4 bytes, the lowest first, value = e4m3 * scale */
enum { KVSTORE_MXFP8 = 2, KVSTORE_FP8 = 3 };

/* How a packer chooses a block's scale from its largest magnitude, amax.
 *   V41      NVFP4  e4m3(max(amax, 6 * 2^-9) / 6); elements are divided by it. global_scale is 1.
 *   TORCHAO  NVFP4  e4m3(amax / 6 / global_scale), at least 2^-6; elements are multiplied by the
 *                   float reciprocal.
 *   FLOOR    MXFP4  the exponent of amax, minus 2 (OCP Microscaling): amax may saturate
 *   EVEN     MXFP4  the same after rounding amax to two significant bits: 1.75 * 2^k goes up
 *   RCEIL    MXFP4  2^ceil(log2(amax / 6)): amax never saturates
 *   RCEIL    MXFP8  2^ceil(log2(amax / 448)): amax never saturates
 *   AMAX     FP8    amax / 448, rounded to a float32; amax is the largest finite magnitude
 * A scale never exceeds the largest finite one: 448, 2^127, or the largest float / 448. */
enum {
    KVSTORE_RULE_V41 = 0,
    KVSTORE_RULE_TORCHAO = 1,
    KVSTORE_RULE_FLOOR = 2,
    KVSTORE_RULE_EVEN = 3,
    KVSTORE_RULE_RCEIL = 4,
    KVSTORE_RULE_AMAX = 5
};

/* What a packer met. Both counts are added to, so one object can sum over calls. */
struct kvstore_pack_stats {
    uint64_t nan_blocks; /* blocks, or rows of FP8, that hold a NaN and were stored as all NaN */
    uint64_t inf_values; /* infinities in the input */
};

/* Pack rows of numbers to FP4.
 *
 * values   in:  [rows, row_values] of dtype. Row r starts value_stride * r bytes after values.
 * nibbles  out: [rows, row_values / 2]. Value 2i is the low half of byte i, value 2i + 1 the high.
 * scales   out: [rows, row_values / block].
 * stats    in/out: counts are added; may be null.
 *
 * Elements are rounded to nearest, ties to even; magnitudes above 6 scales saturate; the sign of
 * zero is kept. A NaN anywhere makes its block NaN: scale 0x7F (NVFP4) or 0xFF (MXFP4), nibbles 0.
 * An infinity saturates, and so does the scale of its block.
 *
 * Strides are in bytes and may be negative; rows of values may repeat (stride 0). Rows of nibbles
 * and scales may interleave, as in an entry that ends with its scales, but no byte may be in two
 * buffers. Subnormals count, even in a thread that flushes them to zero; the rounding mode must be
 * the default one.
 *
 * Returns any of the codes above. */
int kvstore_fp4_pack(const void *values, int dtype, size_t rows, size_t row_values,
                     ptrdiff_t value_stride, int format, int rule, float global_scale,
                     uint8_t *nibbles, ptrdiff_t nibble_stride, uint8_t *scales,
                     ptrdiff_t scale_stride, struct kvstore_pack_stats *stats);

/* Unpack rows of FP4 to numbers: the exact product, rounded once to dtype, to nearest even.
 *
 * nibbles  in:  [rows, row_values / 2].
 * scales   in:  [rows, row_values / block].
 * values   out: [rows, row_values] of dtype.
 *
 * A NaN scale makes its block the quiet NaN 0x7FC00000, 0x7E00 or 0x7FC0. What exceeds dtype
 * becomes infinite. Bit 7 of an E4M3 scale, which no packer sets, is its sign.
 * global_scale is 1 for MXFP4. Strides and buffers as for kvstore_fp4_pack.
 *
 * Returns any of the codes above but KVSTORE_ERR_RULE. */
int kvstore_fp4_unpack(const uint8_t *nibbles, ptrdiff_t nibble_stride, const uint8_t *scales,
                       ptrdiff_t scale_stride, size_t rows, size_t row_values, int format,
                       float global_scale, void *values, int dtype, ptrdiff_t value_stride);

/* Pack rows of numbers to FP8.
 *
 * values  in:  [rows, row_values] of dtype.
 * codes   out: [rows, row_values].
 * scales  out: [rows, row_values / 32] for MXFP8, [rows, 4] for FP8.
 * stats   in/out: counts are added; may be null.
 *
 * A code is the one nearest to the exact quotient of value and scale, ties to even; magnitudes
 * above 448 scales saturate; the sign of zero is kept. A NaN anywhere makes its block NaN: scale
 * 0xFF (MXFP8) or 0x7FC00000 (FP8), codes 0. An infinity becomes 448 scales. In MXFP8 it saturates
 * the scale too; in FP8 it does not count for amax, unless the finite values of its row are all
 * zero: then amax is the largest float. A row of zeros has scale 0 (byte 0 in MXFP8); any other
 * row of FP8 has at least 2^-149.
 *
 * Strides, buffers and subnormals as for kvstore_fp4_pack. A row of FP8 holds at least one value.
 *
 * Returns any of the codes above but KVSTORE_ERR_GLOBAL_SCALE. */
int kvstore_fp8_pack(const void *values, int dtype, size_t rows, size_t row_values,
                     ptrdiff_t value_stride, int format, int rule, uint8_t *codes,
                     ptrdiff_t code_stride, uint8_t *scales, ptrdiff_t scale_stride,
                     struct kvstore_pack_stats *stats);

/* Unpack rows of FP8 to numbers: the exact product, rounded once to dtype, to nearest even.
 *
 * codes   in:  [rows, row_values].
 * scales  in:  [rows, row_values / 32] for MXFP8, [rows, 4] for FP8.
 * values  out: [rows, row_values] of dtype.
 *
 * A NaN code or scale, and zero times an infinite scale, is the quiet NaN 0x7FC00000, 0x7E00 or
 * 0x7FC0. What exceeds dtype becomes infinite. Scales that no packer writes, negative or infinite,
 * are taken as the numbers that they are.
 *
 * Returns any of the codes above but KVSTORE_ERR_RULE and KVSTORE_ERR_GLOBAL_SCALE. */
int kvstore_fp8_unpack(const uint8_t *codes, ptrdiff_t code_stride, const uint8_t *scales,
                       ptrdiff_t scale_stride, size_t rows, size_t row_values, int format,
                       void *values, int dtype, ptrdiff_t value_stride);

/* cffi: end */

#endif
