/* Chained hashes of a prompt's blocks. docs/format.md, section 2. */
#include "bytes.h"
#include "kvstore_native.h"
#include "sha256.h"

#include <string.h>

enum {
    DIGEST = 32,
    PARENT = 8, /* offset of the parent's digest in a message, after the magic and block_tokens */
    TOKENS = PARENT + DIGEST,
    NO_IMAGES = 4, /* bytes after the tokens: a count of 0 */
    LENGTH = 8,    /* bytes at the end of SHA-256 padding: the length in bits */
    EDGES = 3 * SHA256_BLOCK
};

/* Common structure of the messages of all blocks. Each is hashed from three buffers: its first 64
 * bytes and its padded end, both in `edges`, and between them the tokens in place. Short messages
 * are entirely in `edges`. */
struct chain {
    sha256_mix *mix;
    uint8_t edges[EDGES];
    size_t first_bytes, middle_blocks, last_bytes; /* of a block's tokens */
    size_t last_start, last_blocks;                /* of the edges */
};

static struct chain chain_of(sha256_mix *mix, size_t block_tokens) {
    struct chain chain = {.mix = mix, .edges = {'k', 'v', 'b', '1'}};
    store_le32(chain.edges + 4, (uint32_t)block_tokens);
    const size_t bytes = 4 * block_tokens, room = SHA256_BLOCK - TOKENS;
    size_t end = TOKENS + bytes; /* of the tokens, in the edges */
    chain.first_bytes = bytes;
    if (bytes >= room) {
        chain.first_bytes = room;
        chain.middle_blocks = (bytes - room) / SHA256_BLOCK;
        chain.last_bytes = (bytes - room) % SHA256_BLOCK;
        chain.last_start = SHA256_BLOCK;
        end = SHA256_BLOCK + chain.last_bytes;
    }
    const size_t length = (end + NO_IMAGES + LENGTH) / SHA256_BLOCK * SHA256_BLOCK + SHA256_BLOCK;
    const uint64_t bits = 8 * (uint64_t)(TOKENS + bytes + NO_IMAGES);
    chain.edges[end + NO_IMAGES] = 0x80;
    store_be32(chain.edges + length - 8, (uint32_t)(bits >> 32));
    store_be32(chain.edges + length - 4, (uint32_t)bits);
    chain.last_blocks = (length - chain.last_start) / SHA256_BLOCK;
    return chain;
}

static void hash_block(struct chain *chain, const uint8_t *parent, const uint8_t *tokens,
                       uint8_t *digest) {
    uint32_t state[SHA256_WORDS];
    memcpy(state, sha256_start, sizeof state);
    memcpy(chain->edges + PARENT, parent, DIGEST);
    memcpy(chain->edges + TOKENS, tokens, chain->first_bytes);
    if (chain->last_start) {
        const uint8_t *middle = tokens + chain->first_bytes;
        const uint8_t *last = middle + chain->middle_blocks * SHA256_BLOCK;
        memcpy(chain->edges + chain->last_start, last, chain->last_bytes);
        chain->mix(state, chain->edges, 1);
        chain->mix(state, middle, chain->middle_blocks);
    }
    chain->mix(state, chain->edges + chain->last_start, chain->last_blocks);
    for (size_t i = 0; i < SHA256_WORDS; i++) {
        store_be32(digest + 4 * i, state[i]);
    }
}

static int begin(struct chain *chain, const uint8_t *root, const void *tokens, size_t count,
                 size_t block_tokens, int level, const uint8_t *digests) {
    sha256_mix *mix = sha256_mix_portable;
#ifdef KVSTORE_HAS_SHA_NI
    if (level > KVSTORE_LEVEL_PORTABLE && sha256_has_sha_ni()) {
        mix = sha256_mix_sha_ni;
    }
#endif
    if (level < KVSTORE_LEVEL_PORTABLE || level > kvstore_level()) {
        return KVSTORE_ERR_LEVEL;
    }
    if (count > 0 && (root == NULL || tokens == NULL || digests == NULL)) {
        return KVSTORE_ERR_NULL;
    }
    if (count > 0 && (block_tokens == 0 || block_tokens > UINT32_MAX)) {
        return KVSTORE_ERR_SHAPE;
    }
    *chain = chain_of(mix, block_tokens);
    return KVSTORE_OK;
}

int kvstore_block_hashes(const uint8_t *root, const uint32_t *tokens, size_t blocks,
                         size_t block_tokens, int level, uint8_t *digests) {
    struct chain chain;
    const int code = begin(&chain, root, tokens, blocks, block_tokens, level, digests);
    for (size_t i = 0; code == KVSTORE_OK && i < blocks; i++) {
        const uint8_t *parent = i ? digests + (i - 1) * DIGEST : root;
        hash_block(&chain, parent, (const uint8_t *)(tokens + i * block_tokens),
                   digests + i * DIGEST);
    }
    return code;
}

/* Copy token ids of one integer type; return whether all are in range. Branch-free, so that
 * compilers vectorise it. */
static int copy_ids(const void *tokens, int kind, size_t first, size_t count, uint32_t *ids) {
    uint64_t above = 0; /* bits that valid ids do not have */
#define COPY(type)                                                                                 \
    for (size_t i = 0; i < count; i++) {                                                           \
        const uint64_t token = (uint64_t)((const type *)tokens)[first + i];                        \
        above |= token >> 32;                                                                      \
        ids[i] = (uint32_t)token;                                                                  \
    }                                                                                              \
    break
    switch (kind) {
    case KVSTORE_INT32:
        COPY(int32_t);
    case KVSTORE_UINT32:
        memcpy(ids, (const uint32_t *)tokens + first, count * sizeof *ids);
        break;
    case KVSTORE_INT64:
        COPY(int64_t);
    default:
        COPY(uint64_t);
    }
#undef COPY
    return above == 0;
}

int kvstore_identify(const uint8_t *root, const void *tokens, int kind, size_t count,
                     size_t block_tokens, int level, uint32_t *ids, uint8_t *digests) {
    struct chain chain;
    if (kind < KVSTORE_INT32 || kind > KVSTORE_UINT64) {
        return KVSTORE_ERR_DTYPE;
    }
    const int code = begin(&chain, root, tokens, count, block_tokens, level, digests);
    if (code != KVSTORE_OK || count == 0) {
        return code;
    }
    if (ids == NULL) {
        return KVSTORE_ERR_NULL;
    }
    const size_t blocks = count / block_tokens;
    for (size_t i = 0; i <= blocks; i++) {
        const size_t at = i * block_tokens, some = i < blocks ? block_tokens : count - at;
        if (!copy_ids(tokens, kind, at, some, ids + at)) {
            return KVSTORE_ERR_RANGE;
        }
        if (i < blocks) {
            const uint8_t *parent = i ? digests + (i - 1) * DIGEST : root;
            hash_block(&chain, parent, (const uint8_t *)(ids + at), digests + i * DIGEST);
        }
    }
    return KVSTORE_OK;
}
