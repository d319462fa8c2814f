/* Words as bytes in a given order on any machine. Private to native/src. */
#ifndef KVSTORE_BYTES_H
#define KVSTORE_BYTES_H

#include <stdint.h>

/* The lowest byte first. */
static inline void store_le32(uint8_t *target, uint32_t word) {
    for (int i = 0; i < 4; i++) {
        target[i] = (uint8_t)(word >> 8 * i);
    }
}

static inline uint16_t load_le16(const uint8_t *source) {
    return (uint16_t)(source[0] | source[1] << 8);
}

static inline uint32_t load_le32(const uint8_t *source) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        word |= (uint32_t)source[i] << 8 * i;
    }
    return word;
}

static inline uint64_t load_le64(const uint8_t *source) {
    return load_le32(source) | (uint64_t)load_le32(source + 4) << 32;
}

/* The highest byte first. */
static inline void store_be32(uint8_t *target, uint32_t word) {
    for (int i = 0; i < 4; i++) {
        target[i] = (uint8_t)(word >> (24 - 8 * i));
    }
}

#endif
