/* Public functions: checks, choice of kernels, loops over rows. */
#include "codec.h"

#ifdef KVSTORE_HAS_X86
#include <xmmintrin.h>
#endif

#ifdef KVSTORE_EMULATE_AVX512
enum { AVX512_IS_EMULATED = 1 };
#else
enum { AVX512_IS_EMULATED = 0 };
#endif

enum {
    MEASURED_VALUES = 4096, /* quantized, then measured, in the second-level cache */
    LINE = 64,
    AHEAD = 8 /* entries prefetched while one is dequantized; 4 to 16 perform alike */
};

int kvstore_level(void) {
#ifdef KVSTORE_HAS_X86
    if (AVX512_IS_EMULATED ||
        (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi"))) {
        return KVSTORE_LEVEL_AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
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
    codec->squares = squares_portable;
#ifdef KVSTORE_HAS_X86
    if (level >= KVSTORE_LEVEL_AVX2) {
        codec->squares = squares_avx2;
    }
#endif
    if (is_fp4) {
        fp4_prepare(codec, level);
    } else {
        codec->pack = fp8_pack_portable;
        codec->unpack = fp8_unpack_portable;
    }
    return KVSTORE_OK;
}

/* Rows of one call: the next row of each buffer, and the number of rows. */
struct walk {
    size_t rows, count, value_bytes, code_bytes, scale_bytes;
    ptrdiff_t value_stride, code_stride, scale_stride;
};

/* Compute the size of a row. No rows, or empty rows, are no error. */
static int measure(const struct kvstore_codec *codec, struct walk *walk) {
    const struct shape shape = SHAPE[codec->format];
    /* A row of FP8 has a scale, so it cannot be empty. */
    const int fits = shape.block ? walk->count % shape.block == 0 : walk->count > 0;
    if (!fits || walk->count > (size_t)PTRDIFF_MAX / 4) {
        return KVSTORE_ERR_SHAPE;
    }
    walk->rows = walk->count ? walk->rows : 0;
    walk->value_bytes = walk->count * WIDE_BYTES[codec->dtype];
    walk->code_bytes = walk->count / shape.values_per_byte;
    walk->scale_bytes = (shape.block ? walk->count / shape.block : 1) * shape.scale_bytes;
    return KVSTORE_OK;
}

int codec_row(const struct kvstore_codec *codec, size_t values, struct row_bytes *row) {
    struct walk walk = {.rows = 1, .count = values};
    const int code = measure(codec, &walk);
    *row = (struct row_bytes){walk.value_bytes, walk.code_bytes, walk.scale_bytes,
                              SHAPE[codec->format].block != 0};
    return code;
}

/* Check a call, and join consecutive rows to one row. */
static int plan_walk(const struct kvstore_codec *codec, struct walk *walk, const void *values,
                     const void *codes, const void *scales, int is_unpack) {
    const int failed = measure(codec, walk);
    if (failed || walk->rows == 0) {
        return failed;
    }
    const struct plane wide = {values, walk->value_bytes, walk->value_stride};
    const struct plane narrow[2] = {{codes, walk->code_bytes, walk->code_stride},
                                    {scales, walk->scale_bytes, walk->scale_stride}};
    const struct plane packing[3] = {narrow[0], narrow[1], wide};
    const struct plane unpacking[3] = {wide, narrow[0], narrow[1]};
    const int code = check(is_unpack ? unpacking : packing, is_unpack ? 1 : 2, walk->rows);
    if (code != KVSTORE_OK) {
        return code;
    }
    if (SHAPE[codec->format].block && walk->value_stride == (ptrdiff_t)walk->value_bytes &&
        walk->code_stride == (ptrdiff_t)walk->code_bytes &&
        walk->scale_stride == (ptrdiff_t)walk->scale_bytes) {
        walk->count *= walk->rows; /* no overflow: check() found that all rows have addresses */
        walk->value_bytes *= walk->rows;
        walk->rows = 1;
    }
    return KVSTORE_OK;
}

/* Quantize a row in chunks, and measure each while its values are in the cache. */
static void pack_measured(const struct kvstore_codec *codec, const unsigned char *values,
                          size_t count, uint8_t *codes, uint8_t *scales,
                          struct kvstore_pack_stats *stats, struct kvstore_pack_error *error) {
    const struct shape shape = SHAPE[codec->format];
    const size_t most = shape.block ? MEASURED_VALUES : count;
    for (size_t i = 0; i < count; i += most) {
        const size_t chunk = count - i < most ? count - i : most;
        const unsigned char *from = values + i * WIDE_BYTES[codec->dtype];
        uint8_t *chunk_codes = codes + i / shape.values_per_byte;
        uint8_t *chunk_scales = scales + (shape.block ? i / shape.block * shape.scale_bytes : 0);
        codec->pack(codec, from, chunk, chunk_codes, chunk_scales, stats);
        measure_row(codec, from, chunk, chunk_codes, chunk_scales, error);
    }
}

int kvstore_pack(const struct kvstore_codec *codec, const void *values, size_t rows,
                 size_t row_values, ptrdiff_t value_stride, uint8_t *codes, ptrdiff_t code_stride,
                 uint8_t *scales, ptrdiff_t scale_stride, struct kvstore_pack_stats *stats,
                 struct kvstore_pack_error *error) {
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
        const unsigned char *from = (const unsigned char *)values + (ptrdiff_t)row * value_stride;
        uint8_t *row_codes = codes + (ptrdiff_t)row * code_stride;
        uint8_t *row_scales = scales + (ptrdiff_t)row * scale_stride;
        if (error) {
            pack_measured(codec, from, walk.count, row_codes, row_scales, stats ? stats : &unused,
                          error);
        } else {
            codec->pack(codec, from, walk.count, row_codes, row_scales, stats ? stats : &unused);
        }
    }
    return KVSTORE_OK;
}

static int passes_the_cache(const struct kvstore_codec *codec, const struct walk *walk) {
    return walk->rows && walk->rows * walk->value_bytes >= codec->streamed_bytes;
}

void end_stream(int is_streamed) {
#ifdef KVSTORE_HAS_X86
    if (is_streamed) {
        _mm_sfence();
    }
#else
    (void)is_streamed;
#endif
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
    const int is_streamed = passes_the_cache(codec, &walk);
    for (size_t row = 0; row < walk.rows; row++) {
        codec->unpack(codec, codes + (ptrdiff_t)row * code_stride,
                      scales + (ptrdiff_t)row * scale_stride, walk.count,
                      (unsigned char *)values + (ptrdiff_t)row * value_stride, is_streamed);
    }
    end_stream(is_streamed);
    return KVSTORE_OK;
}

/* Bytes from the lowest to the highest of a plane of a pool; 0 if they exceed the address space. */
static size_t pool_span(const struct plane *page, size_t pages, size_t entries, ptrdiff_t stride) {
    const struct plane whole = {page->data, span_of(page, entries), stride};
    return whole.row_bytes ? span_of(&whole, pages) : 0;
}

static uintptr_t pool_lowest(const struct plane *page, size_t pages, size_t entries,
                             ptrdiff_t stride) {
    const struct plane whole = {(const void *)lowest_of(page, entries), 0, stride};
    return lowest_of(&whole, pages);
}

static int check_gather(const struct walk *walk, const struct kvstore_entries *entries,
                        const int64_t *index, const void *values) {
    const struct plane out = {values, walk->value_bytes, walk->value_stride};
    const struct plane page[2] = {{entries->codes, walk->code_bytes, entries->code_stride},
                                  {entries->scales, walk->scale_bytes, entries->scale_stride}};
    const ptrdiff_t page_stride[2] = {entries->code_page_stride, entries->scale_page_stride};
    if (index == NULL || values == NULL || entries->codes == NULL || entries->scales == NULL) {
        return KVSTORE_ERR_NULL;
    }
    const size_t pages = entries->pool_pages, in_page = entries->page_entries;
    if (pages == 0 || in_page == 0) {
        return KVSTORE_ERR_INDEX;
    }
    const size_t out_span = span_of(&out, walk->rows);
    if (out_span == 0 || (walk->rows > 1 && magnitude_of(out.stride) < out.row_bytes)) {
        return KVSTORE_ERR_STRIDE;
    }
    for (int i = 0; i < 2; i++) {
        const size_t span = pool_span(&page[i], pages, in_page, page_stride[i]);
        if (span == 0) {
            return KVSTORE_ERR_STRIDE;
        }
        const uintptr_t low = pool_lowest(&page[i], pages, in_page, page_stride[i]);
        const uintptr_t out_low = lowest_of(&out, walk->rows);
        if (out_low < low + span && low < out_low + out_span) {
            return KVSTORE_ERR_OVERLAP;
        }
    }
    const size_t known = entries->table ? entries->table_pages : pages;
    for (size_t i = 0; entries->table && i < entries->table_pages; i++) {
        if (entries->table[i] < 0 || (uint64_t)entries->table[i] >= pages) {
            return KVSTORE_ERR_INDEX;
        }
    }
    for (size_t i = 0; i < walk->rows; i++) {
        if (index[i] < 0 || (uint64_t)index[i] / in_page >= known) {
            return KVSTORE_ERR_INDEX;
        }
    }
    return KVSTORE_OK;
}

/* Addresses of one entry. */
struct entry_address {
    const uint8_t *codes, *scales;
};

/* Compute the addresses of an entry and prefetch it: the access pattern is irregular. */
static struct entry_address fetch(const struct kvstore_entries *entries, int64_t entry,
                                  const struct walk *walk) {
    size_t page = 0, slot = (size_t)entry;
    if (slot >= entries->page_entries || entries->table) { /* else skip the division */
        page = slot / entries->page_entries;
        slot -= page * entries->page_entries;
        page = entries->table ? (size_t)entries->table[page] : page;
    }
    const ptrdiff_t p = (ptrdiff_t)page, e = (ptrdiff_t)slot;
    const struct entry_address address = {
        entries->codes + p * entries->code_page_stride + e * entries->code_stride,
        entries->scales + p * entries->scale_page_stride + e * entries->scale_stride};
    for (size_t byte = 0; byte < walk->code_bytes; byte += LINE) {
        __builtin_prefetch(address.codes + byte);
    }
    __builtin_prefetch(address.codes + walk->code_bytes - 1);
    __builtin_prefetch(address.scales);
    return address;
}

int kvstore_gather(const struct kvstore_codec *codec, const struct kvstore_entries *entries,
                   const int64_t *index, size_t rows, size_t row_values, void *values,
                   ptrdiff_t value_stride) {
    struct walk walk = {.rows = rows, .count = row_values, .value_stride = value_stride};
    int code = measure(codec, &walk);
    if (code != KVSTORE_OK || walk.rows == 0) {
        return code;
    }
    code = check_gather(&walk, entries, index, values);
    if (code != KVSTORE_OK) {
        return code;
    }
    const int is_streamed = passes_the_cache(codec, &walk);
    struct entry_address addresses[AHEAD];
    for (size_t row = 0; row < walk.rows && row < AHEAD; row++) {
        addresses[row] = fetch(entries, index[row], &walk);
    }
    for (size_t row = 0; row < walk.rows; row++) {
        struct entry_address *address = &addresses[row % AHEAD];
        const struct entry_address now = *address;
        if (row + AHEAD < walk.rows) {
            *address = fetch(entries, index[row + AHEAD], &walk);
        }
        codec->unpack(codec, now.codes, now.scales, walk.count,
                      (unsigned char *)values + (ptrdiff_t)row * value_stride, is_streamed);
    }
    end_stream(is_streamed);
    return KVSTORE_OK;
}
