/* What the native tests share. */
#ifndef KVSTORE_TESTING_H
#define KVSTORE_TESTING_H

#include "kvstore_native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Which level the tests run at. */
extern int test_level;
enum { LEVELS = 8 }; /* room for those to come */

void test_chain(void);
void test_codec(void);
void test_fp4(void);
void test_fp8(void);
void test_gather(void);
void test_part(void);
void test_tree(void);

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition);       \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

static const size_t BYTES[] = {4, 2, 2};

static inline uint32_t random_bits(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(state >> 32);
}

static inline void *exactly(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    EXPECT(memory != NULL);
    return memory;
}

/* A rule to unpack FP4 with: the one that allows a global scale. */
static inline int unpack_rule(int format) {
    return format == KVSTORE_NVFP4 ? KVSTORE_RULE_TORCHAO : KVSTORE_RULE_FLOOR;
}

/* A prepared codec. Those with a global scale of 1 are kept, as preparing takes its time here;
 * any other one is good until the next. */
static inline struct kvstore_codec *codec_of(int dtype, int format, int rule, float global_scale) {
    static struct kvstore_codec *kept[LEVELS][3][4][6];
    static struct kvstore_codec *last;
    struct kvstore_codec **address =
        global_scale == 1 ? &kept[test_level][dtype][format][rule] : &last;
    if (*address == NULL || address == &last) {
        free(*address);
        *address = aligned_alloc(64, (kvstore_codec_bytes() + 63) / 64 * 64);
        EXPECT(*address != NULL);
        EXPECT(kvstore_codec_prepare(*address, dtype, format, rule, global_scale, test_level,
                                     (size_t)1 << 10) == KVSTORE_OK);
    }
    return *address;
}

#endif
