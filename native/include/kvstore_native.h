/* C interface of kvstore's native kernels. This header is the reference manual.
 *
 * No function allocates, keeps state, prints or exits; all are thread-safe. A function that returns
 * a code returns KVSTORE_OK, or a negative code with its outputs unchanged (except ERR_SUM). */
#ifndef KVSTORE_NATIVE_H
#define KVSTORE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

/* Version of this interface. Python refuses a module built from another version. */
int kvstore_native_version(void);

enum {
    KVSTORE_OK = 0,
    KVSTORE_ERR_DTYPE = -1,        /* unknown element type */
    KVSTORE_ERR_FORMAT = -2,       /* unknown format */
    KVSTORE_ERR_RULE = -3,         /* the format has no such scale rule */
    KVSTORE_ERR_GLOBAL_SCALE = -4, /* outside [2^-100, 2^100], or not 1 where 1 is required */
    KVSTORE_ERR_SHAPE = -5,        /* row_values does not fill blocks, or is 0 for FP8 */
    KVSTORE_ERR_NULL = -6,         /* a null pointer to a non-empty buffer */
    KVSTORE_ERR_STRIDE = -7,       /* output rows overlap, or a plane exceeds the address space */
    KVSTORE_ERR_OVERLAP = -8,      /* an output shares bytes with another buffer */
    KVSTORE_ERR_LEVEL = -9,        /* this processor or library does not support the level */
    KVSTORE_ERR_ALIGN = -10,       /* a codec is not aligned to 64 bytes */
    KVSTORE_ERR_INDEX = -11,       /* the entry or page does not exist */
    KVSTORE_ERR_SUM = -12,         /* checksum mismatch: outputs are undefined */
    KVSTORE_ERR_RANGE = -13        /* a token id outside [0, 2^32) */
};

/* Element types of unquantized values. Native byte order, any alignment. */
enum { KVSTORE_F32 = 0, KVSTORE_F16 = 1, KVSTORE_BF16 = 2 };

/* Formats: blocks of values that share one scale. docs/format.md, section 3.
 *   NVFP4  16 values of E2M1, scale E4M3, value = e2m1 * e4m3 * global_scale
 *   MXFP4  32 values of E2M1, scale E8M0 (byte e means 2^(e - 127)), value = e2m1 * 2^(e - 127)
 *   MXFP8  32 values of E4M3, scale E8M0, value = e4m3 * 2^(e - 127)
 *   FP8    a row of E4M3, scale a float32 in 4 bytes, the lowest first, value = e4m3 * scale
 * E4M3 has a maximum of 448 and no infinity; 0x7F and 0xFF are NaN. */
enum { KVSTORE_NVFP4 = 0, KVSTORE_MXFP4 = 1, KVSTORE_MXFP8 = 2, KVSTORE_FP8 = 3 };

/* Rules for a block's scale, from its largest magnitude amax.
 *   V41      NVFP4  e4m3(max(amax, 6 * 2^-9) / 6); elements are divided by it. global_scale is 1.
 *   TORCHAO  NVFP4  e4m3(amax / 6 / global_scale), at least 2^-6; elements are multiplied by the
 *                   float reciprocal.
 *   FLOOR    MXFP4  the exponent of amax, minus 2 (OCP Microscaling): amax may saturate
 *   EVEN     MXFP4  the same after rounding amax to two significant bits: 1.75 * 2^k rounds up
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

/* Counters of quantization. Calls add to them, so one object can sum over calls. */
struct kvstore_pack_stats {
    uint64_t nan_blocks; /* blocks, or rows of FP8, that hold a NaN and were stored as all NaN */
    uint64_t inf_values; /* infinities in the input */
};

/* Quantization error: sums over values of the squared difference of dequantized value and value,
 * and of the squared value. Calls add to both. The root of their quotient is the relative error.
 * NaN if a value is NaN; levels may add in different orders. */
struct kvstore_pack_error {
    double difference, value;
};

/* Instruction sets of kernels. All levels compute the same bytes; higher ones are faster. */
enum { KVSTORE_LEVEL_PORTABLE = 0, KVSTORE_LEVEL_AVX2 = 1, KVSTORE_LEVEL_AVX512 = 2 };

/* Return the highest level that this processor and this library support. */
int kvstore_level(void);

/* A format and its rule with their tables, prepared once for any number of calls: an immutable
 * value of kvstore_codec_bytes() bytes that threads may share. */
struct kvstore_codec;

size_t kvstore_codec_bytes(void);

/* Prepare a codec.
 *
 * codec           out: kvstore_codec_bytes() bytes, aligned to 64.
 * dtype           of the unquantized values.
 * rule            scale rule of kvstore_pack.
 * global_scale    1, except for NVFP4 with the rule TORCHAO.
 * level           at most kvstore_level().
 * streamed_bytes  outputs of kvstore_unpack of at least this size are written with non-temporal
 *                 stores: faster if the output does not fit the cache.
 *
 * Cost: about 1 ms. Returns any code above except STRIDE and OVERLAP. */
int kvstore_codec_prepare(struct kvstore_codec *codec, int dtype, int format, int rule,
                          float global_scale, int level, size_t streamed_bytes);

/* Quantize rows of numbers.
 *
 * values  in:  [rows, row_values] of dtype. Row r starts value_stride * r bytes after values.
 * codes   out: FP4: [rows, row_values / 2]. Value 2i is the low half of byte i, 2i + 1 the high.
 *              FP8: [rows, row_values].
 * scales  out: NVFP4: [rows, row_values / 16], MXFP4 and MXFP8: [rows, row_values / 32],
 *              FP8: [rows, 4].
 * stats   in/out: counts are added; may be null.
 * error   in/out: sums are added; may be null. Measuring doubles the cost.
 *
 * An element is the exact quotient of value and scale (TORCHAO: the product with the reciprocal,
 * as a float), rounded to nearest, ties to even; magnitudes above the largest element (6, 448)
 * saturate; the sign of zero is kept. A NaN anywhere makes its block NaN: scale 0x7F (NVFP4), 0xFF
 * (MX) or 0x7FC00000 (FP8), codes 0. An infinity becomes the largest element. In blocks of 16 and
 * 32 it saturates the scale too; in FP8 it does not count for amax, unless the finite values of
 * its row are all zero: then amax is the largest float. A row of zeros has scale 0 in FP8, and
 * any other row of FP8 at least 2^-149.
 *
 * Strides are in bytes and may be negative; rows of values may repeat (stride 0). Rows of codes
 * and scales may interleave, as in an entry that ends with its scales, but no byte may be in two
 * buffers. Subnormals are exact, even in a thread that flushes them to zero; the rounding mode must
 * be the default.
 *
 * Returns OK, SHAPE, NULL, STRIDE or OVERLAP. */
int kvstore_pack(const struct kvstore_codec *codec, const void *values, size_t rows,
                 size_t row_values, ptrdiff_t value_stride, uint8_t *codes, ptrdiff_t code_stride,
                 uint8_t *scales, ptrdiff_t scale_stride, struct kvstore_pack_stats *stats,
                 struct kvstore_pack_error *error);

/* Dequantize rows: the exact product, rounded once to dtype, to nearest even.
 *
 * codes, scales  in:  as kvstore_pack writes them.
 * values         out: [rows, row_values] of dtype.
 *
 * A NaN code or scale, and zero times an infinite scale, is the quiet NaN 0x7FC00000, 0x7E00 or
 * 0x7FC0. Products beyond dtype become infinite. Negative or infinite scales, which
 * kvstore_pack never writes, keep their value. Strides and buffers as for kvstore_pack.
 *
 * Returns OK, SHAPE, NULL, STRIDE or OVERLAP. */
int kvstore_unpack(const struct kvstore_codec *codec, const uint8_t *codes, ptrdiff_t code_stride,
                   const uint8_t *scales, ptrdiff_t scale_stride, size_t rows, size_t row_values,
                   void *values, ptrdiff_t value_stride);

/* Entries of one prompt in a pool of pages: entry e is entry e % page_entries of the page
 * table[e / page_entries]. Strides, in bytes, are between pages and between entries. */
struct kvstore_entries {
    const uint8_t *codes, *scales;
    ptrdiff_t code_page_stride, code_stride;
    ptrdiff_t scale_page_stride, scale_stride;
    size_t pool_pages, page_entries;
    const int64_t *table; /* null: pages in order, as in an array */
    size_t table_pages;   /* pages of the table, or of the pool without one */
};

/* Dequantize chosen entries: values[i] is entry index[i]. Any order; repetitions are allowed.
 *
 * entries  in:  rows of row_values, as kvstore_pack writes them.
 * index    in:  [rows], each in [0, table_pages * page_entries).
 * values   out: [rows, row_values] of dtype; must not overlap the inputs.
 *
 * Returns OK, SHAPE, NULL, STRIDE, OVERLAP or INDEX. */
int kvstore_gather(const struct kvstore_codec *codec, const struct kvstore_entries *entries,
                   const int64_t *index, size_t rows, size_t row_values, void *values,
                   ptrdiff_t value_stride);

/* Chained SHA-256 of blocks of tokens, in order. docs/format.md, section 2.
 *
 * root     in:  32 bytes, the parent digest of the first block.
 * tokens   in:  [blocks, block_tokens], little-endian.
 * level    at most kvstore_level(). Above PORTABLE it uses SHA instructions if the processor has
 *          them.
 * digests  out: [blocks, 32]; must not overlap the inputs.
 *
 * These are the hashes of blocks without image tokens. Returns OK, SHAPE (a block of no tokens),
 * NULL or LEVEL. */
int kvstore_block_hashes(const uint8_t *root, const uint32_t *tokens, size_t blocks,
                         size_t block_tokens, int level, uint8_t *digests);

/* Integer types of token ids, in native byte order. */
enum { KVSTORE_INT32 = 1, KVSTORE_UINT32, KVSTORE_INT64, KVSTORE_UINT64 };

/* kvstore_block_hashes of ids of any integer type, with a copy of the ids, in one pass over memory.
 *
 * tokens   in:  [count], of `kind`.
 * ids      out: [count]: the ids as hashed and stored; must not overlap the other buffers.
 * digests  out: [count / block_tokens, 32].
 *
 * Returns as kvstore_block_hashes, DTYPE for an unknown kind, or RANGE for an id that is not in
 * [0, 2^32). For machines whose integers are little-endian. */
int kvstore_identify(const uint8_t *root, const void *tokens, int kind, size_t count,
                     size_t block_tokens, int level, uint32_t *ids, uint8_t *digests);

/* XXH3 of 64 bits with seed 0 and the default secret: the checksum of docs/format.md, section 4.
 *
 * data   in:  bytes, at any address.
 * level  at most kvstore_level().
 * sum    out.
 *
 * Returns OK, NULL or LEVEL. */
int kvstore_xxh3_64(const void *data, size_t bytes, int level, uint64_t *sum);

/* Segment of a part, and the address of its rows in the caller's memory. docs/format.md, section 4.
 *
 * Without a codec a segment is one plane, whose rows are copied; row_values are then bytes. With a
 * codec it is two planes, the codes of a unit and then its scales, which are dequantized as by
 * kvstore_unpack. In the part a segment has `units` units of `rows` rows; in memory its rows are
 * consecutive. Adjacent segments with equal `units` are interleaved: the first unit of each, then
 * the second of each, and so on. */
struct kvstore_segment {
    const struct kvstore_codec *codec; /* or null */
    size_t units, rows, row_values;
    void *address; /* [units * rows]: row r starts row_stride * r bytes after it */
    ptrdiff_t row_stride;
};

/* Verify a part and copy its segments in the same pass: each byte is summed while it is in a
 * register or the first-level cache.
 *
 * part            in:  the bytes of all segments, in the order described above.
 * sum             expected kvstore_xxh3_64 of the part.
 * segments        in:  [count]; their memory is out. It must not overlap the part or other
 *                 segments. Rows of two segments may interleave if their strides are equal in
 *                 magnitude.
 * level           at most kvstore_level(); dequantization has the level of its codec.
 * streamed_bytes  segments of at least this size in sum are written with non-temporal stores.
 *
 * Copied bytes are read once, and the written bytes are summed: a part that changes meanwhile is
 * not accepted with a wrong copy. Bytes to dequantize are read twice, so that part must not change.
 *
 * Returns OK, SUM, SHAPE (the segments do not sum to part_bytes, or a row does not fit its codec),
 * NULL, STRIDE, OVERLAP or LEVEL. After SUM the segments are undefined; no other memory changed.
 * Cost of the checks: count^2 / 2 comparisons. */
int kvstore_read_part(const uint8_t *part, size_t part_bytes, uint64_t sum,
                      const struct kvstore_segment *segments, size_t count, int level,
                      size_t streamed_bytes);

/* Copy segments to a part and sum it in the same pass.
 *
 * part      out: [part_bytes]; must not overlap the segments.
 * segments  in:  [count], without codecs; their memory may overlap.
 * level     at most kvstore_level().
 * sum       out: kvstore_xxh3_64 of the part.
 *
 * Bytes are read once, so the sum is that of the part even if the segments change meanwhile.
 *
 * Returns OK, SHAPE, NULL, STRIDE, OVERLAP, FORMAT (a segment has a codec) or LEVEL. */
int kvstore_write_part(uint8_t *part, size_t part_bytes, const struct kvstore_segment *segments,
                       size_t count, int level, uint64_t *sum);

/* Byte range of a part in a frame, and its range of segments. */
struct kvstore_frame_part {
    size_t start, stop, first, last;
};

/* Frames of one format, and the memory of their payloads. docs/format.md, section 4. */
struct kvstore_frames {
    size_t frame_bytes, block_tokens, payload_offset;
    uint8_t head[32]; /* first bytes of a frame; number, namespace and image flag are ignored */
    size_t first_part; /* parts of a frame before those below */
    const struct kvstore_frame_part *parts; /* in the order of the frame; gaps are read too */
    size_t part_count;
    const struct kvstore_segment *segments; /* with the addresses of block 0 */
    const ptrdiff_t *steps;  /* bytes from a segment to that of the next block; or */
    const ptrdiff_t *shifts; /* by block, bytes from the segments of block 0; NULL with steps */
    struct kvstore_segment *scratch; /* [segment_count], for one call at a time */
    size_t segment_count;
    int any_parent;   /* whether the parent hash is not checked */
    int checks_first; /* whether a bad frame leaves its memory unchanged: a second pass */
};

/* Read frames from a file, verify them and copy their payloads; stop at the first bad frame.
 *
 * file         a descriptor for pread.
 * offsets      in:  [count], offsets of the frames in the file.
 * hashes       in:  [count + 1, 32]: the hash of the parent of the first block, then of each block.
 * ids          in:  [count, block_tokens], the token ids of the blocks.
 * first_block  number of the first block in the target.
 * buffer       [frame_bytes], for one call at a time.
 * done         out: number of good frames; the memory of the next block is undefined unless
 *              checks_first.
 *
 * A frame is good if its head begins with `head`, has the given hashes and ids and a valid
 * checksum, and kvstore_read_part accepts each part. Other parts are not read, except those
 * between the head and the first requested part if that costs less than a separate read.
 *
 * Returns OK, SHAPE, NULL, STRIDE, OVERLAP or LEVEL. */
int kvstore_read_frames(const struct kvstore_frames *format, int file, const int64_t *offsets,
                        size_t count, const uint8_t *hashes, const uint32_t *ids,
                        size_t first_block, uint8_t *buffer, int level, size_t streamed_bytes,
                        size_t *done);

/* Kinds of values in a tree. */
enum {
    KVSTORE_TREE_VALUES = 0, /* values of callers */
    KVSTORE_TREE_NAMED = 1,  /* databases: the main tree */
    KVSTORE_TREE_FREE = 2    /* lists of free pages, by transaction */
};

/* Faults of a page of a tree. Only READ is a fault of the medium; errno has the cause. */
enum {
    KVSTORE_TREE_READ = 1,    /* the page cannot be read */
    KVSTORE_TREE_CUT = 2,     /* it, or a free list of it, is beyond the end of the file */
    KVSTORE_TREE_USE = 3,     /* it, or a page it refers to, is out of range or in use already */
    KVSTORE_TREE_KIND = 4,    /* it is not the expected kind of page */
    KVSTORE_TREE_FORM = 5,    /* its nodes have invalid offsets */
    KVSTORE_TREE_ORDER = 6,   /* its keys do not ascend from the keys before */
    KVSTORE_TREE_NODE = 7,    /* it has a node of another kind than the tree */
    KVSTORE_TREE_LIST = 8,    /* it has an inconsistent free list */
    KVSTORE_TREE_COUNTERS = 9 /* with it the tree is larger than its record */
};

/* Record of a database in LMDB's format. */
struct kvstore_tree {
    uint32_t pad;
    uint16_t flags, depth;
    uint64_t branches, leaves, overflow, entries, root;
};

/* Value in overflow pages. */
struct kvstore_tree_value {
    uint64_t page, pages;
};

/* Current page of a tree, its number of nodes, and the last key. */
struct kvstore_tree_level {
    uint8_t page[4096], key[4096];
    size_t key_bytes, nodes;
};

/* State of a check of one file: LMDB 0.9, data version 1, 64 bits, pages of 4,096 bytes. Output
 * arrays have the size of a sound tree; more is a fault. */
struct kvstore_tree_walk {
    int file;             /* a descriptor for pread */
    uint64_t pages;       /* in: number of pages up to the last in use */
    uint64_t transaction; /* in: the last committed transaction */
    uint8_t *used;        /* in/out: [pages / 8 + 1], a bit for each page, zero at first */
    uint64_t used_pages;  /* in/out: number of set bits */
    uint64_t *below;      /* out: of branches, the pages below */
    struct kvstore_tree_value *values; /* out: of leaves, values in overflow pages */
    struct kvstore_tree *named;        /* in/out: of leaves, databases */
    size_t below_room, value_room, named_room; /* in */
    size_t below_count, value_count;           /* out */
    size_t named_count;                        /* in/out */
    uint64_t entries;                          /* out: nodes */
    uint64_t page;                             /* out: the faulty page */
    struct kvstore_tree_level level;           /* scratch */
};

/* Check the pages of a tree at one depth: the form of each page, the order of keys across pages,
 * and that no other page uses them, their values' pages or the pages they list as free. Values
 * are not read, except free lists. Safe for any file content, also if it changes meanwhile.
 *
 * pages    in:  [count], in the order of their keys.
 * kind     kind of the tree's values.
 * is_leaf  whether the pages must be leaves, else branches.
 *
 * Cost: one pread a page, about 1 us if cached.
 *
 * Returns OK, NULL, or a positive fault, with the page in `walk`. */
int kvstore_check_level(struct kvstore_tree_walk *walk, const uint64_t *pages, size_t count,
                        int kind, int is_leaf);

/* Copy keys and values of one size from the leaf page that contains a value.
 *
 * level   in/out: the key before the leaf's first, empty at first; then the leaf's last key.
 * value   in a mapped leaf; the whole page is read, once.
 * rows    out: key after value, without pairs of other sizes.
 * bytes   out: size of the rows.
 *
 * Returns OK, NULL, or a positive fault of the page, with `rows` undefined. */
int kvstore_leaf_rows(struct kvstore_tree_level *level, const uint8_t *value, size_t key_bytes,
                      size_t value_bytes, uint8_t rows[4096], size_t *bytes);

/* cffi: end */

#endif
