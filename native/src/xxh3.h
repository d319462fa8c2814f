/* XXH3, 64 bits, with seed 0 and the default secret: the checksum of a part, docs/format.md,
 * section 4. Written from the specification in xxHash's doc/xxhash_spec.md. Private to native/src.
 *
 * The length of an input is known in advance, so stripes need no look-ahead, and input in multiples
 * of a stripe is not buffered. */
#ifndef KVSTORE_XXH3_H
#define KVSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>

enum {
    XXH3_LANES = 8,
    XXH3_STRIPE = 64,
    XXH3_SHORT = 240, /* shorter inputs have no stripes, but a formula for each range of lengths */
    XXH3_BLOCK_STRIPES = 16 /* stripes after which the lanes are scrambled */
};

/* Mix whole stripes into the lanes; `first` is the number of the first stripe in the input.
 *
 * If target is not null, the stripes are copied there as well, with non-temporal stores if
 * is_streamed. Each byte of the data is read once, and the written bytes are mixed: the sum is that
 * of the copy even if the data changes meanwhile. */
typedef void xxh3_mix(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t stripes, size_t first,
                      uint8_t *target, int is_streamed);
xxh3_mix xxh3_mix_portable;

#if defined(__x86_64__)
#define KVSTORE_HAS_XXH3_AVX2 1
xxh3_mix xxh3_mix_avx2;
#endif

extern const uint8_t xxh3_secret[192];

/* State of a checksum. */
struct xxh3 {
    uint64_t lanes[XXH3_LANES];
    xxh3_mix *mix;
    uint64_t total, seen; /* bytes of the input, and bytes added so far */
    uint64_t striped;     /* how many of them are mixed as whole stripes; at least one is not */
    /* The stripe that ends at `striped`, then bytes of an incomplete stripe. The last stripe of an
     * input ends with it and overlaps another. */
    uint8_t held[XXH3_STRIPE + XXH3_SHORT];
};

/* Start the sum of `total` bytes. The processor must support the level. */
void xxh3_begin(struct xxh3 *sum, uint64_t total, int level);

/* Add the next bytes, of any number, `total` in all. Also copy them to target, unless it is null,
 * as xxh3_mix does. */
void xxh3_update(struct xxh3 *sum, const uint8_t *data, size_t bytes, uint8_t *target,
                 int is_streamed);

/* Return the sum after all bytes were added. */
uint64_t xxh3_end(const struct xxh3 *sum);

#endif
