/* Reading of frames from a file into memory, with the checks of kvstore/frame/format.py. */
#define _POSIX_C_SOURCE 200809L /* pread */

#include "codec.h"
#include "xxh3.h"

#include <errno.h>
#include <unistd.h>

enum {
    SUM_AT = 104, /* docs/format.md, section 4 */
    HEAD_BYTES = 112,
    FLAGS_AT = 6,
    ANY_AT = 12, /* number and namespace id, which differ between blocks */
    ANY_END = 20,
    HASH_AT = 32,
    HASH_BYTES = 32,
    HAS_IMAGES = 1,
    SKIPPED = 16384 /* bytes whose copy is as slow as a system call, about 2 us */
};

static int read_whole(int file, int64_t offset, uint8_t *buffer, size_t bytes) {
    size_t had = 0;
    while (had < bytes) {
        const ssize_t got = pread(file, buffer + had, bytes - had, (off_t)(offset + (int64_t)had));
        if (got > 0) {
            had += (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            return 0;
        }
    }
    return 1;
}

static int is_head(const struct kvstore_frames *format, const uint8_t *frame, const uint8_t *hashes,
                   const uint32_t *ids, int level) {
    const uint8_t *head = format->head;
    const size_t id_bytes = format->block_tokens * sizeof *ids;
    if (memcmp(frame, head, FLAGS_AT) != 0 || (frame[FLAGS_AT] & ~HAS_IMAGES) != head[FLAGS_AT] ||
        memcmp(frame + FLAGS_AT + 1, head + FLAGS_AT + 1, ANY_AT - FLAGS_AT - 1) != 0 ||
        memcmp(frame + ANY_END, head + ANY_END, HASH_AT - ANY_END) != 0 ||
        memcmp(frame + HASH_AT, hashes + HASH_BYTES, HASH_BYTES) != 0 ||
        (!format->any_parent && memcmp(frame + HASH_AT + HASH_BYTES, hashes, HASH_BYTES) != 0) ||
        memcmp(frame + HEAD_BYTES, ids, id_bytes) != 0) {
        return 0;
    }
    struct xxh3 sum;
    uint64_t expected;
    xxh3_begin(&sum, SUM_AT + (format->payload_offset - HEAD_BYTES), level);
    xxh3_update(&sum, frame, SUM_AT, NULL, 0);
    xxh3_update(&sum, frame + HEAD_BYTES, format->payload_offset - HEAD_BYTES, NULL, 0);
    memcpy(&expected, frame + SUM_AT, sizeof expected);
    return xxh3_end(&sum) == expected;
}

/* Checksum of a requested part in a frame. */
static uint64_t sum_of(const struct kvstore_frames *format, const uint8_t *frame, size_t part) {
    uint64_t sum;
    const size_t first = HEAD_BYTES + format->block_tokens * sizeof(uint32_t);
    memcpy(&sum, frame + first + (format->first_part + part) * sizeof sum, sizeof sum);
    return sum;
}

static int are_parts_good(const struct kvstore_frames *format, const uint8_t *frame, int level) {
    for (size_t i = 0; i < format->part_count; i++) {
        const struct kvstore_frame_part *part = &format->parts[i];
        struct xxh3 sum;
        xxh3_begin(&sum, part->stop - part->start, level);
        xxh3_update(&sum, frame + part->start, part->stop - part->start, NULL, 0);
        if (xxh3_end(&sum) != sum_of(format, frame, i)) {
            return 0;
        }
    }
    return 1;
}

/* Copy the payload of one frame. */
static int hand_out(const struct kvstore_frames *format, const uint8_t *frame, size_t block,
                    int level, size_t streamed_bytes) {
    for (size_t i = 0; i < format->segment_count; i++) {
        const ptrdiff_t step =
            format->shifts ? format->shifts[block] : format->steps[i] * (ptrdiff_t)block;
        format->scratch[i] = format->segments[i];
        format->scratch[i].address = (uint8_t *)format->segments[i].address + step;
    }
    for (size_t i = 0; i < format->part_count; i++) {
        const struct kvstore_frame_part *part = &format->parts[i];
        const int code = kvstore_read_part(frame + part->start, part->stop - part->start,
                                           sum_of(format, frame, i), format->scratch + part->first,
                                           part->last - part->first, level, streamed_bytes);
        if (code != KVSTORE_OK) {
            return code;
        }
    }
    return KVSTORE_OK;
}

/* Read the head of a frame and the requested parts to their offsets in the buffer. */
static int read_frame(const struct kvstore_frames *format, int file, int64_t offset,
                      uint8_t *frame) {
    const size_t head = format->payload_offset, count = format->part_count;
    const size_t start = count > 0 ? format->parts[0].start : head;
    const size_t stop = count > 0 ? format->parts[count - 1].stop : head;
    if (start - head <= SKIPPED) {
        return read_whole(file, offset, frame, stop);
    }
    return read_whole(file, offset, frame, head) &&
           read_whole(file, offset + (int64_t)start, frame + start, stop - start);
}

static int check_frames(const struct kvstore_frames *format, size_t count, const void *offsets,
                        const void *hashes, const void *ids, const void *buffer) {
    if (format == NULL || (count > 0 && !(offsets && hashes && ids && buffer)) ||
        (format->part_count > 0 && format->parts == NULL) ||
        (format->segment_count > 0 &&
         !(format->segments && (format->steps || format->shifts) && format->scratch))) {
        return KVSTORE_ERR_NULL;
    }
    const size_t size = format->frame_bytes, head = format->payload_offset;
    const size_t sums = format->first_part + format->part_count;
    const size_t known = HEAD_BYTES + sums * sizeof(uint64_t);
    if (size > (size_t)PTRDIFF_MAX || head > size || format->first_part > size / 8 ||
        format->part_count > size / 8 || format->block_tokens > size / sizeof(uint32_t) ||
        head < known + format->block_tokens * sizeof(uint32_t)) {
        return KVSTORE_ERR_SHAPE;
    }
    for (size_t i = 0; i < format->part_count; i++) {
        const struct kvstore_frame_part *part = &format->parts[i];
        if (part->start > part->stop || part->start < head || part->stop > size ||
            part->first > part->last || part->last > format->segment_count ||
            (i > 0 && part->start < format->parts[i - 1].stop)) {
            return KVSTORE_ERR_SHAPE;
        }
    }
    return KVSTORE_OK;
}

int kvstore_read_frames(const struct kvstore_frames *format, int file, const int64_t *offsets,
                        size_t count, const uint8_t *hashes, const uint32_t *ids,
                        size_t first_block, uint8_t *buffer, int level, size_t streamed_bytes,
                        size_t *done) {
    if (level < KVSTORE_LEVEL_PORTABLE || level > kvstore_level()) {
        return KVSTORE_ERR_LEVEL;
    }
    const int code =
        done ? check_frames(format, count, offsets, hashes, ids, buffer) : KVSTORE_ERR_NULL;
    if (code != KVSTORE_OK) {
        return code;
    }
    for (*done = 0; *done < count; (*done)++) {
        const size_t i = *done;
        if (!read_frame(format, file, offsets[i], buffer) ||
            !is_head(format, buffer, hashes + i * HASH_BYTES, ids + i * format->block_tokens,
                     level) ||
            (format->checks_first && !are_parts_good(format, buffer, level))) {
            return KVSTORE_OK;
        }
        const int failed = hand_out(format, buffer, first_block + i, level, streamed_bytes);
        if (failed != KVSTORE_OK) {
            return failed == KVSTORE_ERR_SUM ? KVSTORE_OK : failed;
        }
    }
    return KVSTORE_OK;
}
