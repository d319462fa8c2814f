/* The chained hashes under sanitizers: every length around the edges of SHA-256's blocks, in heap
 * blocks of the exact size. The digests are checked in tests/identity/test_hash.py; here, that levels agree.
 */
#include "testing.h"

/* The same by kvstore_identify, of each kind, in memory of the exact size, with tokens behind the
 * last block. */
static void identify_all(const uint8_t *root, const uint32_t *tokens, size_t whole,
                         size_t block_tokens, const uint8_t *digests) {
    const size_t count = whole + random_bits() % block_tokens, blocks = whole / block_tokens;
    for (int kind = KVSTORE_INT32; kind <= KVSTORE_UINT64; kind++) {
        const size_t size = kind >= KVSTORE_INT64 ? 8 : 4;
        uint8_t *given = exactly(size * count), *found = exactly(32 * blocks);
        uint32_t *ids = exactly(4 * count);
        int is_small = 1;
        for (size_t i = 0; i < count; i++) {
            const uint64_t token = i < whole ? tokens[i] : 7;
            memcpy(given + i * size, &token, size); /* little-endian, as the function asks for */
            is_small &= token < 0x80000000;
        }
        const int code = kvstore_identify(root, given, kind, count, block_tokens, 0, ids, found);
        if (kind == KVSTORE_INT32 && !is_small) {
            EXPECT(code == KVSTORE_ERR_RANGE);
        } else {
            EXPECT(code == KVSTORE_OK);
            EXPECT(memcmp(ids, tokens, 4 * whole) == 0 && memcmp(found, digests, 32 * blocks) == 0);
        }
        free(given);
        free(found);
        free(ids);
    }
}

void test_chain(void) {
    uint8_t root[32];
    for (size_t i = 0; i < sizeof root; i++) {
        root[i] = (uint8_t)random_bits();
    }
    for (size_t block_tokens = 1; block_tokens < 70; block_tokens++) {
        for (size_t blocks = 1; blocks < 4; blocks++) {
            uint32_t *tokens = exactly(4 * blocks * block_tokens);
            uint8_t *digests = exactly(32 * blocks), *again = exactly(32 * blocks);
            for (size_t i = 0; i < blocks * block_tokens; i++) {
                tokens[i] = random_bits();
            }
            EXPECT(kvstore_block_hashes(root, tokens, blocks, block_tokens, 0, digests) ==
                   KVSTORE_OK);
            for (int level = 1; level <= kvstore_level(); level++) {
                EXPECT(kvstore_block_hashes(root, tokens, blocks, block_tokens, level, again) ==
                       KVSTORE_OK);
                EXPECT(memcmp(digests, again, 32 * blocks) == 0);
            }
            identify_all(root, tokens, blocks * block_tokens, block_tokens, digests);
            free(tokens);
            free(digests);
            free(again);
        }
    }
    uint8_t digest[32] = {0xA5};
    const uint32_t token[1] = {0};
    EXPECT(kvstore_block_hashes(NULL, token, 1, 1, 0, digest) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_block_hashes(root, NULL, 1, 1, 0, digest) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_block_hashes(root, token, 1, 1, 0, NULL) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_block_hashes(root, token, 1, 0, 0, digest) == KVSTORE_ERR_SHAPE);
    EXPECT(kvstore_block_hashes(root, token, 1, 1, -1, digest) == KVSTORE_ERR_LEVEL);
    EXPECT(kvstore_block_hashes(root, token, 1, 1, kvstore_level() + 1, digest) ==
           KVSTORE_ERR_LEVEL);
    EXPECT(kvstore_block_hashes(NULL, NULL, 0, 1, 0, NULL) == KVSTORE_OK);
    EXPECT(digest[0] == 0xA5);
    const int64_t far[2] = {0, -1};
    uint32_t ids[2];
    EXPECT(kvstore_identify(root, far, KVSTORE_INT64, 2, 3, 0, ids, digest) == KVSTORE_ERR_RANGE);
    EXPECT(kvstore_identify(root, far, KVSTORE_INT64, 1, 3, 0, NULL, digest) == KVSTORE_ERR_NULL);
    EXPECT(kvstore_identify(root, far, 0, 1, 3, 0, ids, digest) == KVSTORE_ERR_DTYPE);
    EXPECT(kvstore_identify(root, far, 5, 1, 3, 0, ids, digest) == KVSTORE_ERR_DTYPE);
    EXPECT(kvstore_identify(NULL, NULL, KVSTORE_INT32, 0, 3, 0, NULL, NULL) == KVSTORE_OK);
    EXPECT(digest[0] == 0xA5);
    puts("chain: ok");
}
