/* Reading a part: what is handed out is summed on the way. */
#include "codec.h"
#include "xxh3.h"

enum {
    STEP = 4096, /* bytes of codes that are unpacked and then summed: from here on larger ones gain
                    little */
    STAGED = 4096,  /* bytes of short rows that are copied at a time */
    SHORT_ROW = 128 /* rows up to here go through a stage: their own calls would cost more */
};

/* A piece with what follows from its codec. */
struct measured {
    const struct kvstore_piece *piece;
    struct row_bytes row;
    size_t rows;       /* of all units; 0 if they are empty */
    size_t unit_bytes; /* of one unit's planes */
    struct plane target;
};

static int measure(const struct kvstore_piece *piece, struct measured *found) {
    *found = (struct measured){.piece = piece};
    if (piece->codec != NULL) {
        const int code = codec_row(piece->codec, piece->row_values, &found->row);
        if (code != KVSTORE_OK) {
            return code;
        }
    } else {
        found->row = (struct row_bytes){piece->row_values, piece->row_values, 0, 1};
    }
    found->target = (struct plane){piece->target, found->row.values, piece->target_stride};
    const size_t row_bytes = found->row.codes + found->row.scales, most = (size_t)PTRDIFF_MAX;
    if (row_bytes == 0 || piece->units == 0 || piece->rows == 0) {
        return KVSTORE_OK;
    }
    if (row_bytes > most / piece->rows || row_bytes * piece->rows > most / piece->units) {
        return KVSTORE_ERR_SHAPE;
    }
    found->rows = piece->units * piece->rows;
    found->unit_bytes = row_bytes * piece->rows;
    return KVSTORE_OK;
}

static int check_target(const struct measured *piece, const struct plane *part) {
    const struct plane *target = &piece->target;
    if (target->data == NULL) {
        return KVSTORE_ERR_NULL;
    }
    const int rows_overlap = piece->rows > 1 && magnitude_of(target->stride) < target->row_bytes;
    if (span_of(target, piece->rows) == 0 || rows_overlap) {
        return KVSTORE_ERR_STRIDE;
    }
    return disjoint(target, piece->rows, part, 1) ? KVSTORE_OK : KVSTORE_ERR_OVERLAP;
}

/* Check a whole call, and find how many bytes its targets take. */
static int check_pieces(const struct plane *part, const struct kvstore_piece *pieces, size_t count,
                        size_t *target_bytes) {
    size_t source_bytes = 0;
    *target_bytes = 0;
    for (size_t i = 0; i < count; i++) {
        struct measured one, other;
        int code = measure(&pieces[i], &one);
        if (code != KVSTORE_OK) {
            return code;
        }
        if (one.rows == 0) {
            continue;
        }
        if (one.unit_bytes * one.piece->units > part->row_bytes - source_bytes) {
            return KVSTORE_ERR_SHAPE;
        }
        source_bytes += one.unit_bytes * one.piece->units;
        code = check_target(&one, part);
        if (code != KVSTORE_OK) {
            return code;
        }
        *target_bytes += one.rows * one.row.values; /* no overflow: all of it has addresses */
        for (size_t j = 0; j < i; j++) {
            measure(&pieces[j], &other);
            if (other.rows > 0 && !disjoint(&one.target, one.rows, &other.target, other.rows)) {
                return KVSTORE_ERR_OVERLAP;
            }
        }
    }
    return source_bytes == part->row_bytes ? KVSTORE_OK : KVSTORE_ERR_SHAPE;
}

/* Not memcpy: where a compiler knows that rows are short, it makes of it what takes 20 ns a row. */
static void copy_row(uint8_t *target, const uint8_t *source, size_t bytes) {
    size_t i = 0;
    for (; i + 16 <= bytes; i += 16) {
        memcpy(target + i, source + i, 16);
    }
    for (; i + 4 <= bytes; i += 4) {
        memcpy(target + i, source + i, 4);
    }
    for (; i < bytes; i++) {
        target[i] = source[i];
    }
}

/* Copy the rows of a unit. Long ones are summed as they are written. Short ones are read into a
 * stage, summed there and handed out from there; either way each byte of the part is read once. */
static void copy_unit(struct xxh3 *sum, const struct measured *piece, const uint8_t *source,
                      uint8_t *target, int is_streamed) {
    size_t rows = piece->piece->rows, bytes = piece->row.values;
    const ptrdiff_t stride = piece->target.stride;
    if (stride == (ptrdiff_t)bytes) {
        bytes *= rows;
        rows = 1;
    }
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
        for (size_t row = 0; row < some; row++) {
            copy_row(target + (ptrdiff_t)(first + row) * stride, stage + row * bytes, bytes);
        }
    }
}

/* Unpack the rows of a unit, and sum their codes while they are in the nearest cache; the scales,
 * which lie behind all codes, in the end. */
static void unpack_unit(struct xxh3 *sum, const struct measured *piece, const uint8_t *source,
                        uint8_t *target, int is_streamed) {
    const struct kvstore_codec *codec = piece->piece->codec;
    const struct row_bytes *row = &piece->row;
    const size_t values = piece->piece->row_values, rows = piece->piece->rows;
    const ptrdiff_t stride = piece->target.stride;
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

/* Hand out pieces of equally many units, which take turns; return what lies behind them. */
static const uint8_t *read_pieces(struct xxh3 *sum, const struct kvstore_piece *pieces,
                                  size_t count, const uint8_t *part, int is_streamed) {
    for (size_t unit = 0; unit < pieces->units; unit++) {
        for (size_t i = 0; i < count; i++) {
            struct measured piece;
            measure(&pieces[i], &piece);
            if (piece.rows > 0) {
                const ptrdiff_t row = (ptrdiff_t)(unit * pieces[i].rows);
                (pieces[i].codec ? unpack_unit : copy_unit)(
                    sum, &piece, part, (uint8_t *)pieces[i].target + row * piece.target.stride,
                    is_streamed);
                part += piece.unit_bytes;
            }
        }
    }
    return part;
}

int kvstore_read_part(const uint8_t *part, size_t part_bytes, uint64_t sum,
                      const struct kvstore_piece *pieces, size_t count, int level,
                      size_t streamed_bytes) {
    if (level < KVSTORE_LEVEL_PORTABLE || level > kvstore_level()) {
        return KVSTORE_ERR_LEVEL;
    }
    if ((part == NULL && part_bytes > 0) || (pieces == NULL && count > 0)) {
        return KVSTORE_ERR_NULL;
    }
    if (part_bytes > (size_t)PTRDIFF_MAX) {
        return KVSTORE_ERR_SHAPE;
    }
    const struct plane whole = {part, part_bytes, 0};
    size_t target_bytes;
    const int code = check_pieces(&whole, pieces, count, &target_bytes);
    if (code != KVSTORE_OK) {
        return code;
    }
    const int is_streamed = target_bytes > 0 && target_bytes >= streamed_bytes;
    struct xxh3 found;
    xxh3_begin(&found, part_bytes, level);
    for (size_t i = 0, stop; i < count; i = stop) {
        for (stop = i + 1; stop < count && pieces[stop].units == pieces[i].units;) {
            stop++;
        }
        part = read_pieces(&found, pieces + i, stop - i, part, is_streamed);
    }
    end_stream(is_streamed);
    return xxh3_end(&found) == sum ? KVSTORE_OK : KVSTORE_ERR_SUM;
}
