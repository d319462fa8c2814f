/* Copy and checksum of a part in one pass, in both directions. */
#include "codec.h"
#include "xxh3.h"

enum {
    STEP = 4096, /* bytes of codes that are unpacked, then summed: larger ones gain little */
    STAGED = 4096,   /* bytes of short rows that are copied at a time */
    SHORT_ROW = 1024 /* shorter rows use the stage: separate calls would be slower */
};

/* A segment with the sizes that its codec determines. */
struct measured {
    const struct kvstore_segment *segment;
    struct row_bytes row;
    size_t rows;       /* of all units; 0 if they are empty */
    size_t unit_bytes; /* of one unit's planes */
    struct plane memory;
};

static int measure(const struct kvstore_segment *segment, struct measured *found) {
    *found = (struct measured){.segment = segment};
    if (segment->codec != NULL) {
        const int code = codec_row(segment->codec, segment->row_values, &found->row);
        if (code != KVSTORE_OK) {
            return code;
        }
    } else {
        found->row = (struct row_bytes){segment->row_values, segment->row_values, 0, 1};
    }
    found->memory = (struct plane){segment->address, found->row.values, segment->row_stride};
    const size_t row_bytes = found->row.codes + found->row.scales, most = (size_t)PTRDIFF_MAX;
    if (row_bytes == 0 || segment->units == 0 || segment->rows == 0) {
        return KVSTORE_OK;
    }
    if (row_bytes > most / segment->rows || row_bytes * segment->rows > most / segment->units) {
        return KVSTORE_ERR_SHAPE;
    }
    found->rows = segment->units * segment->rows;
    found->unit_bytes = row_bytes * segment->rows;
    return KVSTORE_OK;
}

static int check_memory(const struct measured *segment, const struct plane *part, int is_output) {
    const struct plane *memory = &segment->memory;
    if (memory->data == NULL) {
        return KVSTORE_ERR_NULL;
    }
    const int rows_overlap = segment->rows > 1 && magnitude_of(memory->stride) < memory->row_bytes;
    if (span_of(memory, segment->rows) == 0 || (is_output && rows_overlap)) {
        return KVSTORE_ERR_STRIDE;
    }
    return disjoint(memory, segment->rows, part, 1) ? KVSTORE_OK : KVSTORE_ERR_OVERLAP;
}

/* Check a call, and compute the bytes of its segments. Written segments must not overlap. */
static int check_segments(const struct plane *part, const struct kvstore_segment *segments,
                          size_t count, int is_output, size_t *memory_bytes) {
    size_t part_bytes = 0;
    *memory_bytes = 0;
    for (size_t i = 0; i < count; i++) {
        struct measured one, other;
        int code = measure(&segments[i], &one);
        if (code != KVSTORE_OK) {
            return code;
        }
        if (one.rows == 0) {
            continue;
        }
        if (one.unit_bytes * one.segment->units > part->row_bytes - part_bytes) {
            return KVSTORE_ERR_SHAPE;
        }
        part_bytes += one.unit_bytes * one.segment->units;
        code = check_memory(&one, part, is_output);
        if (code != KVSTORE_OK) {
            return code;
        }
        *memory_bytes += one.rows * one.row.values; /* no overflow: all rows have addresses */
        for (size_t j = 0; is_output && j < i; j++) {
            measure(&segments[j], &other);
            if (other.rows > 0 && !disjoint(&one.memory, one.rows, &other.memory, other.rows)) {
                return KVSTORE_ERR_OVERLAP;
            }
        }
    }
    return part_bytes == part->row_bytes ? KVSTORE_OK : KVSTORE_ERR_SHAPE;
}

/* Copy rows of `bytes` bytes, without a memcpy per row: compilers' code for short rows needs 20 ns
 * per row. */
static inline __attribute__((always_inline)) void
copy_rows_of(uint8_t *target, ptrdiff_t target_stride, const uint8_t *source,
             ptrdiff_t source_stride, size_t rows, size_t bytes) {
    for (size_t row = 0; row < rows; row++) {
        size_t i = 0;
        for (; i + 32 <= bytes; i += 32) {
            memcpy(target + i, source + i, 32);
        }
        for (; i + 8 <= bytes; i += 8) {
            memcpy(target + i, source + i, 8);
        }
        for (; i < bytes; i++) {
            target[i] = source[i];
        }
        target += target_stride;
        source += source_stride;
    }
}

/* The same, with separate loops for planes of V4.1 (256 and 32, 64 and 4) and of dense heads. */
static void copy_rows(uint8_t *target, ptrdiff_t target_stride, const uint8_t *source,
                      ptrdiff_t source_stride, size_t rows, size_t bytes) {
#define ROWS_OF(n)                                                                                 \
    case n:                                                                                        \
        copy_rows_of(target, target_stride, source, source_stride, rows, n);                       \
        return
    switch (bytes) {
        ROWS_OF(4);
        ROWS_OF(8);
        ROWS_OF(12);
        ROWS_OF(16);
        ROWS_OF(32);
        ROWS_OF(64);
        ROWS_OF(128);
        ROWS_OF(256);
    default:
        copy_rows_of(target, target_stride, source, source_stride, rows, bytes);
    }
#undef ROWS_OF
}

/* Number and length of the contiguous ranges that a unit's rows form in memory. */
static size_t runs_of(const struct measured *segment, size_t *bytes) {
    const size_t rows = segment->segment->rows;
    *bytes = segment->row.values;
    if (segment->memory.stride != (ptrdiff_t)*bytes) {
        return rows;
    }
    *bytes *= rows;
    return 1;
}

/* Copy the rows of a unit. Long rows are summed while they are written. Short rows are copied to
 * the stage, summed there and copied from there; each byte of the part is read once. */
static void copy_unit(struct xxh3 *sum, const struct measured *segment, const uint8_t *source,
                      uint8_t *target, int is_streamed) {
    const ptrdiff_t stride = segment->memory.stride;
    size_t bytes;
    const size_t rows = runs_of(segment, &bytes);
    if (bytes > SHORT_ROW) {
        for (size_t row = 0; row < rows; row++) {
            xxh3_update(sum, source + row * bytes, bytes, target + (ptrdiff_t)row * stride,
                        is_streamed);
        }
        return;
    }
    uint8_t stage[STAGED];
    const size_t step = STAGED / bytes;
    for (size_t first = 0; first < rows; first += step) {
        const size_t some = rows - first < step ? rows - first : step;
        xxh3_update(sum, source + first * bytes, some * bytes, stage, 0);
        copy_rows(target + (ptrdiff_t)first * stride, stride, stage, (ptrdiff_t)bytes, some, bytes);
    }
}

/* Copy the rows of a unit to the part. Each byte is read once, and the written bytes are summed:
 * the sum is that of the copy even if the rows change meanwhile. */
static void take_unit(struct xxh3 *sum, const struct measured *segment, const uint8_t *source,
                      uint8_t *part) {
    const ptrdiff_t stride = segment->memory.stride;
    size_t bytes;
    const size_t rows = runs_of(segment, &bytes);
    if (bytes > SHORT_ROW) {
        for (size_t row = 0; row < rows; row++) {
            xxh3_update(sum, source + (ptrdiff_t)row * stride, bytes, part + row * bytes, 0);
        }
        return;
    }
    const size_t step = STAGED / bytes;
    for (size_t first = 0; first < rows; first += step) {
        const size_t some = rows - first < step ? rows - first : step;
        copy_rows(part + first * bytes, (ptrdiff_t)bytes, source + (ptrdiff_t)first * stride,
                  stride, some, bytes);
        xxh3_update(sum, part + first * bytes, some * bytes, NULL, 0);
    }
}

/* Dequantize the rows of a unit, and sum their codes while they are in the first-level cache;
 * sum the scales, which come after all codes, at the end. */
static void unpack_unit(struct xxh3 *sum, const struct measured *segment, const uint8_t *source,
                        uint8_t *target, int is_streamed) {
    const struct kvstore_codec *codec = segment->segment->codec;
    const struct row_bytes *row = &segment->row;
    const size_t values = segment->segment->row_values, rows = segment->segment->rows;
    const ptrdiff_t stride = segment->memory.stride;
    const int is_joined = row->is_joinable && stride == (ptrdiff_t)row->values;
    const uint8_t *scales = source + rows * row->codes;
    const size_t step = row->codes < STEP ? STEP / row->codes : 1;
    for (size_t first = 0; first < rows; first += step) {
        const size_t some = rows - first < step ? rows - first : step;
        const size_t joined = is_joined ? some : 1;
        for (size_t at = first; at < first + some; at += joined) {
            codec->unpack(codec, source + at * row->codes, scales + at * row->scales,
                          joined * values, target + (ptrdiff_t)at * stride, is_streamed);
        }
        xxh3_update(sum, source + first * row->codes, some * row->codes, NULL, 0);
    }
    xxh3_update(sum, scales, rows * row->scales, NULL, 0);
}

/* Read interleaved segments with equal units; return the address after them. */
static const uint8_t *read_segments(struct xxh3 *sum, const struct kvstore_segment *segments,
                                    size_t count, const uint8_t *part, int is_streamed) {
    for (size_t unit = 0; unit < segments->units; unit++) {
        for (size_t i = 0; i < count; i++) {
            struct measured segment;
            measure(&segments[i], &segment);
            if (segment.rows > 0) {
                const ptrdiff_t row = (ptrdiff_t)(unit * segments[i].rows);
                (segments[i].codec ? unpack_unit : copy_unit)(
                    sum, &segment, part,
                    (uint8_t *)segments[i].address + row * segment.memory.stride, is_streamed);
                part += segment.unit_bytes;
            }
        }
    }
    return part;
}

/* Write interleaved segments with equal units; return the address after them. */
static uint8_t *write_segments(struct xxh3 *sum, const struct kvstore_segment *segments,
                               size_t count, uint8_t *part) {
    for (size_t unit = 0; unit < segments->units; unit++) {
        for (size_t i = 0; i < count; i++) {
            struct measured segment;
            measure(&segments[i], &segment);
            if (segment.rows > 0) {
                const ptrdiff_t row = (ptrdiff_t)(unit * segments[i].rows);
                take_unit(sum, &segment,
                          (const uint8_t *)segments[i].address + row * segment.memory.stride, part);
                part += segment.unit_bytes;
            }
        }
    }
    return part;
}

/* End of the segments that are interleaved with the first. */
static size_t turns(const struct kvstore_segment *segments, size_t first, size_t count) {
    size_t stop = first + 1;
    while (stop < count && segments[stop].units == segments[first].units) {
        stop++;
    }
    return stop;
}

static int check_call(const uint8_t *part, size_t part_bytes,
                      const struct kvstore_segment *segments, size_t count, int level,
                      int is_output, size_t *memory_bytes) {
    if (level < KVSTORE_LEVEL_PORTABLE || level > kvstore_level()) {
        return KVSTORE_ERR_LEVEL;
    }
    if ((part == NULL && part_bytes > 0) || (segments == NULL && count > 0)) {
        return KVSTORE_ERR_NULL;
    }
    if (part_bytes > (size_t)PTRDIFF_MAX) {
        return KVSTORE_ERR_SHAPE;
    }
    const struct plane whole = {part, part_bytes, 0};
    return check_segments(&whole, segments, count, is_output, memory_bytes);
}

int kvstore_read_part(const uint8_t *part, size_t part_bytes, uint64_t sum,
                      const struct kvstore_segment *segments, size_t count, int level,
                      size_t streamed_bytes) {
    size_t bytes;
    const int code = check_call(part, part_bytes, segments, count, level, 1, &bytes);
    if (code != KVSTORE_OK) {
        return code;
    }
    const int is_streamed = bytes > 0 && bytes >= streamed_bytes;
    struct xxh3 found;
    xxh3_begin(&found, part_bytes, level);
    for (size_t i = 0, stop; i < count; i = stop) {
        stop = turns(segments, i, count);
        part = read_segments(&found, segments + i, stop - i, part, is_streamed);
    }
    end_stream(is_streamed);
    return xxh3_end(&found) == sum ? KVSTORE_OK : KVSTORE_ERR_SUM;
}

int kvstore_write_part(uint8_t *part, size_t part_bytes, const struct kvstore_segment *segments,
                       size_t count, int level, uint64_t *sum) {
    size_t bytes;
    const int code =
        sum ? check_call(part, part_bytes, segments, count, level, 0, &bytes) : KVSTORE_ERR_NULL;
    if (code != KVSTORE_OK) {
        return code;
    }
    for (size_t i = 0; i < count; i++) {
        if (segments[i].codec != NULL) {
            return KVSTORE_ERR_FORMAT;
        }
    }
    struct xxh3 found;
    xxh3_begin(&found, part_bytes, level);
    for (size_t i = 0, stop; i < count; i = stop) {
        stop = turns(segments, i, count);
        part = write_segments(&found, segments + i, stop - i, part);
    }
    *sum = xxh3_end(&found);
    return KVSTORE_OK;
}
