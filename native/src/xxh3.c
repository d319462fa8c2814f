#include "xxh3.h"
#include "bytes.h"
#include "kvstore_native.h"

#include <string.h>

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                      PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                      PRIME64_5 = 0x27D4EB2F165667C5;
static const uint64_t PRIME_MX1 = 0x165667919E3779F9, PRIME_MX2 = 0x9FB21C651E98DF25;

enum {
    MIDDLE = 128,      /* up to this size inputs are read from both ends to the middle */
    SCRAMBLE_KEY = 128 /* offset in the secret: its last 64 bytes */
};

const uint8_t xxh3_secret[192] = {
    0xB8, 0xFE, 0x6C, 0x39, 0x23, 0xA4, 0x4B, 0xBE, 0x7C, 0x01, 0x81, 0x2C, 0xF7, 0x21, 0xAD, 0x1C,
    0xDE, 0xD4, 0x6D, 0xE9, 0x83, 0x90, 0x97, 0xDB, 0x72, 0x40, 0xA4, 0xA4, 0xB7, 0xB3, 0x67, 0x1F,
    0xCB, 0x79, 0xE6, 0x4E, 0xCC, 0xC0, 0xE5, 0x78, 0x82, 0x5A, 0xD0, 0x7D, 0xCC, 0xFF, 0x72, 0x21,
    0xB8, 0x08, 0x46, 0x74, 0xF7, 0x43, 0x24, 0x8E, 0xE0, 0x35, 0x90, 0xE6, 0x81, 0x3A, 0x26, 0x4C,
    0x3C, 0x28, 0x52, 0xBB, 0x91, 0xC3, 0x00, 0xCB, 0x88, 0xD0, 0x65, 0x8B, 0x1B, 0x53, 0x2E, 0xA3,
    0x71, 0x64, 0x48, 0x97, 0xA2, 0x0D, 0xF9, 0x4E, 0x38, 0x19, 0xEF, 0x46, 0xA9, 0xDE, 0xAC, 0xD8,
    0xA8, 0xFA, 0x76, 0x3F, 0xE3, 0x9C, 0x34, 0x3F, 0xF9, 0xDC, 0xBB, 0xC7, 0xC7, 0x0B, 0x4F, 0x1D,
    0x8A, 0x51, 0xE0, 0x4B, 0xCD, 0xB4, 0x59, 0x31, 0xC8, 0x9F, 0x7E, 0xC9, 0xD9, 0x78, 0x73, 0x64,
    0xEA, 0xC5, 0xAC, 0x83, 0x34, 0xD3, 0xEB, 0xC3, 0xC5, 0x81, 0xA0, 0xFF, 0xFA, 0x13, 0x63, 0xEB,
    0x17, 0x0D, 0xDD, 0x51, 0xB7, 0xF0, 0xDA, 0x49, 0xD3, 0x16, 0x55, 0x26, 0x29, 0xD4, 0x68, 0x9E,
    0x2B, 0x16, 0xBE, 0x58, 0x7D, 0x47, 0xA1, 0xFC, 0x8F, 0xF8, 0xB8, 0xD1, 0x7A, 0xD0, 0x31, 0xCE,
    0x45, 0xCB, 0x3A, 0x8F, 0x95, 0x16, 0x04, 0x28, 0xAF, 0xD7, 0xFB, 0xCA, 0xBB, 0x4B, 0x40, 0x7E,
};

static uint64_t secret_at(size_t byte) { return load_le64(xxh3_secret + byte); }

static uint64_t rotate(uint64_t word, int by) { return word << by | word >> (64 - by); }

/* Both halves of the product of 128 bits, one folded onto the other. */
static uint64_t fold(uint64_t a, uint64_t b) {
    const uint64_t mask = 0xFFFFFFFF;
    const uint64_t low = (a & mask) * (b & mask), high = (a >> 32) * (b >> 32);
    const uint64_t cross = (a >> 32) * (b & mask) + (low >> 32);
    const uint64_t other = (a & mask) * (b >> 32) + (cross & mask);
    return (other << 32 | (low & mask)) ^ (high + (cross >> 32) + (other >> 32));
}

static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

/* That of XXH64, for the shortest inputs. */
static uint64_t old_avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

static uint64_t mix_16(const uint8_t *data, size_t key) {
    return fold(load_le64(data) ^ secret_at(key), load_le64(data + 8) ^ secret_at(key + 8));
}

static uint64_t sum_to_16(const uint8_t *data, size_t bytes) {
    if (bytes > 8) {
        const uint64_t low = load_le64(data) ^ secret_at(24) ^ secret_at(32);
        const uint64_t high = load_le64(data + bytes - 8) ^ secret_at(40) ^ secret_at(48);
        return avalanche(bytes + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (bytes >= 4) {
        const uint64_t both = load_le32(data + bytes - 4) + ((uint64_t)load_le32(data) << 32);
        uint64_t hash = both ^ secret_at(8) ^ secret_at(16);
        hash = (hash ^ rotate(hash, 49) ^ rotate(hash, 24)) * PRIME_MX2;
        hash = (hash ^ ((hash >> 35) + bytes)) * PRIME_MX2;
        return hash ^ hash >> 28;
    }
    if (bytes == 0) {
        return old_avalanche(secret_at(56) ^ secret_at(64));
    }
    const uint32_t all = (uint32_t)data[0] << 16 | (uint32_t)data[bytes / 2] << 24 |
                         data[bytes - 1] | (uint32_t)bytes << 8;
    return old_avalanche((uint64_t)all ^ load_le32(xxh3_secret) ^ load_le32(xxh3_secret + 4));
}

static uint64_t sum_to_240(const uint8_t *data, size_t bytes) {
    uint64_t hash = bytes * PRIME64_1;
    if (bytes <= MIDDLE) {
        for (size_t i = 0; i <= (bytes - 1) / 32; i++) {
            hash += mix_16(data + 16 * i, 32 * i);
            hash += mix_16(data + bytes - 16 * (i + 1), 32 * i + 16);
        }
        return avalanche(hash);
    }
    for (size_t i = 0; i < 8; i++) {
        hash += mix_16(data + 16 * i, 16 * i);
    }
    hash = avalanche(hash);
    for (size_t i = 8; i < bytes / 16; i++) {
        hash += mix_16(data + 16 * i, 16 * (i - 8) + 3);
    }
    return avalanche(hash + mix_16(data + bytes - 16, 136 - 17));
}

static void mix_stripe(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t key) {
    for (size_t i = 0; i < XXH3_LANES; i++) {
        const uint64_t word = load_le64(data + 8 * i);
        const uint64_t keyed = word ^ secret_at(key + 8 * i);
        lanes[i ^ 1] += word;
        lanes[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
}

static void scramble(uint64_t lanes[XXH3_LANES]) {
    for (size_t i = 0; i < XXH3_LANES; i++) {
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ secret_at(SCRAMBLE_KEY + 8 * i)) * PRIME32_1;
    }
}

void xxh3_mix_portable(uint64_t lanes[XXH3_LANES], const uint8_t *data, size_t stripes,
                       size_t first, uint8_t *target, int is_streamed) {
    (void)is_streamed;
    for (size_t i = 0; i < stripes; i++, data += XXH3_STRIPE) {
        const uint8_t *stripe = data;
        if (target != NULL) {
            memcpy(target, data, XXH3_STRIPE);
            __asm__ volatile("" ::: "memory"); /* the compiler may not read data again instead */
            stripe = target;
            target += XXH3_STRIPE;
        }
        const size_t number = (first + i) % XXH3_BLOCK_STRIPES;
        mix_stripe(lanes, stripe, 8 * number);
        if (number == XXH3_BLOCK_STRIPES - 1) {
            scramble(lanes);
        }
    }
}

void xxh3_begin(struct xxh3 *sum, uint64_t total, int level) {
    const uint64_t start[XXH3_LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                        PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(sum->lanes, start, sizeof start);
    sum->mix = xxh3_mix_portable;
#ifdef KVSTORE_HAS_XXH3_AVX2
    if (level >= KVSTORE_LEVEL_AVX2) {
        sum->mix = xxh3_mix_avx2;
    }
#else
    (void)level;
#endif
    sum->total = total;
    sum->seen = 0;
    sum->striped = total > XXH3_SHORT ? (total - 1) / XXH3_STRIPE * XXH3_STRIPE : 0;
}

void xxh3_update(struct xxh3 *sum, const uint8_t *data, size_t bytes, uint8_t *target,
                 int is_streamed) {
    uint8_t *waiting = sum->held + XXH3_STRIPE;
    while (bytes > 0) {
        const uint64_t left = sum->seen < sum->striped ? sum->striped - sum->seen : 0;
        const size_t have = (size_t)(left ? sum->seen % XXH3_STRIPE : sum->seen - sum->striped);
        const size_t first = (size_t)(sum->seen / XXH3_STRIPE % XXH3_BLOCK_STRIPES);
        size_t taken = bytes;
        const uint8_t *copied = target ? target : data;
        if (left && have == 0 && bytes >= XXH3_STRIPE) {
            taken = (size_t)(bytes < left ? bytes / XXH3_STRIPE * XXH3_STRIPE : left);
            sum->mix(sum->lanes, data, taken / XXH3_STRIPE, first, target, is_streamed);
            if (taken == left) {
                memcpy(sum->held, copied + taken - XXH3_STRIPE, XXH3_STRIPE);
            }
        } else {
            if (left && taken > XXH3_STRIPE - have) {
                taken = XXH3_STRIPE - have;
            }
            memcpy(waiting + have, data, taken);
            if (target != NULL) {
                __asm__ volatile("" ::: "memory"); /* as in xxh3_mix_portable */
                memcpy(target, waiting + have, taken);
            }
            if (left && have + taken == XXH3_STRIPE) {
                sum->mix(sum->lanes, waiting, 1, first, NULL, 0);
                memcpy(sum->held, waiting, XXH3_STRIPE);
            }
        }
        sum->seen += taken;
        data += taken;
        target = target ? target + taken : NULL;
        bytes -= taken;
    }
}

uint64_t xxh3_end(const struct xxh3 *sum) {
    const uint8_t *waiting = sum->held + XXH3_STRIPE;
    const size_t total = (size_t)sum->total;
    if (total <= 16) {
        return sum_to_16(waiting, total);
    }
    if (total <= XXH3_SHORT) {
        return sum_to_240(waiting, total);
    }
    uint64_t lanes[XXH3_LANES];
    memcpy(lanes, sum->lanes, sizeof lanes);
    mix_stripe(lanes, sum->held + (sum->total - sum->striped), SCRAMBLE_KEY - 7);
    uint64_t hash = sum->total * PRIME64_1;
    for (size_t i = 0; i < XXH3_LANES; i += 2) {
        hash += fold(lanes[i] ^ secret_at(11 + 8 * i), lanes[i + 1] ^ secret_at(19 + 8 * i));
    }
    return avalanche(hash);
}

int kvstore_xxh3_64(const void *data, size_t bytes, int level, uint64_t *sum) {
    if (level < KVSTORE_LEVEL_PORTABLE || level > kvstore_level()) {
        return KVSTORE_ERR_LEVEL;
    }
    if (sum == NULL || (data == NULL && bytes > 0)) {
        return KVSTORE_ERR_NULL;
    }
    struct xxh3 all;
    xxh3_begin(&all, bytes, level);
    xxh3_update(&all, data, bytes, NULL, 0);
    *sum = xxh3_end(&all);
    return KVSTORE_OK;
}
