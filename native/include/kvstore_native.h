/* kvstore native kernels: the C contract. Comments here are the manual.
 *
 * No function allocates, keeps state, prints or exits; every one may run in any thread. A function
 * that returns a code returns KVSTORE_OK or a negative one, and then its outputs are untouched, but
 * for ERR_SUM. */
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
    KVSTORE_ERR_FORMAT = -2,       /* no such format */
    KVSTORE_ERR_RULE = -3,         /* no such scale rule for the format */
    KVSTORE_ERR_GLOBAL_SCALE = -4, /* outside [2^-100, 2^100], or not 1 where it must be */
    KVSTORE_ERR_SHAPE = -5,        /* row_values does not fill blocks, or is 0 for FP8 */
    KVSTORE_ERR_NULL = -6,         /* a null pointer to something that is not empty */
    KVSTORE_ERR_STRIDE = -7,       /* output rows overlap, or a plane exceeds the address space */
    KVSTORE_ERR_OVERLAP = -8,      /* an output shares bytes with another buffer */
    KVSTORE_ERR_LEVEL = -9,        /* this processor or this library does not have the level */
    KVSTORE_ERR_ALIGN = -10,       /* a codec is not aligned to 64 bytes */
    KVSTORE_ERR_INDEX = -11,       /* an entry or a page that does not exist */
    KVSTORE_ERR_SUM = -12,         /* the bytes do not have the sum: outputs hold anything */
    KVSTORE_ERR_RANGE = -13        /* a token id outside [0, 2^32) */
};

/* Element types of the wide side. Native byte order; no alignment is needed. */
enum { KVSTORE_F32 = 0, KVSTORE_F16 = 1, KVSTORE_BF16 = 2 };

/* Formats: blocks of values that share one scale. docs/format.md, section 3.
 *   NVFP4  16 values of E2M1, scale E4M3, value = e2m1 * e4m3 * global_scale
 *   MXFP4  32 values of E2M1, scale E8M0 (byte e means 2^(e - 127)), value = e2m1 * 2^(e - 127)
 *   MXFP8  32 values of E4M3, scale E8M0, value = e4m3 * 2^(e - 127)
 *   FP8    a row of E4M3, scale a float32 in 4 bytes, the lowest first, value = e4m3 * scale
 * E4M3 goes to 448, has no infinity, and NaN is 0x7F and 0xFF. */
enum { KVSTORE_NVFP4 = 0, KVSTORE_MXFP4 = 1, KVSTORE_MXFP8 = 2, KVSTORE_FP8 = 3 };

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

/* How far packed values lie from what they were, as sums over values of dtype: what codes and scales
 * unpack to, less the value, squared; and the value squared. Both are added to. The root of their
 * quotient is the relative error. NaN if a value is; a level may add in another order. */
struct kvstore_pack_error {
    double difference, value;
};

/* Which instructions a kernel may use. A higher level computes the same bytes, sooner. */
enum { KVSTORE_LEVEL_PORTABLE = 0, KVSTORE_LEVEL_AVX2 = 1, KVSTORE_LEVEL_AVX512 = 2 };

/* Return the highest level that this processor can run and this library holds. */
int kvstore_level(void);

/* A format, its rule and the numbers they need, prepared once and used for any number of calls: an
 * immutable value of kvstore_codec_bytes() bytes that any number of threads may share. */
struct kvstore_codec;

size_t kvstore_codec_bytes(void);

/* Prepare a codec.
 *
 * codec           out: kvstore_codec_bytes() bytes, aligned to 64.
 * dtype           of the numbers on the wide side.
 * rule            how pack chooses scales.
 * global_scale    1, but for NVFP4 with the rule TORCHAO.
 * level           at most kvstore_level().
 * streamed_bytes  an output of unpack that is at least so large is written past the cache: faster
 *                 where it would not stay there anyway.
 *
 * Takes about a millisecond. Returns any of the codes above but STRIDE and OVERLAP. */
int kvstore_codec_prepare(struct kvstore_codec *codec, int dtype, int format, int rule,
                          float global_scale, int level, size_t streamed_bytes);

/* Pack rows of numbers.
 *
 * values  in:  [rows, row_values] of dtype. Row r starts value_stride * r bytes after values.
 * codes   out: FP4: [rows, row_values / 2]. Value 2i is the low half of byte i, 2i + 1 the high.
 *              FP8: [rows, row_values].
 * scales  out: NVFP4: [rows, row_values / 16], MXFP4 and MXFP8: [rows, row_values / 32],
 *              FP8: [rows, 4].
 * stats   in/out: counts are added; may be null.
 * error   in/out: sums are added; null if they are not wanted: they cost about as much again.
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
 * buffers. Subnormals count, even in a thread that flushes them to zero; the rounding mode must be
 * the default one.
 *
 * Returns OK, SHAPE, NULL, STRIDE or OVERLAP. */
int kvstore_pack(const struct kvstore_codec *codec, const void *values, size_t rows,
                 size_t row_values, ptrdiff_t value_stride, uint8_t *codes, ptrdiff_t code_stride,
                 uint8_t *scales, ptrdiff_t scale_stride, struct kvstore_pack_stats *stats,
                 struct kvstore_pack_error *error);

/* Unpack rows to numbers: the exact product, rounded once to dtype, to nearest even.
 *
 * codes, scales  in:  as kvstore_pack writes them.
 * values         out: [rows, row_values] of dtype.
 *
 * A NaN code or scale, and zero times an infinite scale, is the quiet NaN 0x7FC00000, 0x7E00 or
 * 0x7FC0. What exceeds dtype becomes infinite. Scales that no packer writes, negative or infinite,
 * are taken as the numbers that they are. Strides and buffers as for kvstore_pack.
 *
 * Returns OK, SHAPE, NULL, STRIDE or OVERLAP. */
int kvstore_unpack(const struct kvstore_codec *codec, const uint8_t *codes, ptrdiff_t code_stride,
                   const uint8_t *scales, ptrdiff_t scale_stride, size_t rows, size_t row_values,
                   void *values, ptrdiff_t value_stride);

/* Where the entries of one prompt lie in a pool of pages: entry e is entry e % page_entries of the
 * page table[e / page_entries]. Strides, in bytes, lead from page to page and from entry to entry. */
struct kvstore_entries {
    const uint8_t *codes, *scales;
    ptrdiff_t code_page_stride, code_stride;
    ptrdiff_t scale_page_stride, scale_stride;
    size_t pool_pages, page_entries;
    const int64_t *table; /* null: page after page, as in an array */
    size_t table_pages;   /* pages of the table, or of the pool without one */
};

/* Unpack chosen entries: values[i] is entry index[i]. Any order; one may be chosen twice.
 *
 * entries  in:  rows of row_values, as kvstore_pack writes them.
 * index    in:  [rows], each in [0, table_pages * page_entries).
 * values   out: [rows, row_values] of dtype, apart from everything else.
 *
 * Returns OK, SHAPE, NULL, STRIDE, OVERLAP or INDEX. */
int kvstore_gather(const struct kvstore_codec *codec, const struct kvstore_entries *entries,
                   const int64_t *index, size_t rows, size_t row_values, void *values,
                   ptrdiff_t value_stride);

/* The chained SHA-256 of blocks of tokens, first block first. docs/format.md, section 2.
 *
 * root     in:  32 bytes that stand before the first block.
 * tokens   in:  [blocks, block_tokens], little-endian.
 * level    at most kvstore_level(). Above PORTABLE it uses the SHA instructions where there are any.
 * digests  out: [blocks, 32]. Apart from the other two.
 *
 * These are the hashes of blocks that no image touches. Returns OK, SHAPE (a block of no tokens),
 * NULL or LEVEL. */
int kvstore_block_hashes(const uint8_t *root, const uint32_t *tokens, size_t blocks,
                         size_t block_tokens, int level, uint8_t *digests);

/* Token ids as integers of a machine's own byte order. */
enum { KVSTORE_INT32 = 1, KVSTORE_UINT32, KVSTORE_INT64, KVSTORE_UINT64 };

/* The same of ids as callers have them, with a private copy of the ids: one pass over memory, not three.
 *
 * tokens   in:  [count], of `kind`.
 * ids      out: [count]: the tokens as they are hashed and stored. Apart from all else.
 * digests  out: [count / block_tokens, 32].
 *
 * Returns as kvstore_block_hashes, DTYPE for an unknown kind, or RANGE for an id that is not in
 * [0, 2^32). For machines whose integers are little-endian. */
int kvstore_identify(const uint8_t *root, const void *tokens, int kind, size_t count,
                     size_t block_tokens, int level, uint32_t *ids, uint8_t *digests);

/* XXH3 of 64 bits, with seed 0 and the default secret: the checksum of docs/format.md, section 4.
 *
 * data   in:  bytes, at any address.
 * level  at most kvstore_level().
 * sum    out.
 *
 * Returns OK, NULL or LEVEL. */
int kvstore_xxh3_64(const void *data, size_t bytes, int level, uint64_t *sum);

/* A piece of a part, as stored, and its place in a caller's memory. docs/format.md, section 4.
 *
 * Without a codec it is a plane, and its rows are copied: row_values are bytes then. With one it is
 * two planes, all codes of a unit and then all its scales, and they are unpacked as by
 * kvstore_unpack. A piece lies in `units` units of `rows` rows; those of its place follow each
 * other. Pieces that follow each other and have equally many units take turns: the first unit of
 * each, then the second of each, and so on. */
struct kvstore_piece {
    const struct kvstore_codec *codec; /* or null */
    size_t units, rows, row_values;
    void *place; /* [units * rows]: row r starts place_stride * r bytes behind it */
    ptrdiff_t place_stride;
};

/* Verify a part and hand out its pieces in the same pass: every byte is in the nearest cache, or in
 * a register, when its turn comes to be summed.
 *
 * part            in:  the bytes of all pieces, in the order of that structure.
 * sum             what kvstore_xxh3_64 of the part must be.
 * pieces          in:  [count]; their places are out. They are apart from the part and from each
 *                 other. Rows of two places may interleave if their strides have one magnitude.
 * level           at most kvstore_level(); unpacking has that of its codec.
 * streamed_bytes  places that take at least so much together are written past the cache.
 *
 * Copied bytes are read once, and what is summed is what was written: a part that somebody changes
 * meanwhile is not handed out as whole. Bytes to unpack are read twice, so such a part must not
 * change.
 *
 * Returns OK, SUM, SHAPE (the pieces are not part_bytes long, or a row is none of its codec), NULL,
 * STRIDE, OVERLAP or LEVEL. After SUM the places hold anything, and nothing beside them changed.
 * Checking takes count^2 / 2 comparisons. */
int kvstore_read_part(const uint8_t *part, size_t part_bytes, uint64_t sum,
                      const struct kvstore_piece *pieces, size_t count, int level,
                      size_t streamed_bytes);

/* Take pieces in as a part, and sum it in the same pass.
 *
 * part    out: [part_bytes], apart from every place.
 * pieces  in:  [count], without codecs; their places are in, and may share bytes.
 * level   at most kvstore_level().
 * sum     out: what kvstore_xxh3_64 of the part is.
 *
 * Bytes are read once: whatever somebody changes meanwhile, the sum is that of the part.
 *
 * Returns OK, SHAPE, NULL, STRIDE, OVERLAP, FORMAT (a piece has a codec) or LEVEL. */
int kvstore_write_part(uint8_t *part, size_t part_bytes, const struct kvstore_piece *pieces,
                       size_t count, int level, uint64_t *sum);

/* Where a part lies in a frame, and which pieces it is. */
struct kvstore_frame_part {
    size_t start, stop, first, last;
};

/* Frames of one format, and the places of their payloads: docs/format.md, section 4. */
struct kvstore_frames {
    size_t frame_bytes, block_tokens, payload_offset;
    uint8_t head[32]; /* how a frame begins; its number, namespace and whether it has images are any */
    size_t first_part; /* parts of a frame that are left out before those below */
    const struct kvstore_frame_part *parts; /* in the order in which they lie; gaps are read too */
    size_t part_count;
    const struct kvstore_piece *pieces; /* with the places of block 0 */
    const ptrdiff_t *steps;  /* from a piece's place to that of the next block, in bytes; or */
    const ptrdiff_t *shifts; /* by block, from the places of block 0 to its own; NULL with steps */
    struct kvstore_piece *scratch; /* [piece_count], for one call at a time */
    size_t piece_count;
    int any_parent;   /* whether a block's hash does not follow from its parent's, which is any then */
    int checks_first; /* whether a bad frame's place keeps what it held: another pass over each */
};

/* Read frames from a file and hand their payloads out, each verified; stop at the first that is not
 * exactly what was asked for.
 *
 * file         a descriptor to pread from.
 * offsets      in:  [count], where the frames lie in it.
 * hashes       in:  [count + 1, 32]: the hash of the parent of the first block, then of each block.
 * ids          in:  [count, block_tokens], the token ids of the blocks.
 * first_block  number of the first block's place.
 * buffer       [frame_bytes], for one call at a time.
 * done         out: how many frames were good; the place of the one behind them holds anything,
 *              unless checks_first.
 *
 * A frame is good if its head begins as `head` and has those hashes and ids and its own sum, and
 * kvstore_read_part finds each of the parts good. Of parts that are not asked for nothing is read
 * but what lies between the head and the first one, if that is less than a read of its own costs.
 *
 * Returns OK, SHAPE, NULL, STRIDE, OVERLAP or LEVEL. */
int kvstore_read_frames(const struct kvstore_frames *format, int file, const int64_t *offsets,
                        size_t count, const uint8_t *hashes, const uint32_t *ids,
                        size_t first_block, uint8_t *buffer, int level, size_t streamed_bytes,
                        size_t *done);

/* What the values of a tree are. */
enum {
    KVSTORE_TREE_VALUES = 0, /* values of callers */
    KVSTORE_TREE_NAMED = 1,  /* databases: the main tree */
    KVSTORE_TREE_FREE = 2    /* lists of free pages, by transaction */
};

/* What is wrong with a page of a tree. Only READ is about the medium: errno says more. */
enum {
    KVSTORE_TREE_READ = 1,    /* the page cannot be read */
    KVSTORE_TREE_CUT = 2,     /* it, or a free list of it, lies behind the end of the file */
    KVSTORE_TREE_USE = 3,     /* it, or a page that it names, cannot be used or is in use already */
    KVSTORE_TREE_KIND = 4,    /* it is not the page of a tree that belongs there */
    KVSTORE_TREE_FORM = 5,    /* its nodes do not lie where a page has them */
    KVSTORE_TREE_ORDER = 6,   /* its keys do not ascend from those before */
    KVSTORE_TREE_NODE = 7,    /* it has a node of another kind than the tree's */
    KVSTORE_TREE_LIST = 8,    /* it has a free list that does not hold together */
    KVSTORE_TREE_COUNTERS = 9 /* with it the tree is larger than its record says */
};

/* The record of a database, as LMDB stores it. */
struct kvstore_tree {
    uint32_t pad;
    uint16_t flags, depth;
    uint64_t branches, leaves, overflow, entries, root;
};

/* A value that has pages of its own. */
struct kvstore_tree_value {
    uint64_t page, pages;
};

/* The page of a tree that is looked at, how many nodes it has, and the last key met. */
struct kvstore_tree_level {
    uint8_t page[4096], key[4096];
    size_t key_bytes, nodes;
};

/* One look at one file: LMDB 0.9, data version 1, on 64 bits, pages of 4,096 bytes. Places that are
 * written to have room for what a sound tree has; more is a fault. */
struct kvstore_tree_walk {
    int file;             /* a descriptor to pread from */
    uint64_t pages;       /* in: up to the last one in use */
    uint64_t transaction; /* in: the last one committed */
    uint8_t *used;        /* in/out: [pages / 8 + 1], a bit for each page, zero at first */
    uint64_t used_pages;  /* in/out: how many bits are set */
    uint64_t *below;      /* out: of branches, the pages below */
    struct kvstore_tree_value *values; /* out: of leaves, values that have pages of their own */
    struct kvstore_tree *named;        /* in/out: of leaves, databases */
    size_t below_room, value_room, named_room; /* in */
    size_t below_count, value_count;           /* out */
    size_t named_count;                        /* in/out */
    uint64_t entries;                          /* out: nodes */
    uint64_t page;                             /* out: where it is wrong */
    struct kvstore_tree_level level;           /* scratch */
};

/* Check the pages of a tree at one depth: the form of each, the order of keys through all of them,
 * and that they, their values' pages and those that they list as free are in use by nothing else. No
 * value is read but free lists. A file of any bytes does no harm, nor one that changes meanwhile.
 *
 * pages    in:  [count], in the order of their keys.
 * kind     what the values of the tree are.
 * is_leaf  whether they are to be leaves, or else branches.
 *
 * Cost: one pread a page, about 1 us where it is cached.
 *
 * Returns OK, NULL, or positive what is wrong, with the page. */
int kvstore_check_level(struct kvstore_tree_walk *walk, const uint64_t *pages, size_t count,
                        int kind, int is_leaf);

/* Copy keys and values of one size out of the leaf that LMDB has a value in.
 *
 * level   in/out: the key that all of the leaf must follow, none at first; then the leaf's last.
 * value   in a leaf that is mapped: the whole page is read, once.
 * rows    out: key after value, those of other sizes left out.
 * bytes   out: of the rows.
 *
 * Returns OK, NULL, or positive why the page is no leaf whose keys follow: rows hold anything. */
int kvstore_leaf_rows(struct kvstore_tree_level *level, const uint8_t *value, size_t key_bytes,
                      size_t value_bytes, uint8_t rows[4096], size_t *bytes);

/* cffi: end */

#endif
