/* The public functions: checks, the choice of kernels, and the walk over rows. */
#include "codec.h"

#ifdef KVSTORE_HAS_AVX2
#include <xmmintrin.h>
#endif

/* How a row of each format is laid out. A block of 0 values is the whole row. */
static const struct shape {
    size_t block, values_per_byte, scale_bytes;
} SHAPE[] = {
    [KVSTORE_NVFP4] = {16, 2, 1},
    [KVSTORE_MXFP4] = {32, 2, 1},
    [KVSTORE_MXFP8] = {32, 1, 1},
    [KVSTORE_FP8] = {0, 1, 4},
};

int kvstore_level(void) {
#ifdef KVSTORE_HAS_AVX2
    if (__builtin_cpu_supports("avx2")) {
        return KVSTORE_LEVEL_AVX2;
    }
#endif
    return KVSTORE_LEVEL_PORTABLE;
}

size_t kvstore_codec_bytes(void) { return sizeof(struct kvstore_codec); }

static int check_fp8(const struct kvstore_codec *codec) {
    const int rule = codec->format == KVSTORE_MXFP8 ? KVSTORE_RULE_RCEIL : KVSTORE_RULE_AMAX;
    if (codec->rule != rule) {
        return KVSTORE_ERR_RULE;
    }
    return codec->global_scale == 1.0F ? KVSTORE_OK : KVSTORE_ERR_GLOBAL_SCALE;
}

int kvstore_codec_prepare(struct kvstore_codec *codec, int dtype, int format, int rule,
                          float global_scale, int level, size_t streamed_bytes) {
    if (codec == NULL) {
        return KVSTORE_ERR_NULL;
    }
    if ((uintptr_t)codec % 64 != 0) {
        return KVSTORE_ERR_ALIGN;
    }
    if (dtype != KVSTORE_F32 && dtype != KVSTORE_F16 && dtype != KVSTORE_BF16) {
        return KVSTORE_ERR_DTYPE;
    }
    if (format < KVSTORE_NVFP4 || format > KVSTORE_FP8) {
        return KVSTORE_ERR_FORMAT;
    }
    if (level < KVSTORE_LEVEL_PORTABLE || level > kvstore_level()) {
        return KVSTORE_ERR_LEVEL;
    }
    codec->dtype = dtype;
    codec->format = format;
    codec->rule = rule;
    codec->global_scale = global_scale;
    codec->streamed_bytes = streamed_bytes;
    const int is_fp4 = format == KVSTORE_NVFP4 || format == KVSTORE_MXFP4;
    const int code = is_fp4 ? fp4_check(codec) : check_fp8(codec);
    if (code != KVSTORE_OK) {
        return code;
    }
    if (is_fp4) {
        fp4_prepare(codec, level);
    } else {
        codec->pack = fp8_pack_portable;
        codec->unpack = fp8_unpack_portable;
    }
    return KVSTORE_OK;
}

/* The rows of one call: where the next row of each buffer starts, and how many there are. */
struct walk {
    size_t rows, count, value_bytes, code_bytes, scale_bytes;
    ptrdiff_t value_stride, code_stride, scale_stride;
};

/* Check a call, and make one row of rows that follow each other. A walk of no rows is no error. */
static int plan_walk(const struct kvstore_codec *codec, struct walk *walk, const void *values,
                     const void *codes, const void *scales, int is_unpack) {
    const struct shape shape = SHAPE[codec->format];
    /* A row of FP8 has a scale, so it cannot be empty. */
    const int fits = shape.block ? walk->count % shape.block == 0 : walk->count > 0;
    if (!fits || walk->count > (size_t)PTRDIFF_MAX / 4) {
        return KVSTORE_ERR_SHAPE;
    }
    if (walk->rows == 0 || walk->count == 0) {
        walk->rows = 0;
        return KVSTORE_OK;
    }
    walk->value_bytes = walk->count * WIDE_BYTES[codec->dtype];
    walk->code_bytes = walk->count / shape.values_per_byte;
    walk->scale_bytes = (shape.block ? walk->count / shape.block : 1) * shape.scale_bytes;
    const struct plane wide = {values, walk->value_bytes, walk->value_stride};
    const struct plane narrow[2] = {{codes, walk->code_bytes, walk->code_stride},
                                    {scales, walk->scale_bytes, walk->scale_stride}};
    const struct plane packing[3] = {narrow[0], narrow[1], wide};
    const struct plane unpacking[3] = {wide, narrow[0], narrow[1]};
    const int code = check(is_unpack ? unpacking : packing, is_unpack ? 1 : 2, walk->rows);
    if (code != KVSTORE_OK) {
        return code;
    }
    if (shape.block && walk->value_stride == (ptrdiff_t)walk->value_bytes &&
        walk->code_stride == (ptrdiff_t)walk->code_bytes &&
        walk->scale_stride == (ptrdiff_t)walk->scale_bytes) {
        walk->count *= walk->rows; /* no overflow: check() found that all of it has addresses */
        walk->rows = 1;
    }
    return KVSTORE_OK;
}

int kvstore_pack(const struct kvstore_codec *codec, const void *values, size_t rows,
                 size_t row_values, ptrdiff_t value_stride, uint8_t *codes, ptrdiff_t code_stride,
                 uint8_t *scales, ptrdiff_t scale_stride, struct kvstore_pack_stats *stats) {
    struct walk walk = {.rows = rows,
                        .count = row_values,
                        .value_stride = value_stride,
                        .code_stride = code_stride,
                        .scale_stride = scale_stride};
    const int code = plan_walk(codec, &walk, values, codes, scales, 0);
    if (code != KVSTORE_OK) {
        return code;
    }
    struct kvstore_pack_stats unused = {0, 0};
    for (size_t row = 0; row < walk.rows; row++) {
        codec->pack(codec, (const unsigned char *)values + (ptrdiff_t)row * value_stride,
                    walk.count, codes + (ptrdiff_t)row * code_stride,
                    scales + (ptrdiff_t)row * scale_stride, stats ? stats : &unused);
    }
    return KVSTORE_OK;
}

int kvstore_unpack(const struct kvstore_codec *codec, const uint8_t *codes, ptrdiff_t code_stride,
                   const uint8_t *scales, ptrdiff_t scale_stride, size_t rows, size_t row_values,
                   void *values, ptrdiff_t value_stride) {
    struct walk walk = {.rows = rows,
                        .count = row_values,
                        .value_stride = value_stride,
                        .code_stride = code_stride,
                        .scale_stride = scale_stride};
    const int code = plan_walk(codec, &walk, values, codes, scales, 1);
    if (code != KVSTORE_OK) {
        return code;
    }
    const int is_streamed = walk.rows && walk.rows * walk.value_bytes >= codec->streamed_bytes;
    for (size_t row = 0; row < walk.rows; row++) {
        codec->unpack(codec, codes + (ptrdiff_t)row * code_stride,
                      scales + (ptrdiff_t)row * scale_stride, walk.count,
                      (unsigned char *)values + (ptrdiff_t)row * value_stride, is_streamed);
    }
#ifdef KVSTORE_HAS_AVX2
    if (is_streamed) {
        _mm_sfence(); /* once a call: after every row it costs most of the gain */
    }
#endif
    return KVSTORE_OK;
}
