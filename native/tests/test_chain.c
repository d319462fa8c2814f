/* The chained hashes under sanitizers: every length around the edges of SHA-256's blocks, in heap
 * blocks of the exact size. The digests are checked in tests/test_hash.py; here, that levels agree. */
#include "testing.h"

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
    puts("chain: ok");
}
